//! The operations of a transaction, as one stream of bytes.
//!
//! # Layout
//!
//! ```text
//! +--------+------+----------+--------+------+----------+---
//! | length | kind | operands | length | kind | operands |
//! +--------+------+----------+--------+------+----------+---
//!  varint   the body of the operation's own record
//! ```
//!
//! Only put, delete, append and clear stand in a stream ([`super::record`] has their bodies). A value
//! stands there whole, however long it is, also if it would need chunks by itself.
//!
//! A stream that fits a record is logged as one, [`Op::Transaction`]. A longer one is cut, anywhere,
//! into chunks, which are logged as the transaction goes; the commit then tells length and checksum
//! of the whole.
//!
//! # Undone parts
//!
//! What a transaction has rolled back to a savepoint may be in the log already. So its commit lists
//! the parts of the stream that did not happen: pairs of varints, first byte and length (at least 1),
//! in ascending order, without overlaps. Each begins where an operation begins; the next operation
//! begins where it ends, and nobody looks at what is between. So a part may end with an operation of
//! which only a beginning was written.
//!
//! # Reading
//!
//! [`StreamReader`] takes the stream as the pieces that it lies in, and yields operations as they are.
//! It copies what spans pieces and would fit a record; a longer one comes as a head and the parts of
//! its value. So its memory is bounded whatever the stream says, and whatever the bytes are, they are
//! operations or a [`StreamProblem`].

use super::record::{self, MAX_VARINT_BYTES, Op, RecordProblem};
use crate::limits::{MAX_KEY_BYTES, MAX_RECORD_BYTES};

/// Most bytes before the value in the body of an operation: kind, two varints, key.
const MAX_HEAD_BYTES: u64 = 1 + 2 * MAX_VARINT_BYTES as u64 + MAX_KEY_BYTES;

// A body that is too long to be copied is longer than its head, and so is what is copied of it.
const _: () = assert!(MAX_HEAD_BYTES < MAX_RECORD_BYTES);

/// Adds an operation to a stream.
pub fn append_op(out: &mut Vec<u8>, op: &Op<'_>) {
    debug_assert!(matches!(op, Op::Put { .. } | Op::Delete { .. } | Op::Append { .. } | Op::Clear));
    let len = record::body_len(op);
    out.reserve(record::varint_len(len as u64) + len);
    record::push_varint(out, len as u64);
    let at = out.len();
    out.resize(at + len, 0);
    record::encode_body(op, &mut out[at..]);
}

/// Adds a part of a stream, `len` bytes from byte `start` on, to the list of those that were undone. It lies behind those
/// that are in the list.
pub fn append_undone(out: &mut Vec<u8>, start: u64, len: u64) {
    debug_assert!(len > 0);
    record::push_varint(out, start);
    record::push_varint(out, len);
}

/// Why bytes are not the stream that they should be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StreamProblem {
    /// Chunks are missing, or there are too many.
    #[error("its chunks have {found} bytes, its commit names {total}")]
    Length {
        /// Bytes that the commit names.
        total: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The chunks are not what was written.
    #[error("the checksum of its chunks is wrong")]
    Checksum,
    /// The list of undone parts cannot be read, is not in order, or reaches beyond the end.
    #[error("the list of its undone parts makes no sense")]
    Undone,
    /// An undone part begins inside an operation.
    #[error("its undone part at byte {start} begins inside an operation")]
    UndoneInside {
        /// Where the part begins.
        start: u64,
    },
    /// An operation has no valid length, or one beyond the end of the stream.
    #[error("its operation at byte {at} does not fit it")]
    CutOff {
        /// Where the operation begins.
        at: u64,
    },
    /// An operation makes no sense.
    #[error("its operation at byte {at}: {problem}")]
    Operation {
        /// Where the operation begins.
        at: u64,
        /// What is wrong with it.
        problem: RecordProblem,
    },
    /// A key that no record can have.
    #[error("its operation at byte {at} has a key of more than {MAX_KEY_BYTES} bytes")]
    KeyTooLong {
        /// Where the operation begins.
        at: u64,
    },
    /// A record that does not belong into a transaction.
    #[error("its operation at byte {at} is none that a transaction can contain")]
    Misplaced {
        /// Where it begins.
        at: u64,
    },
}

/// An operation of a stream.
#[derive(Clone, Debug)]
pub enum StreamOp<'a> {
    /// All of it.
    Whole(Op<'a>),
    /// A put, or an append, that is too long to be put together.
    Long {
        /// The operation with nothing as the value or the bytes to add.
        head: Op<'a>,
        /// The value or the bytes.
        value: Parts<'a>,
    },
}

/// Consecutive bytes of a stream, as the pieces that they lie in.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    pieces: &'a [&'a [u8]],
    /// Where in the first of these pieces they begin.
    offset: usize,
    left: u64,
}

impl<'a> Parts<'a> {
    /// Bytes that are left.
    pub fn len(&self) -> u64 {
        self.left
    }

    /// The bytes without the first `bytes` of them, and no more than there are.
    fn skip(mut self, mut bytes: u64) -> Parts<'a> {
        self.left = self.left.saturating_sub(bytes);
        while let Some((first, rest)) = self.pieces.split_first() {
            let here = (first.len() - self.offset) as u64;
            if bytes < here {
                self.offset += bytes as usize;
                break;
            }
            bytes -= here;
            (self.pieces, self.offset) = (rest, 0);
        }
        self
    }

    /// The first `bytes` bytes, and no more than there are.
    fn first(&self, bytes: u64) -> Parts<'a> {
        Parts { left: self.left.min(bytes), ..self.clone() }
    }

    /// The bytes in one piece, if they lie in one.
    fn contiguous(&self) -> Option<&'a [u8]> {
        if self.left == 0 {
            return Some(&[]);
        }
        self.pieces.first()?.get(self.offset..)?.get(..usize::try_from(self.left).ok()?)
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        while self.left > 0 {
            let (first, rest) = self.pieces.split_first()?;
            let part = &first[self.offset..];
            (self.pieces, self.offset) = (rest, 0);
            if !part.is_empty() {
                let len = (part.len() as u64).min(self.left);
                self.left -= len;
                return Some(&part[..len as usize]);
            }
        }
        None
    }
}

/// The undone parts of a stream that are still to come, as (start, length).
#[derive(Clone, Debug)]
struct Undone<'a> {
    rest: &'a [u8],
}

impl<'a> Undone<'a> {
    /// A list that has been looked through for a stream of `total` bytes.
    fn checked(list: &'a [u8], total: u64) -> Option<Undone<'a>> {
        let (mut undone, mut end) = (Undone { rest: list }, 0);
        while !undone.rest.is_empty() {
            let (start, len) = undone.next()?;
            if start < end || len == 0 {
                return None;
            }
            end = start.checked_add(len).filter(|&end| end <= total)?;
        }
        Some(Undone { rest: list })
    }
}

impl Iterator for Undone<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let (start, rest) = record::split_varint(self.rest)?;
        let (len, rest) = record::split_varint(rest)?;
        self.rest = rest;
        Some((start, len))
    }
}

/// Reads the operations of a stream that were not undone, in order.
#[derive(Debug)]
pub struct StreamReader<'a> {
    rest: Parts<'a>,
    /// Bytes of the stream before `rest`.
    position: u64,
    /// The undone part that comes next, and those behind it.
    next_undone: Option<(u64, u64)>,
    undone: Undone<'a>,
    /// An operation, or the head of one, that spans pieces.
    scratch: Vec<u8>,
}

impl<'a> StreamReader<'a> {
    /// Reads the stream of a transaction in one record, whose check vouches for it.
    pub fn new(pieces: &'a [&'a [u8]]) -> StreamReader<'a> {
        let left = pieces.iter().map(|piece| piece.len() as u64).sum();
        StreamReader {
            rest: Parts { pieces, offset: 0, left },
            position: 0,
            next_undone: None,
            undone: Undone { rest: &[] },
            scratch: Vec::new(),
        }
    }

    /// Reads the stream that came in chunks, if it is as the commit says.
    pub fn committed(
        pieces: &'a [&'a [u8]],
        total: u64,
        crc: u32,
        undone: &'a [u8],
    ) -> Result<StreamReader<'a>, StreamProblem> {
        let mut reader = StreamReader::new(pieces);
        let found = reader.rest.len();
        if found != total {
            return Err(StreamProblem::Length { total, found });
        }
        if pieces.iter().fold(0, |crc, piece| crc32c::crc32c_append(crc, piece)) != crc {
            return Err(StreamProblem::Checksum);
        }
        reader.undone = Undone::checked(undone, total).ok_or(StreamProblem::Undone)?;
        reader.next_undone = reader.undone.next();
        Ok(reader)
    }

    /// The next operation, or `None` at the end. What comes after a problem means nothing.
    ///
    /// It borrows the reader's memory, so this cannot be an `Iterator`.
    pub fn next(&mut self) -> Result<Option<StreamOp<'_>>, StreamProblem> {
        while let Some((start, len)) = self.next_undone
            && start == self.position
        {
            self.advance(len);
            self.next_undone = self.undone.next();
        }
        let at = self.position;
        if self.rest.len() == 0 {
            return Ok(None);
        }
        let cut_off = StreamProblem::CutOff { at };
        self.copy(MAX_VARINT_BYTES as u64);
        let Some((len, behind)) = record::split_varint(&self.scratch) else {
            return Err(cut_off);
        };
        let varint_bytes = (self.scratch.len() - behind.len()) as u64;
        if len > self.rest.len() - varint_bytes {
            return Err(cut_off);
        }
        self.advance(varint_bytes);
        let body = self.rest.first(len);
        if let Some((start, _)) = self.next_undone
            && start < self.position + len
        {
            return Err(StreamProblem::UndoneInside { start });
        }
        // Of a long one the head: with less the key would not be whole, with more nothing would be gained. The same if all of it
        // lies in one piece, so that the answer does not depend on how the stream was cut.
        let head_bytes = if len <= MAX_RECORD_BYTES { len } else { MAX_HEAD_BYTES };
        let whole = body.contiguous();
        if whole.is_none() {
            self.copy(head_bytes);
        }
        self.advance(len);
        let bytes = whole.map_or(&self.scratch[..], |whole| &whole[..head_bytes as usize]);
        let op = record::decode_body(bytes)
            .map_err(|problem| StreamProblem::Operation { at, problem })?;
        let key_len = match op {
            Op::Put { key, .. } | Op::Delete { key } | Op::Append { key, .. } => key.len(),
            Op::Clear => 0,
            _ => return Err(StreamProblem::Misplaced { at }),
        };
        if key_len as u64 > MAX_KEY_BYTES {
            return Err(StreamProblem::KeyTooLong { at });
        }
        if len == head_bytes {
            return Ok(Some(StreamOp::Whole(op)));
        }
        // The value is all that comes behind the key; `op` has a beginning of it.
        let begun = match op {
            Op::Put { value, .. } => value,
            Op::Append { bytes, .. } => bytes,
            // Nothing else is that long.
            _ => return Err(cut_off),
        };
        let value_at = bytes.len() - begun.len();
        let value = whole.map_or(&[][..], |whole| &whole[value_at..]);
        let op = match op {
            Op::Append { key, length_before, .. } => {
                Op::Append { key, length_before, bytes: value }
            }
            Op::Put { key, .. } => Op::Put { key, value },
            other => other,
        };
        Ok(Some(match whole {
            Some(_) => StreamOp::Whole(op),
            None => StreamOp::Long { head: op, value: body.skip(value_at as u64) },
        }))
    }

    fn advance(&mut self, bytes: u64) {
        self.rest = self.rest.clone().skip(bytes);
        self.position += bytes;
    }

    /// Copies the next bytes, as far as they are there.
    fn copy(&mut self, bytes: u64) {
        self.scratch.clear();
        for part in self.rest.first(bytes) {
            self.scratch.extend_from_slice(part);
        }
    }
}

#[cfg(test)]
mod tests;
