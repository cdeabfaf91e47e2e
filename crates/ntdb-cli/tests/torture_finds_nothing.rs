//! `ntdb torture` in all its forms, for `NTDB_TEST_SECONDS` seconds; and it does find what is broken.

mod common;

use std::time::{Duration, Instant};

use common::Place;
use serde_json::Value;

/// A number from the environment.
fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")),
        Err(_) => default,
    }
}

#[test]
fn whatever_the_seed() {
    let place = Place::new();
    let forms: [&[&str]; 5] = [
        &["--transactions", "--kill"],
        &["--kill"],
        &["--transactions", "--processes", "5", "--loops", "2000"],
        &["--transactions", "--kill", "--processes", "6", "--page-size", "8K"],
        &[],
    ];
    let first = number("NTDB_TEST_SEED", std::process::id().into());
    println!("seed {first}; repeat with NTDB_TEST_SEED={first}");
    let time = Duration::from_secs(number("NTDB_TEST_SECONDS", 10));
    let begin = Instant::now();
    let (mut runs, mut kills, mut operations) = (0u64, 0, 0);
    while runs < 5 || begin.elapsed() < time {
        let form = forms[runs as usize % forms.len()];
        let seed = (first + runs).to_string();
        let args = [&["torture", "--json", "--seed", &seed], form].concat();
        let report: Value = serde_json::from_str(&place.run(args).text()).unwrap();
        assert_eq!(report["ok"], true);
        let number = |member: &str| report[member].as_u64().unwrap();
        let loops = number("processes") * number("loops");
        // Who was killed may have done its last operation without having counted it.
        assert_eq!(number("operations"), loops);
        assert_eq!(report["transactions"], form.contains(&"--transactions"));
        assert!(form.contains(&"--kill") || number("kills") == 0);
        (kills, operations) = (kills + number("kills"), operations + number("operations"));
        runs += 1;
    }
    println!("{runs} runs, {operations} operations, {kills} kills");
    assert!(kills > 0, "nobody was killed");
    assert_eq!(place.names(), [""; 0], "nothing is left behind");
}

#[test]
fn it_prints_ok_and_leaves_a_named_file_that_is_whole() {
    let place = Place::new();
    let text = place.run(["torture", "--loops", "500", "--transactions", "--file", "db"]).text();
    assert!(text.starts_with("OK: 1,500 operations by 3 processes, 0 kills, "), "{text}");
    assert_eq!(place.names(), ["db"]);
    place.run(["check", "db"]).ok();
    place.run(["torture", "--file", "db"]).expect_status(1);
}

/// The same operations from the same seed: what is there in the end, but for the common keys, whose
/// last writer is a matter of chance, is the same.
#[test]
fn a_seed_repeats_itself() {
    let place = Place::new();
    let own = |name: &str| {
        let args = ["torture", "--seed", "9", "--transactions", "--loops", "1500", "--file", name];
        place.run(args).ok();
        let mut records: Vec<_> =
            ntdb::Db::open(place.path(name)).unwrap().iter().flatten().collect();
        records.retain(|(key, _)| !key.starts_with(b"shared") && !key.starts_with(b"l"));
        records.sort();
        records
    };
    let records = own("a");
    assert!(records.len() > 20, "{}", records.len());
    assert!(records == own("b"));
}

/// Somebody who is no part of it deletes a key that its owner has stored, and it says so.
#[test]
fn it_finds_what_is_broken() {
    let place = Place::new();
    for json in [false, true] {
        let name = format!("db-{json}");
        let mut args = vec!["torture", "--loops", "100000000", "--file", &name];
        args.extend(json.then_some("--json"));
        let mut command = place.command(args);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let child = command.spawn().unwrap();
        let begin = Instant::now();
        let done = std::thread::spawn(move || child.wait_with_output().unwrap());
        while !done.is_finished() {
            assert!(begin.elapsed() < Duration::from_secs(60), "it has not noticed");
            if let Ok(db) = ntdb::Db::open(place.path(&name)) {
                for key in 0..48 {
                    let _ = db.delete(format!("h{key}").as_bytes());
                }
            }
        }
        let output = done.join().unwrap();
        assert_eq!(output.status.code(), Some(3));
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains("broken (seed 0)") && message.contains("h"), "{message}");
        if json {
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(report["ok"], false);
            assert!(message.contains(report["problem"].as_str().unwrap()), "{message}");
        }
    }
    assert!(place.names().iter().any(|name| name.starts_with("ntdb-torture-")), "no board is kept");
}
