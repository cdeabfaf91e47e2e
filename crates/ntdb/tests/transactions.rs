//! Transactions in one process, against a model.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::Duration;

use ntdb::{Db, Error, Options, Savepoint};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn new_db() -> (tempfile::TempDir, Db) {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::create(dir.path().join("a.ntdb")).unwrap();
    (dir, db)
}

fn contents(db: &Db) -> Model {
    let mut all = Model::new();
    db.for_each(|key, value| {
        assert!(all.insert(key.to_vec(), value.to_vec()).is_none(), "seen twice");
        ControlFlow::Continue(())
    })
    .unwrap();
    all
}

fn contents_of(tx: &ntdb::Transaction) -> Model {
    let mut all = Model::new();
    tx.for_each(|key, value| {
        assert!(all.insert(key.to_vec(), value.to_vec()).is_none(), "seen twice");
        ControlFlow::Continue(())
    })
    .unwrap();
    all
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[test]
fn all_or_nothing_is_seen() {
    let (_dir, db) = new_db();
    db.put(b"a", b"1").unwrap();
    let mut tx = db.begin().unwrap();
    tx.put(b"a", b"2").unwrap();
    assert!(tx.insert(b"b", b"3").unwrap());
    assert!(!tx.insert(b"b", b"4").unwrap());
    assert!(!tx.replace(b"c", b"5").unwrap());
    assert_eq!(tx.append(b"b", b"33").unwrap(), 3);
    assert_eq!(tx.get(b"b").unwrap().as_deref(), Some(&b"333"[..]));
    assert_eq!((tx.len(), db.len().unwrap()), (2, 1));
    assert_eq!(db.get(b"a").unwrap().as_deref(), Some(&b"1"[..]));
    assert!(!db.contains(b"b").unwrap());
    tx.commit().unwrap();
    assert_eq!(db.get(b"a").unwrap().as_deref(), Some(&b"2"[..]));
    assert_eq!(db.get(b"b").unwrap().as_deref(), Some(&b"333"[..]));
    let mut tx = db.begin().unwrap();
    assert!(tx.delete(b"a").unwrap());
    assert!(!tx.delete(b"a").unwrap());
    tx.clear().unwrap();
    assert!(tx.is_empty());
    drop(tx);
    assert_eq!(db.len().unwrap(), 2);
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn random_transactions_agree_with_a_model() {
    for seed in 1..=40u64 {
        let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (dir, mut db) = new_db();
        let mut model = Model::new();
        for _ in 0..rng.below(3000) {
            let key = rng.below(2000).to_le_bytes();
            db.put(&key, &key).unwrap();
            model.insert(key.to_vec(), key.to_vec());
        }
        for _ in 0..16 {
            one_transaction(&mut rng, &db, &mut model);
            if rng.below(3) == 0 {
                db.checkpoint().unwrap();
            }
            if rng.below(3) == 0 {
                db.put(b"single", &rng.next().to_le_bytes()).unwrap();
                model.insert(b"single".to_vec(), db.get(b"single").unwrap().unwrap());
            }
            assert!(contents(&db) == model, "seed {seed}");
            assert_eq!(db.len().unwrap(), model.len() as u64, "seed {seed}");
            let report = db.check().unwrap();
            assert!(report.is_clean(), "seed {seed}: {report:?}");
        }
        db.close().unwrap();
        db = Db::open(dir.path().join("a.ntdb")).unwrap();
        assert!(contents(&db) == model, "seed {seed}, after a reopen");
        let report = db.check().unwrap();
        assert!(report.is_clean(), "seed {seed}: {report:?}");
    }
}

fn one_transaction(rng: &mut Rng, db: &Db, model: &mut Model) {
    let mut now = model.clone();
    let mut saved: Vec<(Savepoint, Model)> = Vec::new();
    let mut tx = db.begin().unwrap();
    let keys = 1 + rng.below(4000);
    let operations = if rng.below(4) == 0 { rng.below(3) } else { rng.below(600) };
    for _ in 0..operations {
        let key = rng.below(keys).to_le_bytes().to_vec();
        let len = match rng.below(60) {
            0 => rng.below(20_000),
            1 => rng.below(300_000),
            2..10 => rng.below(2_000),
            _ => rng.below(30),
        } as usize;
        let value = vec![rng.next() as u8; len];
        match rng.below(100) {
            0..45 => {
                tx.put(&key, &value).unwrap();
                now.insert(key, value);
            }
            45..55 => {
                let done = tx.insert(&key, &value).unwrap();
                assert_eq!(done, !now.contains_key(&key));
                now.entry(key).or_insert(value);
            }
            55..75 => {
                assert_eq!(tx.delete(&key).unwrap(), now.remove(&key).is_some());
            }
            75..90 => {
                let whole = now.entry(key.clone()).or_default();
                whole.extend_from_slice(&value);
                assert_eq!(tx.append(&key, &value).unwrap(), whole.len() as u64);
            }
            90..94 => saved.push((tx.savepoint().unwrap(), now.clone())),
            94..97 if !saved.is_empty() => {
                let index = rng.below(saved.len() as u64) as usize;
                assert!(tx.rollback_to(saved[index].0).unwrap());
                for (later, _) in saved.drain(index + 1..) {
                    assert!(!tx.rollback_to(later).unwrap(), "rolled back over");
                }
                now = saved[index].1.clone();
            }
            97 if !saved.is_empty() => {
                let index = rng.below(saved.len() as u64) as usize;
                assert!(tx.release(saved[index].0).unwrap());
                saved.truncate(index);
            }
            98 if rng.below(20) == 0 => {
                tx.clear().unwrap();
                now.clear();
            }
            99 => tx.prepare().unwrap(),
            _ => {
                assert_eq!(tx.get(&key).unwrap().as_ref(), now.get(&key));
            }
        }
        assert_eq!(tx.len(), now.len() as u64);
    }
    if rng.below(2) == 0 {
        assert!(contents_of(&tx) == now);
    }
    assert!(contents(db) == *model, "something is seen before the commit");
    match rng.below(5) {
        0 => drop(tx),
        1 => tx.abort().unwrap(),
        2 => {
            tx.commit_relaxed().unwrap();
            *model = now;
        }
        _ => {
            tx.commit().unwrap();
            *model = now;
        }
    }
}

#[test]
fn a_thread_that_would_wait_for_itself_gets_an_error() {
    let (_dir, db) = new_db();
    let tx = db.begin().unwrap();
    let would = |result: Result<(), Error>| matches!(result, Err(Error::WouldDeadlock { .. }));
    assert!(would(db.begin().map(drop)));
    assert!(would(db.try_begin().map(drop)));
    assert!(would(db.put(b"a", b"b").map(drop)));
    assert!(would(db.put(b"a", &[0; 1 << 20]).map(drop)));
    assert!(would(db.delete(b"a").map(drop)));
    assert!(would(db.append(b"a", b"b").map(drop)));
    assert!(would(db.clear().map(drop)));
    assert!(would(db.lock(b"a").map(drop)));
    assert_eq!(db.get(b"a").unwrap(), None);
    drop(tx);
    let lock = db.lock(b"a").unwrap();
    assert!(would(db.begin().map(drop)));
    drop(lock);
    db.begin().unwrap().commit().unwrap();
    db.put(b"a", b"b").unwrap();
}

#[test]
fn others_wait_and_readers_do_not() {
    let (_dir, db) = new_db();
    let mut tx = db.begin().unwrap();
    tx.put(b"a", b"1").unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let brief = db.with_lock_timeout(Some(Duration::from_millis(50)));
            assert!(matches!(brief.put(b"a", b"2"), Err(Error::Locked { .. })));
            assert!(matches!(brief.begin(), Err(Error::Locked { .. })));
            assert!(matches!(brief.lock(b"x"), Err(Error::Locked { .. })));
            assert!(brief.try_begin().unwrap().is_none());
            assert!(brief.try_lock(b"x").unwrap().is_none());
            assert_eq!(db.get(b"a").unwrap(), None);
            db.checkpoint().unwrap();
            db.sync().unwrap();
        });
        other.join().unwrap();
        let waiting = scope.spawn(|| db.append(b"a", b"2").unwrap());
        std::thread::sleep(Duration::from_millis(20));
        tx.commit_relaxed().unwrap();
        assert_eq!(waiting.join().unwrap(), 2);
    });
    assert_eq!(db.get(b"a").unwrap().as_deref(), Some(&b"12"[..]));
}

#[test]
fn a_transaction_waits_for_key_locks() {
    let (_dir, db) = new_db();
    std::thread::scope(|scope| {
        let lock = db.lock(b"a").unwrap();
        let waiting = scope.spawn(|| {
            assert!(db.try_begin().unwrap().is_none());
            let mut tx = db.begin().unwrap();
            tx.append(b"a", b"t").unwrap();
            tx.commit_relaxed().unwrap();
        });
        std::thread::sleep(Duration::from_millis(30));
        // Who holds a key goes on, and may take more.
        db.append(b"a", b"1").unwrap();
        let more = db.lock(b"b").unwrap();
        db.append(b"b", b"1").unwrap();
        // Also what needs the claim itself.
        db.put(b"large", &[1; 1 << 20]).unwrap();
        drop(more);
        drop(lock);
        waiting.join().unwrap();
    });
    assert_eq!(db.get(b"a").unwrap().as_deref(), Some(&b"1t"[..]));
}

#[test]
fn the_closure_form_commits_and_aborts() {
    let (_dir, db) = new_db();
    let done: Result<u32, Error> = db.transaction(|tx| {
        tx.put(b"a", b"1")?;
        Ok(7)
    });
    assert_eq!(done.unwrap(), 7);
    let failed: Result<(), Box<dyn std::error::Error>> = db.transaction(|tx| {
        tx.put(b"a", b"2")?;
        Err("no".into())
    });
    assert!(failed.is_err());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        db.transaction(|tx| -> Result<(), Error> {
            tx.put(b"a", b"3")?;
            panic!("in the middle");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(db.get(b"a").unwrap().as_deref(), Some(&b"1"[..]));
    db.put(b"a", b"4").unwrap();
}

#[test]
fn in_memory_too() {
    let db = Options::new().open_in_memory().unwrap();
    let mut tx = db.begin().unwrap();
    for i in 0..10_000u32 {
        tx.put(&i.to_le_bytes(), &i.to_be_bytes()).unwrap();
        assert_eq!(db.get(&i.to_le_bytes()).unwrap(), None, "seen before the commit");
    }
    assert_eq!(db.len().unwrap(), 0);
    tx.commit().unwrap();
    assert_eq!(db.len().unwrap(), 10_000);
    assert!(db.check().unwrap().is_clean());
}

/// In a transaction a page need not hold a record's old and new version beside each other, so pages whose records grow are split only
/// when they are full.
#[test]
fn records_that_grow_fill_their_pages() {
    const USERS: u32 = 10_000;
    let (_dir, db) = new_db();
    let key = |user: u32| format!("{user:048}").into_bytes();
    let mut model = Model::new();
    db.transaction(|tx| {
        for user in 0..USERS {
            tx.insert(&key(user), &[b'.'; 64])?;
            model.insert(key(user), vec![b'.'; 64]);
        }
        Ok::<_, Error>(())
    })
    .unwrap();
    for round in 0..10u8 {
        let mut tx = db.begin().unwrap();
        for user in 0..USERS {
            if user % 2_500 == 0 {
                // What is undone must not have changed a page in place that was there before.
                let savepoint = tx.savepoint().unwrap();
                for user in 0..USERS / 20 {
                    tx.append(&key(user), &[b'x'; 40]).unwrap();
                    tx.put(&key(user + 1), &[b'y'; 400]).unwrap();
                }
                assert!(tx.rollback_to(savepoint).unwrap());
                assert!(tx.release(savepoint).unwrap());
            }
            let value = model.get_mut(&key(user)).unwrap();
            value.extend_from_slice(&[round; 32]);
            if user % 3 == 0 {
                assert!(tx.replace(&key(user), value).unwrap());
            } else {
                assert_eq!(tx.append(&key(user), &[round; 32]).unwrap(), value.len() as u64);
            }
        }
        if round == 4 {
            assert_eq!(contents_of(&tx), model);
        }
        tx.commit_relaxed().unwrap();
    }
    assert_eq!(contents(&db), model);
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    // Nine records fit in a page, seven if one of them must be there twice, and pages are some 70 % full.
    let each = USERS as f64 / report.pages as f64;
    assert!(each > 5.6, "{each} records in a page");
}

/// What a transaction replaces the durable checkpoint holds, so if that is much there is a checkpoint soon; a check that has the lock
/// for it just then does not prevent that.
#[test]
fn transactions_that_replace_everything_take_turns_with_two_trees() {
    const RECORDS: u32 = 60_000;
    let (_dir, db) = new_db();
    let all = |byte: u8| {
        db.transaction(|tx| (0..RECORDS).try_for_each(|n| tx.put(&n.to_le_bytes(), &[byte; 240])))
            .unwrap();
    };
    all(0);
    db.checkpoint().unwrap();
    let tree = db.check().unwrap().pages * u64::from(db.stat().unwrap().page_size);
    assert!(tree > 20 << 20, "{tree} bytes");
    for round in 1..=3 {
        let before = db.stat().unwrap();
        assert!(before.log_bytes < 1 << 20, "{before:?}");
        all(round);
        assert!(db.check().unwrap().is_clean());
        let begin = std::time::Instant::now();
        while db.stat().unwrap().checkpoints == before.checkpoints {
            assert!(begin.elapsed() < Duration::from_secs(30), "no checkpoint");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let file = db.stat().unwrap().file_bytes;
    assert!(file < tree * 5 / 2, "{file} bytes for a tree of {tree}");
}

/// A value that grows piece by piece in a transaction grows where it is, beside other records that take pages meanwhile; what is
/// rolled back or aborted leaves nothing.
#[test]
fn long_values_grow_where_they_are() {
    const PIECES: usize = 20_000;
    let (_dir, db) = new_db();
    let mut model = Model::new();
    let piece = |n: usize| [n as u8; 400];
    for round in 0..3u8 {
        let mut tx = db.begin().unwrap();
        for n in 0..PIECES {
            let value = model.entry(vec![round]).or_default();
            value.extend_from_slice(&piece(n));
            assert_eq!(tx.append(&[round], &piece(n)).unwrap(), value.len() as u64);
            if n % 8 == 0 {
                tx.put(&(n as u32).to_be_bytes(), &[round; 300]).unwrap();
                model.insert((n as u32).to_be_bytes().to_vec(), vec![round; 300]);
            }
            if n == PIECES / 4 {
                let savepoint = tx.savepoint().unwrap();
                for n in 0..PIECES / 4 {
                    tx.append(&[round], &piece(n + 1)).unwrap();
                    tx.append(b"gone", &piece(n)).unwrap();
                }
                assert!(tx.rollback_to(savepoint).unwrap());
                assert!(tx.release(savepoint).unwrap());
            }
        }
        assert_eq!(contents_of(&tx), model);
        tx.commit().unwrap();
        assert_eq!(contents(&db), model);
        assert!(db.check().unwrap().is_clean());
        db.checkpoint().unwrap();
        let mut aborted = db.begin().unwrap();
        for n in 0..PIECES / 10 {
            aborted.append(&[round], &piece(n)).unwrap();
            aborted.append(b"gone", &piece(n)).unwrap();
        }
        drop(aborted);
        assert!(db.check().unwrap().is_clean());
    }
}

/// What a value leaves on its way to its length is not taken from the file anew each time.
#[test]
fn a_value_that_grows_in_a_transaction_takes_what_it_needs() {
    const PIECES: usize = 40_000;
    let (_dir, db) = new_db();
    let mut tx = db.begin().unwrap();
    for n in 0..PIECES {
        tx.append(b"grows", &[n as u8; 400]).unwrap();
        if n % 40 == 0 {
            tx.put(&(n as u32).to_be_bytes(), &[1; 400]).unwrap();
        }
    }
    tx.commit().unwrap();
    assert!(db.check().unwrap().is_clean());
    let (file, data) = (db.stat().unwrap().file_bytes as usize, PIECES * 410);
    assert!(file < data * 3 / 2, "{file} bytes for {data}");
}
