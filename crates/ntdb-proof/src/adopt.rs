//! Comparing the database with the notice board: what a dead owner acknowledged must be there, and
//! what it had only begun must be there as a whole or not at all.

use std::sync::atomic::Ordering;

use ntdb::Db;

use crate::board::{Board, KeyState};
use crate::layout::{
    LEDGER_KEYS, LOG_APPENDS, Layout, last_entry_in, ledger_key, log_key, log_of, pair_keys,
};
use crate::value::{self, Stamp};

/// What the database holds for an owned key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// State of the key as the database has it.
    pub state: KeyState,
    /// Length of its value.
    pub len: usize,
    /// CRC-32C of its value.
    pub crc: u32,
}

/// Reads owned key `id`, whose owner is known to be dead or idle, and compares it with the board.
///
/// # Errors
/// The promise that was broken.
pub fn owned_key(db: &Db, board: &Board, layout: &Layout, id: usize) -> Result<Held, String> {
    let key = layout.key(id);
    let (begun, done) = (board.begun(id), board.done(id));
    let name = || format!("{} (begun {begun:?}, done {done:?})", String::from_utf8_lossy(&key));
    let value = db.get(&key).map_err(|e| format!("get {}: {e}", name()))?;
    let Some(value) = value else {
        if done.present && (begun == done || begun.present) {
            return Err(format!("lost: {} is absent", name()));
        }
        let counter = if done.present { begun.counter } else { done.counter };
        return Ok(Held { state: KeyState { counter, present: false }, len: 0, crc: 0 });
    };
    let stamps = value::parse(&key, &value).map_err(|e| format!("{}: {e}", name()))?;
    let last = stamps[stamps.len() - 1];
    if last.writer != layout.owner(id) {
        return Err(format!("invented: {} was written by {}", name(), last.writer));
    }
    let state = KeyState { counter: last.counter, present: true };
    if state != done && state != begun {
        return Err(format!("lost, resurrected or invented: {} holds {last:?}", name()));
    }
    Ok(Held { state, len: value.len(), crc: crc32c::crc32c(&value) })
}

/// Counter of the last append to a shared log by `writer`, who is dead or idle, that the database
/// holds.
///
/// # Errors
/// The promise that was broken.
pub fn appended(db: &Db, board: &Board, writer: u32) -> Result<u64, String> {
    let begun = board.append_begun(writer).load(Ordering::SeqCst);
    let done = board.append_done(writer).load(Ordering::SeqCst);
    if begun == 0 {
        return Ok(0);
    }
    let log = log_of(begun);
    let held = last_in_log(db, log, writer)?;
    // The first append to a log that never came about leaves the writer with the log before.
    let held = if held == 0 { log * LOG_APPENDS } else { held };
    if held != begun && held != done {
        return Err(format!(
            "append of writer {writer} lost, doubled or invented: begun {begun}, done {done}, \
             the log holds {held}"
        ));
    }
    Ok(held)
}

fn last_in_log(db: &Db, log: u64, writer: u32) -> Result<u64, String> {
    let key = log_key(log);
    let Some(value) = db.get(&key).map_err(|e| format!("get log {log}: {e}"))? else {
        return Ok(0);
    };
    let stamps = value::parse(&key, &value).map_err(|e| format!("log {log}: {e}"))?;
    Ok(stamps.iter().rev().find(|s| s.writer == writer).map_or(0, |s| s.counter))
}

/// Sees to it that what the dead have begun is completed or dropped now: a read alone would not do
/// that, and see an operation that counts come about only later.
///
/// # Errors
/// What the database reports.
pub fn settle(db: &Db) -> Result<(), String> {
    // Whoever takes a key lock passes through the writer lock.
    db.lock(b"settle").map(drop).map_err(|e| format!("lock: {e}"))
}

/// What `key` holds: its stamps, none if it is absent.
///
/// # Errors
/// What the database reports, or what is wrong with the value.
pub fn stamps_of(
    get: impl FnOnce(&[u8]) -> ntdb::Result<Option<Vec<u8>>>,
    key: &[u8],
) -> Result<Vec<Stamp>, String> {
    let name = String::from_utf8_lossy(key);
    let value = get(key).map_err(|e| format!("get {name}: {e}"))?;
    value.map_or(Ok(Vec::new()), |value| {
        value::parse(key, &value).map_err(|e| format!("{name}: {e}"))
    })
}

/// Counter of the pair of `writer`, who is dead or idle, that the database holds.
///
/// # Errors
/// The promise that was broken.
pub fn pair(db: &Db, board: &Board, writer: u32) -> Result<u64, String> {
    let begun = board.pair_begun(writer).load(Ordering::SeqCst);
    let done = board.pair_done(writer).load(Ordering::SeqCst);
    let mut held = [0; 2];
    for (key, held) in pair_keys(writer).iter().zip(&mut held) {
        *held = stamps_of(|key| db.get(key), key)?.last().map_or(0, |stamp| stamp.counter);
    }
    if held[0] != held[1] || held[0] != begun && held[0] != done {
        return Err(format!(
            "half a transaction, or a lost or invented one: the pair of writer {writer} holds \
             {held:?}, begun {begun}, done {done}"
        ));
    }
    Ok(held[0])
}

/// The last entry in the ledger of `writer`, who is dead or idle, that the database holds.
///
/// # Errors
/// The promise that was broken.
pub fn entry(db: &Db, board: &Board, writer: u32) -> Result<u64, String> {
    let begun = board.entry_begun(writer).load(Ordering::SeqCst);
    let done = board.entry_done(writer).load(Ordering::SeqCst);
    let mut held = [0; LEDGER_KEYS as usize];
    for (index, held) in (0..).zip(&mut held) {
        let stamps = stamps_of(|key| db.get(key), &ledger_key(index))?;
        let own = stamps.iter().find(|stamp| stamp.writer == writer);
        *held = own.map_or(0, |stamp| stamp.counter);
    }
    let fits = |last| (0..).zip(&held).all(|(index, &held)| held == last_entry_in(index, last));
    match [begun, done].into_iter().find(|&last| fits(last)) {
        Some(last) => Ok(last),
        None => Err(format!(
            "entry of writer {writer} lost, overwritten or invented: begun {begun}, done {done}, \
             the ledger holds {held:?}"
        )),
    }
}

/// Demands that what `writer`, who is dead or idle, had begun last has happened as a whole or not at
/// all.
///
/// # Errors
/// What has happened, and what has not.
pub fn whole(db: &Db, board: &Board, layout: &Layout, writer: u32) -> Result<(), String> {
    let (mut happened, mut missing) = (Vec::new(), Vec::new());
    let mut note = |what: String, is_new: bool| {
        if is_new { happened.push(what) } else { missing.push(what) }
    };
    for id in (writer as usize..layout.keys()).step_by(layout.writers as usize) {
        let (begun, done) = (board.begun(id), board.done(id));
        if begun != done {
            let key = String::from_utf8_lossy(&layout.key(id)).into_owned();
            note(key, owned_key(db, board, layout, id)?.state == begun);
        }
    }
    let begun = board.pair_begun(writer).load(Ordering::SeqCst);
    if begun != board.pair_done(writer).load(Ordering::SeqCst) {
        note("the pair".into(), pair(db, board, writer)? == begun);
    }
    let begun = board.entry_begun(writer).load(Ordering::SeqCst);
    if begun != board.entry_done(writer).load(Ordering::SeqCst) {
        note("the entry".into(), entry(db, board, writer)? == begun);
    }
    if happened.is_empty() || missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "half a transaction of writer {writer}: {happened:?} happened, {missing:?} did not"
    ))
}

/// Compares the whole database with the board while no worker runs: every owned key, every append,
/// the number of records, and that nothing else is there.
///
/// # Errors
/// The promise that was broken.
pub fn everything(db: &Db, board: &Board, layout: &Layout) -> Result<u64, String> {
    settle(db)?;
    let mut records = 0;
    for id in 0..layout.keys() {
        if owned_key(db, board, layout, id)?.state.present {
            records += 1;
        }
    }
    let mut logs = 0;
    for writer in 0..layout.writers {
        let last = appended(db, board, writer)?;
        if last > 0 {
            logs = logs.max(log_of(last) + 1);
        }
    }
    for log in 0..logs {
        let key = log_key(log);
        let Some(value) = db.get(&key).map_err(|e| format!("get log {log}: {e}"))? else {
            return Err(format!("lost: the whole of log {log}"));
        };
        let stamps = value::parse(&key, &value).map_err(|e| format!("log {log}: {e}"))?;
        for writer in 0..layout.writers {
            let last = appended(db, board, writer)?;
            let expected = last.clamp(log * LOG_APPENDS, (log + 1) * LOG_APPENDS);
            let held: Vec<u64> =
                stamps.iter().filter(|s| s.writer == writer).map(|s| s.counter).collect();
            if !held.iter().copied().eq(log * LOG_APPENDS + 1..=expected) {
                return Err(format!("log {log}, writer {writer}: holds {held:?} of {expected}"));
            }
        }
    }
    for writer in 0..layout.writers {
        whole(db, board, layout, writer)?;
        entry(db, board, writer)?;
        if pair(db, board, writer)? > 0 {
            records += 2;
        }
    }
    let mut seen = 0;
    let mut strangers = Vec::new();
    db.for_each(|key, _| {
        seen += 1;
        let known: [&[u8]; 4] = [b"h", b"l", b"shared-", b"pair-"];
        if !known.iter().any(|known| key.starts_with(known)) {
            strangers.push(String::from_utf8_lossy(key).into_owned());
        }
        std::ops::ControlFlow::Continue(())
    })
    .map_err(|e| format!("for_each: {e}"))?;
    if !strangers.is_empty() {
        return Err(format!("invented keys: {strangers:?}"));
    }
    let len = db.len().map_err(|e| format!("len: {e}"))?;
    if len != seen {
        return Err(format!("len() says {len}, iteration saw {seen}"));
    }
    if seen < records + logs {
        return Err(format!("iteration saw {seen}, but {records} keys and {logs} logs are there"));
    }
    Ok(seen)
}
