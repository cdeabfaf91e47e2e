//! The reserve: what inserts leave of a page, for updates that make a record longer, or only put a new one beside the old.
//! (PostgreSQL calls what is not left the *fill factor*, Oracle what is left *PCTFREE*.)
//!
//! It is a share of the bytes for records. An empty page, and the pages of an overflow chain, which no split makes emptier, have none.

/// A reserve, in percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserve(u32);

impl Reserve {
    /// What updates leave.
    pub const NONE: Reserve = Reserve(0);

    /// `percent` of a page; more than [`RESERVE_PERCENT_MAX`](crate::limits::RESERVE_PERCENT_MAX) counts as that.
    #[inline(always)]
    pub fn from_percent(percent: u32) -> Reserve {
        Reserve(percent.min(crate::limits::RESERVE_PERCENT_MAX))
    }

    /// In percent.
    pub fn percent(self) -> u8 {
        self.0 as u8
    }

    /// What is left of `room` bytes.
    #[inline(always)]
    pub fn of(self, room: usize) -> usize {
        room * self.0 as usize / 100
    }

    /// The same share of what inserts may use as `percent` is of a whole page; in percent of the page.
    pub fn share(self, percent: usize) -> usize {
        percent * (100 - self.0 as usize) / 100
    }

    /// Bytes for a value of `bytes`, so that this share of them stays free.
    pub fn around(self, bytes: u64) -> u64 {
        let all = bytes as u128 * 100 / (100 - self.0) as u128;
        u64::try_from(all).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::Reserve;

    #[test]
    fn shares() {
        for (percent, of, share, around) in
            [(0, 0, 94, 1_000), (10, 100, 84, 1_111), (50, 500, 47, 2_000), (90, 900, 9, 10_000)]
        {
            let reserve = Reserve::from_percent(percent);
            assert_eq!(reserve.of(1_000), of);
            assert_eq!(reserve.share(94), share);
            assert_eq!(reserve.around(1_000), around);
        }
        assert_eq!(Reserve::from_percent(1_000).percent(), 90);
        assert_eq!(Reserve::from_percent(90).around(u64::MAX), u64::MAX);
    }
}
