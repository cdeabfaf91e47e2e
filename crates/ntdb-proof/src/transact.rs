//! The transactions of the mixed workload: changes to some of a writer's own keys, its pair, and an
//! entry in the ledger, with savepoints, all at once or not at all.

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use ntdb::Transaction;

use crate::adopt::{self, Held};
use crate::board::KeyState;
use crate::layout::{LEDGER_KEYS, ledger_key, pair_keys};
use crate::mixed::Writer;
use crate::value::{self, Stamp};

/// What the transaction has changed: own keys by index, whether the pair, whether the ledger.
#[derive(Clone, Default)]
struct Changes {
    own: BTreeMap<usize, Held>,
    pair: bool,
    entry: bool,
}

impl Writer {
    /// One transaction.
    pub(crate) fn transact(&mut self) -> Result<(), String> {
        let db = self.db.clone();
        // The chance is the same whether it has to wait or not.
        let tried = if self.rng.one_in(4) { db.try_begin() } else { Ok(None) };
        let tx = tried.and_then(|tx| tx.map_or_else(|| db.begin(), Ok));
        let mut tx = tx.map_err(|e| format!("begin: {e}"))?;
        let mut changes = Changes::default();
        let mut saved = Vec::new();
        let steps = if self.rng.one_in(50) { 200 } else { self.rng.below(12) };
        for _ in 0..steps {
            self.step(&mut tx, &mut changes, &mut saved)
                .map_err(|e| format!("transaction of writer {}: {e}", self.me))?;
        }
        let end = self.rng.below(10);
        if end < 2 {
            match end {
                0 => tx.abort().map_err(|e| format!("abort: {e}"))?,
                _ => drop(tx),
            }
            return self.compare_after_abort(&changes);
        }
        // What comes and goes within it has never been.
        changes.own.retain(|&index, held| held.state.present || self.held_present(index));
        for (&index, held) in &changes.own {
            self.board.set_begun(self.own[index].id, held.state);
        }
        if changes.pair {
            self.board.pair_begun(self.me).store(self.pair + 1, Ordering::SeqCst);
        }
        if changes.entry {
            self.board.entry_begun(self.me).store(self.entry + 1, Ordering::SeqCst);
        }
        let committed = if end == 2 { tx.commit() } else { tx.commit_relaxed() };
        committed.map_err(|e| format!("commit: {e}"))?;
        for (&index, &held) in &changes.own {
            self.board.set_done(self.own[index].id, held.state);
            self.own[index].held = held;
            self.own[index].next_counter = held.state.counter + 1;
        }
        if changes.pair {
            self.pair += 1;
            self.board.pair_done(self.me).store(self.pair, Ordering::SeqCst);
        }
        if changes.entry {
            self.entry += 1;
            self.board.entry_done(self.me).store(self.entry, Ordering::SeqCst);
        }
        Ok(())
    }

    fn held_present(&self, index: usize) -> bool {
        self.own[index].held.state.present
    }

    fn step(
        &mut self,
        tx: &mut Transaction,
        changes: &mut Changes,
        saved: &mut Vec<(ntdb::Savepoint, Changes)>,
    ) -> Result<(), String> {
        let text = |e: ntdb::Error| e.to_string();
        match self.rng.below(100) {
            0..8 => saved.push((tx.savepoint().map_err(text)?, changes.clone())),
            8..12 if !saved.is_empty() => {
                let index = self.rng.below(saved.len() as u64) as usize;
                saved.truncate(index + 1);
                if !tx.rollback_to(saved[index].0).map_err(text)? {
                    return Err("a savepoint is lost".into());
                }
                *changes = saved[index].1.clone();
            }
            12..15 if !saved.is_empty() => {
                let index = self.rng.below(saved.len() as u64) as usize;
                if !tx.release(saved[index].0).map_err(text)? {
                    return Err("a savepoint is lost".into());
                }
                saved.truncate(index);
            }
            15..18 => tx.prepare().map_err(text)?,
            18..30 => self.put_pair(tx, changes)?,
            30..38 if !changes.entry => {
                let key = ledger_key((self.entry + 1) % LEDGER_KEYS);
                let value = self.entered(&key, |key| tx.get(key))?;
                tx.put(&key, &value).map_err(text)?;
                changes.entry = true;
            }
            38..42 => {
                // Nobody else changes anything meanwhile.
                let writer = self.rng.below(u64::from(self.layout.writers)) as u32;
                let [a, b] = pair_keys(writer);
                let a = adopt::stamps_of(|key| tx.get(key), &a)?;
                let b = adopt::stamps_of(|key| tx.get(key), &b)?;
                if a != b {
                    return Err(format!("the pair of writer {writer} holds {a:?} and {b:?}"));
                }
            }
            42 if self.rng.one_in(50) => scan(tx)?,
            _ => self.change_in(tx, changes)?,
        }
        Ok(())
    }

    fn put_pair(&mut self, tx: &mut Transaction, changes: &mut Changes) -> Result<(), String> {
        let stamp = Stamp { writer: self.me, counter: self.pair + 1, previous: 0 };
        let filler = self.filler_len();
        for key in pair_keys(self.me) {
            let value = value::encode(&key, stamp, filler);
            tx.put(&key, &value).map_err(|e| format!("put a pair: {e}"))?;
        }
        changes.pair = true;
        Ok(())
    }

    /// Changes one of the own keys, after a look at it.
    fn change_in(&mut self, tx: &mut Transaction, changes: &mut Changes) -> Result<(), String> {
        let index = self.any_own();
        let (kind, filler) = (self.rng.below(10), self.filler_len());
        let own = &self.own[index];
        let key = self.layout.key(own.id);
        let name = String::from_utf8_lossy(&key).into_owned();
        let text = |e: ntdb::Error| format!("{name}: {e}");
        let before = changes.own.get(&index).copied().unwrap_or(own.held);
        compare(&name, tx.get(&key).map_err(text)?, &before)?;
        let present = before.state.present;
        let counter = (before.state.counter + 1).max(own.next_counter);
        let state = KeyState { counter, present: true };
        let appends = kind < 3 && before.len < 16_384;
        let previous = if appends && present { before.state.counter } else { 0 };
        let bytes = value::encode(&key, Stamp { writer: self.me, counter, previous }, filler);
        let held = match kind {
            _ if appends => {
                let len = tx.append(&key, &bytes).map_err(text)?;
                if len != (before.len + bytes.len()) as u64 {
                    return Err(format!("{name}: append returned length {len} after {before:?}"));
                }
                Held { state, len: len as usize, crc: crc32c::crc32c_append(before.crc, &bytes) }
            }
            3..5 => {
                if tx.delete(&key).map_err(text)? != present {
                    return Err(format!("{name}: delete does not know {before:?}"));
                }
                if !present {
                    return Ok(());
                }
                Held { state: KeyState { counter, present: false }, len: 0, crc: 0 }
            }
            _ => {
                let stored = match kind {
                    5 => tx.insert(&key, &bytes).map(|done| (done, !present)),
                    6 => tx.replace(&key, &bytes).map(|done| (done, present)),
                    _ => tx.put(&key, &bytes).map(|()| (true, true)),
                };
                let (done, expected) = stored.map_err(text)?;
                if done != expected {
                    return Err(format!("{name}: stored {done} although {before:?}"));
                }
                if !done {
                    return Ok(());
                }
                Held { state, len: bytes.len(), crc: crc32c::crc32c(&bytes) }
            }
        };
        changes.own.insert(index, held);
        Ok(())
    }

    fn compare_after_abort(&self, changes: &Changes) -> Result<(), String> {
        for &index in changes.own.keys() {
            let own = &self.own[index];
            let key = self.layout.key(own.id);
            let name = String::from_utf8_lossy(&key).into_owned();
            let value = self.db.get(&key).map_err(|e| format!("{name}: {e}"))?;
            compare(&name, value, &own.held).map_err(|e| format!("after an abort: {e}"))?;
        }
        Ok(())
    }
}

fn compare(name: &str, value: Option<Vec<u8>>, held: &Held) -> Result<(), String> {
    let (len, crc) = value.as_ref().map_or((0, 0), |v| (v.len(), crc32c::crc32c(v)));
    if value.is_some() == held.state.present && len == held.len && crc == held.crc {
        return Ok(());
    }
    let present = value.is_some();
    Err(format!("{name} holds {present}, {len} bytes, {crc:08x}, its owner made it {held:?}"))
}

/// Goes over everything as the transaction sees it: each value whole, no key twice, none missing.
fn scan(tx: &Transaction) -> Result<(), String> {
    let mut seen = HashSet::new();
    let mut problem = None;
    let visited = tx.for_each(|key, value| {
        if !seen.insert(key.to_vec()) {
            problem = Some(format!("key {} twice", String::from_utf8_lossy(key)));
        } else if let Err(e) = value::parse(key, value) {
            problem = Some(format!("key {}: {e}", String::from_utf8_lossy(key)));
        }
        if problem.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let visited = visited.map_err(|e| format!("for_each: {e}"))?;
    match problem {
        Some(problem) => Err(format!("iteration: {problem}")),
        None if visited != tx.len() => Err(format!("{visited} records, len() is {}", tx.len())),
        None => Ok(()),
    }
}
