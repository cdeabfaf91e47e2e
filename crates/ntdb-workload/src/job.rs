//! What one client does, and what came of it: both can be sent to another process.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::latency::Counts;
use crate::session::{Result, Session};
use crate::{mapping, mixed, tpcb, traffic};

/// The work of one client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Of [`tpcb`].
    Tpcb(tpcb::Work),
    /// Of [`mixed`].
    Mixed(mixed::Work),
    /// Of [`mapping`].
    Mapping(mapping::Work),
    /// Of [`traffic`].
    Traffic(traffic::Work),
}

/// What a client has done.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    /// How many operations, or transactions.
    pub operations: u64,
    /// How long they took.
    pub took: Duration,
    /// How long each took, if that was measured.
    pub latencies: Counts,
}

impl Job {
    /// Does it.
    pub fn run(&self, session: &mut impl Session) -> Result<Done> {
        match self {
            Job::Tpcb(work) => tpcb::work(session, work),
            Job::Mixed(work) => mixed::work(session, work),
            Job::Mapping(work) => mapping::work(session, work),
            Job::Traffic(work) => traffic::work(session, work),
        }
    }
}
