//! The one error type of the crate: what happened, where, and what the user can do.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::storage::file;

/// A `Result` whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that an operation of this crate can report.
///
/// Each value names the file concerned and, in its text, what the user can do. Programs tell the
/// cases apart by variant, never by text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a call.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// The file that the call was about.
        path: PathBuf,
        /// What was being done, as a verb phrase ("open the data file").
        action: &'static str,
        /// The system's own error.
        source: io::Error,
    },
    /// The database does not exist, and the options did not ask to create it.
    #[error("{path}: no such database; create it with `ntdb create` or Options::create(true)", path = path.display())]
    NotFound {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// The database exists, and the options asked for a new one.
    #[error("{path}: already exists; remove it first or open it without asking for a new one", path = path.display())]
    AlreadyExists {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// The file is something else than an ntdb database. It was not changed.
    #[error("{path}: not an ntdb database ({reason}); the file was left as it is", path = path.display())]
    NotADatabase {
        /// The file.
        path: PathBuf,
        /// What it is, or what it lacks.
        reason: String,
    },
    /// The file was written by a newer version of this format.
    #[error("{path}: format version {found} is newer than this program's {supported}; use a newer ntdb", path = path.display())]
    NewerVersion {
        /// The file.
        path: PathBuf,
        /// The version that the file names.
        found: u32,
        /// The newest version that this library reads.
        supported: u32,
    },
    /// The file is damaged. Nothing was changed on its account.
    #[error("{path}: damaged at {place}: {reason}; run `ntdb check`, restore a backup, or copy what can still be read with `ntdb recover`", path = path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where: "page 17", "log offset 4096".
        place: String,
        /// What is wrong there.
        reason: String,
    },
    /// The disk, a quota, a file-size limit or the format's own size limit is reached.
    /// The operation changed nothing; it works again once there is room.
    #[error("{path}: no room to {action}: {source}; free some space (or raise the limit) and repeat", path = path.display())]
    Full {
        /// The file that could not grow.
        path: PathBuf,
        /// What the room was for.
        action: &'static str,
        /// The system's own error.
        source: io::Error,
    },
    /// A lock was not to be had within the lock time-out.
    #[error("{path}: {what} was not free {within}{advice}", path = path.display(), within = within(*waited), advice = holder(*owner, *own))]
    Locked {
        /// The database.
        path: PathBuf,
        /// Which lock.
        what: &'static str,
        /// Process id of the holder as it sees itself (0 if unknown).
        owner: u32,
        /// Whether that is this process: another of its threads holds the lock. (Process ids do not tell: processes of two
        /// containers may have the same.)
        own: bool,
        /// How long the caller waited.
        waited: Duration,
    },
    /// The handle is read-only.
    #[error("{path}: opened read-only; open it for writing to change it", path = path.display())]
    ReadOnly {
        /// The database.
        path: PathBuf,
    },
    /// The process may not do this with the file or its companions.
    #[error("{path}: {reason}", path = path.display(), reason = denied(path, action, source))]
    Permission {
        /// The file.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The system's own error.
        source: io::Error,
    },
    /// A key, a value, or the name of the database is longer than the format or the machine can hold.
    #[error("{path}: {what} of {len} bytes is too long; the limit is {limit}", path = path.display())]
    TooLong {
        /// The database.
        path: PathBuf,
        /// "key", "value", "file name" and the like.
        what: &'static str,
        /// Its length in bytes.
        len: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// Not enough address space or memory to map the database.
    #[error("{path}: cannot map {bytes} bytes: {source}; raise `ulimit -v` or set Options::address_space lower", path = path.display())]
    AddressSpace {
        /// The database.
        path: PathBuf,
        /// How much was to be mapped, in bytes.
        bytes: u64,
        /// The system's own error.
        source: io::Error,
    },
    /// The file lies on a file system on which sharing it cannot work.
    #[error("{path}: lies on {kind}, where processes on different hosts cannot share memory; keep it on a local disk, or set Options::allow_unsuitable_file_system if only this host uses it", path = path.display())]
    UnsuitableFileSystem {
        /// The database.
        path: PathBuf,
        /// The kind of file system.
        kind: String,
    },
    /// A sync to disk has failed. What was acknowledged as durable before is safe; nothing further
    /// is promised until every process has closed the database and it is opened anew.
    #[error("{path}: an earlier sync to disk failed ({errno}); close the database everywhere, see to the disk, and open it again", path = path.display())]
    Poisoned {
        /// The database.
        path: PathBuf,
        /// The error of the sync that failed.
        errno: io::Error,
    },
    /// A durable operation was carried out, and everybody can see it, but it could not be made
    /// durable. It survives the death of any process; [`Db::sync`](crate::Db::sync) makes it
    /// durable once the cause is gone.
    #[error("{path}: done, but not durable yet: {source}", path = path.display())]
    NotDurable {
        /// The database.
        path: PathBuf,
        /// What kept it from becoming durable.
        source: Box<Error>,
    },
    /// A redo log that the data file needs is not there.
    #[error("{path}: its redo log {log} is missing; put it back beside the data file (a crash left both, and they belong together); if there was no crash, the data file is damaged: restore a backup, or copy what can still be read with `ntdb recover`", path = path.display(), log = log.display())]
    LogMissing {
        /// The database.
        path: PathBuf,
        /// The log that is missing.
        log: PathBuf,
    },
    /// A companion file belongs to another database. It was not changed.
    #[error("{sidecar}: belongs to another database than {path} ({reason}); move it away", path = path.display(), sidecar = sidecar.display())]
    ForeignSidecar {
        /// The database.
        path: PathBuf,
        /// The companion file.
        sidecar: PathBuf,
        /// How they differ.
        reason: String,
    },
    /// Others use the database, or this process does, and what was asked for needs it for itself.
    #[error("{path}: in use{by}; close it everywhere first", path = path.display(), by = used_by(processes))]
    InUse {
        /// The database.
        path: PathBuf,
        /// Process ids of those who use it, each as it sees itself; empty if they cannot be told.
        processes: Vec<u32>,
    },
    /// Other processes use the database, but their shared-memory file cannot be reached.
    #[error("{path}: in use by other processes, but their shared-memory file {shm} is not there ({reason}); close the database everywhere and open it again", path = path.display(), shm = shm.display())]
    ShmMissing {
        /// The database.
        path: PathBuf,
        /// The shared-memory file that was looked for.
        shm: PathBuf,
        /// What was found instead.
        reason: String,
    },
    /// The last users died without closing the database, and their shared memory, which may have
    /// changes that are nowhere else, cannot be found or read. Nothing was changed.
    #[error("{path}: its last users died, and changes that were not synced are only in their shared-memory file {shm}, which cannot be used ({reason}); make it accessible again, or open with Options::give_up_unsynced to go on without those changes", path = path.display(), shm = shm.display())]
    ShmLost {
        /// The database.
        path: PathBuf,
        /// Where the shared-memory file was.
        shm: PathBuf,
        /// Why it cannot be used.
        reason: String,
    },
    /// What was being made is not complete, because the caller stopped it. Nothing is left of it.
    #[error("{path}: stopped before it was complete; nothing is left of it", path = path.display())]
    Cancelled {
        /// What was being made.
        path: PathBuf,
    },
    /// A limit on users of one database is reached.
    #[error("{path}: more than {limit} {what} at once; close some", path = path.display())]
    TooMany {
        /// The database.
        path: PathBuf,
        /// What there are too many of ("processes").
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The calling thread would wait for itself.
    #[error("{path}: this thread holds {held} and would wait for itself; release it first", path = path.display())]
    WouldDeadlock {
        /// The database.
        path: PathBuf,
        /// What the thread holds.
        held: &'static str,
    },
    /// The guard was made before a fork and means nothing in the child.
    #[error("{path}: made before a fork; the child must begin anew", path = path.display())]
    Forked {
        /// The database.
        path: PathBuf,
    },
    /// The changes from a position on are no longer kept.
    #[error("{path}: the changes from {from} on are no longer kept, only those from {oldest} on; take a copy of the database and follow from there, and have more of the log kept (`ntdb create --keep-log` or Options::keep_log)", path = path.display())]
    ChangesNotKept {
        /// The database.
        path: PathBuf,
        /// The change counter from which on changes were asked for.
        from: u64,
        /// The oldest change counter from which on they are kept.
        oldest: u64,
    },
    /// A position in the changes lies in the future.
    #[error("{path}: there have been no changes up to {from} yet, only up to {newest}; is this the right database?", path = path.display())]
    ChangesAhead {
        /// The database.
        path: PathBuf,
        /// The change counter from which on changes were asked for.
        from: u64,
        /// The present change counter.
        newest: u64,
    },
    /// Changes that somebody has followed have been lost since: by a power cut before they were durable, or because the database
    /// was replaced by an older copy.
    #[error("{path}: changes before {from} that were read earlier have been lost since (a power cut before they were synced, or an older copy put back); take a copy of the database and follow from there", path = path.display())]
    ChangesLost {
        /// The database.
        path: PathBuf,
        /// The change counter from which on changes were asked for.
        from: u64,
    },
    /// The database has no log that could be followed: it lives in memory only, or was opened for reading while nobody used it.
    #[error("{path}: its changes cannot be followed: it is in memory only, or was opened read-only while nobody used it; open it for writing", path = path.display())]
    NoChanges {
        /// The database.
        path: PathBuf,
    },
    /// An option has an impossible value.
    #[error("{what}: {reason}")]
    InvalidOption {
        /// The option.
        what: &'static str,
        /// What would be possible.
        reason: String,
    },
}

/// "within" so much time, as exactly as a person wants to know it.
fn within(waited: Duration) -> String {
    match waited.as_millis() {
        0 => "at once".into(),
        millis @ 1..1000 => format!("within {millis} ms"),
        1000..10_000 => format!("within {:.1} s", waited.as_secs_f64()),
        _ => format!("within {} s", waited.as_secs()),
    }
}

/// Who holds a lock, and what to do about it.
fn holder(owner: u32, own: bool) -> String {
    match (owner, own) {
        (_, true) => {
            "; another thread of this process holds it; wait, or raise the lock time-out".into()
        }
        (0, _) => "; wait, or raise the lock time-out".into(),
        (owner, _) => format!(
            "; it is held by process {owner}; wait, raise the lock time-out, or see to that process"
        ),
    }
}

/// By whom a database is used.
fn used_by(processes: &[u32]) -> String {
    const TELL: usize = 10;
    let mut ids: Vec<String> = processes.iter().take(TELL).map(u32::to_string).collect();
    if processes.len() > TELL {
        ids.push("...".into());
    }
    match processes.len() {
        0 => String::new(),
        1 => format!(" by process {}", ids[0]),
        _ => format!(" by processes {}", ids.join(", ")),
    }
}

/// What the system does not allow, and what to do about it. For what happens to the name of a file its directory counts.
fn denied(path: &Path, action: &str, source: &io::Error) -> String {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let dir = parent.unwrap_or(Path::new(".")).display();
    let is_about_the_name = action.starts_with("create") || action.starts_with("remove");
    let user = file::effective_user();
    match source.raw_os_error() {
        Some(libc::EROFS) => {
            format!("cannot {action}: {dir} is on a read-only file system; mount that for writing")
        }
        Some(libc::EACCES) if is_about_the_name => format!(
            "permission denied to {action}: the directory {dir} may not be written by uid {user}; \
             run as its owner, or change its mode"
        ),
        Some(libc::EACCES) => format!(
            "permission denied to {action}: uid {user} may not; run as its owner, or change its \
             mode or that of a directory on the way to it"
        ),
        _ => format!(
            "permission denied to {action} ({source}); see whether it is marked immutable (lsattr)"
        ),
    }
}

impl Error {
    /// Whether the same may work later: a lock was busy, there was no room, or there were too many
    /// processes. (After [`Error::NotDurable`] that is the sync, not the operation.)
    pub fn is_transient(&self) -> bool {
        match self {
            Error::NotDurable { source, .. } => source.is_transient(),
            _ => matches!(self, Error::Locked { .. } | Error::Full { .. } | Error::TooMany { .. }),
        }
    }

    /// Sorts a system error into the variant that a user would look for: no room
    /// ([`Error::Full`]), no permission ([`Error::Permission`]), or [`Error::Io`].
    pub(crate) fn from_io(path: &Path, action: &'static str, source: io::Error) -> Self {
        let path = path.to_path_buf();
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Error::Full { path, action, source },
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => {
                Error::Permission { path, action, source }
            }
            _ => Error::Io { path, action, source },
        }
    }
}
