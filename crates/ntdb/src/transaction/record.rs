//! The log record that an operation takes along, encoded before the writer lock is taken.

use crate::log::record::{self, Op, ShortPut};
use crate::types::Lsn;

/// An encoded record that lacks only its place in the log.
#[derive(Debug, Default)]
pub struct LogRecord {
    bytes: Vec<u8>,
    crc: u32,
}

impl LogRecord {
    /// Encodes `op`, re-using the memory.
    pub fn encode(&mut self, op: &Op<'_>) {
        self.bytes.resize(record::encoded_len(op), 0);
        self.crc = record::encode(op, &mut self.bytes);
    }

    /// Memory kept, in bytes.
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Length in bytes, header included.
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// As those who only give it its place see it.
    #[inline]
    pub fn unplaced(&mut self) -> Unplaced<'_> {
        Unplaced { bytes: &mut self.bytes, crc: self.crc }
    }
}

/// An encoded record that lacks only its place in the log, wherever it lies.
#[derive(Debug)]
pub struct Unplaced<'a> {
    bytes: &'a mut [u8],
    crc: u32,
}

impl<'a> Unplaced<'a> {
    /// The record of the put of a short key and a short value, in memory that is at hand.
    #[inline(always)]
    pub fn short_put(key: &[u8], value: &[u8], memory: &'a mut ShortPut) -> Unplaced<'a> {
        let (bytes, crc) = record::encode_short_put(key, value, memory);
        Unplaced { bytes, crc }
    }

    /// Length in bytes, header included.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Makes the record valid at `lsn`; its bytes.
    #[inline(always)]
    pub fn seal(&mut self, salt: u64, lsn: Lsn) -> &[u8] {
        let check = record::seal(salt, lsn, self.bytes.len() as u32, self.crc);
        record::set_check(self.bytes, check);
        self.bytes
    }
}
