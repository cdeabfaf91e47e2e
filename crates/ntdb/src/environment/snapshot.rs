//! Snapshots that this process holds.

use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::checkpoint::snapshot::{self, Snap};
use crate::error::{Error, Result};
use crate::space::snapshots;
use crate::storage::fork;

use super::Environment;

/// A registered snapshot, released when it is dropped.
#[derive(Debug)]
pub struct Held {
    /// What it is of.
    pub environment: Arc<Environment>,
    /// What it is.
    pub snap: Snap,
    fork_generation: u64,
}

impl Held {
    /// Holds the present state. Threads of one process share a registration as long as nothing changes.
    pub fn now(environment: &Arc<Environment>, deadline: Option<Instant>) -> Result<Arc<Held>> {
        environment.ensure_session()?;
        let core = &environment.core;
        let mut last = environment.last_snapshot.lock();
        // The tail, since a change that somebody can see has advanced it before.
        let is_present =
            |held: &Held| held.snap.registered.lsn.0 == core.control().writer.tail.load(Acquire);
        if let Some(held) = last.upgrade()
            && is_present(&held)
            && held.check().is_ok()
        {
            return Ok(held);
        }
        // Others need not wait for one who waits for the writer lock.
        drop(last);
        let snap = snapshot::open(core, deadline)?;
        let fork_generation = fork::generation();
        let held = Arc::new(Held { environment: environment.clone(), snap, fork_generation });
        last = environment.last_snapshot.lock();
        *last = Arc::downgrade(&held);
        Ok(held)
    }

    /// An error in a forked child, where it holds nothing.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.fork_generation == fork::generation() {
            return Ok(());
        }
        Err(Error::Forked { path: self.environment.core.path.clone() })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.fork_generation == fork::generation() {
            let registered = &self.snap.registered;
            snapshots::release(&self.environment.core, registered.index, registered.owner);
        }
    }
}

/// The snapshot opened last, if it is still held.
pub type Last = Weak<Held>;
