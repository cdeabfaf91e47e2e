//! The core workloads of YCSB (Cooper and others, "Benchmarking cloud serving systems with YCSB", 2010), as far as a store without
//! an order of keys can do them: a scan goes on from the record that it begins with in the engine's own order.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Zipf};
use serde::{Deserialize, Serialize};

use crate::job::Done;
use crate::latency::Latencies;
use crate::session::{Result, Session, wrong};

/// The exponent of YCSB's zipfian distribution.
const EXPONENT: f64 = 0.99;
/// A scan reads so many records at most.
const SCAN_MOST: usize = 100;

/// One of the six mixes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Mix {
    /// Half reads, half updates.
    A,
    /// 95 % reads, 5 % updates.
    B,
    /// Reads only.
    C,
    /// 95 % reads, mostly of what was inserted last, 5 % inserts.
    D,
    /// 95 % scans, 5 % inserts.
    E,
    /// Half reads, half updates of what was just read, in a transaction.
    F,
}

impl Mix {
    /// All of them.
    pub const ALL: [Mix; 6] = [Mix::A, Mix::B, Mix::C, Mix::D, Mix::E, Mix::F];

    /// Percent of operations that are no reads or scans.
    fn write_percent(self) -> u32 {
        match self {
            Mix::A | Mix::F => 50,
            Mix::B | Mix::D | Mix::E => 5,
            Mix::C => 0,
        }
    }

    /// What it is, in words.
    pub fn describe(self) -> &'static str {
        match self {
            Mix::A => "50 % reads, 50 % updates",
            Mix::B => "95 % reads, 5 % updates",
            Mix::C => "reads",
            Mix::D => "95 % reads of the latest, 5 % inserts",
            Mix::E => "95 % scans, 5 % inserts",
            Mix::F => "50 % reads, 50 % read and update",
        }
    }
}

/// What one client does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Work {
    /// Which mix.
    pub mix: Mix,
    /// Records at the start.
    pub records: u64,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Operations to do.
    pub operations: u64,
    /// Whether each change is on disk before the next operation.
    pub durable: bool,
    /// Which client it is, and of how many: their inserts don't meet.
    pub client: u64,
    /// See `client`.
    pub clients: u64,
    /// What all chance follows from.
    pub seed: u64,
}

/// A key spreads popular records over all of the store.
fn key(number: u64) -> [u8; 12] {
    let mut key = *b"user........";
    key[4..].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

fn value(number: u64, version: u64, bytes: usize) -> Vec<u8> {
    let mut value = vec![b'v'; bytes.max(16)];
    value[..8].copy_from_slice(&number.to_le_bytes());
    value[8..16].copy_from_slice(&version.to_le_bytes());
    value
}

/// Inserts the records at the start.
pub fn load(session: &mut impl Session, records: u64, value_bytes: usize) -> Result<()> {
    session.load(&mut (0..records).map(|n| (key(n).to_vec(), value(n, 0, value_bytes))))
}

/// Does one client's work.
pub fn work(session: &mut impl Session, work: &Work) -> Result<Done> {
    let zipf = Zipf::new(work.records as f64, EXPONENT)
        .map_err(|error| wrong(format!("{} records: {error}", work.records)))?;
    let mut client = Client {
        work,
        rng: SmallRng::seed_from_u64(work.seed),
        zipf,
        inserted: 0,
        found: Vec::with_capacity(work.value_bytes),
    };
    let mut latencies = Latencies::default();
    let begin = Instant::now();
    for n in 0..work.operations {
        // Two looks at the clock are not to be a good part of what they measure.
        let started = (work.durable || n.is_multiple_of(16)).then(Instant::now);
        client.operate(session, n)?;
        if let Some(started) = started {
            latencies.record(started.elapsed());
        }
    }
    Ok(Done { operations: work.operations, took: begin.elapsed(), latencies: latencies.counts() })
}

struct Client<'a> {
    work: &'a Work,
    rng: SmallRng,
    zipf: Zipf<f64>,
    inserted: u64,
    found: Vec<u8>,
}

impl Client<'_> {
    /// How far down the list of the most popular.
    fn rank(&mut self) -> u64 {
        (self.zipf.sample(&mut self.rng) as u64).saturating_sub(1).min(self.work.records - 1)
    }

    /// The number of this client's insert.
    fn own(&self, insert: u64) -> u64 {
        self.work.records + insert * self.work.clients + self.work.client
    }

    fn operate(&mut self, session: &mut impl Session, n: u64) -> Result<()> {
        let Work { mix, durable, value_bytes, .. } = *self.work;
        let is_write = self.rng.random_range(0..100) < mix.write_percent();
        let rank = self.rank();
        match (mix, is_write) {
            (Mix::E, false) => {
                let count = self.rng.random_range(1..=SCAN_MOST);
                session.scan(self.rng.random(), count).map(drop)
            }
            (Mix::D, false) if rank < self.inserted => {
                self.read(session, self.own(self.inserted - 1 - rank))
            }
            (Mix::D, false) => self.read(session, self.work.records - 1 - rank),
            (_, false) => self.read(session, rank),
            (Mix::D | Mix::E, true) => {
                let number = self.own(self.inserted);
                self.inserted += 1;
                write(session, durable, number, &value(number, n, value_bytes))
            }
            (Mix::F, true) => {
                let found = &mut self.found;
                session.transaction(durable, &mut |all| {
                    if !all.get(&key(rank), found)? {
                        return Err(missing(rank));
                    }
                    found[8..16].copy_from_slice(&n.to_le_bytes());
                    all.put(&key(rank), found)
                })
            }
            (_, true) => write(session, durable, rank, &value(rank, n, value_bytes)),
        }
    }

    fn read(&mut self, session: &mut impl Session, number: u64) -> Result<()> {
        if !session.get(&key(number), &mut self.found)? {
            return Err(missing(number));
        }
        if self.found.first_chunk() != Some(&number.to_le_bytes()) {
            return Err(wrong(format!("record {number} has another one's value")));
        }
        Ok(())
    }
}

fn missing(number: u64) -> crate::session::Failed {
    wrong(format!("record {number} is not there"))
}

fn write(session: &mut impl Session, durable: bool, number: u64, value: &[u8]) -> Result<()> {
    if durable {
        return session.transaction(true, &mut |all| all.put(&key(number), value));
    }
    session.put(&key(number), value)
}

/// Whether all records of the start are there, each with its own value; returns how many there are in all.
pub fn verify(session: &mut impl Session, records: u64) -> Result<u64> {
    let (mut all, mut strange) = (0, None);
    session.for_each(&mut |found, value| {
        all += 1;
        let number = value.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        if number.is_none_or(|number| key(number) != *found) {
            strange = Some(found.to_vec());
        }
    })?;
    match strange {
        Some(key) => Err(wrong(format!("the value of {key:?} is another one's"))),
        None if all < records => Err(wrong(format!("{all} records of {records}"))),
        None => Ok(all),
    }
}

/// A limit for what takes time, so that a run ends.
pub fn is_over(begin: Instant, n: u64, limit: Duration) -> bool {
    n.is_multiple_of(64) && begin.elapsed() >= limit
}
