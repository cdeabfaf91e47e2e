//! Iteration over the records as they are at each moment.
//!
//! Buckets are visited in the order of hashes, each once and as a whole under one pin. Splits and merges only divide and join
//! ranges of hashes, so a record that is there throughout is seen exactly once, whatever else happens meanwhile. A
//! position is a hash and, among equal hashes, a key; it stays valid for ever, also in another process.

use std::collections::VecDeque;
use std::fmt;
use std::ops::ControlFlow;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::index::locate::Root;
use crate::index::{locate, lookup, walk};
use crate::page::bucket as page_bucket;
use crate::types::PageNo;

use super::db::Db;
use super::snapshot::Snapshot;

/// A position of an iteration, which can be stored and resumed, also in another process and after the record there is
/// gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The hash and key returned last; `None` before the first.
    last: Option<(u64, Vec<u8>)>,
    /// Behind the last record.
    at_end: bool,
}

impl Cursor {
    /// The position as bytes, to be stored.
    ///
    /// ```
    /// # let db = ntdb::Db::in_memory()?;
    /// # db.put(b"a", b"1")?; db.put(b"b", b"2")?;
    /// let mut iter = db.iter();
    /// iter.next();
    /// let saved = iter.cursor().to_bytes();
    /// let rest = db.iter_from(&ntdb::Cursor::from_bytes(&saved).unwrap());
    /// assert_eq!(rest.count(), 1);
    /// # Ok::<(), ntdb::Error>(())
    /// ```
    pub fn to_bytes(&self) -> Vec<u8> {
        match (&self.last, self.at_end) {
            (_, true) => vec![2],
            (None, false) => vec![0],
            (Some((hash, key)), false) => {
                let mut bytes = vec![1];
                bytes.extend_from_slice(&hash.to_le_bytes());
                bytes.extend_from_slice(key);
                bytes
            }
        }
    }

    /// A position from stored bytes; `None` if they are not one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Cursor> {
        match bytes {
            [0] => Some(Cursor::default()),
            [2] => Some(Cursor { last: None, at_end: true }),
            [1, rest @ ..] if rest.len() >= 8 => {
                let (hash, key) = rest.split_at(8);
                let hash = u64::from_le_bytes(hash.try_into().ok()?);
                Some(Cursor { last: Some((hash, key.to_vec())), at_end: false })
            }
            _ => None,
        }
    }
}

/// A value longer than this is read when its turn comes, instead of being kept in memory meanwhile.
const KEEP_VALUE_BYTES: usize = 4096;

/// A record of the bucket that is being iterated.
struct Pending {
    hash: u64,
    key: Vec<u8>,
    /// `None`: long, to be read later.
    value: Option<Vec<u8>>,
}

/// What is iterated.
pub(crate) enum Source {
    /// The present state, whatever it is when a record's turn comes.
    Live(Db),
    /// One moment.
    Snapshot(Snapshot),
    /// A moment that could not be held, and the reason until it has been told.
    Failed(Option<Error>),
}

impl Source {
    /// The present moment.
    pub(crate) fn now(db: &Db) -> Source {
        match Snapshot::open(db) {
            Ok(snapshot) => Source::Snapshot(snapshot),
            Err(error) => Source::Failed(Some(error)),
        }
    }
}

/// An iterator over all records; see [`Db::iter`]. After an error it ends.
pub struct Iter {
    source: Source,
    /// Where the next bucket begins; `None` at the end.
    next: Option<u64>,
    cursor: Cursor,
    pending: VecDeque<Pending>,
    /// Ended by an error: there may be more records.
    failed: bool,
}

impl fmt::Debug for Iter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut iter = f.debug_struct("Iter");
        match &self.source {
            Source::Live(db) => iter.field("live", db),
            Source::Snapshot(snapshot) => iter.field("snapshot", snapshot),
            Source::Failed(error) => iter.field("failed", error),
        };
        iter.finish_non_exhaustive()
    }
}

impl Iter {
    pub(crate) fn new(source: Source, cursor: Cursor) -> Iter {
        let next = match (&cursor.last, cursor.at_end) {
            (_, true) => None,
            (None, false) => Some(0),
            (Some((hash, _)), false) => Some(*hash),
        };
        Iter { source, next, cursor, pending: VecDeque::new(), failed: false }
    }

    /// The position behind the record that was returned last; also after an error, so that one can go on from there later.
    pub fn cursor(&self) -> Cursor {
        if self.next.is_none() && self.pending.is_empty() && !self.failed {
            return Cursor { last: None, at_end: true };
        }
        self.cursor.clone()
    }

    /// Reads the bucket at `hash` into `pending`, in order; returns where the next one begins.
    fn read_bucket(&mut self, hash: u64) -> Result<Option<u64>> {
        let last = self.cursor.last.as_ref();
        let (pending, next) = match &mut self.source {
            Source::Live(db) => {
                let environment = db.environment();
                let _pin = environment.pin()?;
                let core = &environment.core;
                read_bucket(core, lookup::current_root(core), hash, last)?
            }
            Source::Snapshot(snapshot) => {
                snapshot.check()?;
                read_bucket(snapshot.core(), snapshot.root(), hash, last)?
            }
            Source::Failed(error) => return error.take().map_or(Ok(None), Err),
        };
        self.pending = pending;
        Ok(next)
    }

    /// The value of a record that was too long to be kept.
    fn long_value(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        match &self.source {
            Source::Live(db) => db.get(key),
            Source::Snapshot(snapshot) => snapshot.get(key),
            Source::Failed(_) => Ok(None),
        }
    }
}

/// The records of the bucket at `hash` behind `last`, in order, and where the next bucket begins.
fn read_bucket(
    core: &Core,
    root: Root,
    hash: u64,
    last: Option<&(u64, Vec<u8>)>,
) -> Result<(VecDeque<Pending>, Option<u64>)> {
    let mut records = Vec::new();
    let bits = visit_bucket(core, root, hash, &mut Vec::new(), &mut |key, value| {
        let hash = core.hasher.hash(key);
        let value = (value.len() <= KEEP_VALUE_BYTES).then(|| value.to_vec());
        records.push(Pending { hash, key: key.to_vec(), value });
        ControlFlow::Continue(())
    })?
    .1;
    if let Some((last_hash, last_key)) = last {
        records.retain(|r| (r.hash, &r.key) > (*last_hash, last_key));
    }
    records.sort_unstable_by(|a, b| (a.hash, &a.key).cmp(&(b.hash, &b.key)));
    Ok((records.into(), walk::next_range(hash, bits)))
}

impl Iterator for Iter {
    type Item = Result<(Vec<u8>, Vec<u8>)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let Some(record) = self.pending.pop_front() else {
                let hash = self.next?;
                match self.read_bucket(hash) {
                    Ok(next) => {
                        self.next = next;
                        continue;
                    }
                    Err(error) => {
                        self.next = None;
                        self.failed = true;
                        return Some(Err(error));
                    }
                }
            };
            let value = match record.value {
                Some(value) => value,
                None => match self.long_value(&record.key) {
                    Ok(Some(value)) => value,
                    // Deleted since.
                    Ok(None) => continue,
                    Err(error) => {
                        self.next = None;
                        self.failed = true;
                        self.pending.clear();
                        return Some(Err(error));
                    }
                },
            };
            self.cursor.last = Some((record.hash, record.key.clone()));
            return Some(Ok((record.key, value)));
        }
    }
}

/// Calls `f` with the records of the bucket that holds `hash`; `slots` is memory to work in. Returns whether it broke, and the number of leading hash
/// bits that the bucket stands for. The caller holds a pin.
fn visit_bucket(
    core: &Core,
    root: Root,
    hash: u64,
    slots: &mut Vec<(u16, u16)>,
    f: &mut impl FnMut(&[u8], &[u8]) -> ControlFlow<()>,
) -> Result<(bool, u8)> {
    let head = locate::bucket_page(core, root, hash)?;
    let bits = lookup::bucket_bits(core, head, hash)?;
    // The bucket was joined with the one before it, which was visited by itself.
    let joined = !walk::begins(hash, bits);
    let mut page = head;
    let mut steps = 0;
    loop {
        let bucket = core.bucket(page)?;
        let mut room = bucket.record_room();
        bucket.live_slots(slots);
        for &(slot, offset) in slots.iter() {
            // Deleted since, perhaps by `f` itself.
            let Some(now) = bucket.live_offset(slot) else { continue };
            let record = bucket.record_at(now as usize).map_err(core.damage(page))?;
            if now != offset {
                // Changed since; or deleted, and another key has come into its slot, which belongs to a later moment.
                let before = bucket.record_at(offset as usize).map_err(core.damage(page))?;
                if core.key_of(&before)? != core.key_of(&record)? {
                    continue;
                }
            }
            room = room
                .checked_sub(record.len)
                .ok_or_else(|| core.corrupt(page, page_bucket::OVERLAP))?;
            if joined && core.hash_of(&record)? < hash {
                continue;
            }
            if f(core.key_of(&record)?, core.value_of(&record)?).is_break() {
                return Ok((true, bits));
            }
        }
        page = bucket.head().next();
        if page == PageNo::NONE {
            return Ok((false, bits));
        }
        steps = lookup::check_chain_step(core, head, steps)?;
    }
}

/// Calls `f` with every record of the present state until it breaks; returns how many it was called for.
pub fn for_each(db: &Db, mut f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<u64> {
    let environment = db.environment();
    let mut count = 0;
    let mut next = Some(0);
    let mut slots = Vec::new();
    while let Some(hash) = next {
        // One pin per bucket: what `f` does in its time holds back no more than that.
        let _pin = environment.pin()?;
        let core = &environment.core;
        let (broke, bits) =
            visit_bucket(core, lookup::current_root(core), hash, &mut slots, &mut |key, value| {
                count += 1;
                f(key, value)
            })?;
        if broke {
            break;
        }
        next = walk::next_range(hash, bits);
    }
    Ok(count)
}

/// As [`for_each`], below the root of a snapshot, or the private one of a transaction: the tree keeps still.
pub fn for_each_below(
    core: &Core,
    root: Root,
    mut f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>,
) -> Result<u64> {
    let mut count = 0;
    let mut next = Some(0);
    let mut slots = Vec::new();
    while let Some(hash) = next {
        let (broke, bits) = visit_bucket(core, root, hash, &mut slots, &mut |key, value| {
            count += 1;
            f(key, value)
        })?;
        if broke {
            break;
        }
        next = walk::next_range(hash, bits);
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_survive_as_bytes_and_others_are_refused() {
        for cursor in [
            Cursor::default(),
            Cursor { last: None, at_end: true },
            Cursor { last: Some((7, b"key".to_vec())), at_end: false },
            Cursor { last: Some((0, Vec::new())), at_end: false },
        ] {
            assert_eq!(Cursor::from_bytes(&cursor.to_bytes()), Some(cursor));
        }
        for bytes in [&b""[..], b"\x01short", b"\x03", b"\x00x"] {
            assert_eq!(Cursor::from_bytes(bytes), None);
        }
    }
}
