//! A lock in shared memory whose owner's death is noticed.
//!
//! # The words
//!
//! Zero bytes are a free lock.
//!
//! | bits of the lock's word | meaning |
//! | --- | --- |
//! | 0 to 15 | owner's slot + 1, or 0: free |
//! | 16 | SLEEPERS: somebody may be asleep in the queue; who releases sees to it that one is called |
//! | 17 | WATCHED: one waiter has been called and watches: no need to call another |
//! | 18 | HANDOFF: the lock is promised to the watcher; others let it pass |
//! | 19 | DOZING: the watcher sleeps until the lock is released |
//! | 20 to 63 | generation, counted up whenever the lock changes hands |
//!
//! To take the lock is one compare-and-swap that writes owner and generation together; to release it
//! is one subtraction of the owner. So between any two instructions the lock is either free or names
//! its owner, and a process that dies leaves either nothing or a lock that says whose it was. The
//! flags are advice: each may be wrong for a while after a death, and costs a delay, never
//! exclusion. The generation (44 bits) lets a finder be sure that the lock which it takes from the
//! dead is the very acquisition that it saw, and not a later one by the same slot.
//!
//! Two futexes stand beside it: sleepers queue on `calls`, watchers doze on `handoffs`. Both only
//! count up.
//!
//! # Waiting
//!
//! The lock is made for critical sections of some hundred nanoseconds, on machines where a handful
//! of processors is shared by many processes. There, throughput is lost in three ways: through
//! system calls, through the cache lines that travel whenever the lock changes hands (its own and
//! those of all that it protects), and through waiters who hammer its line or take the processor
//! that its owner needs. Therefore
//!
//! - whoever has held the lock may take it again and again as long as nobody has waited long;
//! - a newcomer looks for about a microsecond. If the lock goes free and its last owner does not come
//!   back at once, the newcomer takes it. Otherwise it becomes the watcher, if there is none and
//!   nobody sleeps, and else goes to sleep in the queue;
//! - a release calls a sleeper only if there is no watcher, and the one called is the next watcher.
//!   So there are a few system calls per turn, none per operation;
//! - the watcher looks rarely. After [`waiter::QUANTUM_NS`] it sets HANDOFF: then the next release is its turn.
//!   A watcher may want for a processor, so every [`TURN_LENGTH`]th release is the watcher's turn in
//!   any case;
//! - others let a promised lock pass, and soon leave their processor to the watcher;
//! - a watcher that has been woken on the very processor of the one who called it would only be in
//!   its way: it dozes for a quantum. So does one that sees an acquisition last for long
//!   ([`waiter::STUCK_NS`]): the owner has been descheduled, perhaps in favour of the watcher.
//!
//! # No wake-up is lost
//!
//! A sleeper reads `calls`, then sets SLEEPERS *while the lock is held*, then sleeps unless `calls`
//! has changed. A release that finds SLEEPERS clears it, then counts `calls` up, then wakes one. If
//! the flag was set before it was cleared, then the sleeper has read `calls` before it changed, and
//! wakes. If it was set after, it stays, for the next release. One who has slept sets SLEEPERS again
//! on taking the lock, as it cannot know whether it was the only one. The same holds of DOZING and
//! `handoffs`. A watcher that leaves (it was late) clears WATCHED, and calls another if the lock is
//! free; if it is held, its release will. Where this chain is cut, because somebody died between two
//! steps, the time-out of every sleep ties it again.
//!
//! # Death
//!
//! - *The owner dies*: the watcher dozes for a millisecond at first. If it then finds the same
//!   acquisition still there it asks whether the owner lives, and if not replaces that acquisition by
//!   its own, one compare-and-swap, and is told [`Acquired::OwnerDied`]. If it dies in its turn
//!   before the repair is done, then the next finder is told the same of it, and repairs again.
//! - *The watcher dies*: WATCHED stays, and nobody is called. A sleeper whose time is over clears it.
//!   If the lock was promised to the watcher: a newcomer that sees it unclaimed for [`waiter::PROMISE_NS`]
//!   takes it and clears the flags.
//! - *A release dies after freeing the lock, before calling or waking*: time-outs, as above.
//!
//! A waiter that is stopped (SIGSTOP) is to others like a dead one.

mod waiter;

#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Instant;

use self::waiter::{Outlook, Rest, Waiter};
use crate::sync::{AtomicU32, AtomicU64, Ordering, current_cpu, futex};
use crate::types::SlotId;

const OWNER: u64 = 0xffff;
const SLEEPERS: u64 = 1 << 16;
const WATCHED: u64 = 1 << 17;
const HANDOFF: u64 = 1 << 18;
const DOZING: u64 = 1 << 19;
const GENERATION_ONE: u64 = 1 << 20;
/// Every so many generations a watched lock is handed over in any case.
const TURN_LENGTH: u64 = 4096 * GENERATION_ONE;
const TURN: u64 = OWNER | !(GENERATION_ONE - 1);

/// The word of a lock at some moment.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Word(u64);

impl Word {
    #[inline]
    fn is_free(self) -> bool {
        self.0 & OWNER == 0
    }

    /// Free, and not promised to those who have waited.
    #[inline]
    fn is_open(self) -> bool {
        self.0 & (OWNER | HANDOFF) == 0
    }

    #[inline]
    fn has(self, flags: u64) -> bool {
        self.0 & flags != 0
    }

    #[inline]
    fn owner(self) -> Option<SlotId> {
        let owner = (self.0 & OWNER) as u16;
        owner.checked_sub(1).map(SlotId)
    }

    /// This very acquisition, whatever the flags.
    #[inline]
    fn turn(self) -> u64 {
        self.0 & TURN
    }

    #[inline]
    fn generation(self) -> u64 {
        self.0 & !(GENERATION_ONE - 1)
    }

    /// The next acquisition, by `me`, with all flags as they are.
    #[inline]
    fn taken_by(self, me: SlotId) -> Word {
        Word((self.0 & !OWNER).wrapping_add(GENERATION_ONE) | owner_bits(me))
    }
}

#[inline]
fn owner_bits(slot: SlotId) -> u64 {
    debug_assert!(slot.0 < u16::MAX);
    u64::from(slot.0) + 1
}

/// One acquisition of one lock: owner and generation. Never the same twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn(u64);

impl Turn {
    /// Who holds, or held, this turn; `None` if the lock was free.
    pub fn owner(self) -> Option<SlotId> {
        Word(self.0).owner()
    }
}

/// How a lock was got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "after `OwnerDied`, what the lock protects must be repaired first"]
pub enum Acquired {
    /// From one who released it.
    Clean,
    /// In place of this owner, who died while holding it: what the lock protects is half done.
    OwnerDied(SlotId),
}

/// The lock was not got in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimedOut {
    /// Who held it at the end.
    pub owner: Option<SlotId>,
}

/// A lock in shared memory whose owner's death is noticed. See the module's text.
///
/// It excludes threads as well as processes, and isn't re-entrant. All threads of a process share its slot.
#[repr(C, align(64))]
pub struct RobustLock {
    word: AtomicU64,
    /// Counts calls of sleepers, who wait for it to change.
    calls: AtomicU32,
    /// Counts wake-ups of dozing watchers, who wait for it to change.
    handoffs: AtomicU32,
    /// The processor that the last call came from.
    caller_cpu: AtomicU32,
}

impl RobustLock {
    /// A free lock; the same as zero bytes.
    pub fn new() -> Self {
        Self {
            word: AtomicU64::new(0),
            calls: AtomicU32::new(0),
            handoffs: AtomicU32::new(0),
            caller_cpu: AtomicU32::new(0),
        }
    }

    /// Takes the lock if it is free and not promised to others. Never waits. One who fails must go on
    /// to [`acquire`](Self::acquire), or use [`acquire_if_free`](Self::acquire_if_free) instead: a promise to
    /// a dead process is only noticed by waiting.
    #[inline]
    pub fn try_acquire(&self, me: SlotId) -> bool {
        let seen = self.look();
        seen.is_open() && self.replace(seen, seen.taken_by(me))
    }

    /// Takes the lock if it is free, even if it is promised to others (whose turn then comes after
    /// this one). Never waits. For those who can do without the lock, and would not wait for it.
    pub fn acquire_if_free(&self, me: SlotId) -> bool {
        let mut seen = self.look();
        while seen.is_free() {
            if self.replace(seen, seen.taken_by(me)) {
                return true;
            }
            seen = self.look();
        }
        false
    }

    /// Takes the lock, waiting for it until `deadline` or for ever.
    ///
    /// `is_alive` is asked of another owner that holds on for more than a millisecond. A dead one
    /// loses the lock, and the answer is [`Acquired::OwnerDied`]. (A slot that is given to a new
    /// process must have been repaired first: see [`take_over`](Self::take_over).)
    #[inline]
    pub fn acquire(
        &self,
        me: SlotId,
        deadline: Option<Instant>,
        is_alive: &dyn Fn(SlotId) -> bool,
    ) -> Result<Acquired, TimedOut> {
        if self.try_acquire(me) {
            return Ok(Acquired::Clean);
        }
        self.acquire_slow(me, deadline, is_alive)
    }

    /// Gives the lock back. The caller must hold it, and be sure that it was not robbed of it (see
    /// [`steal_from_live`](Self::steal_from_live)).
    #[inline]
    pub fn release(&self, me: SlotId) {
        let before = Word(self.word.fetch_sub(owner_bits(me), Ordering::Release));
        debug_assert_eq!(before.owner(), Some(me), "released by one who does not hold it");
        self.after_release(before);
    }

    #[inline]
    fn after_release(&self, before: Word) {
        if before.has(DOZING) {
            self.wake_watcher();
        } else if before.0 & (SLEEPERS | WATCHED) == SLEEPERS {
            self.call_one();
        } else if before.has(WATCHED) && before.generation() & (TURN_LENGTH - 1) == 0 {
            self.hand_over();
        }
    }

    /// Who holds the lock; the engine itself asks [`Turn::owner`].
    #[cfg(test)]
    pub fn owner(&self) -> Option<SlotId> {
        self.look().owner()
    }

    /// Whether anybody holds the lock.
    #[inline]
    pub fn is_held(&self) -> bool {
        !self.look().is_free()
    }

    /// How often the lock has been taken.
    #[cfg(test)]
    pub fn generation(&self) -> u64 {
        self.look().generation() / GENERATION_ONE
    }

    /// The present turn: the caller's own, if it holds the lock.
    #[inline]
    pub fn turn(&self) -> Turn {
        Turn(self.look().turn())
    }

    /// Whether that turn has not ended. The owner asks this of its own turn, if the lock is one that may be stolen.
    #[inline]
    pub fn still_mine(&self, turn: Turn) -> bool {
        // Acquire: what a thief has done before it let the lock go is seen by one who finds it gone.
        self.word.load(Ordering::Acquire) & TURN == turn.0
    }

    /// Ends that turn if it has not ended, and says so.
    pub fn release_if_mine(&self, turn: Turn) -> bool {
        let mut seen = self.look();
        while seen.turn() == turn.0 && !seen.is_free() {
            if self.replace(seen, Word(seen.0 & !OWNER)) {
                self.after_release(seen);
                return true;
            }
            seen = self.look();
        }
        false
    }

    /// Takes the lock from its living owner, if `turn` still lasts. Only for locks whose owners expect it:
    /// they check [`still_mine`](Self::still_mine) before what they cannot take back, and
    /// release with [`release_if_mine`](Self::release_if_mine).
    pub fn steal_from_live(&self, me: SlotId, turn: Turn) -> bool {
        self.take_turn(me, turn)
    }

    /// Takes the lock if `dead`, which the caller knows to be dead, holds it. For the repair of a
    /// whole process; the same duty follows as from [`Acquired::OwnerDied`].
    pub fn take_over(&self, me: SlotId, dead: SlotId) -> bool {
        let turn = self.turn();
        turn.owner() == Some(dead) && self.take_turn(me, turn)
    }

    #[inline]
    fn look(&self) -> Word {
        Word(self.word.load(Ordering::Relaxed))
    }

    #[inline]
    fn replace(&self, seen: Word, by: Word) -> bool {
        // AcqRel although most uses need only one half: the word also frees the lock in `release_if_mine`.
        self.word.compare_exchange(seen.0, by.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Puts a turn of `me` in place of `turn`, unless that has ended.
    fn take_turn(&self, me: SlotId, turn: Turn) -> bool {
        let mut seen = self.look();
        while seen.turn() == turn.0 && !seen.is_free() {
            if self.replace(seen, Word(seen.taken_by(me).0 | SLEEPERS)) {
                return true;
            }
            seen = self.look();
        }
        false
    }

    /// Calls one sleeper, which is then the watcher.
    #[cold]
    fn call_one(&self) {
        loop {
            let seen = self.look();
            if seen.0 & (SLEEPERS | WATCHED) != SLEEPERS {
                return;
            }
            if self.replace(seen, Word(seen.0 & !SLEEPERS | WATCHED)) {
                return self.call();
            }
        }
    }

    /// Wakes one sleeper for whom WATCHED has been set already.
    fn call(&self) {
        self.caller_cpu.store(current_cpu(), Ordering::Relaxed);
        self.calls.fetch_add(1, Ordering::Release);
        if futex::wake(&self.calls, 1) == 0 {
            // The flag was out of date. If a sleeper saw the futex change meanwhile, and watches
            // although the flag is now cleared, then the cost is one needless call.
            self.word.fetch_and(!WATCHED, Ordering::Relaxed);
        }
    }

    /// Ends a turn that has been long, although the watcher has not asked for it: perhaps it can't,
    /// for want of a processor.
    #[cold]
    fn hand_over(&self) {
        self.word.fetch_or(HANDOFF, Ordering::Relaxed);
        self.wake_watcher();
    }

    /// Wakes the watcher, or all who believe that they are the one.
    #[cold]
    fn wake_watcher(&self) {
        self.word.fetch_and(!DOZING, Ordering::AcqRel);
        self.handoffs.fetch_add(1, Ordering::Release);
        futex::wake(&self.handoffs, u32::MAX);
    }

    #[cold]
    fn acquire_slow(
        &self,
        me: SlotId,
        deadline: Option<Instant>,
        is_alive: &dyn Fn(SlotId) -> bool,
    ) -> Result<Acquired, TimedOut> {
        let mut waiter = Waiter::new(self, me, deadline);
        loop {
            match waiter.look_out() {
                Outlook::Taken => return Ok(Acquired::Clean),
                Outlook::Late(word) => {
                    waiter.give_up();
                    return Err(TimedOut { owner: word.owner() });
                }
                Outlook::Blocked => {}
            }
            let Rest::InVain(turn) = waiter.rest() else { continue };
            match turn.owner() {
                Some(owner) if owner != me && !is_alive(owner) && self.take_turn(me, turn) => {
                    return Ok(Acquired::OwnerDied(owner));
                }
                _ => {}
            }
        }
    }
}

impl Default for RobustLock {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for RobustLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.look();
        f.debug_struct("RobustLock")
            .field("owner", &word.owner())
            .field("generation", &(word.generation() / GENERATION_ONE))
            .field("sleepers", &word.has(SLEEPERS))
            .field("watched", &word.has(WATCHED))
            .field("handoff", &word.has(HANDOFF))
            .finish()
    }
}
