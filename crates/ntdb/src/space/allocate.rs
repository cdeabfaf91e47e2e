//! Taking pages, and growing the file.
//!
//! Pages freed last are re-used first, since they are still in the caches; then whatever the bits say is free; then the
//! file grows. Growth is allocated by the file system before it is touched, so that a full disk is an error code and
//! never a signal (for large values before the writer lock is taken: [`allocate_ahead`]), and it becomes visible by the single store of `file_pages`: a writer that dies before leaves a longer
//! file than that, which the next growth takes over.

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::{Backing, Core};
use crate::error::{Error, Result};
use crate::options::deadline_after;
use crate::page::meta::META_PAGES;
use crate::shm::layout::RECENT;
use crate::storage::failpoint::{crash_point, fault};
use crate::transaction::writer::Writer;
use crate::types::{PageNo, Run};

use super::bits::Search;
use super::{bits, patience, retire, snapshots};

/// The file grows by an eighth of itself, but at least this many bytes (a small database stays small) ...
const GROWTH_BYTES_MIN: u64 = 64 << 10;
/// ... and at most this many, so that nobody waits long for one growth.
const GROWTH_BYTES_MAX: u64 = 1 << 20;
/// Replaced pages that must have gathered before it is worth looking whether they are free.
const RECLAIM_BATCH: u64 = 32;
/// How often whoever finds no free page looks at some more replaced ones before the file grows.
const RECLAIM_PARTS: u32 = 8;
/// So much is cut from the file at once.
const CUT_BYTES: u64 = 64 << 20;
/// Pages of a run that is long.
pub const LONG_RUN_PAGES: u32 = 64;
/// How often to allocate ahead, if others are always faster.
const AHEAD_ATTEMPTS: u32 = 4;

/// Finds `pages` consecutive free pages and leaves them marked free; the caller notes them before it marks them used.
pub fn find(writer: &mut Writer, pages: u32, may_reclaim: bool) -> Result<PageNo> {
    if let Some(page) = find_present(writer, pages, may_reclaim)? {
        return Ok(page);
    }
    if may_reclaim
        && snapshots::release_dead_some(writer)?
        && let Some(page) = find_present(writer, pages, true)?
    {
        return Ok(page);
    }
    match grow(writer, pages) {
        Ok(()) => {}
        Err(error @ Error::Full { .. }) if may_reclaim => {
            // The disk is full: whatever is reclaimable counts now.
            retire::filter_held_now(writer)?;
            return search(writer, pages).ok_or(error);
        }
        Err(error) => return Err(error),
    }
    search(writer, pages)
        .ok_or_else(|| writer.core.corrupt_shm("no free page after the file has grown"))
}

/// How many pages directly behind others, from `first` on, may be taken for what grows there: at least `least`, at most `most`, or
/// none. They stay marked free, as in [`find`]. At its end the file grows for them, but not by much, for the lock is held.
pub fn find_behind(writer: &mut Writer, first: PageNo, least: u32, most: u32) -> Result<u32> {
    let core = writer.core;
    let control = core.control();
    let much = (GROWTH_BYTES_MAX / core.page_size as u64) as u32;
    let free = || {
        let file_pages = control.readers.file_pages.load(Relaxed);
        let end = first.0.saturating_add(most).min(wanted_before(core, file_pages));
        (bits::free_from(core, first, end), file_pages)
    };
    if !may_use(writer, first) {
        return Ok(0);
    }
    let (mut found, file_pages) = free();
    let at_end = first.0.checked_add(found) == Some(file_pages);
    let missing = least.saturating_sub(found);
    if missing > 0 && missing <= much && at_end && control.space.avoid_from.load(Relaxed) == 0 {
        match keep_cursor(core, LONG_RUN_PAGES, || grow(writer, missing)) {
            Ok(()) => (found, _) = free(),
            // Elsewhere there may be room.
            Err(Error::Full { .. }) => return Ok(0),
            Err(error) => return Err(error),
        }
    }
    Ok(if found < least { 0 } else { found })
}

/// As [`find`], without letting the file grow.
fn find_present(writer: &mut Writer, pages: u32, may_reclaim: bool) -> Result<Option<PageNo>> {
    if pages == 1
        && let Some(page) = recent(writer)
    {
        return Ok(Some(page));
    }
    if may_reclaim && retire::waiting(writer.core) >= RECLAIM_BATCH {
        retire::reclaim(writer)?;
        if pages == 1
            && let Some(page) = recent(writer)
        {
            return Ok(Some(page));
        }
    }
    if let Some(page) = search(writer, pages) {
        return Ok(Some(page));
    }
    if may_reclaim {
        for _ in 0..RECLAIM_PARTS {
            if retire::reclaim(writer)? + retire::filter_held(writer)? == 0 {
                break;
            }
            if let Some(page) = search(writer, pages) {
                return Ok(Some(page));
            }
        }
    }
    Ok(None)
}

/// Sees to it, without the writer lock, that whoever takes `pages` pages under it will not have to wait for the file system to
/// allocate them. Nobody else sees anything of it, and whoever grows the file next may use what was allocated, so a death
/// here leaves nothing.
pub fn allocate_ahead(core: &Core, pages: u32, deadline: Option<Instant>) -> Result<()> {
    if core.backing != Backing::Shared {
        return Ok(());
    }
    let space = &core.control().space;
    // Others may grow the file into it meanwhile.
    for _ in 0..AHEAD_ATTEMPTS {
        let present = {
            let mut writer = Writer::lock(core, deadline)?;
            if find_present(&mut writer, pages, true)?.is_some() {
                return Ok(());
            }
            core.control().readers.file_pages.load(Relaxed)
        };
        let growth = growth_pages(core, present, pages);
        let end = (present as u64 + growth).min(u32::MAX as u64) as u32;
        let known = space.allocated.load(Acquire);
        let from = allocated_pages(known).max(present);
        if end <= from {
            return Ok(());
        }
        if allocate_file(core, from, end).is_err() {
            // Under the lock there may be another way, or an error that says which.
            return Ok(());
        }
        crash_point("space.ahead.allocated");
        // Unless the file has been cut meanwhile, or somebody has allocated more.
        let update = |now: u64| {
            let is_more = now >> 32 == known >> 32 && allocated_pages(now) < end;
            is_more.then_some(known >> 32 << 32 | end as u64)
        };
        let _ = space.allocated.fetch_update(AcqRel, Acquire, update);
    }
    Ok(())
}

/// The page up to which the file is allocated, in a word that says so.
fn allocated_pages(word: u64) -> u32 {
    word as u32
}

/// Lets the file, as everybody sees it, end with the last page that is used. The pages behind it stay in the file until
/// [`truncate`] cuts it, which must not be before a meta page that does not speak of them is durable. Returns the number of pages.
pub fn shorten(writer: &Writer) -> u32 {
    let core = writer.core;
    let control = core.control();
    let present = control.readers.file_pages.load(Relaxed);
    let lowest = control.checkpoint.no_reuse_below.load(Relaxed).max(META_PAGES[1] + 2);
    let end = bits::end_of_used(core, present).max(lowest).min(present);
    if end < present {
        crash_point("space.shorten");
        bits::forget_groups(core, Run { first: PageNo(end), len: present - end });
        control.readers.file_pages.store(end, Release);
        crash_point("space.shortened");
        let gone = (present - end) as u64;
        let free = control.writer.free_pages.load(Relaxed);
        control.writer.free_pages.store(free.saturating_sub(gone), Relaxed);
    }
    end
}

/// Cuts from the file what is beyond its last page, a part of [`CUT_BYTES`] at a time, so that nobody waits long for the writer lock.
pub fn truncate(core: &Core, limit: Option<Duration>) -> Result<()> {
    let Some(data) = &core.data else { return Ok(()) };
    let failed = |source| core.io("cut the data file", source);
    loop {
        let writer = Writer::lock(core, deadline_after(limit))?;
        let end = core.control().readers.file_pages.load(Acquire);
        let bytes = end as u64 * core.page_size as u64;
        let len = data.len().map_err(failed)?;
        if len <= bytes {
            return Ok(());
        }
        // Whoever allocates just now, without the lock, is not believed afterwards.
        let cuts = core.control().space.allocated.load(Acquire) >> 32;
        core.control().space.allocated.store((cuts + 1) << 32, Release);
        crash_point("space.truncate");
        data.truncate(bytes.max(len.saturating_sub(CUT_BYTES))).map_err(failed)?;
        crash_point("space.truncated");
        drop(writer);
    }
}

/// Allocates pages of the file, from and to.
fn allocate_file(core: &Core, from: u32, to: u32) -> std::io::Result<()> {
    let data = core.data.as_ref().expect("a shared database has a file");
    let page_bytes = core.page_size as u64;
    data.allocate(from as u64 * page_bytes, (to - from) as u64 * page_bytes)
}

/// Lets the next pages taken be the first that are free, as opposed to those freed last.
pub fn prefer_the_front(writer: &Writer) {
    let space = &writer.core.control().space;
    space.recent_len.store(0, Relaxed);
    space.cursor.store(0, Relaxed);
}

/// From now on pages from `page` on are taken only if there are none before; 0 for no such wish. A hint.
pub fn avoid_from(core: &Core, page: u32) {
    core.control().space.avoid_from.store(page, Relaxed);
}

/// The page before which pages are wanted.
fn wanted_before(core: &Core, file_pages: u32) -> u32 {
    match core.control().space.avoid_from.load(Relaxed) {
        0 => file_pages,
        page => page.min(file_pages),
    }
}

/// Whether `pages` consecutive pages before `limit` are free and may be used.
pub fn has_room_before(core: &Core, limit: PageNo, pages: u32) -> bool {
    let lowest = core.control().checkpoint.no_reuse_below.load(Relaxed);
    Search::new(core).find_run(lowest, limit.0, pages).is_some()
}

/// The page freed last that is still free.
fn recent(writer: &Writer) -> Option<PageNo> {
    let space = &writer.core.control().space;
    let file_pages = writer.core.control().readers.file_pages.load(Relaxed);
    let end = wanted_before(writer.core, file_pages);
    let mut len = (space.recent_len.load(Relaxed) as usize).min(RECENT);
    while len > 0 {
        len -= 1;
        let page = PageNo(space.recent[len].load(Relaxed));
        if page.0 < end && may_use(writer, page) && !bits::is_used(writer.core, page) {
            space.recent_len.store(len as u32, Relaxed);
            return Some(page);
        }
    }
    space.recent_len.store(0, Relaxed);
    None
}

/// Remembers a freed page for re-use.
pub fn remember(writer: &Writer, page: PageNo) {
    let space = &writer.core.control().space;
    let len = space.recent_len.load(Relaxed) as usize;
    if len < RECENT {
        space.recent[len].store(page.0, Relaxed);
        space.recent_len.store(len as u32 + 1, Relaxed);
    }
}

fn may_use(writer: &Writer, page: PageNo) -> bool {
    page.0 >= writer.core.control().checkpoint.no_reuse_below.load(Relaxed)
}

/// If `pages` are many, lets the next search begin where it would have begun before they were taken: what grows there may need those
/// behind it.
pub fn keep_cursor<T>(core: &Core, pages: u32, take: impl FnOnce() -> T) -> T {
    let cursor = &core.control().space.cursor;
    let before = cursor.load(Relaxed);
    let taken = take();
    if pages >= LONG_RUN_PAGES {
        cursor.store(before, Relaxed);
    }
    taken
}

/// Searches the bits from where the last search ended, once round.
fn search(writer: &Writer, pages: u32) -> Option<PageNo> {
    let control = writer.core.control();
    if control.writer.free_pages.load(Relaxed) < pages as u64 {
        return None;
    }
    let file_pages = control.readers.file_pages.load(Relaxed);
    let lowest = control.checkpoint.no_reuse_below.load(Relaxed).min(file_pages);
    let cursor = control.space.cursor.load(Relaxed).clamp(lowest, file_pages);
    let mut search = Search::new(writer.core);
    let wanted = wanted_before(writer.core, file_pages);
    let mut found = None;
    if wanted < file_pages {
        found = search.find_run(cursor.min(wanted), wanted, pages);
        found = found.or_else(|| search.find_run(lowest, wanted, pages));
    }
    let found = found.or_else(|| search.find_run(cursor, file_pages, pages)).or_else(|| {
        let end = cursor.saturating_add(pages).min(file_pages);
        search.find_run(lowest, end, pages)
    });
    match found {
        Some(page) => control.space.cursor.store(page.0 + pages, Relaxed),
        None if pages == 1 && lowest == 0 && search.is_complete() => {
            control.writer.free_pages.store(0, Relaxed);
        }
        None => {}
    }
    found
}

/// Lets the file grow by at least `pages` pages.
fn grow(writer: &mut Writer, pages: u32) -> Result<()> {
    let present = writer.core.control().readers.file_pages.load(Relaxed);
    let generous = growth_pages(writer.core, present, pages)
        .min(patience::growth_pages(writer.core, present))
        .max(pages as u64);
    match grow_by(writer, present, generous) {
        Err(Error::Full { .. }) if generous > pages as u64 => {
            grow_by(writer, present, pages as u64)
        }
        result => result,
    }
}

/// By how many pages a file of `present` pages grows if `pages` are needed.
fn growth_pages(core: &Core, present: u32, pages: u32) -> u64 {
    let page_bytes = core.page_size as u64;
    let eighth = (present as u64 * page_bytes / 8).clamp(GROWTH_BYTES_MIN, GROWTH_BYTES_MAX);
    (eighth / page_bytes).max(pages as u64).max(1)
}

fn grow_by(writer: &mut Writer, present: u32, pages: u64) -> Result<()> {
    let core = writer.core;
    let full = |source| core.io("grow the data file", source);
    let new = present as u64 + pages;
    if new >= u32::MAX as u64 {
        return Err(full(std::io::Error::from_raw_os_error(libc::EFBIG)));
    }
    let new = new as u32;
    let control = core.control();
    if let Some(error) = fault("allocate:shm") {
        return Err(core.io("grow the shared state", error));
    }
    for (table, bytes) in [
        (&control.used_bits, bits::table_bytes(new)),
        (&control.used_groups, bits::groups_bytes(new)),
        (&control.page_states, new as u64),
    ] {
        core.shm.grow(table, bytes).map_err(|e| core.io("grow the shared state", e))?;
    }
    crash_point("space.grow.tables");
    if core.backing == Backing::Shared {
        let from = allocated_pages(control.space.allocated.load(Acquire)).max(present);
        if from < new {
            allocate_file(core, from, new).map_err(full)?;
        }
    }
    core.secure_mapping(new)?;
    crash_point("space.grow.allocated");
    bits::forget_groups(core, Run { first: PageNo(present), len: new - present });
    control.readers.file_pages.store(new, Release);
    control.writer.free_pages.fetch_add(pages, Relaxed);
    control.space.cursor.store(present, Relaxed);
    crash_point("space.grow.published");
    // What is larger is filled by a large operation, outside the lock.
    let populated = pages.min((GROWTH_BYTES_MAX / core.page_size as u64).max(1));
    core.populate(PageNo(present), populated as u32);
    Ok(())
}

/// Frees `run`: nothing can reach it any more.
pub fn free(writer: &Writer, run: Run) -> Result<()> {
    bits::set_free(writer.core, run)?;
    writer.core.control().writer.free_pages.fetch_add(run.len as u64, Relaxed);
    for page in (run.first.0..run.first.0.saturating_add(run.len)).take(16).rev() {
        remember(writer, PageNo(page));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Db;
    use crate::transaction::step::Step;

    /// Taking a long run under the writer lock finds the file allocated, also if others have grown it meanwhile.
    #[test]
    fn what_is_allocated_ahead_is_not_allocated_under_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::create(dir.path().join("a.ntdb")).unwrap();
        let core = &db.environment().core;
        let length = || core.data.as_ref().unwrap().len().unwrap();
        let pages = 3_000;
        allocate_ahead(core, pages, None).unwrap();
        let before = length();
        assert!(before >= pages as u64 * core.page_size as u64);
        let file_pages = core.control().readers.file_pages.load(Relaxed);
        assert!(file_pages < pages, "the file's length in pages does not change by it");
        for n in 0..2_000u32 {
            db.put(&n.to_le_bytes(), &[1; 100]).unwrap();
        }
        assert!(core.control().readers.file_pages.load(Relaxed) > file_pages);
        assert_eq!(length(), before, "growth has used what was allocated");
        allocate_ahead(core, pages, None).unwrap();
        let before = length();
        let mut writer = Writer::lock(core, None).unwrap();
        let mut step = Step::begin(&mut writer);
        let first = step.take(pages).unwrap();
        assert_eq!(length(), before);
        assert!(core.run(first, pages).is_ok());
        drop(step);
        drop(writer);
        assert!(db.check().unwrap().is_clean());
        db.close().unwrap();
        let rest = std::fs::metadata(dir.path().join("a.ntdb")).unwrap().len();
        assert!(rest < 2 << 20, "{rest} bytes at rest");
    }
}
