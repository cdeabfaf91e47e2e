//! Leaving; and, for the last one out, putting the database to rest: checkpoint, cut the file to what is used, remove the
//! companions.
//!
//! While a database is in use its file has room for the trees of two checkpoints beside the present one. At rest only one of
//! the three is left, perhaps at the end of the file: then it is moved to the front first, if not too much is to be moved.

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::checkpoint::publish::{self, sync_data};
use crate::checkpoint::run::{self, CheckpointGuard, Purpose};
use crate::core::Backing;
use crate::error::{Error, Result};
use crate::index::relocate;
use crate::limits::{KEY_STRIPES, MAX_PROCESSES};
use crate::space::snapshots;
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file;
use crate::storage::ofd::{ATTACH, LockKind, OfdFile, slot_byte, slot_bytes};

use super::companions::{AttachRecord, data_file};
use super::first::has_private_readers;
use super::{Environment, compact, create, logs};

/// How long to wait for those who are attaching just now. Whoever gives up leaves the companions to the next user.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes that the last one out moves towards the front of the file, so that nobody waits long for it.
const MOVE_BYTES_MAX: u64 = 16 << 20;
/// How often things are moved: what had no room at first may have some where others have been.
const MOVES: u32 = 3;
/// Which share of the file must become free, one of so many, for it to be worth the work.
const GAIN_SHARE: u32 = 8;

impl Environment {
    /// Detaches this process. The last one out puts the database to rest.
    pub fn shut_down(&self) -> Result<()> {
        let core = &self.core;
        let Some(session) = core.session_if_any() else { return Ok(()) };
        if !session.is_current() {
            // A child that never used what it inherited.
            return Ok(());
        }
        self.finish_background();
        let Some(ofd) = &session.ofd else { return Ok(()) };
        if !matches!(core.backing, Backing::Shared | Backing::SharedReadOnly) {
            return Ok(());
        }
        let may_write = core.backing == Backing::Shared;
        let kind = if may_write { LockKind::Exclusive } else { LockKind::Shared };
        crash_point("close.begin");
        let locked = ofd
            .lock_wait(ATTACH, kind, Some(Instant::now() + PATIENCE))
            .map_err(|e| core.io("lock the database for closing", e))?;
        let others = ofd
            .is_locked_by_other(slot_bytes(MAX_PROCESSES as u16), LockKind::Exclusive)
            .map_err(|e| core.io("look for other users", e))?;
        crash_point("close.locked");
        let result = if locked && may_write && !others { self.put_to_rest(ofd) } else { Ok(()) };
        core.pins.release_process(session.slot);
        snapshots::release_process(core, session.slot);
        // Of guards that were leaked.
        for index in 0..KEY_STRIPES {
            core.shm.stripe(index).release_dead(session.slot);
        }
        core.shm.process(session.slot.0 as usize).state.store(0, Release);
        let _ = ofd.unlock(slot_byte(session.slot.0));
        let _ = ofd.unlock(ATTACH);
        result
    }

    /// Nobody else is attached, and nobody can attach.
    fn put_to_rest(&self, ofd: &OfdFile) -> Result<()> {
        let core = &self.core;
        let control = core.control();
        let poisoned = control.readers.poison.load(Acquire) != 0;
        if poisoned {
            // What memory holds may not be on disk; recovery decides, with the companions in place.
            return crate::log::flush::check_poison(core);
        }
        let readers = has_private_readers(core, ofd)?;
        let keep_bytes = control.changes.keep_log_bytes();
        // Whoever died last, or closed beside readers, has not cut the file.
        let unchanged = control.writer.tail.load(Acquire)
            == control.checkpoint.durable_lsn.load(Acquire)
            && control.log.exists.load(Acquire) == 0
            && control.checkpoint.after_crash.load(Acquire) == 0
            && !self.has_other_settings_than_stored()
            && (readers || !self.is_longer_than_its_state()?);
        if !unchanged {
            // Of processes that died and of which nobody was reminded.
            snapshots::release_all(core);
            if keep_bytes > 0
                && control.writer.tail.load(Acquire) > control.changes.ring_from.load(Acquire)
            {
                // What is only in the ring would be lost. The checkpoint flushes it.
                run::start_log(&self.context(), None)?;
            }
            let guard = CheckpointGuard::lock(core, None)?;
            let mut used_end = run::run(&self.context(), &guard, Purpose::Rest, None)?;
            crash_point("close.checkpointed");
            let most = (MOVE_BYTES_MAX / core.page_size as u64) as u32;
            for _ in 0..MOVES {
                let Some(limit) =
                    compact::worth_moving(core, used_end, most, GAIN_SHARE).filter(|_| !readers)
                else {
                    break;
                };
                // Now that nothing is held any more: towards the front, and a checkpoint of that.
                if !relocate::relocate(core, limit, None)? {
                    break;
                }
                crash_point("close.moved");
                used_end = run::run(&self.context(), &guard, Purpose::Rest, None)?;
                crash_point("close.moved.checkpointed");
            }
            drop(guard);
            publish::write_second(core)?;
            crash_point("close.second");
            let bytes = used_end as u64 * core.page_size as u64;
            let data = data_file(core);
            if !readers && data.len().map_err(|e| core.io("measure the data file", e))? > bytes {
                data.truncate(bytes).map_err(|e| core.io("cut the data file", e))?;
                crash_point("close.truncated");
            }
        }
        if unchanged {
            publish::write_second(core)?;
        }
        create::mend_header(data_file(core), core.page_size as u32, false)
            .map_err(|e| core.io("mend the header", e))?;
        AttachRecord::write(data_file(core), None)
            .map_err(|e| core.io("clear the attach record", e))?;
        if !unchanged {
            sync_data(core)?;
        }
        crash_point("close.record.cleared");
        let until = control.writer.tail.load(Acquire);
        let keep = logs::Keep { bytes: keep_bytes, files_end: until, until };
        logs::retire_logs(core, &self.companions, &self.logs.kept, &self.logs.uuid, keep)?;
        file::unlink(&self.companions.shm, Kind::Shm)
            .map_err(|e| Error::from_io(&self.companions.shm, "remove", e))?;
        crash_point("close.removed");
        Ok(())
    }
}

impl Environment {
    /// Whether somebody has chosen how much log is to be kept, or another reserve, and that is not stored yet.
    fn has_other_settings_than_stored(&self) -> bool {
        let control = self.core.control();
        let kib = control.changes.keep_log_kib.load(Acquire);
        let durable = control.checkpoint.durable_meta.load(Acquire);
        let reserve = control.readers.reserve_percent.load(Acquire);
        publish::read_meta(&self.core, durable)
            .is_ok_and(|meta| meta.keep_log_kib != kib || meta.reserve != reserve)
    }

    /// Whether the file has pages behind those that the durable state speaks of.
    fn is_longer_than_its_state(&self) -> Result<bool> {
        let core = &self.core;
        let len = data_file(core).len().map_err(|e| core.io("measure the data file", e))?;
        let durable = core.control().checkpoint.durable_meta.load(Acquire);
        // One that cannot be read is for the next user to report.
        Ok(publish::read_meta(core, durable)
            .is_ok_and(|meta| len > meta.file_pages as u64 * core.page_size as u64))
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        // Who wants to know the result calls `Db::close`. What could not be put to rest is recovered by the next user.
        if !self.closed.load(Acquire) {
            let _ = self.shut_down();
        }
    }
}
