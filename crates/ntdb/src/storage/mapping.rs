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

    /// Makes the pages of a range present and writable now, so that the stores to come take no
    /// faults.
    ///
    /// # Errors
    /// `ENOMEM` without memory; `EFAULT` if the range lies beyond the end of the file or its disk
    /// is full. A kernel that cannot do this (before 5.14) is no error: the stores fault, then.
    pub fn populate_write(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        match self.advise(offset, len_bytes, libc::MADV_POPULATE_WRITE) {
            Err(error)
                if error
                    .raw_os_error()
                    .is_some_and(|errno| errno != libc::ENOMEM && errno != libc::EFAULT) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// Tells the kernel to read single pages rather than their neighbours, too.
    pub fn expect_random_access(&self) -> io::Result<()> {
        self.advise(0, self.reserved(), libc::MADV_RANDOM)
    }

    /// Lets go of the memory behind a range. A shared file keeps its contents; private and
    /// anonymous memory loses them and reads as the file or zeros again.
    pub fn dont_need(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.advise(offset, len_bytes, libc::MADV_DONTNEED)
    }

    /// `offset` is rounded down to a host page; the kernel rounds the end up.
    fn advise(&self, offset: u64, len_bytes: u64, advice: libc::c_int) -> io::Result<()> {
        let end = offset.checked_add(len_bytes).filter(|&end| end <= self.reserved());
        let Some(end) = end else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "beyond the reservation"));
        };
        let start = offset - offset % host_page_bytes() as u64;
        // SAFETY: the range lies within what this mapping owns; none of the advices used changes
        // the bytes of a shared file, and `dont_need` on private memory is what its caller asks.
        let result = unsafe {
            libc::madvise(self.base.add(start as usize).cast(), (end - start) as usize, advice)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and belongs to this value alone; whoever keeps
        // pointers into it keeps the mapping alive, too.
        unsafe { libc::munmap(self.base.cast(), self.reserved_bytes) };
    }
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
