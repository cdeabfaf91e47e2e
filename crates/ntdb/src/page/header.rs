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
//! | 128..4096 | not looked at; zero but for the attach record at 2048 of page 0 (`environment::companions`) |
//!
//! # Crashes
//!
//! The creator writes the header last, after the meta pages, first the copy and then page 0, and
//! syncs. Until page 0 has its magic the file is no database yet, and may be created anew. After
//! that nobody writes these fields again.

use std::io;

use crate::le;
use crate::limits::{
    FORMAT_VERSION, MAX_PAGE_SIZE, MIN_PAGE_SIZE, RESERVE_PERCENT_MAX, valid_page_size,
};

/// Bytes of the header block, whatever the page size is.
pub const HEADER_BYTES: usize = MIN_PAGE_SIZE as usize;
/// Bytes that the header's fields and their checksum take; what lies behind is not the header's.
pub const HEADER_FIELD_BYTES: usize = CRC_AT + 4;
/// The page that the copy lies in.
pub const HEADER_COPY_PAGE: u32 = 3;
/// How every database begins.
pub const MAGIC: [u8; 8] = *b"ntdb\r\n\x1a\n";
/// Id of SipHash-1-3 with a key of 128 bits.
pub const HASH_SIPHASH_1_3: u32 = 1;

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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEADER: Header = Header {
        page_size: 8192,
        uuid: *b"0123456789abcdef",
        hash_id: HASH_SIPHASH_1_3,
        hash_key: *b"ABCDEFGHIJKLMNOP",
        hash_mask: u64::MAX,
        reserve_percent: 10,
        created_unix_seconds: 1_700_000_000,
    };

    /// A header with one field replaced and the checksum made right again.
    fn resealed(at: usize, bytes: &[u8]) -> [u8; HEADER_BYTES] {
        let mut block = HEADER.encode();
        le::put(&mut block, at, bytes);
        let crc = crc32c::crc32c(&block[..CRC_AT]);
        le::put(&mut block, CRC_AT, &crc.to_le_bytes());
        block
    }

    fn file_of(header: &Header) -> Vec<u8> {
        let mut file = vec![0x55; header.page_size as usize * 4];
        file[..HEADER_BYTES].copy_from_slice(&header.encode());
        let copy_at = Header::copy_offset(header.page_size) as usize;
        file[copy_at..copy_at + HEADER_BYTES].copy_from_slice(&header.encode());
        file
    }

    fn probe_bytes(file: &[u8]) -> Result<Header, ProbeProblem> {
        let read_at = |offset: u64, buffer: &mut [u8]| {
            let at = offset as usize;
            buffer.copy_from_slice(&file[at..at + buffer.len()]);
            Ok(())
        };
        probe(read_at, file.len() as u64)
    }

    fn header_problem(file: &[u8]) -> HeaderProblem {
        match probe_bytes(file) {
            Err(ProbeProblem::Header(problem)) => problem,
            other => panic!("{other:?}"),
        }
    }

    /// The format, byte for byte: a change of this test is a change of the format.
    #[test]
    fn bytes_of_a_header_are_what_the_format_says() {
        let mut expected = b"ntdb\r\n\x1a\n\x01\0\0\0\0\x20\0\x000123456789abcdef".to_vec();
        expected.extend(b"ABCDEFGHIJKLMNOP");
        expected.extend([0xFF; 8]);
        expected.extend(1_700_000_000u64.to_le_bytes());
        expected.extend(b"\x01\0\0\0\x0A\0\0\0");
        expected.resize(124, 0);
        expected.extend(crc32c::crc32c(&expected).to_le_bytes());
        expected.resize(4096, 0);
        assert_eq!(HEADER.encode()[..], expected[..]);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let block = HEADER.encode();
        for bit in 0..128 * 8 {
            let mut damaged = block;
            damaged[bit / 8] ^= 1 << (bit % 8);
            let expected =
                if bit < 64 { HeaderProblem::NotNtdb } else { HeaderProblem::BadChecksum };
            assert_eq!(Header::decode(&damaged), Err(expected), "bit {bit}");
        }
    }

    #[test]
    fn impossible_fields_are_named() {
        let number = |n: u32| n.to_le_bytes();
        let decode = |at, n| Header::decode(&resealed(at, &number(n)));
        assert_eq!(decode(VERSION_AT, 2), Err(HeaderProblem::NewerVersion(2)));
        for size in [0, 1, 2048, 4097, 12288, 131_072, u32::MAX] {
            assert_eq!(decode(PAGE_SIZE_AT, size), Err(HeaderProblem::BadPageSize(size)));
        }
        let problem = HeaderProblem::BadField { field: "hash", value: 2 };
        assert_eq!(decode(HASH_ID_AT, 2), Err(problem));
        let problem = HeaderProblem::BadField { field: "reserve in percent", value: 91 };
        assert_eq!(decode(RESERVE_AT, 91), Err(problem));
        // A later version may mean anything by the other fields.
        let mut later = resealed(VERSION_AT, &number(2));
        le::put(&mut later, PAGE_SIZE_AT, &number(7));
        let crc = crc32c::crc32c(&later[..CRC_AT]);
        le::put(&mut later, CRC_AT, &crc.to_le_bytes());
        assert_eq!(Header::decode(&later), Err(HeaderProblem::NewerVersion(2)));
    }

    #[test]
    fn the_copy_serves_when_the_first_is_damaged() {
        let mut page_size = MIN_PAGE_SIZE;
        while page_size <= MAX_PAGE_SIZE {
            let header = Header { page_size, ..HEADER };
            let intact = file_of(&header);
            assert_eq!(probe_bytes(&intact).unwrap(), header);
            let copy_at = Header::copy_offset(page_size) as usize;
            for damage in [0, 9, 13, 30, 125] {
                let mut file = intact.clone();
                file[damage] ^= 0x40;
                assert_eq!(probe_bytes(&file).unwrap(), header);
                let first = header_problem(&{
                    file[copy_at + 20] ^= 1;
                    file
                });
                let magic = damage < 8;
                let expected =
                    if magic { HeaderProblem::NotNtdb } else { HeaderProblem::BadChecksum };
                assert_eq!(first, expected);
            }
            let mut file = intact;
            file[copy_at + 20] ^= 1;
            assert_eq!(probe_bytes(&file).unwrap(), header);
            page_size *= 2;
        }
    }

    #[test]
    fn a_header_of_another_page_size_is_no_copy() {
        // A database of 8 KiB pages whose page 6 holds the image of a database with 4 KiB pages:
        // page 3 of 16 KiB pages lies there, and its page size disagrees.
        let mut file = vec![0; 8192 * 8];
        let image = Header { page_size: 4096, ..HEADER };
        file[8192 * 6..][..HEADER_BYTES].copy_from_slice(&image.encode());
        assert_eq!(header_problem(&file), HeaderProblem::NotNtdb);
    }

    #[test]
    fn later_versions_are_found_in_either_place() {
        let later = resealed(VERSION_AT, &9u32.to_le_bytes());
        let mut file = file_of(&HEADER);
        file[..HEADER_BYTES].copy_from_slice(&later);
        assert_eq!(header_problem(&file), HeaderProblem::NewerVersion(9));
        let copy_at = Header::copy_offset(HEADER.page_size) as usize;
        file[copy_at..copy_at + HEADER_BYTES].copy_from_slice(&later);
        file[100] ^= 1;
        assert_eq!(header_problem(&file), HeaderProblem::NewerVersion(9));
    }

    #[test]
    fn short_files_are_not_read_beyond_their_end() {
        let file = file_of(&Header { page_size: 65536, ..HEADER });
        for len in [0, 1, 4095] {
            assert_eq!(header_problem(&file[..len]), HeaderProblem::NotNtdb);
        }
        assert!(probe_bytes(&file[..4096]).is_ok());
        let mut damaged = file;
        damaged[50] ^= 1;
        for len in [4096, 4097, 12288, 100_000, 3 * 65536, 3 * 65536 + 4095] {
            assert_eq!(header_problem(&damaged[..len]), HeaderProblem::BadChecksum);
        }
        assert!(probe_bytes(&damaged[..3 * 65536 + 4096]).is_ok());
    }

    #[test]
    fn a_read_error_is_passed_on() {
        let result = probe(|_, _| Err(io::Error::from_raw_os_error(libc::EIO)), 1 << 20);
        match result {
            Err(ProbeProblem::Io(error)) => assert_eq!(error.raw_os_error(), Some(libc::EIO)),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn comes_back_as_it_was(
            shift in 0..5u32, uuid: [u8; 16], hash_key: [u8; 16], hash_mask: u64,
            reserve_percent in 0..=RESERVE_PERCENT_MAX, created_unix_seconds: u64,
        ) {
            let header = Header {
                page_size: MIN_PAGE_SIZE << shift, uuid, hash_id: HASH_SIPHASH_1_3, hash_key,
                hash_mask, reserve_percent, created_unix_seconds,
            };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_fields_are_survived(fields: [u8; 32], more: [u8; 32], at in 8..92usize) {
            let mut block = HEADER.encode();
            le::put(&mut block, at, &fields);
            le::put(&mut block, 8 + (at - 8) / 2, &more);
            let crc = crc32c::crc32c(&block[..CRC_AT]);
            le::put(&mut block, CRC_AT, &crc.to_le_bytes());
            if let Ok(header) = Header::decode(&block) {
                prop_assert!(valid_page_size(header.page_size));
            }
        }
    }
}
