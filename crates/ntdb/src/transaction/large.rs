//! Values too long for one log record.
//!
//! The value is laid out in an extent, outside the writer lock, and logged in chunks as it is written; one ordinary step then
//! publishes it, with a log record that names the chunks by the LSN of the first. Until then nobody can see it: the pages are listed
//! in the shared state (*claim_made*), so that they are given back if the writer dies, and recovery drops chunks
//! that no record names. One such operation runs at a time, under the claim lock, and holds the key's stripe, so that
//! nobody else changes the key meanwhile.

use std::sync::atomic::Ordering::*;
use std::time::Instant;

use crate::core::Core;
use crate::environment::Environment;
use crate::error::Result;
use crate::limits::{MAX_CHUNK_BYTES, MAX_RECORD_BYTES, RING_BYTES};
use crate::log::record::Op;
use crate::page::record::{Extent, Record};
use crate::space::allocate;
use crate::storage::failpoint::crash_point;
use crate::types::{Lsn, Run};

use super::claim::{Claim, abandon, secure_lists};
use super::operation::{self, Appended, Condition, Layout};
use super::record::LogRecord;
use super::step::{Step, list_set};
use super::writer::Writer;

/// Bytes of value in one chunk.
const CHUNK_BYTES: usize = MAX_CHUNK_BYTES as usize;

/// Longest key and value that are logged in one record.
pub fn is_large(key_len: usize, value_len: usize) -> bool {
    (key_len as u64).saturating_add(value_len as u64) > MAX_RECORD_BYTES - 64
}

/// Stores a long value; `None` if the condition fails. The caller holds the key's stripe.
pub fn put(
    environment: &Environment,
    hash: u64,
    key: &[u8],
    value: &[u8],
    condition: Condition,
    deadline: Option<Instant>,
) -> Result<Option<Lsn>> {
    let core = &environment.core;
    let _claim = Claim::lock(core, deadline)?;
    if !condition.holds(present(core, hash, key, deadline)?.is_some()) {
        return Ok(None);
    }
    let (layout, _) = operation::layout(core.page_size, key.len(), value.len() as u64);
    let key_part = if layout == Layout::LongKey { key } else { &[] };
    let parts = [key_part, value];
    let result = prepare(environment, &parts, deadline).and_then(|(extent, first)| {
        let op = Op::PutChunked { key, len: value.len() as u64, first, crc: extent.crc };
        let mut record = LogRecord::default();
        record.encode(&op);
        let mut writer = lock_with_room(environment, record.len() as u64, deadline)?;
        operation::put_extent(
            &mut writer,
            hash,
            key,
            value.len() as u64,
            layout,
            &extent,
            condition,
            &mut record,
            finish,
        )
    });
    if result.is_err() {
        // If this fails too, the next holder of the claim does it.
        let _ = abandon(core, deadline);
    }
    result
}

/// Appends a long piece. The caller holds the key's stripe.
pub fn append(
    environment: &Environment,
    hash: u64,
    key: &[u8],
    bytes: &[u8],
    deadline: Option<Instant>,
) -> Result<Appended> {
    let core = &environment.core;
    let _claim = Claim::lock(core, deadline)?;
    // The old record must keep still while it is copied, whatever becomes of its bucket page.
    let _pin = environment.pin()?;
    let old = present(core, hash, key, deadline)?;
    let before = old.map_or(0, |record| record.value_len);
    let total = before + bytes.len() as u64;
    operation::check_lengths(core, key.len(), total)?;
    let layout = operation::layout_grown(core.page_size, old.as_ref(), key.len(), total);
    let key_part = if layout == Layout::LongKey { key } else { &[] };
    let result = prepare_append(environment, old.as_ref(), key_part, bytes, total, deadline)
        .and_then(|(extent, first, piece_crc)| {
            let len = bytes.len() as u64;
            let op = Op::AppendChunked { key, length_before: before, len, first, crc: piece_crc };
            let mut record = LogRecord::default();
            record.encode(&op);
            let mut writer = lock_with_room(environment, record.len() as u64, deadline)?;
            operation::put_extent(
                &mut writer,
                hash,
                key,
                total,
                layout,
                &extent,
                Condition::Any,
                &mut record,
                finish,
            )
        });
    match result {
        Ok(lsn) => Ok(Appended { lsn: lsn.unwrap_or_default(), len: total }),
        Err(error) => {
            let _ = abandon(core, deadline);
            Err(error)
        }
    }
}

/// Adds to the last step that the pages belong to the tree now.
fn finish(step: &mut Step) {
    let control = step.core().control();
    step.store_shared(&control.claim_made.len, 0);
    step.store_shared(&control.log.claim_first, 0);
}

fn present(
    core: &Core,
    hash: u64,
    key: &[u8],
    deadline: Option<Instant>,
) -> Result<Option<Record>> {
    let _writer = Writer::lock(core, deadline)?;
    operation::record_of(core, hash, key)
}

/// Takes the writer lock with room for `bytes` in the ring.
pub fn lock_with_room<'e>(
    environment: &'e Environment,
    bytes: u64,
    deadline: Option<Instant>,
) -> Result<Writer<'e>> {
    loop {
        let writer = Writer::lock(&environment.core, deadline)?;
        if has_room(&environment.core, bytes) {
            return Ok(writer);
        }
        drop(writer);
        environment.make_ring_room(bytes, deadline)?;
    }
}

/// Whether the ring has room for `bytes` more.
#[inline]
pub fn has_room(core: &Core, bytes: u64) -> bool {
    if !core.is_logged() {
        return true;
    }
    let control = core.control();
    let tail = control.writer.tail.load(Relaxed);
    tail + bytes - control.log.written.load(Acquire).min(tail) <= RING_BYTES
}

/// Takes an extent for the running large operation, and lists it in the same step.
fn take(core: &Core, pages: u32, deadline: Option<Instant>) -> Result<Extent> {
    allocate::allocate_ahead(core, pages, deadline)?;
    let mut writer = Writer::lock(core, deadline)?;
    let made = &core.control().claim_made;
    let index = made.len.load(Relaxed);
    secure_lists(&mut writer, 1)?;
    let mut step = Step::begin(&mut writer);
    let first = step.take(pages)?;
    list_set(core, made, index, Run { first, len: pages })?;
    step.store_shared(&made.len, index + 1);
    step.structure()?;
    Ok(Extent { first, pages, crc: 0, epoch: core.epoch() })
}

/// Lays `parts` out in a new extent and logs them in chunks. Returns the extent and the LSN of the first chunk.
fn prepare(
    environment: &Environment,
    parts: &[&[u8]],
    deadline: Option<Instant>,
) -> Result<(Extent, Lsn)> {
    let core = &environment.core;
    let total: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let mut extent = take(core, operation::extent_pages(core, total, 0)?, deadline)?;
    crash_point("large.taken");
    let at = core.run(extent.first, extent.pages)?;
    let mut log = Chunks { environment, total, first: None, deadline };
    let mut offset = 0;
    for piece in parts.iter().flat_map(|part| part.chunks(CHUNK_BYTES)) {
        // SAFETY: within the extent, which is this operation's own until it is published.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), at.add(offset), piece.len()) };
        offset += piece.len();
        extent.crc = crc32c::crc32c_append(extent.crc, piece);
        log.write(piece)?;
    }
    Ok((extent, log.first.unwrap_or_default()))
}

/// Puts `bytes` behind the old value, in its extent if there is room, else in a new one with room to grow. Returns the extent, the LSN
/// of the first chunk, and the checksum of `bytes` alone.
fn prepare_append(
    environment: &Environment,
    old: Option<&Record>,
    key_part: &[u8],
    bytes: &[u8],
    total: u64,
    deadline: Option<Instant>,
) -> Result<(Extent, Lsn, u32)> {
    let core = &environment.core;
    let mut log = Chunks { environment, total: bytes.len() as u64, first: None, deadline };
    let in_place = old
        .filter(|record| operation::fits_behind(core, record, bytes.len()))
        .and_then(|record| record.extent().map(|extent| (record, extent)));
    let (mut extent, mut offset) = match in_place {
        Some((record, extent)) => {
            // Verified before it grows, so that its checksum can be carried on.
            core.extent(&extent, record.extent_bytes())?;
            (extent, record.extent_bytes() as usize)
        }
        None => {
            let value = match old {
                Some(record) => core.value_of(record)?,
                None => &[],
            };
            let len = key_part.len() as u64 + total;
            let growth = if old.is_some() { len / 2 } else { 0 };
            let pages = operation::extent_pages(core, len, growth)?;
            let mut extent = take(core, pages, deadline)?;
            crash_point("large.taken");
            let at = core.run(extent.first, extent.pages)?;
            let mut offset = 0;
            for part in [key_part, value] {
                // SAFETY: within the extent, which is this operation's own. The old value stays: the stripe keeps its key from being
                // changed.
                unsafe {
                    std::ptr::copy(part.as_ptr(), at.add(offset), part.len());
                }
                offset += part.len();
                extent.crc = crc32c::crc32c_append(extent.crc, part);
            }
            (extent, offset)
        }
    };
    let at = core.run(extent.first, extent.pages)?;
    let mut piece_crc = 0;
    for piece in bytes.chunks(CHUNK_BYTES) {
        // SAFETY: behind the published bytes, where only the holder of the stripe writes; or in an extent of its own.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), at.add(offset), piece.len()) };
        offset += piece.len();
        extent.crc = crc32c::crc32c_append(extent.crc, piece);
        piece_crc = crc32c::crc32c_append(piece_crc, piece);
        log.write(piece)?;
    }
    Ok((extent, log.first.unwrap_or_default(), piece_crc))
}

/// The chunks of one value in the log.
struct Chunks<'e> {
    environment: &'e Environment,
    total: u64,
    first: Option<Lsn>,
    deadline: Option<Instant>,
}

impl Chunks<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let core = &self.environment.core;
        if !core.is_logged() {
            return Ok(());
        }
        let mut record = LogRecord::default();
        // The length does not depend on the LSN.
        let probe = Op::Chunk { first: Lsn(0), total: self.total, bytes };
        record.encode(&probe);
        let mut writer = lock_with_room(self.environment, record.len() as u64, self.deadline)?;
        let control = core.control();
        let lsn = Lsn(control.writer.tail.load(Relaxed));
        let first = *self.first.get_or_insert(lsn);
        record.encode(&Op::Chunk { first, total: self.total, bytes });
        let count = control.writer.count.load(Relaxed);
        let mut step = Step::begin(&mut writer);
        step.store_shared(&control.log.claim_first, first.0 + 1);
        step.data(&mut record, count)?;
        crash_point("large.chunk");
        Ok(())
    }
}
