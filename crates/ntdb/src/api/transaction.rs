//! Transactions as users hold them.

use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::time::Duration;

use crate::copy::copy_fitting;
use crate::error::{Error, Result};
use crate::index::lookup;
use crate::log::record::Op;
use crate::options::Durability;
use crate::storage::fork;
use crate::transaction::open::Open;
use crate::transaction::operation::{self, Condition};

use super::db::Db;
use super::iterate;

/// Changes that become visible, and durable, all together or not at all.
///
/// Begun by [`Db::begin`]. One transaction is open at a time, in all processes; everybody else who wants to change something waits
/// until it ends, while readers go on and see nothing of it. Inside it, reads see its own changes. Dropping it aborts it,
/// and so does the death of the process at any moment before the commit.
///
/// It belongs to the thread that began it and cannot be sent to another. In a forked child it means nothing: using it there is an
/// error, and dropping it does nothing.
///
/// ```
/// # fn main() -> ntdb::Result<()> {
/// # let db = ntdb::Db::in_memory()?;
/// db.put(b"from", b"10")?;
/// let mut tx = db.begin()?;
/// tx.put(b"from", b"7")?;
/// tx.put(b"to", b"3")?;
/// assert_eq!(db.get(b"to")?, None);
/// assert_eq!(tx.get(b"to")?, Some(b"3".to_vec()));
/// tx.commit()?;
/// assert_eq!(db.get(b"to")?, Some(b"3".to_vec()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Transaction<'db> {
    db: &'db Db,
    open: Open<'db>,
    fork_generation: u64,
    /// The claim is the thread's.
    not_send: PhantomData<*const ()>,
}

/// A state of a [`Transaction`] that it can go back to; see [`Transaction::savepoint`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Savepoint(u64);

impl<'db> Transaction<'db> {
    pub(crate) fn begin(
        db: &'db Db,
        wait: bool,
        lock_timeout: Option<Duration>,
    ) -> Result<Option<Transaction<'db>>> {
        let environment = db.environment();
        db.check_waits_for_itself(true)?;
        let Some(open) = Open::begin(environment, wait, lock_timeout)? else { return Ok(None) };
        environment.begin_transaction_here();
        Ok(Some(Transaction {
            db,
            open,
            fork_generation: fork::generation(),
            not_send: PhantomData,
        }))
    }

    fn check(&self) -> Result<()> {
        if self.fork_generation == fork::generation() {
            return Ok(());
        }
        Err(Error::Forked { path: self.db.environment().core.path.clone() })
    }

    fn hash(&self, key: &[u8]) -> u64 {
        self.db.environment().core.hasher.hash(key)
    }

    fn find(&self, hash: u64, key: &[u8]) -> Result<Option<&[u8]>> {
        if let Some(only) = self.open.only()
            && only.key() == key
        {
            return Ok(only.value());
        }
        lookup::find_value_below(&self.db.environment().core, self.open.private().root, hash, key)
    }

    /// A copy of the value of `key` as the transaction sees it, or `None` if it is absent.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a page on the way is damaged, [`Error::Forked`] in a forked child.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.view(key, <[u8]>::to_vec)
    }

    /// Copies the value of `key` into `buffer`, as far as it fits, and returns its whole length; `None` if the key is absent.
    ///
    /// # Errors
    /// As [`Transaction::get`].
    pub fn get_into(&self, key: &[u8], buffer: &mut [u8]) -> Result<Option<usize>> {
        self.view(key, |value| {
            copy_fitting(value, buffer);
            value.len()
        })
    }

    /// Calls `f` with the value of `key`; `None` if the key is absent.
    ///
    /// # Errors
    /// As [`Transaction::get`].
    pub fn view<R>(&self, key: &[u8], f: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        self.check()?;
        Ok(self.find(self.hash(key), key)?.map(f))
    }

    /// Whether `key` is present.
    ///
    /// # Errors
    /// As [`Transaction::get`].
    pub fn contains(&self, key: &[u8]) -> Result<bool> {
        Ok(self.view(key, |_| ())?.is_some())
    }

    /// Number of records as the transaction sees it.
    pub fn len(&self) -> u64 {
        self.open.count()
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stores `value` under `key`, whether present or not.
    ///
    /// # Errors
    /// [`Error::Full`] if there is no room, [`Error::TooLong`], [`Error::Corrupt`], [`Error::Forked`] in a forked child. The
    /// operation has changed nothing then, and the transaction can go on.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.put_if(key, value, Condition::Any).map(drop)
    }

    /// Stores `value` under `key` if it is absent; says whether it was.
    ///
    /// # Errors
    /// As [`Transaction::put`].
    pub fn insert(&mut self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.put_if(key, value, Condition::Absent)
    }

    /// Stores `value` under `key` if it is present; says whether it was.
    ///
    /// # Errors
    /// As [`Transaction::put`].
    pub fn replace(&mut self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.put_if(key, value, Condition::Present)
    }

    fn put_if(&mut self, key: &[u8], value: &[u8], condition: Condition) -> Result<bool> {
        self.check()?;
        operation::check_lengths(&self.db.environment().core, key.len(), value.len() as u64)?;
        let hash = self.hash(key);
        if self.open.may_keep() {
            let was_present = self.find(hash, key)?.is_some();
            if !condition.holds(was_present) {
                return Ok(false);
            }
            if self.open.keep(hash, key, Some(value), was_present) {
                return Ok(true);
            }
        }
        self.open.before_operation(self.db.deadline())?;
        let done = self.open.change(|writer, log, scratch| {
            operation::put(writer, hash, key, value, condition, log, scratch)
        })?;
        if done.is_none() {
            return Ok(false);
        }
        self.open.log(&Op::Put { key, value });
        Ok(true)
    }

    /// Deletes `key`; says whether it was present.
    ///
    /// # Errors
    /// As [`Transaction::put`].
    pub fn delete(&mut self, key: &[u8]) -> Result<bool> {
        self.check()?;
        operation::check_lengths(&self.db.environment().core, key.len(), 0)?;
        let hash = self.hash(key);
        if self.open.may_keep() {
            if self.find(hash, key)?.is_none() {
                return Ok(false);
            }
            if self.open.keep(hash, key, None, true) {
                return Ok(true);
            }
        }
        self.open.before_operation(self.db.deadline())?;
        let done = self.open.change(|writer, log, _| operation::delete(writer, hash, key, log))?;
        if done.is_none() {
            return Ok(false);
        }
        self.open.log(&Op::Delete { key });
        Ok(true)
    }

    /// Adds `bytes` to the end of the value of `key`, which need not be present; returns the new length of the value in bytes.
    ///
    /// # Errors
    /// As [`Transaction::put`].
    pub fn append(&mut self, key: &[u8], bytes: &[u8]) -> Result<u64> {
        self.check()?;
        operation::check_lengths(&self.db.environment().core, key.len(), bytes.len() as u64)?;
        let hash = self.hash(key);
        self.open.before_operation(self.db.deadline())?;
        let appended = self.open.change(|writer, log, scratch| {
            operation::append(writer, hash, key, bytes, None, log, scratch)
        })?;
        let len = appended.map_or(0, |appended| appended.len);
        let length_before = len - bytes.len() as u64;
        self.open.log(&Op::Append { key, length_before, bytes });
        Ok(len)
    }

    /// Deletes every record.
    ///
    /// # Errors
    /// As [`Transaction::put`].
    pub fn clear(&mut self) -> Result<()> {
        self.check()?;
        self.open.before_operation(self.db.deadline())?;
        self.open.change(|writer, log, _| operation::clear(writer, log))?;
        self.open.log(&Op::Clear);
        Ok(())
    }

    /// Calls `f` with every record, as the transaction sees it, until it breaks; returns how many it was called for. The order is
    /// that of a hash.
    ///
    /// # Errors
    /// As [`Transaction::get`].
    pub fn for_each(&self, mut f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<u64> {
        self.check()?;
        let (core, root) = (&self.db.environment().core, self.open.private().root);
        let Some(only) = self.open.only() else { return iterate::for_each_below(core, root, f) };
        // The operation that is kept has not reached the tree.
        let (mut count, mut flow) = (0, ControlFlow::Continue(()));
        iterate::for_each_below(core, root, |key, value| {
            if key != only.key() {
                count += 1;
                flow = f(key, value);
            }
            flow
        })?;
        if let (Some(value), ControlFlow::Continue(())) = (only.value(), flow) {
            count += 1;
            let _ = f(only.key(), value);
        }
        Ok(count)
    }

    /// Remembers the present state, to go back to it with [`Transaction::rollback_to`]. Savepoints nest to any depth.
    ///
    /// # Errors
    /// As [`Transaction::put`]: a single operation before it is carried out now.
    pub fn savepoint(&mut self) -> Result<Savepoint> {
        self.check()?;
        self.open.settle()?;
        Ok(Savepoint(self.open.savepoint()))
    }

    /// Undoes everything since `savepoint`, which stays, and may be gone back to again; later savepoints are forgotten. `false`
    /// if the savepoint was released or rolled back over.
    ///
    /// # Errors
    /// [`Error::Forked`] in a forked child.
    pub fn rollback_to(&mut self, savepoint: Savepoint) -> Result<bool> {
        self.check()?;
        Ok(self.open.roll_back(savepoint.0))
    }

    /// Forgets `savepoint` and all later ones; what was done since then stays. `false` if it was forgotten before.
    ///
    /// # Errors
    /// [`Error::Forked`] in a forked child.
    pub fn release(&mut self, savepoint: Savepoint) -> Result<bool> {
        self.check()?;
        Ok(self.open.release(savepoint.0))
    }

    /// Does all of the commit that may fail for lack of room or memory: afterwards, and until the next change, a commit cannot
    /// fail for that.
    ///
    /// # Errors
    /// As [`Transaction::put`]; the transaction is still open.
    pub fn prepare(&mut self) -> Result<()> {
        self.check()?;
        self.open.prepare(true, self.db.deadline())
    }

    /// Makes the changes visible, all at once, and returns when they are durable. Commits that wait at the same time share one
    /// sync, and the next transaction can run meanwhile.
    ///
    /// # Errors
    /// As [`Transaction::put`], and nothing has happened; or [`Error::NotDurable`], and the changes are visible, but could not
    /// be made durable.
    pub fn commit(self) -> Result<()> {
        self.commit_as(Durability::Durable)
    }

    /// As [`Transaction::commit`], without waiting for the disk: after a crash of the machine the newest transactions may be
    /// missing, each of them whole.
    ///
    /// # Errors
    /// As [`Transaction::put`], and nothing has happened.
    pub fn commit_relaxed(self) -> Result<()> {
        self.commit_as(Durability::Relaxed)
    }

    fn commit_as(mut self, durability: Durability) -> Result<()> {
        self.check()?;
        let is_durable = durability == Durability::Durable;
        let lsn = self.open.commit(is_durable, self.db.deadline())?;
        let (db, replaced) = (self.db, self.open.private().replaced_pages());
        drop(self);
        db.after_commit(lsn, replaced, is_durable)
    }

    /// Gives up all changes.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; then the next transaction gives them up.
    pub fn abort(mut self) -> Result<()> {
        self.check()?;
        self.open.abort()
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if self.fork_generation != fork::generation() {
            self.open.forget();
            return;
        }
        // What fails here, the next owner of the claim does.
        let _ = self.open.abort();
        self.db.environment().end_transaction_here();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// Between the end of a transaction and that of its guard another thread can begin one, and is then still told if it would
    /// wait for itself.
    #[test]
    fn a_guard_that_ends_late_leaves_the_next_one_alone() {
        let db = Db::in_memory().unwrap().with_lock_timeout(Some(Duration::from_millis(100)));
        let mut first = db.begin().unwrap();
        first.put(b"a", b"1").unwrap();
        first.open.commit(false, None).unwrap();
        let (begun, has_begun) = channel();
        let (go_on, may_go_on) = channel::<()>();
        std::thread::scope(|scope| {
            let db = &db;
            scope.spawn(move || {
                let second = db.begin().unwrap();
                begun.send(()).unwrap();
                may_go_on.recv().unwrap();
                let refused = db.put(b"b", b"2");
                assert!(matches!(refused, Err(Error::WouldDeadlock { .. })), "{refused:?}");
                let refused = db.begin().map(drop);
                assert!(matches!(refused, Err(Error::WouldDeadlock { .. })), "{refused:?}");
                second.commit().unwrap();
                db.put(b"b", b"2").unwrap();
            });
            has_begun.recv().unwrap();
            drop(first);
            go_on.send(()).unwrap();
        });
        assert_eq!(db.len().unwrap(), 2);
    }
}
