//! `ntdb recover`: what it copies, what it says, and its statuses.

mod common;

use common::Place;

#[test]
fn a_whole_database_is_copied_and_the_status_is_0() {
    let place = Place::new();
    place.run(["put", "--create", "a.ntdb", "key", "value"]).expect_status(0);
    let run = place.run(["recover", "a.ntdb", "b.ntdb"]).expect_status(0);
    assert_eq!(run.stdout(), "copied: 1 record\n");
    assert_eq!(place.run(["get", "b.ntdb", "key"]).expect_status(0).stdout(), "value\n");
    let run = place.run(["recover", "a.ntdb", "c.ntdb", "--json"]).expect_status(0);
    assert!(run.stdout().contains("\"complete\":true"), "{}", run.stdout());
    assert_eq!(place.names(), ["a.ntdb", "b.ntdb", "c.ntdb"]);
}

#[test]
fn what_is_lost_is_told_and_the_status_is_1() {
    let place = Place::new();
    let lines: String = (0..2_000).map(|n| format!("key-{n}\tvalue {n}\n")).collect();
    place.write("lines", &lines);
    place.run(["load", "--create", "a.ntdb", "lines"]).expect_status(0);
    let path = place.path("a.ntdb");
    let mut bytes = std::fs::read(&path).expect("read");
    // A page of records, somewhere in the middle.
    let bucket = (6..bytes.len() / 4096).rev().find(|page| bytes[page * 4096 + 4] == 1);
    let bucket = bucket.expect("a page of records");
    bytes[bucket * 4096 + 1_000] ^= 1;
    std::fs::write(&path, &bytes).expect("write");
    place.run(["check", "a.ntdb"]).expect_status(4);
    let run = place.run(["recover", "a.ntdb", "b.ntdb"]).expect_status(1);
    assert!(run.stdout().contains(&format!("page {bucket}: has a wrong checksum\n")));
    assert!(run.stderr().contains("1 page damaged") && run.stderr().contains("b.ntdb"));
    let rest = place.run(["list", "b.ntdb"]).expect_status(0).stdout().lines().count();
    assert!((1_700..2_000).contains(&rest), "{rest} records");
    place.run(["check", "b.ntdb"]).expect_status(0);
    let run = place.run(["recover", "a.ntdb", "c.ntdb", "--json"]).expect_status(1);
    assert!(run.stdout().contains("\"complete\":false"), "{}", run.stdout());
    assert!(run.stdout().contains("\"damaged_pages\":1"), "{}", run.stdout());
    let quiet = place.run(["recover", "a.ntdb", "d.ntdb", "--quiet"]).expect_status(1);
    assert_eq!(quiet.stderr(), "");
}

#[test]
fn errors_have_statuses_of_their_own_and_leave_nothing() {
    let place = Place::new();
    place.run(["create", "a.ntdb"]).expect_status(0);
    place.run(["create", "b.ntdb"]).expect_status(0);
    let run = place.run(["recover", "a.ntdb", "b.ntdb"]).expect_status(3);
    assert!(run.stderr().contains("b.ntdb: already exists"), "{}", run.stderr());
    place.run(["recover", "a.ntdb"]).expect_status(2);
    place.run(["recover", "absent.ntdb", "c.ntdb"]).expect_status(3);
    place.write("text", "no database");
    place.run(["recover", "text", "c.ntdb"]).expect_status(4);
    assert_eq!(place.names(), ["a.ntdb", "b.ntdb", "text"]);
}
