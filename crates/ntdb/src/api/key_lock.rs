//! Key locks as users hold them.
//!
//! After taking a stripe the locker takes and drops the writer lock once: whoever was changing the key at that moment has
//! finished then, and everybody later sees the stripe.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use crate::core::Core;
use crate::error::Result;
use crate::shm::stripe::stripe_of;
use crate::storage::failpoint::crash_point;
use crate::storage::fork;
use crate::transaction::claim;
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
    is_counted: bool,
    /// Stripes are held by threads.
    not_send: PhantomData<*const ()>,
}

impl fmt::Debug for KeyLock<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyLock").field("db", self.db).finish_non_exhaustive()
    }
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
            is_counted: false,
            not_send: PhantomData,
        };
        let since = Instant::now();
        // The transaction would wait for this lock, and this lock for the transaction.
        db.check_waits_for_itself(false)?;
        let has_others = holds_any(db);
        lock.count(1);
        loop {
            for &index in &wanted {
                if !take_stripe(core, index, patience, deadline)? {
                    return Ok(None);
                }
                lock.stripes.push(index);
            }
            crash_point("key.locked");
            // Whoever was writing when the stripes were taken has finished after this.
            let writer = Writer::lock(core, deadline)?;
            let claimant = claim::claimed_by(core);
            drop(writer);
            // One who holds keys already may have to take this one, too, before it can give any back.
            let Some(claimant) = claimant.filter(|_| !has_others) else { return Ok(Some(lock)) };
            lock.give_back();
            if patience == Patience::Try {
                return Ok(None);
            }
            lock.count(-1);
            while claim::claimed_by(core) == Some(claimant) {
                claim::wait(core, claimant, since, deadline)?;
            }
            lock.count(1);
        }
    }

    /// Counts this lock among those of the process and of the thread, or not any more.
    fn count(&mut self, change: i32) {
        let core = &self.db.environment().core;
        let held = &core.shm.process(core.slot().0 as usize).keys_held;
        let id = std::ptr::from_ref(&**self.db.environment()) as usize;
        self.is_counted = change > 0;
        if change > 0 {
            // Before a stripe is taken, so that a transaction that sees nobody counted sees no stripe held.
            core.control().log.keys_held.fetch_add(1, SeqCst);
            held.fetch_add(1, SeqCst);
            HELD.with_borrow_mut(|held| held.push((id, self.fork_generation)));
        } else {
            held.fetch_sub(1, SeqCst);
            core.control().log.keys_held.fetch_sub(1, SeqCst);
            HELD.with_borrow_mut(|held| {
                if let Some(index) = held.iter().rposition(|entry| entry.0 == id) {
                    held.remove(index);
                }
            });
        }
    }

    fn give_back(&mut self) {
        let core = &self.db.environment().core;
        for index in self.stripes.drain(..) {
            core.shm.stripe(index).release(core.slot());
        }
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
        self.give_back();
        if self.is_counted {
            self.count(-1);
        }
    }
}

thread_local! {
    /// The key locks of this thread: environment, and the fork generation in which it was taken.
    static HELD: RefCell<Vec<(usize, u64)>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread holds a key lock of the database.
pub fn holds_any(db: &Db) -> bool {
    let id = std::ptr::from_ref(&**db.environment()) as usize;
    let generation = fork::generation();
    HELD.with_borrow(|held| held.contains(&(id, generation)))
}
