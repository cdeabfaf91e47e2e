//! Being the first user: recover what the last ones left, and make a new shared state.

use std::sync::atomic::Ordering::*;

use crate::checkpoint::run::{self, CheckpointGuard, Context, Purpose};
use crate::core::{Backing, Core};
use crate::error::Result;
use crate::log::flush::Logs;
use crate::log::keep;
use crate::page::header::Header;
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file;
use crate::storage::filesystem;
use crate::storage::ofd::{LockKind, OfdFile, READER};

use super::attach::{Attached, Opening};
use super::companions::{AttachRecord, Companions};
use super::recover;
use super::sidecar::Left;
use super::{create, logs, replay};

impl Opening<'_> {
    /// Recovers what the last users left, and makes a new shared state.
    pub(super) fn be_first(&self, header: &Header) -> Result<Attached> {
        let own = Companions::of(&self.resolved, self.options.shm_dir.as_deref());
        own.check_lengths(self.path)?;
        let boot_id = filesystem::boot_id().map_err(|e| self.io("identify this boot", e))?;
        let Left { companions: left, shm: old_shm, is_needed } =
            self.left_behind(&own, header, boot_id)?;
        let has_logs = logs::sync_logs(&left)?;
        let is_clear =
            AttachRecord::is_clear(self.data).map_err(|e| self.io("read the attach record", e))?;
        if old_shm.is_some() || has_logs || !is_clear {
            self.data.sync_data().map_err(|e| self.io("sync the data file", e))?;
        }
        create::mend_header(self.data, header.page_size, true)
            .map_err(|e| self.io("complete the header", e))?;
        let known_durable = old_shm.as_ref().and_then(|shm| recover::old_poison(shm, boot_id));
        let chosen = recover::choose_meta(self.data, self.path, header, known_durable, true)?;
        let (meta, index) = (&chosen.meta, chosen.index);
        // What a crash has left of the other one is nothing to report: it is written anew. Without a crash, it is damage.
        let after_crash = old_shm.is_some() || has_logs || !is_clear;
        let is_torn = chosen.other.is_some() && after_crash;
        let left = self.where_logs_are(left, meta);
        let file_pages = self.check_length(header, meta)?;
        let had_shm = old_shm.is_some();
        let old = self.old_state(old_shm, meta, boot_id, is_needed)?;
        crash_point("recover.begin");

        let (shm, shm_id, mut shm_name) = self.new_shm(&own.shm, header, meta, boot_id)?;
        let mut core = self.core(header, Backing::Shared, shm, file_pages)?;
        recover::initialise(&core, meta, index, file_pages)?;
        self.choose_log_to_keep(&core);
        core.control().checkpoint.after_crash.store(after_crash as u32, Relaxed);
        self.hold_for_readers(&core)?;
        self.take_slot(&core)?;
        crash_point("recover.initialised");
        let replayed = replay::replay(&core, &left, header, meta, old.as_ref())
            .map_err(|error| chosen.explain(error))?;
        crash_point("recover.replayed");
        let keep = logs::Keep {
            bytes: core.control().changes.keep_log_bytes(),
            files_end: replayed.files_end.0,
            until: core.control().writer.tail.load(Relaxed),
        };
        if keep.bytes > 0 {
            keep::refuse_foreign(self.path, &own.kept, &header.uuid)?;
            if let Some(old) = &old {
                logs::keep_ring(&core, &own, &header.uuid, old, replayed.files_end)?;
            }
        }
        let new_logs = Logs::new(own.logs.clone(), own.kept.clone(), header.uuid);
        if replayed.applied || meta.log_salt != 0 || is_torn {
            let context = Context { core: &core, logs: &new_logs, base: own.base_bytes(), shm_id };
            let guard = CheckpointGuard::lock(&core, None)?;
            run::run(&context, &guard, Purpose::Recovery, None)?;
            crash_point("recover.checkpointed");
        }
        logs::retire_logs(&core, &left, &own.kept, &header.uuid, keep)?;
        shm_name.put_in_place(&own.shm, || self.old_shm(&own, header).map(drop))?;
        core.shm.is_now_at(&own.shm);
        crash_point("recover.renamed");
        let new_record = AttachRecord {
            shm_id,
            boot_id,
            file: self.id,
            base: own.base.clone(),
            shm_dir: self.options.shm_dir.clone(),
        };
        AttachRecord::write(self.data, Some(&new_record))
            .map_err(|e| self.io("write the attach record", e))?;
        crash_point("recover.recorded");
        shm_name.keep();
        // Not before the record leads to the new one.
        if had_shm && left.shm != own.shm {
            let _ = file::unlink(&left.shm, Kind::Shm);
        }
        Ok(Attached { core, companions: own, shm_id })
    }

    /// While a private reader of an older state holds its byte, nothing that was in the file before is re-used.
    fn hold_for_readers(&self, core: &Core) -> Result<()> {
        if has_private_readers(core, &self.ofd)? {
            let pages = core.control().readers.file_pages.load(Relaxed);
            core.control().checkpoint.no_reuse_below.store(pages, Relaxed);
        }
        Ok(())
    }
}

/// Whether somebody reads an older state without being attached.
pub(super) fn has_private_readers(core: &Core, ofd: &OfdFile) -> Result<bool> {
    ofd.is_locked_by_other(READER, LockKind::Exclusive).map_err(|e| core.io("look for readers", e))
}
