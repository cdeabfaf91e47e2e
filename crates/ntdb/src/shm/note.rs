//! The note: a redo list of the step that the holder of the writer lock is making.
//!
//! Order of words, all written by the holder of the writer lock:
//! 1. Pages taken are listed in the array *taken* (entry, then its length), and only then marked used in
//!    the allocation bits.
//! 2. Page runs to be given up are written into the *fresh* queue behind its end, where nobody looks.
//! 3. The note's fields are written, then `state` = armed (Release).
//! 4. A data step appends its record to the log ring; the store of the ring's tail is the commit.
//! 5. The stores of the note are carried out, eras are filled into the queue entries, the queue's end, the record
//!    count and the applied LSN are stored.
//! 6. *taken* is emptied, then `state` = idle.
//!
//! Whoever holds the lock in a dead owner's place looks here ([`crate::transaction::repair`]): armed and, for a data
//! step, appended means: do 5 and 6 again; everything is absolute, so once more is harmless. Otherwise the pages in
//! *taken* are marked free again, and nothing else has happened. Emptying *taken* before disarming matters: the other
//! order would free pages that are linked.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

/// Most stores in one step: the end of a checkpoint needs the most.
pub const MAX_STORES: usize = 16;

/// No LSN: a structure step, which is not logged.
pub const NO_LSN: u64 = u64::MAX;

/// Note states.
pub mod state {
    /// Nothing is under way, apart from pages in *taken*.
    pub const IDLE: u32 = 0;
    /// The stores are to be done (if appended, for a data step).
    pub const ARMED: u32 = 2;
    /// The prefix of the fresh queue is being freed or moved to the held list.
    pub const RECLAIM: u32 = 3;
    /// The held list is being filtered.
    pub const SCAN_HELD: u32 = 4;
    /// The fresh queue is being moved to its front.
    pub const COMPACT_FRESH: u32 = 5;
}

/// One store: `repeat` words of `width` bytes from `place` on get `value`.
#[repr(C)]
#[derive(Debug)]
pub struct NoteStore {
    /// Byte offset in the data file, or, with the top bit set, in the shared-memory file.
    pub place: AtomicU64,
    /// The value.
    pub value: AtomicU64,
    /// How many consecutive words.
    pub repeat: AtomicU32,
    /// Width of a word in bytes: 1, 2, 4 or 8.
    pub width: AtomicU32,
}

impl NoteStore {
    /// Notes `repeat` words of `width` bytes from `place` on, with `value`.
    #[inline(always)]
    pub fn set(&self, place: u64, width: u32, repeat: u32, value: u64) {
        self.place.store(place, Ordering::Relaxed);
        self.value.store(value, Ordering::Relaxed);
        self.repeat.store(repeat, Ordering::Relaxed);
        self.width.store(width, Ordering::Relaxed);
    }
}

/// See the module's description.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Note {
    /// One of [`state`].
    pub state: AtomicU32,
    /// Number of stores.
    pub stores_len: AtomicU32,
    /// LSN of the log record, or [`NO_LSN`].
    pub lsn: AtomicU64,
    /// End of the log record.
    pub lsn_end: AtomicU64,
    /// Record count after the step.
    pub count_after: AtomicU64,
    /// End of the fresh queue before and after the step.
    pub fresh_before: AtomicU64,
    /// See `fresh_before`.
    pub fresh_after: AtomicU64,
    /// Updates whose new record went into the page that has the old one. No part of the note: counted here, since every put writes to
    /// this line anyway, and another line would have to move from writer to writer.
    pub stayed: AtomicU64,
    /// Zero.
    pub reserved: AtomicU64,
    /// The stores.
    pub stores: [NoteStore; MAX_STORES],
    /// Operands of the reclaim steps: see `space::retire`.
    pub operand: [AtomicU64; 4],
}

impl Note {
    /// The present state.
    #[inline]
    pub fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }

    /// Enters `state`; everything written to the note before is visible to whoever sees it.
    #[inline]
    pub fn set_state(&self, state: u32) {
        self.state.store(state, Ordering::Release);
        // What is done in this state must not be moved before it: a kill in between would find it done and not noted.
        compiler_fence(Ordering::SeqCst);
    }
}
