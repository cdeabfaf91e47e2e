//! The role of one who waits for changes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ntdb::{Db, Operation};

use crate::args::Args;
use crate::board::Board;

/// Mark of the board: the waiter is about to wait for this change.
pub const WAITING: usize = 0;
/// Mark of the board: so many changes have been noticed.
pub const NOTICED: usize = 1;

/// Waits `n` times for a change of `key` (or of anything), for `millis` each; ends when that is over.
///
/// # Errors
/// What the database reports.
pub fn await_changes(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let db = Db::open(&args.database).map_err(|e| format!("open: {e}"))?;
    let fail = |e: ntdb::Error| format!("wait: {e}");
    let limit = Duration::from_millis(args.get("millis", 60_000));
    let key = args.text("key").map(str::as_bytes);
    let n: u64 = args.get("n", 1);
    let mut seen = db.change_counter().map_err(fail)?;
    for round in 1..=n {
        board.mark(WAITING).store(round, Ordering::SeqCst);
        match db.wait_for_change_since(key, seen, Some(limit)).map_err(fail)? {
            Some(now) => seen = now,
            None => return Ok(format!("{} changes", round - 1)),
        }
        board.mark(NOTICED).store(round, Ordering::SeqCst);
    }
    db.close().map_err(fail)?;
    Ok(format!("{n} changes"))
}

/// Follows the changes from the first on until each of `n` writers has written `until`: writer number w stores 0, 1, 2 and so on
/// under the key w. Demands each of them, in order.
///
/// # Errors
/// What is missing or out of order, or what the database reports.
pub fn follow_writers(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let db = Db::open(&args.database).map_err(|e| format!("open: {e}"))?;
    let (n, until): (u64, u64) = (args.get("n", 1), args.get("until", 1));
    let mut expected = vec![0; n as usize];
    let mut changes = db.changes(0).map_err(|e| format!("changes: {e}"))?;
    let mut count = 0;
    while expected.iter().any(|next| *next <= until) {
        let change = changes.wait_next(None).map_err(|e| format!("next: {e}"))?;
        for operation in change.ok_or("the wait has ended")?.operations {
            let Operation::Put { key, value } = operation else { return Err("no put".into()) };
            let number = |bytes: Vec<u8>| bytes.try_into().map(u64::from_le_bytes);
            let (Ok(writer), Ok(found)) = (number(key), number(value)) else {
                return Err("not what a writer stores".into());
            };
            let next = expected.get_mut(writer as usize).ok_or("no such writer")?;
            if found != *next {
                return Err(format!("writer {writer}: {found} follows, not {next}"));
            }
            *next += 1;
            count += 1;
            board.mark(NOTICED).store(count, Ordering::SeqCst);
        }
    }
    Ok(format!("{count} changes"))
}
