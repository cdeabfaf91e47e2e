//! What a dead process leaves behind: locks, a half-done step, pins, stripes, a checkpoint, a large operation.
//!
//! Most of it is repaired by whoever needs it, in passing; this repairs a process as a whole. One repairer at a time holds
//! the repair byte; everything here may be done again by the next one if this one dies.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use crate::checkpoint::run::CheckpointGuard;
use crate::core::Core;
use crate::error::Result;
use crate::limits::{KEY_STRIPES, MAX_PROCESSES};
use crate::options::deadline_after;
use crate::shm::stripe::Holder;
use crate::space::{allocate, snapshots};
use crate::storage::failpoint::crash_point;
use crate::storage::ofd::{LockKind, REPAIR};
use crate::transaction::writer::Writer;
use crate::transaction::{claim, repair as step_repair};
use crate::types::SlotId;

use super::Environment;

/// No process's slot.
const NOBODY: SlotId = SlotId(u16::MAX);

/// Repairs the processes that were found dead in passing. What takes longer than `limit`, because somebody holds a lock, is left to
/// who needs it.
#[cold]
pub fn repair_suspects(environment: &Arc<Environment>, limit: Option<Duration>) {
    let core = &environment.core;
    let mut suspects = core.take_suspects();
    suspects.sort_unstable();
    suspects.dedup();
    for slot in suspects {
        if slot.0 as usize >= MAX_PROCESSES {
            continue;
        }
        let Some(ofd) = &core.session().ofd else { return };
        // The byte's lock belongs to the descriptor, which the threads of this process share.
        let Some(_repairing) = core.repairing.try_lock() else { continue };
        // Busy, or not to be had: somebody else repairs, or the next who needs it will.
        if !matches!(ofd.try_lock(REPAIR, LockKind::Exclusive), Ok(true)) {
            continue;
        }
        if !core.is_alive(slot) && core.shm.process(slot.0 as usize).state.load(Acquire) != 0 {
            let _ = repair_slot(core, slot, limit);
        }
        let _ = ofd.unlock(REPAIR);
    }
}

/// Whether a process, if it is dead, has left nothing but pins and its entry, so that a reader can have its slot.
pub fn is_easy(core: &Core, dead: SlotId) -> bool {
    let control = core.control();
    let locks = [
        &control.writer_lock,
        &control.flush_lock,
        &control.sync_lock,
        &control.checkpoint_lock,
        &control.claim_lock,
        &control.log_start_lock,
    ];
    let entry = core.shm.process(dead.0 as usize);
    entry.flushing.load(Acquire) == 0
        && entry.keys_held.load(Acquire) == 0
        && claim::claimed_by(core) != Some(dead)
        && !snapshots::has_any_of(core, dead)
        && locks.iter().all(|lock| lock.turn().owner() != Some(dead))
        && (0..KEY_STRIPES)
            .all(|index| core.shm.stripe(index).holder(NOBODY) != Holder::Other(dead))
}

/// Repairs everything of a process that is dead. Its slot may be the caller's own by now, which must not have used
/// anything yet.
pub fn repair_slot(core: &Core, dead: SlotId, limit: Option<Duration>) -> Result<()> {
    let control = core.control();
    let me = core.slot();
    crash_point("repair.slot.begin");
    if control.writer_lock.take_over(me, dead) {
        let mut writer = Writer::taken_over(core);
        step_repair::repair(&mut writer)?;
        drop(writer);
    }
    crash_point("repair.slot.writer");
    // What the writer lock's repair has not completed of a log that was being started, the next one starts anew.
    for lock in [&control.flush_lock, &control.sync_lock, &control.log_start_lock] {
        if lock.take_over(me, dead) {
            let turn = lock.turn();
            lock.release_if_mine(turn);
        }
    }
    // Perhaps it was compacting.
    allocate::avoid_from(core, 0);
    let entry = core.shm.process(dead.0 as usize);
    entry.flushing.store(0, SeqCst);
    CheckpointGuard::take_over(core, dead, limit)?;
    crash_point("repair.slot.checkpoint");
    if control.claim_lock.take_over(me, dead) {
        let result = claim::abandon(core, deadline_after(limit));
        control.claim_lock.release(me);
        result?;
    }
    claim::forget_pending(core, dead);
    claim::release_keys_of(core, dead);
    crash_point("repair.slot.stripes");
    snapshots::release_process(core, dead);
    crash_point("repair.slot.snapshots");
    if dead != me {
        core.pins.release_process(dead);
        entry.state.store(0, Release);
    }
    control.counters.repairs.fetch_add(1, Relaxed);
    crash_point("repair.slot.done");
    Ok(())
}
