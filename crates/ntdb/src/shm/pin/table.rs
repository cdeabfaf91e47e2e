//! The pin table in shared memory: slots, the era, and the scan for the oldest pin.

use std::ptr::NonNull;

use crate::limits::MAX_PROCESSES;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, store_then_fence};
use crate::types::{Era, SlotId};

/// A slot of the pin table. Zero bytes are a free one.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct PinSlot {
    /// The era that is pinned, or 0. Stored by the thread that has the slot.
    era: AtomicU64,
    /// Slot of the process + 1, or 0: free.
    owner: AtomicU32,
    /// Id of the thread, as the kernel calls it; for messages only.
    thread: AtomicU32,
}

/// What [`PinTable::min_pinned`] has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OldestPin {
    /// The smallest era pinned.
    pub era: Era,
    /// By which process.
    pub process: SlotId,
    /// By which of its threads (the kernel's number, as seen in the process's own pid namespace; 0: several share the pin).
    pub thread: u32,
}

/// Who claims a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimFor {
    /// A thread with this number, which can do without. Some of the table is never given to threads.
    Thread(u32),
    /// A process that attaches: the whole table is searched.
    Process,
}

const MARK: u64 = 0xffff;
const CLAIM_ONE: u64 = MARK + 1;

/// The pin table in shared memory. All processes see the same; this is where it lies in this one.
#[derive(Debug)]
pub struct PinTable {
    slots: NonNull<PinSlot>,
    capacity: usize,
    /// Low 16 bits: one more than the highest slot that may be in use. Above: number of claims.
    mark: NonNull<AtomicU64>,
    /// The reclaim era. Zero stands for era 1, so that zero bytes are a valid start.
    era: NonNull<AtomicU64>,
}

// SAFETY: the table is made of atomics that all threads may use; where they lie does not change.
unsafe impl Send for PinTable {}
// SAFETY: as above.
unsafe impl Sync for PinTable {}

impl PinTable {
    /// The table of `capacity` slots at `slots`, with its mark and era words.
    ///
    /// # Safety
    /// All three must be valid, and in no use but this, as long as the table and everything made from it lives.
    pub unsafe fn new(
        slots: *const PinSlot,
        capacity: usize,
        mark: *const AtomicU64,
        era: *const AtomicU64,
    ) -> Self {
        assert!(capacity as u64 <= MARK);
        let non_null = "the pin table has an address";
        let table = Self {
            slots: NonNull::new(slots.cast_mut()).expect(non_null),
            capacity,
            mark: NonNull::new(mark.cast_mut()).expect(non_null),
            era: NonNull::new(era.cast_mut()).expect(non_null),
        };
        // Era 0 would look like no pin. Whoever comes first makes it 1.
        let _ = table.era_word().compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed);
        table
    }

    #[inline]
    pub(super) fn slot(&self, index: usize) -> &PinSlot {
        assert!(index < self.capacity);
        // SAFETY: inside the table, by the assertion and the promise given to `new`.
        unsafe { self.slots.add(index).as_ref() }
    }

    #[inline]
    fn mark_word(&self) -> &AtomicU64 {
        // SAFETY: the promise given to `new`.
        unsafe { self.mark.as_ref() }
    }

    #[inline]
    fn era_word(&self) -> &AtomicU64 {
        // SAFETY: the promise given to `new`.
        unsafe { self.era.as_ref() }
    }

    /// Slots of the table that threads leave to attaching processes.
    fn reserved(&self) -> usize {
        (self.capacity / 2).min(2 * MAX_PROCESSES)
    }

    /// The present era.
    #[inline]
    pub fn era(&self) -> Era {
        Era(self.era_word().load(Ordering::Acquire))
    }

    /// The era to note beside what has just been unlinked: no page unlinked before this call may be
    /// re-used until every pin is greater.
    pub fn era_of_retirement(&self) -> Era {
        fence(Ordering::SeqCst);
        self.era()
    }

    /// Begins a new era. Returns it.
    pub fn advance(&self) -> Era {
        Era(self.era_word().fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// The oldest pin; `None` if nobody has pinned anything. What was retired in eras before it
    /// may be re-used, in so far as it was retired before this call.
    pub fn min_pinned(&self) -> Option<OldestPin> {
        // Pairs with the fence in `pin`.
        fence(Ordering::SeqCst);
        let mark = self.mark_word().load(Ordering::Acquire);
        let limit = ((mark & MARK) as usize).min(self.capacity);
        let mut oldest: Option<(u64, usize)> = None;
        let mut used = 0;
        for index in 0..limit {
            let slot = self.slot(index);
            let era = slot.era.load(Ordering::Acquire);
            if era != 0 && oldest.is_none_or(|(least, _)| era < least) {
                oldest = Some((era, index));
            }
            if era != 0 || slot.owner.load(Ordering::Relaxed) != 0 {
                used = index + 1;
            }
        }
        if limit > used + SLACK {
            let lower = (mark & !MARK) | used as u64;
            // Fails if anybody has claimed a slot since: it may lie between the two.
            let _ =
                self.mark_word().compare_exchange(mark, lower, Ordering::AcqRel, Ordering::Relaxed);
        }
        oldest.map(|(era, index)| {
            let slot = self.slot(index);
            OldestPin {
                era: Era(era),
                // An owner of 0 has just unpinned and left; the next call will see that.
                process: SlotId(slot.owner.load(Ordering::Relaxed).saturating_sub(1) as u16),
                thread: slot.thread.load(Ordering::Relaxed),
            }
        })
    }

    /// Which process has slot `index`.
    #[cfg(test)]
    pub(super) fn owner(&self, index: usize) -> Option<SlotId> {
        let owner = self.slot(index).owner.load(Ordering::Relaxed);
        owner.checked_sub(1).map(|slot| SlotId(slot as u16))
    }

    /// How many slots a scan looks at.
    #[cfg(test)]
    pub(super) fn scanned(&self) -> u64 {
        self.mark_word().load(Ordering::Relaxed) & MARK
    }

    /// Claims the lowest free slot for a thread of `process`, or for the process.
    pub fn claim(&self, process: SlotId, purpose: ClaimFor) -> Option<usize> {
        let (limit, thread) = match purpose {
            ClaimFor::Thread(thread) => (self.capacity - self.reserved(), thread),
            ClaimFor::Process => (self.capacity, 0),
        };
        let owner = u32::from(process.0) + 1;
        for index in 0..limit {
            let slot = self.slot(index);
            let free = slot.owner.load(Ordering::Relaxed) == 0;
            // Acquire: the last owner's 0 in `era` comes before whatever is pinned here now.
            if free
                && slot
                    .owner
                    .compare_exchange(0, owner, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                slot.thread.store(thread, Ordering::Relaxed);
                self.raise_mark(index + 1);
                return Some(index);
            }
        }
        None
    }

    /// Counts a claim and sees to it that scans go to `at_least`. The first pin's fence comes after it.
    fn raise_mark(&self, at_least: usize) {
        let mut seen = self.mark_word().load(Ordering::Relaxed);
        loop {
            let mark = (seen & MARK).max(at_least as u64);
            let next = ((seen & !MARK) | mark).wrapping_add(CLAIM_ONE);
            match self.mark_word().compare_exchange(seen, next, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Gives a slot back. Only its owner does so.
    pub fn free(&self, index: usize) {
        let slot = self.slot(index);
        slot.era.store(0, Ordering::Release);
        slot.thread.store(0, Ordering::Relaxed);
        slot.owner.store(0, Ordering::Release);
    }

    /// Frees all slots of `process`, which is dead. Returns how many. Doing it again is harmless, as
    /// long as the slot of the process isn't given to another before all repairers have done
    /// (repair is serialised).
    pub fn release_process(&self, process: SlotId) -> usize {
        // Not to the mark only: a claim may have died before raising it.
        self.release_below(self.capacity, process)
    }

    /// Frees all slots of `process`, which is leaving, and none of whose threads is claiming.
    pub(super) fn leave(&self, process: SlotId) {
        let mark = self.mark_word().load(Ordering::Acquire) & MARK;
        self.release_below((mark as usize).min(self.capacity), process);
    }

    fn release_below(&self, limit: usize, process: SlotId) -> usize {
        let owner = u32::from(process.0) + 1;
        let mut count = 0;
        for index in 0..limit {
            if self.slot(index).owner.load(Ordering::Acquire) == owner {
                self.free(index);
                count += 1;
            }
        }
        count
    }

    /// Pins the present era in slot `index`, which the caller has claimed and which is not pinned.
    #[inline]
    pub fn pin(&self, index: usize) -> Era {
        self.pin_slot(self.slot(index))
    }

    /// Ends the pin of slot `index`.
    #[inline]
    pub fn unpin(&self, index: usize) {
        self.slot(index).unpin();
    }

    /// As [`Self::pin_slot`], for processes in which the reclaimer causes the fence.
    #[inline]
    pub(super) fn pin_slot_fenceless(&self, slot: &PinSlot) -> Era {
        let era = self.era_word().load(Ordering::Acquire);
        slot.era.store(era, Ordering::Release);
        // Whatever is loaded after this is loaded after the store, as the reclaimer's barrier sees it.
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
        Era(era)
    }

    #[inline]
    pub(super) fn pin_slot(&self, slot: &PinSlot) -> Era {
        // Acquire: who sees an era sees all that was unlinked before it began.
        let era = self.era_word().load(Ordering::Acquire);
        store_then_fence(&slot.era, era);
        Era(era)
    }
}

/// So many free slots below the mark are not worth lowering it.
const SLACK: usize = 16;

impl PinSlot {
    /// A free slot; the same as zero bytes.
    pub fn new() -> Self {
        Self { era: AtomicU64::new(0), owner: AtomicU32::new(0), thread: AtomicU32::new(0) }
    }

    #[inline]
    pub(super) fn unpin(&self) {
        self.era.store(0, Ordering::Release);
    }
}

impl Default for PinSlot {
    fn default() -> Self {
        Self::new()
    }
}
