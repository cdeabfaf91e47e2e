//! Group commit: one sync of the log for all who wait.
//!
//! `synced` is a prefix of the log. Of those who need it to reach an LSN one takes the sync lock, and leads: it writes the whole
//! ring to the log, announces in `covering` how far that reaches, and syncs. The others sleep on the ticket, which
//! counts syncs that ended: those whose LSN is covered until this sync ends, those who came too late for it until the next one
//! does. So the end of a sync wakes all whom it covered, and of the others just one, to lead the next.
//!
//! **Company.** Those whom a sync covered often come back at once. Left alone, they would just miss the next sync, and the
//! committers would fall into two groups that take turns. So the next leader lets others run until as many have come as the
//! last sync served, for half the time that a sync takes at most; if it waited in vain, the next leaders don't.
//! One alone leads at once: nothing is delayed for the sake of grouping.
//!
//! Who was woken to lead and finds that somebody else's sync has covered it wakes the next in its place. Where this chain is
//! cut, because somebody died, those who wait lose patience and try again. From a leader who is stopped one of them
//! takes the lock, and leads: two syncs at once are harmless.
//!
//! A sync that fails poisons the database: no sync is ever tried again over the same pages.

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::error::Result;
use crate::log::flush::{Logs, check_poison, poison};
use crate::shm::layout::LogWords;
use crate::storage::failpoint::crash_point;
use crate::storage::futex::{self, Wake};
use crate::types::Lsn;

/// After this long without a sync those who wait look after the leader.
const PATIENCE: Duration = Duration::from_millis(100);
/// Longest wait for company.
const COMPANY_MAX: Duration = Duration::from_millis(2);
/// So many leaders don't wait for company after one who did in vain.
const LONELY: u32 = 16;
/// In `covering` while a leader writes the ring: whoever is in the log by now will probably be covered.
const UNDECIDED: u64 = u64::MAX;

impl Logs {
    /// Makes everything before `target` durable, together with whatever else is in the log by then.
    pub fn sync_to(&self, core: &Core, target: Lsn, deadline: Option<Instant>) -> Result<()> {
        let words = &core.control().log;
        let me = core.slot();
        let lock = &core.control().sync_lock;
        // The sync whose end this thread has slept for.
        let mut awaited = None;
        let mut has_come = false;
        loop {
            let ticket = words.sync_ticket.load(Acquire);
            if words.synced.load(Acquire) >= target.0 {
                if awaited == Some(ticket) {
                    // Woken to lead the sync that is next, by the end of the one before.
                    wake(core, ticket, 1);
                }
                return Ok(());
            }
            check_poison(core)?;
            if !has_come {
                has_come = true;
                words.arrivals.fetch_add(1, AcqRel);
            }
            if lock.try_acquire(me) {
                self.lead(core, target, deadline)?;
                continue;
            }
            let turn = lock.turn();
            let is_covered = target.0 <= words.covering.load(Acquire);
            let until_end_of = if is_covered { ticket } else { ticket.wrapping_add(1) };
            awaited = Some(until_end_of);
            let woken =
                futex::wait_as(&words.sync_ticket, ticket, Some(PATIENCE), class(until_end_of));
            if woken == Wake::TimedOut {
                match turn.owner() {
                    Some(owner) if !core.is_alive(owner) => {
                        core.suspect(owner);
                        if lock.take_over(me, owner) {
                            let turn = lock.turn();
                            lock.release_if_mine(turn);
                        }
                    }
                    // Alive, but stopped or slow: then somebody else leads. Two syncs at once are harmless.
                    Some(_) if lock.steal_from_live(me, turn) => {
                        self.lead(core, target, deadline)?;
                    }
                    _ => {}
                }
            }
        }
    }

    /// One write and one sync for all who wait. The caller has the sync lock, which is released.
    fn lead(&self, core: &Core, target: Lsn, deadline: Option<Instant>) -> Result<()> {
        let words = &core.control().log;
        let lock = &core.control().sync_lock;
        let turn = lock.turn();
        words.covering.store(UNDECIDED, Release);
        await_company(words);
        let tail = Lsn(core.control().writer.tail.load(Acquire).max(target.0));
        let result = self.flush_to(core, tail, deadline).and_then(|()| {
            words.covering.store(words.written.load(Acquire), Release);
            self.sync_once(core)
        });
        // Before the lock is free: the next leader counts from here.
        words.arrivals_before.store(words.arrivals.load(Acquire), Release);
        let was_mine = lock.release_if_mine(turn);
        announce(core, result.is_err() || !was_mine);
        result
    }

    /// One sync of the current log; everything written before counts as synced afterwards.
    fn sync_once(&self, core: &Core) -> Result<()> {
        let words = &core.control().log;
        // In this order: what is written before lies in this file, or in one that was synced before this one began.
        let written = words.written.load(Acquire);
        let (_, log) = self.current(core)?;
        crash_point("sync.begin");
        let begin = Instant::now();
        log.sync().map_err(|e| poison(core, &e))?;
        words.sync_ns.store(begin.elapsed().as_nanos().min(u32::MAX as u128) as u32, Relaxed);
        crash_point("sync.done");
        words.synced.fetch_max(written, AcqRel);
        crash_point("sync.published");
        Ok(())
    }
}

/// Says that a sync has ended: to those who wait for its end, and to one of those who wait for the next; or to `everybody`.
fn announce(core: &Core, everybody: bool) {
    let words = &core.control().log;
    // The lock has been released: whoever is woken can take it.
    let ended = words.sync_ticket.fetch_add(1, AcqRel);
    if everybody {
        futex::wake(&words.sync_ticket, u32::MAX);
    } else {
        let covered = wake(core, ended, u32::MAX);
        // And who led.
        words.expected.store(covered as u32 + 1, Release);
        wake(core, ended.wrapping_add(1), 1);
    }
}

/// Lets others run who will probably be here in a moment.
fn await_company(words: &LogWords) {
    let expected = words.expected.load(Acquire);
    if expected <= 1 {
        return;
    }
    if words.lonely.load(Relaxed) > 0 {
        words.lonely.fetch_sub(1, Relaxed);
        return;
    }
    let before = words.arrivals_before.load(Acquire);
    let limit = Duration::from_nanos(words.sync_ns.load(Relaxed) as u64 / 2).min(COMPANY_MAX);
    let begin = Instant::now();
    loop {
        let come = words.arrivals.load(Acquire).wrapping_sub(before);
        if come >= expected {
            return;
        }
        if begin.elapsed() >= limit {
            if come <= expected / 2 {
                words.lonely.store(LONELY, Relaxed);
            }
            return;
        }
        std::thread::yield_now();
    }
}

/// Wakes some of those who sleep until the sync with this number ends; says how many.
fn wake(core: &Core, number: u32, count: u32) -> usize {
    futex::wake_as(&core.control().log.sync_ticket, count, class(number))
}

/// One of 32 classes of sleepers.
fn class(number: u32) -> u32 {
    1 << (number % 32)
}
