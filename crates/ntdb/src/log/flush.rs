//! From the ring to the log files, and to the disk.
//!
//! **Flush** copies the ring from `written` on into the current log file, under the flush lock. That lock, alone among all,
//! may be taken from a living owner after a time-out (it may be stopped in the middle of a write): a flusher copies the ring
//! to private memory, makes sure that the lock is still its own and that nobody has flushed meanwhile, and writes only
//! that copy, so that a robbed flusher, whenever it goes on, writes the bytes that belong there anyway. `written` only ever
//! grows. While it writes, a flag in its process's entry names the incarnation of the file: a file so flagged by anybody is
//! not re-used for later records but replaced by a new file.
//!
//! **Switch.** A checkpoint sets `switch_at`; whoever flushes next up to there syncs the file to its end, makes the other file
//! the current one, and only then writes on. So the header of the new file proves that the old one is complete on disk, and
//! nothing in the new one is acknowledged before that. The new file is made under a private name; it gets its own, and is
//! announced by one step, under the writer lock, if the switch is then still due. A successor of one who died between the
//! two finds the file with just the header that it wants.
//!
//! **Room.** `room` says how far the current file is allocated, so that a durable operation can make sure, before it changes
//! anything, that its record will not meet a full disk.
//!
//! **No log at first.** Until the first flush there is no log file at all; see `checkpoint::start_log`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::sync::atomic::{AtomicU32, fence};
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::error::{Error, Result};
use crate::limits::{MAX_PROCESSES, MAX_RECORD_BYTES, RING_BYTES};
use crate::log::file::{LOG_HEADER_BYTES, LogFile, LogHeader, OpenProblem};
use crate::log::keep;
use crate::log::record;
use crate::shm::lock::Acquired;
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file::{self, File};
use crate::storage::fork_local::ForkLocal;
use crate::transaction::step::{IN_SHM, Step};
use crate::transaction::writer::Writer;
use crate::types::{Lsn, SlotId};

/// Name of the flush lock.
const FLUSH_LOCK: &str = "the log's flush lock";
/// No switch is due.
pub const NO_SWITCH: u64 = u64::MAX;
/// Most bytes written at once: bounds how long the flush lock is held.
const WRITE_BYTES_MAX: u64 = 256 << 10;

// So that at least one record is written each time.
const _: () = assert!(WRITE_BYTES_MAX >= MAX_RECORD_BYTES);
/// After this long without progress the flush lock is taken from a living owner.
const ROB_AFTER: Duration = Duration::from_millis(200);

/// The log files of one database, as this process has them open.
#[derive(Debug)]
pub struct Logs {
    /// Paths of log0 and log1.
    pub paths: [PathBuf; 2],
    /// What the paths of log files begin with that are kept for those who follow the changes.
    pub kept: PathBuf,
    /// UUID of the database.
    pub uuid: [u8; 16],
    current: ForkLocal<Option<(u32, Arc<LogFile>)>>,
    /// Keeps the flag in this process's entry to one thread at a time.
    flushing: ForkLocal<Vec<u8>>,
}

impl Logs {
    /// The logs at `paths`, and those whose paths begin with `kept`.
    pub fn new(paths: [PathBuf; 2], kept: PathBuf, uuid: [u8; 16]) -> Logs {
        Logs { paths, kept, uuid, current: ForkLocal::default(), flushing: ForkLocal::default() }
    }

    fn error(&self, index: u32, action: &'static str, source: io::Error) -> Error {
        Error::from_io(&self.paths[index as usize & 1], action, source)
    }

    /// The log file that is written now, and its incarnation.
    pub(super) fn current(&self, core: &Core) -> Result<(u32, Arc<LogFile>)> {
        let words = &core.control().log;
        let mut problem = None;
        // Index, salt and incarnation change one after the other; what does not fit is looked at again.
        for attempt in 0..200 {
            let incarnation = words.incarnation.load(Acquire);
            let index = words.index.load(Acquire) & 1;
            let salt = words.salt.load(Acquire);
            let mut current = self.current.lock();
            if let Some((known, log)) = &*current
                && *known == incarnation
            {
                return Ok((incarnation, log.clone()));
            }
            let path = &self.paths[index as usize];
            match LogFile::open(path) {
                Ok(log) if log.header().salt == salt && log.header().uuid == self.uuid => {
                    if words.incarnation.load(Acquire) == incarnation {
                        let log = Arc::new(log);
                        *current = Some((incarnation, log.clone()));
                        return Ok((incarnation, log));
                    }
                }
                Ok(_) | Err(OpenProblem::Header(_)) => {
                    problem = Some(Error::Corrupt {
                        path: path.clone(),
                        place: "log header".into(),
                        reason: "is not the log that is being written".into(),
                    });
                }
                Err(OpenProblem::Io(e)) if e.kind() == io::ErrorKind::NotFound => {
                    problem =
                        Some(Error::LogMissing { path: core.path.clone(), log: path.clone() });
                }
                Err(OpenProblem::Io(e)) => return Err(self.error(index, "open the log", e)),
            }
            drop(current);
            std::thread::sleep(Duration::from_micros(10 * attempt));
        }
        Err(problem
            .unwrap_or_else(|| core.corrupt_shm("the log changes faster than it can be opened")))
    }

    /// As [`Logs::create`], unless just that log is there already: of an earlier attempt, which may have made a meta page that names
    /// it.
    pub fn create_unless_there(
        &self,
        core: &Core,
        index: u32,
        header: LogHeader,
    ) -> Result<LogFile> {
        let path = &self.paths[index as usize & 1];
        match LogFile::open(path) {
            Ok(log) if *log.header() == header => {
                log.sync().map_err(|e| poison(core, &e))?;
                file::sync_dir(path).map_err(|e| poison(core, &e))?;
                Ok(log)
            }
            _ => self.create(core, index, header),
        }
    }

    /// Creates a new log file at `index`, in place of whatever lies there.
    pub fn create(&self, core: &Core, index: u32, header: LogHeader) -> Result<LogFile> {
        let path = &self.paths[index as usize & 1];
        let failed = |e| self.error(index, "create the log", e);
        self.refuse_foreign(core, index)?;
        file::unlink(path, Kind::Log).map_err(failed)?;
        crash_point("log.unlinked");
        let log = self.create_at(core, index, path, header)?;
        file::sync_dir(path).map_err(failed)?;
        crash_point("log.created");
        Ok(log)
    }

    fn create_at(
        &self,
        core: &Core,
        index: u32,
        path: &Path,
        header: LogHeader,
    ) -> Result<LogFile> {
        let failed = |e| self.error(index, "create the log", e);
        let log = LogFile::create(path, 0o600, header).map_err(failed)?;
        if let Some(data) = &core.data {
            log.file().adopt_owner_and_mode(data).map_err(failed)?;
        }
        Ok(log)
    }

    /// Fails if the file at `index` is somebody else's log, or no log at all with something in it.
    fn refuse_foreign(&self, core: &Core, index: u32) -> Result<()> {
        let path = &self.paths[index as usize & 1];
        let foreign = |reason: String| {
            Err(Error::ForeignSidecar { path: core.path.clone(), sidecar: path.clone(), reason })
        };
        match LogFile::open_readonly(path) {
            Ok(log) if log.header().uuid != self.uuid => {
                foreign("it is the log of another database".into())
            }
            Ok(_) => Ok(()),
            // A log whose creation was cut short.
            Err(OpenProblem::Header(_)) if is_zero(path) => Ok(()),
            Err(OpenProblem::Header(problem)) => foreign(problem.to_string()),
            Err(OpenProblem::Io(e)) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(OpenProblem::Io(e)) => Err(self.error(index, "open the log", e)),
        }
    }

    /// Writes the ring to the log up to `target` at least.
    pub fn flush_to(&self, core: &Core, target: Lsn, deadline: Option<Instant>) -> Result<()> {
        let words = &core.control().log;
        while words.written.load(Acquire) < target.0 || switch_is_due(core) {
            check_poison(core)?;
            self.flush_once(core, target, deadline)?;
        }
        Ok(())
    }

    fn flush_once(&self, core: &Core, target: Lsn, deadline: Option<Instant>) -> Result<()> {
        // One thread of this process at a time, since the flag in its entry is one word.
        let begin = Instant::now();
        let Some(mut buffer) = self.flushing.lock_until(deadline) else {
            return Err(core.locked(FLUSH_LOCK, Some(core.slot()), begin.elapsed()));
        };
        let words = &core.control().log;
        if words.written.load(Acquire) >= target.0 && !switch_is_due(core) {
            return Ok(());
        }
        let me = core.slot();
        let lock = &core.control().flush_lock;
        self.lock_flush(core, me, deadline)?;
        let turn = lock.turn();
        crash_point("flush.locked");
        let result = self.flush_locked(core, &mut buffer, deadline, || lock.still_mine(turn));
        lock.release_if_mine(turn);
        result
    }

    fn lock_flush(&self, core: &Core, me: SlotId, deadline: Option<Instant>) -> Result<()> {
        let lock = &core.control().flush_lock;
        let begin = Instant::now();
        loop {
            let turn = lock.turn();
            let patience = Instant::now() + ROB_AFTER;
            let until = deadline.map_or(patience, |deadline| deadline.min(patience));
            match lock.acquire(me, Some(until), &|slot| core.is_alive(slot)) {
                Ok(Acquired::Clean) => return Ok(()),
                Ok(Acquired::OwnerDied(slot)) => {
                    core.suspect(slot);
                    return Ok(());
                }
                Err(timed_out) => {
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        let waited = begin.elapsed();
                        return Err(core.locked(FLUSH_LOCK, timed_out.owner, waited));
                    }
                    // The same turn all the time: its owner is stopped, or the disk is slow; then writing the same bytes
                    // twice is harmless.
                    if turn.owner().is_some()
                        && lock.still_mine(turn)
                        && lock.steal_from_live(me, turn)
                    {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn flush_locked(
        &self,
        core: &Core,
        buffer: &mut Vec<u8>,
        deadline: Option<Instant>,
        still_mine: impl Fn() -> bool,
    ) -> Result<()> {
        let words = &core.control().log;
        let written = words.written.load(Acquire);
        // The tail before the switch: whoever appended behind a freeze had seen the freeze, so a tail beyond a switch point is
        // never loaded without that switch point.
        let tail = core.control().writer.tail.load(Acquire);
        let switch_at = words.switch_at.load(Acquire);
        if written >= switch_at {
            return self.switch(core, switch_at, deadline);
        }
        if tail.saturating_sub(written) > RING_BYTES {
            return Err(core.corrupt_shm("the log ring holds more than it can"));
        }
        let end = tail.min(switch_at).min(written + WRITE_BYTES_MAX);
        if end <= written {
            return Ok(());
        }
        let (incarnation, log) = self.current(core)?;
        let _flag = WritingFlag::raise(core, incarnation);
        buffer.resize((end - written) as usize, 0);
        core.shm.ring_read(written, buffer);
        crash_point("flush.copied");
        fence(SeqCst);
        // What was copied is good if nobody else has flushed it meanwhile, for then it may have been overwritten; and only the
        // owner of the lock may go on.
        if !still_mine() || words.written.load(Acquire) != written {
            return Ok(());
        }
        // Whole records only: after a crash the file and the ring are read one after the other, and a record that lies half
        // in the one and half in the other would be found in neither.
        let end = if end - written < WRITE_BYTES_MAX {
            end
        } else {
            buffer.truncate(record::whole_records(buffer));
            written + buffer.len() as u64
        };
        if end == written {
            return Err(core.corrupt_shm("the log ring holds a record that is longer than any"));
        }
        let index = words.index.load(Acquire);
        log.write_at(Lsn(written), buffer).map_err(|e| self.error(index, "write the log", e))?;
        crash_point("flush.wrote");
        words.written.fetch_max(end, AcqRel);
        crash_point("flush.published");
        Ok(())
    }

    /// Makes the other file the current one. Everything before `at` is in the present one.
    ///
    /// The caller may have been robbed of the flush lock at any time, and go on much later. So whatever others could see is done
    /// under the writer lock, after making sure that it is still this switch that is due; and the new file is made under a
    /// private name.
    fn switch(&self, core: &Core, at: u64, deadline: Option<Instant>) -> Result<()> {
        let words = &core.control().log;
        let switch = Switch {
            at,
            index: words.switch_index.load(Acquire) & 1,
            salt: words.switch_salt.load(Acquire),
            previous_salt: words.salt.load(Acquire),
            incarnation: words.switch_incarnation.load(Acquire),
        };
        if !switch.is_due(core) {
            return Ok(());
        }
        let _flag = WritingFlag::raise(core, switch.incarnation);
        let (_, old) = self.current(core)?;
        crash_point("switch.begin");
        old.sync().map_err(|e| poison(core, &e))?;
        words.synced.fetch_max(at, AcqRel);
        crash_point("switch.old.synced");
        let path = &self.paths[switch.index as usize];
        let failed = |e| self.error(switch.index, "put the next log in place", e);
        let header = LogHeader {
            uuid: self.uuid,
            start: Lsn(at),
            salt: switch.salt,
            previous_salt: switch.previous_salt,
        };
        let made = match LogFile::open(path) {
            // By one who died, or was robbed, before it was announced.
            Ok(made) if *made.header() == header => {
                made.sync().map_err(|e| poison(core, &e))?;
                made
            }
            _ => {
                let temporary = self.temporary(core, switch.index);
                let made = self.next_file(core, &switch, &temporary, header, deadline)?;
                crash_point("switch.new.synced");
                let writer = Writer::lock(core, deadline)?;
                // Whoever's file gets the name first, it stays: its name may be durable already.
                let already = LogFile::open(path).ok().filter(|log| *log.header() == header);
                if !switch.is_due(core) || already.is_some() {
                    drop(writer);
                    let _ = file::unlink(&temporary, Kind::Log);
                    // Once more from the start, with the other's file.
                    return Ok(());
                }
                file::rename(&temporary, path, Kind::Log).map_err(failed)?;
                crash_point("switch.renamed");
                made
            }
        };
        file::sync_dir(path).map_err(|e| poison(core, &e))?;
        crash_point("switch.dir.synced");
        let room = at + (made.allocated_bytes() - LOG_HEADER_BYTES as u64);
        let mut writer = Writer::lock(core, deadline)?;
        if !switch.is_due(core) {
            return Ok(());
        }
        let mut step = Step::begin(&mut writer);
        let shared = |word: &AtomicU32| core.shm.offset_of(word) | IN_SHM;
        step.store_shared(&words.salt, switch.salt);
        step.store_shared(&words.start, at);
        step.store_shared(&words.room, room);
        step.store(shared(&words.index), 4, 1, switch.index as u64);
        step.store(shared(&words.other_needed), 4, 1, 1);
        step.store(shared(&words.incarnation), 4, 1, switch.incarnation as u64);
        step.store_shared(&words.switch_at, NO_SWITCH);
        crash_point("switch.prepared");
        step.structure()?;
        crash_point("switch.done");
        drop(writer);
        let keep_bytes = core.control().changes.keep_log_bytes();
        if keep_bytes > 0 {
            // What cannot be removed now can be later.
            let newer = (old.header().start.0, 2);
            let _ = keep::prune(&self.kept, &self.uuid, keep_bytes, newer, at);
        }
        Ok(())
    }

    /// A name that only this process uses.
    fn temporary(&self, core: &Core, index: u32) -> PathBuf {
        let mut name = self.paths[index as usize].clone().into_os_string();
        name.push(format!("{TEMPORARY}{}", core.slot().0));
        name.into()
    }

    /// The file to switch to, under a private name: the old one of that place, if nobody can still be writing to it, else a new
    /// one.
    fn next_file(
        &self,
        core: &Core,
        switch: &Switch,
        temporary: &Path,
        header: LogHeader,
        deadline: Option<Instant>,
    ) -> Result<LogFile> {
        let index = switch.index;
        let failed = |e| self.error(index, "make the next log", e);
        self.refuse_foreign(core, index)?;
        file::unlink(temporary, Kind::Log).map_err(failed)?;
        if core.control().changes.keep_log_bytes() > 0 {
            self.keep_old(core, switch, header, deadline)?;
            return self.create_at(core, index, temporary, header);
        }
        let old = {
            let _writer = Writer::lock(core, deadline)?;
            // Pairs with the fence in `raise`.
            fence(SeqCst);
            let path = &self.paths[index as usize];
            match LogFile::open(path) {
                // Not the file that another has made for this very switch.
                Ok(old)
                    if switch.is_due(core)
                        && *old.header() != header
                        && !is_flagged(core, switch.incarnation) =>
                {
                    file::rename(path, temporary, Kind::Log).map_err(failed)?;
                    crash_point("switch.old.taken");
                    Some(old)
                }
                _ => None,
            }
        };
        match old {
            Some(old) => old.reuse(header).map_err(failed),
            None => self.create_at(core, index, temporary, header),
        }
    }

    /// Keeps the file that lies where the next one is to be. If somebody may still be writing to it, those are bytes that it has
    /// already.
    fn keep_old(
        &self,
        core: &Core,
        switch: &Switch,
        header: LogHeader,
        deadline: Option<Instant>,
    ) -> Result<()> {
        let path = &self.paths[switch.index as usize];
        let (_, current) = self.current(core)?;
        {
            let _writer = Writer::lock(core, deadline)?;
            match LogFile::open(path) {
                // Not the file that another has made for this very switch.
                Ok(old) if switch.is_due(core) && *old.header() != header => {
                    let next = current.header();
                    let is_next = next.previous_salt == old.header().salt;
                    let end = is_next.then_some(next.start);
                    keep::keep(&core.path, path, &self.kept, &old, end)?;
                }
                _ => return Ok(()),
            }
        }
        crash_point("switch.kept");
        // Before the next one has its place: a power cut must not leave neither.
        file::sync_dir(path).map_err(|e| poison(core, &e))
    }

    /// Makes sure that the current log file has room up to `target` at least.
    pub fn secure_room(&self, core: &Core, target: Lsn) -> Result<()> {
        let words = &core.control().log;
        if words.room.load(Acquire) >= target.0 {
            return Ok(());
        }
        let (incarnation, log) = self.current(core)?;
        let index = words.index.load(Acquire);
        let end = log
            .offset_of(target)
            .ok_or_else(|| core.corrupt_shm("the log begins behind its end"))?;
        log.ensure_allocated(end).map_err(|e| self.error(index, "extend the log", e))?;
        let room = log.header().start.0 + (log.allocated_bytes() - LOG_HEADER_BYTES as u64);
        if words.incarnation.load(Acquire) == incarnation {
            words.room.fetch_max(room, AcqRel);
        }
        Ok(())
    }
}

/// Suffix of log files that are being made; the slot of their maker follows.
pub const TEMPORARY: &str = ".new-";

/// A switch of logs, as it was when somebody set out to make it.
#[derive(Clone, Copy, Debug)]
struct Switch {
    at: u64,
    index: u32,
    salt: u64,
    previous_salt: u64,
    incarnation: u32,
}

impl Switch {
    /// Whether it is still to be made. Certain only under the writer lock.
    fn is_due(&self, core: &Core) -> bool {
        let words = &core.control().log;
        words.switch_at.load(Acquire) == self.at
            && words.switch_salt.load(Acquire) == self.salt
            && words.salt.load(Acquire) == self.previous_salt
            && self.salt != self.previous_salt
    }
}

/// While it lives, this process's entry says that it may be writing to the log file of an incarnation.
struct WritingFlag<'c>(&'c AtomicU32);

impl<'c> WritingFlag<'c> {
    fn raise(core: &'c Core, incarnation: u32) -> WritingFlag<'c> {
        let flag = &core.shm.process(core.slot().0 as usize).flushing;
        flag.store(incarnation.wrapping_add(1), SeqCst);
        // Before the lock is looked at again: whoever re-uses a file looks at the flags after it has taken the lock.
        fence(SeqCst);
        WritingFlag(flag)
    }
}

impl Drop for WritingFlag<'_> {
    fn drop(&mut self) {
        self.0.store(0, SeqCst);
    }
}

/// Whether another process may be writing to a log file older than the current one.
fn is_flagged(core: &Core, incarnation: u32) -> bool {
    let me = core.slot().0 as usize;
    (0..MAX_PROCESSES).any(|slot| {
        let flag = core.shm.process(slot).flushing.load(SeqCst);
        // The current file, which ends here, is the one before the one that is being made.
        slot != me && flag != 0 && flag != incarnation && flag != incarnation.wrapping_add(1)
    })
}

/// Whether everything before a switch is written, so that the switch is to be made.
fn switch_is_due(core: &Core) -> bool {
    let words = &core.control().log;
    let at = words.switch_at.load(Acquire);
    at != NO_SWITCH && words.written.load(Acquire) >= at
}

/// Whether the file holds nothing but zeros at its beginning.
fn is_zero(path: &std::path::Path) -> bool {
    let Ok(file) = File::open_readonly(path, Kind::Log) else { return false };
    let mut block = [0u8; 4096];
    match file.read_at(&mut block, 0) {
        Ok(len) => block[..len].iter().all(|&byte| byte == 0),
        Err(_) => false,
    }
}

/// Fails if an earlier sync has failed.
#[inline]
pub fn check_poison(core: &Core) -> Result<()> {
    match core.control().readers.poison.load(Relaxed) {
        0 => Ok(()),
        errno => Err(Error::Poisoned {
            path: core.path.clone(),
            errno: io::Error::from_raw_os_error(errno as i32),
        }),
    }
}

/// Records a failed sync, so that nobody relies on a later one.
#[cold]
pub fn poison(core: &Core, error: &io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    core.control().readers.poison.store(errno.max(1) as u32, SeqCst);
    Error::Poisoned { path: core.path.clone(), errno: io::Error::from_raw_os_error(errno) }
}
