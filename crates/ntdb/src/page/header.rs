//! The header block: what a database is, written once when it is created.
//!
//! It lies in the first 4096 bytes of page 0, with a copy in the first 4096 bytes of page 3; the
//! meta pages lie between them, so that no damaged or torn neighbour takes both. All numbers are
//! little-endian:
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..8 | magic, `ntdb\r\n\x1a\n` (a transfer as text would damage it) |
//! | 8..12 | format version (u32) |
//! | 12..16 | page size in bytes (u32) |
//! | 16..32 | UUID |
//! | 32..48 | key of the hash |
//! | 48..56 | mask of the hash (u64), all ones but in tests of equal hashes |
//! | 56..64 | time of creation, seconds since 1970 (u64) |
//! | 64..68 | id of the hash (u32), 1 for SipHash-1-3 |
//! | 68..72 | reserve that was asked for at creation, in percent (u32) |
//! | 72..124 | zero |
//! | 124..128 | CRC-32C of bytes 0..124 |
//! | 128..4096 | zero, not looked at |
//!
//! # Crashes
//!
//! The creator writes the header last, after the meta pages, first the copy and then page 0, and
//! syncs. Until page 0 has its magic the file is no database yet, and may be created anew. After
//! that nobody writes either block again.

use std::io;

use crate::le;
use crate::limits::{FORMAT_VERSION, MAX_PAGE_SIZE, MIN_PAGE_SIZE, valid_page_size};

/// Bytes of the header block, whatever the page size is.
pub const HEADER_BYTES: usize = MIN_PAGE_SIZE as usize;
/// The page that the header lies in.
pub const HEADER_PAGE: u32 = 0;
/// The page that the copy lies in.
pub const HEADER_COPY_PAGE: u32 = 3;
/// Id of SipHash-1-3 with a key of 128 bits.
pub const HASH_SIPHASH_1_3: u32 = 1;

const MAGIC: [u8; 8] = *b"ntdb\r\n\x1a\n";
/// The same bound as for the option.
const RESERVE_PERCENT_MAX: u32 = 90;

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = MAGIC_AT + 8;
const PAGE_SIZE_AT: usize = VERSION_AT + 4;
const UUID_AT: usize = PAGE_SIZE_AT + 4;
const HASH_KEY_AT: usize = UUID_AT + 16;
const HASH_MASK_AT: usize = HASH_KEY_AT + 16;
const CREATED_AT: usize = HASH_MASK_AT + 8;
const HASH_ID_AT: usize = CREATED_AT + 8;
const RESERVE_AT: usize = HASH_ID_AT + 4;
const FIELDS_END: usize = RESERVE_AT + 4;
const CRC_AT: usize = 124;

// The table above.
const _: () = assert!(UUID_AT == 16 && HASH_KEY_AT == 32 && HASH_MASK_AT == 48);
const _: () = assert!(CREATED_AT == 56 && HASH_ID_AT == 64 && RESERVE_AT == 68);
// One 512-byte sector, so a torn write leaves it whole or absent.
const _: () = assert!(FIELDS_END <= CRC_AT && CRC_AT + 4 <= 512);

/// What a database is from its creation on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Bytes of a page.
    pub page_size: u32,
    /// Tells this database from every other.
    pub uuid: [u8; 16],
    /// Which hash places the records.
    pub hash_id: u32,
    /// The hash's key, random per database.
    pub hash_key: [u8; 16],
    /// Which bits of the hash count: all, except in tests of equal hashes.
    pub hash_mask: u64,
    /// The reserve that was asked for, in percent of a page.
    pub reserve_percent: u32,
    /// When it was created, in seconds since 1970.
    pub created_unix_seconds: u64,
}

/// Why a block is not a header that can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeaderProblem {
    /// The magic is missing.
    #[error("it does not begin with ntdb's magic number")]
    NotNtdb,
    /// The checksum is wrong.
    #[error("the header has a wrong checksum")]
    BadChecksum,
    /// Intact, and of a later format.
    #[error("format version {0}")]
    NewerVersion(u32),
    /// Intact, with a page size that is none.
    #[error("the header names a page size of {0} bytes")]
    BadPageSize(u32),
    /// Intact, with another field that cannot be.
    #[error("the header has {value} as its {field}")]
    BadField {
        /// The field.
        field: &'static str,
        /// What it holds.
        value: u64,
    },
}

/// Why no header was found.
#[derive(Debug, thiserror::Error)]
pub enum ProbeProblem {
    /// The file could not be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Neither page 0 nor any place where a copy may lie holds a header. The problem is that of
    /// page 0.
    #[error(transparent)]
    Header(#[from] HeaderProblem),
}

impl Header {
    /// The header block.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut block = [0; HEADER_BYTES];
        le::put(&mut block, MAGIC_AT, &MAGIC);
        le::put(&mut block, VERSION_AT, &FORMAT_VERSION.to_le_bytes());
        le::put(&mut block, PAGE_SIZE_AT, &self.page_size.to_le_bytes());
        le::put(&mut block, UUID_AT, &self.uuid);
        le::put(&mut block, HASH_KEY_AT, &self.hash_key);
        le::put(&mut block, HASH_MASK_AT, &self.hash_mask.to_le_bytes());
        le::put(&mut block, CREATED_AT, &self.created_unix_seconds.to_le_bytes());
        le::put(&mut block, HASH_ID_AT, &self.hash_id.to_le_bytes());
        le::put(&mut block, RESERVE_AT, &self.reserve_percent.to_le_bytes());
        let crc = crc32c::crc32c(&block[..CRC_AT]);
        le::put(&mut block, CRC_AT, &crc.to_le_bytes());
        block
    }

    /// Reads a header block. Its magic, version and checksum have the same places in every version,
    /// so a damaged block is never mistaken for one of a later version.
    pub fn decode(block: &[u8; HEADER_BYTES]) -> Result<Self, HeaderProblem> {
        if le::get_bytes(block, MAGIC_AT) != MAGIC {
            return Err(HeaderProblem::NotNtdb);
        }
        if le::get_u32(block, CRC_AT) != crc32c::crc32c(&block[..CRC_AT]) {
            return Err(HeaderProblem::BadChecksum);
        }
        let version = le::get_u32(block, VERSION_AT);
        if version > FORMAT_VERSION {
            return Err(HeaderProblem::NewerVersion(version));
        }
        let header = Header {
            page_size: le::get_u32(block, PAGE_SIZE_AT),
            uuid: le::get_bytes(block, UUID_AT),
            hash_id: le::get_u32(block, HASH_ID_AT),
            hash_key: le::get_bytes(block, HASH_KEY_AT),
            hash_mask: le::get_u64(block, HASH_MASK_AT),
            reserve_percent: le::get_u32(block, RESERVE_AT),
            created_unix_seconds: le::get_u64(block, CREATED_AT),
        };
        if !valid_page_size(header.page_size) {
            return Err(HeaderProblem::BadPageSize(header.page_size));
        }
        let bad_field = |field, value: u32| HeaderProblem::BadField { field, value: value.into() };
        if header.hash_id != HASH_SIPHASH_1_3 {
            return Err(bad_field("hash", header.hash_id));
        }
        if header.reserve_percent > RESERVE_PERCENT_MAX {
            return Err(bad_field("reserve in percent", header.reserve_percent));
        }
        Ok(header)
    }

    /// Where the copy lies, in bytes from the start of the file.
    pub fn copy_offset(page_size: u32) -> u64 {
        u64::from(HEADER_COPY_PAGE) * u64::from(page_size)
    }
}

/// Finds the header of a file of `file_len_bytes` bytes, which `read_at` reads: in page 0, or, if
/// that is damaged, in page 3 of some page size. An intact header of a later version counts as
/// found; it is an error at once.
pub fn probe(
    mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
    file_len_bytes: u64,
) -> Result<Header, ProbeProblem> {
    let mut block = [0; HEADER_BYTES];
    let mut decode_at = |offset: u64| -> io::Result<Result<Header, HeaderProblem>> {
        if file_len_bytes < offset + HEADER_BYTES as u64 {
            return Ok(Err(HeaderProblem::NotNtdb));
        }
        read_at(offset, &mut block)?;
        Ok(Header::decode(&block))
    };
    let damaged = match decode_at(0)? {
        Err(problem @ (HeaderProblem::NotNtdb | HeaderProblem::BadChecksum)) => problem,
        conclusive => return Ok(conclusive?),
    };
    let mut page_size = MIN_PAGE_SIZE;
    while page_size <= MAX_PAGE_SIZE {
        match decode_at(Header::copy_offset(page_size))? {
            // Anything else at that place is some page of a database with another page size, or
            // an image of a database that is stored as a value.
            Ok(header) if header.page_size == page_size => return Ok(header),
            Err(problem @ HeaderProblem::NewerVersion(_)) => return Err(problem.into()),
            _ => {}
        }
        page_size *= 2;
    }
    Err(damaged.into())
}
