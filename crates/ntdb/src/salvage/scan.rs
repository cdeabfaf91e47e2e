//! Buckets that the tree has not led to.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::error::Result;
use crate::le;
use crate::limits::MIN_PAGE_SIZE;
use crate::page::head::{HEAD_BYTES, Kind, prefix_of};
use crate::page::map::{group_pages, index_entries};
use crate::page::meta::Meta;

use super::Salvage;
use super::source::Page;
use super::tree::Spot;

/// Ranges of hashes that do not overlap: first hash, last hash.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

/// The last hash of the range that begins with the leading `depth` bits of `prefix`.
fn last_of(prefix: u64, depth: u8) -> u64 {
    prefix | u64::MAX.checked_shr(depth as u32).unwrap_or(0)
}

impl Ranges {
    /// All hashes.
    pub fn everything() -> Ranges {
        Ranges(BTreeMap::from([(0, u64::MAX)]))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the hashes with these leading bits.
    pub fn add(&mut self, prefix: u64, depth: u8) {
        let (mut first, mut last) = (prefix, last_of(prefix, depth));
        while let Some((&start, &end)) = self.0.range(..=last.saturating_add(1)).next_back() {
            if end.saturating_add(1) < first {
                break;
            }
            self.0.remove(&start);
            (first, last) = (first.min(start), last.max(end));
        }
        self.0.insert(first, last);
    }

    /// Whether `hash` is among them.
    pub fn contains(&self, hash: u64) -> bool {
        self.0.range(..=hash).next_back().is_some_and(|(_, &end)| end >= hash)
    }

    /// Whether any hash with these leading bits is among them.
    fn meets(&self, prefix: u64, depth: u8) -> bool {
        let last = last_of(prefix, depth);
        self.0.range(..=last).next_back().is_some_and(|(_, &end)| end >= prefix)
    }

    /// Whether all hashes with these leading bits are among them.
    fn covers(&self, prefix: u64, depth: u8) -> bool {
        let last = last_of(prefix, depth);
        self.0.range(..=prefix).next_back().is_some_and(|(_, &end)| end >= last)
    }
}

/// A page that looks like a bucket.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    page: u32,
    depth: u8,
    prefix: u64,
    epoch: u64,
    next: u32,
    /// Whether the map says that it is in use.
    is_known: bool,
}

impl Salvage<'_> {
    /// Copies the records with hashes in `lost` out of buckets that nothing whole leads to. `meta` is the state that they are to
    /// belong to.
    pub(super) fn scan(&mut self, meta: Option<&Meta>, lost: &Ranges) -> Result<()> {
        let map = match meta {
            Some(meta) => self.map(meta),
            None => Map::default(),
        };
        let mut candidates = self.candidates(meta, lost, &map);
        // The newest first; among equal ones, what is known to be in use.
        candidates.sort_by_key(|c| (std::cmp::Reverse(c.epoch), !c.is_known, c.page));
        let by_page: HashMap<u32, Candidate> = candidates.iter().map(|c| (c.page, *c)).collect();
        let named = named_by_others(&candidates);
        let mut done: HashSet<(u64, u8)> = HashSet::new();
        let mut covered = Ranges::default();
        let mut page = Page::new(self.source.page_size);
        for head in &candidates {
            // Pages of a chain that others name are read with the page that names them.
            if named.contains(&head.page)
                || covered.covers(head.prefix, head.depth)
                || !done.insert((head.prefix, head.depth))
            {
                continue;
            }
            let only = |hash: u64| lost.contains(hash) && !covered.contains(hash);
            let mut member = *head;
            loop {
                let spot = Spot {
                    depth: head.depth,
                    prefix: head.prefix,
                    only: Some(&only),
                    uncertain: !member.is_known,
                };
                if let Err(problem) = self.bucket(member.page, &spot, &mut page)? {
                    self.damaged_page(member.page, &problem);
                    break;
                }
                if member.next == 0 {
                    break;
                }
                let fits = |next: &&Candidate| {
                    (next.depth, next.prefix) == (head.depth, head.prefix)
                        && next.epoch <= head.epoch
                };
                match by_page.get(&member.next).filter(fits) {
                    Some(next) => member = *next,
                    None => {
                        self.damaged_page(
                            member.next,
                            "is not the overflow page that it should be",
                        );
                        break;
                    }
                }
            }
            covered.add(head.prefix, head.depth);
        }
        self.tell_gaps(lost, &covered);
        Ok(())
    }

    /// Says of which part of the lost hashes no bucket was found.
    fn tell_gaps(&mut self, lost: &Ranges, covered: &Ranges) {
        let (mut gaps, mut share) = (0u64, 0f64);
        for (&first, &last) in &lost.0 {
            let mut at = first;
            loop {
                match covered.0.range(..=at).next_back() {
                    Some((_, &end)) if end >= at => {
                        if end >= last {
                            break;
                        }
                        at = end + 1;
                    }
                    _ => {
                        let next = covered.0.range(at..).next();
                        // No range begins at `at` itself, or it would contain it.
                        let end = next.map_or(last, |(&next, _)| (next - 1).min(last));
                        gaps += 1;
                        share += (end - at) as f64 / u64::MAX as f64;
                        if end >= last {
                            break;
                        }
                        at = end + 1;
                    }
                }
            }
        }
        if gaps > 0 {
            self.problem(format!(
                "no bucket was found for {gaps} ranges of hashes, {:.3} percent of all",
                share * 100.0
            ));
        }
    }

    fn candidates(&mut self, meta: Option<&Meta>, lost: &Ranges, map: &Map) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let mut bytes = vec![0u8; self.source.page_size];
        for page in 4..self.source.pages {
            self.step();
            let is_used = map.is_used(page);
            if is_used == Some(false) || self.source.is_owned(page) {
                continue;
            }
            let Ok(head) = self.source.read_checked(page, Kind::Bucket, &mut bytes) else {
                continue;
            };
            let is_possible = head.depth <= 64
                && prefix_of(head.prefix, head.depth) == head.prefix
                && meta.is_none_or(|meta| head.epoch <= meta.epoch.0)
                && lost.meets(head.prefix, head.depth);
            if is_possible {
                candidates.push(Candidate {
                    page,
                    depth: head.depth,
                    prefix: head.prefix,
                    epoch: head.epoch,
                    next: head.next,
                    is_known: is_used == Some(true),
                });
            }
        }
        candidates
    }

    /// The free-space map, as far as it is whole.
    fn map(&mut self, meta: &Meta) -> Map {
        debug_assert!(self.source.page_size >= MIN_PAGE_SIZE as usize);
        let mut bytes = vec![0u8; self.source.page_size];
        let per_group = group_pages(self.source.page_size);
        let most = self.source.pages.div_ceil(per_group) as usize + 1;
        let mut numbers = Vec::new();
        if meta.map_levels == 0 {
            numbers.extend(meta.map_pages.iter().copied().map(Some));
        } else {
            let entries = index_entries(self.source.page_size);
            for &index in &meta.map_pages {
                match self.source.read_checked(index, Kind::MapIndex, &mut bytes) {
                    Ok(_) => numbers.extend((0..entries).map(|entry| {
                        Some(le::get_u32(&bytes, HEAD_BYTES + 4 * entry)).filter(|&n| n != 0)
                    })),
                    Err(problem) => {
                        self.damaged_page(index, &format!("of the map's index {problem}"));
                        numbers.extend((0..entries).map(|_| None));
                    }
                }
                if numbers.len() > most {
                    break;
                }
            }
        }
        numbers.truncate(most);
        let mut map = Map { per_group, groups: Vec::new() };
        for (group, number) in numbers.into_iter().enumerate() {
            let Some(number) = number else {
                map.groups.push(None);
                continue;
            };
            self.step();
            let read = self.source.read_checked(number, Kind::Map, &mut bytes).and_then(|head| {
                let fits = head.prefix == group as u64;
                if fits { Ok(()) } else { Err("is the map of other pages".to_string()) }
            });
            match read {
                Ok(()) => map.groups.push(Some(bytes[HEAD_BYTES..].to_vec())),
                Err(problem) => {
                    self.damaged_page(number, &format!("of the free-space map {problem}"));
                    map.groups.push(None);
                }
            }
        }
        map
    }
}

/// Pages that a page of the same chain, no older, names as its next: they are read with that one.
fn named_by_others(candidates: &[Candidate]) -> HashSet<u32> {
    let by_page: HashMap<u32, &Candidate> = candidates.iter().map(|c| (c.page, c)).collect();
    candidates
        .iter()
        .filter_map(|c| {
            let next = by_page.get(&c.next)?;
            let same = (next.depth, next.prefix) == (c.depth, c.prefix);
            (same && c.epoch >= next.epoch && c.page != c.next).then_some(c.next)
        })
        .collect()
}

/// Which pages a state uses, by groups; `None` where that is not known.
#[derive(Default)]
struct Map {
    per_group: u32,
    groups: Vec<Option<Vec<u8>>>,
}

impl Map {
    fn is_used(&self, page: u32) -> Option<bool> {
        let group = page.checked_div(self.per_group)? as usize;
        let bits = self.groups.get(group)?.as_ref()?;
        let bit = page % self.per_group;
        bits.get(bit as usize / 8).map(|byte| byte >> (bit % 8) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_join_and_end_where_they_end() {
        let mut ranges = Ranges::default();
        assert!(ranges.is_empty() && !ranges.contains(0));
        ranges.add(0x40 << 56, 8);
        assert!(ranges.contains(0x40 << 56) && ranges.contains((0x41 << 56) - 1));
        assert!(!ranges.contains((0x40 << 56) - 1) && !ranges.contains(0x41 << 56));
        ranges.add(0x41 << 56, 8);
        assert_eq!(ranges.0.len(), 1);
        assert!(ranges.covers(0x40 << 56, 7) && !ranges.covers(0x40 << 56, 6));
        assert!(ranges.meets(0x40 << 56, 6) && !ranges.meets(0x80 << 56, 1));
        ranges.add(0, 0);
        assert!(ranges.covers(0, 0) && ranges.contains(u64::MAX));
        ranges.add(7, 64);
        assert_eq!(ranges.0.len(), 1);
    }

    proptest! {
        #[test]
        fn ranges_have_what_was_added(
            added in prop::collection::vec((any::<u8>(), 0u8..9), 0..12), asked: u8, depth in 0u8..9,
        ) {
            let mut ranges = Ranges::default();
            let mut expected = [false; 256];
            for &(prefix, depth) in &added {
                let prefix = prefix_of((prefix as u64) << 56, depth);
                ranges.add(prefix, depth);
                let first = (prefix >> 56) as usize;
                let len = 256 >> depth;
                expected[first..first + len].fill(true);
            }
            for (byte, &has) in expected.iter().enumerate() {
                prop_assert_eq!(ranges.contains((byte as u64) << 56), has);
            }
            let prefix = prefix_of((asked as u64) << 56, depth);
            let span = &expected[(prefix >> 56) as usize..][..256 >> depth];
            prop_assert_eq!(ranges.covers(prefix, depth), span.iter().all(|&has| has));
            prop_assert_eq!(ranges.meets(prefix, depth), span.iter().any(|&has| has));
        }
    }
}
