//! A place in the process table.
//!
//! A process is attached when it holds the lock on its slot's byte. Under the attach lock, an opener takes the lowest slot
//! that nobody holds; what a dead owner of it left is repaired before anything else. Readers hold a shared lock, so among them
//! the entry's state decides. Databases that no other process shares have a session without a lock.

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::{Backing, Core};
use crate::error::{Error, Result};
use crate::limits::{self, MAX_PROCESSES};
use crate::options::deadline_after;
use crate::shm::pin::{Attachment, PinTable};
use crate::shm::process::Session;
use crate::storage::failpoint::crash_point;
use crate::storage::fork;
use crate::storage::membarrier;
use crate::storage::ofd::{LockKind, OfdFile, REPAIR, slot_byte};
use crate::transaction::writer::Writer;
use crate::types::SlotId;

use super::repair;

/// Takes the lowest free slot through `ofd`, which keeps its lock from then on. Waits for other locks for `limit` each.
pub(super) fn take_slot(core: &Core, ofd: OfdFile, limit: Option<Duration>) -> Result<()> {
    let read_only = core.backing == Backing::SharedReadOnly;
    let kind = if read_only { LockKind::Shared } else { LockKind::Exclusive };
    let io = |e| core.io("take a slot in the process table", e);
    // Keeps repairers from taking a slot for dead whose owner has not locked it yet.
    let begin = Instant::now();
    if !ofd.lock_wait(REPAIR, kind, deadline_after(limit)).map_err(io)? {
        return Err(core.locked("the repair lock", None, begin.elapsed()));
    }
    let Some((slot, free)) = lock_slot(core, &ofd, read_only).map_err(io)? else {
        return Err(Error::TooMany {
            path: core.path.clone(),
            what: "processes",
            limit: MAX_PROCESSES as u64,
        });
    };
    crash_point("attach.slot.locked");
    core.pins.release_process(slot);
    let pins = Attachment::new(pin_table(core), slot).ok_or_else(|| Error::TooMany {
        path: core.path.clone(),
        what: "readers",
        limit: limits::MAX_PINS as u64,
    })?;
    let session = Session { slot, ofd: Some(ofd), pins, fork_generation: fork::generation() };
    core.set_session(Box::new(session));
    if !free {
        repair::repair_slot(core, slot, limit)?;
    }
    let entry = core.shm.process(slot.0 as usize);
    entry.pid.store(std::process::id(), Relaxed);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    entry.since.store(now.map_or(0, |t| t.as_secs()), Relaxed);
    entry.flushing.store(0, Relaxed);
    entry.state.store(ATTACHED, Release);
    if let Some(ofd) = &core.session().ofd {
        ofd.unlock(REPAIR).map_err(io)?;
    }
    crash_point("attach.slot.taken");
    go_fenceless_within(core, limit)
}

/// `PinWords::fenceless`: somebody is about to pin without fences; reclaimers use the barrier from now on.
const WANTS_FENCELESS: u32 = 1;

/// All reclaimers know.
const FENCELESS: u32 = 2;

/// Leaves the fences of this process's pins to those who reclaim, if the kernel provides for it. Where nobody else holds locks.
pub(super) fn go_fenceless(core: &Core) -> Result<()> {
    go_fenceless_within(core, None)
}

fn go_fenceless_within(core: &Core, limit: Option<Duration>) -> Result<()> {
    if !membarrier::register() {
        return Ok(());
    }
    let word = &core.control().pins.fenceless;
    if word.load(SeqCst) != FENCELESS {
        if core.backing == Backing::SharedReadOnly {
            // Taking the writer lock might mean to repair, which it cannot.
            return Ok(());
        }
        let _ = word.compare_exchange(0, WANTS_FENCELESS, SeqCst, SeqCst);
        // A reclaimer that did not see the word yet has finished after this.
        drop(Writer::lock(core, deadline_after(limit))?);
        word.store(FENCELESS, SeqCst);
    }
    core.session().pins.go_fenceless();
    Ok(())
}

/// Locks the lowest free slot; says whether its last owner had left it in order.
fn lock_slot(
    core: &Core,
    ofd: &OfdFile,
    read_only: bool,
) -> std::io::Result<Option<(SlotId, bool)>> {
    for index in 0..MAX_PROCESSES as u16 {
        let entry = core.shm.process(index as usize);
        let free = entry.state.load(Acquire) == 0;
        if !read_only {
            if ofd.try_lock(slot_byte(index), LockKind::Exclusive)? {
                return Ok(Some((SlotId(index), free)));
            }
            continue;
        }
        if free && claim_entry(core, ofd, index, 0)? {
            return Ok(Some((SlotId(index), true)));
        }
    }
    // Dead readers keep their entries until a writer repairs them; if nobody does, a reader takes one that needs no repair.
    for index in 0..MAX_PROCESSES as u16 {
        if read_only
            && repair::is_easy(core, SlotId(index))
            && claim_entry(core, ofd, index, ATTACHED)?
        {
            return Ok(Some((SlotId(index), true)));
        }
    }
    Ok(None)
}

/// `ProcessEntry::state` of a process that is attached.
const ATTACHED: u32 = 1;

/// Of one that is being taken by a reader.
const CLAIMED: u32 = 2;

/// Takes the entry and the lock of a slot for a reader. Its lock is a shared one, so the entry decides between two of its kind.
fn claim_entry(core: &Core, ofd: &OfdFile, index: u16, state: u32) -> std::io::Result<bool> {
    let word = &core.shm.process(index as usize).state;
    let taken = || ofd.is_locked_by_other(slot_byte(index), LockKind::Exclusive);
    if word.load(Acquire) != state || taken()? {
        return Ok(false);
    }
    if word.compare_exchange(state, CLAIMED, AcqRel, Relaxed).is_err() {
        return Ok(false);
    }
    // Looked at again: another reader may have taken it, and finished, between the two.
    if !taken()? && ofd.try_lock(slot_byte(index), LockKind::Shared)? {
        return Ok(true);
    }
    word.store(state, Release);
    Ok(false)
}

fn pin_table(core: &Core) -> PinTable {
    let control = core.control();
    // SAFETY: the words lie in the shared state, which the core keeps mapped longer than its session.
    unsafe {
        PinTable::new(core.shm.pin_slots(), limits::MAX_PINS, &control.pins.mark, &control.pins.era)
    }
}

/// A session where no other process can be.
pub(super) fn private_session(core: &Core) -> Result<Box<Session>> {
    // A forked child of an in-memory database finds the locks of its parent's threads; under another slot, they are a
    // dead process's.
    let slot = SlotId((fork::generation() % MAX_PROCESSES as u64) as u16);
    core.pins.release_process(slot);
    let pins = Attachment::new(pin_table(core), slot).ok_or_else(|| Error::TooMany {
        path: core.path.clone(),
        what: "readers",
        limit: limits::MAX_PINS as u64,
    })?;
    Ok(Box::new(Session { slot, ofd: None, pins, fork_generation: fork::generation() }))
}
