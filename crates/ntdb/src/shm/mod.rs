//! The shared state of one database: a memory-mapped file that all attached processes use, or anonymous memory.
//!
//! [`layout`] says what lies where. [`lock`] and [`pin`] are the two ways to wait for, and to be respected by, others;
//! [`note`] is what makes a step survive its maker; [`segment`] are arrays that grow; [`process`] is the table of who is
//! attached; [`stripe`] are the key locks; [`awaited`] is how to sleep until something changes.

pub mod awaited;
pub mod layout;
pub mod lock;
pub mod note;
pub mod pin;
pub mod process;
pub mod segment;
pub mod stripe;
pub mod ways;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::*, fence};

use self::layout::{Control, ProcessEntry};
use self::segment::SegmentTable;
use self::stripe::Stripe;
use crate::copy::copy_short;
use crate::limits::{KEY_STRIPES, MAX_PROCESSES, RING_BYTES};
use crate::storage::file::File;
use crate::storage::mapping::Mapping;

/// The mapped shared state.
#[derive(Debug)]
pub struct Shm {
    file: Option<File>,
    mapping: Mapping,
    /// Bytes known to be backed: reads beyond would be a bus error.
    known_bytes: AtomicU64,
}

impl Shm {
    /// Takes over a mapping whose first `bytes` are backed.
    pub fn new(file: Option<File>, mapping: Mapping, bytes: u64) -> Shm {
        assert!(bytes >= layout::GROWN as u64 && mapping.reserved() >= bytes);
        Shm { file, mapping, known_bytes: AtomicU64::new(bytes) }
    }

    /// The file, unless in memory.
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Notes that the file has been renamed.
    pub fn is_now_at(&mut self, path: &Path) {
        if let Some(file) = &mut self.file {
            file.is_now_at(path);
        }
    }

    /// The words that all share.
    #[inline]
    pub fn control(&self) -> &Control {
        // SAFETY: the mapping holds at least GROWN bytes, is aligned to a page, and consists of atomics only.
        unsafe { &*self.mapping.base().add(layout::CONTROL).cast::<Control>() }
    }

    /// The header as it stands in the file.
    pub fn header(&self) -> layout::ShmHeader {
        // SAFETY: as above; the header is plain bytes, written before the file got its name.
        unsafe { self.mapping.base().cast::<layout::ShmHeader>().read() }
    }

    /// Entry `index` of the process table.
    #[inline]
    pub fn process(&self, index: usize) -> &ProcessEntry {
        assert!(index < MAX_PROCESSES);
        // SAFETY: within the fixed part, atomics only.
        unsafe { &*self.mapping.base().add(layout::PROCESSES).cast::<ProcessEntry>().add(index) }
    }

    /// Stripe `index` of the key locks.
    #[inline]
    pub fn stripe(&self, index: usize) -> &Stripe {
        assert!(index < KEY_STRIPES);
        // SAFETY: within the fixed part, atomics only.
        unsafe { &*self.mapping.base().add(layout::STRIPES).cast::<Stripe>().add(index) }
    }

    /// First pin slot.
    pub fn pin_slots(&self) -> *const pin::PinSlot {
        self.mapping.base().wrapping_add(layout::PINS).cast()
    }

    /// Copies `bytes` into the ring at `position`. Needs the writer lock; the place must be free.
    #[inline]
    pub fn ring_write(&self, position: u64, bytes: &[u8]) {
        debug_assert!(bytes.len() as u64 <= RING_BYTES);
        // A flusher that copies these bytes finds `written` beyond them, as the writer did that re-uses their place.
        fence(Release);
        let at = (position & (RING_BYTES - 1)) as usize;
        let first = bytes.len().min(RING_BYTES as usize - at);
        // SAFETY: within the ring; the holder of the writer lock alone writes there, flushers copy only what lies before the
        // tail.
        unsafe {
            let ring = self.mapping.base().add(layout::RING);
            if first == bytes.len() {
                return copy_short(bytes.as_ptr(), ring.add(at), first);
            }
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), ring.add(at), first);
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(first), ring, bytes.len() - first);
        }
    }

    /// Copies ring bytes from `position` on into `out`.
    pub fn ring_read(&self, position: u64, out: &mut [u8]) {
        debug_assert!(out.len() as u64 <= RING_BYTES);
        let at = (position & (RING_BYTES - 1)) as usize;
        let first = out.len().min(RING_BYTES as usize - at);
        let rest = out.len() - first;
        // SAFETY: within the ring. A robbed flusher may copy bytes that a writer overwrites; it checks its lock afterwards and
        // throws the copy away.
        unsafe {
            let ring = self.mapping.base().add(layout::RING);
            std::ptr::copy_nonoverlapping(ring.add(at), out.as_mut_ptr(), first);
            std::ptr::copy_nonoverlapping(ring, out.as_mut_ptr().add(first), rest);
        }
    }

    /// The place where a checkpoint keeps the meta page that it is about to write.
    pub fn checkpoint_image(&self) -> *mut u8 {
        self.mapping.base().wrapping_add(layout::CHECKPOINT_IMAGE)
    }

    /// End of the used part, computed from the tables.
    fn used_bytes(&self) -> u64 {
        let control = self.control();
        [
            &control.used_bits,
            &control.page_states,
            &control.fresh,
            &control.held,
            &control.taken,
            &control.checkpoint_made,
            &control.claim_made,
            &control.used_groups,
            &control.snapshots,
        ]
        .iter()
        .map(|table| table.end_offset())
        .max()
        .unwrap_or(0)
        .max(layout::GROWN as u64)
    }

    /// Makes `table` hold at least `bytes`. Needs the writer lock.
    pub fn grow(&self, table: &SegmentTable, bytes: u64) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let (last, _) = segment::locate(bytes - 1);
        if last >= segment::MAX_CHUNKS {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        for index in 0..=last {
            if table.chunk_offset(index) == 0 {
                let offset = self.used_bytes();
                let end = offset + segment::chunk_bytes(index);
                if end > self.mapping.reserved() {
                    return Err(io::Error::from_raw_os_error(libc::ENOMEM));
                }
                if let Some(file) = &self.file
                    && file.len()? < end
                {
                    file.allocate(offset, end - offset)?;
                }
                self.known_bytes.fetch_max(end, Relaxed);
                // What a dead writer left there is not zero.
                // SAFETY: allocated just now, and named by no table yet.
                unsafe {
                    let at = self.mapping.base().add(offset as usize);
                    std::ptr::write_bytes(at, 0, segment::chunk_bytes(index) as usize);
                }
                table.publish_chunk(index, offset);
            }
        }
        Ok(())
    }

    /// Address of the byte at `position` of `table`; `None` if the table does not reach so far (or is damaged).
    #[inline]
    pub fn element(&self, table: &SegmentTable, position: u64) -> Option<*mut u8> {
        let (index, within) = segment::locate(position);
        if index >= segment::MAX_CHUNKS {
            return None;
        }
        let offset = table.chunk_offset(index);
        if offset == 0 {
            return None;
        }
        let end = offset.checked_add(segment::chunk_bytes(index))?;
        if end > self.known_bytes.load(Relaxed) && !self.backed(end) {
            return None;
        }
        Some(self.mapping.base().wrapping_add((offset + within) as usize))
    }

    #[cold]
    fn backed(&self, end: u64) -> bool {
        let len = match &self.file {
            Some(file) => file.len().unwrap_or(0),
            None => return false,
        };
        self.known_bytes.fetch_max(len.min(self.mapping.reserved()), Relaxed);
        end <= self.known_bytes.load(Relaxed)
    }

    /// The word of 8 bytes at `position` of `table`.
    #[inline]
    pub fn word(&self, table: &SegmentTable, position: u64) -> Option<&AtomicU64> {
        debug_assert!(position.is_multiple_of(8));
        let at = self.element(table, position)?;
        // SAFETY: backed and aligned; atomics may be shared.
        Some(unsafe { &*at.cast::<AtomicU64>() })
    }

    /// Address of the byte at `offset` of the file, for the stores of a note.
    pub fn place(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= self.known_bytes.load(Relaxed) || self.backed(end))
            .then(|| self.mapping.base().wrapping_add(offset as usize))
    }

    /// File offset of a word inside the mapping.
    pub fn offset_of<T>(&self, word: &T) -> u64 {
        let offset = (word as *const T as usize).wrapping_sub(self.mapping.base() as usize) as u64;
        assert!(offset < self.mapping.reserved());
        offset
    }
}
