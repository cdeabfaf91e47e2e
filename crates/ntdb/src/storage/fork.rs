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

/// As [`generation`], but 0 in a child that has not asked for it yet.
#[inline(always)]
pub fn generation_if_armed() -> u64 {
    // SAFETY: as above.
    unsafe { &*WORD.load(Ordering::Acquire) }.load(Ordering::Relaxed)
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

/// A fork handler of the C library.
pub type Handler = extern "C" fn();

/// Has `prepare` called in the parent before every fork, and `parent` and `child` after it, each in
/// the process it is named after, all on the forking thread; of several registrations the last one
/// is prepared first and released last. A fork already under way in another thread calls none of
/// them.
///
/// Registrations last for ever: call this once per purpose. `child` may do only what is allowed
/// after a fork of a process with several threads: in essence, store, release what `prepare` took,
/// and close descriptors.
///
/// # Errors
/// `ENOMEM`.
pub fn register_hooks(prepare: Handler, parent: Handler, child: Handler) -> io::Result<()> {
    at_fork(Some(prepare), Some(parent), Some(child))
}

fn at_fork(
    prepare: Option<Handler>,
    parent: Option<Handler>,
    child: Option<Handler>,
) -> io::Result<()> {
    let widen =
        |handler: Option<Handler>| handler.map(|handler| handler as unsafe extern "C" fn());
    // SAFETY: safe functions that live for ever.
    match unsafe { libc::pthread_atfork(widen(prepare), widen(parent), widen(child)) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::testing::{assert_exit_ok, in_child};
    use std::sync::{Mutex, MutexGuard};

    #[test]
    fn stays_the_same_in_all_threads_of_a_process() {
        let here = generation();
        assert_ne!(here, 0);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(generation)).collect();
            for thread in threads {
                assert_eq!(thread.join().unwrap(), here);
            }
        });
        assert_eq!(generation(), here);
    }

    #[test]
    fn grows_from_parent_to_child_to_grandchild() {
        let parent = generation();
        assert_exit_ok(in_child(|| {
            let child = generation();
            assert!(child > parent, "{child} > {parent}");
            assert_eq!(generation(), child);
            assert_exit_ok(in_child(|| {
                assert!(generation() > child);
                0
            }));
            assert_eq!(generation(), child);
            0
        }));
        assert_eq!(generation(), parent);
    }

    #[test]
    fn threads_of_a_new_child_agree() {
        generation();
        assert_exit_ok(in_child(|| {
            let barrier = std::sync::Barrier::new(4);
            let seen: Vec<u64> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            barrier.wait();
                            generation()
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(seen.iter().all(|&value| value == seen[0]), "{seen:?}");
            0
        }));
    }

    #[test]
    fn a_child_made_by_a_naked_system_call_is_noticed() {
        let parent = generation();
        // SAFETY: as fork(), but without the C library's handlers; the child only loads, stores and
        // leaves.
        let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        assert!(pid >= 0);
        if pid == 0 {
            let changed = generation() > parent;
            // SAFETY: leaves at once.
            unsafe { libc::_exit(i32::from(!changed)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(pid as i32, &mut status, 0) }, pid as i32);
        assert_exit_ok(status);
    }

    #[test]
    fn the_fallback_word_is_cleared_in_children() {
        // SAFETY: a static.
        let word = unsafe { &*clear_by_fork_handler() };
        word.store(5, Ordering::Relaxed);
        assert_exit_ok(in_child(|| i32::from(word.load(Ordering::Relaxed) != 0)));
        assert_eq!(word.load(Ordering::Relaxed), 5);
    }

    // A registry as the database's: its mutex is held across the fork.
    static REGISTRY: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    static HELD: AtomicPtr<MutexGuard<'static, Vec<u32>>> = AtomicPtr::new(ptr::null_mut());
    static CHILDREN: AtomicU64 = AtomicU64::new(0);

    extern "C" fn prepare() {
        let guard = Box::new(REGISTRY.lock().unwrap());
        HELD.store(Box::into_raw(guard), Ordering::Release);
    }
    extern "C" fn parent() {
        // SAFETY: made by `prepare` on this thread.
        drop(unsafe { Box::from_raw(HELD.load(Ordering::Acquire)) });
    }
    extern "C" fn child() {
        CHILDREN.fetch_add(1, Ordering::Relaxed);
        parent();
    }

    #[test]
    fn a_mutex_held_by_the_hooks_is_whole_in_the_child() {
        // In a child of its own, so that the other tests' forks don't run these hooks.
        assert_exit_ok(in_child(|| {
            register_hooks(prepare, parent, child).unwrap();
            let stop = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let mut registry = REGISTRY.lock().unwrap();
                        registry.push(1);
                        registry.push(2);
                        if registry.len() > 100 {
                            registry.clear();
                        }
                    }
                });
                for _ in 0..50 {
                    let status = in_child(|| {
                        let whole = REGISTRY.try_lock().is_ok_and(|r| r.len() % 2 == 0);
                        i32::from(!whole || CHILDREN.load(Ordering::Relaxed) != 1)
                    });
                    if status != 0 {
                        stop.store(true, Ordering::Relaxed);
                    }
                    assert_exit_ok(status);
                }
                stop.store(true, Ordering::Relaxed);
            });
            i32::from(CHILDREN.load(Ordering::Relaxed) != 0)
        }));
    }
}
