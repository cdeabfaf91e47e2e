//! The originals that attacks begin with: small databases, at rest or as a crash left them, always the same but for the
//! salts of the logs.

use std::path::Path;

use ntdb::{Db, Options, fuzzing};

use crate::lab::TempDir;
use crate::rng::Rng;

/// Names of a database's files, and their numbers in a [`Scene`].
pub const FILES: [&str; 4] = ["test.ntdb", "test.ntdb-log0", "test.ntdb-log1", "test.ntdb-shm"];
/// Number of the data file.
pub const DATA: usize = 0;
/// Number of the shared-memory file.
pub const SHM: usize = 3;

/// The files of one database.
#[derive(Clone, Debug)]
pub struct Scene {
    /// What is special about it.
    pub name: &'static str,
    /// Page size in bytes.
    pub page_size: usize,
    /// Contents by number; empty where there is no file.
    pub files: [Vec<u8>; 4],
    /// For each page of the data file, how many pages the seal in it covers; 0 where there is none.
    pub sealed: Vec<usize>,
    /// Records of each log, and of the ring.
    pub places: [Vec<fuzzing::Place>; 4],
}

impl Scene {
    fn new(name: &'static str, page_size: usize, files: [Vec<u8>; 4]) -> Scene {
        let data = &files[DATA];
        let pages = data.len() / page_size;
        let mut sealed = vec![0; pages];
        for (page, covers) in sealed.iter_mut().enumerate().skip(4) {
            let from = page * page_size;
            let run = u32::from_le_bytes(data[from + 44..from + 48].try_into().expect("4 bytes"));
            let end = (run as usize).saturating_mul(page_size).saturating_add(from);
            if run > 0 && end <= data.len() && fuzzing::is_sealed_page(&data[from..end]) {
                *covers = run as usize;
            }
        }
        let places = [
            Vec::new(),
            fuzzing::log_places(&files[1]),
            fuzzing::log_places(&files[2]),
            fuzzing::ring_places(&files[SHM]),
        ];
        Scene { name, page_size, files, sealed, places }
    }
}

/// All originals.
///
/// # Panics
/// If one cannot be made.
pub fn all() -> Vec<Scene> {
    vec![
        at_rest("empty", 4096, u64::MAX, |_| {}),
        at_rest("one bucket", 4096, u64::MAX, |db| fill(db, 30, 40)),
        at_rest("directories", 4096, u64::MAX, |db| fill(db, 500, 300)),
        at_rest("equal hashes", 4096, 0, |db| fill(db, 300, 200)),
        at_rest("equal leading bits", 4096, u64::MAX >> 48, |db| fill(db, 120, 100)),
        at_rest("large pages", 65536, u64::MAX, |db| fill(db, 300, 3_000)),
        crashed("crash before the first sync", |db| fill(db, 60, 100)),
        crashed("crash after a sync", |db| {
            fill(db, 60, 100);
            db.sync().expect("sync");
            fill(db, 40, 50);
        }),
        crashed("crash after a checkpoint", |db| {
            fill(db, 80, 200);
            db.sync().expect("sync");
            large(db);
            db.checkpoint().expect("checkpoint");
            fill(db, 60, 100);
            db.sync().expect("sync");
            large(db);
            db.delete(b"key-7").expect("delete");
        }),
        crashed("crash after clear", |db| {
            fill(db, 80, 100);
            db.sync().expect("sync");
            db.clear().expect("clear");
            fill(db, 20, 100);
        }),
    ]
}

/// Operations of every kind but large ones.
fn fill(db: &Db, records: u32, value_len: u64) {
    let mut rng = Rng::new(1);
    for n in 0..records {
        let key = format!("key-{n}").into_bytes();
        let len = if n % 50 == 0 { 5_000 } else { rng.below(value_len) as usize };
        db.put(&key, &rng.bytes(len)).expect("put");
        match n % 5 {
            0 => drop(db.append(&key, &rng.bytes(70)).expect("append")),
            3 => drop(db.delete(format!("key-{}", n / 2).as_bytes()).expect("delete")),
            _ => {}
        }
    }
    db.put(&vec![b'k'; 3_000], b"a long key").expect("put");
}

/// Operations that are logged in chunks.
fn large(db: &Db) {
    let bytes = Rng::new(2).bytes(300_000);
    db.put(b"large", &bytes).expect("put");
    db.append(b"large", &bytes[..280_000]).expect("append");
    db.put(&vec![b'l'; 3_000], &bytes).expect("put");
}

fn read(dir: &Path) -> [Vec<u8>; 4] {
    FILES.map(|name| std::fs::read(dir.join(name)).unwrap_or_default())
}

fn open(dir: &Path, page_size: usize, mask: u64) -> Db {
    let path = dir.join(FILES[DATA]);
    fuzzing::create_database(&path, page_size as u32, mask, 3).expect("create");
    Options::new().open(&path).expect("open")
}

fn at_rest(name: &'static str, page_size: usize, mask: u64, work: impl FnOnce(&Db)) -> Scene {
    let dir = TempDir::new();
    let db = open(dir.path(), page_size, mask);
    work(&db);
    db.close().expect("close");
    Scene::new(name, page_size, read(dir.path()))
}

/// The work is done by a child process, which then ends without closing.
fn crashed(name: &'static str, work: impl FnOnce(&Db)) -> Scene {
    let dir = TempDir::new();
    // SAFETY: the child does the work and ends; nothing of the parent's other threads, if it has any, is needed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let db = open(dir.path(), 4096, u64::MAX);
        work(&db);
        // SAFETY: ends the child at once, without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` is a valid place.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert!(child > 0 && waited == child && status == 0, "{name}: the child ended with {status}");
    Scene::new(name, 4096, read(dir.path()))
}
