//! All processes die at the same moment; the next open recovers every acknowledged operation.

use std::time::Duration;

use ntdb::{Db, Options};
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab};
use ntdb_testkit::rng::Rng;

fn rounds(name: &str, options: &mut Options, rounds: u64) {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut crowd = Crowd::new(lab, options, 4, 2, 48, 2_000, seed)
        .with("durable_one_in", 300)
        .with("reads", 20)
        .with("transactions", 1)
        .with("scans", 0);
    let mut slowest = Duration::ZERO;
    for round in 0..rounds {
        crowd.start();
        std::thread::sleep(Duration::from_micros(rng.range(2_000, 250_000)));
        crowd.demand_all_running();
        crowd.kill_all();
        let start = std::time::Instant::now();
        let db = Db::open(crowd.lab.database())
            .unwrap_or_else(|e| panic!("open after round {round}: {e}"));
        slowest = slowest.max(start.elapsed());
        crowd.demand_everything(&db, &format!("after round {round}"));
    }
    let operations = crowd.board.total_operations();
    println!("{name}: {rounds} rounds, {operations} operations, slowest recovery {slowest:?}");
    assert!(operations > rounds * 100, "the workers hardly worked: {operations}");
}

#[test]
fn and_everything_acknowledged_is_there() {
    let n = lab::number("NTDB_TEST_KILLS", 200).div_ceil(10);
    rounds("all killed", &mut Options::new(), n);
}

#[test]
fn and_everything_acknowledged_is_there_with_frequent_checkpoints() {
    let n = lab::number("NTDB_TEST_KILLS", 200).div_ceil(10);
    rounds("all killed, checkpoints", Options::new().checkpoint_log_bytes(128 << 10), n);
}
