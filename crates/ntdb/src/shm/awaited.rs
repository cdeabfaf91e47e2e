//! Sleeping until something changes, at next to no cost for those who change it.
//!
//! Three words: *awaited* says that somebody sleeps (or is about to), *ticket* is what they sleep on, and *announced* is how far
//! the log was applied when they were woken last.
//!
//! | who waits | who writes |
//! | --- | --- |
//! | reads the ticket | stores *applied* |
//! | sets *awaited*; fence | releases the writer lock, which is a fence |
//! | looks at *applied*: as before? | looks at *awaited*: set? |
//! | sleeps while the ticket is as it was | clears it, counts the ticket up, wakes all |
//!
//! Because of the two fences one of the two sees the other: who waits sees the change, or who writes sees that somebody waits.
//! A ticket that is counted up between keeps from sleeping who was not asleep yet.
//!
//! Nobody is counted, so who dies asleep leaves at most one wake-up in vain. A writer that is killed between its change and the
//! wake-up lets others sleep on: that is why nobody sleeps longer than [`PATIENCE`] at a time.

use std::time::Duration;

use crate::sync::{AtomicU32, AtomicU64, Ordering::*, fence, fence_after_exchange, futex};

/// After this long those who wait look again.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// The words of one database.
#[derive(Clone, Copy, Debug)]
pub struct Awaited<'a> {
    /// End of the last change that is wholly carried out.
    pub applied: &'a AtomicU64,
    /// 1 if somebody sleeps.
    pub awaited: &'a AtomicU32,
    /// What they sleep on.
    pub ticket: &'a AtomicU32,
    /// *applied* when they were woken last.
    pub announced: &'a AtomicU64,
}

/// After a release of the writer lock, under which something may have changed: if somebody sleeps, says *awaited*, calls `wake`, which
/// calls [`Awaited::wake`].
#[inline(always)]
pub fn after_release(awaited: &AtomicU32, wake: impl FnOnce()) {
    fence_after_exchange();
    if awaited.load(Relaxed) != 0 {
        wake();
    }
}

impl Awaited<'_> {
    /// Wakes those who sleep if something has changed since that was done last.
    #[cold]
    pub fn wake(&self) {
        // Most holders of the lock change nothing, or nothing that a user can see.
        let applied = self.applied.load(Acquire);
        if self.announced.swap(applied, AcqRel) == applied {
            return;
        }
        self.wake_all();
    }

    /// Wakes all, whether something has changed or not.
    pub fn wake_all(&self) {
        // In this order: whoever sets it again has yet to read the ticket, or finds it changed.
        self.awaited.swap(0, AcqRel);
        self.ticket.fetch_add(1, AcqRel);
        futex::wake(self.ticket, u32::MAX);
    }

    /// Sleeps until *applied* is beyond `seen`, but not longer than `limit` and [`PATIENCE`], and not at all if it `is_over` already;
    /// may return early.
    pub fn sleep(&self, seen: u64, limit: Duration, is_over: impl FnOnce() -> bool) {
        // Before anything else is looked at: who wakes afterwards changes it.
        let ticket = self.ticket.load(Acquire);
        self.awaited.store(1, SeqCst);
        fence(SeqCst);
        if self.applied.load(Acquire) == seen && !is_over() {
            futex::wait(self.ticket, ticket, Some(limit.min(PATIENCE)));
        }
    }
}
