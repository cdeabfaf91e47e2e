//! Shared memory in a directory of its own: whatever directory an opener names, it finds what the
//! others have; and when all have been killed, recovery finds every operation that they had
//! acknowledged, or says that it cannot.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ntdb::{Db, Error, Options};
use ntdb_testkit::lab::{self, TempDir};

const RECORDS: u32 = 400;

fn key(n: u32) -> Vec<u8> {
    format!("key-{n}").into_bytes()
}

fn open(path: &Path, shm_dir: Option<&Path>) -> ntdb::Result<Db> {
    Options::new().create(true).shm_dir(shm_dir.map(Path::to_path_buf)).open(path)
}

/// Runs `body` in a child that then dies without closing anything, as if killed.
fn in_killed_child(body: impl FnOnce()) {
    // SAFETY: the child runs `body` and leaves without the parent's handlers.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_ok();
        // SAFETY: ends this process, at once.
        unsafe { if done { libc::kill(libc::getpid(), libc::SIGKILL) } else { libc::_exit(1) } };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFSIGNALED(status), "the child failed");
}

/// A child puts records, with or without a checkpoint among them, and is killed: the last ones are in the ring only.
fn kill_after_puts(path: &Path, shm_dir: Option<&Path>, with_log: bool) {
    in_killed_child(|| {
        let db = open(path, shm_dir).unwrap();
        for n in 0..RECORDS {
            db.put(&key(n), &n.to_le_bytes()).unwrap();
            if with_log && n == RECORDS / 2 {
                db.checkpoint().unwrap();
            }
            if with_log && n == RECORDS / 2 + 50 {
                db.sync().unwrap();
            }
        }
        std::mem::forget(db);
    });
}

fn demand_all(db: &Db, what: &str) {
    for n in 0..RECORDS {
        let held = db.get(&key(n)).unwrap();
        assert_eq!(held.as_deref(), Some(&n.to_le_bytes()[..]), "{what}: record {n}");
    }
    lab::demand_clean(db, what);
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

struct Place {
    dir: TempDir,
    path: PathBuf,
    /// Directories for shared memory.
    one: PathBuf,
    two: PathBuf,
}

fn place() -> Place {
    let dir = TempDir::new();
    let [data, one, two] = ["data", "one", "two"].map(|name| dir.path().join(name));
    for folder in [&data, &one, &two] {
        std::fs::create_dir(folder).unwrap();
    }
    Place { path: data.join("a.ntdb"), dir, one, two }
}

#[test]
fn who_opens_later_finds_it_whatever_he_names() {
    let place = place();
    let db = open(&place.path, Some(&place.one)).unwrap();
    db.put(b"key", b"value").unwrap();
    assert_eq!(names(&place.one), ["a.ntdb-shm"]);
    for dir in [None, Some(&place.one), Some(&place.two)] {
        // In a process of its own: this one has the database open already.
        in_killed_child(|| {
            let other = open(&place.path, dir.map(PathBuf::as_path)).unwrap();
            assert_eq!(other.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
            other.put(b"other", b"value").unwrap();
        });
        assert!(db.delete(b"other").unwrap());
    }
    assert!(names(&place.two).is_empty());
    db.close().unwrap();
    assert!(names(&place.one).is_empty());
    assert_eq!(names(place.path.parent().unwrap()), ["a.ntdb"]);
}

#[test]
fn after_all_were_killed_every_operation_is_there_whatever_the_next_names() {
    for with_log in [false, true] {
        for before in [0, 1, 2] {
            for after in [0, 1, 2] {
                for read_only in [false, true] {
                    let place = place();
                    let dirs = [None, Some(&*place.one), Some(&*place.two)];
                    let what = format!("{before} to {after}, log {with_log}, {read_only}");
                    kill_after_puts(&place.path, dirs[before], with_log);
                    let shm_dir = dirs[after].map(Path::to_path_buf);
                    let mut options = Options::new();
                    let db = options.shm_dir(shm_dir).read_only(read_only).open(&place.path);
                    let db = db.unwrap_or_else(|e| panic!("{what}: {e}"));
                    demand_all(&db, &what);
                    db.close().unwrap();
                    if !read_only {
                        assert_eq!(names(place.path.parent().unwrap()), ["a.ntdb"], "{what}");
                        assert!(names(&place.one).is_empty(), "{what}");
                        assert!(names(&place.two).is_empty(), "{what}");
                    }
                    demand_all(&open(&place.path, None).unwrap(), &what);
                }
            }
        }
    }
}

#[test]
fn by_other_names_and_relative_paths_too() {
    let place = place();
    let link = place.dir.path().join("hard-link");
    kill_after_puts(&place.path, Some(&place.one), true);
    std::fs::hard_link(&place.path, &link).unwrap();
    let db = open(&link, Some(&place.two)).unwrap();
    demand_all(&db, "by a hard link");
    db.close().unwrap();
    // A symbolic link to the directory, and a way with dots.
    let detour = place.dir.path().join("detour");
    std::os::unix::fs::symlink(&place.one, &detour).unwrap();
    std::fs::remove_file(&link).unwrap();
    std::fs::remove_file(&place.path).unwrap();
    kill_after_puts(&place.path, Some(&detour.join("../one/.")), true);
    demand_all(&open(&place.path, Some(&place.two)).unwrap(), "by a detour");
    // The data's own directory is the same as none.
    std::fs::remove_file(&place.path).unwrap();
    kill_after_puts(&place.path, place.path.parent(), false);
    demand_all(&open(&place.path, None).unwrap(), "the data's own directory");
}

#[test]
fn renamed_with_its_companions_it_is_whole() {
    let place = place();
    let folder = place.path.parent().unwrap();
    kill_after_puts(&place.path, None, true);
    let moved = place.dir.path().join("moved");
    std::fs::rename(folder, &moved).unwrap();
    demand_all(&open(&moved.join("a.ntdb"), None).unwrap(), "in a renamed folder");
}

#[test]
fn what_cannot_be_reached_is_an_error_until_it_is_given_up() {
    for (with_log, shm_dir) in [(false, true), (true, true), (false, false), (true, false)] {
        let place = place();
        let dir = shm_dir.then_some(&*place.one);
        kill_after_puts(&place.path, dir, with_log);
        let folder = dir.unwrap_or(place.path.parent().unwrap());
        let (shm, aside) = (folder.join("a.ntdb-shm"), place.dir.path().join("aside"));
        std::fs::rename(&shm, &aside).unwrap();
        let before = std::fs::read(&place.path).unwrap();
        let old_names = names(folder);
        for read_only in [false, true] {
            for after in [None, Some(place.one.clone()), Some(place.two.clone())] {
                let mut options = Options::new();
                match options.read_only(read_only).shm_dir(after).open(&place.path) {
                    Err(Error::ShmLost { shm: named, .. }) => {
                        assert_eq!(named, shm.canonicalize().unwrap_or(shm.clone()));
                    }
                    other => panic!("log {with_log}: {other:?}"),
                }
            }
        }
        assert!(std::fs::read(&place.path).unwrap() == before, "the data file was changed");
        assert_eq!(names(folder), old_names);
        // A damaged one is no better.
        let mut bytes = std::fs::read(&aside).unwrap();
        bytes[20] ^= 1;
        std::fs::write(&shm, &bytes).unwrap();
        assert!(matches!(open(&place.path, dir), Err(Error::ShmLost { .. })));
        std::fs::remove_file(&shm).unwrap();
        // A copy of all files, as they are now, which gives up what only the memory had.
        let copies = place.dir.path().join("copies");
        std::fs::create_dir(&copies).unwrap();
        let copy = copies.join("a.ntdb");
        for name in names(place.path.parent().unwrap()) {
            let from = place.path.parent().unwrap().join(&name);
            std::fs::copy(from, copies.join(&name)).unwrap();
        }
        let mut bytes = std::fs::read(&copy).unwrap();
        let metadata = std::fs::metadata(&copy).unwrap();
        ntdb::fuzzing::adopt_attach_record(&mut bytes, metadata.dev(), metadata.ino());
        std::fs::write(&copy, &bytes).unwrap();
        assert!(matches!(open(&copy, None), Err(Error::ShmLost { .. })));
        let db = Options::new().give_up_unsynced(true).open(&copy).unwrap();
        let durable = if with_log { RECORDS / 2 + 51 } else { 0 };
        assert!(db.len().unwrap() >= u64::from(durable), "what was durable is there");
        lab::demand_clean(&db, "given up");
        drop(db);
        // Found again, everything is there.
        std::fs::rename(&aside, &shm).unwrap();
        demand_all(&open(&place.path, None).unwrap(), "found again");
    }
}
