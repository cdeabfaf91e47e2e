//! Pairs of mapped identities: what an identity map is asked for, and what smbtorture's `local.dbspeed` measures.
//!
//! Each pair is two records, from `UID n` to a security identifier, and back. Pairs are stored for a set time, and then those that are
//! there are looked up for as long, in both directions.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::job::Done;
use crate::mixed::is_over;
use crate::session::{Result, Session, wrong};

/// After so many pairs, storing begins again with the first.
pub const PAIRS: u64 = 100_000;

/// What one client does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Work {
    /// Store, or fetch.
    pub phase: Phase,
    /// How long.
    pub seconds: f64,
    /// How many pairs there are to be fetched.
    pub pairs: u64,
    /// What all chance follows from.
    pub seed: u64,
}

/// The two phases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Phase {
    /// Pairs are stored.
    Store,
    /// They are looked up, both ways in turn.
    Fetch,
}

fn uid(n: u64) -> String {
    format!("UID {n}")
}

fn sid(n: u64) -> String {
    format!("S-1-5-21-1004336348-1177238915-682003330-{n}")
}

/// Does the work: an operation is a record.
pub fn work(session: &mut impl Session, work: &Work) -> Result<Done> {
    let limit = Duration::try_from_secs_f64(work.seconds)?;
    let mut rng = SmallRng::seed_from_u64(work.seed);
    let mut found = Vec::new();
    let begin = Instant::now();
    let mut operations = 0;
    while !is_over(begin, operations, limit) {
        match work.phase {
            Phase::Store => {
                let n = operations / 2 % PAIRS;
                session.put(uid(n).as_bytes(), sid(n).as_bytes())?;
                session.put(sid(n).as_bytes(), uid(n).as_bytes())?;
            }
            Phase::Fetch => {
                let n = rng.random_range(0..work.pairs.max(1));
                for (key, expected) in [(uid(n), sid(n)), (sid(n), uid(n))] {
                    if !session.get(key.as_bytes(), &mut found)? || found != expected.as_bytes() {
                        return Err(wrong(format!("{key}: not {expected}, as was stored")));
                    }
                }
            }
        }
        operations += 2;
    }
    Ok(Done { operations, took: begin.elapsed(), ..Done::default() })
}
