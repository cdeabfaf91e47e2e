//! Tag groups with 64-bit arithmetic.

use super::Slots;

/// A group of sixteen tags.
#[derive(Clone, Copy)]
pub struct Group(u64, u64);

const LOW: u64 = 0x0101_0101_0101_0101;
const HIGH: u64 = 0x8080_8080_8080_8080;

/// One bit per byte of `word` that is zero (exact: no borrow crosses a byte, since bit 7 is masked off first).
#[inline]
fn zero_bytes(word: u64) -> u64 {
    let sum = (word & !HIGH).wrapping_add(!HIGH);
    !(sum | word) & HIGH
}

/// Gathers bit 7 of every byte into eight bits.
#[inline]
fn gather(bits: u64) -> u16 {
    (((bits & HIGH) >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u16
}

#[allow(missing_docs)]
impl Group {
    #[inline]
    pub fn new(low: u64, high: u64) -> Group {
        Group(low, high)
    }
    #[inline]
    fn slots(low: u64, high: u64) -> Slots {
        Slots(gather(low) | gather(high) << 8)
    }
    #[inline]
    pub fn matching(self, tag: u8) -> Slots {
        let wanted = LOW * tag as u64;
        Self::slots(zero_bytes(self.0 ^ wanted), zero_bytes(self.1 ^ wanted))
    }
    #[inline]
    pub fn empty(self) -> Slots {
        Self::slots(zero_bytes(self.0), zero_bytes(self.1))
    }
    #[inline]
    pub fn live(self) -> Slots {
        Self::slots(self.0, self.1)
    }
}
