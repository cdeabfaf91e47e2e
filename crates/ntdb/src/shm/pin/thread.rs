//! What threads do with pins: which slot is mine, nesting, ending, forking.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::table::{ClaimFor, PinSlot, PinTable};
use crate::sync::fork;
use crate::types::SlotId;

/// This process's use of a pin table: what threads pin through.
#[derive(Debug)]
pub struct Attachment {
    /// Never the same twice in a process and its forked children.
    id: u64,
    fork_generation: u64,
    table: PinTable,
    process: SlotId,
    /// Whether reclaimers cause the fence of a pin here (see [`Attachment::go_fenceless`]).
    fenceless: AtomicBool,
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
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

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
    // An error means that the thread is ending; then it does without.
    let _ = HELD.try_with(|held| {
        // Perhaps it is held already: by a caller who does not know that the C library's handlers do this, too.
        if held.borrow().is_none() {
            held.replace(Some(registry()));
        }
    });
}

/// Ends what [`before_fork`] began.
pub fn after_fork() {
    let _ = HELD.try_with(|held| held.replace(None));
}

impl Attachment {
    /// Makes `process` a user of the table: claims its two shared slots. `None` if the table is full.
    /// There must not be two attachments with the same slot: all its pins end with this one.
    pub fn new(table: PinTable, process: SlotId) -> Option<Box<Self>> {
        let first = table.claim(process, ClaimFor::Process)?;
        let Some(second) = table.claim(process, ClaimFor::Process) else {
            table.free(first);
            return None;
        };
        let shared = SharedPins { slots: [first, second], count: [0, 0], newer: 0 };
        let attachment = Box::new(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            fork_generation: fork::generation(),
            table,
            process,
            fenceless: AtomicBool::new(false),
            shared: Mutex::new(shared),
        });
        registry().insert(attachment.id, Registered(NonNull::from(&*attachment)));
        Some(attachment)
    }

    /// From now on pins of this process need no fence of their own. The caller makes sure that every reclaimer passes a
    /// barrier in this process's threads before it scans the table.
    pub fn go_fenceless(&self) {
        self.fenceless.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// The table.
    #[cfg(test)]
    pub fn table(&self) -> &PinTable {
        &self.table
    }

    /// Pins the present era for this thread, or shares the pin that it has already.
    #[inline]
    pub fn pin(&self) -> PinGuard<'_> {
        match self.pin_again() {
            Some(own) => PinGuard(Place::Own(own)),
            None => self.pin_slow(),
        }
    }

    /// Pins as [`Attachment::pin`] does, if this thread has pinned here before and nowhere else since, and the process is still the
    /// one that made the attachment; else `None`.
    #[inline(always)]
    pub fn pin_again(&self) -> Option<OwnPin<'_>> {
        let last = LAST.get();
        if last.is_null() {
            return None;
        }
        // SAFETY: `LAST` is null or points to a living entry of this thread.
        let entry = unsafe { &*last };
        // Entries are made by the process whose attachment it is, in its generation.
        if entry.attachment != self.id || entry.fork_generation != fork::generation_if_armed() {
            return None;
        }
        let slot = entry.slot.get();
        if slot.is_null() { None } else { Some(self.enter(entry, slot)) }
    }

    #[inline(always)]
    fn enter<'a>(&'a self, entry: &'a Entry, slot: *const PinSlot) -> OwnPin<'a> {
        let depth = entry.depth.get();
        if depth == 0 {
            // SAFETY: the entry belongs to this attachment, whose table lives as long as it.
            let slot = unsafe { &*slot };
            if self.fenceless.load(std::sync::atomic::Ordering::Relaxed) {
                self.table.pin_slot_fenceless(slot);
            } else {
                self.table.pin_slot(slot);
            }
        }
        entry.depth.set(depth + 1);
        OwnPin { entry: NonNull::from(entry), attachment: PhantomData }
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
                return PinGuard(Place::Own(self.enter(entry, slot)));
            }
        }
        let which = self.lock_shared().pin(&self.table);
        let fork_generation = fork::generation();
        PinGuard(Place::Shared { attachment: self, which, fork_generation })
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
                None => match self.table.claim(self.process, ClaimFor::Thread(thread_id())) {
                    Some(index) => {
                        entry.index.set(index);
                        entry.slot.set(self.table.slot(index));
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
            self.table.leave(self.process);
        }
    }
}

/// A pin in the thread's own slot. While it lives, nothing that was linked when it was made is re-used. Not `Send`: the depth
/// counter in the thread's entry is not atomic.
#[must_use = "the pin ends when it is dropped"]
pub struct OwnPin<'a> {
    /// One word, so that it stays in a register.
    entry: NonNull<Entry>,
    attachment: PhantomData<&'a Attachment>,
}

impl OwnPin<'_> {
    #[inline(always)]
    fn entry(&self) -> &Entry {
        // SAFETY: entries with pins are not freed before their guards are gone.
        unsafe { self.entry.as_ref() }
    }

    /// Whether the process has forked since, and this is the child.
    #[inline(always)]
    fn is_stale(&self) -> bool {
        // The parent was armed when it pinned.
        self.entry().fork_generation != fork::generation_if_armed()
    }
}

impl Drop for OwnPin<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.is_stale() {
            return;
        }
        let entry = self.entry();
        let depth = entry.depth.get() - 1;
        entry.depth.set(depth);
        if depth == 0 {
            // SAFETY: the pin borrows the attachment, whose table the slot is in.
            unsafe { &*entry.slot.get() }.unpin();
        }
    }
}

/// Where a guard has its pin.
enum Place<'a> {
    /// In the thread's own slot.
    Own(#[cfg_attr(not(test), expect(dead_code, reason = "dropped, not read"))] OwnPin<'a>),
    /// In one of the shared slots.
    Shared { attachment: &'a Attachment, which: usize, fork_generation: u64 },
}

/// A pin, wherever it is.
#[must_use = "the pin ends when the guard is dropped"]
pub struct PinGuard<'a>(Place<'a>);

impl PinGuard<'_> {
    /// Whether the process has forked since, and this is the child: then the pin is the parent's, and does
    /// not protect the child.
    #[cfg(test)]
    pub fn is_stale(&self) -> bool {
        match &self.0 {
            Place::Own(own) => own.is_stale(),
            Place::Shared { fork_generation, .. } => *fork_generation != fork::generation(),
        }
    }
}

impl Drop for PinGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Place::Shared { attachment, which, fork_generation } = self.0
            && fork_generation == fork::generation()
        {
            attachment.lock_shared().unpin(&attachment.table, which);
        }
    }
}

/// How many environments this thread remembers.
#[cfg(test)]
pub(super) fn remembered() -> usize {
    ENTRIES.with(|entries| entries.0.borrow().len())
}
