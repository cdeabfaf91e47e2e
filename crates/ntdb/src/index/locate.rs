//! From the root word to the bucket.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use crate::core::Core;
use crate::error::Result;
use crate::page::head::{HEAD_BYTES, Kind};
use crate::types::PageNo;

/// Most hash bits that the root array may use; far beyond any file.
pub const MAX_ROOT_DEPTH: u8 = 32;

/// The root word: where the tree begins.
///
/// Bits 0 to 31: page; 32 to 39: depth of the root array; bit 40: whether the page is a root array.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Root {
    /// The only bucket, or the first page of the root array.
    pub page: PageNo,
    /// Depth of the root array; `None` if there is one bucket only.
    pub depth: Option<u8>,
}

impl Root {
    /// From its word.
    #[inline]
    pub fn from_word(word: u64) -> Root {
        Root {
            page: PageNo(word as u32),
            depth: (word >> 40 & 1 == 1).then_some((word >> 32) as u8),
        }
    }

    /// As a word.
    pub fn to_word(self) -> u64 {
        match self.depth {
            None => self.page.0 as u64,
            Some(depth) => self.page.0 as u64 | (depth as u64) << 32 | 1 << 40,
        }
    }
}

/// An entry of the root array.
///
/// Bits 0 to 31: directory page; 32 to 39: prefix bits; 40 to 47: index bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectoryRef {
    /// The directory page.
    pub page: PageNo,
    /// Leading hash bits that lead to it.
    pub prefix_bits: u8,
    /// Following hash bits that index it.
    pub index_bits: u8,
}

impl DirectoryRef {
    /// From its word.
    #[inline]
    pub fn from_word(word: u64) -> DirectoryRef {
        DirectoryRef {
            page: PageNo(word as u32),
            prefix_bits: (word >> 32) as u8,
            index_bits: (word >> 40) as u8,
        }
    }

    /// As a word.
    pub fn to_word(self) -> u64 {
        self.page.0 as u64 | (self.prefix_bits as u64) << 32 | (self.index_bits as u64) << 40
    }

    /// Index of the entry for `hash`.
    #[inline]
    pub fn index(&self, hash: u64) -> usize {
        leading(hash << self.prefix_bits, self.index_bits)
    }
}

/// The leading `bits` bits of `hash` as a number.
#[inline]
pub fn leading(hash: u64, bits: u8) -> usize {
    // Two shifts, since a shift by 64 is none.
    (hash >> 1 >> (63 - bits)) as usize
}

/// Pages of a root array of `depth`.
pub fn array_pages(page_size: usize, depth: u8) -> u32 {
    (HEAD_BYTES + (8usize << depth)).div_ceil(page_size) as u32
}

/// Byte offset of entry `index` within a root array.
#[inline]
pub fn array_offset(index: usize) -> usize {
    HEAD_BYTES + 8 * index
}

/// Byte offset of entry `index` within a directory page.
#[inline]
pub fn directory_offset(index: usize) -> usize {
    HEAD_BYTES + 4 * index
}

/// Checks that the page at `first` begins a root array of `depth`, as long as that depth needs.
pub fn check_array(core: &Core, first: PageNo, depth: u8) -> Result<()> {
    if depth > MAX_ROOT_DEPTH {
        return Err(core.corrupt(first, "the root array has an impossible depth"));
    }
    core.tree_page(first, Kind::RootArray)?;
    let head = core.head(first)?;
    let pages = array_pages(core.page_size, depth);
    if head.depth.load(Relaxed) != depth || head.run_pages.load(Relaxed) != pages {
        return Err(core.corrupt(first, "the root array is not as long as its depth says"));
    }
    Ok(())
}

/// The entry of the root array at `first` for `index`.
#[inline]
pub fn array_entry(core: &Core, first: PageNo, depth: u8, index: usize) -> Result<DirectoryRef> {
    if depth > MAX_ROOT_DEPTH {
        return Err(core.corrupt(first, "the root array has an impossible depth"));
    }
    core.tree_page(first, Kind::RootArray)?;
    let at = core.data_place(core.place(first, array_offset(index)), 8)?;
    // SAFETY: within the mapping and aligned; entries are atomics to everybody.
    let word = u64::from_le(unsafe { &*at.cast::<AtomicU64>() }.load(Acquire));
    let entry = DirectoryRef::from_word(word);
    if entry.index_bits > core.max_index_bits || entry.prefix_bits > depth {
        return Err(core.corrupt(first, "an entry of the root array is impossible"));
    }
    Ok(entry)
}

/// Entry `index` of a directory page.
#[inline]
pub fn directory_entry(core: &Core, page: PageNo, index: usize) -> Result<PageNo> {
    let base = core.tree_page(page, Kind::Directory)?;
    // SAFETY: the index has at most `max_index_bits` bits, so the entry lies within the page.
    let at = unsafe { base.add(directory_offset(index)) };
    // SAFETY: as above, and aligned; entries are atomics to everybody.
    Ok(PageNo(u32::from_le(unsafe { &*at.cast::<AtomicU32>() }.load(Acquire))))
}

/// The bucket for `hash` below `root`.
#[inline]
pub fn bucket_page(core: &Core, root: Root, hash: u64) -> Result<PageNo> {
    let Some(depth) = root.depth else { return Ok(root.page) };
    let entry = array_entry(core, root.page, depth, leading(hash, depth.min(63)))?;
    directory_entry(core, entry.page, entry.index(hash))
}

/// The whole way from the root to a bucket.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The root.
    pub root: Root,
    /// Directory and the index of the bucket's entry in it, unless the root is the bucket.
    pub directory: Option<(DirectoryRef, usize)>,
    /// Index of the directory's entry in the root array.
    pub array_index: usize,
    /// The bucket.
    pub bucket: PageNo,
}

/// The way to the bucket for `hash`.
#[inline]
pub fn path(core: &Core, root: Root, hash: u64) -> Result<Path> {
    let Some(depth) = root.depth else {
        return Ok(Path { root, directory: None, array_index: 0, bucket: root.page });
    };
    let array_index = leading(hash, depth.min(63));
    let entry = array_entry(core, root.page, depth, array_index)?;
    let index = entry.index(hash);
    let bucket = directory_entry(core, entry.page, index)?;
    Ok(Path { root, directory: Some((entry, index)), array_index, bucket })
}

impl Path {
    /// Leading hash bits that select one entry.
    pub fn entry_depth(&self) -> u8 {
        self.directory.map_or(0, |(entry, _)| entry.prefix_bits + entry.index_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_bits() {
        assert_eq!(leading(u64::MAX, 0), 0);
        assert_eq!(leading(1 << 63, 1), 1);
        assert_eq!(leading(0xff00_0000_0000_0000, 8), 0xff);
        assert_eq!(leading(u64::MAX, 32), 0xffff_ffff);
    }

    #[test]
    fn words_survive() {
        for root in [
            Root { page: PageNo(7), depth: None },
            Root { page: PageNo(u32::MAX), depth: Some(0) },
            Root { page: PageNo(9), depth: Some(32) },
        ] {
            assert_eq!(Root::from_word(root.to_word()), root);
        }
        let entry = DirectoryRef { page: PageNo(u32::MAX), prefix_bits: 31, index_bits: 13 };
        assert_eq!(DirectoryRef::from_word(entry.to_word()), entry);
    }
}
