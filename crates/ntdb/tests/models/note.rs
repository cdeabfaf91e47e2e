//! Note, append and take-over: the words of `transaction::step`, `transaction::repair` and `shm::note`.
//!
//! A holder of the writer lock makes a data step: it takes a page, fills it, gives up the page that was linked before,
//! appends a record and stores two words; or a structure step, which is the same without a record. It dies between any two of its stores; so does the one who repairs. The third
//! repairs, and makes another step. Beside them a reader follows the link, and a flusher reads the ring.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering::*, fence};
use loom::thread;

use super::mortal::{Killed, Life, for_all_deaths};
use super::{Setting, explore};

const IDLE: u32 = 0;
const ARMED: u32 = 2;
const NO_LSN: u64 = u64::MAX;
const PAGES: u64 = 3;

/// What the first holder does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Data,
    Structure,
}

/// What the steps do wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// Pages are marked used before they are listed.
    ListsLate,
    /// The note is disarmed before the list of pages taken is emptied.
    DisarmsEarly,
    /// An armed note is carried out whether its record was appended or not.
    AppliesAlways,
    /// The tail is stored before the record.
    AppendsEarly,
    /// The words are stored before the record is appended.
    ShowsEarly,
    /// A finder adds to the queue's length instead of storing it.
    CountsOn,
}

struct Shared {
    state: AtomicU32,
    note_lsn: AtomicU64,
    note_root: AtomicU64,
    note_count: AtomicU64,
    note_fresh: [AtomicU64; 2],
    tail: AtomicU64,
    ring: [UnsafeCell<u64>; 2],
    /// The link, and a second word of the same step.
    root: AtomicU64,
    second: AtomicU64,
    count: AtomicU64,
    applied: AtomicU64,
    used: AtomicU64,
    taken_len: AtomicU64,
    taken: AtomicU64,
    fresh_len: AtomicU64,
    fresh_page: [AtomicU64; 3],
    fresh_era: [AtomicU64; 3],
    era: AtomicU64,
    pages: [UnsafeCell<u64>; PAGES as usize],
    wrong: Wrong,
}

impl Shared {
    fn new(wrong: Wrong) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            state: AtomicU32::new(IDLE),
            note_lsn: zero(),
            note_root: zero(),
            note_count: zero(),
            note_fresh: [zero(), zero()],
            tail: zero(),
            ring: [UnsafeCell::new(0), UnsafeCell::new(0)],
            root: zero(),
            second: zero(),
            count: zero(),
            applied: zero(),
            used: AtomicU64::new(1),
            taken_len: zero(),
            taken: zero(),
            fresh_len: zero(),
            fresh_page: [zero(), zero(), zero()],
            fresh_era: [zero(), zero(), zero()],
            era: AtomicU64::new(1),
            pages: [UnsafeCell::new(100), UnsafeCell::new(0), UnsafeCell::new(0)],
            wrong,
        }
    }

    fn page(&self, page: u64) -> u64 {
        // SAFETY: loom checks that nobody writes it meanwhile.
        self.pages[page as usize].with(|page| unsafe { *page })
    }

    /// A holder's whole step.
    fn operate(&self, life: &Life, kind: Kind) -> Result<(), Killed> {
        self.repair_if_need_be(life)?;
        let used = self.used.load(Relaxed);
        let new = (0..PAGES).find(|page| used >> page & 1 == 0).expect("a free page");
        let old = self.root.load(Relaxed);

        // Step::take
        if self.wrong == Wrong::ListsLate {
            life.step()?;
            self.used.fetch_or(1 << new, Relaxed);
        }
        life.step()?;
        self.taken.store(new, Relaxed);
        life.step()?;
        self.taken_len.store(1, Release);
        life.step()?;
        self.used.fetch_or(1 << new, Relaxed);
        // SAFETY: loom checks that nobody else uses it.
        self.pages[new as usize].with_mut(|page| unsafe { *page = 100 + new });
        // Step::give
        let index = self.fresh_len.load(Relaxed);
        life.step()?;
        self.fresh_page[index as usize].store(old, Relaxed);
        self.fresh_era[index as usize].store(0, Relaxed);

        // Step::data or Step::structure: arm, append, apply
        let is_data = kind == Kind::Data;
        let lsn = self.tail.load(Relaxed);
        life.step()?;
        self.note_root.store(new, Relaxed);
        self.note_lsn.store(if is_data { lsn } else { NO_LSN }, Relaxed);
        self.note_count.store(self.count.load(Relaxed) + u64::from(is_data), Relaxed);
        self.note_fresh[0].store(index, Relaxed);
        self.note_fresh[1].store(index + 1, Relaxed);
        life.step()?;
        self.state.store(ARMED, Release);
        if self.wrong == Wrong::ShowsEarly {
            life.step()?;
            self.root.store(new, Release);
        }
        if self.wrong == Wrong::AppendsEarly {
            life.step()?;
            self.tail.store(lsn + 1, Release);
        }
        if is_data {
            life.step()?;
            // SAFETY: loom checks that nobody else uses it.
            self.ring[lsn as usize].with_mut(|record| unsafe { *record = lsn + 1 });
            life.step()?;
            self.tail.store(lsn + 1, Release);
        }
        self.apply(life, false)?;
        if self.wrong == Wrong::DisarmsEarly {
            life.step()?;
            self.state.store(IDLE, Release);
        }
        life.step()?;
        self.taken_len.store(0, Release);
        life.step()?;
        self.state.store(IDLE, Release);
        Ok(())
    }

    fn apply(&self, life: &Life, again: bool) -> Result<(), Killed> {
        let root = self.note_root.load(Relaxed);
        life.step()?;
        self.root.store(root, Release);
        life.step()?;
        self.second.store(10 * root, Release);
        // retire::enqueue
        fence(SeqCst);
        let era = self.era.load(Relaxed);
        let (before, after) = (self.note_fresh[0].load(Relaxed), self.note_fresh[1].load(Relaxed));
        for index in before..after {
            life.step()?;
            self.fresh_era[index as usize].store(era, Relaxed);
        }
        life.step()?;
        if self.wrong == Wrong::CountsOn && again {
            self.fresh_len.fetch_add(after - before, Release);
        } else {
            self.fresh_len.store(after, Release);
        }
        life.step()?;
        self.count.store(self.note_count.load(Relaxed), Relaxed);
        let lsn = self.note_lsn.load(Relaxed);
        if lsn != NO_LSN {
            life.step()?;
            self.applied.store(lsn + 1, Release);
        }
        Ok(())
    }

    fn repair_if_need_be(&self, life: &Life) -> Result<(), Killed> {
        if self.state.load(Acquire) == IDLE && self.taken_len.load(Relaxed) == 0 {
            return Ok(());
        }
        if self.state.load(Acquire) == ARMED {
            let lsn = self.note_lsn.load(Relaxed);
            let appended = lsn == NO_LSN || self.tail.load(Relaxed) > lsn;
            if appended || self.wrong == Wrong::AppliesAlways {
                self.apply(life, true)?;
                life.step()?;
                self.taken_len.store(0, Relaxed);
            }
        }
        // step::undo_taken
        if self.taken_len.load(Acquire) == 1 {
            life.step()?;
            self.used.fetch_and(!(1 << self.taken.load(Relaxed)), Relaxed);
        }
        life.step()?;
        self.taken_len.store(0, Release);
        life.step()?;
        self.state.store(IDLE, Release);
        Ok(())
    }

    /// What must hold whenever nobody is in the middle of a step. A structure step may have been done or not.
    fn verify(&self, kind: Kind) {
        let root = self.root.load(Relaxed);
        let tail = self.tail.load(Relaxed);
        assert_eq!(self.second.load(Relaxed), 10 * root, "half of a step's stores");
        assert_eq!(self.count.load(Relaxed), tail, "the count is not that of the appended records");
        assert_eq!(self.applied.load(Relaxed), tail, "an appended record is not applied");
        let given = self.fresh_len.load(Relaxed);
        match kind {
            Kind::Data => assert_eq!(given, tail, "each record has given up one page"),
            Kind::Structure => assert!(given <= tail + 1, "a step was counted twice"),
        }
        assert_eq!(given == 0, root == 0, "the link does not fit what was given up");
        let used = self.used.load(Relaxed);
        for page in 0..PAGES {
            let listed = (0..self.fresh_len.load(Relaxed) as usize)
                .filter(|&index| self.fresh_page[index].load(Relaxed) == page)
                .count();
            let uses = listed + usize::from(root == page);
            assert!(uses <= 1, "page {page} is linked or listed twice");
            let marked = used >> page & 1 == 1;
            assert!(marked || uses == 0, "page {page} is linked and free at once");
            assert!(!marked || uses == 1, "page {page} is leaked");
        }
        for index in 0..self.fresh_len.load(Relaxed) as usize {
            assert_ne!(self.fresh_era[index].load(Relaxed), 0, "a replaced page has no era");
        }
    }

    /// A reader and a flusher.
    fn look(&self, kind: Kind) {
        let root = self.root.load(Acquire);
        assert_eq!(self.page(root), 100 + root, "a page that was not written yet");
        let tail = self.tail.load(Acquire);
        let is_logged = kind == Kind::Data;
        assert!(!is_logged || root == 0 || tail > 0, "visible before it was appended");
        for lsn in 0..tail {
            // SAFETY: loom checks that nobody writes it meanwhile.
            let record = self.ring[lsn as usize].with(|record| unsafe { *record });
            assert_eq!(record, lsn + 1, "a record that was not written yet");
        }
    }
}

/// All deaths of a holder and of the one who repairs.
pub fn take_over(setting: &Setting, kind: Kind, wrong: Wrong) -> usize {
    for_all_deaths(|first, second, first_survived, second_survived| {
        let (first_survived, second_survived) = (first_survived.clone(), second_survived.clone());
        explore(setting, move || {
            let shared = Arc::new(Shared::new(wrong));
            let watcher = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.look(kind))
            };
            let holder = {
                let (shared, survived) = (Arc::clone(&shared), first_survived.clone());
                thread::spawn(move || survived.note(&shared.operate(&Life::of(first), kind)))
            };
            holder.join().unwrap();
            let finder = {
                let (shared, survived) = (Arc::clone(&shared), second_survived.clone());
                thread::spawn(move || survived.note(&shared.repair_if_need_be(&Life::of(second))))
            };
            finder.join().unwrap();
            shared.repair_if_need_be(&Life::long()).unwrap();
            shared.verify(kind);
            let tail = shared.tail.load(Relaxed);
            shared.operate(&Life::long(), Kind::Data).unwrap();
            shared.verify(kind);
            assert_eq!(shared.tail.load(Relaxed), tail + 1);
            watcher.join().unwrap();
        })
    })
}
