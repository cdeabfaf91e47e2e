//! Down the tree as far as it is whole, and records into the new database.

use std::result::Result as StdResult;

use crate::error::Result;
use crate::index::locate::{
    DirectoryRef, MAX_ROOT_DEPTH, Root, array_offset, array_pages, directory_offset,
};
use crate::le;
use crate::limits::MAX_KEY_BYTES;
use crate::page::bucket::Bucket;
use crate::page::head::{Kind, prefix_of};
use crate::page::meta::Meta;
use crate::page::record::Record;

use super::Salvage;
use super::scan::Ranges;
use super::source::{Head, Page};

/// Bytes of a value that are held in memory at once.
const PIECE_BYTES: usize = 1 << 20;

/// `value << bits`, also for 64 bits and more.
fn shifted(value: u64, bits: u32) -> u64 {
    value.checked_shl(bits).unwrap_or(0)
}

/// Where the records of a page are to lie.
#[derive(Clone, Copy)]
pub(super) struct Spot<'r> {
    pub depth: u8,
    pub prefix: u64,
    /// Only records with these hashes count; `None` for all.
    pub only: Option<&'r dyn Fn(u64) -> bool>,
    /// Whether the page may be an old copy.
    pub uncertain: bool,
}

impl Salvage<'_> {
    /// Copies what the tree leads to. Returns the hashes of which nobody knows the bucket.
    pub(super) fn tree(&mut self, meta: &Meta) -> Result<Ranges> {
        let mut lost = Ranges::default();
        let root = Root::from_word(meta.root);
        let Some(depth) = root.depth else {
            self.chain(root.page.0, 0, 0)?;
            return Ok(lost);
        };
        let array = match self.array(root, depth) {
            Ok(array) => array,
            Err(problem) => {
                self.damaged_page(root.page.0, &format!("the root array {problem}"));
                return Ok(Ranges::everything());
            }
        };
        let mut index = 0u64;
        while index < 1 << depth {
            let prefix = shifted(index, 64 - depth as u32);
            let entry = DirectoryRef::from_word(le::get_u64(&array, array_offset(index as usize)));
            let span = 1u64 << depth.saturating_sub(entry.prefix_bits);
            let is_possible = entry.prefix_bits <= depth
                && (entry.index_bits as u32) < self.source.page_size.ilog2() - 2
                && index.is_multiple_of(span);
            if !is_possible {
                self.damaged_page(root.page.0, "an entry of the root array is impossible");
                lost.add(prefix, depth);
                index += 1;
                continue;
            }
            self.directory(&entry, prefix, &mut lost)?;
            index += span;
        }
        Ok(lost)
    }

    fn array(&mut self, root: Root, depth: u8) -> StdResult<Vec<u8>, String> {
        if depth > MAX_ROOT_DEPTH {
            return Err("has an impossible depth".into());
        }
        let pages = array_pages(self.source.page_size, depth);
        if root.page.0 as u64 + pages as u64 > self.source.pages as u64 {
            return Err("lies beyond the end of the file".into());
        }
        let mut bytes = vec![0u8; pages as usize * self.source.page_size];
        let head = self.source.read_checked(root.page.0, Kind::RootArray, &mut bytes)?;
        if head.depth != depth || head.run_pages != pages {
            return Err("is not as long as its depth says".into());
        }
        if !self.source.own(root.page.0, pages) {
            return Err("is something else, too".into());
        }
        Ok(bytes)
    }

    fn directory(&mut self, entry: &DirectoryRef, prefix: u64, lost: &mut Ranges) -> Result<()> {
        let number = entry.page.0;
        let (prefix_bits, index_bits) = (entry.prefix_bits, entry.index_bits);
        let mut page = vec![0u8; self.source.page_size];
        self.step();
        let read = self.source.read_checked(number, Kind::Directory, &mut page).and_then(|head| {
            let fits = head.depth == prefix_bits
                && head.prefix == prefix
                && head.groups == index_bits as u16;
            if fits { Ok(()) } else { Err("is not the directory that the root array names".into()) }
        });
        let owned = read.and_then(|()| match self.source.own(number, 1) {
            true => Ok(()),
            false => Err("is something else, too".into()),
        });
        if let Err(problem) = owned {
            self.damaged_page(number, &problem);
            lost.add(prefix, prefix_bits);
            return Ok(());
        }
        let bits = prefix_bits + index_bits;
        let bucket_at = |index: u64| le::get_u32(&page, directory_offset(index as usize));
        let mut index = 0u64;
        while index < 1 << index_bits {
            let number = bucket_at(index);
            let hash = prefix | shifted(index, 64 - bits as u32);
            let depth = self.chain_depth(number, hash, prefix_bits, bits);
            match depth {
                Ok(depth) => {
                    self.chain(number, depth, hash)?;
                    index += 1 << (bits - depth);
                }
                Err(problem) => {
                    self.damaged_page(number, &problem);
                    index += 1;
                    // Told once for all of its entries.
                    while index < 1 << index_bits && bucket_at(index) == number {
                        index += 1;
                    }
                }
            }
        }
        Ok(())
    }

    /// How many bits the bucket that an entry for `hash` names stands for.
    fn chain_depth(&self, number: u32, hash: u64, least: u8, most: u8) -> StdResult<u8, String> {
        let mut page = vec![0u8; self.source.page_size];
        let head = self.source.read_checked(number, Kind::Bucket, &mut page)?;
        if head.depth < least || head.depth > most || prefix_of(hash, head.depth) != hash {
            return Err("a bucket's depth does not fit its directory".into());
        }
        Ok(head.depth)
    }

    /// Copies the records of a bucket and of its overflow pages.
    fn chain(&mut self, first: u32, depth: u8, prefix: u64) -> Result<()> {
        let mut number = first;
        let mut page = Page::new(self.source.page_size);
        let spot = Spot { depth, prefix, only: None, uncertain: false };
        loop {
            match self.bucket(number, &spot, &mut page)? {
                Ok(head) if head.next == 0 => return Ok(()),
                Ok(head) => number = head.next,
                Err(problem) => {
                    self.damaged_page(number, &problem);
                    return Ok(());
                }
            }
        }
    }

    /// Copies the records of one bucket page.
    pub(super) fn bucket(
        &mut self,
        number: u32,
        spot: &Spot,
        page: &mut Page,
    ) -> Result<StdResult<Head, String>> {
        self.step();
        let head = match self.source.read_checked(number, Kind::Bucket, page.bytes()) {
            Ok(head) => head,
            Err(problem) => return Ok(Err(problem)),
        };
        if head.depth != spot.depth || head.prefix != spot.prefix {
            return Ok(Err("is the bucket of other hashes".into()));
        }
        // SAFETY: a page of this call's own, aligned and as long as is said.
        let bucket = match unsafe { Bucket::at(page.start(), self.source.page_size) } {
            Ok(bucket) => bucket,
            Err(problem) => return Ok(Err(problem.into())),
        };
        if let Err(problem) = bucket.check_structure() {
            return Ok(Err(problem.into()));
        }
        if !self.source.own(number, 1) {
            return Ok(Err("is something else, too".into()));
        }
        let mut failed = None;
        let _ = bucket.for_each_live(
            |_| (),
            |slot, record| {
                self.record(number, slot, &record, spot).map_err(|error| failed = Some(error))
            },
        );
        match failed {
            Some(error) => Err(error),
            None => Ok(Ok(head)),
        }
    }

    fn record(&mut self, page: u32, slot: usize, record: &Record, spot: &Spot) -> Result<()> {
        let lost = |salvage: &mut Self, problem: &str| {
            salvage.report.lost_values += 1;
            salvage.problem(format!("page {page}, slot {slot}: {problem}"));
            Ok(())
        };
        let long_key;
        let key: &[u8] = if record.key_is_in_extent() {
            // Its hash tells whether the value is wanted at all.
            if record.key_len > MAX_KEY_BYTES {
                return lost(self, "its key is longer than any");
            }
            match self.long_key(record) {
                Ok(key) => long_key = key,
                Err(problem) => return lost(self, &problem),
            }
            &long_key
        } else {
            // SAFETY: the parsed record lies in the page, which is the caller's own.
            unsafe { std::slice::from_raw_parts(record.key, record.key_len as usize) }
        };
        let hash = self.source.hasher.as_ref().map(|hasher| hasher.hash(key));
        if let Some(hash) = hash
            && prefix_of(hash, spot.depth) != spot.prefix
        {
            return lost(self, "its key does not belong there");
        }
        if let (Some(hash), Some(only)) = (hash, spot.only)
            && !only(hash)
        {
            return Ok(());
        }
        if spot.only.is_some() && self.destination.contains(key)? {
            // From a newer copy.
            return Ok(());
        }
        if let Some(extent) = record.extent() {
            let (first, pages) = (extent.first.0, extent.pages);
            if let Err(problem) =
                self.verify_extent(first, pages, record.extent_bytes(), extent.crc)
            {
                return lost(self, &problem);
            }
            let skip = record.extent_bytes() - record.value_len;
            if let Err(problem) = self.copy_extent(key, first, skip, record.value_len)? {
                self.destination.delete(key)?;
                return lost(self, &problem);
            }
            // Of what lies in a value nothing is taken for a page.
            self.source.own(first, pages);
        } else {
            // SAFETY: an inline value lies behind the key, in the same page.
            let value = unsafe {
                std::slice::from_raw_parts(
                    record.key.add(record.key_len as usize),
                    record.value_len as usize,
                )
            };
            self.destination.put(key, value)?;
        }
        self.report.records += 1;
        self.report.uncertain_records += u64::from(spot.uncertain);
        Ok(())
    }

    fn long_key(&mut self, record: &Record) -> StdResult<Vec<u8>, String> {
        let Some(extent) = record.extent() else { return Err("it has no extent".into()) };
        let mut key = vec![0u8; record.key_len as usize];
        let room = extent.pages as u64 * self.source.page_size as u64;
        if record.key_len > room {
            return Err("its key is longer than the pages that hold it".into());
        }
        self.source.read(extent.first.0, &mut key).map_err(|e| format!("its key {e}"))?;
        Ok(key)
    }

    /// Checks the bytes in use of an extent.
    fn verify_extent(
        &mut self,
        first: u32,
        pages: u32,
        bytes: u64,
        crc: u32,
    ) -> StdResult<(), String> {
        let end = first as u64 + pages as u64;
        if first == 0 || end > self.source.pages as u64 {
            return Err("its value lies beyond the end of the file".into());
        }
        if bytes > pages as u64 * self.source.page_size as u64 {
            return Err("its value is longer than the pages that hold it".into());
        }
        if (first..end as u32).any(|page| self.source.is_owned(page)) {
            return Err("its value has pages of others".into());
        }
        self.value_pages_left = self
            .value_pages_left
            .checked_sub(pages as u64)
            .ok_or("its value has pages of others")?;
        let mut found = 0;
        let mut piece = vec![0u8; PIECE_BYTES.min(bytes as usize)];
        let place = first as u64 * self.source.page_size as u64;
        let mut at = 0;
        while at < bytes {
            let part = &mut piece[..PIECE_BYTES.min((bytes - at) as usize)];
            self.source
                .file
                .read_exact_at(part, place + at)
                .map_err(|e| format!("its value cannot be read: {e}"))?;
            found = crc32c::crc32c_append(found, part);
            at += part.len() as u64;
        }
        if found == crc { Ok(()) } else { Err("its value has a wrong checksum".into()) }
    }

    /// Copies a value out of an extent that has been verified.
    fn copy_extent(
        &mut self,
        key: &[u8],
        first: u32,
        skip: u64,
        len: u64,
    ) -> Result<StdResult<(), String>> {
        let place = first as u64 * self.source.page_size as u64 + skip;
        let mut piece = vec![0u8; PIECE_BYTES.min(len as usize)];
        let mut at = 0;
        loop {
            let part = &mut piece[..PIECE_BYTES.min((len - at) as usize)];
            if let Err(e) = self.source.file.read_exact_at(part, place + at) {
                return Ok(Err(format!("its value cannot be read: {e}")));
            }
            if at == 0 {
                self.destination.put(key, part)?;
            } else {
                self.destination.append(key, part)?;
            }
            at += part.len() as u64;
            if at >= len {
                return Ok(Ok(()));
            }
        }
    }
}
