//! Replaying into a new shared state: the logs from the meta page's LSN, through both files; then what only the ring of the old
//! shared state has. With the ordinary operations, logging nothing.

use std::path::Path;
use std::sync::atomic::Ordering::*;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::limits::RING_BYTES;
use crate::log::file::LogFile;
use crate::log::record::{Decoded, Op, decode, plausible_len};
use crate::log::scan::{ScanProblem, Scanner};
use crate::page::header::Header;
use crate::page::meta::Meta;
use crate::page::record::Extent;
use crate::storage::failpoint::crash_point;
use crate::transaction::operation::{self, Condition};
use crate::transaction::record::LogRecord;
use crate::transaction::step::Step;
use crate::transaction::writer::Writer;
use crate::types::{Epoch, Lsn, Run};

use super::companions::Companions;
use super::logs::{find_log, log_bytes, open_log};
use super::recover::OldState;

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
