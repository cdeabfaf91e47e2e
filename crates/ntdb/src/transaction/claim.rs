//! The claim: one transaction, or one large value, at a time.
//!
//! Its lock is held as long as the transaction lasts; a word beside the log's says to everybody else that there is one. While it says
//! *pending*, somebody who wants to open a transaction waits for those who hold key locks: they go on as if it were not there, but
//! nobody new gets a key lock. When nobody holds any it says *open*: then nobody else changes anything, and whoever wants to sleeps on the word, which is set
//! back to 0 when the transaction has been committed or aborted.
//!
//! A claim whose owner has died is given up by whoever notices: see [`abandon`].

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::error::Result;
use crate::limits::{KEY_STRIPES, MAX_PROCESSES};
use crate::options::deadline_after;
use crate::shm::lock::Acquired;
use crate::space::retire;
use crate::storage::failpoint::crash_point;
use crate::storage::futex;
use crate::types::SlotId;

use super::step::{Step, list_get};
use super::writer::Writer;

/// In the claim word: waits for those who hold key locks.
const PENDING: u32 = 1 << 31;
/// In the claim word: somebody may be asleep.
const SLEEPERS: u32 = 1 << 30;
/// In the claim word: the owner's slot + 1.
const OWNER: u32 = 0xffff;
/// A sleeper looks after the owner so often.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long a claim is tried for before sleeping.
const HURRY: Duration = Duration::from_micros(60);
/// Most runs given up by one step.
const RUNS_PER_PART: u64 = 256;
/// Runs that others may give up while the claim is held.
const RUNS_OF_OTHERS: u64 = 1024;

/// The claim lock, held.
#[derive(Debug)]
pub struct Claim<'e> {
    core: &'e Core,
}

impl<'e> Claim<'e> {
    /// Takes it; what an owner who died has left is given up first.
    pub fn lock(core: &'e Core, deadline: Option<Instant>) -> Result<Claim<'e>> {
        let begin = Instant::now();
        let lock = &core.control().claim_lock;
        if !acquire_soon(core) {
            match lock.acquire(core.slot(), deadline, &|slot| core.is_alive(slot)) {
                Ok(Acquired::Clean) => {}
                Ok(Acquired::OwnerDied(slot)) => core.suspect(slot),
                Err(timed_out) => {
                    return Err(core.locked(
                        "the claim (a transaction is open, or a large value is being written)",
                        timed_out.owner,
                        begin.elapsed(),
                    ));
                }
            }
        }
        let claim = Claim { core };
        if has_pages(core) || open_by(core).is_some() {
            // An owner who died, or failed, has left it.
            abandon(core, deadline)?;
        }
        Ok(claim)
    }

    /// As [`Claim::lock`], but does not wait for a living owner.
    fn try_lock(core: &'e Core) -> Option<Result<Claim<'e>>> {
        match Claim::lock(core, Some(Instant::now())) {
            Err(crate::Error::Locked { .. }) => None,
            locked => Some(locked),
        }
    }

    /// Takes the claim for a transaction, once nobody holds key locks, and says that one is open. Also returns the writer lock,
    /// under which it was said. `None` if that would mean to wait, and the caller won't (`wait`).
    pub fn open(
        core: &'e Core,
        wait: bool,
        deadline: Option<Instant>,
    ) -> Result<Option<(Claim<'e>, Writer<'e>)>> {
        let me = u32::from(core.slot().0) + 1;
        let begin = Instant::now();
        let mut pause = Duration::from_micros(2);
        loop {
            let claim =
                if wait { Some(Claim::lock(core, deadline)) } else { Claim::try_lock(core) };
            let Some(claim) = claim.transpose()? else { return Ok(None) };
            let writer = Writer::lock(core, deadline)?;
            let Some(slot) = key_holder(core) else {
                store(core, me);
                crash_point("transaction.claimed");
                return Ok(Some((claim, writer)));
            };
            if !wait {
                return Ok(None);
            }
            // Who holds a key may need the claim for a large value before it can give the key back. So it is let go meanwhile.
            store(core, me | PENDING);
            crash_point("transaction.pending");
            drop(writer);
            drop(claim);
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                withdraw(core, me | PENDING);
                return Err(core.locked("a key lock", Some(slot), begin.elapsed()));
            }
            if !core.is_alive(slot) {
                core.suspect(slot);
                release_keys_of(core, slot);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }
}

/// Sets the claim word, but for SLEEPERS, which others set at any time.
fn store(core: &Core, word: u32) {
    let update = |seen: u32| Some(seen & SLEEPERS | word);
    let _ = core.control().log.claim.fetch_update(AcqRel, Acquire, update);
}

/// Takes the claim word back, if it is still this one.
fn withdraw(core: &Core, own: u32) {
    let word = &core.control().log.claim;
    let update = |seen: u32| (seen & !SLEEPERS == own).then_some(0);
    if word.fetch_update(AcqRel, Acquire, update).is_ok_and(|seen| seen & SLEEPERS != 0) {
        futex::wake(word, u32::MAX);
    }
}

/// Takes the claim lock if it comes free within the time that some small transactions take: who sleeps for it has to be woken, which takes as
/// long as many of them, and then others wait behind.
fn acquire_soon(core: &Core) -> bool {
    let lock = &core.control().claim_lock;
    if lock.try_acquire(core.slot()) {
        return true;
    }
    let begin = Instant::now();
    while begin.elapsed() < HURRY {
        // Its owner may want this processor.
        std::thread::yield_now();
        if lock.try_acquire(core.slot()) {
            return true;
        }
    }
    false
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.core.control().claim_lock.release(self.core.slot());
    }
}

/// Frees the key locks of a dead process.
pub fn release_keys_of(core: &Core, dead: SlotId) {
    for index in 0..KEY_STRIPES {
        core.shm.stripe(index).release_dead(dead);
    }
    core.shm.process(dead.0 as usize).keys_held.store(0, SeqCst);
}

/// A process that holds key locks.
fn key_holder(core: &Core) -> Option<SlotId> {
    // What the dead have counted stays counted: then all have to be looked at.
    if core.control().log.keys_held.load(SeqCst) == 0 {
        return None;
    }
    (0..MAX_PROCESSES)
        .find(|&slot| core.shm.process(slot).keys_held.load(Acquire) != 0)
        .map(|slot| SlotId(slot as u16))
}

/// Says that no transaction is open any more, and wakes those who wait for that.
pub fn clear(core: &Core) {
    let word = &core.control().log.claim;
    if word.swap(0, AcqRel) & SLEEPERS != 0 {
        futex::wake(word, u32::MAX);
    }
}

/// Takes back what a dead process has said while it waited for key locks. Its slot may be another's by now, who would wait for itself.
pub fn forget_pending(core: &Core, dead: SlotId) {
    withdraw(core, (u32::from(dead.0) + 1) | PENDING);
}

fn owner_of(word: u32) -> Option<SlotId> {
    let owner = word & OWNER;
    (owner != 0).then(|| SlotId((owner - 1) as u16))
}

/// Who has a transaction open. Certain under the writer lock.
#[inline(always)]
pub fn open_by(core: &Core) -> Option<SlotId> {
    let word = core.control().log.claim.load(Relaxed);
    if word & PENDING != 0 { None } else { owner_of(word) }
}

/// The writer lock, with no transaction open: for steps that change nothing a user can see, but would change pages that a
/// transaction has built on.
pub fn lock_between(core: &Core, deadline: Option<Instant>) -> Result<Writer<'_>> {
    let since = Instant::now();
    loop {
        let writer = Writer::lock(core, deadline)?;
        let Some(owner) = open_by(core) else { return Ok(writer) };
        drop(writer);
        wait(core, owner, since, deadline)?;
    }
}

/// Who has a transaction open, or waits for key locks to be given back so as to open it.
#[inline]
pub fn claimed_by(core: &Core) -> Option<SlotId> {
    owner_of(core.control().log.claim.load(Acquire))
}

/// Sleeps until the transaction of `owner` has ended, for a while at most; gives it up if its owner has died. An error after
/// the deadline.
pub fn wait(core: &Core, owner: SlotId, since: Instant, deadline: Option<Instant>) -> Result<()> {
    let word = &core.control().log.claim;
    let seen = word.load(Acquire);
    if owner_of(seen) != Some(owner) {
        return Ok(());
    }
    let left = deadline.map_or(PATIENCE, |at| at.saturating_duration_since(Instant::now()));
    if left.is_zero() {
        return Err(core.locked("the claim (a transaction is open)", Some(owner), since.elapsed()));
    }
    let asleep = seen | SLEEPERS;
    if word.compare_exchange(seen, asleep, AcqRel, Relaxed).is_err() {
        return Ok(());
    }
    let woken = futex::wait(word, asleep, Some(left.min(PATIENCE)));
    if woken != futex::Wake::TimedOut {
        return Ok(());
    }
    if !core.is_alive(owner) {
        core.suspect(owner);
        forget_pending(core, owner);
        // Whoever has the lock gives up what is left.
        drop(Claim::lock(core, deadline)?);
        return Ok(());
    }
    // Its owner may have failed to give it up in time.
    let limit = deadline.map(|at| at.saturating_duration_since(Instant::now()));
    if open_by(core) == Some(owner) { abandon_left(core, limit) } else { Ok(()) }
}

/// Whether the owner of the claim has taken pages or logged chunks.
pub fn has_pages(core: &Core) -> bool {
    let control = core.control();
    control.claim_made.len.load(Acquire) != 0 || control.log.claim_first.load(Acquire) != 0
}

/// Makes room in the lists of the shared state for `runs` more runs of the owner of the claim, also where they go to when they are
/// given up: that must not fail, and there may be no room to be had by then.
pub fn secure_lists(writer: &mut Writer, runs: u64) -> Result<()> {
    let core = writer.core;
    let control = core.control();
    loop {
        let made = control.claim_made.len.load(Relaxed) + runs;
        let fresh = control.fresh.len.load(Relaxed) + made + RUNS_OF_OTHERS;
        let grown = core
            .shm
            .grow(&control.claim_made, made * 8)
            .and_then(|()| core.shm.grow(&control.fresh, fresh * retire::ENTRY_BYTES));
        match grown {
            Ok(()) => return Ok(()),
            // No room for a longer list: what is in it may be free by now.
            Err(_) if retire::reclaim(writer)? > 0 => {}
            Err(error) => return Err(core.io("grow the shared state", error)),
        }
    }
}

/// Gives up the pages of a transaction or a large operation that did not finish, and the claim word. The caller holds the
/// claim lock.
pub fn abandon(core: &Core, deadline: Option<Instant>) -> Result<()> {
    let control = core.control();
    let made = &control.claim_made;
    loop {
        let mut writer = Writer::lock(core, deadline)?;
        let len = made.len.load(Relaxed);
        let rest = len.saturating_sub(RUNS_PER_PART);
        let now = core.epoch();
        let mut step = Step::begin(&mut writer);
        for index in rest..len {
            step.give(list_get(core, made, index)?, now)?;
        }
        step.store_shared(&made.len, rest);
        if rest == 0 {
            step.store_shared(&control.log.claim_first, 0);
        }
        crash_point("repair.large.abandon");
        step.structure()?;
        drop(writer);
        if rest == 0 {
            if open_by(core).is_some() {
                clear(core);
            }
            return Ok(());
        }
    }
}

/// As [`abandon`], if nobody has the claim lock: of an operation that failed and could not give them up itself, because its time was
/// up, say.
pub fn abandon_left(core: &Core, limit: Option<Duration>) -> Result<()> {
    let is_left = || has_pages(core) || open_by(core).is_some();
    if !is_left() || !core.control().claim_lock.acquire_if_free(core.slot()) {
        return Ok(());
    }
    let claim = Claim { core };
    if is_left() {
        abandon(core, deadline_after(limit))?;
    }
    drop(claim);
    Ok(())
}
