//! Files that were copied, renamed or opened for reading while others use them: nobody touches what is another's.

use std::path::Path;
use std::time::Duration;

use ntdb::{Db, Error, Options};

const RECORDS: u32 = 2_000;

fn fill(db: &Db, value: &[u8]) {
    for n in 0..RECORDS {
        db.put(&n.to_le_bytes(), value).unwrap();
    }
}

fn demand_filled(db: &Db, value: &[u8]) {
    for n in 0..RECORDS {
        assert_eq!(db.get(&n.to_le_bytes()).unwrap().as_deref(), Some(value), "record {n}");
    }
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Runs `body` in a forked child, and returns its wait status.
fn in_child(body: impl FnOnce()) -> i32 {
    // SAFETY: the child runs `body` and leaves without the parent's handlers.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_ok();
        // SAFETY: leaves at once.
        unsafe { libc::_exit(i32::from(!done)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    status
}

#[test]
fn opening_a_copy_of_a_database_in_use_leaves_the_companions_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("a.ntdb"), dir.path().join("b.ntdb"));
    let db = Db::create(&path).unwrap();
    fill(&db, b"first");
    db.sync().unwrap();
    let before = names(dir.path());
    std::fs::copy(&path, &copy).unwrap();
    // It lacks its log, and must not help itself to that of others.
    for read_only in [false, true] {
        match Options::new().read_only(read_only).open(&copy) {
            Err(Error::LogMissing { log, .. }) => {
                assert_eq!(log, dir.path().canonicalize().unwrap().join("b.ntdb-log0"));
            }
            other => panic!("{other:?}"),
        }
    }
    for name in before {
        assert!(dir.path().join(&name).exists(), "{name} has gone");
    }
    fill(&db, b"second");
    db.sync().unwrap();
    db.close().unwrap();
    demand_filled(&Db::open(&path).unwrap(), b"second");
}

#[test]
fn a_backup_in_the_place_of_a_renamed_file_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("a.ntdb"), dir.path().join("moved.ntdb"));
    let backup = dir.path().join("backup.ntdb");
    let db = Db::create(&path).unwrap();
    fill(&db, b"first");
    db.close().unwrap();
    std::fs::copy(&path, &backup).unwrap();
    let db = Db::open(&path).unwrap();
    fill(&db, b"second");
    std::fs::rename(&path, &moved).unwrap();
    std::fs::rename(&backup, &path).unwrap();
    match Db::open(&path) {
        Err(Error::ForeignSidecar { sidecar, .. }) => {
            assert_eq!(sidecar, dir.path().canonicalize().unwrap().join("a.ntdb-shm"));
        }
        other => panic!("{other:?}"),
    }
    // Under its new name it is the same database, and once it is at rest the backup may be used.
    demand_filled(&Db::open(&moved).unwrap(), b"second");
    db.close().unwrap();
    demand_filled(&Db::open(&path).unwrap(), b"first");
    demand_filled(&Db::open(&moved).unwrap(), b"second");
}

#[test]
fn copies_of_one_name_do_not_share_a_folder_for_shared_memory() {
    let dir = tempfile::tempdir().unwrap();
    let shm = dir.path().join("shm");
    for name in ["shm", "one", "two"] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
    }
    let (one, two) = (dir.path().join("one/a.ntdb"), dir.path().join("two/a.ntdb"));
    Db::create(&one).unwrap().close().unwrap();
    std::fs::copy(&one, &two).unwrap();
    let open = |path| Options::new().shm_dir(Some(shm.clone())).open(path);
    let db = open(&one).unwrap();
    assert!(matches!(open(&two), Err(Error::ForeignSidecar { .. })));
    fill(&db, b"value");
    demand_filled(&open(&one).unwrap(), b"value");
    db.close().unwrap();
    open(&two).unwrap().close().unwrap();
}

#[test]
fn many_databases_of_one_name_that_open_at_once_never_take_each_others_shared_memory() {
    let dir = tempfile::tempdir().unwrap();
    let shm = dir.path().join("shm");
    std::fs::create_dir(&shm).unwrap();
    let paths: Vec<_> = (0..6).map(|n| dir.path().join(format!("{n}/a.ntdb"))).collect();
    for path in &paths {
        std::fs::create_dir(path.parent().unwrap()).unwrap();
    }
    // Processes of their own: one process opens one database after the other.
    let status = in_child(|| {
        let children: Vec<_> = (0..6)
            .map(|n| {
                // SAFETY: the child does its work and leaves without the parent's handlers.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    let mut opened = 0;
                    for _ in 0..200 {
                        let options =
                            Options::new().create(true).shm_dir(Some(shm.clone())).clone();
                        match options.open(&paths[n]) {
                            Ok(db) => {
                                opened += 1;
                                let count = db.len().unwrap();
                                assert!(db.insert(&count.to_le_bytes(), &[n as u8]).unwrap());
                                assert_eq!(
                                    db.get(&0u64.to_le_bytes()).unwrap(),
                                    Some(vec![n as u8])
                                );
                                db.close().unwrap();
                            }
                            Err(Error::ForeignSidecar { .. }) => {}
                            Err(e) => panic!("{n}: {e}"),
                        }
                    }
                    // SAFETY: leaves at once.
                    unsafe { libc::_exit(i32::from(opened == 0)) };
                }
                child
            })
            .collect();
        for child in children {
            let mut status = 0;
            // SAFETY: waits for a child made above.
            unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(status, 0);
        }
    });
    assert_eq!(status, 0);
    assert_eq!(names(&shm).len(), 0);
    for (n, path) in paths.iter().enumerate() {
        let db = Db::open(path).unwrap();
        assert!(db.check().unwrap().is_clean());
        for record in db.iter() {
            assert_eq!(record.unwrap().1, [n as u8]);
        }
    }
}

#[test]
fn a_reader_of_a_file_at_rest_keeps_its_state_beside_later_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Db::create(&path).unwrap();
    fill(&db, b"first");
    db.close().unwrap();
    let reader = Options::new().read_only(true).open(&path).unwrap();
    let db = Db::open(&path).unwrap();
    for _ in 0..3 {
        fill(&db, &[7; 100]);
        db.checkpoint().unwrap();
    }
    demand_filled(&reader, b"first");
    db.close().unwrap();
    demand_filled(&reader, b"first");
}

#[test]
fn a_child_goes_on_after_the_file_was_renamed() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("a.ntdb"), dir.path().join("moved.ntdb"));
    let db = Db::create(&path).unwrap();
    db.put(b"key", b"value").unwrap();
    std::fs::rename(&path, &moved).unwrap();
    let status = in_child(|| {
        assert_eq!(db.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
        db.put(b"of the child", b"1").unwrap();
    });
    assert_eq!(status, 0);
    assert!(db.contains(b"of the child").unwrap());
    db.close().unwrap();
    assert_eq!(names(dir.path()), ["moved.ntdb"]);
}

#[test]
fn killed_readers_leave_room_for_others_beside_an_idle_writer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    // In a child, so that this process and the children to come do not share its handle.
    let (ready, go) = (dir.path().join("ready"), dir.path().join("go"));
    // SAFETY: the child runs what follows and leaves without the parent's handlers.
    let writer = unsafe { libc::fork() };
    if writer == 0 {
        let db = Db::create(&path).unwrap();
        db.put(b"key", b"value").unwrap();
        std::fs::write(&ready, "").unwrap();
        // The folder goes if the test fails.
        while !go.exists() && dir.path().exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let clean = db.check().unwrap().is_clean();
        // SAFETY: leaves at once.
        unsafe { libc::_exit(i32::from(!clean)) };
    }
    while !ready.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    for n in 0..1_100 {
        let status = in_child(|| {
            let db = Options::new().read_only(true).open(&path).unwrap();
            assert!(db.contains(b"key").unwrap());
            // SAFETY: its own process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        });
        assert!(libc::WIFSIGNALED(status), "reader {n} could not open the database");
    }
    std::fs::write(&go, "").unwrap();
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(writer, &mut status, 0) };
    assert_eq!(status, 0);
}

#[test]
fn a_lock_time_out_beyond_all_time_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Options::new().create(true).lock_timeout(Some(Duration::MAX)).open(&path).unwrap();
    let _guard = db.lock(b"key").unwrap();
    db.put(b"key", b"value").unwrap();
    db.put(b"long", &[1; 1 << 20]).unwrap();
    db.sync().unwrap();
    db.checkpoint().unwrap();
}

#[test]
fn the_name_of_a_directory_is_not_created() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Db::create(dir.path().join("a.ntdb/")).is_err());
    assert_eq!(names(dir.path()).len(), 0);
}

#[test]
fn children_open_while_other_threads_open_and_close() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let db = Db::create(&path).unwrap();
                    db.put(b"thread", b"1").unwrap();
                    db.close().unwrap();
                }
            });
        }
        let failed = (0..100).find(|_| {
            let status = in_child(|| {
                // A child that inherited a lock would wait for itself.
                // SAFETY: ends this child.
                unsafe { libc::alarm(20) };
                let db = Db::create(&path).unwrap();
                db.put(b"child", b"1").unwrap();
            });
            status != 0
        });
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(failed, None, "a child failed");
    });
    let db = Db::open(&path).unwrap();
    assert_eq!(db.len().unwrap(), 2);
    assert!(db.check().unwrap().is_clean());
}
