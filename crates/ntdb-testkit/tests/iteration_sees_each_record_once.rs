//! Iteration beside growth, deletes, splits and merges sees every record that is there from
//! beginning to end exactly once, and no record twice.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ntdb::{Cursor, Db, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::lab::{self, Lab, PATIENCE};
use ntdb_testkit::rng::{Rng, mix};
use ntdb_testkit::worker::crowd::{permanent_key, permanent_value};

const PERMANENT: u64 = 1_000;

fn beside_writers(options: &mut Options) {
    let seed = lab::seed();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = options.create(true).open(lab.database()).expect("create");
    for n in 0..PERMANENT {
        db.put(&permanent_key(n), &permanent_value(n, 1, n as usize % 100)).expect("put");
    }
    let seconds = lab::number("NTDB_TEST_SECONDS", 20).div_ceil(4);
    let processes: Vec<_> = (0..5)
        .map(|n| {
            lab.worker(if n < 2 { "churn" } else { "iterator" })
                .path("board", &lab.board())
                .arg("permanent", PERMANENT)
                .arg("writer", n)
                .arg("wave", if n == 0 { 20_000 } else { 500 })
                .arg("seed", mix(seed.wrapping_add(n)))
                .spawn()
        })
        .collect();
    std::thread::sleep(Duration::from_secs(seconds));
    board.stop();
    for process in processes {
        process.succeed(PATIENCE);
    }
    let passes = board.mark(0).load(Ordering::SeqCst);
    let waves = board.mark(1).load(Ordering::SeqCst);
    println!("{passes} passes beside {waves} waves");
    assert!(passes > 10 && waves > 3, "{passes} passes, {waves} waves");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn beside_growth_and_deletes_by_other_processes() {
    beside_writers(&mut Options::new());
}

#[test]
fn beside_growth_and_deletes_with_frequent_checkpoints() {
    beside_writers(Options::new().checkpoint_log_bytes(512 << 10));
}

#[test]
fn beside_growth_and_deletes_among_nearly_equal_hashes() {
    beside_writers(Options::new().hash_mask(0xFFF << 52));
}

/// Goes over a database of `n` records and lets `change` change it at each record. Demands that
/// the records that stay are seen once, and returns what was seen.
fn walk(n: u64, mut change: impl FnMut(&Db, u64, &[u8])) -> BTreeMap<Vec<u8>, u32> {
    let db = Db::in_memory().expect("in memory");
    for i in 0..n {
        db.put(format!("r{i}").as_bytes(), &i.to_le_bytes()).expect("put");
    }
    let mut seen = BTreeMap::new();
    for (step, record) in db.iter_live().enumerate() {
        let (key, _) = record.expect("iterate");
        change(&db, step as u64, &key);
        *seen.entry(key).or_default() += 1;
    }
    lab::demand_clean(&db, "after the walk");
    seen
}

#[test]
fn deleting_the_record_at_hand_skips_none() {
    let seen = walk(20_000, |db, _, key| assert!(db.delete(key).expect("delete")));
    assert_eq!(seen.len(), 20_000);
    assert!(seen.values().all(|&times| times == 1));
}

#[test]
fn deleting_every_second_record_skips_none() {
    let seen = walk(20_000, |db, step, key| {
        if step % 2 == 0 {
            assert!(db.delete(key).expect("delete"));
        }
    });
    assert_eq!(seen.len(), 20_000);
    assert!(seen.values().all(|&times| times == 1));
}

#[test]
fn inserting_and_rewriting_meanwhile_skips_none_and_repeats_none() {
    let seen = walk(5_000, |db, step, key| {
        if step < 20_000 {
            db.put(format!("new{step}").as_bytes(), &[1; 100]).expect("put");
            db.put(key, &[2; 300]).expect("rewrite");
        }
    });
    let old = seen.keys().filter(|key| key.starts_with(b"r")).count();
    assert_eq!(old, 5_000);
    assert!(seen.values().all(|&times| times == 1));
}

#[test]
fn stored_positions_resume_where_they_left_off_after_a_reopen() {
    let mut rng = Rng::new(lab::seed());
    let dir = ntdb_testkit::lab::TempDir::new();
    let path = dir.path().join("test.ntdb");
    let db = Options::new().create(true).hash_mask(0xFF << 56).open(&path).expect("create");
    for i in 0..3_000u32 {
        db.put(&i.to_le_bytes(), &[]).expect("put");
    }
    drop(db);
    let mut seen = BTreeMap::new();
    let mut position = Cursor::default().to_bytes();
    loop {
        let db = Db::open(&path).expect("open");
        let mut iter =
            db.iter_live_from(&Cursor::from_bytes(&position).expect("a stored position"));
        let mut ended = false;
        for _ in 0..rng.range(1, 400) {
            match iter.next() {
                Some(record) => *seen.entry(record.expect("iterate").0).or_insert(0) += 1,
                None => ended = true,
            }
        }
        position = iter.cursor().to_bytes();
        if ended {
            break;
        }
    }
    assert_eq!(seen.len(), 3_000);
    assert!(seen.values().all(|&times| times == 1));
    assert_eq!(Cursor::from_bytes(b"not a position"), None);
}
