//! How full the pages are.

use std::sync::atomic::Ordering::Relaxed;

use crate::core::Core;
use crate::error::Result;
use crate::index::locate::{self, Root};
use crate::index::{lookup, walk};
use crate::page::head::HEAD_BYTES;

use super::snapshot::Snapshot;

/// Parts that the fill of a page is told in: tenths.
pub const FILL_PARTS: usize = 10;

/// How full the bucket pages are; see [`Db::fill`](crate::Db::fill).
///
/// A page is full by what its live records and their slots take. Free is what new records go to; the rest is taken by dead records until
/// the page is rebuilt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Fill {
    /// Bucket pages that are less than a tenth full, one to two tenths, and so on. Of a sample: about how many.
    pub pages: [u64; FILL_PARTS],
    /// The share of the bucket pages, headers left out, that live records take, in percent.
    pub live_percent: f64,
    /// The share that is free.
    pub free_percent: f64,
    /// Whether only some of the pages were looked at.
    pub is_sample: bool,
}

/// All buckets are looked at if the file is not larger, in pages; else so many places of the tree.
const SAMPLE: u64 = 1 << 17;

/// Looks at the buckets of `snapshot`.
pub fn fill(snapshot: &Snapshot) -> Result<Fill> {
    let core = snapshot.core();
    let is_sample = u64::from(core.control().readers.file_pages.load(Relaxed)) > SAMPLE;
    let Sum { pages, bytes, live, free } = sum(core, snapshot.root(), is_sample)?;
    let percent = |part: f64| if bytes > 0.0 { part * 100.0 / bytes } else { 0.0 };
    Ok(Fill {
        pages: pages.map(|count| count.round() as u64),
        live_percent: percent(live),
        free_percent: percent(free),
        is_sample,
    })
}

/// What was seen, each bucket by its weight.
#[derive(Default)]
struct Sum {
    pages: [f64; FILL_PARTS],
    bytes: f64,
    live: f64,
    free: f64,
}

fn sum(core: &Core, root: Root, is_sample: bool) -> Result<Sum> {
    let mut sum = Sum::default();
    let room = (core.page_size - HEAD_BYTES) as f64;
    let stride = if is_sample { u64::MAX / SAMPLE } else { 0 };
    let mut next = Some(0u64);
    while let Some(hash) = next {
        let head = locate::bucket_page(core, root, hash)?;
        let bits = lookup::bucket_bits(core, head, hash)?;
        // A place of the sample meets a bucket the likelier the more hashes it stands for.
        let share = if bits == 0 { 1.0 } else { 0.5f64.powi(bits.into()) * SAMPLE as f64 };
        let weight = if is_sample { (1.0 / share).max(1.0) } else { 1.0 };
        for page in lookup::chain(core, head)? {
            let bucket = core.bucket(page)?;
            let load = bucket.load();
            let live = (load.page_bytes() as f64).min(room);
            let part = (live / room * FILL_PARTS as f64) as usize;
            sum.pages[part.min(FILL_PARTS - 1)] += weight;
            sum.bytes += room * weight;
            sum.live += live * weight;
            sum.free += bucket.free_bytes() as f64 * weight;
        }
        let behind = walk::next_range(hash, bits);
        next = match hash.checked_add(stride) {
            Some(strided) => behind.map(|behind| behind.max(strided)),
            None => None,
        };
    }
    Ok(sum)
}
