//! Replaced pages, from their replacement to their re-use.
//!
//! A step that replaces pages puts them at the end of the *fresh* queue, with the epoch in which they were made, the epoch in
//! which they were replaced, and the reclaim era read after the replacement was visible. They wait there for pins:
//! a run passes when every pin is newer than its era. Then it is free, or, if a checkpoint or snapshot has its
//! epoch in [made, replaced), goes to the *held* list, which is filtered again when one of those has gone.
//!
//! Both moves are steps of their own with notes of their own ([`state::RECLAIM`], [`state::SCAN_HELD`]). Their operands are absolute and
//! their decisions depend only on what the writer lock protects, and on which snapshots have been released, so that repeating them after a death gives the
//! same, or frees a run that was put on the list before: the list is then written anew from the same place.
//! Freed pages cannot be taken in between, since repair comes before anything else.
//!
//! Each step moves a bounded number of runs, so that nobody waits long for the lock. A filtering of the held list that is
//! not finished leaves a gap: the runs before it are kept, those behind it are still to be looked at. Who ends a hold goes
//! through the whole list ([`settle`]), with the lock let go between the parts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::Duration;

use crate::core::Core;
use crate::error::Result;
use crate::options::deadline_after;
use crate::shm::layout::phase;
use crate::shm::note::state;
use crate::shm::segment::SegmentTable;
use crate::storage::failpoint::crash_point;
use crate::transaction::writer::Writer;
use crate::types::{Epoch, Era, PageNo, Run};

use super::{allocate, snapshots};

/// Bytes of an entry in the queue and the list.
pub const ENTRY_BYTES: u64 = 32;
/// Era advances after so many retirements: pins then hold back at most this many pages too long.
const RETIREMENTS_PER_ERA: u32 = 16;
/// Most runs that one step moves, so that it takes some ten microseconds.
const PART: u64 = 512;

/// In place of the epoch in which pages were replaced: the one in which the step is carried out.
pub const NOW: Epoch = Epoch(0);

/// A replaced run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retired {
    /// The pages.
    pub run: Run,
    /// Epoch in which they were made.
    pub made: Epoch,
    /// Epoch in which they were replaced.
    pub replaced: Epoch,
    /// Reclaim era of the replacement.
    pub era: Era,
}

fn words<'a>(core: &'a Core, table: &SegmentTable, index: u64) -> Result<[&'a AtomicU64; 4]> {
    let at = core
        .shm
        .element(table, index * ENTRY_BYTES)
        .ok_or_else(|| core.corrupt_shm("a list of replaced pages is cut off"))?
        .cast::<AtomicU64>();
    // SAFETY: an entry does not straddle chunks, whose sizes are multiples of 32; atomics may be shared.
    Ok(unsafe { [&*at, &*at.add(1), &*at.add(2), &*at.add(3)] })
}

/// Entry `index` of `table`.
pub fn entry(core: &Core, table: &SegmentTable, index: u64) -> Result<Retired> {
    let [run, made, replaced, era] = words(core, table, index)?;
    let run = run.load(Relaxed);
    Ok(Retired {
        run: Run { first: PageNo(run as u32), len: (run >> 32) as u32 },
        made: Epoch(made.load(Relaxed)),
        replaced: Epoch(replaced.load(Relaxed)),
        era: Era(era.load(Relaxed)),
    })
}

/// Writes entry `index` of `table`.
pub fn set_entry(core: &Core, table: &SegmentTable, index: u64, retired: &Retired) -> Result<()> {
    let [run, made, replaced, era] = words(core, table, index)?;
    run.store(retired.run.first.0 as u64 | (retired.run.len as u64) << 32, Relaxed);
    made.store(retired.made.0, Relaxed);
    replaced.store(retired.replaced.0, Relaxed);
    era.store(retired.era.0, Relaxed);
    Ok(())
}

/// Where a replaced run waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum List {
    /// For pins.
    Fresh,
    /// For checkpoints and snapshots.
    Held,
}

/// All replaced runs. The caller holds the writer lock, or can do without exactness.
pub fn all(core: &Core) -> Result<Vec<(Retired, List)>> {
    let control = core.control();
    let (kept, read) = held_gap(core);
    let mut found = Vec::new();
    for index in control.fresh.head.load(Relaxed)..control.fresh.len.load(Relaxed) {
        found.push((entry(core, &control.fresh, index)?, List::Fresh));
    }
    for index in (0..kept).chain(read..control.held.len.load(Relaxed)) {
        found.push((entry(core, &control.held, index)?, List::Held));
    }
    Ok(found)
}

/// Pages of all replaced runs, without the writer lock: others may be changing the lists.
pub fn pages_roughly(core: &Core) -> u64 {
    let control = core.control();
    let pages = |table: &SegmentTable, from: u64, to: u64| -> u64 {
        let runs = (from..to).map_while(|index| entry(core, table, index).ok());
        runs.map(|retired| retired.run.len as u64).sum()
    };
    let (kept, read) = held_gap(core);
    let (fresh, held) = (&control.fresh, &control.held);
    pages(fresh, fresh.head.load(Relaxed), fresh.len.load(Relaxed))
        + pages(held, 0, kept)
        + pages(held, read, held.len.load(Relaxed))
}

/// Fills in what a replacement knows only once it is visible, and extends the queue to `after`.
pub fn enqueue(core: &Core, before: u64, after: u64) -> Result<()> {
    if after == before {
        return Ok(());
    }
    let control = core.control();
    // The pages are unlinked; a reader that pins from here on does not find them.
    let era = core.pins.era_of_retirement();
    let epoch = core.epoch();
    for index in before..after {
        let [_, _, replaced, in_era] = words(core, &control.fresh, index)?;
        if replaced.load(Relaxed) == NOW.0 {
            replaced.store(epoch.0, Relaxed);
        }
        in_era.store(era.0, Relaxed);
    }
    control.fresh.len.store(after, Release);
    let count = control.space.retirements.load(Relaxed) + 1;
    if count >= RETIREMENTS_PER_ERA {
        control.space.retirements.store(0, Relaxed);
        core.pins.advance();
    } else {
        control.space.retirements.store(count, Relaxed);
    }
    Ok(())
}

/// Number of runs in the fresh queue.
pub fn waiting(core: &Core) -> u64 {
    let fresh = &core.control().fresh;
    fresh.len.load(Relaxed).saturating_sub(fresh.head.load(Relaxed))
}

/// The epochs that hold replaced pages back.
pub struct Holds {
    durable: u64,
    running: Option<u64>,
    /// Of snapshots, in order.
    snapshots: Arc<Vec<u64>>,
    no_reuse_below: u32,
}

impl Holds {
    /// Those of this moment. The caller holds the writer lock, or can do without exactness.
    pub fn now(core: &Core) -> Result<Holds> {
        let checkpoint = &core.control().checkpoint;
        Ok(Holds {
            durable: checkpoint.durable_epoch.load(Relaxed),
            running: (checkpoint.phase.load(Relaxed) != phase::IDLE)
                .then(|| checkpoint.running_epoch.load(Relaxed)),
            snapshots: snapshots::epochs(core)?,
            no_reuse_below: checkpoint.no_reuse_below.load(Relaxed),
        })
    }

    /// Whether a checkpoint holds the run.
    pub fn by_checkpoint(&self, retired: &Retired) -> bool {
        let is_in = |epoch: u64| retired.made.0 <= epoch && epoch < retired.replaced.0;
        is_in(self.durable)
            || self.running.is_some_and(is_in)
            || retired.run.first.0 < self.no_reuse_below
    }

    /// Whether a snapshot holds the run.
    pub fn by_snapshot(&self, retired: &Retired) -> bool {
        let next = self.snapshots.partition_point(|&hold| hold < retired.made.0);
        self.snapshots.get(next).is_some_and(|&hold| hold < retired.replaced.0)
    }

    fn any(&self, retired: &Retired) -> bool {
        self.by_checkpoint(retired) || self.by_snapshot(retired)
    }
}

/// Frees what no pin holds any more, or moves it to the held list. Returns the number of pages freed.
pub fn reclaim(writer: &mut Writer) -> Result<u64> {
    let core = writer.core;
    let control = core.control();
    let (head, len) = (control.fresh.head.load(Relaxed), control.fresh.len.load(Relaxed));
    if head >= len {
        return Ok(0);
    }
    let oldest = writer.oldest_pin();
    let mut count = 0;
    while head + count < len
        && count < PART
        && oldest.is_none_or(|pin| entry_era(core, head + count).is_some_and(|era| era < pin))
    {
        count += 1;
    }
    let held_len = control.held.len.load(Relaxed);
    if core.shm.grow(&control.held, (held_len + count) * ENTRY_BYTES).is_err() {
        // No room for a longer list of what is held: then only what need not go there.
        count = free_prefix(core, head, count)?;
    }
    if count == 0 {
        return Ok(0);
    }
    let note = &control.note;
    for (operand, value) in note.operand.iter().zip([head, count, held_len, len]) {
        operand.store(value, Relaxed);
    }
    let before = control.writer.free_pages.load(Relaxed);
    crash_point("retire.reclaim.noted");
    note.set_state(state::RECLAIM);
    redo_reclaim(writer)?;
    note.set_state(state::IDLE);
    crash_point("retire.reclaim.done");
    compact_fresh(writer)?;
    Ok(control.writer.free_pages.load(Relaxed).saturating_sub(before))
}

/// How many of the `count` entries from `head` on are free before the first that is held.
fn free_prefix(core: &Core, head: u64, count: u64) -> Result<u64> {
    let holds = Holds::now(core)?;
    for index in head..head + count {
        if holds.any(&entry(core, &core.control().fresh, index)?) {
            return Ok(index - head);
        }
    }
    Ok(count)
}

fn entry_era(core: &Core, index: u64) -> Option<Era> {
    entry(core, &core.control().fresh, index).ok().map(|retired| retired.era)
}

/// Carries out a noted reclaim, once or again.
pub fn redo_reclaim(writer: &Writer) -> Result<()> {
    let core = writer.core;
    let control = core.control();
    let [head, count, held_len, len] =
        std::array::from_fn(|i| control.note.operand[i].load(Relaxed));
    let holds = Holds::now(core)?;
    let mut held_end = held_len;
    for index in head..head.saturating_add(count) {
        let retired = entry(core, &control.fresh, index)?;
        if holds.any(&retired) {
            set_entry(core, &control.held, held_end, &retired)?;
            held_end += 1;
        } else {
            allocate::free(writer, retired.run)?;
        }
        crash_point("retire.reclaim.entry");
    }
    control.held.len.store(held_end, Relaxed);
    crash_point("retire.reclaim.held");
    let (new_head, new_len) = if head + count >= len { (0, 0) } else { (head + count, len) };
    // The length first: an empty queue must never seem to have entries before its head.
    control.fresh.len.store(new_len, Relaxed);
    crash_point("retire.reclaim.len");
    control.fresh.head.store(new_head, Relaxed);
    Ok(())
}

/// Moves the fresh queue to the front of its array, if that has become mostly consumed.
fn compact_fresh(writer: &mut Writer) -> Result<()> {
    let control = writer.core.control();
    let (head, len) = (control.fresh.head.load(Relaxed), control.fresh.len.load(Relaxed));
    // Source and destination must not overlap, so that the move may be repeated.
    if head < 1024 || head < len - head {
        return Ok(());
    }
    control.note.operand[0].store(head, Relaxed);
    control.note.operand[1].store(len, Relaxed);
    control.note.set_state(state::COMPACT_FRESH);
    crash_point("retire.compact.noted");
    redo_compact_fresh(writer)?;
    control.note.set_state(state::IDLE);
    Ok(())
}

/// Carries out a noted move, once or again.
pub fn redo_compact_fresh(writer: &Writer) -> Result<()> {
    let core = writer.core;
    let fresh = &core.control().fresh;
    let [head, len] = std::array::from_fn(|i| core.control().note.operand[i].load(Relaxed));
    for index in head..len {
        let retired = entry(core, fresh, index)?;
        set_entry(core, fresh, index - head, &retired)?;
    }
    crash_point("retire.compact.copied");
    fresh.len.store(len - head, Relaxed);
    crash_point("retire.compact.len");
    fresh.head.store(0, Relaxed);
    Ok(())
}

/// The part of the held list, entries from and to, that an unfinished filtering has read and not filled again.
pub fn held_gap(core: &Core) -> (u64, u64) {
    let gap = core.control().space.held_gap.load(Relaxed);
    (gap & 0xffff_ffff, gap >> 32)
}

/// Whether there may be runs in the held list that nothing holds any more.
pub fn may_free_held(core: &Core) -> bool {
    let space = &core.control().space;
    space.held_gap.load(Relaxed) != 0
        || space.holds_version.load(Relaxed) != space.scanned_version.load(Relaxed)
}

/// Filters a part of the held list, if a hold has gone since it was filtered. Returns the number of pages freed.
pub fn filter_held(writer: &mut Writer) -> Result<u64> {
    if !may_free_held(writer.core) {
        return Ok(0);
    }
    filter_part(writer)
}

/// Filters all of the held list. Returns the number of pages freed.
pub fn filter_held_now(writer: &mut Writer) -> Result<u64> {
    let mut freed = 0;
    // First what an earlier filtering has begun, whose kept runs may be free by now.
    for _ in 0..2 {
        loop {
            freed += filter_part(writer)?;
            if held_gap(writer.core) == (0, 0) {
                break;
            }
        }
    }
    Ok(freed)
}

fn filter_part(writer: &mut Writer) -> Result<u64> {
    let control = writer.core.control();
    let space = &control.space;
    let len = control.held.len.load(Relaxed);
    let gap = space.held_gap.load(Relaxed);
    if gap == 0 {
        space.scanned_version.store(space.holds_version.load(Relaxed), Relaxed);
        if len == 0 {
            return Ok(0);
        }
    }
    let before = control.writer.free_pages.load(Relaxed);
    let end = (gap >> 32).saturating_add(PART).min(len);
    for (operand, value) in control.note.operand.iter().zip([gap, end, len]) {
        operand.store(value, Relaxed);
    }
    control.note.set_state(state::SCAN_HELD);
    crash_point("retire.scan.noted");
    redo_filter_held(writer)?;
    control.note.set_state(state::IDLE);
    Ok(control.writer.free_pages.load(Relaxed).saturating_sub(before))
}

/// Goes on with a noted filtering. Progress is one word: entries read in the upper half, entries kept in the lower.
pub fn redo_filter_held(writer: &Writer) -> Result<()> {
    let core = writer.core;
    let control = core.control();
    let [progress, end, len, _] = &control.note.operand;
    let (end, len) = (end.load(Relaxed), len.load(Relaxed));
    let holds = Holds::now(core)?;
    loop {
        let (read, kept) = (progress.load(Relaxed) >> 32, progress.load(Relaxed) & 0xffff_ffff);
        if read >= end {
            break;
        }
        let retired = entry(core, &control.held, read)?;
        let kept = if holds.any(&retired) {
            set_entry(core, &control.held, kept, &retired)?;
            kept + 1
        } else {
            allocate::free(writer, retired.run)?;
            kept
        };
        crash_point("retire.scan.entry");
        progress.store((read + 1) << 32 | kept, Relaxed);
    }
    let gap = progress.load(Relaxed);
    let whole = end >= len;
    if whole {
        control.held.len.store(gap & 0xffff_ffff, Relaxed);
        crash_point("retire.scan.len");
    }
    control.space.held_gap.store(if whole { 0 } else { gap }, Relaxed);
    Ok(())
}

/// Frees what a hold that has ended, and what readers that have gone, were the last to hold back. Lets the writer lock go now
/// and then.
pub fn settle(core: &Core, limit: Option<Duration>) -> Result<()> {
    // Those of the dead, too, some of them each time.
    snapshots::release_dead_some(&Writer::lock(core, deadline_after(limit))?)?;
    loop {
        let mut writer = Writer::lock(core, deadline_after(limit))?;
        let waited = waiting(core);
        reclaim(&mut writer)?;
        filter_held(&mut writer)?;
        // What pins hold back stays.
        let goes_on = waiting(core) != 0 && waiting(core) < waited;
        if !goes_on && !may_free_held(core) {
            return Ok(());
        }
    }
}
