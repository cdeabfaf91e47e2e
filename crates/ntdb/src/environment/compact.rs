//! Making the file small while it is in use.
//!
//! 1. Buckets are joined that fit into one page together. A checkpoint then frees what they were.
//! 2. Pages behind the place where the file could end are moved to free ones before it, by steps that change nothing a user can see,
//!    between which others work. A checkpoint frees their former places. Again, until nothing is gained.
//! 3. *file pages* goes back to the last page that is used: from now on nobody takes a page behind it without letting the file grow.
//!    A checkpoint makes a meta page durable that speaks of no page behind. Then the file is cut there, or where it
//!    ends by then.
//!
//! What a reader, a snapshot, a transaction or another checkpoint holds is used, so the file is never cut before it; it ends
//! behind that then, and a later compaction gains the rest. A death anywhere leaves a longer file, and nothing else.

use std::sync::atomic::Ordering::*;
use std::time::Duration;

use crate::checkpoint::run::{self, CheckpointGuard, Purpose};
use crate::core::{Backing, Core};
use crate::error::Result;
use crate::index::{relocate, shrink};
use crate::options::deadline_after;
use crate::page::meta::META_PAGES;
use crate::space::{allocate, bits, retire};
use crate::storage::failpoint::crash_point;
use crate::transaction::writer::Writer;
use crate::types::PageNo;

use super::Environment;
use super::first::has_private_readers;

/// How often pages are moved at most: others take pages behind the limit meanwhile, and what had no room at first may have some
/// where others have been.
const ROUNDS: u32 = 6;
/// Which share of the file must become free, one of so many, for another round.
const GAIN_SHARE: u32 = 64;
/// So many pages less are worth another checkpoint.
const GAIN_PAGES_MIN: u32 = 8;

impl Environment {
    /// Makes the file as small as it can be now. Waits for locks for `limit` each. `progress` hears which share is done, roughly.
    pub fn compact(&self, limit: Option<Duration>, progress: &mut dyn FnMut(f64)) -> Result<()> {
        let result = self.compact_parts(limit, progress);
        allocate::avoid_from(&self.core, 0);
        result
    }

    fn compact_parts(&self, limit: Option<Duration>, progress: &mut dyn FnMut(f64)) -> Result<()> {
        let core = &self.core;
        shrink::tighten(core, limit, &mut |share| progress(share / 2.0))?;
        if core.backing != Backing::Shared {
            return Ok(());
        }
        self.checkpoint(limit)?;
        for round in 0..ROUNDS {
            progress(0.5 + 0.4 * round as f64 / ROUNDS as f64);
            retire::settle(core, limit)?;
            let end = bits::end_of_used(core, core.control().readers.file_pages.load(Acquire));
            let Some(before) = worth_moving(core, end, u32::MAX, GAIN_SHARE) else { break };
            allocate::avoid_from(core, before.0);
            if !relocate::relocate(core, before, limit)? {
                break;
            }
            crash_point("compact.moved");
            self.checkpoint(limit)?;
        }
        progress(0.9);
        let guard = CheckpointGuard::lock(core, limit)?;
        retire::settle(core, limit)?;
        allocate::shorten(&Writer::lock(core, deadline_after(limit))?);
        run::run(&self.context(), &guard, Purpose::Periodic, limit)?;
        crash_point("compact.checkpointed");
        // An older state's pages, which somebody reads without being attached, are left alone.
        let ofd = core.session().ofd.as_ref();
        let readers = ofd.map(|ofd| has_private_readers(core, ofd)).transpose()?;
        if readers != Some(true) {
            allocate::truncate(core, limit)?;
        }
        drop(guard);
        progress(1.0);
        Ok(())
    }
}

/// The page before which all of the tree is to be moved, so that the file can be cut there; `None` if that is not worth it:
/// more than `most` pages to move, or less than one `share`th of the file to gain. `end` is where the file could be cut now.
pub fn worth_moving(core: &Core, end: u32, most: u32, share: u32) -> Option<PageNo> {
    let free = bits::count_free(core, end);
    let (mut free_before, mut moved, mut limit) = (free, 0u32, end);
    // Directories, the array and the map are copied too, though they lie before the limit.
    let extra = |moved: u32| moved / 16 + 8;
    for page in (META_PAGES[1] + 2..end).rev() {
        if bits::is_used(core, PageNo(page)) {
            moved += 1;
        } else {
            free_before -= 1;
        }
        if moved > most || free_before < (moved + extra(moved)) as u64 {
            break;
        }
        limit = page;
    }
    let gain = end - limit;
    (gain >= GAIN_PAGES_MIN && gain >= end / share).then_some(PageNo(limit))
}
