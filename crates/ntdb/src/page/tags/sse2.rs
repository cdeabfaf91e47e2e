//! Tag groups with SSE2, which every x86-64 processor has.

use core::arch::x86_64::{
    __m128i, _mm_cmpeq_epi8, _mm_movemask_epi8, _mm_set_epi64x, _mm_set1_epi8, _mm_setzero_si128,
};

use super::Slots;

/// A group of sixteen tags.
#[derive(Clone, Copy)]
pub struct Group(__m128i);

#[allow(missing_docs)]
impl Group {
    #[inline]
    pub fn new(low: u64, high: u64) -> Group {
        // SAFETY: SSE2 is part of x86-64.
        Group(unsafe { _mm_set_epi64x(high as i64, low as i64) })
    }
    #[inline]
    pub fn matching(self, tag: u8) -> Slots {
        // SAFETY: as above.
        Slots(unsafe { _mm_movemask_epi8(_mm_cmpeq_epi8(self.0, _mm_set1_epi8(tag as i8))) } as u16)
    }
    #[inline]
    pub fn empty(self) -> Slots {
        // SAFETY: as above.
        Slots(unsafe { _mm_movemask_epi8(_mm_cmpeq_epi8(self.0, _mm_setzero_si128())) } as u16)
    }
    #[inline]
    pub fn live(self) -> Slots {
        // SAFETY: as above.
        Slots(unsafe { _mm_movemask_epi8(self.0) } as u16)
    }
}
