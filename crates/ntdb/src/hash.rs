//! The keyed hash of a database.
//!
//! SipHash-1-3 (Aumasson and Bernstein) under a random key of 128 bits, so that nobody who does not know the key can make
//! keys collide; its upper bits are then *spread*.
//!
//! **Spread.** With evenly distributed hashes all buckets of a growing table fill, and split, at the same time: twice as many
//! pages appear within a short while, then none for long, and the pages are half empty after each wave. (Larson's and
//! Martin's remedies for this are known as partial expansions and spiral storage.) So the upper bits, which choose the
//! bucket, are mapped by y = x + 0.36 (x - x^2), with x and y fractions of 2^64. Its slope falls from 1.36 to 0.64, so that buckets at one end
//! of the range hold twice as many keys as at the other, and at any time some are splitting and none are all at once:
//! the pages are some 72 % full at every size. The lower 23 bits, which choose the place within a bucket, stay
//! as they are.

use std::fmt;

/// Id of this hash in the file's header.
pub const SIPHASH_1_3: u32 = 1;

/// Bits that choose the place within a bucket: 7 for the tag, 16 for the group.
pub const PLACE_BITS: u32 = 23;

/// 0.36 as a fraction of 2^64.
const BEND: u64 = 6_640_827_866_535_438_581;

/// Hashes keys of one database.
#[derive(Clone, Copy)]
pub struct KeyHasher {
    start: State,
    mask: u64,
}

/// Says nothing of the key: whoever reads a program's log could else make keys collide.
impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyHasher").finish_non_exhaustive()
    }
}

impl KeyHasher {
    /// The hash under `key`, of which only the bits in `mask` are used (all of them, but in tests of collisions).
    pub fn new(key: &[u8; 16], mask: u64) -> KeyHasher {
        KeyHasher { start: State::new(key), mask }
    }

    /// The bits that are used.
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// Hash of `key`.
    #[inline]
    pub fn hash(&self, key: &[u8]) -> u64 {
        let x = siphash_1_3(self.start, key);
        let place = (1 << PLACE_BITS) - 1;
        (spread(x) & !place | x & place) & self.mask
    }
}

/// The four words of SipHash.
///
/// Written out here, since general implementations take input piece by piece: for short keys their bookkeeping costs more
/// than the rounds.
#[derive(Clone, Copy)]
struct State {
    v0: u64,
    v1: u64,
    v2: u64,
    v3: u64,
}

impl State {
    fn new(key: &[u8; 16]) -> State {
        let (first, second) = key.split_at(8);
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | byte as u64);
        let (k0, k1): (u64, u64) = (word(first), word(second));
        State {
            v0: k0 ^ u64::from_be_bytes(*b"somepseu"),
            v1: k1 ^ u64::from_be_bytes(*b"dorandom"),
            v2: k0 ^ u64::from_be_bytes(*b"lygenera"),
            v3: k1 ^ u64::from_be_bytes(*b"tedbytes"),
        }
    }

    #[inline(always)]
    fn round(&mut self) {
        self.v0 = self.v0.wrapping_add(self.v1);
        self.v2 = self.v2.wrapping_add(self.v3);
        self.v1 = self.v1.rotate_left(13) ^ self.v0;
        self.v3 = self.v3.rotate_left(16) ^ self.v2;
        self.v0 = self.v0.rotate_left(32);
        self.v2 = self.v2.wrapping_add(self.v1);
        self.v0 = self.v0.wrapping_add(self.v3);
        self.v1 = self.v1.rotate_left(17) ^ self.v2;
        self.v3 = self.v3.rotate_left(21) ^ self.v0;
        self.v2 = self.v2.rotate_left(32);
    }

    #[inline(always)]
    fn take(&mut self, word: u64) {
        self.v3 ^= word;
        self.round();
        self.v0 ^= word;
    }
}

#[inline(always)]
fn siphash_1_3(mut state: State, key: &[u8]) -> u64 {
    let (words, rest) = key.as_chunks::<8>();
    for word in words {
        state.take(u64::from_le_bytes(*word));
    }
    state.take((key.len() as u64) << 56 | up_to_7_bytes(rest));
    state.v2 ^= 0xff;
    state.round();
    state.round();
    state.round();
    state.v0 ^ state.v1 ^ state.v2 ^ state.v3
}

/// Fewer than eight bytes as a little-endian number: with few loads, which may overlap.
#[inline(always)]
fn up_to_7_bytes(bytes: &[u8]) -> u64 {
    let len = bytes.len();
    if let (Some(first), Some(last)) = (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
        let (first, last) = (u32::from_le_bytes(*first), u32::from_le_bytes(*last));
        return first as u64 | (last as u64) << (8 * (len - 4));
    }
    if len == 0 {
        return 0;
    }
    let (first, middle, last) = (bytes[0], bytes[len / 2], bytes[len - 1]);
    first as u64 | (middle as u64) << (8 * (len / 2)) | (last as u64) << (8 * (len - 1))
}

/// The high half of a product.
#[inline]
fn high(a: u64, b: u64) -> u64 {
    ((a as u128 * b as u128) >> 64) as u64
}

/// See the module's description. Increases with `x`, and never overflows.
#[inline]
fn spread(x: u64) -> u64 {
    // x - x^2 >= 0 for a fraction x; and y <= x + (1 - x) since the slope at 1 is positive.
    x + high(x - high(x, x), BEND)
}

#[cfg(test)]
mod tests {
    use super::*;
    use siphasher::sip::SipHasher13;

    #[test]
    fn every_length_hashes_as_in_the_siphasher_crate() {
        let bytes: [u8; 100] = std::array::from_fn(|i| (i * 37 + 11) as u8);
        for seed in 0..8u8 {
            let key: [u8; 16] = std::array::from_fn(|i| (i as u8).wrapping_mul(seed * 2 + 1));
            let other = SipHasher13::new_with_key(&key);
            for len in 0..=80 {
                for start in 0..16 {
                    let part = &bytes[start..start + len];
                    assert_eq!(siphash_1_3(State::new(&key), part), other.hash(part), "{len}");
                }
            }
        }
    }

    #[test]
    fn the_spread_keeps_the_order_and_the_ends() {
        assert_eq!(spread(0), 0);
        assert!(spread(u64::MAX) > u64::MAX - 4);
        let mut last = 0;
        for i in 1..=1u64 << 16 {
            let y = spread((i << 48).wrapping_sub(1));
            assert!(y > last, "{i}");
            last = y;
        }
    }

    #[test]
    fn buckets_at_one_end_hold_twice_as_many() {
        // Keys per 1/64 of the range at both ends: the inverse of the slope.
        let (mut first, mut last) = (0, 0);
        for i in 0..1u64 << 16 {
            match spread(i << 48) >> 58 {
                0 => first += 1,
                63 => last += 1,
                _ => {}
            }
        }
        let ratio = last as f64 / first as f64;
        assert!((1.9..2.3).contains(&ratio), "{first} {last}");
    }

    #[test]
    fn the_key_is_not_shown() {
        let hasher = KeyHasher::new(b"0123456789abcdef", u64::MAX);
        assert_eq!(format!("{hasher:?}"), "KeyHasher { .. }");
    }

    #[test]
    fn known_answers() {
        // SipHash-1-3 of the empty key under key bytes 0 to 15, and what becomes of it; from the reference implementation's
        // test vectors by way of the siphasher crate. A change here is a change of the file format.
        let key: [u8; 16] = std::array::from_fn(|i| i as u8);
        let plain = SipHasher13::new_with_key(&key).hash(b"");
        assert_eq!(plain, 0xabac_0158_050f_c4dc);
        let hash = KeyHasher::new(&key, u64::MAX).hash(b"");
        assert_eq!(hash & 0x7f_ffff, plain & 0x7f_ffff);
        assert_eq!(hash >> 23, spread(plain) >> 23);
        assert_eq!(KeyHasher::new(&key, 0xff).hash(b""), plain & 0xff);
    }
}
