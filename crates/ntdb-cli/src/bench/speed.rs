//! `ntdb bench speed`: eight kinds of operations, timed one after the other on a new database.
//!
//! The lines have the form that TDB's own `speed` program prints, so that figures can be laid side
//! by side. What each phase does stands in the help text (`cli.rs`). Every phase counts what it
//! found, and a wrong count fails the benchmark: a fast wrong answer is no figure.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use ntdb::{Db, Transaction};
use serde::Serialize;

use super::place::Place;
use crate::cli::{GlobalOptions, KeyOrder, SpeedArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;

/// Offset of the permutation in which Deleting goes through the indices.
const DELETING_OFFSET: u64 = 100_003;
/// Offset of the permutation in which Churning goes through the indices.
const CHURNING_OFFSET: u64 = 1_000_019;

/// The figures of one phase.
#[derive(Serialize)]
struct Phase {
    name: &'static str,
    operations: u32,
    ns_per_operation: f64,
    file_bytes: u64,
}

#[derive(Serialize)]
struct Report<'a> {
    records: u32,
    keys: &'static str,
    value_bytes: usize,
    in_memory: bool,
    synced: bool,
    transaction: bool,
    durable: bool,
    page_size: u32,
    phases: &'a [Phase],
}

/// Runs the eight phases.
pub fn run(global: &GlobalOptions, args: &SpeedArgs) -> Result<(), Failure> {
    if args.internal && global.durable {
        let text =
            "--durable: a database in memory (--internal) is on no disk; leave out one of them";
        return Err(Failure::Usage(text.into()));
    }
    let place =
        if args.internal { Place::Memory } else { Place::new("speed", args.file.as_deref())? };
    let mut options = opening::options(global);
    opening::with_creation(options.create_new(true), &args.new);
    let db = match place.path() {
        Some(path) => options.open(path)?,
        None => options.open_in_memory()?,
    };
    let mut speed = Speed {
        args,
        durable: global.durable,
        db: &db,
        path: place.path(),
        out: Output::new(),
        phases: Vec::new(),
    };
    if args.transaction {
        speed.run_all_phases::<Transaction<'_>>()?;
    } else {
        speed.run_all_phases::<&Db>()?;
    }
    let Speed { mut out, phases, .. } = speed;
    if args.json {
        out.json(&Report {
            records: args.records,
            keys: match args.keys {
                KeyOrder::Seq => "seq",
                KeyOrder::Random => "random",
            },
            value_bytes: args.value_size,
            in_memory: args.internal,
            synced: !args.no_sync && !args.internal,
            transaction: args.transaction,
            durable: global.durable,
            page_size: db.stat()?.page_size,
            phases: &phases,
        })?;
    }
    out.finish()?;
    Ok(db.close()?)
}

/// Whether a phase changes the database, and so ends with a sync.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reads,
    Writes,
}

/// What the operations of a phase go to: the database itself, or a transaction as long as the phase.
trait Target<'a>: Sized {
    /// Whether the sync behind the phase is part of its time.
    const IS_SYNC_TIMED: bool;
    fn begin(db: &'a Db) -> ntdb::Result<Self>;
    fn end(self, durable: bool) -> ntdb::Result<()>;
    fn insert(&mut self, key: &[u8], value: &[u8]) -> ntdb::Result<bool>;
    fn get_into(&mut self, key: &[u8], buffer: &mut [u8]) -> ntdb::Result<Option<usize>>;
    fn delete(&mut self, key: &[u8]) -> ntdb::Result<bool>;
    fn append(&mut self, key: &[u8], bytes: &[u8]) -> ntdb::Result<u64>;
    fn for_each(&mut self, f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> ntdb::Result<u64>;
}

/// The operations that the database and its transactions have in common.
macro_rules! pass_on {
    () => {
        fn insert(&mut self, key: &[u8], value: &[u8]) -> ntdb::Result<bool> {
            (*self).insert(key, value)
        }
        fn get_into(&mut self, key: &[u8], buffer: &mut [u8]) -> ntdb::Result<Option<usize>> {
            (*self).get_into(key, buffer)
        }
        fn delete(&mut self, key: &[u8]) -> ntdb::Result<bool> {
            (*self).delete(key)
        }
        fn append(&mut self, key: &[u8], bytes: &[u8]) -> ntdb::Result<u64> {
            (*self).append(key, bytes)
        }
    };
}

impl<'a> Target<'a> for &'a Db {
    const IS_SYNC_TIMED: bool = true;

    fn begin(db: &'a Db) -> ntdb::Result<Self> {
        Ok(db)
    }

    fn end(self, _durable: bool) -> ntdb::Result<()> {
        Ok(())
    }

    pass_on!();

    // As its ancestors went over theirs.
    fn for_each(&mut self, f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> ntdb::Result<u64> {
        (*self).for_each_live(f)
    }
}

impl<'a> Target<'a> for Transaction<'a> {
    const IS_SYNC_TIMED: bool = false;

    fn begin(db: &'a Db) -> ntdb::Result<Self> {
        db.begin()
    }

    fn end(self, durable: bool) -> ntdb::Result<()> {
        if durable { self.commit() } else { self.commit_relaxed() }
    }

    pass_on!();

    fn for_each(&mut self, f: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> ntdb::Result<u64> {
        (*self).for_each(f)
    }
}

struct Speed<'a> {
    args: &'a SpeedArgs,
    durable: bool,
    db: &'a Db,
    path: Option<&'a Path>,
    out: Output,
    phases: Vec<Phase>,
}

impl<'a> Speed<'a> {
    fn run_all_phases<T: Target<'a>>(&mut self) -> Result<(), Failure> {
        // A copy of the loops for each kind of target and of keys, so that they measure the database and not calls by pointer.
        match self.args.keys {
            KeyOrder::Seq => self.run_phases::<T>(u32::to_le_bytes),
            KeyOrder::Random => self.run_phases::<T>(|index| scramble(index).to_le_bytes()),
        }
    }

    fn run_phases<T: Target<'a>>(
        &mut self,
        key: impl Fn(u32) -> [u8; 4] + Copy,
    ) -> Result<(), Failure> {
        let n = self.args.records;
        let permuted = move |j: u32, offset: u64| ((u64::from(j) + offset) % u64::from(n)) as u32;
        let mut values = Values::new(self.args.value_size);
        let mut found = vec![0; self.args.value_size];

        self.phase("Adding", Kind::Writes, n, |db: &mut T| {
            count(0..n, |i| db.insert(&key(i), values.of(i)))
        })?;
        self.phase("Finding", Kind::Reads, n, |db: &mut T| {
            count(0..n, |i| {
                let length = db.get_into(&key(i), &mut found)?;
                Ok(length == Some(found.len()) && values.is(i, &found))
            })
        })?;
        self.phase("Missing", Kind::Reads, n, |db: &mut T| {
            // 2N and up: what Churning adds ends below.
            count(2 * n..3 * n, |i| Ok(db.get_into(&key(i), &mut found)?.is_none()))
        })?;
        self.phase("Traversing", Kind::Reads, n, |db: &mut T| {
            let mut bytes = 0;
            let visited = db.for_each(|key, value| {
                bytes += key.len() + value.len();
                ControlFlow::Continue(())
            })?;
            let whole = bytes as u64 == u64::from(n) * (4 + values.size as u64);
            Ok(if whole { visited } else { 0 })
        })?;
        self.phase("Deleting", Kind::Writes, n, |db: &mut T| {
            count(0..n, |j| db.delete(&key(permuted(j, DELETING_OFFSET))))
        })?;
        self.phase("Re-adding", Kind::Writes, n, |db: &mut T| {
            count(0..n, |i| db.insert(&key(i), values.of(i)))
        })?;
        let doubled_bytes = 2 * self.args.value_size as u64;
        self.phase("Appending", Kind::Writes, n, |db: &mut T| {
            count(0..n, |i| Ok(db.append(&key(i), values.of(i))? == doubled_bytes))
        })?;
        self.phase("Churning", Kind::Writes, n, |db: &mut T| {
            count(0..n, |j| {
                let i = permuted(j, CHURNING_OFFSET);
                Ok(db.delete(&key(i))? && db.insert(&key(i + n), values.of(i))?)
            })
        })?;
        self.expect("the end", self.db.len()?)
    }

    /// Times a phase, which returns how many of its operations answered as they should.
    fn phase<T: Target<'a>>(
        &mut self,
        name: &'static str,
        kind: Kind,
        operations: u32,
        run: impl FnOnce(&mut T) -> ntdb::Result<u64>,
    ) -> Result<(), Failure> {
        let is_synced = kind == Kind::Writes && !self.args.no_sync && self.path.is_some();
        let started = Instant::now();
        let mut target = T::begin(self.db)?;
        let right = run(&mut target)?;
        target.end(self.durable)?;
        let mut took = started.elapsed();
        if is_synced {
            self.db.sync()?;
            if T::IS_SYNC_TIMED {
                took = started.elapsed();
            }
        }
        self.expect(name, right)?;
        let file_bytes = self.file_bytes()?;
        let ns_per_operation = took.as_nanos() as f64 / f64::from(operations);
        if !self.args.json {
            self.out.line(format_args!(
                "{name} {operations} records:  {ns_per_operation:.0} ns ({file_bytes} bytes)"
            ))?;
            // A line as soon as it is known: the next phase may take minutes.
            self.out.flush()?;
        }
        self.phases.push(Phase { name, operations, ns_per_operation, file_bytes });
        Ok(())
    }

    fn expect(&self, name: &str, right: u64) -> Result<(), Failure> {
        let expected = u64::from(self.args.records);
        if right == expected {
            return Ok(());
        }
        let file =
            self.path.map_or("the database in memory".into(), |path| path.display().to_string());
        Err(Failure::Wrong(format!(
            "{file}: {name}: {right} right answers instead of {expected}; run `ntdb check` if \
             the file is still there, and report this"
        )))
    }

    fn file_bytes(&self) -> Result<u64, Failure> {
        let Some(path) = self.path else { return Ok(self.db.stat()?.file_bytes) };
        let metadata = fs::metadata(path).map_err(|source| Failure::File {
            name: path.display().to_string(),
            action: "measure",
            source,
        })?;
        Ok(metadata.len())
    }
}

/// Counts for how many indices `answer` is right.
fn count(
    indices: std::ops::Range<u32>,
    mut answer: impl FnMut(u32) -> ntdb::Result<bool>,
) -> ntdb::Result<u64> {
    let mut right = 0;
    for index in indices {
        right += u64::from(answer(index)?);
    }
    Ok(right)
}

/// A one-to-one map of the 32-bit numbers that leaves no order: multiplications by odd numbers and
/// shifted xors, each of which can be undone.
fn scramble(index: u32) -> u32 {
    let mut x = index ^ 0x5bd1_e995;
    x ^= x >> 16;
    x = x.wrapping_mul(0x85eb_ca6b);
    x ^= x >> 13;
    x = x.wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

/// Values of one length that tell which index they belong to: its bytes at the beginning.
struct Values {
    bytes: Vec<u8>,
    size: usize,
}

impl Values {
    fn new(size: usize) -> Values {
        Values { bytes: vec![b'.'; size.max(4)], size }
    }

    fn of(&mut self, index: u32) -> &[u8] {
        self.bytes[..4].copy_from_slice(&index.to_le_bytes());
        &self.bytes[..self.size]
    }

    /// Whether `value` is the one of `index`.
    #[inline]
    fn is(&self, index: u32, value: &[u8]) -> bool {
        match value.split_first_chunk::<4>() {
            Some((first, rest)) => {
                u32::from_le_bytes(*first) == index
                    && (rest.is_empty() || *rest == self.bytes[4..self.size])
            }
            None => *value == index.to_le_bytes()[..self.size],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Undoes [`scramble`], which proves that it is one to one.
    fn unscramble(scrambled: u32) -> u32 {
        let inverse = |odd: u32| {
            // Newton's iteration doubles the number of right bits: 3, 6, 12, 24, 48.
            let mut x = odd;
            for _ in 0..4 {
                x = x.wrapping_mul(2u32.wrapping_sub(odd.wrapping_mul(x)));
            }
            x
        };
        let mut x = scrambled;
        x ^= x >> 16;
        x = x.wrapping_mul(inverse(0xc2b2_ae35));
        x ^= (x >> 13) ^ (x >> 26);
        x = x.wrapping_mul(inverse(0x85eb_ca6b));
        x ^= x >> 16;
        x ^ 0x5bd1_e995
    }

    proptest! {
        #[test]
        fn scrambling_can_be_undone(index: u32) {
            prop_assert_eq!(unscramble(scramble(index)), index);
        }
    }

    #[test]
    fn scrambled_neighbours_are_far_apart() {
        let close = (0..1000).filter(|&i| scramble(i).abs_diff(scramble(i + 1)) < 1 << 16).count();
        assert!(close < 10, "{close}");
    }

    #[test]
    fn values_have_their_length_and_tell_their_index() {
        let mut values = Values::new(6);
        assert_eq!(values.of(0x0403_0201), b"\x01\x02\x03\x04..");
        assert_eq!(Values::new(0).of(7), b"");
        assert_eq!(Values::new(2).of(0x0201), b"\x01\x02");
    }
}
