//! One redo log file, `NAME-log0` or `NAME-log1`: a header block, then records without gaps.
//!
//! ```text
//! 0                        4096
//! +------------------------+----------+----------+--- - - -+-----------+
//! | header block           | record   | record   |         | zeros     |
//! +------------------------+----------+----------+--- - - -+-----------+
//!                          start      start + length ...    file length
//! ```
//!
//! The record with LSN *L* lies at byte 4096 + (*L* - start). The header block is
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..8 | magic, `NTDBLOG\0` |
//! | 8..12 | format version (u32) |
//! | 12..16 | zero |
//! | 16..32 | UUID of the database |
//! | 32..40 | start: LSN of the first record (u64) |
//! | 40..48 | salt of the records in this file (u64) |
//! | 48..56 | salt of the log before it, 0 if there is none (u64) |
//! | 56..124 | zero |
//! | 124..128 | CRC-32C of bytes 0..124 |
//! | 128..4096 | zero, not looked at |
//!
//! # Growing without overwriting
//!
//! Bytes that were zero-filled beforehand take a sync at half the price of bytes that were merely
//! allocated, so the file grows by runs of zeros: 64 KiB first, then as much as it has, at most
//! 4 MiB at a time. Two processes may be at it at once, because the flush lock can be taken from a
//! live owner that is too slow. The slow one may wake up at any instruction, so a length that it
//! has looked at says nothing, and "zero what lies beyond it" could wipe out records that the
//! other has written and acknowledged meanwhile. Therefore:
//!
//! 1. Zeros are *appended* (`RWF_APPEND`): the kernel finds the end of the file and writes there in
//!    one step, under the inode's lock. They can land only where no byte was.
//! 2. Records are written only below the length, after it was seen to suffice. So no record lies
//!    where a later append of zeros could land.
//! 3. Nobody ever shortens a log file. A file that is longer than one process thinks is harmless.
//! 4. Two writers of the same LSNs write the same bytes: a record never changes once it has its
//!    LSN, and a flusher writes from a private copy that it checked before. Which of them comes
//!    last does not matter.
//!
//! # Crashes
//!
//! - While a file is created: it has no valid header until its first block is there whole, and the
//!   meta page that names it is written only after it and its directory were synced.
//! - While it grows: zeros read as the end of the log.
//! - While the disk is full: zeros that did fit stay at the end; they are used later.
//! - While a header is replaced in a re-used file: all fields lie in one 512-byte sector, which
//!   disks write whole, so it is the old header or the new one. With the new one no old record
//!   validates, because the salt differs. The old one is needed no longer, or the file would not be
//!   re-used.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::le;
use crate::limits::FORMAT_VERSION;
use crate::storage::failpoint::{self, Event, What, crash_point};
use crate::storage::file::{self, File, Kind};
use crate::types::Lsn;

/// Bytes of the header block; the records begin behind it.
pub const LOG_HEADER_BYTES: usize = 4096;
/// How far a new file reaches, and the smallest step by which one grows. Lengths are multiples.
pub const GROW_BYTES_MIN: u64 = 64 << 10;
/// The largest step by which a file grows.
pub const GROW_BYTES_MAX: u64 = 4 << 20;

const MAGIC: [u8; 8] = *b"NTDBLOG\0";

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = MAGIC_AT + 8;
const UUID_AT: usize = VERSION_AT + 8;
const START_AT: usize = UUID_AT + 16;
const SALT_AT: usize = START_AT + 8;
const PREVIOUS_SALT_AT: usize = SALT_AT + 8;
const FIELDS_END: usize = PREVIOUS_SALT_AT + 8;
const CRC_AT: usize = 124;

// The table above, and the argument that a header is replaced whole.
const _: () = assert!(UUID_AT == 16 && START_AT == 32 && SALT_AT == 40 && PREVIOUS_SALT_AT == 48);
const _: () = assert!(FIELDS_END <= CRC_AT && CRC_AT + 4 <= 512 && 512 <= LOG_HEADER_BYTES);
const _: () = assert!(GROW_BYTES_MIN > LOG_HEADER_BYTES as u64);
const _: () = assert!(GROW_BYTES_MIN.is_power_of_two() && GROW_BYTES_MAX.is_power_of_two());

/// What a log file says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogHeader {
    /// The database that the log belongs to.
    pub uuid: [u8; 16],
    /// LSN of the first record.
    pub start: Lsn,
    /// What the checks of its records are seeded with.
    pub salt: u64,
    /// The salt of the log that this one continues; 0 if it continues none.
    pub previous_salt: u64,
}

/// Why a block is not a log's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LogHeaderProblem {
    /// The magic is missing.
    #[error("not an ntdb log")]
    NotALog,
    /// The checksum is wrong.
    #[error("the log's header has a wrong checksum")]
    BadChecksum,
    /// Intact, and of a later format.
    #[error("a log of format version {found}")]
    NewerVersion {
        /// The version that the header names.
        found: u32,
    },
}

/// Why a log file could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenProblem {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is not a log that can be read.
    #[error(transparent)]
    Header(#[from] LogHeaderProblem),
}

impl LogHeader {
    /// The header block.
    pub fn encode(&self) -> [u8; LOG_HEADER_BYTES] {
        let mut block = [0; LOG_HEADER_BYTES];
        le::put(&mut block, MAGIC_AT, &MAGIC);
        le::put(&mut block, VERSION_AT, &FORMAT_VERSION.to_le_bytes());
        le::put(&mut block, UUID_AT, &self.uuid);
        le::put(&mut block, START_AT, &self.start.0.to_le_bytes());
        le::put(&mut block, SALT_AT, &self.salt.to_le_bytes());
        le::put(&mut block, PREVIOUS_SALT_AT, &self.previous_salt.to_le_bytes());
        let crc = crc32c::crc32c(&block[..CRC_AT]);
        le::put(&mut block, CRC_AT, &crc.to_le_bytes());
        block
    }

    /// Reads a header block. Its magic, version and checksum have the same places in every version,
    /// so a damaged block is never mistaken for one of a later version.
    pub fn decode(block: &[u8; LOG_HEADER_BYTES]) -> Result<Self, LogHeaderProblem> {
        if le::get_bytes(block, MAGIC_AT) != MAGIC {
            return Err(LogHeaderProblem::NotALog);
        }
        if le::get_u32(block, CRC_AT) != crc32c::crc32c(&block[..CRC_AT]) {
            return Err(LogHeaderProblem::BadChecksum);
        }
        let found = le::get_u32(block, VERSION_AT);
        if found > FORMAT_VERSION {
            return Err(LogHeaderProblem::NewerVersion { found });
        }
        Ok(LogHeader {
            uuid: le::get_bytes(block, UUID_AT),
            start: Lsn(le::get_u64(block, START_AT)),
            salt: le::get_u64(block, SALT_AT),
            previous_salt: le::get_u64(block, PREVIOUS_SALT_AT),
        })
    }
}

/// An open log file.
#[derive(Debug)]
pub struct LogFile {
    file: File,
    header: LogHeader,
    /// A length that the file is known to have reached. It may be longer, never shorter.
    allocated: AtomicU64,
}

impl LogFile {
    /// Creates the file at `path`, which must not exist, with its header and first run of zeros, and
    /// syncs it. The caller gives it the data file's owner and syncs the directory. If this fails
    /// the file is removed again.
    pub fn create(path: &Path, mode: u32, header: LogHeader) -> io::Result<Self> {
        let file = File::create_new(path, Kind::Log, mode)?;
        crash_point("log.create.empty");
        let log = LogFile { file, header, allocated: AtomicU64::new(0) };
        log.fill_new().inspect_err(|_| {
            // The first error is the one to report. A leftover has no header that was synced, and
            // no meta page names it.
            let _ = file::unlink(path, Kind::Log);
        })?;
        Ok(log)
    }

    fn fill_new(&self) -> io::Result<()> {
        self.ensure_allocated(GROW_BYTES_MIN)?;
        crash_point("log.create.zeroed");
        self.write_header()
    }

    fn write_header(&self) -> io::Result<()> {
        self.file.write_all_at(&self.header.encode(), 0)?;
        crash_point("log.header.written");
        self.sync()?;
        crash_point("log.header.synced");
        Ok(())
    }

    /// Opens the log at `path` and reads its header.
    pub fn open(path: &Path) -> Result<Self, OpenProblem> {
        Self::from_file(File::open(path, Kind::Log)?)
    }

    /// Like [`LogFile::open`], for reading only: writes through it fail.
    pub fn open_readonly(path: &Path) -> Result<Self, OpenProblem> {
        Self::from_file(File::open_readonly(path, Kind::Log)?)
    }

    fn from_file(file: File) -> Result<Self, OpenProblem> {
        let len = file.len()?;
        if len < LOG_HEADER_BYTES as u64 {
            return Err(LogHeaderProblem::NotALog.into());
        }
        let mut block = [0; LOG_HEADER_BYTES];
        file.read_exact_at(&mut block, 0)?;
        let header = LogHeader::decode(&block)?;
        Ok(LogFile { file, header, allocated: AtomicU64::new(len) })
    }

    /// Makes the file, whose records nobody needs and nobody may still be writing, the log of
    /// `header`, and syncs it. Its bytes stay, and none of them validates under the new salt.
    ///
    /// When this fails the file holds the old header or the new one, and is of no use until it is
    /// opened anew or replaced by a new file.
    pub fn reuse(self, header: LogHeader) -> io::Result<Self> {
        debug_assert_ne!(self.header.salt, header.salt, "the old records would validate");
        let log = LogFile { header, ..self };
        log.ensure_allocated(GROW_BYTES_MIN)?;
        log.write_header()?;
        Ok(log)
    }

    /// What the file says of itself.
    pub fn header(&self) -> &LogHeader {
        &self.header
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The byte of the file where the record with `lsn` lies, if it can lie in this file.
    pub fn offset_of(&self, lsn: Lsn) -> Option<u64> {
        lsn.0.checked_sub(self.header.start.0)?.checked_add(LOG_HEADER_BYTES as u64)
    }

    /// Bytes that the file has now.
    pub fn len_bytes(&self) -> io::Result<u64> {
        self.file.len()
    }

    /// Bytes that the file is known to have reached (no system call).
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Writes `bytes`, whole records in the order of the log, at `lsn`, growing the file if need be.
    /// They are durable after a [`LogFile::sync`] that begins afterwards. Two processes may do this
    /// at once, as the head of this module explains.
    ///
    /// When there is no room nothing that was in the file has changed.
    pub fn write_at(&self, lsn: Lsn, bytes: &[u8]) -> io::Result<()> {
        let outside = || io::Error::new(io::ErrorKind::InvalidInput, "an LSN outside this log");
        let offset = self.offset_of(lsn).ok_or_else(outside)?;
        let end = offset.checked_add(bytes.len() as u64).ok_or_else(outside)?;
        // The log has no gaps: who comes here with one has a wrong LSN, and would fill the disk.
        if offset > self.allocated_bytes() && offset > self.note_len()? {
            return Err(outside());
        }
        self.ensure_allocated(end)?;
        self.file.write_all_at(bytes, offset)
    }

    /// Makes everything written before the call durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Makes sure that the file reaches to `end`, by appending zeros.
    pub fn ensure_allocated(&self, end: u64) -> io::Result<()> {
        if end <= self.allocated_bytes() {
            return Ok(());
        }
        let len = self.note_len()?;
        if end <= len {
            return Ok(());
        }
        let step = len.clamp(GROW_BYTES_MIN, GROW_BYTES_MAX);
        let limit = file_size_limit();
        if end > limit {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let target = end.max(len + step).next_multiple_of(GROW_BYTES_MIN).min(limit);
        let appended = self.append_zeros(len, target);
        crash_point("log.grown");
        // A full disk may have taken only a part of the step, and that part may be enough.
        if self.note_len()? >= end {
            return Ok(());
        }
        appended.and(Err(io::ErrorKind::WriteZero.into()))
    }

    /// Asks for the length and keeps it.
    fn note_len(&self) -> io::Result<u64> {
        let len = self.len_bytes()?;
        self.allocated.fetch_max(len, Ordering::Relaxed);
        Ok(len)
    }

    /// Appends zeros to wherever the file ends at the moment of each write, as many as are needed
    /// to come from `len` to `target` if nobody else does the same.
    fn append_zeros(&self, len: u64, target: u64) -> io::Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        if let Some(error) = failpoint::fault("append:log") {
            return Err(error);
        }
        let what = What::Allocate(target);
        failpoint::record(Event { kind: Kind::Log, path: self.file.path(), what });
        let mut left = target - len;
        while left > 0 {
            let piece = &ZEROS[..left.min(ZEROS.len() as u64) as usize];
            match append(&self.file, piece) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => left -= written as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    return extend_sparsely(&self.file, len, target);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Writes `bytes` at the end of the file, which the kernel finds in the same step.
fn append(file: &File, bytes: &[u8]) -> io::Result<usize> {
    let fd = file.as_fd().as_raw_fd();
    let iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: one iovec, which describes bytes that are readable for the length of the call; the
    // call only reads them.
    let written = unsafe { libc::pwritev2(fd, &raw const iov, 1, 0, libc::RWF_APPEND) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Where the kernel (an emulated one, say) has no `RWF_APPEND`: space for the bytes from `len` to
/// `target` that reads as zeros. This too changes no byte that is there and never shortens the
/// file; syncs into such space are slower.
fn extend_sparsely(file: &File, len: u64, target: u64) -> io::Result<()> {
    let fd = file.as_fd().as_raw_fd();
    loop {
        // SAFETY: plain numbers and a descriptor that is open while `file` lives.
        if unsafe { libc::fallocate(fd, 0, len as i64, (target - len) as i64) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The process's limit on file sizes. Growing a file beyond it would raise a deadly signal.
fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    let limited = result == 0 && limit.rlim_cur != libc::RLIM_INFINITY;
    if limited { limit.rlim_cur } else { i64::MAX as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::testing::{assert_exit_ok, in_child};
    use std::path::PathBuf;
    use tempfile::TempDir;

    const HEADER: LogHeader =
        LogHeader { uuid: [3; 16], start: Lsn(500), salt: 0xABCD, previous_salt: 0x1234 };
    const RECORDS_AT: u64 = LOG_HEADER_BYTES as u64;

    fn new_log() -> (TempDir, PathBuf, LogFile) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db-log0");
        let log = LogFile::create(&path, 0o640, HEADER).unwrap();
        (dir, path, log)
    }

    fn contents(path: &Path) -> Vec<u8> {
        std::fs::read(path).unwrap()
    }

    fn is_zero(bytes: &[u8]) -> bool {
        bytes.iter().all(|&byte| byte == 0)
    }

    #[test]
    fn a_header_comes_back_and_every_flipped_bit_of_it_is_noticed() {
        let block = HEADER.encode();
        assert_eq!(LogHeader::decode(&block), Ok(HEADER));
        for bit in 0..128 * 8 {
            let mut damaged = block;
            damaged[bit / 8] ^= 1 << (bit % 8);
            let expected =
                if bit < 64 { LogHeaderProblem::NotALog } else { LogHeaderProblem::BadChecksum };
            assert_eq!(LogHeader::decode(&damaged), Err(expected), "bit {bit}");
        }
    }

    /// The format, byte for byte: a change of this test is a change of the format.
    #[test]
    fn bytes_of_a_header_are_what_the_format_says() {
        let block = HEADER.encode();
        let mut expected = b"NTDBLOG\0\x01\0\0\0\0\0\0\0".to_vec();
        expected.extend([3; 16]);
        expected.extend([500u64.to_le_bytes(), 0xABCDu64.to_le_bytes()].concat());
        expected.extend(0x1234u64.to_le_bytes());
        expected.resize(124, 0);
        expected.extend(crc32c::crc32c(&expected).to_le_bytes());
        expected.resize(4096, 0);
        assert_eq!(block[..], expected[..]);
    }

    #[test]
    fn a_later_version_is_named() {
        let mut block = HEADER.encode();
        le::put(&mut block, VERSION_AT, &7u32.to_le_bytes());
        let crc = crc32c::crc32c(&block[..CRC_AT]);
        le::put(&mut block, CRC_AT, &crc.to_le_bytes());
        let expected = LogHeaderProblem::NewerVersion { found: 7 };
        assert_eq!(LogHeader::decode(&block), Err(expected));
    }

    #[test]
    fn a_new_file_is_a_header_and_zeros() {
        let (_dir, path, log) = new_log();
        let bytes = contents(&path);
        assert_eq!(bytes.len() as u64, GROW_BYTES_MIN);
        assert_eq!(bytes[..LOG_HEADER_BYTES], HEADER.encode());
        assert!(is_zero(&bytes[LOG_HEADER_BYTES..]));
        assert_eq!(log.allocated_bytes(), GROW_BYTES_MIN);
        assert_eq!(LogFile::open(&path).unwrap().header(), &HEADER);
        assert_eq!(LogFile::open_readonly(&path).unwrap().header(), &HEADER);
    }

    #[test]
    fn an_existing_file_is_not_created_over() {
        let (_dir, path, log) = new_log();
        log.write_at(HEADER.start, b"precious").unwrap();
        let before = contents(&path);
        let other = LogHeader { salt: 1, ..HEADER };
        let error = LogFile::create(&path, 0o600, other).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(contents(&path), before);
    }

    #[test]
    fn what_is_no_log_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        for bytes in [&b""[..], b"NTDBLOG\0", &[0; 4096], &[b'x'; 70_000]] {
            std::fs::write(&path, bytes).unwrap();
            match LogFile::open(&path) {
                Err(OpenProblem::Header(LogHeaderProblem::NotALog)) => {}
                other => panic!("{other:?}"),
            }
        }
        match LogFile::open(&dir.path().join("absent")) {
            Err(OpenProblem::Io(error)) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn records_lie_where_the_format_says() {
        let (_dir, path, log) = new_log();
        log.write_at(Lsn(500), b"first").unwrap();
        log.write_at(Lsn(505), b"second").unwrap();
        log.sync().unwrap();
        assert_eq!(contents(&path)[LOG_HEADER_BYTES..][..12], *b"firstsecond\0");
        assert_eq!(log.offset_of(Lsn(505)), Some(RECORDS_AT + 5));
        assert_eq!(log.offset_of(Lsn(499)), None);
        let gap = HEADER.start.0 + GROW_BYTES_MIN - RECORDS_AT + 1;
        for lsn in [0, 499, gap, 1 << 63, u64::MAX - 3700, u64::MAX - 3597, u64::MAX] {
            let error = log.write_at(Lsn(lsn), b"xyz").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{lsn}: {error}");
        }
        for end in [i64::MAX as u64 + 1, u64::MAX] {
            let error = log.ensure_allocated(end).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFBIG), "{end}: {error}");
        }
        assert_eq!(contents(&path).len() as u64, GROW_BYTES_MIN);
    }

    #[test]
    fn grows_by_what_it_has_within_bounds() {
        let (_dir, _path, log) = new_log();
        let mut lengths = vec![log.len_bytes().unwrap()];
        let target = 20 << 20;
        while *lengths.last().unwrap() < target {
            // One byte more than there is room for.
            let end = Lsn(HEADER.start.0 + lengths.last().unwrap() - RECORDS_AT);
            log.write_at(end, b"x").unwrap();
            assert_eq!(log.allocated_bytes(), log.len_bytes().unwrap());
            lengths.push(log.len_bytes().unwrap());
        }
        let kib: Vec<u64> = lengths.iter().map(|len| len >> 10).collect();
        assert_eq!(kib, [64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 20480]);
        // One write much longer than a step.
        let end = Lsn(HEADER.start.0 + (20 << 20) - RECORDS_AT);
        log.write_at(end, &vec![1; 9 << 20]).unwrap();
        assert_eq!(log.len_bytes().unwrap(), 29 << 20);
    }

    #[test]
    fn a_grower_that_wakes_up_late_wipes_nothing_out() {
        let (_dir, path, stale) = new_log();
        let fresh = LogFile::open(&path).unwrap();
        let len = stale.len_bytes().unwrap();
        // `stale` has looked at the length and sleeps; `fresh` grows the file and fills it.
        let records = vec![0xEE; 100 << 10];
        fresh.write_at(HEADER.start, &records).unwrap();
        let before = contents(&path);
        stale.append_zeros(len, len + GROW_BYTES_MIN).unwrap();
        let after = contents(&path);
        assert_eq!(after[..before.len()], before);
        assert_eq!(after.len() as u64, before.len() as u64 + GROW_BYTES_MIN);
        assert!(is_zero(&after[before.len()..]));
        // The same where appending is not supported.
        extend_sparsely(stale.file(), len, len + 3 * GROW_BYTES_MIN).unwrap();
        let extended = contents(&path);
        assert_eq!(extended[..after.len()], after);
        assert!(is_zero(&extended[after.len()..]));
        extend_sparsely(stale.file(), len, len + (4 << 20)).unwrap();
        assert_eq!(contents(&path)[..after.len()], after);
        assert_eq!(stale.len_bytes().unwrap(), len + (4 << 20));
        // And `stale` learns of the room that others made.
        stale.write_at(HEADER.start, &records).unwrap();
        assert_eq!(stale.allocated_bytes(), len + (4 << 20));
    }

    #[test]
    fn writers_of_the_same_log_at_once_lose_nothing() {
        let (_dir, path, log) = new_log();
        let total = 3 << 20;
        let bytes: Vec<u8> = (0..total).map(|n: usize| (n * 31 + n / 251) as u8 | 1).collect();
        drop(log);
        std::thread::scope(|scope| {
            for step in [4000, 5000, 7001, 64 << 10] {
                let (path, bytes) = (&path, &bytes);
                scope.spawn(move || {
                    let log = LogFile::open(path).unwrap();
                    let mut lsn = HEADER.start;
                    for piece in bytes.chunks(step) {
                        log.write_at(lsn, piece).unwrap();
                        lsn.0 += piece.len() as u64;
                    }
                });
            }
        });
        let found = contents(&path);
        assert_eq!(found[..LOG_HEADER_BYTES], HEADER.encode());
        assert!(found[LOG_HEADER_BYTES..][..total] == bytes, "a byte was lost");
        assert!(is_zero(&found[LOG_HEADER_BYTES + total..]));
    }

    #[test]
    fn a_reused_file_keeps_its_length_and_gets_the_new_header() {
        let (_dir, path, log) = new_log();
        log.write_at(HEADER.start, &vec![9; 200 << 10]).unwrap();
        let len = log.len_bytes().unwrap();
        let header = LogHeader { start: Lsn(900_000), salt: 77, previous_salt: 66, ..HEADER };
        let log = log.reuse(header).unwrap();
        assert_eq!(log.len_bytes().unwrap(), len);
        assert_eq!(log.offset_of(Lsn(900_001)), Some(RECORDS_AT + 1));
        assert_eq!(LogFile::open(&path).unwrap().header(), &header);
    }

    fn limit_file_size(bytes: u64) {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit; the process is a child that does nothing else.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    }

    #[test]
    fn a_file_size_limit_is_an_error_and_not_a_signal() {
        let (dir, path, log) = new_log();
        let before = contents(&path);
        assert_exit_ok(in_child(|| {
            limit_file_size(100_000);
            // Beyond the limit: nothing happens.
            let error = log.write_at(HEADER.start, &[1; 100_000]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFBIG));
            assert_eq!(contents(&path), before);
            // Up to the limit: a shorter step than usual is taken.
            log.write_at(HEADER.start, &[1; 90_000]).unwrap();
            assert_eq!(log.len_bytes().unwrap(), 100_000);
            limit_file_size(10_000);
            let other = dir.path().join("db-log1");
            let error = LogFile::create(&other, 0o600, HEADER).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFBIG));
            assert!(!other.exists());
            0
        }));
    }

    #[cfg(feature = "failpoints")]
    #[test]
    fn a_full_disk_changes_nothing_and_passes() {
        let (_dir, path, log) = new_log();
        let before = contents(&path);
        assert_exit_ok(in_child(|| {
            let plan = failpoint::Plan::parse(None, None, Some("append:log:ENOSPC")).unwrap();
            failpoint::set_plan(plan);
            let error = log.write_at(HEADER.start, &[1; 100_000]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
            assert_eq!(contents(&path), before);
            log.write_at(HEADER.start, &[1; 100_000]).unwrap();
            0
        }));
    }
}
