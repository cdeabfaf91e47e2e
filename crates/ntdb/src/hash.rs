//! The keyed hash of a database: SipHash-1-3 (Aumasson and Bernstein) under a random key of 128 bits, so that nobody who
//! does not know the key can make keys collide.

use siphasher::sip::SipHasher13;

/// Id of SipHash-1-3 in the file's header.
pub const SIPHASH_1_3: u32 = 1;

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
        self.hasher.hash(key) & self.mask
    }
}
