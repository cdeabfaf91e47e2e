//! An opening that fails leaves no file behind that was not there before, whatever it fails of: what
//! it finds, what the system refuses, names that are too long. And nothing is in the way of the next.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ntdb::failpoint::{self, Fault, Plan};
use ntdb::{Db, Error, Options};
use ntdb_testkit::lab::TempDir;
use ntdb_testkit::mount::SmallDisk;

/// Plans and limits are the process's: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("list");
    let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<_> = entries.map(|entry| name(entry.expect("entry"))).collect();
    names.sort();
    names
}

fn record(n: u32) -> (Vec<u8>, Vec<u8>) {
    (format!("key-{n}").into_bytes(), vec![n as u8; 30 + n as usize % 100])
}

const RECORDS: u32 = 300;

/// In which state a database is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scene {
    /// There is no file.
    Absent,
    /// It is empty.
    Empty,
    /// As its last user has closed it.
    AtRest,
    /// As users killed at once leave it: with logs, and records that only the ring has.
    Crashed,
}

const SCENES: [Scene; 4] = [Scene::Absent, Scene::Empty, Scene::AtRest, Scene::Crashed];

/// Makes a scene in `dir`, which is as good as the first time at every call.
fn set(scene: Scene, dir: &Path) -> PathBuf {
    for name in names(dir) {
        std::fs::remove_file(dir.join(name)).expect("remove");
    }
    let path = dir.join("test.ntdb");
    match scene {
        Scene::Absent => {}
        Scene::Empty => std::fs::write(&path, b"").expect("write"),
        Scene::AtRest => {
            let db = Db::create(&path).expect("create");
            fill(&db, 0..RECORDS);
            db.close().expect("close");
        }
        Scene::Crashed => {
            // A child that leaves without closing anything.
            // SAFETY: the child does its work and leaves without the parent's handlers.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let db = Db::create(&path).expect("create");
                fill(&db, 0..RECORDS / 3);
                db.checkpoint().expect("checkpoint");
                fill(&db, RECORDS / 3..RECORDS / 2);
                db.sync().expect("sync");
                fill(&db, RECORDS / 2..RECORDS);
                // SAFETY: leaves at once.
                unsafe { libc::_exit(0) };
            }
            let mut status = 0;
            // SAFETY: waits for the child made above.
            unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(status, 0);
        }
    }
    path
}

fn fill(db: &Db, records: std::ops::Range<u32>) {
    for n in records {
        let (key, value) = record(n);
        db.put(&key, &value).expect("put");
    }
}

/// What was stored is there once nothing is in the way any more.
fn demand_contents(scene: Scene, path: &Path, what: &str) {
    let db = Options::new().create(true).open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
    if matches!(scene, Scene::AtRest | Scene::Crashed) {
        for n in 0..RECORDS {
            let (key, value) = record(n);
            assert_eq!(db.get(&key).expect("get"), Some(value), "{what}: record {n}");
        }
    } else {
        assert_eq!(db.len().expect("len"), 0, "{what}");
    }
    assert!(db.check().expect("check").is_clean(), "{what}");
    db.close().expect("close");
}

#[test]
fn for_any_call_that_fails() {
    let _alone = alone();
    let dir = TempDir::new();
    let mut failed = BTreeMap::new();
    for scene in SCENES {
        let path = set(scene, dir.path());
        failpoint::count_passages(true);
        let db = Options::new().create(true).open(&path).expect("open");
        let calls = failpoint::fault_hits();
        failpoint::count_passages(false);
        db.close().expect("close");
        for (name, passed) in calls {
            for nth in 1..=passed {
                for errno in [libc::EIO, libc::ENOSPC] {
                    let path = set(scene, dir.path());
                    let before = names(dir.path());
                    let fault = Fault { name: name.into(), errno, nth, and_after: false };
                    failpoint::set_plan(Plan { faults: vec![fault], ..Plan::default() });
                    let opened = Options::new().create(true).open(&path);
                    failpoint::set_plan(Plan::default());
                    let what = format!("{scene:?}, {name}:{nth}: {opened:?}");
                    if opened.is_ok() {
                        // Something that need not succeed.
                        continue;
                    }
                    drop(opened);
                    let after = names(dir.path());
                    let new: Vec<_> = after.iter().filter(|name| !before.contains(name)).collect();
                    assert!(new.is_empty(), "{what}: leaves {new:?}");
                    demand_contents(scene, &path, &what);
                    *failed.entry(name).or_insert(0u32) += 1;
                }
            }
        }
    }
    println!("failed openings: {failed:?}");
    for name in ["create:data", "create:shm", "allocate:data", "rename:shm", "fsync:data"] {
        assert!(failed.contains_key(name), "no opening failed of {name}");
    }
}

#[test]
fn for_want_of_descriptors() {
    let _alone = alone();
    let dir = TempDir::new();
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid place for the result.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut before) };
    let mut failures = 0;
    for scene in SCENES {
        for spare in 0..12 {
            let path = set(scene, dir.path());
            let old = names(dir.path());
            // The next descriptor is the lowest that is free.
            let next = std::os::fd::AsRawFd::as_raw_fd(
                &std::fs::File::open(&path)
                    .unwrap_or_else(|_| std::fs::File::open(dir.path()).expect("a descriptor")),
            );
            let limit = libc::rlimit { rlim_cur: next as u64 + spare, ..before };
            // SAFETY: a limit of this process, which is alone with it.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
            let opened = Options::new().create(true).open(&path);
            // SAFETY: as above.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &before) };
            let what = format!("{scene:?}, {spare} descriptors: {opened:?}");
            match opened {
                Ok(db) => db.close().expect("close"),
                Err(_) => {
                    failures += 1;
                    assert_eq!(names(dir.path()), old, "{what}");
                }
            }
            demand_contents(scene, &path, &what);
        }
    }
    assert!(failures > 4, "only {failures} openings failed");
}

/// Fails to open `path`, writing and reading; the folder and the data file stay as they were.
fn refuse(path: &Path, options: &mut Options) -> Error {
    let dir = path.parent().expect("a folder");
    let before = (names(dir), std::fs::read(path).ok());
    let error = options.open(path).expect_err("must be refused");
    assert_eq!(names(dir), before.0, "{error}");
    assert!(std::fs::read(path).ok() == before.1, "{error}: the data file was changed");
    error
}

#[test]
fn for_what_is_found() {
    let _alone = alone();
    let dir = TempDir::new();
    let change = |path: &Path, at: usize, bytes: &[u8]| {
        let mut content = std::fs::read(path).expect("read");
        content[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(path, content).expect("write");
    };
    // A missing log, without the shared memory, as after a boot.
    let path = set(Scene::Crashed, dir.path());
    for name in names(dir.path()).iter().filter(|name| *name != "test.ntdb") {
        std::fs::remove_file(dir.path().join(name)).expect("remove");
    }
    forget_boot(&path);
    let error = refuse(&path, &mut Options::new());
    assert!(matches!(error, Error::LogMissing { .. }), "{error:?}");
    // A damaged map, root, header, and meta pages.
    for page in [4usize, 5, 1 << 20] {
        let path = set(Scene::AtRest, dir.path());
        let pages = std::fs::metadata(&path).expect("metadata").len() as usize / 4096;
        if page < pages {
            change(&path, page * 4096, &[0x5A; 4096]);
        } else {
            for page in 0..pages {
                change(&path, page * 4096, &[0x5A; 4096]);
            }
        }
        for options in [Options::new().create(true), Options::new().read_only(true)] {
            if let Err(error) = options.open(&path) {
                assert!(
                    matches!(error, Error::Corrupt { .. } | Error::NotADatabase { .. }),
                    "{error:?}"
                );
                refuse(&path, options);
            }
        }
    }
    // A damaged log, and a companion of another.
    let path = set(Scene::Crashed, dir.path());
    change(&dir.path().join("test.ntdb-log0"), 0, &[0; 200]);
    let log1 = dir.path().join("test.ntdb-log1");
    if log1.exists() {
        change(&log1, 0, &[0; 200]);
    }
    let error = refuse(&path, &mut Options::new());
    assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
    let path = set(Scene::AtRest, dir.path());
    let other = dir.path().join("other.ntdb");
    let db = Db::create(&other).expect("create");
    std::fs::copy(dir.path().join("other.ntdb-shm"), dir.path().join("test.ntdb-shm"))
        .expect("copy");
    let error = refuse(&path, &mut Options::new());
    assert!(matches!(error, Error::ForeignSidecar { .. }), "{error:?}");
    drop(db);
    // A folder that is not there.
    let path = set(Scene::Absent, dir.path());
    let nowhere = dir.path().join("no such folder");
    refuse(&path, Options::new().create(true).shm_dir(Some(nowhere.clone())));
    refuse(&path, Options::new().create_new(true).shm_dir(Some(nowhere.clone())));
    let path = set(Scene::AtRest, dir.path());
    refuse(&path, Options::new().shm_dir(Some(nowhere)));
    demand_contents(Scene::AtRest, &path, "at the end");
}

/// Makes the attach record that of an earlier boot.
fn forget_boot(path: &Path) {
    let mut bytes = std::fs::read(path).expect("read");
    bytes[2048 + 16] ^= 0xFF;
    ntdb::fuzzing::seal_attach_record(&mut bytes);
    std::fs::write(path, bytes).expect("write");
}

#[test]
fn for_a_full_disk() {
    let _alone = alone();
    let mut refused_shm = 0;
    // From nothing to enough for all that an opening makes.
    for kib in [8, 16, 24, 28, 32, 64, 512, 1_024, 1_536, 1_600, 2_048] {
        let disk = SmallDisk::new(kib);
        let path = disk.path().join("test.ntdb");
        match Options::new().create(true).open(&path) {
            Ok(db) => db.close().expect("close"),
            Err(error) => {
                assert!(matches!(error, Error::Full { .. }), "{kib} KiB: {error:?}");
                assert_eq!(names(disk.path()), [""; 0], "{kib} KiB: {error}");
                // The data file fits, the shared memory does not, and may lie elsewhere.
                if kib >= 64 {
                    let text = error.to_string();
                    assert!(text.contains("--shm-dir") && text.contains("shm_dir"), "{text}");
                    refused_shm += 1;
                    let elsewhere = TempDir::new();
                    let db = Options::new()
                        .create(true)
                        .shm_dir(Some(elsewhere.path().into()))
                        .open(&path)
                        .expect("with the shared memory elsewhere");
                    db.close().expect("close");
                }
            }
        }
    }
    assert!(refused_shm > 0, "no disk was too small for the shared memory only");
}

#[test]
fn for_names_that_leave_no_room_for_the_companions() {
    let _alone = alone();
    let dir = TempDir::new();
    // `-log0.new-1023` is the longest that is added.
    for len in [1usize, 100, 240, 241] {
        let path = dir.path().join("n".repeat(len));
        let db = Options::new().create(true).open(&path).expect("a name that is short enough");
        db.put(b"key", b"value").expect("put");
        db.sync().expect("a log of that name");
        db.checkpoint().expect("checkpoint");
        db.put(b"key", b"value").expect("put");
        db.sync().expect("another log of that name");
        db.close().expect("close");
        assert_eq!(names(dir.path()), ["n".repeat(len)]);
        std::fs::remove_file(&path).expect("remove");
    }
    for len in [242usize, 246, 247, 250, 255, 256, 1_000, 5_000] {
        let path = dir.path().join("n".repeat(len));
        for options in [Options::new().create(true), Options::new().create_new(true)] {
            match options.open(&path) {
                Err(Error::TooLong { what, len: found, limit, .. }) => {
                    assert!(what.contains("name") || len == 5_000, "{what}");
                    if what.contains("name") {
                        assert_eq!((found, limit), (len as u64, 241));
                    }
                }
                other => panic!("{len}: {other:?}"),
            }
            assert_eq!(names(dir.path()), [""; 0], "a name of {len} bytes");
        }
    }
    // An existing file of such a name can be read, which needs no companions, and not written.
    let (short, long) = (dir.path().join("short"), dir.path().join("n".repeat(250)));
    Db::create(&short).expect("create").close().expect("close");
    std::fs::rename(&short, &long).expect("rename");
    Options::new().read_only(true).open(&long).expect("read").close().expect("close");
    assert!(matches!(refuse(&long, &mut Options::new()), Error::TooLong { .. }));
    std::fs::rename(&long, &short).expect("rename");
    // A database in use may be reached by any name.
    let db = Db::open(&short).expect("open");
    db.put(b"key", b"value").expect("put");
    std::fs::hard_link(&short, &long).expect("link");
    let other = Db::open(&long).expect("join by another name");
    assert_eq!(other.get(b"key").expect("get").as_deref(), Some(&b"value"[..]));
}

#[test]
fn for_paths_that_are_too_long() {
    let _alone = alone();
    let dir = TempDir::new();
    let mut deep = dir.path().to_path_buf();
    while deep.as_os_str().len() < 1_100 {
        deep.push("d".repeat(100));
        std::fs::create_dir(&deep).expect("folder");
    }
    let error = refuse(&deep.join("test.ntdb"), Options::new().create(true));
    match &error {
        Error::TooLong { what, limit: 1_024, .. } => assert!(what.contains("path"), "{what}"),
        other => panic!("{other:?}"),
    }
    // By a short relative path it is as long. (The folder is this process's own business.)
    let far = deep.join("d/".repeat(2_000)).join("test.ntdb");
    assert!(far.as_os_str().as_bytes().len() > libc::PATH_MAX as usize);
    match Options::new().create(true).open(&far) {
        Err(Error::TooLong { what, limit: 1_024, .. }) => assert!(what.contains("path"), "{what}"),
        other => panic!("{other:?}"),
    }
    // The folder of the shared memory has a path, too.
    let path = dir.path().join("test.ntdb");
    let error = refuse(&path, Options::new().create(true).shm_dir(Some(deep.clone())));
    assert!(matches!(error, Error::TooLong { .. }), "{error:?}");
}
