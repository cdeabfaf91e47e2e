//! The numbers of the engine as types: page numbers, epochs, eras, log sequence numbers, slots.

/// Number of a page of the data file; byte offset = number x page size. Page 0 is the header, so 0
/// also stands for "none" where a reference is optional.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct PageNo(pub u32);

impl PageNo {
    /// No page.
    pub const NONE: PageNo = PageNo(0);
    /// Whether this stands for "none".
    #[inline]
    pub fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// A run of consecutive pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Run {
    /// The first page.
    pub first: PageNo,
    /// How many pages.
    pub len: u32,
}

/// Freeze epoch: increments at every freeze (checkpoint or snapshot). A page records the epoch in
/// which it was made; pages of an older epoch than the current one are frozen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct Epoch(pub u64);

/// Reclaim era: advances as pages are retired; pins record it. Unrelated to [`Epoch`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct Era(pub u64);

/// Log sequence number: bytes of redo log written since the database was created.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct Lsn(pub u64);

/// Index of an attached process in the process table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct SlotId(pub u16);
