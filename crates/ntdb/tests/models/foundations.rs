//! The lock and the pins: the very files that ship.

use std::time::Instant;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;

use super::awaited::{Awaited, PATIENCE, after_release};
use super::lock::{Acquired, RobustLock};
use super::pin::{ClaimFor, PinSlot, PinTable};
use super::types::{Era, SlotId};
use super::{Expected, Setting, USUAL};

/// What the lock protects; loom notices if two touch it without an order between them.
struct Guarded {
    lock: RobustLock,
    count: UnsafeCell<u32>,
}

impl Guarded {
    fn new() -> Self {
        Self { lock: RobustLock::new(), count: UnsafeCell::new(0) }
    }

    fn increment(&self) {
        // SAFETY: called under the lock; loom checks that.
        self.count.with_mut(|count| unsafe { *count += 1 });
    }

    fn count(&self) -> u32 {
        // SAFETY: as above.
        self.count.with(|count| unsafe { *count })
    }
}

/// Threads take the lock `rounds` times each. Nobody is alone with it in time, nobody is left asleep.
fn lock_excludes(threads: u16, rounds: u32, lingers: bool) {
    let guarded = Arc::new(Guarded::new());
    let body = move |guarded: &Guarded, slot| {
        for _ in 0..rounds {
            assert_eq!(guarded.lock.acquire(slot, None, &|_| true), Ok(Acquired::Clean));
            if lingers {
                // Time for others to lose patience.
                thread::yield_now();
            }
            guarded.increment();
            guarded.lock.release(slot);
        }
    };
    let others: Vec<_> = (1..threads)
        .map(|slot| {
            let guarded = Arc::clone(&guarded);
            thread::spawn(move || body(&guarded, SlotId(slot)))
        })
        .collect();
    body(&guarded, SlotId(0));
    for other in others {
        other.join().unwrap();
    }
    assert_eq!(guarded.lock.acquire(SlotId(9), None, &|_| true), Ok(Acquired::Clean));
    assert_eq!(guarded.count(), u32::from(threads) * rounds);
}

/// One who sleeps until something changes, and others who change something or only take the lock. Nobody is left asleep.
fn changes_are_noticed(writers: u16, changes: u64) {
    #[derive(Default)]
    struct Words {
        lock: RobustLock,
        applied: AtomicU64,
        awaited: AtomicU32,
        ticket: AtomicU32,
        announced: AtomicU64,
    }
    impl Words {
        fn awaited(&self) -> Awaited<'_> {
            let Words { applied, awaited, ticket, announced, .. } = self;
            Awaited { applied, awaited, ticket, announced }
        }
    }
    let words = Arc::new(Words::default());
    let writers: Vec<_> = (0..writers)
        .map(|slot| {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                assert_eq!(words.lock.acquire(SlotId(slot), None, &|_| true), Ok(Acquired::Clean));
                let applied = words.applied.load(Ordering::Relaxed);
                if applied < changes {
                    words.applied.store(applied + 1, Ordering::Release);
                }
                words.lock.release(SlotId(slot));
                after_release(&words.awaited, || words.awaited().wake());
            })
        })
        .collect();
    let mut seen = 0;
    while seen < changes {
        words.awaited().sleep(seen, PATIENCE, || false);
        seen = words.applied.load(Ordering::Acquire);
    }
    for writer in writers {
        writer.join().unwrap();
    }
}

/// The lock's word, to leave in it what a dead process might have left.
fn word(lock: &RobustLock) -> &AtomicU64 {
    // SAFETY: the word is the first field of the `repr(C)` lock.
    unsafe { &*std::ptr::from_ref(lock).cast::<AtomicU64>() }
}
const SLEEPERS: u64 = 1 << 16;
const WATCHED: u64 = 1 << 17;
const HANDOFF: u64 = 1 << 18;
const DOZING: u64 = 1 << 19;

/// A dead owner holds the lock, half way through a change. One of two finders is told, and repairs.
fn take_over_happens_once() {
    let dead = SlotId(7);
    let guarded = Arc::new(Guarded::new());
    assert!(guarded.lock.try_acquire(dead));
    guarded.increment();
    let body = move |guarded: &Guarded, slot| {
        let answer = guarded.lock.acquire(slot, None, &|owner| owner != dead).unwrap();
        guarded.increment();
        guarded.lock.release(slot);
        answer == Acquired::OwnerDied(dead)
    };
    let other = {
        let guarded = Arc::clone(&guarded);
        thread::spawn(move || body(&guarded, SlotId(1)))
    };
    let first = body(&guarded, SlotId(0));
    let second = other.join().unwrap();
    assert!(first ^ second, "taken over by {first} and {second}");
    assert!(guarded.lock.try_acquire(SlotId(2)));
    assert_eq!(guarded.count(), 3);
}

/// Whatever flags the dead have left on a free lock, a newcomer gets it, and others after it.
fn stale_flags_block_nobody(flags: u64) {
    let guarded = Arc::new(Guarded::new());
    word(&guarded.lock).store(flags, Ordering::Relaxed);
    let other = {
        let guarded = Arc::clone(&guarded);
        thread::spawn(move || {
            assert_eq!(guarded.lock.acquire(SlotId(1), None, &|_| true), Ok(Acquired::Clean));
            guarded.increment();
            guarded.lock.release(SlotId(1));
        })
    };
    assert_eq!(guarded.lock.acquire(SlotId(0), None, &|_| true), Ok(Acquired::Clean));
    guarded.increment();
    guarded.lock.release(SlotId(0));
    other.join().unwrap();
    assert!(
        guarded.lock.try_acquire(SlotId(2))
            || word(&guarded.lock).load(Ordering::Relaxed) & HANDOFF != 0
    );
}

/// A waiter that gives up passes the watch on.
fn giving_up_leaves_nobody_asleep() {
    let guarded = Arc::new(Guarded::new());
    assert!(guarded.lock.try_acquire(SlotId(0)));
    let patient = {
        let guarded = Arc::clone(&guarded);
        thread::spawn(move || {
            assert_eq!(guarded.lock.acquire(SlotId(1), None, &|_| true), Ok(Acquired::Clean));
            guarded.increment();
            guarded.lock.release(SlotId(1));
        })
    };
    let impatient = {
        let guarded = Arc::clone(&guarded);
        thread::spawn(move || {
            let deadline = Some(Instant::now());
            if guarded.lock.acquire(SlotId(2), deadline, &|_| true).is_ok() {
                guarded.increment();
                guarded.lock.release(SlotId(2));
            }
        })
    };
    guarded.increment();
    guarded.lock.release(SlotId(0));
    patient.join().unwrap();
    impatient.join().unwrap();
}

/// The robbed owner of the flush lock does not release the thief's turn.
fn robbed_owner_finds_out() {
    let guarded = Arc::new(Guarded::new());
    assert!(guarded.lock.try_acquire(SlotId(0)));
    let turn = guarded.lock.turn();
    let thief = {
        let guarded = Arc::clone(&guarded);
        thread::spawn(move || {
            let stolen = guarded.lock.steal_from_live(SlotId(1), turn);
            if stolen {
                assert_eq!(guarded.lock.owner(), Some(SlotId(1)));
                let mine = guarded.lock.turn();
                assert!(guarded.lock.still_mine(mine));
                assert!(guarded.lock.release_if_mine(mine));
            }
            stolen
        })
    };
    let released = guarded.lock.release_if_mine(turn);
    let stolen = thief.join().unwrap();
    assert!(released ^ stolen, "released {released}, stolen {stolen}");
    assert_eq!(guarded.lock.owner(), None);
}

/// A pin table, two pages, and the root word that says which is the current one.
struct Store {
    slots: Vec<PinSlot>,
    mark: AtomicU64,
    era: AtomicU64,
    root: AtomicU64,
    pages: [UnsafeCell<u64>; 2],
}

impl Store {
    fn new() -> Self {
        Self {
            slots: (0..2).map(|_| PinSlot::new()).collect(),
            mark: AtomicU64::new(0),
            era: AtomicU64::new(0),
            root: AtomicU64::new(0),
            pages: [UnsafeCell::new(100), UnsafeCell::new(0)],
        }
    }

    fn table(&self) -> PinTable {
        // SAFETY: the store outlives the table, in every model.
        unsafe { PinTable::new(self.slots.as_ptr(), self.slots.len(), &self.mark, &self.era) }
    }

    /// A page's contents; loom notices if somebody writes it at the same time.
    fn read(&self, page: u64) -> u64 {
        // SAFETY: what the model is to show.
        self.pages[page as usize].with(|page| unsafe { *page })
    }

    fn write(&self, page: u64, value: u64) {
        // SAFETY: what the model is to show.
        self.pages[page as usize].with_mut(|page| unsafe { *page = value });
    }

    fn reader(&self, claim_first: bool) {
        let table = self.table();
        let index =
            if claim_first { table.claim(SlotId(1), ClaimFor::Process).unwrap() } else { 0 };
        table.pin(index);
        let page = self.root.load(Ordering::Acquire);
        let value = self.read(page);
        assert!(value >= 100, "a page that was not written yet");
        table.unpin(index);
    }

    /// Publishes page 1 in place of page 0, and re-uses page 0 if nobody can see it.
    fn writer(&self, publish: Ordering) {
        let table = self.table();
        self.write(1, 101);
        self.root.store(1, publish);
        let retired = table.era_of_retirement();
        table.advance();
        if table.min_pinned().is_none_or(|oldest| oldest.era > retired) {
            self.write(0, 102);
            self.root.store(0, publish);
        }
    }
}

/// One reader, one writer: the writer does not touch a page that the reader may see.
fn pinned_pages_stay(claim_first: bool, publish: Ordering) {
    let store = Arc::new(Store::new());
    if !claim_first {
        store.table().claim(SlotId(1), ClaimFor::Process).unwrap();
    }
    let reader = {
        let store = Arc::clone(&store);
        thread::spawn(move || store.reader(claim_first))
    };
    store.writer(publish);
    reader.join().unwrap();
}

/// The same with the era advanced by a third party at any moment.
fn pinned_pages_stay_whoever_advances() {
    let store = Arc::new(Store::new());
    store.table().claim(SlotId(1), ClaimFor::Process).unwrap();
    let reader = {
        let store = Arc::clone(&store);
        thread::spawn(move || store.reader(false))
    };
    let clock = {
        let store = Arc::clone(&store);
        thread::spawn(move || {
            store.table().advance();
        })
    };
    store.writer(Ordering::Release);
    reader.join().unwrap();
    clock.join().unwrap();
}

/// A claim beside a scan that lowers the mark: the pin that follows is not overlooked.
fn lowering_the_mark_overlooks_no_claim() {
    const SLOTS: usize = 20;
    let slots: Arc<Vec<PinSlot>> = Arc::new((0..SLOTS).map(|_| PinSlot::new()).collect());
    let words = Arc::new((AtomicU64::new(SLOTS as u64), AtomicU64::new(1)));
    let table = {
        let (slots, words) = (Arc::clone(&slots), Arc::clone(&words));
        // SAFETY: both live as long as the closure that makes the table, and the tables with it.
        move || unsafe { PinTable::new(slots.as_ptr(), SLOTS, &words.0, &words.1) }
    };
    let claimer = {
        let table = table.clone();
        thread::spawn(move || {
            let table = table();
            let index = table.claim(SlotId(1), ClaimFor::Process).unwrap();
            table.pin(index);
        })
    };
    let mine = table();
    // A scan of the whole table, at the end of which the mark comes down.
    let _ = mine.min_pinned();
    claimer.join().unwrap();
    assert_eq!(mine.min_pinned().map(|oldest| oldest.era), Some(Era(1)));
}

/// A model that is one function.
pub type Foundation = (&'static str, Expected, Setting, fn());

/// The lock and the pins.
pub fn foundations() -> Vec<Foundation> {
    use Expected::{Fails, Holds};
    let time_outs = || Setting { time_outs: true, ..USUAL };
    let all = |preemptions| Setting { preemptions, ..USUAL };
    let more = |tick_ns| Setting { preemptions: 4, tick_ns, ..USUAL };
    let fewer = |tick_ns| Setting { preemptions: 2, tick_ns, ..USUAL };
    vec![
        ("lock_excludes_two", Holds, more(6_000), || lock_excludes(2, 2, true)),
        ("lock_excludes_two_hasty", Holds, more(40_000), || lock_excludes(2, 2, true)),
        ("lock_excludes_two_for_long", Holds, USUAL, || lock_excludes(2, 4, true)),
        ("lock_excludes_three", Holds, fewer(6_000), || lock_excludes(3, 1, false)),
        ("lock_excludes_three_hasty", Holds, Setting { preemptions: 1, ..fewer(40_000) }, || {
            lock_excludes(3, 1, true)
        }),
        ("lock_take_over_happens_once", Holds, time_outs(), take_over_happens_once),
        ("lock_stale_handoff", Holds, USUAL, || stale_flags_block_nobody(HANDOFF)),
        ("lock_stale_sleepers", Holds, USUAL, || stale_flags_block_nobody(SLEEPERS)),
        ("lock_stale_doze", Holds, USUAL, || stale_flags_block_nobody(HANDOFF | DOZING)),
        ("lock_stale_watch", Holds, time_outs(), || {
            stale_flags_block_nobody(WATCHED | HANDOFF | DOZING | SLEEPERS);
        }),
        ("lock_giving_up", Holds, fewer(40_000), giving_up_leaves_nobody_asleep),
        ("lock_robbed_owner", Holds, USUAL, robbed_owner_finds_out),
        (
            "lock_without_wake_ups",
            Fails("deadlock"),
            Setting { wake_ups: false, ..more(40_000) },
            || {
                lock_excludes(2, 2, true);
            },
        ),
        ("pin_reuse", Holds, all(6), || pinned_pages_stay(false, Ordering::Release)),
        ("pin_reuse_claim", Holds, all(6), || pinned_pages_stay(true, Ordering::Release)),
        ("pin_reuse_whoever_advances", Holds, all(4), pinned_pages_stay_whoever_advances),
        ("pin_mark_lowered", Holds, all(6), lowering_the_mark_overlooks_no_claim),
        ("pin_reuse_without_fences", Fails("ausality"), Setting { fences: false, ..USUAL }, || {
            pinned_pages_stay(false, Ordering::Release);
        }),
        ("changes_are_noticed", Holds, all(3), || changes_are_noticed(1, 1)),
        ("changes_are_noticed_by_two", Holds, all(2), || changes_are_noticed(2, 2)),
        ("changes_are_noticed_beside_others", Holds, all(2), || changes_are_noticed(2, 1)),
        (
            "changes_are_noticed_without_fences",
            Fails("deadlock"),
            Setting { fences: false, ..USUAL },
            || changes_are_noticed(1, 1),
        ),
        ("root_store_relaxed", Fails("ausality"), USUAL, || {
            pinned_pages_stay(false, Ordering::Relaxed)
        }),
    ]
}
