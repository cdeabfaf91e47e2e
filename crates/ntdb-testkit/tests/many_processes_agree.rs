//! Eight processes with two threads each do all single operations on one database, for
//! `NTDB_TEST_SECONDS` seconds, and check whatever they see. No value may be torn, lost, invented
//! or resurrected, no append lost or doubled, each writer's order must be the order that readers
//! see, and the database must be whole at any time.

use std::time::Duration;

use ntdb::{Db, Options};
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab};

fn agree(name: &str, options: &mut Options, seconds: u64, hot: u64, large: u64) {
    let seed = lab::seed();
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut crowd = Crowd::new(lab, options, 8, 2, hot, large, seed)
        .with("durable_one_in", 2_000)
        .with("transactions", 1);
    let db = Db::open(crowd.lab.database()).expect("open");
    crowd.start();
    let mut checks = 0;
    crowd.work(Duration::from_secs(seconds), |_| {
        lab::demand_clean(&db, "meanwhile");
        checks += 1;
    });
    crowd.stop();
    crowd.demand_everything(&db, "at the end");
    let operations = crowd.board.total_operations();
    println!(
        "{name}: {operations} operations in {seconds} s, {checks} checks meanwhile, longest wait \
         {:?}",
        crowd.longest_wait()
    );
    assert!(checks > 0, "no check was made meanwhile");
    assert!(operations > 10_000 * seconds.min(10), "only {operations} operations");
    drop(db);
    let db = Db::open(crowd.lab.database()).expect("open after the last close");
    crowd.demand_everything(&db, "after the last close");
}

#[test]
fn on_a_hot_set_and_a_large_one() {
    let seconds = lab::number("NTDB_TEST_SECONDS", 20);
    agree("hot and large", &mut Options::new(), seconds, 64, 50_000);
}

#[test]
fn on_few_keys_with_frequent_checkpoints() {
    let seconds = lab::number("NTDB_TEST_SECONDS", 20).div_ceil(4);
    agree("checkpoints", Options::new().checkpoint_log_bytes(1 << 20), seconds, 32, 2_000);
}

#[test]
fn with_the_largest_pages() {
    let seconds = lab::number("NTDB_TEST_SECONDS", 20).div_ceil(4);
    agree("64 KiB pages", Options::new().page_size(65536), seconds, 32, 5_000);
}
