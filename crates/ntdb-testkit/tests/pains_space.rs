//! What users report about files that never shrink (group F). Each test is named after the symptom
//! that must not appear.

use std::time::{Duration, Instant};

use ntdb::{Db, Durability, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::lab::{self, Lab, PATIENCE, TempDir};
use ntdb_testkit::rng::Rng;
use ntdb_testkit::worker::crowd::{permanent_key, permanent_value};

fn folder_bytes(dir: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(dir).expect("list").flatten();
    entries.map(|entry| entry.metadata().map_or(0, |m| m.len())).sum()
}

#[test]
fn many_updates_of_few_records_fill_the_disk() {
    let updates = lab::number("NTDB_TEST_UPDATES", 300_000);
    for durability in [Durability::Relaxed, Durability::Durable] {
        let dir = TempDir::new();
        let path = dir.path().join("test.ntdb");
        let mut options = Options::new();
        options.create(true).durability(durability).checkpoint_log_bytes(4 << 20);
        let db = options.open(&path).expect("create");
        let mut rng = Rng::new(1);
        let mut load = |db: &Db, n: u64| {
            let len = rng.range(50, 150) as usize;
            db.put(&(n % 10_000).to_le_bytes(), &rng.bytes(len)).expect("put");
        };
        for n in 0..10_000 {
            load(&db, n);
        }
        db.checkpoint().expect("checkpoint");
        let fresh = db.stat().expect("stat").file_bytes;
        // Copy-on-write keeps the durable checkpoint, the running one, and the present: three
        // trees while it is in use, and some room; two if checkpoints are quick, so that writers
        // wait for them. After that nothing grows any more.
        let half = updates / 2;
        for n in 0..half {
            load(&db, n.wrapping_mul(7_919));
        }
        let middle = db.stat().expect("stat").file_bytes;
        for n in half..updates {
            load(&db, n.wrapping_mul(7_919));
        }
        let stat = db.stat().expect("stat");
        let now = stat.file_bytes;
        let tree = now - stat.free_bytes - stat.retired_bytes;
        println!(
            "{durability:?}: {fresh} bytes fresh, {middle} and {now} after {updates} updates, of \
             which the tree is {tree}"
        );
        assert!(now <= tree * 7 / 2, "{durability:?}: {now} bytes for a tree of {tree}");
        assert!(now <= middle * 3 / 2, "{durability:?}: from {middle} to {now} bytes");
        lab::demand_clean(&db, "at the end");
        db.close().expect("close");
        // At rest there is one tree, of buckets that have been split a little more.
        let rest = folder_bytes(dir.path());
        println!("{durability:?}: {rest} bytes at rest");
        assert!(rest <= fresh * 3 / 2, "{durability:?}: {fresh} bytes fresh, {rest} at rest");
        let db = Db::open(&path).expect("open");
        assert_eq!(db.len().expect("len"), 10_000);
        lab::demand_clean(&db, "after moving to the front");
    }
}

#[test]
fn steady_churn_makes_the_file_grow_for_ever() {
    // On a disk that takes longer than a quarter of a second for a checkpoint there is a third tree.
    let dir = TempDir::inside(std::path::Path::new("/dev/shm"));
    let path = dir.path().join("test.ntdb");
    let pairs = lab::number("NTDB_TEST_CHURN", 4_000_000);
    for value in [4, 100] {
        let db = Options::new().create(true).open(&path).expect("create");
        let put = |n: u64| db.put(&(n as u32).to_le_bytes(), &vec![n as u8; value]).expect("put");
        (0..100_000).for_each(put);
        db.checkpoint().expect("checkpoint");
        let fresh = db.stat().expect("stat").file_bytes;
        for n in 0..pairs {
            assert!(db.delete(&(n as u32).to_le_bytes()).expect("delete"));
            put(n + 100_000);
        }
        let now = db.stat().expect("stat").file_bytes;
        println!("values of {value} bytes: {now} bytes after {pairs} pairs, {fresh} fresh");
        assert!(now * 2 <= fresh * 5, "values of {value} bytes: from {fresh} to {now} bytes");
        lab::demand_clean(&db, "at the end");
        db.close().expect("close");
        std::fs::remove_file(&path).expect("remove");
    }
}

#[test]
fn an_almost_empty_database_takes_megabytes() {
    for (records, limit) in [(0u32, 64 << 10), (1, 64 << 10), (100, 64 << 10)] {
        let dir = TempDir::new();
        let db = Db::create(dir.path().join("test.ntdb")).expect("create");
        for n in 0..records {
            db.put(&n.to_le_bytes(), &[1; 30]).expect("put");
        }
        db.close().expect("close");
        let bytes = folder_bytes(dir.path());
        println!("{records} records at rest: {bytes} bytes");
        assert!(bytes <= limit, "{records} records take {bytes} bytes");
    }
}

#[test]
fn deleting_everything_frees_nothing() {
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let db = Options::new().create(true).checkpoint_log_bytes(1 << 20).open(&path).expect("create");
    let load = |tag: u8| {
        for n in 0..20_000u32 {
            db.put(&n.to_le_bytes(), &[tag; 200]).expect("put");
        }
    };
    load(1);
    db.checkpoint().expect("checkpoint");
    let full = db.stat().expect("stat").file_bytes;
    for round in 0..5 {
        if round % 2 == 0 {
            for n in 0..20_000u32 {
                assert!(db.delete(&n.to_le_bytes()).expect("delete"));
            }
        } else {
            db.clear().expect("clear");
        }
        assert!(db.is_empty().expect("len"));
        db.checkpoint().expect("checkpoint");
        db.checkpoint().expect("checkpoint");
        let stat = db.stat().expect("stat");
        let used = stat.file_bytes - stat.free_bytes;
        assert!(used < full / 10, "{used} of {full} bytes are not free without a record");
        load(round);
        let bytes = db.stat().expect("stat").file_bytes;
        assert!(bytes <= full * 2, "round {round}: {bytes} bytes, at first {full}");
    }
    lab::demand_clean(&db, "at the end");
}

#[test]
fn overlapping_readers_starve_the_checkpoint() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = Options::new()
        .create(true)
        .checkpoint_log_bytes(1 << 20)
        .open(lab.database())
        .expect("create");
    for n in 0..1_000 {
        db.put(&permanent_key(n), &permanent_value(n, 1, 30)).expect("put");
    }
    let readers: Vec<_> = (0..3)
        .map(|n| {
            lab.worker("iterator")
                .path("board", &lab.board())
                .arg("permanent", 1_000)
                .arg("seed", n)
                .spawn()
        })
        .collect();
    let mut peak = 0;
    let seconds = lab::number("NTDB_TEST_SECONDS", 20).div_ceil(4);
    let start = Instant::now();
    let mut counter = 1;
    while start.elapsed() < Duration::from_secs(seconds) {
        for n in 0..1_000 {
            db.put(&permanent_key(n), &permanent_value(n, counter, 30)).expect("put");
        }
        counter += 1;
        peak = peak.max(folder_bytes(lab.dir()));
    }
    board.stop();
    for reader in readers {
        reader.succeed(PATIENCE);
    }
    println!("{counter} rounds of updates beside readers; at most {peak} bytes on disk");
    assert!(peak < 64 << 20, "{peak} bytes on disk");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn a_long_free_list_makes_one_large_value_take_minutes() {
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let db = Options::new().create(true).checkpoint_log_bytes(4 << 20).open(&path).expect("create");
    // Values of two pages each; every second one goes: a file full of small holes.
    let n = 30_000u32;
    for i in 0..n {
        db.put(&i.to_le_bytes(), &[1; 6_000]).expect("put");
    }
    for i in (0..n).step_by(2) {
        db.delete(&i.to_le_bytes()).expect("delete");
    }
    db.checkpoint().expect("checkpoint");
    db.checkpoint().expect("checkpoint");
    let mut longest = Duration::ZERO;
    for i in 0..20u32 {
        let start = Instant::now();
        db.put(format!("large-{i}").as_bytes(), &vec![2; 1 << 20]).expect("put");
        longest = longest.max(start.elapsed());
    }
    println!("a value of 1 MiB among {} holes: at most {longest:?}", n / 2);
    assert!(longest < Duration::from_secs(2), "{longest:?}");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn nobody_knows_when_deleted_space_comes_back() {
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let db = Db::create(&path).expect("create");
    for n in 0..10_000u32 {
        db.put(&n.to_le_bytes(), &[1; 500]).expect("put");
    }
    db.checkpoint().expect("checkpoint");
    let before = db.stat().expect("stat");
    for n in 0..10_000u32 {
        db.delete(&n.to_le_bytes()).expect("delete");
    }
    let waiting = db.stat().expect("stat");
    db.checkpoint().expect("checkpoint");
    db.checkpoint().expect("checkpoint");
    let after = db.stat().expect("stat");
    println!(
        "free {} then {} then {}; retired {} then {}",
        before.free_bytes,
        waiting.free_bytes,
        after.free_bytes,
        waiting.retired_bytes,
        after.retired_bytes
    );
    assert!(waiting.free_bytes + waiting.retired_bytes >= before.free_bytes);
    db.close().expect("close");
    let rest = Db::open(&path).expect("open").stat().expect("stat");
    println!("after a close: free {}, file {}", rest.free_bytes, rest.file_bytes);
    // All of it has come back: free for the next records, and gone from the file at rest.
    assert!(after.file_bytes - after.free_bytes < 1 << 20, "{after:?}");
    assert!(rest.file_bytes < 1 << 20, "{rest:?}");
}

/// Values of their own pages lie at the end of the file, small holes before them.
#[test]
fn a_closed_file_is_as_long_as_what_was_deleted_last_had_made_it() {
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let db = Options::new().create(true).checkpoint_log_bytes(1 << 20).open(&path).expect("create");
    let mut rng = Rng::new(5);
    let mut kept = Vec::new();
    for n in 0..3_000u32 {
        let len = [40, 2_000, 9_000, 30_000][n as usize % 4];
        // Some keys lie with their values.
        let mut key = n.to_le_bytes().to_vec();
        if n % 50 == 7 {
            key.resize(2_000, 1);
        }
        let value = rng.bytes(len);
        db.put(&key, &value).expect("put");
        if n % 10 == 9 || n >= 2_900 {
            kept.push((key, value));
        } else if n % 3 == 0 {
            assert!(db.delete(&key).expect("delete"));
        }
    }
    for n in 0..2_900u32 {
        let mut key = n.to_le_bytes().to_vec();
        if n % 50 == 7 {
            key.resize(2_000, 1);
        }
        if n % 10 != 9 {
            db.delete(&key).expect("delete");
        }
    }
    let live: usize = kept.iter().map(|(key, value)| key.len() + value.len()).sum();
    let before = db.stat().expect("stat").file_bytes;
    db.close().expect("close");
    let rest = folder_bytes(dir.path());
    println!("{live} bytes live, {before} in use, {rest} at rest");
    assert!(rest < live as u64 * 3 / 2 + (1 << 20), "{rest} bytes at rest for {live} live");
    let db = Db::open(&path).expect("open");
    lab::demand_clean(&db, "after the move");
    assert_eq!(db.len().expect("len"), kept.len() as u64);
    for (key, value) in &kept {
        assert_eq!(db.get(key).expect("get").as_ref(), Some(value));
    }
}

/// Records of 10 MB of which all but a few have just been deleted; where it is killed, or not at all.
fn thinned_out(lab: &Lab, crash: Option<&str>) -> u64 {
    let records = 30_000u32;
    let db = Db::create(lab.database()).expect("create");
    for n in 0..records {
        db.put(&n.to_le_bytes(), &[1; 300]).expect("put");
    }
    db.close().expect("close");
    let worker = lab.worker("thin-out").arg("n", records).arg("keep", 1_000);
    let worker = match crash {
        Some(point) => worker.env("NTDB_CRASH", point),
        None => worker,
    };
    let mut worker = worker.spawn();
    assert_eq!(worker.line(), "deleted");
    match crash {
        Some(point) => assert!(!worker.end(PATIENCE).status.success(), "passed by {point}"),
        None => worker.kill(),
    }
    file_bytes(lab)
}

fn file_bytes(lab: &Lab) -> u64 {
    std::fs::metadata(lab.database()).expect("metadata").len()
}

#[test]
fn after_a_crash_the_file_stays_long_until_something_is_changed() {
    let points = ["checkpointed", "moved", "moved.checkpointed", "second", "truncated"];
    let points = points.iter().map(|point| Some(format!("close.{point}")));
    for crash in std::iter::once(None).chain(points) {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let before = thinned_out(&lab, crash.as_deref());
        let db = Db::open(lab.database()).expect("open");
        assert_eq!(db.len().expect("len"), 30);
        db.close().expect("close");
        let after = file_bytes(&lab);
        println!("killed at {crash:?}: {before} bytes, {after} after the next close");
        assert!(after < 200_000, "killed at {crash:?}: {after} bytes");
        let db = Db::open(lab.database()).expect("open");
        lab::demand_clean(&db, "after the cut");
        assert_eq!(db.len().expect("len"), 30);
        db.close().expect("close");
        assert_eq!(file_bytes(&lab), after, "the second close had something left to do");
    }
}

#[test]
fn what_could_not_be_cut_beside_a_reader_stays() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    for n in 0..30_000u32 {
        db.put(&n.to_le_bytes(), &[1; 300]).expect("put");
    }
    db.close().expect("close");
    let reader = Options::new().read_only(true).open(lab.database()).expect("open for reading");
    let mut worker = lab.worker("thin-out").arg("n", 30_000).arg("keep", 1_000).spawn();
    assert_eq!(worker.line(), "deleted");
    worker.succeed(PATIENCE);
    let beside = file_bytes(&lab);
    assert!(beside > 9_000_000, "cut to {beside} bytes under a reader");
    assert_eq!(reader.len().expect("len"), 30_000);
    reader.close().expect("close");
    Db::open(lab.database()).expect("open").close().expect("close");
    let after = file_bytes(&lab);
    println!("{beside} bytes beside a reader, {after} after the next close");
    assert!(after < 200_000, "{after} bytes");
}

/// There is room for its pages, but not in a row, before the place where the file could end.
#[test]
fn one_large_value_at_the_end_keeps_the_file_long() {
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let db = Db::create(&path).expect("create");
    let small = |n: u32| vec![n as u8; 20_000];
    for n in 0..200u32 {
        db.put(&n.to_le_bytes(), &small(n)).expect("put");
    }
    db.put(b"large", &[7; 240_000]).expect("put");
    db.close().expect("close");
    let before = folder_bytes(dir.path());
    let db = Db::open(&path).expect("open");
    for n in (0..200u32).filter(|n| n % 5 != 0) {
        assert!(db.delete(&n.to_le_bytes()).expect("delete"));
    }
    db.close().expect("close");
    let after = folder_bytes(dir.path());
    let live = 40 * 20_000 + 240_000;
    println!("{before} bytes, {after} at rest for {live} live");
    assert!(after < live * 3 / 2, "{before} bytes, {after} at rest for {live} live");
    let db = Db::open(&path).expect("open");
    lab::demand_clean(&db, "after the move");
    assert_eq!(db.get(b"large").expect("get").as_deref(), Some(&[7; 240_000][..]));
    for n in (0..200u32).step_by(5) {
        assert_eq!(db.get(&n.to_le_bytes()).expect("get"), Some(small(n)));
    }
}
