//! Key locks as users hold them.
//!
//! After taking a stripe the locker takes and drops the writer lock once: whoever was changing the key at that moment has
//! finished then, and everybody later sees the stripe.

use std::fmt;
use std::marker::PhantomData;
use std::time::Instant;

use crate::core::Core;
use crate::error::Result;
use crate::limits::KEY_STRIPES;
use crate::storage::failpoint::crash_point;
use crate::storage::fork;
use crate::transaction::writer::Writer;

use super::db::Db;

/// One or more held key locks; see [`Db::lock`]. Dropping it releases them.
///
/// It belongs to the thread that took it and cannot be sent to another. In a forked child it means nothing, and dropping it
/// there does nothing.
pub struct KeyLock<'db> {
    db: &'db Db,
    /// The stripes, in ascending order.
    stripes: Vec<usize>,
    fork_generation: u64,
    /// Stripes are held by threads.
    not_send: PhantomData<*const ()>,
}

impl fmt::Debug for KeyLock<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyLock").field("db", self.db).finish_non_exhaustive()
    }
}

/// The stripe of a hash.
#[inline]
pub fn stripe_of(hash: u64) -> usize {
    // Bits that choose neither the directory nor the tag, so that neighbours in a bucket rarely share a stripe.
    (hash >> 23) as usize % KEY_STRIPES
}

/// Whether to wait.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// As long as the lock time-out allows.
    Wait,
    /// Not at all.
    Try,
}

impl<'db> KeyLock<'db> {
    pub(crate) fn take(
        db: &'db Db,
        hashes: &mut dyn Iterator<Item = u64>,
        patience: Patience,
        deadline: Option<Instant>,
    ) -> Result<Option<KeyLock<'db>>> {
        let core = &db.environment().core;
        let mut wanted: Vec<usize> = hashes.map(stripe_of).collect();
        // One order for all, so that two who lock several keys cannot wait for each other.
        wanted.sort_unstable();
        wanted.dedup();
        let mut lock = KeyLock {
            db,
            stripes: Vec::with_capacity(wanted.len()),
            fork_generation: fork::generation(),
            not_send: PhantomData,
        };
        for index in wanted {
            if !take_stripe(core, index, patience, deadline)? {
                return Ok(None);
            }
            lock.stripes.push(index);
        }
        crash_point("key.locked");
        // Whoever was writing when the stripes were taken has finished after this.
        drop(Writer::lock(core, deadline)?);
        Ok(Some(lock))
    }

    /// Whether the process has forked since the lock was taken, and this is the child, which does not hold it.
    pub fn is_stale(&self) -> bool {
        self.fork_generation != fork::generation()
    }
}

fn take_stripe(
    core: &Core,
    index: usize,
    patience: Patience,
    deadline: Option<Instant>,
) -> Result<bool> {
    let stripe = core.shm.stripe(index);
    let me = core.slot();
    if patience == Patience::Try {
        if stripe.try_acquire(me) {
            return Ok(true);
        }
        // A dead holder is no reason to say no.
        return Ok(
            stripe.release_if_dead(me, &|slot| core.is_alive(slot)) && stripe.try_acquire(me)
        );
    }
    let begin = Instant::now();
    stripe
        .acquire(me, deadline, &|slot| core.is_alive(slot))
        .map(|()| true)
        .map_err(|owner| core.locked("a key lock", owner, begin.elapsed()))
}

impl Drop for KeyLock<'_> {
    fn drop(&mut self) {
        if self.is_stale() {
            return;
        }
        let core = &self.db.environment().core;
        for &index in &self.stripes {
            core.shm.stripe(index).release(core.slot());
        }
    }
}
