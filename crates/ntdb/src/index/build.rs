//! New bucket pages from the live records of old ones.

use std::sync::atomic::Ordering::Relaxed;

use crate::core::Core;
use crate::error::Result;
use crate::page::bucket::{Builder, Load, groups_for, max_groups};
use crate::page::head::HEAD_BYTES;
use crate::transaction::step::Step;
use crate::types::PageNo;

/// A live record of a page that is being replaced. The page stays as it is while the writer lock is held.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// Hash of its key.
    pub hash: u64,
    start: *const u8,
    len: usize,
}

/// The live records of `sources`, with their hashes.
pub fn gather(core: &Core, sources: &[PageNo]) -> Result<Vec<Live>> {
    let mut records = Vec::with_capacity(512);
    for &page in sources {
        core.bucket(page)?.for_each_live(core.damage(page), |_, record| {
            let hash = core.hash_of(&record)?;
            records.push(Live { hash, start: record.start, len: record.len });
            Ok(())
        })?;
    }
    Ok(records)
}

/// Counts records.
pub fn load(records: &[Live]) -> Load {
    Load { records: records.len(), bytes: records.iter().map(|record| record.len).sum() }
}

/// Copies `records` into new pages that `step` takes; returns the first. What one page cannot hold, filled to
/// `fill_percent`, goes to overflow pages. `extra` is what will be added soon, for which there are slots, and room too in each of several
/// pages.
pub fn build(
    step: &mut Step,
    records: &[Live],
    depth: u8,
    prefix: u64,
    fill_percent: usize,
    extra: Load,
) -> Result<PageNo> {
    let core = step.core();
    let live = load(records);
    let expected = live.plus(extra);
    let size = core.page_size;
    let page_bytes = (size - HEAD_BYTES) * fill_percent / 100;
    let one_page = live.page_bytes() <= page_bytes;
    let groups = if one_page {
        groups_for(size, expected.records, expected.bytes, core.reserve())
    } else {
        // For a page's part of them. Half of the page at least is left to records, none of which takes more than a quarter: so any of
        // them, and what is to come, find room beside each other.
        let part = |all: usize| all * page_bytes / expected.page_bytes() + 1;
        groups_for(size, part(expected.records), part(expected.bytes), core.reserve())
            .min(max_groups(size) / 2)
    };
    // An empty page takes any record.
    let is_full = |page: &Builder, len: usize| {
        let (used, room) = (page.used_bytes(), page.room());
        let most = (room * fill_percent / 100).min(room.saturating_sub(extra.bytes));
        !one_page && used > 0 && (used + len > most || page.vacant_slots() <= extra.records)
    };
    let epoch = core.epoch();

    let head = step.take(1)?;
    let begin = |number: PageNo| -> Result<Builder<'_>> {
        let page = core.page(number)?;
        // SAFETY: the page was taken by this step, so only it uses the page; it is mapped and aligned to its size.
        Ok(unsafe { Builder::new(page, size, number, epoch, depth, prefix, groups) })
    };
    let mut builder = begin(head)?;
    for record in records {
        // SAFETY: the parser checked that the record lies in its page, and published records don't change.
        let bytes = unsafe { std::slice::from_raw_parts(record.start, record.len) };
        if is_full(&builder, bytes.len()) || !builder.push(record.hash, bytes) {
            let next = step.take(1)?;
            builder.head().next.store(next.0, Relaxed);
            builder = begin(next)?;
            if !builder.push(record.hash, bytes) {
                return Err(core.corrupt(head, "a record is too long for a page"));
            }
        }
    }
    Ok(head)
}
