//! What users of such databases report about sharing one file: groups A (more than one process)
//! and O (waiting and fairness). Each test is named after the symptom that must not appear.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ntdb::{Db, Error, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::lab::{self, Lab, PATIENCE, reported};
use ntdb_testkit::rng::mix;
use ntdb_testkit::worker::crowd::{self, permanent_key, permanent_value};

fn lab_with_permanent_keys(n: u64) -> (Lab, Board, Db) {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = Db::create(lab.database()).expect("create");
    for i in 0..n {
        db.put(&permanent_key(i), &permanent_value(i, 1, 30)).expect("put");
    }
    (lab, board, db)
}

#[test]
fn database_already_open_cannot_acquire_lock() {
    // A process writes all the time; others open it read-only, read, and see only whole values,
    // never an older one after a newer.
    let seed = lab::seed();
    let (lab, board, db) = lab_with_permanent_keys(100);
    let writer = lab
        .worker("churn")
        .path("board", &lab.board())
        .arg("permanent", 100)
        .arg("seed", seed)
        .spawn();
    let readers: Vec<_> = (0..4)
        .map(|n| {
            lab.worker("reader")
                .path("board", &lab.board())
                .arg("read_only", n % 2 == 0)
                .arg("seed", mix(seed + n))
                .spawn()
        })
        .collect();
    let seconds = lab::number("NTDB_TEST_SECONDS", 20).div_ceil(5);
    std::thread::sleep(Duration::from_secs(seconds));
    board.stop();
    writer.succeed(PATIENCE);
    for reader in readers {
        let report = reader.succeed(PATIENCE);
        assert!(reported(&report, "reads") > 1_000, "{report}");
    }
    lab::demand_clean(&db, "at the end");
}

#[test]
fn load_modify_save_loses_half_the_entries() {
    let n = lab::number("NTDB_TEST_SECONDS", 20) * 1_000;
    for (processes, keys, pairs) in [(2, 1, false), (4, 50, false), (3, 10, true)] {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let db = Db::create(lab.database()).expect("create");
        let workers: Vec<_> = (0..processes)
            .map(|w| {
                lab.worker("counter")
                    .arg("n", n)
                    .arg("keys", keys)
                    .arg("pairs", pairs)
                    .arg("seed", w)
                    .spawn()
            })
            .collect();
        for worker in workers {
            worker.succeed(Duration::from_secs(300));
        }
        let expected = n * processes * if pairs { 2 } else { 1 };
        assert_eq!(crowd::sum(&db, keys), Ok(expected), "{processes} processes, {keys} keys");
        lab::demand_clean(&db, "at the end");
    }
}

#[test]
fn one_kind_of_open_handle_makes_another_kind_hang() {
    // Every pair of ways to open, in every order, while the first stays open.
    let (lab, _board, db) = lab_with_permanent_keys(10);
    db.close().expect("close");
    type Way = (&'static str, fn(&mut Options));
    let ways: [Way; 4] = [
        ("read-write", |_| {}),
        ("create", |o| {
            o.create(true);
        }),
        ("read-only", |o| {
            o.read_only(true);
        }),
        ("durable", |o| {
            o.durability(ntdb::Durability::Durable);
        }),
    ];
    for (first_name, first) in ways {
        for (second_name, second) in ways {
            let open = |way: fn(&mut Options)| {
                let mut options = Options::new();
                way(&mut options);
                options.open(lab.database())
            };
            let start = Instant::now();
            let one = open(first).unwrap_or_else(|e| panic!("{first_name}: {e}"));
            match open(second) {
                Ok(two) => {
                    assert_eq!(two.len().expect("len"), 10);
                    if !second_name.contains("only") {
                        two.put(b"by the second", b"x").expect("put");
                        assert!(two.delete(b"by the second").expect("delete"));
                    }
                }
                Err(e) => panic!("{second_name} beside {first_name}: {e}"),
            }
            assert_eq!(one.len().expect("len"), 10);
            assert!(start.elapsed() < Duration::from_secs(5), "{first_name}, {second_name}");
        }
    }
}

#[test]
fn the_lock_error_can_only_be_told_by_its_text() {
    let (_lab, _board, db) = lab_with_permanent_keys(1);
    let guard = db.lock(b"key").expect("lock");
    let other = db.with_lock_timeout(Some(Duration::from_millis(30)));
    let error = std::thread::scope(|scope| {
        scope.spawn(|| other.lock(b"key").map(drop)).join().expect("no panic")
    });
    drop(guard);
    match error {
        Err(e @ Error::Locked { .. }) => assert!(e.is_transient()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn database_is_locked_in_spite_of_waiting() {
    // Sixteen writers, all the time, without a time-out: no error, and nobody starves.
    let seed = lab::seed();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    let n = lab::number("NTDB_TEST_SECONDS", 20) * 2_000;
    let writers: Vec<_> = (0..16)
        .map(|w| lab.worker("grow").arg("n", n).arg("writer", w).arg("value", 20).spawn())
        .collect();
    let mut longest = 0;
    for writer in writers {
        longest = longest.max(reported(&writer.succeed(Duration::from_secs(300)), "longest_us"));
    }
    println!("seed {seed}; 16 writers, {n} puts each, longest wait {longest} microseconds");
    assert_eq!(db.len().expect("len"), 16 * n);
    // Sixteen runnable processes on few cores wait for the processor, too.
    assert!(longest < 1_000_000, "a writer waited {longest} microseconds");
}

#[test]
fn durable_commits_queue_up_one_behind_the_other() {
    // Syncs are shared: sixteen writers together commit many times what one does. On a memory
    // file system a sync costs nothing, so this is about a disk.
    let lab = Lab::inside(
        env!("CARGO_BIN_EXE_ntdb-worker"),
        ntdb_testkit::lab::TempDir::inside(&std::env::temp_dir()),
    );
    let commits = |writers: usize| {
        let _ = std::fs::remove_file(lab.database());
        let db = Db::create(lab.database()).expect("create");
        let board = Board::create(&lab.board(), 1, 1).expect("board");
        let processes: Vec<_> = (0..writers)
            .map(|w| lab.worker("durable").path("board", &lab.board()).arg("writer", w).spawn())
            .collect();
        std::thread::sleep(Duration::from_secs(2));
        board.stop();
        for process in processes {
            process.succeed(PATIENCE);
        }
        db.close().expect("close");
        board.mark(0).load(Ordering::SeqCst)
    };
    let (one, sixteen) = (commits(1), commits(16));
    println!("durable commits in 2 s: {one} by one process, {sixteen} by sixteen");
    assert!(sixteen > one * 2, "sixteen processes commit {sixteen}, one {one}");
}
