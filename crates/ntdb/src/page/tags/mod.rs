//! One-byte tags of a bucket, sixteen to a group, compared all at once.
//!
//! A tag is 0 (the slot is empty), 1 (deleted), or 0x80 and seven bits of the key's hash. A group is loaded as two atomic
//! words, so that readers never race with a writer's store of one tag. `sse2` compares with one instruction on x86-64;
//! `portable` does the same with 64-bit arithmetic everywhere else, and is tested on every processor.

#[cfg_attr(target_arch = "x86_64", allow(dead_code))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod sse2;

#[cfg(not(target_arch = "x86_64"))]
pub use portable::Group;
#[cfg(target_arch = "x86_64")]
pub use sse2::Group;

/// Slots in a group.
pub const GROUP: usize = 16;
/// Tag of an empty slot, at which a search may stop.
pub const EMPTY: u8 = 0;
/// Tag of a deleted slot.
pub const DELETED: u8 = 1;
/// Set in the tag of every live slot.
pub const LIVE: u8 = 0x80;

/// The tag of a key with this hash.
#[inline]
pub fn tag_of(hash: u64) -> u8 {
    LIVE | (hash as u8 & 0x7f)
}

/// Set of slots of a group: bit i stands for slot i.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slots(pub u16);

impl Slots {
    /// Whether there is none.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// The lowest one.
    #[inline]
    pub fn first(self) -> Option<usize> {
        if self.0 == 0 { None } else { Some(self.0.trailing_zeros() as usize) }
    }
}

impl Iterator for Slots {
    type Item = usize;
    #[inline]
    fn next(&mut self) -> Option<usize> {
        let first = self.first()?;
        self.0 &= self.0 - 1;
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(tags: &[u8; 16], test: impl Fn(u8) -> bool) -> Slots {
        Slots((0..16).filter(|&i| test(tags[i])).map(|i| 1u16 << i).sum())
    }

    fn words(tags: &[u8; 16]) -> (u64, u64) {
        (
            u64::from_le_bytes(tags[..8].try_into().unwrap()),
            u64::from_le_bytes(tags[8..].try_into().unwrap()),
        )
    }

    #[test]
    fn every_implementation_agrees_with_a_plain_loop() {
        let mut state = 0x9e3779b97f4a7c15u64;
        for _ in 0..20_000 {
            let mut tags = [0u8; 16];
            for tag in &mut tags {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let r = (state >> 33) as u8;
                *tag = match state >> 60 {
                    0..4 => EMPTY,
                    4..6 => DELETED,
                    _ => LIVE | (r & 3),
                };
            }
            let (low, high) = words(&tags);
            let wanted = LIVE | 2;
            let (p, g) = (portable::Group::new(low, high), Group::new(low, high));
            let same = naive(&tags, |t| t == wanted);
            assert_eq!((p.matching(wanted), g.matching(wanted)), (same, same), "{tags:?}");
            let empty = naive(&tags, |t| t == EMPTY);
            assert_eq!((p.empty(), g.empty()), (empty, empty), "{tags:?}");
            let live = naive(&tags, |t| t & LIVE != 0);
            assert_eq!((p.live(), g.live()), (live, live), "{tags:?}");
        }
    }
}
