//! Sleeping on a word of memory, also of memory that processes share.
//!
//! The kernel compares the word with the expected value and goes to sleep in one step, so a change
//! followed by a wake is never missed. A waiter may wake for no reason: callers always look at the
//! word again. The word is only a hint for sleeping; a waiter that dies leaves nothing behind.

use std::io;
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Why [`wait`] returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// Somebody called [`wake`], or it only seems so.
    Woken,
    /// The word did not hold the expected value.
    Changed,
    /// The time is over.
    TimedOut,
}

/// Sleeps while `word` holds `expected`, until somebody wakes it or the time is over.
///
/// Signals don't end the sleep, and don't lengthen it.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> Wake {
    wait_as(word, expected, timeout, ANY_CLASS)
}

/// Classes of sleepers are the bits of a number.
const ANY_CLASS: u32 = libc::FUTEX_BITSET_MATCH_ANY as u32;

/// As [`wait`], as a sleeper of these classes (not 0): see [`wake_as`].
pub fn wait_as(word: &AtomicU32, expected: u32, timeout: Option<Duration>, classes: u32) -> Wake {
    // As an absolute time, so that a call repeated after a signal ends when the first one would.
    let deadline = timeout.and_then(monotonic_after);
    let deadline: *const libc::timespec = deadline.as_ref().map_or(ptr::null(), |at| at);
    loop {
        // SAFETY: the word is valid while borrowed; the kernel reads it and the deadline only.
        let result = unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT_BITSET,
                expected,
                deadline,
                ptr::null::<u32>(),
                classes,
            )
        };
        if result == 0 {
            return Wake::Woken;
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ETIMEDOUT) => return Wake::TimedOut,
            // EAGAIN. Anything else means that the word itself is gone (EFAULT): the caller's next
            // look at it will show.
            _ => return Wake::Changed,
        }
    }
}

/// Wakes at most `count` sleepers on `word`; says how many there were.
pub fn wake(word: &AtomicU32, count: u32) -> usize {
    wake_as(word, count, ANY_CLASS)
}

/// As [`wake`], only sleepers of one of these classes (not 0).
pub fn wake_as(word: &AtomicU32, count: u32, classes: u32) -> usize {
    let count = count.min(i32::MAX as u32) as i32;
    // SAFETY: the kernel uses the address as a name; it stores nothing.
    let woken = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE_BITSET,
            count,
            ptr::null::<libc::timespec>(),
            ptr::null::<u32>(),
            classes,
        )
    };
    usize::try_from(woken).unwrap_or(0)
}

/// The monotonic time `timeout` from now; `None` if that is beyond what the clock can say.
/// Nanoseconds of the clock that all processes of a machine share; it stands for nothing after a boot.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to a local; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

fn monotonic_after(timeout: Duration) -> Option<libc::timespec> {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid place for the result; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    let total = Duration::new(now.tv_sec as u64, now.tv_nsec as u32).checked_add(timeout)?;
    Some(libc::timespec {
        tv_sec: i64::try_from(total.as_secs()).ok()?,
        tv_nsec: i64::from(total.subsec_nanos()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::testing::{assert_exit_ok, in_child};
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    #[test]
    fn another_value_ends_the_wait_at_once() {
        let word = AtomicU32::new(1);
        assert_eq!(wait(&word, 0, None), Wake::Changed);
    }

    #[test]
    fn time_runs_out() {
        let word = AtomicU32::new(1);
        let start = Instant::now();
        assert_eq!(wait(&word, 1, Some(Duration::from_millis(20))), Wake::TimedOut);
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert_eq!(wait(&word, 1, Some(Duration::ZERO)), Wake::TimedOut);
    }

    #[test]
    fn threads_wake_each_other() {
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                while word.load(Ordering::Acquire) == 0 {
                    // The longest time-out there is must not overflow into a short one.
                    assert_ne!(wait(&word, 0, Some(Duration::MAX)), Wake::TimedOut);
                }
            });
            std::thread::sleep(Duration::from_millis(5));
            word.store(1, Ordering::Release);
            wake(&word, u32::MAX);
            sleeper.join().unwrap();
        });
    }

    #[test]
    fn wakes_as_many_as_asked_for() {
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| wait(&word, 0, None))).collect();
            let mut woken = 0;
            let deadline = Instant::now() + Duration::from_secs(20);
            while woken < 3 && Instant::now() < deadline {
                let count = wake(&word, 1);
                assert!(count <= 1);
                woken += count;
                std::thread::yield_now();
            }
            // Should one have been missed, this lets it go, and the count below tells.
            word.store(1, Ordering::Release);
            wake(&word, u32::MAX);
            let results: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
            assert_eq!(woken, 3);
            assert_eq!(results, [Wake::Woken; 3]);
        });
        assert_eq!(wake(&word, 1), 0);
    }

    #[test]
    fn processes_wake_each_other() {
        let len = crate::storage::mapping::host_page_bytes();
        // SAFETY: a new range, unmapped below.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(page, libc::MAP_FAILED);
        // SAFETY: zeroed and mapped until the end of this test.
        let word = unsafe { AtomicU32::from_ptr(page.cast()) };
        let waker = std::thread::spawn(move || {
            let deadline = Instant::now() + Duration::from_secs(20);
            while wake(word, 1) == 0 && Instant::now() < deadline {
                std::thread::yield_now();
            }
        });
        assert_exit_ok(in_child(|| {
            i32::from(wait(word, 0, Some(Duration::from_secs(30))) != Wake::Woken)
        }));
        waker.join().unwrap();
        // SAFETY: nobody uses the word any more.
        unsafe { libc::munmap(page, len) };
    }

    #[test]
    fn signals_neither_end_nor_lengthen_the_wait() {
        static SIGNALS: AtomicU32 = AtomicU32::new(0);
        extern "C" fn handler(_: libc::c_int) {
            SIGNALS.fetch_add(1, Ordering::Relaxed);
        }
        assert_exit_ok(in_child(|| {
            // SAFETY: the handler only stores; the structures are valid for the calls.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handler as extern "C" fn(libc::c_int) as usize;
                assert_eq!(libc::sigaction(libc::SIGALRM, &action, ptr::null_mut()), 0);
                let every = libc::timeval { tv_sec: 0, tv_usec: 10_000 };
                let timer = libc::itimerval { it_interval: every, it_value: every };
                assert_eq!(libc::syscall(libc::SYS_setitimer, libc::ITIMER_REAL, &timer, 0), 0);
            }
            let word = AtomicU32::new(0);
            let start = Instant::now();
            assert_eq!(wait(&word, 0, Some(Duration::from_millis(100))), Wake::TimedOut);
            let took = start.elapsed();
            assert!(took >= Duration::from_millis(100), "{took:?}");
            // Begun anew at each signal it would never end.
            assert!(took < Duration::from_secs(10), "{took:?}");
            assert!(SIGNALS.load(Ordering::Relaxed) >= 2);
            0
        }));
    }
}
