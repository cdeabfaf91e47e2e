//! `ntdb bench speed` prints TDB's eight lines, counts every answer, and cleans up.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::Place;

const PHASES: [&str; 8] = [
    "Adding",
    "Finding",
    "Missing",
    "Traversing",
    "Deleting",
    "Re-adding",
    "Appending",
    "Churning",
];

/// Takes `NAME N records:  T ns (B bytes)` apart; returns the bytes.
fn assert_line(line: &str, name: &str, records: u32) -> u64 {
    let rest = line.strip_prefix(&format!("{name} {records} records:  ")).expect(line);
    let (nanoseconds, rest) = rest.split_once(" ns (").expect(line);
    assert!(nanoseconds.parse::<u64>().is_ok(), "{line}");
    rest.strip_suffix(" bytes)").expect(line).parse().expect(line)
}

#[test]
fn with_every_kind_of_options() {
    let place = Place::new();
    let cases: [(&[&str], u32); 11] = [
        (&[], 1000),
        (&["1"], 1),
        (&["7", "--keys", "random"], 7),
        (&["5000", "--internal"], 5000),
        (&["3000", "--no-sync", "--keys", "random", "--value-size", "100"], 3000),
        (&["300", "--value-size", "0"], 300),
        (&["200", "--value-size", "10000", "--page-size", "16K"], 200),
        (&["1000", "--reserve", "20"], 1000),
        (&["3000", "--transaction", "--keys", "random"], 3000),
        (&["1", "--transaction", "--durable"], 1),
        (&["2000", "--transaction", "--internal", "--value-size", "300"], 2000),
    ];
    for (options, records) in cases {
        let text = place.run([&["bench", "speed"], options].concat()).text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 8, "{text}");
        for (line, name) in lines.iter().zip(PHASES) {
            assert!(assert_line(line, name, records) > 0, "{line}");
        }
        assert_eq!(place.names(), [""; 0], "nothing is left behind");
    }
}

#[test]
fn a_named_file_stays_and_holds_what_churning_left() {
    let place = Place::new();
    place.run(["bench", "speed", "500", "--file", "db"]).ok();
    assert_eq!(place.names(), ["db"]);
    let mut keys: Vec<u32> = ntdb::Db::open(place.path("db"))
        .unwrap()
        .iter()
        .map(|record| u32::from_le_bytes(record.unwrap().0.try_into().unwrap()))
        .collect();
    keys.sort();
    assert_eq!(keys, (500..1000).collect::<Vec<u32>>());
    let run = place.run(["bench", "speed", "500", "--file", "db"]).expect_status(1);
    assert!(run.stderr().contains("db: already exists"), "{}", run.stderr());
}

#[test]
fn json_has_the_same_figures() {
    let place = Place::new();
    let text = place.run(["bench", "speed", "100", "--json"]).text();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["records"], 100);
    assert_eq!(report["synced"], true);
    assert_eq!((&report["durable"], &report["transaction"]), (&false.into(), &false.into()));
    assert_eq!(report["page_size"], 4096);
    let phases = report["phases"].as_array().unwrap();
    let names: Vec<&str> = phases.iter().map(|phase| phase["name"].as_str().unwrap()).collect();
    assert_eq!(names, PHASES);
    assert!(phases.iter().all(|phase| phase["ns_per_operation"].as_f64().unwrap() > 0.0));
    assert!(phases.iter().all(|phase| phase["file_bytes"].as_u64().unwrap() > 0));
}

#[test]
fn in_transactions_the_file_holds_the_same_in_the_end() {
    let place = Place::new();
    let text = place.run(["bench", "speed", "500", "--transaction", "--json", "--file", "db"]);
    let report: serde_json::Value = serde_json::from_str(&text.text()).unwrap();
    assert_eq!((&report["transaction"], &report["synced"]), (&true.into(), &true.into()));
    let db = ntdb::Db::open(place.path("db")).unwrap();
    for i in 500..1000u32 {
        assert!(db.contains(&i.to_le_bytes()).unwrap(), "{i}");
    }
    assert_eq!(db.len().unwrap(), 500);
}

#[test]
fn a_signal_leaves_no_directory_behind() {
    let place = Place::new();
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let mut child = place
            .command(["bench", "speed", "100000000", "--no-sync"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let begin = Instant::now();
        // The database's own file: then the benchmark is at work.
        let at_work = || {
            let dir = place.names().into_iter().find(|name| name.starts_with("ntdb-speed-"));
            dir.is_some_and(|dir| place.path(&dir).join("speed.ntdb").exists())
        };
        while !at_work() {
            assert!(begin.elapsed() < Duration::from_secs(60), "the benchmark does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        assert_eq!(child.wait().unwrap().signal(), Some(signal));
        assert_eq!(place.names(), [""; 0], "signal {signal}");
    }
}
