//! Model checks of the protocols in shared memory, by loom.
//!
//! The files of the lock and of the pins are compiled here against loom's atomics in place of the
//! processor's (module `sync` below), so what is checked is the code that ships, and not a
//! copy of its idea. The protocols of the engine above them are modelled in the folder `models`: the same words
//! and steps as in the code, and no more; processes die there between any two stores. Loom runs each model through the orders of events that the memory model allows, up to
//! a bound on pre-emptions. Some models have the decisive step left out or out of place and must fail, with
//! the words given: so it is known that the check would notice.
//!
//! Run by plain `cargo test`; `cargo test -p ntdb --test models NAME` runs the models whose name contains NAME.
// Parts of the included modules are of no use here.
#![allow(dead_code, unused_imports, missing_docs)]

#[path = "../src/limits.rs"]
mod limits;
#[path = "../src/shm/lock/mod.rs"]
mod lock;
#[path = "models/log.rs"]
mod log;
#[path = "models/mortal.rs"]
mod mortal;
#[path = "models/note.rs"]
mod note;
#[path = "../src/shm/pin/mod.rs"]
mod pin;
#[path = "models/retire.rs"]
mod retire;
#[path = "models/slots.rs"]
mod slots;
#[path = "models/stripes.rs"]
mod stripes;
#[path = "../src/types.rs"]
mod types;

/// Stands in for the module of this name in the library.
mod sync {
    use std::sync::atomic::{AtomicBool, AtomicU64 as RealAtomicU64};
    use std::time::Instant;

    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence as loom_fence};

    /// Off: fences do nothing.
    pub static FENCES: AtomicBool = AtomicBool::new(true);
    /// What each look at the clock adds to it, in nanoseconds.
    pub static TICK_NS: RealAtomicU64 = RealAtomicU64::new(0);

    pub fn fence(order: Ordering) {
        if FENCES.load(Ordering::Relaxed) {
            loom_fence(order);
        }
    }

    pub fn store_then_fence(word: &AtomicU64, value: u64) {
        word.store(value, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Counts looks instead of time.
    pub struct Stopwatch(u64);

    impl Stopwatch {
        pub fn start() -> Self {
            Self(0)
        }

        pub fn elapsed_ns(&mut self) -> u64 {
            self.0 += TICK_NS.load(Ordering::Relaxed);
            self.0
        }

        pub fn until_ns(&self, _deadline: Instant) -> u64 {
            0
        }

        pub fn pause(&mut self, _pause_ns: u64) {
            loom::thread::yield_now();
        }
    }

    /// Nobody is displaced in the model.
    pub fn current_cpu() -> u32 {
        1
    }

    pub mod fork {
        pub fn generation() -> u64 {
            1
        }
    }

    /// The kernel's part: comparing and going to sleep are one step.
    pub mod futex {
        use std::collections::VecDeque;
        use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
        use std::time::Duration;

        use loom::sync::{Arc, Condvar, Mutex, atomic::AtomicU32};

        #[derive(Debug, PartialEq, Eq, Clone, Copy)]
        pub enum Wake {
            Woken,
            Changed,
            TimedOut,
        }

        /// Naps, which nobody has promised to end, are shorter than this.
        const NAPS_BELOW: Duration = Duration::from_micros(500);
        /// On: every wait times out at once. Off: only naps do, so that a lost wake-up is a deadlock.
        pub static TIME_OUTS: AtomicBool = AtomicBool::new(false);
        /// How many have been woken, in all executions of a model.
        pub static WOKEN: AtomicUsize = AtomicUsize::new(0);
        /// Off: nobody is woken.
        pub static WAKE_UPS: AtomicBool = AtomicBool::new(true);

        struct Sleeper {
            word: usize,
            woken: Arc<(Mutex<bool>, Condvar)>,
        }

        loom::lazy_static! {
            static ref QUEUE: Mutex<VecDeque<Sleeper>> = Mutex::new(VecDeque::new());
        }

        pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> Wake {
            let is_nap = timeout.is_some_and(|timeout| timeout < NAPS_BELOW);
            if is_nap || TIME_OUTS.load(Relaxed) {
                loom::thread::yield_now();
                return Wake::TimedOut;
            }
            let woken = Arc::new((Mutex::new(false), Condvar::new()));
            {
                let mut queue = QUEUE.lock().unwrap();
                if word.load(Relaxed) != expected {
                    return Wake::Changed;
                }
                queue.push_back(Sleeper {
                    word: std::ptr::from_ref(word).addr(),
                    woken: Arc::clone(&woken),
                });
            }
            let mut up = woken.0.lock().unwrap();
            while !*up {
                up = woken.1.wait(up).unwrap();
            }
            Wake::Woken
        }

        pub fn wake(word: &AtomicU32, count: u32) -> usize {
            let count = if WAKE_UPS.load(Relaxed) { count } else { 0 };
            let mut woken = 0;
            let mut queue = QUEUE.lock().unwrap();
            let mut index = 0;
            while index < queue.len() && woken < count as usize {
                if queue[index].word == std::ptr::from_ref(word).addr() {
                    let sleeper = queue.remove(index).unwrap();
                    *sleeper.woken.0.lock().unwrap() = true;
                    sleeper.woken.1.notify_one();
                    woken += 1;
                } else {
                    index += 1;
                }
            }
            WOKEN.fetch_add(woken, Relaxed);
            woken
        }
    }
}

use std::io::Write;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use lock::{Acquired, RobustLock};
use pin::{ClaimFor, PinSlot, PinTable};
use types::{Era, SlotId};

/// How a model's executions are bounded and set up.
struct Setting {
    preemptions: usize,
    time_outs: bool,
    fences: bool,
    wake_ups: bool,
    tick_ns: u64,
}

const USUAL: Setting =
    Setting { preemptions: 3, time_outs: false, fences: true, wake_ups: true, tick_ns: 6_000 };

/// Runs a model, and panics if it fails. The number of executions.
fn explore(setting: &Setting, model: impl Fn() + Send + Sync + 'static) -> usize {
    sync::FENCES.store(setting.fences, Relaxed);
    sync::TICK_NS.store(setting.tick_ns, Relaxed);
    sync::futex::TIME_OUTS.store(setting.time_outs, Relaxed);
    sync::futex::WAKE_UPS.store(setting.wake_ups, Relaxed);
    static EXECUTIONS: AtomicUsize = AtomicUsize::new(0);
    EXECUTIONS.store(0, Relaxed);
    sync::futex::WOKEN.store(0, Relaxed);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(setting.preemptions);
    builder.max_branches = 20_000;
    builder.check(move || {
        EXECUTIONS.fetch_add(1, Relaxed);
        model();
    });
    EXECUTIONS.load(Relaxed)
}

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

type Model = (&'static str, Expected, Setting, Run);
/// Explores a model, and returns the number of executions.
type Run = Box<dyn Fn(&Setting) -> usize>;

#[derive(PartialEq)]
enum Expected {
    Holds,
    /// Its last words contain these.
    Fails(&'static str),
}

fn models() -> Vec<Model> {
    let foundations = foundations().into_iter().map(|(name, expected, setting, model)| {
        let run: Run = Box::new(move |setting| explore(setting, model));
        (name, expected, setting, run)
    });
    foundations.chain(protocols()).collect()
}

/// The protocols of the engine.
fn protocols() -> Vec<Model> {
    use Expected::{Fails, Holds};
    let within = |preemptions| Setting { preemptions, ..USUAL };
    macro_rules! model {
        ($name:literal, $expected:expr, $preemptions:literal, $path:ident::$model:ident($($argument:expr),*)) => {{
            #[allow(unused_imports)]
            use $path::*;
            let run: Run = Box::new(move |setting| $path::$model(setting, $($argument),*));
            ($name, $expected, within($preemptions), run)
        }};
    }
    vec![
        model!("note_take_over", Holds, 2, note::take_over(Kind::Data, Wrong::Nothing)),
        model!(
            "note_lists_late",
            Fails("is leaked"),
            2,
            note::take_over(Kind::Data, Wrong::ListsLate)
        ),
        model!(
            "note_disarms_early",
            Fails("linked and free at once"),
            2,
            note::take_over(Kind::Data, Wrong::DisarmsEarly)
        ),
        model!(
            "note_applies_always",
            Fails("the count is not"),
            2,
            note::take_over(Kind::Data, Wrong::AppliesAlways)
        ),
        model!(
            "note_appends_early",
            Fails("ausality"),
            2,
            note::take_over(Kind::Data, Wrong::AppendsEarly)
        ),
        model!(
            "note_shows_early",
            Fails("visible before it was appended"),
            2,
            note::take_over(Kind::Data, Wrong::ShowsEarly)
        ),
        model!(
            "note_counts_on",
            Fails("each record has given up one page"),
            2,
            note::take_over(Kind::Data, Wrong::CountsOn)
        ),
        model!("note_structure_step", Holds, 2, note::take_over(Kind::Structure, Wrong::Nothing)),
        model!(
            "note_structure_disarms_early",
            Fails("linked and free at once"),
            2,
            note::take_over(Kind::Structure, Wrong::DisarmsEarly)
        ),
        model!("slot_updates", Holds, 5, slots::readers_see(UPDATES, Wrong::Nothing)),
        model!("slot_re_used", Holds, 5, slots::readers_see(SLOT_RE_USED, Wrong::Nothing)),
        model!("slot_key_returns", Holds, 5, slots::readers_see(KEY_RETURNS, Wrong::Nothing)),
        model!("slot_neighbour", Holds, 5, slots::readers_see(NEIGHBOUR, Wrong::Nothing)),
        model!(
            "slot_tag_first",
            Fails("out of order"),
            5,
            slots::readers_see(NEIGHBOUR, Wrong::TagFirst)
        ),
        model!(
            "slot_offset_relaxed",
            Fails("ausality"),
            5,
            slots::readers_see(UPDATES, Wrong::OffsetRelaxed)
        ),
        model!(
            "slot_over_writes",
            Fails("ausality"),
            5,
            slots::readers_see(UPDATES, Wrong::OverWrites)
        ),
        model!(
            "slot_looks_once",
            Fails("out of order"),
            5,
            slots::readers_see(KEY_RETURNS, Wrong::LooksOnce)
        ),
        model!("key_lock", Holds, 3, stripes::key_lock_excludes_writers(Wrong::Nothing)),
        model!(
            "key_lock_no_pass",
            Fails("a lost update"),
            3,
            stripes::key_lock_excludes_writers(Wrong::NoPass)
        ),
        model!(
            "key_lock_looks_early",
            Fails("a lost update"),
            3,
            stripes::key_lock_excludes_writers(Wrong::LooksEarly)
        ),
        model!("key_lock_siblings", Holds, 5, stripes::siblings_exclude_each_other(Wrong::Nothing)),
        model!(
            "key_lock_two_words",
            Fails("two hold the key lock"),
            5,
            stripes::siblings_exclude_each_other(Wrong::TwoWords)
        ),
        model!("key_lock_late_waiter", Holds, 5, stripes::late_waiter_robs_nobody(Wrong::Nothing)),
        model!(
            "key_lock_no_generation",
            Fails("two hold the key lock"),
            5,
            stripes::late_waiter_robs_nobody(Wrong::NoGeneration)
        ),
        model!("log_robbed_flusher", Holds, 3, log::robbed_flusher(Wrong::Nothing)),
        model!(
            "log_trusts_its_copy",
            Fails("on disk"),
            4,
            log::robbed_flusher(Wrong::TrustsItsCopy)
        ),
        model!("log_switch", Holds, 2, log::switch_beside_flush_and_sync(Wrong::Nothing)),
        model!(
            "log_switch_point_first",
            Fails("on disk"),
            2,
            log::switch_beside_flush_and_sync(Wrong::SwitchPointFirst)
        ),
        model!(
            "log_file_first",
            Fails("on disk"),
            2,
            log::switch_beside_flush_and_sync(Wrong::FileFirst)
        ),
        model!(
            "log_switch_without_sync",
            Fails("on disk"),
            2,
            log::switch_beside_flush_and_sync(Wrong::NoSync)
        ),
        model!("log_switch_deaths", Holds, 2, log::switch_survives_deaths(Wrong::Nothing)),
        model!("log_robbed_switcher", Holds, 4, log::robbed_switcher(Wrong::Nothing, 1)),
        model!("log_robbed_switcher_twice", Holds, 3, log::robbed_switcher(Wrong::Nothing, 2)),
        model!(
            "log_announces_late",
            Fails("not everything is synced"),
            2,
            log::robbed_switcher(Wrong::AnnouncesLate, 2)
        ),
        model!(
            "log_makes_in_place",
            Fails("on disk"),
            2,
            log::robbed_switcher(Wrong::MakesInPlace, 1)
        ),
        model!(
            "log_replaces_made",
            Fails("on disk"),
            3,
            log::robbed_switcher(Wrong::ReplacesMade, 1)
        ),
        model!(
            "log_takes_made",
            Fails("not everything is written"),
            3,
            log::robbed_switcher(Wrong::TakesMade, 1)
        ),
        model!("log_flag", Holds, 5, log::flagged_file_is_not_re_used(Wrong::Nothing)),
        model!(
            "log_flag_without_fences",
            Fails("a write into a file that is re-used"),
            5,
            log::flagged_file_is_not_re_used(Wrong::NoFences)
        ),
        model!("retire_readers", Holds, 3, retire::readers_keep_their_pages(Wrong::Nothing)),
        model!(
            "retire_advances_early",
            Fails("ausality"),
            3,
            retire::readers_keep_their_pages(Wrong::AdvancesEarly)
        ),
        model!(
            "retire_equal_pins",
            Fails("ausality"),
            3,
            retire::readers_keep_their_pages(Wrong::EqualPins)
        ),
        model!("retire_checkpoint", Holds, 5, retire::checkpoints_keep_their_pages(Wrong::Nothing)),
        model!(
            "retire_forgets_running",
            Fails("ausality"),
            3,
            retire::checkpoints_keep_their_pages(Wrong::ForgetsRunning)
        ),
        model!(
            "retire_forgets_durable",
            Fails("durable"),
            3,
            retire::checkpoints_keep_their_pages(Wrong::ForgetsDurable)
        ),
        model!(
            "retire_holds_too_short",
            Fails("durable checkpoint is re-used"),
            3,
            retire::checkpoints_keep_their_pages(Wrong::HoldsTooShort)
        ),
        model!(
            "retire_queue_moves",
            Holds,
            2,
            retire::queue_moves_survive_deaths(3, 3, Wrong::Nothing)
        ),
        model!(
            "retire_overlaps",
            Fails("the queue has changed"),
            2,
            retire::queue_moves_survive_deaths(1, 3, Wrong::Overlaps)
        ),
        model!("retire_deaths", Holds, 2, retire::moves_survive_deaths(Wrong::Nothing)),
        model!(
            "retire_relative",
            Fails("listed twice"),
            2,
            retire::moves_survive_deaths(Wrong::Relative)
        ),
        model!(
            "retire_forgets_note",
            Fails("free and used at once"),
            2,
            retire::moves_survive_deaths(Wrong::Forgets)
        ),
    ]
}

/// A model that is one function.
type Foundation = (&'static str, Expected, Setting, fn());

/// The lock and the pins.
fn foundations() -> Vec<Foundation> {
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
        ("root_store_relaxed", Fails("ausality"), USUAL, || {
            pinned_pages_stay(false, Ordering::Relaxed)
        }),
    ]
}

/// Says to a process of this program that it is one that is expected to fail.
const DOOMED: &str = "NTDB_DOOMED_MODEL";

fn main() -> ExitCode {
    let doomed = std::env::var(DOOMED).ok();
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut failures = 0;
    for (name, expected, setting, model) in models() {
        if doomed.as_ref().is_some_and(|doomed| doomed == name) {
            model(&setting);
            return ExitCode::SUCCESS;
        }
        let is_wanted = wanted.is_empty() || wanted.iter().any(|part| name.contains(part));
        if doomed.is_some() || !is_wanted {
            continue;
        }
        let start = Instant::now();
        let outcome = match expected {
            Expected::Holds => {
                print!("model {name} ... ");
                let _ = std::io::stdout().flush();
                let executions = model(&setting);
                let woken = sync::futex::WOKEN.load(Relaxed);
                if name.starts_with("lock_excludes") {
                    assert!(woken > 0, "nobody has slept: the model shows little");
                }
                format!("ok, {executions} executions, {woken} woken")
            }
            Expected::Fails(words) => {
                print!("model {name} (must fail) ... ");
                let _ = std::io::stdout().flush();
                // A process of its own: loom may well abort when it has found a dead end.
                let output = Command::new(std::env::current_exe().expect("this program's path"))
                    .env(DOOMED, name)
                    .env("RUST_BACKTRACE", "0")
                    .stdout(Stdio::null())
                    .output()
                    .expect("this program runs");
                let last_words = String::from_utf8_lossy(&output.stderr);
                let failed = !output.status.success() && last_words.contains(words);
                failures += usize::from(!failed);
                match (failed, output.status.success()) {
                    (true, _) => String::from("ok, fails"),
                    (false, true) => String::from("DOES NOT FAIL"),
                    (false, false) => format!("FAILS OTHERWISE: {last_words}"),
                }
            }
        };
        println!("{outcome}, {:.1} s", start.elapsed().as_secs_f64());
    }
    ExitCode::from(u8::from(failures > 0))
}
