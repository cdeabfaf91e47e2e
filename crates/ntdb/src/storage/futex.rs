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
                libc::FUTEX_BITSET_MATCH_ANY,
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
    let count = count.min(i32::MAX as u32) as i32;
    // SAFETY: the kernel uses the address as a name; it stores nothing.
    let woken = unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, count) };
    usize::try_from(woken).unwrap_or(0)
}

/// The monotonic time `timeout` from now; `None` if that is beyond what the clock can say.
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
