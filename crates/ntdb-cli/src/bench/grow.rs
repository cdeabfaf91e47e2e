//! `ntdb bench grow`: records that grow by appends, in transactions.
//!
//! It is the load that a directory of users and groups puts on a database: one transaction inserts
//! all users and appends each to an index record; each further one makes a group, and appends the
//! group to every user and every user to the group. An engine that copies a record at every append
//! in a transaction takes time by the square of the number of users here. After each transaction
//! the database is checked; all lengths are known, and a wrong one fails the benchmark.

use std::path::Path;
use std::time::{Duration, Instant};

use ntdb::{Db, Transaction};
use serde::Serialize;

use super::place::Place;
use crate::cli::{GlobalOptions, GrowArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::{Progress, grouped};

const KEY_BYTES: usize = 48;
const USER_BYTES: usize = 64;
const GROUP_BYTES: usize = 32;
/// What a user adds to the index.
const INDEX_ENTRY_BYTES: usize = 51;
/// What a user adds to a group, and a group to a user.
const MEMBER_BYTES: usize = 32;
const INDEX_KEY: &[u8] = b"index of users";
/// The progress bar moves after so many users.
const SHOWN_USERS: u32 = 4096;

/// The figures of one transaction.
#[derive(Serialize)]
struct Step {
    seconds: f64,
    check_seconds: f64,
    file_bytes: u64,
}

#[derive(Serialize)]
struct Report {
    users: u32,
    groups: u32,
    page_size: u32,
    transactions: Vec<Step>,
    seconds: f64,
    check_seconds: f64,
    own_memory_bytes: u64,
    peak_memory_bytes: u64,
    file_bytes: u64,
    closed_file_bytes: u64,
}

/// Runs the transactions.
pub fn run(global: &GlobalOptions, args: &GrowArgs) -> Result<(), Failure> {
    let place = Place::new("grow", args.file.as_deref())?;
    let path = place.path().unwrap_or(Path::new(""));
    let mut options = opening::options(global);
    opening::with_creation(options.create_new(true), &args.new);
    let db = options.open(path)?;
    let page_size = db.stat()?.page_size;
    let steps = u64::from(args.users) * (u64::from(args.groups) + 1);
    let mut grow = Grow {
        args,
        db: &db,
        path,
        out: Output::new(),
        progress: Progress::of_operations(steps, global.quiet),
        shown: 0,
        own_memory_bytes: 0,
        steps: Vec::new(),
    };
    grow.transaction("users", |grow, tx| grow.add_users(tx))?;
    for group in 0..args.groups {
        grow.transaction("a group", |grow, tx| grow.add_group(tx, group))?;
    }
    let Grow { mut out, progress, steps, own_memory_bytes, .. } = grow;
    drop(progress);
    let file_bytes = file_bytes(path)?;
    db.close()?;
    let sum = |member: fn(&Step) -> f64| steps.iter().map(member).sum::<f64>();
    let report = Report {
        users: args.users,
        groups: args.groups,
        page_size,
        seconds: sum(|step| step.seconds),
        check_seconds: sum(|step| step.check_seconds),
        transactions: steps,
        own_memory_bytes,
        peak_memory_bytes: peak_memory_bytes(),
        file_bytes,
        closed_file_bytes: self::file_bytes(path)?,
    };
    if args.json {
        out.json(&report)?;
    } else {
        out.line(format_args!(
            "All: {:.3} s, checks {:.3} s, memory {} MB, with the mapped file {} MB ({} bytes, {} \
             closed)",
            report.seconds,
            report.check_seconds,
            grouped(report.own_memory_bytes.div_ceil(1_000_000)),
            grouped(report.peak_memory_bytes.div_ceil(1_000_000)),
            report.file_bytes,
            report.closed_file_bytes
        ))?;
    }
    out.finish()
}

struct Grow<'a> {
    args: &'a GrowArgs,
    db: &'a Db,
    path: &'a Path,
    out: Output,
    progress: Progress,
    /// Users dealt with, by all transactions.
    shown: u64,
    /// The most that was measured, at the end of each transaction.
    own_memory_bytes: u64,
    steps: Vec<Step>,
}

impl Grow<'_> {
    /// One transaction and the check behind it. `fill` returns whether all lengths were right.
    fn transaction(
        &mut self,
        what: &str,
        fill: impl FnOnce(&mut Self, &mut Transaction) -> ntdb::Result<bool>,
    ) -> Result<(), Failure> {
        let begin = Instant::now();
        let db = self.db;
        let mut tx = db.begin()?;
        let is_right = fill(self, &mut tx)?;
        let filled = begin.elapsed();
        self.own_memory_bytes = self.own_memory_bytes.max(own_memory_bytes()?);
        let begin = Instant::now();
        tx.commit()?;
        let took = filled + begin.elapsed();
        let number = self.steps.len();
        if !is_right {
            return Err(self.wrong(&format!("transaction {number}: a wrong length")));
        }
        let check = self.check()?;
        let step = Step {
            seconds: took.as_secs_f64(),
            check_seconds: check.as_secs_f64(),
            file_bytes: file_bytes(self.path)?,
        };
        if !self.args.json {
            let text = format!(
                "Adding {what}: {:.3} s, check {:.3} s ({} bytes)",
                step.seconds, step.check_seconds, step.file_bytes
            );
            let out = &mut self.out;
            self.progress.hidden_for(|| out.line(text).and_then(|()| out.flush()))?;
        }
        self.steps.push(step);
        Ok(())
    }

    fn wrong(&self, what: &str) -> Failure {
        Failure::Wrong(format!(
            "{}: {what}; run `ntdb check` if the file is still there, and report this",
            self.path.display()
        ))
    }

    /// Checks all; returns how long that took.
    fn check(&self) -> Result<Duration, Failure> {
        let begin = Instant::now();
        let report = self.db.check()?;
        let took = begin.elapsed();
        if !report.is_clean() {
            return Err(Failure::Damaged(format!("{}: {report:?}", self.path.display())));
        }
        // The index, the users, and a group for each transaction but the first.
        let expected = 1 + u64::from(self.args.users) + self.steps.len() as u64;
        if report.records != expected {
            let text = format!("{} records instead of {expected}", report.records);
            return Err(self.wrong(&text));
        }
        Ok(took)
    }

    fn add_users(&mut self, tx: &mut Transaction) -> ntdb::Result<bool> {
        let mut is_right = true;
        for user in 0..self.args.users {
            let key = key("user", user);
            is_right &= tx.insert(&key, &bytes::<USER_BYTES>(user))?;
            let mut entry = [b'\n'; INDEX_ENTRY_BYTES];
            entry[..KEY_BYTES].copy_from_slice(&key);
            let expected = (u64::from(user) + 1) * INDEX_ENTRY_BYTES as u64;
            is_right &= tx.append(INDEX_KEY, &entry)? == expected;
            self.show(user);
        }
        Ok(is_right)
    }

    fn add_group(&mut self, tx: &mut Transaction, group: u32) -> ntdb::Result<bool> {
        let group_key = key("group", group);
        let mut is_right = tx.insert(&group_key, &bytes::<GROUP_BYTES>(group))?;
        let user_bytes = USER_BYTES as u64 + (u64::from(group) + 1) * MEMBER_BYTES as u64;
        for user in 0..self.args.users {
            let appended = tx.append(&key("user", user), &bytes::<MEMBER_BYTES>(group))?;
            is_right &= appended == user_bytes;
            let appended = tx.append(&group_key, &bytes::<MEMBER_BYTES>(user))?;
            let expected = GROUP_BYTES as u64 + (u64::from(user) + 1) * MEMBER_BYTES as u64;
            is_right &= appended == expected;
            self.show(user);
        }
        Ok(is_right)
    }

    fn show(&mut self, user: u32) {
        self.shown += 1;
        if user.is_multiple_of(SHOWN_USERS) {
            self.progress.show_operations(self.shown);
        }
    }
}

/// A key of a fixed length.
fn key(kind: &str, number: u32) -> [u8; KEY_BYTES] {
    let mut key = [b'.'; KEY_BYTES];
    let mut digits = [b'0'; 10];
    let mut rest = number;
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    key[..kind.len()].copy_from_slice(kind.as_bytes());
    key[kind.len()..kind.len() + digits.len()].copy_from_slice(&digits);
    key
}

/// `N` bytes that tell whose they are.
fn bytes<const N: usize>(number: u32) -> [u8; N] {
    let mut bytes = [b'-'; N];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn file_bytes(path: &Path) -> Result<u64, Failure> {
    let metadata = std::fs::metadata(path).map_err(|source| Failure::File {
        name: path.display().to_string(),
        action: "measure",
        source,
    })?;
    Ok(metadata.len())
}

/// The most memory that this process has had at a time, mapped pages of files included.
fn peak_memory_bytes() -> u64 {
    // SAFETY: the structure is plain numbers, for which zero is right, and the call fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    usage.ru_maxrss as u64 * 1024
}

/// The memory that this process has now and that is no file's.
fn own_memory_bytes() -> Result<u64, Failure> {
    const STATUS: &str = "/proc/self/status";
    let failure =
        |source| Failure::File { name: STATUS.into(), action: "learn the use of memory", source };
    let text = std::fs::read_to_string(STATUS).map_err(failure)?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    let kib = kib.ok_or_else(|| failure(std::io::ErrorKind::InvalidData.into()))?;
    Ok(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_long_and_differ() {
        assert_eq!(&key("user", 1_234_567)[..15], b"user0001234567.");
        assert_ne!(key("user", u32::MAX), key("user", 0));
        assert_ne!(key("group", 1), key("user", 1));
    }
}
