//! `ntdb bench grow` prints its figures, and an append in a transaction costs what it appends.

mod common;

use common::Place;
use serde_json::Value;

fn grow(place: &Place, args: &[&str]) -> Value {
    let text = place.run([&["bench", "grow", "--json"], args].concat()).text();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_line_for_each_transaction_and_one_for_all() {
    let place = Place::new();
    let text = place.run(["bench", "grow", "300", "2"]).text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[0].starts_with("Adding users: "), "{text}");
    assert!(lines[1..3].iter().all(|line| line.starts_with("Adding a group: ")), "{text}");
    assert!(lines[3].starts_with("All: ") && lines[3].contains(" MB"), "{text}");
    assert_eq!(place.names(), [""; 0], "nothing is left behind");
}

#[test]
fn a_named_file_stays_and_holds_all() {
    let place = Place::new();
    let report = grow(&place, &["500", "3", "--file", "db"]);
    assert_eq!((&report["users"], &report["groups"]), (&500.into(), &3.into()));
    assert_eq!(report["transactions"].as_array().unwrap().len(), 4);
    assert!(report["own_memory_bytes"].as_u64() < report["peak_memory_bytes"].as_u64());
    assert_eq!(place.names(), ["db"]);
    let db = ntdb::Db::open(place.path("db")).unwrap();
    let (mut users, mut groups) = (0, 0);
    for record in db.iter() {
        let (key, value) = record.unwrap();
        match (key.len(), &key[..4]) {
            (48, b"user") => (users, _) = (users + 1, assert_eq!(value.len(), 64 + 3 * 32)),
            (48, b"grou") => (groups, _) = (groups + 1, assert_eq!(value.len(), 32 + 500 * 32)),
            _ => assert_eq!(value.len(), 500 * 51),
        }
    }
    assert_eq!((users, groups), (500, 3));
    let run = place.run(["bench", "grow", "1", "1", "--file", "db"]).expect_status(1);
    assert!(run.stderr().contains("db: already exists"), "{}", run.stderr());
}

/// Were the record copied at each append, eight times as many appends to one record would take
/// sixty-four times as long.
#[test]
fn appending_costs_no_more_as_the_record_grows() {
    let place = Place::new();
    let seconds = |users: &str| {
        let least = |times: Vec<f64>| times.into_iter().fold(f64::INFINITY, f64::min);
        let steps = grow(&place, &[users, "4"])["transactions"].clone();
        least(
            steps.as_array().unwrap()[1..].iter().map(|s| s["seconds"].as_f64().unwrap()).collect(),
        )
    };
    let (few, many) = (seconds("5000"), seconds("40000"));
    assert!(many < few * 24.0, "{few} s for 5,000 users, {many} s for 40,000");
}
