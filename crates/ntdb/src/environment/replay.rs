//! Replaying into a new shared state: the logs from the meta page's LSN, through both files; then what only the ring of the old
//! shared state has. With the ordinary operations, logging nothing.
//!
//! A value or a transaction that comes in chunks is kept in pages of the data file until the record comes that names it. One
//! such operation runs at a time, so what another one begins is all that an unfinished one leaves.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::*;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::limits::RING_BYTES;
use crate::log::file::LogFile;
use crate::log::record::{Decoded, Op, decode, plausible_len};
use crate::log::scan::{ScanProblem, Scanner};
use crate::log::stream::{Parts, StreamOp, StreamProblem, StreamReader};
use crate::page::header::Header;
use crate::page::meta::Meta;
use crate::page::record::Extent;
use crate::storage::failpoint::crash_point;
use crate::transaction::operation::{self, Condition};
use crate::transaction::record::LogRecord;
use crate::transaction::step::Step;
use crate::transaction::writer::Writer;
use crate::types::{Lsn, Run};

use super::companions::Companions;
use super::logs::{find_log, log_bytes, open_log};
use super::recover::OldState;
use super::spool::{self, Spool};

/// What a replay has found.
#[derive(Debug)]
pub struct Replayed {
    /// Whether anything had to be done.
    pub applied: bool,
    /// Where the log files end, and the salt of the last record in them (or before them).
    pub files_end: (u64, u64),
}

/// Brings a new shared state up to date.
pub fn replay(
    core: &Core,
    companions: &Companions,
    header: &Header,
    meta: &Meta,
    old: Option<&OldState>,
) -> Result<Replayed> {
    core.set_replaying(true);
    let mut replay = Replay {
        core,
        meta_lsn: meta.replay_from.0,
        log_path: None,
        pending: Pending::None,
        log_bytes: log_bytes(companions)?,
        scratch: Vec::new(),
        record: LogRecord::default(),
        applied: false,
        last_salt: meta.last_salt,
        files_end: (meta.replay_from.0, meta.last_salt),
    };
    replay.record.encode(&Op::Clear);
    let result = replay.run(companions, header, meta, old);
    core.set_replaying(false);
    result?;
    replay.drop_pending()?;
    // The next record gets the LSN behind the last one.
    let words = &core.control().writer;
    let tail = words.tail.load(Relaxed);
    words.applied.store(tail, Relaxed);
    words.salt_from.store(tail, Relaxed);
    words.salt_before.store(replay.last_salt, Relaxed);
    core.control().changes.ring_from.store(tail, Relaxed);
    Ok(Replayed { applied: replay.applied, files_end: replay.files_end })
}

/// What has come in chunks so far.
enum Pending {
    None,
    Value(Series),
    Transaction(Spool),
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
    /// The log file that is being read; `None`: the ring.
    log_path: Option<PathBuf>,
    /// That of which chunks have been seen last.
    pending: Pending,
    /// Bytes that the logs and the ring hold together. A value that is longer was never finished.
    log_bytes: u64,
    scratch: Vec<u8>,
    /// Stands for the record of every operation: it is in the log already, and only takes up LSNs, no more than the shortest does.
    record: LogRecord,
    applied: bool,
    /// Salt of the last record.
    last_salt: u64,
    files_end: (u64, u64),
}

impl<'c> Replay<'c> {
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
        self.files_end = (at, self.last_salt);
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
        self.log_path = Some(path.to_path_buf());
        loop {
            match scanner.next() {
                Ok(Some(scanned)) => {
                    let (lsn, next) = (scanned.lsn.0, scanned.next.0);
                    self.apply(lsn, &scanned.op, next)?;
                    self.last_salt = log.header().salt;
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
        self.log_path = None;
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
            self.last_salt = old.salt_at(at);
            match decode(self.last_salt, Lsn(at), record) {
                Ok(Decoded::Record { op, .. }) => self.apply(at, &op, at + len as u64)?,
                _ => return Err(damaged()),
            }
            crash_point("recover.ring.applied");
            at += len as u64;
            rest = behind;
        }
        Ok(())
    }

    /// An error about what the record at `lsn` says.
    fn damage(&self, lsn: u64, reason: impl ToString) -> Error {
        let (path, place) = match &self.log_path {
            Some(path) => (path, format!("LSN {lsn}")),
            None => (&self.core.path, format!("LSN {lsn} in the shared state's log ring")),
        };
        Error::Corrupt { path: path.clone(), place, reason: reason.to_string() }
    }

    fn apply(&mut self, lsn: u64, op: &Op<'_>, next: u64) -> Result<()> {
        let is_new = lsn >= self.meta_lsn;
        match op {
            // Also those from before the checkpoint: what names them may come after it.
            Op::Chunk { first, total, bytes } => self.chunk(first.0, *total, bytes)?,
            Op::TransactionChunk { first, bytes } => self.transaction_chunk(lsn, first.0, bytes)?,
            Op::PutChunked { .. } | Op::AppendChunked { .. } if is_new => self.chunked(lsn, op)?,
            Op::Commit { first, total, crc, undone } if is_new => {
                self.commit(lsn, first.0, (*total, *crc), undone)?;
            }
            Op::PutChunked { first, .. }
            | Op::AppendChunked { first, .. }
            | Op::Commit { first, .. } => self.forget(first.0)?,
            Op::Transaction { ops } if is_new => {
                self.operations(lsn, StreamReader::new(&[ops]))?;
            }
            Op::Put { .. } | Op::Delete { .. } | Op::Append { .. } | Op::Clear if is_new => {
                self.change(lsn, op)?;
            }
            Op::Put { .. }
            | Op::Delete { .. }
            | Op::Append { .. }
            | Op::Clear
            | Op::Transaction { .. } => {}
        }
        self.applied = true;
        let words = &self.core.control().writer;
        words.tail.store(next, Relaxed);
        words.applied.store(next, Relaxed);
        Ok(())
    }

    /// Takes the writer lock for an operation of the record at `lsn`.
    fn lock(&self, lsn: u64) -> Result<Writer<'c>> {
        let writer = Writer::lock(self.core, None)?;
        self.core.control().writer.tail.store(lsn, Relaxed);
        Ok(writer)
    }

    /// Carries out an operation that needs nothing else.
    fn change(&mut self, lsn: u64, op: &Op<'_>) -> Result<()> {
        let core = self.core;
        let mut writer = self.lock(lsn)?;
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
            Op::Chunk { .. }
            | Op::PutChunked { .. }
            | Op::AppendChunked { .. }
            | Op::Transaction { .. }
            | Op::TransactionChunk { .. }
            | Op::Commit { .. } => return Err(self.damage(lsn, "no operation by itself")),
        }
        Ok(())
    }

    /// Carries out the operations of a transaction.
    fn operations(&mut self, lsn: u64, mut stream: StreamReader<'_>) -> Result<()> {
        loop {
            match stream.next() {
                Ok(Some(StreamOp::Whole(op))) => self.change(lsn, &op)?,
                Ok(Some(StreamOp::Long { head, value })) => self.long(lsn, &head, value)?,
                Ok(None) => return Ok(()),
                Err(problem) => return Err(self.transaction_damage(lsn, problem)),
            }
            crash_point("recover.applied");
        }
    }

    fn transaction_damage(&self, lsn: u64, problem: StreamProblem) -> Error {
        self.damage(lsn, format!("a transaction that makes no sense: {problem}"))
    }

    /// Carries out a put or an append of which `op` has all but the value.
    fn long(&mut self, lsn: u64, op: &Op<'_>, value: Parts<'_>) -> Result<()> {
        let core = self.core;
        match op {
            Op::Put { key, .. } => {
                let len = value.len();
                operation::check_lengths(core, key.len(), len)?;
                let layout = operation::layout(core.page_size, key.len(), len).0;
                let key_part = if layout == operation::Layout::LongKey { key } else { &[][..] };
                let mut extent = self.take_extent(key_part.len() as u64 + len)?;
                let mut filled = 0;
                for part in [key_part].into_iter().chain(value) {
                    fill(core, &mut extent, &mut filled, part)?;
                }
                self.put_extent(lsn, key, len, layout, &extent)
            }
            Op::Append { key, length_before, .. } => {
                let mut before = *length_before;
                for bytes in value {
                    self.change(lsn, &Op::Append { key, length_before: before, bytes })?;
                    before = before.saturating_add(bytes.len() as u64);
                }
                Ok(())
            }
            _ => Err(self.damage(lsn, "no operation with a value")),
        }
    }

    /// Takes an extent for `bytes`.
    fn take_extent(&self, bytes: u64) -> Result<Extent> {
        let core = self.core;
        let pages = operation::extent_pages(core, bytes, 0)?;
        let mut writer = Writer::lock(core, None)?;
        let mut step = Step::begin(&mut writer);
        let first = step.take(pages)?;
        step.structure()?;
        Ok(Extent { first, pages, crc: 0, epoch: core.epoch() })
    }

    /// Stores a value that lies in an extent.
    fn put_extent(
        &mut self,
        lsn: u64,
        key: &[u8],
        len: u64,
        layout: operation::Layout,
        extent: &Extent,
    ) -> Result<()> {
        let hash = self.core.hasher.hash(key);
        let mut writer = self.lock(lsn)?;
        let (any, record) = (Condition::Any, &mut self.record);
        operation::put_extent(&mut writer, hash, key, len, layout, extent, any, record, |_| {})?;
        Ok(())
    }

    /// Collects a chunk of a value in an extent of its own.
    fn chunk(&mut self, first: u64, total: u64, bytes: &[u8]) -> Result<()> {
        let core = self.core;
        let mut series = match self.pending {
            Pending::Value(series) if series.first == first => series,
            _ => {
                self.drop_pending()?;
                let fits = total <= self.log_bytes;
                let extent = if fits { Some(self.take_extent(total)?) } else { None };
                Series { first, extent, filled: 0 }
            }
        };
        if let Some(extent) = &mut series.extent {
            if series.filled + bytes.len() as u64 > total {
                return Err(
                    core.corrupt(extent.first, "the chunks of a value are longer than the value")
                );
            }
            fill(core, extent, &mut series.filled, bytes)?;
        }
        self.pending = Pending::Value(series);
        Ok(())
    }

    fn chunked(&mut self, lsn: u64, op: &Op<'_>) -> Result<()> {
        let core = self.core;
        let (key, len, first, crc, before) = match op {
            Op::PutChunked { key, len, first, crc } => (*key, *len, first.0, *crc, None),
            Op::AppendChunked { key, len, first, crc, length_before } => {
                (*key, *len, first.0, *crc, Some(*length_before))
            }
            _ => return Ok(()),
        };
        let Some(Series { extent: Some(extent), filled, .. }) = self.take_series(first) else {
            return Err(self.damage(lsn, "a value of which the log has no chunks"));
        };
        operation::check_lengths(core, key.len(), len)?;
        let layout = operation::layout(core.page_size, key.len(), len).0;
        let key_too = before.is_none() && layout == operation::Layout::LongKey;
        let expected = if key_too { len + key.len() as u64 } else { len };
        if filled != expected || extent.crc != crc {
            return Err(core.corrupt(extent.first, "the chunks of a value do not add up to it"));
        }
        let Some(length_before) = before else {
            return self.put_extent(lsn, key, len, layout, &extent);
        };
        let start = core.run(extent.first, extent.pages)?;
        // SAFETY: filled just now, and this replay's own.
        let bytes = unsafe { std::slice::from_raw_parts(start.cast_const(), len as usize) };
        self.change(lsn, &Op::Append { key, length_before, bytes })?;
        spool::give_back(core, [Run { first: extent.first, len: extent.pages }])
    }

    /// Keeps a chunk of a transaction.
    fn transaction_chunk(&mut self, lsn: u64, first: u64, bytes: &[u8]) -> Result<()> {
        if !matches!(&self.pending, Pending::Transaction(spool) if spool.first == first) {
            self.drop_pending()?;
            // If its beginning is missing, nothing may commit it.
            if first != lsn {
                return Ok(());
            }
            self.pending = Pending::Transaction(Spool::new(first));
        }
        match &mut self.pending {
            Pending::Transaction(spool) => spool.add(self.core, bytes),
            _ => Ok(()),
        }
    }

    /// Carries out a transaction that came in chunks.
    fn commit(
        &mut self,
        lsn: u64,
        first: u64,
        (total, crc): (u64, u32),
        undone: &[u8],
    ) -> Result<()> {
        let spool = match std::mem::replace(&mut self.pending, Pending::None) {
            Pending::Transaction(spool) if spool.first == first => spool,
            other => {
                self.pending = other;
                return Err(self.damage(lsn, "a transaction of which the log has no chunks"));
            }
        };
        let pieces = spool.pieces(self.core)?;
        let stream = StreamReader::committed(&pieces, total, crc, undone)
            .map_err(|problem| self.transaction_damage(lsn, problem))?;
        self.operations(lsn, stream)?;
        spool.give_back(self.core)
    }

    /// Forgets the chunks of an operation that the checkpoint already has.
    fn forget(&mut self, first: u64) -> Result<()> {
        let is_it = match &self.pending {
            Pending::None => false,
            Pending::Value(series) => series.first == first,
            Pending::Transaction(spool) => spool.first == first,
        };
        if is_it { self.drop_pending() } else { Ok(()) }
    }

    fn take_series(&mut self, first: u64) -> Option<Series> {
        match self.pending {
            Pending::Value(series) if series.first == first => {
                self.pending = Pending::None;
                Some(series)
            }
            _ => None,
        }
    }

    /// Gives back the pages of an operation that never finished.
    fn drop_pending(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.pending, Pending::None) {
            Pending::None => Ok(()),
            Pending::Value(series) => {
                let runs =
                    series.extent.map(|extent| Run { first: extent.first, len: extent.pages });
                spool::give_back(self.core, runs)
            }
            Pending::Transaction(spool) => spool.give_back(self.core),
        }
    }
}

/// Puts `bytes` into the extent behind those that are there.
fn fill(core: &Core, extent: &mut Extent, filled: &mut u64, bytes: &[u8]) -> Result<()> {
    let room = extent.pages as u64 * core.page_size as u64;
    if *filled + bytes.len() as u64 > room {
        return Err(core.corrupt(extent.first, "an extent is too short for its value"));
    }
    let at = core.run(extent.first, extent.pages)?;
    // SAFETY: within the extent, which is this replay's own. (The bytes may lie there if a damaged map says that their pages are
    // free.)
    unsafe { std::ptr::copy(bytes.as_ptr(), at.add(*filled as usize), bytes.len()) };
    extent.crc = crc32c::crc32c_append(extent.crc, bytes);
    *filled += bytes.len() as u64;
    Ok(())
}

#[cfg(test)]
mod tests;
