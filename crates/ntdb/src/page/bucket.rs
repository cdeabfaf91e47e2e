//! A bucket page: tags, offsets, records.
//!
//! ```text
//! 0      64                              64+48G                free        P
//! | head | G x {16 tags, 16 x u16 offsets} | records, growing -> |          |
//! ```
//! Tags and offsets of a group lie together, so that a search finds both in one or two cache lines.
//!
//! **Publication** (writer, under the writer lock): advance `free`; write the record's bytes; (log); store the slot's
//! offset (Release); store its tag (Release). An update stores the offset only, a delete the tag only. Readers load the
//! tags (Acquire), then the offset (Acquire), then the record. At every instant the page is valid, whoever dies: bytes
//! behind `free` that no slot names are merely lost until the page is rebuilt.
//!
//! A reader that matched a tag may load the offset of a record that came into the slot later; it compares the whole
//! key, so it then finds either the key or another key, never half a record, since records never change.
//!
//! **Placement.** The home group comes from hash bits 7 to 22, the search goes from there round the page and stops at a
//! group that has an empty slot. A deleted slot becomes empty again where its group has another empty one.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering::*, fence};

use crate::copy::copy_short;
use crate::limits::{SHORT_KEY, SHORT_VALUE};
use crate::storage::failpoint::crash_point;

use super::head::{HEAD_BYTES, Kind, PageHead};
use super::prefetch::prefetch;
use super::record::{self, Reason, Record};
use super::reserve::Reserve;
use super::tags::{DELETED, EMPTY, GROUP, Group, LIVE, tag_of};
use crate::types::{Epoch, PageNo};

/// Numbers of records and their bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// Records.
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

    /// Both together.
    pub fn plus(&self, other: Load) -> Load {
        Load { records: self.records + other.records, bytes: self.bytes + other.bytes }
    }
}

/// Bytes of a slot: tag and offset.
const SLOT_BYTES: usize = 3;
/// Bytes of a group: its tags, then its offsets.
const GROUP_BYTES: usize = GROUP * SLOT_BYTES;

/// What is wrong with a page whose live records take more bytes than it has.
pub const OVERLAP: Reason = "records of a bucket overlap";

/// A bucket page in mapped memory.
#[derive(Clone, Copy, Debug)]
pub struct Bucket<'a> {
    page: *mut u8,
    size: usize,
    groups: usize,
    _life: std::marker::PhantomData<&'a u8>,
}

/// What [`Bucket::find_short`] has found.
#[derive(Clone, Copy, Debug)]
pub enum Short {
    /// The value's place and length; the slot, and the record's offset in the page.
    Found {
        /// First byte of the value.
        value: *const u8,
        /// Bytes of the value.
        len: usize,
        /// The slot.
        slot: usize,
        /// Offset of the record in the page.
        offset: usize,
    },
    /// The key is not in this page.
    Absent,
    /// Something that only [`Bucket::find`] can tell: a long value, a change just now, damage.
    Unusual,
}

/// Whether the bytes at `at` are `key`'s. Short keys are compared with two loads, which may overlap.
///
/// # Safety
/// As many bytes as `key` has are readable at `at`, and don't change.
#[inline(always)]
unsafe fn same_bytes(at: *const u8, key: &[u8]) -> bool {
    let (other, len) = (key.as_ptr(), key.len());
    // SAFETY: all loads are within the `len` bytes of both.
    unsafe {
        if len >= 8 {
            if len > 16 {
                return std::slice::from_raw_parts(at, len) == key;
            }
            let load = |p: *const u8, i: usize| p.add(i).cast::<u64>().read_unaligned();
            load(at, 0) == load(other, 0) && load(at, len - 8) == load(other, len - 8)
        } else if len >= 4 {
            let load = |p: *const u8, i: usize| p.add(i).cast::<u32>().read_unaligned();
            load(at, 0) == load(other, 0) && load(at, len - 4) == load(other, len - 4)
        } else {
            (0..len).all(|i| at.add(i).read() == other.add(i).read())
        }
    }
}

/// A slot that holds a key.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// The slot.
    pub slot: usize,
    /// Its record.
    pub record: Record,
}

impl<'a> Bucket<'a> {
    /// The bucket page at `page`.
    ///
    /// # Safety
    /// `page` points to `size` mapped bytes, aligned to 64, that stay mapped, and not re-used, for `'a`.
    #[inline]
    pub unsafe fn at(page: *mut u8, size: usize) -> Result<Bucket<'a>, Reason> {
        // SAFETY: the caller's promise.
        let head = unsafe { PageHead::at(page) };
        let groups = head.groups.load(Relaxed) as usize;
        if groups == 0 || HEAD_BYTES + groups * GROUP * SLOT_BYTES > size {
            return Err("a bucket has an impossible number of groups");
        }
        Ok(Bucket { page, size, groups, _life: std::marker::PhantomData })
    }

    /// The bucket page at `page`, which is known to have `groups` groups.
    ///
    /// # Safety
    /// As [`Bucket::at`]; and so many groups fit in the page.
    #[inline(always)]
    pub unsafe fn with_groups(page: *mut u8, size: usize, groups: usize) -> Bucket<'a> {
        debug_assert!(groups > 0 && groups <= max_groups(size));
        Bucket { page, size, groups, _life: std::marker::PhantomData }
    }

    /// The header.
    #[inline]
    pub fn head(&self) -> &'a PageHead {
        // SAFETY: promised at construction.
        unsafe { PageHead::at(self.page) }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.groups * GROUP
    }

    /// Number of slots that may be in use: the others end searches.
    fn slots_for_records(&self) -> usize {
        self.slots() / 8 * 7
    }

    /// Offset at which records begin.
    #[inline]
    fn records_start(&self) -> usize {
        HEAD_BYTES + self.groups * GROUP * SLOT_BYTES
    }

    /// Bytes for records in all.
    pub fn record_room(&self) -> usize {
        self.size - self.records_start()
    }

    /// Offset of the tag of `slot` within the page.
    #[inline]
    pub fn tag_place(&self, slot: usize) -> usize {
        HEAD_BYTES + slot / GROUP * GROUP_BYTES + slot % GROUP
    }

    /// Offset of the offset of `slot` within the page.
    #[inline]
    pub fn offset_place(&self, slot: usize) -> usize {
        HEAD_BYTES + slot / GROUP * GROUP_BYTES + GROUP + slot % GROUP * 2
    }

    #[inline]
    fn tag(&self, slot: usize) -> &'a AtomicU8 {
        debug_assert!(slot < self.slots());
        // SAFETY: within the page, as `at` checked; atomics may be shared.
        unsafe { &*self.page.add(self.tag_place(slot)).cast::<AtomicU8>() }
    }

    #[inline]
    fn offset(&self, slot: usize) -> &'a AtomicU16 {
        debug_assert!(slot < self.slots());
        // SAFETY: within the page, as `at` checked; HEAD_BYTES and GROUP_BYTES are even.
        unsafe { &*self.page.add(self.offset_place(slot)).cast::<AtomicU16>() }
    }

    #[inline]
    fn group(&self, group: usize) -> Group {
        debug_assert!(group < self.groups);
        // SAFETY: within the page, aligned to 16. Mixed-size atomic access to mapped memory: the processor gives each byte of an
        // aligned load a value that was stored there, which is all that the search needs.
        let (low, high) = unsafe {
            let at = self.page.add(HEAD_BYTES + group * GROUP_BYTES).cast::<AtomicU64>();
            ((*at).load(Acquire), (*at.add(1)).load(Acquire))
        };
        Group::new(u64::from_le(low), u64::from_le(high))
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash >> 7) & 0xffff) as usize * self.groups) >> 16
    }

    /// Parses the record at `offset`.
    #[inline]
    pub fn record_at(&self, offset: usize) -> Result<Record, Reason> {
        if offset < self.records_start() || offset >= self.size {
            return Err("a slot points outside the records of its bucket");
        }
        // SAFETY: within the page; the bytes of a published record never change.
        unsafe { record::parse(self.page.add(offset), self.size - offset) }
    }

    /// Length of the record at `offset`.
    #[inline(always)]
    fn record_len_at(&self, offset: usize) -> Result<usize, Reason> {
        if offset >= self.records_start() && offset + 2 <= self.size {
            // SAFETY: within the page; the bytes of a published record never change.
            let [form, value_len] = unsafe { self.page.add(offset).cast::<[u8; 2]>().read() };
            let len = 2 + (form >> 2) as usize + value_len as usize;
            if form & 0x83 == 0 && value_len < 0x80 && len <= self.size - offset {
                return Ok(len);
            }
        }
        self.record_at(offset).map(|record| record.len)
    }

    /// The live slots, and the offsets of their records, as of one moment: a key that is deleted and stored again meanwhile is
    /// not there twice. (A writer that never pauses may prevent that; then after many attempts they are as found.)
    pub fn live_slots(&self, out: &mut Vec<(u16, u16)>) {
        const ATTEMPTS: u32 = 1000;
        for _ in 0..ATTEMPTS {
            out.clear();
            // Whoever stores a record advances this first; whoever sees the record's tag sees that, too.
            let before = self.head().free.load(Acquire);
            for index in 0..self.groups {
                for i in self.group(index).live() {
                    let slot = index * GROUP + i;
                    out.push((slot as u16, self.offset(slot).load(Acquire)));
                }
            }
            fence(Acquire);
            if self.head().free.load(Relaxed) == before {
                return;
            }
        }
    }

    /// The offset of the record in `slot`, if it is still live.
    #[inline]
    pub fn live_offset(&self, slot: u16) -> Option<u16> {
        let slot = slot as usize;
        (self.tag(slot).load(Acquire) & LIVE != 0).then(|| self.offset(slot).load(Acquire))
    }

    /// Finds the slot whose record has this tag and satisfies `is_it`.
    #[inline]
    pub fn find<E>(
        &self,
        hash: u64,
        corrupt: impl Fn(Reason) -> E,
        mut is_it: impl FnMut(&Record) -> Result<bool, E>,
    ) -> Result<Option<Found>, E> {
        let tag = tag_of(hash);
        let mut index = self.home(hash);
        let mut left = self.groups;
        while left > 0 {
            let group = self.group(index);
            for i in group.matching(tag) {
                let slot = index * GROUP + i;
                let offset = self.offset(slot).load(Acquire) as usize;
                let record = self.record_at(offset).map_err(&corrupt)?;
                if is_it(&record)? {
                    if self.tag(slot).load(Acquire) == tag {
                        return Ok(Some(Found { slot, record }));
                    }
                    // Deleted since the tags were loaded; and what lies there now may be a new record of the same key whose tag is
                    // still to come, which nobody may see yet. From the start.
                    return self.find(hash, corrupt, is_it);
                }
            }
            if !group.empty().is_empty() {
                return Ok(None);
            }
            left -= 1;
            index += 1;
            if index == self.groups {
                index = 0;
            }
        }
        Ok(None)
    }

    /// The usual search, for short keys whose value lies in the page: as [`Bucket::find`], without building a [`Record`].
    #[inline(always)]
    pub fn find_short(&self, hash: u64, key: &[u8]) -> Short {
        debug_assert!(key.len() < SHORT_KEY);
        let tag = tag_of(hash);
        let home = self.home(hash);
        // The offsets of a group may lie in the next cache line: both are fetched at once.
        prefetch(self.page.wrapping_add(HEAD_BYTES + home * GROUP_BYTES + GROUP_BYTES - 1));
        let (start, end) = (self.records_start(), self.size - 2 - key.len());
        let mut index = home;
        loop {
            let group = self.group(index);
            for i in group.matching(tag) {
                let slot = index * GROUP + i;
                let offset = self.offset(slot).load(Acquire) as usize;
                // Two length bytes, and the key.
                if offset < start || offset > end {
                    return Short::Unusual;
                }
                // SAFETY: within the page, as checked just now; the bytes of a published record never change.
                let (form, value_len, same) = unsafe {
                    let at = self.page.add(offset);
                    (at.read(), at.add(1).read() as usize, same_bytes(at.add(2), key))
                };
                if form as usize == key.len() << 2 && value_len < 0x80 {
                    if !same {
                        continue;
                    }
                    let value = offset + 2 + key.len();
                    if value + value_len > self.size || self.tag(slot).load(Acquire) != tag {
                        return Short::Unusual;
                    }
                    let value = self.page.wrapping_add(value);
                    return Short::Found { value, len: value_len, slot, offset };
                }
                // Another length of key, or a longer record.
                if form & 3 == 0 && form < 0x80 && form as usize != key.len() << 2 {
                    continue;
                }
                return Short::Unusual;
            }
            if !group.empty().is_empty() {
                return Short::Absent;
            }
            index = if index + 1 == self.groups { 0 } else { index + 1 };
            if index == home {
                return Short::Absent;
            }
        }
    }

    /// Starts to fetch what a change of a key with this hash will look at first: header, tags and offsets.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        let group = HEAD_BYTES + self.home(hash) * GROUP_BYTES;
        prefetch(self.page);
        prefetch(self.page.wrapping_add(group));
        prefetch(self.page.wrapping_add(group + GROUP_BYTES - 1));
    }

    /// The slot that an insert of a key with this hash uses: the first that is not live on its path. `None` if too
    /// few slots would stay empty.
    pub fn vacant_slot(&self, hash: u64) -> Option<usize> {
        let mut index = self.home(hash);
        for _ in 0..self.groups {
            let live = self.group(index).live();
            if live.0 != u16::MAX {
                let slot = index * GROUP + (!live.0).trailing_zeros() as usize;
                let reuses = self.tag(slot).load(Relaxed) == DELETED;
                let occupied = self.head().occupied.load(Relaxed) as usize;
                return (reuses || occupied < self.slots_for_records()).then_some(slot);
            }
            index += 1;
            if index == self.groups {
                index = 0;
            }
        }
        None
    }

    /// The tag that deleting `slot` leaves.
    pub fn tag_after_delete(&self, slot: usize) -> u8 {
        if self.group(slot / GROUP).empty().is_empty() { DELETED } else { EMPTY }
    }

    /// Whether `slot` is empty (as opposed to deleted or live).
    pub fn is_empty_slot(&self, slot: usize) -> bool {
        self.tag(slot).load(Relaxed) == EMPTY
    }

    /// Bytes behind the last record.
    #[inline]
    pub fn free_bytes(&self) -> usize {
        self.size.saturating_sub(self.free_offset())
    }

    fn free_offset(&self) -> usize {
        (self.head().free.load(Relaxed) as usize).max(self.records_start())
    }

    /// Writes `bytes` into the free space, where nobody can see them yet; returns their offset. Needs the writer lock
    /// and room. (Room that was there a moment ago vanishes only where a damaged map made somebody else's page of this
    /// one.)
    #[inline]
    pub fn write_record(&self, bytes: &[u8]) -> Result<usize, Reason> {
        let at = self.free_offset();
        if at > self.size || bytes.len() > self.size - at {
            return Err("a bucket's free space has vanished");
        }
        self.head().free.store((at + bytes.len()) as u32, Relaxed);
        // SAFETY: within the page, behind everything that any slot names; the writer lock keeps other writers away.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.page.add(at), bytes.len()) };
        Ok(at)
    }

    /// As [`Bucket::write_record`], for a short record (a key shorter than [`SHORT_KEY`], a value shorter than [`SHORT_VALUE`]), which
    /// is put together in place; `None` if there is no room that leaves `leaves` bytes.
    #[inline(always)]
    pub fn write_short_record(&self, key: &[u8], value: &[u8], leaves: usize) -> Option<usize> {
        debug_assert!(key.len() < SHORT_KEY && value.len() < SHORT_VALUE);
        let at = self.free_offset();
        let len = 2 + key.len() + value.len();
        if at > self.size || len + leaves > self.size - at {
            return None;
        }
        self.head().free.store((at + len) as u32, Relaxed);
        // SAFETY: as in `write_record`: both parts lie within the page.
        unsafe {
            let to = self.page.add(at);
            to.write((key.len() << 2) as u8);
            to.add(1).write(value.len() as u8);
            copy_short(key.as_ptr(), to.add(2), key.len());
            copy_short(value.as_ptr(), to.add(2 + key.len()), value.len());
        }
        Some(at)
    }

    /// Publishes the record at `offset` in `slot`; in a slot that was not live, with its tag.
    #[inline(always)]
    pub fn publish(&self, slot: usize, offset: usize, tag: Option<u8>) {
        self.offset(slot).store(offset as u16, Release);
        crash_point("step.store");
        if let Some(tag) = tag {
            self.tag(slot).store(tag, Release);
            crash_point("step.store");
        }
    }

    /// Bytes of the live records, by the header's hints.
    #[inline]
    pub fn live_bytes(&self) -> usize {
        let used = self.free_offset().min(self.size) - self.records_start();
        used.saturating_sub(self.head().dead.load(Relaxed) as usize)
    }

    /// The live records, by the header's hints.
    pub fn load(&self) -> Load {
        let records =
            (0..self.groups).map(|index| self.group(index).live().0.count_ones() as usize).sum();
        let used = self.free_offset().min(self.size) - self.records_start();
        let dead = self.head().dead.load(Relaxed) as usize;
        // Hints, which a death may leave too low or too high; but no live record is shorter than two bytes.
        Load { records, bytes: used.saturating_sub(dead).max(2 * records) }
    }

    /// Copies the page without its dead records to `target`, each record in the slot that it has.
    ///
    /// # Safety
    /// `target` points to as many bytes as the page has, aligned to 64, that only the caller uses; the caller holds the
    /// writer lock.
    pub unsafe fn compact_into(&self, target: *mut u8) -> Result<(), Reason> {
        let start = self.records_start();
        // SAFETY: both are pages. They are distinct, unless a damaged map says that this page is free; that gives nonsense
        // then, but within the page.
        unsafe { std::ptr::copy(self.page, target, start) };
        // SAFETY: header and groups were copied just now.
        let new = unsafe { Bucket::at(target, self.size) }?;
        let mut at = start;
        for index in 0..self.groups {
            for i in self.group(index).live() {
                let slot = index * GROUP + i;
                let offset = self.offset(slot).load(Acquire) as usize;
                let len = self.record_len_at(offset)?;
                if len > self.size - at {
                    return Err(OVERLAP);
                }
                // SAFETY: within both pages; published records don't change.
                unsafe { copy_short(self.page.add(offset), target.add(at), len) };
                new.offset(slot).store(at as u16, Relaxed);
                at += len;
            }
        }
        new.head().free.store(at as u32, Relaxed);
        new.head().dead.store(0, Relaxed);
        Ok(())
    }

    /// Puts `bytes` in place of the record in `slot`, which is live, and leaves out what is dead; every record keeps its slot.
    /// `false`, and nothing has changed, if they don't fit. `room` is for scratch.
    ///
    /// # Safety
    /// Nobody else reads or changes the page meanwhile.
    pub unsafe fn replace_compacting(
        &self,
        slot: usize,
        bytes: &[u8],
        room: &mut Vec<u8>,
    ) -> Result<bool, Reason> {
        let start = self.records_start();
        room.clear();
        let mut places = Vec::with_capacity(self.slots());
        for index in 0..self.groups {
            for i in self.group(index).live() {
                let at = room.len();
                let other = index * GROUP + i;
                if other == slot {
                    continue;
                }
                let offset = self.offset(other).load(Relaxed) as usize;
                let len = self.record_len_at(offset)?;
                if at + len > self.size - start {
                    return Err(OVERLAP);
                }
                // SAFETY: within the page, as `record_len_at` checked, and nobody changes it meanwhile.
                let record = unsafe { std::slice::from_raw_parts(self.page.add(offset), len) };
                room.extend_from_slice(record);
                places.push((other, start + at));
            }
        }
        places.push((slot, start + room.len()));
        room.extend_from_slice(bytes);
        if room.len() > self.size - start {
            return Ok(false);
        }
        // SAFETY: within the page, as checked just now, which is the caller's alone.
        unsafe { std::ptr::copy(room.as_ptr(), self.page.add(start), room.len()) };
        for (slot, at) in places {
            self.offset(slot).store(at as u16, Relaxed);
        }
        self.head().free.store((start + room.len()) as u32, Relaxed);
        self.head().dead.store(0, Relaxed);
        Ok(true)
    }

    /// Calls `f` with every live slot. Records that overlap are damage: a page of slots that all name one record would
    /// stand for many times its size.
    #[inline]
    pub fn for_each_live<E>(
        &self,
        corrupt: impl Fn(Reason) -> E,
        mut f: impl FnMut(usize, Record) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut room = self.record_room();
        for index in 0..self.groups {
            for i in self.group(index).live() {
                let slot = index * GROUP + i;
                let offset = self.offset(slot).load(Acquire) as usize;
                let record = self.record_at(offset).map_err(&corrupt)?;
                room = room.checked_sub(record.len).ok_or_else(|| corrupt(OVERLAP))?;
                f(slot, record)?;
            }
        }
        Ok(())
    }

    /// Verifies what a search relies on: the header's numbers, every record within the page, records that don't overlap.
    pub fn check_structure(&self) -> Result<(), Reason> {
        let free = self.head().free.load(Relaxed) as usize;
        if free < self.records_start() || free > self.size {
            return Err("a bucket's free offset is outside the page");
        }
        let mut spans = Vec::new();
        self.for_each_live(
            |reason| reason,
            |_, record| {
                let at = record.start as usize - self.page as usize;
                if at + record.len > free {
                    return Err("a record lies in free space");
                }
                spans.push((at, at + record.len));
                Ok(())
            },
        )?;
        spans.sort_unstable();
        if spans.windows(2).any(|pair| pair[0].1 > pair[1].0) {
            return Err("two records overlap");
        }
        Ok(())
    }
}

/// Most groups that fit in a page of `size` bytes.
pub const fn max_groups(size: usize) -> usize {
    (size - HEAD_BYTES) / GROUP_BYTES
}

/// Groups for a page of `size` bytes that is to hold `records` records of `bytes` in all: so many that they fit, if they can fit
/// at all, and then such that slots and bytes, but for the reserve, run out together if more records of that kind come.
pub fn groups_for(size: usize, records: usize, bytes: usize, reserve: Reserve) -> usize {
    let room = size - HEAD_BYTES;
    let most = room / (GROUP * (SLOT_BYTES + 1));
    if records == 0 {
        return (size / 1024).min(most);
    }
    let bytes = bytes.max(2 * records);
    // Seven of eight slots may be used, so a record costs 8/7 slots.
    let for_inserts = room - reserve.of(room);
    let capacity = for_inserts * 7 * records / (bytes * 7 + records * SLOT_BYTES * 8);
    let for_capacity = (capacity * 8).div_ceil(7 * GROUP);
    let for_present = ((records + 1) * 8).div_ceil(7 * GROUP);
    let beside_bytes = room.saturating_sub(bytes) / GROUP_BYTES;
    for_capacity.min(beside_bytes).max(for_present).clamp(1, most)
}

/// Whether records of this load fit into a page of `size` bytes that is made for them with this reserve, and leave `leaves`.
pub fn fits(size: usize, load: Load, reserve: Reserve, leaves: Reserve) -> bool {
    let groups = groups_for(size, load.records, load.bytes, reserve);
    let slots = groups * GROUP / 8 * 7;
    let room = size - HEAD_BYTES - groups * GROUP_BYTES;
    load.records <= slots && load.bytes + leaves.of(room) <= room
}

/// Fills a new bucket page that nobody can see yet.
#[derive(Debug)]
pub struct Builder<'a> {
    bucket: Bucket<'a>,
}

impl<'a> Builder<'a> {
    /// Begins a page.
    ///
    /// # Safety
    /// `page` points to `size` mapped bytes, aligned to 64, that only the caller uses.
    pub unsafe fn new(
        page: *mut u8,
        size: usize,
        number: PageNo,
        epoch: Epoch,
        depth: u8,
        prefix: u64,
        groups: usize,
    ) -> Builder<'a> {
        // SAFETY: the caller's promise.
        let head = unsafe { PageHead::at(page) };
        head.init(Kind::Bucket, number, epoch, depth, prefix);
        head.groups.store(groups as u16, Relaxed);
        let start = HEAD_BYTES + groups * GROUP * SLOT_BYTES;
        assert!(start <= size);
        head.free.store(start as u32, Relaxed);
        // SAFETY: within the page, by the assertion.
        unsafe { std::ptr::write_bytes(page.add(HEAD_BYTES), 0, start - HEAD_BYTES) };
        // SAFETY: the caller's promise; `groups` was checked just now.
        let bucket = unsafe { Bucket::at(page, size) }.expect("groups fit");
        Builder { bucket }
    }

    /// Adds a record; `false` if it does not fit.
    pub fn push(&mut self, hash: u64, bytes: &[u8]) -> bool {
        if bytes.len() > self.bucket.free_bytes() {
            return false;
        }
        let Some(slot) = self.bucket.vacant_slot(hash) else { return false };
        let Ok(at) = self.bucket.write_record(bytes) else { return false };
        self.bucket.offset(slot).store(at as u16, Relaxed);
        self.bucket.tag(slot).store(tag_of(hash), Relaxed);
        let head = self.bucket.head();
        head.occupied.store(head.occupied.load(Relaxed).saturating_add(1), Relaxed);
        true
    }

    /// Bytes of records so far.
    pub fn used_bytes(&self) -> usize {
        self.bucket.record_room() - self.bucket.free_bytes()
    }

    /// Bytes for records in all.
    pub fn room(&self) -> usize {
        self.bucket.record_room()
    }

    /// Records that there are slots for besides.
    pub fn vacant_slots(&self) -> usize {
        self.bucket.slots_for_records().saturating_sub(self.head().occupied.load(Relaxed) as usize)
    }

    /// The page's header.
    pub fn head(&self) -> &'a PageHead {
        self.bucket.head()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[repr(align(64))]
    struct Page([u8; 4096]);

    fn hash_of(key: &[u8]) -> u64 {
        key.iter()
            .fold(0xcbf29ce484222325, |h, b| (h ^ *b as u64).wrapping_mul(0x100000001b3))
            .wrapping_mul(0x9e3779b97f4a7c15)
    }

    fn find(bucket: &Bucket, key: &[u8]) -> Option<(usize, Vec<u8>)> {
        bucket
            .find(
                hash_of(key),
                |reason| panic!("{reason}"),
                |record| {
                    // SAFETY: the record was parsed from the page.
                    let found =
                        unsafe { std::slice::from_raw_parts(record.key, record.key_len as usize) };
                    Ok::<_, ()>(found == key)
                },
            )
            .unwrap()
            .map(|found| {
                // SAFETY: as above; an inline value follows the key.
                let value = unsafe {
                    std::slice::from_raw_parts(
                        found.record.key.add(found.record.key_len as usize),
                        found.record.value_len as usize,
                    )
                };
                (found.slot, value.to_vec())
            })
    }

    proptest! {
        #[test]
        fn a_bucket_behaves_like_a_map(ops in prop::collection::vec((0u8..3, 0u16..60, 0usize..20), 1..400)) {
            let mut page = Box::new(Page([0xa5; 4096]));
            // SAFETY: the page is ours.
            unsafe { Builder::new(page.0.as_mut_ptr(), 4096, PageNo(9), Epoch(3), 2, 1 << 62, 6) };
            // SAFETY: as above.
            let bucket = unsafe { Bucket::at(page.0.as_mut_ptr(), 4096) }.unwrap();
            let mut model: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
            for (op, key, len) in ops {
                let key = key.to_le_bytes().to_vec();
                let value = vec![key[0]; len];
                let found = find(&bucket, &key);
                prop_assert_eq!(found.as_ref().map(|f| &f.1), model.get(&key));
                if op == 2 {
                    if let Some((slot, _)) = found {
                        let after = bucket.tag_after_delete(slot);
                        bucket.tag(slot).store(after, Relaxed);
                        if after == EMPTY {
                            let head = bucket.head();
                            head.occupied.store(head.occupied.load(Relaxed) - 1, Relaxed);
                        }
                        model.remove(&key);
                    }
                    continue;
                }
                let mut bytes = Vec::new();
                record::encode_inline(&mut bytes, &key, &[&value]);
                if bytes.len() > bucket.free_bytes() { break; }
                let slot = match found {
                    Some((slot, _)) => slot,
                    None => match bucket.vacant_slot(hash_of(&key)) { Some(slot) => slot, None => break },
                };
                let at = bucket.write_record(&bytes).unwrap();
                bucket.offset(slot).store(at as u16, Release);
                if bucket.tag(slot).load(Relaxed) & LIVE == 0 {
                    if bucket.is_empty_slot(slot) {
                        let head = bucket.head();
                        head.occupied.store(head.occupied.load(Relaxed) + 1, Relaxed);
                    }
                    bucket.tag(slot).store(tag_of(hash_of(&key)), Release);
                }
                model.insert(key, value);
                bucket.check_structure().unwrap();
            }
            let mut seen = 0;
            bucket.for_each_live(|r| panic!("{r}"), |_, _| { seen += 1; Ok::<_, ()>(()) }).unwrap();
            prop_assert_eq!(seen, model.len());
        }
    }

    /// A page of slots that all name one record would stand for many times its size.
    #[test]
    fn slots_that_name_the_same_record_are_damage() {
        let mut page = Box::new(Page([0; 4096]));
        // SAFETY: the page is ours.
        let mut builder =
            unsafe { Builder::new(page.0.as_mut_ptr(), 4096, PageNo(9), Epoch(3), 0, 0, 4) };
        let mut bytes = Vec::new();
        record::encode_inline(&mut bytes, b"key", &[&[1; 900]]);
        assert!(builder.push(hash_of(b"key"), &bytes));
        let bucket = builder.bucket;
        let count = |result: &mut usize| {
            bucket.for_each_live(
                |reason| reason,
                |_, _| {
                    *result += 1;
                    Ok(())
                },
            )
        };
        let mut seen = 0;
        assert_eq!((count(&mut seen), seen), (Ok(()), 1));
        let slot = bucket.find(hash_of(b"key"), |r| r, |_| Ok(true)).unwrap().unwrap().slot;
        let offset = bucket.offset(slot).load(Relaxed);
        for slot in 0..bucket.slots() {
            bucket.offset(slot).store(offset, Relaxed);
            bucket.tag(slot).store(LIVE, Relaxed);
        }
        seen = 0;
        assert_eq!((count(&mut seen), seen), (Err(OVERLAP), 4));
    }

    #[test]
    fn a_record_is_not_written_beyond_the_page() {
        let mut page = Box::new(Page([0; 4096]));
        // SAFETY: the page is ours.
        let builder =
            unsafe { Builder::new(page.0.as_mut_ptr(), 4096, PageNo(9), Epoch(3), 0, 0, 4) };
        let bucket = builder.bucket;
        for free in [4090, 4096, 4097, 70_000, u32::MAX] {
            bucket.head().free.store(free, Relaxed);
            assert!(bucket.write_record(&[7; 10]).is_err(), "{free}");
            assert_eq!(bucket.head().free.load(Relaxed), free);
        }
        bucket.head().free.store(4086, Relaxed);
        assert_eq!(bucket.write_record(&[7; 10]), Ok(4086));
    }

    /// What is at most 94 % of a page, slots included, is rebuilt and not split: it must fit then.
    #[test]
    fn what_is_not_split_fits() {
        for size in [4096, 8192, 16384, 32768, 65536] {
            let room = size - HEAD_BYTES;
            for records in (1..room / 5).step_by(size / 4096) {
                for average in [2, 3, 4, 5, 7, 10, 13, 50, 200, 1000] {
                    for odd in [0, records / 3, records.saturating_sub(1)] {
                        let load = Load { records, bytes: records * average + odd };
                        for percent in [0, 10, 50, 90] {
                            let reserve = Reserve::from_percent(percent);
                            if load.page_bytes() * 100 < room * reserve.share(94) {
                                let fits = fits(size, load, reserve, reserve);
                                assert!(fits, "{size} {load:?} {reserve:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn slots_and_bytes_run_out_together() {
        for size in [4096, 8192, 16384, 65536] {
            for average in [2, 10, 40, 200, 1000] {
                let groups = groups_for(size, 10, 10 * average, Reserve::NONE);
                let slots = groups * GROUP * 7 / 8;
                let room = size - HEAD_BYTES - groups * GROUP * SLOT_BYTES;
                let records = room / average;
                assert!(
                    slots + 16 >= records && slots <= records + 32,
                    "{size} {average} {slots} {records}"
                );
            }
        }
    }
}
