//! Lock descriptors that no forked child may keep.
//!
//! A lock ends when the last descriptor of its description is closed, so a child that kept one would hold its parent's lock, also
//! against itself. Every descriptor that takes locks for this process is therefore listed from before its first lock until it is
//! closed: whoever owns it by then, a session, an opening in another thread, or an environment that is just being dropped. The
//! list is held across a fork, and the child closes what is in it.

use std::cell::RefCell;
use std::io;
use std::sync::atomic::AtomicI32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::ofd::{OfdFile, close_descriptor};

/// The numbers of the descriptors, -1 for those that are closed.
type List = Vec<Weak<AtomicI32>>;

static LIST: Mutex<List> = Mutex::new(Vec::new());

thread_local! {
    /// The list, held by a forking thread from before the fork until after it.
    static HELD: RefCell<Option<MutexGuard<'static, List>>> = const { RefCell::new(None) };
}

/// Holds the list still. Whoever opens or closes a listed descriptor does so meanwhile.
pub fn lock() -> MutexGuard<'static, Vec<Weak<AtomicI32>>> {
    // Nothing panics while it is held; and if so, the list is whole.
    LIST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a descriptor by `open` and lists it.
pub fn open(open: impl FnOnce() -> io::Result<OfdFile>) -> io::Result<OfdFile> {
    let mut list = lock();
    let mut file = open()?;
    list.retain(|entry| entry.strong_count() > 0);
    list.push(Arc::downgrade(file.list()));
    Ok(file)
}

/// To be called before a fork, and on both sides of it afterwards [`after_fork`].
pub fn before_fork() {
    let list = lock();
    // An error means that the thread is ending; then it does without.
    let _ = HELD.try_with(|held| held.replace(Some(list)));
}

/// Ends what [`before_fork`] began; in the child, closes everything listed first.
pub fn after_fork(is_child: bool) {
    let Ok(Some(list)) = HELD.try_with(|held| held.replace(None)) else { return };
    if is_child {
        for descriptor in list.iter().filter_map(Weak::upgrade) {
            close_descriptor(&descriptor);
        }
    }
}
