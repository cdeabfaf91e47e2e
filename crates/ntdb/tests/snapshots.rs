//! Snapshots: one moment, for as long as it is held, and nothing of it once it is not.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use ntdb::{Db, Error, Options, Snapshot};
use proptest::prelude::*;

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

/// Everything that a snapshot can tell must be the records of `model`.
fn demand(snapshot: &Snapshot, model: &Records) {
    assert_eq!(snapshot.len(), model.len() as u64);
    assert_eq!(snapshot.is_empty(), model.is_empty());
    let mut visited = Records::new();
    let count = snapshot.for_each(|key, value| {
        assert!(visited.insert(key.to_vec(), value.to_vec()).is_none(), "visited twice");
        ControlFlow::Continue(())
    });
    assert_eq!(count.unwrap(), model.len() as u64);
    assert!(visited == *model, "for_each differs");
    let mut seen = Records::new();
    for record in snapshot.iter() {
        let (key, value) = record.unwrap();
        assert!(seen.insert(key, value).is_none(), "seen twice");
    }
    assert!(seen == *model, "iter differs");
    for (key, value) in model.iter().step_by(3) {
        assert_eq!(snapshot.get(key).unwrap().as_ref(), Some(value));
        let mut buffer = [0; 7];
        assert_eq!(snapshot.get_into(key, &mut buffer).unwrap(), Some(value.len()));
        let most = value.len().min(7);
        assert_eq!(buffer[..most], value[..most]);
    }
    assert_eq!(snapshot.get(b"never there").unwrap(), None);
    assert!(!snapshot.contains(b"never there").unwrap());
}

fn demand_clean(db: &Db) {
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
}

#[derive(Clone, Debug)]
enum Action {
    /// Store keys from and so many, with values of this length.
    Put(u16, u16, usize),
    /// Delete the keys whose number, times the first, modulo 1000 is below the second.
    Delete(u16, u16),
    /// Append so many bytes to keys from and so many.
    Append(u16, u16, usize),
    /// The same as `Put`, in a transaction; committed or not. A snapshot is opened in the middle of it.
    Transaction(u16, u16, usize, bool),
    Clear,
    Checkpoint,
    Compact,
    Check,
    Open,
    /// Release the snapshot of this number, modulo how many there are.
    Release(usize),
    /// Compare the snapshot of this number, modulo how many there are.
    Compare(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let len = || prop_oneof![4 => 0usize..200, 3 => 600usize..990, 1 => 1_000usize..6_000].boxed();
    prop_oneof![
        6 => (0u16..2_000, 1u16..700, len()).prop_map(|(f, n, l)| Action::Put(f, n, l)),
        4 => (any::<u16>(), prop_oneof![1u16..1_000, 800u16..1_001])
            .prop_map(|(f, m)| Action::Delete(f, m)),
        3 => (0u16..2_000, 1u16..100, 1usize..3_000).prop_map(|(f, n, l)| Action::Append(f, n, l)),
        3 => (0u16..2_000, 1u16..300, len(), any::<bool>())
            .prop_map(|(f, n, l, c)| Action::Transaction(f, n, l, c)),
        1 => Just(Action::Clear),
        3 => Just(Action::Checkpoint),
        2 => Just(Action::Compact),
        3 => Just(Action::Check),
        7 => Just(Action::Open),
        3 => any::<usize>().prop_map(Action::Release),
        2 => any::<usize>().prop_map(Action::Compare),
    ]
}

struct Run {
    db: Db,
    model: Records,
    held: Vec<(Snapshot, Records)>,
}

impl Run {
    fn open_snapshot(&mut self) {
        let snapshot = self.db.snapshot().unwrap();
        self.held.push((snapshot, self.model.clone()));
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Put(from, n, len) => {
                for n in from..from + n {
                    let value = vec![(n ^ len as u16) as u8; len];
                    self.db.put(&n.to_le_bytes(), &value).unwrap();
                    self.model.insert(n.to_le_bytes().to_vec(), value);
                }
            }
            Action::Delete(factor, most) => {
                let keys: Vec<Vec<u8>> = self.model.keys().cloned().collect();
                for key in keys {
                    let n = u16::from_le_bytes(key[..].try_into().unwrap());
                    if n as u64 * (factor as u64 | 1) % 1000 < most as u64 {
                        assert!(self.db.delete(&key).unwrap());
                        self.model.remove(&key);
                    }
                }
            }
            Action::Append(from, n, len) => {
                for n in from..from + n {
                    let bytes = vec![n as u8; len];
                    self.db.append(&n.to_le_bytes(), &bytes).unwrap();
                    self.model.entry(n.to_le_bytes().to_vec()).or_default().extend(bytes);
                }
            }
            Action::Transaction(from, n, len, commits) => {
                let db = self.db.clone();
                let mut after = self.model.clone();
                let mut tx = db.begin().unwrap();
                for (step, n) in (from..from + n).enumerate() {
                    if step == 100 {
                        self.open_snapshot();
                    }
                    if step == 150 {
                        let db = db.clone();
                        std::thread::spawn(move || db.checkpoint().unwrap()).join().unwrap();
                    }
                    let value = vec![n as u8 ^ 0x55; len];
                    tx.put(&n.to_le_bytes(), &value).unwrap();
                    after.insert(n.to_le_bytes().to_vec(), value);
                }
                if commits {
                    tx.commit_relaxed().unwrap();
                    self.model = after;
                } else {
                    tx.abort().unwrap();
                }
            }
            Action::Clear => {
                self.db.clear().unwrap();
                self.model.clear();
            }
            Action::Checkpoint => self.db.checkpoint().unwrap(),
            Action::Compact => self.db.compact().unwrap(),
            Action::Check => demand_clean(&self.db),
            Action::Open => self.open_snapshot(),
            Action::Release(n) if !self.held.is_empty() => {
                self.held.swap_remove(n % self.held.len());
            }
            Action::Compare(n) if !self.held.is_empty() => {
                let (snapshot, model) = &self.held[n % self.held.len()];
                demand(snapshot, model);
            }
            Action::Release(_) | Action::Compare(_) => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn each_snapshot_stays_what_the_model_was(
        actions in prop::collection::vec(action(), 1..30),
        mask in prop_oneof![4 => Just(u64::MAX), 1 => Just(0xff << 56)],
        in_memory in prop::bool::weighted(0.3),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.ntdb");
        let mut options = Options::new();
        options.create(true).hash_mask(mask).checkpoint_log_bytes(1 << 20);
        let open = || {
            if in_memory { options.open_in_memory() } else { options.open(&path) }
        };
        let mut run = Run { db: open().unwrap(), model: Records::new(), held: Vec::new() };
        for action in actions {
            run.act(action);
        }
        demand_clean(&run.db);
        for (snapshot, model) in &run.held {
            demand(snapshot, model);
        }
        run.held.clear();
        prop_assert_eq!(run.db.stat().unwrap().snapshots, 0);
        demand(&run.db.snapshot().unwrap(), &run.model);
        if !in_memory {
            let Run { db, model, .. } = run;
            db.close().unwrap();
            let db = options.open(&path).unwrap();
            demand_clean(&db);
            demand(&db.snapshot().unwrap(), &model);
        }
    }
}

/// A checkpoint that runs while a transaction is open leaves out the pages that the transaction has made; the next one seals
/// them, whatever their epoch.
#[test]
fn what_a_transaction_made_before_a_checkpoint_is_whole_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Db::create(&path).unwrap();
    for n in 0..20_000u32 {
        db.put(&n.to_le_bytes(), &[1; 100]).unwrap();
    }
    db.checkpoint().unwrap();
    let mut tx = db.begin().unwrap();
    for n in 0..20_000u32 {
        tx.put(&n.to_le_bytes(), &[2; 100]).unwrap();
    }
    let other = db.clone();
    std::thread::spawn(move || other.checkpoint().unwrap()).join().unwrap();
    tx.commit_relaxed().unwrap();
    demand_clean(&db);
    db.checkpoint().unwrap();
    demand_clean(&db);
    db.close().unwrap();
    let db = Db::open(&path).unwrap();
    demand_clean(&db);
    for n in 0..20_000u32 {
        assert_eq!(db.get(&n.to_le_bytes()).unwrap().unwrap(), [2; 100]);
    }
}

/// Growth by what changes under a snapshot, reported; afterwards the space is used again.
#[test]
fn a_snapshot_held_through_many_commits_costs_one_copy_and_gives_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new();
    options.create(true).checkpoint_log_bytes(1 << 20);
    let db = options.open(dir.path().join("a.ntdb")).unwrap();
    let mut model = Records::new();
    for n in 0..5_000u32 {
        db.put(&n.to_le_bytes(), &[1; 100]).unwrap();
        model.insert(n.to_le_bytes().to_vec(), vec![1; 100]);
    }
    db.checkpoint().unwrap();
    let tree = db.check().unwrap().pages * 4096;
    let snapshot = db.snapshot().unwrap();
    let commit = |n: u32| db.put(&(n % 5_000).to_le_bytes(), &n.to_le_bytes().repeat(25)).unwrap();
    (0..100_000).for_each(commit);
    // However slow the disk is, what only the snapshot holds is told apart then.
    db.checkpoint().unwrap();
    let stat = db.stat().unwrap();
    println!("a tree of {tree} bytes: file of {} bytes, {}", stat.file_bytes, stat.snapshot_bytes);
    demand(&snapshot, &model);
    assert_eq!(stat.snapshots, 1);
    let oldest = stat.oldest_snapshot.unwrap();
    assert_eq!(oldest.pid, std::process::id());
    assert_eq!(oldest.changes_since_bytes, stat.change_counter - snapshot.change_counter());
    assert!(oldest.changes_since_bytes > 100_000 * 100, "{oldest:?}");
    // Nearly every page of the snapshot has been replaced, once.
    assert!(stat.snapshot_bytes <= tree && stat.snapshot_bytes * 10 >= tree * 8, "{stat:?}");
    // At any time there are the snapshot's pages, the present ones, and those replaced while a
    // checkpoint was on its way and since: how many of the latter is the disk's affair, but a copy
    // of each page in each of the two at most, however many commits follow.
    assert!(stat.file_bytes <= 6 * tree, "{stat:?}");
    for round in 0..10 {
        (0..50_000).for_each(commit);
        let stat = db.stat().unwrap();
        assert!(stat.file_bytes <= 6 * tree, "round {round}: {stat:?}");
    }
    let later = db.stat().unwrap();
    drop(snapshot);
    db.checkpoint().unwrap();
    let released = db.stat().unwrap();
    assert_eq!((released.snapshots, released.snapshot_bytes), (0, 0));
    assert_eq!(released.oldest_snapshot, None);
    assert!(released.free_bytes >= later.free_bytes + tree * 8 / 10, "{released:?} {later:?}");
    demand_clean(&db);
}

#[test]
fn thousands_are_held_at_once_and_then_too_many() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Db::create(&path).unwrap();
    let mut held = Vec::new();
    for n in 0..5_000u32 {
        db.put(&(n % 100).to_le_bytes(), &n.to_le_bytes()).unwrap();
        held.push(db.snapshot().unwrap());
    }
    assert_eq!(db.stat().unwrap().snapshots, 5_000);
    for (n, snapshot) in held.iter().enumerate() {
        let found = snapshot.get(&(n as u32 % 100).to_le_bytes()).unwrap().unwrap();
        assert_eq!(found, (n as u32).to_le_bytes());
        assert_eq!(snapshot.len(), (n as u64 + 1).min(100));
    }
    // Writing is not slower by that than a page at a time has to be.
    let start = Instant::now();
    for n in 0..20_000u32 {
        db.put(&(n % 100).to_le_bytes(), &n.to_le_bytes()).unwrap();
    }
    let took = start.elapsed();
    assert!(took < Duration::from_secs(2), "20,000 puts beside 5,000 snapshots took {took:?}");
    let error = loop {
        db.put(b"key", &(held.len() as u32).to_le_bytes()).unwrap();
        match db.snapshot() {
            Ok(snapshot) => held.push(snapshot),
            Err(error) => break error,
        }
    };
    assert_eq!(held.len(), 16_384);
    assert!(matches!(error, Error::TooMany { what: "snapshots", limit: 16_384, .. }), "{error}");
    assert!(matches!(db.iter().next(), Some(Err(Error::TooMany { .. }))));
    // Every other one goes; there is room again, and the others stay what they were.
    let mut n = 0;
    held.retain(|_| {
        n += 1;
        n % 2 == 0
    });
    held.push(db.snapshot().unwrap());
    for (n, snapshot) in held.iter().enumerate().take(2_500) {
        let n = 2 * n as u32 + 1;
        assert_eq!(snapshot.get(&(n % 100).to_le_bytes()).unwrap().unwrap(), n.to_le_bytes());
    }
    held.clear();
    assert_eq!(db.stat().unwrap().snapshots, 0);
    db.checkpoint().unwrap();
    demand_clean(&db);
    db.close().unwrap();
    let rest = std::fs::metadata(&path).unwrap().len();
    assert!(rest < 200_000, "{rest} bytes at rest");
}

/// Snapshots between which nothing changes are one: no page is copied for the second.
#[test]
fn snapshots_of_the_same_state_share_its_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::create(dir.path().join("a.ntdb")).unwrap();
    db.put(b"key", b"value").unwrap();
    let first = db.snapshot().unwrap();
    let epoch = db.stat().unwrap().epoch;
    let others: Vec<Snapshot> = (0..100).map(|_| db.snapshot().unwrap()).collect();
    assert_eq!(db.stat().unwrap().epoch, epoch);
    drop((first, others));
    // Of a checkpoint.
    db.checkpoint().unwrap();
    let epoch = db.stat().unwrap().epoch;
    let snapshot = db.snapshot().unwrap();
    assert_eq!(db.stat().unwrap().epoch, epoch);
    db.put(b"key", b"new").unwrap();
    let later = db.snapshot().unwrap();
    assert_eq!(db.stat().unwrap().epoch, epoch + 1);
    db.checkpoint().unwrap();
    db.clear().unwrap();
    assert_eq!(snapshot.get(b"key").unwrap().unwrap(), b"value");
    assert_eq!(later.get(b"key").unwrap().unwrap(), b"new");
}

#[test]
fn a_state_whose_tree_has_changed_is_not_shared() {
    // In memory nothing but a snapshot freezes; what compaction joins is not logged.
    let db = Options::new().open_in_memory().unwrap();
    for n in 0..20_000u32 {
        db.put(&n.to_le_bytes(), b"value").unwrap();
    }
    for n in (0..20_000u32).filter(|n| n % 10 != 0) {
        db.delete(&n.to_le_bytes()).unwrap();
    }
    let before = db.snapshot().unwrap();
    db.compact().unwrap();
    demand_clean(&db);
    let after = db.snapshot().unwrap();
    demand_clean(&db);
    drop(before);
    demand_clean(&db);
    assert_eq!(after.len(), 2_000);
    drop(after);
    demand_clean(&db);
}

#[test]
fn an_open_transaction_is_not_waited_for_and_not_seen() {
    let db = Db::in_memory().unwrap().with_lock_timeout(Some(Duration::ZERO));
    db.put(b"key", b"before").unwrap();
    let mut tx = db.begin().unwrap();
    tx.put(b"key", b"within").unwrap();
    tx.put(b"other", b"within").unwrap();
    let beside = db.snapshot().unwrap();
    tx.put(b"key", b"at last").unwrap();
    tx.commit().unwrap();
    assert_eq!(beside.get(b"key").unwrap().unwrap(), b"before");
    assert_eq!(beside.len(), 1);
    let after = db.snapshot().unwrap();
    assert_eq!(after.get(b"key").unwrap().unwrap(), b"at last");
    assert_eq!(after.len(), 2);
}

/// The database stays open for a snapshot that outlives its handle, and is put to rest when that goes.
#[test]
fn a_snapshot_outlives_the_handle() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Db::create(&path).unwrap();
    db.put(b"key", b"value").unwrap();
    let snapshot = db.snapshot().unwrap();
    let mut iter = db.iter();
    db.close().unwrap();
    let again = Db::open(&path).unwrap();
    again.put(b"key", b"new").unwrap();
    again.close().unwrap();
    assert_eq!(snapshot.get(b"key").unwrap().unwrap(), b"value");
    assert_eq!(iter.next().unwrap().unwrap().1, b"value");
    let files = |path: &Path| std::fs::read_dir(path).unwrap().count();
    drop(snapshot);
    assert!(files(dir.path()) > 1);
    drop(iter);
    assert_eq!(files(dir.path()), 1);
    let db = Options::new().read_only(true).open(&path).unwrap();
    let snapshot = db.snapshot().unwrap();
    assert_eq!(snapshot.get(b"key").unwrap().unwrap(), b"new");
}

/// Threads that open, read and drop snapshots beside writers who keep a sum.
#[test]
fn threads_find_the_same_sum_in_every_snapshot() {
    const ACCOUNTS: u32 = 200;
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new();
    options.create(true).checkpoint_log_bytes(1 << 20);
    let db = options.open(dir.path().join("a.ntdb")).unwrap();
    for n in 0..ACCOUNTS {
        db.put(&n.to_le_bytes(), &1_000i64.to_le_bytes()).unwrap();
    }
    let stop = AtomicBool::new(false);
    let looked = AtomicU64::new(0);
    let moved = AtomicU64::new(0);
    let total = |snapshot: &Snapshot| {
        let mut total = 0;
        snapshot
            .for_each(|_, value| {
                total += i64::from_le_bytes(value.try_into().unwrap());
                ControlFlow::Continue(())
            })
            .unwrap();
        total
    };
    std::thread::scope(|scope| {
        for t in 0..2u32 {
            let (db, stop, moved) = (&db, &stop, &moved);
            scope.spawn(move || {
                let mut n = t;
                while !stop.load(Relaxed) {
                    n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let (from, to) = ((n >> 8) % ACCOUNTS, (n >> 20) % ACCOUNTS);
                    db.transaction(|tx| {
                        for (account, change) in [(from, -1), (to, 1)] {
                            let key = account.to_le_bytes();
                            let sum =
                                tx.view(&key, |v| i64::from_le_bytes(v.try_into().unwrap()))?;
                            tx.put(&key, &(sum.unwrap() + change).to_le_bytes())?;
                        }
                        Ok::<_, Error>(())
                    })
                    .unwrap();
                    moved.fetch_add(1, Relaxed);
                }
            });
        }
        let readers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut held: Vec<Snapshot> = Vec::new();
                    while !stop.load(Relaxed) {
                        held.push(db.snapshot().unwrap());
                        if held.len() > 20 {
                            held.swap_remove(7);
                        }
                        for snapshot in [&held[0], &held[held.len() - 1]] {
                            assert_eq!(total(snapshot), 1_000 * i64::from(ACCOUNTS));
                        }
                        looked.fetch_add(1, Relaxed);
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_secs(3));
        let done = readers.iter().all(|reader| !reader.is_finished());
        stop.store(true, Relaxed);
        assert!(done, "a reader has failed");
    });
    let (looked, moved) = (looked.into_inner(), moved.into_inner());
    println!("{moved} transfers, {looked} looks");
    assert!(moved > 20 && looked > 100);
    demand_clean(&db);
}
