//! Backups: a compact copy of one moment, made while others write.
//!
//! A snapshot is copied, record by record, into a new database under a private name beside the destination: `NAME-partial-` and 16
//! digits. Nobody else uses that, so nothing is logged; the file is written by the checkpoint of its close, as recovery's is. Then it is opened again,
//! checked, and compared with the snapshot, every key and value. Only then does it get the destination's name, and the directory is
//! synced. So whatever happens before, there is nothing at the destination, or what was there; a process that is killed leaves the
//! private file, which the next backup to the same place removes.
//!
//! If a database is replaced, it is locked from the beginning to the end. What a crash has left beside it would be in the new one's
//! way, and cannot go at the same instant as the old one; so the old one is recovered and put to rest first, and is a single file
//! from then on. (Only one too damaged for that keeps its companions until the copy has its name.)
//!
//! | died after | crash point | left |
//! | --- | --- | --- |
//! | putting a database to rest that is to be replaced | `backup.rested` | that one, at rest |
//! | removing what a killed backup had left; all of that | `backup.leftover`, `backup.begin` | nothing new |
//! | creating the copy, locking it, filling it, closing it, comparing it, syncing it | `backup.created`, `backup.locked`, `backup.filled`, `backup.closed`, `backup.verified`, `backup.synced` | the copy under its private name |
//! | renaming it | `backup.renamed` | the copy in its place; after a power cut perhaps what was there before |
//! | syncing the directory | `backup.done` | the copy in its place |

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use crate::environment::companions::{AttachRecord, Companions, resolve};
use crate::environment::logs;
use crate::environment::sidecar::open_shm;
use crate::error::{Error, Result};
use crate::limits::MAX_PROCESSES;
use crate::log::record::Op;
use crate::options::Options;
use crate::salvage::{remove_new, source};
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file::{self, File, FileId};
use crate::storage::filesystem;
use crate::storage::mapping::Access;
use crate::storage::ofd::{ATTACH, BACKUP, LockKind, OfdFile, slot_bytes};
use crate::transaction::operation::{self, Condition};
use crate::transaction::record::LogRecord;
use crate::transaction::writer::Writer;

use super::db::Db;
use super::snapshot::Snapshot;

/// What a backup is to do; see [`Db::backup`].
#[derive(Clone, Copy, Debug, Default)]
pub struct BackupOptions {
    overwrite: bool,
}

impl BackupOptions {
    /// The defaults.
    pub fn new() -> BackupOptions {
        BackupOptions::default()
    }

    /// Replace a database that is at the destination already, if nobody uses it. Default: no.
    pub fn overwrite(&mut self, yes: bool) -> &mut BackupOptions {
        self.overwrite = yes;
        self
    }
}

/// How far a backup is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BackupProgress {
    /// Records copied.
    pub copied: u64,
    /// Records of the copy that were compared with the original; that begins when all are copied.
    pub verified: u64,
    /// Records to copy, and to verify.
    pub records: u64,
}

/// What a backup has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackupReport {
    /// Records in it.
    pub records: u64,
    /// Bytes of its file.
    pub file_bytes: u64,
    /// The change counter of the original at the moment that was copied.
    pub change_counter: u64,
}

/// Progress is told every so many records.
const TELL: u64 = 1024;
/// What is added to the destination's name meanwhile, and so many hexadecimal digits.
const PARTIAL: &str = "-partial-";
const DIGITS: usize = 16;

type Progress<'p> = &'p mut dyn FnMut(BackupProgress) -> ControlFlow<()>;

/// Copies the present state of `db` to `destination`.
pub(crate) fn run(
    db: &Db,
    destination: &Path,
    options: &BackupOptions,
    progress: Progress,
) -> Result<BackupReport> {
    let to = resolve(destination)?;
    let there = FileId::of_path(&to)
        .map_err(|e| Error::from_io(destination, "look at the destination", e))?;
    let replaced = match there {
        Some(id) if Some(id) == db.environment().id => {
            return Err(Error::InvalidOption {
                what: "destination of the backup",
                reason: format!("{} is the database itself", destination.display()),
            });
        }
        Some(_) if !options.overwrite => {
            return Err(Error::AlreadyExists { path: destination.to_path_buf() });
        }
        Some(_) => Some(Replaced::lock(db, destination)?),
        None => {
            demand_no_companions(&to)?;
            None
        }
    };
    remove_leftovers(&to);
    crash_point("backup.begin");
    let number = filesystem::random_u64()
        .map_err(|e| Error::from_io(destination, "get a random number", e))?;
    let mut name = to.clone().into_os_string();
    name.push(format!("{PARTIAL}{number:0digits$x}", digits = DIGITS));
    let partial = PathBuf::from(name);
    let snapshot = db.snapshot()?;
    let copy = Copy { db, snapshot: &snapshot, partial: &partial, progress };
    let made = copy.make().and_then(|report| {
        let renamed = match &replaced {
            Some(_) => file::rename(&partial, &to, Kind::Data),
            None => file::rename_new(&partial, &to, Kind::Data),
        };
        match renamed {
            Ok(()) => Ok(report),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(Error::AlreadyExists { path: destination.to_path_buf() })
            }
            Err(e) => Err(Error::from_io(destination, "rename the backup", e)),
        }
    });
    match made {
        Ok(report) => {
            crash_point("backup.renamed");
            let failed = |e| Error::from_io(destination, "sync the directory", e);
            // What lies beside the old one goes after that, lest a power cut bring the old one back without it; and if it fails,
            // all the same, for it would be in the way of the new one, which has the name.
            let synced = file::sync_dir(&to).map_err(failed);
            if let Some(replaced) = replaced
                && replaced.forget_companions()
            {
                file::sync_dir(&to).map_err(failed)?;
            }
            synced?;
            crash_point("backup.done");
            Ok(report)
        }
        Err(error) => {
            // Made by this call, which nobody has been told of.
            remove_new(&partial);
            Err(error)
        }
    }
}

/// What lies beside a database that is not there would be taken for the new one's.
fn demand_no_companions(to: &Path) -> Result<()> {
    let own = Companions::of(to, None);
    own.check_lengths(to)?;
    for path in own.logs.iter().chain([&own.shm]) {
        if is_there(path) {
            return Err(Error::AlreadyExists { path: path.clone() });
        }
    }
    Ok(())
}

/// A database at the destination, which nobody uses, nor can open as long as this is held.
struct Replaced {
    source: Option<source::Source>,
}

impl Replaced {
    fn lock(db: &Db, path: &Path) -> Result<Replaced> {
        // An empty file that was made for the backup.
        if std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == 0) {
            return Ok(Replaced { source: None });
        }
        let mut source = source::Source::open(path)?;
        let mut left = companions(&source).into_iter();
        if left.any(|left| left.logs.iter().chain([&left.shm]).any(|path| is_there(path))) {
            drop(source);
            // If it is too damaged for that, it is replaced all the same.
            let mut options = Options::new();
            options.allow_unsuitable_file_system(true).lock_timeout(db.lock_timeout());
            let _ = options.open(path).and_then(|old| old.close());
            crash_point("backup.rested");
            source = source::Source::open(path)?;
        }
        Ok(Replaced { source: Some(source) })
    }

    /// Removes what still lies beside the database that is no more: log that it kept, and what recovery could not do without. Says
    /// whether there may have been any.
    fn forget_companions(self) -> bool {
        let Some(source) = self.source else { return false };
        let Some(header) = &source.header else { return false };
        for left in companions(&source) {
            // Only its own; whatever else is there, the next user is told of.
            let _ = logs::remove_logs(&left, &header.uuid);
            if open_shm(&left.shm, Access::ReadOnly)
                .is_ok_and(|shm| shm.header().uuid == header.uuid)
            {
                let _ = file::unlink(&left.shm, Kind::Shm);
            }
        }
        true
    }
}

/// Where companions of a database that nobody uses may lie.
fn companions(source: &source::Source) -> Vec<Companions> {
    let record = AttachRecord::read(&source.file).ok().flatten();
    let recorded = record.filter(|record| record.file == source.id);
    let own = Companions::of(&source.resolved, None);
    [own].into_iter().chain(recorded.map(|record| record.companions())).collect()
}

fn is_there(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

/// Removes what backups to the same place that were killed have left under private names.
fn remove_leftovers(to: &Path) {
    let (Some(folder), Some(name)) = (to.parent(), to.file_name()) else { return };
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let prefix = [name.as_encoded_bytes(), PARTIAL.as_bytes()].concat();
    let mut stems = BTreeSet::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(rest) = name.as_encoded_bytes().strip_prefix(&prefix[..]) else { continue };
        // Nobody else has a file with such a name.
        if rest.len() >= DIGITS && rest[..DIGITS].iter().all(u8::is_ascii_hexdigit) {
            stems.insert(OsStr::from_bytes(&name.as_bytes()[..prefix.len() + DIGITS]).to_owned());
        }
    }
    for stem in stems {
        let path = folder.join(stem);
        if is_unused(&path) {
            remove_new(&path);
            crash_point("backup.leftover");
        }
    }
}

/// Whether no backup is at work on the file, or it is not there (and what lies beside it is of one that was killed).
fn is_unused(path: &Path) -> bool {
    let lock = match OfdFile::open(path, true) {
        Ok(lock) => lock,
        Err(e) => return e.kind() == std::io::ErrorKind::NotFound,
    };
    let slots = slot_bytes(MAX_PROCESSES as u16);
    matches!(lock.try_lock(ATTACH, LockKind::Shared), Ok(true))
        && matches!(lock.is_locked_by_other(slots, LockKind::Exclusive), Ok(false))
        && matches!(lock.is_locked_by_other(BACKUP, LockKind::Exclusive), Ok(false))
}

struct Copy<'a> {
    db: &'a Db,
    snapshot: &'a Snapshot,
    partial: &'a Path,
    progress: Progress<'a>,
}

impl Copy<'_> {
    fn make(mut self) -> Result<BackupReport> {
        let source = &self.db.environment().core;
        let mut options = Options::new();
        options
            .create_new(true)
            .page_size(source.page_size as u32)
            .reserve_percent(source.reserve().percent())
            .hash_mask(source.hasher.mask())
            // Nobody but this process uses the copy as long as it has this name.
            .allow_unsuitable_file_system(true)
            // Until it is complete, nobody else is to read it.
            .mode(0o600);
        let copy = options.open(self.partial)?;
        crash_point("backup.created");
        // Also between the two openings.
        let failed = |e| Error::from_io(self.partial, "lock the backup", e);
        let lock = OfdFile::open(self.partial, true).map_err(failed)?;
        lock.try_lock(BACKUP, LockKind::Shared).map_err(failed)?;
        crash_point("backup.locked");
        self.fill(&copy)?;
        crash_point("backup.filled");
        copy.close()?;
        crash_point("backup.closed");
        self.verify()?;
        crash_point("backup.verified");
        let failed = |e| Error::from_io(self.partial, "give the backup its mode", e);
        let file = File::open(self.partial, Kind::Data).map_err(failed)?;
        if let Some(model) = &source.data {
            file.adopt_owner_and_mode(model).map_err(failed)?;
        }
        let synced = file.sync_all();
        synced.map_err(|e| Error::from_io(self.partial, "sync the backup", e))?;
        crash_point("backup.synced");
        Ok(BackupReport {
            records: self.snapshot.len(),
            file_bytes: file.len().map_err(failed)?,
            change_counter: self.snapshot.change_counter(),
        })
    }

    /// Tells how far it is; an error if the user has had enough.
    fn tell(&mut self, copied: u64, verified: u64) -> Result<()> {
        let records = self.snapshot.len();
        let done = copied + verified;
        if done.is_multiple_of(TELL) || done == 2 * records {
            let so_far = BackupProgress { copied, verified, records };
            if (self.progress)(so_far).is_break() {
                return Err(Error::Cancelled { path: self.partial.to_path_buf() });
            }
        }
        Ok(())
    }

    fn fill(&mut self, copy: &Db) -> Result<()> {
        let core = &copy.environment().core;
        // Nobody can open it under this name before it is complete, and after a crash nobody is to find anything.
        core.set_replaying(true);
        let filled = self.fill_unlogged(copy);
        core.set_replaying(false);
        let words = &core.control().writer;
        words.salt_from.store(words.tail.load(Relaxed), Relaxed);
        filled
    }

    fn fill_unlogged(&mut self, copy: &Db) -> Result<()> {
        let core = &copy.environment().core;
        // Stands for the record of every operation; it only takes up LSNs.
        let mut log = LogRecord::default();
        log.encode(&Op::Clear);
        let mut scratch = Vec::new();
        let mut writer = Writer::lock(core, None)?;
        let mut copied = 0;
        let snapshot = self.snapshot;
        self.each(snapshot, |copy, key, value| {
            let hash = core.hasher.hash(key);
            let any = Condition::Any;
            operation::put(&mut writer, hash, key, value, any, &mut log, &mut scratch)?;
            copied += 1;
            copy.tell(copied, 0)
        })
    }

    /// Demands that the file has the records of the snapshot, each with its value, and no others.
    fn verify(&mut self) -> Result<()> {
        let opened =
            Options::new().read_only(true).allow_unsuitable_file_system(true).open(self.partial)?;
        let wrong = |reason: String| Error::Corrupt {
            path: self.partial.to_path_buf(),
            place: "the backup that was just written".into(),
            reason: format!("{reason}; see to the disk and the memory of this machine"),
        };
        let report = opened.check()?;
        if !report.is_clean() || report.records != self.snapshot.len() {
            return Err(wrong(match report.problems.first() {
                Some(problem) => problem.clone(),
                None => format!("{} records of {}", report.records, self.snapshot.len()),
            }));
        }
        let mut verified = 0;
        let (snapshot, records) = (self.snapshot, self.snapshot.len());
        self.each(snapshot, |copy, key, value| {
            if opened.view(key, |copied| copied == value)? != Some(true) {
                let key = String::from_utf8_lossy(&key[..key.len().min(100)]).into_owned();
                return Err(wrong(format!("the record {key:?} is not what was written")));
            }
            verified += 1;
            copy.tell(records, verified)
        })
    }

    /// Calls `f` with every record, until it fails.
    fn each(
        &mut self,
        snapshot: &Snapshot,
        mut f: impl FnMut(&mut Self, &[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut failed = Ok(());
        snapshot.for_each(|key, value| {
            failed = f(self, key, value);
            if failed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        failed
    }
}
