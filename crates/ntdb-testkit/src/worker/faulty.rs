//! The role that follows a script while system calls fail.
//!
//! An operation that fails for want of room must have changed nothing, and must succeed once there
//! is room. After a failed sync nothing further may be promised: the role ends there, and whoever
//! opens next finds what was promised before.

use std::sync::atomic::Ordering;

use ntdb::{Db, Error};

use crate::args::Args;
use crate::board::Board;
use crate::script::{Digest, Op, Script};
use crate::worker::scripted::{self, BEGUN, DONE, DURABLE};

/// Whether an error is one that a full disk or too little memory may cause.
fn is_shortage(error: &Error) -> bool {
    match error {
        Error::Full { .. } | Error::AddressSpace { .. } => true,
        Error::Io { source, .. } => source.raw_os_error() == Some(libc::ENOMEM),
        _ => false,
    }
}

/// Whether an error reports failing hardware.
fn is_failure(error: &Error) -> bool {
    match error {
        Error::Poisoned { .. } => true,
        Error::Io { source, .. } => source.raw_os_error() == Some(libc::EIO),
        Error::NotDurable { source, .. } => is_failure(source),
        _ => false,
    }
}

/// Follows the script; faults come from `NTDB_FAULT`. Reports how often an operation failed.
///
/// # Errors
/// The promise that was broken.
pub fn run(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    if args.text("hits").is_some() {
        crate::crash::count();
    }
    let script = scripted::script(args);
    let mut failures = 0;
    let Some(mut db) = open(args, &mut failures)? else {
        return Ok(format!("failures {failures} failed at open"));
    };
    for (n, op) in script.ops.iter().enumerate() {
        board.mark(BEGUN).store(n as u64 + 1, Ordering::SeqCst);
        if let Err(end) = attempt(&db, &script, n, op, &mut failures)? {
            return Ok(format!("failures {failures} {end}"));
        }
        if *op == Op::Reopen {
            match db.close() {
                Ok(()) => {}
                Err(e) if is_failure(&e) => {
                    return Ok(format!("failures {} failed at close {n}", failures + 1));
                }
                // What could not be written at the close is still in the logs.
                Err(e) if is_shortage(&e) => failures += 1,
                Err(e) => return Err(format!("close at {n}: {e}")),
            }
            db = match open(args, &mut failures)? {
                Some(db) => db,
                None => return Ok(format!("failures {failures} failed at open {n}")),
            };
        }
        board.mark(DONE).store(n as u64 + 1, Ordering::SeqCst);
        if op.promises_durability() {
            board.mark(DURABLE).store(n as u64 + 1, Ordering::SeqCst);
        }
    }
    scripted::check(&db, "at the end")?;
    if let Err(e) = db.close() {
        if !is_failure(&e) && !is_shortage(&e) {
            return Err(format!("close: {e}"));
        }
        failures += 1;
    }
    if args.text("hits").is_some() {
        write_hits(&args.path("hits")).map_err(|e| format!("hits: {e}"))?;
    }
    Ok(format!("failures {failures} followed to the end"))
}

/// Writes to `path` how often each call was made that a fault may be planned for.
///
/// # Errors
/// What the system reports.
pub fn write_hits(path: &std::path::Path) -> std::io::Result<()> {
    let mut text = String::new();
    for (name, calls) in ntdb::failpoint::fault_hits() {
        text.push_str(&format!("{name} {calls}\n"));
    }
    std::fs::write(path, text)
}

/// Opens; a fault may fail that once or twice (the second call of a pair, say).
fn open(args: &Args, failures: &mut u64) -> Result<Option<Db>, String> {
    for _ in 0..3 {
        match scripted::options(args).open(&args.database) {
            Ok(db) => return Ok(Some(db)),
            Err(e) if is_failure(&e) => {
                *failures += 1;
                return Ok(None);
            }
            Err(e) if is_shortage(&e) => *failures += 1,
            Err(e) => return Err(format!("open: {e}")),
        }
    }
    Err("open: fails again and again".into())
}

/// One operation, repeated if it failed for want of room. `Err(text)` inside ends the run.
fn attempt(
    db: &Db,
    script: &Script,
    n: usize,
    op: &Op,
    failures: &mut u64,
) -> Result<Result<(), String>, String> {
    for _ in 0..3 {
        match op.run(db) {
            Ok(()) => return Ok(Ok(())),
            Err(e) if is_shortage(&e) => {
                *failures += 1;
                let found = Digest::of(db).map_err(|e| format!("read after {n} failed: {e}"))?;
                if found != script.digests[n] {
                    return Err(format!(
                        "operation {n}, {}, failed ({e}), yet it changed something",
                        scripted::name(op)
                    ));
                }
                scripted::check(db, &format!("after operation {n} failed"))?;
            }
            // Done and visible, but not on disk: a later sync must manage that.
            Err(Error::NotDurable { source, .. }) if is_shortage(&source) => {
                *failures += 1;
                let found = Digest::of(db).map_err(|e| format!("read after {n} failed: {e}"))?;
                if found != script.digests[n + 1] {
                    return Err(format!("operation {n} says that it is done, and is not"));
                }
                if (0..3).all(|_| db.sync().is_err()) {
                    return Err(format!("operation {n}: cannot be synced afterwards"));
                }
                return Ok(Ok(()));
            }
            Err(e) if is_failure(&e) => {
                *failures += 1;
                // Reads go on; nothing is promised any more.
                Digest::of(db).map_err(|e| format!("read after {n} failed: {e}"))?;
                if matches!(e, Error::Poisoned { .. }) && db.sync().is_ok() {
                    return Err(format!("operation {n} failed ({e}), then a sync succeeded"));
                }
                return Ok(Err(format!("failed at {n}: {e}")));
            }
            Err(e) => return Err(format!("operation {n}: unexpected error {e:?}")),
        }
    }
    Err(format!("operation {n} fails again and again"))
}
