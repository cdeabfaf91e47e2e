//! Key locks: some thousands of robust stripes, re-entrant for the thread that holds one.
//!
//! A stripe is one word, slot + 1 of the owner's process, and the owner's thread token beside it, which only the owner
//! writes, after taking and before giving back the word. A dead owner's stripe is taken over by replacing the exact word;
//! that a slot is given to a new process only after its stripes were freed makes this safe.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

use super::layout::Stripe;
use crate::storage::futex;
use crate::types::SlotId;

const SLEEPERS: u32 = 1 << 31;

/// A number that tells the threads of a process apart; never 0.
pub fn thread_token() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static TOKEN: Cell<u32> = const { Cell::new(0) };
    }
    TOKEN.with(|token| {
        if token.get() == 0 {
            token.set(NEXT.fetch_add(1, Relaxed).max(1));
        }
        token.get()
    })
}

/// Who holds a stripe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holder {
    /// Nobody.
    None,
    /// The calling thread.
    Me,
    /// Another thread of this process.
    Sibling,
    /// Another process.
    Other(SlotId),
}

impl Stripe {
    /// Who holds the stripe, as seen by a thread of `me`.
    #[inline]
    pub fn holder(&self, me: SlotId) -> Holder {
        let owner = self.owner.load(Acquire) & !SLEEPERS;
        if owner == 0 {
            return Holder::None;
        }
        if owner != me.0 as u32 + 1 {
            return Holder::Other(SlotId((owner - 1) as u16));
        }
        if self.thread.load(Relaxed) == thread_token() { Holder::Me } else { Holder::Sibling }
    }

    /// Takes the stripe if it is free or the caller's.
    pub fn try_acquire(&self, me: SlotId) -> bool {
        if self.holder(me) == Holder::Me {
            self.depth.fetch_add(1, Relaxed);
            return true;
        }
        let word = self.owner.load(Relaxed);
        if word & !SLEEPERS != 0 {
            return false;
        }
        let taken = (me.0 as u32 + 1) | (word & SLEEPERS);
        if self.owner.compare_exchange(word, taken, AcqRel, Relaxed).is_err() {
            return false;
        }
        self.thread.store(thread_token(), Relaxed);
        self.depth.store(1, Relaxed);
        true
    }

    /// Waits until the stripe may be free or `limit` is over. `is_alive` is asked of an owner after a while; a dead one
    /// loses the stripe.
    pub fn wait(&self, me: SlotId, limit: Duration, is_alive: &dyn Fn(SlotId) -> bool) {
        let word = self.owner.load(Relaxed);
        if word & !SLEEPERS == 0 {
            return;
        }
        if word & SLEEPERS == 0
            && self.owner.compare_exchange(word, word | SLEEPERS, AcqRel, Relaxed).is_err()
        {
            return;
        }
        let word = word | SLEEPERS;
        let woken = futex::wait(&self.owner, word, Some(limit.min(Duration::from_millis(10))));
        if woken == futex::Wake::TimedOut {
            let owner = SlotId(((word & !SLEEPERS) - 1) as u16);
            if owner != me && !is_alive(owner) {
                self.release_dead(owner);
            }
        }
    }

    /// Takes the stripe, waiting until `deadline` at most; on failure says who holds it.
    pub fn acquire(
        &self,
        me: SlotId,
        deadline: Option<Instant>,
        is_alive: &dyn Fn(SlotId) -> bool,
    ) -> Result<(), Option<SlotId>> {
        while !self.try_acquire(me) {
            let left = match deadline {
                None => Duration::from_secs(1),
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            };
            if left.is_zero() {
                let owner = self.owner.load(Relaxed) & !SLEEPERS;
                return Err((owner != 0).then(|| SlotId((owner - 1) as u16)));
            }
            self.wait(me, left, is_alive);
        }
        Ok(())
    }

    /// Gives the stripe back once.
    pub fn release(&self, me: SlotId) {
        debug_assert_eq!(self.holder(me), Holder::Me);
        let depth = self.depth.load(Relaxed);
        if depth > 1 {
            self.depth.store(depth - 1, Relaxed);
            return;
        }
        self.thread.store(0, Relaxed);
        self.free();
    }

    fn free(&self) {
        if self.owner.swap(0, Release) & SLEEPERS != 0 {
            // All of them: who sleeps here may wait to write, or to lock.
            futex::wake(&self.owner, i32::MAX as u32);
        }
    }

    /// Frees the stripe if `dead` holds it.
    pub fn release_dead(&self, dead: SlotId) {
        let word = self.owner.load(Acquire);
        if word & !SLEEPERS == dead.0 as u32 + 1
            && self.owner.compare_exchange(word, 0, AcqRel, Relaxed).is_ok()
            && word & SLEEPERS != 0
        {
            futex::wake(&self.owner, i32::MAX as u32);
        }
    }
}
