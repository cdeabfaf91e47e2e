//! How much of one process's throughput is left when many take the same lock, and how long they wait.
//!
//! `cargo bench -p ntdb --bench lock [-- --seconds S]`
//!
//! Each of N processes repeats: work outside the lock, take it, work inside (and write to some cache
//! lines that all share, as the engine's writers do), release. Printed per line: the total rate, its ratio to
//! that of one process in the same setting, the smallest and the largest share of a process relative to an even one, the longest
//! wait, how often waiters went to sleep (voluntary context switches) per thousand operations, and how many
//! processors were kept busy (less than `procs` and less than the machine has: others were using it, and
//! the line says little).
// Parts of the included modules are of no use here.
#![allow(dead_code, unused_imports, missing_docs)]

#[path = "../src/limits.rs"]
mod limits;
#[path = "../src/shm/lock/mod.rs"]
mod lock;
#[path = "../src/storage/mod.rs"]
mod storage;
#[path = "../src/sync.rs"]
mod sync;
#[path = "../src/types.rs"]
mod types;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use lock::{Acquired, RobustLock};
use types::SlotId;

const WORKERS_MAX: usize = 64;
const LINES_MAX: usize = 64;

#[repr(C, align(64))]
struct Line(AtomicU64);

/// What one worker reports.
#[repr(C, align(64))]
struct Report {
    operations: AtomicU64,
    wait_ns_max: AtomicU64,
    sleeps: AtomicU64,
    cpu_us: AtomicU64,
}

#[repr(C)]
struct Arena {
    lock: RobustLock,
    go: AtomicU32,
    stop: AtomicU32,
    lines: [Line; LINES_MAX],
    reports: [Report; WORKERS_MAX],
}

struct Setting {
    outside_ns: u64,
    inside_ns: u64,
    shared_lines: usize,
}

fn shared_arena() -> &'static Arena {
    // SAFETY: fresh anonymous memory of the right size; zero bytes are a valid arena of atomics.
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

/// Steps of a dependent chain of multiplications.
#[inline(never)]
fn work(steps: u64) -> u64 {
    let mut x = steps | 1;
    for _ in 0..steps {
        x = std::hint::black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    x
}

fn steps_per_us() -> u64 {
    let mut best = u128::MAX;
    for _ in 0..20 {
        let start = Instant::now();
        work(100_000);
        best = best.min(start.elapsed().as_nanos());
    }
    (100_000_u128 * 1000 / best) as u64
}

fn worker(arena: &Arena, index: usize, setting: &Setting, steps_per_us: u64) {
    let me = SlotId(index as u16);
    let outside = setting.outside_ns * steps_per_us / 1000;
    let inside = setting.inside_ns * steps_per_us / 1000;
    let mut operations = 0;
    let mut wait_max = Duration::ZERO;
    while arena.go.load(Relaxed) == 0 {
        std::thread::sleep(Duration::from_micros(100));
    }
    while arena.stop.load(Relaxed) == 0 {
        work(outside);
        if !arena.lock.try_acquire(me) {
            let start = Instant::now();
            let got = arena.lock.acquire(me, None, &|_| true);
            assert_eq!(got, Ok(Acquired::Clean));
            wait_max = wait_max.max(start.elapsed());
        }
        for line in &arena.lines[..setting.shared_lines] {
            line.0.store(line.0.load(Relaxed) + 1, Relaxed);
        }
        work(inside);
        arena.lock.release(me);
        operations += 1;
    }
    // SAFETY: a plain struct for the kernel to fill.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let time_us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    let report = &arena.reports[index];
    report.operations.store(operations, Relaxed);
    report.wait_ns_max.store(wait_max.as_nanos() as u64, Relaxed);
    report.sleeps.store(usage.ru_nvcsw as u64, Relaxed);
    report.cpu_us.store(time_us(usage.ru_utime) + time_us(usage.ru_stime), Relaxed);
}

struct Outcome {
    rate: f64,
    least: f64,
    most: f64,
    wait_ms_max: f64,
    sleeps_per_1000: f64,
    processors: f64,
}

fn run(setting: &Setting, processes: usize, seconds: f64, steps_per_us: u64) -> Outcome {
    let arena = shared_arena();
    let mut children = Vec::new();
    for index in 0..processes {
        // SAFETY: this program has one thread.
        match unsafe { libc::fork() } {
            0 => {
                worker(arena, index, setting, steps_per_us);
                // SAFETY: ends the child without running the parent's exit handlers.
                unsafe { libc::_exit(0) };
            }
            child => children.push(child),
        }
    }
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    arena.go.store(1, Relaxed);
    std::thread::sleep(Duration::from_secs_f64(seconds));
    arena.stop.store(1, Relaxed);
    let elapsed = start.elapsed().as_secs_f64();
    for child in children {
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0, "a worker failed");
    }
    let reports = &arena.reports[..processes];
    let counts: Vec<u64> = reports.iter().map(|r| r.operations.load(Relaxed)).collect();
    let total: u64 = counts.iter().sum();
    if setting.shared_lines > 0 {
        assert_eq!(arena.lines[0].0.load(Relaxed), total, "the lock has not excluded");
    }
    let even = total as f64 / processes as f64;
    let sleeps: u64 = reports.iter().map(|r| r.sleeps.load(Relaxed)).sum();
    let wait_ns = reports.iter().map(|r| r.wait_ns_max.load(Relaxed)).max().unwrap_or(0);
    let cpu_us: u64 = reports.iter().map(|r| r.cpu_us.load(Relaxed)).sum();
    Outcome {
        rate: total as f64 / elapsed,
        least: *counts.iter().min().unwrap_or(&0) as f64 / even,
        most: *counts.iter().max().unwrap_or(&0) as f64 / even,
        wait_ms_max: wait_ns as f64 / 1e6,
        sleeps_per_1000: sleeps as f64 * 1000.0 / total as f64,
        processors: cpu_us as f64 / 1e6 / elapsed,
    }
}

fn main() {
    let mut seconds = 0.5;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--seconds" {
            seconds = arguments.next().and_then(|s| s.parse().ok()).expect("--seconds NUMBER");
        }
    }
    let steps_per_us = steps_per_us();
    println!(
        "outside inside lines procs    Mops/s  ratio  least   most  max wait  sleeps/1000  processors"
    );
    let settings = [
        (0, 150, 1),
        (150, 150, 1),
        (150, 150, 8),
        (300, 150, 1),
        (1000, 150, 4),
        (5000, 300, 4),
        (500, 5000, 4),
    ];
    for (outside_ns, inside_ns, shared_lines) in settings {
        let setting = Setting { outside_ns, inside_ns, shared_lines };
        let mut alone = 0.0;
        for processes in [1, 2, 4, 8, 16] {
            let outcome = run(&setting, processes, seconds, steps_per_us);
            if processes == 1 {
                alone = outcome.rate;
            }
            println!(
                "{outside_ns:7} {inside_ns:6} {shared_lines:5} {processes:5} {:9.3} {:6.2} {:6.2} {:6.2} {:6.2} ms {:10.3} {:10.2}",
                outcome.rate / 1e6,
                outcome.rate / alone,
                outcome.least,
                outcome.most,
                outcome.wait_ms_max,
                outcome.sleeps_per_1000,
                outcome.processors,
            );
        }
    }
}
