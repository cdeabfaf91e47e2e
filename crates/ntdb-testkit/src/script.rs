//! A scripted workload: one writer, a fixed list of operations that follows from a seed, and the
//! state that the database must have after each of them.
//!
//! Crash and power-cut tests run a script up to some moment, look at what the database then holds,
//! and demand that it is the state after some operation of the script, neither earlier than what
//! was promised nor later than what was begun. States are compared as hashes of all records.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use ntdb::{Db, Durability, Snapshot};

use crate::rng::Rng;

/// One operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Store, whether present or not.
    Put(Vec<u8>, Vec<u8>),
    /// The same, and wait until it is on disk.
    PutDurable(Vec<u8>, Vec<u8>),
    /// Store if absent.
    Insert(Vec<u8>, Vec<u8>),
    /// Store if present.
    Replace(Vec<u8>, Vec<u8>),
    /// Delete.
    Delete(Vec<u8>),
    /// Add to the end.
    Append(Vec<u8>, Vec<u8>),
    /// Delete all.
    Clear,
    /// Make all durable.
    Sync,
    /// Write a checkpoint.
    Checkpoint,
    /// `Db::compact`.
    Compact,
    /// Verify everything.
    Check,
    /// Open a snapshot; whoever follows a script holds it for some time and looks at it then.
    Snapshot,
    /// Read-modify-write under a key lock: store this value.
    LockedPut(Vec<u8>, Vec<u8>),
    /// Several changes, all at once or not at all.
    Transaction(Vec<Change>, End),
    /// Close the database and open it again; the last to close leaves it at rest.
    Reopen,
}

/// What happens within a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// An operation: one of those that change records.
    Do(Op),
    /// A savepoint.
    Save,
    /// Back to the savepoint of this number, which stays.
    RollBack(usize),
    /// Make ready to commit.
    Prepare,
}

/// How a transaction ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Durable.
    Commit,
    /// Not waiting for the disk.
    CommitRelaxed,
    /// Nothing has happened.
    Abort,
}

fn run_transaction(db: &Db, changes: &[Change], end: End) -> ntdb::Result<()> {
    // Some begin while another thread holds a key.
    let beside = (changes.len() % 7 == 3).then(|| {
        let db = db.clone();
        let (locked, is_locked) = std::sync::mpsc::channel();
        let holder = std::thread::spawn(move || {
            let guard = db.lock(b"held beside")?;
            let _ = locked.send(());
            std::thread::sleep(std::time::Duration::from_millis(1));
            drop(guard);
            Ok(())
        });
        let _ = is_locked.recv();
        holder
    });
    let mut tx = db.begin()?;
    if let Some(holder) = beside {
        holder.join().expect("no panic")?;
    }
    let mut saved = Vec::new();
    for change in changes {
        match change {
            Change::Do(Op::Put(key, value)) => tx.put(key, value)?,
            Change::Do(Op::Insert(key, value)) => drop(tx.insert(key, value)?),
            Change::Do(Op::Replace(key, value)) => drop(tx.replace(key, value)?),
            Change::Do(Op::Delete(key)) => drop(tx.delete(key)?),
            Change::Do(Op::Append(key, bytes)) => drop(tx.append(key, bytes)?),
            Change::Do(Op::Clear) => tx.clear()?,
            Change::Do(other) => panic!("not within a transaction: {other:?}"),
            Change::Save => saved.push(tx.savepoint()?),
            Change::RollBack(n) => {
                assert!(tx.rollback_to(saved[*n])?, "a savepoint is lost");
                saved.truncate(n + 1);
            }
            Change::Prepare => tx.prepare()?,
        }
    }
    match end {
        End::Commit => tx.commit(),
        End::CommitRelaxed => tx.commit_relaxed(),
        End::Abort => tx.abort(),
    }
}

impl Op {
    /// Whether everything up to and including this operation is durable once it has returned.
    pub fn promises_durability(&self) -> bool {
        matches!(
            self,
            Op::PutDurable(..)
                | Op::Sync
                | Op::Checkpoint
                | Op::Compact
                | Op::Transaction(_, End::Commit)
        )
    }

    /// Carries the operation out (all but [`Op::Reopen`], which is the caller's).
    ///
    /// # Errors
    /// What the database reports.
    pub fn run(&self, db: &Db) -> ntdb::Result<()> {
        match self {
            Op::Put(key, value) => db.put(key, value),
            Op::PutDurable(key, value) => db.with_durability(Durability::Durable).put(key, value),
            Op::Insert(key, value) => db.insert(key, value).map(drop),
            Op::Replace(key, value) => db.replace(key, value).map(drop),
            Op::Delete(key) => db.delete(key).map(drop),
            Op::Append(key, bytes) => db.append(key, bytes).map(drop),
            Op::Clear => db.clear(),
            Op::Sync => db.sync(),
            Op::Checkpoint => db.checkpoint(),
            Op::Compact => db.compact(),
            Op::Check => {
                let report = db.check()?;
                assert!(report.is_clean(), "{report:?}");
                Ok(())
            }
            Op::Snapshot => {
                let (then, now) = (Digest::of_snapshot(&db.snapshot()?)?, Digest::of_live(db)?);
                assert_eq!(then, now, "a snapshot is not the present state");
                Ok(())
            }
            Op::LockedPut(key, value) => {
                let _guard = db.lock(key)?;
                db.put(key, value)
            }
            Op::Transaction(changes, end) => run_transaction(db, changes, *end),
            Op::Reopen => Ok(()),
        }
    }
}

/// What the records of a database add up to; equal states have equal digests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Digest {
    /// Number of records.
    pub records: u64,
    /// The hashes of all records, combined by exclusive or.
    pub xor: u64,
}

impl Digest {
    fn toggle(&mut self, key: &[u8], value: &[u8]) {
        let mut hasher = DefaultHasher::new();
        (key, value).hash(&mut hasher);
        self.xor ^= hasher.finish();
    }

    /// The digest of what `db` holds now.
    ///
    /// # Errors
    /// What the database reports.
    pub fn of(db: &Db) -> ntdb::Result<Digest> {
        Digest::of_snapshot(&db.snapshot()?)
    }

    /// The digest of what a snapshot holds.
    ///
    /// # Errors
    /// What the database reports.
    pub fn of_snapshot(snapshot: &Snapshot) -> ntdb::Result<Digest> {
        let mut digest = Digest::default();
        snapshot.for_each(|key, value| digest.add(key, value))?;
        Ok(digest)
    }

    /// The digest of what `db`, which nobody changes meanwhile, holds, without a snapshot.
    ///
    /// # Errors
    /// What the database reports.
    pub fn of_live(db: &Db) -> ntdb::Result<Digest> {
        let mut digest = Digest::default();
        db.for_each_live(|key, value| digest.add(key, value))?;
        Ok(digest)
    }

    fn add(&mut self, key: &[u8], value: &[u8]) -> ControlFlow<()> {
        self.toggle(key, value);
        self.records += 1;
        ControlFlow::Continue(())
    }
}

impl<'r> FromIterator<(&'r Vec<u8>, &'r Vec<u8>)> for Digest {
    fn from_iter<I: IntoIterator<Item = (&'r Vec<u8>, &'r Vec<u8>)>>(records: I) -> Digest {
        let mut digest = Digest::default();
        for (key, value) in records {
            digest.toggle(key, value);
            digest.records += 1;
        }
        digest
    }
}

/// What a database should hold, and its digest.
#[derive(Default)]
struct Model {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    digest: Digest,
    /// What brings back the state at the first savepoint, the last change first: copies of all
    /// records would take longer than all else that a script is made of. `None` where there is none.
    undo: Option<Vec<Undo>>,
}

/// What a change has replaced.
enum Undo {
    /// One record.
    Record(Vec<u8>, Option<Vec<u8>>),
    /// All of them.
    All(BTreeMap<Vec<u8>, Vec<u8>>),
}

impl Model {
    fn store(&mut self, key: &[u8], value: Option<Vec<u8>>) {
        let old = match value {
            Some(value) => {
                self.digest.toggle(key, &value);
                self.records.insert(key.to_vec(), value)
            }
            None => self.records.remove(key),
        };
        if let Some(old) = &old {
            self.digest.toggle(key, old);
        }
        self.digest.records = self.records.len() as u64;
        if let Some(undo) = &mut self.undo {
            undo.push(Undo::Record(key.to_vec(), old));
        }
    }

    fn clear(&mut self) {
        let old = std::mem::take(&mut self.records);
        self.digest = Digest::default();
        if let Some(undo) = &mut self.undo {
            undo.push(Undo::All(old));
        }
    }

    /// Goes back to what it was when `changes` changes had been made since the first savepoint.
    fn roll_back(&mut self, changes: usize, digest: Digest) {
        let mut undo = self.undo.take().expect("a savepoint");
        for change in undo.drain(changes..).rev() {
            match change {
                Undo::Record(key, Some(value)) => drop(self.records.insert(key, value)),
                Undo::Record(key, None) => drop(self.records.remove(&key)),
                Undo::All(records) => self.records = records,
            }
        }
        self.digest = digest;
        self.undo = Some(undo);
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Put(key, value) | Op::PutDurable(key, value) | Op::LockedPut(key, value) => {
                self.store(key, Some(value.clone()));
            }
            Op::Insert(key, value) if !self.records.contains_key(key) => {
                self.store(key, Some(value.clone()));
            }
            Op::Replace(key, value) if self.records.contains_key(key) => {
                self.store(key, Some(value.clone()));
            }
            Op::Delete(key) => self.store(key, None),
            Op::Append(key, bytes) => {
                let mut value = self.records.get(key).cloned().unwrap_or_default();
                value.extend_from_slice(bytes);
                self.store(key, Some(value));
            }
            Op::Clear => self.clear(),
            Op::Transaction(_, End::Abort) => {}
            Op::Transaction(changes, _) => {
                let mut saved = Vec::new();
                for change in changes {
                    match change {
                        Change::Do(op) => self.apply(op),
                        Change::Save => {
                            let undo = self.undo.get_or_insert_default();
                            saved.push((undo.len(), self.digest));
                        }
                        Change::RollBack(n) => {
                            saved.truncate(n + 1);
                            let (changes, digest) = saved[*n];
                            self.roll_back(changes, digest);
                        }
                        Change::Prepare => {}
                    }
                }
                self.undo = None;
            }
            _ => {}
        }
    }
}

/// A script with the digest after each operation.
#[derive(Debug)]
pub struct Script {
    /// The operations.
    pub ops: Vec<Op>,
    /// `digests[n]` is the state after the first `n` operations.
    pub digests: Vec<Digest>,
}

/// What a script is to stress.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Shape {
    /// Every write path: growth over several directory pages and back, extents, clear, checkpoints.
    Full,
    /// Few keys, many kinds of operation, frequent syncs and checkpoints: cheap to repeat.
    Small,
}

impl Shape {
    /// From its name.
    pub fn from_name(name: &str) -> Option<Shape> {
        match name {
            "full" => Some(Shape::Full),
            "small" => Some(Shape::Small),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Shape::Full => "full",
            Shape::Small => "small",
        }
    }
}

impl Script {
    /// The script that follows from `seed`.
    pub fn new(shape: Shape, seed: u64) -> Script {
        let mut rng = Rng::new(seed);
        let mut ops = Vec::new();
        match shape {
            Shape::Full => full(&mut rng, &mut ops),
            Shape::Small => small(&mut rng, &mut ops),
        }
        Script::from_ops(ops)
    }

    /// As [`Script::new`], made once in each process.
    ///
    /// # Panics
    /// If making one has panicked before.
    pub fn shared(shape: Shape, seed: u64) -> Arc<Script> {
        static MADE: Mutex<BTreeMap<(Shape, u64), Arc<Script>>> = Mutex::new(BTreeMap::new());
        let mut made = MADE.lock().expect("no panic while it is held");
        made.entry((shape, seed)).or_insert_with(|| Arc::new(Script::new(shape, seed))).clone()
    }

    fn from_ops(ops: Vec<Op>) -> Script {
        let mut model = Model::default();
        let mut digests = vec![model.digest];
        for op in &ops {
            model.apply(op);
            digests.push(model.digest);
        }
        Script { ops, digests }
    }

    /// The largest `n` in `low..=high` such that `found` is the state after `n` operations.
    pub fn place(&self, found: Digest, low: usize, high: usize) -> Option<usize> {
        (low..=high.min(self.ops.len())).rev().find(|&n| self.digests[n] == found)
    }
}

fn filler(rng: &mut Rng) -> Vec<u8> {
    let len = match rng.below(100) {
        0..50 => rng.range(0, 40),
        50..90 => rng.range(40, 900),
        90..97 => rng.range(900, 3_000),
        _ => rng.range(3_000, 30_000),
    };
    rng.bytes(len as usize)
}

fn key(rng: &mut Rng, keys: u64) -> Vec<u8> {
    key_number(rng.below(keys))
}

fn key_number(n: u64) -> Vec<u8> {
    let mut key = format!("key-{n}").into_bytes();
    if n % 37 == 5 {
        key.resize(1_500, b'-');
    }
    key
}

fn random_op(rng: &mut Rng, keys: u64) -> Op {
    let key = key(rng, keys);
    match rng.below(100) {
        0..35 => Op::Put(key, filler(rng)),
        35..45 => Op::Insert(key, filler(rng)),
        45..55 => Op::Replace(key, filler(rng)),
        55..75 => Op::Delete(key),
        75..90 => Op::Append(key, filler(rng)),
        90..95 => Op::LockedPut(key, filler(rng)),
        _ => Op::PutDurable(key, filler(rng)),
    }
}

/// A transaction of up to `longest` changes.
fn transaction(rng: &mut Rng, keys: u64, longest: u64) -> Op {
    let mut changes = Vec::new();
    let mut saved = 0;
    for _ in 0..rng.below(longest + 1) {
        changes.push(match rng.below(40) {
            0..3 => {
                saved += 1;
                Change::Save
            }
            3 if saved > 0 => {
                let n = rng.below(saved as u64) as usize;
                saved = n + 1;
                Change::RollBack(n)
            }
            4 => Change::Prepare,
            _ => Change::Do(match random_op(rng, keys) {
                Op::LockedPut(key, value) | Op::PutDurable(key, value) => Op::Put(key, value),
                op => op,
            }),
        });
    }
    let end = match rng.below(6) {
        0 => End::Abort,
        1..4 => End::CommitRelaxed,
        _ => End::Commit,
    };
    Op::Transaction(changes, end)
}

fn small(rng: &mut Rng, ops: &mut Vec<Op>) {
    let count = rng.range(20, 400);
    let keys = rng.range(1, 120);
    for _ in 0..count {
        ops.push(match rng.below(200) {
            0 => Op::Clear,
            1..12 => Op::Sync,
            12..20 => Op::Checkpoint,
            20..22 => Op::Reopen,
            22..24 => Op::Check,
            24..26 => Op::Compact,
            26..44 => transaction(rng, keys, 12),
            44..54 => Op::Snapshot,
            _ => random_op(rng, keys),
        });
    }
}

fn full(rng: &mut Rng, ops: &mut Vec<Op>) {
    for _ in 0..200 {
        ops.push(random_op(rng, 50));
    }
    ops.push(Op::Checkpoint);
    // Growth: long records fill a page by threes, so that directory pages split, and the root
    // array doubles, within some thousand operations.
    let grown = 5_000u64;
    for n in 0..grown {
        ops.push(Op::Put(format!("grow-{n}").into_bytes(), rng.bytes(950)));
        if n % 1_000 == 999 {
            ops.push(Op::Sync);
        }
        if n == grown / 2 {
            ops.push(Op::Checkpoint);
        }
        if n % 900 == 300 {
            ops.push(Op::Snapshot);
        }
    }
    // An extent that grows by appends until it has to move, across a checkpoint that freezes it.
    for n in 0..30 {
        ops.push(Op::Append(b"long".to_vec(), rng.bytes(20_000)));
        if n % 10 == 9 {
            ops.push(Op::Checkpoint);
        }
        if n % 10 == 5 {
            ops.push(Op::Snapshot);
        }
    }
    for n in 0..30 {
        ops.push(transaction(rng, 50, 40));
        if n % 8 == 3 {
            // The second finds nothing changed since the first.
            ops.push(Op::Snapshot);
            ops.push(Op::Snapshot);
        }
    }
    // Transactions whose log comes in chunks, with splits, one of them rolled back to its middle, one in vain.
    for end in [End::CommitRelaxed, End::Abort, End::Commit] {
        let mut changes = vec![Change::Do(Op::Put(b"huge".to_vec(), rng.bytes(900_000)))];
        for n in 0..600 {
            if n == 300 {
                changes.push(Change::Save);
            }
            let key = format!("many-{}", rng.below(400)).into_bytes();
            changes.push(Change::Do(Op::Append(key, rng.bytes(900))));
        }
        changes.push(Change::RollBack(0));
        changes.push(Change::Do(Op::Delete(b"many-7".to_vec())));
        ops.push(Op::Transaction(changes, end));
    }
    ops.push(Op::Transaction(
        vec![Change::Do(Op::Put(b"x".to_vec(), vec![1; 10])), Change::Do(Op::Clear)],
        End::Abort,
    ));
    ops.push(Op::Put(b"huge".to_vec(), rng.bytes(1_500_000)));
    ops.push(Op::Append(b"huge".to_vec(), rng.bytes(700_000)));
    for _ in 0..100 {
        ops.push(random_op(rng, 50));
    }
    // Shrinking: buckets and directory pages that can merge, pages that are free again.
    for n in 0..grown {
        ops.push(Op::Delete(format!("grow-{n}").into_bytes()));
        if n == grown * 9 / 10 {
            ops.push(Op::Compact);
        }
        if n % 1_200 == 600 {
            ops.push(Op::Snapshot);
        }
    }
    ops.push(Op::Reopen);
    for _ in 0..200 {
        ops.push(random_op(rng, 50));
    }
    ops.push(Op::Clear);
    for _ in 0..50 {
        ops.push(random_op(rng, 50));
    }
    // A tree that is given up in several parts, half of which a checkpoint has frozen.
    for n in 0..300 {
        ops.push(Op::Put(format!("clear-{n}").into_bytes(), rng.bytes(900)));
        if n == 200 {
            ops.push(Op::Checkpoint);
        }
    }
    ops.push(Op::Snapshot);
    ops.push(Op::Clear);
    for _ in 0..50 {
        ops.push(random_op(rng, 50));
    }
    ops.push(Op::Checkpoint);
    ops.push(Op::Check);
    ops.push(Op::Reopen);
    for _ in 0..20 {
        ops.push(random_op(rng, 50));
    }
    // Several buckets, of which nothing is left in the end: one is enough.
    for n in 0..30 {
        ops.push(Op::Put(format!("last-{n}").into_bytes(), rng.bytes(900)));
    }
    for n in 0..50 {
        ops.push(Op::Delete(key_number(n)));
        ops.push(Op::Delete(format!("last-{n}").into_bytes()));
    }
    for _ in 0..20 {
        ops.push(random_op(rng, 50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_script_and_the_digests_follow_the_model() {
        let a = Script::new(Shape::Small, 5);
        let b = Script::new(Shape::Small, 5);
        assert_eq!(a.ops, b.ops);
        assert_eq!(a.digests, b.digests);
        assert_ne!(a.ops, Script::new(Shape::Small, 6).ops);
    }

    #[test]
    fn going_back_to_a_savepoint_brings_back_what_was_there() {
        let put = |k: &[u8], v: &[u8]| Op::Put(k.to_vec(), v.to_vec());
        let before = vec![put(b"a", b"1"), put(b"b", b"2")];
        let within = |changes: Vec<Change>| {
            let mut ops = before.clone();
            ops.push(Op::Transaction(changes, End::Commit));
            // What is stored later must not meet what a transaction has left.
            ops.push(put(b"z", b"9"));
            Script::from_ops(ops).digests
        };
        let plain = |ops: &[Op]| {
            let ops: Vec<_> = before.iter().chain(ops).cloned().collect();
            *Script::from_ops(ops).digests.last().expect("one at least")
        };
        let first = Change::Do(put(b"a", b"changed"));
        let digests = within(vec![
            first.clone(),
            Change::Save,
            Change::Do(put(b"a", b"again")),
            Change::Do(Op::Delete(b"b".to_vec())),
            Change::Save,
            Change::Do(Op::Clear),
            Change::Do(put(b"c", b"3")),
            Change::RollBack(1),
            Change::Do(Op::Append(b"d".to_vec(), b"4".to_vec())),
        ]);
        let expected =
            [put(b"a", b"again"), Op::Delete(b"b".to_vec()), put(b"d", b"4"), put(b"z", b"9")];
        assert_eq!(digests[3], plain(&expected[..3]));
        assert_eq!(digests[4], plain(&expected));
        let digests = within(vec![
            first.clone(),
            Change::Save,
            Change::Do(put(b"e", b"5")),
            Change::Save,
            Change::Do(Op::Clear),
            Change::RollBack(0),
            Change::Do(put(b"f", b"6")),
            Change::RollBack(0),
        ]);
        assert_eq!(digests[3], plain(&[put(b"a", b"changed")]));
        assert_eq!(digests[4], plain(&[put(b"a", b"changed"), put(b"z", b"9")]));
    }

    #[test]
    fn the_digest_returns_when_the_state_returns() {
        let put = |v: &[u8]| Op::Put(b"k".to_vec(), v.to_vec());
        let script = Script::from_ops(vec![
            put(b"1"),
            put(b"2"),
            put(b"1"),
            Op::Delete(b"k".to_vec()),
            Op::Append(b"k".to_vec(), b"1".to_vec()),
            Op::Insert(b"k".to_vec(), b"9".to_vec()),
            Op::Clear,
        ]);
        let d = &script.digests;
        assert_ne!(d[1], d[2]);
        assert_eq!(d[1], d[3]);
        assert_eq!(d[4], Digest::default());
        assert_eq!(d[5], d[1]);
        assert_eq!(d[6], d[1]);
        assert_eq!(d[7], Digest::default());
        assert_eq!(script.place(d[1], 0, 7), Some(6));
        assert_eq!(script.place(d[2], 3, 7), None);
    }
}
