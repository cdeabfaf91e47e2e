//! Small roles: one thing each.

use std::io::{BufRead, Write};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ntdb::{Db, Durability, Error, Options};

use crate::args::Args;
use crate::board::Board;
use crate::rng::Rng;
use crate::value::{self, Stamp};
use crate::worker::crowd::permanent_key;

fn options(args: &Args) -> Options {
    let mut options = Options::new();
    options.create(args.get("create", false));
    options.read_only(args.get("read_only", false));
    options.lock_timeout(match args.get("timeout_ms", 0u64) {
        0 => None,
        ms => Some(Duration::from_millis(ms)),
    });
    options
}

pub(crate) fn open(args: &Args) -> Result<Db, String> {
    options(args).open(&args.database).map_err(|e| format!("open: {e}"))
}

pub(super) fn say(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

/// Waits until the parent closes the pipe or sends a line.
pub(super) fn wait_for_parent() {
    let _ = std::io::stdin().lock().read_line(&mut String::new());
}

/// Opens, does one thing and ends.
///
/// # Errors
/// The promise that was broken.
pub fn once(args: &Args) -> Result<String, String> {
    let n: u64 = args.get("n", 0);
    let start = std::time::Instant::now();
    let db = open(args)?;
    let opened = start.elapsed();
    let key = format!("once-{n}").into_bytes();
    let fail = |e: Error| format!("operation {n}: {e}");
    match n % 5 {
        0 => db.put(&key, &n.to_le_bytes()).map_err(fail)?,
        1 => drop(db.get(b"stays").map_err(fail)?.ok_or("lost: the key that stays")?),
        2 => drop(db.insert(&key, b"one").map_err(fail)?),
        3 => drop(db.append(b"once-appended", b"x").map_err(fail)?),
        _ => drop(db.delete(format!("once-{}", n - 4).as_bytes()).map_err(fail)?),
    }
    if args.get("abandon", false) {
        // As a program does that exits without closing anything.
        println!("opened_us {}", opened.as_micros());
        std::process::exit(0);
    }
    db.close().map_err(fail)?;
    Ok(format!("opened_us {}", opened.as_micros()))
}

/// Makes one call with a time-out, and says what came of it: "ok", or "locked" and the process that is named.
///
/// # Errors
/// Any other error.
pub fn timed(args: &Args) -> Result<String, String> {
    let db = open(args)?;
    let large = vec![5u8; 700_000];
    let result = match args.text("call").expect("a call") {
        "checkpoint" => db.checkpoint(),
        "clear" => db.clear(),
        "sync" => db.sync(),
        "check" => match db.check() {
            Ok(report) if !report.is_clean() => return Err(format!("{report:?}")),
            result => result.map(drop),
        },
        "large" => db.put(b"large by another", &large),
        "append" => db.append(b"large", &large).map(drop),
        "lock" => db.lock(b"locked").map(drop),
        other => return Err(format!("{other}: no such call")),
    };
    match result {
        Ok(()) => Ok("ok".into()),
        Err(Error::Locked { owner, .. }) => Ok(format!("locked {owner}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Deletes the records from 0 to `n`, but those that `keep` divides; says so; waits until told, and closes.
///
/// # Errors
/// The promise that was broken.
pub fn thin_out(args: &Args) -> Result<String, String> {
    let db = open(args)?;
    let keep = args.get("keep", u32::MAX);
    for n in (0..args.get("n", 0u32)).filter(|n| n % keep != 0) {
        db.delete(&n.to_le_bytes()).map_err(|e| format!("delete: {e}"))?;
    }
    say("deleted");
    wait_for_parent();
    db.close().map_err(|e| format!("close: {e}"))?;
    Ok("closed".into())
}

/// Compacts the database.
///
/// # Errors
/// What the database reports.
pub fn compact(args: &Args) -> Result<String, String> {
    open(args)?.compact().map_err(|e| format!("compact: {e}"))?;
    Ok("compacted".into())
}

/// Checks the database.
///
/// # Errors
/// What is wrong with it.
pub fn check(args: &Args) -> Result<String, String> {
    let db = open(args)?;
    let report = db.check().map_err(|e| format!("check: {e}"))?;
    if report.is_clean() { Ok("clean".into()) } else { Err(format!("{report:?}")) }
}

/// Takes a key lock, says so, and holds it until told.
///
/// # Errors
/// The promise that was broken.
pub fn hold_lock(args: &Args) -> Result<String, String> {
    let db = open(args)?;
    let guard = db.lock(b"locked").map_err(|e| format!("lock: {e}"))?;
    say("held");
    wait_for_parent();
    drop(guard);
    Ok("released".into())
}

/// Looks at a value, says so, and goes on looking until told.
///
/// # Errors
/// The promise that was broken.
pub fn hold_view(args: &Args) -> Result<String, String> {
    let db = open(args)?;
    let seen = db.view(b"viewed", |value| {
        let before = value.to_vec();
        say("inside");
        wait_for_parent();
        value == before
    });
    match seen.map_err(|e| format!("view: {e}"))? {
        Some(true) => Ok("unchanged".into()),
        Some(false) => Err("a borrowed value changed".into()),
        None => Err("lost: the key to view".into()),
    }
}

/// Stores `n` records of `value` bytes under keys of its own, and reads each back later.
///
/// # Errors
/// The promise that was broken.
pub fn grow(args: &Args) -> Result<String, String> {
    let (n, me) = (args.get("n", 1000u64), args.get("writer", 0u32));
    let value_len: usize = args.get("value", 1000);
    let mut options = options(args);
    options.address_space(args.get("address_space", 0));
    let db = options.open(&args.database).map_err(|e| format!("open: {e}"))?;
    let mut longest = Duration::ZERO;
    for i in 0..n {
        let key = format!("grow-{me}-{i}").into_bytes();
        let stamp = Stamp { writer: me, counter: i + 1, previous: 0 };
        let start = std::time::Instant::now();
        db.put(&key, &value::encode(&key, stamp, value_len)).map_err(|e| format!("put: {e}"))?;
        longest = longest.max(start.elapsed());
        let back = format!("grow-{me}-{}", i / 2).into_bytes();
        let held = db.view(&back, |v| value::parse(&back, v)).map_err(|e| format!("view: {e}"))?;
        held.ok_or(format!("lost: record {}", i / 2))??;
    }
    Ok(format!("stored {n} longest_us {}", longest.as_micros()))
}

/// Goes over everything with little memory of its own; says how many records there are.
///
/// # Errors
/// The promise that was broken.
pub fn traverse(args: &Args) -> Result<String, String> {
    let start = std::time::Instant::now();
    let db = open(args)?;
    let opened = start.elapsed();
    let mut bytes = 0u64;
    let records = db
        .for_each(|key, value| {
            bytes += (key.len() + value.len()) as u64;
            ControlFlow::Continue(())
        })
        .map_err(|e| format!("for_each: {e}"))?;
    Ok(format!("records {records} bytes {bytes} opened_us {}", opened.as_micros()))
}

/// `n` gets among `keys` keys, which [`puts`] stored.
///
/// # Errors
/// The promise that was broken.
pub fn gets(args: &Args) -> Result<String, String> {
    let (n, keys) = (args.get("n", 1000u64), args.get("keys", 1000u64));
    let db = open(args)?;
    let mut found = 0;
    let mut buffer = [0; 64];
    for i in 0..n {
        let key = (i % keys).to_le_bytes();
        if db.get_into(&key, &mut buffer).map_err(|e| format!("get: {e}"))?.is_some() {
            found += 1;
        }
    }
    if found != n {
        return Err(format!("found {found} of {n}"));
    }
    Ok(format!("found {found}"))
}

/// `n` puts among `keys` keys.
///
/// # Errors
/// The promise that was broken.
pub fn puts(args: &Args) -> Result<String, String> {
    let (n, keys) = (args.get("n", 1000u64), args.get("keys", 1000u64));
    let db = open(args)?;
    for i in 0..n {
        db.put(&(i % keys).to_le_bytes(), &i.to_le_bytes()).map_err(|e| format!("put: {e}"))?;
    }
    Ok(format!("stored {n}"))
}

/// Durable puts, or small transactions, until the board says stop, or `n` of them; each acknowledged in mark `mark`.
///
/// # Errors
/// The promise that was broken.
pub fn durable(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let (n, mark) = (args.get("n", u64::MAX), args.get("mark", 0usize));
    let db = open(args)?.with_durability(Durability::Durable);
    let me: u32 = args.get("writer", 0);
    let mut done = 0;
    while done < n && !board.stopped() {
        let key = format!("durable-{me}-{}", done % 500).into_bytes();
        let stamp = Stamp { writer: me, counter: done + 1, previous: 0 };
        let value = value::encode(&key, stamp, 20);
        if args.get("transactions", false) {
            let both = [key, format!("other-{me}").into_bytes()];
            let stored = db.transaction(|tx| both.iter().try_for_each(|key| tx.put(key, &value)));
            stored.map_err(|e: Error| format!("transaction: {e}"))?;
        } else {
            db.put(&key, &value).map_err(|e| format!("put: {e}"))?;
        }
        done += 1;
        board.mark(mark).fetch_add(1, Ordering::SeqCst);
    }
    Ok(format!("stored {done}"))
}

/// Puts growing amounts until there is no room; says how many it stored; on the parent's sign
/// goes on with `after` more puts, which must succeed.
///
/// # Errors
/// The promise that was broken.
pub fn fill(args: &Args) -> Result<String, String> {
    let (value_len, after) = (args.get("value", 500usize), args.get("after", 0u64));
    let create = options(args).open(&args.database);
    let db = match create {
        Ok(db) => db,
        Err(Error::Full { .. } | Error::AddressSpace { .. }) => return Ok("full at open".into()),
        Err(e) => return Err(format!("open: {e}")),
    };
    let mut stored = 0u64;
    let limit: u64 = args.get("limit", u64::MAX);
    let reason = loop {
        if stored == limit {
            break "limit".to_string();
        }
        match db.put(&fill_key(stored), &fill_value(stored, value_len)) {
            Ok(()) => stored += 1,
            Err(Error::Full { .. }) => break "full".into(),
            Err(Error::AddressSpace { .. }) => break "address space".into(),
            Err(e) => return Err(format!("put {stored}: {e}")),
        }
    };
    demand_filled(&db, stored, value_len)?;
    say(&format!("stored {stored} until {reason}"));
    wait_for_parent();
    for i in stored..stored + after {
        db.put(&fill_key(i), &fill_value(i, value_len))
            .map_err(|e| format!("put {i} after room was made: {e}"))?;
    }
    demand_filled(&db, stored + after, value_len)?;
    Ok(format!("total {}", stored + after))
}

/// Key `i` of [`fill`].
pub fn fill_key(i: u64) -> Vec<u8> {
    format!("fill-{i}").into_bytes()
}

/// Value `i` of [`fill`].
pub fn fill_value(i: u64, len: usize) -> Vec<u8> {
    Rng::new(i).bytes(len)
}

/// Demands that exactly the first `stored` records of [`fill`] are in `db`, and that it is whole.
///
/// # Errors
/// The promise that was broken.
pub fn demand_filled(db: &Db, stored: u64, value_len: usize) -> Result<(), String> {
    for i in 0..stored {
        let held = db.get(&fill_key(i)).map_err(|e| format!("get {i}: {e}"))?;
        if held.as_deref() != Some(&fill_value(i, value_len)) {
            return Err(format!("lost or torn: record {i} of {stored}"));
        }
    }
    if db.contains(&fill_key(stored)).map_err(|e| format!("contains: {e}"))? {
        return Err(format!("record {stored} is there although its put failed"));
    }
    let report = db.check().map_err(|e| format!("check: {e}"))?;
    if report.is_clean() { Ok(()) } else { Err(format!("{report:?}")) }
}

/// Does everything that can be done with a file that may be damaged. Whatever the engine answers
/// is fine; it must answer.
///
/// # Errors
/// Never: a promise broken here is a panic, a signal or a hang.
pub fn exercise(args: &Args) -> Result<String, String> {
    // SAFETY: sets this process's alarm; no memory is involved.
    unsafe {
        libc::alarm(args.get("alarm", 20));
    }
    Ok(exercise_once(&args.database, args.get("read_only", false)))
}

/// As [`exercise`], in this process; returns the names of the answers.
pub fn exercise_once(path: &std::path::Path, read_only: bool) -> String {
    let mut answers = Vec::new();
    let mut note = |what: &str, error: Option<Error>| {
        let kind = error.map(|e| {
            let text = format!("{e:?}");
            text.split([' ', '(']).next().unwrap_or_default().to_string()
        });
        answers.push(format!("{what}={}", kind.as_deref().unwrap_or("ok")));
    };
    let db = match Options::new().read_only(read_only).open(path) {
        Ok(db) => db,
        Err(e) => {
            note("open", Some(e));
            return answers.join(" ");
        }
    };
    note("open", None);
    note("stat", db.stat().err());
    note("check", db.check().err());
    note("len", db.len().err());
    let mut keys = Vec::new();
    let walk = db.for_each(|key, _| {
        keys.push(key.to_vec());
        if keys.len() < 5_000 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    note("walk", walk.err());
    keys.truncate(50);
    keys.push(b"absent".to_vec());
    for key in &keys {
        let _ = db.get(key);
    }
    note("get", db.get(&keys[0]).err());
    if !read_only {
        for (i, key) in keys.iter().enumerate() {
            let _ = match i % 4 {
                0 => db.put(key, &[7; 300]),
                1 => db.append(key, &[8; 30]).map(drop),
                2 => db.delete(key).map(drop),
                _ => db.put(key, &[9; 3000]),
            };
        }
        note("put", db.put(b"fresh", b"value").err());
        note("checkpoint", db.checkpoint().err());
        note("clear", db.clear().err());
    }
    note("close", db.close().err());
    answers.join(" ")
}

/// Reads permanent keys until the board says stop; each must be there and whole, and its counter
/// must not go back.
///
/// # Errors
/// The promise that was broken.
pub fn reader(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let permanent: u64 = args.get("permanent", 100);
    let mut rng = Rng::new(args.get("seed", 1));
    let db = open(args)?;
    let mut seen = vec![0; permanent as usize];
    let mut reads = 0u64;
    let mut longest = Duration::ZERO;
    while !board.stopped() {
        let n = rng.below(permanent);
        let key = permanent_key(n);
        let start = std::time::Instant::now();
        let value = db.get(&key).map_err(|e| format!("get: {e}"))?;
        longest = longest.max(start.elapsed());
        let value = value.ok_or(format!("lost: permanent key {n}"))?;
        let stamps = value::parse(&key, &value).map_err(|e| format!("permanent key {n}: {e}"))?;
        let counter = stamps[stamps.len() - 1].counter;
        if args.get("ordered", true) && counter < seen[n as usize] {
            return Err(format!("key {n} went back from {} to {counter}", seen[n as usize]));
        }
        seen[n as usize] = counter;
        reads += 1;
        board.mark(2).fetch_add(1, Ordering::Relaxed);
    }
    Ok(format!("reads {reads} longest_us {}", longest.as_micros()))
}

/// Fork in the state that `scene` names; see `tests/fork.rs`.
///
/// # Errors
/// The promise that was broken.
pub fn fork(args: &Args) -> Result<String, String> {
    crate::worker::forked::run(&open(args)?, args)
}
