//! A record as it lies in a bucket page.
//!
//! ```text
//! varint key length << 2 | form    varint value length    payload
//! form 0: key, value
//! form 1: key, extent              the value lies in the extent
//! form 2: hash (8 bytes), extent   key and value lie in the extent, in this order
//! extent: first page (4), pages (4), CRC-32C of the bytes used (4), epoch (8); little endian
//! ```
//! Varints are LEB128. A published record never changes.

use crate::limits::{MAX_KEY_BYTES, MAX_VALUE_BYTES};
use crate::types::{Epoch, PageNo};

/// Why a page cannot be read; the caller adds which page.
pub type Reason = &'static str;

/// Bytes of an encoded [`Extent`].
pub const EXTENT_BYTES: usize = 20;

/// Where a long value lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// First page.
    pub first: PageNo,
    /// Number of pages, room to grow included.
    pub pages: u32,
    /// CRC-32C of the bytes used.
    pub crc: u32,
    /// Epoch in which its pages were taken.
    pub epoch: Epoch,
}

impl Extent {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.first.0.to_le_bytes());
        out.extend_from_slice(&self.pages.to_le_bytes());
        out.extend_from_slice(&self.crc.to_le_bytes());
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
    }
}

/// Where the payload of a record is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Key and value in the page.
    Inline,
    /// Key in the page, value in an extent.
    LongValue(Extent),
    /// Both in an extent.
    LongKey {
        /// The key's hash.
        hash: u64,
        /// Where they are.
        extent: Extent,
    },
}

/// A parsed record. Pointers point into the page, whose bytes the holder of a pin (or of the writer lock) may read.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// First byte of the record.
    pub start: *const u8,
    /// Bytes of the record in the page.
    pub len: usize,
    /// Key length in bytes.
    pub key_len: u64,
    /// Value length in bytes.
    pub value_len: u64,
    /// The key, unless the form is `LongKey`.
    pub key: *const u8,
    /// Where the payload is; an inline value follows the key.
    pub form: Form,
}

impl Record {
    /// The extent, if the record has one.
    #[inline]
    pub fn extent(&self) -> Option<Extent> {
        match self.form {
            Form::Inline => None,
            Form::LongValue(extent) | Form::LongKey { extent, .. } => Some(extent),
        }
    }

    /// Whether the key lies in the extent too.
    #[inline]
    pub fn key_is_in_extent(&self) -> bool {
        matches!(self.form, Form::LongKey { .. })
    }

    /// Bytes of the extent that are used.
    pub fn extent_bytes(&self) -> u64 {
        match self.form {
            Form::Inline => 0,
            Form::LongValue(_) => self.value_len,
            Form::LongKey { .. } => self.key_len + self.value_len,
        }
    }
}

/// Bytes that may be read, without a promise that those behind the record keep still: no reference is formed.
#[derive(Clone, Copy)]
struct Bytes {
    start: *const u8,
    len: usize,
}

impl Bytes {
    #[inline]
    fn get(self, at: usize) -> Option<u8> {
        // SAFETY: `at` < `len` readable bytes, promised to `parse`.
        (at < self.len).then(|| unsafe { self.start.add(at).read() })
    }

    fn array<const N: usize>(self, at: usize) -> Option<[u8; N]> {
        // SAFETY: as above.
        (at + N <= self.len).then(|| unsafe { self.start.add(at).cast::<[u8; N]>().read() })
    }
}

/// Reads a LEB128 number from `bytes[*at..]`.
#[inline]
fn varint(bytes: Bytes, at: &mut usize) -> Option<u64> {
    let first = bytes.get(*at)?;
    *at += 1;
    if first < 0x80 {
        return Some(first as u64);
    }
    varint_long(bytes, at, first)
}

#[cold]
fn varint_long(bytes: Bytes, at: &mut usize, first: u8) -> Option<u64> {
    let mut value = (first & 0x7f) as u64;
    let mut shift = 7;
    loop {
        let byte = bytes.get(*at)?;
        *at += 1;
        if shift == 63 && byte > 1 {
            return None;
        }
        value |= ((byte & 0x7f) as u64) << shift;
        if byte < 0x80 {
            return Some(value);
        }
        shift += 7;
        if shift > 63 {
            return None;
        }
    }
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Bytes of `value` as a varint.
pub fn varint_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

/// Parses the record at `start`, of which at most `len` bytes are in its page.
///
/// # Safety
/// `len` bytes from `start` on are readable, and the bytes of the record there do not change meanwhile.
#[inline]
pub unsafe fn parse(start: *const u8, len: usize) -> Result<Record, Reason> {
    let bytes = Bytes { start, len };
    let mut at = 0;
    let head = varint(bytes, &mut at).ok_or("a record's key length is cut off")?;
    let value_len = varint(bytes, &mut at).ok_or("a record's value length is cut off")?;
    let key_len = head >> 2;
    let rest = (len - at) as u64;
    let key = start.wrapping_add(at);
    if head & 3 == 0 {
        if key_len > rest || value_len > rest - key_len {
            return Err("a record reaches beyond its page");
        }
        let len = at + key_len as usize + value_len as usize;
        return Ok(Record { start, len, key_len, value_len, key, form: Form::Inline });
    }
    parse_long(bytes, at, head, value_len)
}

fn parse_long(bytes: Bytes, mut at: usize, head: u64, value_len: u64) -> Result<Record, Reason> {
    const CUT: Reason = "a record reaches beyond its page";
    let key_len = head >> 2;
    // So that no sum of lengths overflows, and that no copy of a key is larger than any key can be.
    if key_len > MAX_KEY_BYTES || value_len > MAX_VALUE_BYTES {
        return Err("a record's key or value is longer than any can be");
    }
    let rest = (bytes.len - at) as u64;
    let key = bytes.start.wrapping_add(at);
    let mut hash = 0;
    match head & 3 {
        1 if key_len > rest => return Err(CUT),
        1 => at += key_len as usize,
        2 => {
            hash = u64::from_le_bytes(bytes.array(at).ok_or(CUT)?);
            at += 8;
        }
        _ => return Err("a record has an unknown form"),
    }
    let extent = Extent {
        first: PageNo(u32::from_le_bytes(bytes.array(at).ok_or(CUT)?)),
        pages: u32::from_le_bytes(bytes.array(at + 4).ok_or(CUT)?),
        crc: u32::from_le_bytes(bytes.array(at + 8).ok_or(CUT)?),
        epoch: Epoch(u64::from_le_bytes(bytes.array(at + 12).ok_or(CUT)?)),
    };
    let form = if head & 3 == 1 { Form::LongValue(extent) } else { Form::LongKey { hash, extent } };
    let len = at + EXTENT_BYTES;
    Ok(Record { start: bytes.start, len, key_len, value_len, key, form })
}

/// Bytes of an inline record.
#[inline]
pub fn inline_len(key_len: usize, value_len: usize) -> usize {
    varint_len((key_len as u64) << 2) + varint_len(value_len as u64) + key_len + value_len
}

/// Appends an inline record to `out`.
pub fn encode_inline(out: &mut Vec<u8>, key: &[u8], value: &[&[u8]]) {
    let value_len: usize = value.iter().map(|part| part.len()).sum();
    put_varint(out, (key.len() as u64) << 2);
    put_varint(out, value_len as u64);
    out.extend_from_slice(key);
    for part in value {
        out.extend_from_slice(part);
    }
}

/// Appends a record whose value lies in `extent` to `out`.
pub fn encode_long_value(out: &mut Vec<u8>, key: &[u8], value_len: u64, extent: &Extent) {
    put_varint(out, (key.len() as u64) << 2 | 1);
    put_varint(out, value_len);
    out.extend_from_slice(key);
    extent.encode(out);
}

/// Appends a record whose key and value lie in `extent` to `out`.
pub fn encode_long_key(
    out: &mut Vec<u8>,
    key_len: u64,
    hash: u64,
    value_len: u64,
    extent: &Extent,
) {
    put_varint(out, key_len << 2 | 2);
    put_varint(out, value_len);
    out.extend_from_slice(&hash.to_le_bytes());
    extent.encode(out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse_all(bytes: &[u8]) -> Result<Record, Reason> {
        // SAFETY: a slice is readable and constant.
        unsafe { parse(bytes.as_ptr(), bytes.len()) }
    }

    proptest! {
        #[test]
        fn records_survive_encoding(key in prop::collection::vec(any::<u8>(), 0..300),
                                    value in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = Vec::new();
            encode_inline(&mut bytes, &key, &[&value]);
            prop_assert_eq!(bytes.len(), inline_len(key.len(), value.len()));
            let len = bytes.len();
            bytes.push(7);
            let record = parse_all(&bytes).unwrap();
            prop_assert_eq!((record.len, record.key_len, record.value_len), (len, key.len() as u64, value.len() as u64));
            prop_assert_eq!(&bytes[len - value.len()..len], &value[..]);
            prop_assert!(parse_all(&bytes[..len - 1]).is_err());
        }

        #[test]
        fn extents_survive_encoding(key in prop::collection::vec(any::<u8>(), 0..100), hash: u64,
                                    value_len in 0..1u64 << 42, first: u32, pages: u32, crc: u32, epoch: u64) {
            let extent = Extent { first: PageNo(first), pages, crc, epoch: Epoch(epoch) };
            let mut bytes = Vec::new();
            encode_long_value(&mut bytes, &key, value_len, &extent);
            let record = parse_all(&bytes).unwrap();
            prop_assert_eq!((record.len, record.value_len, record.form), (bytes.len(), value_len, Form::LongValue(extent)));
            bytes.clear();
            encode_long_key(&mut bytes, MAX_KEY_BYTES, hash, value_len, &extent);
            let record = parse_all(&bytes).unwrap();
            prop_assert_eq!((record.len, record.key_len, record.form), (bytes.len(), MAX_KEY_BYTES, Form::LongKey { hash, extent }));
        }

        #[test]
        fn lengths_that_no_record_can_have_are_refused(beyond in 1..1u64 << 20, first: u32, pages: u32) {
            let extent = Extent { first: PageNo(first), pages, crc: 0, epoch: Epoch(0) };
            let mut bytes = Vec::new();
            encode_long_key(&mut bytes, MAX_KEY_BYTES + beyond, 0, 1, &extent);
            prop_assert!(parse_all(&bytes).is_err());
            bytes.clear();
            encode_long_value(&mut bytes, b"key", MAX_VALUE_BYTES + beyond, &extent);
            prop_assert!(parse_all(&bytes).is_err());
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(record) = parse_all(&bytes) {
                prop_assert!(record.len <= bytes.len());
            }
        }
    }
}
