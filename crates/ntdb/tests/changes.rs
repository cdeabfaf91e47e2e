//! Following the changes of a database.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ntdb::{Change, Changes, Db, Error, Operation, Options, Position};

type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

fn contents(db: &Db) -> Contents {
    db.iter().map(Result::unwrap).collect()
}

/// What a follower makes of the changes, strictly: an operation must fit what is there.
fn apply(copy: &mut Contents, change: &Change) {
    assert!(change.is_transaction || change.operations.len() == 1);
    for operation in &change.operations {
        match operation {
            Operation::Put { key, value } => {
                copy.insert(key.clone(), value.clone());
            }
            Operation::Delete { key } => {
                copy.remove(key).expect("a delete tells of a key that was there");
            }
            Operation::Append { key, length_before, bytes } => {
                let value = copy.entry(key.clone()).or_default();
                assert_eq!(value.len() as u64, *length_before);
                value.extend_from_slice(bytes);
            }
            Operation::Clear => copy.clear(),
        }
    }
}

fn follow(changes: &mut Changes, copy: &mut Contents) -> usize {
    let mut count = 0;
    let mut before = changes.position().counter();
    while let Some(change) = changes.next().unwrap() {
        assert!(change.sequence >= before && change.next.counter() > change.sequence);
        assert_eq!(change.next, changes.position());
        before = change.next.counter();
        apply(copy, &change);
        count += 1;
    }
    count
}

/// A generator of numbers, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }

    fn key(&mut self) -> Vec<u8> {
        format!("key-{}", self.below(60)).into_bytes()
    }

    /// Mostly short, now and then one that goes to the log in chunks.
    fn value(&mut self) -> Vec<u8> {
        match self.below(40) {
            0 => vec![self.below(256) as u8; 300_000 + self.below(700_000) as usize],
            1..4 => {
                let len = self.below(20_000);
                self.bytes(len)
            }
            _ => {
                let len = self.below(100);
                self.bytes(len)
            }
        }
    }
}

/// Does something at random; `expected` is what the database then has.
fn act(db: &Db, random: &mut Random, expected: &mut Contents) {
    match random.below(100) {
        0 => {
            db.clear().unwrap();
            expected.clear();
        }
        1..20 => {
            let key = random.key();
            assert_eq!(db.delete(&key).unwrap(), expected.remove(&key).is_some());
        }
        20..40 => {
            let (key, value) = (random.key(), random.value());
            db.append(&key, &value).unwrap();
            expected.entry(key).or_default().extend(value);
        }
        40..55 => transact(db, random, expected),
        _ => {
            let (key, value) = (random.key(), random.value());
            db.put(&key, &value).unwrap();
            expected.insert(key, value);
        }
    }
}

fn transact(db: &Db, random: &mut Random, expected: &mut Contents) {
    let mut tx = db.begin().unwrap();
    let mut inside = expected.clone();
    for _ in 0..random.below(12) {
        let before = inside.clone();
        let savepoint = tx.savepoint().unwrap();
        for _ in 0..random.below(6) {
            let key = random.key();
            match random.below(10) {
                0 if random.below(5) == 0 => {
                    tx.clear().unwrap();
                    inside.clear();
                }
                0..3 => {
                    assert_eq!(tx.delete(&key).unwrap(), inside.remove(&key).is_some());
                }
                3..6 => {
                    let value = random.value();
                    tx.append(&key, &value).unwrap();
                    inside.entry(key).or_default().extend(value);
                }
                _ => {
                    let value = random.value();
                    tx.put(&key, &value).unwrap();
                    inside.insert(key, value);
                }
            }
        }
        if random.below(3) == 0 {
            assert!(tx.rollback_to(savepoint).unwrap());
            inside = before;
        }
    }
    match random.below(4) {
        0 => tx.abort().unwrap(),
        1 => {
            tx.commit().unwrap();
            *expected = inside;
        }
        _ => {
            tx.commit_relaxed().unwrap();
            *expected = inside;
        }
    }
}

fn open(path: &Path) -> Db {
    Options::new().create(true).open(path).unwrap()
}

#[test]
fn a_copy_made_of_the_changes_is_the_same() {
    for seed in 0..6 {
        let dir = tempfile::tempdir().unwrap();
        let db = open(&dir.path().join("db"));
        let mut changes = db.changes(Position::START).unwrap();
        let (mut random, mut expected, mut copy) = (Random(seed), Contents::new(), Contents::new());
        let mut count = 0;
        for step in 0..400 {
            act(&db, &mut random, &mut expected);
            if step % 97 == 0 {
                db.checkpoint().unwrap();
            }
            if step % 13 == 0 {
                count += follow(&mut changes, &mut copy);
                assert!(copy == expected, "seed {seed}, step {step}");
            }
        }
        count += follow(&mut changes, &mut copy);
        assert!(copy == expected && contents(&db) == expected, "seed {seed}");
        assert!(count > 200, "{count} changes");
        assert_eq!(changes.position(), db.position().unwrap());
        assert_eq!(changes.position().counter(), db.change_counter().unwrap());
    }
}

/// Every position between two changes leads on to the same changes, also those within a transaction that goes to the log in
/// chunks, with other changes between them.
#[test]
fn one_can_go_on_from_every_position() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(&dir.path().join("db"));
    let mut random = Random(7);
    let mut expected = Contents::new();
    let mut changes = db.changes(0).unwrap();
    let mut all = Vec::new();
    // Not more than the ring and the first log hold.
    for _ in 0..120 {
        act(&db, &mut random, &mut expected);
        while let Some(change) = changes.next().unwrap() {
            all.push(change);
        }
    }
    for (index, change) in all.iter().enumerate().step_by(5) {
        for from in [change.next, change.next.to_string().parse().unwrap()] {
            let mut again = db.changes(from).unwrap();
            for expected in &all[index + 1..] {
                assert_eq!(again.next().unwrap().as_ref(), Some(expected));
            }
            assert_eq!(again.next().unwrap(), None);
        }
        // Without the history.
        let next = db.changes(change.next.counter()).unwrap().next().unwrap();
        assert_eq!(next.as_ref(), all.get(index + 1));
    }
}

#[test]
fn positions_that_do_not_exist_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(&dir.path().join("db"));
    for n in 0..100u32 {
        db.put(&n.to_le_bytes(), b"value").unwrap();
    }
    let newest = db.change_counter().unwrap();
    match db.changes(newest + 1) {
        Err(Error::ChangesAhead { from, newest: told, .. }) => {
            assert_eq!((from, told), (newest + 1, newest));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(db.changes(newest - 3), Err(Error::InvalidOption { .. })));
    assert!(db.changes(newest).unwrap().next().unwrap().is_none());
    for text in ["", "-", "x", "1-", "1-2", "+1", "1-000000000000000g", "99999999999999999999"] {
        assert!(matches!(text.parse::<Position>(), Err(Error::InvalidOption { .. })), "{text}");
    }
    let memory = Db::in_memory().unwrap();
    assert!(matches!(memory.changes(0), Err(Error::NoChanges { .. })));
    // Another history.
    let other = open(&dir.path().join("other"));
    for n in 0..100u32 {
        other.put(&n.to_le_bytes(), b"value").unwrap();
    }
    assert_eq!(other.position().unwrap().counter(), newest);
    assert!(matches!(db.changes(other.position().unwrap()), Err(Error::ChangesLost { .. })));
}

#[test]
fn a_position_at_the_end_outlives_the_last_close() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let mut position = Position::START;
    for round in 0..5u32 {
        let db = open(&path);
        let mut changes = db.changes(position).unwrap();
        assert_eq!(changes.next().unwrap(), None);
        // One round changes nothing.
        for n in 0..100 * (round % 3) {
            db.put(&n.to_le_bytes(), &round.to_le_bytes()).unwrap();
        }
        if round % 2 == 0 {
            db.checkpoint().unwrap();
        }
        while let Some(change) = changes.next().unwrap() {
            assert!(change.sequence >= position.counter());
            position = change.next;
        }
        drop(changes);
        db.close().unwrap();
        // A change that the follower has not seen is gone with the log.
        if round == 3 {
            let db = open(&path);
            db.put(b"unseen", b"").unwrap();
            let after = db.position().unwrap();
            db.close().unwrap();
            let db = open(&path);
            match db.changes(position) {
                Err(Error::ChangesNotKept { from, oldest, .. }) => {
                    assert_eq!((from, oldest), (position.counter(), after.counter()));
                }
                other => panic!("{other:?}"),
            }
            position = after;
        }
    }
}

#[test]
fn sleepers_wake_for_their_key_only() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(&dir.path().join("db"));
    let large = vec![7; 700_000];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Others change all the time.
            let mut n = 0u32;
            while !stop.load(Ordering::Relaxed) {
                db.put(&(n % 50).to_le_bytes(), b"noise").unwrap();
                n += 1;
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        let changes: [&(dyn Fn() + Sync); 7] = [
            &|| db.put(b"key", b"value").unwrap(),
            // The same value once more.
            &|| db.put(b"key", b"value").unwrap(),
            &|| assert_eq!(db.append(b"key", b"more").unwrap(), 9),
            &|| db.put(b"key", &large).unwrap(),
            &|| assert!(db.delete(b"key").unwrap()),
            &|| {
                db.transaction(|tx| {
                    tx.put(b"other", &large)?;
                    tx.put(b"key", b"in a long transaction")
                })
                .unwrap();
            },
            &|| db.clear().unwrap(),
        ];
        for (number, change) in changes.iter().enumerate() {
            let waiter = scope.spawn(|| {
                let changed = db.wait_for_change(Some(b"key"), Some(Duration::from_secs(20)));
                (changed.unwrap(), Instant::now())
            });
            std::thread::sleep(Duration::from_millis(60));
            assert!(!waiter.is_finished(), "change {number}: woken by another key");
            let begun = Instant::now();
            change();
            let (changed, woken) = waiter.join().unwrap();
            assert!(changed, "change {number}");
            let late = woken.saturating_duration_since(begun);
            assert!(late < Duration::from_millis(1000), "change {number}: {late:?}");
        }
        let begun = Instant::now();
        let limit = Duration::from_millis(100);
        assert!(!db.wait_for_change(Some(b"key"), Some(limit)).unwrap());
        assert!(begun.elapsed() >= limit);
        assert!(db.wait_for_change(None, Some(Duration::from_secs(5))).unwrap());
        stop.store(true, Ordering::Relaxed);
    });
    // Nothing happens.
    let seen = db.change_counter().unwrap();
    let limit = Some(Duration::from_millis(50));
    assert_eq!(db.wait_for_change_since(None, seen, limit).unwrap(), None);
    assert!(!db.delete(b"absent").unwrap());
    assert_eq!(db.wait_for_change_since(Some(b"key"), seen, limit).unwrap(), None);
    // What has happened before the call counts if it was after `seen`.
    db.put(b"key", b"value").unwrap();
    let now = db.change_counter().unwrap();
    assert_eq!(db.wait_for_change_since(Some(b"key"), seen, None).unwrap(), Some(now));
    assert_eq!(db.wait_for_change_since(None, seen, None).unwrap(), Some(now));
    assert_eq!(db.wait_for_change_since(Some(b"other"), seen, limit).unwrap(), None);
}

#[test]
fn what_was_undone_is_no_change() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(&dir.path().join("db"));
    let seen = db.position().unwrap();
    let mut tx = db.begin().unwrap();
    let savepoint = tx.savepoint().unwrap();
    tx.put(b"key", &vec![1; 500_000]).unwrap();
    assert!(tx.rollback_to(savepoint).unwrap());
    tx.put(b"other", b"value").unwrap();
    tx.commit_relaxed().unwrap();
    let limit = Some(Duration::from_millis(20));
    assert_eq!(db.wait_for_change_since(Some(b"key"), seen.counter(), limit).unwrap(), None);
    let mut changes = db.changes(seen).unwrap();
    let change = changes.next().unwrap().unwrap();
    let put = Operation::Put { key: b"other".to_vec(), value: b"value".to_vec() };
    assert!(change.is_transaction);
    assert_eq!(change.operations, [put]);
    assert_eq!(changes.next().unwrap(), None);
}

#[test]
fn waiting_for_the_next_change() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(&dir.path().join("db"));
    let mut changes = db.changes(db.position().unwrap()).unwrap();
    assert_eq!(changes.wait_next(Some(Duration::from_millis(20))).unwrap(), None);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| changes.wait_next(None).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!waiter.is_finished());
        db.put(b"key", b"value").unwrap();
        let change = waiter.join().unwrap().unwrap();
        assert_eq!(change.operations[0].key(), Some(&b"key"[..]));
    });
}

fn keeping(path: &Path, bytes: u64) -> Db {
    // Checkpoints come often.
    Options::new().create(true).keep_log(bytes).checkpoint_log_bytes(1 << 20).open(path).unwrap()
}

/// The logs that are kept: where they begin, and their lengths.
fn kept(path: &Path) -> Vec<(std::path::PathBuf, u64)> {
    let prefix = format!("{}-k", path.file_name().unwrap().to_str().unwrap());
    let mut kept: Vec<_> = std::fs::read_dir(path.parent().unwrap())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_str().unwrap().starts_with(&prefix))
        .map(|entry| (entry.path(), entry.metadata().unwrap().len()))
        .collect();
    kept.sort();
    kept
}

#[test]
fn kept_logs_lead_through_closes_and_switches() {
    for seed in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let (mut random, mut expected, mut copy) = (Random(seed), Contents::new(), Contents::new());
        let mut position = Position::START;
        // Told at the first opening, and valid for all.
        keeping(&path, 1 << 30).close().unwrap();
        for session in 0..14 {
            let db = open(&path);
            for step in 0..random.below(80) {
                act(&db, &mut random, &mut expected);
                if step % 20 == 9 {
                    db.checkpoint().unwrap();
                }
                if step == 33 {
                    // In the middle of a session.
                    let mut changes = db.changes(position).unwrap();
                    follow(&mut changes, &mut copy);
                    position = changes.position();
                    assert!(copy == expected, "seed {seed}, session {session}, step {step}");
                }
            }
            db.close().unwrap();
            if session % 3 == 2 {
                let db = open(&path);
                let mut changes = db.changes(position).unwrap();
                follow(&mut changes, &mut copy);
                position = changes.position();
                assert!(copy == expected, "seed {seed}, session {session}");
            }
        }
        // And all once more from the beginning.
        let db = open(&path);
        let mut all = Contents::new();
        follow(&mut db.changes(0).unwrap(), &mut all);
        assert!(all == expected && contents(&db) == expected);
        assert!(kept(&path).len() > 10, "{:?}", kept(&path));
        db.close().unwrap();
        // Nothing but what is kept.
        let names = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(names, 1 + kept(&path).len());
        // Kept no longer.
        keeping(&path, 0).close().unwrap();
        assert_eq!(kept(&path), []);
    }
}

/// Some megabytes of log, with checkpoints.
fn busy(db: &Db, session: u32) {
    for n in 0..60_000u32 {
        db.put(&(n % 1000).to_le_bytes(), &[session as u8; 60]).unwrap();
        if n % 10_000 == 9_999 {
            db.checkpoint().unwrap();
        }
    }
}

#[test]
fn as_much_is_kept_as_was_asked_for_and_not_much_more() {
    const KEEP: u64 = 3 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let mut lagging = Position::START;
    for session in 0..6u32 {
        let db = keeping(&path, KEEP);
        busy(&db, session);
        // A checkpoint in the background may keep one more in between.
        let is_told = (0..1_000).any(|_| {
            let stat = db.stat().unwrap();
            assert_eq!(stat.keep_log_bytes, KEEP);
            stat.kept_log_bytes == kept(&path).iter().map(|(_, len)| len).sum::<u64>()
        });
        assert!(is_told);
        let now = db.change_counter().unwrap();
        if session > 0 {
            // The last time that it looked is too long ago, and it is told from where on it can follow.
            let oldest = match db.changes(lagging) {
                Err(Error::ChangesNotKept { from, oldest, .. }) => {
                    assert_eq!(from, lagging.counter());
                    oldest
                }
                other => panic!("{other:?}"),
            };
            assert!(now - oldest >= KEEP - 100 * 4096, "{now} {oldest}");
            let mut changes = db.changes(oldest).unwrap();
            let mut count = 0;
            while changes.next().unwrap().is_some() {
                count += 1;
            }
            assert!(count > 30_000, "{count}");
        }
        lagging = db.position().unwrap();
        // One log more than what is kept, at most.
        let bytes: u64 = kept(&path).iter().map(|(_, bytes)| bytes).sum();
        let log_bytes = (2 << 20).max(db.stat().unwrap().file_bytes);
        assert!(bytes <= KEEP + log_bytes, "{bytes} bytes are kept: {:?}", kept(&path));
        db.close().unwrap();
        // Behind it, so that the next session is too far away.
        let db = keeping(&path, KEEP);
        busy(&db, session);
    }
    // Many short sessions.
    const LITTLE: u64 = 256 << 10;
    keeping(&path, LITTLE).close().unwrap();
    for n in 0..200u32 {
        let db = open(&path);
        db.put(b"short", &n.to_le_bytes()).unwrap();
        db.close().unwrap();
    }
    let kept = kept(&path);
    let bytes: u64 = kept.iter().map(|(_, bytes)| bytes).sum();
    assert!(bytes <= LITTLE + (8 << 10) && kept.len() <= 65, "{bytes} bytes: {kept:?}");
}

#[test]
fn damaged_kept_logs_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let mut random = Random(3);
    let mut expected = Contents::new();
    let mut all = Vec::new();
    for _ in 0..5 {
        let db = keeping(&path, 1 << 30);
        for _ in 0..40 {
            act(&db, &mut random, &mut expected);
        }
        db.close().unwrap();
    }
    let db = open(&path);
    let mut changes = db.changes(0).unwrap();
    while let Some(change) = changes.next().unwrap() {
        all.push(change);
    }
    let files = kept(&path);
    assert!(files.len() >= 5);
    let mut found = 0;
    for round in 0..200 {
        let (file, len) = &files[random.below(files.len() as u64) as usize];
        let whole = std::fs::read(file).unwrap();
        let mut damaged = whole.clone();
        match random.below(5) {
            0 => damaged.truncate(random.below(*len) as usize),
            1 => {
                let at = random.below(128) as usize;
                damaged[at] ^= 1 << random.below(8);
            }
            2 => damaged[..].rotate_right(1 + random.below(len - 1) as usize),
            _ => {
                let at = random.below(*len) as usize;
                damaged[at] ^= 1 << random.below(8);
            }
        }
        std::fs::write(file, &damaged).unwrap();
        let mut count = 0;
        let result = db.changes(0).and_then(|mut changes| {
            while let Some(change) = changes.next()? {
                assert_eq!(change, all[count], "round {round}");
                count += 1;
            }
            Ok(())
        });
        match result {
            Ok(()) => assert_eq!(count, all.len()),
            Err(
                Error::Corrupt { .. } | Error::ChangesNotKept { .. } | Error::InvalidOption { .. },
            ) => found += 1,
            Err(other) => panic!("round {round}: {other:?}"),
        }
        std::fs::write(file, &whole).unwrap();
    }
    assert!(found > 100, "{found}");
    follow(&mut db.changes(0).unwrap(), &mut Contents::new());
    assert!(db.check().unwrap().problems.is_empty());
}

#[test]
fn an_older_copy_put_back_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let db = keeping(&path, 1 << 30);
    db.put(b"a", b"1").unwrap();
    let before = db.position().unwrap();
    db.close().unwrap();
    let copy = std::fs::read(&path).unwrap();
    let db = open(&path);
    db.put(b"b", b"lost").unwrap();
    let lost = db.position().unwrap();
    db.close().unwrap();
    std::fs::write(&path, copy).unwrap();
    let db = open(&path);
    assert!(matches!(db.changes(lost), Err(Error::ChangesLost { .. })));
    db.put(b"c", b"other").unwrap();
    db.put(b"d", b"other").unwrap();
    assert!(db.change_counter().unwrap() > lost.counter());
    assert!(matches!(db.changes(lost), Err(Error::ChangesLost { .. })));
    let keys = |from: Position| {
        let mut changes = db.changes(from).unwrap();
        let mut keys = Vec::new();
        while let Some(change) = changes.next().unwrap() {
            keys.push(change.operations[0].key().unwrap().to_vec());
        }
        keys
    };
    assert_eq!(keys(before), [b"c", b"d"]);
    assert_eq!(keys(Position::START), [b"a", b"c", b"d"]);
}

/// The ring then holds records of logs that are gone: they are too old, not damaged.
#[test]
fn many_checkpoints_with_little_between() {
    let dir = tempfile::tempdir().unwrap();
    let db = open(&dir.path().join("db"));
    let mut ends = Vec::new();
    for n in 0..6u32 {
        db.put(b"key", &n.to_le_bytes()).unwrap();
        ends.push(db.position().unwrap());
        db.checkpoint().unwrap();
    }
    let Err(Error::ChangesNotKept { from: 0, oldest, .. }) = db.changes(0) else { panic!() };
    assert!(db.changes(oldest).unwrap().next().unwrap().is_some());
    for (n, position) in ends.iter().enumerate() {
        match db.changes(*position) {
            Ok(mut changes) => assert_eq!(follow(&mut changes, &mut Contents::new()), 5 - n),
            Err(Error::ChangesNotKept { .. }) => assert!(position.counter() < oldest && n < 4),
            Err(other) => panic!("{other:?}"),
        }
    }
}

/// There is no log to look into: one can wait for anything, not for a key.
#[test]
fn waiting_in_memory() {
    let db = Options::new().open_in_memory().unwrap();
    let for_key = db.wait_for_change(Some(b"key"), Some(Duration::ZERO));
    assert!(matches!(for_key, Err(Error::NoChanges { .. })), "{for_key:?}");
    assert!(!db.wait_for_change(None, Some(Duration::ZERO)).unwrap());
    let rounds = 200u32;
    std::thread::scope(|scope| {
        let (waiting, is_waiting) = std::sync::mpsc::channel();
        let waiter = scope.spawn({
            let db = &db;
            move || {
                for _ in 0..rounds {
                    let seen = db.change_counter().unwrap();
                    waiting.send(()).unwrap();
                    let now = db.wait_for_change_since(None, seen, None).unwrap();
                    assert!(now.is_some_and(|now| now > seen));
                }
            }
        });
        for n in 0..rounds {
            is_waiting.recv().unwrap();
            if n % 2 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            db.put(b"key", &n.to_le_bytes()).unwrap();
        }
        waiter.join().unwrap();
    });
}
