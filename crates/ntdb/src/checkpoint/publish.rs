//! Meta pages: reading, writing, and making one the durable one.

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::error::Result;
use crate::log::file::{LOG_HEADER_BYTES, LogHeader};
use crate::log::flush::{Logs, check_poison, poison};
use crate::options::deadline_after;
use crate::page::meta::{META_PAGES, Meta};
use crate::shm::layout::phase;
use crate::storage::failpoint::crash_point;
use crate::storage::futex;
use crate::transaction::step::{IN_SHM, Step, list_get};
use crate::transaction::writer::Writer;
use crate::types::{Lsn, PageNo, Run};

use super::map::MapPages;

/// Reads meta page `index` (0 or 1).
pub fn read_meta(core: &Core, index: u32) -> Result<Meta> {
    let number = PageNo(META_PAGES[index as usize & 1]);
    let page = core.page(number)?;
    let mut copy = vec![0u8; core.page_size];
    // SAFETY: within the mapping; copied, since another process may write the page by a system call meanwhile (a torn copy
    // fails its checksum).
    unsafe { std::ptr::copy_nonoverlapping(page, copy.as_mut_ptr(), core.page_size) };
    Meta::decode(&copy).map_err(|problem| core.corrupt(number, problem.to_string()))
}

/// Writes an encoded meta page and makes it durable. What it speaks of has been synced before; what writers have changed since
/// is not waited for.
fn write_meta(core: &Core, index: u32, bytes: &[u8]) -> Result<()> {
    let Some(data) = &core.data else { return Ok(()) };
    let offset = core.place(PageNo(META_PAGES[index as usize & 1]), 0);
    data.write_all_at(bytes, offset).map_err(|e| core.io("write a meta page", e))?;
    crash_point("meta.written");
    data.sync_written(bytes, offset).map_err(|e| poison(core, &e))?;
    crash_point("meta.synced");
    Ok(())
}

/// Syncs the data file; a failure poisons the database.
pub fn sync_data(core: &Core) -> Result<()> {
    match &core.data {
        Some(data) => data.sync_data().map_err(|e| poison(core, &e)),
        None => Ok(()),
    }
}

/// Publishes `meta`, whose pages are written but not synced, and finishes the checkpoint.
pub fn publish(core: &Core, meta: &Meta, limit: Option<Duration>) -> Result<()> {
    let control = core.control();
    crash_point("publish.begin");
    sync_data(core)?;
    crash_point("publish.data.synced");
    let bytes = meta.encode(core.page_size as u32);
    // SAFETY: the image area holds the largest page; only the holder of the checkpoint lock writes it.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), core.shm.checkpoint_image(), bytes.len());
    }
    control.checkpoint.phase.store(phase::PUBLISHING, Release);
    crash_point("publish.image");
    complete(core, &bytes, meta, limit)
}

/// Writes the meta page of a checkpoint whose data is on disk, and finishes it; once or again.
fn complete(core: &Core, bytes: &[u8], meta: &Meta, limit: Option<Duration>) -> Result<()> {
    let control = core.control();
    let words = &control.checkpoint;
    let durable = words.durable_meta.load(Relaxed) & 1;
    write_meta(core, 1 - durable, bytes)?;
    let before = read_meta(core, durable)?;
    let old = MapPages::load(core, before.map_levels, &before.map_pages)?;
    let new = MapPages::load(core, meta.map_levels, &meta.map_pages)?;
    let mut kept: Vec<u32> = new.all().map(|page| page.0).collect();
    kept.sort_unstable();

    let mut writer = Writer::lock(core, deadline_after(limit))?;
    let log = &control.log;
    let mut step = Step::begin(&mut writer);
    let now = core.epoch();
    for page in old.all().filter(|page| kept.binary_search(&page.0).is_err()) {
        // Nobody but recovery from the old meta page reads it: no epoch holds it back.
        step.give(Run { first: page, len: 1 }, now)?;
    }
    let shared = |word: &std::sync::atomic::AtomicU32| core.shm.offset_of(word) | IN_SHM;
    step.store(shared(&words.durable_meta), 4, 1, (1 - durable) as u64);
    step.store_shared(&words.durable_sequence, meta.sequence);
    step.store_shared(&words.durable_epoch, meta.epoch.0);
    step.store_shared(&words.durable_root, meta.root);
    step.store_shared(&words.durable_lsn, meta.replay_from.0);
    step.store(shared(&words.phase), 4, 1, phase::IDLE as u64);
    step.store_shared(&control.checkpoint_made.len, 0);
    if log.exists.load(Acquire) == 1 {
        let other_needed = meta.keep_from.0 < log.start.load(Acquire);
        step.store(shared(&log.other_needed), 4, 1, other_needed as u64);
    } else {
        // What is in the checkpoint needs no log; the log will begin here.
        step.store_shared(&log.start, meta.replay_from.0);
        step.store_shared(&log.written, meta.replay_from.0);
        step.store_shared(&log.synced, meta.replay_from.0);
    }
    crash_point("publish.finish");
    step.structure()?;
    crash_point("publish.finished");
    control.space.holds_version.fetch_add(1, Relaxed);
    words.completed.fetch_add(1, Release);
    futex::wake(&words.completed, u32::MAX);
    Ok(())
}

/// Makes the other meta page a second copy of the durable one, so that at rest damage to either loses nothing. Nobody else is
/// attached, and the durable one names no log.
pub fn write_second(core: &Core) -> Result<()> {
    let durable = core.control().checkpoint.durable_meta.load(Relaxed) & 1;
    let meta = read_meta(core, durable)?;
    if read_meta(core, 1 - durable).is_ok_and(|other| other == meta) {
        return Ok(());
    }
    write_meta(core, 1 - durable, &meta.encode(core.page_size as u32))
}

/// Forgets a checkpoint that did not reach its publication.
pub fn forget(core: &Core, limit: Option<Duration>) -> Result<()> {
    let control = core.control();
    let mut writer = Writer::lock(core, deadline_after(limit))?;
    let mut step = Step::begin(&mut writer);
    let made = &control.checkpoint_made;
    let now = core.epoch();
    for index in 0..made.len.load(Relaxed) {
        step.give(list_get(core, made, index)?, now)?;
    }
    let place = core.shm.offset_of(&control.checkpoint.phase) | IN_SHM;
    step.store(place, 4, 1, phase::IDLE as u64);
    step.store_shared(&made.len, 0);
    crash_point("repair.checkpoint.forget");
    step.structure()?;
    control.space.holds_version.fetch_add(1, Relaxed);
    futex::wake(&control.checkpoint.completed, u32::MAX);
    Ok(())
}

/// Finishes or forgets the checkpoint of an owner that died or gave up. The caller holds the checkpoint lock.
pub fn repair(core: &Core, limit: Option<Duration>) -> Result<()> {
    match core.control().checkpoint.phase.load(Acquire) {
        phase::IDLE => Ok(()),
        phase::WRITING => forget(core, limit),
        _ => {
            check_poison(core)?;
            let mut bytes = vec![0u8; core.page_size];
            // SAFETY: the image area holds the largest page, and nobody but the holder of the lock writes it.
            unsafe {
                let image = core.shm.checkpoint_image();
                std::ptr::copy_nonoverlapping(image, bytes.as_mut_ptr(), bytes.len());
            }
            let meta = Meta::decode(&bytes)
                .map_err(|problem| core.corrupt_shm(&format!("checkpoint image: {problem}")))?;
            crash_point("repair.checkpoint.complete");
            complete(core, &bytes, &meta, limit)
        }
    }
}

/// Creates the first log file, and a meta page that names it. The caller holds the lock for that.
pub fn start_log(
    core: &Core,
    logs: &Logs,
    base: &[u8],
    shm_id: u64,
    deadline: Option<Instant>,
) -> Result<()> {
    let control = core.control();
    let log = &control.log;
    if log.exists.load(Acquire) == 1 {
        return Ok(());
    }
    let start = Lsn(log.start.load(Acquire));
    let salt = control.writer.salt.load(Acquire);
    // Nothing but the log file itself lies between the record before and this log: no switch has been made yet.
    let previous_salt = control.writer.salt_before.load(Acquire);
    let header = LogHeader { uuid: logs.uuid, start, salt, previous_salt };
    crash_point("log.start.begin");
    let room =
        logs.create_unless_there(core, 0, header)?.allocated_bytes() - LOG_HEADER_BYTES as u64;
    let words = &control.checkpoint;
    let durable = words.durable_meta.load(Relaxed) & 1;
    let mut meta = read_meta(core, durable)?;
    meta.sequence += 1;
    meta.log_salt = salt;
    meta.log_index = 0;
    meta.keep_from = start;
    meta.keep_log_kib = control.changes.keep_log_kib.load(Relaxed);
    meta.reserve = control.readers.reserve_percent.load(Relaxed);
    meta.base_path = base.to_vec();
    meta.shm_id = shm_id;
    write_meta(core, 1 - durable, &meta.encode(core.page_size as u32))?;

    let mut writer = Writer::lock(core, deadline)?;
    let mut step = Step::begin(&mut writer);
    let shared = |word: &std::sync::atomic::AtomicU32| core.shm.offset_of(word) | IN_SHM;
    step.store(shared(&words.durable_meta), 4, 1, (1 - durable) as u64);
    step.store_shared(&words.durable_sequence, meta.sequence);
    step.store(shared(&log.index), 4, 1, 0);
    step.store_shared(&log.salt, salt);
    step.store_shared(&log.room, start.0 + room);
    let incarnation = log.incarnation.load(Acquire).wrapping_add(1);
    step.store(shared(&log.incarnation), 4, 1, incarnation as u64);
    step.store(shared(&log.exists), 4, 1, 1);
    crash_point("log.start.finish");
    step.structure()?;
    crash_point("log.start.done");
    Ok(())
}
