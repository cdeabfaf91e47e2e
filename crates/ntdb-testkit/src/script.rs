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

use ntdb::{Db, Durability};

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
    /// Verify everything.
    Check,
    /// Read-modify-write under a key lock: store this value.
    LockedPut(Vec<u8>, Vec<u8>),
    /// Close the database and open it again; the last to close leaves it at rest.
    Reopen,
}

impl Op {
    /// Whether everything up to and including this operation is durable once it has returned.
    pub fn promises_durability(&self) -> bool {
        matches!(self, Op::PutDurable(..) | Op::Sync | Op::Checkpoint)
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
            Op::Check => {
                let report = db.check()?;
                assert!(report.is_clean(), "{report:?}");
                Ok(())
            }
            Op::LockedPut(key, value) => {
                let _guard = db.lock(key)?;
                db.put(key, value)
            }
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
        let mut digest = Digest::default();
        db.for_each(|key, value| {
            digest.toggle(key, value);
            digest.records += 1;
            ControlFlow::Continue(())
        })?;
        Ok(digest)
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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

    fn from_ops(ops: Vec<Op>) -> Script {
        let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        let mut digest = Digest::default();
        let mut digests = vec![digest];
        let store = |digest: &mut Digest,
                     model: &mut BTreeMap<Vec<u8>, Vec<u8>>,
                     key: &[u8],
                     value: Option<Vec<u8>>| {
            let old = match &value {
                Some(value) => {
                    digest.toggle(key, value);
                    model.insert(key.to_vec(), value.clone())
                }
                None => model.remove(key),
            };
            if let Some(old) = old {
                digest.toggle(key, &old);
            }
            digest.records = model.len() as u64;
        };
        for op in &ops {
            match op {
                Op::Put(key, value) | Op::PutDurable(key, value) | Op::LockedPut(key, value) => {
                    store(&mut digest, &mut model, key, Some(value.clone()));
                }
                Op::Insert(key, value) if !model.contains_key(key) => {
                    store(&mut digest, &mut model, key, Some(value.clone()));
                }
                Op::Replace(key, value) if model.contains_key(key) => {
                    store(&mut digest, &mut model, key, Some(value.clone()));
                }
                Op::Delete(key) => store(&mut digest, &mut model, key, None),
                Op::Append(key, bytes) => {
                    let mut value = model.get(key).cloned().unwrap_or_default();
                    value.extend_from_slice(bytes);
                    store(&mut digest, &mut model, key, Some(value));
                }
                Op::Clear => {
                    model.clear();
                    digest = Digest::default();
                }
                _ => {}
            }
            digests.push(digest);
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
    }
    // An extent that grows by appends until it has to move, across a checkpoint that freezes it.
    for n in 0..30 {
        ops.push(Op::Append(b"long".to_vec(), rng.bytes(20_000)));
        if n % 10 == 9 {
            ops.push(Op::Checkpoint);
        }
    }
    ops.push(Op::Put(b"huge".to_vec(), rng.bytes(1_500_000)));
    ops.push(Op::Append(b"huge".to_vec(), rng.bytes(700_000)));
    for _ in 0..100 {
        ops.push(random_op(rng, 50));
    }
    // Shrinking: buckets and directory pages that can merge, pages that are free again.
    for n in 0..grown {
        ops.push(Op::Delete(format!("grow-{n}").into_bytes()));
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
