//! Reading a log back: record after record, to the end of what is valid.
//!
//! A scanner takes what the checks vouch for and nothing else. The first place that holds no valid
//! record is the end of the log: zeros that were never written, a record torn by a power cut, or
//! the leftovers of an earlier use of the file. It reads through one buffer of bounded size,
//! whatever the file claims, and it writes nothing, so it can run beside processes that append; it
//! then ends at some recent end.
//!
//! Whether such an end is natural cannot be seen at the place itself. [`Scanner::resync_after_end`]
//! looks for valid records beyond it. One that lies below an LSN that was known synced proves
//! damage. Above it, none proves anything: after a power cut the disk may have kept later sectors
//! of the unsynced tail and lost earlier ones.

use std::io;

use super::file::LogFile;
use super::record::{self, MIN_RECORD_BYTES, Op, RECORD_HEADER_BYTES, RecordProblem};
use crate::limits::MAX_RECORD_BYTES;
use crate::types::Lsn;

/// What is read at a time.
const BUFFER_BYTES: usize = 1 << 20;

// After a refill the buffer holds a whole record, if the file does.
const _: () = assert!(BUFFER_BYTES >= 2 * MAX_RECORD_BYTES as usize);

/// How many bytes of checksums [`Scanner::resync_after_end`] computes for each byte of its window.
/// Random bytes cost far less than one; the bound is for bytes that were made to be expensive.
const RESYNC_WORK_PER_BYTE: u64 = 64;

/// A record of the log, as the scanner yields it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scanned<'a> {
    /// Where it lies.
    pub lsn: Lsn,
    /// What it says.
    pub op: Op<'a>,
    /// Where the next one begins.
    pub next: Lsn,
}

/// Why a scan stopped before the end.
#[derive(Debug, thiserror::Error)]
pub enum ScanProblem {
    /// The file could not be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A record with a right check makes no sense: a newer version wrote it, or it was damaged
    /// before it was sealed.
    #[error("at log position {}: {problem}", lsn.0)]
    Record {
        /// Where it lies.
        lsn: Lsn,
        /// What is wrong with it.
        problem: RecordProblem,
    },
}

/// Reads a log file from one place on.
#[derive(Debug)]
pub struct Scanner<'f> {
    log: &'f LogFile,
    salt: u64,
    /// Where the next record would begin.
    position: Lsn,
    window: Window,
}

impl<'f> Scanner<'f> {
    /// A scanner that begins with the record at `from`, which must be where a record begins (or
    /// the end). A place outside the file reads as the end.
    pub fn new(log: &'f LogFile, from: Lsn) -> Self {
        Scanner { log, salt: log.header().salt, position: from, window: Window::default() }
    }

    /// The next record, or `None` at the end of the log. At the end it looks again each time it is
    /// called: what was appended meanwhile is then found.
    ///
    /// The record borrows the scanner's buffer, so this cannot be an `Iterator`.
    #[expect(clippy::should_implement_trait, reason = "the item borrows the scanner")]
    pub fn next(&mut self) -> Result<Option<Scanned<'_>>, ScanProblem> {
        let lsn = self.position;
        let Some(offset) = self.log.offset_of(lsn) else {
            return Ok(None);
        };
        let mut sealed = record::sealed_len(self.salt, lsn, self.window.from(offset));
        if sealed.is_none() {
            // Not all of it was in the buffer, or it was appended since the buffer was filled.
            self.window.refill(self.log, offset)?;
            sealed = record::sealed_len(self.salt, lsn, self.window.from(offset));
        }
        // A position beyond u64 comes from a made-up start LSN only.
        let Some((len, next)) = sealed.and_then(|len| Some((len, lsn.0.checked_add(len.into())?)))
        else {
            return Ok(None);
        };
        let body = &self.window.from(offset)[RECORD_HEADER_BYTES..len as usize];
        let op =
            record::decode_body(body).map_err(|problem| ScanProblem::Record { lsn, problem })?;
        self.position = Lsn(next);
        Ok(Some(Scanned { lsn, op, next: Lsn(next) }))
    }

    /// Where the scan stands: after [`Scanner::next`] returned `None`, the end of the log.
    pub fn end(&self) -> Lsn {
        self.position
    }

    /// The first valid record that begins after the end within the next `window_bytes` bytes, at
    /// whatever byte; call it when [`Scanner::next`] has returned `None`. What it means stands at
    /// the head of this module.
    ///
    /// The work is bounded even for bytes that were made to be expensive to test; when the bound is
    /// reached, the answer is `None`.
    pub fn resync_after_end(&mut self, window_bytes: u64) -> io::Result<Option<Lsn>> {
        let mut work_bytes = window_bytes.saturating_mul(RESYNC_WORK_PER_BYTE);
        let last = self.position.0.saturating_add(window_bytes);
        let mut lsn = self.position;
        while lsn.0 < last {
            lsn.0 += 1;
            let Some(offset) = self.log.offset_of(lsn) else {
                return Ok(None);
            };
            if self.window.from(offset).len() < MAX_RECORD_BYTES as usize
                && !self.window.reaches_end
            {
                self.window.refill(self.log, offset)?;
            }
            let bytes = self.window.from(offset);
            if bytes.len() < MIN_RECORD_BYTES {
                return Ok(None);
            }
            let Some(len) = record::plausible_len(bytes) else {
                continue;
            };
            let Some(left) = work_bytes.checked_sub(len as u64) else {
                return Ok(None);
            };
            work_bytes = left;
            if record::sealed_len(self.salt, lsn, bytes).is_some() {
                return Ok(Some(lsn));
            }
        }
        Ok(None)
    }
}

/// The part of the file that is in memory.
#[derive(Debug, Default)]
struct Window {
    buffer: Vec<u8>,
    /// Where in the file the buffer's first byte lies.
    offset: u64,
    /// Bytes of the buffer that were read.
    len_bytes: usize,
    /// Whether the file ended there when it was read.
    reaches_end: bool,
}

impl Window {
    /// The bytes in memory from `offset` on; none if it lies outside.
    fn from(&self, offset: u64) -> &[u8] {
        let read = &self.buffer[..self.len_bytes];
        let skip = offset.checked_sub(self.offset).and_then(|skip| usize::try_from(skip).ok());
        skip.and_then(|skip| read.get(skip..)).unwrap_or_default()
    }

    /// Reads the bytes from `offset` on.
    fn refill(&mut self, log: &LogFile, offset: u64) -> io::Result<()> {
        let file_rest_bytes = log.len_bytes()?.saturating_sub(offset);
        let want = usize::try_from(file_rest_bytes).unwrap_or(BUFFER_BYTES).min(BUFFER_BYTES);
        // A small log gets a small buffer; a buffer once made is kept.
        if self.buffer.len() < want {
            self.buffer.resize(want, 0);
        }
        self.offset = offset;
        self.len_bytes = 0;
        while self.len_bytes < want {
            let at = offset + self.len_bytes as u64;
            let read = log.file().read_at(&mut self.buffer[self.len_bytes..want], at)?;
            if read == 0 {
                break;
            }
            self.len_bytes += read;
        }
        self.reaches_end = self.len_bytes < BUFFER_BYTES;
        Ok(())
    }
}
