//! Many handles, many short-lived threads, many short-lived processes: no error, and no slot,
//! descriptor or byte of memory leaks.

use std::time::Duration;

use ntdb::{Db, Options};
use ntdb_testkit::lab::{self, Lab, PATIENCE, Process, TempDir, reported};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("list descriptors").count()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("read status");
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).expect("VmRSS");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

/// Tests that count descriptors must not run beside others of this program.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn a_hundred_handles_by_path_symbolic_and_hard_link_are_one_database() {
    let _alone = alone();
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let (symbolic, hard) = (dir.path().join("symbolic"), dir.path().join("hard"));
    drop(Db::create(&path).expect("create"));
    std::os::unix::fs::symlink(&path, &symbolic).expect("symlink");
    std::fs::hard_link(&path, &hard).expect("hard link");
    let before = open_descriptors();
    let handles: Vec<Db> = (0..100)
        .map(|n| {
            let name = [&path, &symbolic, &hard][n % 3];
            Db::open(name).unwrap_or_else(|e| panic!("handle {n} by {}: {e}", name.display()))
        })
        .collect();
    for (n, db) in handles.iter().enumerate() {
        db.put(format!("by-{n}").as_bytes(), &[n as u8]).expect("put");
    }
    for (n, db) in handles.iter().enumerate().rev() {
        for other in [0, n, 99] {
            let held = db.get(format!("by-{other}").as_bytes()).expect("get");
            assert_eq!(held, Some(vec![other as u8]), "handle {n} reads the record of {other}");
        }
    }
    drop(handles);
    assert_eq!(open_descriptors(), before, "descriptors leak");
    for name in [&path, &symbolic, &hard] {
        assert_eq!(Db::open(name).expect("open at rest").len().expect("len"), 100);
    }
    assert_eq!(open_descriptors(), before, "descriptors leak");
}

#[test]
fn handles_by_hard_link_in_other_processes_are_the_same_database() {
    let _alone = alone();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    let hard = lab.dir().join("hard");
    std::fs::hard_link(lab.database(), &hard).expect("hard link");
    lab.worker_on("puts", &hard).arg("n", 100).arg("keys", 100).run();
    assert_eq!(db.len().expect("len"), 100);
    lab.worker("gets").arg("n", 100).arg("keys", 100).run();
    lab::demand_clean(&db, "after a visit by hard link");
}

#[test]
fn closing_one_of_two_handles_leaves_the_other_and_its_locks() {
    let _alone = alone();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let one = Db::create(lab.database()).expect("create");
    let two = Db::open(lab.database()).expect("open again");
    // Before the lock, which the key may share by chance.
    one.put(b"key", b"value").expect("put");
    let guard = two.lock(b"locked").expect("lock");
    one.close().expect("close one");
    // Any close of the file drops POSIX locks: another process must still see ours.
    drop(std::fs::File::open(lab.database()).expect("open as a plain file"));
    let ended = lab.worker("hold-lock").arg("timeout_ms", 200).spawn().end(PATIENCE);
    assert!(!ended.status.success() && ended.stderr.contains("lock"), "{ended:?}");
    drop(guard);
    lab.worker("hold-lock").arg("timeout_ms", 5_000).run();
    assert_eq!(two.get(b"key").expect("get"), Some(b"value".to_vec()));
    lab.worker("puts").arg("n", 10).run();
    assert_eq!(two.len().expect("len"), 11);
}

#[test]
fn ten_thousand_short_lived_threads_leak_nothing() {
    let _alone = alone();
    let dir = TempDir::new();
    let db = Options::new().create(true).open(dir.path().join("test.ntdb")).expect("create");
    let batch = |from: u32, to: u32| {
        for first in (from..to).step_by(50) {
            std::thread::scope(|scope| {
                for n in first..first + 50 {
                    let db = &db;
                    scope.spawn(move || {
                        db.put(&(n % 500).to_le_bytes(), &n.to_le_bytes()).expect("put");
                        assert!(db.contains(&(n % 500).to_le_bytes()).expect("contains"));
                        let _ = db.view(&(n % 500).to_le_bytes(), <[u8]>::len).expect("view");
                    });
                }
            });
        }
    };
    batch(0, 1_000);
    let (descriptors, memory) = (open_descriptors(), resident_kib());
    batch(1_000, 10_000);
    assert_eq!(open_descriptors(), descriptors, "descriptors leak");
    let grown = resident_kib().saturating_sub(memory);
    // The log's ring and the file's pages become resident as they are used: allow for those.
    assert!(grown < 8 << 10, "{grown} KiB more memory after 9,000 threads");
    assert_eq!(db.stat().expect("stat").processes.len(), 1);
    lab::demand_clean(&db, "after the threads");
}

#[test]
fn more_threads_than_places_at_once_still_read_and_write() {
    let _alone = alone();
    let dir = TempDir::new();
    let db = Options::new().create(true).open(dir.path().join("test.ntdb")).expect("create");
    db.put(b"stays", b"here").expect("put");
    let barrier = std::sync::Barrier::new(1_500);
    std::thread::scope(|scope| {
        for n in 0..1_500u32 {
            let (db, barrier) = (&db, &barrier);
            let builder = std::thread::Builder::new().stack_size(128 << 10);
            builder
                .spawn_scoped(scope, move || {
                    db.view(b"stays", |_| barrier.wait()).expect("view").expect("present");
                    db.put(&n.to_le_bytes(), b"x").expect("put");
                })
                .expect("spawn");
        }
    });
    assert_eq!(db.len().expect("len"), 1_501);
    lab::demand_clean(&db, "after the threads");
}

#[test]
fn many_processes_that_open_do_one_thing_and_end_leak_nothing() {
    let _alone = alone();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    db.put(b"stays", b"here").expect("put");
    let opens = lab::number("NTDB_TEST_OPENS", 1_000);
    let descriptors = open_descriptors();
    let mut running: Vec<Process> = Vec::new();
    let mut opened_us = Vec::new();
    for n in 0..opens {
        if running.len() == 4 {
            opened_us.push(reported(&running.remove(0).succeed(PATIENCE), "opened_us"));
        }
        let abandon = n % 3 == 0;
        running.push(lab.worker("once").arg("n", n).arg("abandon", abandon).spawn());
    }
    for process in running.drain(..) {
        opened_us.push(reported(&process.succeed(PATIENCE), "opened_us"));
    }
    opened_us.sort_unstable();
    let median = opened_us[opened_us.len() / 2];
    println!("{opens} processes; an open took {median} microseconds (median)");
    assert!(median < 1_000, "an open takes {median} microseconds while others are attached");
    let stat = db.stat().expect("stat");
    assert_eq!(stat.processes, [std::process::id()], "slots leak");
    assert_eq!(open_descriptors(), descriptors, "descriptors leak");
    let appended = db.get(b"once-appended").expect("get").map_or(0, |v| v.len() as u64);
    assert_eq!(appended, (0..opens).filter(|n| n % 5 == 3).count() as u64);
    lab::demand_clean(&db, "after the processes");
}

#[test]
fn opening_and_closing_as_the_only_user_many_times_leaves_one_file() {
    let _alone = alone();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    drop(Db::create(lab.database()).expect("create"));
    let descriptors = open_descriptors();
    for n in 0..200u32 {
        let db = Db::open(lab.database()).expect("open");
        db.put(&(n % 10).to_le_bytes(), &n.to_le_bytes()).expect("put");
    }
    assert_eq!(open_descriptors(), descriptors, "descriptors leak");
    let files: Vec<_> = std::fs::read_dir(lab.dir()).expect("list").flatten().collect();
    assert_eq!(files.len(), 1, "at rest there is one file: {files:?}");
    let len = files[0].metadata().expect("metadata").len();
    assert!(len <= 64 << 10, "ten records at rest take {len} bytes");
}

#[test]
fn processes_that_open_and_close_together_never_meet_an_error() {
    let _alone = alone();
    // Nobody stays: first opens, recoveries of the abandoned, and last closes race.
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    Db::create(lab.database()).expect("create").put(b"stays", b"here").expect("put");
    let opens = lab::number("NTDB_TEST_OPENS", 1_000).div_ceil(3);
    let mut running: Vec<Process> = Vec::new();
    for n in 0..opens {
        if running.len() == 4 {
            running.remove(0).succeed(Duration::from_secs(20));
        }
        running.push(lab.worker("once").arg("n", n).arg("abandon", n % 7 == 0).spawn());
    }
    for process in running.drain(..) {
        process.succeed(Duration::from_secs(20));
    }
    let db = Db::open(lab.database()).expect("open");
    let appended = db.get(b"once-appended").expect("get").map_or(0, |v| v.len() as u64);
    assert_eq!(appended, (0..opens).filter(|n| n % 5 == 3).count() as u64, "a change was lost");
    lab::demand_clean(&db, "after the processes");
}
