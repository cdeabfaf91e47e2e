//! Snapshots as users hold them.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::copy::copy_fitting;
use crate::core::Core;
use crate::environment::snapshot::Held;
use crate::error::Result;
use crate::index::locate::Root;
use crate::index::lookup;

use super::db::Db;
use super::iterate::{self, Cursor, Iter, Source};

/// The database as it was at one moment, for as long as this is held; see [`Db::snapshot`].
///
/// Reading it takes no lock and waits for nobody, from any thread, and nothing that is written meanwhile can be seen in it, however
/// much that is. Cheap to clone; clones are the same snapshot.
///
/// While it is held, pages that it has and that are replaced meanwhile cannot be re-used, so a database that is written to grows
/// by what changes, up to its own size once more for each snapshot. [`Db::stat`] tells how much that is, and who holds the oldest
/// snapshot. Dropping the last clone releases it, and so does the death of the process; it keeps the database open till then.
///
/// In a forked child it means nothing: using it there is an error, and dropping it does nothing.
///
/// ```
/// # fn main() -> ntdb::Result<()> {
/// # let db = ntdb::Db::in_memory()?;
/// db.put(b"key", b"old")?;
/// let snapshot = db.snapshot()?;
/// db.put(b"key", b"new")?;
/// db.put(b"other", b"new")?;
/// assert_eq!(snapshot.get(b"key")?.as_deref(), Some(&b"old"[..]));
/// assert_eq!(snapshot.len(), 1);
/// let keys: Vec<_> = snapshot.iter().map(|record| Ok(record?.0)).collect::<ntdb::Result<_>>()?;
/// assert_eq!(keys, [b"key"]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Snapshot {
    held: Arc<Held>,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("path", &self.held.environment.opened_as)
            .field("change_counter", &self.change_counter())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Snapshot {
    pub(crate) fn open(db: &Db) -> Result<Snapshot> {
        Ok(Snapshot { held: Held::now(db.environment(), db.deadline())? })
    }

    #[inline]
    pub(crate) fn core(&self) -> &Core {
        &self.held.environment.core
    }

    #[inline]
    pub(crate) fn root(&self) -> Root {
        self.held.snap.root
    }

    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        self.held.check()
    }

    /// A copy of the value of `key`, or `None` if it was absent.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if a page on the way is damaged,
    /// [`Error::Forked`](crate::Error::Forked) in a forked child.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.view(key, <[u8]>::to_vec)
    }

    /// Copies the value of `key` into `buffer`, as far as it fits, and returns its whole length; `None` if the key was absent.
    ///
    /// # Errors
    /// As [`Snapshot::get`].
    pub fn get_into(&self, key: &[u8], buffer: &mut [u8]) -> Result<Option<usize>> {
        self.view(key, |value| {
            copy_fitting(value, buffer);
            value.len()
        })
    }

    /// Calls `f` with the value of `key`, borrowed from the database; `None` if the key was absent. However long `f` takes, it
    /// holds nothing back that the snapshot does not.
    ///
    /// # Errors
    /// As [`Snapshot::get`].
    #[inline]
    pub fn view<R>(&self, key: &[u8], f: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        self.check()?;
        let core = self.core();
        Ok(lookup::find_value_below(core, self.root(), core.hasher.hash(key), key)?.map(f))
    }

    /// Whether `key` was present.
    ///
    /// # Errors
    /// As [`Snapshot::get`].
    pub fn contains(&self, key: &[u8]) -> Result<bool> {
        Ok(self.view(key, |_| ())?.is_some())
    }

    /// Number of records.
    pub fn len(&self) -> u64 {
        self.held.snap.count
    }

    /// Whether there was no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The change counter (see [`Db::change_counter`]) of the moment: every change before it is in the snapshot, and none after.
    pub fn change_counter(&self) -> u64 {
        self.held.snap.registered.lsn.0
    }

    /// An iterator over all records, as copies, in the order of their hashes.
    pub fn iter(&self) -> Iter {
        self.iter_from(&Cursor::default())
    }

    /// An iterator over the records behind `cursor`, which may come from another iterator of the same database.
    pub fn iter_from(&self, cursor: &Cursor) -> Iter {
        Iter::new(Source::Snapshot(self.clone()), cursor.clone())
    }

    /// Calls `f` with every record, borrowed, until it breaks; returns how many it was called for. The records of one bucket
    /// come as they lie there, not by their hashes.
    ///
    /// # Errors
    /// As [`Snapshot::get`].
    pub fn for_each(&self, f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<u64> {
        self.check()?;
        iterate::for_each_below(self.core(), self.root(), f)
    }
}
