//! Values that prove themselves.
//!
//! A value is one or more *records* laid end to end; a put writes one record, each append adds
//! one. A record names its key (as a hash), its writer, the writer's counter and the counter of
//! the record before it by the same writer in the same value (0 for the first), carries filler of
//! any length, and is sealed by a CRC-32C. So whoever reads a value can tell, without asking
//! anybody, that it isn't torn, isn't another key's, wasn't invented, and that no append was lost
//! or doubled.
//!
//! ```text
//! u32 length of the record | u32 CRC-32C of all that follows | u64 hash of the key
//! u32 writer | u32 zero | u64 counter | u64 previous counter | filler
//! ```

use crate::rng::mix;

/// Bytes of a record without filler.
pub const RECORD_HEADER_BYTES: usize = 40;

/// Who wrote a record, and when in its own order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// The writer.
    pub writer: u32,
    /// The writer's counter; grows with each of its operations on the key.
    pub counter: u64,
    /// The counter of the writer's record before this one in the same value, 0 if there is none.
    pub previous: u64,
}

/// A 64-bit hash of a key.
pub fn key_hash(key: &[u8]) -> u64 {
    let mut hash = mix(key.len() as u64);
    for chunk in key.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = mix(hash ^ u64::from_le_bytes(word));
    }
    hash
}

/// Encodes one record.
pub fn encode(key: &[u8], stamp: Stamp, filler_len: usize) -> Vec<u8> {
    let len = RECORD_HEADER_BYTES + filler_len;
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(&u32::try_from(len).expect("a record below 4 GiB").to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&key_hash(key).to_le_bytes());
    bytes.extend_from_slice(&stamp.writer.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&stamp.counter.to_le_bytes());
    bytes.extend_from_slice(&stamp.previous.to_le_bytes());
    let mut word = mix(stamp.counter ^ u64::from(stamp.writer) << 48);
    while bytes.len() < len {
        let take = (len - bytes.len()).min(8);
        bytes.extend_from_slice(&word.to_le_bytes()[..take]);
        word = word.wrapping_mul(0xD129_0F1D_53AF_C4B5).wrapping_add(1);
    }
    let crc = crc32c::crc32c(&bytes[8..]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Takes a value apart, or says what is wrong with it.
///
/// # Errors
/// A description of the damage: torn, of another key, an append lost or doubled.
pub fn parse(key: &[u8], value: &[u8]) -> Result<Vec<Stamp>, String> {
    let u32_at = |at: usize| u32::from_le_bytes(value[at..at + 4].try_into().expect("4 bytes"));
    let u64_at = |at: usize| u64::from_le_bytes(value[at..at + 8].try_into().expect("8 bytes"));
    let mut stamps: Vec<Stamp> = Vec::new();
    let mut last_of_writer: Vec<(u32, u64)> = Vec::new();
    let mut at = 0;
    while at < value.len() {
        if value.len() - at < RECORD_HEADER_BYTES {
            return Err(format!("torn: {} bytes are left at offset {at}", value.len() - at));
        }
        let len = u32_at(at) as usize;
        if len < RECORD_HEADER_BYTES || len > value.len() - at {
            return Err(format!("torn: record length {len} at {at} of {} bytes", value.len()));
        }
        if crc32c::crc32c(&value[at + 8..at + len]) != u32_at(at + 4) {
            return Err(format!("torn: wrong checksum of the record at {at}, {len} bytes"));
        }
        if u64_at(at + 8) != key_hash(key) {
            return Err(format!("invented: the record at {at} belongs to another key"));
        }
        let stamp =
            Stamp { writer: u32_at(at + 16), counter: u64_at(at + 24), previous: u64_at(at + 32) };
        match last_of_writer.iter_mut().find(|(writer, _)| *writer == stamp.writer) {
            Some((_, last)) => {
                if stamp.previous != *last || stamp.counter <= *last {
                    return Err(format!("append lost or doubled: {stamp:?} comes after {last}"));
                }
                *last = stamp.counter;
            }
            None => {
                if stamp.previous != 0 {
                    return Err(format!("append lost: {stamp:?} has nothing before it"));
                }
                last_of_writer.push((stamp.writer, stamp.counter));
            }
        }
        stamps.push(stamp);
        at += len;
    }
    if stamps.is_empty() {
        return Err("torn: an empty value, which nobody wrote".into());
    }
    Ok(stamps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(writer: u32, counter: u64, previous: u64) -> Stamp {
        Stamp { writer, counter, previous }
    }

    #[test]
    fn what_was_written_is_read() {
        for filler in [0, 1, 7, 8, 9, 4096] {
            let value = encode(b"key", stamp(3, 9, 0), filler);
            assert_eq!(value.len(), RECORD_HEADER_BYTES + filler);
            assert_eq!(parse(b"key", &value), Ok(vec![stamp(3, 9, 0)]));
        }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let value = encode(b"key", stamp(3, 9, 0), 21);
        for bit in 0..value.len() * 8 {
            let mut bad = value.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(parse(b"key", &bad).is_err(), "bit {bit}");
        }
        for len in 0..value.len() {
            assert!(parse(b"key", &value[..len]).is_err(), "length {len}");
        }
        assert!(parse(b"kez", &value).is_err());
    }

    #[test]
    fn lost_and_doubled_appends_are_noticed() {
        let join =
            |stamps: &[Stamp]| stamps.iter().flat_map(|&s| encode(b"k", s, 5)).collect::<Vec<u8>>();
        let good = [stamp(1, 1, 0), stamp(2, 1, 0), stamp(1, 2, 1), stamp(2, 5, 1)];
        assert_eq!(parse(b"k", &join(&good)).unwrap().len(), 4);
        let lost = [stamp(1, 1, 0), stamp(1, 3, 2)];
        assert!(parse(b"k", &join(&lost)).is_err());
        let lost_first = [stamp(1, 2, 1)];
        assert!(parse(b"k", &join(&lost_first)).is_err());
        let doubled = [stamp(1, 1, 0), stamp(1, 1, 0)];
        assert!(parse(b"k", &join(&doubled)).is_err());
    }
}
