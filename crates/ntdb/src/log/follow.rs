//! Reading the log while it is written: by those who follow the changes.
//!
//! A follower takes no lock and writes nothing, so nobody waits for it. It reads only what is *applied*, so what it tells has
//! happened and can be seen. Where a record lies:
//!
//! - In the **ring**: what has not been written to a file is not overwritten, and of what has been, most of the last MiB is still
//!   there. A writer may be at it all the same. So a follower copies first and then looks whether the copy is good: a
//!   record is overwritten only after it has been written to a file, by one that ends less than
//!   [`RING_BYTES`] behind it, and none is longer than [`MAX_RECORD_BYTES`].
//! - In a **log file**: of the two that are in use, or one that is kept. They form a chain: each names the salt of the one that it
//!   continues, and the newest is the one that is being written. So a file that does not belong to this history, of a
//!   restored backup say, is never read. A file may be re-used while it is read: the records in it then fail their check.
//!
//! **Positions.** An LSN alone does not tell one history from another: after a power cut that took changes which were not yet
//! durable, others get the same LSNs. So the salt of the record that ends at a position goes with it. Salts are random, and
//! each opening of a database and each log file has one of its own.

use std::io;
use std::path::Path;
use std::sync::atomic::{Ordering::*, fence};
use std::time::Duration;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::limits::{MAX_RECORD_BYTES, RING_BYTES};
use crate::log::file::{LogFile, OpenProblem};
use crate::log::flush::Logs;
use crate::log::keep;
use crate::log::record::{self, Op, RECORD_HEADER_BYTES};
use crate::types::Lsn;

/// What is read at a time: at least one record, whatever its length.
const BATCH_BYTES: u64 = MAX_RECORD_BYTES;
/// Files move while they are looked for; so often it is tried again.
const ATTEMPTS: u32 = 100;

/// A record that has been carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Followed<'f> {
    /// Where it lies.
    pub lsn: u64,
    /// Where the next one begins.
    pub next: u64,
    /// What it says.
    pub op: Op<'f>,
}

/// A log file, and where its records end as far as is known.
#[derive(Debug)]
struct Segment {
    log: LogFile,
    end: u64,
}

/// What the files have of the time before the ring.
#[derive(Debug)]
enum Located {
    In(Segment),
    /// Nothing that old; this is where the oldest begins. (The ring may reach farther back, but who knows where a record begins there?)
    OldestIs(u64),
}

/// See the module's description.
#[derive(Debug)]
pub struct Follower {
    /// Where the next record begins.
    at: u64,
    /// Salt of the record before it; 0 if that is not known.
    salt: u64,
    /// Bytes of the log from `base` on, which bear `batch_salt`.
    batch: Vec<u8>,
    base: u64,
    batch_salt: u64,
    segment: Option<Segment>,
}

impl Follower {
    /// Begins at `at`, where a record must begin.
    pub fn new(at: u64, salt: u64) -> Follower {
        Follower { at, salt, batch: Vec::new(), base: at, batch_salt: 0, segment: None }
    }

    /// Where the next record begins, and the salt of the one before.
    pub fn position(&self) -> (u64, u64) {
        (self.at, self.salt)
    }

    /// The next record; `None` if nothing more has been carried out.
    pub fn next(&mut self, core: &Core, logs: &Logs) -> Result<Option<Followed<'_>>> {
        let applied = core.control().writer.applied.load(Acquire);
        if self.at >= applied {
            return Ok(None);
        }
        let mut len = self.sealed_len(applied);
        if len.is_none() {
            self.fill(core, logs, applied)?;
            len = self.sealed_len(applied);
        }
        let Some(len) = len else { return Err(self.damage(core)) };
        let lsn = self.at;
        let from = (lsn - self.base) as usize;
        self.at += len as u64;
        self.salt = self.batch_salt;
        let body = &self.batch[from + RECORD_HEADER_BYTES..from + len as usize];
        let op = record::decode_body(body).map_err(|problem| Error::Corrupt {
            path: core.path.clone(),
            place: format!("LSN {lsn} of the log"),
            reason: problem.to_string(),
        })?;
        Ok(Some(Followed { lsn, next: self.at, op }))
    }

    /// Length of the next record, if it is in memory and belongs there.
    fn sealed_len(&self, applied: u64) -> Option<u32> {
        let from = usize::try_from(self.at.checked_sub(self.base)?).ok()?;
        let bytes = self.batch.get(from..)?;
        let len = record::sealed_len(self.batch_salt, Lsn(self.at), bytes)?;
        (self.at + len as u64 <= applied).then_some(len)
    }

    /// Reads the next record, and what follows it, into memory.
    fn fill(&mut self, core: &Core, logs: &Logs, applied: u64) -> Result<()> {
        for attempt in 0..ATTEMPTS {
            if self.read_ring(core, applied) || self.read_segment(applied)? {
                return Ok(());
            }
            match locate(core, logs, self.at)? {
                Located::In(segment) => {
                    self.segment = Some(segment);
                    if self.read_segment(applied)? {
                        return Ok(());
                    }
                    if self.read_ring(core, applied) {
                        return Ok(());
                    }
                }
                // Once more, in case that logs were switched while they were looked for. The ring may have it all the same: if
                // logs are switched often, records with salts that nobody knows any more.
                Located::OldestIs(oldest) if oldest > self.at && attempt >= 2 => {
                    return Err(Error::ChangesNotKept {
                        path: core.path.clone(),
                        from: self.at,
                        oldest,
                    });
                }
                Located::OldestIs(_) => {}
            }
            std::thread::sleep(Duration::from_micros(20 * attempt as u64));
        }
        Err(self.damage(core))
    }

    #[cold]
    fn damage(&self, core: &Core) -> Error {
        let (path, reason) = match &self.segment {
            Some(segment) if segment.end > self.at => (
                segment.log.file().path().to_path_buf(),
                format!("there is no valid record, though the log reaches to {}", segment.end),
            ),
            _ => (core.path.clone(), "there is no valid record in the log".into()),
        };
        Error::Corrupt { path, place: format!("LSN {}", self.at), reason }
    }

    /// Copies from the ring; says whether the next record is there.
    fn read_ring(&mut self, core: &Core, applied: u64) -> bool {
        if !is_in_ring(core, self.at) {
            return false;
        }
        let words = &core.control().writer;
        let salts = [words.salt.load(Acquire), words.salt_before.load(Acquire)];
        self.base = self.at;
        self.batch.resize((applied - self.at).min(BATCH_BYTES) as usize, 0);
        core.shm.ring_read(self.at, &mut self.batch);
        // What is looked at now is no older than what was copied.
        fence(SeqCst);
        if !is_in_ring(core, self.at) {
            self.batch.clear();
            return false;
        }
        self.has_first(&salts, applied)
    }

    /// Whether the batch begins with the next record, under one of `salts`.
    fn has_first(&mut self, salts: &[u64], applied: u64) -> bool {
        salts.iter().any(|&salt| {
            self.batch_salt = salt;
            self.sealed_len(applied).is_some()
        })
    }

    /// Reads from the log file that was used last; says whether the next record is there.
    fn read_segment(&mut self, applied: u64) -> Result<bool> {
        let Some(segment) = &self.segment else { return Ok(false) };
        let start = segment.log.header().start.0;
        if self.at < start || self.at >= segment.end {
            return Ok(false);
        }
        let want = (segment.end.min(applied) - self.at).min(BATCH_BYTES) as usize;
        let failed = |e| Error::from_io(segment.log.file().path(), "read the log", e);
        let Some(offset) = segment.log.offset_of(Lsn(self.at)) else { return Ok(false) };
        self.base = self.at;
        self.batch.resize(want, 0);
        let mut len = 0;
        while len < want {
            match segment.log.file().read_at(&mut self.batch[len..], offset + len as u64) {
                Ok(0) => break,
                Ok(read) => len += read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(failed(e)),
            }
        }
        self.batch.truncate(len);
        let salt = segment.log.header().salt;
        Ok(self.has_first(&[salt], applied))
    }
}

/// Whether the record at `at` is in the ring and not being overwritten. After a copy: whether the copy is good.
fn is_in_ring(core: &Core, at: u64) -> bool {
    let control = core.control();
    at >= control.changes.ring_from.load(Acquire)
        && (at >= control.log.written.load(Acquire) || at >= overwritten(core))
}

/// Up to here the ring may have been overwritten.
fn overwritten(core: &Core) -> u64 {
    let tail = core.control().writer.tail.load(Acquire);
    tail.saturating_add(MAX_RECORD_BYTES).saturating_sub(RING_BYTES)
}

/// Calls `f` with every log file of this history, from the newest to the oldest, and the LSN up to which it reaches, until
/// `f` returns true. Returns where the last one begins and what it continues.
fn walk(core: &Core, logs: &Logs, mut f: impl FnMut(&LogFile, u64) -> bool) -> Result<Walked> {
    let control = core.control();
    let (mut salt, mut end) = match control.log.exists.load(Acquire) {
        1 => (control.log.salt.load(Acquire), control.log.written.load(Acquire)),
        // What is in the ring continues what was before this opening.
        _ => (control.writer.salt_before.load(Acquire), control.changes.ring_from.load(Acquire)),
    };
    // Those in use first: from there they move to those that are kept, never back.
    let mut files = Vec::new();
    for path in &logs.paths {
        files.extend(open(path)?.filter(|log| log.header().uuid == logs.uuid));
    }
    let kept = match control.changes.keep_log_bytes() {
        0 => Vec::new(),
        _ => keep::list(&logs.kept)?,
    };
    let mut kept = kept.into_iter().rev();
    // Nothing may have been written yet to the file that is being written.
    let mut may_be_empty = true;
    loop {
        // The kept ones that may continue, newest first; each is opened once.
        let fits = |log: &LogFile| {
            let start = log.header().start.0;
            log.header().salt == salt && (start < end || may_be_empty && start == end)
        };
        let mut found = best(&mut files, &fits);
        while found.is_none() {
            let Some((start, path)) = kept.next() else { break };
            if start > end {
                continue;
            }
            let Some(log) = open(&path)?.filter(|log| log.header().uuid == logs.uuid) else {
                continue;
            };
            if fits(&log) {
                found = Some(log);
            }
        }
        let Some(log) = found else {
            return Ok(Walked { file: None, begins: end, continues: salt });
        };
        let header = *log.header();
        let done = f(&log, end);
        if done || header.previous_salt == 0 {
            let file = done.then_some(log);
            return Ok(Walked { file, begins: header.start.0, continues: header.previous_salt });
        }
        (salt, end) = (header.previous_salt, header.start.0);
        may_be_empty = false;
    }
}

/// Where a walk has ended.
struct Walked {
    /// The file at which it was ended.
    file: Option<LogFile>,
    /// Where the last file begins.
    begins: u64,
    /// Salt of the record before that.
    continues: u64,
}

/// Takes the newest of `files` that fits.
fn best(files: &mut Vec<LogFile>, fits: &dyn Fn(&LogFile) -> bool) -> Option<LogFile> {
    let index = (0..files.len())
        .filter(|&index| fits(&files[index]))
        .max_by_key(|&index| files[index].header().start)?;
    Some(files.swap_remove(index))
}

/// Opens a log file; `None` if it is not there (any more) or none.
fn open(path: &Path) -> Result<Option<LogFile>> {
    match LogFile::open_readonly(path) {
        Ok(log) => Ok(Some(log)),
        Err(OpenProblem::Header(_)) => Ok(None),
        Err(OpenProblem::Io(e)) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(OpenProblem::Io(e)) => Err(Error::from_io(path, "open the log", e)),
    }
}

/// Finds the file that has the record at `at`.
fn locate(core: &Core, logs: &Logs, at: u64) -> Result<Located> {
    let mut reaches = 0;
    let walked = walk(core, logs, |log, end| {
        reaches = end;
        log.header().start.0 <= at
    })?;
    Ok(match walked.file {
        Some(log) if at < reaches => Located::In(Segment { log, end: reaches }),
        // It is in no file yet.
        Some(_) => Located::OldestIs(at),
        None => Located::OldestIs(walked.begins),
    })
}

/// The end of what has been carried out: LSN and salt of the last record.
pub fn present(core: &Core) -> (u64, u64) {
    let words = &core.control().writer;
    let mut attempt = 0;
    loop {
        attempt += 1;
        let salts = || {
            let from = words.salt_from.load(Acquire);
            (from, words.salt.load(Acquire), words.salt_before.load(Acquire))
        };
        let before = salts();
        let applied = words.applied.load(Acquire);
        fence(SeqCst);
        // The three are stored one after the other, at a freeze, when no change is under way.
        let is_whole = before == salts() && words.applied.load(Acquire) == applied;
        if is_whole || attempt > 10_000 {
            let (from, salt, salt_before) = before;
            return (applied, if applied > from { salt } else { salt_before });
        }
        std::hint::spin_loop();
    }
}

/// Salt of the record that ends at `lsn`, if that can still be told. `lsn` has been carried out.
fn salt_before(core: &Core, logs: &Logs, lsn: u64) -> Result<Option<u64>> {
    let words = &core.control().writer;
    for _ in 0..ATTEMPTS {
        let from = words.salt_from.load(Acquire);
        let (salt, before) = (words.salt.load(Acquire), words.salt_before.load(Acquire));
        fence(SeqCst);
        if from != words.salt_from.load(Acquire) || before != words.salt_before.load(Acquire) {
            continue;
        }
        if lsn >= from {
            return Ok(Some(if lsn > from { salt } else { before }));
        }
        break;
    }
    let mut salt = None;
    let walked = walk(core, logs, |log, _| {
        let header = log.header();
        if header.start.0 < lsn {
            salt = Some(header.salt);
        }
        salt.is_some()
    })?;
    Ok(salt.or((walked.begins == lsn).then_some(walked.continues)))
}

/// A follower from `from` on; `salt` is that of the record that ends there, or 0 if it is not to be checked.
pub fn follow(core: &Core, logs: &Logs, from: u64, salt: u64) -> Result<Follower> {
    let path = || core.path.clone();
    let (applied, _) = present(core);
    if from > applied {
        return Err(if salt == 0 {
            Error::ChangesAhead { path: path(), from, newest: applied }
        } else {
            Error::ChangesLost { path: path(), from }
        });
    }
    // Before the first record there is none that would have a salt. If it cannot be told, `from` is too old, which is the error of
    // what follows.
    let found = if from > 0 { salt_before(core, logs, from)? } else { None };
    if salt != 0 && found.is_some_and(|found| found != salt) {
        return Err(Error::ChangesLost { path: path(), from });
    }
    let mut follower = Follower::new(from, found.unwrap_or(salt));
    if from < applied {
        match follower.fill(core, logs, applied) {
            Ok(()) => {}
            Err(Error::Corrupt { .. }) if salt == 0 => {
                return Err(Error::InvalidOption {
                    what: "position in the changes",
                    reason: format!("no change begins at {from}"),
                });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(follower)
}
