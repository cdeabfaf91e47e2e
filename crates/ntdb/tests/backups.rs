//! Backups: a whole copy of one moment, or nothing.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::*};

use ntdb::{BackupOptions, Db, Error, Options};

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

fn contents(db: &Db) -> Records {
    db.iter().map(|record| record.unwrap()).collect()
}

fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Records of every kind, and some that are no more.
fn furnish(db: &Db) {
    for n in 0..30_000u32 {
        db.put(&n.to_le_bytes(), &n.to_le_bytes().repeat(1 + n as usize % 40)).unwrap();
    }
    for n in 0..20_000u32 {
        db.delete(&n.to_le_bytes()).unwrap();
    }
    db.put(b"", b"empty key").unwrap();
    db.put(b"empty value", b"").unwrap();
    db.put(&[7; 100_000], &[8; 10_000]).unwrap();
    db.put(b"long", &vec![9; 3_000_000]).unwrap();
    for n in 0..200u32 {
        db.append(b"grown", &[n as u8; 3_000]).unwrap();
    }
}

#[test]
fn a_backup_has_everything_and_is_as_small_as_a_fresh_load() {
    for (page_size, mask) in [(4096, u64::MAX), (16384, u64::MAX), (4096, 0xff << 56)] {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from.ntdb"), dir.path().join("to.ntdb"));
        let mut options = Options::new();
        options.create(true).page_size(page_size).hash_mask(mask).reserve_percent(20).mode(0o640);
        let db = options.open(&from).unwrap();
        furnish(&db);
        let expected = contents(&db);
        let report = db.backup(&to, &BackupOptions::new()).unwrap();
        assert_eq!(report.records, expected.len() as u64);
        assert_eq!(report.change_counter, db.change_counter().unwrap());
        let metadata = std::fs::metadata(&to).unwrap();
        assert_eq!(report.file_bytes, metadata.len());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&to), mode(&from));
        let copy = Options::new().open(&to).unwrap();
        assert!(contents(&copy) == expected);
        assert!(copy.check().unwrap().is_clean());
        let stat = copy.stat().unwrap();
        assert_eq!((stat.page_size, stat.reserve_percent), (page_size, 20));
        let fresh = dir.path().join("fresh.ntdb");
        let loaded = options.open(&fresh).unwrap();
        for (key, value) in &expected {
            loaded.put(key, value).unwrap();
        }
        loaded.close().unwrap();
        let fresh = std::fs::metadata(&fresh).unwrap().len();
        println!("{} bytes, a fresh load {fresh}", metadata.len());
        assert!(metadata.len() * 10 <= fresh * 11, "{} bytes, fresh {fresh}", metadata.len());
        // It is a database of its own.
        copy.put(b"only here", b"x").unwrap();
        copy.close().unwrap();
        assert_eq!(db.get(b"only here").unwrap(), None);
        let uuid = |path: &Path| std::fs::read(path).unwrap()[16..64].to_vec();
        assert_ne!(uuid(&from), uuid(&to));
        db.close().unwrap();
        assert_eq!(files(dir.path()), ["fresh.ntdb", "from.ntdb", "to.ntdb"]);
    }
}

#[test]
fn what_is_there_is_overwritten_only_when_told_and_unused() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from.ntdb"), dir.path().join("to.ntdb"));
    let db = Db::create(&from).unwrap();
    db.put(b"key", b"value").unwrap();
    let (plain, mut force) = (BackupOptions::new(), BackupOptions::new());
    force.overwrite(true);
    // Itself, by any name.
    let link = dir.path().join("link");
    std::fs::hard_link(&from, &link).unwrap();
    for path in [&from, &link] {
        let error = db.backup(path, &force).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { .. }), "{error}");
    }
    std::fs::remove_file(&link).unwrap();
    db.backup(&to, &plain).unwrap();
    db.put(b"key", b"later").unwrap();
    let error = db.backup(&to, &plain).unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    let used = Db::open(&to).unwrap();
    let error = db.backup(&to, &force).unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    assert_eq!(used.get(b"key").unwrap().unwrap(), b"value");
    used.close().unwrap();
    db.backup(&to, &force).unwrap();
    assert_eq!(Db::open(&to).unwrap().get(b"key").unwrap().unwrap(), b"later");
    // No database: left as it is.
    let other = dir.path().join("letter.txt");
    std::fs::write(&other, "Dear all").unwrap();
    let error = db.backup(&other, &force).unwrap_err();
    assert!(matches!(error, Error::NotADatabase { .. }), "{error}");
    assert_eq!(std::fs::read(&other).unwrap(), b"Dear all");
    // An empty file made for the purpose, and a directory.
    let empty = dir.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    db.backup(&empty, &force).unwrap();
    let error = db.backup(dir.path(), &force).unwrap_err();
    assert!(matches!(error, Error::NotADatabase { .. }), "{error}");
    let error = db.backup(dir.path().join("no/such/dir"), &plain).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. } | Error::Io { .. }), "{error}");
    // What is left of a database that is not there would be taken for the new one's.
    let log = dir.path().join("gone.ntdb-log0");
    std::fs::write(&log, "x").unwrap();
    let error = db.backup(dir.path().join("gone.ntdb"), &plain).unwrap_err();
    assert!(matches!(&error, Error::AlreadyExists { path } if *path == log), "{error}");
    db.close().unwrap();
    assert_eq!(
        files(dir.path()),
        ["empty", "from.ntdb", "gone.ntdb-log0", "letter.txt", "to.ntdb"]
    );
}

#[test]
fn a_backup_that_is_stopped_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::create(dir.path().join("from.ntdb")).unwrap();
    furnish(&db);
    let to = dir.path().join("to.ntdb");
    let before = files(dir.path());
    for after in [0u32, 3, 15] {
        let mut told = 0;
        let error = db.backup_with(&to, &BackupOptions::new(), |so_far| {
            assert!(so_far.copied <= so_far.records && so_far.verified <= so_far.copied);
            told += 1;
            if told > after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(error, Err(Error::Cancelled { .. })), "{error:?}");
        assert_eq!(files(dir.path()), before);
    }
    let mut last = None;
    let report = db.backup_with(&to, &BackupOptions::new(), |so_far| {
        last = Some(so_far);
        ControlFlow::Continue(())
    });
    let (last, records) = (last.unwrap(), report.unwrap().records);
    assert_eq!((last.copied, last.verified, last.records), (records, records, records));
    assert_eq!(db.stat().unwrap().snapshots, 0);
}

/// What a killed backup has left is removed by the next, and nothing else is.
#[test]
fn leftovers_of_killed_backups_go_and_files_of_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::create(dir.path().join("from.ntdb")).unwrap();
    db.put(b"key", b"value").unwrap();
    for name in [
        "to.ntdb-partial-0123456789abcdef",
        "to.ntdb-partial-0123456789abcdef-shm",
        "to.ntdb-partial-fedcba9876543210-shm",
        "to.ntdb-partial-0123456789abcde",
        "to.ntdb-partial-of mine, sir.txt",
        "to.ntdb-backup",
        "other.ntdb-partial-0123456789abcdef",
    ] {
        std::fs::write(dir.path().join(name), "left").unwrap();
    }
    // One that is at work.
    let busy = dir.path().join("to.ntdb-partial-00000000000000ff");
    let busy_db = Db::create(&busy).unwrap();
    db.backup(dir.path().join("to.ntdb"), &BackupOptions::new()).unwrap();
    busy_db.close().unwrap();
    db.close().unwrap();
    assert_eq!(
        files(dir.path()),
        [
            "from.ntdb",
            "other.ntdb-partial-0123456789abcdef",
            "to.ntdb",
            "to.ntdb-backup",
            "to.ntdb-partial-00000000000000ff",
            "to.ntdb-partial-0123456789abcde",
            "to.ntdb-partial-of mine, sir.txt",
        ]
    );
}

/// One moment, though threads move sums about all the time; also of one in memory, and of one that may only be read.
#[test]
fn a_backup_beside_writers_is_one_moment() {
    let dir = tempfile::tempdir().unwrap();
    let stored = Db::create(dir.path().join("from.ntdb")).unwrap();
    for (n, db) in [stored.clone(), Db::in_memory().unwrap()].into_iter().enumerate() {
        for account in 0..3_000u32 {
            db.put(&account.to_le_bytes(), &1_000i64.to_le_bytes()).unwrap();
        }
        let stop = AtomicBool::new(false);
        let moved = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut n = 1u32;
                let mut moved = 0u64;
                while !stop.load(Relaxed) {
                    n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let mut tx = db.begin().unwrap();
                    for (account, change) in [((n >> 8) % 3_000, -1), ((n >> 17) % 3_000, 1)] {
                        let key = account.to_le_bytes();
                        let sum = tx.view(&key, |v| i64::from_le_bytes(v.try_into().unwrap()));
                        let sum = sum.unwrap().unwrap() + change;
                        tx.put(&key, &sum.to_le_bytes()).unwrap();
                    }
                    tx.commit_relaxed().unwrap();
                    moved += 1;
                }
                moved
            });
            for round in 0..10 {
                let to = dir.path().join(format!("to-{n}-{round}.ntdb"));
                db.backup(&to, &BackupOptions::new()).unwrap();
                let copy = Options::new().read_only(true).open(&to).unwrap();
                let sum: i64 = contents(&copy)
                    .values()
                    .map(|value| i64::from_le_bytes(value[..].try_into().unwrap()))
                    .sum();
                assert_eq!((copy.len().unwrap(), sum), (3_000, 3_000_000));
                // A copy of the copy, from a source that may only be read.
                let again = dir.path().join(format!("again-{n}-{round}.ntdb"));
                copy.backup(&again, &BackupOptions::new()).unwrap();
                assert!(contents(&Db::open(&again).unwrap()) == contents(&copy));
            }
            stop.store(true, Relaxed);
            writer.join().unwrap()
        });
        assert!(moved > 100, "{moved} transfers");
        assert!(db.check().unwrap().is_clean());
    }
}

/// Damage in the original is an error, and nothing is left.
#[test]
fn a_damaged_original_gives_no_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from.ntdb"), dir.path().join("to.ntdb"));
    let db = Db::create(&from).unwrap();
    for n in 0..2_000u32 {
        db.put(&n.to_le_bytes(), b"a value that stands in the file once or more").unwrap();
    }
    db.close().unwrap();
    let mut bytes = std::fs::read(&from).unwrap();
    let record = b"a value that stands in the file";
    let at = bytes.windows(record.len()).rposition(|window| window == record).unwrap();
    bytes[at] ^= 1;
    std::fs::write(&from, bytes).unwrap();
    let db = Options::new().read_only(true).open(&from).unwrap();
    let error = db.backup(&to, &BackupOptions::new()).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { path, .. } if *path == from), "{error}");
    drop(db);
    assert_eq!(files(dir.path()), ["from.ntdb"]);
}
