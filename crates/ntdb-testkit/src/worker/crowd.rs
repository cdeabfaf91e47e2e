//! Roles for crowds: iterators beside writers that make the database grow and shrink, and counters
//! under a key lock.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ntdb::{Cursor, Db, Options};

use crate::args::Args;
use crate::board::Board;
use crate::rng::Rng;
use crate::value::{self, Stamp};

/// The bytes of permanent key `n`: there from beginning to end.
pub fn permanent_key(n: u64) -> Vec<u8> {
    format!("permanent-{n}").into_bytes()
}

/// A value for permanent key `n`.
pub fn permanent_value(n: u64, counter: u64, filler: usize) -> Vec<u8> {
    value::encode(&permanent_key(n), Stamp { writer: 0, counter, previous: 0 }, filler)
}

fn open(args: &Args) -> Result<Db, String> {
    Options::new().open(&args.database).map_err(|e| format!("open: {e}"))
}

/// Iterates until the board says stop; each pass must see every permanent key exactly once, and no
/// key twice.
///
/// # Errors
/// The promise that was broken.
pub fn iterate(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let permanent: u64 = args.get("permanent", 1000);
    let mut rng = Rng::new(args.get("seed", 1));
    let db = open(args)?;
    let mut passes = 0;
    loop {
        let mut seen: HashMap<Vec<u8>, u32> = HashMap::new();
        let how = rng.below(5);
        let mut problem = None;
        let mut visit = |key: &[u8], value: &[u8]| {
            *seen.entry(key.to_vec()).or_default() += 1;
            if let Err(e) = value::parse(key, value) {
                problem.get_or_insert(format!("{}: {e}", String::from_utf8_lossy(key)));
            }
        };
        match how {
            0 => {
                db.for_each_live(|key, value| {
                    visit(key, value);
                    ControlFlow::Continue(())
                })
                .map_err(|e| format!("for_each_live: {e}"))?;
            }
            1 => {
                for record in db.iter_live() {
                    let (key, value) = record.map_err(|e| format!("iter_live: {e}"))?;
                    visit(&key, &value);
                }
            }
            2 => {
                db.for_each(|key, value| {
                    visit(key, value);
                    ControlFlow::Continue(())
                })
                .map_err(|e| format!("for_each: {e}"))?;
            }
            3 => {
                for record in db.iter() {
                    let (key, value) = record.map_err(|e| format!("iter: {e}"))?;
                    visit(&key, &value);
                }
            }
            _ => in_parts(&db, &mut rng, &mut visit)?,
        }
        if let Some(problem) = problem {
            return Err(problem);
        }
        for (key, times) in &seen {
            if *times != 1 {
                return Err(format!(
                    "pass {passes} (way {how}) saw {} {times} times",
                    String::from_utf8_lossy(key)
                ));
            }
        }
        for n in 0..permanent {
            if !seen.contains_key(&permanent_key(n)) {
                return Err(format!("pass {passes} (way {how}) missed permanent key {n}"));
            }
        }
        passes += 1;
        board.mark(0).fetch_add(1, Ordering::SeqCst);
        if board.stopped() {
            return Ok(format!("passes {passes}"));
        }
    }
}

/// One pass that stops now and then, stores its position as bytes and goes on from there.
fn in_parts(db: &Db, rng: &mut Rng, visit: &mut impl FnMut(&[u8], &[u8])) -> Result<(), String> {
    let mut position = Cursor::default();
    loop {
        let mut iter = db.iter_live_from(&position);
        let part = rng.range(1, 500);
        for _ in 0..part {
            match iter.next() {
                Some(Ok((key, value))) => visit(&key, &value),
                Some(Err(e)) => return Err(format!("iter_live_from: {e}")),
                None => return Ok(()),
            }
        }
        let stored = iter.cursor().to_bytes();
        position = Cursor::from_bytes(&stored).ok_or("a stored cursor was not understood")?;
    }
}

/// Makes the database grow and shrink in waves, and rewrites permanent keys at other lengths.
///
/// # Errors
/// The promise that was broken.
pub fn churn(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let permanent: u64 = args.get("permanent", 1000);
    let wave: u64 = args.get("wave", 5000);
    let me: u32 = args.get("writer", 0);
    let mut rng = Rng::new(args.get("seed", 1));
    let db = open(args)?;
    let mut counter = 0;
    let mut waves = 0;
    while !board.stopped() {
        let size = rng.range(1, wave);
        for step in 0..2 * size {
            if step % 64 == 0 && board.stopped() {
                break;
            }
            let key = format!("passing-{me}-{}", step % size).into_bytes();
            counter += 1;
            if step < size {
                let stamp = Stamp { writer: me, counter, previous: 0 };
                let value = value::encode(&key, stamp, rng.below(200) as usize);
                db.put(&key, &value).map_err(|e| format!("put: {e}"))?;
            } else if !db.delete(&key).map_err(|e| format!("delete: {e}"))? {
                return Err(format!("lost: own key {} of wave {waves}", step % size));
            }
            if step % 8 == 0 && permanent > 0 {
                let n = rng.below(permanent);
                let filler = if rng.one_in(50) { 3_000 } else { rng.below(150) as usize };
                db.put(&permanent_key(n), &permanent_value(n, counter, filler))
                    .map_err(|e| format!("put: {e}"))?;
            }
        }
        waves += 1;
        board.mark(1).fetch_add(1, Ordering::SeqCst);
    }
    Ok(format!("waves {waves}"))
}

/// Adds 1 to counters, `n` times, each time under a key lock: read, add, write.
///
/// # Errors
/// The promise that was broken.
pub fn count(args: &Args) -> Result<String, String> {
    let n: u64 = args.get("n", 1000);
    let keys: u64 = args.get("keys", 1);
    let pairs: bool = args.get("pairs", false);
    let mut rng = Rng::new(args.get("seed", 1));
    let db = open(args)?;
    let mut longest = std::time::Duration::ZERO;
    for _ in 0..n {
        let start = Instant::now();
        let one = format!("sum-{}", rng.below(keys)).into_bytes();
        let two = format!("sum-{}", rng.below(keys)).into_bytes();
        let guard = if pairs { db.lock_many(&[&one, &two]) } else { db.lock(&one) };
        let guard = guard.map_err(|e| format!("lock: {e}"))?;
        add_one(&db, &one)?;
        if pairs {
            add_one(&db, &two)?;
        }
        drop(guard);
        longest = longest.max(start.elapsed());
    }
    Ok(format!("longest_wait_ms {}", longest.as_millis()))
}

fn add_one(db: &Db, key: &[u8]) -> Result<(), String> {
    let value = db.get(key).map_err(|e| format!("get: {e}"))?;
    let old = match value {
        Some(bytes) => u64::from_le_bytes(bytes.try_into().map_err(|_| "torn counter")?),
        None => 0,
    };
    db.put(key, &(old + 1).to_le_bytes()).map_err(|e| format!("put: {e}"))
}

/// The sum of all counters that [`count`] keeps.
///
/// # Errors
/// What the database reports.
pub fn sum(db: &Db, keys: u64) -> Result<u64, String> {
    let mut sum = 0;
    for n in 0..keys {
        let value = db.get(format!("sum-{n}").as_bytes()).map_err(|e| format!("get: {e}"))?;
        if let Some(bytes) = value {
            sum += u64::from_le_bytes(bytes.try_into().map_err(|_| "torn counter")?);
        }
    }
    Ok(sum)
}
