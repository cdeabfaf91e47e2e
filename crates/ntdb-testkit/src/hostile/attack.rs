//! Carrying an attack out: the files are written and used like any database.

use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ntdb::{Cursor, Db, Error, Options, fuzzing};

use super::edit;
use super::scene::{DATA, FILES, SHM, Scene};

/// Bytes that a file may grow to while it is used. The scenes are far smaller, so whoever comes here was led to by
/// a forged number.
pub const FILE_BYTES_MAX: u64 = 64 << 20;
/// Most records that an iteration is followed for.
const RECORDS_MAX: usize = 20_000;
/// Keys that are read and changed one by one.
const KEYS: usize = 40;

/// Carries out `attack` (see [`edit`]) in `dir`, which is emptied. Returns the names of the answers.
///
/// # Panics
/// If the engine did what it must not do under any attack.
pub fn run(scenes: &[Scene], dir: &Path, attack: &[u8]) -> String {
    let [scene, options, edits @ ..] = attack else { return String::new() };
    let scene = &scenes[*scene as usize % scenes.len()];
    write(dir, edit::apply(scene, edits)).expect("write the files");
    rescue(dir);
    let answers = exercise(&dir.join(FILES[DATA]), *options);
    for name in FILES {
        let len = std::fs::metadata(dir.join(name)).map_or(0, |metadata| metadata.len());
        // Shared memory is allocated to 64 times what the data needs at most.
        assert!(len <= FILE_BYTES_MAX, "{name} has grown to {len} bytes ({answers})");
    }
    answers
}

/// As [`run`], but only copies what can be read of the files into a new database.
///
/// # Panics
/// As there.
pub fn salvage(scenes: &[Scene], dir: &Path, attack: &[u8]) {
    let [scene, _, edits @ ..] = attack else { return };
    let scene = &scenes[*scene as usize % scenes.len()];
    write(dir, edit::apply(scene, edits)).expect("write the files");
    rescue(dir);
}

/// Whatever the files are, what is copied is a whole database, or there is none.
fn rescue(dir: &Path) {
    let to = dir.join("rescued.ntdb");
    match ntdb::salvage(dir.join(FILES[DATA]), &to, |_| {}) {
        Ok(report) => {
            let db = Db::open(&to).expect("open what was rescued");
            let check = db.check().expect("check what was rescued");
            assert!(check.is_clean(), "{check:?} after {report:?}");
            assert_eq!(check.records, report.records);
            db.close().expect("close what was rescued");
            std::fs::remove_file(&to).expect("remove what was rescued");
        }
        Err(error) => assert!(!to.exists(), "{error}, and yet there is a file"),
    }
}

fn write(dir: &Path, mut files: [Vec<u8>; 4]) -> std::io::Result<()> {
    for name in FILES.iter().chain(&["test.ntdb-shm.new"]) {
        match std::fs::remove_file(dir.join(name)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    let data = dir.join(FILES[DATA]);
    std::fs::write(&data, &files[DATA])?;
    let metadata = std::fs::metadata(&data)?;
    fuzzing::adopt_shm(&mut files[SHM], metadata.dev(), metadata.ino());
    fuzzing::adopt_attach_record(&mut files[DATA], metadata.dev(), metadata.ino());
    std::fs::write(&data, &files[DATA])?;
    for (name, bytes) in FILES.iter().zip(&files).skip(1) {
        if !bytes.is_empty() {
            std::fs::write(dir.join(name), bytes)?;
        }
    }
    Ok(())
}

/// Uses the database at `path` in every way; `options` say which, and whether for reading only.
fn exercise(path: &Path, options: u8) -> String {
    let read_only = options & 3 == 3;
    let mut answers = Answers::default();
    let opened = Options::new().read_only(read_only).open(path);
    let Some(db) = answers.note("open", opened) else { return answers.text };
    answers.note("stat", db.stat());
    if options & 4 == 0 {
        answers.note("check", db.check());
    }
    answers.note("len", db.len());
    let mut keys = Vec::new();
    let walk = db.for_each(|key, _| {
        keys.push(key.to_vec());
        if keys.len() < RECORDS_MAX { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    answers.note("walk", walk);
    iterate(&db, options, &mut answers);
    keys.truncate(KEYS);
    keys.extend([b"absent".to_vec(), b"key-1".to_vec(), b"large".to_vec(), Vec::new()]);
    keys.push(vec![b'k'; 3_000]);
    for key in &keys {
        answers.note("get", db.get(key));
        answers.note("into", db.get_into(key, &mut [0; 10]));
    }
    if !read_only {
        change(&db, &keys, options, &mut answers);
    }
    answers.note("close", db.close());
    // What was written is a database again, or refused.
    if options & 8 != 0
        && let Some(db) = answers.note("reopen", Options::new().open(path))
    {
        answers.note("recheck", db.check());
        answers.note("reclose", db.close());
    }
    answers.text
}

fn iterate(db: &Db, options: u8, answers: &mut Answers) {
    let mut iter = db.iter();
    let mut last = Ok(());
    for record in iter.by_ref().take(if options & 16 == 0 { 50 } else { RECORDS_MAX }) {
        if let Err(e) = record {
            last = Err(e);
        }
    }
    answers.note("iterate", last);
    let saved = iter.cursor().to_bytes();
    let cursor = Cursor::from_bytes(&saved).expect("its own bytes");
    assert!(cursor == iter.cursor());
    let _ = db.iter_from(&cursor).take(50).count();
}

fn change(db: &Db, keys: &[Vec<u8>], options: u8, answers: &mut Answers) {
    for (i, key) in keys.iter().enumerate() {
        match (i + options as usize / 32) % 5 {
            0 => drop(answers.note("put", db.put(key, &[7; 300]))),
            1 => drop(answers.note("append", db.append(key, &[8; 30]))),
            2 => drop(answers.note("delete", db.delete(key))),
            3 => drop(answers.note("put", db.put(key, &[9; 3_000]))),
            _ => drop(answers.note("append", db.append(key, &[10; 5_000]))),
        }
    }
    for n in 0..60u32 {
        answers.note("put", db.put(format!("fresh-{n}").as_bytes(), &[1; 200]));
    }
    if options & 64 != 0 {
        answers.note("large", db.put(b"large", &vec![5; 300_000]));
        answers.note("large", db.append(b"large", &vec![6; 270_000]));
    }
    answers.note("checkpoint", db.checkpoint());
    answers.note("put", db.put(b"fresh", b"value"));
    answers.note("sync", db.sync());
    if options & 128 != 0 {
        answers.note("clear", db.clear());
        answers.note("put", db.put(b"fresh", b"value"));
    }
    answers.note("check", db.check());
}

/// The names of errors, each once, with what met them.
#[derive(Default)]
struct Answers {
    text: String,
}

impl Answers {
    fn note<T>(&mut self, what: &str, result: Result<T, Error>) -> Option<T> {
        let answer = match &result {
            Ok(_) => format!("{what}=ok"),
            Err(e) => {
                // The sizes of the scenes don't fill any disk.
                assert!(!matches!(e, Error::Full { .. }), "{what}: {e}");
                let text = format!("{e:?}");
                format!("{what}={}", text.split([' ', '(']).next().unwrap_or_default())
            }
        };
        if !self.text.split(' ').any(|known| known == answer) {
            self.text.push_str(&answer);
            self.text.push(' ');
        }
        result.ok()
    }
}
