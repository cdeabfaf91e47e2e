//! The handle of an open database.

use std::cell::RefCell;
use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::copy::copy_fitting;
use crate::core::{Backing, Core};
use crate::environment::{Environment, attach, private};
use crate::error::{Error, Result};
use crate::index::{discard, lookup};
use crate::limits::{SHORT_KEY, SHORT_VALUE};
use crate::log::flush::check_poison;
use crate::log::record::{Op, ShortPut};
use crate::options::{self, Durability, Options, deadline_after};
use crate::shm::stripe::{Holder, stripe_of, thread_token};
use crate::space::patience;
use crate::storage::failpoint::crash_point;
use crate::transaction::claim;
use crate::transaction::large::{self, has_room};
use crate::transaction::operation::{self, Condition};
use crate::transaction::record::{LogRecord, Unplaced};
use crate::transaction::writer::Writer;
use crate::types::{Lsn, SlotId};

use super::backup::{self, BackupOptions, BackupProgress, BackupReport};
use super::check::{self, CheckReport};
use super::fill::{self, Fill};
use super::iterate::{self, Cursor, Iter, Source};
use super::key_lock::{self, KeyLock, Patience};
use super::snapshot::Snapshot;
use super::stat::{self, Stat};
use super::transaction::Transaction;

/// An open database.
///
/// Cheap to clone; clones share everything. Any thread may use it at any time, together with any other thread and process, and
/// a forked child may go on using its copy.
///
/// Reads take no lock and make no system call; they never wait for anybody. Writes take the writer lock for a fraction of a
/// microsecond. What a write promises when it returns is its [`Durability`].
///
/// When the last handle of the last process is dropped, the database is put to rest: a checkpoint is written and the
/// companion files are removed. [`Db::close`] does the same and reports errors.
///
/// ```
/// # fn main() -> ntdb::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let db = ntdb::Db::create(dir.path().join("words.ntdb"))?;
/// db.put(b"hello", b"world")?;
/// assert_eq!(db.get(b"hello")?.as_deref(), Some(&b"world"[..]));
/// assert!(!db.insert(b"hello", b"again")?);
/// assert!(db.delete(b"hello")?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Db {
    /// Dropped first.
    opening: Arc<Opening>,
    environment: Arc<Environment>,
    durability: Durability,
    lock_timeout: Option<Duration>,
    read_only: bool,
}

/// What the clones of one handle share. The last of them waits for a checkpoint that runs in the background, which has a
/// share of the environment: else it might be that checkpoint, in a thread that ends with the program, that would have to put the
/// database to rest.
struct Opening {
    environment: Arc<Environment>,
}

/// What the user has chosen, and nothing of the inside: that is long, and has the key of the hash in it.
impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Db")
            .field("path", &self.path())
            .field("durability", &self.durability)
            .field("lock_timeout", &self.lock_timeout)
            .field("read_only", &self.read_only)
            .finish()
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.environment.finish_background();
    }
}

/// Memory that a thread's operations re-use.
#[derive(Default)]
struct Scratch {
    log: LogRecord,
    record: Vec<u8>,
}

/// What became of the attempt to do an operation the usual way.
enum Quick<'a> {
    /// It is done, up to there in the log; or its condition does not hold.
    Done(Option<Lsn>),
    /// Nothing has happened; with the lock, if only the page was not fit.
    Not(Option<Writer<'a>>),
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Most memory that a thread keeps for its operations.
const KEEP_SCRATCH_BYTES: usize = 64 << 10;

impl Db {
    /// Opens an existing database for reading and writing, with the default [`Options`].
    ///
    /// # Errors
    /// As [`Options::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Db> {
        Options::new().open(path)
    }

    /// Opens a database for reading and writing, and creates it if it does not exist.
    ///
    /// # Errors
    /// As [`Options::open`].
    pub fn create(path: impl AsRef<Path>) -> Result<Db> {
        Options::new().create(true).open(path)
    }

    /// A new database in this process's memory.
    ///
    /// # Errors
    /// [`Error::AddressSpace`].
    pub fn in_memory() -> Result<Db> {
        Options::new().open_in_memory()
    }

    pub(crate) fn open_with(path: &Path, options: &Options) -> Result<Db> {
        attach::open(path, options).map(|environment| Db::new(environment, options))
    }

    pub(crate) fn open_in_memory_with(options: &Options) -> Result<Db> {
        private::open_in_memory(options).map(|environment| Db::new(environment, options))
    }

    fn new(environment: Arc<Environment>, options: &Options) -> Db {
        let read_only = options.read_only
            || matches!(environment.core.backing, Backing::SharedReadOnly | Backing::Private);
        Db {
            opening: Arc::new(Opening { environment: environment.clone() }),
            environment,
            durability: options.durability,
            lock_timeout: options.lock_timeout,
            read_only,
        }
    }

    #[inline]
    pub(crate) fn environment(&self) -> &Arc<Environment> {
        &self.environment
    }

    #[inline]
    fn core(&self) -> &Core {
        &self.environment.core
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        deadline_after(self.lock_timeout)
    }

    /// A handle to the same database whose single operations promise `durability`.
    pub fn with_durability(&self, durability: Durability) -> Db {
        Db { durability, ..self.clone() }
    }

    /// A handle to the same database that waits at most `limit` for locks (`None`: as long as it takes).
    pub fn with_lock_timeout(&self, limit: Option<Duration>) -> Db {
        Db { lock_timeout: limit, ..self.clone() }
    }

    /// How long this handle waits for a lock at most.
    pub(super) fn lock_timeout(&self) -> Option<Duration> {
        self.lock_timeout
    }

    /// The path that the database was first opened by in this process; `None` in memory.
    pub fn path(&self) -> Option<&Path> {
        self.environment.opened_as.as_deref()
    }

    /// A copy of the value of `key`, or `None` if it is absent. Takes no lock.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a page on the way is damaged.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.view(key, |value| value.to_vec())
    }

    /// Copies the value of `key` into `buffer`, as far as it fits, and returns its whole length; `None` if the key is
    /// absent. Takes no lock and allocates nothing.
    ///
    /// # Errors
    /// As [`Db::get`].
    #[inline]
    pub fn get_into(&self, key: &[u8], buffer: &mut [u8]) -> Result<Option<usize>> {
        let hash = self.core().hasher.hash(key);
        if let Some(_pin) = self.environment.pin_again()
            && let Some(found) = lookup::find_quickly(self.core(), hash, key)
        {
            return Ok(found.map(|value| {
                copy_fitting(value, buffer);
                value.len()
            }));
        }
        self.view_slowly(hash, key, |value| {
            copy_fitting(value, buffer);
            value.len()
        })
    }

    /// Calls `f` with the value of `key`, borrowed from the database; `None` if the key is absent. Takes no lock. While `f`
    /// runs, pages that are replaced cannot be re-used, so it should not take long.
    ///
    /// # Errors
    /// As [`Db::get`].
    #[inline]
    pub fn view<R>(&self, key: &[u8], f: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        let hash = self.core().hasher.hash(key);
        if let Some(_pin) = self.environment.pin_again()
            && let Some(found) = lookup::find_quickly(self.core(), hash, key)
        {
            return Ok(found.map(f));
        }
        self.view_slowly(hash, key, f)
    }

    #[cold]
    fn view_slowly<R>(
        &self,
        hash: u64,
        key: &[u8],
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>> {
        let _pin = self.environment.pin()?;
        Ok(lookup::find_value(self.core(), hash, key)?.map(f))
    }

    /// Whether `key` is present. Takes no lock.
    ///
    /// # Errors
    /// As [`Db::get`].
    #[inline]
    pub fn contains(&self, key: &[u8]) -> Result<bool> {
        Ok(self.view(key, |_| ())?.is_some())
    }

    /// Stores `value` under `key`, whether present or not.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Full`], [`Error::TooLong`], [`Error::Locked`] after the lock time-out, [`Error::Corrupt`],
    /// [`Error::Poisoned`]. The database is unchanged then; but a durable operation is visible when its sync has failed
    /// ([`Error::Poisoned`]) or could not be made ([`Error::NotDurable`]).
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.put_if(key, value, Condition::Any).map(drop)
    }

    /// Stores `value` under `key` if the key is absent; says whether it did.
    ///
    /// # Errors
    /// As [`Db::put`].
    pub fn insert(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.put_if(key, value, Condition::Absent)
    }

    /// Stores `value` under `key` if the key is present; says whether it did.
    ///
    /// # Errors
    /// As [`Db::put`].
    pub fn replace(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.put_if(key, value, Condition::Present)
    }

    fn put_if(&self, key: &[u8], value: &[u8], condition: Condition) -> Result<bool> {
        let core = self.core();
        operation::check_lengths(core, key.len(), value.len() as u64)?;
        let hash = core.hasher.hash(key);
        let lsn = match self.put_quickly(hash, key, value, condition) {
            Quick::Done(lsn) => lsn,
            Quick::Not(_) if large::is_large(key.len(), value.len()) => self
                .large(hash, |deadline| {
                    large::put(&self.environment, hash, key, value, condition, deadline)
                })?,
            Quick::Not(locked) => self.small_from(
                locked,
                hash,
                |log| log.encode(&Op::Put { key, value }),
                |writer, log, scratch| {
                    operation::put(writer, hash, key, value, condition, log, scratch)
                },
            )?,
        };
        self.promise(lsn)?;
        Ok(lsn.is_some())
    }

    /// Deletes `key`; says whether it was present.
    ///
    /// # Errors
    /// As [`Db::put`].
    pub fn delete(&self, key: &[u8]) -> Result<bool> {
        let core = self.core();
        operation::check_lengths(core, key.len(), 0)?;
        let hash = core.hasher.hash(key);
        let lsn = self.small(
            hash,
            |log| log.encode(&Op::Delete { key }),
            |writer, log, _| operation::delete(writer, hash, key, log),
        )?;
        self.promise(lsn)?;
        Ok(lsn.is_some())
    }

    /// Adds `bytes` to the end of the value of `key`, which need not be present; returns the new length of the value in bytes.
    /// Costs what the bytes cost, however long the value is.
    ///
    /// # Errors
    /// As [`Db::put`].
    pub fn append(&self, key: &[u8], bytes: &[u8]) -> Result<u64> {
        let core = self.core();
        operation::check_lengths(core, key.len(), bytes.len() as u64)?;
        let hash = core.hasher.hash(key);
        let small = if large::is_large(key.len(), bytes.len()) {
            None
        } else {
            self.small(
                hash,
                // Its length is what matters here; the value's length is filled in under the lock, and may take more bytes.
                |log| log.encode(&Op::Append { key, length_before: u64::MAX, bytes }),
                |writer, log, scratch| {
                    operation::append(writer, hash, key, bytes, None, log, scratch)
                },
            )?
        };
        let appended = match small {
            Some(appended) => appended,
            None => self.large(hash, |deadline| {
                large::append(&self.environment, hash, key, bytes, deadline)
            })?,
        };
        self.promise(Some(appended.lsn))?;
        Ok(appended.len)
    }

    /// The usual put: of a short record, when nobody is in the way and its page has room for it. If anything is otherwise, nothing has
    /// happened, and [`Db::small_from`] does the same and also what is needed besides.
    #[inline(always)]
    fn put_quickly(&self, hash: u64, key: &[u8], value: &[u8], condition: Condition) -> Quick<'_> {
        let core = self.core();
        if key.len() >= SHORT_KEY || value.len() >= SHORT_VALUE || self.may_write().is_err() {
            return Quick::Not(None);
        }
        let mut memory: ShortPut = [0; size_of::<ShortPut>()];
        let log = Unplaced::short_put(key, value, &mut memory);
        let bytes = log.len() as u64;
        lookup::prefetch(core, hash);
        let Some(mut writer) = Writer::lock_quickly(core) else { return Quick::Not(None) };
        let nobody_is_in_the_way = claim::open_by(core).is_none()
            && core.shm.stripe(stripe_of(hash)).holder(core.slot()) == Holder::None;
        if !nobody_is_in_the_way
            || !has_room(core, bytes)
            || !self.is_log_room_secured(bytes)
            || !matches!(patience::is_advisable(&mut writer), Ok(false))
        {
            return Quick::Not(None);
        }
        match operation::put_quickly(&mut writer, hash, key, value, condition, log) {
            Some(done) => {
                self.changed(writer);
                Quick::Done(done)
            }
            None => Quick::Not(Some(writer)),
        }
    }

    /// Ends what was done under the lock.
    #[inline(always)]
    fn changed(&self, writer: Writer<'_>) {
        let tail = self.core().control().writer.tail.load(Relaxed);
        drop(writer);
        self.environment.after_change(tail, self.lock_timeout);
    }

    /// Does an operation that fits one log record, under the writer lock.
    #[inline]
    fn small<T>(
        &self,
        hash: u64,
        encode: impl FnOnce(&mut LogRecord),
        operate: impl FnMut(&mut Writer, &mut LogRecord, &mut Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        self.small_from(None, hash, encode, operate)
    }

    /// As [`Db::small`]. Who has the lock already, and has made sure that he may write and that there is room for the record, brings it.
    fn small_from<'a, T>(
        &'a self,
        locked: Option<Writer<'a>>,
        hash: u64,
        encode: impl FnOnce(&mut LogRecord),
        mut operate: impl FnMut(&mut Writer, &mut LogRecord, &mut Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        if locked.is_none() {
            self.may_write()?;
        }
        let with = |scratch: &mut Scratch| {
            encode(&mut scratch.log);
            let bytes = scratch.log.len() as u64;
            let mut writer = match locked {
                Some(writer) => writer,
                None => {
                    lookup::prefetch(self.core(), hash);
                    self.write_lock(hash, bytes)?
                }
            };
            let result = operate(&mut writer, &mut scratch.log, &mut scratch.record);
            self.changed(writer);
            if scratch.record.capacity() > KEEP_SCRATCH_BYTES
                || scratch.log.capacity() > KEEP_SCRATCH_BYTES
            {
                *scratch = Scratch::default();
            }
            result
        };
        SCRATCH.with(|scratch| match scratch.try_borrow_mut() {
            Ok(mut scratch) => with(&mut scratch),
            // In the middle of another operation of this thread: a signal handler, say.
            Err(_) => with(&mut Scratch::default()),
        })
    }

    /// Does an operation that takes several log records, holding the key's stripe.
    fn large<T>(&self, hash: u64, operate: impl FnOnce(Option<Instant>) -> Result<T>) -> Result<T> {
        self.may_write()?;
        self.check_waits_for_itself(false)?;
        let deadline = self.deadline();
        let mut hashes = std::iter::once(hash);
        let lock = KeyLock::take(self, &mut hashes, Patience::Wait, deadline)?;
        let result = operate(deadline);
        drop(lock);
        let tail = self.core().control().writer.tail.load(Relaxed);
        self.environment.after_large_change(tail, 0, self.lock_timeout);
        result
    }

    #[inline]
    fn may_write(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly { path: self.core().path.clone() });
        }
        check_poison(self.core())?;
        self.environment.ensure_session()
    }

    /// Whether, if this handle promises that, `bytes` more can be made durable whatever becomes of the disk. Certain only under the writer
    /// lock.
    #[inline(always)]
    fn is_log_room_secured(&self, bytes: u64) -> bool {
        self.durability != Durability::Durable
            || !self.core().is_logged()
            || self.environment.has_log_room(bytes)
    }

    /// The writer lock, with nobody else holding the key's stripe and room in the log for `bytes`.
    #[inline]
    fn write_lock(&self, hash: u64, bytes: u64) -> Result<Writer<'_>> {
        let core = self.core();
        let stripe = core.shm.stripe(stripe_of(hash));
        let mut deadline = None;
        let mut has_waited = false;
        if self.lock_timeout.is_some() && core.control().writer_lock.is_held() {
            deadline = self.deadline();
        }
        loop {
            let mut writer = Writer::lock(core, deadline)?;
            if let Some(owner) = claim::open_by(core) {
                drop(writer);
                deadline = deadline.or_else(|| self.deadline());
                self.await_transaction(owner, deadline)?;
                continue;
            }
            match stripe.holder(core.slot()) {
                Holder::None | Holder::Me => {
                    if !has_room(core, bytes) {
                        drop(writer);
                        self.environment.make_ring_room(bytes, self.deadline())?;
                    } else if !self.is_log_room_secured(bytes) {
                        drop(writer);
                        self.environment.secure_log_room(bytes, self.deadline())?;
                    } else if !has_waited && patience::is_advisable(&mut writer)? {
                        drop(writer);
                        has_waited = !patience::wait(core, self.deadline());
                    } else {
                        return Ok(writer);
                    }
                }
                _ => {
                    drop(writer);
                    deadline = deadline.or_else(|| self.deadline());
                    self.await_stripe(hash, deadline)?;
                }
            }
        }
    }

    /// Waits until the transaction of `owner` has ended.
    #[cold]
    fn await_transaction(&self, owner: SlotId, deadline: Option<Instant>) -> Result<()> {
        self.check_waits_for_itself(false)?;
        let core = self.core();
        let since = Instant::now();
        while claim::open_by(core) == Some(owner) {
            claim::wait(core, owner, since, deadline)?;
        }
        Ok(())
    }

    /// An error if this thread has a transaction open, for whose end it would wait; or if it wants to begin one (`begins`) and holds
    /// a key lock.
    pub(crate) fn check_waits_for_itself(&self, begins: bool) -> Result<()> {
        let path = || self.core().path.clone();
        if self.environment.has_transaction_here() {
            return Err(Error::WouldDeadlock { path: path(), held: "a transaction" });
        }
        if begins && key_lock::holds_any(self) {
            return Err(Error::WouldDeadlock { path: path(), held: "a key lock" });
        }
        Ok(())
    }

    /// Begins a transaction; waits, as long as the lock time-out allows, until the one that is open has ended and nobody else holds
    /// key locks.
    ///
    /// # Errors
    /// [`Error::Locked`] after the time-out; [`Error::WouldDeadlock`] if this thread has a transaction open or holds a key lock;
    /// [`Error::ReadOnly`].
    pub fn begin(&self) -> Result<Transaction<'_>> {
        self.may_write()?;
        let begun = Transaction::begin(self, true, self.lock_timeout)?;
        begun.ok_or_else(|| self.core().locked("the claim", None, Duration::ZERO))
    }

    /// As [`Db::begin`], but `None` instead of waiting.
    ///
    /// # Errors
    /// As [`Db::begin`].
    pub fn try_begin(&self) -> Result<Option<Transaction<'_>>> {
        self.may_write()?;
        Transaction::begin(self, false, self.lock_timeout)
    }

    /// Calls `f` with a transaction, which is committed (and durable) if `f` returns `Ok`, and aborted if it returns an error or
    /// panics.
    ///
    /// # Errors
    /// What `f` returns; as [`Db::begin`] and [`Transaction::commit`].
    ///
    /// ```
    /// # fn main() -> ntdb::Result<()> {
    /// # let db = ntdb::Db::in_memory()?;
    /// let first = db.transaction(|tx| {
    ///     tx.append(b"count", b"x")?;
    ///     tx.insert(b"key", b"value")
    /// })?;
    /// assert!(first);
    /// # Ok(())
    /// # }
    /// ```
    pub fn transaction<T, E: From<Error>>(
        &self,
        f: impl FnOnce(&mut Transaction<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut transaction = self.begin()?;
        let done = f(&mut transaction)?;
        transaction.commit()?;
        Ok(done)
    }

    /// After a commit that has replaced so many pages.
    pub(crate) fn after_commit(&self, lsn: Lsn, replaced: u64, durable: bool) -> Result<()> {
        let tail = self.core().control().writer.tail.load(Relaxed);
        self.environment.after_large_change(tail, replaced, self.lock_timeout);
        if durable && self.core().is_logged() {
            return self.synced(lsn);
        }
        Ok(())
    }

    #[cold]
    fn await_stripe(&self, hash: u64, deadline: Option<Instant>) -> Result<()> {
        let core = self.core();
        let stripe = core.shm.stripe(stripe_of(hash));
        let begin = Instant::now();
        loop {
            let owner = match stripe.holder(core.slot()) {
                Holder::None | Holder::Me => return Ok(()),
                Holder::Sibling => core.slot(),
                Holder::Other(owner) => owner,
            };
            let left = match deadline {
                None => Duration::from_secs(1),
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            };
            if left.is_zero() {
                return Err(core.locked("a key lock", Some(owner), begin.elapsed()));
            }
            stripe.wait(core.slot(), left, &|slot| core.is_alive(slot));
        }
    }

    /// Waits for what the handle promises of the change that ends at `lsn`, or of what an operation without a change has seen.
    #[inline]
    fn promise(&self, lsn: Option<Lsn>) -> Result<()> {
        if self.durability != Durability::Durable {
            return Ok(());
        }
        // One that changes nothing has seen why not: that must not be lost either.
        let seen = || Lsn(self.core().control().writer.applied.load(Acquire));
        self.environment
            .sync_to(lsn.unwrap_or_else(seen), self.deadline())
            .map_err(|error| self.not_durable(error))
    }

    /// Waits until everything before `lsn` is durable.
    fn synced(&self, lsn: Lsn) -> Result<()> {
        self.environment.sync_to(lsn, self.deadline()).map_err(|error| self.not_durable(error))
    }

    #[cold]
    fn not_durable(&self, error: Error) -> Error {
        match error {
            Error::Poisoned { .. } => error,
            _ => Error::NotDurable { path: self.core().path.clone(), source: Box::new(error) },
        }
    }

    /// Locks `key` against all other threads and processes until the guard is dropped: others who write it, or lock it, wait;
    /// readers don't. Re-entrant for the same thread. Keys share some thousands of locks, so an unrelated key is locked
    /// now and then too; to lock several keys, use [`Db::lock_many`].
    ///
    /// # Errors
    /// [`Error::Locked`] after the lock time-out; [`Error::ReadOnly`].
    ///
    /// ```
    /// # let db = ntdb::Db::in_memory()?;
    /// let guard = db.lock(b"counter")?;
    /// let count = db.get(b"counter")?.map_or(0, |v| u64::from_le_bytes(v.try_into().unwrap()));
    /// db.put(b"counter", &(count + 1).to_le_bytes())?;
    /// drop(guard);
    /// # Ok::<(), ntdb::Error>(())
    /// ```
    pub fn lock(&self, key: &[u8]) -> Result<KeyLock<'_>> {
        self.lock_many(&[key])
    }

    /// As [`Db::lock`], for several keys at once. Whoever locks several keys this way cannot wait for another who does the same in
    /// a circle.
    ///
    /// # Errors
    /// As [`Db::lock`].
    pub fn lock_many(&self, keys: &[&[u8]]) -> Result<KeyLock<'_>> {
        self.may_write()?;
        let hasher = self.core().hasher;
        let mut hashes = keys.iter().map(|key| hasher.hash(key));
        let lock = KeyLock::take(self, &mut hashes, Patience::Wait, self.deadline())?;
        Ok(lock.expect("waiting ends with the lock or an error"))
    }

    /// As [`Db::lock`], but returns `None` if somebody else holds the lock.
    ///
    /// # Errors
    /// As [`Db::lock`].
    pub fn try_lock(&self, key: &[u8]) -> Result<Option<KeyLock<'_>>> {
        self.may_write()?;
        let mut hashes = std::iter::once(self.core().hasher.hash(key));
        KeyLock::take(self, &mut hashes, Patience::Try, self.deadline())
    }

    /// The database as it is now, to be read for as long as the [`Snapshot`] is held, while others write. Takes the writer
    /// lock for as long as a small write does, and does not wait for an open transaction, of which it has nothing.
    ///
    /// # Errors
    /// [`Error::Locked`] after the lock time-out, [`Error::TooMany`] beyond 16,384 at once in all processes, [`Error::Full`] if
    /// the shared state cannot grow, [`Error::Corrupt`].
    pub fn snapshot(&self) -> Result<Snapshot> {
        Snapshot::open(self)
    }

    /// An iterator over all records as they are now, as copies, in the order of their hashes (which tells nothing of the keys, but
    /// is the same each time). It holds a [`Snapshot`]: what is written meanwhile cannot be seen in it. If that cannot be had, the first
    /// record is the error.
    pub fn iter(&self) -> Iter {
        Iter::new(Source::now(self), Cursor::default())
    }

    /// As [`Db::iter`], for the records behind `cursor`.
    pub fn iter_from(&self, cursor: &Cursor) -> Iter {
        Iter::new(Source::now(self), cursor.clone())
    }

    /// An iterator over all records that sees each as it is when its turn comes. It sees every record that is there throughout
    /// exactly once, whatever is written meanwhile, and holds nothing back between two records; but what it returns is not the state
    /// of any one moment.
    pub fn iter_live(&self) -> Iter {
        self.iter_live_from(&Cursor::default())
    }

    /// As [`Db::iter_live`], for the records behind `cursor`.
    pub fn iter_live_from(&self, cursor: &Cursor) -> Iter {
        Iter::new(Source::Live(self.clone()), cursor.clone())
    }

    /// Calls `f` with every record as it is now, borrowed, until it breaks; returns how many it was called for. As [`Db::iter`], but
    /// without copies, and the some hundred records of one bucket come as they lie there, not by their hashes.
    ///
    /// # Errors
    /// As [`Db::snapshot`].
    pub fn for_each(&self, f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<u64> {
        self.snapshot()?.for_each(f)
    }

    /// As [`Db::for_each`], without a snapshot: each record is seen as it is when its turn comes, as by [`Db::iter_live`], and
    /// pages are held back while `f` works through one bucket.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a page on the way is damaged.
    pub fn for_each_live(&self, f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<u64> {
        iterate::for_each(self, f)
    }

    /// Number of records. Takes no lock.
    ///
    /// # Errors
    /// Only in a forked child that cannot attach.
    pub fn len(&self) -> Result<u64> {
        self.environment.ensure_session()?;
        Ok(self.core().control().writer.count.load(Acquire))
    }

    /// Whether there is no record.
    ///
    /// # Errors
    /// As [`Db::len`].
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Deletes all records, at once for everybody. Waits until nobody else holds a key lock.
    ///
    /// # Errors
    /// As [`Db::put`].
    pub fn clear(&self) -> Result<()> {
        self.may_write()?;
        let mut log = LogRecord::default();
        log.encode(&Op::Clear);
        let deadline = self.deadline();
        let core = self.core();
        // Nobody may hold a key lock: its holder relies on the key.
        let lsn = loop {
            let mut writer = Writer::lock(core, deadline)?;
            if let Some(owner) = claim::open_by(core) {
                drop(writer);
                self.await_transaction(owner, deadline)?;
                continue;
            }
            if let Some(index) = self.foreign_stripe() {
                drop(writer);
                self.await_stripe((index as u64) << 23, deadline)?;
                continue;
            }
            if !has_room(core, log.len() as u64) {
                drop(writer);
                self.environment.make_ring_room(log.len() as u64, deadline)?;
                continue;
            }
            match operation::clear(&mut writer, &mut log)? {
                Some(lsn) => break lsn,
                None => {
                    drop(writer);
                    discard::finish(core, self.lock_timeout)?;
                }
            }
        };
        crash_point("clear.done");
        // It is done; if the pages cannot be given up now, others will.
        let _ = discard::finish(core, self.lock_timeout);
        self.environment.after_change(lsn.0, self.lock_timeout);
        self.promise(Some(lsn))
    }

    /// A stripe that somebody else holds.
    fn foreign_stripe(&self) -> Option<usize> {
        let core = self.core();
        let me = core.slot();
        debug_assert!(thread_token() != 0);
        (0..crate::limits::KEY_STRIPES).find(|&index| {
            matches!(core.shm.stripe(index).holder(me), Holder::Sibling | Holder::Other(_))
        })
    }

    /// Makes everything done so far, by anybody, durable.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if a sync fails, [`Error::Full`] if the log cannot grow, [`Error::Locked`].
    pub fn sync(&self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.environment.ensure_session()?;
        let tail = Lsn(self.core().control().writer.applied.load(Acquire));
        self.environment.sync_to(tail, self.deadline())
    }

    /// Writes a checkpoint, so that recovery starts from here and older log is free. Happens by itself as the log grows;
    /// readers and writers go on meanwhile.
    ///
    /// # Errors
    /// As [`Db::sync`]; [`Error::ReadOnly`].
    pub fn checkpoint(&self) -> Result<()> {
        self.may_write()?;
        self.environment.checkpoint(self.lock_timeout)
    }

    /// Makes the file as small as it can be now, while others read and write: joins pages that are nearly empty, moves
    /// what lies at the end to free pages before it, and cuts the file. Its size afterwards is in [`Stat::file_bytes`].
    ///
    /// Without it space is re-used, and given back when the last user closes the database; a file that has once been large is only worth compacting if
    /// it is in use all the time. What snapshots and readers hold is not moved. Safe at any kill: the file is longer then, and
    /// nothing else. Takes a few checkpoints, and writes at most the live data.
    ///
    /// ```
    /// # fn main() -> ntdb::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// let db = ntdb::Db::create(dir.path().join("a.ntdb"))?;
    /// for n in 0..20_000u32 {
    ///     db.put(&n.to_le_bytes(), &[1; 100])?;
    /// }
    /// for n in 2_000..20_000u32 {
    ///     db.delete(&n.to_le_bytes())?;
    /// }
    /// let before = db.stat()?.file_bytes;
    /// db.compact()?;
    /// assert!(db.stat()?.file_bytes < before / 4);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Locked`]; [`Error::Full`] if the disk has no room for what is moved; [`Error::WouldDeadlock`] if
    /// this thread has a transaction open; as [`Db::checkpoint`].
    pub fn compact(&self) -> Result<()> {
        self.compact_with_progress(|_| {})
    }

    /// As [`Db::compact`]; `progress` is told which share of the work is done, from 0 to 1, roughly.
    ///
    /// # Errors
    /// As [`Db::compact`].
    pub fn compact_with_progress(&self, mut progress: impl FnMut(f64)) -> Result<()> {
        self.may_write()?;
        self.check_waits_for_itself(false)?;
        self.environment.compact(self.lock_timeout, &mut progress)
    }

    /// Makes inserts from now on, by whatever process, leave `percent` of each page (0 to 90) to updates: see
    /// [`Options::reserve_percent`]. Pages that are fuller stay so until something happens to them. Durable, by a checkpoint, when it
    /// returns.
    ///
    /// ```
    /// # fn main() -> ntdb::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// let db = ntdb::Db::create(dir.path().join("a.ntdb"))?;
    /// db.set_reserve(20)?;
    /// assert_eq!(db.stat()?.reserve_percent, 20);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidOption`]; [`Error::ReadOnly`]; [`Error::Locked`]; [`Error::WouldDeadlock`] if this thread has a transaction open;
    /// as [`Db::checkpoint`].
    pub fn set_reserve(&self, percent: u8) -> Result<()> {
        options::check_reserve(percent)?;
        self.may_write()?;
        self.check_waits_for_itself(false)?;
        self.environment.set_reserve(percent, self.lock_timeout)
    }

    /// How full the pages are, as a snapshot of the present moment has them. Reads one cache line of every bucket page, or of a sample if
    /// there are very many ([`Fill::is_sample`]).
    ///
    /// # Errors
    /// As [`Db::snapshot`]; [`Error::Corrupt`].
    pub fn fill(&self) -> Result<Fill> {
        fill::fill(&self.snapshot()?)
    }

    /// Facts about the database.
    ///
    /// # Errors
    /// [`Error::Locked`].
    pub fn stat(&self) -> Result<Stat> {
        stat::stat(&self.environment, self.deadline())
    }

    /// Verifies everything, checksums included, as of one moment, which a snapshot holds; readers, writers and checkpoints go on
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::Locked`], or a system error. Damage is not an error but in the report.
    pub fn check(&self) -> Result<CheckReport> {
        check::check(&self.environment, self.lock_timeout)
    }

    /// Copies the database as it is now into a new, compact one at `destination`, while others read and write at full speed. The copy
    /// has an identity of its own, and permissions, page size and reserve of the original.
    ///
    /// It is made under another name beside `destination`, synced, checked, compared with the original value by value, and renamed:
    /// so there is a whole copy or nothing (or, with [`BackupOptions::overwrite`], what was there before), whatever happens
    /// meanwhile. If the process is killed, a file with the name of the destination, `-partial-` and 16 digits is left; the next
    /// backup to the same place removes it. What a crash has left beside a database that is to be overwritten is recovered first.
    ///
    /// One error comes when the copy is already in its place, whole: [`Error::Io`] that the directory cannot be synced.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] if there is something at `destination`; [`Error::InUse`] if it is to be overwritten and somebody
    /// uses it, [`Error::NotADatabase`] if it is no database; [`Error::InvalidOption`] if it is this very one;
    /// [`Error::Corrupt`] if this database is damaged; [`Error::Full`] and what else the system reports; as [`Db::snapshot`].
    ///
    /// ```
    /// # fn main() -> ntdb::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let to = dir.path().join("copy.ntdb");
    /// # let db = ntdb::Db::in_memory()?;
    /// db.put(b"key", b"value")?;
    /// let report = db.backup(&to, &ntdb::BackupOptions::new())?;
    /// assert_eq!(report.records, 1);
    /// assert_eq!(ntdb::Db::open(&to)?.get(b"key")?.as_deref(), Some(&b"value"[..]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn backup(
        &self,
        destination: impl AsRef<Path>,
        options: &BackupOptions,
    ) -> Result<BackupReport> {
        self.backup_with(destination, options, |_| ControlFlow::Continue(()))
    }

    /// As [`Db::backup`]; `progress` is called now and then, and can stop it.
    ///
    /// # Errors
    /// As [`Db::backup`]; [`Error::Cancelled`] if `progress` breaks.
    pub fn backup_with(
        &self,
        destination: impl AsRef<Path>,
        options: &BackupOptions,
        mut progress: impl FnMut(BackupProgress) -> ControlFlow<()>,
    ) -> Result<BackupReport> {
        backup::run(self, destination.as_ref(), options, &mut progress)
    }

    /// A number that grows with every change by any process: the log sequence number, in bytes of redo log since the database
    /// was created.
    ///
    /// # Errors
    /// As [`Db::len`].
    pub fn change_counter(&self) -> Result<u64> {
        self.environment.ensure_session()?;
        Ok(self.core().control().writer.applied.load(Acquire))
    }

    /// Closes this handle and reports what dropping it would hide. The last handle of the last process puts the database to
    /// rest: a checkpoint is written, and the companion files are removed.
    ///
    /// # Errors
    /// As [`Db::checkpoint`]. The database is then recovered by its next user.
    pub fn close(self) -> Result<()> {
        let Db { opening, environment, .. } = self;
        drop(opening);
        match Arc::try_unwrap(environment) {
            Ok(environment) => {
                let result = environment.shut_down();
                environment.forget_session();
                result
            }
            Err(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who is told durably that a key is there, or is not, relies on the change that made it so.
    #[test]
    fn a_durable_operation_without_a_change_makes_durable_what_it_saw() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::create(dir.path().join("a.ntdb")).unwrap();
        let durable = db.with_durability(Durability::Durable);
        let log = &db.core().control().log;
        let is_synced = || log.synced.load(Acquire) == db.change_counter().unwrap();
        assert!(!durable.delete(b"key").unwrap());
        let large = vec![1; 300_000];
        let operations: [&dyn Fn() -> bool; 4] = [
            &|| durable.insert(b"key", b"other").unwrap(),
            &|| durable.replace(b"absent", b"value").unwrap(),
            &|| durable.delete(b"absent").unwrap(),
            &|| durable.insert(b"key", &large).unwrap(),
        ];
        for (n, operation) in operations.iter().enumerate() {
            db.put(b"key", b"value").unwrap();
            assert!(!is_synced(), "operation {n} has nothing to do");
            assert!(!operation(), "operation {n} has changed something");
            assert!(is_synced(), "operation {n}");
        }
    }
}
