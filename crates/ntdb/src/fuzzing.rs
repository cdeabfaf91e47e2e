//! Everything that takes bytes apart, behind one door, for the fuzz targets and the tests with forged files.
//!
//! Not part of the API, and compiled for the tests of this project only. The `parse_*` functions hand any bytes to one
//! parser and check what it promises; the `seal_*` functions make checksums right again after somebody has changed
//! what they cover, as an attacker would; the rest says where in the files the interesting numbers are.

use std::path::Path;

use crate::environment::companions::AttachRecord;
use crate::environment::create;
use crate::error::{Error, Result};
use crate::hash::SIPHASH_1_3;
use crate::limits::RING_BYTES;
use crate::log::file::{LOG_HEADER_BYTES, LogFile, LogHeader};
use crate::log::record::{self, Decoded, Op};
use crate::log::scan::Scanner;
use crate::log::stream::{self, StreamOp, StreamProblem, StreamReader};
use crate::page::bucket::Bucket;
use crate::page::head::HEAD_BYTES;
use crate::page::header::{self, HEADER_BYTES, Header};
use crate::page::meta::{self, Meta};
use crate::shm::layout::{self, Control, ShmHeader};
use crate::storage::file::{File, Kind};
use crate::types::Lsn;

/// Creates a database that is the same each time: its UUID and the key of its hash follow from `seed`.
///
/// # Errors
/// What the system reports.
pub fn create_database(path: &Path, page_size: u32, hash_mask: u64, seed: u8) -> Result<()> {
    let header = Header {
        page_size,
        uuid: [seed; 16],
        hash_id: SIPHASH_1_3,
        hash_key: [seed ^ 0x5a; 16],
        hash_mask,
        reserve_percent: 0,
        created_unix_seconds: 1_700_000_000,
    };
    let data = File::create_new(path, Kind::Data, 0o600)
        .map_err(|e| Error::from_io(path, "create the database", e))?;
    create::create(&data, path, &header)
}

/// Takes any bytes as a header block, as the beginning of a file, and as a meta page.
pub fn parse_header_and_meta(bytes: &[u8]) {
    if let Some(block) = bytes.first_chunk::<HEADER_BYTES>()
        && let Ok(header) = Header::decode(block)
    {
        assert_eq!(Header::decode(&header.encode()), Ok(header));
    }
    let read_at = |offset: u64, block: &mut [u8]| {
        let at = offset as usize;
        block.copy_from_slice(&bytes[at..at + block.len()]);
        Ok(())
    };
    let _ = header::probe(read_at, bytes.len() as u64);
    let mut page = bytes.to_vec();
    for sealed in [false, true] {
        if sealed {
            seal_meta(&mut page);
        }
        if let Ok(meta) = Meta::decode(&page) {
            assert!(meta.map_pages.len() <= meta::capacity(page.len() as u32));
        }
    }
}

/// Takes any bytes as a log record, as they are and with a right check.
pub fn parse_log_record(bytes: &[u8]) {
    let (salt, lsn) = (7, Lsn(99));
    let mut bytes = bytes.to_vec();
    let _ = record::plausible_len(&bytes);
    for sealed in [false, true] {
        if sealed {
            seal_log_record(&mut bytes, salt, lsn.0);
        }
        let _ = record::decode_body(&bytes);
        if let Ok(Decoded::Record { op, len }) = record::decode(salt, lsn, &bytes) {
            // One encoding per operation: what was understood is what is there.
            let mut again = vec![0; record::encoded_len(&op)];
            record::encode(&op, &mut again);
            assert_eq!(again[8..], bytes[8..len as usize]);
        }
    }
}

/// Takes any bytes as the stream of a transaction, in pieces of lengths that the first bytes name, of which parts were undone: the
/// same operations must come of it however it is cut, and the bytes that were not undone must be what they encode to.
pub fn parse_log_stream(bytes: &[u8]) {
    let Some((&[piece, undone_len], rest)) = bytes.split_first_chunk::<2>() else { return };
    let (undone, stream) = rest.split_at(rest.len().min(undone_len as usize % 32));
    // With so many zeros behind, lengths are possible that are too long to be put together.
    let stream = &[stream, &vec![0; if undone_len < 128 { 0 } else { 300_000 }]].concat()[..];
    let cut: Vec<&[u8]> = stream.chunks(piece as usize + 1).collect();
    let (total, crc) = (stream.len() as u64, crc32c::crc32c(stream));
    for undone in [&[][..], undone] {
        let [whole, cut] = [&[stream][..], &cut].map(|pieces| {
            StreamReader::committed(pieces, total, crc, undone).and_then(encode_again)
        });
        assert_eq!(whole, cut);
        let (Ok(again), true) = (&whole, undone.is_empty()) else { continue };
        assert_eq!(again, stream);
        // Without its first bytes, if an operation begins behind them.
        let mut first = Vec::new();
        stream::append_undone(&mut first, 0, u64::from(piece) + 1);
        let rest = StreamReader::committed(&[stream], total, crc, &first).and_then(encode_again);
        assert!(rest.is_err() || rest.is_ok_and(|rest| stream.ends_with(&rest)));
    }
}

/// The operations of a stream as a stream.
fn encode_again(mut reader: StreamReader<'_>) -> Result<Vec<u8>, StreamProblem> {
    let mut again = Vec::new();
    loop {
        match reader.next()? {
            None => return Ok(again),
            Some(StreamOp::Whole(op)) => stream::append_op(&mut again, &op),
            Some(StreamOp::Long { head, value }) => {
                let len = value.len();
                let bytes = &value.collect::<Vec<_>>().concat()[..];
                assert_eq!(bytes.len() as u64, len);
                let op = match head {
                    Op::Put { key, value: [] } => Op::Put { key, value: bytes },
                    Op::Append { key, length_before, bytes: [] } => {
                        Op::Append { key, length_before, bytes }
                    }
                    other => panic!("{other:?} has no value to come"),
                };
                stream::append_op(&mut again, &op);
            }
        }
    }
}

/// Scans the file at `path` as a log, from its start and from `from`.
pub fn scan_log(path: &Path, from: u64) {
    let Ok(log) = LogFile::open_readonly(path) else { return };
    for from in [log.header().start, Lsn(from)] {
        let mut scanner = Scanner::new(&log, from);
        let mut before = from.0;
        while let Ok(Some(scanned)) = scanner.next() {
            assert!(scanned.next.0 > before);
            before = scanned.next.0;
        }
    }
}

/// Memory that is aligned as mapped pages are.
#[repr(align(4096))]
struct Aligned([u8; 65536]);

/// Takes any bytes as a bucket page: searches it for `hash`, visits its records, checks it.
pub fn parse_bucket_page(bytes: &[u8], hash: u64) {
    let size = if bytes.len() > 4096 { 65536 } else { 4096 };
    let mut page = Box::new(Aligned([0; 65536]));
    let len = bytes.len().min(size);
    page.0[..len].copy_from_slice(&bytes[..len]);
    let base = page.0.as_mut_ptr();
    // SAFETY: the page is this function's own, aligned, and as long as is said.
    let Ok(bucket) = (unsafe { Bucket::at(base, size) }) else { return };
    let range = base as usize..=base as usize + size;
    let inside = |start: *const u8, len: usize| {
        assert!(range.contains(&(start as usize)) && len <= *range.end() - start as usize);
    };
    let mut seen = 0;
    let whole = bucket.for_each_live(
        |reason| reason,
        |slot, record| {
            inside(record.start, record.len);
            if !record.key_is_in_extent() {
                inside(record.key, record.key_len as usize);
            }
            assert!(slot < bucket.slots());
            seen += 1;
            Ok(())
        },
    );
    assert!(seen <= bucket.slots());
    let found = bucket.find(hash, |reason| reason, |record| Ok(record.key_len % 2 == 0));
    if let Ok(Some(found)) = found {
        inside(found.record.start, found.record.len);
        let _ = bucket.tag_after_delete(found.slot);
    }
    let checked = bucket.check_structure();
    assert!(checked.is_err() || whole.is_ok(), "a checked page is readable");
    let _ = (bucket.vacant_slot(hash), bucket.free_bytes(), bucket.record_room());
    let _ = bucket.write_record(&[7; 40]);
    let _ = bucket.for_each_live(|reason| reason, |_, _| Ok(()));
}

/// Takes any bytes as a record.
pub fn parse_record(bytes: &[u8]) {
    // SAFETY: a slice is readable and constant.
    if let Ok(record) = unsafe { crate::page::record::parse(bytes.as_ptr(), bytes.len()) } {
        assert!(record.len <= bytes.len());
        let _ = record.extent_bytes();
    }
}

/// Takes any bytes as the header of a shared-memory file.
pub fn parse_shm_header(bytes: &[u8]) {
    let mut block = [0; layout::HEADER_BYTES + 4];
    let len = bytes.len().min(block.len());
    block[..len].copy_from_slice(&bytes[..len]);
    let _ = ShmHeader::from_bytes(&block);
    seal_shm_header(&mut block);
    if let Some(header) = ShmHeader::from_bytes(&block) {
        assert_eq!(header.to_bytes(), block);
    }
}

/// Reads the attach record of the file at `path`.
pub fn parse_attach_record(path: &Path) {
    let Ok(file) = File::open_readonly(path, Kind::Data) else { return };
    if let Ok(Some(record)) = AttachRecord::read(&file) {
        assert!(record.base.as_os_str().len() <= meta::BASE_PATH_BYTES_MAX);
    }
}

/// Puts the CRC of the `covered` spans (from, to) where it belongs.
fn put_crc(bytes: &mut [u8], at: usize, covered: &[(usize, usize)]) {
    if bytes.len() < at + 4 || covered.iter().any(|span| span.1 > bytes.len()) {
        return;
    }
    let crc =
        covered.iter().fold(0, |crc, &(from, to)| crc32c::crc32c_append(crc, &bytes[from..to]));
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Makes the check of a header block right; a log's header has its check at the same place.
pub fn seal_header(block: &mut [u8]) {
    put_crc(block, 124, &[(0, 124)]);
}

/// Makes the check of a meta page right.
pub fn seal_meta(page: &mut [u8]) {
    let end = page.len().max(12);
    put_crc(page, 8, &[(0, 8), (12, end)]);
}

/// Makes the check of a page with the common header (or of a run of pages) right.
pub fn seal_page(run: &mut [u8]) {
    let end = run.len().max(4);
    put_crc(run, 0, &[(4, end)]);
}

/// Whether a page with the common header (or a run) has a right check.
pub fn is_sealed_page(run: &[u8]) -> bool {
    run.len() > HEAD_BYTES && crc32c::crc32c(&run[4..]).to_le_bytes() == run[..4]
}

/// Makes the check of a shared-memory file's header right.
pub fn seal_shm_header(bytes: &mut [u8]) {
    put_crc(bytes, layout::HEADER_BYTES, &[(0, layout::HEADER_BYTES)]);
}

/// Makes a shared-memory file that of the data file with this device and inode.
pub fn adopt_shm(bytes: &mut [u8], device: u64, inode: u64) {
    let (at_device, at_inode) =
        (std::mem::offset_of!(ShmHeader, device), std::mem::offset_of!(ShmHeader, inode));
    for (at, number) in [(at_device, device), (at_inode, inode)] {
        if let Some(place) = bytes.get_mut(at..at + 8) {
            place.copy_from_slice(&number.to_le_bytes());
        }
    }
    seal_shm_header(bytes);
}

/// Makes the attach record in the first page of a data file that of the file with this device and inode.
pub fn adopt_attach_record(page: &mut [u8], device: u64, inode: u64) {
    if let Some(place) = page.get_mut(AttachRecord::SPAN) {
        // Where there is none, none is made.
        if place.iter().all(|&byte| byte == 0) {
            return;
        }
        let place = &mut place[AttachRecord::FILE_SPAN];
        place[..8].copy_from_slice(&device.to_le_bytes());
        place[8..16].copy_from_slice(&inode.to_le_bytes());
    }
    seal_attach_record(page);
}

/// Makes the check of a log record right, if it says that all of it is there.
pub fn seal_log_record(bytes: &mut [u8], salt: u64, lsn: u64) {
    let Some(len) = bytes.first_chunk::<4>().map(|len| u32::from_le_bytes(*len)) else { return };
    let Some(body) = bytes.get(record::RECORD_HEADER_BYTES..len as usize) else { return };
    let check = record::seal(salt, Lsn(lsn), len, record::body_crc(body));
    record::set_check(bytes, check);
}

/// Makes the checks of a log's header and of all its records right, as far as their lengths make sense.
pub fn seal_log(file: &mut [u8]) {
    seal_header(file);
    let Some(Ok(header)) = file.first_chunk::<LOG_HEADER_BYTES>().map(LogHeader::decode) else {
        return;
    };
    let (mut lsn, mut rest) = (header.start.0, &mut file[LOG_HEADER_BYTES..]);
    while let Some(len) = record::plausible_len(rest) {
        let (one, behind) = rest.split_at_mut(len);
        seal_log_record(one, header.salt, lsn);
        (lsn, rest) = (lsn.wrapping_add(len as u64), behind);
    }
}

/// Makes the check of the attach record in the first page of a data file right.
pub fn seal_attach_record(page: &mut [u8]) {
    if let Some(place) = page.get_mut(AttachRecord::SPAN) {
        let end = place.len();
        put_crc(place, 32, &[(0, 32), (36, end)]);
    }
}

/// A record of a log or of the ring.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its LSN.
    pub lsn: u64,
    /// Salt of its check.
    pub salt: u64,
    /// Where in the file it begins.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// The records of a log file.
pub fn log_places(file: &[u8]) -> Vec<Place> {
    let mut places = Vec::new();
    let Some(Ok(header)) = file.first_chunk::<LOG_HEADER_BYTES>().map(LogHeader::decode) else {
        return places;
    };
    let (mut lsn, mut offset) = (header.start.0, LOG_HEADER_BYTES);
    while let Some(len) = record::sealed_len(header.salt, Lsn(lsn), &file[offset..]) {
        let len = len as usize;
        places.push(Place { lsn, salt: header.salt, offset, len });
        (lsn, offset) = (lsn + len as u64, offset + len);
    }
    places
}

/// The records in the ring of a shared-memory file that lie behind `written` and do not wrap round.
pub fn ring_places(shm: &[u8]) -> Vec<Place> {
    let mut places = Vec::new();
    let word = |at: usize| {
        let bytes = shm.get(layout::CONTROL + at..)?.first_chunk::<8>()?;
        Some(u64::from_le_bytes(*bytes))
    };
    let control = |field: usize, within: usize| word(field + within).unwrap_or(0);
    let writer = std::mem::offset_of!(Control, writer);
    let tail = control(writer, std::mem::offset_of!(layout::WriterWords, tail));
    let salt = control(writer, std::mem::offset_of!(layout::WriterWords, salt));
    let log = std::mem::offset_of!(Control, log);
    let mut lsn = control(log, std::mem::offset_of!(layout::LogWords, written));
    while lsn < tail {
        let offset = layout::RING + (lsn % RING_BYTES) as usize;
        let Some(rest) = shm.get(offset..layout::CHECKPOINT_IMAGE) else { break };
        let Some(len) = record::sealed_len(salt, Lsn(lsn), rest) else { break };
        places.push(Place { lsn, salt, offset, len: len as usize });
        lsn += len as u64;
    }
    places
}

/// The parts of a shared-memory file: where each begins, and how long it is.
pub fn shm_parts() -> [(usize, usize); 3] {
    [
        (0, layout::HEADER_BYTES),
        (layout::CONTROL, size_of::<Control>()),
        (layout::RING, RING_BYTES as usize),
    ]
}
