//! `kill -9` at random moments, `NTDB_TEST_KILLS` times, the victims replaced at once. No survivor
//! waits longer than a second, nothing acknowledged is missing, no page stays leaked.

use std::time::Duration;

use ntdb::{Db, Options};
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab};
use ntdb_testkit::rng::Rng;

/// The first members are never killed; their longest wait counts.
const SURVIVORS: usize = 2;

fn kill(name: &str, options: &mut Options, kills: u64, hot: u64, large: u64) {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut crowd = Crowd::new(lab, options, 6, 2, hot, large, seed)
        .with("durable_one_in", 500)
        .with("reads", 30)
        .with("transactions", 1)
        .with("scans", 0);
    let db = Db::open(crowd.lab.database()).expect("open");
    crowd.start();
    std::thread::sleep(Duration::from_millis(200));
    for n in 1..=kills {
        // Mostly soon after the last one, now and then after a quiet time.
        let pause_us = if rng.one_in(10) { rng.below(60_000) } else { rng.below(8_000) };
        std::thread::sleep(Duration::from_micros(pause_us));
        let victim = rng.range(SURVIVORS as u64, crowd.members.len() as u64 - 1) as usize;
        crowd.replace(victim);
        if n % 20 == 0 {
            crowd.demand_all_running();
        }
        if n % 50 == 0 {
            lab::demand_clean(&db, &format!("after {n} kills"));
        }
    }
    std::thread::sleep(Duration::from_millis(200));
    crowd.demand_all_running();
    crowd.stop();
    crowd.demand_everything(&db, "at the end");
    let longest = (0..SURVIVORS).map(|s| crowd.longest_wait_of(s)).max().unwrap_or_default();
    println!(
        "{name}: {kills} kills, {} operations, a survivor's longest wait {longest:?}",
        crowd.board.total_operations()
    );
    assert!(longest < Duration::from_secs(1), "a survivor waited {longest:?}");
    let stat = db.stat().expect("stat");
    assert_eq!(stat.processes.len(), 1, "the dead are still listed: {:?}", stat.processes);
}

#[test]
fn among_few_and_many_keys() {
    kill("kills", &mut Options::new(), lab::number("NTDB_TEST_KILLS", 200), 48, 3_000);
}

#[test]
fn with_frequent_checkpoints() {
    let kills = lab::number("NTDB_TEST_KILLS", 200).div_ceil(2);
    kill("kills, checkpoints", Options::new().checkpoint_log_bytes(256 << 10), kills, 24, 1_000);
}
