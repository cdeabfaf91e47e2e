//! One atomic change of the shared structures, which survives the death of its maker.
//!
//! A step takes pages, fills them where nobody can see them, gives up others, and becomes visible by a few stores. The
//! order of its words, and what a death between any two leaves, is told in [`crate::shm::note`].

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::*, compiler_fence};

use crate::core::Core;
use crate::error::Result;
use crate::index::discard;
use crate::page::bucket::Bucket;
use crate::shm::note::{MAX_STORES, NO_LSN, state};
use crate::shm::ways::{self, Way};
use crate::space::{allocate, bits, retire};
use crate::storage::failpoint::crash_point;
use crate::types::{Epoch, Lsn, PageNo, Run};

use super::private::{Piece, Store, What};
use super::record::{LogRecord, Unplaced};
use super::writer::Writer;

/// Marks a place in the shared-memory file, as opposed to the data file.
pub const IN_SHM: u64 = 1 << 63;

/// A step being prepared. Dropped before it is finished, it leaves nothing behind.
#[derive(Debug)]
pub struct Step<'w, 'a> {
    writer: &'w mut Writer<'a>,
    stores: usize,
    given: u64,
    has_taken: bool,
}

impl<'w, 'a> Step<'w, 'a> {
    /// Begins a step.
    #[inline]
    pub fn begin(writer: &'w mut Writer<'a>) -> Step<'w, 'a> {
        Step { writer, stores: 0, given: 0, has_taken: false }
    }

    /// What the step works on.
    #[inline]
    pub fn core(&self) -> &'a Core {
        self.writer.core
    }

    /// Whether it changes a transaction's private tree.
    pub fn is_private(&self) -> bool {
        self.writer.is_private()
    }

    /// Records before the step.
    #[inline]
    pub fn count(&self) -> u64 {
        self.writer.count()
    }

    /// Takes `pages` consecutive pages. Their contents are arbitrary and nobody else can see them.
    pub fn take(&mut self, pages: u32) -> Result<PageNo> {
        self.take_as(pages, false)
    }

    /// As [`Step::take`], for pages without a header, which will hold a value.
    pub fn take_for_value(&mut self, pages: u32) -> Result<PageNo> {
        self.take_as(pages, true)
    }

    fn take_as(&mut self, pages: u32, is_value: bool) -> Result<PageNo> {
        let core = self.writer.core;
        if let Some(private) = self.writer.private_tree() {
            let first = private.take(core, pages)?;
            let run = Run { first, len: pages };
            let what = if is_value { What::Value } else { What::Page };
            private.step_taken.push(Piece { run, made: core.epoch(), what });
            return Ok(first);
        }
        let control = core.control();
        let may_reclaim = self.given == 0;
        if may_reclaim && self.stores == 0 && discard::is_due(core) && !self.has_taken {
            // This step has noted nothing yet, so another may come before it.
            let free = control.writer.free_pages.load(Relaxed);
            if free < pages as u64 {
                discard::part(self.writer)?;
            }
        }
        let first = allocate::find(self.writer, pages, may_reclaim)?;
        self.mark_taken(Run { first, len: pages })?;
        Ok(first)
    }

    /// Takes pages that begin at `first`, directly behind others of their owner: at least `least`, at most `most`, or none.
    pub fn take_behind(&mut self, first: PageNo, least: u32, most: u32) -> Result<u32> {
        let pages = allocate::find_behind(self.writer, first, least, most)?;
        if pages > 0 {
            self.mark_taken(Run { first, len: pages })?;
        }
        Ok(pages)
    }

    /// As [`Step::take_behind`], behind the value in `run`, if this is a transaction's step and the value its own. Returns how many
    /// pages the value has more.
    pub fn extend_value(&mut self, run: Run, least: u32, most: u32) -> Result<u32> {
        let core = self.writer.core;
        match self.writer.private_tree() {
            Some(private) => private.extend_value(core, run, least, most),
            None => Ok(0),
        }
    }

    fn mark_taken(&mut self, run: Run) -> Result<()> {
        let core = self.writer.core;
        let control = core.control();
        let index = control.taken.len.load(Relaxed);
        core.shm
            .grow(&control.taken, (index + 1) * 8)
            .map_err(|e| core.io("grow the shared state", e))?;
        list_set(core, &control.taken, index, run)?;
        control.taken.len.store(index + 1, Release);
        // As in `Note::set_state`: listed first, marked second.
        compiler_fence(SeqCst);
        self.has_taken = true;
        crash_point("step.take.listed");
        bits::set_used(core, run)?;
        let free = &control.writer.free_pages;
        free.store(free.load(Relaxed).saturating_sub(run.len as u64), Relaxed);
        crash_point("step.take.marked");
        Ok(())
    }

    /// Gives up pages that the step replaces, which were made in epoch `made`.
    pub fn give(&mut self, run: Run, made: Epoch) -> Result<()> {
        if let Some(private) = self.writer.private_tree() {
            private.step_given.push(Piece { run, made, what: What::Page });
            return Ok(());
        }
        self.give_replaced(run, made, retire::NOW)
    }

    /// As [`Step::give`], for the pages of a value.
    pub fn give_value(&mut self, run: Run, made: Epoch) -> Result<()> {
        if let Some(private) = self.writer.private_tree() {
            private.step_given.push(Piece { run, made, what: What::Value });
            return Ok(());
        }
        self.give(run, made)
    }

    /// As [`Step::give`], for pages that were replaced in an earlier epoch.
    pub fn give_replaced(&mut self, run: Run, made: Epoch, replaced: Epoch) -> Result<()> {
        let core = self.writer.core;
        let fresh = &core.control().fresh;
        // Before it is noted: what is noted must be possible to carry out.
        core.check_run(run)?;
        let index = fresh.len.load(Relaxed) + self.given;
        core.shm
            .grow(fresh, (index + 1) * retire::ENTRY_BYTES)
            .map_err(|e| core.io("grow the shared state", e))?;
        let retired = retire::Retired { run, made, replaced, era: Default::default() };
        retire::set_entry(core, fresh, index, &retired)?;
        self.given += 1;
        Ok(())
    }

    /// On finishing, stores `value` into `repeat` consecutive words of `width` bytes from `place` on.
    #[inline]
    pub fn store(&mut self, place: u64, width: u32, repeat: u32, value: u64) {
        if let Some(private) = self.writer.private_tree() {
            private.step_stores.push(Store { place, width, repeat, value });
            return;
        }
        assert!(self.stores < MAX_STORES);
        self.writer.core.control().note.stores[self.stores].set(place, width, repeat, value);
        self.stores += 1;
    }

    /// As [`Step::store`], for a word of the shared state.
    pub fn store_shared(&mut self, word: &AtomicU64, value: u64) {
        let place = self.core().shm.offset_of(word) | IN_SHM;
        self.store(place, 8, 1, value);
    }

    /// Finishes a step that changes nothing a user can see.
    pub fn structure(mut self) -> Result<()> {
        if self.writer.is_private() {
            return self.finish_private();
        }
        let count = self.core().control().writer.count.load(Relaxed);
        self.arm(NO_LSN, NO_LSN, count);
        crash_point("structure.armed");
        self.finish()
    }

    /// Finishes a step that carries out `record`; afterwards there are `count` records. Returns the end of the log
    /// record. The caller has made sure that the ring has room for it.
    #[inline]
    pub fn data(mut self, record: &mut LogRecord, count: u64) -> Result<Lsn> {
        if let Some(private) = self.writer.private_tree() {
            // Its owner logs it.
            private.count = count;
            self.finish_private()?;
            return Ok(Lsn(0));
        }
        let end = self.append(record.unplaced(), count);
        self.finish()?;
        Ok(Lsn(end))
    }

    /// Arms the note and puts the record into the log; returns its end. What is left is to carry the note out.
    #[inline(always)]
    fn append(&self, mut record: Unplaced<'_>, count: u64) -> u64 {
        let core = self.writer.core;
        let words = &core.control().writer;
        let lsn = words.tail.load(Relaxed);
        let end = lsn + record.len() as u64;
        self.arm(lsn, end, count);
        crash_point("data.armed");
        if core.is_logged() {
            let bytes = record.seal(words.salt.load(Relaxed), Lsn(lsn));
            core.shm.ring_write(lsn, bytes);
        }
        crash_point("data.copied");
        words.tail.store(end, Release);
        crash_point("data.appended");
        end
    }

    /// As [`Step::store`] and [`Step::data`], for the record at `offset` of `bucket`, which is at `page`: publishes it in `slot`, in
    /// one that was not live with its `tag`. The note says the same as theirs; but who writes it need not read it.
    #[inline(always)]
    pub fn publish_in(
        mut self,
        (page, bucket): (PageNo, Bucket),
        (slot, offset, tag): (usize, usize, Option<u8>),
        record: Unplaced<'_>,
        count: u64,
    ) -> Lsn {
        debug_assert!(self.stores == 0 && self.given == 0 && !self.has_taken);
        let core = self.writer.core;
        if let Some(private) = self.writer.private_tree() {
            private.count = count;
            if tag.is_none() {
                private.updates.count(Way::Stayed);
            }
            bucket.publish(slot, offset, tag);
            return Lsn(0);
        }
        let [first, second, ..] = &core.control().note.stores;
        first.set(core.place(page, bucket.offset_place(slot)), 2, 1, offset as u64);
        self.stores = 1;
        if let Some(tag) = tag {
            second.set(core.place(page, bucket.tag_place(slot)), 1, 1, tag as u64);
            self.stores = 2;
        }
        let (control, end) = (core.control(), self.append(record, count));
        bucket.publish(slot, offset, tag);
        control.writer.count.store(count, Relaxed);
        control.writer.applied.store(end, Release);
        if tag.is_none() {
            ways::count_stayed(control);
        }
        self.disarm();
        Lsn(end)
    }

    /// Counts that the step updates a record, which went this `way` so far.
    pub fn count_update(&mut self, way: Way) {
        match self.writer.private_tree() {
            Some(private) => private.updates.count(way),
            None => ways::count(self.core().control(), way),
        }
    }

    fn finish_private(&mut self) -> Result<()> {
        let core = self.writer.core;
        let root_place = core.shm.offset_of(&core.control().readers.root) | IN_SHM;
        let Some(private) = self.writer.private_tree() else { return Ok(()) };
        private.finish_step(core, root_place, |store| {
            carry_out(core, store.place, store.width, store.repeat, store.value)
        })
    }

    #[inline]
    fn arm(&self, lsn: u64, end: u64, count: u64) {
        let control = self.writer.core.control();
        let note = &control.note;
        note.stores_len.store(self.stores as u32, Relaxed);
        note.lsn.store(lsn, Relaxed);
        note.lsn_end.store(end, Relaxed);
        note.count_after.store(count, Relaxed);
        let fresh = control.fresh.len.load(Relaxed);
        note.fresh_before.store(fresh, Relaxed);
        note.fresh_after.store(fresh + self.given, Relaxed);
        note.set_state(state::ARMED);
    }

    #[inline]
    fn finish(mut self) -> Result<()> {
        let core = self.writer.core;
        apply(core)?;
        let control = core.control();
        if self.has_taken {
            control.taken.len.store(0, Release);
            compiler_fence(SeqCst);
            self.has_taken = false;
        }
        self.disarm();
        Ok(())
    }

    #[inline(always)]
    fn disarm(&self) {
        crash_point("step.applied");
        self.writer.core.control().note.set_state(state::IDLE);
        crash_point("step.disarmed");
    }
}

impl Drop for Step<'_, '_> {
    fn drop(&mut self) {
        if let Some(private) = self.writer.private_tree() {
            // What was not finished.
            return private.drop_step();
        }
        if self.has_taken && self.writer.core.control().note.state() == state::IDLE {
            // A failure leaves the list, and the next holder of the lock finds it.
            let _ = undo_taken(self.writer);
        }
    }
}

/// Element `index` of a list of runs.
pub fn list_get(core: &Core, table: &crate::shm::segment::SegmentTable, index: u64) -> Result<Run> {
    let word = core
        .shm
        .word(table, index * 8)
        .ok_or_else(|| core.corrupt_shm("a list of pages is cut off"))?
        .load(Relaxed);
    Ok(Run { first: PageNo(word as u32), len: (word >> 32) as u32 })
}

/// Sets element `index` of a list of runs, which must be large enough.
pub fn list_set(
    core: &Core,
    table: &crate::shm::segment::SegmentTable,
    index: u64,
    run: Run,
) -> Result<()> {
    core.shm
        .word(table, index * 8)
        .ok_or_else(|| core.corrupt_shm("a list of pages is cut off"))?
        .store(run.first.0 as u64 | (run.len as u64) << 32, Relaxed);
    Ok(())
}

/// Marks the pages of an unfinished step free again.
pub fn undo_taken(writer: &mut Writer) -> Result<()> {
    let core = writer.core;
    let taken = &core.control().taken;
    for index in 0..taken.len.load(Acquire) {
        let run = list_get(core, taken, index)?;
        allocate::free(writer, run)?;
        crash_point("repair.undo.page");
    }
    taken.len.store(0, Release);
    Ok(())
}

/// Carries out the armed note, once or again.
#[inline]
pub fn apply(core: &Core) -> Result<()> {
    let control = core.control();
    let note = &control.note;
    let stores = (note.stores_len.load(Relaxed) as usize).min(MAX_STORES);
    for store in &note.stores[..stores] {
        carry_out(
            core,
            store.place.load(Relaxed),
            store.width.load(Relaxed),
            store.repeat.load(Relaxed),
            store.value.load(Relaxed),
        )?;
        crash_point("step.store");
    }
    let (before, after) = (note.fresh_before.load(Relaxed), note.fresh_after.load(Relaxed));
    if after != before {
        retire::enqueue(core, before, after)?;
        crash_point("step.retired");
    }
    control.writer.count.store(note.count_after.load(Relaxed), Relaxed);
    let end = note.lsn_end.load(Relaxed);
    if end != NO_LSN {
        control.writer.applied.store(end, Release);
    }
    Ok(())
}

/// One store of a note.
#[inline]
fn carry_out(core: &Core, place: u64, width: u32, repeat: u32, value: u64) -> Result<()> {
    let bytes = width as u64 * repeat as u64;
    let at = if place & IN_SHM != 0 {
        core.shm.place(place & !IN_SHM, bytes)
    } else {
        Some(core.data_place(place, bytes)?)
    };
    let Some(at) = at else {
        return Err(core.corrupt_shm("a noted store lies outside the shared state"));
    };
    if !(at as usize).is_multiple_of(width.max(1) as usize) {
        return Err(core.corrupt_shm("a noted store is misaligned"));
    }
    for index in 0..repeat as usize {
        // SAFETY: within the mapping and aligned, as checked above; the words are atomics to everybody. The root word may be among
        // them, which is why each store is a Release: what it makes visible was written before.
        unsafe {
            match width {
                1 => (*at.cast::<AtomicU8>().add(index)).store(value as u8, Release),
                2 => (*at.cast::<AtomicU16>().add(index)).store((value as u16).to_le(), Release),
                4 => (*at.cast::<AtomicU32>().add(index)).store((value as u32).to_le(), Release),
                8 => (*at.cast::<AtomicU64>().add(index)).store(value.to_le(), Release),
                _ => return Err(core.corrupt_shm("a noted store has an impossible width")),
            }
        }
        if repeat > 1 {
            crash_point("step.store.word");
        }
    }
    Ok(())
}
