//! The files beside a data file, and how to tell whose they are.
//!
//! While a database is in use, the data file's first page records where its shared-memory file is (*attach record*, at
//! byte 2048, outside the header's checksum): which file that is, the path that the companions lie beside, the directory of the
//! shared-memory file if it is another one, and its random id. It is written by the first to attach and needs no sync, since it
//! means nothing after a power cut; what must be found then, the logs' place, is in the meta page too. So every name that a data
//! file has leads to the same companions, whatever directory for shared memory an opener asks for; and when all users have died,
//! it says where the changes are that only their ring has.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::core::Core;
use crate::error::{Error, Result};
use crate::le;
use crate::page::meta::BASE_PATH_BYTES_MAX;
use crate::storage::file::{File, FileId};
use crate::storage::filesystem;

/// Bytes that the longest name of a companion has more than the data file's: `-log0.new-1023`.
const SUFFIX_BYTES_MAX: usize = 14;
/// The same in a directory for shared memory: `-shm.new-` and an inode.
const SHM_SUFFIX_BYTES_MAX: usize = 25;
/// What is too long, in the words of the error.
const FILE_NAME: &str = "file name (its companions' names are up to 14 bytes longer)";
const FILE_NAME_IN_SHM_DIR: &str =
    "file name (for the folder of the shared memory; names there are up to 25 bytes longer)";

/// Paths of the companions.
#[derive(Clone, Debug)]
pub struct Companions {
    /// The path that they lie beside: the data file's, with symbolic links resolved.
    pub base: PathBuf,
    /// The shared-memory file.
    pub shm: PathBuf,
    /// The redo logs.
    pub logs: [PathBuf; 2],
    /// What the paths of the logs begin with that are kept for those who follow the changes.
    pub kept: PathBuf,
}

impl Companions {
    /// The companions of `base`, with the shared-memory file in `shm_dir` if given.
    pub fn of(base: &Path, shm_dir: Option<&Path>) -> Companions {
        let with = |suffix: &str| {
            let mut name = OsString::from(base);
            name.push(suffix);
            PathBuf::from(name)
        };
        let shm = with("-shm");
        let shm = match (shm_dir, shm.file_name()) {
            (Some(dir), Some(name)) => dir.join(name),
            _ => shm,
        };
        Companions {
            base: base.to_path_buf(),
            shm,
            logs: [with("-log0"), with("-log1")],
            kept: with("-k"),
        }
    }

    /// Fails if a companion cannot have its name: better said before the data file is created than at the first sync.
    pub fn check_lengths(&self, path: &Path) -> Result<()> {
        let name_bytes = |path: &Path| path.file_name().map_or(0, |name| name.len());
        let dir_of = |path: &Path| path.parent().map(Path::to_path_buf).unwrap_or_default();
        let limit_in = |dir: &Path| {
            filesystem::name_bytes_max(dir)
                .map_err(|e| Error::from_io(dir, "look at the file system", e))
        };
        let limit = limit_in(&dir_of(&self.base))?.saturating_sub(SUFFIX_BYTES_MAX);
        if name_bytes(&self.base) > limit {
            return Err(too_long(path, FILE_NAME, name_bytes(&self.base), limit));
        }
        let shm_dir = dir_of(&self.shm);
        if shm_dir != dir_of(&self.base) {
            let limit = limit_in(&shm_dir)?.saturating_sub(SHM_SUFFIX_BYTES_MAX);
            if name_bytes(&self.base) > limit {
                return Err(too_long(path, FILE_NAME_IN_SHM_DIR, name_bytes(&self.base), limit));
            }
        }
        for companion in [&self.shm, &self.logs[0]] {
            let bytes =
                dir_of(companion).as_os_str().len() + 1 + name_bytes(&self.base) + SUFFIX_BYTES_MAX;
            if bytes >= libc::PATH_MAX as usize {
                return Err(too_long(
                    path,
                    "path of a companion file",
                    bytes,
                    libc::PATH_MAX as usize - 1,
                ));
            }
        }
        Ok(())
    }

    /// The base path as bytes.
    pub fn base_bytes(&self) -> &[u8] {
        self.base.as_os_str().as_bytes()
    }
}

const RECORD_AT: u64 = 2048;
const MAGIC: [u8; 8] = *b"ntdbatt\n";
const ID_AT: usize = 8;
const BOOT_AT: usize = 16;
const CRC_AT: usize = 32;
const BASE_LEN_AT: usize = 36;
const DEVICE_AT: usize = 40;
const INODE_AT: usize = 48;
const DIR_LEN_AT: usize = 56;
const BASE_AT: usize = 64;
const DIR_AT: usize = BASE_AT + BASE_PATH_BYTES_MAX;
const RECORD_BYTES: usize = 4096 - RECORD_AT as usize;
/// Longest path of a directory for shared memory.
pub const SHM_DIR_BYTES_MAX: usize = RECORD_BYTES - DIR_AT;
const _: () = assert!(SHM_DIR_BYTES_MAX == 960);

/// Where the users of a database have their companions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AttachRecord {
    /// Id of the shared-memory file.
    pub shm_id: u64,
    /// The boot during which they attached.
    pub boot_id: [u8; 16],
    /// The data file that they use; a copy of it is another one, and its record is not its own.
    pub file: FileId,
    /// The path that the companions lie beside.
    pub base: PathBuf,
    /// The directory of the shared-memory file, if it does not lie there, too.
    pub shm_dir: Option<PathBuf>,
}

impl AttachRecord {
    /// Where in the file it lies.
    #[cfg(feature = "failpoints")]
    pub const SPAN: std::ops::Range<usize> = RECORD_AT as usize..RECORD_AT as usize + RECORD_BYTES;
    /// Where in the record the data file's device and inode lie.
    #[cfg(feature = "failpoints")]
    pub const FILE_SPAN: std::ops::Range<usize> = DEVICE_AT..DIR_LEN_AT;

    /// The companions of those who wrote it.
    pub fn companions(&self) -> Companions {
        Companions::of(&self.base, self.shm_dir.as_deref())
    }

    /// Reads the record; `None` if there is none (or what is there is damaged).
    pub fn read(data: &File) -> std::io::Result<Option<AttachRecord>> {
        let mut bytes = [0u8; RECORD_BYTES];
        data.read_exact_at(&mut bytes, RECORD_AT)?;
        let base_len = le::get_u32(&bytes, BASE_LEN_AT) as usize;
        let dir_len = le::get_u32(&bytes, DIR_LEN_AT) as usize;
        if bytes[..8] != MAGIC || base_len > BASE_PATH_BYTES_MAX || dir_len > SHM_DIR_BYTES_MAX {
            return Ok(None);
        }
        if record_crc(&bytes) != le::get_u32(&bytes, CRC_AT) {
            return Ok(None);
        }
        let path =
            |at: usize, len: usize| PathBuf::from(OsString::from_vec(bytes[at..at + len].to_vec()));
        let base = path(BASE_AT, base_len);
        let shm_dir = (dir_len > 0).then(|| path(DIR_AT, dir_len));
        if !base.is_absolute() || shm_dir.as_ref().is_some_and(|dir| !dir.is_absolute()) {
            return Ok(None);
        }
        Ok(Some(AttachRecord {
            shm_id: le::get_u64(&bytes, ID_AT),
            boot_id: le::get_bytes(&bytes, BOOT_AT),
            file: FileId {
                dev: le::get_u64(&bytes, DEVICE_AT),
                ino: le::get_u64(&bytes, INODE_AT),
            },
            base,
            shm_dir,
        }))
    }

    /// Whether nothing is there, not even something damaged: the last user has put the database to rest.
    pub fn is_clear(data: &File) -> std::io::Result<bool> {
        let mut bytes = [0u8; RECORD_BYTES];
        data.read_exact_at(&mut bytes, RECORD_AT)?;
        Ok(bytes.iter().all(|&byte| byte == 0))
    }

    /// Writes the record, or clears it.
    pub fn write(data: &File, record: Option<&AttachRecord>) -> std::io::Result<()> {
        let mut bytes = [0u8; RECORD_BYTES];
        if let Some(record) = record {
            let base = record.base.as_os_str().as_bytes();
            let dir = record.shm_dir.as_ref().map_or(&b""[..], |dir| dir.as_os_str().as_bytes());
            le::put(&mut bytes, 0, &MAGIC);
            le::put(&mut bytes, ID_AT, &record.shm_id.to_le_bytes());
            le::put(&mut bytes, BOOT_AT, &record.boot_id);
            le::put(&mut bytes, DEVICE_AT, &record.file.dev.to_le_bytes());
            le::put(&mut bytes, INODE_AT, &record.file.ino.to_le_bytes());
            le::put(&mut bytes, BASE_LEN_AT, &(base.len() as u32).to_le_bytes());
            le::put(&mut bytes, DIR_LEN_AT, &(dir.len() as u32).to_le_bytes());
            le::put(&mut bytes, BASE_AT, base);
            le::put(&mut bytes, DIR_AT, dir);
            let crc = record_crc(&bytes);
            le::put(&mut bytes, CRC_AT, &crc.to_le_bytes());
        }
        data.write_all_at(&bytes, RECORD_AT)
    }
}

fn record_crc(bytes: &[u8; RECORD_BYTES]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&bytes[..CRC_AT]), &bytes[BASE_LEN_AT..])
}

/// The directory that is to have the shared-memory file, with symbolic links resolved; `None` if that is the data file's own.
pub fn resolve_shm_dir(dir: Option<&Path>, resolved: &Path) -> Result<Option<PathBuf>> {
    let Some(dir) = dir else { return Ok(None) };
    let failed = |e| Error::from_io(dir, "use the directory for shared memory", e);
    let found = std::fs::canonicalize(dir).map_err(failed)?;
    if !found.is_dir() {
        return Err(failed(std::io::Error::from_raw_os_error(libc::ENOTDIR)));
    }
    let len = found.as_os_str().len();
    if len > SHM_DIR_BYTES_MAX {
        return Err(too_long(
            dir,
            "path of the directory for shared memory",
            len,
            SHM_DIR_BYTES_MAX,
        ));
    }
    Ok((Some(&*found) != resolved.parent()).then_some(found))
}

fn too_long(path: &Path, what: &'static str, len: usize, limit: usize) -> Error {
    Error::TooLong { path: path.to_path_buf(), what, len: len as u64, limit: limit as u64 }
}

/// The data file's path with symbolic links resolved, the last component included.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    let given = path.as_os_str().len();
    if given >= libc::PATH_MAX as usize {
        return Err(too_long(path, "path", given, BASE_PATH_BYTES_MAX));
    }
    let resolved = match std::fs::canonicalize(path) {
        Ok(resolved) => resolved,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            // To be created, perhaps: its directory must be there.
            let dir = match path.parent() {
                Some(dir) if !dir.as_os_str().is_empty() => dir,
                _ => Path::new("."),
            };
            let dir = std::fs::canonicalize(dir)
                .map_err(|e| Error::from_io(path, "find the directory of the database", e))?;
            match path.file_name() {
                // `name/` is the name of a directory.
                Some(name) if !path.as_os_str().as_bytes().ends_with(b"/") => dir.join(name),
                _ => return Err(Error::from_io(path, "find the database", e)),
            }
        }
        Err(e) if e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
            let name = path.file_name().map_or(0, |name| name.len());
            return Err(if name > libc::NAME_MAX as usize - SUFFIX_BYTES_MAX {
                too_long(path, FILE_NAME, name, libc::NAME_MAX as usize - SUFFIX_BYTES_MAX)
            } else {
                too_long(path, "path", path.as_os_str().len(), BASE_PATH_BYTES_MAX)
            });
        }
        Err(e) => return Err(Error::from_io(path, "find the database", e)),
    };
    if resolved.as_os_str().len() > BASE_PATH_BYTES_MAX {
        let len = resolved.as_os_str().len();
        return Err(too_long(path, "absolute path", len, BASE_PATH_BYTES_MAX));
    }
    Ok(resolved)
}

/// The core's data file.
pub fn data_file(core: &Core) -> &File {
    core.data.as_ref().expect("a database on disk has a data file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::failpoint::Kind;

    #[test]
    fn an_attach_record_survives_and_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create_new(&dir.path().join("f"), Kind::Data, 0o600).unwrap();
        file.write_all_at(&[0; 8192], 0).unwrap();
        assert_eq!(AttachRecord::read(&file).unwrap(), None);
        for shm_dir in [None, Some("/some/other/place".into())] {
            let record = AttachRecord {
                shm_id: 77,
                boot_id: [5; 16],
                file: FileId { dev: 3, ino: 4 },
                base: "/some/where/name.ntdb".into(),
                shm_dir,
            };
            AttachRecord::write(&file, Some(&record)).unwrap();
            assert_eq!(AttachRecord::read(&file).unwrap(), Some(record));
        }
        assert!(!AttachRecord::is_clear(&file).unwrap());
        file.write_all_at(b"X", 2048 + 44).unwrap();
        assert_eq!(AttachRecord::read(&file).unwrap(), None);
        assert!(!AttachRecord::is_clear(&file).unwrap());
        AttachRecord::write(&file, None).unwrap();
        assert_eq!(AttachRecord::read(&file).unwrap(), None);
        assert!(AttachRecord::is_clear(&file).unwrap());
    }
}
