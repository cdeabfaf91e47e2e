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
//! - the watcher looks rarely. After [`QUANTUM_NS`] it sets HANDOFF: then the next release is its turn.
//!   A watcher may want for a processor, so every [`TURN_LENGTH`]th release is the watcher's turn in
//!   any case;
//! - others let a promised lock pass, and soon leave their processor to the watcher;
//! - a watcher that has been woken on the very processor of the one who called it would only be in
//!   its way: it dozes for a quantum. So does one that sees an acquisition last for long
//!   ([`STUCK_NS`]): the owner has been descheduled, perhaps in favour of the watcher.
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
//!   If the lock was promised to the watcher: a newcomer that sees it unclaimed for [`PROMISE_NS`]
//!   takes it and clears the flags.
//! - *A release dies after freeing the lock, before calling or waking*: time-outs, as above.
//!
//! A waiter that is stopped (SIGSTOP) is to others like a dead one.

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
/// The shortest doze: less is not worth a system call.
const DOZE_NS_MIN: u64 = 50_000;
/// The watcher's pause between two looks grows to this.
const WATCH_PAUSE_NS_MAX: u64 = 4_000;
/// A watcher that sees one acquisition last for so long leaves the processor.
const STUCK_NS: u64 = 10_000;
/// A free lock that is promised to the watcher but not taken for so long is anybody's.
const PROMISE_NS: u64 = 50_000;
/// The first doze with the lock promised, after which a dead owner is noticed; the second is
/// [`NEXT_DOZE_NS`], and then they double.
const FIRST_DOZE_NS: u64 = 1_000_000;
/// See [`FIRST_DOZE_NS`].
const NEXT_DOZE_NS: u64 = 10_000_000;
/// The first sleep in the queue, after which a watcher who does not call is held for dead. Much longer
/// than a sleeper's turn usually takes to come: the kernel wakes sleepers in the order in which they
/// lay down, and one who gets up early goes to the end of the queue.
const FIRST_SLEEP_NS: u64 = 25_000_000;
/// The longest sleep or doze.
const SLEEP_NS_MAX: u64 = 50_000_000;

const OWNER: u64 = 0xffff;
const SLEEPERS: u64 = 1 << 16;
const WATCHED: u64 = 1 << 17;
const HANDOFF: u64 = 1 << 18;
const DOZING: u64 = 1 << 19;
const GENERATION_ONE: u64 = 1 << 20;
/// Every so many generations a watched lock is handed over in any case.
const TURN_LENGTH: u64 = 2048 * GENERATION_ONE;
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
        self.after_release(before);
    }

    #[inline]
    fn after_release(&self, before: Word) {
        if before.has(DOZING) {
            self.wake_watcher();
        } else if before.0 & (SLEEPERS | WATCHED) == SLEEPERS {
            self.call_one();
        } else if before.has(WATCHED) && before.generation() % TURN_LENGTH == 0 {
            self.hand_over();
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
        let clock = Stopwatch::start();
        let deadline_ns = deadline.map_or(u64::MAX, |deadline| clock.until_ns(deadline));
        let mut waiter = Waiter {
            lock: self,
            me,
            clock,
            deadline_ns,
            role: Role::Newcomer,
            has_slept: false,
            is_busy: false,
            sleep_ns: 0,
        };
        loop {
            match waiter.look_out() {
                Outlook::Taken => return Ok(Acquired::Clean),
                Outlook::Late(word) => {
                    waiter.give_up();
                    return Err(TimedOut { owner: word.owner() });
                }
                Outlook::Blocked => {}
            }
            let rest = match waiter.role {
                Role::Newcomer => waiter.sleep(),
                Role::Watcher { since_ns } => waiter.doze(since_ns),
            };
            if let Rest::InVain(turn) = rest
                && let Some(owner) = turn.owner().filter(|&owner| owner != me)
                && !is_alive(owner)
                && self.take_turn(me, turn)
            {
                return Ok(Acquired::OwnerDied(owner));
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
    /// The lock is held, and it's time to rest.
    Blocked,
}

/// How a rest has ended.
enum Rest {
    /// It is time to look again.
    Over,
    /// This acquisition has lasted all the while: it is time to ask whether its owner lives.
    InVain(Turn),
}

/// What a waiter is to the others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Has just come, or has slept in vain.
    Newcomer,
    /// WATCHED stands for it.
    Watcher { since_ns: u64 },
}

/// One who waits.
struct Waiter<'a> {
    lock: &'a RobustLock,
    me: SlotId,
    clock: Stopwatch,
    deadline_ns: u64,
    role: Role,
    /// Whether it has been asleep: then SLEEPERS may have been cleared on its behalf.
    has_slept: bool,
    /// Whether the lock has changed hands meanwhile: others use it again and again.
    is_busy: bool,
    /// The next rest, for one who has rested in vain.
    sleep_ns: u64,
}

impl Waiter<'_> {
    fn is_watcher(&self) -> bool {
        self.role != Role::Newcomer
    }

    /// Takes the lock, which was seen free.
    ///
    /// A watcher to whom the lock was handed calls its successor at once. To do so at the first release
    /// would be as good if there were processors enough; but if the one called displaces us, and the
    /// owner before us is waiting for the processor, then that one should find the lock held, and not
    /// free to be taken again.
    fn take(&self, seen: Word) -> bool {
        let mut taken = seen.taken_by(self.me);
        // A newcomer who takes what was promised to the watcher leaves WATCHED: the watcher is late,
        // and may still come.
        taken.0 &= !(HANDOFF | DOZING);
        let calls =
            self.is_watcher() && seen.has(HANDOFF) && (self.has_slept || seen.has(SLEEPERS));
        if calls {
            taken.0 = taken.0 & !SLEEPERS | WATCHED;
        } else {
            if self.is_watcher() {
                taken.0 &= !WATCHED;
            }
            if self.has_slept {
                taken.0 |= SLEEPERS;
            }
        }
        let done = self.lock.replace(seen, taken);
        if done && calls {
            self.lock.call();
        }
        done
    }

    /// Looks for the lock, first closely and then as the watcher, as long as that seems worth it.
    fn look_out(&mut self) -> Outlook {
        let began_ns = self.clock.elapsed_ns();
        let mut pause_ns = SPIN_PAUSE_NS;
        let mut last = self.lock.look();
        let mut last_changed_ns = began_ns;
        loop {
            let seen = self.lock.look();
            let now_ns = self.clock.elapsed_ns();
            if seen.turn() != last.turn() {
                self.is_busy |= !seen.is_free();
                last = seen;
                last_changed_ns = now_ns;
            }
            let unchanged_ns = now_ns - last_changed_ns;
            if seen.is_free() && self.take_if_due(seen, unchanged_ns) {
                return Outlook::Taken;
            }
            if now_ns >= self.deadline_ns {
                return Outlook::Late(seen);
            }
            match self.role {
                _ if seen.is_free() => {}
                Role::Newcomer if now_ns - began_ns > SPIN_NS => {
                    if seen.has(SLEEPERS | WATCHED) {
                        return Outlook::Blocked;
                    }
                    if self.lock.replace(seen, Word(seen.0 | WATCHED)) {
                        self.role = Role::Watcher { since_ns: now_ns };
                    }
                }
                Role::Watcher { .. } if unchanged_ns > STUCK_NS => return Outlook::Blocked,
                Role::Watcher { since_ns }
                    if now_ns - since_ns > QUANTUM_NS && !seen.has(HANDOFF) =>
                {
                    self.lock.word.fetch_or(HANDOFF, Ordering::Relaxed);
                    pause_ns = SPIN_PAUSE_NS;
                }
                _ => {}
            }
            self.clock.pause(pause_ns);
            if self.is_watcher() && !seen.has(HANDOFF) {
                pause_ns = (pause_ns * 2).min(WATCH_PAUSE_NS_MAX);
            }
        }
    }

    /// Takes the lock, which has been seen free, if nobody else has a better right to it.
    fn take_if_due(&mut self, seen: Word, unchanged_ns: u64) -> bool {
        if seen.has(HANDOFF) {
            if self.is_watcher() || unchanged_ns > PROMISE_NS {
                return self.take(seen);
            }
            if unchanged_ns > SPIN_NS {
                // The watcher may need this processor to come.
                let ticket = self.lock.handoffs.load(Ordering::Relaxed);
                self.wait(&self.lock.handoffs, ticket, PROMISE_NS);
            }
            return false;
        }
        self.clock.pause(GRACE_NS);
        let again = self.lock.look();
        again.turn() == seen.turn() && (again.is_open() || self.is_watcher()) && self.take(again)
    }

    /// Sets `flags`, if the lock is held, and says by whom.
    fn mark_held(&self, flags: u64) -> Option<Turn> {
        loop {
            let seen = self.lock.look();
            if seen.is_free() {
                return None;
            }
            if self.lock.replace(seen, Word(seen.0 | flags)) {
                return Some(Turn(seen.turn()));
            }
        }
    }

    /// Sleeps in the queue until called, or for a while, if the lock is held.
    fn sleep(&mut self) -> Rest {
        let ticket = self.lock.calls.load(Ordering::Acquire);
        let Some(turn) = self.mark_held(SLEEPERS) else { return Rest::Over };
        self.has_slept = true;
        self.is_busy = true;
        match self.wait(&self.lock.calls, ticket, self.sleep_ns.max(FIRST_SLEEP_NS)) {
            Wake::Changed => Rest::Over,
            Wake::Woken => {
                self.sleep_ns = 0;
                self.role = Role::Watcher { since_ns: self.clock.elapsed_ns() };
                let displacing = self.lock.caller_cpu.load(Ordering::Relaxed) == current_cpu();
                if displacing && !self.lock.look().has(HANDOFF) {
                    let ticket = self.lock.handoffs.load(Ordering::Relaxed);
                    self.wait(&self.lock.handoffs, ticket, QUANTUM_NS);
                }
                Rest::Over
            }
            Wake::TimedOut => {
                self.sleep_ns = SLEEP_NS_MAX;
                if self.lock.turn() == turn {
                    return Rest::InVain(turn);
                }
                // The lock is in use, and our turn does not come: is the watcher dead?
                self.lock.word.fetch_and(!WATCHED, Ordering::Relaxed);
                Rest::Over
            }
        }
    }

    /// As the watcher, leaves the processor to the owner: for the rest of the quantum if others use
    /// the lock again and again, and else until it is released.
    fn doze(&mut self, since_ns: u64) -> Rest {
        let ticket = self.lock.handoffs.load(Ordering::Acquire);
        let left_ns = QUANTUM_NS.saturating_sub(self.clock.elapsed_ns() - since_ns);
        if self.is_busy && left_ns > 0 {
            self.wait(&self.lock.handoffs, ticket, left_ns.max(DOZE_NS_MIN));
            return Rest::Over;
        }
        let Some(turn) = self.mark_held(WATCHED | HANDOFF | DOZING) else { return Rest::Over };
        let doze_ns = self.sleep_ns.max(FIRST_DOZE_NS);
        match self.wait(&self.lock.handoffs, ticket, doze_ns) {
            Wake::Woken | Wake::Changed => Rest::Over,
            Wake::TimedOut => {
                self.sleep_ns = (doze_ns * 2).clamp(NEXT_DOZE_NS, SLEEP_NS_MAX);
                if self.lock.turn() == turn { Rest::InVain(turn) } else { Rest::Over }
            }
        }
    }

    fn wait(&mut self, futex: &AtomicU32, ticket: u32, wait_ns: u64) -> Wake {
        let left_ns = self.deadline_ns.saturating_sub(self.clock.elapsed_ns());
        futex::wait(futex, ticket, Some(Duration::from_nanos(wait_ns.min(left_ns))))
    }

    /// Leaves without the lock: somebody else must watch, if anybody is there.
    fn give_up(&mut self) {
        if self.is_watcher() {
            self.lock.word.fetch_and(!(WATCHED | HANDOFF | DOZING), Ordering::AcqRel);
            if self.lock.look().is_free() {
                self.lock.call_one();
            }
        }
    }
}

/// The processor that this thread runs on, or has just run on.
fn current_cpu() -> u32 {
    // SAFETY: no arguments. An error gives a number that no processor has.
    unsafe { libc::sched_getcpu() as u32 }
}
