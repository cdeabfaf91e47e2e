//! The reserve: inserts leave it, updates use it; what it is for, and that nothing goes wrong at any size of it.

use std::collections::BTreeMap;

use ntdb::{Db, Error, Options, UpdateStat};
use proptest::prelude::*;

const PERCENTS: [u8; 6] = [0, 10, 20, 50, 75, 90];

fn with_reserve(percent: u8) -> Db {
    Options::new().reserve_percent(percent).open_in_memory().unwrap()
}

fn demand_clean(db: &Db) {
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// Bytes of the file that are in use.
fn used(db: &Db) -> u64 {
    let stat = db.stat().unwrap();
    stat.file_bytes - stat.free_bytes - stat.retired_bytes
}

#[test]
fn inserts_leave_it() {
    let mut sizes = Vec::new();
    for percent in PERCENTS {
        let db = with_reserve(percent);
        for n in 0..20_000u32 {
            assert!(db.insert(&n.to_le_bytes(), &[7; 60]).unwrap());
        }
        demand_clean(&db);
        let fill = db.fill().unwrap();
        // Buckets are split at the limit, so none is fuller (the slots, a twentieth of a record here, are no part of the reserve); spread
        // over their sizes they are 72 % of it.
        let limit = 100.0 - f64::from(percent);
        let allowed = ((limit * 1.05) / 10.0).ceil() as usize;
        let fuller: u64 = fill.pages[allowed.min(10)..].iter().sum();
        assert_eq!(fuller, 0, "{percent} %: {fill:?}");
        assert!(!fill.is_sample);
        let share = fill.live_percent / limit;
        assert!((0.5..0.9).contains(&share), "{percent} %: {fill:?}");
        assert!(fill.free_percent >= f64::from(percent), "{percent} %: {fill:?}");
        sizes.push(used(&db));
    }
    assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]), "{sizes:?}");
}

/// Each record grows once, by what the reserve is for.
fn grow(percent: u8) -> (UpdateStat, u64) {
    let db = with_reserve(percent);
    for n in 0..20_000u32 {
        db.put(&n.to_le_bytes(), &[7; 60]).unwrap();
    }
    let splits = db.stat().unwrap().splits;
    for n in 0..20_000u32 {
        db.append(&n.to_le_bytes(), &[8; 6]).unwrap();
    }
    demand_clean(&db);
    let stat = db.stat().unwrap();
    (stat.updates, stat.splits - splits)
}

#[test]
fn updates_use_it() {
    let (without, splits_without) = grow(0);
    let (with, splits_with) = grow(20);
    assert_eq!((without.all(), with.all()), (20_000, 20_000));
    assert!(splits_without > 0);
    assert_eq!((splits_with, with.split), (0, 0), "{with:?} instead of {without:?}");
    assert!(with.stayed > without.stayed, "{with:?} {without:?}");
    assert!(with.compacted < without.compacted + without.split, "{with:?} {without:?}");
}

#[test]
fn every_update_is_counted_once_by_its_way() {
    let db = with_reserve(0);
    db.put(b"a", b"1").unwrap();
    assert_eq!(db.stat().unwrap().updates.all(), 0, "an insert is no update");
    db.put(b"a", b"2").unwrap();
    assert!(db.replace(b"a", b"3").unwrap());
    db.append(b"a", b"4").unwrap();
    assert!(!db.replace(b"b", b"3").unwrap());
    assert!(!db.insert(b"a", b"3").unwrap());
    let updates = db.stat().unwrap().updates;
    assert_eq!((updates.stayed, updates.all()), (3, 3));
    let held = db.snapshot().unwrap();
    db.put(b"a", b"5").unwrap();
    let updates = db.stat().unwrap().updates;
    assert_eq!((updates.copied, updates.all()), (1, 4));
    drop(held);
    db.put(b"a", &[1; 10_000]).unwrap();
    db.append(b"a", &[1; 100]).unwrap();
    db.append(b"a", &[1; 5_000]).unwrap();
    db.append(b"a", &[1; 100]).unwrap();
    let updates = db.stat().unwrap().updates;
    // A value that gets pages of its own moves; what has room behind it (12 KiB for 10,000 bytes) stays.
    assert_eq!((updates.moved, updates.all()), (2, 8), "{updates:?}");
    let mut tx = db.begin().unwrap();
    for round in 0..3u8 {
        tx.put(b"a", &[round]).unwrap();
        tx.put(&[round], b"new").unwrap();
    }
    assert_eq!(db.stat().unwrap().updates.all(), 8, "not before the commit");
    tx.commit_relaxed().unwrap();
    assert_eq!(db.stat().unwrap().updates.all(), 11);
    let mut tx = db.begin().unwrap();
    tx.put(b"a", b"never").unwrap();
    tx.put(b"c", b"never").unwrap();
    tx.abort().unwrap();
    assert_eq!(db.stat().unwrap().updates.all(), 11);
}

#[test]
fn long_values_keep_room_for_appends() {
    for (percent, fits) in [(0, 900), (50, 40_000), (90, 300_000)] {
        let db = with_reserve(percent);
        db.put(b"long", &[1; 40_000]).unwrap();
        db.append(b"long", &vec![2; fits]).unwrap_or_else(|e| panic!("{percent}: {e}"));
        let updates = db.stat().unwrap().updates;
        assert_eq!((updates.moved, updates.all()), (0, 1), "{percent} %");
        assert_eq!(db.get(b"long").unwrap().unwrap().len(), 40_000 + fits);
        demand_clean(&db);
    }
}

#[test]
fn it_can_be_changed_and_stays_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Options::new().create(true).reserve_percent(30).open(&path).unwrap();
    assert_eq!(db.stat().unwrap().reserve_percent, 30);
    let error = db.set_reserve(91).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { .. }), "{error:?}");
    let other = Db::open(&path).unwrap();
    other.set_reserve(60).unwrap();
    assert_eq!(db.stat().unwrap().reserve_percent, 60);
    drop((db, other));
    // What is asked for counts at creation only.
    let db = Options::new().create(true).reserve_percent(5).open(&path).unwrap();
    assert_eq!(db.stat().unwrap().reserve_percent, 60);
    for n in 0..2_000u32 {
        db.put(&n.to_le_bytes(), &[7; 60]).unwrap();
    }
    assert_eq!(db.fill().unwrap().pages[4..], [0; 6]);
    let copy = dir.path().join("copy.ntdb");
    db.backup(&copy, &Default::default()).unwrap();
    let read_only = Options::new().read_only(true).open(&copy).unwrap();
    assert_eq!(read_only.stat().unwrap().reserve_percent, 60);
    assert_eq!(read_only.fill().unwrap().pages[4..], [0; 6]);
    assert!(matches!(read_only.set_reserve(1), Err(Error::ReadOnly { .. })));
    let tx = db.begin().unwrap();
    assert!(matches!(db.set_reserve(1), Err(Error::WouldDeadlock { .. })));
    drop(tx);
}

/// Compaction makes pages as full as inserts may, so that the next inserts don't split them all.
#[test]
fn compaction_and_joins_leave_it() {
    let db = with_reserve(40);
    for n in 0..20_000u32 {
        db.put(&n.to_le_bytes(), &[7; 20]).unwrap();
    }
    for n in 0..20_000u32 {
        if n % 5 != 0 {
            assert!(db.delete(&n.to_le_bytes()).unwrap());
        }
    }
    db.compact().unwrap();
    demand_clean(&db);
    let fill = db.fill().unwrap();
    assert_eq!(fill.pages[6..], [0; 4], "{fill:?}");
    assert!(fill.live_percent > 30.0, "{fill:?}");
    let splits = db.stat().unwrap().splits;
    for n in 100_000..100_100u32 {
        db.put(&n.to_le_bytes(), &[7; 20]).unwrap();
    }
    let more = db.stat().unwrap().splits - splits;
    assert!(more < 50, "{more} splits by 100 inserts");
}

#[derive(Clone, Debug)]
enum Action {
    Put(u16, usize),
    Append(u16, usize),
    Delete(u16),
    Reserve(u8),
    Transaction(Vec<(u16, usize)>),
    Compact,
    Snapshot,
}

fn action() -> impl Strategy<Value = Action> {
    let len = || prop_oneof![5 => 0usize..60, 3 => 200usize..1_000, 1 => 1_000usize..9_000].boxed();
    let key = || 0u16..300;
    prop_oneof![
        12 => (key(), len()).prop_map(|(k, l)| Action::Put(k, l)),
        6 => (key(), len()).prop_map(|(k, l)| Action::Append(k, l)),
        3 => key().prop_map(Action::Delete),
        1 => prop::sample::select(&PERCENTS[..]).prop_map(Action::Reserve),
        1 => prop::collection::vec((key(), len()), 1..50).prop_map(Action::Transaction),
        1 => Just(Action::Compact),
        1 => Just(Action::Snapshot),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_it_is_the_records_are_the_model_s(
        actions in prop::collection::vec(action(), 1..600),
        percent in prop::sample::select(&PERCENTS[..]),
        // With few different hashes there are overflow chains.
        mask in prop_oneof![3 => Just(u64::MAX), 1 => Just(0x3 << 62), 1 => Just(0xff << 56)],
        page_size in prop_oneof![4 => Just(4096u32), 1 => Just(16_384), 1 => Just(65_536)],
    ) {
        let mut options = Options::new();
        options.reserve_percent(percent).hash_mask(mask).page_size(page_size);
        let db = options.open_in_memory().unwrap();
        let mut model = BTreeMap::new();
        let mut held = None;
        for (n, action) in actions.into_iter().enumerate() {
            let value = |len: usize| vec![n as u8; len];
            match action {
                Action::Put(key, len) => {
                    db.put(&key.to_le_bytes(), &value(len)).unwrap();
                    model.insert(key, value(len));
                }
                Action::Append(key, len) => {
                    db.append(&key.to_le_bytes(), &value(len)).unwrap();
                    model.entry(key).or_insert_with(Vec::new).extend(value(len));
                }
                Action::Delete(key) => {
                    prop_assert_eq!(db.delete(&key.to_le_bytes()).unwrap(), model.remove(&key).is_some());
                }
                Action::Reserve(percent) => db.set_reserve(percent).unwrap(),
                Action::Transaction(puts) => {
                    db.transaction(|tx| {
                        puts.iter().try_for_each(|&(key, len)| tx.put(&key.to_le_bytes(), &value(len)))
                    }).unwrap();
                    model.extend(puts.into_iter().map(|(key, len)| (key, value(len))));
                }
                Action::Compact => db.compact().unwrap(),
                Action::Snapshot => held = Some(db.snapshot().unwrap()),
            }
        }
        drop(held);
        let report = db.check().unwrap();
        prop_assert!(report.is_clean(), "{:?}", report);
        prop_assert_eq!(db.len().unwrap(), model.len() as u64);
        for (key, value) in &model {
            let found = db.get(&key.to_le_bytes()).unwrap();
            prop_assert_eq!(found.as_ref(), Some(value));
        }
        let fill = db.fill().unwrap();
        prop_assert!(fill.live_percent >= 0.0 && fill.live_percent + fill.free_percent <= 100.5, "{:?}", fill);
    }
}
