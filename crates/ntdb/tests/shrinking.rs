//! Databases that lose most of their records: buckets, directories and the array shrink, and nobody notices but the file's size.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ntdb::{Cursor, Db, Options};
use proptest::prelude::*;

/// All records, each seen once by both kinds of iteration.
fn contents(db: &Db) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut found = BTreeMap::new();
    for record in db.iter() {
        let (key, value) = record.unwrap();
        assert!(found.insert(key, value).is_none(), "seen twice");
    }
    let mut visited = BTreeMap::new();
    db.for_each(|key, value| {
        assert!(visited.insert(key.to_vec(), value.to_vec()).is_none(), "visited twice");
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(found, visited);
    found
}

fn demand_clean(db: &Db) -> u64 {
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    report.pages
}

#[derive(Clone, Debug)]
enum Phase {
    /// Store keys from and so many, with values of this length.
    Grow(u16, u16, usize),
    /// Delete the keys of which the number, times the first, modulo 1000 is below the second.
    Delete(u16, u16),
    Clear,
    Checkpoint,
    Reopen,
}

fn phase() -> impl Strategy<Value = Phase> {
    let len = prop_oneof![4 => 0usize..200, 4 => 600usize..990, 1 => 1_000usize..6_000];
    prop_oneof![
        6 => (0u16..3_000, 1u16..1_500, len).prop_map(|(from, n, len)| Phase::Grow(from, n, len)),
        6 => (any::<u16>(), prop_oneof![1u16..1_000, 800u16..1_001]).prop_map(|(f, m)| Phase::Delete(f, m)),
        1 => Just(Phase::Clear),
        2 => Just(Phase::Checkpoint),
        1 => Just(Phase::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_database_that_shrinks_behaves_like_a_map(
        phases in prop::collection::vec(phase(), 1..14),
        mask in prop_oneof![4 => Just(u64::MAX), 1 => Just(0xff << 56), 1 => Just(0)],
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.ntdb");
        let mut options = Options::new();
        options.create(true).hash_mask(mask).checkpoint_log_bytes(1 << 20);
        let mut db = options.open(&path).unwrap();
        let mut model = BTreeMap::new();
        // Equal hashes make chains, which cost their length at each operation.
        let scale = if mask == 0 { 10 } else { 1 };
        for phase in phases {
            match phase {
                Phase::Grow(from, n, len) => for n in from..from + n / scale {
                    let value = vec![n as u8; len];
                    db.put(&n.to_le_bytes(), &value).unwrap();
                    model.insert(n.to_le_bytes().to_vec(), value);
                },
                Phase::Delete(factor, most) => {
                    let keys: Vec<Vec<u8>> = model.keys().cloned().collect();
                    for key in keys {
                        let n = u16::from_le_bytes(key[..].try_into().unwrap());
                        if n as u64 * (factor as u64 | 1) % 1000 < most as u64 {
                            assert!(db.delete(&key).unwrap());
                            model.remove(&key);
                        }
                    }
                }
                Phase::Clear => {
                    db.clear().unwrap();
                    model.clear();
                }
                Phase::Checkpoint => db.checkpoint().unwrap(),
                Phase::Reopen => {
                    db.close().unwrap();
                    db = options.open(&path).unwrap();
                }
            }
            demand_clean(&db);
            prop_assert_eq!(db.len().unwrap(), model.len() as u64);
            prop_assert!(contents(&db) == model);
        }
        for key in model.keys() {
            assert!(db.delete(key).unwrap());
        }
        let pages = demand_clean(&db);
        prop_assert!(pages <= 6, "{} pages without a record", pages);
        prop_assert!(contents(&db).is_empty());
    }
}

/// What mass deletion leaves takes the space that its records need, and a growing load does not fill it up for long.
#[test]
fn mass_deletion_gives_pages_back() {
    for (records, len) in [(200_000u32, 4usize), (20_000, 100), (10_000, 900)] {
        let db = Db::in_memory().unwrap();
        let key = |n: u32| n.wrapping_mul(0x9e37_79b1).to_le_bytes();
        for n in 0..records {
            db.put(&key(n), &vec![1; len]).unwrap();
        }
        let full = demand_clean(&db);
        for n in 0..records * 9 / 10 {
            assert!(db.delete(&key(n)).unwrap());
        }
        let few = demand_clean(&db);
        println!("{records} records of {len} bytes: {full} pages, {few} for a tenth of them");
        assert!(few * 100 <= full * 45, "{few} pages of {full} for a tenth of the records");
        for n in records * 9 / 10..records {
            assert_eq!(db.get(&key(n)).unwrap().unwrap(), vec![1; len]);
        }
        for n in records * 9 / 10..records {
            assert!(db.delete(&key(n)).unwrap());
        }
        let none = demand_clean(&db);
        assert!(none <= 6, "{none} pages without a record");
        for n in 0..records {
            db.put(&key(n), &vec![1; len]).unwrap();
        }
        let again = demand_clean(&db);
        assert!(again * 10 <= full * 11, "{again} pages, at first {full}");
    }
}

/// Buckets that stand just at the bound are not joined and split in turn.
#[test]
fn a_load_that_goes_up_and_down_a_little_does_not_thrash() {
    let db = Db::in_memory().unwrap();
    let records = 30_000u32;
    for n in 0..records {
        db.put(&n.to_le_bytes(), &[1; 60]).unwrap();
    }
    for share in [90, 60, 40, 30, 20, 10] {
        let kept = records * share / 100;
        for n in kept..records {
            db.delete(&n.to_le_bytes()).unwrap();
        }
        let splits = db.stat().unwrap().splits;
        // A tenth of what there is comes and goes.
        for round in 0..20u32 {
            for n in 0..kept / 10 {
                let key = (records + n).to_le_bytes();
                if round % 2 == 0 {
                    db.put(&key, &[2; 60]).unwrap();
                } else {
                    assert!(db.delete(&key).unwrap());
                }
            }
        }
        let splits = db.stat().unwrap().splits - splits;
        let operations = 20 * (kept / 10) as u64;
        println!("{share} percent: {splits} splits in {operations} operations");
        assert!(splits * 100 <= operations, "{splits} splits in {operations} operations");
        for n in kept..records {
            db.put(&n.to_le_bytes(), &[1; 60]).unwrap();
        }
    }
}

/// Records that are there throughout are seen once each, while others come and go in masses.
#[test]
fn iterations_beside_joins_see_each_record_once() {
    let db = Db::in_memory().unwrap();
    let permanent = |n: u32| [b"permanent".as_slice(), &n.to_le_bytes()].concat();
    for n in 0..500 {
        db.put(&permanent(n), &[7; 50]).unwrap();
    }
    let stop = AtomicBool::new(false);
    let rounds = std::sync::atomic::AtomicU32::new(0);
    /// Ends the other thread, also when a check has failed.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                for n in 0..4_000u32 {
                    db.put(&n.to_le_bytes(), &[1; 300]).unwrap();
                }
                for n in 0..4_000u32 {
                    db.delete(&n.to_le_bytes()).unwrap();
                }
                rounds.fetch_add(1, Relaxed);
            }
        });
        let once = |keys: Vec<Vec<u8>>| {
            let keys: Vec<_> = keys.into_iter().filter(|key| key.len() > 4).collect();
            let distinct: BTreeSet<_> = keys.iter().collect();
            assert_eq!((keys.len(), distinct.len()), (500, 500), "each permanent record once");
        };
        let start = Instant::now();
        let mut iterations = 0;
        while start.elapsed() < Duration::from_secs(4) {
            let mut keys = Vec::new();
            db.for_each_live(|key, _| {
                keys.push(key.to_vec());
                // So that much happens between two buckets.
                if keys.len() % 8 == 0 {
                    std::thread::sleep(Duration::from_micros(100));
                }
                ControlFlow::Continue(())
            })
            .unwrap();
            once(keys);
            // Now from positions that are saved again and again.
            let mut keys = Vec::new();
            let mut saved = Cursor::default().to_bytes();
            loop {
                let mut iter = db.iter_live_from(&Cursor::from_bytes(&saved).unwrap());
                let before = keys.len();
                keys.extend(iter.by_ref().take(40).map(|record| record.unwrap().0));
                saved = iter.cursor().to_bytes();
                if keys.len() == before {
                    break;
                }
            }
            once(keys);
            iterations += 1;
        }
        assert!(iterations > 3, "{iterations} iterations");
    });
    assert!(rounds.load(Relaxed) > 3);
    assert!(db.check().unwrap().is_clean());
}

/// Lengths of values in records of all kinds, and around those that are the longest of their kind.
fn any_len() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..40, 100usize..1_050, 980usize..1_010, 1_000usize..9_000]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]
    /// Whatever mixture of lengths a chain of equal hashes has, there is room for the next.
    #[test]
    fn a_chain_of_equal_hashes_takes_any_length(
        runs in prop::collection::vec((0u16..400, 1u16..200, any_len(), any::<bool>()), 1..12),
    ) {
        let mut options = Options::new();
        let db = options.create(true).hash_mask(0).open_in_memory().unwrap();
        let mut model = BTreeMap::new();
        for (from, n, len, deletes) in runs {
            let mut transaction = (n % 2 == 0).then(|| db.begin().unwrap());
            for n in from..from + n {
                let key = n.to_le_bytes();
                if deletes && n % 3 == 0 {
                    let deleted = match &mut transaction {
                        Some(transaction) => transaction.delete(&key),
                        None => db.delete(&key),
                    };
                    prop_assert_eq!(deleted.unwrap(), model.remove(&key[..]).is_some());
                } else {
                    let value = vec![n as u8; len];
                    match &mut transaction {
                        Some(transaction) => transaction.put(&key, &value).unwrap(),
                        None => db.put(&key, &value).unwrap(),
                    }
                    model.insert(key.to_vec(), value);
                }
            }
            if let Some(transaction) = transaction {
                transaction.commit_relaxed().unwrap();
            }
        }
        demand_clean(&db);
        prop_assert!(contents(&db) == model);
    }
}

/// Keys of one hash whose values become longer: any page of the chain must come to have room for the next version, however many short
/// records there are.
#[test]
fn values_grow_in_a_chain_of_equal_hashes() {
    for page_size in [4096, 16384] {
        let open = || {
            let mut options = Options::new();
            options.create(true).hash_mask(0).page_size(page_size).open_in_memory().unwrap()
        };
        let longest = page_size as usize / 4 - 32;
        let db = open();
        for phases in [
            &[(0u16, 52, 0usize), (52, 113, 735), (417, 73, 39), (165, 84, 941)][..],
            // Long values lie elsewhere, so that their records are short; then there are pages with few slots and much room.
            &[(0, 13, 676), (5, 61, 1_004), (27, 41, 14)],
            &[(0, 13, 676), (5, 61, 5_000), (27, 600, 14), (0, 900, 1_000), (100, 900, 0)],
        ] {
            for &(from, n, len) in phases {
                for n in from..from + n {
                    db.put(&n.to_le_bytes(), &vec![n as u8; len]).unwrap();
                }
            }
            demand_clean(&db);
            db.clear().unwrap();
        }
        for others in [300u16, 1_000, 3_000] {
            let db = open();
            let mut model = BTreeMap::new();
            let mut put = |n: u16, value: Vec<u8>| {
                db.put(&n.to_le_bytes(), &value).unwrap();
                model.insert(n.to_le_bytes().to_vec(), value);
            };
            (0..others).for_each(|n| put(n, vec![]));
            for len in (0..longest).step_by(longest / 8) {
                for n in (0..others).step_by(others as usize / 10) {
                    put(n, vec![n as u8; len]);
                }
            }
            demand_clean(&db);
            assert!(contents(&db) == model);
        }
    }
}
