//! Roles that work in transactions: the clerks and auditors of a bank, crowds that commit, and
//! processes that hold one open.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ntdb::{Db, Error, Options};

use crate::args::Args;
use crate::board::Board;
use crate::powercut;
use crate::rng::Rng;
use crate::worker::simple::{open, say, wait_for_parent};

/// What every account has in the beginning.
pub const BALANCE: u64 = 1_000;
/// Mark of the board: transfers that were committed.
pub const TRANSFERS: usize = 0;
/// Mark of the board: audits.
pub const AUDITS: usize = 1;

fn text(error: Error) -> String {
    error.to_string()
}

fn account(n: u64) -> Vec<u8> {
    format!("account-{n}").into_bytes()
}

fn number(value: Option<Vec<u8>>) -> Result<u64, String> {
    let value = value.ok_or("lost: an account")?;
    let bytes = value.first_chunk().ok_or("torn: an account")?;
    Ok(u64::from_le_bytes(*bytes))
}

/// Opens a bank of `accounts` accounts.
///
/// # Errors
/// What the database reports.
pub fn open_bank(db: &Db, accounts: u64) -> ntdb::Result<()> {
    db.transaction(|tx| (0..accounts).try_for_each(|n| tx.put(&account(n), &BALANCE.to_le_bytes())))
}

/// Demands that the bank has as much money as in the beginning.
///
/// # Errors
/// What it has.
pub fn audit(
    accounts: u64,
    mut get: impl FnMut(&[u8]) -> ntdb::Result<Option<Vec<u8>>>,
) -> Result<(), String> {
    let mut total = 0;
    for n in 0..accounts {
        total += number(get(&account(n)).map_err(text)?)?;
    }
    if total == accounts * BALANCE {
        return Ok(());
    }
    Err(format!("the bank of {} has {total}", accounts * BALANCE))
}

/// One transfer between two accounts; whether it was committed.
fn transfer(db: &Db, rng: &mut Rng, accounts: u64) -> Result<bool, String> {
    let (from, to) = (account(rng.below(accounts)), account(rng.below(accounts)));
    let (amount, len) = (rng.below(50), 8 + rng.below(300) as usize);
    let end = rng.below(20);
    let mut tx = db.begin().map_err(text)?;
    let have = number(tx.get(&from).map_err(text)?)?;
    if have < amount || end == 0 {
        // Half of it is done, and given up.
        tx.put(&from, &0u64.to_le_bytes()).map_err(text)?;
        return Ok(false);
    }
    let mut value = vec![7; len];
    value[..8].copy_from_slice(&(have - amount).to_le_bytes());
    tx.put(&from, &value).map_err(text)?;
    let savepoint = (end < 4).then(|| tx.savepoint()).transpose().map_err(text)?;
    if let Some(savepoint) = savepoint {
        tx.put(&to, &u64::MAX.to_le_bytes()).map_err(text)?;
        tx.rollback_to(savepoint).map_err(text)?;
    }
    let had = number(tx.get(&to).map_err(text)?)?;
    value[..8].copy_from_slice(&(had + amount).to_le_bytes());
    tx.put(&to, &value).map_err(text)?;
    if end < 7 {
        tx.prepare().map_err(text)?;
    }
    let committed = if end == 7 { tx.commit() } else { tx.commit_relaxed() };
    committed.map_err(text)?;
    Ok(true)
}

/// Transfers money until the board says stop.
///
/// # Errors
/// The promise that was broken.
pub fn clerk(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let mut rng = Rng::new(args.get("seed", 1));
    let db = open(args)?;
    while !board.stopped() {
        if transfer(&db, &mut rng, args.get("accounts", 100))? {
            board.mark(TRANSFERS).fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok("closed the counter".into())
}

/// Adds up the accounts in snapshots and in transactions until the board says stop, by reads or by iteration.
///
/// # Errors
/// The promise that was broken.
pub fn auditor(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let accounts = args.get("accounts", 100);
    let db = open(args)?;
    while !board.stopped() {
        let snapshot = db.snapshot().map_err(text)?;
        audit(accounts, |key| snapshot.get(key)).map_err(|e| format!("in a snapshot: {e}"))?;
        drop(snapshot);
        let tx = db.begin().map_err(text)?;
        audit(accounts, |key| tx.get(key))?;
        let (mut total, mut seen) = (0, 0);
        tx.for_each(|_, value| {
            total += value.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            seen += 1;
            std::ops::ControlFlow::Continue(())
        })
        .map_err(text)?;
        if (total, seen) != (accounts * BALANCE, accounts) {
            return Err(format!("iteration found {total} in {seen} accounts"));
        }
        tx.abort().map_err(text)?;
        board.mark(AUDITS).fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok("audited".into())
}

/// Records that one transaction after the other, by several threads, hands on; for power cuts.
pub const BATON: &[u8] = b"baton";
/// How many of the last steps are kept.
pub const STEPS: u64 = 64;

/// The key of step `n`.
pub fn step_key(n: u64) -> Vec<u8> {
    format!("step-{}", n % STEPS).into_bytes()
}

/// Threads that hand on the baton and move money, and readers that note which baton they saw, until
/// the process is killed after `kill_after_us`, or a crash point comes first. Images of the disk are
/// kept for a power cut. Mark 2 of the board is the last step that was promised durable.
///
/// # Errors
/// The promise that was broken.
pub fn baton(args: &Args) -> Result<String, String> {
    let dir = args.database.parent().expect("a database in a directory");
    powercut::record(dir, &args.path("record"));
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let accounts: u64 = args.get("accounts", 20);
    let mut options = Options::new();
    options.create(true).checkpoint_log_bytes(args.get("checkpoint", 1 << 16));
    let db = options.open(&args.database).map_err(text)?;
    if db.is_empty().map_err(text)? {
        open_bank(&db, accounts).map_err(text)?;
        db.sync().map_err(text)?;
    }
    board.mark(3).store(1, Ordering::SeqCst);
    let seed: u64 = args.get("seed", 1);
    let kill_after = Duration::from_micros(args.get("kill_after_us", 10_000));
    std::thread::spawn(move || {
        std::thread::sleep(kill_after);
        // SAFETY: ends this process as a crash does.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    });
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|thread| {
                let (db, board) = (&db, &board);
                let mut rng = Rng::new(seed ^ thread << 32);
                scope.spawn(move || -> Result<(), String> {
                    loop {
                        match rng.below(4) {
                            0 => drop(transfer(db, &mut rng, accounts)?),
                            1 => note_baton(db, board, &mut rng, thread)?,
                            _ => hand_on(db, board, &mut rng)?,
                        }
                    }
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a panic".to_string())?)
    })?;
    Ok("ended".into())
}

fn read_baton(value: Option<Vec<u8>>) -> Result<u64, String> {
    value.map_or(Ok(0), |value| number(Some(value)))
}

fn hand_on(db: &Db, board: &Board, rng: &mut Rng) -> Result<(), String> {
    let mut tx = db.begin().map_err(text)?;
    let n = read_baton(tx.get(BATON).map_err(text)?)? + 1;
    tx.put(BATON, &n.to_le_bytes()).map_err(text)?;
    let mut value = vec![1; 8 + rng.below(400) as usize];
    value[..8].copy_from_slice(&n.to_le_bytes());
    tx.put(&step_key(n), &value).map_err(text)?;
    if rng.one_in(5) {
        tx.commit().map_err(text)?;
        board.mark(2).fetch_max(n, Ordering::SeqCst);
        return Ok(());
    }
    tx.commit_relaxed().map_err(text)
}

/// Outside of transactions: whoever has seen a baton is not there without it.
fn note_baton(db: &Db, board: &Board, rng: &mut Rng, thread: u64) -> Result<(), String> {
    let n = read_baton(db.get(BATON).map_err(text)?)?;
    let key = format!("seen-{thread}");
    db.put(key.as_bytes(), &n.to_le_bytes()).map_err(text)?;
    if rng.one_in(5) {
        db.sync().map_err(text)?;
        board.mark(2).fetch_max(n, Ordering::SeqCst);
    }
    Ok(())
}

/// Demands of what is there after a power cut: all that was promised, nothing without what it was
/// made from, and as much money as ever.
///
/// # Errors
/// The promise that was broken.
pub fn audit_baton(db: &Db, board: &Board, accounts: u64) -> Result<u64, String> {
    if board.mark(3).load(Ordering::SeqCst) == 0 {
        return Ok(0);
    }
    audit(accounts, |key| db.get(key))?;
    let n = read_baton(db.get(BATON).map_err(text)?)?;
    let promised = board.mark(2).load(Ordering::SeqCst);
    if n < promised {
        return Err(format!("lost: step {promised} was durable, the baton is at {n}"));
    }
    for step in n.saturating_sub(STEPS - 1).max(1)..=n {
        let held = read_baton(db.get(&step_key(step)).map_err(text)?)?;
        if held != step {
            return Err(format!("the baton is at {n}, but step {step} reads {held}"));
        }
    }
    for thread in 0..3 {
        let seen = read_baton(db.get(format!("seen-{thread}").as_bytes()).map_err(text)?)?;
        if seen > n {
            return Err(format!("thread {thread} had seen {seen}, the baton is at {n}"));
        }
    }
    Ok(n)
}

/// Small transactions in a tight loop for `ms` milliseconds, or until the board says stop; says how
/// many, and the longest wait for one to begin.
///
/// # Errors
/// The promise that was broken.
pub fn transact(args: &Args) -> Result<String, String> {
    let (me, puts) = (args.get("writer", 0u64), args.get("puts", 4u64));
    let time = Duration::from_millis(args.get("ms", 1_000));
    let db = open(args)?;
    say("open");
    wait_for_parent();
    let (mut done, mut longest) = (0u64, Duration::ZERO);
    let start = Instant::now();
    while start.elapsed() < time {
        let begin = crate::lab::Wait::begin();
        let mut tx = db.begin().map_err(text)?;
        longest = longest.max(begin.elapsed());
        for n in 0..puts {
            let key = format!("transact-{me}-{}", (done * puts + n) % 1_000);
            tx.put(key.as_bytes(), &done.to_le_bytes()).map_err(text)?;
        }
        tx.commit_relaxed().map_err(text)?;
        done += 1;
    }
    Ok(format!("done {done} longest_us {}", longest.as_micros()))
}

/// As [`transact`], with single puts.
///
/// # Errors
/// The promise that was broken.
pub fn single(args: &Args) -> Result<String, String> {
    let me: u64 = args.get("writer", 0);
    let time = Duration::from_millis(args.get("ms", 1_000));
    let db = open(args)?;
    say("open");
    wait_for_parent();
    let (mut done, mut longest) = (0u64, Duration::ZERO);
    let start = Instant::now();
    while start.elapsed() < time {
        let key = format!("single-{me}-{}", done % 1_000);
        let begin = crate::lab::Wait::begin();
        db.put(key.as_bytes(), &done.to_le_bytes()).map_err(text)?;
        longest = longest.max(begin.elapsed());
        done += 1;
    }
    Ok(format!("done {done} longest_us {}", longest.as_micros()))
}

/// Opens a transaction with `n` puts, says so, and commits it when told.
///
/// # Errors
/// The promise that was broken.
pub fn hold(args: &Args) -> Result<String, String> {
    let db = open(args)?;
    let mut tx = db.begin().map_err(text)?;
    for n in 0..args.get("n", 1_000u32) {
        tx.put(&n.to_le_bytes(), &[3; 100]).map_err(text)?;
    }
    if args.get("prepare", false) {
        tx.prepare().map_err(text)?;
    }
    say("held");
    wait_for_parent();
    tx.commit_relaxed().map_err(text)?;
    Ok("committed".into())
}

/// Threads that commit durably until a sync fails. Each is told, and told again when it tries once
/// more; says how many were told. Mark 0 counts what was promised.
///
/// # Errors
/// The promise that was broken.
pub fn commit_until_told(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let db = open(args)?;
    let threads: u64 = args.get("threads", 8);
    let told = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let (db, board, told) = (&db, &board, &told);
                scope.spawn(move || -> Result<(), String> {
                    let commit = |n: u64| {
                        let mut tx = db.begin()?;
                        tx.put(format!("a-{thread}").as_bytes(), &n.to_le_bytes())?;
                        tx.put(format!("b-{thread}").as_bytes(), &n.to_le_bytes())?;
                        tx.commit()
                    };
                    for n in 1..100_000 {
                        match commit(n) {
                            Ok(()) => board.mark(thread as usize).store(n, Ordering::SeqCst),
                            Err(Error::NotDurable { .. } | Error::Poisoned { .. }) => {
                                told.fetch_add(1, Ordering::SeqCst);
                                return match commit(n + 1) {
                                    Err(Error::NotDurable { .. } | Error::Poisoned { .. }) => {
                                        Ok(())
                                    }
                                    other => Err(format!("after a failed sync: {other:?}")),
                                };
                            }
                            Err(e) => return Err(format!("commit {n}: {e:?}")),
                        }
                    }
                    Err("nobody was told of a failed sync".into())
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a panic".to_string())?)
    })?;
    Ok(format!("told {}", told.into_inner()))
}

/// One transaction of `mib` MiB, in values of several lengths; says how much memory of its own it
/// took at most.
///
/// # Errors
/// The promise that was broken.
pub fn big(args: &Args) -> Result<String, String> {
    let bytes: u64 = args.get("mib", 300u64) << 20;
    let db = open(args)?;
    let mut rng = Rng::new(args.get("seed", 1));
    let (mut written, mut n, mut most) = (0, 0u64, 0);
    let mut tx = db.begin().map_err(text)?;
    while written < bytes {
        let len = match rng.below(1000) {
            0 => 3_000_000,
            1..30 => rng.range(10_000, 100_000),
            _ => rng.range(10, 3_000),
        };
        tx.put(&n.to_le_bytes(), &vec![n as u8; len as usize]).map_err(text)?;
        if n % 16 == 3 {
            tx.append(&(n / 2).to_le_bytes(), &[n as u8; 100]).map_err(text)?;
        }
        (written, n) = (written + len, n + 1);
        if n.is_multiple_of(500) {
            most = most.max(own_memory_kib());
        }
    }
    tx.prepare().map_err(text)?;
    most = most.max(own_memory_kib());
    tx.commit_relaxed().map_err(text)?;
    most = most.max(own_memory_kib());
    Ok(format!("records {n} own_kib {most}"))
}

/// Memory of this process that is no file's.
fn own_memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

/// A transaction of `n` puts that is prepared; then every allocation fails, and it is committed.
///
/// # Errors
/// If that fails.
pub fn prepared(args: &Args) -> Result<String, String> {
    let db = open(args)?;
    let n: u64 = args.get("n", 100);
    // So that the log, the ring and the lists of pages are at any place.
    for i in 0..args.get("before", 0u64) {
        db.put(&(i % 500).to_le_bytes(), &[1; 200]).map_err(text)?;
    }
    let mut tx = db.begin().map_err(text)?;
    for i in 0..n {
        tx.put(&(i % 5_000).to_le_bytes(), &vec![2; args.get("value", 100)]).map_err(text)?;
    }
    tx.prepare().map_err(text)?;
    let failing = ["allocate:data", "allocate:log", "allocate:shm", "append:log"];
    let failing = failing.map(|name| format!("{name}:ENOSPC:1+"));
    let plan = ntdb::failpoint::Plan::parse(None, None, Some(&failing.join(",")))?;
    ntdb::failpoint::set_plan(plan);
    let committed = if args.get("durable", false) { tx.commit() } else { tx.commit_relaxed() };
    ntdb::failpoint::set_plan(ntdb::failpoint::Plan::default());
    committed.map_err(|e| format!("a prepared transaction is not committed: {e:?}"))?;
    for i in 0..n.min(5_000) {
        if db.get(&i.to_le_bytes()).map_err(text)?.as_deref()
            != Some(&vec![2; args.get("value", 100)])
        {
            return Err(format!("record {i} is not there"));
        }
    }
    db.close().map_err(text)?;
    Ok("committed".into())
}

/// Versions that a transaction has read and written, in a file, for the proof that there is an order.
/// Each transaction reads some keys, and writes some of those under a version of its own; before it
/// commits, it writes `try BEGIN ID KEY=VERSION... ! KEY=VERSION...`, and behind it `done ID END`, or
/// `gone ID` if it is given up.
///
/// # Errors
/// The promise that was broken.
pub fn historian(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let history = std::fs::OpenOptions::new().append(true).create(true).open(args.path("history"));
    let mut history = history.map_err(|e| format!("history: {e}"))?;
    let mut note = |line: String| history.write_all(line.as_bytes()).map_err(|e| e.to_string());
    let keys: u64 = args.get("keys", 30);
    let me: u64 = args.get("me", 1);
    let mut rng = Rng::new(args.get("seed", 1));
    let db = open(args)?;
    let mut n = 0u64;
    while !board.stopped() {
        n += 1;
        let id = me << 32 | n;
        let began = now_ns();
        let mut tx = db.begin().map_err(text)?;
        let (mut reads, mut writes) = (String::new(), String::new());
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..rng.range(1, 5) {
            let key = rng.below(keys);
            if !seen.insert(key) {
                continue;
            }
            let name = key.to_le_bytes();
            let value = tx.get(&name).map_err(text)?;
            reads.push_str(&format!(" {key}={}", read_baton(value)?));
            if rng.percent(60) {
                let mut value = vec![0; 8 + rng.below(200) as usize];
                value[..8].copy_from_slice(&id.to_le_bytes());
                tx.put(&name, &value).map_err(text)?;
                writes.push_str(&format!(" {key}={id}"));
            }
        }
        note(format!("try {began} {id}{reads} !{writes}\n"))?;
        match rng.below(10) {
            0 => {
                tx.abort().map_err(text)?;
                note(format!("gone {id}\n"))?;
            }
            1 => {
                tx.commit().map_err(text)?;
                note(format!("done {id} {}\n", now_ns()))?;
            }
            _ => {
                tx.commit_relaxed().map_err(text)?;
                note(format!("done {id} {}\n", now_ns()))?;
            }
        }
        board.mark(0).fetch_add(1, Ordering::Relaxed);
    }
    Ok("written".into())
}

/// The time, the same for all processes.
fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills the structure in.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
