//! The benchmarks with clients, in threads and processes: their figures are there, what they
//! verify is right, and nothing is left behind.

mod common;

use common::Place;
use serde_json::Value;

fn report(place: &Place, args: &[&str]) -> Value {
    let text = place.run([&["bench"], args, &["--json"]].concat()).text();
    serde_json::from_str(&text).unwrap()
}

/// A figure of several runs: the median lies between the least and the greatest.
fn demand_series(series: &Value, runs: usize) {
    let of = |name: &str| series[name].as_f64().unwrap();
    assert!(of("min") > 0.0 && of("min") <= of("median") && of("median") <= of("max"), "{series}");
    assert_eq!(series["runs"].as_array().unwrap().len(), runs, "{series}");
}

#[test]
fn tpcb_by_processes_and_threads() {
    let place = Place::new();
    for kind in ["--processes", "--threads"] {
        let args =
            ["tpcb", kind, "--clients", "3", "--transactions", "40", "--scale", "1", "--runs", "2"];
        let report = report(&place, &args);
        demand_series(&report["tps"], 2);
        assert_eq!(report["processes"], kind == "--processes");
        assert_eq!(report["durable"], true);
        let sums = &report["verified"];
        assert_eq!(sums["transactions"], 2 * 3 * 40);
        for table in ["accounts", "tellers", "branches"] {
            assert_eq!(sums[table], sums["history"], "{sums}");
        }
        let latency = |name: &str| report["latency"][name].as_f64().unwrap();
        assert!(latency("p50_us") > 0.0 && latency("p50_us") <= latency("p99_us"), "{report}");
        assert!(latency("p99_us") <= latency("max_us"), "{report}");
        assert!(report["pages_dirtied_per_transaction"].as_f64() > Some(0.0), "{report}");
        assert!(report["machine"]["processors"].as_u64() > Some(0), "{report}");
    }
    let relaxed = ["tpcb", "--relaxed", "--clients", "1", "--transactions", "9", "--scale", "1"];
    let text = place.run([&["bench"], &relaxed[..]].concat()).text();
    assert!(text.contains("relaxed") && text.contains("tps "), "{text}");
    assert!(text.contains("; 27 transactions"), "{text}");
    assert_eq!(place.names(), [""; 0], "nothing is left behind");
}

#[test]
fn a_named_file_of_tpcb_stays_with_its_properties() {
    let place = Place::new();
    let args = ["tpcb", "--clients", "2", "--transactions", "30", "--scale", "1", "--grow", "20"];
    let new = ["--runs", "1", "--file", "db", "--reserve", "30", "--page-size", "8K"];
    let report = report(&place, &[&args[..], &new].concat());
    assert_eq!((&report["reserve_percent"], &report["page_size"]), (&30.into(), &8192.into()));
    let updates = report["updates"].as_object().unwrap();
    let all: u64 = updates.values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(all, 2 * 30 * 3, "three balances a transaction");
    place.run(["check", "db"]).ok();
    let stat: Value = serde_json::from_slice(&place.run(["stat", "db", "--json"]).ok()).unwrap();
    assert_eq!(stat["records"], 100_000 + 10 + 1 + 60);
    place.run([&["bench"], &args[..], &new].concat()).expect_status(1);
}

#[test]
fn every_mix_has_its_line() {
    let place = Place::new();
    let small = ["--clients", "2", "--operations", "300", "--records", "500", "--runs", "1"];
    let report = report(&place, &[&["mixed"], &small[..]].concat());
    let phases = report["phases"].as_array().unwrap();
    let names: Vec<_> = phases.iter().map(|phase| phase["workload"].as_str().unwrap()).collect();
    assert_eq!(names, ["A", "B", "C", "D", "E", "F"]);
    phases.iter().for_each(|phase| demand_series(&phase["ops_per_second"], 1));
    let one = ["bench", "mixed", "--workload", "f", "--threads", "--durable"];
    let text = place.run([&one, &small[..]].concat()).text();
    assert!(text.contains("\nF  50 % reads, 50 % read and update"), "{text}");
    assert!(text.contains(", durable"), "{text}");
    place.run(["bench", "mixed", "--file", "db"]).expect_status(2);
    assert_eq!(place.names(), [""; 0], "nothing is left behind");
}

#[test]
fn pairs_and_scale() {
    let place = Place::new();
    let pairs = report(&place, &["dbspeed", "--seconds", "0.05", "--runs", "2"]);
    demand_series(&pairs["store_ops_per_second"], 2);
    demand_series(&pairs["fetch_ops_per_second"], 2);
    assert!(pairs["records"].as_u64() > Some(1), "{pairs}");

    let small = ["--clients", "3", "--seconds", "0.02", "--records", "1000", "--runs", "1"];
    let scale = report(&place, &[&["scale"], &small[..]].concat());
    let phases = scale["phases"].as_array().unwrap();
    assert_eq!(phases.len(), 4 * 3, "four kinds; 1, 2 and 3 clients");
    for phase in phases {
        demand_series(&phase["ops_per_second"], 1);
        let has_writer = phase["kind"] == "readers_beside_a_writer";
        assert_eq!(phase.get("writer_ops_per_second").is_some(), has_writer, "{phase}");
    }
    place.run(["bench", "scale", "--durable"]).expect_status(2);
}

/// What a client process finds wrong is the benchmark's own failure.
#[test]
fn a_client_that_cannot_open_fails_the_benchmark() {
    let place = Place::new();
    let run = place.run(["bench", "tpcb", "--file", "no/such/dir", "--scale", "1"]);
    let run = run.expect_status(3);
    assert!(run.stderr().contains("no/such/dir"), "{}", run.stderr());
    let args = ["bench-worker", "absent"];
    let job = r#"{"Traffic":{"write_percent":0,"records":1,"seconds":0.1,"seed":0}}"#;
    let run = place.run_with_input(args, format!("{job}\n").as_bytes()).expect_status(3);
    assert!(run.stderr().contains("absent"), "{}", run.stderr());
}
