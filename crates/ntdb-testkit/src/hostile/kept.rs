//! Logs that are kept for those who follow the changes, forged: changed, with right checksums or without, and then read
//! from their beginning, from the middle, and by one who waits for a key.
//!
//! Recovery never looks at kept logs, so the other attacks don't reach the code that reads them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ntdb::fuzzing::{self, Place};
use ntdb::{Db, Error, Options};

use super::edit::{EDIT_BYTES, EDITS_MAX, Edit};
use crate::rng::Rng;

/// Bytes of a log file's header.
const HEADER_BYTES: u64 = 128;

/// A database that is in use, and the logs that it has kept.
#[derive(Debug)]
pub struct Kept {
    db: Db,
    files: Vec<File>,
    /// Places in the changes, from which others are read.
    counters: Vec<u64>,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    bytes: Vec<u8>,
    places: Vec<Place>,
}

impl Kept {
    /// Makes one in `folder`, of several sessions with changes of every kind.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(folder: &Path) -> Kept {
        let path = folder.join("kept.ntdb");
        let open = || Options::new().create(true).keep_log(1 << 40).open(&path).expect("open");
        let mut counters = vec![0];
        for session in 0..6 {
            let db = open();
            work(&db, session);
            counters.push(db.change_counter().expect("counter"));
            db.close().expect("close");
        }
        let db = open();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).expect("list") {
            let path = entry.expect("list").path();
            if path.to_string_lossy().contains("kept.ntdb-k") {
                let bytes = std::fs::read(&path).expect("read");
                files.push(File { places: fuzzing::log_places(&bytes), path, bytes });
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        assert!(files.len() >= 6 && files.iter().all(|file| !file.places.is_empty()));
        Kept { db, files, counters }
    }

    /// Forges the logs as `attack` says (the first byte: whether checksums are made right, and from where is read; then
    /// edits) and reads them. Afterwards they are as before.
    ///
    /// # Errors
    /// What the follower is told.
    ///
    /// # Panics
    /// If the changes go backwards, or the logs cannot be written.
    pub fn attack(&self, attack: &[u8]) -> Result<(), Error> {
        let Some((how, edits)) = attack.split_first() else { return Ok(()) };
        let mut forged: Vec<_> = self.files.iter().map(|_| None).collect();
        for edit in edits.chunks_exact(EDIT_BYTES).take(EDITS_MAX).map(Edit::from_bytes) {
            let index = edit.which % self.files.len();
            let file = &self.files[index];
            edit_log(&edit, file, forged[index].get_or_insert_with(|| file.bytes.clone()));
        }
        for (file, forged) in self.files.iter().zip(&mut forged) {
            if let Some(bytes) = forged {
                if how % 4 != 0 {
                    fuzzing::seal_log(bytes);
                }
                std::fs::write(&file.path, bytes).expect("write a forged log");
            }
        }
        // From one place only: who meets damage looks several times, for it may be a switch of logs.
        let from = self.counters[usize::from(how / 4) % self.counters.len()];
        let answer = self.follow(from).and_then(|()| {
            let now = Some(Duration::ZERO);
            self.db.wait_for_change_since(Some(b"no such key"), from, now).map(drop)
        });
        for (file, forged) in self.files.iter().zip(&forged) {
            if forged.is_some() {
                std::fs::write(&file.path, &file.bytes).expect("write the log back");
            }
        }
        answer
    }

    /// An attack that is drawn at random.
    pub fn random(rng: &mut Rng) -> Vec<u8> {
        let edits = if rng.percent(60) { 1 } else { rng.range(2, 5) };
        rng.bytes(1 + edits as usize * EDIT_BYTES)
    }

    fn follow(&self, from: u64) -> Result<(), Error> {
        let mut changes = self.db.changes(from)?;
        let mut before = from;
        while let Some(change) = changes.next()? {
            assert!(change.sequence >= before && change.next.counter() > change.sequence);
            before = change.next.counter();
        }
        Ok(())
    }
}

fn edit_log(edit: &Edit, file: &File, bytes: &mut Vec<u8>) {
    let place = file.places[edit.which / 8 % file.places.len()];
    let end = place.lsn + place.len as u64;
    match edit.kind % 8 {
        0 => edit.put(bytes, edit.offset % HEADER_BYTES as usize, place.lsn),
        1 => bytes.truncate(edit.number as usize % (bytes.len() + 1)),
        // Numbers stand at the beginning of records: kind, lengths, where a series begins.
        2..=5 => edit.put(bytes, place.offset + edit.offset % place.len.min(40), end),
        _ => edit.put(bytes, place.offset + edit.offset % place.len, place.lsn),
    }
}

/// Changes of every kind.
fn work(db: &Db, session: u32) {
    let mut rng = Rng::new(u64::from(session));
    for n in 0..30u32 {
        let key = format!("key-{}", n % 12).into_bytes();
        match n % 5 {
            0..3 => db.put(&key, &rng.bytes(n as usize * 9)).expect("put"),
            3 => drop(db.append(&key, &rng.bytes(50)).expect("append")),
            _ => drop(db.delete(&key).expect("delete")),
        }
    }
    // In chunks: a transaction with a part that is undone, and a long value.
    let mut tx = db.begin().expect("begin");
    tx.put(b"tx", &rng.bytes(100)).expect("put");
    let savepoint = tx.savepoint().expect("savepoint");
    tx.put(b"undone", &rng.bytes(70_000)).expect("put");
    tx.rollback_to(savepoint).expect("roll back");
    tx.append(b"tx", &rng.bytes(70_000)).expect("append");
    tx.commit_relaxed().expect("commit");
    match session {
        1 => db.put(b"long", &rng.bytes(300_000)).expect("put"),
        2 => drop(db.append(b"long", &rng.bytes(280_000)).expect("append")),
        3 => db.clear().expect("clear"),
        _ => {}
    }
}
