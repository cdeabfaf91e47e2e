//! The durable free-space map: one bit per page, copied on write like everything else.
//!
//! The map of a checkpoint is that of the one before, with the bits of the pages that only the old tree has cleared, and of
//! those that the new tree has set. Clearing comes first, for what both may have is visited on both sides. A map page that
//! changes is copied to a new page, which changes bits again (its own and its predecessor's), perhaps in further map pages;
//! each is copied once only, so this ends.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::core::Core;
use crate::error::Result;
use crate::options::deadline_after;
use crate::page::head::{HEAD_BYTES, Kind, PageHead};
use crate::page::map::{self, group_pages, index_entries};
use crate::page::meta;
use crate::transaction::step::{Step, list_set};
use crate::transaction::writer::Writer;
use crate::types::{PageNo, Run};

/// The pages of a map: map pages by group, and index pages if there are too many for the meta page.
#[derive(Clone, Debug, Default)]
pub struct MapPages {
    /// Map page of each group.
    pub groups: Vec<PageNo>,
    /// Index pages that list them.
    pub index: Vec<PageNo>,
}

impl MapPages {
    /// Reads the map's page numbers as a meta page gives them.
    pub fn load(core: &Core, levels: u32, listed: &[u32]) -> Result<MapPages> {
        let listed: Vec<PageNo> = listed.iter().map(|&page| PageNo(page)).collect();
        if levels == 0 {
            return Ok(MapPages { groups: listed, index: Vec::new() });
        }
        let mut groups = Vec::new();
        for &page in &listed {
            let base = core.tree_page(page, Kind::MapIndex)?;
            for entry in 0..index_entries(core.page_size) {
                // SAFETY: within the page; map pages don't change once written.
                let number = unsafe { base.add(HEAD_BYTES + 4 * entry).cast::<u32>().read() };
                let number = PageNo(u32::from_le(number));
                if number.is_none() {
                    break;
                }
                groups.push(number);
            }
        }
        Ok(MapPages { groups, index: listed })
    }

    /// The pages as the meta page lists them, and the number of levels.
    pub fn listed(&self) -> (u32, Vec<u32>) {
        let list = |pages: &[PageNo]| pages.iter().map(|page| page.0).collect();
        if self.index.is_empty() { (0, list(&self.groups)) } else { (1, list(&self.index)) }
    }

    /// All pages of the map.
    pub fn all(&self) -> impl Iterator<Item = PageNo> + '_ {
        self.groups.iter().chain(&self.index).copied()
    }
}

/// The bits of a map page.
///
/// # Safety
/// The page is mapped, and nobody writes it during `'a`.
unsafe fn bits<'a>(page: *mut u8, page_size: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(page.add(HEAD_BYTES), page_size - HEAD_BYTES) }
}

/// Calls `f` with the number of each group and its bits.
pub fn for_each_group(
    core: &Core,
    pages: &MapPages,
    mut f: impl FnMut(u32, &[u8]) -> Result<()>,
) -> Result<()> {
    for (group, &page) in pages.groups.iter().enumerate() {
        let base = core.tree_page(page, Kind::Map)?;
        if core.head(page)?.prefix.load(Relaxed) != group as u64 {
            return Err(core.corrupt(page, format!("is not map page {group}")));
        }
        // SAFETY: map pages don't change once written, and the durable ones are not re-used.
        f(group as u32, unsafe { bits(base, core.page_size) })?;
    }
    Ok(())
}

/// A map being derived from the last one.
pub struct MapBuilder<'c> {
    core: &'c Core,
    old: MapPages,
    /// New map pages by group.
    new: BTreeMap<u32, PageNo>,
    /// Bits still to be changed because map pages themselves move.
    pending: Vec<(Run, bool)>,
    /// How long to wait for the writer lock each time.
    limit: Option<Duration>,
}

impl<'c> MapBuilder<'c> {
    /// Begins with the map of the last checkpoint.
    pub fn new(core: &'c Core, old: MapPages, limit: Option<Duration>) -> MapBuilder<'c> {
        MapBuilder { core, old, new: BTreeMap::new(), pending: Vec::new(), limit }
    }

    /// Marks pages used or free.
    pub fn mark(&mut self, run: Run, used: bool) -> Result<()> {
        self.mark_one(run, used)?;
        while let Some((run, used)) = self.pending.pop() {
            self.mark_one(run, used)?;
        }
        Ok(())
    }

    fn mark_one(&mut self, run: Run, used: bool) -> Result<()> {
        let per_group = group_pages(self.core.page_size) as u64;
        let mut page = run.first.0 as u64;
        let end = page + run.len as u64;
        // A forged length must not make the map longer than the file needs.
        self.core.check_run(run)?;
        while page < end {
            let group = (page / per_group) as u32;
            let within = (page % per_group) as u32;
            let count = (per_group - within as u64).min(end - page) as u32;
            let number = self.group(group)?;
            let base = self.core.page(number)?;
            // SAFETY: this page is this checkpoint's own until the meta page that names it is written.
            let bits = unsafe {
                std::slice::from_raw_parts_mut(
                    base.add(HEAD_BYTES),
                    self.core.page_size - HEAD_BYTES,
                )
            };
            map::mark(bits, within, within + count, used);
            page += count as u64;
        }
        Ok(())
    }

    /// The new page of `group`, copied from the old one at first.
    fn group(&mut self, group: u32) -> Result<PageNo> {
        if let Some(&page) = self.new.get(&group) {
            return Ok(page);
        }
        let core = self.core;
        let number = take_page(core, self.limit)?;
        let base = core.page(number)?;
        // SAFETY: taken just now: nobody else uses it.
        unsafe {
            match self.old.groups.get(group as usize) {
                Some(&old) => {
                    let source = core.tree_page(old, Kind::Map)?;
                    // May be the same page, if a damaged map says that its own pages are free.
                    std::ptr::copy(source, base, core.page_size);
                    self.pending.push((Run { first: old, len: 1 }, false));
                }
                None => std::ptr::write_bytes(base, 0, core.page_size),
            }
            PageHead::at(base).init(Kind::Map, number, core.epoch(), 0, group as u64);
        }
        self.pending.push((Run { first: number, len: 1 }, true));
        self.new.insert(group, number);
        Ok(number)
    }

    /// Completes the map: every group up to the last one has a page, index pages are written if needed, all
    /// new pages have their checksums. Returns the new map, and the pages of the old one that it no longer has.
    pub fn finish(mut self) -> Result<(MapPages, Vec<PageNo>)> {
        let core = self.core;
        let mut groups = self.group_count();
        for group in 0..groups {
            if group as usize >= self.old.groups.len() {
                self.group(group)?;
            }
        }
        self.mark(Run { first: PageNo(0), len: 4 }, true)?;
        let needs_index = |groups: u32| groups as usize > meta::capacity(core.page_size as u32);
        let mut index: Vec<PageNo> = Vec::new();
        if needs_index(groups) || !self.old.index.is_empty() {
            for old in self.old.index.clone() {
                self.mark(Run { first: old, len: 1 }, false)?;
            }
            // Taking index pages may make a new group; there is never more than one too few.
            loop {
                groups = self.group_count();
                let wanted = if needs_index(groups) {
                    (groups as usize).div_ceil(index_entries(core.page_size))
                } else {
                    0
                };
                if index.len() >= wanted {
                    break;
                }
                let page = take_page(core, self.limit)?;
                self.mark(Run { first: page, len: 1 }, true)?;
                index.push(page);
            }
        }
        groups = self.group_count();
        for group in 0..groups {
            if group as usize >= self.old.groups.len() {
                self.group(group)?;
            }
        }
        while let Some((run, used)) = self.pending.pop() {
            self.mark_one(run, used)?;
        }
        let groups: Vec<PageNo> = (0..self.group_count())
            .map(|group| {
                self.new.get(&group).copied().unwrap_or_else(|| self.old.groups[group as usize])
            })
            .collect();
        self.write_index(&index, &groups)?;
        for &page in self.new.values().chain(&index) {
            seal(core, page, 1)?;
        }
        let mut gone: Vec<PageNo> = self
            .new
            .keys()
            .filter_map(|&group| self.old.groups.get(group as usize).copied())
            .collect();
        gone.extend(&self.old.index);
        Ok((MapPages { groups, index }, gone))
    }

    fn group_count(&self) -> u32 {
        let last_new = self.new.keys().next_back().map_or(0, |&group| group + 1);
        last_new.max(self.old.groups.len() as u32)
    }

    fn write_index(&self, index: &[PageNo], groups: &[PageNo]) -> Result<()> {
        let core = self.core;
        for (number, part) in index.iter().zip(groups.chunks(index_entries(core.page_size))) {
            let base = core.page(*number)?;
            // SAFETY: taken by this checkpoint: nobody else uses it; the entries fit, as `index_entries` says.
            unsafe {
                std::ptr::write_bytes(base, 0, core.page_size);
                PageHead::at(base).init(Kind::MapIndex, *number, core.epoch(), 0, 0);
                for (i, group) in part.iter().enumerate() {
                    base.add(HEAD_BYTES + 4 * i).cast::<u32>().write(group.0.to_le());
                }
            }
        }
        Ok(())
    }
}

/// Takes a page for the running checkpoint, and lists it in the same step.
fn take_page(core: &Core, limit: Option<Duration>) -> Result<PageNo> {
    let mut writer = Writer::lock(core, deadline_after(limit))?;
    let made = &core.control().checkpoint_made;
    let index = made.len.load(Relaxed);
    core.shm.grow(made, (index + 1) * 8).map_err(|e| core.io("grow the shared state", e))?;
    let mut step = Step::begin(&mut writer);
    let page = step.take(1)?;
    list_set(core, made, index, Run { first: page, len: 1 })?;
    step.store_shared(&made.len, index + 1);
    step.structure()?;
    Ok(page)
}

/// Writes the checksum of a page, or run, that will not change any more.
pub fn seal(core: &Core, first: PageNo, pages: u32) -> Result<()> {
    let base = core.run(first, pages)?;
    // SAFETY: within the mapping; the page is frozen, so its bytes keep still.
    let bytes =
        unsafe { std::slice::from_raw_parts(base.add(4), core.page_size * pages as usize - 4) };
    let checksum = crc32c::crc32c(bytes);
    core.head(first)?.checksum.store(checksum, Relaxed);
    Ok(())
}
