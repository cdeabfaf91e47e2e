//! Opening a snapshot: a freeze, or a share in one, registered in the same hold of the writer lock.
//!
//! If nothing has changed since a state was frozen, and that is still held (by the snapshot registered last, or by the running or
//! the durable checkpoint), the new snapshot shares its epoch and root; else a new epoch begins. An open transaction is not in it
//! and is not waited for.

use std::sync::atomic::Ordering::*;
use std::time::Instant;

use crate::core::{Backing, Core};
use crate::error::Result;
use crate::index::locate::{self, Root};
use crate::index::lookup;
use crate::shm::layout::phase;
use crate::space::snapshots::{self, Registered};
use crate::transaction::writer::Writer;
use crate::types::Epoch;

/// A registered snapshot, which its owner has to release.
#[derive(Clone, Copy, Debug)]
pub struct Snap {
    /// As others see it.
    pub registered: Registered,
    /// Where its tree begins.
    pub root: Root,
    /// Its number of records.
    pub count: u64,
}

/// Opens one.
pub fn open(core: &Core, deadline: Option<Instant>) -> Result<Snap> {
    let mut writer = Writer::lock(core, deadline)?;
    let snap = open_locked(&mut writer)?;
    drop(writer);
    // Known from now on: that all of the root array is within the file.
    let checked = match snap.root.depth {
        None => Ok(()),
        Some(depth) => locate::check_array(core, snap.root.page, depth).and_then(|()| {
            core.run(snap.root.page, locate::array_pages(core.page_size, depth)).map(drop)
        }),
    };
    if let Err(error) = checked {
        snapshots::release(core, snap.registered.index, snap.registered.owner);
        return Err(error);
    }
    Ok(snap)
}

/// As [`open`], for one who holds the writer lock.
pub fn open_locked(writer: &mut Writer) -> Result<Snap> {
    let core = writer.core;
    let count = core.control().writer.count.load(Relaxed);
    let shared = frozen_already(core)?;
    let root = lookup::current_root(core).to_word();
    let registered = snapshots::register(writer, root, shared)?;
    Ok(Snap { registered, root: Root::from_word(registered.root), count })
}

/// Epoch and root of a state that is frozen, held, and the same as the present one.
fn frozen_already(core: &Core) -> Result<Option<(Epoch, u64)>> {
    let control = core.control();
    let tail = control.writer.tail.load(Relaxed);
    if let Some(last) = snapshots::last(core)?
        && last.lsn.0 == tail
    {
        return Ok(Some((last.epoch, last.root)));
    }
    if !matches!(core.backing, Backing::Shared | Backing::SharedReadOnly) {
        return Ok(None);
    }
    let words = &control.checkpoint;
    if words.phase.load(Relaxed) != phase::IDLE && words.running_lsn.load(Relaxed) == tail {
        let epoch = Epoch(words.running_epoch.load(Relaxed));
        return Ok(Some((epoch, words.running_root.load(Relaxed))));
    }
    if words.durable_lsn.load(Relaxed) == tail {
        let epoch = Epoch(words.durable_epoch.load(Relaxed));
        return Ok(Some((epoch, words.durable_root.load(Relaxed))));
    }
    Ok(None)
}
