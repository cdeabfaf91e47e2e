//! One bit per page: set while the page is used for anything.
//!
//! Setting and clearing are absolute, so that repeating them after a death is harmless.
//!
//! So that a search does not go through all bits of a large file, a word for each group of 1024 pages sums up what is free in it:
//! how many pages, the longest run, and the runs at both ends. It is set to *unknown* before bits of the group change, and
//! computed by the next search that comes by. A run that reaches over groups is put together from their ends.

use std::sync::atomic::{AtomicU64, Ordering::*, compiler_fence};

use crate::core::Core;
use crate::error::Result;
use crate::shm::segment::SegmentTable;
use crate::storage::failpoint::crash_point;
use crate::types::{PageNo, Run};

/// Bytes of a bit table for `pages` pages.
pub fn table_bytes(pages: u32) -> u64 {
    (pages as u64).div_ceil(64) * 8
}

/// Sets or clears the bits of `run` in `table`.
fn mark(core: &Core, table: &SegmentTable, run: Run, set: bool) -> Result<()> {
    forget_groups(core, run);
    let mut page = run.first.0 as u64;
    let end = page + run.len as u64;
    while page < end {
        let within = page % 64;
        let count = (64 - within).min(end - page);
        let mask = (u64::MAX >> (64 - count)) << within;
        let word = core
            .shm
            .word(table, page / 64 * 8)
            .ok_or_else(|| core.corrupt_shm("a page lies outside the allocation bits"))?;
        if set {
            word.fetch_or(mask, Relaxed);
        } else {
            word.fetch_and(!mask, Relaxed);
        }
        page += count;
    }
    Ok(())
}

/// Marks `run` used, and, since its contents will be new, verified.
pub fn set_used(core: &Core, run: Run) -> Result<()> {
    core.set_new(run)?;
    mark(core, &core.control().used_bits, run, true)
}

/// Marks `run` used; what it holds is still to be verified.
pub fn set_used_unverified(core: &Core, run: Run) -> Result<()> {
    mark(core, &core.control().used_bits, run, true)
}

/// Marks `run` free.
pub fn set_free(core: &Core, run: Run) -> Result<()> {
    mark(core, &core.control().used_bits, run, false)
}

/// The word of the allocation bits for pages `64 x index` to `64 x index + 63`; all ones beyond the table.
pub fn used_word(core: &Core, index: u64) -> u64 {
    core.shm.word(&core.control().used_bits, index * 8).map_or(u64::MAX, |word| word.load(Relaxed))
}

/// One more than the last used page before page `limit`.
pub fn end_of_used(core: &Core, limit: u32) -> u32 {
    let mut index = (limit as u64).div_ceil(64);
    while index > 0 {
        index -= 1;
        let mut word = used_word(core, index);
        if (index + 1) * 64 > limit as u64 {
            word &= !(u64::MAX << (limit as u64 - index * 64));
        }
        if word != 0 {
            return (index * 64 + 64 - word.leading_zeros() as u64) as u32;
        }
    }
    0
}

/// How many pages from `first` on are free, before page `limit`.
pub fn free_from(core: &Core, first: PageNo, limit: u32) -> u32 {
    let mut page = first.0 as u64;
    while page < limit as u64 {
        let word = used_word(core, page / 64) >> (page % 64);
        let left = 64 - page % 64;
        let free = (word.trailing_zeros() as u64).min(left);
        page += free;
        if free < left {
            break;
        }
    }
    (page.min(limit as u64) as u32).saturating_sub(first.0)
}

/// Whether page `page` is used.
pub fn is_used(core: &Core, page: PageNo) -> bool {
    used_word(core, page.0 as u64 / 64) >> (page.0 % 64) & 1 == 1
}

/// Pages of a group, for which one word sums up what is free.
const GROUP_PAGES: u32 = 1024;
/// Groups that one search may have to sum up anew; what is behind them is left to the next search.
const SEARCH_GROUPS: u32 = 1024;

/// Bytes of the table of groups for `pages` pages.
pub fn groups_bytes(pages: u32) -> u64 {
    (pages as u64).div_ceil(GROUP_PAGES as u64) * 8
}

/// What is free in a group of pages.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Summary {
    /// Free pages.
    free: u32,
    /// Free pages at the beginning ...
    prefix: u32,
    /// ... and at the end.
    suffix: u32,
    /// Longest run of free pages.
    longest: u32,
}

impl Summary {
    /// A word of the table that is not known.
    const UNKNOWN: u64 = 0;
    const KNOWN: u64 = 1 << 63;

    fn to_word(self) -> u64 {
        let Summary { free, prefix, suffix, longest } = self;
        Self::KNOWN
            | (free as u64)
            | (prefix as u64) << 13
            | (suffix as u64) << 26
            | (longest as u64) << 39
    }

    fn from_word(word: u64) -> Option<Summary> {
        let part = |shift: u32| (word >> shift & 0x1fff) as u32;
        (word & Self::KNOWN != 0).then(|| Summary {
            free: part(0),
            prefix: part(13),
            suffix: part(26),
            longest: part(39),
        })
    }

    /// Adds a run of `len` pages.
    fn push(&mut self, is_free: bool, len: u32, run: &mut u32, at_start: &mut bool) {
        if is_free {
            self.free += len;
            *run += len;
            self.longest = self.longest.max(*run);
            if *at_start {
                self.prefix = *run;
            }
        } else {
            *run = 0;
            *at_start = false;
        }
    }

    /// From the bits of `group`.
    fn compute(used_word: impl Fn(u64) -> u64, group: u32, file_pages: u32) -> Summary {
        let mut summary = Summary::default();
        let (mut run, mut at_start) = (0, true);
        let first = group as u64 * GROUP_PAGES as u64;
        for page in (first..first + GROUP_PAGES as u64).step_by(64) {
            let mut word = used_word(page / 64);
            if page + 64 > file_pages as u64 {
                // What is beyond the file is not free.
                let within = (file_pages as u64).saturating_sub(page);
                word |= u64::MAX << within;
            }
            let mut left = 64;
            while left > 0 {
                let used = word.trailing_ones().min(left);
                if used > 0 {
                    summary.push(false, used, &mut run, &mut at_start);
                    left -= used;
                    word = word.checked_shr(used).unwrap_or(0);
                }
                let free = word.trailing_zeros().min(left);
                if free > 0 {
                    summary.push(true, free, &mut run, &mut at_start);
                    left -= free;
                    word = word.checked_shr(free).unwrap_or(0);
                }
            }
        }
        summary.suffix = run;
        summary
    }
}

/// The word that sums up `group`; `None` where the table does not reach, and everything is summed up anew each time.
fn group_word(core: &Core, group: u32) -> Option<&AtomicU64> {
    core.shm.word(&core.control().used_groups, group as u64 * 8)
}

/// Forgets what is known of the groups of `run`, whose bits are about to change.
pub fn forget_groups(core: &Core, run: Run) {
    let last = (run.first.0 as u64 + run.len.max(1) as u64 - 1) / GROUP_PAGES as u64;
    for group in (run.first.0 / GROUP_PAGES) as u64..=last {
        if let Some(word) = group_word(core, group as u32)
            && word.load(Relaxed) != Summary::UNKNOWN
        {
            word.store(Summary::UNKNOWN, Relaxed);
        }
    }
    // A kill between the two must not leave a summary of bits that have changed.
    compiler_fence(SeqCst);
    crash_point("space.groups.forgotten");
}

/// The words that sum up the groups below `file_pages`, for a check.
pub fn group_words(core: &Core, file_pages: u32) -> Vec<u64> {
    let groups = 0..file_pages.div_ceil(GROUP_PAGES);
    groups.map(|group| group_word(core, group).map_or(0, |word| word.load(Relaxed))).collect()
}

/// The first page of each group of which `words` say what is not so by the bits in `used`.
pub fn wrong_groups(words: &[u64], used: &[u64], file_pages: u32) -> Vec<PageNo> {
    let used_word = |index: u64| used.get(index as usize).copied().unwrap_or(u64::MAX);
    let is_wrong = |&group: &u32| {
        let known = Summary::from_word(words[group as usize]);
        known.is_some_and(|known| known != Summary::compute(used_word, group, file_pages))
    };
    let wrong = (0..words.len() as u32).filter(is_wrong);
    wrong.map(|group| PageNo(group * GROUP_PAGES)).collect()
}

/// A search for free pages, under the writer lock.
#[derive(Debug)]
pub struct Search<'c> {
    core: &'c Core,
    file_pages: u32,
    /// Groups that may still be summed up.
    left: u32,
}

impl<'c> Search<'c> {
    /// Begins a search.
    pub fn new(core: &'c Core) -> Search<'c> {
        let file_pages = core.control().readers.file_pages.load(Relaxed);
        if group_word(core, file_pages.saturating_sub(1) / GROUP_PAGES).is_none() {
            // Without the words a search is slow, and no less right.
            let _ = core.shm.grow(&core.control().used_groups, groups_bytes(file_pages));
        }
        Search { core, file_pages, left: SEARCH_GROUPS }
    }

    /// Whether everything that was asked for was searched.
    pub fn is_complete(&self) -> bool {
        self.left > 0
    }

    fn summary(&mut self, group: u32) -> Summary {
        let word = group_word(self.core, group);
        if let Some(known) = word.and_then(|word| Summary::from_word(word.load(Relaxed))) {
            return known;
        }
        self.left = self.left.saturating_sub(1);
        let summary = Summary::compute(|index| used_word(self.core, index), group, self.file_pages);
        if let Some(word) = word {
            word.store(summary.to_word(), Relaxed);
        }
        summary
    }

    /// The first run of `len` free pages in `from..to`, as far as it was searched.
    pub fn find_run(&mut self, from: u32, to: u32, len: u32) -> Option<PageNo> {
        let len = len as u64;
        let (mut page, to) = (from as u64, to as u64);
        let group_pages = GROUP_PAGES as u64;
        let mut run = FreeRun { start: page, len: 0 };
        while page < to {
            let end = (page / group_pages + 1) * group_pages;
            if page.is_multiple_of(group_pages) && end <= to {
                if self.left == 0 {
                    return None;
                }
                let summary = self.summary((page / group_pages) as u32);
                run.extend(page, summary.prefix as u64);
                if run.len >= len {
                    return self.verified(run.start, len);
                }
                if (summary.longest as u64) < len {
                    if (summary.suffix as u64) < group_pages {
                        let suffix = summary.suffix as u64;
                        run = FreeRun { start: end - suffix, len: suffix };
                    }
                    page = end;
                    continue;
                }
                run = FreeRun { start: page, len: 0 };
            }
            if let Some(start) = scan(self.core, page, end.min(to), len, &mut run) {
                return Some(PageNo(start as u32));
            }
            page = end;
        }
        None
    }

    /// The run at `start`, if it is free as the summaries say.
    fn verified(&self, start: u64, len: u64) -> Option<PageNo> {
        let mut run = FreeRun { start, len: 0 };
        let found = scan(self.core, start, start + len, len, &mut run);
        if found.is_none() {
            // Only in shared state that somebody has damaged.
            let (first, len) = (PageNo(start as u32), len.min(u32::MAX as u64) as u32);
            forget_groups(self.core, Run { first, len });
        }
        found.map(|start| PageNo(start as u32))
    }
}

/// Free pages at the end of what has been searched.
#[derive(Clone, Copy, Debug)]
struct FreeRun {
    start: u64,
    len: u64,
}

impl FreeRun {
    /// `free` more free pages at `page`.
    fn extend(&mut self, page: u64, free: u64) {
        if self.len == 0 {
            self.start = page;
        }
        self.len += free;
    }
}

/// Goes on with `run` through the bits of the pages `page..to`, until it has `len` pages: where it begins.
fn scan(core: &Core, mut page: u64, to: u64, len: u64, run: &mut FreeRun) -> Option<u64> {
    while page < to {
        let word = used_word(core, page / 64) >> (page % 64);
        let left = (64 - page % 64).min(to - page);
        if word & (u64::MAX >> (64 - left)) == (u64::MAX >> (64 - left)) {
            run.len = 0;
            page += left;
            continue;
        }
        let free = (word.trailing_zeros() as u64).min(left);
        if free > 0 {
            run.extend(page, free);
            if run.len >= len {
                return Some(run.start);
            }
            page += free;
            continue;
        }
        run.len = 0;
        page += ((!word).trailing_zeros() as u64).min(left);
    }
    None
}

/// Number of free pages below `file_pages`.
pub fn count_free(core: &Core, file_pages: u32) -> u64 {
    let mut free = 0;
    for group in 0..file_pages.div_ceil(GROUP_PAGES) {
        let whole = (group as u64 + 1) * GROUP_PAGES as u64 <= file_pages as u64;
        let known = group_word(core, group)
            .filter(|_| whole)
            .and_then(|word| Summary::from_word(word.load(Relaxed)));
        free += match known {
            Some(summary) => summary.free as u64,
            None => Summary::compute(|index| used_word(core, index), group, file_pages).free as u64,
        };
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Db;
    use proptest::prelude::*;

    /// The first run, bit by bit.
    fn first_run(used: &[bool], from: u32, to: u32, len: u32) -> Option<PageNo> {
        let mut run = 0;
        for page in from..to {
            run = if used[page as usize] { 0 } else { run + 1 };
            if run == len {
                return Some(PageNo(page + 1 - len));
            }
        }
        None
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_search_finds_the_first_run(
            file_pages in 1u32..40_000,
            ops in prop::collection::vec(
                (any::<u32>(), prop_oneof![1u32..4, 1u32..200, 3_000u32..12_000], 0u8..5), 1..60),
        ) {
            let db = Db::in_memory().unwrap();
            let core = &db.environment().core;
            let control = core.control();
            let before = control.readers.file_pages.load(Relaxed);
            // The pages themselves are not touched.
            control.readers.file_pages.store(file_pages, Relaxed);
            core.shm.grow(&control.used_bits, table_bytes(40_000)).unwrap();
            core.shm.grow(&control.used_groups, groups_bytes(40_000)).unwrap();
            let everything = Run { first: PageNo(0), len: 40_000 };
            set_free(core, everything).unwrap();
            let mut used = vec![false; file_pages as usize];
            for (place, len, kind) in ops {
                let first = place % file_pages;
                let len = len.min(file_pages - first);
                let to = (first as u64 + place as u64 / 7 % 20_000).min(file_pages as u64) as u32;
                match kind {
                    0 | 1 => {
                        let run = Run { first: PageNo(first), len };
                        mark(core, &control.used_bits, run, kind == 1).unwrap();
                        used[first as usize..(first + len) as usize].fill(kind == 1);
                    }
                    2 => {
                        // Holes, one page of two.
                        for page in (first..first + len).step_by(2) {
                            set_used_unverified(core, Run { first: PageNo(page), len: 1 }).unwrap();
                            used[page as usize] = true;
                        }
                    }
                    3 => {
                        let found = Search::new(core).find_run(0, file_pages, len);
                        prop_assert_eq!(found, first_run(&used, 0, file_pages, len));
                    }
                    _ => {
                        let found = Search::new(core).find_run(first, to, len);
                        prop_assert_eq!(found, first_run(&used, first, to, len));
                    }
                }
                let free = used.iter().filter(|&&used| !used).count() as u64;
                prop_assert_eq!(count_free(core, file_pages), free);
            }
            control.readers.file_pages.store(before, Relaxed);
        }
    }

    /// A million holes that are too small are passed over by groups, once they have been summed up.
    #[test]
    fn a_search_among_a_million_holes_looks_at_few_words() {
        let db = Db::in_memory().unwrap();
        let core = &db.environment().core;
        let control = core.control();
        let before = control.readers.file_pages.load(Relaxed);
        let file_pages = 2_000_000;
        control.readers.file_pages.store(file_pages, Relaxed);
        core.shm.grow(&control.used_bits, table_bytes(file_pages)).unwrap();
        core.shm.grow(&control.used_groups, groups_bytes(file_pages)).unwrap();
        for index in 0..table_bytes(file_pages) / 8 {
            core.shm
                .word(&control.used_bits, index * 8)
                .unwrap()
                .store(0x5555_5555_5555_5555, Relaxed);
        }
        let mut searches = 0;
        let mut groups = 0;
        loop {
            let mut search = Search::new(core);
            assert_eq!(search.find_run(0, file_pages, 2), None);
            groups += SEARCH_GROUPS - search.left;
            searches += 1;
            if search.is_complete() {
                break;
            }
        }
        assert_eq!((searches, groups), (2, file_pages / GROUP_PAGES));
        let mut search = Search::new(core);
        assert_eq!(search.find_run(0, file_pages, 2), None);
        assert_eq!(search.left, SEARCH_GROUPS, "nothing is summed up anew");
        // One that fits, across a group's end.
        set_free(core, Run { first: PageNo(1_024_000 - 2), len: 3 }).unwrap();
        let mut search = Search::new(core);
        assert_eq!(search.find_run(0, file_pages, 4), Some(PageNo(1_024_000 - 3)));
        assert!(search.left >= SEARCH_GROUPS - 2);
        control.readers.file_pages.store(before, Relaxed);
    }
}
