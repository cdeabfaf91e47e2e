//! New bucket pages from the live records of old ones.

use std::sync::atomic::Ordering::Relaxed;

use crate::core::Core;
use crate::error::Result;
use crate::page::bucket::{Builder, Load, groups_for};
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
/// `fill_percent`, goes to overflow pages. `extra` is what will be added soon, for which slots are provided.
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
    let groups = groups_for(size, expected.records, expected.bytes, core.reserve());
    let one_page = live.page_bytes() <= (size - HEAD_BYTES) * fill_percent / 100;
    let fill = if one_page { 100 } else { fill_percent };
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
        let full = builder.used_bytes() + bytes.len() > builder.room() * fill / 100;
        if full || !builder.push(record.hash, bytes) {
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
