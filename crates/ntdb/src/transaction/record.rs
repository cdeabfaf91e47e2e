//! The log record that an operation takes along, encoded before the writer lock is taken.

use crate::log::record::{self, Op};
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

    /// Makes the record valid at `lsn`.
    #[inline]
    pub fn seal(&mut self, salt: u64, lsn: Lsn) {
        let check = record::seal(salt, lsn, self.bytes.len() as u32, self.crc);
        record::set_check(&mut self.bytes, check);
    }

    /// The sealed record.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}
