//! One change as bytes: a record of the redo log.
//!
//! # Layout
//!
//! ```text
//! 0        4        8      9
//! +--------+--------+------+---------------------------------+
//! | length | check  | kind | operands                        |
//! +--------+--------+------+---------------------------------+
//!  u32 LE   u32 LE   u8     varints, fixed words, raw bytes
//! ```
//!
//! *length* counts the whole record, header included, from 9 to [`MAX_RECORD_BYTES`]. The body is
//! the kind and its operands:
//!
//! | kind | operation | operands |
//! | --- | --- | --- |
//! | 1 | put | key length (varint), key, value (the rest) |
//! | 2 | delete | key (the rest) |
//! | 3 | append | key length (varint), length before (varint), key, bytes (the rest) |
//! | 4 | clear | none |
//! | 5 | chunk | LSN of the first chunk (u64), total length (varint), bytes (the rest) |
//! | 6 | put chunked | LSN of the first chunk (u64), CRC (u32), length (varint), key (the rest) |
//! | 7 | append chunked | LSN of the first chunk (u64), CRC (u32), length before (varint), length (varint), key (the rest) |
//! | 8 | transaction | operations: a stream (the rest) |
//! | 9 | transaction chunk | LSN of the first chunk (u64), a part of the stream (the rest) |
//! | 10 | commit | LSN of the first chunk (u64), CRC (u32), total length (varint), undone parts (the rest) |
//!
//! What a stream is, and which parts of it may be undone, is told in [`super::stream`].
//!
//! A varint is an unsigned LEB128 number of at most 64 bits in its shortest form. All other numbers
//! are fixed and little-endian; the LSNs are, because a record's size must be known before its place
//! in the log is.
//!
//! # The check
//!
//! ```text
//! x     = salt xor (LSN * 0x9E3779B97F4A7C15) xor (length * 0xC2B2AE3D27D4EB4F)
//! x     = x xor (x >> 32);  x = x * 0xD6E8FEB86659FD93
//! x     = x xor (x >> 32);  x = x * 0xD6E8FEB86659FD93
//! x     = x xor (x >> 32)
//! check = CRC-32C(body) xor (low 32 bits of x)                     (all modulo 2^64)
//! ```
//!
//! The CRC is computed while nobody waits; the rest needs the LSN, which is known only under the
//! writer lock, and costs a few multiplications. Because the two meet in an exclusive or, a damaged
//! body is found with all the certainty that the CRC gives (every burst of up to 32 bits, say). A
//! record of another salt, place or length, such as a leftover in a re-used log file or a log that
//! lies beside a restored database, meets an unrelated mask and passes once in 2^32.
//!
//! # Crashes
//!
//! A record is either there with a matching check or it is not there: a torn one, zeros and
//! leftovers all read as [`Decoded::End`]. Nothing here panics or allocates for any input.

use crate::copy::copy_fitting;
#[cfg(doc)]
use crate::limits::MAX_CHUNK_BYTES;
use crate::limits::{MAX_RECORD_BYTES, SHORT_KEY, SHORT_VALUE};
use crate::types::Lsn;

/// Bytes before the body: length and check.
pub const RECORD_HEADER_BYTES: usize = 8;
/// The shortest record: a header and a kind.
pub const MIN_RECORD_BYTES: usize = RECORD_HEADER_BYTES + 1;

// Lengths are u32 on disk, and the scanner's buffer arithmetic is usize.
const _: () = assert!(MAX_RECORD_BYTES <= u32::MAX as u64 / 2);

const KIND_PUT: u8 = 1;
const KIND_DELETE: u8 = 2;
const KIND_APPEND: u8 = 3;
const KIND_CLEAR: u8 = 4;
const KIND_CHUNK: u8 = 5;
const KIND_PUT_CHUNKED: u8 = 6;
const KIND_APPEND_CHUNKED: u8 = 7;
const KIND_TRANSACTION: u8 = 8;
const KIND_TRANSACTION_CHUNK: u8 = 9;
const KIND_COMMIT: u8 = 10;

/// What a record says has happened: always the resolved effect, never a condition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op<'a> {
    /// The key now has this value.
    Put {
        /// The key.
        key: &'a [u8],
        /// Its new value.
        value: &'a [u8],
    },
    /// The key, which was present, is gone.
    Delete {
        /// The key.
        key: &'a [u8],
    },
    /// Bytes were added to the key's value.
    Append {
        /// The key.
        key: &'a [u8],
        /// Bytes of the value before; replay reports a disagreement as damage.
        length_before: u64,
        /// What was added.
        bytes: &'a [u8],
    },
    /// Every record is gone.
    Clear,
    /// A part of a value that is too long for one record. Means nothing until the record that
    /// names its series is found.
    Chunk {
        /// LSN of the first chunk of the series (its own, in the first).
        first: Lsn,
        /// Bytes of the whole series.
        total: u64,
        /// This part.
        bytes: &'a [u8],
    },
    /// [`Op::Put`] with a value that came in chunks.
    PutChunked {
        /// The key.
        key: &'a [u8],
        /// Bytes of the value.
        len: u64,
        /// LSN of the first chunk.
        first: Lsn,
        /// CRC-32C of the chunks: of the value, after the key if the record will be one whose key lies in the extent too.
        crc: u32,
    },
    /// [`Op::Append`] with bytes that came in chunks.
    AppendChunked {
        /// The key.
        key: &'a [u8],
        /// Bytes of the value before.
        length_before: u64,
        /// Bytes that were added.
        len: u64,
        /// LSN of the first chunk.
        first: Lsn,
        /// CRC-32C of the bytes that were added.
        crc: u32,
    },
    /// A transaction whose operations fit one record. They have all happened, at once.
    Transaction {
        /// The stream of its operations.
        ops: &'a [u8],
    },
    /// A part of the stream of a longer transaction, cut anywhere. Means nothing until the
    /// transaction's [`Op::Commit`] is found.
    TransactionChunk {
        /// LSN of the first chunk of the stream (its own, in the first).
        first: Lsn,
        /// This part, at most [`MAX_CHUNK_BYTES`] of it where this program writes it.
        bytes: &'a [u8],
    },
    /// The operations of the stream that came in chunks have all happened, at once.
    Commit {
        /// LSN of the first chunk.
        first: Lsn,
        /// Bytes of the whole stream.
        total: u64,
        /// CRC-32C of the whole stream, undone parts included.
        crc: u32,
        /// The parts of the stream that were undone before the commit and did not happen.
        undone: &'a [u8],
    },
}

/// What lies at a place of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decoded<'a> {
    /// A record that belongs here.
    Record {
        /// What it says.
        op: Op<'a>,
        /// Bytes of the whole record: the next one begins that far on.
        len: u32,
    },
    /// No record: zeros, a torn or stale record, or not all of one.
    End,
}

/// A record whose check is right and that cannot be understood all the same: not a torn tail, but a
/// log of a newer program, or damage done before the check was computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RecordProblem {
    /// The kind is none that this version knows.
    #[error("a record of the unknown kind {0}; it was written by a newer version")]
    UnknownKind(u8),
    /// The operands do not fit the record.
    #[error("a record of kind {kind} whose {what} does not fit it")]
    Malformed {
        /// The kind of record.
        kind: u8,
        /// The operand.
        what: &'static str,
    },
}

/// Bytes of the record for `op`, header included. More than [`MAX_RECORD_BYTES`] cannot be logged in
/// one record; the caller uses chunks then.
#[inline]
pub fn encoded_len(op: &Op<'_>) -> usize {
    let operands = match *op {
        Op::Put { key, value } => varint_len(key.len() as u64) + key.len() + value.len(),
        Op::Delete { key } => key.len(),
        Op::Append { key, length_before, bytes } => {
            varint_len(key.len() as u64) + varint_len(length_before) + key.len() + bytes.len()
        }
        Op::Clear => 0,
        Op::Chunk { total, bytes, .. } => 8 + varint_len(total) + bytes.len(),
        Op::PutChunked { key, len, .. } => 12 + varint_len(len) + key.len(),
        Op::AppendChunked { key, length_before, len, .. } => {
            12 + varint_len(length_before) + varint_len(len) + key.len()
        }
        Op::Transaction { ops } => ops.len(),
        Op::TransactionChunk { bytes, .. } => 8 + bytes.len(),
        Op::Commit { total, undone, .. } => 12 + varint_len(total) + undone.len(),
    };
    MIN_RECORD_BYTES + operands
}

/// Writes the record for `op` to the start of `out`, all but the check, which stays 0 until the LSN
/// is known (see [`seal`] and [`set_check`]). Returns the CRC of the body, which [`seal`] wants.
///
/// # Panics
/// If `out` is shorter than [`encoded_len`] says.
#[inline]
pub fn encode(op: &Op<'_>, out: &mut [u8]) -> u32 {
    let len = encoded_len(op);
    debug_assert!(len as u64 <= MAX_RECORD_BYTES);
    let out = &mut out[..len];
    // Length in the low half, check (0) in the high one.
    out[..RECORD_HEADER_BYTES].copy_from_slice(&(len as u64).to_le_bytes());
    let (_, body) = out.split_at_mut(RECORD_HEADER_BYTES);
    encode_body(op, body);
    body_crc(body)
}

/// Bytes of the body for `op`: of the record without its header.
#[inline]
pub fn body_len(op: &Op<'_>) -> usize {
    encoded_len(op) - RECORD_HEADER_BYTES
}

/// Writes the kind and the operands of `op` to `body`, which has the length that [`body_len`] says.
#[inline]
pub fn encode_body(op: &Op<'_>, body: &mut [u8]) {
    let mut writer = Writer { rest: body };
    match *op {
        Op::Put { key, value } => {
            writer.byte(KIND_PUT);
            writer.varint(key.len() as u64);
            writer.bytes(key);
            writer.bytes(value);
        }
        Op::Delete { key } => {
            writer.byte(KIND_DELETE);
            writer.bytes(key);
        }
        Op::Append { key, length_before, bytes } => {
            writer.byte(KIND_APPEND);
            writer.varint(key.len() as u64);
            writer.varint(length_before);
            writer.bytes(key);
            writer.bytes(bytes);
        }
        Op::Clear => writer.byte(KIND_CLEAR),
        Op::Chunk { first, total, bytes } => {
            writer.byte(KIND_CHUNK);
            writer.bytes(&first.0.to_le_bytes());
            writer.varint(total);
            writer.bytes(bytes);
        }
        Op::PutChunked { key, len, first, crc } => {
            writer.byte(KIND_PUT_CHUNKED);
            writer.bytes(&first.0.to_le_bytes());
            writer.bytes(&crc.to_le_bytes());
            writer.varint(len);
            writer.bytes(key);
        }
        Op::AppendChunked { key, length_before, len, first, crc } => {
            writer.byte(KIND_APPEND_CHUNKED);
            writer.bytes(&first.0.to_le_bytes());
            writer.bytes(&crc.to_le_bytes());
            writer.varint(length_before);
            writer.varint(len);
            writer.bytes(key);
        }
        Op::Transaction { ops } => {
            writer.byte(KIND_TRANSACTION);
            writer.bytes(ops);
        }
        Op::TransactionChunk { first, bytes } => {
            writer.byte(KIND_TRANSACTION_CHUNK);
            writer.bytes(&first.0.to_le_bytes());
            writer.bytes(bytes);
        }
        Op::Commit { first, total, crc, undone } => {
            writer.byte(KIND_COMMIT);
            writer.bytes(&first.0.to_le_bytes());
            writer.bytes(&crc.to_le_bytes());
            writer.varint(total);
            writer.bytes(undone);
        }
    }
    debug_assert!(writer.rest.is_empty(), "encoded_len and encode disagree");
}

/// Memory for the record of a put of a short key and a short value: header, kind, length of the key, key, value.
pub type ShortPut = [u8; (MIN_RECORD_BYTES + 1 + SHORT_KEY + SHORT_VALUE).next_multiple_of(16)];

/// As [`encode`], for a put of a key shorter than [`SHORT_KEY`] and a value shorter than [`SHORT_VALUE`]; returns the record and the
/// CRC of its body.
#[inline(always)]
pub fn encode_short_put<'a>(
    key: &[u8],
    value: &[u8],
    memory: &'a mut ShortPut,
) -> (&'a mut [u8], u32) {
    debug_assert!(key.len() < SHORT_KEY && value.len() < SHORT_VALUE);
    const KEY: usize = MIN_RECORD_BYTES + 1;
    let len = KEY + key.len() + value.len();
    memory[..RECORD_HEADER_BYTES].copy_from_slice(&(len as u64).to_le_bytes());
    memory[RECORD_HEADER_BYTES] = KIND_PUT;
    memory[RECORD_HEADER_BYTES + 1] = key.len() as u8;
    copy_fitting(key, &mut memory[KEY..]);
    copy_fitting(value, &mut memory[KEY + key.len()..]);
    let record = &mut memory[..len];
    let crc = body_crc(&record[RECORD_HEADER_BYTES..]);
    (record, crc)
}

/// Writes the check into an encoded record.
#[inline]
pub fn set_check(record: &mut [u8], check: u32) {
    record[4..8].copy_from_slice(&check.to_le_bytes());
}

/// The CRC of a record's body: the part of the check that needs no LSN.
#[inline]
pub fn body_crc(body: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if body.len() <= 64 && std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instructions.
        return unsafe { short_crc(body) };
    }
    crc32c::crc32c(body)
}

/// CRC-32C of a few bytes: the crate's way of splitting its input costs more than so short a record itself.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "sse4.2")]
fn short_crc(body: &[u8]) -> u32 {
    use core::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u16, _mm_crc32_u32, _mm_crc32_u64};
    let (words, rest) = body.as_chunks::<8>();
    let start = u64::from(u32::MAX);
    let crc = words.iter().fold(start, |crc, word| _mm_crc32_u64(crc, u64::from_le_bytes(*word)));
    let mut crc = crc as u32;
    let mut rest = rest;
    if let Some((half, bytes)) = rest.split_first_chunk::<4>() {
        crc = _mm_crc32_u32(crc, u32::from_le_bytes(*half));
        rest = bytes;
    }
    if let Some((pair, bytes)) = rest.split_first_chunk::<2>() {
        crc = _mm_crc32_u16(crc, u16::from_le_bytes(*pair));
        rest = bytes;
    }
    !rest.iter().fold(crc, |crc, &byte| _mm_crc32_u8(crc, byte))
}

/// The check of a record of `len` bytes at `lsn` (the formula stands at the head of this module).
#[inline]
pub fn seal(salt: u64, lsn: Lsn, len: u32, body_crc: u32) -> u32 {
    let mut x = salt
        ^ lsn.0.wrapping_mul(0x9E37_79B9_7F4A_7C15)
        ^ u64::from(len).wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^= x >> 32;
    body_crc ^ x as u32
}

/// The length that the record at the start of `bytes` claims, if it is a possible one and all of it
/// is there, and its kind is known. Says nothing about the check; costs next to nothing.
#[inline]
pub fn plausible_len(bytes: &[u8]) -> Option<usize> {
    let header = u64::from_le_bytes(*bytes.first_chunk::<RECORD_HEADER_BYTES>()?);
    let len = (header & 0xFFFF_FFFF) as usize;
    let possible = MIN_RECORD_BYTES..=bytes.len().min(MAX_RECORD_BYTES as usize);
    (possible.contains(&len) && known_kind(bytes[RECORD_HEADER_BYTES])).then_some(len)
}

/// How many of `bytes`, which begin with a record, are whole records.
pub fn whole_records(bytes: &[u8]) -> usize {
    let mut end = 0;
    while let Some(len) = plausible_len(&bytes[end..]) {
        end += len;
    }
    end
}

/// Whether `bytes` begin with a record that belongs to `lsn` in the log of `salt`; its length if so.
#[inline]
pub fn sealed_len(salt: u64, lsn: Lsn, bytes: &[u8]) -> Option<u32> {
    let (header, _) = bytes.split_first_chunk::<RECORD_HEADER_BYTES>()?;
    let header = u64::from_le_bytes(*header);
    let (len, check) = (header as u32, (header >> 32) as u32);
    if u64::from(len) > MAX_RECORD_BYTES || (len as usize) < MIN_RECORD_BYTES {
        return None;
    }
    let body = bytes.get(RECORD_HEADER_BYTES..len as usize)?;
    (seal(salt, lsn, len, body_crc(body)) == check).then_some(len)
}

/// Reads the record at `lsn` from `bytes`, which begin there and reach as far as the caller has them.
pub fn decode(salt: u64, lsn: Lsn, bytes: &[u8]) -> Result<Decoded<'_>, RecordProblem> {
    let Some(len) = sealed_len(salt, lsn, bytes) else {
        return Ok(Decoded::End);
    };
    let op = decode_body(&bytes[RECORD_HEADER_BYTES..len as usize])?;
    Ok(Decoded::Record { op, len })
}

/// Whether records of this kind are known.
fn known_kind(kind: u8) -> bool {
    (KIND_PUT..=KIND_COMMIT).contains(&kind)
}

/// Reads an operation from a body whose check was right.
pub fn decode_body(body: &[u8]) -> Result<Op<'_>, RecordProblem> {
    let Some((&kind, rest)) = body.split_first() else {
        return Err(RecordProblem::Malformed { kind: 0, what: "kind" });
    };
    let mut reader = Reader { rest, kind };
    let op = match kind {
        KIND_PUT => {
            let key_len = reader.varint("key length")?;
            Op::Put { key: reader.bytes(key_len, "key")?, value: reader.take_rest() }
        }
        KIND_DELETE => Op::Delete { key: reader.take_rest() },
        KIND_APPEND => {
            let key_len = reader.varint("key length")?;
            let length_before = reader.varint("length before")?;
            let key = reader.bytes(key_len, "key")?;
            Op::Append { key, length_before, bytes: reader.take_rest() }
        }
        KIND_CLEAR => Op::Clear,
        KIND_CHUNK => {
            let first = reader.lsn("first chunk")?;
            let total = reader.varint("total length")?;
            Op::Chunk { first, total, bytes: reader.take_rest() }
        }
        KIND_PUT_CHUNKED => {
            let first = reader.lsn("first chunk")?;
            let crc = reader.u32("CRC")?;
            let len = reader.varint("length")?;
            Op::PutChunked { key: reader.take_rest(), len, first, crc }
        }
        KIND_APPEND_CHUNKED => {
            let first = reader.lsn("first chunk")?;
            let crc = reader.u32("CRC")?;
            let length_before = reader.varint("length before")?;
            let len = reader.varint("length")?;
            Op::AppendChunked { key: reader.take_rest(), length_before, len, first, crc }
        }
        KIND_TRANSACTION => Op::Transaction { ops: reader.take_rest() },
        KIND_TRANSACTION_CHUNK => {
            Op::TransactionChunk { first: reader.lsn("first chunk")?, bytes: reader.take_rest() }
        }
        KIND_COMMIT => {
            let first = reader.lsn("first chunk")?;
            let crc = reader.u32("CRC")?;
            let total = reader.varint("total length")?;
            Op::Commit { first, total, crc, undone: reader.take_rest() }
        }
        unknown => return Err(RecordProblem::UnknownKind(unknown)),
    };
    if reader.rest.is_empty() { Ok(op) } else { Err(reader.problem("end")) }
}

/// Bytes of `n` as a varint.
#[inline]
pub(super) fn varint_len(n: u64) -> usize {
    (70 - (n | 1).leading_zeros() as usize) / 7
}

/// Adds `n` as a varint.
pub(super) fn push_varint(out: &mut Vec<u8>, n: u64) {
    let at = out.len();
    out.resize(at + varint_len(n), 0);
    Writer { rest: &mut out[at..] }.varint(n);
}

/// Longest varint in bytes.
pub(super) const MAX_VARINT_BYTES: usize = 10;

/// The varint at the start of `bytes` and what follows it; `None` if it is not whole or not in its shortest form.
pub(super) fn split_varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut reader = Reader { rest: bytes, kind: 0 };
    let n = reader.varint("number").ok()?;
    Some((n, reader.rest))
}

/// Fills a body from front to back.
struct Writer<'a> {
    rest: &'a mut [u8],
}

impl Writer<'_> {
    #[inline]
    fn bytes(&mut self, bytes: &[u8]) {
        let (place, rest) = std::mem::take(&mut self.rest).split_at_mut(bytes.len());
        place.copy_from_slice(bytes);
        self.rest = rest;
    }

    #[inline]
    fn byte(&mut self, byte: u8) {
        self.bytes(&[byte]);
    }

    #[inline]
    fn varint(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.byte(n as u8 | 0x80);
            n >>= 7;
        }
        self.byte(n as u8);
    }
}

/// Takes a body apart from front to back.
struct Reader<'a> {
    rest: &'a [u8],
    kind: u8,
}

impl<'a> Reader<'a> {
    fn problem(&self, what: &'static str) -> RecordProblem {
        RecordProblem::Malformed { kind: self.kind, what }
    }

    fn bytes(&mut self, len: u64, what: &'static str) -> Result<&'a [u8], RecordProblem> {
        let len = usize::try_from(len).map_err(|_| self.problem(what))?;
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(self.problem(what))?;
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], RecordProblem> {
        let (bytes, rest) = self.rest.split_first_chunk::<N>().ok_or(self.problem(what))?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn take_rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, RecordProblem> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn lsn(&mut self, what: &'static str) -> Result<Lsn, RecordProblem> {
        self.array(what).map(|bytes| Lsn(u64::from_le_bytes(bytes)))
    }

    /// Only the shortest form is taken, so that an operation has one encoding and no more.
    fn varint(&mut self, what: &'static str) -> Result<u64, RecordProblem> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array(what)?;
            let bits = u64::from(byte & 0x7F);
            let overflows = shift == 63 && bits > 1;
            let padded = byte == 0 && shift > 0;
            if overflows || padded {
                return Err(self.problem(what));
            }
            n |= bits << shift;
            if byte < 0x80 {
                return Ok(n);
            }
        }
        Err(self.problem(what))
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Operations that own their bytes, and how to make any.

    use super::*;
    use proptest::prelude::*;

    /// The parts of an operation; which of them count depends on the kind.
    #[derive(Clone, Debug)]
    pub struct OwnedOp {
        pub kind: u8,
        pub key: Vec<u8>,
        pub bytes: Vec<u8>,
        pub numbers: [u64; 3],
        pub crc: u32,
    }

    impl OwnedOp {
        pub fn op(&self) -> Op<'_> {
            let (key, bytes, crc) = (&self.key[..], &self.bytes[..], self.crc);
            let [length_before, len, first] = self.numbers;
            let first = Lsn(first);
            match self.kind {
                KIND_PUT => Op::Put { key, value: bytes },
                KIND_DELETE => Op::Delete { key },
                KIND_APPEND => Op::Append { key, length_before, bytes },
                KIND_CLEAR => Op::Clear,
                KIND_CHUNK => Op::Chunk { first, total: len, bytes },
                KIND_PUT_CHUNKED => Op::PutChunked { key, len, first, crc },
                KIND_APPEND_CHUNKED => Op::AppendChunked { key, length_before, len, first, crc },
                KIND_TRANSACTION => Op::Transaction { ops: bytes },
                KIND_TRANSACTION_CHUNK => Op::TransactionChunk { first, bytes },
                KIND_COMMIT => Op::Commit { first, total: len, crc, undone: bytes },
                kind => panic!("no kind {kind}"),
            }
        }
    }

    /// Any operation that fits a record.
    pub fn any_op() -> impl Strategy<Value = OwnedOp> {
        let bytes = || {
            let short = prop::collection::vec(any::<u8>(), 0..40);
            let long = prop::collection::vec(any::<u8>(), 100..5000);
            prop_oneof![4 => short, 1 => long]
        };
        // Every length of varint alike.
        let number = || (any::<u64>(), 0..64u32).prop_map(|(n, shift)| n >> shift);
        let numbers = [number(), number(), number()];
        (KIND_PUT..=KIND_COMMIT, bytes(), bytes(), numbers, any::<u32>())
            .prop_map(|(kind, key, bytes, numbers, crc)| OwnedOp { kind, key, bytes, numbers, crc })
    }

    /// The sealed record.
    pub fn sealed(op: &Op<'_>, salt: u64, lsn: Lsn) -> Vec<u8> {
        let mut record = vec![0xAA; encoded_len(op)];
        let crc = encode(op, &mut record);
        set_check(&mut record, seal(salt, lsn, encoded_len(op) as u32, crc));
        record
    }

    /// A record with any body, sealed as it should be.
    pub fn sealed_body(body: &[u8], salt: u64, lsn: Lsn) -> Vec<u8> {
        let len = (RECORD_HEADER_BYTES + body.len()) as u32;
        let mut record = len.to_le_bytes().to_vec();
        record.extend(seal(salt, lsn, len, body_crc(body)).to_le_bytes());
        record.extend(body);
        record
    }
}

#[cfg(test)]
mod tests;
