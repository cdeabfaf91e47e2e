//! The 64-byte header that bucket, directory, root-array and map pages begin with.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 4 | checksum: CRC-32C of the run from byte 4 on; valid once a checkpoint has written the page |
//! | 4 | 1 | kind |
//! | 5 | 1 | depth: leading hash bits that all records below share |
//! | 6 | 2 | bucket: tag groups; directory: index bits |
//! | 8 | 4 | the page's own number |
//! | 12 | 4 | bucket: next page of an overflow chain, or 0 |
//! | 16 | 8 | epoch in which the page was made |
//! | 24 | 8 | prefix: the shared leading hash bits, left-aligned |
//! | 32 | 4 | bucket: offset at which free space begins |
//! | 36 | 4 | bucket: bytes of dead records (hint) |
//! | 40 | 4 | bucket: slots that are not empty (hint); root array: directory pages below it |
//! | 44 | 4 | pages in the run (1 but for root arrays) |
//! | 48 | 8 | mark of the transaction that made the page; means nothing afterwards |
//! | 56 | 8 | zero |
//!
//! Words that change after publication (`next`, `free`, the hints) are written under the writer lock and never
//! decide what a reader sees.

use std::mem::size_of;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::types::{Epoch, PageNo};

/// Bytes of [`PageHead`].
pub const HEAD_BYTES: usize = 64;

/// What a page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Records.
    Bucket = 1,
    /// Page numbers of buckets.
    Directory = 2,
    /// References to directory pages.
    RootArray = 3,
    /// Free-space bits.
    Map = 4,
    /// Page numbers of map pages.
    MapIndex = 5,
}

/// See the module's description.
#[repr(C)]
#[derive(Debug)]
pub struct PageHead {
    pub checksum: AtomicU32,
    pub kind: AtomicU8,
    pub depth: AtomicU8,
    pub groups: AtomicU16,
    pub number: AtomicU32,
    pub next: AtomicU32,
    pub epoch: AtomicU64,
    pub prefix: AtomicU64,
    pub free: AtomicU32,
    pub dead: AtomicU32,
    pub occupied: AtomicU32,
    pub run_pages: AtomicU32,
    pub mark: AtomicU64,
    pub reserved: AtomicU64,
}

const _: () = assert!(size_of::<PageHead>() == HEAD_BYTES);

impl PageHead {
    /// The header of the page at `page`.
    ///
    /// # Safety
    /// `page` points to at least [`HEAD_BYTES`] mapped bytes, aligned to 8, that stay mapped for `'a`. (All fields are
    /// atomics, so others may write them meanwhile.)
    #[inline]
    pub unsafe fn at<'a>(page: *const u8) -> &'a PageHead {
        // SAFETY: the caller's promise; every bit pattern is a valid value of every field.
        unsafe { &*page.cast::<PageHead>() }
    }

    /// Epoch in which the page was made.
    #[inline]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Relaxed))
    }

    /// The next page of an overflow chain.
    #[inline]
    pub fn next(&self) -> PageNo {
        PageNo(self.next.load(Relaxed))
    }

    /// Notes that a record of `len` bytes is dead. The number is a hint, and in a damaged page any number.
    #[inline]
    pub fn count_dead(&self, len: usize) {
        self.dead.store(self.dead.load(Relaxed).saturating_add(len as u32), Relaxed);
    }

    /// Notes that a slot is not empty any more. A hint, as above.
    #[inline]
    pub fn count_occupied(&self) {
        self.occupied.store(self.occupied.load(Relaxed).saturating_add(1), Relaxed);
    }

    /// Fills in a new page's header.
    pub fn init(&self, kind: Kind, number: PageNo, epoch: Epoch, depth: u8, prefix: u64) {
        self.checksum.store(0, Relaxed);
        self.kind.store(kind as u8, Relaxed);
        self.depth.store(depth, Relaxed);
        self.groups.store(0, Relaxed);
        self.number.store(number.0, Relaxed);
        self.next.store(0, Relaxed);
        self.epoch.store(epoch.0, Relaxed);
        self.prefix.store(prefix, Relaxed);
        self.free.store(0, Relaxed);
        self.dead.store(0, Relaxed);
        self.occupied.store(0, Relaxed);
        self.run_pages.store(1, Relaxed);
        self.mark.store(0, Relaxed);
        self.reserved.store(0, Relaxed);
    }
}

/// The leading `depth` bits of `hash`, left-aligned.
#[inline]
pub fn prefix_of(hash: u64, depth: u8) -> u64 {
    match depth {
        0 => 0,
        1..=63 => hash & !(u64::MAX >> depth),
        _ => hash,
    }
}
