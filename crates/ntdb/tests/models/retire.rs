//! Replaced pages until their re-use: the words of `space::retire` and `checkpoint::freeze`, with the real pin table.
//!
//! Each change copies the one page of a tree to a free page and stores the root word. A reader holds a pin, a checkpoint
//! reads its frozen page without one, and a page is written again only when neither can see it any more.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering, Ordering::*, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::mortal::{Killed, Life, for_all_deaths};
use super::pin::{ClaimFor, PinSlot, PinTable};
use super::types::SlotId;
use super::{Setting, explore};

const PAGES: usize = 4;
const QUEUE: usize = 6;

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// The next era begins before the old page is unlinked.
    AdvancesEarly,
    /// A page is free when no pin is older than its era, as opposed to newer.
    EqualPins,
    /// The running checkpoint's epoch holds nothing.
    ForgetsRunning,
    /// The durable checkpoint's epoch holds nothing.
    ForgetsDurable,
    /// A page that was replaced in a checkpoint's next epoch counts as replaced before it.
    HoldsTooShort,
    /// A redo goes on from the held list's present length.
    Relative,
    /// The held list is cut as it is filtered.
    CutsEarly,
    /// The queue is moved to its front although source and destination overlap.
    Overlaps,
    /// A finder disarms the note without doing what it says.
    Forgets,
}

#[derive(Default)]
struct Entry {
    page: AtomicU64,
    made: AtomicU64,
    replaced: AtomicU64,
    era: AtomicU64,
}

impl Entry {
    fn set(&self, from: [u64; 4]) {
        let to = [&self.page, &self.made, &self.replaced, &self.era];
        to.iter().zip(from).for_each(|(word, value)| word.store(value, Relaxed));
    }

    fn get(&self) -> [u64; 4] {
        [&self.page, &self.made, &self.replaced, &self.era].map(|word| word.load(Relaxed))
    }
}

#[derive(Default)]
struct List {
    head: AtomicU64,
    len: AtomicU64,
    entries: [Entry; QUEUE],
}

impl List {
    fn pages(&self) -> Vec<u64> {
        let range = self.head.load(Relaxed)..self.len.load(Relaxed);
        range.map(|index| self.entries[index as usize].get()[0]).collect()
    }
}

/// The note's state.
const IDLE: u64 = 0;
const RECLAIM: u64 = 3;
const FILTER_HELD: u64 = 4;
const COMPACT_FRESH: u64 = 5;

struct Shared {
    slots: Vec<PinSlot>,
    mark: AtomicU64,
    era: AtomicU64,
    root: AtomicU64,
    /// What a page holds: 100 times the change that wrote it. Its epoch stands beside it.
    pages: [UnsafeCell<u64>; PAGES],
    page_epochs: [AtomicU64; PAGES],
    used: AtomicU64,
    epoch: AtomicU64,
    running: AtomicU64,
    running_epoch: AtomicU64,
    running_root: AtomicU64,
    durable_epoch: AtomicU64,
    durable_root: AtomicU64,
    /// Epoch of the one snapshot; 0 if there is none. Its holder clears it without the writer lock.
    snapshot: AtomicU64,
    fresh: List,
    held: List,
    /// What an unfinished filtering has read and kept of the held list.
    held_gap: AtomicU64,
    state: AtomicU64,
    operand: [AtomicU64; 4],
    writer: Mutex<()>,
    wrong: Wrong,
}

impl Shared {
    /// Page 0 is linked, and belongs to the durable checkpoint of epoch 1.
    fn new(wrong: Wrong) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            slots: (0..2).map(|_| PinSlot::new()).collect(),
            mark: zero(),
            era: AtomicU64::new(1),
            root: zero(),
            pages: [100, 0, 0, 0].map(UnsafeCell::new),
            page_epochs: [1, 0, 0, 0].map(AtomicU64::new),
            used: AtomicU64::new(1),
            epoch: AtomicU64::new(2),
            running: zero(),
            running_epoch: zero(),
            running_root: zero(),
            durable_epoch: AtomicU64::new(1),
            durable_root: zero(),
            snapshot: zero(),
            fresh: List::default(),
            held: List::default(),
            held_gap: zero(),
            state: zero(),
            operand: [zero(), zero(), zero(), zero()],
            writer: Mutex::new(()),
            wrong,
        }
    }

    fn table(&self) -> PinTable {
        // SAFETY: the words outlive the table, in every model.
        unsafe { PinTable::new(self.slots.as_ptr(), self.slots.len(), &self.mark, &self.era) }
    }

    fn page(&self, page: u64) -> u64 {
        // SAFETY: what the model is to show; loom notices a write at the same time.
        self.pages[page as usize].with(|page| unsafe { *page })
    }

    /// A change: copy, link, give up. Done only if there is a free page.
    fn change(&self, value: u64) -> bool {
        let used = self.used.load(Relaxed);
        let Some(new) = (0..PAGES as u64).find(|page| used >> page & 1 == 0) else { return false };
        let durable = self.durable_root.load(Relaxed);
        assert_ne!(new, durable, "a page of the durable checkpoint is re-used");
        self.used.fetch_or(1 << new, Relaxed);
        // SAFETY: as above.
        self.pages[new as usize].with_mut(|page| unsafe { *page = value });
        self.page_epochs[new as usize].store(self.epoch.load(Relaxed), Relaxed);
        let old = self.root.load(Relaxed);
        let index = self.fresh.len.load(Relaxed);
        let made = self.page_epochs[old as usize].load(Relaxed);
        let early = self.era.load(Relaxed);
        if self.wrong == Wrong::AdvancesEarly {
            self.era.store(early + 1, Release);
        }
        self.root.store(new, Release);
        fence(SeqCst);
        let advanced = u64::from(self.wrong == Wrong::AdvancesEarly);
        let era = self.era.load(Relaxed) - advanced;
        let entry = [old, made, self.epoch.load(Relaxed), era];
        self.fresh.entries[index as usize].set(entry);
        self.fresh.len.store(index + 1, Release);
        // In the model every retirement begins an era.
        self.era.store(era + 1, Release);
        true
    }

    fn is_held(&self, [_, made, replaced, _]: [u64; 4]) -> bool {
        let durable =
            (self.wrong != Wrong::ForgetsDurable).then(|| self.durable_epoch.load(Relaxed));
        let runs = self.running.load(Relaxed) == 1 && self.wrong != Wrong::ForgetsRunning;
        let running = runs.then(|| self.running_epoch.load(Relaxed));
        let replaced = replaced - u64::from(self.wrong == Wrong::HoldsTooShort);
        let snapshot = match self.snapshot.load(Acquire) {
            0 => None,
            epoch => Some(epoch),
        };
        [durable, running, snapshot].iter().flatten().any(|&hold| made <= hold && hold < replaced)
    }

    fn free(&self, page: u64) {
        self.used.fetch_and(!(1 << page), Relaxed);
    }

    /// `retire::reclaim`.
    fn reclaim(&self, life: &Life) -> Result<(), Killed> {
        let (head, len) = (self.fresh.head.load(Relaxed), self.fresh.len.load(Relaxed));
        if head >= len {
            return Ok(());
        }
        let oldest = self.table().min_pinned().map(|pin| pin.era.0);
        let mut count = 0;
        while head + count < len {
            let era = self.fresh.entries[(head + count) as usize].get()[3];
            let passes = match oldest {
                None => true,
                Some(pin) if self.wrong == Wrong::EqualPins => era <= pin,
                Some(pin) => era < pin,
            };
            if !passes {
                break;
            }
            count += 1;
        }
        if count == 0 {
            return Ok(());
        }
        let held_len = self.held.len.load(Relaxed);
        for (operand, value) in self.operand.iter().zip([head, count, held_len, len]) {
            life.step()?;
            operand.store(value, Relaxed);
        }
        life.step()?;
        self.state.store(RECLAIM, Release);
        self.redo(life)?;
        life.step()?;
        self.state.store(IDLE, Release);
        Ok(())
    }

    fn redo_reclaim(&self, life: &Life) -> Result<(), Killed> {
        let [head, count, mut held_end, len] =
            std::array::from_fn(|i| self.operand[i].load(Relaxed));
        if self.wrong == Wrong::Relative {
            held_end = self.held.len.load(Relaxed);
        }
        for index in head..head + count {
            let entry = self.fresh.entries[index as usize].get();
            life.step()?;
            if self.is_held(entry) {
                self.held.entries[held_end as usize].set(entry);
                held_end += 1;
            } else {
                self.free(entry[0]);
            }
        }
        life.step()?;
        self.held.len.store(held_end, Relaxed);
        let (new_head, new_len) = if head + count >= len { (0, 0) } else { (head + count, len) };
        life.step()?;
        self.fresh.len.store(new_len, Relaxed);
        life.step()?;
        self.fresh.head.store(new_head, Relaxed);
        Ok(())
    }

    /// `retire::filter_held_now`, one run at a time.
    fn filter_held(&self, life: &Life) -> Result<(), Killed> {
        loop {
            self.filter_part(life)?;
            if self.held_gap.load(Relaxed) == 0 {
                return Ok(());
            }
        }
    }

    /// `retire::filter_part`.
    fn filter_part(&self, life: &Life) -> Result<(), Killed> {
        let (gap, len) = (self.held_gap.load(Relaxed), self.held.len.load(Relaxed));
        let end = ((gap >> 32) + 1).min(len);
        for (operand, value) in self.operand.iter().zip([gap, end, len]) {
            life.step()?;
            operand.store(value, Relaxed);
        }
        life.step()?;
        self.state.store(FILTER_HELD, Release);
        self.redo(life)?;
        life.step()?;
        self.state.store(IDLE, Release);
        Ok(())
    }

    fn redo_filter_held(&self, life: &Life) -> Result<(), Killed> {
        let (end, len) = (self.operand[1].load(Relaxed), self.operand[2].load(Relaxed));
        loop {
            let progress = self.operand[0].load(Relaxed);
            let (read, kept) = (progress >> 32, progress & 0xffff_ffff);
            if read >= end {
                break;
            }
            let entry = self.held.entries[read as usize].get();
            life.step()?;
            let kept = if self.is_held(entry) {
                self.held.entries[kept as usize].set(entry);
                kept + 1
            } else {
                self.free(entry[0]);
                kept
            };
            life.step()?;
            if self.wrong == Wrong::CutsEarly {
                self.held.len.store(kept, Relaxed);
                life.step()?;
            }
            self.operand[0].store((read + 1) << 32 | kept, Relaxed);
        }
        let gap = self.operand[0].load(Relaxed);
        if end >= len {
            life.step()?;
            self.held.len.store(gap & 0xffff_ffff, Relaxed);
        }
        life.step()?;
        self.held_gap.store(if end >= len { 0 } else { gap }, Relaxed);
        Ok(())
    }

    /// `retire::compact_fresh`; the code does it when the queue is long.
    fn compact_fresh(&self, life: &Life) -> Result<(), Killed> {
        let (head, len) = (self.fresh.head.load(Relaxed), self.fresh.len.load(Relaxed));
        if head < len - head && self.wrong != Wrong::Overlaps {
            return Ok(());
        }
        life.step()?;
        self.operand[0].store(head, Relaxed);
        life.step()?;
        self.operand[1].store(len, Relaxed);
        life.step()?;
        self.state.store(COMPACT_FRESH, Release);
        self.redo(life)?;
        life.step()?;
        self.state.store(IDLE, Release);
        Ok(())
    }

    fn redo_compact_fresh(&self, life: &Life) -> Result<(), Killed> {
        let [head, len] = std::array::from_fn(|i| self.operand[i].load(Relaxed));
        for index in head..len {
            life.step()?;
            let entry = self.fresh.entries[index as usize].get();
            self.fresh.entries[(index - head) as usize].set(entry);
        }
        life.step()?;
        self.fresh.len.store(len - head, Relaxed);
        life.step()?;
        self.fresh.head.store(0, Relaxed);
        Ok(())
    }

    fn redo(&self, life: &Life) -> Result<(), Killed> {
        match self.state.load(Acquire) {
            COMPACT_FRESH => self.redo_compact_fresh(life),
            RECLAIM => self.redo_reclaim(life),
            FILTER_HELD => self.redo_filter_held(life),
            _ => Ok(()),
        }
    }

    fn repair(&self, life: &Life) -> Result<(), Killed> {
        if self.state.load(Acquire) == IDLE {
            return Ok(());
        }
        if self.wrong == Wrong::Forgets {
            life.step()?;
            self.state.store(IDLE, Release);
            return Ok(());
        }
        self.redo(life)?;
        life.step()?;
        self.state.store(IDLE, Release);
        Ok(())
    }

    fn held_pages(&self) -> Vec<u64> {
        let gap = self.held_gap.load(Relaxed);
        let (kept, read) = (gap & 0xffff_ffff, gap >> 32);
        let indices = (0..kept).chain(read..self.held.len.load(Relaxed));
        indices.map(|index| self.held.entries[index as usize].get()[0]).collect()
    }

    /// Every page has one use, or none and is free.
    fn verify(&self) {
        let (fresh, held) = (self.fresh.pages(), self.held_pages());
        let used = self.used.load(Relaxed);
        for page in 0..PAGES as u64 {
            let listed = fresh.iter().chain(&held).filter(|&&listed| listed == page).count();
            let uses = listed + usize::from(self.root.load(Relaxed) == page);
            assert!(uses <= 1, "page {page} is listed twice, or linked and listed");
            assert!(used >> page & 1 == 1 || uses == 0, "page {page} is free and used at once");
            assert!(used >> page & 1 == 0 || uses == 1, "page {page} is leaked");
        }
    }

    fn freeze(&self) -> u64 {
        let epoch = self.epoch.load(Relaxed);
        let root = self.root.load(Relaxed);
        self.running_epoch.store(epoch, Relaxed);
        self.running_root.store(root, Relaxed);
        self.epoch.store(epoch + 1, Release);
        self.running.store(1, Release);
        root
    }

    fn finish_checkpoint(&self) {
        self.durable_epoch.store(self.running_epoch.load(Relaxed), Release);
        self.durable_root.store(self.running_root.load(Relaxed), Release);
        self.running.store(0, Release);
    }
}

/// A writer re-uses what it can, beside a reader.
pub fn readers_keep_their_pages(setting: &Setting, wrong: Wrong) -> usize {
    explore(setting, move || {
        let shared = Arc::new(Shared::new(wrong));
        // No checkpoint holds anything.
        shared.durable_epoch.store(0, Relaxed);
        shared.durable_root.store(u64::MAX, Relaxed);
        shared.table().claim(SlotId(1), ClaimFor::Process).unwrap();
        let reader = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let table = shared.table();
                table.pin(0);
                let root = shared.root.load(Ordering::Acquire);
                let value = shared.page(root);
                assert!(value >= 100, "a page that was not written yet");
                table.unpin(0);
            })
        };
        for change in 2..=4 {
            assert!(shared.change(100 * change));
            shared.reclaim(&Life::long()).unwrap();
        }
        reader.join().unwrap();
        shared.verify();
    })
}

/// Checkpoints beside a writer: what they froze, and what is durable, stays until a newer one is durable.
pub fn checkpoints_keep_their_pages(setting: &Setting, wrong: Wrong) -> usize {
    explore(setting, move || {
        let shared = Arc::new(Shared::new(wrong));
        let checkpointer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let frozen = {
                    let _writer = shared.writer.lock().unwrap();
                    shared.freeze()
                };
                // Walked and written, outside the lock, without a pin.
                let value = shared.page(frozen);
                thread::yield_now();
                assert_eq!(shared.page(frozen), value, "a frozen page has changed");
                let _writer = shared.writer.lock().unwrap();
                shared.finish_checkpoint();
            })
        };
        for change in 2..=4 {
            let _writer = shared.writer.lock().unwrap();
            shared.reclaim(&Life::long()).unwrap();
            shared.filter_held(&Life::long()).unwrap();
            assert!(shared.change(100 * change), "pages are held back for nothing");
        }
        checkpointer.join().unwrap();
        shared.verify();
        // What is durable now is still as it was frozen.
        let durable = shared.durable_root.load(Relaxed);
        assert!(shared.used.load(Relaxed) >> durable & 1 == 1, "a durable page is free");
    })
}

/// All deaths of one who moves pages to the free and to the held ones, and of the one who does it again.
pub fn moves_survive_deaths(setting: &Setting, wrong: Wrong) -> usize {
    for_all_deaths(|first, second, first_survived, second_survived| {
        let (first_survived, second_survived) = (first_survived.clone(), second_survived.clone());
        explore(setting, move || {
            let shared = Shared::new(wrong);
            let moves = |life: &Life| {
                shared.reclaim(life)?;
                // The second checkpoint becomes durable: the first one's pages are free then.
                if shared.running.load(Relaxed) == 1 {
                    life.step()?;
                    shared.finish_checkpoint();
                }
                shared.filter_held(life)
            };
            // Replaced: 0, which the durable checkpoint has; 1, which the running one has; 2, which none has.
            assert!(shared.change(200));
            shared.freeze();
            assert!(shared.change(300) && shared.change(400));
            first_survived.note(&moves(&Life::of(first)));
            second_survived.note(&shared.repair(&Life::of(second)));
            shared.repair(&Life::long()).unwrap();
            shared.verify();
            moves(&Life::long()).unwrap();
            shared.verify();
            assert_eq!(shared.held_pages(), [1], "held: the durable checkpoint's page alone");
            assert!(shared.change(500) && shared.change(600));
            shared.verify();
        })
    })
}

/// The same, with a snapshot in place of the running checkpoint, which is released at any moment meanwhile.
pub fn moves_survive_deaths_beside_a_release(setting: &Setting, wrong: Wrong) -> usize {
    for_all_deaths(|first, second, first_survived, second_survived| {
        let (first_survived, second_survived) = (first_survived.clone(), second_survived.clone());
        explore(setting, move || {
            let shared = Arc::new(Shared::new(wrong));
            let moves = |life: &Life| {
                shared.reclaim(life)?;
                shared.filter_held(life)
            };
            // Replaced: 0, which the durable checkpoint has; 1, which the snapshot has; 2, which none has.
            assert!(shared.change(200));
            shared.snapshot.store(shared.epoch.fetch_add(1, Relaxed), Release);
            assert!(shared.change(300) && shared.change(400));
            let holder = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.snapshot.store(0, Release))
            };
            first_survived.note(&moves(&Life::of(first)));
            second_survived.note(&shared.repair(&Life::of(second)));
            shared.repair(&Life::long()).unwrap();
            shared.verify();
            holder.join().unwrap();
            moves(&Life::long()).unwrap();
            shared.verify();
            assert_eq!(shared.held_pages(), [0], "held: the durable checkpoint's page alone");
            assert!(shared.change(500) && shared.change(600));
            shared.verify();
        })
    })
}

/// All deaths of one who moves the queue to the front of its array, and of the one who does it again. `before` entries are
/// consumed, `waiting` still wait.
pub fn queue_moves_survive_deaths(
    setting: &Setting,
    before: u64,
    waiting: u64,
    wrong: Wrong,
) -> usize {
    for_all_deaths(|first, second, first_survived, second_survived| {
        let (first_survived, second_survived) = (first_survived.clone(), second_survived.clone());
        explore(setting, move || {
            let shared = Shared::new(wrong);
            for index in 0..before + waiting {
                shared.fresh.entries[index as usize].set([index, 1, 2, 1]);
            }
            shared.fresh.len.store(before + waiting, Relaxed);
            shared.fresh.head.store(before, Relaxed);
            let expected = shared.fresh.pages();
            first_survived.note(&shared.compact_fresh(&Life::of(first)));
            second_survived.note(&shared.repair(&Life::of(second)));
            shared.repair(&Life::long()).unwrap();
            assert_eq!(shared.fresh.pages(), expected, "the queue has changed");
        })
    })
}
