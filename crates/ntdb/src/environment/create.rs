//! New databases.
//!
//! Written under the attach lock, the header last, its copy not before all else is on disk: whoever finds either of them finds
//! a whole database. A file whose creation was cut short before that begins with zeros and may be created anew.

use std::path::Path;

use crate::checkpoint::map;
use crate::error::{Error, Result};
use crate::hash::SIPHASH_1_3;
use crate::index::locate::Root;
use crate::options::Options;
use crate::page::bucket::{Builder, groups_for};
use crate::page::head::{HEAD_BYTES, Kind, PageHead};
use crate::page::header::{HEADER_BYTES, HEADER_COPY_PAGE, HEADER_FIELD_BYTES, Header};
use crate::page::map as map_page;
use crate::page::meta::{META_PAGES, Meta};
use crate::page::reserve::Reserve;
use crate::storage::failpoint::crash_point;
use crate::storage::file::{self, File};
use crate::storage::filesystem;
use crate::types::{Epoch, Lsn, PageNo};

/// Pages of a new database: header, two metas, header copy, one map page, one bucket.
pub const NEW_PAGES: u32 = 6;
const MAP_PAGE: u32 = 4;
const BUCKET_PAGE: u32 = 5;
/// Bytes that a disk writes as a whole or not at all.
const SECTOR_BYTES: usize = 512;
/// Epoch of a new database's pages.
pub const FIRST_EPOCH: Epoch = Epoch(1);

/// Header of a new database.
pub fn new_header(path: &Path, options: &Options) -> Result<Header> {
    let mut uuid = [0; 16];
    let mut hash_key = [0; 16];
    filesystem::random_bytes(&mut uuid)
        .and_then(|()| filesystem::random_bytes(&mut hash_key))
        .map_err(|e| Error::from_io(path, "get random numbers", e))?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Ok(Header {
        page_size: options.page_size,
        uuid,
        hash_id: SIPHASH_1_3,
        hash_key,
        hash_mask: options.hash_mask,
        reserve_percent: options.reserve_percent as u32,
        created_unix_seconds: now.map_or(0, |t| t.as_secs()),
    })
}

/// A page-aligned buffer.
struct PageBuffer(Vec<u64>);

impl PageBuffer {
    fn new(page_size: usize) -> PageBuffer {
        // Room to align the start to 64 bytes.
        PageBuffer(vec![0; page_size / 8 + 8])
    }

    fn start(&mut self) -> *mut u8 {
        let at = self.0.as_mut_ptr().cast::<u8>();
        at.wrapping_add(at.align_offset(64))
    }

    fn sealed(&mut self, page_size: usize) -> Vec<u8> {
        let start = self.start();
        // SAFETY: the buffer holds a page from its aligned start on, and is ours.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, page_size) };
        let checksum = crc32c::crc32c(&bytes[4..]);
        bytes[..4].copy_from_slice(&checksum.to_le_bytes());
        bytes.to_vec()
    }
}

/// The first bucket page.
fn bucket_page(page_size: usize) -> Vec<u8> {
    let mut buffer = PageBuffer::new(page_size);
    let groups = groups_for(page_size, 0, 0, Reserve::NONE);
    // SAFETY: the buffer holds a page from its aligned start on, and is ours.
    unsafe {
        Builder::new(buffer.start(), page_size, PageNo(BUCKET_PAGE), FIRST_EPOCH, 0, 0, groups);
    }
    buffer.sealed(page_size)
}

fn map_page(page_size: usize) -> Vec<u8> {
    let mut buffer = PageBuffer::new(page_size);
    let start = buffer.start();
    // SAFETY: as above.
    unsafe {
        PageHead::at(start).init(Kind::Map, PageNo(MAP_PAGE), FIRST_EPOCH, 0, 0);
        let bits = std::slice::from_raw_parts_mut(start.add(HEAD_BYTES), page_size - HEAD_BYTES);
        map_page::mark(bits, 0, NEW_PAGES, true);
    }
    buffer.sealed(page_size)
}

/// The first state of a database.
pub fn first_meta(reserve_percent: u32) -> Meta {
    let pages = map::MapPages { groups: vec![PageNo(MAP_PAGE)], index: Vec::new() };
    let (map_levels, map_pages) = pages.listed();
    Meta {
        sequence: 1,
        epoch: FIRST_EPOCH,
        root: Root { page: PageNo(BUCKET_PAGE), depth: None }.to_word(),
        record_count: 0,
        replay_from: Lsn(0),
        keep_from: Lsn(0),
        file_pages: NEW_PAGES,
        map_levels,
        map_pages,
        reserve: reserve_percent,
        ..Meta::default()
    }
}

/// The pages of a new database but its header: (page number, contents), the header's copy last. Both meta pages, so that damage
/// to either loses nothing.
pub fn first_pages(header: &Header) -> Vec<(u32, Vec<u8>)> {
    let size = header.page_size as usize;
    let meta = first_meta(header.reserve_percent).encode(header.page_size);
    vec![
        (META_PAGES[0], meta.clone()),
        (META_PAGES[1], meta),
        (MAP_PAGE, map_page(size)),
        (BUCKET_PAGE, bucket_page(size)),
        (HEADER_COPY_PAGE, header.encode().to_vec()),
    ]
}

/// Writes the header, or its copy, where that is damaged and the other one is whole; or only where it is missing, as a power cut during
/// the creation leaves it. Nobody else is attached.
pub fn mend_header(data: &File, page_size: u32, only_missing: bool) -> std::io::Result<()> {
    let places = [0, HEADER_COPY_PAGE as u64 * page_size as u64];
    let mut blocks = [[0u8; HEADER_BYTES]; 2];
    for (block, place) in blocks.iter_mut().zip(places) {
        data.read_exact_at(block, place)?;
    }
    for (index, place) in places.into_iter().enumerate() {
        let (block, other) = (&blocks[index], &blocks[1 - index]);
        let fields = &block[..HEADER_FIELD_BYTES];
        if Header::decode(block).is_ok() || only_missing && fields.iter().any(|&byte| byte != 0) {
            continue;
        }
        if let Ok(header) = Header::decode(other) {
            // Not the attach record behind.
            data.write_all_at(&header.encode()[..HEADER_FIELD_BYTES], place)?;
            data.sync_data()?;
        }
    }
    Ok(())
}

/// Whether `file` is what a power cut may leave of the first pages of a new database, before its header: each sector is as
/// creation writes it, or zero.
pub fn is_beginning(file: &[u8], page_size: u32) -> bool {
    let size = page_size as usize;
    let mut expected = vec![0; NEW_PAGES as usize * size];
    if file.len() > expected.len() {
        return false;
    }
    for (number, bytes) in [
        (META_PAGES[0], first_meta(0).encode(page_size)),
        (META_PAGES[1], first_meta(0).encode(page_size)),
        (MAP_PAGE, map_page(size)),
        (BUCKET_PAGE, bucket_page(size)),
    ] {
        expected[number as usize * size..][..size].copy_from_slice(&bytes);
    }
    let is_zero = |sector: &[u8]| sector.iter().all(|&byte| byte == 0);
    // The sectors that the reserve and so the checksum stand in are known by their magic.
    let metas = META_PAGES.map(|page| page as usize * size);
    file.chunks(SECTOR_BYTES).zip(expected.chunks(SECTOR_BYTES)).enumerate().all(
        |(number, (found, expected))| {
            let same = if metas.contains(&(number * SECTOR_BYTES)) {
                found.starts_with(&expected[..8])
            } else {
                expected.starts_with(found)
            };
            same || is_zero(found)
        },
    )
}

/// Makes `data`, an empty (or zero) file, a database. The caller holds the attach lock.
pub fn create(data: &File, path: &Path, header: &Header) -> Result<()> {
    let failed = |e| Error::from_io(path, "create the database", e);
    let size = header.page_size as u64;
    data.allocate(0, NEW_PAGES as u64 * size).map_err(failed)?;
    crash_point("create.allocated");
    for (number, bytes) in first_pages(header) {
        if number == HEADER_COPY_PAGE {
            // A power cut may leave any of these pages: the copy must not be one without the others.
            data.sync_all().map_err(failed)?;
            crash_point("create.pages.synced");
        }
        data.write_all_at(&bytes, number as u64 * size).map_err(failed)?;
        crash_point("create.page");
    }
    data.write_all_at(&header.encode(), 0).map_err(failed)?;
    crash_point("create.header");
    data.sync_all().map_err(failed)?;
    file::sync_dir(path).map_err(failed)?;
    crash_point("create.done");
    Ok(())
}
