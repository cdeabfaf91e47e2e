//! The shared-memory file: where the last users left theirs, whose it is, and making a new one.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::*;

use crate::error::{Error, Result};
use crate::page::header::Header;
use crate::page::meta::Meta;
use crate::shm::Shm;
use crate::shm::layout::{self, ShmHeader};
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file::{self, File, FileId};
use crate::storage::filesystem;
use crate::storage::mapping::{Access, Mapping};
use crate::storage::ofd;

use super::attach::Opening;
use super::companions::{AttachRecord, Companions};
use super::recover::OldState;

/// Addresses reserved for the shared state; its file is as long as needed.
pub(super) const SHM_RESERVE_BYTES: u64 = 8 << 30;

/// Room for the arrays that grow, at the least.
pub(super) const SHM_MIN_BYTES: u64 = layout::GROWN as u64 + (16 << 20);

/// Suffix of a shared-memory file that is being made.
pub const TEMPORARY: &str = ".new";

/// What the last users left.
pub(super) struct Left {
    /// Where their companions are, or would be.
    pub companions: Companions,
    /// Their shared state, if it is there.
    pub shm: Option<Shm>,
    /// Whether they used this file during this boot, and what only the shared state has is not to be given up.
    pub is_needed: bool,
}

impl Opening<'_> {
    /// Where the companions may be: where the record says, where they would have been moved to with the file, and where this opening
    /// would have them.
    pub(super) fn places(&self, record: Option<&AttachRecord>) -> Vec<Companions> {
        let own = Companions::of(&self.resolved, self.options.shm_dir.as_deref());
        let mut places = Vec::new();
        if let Some(record) = record {
            places.push(record.companions());
            places.push(Companions::of(&self.resolved, record.shm_dir.as_deref()));
        }
        places.push(own);
        places.dedup_by(|a, b| a.shm == b.shm);
        places
    }

    /// Finds what the last users left, nobody of whom lives: the companions' place, and the shared state, if it is to be had.
    ///
    /// If they died during this boot, changes that they acknowledged may be nowhere else than in that shared state. Then it must
    /// be found, whatever this opening's options say, or the caller learns that it was not.
    pub(super) fn left_behind(
        &self,
        own: &Companions,
        header: &Header,
        boot_id: [u8; 16],
    ) -> Result<Left> {
        let record =
            AttachRecord::read(self.data).map_err(|e| self.io("read the attach record", e))?;
        let same_boot = |record: &AttachRecord| record.boot_id == boot_id && boot_id != [0; 16];
        let theirs = record.filter(|record| record.file == self.id);
        let is_needed = theirs.as_ref().is_some_and(same_boot) && !self.options.give_up_unsynced;
        let Some(theirs) = theirs else {
            let shm = self.old_shm(own, header)?;
            return Ok(Left { companions: own.clone(), shm, is_needed });
        };
        let mut lost = None;
        for place in self.places(Some(&theirs)) {
            let problem = match self.old_shm(&place, header) {
                Ok(Some(shm)) => {
                    if place.shm != own.shm {
                        // The new one takes the place of whatever is there.
                        self.old_shm(own, header)?;
                    }
                    return Ok(Left { companions: place, shm: Some(shm), is_needed });
                }
                Ok(None) => "it is not there, or is that of another file".to_string(),
                Err(Error::ShmLost { reason, .. }) => reason,
                // What is in the way of the new one is an error in any case.
                Err(error) if place.shm == own.shm => return Err(error),
                Err(error) => error.to_string(),
            };
            // The record's own place is the one to name.
            lost.get_or_insert((place.shm, problem));
        }
        match lost {
            Some((shm, reason)) if is_needed => {
                Err(Error::ShmLost { path: self.path.to_path_buf(), shm, reason })
            }
            _ => Ok(Left { companions: own.clone(), shm: None, is_needed }),
        }
    }

    /// The shared state that the last users left at a place, if it is theirs.
    pub(super) fn old_shm(&self, companions: &Companions, header: &Header) -> Result<Option<Shm>> {
        let shm = match open_shm(&companions.shm, Access::ReadOnly) {
            Ok(shm) => shm,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                return self.damaged_shm(companions, e);
            }
            Err(e) => return Err(Error::from_io(&companions.shm, "open", e)),
        };
        let found = shm.header();
        if found.uuid != header.uuid {
            return Err(Error::ForeignSidecar {
                path: self.path.to_path_buf(),
                sidecar: companions.shm.clone(),
                reason: "it names another UUID".into(),
            });
        }
        if found.device == self.id.dev && found.inode == self.id.ino {
            return Ok(Some(shm));
        }
        // A copy of the file, or one that was put in its place: the shared state is about the one before, whose users may live.
        if is_in_use(&shm) {
            return Err(Error::ForeignSidecar {
                path: self.path.to_path_buf(),
                sidecar: companions.shm.clone(),
                reason: "processes use it with a file that was copied from this one, or this one from it".into(),
            });
        }
        Ok(None)
    }

    /// What of the old shared state can be relied on, beginning with `meta`.
    pub(super) fn old_state(
        &self,
        shm: Option<Shm>,
        meta: &Meta,
        boot_id: [u8; 16],
        is_needed: bool,
    ) -> Result<Option<OldState>> {
        let Some(shm) = shm else { return Ok(None) };
        let place = shm.file().map(|file| file.path().to_path_buf()).unwrap_or_default();
        let has_more = shm.control().writer.tail.load(Relaxed) > meta.replay_from.0;
        match OldState::open(shm, meta, boot_id) {
            None if is_needed && has_more => Err(Error::ShmLost {
                path: self.path.to_path_buf(),
                shm: place,
                reason: "it is about another state than the data file's".into(),
            }),
            old => Ok(old),
        }
    }

    pub(super) fn mark_in_use(&self, shm: &Shm, path: &Path) -> Result<()> {
        match shm.file() {
            Some(file) => ofd::mark_in_use(file.as_fd())
                .map_err(|e| Error::from_io(path, "mark the shared-memory file as used", e)),
            None => Ok(()),
        }
    }

    /// Whether the file at the path of `companions`, or the living users of the shared state there, have another file than this one.
    /// A copy that was made of a database in use names its companions, and must not touch them.
    fn are_of_another_file(&self, companions: &Companions) -> bool {
        match FileId::of_path(&companions.base) {
            Ok(Some(id)) if id != self.id => return true,
            _ => {}
        }
        open_shm(&companions.shm, Access::ReadOnly).is_ok_and(|shm| {
            let found = shm.header();
            (found.device != self.id.dev || found.inode != self.id.ino) && is_in_use(&shm)
        })
    }

    /// A shared-memory file without a valid header. After a power cut that is nothing unusual, since it is never synced; in the
    /// same boot it is damage, and what only the file had is lost.
    fn damaged_shm(&self, companions: &Companions, e: std::io::Error) -> Result<Option<Shm>> {
        let record =
            AttachRecord::read(self.data).map_err(|e| self.io("read the attach record", e))?;
        let boot_id = filesystem::boot_id().map_err(|e| self.io("identify this boot", e))?;
        let same_boot =
            record.is_some_and(|record| record.boot_id == boot_id && boot_id != [0; 16]);
        if !same_boot || self.options.give_up_unsynced {
            return Ok(None);
        }
        Err(Error::ShmLost {
            path: self.path.to_path_buf(),
            shm: companions.shm.clone(),
            reason: e.to_string(),
        })
    }

    /// Logs lie beside the path that the file had then; a file that moved with its logs has them at its new path.
    pub(super) fn where_logs_are(&self, own: Companions, meta: &Meta) -> Companions {
        use std::os::unix::ffi::OsStrExt;
        if meta.log_salt == 0
            || !meta.base_path.starts_with(b"/")
            || own.logs.iter().any(|path| path.exists())
        {
            return own;
        }
        let base = PathBuf::from(std::ffi::OsStr::from_bytes(&meta.base_path));
        let recorded = Companions::of(&base, self.options.shm_dir.as_deref());
        let there = recorded.logs.iter().any(|path| path.exists());
        if there && !self.are_of_another_file(&recorded) { recorded } else { own }
    }

    /// Makes a new shared-memory file for `path`, under a temporary name. Returns it, its id and its name.
    pub(super) fn new_shm(
        &self,
        path: &Path,
        header: &Header,
        meta: &Meta,
        boot_id: [u8; 16],
    ) -> Result<(Shm, u64, NewName)> {
        // In a directory that databases of several others share, names may be equal.
        let path = &match self.options.shm_dir {
            None => with_suffix(path, TEMPORARY),
            Some(_) => with_suffix(path, &format!("{TEMPORARY}-{:x}", self.id.ino)),
        };
        let failed = |e| {
            let action =
                "create the shared-memory file (Options::shm_dir or --shm-dir puts it elsewhere)";
            Error::from_io(path, action, e)
        };
        file::unlink(path, Kind::Shm).map_err(failed)?;
        let file = File::create_new(path, Kind::Shm, 0o600).map_err(failed)?;
        let name = NewName { path: Some(path.clone()) };
        file.allocate(0, layout::GROWN as u64).map_err(failed)?;
        file.adopt_owner_and_mode(self.data).map_err(failed)?;
        let mut random = [0u8; 16];
        filesystem::random_bytes(&mut random).map_err(failed)?;
        let shm_id = u64::from_le_bytes(random[..8].try_into().expect("eight bytes")).max(1);
        let shm_header = ShmHeader {
            magic: layout::MAGIC,
            version: layout::VERSION,
            reserved: 0,
            shm_id,
            uuid: header.uuid,
            boot_id,
            device: self.id.dev,
            inode: self.id.ino,
            salt: u64::from_le_bytes(random[8..].try_into().expect("eight bytes")),
            start_lsn: meta.replay_from.0,
            meta_sequence: meta.sequence,
        };
        file.write_all_at(&shm_header.to_bytes(), 0).map_err(failed)?;
        crash_point("attach.shm.created");
        let mapping = Mapping::file(&file, SHM_RESERVE_BYTES, SHM_MIN_BYTES, Access::ReadWrite)
            .map_err(|e| Error::AddressSpace {
                path: path.to_path_buf(),
                bytes: SHM_MIN_BYTES,
                source: e,
            })?;
        let shm = Shm::new(Some(file), mapping, layout::GROWN as u64);
        self.mark_in_use(&shm, path)?;
        Ok((shm, shm_id, name))
    }
}

/// The name of a shared-memory file that is being made. The file goes with this value, so that a failed opening leaves none.
pub(super) struct NewName {
    path: Option<PathBuf>,
}

impl NewName {
    /// Gives the file the name that others look for. If one is there, `check` fails unless that may be replaced: in a directory for
    /// shared memory, a database of the same name may have come to have one since it was looked at. If it is replaced, the new one
    /// stays in its place, whatever comes: the attach record may lead to it.
    pub fn put_in_place(&mut self, path: &Path, check: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(temporary) = &self.path else { return Ok(()) };
        let failed = |e| Error::from_io(path, "put the shared-memory file in place", e);
        match file::rename_new(temporary, path, Kind::Shm) {
            Ok(()) => self.path = Some(path.to_path_buf()),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                check()?;
                file::rename(temporary, path, Kind::Shm).map_err(failed)?;
                self.path = None;
            }
            Err(e) => return Err(failed(e)),
        }
        Ok(())
    }

    /// Leaves the file to those who use the database from now on.
    pub fn keep(mut self) {
        self.path = None;
    }
}

impl Drop for NewName {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The error that led here is the one to report; a leftover means nothing, and is replaced by the next opening.
            let _ = file::unlink(path, Kind::Shm);
        }
    }
}

/// Whether processes have this shared-memory file for their own; also if that cannot be told.
fn is_in_use(shm: &Shm) -> bool {
    shm.file().is_some_and(|file| ofd::is_in_use(file.as_fd()).unwrap_or(true))
}

/// Opens and maps a shared-memory file. A file without a valid header is `InvalidData`.
pub fn open_shm(path: &Path, access: Access) -> std::io::Result<Shm> {
    let file = match access {
        Access::ReadWrite => File::open(path, Kind::Shm)?,
        _ => File::open_readonly(path, Kind::Shm)?,
    };
    let len = file.len()?;
    let invalid = |reason: &str| {
        Err(std::io::Error::new(std::io::ErrorKind::InvalidData, reason.to_string()))
    };
    if len < layout::GROWN as u64 {
        return invalid("the shared-memory file is cut off");
    }
    let mut bytes = [0u8; layout::HEADER_BYTES + 4];
    file.read_exact_at(&mut bytes, 0)?;
    let Some(header) = ShmHeader::from_bytes(&bytes) else {
        return invalid("the shared-memory file's header is damaged");
    };
    if header.version != layout::VERSION {
        return invalid("the shared-memory file is of another version");
    }
    let mapping = Mapping::file(&file, SHM_RESERVE_BYTES.max(len), SHM_MIN_BYTES.max(len), access)?;
    Ok(Shm::new(Some(file), mapping, len))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
