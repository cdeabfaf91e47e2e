//! Put, delete, append and clear, under the writer lock.
//!
//! Each first makes the bucket fit for its change by structure steps, looking for its way anew after each, and then does
//! one data step. A condition that fails changes and logs nothing.

use std::sync::atomic::Ordering::Relaxed;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::index::locate::{self, Path, Root};
use crate::index::structure::{self, Progress};
use crate::index::{discard, lookup, shrink, walk};
use crate::limits::{self, SHORT_KEY, SHORT_VALUE};
use crate::log::record::Op;
use crate::page::bucket::{Bucket, Builder, Found, Load, Short, groups_for};
use crate::page::head::HEAD_BYTES;
use crate::page::record::{self, EXTENT_BYTES, Extent, Form, Record};
use crate::page::reserve::Reserve;
use crate::page::tags::{EMPTY, tag_of};
use crate::shm::ways::Way;
use crate::storage::failpoint::crash_point;
use crate::types::{Lsn, PageNo, Run};

use super::record::{LogRecord, Unplaced};
use super::step::{IN_SHM, Step};
use super::writer::Writer;

/// When a put is to happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// Always.
    Any,
    /// If the key is absent.
    Absent,
    /// If the key is present.
    Present,
}

impl Condition {
    /// Whether it holds.
    pub fn holds(self, present: bool) -> bool {
        match self {
            Condition::Any => true,
            Condition::Absent => !present,
            Condition::Present => present,
        }
    }
}

/// Longest record that lies in a bucket page as a whole.
pub fn inline_max(page_size: usize) -> usize {
    (page_size - HEAD_BYTES) / 4
}

/// How a record is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// Key and value in the page.
    Inline,
    /// Value in an extent.
    LongValue,
    /// Key and value in an extent.
    LongKey,
}

/// How a record of these lengths is stored, and how many bytes of the page it takes.
pub fn layout(page_size: usize, key_len: usize, value_len: u64) -> (Layout, usize) {
    let most = inline_max(page_size);
    if value_len < most as u64 {
        let len = record::inline_len(key_len, value_len as usize);
        if len <= most {
            return (Layout::Inline, len);
        }
    }
    let long_value = long_len(Layout::LongValue, key_len, value_len);
    if long_value <= most {
        (Layout::LongValue, long_value)
    } else {
        (Layout::LongKey, long_len(Layout::LongKey, key_len, value_len))
    }
}

/// Bytes of the page that a record with an extent takes.
fn long_len(layout: Layout, key_len: usize, value_len: u64) -> usize {
    let lengths = record::varint_len((key_len as u64) << 2) + record::varint_len(value_len);
    let key = if layout == Layout::LongKey { 8 } else { key_len };
    lengths + key + EXTENT_BYTES
}

/// Checks lengths against the limits.
pub fn check_lengths(core: &Core, key_len: usize, value_len: u64) -> Result<()> {
    let too_long =
        |what, len, limit| Err(Error::TooLong { path: core.path.clone(), what, len, limit });
    if key_len as u64 > limits::MAX_KEY_BYTES {
        return too_long("key", key_len as u64, limits::MAX_KEY_BYTES);
    }
    if value_len > limits::MAX_VALUE_BYTES {
        return too_long("value", value_len, limits::MAX_VALUE_BYTES);
    }
    Ok(())
}

/// Pages of an extent that has just `bytes`.
fn pages_of(core: &Core, bytes: u64) -> Result<u32> {
    u32::try_from(bytes.div_ceil(core.page_size as u64).max(1)).map_err(|_| Error::TooLong {
        path: core.path.clone(),
        what: "value",
        len: bytes,
        limit: limits::MAX_VALUE_BYTES,
    })
}

/// Pages of an extent for `bytes`: with the reserve around them, and room for so much growth at least. (A file that is so large that
/// it cannot have that, gets what is needed.)
pub fn extent_pages(core: &Core, bytes: u64, growth: u64) -> Result<u32> {
    let room = core.reserve().around(bytes).max(bytes.saturating_add(growth));
    pages_of(core, room).or_else(|_| pages_of(core, bytes))
}

/// In a transaction a value gets more pages where it is, if those behind it are free: one for so many that it has,
const GROWTH_PART: u32 = 8;
/// at least so many,
const GROWTH_PAGES_MIN: u32 = 2;
/// at most so many.
const GROWTH_PAGES_MAX: u32 = 256;

/// Values from this length on get less room when a transaction has to copy them.
const LARGE_BYTES: u64 = 1 << 20;

type Present<'a> = Option<(PageNo, Bucket<'a>, Found)>;

/// Finds the key on the way to its bucket.
#[inline(always)]
fn look<'a>(core: &'a Core, root: Root, hash: u64, key: &[u8]) -> Result<(Path, Present<'a>)> {
    let path = locate::path(core, root, hash)?;
    let present = lookup::find_in_chain(core, path.bucket, hash, key)?;
    Ok((path, present))
}

/// What an insert leaves of a bucket for updates: nothing of an empty one, or of an overflow chain.
fn leaves(core: &Core, bucket: &Bucket) -> usize {
    if bucket.live_bytes() == 0 || !bucket.head().next().is_none() {
        return 0;
    }
    core.reserve().of(bucket.record_room())
}

/// Makes the bucket fit for a record of `len` bytes: does a step towards that and says which, after which the way must be looked
/// for anew; `None` if it is fit.
fn make_ready(
    writer: &mut Writer,
    path: &Path,
    hash: u64,
    present: &Present,
    len: usize,
) -> Result<Option<Way>> {
    let core = writer.core;
    if structure::own_bucket(writer, path)? == Progress::Stepped {
        return Ok(Some(Way::Copied));
    }
    let bucket = match present {
        Some((_, bucket, _)) => *bucket,
        None => core.bucket(path.bucket)?,
    };
    let (has_slot, leaves) = match present {
        Some(_) => (true, 0),
        None => (bucket.vacant_slot(hash).is_some(), leaves(core, &bucket)),
    };
    if has_slot && bucket.free_bytes() >= len + leaves {
        return Ok(None);
    }
    let extra = Load { records: present.is_none() as usize, bytes: len };
    let in_chain = present
        .as_ref()
        .is_some_and(|(page, bucket, _)| *page != path.bucket || !bucket.head().next().is_none());
    let way = if in_chain {
        structure::make_room_in_chain(writer, path, hash, extra)?
    } else {
        structure::make_room(writer, path, hash, extra)?
    };
    Ok(Some(way))
}

/// A page is written anew for one record if that makes room for one part in so many of it.
const REPLACE_GAIN: usize = 16;

/// Whether a record of `len` bytes that lies in the page as a whole may come in place of the present one, in a page that is full but
/// for what is dead and for the present one. In a transaction nobody else can see the page, so it need not hold both. Pages of records
/// that grow become fuller by that.
fn fits_in_place(writer: &Writer, path: &Path, present: &Present, len: usize) -> bool {
    let Some((page, bucket, found)) = present else { return false };
    if !writer.is_private() || bucket.free_bytes() >= len {
        return false;
    }
    let (head, old_len, room) = (bucket.head(), found.record.len, bucket.record_room());
    writer.owns(head)
        && *page == path.bucket
        && head.next().is_none()
        && found.record.form == Form::Inline
        && head.dead.load(Relaxed) as usize + old_len >= room / REPLACE_GAIN
        && bucket.live_bytes() + len <= room + old_len
}

/// Puts the record `bytes` in place of the present one, after [`fits_in_place`], which goes by hints. `false` if it does not fit; then
/// nothing has happened.
fn replace_in_place(writer: &mut Writer, present: &Present, bytes: &[u8]) -> Result<bool> {
    let core = writer.core;
    let (Some(private), Some((page, bucket, found))) = (writer.private_tree(), present) else {
        return Ok(false);
    };
    // SAFETY: the page is the transaction's alone, and the transaction is at this.
    let done = unsafe { bucket.replace_compacting(found.slot, bytes, &mut private.room) }
        .map_err(core.damage(*page))?;
    if done {
        private.updates.count(Way::Compacted);
    }
    Ok(done)
}

/// Puts a record that lies in the page as a whole in place of the present one, if [`fits_in_place`]. `way` tells what it took, done or
/// not.
fn put_in_place(
    writer: &mut Writer,
    hash: u64,
    key: &[u8],
    value: &[u8],
    len: usize,
    scratch: &mut Vec<u8>,
    way: &mut Way,
) -> Result<bool> {
    let core = writer.core;
    let mut steps = Steps::default();
    loop {
        steps.count(core)?;
        let (path, present) = look(core, writer.root(), hash, key)?;
        if present.is_none() {
            return Ok(false);
        }
        if structure::own_bucket(writer, &path)? == Progress::Stepped {
            *way = Way::Copied;
            continue;
        }
        if !fits_in_place(writer, &path, &present, len) {
            return Ok(false);
        }
        scratch.clear();
        record::encode_inline(scratch, key, &[value]);
        return replace_in_place(writer, &present, scratch);
    }
}

/// Takes an extent of `pages` pages and fills it with `parts`.
fn fill_extent(step: &mut Step, pages: u32, parts: &[&[u8]]) -> Result<Extent> {
    let core = step.core();
    let first = step.take_for_value(pages)?;
    let mut at = core.run(first, pages)?;
    let mut crc = 0;
    for part in parts {
        // SAFETY: the run holds all parts, as the caller computed, and only this step uses it. (An old value may lie there
        // if a damaged map says that its pages are free.)
        unsafe {
            std::ptr::copy(part.as_ptr(), at, part.len());
            at = at.add(part.len());
        }
        crc = crc32c::crc32c_append(crc, part);
    }
    crash_point("extent.filled");
    Ok(Extent { first, pages, crc, epoch: core.epoch() })
}

/// Writes the encoded record into the bucket and carries the step out; an update went this `way` so far.
fn publish(
    mut step: Step,
    path: &Path,
    hash: u64,
    present: &Present,
    way: Way,
    bytes: &[u8],
    log: &mut LogRecord,
) -> Result<Lsn> {
    let core = step.core();
    let mut count = step.count();
    let (page, bucket) = match present {
        Some((page, bucket, _)) => (*page, *bucket),
        None => (path.bucket, core.bucket(path.bucket)?),
    };
    let offset = bucket.write_record(bytes).map_err(core.damage(page))?;
    crash_point("slot.record.written");
    let head = bucket.head();
    match present {
        Some((_, _, found)) => {
            head.count_dead(found.record.len);
            step.store(core.place(page, bucket.offset_place(found.slot)), 2, 1, offset as u64);
            step.count_update(way);
        }
        None => {
            let slot = bucket
                .vacant_slot(hash)
                .ok_or_else(|| core.corrupt(page, "a free slot has vanished"))?;
            if bucket.is_empty_slot(slot) {
                head.count_occupied();
            }
            step.store(core.place(page, bucket.offset_place(slot)), 2, 1, offset as u64);
            step.store(core.place(page, bucket.tag_place(slot)), 1, 1, tag_of(hash) as u64);
            count = count.saturating_add(1);
        }
    }
    step.data(log, count)
}

/// Gives up the extent of a record that is replaced.
fn give_extent(step: &mut Step, record: &Record) -> Result<()> {
    if let Some(extent) = record.extent() {
        step.give_value(Run { first: extent.first, len: extent.pages }, extent.epoch)?;
    }
    Ok(())
}

/// Encodes a record whose extent is filled.
fn encode_long(
    out: &mut Vec<u8>,
    layout: Layout,
    key: &[u8],
    hash: u64,
    value_len: u64,
    extent: &Extent,
) {
    match layout {
        Layout::LongKey => {
            record::encode_long_key(out, key.len() as u64, hash, value_len, extent);
        }
        _ => record::encode_long_value(out, key, value_len, extent),
    }
}

/// The usual put: a short record into a bucket of this epoch that has room for it. `None` if anything is otherwise; then nothing
/// has happened.
#[inline(always)]
pub fn put_quickly(
    writer: &mut Writer,
    hash: u64,
    key: &[u8],
    value: &[u8],
    condition: Condition,
    log: Unplaced<'_>,
) -> Option<Option<Lsn>> {
    if key.len() >= SHORT_KEY || value.len() >= SHORT_VALUE {
        return None;
    }
    let core = writer.core;
    let (page, bucket) =
        lookup::quick_bucket_below(core, writer.root(), writer.is_private(), hash)?;
    let head = bucket.head();
    if !writer.owns(head) || !head.next().is_none() {
        return None;
    }
    let mut count = writer.count();
    let found = bucket.find_short(hash, key);
    let (slot, tag) = match found {
        Short::Unusual => return None,
        Short::Found { .. } if !condition.holds(true) => return Some(None),
        Short::Absent if !condition.holds(false) => return Some(None),
        Short::Found { slot, .. } => (slot, None),
        Short::Absent => {
            count = count.saturating_add(1);
            (bucket.vacant_slot(hash)?, Some(tag_of(hash)))
        }
    };
    let leaves = if tag.is_some() { leaves(core, &bucket) } else { 0 };
    let offset = bucket.write_short_record(key, value, leaves)?;
    crash_point("slot.record.written");
    match found {
        Short::Found { len, .. } => head.count_dead(2 + key.len() + len),
        _ if bucket.is_empty_slot(slot) => head.count_occupied(),
        _ => {}
    }
    Some(Some(Step::begin(writer).publish_in((page, bucket), (slot, offset, tag), log, count)))
}

/// Stores `value` under `key` if the condition holds; `None` if it does not. `log` is the encoded operation.
pub fn put(
    writer: &mut Writer,
    hash: u64,
    key: &[u8],
    value: &[u8],
    condition: Condition,
    log: &mut LogRecord,
    scratch: &mut Vec<u8>,
) -> Result<Option<Lsn>> {
    let core = writer.core;
    if let Some(done) = put_quickly(writer, hash, key, value, condition, log.unplaced()) {
        return Ok(done);
    }
    if !writer.is_private() {
        lookup::know_array(core, writer.root());
    }
    let (layout, len) = layout(core.page_size, key.len(), value.len() as u64);
    let mut way = Way::default();
    if writer.is_private()
        && layout == Layout::Inline
        && condition != Condition::Absent
        && put_in_place(writer, hash, key, value, len, scratch, &mut way)?
    {
        return Ok(Some(Lsn(0)));
    }
    put_record(writer, hash, key, len, condition, way, log, scratch, |step, record| {
        if layout == Layout::Inline {
            record::encode_inline(record, key, &[value]);
            return Ok(None);
        }
        let in_extent: &[&[u8]] = if layout == Layout::LongKey { &[key, value] } else { &[value] };
        let bytes = in_extent.iter().map(|part| part.len() as u64).sum();
        let extent = fill_extent(step, extent_pages(core, bytes, 0)?, in_extent)?;
        encode_long(record, layout, key, hash, value.len() as u64, &extent);
        Ok(Some(extent.first))
    })
}

/// Publishes a new record of `len` bytes in the page, if the condition holds; what that took so far is `way`. `encode` writes it; pages that it needs it takes in
/// the step. It returns the first page of the record's extent, which an appended value shares with the record before.
#[allow(clippy::too_many_arguments)]
fn put_record(
    writer: &mut Writer,
    hash: u64,
    key: &[u8],
    len: usize,
    condition: Condition,
    mut way: Way,
    log: &mut LogRecord,
    scratch: &mut Vec<u8>,
    mut encode: impl FnMut(&mut Step, &mut Vec<u8>) -> Result<Option<PageNo>>,
) -> Result<Option<Lsn>> {
    let core = writer.core;
    let mut steps = Steps::default();
    loop {
        steps.count(core)?;
        let (path, present) = look(core, writer.root(), hash, key)?;
        if !condition.holds(present.is_some()) {
            return Ok(None);
        }
        if let Some(step) = make_ready(writer, &path, hash, &present, len)? {
            way = way.max(step);
            continue;
        }
        scratch.clear();
        let mut step = Step::begin(writer);
        let extent = encode(&mut step, scratch)?;
        if let Some((_, _, found)) = &present
            && found.record.extent().map(|old| old.first) != extent
        {
            give_extent(&mut step, &found.record)?;
            way = Way::Moved;
        }
        return publish(step, &path, hash, &present, way, scratch, log).map(Some);
    }
}

/// Stores a value that lies in an extent already (see `large`); `also` adds stores to the step.
#[allow(clippy::too_many_arguments)]
pub fn put_extent(
    writer: &mut Writer,
    hash: u64,
    key: &[u8],
    value_len: u64,
    layout: Layout,
    extent: &Extent,
    condition: Condition,
    log: &mut LogRecord,
    mut also: impl FnMut(&mut Step),
) -> Result<Option<Lsn>> {
    let len = long_len(layout, key.len(), value_len);
    let way = Way::default();
    put_record(writer, hash, key, len, condition, way, log, &mut Vec::new(), |step, record| {
        encode_long(record, layout, key, hash, value_len, extent);
        also(step);
        Ok(Some(extent.first))
    })
}

/// Deletes `key`; `None` if it is absent. `log` is the encoded operation.
pub fn delete(
    writer: &mut Writer,
    hash: u64,
    key: &[u8],
    log: &mut LogRecord,
) -> Result<Option<Lsn>> {
    let core = writer.core;
    let mut steps = Steps::default();
    loop {
        steps.count(core)?;
        let (path, present) = look(core, writer.root(), hash, key)?;
        let Some((page, bucket, found)) = present else { return Ok(None) };
        if structure::own_bucket(writer, &path)? == Progress::Stepped {
            continue;
        }
        let mut step = Step::begin(writer);
        give_extent(&mut step, &found.record)?;
        let after = bucket.tag_after_delete(found.slot);
        let head = bucket.head();
        head.count_dead(found.record.len);
        if after == EMPTY {
            head.occupied.store(head.occupied.load(Relaxed).saturating_sub(1), Relaxed);
        }
        step.store(core.place(page, bucket.tag_place(found.slot)), 1, 1, after as u64);
        let count = step.count().saturating_sub(1);
        let lsn = step.data(log, count)?;
        if shrink::is_worth_a_look(&bucket, found.record.len) {
            // The record is gone; the tree's shape can wait for another time.
            let _ = shrink::shrink(writer, hash);
        }
        return Ok(Some(lsn));
    }
}

/// Longest value that is copied under the writer lock: some tens of microseconds.
const COPY_BYTES_MAX: u64 = 256 << 10;

/// Whether `len` more bytes fit behind the value of `record` in its extent.
pub fn fits_behind(core: &Core, record: &Record, len: usize) -> bool {
    record.extent().is_some_and(|extent| {
        record.extent_bytes() + len as u64 <= extent.pages as u64 * core.page_size as u64
    })
}

/// Counts the structure steps of one operation.
#[derive(Default)]
struct Steps(u32);

impl Steps {
    /// More steps than any tree can need mean that a page is not what it says.
    const MOST: u32 = 1000;

    fn count(&mut self, core: &Core) -> Result<()> {
        self.0 += 1;
        if self.0 > Self::MOST {
            return Err(core.corrupt_shm("a bucket has no room however often it is split"));
        }
        Ok(())
    }
}

/// What an append found and did.
#[derive(Clone, Copy, Debug)]
pub struct Appended {
    /// End of its log record.
    pub lsn: Lsn,
    /// Length of the value afterwards.
    pub len: u64,
}

/// Adds `bytes` to the value of `key`, absent or not. With `expected`, only if the value has this length. `None`: the value
/// would have to be copied and is too long for that under the lock.
pub fn append(
    writer: &mut Writer,
    hash: u64,
    key: &[u8],
    bytes: &[u8],
    expected: Option<u64>,
    log: &mut LogRecord,
    scratch: &mut Vec<u8>,
) -> Result<Option<Appended>> {
    let core = writer.core;
    let (mut steps, mut way) = (Steps::default(), Way::default());
    loop {
        steps.count(core)?;
        let (path, present) = look(core, writer.root(), hash, key)?;
        let old = present.as_ref().map(|(_, _, found)| found.record);
        let before = old.map_or(0, |record| record.value_len);
        if expected.is_some_and(|expected| expected != before) {
            return Err(core.corrupt(
                path.bucket,
                format!("an append in the log expects {expected:?} bytes, the value has {before}"),
            ));
        }
        let total = before + bytes.len() as u64;
        check_lengths(core, key.len(), total)?;
        if before > COPY_BYTES_MAX
            && !writer.is_private()
            && !core.is_replaying()
            && old.is_some_and(|record| !fits_behind(core, &record, bytes.len()))
        {
            return Ok(None);
        }
        let layout = layout_grown(core.page_size, old.as_ref(), key.len(), total);
        let len = match layout {
            Layout::Inline => record::inline_len(key.len(), total as usize),
            _ => long_len(layout, key.len(), total),
        };
        if layout == Layout::Inline
            && let Some(record) = &old
            && fits_in_place(writer, &path, &present, len)
        {
            scratch.clear();
            record::encode_inline(scratch, key, &[core.value_of(record)?, bytes]);
            if replace_in_place(writer, &present, scratch)? {
                return Ok(Some(Appended { lsn: Lsn(0), len: total }));
            }
        }
        if let Some(step) = make_ready(writer, &path, hash, &present, len)? {
            way = way.max(step);
            continue;
        }
        // What recovery applies is in the log already, perhaps in chunks because one record cannot hold it.
        if !core.is_replaying() && !writer.is_private() {
            log.encode(&Op::Append { key, length_before: before, bytes });
        }
        scratch.clear();
        let mut step = Step::begin(writer);
        match (layout, &old) {
            (Layout::Inline, Some(record)) => {
                record::encode_inline(scratch, key, &[core.value_of(record)?, bytes]);
            }
            (Layout::Inline, None) => record::encode_inline(scratch, key, &[bytes]),
            (_, old) => {
                let extent = extend(&mut step, layout, old.as_ref(), key, bytes)?;
                if old.and_then(|record| record.extent()).map(|old| old.first) != Some(extent.first)
                {
                    way = Way::Moved;
                }
                encode_long(scratch, layout, key, hash, total, &extent);
            }
        }
        let lsn = publish(step, &path, hash, &present, way, scratch, log)?;
        return Ok(Some(Appended { lsn, len: total }));
    }
}

/// An extent that holds the old value and `bytes`: the old one if there is room behind its published bytes, else a new one
/// with room to grow.
fn extend(
    step: &mut Step,
    layout: Layout,
    old: Option<&Record>,
    key: &[u8],
    bytes: &[u8],
) -> Result<Extent> {
    let core = step.core();
    if let Some((record, mut extent)) = old.and_then(|r| r.extent().map(|extent| (r, extent))) {
        let used = record.extent_bytes();
        let needed = pages_of(core, used + bytes.len() as u64)?.saturating_sub(extent.pages);
        if needed > 0 {
            // Others may need what is behind; so not much more than is needed.
            let most = (extent.pages / GROWTH_PART).clamp(GROWTH_PAGES_MIN, GROWTH_PAGES_MAX);
            let run = Run { first: extent.first, len: extent.pages };
            extent.pages += step.extend_value(run, needed, most.max(needed))?;
        }
        // Verified before it grows, so that its checksum can be carried on.
        core.extent(&extent, used)?;
        if used + bytes.len() as u64 <= extent.pages as u64 * core.page_size as u64 {
            let at = core.run(extent.first, extent.pages)?;
            // SAFETY: within the extent, behind the published bytes: readers of the published length do not look there, and the writer
            // lock keeps other writers away.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.add(used as usize), bytes.len());
            }
            crash_point("extent.appended");
            return Ok(Extent { crc: crc32c::crc32c_append(extent.crc, bytes), ..extent });
        }
    }
    let value = match old {
        Some(record) => core.value_of(record)?,
        None => &[],
    };
    let key_part = if layout == Layout::LongKey { key } else { &[] };
    let len = (key_part.len() + value.len() + bytes.len()) as u64;
    let growth = match old {
        None => 0,
        // It may get more where it will be.
        Some(_) if step.is_private() && len >= LARGE_BYTES => len / 4,
        Some(_) => len / 2,
    };
    let extent = fill_extent(step, extent_pages(core, len, growth)?, &[key_part, value, bytes])?;
    if let Some(record) = old {
        give_extent(step, record)?;
    }
    Ok(extent)
}

/// A new, empty bucket.
pub fn empty_bucket(step: &mut Step) -> Result<PageNo> {
    let core = step.core();
    let number = step.take(1)?;
    let groups = groups_for(core.page_size, 0, 0, Reserve::NONE);
    let page = core.page(number)?;
    // SAFETY: taken by this step: nobody else uses it; mapped and aligned to its size.
    unsafe { Builder::new(page, core.page_size, number, core.epoch(), 0, 0, groups) };
    Ok(number)
}

/// Deletes everything, by putting an empty tree in place of the present one, whose pages are given up later: see
/// [`discard`]. `None`: those of an earlier one are still to be given up.
pub fn clear(writer: &mut Writer, log: &mut LogRecord) -> Result<Option<Lsn>> {
    let core = writer.core;
    let root = writer.root();
    if writer.is_private() {
        return clear_private(writer, root, log).map(Some);
    }
    if discard::is_due(core) {
        return Ok(None);
    }
    let mut step = Step::begin(writer);
    let bucket = empty_bucket(&mut step)?;
    discard::put_away(&mut step, root);
    let place = core.shm.offset_of(&core.control().readers.root) | IN_SHM;
    step.store(place, 8, 1, Root { page: bucket, depth: None }.to_word());
    crash_point("clear.prepared");
    let lsn = step.data(log, 0)?;
    // Nobody waits for recovery's lock.
    while core.is_replaying() && discard::is_due(core) {
        discard::part(writer)?;
    }
    Ok(Some(lsn))
}

/// As [`clear`], for the private tree of a transaction: nobody waits while its pages are listed.
fn clear_private(writer: &mut Writer, root: Root, log: &mut LogRecord) -> Result<Lsn> {
    let core = writer.core;
    let mut step = Step::begin(writer);
    let bucket = empty_bucket(&mut step)?;
    walk::for_each_run(core, root, &mut |item| match item.kind {
        Some(_) => step.give(item.run, item.made),
        None => step.give_value(item.run, item.made),
    })?;
    let place = core.shm.offset_of(&core.control().readers.root) | IN_SHM;
    step.store(place, 8, 1, Root { page: bucket, depth: None }.to_word());
    step.data(log, 0)
}

/// The record of `key`.
pub fn record_of(core: &Core, hash: u64, key: &[u8]) -> Result<Option<Record>> {
    let (_, present) = look(core, lookup::current_root(core), hash, key)?;
    Ok(present.map(|(_, _, found)| found.record))
}

/// The layout of a record whose value grows to `total` bytes: a value that has an extent keeps it.
pub fn layout_grown(page_size: usize, old: Option<&Record>, key_len: usize, total: u64) -> Layout {
    match old {
        Some(record) if record.extent().is_some() => layout_of(record),
        _ => layout(page_size, key_len, total).0,
    }
}

/// The layout of an existing record.
pub fn layout_of(record: &Record) -> Layout {
    match record.form {
        Form::Inline => Layout::Inline,
        Form::LongValue(_) => Layout::LongValue,
        Form::LongKey { .. } => Layout::LongKey,
    }
}
