//! The log files that the last users left: finding, syncing and removing them.

use std::path::{Path, PathBuf};

use crate::core::Core;
use crate::error::{Error, Result};
use crate::limits::RING_BYTES;
use crate::log::file::{LogFile, LogHeader, OpenProblem};
use crate::log::flush::TEMPORARY;
use crate::log::keep;
use crate::log::scan::Scanner;
use crate::page::header::Header;
use crate::page::meta::Meta;
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file::{self, File};
use crate::types::Lsn;

use super::companions::{Companions, data_file};
use super::recover::OldState;

pub(super) fn open_log(path: &Path) -> Result<Option<LogFile>> {
    if_there(path, LogFile::open_readonly(path))
}

/// The log that was opened; `None` if there is no file, or one that is no log.
fn if_there(
    path: &Path,
    opened: std::result::Result<LogFile, OpenProblem>,
) -> Result<Option<LogFile>> {
    match opened {
        Ok(log) => Ok(Some(log)),
        Err(OpenProblem::Header(_)) => Ok(None),
        Err(OpenProblem::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(OpenProblem::Io(e)) => Err(Error::from_io(path, "open the log", e)),
    }
}

/// The log that the meta page names.
pub(super) fn find_log(
    core: &Core,
    companions: &Companions,
    header: &Header,
    meta: &Meta,
) -> Result<(PathBuf, LogFile)> {
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

/// Which logs are to be kept.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// So many bytes; 0: none.
    pub bytes: u64,
    /// Where the log files end.
    pub files_end: u64,
    /// Where the log ends.
    pub until: u64,
}

/// Removes the log files of this database, whose time is over, or keeps them for those who follow the changes. Those of others
/// stay.
pub fn retire_logs(
    core: &Core,
    companions: &Companions,
    kept: &Path,
    uuid: &[u8; 16],
    keep: Keep,
) -> Result<()> {
    let mut ours = Vec::new();
    for path in &companions.logs {
        if let Some(log) = if_there(path, LogFile::open(path))?
            && log.header().uuid == *uuid
        {
            ours.push((path, log));
        }
    }
    // What stands in the way is found before anything is removed.
    match keep::list(kept) {
        // There is none to be found then.
        Err(Error::Permission { .. }) if keep.bytes == 0 => {}
        listed => drop(listed?),
    }
    companions.logs.iter().for_each(|path| remove_temporaries(path));
    let mut any_kept = false;
    for (path, log) in &ours {
        let is_worth_it = keep.bytes > 0
            && matches!(Scanner::new(log, log.header().start).next(), Ok(Some(_)) | Err(_));
        if is_worth_it {
            let next = ours.iter().find(|(_, other)| {
                other.header().previous_salt == log.header().salt
                    && other.header().start > log.header().start
            });
            let end = next.map_or(keep.files_end, |(_, next)| next.header().start.0);
            log.sync().map_err(|e| Error::from_io(path, "sync the log", e))?;
            keep::keep(&core.path, path, kept, log, Some(Lsn(end)))?;
            any_kept = true;
            crash_point("keep.log");
        } else {
            file::unlink(path, Kind::Log).map_err(|e| Error::from_io(path, "remove the log", e))?;
            crash_point("remove.log");
        }
    }
    if any_kept {
        file::sync_dir(kept).map_err(|e| Error::from_io(kept, "sync the directory", e))?;
    }
    match keep::prune(kept, uuid, keep.bytes, (keep.until, 0), keep.until) {
        // There is none to be found then.
        Err(Error::Permission { .. }) if keep.bytes == 0 => Ok(()),
        pruned => pruned,
    }
}

/// Removes the logs of a database that is no more, those that it kept included.
pub fn remove_logs(companions: &Companions, uuid: &[u8; 16]) -> Result<()> {
    for path in &companions.logs {
        if LogFile::open_readonly(path).is_ok_and(|log| log.header().uuid == *uuid) {
            file::unlink(path, Kind::Log).map_err(|e| Error::from_io(path, "remove the log", e))?;
            crash_point("remove.log");
        }
        remove_temporaries(path);
    }
    keep::prune(&companions.kept, uuid, 0, (0, 0), u64::MAX)
}

/// Keeps what only the ring of the old shared state has. `files_end` is where the files end, with the salt of the record before.
pub fn keep_ring(
    core: &Core,
    own: &Companions,
    uuid: &[u8; 16],
    old: &OldState,
    files_end: (u64, u64),
) -> Result<()> {
    let (mut at, mut previous_salt) = files_end;
    let tail = old.tail();
    if at >= tail || tail - at > RING_BYTES {
        return Ok(());
    }
    let mut bytes = vec![0; (tail - at) as usize];
    old.shm.ring_read(at, &mut bytes);
    let mut temporary = own.logs[0].clone().into_os_string();
    temporary.push(format!("{TEMPORARY}ring"));
    // A switch that was due may lie between.
    let switch = old.salt_from().clamp(at, tail);
    let (before, after) = bytes.split_at((switch - at) as usize);
    for part in [before, after] {
        if part.is_empty() {
            continue;
        }
        let header =
            LogHeader { uuid: *uuid, start: Lsn(at), salt: old.salt_at(at), previous_salt };
        keep::write(Path::new(&temporary), &own.kept, data_file(core), header, part)?;
        at += part.len() as u64;
        previous_salt = header.salt;
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

/// Bytes that the logs and the ring hold together.
pub(super) fn log_bytes(companions: &Companions) -> Result<u64> {
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
