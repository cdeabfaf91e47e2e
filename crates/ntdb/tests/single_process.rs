//! One process, one thread: the operations behave like a map, in memory and on disk, across closing and re-opening.

use std::collections::BTreeMap;

use ntdb::{Db, Options};
use proptest::prelude::*;

fn contents(db: &Db) -> BTreeMap<Vec<u8>, Vec<u8>> {
    db.iter().map(|record| record.unwrap()).collect()
}

#[test]
fn put_get_delete() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Db::create(&path).unwrap();
    assert_eq!(db.get(b"k").unwrap(), None);
    db.put(b"k", b"v").unwrap();
    assert_eq!(db.get(b"k").unwrap().unwrap(), b"v");
    assert!(!db.insert(b"k", b"w").unwrap());
    assert!(db.replace(b"k", b"w").unwrap());
    assert_eq!(db.append(b"k", b"xyz").unwrap(), 4);
    assert_eq!(db.get(b"k").unwrap().unwrap(), b"wxyz");
    assert_eq!(db.len().unwrap(), 1);
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    db.close().unwrap();
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "a database at rest is one file");
    let db = Db::open(&path).unwrap();
    assert_eq!(db.get(b"k").unwrap().unwrap(), b"wxyz");
    assert!(db.delete(b"k").unwrap());
    assert!(!db.delete(b"k").unwrap());
    assert!(db.check().unwrap().is_clean());
}

#[test]
fn many_records_survive_closing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    for page_size in [4096, 16384, 65536] {
        let db = Options::new().create_new(true).page_size(page_size).open(&path).unwrap();
        for i in 0..100_000u32 {
            db.put(&i.to_le_bytes(), &(i ^ 0xffff).to_le_bytes()).unwrap();
        }
        assert!(db.check().unwrap().is_clean());
        db.close().unwrap();
        let db = Db::open(&path).unwrap();
        assert_eq!(db.len().unwrap(), 100_000);
        for i in 0..100_000u32 {
            assert_eq!(db.get(&i.to_le_bytes()).unwrap().unwrap(), (i ^ 0xffff).to_le_bytes());
        }
        let report = db.check().unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.records, 100_000);
        for i in (0..100_000u32).step_by(2) {
            assert!(db.delete(&i.to_le_bytes()).unwrap());
        }
        db.checkpoint().unwrap();
        for i in 0..50_000u32 {
            db.put(&i.to_le_bytes(), &[7; 100]).unwrap();
        }
        let report = db.check().unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(contents(&db).len(), 75_000);
        db.close().unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}

#[derive(Clone, Debug)]
enum Action {
    Put(u16, usize),
    Insert(u16, usize),
    Replace(u16, usize),
    Append(u16, usize),
    Delete(u16),
    Clear,
    Checkpoint,
    Sync,
    Reopen,
    Check,
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![
        6 => 0usize..40,
        2 => 900usize..1200,
        2 => 3000usize..10_000,
        1 => 60_000usize..70_000,
        1 => 250_000usize..600_000,
    ]
}

fn actions() -> impl Strategy<Value = Action> {
    prop_oneof![
        20 => (0u16..200, lengths()).prop_map(|(k, n)| Action::Put(k, n)),
        5 => (0u16..200, lengths()).prop_map(|(k, n)| Action::Insert(k, n)),
        5 => (0u16..200, lengths()).prop_map(|(k, n)| Action::Replace(k, n)),
        10 => (0u16..200, lengths()).prop_map(|(k, n)| Action::Append(k, n)),
        10 => (0u16..200).prop_map(Action::Delete),
        1 => Just(Action::Clear),
        2 => Just(Action::Checkpoint),
        2 => Just(Action::Sync),
        2 => Just(Action::Reopen),
        2 => Just(Action::Check),
    ]
}

/// Keys of all forms: short, longer than a quarter page.
fn key(number: u16) -> Vec<u8> {
    let mut key = number.to_le_bytes().to_vec();
    match number % 16 {
        0 => key.resize(1500, 3),
        1 => key.resize(70_000, 4),
        2 => key.resize(980, 5),
        _ => {}
    }
    key
}

fn run(actions: &[Action], on_disk: bool, page_size: u32) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.ntdb");
    let mut options = Options::new();
    options.page_size(page_size).create(true).checkpoint_log_bytes(1 << 20);
    let open = || if on_disk { options.open(&path) } else { options.open_in_memory() }.unwrap();
    let mut db = open();
    let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    for (i, action) in actions.iter().enumerate() {
        let value = |len: usize| vec![i as u8; len];
        match action {
            Action::Put(k, n) => {
                db.put(&key(*k), &value(*n)).unwrap();
                model.insert(key(*k), value(*n));
            }
            Action::Insert(k, n) => {
                let absent = !model.contains_key(&key(*k));
                assert_eq!(db.insert(&key(*k), &value(*n)).unwrap(), absent);
                model.entry(key(*k)).or_insert_with(|| value(*n));
            }
            Action::Replace(k, n) => {
                let present = model.contains_key(&key(*k));
                assert_eq!(db.replace(&key(*k), &value(*n)).unwrap(), present);
                if present {
                    model.insert(key(*k), value(*n));
                }
            }
            Action::Append(k, n) => {
                let entry = model.entry(key(*k)).or_default();
                entry.extend(value(*n));
                assert_eq!(db.append(&key(*k), &value(*n)).unwrap(), entry.len() as u64);
            }
            Action::Delete(k) => {
                assert_eq!(db.delete(&key(*k)).unwrap(), model.remove(&key(*k)).is_some());
            }
            Action::Clear => {
                db.clear().unwrap();
                model.clear();
            }
            Action::Checkpoint => db.checkpoint().unwrap(),
            Action::Sync => db.sync().unwrap(),
            Action::Reopen if on_disk => {
                db.close().unwrap();
                db = open();
            }
            Action::Reopen => {}
            Action::Check => {
                let report = db.check().unwrap();
                assert!(report.is_clean(), "{report:?}");
            }
        }
    }
    assert_eq!(db.len().unwrap(), model.len() as u64);
    for (key, value) in &model {
        assert_eq!(db.get(key).unwrap().as_ref(), Some(value));
        assert!(db.contains(key).unwrap());
    }
    assert_eq!(contents(&db), model);
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn behaves_like_a_map_on_disk(actions in prop::collection::vec(actions(), 1..200), size in 12u32..17) {
        run(&actions, true, 1 << size);
    }

    #[test]
    fn behaves_like_a_map_in_memory(actions in prop::collection::vec(actions(), 1..200), size in 12u32..17) {
        run(&actions, false, 1 << size);
    }
}

#[test]
fn equal_hashes_are_only_slow() {
    for mask in [0, 0xffff] {
        let mut options = Options::new();
        let db = options.hash_mask(mask).open_in_memory().unwrap();
        for i in 0..10_000u32 {
            db.put(&i.to_le_bytes(), &i.to_be_bytes()).unwrap();
        }
        for i in 0..10_000u32 {
            assert_eq!(db.get(&i.to_le_bytes()).unwrap().unwrap(), i.to_be_bytes());
        }
        assert_eq!(db.iter().count(), 10_000);
        let report = db.check().unwrap();
        assert!(report.is_clean(), "{report:?}");
        for i in 0..10_000u32 {
            assert!(db.delete(&i.to_le_bytes()).unwrap());
        }
        assert!(db.is_empty().unwrap());
    }
}

#[test]
fn a_position_behind_an_error_is_not_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Db::create(&path).unwrap();
    for n in 0..2_000u32 {
        db.put(&n.to_le_bytes(), &[7; 20]).unwrap();
    }
    db.close().unwrap();
    // A record of the middle of the iteration is spoilt, and with it its page.
    let key = Db::open(&path).unwrap().iter().nth(1_000).unwrap().unwrap().0;
    let whole = std::fs::read(&path).unwrap();
    let record = [&key[..], &[7; 20]].concat();
    let mut spoilt = whole.clone();
    // Free pages may have old copies of it.
    for at in 0..whole.len() - record.len() {
        if whole[at..].starts_with(&record) {
            spoilt[at] ^= 1;
        }
    }
    assert!(spoilt != whole);
    std::fs::write(&path, spoilt).unwrap();
    let db = Options::new().read_only(true).open(&path).unwrap();
    let mut iter = db.iter();
    let seen = iter.by_ref().take_while(Result::is_ok).count();
    assert!(seen > 0 && seen < 2_000, "{seen}");
    let position = iter.cursor();
    drop(db);
    std::fs::write(&path, whole).unwrap();
    assert_eq!(Db::open(&path).unwrap().iter_from(&position).count(), 2_000 - seen);
}

/// Short records of lengths that change as more come: whatever the pages were made for, there is room for the next.
#[test]
fn records_of_every_short_length_in_every_order() {
    type Length = fn(u32, u32) -> usize;
    let lengths: [(&str, Length); 7] = [
        ("none", |_, _| 0),
        ("one", |_, _| 1),
        ("rising", |i, n| (i * 9 / n) as usize),
        ("falling", |i, n| ((n - i) * 9 / n) as usize),
        ("mixed", |i, _| (i.wrapping_mul(2_654_435_761) >> 29) as usize),
        ("one, then two", |i, n| 1 + usize::from(i > n / 2)),
        ("short, then long", |i, n| if i < n / 2 { 0 } else { 40 }),
    ];
    for page_size in [4096, 8192, 16384, 65536] {
        for (name, length) in lengths {
            for binary in [false, true] {
                let mut options = Options::new();
                options.page_size(page_size);
                let db = options.open_in_memory().unwrap();
                let n = 20_000;
                let key = |i: u32| match binary {
                    true => i.to_le_bytes().to_vec(),
                    false => i.to_string().into_bytes(),
                };
                for i in 1..=n {
                    db.put(&key(i), &vec![b'y'; length(i, n)]).unwrap_or_else(|e| {
                        panic!("{name}, pages of {page_size}, record {i}: {e}")
                    });
                }
                for i in (1..=n).rev() {
                    assert_eq!(
                        db.get(&key(i)).unwrap().map(|v| v.len()),
                        Some(length(i, n)),
                        "{name}"
                    );
                    if i % 3 == 0 {
                        db.put(&key(i), &vec![b'z'; length(n - i, n) + 3])
                            .unwrap_or_else(|e| panic!("{name}, {page_size}, again {i}: {e}"));
                    }
                }
                let report = db.check().unwrap();
                assert!(report.is_clean(), "{name}, {page_size}: {report:?}");
            }
        }
    }
}
