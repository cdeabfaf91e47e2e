//! The steps by which the tree changes its shape. Each is complete in itself and changes nothing a user can see.
//!
//! Whoever needs a page changed that belongs to an older epoch copies it first, from the top down: root array,
//! directory page, bucket. Every function here does one step, or finds that none is needed; the caller looks for its way anew
//! after each.

use std::sync::atomic::Ordering::Relaxed;

use crate::core::Core;
use crate::error::Result;
use crate::page::bucket::{self, Load};
use crate::page::head::{HEAD_BYTES, Kind, PageHead, prefix_of};
use crate::page::reserve::Reserve;
use crate::shm::ways::Way;
use crate::storage::failpoint::crash_point;
use crate::transaction::step::{IN_SHM, Step};
use crate::transaction::writer::Writer;
use crate::types::{PageNo, Run};

use super::build;
use super::locate::{self, DirectoryRef, Path, Root};
use super::lookup;

/// A page is rebuilt rather than split while its live records take less than this share of it, in percent. Higher would
/// rebuild the same page over and over for little room each time; lower leaves the pages half empty when all records grow
/// (a million records that grow from 10 to 14 bytes: 33 MB with 75, 27 MB with 94, at the same speed).
const REBUILD_BELOW_PERCENT: usize = 94;

/// How full the pages of an overflow chain are made, in percent: a quarter page, the longest record, still fits.
const CHAIN_FILL_PERCENT: usize = 70;

/// Whether a step was done, so that the way must be looked for anew.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Progress {
    /// No step was needed.
    Ready,
    /// A step was done.
    Stepped,
    /// The tree may not grow deeper.
    AtCap,
}

fn whole_page(core: &Core, from: PageNo, to: PageNo, pages: u32) -> Result<()> {
    let source = core.run(from, pages)?;
    let target = core.run(to, pages)?;
    // SAFETY: both runs are mapped; the target is the step's own, the source changes only under the writer lock, which is
    // held. They overlap only if a damaged map says that pages of the tree are free.
    unsafe { std::ptr::copy(source, target, core.page_size * pages as usize) };
    Ok(())
}

fn set_identity(core: &Core, page: PageNo) -> Result<&PageHead> {
    let head = core.head(page)?;
    head.number.store(page.0, Relaxed);
    head.epoch.store(core.epoch().0, Relaxed);
    Ok(head)
}

pub fn store_root(step: &mut Step, root: Root) {
    let core = step.core();
    let place = core.shm.offset_of(&core.control().readers.root) | IN_SHM;
    step.store(place, 8, 1, root.to_word());
}

/// Makes the root array one of the present epoch.
pub fn own_array(writer: &mut Writer, path: &Path) -> Result<Progress> {
    let core = writer.core;
    let Some(depth) = path.root.depth else { return Ok(Progress::Ready) };
    let old = path.root.page;
    let head = core.head(old)?;
    if writer.owns(head) {
        return Ok(Progress::Ready);
    }
    let pages = locate::array_pages(core.page_size, depth);
    let made = head.epoch();
    let mut step = Step::begin(writer);
    let new = step.take(pages)?;
    whole_page(core, old, new, pages)?;
    set_identity(core, new)?;
    step.give(Run { first: old, len: pages }, made)?;
    store_root(&mut step, Root { page: new, depth: Some(depth) });
    crash_point("structure.copy.array");
    count(core, |counters| &counters.copies);
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Makes the directory page one of the present epoch.
pub fn own_directory(writer: &mut Writer, path: &Path) -> Result<Progress> {
    let core = writer.core;
    let Some((entry, _)) = path.directory else { return Ok(Progress::Ready) };
    let head = core.head(entry.page)?;
    if writer.owns(head) {
        return Ok(Progress::Ready);
    }
    if own_array(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let made = head.epoch();
    let mut step = Step::begin(writer);
    let new = step.take(1)?;
    whole_page(core, entry.page, new, 1)?;
    set_identity(core, new)?;
    step.give(Run { first: entry.page, len: 1 }, made)?;
    store_array(&mut step, path, 0, 1, DirectoryRef { page: new, ..entry });
    crash_point("structure.copy.directory");
    count(core, |counters| &counters.copies);
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Stores `entry` into part `part` of `parts` of the root array's range for the path's directory.
pub fn store_array(step: &mut Step, path: &Path, part: usize, parts: usize, entry: DirectoryRef) {
    let (old, _) = path.directory.expect("a root array has directories");
    store_directory(step, path, old.prefix_bits, part, parts, entry);
}

/// As [`store_array`], in the range of the leading `bits` bits.
pub fn store_directory(
    step: &mut Step,
    path: &Path,
    bits: u8,
    part: usize,
    parts: usize,
    entry: DirectoryRef,
) {
    let depth = path.root.depth.expect("a directory lies below a root array");
    let range = 1usize << (depth - bits);
    let first = path.array_index & !(range - 1);
    let len = range / parts;
    let place = step.core().place(path.root.page, locate::array_offset(first + part * len));
    step.store(place, 8, len as u32, entry.to_word());
}

/// Stores `bucket` into part `part` of `parts` of what refers to the path's bucket, which has `depth`.
pub fn store_bucket(
    step: &mut Step,
    path: &Path,
    depth: u8,
    part: usize,
    parts: usize,
    bucket: PageNo,
) {
    match path.directory {
        None => store_root(step, Root { page: bucket, depth: None }),
        Some((entry, index)) => {
            let range = 1usize << (path.entry_depth() - depth);
            let first = index & !(range - 1);
            let len = range / parts;
            let place = step.core().place(entry.page, locate::directory_offset(first + part * len));
            step.store(place, 4, len as u32, bucket.0 as u64);
        }
    }
}

/// Depth of the path's bucket, checked against what refers to it.
pub fn bucket_depth(core: &Core, path: &Path) -> Result<u8> {
    let depth = core.bucket(path.bucket)?.head().depth.load(Relaxed);
    let least = path.directory.map_or(0, |(entry, _)| entry.prefix_bits);
    if depth < least || depth > path.entry_depth() {
        return Err(core.corrupt(path.bucket, "a bucket's depth does not fit its directory"));
    }
    Ok(depth)
}

/// Gives up single pages.
pub fn give_pages(step: &mut Step, pages: &[PageNo]) -> Result<()> {
    for &page in pages {
        let made = step.core().head(page)?.epoch();
        step.give(Run { first: page, len: 1 }, made)?;
    }
    Ok(())
}

/// Makes every page of the bucket one of the present epoch, so that it may be changed in place.
pub fn own_bucket(writer: &mut Writer, path: &Path) -> Result<Progress> {
    let core = writer.core;
    let bucket = core.bucket(path.bucket)?;
    let head = bucket.head();
    if writer.owns(head) && head.next().is_none() {
        return Ok(Progress::Ready);
    }
    let chain = lookup::chain(core, path.bucket)?;
    let mut owned = true;
    for &page in &chain {
        owned &= writer.owns(core.head(page)?);
    }
    if owned {
        return Ok(Progress::Ready);
    }
    if own_directory(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let mostly_live = (head.dead.load(Relaxed) as usize) < bucket.record_room() / 4;
    if chain.len() > 1 || !mostly_live {
        let fill = if chain.len() > 1 { CHAIN_FILL_PERCENT } else { 100 };
        return rebuild(writer, path, &chain, fill, Load::default());
    }
    let depth = bucket_depth(core, path)?;
    let mut step = Step::begin(writer);
    let new = step.take(1)?;
    whole_page(core, path.bucket, new, 1)?;
    set_identity(core, new)?;
    step.give(Run { first: path.bucket, len: 1 }, head.epoch())?;
    store_bucket(&mut step, path, depth, 0, 1, new);
    crash_point("structure.copy.bucket");
    count(core, |counters| &counters.copies);
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Copies the live records of an overflow chain to as few pages as leave some room in each.
pub fn repack(writer: &mut Writer, path: &Path, chain: &[PageNo]) -> Result<Progress> {
    rebuild(writer, path, chain, CHAIN_FILL_PERCENT, Load::default())
}

/// Copies the live records of a bucket to new pages, leaving out the dead.
fn rebuild(
    writer: &mut Writer,
    path: &Path,
    chain: &[PageNo],
    fill_percent: usize,
    extra: Load,
) -> Result<Progress> {
    let core = writer.core;
    if own_directory(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let depth = bucket_depth(core, path)?;
    let prefix = core.head(path.bucket)?.prefix.load(Relaxed);
    let mut step = Step::begin(writer);
    let records = build::gather(core, chain)?;
    let new = build::build(&mut step, &records, depth, prefix, fill_percent, extra)?;
    give_pages(&mut step, chain)?;
    store_bucket(&mut step, path, depth, 0, 1, new);
    crash_point("structure.rebuild");
    count(core, |counters| &counters.compactions);
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Copies a bucket without its dead records to a new page, each record in the slot that it has: nothing is hashed or searched.
fn compact(writer: &mut Writer, path: &Path) -> Result<Progress> {
    let core = writer.core;
    if own_directory(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let depth = bucket_depth(core, path)?;
    let bucket = core.bucket(path.bucket)?;
    let made = bucket.head().epoch();
    let mut step = Step::begin(writer);
    let new = step.take(1)?;
    let target = core.page(new)?;
    // SAFETY: taken by this step: nobody else uses it.
    unsafe { bucket.compact_into(target) }.map_err(core.damage(path.bucket))?;
    set_identity(core, new)?;
    step.give(Run { first: path.bucket, len: 1 }, made)?;
    store_bucket(&mut step, path, depth, 0, 1, new);
    crash_point("structure.compact");
    count(core, |counters| &counters.compactions);
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Makes room for `extra` in the path's bucket: compacts it, splits it, or, where the tree may not grow deeper, adds an
/// overflow page. Room for a record that is not there yet leaves the reserve: a bucket is split that is fuller without its dead
/// records, but for an empty one, which no split makes emptier.
pub fn make_room(writer: &mut Writer, path: &Path, hash: u64, extra: Load) -> Result<Way> {
    let core = writer.core;
    let reserve = core.reserve();
    let chain = lookup::chain(core, path.bucket)?;
    let mut live = Load::default();
    for &page in &chain {
        live = live.plus(core.bucket(page)?.load());
    }
    let page_room = core.page_size - HEAD_BYTES;
    let with_extra = live.plus(extra).page_bytes() * 100;
    let leaves = if extra.records == 0 || live.records == 0 { Reserve::NONE } else { reserve };
    // Of a page that was just rebuilt the load is exact: if the record does not fit then, it never will.
    if chain.len() == 1
        && with_extra < page_room * leaves.share(REBUILD_BELOW_PERCENT)
        && bucket::fits(core.page_size, live.plus(extra), reserve, leaves)
    {
        let bucket = core.bucket(path.bucket)?;
        // The page keeps its groups, which may be too many for the records that it has now: compact only if that makes
        // room, and more than for once.
        let room = bucket.record_room();
        let enough = live.bytes + extra.bytes + leaves.of(room) + room / 16 <= room;
        let has_slots = extra.records == 0 || bucket.vacant_slot(hash).is_some();
        let done = if has_slots && enough {
            compact(writer, path)
        } else {
            rebuild(writer, path, &chain, 100, extra)
        };
        return done.map(|_| Way::Compacted);
    }
    if split(writer, path, hash, &chain, extra)? != Progress::AtCap {
        return Ok(Way::Split);
    }
    if chain.len() > 1 && live.page_bytes() * 100 < page_room * chain.len() * 50 {
        return rebuild(writer, path, &chain, CHAIN_FILL_PERCENT, extra).map(|_| Way::Compacted);
    }
    extend_chain(writer, path, extra).map(|()| Way::Split)
}

/// Makes room for an update of a record in some page of an overflow chain: splits the bucket if the tree may grow
/// deeper by now, else repacks the chain so that every page has some room.
pub fn make_room_in_chain(writer: &mut Writer, path: &Path, hash: u64, extra: Load) -> Result<Way> {
    let chain = lookup::chain(writer.core, path.bucket)?;
    if split(writer, path, hash, &chain, extra)? != Progress::AtCap {
        return Ok(Way::Split);
    }
    rebuild(writer, path, &chain, CHAIN_FILL_PERCENT, extra).map(|_| Way::Compacted)
}

/// Puts an empty page before an overflow chain.
fn extend_chain(writer: &mut Writer, path: &Path, extra: Load) -> Result<()> {
    let core = writer.core;
    if own_directory(writer, path)? == Progress::Stepped {
        return Ok(());
    }
    let depth = bucket_depth(core, path)?;
    let prefix = core.head(path.bucket)?.prefix.load(Relaxed);
    let mut step = Step::begin(writer);
    let new = build::build(&mut step, &[], depth, prefix, 100, extra)?;
    core.head(new)?.next.store(path.bucket.0, Relaxed);
    store_bucket(&mut step, path, depth, 0, 1, new);
    crash_point("structure.extend.chain");
    step.structure()
}

/// Splits the path's bucket, or does the one step that must come before.
fn split(
    writer: &mut Writer,
    path: &Path,
    hash: u64,
    chain: &[PageNo],
    extra: Load,
) -> Result<Progress> {
    let core = writer.core;
    let Some((entry, _)) = path.directory else { return make_root_array(writer, path) };
    let depth = bucket_depth(core, path)?;
    if depth == path.entry_depth() {
        return deepen_directory(writer, path, entry);
    }
    if own_directory(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let bit_of = |hash: u64| hash >> (63 - depth) & 1 == 1;
    let (upper, lower): (Vec<_>, Vec<_>) =
        build::gather(core, chain)?.into_iter().partition(|record| bit_of(record.hash));
    let mut step = Step::begin(writer);
    for (value, records) in [(false, lower), (true, upper)] {
        let prefix = prefix_of(hash, depth) | (value as u64) << (63 - depth);
        let extra = if value == bit_of(hash) { extra } else { Load::default() };
        let new = build::build(&mut step, &records, depth + 1, prefix, 100, extra)?;
        store_bucket(&mut step, path, depth, value as usize, 2, new);
        crash_point("structure.split.half");
    }
    give_pages(&mut step, chain)?;
    crash_point("structure.split");
    count(core, |counters| &counters.splits);
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Writes a new directory page whose entries are given by `entry_at`.
pub fn new_directory(
    step: &mut Step,
    prefix_bits: u8,
    index_bits: u8,
    prefix: u64,
    entry_at: impl Fn(usize) -> Result<PageNo>,
) -> Result<DirectoryRef> {
    let core = step.core();
    let number = step.take(1)?;
    let page = core.page(number)?;
    // SAFETY: taken by this step: nobody else uses it.
    unsafe {
        std::ptr::write_bytes(page, 0, core.page_size);
        PageHead::at(page).init(Kind::Directory, number, core.epoch(), prefix_bits, prefix);
        PageHead::at(page).groups.store(index_bits as u16, Relaxed);
    }
    for index in 0..1usize << index_bits {
        let bucket = entry_at(index)?;
        // SAFETY: within the page, as `max_index_bits` says.
        unsafe {
            page.add(locate::directory_offset(index)).cast::<u32>().write(bucket.0.to_le());
        }
    }
    Ok(DirectoryRef { page: number, prefix_bits, index_bits })
}

/// Writes a new root array.
pub fn new_array(
    step: &mut Step,
    depth: u8,
    directories: u32,
    entry_at: impl Fn(usize) -> Result<DirectoryRef>,
) -> Result<Root> {
    let core = step.core();
    let pages = locate::array_pages(core.page_size, depth);
    let number = step.take(pages)?;
    let array = core.run(number, pages)?;
    // SAFETY: taken by this step: nobody else uses it.
    unsafe {
        std::ptr::write_bytes(array, 0, core.page_size * pages as usize);
        let head = PageHead::at(array);
        head.init(Kind::RootArray, number, core.epoch(), depth, 0);
        head.run_pages.store(pages, Relaxed);
        head.occupied.store(directories, Relaxed);
    }
    for index in 0..1usize << depth {
        let entry = entry_at(index)?;
        // SAFETY: within the run, as `array_pages` says.
        unsafe {
            array.add(locate::array_offset(index)).cast::<u64>().write(entry.to_word().to_le());
        }
    }
    Ok(Root { page: number, depth: Some(depth) })
}

/// Puts a root array and a directory page above the only bucket.
fn make_root_array(writer: &mut Writer, path: &Path) -> Result<Progress> {
    let bucket = path.bucket;
    let mut step = Step::begin(writer);
    let directory = new_directory(&mut step, 0, 0, 0, |_| Ok(bucket))?;
    let root = new_array(&mut step, 0, 1, |_| Ok(directory))?;
    store_root(&mut step, root);
    crash_point("structure.root.array");
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Makes the directory of the path distinguish one more bit.
fn deepen_directory(writer: &mut Writer, path: &Path, entry: DirectoryRef) -> Result<Progress> {
    let core = writer.core;
    let old = entry.page;
    let prefix = core.head(old)?.prefix.load(Relaxed);
    if entry.index_bits < core.max_index_bits {
        if own_array(writer, path)? == Progress::Stepped {
            return Ok(Progress::Stepped);
        }
        let mut step = Step::begin(writer);
        let new =
            new_directory(&mut step, entry.prefix_bits, entry.index_bits + 1, prefix, |index| {
                locate::directory_entry(core, old, index / 2)
            })?;
        give_pages(&mut step, &[old])?;
        store_array(&mut step, path, 0, 1, new);
        crash_point("structure.directory.double");
        step.structure()?;
        return Ok(Progress::Stepped);
    }
    let depth = path.root.depth.expect("a directory lies below a root array");
    if entry.prefix_bits == depth {
        return double_array(writer, path, depth);
    }
    if own_array(writer, path)? == Progress::Stepped {
        return Ok(Progress::Stepped);
    }
    let directories = core.head(path.root.page)?.occupied.load(Relaxed).min(u32::MAX - 1);
    let mut step = Step::begin(writer);
    let half_len = 1usize << (entry.index_bits - 1);
    for half in 0..2 {
        let prefix = prefix | (half as u64) << (63 - entry.prefix_bits);
        let new = new_directory(
            &mut step,
            entry.prefix_bits + 1,
            entry.index_bits - 1,
            prefix,
            |index| locate::directory_entry(core, old, half * half_len + index),
        )?;
        store_array(&mut step, path, half, 2, new);
    }
    give_pages(&mut step, &[old])?;
    let place = core.place(path.root.page, std::mem::offset_of!(PageHead, occupied));
    step.store(place, 4, 1, directories as u64 + 1);
    crash_point("structure.directory.split");
    step.structure()?;
    Ok(Progress::Stepped)
}

/// Doubles the root array, unless its directories are too few to justify it (equal hashes, or an attack).
fn double_array(writer: &mut Writer, path: &Path, depth: u8) -> Result<Progress> {
    let core = writer.core;
    let old = path.root.page;
    let head = core.head(old)?;
    // A damaged number must not let the array grow without bound.
    let file_pages = core.control().readers.file_pages.load(Relaxed);
    let directories = head.occupied.load(Relaxed).min(file_pages);
    if depth >= locate::MAX_ROOT_DEPTH || 2u64 << depth > 4 * directories as u64 + 64 {
        return Ok(Progress::AtCap);
    }
    let made = head.epoch();
    let mut step = Step::begin(writer);
    let root = new_array(&mut step, depth + 1, directories, |index| {
        locate::array_entry(core, old, depth, index / 2)
    })?;
    let len = locate::array_pages(core.page_size, depth);
    step.give(Run { first: old, len }, made)?;
    store_root(&mut step, root);
    crash_point("structure.root.double");
    step.structure()?;
    Ok(Progress::Stepped)
}

fn count(
    core: &Core,
    which: impl Fn(&crate::shm::layout::CounterWords) -> &std::sync::atomic::AtomicU64,
) {
    let counter = which(&core.control().counters);
    counter.store(counter.load(Relaxed) + 1, Relaxed);
}
