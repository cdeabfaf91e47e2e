//! The transaction of TPC-B as pgbench has it, on records of keys and values.
//!
//! There are accounts, and for each hundred thousand of them ten tellers and a branch. A transaction takes one of each at random, adds
//! a random sum to the balance of all three, reads the account back, and inserts a record of history. So the sums over accounts, tellers,
//! branches and history are the same at any time, and each transaction that was acknowledged is in the history.

use std::time::Instant;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::job::Done;
use crate::latency::Latencies;
use crate::session::{Access, Result, Session, wrong};

/// Accounts for each unit of scale.
pub const ACCOUNTS: u64 = 100_000;
/// Tellers for each unit of scale.
pub const TELLERS: u64 = 10;
/// Bytes of a row, as pgbench has it.
pub const ROW_BYTES: usize = 100;
/// The sum that moves is at most this, either way.
const MOST: i64 = 5_000;

/// The tables; their letters begin the keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Table {
    /// Accounts.
    Account = b'a',
    /// Tellers.
    Teller = b't',
    /// Branches.
    Branch = b'b',
    /// What happened.
    History = b'h',
}

/// The key of a row: a letter and its number, big-endian.
pub fn key(table: Table, number: u64) -> [u8; 9] {
    let mut key = [table as u8; 9];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

/// What one client does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Work {
    /// Units of scale.
    pub scale: u64,
    /// Transactions to make.
    pub transactions: u64,
    /// Whether each is on disk before the next.
    pub durable: bool,
    /// Bytes by which each update makes a row longer; they are taken away again when it has ten times [`ROW_BYTES`].
    pub grow_bytes: usize,
    /// The number of its first record of history; nobody else's are in the range that begins there.
    pub first_history: u64,
    /// What all chance follows from.
    pub seed: u64,
}

/// Inserts the rows at the start, with balances of zero.
pub fn load(session: &mut impl Session, scale: u64) -> Result<()> {
    let tables = [
        (Table::Branch, scale),
        (Table::Teller, scale * TELLERS),
        (Table::Account, scale * ACCOUNTS),
    ];
    let keys = tables.iter().flat_map(|&(table, count)| (0..count).map(move |n| key(table, n)));
    session.load(&mut keys.map(|key| (key.to_vec(), vec![0; ROW_BYTES])))
}

fn balance(row: &[u8]) -> Result<i64> {
    let bytes = row.first_chunk().ok_or_else(|| wrong("a row is too short"))?;
    Ok(i64::from_le_bytes(*bytes))
}

/// Adds to a balance, and makes the row longer.
fn add(
    rows: &mut dyn Access,
    key: &[u8],
    delta: i64,
    grow_bytes: usize,
    row: &mut Vec<u8>,
) -> Result<()> {
    if !rows.get(key, row)? {
        return Err(wrong(format!("the row {key:?} is not there")));
    }
    let sum = balance(row)? + delta;
    row[..8].copy_from_slice(&sum.to_le_bytes());
    if grow_bytes > 0 {
        let len = row.len() + grow_bytes;
        row.resize(if len > 10 * ROW_BYTES { ROW_BYTES } else { len }, b'+');
    }
    rows.put(key, row)
}

/// Does one client's work.
pub fn work(session: &mut impl Session, work: &Work) -> Result<Done> {
    let mut rng = SmallRng::seed_from_u64(work.seed);
    let mut latencies = Latencies::default();
    let mut row = Vec::with_capacity(10 * ROW_BYTES);
    let begin = Instant::now();
    for n in 0..work.transactions {
        let account = key(Table::Account, rng.random_range(0..work.scale * ACCOUNTS));
        let teller = key(Table::Teller, rng.random_range(0..work.scale * TELLERS));
        let branch = key(Table::Branch, rng.random_range(0..work.scale));
        let history = key(Table::History, work.first_history + n);
        let delta = rng.random_range(-MOST..=MOST);
        let started = Instant::now();
        session.transaction(work.durable, &mut |rows| {
            add(rows, &account, delta, work.grow_bytes, &mut row)?;
            let sum = balance(&row)?;
            if !rows.get(&account, &mut row)? || balance(&row)? != sum {
                return Err(wrong("an account does not have the balance that it was given"));
            }
            add(rows, &teller, delta, work.grow_bytes, &mut row)?;
            add(rows, &branch, delta, work.grow_bytes, &mut row)?;
            let mut event = [b'.'; ROW_BYTES];
            event[..8].copy_from_slice(&delta.to_le_bytes());
            for (part, key) in event[8..].chunks_mut(9).zip([&account, &teller, &branch]) {
                part.copy_from_slice(key);
            }
            rows.put(&history, &event)
        })?;
        latencies.record(started.elapsed());
    }
    Ok(Done { operations: work.transactions, took: begin.elapsed(), latencies: latencies.counts() })
}

/// What all tables hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Sums {
    /// Over all accounts.
    pub accounts: i64,
    /// Over all tellers.
    pub tellers: i64,
    /// Over all branches.
    pub branches: i64,
    /// Over the history.
    pub history: i64,
    /// Records of history.
    pub transactions: u64,
}

/// Adds everything up, and compares: all sums are the same, all rows are there, and as many records of history as there should be.
pub fn verify(session: &mut impl Session, scale: u64, transactions: u64) -> Result<Sums> {
    let mut sums = Sums::default();
    let mut rows = [0u64; 3];
    let mut strange = None;
    session.for_each(&mut |key, value| match (key.first(), balance(value)) {
        (Some(b'a'), Ok(balance)) => {
            (sums.accounts, rows[0]) = (sums.accounts + balance, rows[0] + 1)
        }
        (Some(b't'), Ok(balance)) => {
            (sums.tellers, rows[1]) = (sums.tellers + balance, rows[1] + 1)
        }
        (Some(b'b'), Ok(balance)) => {
            (sums.branches, rows[2]) = (sums.branches + balance, rows[2] + 1);
        }
        (Some(b'h'), Ok(delta)) => {
            (sums.history, sums.transactions) = (sums.history + delta, sums.transactions + 1);
        }
        _ => strange = Some(key.to_vec()),
    })?;
    if let Some(key) = strange {
        return Err(wrong(format!("a record that nobody wrote: key {key:?}")));
    }
    if rows != [scale * ACCOUNTS, scale * TELLERS, scale] {
        return Err(wrong(format!(
            "{rows:?} accounts, tellers, branches: not as many as there were"
        )));
    }
    if [sums.accounts, sums.tellers, sums.branches] != [sums.history; 3] {
        return Err(wrong(format!("the sums differ: {sums:?}")));
    }
    if sums.transactions != transactions {
        let there = sums.transactions;
        return Err(wrong(format!("{there} records of history of {transactions} transactions")));
    }
    Ok(sums)
}
