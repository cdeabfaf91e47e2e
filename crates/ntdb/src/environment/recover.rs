//! What the first user does: choose the state to begin with, bring it up to date, and make a new shared state.
//!
//! Everybody else is dead or gone (no slot is locked, and the attach lock is held), so nothing here waits. In this order:
//! 1. Sync data and logs: what the dead wrote and nobody synced must not be built upon before it is on disk.
//! 2. Choose a meta page: the newest valid one, or, after a failed sync, the one known durable; a newer one is voided then.
//! 3. Make a new shared state under a temporary name. The old one stays as it is until the end, so a death in between
//!    changes nothing: the next first user begins again with the same files, and only pages that are free in the
//!    chosen state have been written.
//! 4. Replay the log from the meta page's LSN, through both files; then, if the old shared state is of this boot and
//!    continues the log, what only its ring has.
//! 5. Checkpoint, without a log. Then the old logs mean nothing and are removed; the new shared state gets its name.

use std::path::Path;
use std::sync::atomic::Ordering::*;

use crate::checkpoint::map::{MapPages, for_each_group};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::index::locate::{self, Root};
use crate::limits::RING_BYTES;
use crate::log::file::{LogFile, OpenProblem};
use crate::log::flush::{NO_SWITCH, TEMPORARY};
use crate::log::record::{Decoded, Op, decode, plausible_len};
use crate::log::scan::{ScanProblem, Scanner};
use crate::page::header::{HEADER_COPY_PAGE, Header};
use crate::page::map::group_pages;
use crate::page::meta::{META_PAGES, Meta};
use crate::page::record::Extent;
use crate::shm::Shm;
use crate::space::bits;
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file::{self, File};
use crate::storage::filesystem;
use crate::transaction::operation::{self, Condition};
use crate::transaction::record::LogRecord;
use crate::transaction::step::Step;
use crate::transaction::writer::Writer;
use crate::types::{Epoch, Lsn, PageNo, Run};

use super::companions::Companions;

/// What the last users left in memory, if it can be relied on.
#[derive(Debug)]
pub struct OldState {
    shm: Shm,
}

impl OldState {
    /// Opens the old shared state for reading; `None` if it belongs to another boot or another state of the file.
    pub fn open(shm: Shm, meta: &Meta, boot_id: [u8; 16]) -> Option<OldState> {
        let sequence = shm.control().checkpoint.durable_sequence.load(Relaxed);
        // A meta page may have been written and not yet recorded as durable.
        let fits = meta.sequence == sequence || meta.sequence.checked_sub(1) == Some(sequence);
        let same_boot = boot_id != [0; 16] && shm.header().boot_id == boot_id;
        (fits && same_boot).then_some(OldState { shm })
    }

    fn tail(&self) -> u64 {
        self.shm.control().writer.tail.load(Relaxed)
    }

    fn written(&self) -> u64 {
        self.shm.control().log.written.load(Relaxed)
    }

    fn salt_at(&self, lsn: u64) -> u64 {
        let words = &self.shm.control().writer;
        if lsn >= words.salt_from.load(Relaxed) {
            words.salt.load(Relaxed)
        } else {
            words.salt_before.load(Relaxed)
        }
    }
}

/// errno of the failed sync that the old shared state records, and the sequence of the meta page known durable.
pub fn old_poison(shm: &Shm, boot_id: [u8; 16]) -> Option<u64> {
    let control = shm.control();
    let poisoned = control.readers.poison.load(Relaxed) != 0;
    (poisoned && shm.header().boot_id == boot_id)
        .then(|| control.checkpoint.durable_sequence.load(Relaxed))
}

/// Reads both meta pages and chooses. `known_durable` is the sequence to choose after a failed sync.
/// Returns the meta and the index of its page.
pub fn choose_meta(
    data: &File,
    path: &Path,
    header: &Header,
    known_durable: Option<u64>,
    may_write: bool,
) -> Result<(Meta, u32)> {
    let size = header.page_size as usize;
    let failed = |e| Error::from_io(path, "read a meta page", e);
    let mut found: Vec<(Meta, u32)> = Vec::new();
    let mut problems = Vec::new();
    for index in 0..2u32 {
        let mut page = vec![0; size];
        let offset = META_PAGES[index as usize] as u64 * size as u64;
        if data.len().map_err(failed)? < offset + size as u64 {
            problems.push("cut off".to_string());
            continue;
        }
        data.read_exact_at(&mut page, offset).map_err(failed)?;
        match Meta::decode(&page) {
            Ok(meta) if !is_plausible(&meta) => problems.push("impossible numbers".to_string()),
            Ok(meta) => found.push((meta, index)),
            Err(problem) => problems.push(problem.to_string()),
        }
    }
    found.sort_by_key(|(meta, _)| meta.sequence);
    if let Some(sequence) = known_durable
        && let Some(at) = found.iter().position(|(meta, _)| meta.sequence == sequence)
    {
        for (_, index) in found.drain(at + 1..).collect::<Vec<_>>() {
            if may_write {
                let offset = META_PAGES[index as usize] as u64 * size as u64;
                data.write_all_at(&vec![0; size], offset)
                    .and_then(|()| data.sync_data())
                    .map_err(|e| Error::from_io(path, "void a meta page", e))?;
                crash_point("recover.meta.voided");
            }
        }
    }
    found.pop().ok_or_else(|| Error::Corrupt {
        path: path.to_path_buf(),
        place: "pages 1 and 2".into(),
        reason: format!("neither meta page is valid ({})", problems.join("; ")),
    })
}

/// Whether a meta page's counters leave room to count on. They begin at 0 and count bytes and checkpoints, so no database
/// comes near the bound in a thousand years, and no sum of them overflows.
fn is_plausible(meta: &Meta) -> bool {
    const BOUND: u64 = 1 << 62;
    let counters = [meta.sequence, meta.epoch.0, meta.replay_from.0, meta.keep_from.0];
    counters.iter().all(|&counter| counter < BOUND) && meta.record_count < BOUND
}

/// Sets up the words of a new shared state for `meta`, found at meta page `index`.
pub fn initialise(core: &Core, meta: &Meta, index: u32, file_pages: u32) -> Result<()> {
    let control = core.control();
    let salt = filesystem::random_u64().map_err(|e| core.io("get a random number", e))?.max(1);
    let lsn = meta.replay_from.0;
    control.readers.root.store(meta.root, Relaxed);
    control.readers.file_pages.store(file_pages, Relaxed);
    let words = &control.writer;
    words.tail.store(lsn, Relaxed);
    words.applied.store(lsn, Relaxed);
    words.count.store(meta.record_count, Relaxed);
    words.epoch.store(meta.epoch.0 + 1, Relaxed);
    words.salt.store(salt, Relaxed);
    words.salt_from.store(lsn, Relaxed);
    words.salt_before.store(salt, Relaxed);
    let log = &control.log;
    log.start.store(lsn, Relaxed);
    log.written.store(lsn, Relaxed);
    log.synced.store(lsn, Relaxed);
    log.salt.store(salt, Relaxed);
    log.switch_at.store(NO_SWITCH, Relaxed);
    let checkpoint = &control.checkpoint;
    checkpoint.durable_meta.store(index, Relaxed);
    checkpoint.durable_sequence.store(meta.sequence, Relaxed);
    checkpoint.durable_epoch.store(meta.epoch.0, Relaxed);
    checkpoint.durable_root.store(meta.root, Relaxed);
    checkpoint.durable_lsn.store(lsn, Relaxed);
    for (table, bytes) in [
        (&control.used_bits, bits::table_bytes(file_pages)),
        (&control.page_states, file_pages as u64),
    ] {
        core.shm.grow(table, bytes).map_err(|e| core.io("set up the shared state", e))?;
    }
    load_map(core, meta, file_pages)?;
    protect(core, meta)?;
    words.free_pages.store(bits::count_free(core, file_pages), Relaxed);
    Ok(())
}

/// Checks the root, and marks it and the pages that every database has used, whatever the map says of them: a damaged map
/// must not have them overwritten.
fn protect(core: &Core, meta: &Meta) -> Result<()> {
    let root = Root::from_word(meta.root);
    let mut runs = vec![Run { first: PageNo(0), len: HEADER_COPY_PAGE + 1 }];
    match root.depth {
        Some(depth) => {
            locate::check_array(core, root.page, depth)?;
            runs.push(Run { first: root.page, len: locate::array_pages(core.page_size, depth) });
        }
        None => runs.push(Run { first: root.page, len: 1 }),
    }
    let map = MapPages::load(core, meta.map_levels, &meta.map_pages)?;
    runs.extend(map.all().map(|page| Run { first: page, len: 1 }));
    for run in runs {
        core.check_run(run)?;
        bits::set_used_unverified(core, run)?;
    }
    Ok(())
}

/// Copies the durable free-space map into the allocation bits.
fn load_map(core: &Core, meta: &Meta, file_pages: u32) -> Result<()> {
    let map = MapPages::load(core, meta.map_levels, &meta.map_pages)?;
    let per_group = group_pages(core.page_size);
    // A growth may have crossed into a group of which nothing was used yet: what the map does not reach is free.
    for_each_group(core, &map, |group, group_bits| {
        let first = group as u64 * per_group as u64;
        for (index, chunk) in group_bits.chunks(8).enumerate() {
            let page = first + index as u64 * 64;
            if page >= file_pages as u64 {
                break;
            }
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            let mut word = u64::from_le_bytes(word);
            if file_pages as u64 - page < 64 {
                word &= (1 << (file_pages as u64 - page)) - 1;
            }
            set_bits(core, page, word)?;
        }
        Ok(())
    })
}

/// Sets the allocation bits of the 64 pages from `page` on, which need not begin a word.
fn set_bits(core: &Core, page: u64, word: u64) -> Result<()> {
    if word == 0 {
        return Ok(());
    }
    let table = &core.control().used_bits;
    let short = || core.corrupt_shm("the allocation bits are too short");
    let shift = page % 64;
    let low = core.shm.word(table, page / 64 * 8).ok_or_else(short)?;
    low.fetch_or(word << shift, Relaxed);
    if shift != 0 && word >> (64 - shift) != 0 {
        let high = core.shm.word(table, (page / 64 + 1) * 8).ok_or_else(short)?;
        high.fetch_or(word >> (64 - shift), Relaxed);
    }
    Ok(())
}

/// Brings a new shared state up to date; returns whether anything had to be done.
pub fn replay(
    core: &Core,
    companions: &Companions,
    header: &Header,
    meta: &Meta,
    old: Option<&OldState>,
) -> Result<bool> {
    core.set_replaying(true);
    let mut replay = Replay {
        core,
        meta_lsn: meta.replay_from.0,
        series: None,
        log_bytes: log_bytes(companions)?,
        scratch: Vec::new(),
        record: LogRecord::default(),
        applied: false,
    };
    let result = replay.run(companions, header, meta, old);
    core.set_replaying(false);
    result?;
    replay.drop_series()?;
    // The next record gets the LSN behind the last one.
    let words = &core.control().writer;
    let tail = words.tail.load(Relaxed);
    words.applied.store(tail, Relaxed);
    words.salt_from.store(tail, Relaxed);
    Ok(replay.applied)
}

/// A value that comes in chunks.
#[derive(Clone, Copy)]
struct Series {
    /// LSN of the first chunk.
    first: u64,
    /// Where its bytes are; `None` if it cannot be finished.
    extent: Option<Extent>,
    /// Bytes that have come.
    filled: u64,
}

struct Replay<'c> {
    core: &'c Core,
    /// Operations before it are in the checkpoint; chunks before it may still be needed.
    meta_lsn: u64,
    /// The value of which chunks have been seen last: the LSN of its first chunk, and where its bytes are. One such
    /// operation runs at a time, so what another one begins is all that an unfinished one leaves.
    series: Option<Series>,
    /// Bytes that the logs and the ring hold together. A value that is longer was never finished.
    log_bytes: u64,
    scratch: Vec<u8>,
    record: LogRecord,
    applied: bool,
}

impl Replay<'_> {
    fn run(
        &mut self,
        companions: &Companions,
        header: &Header,
        meta: &Meta,
        old: Option<&OldState>,
    ) -> Result<()> {
        let mut at = meta.replay_from.0;
        if meta.log_salt != 0 {
            at = self.logs(companions, header, meta)?;
        }
        if let Some(old) = old {
            // The kernel keeps what was written, whoever died: the log must reach as far as it was written.
            let written = old.written().min(old.tail());
            if at < written && old.shm.control().log.exists.load(Relaxed) == 1 {
                return Err(self.log_damage(
                    &companions.logs[meta.log_index as usize & 1],
                    at,
                    meta,
                    format!("the log ends at LSN {at}, but was written up to {written}"),
                ));
            }
            self.ring(old, at)?;
        }
        Ok(())
    }

    fn log_damage(&self, path: &Path, lsn: u64, meta: &Meta, reason: String) -> Error {
        Error::Corrupt {
            path: path.to_path_buf(),
            place: format!("LSN {lsn} (the log continues LSN {})", meta.keep_from.0),
            reason,
        }
    }

    /// Replays the log files; returns where they end.
    fn logs(&mut self, companions: &Companions, header: &Header, meta: &Meta) -> Result<u64> {
        let (mut path, mut log) = find_log(self.core, companions, header, meta)?;
        let mut from = meta.keep_from;
        if from < log.header().start {
            return Err(self.log_damage(&path, from.0, meta, "the log begins later".into()));
        }
        // Two files: the second has no successor.
        for successors in 0.. {
            let end = self.one_log(&path, &log, from, meta)?;
            if successors == 1 {
                return Ok(end.0);
            }
            // A log that continues this one proves that this one was complete on disk when it was begun.
            let next = companions.logs.iter().find_map(|other| {
                let next = open_log(other).ok().flatten()?;
                let h = next.header();
                (h.uuid == header.uuid
                    && h.previous_salt == log.header().salt
                    && h.salt != log.header().salt)
                    .then(|| (other.clone(), next))
            });
            match next {
                None => return Ok(end.0),
                Some((other, next)) => {
                    let start = next.header().start;
                    if start != end {
                        return Err(self.log_damage(
                            &path,
                            end.0,
                            meta,
                            format!(
                                "the log ends at LSN {}, but its successor begins at {}",
                                end.0, start.0
                            ),
                        ));
                    }
                    (path, log, from) = (other, next, start);
                }
            }
        }
        unreachable!("the loop returns")
    }

    fn one_log(&mut self, path: &Path, log: &LogFile, from: Lsn, meta: &Meta) -> Result<Lsn> {
        let mut scanner = Scanner::new(log, from);
        loop {
            match scanner.next() {
                Ok(Some(scanned)) => {
                    let (lsn, next) = (scanned.lsn.0, scanned.next.0);
                    self.apply(lsn, &scanned.op, next)?;
                    crash_point("recover.applied");
                }
                Ok(None) => return Ok(scanner.end()),
                Err(ScanProblem::Io(e)) => return Err(Error::from_io(path, "read the log", e)),
                Err(ScanProblem::Record { lsn, problem }) => {
                    return Err(self.log_damage(path, lsn.0, meta, problem.to_string()));
                }
            }
        }
    }

    /// Replays what only the ring has.
    fn ring(&mut self, old: &OldState, mut at: u64) -> Result<()> {
        let tail = old.tail();
        if at >= tail {
            return Ok(());
        }
        if tail - at > RING_BYTES {
            return Err(self.core.corrupt_shm("the log ring does not reach back to the log's end"));
        }
        let mut bytes = vec![0; (tail - at) as usize];
        old.shm.ring_read(at, &mut bytes);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let damaged = || self.core.corrupt_shm("the log ring holds a damaged record");
            let len = plausible_len(rest).filter(|&len| len <= rest.len()).ok_or_else(damaged)?;
            let (record, behind) = rest.split_at(len);
            match decode(old.salt_at(at), Lsn(at), record) {
                Ok(Decoded::Record { op, .. }) => self.apply(at, &op, at + len as u64)?,
                _ => return Err(damaged()),
            }
            crash_point("recover.ring.applied");
            at += len as u64;
            rest = behind;
        }
        Ok(())
    }

    fn apply(&mut self, lsn: u64, op: &Op<'_>, next: u64) -> Result<()> {
        let core = self.core;
        if let Op::Chunk { first, total, bytes } = op {
            self.chunk(first.0, *total, bytes)?;
        } else if lsn < self.meta_lsn {
            self.forget_chunks(op)?;
        } else {
            let mut writer = Writer::lock(core, None)?;
            core.control().writer.tail.store(lsn, Relaxed);
            self.record.encode(op);
            let (record, scratch) = (&mut self.record, &mut self.scratch);
            match op {
                Op::Put { key, value } => {
                    operation::check_lengths(core, key.len(), value.len() as u64)?;
                    let hash = core.hasher.hash(key);
                    operation::put(&mut writer, hash, key, value, Condition::Any, record, scratch)?;
                }
                Op::Delete { key } => {
                    let hash = core.hasher.hash(key);
                    operation::delete(&mut writer, hash, key, record)?;
                }
                Op::Append { key, length_before, bytes } => {
                    let hash = core.hasher.hash(key);
                    let expected = Some(*length_before);
                    operation::append(&mut writer, hash, key, bytes, expected, record, scratch)?;
                }
                Op::Clear => {
                    operation::clear(&mut writer, record)?;
                }
                Op::PutChunked { .. } | Op::AppendChunked { .. } => {
                    drop(writer);
                    self.chunked(op)?;
                }
                Op::Chunk { .. } => {}
            }
        }
        self.applied = true;
        core.control().writer.tail.store(next, Relaxed);
        core.control().writer.applied.store(next, Relaxed);
        Ok(())
    }

    /// Collects a chunk of a value in an extent of its own.
    fn chunk(&mut self, first: u64, total: u64, bytes: &[u8]) -> Result<()> {
        let core = self.core;
        let series = match self.series {
            Some(series) if series.first == first => series,
            _ => {
                self.drop_series()?;
                let mut series = Series { first, extent: None, filled: 0 };
                if total <= self.log_bytes {
                    let mut writer = Writer::lock(core, None)?;
                    let pages = operation::extent_pages(core, total)?;
                    let mut step = Step::begin(&mut writer);
                    let at = step.take(pages)?;
                    step.structure()?;
                    series.extent = Some(Extent { first: at, pages, crc: 0, epoch: core.epoch() });
                }
                self.series = Some(series);
                series
            }
        };
        let filled = series.filled;
        let Some(extent) = series.extent else { return Ok(()) };
        let room = extent.pages as u64 * core.page_size as u64;
        if filled + bytes.len() as u64 > room.min(total) {
            return Err(
                core.corrupt(extent.first, "the chunks of a value are longer than the value")
            );
        }
        let at = core.run(extent.first, extent.pages)?;
        // SAFETY: within the extent, which is this replay's own.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.add(filled as usize), bytes.len());
        }
        let crc = crc32c::crc32c_append(extent.crc, bytes);
        let extent = Some(Extent { crc, ..extent });
        self.series = Some(Series { first, extent, filled: filled + bytes.len() as u64 });
        Ok(())
    }

    fn chunked(&mut self, op: &Op<'_>) -> Result<()> {
        let core = self.core;
        let (key, len, first, crc) = match op {
            Op::PutChunked { key, len, first, crc } => (*key, *len, first.0, *crc),
            Op::AppendChunked { key, len, first, crc, .. } => (*key, *len, first.0, *crc),
            _ => return Ok(()),
        };
        let Some(Series { extent: Some(extent), filled, .. }) = self.take_series(first) else {
            return Err(core.corrupt_shm("the log names a value of which it has no chunks"));
        };
        operation::check_lengths(core, key.len(), len)?;
        let hash = core.hasher.hash(key);
        let layout = operation::layout(core.page_size, key.len(), len).0;
        let is_put = matches!(op, Op::PutChunked { .. });
        let key_too = is_put && layout == operation::Layout::LongKey;
        let expected = if key_too { len + key.len() as u64 } else { len };
        if filled != expected || extent.crc != crc {
            return Err(core.corrupt(extent.first, "the chunks of a value do not add up to it"));
        }
        let mut writer = Writer::lock(core, None)?;
        let (record, scratch) = (&mut self.record, &mut self.scratch);
        match op {
            Op::PutChunked { .. } => {
                operation::put_extent(
                    &mut writer,
                    hash,
                    key,
                    len,
                    layout,
                    &extent,
                    Condition::Any,
                    record,
                    |_| {},
                )?;
            }
            Op::AppendChunked { length_before, .. } => {
                let start = core.run(extent.first, extent.pages)?;
                // SAFETY: filled just now, and this replay's own.
                let bytes = unsafe { std::slice::from_raw_parts(start, len as usize) };
                let tail = core.control().writer.tail.load(Relaxed);
                let expected = Some(*length_before);
                operation::append(&mut writer, hash, key, bytes, expected, record, scratch)?;
                core.control().writer.tail.store(tail, Relaxed);
                let mut step = Step::begin(&mut writer);
                step.give(Run { first: extent.first, len: extent.pages }, extent.epoch)?;
                step.structure()?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Chunks of an operation that the checkpoint already has.
    fn forget_chunks(&mut self, op: &Op<'_>) -> Result<()> {
        if let Op::PutChunked { first, .. } | Op::AppendChunked { first, .. } = op
            && self.series.is_some_and(|series| series.first == first.0)
        {
            self.drop_series()?;
        }
        Ok(())
    }

    fn give_back(&self, extent: &Extent) -> Result<()> {
        let mut writer = Writer::lock(self.core, None)?;
        let mut step = Step::begin(&mut writer);
        step.give(Run { first: extent.first, len: extent.pages }, Epoch(u64::MAX >> 1))?;
        step.structure()
    }

    fn take_series(&mut self, first: u64) -> Option<Series> {
        self.series.take_if(|series| series.first == first)
    }

    /// Gives back the pages of an operation that never finished.
    fn drop_series(&mut self) -> Result<()> {
        match self.series.take() {
            Some(Series { extent: Some(extent), .. }) => self.give_back(&extent),
            _ => Ok(()),
        }
    }
}

/// Bytes that the logs and the ring hold together.
fn log_bytes(companions: &Companions) -> Result<u64> {
    let mut bytes = RING_BYTES;
    for path in &companions.logs {
        match std::fs::symlink_metadata(path) {
            Ok(metadata) => bytes += metadata.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::from_io(path, "measure the log", e)),
        }
    }
    Ok(bytes)
}

fn open_log(path: &Path) -> Result<Option<LogFile>> {
    match LogFile::open_readonly(path) {
        Ok(log) => Ok(Some(log)),
        Err(OpenProblem::Header(_)) => Ok(None),
        Err(OpenProblem::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(OpenProblem::Io(e)) => Err(Error::from_io(path, "open the log", e)),
    }
}

/// The log that the meta page names.
fn find_log(
    core: &Core,
    companions: &Companions,
    header: &Header,
    meta: &Meta,
) -> Result<(std::path::PathBuf, LogFile)> {
    let named = &companions.logs[meta.log_index as usize & 1];
    for path in [named, &companions.logs[1 - (meta.log_index as usize & 1)]] {
        if let Some(log) = open_log(path)?
            && log.header().salt == meta.log_salt
            && log.header().uuid == header.uuid
        {
            return Ok((path.clone(), log));
        }
    }
    match LogFile::open_readonly(named) {
        Err(OpenProblem::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(Error::LogMissing { path: core.path.clone(), log: named.clone() })
        }
        Ok(log) if log.header().uuid != header.uuid => Err(Error::ForeignSidecar {
            path: core.path.clone(),
            sidecar: named.clone(),
            reason: "it is the log of another database".into(),
        }),
        Ok(_) => Err(Error::LogMissing { path: core.path.clone(), log: named.clone() }),
        Err(problem) => Err(Error::Corrupt {
            path: named.clone(),
            place: "log header".into(),
            reason: match problem {
                OpenProblem::Header(problem) => problem.to_string(),
                OpenProblem::Io(e) => e.to_string(),
            },
        }),
    }
}

/// Syncs the log files that are there. Returns whether there are any.
pub fn sync_logs(companions: &Companions) -> Result<bool> {
    let mut any = false;
    for path in &companions.logs {
        match File::open(path, Kind::Log) {
            Ok(log) => {
                any = true;
                log.sync_data().map_err(|e| Error::from_io(path, "sync the log", e))?;
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::from_io(path, "open the log", e)),
        }
    }
    Ok(any)
}

/// Removes the log files of this database; those of others stay.
pub fn remove_logs(companions: &Companions, uuid: &[u8; 16]) -> Result<()> {
    for path in &companions.logs {
        let ours = match LogFile::open_readonly(path) {
            Ok(log) => log.header().uuid == *uuid,
            Err(_) => false,
        };
        if ours {
            file::unlink(path, Kind::Log).map_err(|e| Error::from_io(path, "remove the log", e))?;
            crash_point("remove.log");
        }
        remove_temporaries(path);
    }
    Ok(())
}

/// Removes log files that were being made when their makers died.
fn remove_temporaries(log: &Path) {
    let (Some(dir), Some(name)) = (log.parent(), log.file_name()) else { return };
    let mut prefix = name.to_os_string();
    prefix.push(TEMPORARY);
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes()) {
            // Nobody needs it; nobody minds it either.
            let _ = file::unlink(&entry.path(), Kind::Log);
        }
    }
}
