//! The role that follows a [`Script`], for crashes and power cuts.
//!
//! Progress stands on the board: how many operations were begun, are done, are promised durable.
//! Whoever comes after the script's process died reads the database, finds the place in the script
//! whose state that is, demands that it lies where it must, and goes on from there.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread::JoinHandle;

use ntdb::{Change, Db, Error, Operation, Options, Position, Snapshot};

use crate::args::Args;
use crate::board::Board;
use crate::crash;
use crate::powercut;
use crate::script::{Digest, Op, Script, Shape};

/// Mark of the board: operations begun.
pub const BEGUN: usize = 0;
/// Mark of the board: operations that have returned.
pub const DONE: usize = 1;
/// Mark of the board: operations that are durable.
pub const DURABLE: usize = 2;

/// The options that `args` ask for.
pub fn options(args: &Args) -> Options {
    let mut options = Options::new();
    options.create(true);
    options.checkpoint_log_bytes(args.get("checkpoint", 256 << 10));
    options.page_size(args.get("page_size", 4096));
    if args.text("keep").is_some() {
        options.keep_log(args.get("keep", 0));
    }
    if let Some(mask) = args.text("hash_mask") {
        options.hash_mask(u64::from_str_radix(mask, 16).expect("a hexadecimal mask"));
    }
    options
}

/// The script that `args` ask for.
pub fn script(args: &Args) -> Script {
    let shape = args.text("shape").unwrap_or("small");
    Script::new(Shape::from_name(shape).expect("a shape"), args.get("seed", 1))
}

fn prepare(args: &Args) -> Result<(Board, Script), String> {
    if args.text("hits").is_some() {
        crash::count();
    }
    if args.text("record").is_some() {
        let dir = args.database.parent().expect("a database in a directory");
        powercut::record(dir, &args.path("record"));
    }
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    Ok((board, script(args)))
}

/// Follows the script from its beginning.
///
/// # Errors
/// The promise that was broken.
pub fn run(args: &Args) -> Result<String, String> {
    let (board, script) = prepare(args)?;
    let db = options(args).open(&args.database).map_err(|e| format!("open: {e}"))?;
    follow(db, args, &board, &script, 0)
}

/// Takes up the script where a dead process left it.
///
/// # Errors
/// The promise that was broken.
pub fn resume(args: &Args) -> Result<String, String> {
    let (board, script) = prepare(args)?;
    let db = options(args).open(&args.database).map_err(|e| format!("open: {e}"))?;
    let floor = if args.get("after_power_cut", false) { DURABLE } else { DONE };
    let place = find(&db, &board, &script, floor)?;
    board.mark(BEGUN).store(place as u64, Ordering::SeqCst);
    board.mark(DONE).store(place as u64, Ordering::SeqCst);
    if floor == DURABLE {
        // Recovery ends with a checkpoint: what was found is on disk now.
        board.mark(DURABLE).store(place as u64, Ordering::SeqCst);
    }
    follow(db, args, &board, &script, place)
}

/// Finds the place in the script, demands that the database is whole and works, and says which.
///
/// # Errors
/// The promise that was broken.
pub fn verify(args: &Args) -> Result<String, String> {
    let (board, script) = prepare(args)?;
    let db = options(args).open(&args.database).map_err(|e| format!("open: {e}"))?;
    let floor = if args.get("after_power_cut", false) { DURABLE } else { DONE };
    let place = find(&db, &board, &script, floor)?;
    check(&db, "before going on")?;
    if args.text("keep").is_some() {
        check_changes(&db)?;
    }
    let end = (place + 40).min(script.ops.len());
    proceed(&db, &script, place, end)?;
    check(&db, "after going on")?;
    if args.text("keep").is_some() {
        check_changes(&db)?;
    }
    db.close().map_err(|e| format!("close: {e}"))?;
    let db = Options::new().read_only(true).open(&args.database);
    let db = db.map_err(|e| format!("open at rest: {e}"))?;
    let found = Digest::of(&db).map_err(|e| format!("read at rest: {e}"))?;
    if found != script.digests[end] {
        return Err(format!("at rest: {found:?} instead of {:?}", script.digests[end]));
    }
    Ok(format!("place {place}"))
}

fn follow(
    db: Db,
    args: &Args,
    board: &Board,
    script: &Script,
    from: usize,
) -> Result<String, String> {
    let kill_before: usize = args.get("kill_before", usize::MAX);
    let to = args.get("to", usize::MAX).min(script.ops.len());
    let mut db = Some(db);
    // Whether nobody else writes.
    let alone = args.get("alone", true);
    let mut snapshots = Snapshots { alone, held: VecDeque::new() };
    let mut readers = Readers { every: args.get("hold", 0), held: VecDeque::new() };
    for n in from..to {
        let op = &script.ops[n];
        readers.step(n, script, db.as_ref().expect("open between operations"));
        board.mark(BEGUN).store(n as u64 + 1, Ordering::SeqCst);
        if n == kill_before {
            // SAFETY: ends this process as a crash does.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        let open = db.as_ref().expect("open between operations");
        if *op == Op::Snapshot {
            snapshots.open(n, script, open)?;
        } else {
            op.run(open).map_err(|e| format!("operation {n}, {}: {e}", name(op)))?;
        }
        if *op == Op::Reopen {
            readers.release();
            snapshots.release()?;
            db.take().expect("open").close().map_err(|e| format!("close: {e}"))?;
            board.mark(DURABLE).store(n as u64, Ordering::SeqCst);
            let again = options(args).open(&args.database);
            db = Some(again.map_err(|e| format!("open again at {n}: {e}"))?);
        }
        board.mark(DONE).store(n as u64 + 1, Ordering::SeqCst);
        if op.promises_durability() {
            board.mark(DURABLE).store(n as u64 + 1, Ordering::SeqCst);
        }
    }
    readers.release();
    snapshots.release()?;
    db.take().expect("open").close().map_err(|e| format!("close: {e}"))?;
    board.mark(DURABLE).store(to as u64, Ordering::SeqCst);
    if args.text("hits").is_some() {
        crash::write_hits(&args.path("hits")).map_err(|e| format!("hits: {e}"))?;
    }
    Ok(format!("followed to {to}"))
}

/// Snapshots that are held through the operations that follow, and must then be what they were.
struct Snapshots {
    /// Whether the state is the script's and nothing else.
    alone: bool,
    held: VecDeque<(usize, Snapshot, Digest)>,
}

impl Snapshots {
    fn open(&mut self, n: usize, script: &Script, db: &Db) -> Result<(), String> {
        let snapshot = db.snapshot().map_err(|e| format!("operation {n}, snapshot: {e}"))?;
        let expected = if self.alone {
            script.digests[n]
        } else {
            Digest::of_snapshot(&snapshot).map_err(|e| format!("snapshot at {n}: {e}"))?
        };
        self.held.push_back((n, snapshot, expected));
        if self.held.len() > 2 { self.release_oldest() } else { Ok(()) }
    }

    fn release_oldest(&mut self) -> Result<(), String> {
        let Some((n, snapshot, expected)) = self.held.pop_front() else { return Ok(()) };
        let found = Digest::of_snapshot(&snapshot);
        let found = found.map_err(|e| format!("snapshot of operation {n}: {e}"))?;
        if found != expected {
            return Err(format!("snapshot of operation {n}: {found:?} instead of {expected:?}"));
        }
        Ok(())
    }

    fn release(&mut self) -> Result<(), String> {
        while !self.held.is_empty() {
            self.release_oldest()?;
        }
        Ok(())
    }
}

/// Readers that overlap: each looks at one record for many operations, and the next one begins
/// before it ends. So replaced pages queue up and come free in long stretches.
struct Readers {
    /// A new one after so many operations; 0 for none.
    every: usize,
    held: VecDeque<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Readers {
    fn step(&mut self, n: usize, script: &Script, db: &Db) {
        if self.every == 0 || n == 0 || !n.is_multiple_of(self.every) {
            return;
        }
        let Op::Put(key, _) = &script.ops[n - 1] else { return };
        let (key, db) = (key.clone(), db.clone());
        let (release, released) = mpsc::channel::<()>();
        let (inside, is_inside) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let looked = db.view(&key, |_| {
                let _ = inside.send(());
                let _ = released.recv();
            });
            drop(looked);
        });
        // Also returns if the record is not there and the thread has ended.
        let _ = is_inside.recv();
        self.held.push_back((release, reader));
        if self.held.len() > 2 {
            self.release_oldest();
        }
    }

    fn release_oldest(&mut self) {
        if let Some((release, reader)) = self.held.pop_front() {
            drop(release);
            reader.join().expect("a reader without a panic");
        }
    }

    fn release(&mut self) {
        while !self.held.is_empty() {
            self.release_oldest();
        }
    }
}

/// The kind of an operation.
pub fn name(op: &Op) -> String {
    let text = format!("{op:?}");
    text.split(['(', ' ']).next().unwrap_or_default().to_string()
}

/// The place in the script whose state `db` has.
///
/// # Errors
/// If it is none that the board allows.
pub fn find(db: &Db, board: &Board, script: &Script, floor: usize) -> Result<usize, String> {
    let low = board.mark(floor).load(Ordering::SeqCst) as usize;
    let high = board.mark(BEGUN).load(Ordering::SeqCst) as usize;
    let found = Digest::of(db).map_err(|e| format!("read: {e}"))?;
    script.place(found, low, high).ok_or_else(|| {
        let elsewhere = script.place(found, 0, script.ops.len());
        let expected = &script.digests[low.min(script.ops.len())];
        format!(
            "the state is none of the script's from {low} to {high}: {found:?} (the state after \
             {low}: {expected:?}; elsewhere in the script: {elsewhere:?}; the operation begun: {})",
            high.checked_sub(1).map(|n| name(&script.ops[n])).unwrap_or_default()
        )
    })
}

/// Carries out operations `from..to` of the script and demands the state that they lead to.
///
/// # Errors
/// The promise that was broken.
pub fn proceed(db: &Db, script: &Script, from: usize, to: usize) -> Result<(), String> {
    for n in from..to {
        let op = &script.ops[n];
        op.run(db).map_err(|e: Error| format!("operation {n}, {}: {e}", name(op)))?;
    }
    let found = Digest::of(db).map_err(|e| format!("read: {e}"))?;
    if found != script.digests[to] {
        return Err(format!(
            "after operations {from} to {to}: {found:?} instead of {:?}",
            script.digests[to]
        ));
    }
    Ok(())
}

/// Demands that the changes that are kept lead to what `db` holds, if they reach back to the beginning; else, that they can be read.
///
/// # Errors
/// The promise that was broken.
pub fn check_changes(db: &Db) -> Result<(), String> {
    let fail = |e: Error| format!("changes: {e}");
    let (mut from, mut rounds) = (0, 0);
    let copy = loop {
        match read_changes(db, from) {
            Ok(copy) => break copy,
            // A checkpoint in the background may remove what was the oldest a moment ago; each removes some, and there are not many.
            Err(Error::ChangesNotKept { oldest, .. }) if oldest > from && rounds < 100 => {
                (from, rounds) = (oldest, rounds + 1);
            }
            Err(error) => return Err(fail(error)),
        }
    };
    let (copy, end) = copy;
    let now = db.position().map_err(fail)?;
    if end != now {
        return Err(format!("the changes end at {end}, not at {now}"));
    }
    let found = Digest::of(db).map_err(fail)?;
    if from == 0 && copy?.iter().collect::<Digest>() != found {
        return Err(format!("the changes do not lead to {found:?}"));
    }
    Ok(())
}

/// All changes from `from` on, carried out if that is the beginning; and where they end.
fn read_changes(db: &Db, from: u64) -> ntdb::Result<(Result<Contents, String>, Position)> {
    let mut changes = db.changes(from)?;
    let mut copy = Ok(Contents::new());
    while let Some(change) = changes.next()? {
        if from == 0 {
            copy = copy.and_then(|mut copy| apply(&mut copy, &change).map(|()| copy));
        }
    }
    Ok((copy, changes.position()))
}

/// What a follower has made of the changes so far.
pub type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

/// Carries a change out, if it fits what is there.
///
/// # Errors
/// How it does not.
pub fn apply(copy: &mut Contents, change: &Change) -> Result<(), String> {
    for operation in &change.operations {
        match operation {
            Operation::Put { key, value } => {
                copy.insert(key.clone(), value.clone());
            }
            Operation::Delete { key } => {
                let deleted = copy.remove(key);
                deleted.ok_or_else(|| format!("{}: deletes an absent key", change.sequence))?;
            }
            Operation::Append { key, length_before, bytes } => {
                let value = copy.entry(key.clone()).or_default();
                if value.len() as u64 != *length_before {
                    return Err(format!("{}: an append to another length", change.sequence));
                }
                value.extend_from_slice(bytes);
            }
            Operation::Clear => copy.clear(),
        }
    }
    Ok(())
}

/// Demands that `db` is whole.
///
/// # Errors
/// What check found.
pub fn check(db: &Db, when: &str) -> Result<(), String> {
    let report = db.check().map_err(|e| format!("{when}: check: {e}"))?;
    if report.is_clean() { Ok(()) } else { Err(format!("{when}: {report:?}")) }
}
