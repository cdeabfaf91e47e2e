//! One bit per page: set while the page is used for anything.
//!
//! Setting and clearing are absolute, so that repeating them after a death is harmless.

use std::sync::atomic::Ordering::Relaxed;

use crate::core::Core;
use crate::error::Result;
use crate::shm::segment::SegmentTable;
use crate::types::{PageNo, Run};

/// Bytes of a bit table for `pages` pages.
pub fn table_bytes(pages: u32) -> u64 {
    (pages as u64).div_ceil(64) * 8
}

/// Sets or clears the bits of `run` in `table`.
fn mark(core: &Core, table: &SegmentTable, run: Run, set: bool) -> Result<()> {
    let mut page = run.first.0 as u64;
    let end = page + run.len as u64;
    while page < end {
        let within = page % 64;
        let count = (64 - within).min(end - page);
        let mask = (u64::MAX >> (64 - count)) << within;
        let word = core
            .shm
            .word(table, page / 64 * 8)
            .ok_or_else(|| core.corrupt_shm("a page lies outside the allocation bits"))?;
        if set {
            word.fetch_or(mask, Relaxed);
        } else {
            word.fetch_and(!mask, Relaxed);
        }
        page += count;
    }
    Ok(())
}

/// Marks `run` used, and, since its contents will be new, verified.
pub fn set_used(core: &Core, run: Run) -> Result<()> {
    core.set_new(run)?;
    mark(core, &core.control().used_bits, run, true)
}

/// Marks `run` used; what it holds is still to be verified.
pub fn set_used_unverified(core: &Core, run: Run) -> Result<()> {
    mark(core, &core.control().used_bits, run, true)
}

/// Marks `run` free.
pub fn set_free(core: &Core, run: Run) -> Result<()> {
    mark(core, &core.control().used_bits, run, false)
}

/// The word of the allocation bits for pages `64 x index` to `64 x index + 63`; all ones beyond the table.
pub fn used_word(core: &Core, index: u64) -> u64 {
    core.shm.word(&core.control().used_bits, index * 8).map_or(u64::MAX, |word| word.load(Relaxed))
}

/// Whether page `page` is used.
pub fn is_used(core: &Core, page: PageNo) -> bool {
    used_word(core, page.0 as u64 / 64) >> (page.0 % 64) & 1 == 1
}

/// Number of free pages below `file_pages`.
pub fn count_free(core: &Core, file_pages: u32) -> u64 {
    let mut free = 0;
    for index in 0..(file_pages as u64).div_ceil(64) {
        let beyond = (file_pages as u64 - index * 64).min(64);
        let mask = u64::MAX >> (64 - beyond);
        free += (!used_word(core, index) & mask).count_ones() as u64;
    }
    free
}

/// The first run of `len` free pages in `from..to`.
pub fn find_free_run(core: &Core, from: u32, to: u32, len: u32) -> Option<PageNo> {
    let mut page = from as u64;
    let to = to as u64;
    let mut run_start = page;
    let mut run_len = 0u64;
    while page < to {
        let word = used_word(core, page / 64) >> (page % 64);
        let left = (64 - page % 64).min(to - page);
        if word & (u64::MAX >> (64 - left)) == (u64::MAX >> (64 - left)) {
            run_len = 0;
            page += left;
            continue;
        }
        let free = (word.trailing_zeros() as u64).min(left);
        if free > 0 {
            if run_len == 0 {
                run_start = page;
            }
            run_len += free;
            if run_len >= len as u64 {
                return Some(PageNo(run_start as u32));
            }
            page += free;
            continue;
        }
        run_len = 0;
        page += ((!word).trailing_zeros() as u64).min(left);
    }
    None
}
