//! Knowing that one is a forked child.
//!
//! A child inherits guards, thread-locals and descriptors that mean something only in its parent.
//! Whatever must not be inherited notes [`generation`] when it is made and compares later: in a
//! child it differs. The number lies in a page that the kernel clears in every child
//! (`MADV_WIPEONFORK`), however the child was made; finding 0 there, the child arms it with the
//! next number. The counter itself lies in ordinary memory, which a child inherits, so its number
//! is greater than any that its ancestors had used before the fork. Brothers may have the same
//! number; they never meet, for memory is inherited downwards only.
//!
//! On a kernel without `MADV_WIPEONFORK` a fork handler of the C library clears the word; a child
//! made by a naked system call then goes unnoticed.
//!
//! [`register_hooks`] lets a registry of open databases hold its mutex across the fork, lest the
//! child inherit it locked by a thread that it does not have, and close descriptors in the child.

use std::io;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use super::mapping::host_page_bytes;

/// Stands in until the page is mapped; always 0, which means "not armed".
static UNARMED: AtomicU64 = AtomicU64::new(0);
/// The word that children find cleared.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new((&raw const UNARMED).cast_mut());
/// The last number given out, here or in an ancestor.
static LAST: AtomicU64 = AtomicU64::new(0);

/// A number, never 0, that stays the same in this process and is another one in a forked child.
#[inline]
pub fn generation() -> u64 {
    // SAFETY: points to `UNARMED` or to the mapped word, both of which live for ever.
    let word = unsafe { &*WORD.load(Ordering::Acquire) };
    match word.load(Ordering::Relaxed) {
        0 => arm(),
        generation => generation,
    }
}

#[cold]
fn arm() -> u64 {
    let word = word();
    // The number first, the word second: a fork in between leaves the child a counter that already
    // includes it.
    let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    match word.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => next,
        Err(armed_by_another_thread) => armed_by_another_thread,
    }
}

fn word() -> &'static AtomicU64 {
    let mut current = WORD.load(Ordering::Acquire);
    if ptr::eq(current, &UNARMED) {
        let fresh = map_word();
        current = match WORD.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                // The other thread's page is as good; this one is left to the process's end, which
                // happens once at most for each thread that came first.
                other
            }
        };
    }
    // SAFETY: mapped words are never unmapped.
    unsafe { &*current }
}

/// A word that reads 0 in forked children, by the kernel's or the C library's help.
fn map_word() -> *mut AtomicU64 {
    // SAFETY: a new range at an address of the kernel's choosing disturbs nothing.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            host_page_bytes(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page != libc::MAP_FAILED {
        // SAFETY: the page was just mapped and belongs to nobody else.
        if unsafe { libc::madvise(page, host_page_bytes(), libc::MADV_WIPEONFORK) } == 0 {
            return page.cast();
        }
        // SAFETY: as above; nothing points into it.
        unsafe { libc::munmap(page, host_page_bytes()) };
    }
    clear_by_fork_handler()
}

/// The word for kernels that cannot wipe: a static, cleared by the C library's fork handler.
fn clear_by_fork_handler() -> *mut AtomicU64 {
    static CLEARED_BY_HANDLER: AtomicU64 = AtomicU64::new(0);
    static REGISTERED: Once = Once::new();
    extern "C" fn child() {
        CLEARED_BY_HANDLER.store(0, Ordering::Relaxed);
    }
    REGISTERED.call_once(|| {
        at_fork(None, None, Some(child)).expect("registering a fork handler needs a little memory");
    });
    (&raw const CLEARED_BY_HANDLER).cast_mut()
}

type Handler = extern "C" fn();

fn at_fork(
    prepare: Option<Handler>,
    parent: Option<Handler>,
    child: Option<Handler>,
) -> io::Result<()> {
    let widen =
        |handler: Option<Handler>| handler.map(|handler| handler as unsafe extern "C" fn());
    // SAFETY: the handlers are functions of this crate that live for ever.
    match unsafe { libc::pthread_atfork(widen(prepare), widen(parent), widen(child)) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

struct Hooks {
    prepare: fn(),
    parent: fn(),
    child: fn(),
}

/// The hooks in force; fork handlers may not lock, so this is a list of one.
static HOOKS: AtomicPtr<Hooks> = AtomicPtr::new(ptr::null_mut());

fn hooks() -> Option<&'static Hooks> {
    // SAFETY: hooks are leaked boxes, never freed.
    unsafe { HOOKS.load(Ordering::Acquire).as_ref() }
}

extern "C" fn run_prepare() {
    if let Some(hooks) = hooks() {
        (hooks.prepare)();
    }
}

extern "C" fn run_parent() {
    if let Some(hooks) = hooks() {
        (hooks.parent)();
    }
}

extern "C" fn run_child() {
    if let Some(hooks) = hooks() {
        (hooks.child)();
    }
}

/// Has `prepare` called in the parent before every fork, and `parent` and `child` after it, each in
/// the process it is named after, all on the forking thread.
///
/// There is one set of hooks in a process: the first call counts and returns true; later ones
/// change nothing. `child` may do only what is allowed after a fork of a process with several
/// threads (in essence: store, and close descriptors).
///
/// # Errors
/// `ENOMEM`.
pub fn register_hooks(prepare: fn(), parent: fn(), child: fn()) -> io::Result<bool> {
    let fresh = Box::into_raw(Box::new(Hooks { prepare, parent, child }));
    if HOOKS.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err()
    {
        // SAFETY: never published.
        drop(unsafe { Box::from_raw(fresh) });
        return Ok(false);
    }
    at_fork(Some(run_prepare), Some(run_parent), Some(run_child)).map(|()| true)
}
