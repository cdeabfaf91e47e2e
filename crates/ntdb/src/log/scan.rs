//! Reading a log back: record after record, to the end of what is valid.
//!
//! A scanner takes what the checks vouch for and nothing else. The first place that holds no valid
//! record is the end of the log: zeros that were never written, a record torn by a power cut, or
//! the leftovers of an earlier use of the file. It reads through one buffer of bounded size,
//! whatever the file claims, and it writes nothing, so it can run beside processes that append; it
//! then ends at some recent end.
//!
//! Whether such an end is natural cannot be seen at the place itself, nor from valid records beyond
//! it: after a power cut the disk may have kept later sectors of the unsynced tail and lost earlier
//! ones. Only an end before what is known to have been written proves damage; recovery compares.

use std::io;

use super::file::LogFile;
use super::record::{self, Op, RECORD_HEADER_BYTES, RecordProblem};
use crate::limits::MAX_RECORD_BYTES;
use crate::types::Lsn;

/// What is read at a time.
const BUFFER_BYTES: usize = 1 << 20;

// After a refill the buffer holds a whole record, if the file does.
const _: () = assert!(BUFFER_BYTES >= 2 * MAX_RECORD_BYTES as usize);

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
}

/// The part of the file that is in memory.
#[derive(Debug, Default)]
struct Window {
    buffer: Vec<u8>,
    /// Where in the file the buffer's first byte lies.
    offset: u64,
    /// Bytes of the buffer that were read.
    len_bytes: usize,
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
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::file::{LOG_HEADER_BYTES, LogHeader};
    use super::super::record::testing::{any_op, sealed, sealed_body};
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::Config;

    const START: Lsn = Lsn(1_000_000);
    const HEADER: LogHeader =
        LogHeader { uuid: [9; 16], start: START, salt: 0xFEED, previous_salt: 0 };

    struct Fixture {
        log: LogFile,
        end: Lsn,
        _dir: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            Self::with(HEADER)
        }

        fn with(header: LogHeader) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let log = LogFile::create(&dir.path().join("log0"), 0o600, header).unwrap();
            Fixture { log, end: header.start, _dir: dir }
        }

        fn append(&mut self, op: &Op<'_>) -> Lsn {
            let lsn = self.end;
            let bytes = sealed(op, self.log.header().salt, lsn);
            self.append_bytes(&bytes);
            lsn
        }

        fn append_bytes(&mut self, bytes: &[u8]) {
            self.log.write_at(self.end, bytes).unwrap();
            self.end.0 += bytes.len() as u64;
        }

        fn damage(&self, lsn: Lsn) {
            let mut byte = [0];
            let offset = self.log.offset_of(lsn).unwrap();
            self.log.file().read_exact_at(&mut byte, offset).unwrap();
            self.log.file().write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
        }
    }

    fn count(scanner: &mut Scanner<'_>) -> usize {
        let mut count = 0;
        while scanner.next().unwrap().is_some() {
            count += 1;
        }
        count
    }

    proptest! {
        #![proptest_config(Config::with_cases(64))]

        #[test]
        fn what_was_appended_is_read_in_order(owned in prop::collection::vec(any_op(), 0..200)) {
            let mut fixture = Fixture::new();
            let lsns: Vec<Lsn> = owned.iter().map(|owned| fixture.append(&owned.op())).collect();
            let mut scanner = Scanner::new(&fixture.log, START);
            for (owned, &lsn) in owned.iter().zip(&lsns) {
                prop_assert_eq!(scanner.end(), lsn);
                let scanned = scanner.next().unwrap().unwrap();
                prop_assert_eq!((scanned.lsn, scanned.op), (lsn, owned.op()));
                prop_assert_eq!(scanned.next, scanner.end());
            }
            prop_assert_eq!(scanner.next().unwrap(), None);
            prop_assert_eq!(scanner.end(), fixture.end);
            // From every record on, as well as from the first.
            for (before, &lsn) in lsns.iter().enumerate() {
                prop_assert_eq!(count(&mut Scanner::new(&fixture.log, lsn)), lsns.len() - before);
            }
        }
    }

    #[test]
    fn records_larger_than_what_is_left_in_the_buffer() {
        let mut fixture = Fixture::new();
        let value = vec![0x5A; MAX_RECORD_BYTES as usize];
        for n in 0..40usize {
            let len = (n * 7919 * 13) % (MAX_RECORD_BYTES as usize - 100);
            fixture.append(&Op::Put { key: &n.to_le_bytes(), value: &value[..len] });
        }
        assert!(fixture.log.len_bytes().unwrap() > 3 * BUFFER_BYTES as u64);
        let mut scanner = Scanner::new(&fixture.log, START);
        for n in 0..40usize {
            let len = (n * 7919 * 13) % (MAX_RECORD_BYTES as usize - 100);
            let expected = Op::Put { key: &n.to_le_bytes(), value: &value[..len] };
            assert_eq!(scanner.next().unwrap().unwrap().op, expected);
            assert!(scanner.window.buffer.len() <= BUFFER_BYTES);
        }
        assert_eq!(scanner.next().unwrap(), None);
        assert_eq!(scanner.end(), fixture.end);
    }

    #[test]
    fn ends_where_damage_begins() {
        let mut fixture = Fixture::new();
        let lsns: Vec<Lsn> = (0..300u32)
            .map(|n| fixture.append(&Op::Put { key: &n.to_le_bytes(), value: &[1; 50] }))
            .collect();
        fixture.damage(Lsn(lsns[100].0 + 20));
        let mut scanner = Scanner::new(&fixture.log, START);
        assert_eq!(count(&mut scanner), 100);
        assert_eq!(scanner.end(), lsns[100]);
    }

    #[test]
    fn looks_again_at_the_end() {
        let mut fixture = Fixture::new();
        fixture.append(&Op::Clear);
        let dir_log = LogFile::open(fixture.log.file().path()).unwrap();
        let mut scanner = Scanner::new(&dir_log, START);
        assert_eq!(count(&mut scanner), 1);
        fixture.append(&Op::Delete { key: b"later" });
        assert_eq!(scanner.next().unwrap().unwrap().op, Op::Delete { key: b"later" });
        assert_eq!(scanner.next().unwrap(), None);
        assert_eq!(scanner.end(), fixture.end);
    }

    #[test]
    fn a_record_of_a_later_version_is_an_error_there() {
        let mut fixture = Fixture::new();
        fixture.append(&Op::Clear);
        let lsn = fixture.end;
        fixture.append_bytes(&sealed_body(&[200, 1, 2], HEADER.salt, lsn));
        let mut scanner = Scanner::new(&fixture.log, START);
        assert!(scanner.next().unwrap().is_some());
        for _ in 0..2 {
            match scanner.next() {
                Err(ScanProblem::Record { lsn: at, problem: RecordProblem::UnknownKind(200) }) => {
                    assert_eq!(at, lsn);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn nothing_of_a_reused_file_is_read() {
        let mut fixture = Fixture::new();
        for n in 0..1000u32 {
            fixture.append(&Op::Delete { key: &n.to_le_bytes() });
        }
        // The same start even, so that the salt alone tells old from new.
        let log = fixture.log.reuse(LogHeader { salt: 0xBEEF, ..HEADER }).unwrap();
        let mut scanner = Scanner::new(&log, START);
        assert_eq!(count(&mut scanner), 0);
    }

    #[test]
    fn places_outside_the_file_are_the_end() {
        let mut fixture = Fixture::new();
        fixture.append(&Op::Clear);
        for lsn in [0, START.0 - 2, START.0 + (1 << 30), u64::MAX - 5000, u64::MAX] {
            let mut scanner = Scanner::new(&fixture.log, Lsn(lsn));
            assert_eq!(scanner.next().unwrap(), None);
            assert_eq!(scanner.end(), Lsn(lsn));
        }
    }

    #[test]
    fn a_made_up_start_does_not_overflow() {
        let start = Lsn(u64::MAX - 20);
        let fixture = Fixture::with(LogHeader { start, ..HEADER });
        let record = sealed(&Op::Delete { key: &[1; 40] }, HEADER.salt, start);
        fixture.log.file().write_all_at(&record, LOG_HEADER_BYTES as u64).unwrap();
        let mut scanner = Scanner::new(&fixture.log, start);
        assert_eq!(scanner.next().unwrap(), None);
    }
}
