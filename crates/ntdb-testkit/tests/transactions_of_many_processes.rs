//! Transactions of many processes, some of them killed, come one after the other, whole or not at
//! all, and whoever looks finds the same total.

use std::time::Duration;

use ntdb::{Db, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::history::{self, Entry};
use ntdb_testkit::lab::{self, Lab, PATIENCE, Process};
use ntdb_testkit::rng::{Rng, mix};
use ntdb_testkit::worker::transactions::{AUDITS, TRANSFERS, audit, open_bank};
use std::sync::atomic::Ordering;

const ACCOUNTS: u64 = 100;
const CLERKS: u64 = 6;

fn seconds() -> Duration {
    Duration::from_secs(lab::number("NTDB_TEST_SECONDS", 20)).div_f64(4.0)
}

/// Transfers by several processes; with `kills`, clerks and auditors are killed and replaced.
fn bank(options: &mut Options, kills: bool) {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = options.create(true).open(lab.database()).expect("create");
    open_bank(&db, ACCOUNTS).expect("open the bank");
    let start = |n: u64, incarnation: u64| {
        let role = if n < CLERKS { "clerk" } else { "auditor" };
        let seed = mix(seed ^ n << 8 ^ incarnation);
        lab.worker(role).path("board", &lab.board()).arg("accounts", ACCOUNTS).arg("seed", seed)
    };
    let mut staff: Vec<Process> = (0..CLERKS + 2).map(|n| start(n, 0).spawn()).collect();
    let begin = std::time::Instant::now();
    let (mut killed, mut audits) = (0, 0);
    while begin.elapsed() < seconds() {
        std::thread::sleep(Duration::from_micros(rng.below(12_000)));
        if kills {
            killed += 1;
            let n = rng.below(staff.len() as u64);
            staff[n as usize].kill();
            staff[n as usize] = start(n, killed).spawn();
        }
        let tx = db.begin().expect("begin");
        audit(ACCOUNTS, |key| tx.get(key)).expect("an audit meanwhile");
        drop(tx);
        audits += 1;
        if audits % 50 == 0 {
            staff = staff.into_iter().map(Process::demand_running).collect();
            lab::demand_clean(&db, "meanwhile");
        }
    }
    board.stop();
    for member in staff {
        member.succeed(PATIENCE);
    }
    audit(ACCOUNTS, |key| db.get(key)).expect("the last audit");
    lab::demand_clean(&db, "at the end");
    let count = |mark| board.mark(mark).load(Ordering::Relaxed);
    let (transfers, by_others) = (count(TRANSFERS), count(AUDITS));
    println!("{transfers} transfers, {} audits, {killed} kills", audits + by_others);
    assert!(transfers > 500 && by_others > 5, "{transfers} transfers, {by_others} audits");
    drop(db);
    let db = Db::open(lab.database()).expect("open after the last close");
    audit(ACCOUNTS, |key| db.get(key)).expect("an audit after the last close");
}

#[test]
fn a_bank_has_the_same_total_at_any_time() {
    bank(&mut Options::new(), false);
}

#[test]
fn a_bank_whose_staff_is_killed_has_the_same_total_at_any_time() {
    bank(Options::new().checkpoint_log_bytes(256 << 10), true);
}

/// Histories of processes, some killed, and whether an order explains them.
fn order(kills: bool) {
    const KEYS: u64 = 30;
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = Db::create(lab.database()).expect("create");
    let mut written = 0;
    let mut start = || {
        written += 1;
        lab.worker("historian")
            .path("board", &lab.board())
            .path("history", &lab.dir().join(format!("history-{written}")))
            .arg("keys", KEYS)
            .arg("me", written)
            .arg("seed", mix(seed ^ written))
            .spawn()
    };
    let mut writers: Vec<Process> = (0..6).map(|_| start()).collect();
    let begin = std::time::Instant::now();
    while begin.elapsed() < seconds() && board.mark(0).load(Ordering::Relaxed) < 200_000 {
        std::thread::sleep(Duration::from_millis(rng.below(15)));
        if kills {
            let n = rng.below(writers.len() as u64) as usize;
            writers[n].kill();
            writers[n] = start();
        }
    }
    board.stop();
    for writer in writers {
        writer.succeed(PATIENCE);
    }
    let last: Vec<(u64, u64)> = (0..KEYS)
        .map(|key| {
            let value = db.get(&key.to_le_bytes()).expect("get");
            (key, value.map_or(0, |v| u64::from_le_bytes(*v.first_chunk().expect("a version"))))
        })
        .collect();
    let entries: Vec<Entry> = (1..=written)
        .flat_map(|n| {
            let path = lab.dir().join(format!("history-{n}"));
            history::parse(&std::fs::read_to_string(path).unwrap_or_default())
        })
        .collect();
    let committed = history::demand_order(&entries, &last).expect("an order");
    println!("{} transactions of {written} processes, {committed} committed", entries.len());
    assert!(committed > 500, "only {committed} transactions");
    lab::demand_clean(&db, "at the end");
}

#[test]
fn there_is_an_order_that_explains_what_they_saw() {
    order(false);
}

#[test]
fn there_is_an_order_also_when_they_are_killed() {
    order(true);
}
