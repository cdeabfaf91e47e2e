//! What users report about growing files and map sizes (group B), and files that are larger than
//! their contents (N). Each test is named after the symptom that must not appear.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ntdb::{Db, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::lab::{self, Lab, PATIENCE, TempDir, reported};
use ntdb_testkit::worker::crowd::{permanent_key, permanent_value};

#[test]
fn two_processes_that_grow_the_map_in_turn_corrupt_it() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    let mib = lab::number("NTDB_TEST_GROW_MIB", 128);
    for value in [1_000, 60_000] {
        let n = (mib << 19) / value;
        let growers: Vec<_> = (0..2)
            .map(|w| {
                lab.worker("grow").arg("n", n).arg("writer", w + value).arg("value", value).spawn()
            })
            .collect();
        for grower in growers {
            grower.succeed(Duration::from_secs(300));
        }
        lab::demand_clean(&db, "after both have grown it");
    }
    let stat = db.stat().expect("stat");
    println!("grown to {} MiB", stat.file_bytes >> 20);
    assert!(stat.file_bytes > mib << 20);
}

#[test]
fn map_resized_fails_every_read_until_a_restart() {
    // The reader reserves next to nothing, so that the file outgrows its range again and again.
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut small = Options::new();
    small.create(true).address_space(1 << 20);
    let db = small.open(lab.database()).expect("create");
    db.put(b"viewed", b"borrowed").expect("put");
    let grower = lab.worker("grow").arg("n", 30_000).arg("value", 1_000).spawn();
    let mut grower = grower;
    let mut reads = 0u64;
    while grower.runs() {
        // A borrowed value stays valid while others grow the file past our range.
        let same = db.view(b"viewed", |v| v == b"borrowed").expect("view");
        assert_eq!(same, Some(true));
        db.get(format!("grow-0-{}", reads % 30_000).as_bytes()).expect("get");
        reads += 1;
    }
    grower.succeed(PATIENCE);
    assert!(reads > 100, "{reads} reads");
    assert_eq!(db.len().expect("len"), 30_001);
    lab::demand_clean(&db, "at the end");
    // The other way round: the grower itself has a small range.
    lab.worker("grow").arg("n", 5_000).arg("writer", 1).arg("address_space", 1 << 20).run();
    lab::demand_clean(&db, "after a grower with a small range");
}

#[test]
fn threads_that_meet_map_full_together_double_it_each() {
    let dir = TempDir::new();
    let db = Db::create(dir.path().join("test.ntdb")).expect("create");
    std::thread::scope(|scope| {
        for t in 0..32u32 {
            let db = &db;
            scope.spawn(move || {
                for n in 0..200u32 {
                    db.put(format!("{t}-{n}").as_bytes(), &[t as u8; 1_000]).expect("put");
                }
            });
        }
    });
    let bytes = db.stat().expect("stat").file_bytes;
    println!("6.4 MB of values in a file of {bytes} bytes");
    assert!(bytes < 24 << 20, "the file ran away: {bytes} bytes");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn resizing_waits_until_nobody_reads() {
    let dir = TempDir::new();
    let db = Db::create(dir.path().join("test.ntdb")).expect("create");
    db.put(b"viewed", b"x").expect("put");
    let stop = AtomicBool::new(false);
    let longest = std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // Readers overlap, so that there is never a moment without one.
                while !stop.load(Ordering::Relaxed) {
                    db.view(b"viewed", |_| std::thread::sleep(Duration::from_millis(2)))
                        .expect("view");
                }
            });
        }
        let mut longest = Duration::ZERO;
        for n in 0..20_000u32 {
            let start = Instant::now();
            db.put(&n.to_le_bytes(), &[1; 900]).expect("put");
            longest = longest.max(start.elapsed());
        }
        stop.store(true, Ordering::Relaxed);
        longest
    });
    println!("longest put while the file grew beside readers: {longest:?}");
    assert!(longest < Duration::from_millis(500), "{longest:?}");
}

#[test]
fn the_whole_map_is_allocated_on_disk() {
    use std::os::unix::fs::MetadataExt;
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let db = Db::create(&path).expect("create");
    for n in 0..1_000u32 {
        db.put(&n.to_le_bytes(), &[1; 100]).expect("put");
    }
    db.close().expect("close");
    let metadata = std::fs::metadata(&path).expect("metadata");
    let (len, blocks) = (metadata.len(), metadata.blocks() * 512);
    println!("108 kB of records: {len} bytes, {blocks} on disk");
    assert!(len < 512 << 10 && blocks < 512 << 10, "{len} bytes, {blocks} on disk");
}

#[test]
fn a_reader_is_told_of_growth_by_an_error() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = Db::create(lab.database()).expect("create");
    for n in 0..100 {
        db.put(&permanent_key(n), &permanent_value(n, 1, 10)).expect("put");
    }
    let reader = lab.worker("reader").path("board", &lab.board()).spawn();
    let grown = lab.worker("grow").arg("n", 20_000).run();
    board.stop();
    let report = reader.succeed(PATIENCE);
    println!("{} {}", grown.trim(), report.trim());
    assert!(reported(&report, "reads") > 100);
    assert!(reported(&report, "longest_us") < 500_000, "{report}");
}
