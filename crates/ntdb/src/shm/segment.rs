//! Growable arrays in the shared-memory file.
//!
//! A segmented array is a table of chunks, each twice the size of the one before, so that an
//! element never moves and growing never copies. Chunks come from the end of the shared-memory file
//! and are never given back while it exists (geometric growth bounds the waste to half).
//!
//! Written under the writer lock. A chunk becomes part of the array by the single store of its
//! offset; a writer that dies after extending the file and before that store leaves some unused bytes at
//! the end of the file, which the next extension takes over, because the end of the used part is
//! always computed from the tables ([`crate::shm::Shm::used_bytes`]) and never stored.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the first chunk.
pub const FIRST_CHUNK_BYTES: u64 = 4096;
/// Chunks per table: 4 KiB x (2^30 - 1), more than any file needs.
pub const MAX_CHUNKS: usize = 30;

/// The table of one growable array: file offsets of its chunks (0 = not there yet).
#[repr(C)]
#[derive(Debug)]
pub struct SegmentTable {
    chunk: [AtomicU64; MAX_CHUNKS],
    /// Number of elements in use, in the unit of the user of the array.
    pub len: AtomicU64,
    /// First element in use, for those arrays that are queues.
    pub head: AtomicU64,
}

/// Which chunk holds the byte at `position`, and where in it.
#[inline]
pub fn locate(position: u64) -> (usize, u64) {
    let index = chunk_of(position);
    let start = ((1u64 << index) - 1) * FIRST_CHUNK_BYTES;
    (index, position - start)
}

/// Which chunk holds the byte at `position`.
#[inline(always)]
pub fn chunk_of(position: u64) -> usize {
    (position / FIRST_CHUNK_BYTES + 1).ilog2() as usize
}

/// Size in bytes of chunk `index`.
#[inline]
pub fn chunk_bytes(index: usize) -> u64 {
    FIRST_CHUNK_BYTES << index
}

impl SegmentTable {
    /// File offset of chunk `index`, or 0.
    #[inline]
    pub fn chunk_offset(&self, index: usize) -> u64 {
        self.chunk[index].load(Ordering::Acquire)
    }

    /// Makes the bytes at `offset` chunk `index`.
    pub fn publish_chunk(&self, index: usize, offset: u64) {
        self.chunk[index].store(offset, Ordering::Release);
    }

    /// End of the last chunk in the file, or 0.
    pub fn end_offset(&self) -> u64 {
        (0..MAX_CHUNKS)
            .filter_map(|index| match self.chunk_offset(index) {
                0 => None,
                offset => Some(offset.saturating_add(chunk_bytes(index))),
            })
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_map_to_consecutive_chunks() {
        assert_eq!(locate(0), (0, 0));
        assert_eq!(locate(4095), (0, 4095));
        assert_eq!(locate(4096), (1, 0));
        assert_eq!(locate(4096 + 8191), (1, 8191));
        assert_eq!(locate(4096 + 8192), (2, 0));
        let mut expected = (0usize, 0u64);
        for position in (0..4096u64 * 1023).step_by(512) {
            assert_eq!(locate(position), expected, "{position}");
            expected.1 += 512;
            if expected.1 == chunk_bytes(expected.0) {
                expected = (expected.0 + 1, 0);
            }
        }
    }
}
