//! Everything below a root, and what differs between two roots.
//!
//! Both walks visit the tree in the order of hashes. [`diff`] passes over whole directories and buckets that both trees
//! share: equal page numbers mean equal contents, since a page reachable from a held root is not re-used.

use crate::core::Core;
use crate::error::Result;
use crate::page::head::Kind;
use crate::types::{Epoch, PageNo, Run};

use super::locate::{self, Root};
use super::lookup;

/// A run of pages of a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    /// The pages.
    pub run: Run,
    /// The epoch in which they were made.
    pub made: Epoch,
    /// What the pages are; `None` for an extent, which has no header.
    pub kind: Option<Kind>,
}

/// A visitor of the runs of a tree.
pub type Visit<'v> = &'v mut dyn FnMut(Item) -> Result<()>;

/// What a tree has at one hash.
#[derive(Clone, Copy, Debug)]
pub struct Spot {
    /// Directory page and the hash bits that lead to it; `None` if the root is the bucket.
    pub directory: Option<(PageNo, u8)>,
    /// The bucket.
    pub bucket: PageNo,
    /// Hash bits that lead to the bucket.
    pub bucket_bits: u8,
}

/// What the tree below `root` has at `hash`.
pub fn spot(core: &Core, root: Root, hash: u64) -> Result<Spot> {
    let path = locate::path(core, root, hash)?;
    let depth = lookup::bucket_bits(core, path.bucket, hash)?;
    let directory = path.directory.map(|(entry, _)| (entry.page, entry.prefix_bits));
    if depth > path.entry_depth() || directory.is_some_and(|(_, bits)| depth < bits) {
        return Err(core.corrupt(path.bucket, "a bucket's depth does not fit its directory"));
    }
    Ok(Spot { directory, bucket: path.bucket, bucket_bits: depth })
}

/// The first hash behind the range that begins with the leading `bits` bits of `hash`; `None` at the end.
pub fn next_range(hash: u64, bits: u8) -> Option<u64> {
    if bits == 0 {
        return None;
    }
    let unit = 1u64 << (64 - bits as u32);
    (hash & !(unit - 1)).checked_add(unit)
}

/// Whether `hash` begins a range of its leading `bits` bits.
pub fn begins(hash: u64, bits: u8) -> bool {
    bits == 0 && hash == 0 || bits > 0 && hash & ((1u64 << (64 - bits as u32)) - 1) == 0
}

/// Visits all pages and extents below `root`.
pub fn for_each_run(core: &Core, root: Root, visit: Visit) -> Result<()> {
    visit_array(core, root, visit)?;
    let mut hash = Some(0);
    while let Some(at) = hash {
        let spot = spot(core, root, at)?;
        visit_spot(core, &spot, at, visit)?;
        hash = next_range(at, spot.bucket_bits);
    }
    Ok(())
}

fn visit_array(core: &Core, root: Root, visit: Visit) -> Result<()> {
    if let Some(depth) = root.depth {
        core.tree_page(root.page, Kind::RootArray)?;
        let made = core.head(root.page)?.epoch();
        let run = Run { first: root.page, len: locate::array_pages(core.page_size, depth) };
        visit(Item { run, made, kind: Some(Kind::RootArray) })?;
    }
    Ok(())
}

fn visit_page(core: &Core, page: PageNo, kind: Kind, visit: Visit) -> Result<()> {
    let made = core.head(page)?.epoch();
    visit(Item { run: Run { first: page, len: 1 }, made, kind: Some(kind) })
}

/// Visits the directory, if `at` is where it begins, and the bucket.
fn visit_spot(core: &Core, spot: &Spot, at: u64, visit: Visit) -> Result<()> {
    if let Some((page, bits)) = spot.directory
        && begins(at, bits)
    {
        visit_page(core, page, Kind::Directory, visit)?;
    }
    if begins(at, spot.bucket_bits) {
        visit_bucket(core, spot.bucket, visit)?;
    }
    Ok(())
}

/// Visits the pages of a bucket and the extents of its records.
pub fn visit_bucket(core: &Core, head: PageNo, visit: Visit) -> Result<()> {
    for page in lookup::chain(core, head)? {
        let bucket = core.bucket(page)?;
        visit_page(core, page, Kind::Bucket, visit)?;
        bucket.for_each_live(core.damage(page), |_, record| match record.extent() {
            Some(extent) => {
                let run = Run { first: extent.first, len: extent.pages };
                visit(Item { run, made: extent.epoch, kind: None })
            }
            None => Ok(()),
        })?;
    }
    Ok(())
}

/// Which side of a [`diff`] to visit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// What only the old tree has, and whatever its buckets share with changed buckets of the new one.
    Old,
    /// The same of the new tree.
    New,
}

/// Visits the runs of one side in which two trees differ. Overflow pages and extents that both have may be visited on
/// both sides.
pub fn diff(core: &Core, old: Root, new: Root, side: Side, visit: Visit) -> Result<()> {
    if old == new {
        return Ok(());
    }
    if old.page != new.page || old.depth.is_some() != new.depth.is_some() {
        visit_array(core, if side == Side::Old { old } else { new }, visit)?;
    }
    let mut hash = Some(0);
    while let Some(at) = hash {
        let (o, n) = (spot(core, old, at)?, spot(core, new, at)?);
        let same_directory = match (o.directory, n.directory) {
            (Some((a, bits)), Some((b, _))) if a == b => Some(bits),
            _ => None,
        };
        if let Some(bits) = same_directory {
            hash = next_range(at, bits);
            continue;
        }
        let mine = if side == Side::Old { &o } else { &n };
        if o.bucket == n.bucket {
            if let Some((page, bits)) = mine.directory
                && begins(at, bits)
            {
                visit_page(core, page, Kind::Directory, visit)?;
            }
            hash = next_range(at, o.bucket_bits);
            continue;
        }
        visit_spot(core, mine, at, visit)?;
        hash = next_range(at, o.bucket_bits.max(n.bucket_bits));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        assert_eq!(next_range(0, 0), None);
        assert_eq!(next_range(0, 1), Some(1 << 63));
        assert_eq!(next_range(1 << 63, 1), None);
        assert_eq!(next_range(5, 64), Some(6));
        assert!(begins(0, 0) && begins(1 << 63, 1) && !begins(1 << 62, 1));
    }
}
