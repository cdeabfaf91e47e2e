//! How a process waits for a lock: the steps that the parent module tells, and their times.

use std::time::{Duration, Instant};

use super::{DOZING, HANDOFF, RobustLock, SLEEPERS, Turn, WATCHED, Word};
use crate::sync::futex::{self, Wake};
use crate::sync::{AtomicU32, Ordering, Stopwatch, current_cpu};
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
pub(super) const QUANTUM_NS: u64 = 300_000;
/// The shortest doze: less is not worth a system call.
const DOZE_NS_MIN: u64 = 50_000;
/// The watcher's pause between two looks grows to this.
const WATCH_PAUSE_NS_MAX: u64 = 4_000;
/// A watcher that sees one acquisition last for so long leaves the processor.
pub(super) const STUCK_NS: u64 = 10_000;
/// A free lock that is promised to the watcher but not taken for so long is anybody's.
pub(super) const PROMISE_NS: u64 = 50_000;
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

/// What looking out for the lock has led to.
pub(super) enum Outlook {
    /// The lock is ours.
    Taken,
    /// The deadline has passed.
    Late(Word),
    /// The lock is held, and it's time to rest.
    Blocked,
}

/// How a rest has ended.
pub(super) enum Rest {
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
pub(super) struct Waiter<'a> {
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

impl<'a> Waiter<'a> {
    pub(super) fn new(lock: &'a RobustLock, me: SlotId, deadline: Option<Instant>) -> Self {
        let clock = Stopwatch::start();
        let deadline_ns = deadline.map_or(u64::MAX, |deadline| clock.until_ns(deadline));
        Self {
            lock,
            me,
            clock,
            deadline_ns,
            role: Role::Newcomer,
            has_slept: false,
            is_busy: false,
            sleep_ns: 0,
        }
    }

    /// Leaves the processor until there may be something new to see.
    pub(super) fn rest(&mut self) -> Rest {
        match self.role {
            Role::Newcomer => self.sleep(),
            Role::Watcher { since_ns } => self.doze(since_ns),
        }
    }

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
    pub(super) fn look_out(&mut self) -> Outlook {
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
    pub(super) fn give_up(&mut self) {
        if self.is_watcher() {
            self.lock.word.fetch_and(!(WATCHED | HANDOFF | DOZING), Ordering::AcqRel);
            if self.lock.look().is_free() {
                self.lock.call_one();
            }
        }
    }
}
