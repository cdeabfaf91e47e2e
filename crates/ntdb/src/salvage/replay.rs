//! What the redo logs, and the ring of the shared memory, have beyond the last checkpoint.

use crate::environment::companions::{AttachRecord, Companions};
use crate::environment::recover::OldState;
use crate::environment::sidecar::open_shm;
use crate::environment::spool::Spool;
use crate::error::Result;
use crate::limits::RING_BYTES;
use crate::log::file::LogFile;
use crate::log::record::{Decoded, Op, decode, plausible_len};
use crate::log::scan::Scanner;
use crate::log::stream::{StreamOp, StreamProblem, StreamReader};
use crate::page::meta::Meta;
use crate::storage::filesystem;
use crate::storage::mapping::Access;
use crate::types::Lsn;

use super::Salvage;

/// A value that came in chunks.
#[derive(Default)]
struct Series {
    first: u64,
    chunks: Vec<Chunk>,
    bytes: u64,
    crc: u32,
}

/// Where a chunk is.
enum Chunk {
    /// In one of the log files that are read.
    Log(usize, Lsn),
    /// In memory: it came from the ring.
    Ring(Vec<u8>),
}

impl Series {
    /// Adds a chunk of the series that begins at `first`. One series is written at a time, so another one begins when this is left.
    fn add(&mut self, first: Lsn, bytes: &[u8], chunk: Chunk) {
        if self.first != first.0 || self.chunks.is_empty() {
            *self = Series { first: first.0, ..Series::default() };
        }
        self.chunks.push(chunk);
        self.bytes += bytes.len() as u64;
        self.crc = crc32c::crc32c_append(self.crc, bytes);
    }
}

impl Salvage<'_> {
    /// Applies what the logs and the ring have.
    pub(super) fn logs(&mut self, meta: &Meta) -> Result<()> {
        let record = AttachRecord::read(&self.source.file).ok().flatten();
        let mut places = vec![Companions::of(&self.source.resolved, None)];
        if let Some(record) = record.as_ref().filter(|record| record.file == self.source.id) {
            places.insert(0, record.companions());
        }
        let base = std::path::Path::new(std::ffi::OsStr::new(
            <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&meta.base_path),
        ));
        if base.is_absolute() {
            places.push(Companions::of(base, None));
        }
        self.find_and_apply(meta, record.as_ref(), &places)?;
        // One that was never committed.
        match self.transaction.take() {
            Some(spool) => spool.give_back(&self.destination.environment().core),
            None => Ok(()),
        }
    }

    fn find_and_apply(
        &mut self,
        meta: &Meta,
        record: Option<&AttachRecord>,
        places: &[Companions],
    ) -> Result<()> {
        let mut series = Series::default();
        if meta.log_salt == 0 {
            return self.ring(meta, record, places, meta.replay_from.0, &mut series, &[]);
        }
        let logs = self.find_logs(meta, places);
        if logs.is_empty() {
            self.problem(format!(
                "the redo log {} is missing: changes after the last checkpoint are lost",
                places[0].logs[meta.log_index as usize & 1].display()
            ));
            return Ok(());
        }
        let end = self.apply_logs(meta, &logs, &mut series)?;
        self.ring(meta, record, places, end, &mut series, &logs)
    }

    /// The log that the meta page names, and the one that continues it.
    fn find_logs(&self, meta: &Meta, places: &[Companions]) -> Vec<LogFile> {
        let open = |salt: &dyn Fn(&LogFile) -> bool| {
            places.iter().flat_map(|place| &place.logs).find_map(|path| {
                let log = LogFile::open_readonly(path).ok()?;
                let ours = self
                    .source
                    .header
                    .as_ref()
                    .is_none_or(|header| header.uuid == log.header().uuid);
                (ours && salt(&log)).then_some(log)
            })
        };
        let Some(first) = open(&|log| log.header().salt == meta.log_salt) else {
            return Vec::new();
        };
        let (salt, start) = (first.header().salt, first.header().start);
        let next = open(&|log| {
            let header = log.header();
            header.previous_salt == salt && header.salt != salt && header.start >= start
        });
        std::iter::once(first).chain(next).collect()
    }

    /// Applies the records of the logs; returns where they end.
    fn apply_logs(&mut self, meta: &Meta, logs: &[LogFile], series: &mut Series) -> Result<u64> {
        let mut at = meta.keep_from;
        for (index, log) in logs.iter().enumerate() {
            let start = log.header().start;
            if index > 0 && start != at || start > at {
                self.problem(format!(
                    "the redo log {} begins at LSN {}, but the changes before end at {}: what it has is lost",
                    log.file().path().display(), start.0, at.0
                ));
                return Ok(at.0);
            }
            let mut scanner = Scanner::new(log, at);
            loop {
                match scanner.next() {
                    Ok(Some(scanned)) => {
                        let lsn = scanned.lsn;
                        if let Op::Chunk { first, bytes, .. } = &scanned.op {
                            series.add(*first, bytes, Chunk::Log(index, lsn));
                        } else if let Op::TransactionChunk { first, bytes } = &scanned.op {
                            self.transaction_chunk(lsn, *first, bytes)?;
                        } else if lsn >= meta.replay_from {
                            self.apply(lsn.0, &scanned.op, series, logs)?;
                        }
                        at = scanned.next;
                    }
                    Ok(None) => break,
                    Err(problem) => {
                        self.problem(format!("{}: {problem}", log.file().path().display()));
                        return Ok(at.0);
                    }
                }
            }
        }
        Ok(at.0)
    }

    fn apply(&mut self, lsn: u64, op: &Op, series: &Series, logs: &[LogFile]) -> Result<()> {
        // Of a transaction its operations count.
        if !matches!(op, Op::Transaction { .. } | Op::Commit { .. }) {
            self.report.log_records += 1;
        }
        match op {
            Op::Put { key, value } => self.destination.put(key, value)?,
            Op::Delete { key } => drop(self.destination.delete(key)?),
            Op::Clear => self.destination.clear()?,
            Op::Append { key, length_before, bytes } => {
                if self.is_long(key, *length_before, lsn)? {
                    self.destination.append(key, bytes)?;
                }
            }
            Op::PutChunked { key, len, first, crc } => {
                let fits = series.first == first.0
                    && series.crc == *crc
                    && (series.bytes == *len || series.bytes == *len + key.len() as u64);
                self.destination.delete(key)?;
                if !fits {
                    self.problem(format!("LSN {lsn}: the chunks of a value do not add up to it"));
                    return Ok(());
                }
                self.destination.put(key, b"")?;
                self.chunks(key, series, series.bytes - len, logs)?;
            }
            Op::AppendChunked { key, length_before, len, first, crc } => {
                if !self.is_long(key, *length_before, lsn)? {
                    return Ok(());
                }
                if series.first != first.0 || series.crc != *crc || series.bytes != *len {
                    self.problem(format!("LSN {lsn}: the chunks of a value do not add up to it"));
                    self.destination.delete(key)?;
                    return Ok(());
                }
                self.chunks(key, series, 0, logs)?;
            }
            Op::Transaction { ops } => self.operations(lsn, StreamReader::new(&[ops]))?,
            Op::Commit { first, total, crc, undone } => {
                self.commit(lsn, *first, (*total, *crc), undone)?;
            }
            Op::Chunk { .. } | Op::TransactionChunk { .. } => {}
        }
        Ok(())
    }

    /// Keeps a chunk of a transaction, in pages of the new database.
    fn transaction_chunk(&mut self, lsn: Lsn, first: Lsn, bytes: &[u8]) -> Result<()> {
        let environment = self.destination.environment().clone();
        let core = &environment.core;
        if self.transaction.as_ref().is_none_or(|spool| spool.first != first.0) {
            // One is written at a time, so another one begins when this is left.
            if let Some(spool) = self.transaction.take() {
                spool.give_back(core)?;
            }
            self.transaction = (first == lsn).then(|| Spool::new(first.0));
        }
        match &mut self.transaction {
            Some(spool) => spool.add(core, bytes),
            None => Ok(()),
        }
    }

    /// Applies a transaction that came in chunks, if all of it is there.
    fn commit(
        &mut self,
        lsn: u64,
        first: Lsn,
        (total, crc): (u64, u32),
        undone: &[u8],
    ) -> Result<()> {
        let environment = self.destination.environment().clone();
        let spool = self.transaction.take().unwrap_or(Spool::new(first.0));
        if spool.first == first.0 {
            let pieces = spool.pieces(&environment.core)?;
            match StreamReader::committed(&pieces, total, crc, undone) {
                Ok(stream) => self.operations(lsn, stream)?,
                Err(problem) => self.lost_operations(lsn, &problem),
            }
        } else {
            self.problem(format!("LSN {lsn}: a transaction of which the log has no chunks"));
        }
        spool.give_back(&environment.core)
    }

    /// Applies the operations of a transaction.
    fn operations(&mut self, lsn: u64, mut stream: StreamReader<'_>) -> Result<()> {
        loop {
            match stream.next() {
                Ok(Some(StreamOp::Whole(op))) => self.apply(lsn, &op, &Series::default(), &[])?,
                Ok(Some(StreamOp::Long { head, value })) => {
                    self.report.log_records += 1;
                    let key = match head {
                        Op::Put { key, .. } => {
                            self.destination.put(key, b"")?;
                            key
                        }
                        Op::Append { key, length_before, .. }
                            if self.is_long(key, length_before, lsn)? =>
                        {
                            key
                        }
                        _ => continue,
                    };
                    for part in value {
                        self.destination.append(key, part)?;
                    }
                }
                Ok(None) => return Ok(()),
                Err(problem) => {
                    self.lost_operations(lsn, &problem);
                    return Ok(());
                }
            }
        }
    }

    fn lost_operations(&mut self, lsn: u64, problem: &StreamProblem) {
        self.problem(format!("LSN {lsn}: changes of a transaction are lost: {problem}"));
    }

    /// Whether the key's value has this length. If not, what was added to it is no use without what was before.
    fn is_long(&mut self, key: &[u8], expected: u64, lsn: u64) -> Result<bool> {
        let found = self.destination.view(key, |value| value.len() as u64)?;
        // An append creates a key that is absent.
        if found.unwrap_or(0) == expected {
            return Ok(true);
        }
        self.destination.delete(key)?;
        self.report.lost_values += 1;
        self.problem(format!(
            "LSN {lsn}: bytes were added to a value of {expected} bytes that is lost or damaged"
        ));
        Ok(false)
    }

    /// Adds the chunks of a series to a value, but the first `skip` bytes.
    fn chunks(&mut self, key: &[u8], series: &Series, skip: u64, logs: &[LogFile]) -> Result<()> {
        let mut skip = skip as usize;
        let mut add = |bytes: &[u8]| {
            let from = skip.min(bytes.len());
            skip -= from;
            self.destination.append(key, &bytes[from..]).map(drop)
        };
        for chunk in &series.chunks {
            match chunk {
                Chunk::Ring(bytes) => add(bytes)?,
                Chunk::Log(index, lsn) => {
                    let mut scanner = Scanner::new(&logs[*index], *lsn);
                    if let Ok(Some(scanned)) = scanner.next()
                        && let Op::Chunk { bytes, .. } = scanned.op
                    {
                        add(bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Applies what only the ring of the shared memory has.
    fn ring(
        &mut self,
        meta: &Meta,
        record: Option<&AttachRecord>,
        places: &[Companions],
        mut at: u64,
        series: &mut Series,
        logs: &[LogFile],
    ) -> Result<()> {
        let boot_id = filesystem::boot_id().unwrap_or([0; 16]);
        let same_boot = |record: &&AttachRecord| {
            record.file == self.source.id && record.boot_id == boot_id && boot_id != [0; 16]
        };
        let is_needed = record.filter(same_boot).is_some();
        let old = places.iter().find_map(|place| {
            let shm = open_shm(&place.shm, Access::ReadOnly).ok()?;
            let found = shm.header();
            let uuid = self.source.header.as_ref().is_none_or(|header| header.uuid == found.uuid);
            let ours =
                uuid && (found.device, found.inode) == (self.source.id.dev, self.source.id.ino);
            if ours { OldState::open(shm, meta, boot_id) } else { None }
        });
        let Some(old) = old else {
            if is_needed {
                self.problem(format!(
                    "the shared memory {} is missing or damaged: changes that were not synced are lost",
                    places[0].shm.display()
                ));
            }
            return Ok(());
        };
        let tail = old.tail();
        if at >= tail {
            return Ok(());
        }
        if tail - at > RING_BYTES {
            self.problem("the log ring does not reach back to the log's end: changes that were not synced are lost".into());
            return Ok(());
        }
        let mut bytes = vec![0; (tail - at) as usize];
        old.shm.ring_read(at, &mut bytes);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let len = plausible_len(rest).filter(|&len| len <= rest.len());
            let decoded = len.map(|len| decode(old.salt_at(at), Lsn(at), &rest[..len]));
            let (Some(len), Some(Ok(Decoded::Record { op, .. }))) = (len, decoded) else {
                self.problem(
                    "the log ring holds a damaged record: changes after it are lost".into(),
                );
                return Ok(());
            };
            if let Op::Chunk { first, bytes, .. } = op {
                series.add(first, bytes, Chunk::Ring(bytes.to_vec()));
            } else if let Op::TransactionChunk { first, bytes } = op {
                self.transaction_chunk(Lsn(at), first, bytes)?;
            } else {
                self.apply(at, &op, series, logs)?;
            }
            at += len as u64;
            rest = &rest[len..];
        }
        Ok(())
    }
}
