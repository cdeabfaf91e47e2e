//! The freeze: one step that copies the root and opens a new epoch.

use std::sync::atomic::Ordering::*;

use crate::error::Result;
use crate::index::locate::Root;
use crate::log::flush::NO_SWITCH;
use crate::shm::layout::phase;
use crate::storage::failpoint::crash_point;
use crate::storage::filesystem;
use crate::transaction::step::{IN_SHM, Step};
use crate::transaction::writer::Writer;
use crate::types::{Epoch, Lsn};

/// A state of the database that will not change any more.
#[derive(Clone, Copy, Debug)]
pub struct Frozen {
    /// Its epoch; its pages have this one or older ones.
    pub epoch: Epoch,
    /// Its root.
    pub root: Root,
    /// Its number of records.
    pub count: u64,
    /// The first change that is not in it.
    pub lsn: Lsn,
    /// The first log record that is still needed: the first chunk of a large operation under way, or `lsn`.
    pub keep_from: Lsn,
    /// Salt of the log record that ends at `lsn`.
    pub last_salt: u64,
}

/// Freezes the present state for a checkpoint (or for a check, which publishes nothing), whose lock the caller holds.
/// A checkpoint switches logs if the other file is free.
pub fn freeze(writer: &mut Writer, may_switch: bool) -> Result<Frozen> {
    let core = writer.core;
    let control = core.control();
    let words = &control.writer;
    let frozen = Frozen {
        epoch: Epoch(words.epoch.load(Relaxed)),
        root: Root::from_word(control.readers.root.load(Relaxed)),
        count: words.count.load(Relaxed),
        lsn: Lsn(words.tail.load(Relaxed)),
        keep_from: match control.log.claim_first.load(Relaxed) {
            0 => Lsn(words.tail.load(Relaxed)),
            first => Lsn(first - 1).min(Lsn(words.tail.load(Relaxed))),
        },
        last_salt: words.last_salt(),
    };
    // Of no meaning before the phase is stored.
    let running = &control.checkpoint;
    running.running_epoch.store(frozen.epoch.0, Relaxed);
    running.running_root.store(frozen.root.to_word(), Relaxed);
    running.running_count.store(frozen.count, Relaxed);
    running.running_lsn.store(frozen.lsn.0, Relaxed);
    running.growth_limit.store(u32::MAX, Relaxed);
    let log = &control.log;
    let switch = may_switch
        && log.exists.load(Relaxed) == 1
        && log.other_needed.load(Relaxed) == 0
        && log.switch_at.load(Relaxed) == NO_SWITCH
        && frozen.lsn.0 > log.start.load(Relaxed);
    let salt = if switch {
        let salt = filesystem::random_u64().map_err(|e| core.io("get a random number", e))?.max(1);
        log.switch_salt.store(salt, Relaxed);
        log.switch_index.store(1 - (log.index.load(Relaxed) & 1), Relaxed);
        log.switch_incarnation.store(log.incarnation.load(Relaxed).wrapping_add(1), Relaxed);
        Some(salt)
    } else {
        None
    };
    let mut step = Step::begin(writer);
    step.store_shared(&words.epoch, frozen.epoch.0 + 1);
    let place = core.shm.offset_of(&running.phase) | IN_SHM;
    step.store(place, 4, 1, phase::WRITING as u64);
    if let Some(salt) = salt {
        step.store_shared(&words.salt_before, words.salt.load(Relaxed));
        step.store_shared(&words.salt_from, frozen.lsn.0);
        step.store_shared(&words.salt, salt);
        step.store_shared(&log.switch_at, frozen.lsn.0);
    }
    crash_point("freeze.prepared");
    step.structure()?;
    crash_point("freeze.done");
    Ok(frozen)
}
