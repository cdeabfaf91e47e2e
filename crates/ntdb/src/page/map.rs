//! Pages of the durable free-space map.
//!
//! A map page has the common header (kind 4, prefix = number of its group) and then one bit per page of its group, set if
//! the page is used by the checkpoint. A map-index page (kind 5) has the header and then the numbers of map pages,
//! 4 bytes each; it is needed only when the meta page cannot list all map pages itself.

use super::head::HEAD_BYTES;

/// Pages that one map page describes.
pub const fn group_pages(page_size: usize) -> u32 {
    ((page_size - HEAD_BYTES) * 8) as u32
}

/// Map pages that one index page lists.
pub const fn index_entries(page_size: usize) -> usize {
    (page_size - HEAD_BYTES) / 4
}

/// Sets or clears the bits of pages `from..to` (counted within the group) in the bit area of a map page.
pub fn mark(bits: &mut [u8], from: u32, to: u32, used: bool) {
    let mut page = from;
    while page < to {
        let byte = &mut bits[page as usize / 8];
        if page.is_multiple_of(8) && to - page >= 8 {
            *byte = if used { 0xff } else { 0 };
            page += 8;
            continue;
        }
        if used {
            *byte |= 1 << (page % 8);
        } else {
            *byte &= !(1 << (page % 8));
        }
        page += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_used(bits: &[u8], page: u32) -> bool {
        bits[page as usize / 8] >> (page % 8) & 1 == 1
    }

    proptest! {
        #[test]
        fn marking_a_range_marks_just_that(from in 0u32..200, len in 0u32..100, used: bool) {
            let mut bits = vec![if used { 0 } else { 0xff }; 40];
            mark(&mut bits, from, from + len, used);
            for page in 0..320 {
                let inside = page >= from && page < from + len;
                prop_assert_eq!(is_used(&bits, page), inside == used);
            }
        }
    }
}
