//! Running a checkpoint.

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::{Backing, Core};
use crate::error::{Error, Result};
use crate::index::discard;
use crate::index::locate::Root;
use crate::index::walk::{self, Side};
use crate::log::flush::{Logs, check_poison};
use crate::options::deadline_after;
use crate::page::map::group_pages;
use crate::page::meta::{META_PAGES, Meta};
use crate::shm::layout::phase;
use crate::shm::lock::Acquired;
use crate::space::{patience, retire};
use crate::storage::failpoint::crash_point;
use crate::transaction::claim;
use crate::transaction::writer::Writer;
use crate::types::{Lsn, SlotId};

use super::freeze::{Frozen, freeze};
use super::map::{MapBuilder, MapPages, for_each_group, seal};
use super::publish;

/// What a checkpoint needs to know beside the database itself.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The database.
    pub core: &'a Core,
    /// Its logs.
    pub logs: &'a Logs,
    /// The path that the companions lie beside.
    pub base: &'a [u8],
    /// Id of the shared state.
    pub shm_id: u64,
}

/// The checkpoint lock, held; what a dead predecessor left is finished or forgotten.
#[derive(Debug)]
pub struct CheckpointGuard<'a> {
    core: &'a Core,
}

impl<'a> CheckpointGuard<'a> {
    /// Waits for the lock, and for others that it needs, for `limit` each.
    pub fn lock(core: &'a Core, limit: Option<Duration>) -> Result<CheckpointGuard<'a>> {
        let begin = Instant::now();
        let lock = &core.control().checkpoint_lock;
        match lock.acquire(core.slot(), deadline_after(limit), &|slot| core.is_alive(slot)) {
            Ok(Acquired::Clean) => {}
            Ok(Acquired::OwnerDied(slot)) => core.suspect(slot),
            Err(timed_out) => {
                return Err(core.locked("the checkpoint", timed_out.owner, begin.elapsed()));
            }
        }
        Self::repaired(core, limit)
    }

    /// Takes the lock if it is free.
    pub fn try_lock(
        core: &'a Core,
        limit: Option<Duration>,
    ) -> Result<Option<CheckpointGuard<'a>>> {
        if core.control().checkpoint_lock.acquire_if_free(core.slot()) {
            Self::repaired(core, limit).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Takes over the lock of a process that is known to be dead, if it holds it.
    pub fn take_over(core: &'a Core, dead: SlotId, limit: Option<Duration>) -> Result<()> {
        if core.control().checkpoint_lock.take_over(core.slot(), dead) {
            Self::repaired(core, limit)?;
        }
        Ok(())
    }

    fn repaired(core: &'a Core, limit: Option<Duration>) -> Result<CheckpointGuard<'a>> {
        let guard = CheckpointGuard { core };
        // Not only after a death: an owner that failed, or whose time was up, may not even have been able to clean up.
        let phase = &core.control().checkpoint.phase;
        if phase.load(Acquire) != phase::IDLE {
            // Its last step may be noted and not carried out, which the next to hold the writer lock does. Before that, what is
            // seen here may be half old, half new.
            drop(Writer::lock(core, deadline_after(limit))?);
            if phase.load(Acquire) != phase::IDLE {
                publish::repair(core, limit)?;
            }
        }
        Ok(guard)
    }
}

impl Drop for CheckpointGuard<'_> {
    fn drop(&mut self) {
        self.core.control().checkpoint_lock.release(self.core.slot());
    }
}

/// Which checkpoint it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// One of many.
    Periodic,
    /// The one that ends a recovery: there is no log, and nobody else.
    Recovery,
    /// The last before the database is at rest: nobody else is attached. The meta page then names no log, and only as
    /// many pages as are used.
    Rest,
}

/// Runs a checkpoint; the caller holds the lock. Returns the number of pages that the file needs.
///
/// Waits for other locks for `limit` each, not counting the work in between, which may take long. If that is up, what is
/// there of the checkpoint is left as a death would leave it, for the next one to forget or to finish.
pub fn run(
    context: &Context,
    _guard: &CheckpointGuard,
    purpose: Purpose,
    limit: Option<Duration>,
) -> Result<u32> {
    let core = context.core;
    if core.backing != Backing::Shared {
        return Ok(core.control().readers.file_pages.load(Acquire));
    }
    check_poison(core)?;
    if purpose == Purpose::Periodic {
        // From now on nobody but the holder of the checkpoint lock writes a meta page (see `start_log`).
        start_log(context, deadline_after(limit))?;
    }
    if purpose == Purpose::Periodic && core.control().log.exists.load(Acquire) == 1 {
        // Most of what must be synced before the meta page is written. Who waits for this checkpoint need not wait for that.
        let tail = Lsn(core.control().writer.tail.load(Acquire));
        if_in_time(context.logs.sync_to(core, tail, deadline_after(limit)))?;
    }
    crash_point("checkpoint.begin");
    // Of a large operation that failed, whose chunks would keep the log from being re-used.
    claim::abandon_left(core, limit)?;
    let growth_limit = patience::limit(core);
    let frozen = {
        let mut writer = Writer::lock(core, deadline_after(limit))?;
        let frozen = freeze(&mut writer, true)?;
        patience::begin(core, growth_limit);
        frozen
    };
    let result = write_and_publish(context, &frozen, purpose, limit);
    if result.is_err() && core.control().checkpoint.phase.load(Acquire) == phase::WRITING {
        // If even this fails, the next holder of the lock tries again.
        let _ = publish::forget(core, limit);
    }
    let used_end = result?;
    // So that nobody who needs a page has to look for what is free now.
    if_in_time(discard::finish(core, limit))?;
    if_in_time(retire::settle(core, limit))?;
    Ok(used_end)
}

/// The result of something that others do as well if a lock is not to be had in time.
pub fn if_in_time(result: Result<()>) -> Result<()> {
    match result {
        Err(Error::Locked { .. }) => Ok(()),
        result => result,
    }
}

fn write_and_publish(
    context: &Context,
    frozen: &Frozen,
    purpose: Purpose,
    limit: Option<Duration>,
) -> Result<u32> {
    let core = context.core;
    let control = core.control();
    let log = &control.log;
    let logged = log.exists.load(Acquire) == 1;
    if logged {
        context.logs.flush_to(core, frozen.lsn, deadline_after(limit))?;
    }
    crash_point("checkpoint.flushed");
    let durable = control.checkpoint.durable_meta.load(Relaxed);
    let before = publish::read_meta(core, durable)?;
    let map = write_map(core, &before, frozen, limit)?;
    crash_point("checkpoint.map.written");

    let file_pages = control.readers.file_pages.load(Acquire);
    let used_end = match purpose {
        Purpose::Rest => used_end(core, &map)?,
        Purpose::Periodic | Purpose::Recovery => file_pages,
    };
    let keep_from = frozen.keep_from;
    let (map_levels, map_pages) = map.listed();
    let mut meta = Meta {
        sequence: before.sequence + 1,
        epoch: frozen.epoch,
        root: frozen.root.to_word(),
        record_count: frozen.count,
        replay_from: frozen.lsn,
        keep_from,
        log_salt: 0,
        log_index: 0,
        file_pages: used_end,
        map_levels,
        reserve: control.readers.reserve_percent.load(Relaxed),
        keep_log_kib: control.changes.keep_log_kib.load(Relaxed),
        last_salt: frozen.last_salt,
        base_path: Vec::new(),
        shm_id: 0,
        map_pages,
    };
    if logged && purpose != Purpose::Rest {
        let in_current = keep_from.0 >= log.start.load(Acquire);
        let index = log.index.load(Acquire) & 1;
        meta.log_index = if in_current { index } else { 1 - index };
        meta.log_salt = if in_current {
            log.salt.load(Acquire)
        } else {
            control.writer.salt_before.load(Acquire)
        };
        meta.base_path = context.base.to_vec();
        meta.shm_id = context.shm_id;
    }
    publish::publish(core, &meta, limit)?;
    Ok(used_end)
}

/// Derives the map, and seals the pages that are new since the last checkpoint.
fn write_map(
    core: &Core,
    before: &Meta,
    frozen: &Frozen,
    limit: Option<Duration>,
) -> Result<MapPages> {
    let old_root = Root::from_word(before.root);
    let old = MapPages::load(core, before.map_levels, &before.map_pages)?;
    let mut builder = MapBuilder::new(core, old, limit);
    walk::diff(core, old_root, frozen.root, Side::Old, &mut |item| builder.mark(item.run, false))?;
    crash_point("checkpoint.map.cleared");
    let mut pages = 0;
    walk::diff(core, old_root, frozen.root, Side::New, &mut |item| {
        builder.mark(item.run, true)?;
        pages += u64::from(item.run.len);
        // Extents have no header: their checksums are in their records. The epoch does not say what is new: a transaction that
        // was open at the last freeze made its pages before it, and has published them since.
        if item.kind.is_some() {
            seal(core, item.run.first, item.run.len)?;
            crash_point("checkpoint.page.sealed");
        }
        Ok(())
    })?;
    let (map, _) = builder.finish()?;
    // Nobody else writes it: the caller holds the checkpoint lock.
    let counter = &core.control().counters.checkpoint_pages;
    counter.store(counter.load(Relaxed) + pages, Relaxed);
    Ok(map)
}

/// One more than the highest used page of the map.
fn used_end(core: &Core, map: &MapPages) -> Result<u32> {
    let per_group = group_pages(core.page_size);
    let mut end = META_PAGES[1] + 2;
    for_each_group(core, map, |group, bits| {
        if let Some(byte) = bits.iter().rposition(|&byte| byte != 0) {
            let bit = 7 - bits[byte].leading_zeros();
            end = end.max(group * per_group + byte as u32 * 8 + bit + 1);
        }
        Ok(())
    })?;
    Ok(end)
}

/// Creates the first log file, if there is none yet, and a meta page that names it.
///
/// Under a lock of its own, so that nobody who needs a log waits for a check or for a checkpoint that has not begun to write. No
/// checkpoint writes a meta page meanwhile: a periodic one begins with this, and the others run where nobody else is attached.
pub fn start_log(context: &Context, deadline: Option<Instant>) -> Result<()> {
    let core = context.core;
    if core.backing != Backing::Shared || core.control().log.exists.load(Acquire) == 1 {
        return Ok(());
    }
    let _guard = LogStartGuard::lock(core, deadline)?;
    // If somebody died while announcing a log, it is announced after this.
    drop(Writer::lock(core, deadline)?);
    publish::start_log(core, context.logs, context.base, context.shm_id, deadline)
}

/// The lock under which the log is started. Who has it and the checkpoint lock may read both meta pages.
#[derive(Debug)]
pub struct LogStartGuard<'a> {
    core: &'a Core,
}

impl<'a> LogStartGuard<'a> {
    /// Waits for the lock.
    pub fn lock(core: &'a Core, deadline: Option<Instant>) -> Result<LogStartGuard<'a>> {
        let begin = Instant::now();
        let lock = &core.control().log_start_lock;
        match lock.acquire(core.slot(), deadline, &|slot| core.is_alive(slot)) {
            Ok(Acquired::Clean) => {}
            // A log that it did not announce is made anew.
            Ok(Acquired::OwnerDied(slot)) => core.suspect(slot),
            Err(timed_out) => {
                return Err(core.locked("the start of the log", timed_out.owner, begin.elapsed()));
            }
        }
        Ok(LogStartGuard { core })
    }
}

impl Drop for LogStartGuard<'_> {
    fn drop(&mut self) {
        self.core.control().log_start_lock.release(self.core.slot());
    }
}

/// Flushes the ring up to `target`, creating the log first if need be.
pub fn flush_to(context: &Context, target: Lsn, deadline: Option<Instant>) -> Result<()> {
    start_log(context, deadline)?;
    context.logs.flush_to(context.core, target, deadline)
}

/// Makes everything before `target` durable.
pub fn sync_to(context: &Context, target: Lsn, deadline: Option<Instant>) -> Result<()> {
    if context.core.backing != Backing::Shared {
        return Ok(());
    }
    if context.core.control().log.synced.load(Acquire) >= target.0 {
        return check_poison(context.core);
    }
    start_log(context, deadline)?;
    context.logs.sync_to(context.core, target, deadline)
}
