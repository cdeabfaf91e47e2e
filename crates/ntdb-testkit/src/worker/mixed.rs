//! The mixed workload: all single operations on a small hot set and a large one, by threads that
//! check whatever they see.
//!
//! Each thread is one writer. It knows exactly what its own keys hold and compares; of other
//! writers' keys it knows bounds from the notice board (see [`crate::board`]).

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ntdb::{Db, Durability, Options};

use crate::args::Args;
use crate::board::{Board, KeyState};
use crate::rng::Rng;
use crate::value::{self, Stamp};
use crate::worker::adopt::{self, Held};
use crate::worker::layout::{LOG_APPENDS, Layout, SHARED_KEYS, log_key, log_of, shared_key};

/// Runs `threads` writers, numbered from `writer`, until the board says stop.
///
/// # Errors
/// The promise that was broken.
pub fn run(args: &Args) -> Result<String, String> {
    let board = Arc::new(Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?);
    let layout = Layout {
        writers: board.writers() as u32,
        hot: args.get("hot", 64),
        large: args.get("large", 50_000),
    };
    let (first, threads) = (args.get("writer", 0u32), args.get("threads", 2u32));
    let seed: u64 = args.get("seed", 1);
    let tuning = Tuning {
        read_percent: args.get("reads", 50),
        scans: args.get("scans", 1) != 0,
        durable_one_in: args.get("durable_one_in", 0),
        large_values: args.get("large_values", 1) != 0,
    };
    let open = || Options::new().open(&args.database).map_err(|e| format!("open: {e}"));
    let shared = open()?;
    let threads: Vec<_> = (first..first + threads)
        .map(|writer| {
            // Every second thread has its own handle: opening twice in a process is legal.
            let db = if writer % 2 == 0 { Ok(shared.clone()) } else { open() };
            let board = board.clone();
            std::thread::spawn(move || {
                let mut writer = Writer::adopt(db?, board, layout, tuning, writer, seed)?;
                writer.work()
            })
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked".to_string())??;
    }
    Ok(format!("operations {}", board.total_operations()))
}

#[derive(Clone, Copy)]
struct Tuning {
    read_percent: u64,
    scans: bool,
    durable_one_in: u64,
    large_values: bool,
}

/// What a writer knows about one of its keys.
struct Own {
    id: usize,
    held: Held,
    next_counter: u64,
}

struct Writer {
    db: Db,
    durable: Db,
    board: Arc<Board>,
    layout: Layout,
    tuning: Tuning,
    me: u32,
    rng: Rng,
    hot: Vec<Own>,
    large: Vec<Own>,
    appended: u64,
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
        seed: u64,
    ) -> Result<Writer, String> {
        let mut hot = Vec::new();
        let mut large = Vec::new();
        for id in (me as usize..layout.keys()).step_by(layout.writers as usize) {
            let held = adopt::owned_key(&db, &board, &layout, id)?;
            let next_counter = board.begun(id).counter.max(board.done(id).counter) + 1;
            board.set_done(id, held.state);
            board.set_begun(id, held.state);
            let own = Own { id, held, next_counter };
            if (id as u64) < layout.hot { hot.push(own) } else { large.push(own) }
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
            rng: Rng::new(seed ^ u64::from(me) << 32),
            hot,
            large,
            appended,
            shared_counter: now.as_nanos() as u64,
            seen_shared: vec![0; (SHARED_KEYS * u64::from(layout.writers)) as usize],
        })
    }

    fn work(&mut self) -> Result<(), String> {
        while !self.board.stopped() {
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
        if self.tuning.scans && self.rng.one_in(200_000) {
            self.scan()?;
            return Ok("scan");
        }
        if self.rng.percent(self.tuning.read_percent) {
            match self.rng.below(400) {
                0 => self.read_log()?,
                1..20 => self.read_shared()?,
                _ => self.read_foreign()?,
            }
            return Ok("read");
        }
        match self.rng.below(100) {
            0..3 => self.append_to_log()?,
            3..8 => self.put_shared()?,
            _ => self.change_own()?,
        }
        Ok("write")
    }

    /// A handle whose promise is now and then the stronger one.
    fn handle(&mut self) -> Db {
        let n = self.tuning.durable_one_in;
        if n > 0 && self.rng.one_in(n) { self.durable.clone() } else { self.db.clone() }
    }

    fn filler_len(&mut self) -> usize {
        let len = match self.rng.below(1000) {
            0 if self.tuning.large_values => self.rng.range(20_000, 200_000),
            1..20 => self.rng.range(500, 5_000),
            20..400 => self.rng.range(0, 120),
            _ => self.rng.range(0, 16),
        };
        len as usize
    }

    fn change_own(&mut self) -> Result<(), String> {
        let hot = !self.hot.is_empty() && (self.large.is_empty() || self.rng.percent(60));
        let set_len = if hot { self.hot.len() } else { self.large.len() };
        let index = self.rng.below(set_len as u64) as usize;
        let kind = self.rng.below(100);
        let filler = self.filler_len();
        let db = self.handle();
        let own = if hot { &mut self.hot[index] } else { &mut self.large[index] };
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
