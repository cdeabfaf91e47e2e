//! The shared-memory file, byte for byte (version 1). docs/format.md refers to the types here.
//!
//! | offset | what |
//! | --- | --- |
//! | 0 | [`ShmHeader`], written once before the file gets its name |
//! | 4096 | [`Control`] |
//! | `PROCESSES` | process table: [`ProcessEntry`] x [`MAX_PROCESSES`] |
//! | `PINS` | pin table: `PinSlot` x [`MAX_PINS`] |
//! | `STRIPES` | key locks: [`Stripe`] x [`KEY_STRIPES`] |
//! | `RING` | log ring, [`RING_BYTES`]; LSN L lies at L mod `RING_BYTES` |
//! | `CHECKPOINT_IMAGE` | image of the meta page that the running checkpoint writes, 64 KiB |
//! | `GROWN` | chunks of the growable arrays |
//!
//! A file of zeros with a header is a valid initial state for everything but the words that recovery sets.

use std::mem::size_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire};

use super::awaited::Awaited;
use super::lock::RobustLock;
use super::note::Note;
use super::pin::PinSlot;
use super::segment::SegmentTable;
use super::stripe::Stripe;
use crate::limits::{KEY_STRIPES, MAX_PAGE_SIZE, MAX_PINS, MAX_PROCESSES, RING_BYTES};

/// First bytes of a shared-memory file.
pub const MAGIC: [u8; 8] = *b"ntdbshm\n";
/// Version of this layout.
pub const VERSION: u32 = 1;

/// Identity of a shared-memory file; covered by a checksum.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmHeader {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: u32,
    /// Zero.
    pub reserved: u32,
    /// Random id of this incarnation; the data file's meta page records it.
    pub shm_id: u64,
    /// The database's UUID.
    pub uuid: [u8; 16],
    /// The boot during which this file is valid.
    pub boot_id: [u8; 16],
    /// Device of the data file.
    pub device: u64,
    /// Inode of the data file.
    pub inode: u64,
    /// Salt of the log records in the ring (see `log::record`), at creation.
    pub salt: u64,
    /// LSN at creation.
    pub start_lsn: u64,
    /// Sequence of the meta page that this incarnation started from.
    pub meta_sequence: u64,
}

/// Bytes of the header that the checksum covers; the CRC-32C follows them.
pub const HEADER_BYTES: usize = size_of::<ShmHeader>();

impl ShmHeader {
    /// The header as bytes, followed by their CRC-32C.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES + 4] {
        let mut bytes = [0u8; HEADER_BYTES + 4];
        // SAFETY: the struct is `repr(C)` without padding (its size is the sum of its fields), so all its bytes are initialised.
        let fields =
            unsafe { std::slice::from_raw_parts((&raw const self).cast::<u8>(), HEADER_BYTES) };
        bytes[..HEADER_BYTES].copy_from_slice(fields);
        let crc = crc32c::crc32c(fields);
        bytes[HEADER_BYTES..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads [`ShmHeader::to_bytes`]; `None` if they are damaged or something else.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES + 4]) -> Option<ShmHeader> {
        let (fields, crc) = bytes.split_at(HEADER_BYTES);
        if crc32c::crc32c(fields).to_le_bytes() != *crc {
            return None;
        }
        // SAFETY: as many bytes as the struct has, and every bit pattern is valid.
        let header = unsafe { fields.as_ptr().cast::<ShmHeader>().read_unaligned() };
        (header.magic == MAGIC).then_some(header)
    }
}

/// Words that readers load at every operation. They change rarely.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ReaderWords {
    /// The root word (see `index::locate`).
    pub root: AtomicU64,
    /// Length of the data file in pages. It never shrinks while processes are attached, apart from
    /// truncation past every pin.
    pub file_pages: AtomicU32,
    /// errno of the failed sync that poisoned the database, or 0.
    pub poison: AtomicU32,
    /// 1 if somebody sleeps until something changes (see `awaited`). Here because writers look at it after every change, and
    /// at this line before it.
    pub awaited: AtomicU32,
    /// The reserve in percent. Here because who puts a record has this line at hand.
    pub reserve_percent: AtomicU32,
}

/// Words of pins that all readers load.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct PinWords {
    /// The reclaim era.
    pub era: AtomicU64,
    /// The pin table's high-water mark (see `pin`).
    pub mark: AtomicU64,
    /// 1 once there may be readers that pin without a fence.
    pub fenceless: AtomicU32,
}

/// Words that change with every write; under the writer lock.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct WriterWords {
    /// End of the redo log, including what is in the ring only.
    pub tail: AtomicU64,
    /// End of the last operation that is wholly carried out.
    pub applied: AtomicU64,
    /// Number of records.
    pub count: AtomicU64,
    /// The freeze epoch.
    pub epoch: AtomicU64,
    /// Salt of records from `salt_from` on.
    pub salt: AtomicU64,
    /// First LSN that bears `salt`; records before bear `salt_before`.
    pub salt_from: AtomicU64,
    /// See `salt_from`.
    pub salt_before: AtomicU64,
    /// Hint: number of free pages.
    pub free_pages: AtomicU64,
}

impl WriterWords {
    /// Salt of the record that ends at the tail; 0 if there is none. Certain only under the writer lock.
    pub fn last_salt(&self) -> u64 {
        let is_new = self.tail.load(Acquire) > self.salt_from.load(Acquire);
        if is_new { self.salt.load(Acquire) } else { self.salt_before.load(Acquire) }
    }
}

/// The redo log's positions and files.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct LogWords {
    /// Everything before this LSN has been written to a log file.
    pub written: AtomicU64,
    /// Everything before this LSN is on disk.
    pub synced: AtomicU64,
    /// Counts syncs that have ended; those who wait for one sleep on it.
    pub sync_ticket: AtomicU32,
    /// 0: no log file yet; 1: there is one.
    pub exists: AtomicU32,
    /// Counts up with every new log file; tells a process that its descriptor is old.
    pub incarnation: AtomicU32,
    /// Which of log0 and log1 is written.
    pub index: AtomicU32,
    /// 1 while the other log file still holds what recovery needs.
    pub other_needed: AtomicU32,
    /// Slot + 1 of the process that has a transaction open, or 0. Stored by steps; looked at by every writer.
    pub claim: AtomicU32,
    /// First LSN of the log file being written.
    pub start: AtomicU64,
    /// Salt of the log file being written.
    pub salt: AtomicU64,
    /// End of the part of the log file that is allocated, as an LSN.
    pub room: AtomicU64,
    /// LSN at which writing switches to the other file, or `u64::MAX`.
    pub switch_at: AtomicU64,
    /// Salt of the other file after the switch.
    pub switch_salt: AtomicU64,
    /// Index of the other file.
    pub switch_index: AtomicU32,
    /// Incarnation after the switch.
    pub switch_incarnation: AtomicU32,
    /// LSN of the first chunk of the large operation under way, plus one; 0: none.
    pub claim_first: AtomicU64,
    /// Where the sync under way reaches to, or `u64::MAX` while that is being decided: see `log::sync`.
    pub covering: AtomicU64,
    /// Counts those who wait for a sync, or lead one.
    pub arrivals: AtomicU32,
    /// `arrivals` when the last sync ended.
    pub arrivals_before: AtomicU32,
    /// How many the last sync served.
    pub expected: AtomicU32,
    /// How many leaders are not to wait for company.
    pub lonely: AtomicU32,
    /// What the last sync took, in nanoseconds.
    pub sync_ns: AtomicU32,
    /// Key locks that all processes hold or are about to take; too many after a death.
    pub keys_held: AtomicU32,
}

/// Phases of a checkpoint.
pub mod phase {
    /// None runs.
    pub const IDLE: u32 = 0;
    /// Frozen; being walked and written. Forgotten if its owner dies.
    pub const WRITING: u32 = 1;
    /// Its pages are on disk; the meta page is being written. Completed by whoever finds its owner dead.
    pub const PUBLISHING: u32 = 2;
}

/// The durable checkpoint, and the one that runs.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CheckpointWords {
    /// One of [`phase`].
    pub phase: AtomicU32,
    /// Which meta page (0 or 1) is known durable.
    pub durable_meta: AtomicU32,
    /// Sequence of the durable meta page.
    pub durable_sequence: AtomicU64,
    /// Epoch of the durable checkpoint.
    pub durable_epoch: AtomicU64,
    /// Root word of the durable checkpoint.
    pub durable_root: AtomicU64,
    /// LSN from which recovery replays.
    pub durable_lsn: AtomicU64,
    /// File pages at the durable checkpoint.
    pub durable_file_pages: AtomicU32,
    /// Checkpoints completed since the shm was made; a futex for those who wait for one.
    pub completed: AtomicU32,
    /// Epoch of the running checkpoint (if phase != IDLE).
    pub running_epoch: AtomicU64,
    /// Its root word.
    pub running_root: AtomicU64,
    /// Its LSN.
    pub running_lsn: AtomicU64,
    /// Its record count.
    pub running_count: AtomicU64,
    /// Pages below this number are not re-used: a private reader of an older state holds its byte.
    pub no_reuse_below: AtomicU32,
    /// 1 if the last users died: the file may be longer than it need be, although nothing has changed since.
    pub after_crash: AtomicU32,
    /// File pages from which on writers wait for the running checkpoint a moment (see `space::patience`).
    pub growth_limit: AtomicU32,
    /// Epoch of a checkpoint for which nobody waits any more.
    pub unwaited_epoch: AtomicU64,
    /// When the running checkpoint began, in nanoseconds of the monotonic clock.
    pub began_ns: AtomicU64,
}

/// Free space, apart from the bits themselves. Hints, but for the last ones; under the writer lock.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SpaceWords {
    /// Where the search for free bits goes on.
    pub cursor: AtomicU32,
    /// Number of page numbers in `recent`.
    pub recent_len: AtomicU32,
    /// Retirements since the era advanced.
    pub retirements: AtomicU32,
    /// If not 0: pages from here on are taken only if there are none before.
    pub avoid_from: AtomicU32,
    /// Bits 0 to 31: the file is known to be allocated up to this page, if that is beyond `file_pages`. Bits 32 to 63: how often
    /// the file has been cut.
    pub allocated: AtomicU64,
    /// Changes whenever a hold on an epoch ends.
    pub holds_version: AtomicU64,
    /// `holds_version` when the held list was last begun to be filtered.
    pub scanned_version: AtomicU64,
    /// Pages freed last, re-used first. Hints: a page counts only if its bit says that it is free.
    pub recent: [AtomicU32; RECENT],
    /// Entries of the held list that an unfinished filtering has read (upper half) and kept (lower half). No hint: those
    /// between are not in the list.
    pub held_gap: AtomicU64,
    /// Root word of a tree that was cleared and is being given up, or 0. These three are no hints.
    pub cleared_root: AtomicU64,
    /// The hash from which on it is still to be given up.
    pub cleared_next: AtomicU64,
    /// The epoch in which it was cleared.
    pub cleared_epoch: AtomicU64,
}
/// Capacity of the list of recently freed pages.
pub const RECENT: usize = 1024;

/// What is known of all registered snapshots: see `space::snapshots`.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SnapshotWords {
    /// Changes before every registration and after it, and after every release.
    pub version: AtomicU64,
    /// Hint: no entry before this one is free.
    pub first_free: AtomicU64,
    /// Hint: the entry that was registered last.
    pub last: AtomicU64,
    /// Hint: the entry whose owner was asked for last whether it lives.
    pub asked: AtomicU64,
}

/// A registered snapshot.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SnapshotEntry {
    /// Slot + 1 of its process (16 bits), and a number that never comes again; 0: free. The other words mean nothing then.
    pub owner: AtomicU64,
    /// The epoch that it holds.
    pub epoch: AtomicU64,
    /// Its root word.
    pub root: AtomicU64,
    /// The first change that is not in it.
    pub lsn: AtomicU64,
    /// Milliseconds since the Unix epoch when it was registered.
    pub since: AtomicU64,
}

/// Statistics that `stat` shows.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CounterWords {
    /// Buckets split.
    pub splits: AtomicU64,
    /// Buckets compacted.
    pub compactions: AtomicU64,
    /// Pages copied because they were frozen.
    pub copies: AtomicU64,
    /// Dead processes repaired.
    pub repairs: AtomicU64,
    /// Marks given to transactions and savepoints.
    pub marks: AtomicU64,
    /// Pages that checkpoints have found new, apart from those of the map.
    pub checkpoint_pages: AtomicU64,
}

/// For those who follow the changes.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ChangeWords {
    /// The ring holds what was logged from here on; what is older is in files or nowhere.
    pub ring_from: AtomicU64,
    /// *applied* when sleepers were woken last (see `awaited`).
    pub announced: AtomicU64,
    /// Counts how often sleepers were woken; they sleep on it.
    pub ticket: AtomicU32,
    /// So many KiB of past log are to be kept.
    pub keep_log_kib: AtomicU32,
}

/// Updates that did not just go into their page, by their [`Way`](super::ways::Way).
#[repr(C, align(64))]
#[derive(Debug)]
pub struct UpdateWords(pub [AtomicU64; super::ways::WAYS]);

impl ChangeWords {
    /// So many bytes of past log are to be kept.
    pub fn keep_log_bytes(&self) -> u64 {
        self.keep_log_kib.load(Acquire) as u64 * 1024
    }
}

/// Everything that processes share, apart from the tables.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Control {
    /// For readers.
    pub readers: ReaderWords,
    /// For pins.
    pub pins: PinWords,
    /// The writer lock.
    pub writer_lock: RobustLock,
    /// Under it.
    pub writer: WriterWords,
    /// The note.
    pub note: Note,
    /// The log.
    pub log: LogWords,
    /// Held while the ring is written to the log file.
    pub flush_lock: RobustLock,
    /// Held (as a courtesy) by the one who syncs the log.
    pub sync_lock: RobustLock,
    /// Held by a running checkpoint.
    pub checkpoint_lock: RobustLock,
    /// Held by a large operation (and by transactions).
    pub claim_lock: RobustLock,
    /// The checkpoints.
    pub checkpoint: CheckpointWords,
    /// Free space.
    pub space: SpaceWords,
    /// Statistics.
    pub counters: CounterWords,
    /// Bit per page: not free.
    pub used_bits: SegmentTable,
    /// Byte per page: whether it must still be verified, and for buckets what readers need to know (see `core::state`).
    pub page_states: SegmentTable,
    /// Queue of replaced pages that wait for pins: `RetiredRun` each.
    pub fresh: SegmentTable,
    /// Replaced pages that wait for a checkpoint or snapshot.
    pub held: SegmentTable,
    /// Page runs taken by the step under way: `Run` each.
    pub taken: SegmentTable,
    /// Page runs made by the running checkpoint for its map: `Run` each.
    pub checkpoint_made: SegmentTable,
    /// Page runs made by the large operation under way: `Run` each.
    pub claim_made: SegmentTable,
    /// Held while the first log file is made and announced.
    pub log_start_lock: RobustLock,
    /// Word per 1024 pages that sums up what is free among them (see `space::bits`). Hints.
    pub used_groups: SegmentTable,
    /// What is known of all snapshots.
    pub snapshot: SnapshotWords,
    /// Registered snapshots: [`SnapshotEntry`] each.
    pub snapshots: SegmentTable,
    /// For those who follow the changes.
    pub changes: ChangeWords,
    /// Statistics of updates.
    pub updates: UpdateWords,
}

impl Control {
    /// What those sleep on who wait for changes.
    #[inline(always)]
    pub fn awaited(&self) -> Awaited<'_> {
        Awaited {
            applied: &self.writer.applied,
            awaited: &self.readers.awaited,
            ticket: &self.changes.ticket,
            announced: &self.changes.announced,
        }
    }
}

/// One attached process.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ProcessEntry {
    /// 0 free, 1 attached, 2 being taken by a reader.
    pub state: AtomicU32,
    /// Process id, as it sees itself; for messages only.
    pub pid: AtomicU32,
    /// Seconds since the Unix epoch when it attached.
    pub since: AtomicU64,
    /// Incarnation of the log file that it may be writing, plus one; 0 none. See `log::flush`.
    pub flushing: AtomicU32,
    /// Key locks that it holds or is about to take.
    pub keys_held: AtomicU32,
}

/// Offset of [`Control`].
pub const CONTROL: usize = 4096;
/// Offset of the process table.
pub const PROCESSES: usize = align_up(CONTROL + size_of::<Control>(), 4096);
/// Offset of the pin table.
pub const PINS: usize = align_up(PROCESSES + MAX_PROCESSES * size_of::<ProcessEntry>(), 4096);
/// Offset of the key locks.
pub const STRIPES: usize = align_up(PINS + MAX_PINS * size_of::<PinSlot>(), 4096);
/// Offset of the ring.
pub const RING: usize = align_up(STRIPES + KEY_STRIPES * size_of::<Stripe>(), 65536);
/// Offset of the checkpoint's meta image.
pub const CHECKPOINT_IMAGE: usize = RING + RING_BYTES as usize;
/// Offset of the grown part.
pub const GROWN: usize = CHECKPOINT_IMAGE + MAX_PAGE_SIZE as usize;

const fn align_up(value: usize, to: usize) -> usize {
    value.div_ceil(to) * to
}

const _: () = {
    assert!(HEADER_BYTES == 96 && HEADER_BYTES + 4 <= CONTROL);
    assert!(size_of::<ProcessEntry>() == 64);
    assert!(size_of::<PinSlot>() == 64);
    assert!(size_of::<Stripe>() == 16);
    assert!(size_of::<SnapshotEntry>() == 64);
    assert!(RING_BYTES.is_power_of_two());
};
