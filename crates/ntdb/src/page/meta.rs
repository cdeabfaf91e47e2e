//! The meta pages: where a checkpoint begins, from which everything else is reached.
//!
//! They are pages 1 and 2. Each names one consistent state of the database: the root, the map of
//! free space, and the log that continues it. Of the two, the valid one with the higher sequence is
//! the newer. All numbers are little-endian:
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..8 | magic, `ntdbmeta` |
//! | 8..12 | CRC-32C of the whole page but this field |
//! | 12..16 | bytes of past log to keep, in KiB (u32) |
//! | 16..24 | sequence of the checkpoint (u64) |
//! | 24..32 | freeze epoch (u64) |
//! | 32..40 | root word (u64) |
//! | 40..48 | number of records (u64) |
//! | 48..56 | replay from: LSN of the freeze (u64) |
//! | 56..64 | keep from: LSN of the oldest log record that is still needed (u64) |
//! | 64..72 | salt of the log that holds *keep from* (u64), 0 if no log continues this state (clean) |
//! | 72..80 | id of the shared memory (u64), 0 at rest |
//! | 80..84 | which of the two logs holds *keep from* (u32) |
//! | 84..88 | pages of the file (u32) |
//! | 88..92 | levels of the free-space map's index (u32): 0 if the list has map pages, 1 if it has index pages |
//! | 92..96 | pages listed here (u32) |
//! | 96..100 | reserve in percent (u32) |
//! | 100..102 | bytes of the base path (u16) |
//! | 102..104 | zero |
//! | 104..1128 | base path: the absolute path that the companion files lie beside, empty at rest |
//! | 1128..1136 | salt of the log record that ends at *replay from* (u64), 0 if there is none |
//! | 1136.. | numbers of the map pages, or of the pages that list them (u32 each) |
//! | to the end | zero |
//!
//! # Crashes
//!
//! A checkpoint writes the one that is not known durable, after everything that it names was
//! synced, and syncs it; nothing of the older state is given up before. A torn write fails the
//! checksum, and the other page, with all that it names, is still there. Overwriting a page with
//! zeros voids it.

use crate::le;
use crate::limits::MIN_PAGE_SIZE;
use crate::types::{Epoch, Lsn};

/// The two pages that metas lie in. Which one a checkpoint writes is the caller's choice.
pub const META_PAGES: [u32; 2] = [1, 2];
/// Longest base path: leaves most of the smallest page to the map.
pub const BASE_PATH_BYTES_MAX: usize = 1024;

const MAGIC: [u8; 8] = *b"ntdbmeta";

const MAGIC_AT: usize = 0;
const CRC_AT: usize = MAGIC_AT + 8;
const KEEP_LOG_AT: usize = CRC_AT + 4;
const SEQUENCE_AT: usize = KEEP_LOG_AT + 4;
const EPOCH_AT: usize = SEQUENCE_AT + 8;
const ROOT_AT: usize = EPOCH_AT + 8;
const RECORD_COUNT_AT: usize = ROOT_AT + 8;
const REPLAY_FROM_AT: usize = RECORD_COUNT_AT + 8;
const KEEP_FROM_AT: usize = REPLAY_FROM_AT + 8;
const LOG_SALT_AT: usize = KEEP_FROM_AT + 8;
const SHM_ID_AT: usize = LOG_SALT_AT + 8;
const LOG_INDEX_AT: usize = SHM_ID_AT + 8;
const FILE_PAGES_AT: usize = LOG_INDEX_AT + 4;
const MAP_LEVELS_AT: usize = FILE_PAGES_AT + 4;
const MAP_ENTRIES_AT: usize = MAP_LEVELS_AT + 4;
const RESERVE_AT: usize = MAP_ENTRIES_AT + 4;
const BASE_LEN_AT: usize = RESERVE_AT + 4;
const BASE_AT: usize = BASE_LEN_AT + 4;
const LAST_SALT_AT: usize = BASE_AT + BASE_PATH_BYTES_MAX;
const MAP_AT: usize = LAST_SALT_AT + 8;

// The table above.
const _: () = assert!(SEQUENCE_AT == 16 && ROOT_AT == 32 && LOG_SALT_AT == 64);
const _: () = assert!(LOG_INDEX_AT == 80 && BASE_LEN_AT == 100 && BASE_AT == 104 && MAP_AT == 1136);
const _: () = assert!(MAP_AT < MIN_PAGE_SIZE as usize && BASE_PATH_BYTES_MAX <= u16::MAX as usize);

/// One consistent state of the database.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Meta {
    /// Which checkpoint this is; of two valid metas the higher one is newer.
    pub sequence: u64,
    /// The freeze epoch of the checkpoint.
    pub epoch: Epoch,
    /// The root word.
    pub root: u64,
    /// How many records there are.
    pub record_count: u64,
    /// The first change that is not in this state.
    pub replay_from: Lsn,
    /// The oldest log record that is still needed.
    pub keep_from: Lsn,
    /// Salt of the log that holds `keep_from`; 0 if no log continues this state.
    pub log_salt: u64,
    /// Which log (0 or 1) holds `keep_from`.
    pub log_index: u32,
    /// Pages of the file.
    pub file_pages: u32,
    /// Levels of the free-space map's index: 0 or 1.
    pub map_levels: u32,
    /// Reserve in percent.
    pub reserve: u32,
    /// So many KiB of past log are to be kept, for those who follow the changes.
    pub keep_log_kib: u32,
    /// The absolute path that the companion files lie beside; empty at rest.
    pub base_path: Vec<u8>,
    /// Id of the shared memory; 0 at rest.
    pub shm_id: u64,
    /// Salt of the log record that ends at `replay_from`; 0 if there is none.
    pub last_salt: u64,
    /// The map pages listed here, at most [`capacity`] of them. Their number is the field
    /// *pages listed here* of the page.
    pub map_pages: Vec<u32>,
}

/// Why a page is not a meta page that can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MetaProblem {
    /// The magic is missing: never written, or voided.
    #[error("not a meta page")]
    NotMeta,
    /// The checksum is wrong: torn or damaged.
    #[error("the meta page has a wrong checksum")]
    BadChecksum,
    /// Intact, with a field that cannot be.
    #[error("the meta page has {value} as its {field}")]
    BadField {
        /// The field.
        field: &'static str,
        /// What it holds.
        value: u64,
    },
}

/// How many map pages a meta page can list.
pub const fn capacity(page_size: u32) -> usize {
    (page_size as usize - MAP_AT) / 4
}

impl Meta {
    /// Fills `page`, a whole page, with this meta.
    ///
    /// # Panics
    /// If the base path or the list of map pages is too long for it: the caller checks them first,
    /// against [`BASE_PATH_BYTES_MAX`] and [`capacity`].
    pub fn encode_into(&self, page: &mut [u8]) {
        assert!(page.len() >= MIN_PAGE_SIZE as usize);
        assert!(self.base_path.len() <= BASE_PATH_BYTES_MAX);
        assert!(self.map_pages.len() <= capacity(page.len() as u32));
        page.fill(0);
        le::put(page, MAGIC_AT, &MAGIC);
        le::put(page, KEEP_LOG_AT, &self.keep_log_kib.to_le_bytes());
        le::put(page, SEQUENCE_AT, &self.sequence.to_le_bytes());
        le::put(page, EPOCH_AT, &self.epoch.0.to_le_bytes());
        le::put(page, ROOT_AT, &self.root.to_le_bytes());
        le::put(page, RECORD_COUNT_AT, &self.record_count.to_le_bytes());
        le::put(page, REPLAY_FROM_AT, &self.replay_from.0.to_le_bytes());
        le::put(page, KEEP_FROM_AT, &self.keep_from.0.to_le_bytes());
        le::put(page, LOG_SALT_AT, &self.log_salt.to_le_bytes());
        le::put(page, SHM_ID_AT, &self.shm_id.to_le_bytes());
        le::put(page, LOG_INDEX_AT, &self.log_index.to_le_bytes());
        le::put(page, FILE_PAGES_AT, &self.file_pages.to_le_bytes());
        le::put(page, MAP_LEVELS_AT, &self.map_levels.to_le_bytes());
        le::put(page, MAP_ENTRIES_AT, &(self.map_pages.len() as u32).to_le_bytes());
        le::put(page, RESERVE_AT, &self.reserve.to_le_bytes());
        le::put(page, BASE_LEN_AT, &(self.base_path.len() as u16).to_le_bytes());
        le::put(page, BASE_AT, &self.base_path);
        le::put(page, LAST_SALT_AT, &self.last_salt.to_le_bytes());
        for (index, number) in self.map_pages.iter().enumerate() {
            le::put(page, MAP_AT + index * 4, &number.to_le_bytes());
        }
        let crc = page_crc(page);
        le::put(page, CRC_AT, &crc.to_le_bytes());
    }

    /// This meta as a page of `page_size` bytes.
    ///
    /// # Panics
    /// As [`Meta::encode_into`].
    pub fn encode(&self, page_size: u32) -> Vec<u8> {
        let mut page = vec![0; page_size as usize];
        self.encode_into(&mut page);
        page
    }

    /// Reads a meta page. Checks what the page itself can tell; that page numbers lie inside the
    /// file is for those to check who follow them.
    pub fn decode(page: &[u8]) -> Result<Self, MetaProblem> {
        if page.len() < MIN_PAGE_SIZE as usize || le::get_bytes(page, MAGIC_AT) != MAGIC {
            return Err(MetaProblem::NotMeta);
        }
        if le::get_u32(page, CRC_AT) != page_crc(page) {
            return Err(MetaProblem::BadChecksum);
        }
        let bounded = |field, value: u64, max: u64| {
            if value <= max { Ok(()) } else { Err(MetaProblem::BadField { field, value }) }
        };
        let log_index = le::get_u32(page, LOG_INDEX_AT);
        bounded("log", log_index.into(), 1)?;
        let base_len = le::get_u16(page, BASE_LEN_AT);
        bounded("length of the base path", base_len.into(), BASE_PATH_BYTES_MAX as u64)?;
        let map_entries = le::get_u32(page, MAP_ENTRIES_AT);
        let map_entries_max = capacity(page.len() as u32) as u64;
        bounded("number of map pages", map_entries.into(), map_entries_max)?;
        let map_bytes = &page[MAP_AT..MAP_AT + map_entries as usize * 4];
        Ok(Meta {
            sequence: le::get_u64(page, SEQUENCE_AT),
            epoch: Epoch(le::get_u64(page, EPOCH_AT)),
            root: le::get_u64(page, ROOT_AT),
            record_count: le::get_u64(page, RECORD_COUNT_AT),
            replay_from: Lsn(le::get_u64(page, REPLAY_FROM_AT)),
            keep_from: Lsn(le::get_u64(page, KEEP_FROM_AT)),
            log_salt: le::get_u64(page, LOG_SALT_AT),
            log_index,
            file_pages: le::get_u32(page, FILE_PAGES_AT),
            map_levels: le::get_u32(page, MAP_LEVELS_AT),
            reserve: le::get_u32(page, RESERVE_AT),
            keep_log_kib: le::get_u32(page, KEEP_LOG_AT),
            base_path: page[BASE_AT..BASE_AT + usize::from(base_len)].to_vec(),
            shm_id: le::get_u64(page, SHM_ID_AT),
            last_salt: le::get_u64(page, LAST_SALT_AT),
            map_pages: map_bytes.chunks_exact(4).map(|entry| le::get_u32(entry, 0)).collect(),
        })
    }
}

/// The checksum of a meta page: all of it but the field that holds the checksum.
fn page_crc(page: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&page[..CRC_AT]), &page[CRC_AT + 4..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Meta {
        Meta {
            sequence: 0x1111,
            epoch: Epoch(0x2222),
            root: 0x3333,
            record_count: 0x4444,
            replay_from: Lsn(0x5555),
            keep_from: Lsn(0x6666),
            log_salt: 0x7777,
            shm_id: 0x8888,
            log_index: 1,
            file_pages: 0x9999,
            map_levels: 0xAAAA,
            reserve: 0xBBBB,
            keep_log_kib: 0xCCCC,
            last_salt: 0x9876,
            base_path: b"/some/where".to_vec(),
            map_pages: vec![0xDDDD, 0xEEEE],
        }
    }

    fn reseal(page: &mut [u8]) {
        let crc = page_crc(page);
        le::put(page, CRC_AT, &crc.to_le_bytes());
    }

    /// The format, byte for byte: a change of this test is a change of the format.
    #[test]
    fn bytes_of_a_meta_page_are_what_the_format_says() {
        let page = sample().encode(4096);
        let mut expected = b"ntdbmeta".to_vec();
        expected.extend([0; 4]);
        expected.extend(0xCCCCu32.to_le_bytes());
        for number in [0x1111u64, 0x2222, 0x3333, 0x4444, 0x5555, 0x6666, 0x7777, 0x8888] {
            expected.extend(number.to_le_bytes());
        }
        for number in [1u32, 0x9999, 0xAAAA, 2, 0xBBBB, 11] {
            expected.extend(number.to_le_bytes());
        }
        expected.extend(b"/some/where");
        expected.resize(1128, 0);
        expected.extend(0x9876u64.to_le_bytes());
        expected.extend([0xDDDDu32.to_le_bytes(), 0xEEEEu32.to_le_bytes()].concat());
        expected.resize(4096, 0);
        let crc = crc32c::crc32c(&[&expected[..8], &expected[12..]].concat());
        expected[8..12].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(page, expected);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let page = sample().encode(4096);
        for bit in 0..page.len() * 8 {
            let mut damaged = page.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit < 64 { MetaProblem::NotMeta } else { MetaProblem::BadChecksum };
            assert_eq!(Meta::decode(&damaged), Err(expected), "bit {bit}");
        }
    }

    #[test]
    fn a_torn_write_is_noticed_at_every_sector() {
        let old = Meta { map_pages: (5..745).collect(), ..sample() }.encode(4096);
        let new = Meta { sequence: 0x1112, map_pages: (9..749).collect(), ..sample() }.encode(4096);
        for mask in 1..255u32 {
            let mut torn = old.clone();
            for sector in (0..8).filter(|sector| mask & (1 << sector) != 0) {
                let place = sector * 512..(sector + 1) * 512;
                torn[place.clone()].copy_from_slice(&new[place]);
            }
            // Some sectors (in the path's padding) are alike in both.
            if torn != old && torn != new {
                assert_eq!(Meta::decode(&torn), Err(MetaProblem::BadChecksum), "{mask:#x}");
            }
        }
    }

    #[test]
    fn impossible_fields_are_named() {
        let cases: [(usize, u64, &[u8], &str); 5] = [
            (LOG_INDEX_AT, 2, &2u32.to_le_bytes(), "log"),
            (BASE_LEN_AT, 1025, &1025u16.to_le_bytes(), "length of the base path"),
            (BASE_LEN_AT, 65535, &u16::MAX.to_le_bytes(), "length of the base path"),
            (MAP_ENTRIES_AT, 741, &741u32.to_le_bytes(), "number of map pages"),
            (MAP_ENTRIES_AT, u32::MAX.into(), &u32::MAX.to_le_bytes(), "number of map pages"),
        ];
        for (at, value, bytes, field) in cases {
            let mut page = sample().encode(4096);
            le::put(&mut page, at, bytes);
            reseal(&mut page);
            assert_eq!(Meta::decode(&page), Err(MetaProblem::BadField { field, value }));
        }
    }

    #[test]
    fn full_to_the_last_byte() {
        for page_size in [4096u32, 8192, 65536] {
            let meta = Meta {
                base_path: vec![b'x'; BASE_PATH_BYTES_MAX],
                map_pages: (0..capacity(page_size) as u32).map(|n| n ^ 0xFFFF_0000).collect(),
                ..sample()
            };
            let page = meta.encode(page_size);
            assert_eq!(page.len(), page_size as usize);
            assert_eq!(Meta::decode(&page), Ok(meta));
        }
        assert_eq!(capacity(4096), 740);
    }

    #[test]
    fn a_page_that_was_used_before_keeps_nothing_of_it() {
        let mut page = vec![0xEE; 4096];
        sample().encode_into(&mut page);
        assert_eq!(page, sample().encode(4096));
    }

    #[test]
    fn what_is_no_meta_page_is_refused() {
        for page in [vec![], vec![0; 4095], vec![0; 4096], sample().encode(4096)[..4095].to_vec()] {
            assert_eq!(Meta::decode(&page), Err(MetaProblem::NotMeta));
        }
        // A page read with the wrong page size.
        let page = sample().encode(8192);
        assert_eq!(Meta::decode(&page[..4096]), Err(MetaProblem::BadChecksum));
    }

    #[test]
    #[should_panic(expected = "capacity")]
    fn too_long_a_list_is_a_bug_of_the_caller() {
        Meta { map_pages: vec![1; 741], ..sample() }.encode(4096);
    }

    proptest! {
        #[test]
        fn comes_back_as_it_was(
            words: [u64; 9], halves: [u32; 4], log_index in 0..2u32, shift in 0..5u32,
            base_path in prop::collection::vec(any::<u8>(), 0..=BASE_PATH_BYTES_MAX),
            map_pages in prop::collection::vec(any::<u32>(), 0..=740),
        ) {
            let [sequence, epoch, root, record_count, replay, keep, log_salt, shm_id, last_salt] = words;
            let [file_pages, map_levels, reserve, keep_log_kib] = halves;
            let meta = Meta {
                sequence, epoch: Epoch(epoch), root, record_count, replay_from: Lsn(replay),
                keep_from: Lsn(keep), log_salt, shm_id, log_index, file_pages, map_levels,
                reserve, keep_log_kib, base_path, map_pages, last_salt,
            };
            prop_assert_eq!(Meta::decode(&meta.encode(4096 << shift)), Ok(meta));
        }

        #[test]
        fn any_fields_are_survived(noise in prop::collection::vec(any::<u8>(), 1..200), at in 8..1200usize) {
            let mut page = sample().encode(4096);
            le::put(&mut page, at, &noise);
            reseal(&mut page);
            if let Ok(meta) = Meta::decode(&page) {
                prop_assert!(meta.base_path.len() <= BASE_PATH_BYTES_MAX);
                prop_assert!(meta.map_pages.len() <= capacity(4096));
            }
        }
    }
}
