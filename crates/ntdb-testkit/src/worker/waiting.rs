//! The role of one who waits for changes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ntdb::Db;

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
