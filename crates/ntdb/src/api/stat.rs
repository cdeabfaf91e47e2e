//! Facts about a database at one moment.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::core::Backing;
use crate::environment::Environment;
use crate::error::Result;
use crate::index::lookup;
use crate::limits::MAX_PROCESSES;
use crate::log::keep;
use crate::shm::ways::Ways;
use crate::space::retire::Holds;
use crate::space::{bits, retire, snapshots};
use crate::transaction::writer::Writer;
use crate::types::SlotId;

/// A process that has the database open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessStat {
    /// Its process id, as it sees itself.
    pub pid: u32,
    /// When it opened the database, in seconds since 1970.
    pub since_unix_seconds: u64,
}

/// The oldest snapshot that is held; see [`Stat::oldest_snapshot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotStat {
    /// The process that holds it, as it sees itself.
    pub pid: u32,
    /// When it was opened, in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// How long ago that was, in milliseconds.
    pub age_ms: u64,
    /// What has been logged since, in bytes.
    pub changes_since_bytes: u64,
}

/// Which ways updates went; see [`Stat::updates`]. Each counts once, by the dearest that it took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UpdateStat {
    /// The new record went into the page that has the old one (or the bytes behind the value): nothing else is written.
    pub stayed: u64,
    /// The page had to be copied before, because a checkpoint or a snapshot has it, or it was not the transaction's own.
    pub copied: u64,
    /// The page was rebuilt without its dead records before.
    pub compacted: u64,
    /// The bucket was split before.
    pub split: u64,
    /// A long value went to other pages.
    pub moved: u64,
}

impl UpdateStat {
    /// All updates.
    pub fn all(&self) -> u64 {
        self.stayed + self.copied + self.compacted + self.split + self.moved
    }
}

/// Facts about a database at one moment; see [`Db::stat`](crate::Db::stat).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Stat {
    /// Size of a page in bytes.
    pub page_size: u32,
    /// Number of records.
    pub records: u64,
    /// Size of the data file in bytes.
    pub file_bytes: u64,
    /// Bytes of pages that are free for re-use.
    pub free_bytes: u64,
    /// Bytes of pages that were replaced and wait for a reader, a checkpoint or a snapshot.
    pub retired_bytes: u64,
    /// Bytes of redo log since the last checkpoint.
    pub log_bytes: u64,
    /// Bytes of past log that are to be kept for those who follow the changes ([`Options::keep_log`](crate::Options::keep_log)).
    pub keep_log_bytes: u64,
    /// Bytes of the files in which past log is kept.
    pub kept_log_bytes: u64,
    /// The change counter (log sequence number).
    pub change_counter: u64,
    /// Depth of the hash: its root array has 2^depth entries.
    pub depth: u32,
    /// The freeze epoch.
    pub epoch: u64,
    /// Reserve in percent.
    pub reserve_percent: u8,
    /// Buckets split since the database was opened by its first user.
    pub splits: u64,
    /// Buckets compacted since then.
    pub compactions: u64,
    /// Pages copied because a checkpoint held them, since then.
    pub copies: u64,
    /// Updates of and appends to records that were there, since then: which of them stayed in their page (see
    /// [`Options::reserve_percent`](crate::Options::reserve_percent)).
    pub updates: UpdateStat,
    /// Checkpoints since then.
    pub checkpoints: u64,
    /// Bytes of the pages that they found new: what they had to bring to disk, apart from the map of free space, of which each
    /// writes a page or some.
    pub checkpoint_bytes: u64,
    /// Dead processes repaired since then.
    pub repairs: u64,
    /// Process ids of the attached processes, each as it sees itself.
    pub processes: Vec<u32>,
    /// The attached processes.
    pub process_list: Vec<ProcessStat>,
    /// The process whose reader holds back the oldest pages, if any reads just now.
    pub oldest_reader: Option<u32>,
    /// How many eras ago that reader began. An era is sixteen replacements of pages long, and nothing that was replaced since
    /// can be re-used: a number that keeps growing is a reader that makes the file grow.
    pub oldest_reader_age: u64,
    /// Snapshots that are held; those that one process opened without a change in between count once.
    pub snapshots: u64,
    /// The oldest of them.
    pub oldest_snapshot: Option<SnapshotStat>,
    /// Bytes of replaced pages that nothing but snapshots holds back (and perhaps readers).
    pub snapshot_bytes: u64,
}

/// Gathers the facts. Takes the writer lock for a moment.
pub fn stat(environment: &Environment, deadline: Option<std::time::Instant>) -> Result<Stat> {
    environment.ensure_session()?;
    let core = &environment.core;
    let control = core.control();
    let page_size = core.page_size as u64;
    // Who may only read cannot repair what a dead writer left under the lock, and does without exactness.
    let writer = match core.backing {
        Backing::SharedReadOnly => None,
        _ => Some(Writer::lock(core, deadline)?),
    };
    let file_pages = control.readers.file_pages.load(Relaxed);
    let free = bits::count_free(core, file_pages);
    let holds = Holds::now(core)?;
    let (mut retired, mut by_snapshots) = (0, 0);
    for (run, _) in retire::all(core)? {
        retired += run.run.len as u64;
        if holds.by_snapshot(&run) && !holds.by_checkpoint(&run) {
            by_snapshots += run.run.len as u64;
        }
    }
    let snapshots = snapshots::all(core)?;
    let mut stat = Stat {
        page_size: core.page_size as u32,
        records: control.writer.count.load(Relaxed),
        file_bytes: file_pages as u64 * page_size,
        free_bytes: free * page_size,
        retired_bytes: retired * page_size,
        change_counter: control.writer.tail.load(Relaxed),
        epoch: control.writer.epoch.load(Relaxed),
        reserve_percent: core.reserve().percent(),
        splits: control.counters.splits.load(Relaxed),
        compactions: control.counters.compactions.load(Relaxed),
        copies: control.counters.copies.load(Relaxed),
        updates: {
            let [stayed, copied, compacted, split, moved] = Ways::of(control).0;
            UpdateStat { stayed, copied, compacted, split, moved }
        },
        checkpoints: control.checkpoint.completed.load(Relaxed) as u64,
        checkpoint_bytes: control.counters.checkpoint_pages.load(Relaxed) * page_size,
        repairs: control.counters.repairs.load(Relaxed),
        snapshots: snapshots.len() as u64,
        snapshot_bytes: by_snapshots * page_size,
        ..Stat::default()
    };
    stat.depth = lookup::current_root(core).depth.unwrap_or(0) as u32;
    stat.log_bytes =
        stat.change_counter.saturating_sub(control.checkpoint.durable_lsn.load(Relaxed));
    drop(writer);
    stat.keep_log_bytes = control.changes.keep_log_bytes();
    if stat.keep_log_bytes > 0 {
        let files = keep::list(&environment.logs.kept)?;
        // One may be removed meanwhile.
        let bytes = files.iter().filter_map(|(_, path)| std::fs::metadata(path).ok());
        stat.kept_log_bytes = bytes.map(|found| found.len()).sum();
    }
    stat.oldest_snapshot = snapshots::oldest(&snapshots).map(|oldest| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_ms = now.map_or(0, |time| time.as_millis() as u64);
        SnapshotStat {
            pid: core.pid_of(oldest.process()),
            since_unix_ms: oldest.since,
            age_ms: now_ms.saturating_sub(oldest.since),
            changes_since_bytes: stat.change_counter.saturating_sub(oldest.lsn.0),
        }
    });
    for index in 0..MAX_PROCESSES {
        let entry = core.shm.process(index);
        if entry.state.load(Relaxed) == 1 && core.is_alive(SlotId(index as u16)) {
            let pid = entry.pid.load(Relaxed);
            stat.processes.push(pid);
            let since_unix_seconds = entry.since.load(Relaxed);
            stat.process_list.push(ProcessStat { pid, since_unix_seconds });
        }
    }
    if let Some(oldest) = core.pins.min_pinned() {
        stat.oldest_reader = Some(core.pid_of(oldest.process));
        stat.oldest_reader_age = core.pins.era().0.saturating_sub(oldest.era.0);
    }
    Ok(stat)
}
