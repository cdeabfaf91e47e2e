//! A full disk is an error of the operation that met it, never a signal and never damage: the
//! operation changed nothing, reads go on, and so do writes once there is room. Likewise for each
//! single system call that fails. Needs root (small file systems are mounted).

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use ntdb::{Db, Error, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::crash;
use ntdb_testkit::lab::{self, Lab, PATIENCE, reported};
use ntdb_testkit::mount::SmallDisk;
use ntdb_testkit::worker::simple;

const SCRIPT_SEEDS: [u64; 2] = [21, 22];

fn sizes(dir: &Path) -> Vec<(String, u64)> {
    let mut sizes: Vec<_> = std::fs::read_dir(dir)
        .expect("list")
        .flatten()
        .map(|entry| {
            let len = entry.metadata().expect("metadata").len();
            (entry.file_name().to_string_lossy().into_owned(), len)
        })
        .collect();
    sizes.sort();
    sizes
}

#[test]
fn put_reports_full_and_goes_on_once_there_is_room() {
    for value in [0, 40, 500, 3_000, 100_000] {
        let disk = SmallDisk::new(8 << 10);
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let path = disk.path().join("test.ntdb");
        let mut process = lab
            .worker_on("fill", &path)
            .arg("create", true)
            .arg("value", value)
            .arg("after", 100)
            .spawn();
        let line = process.line();
        assert!(line.ends_with("until full"), "value {value}: {line}");
        let stored = reported(&line, "stored");
        assert!(stored > 5, "value {value}: only {stored} fitted");
        {
            let beside = Db::open(&path).expect("open on the full disk beside another");
            assert_eq!(beside.len().expect("len"), stored);
            beside.get(&simple::fill_key(0)).expect("get").expect("present");
        }
        disk.resize(64 << 10);
        let stdin = process.child().stdin.as_mut().expect("a pipe");
        stdin.write_all(b"go on\n").expect("tell the worker");
        process.succeed(PATIENCE);
        let db = Db::open(&path).expect("open");
        simple::demand_filled(&db, stored + 100, value).expect("all records");
    }
}

#[test]
fn a_thousand_failing_puts_do_not_make_the_files_longer() {
    let disk = SmallDisk::new(8 << 10);
    let db = Db::create(disk.path().join("test.ntdb")).expect("create");
    let mut stored = 0;
    while db.put(&simple::fill_key(stored), &simple::fill_value(stored, 2_000)).is_ok() {
        stored += 1;
    }
    let before = sizes(disk.path());
    for n in 0..1_000u64 {
        match db.put(&simple::fill_key(stored + n), &simple::fill_value(n, 2_000)) {
            // Small rooms may be found; the big picture must not change.
            Ok(()) => assert!(db.delete(&simple::fill_key(stored + n)).expect("delete")),
            Err(Error::Full { .. }) => {}
            Err(e) => panic!("{e}"),
        }
    }
    let after = sizes(disk.path());
    for ((name, old), (_, new)) in before.iter().zip(&after) {
        assert!(new <= &(old + (64 << 10)), "{name} grew from {old} to {new}");
    }
    simple::demand_filled(&db, stored, 2_000).expect("all records");
}

#[test]
fn deleting_on_a_full_disk_makes_room() {
    let disk = SmallDisk::new(8 << 10);
    let path = disk.path().join("test.ntdb");
    let db = Options::new().create(true).checkpoint_log_bytes(1 << 20).open(&path).expect("create");
    let mut stored = 0u64;
    while db.put(&simple::fill_key(stored), &simple::fill_value(stored, 1_000)).is_ok() {
        stored += 1;
    }
    // A log may have no room either until a checkpoint frees it: that is what `close` does.
    let mut deleted = 0;
    for n in 0..stored / 2 {
        match db.delete(&simple::fill_key(n)) {
            Ok(true) => deleted += 1,
            Ok(false) => panic!("record {n} is not there"),
            Err(Error::Full { .. }) => break,
            Err(e) => panic!("{e}"),
        }
    }
    // What the log had no room for is still in the shared memory, and stays there.
    let closed = db.close();
    println!("{deleted} deleted, then {closed:?}");
    let db = match Db::open(&path) {
        Ok(db) => db,
        Err(Error::Full { .. }) => {
            disk.resize(12 << 10);
            Db::open(&path).expect("open once there is a little room")
        }
        Err(e) => panic!("{e}"),
    };
    lab::demand_clean(&db, "after the deletes");
    assert_eq!(db.len().expect("len"), stored - deleted);
    for n in deleted..stored / 2 {
        assert!(db.delete(&simple::fill_key(n)).expect("delete after a reopen"));
    }
    db.checkpoint().expect("checkpoint");
    for n in 0..stored / 4 {
        db.put(&simple::fill_key(n), &simple::fill_value(n, 1_000)).expect("put into freed room");
    }
    lab::demand_clean(&db, "at the end");
}

#[test]
fn creating_on_a_full_disk_reports_full_and_leaves_nothing_in_the_way() {
    let disk = SmallDisk::new(64);
    let ballast = disk.path().join("ballast");
    let _ = std::fs::write(&ballast, vec![1; 64 << 10]);
    let path = disk.path().join("test.ntdb");
    match Db::create(&path) {
        Err(Error::Full { .. }) => {}
        other => panic!("{other:?}"),
    }
    std::fs::remove_file(&ballast).expect("make room");
    disk.resize(8 << 10);
    let db = Db::create(&path).expect("create once there is room");
    db.put(b"key", b"value").expect("put");
    lab::demand_clean(&db, "at the end");
}

/// Follows a script once for every call that can fail, with that call failing once.
fn every_call_fails_once(errno: &str, wanted: impl Fn(&str) -> bool + Sync) -> (usize, u64) {
    let mut cases = Vec::new();
    for seed in SCRIPT_SEEDS {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        Board::create(&lab.board(), 1, 1).expect("board");
        let hits = lab.dir().join("hits");
        lab.worker("faulty")
            .path("board", &lab.board())
            .path("hits", &hits)
            .arg("seed", seed)
            .arg("checkpoint", 65_536)
            .run();
        for (name, calls) in crash::read_hits(&hits) {
            if wanted(&name) {
                // Every call if they are few, else a spread of them.
                let step = calls.div_ceil(12).max(1);
                cases.extend(
                    (1..=calls).step_by(step as usize).map(|nth| (seed, name.clone(), nth)),
                );
            }
        }
    }
    assert!(!cases.is_empty(), "no call can fail with {errno}");
    let failures = AtomicUsize::new(0);
    lab::for_all(&cases, |(seed, name, nth)| {
        failures.fetch_add(fail_one(*seed, name, *nth, errno), Ordering::Relaxed);
    });
    (cases.len(), failures.into_inner() as u64)
}

fn fail_one(seed: u64, name: &str, nth: u64, errno: &str) -> usize {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    Board::create(&lab.board(), 1, 1).expect("board");
    let fault = format!("{name}:{errno}:{nth}");
    let worker = |role| {
        lab.worker(role).path("board", &lab.board()).arg("seed", seed).arg("checkpoint", 65_536)
    };
    let report = worker("faulty").env("NTDB_FAULT", &fault).run();
    // Whoever opens next finds what was promised, and a database that works. After a failed sync
    // that is what a power cut would leave, at the least.
    let ended = worker("script-verify").arg("after_power_cut", true).spawn().end(PATIENCE);
    assert!(ended.status.success(), "{fault}, seed {seed}: {report}\n{}", ended.stderr);
    usize::from(reported(&report, "failures") > 0)
}

#[test]
fn every_allocation_that_fails_is_an_error_that_changed_nothing() {
    let (cases, failures) = every_call_fails_once("ENOSPC", |name| {
        !name.starts_with("fdatasync") && !name.starts_with("fsync") && !name.starts_with("read")
    });
    println!("{cases} failing calls, {failures} of them reached the caller");
    assert!(failures > 0, "no failure reached the caller");
}

#[test]
fn every_sync_that_fails_poisons_and_the_promised_survives() {
    let (cases, failures) = every_call_fails_once("EIO", |name| {
        name.starts_with("fdatasync") || name.starts_with("fsync")
    });
    println!("{cases} failing syncs, {failures} of them reached the caller");
    assert!(failures > 0, "no failed sync reached the caller");
}

#[test]
fn after_a_failed_sync_every_handle_refuses_to_promise() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    db.put(b"before", b"promised").expect("put");
    db.sync().expect("sync");
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let ended = lab
        .worker("durable")
        .path("board", &lab.board())
        .arg("n", 50)
        .env("NTDB_FAULT", "fdatasync:log:EIO:3")
        .spawn()
        .end(PATIENCE);
    assert!(!ended.status.success(), "a failed sync went unreported");
    let promised = board.mark(0).load(Ordering::SeqCst);
    match db.sync() {
        Err(Error::Poisoned { .. }) => {}
        other => panic!("after another process's sync failed: {other:?}"),
    }
    assert_eq!(db.get(b"before").expect("reads go on"), Some(b"promised".to_vec()));
    assert!(matches!(db.checkpoint(), Err(Error::Poisoned { .. })));
    drop(db);
    let db = Db::open(lab.database()).expect("open anew");
    db.sync().expect("sync after the reopen");
    assert_eq!(db.get(b"before").expect("get"), Some(b"promised".to_vec()));
    for n in 0..promised {
        let key = format!("durable-0-{n}");
        assert!(db.contains(key.as_bytes()).expect("contains"), "{key} was promised");
    }
    lab::demand_clean(&db, "after the reopen");
}

/// A transaction that is longer than a log record is logged in parts, and there may be no room for one of them.
#[test]
fn a_transaction_whose_log_has_no_room_goes_on_once_there_is_some() {
    for pad in [1, 70_000, 140_000] {
        fill_the_log_in_a_transaction(pad);
    }
}

fn fill_the_log_in_a_transaction(pad: usize) {
    let disk = SmallDisk::new(24 << 10);
    let db = Db::create(disk.path().join("test.ntdb")).expect("create");
    // Room in the data file, so that it is the log which has none.
    db.put(b"long", &vec![1; 6 << 20]).expect("put");
    db.checkpoint().expect("checkpoint");
    db.delete(b"long").expect("delete");
    db.checkpoint().expect("checkpoint");
    db.checkpoint().expect("checkpoint");
    let ballast = disk.path().join("ballast");
    let mut file = std::fs::File::create(&ballast).expect("ballast");
    while file.write_all(&[1; 4096]).is_ok() {}
    drop(file);

    let position = db.position().expect("position");
    let mut tx = db.begin().expect("begin");
    tx.put(b"pad", &vec![1; pad]).expect("put");
    let start = tx.savepoint().expect("savepoint");
    let mut model = BTreeMap::from([(b"pad".to_vec(), vec![1; pad])]);
    let mut failures = 0;
    for n in 0..20_000u64 {
        let (key, value) = (simple::fill_key(n % 300), simple::fill_value(n, 3_000));
        match tx.append(&key, &value) {
            Ok(_) => assert!(model.insert(key, value).is_none()),
            Err(Error::Full { .. }) => {
                assert_eq!(tx.get(&key).expect("get"), None, "pad {pad}, {n}: it has failed");
                assert!(!tx.delete(b"absent").is_ok_and(|was_there| was_there));
                failures += 1;
                if failures == 5 {
                    break;
                }
            }
            Err(e) => panic!("pad {pad}, {n}: {e}"),
        }
        if n % 300 == 299 && failures == 0 {
            assert!(tx.rollback_to(start).expect("roll back"));
            model.retain(|key, _| key == b"pad");
        }
    }
    assert_eq!(failures, 5, "pad {pad}: there was room for everything");
    assert!(tx.prepare().is_err(), "pad {pad}: there is no room");
    std::fs::remove_file(&ballast).expect("make room");
    for n in 0..100 {
        let (key, value) = (simple::fill_key(1_000 + n), simple::fill_value(n, 3_000));
        tx.put(&key, &value).expect("put once there is room");
        model.insert(key, value);
    }
    assert_eq!(tx.len(), model.len() as u64);
    tx.commit().expect("commit");
    demand_model(&db, &model);
    lab::demand_clean(&db, "after the commit");

    // What is in the log says the same.
    let replayed = Db::in_memory().expect("create in memory");
    let mut changes = db.changes(position).expect("changes");
    while let Some(change) = changes.next().unwrap_or_else(|e| panic!("pad {pad}: {e}")) {
        let mut tx = replayed.begin().expect("begin");
        change.operations.iter().for_each(|operation| operation.apply(&mut tx).expect("apply"));
        tx.commit().expect("commit");
    }
    demand_model(&replayed, &model);
}

fn demand_model(db: &Db, model: &BTreeMap<Vec<u8>, Vec<u8>>) {
    assert_eq!(db.len().expect("len"), model.len() as u64);
    for (key, value) in model {
        let stored = db.get(key).expect("get");
        assert!(stored.as_ref() == Some(value), "{:?}", String::from_utf8_lossy(key));
    }
}
