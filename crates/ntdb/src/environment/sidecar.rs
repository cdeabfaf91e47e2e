//! The shared-memory file: where the last users left theirs, whose it is, and making a new one.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

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

/// Addresses reserved for the shared state; its file is as long as needed.
pub(super) const SHM_RESERVE_BYTES: u64 = 8 << 30;

/// Room for the arrays that grow, at the least.
pub(super) const SHM_MIN_BYTES: u64 = layout::GROWN as u64 + (16 << 20);

/// Suffix of a shared-memory file that is being made.
const TEMPORARY: &str = ".new";

impl Opening<'_> {
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
    /// same boot it is damage.
    fn damaged_shm(&self, companions: &Companions, e: std::io::Error) -> Result<Option<Shm>> {
        let record =
            AttachRecord::read(self.data).map_err(|e| self.io("read the attach record", e))?;
        let boot_id = filesystem::boot_id().map_err(|e| self.io("identify this boot", e))?;
        if record.is_none_or(|record| record.boot_id != boot_id || boot_id == [0; 16]) {
            return Ok(None);
        }
        Err(Error::Corrupt {
            path: companions.shm.clone(),
            place: "header".into(),
            reason: format!(
                "{e}; changes that were not synced before the last users died are only there, and removing the file gives them up"
            ),
        })
    }

    /// Logs lie beside the path that the file had then; a file that moved with its logs has them at its new path.
    pub(super) fn where_logs_are(
        &self,
        own: Companions,
        meta: &Meta,
        dir: Option<&Path>,
    ) -> Companions {
        use std::os::unix::ffi::OsStrExt;
        if meta.log_salt == 0
            || !meta.base_path.starts_with(b"/")
            || own.logs.iter().any(|path| path.exists())
        {
            return own;
        }
        let base = PathBuf::from(std::ffi::OsStr::from_bytes(&meta.base_path));
        let recorded = Companions::of(&base, dir);
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
        let path = &with_suffix(path, TEMPORARY);
        let failed = |e| Error::from_io(path, "create the shared-memory file", e);
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
    /// Gives the file the name that others look for.
    pub fn put_in_place(&mut self, path: &Path) -> Result<()> {
        if let Some(temporary) = &self.path {
            file::rename(temporary, path, Kind::Shm)
                .map_err(|e| Error::from_io(path, "put the shared-memory file in place", e))?;
            self.path = Some(path.to_path_buf());
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
pub(super) fn open_shm(path: &Path, access: Access) -> std::io::Result<Shm> {
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
