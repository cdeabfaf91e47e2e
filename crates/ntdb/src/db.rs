//! The handle of an open database.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use crate::error::Result;
use crate::options::{Durability, Options};

/// An open database. Cheap to clone; clones share everything. Any thread may use it at any time,
/// and a forked child may go on using its copy.
#[derive(Clone, Debug)]
pub struct Db {}

/// A held key lock; dropping it releases the key. Belongs to the thread that took it.
#[derive(Debug)]
pub struct KeyLock<'db> {
    _db: &'db Db,
    _not_send: std::marker::PhantomData<*const ()>,
}

/// A position of an iteration that can be stored and resumed, also in another process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    pub(crate) hash: u64,
    pub(crate) key: Option<Vec<u8>>,
}

impl Cursor {
    /// The position as bytes, to be stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        todo!()
    }
    /// A position from stored bytes; `None` if they are not one.
    pub fn from_bytes(_bytes: &[u8]) -> Option<Cursor> {
        todo!()
    }
}

/// An iterator over all records; see [`Db::iter`].
#[derive(Debug)]
pub struct Iter {
    _db: Db,
}

impl Iter {
    /// The position behind the record that was returned last.
    pub fn cursor(&self) -> Cursor {
        todo!()
    }
}

impl Iterator for Iter {
    type Item = Result<(Vec<u8>, Vec<u8>)>;
    fn next(&mut self) -> Option<Self::Item> {
        todo!()
    }
}

/// Facts about a database at one moment; see [`Db::stat`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Stat {
    /// Size of a page in bytes.
    pub page_size: u32,
    /// Number of records.
    pub records: u64,
    /// Size of the data file in bytes.
    pub file_bytes: u64,
    /// Bytes of pages that are free for re-use.
    pub free_bytes: u64,
    /// Bytes of pages that were replaced and wait for a reader or a checkpoint.
    pub retired_bytes: u64,
    /// Bytes of redo log since the last checkpoint.
    pub log_bytes: u64,
    /// The change counter (log sequence number).
    pub change_counter: u64,
    /// Depth of the hash: its root array has 2^depth entries.
    pub depth: u32,
    /// The freeze epoch.
    pub epoch: u64,
    /// Reserve in percent.
    pub reserve_percent: u8,
    /// Process ids of the attached processes, each as it sees itself.
    pub processes: Vec<u32>,
    /// The process whose reader holds back the oldest pages, if any reads just now.
    pub oldest_reader: Option<u32>,
}

/// What [`Db::check`] found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CheckReport {
    /// Number of records seen.
    pub records: u64,
    /// Number of pages in use by the current contents.
    pub pages: u64,
    /// Pages that are neither free nor used by anything.
    pub leaked_pages: u64,
    /// Each damage, in words; empty if the database is whole.
    pub problems: Vec<String>,
}

impl CheckReport {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.problems.is_empty() && self.leaked_pages == 0
    }
}

#[allow(unused_variables)]
impl Db {
    /// Opens an existing database for reading and writing, with the default [`Options`].
    pub fn open(path: impl AsRef<Path>) -> Result<Db> {
        Options::new().open(path)
    }
    /// Opens a database for reading and writing, and creates it if it does not exist.
    pub fn create(path: impl AsRef<Path>) -> Result<Db> {
        Options::new().create(true).open(path)
    }
    /// A new database in this process's memory.
    pub fn in_memory() -> Result<Db> {
        Options::new().open_in_memory()
    }
    pub(crate) fn open_with(path: &Path, options: &Options) -> Result<Db> {
        todo!()
    }
    pub(crate) fn open_in_memory_with(options: &Options) -> Result<Db> {
        todo!()
    }
    /// A handle to the same database whose single operations promise `durability`.
    pub fn with_durability(&self, durability: Durability) -> Db {
        todo!()
    }
    /// A handle to the same database that waits at most `limit` for locks.
    pub fn with_lock_timeout(&self, limit: Option<Duration>) -> Db {
        todo!()
    }
    /// The path that the database was opened by; `None` in memory.
    pub fn path(&self) -> Option<&Path> {
        todo!()
    }
    /// A copy of the value of `key`.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        todo!()
    }
    /// Copies the value of `key` into `buffer`, as far as it fits, and returns its whole length.
    pub fn get_into(&self, key: &[u8], buffer: &mut [u8]) -> Result<Option<usize>> {
        todo!()
    }
    /// Calls `f` with the value of `key`, borrowed from the database.
    pub fn view<R>(&self, key: &[u8], f: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        todo!()
    }
    /// Whether `key` is present.
    pub fn contains(&self, key: &[u8]) -> Result<bool> {
        todo!()
    }
    /// Stores `value` under `key`, whether present or not.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        todo!()
    }
    /// Stores `value` under `key` if the key is absent; says whether it did.
    pub fn insert(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        todo!()
    }
    /// Stores `value` under `key` if the key is present; says whether it did.
    pub fn replace(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        todo!()
    }
    /// Deletes `key`; says whether it was present.
    pub fn delete(&self, key: &[u8]) -> Result<bool> {
        todo!()
    }
    /// Adds `bytes` to the end of the value of `key` (which need not be present); returns the new
    /// length of the value.
    pub fn append(&self, key: &[u8], bytes: &[u8]) -> Result<u64> {
        todo!()
    }
    /// Locks `key` against all other threads and processes until the guard is dropped. Other
    /// writers of the key wait; readers don't.
    pub fn lock(&self, key: &[u8]) -> Result<KeyLock<'_>> {
        todo!()
    }
    /// As [`Db::lock`], for several keys at once, without the danger of a deadlock.
    pub fn lock_many(&self, keys: &[&[u8]]) -> Result<KeyLock<'_>> {
        todo!()
    }
    /// As [`Db::lock`], but returns `None` instead of waiting.
    pub fn try_lock(&self, key: &[u8]) -> Result<Option<KeyLock<'_>>> {
        todo!()
    }
    /// An iterator over all records, in the order of their hashes.
    pub fn iter(&self) -> Iter {
        todo!()
    }
    /// An iterator over the records behind `cursor`.
    pub fn iter_from(&self, cursor: &Cursor) -> Iter {
        todo!()
    }
    /// Calls `f` with every record, borrowed, until it breaks; returns how many it was called for.
    pub fn for_each(&self, f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<u64> {
        todo!()
    }
    /// Number of records.
    pub fn len(&self) -> Result<u64> {
        todo!()
    }
    /// Whether there is no record.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Deletes all records.
    pub fn clear(&self) -> Result<()> {
        todo!()
    }
    /// Makes everything done so far durable.
    pub fn sync(&self) -> Result<()> {
        todo!()
    }
    /// Writes a checkpoint, so that recovery starts from here and older log is free.
    pub fn checkpoint(&self) -> Result<()> {
        todo!()
    }
    /// Facts about the database.
    pub fn stat(&self) -> Result<Stat> {
        todo!()
    }
    /// Verifies everything, checksums included.
    pub fn check(&self) -> Result<CheckReport> {
        todo!()
    }
    /// A number that grows with every change by any process (the log sequence number).
    pub fn change_counter(&self) -> Result<u64> {
        todo!()
    }
    /// Closes this handle and reports what dropping it would hide: the last handle of the last
    /// process writes a checkpoint.
    pub fn close(self) -> Result<()> {
        todo!()
    }
}
