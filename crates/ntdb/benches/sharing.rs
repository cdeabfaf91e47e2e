//! Several processes write to one database: `cargo bench -p ntdb --bench sharing [-- SECONDS [DIRECTORY]]`.
//!
//! 1. **Durable puts**: each process puts its own keys, waiting for the disk each time. Beside it, in the same run, one process that
//!    does the same the naive way: append 20 bytes to a file, fdatasync. Shown as their ratio.
//! 2. **Relaxed puts** on 100,000 keys: throughput of all together against that of one alone, and the longest that
//!    anybody waited for one put. Beside it, how long a cache line takes from one processor to the other.
//! 3. **Readers beside a writer**: gets per second of one process, alone and while another writes.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::time::{Duration, Instant};

use ntdb::{Db, Durability};

/// What a process reports, in memory shared with its parent.
#[repr(C)]
#[derive(Default)]
struct Report {
    operations: AtomicU64,
    longest_ns: AtomicU64,
}

fn shared_reports(count: usize) -> &'static [Report] {
    let bytes = count * size_of::<Report>();
    // SAFETY: a new anonymous mapping; zero bytes are valid reports.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        std::slice::from_raw_parts(at.cast::<Report>(), count)
    }
}

/// Forks `count` processes that call `work(number, report)`; returns operations in all and the longest wait.
fn processes(count: usize, work: impl Fn(usize, &Report)) -> (u64, Duration) {
    let reports = shared_reports(count);
    let children: Vec<i32> = (0..count)
        .map(|number| {
            // SAFETY: this program has one thread here.
            let child = unsafe { libc::fork() };
            assert!(child >= 0);
            if child == 0 {
                work(number, &reports[number]);
                // SAFETY: ends this child only, without its parent's exit handlers.
                unsafe { libc::_exit(0) };
            }
            child
        })
        .collect();
    for child in children {
        let mut status = 0;
        // SAFETY: a child of this process.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0, "a process has failed");
    }
    let operations = reports.iter().map(|report| report.operations.load(SeqCst)).sum();
    let longest = reports.iter().map(|report| report.longest_ns.load(SeqCst)).max().unwrap_or(0);
    (operations, Duration::from_nanos(longest))
}

/// Repeats `operation` until the time is over; reports how often, and the longest one took.
fn repeat(report: &Report, time: Duration, mut operation: impl FnMut(u64)) {
    let begin = Instant::now();
    let mut before = begin;
    let (mut count, mut longest) = (0, Duration::ZERO);
    while before - begin < time {
        operation(count);
        let now = Instant::now();
        longest = longest.max(now - before);
        before = now;
        count += 1;
    }
    report.operations.store(count, SeqCst);
    report.longest_ns.store(longest.as_nanos() as u64, SeqCst);
}

fn durable(dir: &Path, count: usize, time: Duration) -> f64 {
    let path = dir.join("durable.ntdb");
    let _ = std::fs::remove_file(&path);
    drop(Db::create(&path).expect("a new database"));
    let (operations, longest) = processes(count, |number, report| {
        let db = Db::open(&path).expect("open").with_durability(Durability::Durable);
        repeat(report, time, |i| {
            let key = (((number as u64) << 32) | (i % 1000)).to_le_bytes();
            db.put(&key, &i.to_le_bytes()).expect("put");
        });
    });
    let rate = operations as f64 / time.as_secs_f64();
    println!("durable puts, {count:2} processes: {rate:9.0}/s, longest {longest:.1?}");
    rate
}

fn naive(dir: &Path, time: Duration) -> f64 {
    let (operations, longest) = processes(1, |_, report| {
        let mut file = File::create(dir.join("naive")).expect("a new file");
        file.write_all(&[0; 1 << 20]).and_then(|()| file.sync_all()).expect("room");
        std::io::Seek::rewind(&mut file).expect("rewind");
        repeat(report, time, |_| {
            file.write_all(&[7; 20]).and_then(|()| file.sync_data()).expect("write and sync");
        });
    });
    let rate = operations as f64 / time.as_secs_f64();
    println!("one fdatasync per put, 1 process: {rate:6.0}/s, longest {longest:.1?}");
    rate
}

/// How long one word takes from one processor to the other and to be seen there: half a round trip. A virtual machine's
/// processors may lie together at one time and far apart at another, which decides what sharing costs.
fn line_moves_in() -> Duration {
    const ROUNDS: u64 = 200_000;
    let reports = shared_reports(1);
    let word = &reports[0].longest_ns;
    let start = Instant::now();
    processes(2, |number, _| {
        for round in 0..ROUNDS {
            let (mine, next) = (2 * round + number as u64, 2 * round + number as u64 + 1);
            while word.load(Acquire) != mine {
                std::hint::spin_loop();
            }
            word.store(next, Release);
        }
    });
    start.elapsed() / (2 * ROUNDS) as u32
}

fn relaxed(dir: &Path, count: usize, time: Duration) -> f64 {
    let path = dir.join("relaxed.ntdb");
    let _ = std::fs::remove_file(&path);
    let db = Db::create(&path).expect("a new database");
    for i in 0..100_000u32 {
        db.put(&i.to_le_bytes(), &i.to_le_bytes()).expect("put");
    }
    db.close().expect("close");
    let (operations, longest) = processes(count, |number, report| {
        let db = Db::open(&path).expect("open");
        let mut state = number as u32 * 7919 + 1;
        repeat(report, time, |i| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            let key = (state >> 8) % 100_000;
            db.put(&key.to_le_bytes(), &(i as u32).to_le_bytes()).expect("put");
        });
    });
    let rate = operations as f64 / time.as_secs_f64();
    println!("relaxed puts, {count:2} processes: {rate:10.0}/s, longest {longest:.1?}");
    rate
}

fn readers(dir: &Path, writers: usize, time: Duration) -> f64 {
    let path = dir.join("relaxed.ntdb");
    let reports = shared_reports(1);
    processes(1 + writers, |number, report| {
        let db = Db::open(&path).expect("open");
        let mut state = number as u32 + 1;
        let mut buffer = [0; 8];
        let target = if number == 0 { &reports[0] } else { report };
        repeat(target, time, |i| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            let key = ((state >> 8) % 100_000).to_le_bytes();
            if number == 0 {
                db.get_into(&key, &mut buffer).expect("get").expect("present");
            } else {
                db.put(&key, &(i as u32).to_le_bytes()).expect("put");
            }
        });
    });
    reports[0].operations.load(SeqCst) as f64 / time.as_secs_f64()
}

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let seconds = arguments.first().and_then(|text| text.parse().ok()).unwrap_or(3.0);
    let time = Duration::from_secs_f64(seconds);
    let parent = arguments.get(1).map_or("/tmp", String::as_str);
    let dir = tempfile::tempdir_in(parent).expect("a directory");
    println!(
        "{seconds} s each, in {parent}, on {} processors",
        std::thread::available_parallelism().map_or(0, usize::from)
    );
    let one_sync_each = naive(dir.path(), time);
    for count in [1, 2, 4, 16] {
        let rate = durable(dir.path(), count, time);
        println!("    {:.1} times one fdatasync per put", rate / one_sync_each);
    }
    for count in [2, 4, 8, 16] {
        // One alone anew each time: what else the machine does changes from minute to minute.
        let alone = relaxed(dir.path(), 1, time);
        let rate = relaxed(dir.path(), count, time);
        println!(
            "    {:.2} of one alone; a cache line moves in {:.0?}",
            rate / alone,
            line_moves_in()
        );
    }
    let undisturbed = readers(dir.path(), 0, time);
    let beside = readers(dir.path(), 1, time);
    println!(
        "gets of one reader: {undisturbed:.0}/s alone, {beside:.0}/s beside a writer ({:.2})",
        beside / undisturbed
    );
}
