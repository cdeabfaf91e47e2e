//! `ntdb watch`.

use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ntdb::{Change, Changes, Db, Operation, Position};
use serde::Serialize;

use crate::bytes;
use crate::cli::{GlobalOptions, WatchArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::text::json_lines::JsonBytes;
use crate::text::lines::escape_into;

/// Prints changes as they happen.
pub fn run(global: &GlobalOptions, args: &WatchArgs) -> Result<(), Failure> {
    let filter = Filter {
        key: args.key.as_ref().map(|key| bytes::from_argument(key, args.hex)).transpose()?,
        prefix: args.prefix.as_ref().map(|key| bytes::from_argument(key, args.hex)).transpose()?,
    };
    let deadline = args.timeout.and_then(|limit| Instant::now().checked_add(limit));
    let from = args.from.as_deref().map(str::parse::<Position>).transpose()?;
    let db = opening::for_reading(global, &args.file, args.read.read_only)?;
    let from = match from {
        Some(from) => from,
        None => db.position()?,
    };
    let mut changes = db.changes(from)?;
    let signals = Signals::watch(&db);
    let watched = watch(&mut changes, args, &filter, deadline, &signals);
    let signal = signals.finish();
    drop(changes);
    db.close()?;
    match (watched?, signal) {
        (_, Some(signal)) => Err(Failure::Signal(signal)),
        (true, None) => Ok(()),
        (false, None) => Err(Failure::SilentNo),
    }
}

/// Prints until it is enough; says whether there were as many changes as were asked for.
fn watch(
    changes: &mut Changes,
    args: &WatchArgs,
    filter: &Filter,
    deadline: Option<Instant>,
    signals: &Signals,
) -> Result<bool, Failure> {
    let mut out = Output::new();
    let mut seen = 0;
    while args.count.is_none_or(|count| seen < count) && signals.received().is_none() {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let Some(change) = changes.wait_next(left)? else {
            if deadline.is_some_and(|end| Instant::now() >= end) {
                return Ok(args.count.is_none());
            }
            continue;
        };
        let operations: Vec<&Operation> =
            change.operations.iter().filter(|operation| filter.passes(operation)).collect();
        if operations.is_empty() {
            continue;
        }
        if args.json {
            out.json(&JsonChange::of(&change, &operations))?;
        } else {
            out.bytes(&lines(&change, &operations, args.hex))?;
        }
        // Whoever reads it is to know at once.
        out.flush()?;
        seen += 1;
    }
    Ok(true)
}

/// Which operations are printed.
struct Filter {
    key: Option<Vec<u8>>,
    prefix: Option<Vec<u8>>,
}

impl Filter {
    fn passes(&self, operation: &Operation) -> bool {
        // What is about all records is about these too.
        let Some(key) = operation.key() else { return true };
        self.key.as_ref().is_none_or(|wanted| wanted == key)
            && self.prefix.as_ref().is_none_or(|prefix| key.starts_with(prefix))
    }
}

/// Name, key and bytes of an operation.
fn parts(operation: &Operation) -> (&'static str, Option<&[u8]>, Option<&[u8]>) {
    match operation {
        Operation::Put { key, value } => ("put", Some(key), Some(value)),
        Operation::Delete { key } => ("delete", Some(key), None),
        Operation::Append { key, bytes, .. } => ("append", Some(key), Some(bytes)),
        Operation::Clear => ("clear", None, None),
    }
}

/// A line for each operation; those of a transaction stand between two more.
fn lines(change: &Change, operations: &[&Operation], hex: bool) -> Vec<u8> {
    let start = change.next.to_string();
    let mut out = Vec::new();
    let mut line = |name: &str, columns: [Option<&[u8]>; 2]| {
        out.extend_from_slice(start.as_bytes());
        out.push(b'\t');
        out.extend_from_slice(name.as_bytes());
        for column in columns.into_iter().flatten() {
            out.push(b'\t');
            if hex {
                out.extend_from_slice(bytes::to_hex(column).as_bytes());
            } else {
                escape_into(&mut out, column, None);
            }
        }
        out.push(b'\n');
    };
    if change.is_transaction {
        line("begin", [None, None]);
    }
    for operation in operations {
        let (name, key, value) = parts(operation);
        line(name, [key, value]);
    }
    if change.is_transaction {
        line("commit", [None, None]);
    }
    out
}

#[derive(Serialize)]
struct JsonChange<'c> {
    sequence: u64,
    next: String,
    transaction: bool,
    operations: Vec<JsonOperation<'c>>,
}

#[derive(Serialize)]
struct JsonOperation<'c> {
    operation: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<JsonBytes<'c>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<JsonBytes<'c>>,
}

impl<'c> JsonChange<'c> {
    fn of(change: &Change, operations: &[&'c Operation]) -> JsonChange<'c> {
        let operations = operations.iter().map(|operation| {
            let (operation, key, value) = parts(operation);
            JsonOperation { operation, key: key.map(JsonBytes), value: value.map(JsonBytes) }
        });
        JsonChange {
            sequence: change.sequence,
            next: change.next.to_string(),
            transaction: change.is_transaction,
            operations: operations.collect(),
        }
    }
}

/// The signals that end a program. A thread of its own waits for them, so that the one that prints can sleep, and close the
/// database in good order.
struct Signals {
    received: Arc<AtomicI32>,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Signals {
    fn watch(db: &Db) -> Signals {
        // SAFETY: plain calls on a set of this function's own. All threads that begin later inherit the mask.
        let set = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, END_OF_WATCH);
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                // What `nohup` has had ignored stays so.
                let mut action: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut action);
                if action.sa_sigaction != libc::SIG_IGN {
                    libc::sigaddset(&raw mut set, signal);
                }
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            set
        };
        let (received, done) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
        let (to_tell, is_done, db) = (received.clone(), done.clone(), db.clone());
        let wait = move || {
            let mut signal = 0;
            // SAFETY: waits for a signal of the set, all of which are blocked.
            while unsafe { libc::sigwait(&raw const set, &raw mut signal) } != 0 {}
            if signal != END_OF_WATCH {
                to_tell.store(signal, Ordering::Release);
            }
            while !is_done.load(Ordering::Acquire) {
                db.end_waits();
                // The other thread may have been on its way to sleep just then.
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        // Without the thread the signals wait until the watch ends for another reason.
        let thread = std::thread::Builder::new().name("signals".into()).spawn(wait).ok();
        Signals { received, done, thread }
    }

    /// The signal that has come.
    fn received(&self) -> Option<i32> {
        match self.received.load(Ordering::Acquire) {
            0 => None,
            signal => Some(signal),
        }
    }

    /// Ends the thread; returns the signal that has come.
    fn finish(mut self) -> Option<i32> {
        self.done.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // SAFETY: the thread has not been joined, so it may be named; the signal is blocked there.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), END_OF_WATCH) };
            let _ = thread.join();
        }
        self.received()
    }
}

/// Sent to the thread that waits for signals when there is nothing to wait for any more.
const END_OF_WATCH: i32 = libc::SIGUSR1;
