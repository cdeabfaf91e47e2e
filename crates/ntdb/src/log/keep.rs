//! Log files that are kept although recovery needs them no longer, for those who follow the changes.
//!
//! `NAME-k` and the LSN at which it begins, as twelve digits to the base 36: so names are in the order of time, and no longer than
//! those of the other companions. A kept file is a log file like others, cut to its last record. Nobody writes to it, but
//! for one who was robbed of the flush lock and writes the same bytes once more.
//!
//! **How much.** At least so many bytes of log as the database says, the header blocks of the files included (else many short
//! sessions would fill the disk). A file goes when those behind it are enough. Those go first that are oldest, so that what
//! is there has no gap.
//!
//! **Crashes.** A file comes to be kept by a rename; before, it is a log that has served its time, or one of a database at rest,
//! which means nothing to recovery; whoever finds it so does the same again. What only the ring had when all users died is written
//! to kept files by recovery, under private names first, before its own checkpoint: a repeated recovery writes the same again.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::log::file::{LOG_HEADER_BYTES, LogFile, LogHeader, OpenProblem};
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file;
use crate::types::Lsn;

/// Digits of a name.
const DIGITS: usize = 12;
const BASE: u64 = 36;

/// Where the log that begins at `start` is kept; `prefix` is what all names begin with.
pub fn path_of(prefix: &Path, start: Lsn) -> PathBuf {
    let mut digits = [b'0'; DIGITS];
    let mut rest = start.0;
    for digit in digits.iter_mut().rev() {
        *digit = char::from_digit((rest % BASE) as u32, BASE as u32).map_or(b'0', |c| c as u8);
        rest /= BASE;
    }
    let mut path = prefix.as_os_str().to_os_string();
    path.push(OsString::from_vec(digits.to_vec()));
    path.into()
}

/// The log files that are kept, by the LSNs at which they begin, in ascending order.
pub fn list(prefix: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let (Some(dir), Some(name)) = (prefix.parent(), prefix.file_name()) else {
        return Ok(Vec::new());
    };
    let failed = |e| Error::from_io(dir, "list the logs that are kept", e);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if let Some(start) = start_of(&entry.file_name(), name.as_bytes()) {
            files.push((start, entry.path()));
        }
    }
    files.sort_unstable();
    Ok(files)
}

/// The LSN that the name of a kept log tells; `None` for any other name.
fn start_of(name: &std::ffi::OsStr, prefix: &[u8]) -> Option<u64> {
    let digits = name.as_bytes().strip_prefix(prefix)?;
    let is_one = digits.len() == DIGITS
        && digits.iter().all(|digit| digit.is_ascii_digit() || digit.is_ascii_lowercase());
    if !is_one {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, BASE as u32).ok()
}

/// Fails if a file that could come to be in the way is another database's.
pub fn refuse_foreign(path: &Path, prefix: &Path, uuid: &[u8; 16]) -> Result<()> {
    for (_, kept) in list(prefix)? {
        refuse_foreign_file(path, &kept, uuid)?;
    }
    Ok(())
}

fn refuse_foreign_file(path: &Path, kept: &Path, uuid: &[u8; 16]) -> Result<()> {
    match LogFile::open_readonly(kept) {
        Ok(log) if log.header().uuid != *uuid => Err(Error::ForeignSidecar {
            path: path.to_path_buf(),
            sidecar: kept.to_path_buf(),
            reason: "it is a log that another database keeps".into(),
        }),
        Err(OpenProblem::Io(e)) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::from_io(kept, "open a log that is kept", e))
        }
        // A damaged one is the business of those who read it.
        _ => Ok(()),
    }
}

/// Gives the log file at `at` the name under which it is kept; if it is known, it is cut at its `end`. The name is durable once the
/// directory has been synced.
pub fn keep(path: &Path, at: &Path, prefix: &Path, log: &LogFile, end: Option<Lsn>) -> Result<()> {
    let failed = |e| Error::from_io(at, "keep the log", e);
    let to = path_of(prefix, log.header().start);
    refuse_foreign_file(path, &to, &log.header().uuid)?;
    if let Some(bytes) = end.and_then(|end| log.offset_of(end))
        && log.len_bytes().map_err(failed)? > bytes
    {
        log.file().truncate(bytes).map_err(failed)?;
    }
    file::rename(at, &to, Kind::Log).map_err(failed)
}

/// Makes a kept file of log bytes that are in no file, by way of the private name `temporary`.
pub fn write(
    temporary: &Path,
    prefix: &Path,
    data: &file::File,
    header: LogHeader,
    bytes: &[u8],
) -> Result<()> {
    let to = path_of(prefix, header.start);
    let failed = |e| Error::from_io(&to, "keep what is in the log ring", e);
    file::unlink(temporary, Kind::Log).map_err(failed)?;
    let log = LogFile::create(temporary, 0o600, header).map_err(failed)?;
    log.file().adopt_owner_and_mode(data).map_err(failed)?;
    log.write_at(header.start, bytes).map_err(failed)?;
    log.file().truncate(LOG_HEADER_BYTES as u64 + bytes.len() as u64).map_err(failed)?;
    log.sync().map_err(failed)?;
    crash_point("keep.ring.written");
    file::rename(temporary, &to, Kind::Log).map_err(failed)?;
    file::sync_dir(&to).map_err(failed)?;
    crash_point("keep.ring.kept");
    Ok(())
}

/// Removes the kept files that are not needed for `keep_bytes` of log before `until`, where the log goes on in `newer` files that
/// begin at `next`. Those of other databases stay.
pub fn prune(
    prefix: &Path,
    uuid: &[u8; 16],
    keep_bytes: u64,
    (next, newer): (u64, u64),
    until: u64,
) -> Result<()> {
    let files = list(prefix)?;
    for (index, (_, path)) in files.iter().enumerate() {
        let (end, behind) = match files.get(index + 1) {
            Some((start, _)) => (*start, (files.len() - index - 1) as u64 + newer),
            None => (next, newer),
        };
        let left = until.saturating_sub(end) + behind * LOG_HEADER_BYTES as u64;
        if left < keep_bytes {
            return Ok(());
        }
        if LogFile::open_readonly(path).is_ok_and(|log| log.header().uuid != *uuid) {
            continue;
        }
        let failed = |e| Error::from_io(path, "remove a log that was kept", e);
        file::unlink(path, Kind::Log).map_err(failed)?;
        crash_point("keep.pruned");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_start_and_sort_by_it() {
        let prefix = Path::new("/dir/db-k");
        let starts = [0, 1, 35, 36, 1 << 32, (1 << 62) - 1];
        let mut before = PathBuf::new();
        for start in starts {
            let path = path_of(prefix, Lsn(start));
            assert_eq!(start_of(path.file_name().unwrap(), b"db-k"), Some(start));
            assert!(path > before && path.as_os_str().len() == "/dir/db-k".len() + 12);
            before = path;
        }
        for name in ["db-k", "db-k00000000000", "db-k0000000000000", "db-k00000000000A", "x"] {
            assert_eq!(start_of(name.as_ref(), b"db-k"), None, "{name}");
        }
    }
}
