//! New bucket pages from the live records of old ones.

use std::sync::atomic::Ordering::Relaxed;

use crate::core::Core;
use crate::error::Result;
use crate::page::bucket::{Builder, groups_for};
use crate::page::head::HEAD_BYTES;
use crate::transaction::step::Step;
use crate::types::PageNo;

/// The live records of some buckets, counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// Live records.
    pub records: usize,
    /// Their bytes.
    pub bytes: usize,
}

impl Load {
    /// Bytes that the records take in a page, slots included.
    pub fn page_bytes(&self) -> usize {
        // Three bytes a slot, and seven of eight slots in use.
        self.bytes + self.records * 24 / 7
    }
}

/// Which records to take: those that have `value` as hash bit `bit` (counted from the top).
#[derive(Clone, Copy, Debug)]
pub struct Half {
    /// Which bit.
    pub bit: u8,
    /// Its value.
    pub value: bool,
}

impl Half {
    fn has(&self, hash: u64) -> bool {
        (hash >> (63 - self.bit) & 1 == 1) == self.value
    }
}

/// Counts the live records of `sources`, of one half or all.
pub fn load(core: &Core, sources: &[PageNo], half: Option<Half>) -> Result<Load> {
    let mut load = Load::default();
    for &page in sources {
        core.bucket(page)?.for_each_live(core.damage(page), |_, record| {
            if half.is_none_or(|half| core.hash_of(&record).is_ok_and(|hash| half.has(hash))) {
                load.records += 1;
                load.bytes += record.len;
            }
            Ok(())
        })?;
    }
    Ok(load)
}

/// Copies the live records of `sources` (of one half or all) into new pages that `step` takes; returns the first. What one
/// page cannot hold, filled to `fill_percent`, goes to overflow pages. `extra` is what will be added soon, for which
/// slots are provided.
pub fn build(
    step: &mut Step,
    sources: &[PageNo],
    half: Option<Half>,
    depth: u8,
    prefix: u64,
    fill_percent: usize,
    extra: Load,
) -> Result<PageNo> {
    let core = step.core();
    let live = load(core, sources, half)?;
    let expected = Load { records: live.records + extra.records, bytes: live.bytes + extra.bytes };
    let size = core.page_size;
    let groups = groups_for(size, expected.records, expected.bytes);
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
    for &source in sources {
        core.bucket(source)?.for_each_live(core.damage(source), |_, record| {
            let hash = core.hash_of(&record)?;
            if half.is_some_and(|half| !half.has(hash)) {
                return Ok(());
            }
            // SAFETY: the parser checked that the record lies in its page, and published records don't change.
            let bytes = unsafe { std::slice::from_raw_parts(record.start, record.len) };
            let full = builder.used_bytes() + bytes.len() > builder.room() * fill / 100;
            if full || !builder.push(hash, bytes) {
                let next = step.take(1)?;
                builder.head().next.store(next.0, Relaxed);
                builder = begin(next)?;
                if !builder.push(hash, bytes) {
                    return Err(core.corrupt(source, "a record is too long for a page"));
                }
            }
            Ok(())
        })?;
    }
    Ok(head)
}
