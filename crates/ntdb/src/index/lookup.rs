//! Finding one record.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use crate::core::Core;
use crate::error::Result;
use crate::limits::SHORT_KEY;
use crate::page::bucket::{Bucket, Found, Short};
use crate::page::head::prefix_of;
use crate::types::PageNo;

use super::locate::{self, DirectoryRef, Root};

#[inline(always)]
fn root_word(core: &Core) -> u64 {
    core.control().readers.root.load(Acquire)
}

/// The current root.
#[inline]
pub fn current_root(core: &Core) -> Root {
    Root::from_word(core.control().readers.root.load(Acquire))
}

/// The value of `key` in the current tree. The caller holds a pin, or the writer lock.
pub fn find_value<'a>(core: &'a Core, hash: u64, key: &[u8]) -> Result<Option<&'a [u8]>> {
    match find_quickly(core, hash, key) {
        Some(found) => Ok(found),
        None => find_value_slowly(core, hash, key),
    }
}

/// The value of `key` below the private root of a transaction, whose tree nobody else changes.
pub fn find_value_below<'a>(
    core: &'a Core,
    root: Root,
    hash: u64,
    key: &[u8],
) -> Result<Option<&'a [u8]>> {
    if key.len() < SHORT_KEY
        && let Some((_, bucket)) = quick_bucket_below(core, root, true, hash)
    {
        match bucket.find_short(hash, key) {
            Short::Found { value, len, .. } => {
                // SAFETY: within the page, which is not re-used while the transaction is open.
                return Ok(Some(unsafe { std::slice::from_raw_parts(value, len) }));
            }
            Short::Absent => return Ok(None),
            Short::Unusual => {}
        }
    }
    let page = locate::bucket_page(core, root, hash)?;
    match find_in_chain(core, page, hash, key)? {
        Some((_, _, found)) => core.value_of(&found.record).map(Some),
        None => Ok(None),
    }
}

/// As [`find_value`]; `None` if that would not be quick.
#[inline(always)]
pub fn find_quickly<'a>(core: &'a Core, hash: u64, key: &[u8]) -> Option<Option<&'a [u8]>> {
    match quick(core, hash, key) {
        Short::Found { value, len, .. } => {
            // SAFETY: within the page, and published bytes don't change; the caller's pin keeps the page from being re-used.
            Some(Some(unsafe { std::slice::from_raw_parts(value, len) }))
        }
        Short::Absent => Some(None),
        Short::Unusual => None,
    }
}

/// The short cut for short records in verified pages: nothing here can fail, and whatever is out of the ordinary is left to the
/// slow way, which also names what is wrong.
#[inline(always)]
fn quick(core: &Core, hash: u64, key: &[u8]) -> Short {
    if key.len() >= SHORT_KEY {
        return Short::Unusual;
    }
    match quick_bucket(core, hash) {
        Some((_, bucket)) => bucket.find_short(hash, key),
        None => Short::Unusual,
    }
}

/// The bucket for `hash`, if all pages on the way are verified and it has no overflow pages. The caller holds a pin, or the writer
/// lock.
#[inline(always)]
pub fn quick_bucket(core: &Core, hash: u64) -> Option<(PageNo, Bucket<'_>)> {
    let page = quick_page(core, root_word(core), false, hash)?;
    // Its state says that it has no overflow pages.
    Some((page, core.quick_bucket(page)?))
}

/// As [`quick_bucket`], below another root: one of which the caller knows that its array is within the file, if `is_known`.
#[inline(always)]
pub fn quick_bucket_below(
    core: &Core,
    root: Root,
    is_known: bool,
    hash: u64,
) -> Option<(PageNo, Bucket<'_>)> {
    let page = quick_page(core, root.to_word(), is_known, hash)?;
    Some((page, core.quick_bucket(page)?))
}

/// Starts to fetch what an operation on `hash` will need. Reads words of the index only, whoever may be changing them: it is a
/// guess, and the caller needs neither pin nor lock.
#[inline]
pub fn prefetch(core: &Core, hash: u64) {
    if let Some(page) = quick_page(core, root_word(core), false, hash)
        && let Some(bucket) = core.quick_bucket(page)
    {
        bucket.prefetch(hash);
    }
}

/// The page of the bucket for `hash`, if the root array is known and the directory verified.
#[inline(always)]
fn quick_page(core: &Core, root_word: u64, is_known: bool, hash: u64) -> Option<PageNo> {
    let root = Root::from_word(root_word);
    let mut page = root.page;
    if let Some(depth) = root.depth {
        let array =
            if is_known { core.quick_page(page)? } else { core.known_array(root_word, page)? };
        let index = locate::leading(hash, depth & 63);
        // SAFETY: the array is known to lie within the mapping, for every index of this depth; its words are atomics to everybody.
        let entry = unsafe { &*array.add(locate::array_offset(index)).cast::<AtomicU64>() };
        let entry = DirectoryRef::from_word(u64::from_le(entry.load(Acquire)));
        if entry.index_bits > core.max_index_bits || entry.prefix_bits > 63 {
            return None;
        }
        let offset = locate::directory_offset(entry.index(hash));
        let directory = core.quick_page(entry.page)?;
        // SAFETY: within the mapped page, since the entry has few enough index bits; atomics to everybody.
        let bucket = unsafe { &*directory.add(offset).cast::<AtomicU32>() };
        page = PageNo(u32::from_le(bucket.load(Acquire)));
    }
    Some(page)
}

#[inline(never)]
fn find_value_slowly<'a>(core: &'a Core, hash: u64, key: &[u8]) -> Result<Option<&'a [u8]>> {
    let root = current_root(core);
    let page = locate::bucket_page(core, root, hash)?;
    know_array(core, root);
    match find_in_chain(core, page, hash, key)? {
        Some((_, _, found)) => core.value_of(&found.record).map(Some),
        None => Ok(None),
    }
}

/// Remembers the root array, so that the next search is quick; damage is for those who come to it.
pub fn know_array(core: &Core, root: Root) {
    if let Some(depth) = root.depth
        && !core.knows_array(root.to_word())
        && locate::check_array(core, root.page, depth).is_ok()
        && core.run(root.page, locate::array_pages(core.page_size, depth)).is_ok()
    {
        core.set_known_array(root.to_word());
    }
}

/// Finds `key` in the bucket that begins at `page`, overflow pages included.
#[inline(always)]
pub fn find_in_chain<'a>(
    core: &'a Core,
    page: PageNo,
    hash: u64,
    key: &[u8],
) -> Result<Option<(PageNo, Bucket<'a>, Found)>> {
    let bucket = core.bucket(page)?;
    if key.len() < SHORT_KEY {
        match bucket.find_short(hash, key) {
            Short::Found { slot, offset, .. } => {
                let record = bucket.record_at(offset).map_err(core.damage(page))?;
                return Ok(Some((page, bucket, Found { slot, record })));
            }
            Short::Absent if bucket.head().next().is_none() => return Ok(None),
            _ => {}
        }
    }
    let found = bucket.find(hash, core.damage(page), |record| core.is_key(record, hash, key))?;
    match found {
        Some(found) => Ok(Some((page, bucket, found))),
        None if bucket.head().next().is_none() => Ok(None),
        None => find_in_overflow(core, page, bucket.head().next(), hash, key),
    }
}

#[cold]
fn find_in_overflow<'a>(
    core: &'a Core,
    head: PageNo,
    first: PageNo,
    hash: u64,
    key: &[u8],
) -> Result<Option<(PageNo, Bucket<'a>, Found)>> {
    let mut page = first;
    let mut steps = 0u32;
    while !page.is_none() {
        let bucket = core.bucket(page)?;
        let found =
            bucket.find(hash, core.damage(page), |record| core.is_key(record, hash, key))?;
        if let Some(found) = found {
            return Ok(Some((page, bucket, found)));
        }
        page = bucket.head().next();
        steps = check_chain_step(core, head, steps)?;
    }
    Ok(None)
}

/// Counts a step along an overflow chain; an error if the chain is longer than the file.
pub fn check_chain_step(core: &Core, head: PageNo, steps: u32) -> Result<u32> {
    if steps >= core.control().readers.file_pages.load(Acquire) {
        return Err(core.corrupt(head, "its overflow chain is a circle"));
    }
    Ok(steps + 1)
}

/// All pages of the bucket that begins at `head`.
pub fn chain(core: &Core, head: PageNo) -> Result<Vec<PageNo>> {
    let first = core.bucket(head)?.head();
    let (depth, prefix) = (first.depth.load(Relaxed), first.prefix.load(Relaxed));
    let mut pages = Vec::new();
    let mut page = head;
    let mut steps = 0;
    while !page.is_none() {
        pages.push(page);
        let bucket_head = core.bucket(page)?.head();
        // So that no page is part of two chains, however the pages were forged.
        if bucket_head.depth.load(Relaxed) != depth || bucket_head.prefix.load(Relaxed) != prefix {
            return Err(core.corrupt(page, "an overflow page belongs to another bucket"));
        }
        page = bucket_head.next();
        steps = check_chain_step(core, head, steps)?;
    }
    Ok(pages)
}

/// Leading hash bits that the bucket at `head`, found on the way to `hash`, stands for. A bucket that says that it stands
/// for other hashes is refused, so that a walk visits every page once at most, however the pages were forged.
pub fn bucket_bits(core: &Core, head: PageNo, hash: u64) -> Result<u8> {
    let bucket_head = core.bucket(head)?.head();
    let depth = bucket_head.depth.load(Relaxed);
    if depth > 64 || bucket_head.prefix.load(Relaxed) != prefix_of(hash, depth) {
        return Err(core.corrupt(head, "a bucket stands for other hashes than lead to it"));
    }
    Ok(depth)
}
