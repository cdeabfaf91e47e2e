//! Files: opened without traps, grown without signals, synced with their directories.
//!
//! What this module promises:
//! - **Opening** never follows a symbolic link in the last component (callers resolve links first,
//!   so that companions lie beside the real file), never passes the descriptor on over exec, never
//!   blocks on a fifo and never opens a device: anything but a regular file is an error that says
//!   what it is.
//! - **Growing** never raises a signal. Beyond `RLIMIT_FSIZE` the kernel sends SIGXFSZ, which kills
//!   by default, so the limit is asked for first and `EFBIG` returned in its place. (A limit lowered
//!   by another process between the question and the call is the one gap.)
//! - **Allocating** reserves real blocks, so that later stores into the mapping cannot meet a full
//!   disk, which would be SIGBUS. If it fails the file has its former length. A process killed in
//!   the middle leaves a longer file whose new part is zeros that nobody refers to.
//!
//! Whoever changes the length of a file must hold the lock that guards its length: restoring it
//! after a failure would otherwise cut off what another has just allocated.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub use super::failpoint::Kind;
use super::failpoint::{self, Event, What};

/// Which file it is, whatever it is called: hard links and renames don't matter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileId {
    /// Number of the device.
    pub dev: u64,
    /// Number of the inode on it.
    pub ino: u64,
}

impl FileId {
    /// The file that `path` names now, not following a link in the last component; `None` if there
    /// is none.
    pub fn of_path(path: &Path) -> io::Result<Option<FileId>> {
        match fs::symlink_metadata(path) {
            Ok(metadata) => Ok(Some(FileId { dev: metadata.dev(), ino: metadata.ino() })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Largest piece that one fallocate call is asked for: an interrupted call may have to start its
/// piece again, so a piece must be done sooner than signals come.
const ALLOCATE_STEP_BYTES: u64 = 64 << 20;

/// Zeros are written in pieces of this size where fallocate is not supported.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The name of a fault: the call and the kind of file, as in `fdatasync:data`.
macro_rules! fault_name {
    ($call:literal, $kind:expr) => {
        match $kind {
            Kind::Data => concat!($call, ":data"),
            Kind::Log => concat!($call, ":log"),
            Kind::Shm => concat!($call, ":shm"),
            Kind::Dir => concat!($call, ":dir"),
        }
    };
}

/// Returns the planned error, if there is one, from the calling function.
macro_rules! fail_if_planned {
    ($call:literal, $kind:expr) => {
        if let Some(error) = failpoint::fault(fault_name!($call, $kind)) {
            return Err(error);
        }
    };
}

/// An open regular file.
#[derive(Debug)]
pub struct File {
    inner: fs::File,
    path: PathBuf,
    kind: Kind,
}

impl File {
    /// Opens an existing file for reading and writing.
    pub fn open(path: &Path, kind: Kind) -> io::Result<File> {
        Self::open_with(path, kind, OpenOptions::new().read(true).write(true))
    }

    /// Opens an existing file for reading.
    pub fn open_readonly(path: &Path, kind: Kind) -> io::Result<File> {
        Self::open_with(path, kind, OpenOptions::new().read(true))
    }

    /// Creates a file that must not exist, with `mode` (less the umask).
    pub fn create_new(path: &Path, kind: Kind, mode: u32) -> io::Result<File> {
        fail_if_planned!("create", kind);
        let mut options = OpenOptions::new();
        let file = Self::open_checked(
            path,
            kind,
            options.read(true).write(true).create_new(true).mode(mode),
        )?;
        file.tell(What::Created);
        Ok(file)
    }

    fn open_with(path: &Path, kind: Kind, options: &mut OpenOptions) -> io::Result<File> {
        fail_if_planned!("open", kind);
        // Looked at before opening, because opening a device can do things; and again afterwards,
        // because the name may have changed hands.
        if let Ok(metadata) = fs::symlink_metadata(path) {
            require_regular(&metadata)?;
        }
        Self::open_checked(path, kind, options)
    }

    fn open_checked(path: &Path, kind: Kind, options: &mut OpenOptions) -> io::Result<File> {
        let inner = options
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)?;
        require_regular(&inner.metadata()?)?;
        Ok(File { inner, path: path.to_path_buf(), kind })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes that it has been renamed, for the messages about it.
    pub fn is_now_at(&mut self, path: &Path) {
        self.path = path.to_path_buf();
    }

    /// Which file it is.
    pub fn identity(&self) -> io::Result<FileId> {
        let metadata = self.inner.metadata()?;
        Ok(FileId { dev: metadata.dev(), ino: metadata.ino() })
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.inner.metadata()?.len())
    }

    /// Bytes of disk that it occupies.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.inner.metadata()?.blocks() * 512)
    }

    /// Whether no name leads to it any more.
    pub fn is_unlinked(&self) -> io::Result<bool> {
        Ok(self.inner.metadata()?.nlink() == 0)
    }

    /// Secures disk space for the given range and makes the file at least that long.
    ///
    /// Where the file system cannot allocate, zeros are written behind the present end; holes
    /// before it then stay holes. On failure the length is what it was. The caller holds the lock
    /// that guards the file's length.
    pub fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        fail_if_planned!("allocate", self.kind);
        if len_bytes == 0 {
            return Ok(());
        }
        let end = end_of(offset, len_bytes)?;
        let before = self.len()?;
        if end > before {
            forbid_beyond_limit(end)?;
        }
        self.tell(What::Allocate(end));
        let mut result = self.fallocate(offset, end);
        if matches!(&result, Err(error) if is_unsupported(error)) {
            result = self.write_zeros(before, end);
        }
        if result.is_err() && self.len()? > before {
            // The first error is the one to report; if even this fails, a longer file than
            // before does no harm.
            let _ = self.inner.set_len(before);
        }
        result
    }

    fn fallocate(&self, mut offset: u64, end: u64) -> io::Result<()> {
        while offset < end {
            fail_if_planned!("fallocate", self.kind);
            let step = ALLOCATE_STEP_BYTES.min(end - offset);
            retry_interrupted(|| {
                // SAFETY: plain numbers and a descriptor that is open while `self` lives.
                unsafe { libc::fallocate(self.inner.as_raw_fd(), 0, offset as i64, step as i64) }
            })?;
            offset += step;
        }
        Ok(())
    }

    fn write_zeros(&self, mut offset: u64, end: u64) -> io::Result<()> {
        while offset < end {
            let piece = &ZEROS[..(end - offset).min(ZEROS.len() as u64) as usize];
            self.inner.write_all_at(piece, offset)?;
            offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Sets the length. A longer file gets a hole: see [`File::allocate`] for space that is safe to
    /// touch. The caller holds the lock that guards the file's length.
    pub fn truncate(&self, len_bytes: u64) -> io::Result<()> {
        fail_if_planned!("truncate", self.kind);
        if len_bytes > self.len()? {
            forbid_beyond_limit(len_bytes)?;
        }
        self.tell(What::Truncate(len_bytes));
        self.inner.set_len(len_bytes)
    }

    /// Reads at most `buffer.len()` bytes; 0 at the end of the file.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        fail_if_planned!("read", self.kind);
        loop {
            match self.inner.read_at(buffer, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Fills `buffer`; `UnexpectedEof` if the file ends before.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        fail_if_planned!("read", self.kind);
        self.inner.read_exact_at(buffer, offset)
    }

    /// Writes all of `bytes`. A full disk may leave a part of them written.
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        fail_if_planned!("write", self.kind);
        forbid_beyond_limit(end_of(offset, bytes.len() as u64)?)?;
        self.tell(What::Write { offset, len: bytes.len() as u64 });
        self.inner.write_all_at(bytes, offset)
    }

    /// Makes contents and length durable (fdatasync). After an error nothing is known about what
    /// is on the disk, and a second call may report success wrongly: never retry.
    pub fn sync_data(&self) -> io::Result<()> {
        self.synced(|| {
            fail_if_planned!("fdatasync", self.kind);
            self.inner.sync_data()
        })
    }

    /// Makes `bytes`, which have been written at `offset`, durable by writing them once more, and nothing else: what others
    /// have written to the file, or stored into a mapping of it, is not waited for. The file must be long enough already.
    /// For errors holds what [`File::sync_data`] says.
    pub fn sync_written(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let len = bytes.len() as u64;
        self.tell(What::Write { offset, len });
        let result = (|| {
            fail_if_planned!("fdatasync", self.kind);
            match self.write_through(bytes, offset) {
                // A file system that knows no such flag.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    self.inner.sync_data()
                }
                result => result,
            }
        })();
        self.tell(What::RangeSynced { offset, len, ok: result.is_ok() });
        result
    }

    /// Writes as if the file had been opened with O_DSYNC.
    fn write_through(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let part =
                libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            let at = (offset + done as u64) as i64;
            // SAFETY: one part, whose bytes are borrowed and only read.
            let written =
                unsafe { libc::pwritev2(self.inner.as_raw_fd(), &part, 1, at, libc::RWF_DSYNC) };
            match written {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                1.. => done += written as usize,
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// As [`File::sync_data`], with mode, owner and times (fsync).
    pub fn sync_all(&self) -> io::Result<()> {
        self.synced(|| {
            fail_if_planned!("fsync", self.kind);
            self.inner.sync_all()
        })
    }

    fn synced(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        self.tell(What::SyncBegin);
        let result = sync();
        self.tell(What::SyncEnd { ok: result.is_ok() });
        result
    }

    /// Gives this file the owner, group and permission bits of `model`, as far as the process may.
    ///
    /// Only root can give files away; others keep theirs. If even the group cannot be had, the
    /// group gets no more than everybody, lest the members of another group read what the model
    /// hides from them.
    pub fn adopt_owner_and_mode(&self, model: &File) -> io::Result<()> {
        let wanted = model.inner.metadata()?;
        let have = self.inner.metadata()?;
        if (wanted.uid(), wanted.gid()) != (have.uid(), have.gid()) {
            let changed = self
                .chown(wanted.uid(), wanted.gid())
                .or_else(|_| self.chown(u32::MAX, wanted.gid()));
            match changed {
                Err(error) if error.raw_os_error() != Some(libc::EPERM) => return Err(error),
                _ => {}
            }
        }
        let mut mode = wanted.mode() & 0o777;
        if self.inner.metadata()?.gid() != wanted.gid() {
            mode = mode_for_another_group(mode);
        }
        // After the owner, because changing the owner clears bits of the mode.
        self.inner.set_permissions(fs::Permissions::from_mode(mode))
    }

    /// Changes owner and group; `u32::MAX` leaves one as it is.
    fn chown(&self, uid: u32, gid: u32) -> io::Result<()> {
        // SAFETY: plain numbers and a descriptor that is open while `self` lives.
        retry_interrupted(|| unsafe { libc::fchown(self.inner.as_raw_fd(), uid, gid) })
    }

    fn tell(&self, what: What<'_>) {
        failpoint::record(Event { kind: self.kind, path: &self.path, what });
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

/// Makes the creation, renaming or unlinking of `path` durable by syncing its directory.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let tell = |what| failpoint::record(Event { kind: Kind::Dir, path: parent, what });
    tell(What::SyncBegin);
    let result = (|| {
        fail_if_planned!("fsync", Kind::Dir);
        let directory = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_DIRECTORY)
            .open(parent)?;
        match directory.sync_all() {
            // Some file systems have nothing to sync in a directory and say so.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    })();
    tell(What::SyncEnd { ok: result.is_ok() });
    result
}

/// The user that the system takes this process for, for messages.
pub fn effective_user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Removes a name; says whether it was there. Durable only after [`sync_dir`].
pub fn unlink(path: &Path, kind: Kind) -> io::Result<bool> {
    fail_if_planned!("unlink", kind);
    failpoint::record(Event { kind, path, what: What::Unlink });
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `name` is a valid C string for the length of the call.
    match retry_interrupted(|| unsafe { libc::unlink(name.as_ptr()) }) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Renames, replacing what `to` named. Durable only after [`sync_dir`].
pub fn rename(from: &Path, to: &Path, kind: Kind) -> io::Result<()> {
    fail_if_planned!("rename", kind);
    failpoint::record(Event { kind, path: from, what: What::Rename(to) });
    fs::rename(from, to)
}

/// Renames to a name that nothing has yet.
pub fn rename_new(from: &Path, to: &Path, kind: Kind) -> io::Result<()> {
    fail_if_planned!("rename", kind);
    let (old, new) =
        (CString::new(from.as_os_str().as_bytes())?, CString::new(to.as_os_str().as_bytes())?);
    failpoint::record(Event { kind, path: from, what: What::Rename(to) });
    // SAFETY: both are valid C strings.
    let result = retry_interrupted(|| unsafe {
        libc::renameat2(
            libc::AT_FDCWD,
            old.as_ptr(),
            libc::AT_FDCWD,
            new.as_ptr(),
            libc::RENAME_NOREPLACE,
        )
    });
    match result {
        // A file system that cannot do it in one step.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => {
            if fs::symlink_metadata(to).is_ok() {
                return Err(io::Error::from_raw_os_error(libc::EEXIST));
            }
            fs::rename(from, to)
        }
        other => other,
    }
}

/// Repeats a system call while signals interrupt it.
pub(super) fn retry_interrupted(mut call: impl FnMut() -> libc::c_int) -> io::Result<()> {
    loop {
        if call() == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn require_regular(metadata: &fs::Metadata) -> io::Result<()> {
    let file_type = metadata.file_type();
    let found = if file_type.is_file() {
        return Ok(());
    } else if file_type.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::IsADirectory,
            "is a directory, not a regular file",
        ));
    } else if file_type.is_symlink() {
        "is a symbolic link, which is not followed"
    } else if file_type.is_fifo() {
        "is a fifo, not a regular file"
    } else if file_type.is_socket() {
        "is a socket, not a regular file"
    } else {
        "is a device, not a regular file"
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, found))
}

/// The mode with which a file of another group shows that group no more than everybody.
fn mode_for_another_group(mode: u32) -> u32 {
    mode & (!0o070 | (mode & 0o007) << 3)
}

fn end_of(offset: u64, len_bytes: u64) -> io::Result<u64> {
    offset
        .checked_add(len_bytes)
        .filter(|&end| end <= i64::MAX as u64)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Returns `EFBIG` where the kernel would send SIGXFSZ.
fn forbid_beyond_limit(end: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    retry_interrupted(|| unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) })?;
    if limit.rlim_cur != libc::RLIM_INFINITY && end > limit.rlim_cur {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(())
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

#[cfg(test)]
mod tests;
