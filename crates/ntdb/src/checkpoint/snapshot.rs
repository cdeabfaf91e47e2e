//! Opening a snapshot: a freeze, or a share in one, registered in the same hold of the writer lock.
//!
//! If nothing has changed since a state was frozen, neither a record nor where the tree has it, and that is still held (by the
//! snapshot registered last, or by the running or the durable checkpoint), the new snapshot shares its epoch and root; else a new
//! epoch begins. An open transaction is not in it
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
    let root = lookup::current_root(core).to_word();
    let shared = frozen_already(core, root)?;
    let registered = snapshots::register(writer, root, shared)?;
    Ok(Snap { registered, root: Root::from_word(registered.root), count })
}

/// Epoch and root of a state that is frozen, held, and the same as the present one, whose root is `root`.
///
/// The log's end alone does not tell: steps that a user cannot see, such as joins and compaction, log nothing, and a snapshot of the
/// tree before them would keep what they have replaced. They copy what is frozen from the root down, so they give another root.
fn frozen_already(core: &Core, root: u64) -> Result<Option<(Epoch, u64)>> {
    let control = core.control();
    let tail = control.writer.tail.load(Relaxed);
    let is_present = |lsn: u64, frozen: u64| lsn == tail && frozen == root;
    if let Some(last) = snapshots::last(core)?
        && is_present(last.lsn.0, last.root)
    {
        return Ok(Some((last.epoch, root)));
    }
    if !matches!(core.backing, Backing::Shared | Backing::SharedReadOnly) {
        return Ok(None);
    }
    let words = &control.checkpoint;
    if words.phase.load(Relaxed) != phase::IDLE
        && is_present(words.running_lsn.load(Relaxed), words.running_root.load(Relaxed))
    {
        return Ok(Some((Epoch(words.running_epoch.load(Relaxed)), root)));
    }
    if is_present(words.durable_lsn.load(Relaxed), words.durable_root.load(Relaxed)) {
        return Ok(Some((Epoch(words.durable_epoch.load(Relaxed)), root)));
    }
    Ok(None)
}
