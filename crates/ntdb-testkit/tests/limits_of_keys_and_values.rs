//! Keys and values of every awkward length, at every page size, up to 100 MB.

use ntdb::{Db, Error, Options};
use ntdb_testkit::lab::{self, TempDir};
use ntdb_testkit::rng::Rng;

const LENGTHS: [usize; 22] = [
    0, 1, 15, 16, 17, 127, 128, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097,
    65535, 65536, 65537,
];

fn key(len: usize) -> Vec<u8> {
    Rng::new(len as u64).bytes(len)
}

fn value(key_len: usize, len: usize) -> Vec<u8> {
    Rng::new((key_len as u64) << 32 | len as u64).bytes(len)
}

fn every_length(page_size: u32) {
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let mut options = Options::new();
    options.create(true).page_size(page_size).checkpoint_log_bytes(4 << 20);
    let db = options.open(&path).expect("create");
    // Each key takes on each value length in turn, so that records grow, shrink and move.
    for value_len in LENGTHS {
        for key_len in LENGTHS {
            let (key, value) = (key(key_len), value(key_len, value_len));
            db.put(&key, &value)
                .unwrap_or_else(|e| panic!("put, key {key_len}, value {value_len}: {e}"));
            let held = db.get(&key).expect("get");
            assert!(held.as_deref() == Some(&value), "key {key_len}, value {value_len}");
        }
    }
    assert_eq!(db.len().expect("len"), LENGTHS.len() as u64);
    lab::demand_clean(&db, "after the puts");
    db.close().expect("close");
    let db = options.open(&path).expect("open again");
    let last = LENGTHS[LENGTHS.len() - 1];
    for key_len in LENGTHS {
        let mut buffer = [0; 100];
        let len = db.get_into(&key(key_len), &mut buffer).expect("get_into");
        assert_eq!(len, Some(last), "key {key_len}");
        assert_eq!(buffer, value(key_len, last)[..100], "key {key_len}");
        // An append of every length.
        let mut expected = value(key_len, last);
        for more in LENGTHS {
            expected.extend(value(1, more));
            let len = db.append(&key(key_len), &value(1, more)).expect("append");
            assert_eq!(len, expected.len() as u64);
        }
        assert!(db.get(&key(key_len)).expect("get") == Some(expected), "key {key_len}");
    }
    lab::demand_clean(&db, "after the appends");
    for key_len in LENGTHS {
        assert!(db.delete(&key(key_len)).expect("delete"), "key {key_len}");
    }
    assert!(db.is_empty().expect("len"));
    lab::demand_clean(&db, "after the deletes");
}

#[test]
fn every_length_on_pages_of_4_kib() {
    every_length(4096);
}

#[test]
fn every_length_on_pages_of_8_kib() {
    every_length(8192);
}

#[test]
fn every_length_on_pages_of_16_kib() {
    every_length(16384);
}

#[test]
fn every_length_on_pages_of_32_kib() {
    every_length(32768);
}

#[test]
fn every_length_on_pages_of_64_kib() {
    every_length(65536);
}

#[test]
fn a_value_of_100_mb() {
    let dir = TempDir::new();
    let path = dir.path().join("test.ntdb");
    let db = Db::create(&path).expect("create");
    let big = Rng::new(1).bytes(100_000_000);
    db.put(b"big", &big).expect("put");
    assert!(db.get(b"big").expect("get").as_ref() == Some(&big));
    assert_eq!(db.append(b"big", b"and more").expect("append"), 100_000_008);
    db.close().expect("close");
    let db = Db::open(&path).expect("open");
    let same = db.view(b"big", |v| v[..big.len()] == big[..] && v.ends_with(b"and more"));
    assert_eq!(same.expect("view"), Some(true));
    db.put(b"big", b"small again").expect("put");
    lab::demand_clean(&db, "after the value has shrunk");
    db.put(b"big", &big).expect("put again");
    let bytes = db.stat().expect("stat").file_bytes;
    assert!(bytes < 450 << 20, "the room was not used again: {bytes} bytes");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn a_key_of_the_greatest_length() {
    for page_size in [4096, 65536] {
        let db = Options::new().page_size(page_size).open_in_memory().expect("in memory");
        let limit = match db.put(&vec![0; 1 << 30], b"") {
            Err(Error::TooLong { limit, .. }) => limit as usize,
            other => panic!("{other:?}"),
        };
        assert!(limit >= 64 << 10, "keys of {limit} bytes only");
        let long = Rng::new(2).bytes(limit);
        db.put(&long, &[3; 70_000]).expect("put");
        assert_eq!(db.get(&long).expect("get"), Some(vec![3; 70_000]));
        let mut other = long.clone();
        other[limit - 1] ^= 1;
        assert_eq!(db.get(&other).expect("get"), None);
        assert_eq!(db.append(&long, b"more").expect("append"), 70_004);
        assert_eq!(db.iter().next().expect("a record").expect("iterate").0, long);
        lab::demand_clean(&db, "with the long key");
        assert!(db.delete(&long).expect("delete"));
        lab::demand_clean(&db, "after the long key");
    }
}

#[test]
fn too_long_a_key_is_an_error_that_names_the_limit() {
    let db = Db::in_memory().expect("in memory");
    let long = vec![0; (1 << 30) + 1];
    match db.put(&long, b"") {
        Err(Error::TooLong { what, len, limit, .. }) => {
            assert_eq!((what, len), ("key", (1 << 30) + 1));
            assert!(limit <= 1 << 30);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(db.get(&long).expect("an absent key, whatever its length"), None);
    assert!(db.is_empty().expect("len"));
}

#[test]
fn empty_key_and_empty_value_are_records_like_others() {
    let db = Db::in_memory().expect("in memory");
    assert!(db.insert(b"", b"").expect("insert"));
    assert_eq!(db.get(b"").expect("get"), Some(Vec::new()));
    assert!(!db.insert(b"", b"x").expect("insert"));
    assert_eq!(db.append(b"", b"ab").expect("append"), 2);
    assert_eq!(db.append(b"", b"").expect("append"), 2);
    assert_eq!(db.append(b"new", b"").expect("append"), 0);
    assert_eq!(db.get(b"new").expect("get"), Some(Vec::new()));
    assert_eq!(db.len().expect("len"), 2);
    assert!(db.delete(b"").expect("delete"));
    assert_eq!(db.get(b"").expect("get"), None);
    lab::demand_clean(&db, "at the end");
}
