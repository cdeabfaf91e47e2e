//! Locks that say who lives: open file description locks on bytes far beyond the end of the data
//! file.
//!
//! The kernel drops such a lock when the last descriptor of its open file description is closed,
//! which a dying process cannot avoid: holding one *is* being alive. Process ids would lie across
//! pid namespaces, and POSIX record locks vanish when any descriptor of the file is closed by
//! anybody in the process.
//!
//! Two things would keep the description alive beyond the process and are therefore never done:
//! mapping memory through it (a forked child inherits the mapping), and leaving the descriptor open
//! in a forked child (see [`super::inherited`]). Hence a descriptor of its own open().
//!
//! A description never conflicts with itself: asking about one's own byte says "free". Callers test
//! for "is it me" first.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::file::FileId;
use super::inherited;

/// A range of lock bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteRange {
    /// The first byte's offset in the file.
    pub start: u64,
    /// How many bytes.
    pub len: u64,
}

impl ByteRange {
    const fn byte(start: u64) -> ByteRange {
        ByteRange { start, len: 1 }
    }
}

/// The first lock byte: half way to the largest offset, beyond any file.
pub const LOCK_BASE: u64 = 1 << 62;
/// Held while attaching, recovering and closing last.
pub const ATTACH: ByteRange = ByteRange::byte(LOCK_BASE);
/// Serialises those who repair after the dead.
pub const REPAIR: ByteRange = ByteRange::byte(LOCK_BASE + 1);
/// Held shared by read-only users of a database at rest.
pub const READER: ByteRange = ByteRange::byte(LOCK_BASE + 2);
/// Held by who makes a backup, on the file that it is to become.
pub const BACKUP: ByteRange = ByteRange::byte(LOCK_BASE + 3);
/// Of a shared-memory file, not of the data file: held by all who have it for their own.
pub const IN_USE: ByteRange = ByteRange::byte(LOCK_BASE);
/// The byte of process slot 0; the other slots' bytes follow.
pub const SLOT_BASE: u64 = LOCK_BASE + 4096;

/// The byte that the process in this slot holds while it lives.
pub const fn slot_byte(slot: u16) -> ByteRange {
    ByteRange::byte(SLOT_BASE + slot as u64)
}

/// The bytes of the slots from 0 to `slots` - 1.
pub const fn slot_bytes(slots: u16) -> ByteRange {
    ByteRange { start: SLOT_BASE, len: slots as u64 }
}

/// How a lock excludes others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockKind {
    /// With other shared ones, against exclusive ones.
    Shared,
    /// Against all others. Needs a descriptor that is open for writing.
    Exclusive,
}

impl LockKind {
    const fn l_type(self) -> libc::c_short {
        (match self {
            LockKind::Shared => libc::F_RDLCK,
            LockKind::Exclusive => libc::F_WRLCK,
        }) as libc::c_short
    }
}

/// An open file description used for nothing but locks.
#[derive(Debug)]
pub struct OfdFile {
    /// -1 once closed in a forked child.
    fd: Arc<AtomicI32>,
    id: FileId,
    /// Whether it is closed in forked children.
    is_listed: bool,
}

impl OfdFile {
    /// Opens the file anew; read-only descriptors can take shared locks only.
    pub fn open(path: &Path, read_only: bool) -> io::Result<OfdFile> {
        let file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)?;
        Self::of(file)
    }

    fn of(file: std::fs::File) -> io::Result<OfdFile> {
        let metadata = file.metadata()?;
        let id = FileId { dev: metadata.dev(), ino: metadata.ino() };
        Ok(OfdFile { fd: Arc::new(AtomicI32::new(file.into_raw_fd())), id, is_listed: false })
    }

    /// Opens anew the file that `opened` is, whatever its name is by now; at `path` where that cannot be done (without /proc).
    pub fn reopen(opened: BorrowedFd, path: &Path, read_only: bool) -> io::Result<OfdFile> {
        let by_descriptor = format!("/proc/self/fd/{}", opened.as_raw_fd());
        let file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(by_descriptor);
        match file {
            Ok(file) => Self::of(file),
            Err(_) => Self::open(path, read_only),
        }
    }

    /// Which file it is: compare with the descriptor used for the data, for the name may have
    /// changed hands between the two opens.
    pub fn identity(&self) -> FileId {
        self.id
    }

    /// Takes a lock if it is free: true if it was.
    pub fn try_lock(&self, range: ByteRange, kind: LockKind) -> io::Result<bool> {
        match self.set(libc::F_OFD_SETLK, range, kind.l_type()) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a lock, waiting for it until `deadline` (`None`: for ever): false if time ran out.
    ///
    /// With a deadline it asks again and again, with growing pauses, because the waiting call of
    /// the kernel knows no time limit; an earlier waiter may then be overtaken.
    pub fn lock_wait(
        &self,
        range: ByteRange,
        kind: LockKind,
        deadline: Option<Instant>,
    ) -> io::Result<bool> {
        let Some(deadline) = deadline else {
            return self.set(libc::F_OFD_SETLKW, range, kind.l_type()).map(|()| true);
        };
        let mut pause = Duration::from_micros(50);
        loop {
            if self.try_lock(range, kind)? {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }

    /// Gives up whatever this description holds in the range.
    pub fn unlock(&self, range: ByteRange) -> io::Result<()> {
        self.set(libc::F_OFD_SETLK, range, libc::F_UNLCK as libc::c_short)
    }

    /// Whether another description holds a lock in the range that a lock of this kind would have to
    /// wait for. (Asks only; takes nothing.)
    pub fn is_locked_by_other(&self, range: ByteRange, kind: LockKind) -> io::Result<bool> {
        let mut lock = flock(range, kind.l_type());
        self.fcntl(libc::F_OFD_GETLK, &mut lock)?;
        Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
    }

    /// For the list of what forked children close, which the caller holds.
    pub(super) fn list(&mut self) -> &Arc<AtomicI32> {
        self.is_listed = true;
        &self.fd
    }

    /// In a forked child: closes the child's descriptor, so that the parent's locks end with the
    /// parent. Everything else then fails with `EBADF`.
    #[cfg(test)]
    pub fn close_in_child(&self) {
        close_descriptor(&self.fd);
    }

    fn set(&self, command: libc::c_int, range: ByteRange, l_type: libc::c_short) -> io::Result<()> {
        self.fcntl(command, &mut flock(range, l_type))
    }

    fn fcntl(&self, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
        super::file::retry_interrupted(|| {
            // SAFETY: `lock` is valid for the call; a descriptor of -1 is refused by the kernel.
            unsafe { libc::fcntl(self.fd.load(Ordering::Relaxed), command, &mut *lock) }
        })
    }
}

impl Drop for OfdFile {
    fn drop(&mut self) {
        // A fork between taking the number away and closing would leave the child a descriptor that nobody knows.
        let _list = self.is_listed.then(inherited::lock);
        close_descriptor(&self.fd);
    }
}

impl AsRawFd for OfdFile {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.load(Ordering::Relaxed)
    }
}

/// Closes the descriptor of that number, once. Safe in a fork handler.
pub(super) fn close_descriptor(number: &AtomicI32) {
    let fd: RawFd = number.swap(-1, Ordering::Relaxed);
    if fd >= 0 {
        // SAFETY: the descriptor was this value's own, and the swap hands it out once.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
}

/// Takes a lock for the open file description of `fd`, if it is free: true if it was.
pub fn try_lock(fd: BorrowedFd, range: ByteRange, kind: LockKind) -> io::Result<bool> {
    match set(fd, range, kind.l_type()) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Gives up whatever the open file description of `fd` holds in the range.
pub fn unlock(fd: BorrowedFd, range: ByteRange) -> io::Result<()> {
    set(fd, range, libc::F_UNLCK as libc::c_short)
}

fn set(fd: BorrowedFd, range: ByteRange, l_type: libc::c_short) -> io::Result<()> {
    let mut lock = flock(range, l_type);
    super::file::retry_interrupted(|| {
        // SAFETY: both are valid for the call.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &mut lock) }
    })
}

/// Shows that this description's file is in use, as long as the description lives, also by mappings or in forked children.
pub fn mark_in_use(fd: BorrowedFd) -> io::Result<()> {
    set(fd, IN_USE, LockKind::Shared.l_type())
}

/// Whether another description of the file is marked so.
pub fn is_in_use(fd: BorrowedFd) -> io::Result<bool> {
    let mut lock = flock(IN_USE, LockKind::Exclusive.l_type());
    super::file::retry_interrupted(|| {
        // SAFETY: both are valid for the call.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) }
    })?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

fn flock(range: ByteRange, l_type: libc::c_short) -> libc::flock {
    // SAFETY: all zeros is a valid `flock`; the field l_pid must be 0 for these commands.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = l_type;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = range.start as libc::off_t;
    lock.l_len = range.len as libc::off_t;
    lock
}

#[cfg(test)]
mod tests {
    use super::LockKind::{Exclusive, Shared};
    use super::*;
    use crate::storage::testing::{assert_exit_ok, in_child};
    use std::fs;

    fn database() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        fs::write(&path, b"data").unwrap();
        (dir, path)
    }

    /// Runs a test in a forked child: a test that runs beside it may fork, and its child then holds
    /// this process's descriptors, and locks, for a while.
    fn alone(body: impl FnOnce()) {
        assert_exit_ok(in_child(|| {
            body();
            0
        }));
    }

    #[test]
    fn two_descriptions_of_one_process_exclude_each_other() {
        alone(|| {
            let (_dir, path) = database();
            let (a, b) =
                (OfdFile::open(&path, false).unwrap(), OfdFile::open(&path, false).unwrap());
            assert_eq!(a.identity(), b.identity());
            assert!(a.try_lock(slot_byte(3), Exclusive).unwrap());
            assert!(!b.try_lock(slot_byte(3), Exclusive).unwrap());
            assert!(!b.try_lock(slot_byte(3), Shared).unwrap());
            assert!(b.try_lock(slot_byte(4), Exclusive).unwrap());
            assert!(b.is_locked_by_other(slot_byte(3), Exclusive).unwrap());
            // Its own is granted to it.
            assert!(!a.is_locked_by_other(slot_byte(3), Exclusive).unwrap());
            a.unlock(slot_byte(3)).unwrap();
            assert!(b.try_lock(slot_byte(3), Exclusive).unwrap());
        });
    }

    #[test]
    fn shared_locks_go_together() {
        alone(|| {
            let (_dir, path) = database();
            let (a, b) = (OfdFile::open(&path, true).unwrap(), OfdFile::open(&path, true).unwrap());
            assert!(a.try_lock(READER, Shared).unwrap());
            assert!(b.try_lock(READER, Shared).unwrap());
            assert!(!b.is_locked_by_other(READER, Shared).unwrap());
            assert!(b.is_locked_by_other(READER, Exclusive).unwrap());
            assert_eq!(
                b.try_lock(ATTACH, Exclusive).unwrap_err().raw_os_error(),
                Some(libc::EBADF),
                "a read-only descriptor"
            );
        });
    }

    #[test]
    fn a_range_is_asked_for_at_once() {
        alone(|| {
            let (_dir, path) = database();
            let (a, b) =
                (OfdFile::open(&path, false).unwrap(), OfdFile::open(&path, false).unwrap());
            let is_locked = |slots, kind| b.is_locked_by_other(slot_bytes(slots), kind).unwrap();
            assert!(!is_locked(1024, Exclusive));
            a.try_lock(slot_byte(1023), Exclusive).unwrap();
            assert!(is_locked(1024, Shared));
            assert!(!is_locked(1023, Exclusive));
            a.try_lock(slot_byte(7), Shared).unwrap();
            assert!(is_locked(1023, Exclusive));
            assert!(!is_locked(1023, Shared));
            assert!(!is_locked(7, Exclusive));
        });
    }

    #[test]
    fn closing_other_descriptors_of_the_file_drops_nothing() {
        alone(|| {
            let (_dir, path) = database();
            let a = OfdFile::open(&path, false).unwrap();
            assert!(a.try_lock(slot_byte(0), Exclusive).unwrap());
            drop(fs::File::open(&path).unwrap());
            drop(OfdFile::open(&path, false).unwrap());
            let b = OfdFile::open(&path, false).unwrap();
            assert!(b.is_locked_by_other(slot_byte(0), Exclusive).unwrap());
            drop(a);
            assert!(!b.is_locked_by_other(slot_byte(0), Exclusive).unwrap());
        });
    }

    #[test]
    fn death_frees_the_lock() {
        alone(|| {
            let (_dir, path) = database();
            let watcher = OfdFile::open(&path, false).unwrap();
            let status = in_child(|| {
                let own = OfdFile::open(&path, false).unwrap();
                assert!(own.try_lock(slot_byte(9), Exclusive).unwrap());
                assert!(watcher.is_locked_by_other(slot_byte(9), Exclusive).unwrap());
                // SAFETY: a signal to oneself.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                1
            });
            assert!(libc::WIFSIGNALED(status));
            assert!(!watcher.is_locked_by_other(slot_byte(9), Exclusive).unwrap());
        });
    }

    #[test]
    fn a_child_that_closes_its_copy_does_not_keep_the_lock() {
        alone(|| {
            let (_dir, path) = database();
            let watcher = OfdFile::open(&path, false).unwrap();
            for close in [false, true] {
                let own = OfdFile::open(&path, false).unwrap();
                assert!(own.try_lock(slot_byte(1), Exclusive).unwrap());
                let mut pipe = [0; 2];
                // SAFETY: a valid place for two descriptors.
                assert_eq!(unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
                // SAFETY: the child calls only close, read, write and _exit.
                let pid = unsafe { libc::fork() };
                assert!(pid >= 0);
                if pid == 0 {
                    if close {
                        own.close_in_child();
                        // What remains fails cleanly, and a second close does nothing.
                        own.close_in_child();
                        let error = own.unlock(slot_byte(1)).unwrap_err();
                        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
                    }
                    // SAFETY: valid buffers; leaves at once when the parent closes its end.
                    unsafe {
                        libc::write(pipe[1], [0u8].as_ptr().cast(), 1);
                        libc::pause();
                        libc::_exit(0);
                    }
                }
                let mut ready = [0u8];
                // SAFETY: a valid buffer.
                assert_eq!(unsafe { libc::read(pipe[0], ready.as_mut_ptr().cast(), 1) }, 1);
                drop(own);
                assert_eq!(
                    watcher.is_locked_by_other(slot_byte(1), Exclusive).unwrap(),
                    !close,
                    "closed in the child: {close}"
                );
                let mut status = 0;
                // SAFETY: ends and waits for the child made above; the descriptors are this test's.
                unsafe {
                    libc::kill(pid, libc::SIGKILL);
                    assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
                    libc::close(pipe[0]);
                    libc::close(pipe[1]);
                }
            }
        });
    }

    #[test]
    fn waiting_ends_with_the_lock_or_with_the_time() {
        alone(|| {
            let (_dir, path) = database();
            let (a, b) =
                (OfdFile::open(&path, false).unwrap(), OfdFile::open(&path, false).unwrap());
            assert!(a.try_lock(ATTACH, Exclusive).unwrap());
            let start = Instant::now();
            let soon = Some(start + Duration::from_millis(30));
            assert!(!b.lock_wait(ATTACH, Exclusive, soon).unwrap());
            assert!(start.elapsed() >= Duration::from_millis(30));
            for deadline in [None, Some(Instant::now() + Duration::from_secs(60))] {
                std::thread::scope(|scope| {
                    let waiter = scope.spawn(|| b.lock_wait(ATTACH, Exclusive, deadline).unwrap());
                    std::thread::sleep(Duration::from_millis(5));
                    assert!(!waiter.is_finished());
                    a.unlock(ATTACH).unwrap();
                    assert!(waiter.join().unwrap());
                });
                b.unlock(ATTACH).unwrap();
                assert!(a.try_lock(ATTACH, Exclusive).unwrap());
            }
        });
    }

    #[test]
    fn lock_bytes_do_not_lengthen_the_file() {
        alone(|| {
            let (_dir, path) = database();
            let a = OfdFile::open(&path, false).unwrap();
            assert!(a.try_lock(slot_byte(u16::MAX), Exclusive).unwrap());
            assert_eq!(fs::metadata(&path).unwrap().len(), 4);
        });
    }

    #[test]
    fn processes_exclude_each_other() {
        alone(|| {
            let (_dir, path) = database();
            let own = OfdFile::open(&path, false).unwrap();
            assert!(own.try_lock(REPAIR, Exclusive).unwrap());
            assert_exit_ok(in_child(|| {
                let other = OfdFile::open(&path, false).unwrap();
                i32::from(other.try_lock(REPAIR, Exclusive).unwrap())
            }));
        });
    }
}
