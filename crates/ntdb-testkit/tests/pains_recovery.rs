//! What users report about damage after kills (G), slow recovery (H), moved files (N) and memory
//! (Q). Each test is named after the symptom that must not appear.

use std::io;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use ntdb::{Db, Options};
use ntdb_testkit::lab::{self, Lab, PATIENCE, TempDir, reported};
use ntdb_testkit::rng::Rng;
use ntdb_testkit::worker::simple;

#[test]
fn corruption_on_every_open_after_a_kill() {
    let mut rng = Rng::new(lab::seed());
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let rounds = lab::number("NTDB_TEST_KILLS", 200).div_ceil(4);
    let mut records = 0;
    for round in 0..rounds {
        // Also before the database exists, and during creation and recovery.
        let mut victim = lab
            .worker("grow")
            .arg("create", true)
            .arg("n", 1_000_000)
            .arg("writer", round)
            .arg("value", 30)
            .spawn();
        std::thread::sleep(Duration::from_micros(rng.below(30_000)));
        victim.kill();
        let db = Db::create(lab.database()).unwrap_or_else(|e| panic!("round {round}: {e}"));
        let now = db.len().expect("len");
        assert!(now >= records, "round {round}: {now} records, {records} before");
        records = now;
        lab::demand_clean(&db, &format!("round {round}"));
    }
    assert!(records > rounds, "the victims hardly worked: {records} records");
}

#[test]
fn opening_after_a_crash_reads_the_whole_file() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mib = lab::number("NTDB_TEST_BIG_MIB", 256);
    let n = (mib << 20) / 8_000;
    let db = Db::create(lab.database()).expect("create");
    for i in 0..n {
        db.put(&simple::fill_key(i), &vec![i as u8; 8_000]).expect("put");
    }
    db.put(b"viewed", b"x").expect("put");
    db.close().expect("close");
    let size = std::fs::metadata(lab.database()).expect("metadata").len();
    // A process dies after a few changes; the next must not look at all that did not change.
    let mut victim = lab.worker("hold-view").spawn();
    assert_eq!(victim.line(), "inside");
    lab.worker("puts").arg("n", 200).arg("keys", 200).run();
    victim.kill();
    let start = Instant::now();
    let db = Db::open(lab.database()).expect("open");
    let took = start.elapsed();
    println!("a file of {} MiB opened in {took:?} after a crash", size >> 20);
    assert!(took < Duration::from_millis(100), "{took:?}");
    assert_eq!(db.len().expect("len"), n + 201);
}

#[test]
fn silent_damage_past_4_gib() {
    // Offsets beyond 2^31 and 2^32: few large values, on a disk with room for them.
    let gib = lab::number("NTDB_TEST_PAST_GIB", 5);
    let dir = TempDir::inside(&std::env::temp_dir());
    let path = dir.path().join("test.ntdb");
    let db = Db::create(&path).expect("create");
    let large: usize = 256 << 20;
    let count = (gib << 30) / large as u64;
    let mut value = Rng::new(3).bytes(large);
    for n in 0..count {
        value[..8].copy_from_slice(&n.to_le_bytes());
        value[large - 8..].copy_from_slice(&n.to_le_bytes());
        db.put(&n.to_le_bytes(), &value).expect("put");
        for small in 0..100u32 {
            db.put(format!("small-{n}-{small}").as_bytes(), &n.to_le_bytes()).expect("put");
        }
        // Keeps the logs from doubling the room that this test takes.
        db.checkpoint().expect("checkpoint");
    }
    let bytes = db.stat().expect("stat").file_bytes;
    assert!(bytes > gib << 30, "only {bytes} bytes");
    db.close().expect("close");
    let db = Db::open(&path).expect("open");
    for n in 0..count {
        let ends = db.view(&n.to_le_bytes(), |v| {
            v.len() == large
                && v[..8] == n.to_le_bytes()
                && v[large - 8..] == n.to_le_bytes()
                && v[8..large - 8] == value[8..large - 8]
        });
        assert_eq!(ends.expect("view"), Some(true), "value {n}");
        for small in 0..100u32 {
            let held = db.get(format!("small-{n}-{small}").as_bytes()).expect("get");
            assert_eq!(held, Some(n.to_le_bytes().to_vec()));
        }
    }
    lab::demand_clean(&db, "past 4 GiB");
    println!("{} MiB", bytes >> 20);
}

#[test]
fn a_constant_tuned_for_one_page_size_fails_on_another() {
    // A file of any page size works on this host, whatever the host's own is.
    for page_size in [4096, 8192, 16384, 32768, 65536] {
        let dir = TempDir::new();
        let path = dir.path().join("test.ntdb");
        let mut options = Options::new();
        let db = options.create(true).page_size(page_size).open(&path).expect("create");
        for n in 0..5_000u64 {
            db.put(&simple::fill_key(n), &simple::fill_value(n, (n % 300) as usize)).expect("put");
        }
        db.close().expect("close");
        // Opened by somebody who expects another page size: the file's own counts.
        let db = Db::open(&path).expect("open");
        assert_eq!(db.stat().expect("stat").page_size, page_size);
        for n in 0..5_000u64 {
            let held = db.get(&simple::fill_key(n)).expect("get");
            assert_eq!(held, Some(simple::fill_value(n, (n % 300) as usize)));
        }
        lab::demand_clean(&db, &format!("pages of {page_size}"));
    }
}

#[test]
fn a_copy_of_the_file_at_rest_is_not_a_whole_database() {
    let dir = TempDir::new();
    let (path, copy) = (dir.path().join("test.ntdb"), dir.path().join("copy.ntdb"));
    let db = Db::create(&path).expect("create");
    for n in 0..1_000u64 {
        db.put(&simple::fill_key(n), &simple::fill_value(n, 50)).expect("put");
    }
    db.close().expect("close");
    std::fs::copy(&path, &copy).expect("copy");
    // Both are used at the same time: they share an identity, but no file.
    let (one, two) = (Db::open(&path).expect("open"), Db::open(&copy).expect("open the copy"));
    one.put(b"only in one", b"1").expect("put");
    two.put(b"only in two", b"2").expect("put");
    assert_eq!(one.get(b"only in two").expect("get"), None);
    assert_eq!(two.get(b"only in one").expect("get"), None);
    simple::demand_filled(&one, 1_000, 50).expect("all records");
    simple::demand_filled(&two, 1_000, 50).expect("all records");
    one.close().expect("close");
    two.close().expect("close");
    // Renamed at rest: all is there under the new name.
    let moved = dir.path().join("moved.ntdb");
    std::fs::rename(&path, &moved).expect("rename");
    let db = Db::open(&moved).expect("open under the new name");
    assert_eq!(db.get(b"only in one").expect("get"), Some(b"1".to_vec()));
    lab::demand_clean(&db, "after the rename");
}

#[test]
fn traversal_of_a_large_file_runs_out_of_memory() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mib = lab::number("NTDB_TEST_BIG_MIB", 256);
    let n = (mib << 20) / 2_000;
    let db = Db::create(lab.database()).expect("create");
    for i in 0..n {
        db.put(&simple::fill_key(i), &vec![i as u8; 2_000]).expect("put");
    }
    db.close().expect("close");
    let mut worker = lab.worker("traverse");
    let limit = libc::rlimit { rlim_cur: 64 << 20, rlim_max: 64 << 20 };
    // SAFETY: between fork and exec only one system call is made, which is async-signal-safe.
    unsafe {
        worker.command().pre_exec(move || {
            if libc::setrlimit(libc::RLIMIT_DATA, &limit) == 0 {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        });
    }
    let report = worker.spawn().succeed(PATIENCE);
    assert_eq!(reported(&report, "records"), n);
    println!("{}", report.trim());
}
