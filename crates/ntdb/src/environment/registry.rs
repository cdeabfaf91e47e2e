//! One environment per file and process, however often and by whatever name the file is opened; and what a fork does to
//! them.
//!
//! The registry's mutex is held across a fork, so that no child inherits it locked. In the child the descriptors that hold the parent's
//! slot locks are closed, lest the child keep a dead parent's locks alive; the child attaches anew on first use.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::shm::pin;
use crate::storage::file::FileId;
use crate::storage::{fork, inherited};

use super::Environment;

/// The open environments of this process.
pub type Registry = HashMap<FileId, Vec<Weak<Environment>>>;

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);
static HOOKED: AtomicBool = AtomicBool::new(false);

/// Locks the registry; the first time also prepares for forks.
pub fn lock() -> MutexGuard<'static, Option<Registry>> {
    let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    if !HOOKED.swap(true, AcqRel) {
        // Without the hooks a child must not use what it inherits; it then finds its session stale all the same.
        let _ = fork::register_hooks(prepare, parent, child);
    }
    registry.get_or_insert_with(HashMap::new);
    registry
}

/// Finds a living environment of a file; `usable` says whether it will do.
pub fn find(
    registry: &mut Registry,
    id: FileId,
    usable: impl Fn(&Environment) -> bool,
) -> Option<Arc<Environment>> {
    let entries = registry.get_mut(&id)?;
    entries.retain(|entry| entry.strong_count() > 0);
    entries.iter().filter_map(Weak::upgrade).find(|environment| usable(environment))
}

/// Adds an environment.
pub fn insert(registry: &mut Registry, id: FileId, environment: &Arc<Environment>) {
    registry.retain(|_, entries| {
        entries.retain(|entry| entry.strong_count() > 0);
        !entries.is_empty()
    });
    registry.entry(id).or_default().push(Arc::downgrade(environment));
}

thread_local! {
    /// The registry, held by a forking thread from before the fork until after it.
    static HELD: RefCell<Option<MutexGuard<'static, Option<Registry>>>> =
        const { RefCell::new(None) };
}

extern "C" fn prepare() {
    let guard = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    pin::before_fork();
    inherited::before_fork();
    // An error means that the thread is ending; then it does without.
    let _ = HELD.try_with(|held| held.replace(Some(guard)));
}

extern "C" fn parent() {
    inherited::after_fork(false);
    pin::after_fork();
    let _ = HELD.try_with(|held| held.replace(None));
}

extern "C" fn child() {
    let held = HELD.try_with(|held| held.replace(None)).ok().flatten();
    inherited::after_fork(true);
    pin::after_fork();
    drop(held);
}
