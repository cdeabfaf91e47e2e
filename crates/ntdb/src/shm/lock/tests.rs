//! The lock among threads and among real processes, some of which are killed or stopped.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

use super::{Acquired, RobustLock, TimedOut};
use crate::types::SlotId;

const ME: SlotId = SlotId(0);

fn all_live(_: SlotId) -> bool {
    true
}

/// A number that only the lock protects.
struct Unguarded(UnsafeCell<u64>);
// SAFETY: the tests touch it under the lock only; that this is enough is what they test.
unsafe impl Sync for Unguarded {}
// SAFETY: as above.
unsafe impl Send for Unguarded {}

impl Unguarded {
    fn increment(&self) {
        // SAFETY: called under the lock.
        unsafe { self.0.get().write_volatile(self.0.get().read_volatile() + 1) }
    }
}

#[test]
fn layout_is_one_cache_line_and_zero_bytes_are_free() {
    assert_eq!((size_of::<RobustLock>(), align_of::<RobustLock>()), (64, 64));
    // SAFETY: made of atomics, for which zero bytes are valid.
    let lock = unsafe { std::mem::zeroed::<RobustLock>() };
    assert_eq!(lock.owner(), None);
    assert!(lock.try_acquire(ME));
    assert_eq!(lock.owner(), Some(ME));
    lock.release(ME);
    assert_eq!(lock.owner(), None);
    assert_eq!(lock.generation(), 1);
}

#[test]
fn slots_at_both_ends_of_the_range() {
    for slot in [SlotId(0), SlotId(u16::MAX - 1)] {
        let lock = RobustLock::new();
        assert!(lock.try_acquire(slot));
        assert_eq!(lock.owner(), Some(slot));
        assert!(!lock.try_acquire(SlotId(7)));
        lock.release(slot);
        assert_eq!((lock.owner(), lock.generation()), (None, 1));
    }
}

#[test]
fn threads_exclude_each_other_although_they_share_a_slot() {
    let shared = Arc::new((RobustLock::new(), Unguarded(UnsafeCell::new(0))));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                for _ in 0..50_000 {
                    assert_eq!(shared.0.acquire(ME, None, &all_live), Ok(Acquired::Clean));
                    shared.1.increment();
                    shared.0.release(ME);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    // SAFETY: all threads have ended.
    assert_eq!(unsafe { *shared.1.0.get() }, 8 * 50_000);
    assert_eq!(shared.0.generation(), 8 * 50_000);
}

#[test]
fn who_waits_in_vain_is_told_the_owner_in_time() {
    let lock = RobustLock::new();
    assert!(lock.try_acquire(SlotId(3)));
    for wait_ms in [0, 1, 5, 40] {
        let start = Instant::now();
        let deadline = start + Duration::from_millis(wait_ms);
        let answer = lock.acquire(ME, Some(deadline), &all_live);
        assert_eq!(answer, Err(TimedOut { owner: Some(SlotId(3)) }));
        let waited = start.elapsed();
        assert!(waited >= Duration::from_millis(wait_ms), "gave up early, after {waited:?}");
        assert!(waited < Duration::from_millis(wait_ms + 2_000), "gave up late, after {waited:?}");
    }
    lock.release(SlotId(3));
    assert_eq!(lock.acquire(ME, Some(Instant::now()), &all_live), Ok(Acquired::Clean));
}

#[test]
fn an_owner_that_is_me_is_alive() {
    let lock = RobustLock::new();
    assert!(lock.try_acquire(ME));
    let deadline = Some(Instant::now() + Duration::from_millis(30));
    let answer = lock.acquire(ME, deadline, &|_| panic!("asked whether this process lives"));
    assert_eq!(answer, Err(TimedOut { owner: Some(ME) }));
}

#[test]
fn a_promise_to_the_dead_is_broken_by_waiting_or_on_demand() {
    let lock = RobustLock::new();
    assert!(lock.try_acquire(ME));
    lock.word.fetch_or(super::HANDOFF | super::WATCHED | super::DOZING, Relaxed);
    lock.release(ME);
    assert!(!lock.try_acquire(ME), "promised");
    assert!(lock.acquire_if_free(ME));
    assert!(!lock.acquire_if_free(ME), "not free");
    lock.release(ME);
    assert!(!lock.try_acquire(ME), "still promised");
    assert_eq!(lock.acquire(ME, None, &all_live), Ok(Acquired::Clean));
    lock.release(ME);
    assert!(lock.try_acquire(ME));
    lock.release(ME);
}

#[test]
fn of_many_waiters_one_takes_over_from_the_dead() {
    for round in 0..20 {
        let lock = Arc::new(RobustLock::new());
        let dead = SlotId(9);
        assert!(lock.try_acquire(dead));
        let threads: Vec<_> = (0..6)
            .map(|_| {
                let lock = Arc::clone(&lock);
                std::thread::spawn(move || {
                    let start = Instant::now();
                    let answer = lock.acquire(ME, None, &|owner| owner != dead).unwrap();
                    lock.release(ME);
                    (answer, start.elapsed())
                })
            })
            .collect();
        let answers: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let taken_over =
            answers.iter().filter(|(answer, _)| *answer == Acquired::OwnerDied(dead)).count();
        assert_eq!(taken_over, 1, "round {round}: {answers:?}");
        let longest = answers.iter().map(|(_, waited)| *waited).max().unwrap();
        assert!(longest < Duration::from_secs(1), "round {round}: waited {longest:?}");
    }
}

#[test]
fn the_flush_lock_can_be_stolen_and_its_owner_finds_out() {
    let lock = RobustLock::new();
    let thief = SlotId(1);
    assert!(lock.try_acquire(ME));
    let turn = lock.turn();
    assert_eq!(turn.owner(), Some(ME));
    assert!(lock.still_mine(turn));

    assert!(lock.steal_from_live(thief, turn));
    assert!(!lock.still_mine(turn));
    assert!(!lock.steal_from_live(SlotId(2), turn), "stolen twice");
    assert!(!lock.release_if_mine(turn));
    assert_eq!(lock.owner(), Some(thief));

    let turn = lock.turn();
    assert!(lock.release_if_mine(turn));
    assert!(!lock.release_if_mine(turn), "released twice");
    assert_eq!(lock.owner(), None);
    assert!(!lock.steal_from_live(ME, lock.turn()), "there is nobody to steal from");
}

#[test]
fn release_if_mine_wakes_a_sleeper() {
    let lock = Arc::new(RobustLock::new());
    assert!(lock.try_acquire(ME));
    let turn = lock.turn();
    let waiters: Vec<_> = (1..4)
        .map(|slot| {
            let lock = Arc::clone(&lock);
            std::thread::spawn(move || {
                let answer = lock.acquire(SlotId(slot), None, &all_live);
                lock.release(SlotId(slot));
                answer
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(20));
    assert!(lock.release_if_mine(turn));
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), Ok(Acquired::Clean));
    }
}

#[test]
fn a_repair_takes_what_the_dead_held_and_nothing_else() {
    let lock = RobustLock::new();
    let dead = SlotId(5);
    assert!(!lock.take_over(ME, dead), "it was free");
    assert!(lock.try_acquire(SlotId(6)));
    assert!(!lock.take_over(ME, dead), "somebody else held it");
    lock.release(SlotId(6));
    assert!(lock.try_acquire(dead));
    assert!(lock.take_over(ME, dead));
    assert_eq!(lock.owner(), Some(ME));
}

/// What the processes of the tests below share.
#[repr(C)]
struct Arena {
    lock: RobustLock,
    stop: AtomicU32,
    /// Written one after the other under the lock; equal whenever it is free.
    first: AtomicU64,
    second: AtomicU64,
    takeovers: AtomicU64,
    wait_us_max: AtomicU64,
    ready: AtomicU32,
    dead: [AtomicU32; SLOTS],
    counts: [AtomicU64; SLOTS],
}
const SLOTS: usize = 4096;

fn arena() -> &'static Arena {
    // SAFETY: fresh memory of the right size, never unmapped; zero bytes are a valid arena.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            size_of::<Arena>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert!(at != libc::MAP_FAILED);
        &*at.cast::<Arena>()
    }
}

impl Arena {
    fn is_alive(&self, slot: SlotId) -> bool {
        self.dead[usize::from(slot.0)].load(SeqCst) == 0
    }

    /// Takes the lock, repairs if need be, changes both numbers.
    fn step(&self, me: SlotId) {
        let start = Instant::now();
        match self.lock.acquire(me, None, &|slot| self.is_alive(slot)).unwrap() {
            Acquired::Clean => {}
            Acquired::OwnerDied(dead) => {
                assert!(!self.is_alive(dead));
                self.second.store(self.first.load(Relaxed), Relaxed);
                self.takeovers.fetch_add(1, Relaxed);
            }
        }
        self.wait_us_max.fetch_max(start.elapsed().as_micros() as u64, Relaxed);
        let before = self.first.load(Relaxed);
        assert_eq!(self.second.load(Relaxed), before, "half a change was seen");
        self.first.store(before + 1, Relaxed);
        for _ in 0..20 {
            std::hint::spin_loop();
        }
        self.second.store(before + 1, Relaxed);
        self.lock.release(me);
        self.counts[usize::from(me.0)].fetch_add(1, Relaxed);
    }
}

/// Runs `body` in a forked child, which ends with 0 if it returns true.
fn in_child(body: impl FnOnce() -> bool) -> libc::pid_t {
    // SAFETY: the child uses what it has inherited by value or in shared memory, and takes no lock of
    // the parent's: it neither allocates nor prints unless it fails.
    match unsafe { libc::fork() } {
        0 => {
            // If the test fails, and its thread ends, then the child shall not live on.
            // SAFETY: no memory is involved.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!ok)) }
        }
        child => {
            assert!(child > 0);
            child
        }
    }
}

fn wait_for(child: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status
}

fn kill(child: libc::pid_t, signal: i32) {
    // SAFETY: a child of this process that has not been waited for.
    assert_eq!(unsafe { libc::kill(child, signal) }, 0);
}

#[test]
fn processes_exclude_each_other_and_all_get_their_turn() {
    let arena = arena();
    let children: Vec<_> = (0..8)
        .map(|slot| {
            in_child(|| {
                while arena.stop.load(Relaxed) == 0 {
                    arena.step(SlotId(slot));
                }
                true
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(700));
    arena.stop.store(1, Relaxed);
    for child in children {
        assert_eq!(wait_for(child), 0);
    }
    let counts: Vec<u64> = arena.counts[..8].iter().map(|count| count.load(Relaxed)).collect();
    assert_eq!(counts.iter().sum::<u64>(), arena.first.load(Relaxed));
    assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
    let waited = Duration::from_micros(arena.wait_us_max.load(Relaxed));
    assert!(waited < Duration::from_secs(1), "somebody waited {waited:?}");
}

#[test]
fn an_owner_killed_and_a_repairer_killed_are_noticed_in_no_time() {
    let arena = arena();
    let hold = |slot: u16| {
        let child = in_child(|| {
            let _ = arena.lock.acquire(SlotId(slot), None, &|slot| arena.is_alive(slot));
            arena.ready.store(1, SeqCst);
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        while arena.ready.swap(0, SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        kill(child, libc::SIGKILL);
        wait_for(child);
        arena.dead[usize::from(slot)].store(1, SeqCst);
    };
    hold(1);
    assert_eq!(arena.lock.owner(), Some(SlotId(1)));
    hold(2);
    assert_eq!(arena.lock.owner(), Some(SlotId(2)), "the repairer");
    let start = Instant::now();
    let answer = arena.lock.acquire(SlotId(3), None, &|slot| arena.is_alive(slot));
    assert_eq!(answer, Ok(Acquired::OwnerDied(SlotId(2))));
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
}

#[test]
fn processes_killed_at_random_moments_leave_no_lock_and_no_half_change() {
    let seed = seed();
    println!("seed {seed}");
    let mut random = Random(seed);
    let arena = arena();
    let start_worker = |slot: u16| {
        in_child(|| {
            while arena.stop.load(Relaxed) == 0 {
                arena.step(SlotId(slot));
            }
            true
        })
    };
    let mut workers: Vec<_> = (0..6).map(|slot| (slot, start_worker(slot))).collect();
    for next_slot in 6..306 {
        std::thread::sleep(Duration::from_micros(random.below(4_000)));
        let victim = random.below(6) as usize;
        let (slot, child) = workers[victim];
        kill(child, libc::SIGKILL);
        wait_for(child);
        arena.dead[usize::from(slot)].store(1, SeqCst);
        workers[victim] = (next_slot, start_worker(next_slot));
    }
    arena.stop.store(1, SeqCst);
    for (_, child) in workers {
        assert_eq!(wait_for(child), 0);
    }
    assert!(arena.takeovers.load(Relaxed) > 0, "no victim held the lock: the test tests nothing");
    let waited = Duration::from_micros(arena.wait_us_max.load(Relaxed));
    assert!(waited < Duration::from_secs(1), "somebody waited {waited:?}");
    // The last victim may have held it.
    arena.step(SlotId(4000));
    assert_eq!(arena.first.load(Relaxed), arena.second.load(Relaxed));
}

#[test]
fn waiters_that_are_stopped_hold_nobody_up() {
    let seed = seed();
    println!("seed {seed}");
    let mut random = Random(seed);
    let arena = arena();
    let workers: Vec<_> = (0..5)
        .map(|slot| {
            in_child(|| {
                while arena.stop.load(Relaxed) == 0 {
                    arena.step(SlotId(slot));
                }
                true
            })
        })
        .collect();
    for _ in 0..40 {
        std::thread::sleep(Duration::from_micros(random.below(5_000)));
        let victim = random.below(5) as usize;
        kill(workers[victim], libc::SIGSTOP);
        // Stopping takes effect when the victim is next in the kernel.
        std::thread::sleep(Duration::from_millis(5));
        if arena.lock.owner() != Some(SlotId(victim as u16)) {
            // By time rather than by count: others may be descheduled for long on a busy machine.
            let before = arena.first.load(Relaxed);
            let start = Instant::now();
            while arena.first.load(Relaxed) == before {
                let waited = start.elapsed();
                assert!(waited < Duration::from_secs(2), "nobody got the lock for {waited:?}");
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        kill(workers[victim], libc::SIGCONT);
    }
    arena.stop.store(1, SeqCst);
    for child in workers {
        assert_eq!(wait_for(child), 0);
    }
}

fn seed() -> u64 {
    match std::env::var("NTDB_SEED") {
        Ok(seed) => seed.parse().expect("NTDB_SEED is a number"),
        Err(_) => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            now.as_nanos() as u64
        }
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}
