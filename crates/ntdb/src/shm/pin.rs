//! Pins: by them readers keep pages alive that writers have replaced.
//!
//! # The protocol
//!
//! A writer never changes what readers may be reading; it makes a new page, *unlinks* the old one by a
//! single store, and wants to re-use the old one some day. Readers that were on their way when the
//! link was changed may still read it. So:
//!
//! - there is one number, the **reclaim era**, which starts at 1 and advances now and then;
//! - a **reader** loads the era, stores it in a cache line of its own (its *slot*), passes a
//!   fence, and only then follows links. When done it stores 0;
//! - a **reclaimer** unlinks a page, passes a fence, loads the era `e` and notes it beside the page.
//!   The page is free when every pin in the table is greater than `e` ([`PinTable::min_pinned`]).
//!
//! Why that is enough: take a reader and a reclaimer. Their two fences have an order. If the
//! reader's came first, the reclaimer's scan sees the pin, and as the reader loaded the era
//! before, that pin is either not greater than `e`, and the page waits for it, or it is, which means
//! that the reader loaded an era that was advanced after the unlinking was done: then it sees the new link.
//! If the reclaimer's fence came first, the reader sees the new link anyway. (It is this "store,
//! fence, load" on both sides that a processor would otherwise reorder; `tests/loom_pin.rs` shows that the model without it fails.)
//!
//! A pin is stored with Release and scanned with Acquire, and so is the 0, so that all reads under a pin
//! that the scan no longer sees have happened before the page is written again.
//!
//! Nobody waits for a pin. A reader that sleeps holds up re-use, and nothing else.
//!
//! # The table
//!
//! Slots lie in shared memory, a cache line each. A thread claims the lowest free one when it
//! first reads and keeps it; scans go to the high-water mark. The mark word also counts claims: a scan that has
//! found the last slots free lowers the mark only if no claim has happened since.
//!
//! | step of claim | a death before the next step leaves |
//! | --- | --- |
//! | compare-and-swap the owner from 0 | a slot that is owned but perhaps above the mark; never pinned |
//! | raise the mark, count | an owned slot, not pinned |
//! | pin, unpin | a pin of a dead process |
//!
//! All three are put right by [`PinTable::release_process`]; as a claim takes the lowest free
//! slot, a slot above the mark does no harm until then. Whoever is held up by a pin tests whether its owner lives.
//!
//! If no slot is to be had, threads share two that their process has claimed when it attached: those who
//! come pin the *newer* one, those who were there before leave the older, and when that is empty it
//! becomes the newer. So however many come, the oldest pin gets on.
//!
//! # Threads, processes, forks
//!
//! Which slot a thread has is remembered in thread-local storage, per environment (an [`Attachment`]). Nested
//! pins of one thread share the first one's. When a thread ends it gives its slots back, if
//! the environment is still there: a registry of open environments is locked meanwhile, and closing one takes
//! the same lock, so that the memory of a closed environment is never touched. After fork the child ignores
//! what its thread inherited: the slots belong to the parent.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64 as LocalAtomicU64, Ordering as LocalOrdering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::limits::MAX_PROCESSES;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, fork, store_then_fence};
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
    /// A thread, which can do without. Some of the table is never given to threads.
    Thread,
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
    fn slot(&self, index: usize) -> &PinSlot {
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
    #[inline]
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

    /// Claims the lowest free slot for a thread of `process`, or for the process.
    pub fn claim(&self, process: SlotId, purpose: ClaimFor) -> Option<usize> {
        let limit = match purpose {
            ClaimFor::Thread => self.capacity - self.reserved(),
            ClaimFor::Process => self.capacity,
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

    /// Frees all slots of `process`, which is dead or leaves. Returns how many. Doing it again is harmless,
    /// as long as the slot of the process isn't given to another before all repairers have done
    /// (repair is serialised).
    pub fn release_process(&self, process: SlotId) -> usize {
        let owner = u32::from(process.0) + 1;
        let mut count = 0;
        // Not to the mark only: a claim may have died before raising it.
        for index in 0..self.capacity {
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

    #[inline]
    fn pin_slot(&self, slot: &PinSlot) -> Era {
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
    fn unpin(&self) {
        self.era.store(0, Ordering::Release);
    }
}

impl Default for PinSlot {
    fn default() -> Self {
        Self::new()
    }
}

/// This process's use of a pin table: what threads pin through.
#[derive(Debug)]
pub struct Attachment {
    /// Never the same twice in a process and its forked children.
    id: u64,
    fork_generation: u64,
    table: PinTable,
    process: SlotId,
    /// For threads that found no slot.
    shared: Mutex<SharedPins>,
}

/// Two slots that threads without one of their own share.
#[derive(Debug)]
struct SharedPins {
    slots: [usize; 2],
    /// Pins in each.
    count: [usize; 2],
    /// Which is the newer.
    newer: usize,
}

impl SharedPins {
    fn pin(&mut self, table: &PinTable) -> usize {
        let older = 1 - self.newer;
        if self.count[self.newer] == 0 {
            table.pin(self.slots[self.newer]);
        } else if self.count[older] == 0 {
            table.pin(self.slots[older]);
            self.newer = older;
        }
        self.count[self.newer] += 1;
        self.newer
    }

    fn unpin(&mut self, table: &PinTable, which: usize) {
        self.count[which] -= 1;
        if self.count[which] == 0 {
            table.unpin(self.slots[which]);
        }
    }
}

/// What a thread remembers about its slot in one environment.
struct Entry {
    attachment: u64,
    fork_generation: u64,
    /// The slot, or null: none was to be had.
    slot: Cell<*const PinSlot>,
    index: Cell<usize>,
    /// Nested pins.
    depth: Cell<u32>,
    /// Pins through the shared slots until the table is searched again.
    retry_in: Cell<u32>,
}

/// How often a thread without a slot looks for one.
const RETRY_PINS: u32 = 256;

thread_local! {
    /// The entry used last; checked before use, so that the usual pin needs no search.
    static LAST: Cell<*const Entry> = const { Cell::new(ptr::null()) };
    static ENTRIES: ThreadEntries = const { ThreadEntries(RefCell::new(Vec::new())) };
}

/// All entries of a thread: leaked boxes, since `LAST` and guards point to them, too.
struct ThreadEntries(RefCell<Vec<NonNull<Entry>>>);

impl Drop for ThreadEntries {
    fn drop(&mut self) {
        LAST.set(ptr::null());
        for entry in self.0.get_mut().drain(..) {
            // SAFETY: entries live until they are freed, here or in `forget_closed`.
            let unused = unsafe { entry.as_ref() }.depth.get() == 0;
            // Otherwise a guard lives in another thread-local value, and will be dropped after this
            // one. It needs the entry; the slot goes with the process.
            if unused {
                // SAFETY: no guard points to it, `LAST` is null, and the list is being emptied.
                give_back(&*unsafe { Box::from_raw(entry.as_ptr()) });
            }
        }
    }
}

/// Frees the slot of an entry, if its environment is still open.
fn give_back(entry: &Entry) {
    if entry.slot.get().is_null() || entry.fork_generation != fork::generation() {
        return;
    }
    let open = registry();
    if let Some(Registered(attachment)) = open.get(&entry.attachment) {
        // SAFETY: an attachment takes itself out of the registry, whose lock is held here, before it goes.
        let attachment = unsafe { attachment.as_ref() };
        attachment.table.free(entry.index.get());
    }
}

/// An attachment in the registry; valid as long as it's there.
struct Registered(NonNull<Attachment>);
// SAFETY: an attachment is Sync, and the pointer is only followed under the registry's lock.
unsafe impl Send for Registered {}

static REGISTRY: Mutex<BTreeMap<u64, Registered>> = Mutex::new(BTreeMap::new());
static NEXT_ID: LocalAtomicU64 = LocalAtomicU64::new(1);

fn registry() -> MutexGuard<'static, BTreeMap<u64, Registered>> {
    // Nothing panics while it's held; and if so, the map is whole.
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static HELD: RefCell<Option<MutexGuard<'static, BTreeMap<u64, Registered>>>> =
        const { RefCell::new(None) };
}

/// Holds the registry still. To be called before a fork, lest the child inherits a registry that another
/// thread was just changing; and then, on both sides, [`after_fork`].
pub fn before_fork() {
    let hold = registry();
    // An error means that the thread is ending; then it does without.
    let _ = HELD.try_with(|held| held.replace(Some(hold)));
}

/// Ends what [`before_fork`] began.
pub fn after_fork() {
    let _ = HELD.try_with(|held| held.replace(None));
}

impl Attachment {
    /// Makes `process` a user of the table: claims its two shared slots. `None` if the table is full.
    pub fn new(table: PinTable, process: SlotId) -> Option<Box<Self>> {
        let first = table.claim(process, ClaimFor::Process)?;
        let Some(second) = table.claim(process, ClaimFor::Process) else {
            table.free(first);
            return None;
        };
        let shared = SharedPins { slots: [first, second], count: [0, 0], newer: 0 };
        let attachment = Box::new(Self {
            id: NEXT_ID.fetch_add(1, LocalOrdering::Relaxed),
            fork_generation: fork::generation(),
            table,
            process,
            shared: Mutex::new(shared),
        });
        registry().insert(attachment.id, Registered(NonNull::from(&*attachment)));
        Some(attachment)
    }

    /// The table.
    #[inline]
    pub fn table(&self) -> &PinTable {
        &self.table
    }

    /// Pins the present era for this thread, or shares the pin that it has already.
    #[inline]
    pub fn pin(&self) -> PinGuard<'_> {
        let last = LAST.get();
        if !last.is_null() {
            // SAFETY: `LAST` is null or points to a living entry of this thread.
            let entry = unsafe { &*last };
            let generation = fork::generation();
            if entry.attachment == self.id && entry.fork_generation == generation {
                let slot = entry.slot.get();
                if !slot.is_null() {
                    return self.enter(entry, slot);
                }
            }
        }
        self.pin_slow()
    }

    #[inline]
    fn enter(&self, entry: &Entry, slot: *const PinSlot) -> PinGuard<'_> {
        let depth = entry.depth.get();
        if depth == 0 {
            // SAFETY: the entry belongs to this attachment, whose table lives as long as it.
            self.table.pin_slot(unsafe { &*slot });
        }
        entry.depth.set(depth + 1);
        PinGuard {
            attachment: self,
            place: Place::Own(entry),
            fork_generation: entry.fork_generation,
            not_send: PhantomData,
        }
    }

    #[cold]
    fn pin_slow(&self) -> PinGuard<'_> {
        // `Err`: the thread is ending and its entries are gone.
        let own = ENTRIES.try_with(|entries| self.find_entry(&mut entries.0.borrow_mut()));
        if let Ok(entry) = own {
            LAST.set(entry);
            // SAFETY: it was just found among this thread's entries.
            let entry = unsafe { &*entry };
            let slot = entry.slot.get();
            if !slot.is_null() {
                return self.enter(entry, slot);
            }
        }
        let which = self.lock_shared().pin(&self.table);
        PinGuard {
            attachment: self,
            place: Place::Shared(which),
            fork_generation: fork::generation(),
            not_send: PhantomData,
        }
    }

    fn find_entry(&self, entries: &mut Vec<NonNull<Entry>>) -> *const Entry {
        let generation = fork::generation();
        let known = entries.iter().copied().find(|entry| {
            // SAFETY: entries live until they are freed.
            let entry = unsafe { entry.as_ref() };
            entry.attachment == self.id && entry.fork_generation == generation
        });
        let place = known.unwrap_or_else(|| {
            forget_closed(entries, generation);
            let entry = NonNull::from(Box::leak(Box::new(Entry {
                attachment: self.id,
                fork_generation: generation,
                slot: Cell::new(ptr::null()),
                index: Cell::new(0),
                depth: Cell::new(0),
                retry_in: Cell::new(0),
            })));
            entries.push(entry);
            entry
        });
        // SAFETY: as above.
        let entry = unsafe { place.as_ref() };
        if entry.slot.get().is_null() {
            match entry.retry_in.get().checked_sub(1) {
                Some(fewer) => entry.retry_in.set(fewer),
                None => match self.table.claim(self.process, ClaimFor::Thread) {
                    Some(index) => {
                        let slot = self.table.slot(index);
                        slot.thread.store(thread_id(), Ordering::Relaxed);
                        entry.index.set(index);
                        entry.slot.set(slot);
                    }
                    None => entry.retry_in.set(RETRY_PINS),
                },
            }
        }
        place.as_ptr()
    }

    fn lock_shared(&self) -> MutexGuard<'_, SharedPins> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops what a thread remembers about environments that are closed, or that were its parent's.
fn forget_closed(entries: &mut Vec<NonNull<Entry>>, generation: u64) {
    let open = registry();
    // `LAST` must not point to what goes.
    LAST.set(ptr::null());
    entries.retain(|place| {
        // SAFETY: entries live until they are freed.
        let entry = unsafe { place.as_ref() };
        // A guard that was inherited over fork may still point to its entry.
        let keep = entry.depth.get() != 0
            || (entry.fork_generation == generation && open.contains_key(&entry.attachment));
        if !keep {
            // SAFETY: no guard points to it, and it leaves the list.
            drop(unsafe { Box::from_raw(place.as_ptr()) });
        }
        keep
    });
}

fn thread_id() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::gettid() as u32 }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        registry().remove(&self.id);
        // In a forked child the slots are the parent's.
        if self.fork_generation == fork::generation() {
            self.table.release_process(self.process);
        }
    }
}

/// Where a guard has its pin.
enum Place {
    /// In the thread's own slot.
    Own(*const Entry),
    /// In this one of the shared slots.
    Shared(usize),
}

/// While it lives, nothing that was linked when it was made is re-used.
#[must_use = "the pin ends when the guard is dropped"]
pub struct PinGuard<'a> {
    attachment: &'a Attachment,
    place: Place,
    fork_generation: u64,
    /// The depth counter in the thread's entry is not atomic.
    not_send: PhantomData<*const ()>,
}

impl PinGuard<'_> {
    /// Whether the process has forked since, and this is the child: then the pin is the parent's, and does
    /// not protect the child.
    #[inline]
    pub fn is_stale(&self) -> bool {
        self.fork_generation != fork::generation()
    }
}

impl Drop for PinGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_stale() {
            return;
        }
        match self.place {
            Place::Own(entry) => {
                // SAFETY: entries with pins are not freed before their guards are gone.
                let entry = unsafe { &*entry };
                let depth = entry.depth.get() - 1;
                entry.depth.set(depth);
                if depth == 0 {
                    // SAFETY: the guard borrows the attachment, whose table the slot is in.
                    unsafe { &*entry.slot.get() }.unpin();
                }
            }
            Place::Shared(which) => {
                self.attachment.lock_shared().unpin(&self.attachment.table, which);
            }
        }
    }
}
