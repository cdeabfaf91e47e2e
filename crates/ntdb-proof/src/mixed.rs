//! The mixed workload: all single operations on a small hot set and a large one, by threads that
//! check whatever they see.
//!
//! Each thread is one writer. It knows exactly what its own keys hold and compares; of other
//! writers' keys it knows bounds from the notice board (see [`crate::board`]).

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ntdb::{Db, Durability, Options};

use crate::adopt::{self, Held};
use crate::board::{Board, KeyState};
use crate::layout::{
    LEDGER_KEYS, LOG_APPENDS, Layout, SHARED_KEYS, last_entry_in, ledger_key, log_key, log_of,
    pair_keys, shared_key,
};
use crate::rng::Rng;
use crate::value::{self, Stamp};

/// What a process of the workload does.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Keys of the hot set.
    pub hot: u64,
    /// Keys of the large set.
    pub large: u64,
    /// The number of its first writer.
    pub first_writer: u32,
    /// How many writers it has, each a thread.
    pub threads: u32,
    /// What all chance follows from. Each writer gets its own of it.
    pub seed: u64,
    /// How much of its work are reads.
    pub read_percent: u64,
    /// One in so many operations is a traversal of everything; 0 for none.
    pub scan_one_in: u64,
    /// One in so many operations waits for the disk; 0 for none.
    pub durable_one_in: u64,
    /// Whether some values are large.
    pub has_large_values: bool,
    /// Whether some operations are transactions.
    pub has_transactions: bool,
    /// How many operations each writer does; `None` for as many as it can.
    pub operations: Option<u64>,
}

/// Runs the writers until the board says stop, or they have done their operations.
///
/// # Errors
/// The promise that was broken.
pub fn run(
    options: &Options,
    database: &Path,
    board: &Path,
    tuning: Tuning,
) -> Result<String, String> {
    let board = Arc::new(Board::open(board).map_err(|e| format!("board: {e}"))?);
    let layout = Layout { writers: board.writers() as u32, hot: tuning.hot, large: tuning.large };
    let open = || options.open(database).map_err(|e| format!("open: {e}"));
    let shared = open()?;
    let threads: Vec<_> = (tuning.first_writer..tuning.first_writer + tuning.threads)
        .map(|writer| {
            // Every second thread has its own handle: opening twice in a process is legal.
            let db = if writer % 2 == 0 { Ok(shared.clone()) } else { open() };
            let board = board.clone();
            std::thread::spawn(move || {
                let mut writer = Writer::adopt(db?, board, layout, tuning, writer)?;
                writer.work()
            })
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked".to_string())??;
    }
    shared.close().map_err(|e| format!("close: {e}"))?;
    Ok(format!("operations {}", board.total_operations()))
}

/// What a writer knows about one of its keys.
pub(crate) struct Own {
    pub(crate) id: usize,
    pub(crate) held: Held,
    pub(crate) next_counter: u64,
}

pub(crate) struct Writer {
    pub(crate) db: Db,
    durable: Db,
    pub(crate) board: Arc<Board>,
    pub(crate) layout: Layout,
    tuning: Tuning,
    pub(crate) me: u32,
    pub(crate) rng: Rng,
    /// Its keys, those of the hot set first.
    pub(crate) own: Vec<Own>,
    hot: usize,
    appended: u64,
    /// Its last pair, and its last entry in the ledger.
    pub(crate) pair: u64,
    pub(crate) entry: u64,
    shared_counter: u64,
    /// Highest counter seen of each writer on each shared key.
    seen_shared: Vec<u64>,
}

impl Writer {
    fn adopt(
        db: Db,
        board: Arc<Board>,
        layout: Layout,
        tuning: Tuning,
        me: u32,
    ) -> Result<Writer, String> {
        adopt::settle(&db)?;
        adopt::whole(&db, &board, &layout, me)?;
        let pair = adopt::pair(&db, &board, me)?;
        let entry = adopt::entry(&db, &board, me)?;
        for (word, held) in [
            (board.pair_done(me), pair),
            (board.pair_begun(me), pair),
            (board.entry_done(me), entry),
            (board.entry_begun(me), entry),
        ] {
            word.store(held, Ordering::SeqCst);
        }
        let mut own = Vec::new();
        let mut hot = 0;
        for id in (me as usize..layout.keys()).step_by(layout.writers as usize) {
            let held = adopt::owned_key(&db, &board, &layout, id)?;
            let next_counter = board.begun(id).counter.max(board.done(id).counter) + 1;
            board.set_done(id, held.state);
            board.set_begun(id, held.state);
            own.push(Own { id, held, next_counter });
            hot += usize::from((id as u64) < layout.hot);
        }
        let appended = adopt::appended(&db, &board, me)?;
        board.append_done(me).store(appended, Ordering::SeqCst);
        board.append_begun(me).store(appended, Ordering::SeqCst);
        // Shared puts carry no state on the board; time orders the incarnations of a writer.
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .expect("a clock after 1970");
        Ok(Writer {
            durable: db.with_durability(Durability::Durable),
            db,
            board,
            layout,
            tuning,
            me,
            rng: Rng::new(tuning.seed ^ u64::from(me) << 32),
            own,
            hot,
            appended,
            pair,
            entry,
            shared_counter: now.as_nanos() as u64,
            seen_shared: vec![0; (SHARED_KEYS * u64::from(layout.writers)) as usize],
        })
    }

    fn work(&mut self) -> Result<(), String> {
        let operations = self.tuning.operations.unwrap_or(u64::MAX);
        while !self.board.stopped()
            && self.board.operations(self.me).load(Ordering::Relaxed) < operations
        {
            let start = Instant::now();
            let what = self.one_operation()?;
            let took = start.elapsed();
            // A scan is as long as the database is big; only single operations are waits.
            if what != "scan" {
                self.note_wait(took);
            }
            self.board.operations(self.me).fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn note_wait(&self, took: Duration) {
        let longest = self.board.longest_wait_ns(self.me);
        longest.fetch_max(took.as_nanos() as u64, Ordering::Relaxed);
    }

    fn one_operation(&mut self) -> Result<&'static str, String> {
        if self.tuning.scan_one_in > 0 && self.rng.one_in(self.tuning.scan_one_in) {
            self.scan()?;
            return Ok("scan");
        }
        if self.rng.percent(self.tuning.read_percent) {
            match self.rng.below(400) {
                0 => self.read_log()?,
                1..20 => self.read_shared()?,
                20..30 => self.read_ledger()?,
                30..70 if self.tuning.has_transactions => self.read_pair()?,
                _ => self.read_foreign()?,
            }
            return Ok("read");
        }
        match self.rng.below(100) {
            0..3 => self.append_to_log()?,
            3..8 => self.put_shared()?,
            8..10 => self.enter_under_lock()?,
            10..30 if self.tuning.has_transactions => self.transact()?,
            _ => self.change_own()?,
        }
        Ok("write")
    }

    /// A handle whose promise is now and then the stronger one.
    fn handle(&mut self) -> Db {
        let n = self.tuning.durable_one_in;
        if n > 0 && self.rng.one_in(n) { self.durable.clone() } else { self.db.clone() }
    }

    pub(crate) fn filler_len(&mut self) -> usize {
        let len = match self.rng.below(1000) {
            0 if self.tuning.has_large_values => self.rng.range(20_000, 200_000),
            1..20 => self.rng.range(500, 5_000),
            20..400 => self.rng.range(0, 120),
            _ => self.rng.range(0, 16),
        };
        len as usize
    }

    /// One of its keys, rather one of the hot set.
    pub(crate) fn any_own(&mut self) -> usize {
        let large = self.own.len() - self.hot;
        if self.hot > 0 && (large == 0 || self.rng.percent(60)) {
            self.rng.below(self.hot as u64) as usize
        } else {
            self.hot + self.rng.below(large as u64) as usize
        }
    }

    fn change_own(&mut self) -> Result<(), String> {
        let index = self.any_own();
        let kind = self.rng.below(100);
        let filler = self.filler_len();
        let db = self.handle();
        let own = &mut self.own[index];
        let key = self.layout.key(own.id);
        let present = own.held.state.present;
        let step = OwnStep { db: &db, board: &self.board, me: self.me, key: &key };
        let result = match (present, kind) {
            (true, 0..30) | (false, 40..70) => step.store(own, filler, Store::Put),
            (true, 30..45) => step.store(own, filler, Store::Replace),
            (false, 0..40) => step.store(own, filler, Store::Insert),
            (true, 45..62) if own.held.len < 16_384 => step.append(own, filler),
            (false, 70..80) => step.append(own, filler),
            (true, 62..82) => step.delete(own),
            (true, 82..87) => step.expect_refused(own, Store::Insert),
            (false, 80..86) => step.expect_refused(own, Store::Replace),
            (false, 86..92) => step.expect_absent(),
            _ => step.compare(own),
        };
        result.map_err(|e| {
            format!("writer {}, own key {}: {e}", self.me, String::from_utf8_lossy(&key))
        })
    }

    fn read_foreign(&mut self) -> Result<(), String> {
        let id = if self.layout.large == 0 || self.rng.percent(60) {
            self.rng.below(self.layout.hot)
        } else {
            self.layout.hot + self.rng.below(self.layout.large)
        } as usize;
        let key = self.layout.key(id);
        let done = self.board.done(id);
        let value = if self.rng.percent(50) {
            self.db.view(&key, |value| value::parse(&key, value))
        } else {
            self.db.get(&key).map(|value| value.map(|value| value::parse(&key, &value)))
        };
        let begun = self.board.begun(id);
        let name = || {
            format!(
                "key {} read by {}, done {done:?} before, begun {begun:?} after",
                String::from_utf8_lossy(&key),
                self.me
            )
        };
        match value.map_err(|e| format!("{}: {e}", name()))? {
            None if done.present && begun.counter == done.counter => {
                Err(format!("lost: {} is absent", name()))
            }
            None => Ok(()),
            Some(stamps) => {
                let stamps = stamps.map_err(|e| format!("{}: {e}", name()))?;
                let last = stamps[stamps.len() - 1];
                let good = last.writer == self.layout.owner(id)
                    && last.counter >= done.counter
                    && last.counter <= begun.counter
                    && (last.counter > done.counter || done.present);
                if good { Ok(()) } else { Err(format!("stale or invented: {}: {last:?}", name())) }
            }
        }
    }

    fn put_shared(&mut self) -> Result<(), String> {
        self.shared_counter += 1;
        let key = shared_key(self.rng.below(SHARED_KEYS));
        let stamp = Stamp { writer: self.me, counter: self.shared_counter, previous: 0 };
        let value = value::encode(&key, stamp, self.filler_len().min(3_000));
        self.handle().put(&key, &value).map_err(|e| format!("put shared key: {e}"))
    }

    fn read_shared(&mut self) -> Result<(), String> {
        let index = self.rng.below(SHARED_KEYS);
        let key = shared_key(index);
        let value = self.db.get(&key).map_err(|e| format!("get shared key: {e}"))?;
        let Some(value) = value else { return Ok(()) };
        let stamps = value::parse(&key, &value).map_err(|e| format!("shared key {index}: {e}"))?;
        let last = stamps[stamps.len() - 1];
        if stamps.len() != 1 || last.writer >= self.layout.writers {
            return Err(format!("invented: shared key {index} holds {stamps:?}"));
        }
        let at = (index * u64::from(self.layout.writers) + u64::from(last.writer)) as usize;
        if last.counter < self.seen_shared[at] {
            return Err(format!(
                "order lost: shared key {index} showed {} of writer {}, now {}",
                self.seen_shared[at], last.writer, last.counter
            ));
        }
        self.seen_shared[at] = last.counter;
        Ok(())
    }

    /// Adds an entry to the ledger by reading, changing and writing under a key lock.
    fn enter_under_lock(&mut self) -> Result<(), String> {
        let db = self.handle();
        let key = ledger_key((self.entry + 1) % LEDGER_KEYS);
        let guard = db.lock(&key).map_err(|e| format!("lock the ledger: {e}"))?;
        let value = self.entered(&key, |key| db.get(key))?;
        self.board.entry_begun(self.me).store(self.entry + 1, Ordering::SeqCst);
        db.put(&key, &value).map_err(|e| format!("put into the ledger: {e}"))?;
        drop(guard);
        self.entry += 1;
        self.board.entry_done(self.me).store(self.entry, Ordering::SeqCst);
        Ok(())
    }

    /// The value of a key of the ledger with the next entry of this writer. Nobody else can change
    /// it meanwhile.
    pub(crate) fn entered(
        &mut self,
        key: &[u8],
        get: impl FnOnce(&[u8]) -> ntdb::Result<Option<Vec<u8>>>,
    ) -> Result<Vec<u8>, String> {
        let entry = self.entry + 1;
        let mut stamps = adopt::stamps_of(get, key)?;
        let own = Stamp { writer: self.me, counter: entry, previous: 0 };
        let before = last_entry_in(entry % LEDGER_KEYS, entry - 1);
        match stamps.iter_mut().find(|stamp| stamp.writer == self.me) {
            Some(stamp) if stamp.counter == before => *stamp = own,
            None if before == 0 => stamps.push(own),
            other => {
                return Err(format!(
                    "entry lost or overwritten: the ledger holds {other:?} of its own writer, \
                     whose last one was {before}"
                ));
            }
        }
        let filler = self.rng.below(60) as usize;
        Ok(stamps.iter().flat_map(|&stamp| value::encode(key, stamp, filler)).collect())
    }

    fn read_ledger(&mut self) -> Result<(), String> {
        let index = self.rng.below(LEDGER_KEYS);
        let writers = 0..self.layout.writers;
        let load = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::SeqCst);
        let done: Vec<u64> =
            writers.clone().map(|writer| load(self.board.entry_done(writer))).collect();
        let stamps = adopt::stamps_of(|key| self.db.get(key), &ledger_key(index))?;
        for (writer, done) in writers.zip(done) {
            let begun = load(self.board.entry_begun(writer));
            let held = stamps.iter().find(|stamp| stamp.writer == writer);
            let held = held.map_or(0, |stamp| stamp.counter);
            if held < last_entry_in(index, done) || held > begun {
                return Err(format!(
                    "entry lost or invented: key {index} of the ledger holds {held} of writer \
                     {writer}, done {done} before, begun {begun} after"
                ));
            }
        }
        Ok(())
    }

    /// Looks at the two keys of a pair, one after the other: what was stored later in one
    /// transaction is not seen before what was stored with it.
    fn read_pair(&mut self) -> Result<(), String> {
        let writer = self.rng.below(u64::from(self.layout.writers)) as u32;
        let mut keys = pair_keys(writer);
        if self.rng.percent(50) {
            keys.reverse();
        }
        let done = self.board.pair_done(writer).load(Ordering::SeqCst);
        let mut held = [0; 2];
        for (key, held) in keys.iter().zip(&mut held) {
            let stamps = adopt::stamps_of(|key| self.db.get(key), key)?;
            *held = stamps.last().map_or(0, |stamp| stamp.counter);
        }
        let begun = self.board.pair_begun(writer).load(Ordering::SeqCst);
        if done <= held[0] && held[0] <= held[1] && held[1] <= begun {
            return Ok(());
        }
        Err(format!(
            "half a transaction is seen: the pair of writer {writer} holds {held:?}, done {done} \
             before, begun {begun} after"
        ))
    }

    fn append_to_log(&mut self) -> Result<(), String> {
        let counter = self.appended + 1;
        let first_in_log = self.appended.is_multiple_of(LOG_APPENDS);
        let previous = if first_in_log { 0 } else { self.appended };
        let key = log_key(log_of(counter));
        let stamp = Stamp { writer: self.me, counter, previous };
        let bytes = value::encode(&key, stamp, self.rng.below(40) as usize);
        self.board.append_begun(self.me).store(counter, Ordering::SeqCst);
        let len = self.db.append(&key, &bytes).map_err(|e| format!("append: {e}"))?;
        if len < bytes.len() as u64 {
            return Err(format!("append returned length {len}, less than was appended"));
        }
        self.board.append_done(self.me).store(counter, Ordering::SeqCst);
        self.appended = counter;
        Ok(())
    }

    fn read_log(&mut self) -> Result<(), String> {
        if self.appended == 0 {
            return Ok(());
        }
        let log = self.rng.below(log_of(self.appended) + 1);
        let key = log_key(log);
        let load = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::SeqCst);
        let done: Vec<u64> =
            (0..self.layout.writers).map(|w| load(self.board.append_done(w))).collect();
        let value = self.db.get(&key).map_err(|e| format!("get log: {e}"))?.unwrap_or_default();
        let begun: Vec<u64> =
            (0..self.layout.writers).map(|w| load(self.board.append_begun(w))).collect();
        let stamps = if value.is_empty() {
            Vec::new()
        } else {
            value::parse(&key, &value).map_err(|e| format!("log {log}: {e}"))?
        };
        let (low, high) = (log * LOG_APPENDS, (log + 1) * LOG_APPENDS);
        for writer in 0..self.layout.writers {
            let of_writer = stamps.iter().rev().find(|s| s.writer == writer);
            let held = of_writer.map_or(low, |s| s.counter);
            let (done, begun) = (done[writer as usize], begun[writer as usize]);
            if held < done.clamp(low, high) || held > begun.clamp(low, high) {
                return Err(format!(
                    "append lost or invented: log {log} holds {held} of writer {writer}, done \
                     {done} before, begun {begun} after"
                ));
            }
        }
        Ok(())
    }

    /// Goes over everything: each value whole, no key twice.
    fn scan(&mut self) -> Result<(), String> {
        let mut seen = HashSet::new();
        let mut problem = None;
        let result = self.db.for_each(|key, value| {
            if !seen.insert(key.to_vec()) {
                problem = Some(format!("key {} twice", String::from_utf8_lossy(key)));
            } else if let Err(e) = value::parse(key, value) {
                problem = Some(format!("key {}: {e}", String::from_utf8_lossy(key)));
            }
            if problem.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        result.map_err(|e| format!("for_each: {e}"))?;
        problem.map_or(Ok(()), |problem| Err(format!("iteration: {problem}")))
    }
}

#[derive(Clone, Copy)]
enum Store {
    Put,
    Insert,
    Replace,
}

/// One operation of an owner on its key.
struct OwnStep<'a> {
    db: &'a Db,
    board: &'a Board,
    me: u32,
    key: &'a [u8],
}

impl OwnStep<'_> {
    fn begin(&self, own: &Own, present: bool) -> KeyState {
        let state = KeyState { counter: own.next_counter, present };
        self.board.set_begun(own.id, state);
        state
    }

    fn finish(&self, own: &mut Own, held: Held) {
        self.board.set_done(own.id, held.state);
        own.held = held;
        own.next_counter = held.state.counter + 1;
    }

    fn store(&self, own: &mut Own, filler: usize, how: Store) -> Result<(), String> {
        let state = self.begin(own, true);
        let stamp = Stamp { writer: self.me, counter: state.counter, previous: 0 };
        let value = value::encode(self.key, stamp, filler);
        let stored = match how {
            Store::Put => self.db.put(self.key, &value).map(|()| true),
            Store::Insert => self.db.insert(self.key, &value),
            Store::Replace => self.db.replace(self.key, &value),
        };
        if !stored.map_err(|e| format!("store: {e}"))? {
            return Err(format!("{} refused", how.name()));
        }
        self.finish(own, Held { state, len: value.len(), crc: crc32c::crc32c(&value) });
        Ok(())
    }

    fn append(&self, own: &mut Own, filler: usize) -> Result<(), String> {
        let state = self.begin(own, true);
        let present = own.held.state.present;
        let previous = if present { own.held.state.counter } else { 0 };
        let stamp = Stamp { writer: self.me, counter: state.counter, previous };
        let bytes = value::encode(self.key, stamp, filler);
        let len = self.db.append(self.key, &bytes).map_err(|e| format!("append: {e}"))?;
        let expected = own.held.len + bytes.len();
        if len != expected as u64 {
            return Err(format!("append returned length {len} instead of {expected}"));
        }
        let crc = crc32c::crc32c_append(own.held.crc, &bytes);
        self.finish(own, Held { state, len: expected, crc });
        Ok(())
    }

    fn delete(&self, own: &mut Own) -> Result<(), String> {
        let state = self.begin(own, false);
        if !self.db.delete(self.key).map_err(|e| format!("delete: {e}"))? {
            return Err("delete says that the key was absent".into());
        }
        self.finish(own, Held { state, len: 0, crc: 0 });
        Ok(())
    }

    fn expect_refused(&self, own: &Own, how: Store) -> Result<(), String> {
        let value = b"never to be stored";
        let stored = match how {
            Store::Insert => self.db.insert(self.key, value),
            _ => self.db.replace(self.key, value),
        };
        if stored.map_err(|e| format!("{}: {e}", how.name()))? {
            return Err(format!("{} was not refused ({:?})", how.name(), own.held));
        }
        Ok(())
    }

    fn expect_absent(&self) -> Result<(), String> {
        if self.db.delete(self.key).map_err(|e| format!("delete: {e}"))? {
            return Err("delete says that the key was present".into());
        }
        Ok(())
    }

    fn compare(&self, own: &Own) -> Result<(), String> {
        let value = self.db.get(self.key).map_err(|e| format!("get: {e}"))?;
        let (len, crc) = value.as_ref().map_or((0, 0), |v| (v.len(), crc32c::crc32c(v)));
        let present = value.is_some();
        if present != own.held.state.present || len != own.held.len || crc != own.held.crc {
            return Err(format!(
                "holds {present}, {len} bytes, {crc:08x}, its owner last made it {:?}",
                own.held
            ));
        }
        if self.db.contains(self.key).map_err(|e| format!("contains: {e}"))? != present {
            return Err("contains and get disagree".into());
        }
        Ok(())
    }
}

impl Store {
    fn name(self) -> &'static str {
        match self {
            Store::Put => "put",
            Store::Insert => "insert",
            Store::Replace => "replace",
        }
    }
}
