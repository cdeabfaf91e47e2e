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

use siphasher::sip::SipHasher13;

/// Id of this hash in the file's header.
pub const SIPHASH_1_3: u32 = 1;

/// Bits that choose the place within a bucket: 7 for the tag, 16 for the group.
pub const PLACE_BITS: u32 = 23;

/// 0.36 as a fraction of 2^64.
const BEND: u64 = 6_640_827_866_535_438_581;

/// Hashes keys of one database.
#[derive(Clone, Copy, Debug)]
pub struct KeyHasher {
    hasher: SipHasher13,
    mask: u64,
}

impl KeyHasher {
    /// The hash under `key`, of which only the bits in `mask` are used (all of them, but in tests of collisions).
    pub fn new(key: &[u8; 16], mask: u64) -> KeyHasher {
        KeyHasher { hasher: SipHasher13::new_with_key(key), mask }
    }

    /// Hash of `key`.
    #[inline]
    pub fn hash(&self, key: &[u8]) -> u64 {
        let x = self.hasher.hash(key);
        let place = (1 << PLACE_BITS) - 1;
        (spread(x) & !place | x & place) & self.mask
    }
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
