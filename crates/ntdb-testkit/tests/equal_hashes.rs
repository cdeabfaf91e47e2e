//! Keys whose hashes are forced to be equal, wholly or in the bits that the directory uses, are
//! stored, found, iterated and deleted like any others.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ntdb::{Cursor, Options};
use ntdb_testkit::lab::{self, TempDir};

const KEYS: u32 = 10_000;

fn exercise(mask: u64, page_size: u32) {
    let start = Instant::now();
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let mut options = Options::new();
    options.create(true).hash_mask(mask).page_size(page_size).checkpoint_log_bytes(256 << 10);
    let db = options.open(&path).expect("create");
    let value = |i: u32| vec![i as u8; (i % 40) as usize];
    for i in 0..KEYS {
        assert!(db.insert(&i.to_le_bytes(), &value(i)).expect("insert"), "{i}");
    }
    assert!(!db.insert(&7u32.to_le_bytes(), b"again").expect("insert"));
    lab::demand_clean(&db, "after the inserts");
    drop(db);
    let db = options.open(&path).expect("open again");
    assert_eq!(db.len().expect("len"), u64::from(KEYS));
    for i in 0..KEYS {
        assert_eq!(db.get(&i.to_le_bytes()).expect("get"), Some(value(i)), "{i}");
    }
    assert_eq!(db.get(&KEYS.to_le_bytes()).expect("get"), None);
    let seen: Vec<_> = db.iter().map(|record| record.expect("iterate").0).collect();
    assert_eq!(seen.len() as u32, KEYS);
    assert_eq!(seen.iter().collect::<BTreeSet<_>>().len() as u32, KEYS);
    // A position among equal hashes, stored and taken up.
    let mut iter = db.iter();
    let first: Vec<_> = iter.by_ref().take(4_321).map(|r| r.expect("iterate").0).collect();
    let position = Cursor::from_bytes(&iter.cursor().to_bytes()).expect("a position");
    let rest: Vec<_> = db.iter_from(&position).map(|r| r.expect("iterate").0).collect();
    let all: BTreeSet<_> = first.iter().chain(&rest).collect();
    assert_eq!((first.len() + rest.len(), all.len()), (KEYS as usize, KEYS as usize));
    for i in (0..KEYS).step_by(2) {
        assert!(db.delete(&i.to_le_bytes()).expect("delete"), "{i}");
        assert!(!db.delete(&i.to_le_bytes()).expect("delete"), "{i}");
    }
    lab::demand_clean(&db, "after half the deletes");
    for i in 0..KEYS {
        let held = db.get(&i.to_le_bytes()).expect("get");
        assert_eq!(held, (i % 2 == 1).then(|| value(i)), "{i}");
    }
    for i in (1..KEYS).step_by(2) {
        db.put(&i.to_le_bytes(), &[9; 100]).expect("put");
        assert!(db.delete(&i.to_le_bytes()).expect("delete"), "{i}");
    }
    assert!(db.is_empty().expect("len"));
    db.close().expect("close");
    let db = options.open(&path).expect("open again");
    lab::demand_clean(&db, "at the end");
    let took = start.elapsed();
    println!("mask {mask:#x}, pages of {page_size}: {took:?}");
    assert!(took < Duration::from_secs(120), "took {took:?}");
}

#[test]
fn all_bits_equal() {
    exercise(0, 4096);
}

#[test]
fn top_48_bits_equal() {
    exercise(0xFFFF, 4096);
}

#[test]
fn all_bits_equal_on_large_pages() {
    exercise(0, 65536);
}

#[test]
fn all_but_the_top_4_bits_equal() {
    exercise(0xF << 60, 4096);
}
