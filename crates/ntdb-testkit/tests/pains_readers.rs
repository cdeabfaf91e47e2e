//! What users report about readers that are left behind (groups C and E). Each test is named after
//! the symptom that must not appear.

use std::time::{Duration, Instant};

use ntdb::{Db, Error, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::lab::{self, Lab, PATIENCE, Process};
use ntdb_testkit::worker::crowd::{permanent_key, permanent_value};

fn update(db: &Db, n: u32) {
    for i in 0..n {
        db.put(&(i % 1_000).to_le_bytes(), &[i as u8; 200]).expect("put");
    }
}

#[test]
fn readers_full_after_workers_were_killed() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let _board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = Options::new()
        .create(true)
        .checkpoint_log_bytes(256 << 10)
        .open(lab.database())
        .expect("create");
    for n in 0..100 {
        db.put(&permanent_key(n), &permanent_value(n, 1, 10)).expect("put");
    }
    update(&db, 20_000);
    let before = db.stat().expect("stat").file_bytes;
    let kills = lab::number("NTDB_TEST_KILLS", 200) * 10;
    let mut running: Vec<Process> = Vec::new();
    for n in 0..kills {
        running.push(lab.worker("reader").path("board", &lab.board()).spawn());
        if running.len() == 4 {
            running.remove(0).kill();
        }
        if n % 100 == 0 {
            update(&db, 500);
        }
    }
    for mut reader in running {
        reader.kill();
    }
    update(&db, 20_000);
    let after = db.stat().expect("stat");
    println!("{kills} readers killed; the file went from {before} to {} bytes", after.file_bytes);
    assert_eq!(after.processes, [std::process::id()], "dead readers are still listed");
    assert_eq!(after.oldest_reader, None);
    assert!(after.file_bytes < before * 2 + (1 << 20), "space was not reclaimed");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn a_killed_reader_makes_the_file_grow_for_ever() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Options::new()
        .create(true)
        .checkpoint_log_bytes(256 << 10)
        .open(lab.database())
        .expect("create");
    db.put(b"viewed", &[7; 500]).expect("put");
    update(&db, 50_000);
    let before = db.stat().expect("stat").file_bytes;
    let mut reader = lab.worker("hold-view").spawn();
    assert_eq!(reader.line(), "inside");
    reader.kill();
    update(&db, 100_000);
    let after = db.stat().expect("stat").file_bytes;
    println!("from {before} to {after} bytes");
    assert!(after < before * 2 + (1 << 20), "grew from {before} to {after} bytes");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn nobody_can_tell_which_process_holds_the_space() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Options::new()
        .create(true)
        .checkpoint_log_bytes(256 << 10)
        .open(lab.database())
        .expect("create");
    db.put(b"viewed", &[7; 500]).expect("put");
    update(&db, 20_000);
    assert_eq!(db.stat().expect("stat").oldest_reader, None);
    let mut reader = lab.worker("hold-view").spawn();
    assert_eq!(reader.line(), "inside");
    update(&db, 20_000);
    db.put(b"viewed", b"replaced meanwhile").expect("put");
    let stat = db.stat().expect("stat");
    assert_eq!(stat.oldest_reader, Some(reader.id()));
    assert!(stat.processes.contains(&reader.id()), "{:?}", stat.processes);
    assert!(stat.retired_bytes > 0, "nothing is held back, says stat");
    // What it looks at is still what it was.
    assert_eq!(reader.succeed(PATIENCE).trim(), "unchanged");
    update(&db, 20_000);
    assert_eq!(db.stat().expect("stat").oldest_reader, None);
    lab::demand_clean(&db, "at the end");
}

#[test]
fn a_killed_reader_stops_everybody() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    db.put(b"viewed", &[7; 500]).expect("put");
    for _ in 0..20 {
        let mut reader = lab.worker("hold-view").spawn();
        assert_eq!(reader.line(), "inside");
        reader.kill();
        let start = Instant::now();
        db.put(b"viewed", &[7; 500]).expect("put");
        db.get(b"viewed").expect("get");
        assert!(start.elapsed() < Duration::from_secs(1));
    }
    lab::demand_clean(&db, "at the end");
}

#[test]
fn a_key_lock_outlives_its_owner() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    for _ in 0..20 {
        let mut holder = lab.worker("hold-lock").spawn();
        assert_eq!(holder.line(), "held");
        assert!(db.try_lock(b"locked").expect("try").is_none());
        holder.kill();
        let start = Instant::now();
        drop(db.lock(b"locked").expect("lock after the owner's death"));
        db.put(b"locked", b"x").expect("put");
        assert!(start.elapsed() < Duration::from_secs(1), "took {:?}", start.elapsed());
    }
}

#[test]
fn max_readers_reached_tells_nothing() {
    // More processes than there are slots: an error that names the limit and the way out, and a
    // place as soon as one has ended.
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    db.put(b"viewed", b"x").expect("put");
    let mut holders = Vec::new();
    let refused = loop {
        assert!(holders.len() < 3_000, "there is no limit");
        let mut holder = lab.worker("hold-view").spawn();
        let start = Instant::now();
        // The first line tells whether it is in; an end without one, that it is not.
        let mut first = [0];
        let pipe = holder.child().stdout.as_mut().expect("a pipe");
        let read = std::io::Read::read(pipe, &mut first).expect("read");
        assert!(start.elapsed() < Duration::from_secs(10));
        if read == 0 {
            break holder.end(PATIENCE);
        }
        holders.push(holder);
    };
    println!("{} processes besides us, then: {}", holders.len(), refused.stderr.trim());
    assert!(refused.stderr.contains("1024") && refused.stderr.contains("close some"));
    assert!(matches!(Db::open(lab.database()).map(drop), Ok(())), "we have our place already");
    holders.pop().expect("a holder").kill();
    let mut next = lab.worker("hold-view").spawn();
    assert_eq!(next.line(), "inside");
    drop(holders);
    let start = Instant::now();
    while db.stat().expect("stat").processes.len() > 2 {
        assert!(start.elapsed() < Duration::from_secs(10), "the dead keep their slots");
        lab.worker("once").arg("n", 0).run();
    }
    let limit = Error::TooMany { path: lab.database(), what: "processes", limit: 1024 };
    assert!(limit.is_transient());
}
