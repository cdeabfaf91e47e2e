//! Moving a tree away from the end of the file, so that the file can be cut.
//!
//! Pages are moved as they are changed, by copying: a frozen bucket that lies behind the limit is copied to the first free page
//! of the file, with the directory and the array above it; a value's pages are copied and its record is replaced. Each is a step
//! that changes nothing a user can see. What takes several pages in a row may find no place before the limit; then any that is
//! lower than its own will do, since what lies highest keeps all the file. If there is none, it stays where it is.

use std::time::Duration;

use crate::core::Core;
use crate::error::Result;
use crate::options::deadline_after;
use crate::page::bucket::Load;
use crate::page::record::{self, Extent, Form, Record};
use crate::shm::stripe::{Holder, stripe_of};
use crate::space::allocate;
use crate::storage::failpoint::crash_point;
use crate::transaction::claim;
use crate::transaction::step::Step;
use crate::transaction::writer::Writer;
use crate::types::{PageNo, Run};

use super::locate;
use super::structure::{self, Progress};
use super::{lookup, walk};

/// Moves what lies behind page `limit` before it, as far as there is room. All of the tree is frozen. Lets the writer lock go between
/// the steps, in which others may be at work; waits for it for `timeout` each. Says whether anything has been moved.
pub fn relocate(core: &Core, limit: PageNo, timeout: Option<Duration>) -> Result<bool> {
    let mut next = Some(0);
    let mut has_moved = false;
    while let Some(hash) = next {
        let mut may_compact = true;
        loop {
            let mut writer = claim::lock_between(core, deadline_after(timeout))?;
            allocate::prefer_the_front(&writer);
            if !allocate::has_room_before(core, limit, 1) {
                return Ok(has_moved);
            }
            if !step(&mut writer, hash, limit, &mut may_compact)? {
                break;
            }
            has_moved = true;
        }
        let head = locate::bucket_page(core, lookup::current_root(core), hash)?;
        next = walk::next_range(hash, lookup::bucket_bits(core, head, hash)?);
    }
    Ok(has_moved)
}

/// Whether nobody holds the lock of a key with this hash. Somebody who does may be writing behind the published part of its value, which must
/// not be moved then.
fn is_unlocked(core: &Core, hash: u64) -> bool {
    core.shm.stripe(stripe_of(hash)).holder(core.slot()) == Holder::None
}

/// One step for the bucket at `hash`; `false` if there is nothing more to do for it.
fn step(writer: &mut Writer, hash: u64, limit: PageNo, may_compact: &mut bool) -> Result<bool> {
    let core = writer.core;
    let path = locate::path(core, lookup::current_root(core), hash)?;
    let is_behind = |run: Run| run.first.0 as u64 + run.len as u64 > limit.0 as u64;
    // What has been copied once has found no better place.
    let may_move = |page: PageNo| -> Result<bool> { Ok(core.head(page)?.epoch() < core.epoch()) };
    if let Some(depth) = path.root.depth {
        let len = locate::array_pages(core.page_size, depth);
        let array = path.root.page;
        if is_behind(Run { first: array, len })
            && may_move(array)?
            && allocate::has_room_before(core, array, len)
        {
            return Ok(structure::own_array(writer, &path)? == Progress::Stepped);
        }
    }
    if let Some((entry, _)) = path.directory
        && is_behind(Run { first: entry.page, len: 1 })
        && may_move(entry.page)?
    {
        return Ok(structure::own_directory(writer, &path)? == Progress::Stepped);
    }
    let chain = lookup::chain(core, path.bucket)?;
    let mut moves = false;
    for &page in &chain {
        moves |= is_behind(Run { first: page, len: 1 }) && may_move(page)?;
    }
    let value = find_value(core, &chain, is_behind)?;
    if (moves || value.is_some()) && structure::own_bucket(writer, &path)? == Progress::Stepped {
        return Ok(true);
    }
    let Some(value) = value else { return Ok(false) };
    if core.bucket(value.page)?.free_bytes() >= value.record.len {
        move_value(writer, &value)?;
        *may_compact = true;
        return Ok(true);
    }
    if !*may_compact || chain.len() > 1 {
        return Ok(false);
    }
    *may_compact = false;
    let extra = Load { records: 0, bytes: value.record.len };
    structure::make_room(writer, &path, hash, extra).map(|_| true)
}

/// A record whose value is to be moved.
struct Value {
    page: PageNo,
    slot: usize,
    record: Record,
    extent: Extent,
}

/// A value of a bucket that lies behind the limit and has room before its own place.
fn find_value(
    core: &Core,
    chain: &[PageNo],
    is_behind: impl Fn(Run) -> bool,
) -> Result<Option<Value>> {
    let mut found = None;
    for &page in chain {
        core.bucket(page)?.for_each_live(core.damage(page), |slot, record| {
            if let Some(extent) = record.extent()
                && found.is_none()
                && extent.epoch < core.epoch()
                && is_behind(Run { first: extent.first, len: extent.pages })
                && is_unlocked(core, core.hash_of(&record)?)
                && allocate::has_room_before(core, extent.first, extent.pages)
            {
                found = Some(Value { page, slot, record, extent });
            }
            Ok(())
        })?;
    }
    Ok(found)
}

/// Copies the value's pages and replaces its record. The bucket is of the present epoch and has room.
fn move_value(writer: &mut Writer, value: &Value) -> Result<()> {
    let core = writer.core;
    let Value { page, slot, record, extent } = *value;
    let used = record.extent_bytes();
    let source = core.extent(&extent, used)?;
    let mut step = Step::begin(writer);
    let first = step.take(extent.pages)?;
    let target = core.run(first, extent.pages)?;
    // SAFETY: both runs are as long as the used bytes; the target is this step's own. They overlap only if a damaged map says
    // that pages of the tree are free.
    unsafe { std::ptr::copy(source, target, used as usize) };
    let moved = Extent { first, epoch: core.epoch(), ..extent };
    let mut bytes = Vec::new();
    match record.form {
        Form::LongKey { hash, .. } => {
            record::encode_long_key(&mut bytes, record.key_len, hash, record.value_len, &moved);
        }
        _ => {
            let key = core.key_of(&record)?;
            record::encode_long_value(&mut bytes, key, record.value_len, &moved);
        }
    }
    let bucket = core.bucket(page)?;
    let offset = bucket.write_record(&bytes).map_err(core.damage(page))?;
    bucket.head().count_dead(record.len);
    step.give(Run { first: extent.first, len: extent.pages }, extent.epoch)?;
    step.store(core.place(page, bucket.offset_place(slot)), 2, 1, offset as u64);
    crash_point("structure.move.value");
    step.structure()
}
