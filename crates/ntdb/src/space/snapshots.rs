//! Who holds a snapshot: the epochs that replaced pages are kept for, beside those of checkpoints.
//!
//! A snapshot is an epoch and a root. It is registered under the writer lock, by an entry of a growable array in the shared state;
//! from then on no page that its root leads to is re-used ([`super::retire`]). The word *owner* of the entry decides: it is stored
//! last, and where a new epoch begins with the snapshot, by the same step.
//!
//! It is released without any lock, by setting *owner* to 0: what was held becomes free when somebody looks next. So holds come
//! under the writer lock only, and go at any time. That is enough for steps that are done again after a death: they may find fewer
//! holds than before, never more.
//!
//! | died after | crash point | left, and by whom it is put right |
//! | --- | --- | --- |
//! | writing the entry | `snapshot.entry`, `snapshot.prepared` | an entry without an owner, which means nothing |
//! | storing its owner | `snapshot.registered` | the entry of a dead process: released by its repairer, by whoever runs short of pages, or after a checkpoint |
//! | clearing the owner | `snapshot.released` | nothing; what it held is found with the next hold that goes |
//!
//! The number in *owner* never comes again, so nobody releases an entry that has become another's.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::core::Core;
use crate::error::{Error, Result};
use crate::limits::MAX_SNAPSHOTS;
use crate::shm::layout::SnapshotEntry;
use crate::storage::failpoint::crash_point;
use crate::storage::ofd::{LockKind, REPAIR};
use crate::transaction::step::Step;
use crate::transaction::writer::Writer;
use crate::types::{Epoch, Lsn, SlotId};

const ENTRY_BYTES: u64 = size_of::<SnapshotEntry>() as u64;
/// In the word *owner*: the slot + 1.
const SLOT: u64 = 0xffff;
/// Owners asked whether they live, by one who runs short of pages: the oldest snapshot's, and some others' in turn.
const ASKED: u64 = 4;

/// What a registered snapshot says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registered {
    /// The entry.
    pub index: u64,
    /// Its word *owner*.
    pub owner: u64,
    /// The epoch that it holds.
    pub epoch: Epoch,
    /// Its root word.
    pub root: u64,
    /// The first change that is not in it.
    pub lsn: Lsn,
    /// Milliseconds since the Unix epoch when it was registered.
    pub since: u64,
}

impl Registered {
    /// The process that holds it.
    pub fn process(&self) -> SlotId {
        SlotId(((self.owner & SLOT) as u16).wrapping_sub(1))
    }
}

fn entry(core: &Core, index: u64) -> Result<&SnapshotEntry> {
    let at = core
        .shm
        .element(&core.control().snapshots, index * ENTRY_BYTES)
        .ok_or_else(|| core.corrupt_shm("the list of snapshots is cut off"))?;
    // SAFETY: an entry does not straddle chunks, whose sizes are multiples of 64, and it is aligned; atomics may be shared.
    Ok(unsafe { &*at.cast::<SnapshotEntry>() })
}

fn len(core: &Core) -> u64 {
    core.control().snapshots.len.load(Acquire).min(MAX_SNAPSHOTS as u64)
}

/// The snapshot in entry `index`, if there is one.
fn get(core: &Core, index: u64) -> Result<Option<Registered>> {
    if index >= len(core) {
        return Ok(None);
    }
    let words = entry(core, index)?;
    let owner = words.owner.load(Acquire);
    Ok((owner != 0).then(|| Registered {
        index,
        owner,
        epoch: Epoch(words.epoch.load(Relaxed)),
        root: words.root.load(Relaxed),
        lsn: Lsn(words.lsn.load(Relaxed)),
        since: words.since.load(Relaxed),
    }))
}

/// All registered snapshots. Exact only under the writer lock, and even then some may be released meanwhile.
pub fn all(core: &Core) -> Result<Vec<Registered>> {
    let mut found = Vec::new();
    for index in 0..len(core) {
        found.extend(get(core, index)?);
    }
    Ok(found)
}

/// The snapshot registered last, if it is still held.
pub fn last(core: &Core) -> Result<Option<Registered>> {
    get(core, core.control().snapshot.last.load(Relaxed))
}

/// The epochs of all snapshots, in order, each once. Exact under the writer lock, but for those released meanwhile.
///
/// They are remembered until a snapshot comes or goes, so that they can be asked for often. Who asks without the lock leaves to others no
/// list that they would take for exact: *version* changes before a snapshot comes and again when it has come.
pub fn epochs(core: &Core) -> Result<Arc<Vec<u64>>> {
    let version = core.control().snapshot.version.load(Acquire);
    let mut known = core.snapshot_epochs.lock();
    if known.0 != version {
        let mut epochs: Vec<u64> = all(core)?.iter().map(|snapshot| snapshot.epoch.0).collect();
        epochs.sort_unstable();
        epochs.dedup();
        *known = (version, Arc::new(epochs));
    }
    Ok(known.1.clone())
}

/// Whether there is any snapshot. As [`epochs`].
pub fn is_any(core: &Core) -> Result<bool> {
    // Most databases have never had one.
    Ok(core.control().snapshots.len.load(Relaxed) != 0 && !epochs(core)?.is_empty())
}

/// Registers a snapshot of the present state, which has `root`, or of an earlier one that is the same and still held (`shared`: its
/// epoch and root).
pub fn register(
    writer: &mut Writer,
    root: u64,
    shared: Option<(Epoch, u64)>,
) -> Result<Registered> {
    let core = writer.core;
    let control = core.control();
    let words = &control.snapshot;
    let index = free_entry(writer)?;
    let now = core.epoch();
    let (epoch, root) = shared.unwrap_or((now, root));
    let lsn = Lsn(control.writer.tail.load(Relaxed));
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = since.map_or(0, |time| time.as_millis() as u64);
    // Before the owner: a list of epochs that was made before this counts as old from now on.
    let serial = words.version.fetch_add(1, AcqRel) + 1;
    let owner = (u64::from(core.slot().0) + 1) | serial << 16;
    let place = entry(core, index)?;
    place.epoch.store(epoch.0, Relaxed);
    place.root.store(root, Relaxed);
    place.lsn.store(lsn.0, Relaxed);
    place.since.store(since, Relaxed);
    crash_point("snapshot.entry");
    if shared.is_some() {
        place.owner.store(owner, Release);
    } else {
        let mut step = Step::begin(writer);
        step.store_shared(&place.owner, owner);
        step.store_shared(&control.writer.epoch, now.0 + 1);
        crash_point("snapshot.prepared");
        step.structure()?;
    }
    // And after it: a list made in between, by one who does without the lock, knows neither whether this comes nor that it has come.
    words.version.fetch_add(1, AcqRel);
    words.last.store(index, Relaxed);
    crash_point("snapshot.registered");
    Ok(Registered { index, owner, epoch, root, lsn, since })
}

/// An entry that is free.
fn free_entry(writer: &mut Writer) -> Result<u64> {
    let core = writer.core;
    let control = core.control();
    let first_free = &control.snapshot.first_free;
    // So that nobody looks through what only a crowd of long ago needed.
    while let Some(last) = len(core).checked_sub(1)
        && entry(core, last)?.owner.load(Acquire) == 0
    {
        control.snapshots.len.store(last, Release);
    }
    for attempt in 0..3 {
        let hint = first_free.load(Relaxed);
        let mut index = hint;
        while index < len(core) && entry(core, index)?.owner.load(Acquire) != 0 {
            index += 1;
        }
        if index < MAX_SNAPSHOTS as u64 {
            if index >= len(core) {
                index = len(core);
                let bytes = (index + 1) * ENTRY_BYTES;
                core.shm
                    .grow(&control.snapshots, bytes)
                    .map_err(|e| core.io("grow the shared state", e))?;
                control.snapshots.len.store(index + 1, Release);
            }
            // Unless one before has been released meanwhile.
            let _ = first_free.compare_exchange(hint, index + 1, Relaxed, Relaxed);
            return Ok(index);
        }
        first_free.store(0, Relaxed);
        if attempt == 1 {
            release_dead(writer, u64::MAX)?;
        }
    }
    Err(Error::TooMany { path: core.path.clone(), what: "snapshots", limit: MAX_SNAPSHOTS as u64 })
}

/// Releases a snapshot. Needs no lock and waits for nobody; says whether it was still registered.
pub fn release(core: &Core, index: u64, owner: u64) -> bool {
    let Ok(place) = entry(core, index) else { return false };
    // What was read through it was read before.
    if place.owner.compare_exchange(owner, 0, AcqRel, Relaxed).is_err() {
        return false;
    }
    crash_point("snapshot.released");
    let control = core.control();
    control.snapshot.first_free.fetch_min(index, Relaxed);
    control.snapshot.version.fetch_add(1, AcqRel);
    control.space.holds_version.fetch_add(1, AcqRel);
    true
}

/// Whether the process in `slot` holds any.
pub fn has_any_of(core: &Core, slot: SlotId) -> bool {
    // What cannot be read is for a repairer to report.
    all(core).map_or(true, |all| all.iter().any(|snapshot| snapshot.process() == slot))
}

/// Releases all snapshots of a process that is dead, or is about to leave.
pub fn release_process(core: &Core, slot: SlotId) {
    let Ok(all) = all(core) else { return };
    for snapshot in all.iter().filter(|snapshot| snapshot.process() == slot) {
        release(core, snapshot.index, snapshot.owner);
    }
    // Of one that died between releasing and saying so.
    let control = core.control();
    control.snapshot.version.fetch_add(1, AcqRel);
    control.space.holds_version.fetch_add(1, AcqRel);
}

/// Releases all; nobody else is attached, and this process has none.
pub fn release_all(core: &Core) {
    for snapshot in all(core).unwrap_or_default() {
        release(core, snapshot.index, snapshot.owner);
    }
}

/// The oldest snapshot, of those registered.
pub fn oldest(all: &[Registered]) -> Option<&Registered> {
    all.iter().min_by_key(|snapshot| (snapshot.epoch, snapshot.since))
}

/// For one who runs short of pages: releases the snapshots of processes that turn out to be dead. Their other remains are repaired
/// later. Asks for the owner of the oldest one and some others. Says whether any was released.
pub fn release_dead_some(writer: &Writer) -> Result<bool> {
    if !is_any(writer.core)? {
        return Ok(false);
    }
    release_dead(writer, ASKED)
}

fn release_dead(writer: &Writer, most: u64) -> Result<bool> {
    let core = writer.core;
    let all = all(core)?;
    let asked = &core.control().snapshot.asked;
    let from = asked.load(Relaxed).min(all.len() as u64);
    let turn = all[from as usize..].iter().chain(&all[..from as usize]);
    let mut seen = Vec::new();
    let mut released = false;
    for snapshot in oldest(&all).into_iter().chain(turn) {
        if seen.len() as u64 >= most {
            break;
        }
        let process = snapshot.process();
        if process == core.slot() || seen.contains(&process) {
            continue;
        }
        seen.push(process);
        asked.store(snapshot.index + 1, Relaxed);
        if !core.is_alive(process) {
            core.suspect(process);
            released |= release_of_dead(core, process);
        }
    }
    Ok(released)
}

/// Releases the snapshots of a dead process, unless somebody repairs or attaches just now: a new owner of its slot may have
/// snapshots already.
fn release_of_dead(core: &Core, dead: SlotId) -> bool {
    let Some(ofd) = &core.session().ofd else {
        release_process(core, dead);
        return true;
    };
    // Tried only: a repairer may be waiting for the writer lock, which is held here.
    let Some(_repairing) = core.repairing.try_lock() else { return false };
    if !matches!(ofd.try_lock(REPAIR, LockKind::Exclusive), Ok(true)) {
        return false;
    }
    let is_dead = !core.is_alive(dead);
    if is_dead {
        release_process(core, dead);
    }
    let _ = ofd.unlock(REPAIR);
    is_dead
}
