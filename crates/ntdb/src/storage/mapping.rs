//! One range of addresses that never moves.
//!
//! The whole reservation is mapped over the file at once, far beyond its end. Growing the file then
//! needs no further call: the pages behind the old end come to life when the file reaches them. So
//! a pointer into the mapping stays good for as long as the mapping lives, whatever grows
//! meanwhile. The price is a duty of the callers: **nobody touches a page beyond the end of the
//! file**, which would be SIGBUS; they check positions against the length that the database
//! records, and the length only shrinks past every reader.
//!
//! Addresses are plenty (128 TiB), but `ulimit -v` or an emulator may grant few: the reservation is
//! halved until it fits, down to the least that the caller can live with.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::file::File;

/// What may be done with the bytes of a file's mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read; a store is SIGSEGV.
    ReadOnly,
    /// Read and write, seen by every process that maps the file.
    ReadWrite,
    /// Read and write, in a private copy: the file stays as it is. Behind the end that the file had
    /// at mapping time lies zeroed memory.
    Private,
}

/// A range of mapped addresses; unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    reserved_bytes: usize,
}

// SAFETY: a `Mapping` is an address range and its length, both constant from creation to drop; no
// method forms a reference to the bytes or depends on the thread. What is done through `base()` is
// the affair of the caller's own unsafe code.
unsafe impl Send for Mapping {}
// SAFETY: as above; all methods take `&self` and are system calls on constant numbers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `file` from its start.
    ///
    /// Reserves `reserve_bytes` addresses, or a half, a quarter and so on of it, but at least
    /// `min_bytes`, and for [`Access::Private`] at least the file's length.
    ///
    /// # Errors
    /// `ENOMEM` if not even `min_bytes` addresses are to be had.
    pub fn file(
        file: &File,
        reserve_bytes: u64,
        min_bytes: u64,
        access: Access,
    ) -> io::Result<Mapping> {
        let fd = file.as_fd().as_raw_fd();
        let (read_write, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        match access {
            Access::ReadOnly => {
                reserve(reserve_bytes, min_bytes, |len| map(len, libc::PROT_READ, shared, fd))
            }
            Access::ReadWrite => {
                reserve(reserve_bytes, min_bytes, |len| map(len, read_write, shared, fd))
            }
            Access::Private => {
                let file_bytes = file.len()?;
                let mapping =
                    Self::anonymous(reserve_bytes.max(file_bytes), min_bytes.max(file_bytes))?;
                mapping.overlay_privately(fd, file_bytes)?;
                Ok(mapping)
            }
        }
    }

    /// Zeroed memory of this process (and its forked children's copies), with nothing behind it
    /// until it is touched. Sizes as in [`Mapping::file`].
    pub fn anonymous(reserve_bytes: u64, min_bytes: u64) -> io::Result<Mapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        reserve(reserve_bytes, min_bytes, |len| {
            map(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
        })
    }

    /// Puts a copy-on-write view of the file's first bytes in place of the start of the range.
    fn overlay_privately(&self, fd: libc::c_int, file_bytes: u64) -> io::Result<()> {
        if file_bytes == 0 {
            return Ok(());
        }
        // SAFETY: replaces pages of a range that this mapping owns and that nobody has seen yet.
        let at = unsafe {
            libc::mmap(
                self.base.cast(),
                round_up_to_host_page(file_bytes)?,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE,
                fd,
                0,
            )
        };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The first address: aligned to the host's pages, never null.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// How many bytes of addresses there are.
    #[inline]
    pub fn reserved(&self) -> u64 {
        self.reserved_bytes as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and belongs to this value alone; whoever keeps
        // pointers into it keeps the mapping alive, too.
        unsafe { libc::munmap(self.base.cast(), self.reserved_bytes) };
    }
}

/// Makes the pages of a range present and writable now, so that the stores to come take no faults. A
/// refusal (a kernel before 5.14 cannot do this) is ignored: the stores fault, then.
///
/// # Safety
/// `len_bytes` from `at` on lie within one mapping that lives, backed by its file.
pub unsafe fn populate(at: *mut u8, len_bytes: usize) {
    // SAFETY: the caller's promise; the advice changes no bytes.
    unsafe { libc::madvise(at.cast(), len_bytes, libc::MADV_POPULATE_WRITE) };
}

/// Tries sizes from `reserve_bytes` down to `min_bytes`.
fn reserve(
    reserve_bytes: u64,
    min_bytes: u64,
    map: impl Fn(usize) -> io::Result<*mut u8>,
) -> io::Result<Mapping> {
    let min = round_up_to_host_page(min_bytes.max(1))?;
    let mut len = round_up_to_host_page(reserve_bytes)?.max(min);
    loop {
        match map(len) {
            Ok(base) => return Ok(Mapping { base, reserved_bytes: len }),
            Err(error) => {
                let too_large = matches!(
                    error.raw_os_error(),
                    Some(libc::ENOMEM | libc::EOVERFLOW | libc::EINVAL)
                );
                if !too_large || len == min {
                    return Err(error);
                }
                len = round_up_to_host_page(len as u64 / 2)?.max(min);
            }
        }
    }
}

fn map(
    len: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
) -> io::Result<*mut u8> {
    // SAFETY: a new range at an address of the kernel's choosing disturbs nothing.
    let at = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd, 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at.cast()) }
}

/// Size of the host's memory pages in bytes: 4096 on most, up to 65536 on aarch64.
pub fn host_page_bytes() -> usize {
    static BYTES: AtomicUsize = AtomicUsize::new(0);
    match BYTES.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: no memory is involved.
            let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
            BYTES.store(bytes, Ordering::Relaxed);
            bytes
        }
        bytes => bytes,
    }
}

fn round_up_to_host_page(bytes: u64) -> io::Result<usize> {
    bytes
        .checked_next_multiple_of(host_page_bytes() as u64)
        .and_then(|bytes| usize::try_from(bytes).ok())
        .filter(|&bytes| bytes <= isize::MAX as usize)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::file::Kind;
    use crate::storage::testing::{assert_exit_ok, in_child};

    const MIB: u64 = 1 << 20;

    fn new_file() -> (tempfile::TempDir, File) {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create_new(&dir.path().join("db"), Kind::Data, 0o600).unwrap();
        (dir, file)
    }

    fn load(mapping: &Mapping, offset: u64) -> u8 {
        assert!(offset < mapping.reserved());
        // SAFETY: inside the mapping, and the tests keep below the end of the file.
        unsafe { mapping.base().add(offset as usize).read_volatile() }
    }

    fn store(mapping: &Mapping, offset: u64, byte: u8) {
        assert!(offset < mapping.reserved());
        // SAFETY: as in `load`.
        unsafe { mapping.base().add(offset as usize).write_volatile(byte) }
    }

    #[test]
    fn the_file_grows_under_the_mapping() {
        let (_dir, file) = new_file();
        let mapping = Mapping::file(&file, 1 << 30, MIB, Access::ReadWrite).unwrap();
        assert_eq!(mapping.reserved(), 1 << 30);
        assert_eq!(mapping.base() as usize % host_page_bytes(), 0);
        for megabyte in 0..4 {
            file.allocate(megabyte * MIB, MIB).unwrap();
            let last = (megabyte + 1) * MIB - 1;
            store(&mapping, last, megabyte as u8 + 1);
            let mut byte = [0];
            file.read_exact_at(&mut byte, last).unwrap();
            assert_eq!(byte, [megabyte as u8 + 1]);
        }
        file.write_all_at(&[77], 5).unwrap();
        assert_eq!(load(&mapping, 5), 77);
    }

    #[test]
    fn a_private_mapping_leaves_the_file_alone() {
        let (_dir, file) = new_file();
        let file_bytes = 3 * MIB + 100;
        file.write_all_at(&vec![9; file_bytes as usize], 0).unwrap();
        let read_only = File::open_readonly(file.path(), Kind::Data).unwrap();
        let mapping = Mapping::file(&read_only, 16 * MIB, MIB, Access::Private).unwrap();
        assert_eq!(load(&mapping, file_bytes - 1), 9);
        // Behind the end: the rest of its last page, then anonymous memory to the last byte.
        for beyond in [file_bytes, file_bytes + host_page_bytes() as u64, 16 * MIB - 1] {
            assert_eq!(load(&mapping, beyond), 0, "{beyond}");
            store(&mapping, beyond, 1);
            assert_eq!(load(&mapping, beyond), 1);
        }
        store(&mapping, 0, 1);
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [9]);
        assert_eq!(file.len().unwrap(), file_bytes);
    }

    #[test]
    fn a_private_mapping_covers_a_file_longer_than_asked_for() {
        let (_dir, file) = new_file();
        file.truncate(4 * MIB).unwrap();
        let mapping = Mapping::file(&file, MIB, MIB, Access::Private).unwrap();
        assert!(mapping.reserved() >= 4 * MIB);
        file.truncate(0).unwrap();
        let empty = Mapping::file(&file, MIB, MIB, Access::Private).unwrap();
        store(&empty, 0, 1);
    }

    #[test]
    fn a_read_only_mapping_shows_what_others_write() {
        let (_dir, file) = new_file();
        let read_only = File::open_readonly(file.path(), Kind::Data).unwrap();
        let mapping = Mapping::file(&read_only, MIB, MIB, Access::ReadOnly).unwrap();
        file.write_all_at(b"x", 0).unwrap();
        assert_eq!(load(&mapping, 0), b'x');
        let status = in_child(|| {
            store(&mapping, 0, 1);
            0
        });
        assert!(libc::WIFSIGNALED(status));
        assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
        // Writing needs a descriptor that may.
        let error = Mapping::file(&read_only, MIB, MIB, Access::ReadWrite).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    }

    #[test]
    fn anonymous_memory_is_zero() {
        let mapping = Mapping::anonymous(1 << 36, MIB).unwrap();
        assert_eq!(mapping.reserved(), 1 << 36);
        assert_eq!(load(&mapping, (1 << 36) - 1), 0);
        store(&mapping, (1 << 36) - 1, 5);
        assert_eq!(load(&mapping, (1 << 36) - 1), 5);
    }

    #[test]
    fn more_than_there_is_gets_less() {
        let mapping = Mapping::anonymous(1 << 62, MIB).unwrap();
        assert!(mapping.reserved() >= 1 << 40);
        let error = Mapping::anonymous(1 << 62, 1 << 60).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        let error = Mapping::anonymous(u64::MAX, u64::MAX).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    fn a_limit_on_addresses_halves_the_reservation_or_is_enomem() {
        let (_dir, file) = new_file();
        assert_exit_ok(in_child(|| {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = text.split(' ').next().unwrap().parse().unwrap();
            let used = pages * host_page_bytes() as u64;
            let limit = libc::rlimit { rlim_cur: used + 100 * MIB, rlim_max: used + 100 * MIB };
            // SAFETY: a valid structure.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
            let mapping = Mapping::file(&file, 1 << 38, MIB, Access::ReadWrite).unwrap();
            assert_eq!(mapping.reserved(), 64 * MIB);
            for access in [Access::ReadOnly, Access::ReadWrite, Access::Private] {
                let error = Mapping::file(&file, 1 << 38, 1 << 30, access).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::ENOMEM), "{access:?}");
            }
            drop(mapping);
            // Unmapped on drop: the addresses are there again.
            assert_eq!(Mapping::anonymous(64 * MIB, 64 * MIB).unwrap().reserved(), 64 * MIB);
            0
        }));
    }
}
