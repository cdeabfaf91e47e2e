//! What transactions cost without their sync: `cargo bench -p ntdb --bench transactions [-- ACCOUNTS]`.
//!
//! Prints nanoseconds, the median of seven rounds: begin, one put and a relaxed commit, among records of four bytes; and the
//! transaction of TPC-B, on records of 100 bytes: an account, a teller and a branch are read and get a new balance, the account
//! is read back, and a row of history is inserted.

use std::hint::black_box;
use std::time::Instant;

use ntdb::{Db, Options, Transaction};

const ROW_BYTES: usize = 100;
const TELLERS: u64 = 100;
const BRANCHES: u64 = 10;

/// The median of seven rounds, in nanoseconds.
fn time(rounds: u64, mut operation: impl FnMut(u64)) -> f64 {
    let mut begun = 0;
    let mut values: Vec<f64> = (0..7)
        .map(|_| {
            let start = Instant::now();
            (begun..begun + rounds).for_each(&mut operation);
            begun += rounds;
            start.elapsed().as_nanos() as f64 / rounds as f64
        })
        .collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Some number below `most` that follows from `n`.
fn scattered(n: u64, most: u64) -> u64 {
    (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % most
}

fn key(table: u8, number: u64) -> [u8; 9] {
    let mut key = [table; 9];
    key[1..].copy_from_slice(&number.to_le_bytes());
    key
}

fn pay(tx: &mut Transaction, key: &[u8], delta: i64) {
    let mut row = [0u8; ROW_BYTES];
    assert_eq!(tx.get_into(key, &mut row).expect("get"), Some(ROW_BYTES));
    let balance = i64::from_le_bytes(row[..8].try_into().expect("eight bytes")) + delta;
    row[..8].copy_from_slice(&balance.to_le_bytes());
    tx.put(key, &row).expect("put");
}

fn transfer(db: &Db, accounts: u64, n: u64) {
    let delta = (n % 1_000) as i64 - 500;
    let account = key(b'a', scattered(n, accounts));
    let mut tx = db.begin().expect("begin");
    pay(&mut tx, &account, delta);
    let mut row = [0u8; ROW_BYTES];
    black_box(tx.get_into(&account, &mut row).expect("get"));
    pay(&mut tx, &key(b't', n % TELLERS), delta);
    pay(&mut tx, &key(b'b', n % BRANCHES), delta);
    assert!(tx.insert(&key(b'h', n), &row).expect("insert"));
    tx.commit_relaxed().expect("commit");
}

fn main() {
    let accounts: u64 =
        std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(1_000_000);
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
    let open = |name| Options::new().create(true).open(dir.path().join(name)).expect("a new one");
    for records in [1_000u64, 100_000] {
        let db = open(format!("{records}.ntdb"));
        let put = |n: u64| {
            let key = (scattered(n, records) as u32).to_le_bytes();
            let mut tx = db.begin().expect("begin");
            tx.put(&key, &(n as u32).to_le_bytes()).expect("put");
            tx.commit_relaxed().expect("commit");
        };
        let ns = time(100_000, put);
        println!("begin, put, relaxed commit; {records:7} records  {ns:8.0} ns");
    }
    let db = open("bank.ntdb".into());
    let row = [0u8; ROW_BYTES];
    for (table, count) in [(b'a', accounts), (b't', TELLERS), (b'b', BRANCHES)] {
        (0..count).for_each(|n| db.put(&key(table, n), &row).expect("put"));
    }
    let ns = time(50_000, |n| transfer(&db, accounts, n));
    println!("TPC-B, relaxed commit; {accounts:9} accounts  {ns:8.0} ns");
}
