//! Recovery: choose the state to begin with, bring it up to date, and make a new shared state. [`super::first`] is who does it, and
//! [`super::replay`] one step of it.
//!
//! Everybody else is dead or gone (no slot is locked, and the attach lock is held), so nothing here waits. In this order:
//! 1. Sync data and logs: what the dead wrote and nobody synced must not be built upon before it is on disk.
//! 2. Choose a meta page: the newest valid one, or, after a failed sync, the one known durable; a newer one is voided then.
//! 3. Make a new shared state under a temporary name. The old one stays as it is until the end, so a death in between
//!    changes nothing: the next first user begins again with the same files, and only pages that are free in the
//!    chosen state have been written.
//! 4. Replay the log from the meta page's LSN, through both files; then, if the old shared state is of this boot and
//!    continues the log, what only its ring has.
//! 5. Checkpoint, without a log. Then the old logs mean nothing and are removed; the new shared state gets its name.

use std::path::Path;
use std::sync::atomic::Ordering::*;

use crate::checkpoint::map::{MapPages, for_each_group};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::index::locate::{self, Root};
use crate::log::flush::NO_SWITCH;
use crate::page::header::{HEADER_COPY_PAGE, Header};
use crate::page::map::group_pages;
use crate::page::meta::{META_PAGES, Meta};
use crate::shm::Shm;
use crate::space::bits;
use crate::storage::failpoint::crash_point;
use crate::storage::file::File;
use crate::storage::filesystem;
use crate::types::{PageNo, Run};

/// What the last users left in memory, if it can be relied on.
#[derive(Debug)]
pub struct OldState {
    pub shm: Shm,
}

impl OldState {
    /// Opens the old shared state for reading; `None` if it belongs to another boot or another state of the file. Its meta page is
    /// the chosen one; or that one may have been written and not yet recorded as durable, or is the one before, because the newer
    /// is damaged. Then the logs must lead from there to where the ring goes on.
    pub fn open(shm: Shm, meta: &Meta, boot_id: [u8; 16]) -> Option<OldState> {
        let sequence = shm.control().checkpoint.durable_sequence.load(Relaxed);
        let fits = meta.sequence.abs_diff(sequence) <= 1;
        let same_boot = boot_id != [0; 16] && shm.header().boot_id == boot_id;
        (fits && same_boot).then_some(OldState { shm })
    }

    pub fn tail(&self) -> u64 {
        self.shm.control().writer.tail.load(Relaxed)
    }

    pub(super) fn written(&self) -> u64 {
        self.shm.control().log.written.load(Relaxed)
    }

    pub(super) fn salt_from(&self) -> u64 {
        self.shm.control().writer.salt_from.load(Relaxed)
    }

    pub fn salt_at(&self, lsn: u64) -> u64 {
        let words = &self.shm.control().writer;
        if lsn >= words.salt_from.load(Relaxed) {
            words.salt.load(Relaxed)
        } else {
            words.salt_before.load(Relaxed)
        }
    }
}

/// errno of the failed sync that the old shared state records, and the sequence of the meta page known durable.
pub fn old_poison(shm: &Shm, boot_id: [u8; 16]) -> Option<u64> {
    let control = shm.control();
    let poisoned = control.readers.poison.load(Relaxed) != 0;
    (poisoned && shm.header().boot_id == boot_id)
        .then(|| control.checkpoint.durable_sequence.load(Relaxed))
}

/// A meta page to begin with.
#[derive(Debug)]
pub struct Chosen {
    /// What it says.
    pub meta: Meta,
    /// Which of the two it is.
    pub index: u32,
    /// What is wrong with the other one.
    pub other: Option<String>,
}

/// Reads both meta pages and chooses. `known_durable` is the sequence to choose after a failed sync.
pub fn choose_meta(
    data: &File,
    path: &Path,
    header: &Header,
    known_durable: Option<u64>,
    may_write: bool,
) -> Result<Chosen> {
    let size = header.page_size as usize;
    let failed = |e| Error::from_io(path, "read a meta page", e);
    let mut found: Vec<(Meta, u32)> = Vec::new();
    let mut problems: Vec<String> = Vec::new();
    for index in 0..2u32 {
        let mut page = vec![0; size];
        let offset = META_PAGES[index as usize] as u64 * size as u64;
        if data.len().map_err(failed)? < offset + size as u64 {
            problems.push("cut off".into());
            continue;
        }
        data.read_exact_at(&mut page, offset).map_err(failed)?;
        match Meta::decode(&page) {
            Ok(meta) if !is_plausible(&meta) => problems.push("impossible numbers".into()),
            Ok(meta) => found.push((meta, index)),
            Err(problem) => problems.push(problem.to_string()),
        }
    }
    found.sort_by_key(|(meta, _)| meta.sequence);
    if let Some(sequence) = known_durable
        && found.iter().any(|(meta, _)| meta.sequence == sequence)
    {
        while let Some((_, index)) = found.pop_if(|(meta, _)| meta.sequence > sequence) {
            problems.push("written before a failed sync".into());
            if may_write {
                let offset = META_PAGES[index as usize] as u64 * size as u64;
                data.write_all_at(&vec![0; size], offset)
                    .and_then(|()| data.sync_data())
                    .map_err(|e| Error::from_io(path, "void a meta page", e))?;
                crash_point("recover.meta.voided");
            }
        }
    }
    match found.pop() {
        Some((meta, index)) => Ok(Chosen { meta, index, other: problems.pop() }),
        None => Err(Error::Corrupt {
            path: path.to_path_buf(),
            place: "pages 1 and 2".into(),
            reason: format!("neither meta page is valid ({})", problems.join("; ")),
        }),
    }
}

impl Chosen {
    /// What to report if this state's log is missing: if the other meta page is damaged, that is the cause.
    pub fn explain(&self, error: Error) -> Error {
        match (&self.other, error) {
            (Some(problem), Error::LogMissing { path, log }) => Error::Corrupt {
                path,
                place: format!("page {}", META_PAGES[(self.index as usize + 1) & 1]),
                reason: format!(
                    "{problem}, and the older state that page {} names needs the log {}, which is gone",
                    META_PAGES[self.index as usize & 1],
                    log.display()
                ),
            },
            (_, error) => error,
        }
    }
}

/// Whether a meta page's counters leave room to count on. They begin at 0 and count bytes and checkpoints, so no database
/// comes near the bound in a thousand years, and no sum of them overflows.
pub fn is_plausible(meta: &Meta) -> bool {
    const BOUND: u64 = 1 << 62;
    let counters = [meta.sequence, meta.epoch.0, meta.replay_from.0, meta.keep_from.0];
    counters.iter().all(|&counter| counter < BOUND) && meta.record_count < BOUND
}

/// Sets up the words of a new shared state for `meta`, found at meta page `index`.
pub fn initialise(core: &Core, meta: &Meta, index: u32, file_pages: u32) -> Result<()> {
    let control = core.control();
    let salt = filesystem::random_u64().map_err(|e| core.io("get a random number", e))?.max(1);
    let lsn = meta.replay_from.0;
    control.readers.root.store(meta.root, Relaxed);
    control.readers.file_pages.store(file_pages, Relaxed);
    control.readers.reserve_percent.store(meta.reserve, Relaxed);
    let words = &control.writer;
    words.tail.store(lsn, Relaxed);
    words.applied.store(lsn, Relaxed);
    words.count.store(meta.record_count, Relaxed);
    words.epoch.store(meta.epoch.0 + 1, Relaxed);
    words.salt.store(salt, Relaxed);
    words.salt_from.store(lsn, Relaxed);
    words.salt_before.store(meta.last_salt, Relaxed);
    control.changes.ring_from.store(lsn, Relaxed);
    control.changes.keep_log_kib.store(meta.keep_log_kib, Relaxed);
    let log = &control.log;
    log.start.store(lsn, Relaxed);
    log.written.store(lsn, Relaxed);
    log.synced.store(lsn, Relaxed);
    log.salt.store(salt, Relaxed);
    log.switch_at.store(NO_SWITCH, Relaxed);
    let checkpoint = &control.checkpoint;
    checkpoint.durable_meta.store(index, Relaxed);
    checkpoint.durable_sequence.store(meta.sequence, Relaxed);
    checkpoint.durable_epoch.store(meta.epoch.0, Relaxed);
    checkpoint.durable_root.store(meta.root, Relaxed);
    checkpoint.durable_lsn.store(lsn, Relaxed);
    for (table, bytes) in [
        (&control.used_bits, bits::table_bytes(file_pages)),
        (&control.page_states, file_pages as u64),
        // So that a snapshot, and with it a check, can be had on a full disk.
        (&control.snapshots, 1),
    ] {
        core.shm.grow(table, bytes).map_err(|e| core.io("set up the shared state", e))?;
    }
    load_map(core, meta, file_pages)?;
    protect(core, meta)?;
    words.free_pages.store(bits::count_free(core, file_pages), Relaxed);
    Ok(())
}

/// Checks the root, and marks it and the pages that every database has used, whatever the map says of them: a damaged map
/// must not have them overwritten.
fn protect(core: &Core, meta: &Meta) -> Result<()> {
    let root = Root::from_word(meta.root);
    let mut runs = vec![Run { first: PageNo(0), len: HEADER_COPY_PAGE + 1 }];
    match root.depth {
        Some(depth) => {
            locate::check_array(core, root.page, depth)?;
            runs.push(Run { first: root.page, len: locate::array_pages(core.page_size, depth) });
        }
        None => runs.push(Run { first: root.page, len: 1 }),
    }
    let map = MapPages::load(core, meta.map_levels, &meta.map_pages)?;
    runs.extend(map.all().map(|page| Run { first: page, len: 1 }));
    for run in runs {
        core.check_run(run)?;
        bits::set_used_unverified(core, run)?;
    }
    Ok(())
}

/// Copies the durable free-space map into the allocation bits.
fn load_map(core: &Core, meta: &Meta, file_pages: u32) -> Result<()> {
    let map = MapPages::load(core, meta.map_levels, &meta.map_pages)?;
    let per_group = group_pages(core.page_size);
    // A growth may have crossed into a group of which nothing was used yet: what the map does not reach is free.
    for_each_group(core, &map, |group, group_bits| {
        let first = group as u64 * per_group as u64;
        for (index, chunk) in group_bits.chunks(8).enumerate() {
            let page = first + index as u64 * 64;
            if page >= file_pages as u64 {
                break;
            }
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            let mut word = u64::from_le_bytes(word);
            if file_pages as u64 - page < 64 {
                word &= (1 << (file_pages as u64 - page)) - 1;
            }
            set_bits(core, page, word)?;
        }
        Ok(())
    })
}

/// Sets the allocation bits of the 64 pages from `page` on, which need not begin a word.
fn set_bits(core: &Core, page: u64, word: u64) -> Result<()> {
    if word == 0 {
        return Ok(());
    }
    let table = &core.control().used_bits;
    let short = || core.corrupt_shm("the allocation bits are too short");
    let shift = page % 64;
    let low = core.shm.word(table, page / 64 * 8).ok_or_else(short)?;
    low.fetch_or(word << shift, Relaxed);
    if shift != 0 && word >> (64 - shift) != 0 {
        let high = core.shm.word(table, (page / 64 + 1) * 8).ok_or_else(short)?;
        high.fetch_or(word >> (64 - shift), Relaxed);
    }
    Ok(())
}
