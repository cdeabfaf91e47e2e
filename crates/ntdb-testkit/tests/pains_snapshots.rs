//! What users report about long reads beside writers (groups A and D), and what else must hold of
//! snapshots of several processes. The first tests are named after the symptom that must not appear.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use ntdb::{Db, Options};
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab, PATIENCE, Process};
use ntdb_testkit::script::Digest;

const RECORDS: u32 = 4_000;

/// Trees in the file, however slow the disk is: the snapshot's, the present one, and a copy of each page from the time of the running
/// checkpoint and from that since, and what was taken in a step.
const MOST_TREES: u64 = 6;

fn furnished(lab: &Lab) -> Db {
    let mut options = Options::new();
    let db = options.create(true).checkpoint_log_bytes(1 << 20).open(lab.database());
    let db = db.expect("create");
    for n in 0..RECORDS {
        db.put(&n.to_le_bytes(), &[1; 100]).expect("put");
    }
    db.checkpoint().expect("checkpoint");
    db
}

fn commit(db: &Db, n: u32) {
    for n in 0..n {
        let value = n.to_le_bytes().repeat(25);
        db.put(&(n % RECORDS).to_le_bytes(), &value).expect("put");
    }
}

fn hold(lab: &Lab, n: u64, read_only: bool) -> Process {
    let worker = lab.worker("hold-snapshots").arg("n", n).arg("read_only", read_only);
    let mut holder = worker.spawn();
    assert_eq!(holder.line(), "inside");
    holder
}

/// Redb: one writer with small updates every minute, and readers that last minutes.
#[test]
fn one_writer_with_small_updates_and_readers_that_last_minutes() {
    for read_only in [false, true] {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let db = furnished(&lab);
        let tree = db.check().expect("check").pages * 4096;
        let before = db.stat().expect("stat").file_bytes;
        let reader = hold(&lab, 1, read_only);
        commit(&db, 100_000);
        // However slow the disk is, what only the snapshot holds is told apart then.
        db.checkpoint().expect("checkpoint");
        let stat = db.stat().expect("stat");
        let oldest = stat.oldest_snapshot.expect("a snapshot is held");
        assert_eq!((stat.snapshots, oldest.pid), (1, reader.id()));
        assert!(oldest.changes_since_bytes > 100_000 * 100, "{oldest:?}");
        println!(
            "a tree of {tree} bytes; file of {before} bytes, then of {}; {} held back",
            stat.file_bytes, stat.snapshot_bytes
        );
        assert!(stat.snapshot_bytes * 10 >= tree * 8 && stat.snapshot_bytes <= tree, "{stat:?}");
        assert!(stat.file_bytes <= before + 5 * tree, "{stat:?}");
        assert_eq!(reader.succeed(PATIENCE).trim(), "unchanged");
        db.checkpoint().expect("checkpoint");
        let after = db.stat().expect("stat");
        assert_eq!((after.snapshots, after.snapshot_bytes), (0, 0));
        assert!(after.free_bytes >= tree, "{after:?}");
        lab::demand_clean(&db, "at the end");
    }
}

/// Sled: the old process drains for hours while the new one must serve already.
#[test]
fn the_old_process_drains_for_hours_while_the_new_one_must_serve() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = furnished(&lab);
    let old = db.snapshot().expect("snapshot");
    let digest = Digest::of_snapshot(&old).expect("read");
    let mut transaction = db.begin().expect("begin");
    transaction.put(b"old", b"finishes").expect("put");
    // The new one comes, and reads; it writes as soon as the old one has finished its transaction.
    let new = lab.worker("once").arg("n", 0).spawn();
    let reader = hold(&lab, 3, true);
    transaction.commit().expect("commit");
    new.succeed(PATIENCE);
    lab.worker("puts").arg("n", 50_000).run();
    assert_eq!(db.get(b"old").expect("get").as_deref(), Some(&b"finishes"[..]));
    assert_eq!(Digest::of_snapshot(&old).expect("read"), digest, "the old process's moment");
    assert_eq!(old.get(b"old").expect("get"), None);
    assert_eq!(reader.succeed(PATIENCE).trim(), "unchanged");
    drop((old, transaction_is_over(&db)));
    lab::demand_clean(&db, "at the end");
}

fn transaction_is_over(db: &Db) {
    drop(db.try_begin().expect("try").expect("nobody has one open"));
}

/// py-lmdb: closing one environment removes every reader with that process id.
#[test]
fn closing_one_environment_removes_every_reader_with_that_process_id() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let writer = furnished(&lab);
    let hard = lab.dir().join("hard link");
    std::fs::hard_link(lab.database(), &hard).expect("link");
    let (one, other) = (Db::open(lab.database()).expect("open"), Db::open(&hard).expect("open"));
    let snapshot = one.snapshot().expect("snapshot");
    let digest = Digest::of_snapshot(&snapshot).expect("read");
    writer.put(b"key", b"between").expect("put");
    let others = other.snapshot().expect("snapshot");
    drop(others);
    other.close().expect("close");
    drop(Db::open(&hard).expect("open once more"));
    assert_eq!(writer.stat().expect("stat").snapshots, 1);
    commit(&writer, 60_000);
    assert_eq!(Digest::of_snapshot(&snapshot).expect("read"), digest);
    one.close().expect("close");
    commit(&writer, 60_000);
    assert_eq!(Digest::of_snapshot(&snapshot).expect("read"), digest);
    drop(snapshot);
    lab::demand_clean(&writer, "at the end");
}

#[test]
fn the_snapshots_of_killed_processes_are_released() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = furnished(&lab);
    let tree = db.check().expect("check").pages * 4096;
    commit(&db, 50_000);
    // What it takes without any holder.
    let usual = db.stat().expect("stat").file_bytes;
    for round in 0..20 {
        // A living one that is younger must not hide the dead one's, nor an older one.
        let young = hold(&lab, 1, false);
        let mut holder = hold(&lab, 1 + round % 5, round % 3 == 0);
        let last = hold(&lab, 1, true);
        commit(&db, 2 * RECORDS);
        holder.kill();
        young.succeed(PATIENCE);
        last.succeed(PATIENCE);
        commit(&db, 2 * RECORDS);
    }
    commit(&db, 100_000);
    let stat = db.stat().expect("stat");
    println!("usual {usual}, now {}, tree {tree}", stat.file_bytes);
    assert_eq!(stat.snapshots, 0, "the dead still hold snapshots");
    assert!(stat.file_bytes <= usual + 4 * tree, "{stat:?}");
    lab::demand_clean(&db, "at the end");
    db.checkpoint().expect("checkpoint");
    let free = db.stat().expect("stat").free_bytes;
    assert!(free + 3 * tree >= stat.file_bytes, "{free} of {} bytes are free", stat.file_bytes);
}

/// Nobody but who runs short of pages finds out: no repair is asked for otherwise.
#[test]
fn a_writer_that_needs_pages_finds_a_dead_holder() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = furnished(&lab);
    let tree = db.check().expect("check").pages * 4096;
    commit(&db, 50_000);
    let mut holder = hold(&lab, 1, false);
    // All that it holds is replaced.
    commit(&db, 2 * RECORDS);
    db.checkpoint().expect("checkpoint");
    assert_eq!(db.stat().expect("stat").snapshots, 1);
    holder.kill();
    let before = db.stat().expect("stat");
    assert!(before.snapshot_bytes > 0);
    commit(&db, 200_000);
    let after = db.stat().expect("stat");
    println!("from {} to {} bytes", before.file_bytes, after.file_bytes);
    assert_eq!(after.snapshots, 0);
    assert!(after.file_bytes <= MOST_TREES * tree, "{after:?}");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn a_thousand_are_held_in_eight_processes() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = furnished(&lab);
    let holders: Vec<Process> = (0..8).map(|_| hold(&lab, 130, false)).collect();
    assert_eq!(db.stat().expect("stat").snapshots, 8 * 130);
    commit(&db, 50_000);
    lab::demand_clean(&db, "meanwhile");
    for holder in holders {
        assert_eq!(holder.succeed(PATIENCE).trim(), "unchanged");
    }
    assert_eq!(db.stat().expect("stat").snapshots, 0);
    lab::demand_clean(&db, "at the end");
}

/// A stopped holder delays nobody; what it holds is its own state and no more.
#[test]
fn a_stopped_holder_delays_nobody() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = furnished(&lab).with_lock_timeout(Some(Duration::from_secs(2)));
    let tree = db.check().expect("check").pages * 4096;
    let holder = hold(&lab, 1, false);
    let most = MOST_TREES * tree;
    holder.signal(libc::SIGSTOP);
    let start = Instant::now();
    while !holder.is_stopped() {
        assert!(start.elapsed() < PATIENCE, "it does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    let start = Instant::now();
    commit(&db, 100_000);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(30), "100,000 puts took {took:?}");
    let first = db.stat().expect("stat");
    assert_eq!(first.oldest_snapshot.expect("held").pid, holder.id());
    assert!(first.snapshot_bytes <= tree && first.file_bytes <= most, "{first:?}");
    db.snapshot().expect("another one").get(b"x").expect("get");
    db.checkpoint().expect("checkpoint");
    commit(&db, 100_000);
    let second = db.stat().expect("stat");
    assert!(second.file_bytes <= most, "{second:?}");
    lab::demand_clean(&db, "beside it");
    holder.signal(libc::SIGCONT);
    assert_eq!(holder.succeed(PATIENCE).trim(), "unchanged");
    lab::demand_clean(&db, "at the end");
}

/// Values that prove themselves: every snapshot lies between what was acknowledged before it and what was begun after it.
#[test]
fn every_snapshot_beside_eight_writers_is_a_moment() {
    let seconds = lab::number("NTDB_TEST_SECONDS", 20).div_ceil(2);
    let seed = lab::seed();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut options = Options::new();
    options.checkpoint_log_bytes(1 << 20);
    let mut crowd = Crowd::new(lab, &mut options, 4, 2, 64, 2_000, seed);
    let db = options.open(crowd.lab.database()).expect("open");
    crowd.start();
    let observers: Vec<Process> = (0..2)
        .map(|n| {
            let worker = crowd.lab.worker("observe").path("board", &crowd.lab.board());
            worker.arg("hot", 64).arg("large", 2_000).arg("seed", seed ^ n).spawn()
        })
        .collect();
    let mut most = 0;
    crowd.work(Duration::from_secs(seconds), |_| {
        let stat = db.stat().expect("stat");
        most = most.max(stat.snapshots);
        lab::demand_clean(&db, "meanwhile");
    });
    crowd.stop();
    for observer in observers {
        print!("{}", observer.succeed(PATIENCE));
    }
    let looks = crowd.board.mark(1).load(SeqCst);
    println!("{looks} snapshots, {most} held at once, {seconds} s");
    assert!(looks > 4 * seconds && most > 3, "{looks} snapshots, {most} at once");
    crowd.demand_everything(&db, "at the end");
}
