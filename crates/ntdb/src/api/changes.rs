//! Following the changes: reading the log as it grows, and sleeping until something happens.
//!
//! What happens to a database is in its redo log before anybody can see it. [`Changes`] reads it from any position on that
//! is still kept (see `log::follow`), passes over what never happened, as recovery does, and puts together what came in
//! chunks. Chunks are not remembered on the way: when the record comes that names them they are read again, from the first one
//! on. So a position is a place in the log and nothing else, also in the middle of a long transaction.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use crate::core::Backing;
use crate::error::{Error, Result};
use crate::log::follow::{self, Followed, Follower};
use crate::log::record::Op;
use crate::log::stream::{StreamOp, StreamProblem, StreamReader};
use crate::options::deadline_after;
use crate::transaction::operation::{self, Layout};
use crate::transaction::writer::Writer;

use super::db::Db;
use super::transaction::Transaction;

/// A place between two changes of a database: those before it have been seen, the next one begins there.
///
/// It consists of the change counter ([`Db::change_counter`]) and a number that tells one history from another: after a power cut
/// that took changes which were not yet durable, other changes get the same counters, and whoever had read the lost ones is
/// told so ([`Error::ChangesLost`]). As text, `counter-history`, it can be stored and read back. Made from a number alone it has no
/// history, and none is checked.
///
/// Positions stay valid when the database is closed and opened again, and after a crash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Position {
    counter: u64,
    history: u64,
}

impl Position {
    /// Before the first change of all.
    pub const START: Position = Position { counter: 0, history: 0 };

    /// The change counter.
    pub fn counter(self) -> u64 {
        self.counter
    }
}

impl From<u64> for Position {
    fn from(counter: u64) -> Position {
        Position { counter, history: 0 }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.history {
            0 => write!(f, "{}", self.counter),
            history => write!(f, "{}-{history:016x}", self.counter),
        }
    }
}

impl FromStr for Position {
    type Err = Error;

    fn from_str(text: &str) -> Result<Position> {
        let wrong = || Error::InvalidOption {
            what: "position in the changes",
            reason: format!("`{text}` is neither a number nor a number, `-` and 16 hex digits"),
        };
        let plain = |text: &str, radix| {
            let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
            if digits { u64::from_str_radix(text, radix).ok() } else { None }
        };
        match text.split_once('-') {
            None => plain(text, 10).map(Position::from).ok_or_else(wrong),
            Some((counter, history)) if history.len() == 16 => {
                match (plain(counter, 10), plain(history, 16)) {
                    (Some(counter), Some(history)) => Ok(Position { counter, history }),
                    _ => Err(wrong()),
                }
            }
            Some(_) => Err(wrong()),
        }
    }
}

/// One operation of a [`Change`]: what has happened, never a condition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Operation {
    /// The key has this value now.
    Put {
        /// The key.
        key: Vec<u8>,
        /// Its new value.
        value: Vec<u8>,
    },
    /// The key, which was there, is gone.
    Delete {
        /// The key.
        key: Vec<u8>,
    },
    /// Bytes were added to the end of the key's value; if the key was absent, it has just these now.
    Append {
        /// The key.
        key: Vec<u8>,
        /// Bytes of the value before.
        length_before: u64,
        /// What was added.
        bytes: Vec<u8>,
    },
    /// All records are gone.
    Clear,
}

impl Operation {
    /// The key that it is about; `None` if it is about all.
    pub fn key(&self) -> Option<&[u8]> {
        match self {
            Operation::Put { key, .. }
            | Operation::Delete { key }
            | Operation::Append { key, .. } => Some(key),
            Operation::Clear => None,
        }
    }

    /// Does the same in a transaction of another database.
    ///
    /// # Errors
    /// As [`Transaction::put`].
    pub fn apply(&self, transaction: &mut Transaction<'_>) -> Result<()> {
        match self {
            Operation::Put { key, value } => transaction.put(key, value),
            Operation::Delete { key } => transaction.delete(key).map(drop),
            Operation::Append { key, bytes, .. } => transaction.append(key, bytes).map(drop),
            Operation::Clear => transaction.clear(),
        }
    }

    /// The operation of a record that holds all of it.
    fn of(op: &Op<'_>) -> Option<Operation> {
        Some(match *op {
            Op::Put { key, value } => Operation::Put { key: key.to_vec(), value: value.to_vec() },
            Op::Delete { key } => Operation::Delete { key: key.to_vec() },
            Op::Append { key, length_before, bytes } => {
                Operation::Append { key: key.to_vec(), length_before, bytes: bytes.to_vec() }
            }
            Op::Clear => Operation::Clear,
            _ => return None,
        })
    }
}

/// Something that has happened to a database, at once: a single operation, or all of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// Its sequence number: the change counter before it. Later changes have higher ones, whichever process made them.
    pub sequence: u64,
    /// Where the next change begins: go on from here ([`Db::changes`]).
    pub next: Position,
    /// Whether it was a transaction.
    pub is_transaction: bool,
    /// What has happened, in order.
    pub operations: Vec<Operation>,
}

/// The changes of a database from some position on, in order. See [`Db::changes`].
pub struct Changes {
    db: Db,
    follower: Follower,
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let position = self.position();
        f.debug_struct("Changes").field("db", &self.db).field("position", &position).finish()
    }
}

impl Changes {
    pub(crate) fn new(db: &Db, from: Position) -> Result<Changes> {
        let environment = db.environment();
        environment.ensure_session()?;
        let core = &environment.core;
        if !matches!(core.backing, Backing::Shared | Backing::SharedReadOnly) {
            return Err(Error::NoChanges { path: core.path.clone() });
        }
        let follower = follow::follow(core, &environment.logs, from.counter, from.history)?;
        Ok(Changes { db: db.clone(), follower })
    }

    /// Where the next change begins.
    pub fn position(&self) -> Position {
        let (counter, history) = self.follower.position();
        Position { counter, history }
    }

    /// The next change, or `None` if there is none yet. Takes no lock, and nobody ever waits for it. A change is told as soon as
    /// everybody can see it; whether it is durable depends on who made it.
    ///
    /// A transaction, or a long value, is put together in memory.
    ///
    /// # Errors
    /// [`Error::ChangesNotKept`] if the log has gone on faster than it was read; [`Error::Corrupt`] if it is damaged. What
    /// has been told before is right all the same.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Change>> {
        let environment = self.db.environment();
        environment.ensure_session()?;
        let (core, logs) = (&environment.core, &environment.logs);
        let before = self.follower.position();
        loop {
            let Some(Followed { lsn, next, op }) = self.follower.next(core, logs)? else {
                return Ok(None);
            };
            let named = match op {
                Op::Chunk { .. } | Op::TransactionChunk { .. } => continue,
                Op::Transaction { ops } => {
                    let pieces = [ops];
                    let stream = StreamReader::new(&pieces);
                    Whole::Transaction(operations(stream).map_err(|e| damage(&self.db, lsn, e))?)
                }
                Op::Commit { .. } | Op::PutChunked { .. } | Op::AppendChunked { .. } => {
                    Whole::InChunks(Named::of(&op))
                }
                _ => Whole::Single(Operation::of(&op)),
            };
            let whole = match named {
                Whole::InChunks(named) => {
                    let result = named.read(&self.db, lsn);
                    if result.is_err() {
                        // Whoever asks again is told the same.
                        self.follower = Follower::new(before.0, before.1);
                    }
                    result?
                }
                whole => whole,
            };
            let (is_transaction, operations) = match whole {
                Whole::Transaction(operations) => (true, operations),
                Whole::Single(Some(operation)) => (false, vec![operation]),
                Whole::Single(None) | Whole::InChunks(_) => continue,
            };
            // All of it was undone.
            if operations.is_empty() {
                continue;
            }
            let (counter, history) = self.follower.position();
            debug_assert_eq!(counter, next);
            let next = Position { counter, history };
            return Ok(Some(Change { sequence: lsn, next, is_transaction, operations }));
        }
    }

    /// As [`Changes::next`], but sleeps until there is one, for `limit` at most (`None`: as long as it takes); `None` when that time
    /// is over.
    ///
    /// # Errors
    /// As [`Changes::next`].
    pub fn wait_next(&mut self, limit: Option<Duration>) -> Result<Option<Change>> {
        let wait = Wait::begin(&self.db, limit);
        loop {
            if let Some(change) = self.next()? {
                return Ok(Some(change));
            }
            if !self.db.sleep_until_change(self.follower.position().0, &wait)? {
                return self.next();
            }
        }
    }
}

/// A wait for changes.
struct Wait {
    deadline: Option<Instant>,
    /// How often waits had been ended when it began.
    ended_before: u32,
}

impl Wait {
    fn begin(db: &Db, limit: Option<Duration>) -> Wait {
        let ended_before = db.environment().ended_waits.load(SeqCst);
        Wait { deadline: deadline_after(limit), ended_before }
    }
}

/// What a record turns out to be.
enum Whole {
    Transaction(Vec<Operation>),
    Single(Option<Operation>),
    InChunks(Named),
}

/// A record that names chunks.
enum Named {
    Commit { first: u64, total: u64, crc: u32, undone: Vec<u8> },
    Value { key: Vec<u8>, len: u64, before: Option<u64>, first: u64, crc: u32 },
}

impl Named {
    fn of(op: &Op<'_>) -> Named {
        match *op {
            Op::Commit { first, total, crc, undone } => {
                Named::Commit { first: first.0, total, crc, undone: undone.to_vec() }
            }
            Op::PutChunked { key, len, first, crc } => {
                Named::Value { key: key.to_vec(), len, before: None, first: first.0, crc }
            }
            Op::AppendChunked { key, length_before, len, first, crc } => Named::Value {
                key: key.to_vec(),
                len,
                before: Some(length_before),
                first: first.0,
                crc,
            },
            _ => unreachable!("called for records that name chunks"),
        }
    }

    /// Puts together what the record at `lsn` names.
    fn read(self, db: &Db, lsn: u64) -> Result<Whole> {
        let core = &db.environment().core;
        match self {
            Named::Commit { first, total, crc, undone } => {
                let chunks = chunks(db, first, lsn, true)?;
                let pieces: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
                let operations = StreamReader::committed(&pieces, total, crc, &undone)
                    .and_then(operations)
                    .map_err(|problem| damage(db, lsn, problem))?;
                Ok(Whole::Transaction(operations))
            }
            Named::Value { key, len, before, first, crc } => {
                let mut bytes = chunks(db, first, lsn, false)?.concat();
                operation::check_lengths(core, key.len(), len)?;
                let layout = operation::layout(core.page_size, key.len(), len).0;
                let has_key = before.is_none() && layout == Layout::LongKey;
                let key_bytes = if has_key { key.len() } else { 0 };
                let is_whole = bytes.len() as u64 == key_bytes as u64 + len
                    && crc32c::crc32c(&bytes) == crc
                    && bytes[..key_bytes] == key[..key_bytes];
                if !is_whole {
                    return Err(damage(db, lsn, "the chunks of a value do not add up to it"));
                }
                bytes.drain(..key_bytes);
                Ok(Whole::Single(Some(match before {
                    None => Operation::Put { key, value: bytes },
                    Some(length_before) => Operation::Append { key, length_before, bytes },
                })))
            }
        }
    }
}

/// The chunks of the series that begins at `first`, as far as they come before `end`.
fn chunks(db: &Db, first: u64, end: u64, of_transaction: bool) -> Result<Vec<Vec<u8>>> {
    let environment = db.environment();
    let (core, logs) = (&environment.core, &environment.logs);
    if first >= end {
        return Err(damage(db, end, "it names a first chunk behind itself"));
    }
    let mut follower = Follower::new(first, 0);
    let mut found = Vec::new();
    while follower.position().0 < end {
        let Some(Followed { op, .. }) = follower.next(core, logs)? else { break };
        match op {
            Op::TransactionChunk { first: series, bytes }
                if of_transaction && series.0 == first =>
            {
                found.push(bytes.to_vec());
            }
            Op::Chunk { first: series, bytes, .. } if !of_transaction && series.0 == first => {
                found.push(bytes.to_vec());
            }
            _ => {}
        }
    }
    Ok(found)
}

/// The operations of a transaction.
fn operations(mut stream: StreamReader<'_>) -> Result<Vec<Operation>, StreamProblem> {
    let mut operations = Vec::new();
    while let Some(op) = stream.next()? {
        operations.extend(match op {
            StreamOp::Whole(op) => Operation::of(&op),
            StreamOp::Long { head, value } => {
                let bytes = value.collect::<Vec<_>>().concat();
                Some(match head {
                    Op::Append { key, length_before, .. } => {
                        Operation::Append { key: key.to_vec(), length_before, bytes }
                    }
                    Op::Put { key, .. } => Operation::Put { key: key.to_vec(), value: bytes },
                    _ => continue,
                })
            }
        });
    }
    Ok(operations)
}

#[cold]
fn damage(db: &Db, lsn: u64, reason: impl ToString) -> Error {
    Error::Corrupt {
        path: db.environment().core.path.clone(),
        place: format!("LSN {lsn} of the log"),
        reason: reason.to_string(),
    }
}

/// Whether what a record says concerns `key`.
fn concerns(db: &Db, followed: &Followed<'_>, key: &[u8]) -> Result<Concerns> {
    let lsn = followed.lsn;
    Ok(match followed.op {
        Op::Put { key: other, .. }
        | Op::Delete { key: other }
        | Op::Append { key: other, .. }
        | Op::PutChunked { key: other, .. }
        | Op::AppendChunked { key: other, .. } => Concerns::certain(other == key),
        Op::Clear => Concerns::Yes,
        Op::Chunk { .. } | Op::TransactionChunk { .. } => Concerns::No,
        Op::Transaction { ops } => {
            let pieces = [ops];
            let mut stream = StreamReader::new(&pieces);
            while let Some(op) = stream.next().map_err(|problem| damage(db, lsn, problem))? {
                let (StreamOp::Whole(op) | StreamOp::Long { head: op, .. }) = op;
                let is_it = match op {
                    Op::Put { key: other, .. }
                    | Op::Delete { key: other }
                    | Op::Append { key: other, .. } => other == key,
                    _ => true,
                };
                if is_it {
                    return Ok(Concerns::Yes);
                }
            }
            Concerns::No
        }
        Op::Commit { .. } => Concerns::InChunks(Named::of(&followed.op)),
    })
}

/// See [`concerns`].
enum Concerns {
    Yes,
    No,
    InChunks(Named),
}

impl Concerns {
    fn certain(yes: bool) -> Concerns {
        if yes { Concerns::Yes } else { Concerns::No }
    }
}

impl Db {
    /// The changes from `from` on, in order: what this and all other processes put, append, delete and clear, with all of a
    /// transaction as one.
    ///
    /// How far back they reach depends on how much log is kept: without [`Options::keep_log`](crate::Options::keep_log) that is only
    /// what recovery may need, and what was done since the database was opened by the first who has it open.
    ///
    /// # Errors
    /// [`Error::ChangesNotKept`] and [`Error::ChangesAhead`] if `from` is too old or in the future; [`Error::ChangesLost`] if what led
    /// to it has been lost; [`Error::InvalidOption`] if no change begins there; [`Error::NoChanges`] for a database in memory.
    ///
    /// ```
    /// # fn main() -> ntdb::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// let db = ntdb::Db::create(dir.path().join("a.ntdb"))?;
    /// let copy = ntdb::Db::in_memory()?;
    /// let mut changes = db.changes(db.position()?)?;
    /// db.put(b"colour", b"green")?;
    /// db.append(b"colour", b" and blue")?;
    /// while let Some(change) = changes.next()? {
    ///     copy.transaction(|tx| change.operations.iter().try_for_each(|op| op.apply(tx)))?;
    /// }
    /// assert_eq!(copy.get(b"colour")?.as_deref(), Some(&b"green and blue"[..]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn changes(&self, from: impl Into<Position>) -> Result<Changes> {
        Changes::new(self, from.into())
    }

    /// The present end of the changes: what is done from now on comes behind it.
    ///
    /// # Errors
    /// As [`Db::len`].
    pub fn position(&self) -> Result<Position> {
        self.environment().ensure_session()?;
        let (counter, history) = follow::present(&self.environment().core);
        Ok(Position { counter, history })
    }

    /// Sleeps until `key` has been changed by anybody (`None`: until anything has), for `limit` at most (`None`: as long as it
    /// takes); says whether it has. A change of another key ends the sleep for a moment, but not the call. Storing the value that was
    /// there already counts as a change.
    ///
    /// What changed before the call does not count. To wait for what may have changed since a value was read, use
    /// [`Db::wait_for_change_since`].
    ///
    /// # Errors
    /// As [`Db::wait_for_change_since`].
    pub fn wait_for_change(&self, key: Option<&[u8]>, limit: Option<Duration>) -> Result<bool> {
        let since = self.change_counter()?;
        Ok(self.wait_for_change_since(key, since, limit)?.is_some())
    }

    /// As [`Db::wait_for_change`], for what has changed since the change counter was `since`, also if that was before the call.
    /// Returns the change counter to go on with, or `None` when the time is over.
    ///
    /// # Errors
    /// With a key: as [`Db::changes`]. A database in memory has no log to look into, so with a key that is
    /// [`Error::NoChanges`] there.
    ///
    /// ```
    /// # fn main() -> ntdb::Result<()> {
    /// # use std::time::Duration;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = ntdb::Db::create(dir.path().join("a.ntdb"))?;
    /// # db.put(b"job", b"first")?;
    /// let seen = db.change_counter()?;
    /// let job = db.get(b"job")?;
    /// // ... work on it, while others may store the next one ...
    /// # db.put(b"job", b"second")?;
    /// let next = db.wait_for_change_since(Some(b"job"), seen, Some(Duration::from_secs(5)))?;
    /// assert!(next.is_some_and(|next| next > seen));
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_for_change_since(
        &self,
        key: Option<&[u8]>,
        since: u64,
        limit: Option<Duration>,
    ) -> Result<Option<u64>> {
        let wait = Wait::begin(self, limit);
        let Some(key) = key else {
            loop {
                let now = self.change_counter()?;
                if now > since {
                    return Ok(Some(now));
                }
                if !self.sleep_until_change(since, &wait)? {
                    return Ok(None);
                }
            }
        };
        let mut changes = Changes::new(self, Position::from(since))?;
        loop {
            if let Some(counter) = self.find_change(&mut changes.follower, key)? {
                return Ok(Some(counter));
            }
            if !self.sleep_until_change(changes.follower.position().0, &wait)? {
                return Ok(None);
            }
        }
    }

    /// Goes through what has been done; returns the change counter behind the first change of `key`.
    fn find_change(&self, follower: &mut Follower, key: &[u8]) -> Result<Option<u64>> {
        let environment = self.environment();
        environment.ensure_session()?;
        let (core, logs) = (&environment.core, &environment.logs);
        while let Some(followed) = follower.next(core, logs)? {
            let (lsn, next) = (followed.lsn, followed.next);
            let is_it = match concerns(self, &followed, key)? {
                Concerns::Yes => true,
                Concerns::No => false,
                Concerns::InChunks(named) => match named.read(self, lsn)? {
                    Whole::Transaction(operations) => {
                        operations.iter().any(|op| op.key().is_none_or(|other| other == key))
                    }
                    _ => false,
                },
            };
            if is_it {
                return Ok(Some(next));
            }
        }
        Ok(None)
    }

    /// Ends all waits for changes on this database that are under way in this process ([`Changes::wait_next`],
    /// [`Db::wait_for_change`]), as if their time was over: for a thread that is to stop. A wait that begins later is not
    /// ended.
    pub fn end_waits(&self) {
        self.environment().ended_waits.fetch_add(1, SeqCst);
        // Those of other processes look about and sleep on.
        self.environment().core.control().awaited().wake_all();
    }

    /// Sleeps until something has changed since the change counter was `seen`; false if the time is over first. May return early.
    fn sleep_until_change(&self, seen: u64, wait: &Wait) -> Result<bool> {
        let environment = self.environment();
        environment.ensure_session()?;
        let control = environment.core.control();
        let left = match wait.deadline {
            None => Duration::MAX,
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
        };
        if left.is_zero() || environment.ended_waits.load(SeqCst) != wait.ended_before {
            return Ok(false);
        }
        let slept_since = Instant::now();
        let is_over = || environment.ended_waits.load(SeqCst) != wait.ended_before;
        control.awaited().sleep(seen, left, is_over);
        if slept_since.elapsed() >= crate::shm::awaited::PATIENCE
            && let Some(owner) = control.writer_lock.turn().owner()
            && !environment.core.is_alive(owner)
            && environment.core.backing == Backing::Shared
        {
            // A writer that died in the middle of a change, which nobody has finished since.
            match Writer::lock(&environment.core, wait.deadline) {
                Err(Error::Locked { .. }) => {}
                repaired => drop(repaired?),
            }
        }
        Ok(true)
    }
}
