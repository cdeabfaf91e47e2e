//! Key locks: some thousands of robust stripes, re-entrant for the thread that holds one.
//!
//! A stripe is one word: the slot of the owner's process, the owner's thread, a generation that changes with every owner, and
//! whether somebody sleeps. Taking, giving back and taking over are each one exchange of the whole word, so that what was seen
//! when its owner was asked after is what is replaced: a living owner that came into a dead one's slot is never taken for it.
//! Beside the word stands the depth, which only the owner touches.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use crate::limits::KEY_STRIPES;
use crate::storage::{filesystem, fork, futex};
use crate::types::SlotId;

/// Word: bits 0 to 15 owner's slot + 1 (0: free), 16 to 30 generation, 31 sleepers, 32 to 63 the owner's thread.
const OWNER: u64 = 0xffff;
const GENERATION_ONE: u64 = 1 << 16;
const GENERATION: u64 = 0x7fff << 16;
const SLEEPERS: u64 = 1 << 31;

/// One stripe of the key locks. Zero bytes are a free one.
#[repr(C)]
#[derive(Debug)]
pub struct Stripe {
    word: AtomicU64,
    /// How often the owner has taken it.
    depth: AtomicU32,
    reserved: AtomicU32,
}

/// The stripe of a hash.
#[inline]
pub fn stripe_of(hash: u64) -> usize {
    // Bits that choose neither the directory nor the tag, so that neighbours in a bucket rarely share a stripe.
    (hash >> 23) as usize % KEY_STRIPES
}

/// A number that tells the threads of a process apart, and with overwhelming probability those of different processes.
pub fn thread_token() -> u32 {
    static BASE: AtomicU64 = AtomicU64::new(0);
    static NEXT: AtomicU32 = AtomicU32::new(0);
    thread_local! {
        static TOKEN: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
    }
    TOKEN.with(|token| {
        let generation = fork::generation();
        if token.get().0 != generation {
            let mut base = BASE.load(Relaxed);
            if base == 0 {
                let random = filesystem::random_u64().unwrap_or(u64::from(std::process::id())) | 1;
                base = match BASE.compare_exchange(0, random, Relaxed, Relaxed) {
                    Ok(_) => random,
                    Err(other) => other,
                };
            }
            let number = NEXT.fetch_add(1, Relaxed).wrapping_add(base as u32);
            token.set((generation, number));
        }
        token.get().1
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

fn owner_of(word: u64) -> Option<SlotId> {
    let owner = word & OWNER;
    (owner != 0).then(|| SlotId((owner - 1) as u16))
}

impl Stripe {
    /// Who holds the stripe, as seen by a thread of `me`.
    #[inline]
    pub fn holder(&self, me: SlotId) -> Holder {
        let word = self.word.load(Acquire);
        match owner_of(word) {
            None => Holder::None,
            Some(owner) if owner != me => Holder::Other(owner),
            Some(_) if (word >> 32) as u32 == thread_token() => Holder::Me,
            Some(_) => Holder::Sibling,
        }
    }

    /// Takes the stripe if it is free or the caller's.
    pub fn try_acquire(&self, me: SlotId) -> bool {
        if self.holder(me) == Holder::Me {
            self.depth.store(self.depth.load(Relaxed) + 1, Relaxed);
            return true;
        }
        let mut word = self.word.load(Relaxed);
        while word & OWNER == 0 {
            let generation = word.wrapping_add(GENERATION_ONE) & GENERATION;
            let taken = u64::from(thread_token()) << 32
                | (word & SLEEPERS)
                | generation
                | (u64::from(me.0) + 1);
            match self.word.compare_exchange(word, taken, AcqRel, Relaxed) {
                Ok(_) => {
                    self.depth.store(1, Relaxed);
                    return true;
                }
                Err(now) => word = now,
            }
        }
        false
    }

    /// Waits until the stripe may be free or `limit` is over. `is_alive` is asked of an owner after a while; a dead one
    /// loses the stripe.
    pub fn wait(&self, me: SlotId, limit: Duration, is_alive: &dyn Fn(SlotId) -> bool) {
        let mut word = self.word.load(Acquire);
        let Some(owner) = owner_of(word) else { return };
        if word & SLEEPERS == 0 {
            if self.word.compare_exchange(word, word | SLEEPERS, AcqRel, Relaxed).is_err() {
                return;
            }
            word |= SLEEPERS;
        }
        let limit = limit.min(Duration::from_millis(10));
        let woken = futex::wait(self.futex(), word as u32, Some(limit));
        if woken == futex::Wake::TimedOut && owner != me && !is_alive(owner) {
            self.replace_dead(word);
        }
    }

    /// The half of the word that owner, generation and sleepers are in.
    fn futex(&self) -> &AtomicU32 {
        const { assert!(cfg!(target_endian = "little"), "the low half comes first") };
        // SAFETY: the first four bytes of a living, aligned word; used for waiting only, never written.
        unsafe { &*(&raw const self.word).cast::<AtomicU32>() }
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
                return Err(owner_of(self.word.load(Relaxed)));
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
        let mut word = self.word.load(Relaxed);
        while let Err(now) = self.word.compare_exchange(word, word & GENERATION, AcqRel, Relaxed) {
            word = now;
        }
        self.wake(word);
    }

    fn wake(&self, before: u64) {
        if before & SLEEPERS != 0 {
            // All of them: who sleeps here may wait to write, or to lock.
            futex::wake(self.futex(), i32::MAX as u32);
        }
    }

    /// Frees the stripe if its word is still `seen`, whose owner was found dead.
    fn replace_dead(&self, seen: u64) -> bool {
        let freed = self.word.compare_exchange(seen, seen & GENERATION, AcqRel, Relaxed).is_ok();
        if freed {
            self.wake(seen);
        }
        freed
    }

    /// Frees the stripe if its owner is another process than `me` and not alive.
    pub fn release_if_dead(&self, me: SlotId, is_alive: &dyn Fn(SlotId) -> bool) -> bool {
        let seen = self.word.load(Acquire);
        match owner_of(seen) {
            Some(owner) if owner != me && !is_alive(owner) => self.replace_dead(seen),
            _ => false,
        }
    }

    /// Frees the stripe if `dead` holds it. The caller makes sure that no other process can take that slot meanwhile.
    pub fn release_dead(&self, dead: SlotId) {
        let mut seen = self.word.load(Acquire);
        while owner_of(seen) == Some(dead) && !self.replace_dead(seen) {
            seen = self.word.load(Acquire);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: SlotId = SlotId(3);

    fn free() -> Stripe {
        Stripe { word: AtomicU64::new(0), depth: AtomicU32::new(0), reserved: AtomicU32::new(0) }
    }

    #[test]
    fn re_entrant_for_its_thread_only() {
        let stripe = free();
        assert!(stripe.try_acquire(ME) && stripe.try_acquire(ME));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(stripe.holder(ME), Holder::Sibling);
                assert!(!stripe.try_acquire(ME));
                assert!(!stripe.try_acquire(SlotId(4)));
            });
        });
        stripe.release(ME);
        assert_eq!(stripe.holder(ME), Holder::Me);
        stripe.release(ME);
        assert_eq!(stripe.holder(ME), Holder::None);
    }

    #[test]
    fn a_dead_owner_loses_it_and_a_living_one_does_not() {
        let stripe = free();
        assert!(stripe.try_acquire(SlotId(9)));
        assert!(!stripe.release_if_dead(ME, &|_| true));
        let deadline = Some(Instant::now() + Duration::from_millis(30));
        assert_eq!(stripe.acquire(ME, deadline, &|_| true), Err(Some(SlotId(9))));
        assert_eq!(stripe.acquire(ME, None, &|_| false), Ok(()));
        assert_eq!(stripe.holder(ME), Holder::Me);
    }

    #[test]
    fn a_late_take_over_does_not_hit_the_next_owner() {
        let stripe = free();
        assert!(stripe.try_acquire(SlotId(9)));
        let seen = stripe.word.load(Relaxed);
        stripe.release_dead(SlotId(9));
        // The same slot and even the same thread number.
        assert!(stripe.try_acquire(SlotId(9)));
        assert!(!stripe.replace_dead(seen));
        assert_eq!(stripe.holder(SlotId(9)), Holder::Me);
    }
}
