//! The roles that hold snapshots.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;

use ntdb::{Db, Options, Snapshot};

use crate::args::Args;
use crate::board::{Board, KeyState};
use crate::rng::Rng;
use crate::script::Digest;
use crate::value;
use crate::worker::simple::{say, wait_for_parent};
use ntdb_proof::layout::{LOG_APPENDS, Layout, log_key, log_of};

/// Holds `n` snapshots, with a change between any two (unless `read_only`); says "inside"; waits until told, and demands that
/// each is still what it was.
///
/// # Errors
/// The promise that was broken.
pub fn hold(args: &Args) -> Result<String, String> {
    let read_only = args.get("read_only", false);
    let db = Options::new().read_only(read_only).open(&args.database);
    let db = db.map_err(|e| format!("open: {e}"))?;
    let mut held = Vec::new();
    for n in 0..args.get("n", 1u64) {
        if !read_only {
            let key = format!("holder-{}", std::process::id());
            db.put(key.as_bytes(), &n.to_le_bytes()).map_err(|e| format!("put: {e}"))?;
        }
        let snapshot = db.snapshot().map_err(|e| format!("snapshot {n}: {e}"))?;
        let digest = Digest::of_snapshot(&snapshot).map_err(|e| format!("read: {e}"))?;
        held.push((snapshot, digest));
    }
    say("inside");
    wait_for_parent();
    for (n, (snapshot, digest)) in held.iter().enumerate() {
        let now = Digest::of_snapshot(snapshot).map_err(|e| format!("read again: {e}"))?;
        if now != *digest || now.records != snapshot.len() {
            return Err(format!("snapshot {n} was {digest:?} and is {now:?}"));
        }
    }
    drop(held);
    db.close().map_err(|e| format!("close: {e}"))?;
    Ok("unchanged".into())
}

/// Opens snapshots beside the mixed crowd, holds some of them, and demands of each that it is a moment between what was acknowledged
/// before it and what was begun after it.
///
/// # Errors
/// The promise that was broken.
pub fn observe(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let layout = Layout {
        writers: board.writers() as u32,
        hot: args.get("hot", 64),
        large: args.get("large", 0),
    };
    let db = Db::open(&args.database).map_err(|e| format!("open: {e}"))?;
    let mut rng = Rng::new(args.get("seed", 1));
    let mut held: VecDeque<Observed> = VecDeque::new();
    let (mut opened, mut compared) = (0, 0u64);
    while !board.stopped() {
        held.push_back(Observed::open(&db, &board, &layout)?);
        opened += 1;
        // Some at once, some when much has happened since.
        let n = rng.below(held.len() as u64) as usize;
        held[n].compare(&layout)?;
        compared += 1;
        if held.len() > 12 {
            held.remove(rng.below(12) as usize);
        }
        board.mark(1).fetch_add(1, SeqCst);
    }
    for observed in &held {
        observed.compare(&layout)?;
    }
    Ok(format!("opened {opened} compared {compared}"))
}

/// A snapshot, and what the board said just before and just after.
struct Observed {
    snapshot: Snapshot,
    done: Vec<KeyState>,
    begun: Vec<KeyState>,
    appends_done: Vec<u64>,
    appends_begun: Vec<u64>,
}

impl Observed {
    fn open(db: &Db, board: &Board, layout: &Layout) -> Result<Observed, String> {
        let appends_done = (0..layout.writers).map(|w| board.append_done(w).load(SeqCst)).collect();
        let done = (0..layout.keys()).map(|id| board.done(id)).collect();
        let snapshot = db.snapshot().map_err(|e| format!("snapshot: {e}"))?;
        let begun = (0..layout.keys()).map(|id| board.begun(id)).collect();
        let appends_begun =
            (0..layout.writers).map(|w| board.append_begun(w).load(SeqCst)).collect();
        Ok(Observed { snapshot, done, begun, appends_done, appends_begun })
    }

    fn compare(&self, layout: &Layout) -> Result<(), String> {
        for id in 0..layout.keys() {
            self.compare_key(layout, id)?;
        }
        let longest = self.appends_begun.iter().max().copied().unwrap_or(0);
        // The last logs: those before are full.
        let last = if longest == 0 { 0 } else { log_of(longest) };
        for log in last.saturating_sub(1)..=last {
            self.compare_log(layout, log)?;
        }
        let mut seen = 0;
        for record in self.snapshot.iter() {
            let (key, value) = record.map_err(|e| format!("iterate: {e}"))?;
            value::parse(&key, &value)
                .map_err(|e| format!("torn: {}: {e}", String::from_utf8_lossy(&key)))?;
            seen += 1;
        }
        if seen != self.snapshot.len() {
            return Err(format!("a snapshot of {} records shows {seen}", self.snapshot.len()));
        }
        Ok(())
    }

    fn compare_key(&self, layout: &Layout, id: usize) -> Result<(), String> {
        let key = layout.key(id);
        let (done, begun) = (self.done[id], self.begun[id]);
        let name = || {
            let key = String::from_utf8_lossy(&key);
            format!("key {key} in a snapshot, done {done:?} before, begun {begun:?} after")
        };
        let value = self.snapshot.view(&key, |value| value::parse(&key, value));
        match value.map_err(|e| format!("{}: {e}", name()))? {
            None if done.present && begun.counter == done.counter => {
                Err(format!("lost: {} is absent", name()))
            }
            None => Ok(()),
            Some(stamps) => {
                let stamps = stamps.map_err(|e| format!("{}: {e}", name()))?;
                let last = stamps[stamps.len() - 1];
                let good = last.writer == layout.owner(id)
                    && last.counter >= done.counter
                    && last.counter <= begun.counter
                    && (last.counter > done.counter || done.present);
                if good { Ok(()) } else { Err(format!("stale or invented: {}: {last:?}", name())) }
            }
        }
    }

    fn compare_log(&self, layout: &Layout, log: u64) -> Result<(), String> {
        let key = log_key(log);
        let value = self.snapshot.get(&key).map_err(|e| format!("log: {e}"))?.unwrap_or_default();
        let stamps = if value.is_empty() {
            Vec::new()
        } else {
            value::parse(&key, &value).map_err(|e| format!("log {log}: {e}"))?
        };
        let (low, high) = (log * LOG_APPENDS, (log + 1) * LOG_APPENDS);
        for writer in 0..layout.writers as usize {
            let last = stamps.iter().rev().find(|s| s.writer as usize == writer);
            let held = last.map_or(low, |s| s.counter);
            let (done, begun) = (self.appends_done[writer], self.appends_begun[writer]);
            if held < done.clamp(low, high) || held > begun.clamp(low, high) {
                return Err(format!(
                    "append lost or invented in a snapshot: log {log} holds {held} of writer \
                     {writer}, done {done} before, begun {begun} after"
                ));
            }
        }
        Ok(())
    }
}
