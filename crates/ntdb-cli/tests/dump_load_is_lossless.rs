//! `dump | load` gives the same database, for all bytes, in every format.

mod common;

use std::collections::BTreeMap;

use common::{Place, Random};

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

/// Empty key, empty values, every single byte, text with meanings of its own, random bytes, a value
/// of many pages.
fn awkward_records() -> Records {
    let mut records = Records::new();
    records.insert(vec![], b"value of the empty key".to_vec());
    records.insert(b"empty value".to_vec(), vec![]);
    for byte in 0..=255u8 {
        records.insert(vec![byte], vec![byte, b'x', byte]);
        records.insert(vec![b'k', byte, byte], vec![byte; 3]);
    }
    for text in ["a\tb", "\\t", "{", "}", "key(1) = \"a\"", "é;ü", "\u{2028}", "\u{feff}", "\\x41"]
    {
        records.insert(text.into(), text.repeat(2).into());
    }
    let mut random = Random(1);
    for length in 0..200 {
        records.insert(random.bytes(1 + length % 40), random.bytes(length * 7));
    }
    records.insert(b"large".to_vec(), random.bytes(300_000));
    records
}

fn fill(place: &Place, name: &str, records: &Records) {
    let db = ntdb::Db::create(place.path(name)).unwrap();
    for (key, value) in records {
        db.put(key, value).unwrap();
    }
    db.close().unwrap();
}

fn contents(place: &Place, name: &str) -> Records {
    let db = ntdb::Db::open(place.path(name)).unwrap();
    let records: Records = db.iter().map(|record| record.unwrap()).collect();
    assert_eq!(db.len().unwrap(), records.len() as u64);
    assert!(db.check().unwrap().is_clean());
    db.close().unwrap();
    records
}

fn assert_lossless(dump_options: &[&str], load_options: &[&str]) {
    let place = Place::new();
    let records = awkward_records();
    fill(&place, "a", &records);
    let text = place.run([&["dump", "a"], dump_options].concat()).ok();
    place.run_with_input([&["load", "--create", "b"], load_options].concat(), &text).ok();
    assert_eq!(contents(&place, "b"), records, "{dump_options:?}");
    // The copy's dump says the same, if not in the same order.
    let sorted = |text: &[u8]| {
        let mut lines: Vec<Vec<u8>> =
            text.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
        lines.sort();
        lines
    };
    let again = place.run([&["dump", "b"], dump_options].concat()).ok();
    assert_eq!(sorted(&again), sorted(&text));
}

#[test]
fn as_lines() {
    assert_lossless(&[], &[]);
}

#[test]
fn as_lines_with_other_separators() {
    for separator in [";", "::", "x4", "é", " "] {
        assert_lossless(&["--separator", separator], &["--separator", separator]);
    }
}

#[test]
fn as_json_lines() {
    assert_lossless(&["--json-lines"], &["--json-lines"]);
}

#[test]
fn as_tdb_text() {
    assert_lossless(&["--tdb"], &["--tdb"]);
}

#[test]
fn through_a_pipe_to_several_processes() {
    assert_lossless(&[], &["--processes", "3"]);
    assert_lossless(&["--json-lines"], &["--json-lines", "--processes", "2"]);
    assert_lossless(&["--tdb"], &["--tdb", "--processes", "2"]);
    assert_lossless(&["--separator", ";"], &["--separator", ";", "--processes", "2"]);
}

#[test]
fn an_empty_database_dumps_to_nothing() {
    let place = Place::new();
    place.run(["create", "a"]).ok();
    for format in [&["dump", "a"][..], &["dump", "a", "--json-lines"], &["dump", "a", "--tdb"]] {
        assert_eq!(place.run(format).ok(), b"");
    }
    place.run(["load", "--create", "b"]).ok();
    assert_eq!(contents(&place, "b"), Records::new());
}
