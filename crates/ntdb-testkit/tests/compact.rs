//! `Db::compact` makes the file small while others use it, and nobody notices anything else of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ntdb::{Db, Options};
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab, TempDir};
use ntdb_testkit::rng::Rng;

fn file_bytes(path: &std::path::Path) -> u64 {
    std::fs::metadata(path).expect("look at the file").len()
}

fn key(n: u32) -> Vec<u8> {
    // Now and then one that does not fit into its bucket.
    let mut key = n.to_le_bytes().to_vec();
    if n % 5_000 == 7 {
        key.resize(2_500, 1);
    }
    key
}

/// After deleting nine tenths of the records the file is hardly larger than one into which only the others were loaded.
#[test]
fn a_file_of_which_nine_tenths_were_deleted_is_as_small_as_a_fresh_load() {
    let seed = lab::seed();
    for (records, bytes) in [(300_000, 4), (60_000, 100), (60_000, 600), (3_000, 9_000)] {
        for scattered in [true, false] {
            let mut rng = Rng::new(seed);
            let value: Vec<u8> = rng.bytes(bytes);
            let is_kept = |n: u32| if scattered { n % 10 == 3 } else { n < records / 10 };
            let dir = TempDir::new();
            let (path, fresh) = (dir.path().join("a.ntdb"), dir.path().join("fresh.ntdb"));
            let fresh_db = Db::create(&fresh).expect("create");
            let db = Db::create(&path).expect("create");
            for n in 0..records {
                db.put(&key(n), &value).expect("put");
                if is_kept(n) {
                    fresh_db.put(&key(n), &value).expect("put");
                }
            }
            db.checkpoint().expect("checkpoint");
            let full = file_bytes(&path);
            (0..records).filter(|&n| !is_kept(n)).for_each(|n| {
                assert!(db.delete(&key(n)).expect("delete"));
            });
            db.compact().expect("compact");
            lab::demand_clean(&db, "after the compaction");
            let compacted = file_bytes(&path);
            assert_eq!(db.stat().expect("stat").file_bytes, compacted);
            fresh_db.close().expect("close");
            let aim = file_bytes(&fresh);
            println!("{records} of {bytes} bytes: {full}, {compacted} compacted, {aim} fresh");
            assert!(compacted * 10 <= aim * 13, "{compacted} bytes, {aim} for a fresh load");
            for n in 0..records {
                let held = db.get(&key(n)).expect("get");
                assert_eq!(held.as_deref(), is_kept(n).then_some(&value[..]), "record {n}");
            }
            // It grows again as if nothing had happened.
            for n in 0..records {
                db.put(&key(n), &value).expect("put");
            }
            lab::demand_clean(&db, "after growing again");
            db.compact().expect("compact");
            assert_eq!(db.len().expect("len"), records as u64);
            db.close().expect("close");
        }
    }
}

/// Processes that write, append, delete and iterate, some with large values, beside one compaction after the other.
#[test]
fn beside_many_processes_nobody_sees_anything_of_it() {
    let seed = lab::seed();
    let time = Duration::from_secs(lab::number("NTDB_TEST_SECONDS", 20).div_ceil(3));
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut crowd = Crowd::new(lab, &mut Options::new(), 4, 2, 64, 20_000, seed);
    let db = Db::open(crowd.lab.database()).expect("open");
    crowd.start();
    let start = Instant::now();
    let mut compactions = 0;
    while start.elapsed() < time {
        db.compact().expect("compact");
        compactions += 1;
        if compactions % 5 == 0 {
            crowd.demand_all_running();
            lab::demand_clean(&db, "meanwhile");
        }
    }
    crowd.stop();
    crowd.demand_everything(&db, "at the end");
    let waited = crowd.longest_wait();
    let operations = crowd.board.total_operations();
    println!("{compactions} compactions beside {operations} operations, longest wait {waited:?}");
    assert!(compactions > 2 && operations > 1_000);
    db.close().expect("close");
}

/// Long values that are being appended to are not moved away under whoever writes.
#[test]
fn beside_appends_to_long_values_no_byte_is_lost() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let compactor = scope.spawn(|| {
            let mut compactions = 0;
            while !ended.load(Ordering::Relaxed) {
                // Something to move: a hole in front of the long values.
                for n in 0..300u32 {
                    db.put(&n.to_le_bytes(), &vec![1; 3_000]).expect("put");
                }
                for n in 0..300u32 {
                    db.delete(&n.to_le_bytes()).expect("delete");
                }
                db.compact().expect("compact");
                compactions += 1;
            }
            compactions
        });
        let writers: Vec<_> = (0..3u8)
            .map(|writer| {
                let db = &db;
                scope.spawn(move || {
                    let mut rng = Rng::new(u64::from(writer));
                    for round in 0..4u8 {
                        let key = [b'l', writer];
                        db.put(&key, &[]).expect("put");
                        let mut whole = Vec::new();
                        for _ in 0..40 {
                            let part = rng.bytes(100_000);
                            whole.extend_from_slice(&part);
                            db.append(&key, &part).expect("append");
                        }
                        let held = db.get(&key).expect("get");
                        assert!(held.as_ref() == Some(&whole), "writer {writer}, round {round}");
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
        ended.store(true, Ordering::Relaxed);
        let compactions = compactor.join().expect("no panic");
        println!("{compactions} compactions");
        assert!(compactions > 1);
    });
    lab::demand_clean(&db, "at the end");
}

/// Whoever compacts is killed at any moment: the file is whole, and the next one makes it small.
#[test]
fn killed_at_any_moment_it_leaves_a_whole_file() {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    let value = rng.bytes(300);
    for n in 0..5_000u32 {
        db.put(&key(n), &value).expect("put");
    }
    for round in 0..lab::number("NTDB_TEST_KILLS", 200).div_ceil(10) as u32 {
        let low = 5_000 * (round + 1);
        for n in low..low + 5_000 {
            db.put(&key(n), &value).expect("put");
            db.delete(&key(n - 5_000)).expect("delete");
        }
        let mut worker = lab.worker("compact").spawn();
        std::thread::sleep(Duration::from_micros(rng.below(40_000)));
        worker.kill();
        db.put(b"after", &round.to_le_bytes()).expect("put");
        lab::demand_clean(&db, &format!("after kill {round}"));
        assert_eq!(db.len().expect("len"), 5_001);
        for n in low..low + 5_000 {
            assert_eq!(db.get(&key(n)).expect("get").as_ref(), Some(&value), "record {n}");
        }
    }
    db.compact().expect("compact");
    let small = file_bytes(&lab.database());
    assert!(small < 5_000 * 300 * 2, "{small} bytes");
    lab::demand_clean(&db, "at the end");
}

/// What has been compacted is there after all have died, and after a power cut nothing refers to what was cut.
#[test]
fn after_a_crash_the_cut_file_is_whole() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    for point in ["space.shortened", "compact.checkpointed", "space.truncated", "compact.moved"] {
        let db = Db::create(lab.database()).expect("create");
        for n in 0..20_000u32 {
            db.put(&key(n), &[3; 200]).expect("put");
        }
        for n in 0..20_000u32 {
            if n % 10 != 0 {
                db.delete(&key(n)).expect("delete");
            }
        }
        db.close().expect("close");
        let worker = lab.worker("compact").env("NTDB_CRASH", point);
        let ended = worker.spawn().end(lab::PATIENCE);
        assert!(!ended.status.success(), "{point} was not reached: {ended:?}");
        let db = Db::open(lab.database()).expect("open");
        lab::demand_clean(&db, point);
        assert_eq!(db.len().expect("len"), 2_000);
        db.clear().expect("clear");
        db.close().expect("close");
    }
}
