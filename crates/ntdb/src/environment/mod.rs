//! One open database in this process: files, shared state, session; from attaching to the last close.
//!
//! [`companions`]: where the files are and how they are called; [`identity`]: what the data file is; [`sidecar`]: whose the
//! shared-memory file is, and making one; [`attach`]: becoming a user; [`slot`]: a place in the process table; [`first`]: being the
//! first user, with [`logs`], [`recover`] and [`replay`] for what the last ones left; [`private`]: databases that nobody shares;
//! [`create`]: new databases; [`repair`]: what dead processes leave; [`snapshot`]: snapshots that this process holds; [`registry`]: one environment per file and process, and
//! forks; [`close`]: the last one out.

pub mod attach;
pub mod close;
mod compact;
pub mod companions;
pub mod create;
pub mod first;
pub mod identity;
pub mod logs;
pub mod private;
pub mod recover;
pub mod registry;
pub mod repair;
pub mod replay;
mod settings;
pub mod sidecar;
pub mod slot;
pub mod snapshot;
pub mod spool;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::checkpoint::run::{self, CheckpointGuard, Context, Purpose};
use crate::core::{Backing, Core};
use crate::error::Result;
use crate::limits::RING_BYTES;
use crate::log::flush::{Logs, NO_SWITCH};
use crate::options::{Options, deadline_after};
use crate::shm::layout::phase;
use crate::shm::pin::{OwnPin, PinGuard};
use crate::shm::stripe::thread_token;
use crate::storage::file::FileId;
use crate::storage::fork;
use crate::storage::fork_local::ForkLocal;
use crate::types::Lsn;

use self::attach::Attached;
use self::companions::Companions;

/// Room in the log that a durable operation secures beyond its own.
const LOG_ROOM_AHEAD: u64 = 32 << 10;
/// What runs in the background waits for locks that long at least, if the operation that started it does not wait for ever.
const BACKGROUND_PATIENCE: Duration = Duration::from_secs(1);
/// Replaced pages are many if they are more than this part of the file.
const REPLACED_PART: u64 = 8;

/// See the module's description.
#[derive(Debug)]
pub struct Environment {
    /// Mapped data and shared state.
    pub core: Core,
    /// Paths.
    pub companions: Companions,
    /// Redo logs.
    pub logs: Logs,
    /// Id of the shared state.
    pub shm_id: u64,
    /// The data file's device and inode; `None` in memory.
    pub id: Option<FileId>,
    /// The path by which it was opened.
    pub opened_as: Option<PathBuf>,
    /// Log bytes that start a checkpoint.
    pub checkpoint_log_bytes: u64,
    /// Keeps the lock of a private reader.
    pub reader_lock: Option<crate::storage::ofd::OfdFile>,
    /// The fork generation of the process in whose background a checkpoint runs, or 0.
    checkpointing: AtomicU64,
    /// The thread that has a transaction open.
    transaction_thread: AtomicU32,
    /// Counts how often the waits for changes were ended.
    pub ended_waits: AtomicU32,
    closed: AtomicBool,
    background: ForkLocal<Option<JoinHandle<()>>>,
    /// Shared by those who open one before anything changes.
    last_snapshot: ForkLocal<snapshot::Last>,
}

impl Environment {
    /// A database that has just been attached to.
    fn new(attached: Attached, uuid: [u8; 16], options: &Options) -> Environment {
        let Attached { core, companions, shm_id } = attached;
        Environment {
            logs: Logs::new(companions.logs.clone(), companions.kept.clone(), uuid),
            core,
            companions,
            shm_id,
            id: None,
            opened_as: None,
            checkpoint_log_bytes: options.checkpoint_log_bytes,
            reader_lock: None,
            checkpointing: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            transaction_thread: AtomicU32::new(0),
            ended_waits: AtomicU32::new(0),
            background: ForkLocal::default(),
            last_snapshot: ForkLocal::default(),
        }
    }

    /// What checkpoints and syncs need.
    pub fn context(&self) -> Context<'_> {
        Context {
            core: &self.core,
            logs: &self.logs,
            base: self.companions.base_bytes(),
            shm_id: self.shm_id,
        }
    }

    /// Makes sure that the session is this process's, and not that of a parent.
    #[inline]
    pub fn ensure_session(&self) -> Result<()> {
        if self.core.session().is_current() { Ok(()) } else { attach::attach_child(self) }
    }

    /// Remembers that the calling thread has a transaction open.
    pub fn begin_transaction_here(&self) {
        self.transaction_thread.store(thread_token(), Relaxed);
    }

    /// Forgets that the calling thread had one open; another thread may have begun one since it ended.
    pub fn end_transaction_here(&self) {
        let _ = self.transaction_thread.compare_exchange(thread_token(), 0, Relaxed, Relaxed);
    }

    /// Whether the calling thread has a transaction open.
    #[inline]
    pub fn has_transaction_here(&self) -> bool {
        let token = self.transaction_thread.load(Relaxed);
        token != 0 && token == thread_token()
    }

    /// Pins the present era.
    pub fn pin(&self) -> Result<PinGuard<'_>> {
        self.ensure_session()?;
        Ok(self.core.session().pins.pin())
    }

    /// As [`Environment::pin`], if that is quick.
    #[inline(always)]
    pub fn pin_again(&self) -> Option<OwnPin<'_>> {
        self.core.session().pins.pin_again()
    }

    /// Waits until the ring has room for `bytes` more.
    #[cold]
    pub fn make_ring_room(&self, bytes: u64, deadline: Option<Instant>) -> Result<()> {
        let tail = self.core.control().writer.tail.load(Acquire);
        let needed = tail.saturating_add(bytes).saturating_sub(RING_BYTES);
        // More than needed, so that the next operations find room too.
        let target = needed.max(tail.saturating_sub(RING_BYTES / 4)).min(tail);
        run::flush_to(&self.context(), Lsn(target), deadline)
    }

    /// Makes sure that the log file has room for `bytes` more, so that they can be made durable whatever becomes of the
    /// disk.
    #[cold]
    pub fn secure_log_room(&self, bytes: u64, deadline: Option<Instant>) -> Result<()> {
        let context = self.context();
        run::start_log(&context, deadline)?;
        let control = self.core.control();
        let switch_at = control.log.switch_at.load(Acquire);
        if switch_at != NO_SWITCH {
            self.logs.flush_to(&self.core, Lsn(switch_at), deadline)?;
        }
        let target = control.writer.tail.load(Acquire) + bytes;
        // Some more, so that not every operation has to look; if that is too much, just enough.
        self.logs
            .secure_room(&self.core, Lsn(target + LOG_ROOM_AHEAD))
            .or_else(|_| self.logs.secure_room(&self.core, Lsn(target)))
    }

    /// Whether the log file has room for `bytes` more. Certain only under the writer lock.
    #[inline]
    pub fn has_log_room(&self, bytes: u64) -> bool {
        let control = self.core.control();
        let end = control.writer.tail.load(Relaxed) + bytes;
        end <= control.log.room.load(Acquire).min(control.log.switch_at.load(Acquire))
    }

    /// Makes everything before `lsn` durable.
    pub fn sync_to(&self, lsn: Lsn, deadline: Option<Instant>) -> Result<()> {
        run::sync_to(&self.context(), lsn, deadline)
    }

    /// Runs a checkpoint now; waits for locks for `limit` each.
    pub fn checkpoint(&self, limit: Option<Duration>) -> Result<()> {
        if self.core.backing != Backing::Shared {
            return Ok(());
        }
        let guard = CheckpointGuard::lock(&self.core, limit)?;
        run::run(&self.context(), &guard, Purpose::Periodic, limit).map(drop)
    }

    /// After a change, when no lock is held: repairs the dead that were met, writes out the ring before it is full, starts a
    /// checkpoint when the log has grown. Waits for locks for `limit` each, and leaves to others what it cannot do then.
    #[inline]
    pub fn after_change(self: &std::sync::Arc<Self>, tail: u64, limit: Option<Duration>) {
        let log = &self.core.control().log;
        if tail.wrapping_sub(log.written.load(Relaxed)) > RING_BYTES / 2 {
            self.housekeeping(tail, limit);
        }
        if self.core.has_suspects() {
            repair::repair_suspects(self, limit);
        }
    }

    #[cold]
    fn housekeeping(self: &std::sync::Arc<Self>, tail: u64, limit: Option<Duration>) {
        if !self.core.is_logged() {
            return;
        }
        // Whoever comes first does it; a failure is reported to those who need it.
        if !self.core.control().flush_lock.is_held() {
            let _ = run::flush_to(&self.context(), Lsn(tail), deadline_after(limit));
        }
        if self.log_is_long(tail) {
            self.checkpoint_in_background(limit);
        }
    }

    /// Whether so much has been logged since the last checkpoint that there should be another.
    fn log_is_long(&self, tail: u64) -> bool {
        let control = self.core.control();
        let since = tail.saturating_sub(control.checkpoint.durable_lsn.load(Relaxed));
        let data = control.readers.file_pages.load(Relaxed) as u64 * self.core.page_size as u64;
        since > self.checkpoint_log_bytes.max(data / 2)
    }

    /// As [`Environment::after_change`], after an operation that was logged in chunks, so that the ring does not tell how much that
    /// was; and one that may have replaced many pages (`replaced`). The durable checkpoint holds those, and the next operation of that
    /// kind would have to let the file grow by as many again. So there is a checkpoint if they are a good part of the file.
    pub fn after_large_change(
        self: &std::sync::Arc<Self>,
        tail: u64,
        replaced: u64,
        limit: Option<Duration>,
    ) {
        self.after_change(tail, limit);
        let file = self.core.control().readers.file_pages.load(Relaxed) as u64;
        let many =
            (self.checkpoint_log_bytes / 4 / self.core.page_size as u64).max(file / REPLACED_PART);
        if self.core.is_logged() && (replaced > many || self.log_is_long(tail)) {
            self.checkpoint_in_background(limit);
        }
    }

    fn checkpoint_in_background(self: &std::sync::Arc<Self>, limit: Option<Duration>) {
        let control = self.core.control();
        let completed = control.checkpoint.completed.load(Acquire);
        // Not the lock alone, which a check has for a moment; nor the phase alone, which an owner that failed may have left.
        let is_running = control.checkpoint.phase.load(Acquire) != phase::IDLE
            && control.checkpoint_lock.is_held();
        if is_running || self.checkpointing.swap(fork::generation(), AcqRel) == fork::generation() {
            return;
        }
        let limit = limit.map(|limit| limit.max(BACKGROUND_PATIENCE));
        let mut background = self.background.lock();
        if let Some(done) = background.take() {
            let _ = done.join();
        }
        let environment = self.clone();
        let task = move || {
            // A failure leaves the last checkpoint and the log as they are; the next attempt may do better.
            let _ = environment.checkpoint_since(completed, limit);
            environment.checkpointing.store(0, Release);
        };
        match std::thread::Builder::new().name("ntdb-checkpoint".into()).spawn(task) {
            Ok(handle) => *background = Some(handle),
            Err(_) => self.checkpointing.store(0, Release),
        }
    }

    /// Runs a checkpoint, unless there has been one since `completed` had been, or one is running. A check, which needs the same lock
    /// for a moment, is waited for.
    fn checkpoint_since(&self, completed: u32, limit: Option<Duration>) -> Result<()> {
        let words = &self.core.control().checkpoint;
        let guard = match CheckpointGuard::try_lock(&self.core, limit)? {
            Some(guard) => guard,
            None if words.phase.load(Acquire) != phase::IDLE => return Ok(()),
            None => CheckpointGuard::lock(&self.core, Some(BACKGROUND_PATIENCE))?,
        };
        if words.completed.load(Acquire) != completed {
            return Ok(());
        }
        run::run(&self.context(), &guard, Purpose::Periodic, limit).map(drop)
    }

    /// After [`Environment::shut_down`], so that dropping does not do it again.
    pub fn forget_session(&self) {
        self.closed.store(true, Release);
    }

    /// Waits for a checkpoint in the background.
    pub fn finish_background(&self) {
        let handle = self.background.lock().take();
        if let Some(handle) = handle
            && handle.thread().id() != std::thread::current().id()
        {
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Db;
    use crate::checkpoint::freeze;
    use crate::transaction::writer::Writer;

    /// What a checkpoint that failed has left does not keep the next one from being started.
    #[test]
    fn a_checkpoint_that_was_left_half_done_is_followed_by_another() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::create(dir.path().join("a.ntdb")).unwrap();
        db.put(b"a", b"1").unwrap();
        let environment = db.environment();
        let control = environment.core.control();
        {
            let _guard = CheckpointGuard::lock(&environment.core, None).unwrap();
            freeze::freeze(&mut Writer::lock(&environment.core, None).unwrap(), false).unwrap();
        }
        assert_ne!(control.checkpoint.phase.load(Relaxed), phase::IDLE);
        let before = control.checkpoint.completed.load(Relaxed);
        environment.after_large_change(control.writer.tail.load(Relaxed), u64::MAX, None);
        environment.finish_background();
        assert!(control.checkpoint.completed.load(Relaxed) > before);
        assert!(db.check().unwrap().is_clean());
    }
}
