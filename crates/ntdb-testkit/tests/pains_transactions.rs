//! Public complaints about transactions of databases of this kind, each as a test that would show
//! the same symptom, and what a transaction's owner that hangs, dies or runs out of room does to
//! others.

use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ntdb::{Db, Error, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::lab::{self, Lab, PATIENCE, Process, TempDir, Wait, reported};
use ntdb_testkit::mount::SmallDisk;

fn lab() -> Lab {
    Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"))
}

/// Starts `count` workers of `role`, numbered from `first`.
fn crowd(lab: &Lab, role: &str, first: u64, count: u64, ms: u64) -> Vec<Process> {
    let spawn = |n| lab.worker(role).arg("writer", n).arg("ms", ms).spawn();
    let mut processes: Vec<Process> = (first..first + count).map(spawn).collect();
    processes.iter_mut().for_each(|process| assert_eq!(process.line(), "open"));
    processes
}

/// Lets them all begin, and returns what they did altogether, and the longest wait.
fn run(processes: Vec<Vec<Process>>) -> Vec<(u64, Duration)> {
    let mut processes = processes;
    for process in processes.iter_mut().flatten() {
        let stdin = process.child().stdin.as_mut().expect("a pipe");
        stdin.write_all(b"go\n").expect("tell the worker");
    }
    let sum = |group: Vec<Process>| {
        let reports = group.into_iter().map(|process| process.succeed(PATIENCE * 2));
        reports.fold((0, Duration::ZERO), |(done, longest), report| {
            let waited = Duration::from_micros(reported(&report, "longest_us"));
            (done + reported(&report, "done"), longest.max(waited))
        })
    };
    processes.into_iter().map(sum).collect()
}

#[test]
fn several_processes_must_wrap_it_in_a_server() {
    // N processes, each with keys of its own, in transactions. What others do on the machine meanwhile changes a rate by a third, so
    // one good round of three tells what the engine can do.
    let mut all = Vec::new();
    for _ in 0..3 {
        let rates = [1, 2, 4, 8, 16].map(transactions_of);
        // One alone never sleeps; from two on it must not get worse.
        let (two, sixteen) = (rates[1], rates[4]);
        all.push(rates);
        if sixteen * 3 > two * 2 {
            return;
        }
    }
    panic!("{all:?} transactions by 1, 2, 4, 8, 16 processes");
}

/// How many transactions so many processes make.
fn transactions_of(count: u64) -> u64 {
    let ms = lab::number("NTDB_TEST_SECONDS", 20).min(20) * 100;
    let lab = lab();
    let db = Db::create(lab.database()).expect("create");
    let (done, longest) = run(vec![crowd(&lab, "transact", 0, count, ms)])[0];
    println!("{count} processes: {done} transactions in {ms} ms, longest wait {longest:?}");
    lab::demand_clean(&db, "after the crowd");
    done
}

#[test]
fn database_is_locked_in_spite_of_waiting_for_transactions() {
    // Sixteen writers of transactions, without a time-out: no error, and nobody starves.
    let ms = lab::number("NTDB_TEST_SECONDS", 20) * 250;
    let lab = lab();
    let _db = Db::create(lab.database()).expect("create");
    let (done, longest) = run(vec![crowd(&lab, "transact", 0, 16, ms)])[0];
    println!("16 writers, {done} transactions, longest wait {longest:?}");
    assert!(longest < Duration::from_secs(1), "a transaction waited {longest:?}");
}

#[test]
fn single_writers_and_transactions_starve_each_other() {
    let ms = lab::number("NTDB_TEST_SECONDS", 20) * 250;
    for (transactions, singles) in [(1, 3), (3, 1)] {
        let lab = lab();
        let _db = Db::create(lab.database()).expect("create");
        let groups = vec![
            crowd(&lab, "transact", 0, transactions, ms),
            crowd(&lab, "single", 10, singles, ms),
        ];
        let done = run(groups);
        println!("{transactions} in transactions and {singles} not: {done:?}");
        for (done, longest) in done {
            assert!(longest < Duration::from_millis(500), "somebody waited {longest:?}");
            assert!(done > ms, "somebody hardly came to the turn: {done}");
        }
    }
}

/// A process that holds a transaction open.
fn holder(lab: &Lab, prepare: bool) -> Process {
    let mut holder = lab.worker("hold-transaction").arg("prepare", prepare).spawn();
    assert_eq!(holder.line(), "held");
    holder
}

#[test]
fn a_hung_owner_of_a_transaction_stops_everybody() {
    let lab = lab();
    let db = Db::create(lab.database()).expect("create");
    db.put(&7u32.to_le_bytes(), b"before").expect("put");
    let mut owner = holder(&lab, false);
    owner.signal(libc::SIGSTOP);
    for _ in 0..200 {
        let read = Wait::begin();
        assert_eq!(db.get(&7u32.to_le_bytes()).expect("get").as_deref(), Some(&b"before"[..]));
        assert_eq!(db.len().expect("len"), 1);
        assert!(read.elapsed() < Duration::from_millis(200), "a reader waited");
    }
    db.checkpoint().expect("a checkpoint does not wait");
    lab::demand_clean(&db, "beside an open transaction");
    assert!(db.try_begin().expect("try_begin").is_none());
    let timed = db.with_lock_timeout(Some(Duration::from_millis(100)));
    let named = |what: &str, result: Result<(), Error>| match result {
        Err(Error::Locked { owner: named, .. }) => assert_eq!(named, owner.id(), "{what}"),
        other => panic!("{what}: {other:?}"),
    };
    let begin = Instant::now();
    named("begin", timed.begin().map(drop));
    named("put", timed.put(b"x", b"y"));
    named("delete", timed.delete(b"x").map(drop));
    named("lock", timed.lock(b"x").map(drop));
    named("clear", timed.clear());
    named("a large put", timed.put(b"x", &[1; 1 << 20]));
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    owner.signal(libc::SIGCONT);
    let stdin = owner.child().stdin.as_mut().expect("a pipe");
    stdin.write_all(b"go on\n").expect("tell the worker");
    owner.succeed(PATIENCE);
    assert_eq!(db.len().expect("len"), 1_000);
    db.put(b"x", b"y").expect("put after the commit");
}

#[test]
fn a_dead_owner_of_a_transaction_stops_everybody() {
    for (how, prepare) in [("put", false), ("put", true), ("begin", false), ("lock", true)] {
        let lab = lab();
        let db = Db::create(lab.database()).expect("create");
        db.put(b"before", b"it").expect("put");
        let mut owner = holder(&lab, prepare);
        let waiting = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                match how {
                    "put" => db.put(b"after", b"it").expect("put"),
                    "lock" => drop(db.lock(b"after").expect("lock")),
                    _ => db.begin().expect("begin").abort().expect("abort"),
                }
                Instant::now()
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished(), "{how} did not wait for the transaction");
            owner.kill();
            let killed = Instant::now();
            waiting.join().expect("no panic").saturating_duration_since(killed)
        });
        assert!(waiting < Duration::from_secs(1), "{how} waited {waiting:?} for a dead owner");
        assert!(!db.contains(&7u32.to_le_bytes()).expect("contains"), "half a transaction");
        lab::demand_clean(&db, "after the owner's death");
    }
}

#[test]
fn how_may_a_forked_child_reopen() {
    let lab = lab();
    lab.worker("fork").arg("create", true).arg("scene", "in a transaction").run();
    let db = Db::open(lab.database()).expect("open");
    lab::demand_clean(&db, "after the fork");
}

#[test]
fn a_failed_sync_is_told_to_one_of_those_who_wait() {
    for nth in [1, 2, 5, 40] {
        let lab = lab();
        let board = Board::create(&lab.board(), 1, 1).expect("board");
        let db = Db::create(lab.database()).expect("create");
        db.put(b"before", b"promised").expect("put");
        db.sync().expect("sync");
        let report = lab
            .worker("commit-until-told")
            .path("board", &lab.board())
            .arg("threads", 8)
            .env("NTDB_FAULT", format!("fdatasync:log:EIO:{nth}"))
            .run();
        assert_eq!(reported(&report, "told"), 8);
        match db.transaction(|tx| tx.put(b"x", b"y")) {
            Err(Error::Poisoned { .. } | Error::NotDurable { .. }) => {}
            other => panic!("after another process's sync failed: {other:?}"),
        }
        assert_eq!(db.get(b"before").expect("reads go on").as_deref(), Some(&b"promised"[..]));
        drop(db);
        let db = Db::open(lab.database()).expect("open anew");
        for thread in 0..8 {
            let get = |what: &str| {
                let value = db.get(format!("{what}-{thread}").as_bytes()).expect("get");
                value.map_or(0, |v| u64::from_le_bytes(v.try_into().expect("8 bytes")))
            };
            let (a, b) = (get("a"), get("b"));
            let promised = board.mark(thread).load(Ordering::SeqCst);
            assert!(a == b && a >= promised, "{a} and {b}, promised {promised}");
        }
        lab::demand_clean(&db, "after the reopen");
    }
}

#[test]
fn one_process_waits_for_others_to_share_its_sync() {
    // About a disk: a sync costs nothing on a memory file system.
    let lab =
        Lab::inside(env!("CARGO_BIN_EXE_ntdb-worker"), TempDir::inside(&std::env::temp_dir()));
    let _db = Db::create(lab.database()).expect("create");
    let _board = Board::create(&lab.board(), 1, 1).expect("board");
    let time = |transactions: bool| {
        let begin = Instant::now();
        lab.worker("durable")
            .path("board", &lab.board())
            .arg("n", 300)
            .arg("transactions", transactions)
            .run();
        begin.elapsed()
    };
    let rounds: Vec<_> = (0..5).map(|_| (time(false), time(true))).collect();
    let puts = rounds.iter().map(|round| round.0).min().expect("rounds");
    let transactions = rounds.iter().map(|round| round.1).min().expect("rounds");
    println!("300 durable puts {puts:?}, 300 durable transactions {transactions:?}");
    assert!(transactions < puts * 3 / 2, "{transactions:?} instead of {puts:?}");
}

#[test]
fn a_transaction_must_fit_into_memory() {
    let lab = lab();
    let db = Db::create(lab.database()).expect("create");
    db.put(b"before", b"it").expect("put");
    let mib = lab::number("NTDB_TEST_TRANSACTION_MIB", 300);
    let report =
        lab.worker("big-transaction").arg("mib", mib).spawn().succeed(Duration::from_secs(1800));
    let own = reported(&report, "own_kib");
    println!("{mib} MiB in one transaction, {own} KiB of memory");
    assert!(own < 100 << 10, "{own} KiB of memory");
    assert_eq!(db.len().expect("len"), reported(&report, "records") + 1);
    lab::demand_clean(&db, "after the transaction");
}

/// A key of many.
fn many(n: u32) -> Vec<u8> {
    format!("many-{n}").into_bytes()
}

#[test]
fn a_transaction_on_a_full_disk_leaves_pages_behind() {
    for value in [40, 900, 20_000, 400_000] {
        let disk = SmallDisk::new(16 << 10);
        let path = disk.path().join("test.ntdb");
        let options = Options::new().create(true).checkpoint_log_bytes(1 << 20).clone();
        let db = options.open(&path).expect("create");
        for n in 0..200u32 {
            db.put(&n.to_le_bytes(), &[1; 100]).expect("put");
        }
        let mut fitted = Vec::new();
        for round in 0..4 {
            let mut tx = db.begin().expect("begin");
            let mut n = 0u32;
            let full = loop {
                match tx.put(&many(n), &vec![round; value]) {
                    Ok(()) => n += 1,
                    Err(error) => break error,
                }
                assert!(n < 1_000_000, "the disk does not fill");
            };
            assert!(matches!(full, Error::Full { .. }), "value {value}: {full:?}");
            assert_eq!(db.get(&7u32.to_le_bytes()).expect("get").as_deref(), Some(&[1; 100][..]));
            // What has fitted is still there; the transaction can go on, or not.
            for i in 0..n {
                let held = tx.view(&many(i), |held| held == vec![round; value]);
                assert_eq!(held.expect("view"), Some(true), "value {value}, record {i} of {n}");
            }
            match round {
                1 => drop(tx),
                _ => tx.abort().expect("abort"),
            }
            lab::demand_clean(&db, &format!("value {value}, after round {round}"));
            assert_eq!(db.len().expect("len"), 200);
            fitted.push(n);
        }
        println!("value {value}: {fitted:?} fitted");
        // The log has less room each time, until a checkpoint can be written; the pages are there.
        let again = if value < 100_000 { fitted[0] / 10 } else { 0 };
        assert!(fitted[0] >= 1 && fitted[1] >= again, "value {value}: {fitted:?}");
        let length = || std::fs::metadata(&path).expect("metadata").len();
        let full = length();
        // The pages are there again: with some room for the log, what had fitted fits into them.
        disk.resize(64 << 10);
        db.checkpoint().expect("checkpoint");
        let tx =
            db.transaction(|tx| (0..fitted[0]).try_for_each(|n| tx.put(&many(n), &vec![9; value])));
        tx.unwrap_or_else(|e| panic!("value {value}, once there is room: {e}"));
        assert_eq!(db.len().expect("len"), 200 + u64::from(fitted[0]));
        assert!(length() <= full + (2 << 20), "value {value}: {full} bytes grew to {}", length());
        lab::demand_clean(&db, "at the end");
    }
}

#[test]
fn a_prepared_transaction_fails_for_want_of_room() {
    for n in [1u64, 2, 30, 1_000, 20_000] {
        for (value, before) in [(10, 0u64), (100, 3_000), (900, 41_000)] {
            for durable in [false, true] {
                let lab = lab();
                let report = lab
                    .worker("prepared")
                    .arg("create", true)
                    .arg("n", n)
                    .arg("value", value)
                    .arg("before", before)
                    .arg("durable", durable)
                    .spawn()
                    .end(PATIENCE);
                assert!(
                    report.status.success(),
                    "{n} puts of {value} bytes behind {before}, durable {durable}: {}",
                    report.stderr
                );
                let db = Db::open(lab.database()).expect("open");
                lab::demand_clean(&db, "after the commit");
            }
        }
    }
    // And a disk that others fill between the two.
    for n in [1u32, 100, 3_000] {
        let disk = SmallDisk::new(24 << 10);
        let db = Db::create(disk.path().join("test.ntdb")).expect("create");
        db.put(b"before", b"it").expect("put");
        let mut tx = db.begin().expect("begin");
        for i in 0..n {
            tx.put(&i.to_le_bytes(), &[5; 500]).expect("put");
        }
        tx.prepare().expect("prepare");
        let mut ballast = std::fs::File::create(disk.path().join("ballast")).expect("create");
        while ballast.write_all(&[1; 4096]).is_ok() {}
        tx.commit().expect("commit on a full disk");
        assert_eq!(db.len().expect("len"), u64::from(n) + 1);
        lab::demand_clean(&db, "after the commit");
    }
}
