//! An open transaction: its private tree, its stream of logged operations, its savepoints, and how it ends.
//!
//! **One operation.** A transaction that puts or deletes one small record and does nothing else needs no private tree: the operation
//! is kept until there is a second one, or the commit, which then is an ordinary data step.
//!
//! Until the commit nothing of it can be seen. The commit is one data step, which appends the commit record, stores the root and
//! the count of the private tree in place of the shared ones, gives up the replaced pages and lets the claim go: whoever finds its
//! owner dead completes or drops it by the note, as with any step.

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::environment::Environment;
use crate::error::Result;
use crate::limits::MAX_RECORD_BYTES;
use crate::log::record::Op;
use crate::log::stream;
use crate::options::deadline_after;
use crate::space::retire;
use crate::storage::failpoint::crash_point;
use crate::types::Lsn;

use super::claim::{self, Claim};
use super::large;
use super::operation::{self, Condition};
use super::private::{Private, Saved};
use super::record::LogRecord;
use super::step::{IN_SHM, Step};
use super::writer::Writer;

/// Bytes of stream in one chunk of the log.
const CHUNK_BYTES: usize = (MAX_RECORD_BYTES / 2) as usize;
/// A stream up to this length is logged whole, in the commit record.
const WHOLE_BYTES_MAX: usize = MAX_RECORD_BYTES as usize - 64;

/// A place to roll back to.
#[derive(Clone, Debug)]
pub struct Savepoint {
    /// Tells savepoints of one transaction apart.
    pub id: u64,
    saved: Saved,
}

/// The only operation as yet.
#[derive(Debug)]
pub struct Only {
    hash: u64,
    key_len: usize,
    /// The key, and the value unless the key is deleted.
    bytes: Vec<u8>,
    is_put: bool,
    /// How it changes the number of records.
    adds: i64,
}

impl Only {
    /// The key.
    pub fn key(&self) -> &[u8] {
        &self.bytes[..self.key_len]
    }

    /// The value; `None` if the key is deleted.
    pub fn value(&self) -> Option<&[u8]> {
        self.is_put.then(|| &self.bytes[self.key_len..])
    }

    fn op(&self) -> Op<'_> {
        match self.value() {
            Some(value) => Op::Put { key: self.key(), value },
            None => Op::Delete { key: self.key() },
        }
    }
}

/// Longest key and value of an operation that is kept.
const ONLY_BYTES_MAX: usize = 4096;

/// See the module's description.
#[derive(Debug)]
pub struct Open<'e> {
    only: Option<Only>,

    environment: &'e Environment,
    claim: Option<Claim<'e>>,
    private: Option<Box<Private>>,
    /// The part of the stream that is not in the log yet.
    stream: Vec<u8>,
    /// Bytes of the stream that are in the log.
    logged: u64,
    crc: u32,
    first: Option<Lsn>,
    /// Parts of the stream that were rolled back: start and length.
    undone: Vec<(u64, u64)>,
    savepoints: Vec<Savepoint>,
    next_savepoint: u64,
    is_prepared: bool,
    /// How long giving it up may wait for a lock; then the next owner of the claim does it.
    lock_timeout: Option<Duration>,
    record: LogRecord,
    scratch: Vec<u8>,
}

impl<'e> Open<'e> {
    /// Opens a transaction. The caller has made sure that its thread holds no key lock and has no transaction open.
    /// `None` if that would mean to wait, and the caller won't (`wait`).
    pub fn begin(
        environment: &'e Environment,
        wait: bool,
        lock_timeout: Option<Duration>,
    ) -> Result<Option<Open<'e>>> {
        let core = &environment.core;
        let deadline = deadline_after(lock_timeout);
        let Some((claim, writer)) = Claim::open(core, wait, deadline)? else { return Ok(None) };
        let private = Private::new(core, environment.shm_id, lock_timeout);
        drop(writer);
        crash_point("transaction.open");
        Ok(Some(Open {
            only: None,
            environment,
            claim: Some(claim),
            private: Some(Box::new(private)),
            stream: Vec::new(),
            logged: 0,
            crc: 0,
            first: None,
            undone: Vec::new(),
            savepoints: Vec::new(),
            next_savepoint: 1,
            is_prepared: false,
            lock_timeout,
            record: LogRecord::default(),
            scratch: Vec::new(),
        }))
    }

    fn core(&self) -> &'e Core {
        &self.environment.core
    }

    /// The private tree.
    #[inline]
    pub fn private(&self) -> &Private {
        self.private.as_deref().expect("put back after every operation")
    }

    /// The only operation as yet, if it is kept and not carried out.
    #[inline]
    pub fn only(&self) -> Option<&Only> {
        self.only.as_ref()
    }

    /// Records as the transaction sees them.
    pub fn count(&self) -> u64 {
        self.private().count.saturating_add_signed(self.only.as_ref().map_or(0, |only| only.adds))
    }

    /// Keeps the operation, if it is the first and small. `was_present` says whether the key is there before it.
    #[inline]
    pub fn keep(&mut self, hash: u64, key: &[u8], value: Option<&[u8]>, was_present: bool) -> bool {
        let value_bytes = value.unwrap_or_default();
        if !self.may_keep() || key.len() + value_bytes.len() > ONLY_BYTES_MAX {
            return false;
        }
        let mut bytes = Vec::with_capacity(key.len() + value_bytes.len());
        bytes.extend_from_slice(key);
        bytes.extend_from_slice(value_bytes);
        let is_put = value.is_some();
        let adds = i64::from(is_put) - i64::from(was_present);
        self.only = Some(Only { hash, key_len: key.len(), bytes, is_put, adds });
        true
    }

    /// Whether nothing has been done yet.
    #[inline]
    pub fn may_keep(&self) -> bool {
        self.only.is_none() && self.is_unchanged() && self.savepoints.is_empty()
    }

    /// Carries out the operation that is kept, because another follows.
    #[inline]
    pub fn settle(&mut self) -> Result<()> {
        match self.only.take() {
            None => Ok(()),
            Some(only) => self.carry_out(only),
        }
    }

    /// As [`Open::settle`], before another operation; also puts into the log what former ones have left for that. It is
    /// done now, because an operation that has been carried out must not fail any more.
    #[inline]
    pub fn before_operation(&mut self, deadline: Option<Instant>) -> Result<()> {
        self.settle()?;
        if self.stream.len() > WHOLE_BYTES_MAX {
            self.log_chunks(deadline)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, only: Only) -> Result<()> {
        let hash = only.hash;
        let done = self.change(|writer, log, scratch| match only.value() {
            Some(value) => {
                operation::put(writer, hash, only.key(), value, Condition::Any, log, scratch)
            }
            None => operation::delete(writer, hash, only.key(), log),
        });
        match done {
            Ok(_) => {
                self.log(&only.op());
                Ok(())
            }
            Err(error) => {
                // Still to be done.
                self.only = Some(only);
                Err(error)
            }
        }
    }

    /// Commits the only operation as what it is.
    fn commit_only(
        &mut self,
        only: &Only,
        durable: bool,
        deadline: Option<Instant>,
    ) -> Result<Lsn> {
        let core = self.core();
        self.record.encode(&only.op());
        let bytes = self.record.len() as u64;
        if durable && core.is_logged() && !self.environment.has_log_room(bytes) {
            self.environment.secure_log_room(bytes, deadline)?;
        }
        let mut writer = large::lock_with_room(self.environment, bytes, deadline)?;
        let (log, scratch) = (&mut self.record, &mut self.scratch);
        let lsn = match only.value() {
            Some(value) => operation::put(
                &mut writer,
                only.hash,
                only.key(),
                value,
                Condition::Any,
                log,
                scratch,
            )?,
            None => operation::delete(&mut writer, only.hash, only.key(), log)?,
        };
        crash_point("transaction.committed");
        claim::clear(core);
        drop(writer);
        self.claim.take();
        Ok(lsn.unwrap_or_else(|| Lsn(core.control().writer.tail.load(Acquire))))
    }

    /// Lets `operate` change the private tree.
    #[inline]
    pub fn change<T>(
        &mut self,
        operate: impl FnOnce(&mut Writer, &mut LogRecord, &mut Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        let private = self.private.take().expect("put back after every operation");
        let mut writer = Writer::private(self.core(), private);
        let result = operate(&mut writer, &mut self.record, &mut self.scratch);
        self.private = writer.into_private();
        self.is_prepared = false;
        result
    }

    /// Adds an operation that was carried out to the stream.
    #[inline]
    pub fn log(&mut self, op: &Op) {
        if self.core().is_logged() {
            stream::append_op(&mut self.stream, op);
        }
    }

    /// Puts all whole chunks of the stream into the log.
    fn log_chunks(&mut self, deadline: Option<Instant>) -> Result<()> {
        let mut from = 0;
        let mut result = Ok(());
        while result.is_ok() && self.stream.len() - from >= CHUNK_BYTES {
            result = self.log_chunk(from..from + CHUNK_BYTES, deadline);
            if result.is_ok() {
                from += CHUNK_BYTES;
            }
        }
        // Also after a failure: a chunk that is in the log must not get there again.
        self.stream.drain(..from);
        result
    }

    fn log_chunk(&mut self, part: std::ops::Range<usize>, deadline: Option<Instant>) -> Result<()> {
        let core = self.core();
        let bytes = &self.stream[part];
        let record = &mut self.record;
        // The length does not depend on the LSN.
        record.encode(&Op::TransactionChunk { first: Lsn(0), bytes });
        let mut writer = large::lock_with_room(self.environment, record.len() as u64, deadline)?;
        let control = core.control();
        let lsn = Lsn(control.writer.tail.load(Relaxed));
        let first = self.first.unwrap_or(lsn);
        record.encode(&Op::TransactionChunk { first, bytes });
        let count = control.writer.count.load(Relaxed);
        let mut step = Step::begin(&mut writer);
        step.store_shared(&control.log.claim_first, first.0 + 1);
        step.data(record, count)?;
        crash_point("transaction.chunk");
        self.first = Some(first);
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        self.logged += bytes.len() as u64;
        Ok(())
    }

    fn position(&self) -> u64 {
        self.logged + self.stream.len() as u64
    }

    /// A savepoint at the present state; returns its number.
    pub fn savepoint(&mut self) -> u64 {
        let position = self.position();
        let core = self.core();
        let private = self.private.as_deref_mut().expect("put back after every operation");
        let id = self.next_savepoint;
        self.next_savepoint += 1;
        self.savepoints.push(Savepoint { id, saved: private.save(core, position) });
        id
    }

    /// Goes back to a savepoint, which stays; `false` if there is none of this number any more.
    pub fn roll_back(&mut self, id: u64) -> bool {
        let Some(index) = self.savepoints.iter().position(|savepoint| savepoint.id == id) else {
            return false;
        };
        self.savepoints.truncate(index + 1);
        let saved = self.savepoints[index].saved.clone();
        let core = self.core();
        self.private.as_deref_mut().expect("put back after every operation").restore(core, &saved);
        self.is_prepared = false;
        let (at, position) = (saved.stream, self.position());
        if at >= self.logged {
            self.stream.truncate((at - self.logged) as usize);
        } else {
            // What is in the log stays there; replay passes over it.
            self.undone.retain(|&(start, _)| start < at);
            if let Some((start, len)) = self.undone.last_mut() {
                *len = (*len).min(at.saturating_sub(*start));
            }
            if position > at {
                self.undone.push((at, position - at));
            }
        }
        true
    }

    /// Forgets a savepoint and those after it; their changes stay. `false` if there is none of this number any more.
    pub fn release(&mut self, id: u64) -> bool {
        let Some(index) = self.savepoints.iter().position(|savepoint| savepoint.id == id) else {
            return false;
        };
        self.savepoints.truncate(index);
        true
    }

    /// Whether nothing has been changed since the beginning.
    fn is_unchanged(&self) -> bool {
        !self.private().is_changed()
    }

    /// Does all of the commit that may fail for lack of room.
    pub fn prepare(&mut self, durable: bool, deadline: Option<Instant>) -> Result<()> {
        self.settle()?;
        if self.is_prepared || self.is_unchanged() {
            self.is_prepared = true;
            return Ok(());
        }
        let core = self.core();
        if core.is_logged() && (self.logged > 0 || self.stream.len() > WHOLE_BYTES_MAX) {
            self.log_chunks(deadline)?;
            if !self.stream.is_empty() {
                self.log_chunk(0..self.stream.len(), deadline)?;
                self.stream.clear();
            }
        }
        let mut undone = Vec::new();
        for &(start, len) in &self.undone {
            stream::append_undone(&mut undone, start, len);
        }
        self.record.encode(&match self.first {
            None => Op::Transaction { ops: &self.stream },
            Some(first) => Op::Commit { first, total: self.logged, crc: self.crc, undone: &undone },
        });
        if durable && core.is_logged() {
            self.environment.secure_log_room(self.record.len() as u64, deadline)?;
        }
        // Entries that others may add meanwhile.
        const OTHERS: u64 = 4096;
        let private = self.private();
        let entries = private.replaced.len() as u64 + private.leftovers().len() as u64 + OTHERS;
        let writer = Writer::lock(core, deadline)?;
        let fresh = &core.control().fresh;
        let bytes = (fresh.len.load(Relaxed) + entries) * retire::ENTRY_BYTES;
        core.shm.grow(fresh, bytes).map_err(|e| core.io("grow the shared state", e))?;
        drop(writer);
        crash_point("transaction.prepared");
        self.is_prepared = true;
        Ok(())
    }

    /// Commits; returns the end of the commit record, or of the log if nothing was changed.
    pub fn commit(&mut self, durable: bool, deadline: Option<Instant>) -> Result<Lsn> {
        if let Some(only) = self.only.take() {
            let result = self.commit_only(&only, durable, deadline);
            if result.is_err() {
                self.only = Some(only);
            }
            return result;
        }
        self.prepare(durable, deadline)?;
        let core = self.core();
        if self.is_unchanged() {
            let tail = core.control().writer.tail.load(Acquire);
            self.abort()?;
            return Ok(Lsn(tail));
        }
        let control = core.control();
        let bytes = self.record.len() as u64;
        let mut writer = large::lock_with_room(self.environment, bytes, deadline)?;
        let private = self.private();
        let now = core.epoch();
        let mut step = Step::begin(&mut writer);
        for &(run, made) in &private.replaced {
            step.give(run, made)?;
        }
        for run in private.leftovers() {
            step.give(run, now)?;
        }
        let place = core.shm.offset_of(&control.readers.root) | IN_SHM;
        step.store(place, 8, 1, private.root.to_word());
        step.store_shared(&control.claim_made.len, 0);
        step.store_shared(&control.log.claim_first, 0);
        crash_point("transaction.commit");
        let count = private.count;
        private.updates.publish(control);
        let lsn = step.data(&mut self.record, count)?;
        crash_point("transaction.committed");
        claim::clear(core);
        drop(writer);
        self.claim.take();
        Ok(lsn)
    }

    /// Gives everything up.
    pub fn abort(&mut self) -> Result<()> {
        let Some(claim) = self.claim.take() else { return Ok(()) };
        let core = self.core();
        if !claim::has_pages(core) {
            claim::clear(core);
            return Ok(());
        }
        let result = claim::abandon(core, deadline_after(self.lock_timeout));
        drop(claim);
        result
    }

    /// In a forked child, where nothing of it is this process's.
    pub fn forget(&mut self) {
        if let Some(claim) = self.claim.take() {
            std::mem::forget(claim);
        }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // What fails here, the next owner of the claim does.
        let _ = self.abort();
    }
}
