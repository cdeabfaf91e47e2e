//! Files that were made to do harm: numbers inside pages changed and the pages sealed again with a
//! right checksum. Any answer will do, as long as it comes: no panic, signal, hang, or unbounded
//! allocation. `NTDB_TEST_ROUNDS` files; a round repeats itself with
//! `NTDB_TEST_SEED=seed NTDB_TEST_ROUNDS=1`.
//!
//! The first three tests forge pages of databases at rest. [`files_of_every_kind`] forges everything that is read, logs and
//! shared memory of crashes included, each attack in a process of its own, and [`kept_logs`] what followers read; the fuzz targets in `fuzz/` use the same
//! attacks.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ntdb::Options;
use ntdb_testkit::board::Board;
use ntdb_testkit::hostile::kept::Kept;
use ntdb_testkit::lab::{self, Lab};
use ntdb_testkit::rng::Rng;
use ntdb_testkit::worker::damaged::DAMAGE;

fn attack(mask: u64, records: u32, value_len: usize) {
    let seed = lab::seed();
    let rounds = lab::number("NTDB_TEST_ROUNDS", 1_000).div_ceil(3);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let folder = lab.dir().join("original");
    std::fs::create_dir(&folder).expect("folder");
    let mut options = Options::new();
    let db = options.create(true).hash_mask(mask).open(folder.join("test.ntdb")).expect("create");
    let mut rng = Rng::new(1);
    for n in 0..records {
        let len = if n % 50 == 0 { 5_000 } else { rng.below(value_len as u64) as usize };
        db.put(format!("key-{n}").as_bytes(), &rng.bytes(len)).expect("put");
        if n % 3 == 0 {
            db.delete(format!("key-{}", n / 2).as_bytes()).expect("delete");
        }
    }
    db.close().expect("close");
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let ended = lab
        .worker("hostile")
        .path("board", &lab.board())
        .path("original", &folder)
        .path("copy", &lab.dir().join("copy"))
        .arg("seed", seed)
        .arg("rounds", rounds)
        .spawn()
        .end(Duration::from_secs(3_600));
    let at = board.mark(DAMAGE).load(Ordering::SeqCst);
    assert!(
        ended.status.success(),
        "NTDB_TEST_SEED={at} NTDB_TEST_ROUNDS=1 repeats this: {}\n{}",
        ended.status,
        ended.stderr
    );
    println!("{rounds} hostile files: {}", ended.stdout);
    assert!(ended.stdout.contains("Corrupt"), "no damage was ever noticed");
}

#[test]
fn one_bucket() {
    attack(u64::MAX, 30, 40);
}

#[test]
fn directories_of_many_buckets() {
    attack(u64::MAX, 400, 300);
}

#[test]
fn overflow_chains_of_equal_hashes() {
    attack(0, 300, 200);
}

#[test]
fn files_of_every_kind() {
    let seed = lab::seed();
    let rounds = lab::number("NTDB_TEST_ROUNDS", 1_000);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let ended = lab
        .worker("forged")
        .path("dir", &lab.dir().join("attacked"))
        .arg("seed", seed)
        .arg("rounds", rounds)
        .spawn()
        .end(Duration::from_secs(3_600));
    assert!(
        ended.status.success(),
        "{}; NTDB_TEST_SEED=(its seed) NTDB_TEST_ROUNDS=1 repeats one:\n{}",
        ended.status,
        ended.stderr
    );
    println!("{rounds} attacks: {}", ended.stdout);
    if rounds >= 300 {
        // Both must have happened often: damage that was noticed late, and damage that was noticed at once.
        for answer in ["open=ok", "open=Corrupt", "get=Corrupt", "walk=Corrupt", "close=ok"] {
            assert!(ended.stdout.contains(answer), "no attack was answered with {answer}");
        }
    }
}

#[test]
fn kept_logs() {
    let seed = lab::seed();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let kept = Kept::new(lab.dir());
    let (mut whole, mut errors) = (0u64, 0u64);
    let mut rng = Rng::new(seed);
    for _ in 0..lab::number("NTDB_TEST_ROUNDS", 1_000).div_ceil(4) {
        match kept.attack(&Kept::random(&mut rng)) {
            Ok(()) => whole += 1,
            Err(_) => errors += 1,
        }
    }
    println!("{whole} times read to the end, {errors} errors");
    assert!(whole + errors < 100 || whole > 20 && errors > 20, "{whole} {errors}");
}
