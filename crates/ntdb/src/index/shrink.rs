//! The steps by which the tree becomes smaller: the ways back of those in [`super::structure`].
//!
//! A bucket and its buddy, the other half of the range that was split, become one when both together are well below what a
//! page holds, so that a growing load does not split them at once again. Then a directory that no longer needs its last bit is
//! halved, two directories that fit into half a page become one, an array that no longer needs its last bit is halved, and
//! a bucket that is alone needs neither. A join is the reverse of a split for everybody who walks over ranges of hashes.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::core::Core;
use crate::error::Result;
use crate::options::deadline_after;
use crate::page::bucket::{Bucket, Load};
use crate::page::head::{HEAD_BYTES, PageHead, prefix_of};
use crate::storage::failpoint::crash_point;
use crate::transaction::claim;
use crate::transaction::step::Step;
use crate::transaction::writer::Writer;
use crate::types::Run;

use super::build;
use super::locate::{self, DirectoryRef, Path, Root};
use super::lookup;
use super::structure::{self, Progress};
use super::walk;

/// Buckets are joined when their records take at most this share of a page (without the reserve), in percent. They are split again at 94, so a load that
/// goes up and down a little does not do both in turn; the more they are joined, the fuller is a tree from which records come and go.
const JOIN_PERCENT: usize = 75;
/// As [`JOIN_PERCENT`], where the tree is to be small and not to be changed much.
const TIGHT_PERCENT: usize = 94;
/// A chain is rebuilt when its records take at most this share of its pages.
const CHAIN_PERCENT: usize = 25;
/// Most steps after one operation, of some microseconds each. Usually there are one or two; but when the last record of many with
/// equal hashes goes, some for each bit of the hash, and nobody would come by later to do what was left.
const STEPS: u32 = 256;

/// Whether a bucket from which a record of `len` bytes was deleted just now is worth a look at its buddy. It is from time to
/// time on the bucket's way to emptiness, so that a sparse bucket with a full buddy does not cost a look at every delete.
#[inline]
pub fn is_worth_a_look(bucket: &Bucket, len: usize) -> bool {
    let live = bucket.live_bytes();
    let level = (bucket.record_room() / 16).max(1);
    // To rebuild a chain is dear.
    let most = if bucket.head().next().is_none() { 7 } else { 4 };
    live <= most * level && (live == 0 || live / level != (live + len) / level)
}

/// Makes the tree smaller around `hash`, as far as it can be. Changes nothing a user can see.
pub fn shrink(writer: &mut Writer, hash: u64) -> Result<()> {
    shrink_to(writer, hash, JOIN_PERCENT).map(drop)
}

/// As [`shrink`], for the range of one bucket after the other, and with pages that are as full as they should be for good. Lets the
/// writer lock go between them. `progress` hears which share is done.
pub fn tighten(core: &Core, limit: Option<Duration>, progress: &mut dyn FnMut(f64)) -> Result<()> {
    let mut next = Some(0);
    while let Some(hash) = next {
        let mut writer = claim::lock_between(core, deadline_after(limit))?;
        if shrink_to(&mut writer, hash, TIGHT_PERCENT)? {
            crash_point("compact.joined");
        }
        let head = locate::bucket_page(core, writer.root(), hash)?;
        next = walk::next_range(hash, lookup::bucket_bits(core, head, hash)?);
        drop(writer);
        progress(next.map_or(1.0, |next| next as f64 / u64::MAX as f64));
    }
    Ok(())
}

/// Says whether there was anything to do.
fn shrink_to(writer: &mut Writer, hash: u64, percent: usize) -> Result<bool> {
    let core = writer.core;
    for step in 0..STEPS {
        let path = locate::path(core, writer.root(), hash)?;
        let done = join_buckets(writer, &path, hash, percent)? == Progress::Stepped
            || shrink_directories(writer, &path, hash)? == Progress::Stepped;
        if !done {
            return Ok(step > 0);
        }
    }
    Ok(true)
}

fn join_buckets(writer: &mut Writer, path: &Path, hash: u64, percent: usize) -> Result<Progress> {
    let core = writer.core;
    let room = core.page_size - HEAD_BYTES;
    let chain = lookup::chain(core, path.bucket)?;
    let mut live = Load::default();
    for &page in &chain {
        live = live.plus(core.bucket(page)?.load());
    }
    if chain.len() > 1 {
        if live.page_bytes() * 100 > room * chain.len() * CHAIN_PERCENT {
            return Ok(Progress::Ready);
        }
        return structure::repack(writer, path, &chain);
    }
    let Some((entry, _)) = path.directory else { return Ok(Progress::Ready) };
    let depth = structure::bucket_depth(core, path)?;
    // The buddy of a whole directory's bucket is in another directory.
    if depth <= entry.prefix_bits || live.page_bytes() * 100 > room * core.reserve().share(percent)
    {
        return Ok(Progress::Ready);
    }
    let other_hash = hash ^ 1 << (64 - depth);
    let other = locate::directory_entry(core, entry.page, entry.index(other_hash))?;
    let bucket = core.bucket(other)?;
    if lookup::bucket_bits(core, other, other_hash)? != depth || !bucket.head().next().is_none() {
        return Ok(Progress::Ready);
    }
    live = live.plus(bucket.load());
    if live.page_bytes() * 100 > room * core.reserve().share(percent) {
        return Ok(Progress::Ready);
    }
    if structure::own_directory(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let pages = [path.bucket, other];
    let mut step = Step::begin(writer);
    let records = build::gather(core, &pages)?;
    let prefix = prefix_of(hash, depth - 1);
    let new = build::build(&mut step, &records, depth - 1, prefix, 100, Load::default())?;
    structure::give_pages(&mut step, &pages)?;
    structure::store_bucket(&mut step, path, depth - 1, 0, 1, new);
    crash_point("structure.join");
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Makes directories or the array smaller, or does the one step that must come before.
fn shrink_directories(writer: &mut Writer, path: &Path, hash: u64) -> Result<Progress> {
    let Some((entry, _)) = path.directory else { return Ok(Progress::Ready) };
    let core = writer.core;
    let depth = path.root.depth.expect("a directory lies below a root array");
    let is_deepest = structure::bucket_depth(core, path)? == path.entry_depth();
    if entry.index_bits > 0 && !is_deepest && has_pairs(core, entry)? {
        return halve_directory(writer, path, entry);
    }
    if entry.prefix_bits > 0 && join_directories(writer, path, entry, hash)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    if entry.prefix_bits < depth {
        return halve_array(writer, path, depth);
    }
    if depth == 0 && entry.index_bits == 0 {
        return collapse(writer, path, entry);
    }
    Ok(Progress::Ready)
}

/// Whether a directory's entries are the same two by two.
fn has_pairs(core: &Core, entry: DirectoryRef) -> Result<bool> {
    for index in (0..1usize << entry.index_bits).step_by(2) {
        let pair = locate::directory_entry(core, entry.page, index)?;
        if locate::directory_entry(core, entry.page, index + 1)? != pair {
            return Ok(false);
        }
    }
    Ok(true)
}

fn halve_directory(writer: &mut Writer, path: &Path, entry: DirectoryRef) -> Result<Progress> {
    let core = writer.core;
    if structure::own_array(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let old = entry.page;
    let prefix = core.head(old)?.prefix.load(Relaxed);
    let mut step = Step::begin(writer);
    let new = structure::new_directory(
        &mut step,
        entry.prefix_bits,
        entry.index_bits - 1,
        prefix,
        |index| locate::directory_entry(core, old, index * 2),
    )?;
    structure::give_pages(&mut step, &[old])?;
    structure::store_array(&mut step, path, 0, 1, new);
    crash_point("structure.directory.halve");
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Puts one directory in place of two, if it has room for twice as much.
fn join_directories(
    writer: &mut Writer,
    path: &Path,
    entry: DirectoryRef,
    hash: u64,
) -> Result<Progress> {
    let core = writer.core;
    let bit = 1u64 << (64 - entry.prefix_bits);
    let other_hash = hash ^ bit;
    let other_path = locate::path(core, path.root, other_hash)?;
    let Some((other, _)) = other_path.directory else { return Ok(Progress::Ready) };
    if other.prefix_bits != entry.prefix_bits || other.page == entry.page {
        return Ok(Progress::Ready);
    }
    if other.index_bits > 0 && has_pairs(core, other)? {
        // The half of a split in which there has never been anything.
        return halve_directory(writer, &other_path, other);
    }
    let index_bits = entry.index_bits.max(other.index_bits) + 1;
    if index_bits >= core.max_index_bits {
        return Ok(Progress::Ready);
    }
    if structure::own_array(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let directories = core.head(path.root.page)?.occupied.load(Relaxed);
    let (lower, upper) = if hash & bit == 0 { (entry, other) } else { (other, entry) };
    let prefix_bits = entry.prefix_bits - 1;
    let half = 1usize << (index_bits - 1);
    let mut step = Step::begin(writer);
    let new = structure::new_directory(
        &mut step,
        prefix_bits,
        index_bits,
        prefix_of(hash, prefix_bits),
        |index| {
            let (from, index) = if index < half { (lower, index) } else { (upper, index - half) };
            locate::directory_entry(core, from.page, index >> (index_bits - 1 - from.index_bits))
        },
    )?;
    structure::give_pages(&mut step, &[entry.page, other.page])?;
    structure::store_directory(&mut step, path, prefix_bits, 0, 1, new);
    let place = core.place(path.root.page, std::mem::offset_of!(PageHead, occupied));
    step.store(place, 4, 1, directories.saturating_sub(1).max(1) as u64);
    crash_point("structure.directory.join");
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Halves the array, if no directory needs its last bit.
fn halve_array(writer: &mut Writer, path: &Path, depth: u8) -> Result<Progress> {
    let core = writer.core;
    let old = path.root.page;
    for index in 0..1usize << depth {
        if locate::array_entry(core, old, depth, index)?.prefix_bits == depth {
            return Ok(Progress::Ready);
        }
    }
    let head = core.head(old)?;
    let (made, directories) = (head.epoch(), head.occupied.load(Relaxed));
    let mut step = Step::begin(writer);
    let root = structure::new_array(&mut step, depth - 1, directories, |index| {
        locate::array_entry(core, old, depth, index * 2)
    })?;
    let len = locate::array_pages(core.page_size, depth);
    step.give(Run { first: old, len }, made)?;
    structure::store_root(&mut step, root);
    crash_point("structure.root.halve");
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Lets the root word name the only bucket.
fn collapse(writer: &mut Writer, path: &Path, entry: DirectoryRef) -> Result<Progress> {
    let core = writer.core;
    let array = path.root.page;
    let made = core.head(array)?.epoch();
    let mut step = Step::begin(writer);
    structure::give_pages(&mut step, &[entry.page])?;
    let len = locate::array_pages(core.page_size, 0);
    step.give(Run { first: array, len }, made)?;
    structure::store_root(&mut step, Root { page: path.bucket, depth: None });
    crash_point("structure.root.collapse");
    step.structure()?;
    Ok(Progress::Stepped)
}
