//! Every limit of the engine in one place, with its reason.

/// Smallest page: the smallest unit that the memory manager maps.
pub const MIN_PAGE_SIZE: u32 = 4096;
/// Largest page: offsets inside a page are 16 bits.
pub const MAX_PAGE_SIZE: u32 = 65536;
/// Page size of a new database unless told otherwise.
pub const DEFAULT_PAGE_SIZE: u32 = 4096;

/// Whether `bytes` may be a page size.
pub const fn valid_page_size(bytes: u32) -> bool {
    bytes.is_power_of_two() && bytes >= MIN_PAGE_SIZE && bytes <= MAX_PAGE_SIZE
}

/// Largest reserve, in percent of a page.
pub const RESERVE_PERCENT_MAX: u32 = 90;

/// Processes attached at once: one lock byte and one entry of the process table each.
pub const MAX_PROCESSES: usize = 1024;
/// Slots of the pin table: two for each process, a cache line of its own for each of the first 2,048 threads that read;
/// more threads share their process's two (see `shm::pin`).
pub const MAX_PINS: usize = 4096;
/// Snapshots registered at once. Each is a few words; those who replace pages look through them when one comes or goes.
pub const MAX_SNAPSHOTS: usize = 16_384;
/// Stripes of the key locks: enough that unrelated keys rarely meet.
pub const KEY_STRIPES: usize = 4096;
/// Bytes of the ring that redo records wait in: some thousands of small operations.
pub const RING_BYTES: u64 = 1 << 20;
/// Longest single redo record; longer operations are logged in chunks.
pub const MAX_RECORD_BYTES: u64 = RING_BYTES / 4;
/// Most bytes of a value or of a transaction in one chunk: it fits a record whatever its head, and leaves room for others.
pub const MAX_CHUNK_BYTES: u64 = MAX_RECORD_BYTES / 2;
/// A checkpoint starts at this size of the redo log, or half the data, whichever is larger.
pub const CHECKPOINT_LOG_BYTES_MIN: u64 = 64 << 20;
/// Longest key: a log record holds it whole, with room for a value.
pub const MAX_KEY_BYTES: u64 = MAX_RECORD_BYTES / 2;
/// Keys shorter than this have a length of one byte in their record of a bucket.
pub const SHORT_KEY: usize = 32;
/// Values shorter than this have a length of one byte in their record of a bucket.
pub const SHORT_VALUE: usize = 0x80;
/// Longest value, 4 TiB: an extent is one run of pages, and all 2^32 of the smallest pages are 16 TiB.
pub const MAX_VALUE_BYTES: u64 = 1 << 42;
/// Addresses to reserve for the data file unless told otherwise: 256 GiB of 128 TiB.
pub const DEFAULT_ADDRESS_SPACE: u64 = 256 << 30;
/// Newest file format that this library reads, and the one it writes.
pub const FORMAT_VERSION: u32 = 1;
