//! A lock in shared memory whose owner's death is noticed.
//!
//! # The words
//!
//! A lock is one 64-bit word and one 32-bit futex; zero bytes are a free lock.
//!
//! | bits of the word | meaning |
//! | --- | --- |
//! | 0 to 15 | owner's slot + 1, or 0: free |
//! | 16 | SLEEPERS: somebody may be asleep; the next release sees to it that one is woken |
//! | 17 | WATCHED: one waiter is awake, or has been called, and watches: no need to wake another |
//! | 18 | HANDOFF: the lock is promised to those who have waited; newcomers let them pass |
//! | 20 to 63 | generation, counted up whenever the lock changes hands |
//!
//! To take the lock is one compare-and-swap that writes owner and generation together; to release it
//! is one subtraction of the owner. So between any two instructions the lock is either free or names
//! its owner, and a process that dies leaves either nothing or a lock that says whose it was. The
//! flags are advice: each may be wrong for a while after a death, and costs a delay, never exclusion.
//! The generation (44 bits) lets a finder be sure that the lock which it takes from the dead is the very
//! acquisition that it saw, and not a later one by the same slot.
//!
//! # Waiting
//!
//! The lock is made for critical sections of some hundred nanoseconds on machines where a
//! handful of processors is shared by many processes. There, throughput is lost in three ways:
//! through a system call per release, through the cache lines that travel whenever the lock changes hands
//! (the lock's own and those of all that it protects), and through waiters who hammer the lock's line.
//! Therefore
//! - whoever holds the lock may come back and take it again as long as nobody has waited long;
//! - a waiter looks for about a microsecond. If the lock has gone free and its last owner does not come
//!   back at once, the waiter takes it. Otherwise
//! - it becomes the *watcher*, if there is none and nobody sleeps, and else sleeps. The one watcher
//!   looks rarely. After [`QUANTUM_NS`] it sets HANDOFF, and the next release is its turn;
//! - a release wakes a sleeper only if there is no watcher: the one that is woken is the next watcher. So
//!   there is one system call per turn, not per operation;
//! - a watcher that sees one acquisition last for long (its owner has been descheduled, or has much to
//!   do) goes to sleep.
//!
//! # No wake-up is lost
//!
//! A sleeper reads the futex, then sets SLEEPERS in the word *while the lock is held*, then sleeps
//! unless the futex has changed. A release that finds SLEEPERS clears it, then changes the futex, then
//! wakes one. If the flag was set before it was cleared, the sleeper has read the futex before it was
//! changed, and wakes. If it was set after, it stays, for the next release. One who has slept sets
//! SLEEPERS again on taking the lock, as it cannot know whether it was the only one. Where this chain is
//! cut, because somebody died between two steps, the time-out of every sleep ties it again.
//!
//! # Death
//!
//! - *The owner dies*: every sleep is limited (at first to a millisecond). Who wakes and finds the same
//!   acquisition still there asks whether the owner lives, and if not replaces that acquisition
//!   by its own, one compare-and-swap, and is told [`Acquired::OwnerDied`]. If it dies in its turn before the
//!   repair is done, then the next finder is told the same of it, and repairs again.
//! - *A watcher dies*: WATCHED stays. A sleeper that has slept through its time-out watches in its place.
//! - *One whom the lock was promised dies*: HANDOFF stays on a free lock. A newcomer that sees it
//!   unclaimed for [`PROMISE_NS`] takes the lock.
//! - *A release dies after freeing the lock, before waking*: time-outs, as above.

use std::fmt;
use std::time::{Duration, Instant};

use crate::sync::futex::{self, Wake};
use crate::sync::{AtomicU32, AtomicU64, Ordering, Stopwatch};
use crate::types::SlotId;

/// A newcomer looks for so long before it becomes watcher or goes to sleep: longer than the usual
/// critical section, shorter than a system call or two.
const SPIN_NS: u64 = 1_000;
/// Between two looks of a newcomer.
const SPIN_PAUSE_NS: u64 = 100;
/// A lock that has just gone free is left to its last owner for so long: about the time that a busy
/// process needs from one operation to the next.
const GRACE_NS: u64 = 300;
/// A watcher lets others go on for so long before it asks for the lock. Long enough that moving the
/// cache lines and the wake-up at each turn cost a few percent, short enough that sixteen turns take
/// milliseconds.
const QUANTUM_NS: u64 = 100_000;
/// The watcher's pause between two looks grows to this.
const WATCH_PAUSE_NS_MAX: u64 = 4_000;
/// An acquisition that lasts for so long is not worth burning a processor for.
const STUCK_NS: u64 = 20_000;
/// A free lock that is promised to others but not taken for so long is anybody's.
const PROMISE_NS: u64 = 50_000;
/// The first sleep, after which a dead owner is noticed; and the longest.
const SLEEP_NS_MIN: u64 = 1_000_000;
const SLEEP_NS_MAX: u64 = 50_000_000;
/// One who has waited for so long watches beside whoever else may do so.
const STARVING_NS: u64 = 10_000_000;

const OWNER: u64 = 0xffff;
const SLEEPERS: u64 = 1 << 16;
const WATCHED: u64 = 1 << 17;
const HANDOFF: u64 = 1 << 18;
const GENERATION_ONE: u64 = 1 << 20;
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
    /// Counts wake-ups; sleepers wait for it to change.
    calls: AtomicU32,
}

impl RobustLock {
    /// A free lock; the same as zero bytes.
    pub fn new() -> Self {
        Self { word: AtomicU64::new(0), calls: AtomicU32::new(0) }
    }

    /// Takes the lock if it is free and not promised to others. Never waits.
    #[inline]
    pub fn try_acquire(&self, me: SlotId) -> bool {
        let seen = self.look();
        seen.is_open() && self.replace(seen, seen.taken_by(me))
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
        if before.has(SLEEPERS) && !before.has(WATCHED) {
            self.call_one();
        }
    }

    /// Who holds the lock.
    #[inline]
    pub fn owner(&self) -> Option<SlotId> {
        self.look().owner()
    }

    /// How often the lock has been taken.
    #[inline]
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
                if seen.has(SLEEPERS) && !seen.has(WATCHED) {
                    self.call_one();
                }
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

    /// Wakes one sleeper, which is then the watcher.
    #[cold]
    fn call_one(&self) {
        loop {
            let seen = self.look();
            if !seen.has(SLEEPERS) || seen.has(WATCHED) {
                return;
            }
            if self.replace(seen, Word(seen.0 & !SLEEPERS | WATCHED)) {
                break;
            }
        }
        self.calls.fetch_add(1, Ordering::Release);
        if futex::wake(&self.calls, 1) == 0 {
            // The flag was out of date. If a sleeper saw the futex change meanwhile, and watches
            // although the flag is now cleared, then the cost is one needless call.
            self.word.fetch_and(!WATCHED, Ordering::Relaxed);
        }
    }

    #[cold]
    fn acquire_slow(
        &self,
        me: SlotId,
        deadline: Option<Instant>,
        is_alive: &dyn Fn(SlotId) -> bool,
    ) -> Result<Acquired, TimedOut> {
        let clock = Stopwatch::start();
        let deadline_ns = deadline.map_or(u64::MAX, |deadline| clock.until_ns(deadline));
        let mut waiter = Waiter {
            lock: self,
            me,
            clock,
            deadline_ns,
            is_watcher: false,
            has_slept: false,
            sleep_ns: SLEEP_NS_MIN,
        };
        loop {
            let blocked_by = match waiter.look_out() {
                Outlook::Taken => return Ok(Acquired::Clean),
                Outlook::Late(word) => {
                    waiter.give_up();
                    return Err(TimedOut { owner: word.owner() });
                }
                Outlook::Blocked(word) => word,
            };
            if waiter.sleep(blocked_by) {
                let now = self.look();
                if now.turn() == blocked_by.turn() {
                    let dead = now.owner().filter(|&owner| owner != me && !is_alive(owner));
                    if let Some(owner) = dead
                        && self.take_turn(me, Turn(now.turn()))
                    {
                        return Ok(Acquired::OwnerDied(owner));
                    }
                }
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

/// What looking out for the lock has led to.
enum Outlook {
    /// The lock is ours.
    Taken,
    /// The deadline has passed.
    Late(Word),
    /// The lock is held, and it's time to sleep.
    Blocked(Word),
}

/// One who waits.
struct Waiter<'a> {
    lock: &'a RobustLock,
    me: SlotId,
    clock: Stopwatch,
    deadline_ns: u64,
    /// Whether WATCHED stands for this waiter.
    is_watcher: bool,
    /// Whether it has been asleep: then the SLEEPERS flag may have been cleared on its behalf.
    has_slept: bool,
    sleep_ns: u64,
}

impl Waiter<'_> {
    /// Takes the lock, which was seen free.
    fn take(&self, seen: Word) -> bool {
        let mut taken = seen.taken_by(self.me);
        taken.0 &= !HANDOFF;
        if self.is_watcher {
            taken.0 &= !WATCHED;
        }
        if self.has_slept {
            taken.0 |= SLEEPERS;
        }
        self.lock.replace(seen, taken)
    }

    /// Looks for the lock, first closely and then as the watcher, as long as that seems worth it.
    fn look_out(&mut self) -> Outlook {
        let mut pause_ns = SPIN_PAUSE_NS;
        let began_ns = self.clock.elapsed_ns();
        let mut last = self.lock.look();
        let mut last_changed_ns = began_ns;
        loop {
            let mut seen = self.lock.look();
            let mut now_ns = self.clock.elapsed_ns();
            if seen.is_free() {
                if !seen.has(HANDOFF) {
                    self.clock.pause(GRACE_NS);
                    let again = self.lock.look();
                    let open = again.is_open() || self.is_watcher;
                    if open && again.turn() == seen.turn() && self.take(again) {
                        return Outlook::Taken;
                    }
                    seen = again;
                    now_ns = self.clock.elapsed_ns();
                } else if (self.is_watcher || now_ns - last_changed_ns > PROMISE_NS)
                    && self.take(seen)
                {
                    return Outlook::Taken;
                }
            }
            if seen.turn() != last.turn() {
                last = seen;
                last_changed_ns = now_ns;
            }
            if now_ns >= self.deadline_ns {
                return Outlook::Late(seen);
            }
            if !seen.is_free() {
                if self.is_watcher {
                    if now_ns - last_changed_ns > STUCK_NS {
                        return Outlook::Blocked(seen);
                    }
                    if now_ns - began_ns > QUANTUM_NS && !seen.has(HANDOFF) {
                        self.lock.word.fetch_or(HANDOFF, Ordering::Relaxed);
                        pause_ns = SPIN_PAUSE_NS;
                        continue;
                    }
                } else if now_ns - began_ns > SPIN_NS {
                    let starving = now_ns > STARVING_NS;
                    if !starving && seen.has(SLEEPERS | WATCHED) {
                        return Outlook::Blocked(seen);
                    }
                    if !self.lock.replace(seen, Word(seen.0 | WATCHED)) {
                        continue;
                    }
                    self.is_watcher = true;
                }
            }
            self.clock.pause(pause_ns);
            if self.is_watcher && !seen.has(HANDOFF) {
                pause_ns = (pause_ns * 2).min(WATCH_PAUSE_NS_MAX);
            }
        }
    }

    /// Sleeps until called, or for a while, if the lock is still held. Returns whether the time-out
    /// has passed.
    fn sleep(&mut self, blocked_by: Word) -> bool {
        let ticket = self.lock.calls.load(Ordering::Acquire);
        let seen = self.lock.look();
        if seen.turn() != blocked_by.turn() {
            return false;
        }
        let mut asleep = Word(seen.0 | SLEEPERS);
        if self.is_watcher {
            asleep.0 &= !WATCHED;
        }
        if !self.lock.replace(seen, asleep) {
            return false;
        }
        self.is_watcher = false;
        self.has_slept = true;
        let left_ns = self.deadline_ns.saturating_sub(self.clock.elapsed_ns());
        let timeout = Duration::from_nanos(self.sleep_ns.min(left_ns).max(1));
        match futex::wait(&self.lock.calls, ticket, Some(timeout)) {
            Wake::TimedOut => {
                self.sleep_ns = (self.sleep_ns * 2).clamp(10_000_000, SLEEP_NS_MAX);
                true
            }
            Wake::Woken | Wake::Changed => {
                self.is_watcher = true;
                false
            }
        }
    }

    /// Leaves without the lock: somebody else must watch, if anybody is there.
    fn give_up(&mut self) {
        if self.is_watcher {
            self.lock.word.fetch_and(!(WATCHED | HANDOFF), Ordering::Relaxed);
            let seen = self.lock.look();
            if seen.is_free() {
                self.lock.call_one();
            }
        }
    }
}
