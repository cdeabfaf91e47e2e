//! Readers and writers of single records, for a set time.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::job::Done;
use crate::mixed::is_over;
use crate::session::{Result, Session, wrong};

/// Bytes of a value.
const VALUE_BYTES: usize = 8;

/// What one client does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Work {
    /// So many of a hundred operations are updates.
    pub write_percent: u32,
    /// Records that there are.
    pub records: u64,
    /// How long.
    pub seconds: f64,
    /// What all chance follows from.
    pub seed: u64,
}

fn key(number: u64) -> [u8; 8] {
    number.to_le_bytes()
}

/// Inserts the records at the start.
pub fn load(session: &mut impl Session, records: u64) -> Result<()> {
    session.load(&mut (0..records).map(|n| (key(n).to_vec(), vec![0; VALUE_BYTES])))
}

/// Does one client's work.
pub fn work(session: &mut impl Session, work: &Work) -> Result<Done> {
    let limit = Duration::try_from_secs_f64(work.seconds)?;
    let mut rng = SmallRng::seed_from_u64(work.seed);
    let mut found = Vec::with_capacity(VALUE_BYTES);
    let mut operations = 0;
    let begin = Instant::now();
    while !is_over(begin, operations, limit) {
        let number = rng.random_range(0..work.records.max(1));
        let is_write = work.write_percent > 0 && rng.random_range(0..100) < work.write_percent;
        if is_write {
            session.put(&key(number), &operations.to_le_bytes())?;
        } else if !session.get(&key(number), &mut found)? {
            return Err(wrong(format!("record {number} is not there")));
        }
        operations += 1;
    }
    Ok(Done { operations, took: begin.elapsed(), ..Done::default() })
}
