//! The log files that the last users left: finding, syncing and removing them.

use std::path::{Path, PathBuf};

use crate::core::Core;
use crate::error::{Error, Result};
use crate::limits::RING_BYTES;
use crate::log::file::{LogFile, OpenProblem};
use crate::log::flush::TEMPORARY;
use crate::page::header::Header;
use crate::page::meta::Meta;
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file::{self, File};

use super::companions::Companions;

pub(super) fn open_log(path: &Path) -> Result<Option<LogFile>> {
    match LogFile::open_readonly(path) {
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
