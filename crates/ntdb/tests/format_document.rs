//! docs/format.md says enough to read a database: here is a reader that was written from it and knows nothing of the engine,
//! not even its checksum and hash. It finds every record, follows the logs, and looks into the shared memory of a database in
//! use. When it fails, either the document or the format has changed without the other.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ntdb::{Db, Options};

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

// ---- Numbers, checksums, the hash ----

fn num(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte))
}

fn crc_of(parts: &[&[u8]]) -> u64 {
    let mut crc = u32::MAX;
    for &byte in parts.iter().copied().flatten() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
        }
    }
    u64::from(!crc)
}

#[test]
fn the_checksum_is_the_one_that_the_document_names() {
    assert_eq!(crc_of(&[b"1234", b"56789"]), 0xE306_9283);
}

fn sip_hash(key: &[u8], data: &[u8], rounds: [usize; 2]) -> u64 {
    let (k0, k1) = (num(key, 0, 8), num(key, 8, 8));
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    fn round(v: &mut [u64; 4]) {
        v[0] = v[0].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[0] = v[0].rotate_left(32);
        v[2] = v[2].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[2] = v[2].rotate_left(32);
    }
    let whole = data.len() / 8 * 8;
    let mut last = [0; 8];
    last[..data.len() - whole].copy_from_slice(&data[whole..]);
    last[7] = data.len() as u8;
    for word in data[..whole].chunks(8).chain([&last[..]]) {
        let word = num(word, 0, 8);
        v[3] ^= word;
        (0..rounds[0]).for_each(|_| round(&mut v));
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    (0..rounds[1]).for_each(|_| round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

#[test]
fn the_hash_is_sip_hash() {
    // The example of its authors: SipHash-2-4 of 0 .. 14 under the key 0 .. 15.
    let bytes: Vec<u8> = (0..16).collect();
    assert_eq!(sip_hash(&bytes, &bytes[..15], [2, 4]), 0xa129_ca61_49be_45e5);
}

fn varint(bytes: &[u8], at: &mut usize) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = bytes[*at];
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return value;
        }
        shift += 7;
    }
}

fn top(h: u64, bits: u64) -> usize {
    if bits == 0 { 0 } else { (h >> (64 - bits)) as usize }
}

// ---- Chapter 1: the data file ----

struct Meta<'a> {
    page: &'a [u8],
    sequence: u64,
    root: u64,
    records: u64,
    replay_from: u64,
    keep_from: u64,
    salt: u64,
    shm_id: u64,
    log: u64,
    file_pages: u64,
}

struct Reader {
    file: Vec<u8>,
    size: usize,
    hash_key: Vec<u8>,
    hash_mask: u64,
    uuid: Vec<u8>,
    /// Pages that were met, each once.
    met: BTreeSet<u64>,
    found: Records,
    /// Kinds of records met, and overflow pages.
    forms: [usize; 3],
    overflow_pages: usize,
    array_depth: u64,
}

impl Reader {
    fn new(path: &Path) -> Reader {
        let file = std::fs::read(path).unwrap();
        let header = &file[..4096];
        assert_eq!(header[..8], *b"ntdb\r\n\x1a\n");
        assert_eq!(num(header, 8, 4), 1, "format version");
        assert_eq!(num(header, 64, 4), 1, "id of the hash");
        assert_eq!(num(header, 124, 4), crc_of(&[&header[..124]]));
        assert!(header[72..124].iter().chain(&header[128..2048]).all(|&byte| byte == 0));
        let size = num(header, 12, 4) as usize;
        assert_eq!(header[..2048], file[3 * size..3 * size + 2048], "the copy");
        let (uuid, hash_key) = (header[16..32].to_vec(), header[32..48].to_vec());
        let hash_mask = num(header, 48, 8);
        Reader {
            size,
            hash_key,
            hash_mask,
            uuid,
            met: BTreeSet::from([0, 1, 2, 3]),
            found: Records::new(),
            forms: [0; 3],
            overflow_pages: 0,
            array_depth: 0,
            file,
        }
    }

    fn hash(&self, key: &[u8]) -> u64 {
        let high = |a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64;
        let x = sip_hash(&self.hash_key, key, [1, 3]);
        let y = x + high(x - high(x, x), 6_640_827_866_535_438_581);
        (y >> 23 << 23 | x & 0x7f_ffff) & self.hash_mask
    }

    fn page(&self, number: u64) -> &[u8] {
        &self.file[number as usize * self.size..][..self.size]
    }

    fn meet(&mut self, number: u64) {
        assert!(number > 3 && self.met.insert(number), "page {number} is met twice");
    }

    /// A page with a head; all checks that the document makes possible.
    fn headed(&mut self, number: u64, kind: u64, pages: usize) -> Vec<u8> {
        for page in number..number + pages as u64 {
            self.meet(page);
        }
        let run = self.file[number as usize * self.size..][..pages * self.size].to_vec();
        assert_eq!(num(&run, 0, 4), crc_of(&[&run[4..]]), "checksum of page {number}");
        assert_eq!(num(&run, 4, 1), kind, "kind of page {number}");
        assert_eq!(num(&run, 8, 4), number);
        assert_eq!(num(&run, 44, 4), pages as u64);
        assert!(run[48..64].iter().all(|&byte| byte == 0));
        run
    }

    fn metas(&self) -> Vec<Meta<'_>> {
        let mut metas = Vec::new();
        for number in [1, 2] {
            let page = self.page(number);
            if page[..8] != *b"ntdbmeta" {
                assert!(page.iter().all(|&byte| byte == 0), "void, or never written");
                continue;
            }
            assert_eq!(num(page, 8, 4), crc_of(&[&page[..8], &page[12..]]));
            assert_eq!(num(page, 12, 4), 0, "no log is kept");
            metas.push(Meta {
                page,
                sequence: num(page, 16, 8),
                root: num(page, 32, 8),
                records: num(page, 40, 8),
                replay_from: num(page, 48, 8),
                keep_from: num(page, 56, 8),
                salt: num(page, 64, 8),
                shm_id: num(page, 72, 8),
                log: num(page, 80, 4),
                file_pages: num(page, 84, 4),
            });
        }
        metas.sort_by_key(|meta| meta.sequence);
        metas
    }

    fn meta(&self) -> Meta<'_> {
        self.metas().pop().expect("one is valid")
    }

    /// Reads all records of the newest state, visiting every page once.
    fn read_all(&mut self) {
        let root = self.meta().root;
        let (page, depth) = (root & 0xffff_ffff, root >> 32 & 0xff);
        if root >> 40 & 1 == 0 {
            self.bucket(page, 0, None);
        } else {
            self.array_depth = depth;
            let pages = (64 + (8 << depth) as usize).div_ceil(self.size);
            let array = self.headed(page, 3, pages);
            assert_eq!(num(&array, 5, 1), depth);
            let mut index = 0;
            let mut directories = 0;
            while index < 1 << depth {
                let entry = num(&array, 64 + 8 * index, 8);
                let prefix_bits = entry >> 32 & 0xff;
                let len = 1 << (depth - prefix_bits);
                for same in index..index + len {
                    assert_eq!(num(&array, 64 + 8 * same, 8), entry);
                }
                let prefix = if depth == 0 { 0 } else { (index as u64) << (64 - depth) };
                self.directory(entry & 0xffff_ffff, prefix, prefix_bits, entry >> 40 & 0xff);
                directories += 1;
                index += len;
            }
            assert_eq!(num(&array, 40, 4), directories);
        }
        assert_eq!(self.found.len() as u64, self.meta().records);
    }

    fn directory(&mut self, number: u64, prefix: u64, prefix_bits: u64, index_bits: u64) {
        let page = self.headed(number, 2, 1);
        assert_eq!((num(&page, 5, 1), num(&page, 6, 2)), (prefix_bits, index_bits));
        assert_eq!(num(&page, 24, 8), prefix);
        assert!(index_bits <= u64::from((self.size / 8).ilog2()));
        let mut index = 0;
        while index < 1 << index_bits {
            let bucket = num(&page, 64 + 4 * index, 4);
            let depth = num(self.page(bucket), 5, 1);
            assert!(depth >= prefix_bits && depth <= prefix_bits + index_bits);
            let len = 1 << (prefix_bits + index_bits - depth);
            for same in index..index + len {
                assert_eq!(num(&page, 64 + 4 * same, 4), bucket);
            }
            let bits = prefix_bits + index_bits;
            let prefix = if bits == 0 { 0 } else { prefix | (index as u64) << (64 - bits) };
            self.bucket(bucket, prefix, Some(depth));
            index += len;
        }
    }

    fn bucket(&mut self, head: u64, prefix: u64, depth: Option<u64>) {
        let mut number = head;
        while number != 0 {
            self.overflow_pages += usize::from(number != head);
            let page = self.headed(number, 1, 1);
            let (depth_here, groups) = (num(&page, 5, 1), num(&page, 6, 2) as usize);
            assert_eq!(depth_here, depth.unwrap_or(0));
            assert_eq!(num(&page, 24, 8), prefix);
            let free = num(&page, 32, 4) as usize;
            assert!(groups > 0 && 64 + 48 * groups <= free && free <= self.size);
            for slot in 0..16 * groups {
                let tag = page[tag_at(slot)];
                if tag < 0x80 {
                    assert!(tag <= 1);
                    continue;
                }
                let at = num(&page, offset_at(slot), 2) as usize;
                assert!(at >= 64 + 48 * groups);
                let (key, value, end) = self.record(&page, at);
                assert!(end <= free);
                let hash = self.hash(&key);
                assert_eq!(u64::from(tag), 0x80 | hash & 0x7f);
                assert_eq!(top(hash, depth_here), top(prefix, depth_here), "in the wrong bucket");
                assert_eq!(search(&page, hash, |at| self.key_at(&page, at) == key), Some(slot));
                assert!(self.found.insert(key, value).is_none(), "a key is there twice");
            }
            number = num(&page, 12, 4);
        }
    }

    fn key_at(&self, page: &[u8], at: usize) -> Vec<u8> {
        let mut at = at;
        let first = varint(page, &mut at);
        varint(page, &mut at);
        let key_len = (first >> 2) as usize;
        if first & 3 == 2 {
            let start = num(page, at + 8, 4) as usize * self.size;
            self.file[start..start + key_len].to_vec()
        } else {
            page[at..at + key_len].to_vec()
        }
    }

    /// The record at `at` and where it ends.
    fn record(&mut self, page: &[u8], at: usize) -> (Vec<u8>, Vec<u8>, usize) {
        let mut at = at;
        let first = varint(page, &mut at);
        let value_len = varint(page, &mut at) as usize;
        let (key_len, form) = ((first >> 2) as usize, first & 3);
        self.forms[form as usize] += 1;
        match form {
            0 => {
                let value = at + key_len;
                let end = value + value_len;
                (page[at..value].to_vec(), page[value..end].to_vec(), end)
            }
            1 => {
                let value = self.extent(page, at + key_len, value_len);
                (page[at..at + key_len].to_vec(), value, at + key_len + 20)
            }
            2 => {
                let both = self.extent(page, at + 8, key_len + value_len);
                let (key, value) = both.split_at(key_len);
                assert_eq!(num(page, at, 8), self.hash(key));
                (key.to_vec(), value.to_vec(), at + 8 + 20)
            }
            form => panic!("a record of form {form}"),
        }
    }

    fn extent(&mut self, page: &[u8], at: usize, used: usize) -> Vec<u8> {
        let (first, pages) = (num(page, at, 4), num(page, at + 4, 4));
        assert!(used as u64 <= pages * self.size as u64);
        for number in first..first + pages {
            self.meet(number);
        }
        let bytes = self.file[first as usize * self.size..][..used].to_vec();
        assert_eq!(num(page, at + 8, 4), crc_of(&[&bytes]), "checksum of a value");
        bytes
    }

    /// Compares the free-space map with what was met.
    fn check_map(&mut self) {
        let meta = self.meta();
        let (levels, entries, file_pages) =
            (num(meta.page, 88, 4), num(meta.page, 92, 4), meta.file_pages);
        assert_eq!(levels, 0, "so small a file needs no index");
        let map_pages: Vec<u64> =
            (0..entries as usize).map(|i| num(meta.page, 1136 + 4 * i, 4)).collect();
        let per_page = (self.size as u64 - 64) * 8;
        let mut used = BTreeSet::new();
        for (group, &number) in map_pages.iter().enumerate() {
            let page = self.headed(number, 4, 1);
            assert_eq!(num(&page, 24, 8), group as u64);
            let bits =
                (0..per_page).filter(|bit| page[64 + *bit as usize / 8] >> (bit % 8) & 1 == 1);
            used.extend(bits.map(|bit| group as u64 * per_page + bit));
        }
        assert_eq!(used, self.met, "the map, and the pages that were met");
        assert!(used.last().unwrap() < &file_pages);
        assert!(self.file.len() as u64 >= file_pages * self.size as u64);
    }
}

fn tag_at(slot: usize) -> usize {
    64 + slot / 16 * 48 + slot % 16
}

fn offset_at(slot: usize) -> usize {
    64 + slot / 16 * 48 + 16 + slot % 16 * 2
}

/// The documented search in one page of a bucket.
fn search(page: &[u8], hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
    let groups = num(page, 6, 2) as usize;
    let mut group = ((hash >> 7 & 0xffff) as usize * groups) >> 16;
    for _ in 0..groups {
        for slot in 16 * group..16 * (group + 1) {
            if u64::from(page[tag_at(slot)]) == 0x80 | hash & 0x7f
                && is_it(num(page, offset_at(slot), 2) as usize)
            {
                return Some(slot);
            }
        }
        if (16 * group..16 * (group + 1)).any(|slot| page[tag_at(slot)] == 0) {
            return None;
        }
        group = (group + 1) % groups;
    }
    None
}

// ---- Chapter 2: the logs ----

struct Log {
    bytes: Vec<u8>,
    start: u64,
    salt: u64,
    previous_salt: u64,
}

impl Log {
    fn open(path: &Path, uuid: &[u8]) -> Option<Log> {
        let bytes = std::fs::read(path).ok()?;
        assert_eq!(bytes[..8], *b"NTDBLOG\0");
        assert_eq!(num(&bytes, 8, 4), 1, "format version");
        assert_eq!(num(&bytes, 12, 4), 0);
        assert_eq!(bytes[16..32], *uuid);
        assert_eq!(num(&bytes, 124, 4), crc_of(&[&bytes[..124]]));
        let (start, salt) = (num(&bytes, 32, 8), num(&bytes, 40, 8));
        assert_ne!(salt, 0);
        Some(Log { previous_salt: num(&bytes, 48, 8), bytes, start, salt })
    }

    /// The body of the record at `lsn` and the LSN behind it.
    fn record(&self, lsn: u64) -> Option<(&[u8], u64)> {
        sealed(self.bytes.get((4096 + lsn - self.start) as usize..)?, lsn, self.salt)
    }
}

fn sealed(bytes: &[u8], lsn: u64, salt: u64) -> Option<(&[u8], u64)> {
    let len = num(bytes.get(..4)?, 0, 4);
    if !(9..=262_144).contains(&len) || len as usize > bytes.len() {
        return None;
    }
    let body = &bytes[8..len as usize];
    let mut x =
        salt ^ lsn.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ len.wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^= x >> 32;
    (num(bytes, 4, 4) == crc_of(&[body]) ^ (x & 0xffff_ffff)).then_some((body, lsn + len))
}

/// What the logs make of a state.
struct Replay<'r> {
    reader: &'r Reader,
    records: Records,
    series: BTreeMap<u64, Vec<u8>>,
    kinds: BTreeSet<u8>,
}

impl Replay<'_> {
    fn run(&mut self, logs: [PathBuf; 2], meta: &Meta) -> u64 {
        let logs = logs.map(|path| Log::open(&path, &self.reader.uuid));
        let named = logs[meta.log as usize].as_ref().expect("the log that the meta page names");
        assert_eq!(named.salt, meta.salt);
        let (mut log, mut lsn) = (named, meta.keep_from);
        loop {
            while let Some((body, next)) = log.record(lsn) {
                self.apply(body, lsn, lsn >= meta.replay_from);
                lsn = next;
            }
            let next = logs.iter().flatten().find(|next| next.previous_salt == log.salt);
            match next {
                Some(next) => {
                    assert_eq!(next.start, lsn);
                    log = next;
                }
                None => return lsn,
            }
        }
    }

    fn apply(&mut self, body: &[u8], lsn: u64, counts: bool) {
        self.kinds.insert(body[0]);
        let mut at = 9;
        if body[0] == 9 {
            let first = num(body, 1, 8);
            assert!(self.series.contains_key(&first) || first == lsn);
            self.series.entry(first).or_default().extend(&body[at..]);
            return;
        }
        if body[0] == 5 {
            let first = num(body, 1, 8);
            let total = varint(body, &mut at) as usize;
            let series = self.series.entry(first).or_default();
            assert!(!series.is_empty() || first == lsn);
            series.extend(&body[at..]);
            assert!(series.len() <= total);
            return;
        }
        if !counts {
            return;
        }
        match body[0] {
            1..=4 => self.change(body),
            kind @ (6 | 7) => {
                let series = self.series.remove(&num(body, 1, 8)).expect("its chunks came before");
                assert_eq!(num(body, 9, 4), crc_of(&[&series]));
                at = 13;
                if kind == 6 {
                    let len = varint(body, &mut at) as usize;
                    let key = &body[at..];
                    let key_too = series.len() != len;
                    assert_eq!(key_too, self.has_form_2(key.len(), len));
                    let value = if key_too { &series[key.len()..] } else { &series[..] };
                    assert!(value.len() == len && (!key_too || series.starts_with(key)));
                    self.records.insert(key.to_vec(), value.to_vec());
                } else {
                    let before = varint(body, &mut at);
                    assert_eq!(varint(body, &mut at), series.len() as u64);
                    self.append(&body[at..], before, &series);
                }
            }
            8 => self.stream(&body[1..], &[]),
            10 => {
                let stream = self.series.remove(&num(body, 1, 8)).expect("its chunks came before");
                assert_eq!(num(body, 9, 4), crc_of(&[&stream]));
                at = 13;
                assert_eq!(varint(body, &mut at), stream.len() as u64);
                let mut undone = Vec::new();
                while at < body.len() {
                    let start = varint(body, &mut at) as usize;
                    undone.push(start..start + varint(body, &mut at) as usize);
                }
                self.stream(&stream, &undone);
            }
            kind => panic!("a log record of kind {kind}"),
        }
    }

    fn stream(&mut self, stream: &[u8], undone: &[std::ops::Range<usize>]) {
        let (mut at, mut undone) = (0, undone.iter());
        let mut next = undone.next();
        while at < stream.len() {
            if let Some(part) = next.filter(|part| part.start == at) {
                (at, next) = (part.end, undone.next());
                continue;
            }
            let len = varint(stream, &mut at) as usize;
            self.change(&stream[at..at + len]);
            at += len;
            assert!(next.is_none_or(|part| part.start >= at));
        }
        assert!(at == stream.len() && next.is_none());
    }

    /// One of the operations that say everything themselves.
    fn change(&mut self, body: &[u8]) {
        let mut at = 1;
        match body[0] {
            1 => {
                let len = varint(body, &mut at) as usize;
                let (key, value) = body[at..].split_at(len);
                self.records.insert(key.to_vec(), value.to_vec());
            }
            2 => assert!(self.records.remove(&body[1..]).is_some()),
            3 => {
                let len = varint(body, &mut at) as usize;
                let before = varint(body, &mut at);
                let (key, bytes) = body[at..].split_at(len);
                self.append(key, before, bytes);
            }
            4 => self.records.clear(),
            kind => panic!("an operation of kind {kind}"),
        }
    }

    fn append(&mut self, key: &[u8], before: u64, bytes: &[u8]) {
        let value = self.records.entry(key.to_vec()).or_default();
        assert_eq!(value.len() as u64, before);
        value.extend(bytes);
    }

    /// Whether a new record of these lengths is a long-key record (1.6), given that it is not inline.
    fn has_form_2(&self, key_len: usize, value_len: usize) -> bool {
        let varint_len = |n: usize| (1..).find(|&bytes| n >> (7 * bytes) == 0).unwrap();
        let len = varint_len(key_len * 4 + 1) + varint_len(value_len) + key_len + 20;
        len > (self.reader.size - 64) / 4
    }
}

// ---- The tests ----

fn value(i: u32) -> Vec<u8> {
    i.to_be_bytes().repeat(i as usize % 11 + 1)
}

/// Puts, deletes and appends records of all forms; returns what is there afterwards.
fn fill(db: &Db, small: u32) -> Records {
    let mut expected = Records::new();
    let mut put = |key: Vec<u8>, value: Vec<u8>| {
        db.put(&key, &value).unwrap();
        expected.insert(key, value);
    };
    put(Vec::new(), b"the empty key".to_vec());
    put(b"an empty value".to_vec(), Vec::new());
    for i in 0..small {
        put(i.to_le_bytes().to_vec(), value(i));
    }
    for i in 0..40u32 {
        // Around the border between inline and long, for every page size.
        for base in [900, 1000, 4000, 16_300] {
            put(format!("border {base} {i}").into_bytes(), vec![i as u8; base + i as usize]);
        }
        put(format!("long value {i}").into_bytes(), vec![i as u8; 20_000 + 997 * i as usize]);
        put([&i.to_le_bytes()[..], &[7; 16_500]].concat(), vec![i as u8; 10 * i as usize]);
    }
    put(b"huge".to_vec(), vec![8; 700_000]);
    put(vec![9; 40_000], vec![9; 500_000]);
    let mut append = |key: &[u8], bytes: &[u8]| {
        db.append(key, bytes).unwrap();
        expected.entry(key.to_vec()).or_default().extend(bytes);
    };
    append(b"grows", b"from nothing");
    for i in 0..200u32 {
        append(b"grows", &[i as u8; 300]);
        append(b"long value 3", b", and more");
    }
    append(b"huge", &[1; 400_000]);
    append(&[&5u32.to_le_bytes()[..], &[7; 16_500]].concat(), b"a long key's value");
    for i in (0..small).step_by(3) {
        assert!(db.delete(&i.to_le_bytes()).unwrap());
        expected.remove(&i.to_le_bytes()[..]);
    }
    expected
}

#[test]
fn a_database_at_rest_is_read_by_the_document() {
    for (page_size, small) in [(4096, 90_000), (8192, 20_000), (16384, 3000), (65536, 20_000)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.ntdb");
        let db = Options::new().create(true).page_size(page_size).open(&path).unwrap();
        let expected = fill(&db, small);
        db.close().unwrap();
        let mut reader = Reader::new(&path);
        assert_eq!(reader.size, page_size as usize);
        reader.read_all();
        assert!(reader.found == expected, "the records differ");
        reader.check_map();
        assert!(reader.forms.iter().all(|&n| n > 0), "records of all forms: {:?}", reader.forms);
        assert!(page_size > 4096 || reader.array_depth > 0, "more than one directory");
        let meta = reader.meta();
        assert_eq!((meta.salt, meta.shm_id, num(meta.page, 100, 2)), (0, 0, 0), "at rest");
        let metas = reader.metas();
        assert_eq!(metas.len(), 2);
        assert!(metas[0].page == metas[1].page, "at rest both meta pages are the same");
        assert!(reader.file[2048..4096].iter().all(|&byte| byte == 0), "no attach record");
    }
}

#[test]
fn a_new_database_has_six_pages() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    Options::new().create(true).reserve_percent(7).open(&path).unwrap().close().unwrap();
    let mut reader = Reader::new(&path);
    assert_eq!(reader.file.len(), 6 * 4096);
    assert_eq!(num(&reader.file, 68, 4), 7);
    reader.read_all();
    reader.check_map();
    assert_eq!(reader.met, (0..6).collect());
    assert_eq!(reader.meta().root, 5);
}

#[test]
fn overflow_chains_are_read_by_the_document() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ntdb");
    let db = Options::new().create(true).hash_mask(0xffff).open(&path).unwrap();
    let expected = fill(&db, 2000);
    db.close().unwrap();
    let mut reader = Reader::new(&path);
    reader.read_all();
    assert!(reader.found == expected);
    assert!(reader.overflow_pages > 0);
    reader.check_map();
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[test]
fn a_database_in_use_is_read_by_the_document() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join("a.ntdb");
    let db = Db::create(&path).unwrap();
    for i in 0..1000u32 {
        db.put(&i.to_be_bytes(), b"to be cleared").unwrap();
    }
    db.sync().unwrap();
    db.clear().unwrap();
    let mut expected = fill(&db, 3000);
    // A state in the middle, so that both logs have a part.
    db.checkpoint().unwrap();
    db.put(b"after the checkpoint", b"1").unwrap();
    expected.insert(b"after the checkpoint".to_vec(), b"1".to_vec());
    db.sync().unwrap();

    let logs = || [with_suffix(&path, "-log0"), with_suffix(&path, "-log1")];
    let follow = |kinds: &[u8], expected: &Records| {
        let mut reader = Reader::new(&path);
        reader.read_all();
        let mut replay = Replay {
            records: reader.found.clone(),
            reader: &reader,
            series: BTreeMap::new(),
            kinds: BTreeSet::new(),
        };
        let end = replay.run(logs(), &reader.meta());
        assert!(replay.records == *expected, "the records differ");
        for kind in kinds {
            assert!(replay.kinds.contains(kind), "no record of kind {kind}");
        }
        end
    };
    let end = follow(&[1], &expected);
    assert_eq!(end, db.change_counter().unwrap());
    assert!(logs().iter().all(|path| path.exists()), "the checkpoint has switched logs");

    // Everything once more, behind the checkpoint.
    db.clear().unwrap();
    let mut expected = fill(&db, 3000);
    db.sync().unwrap();
    let end = follow(&[1, 2, 3, 4, 5, 6, 7], &expected);
    assert_eq!(end, db.change_counter().unwrap());

    // A change that is in the ring only.
    db.put(b"not flushed", b"yet").unwrap();
    expected.insert(b"not flushed".to_vec(), b"yet".to_vec());
    let reader = Reader::new(&path);
    let meta = reader.meta();
    let shm = std::fs::read(with_suffix(&path, "-shm")).unwrap();
    let data = std::fs::metadata(&path).unwrap();
    assert_eq!(shm[..8], *b"ntdbshm\n");
    assert_eq!(num(&shm, 8, 4), 1, "layout version");
    assert_eq!(num(&shm, 16, 8), meta.shm_id);
    assert_eq!(shm[24..40], reader.uuid);
    assert_eq!((num(&shm, 56, 8), num(&shm, 64, 8)), (data.dev(), data.ino()));
    assert_eq!(num(&shm, 96, 4), crc_of(&[&shm[..96]]));
    let stat = db.stat().unwrap();
    let tail = num(&shm, 4288, 8);
    assert_eq!(tail, stat.change_counter);
    assert_eq!(num(&shm, 4296, 8), tail, "applied");
    assert_eq!(num(&shm, 4304, 8), expected.len() as u64);
    assert_eq!(num(&shm, 4312, 8), stat.epoch);
    assert_eq!(num(&shm, 4104, 4) * 4096, stat.file_bytes);
    assert_eq!(num(&shm, 4108, 4), 0, "no failed sync");
    assert_eq!(num(&shm, 4344, 8) * 4096, stat.free_bytes);
    let root = num(&shm, 4096, 8);
    assert_eq!(root >> 40 & 1, 1);
    assert_eq!(reader.page(root & 0xffff_ffff)[4], 3, "the root word names a root array");
    assert_eq!((num(&shm, 4864, 8), num(&shm, 4872, 8)), (end, end), "written, synced");
    assert_eq!(num(&shm, 4884, 4), 1, "a log exists");
    let index = num(&shm, 4892, 4) as usize;
    let log = Log::open(&logs()[index], &reader.uuid).unwrap();
    assert_eq!((num(&shm, 4904, 8), num(&shm, 4912, 8)), (log.start, log.salt));
    let room = num(&shm, 4920, 8);
    assert!(room > log.start && room <= log.start + log.bytes.len() as u64 - 4096, "allocated");
    assert_eq!(num(&shm, 4928, 8), u64::MAX, "no switch is due");
    assert_eq!(num(&shm, 5248, 4), 0, "no checkpoint runs");
    assert_eq!(num(&shm, 5256, 8), meta.sequence);
    assert_eq!(num(&shm, 5280, 8), meta.replay_from);
    assert_eq!(num(&shm, 5292, 4), stat.checkpoints);
    assert_eq!(num(&shm, 4352, 4), 0, "the note is idle");
    assert_eq!(num(&shm, 12288, 4), 1, "slot 0 is attached");
    assert_eq!(num(&shm, 12288 + 4, 4), u64::from(std::process::id()));
    assert_eq!(num(&shm, 77824 + 8, 4), 1, "the first pin is slot 0's");
    let salt = num(&shm, if end >= num(&shm, 4328, 8) { 4320 } else { 4336 }, 8);
    let ring = &shm[458_752..458_752 + (1 << 20)];
    let record: Vec<u8> = (end..tail).map(|lsn| ring[lsn as usize % (1 << 20)]).collect();
    let (body, next) = sealed(&record, end, salt).expect("the ring has the record");
    assert_eq!((body, next), (&b"\x01\x0bnot flushedyet"[..], tail));
    // The bits of used pages: chunk 0 of the array, whose offset is its first word.
    let used = num(&shm, 9664, 8) as usize;
    assert!(used >= 1_572_864);
    assert_eq!(shm[used] & 0xf, 0xf, "the header and the metas are used");
    // What is summed up of the first group, if it is: the free pages are at most all.
    let groups = num(&shm, 11_520, 8) as usize;
    assert!(groups >= 1_572_864);
    let summary = num(&shm, groups, 8);
    let (free, longest) = (summary & 0x1fff, summary >> 39 & 0x1fff);
    assert!(summary == 0 || summary >> 63 == 1 && longest <= free && free <= 1024);
    assert_eq!(num(&shm, 9520, 8), 0, "no cleared tree is being given up");

    // A snapshot, of a state that nobody has frozen yet, and another of the next one.
    assert_eq!(num(&shm, 11_840 + 240, 8), 0, "no entry yet");
    let snapshot = db.snapshot().unwrap();
    db.put(b"between", b"them").unwrap();
    let later = db.snapshot().unwrap();
    drop(snapshot);
    let shm = std::fs::read(with_suffix(&path, "-shm")).unwrap();
    assert_eq!(num(&shm, 11_840 + 240, 8), 2, "entries");
    let entry = num(&shm, 11_840, 8) as usize;
    assert_eq!(num(&shm, entry, 8), 0, "released");
    let entry = entry + 64;
    assert_eq!(num(&shm, entry, 2), 1, "slot 0 holds it");
    assert_eq!(num(&shm, entry, 8) >> 16, 3, "each counts before and after");
    assert_eq!(num(&shm, entry + 8, 8), stat.epoch + 1);
    assert_eq!(num(&shm, 4312, 8), stat.epoch + 2, "another epoch began with each");
    assert_eq!(num(&shm, entry + 16, 8), num(&shm, 4096, 8), "its root is still the present one");
    assert_eq!(num(&shm, entry + 24, 8), num(&shm, 4288, 8), "so is the tail");
    assert_eq!(num(&shm, entry + 24, 8), later.change_counter());
    let since = Duration::from_millis(num(&shm, entry + 32, 8));
    assert!(SystemTime::now().duration_since(UNIX_EPOCH + since).unwrap().as_secs() < 60);
    assert_eq!(num(&shm, 11_776, 8), 5, "two came, one went");
    assert_eq!(num(&shm, 11_792, 8), 1, "registered last");
    drop(later);
    assert!(db.delete(b"between").unwrap());

    // For those who follow the changes.
    let here = num(&shm, 12_096, 8);
    assert!(here <= meta.replay_from, "the ring has what was logged since this opening");
    assert_eq!((num(&shm, 4112, 4), num(&shm, 12_104, 8)), (0, 0), "nobody has slept");
    assert_eq!(num(&shm, 12_116, 4), 0, "no log is kept");

    // The reserve, and which ways updates went.
    assert_eq!(num(&shm, 4116, 4), u64::from(stat.reserve_percent));
    let updates = stat.updates;
    let counted = [4400, 12_160, 12_168, 12_176, 12_184].map(|at| num(&shm, at, 8));
    let ways = [updates.stayed, updates.copied, updates.compacted, updates.split, updates.moved];
    assert_eq!(counted, ways);
    assert!(updates.all() > 0);

    // A held key lock.
    let stripe = |key: &[u8]| 339_968 + 16 * (reader.hash(key) >> 23 & 4095) as usize;
    let guard = db.lock(b"locked").unwrap();
    let shm = std::fs::read(with_suffix(&path, "-shm")).unwrap();
    assert_eq!(num(&shm, stripe(b"locked"), 2), 1, "slot 0 holds it");
    assert_eq!(num(&shm, stripe(b"locked") + 8, 4), 1, "once");
    drop(guard);

    // The attach record, and the bytes that say who lives.
    let record = &reader.file[2048..4096];
    assert_eq!(record[..8], *b"ntdbatt\n");
    assert_eq!(num(record, 8, 8), meta.shm_id);
    assert_eq!(record[16..32], shm[40..56], "the boot");
    assert_eq!(num(record, 32, 4), crc_of(&[&record[..32], &record[36..]]));
    let base = path.as_os_str().as_encoded_bytes();
    assert_eq!(num(record, 36, 4), base.len() as u64);
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((num(record, 40, 8), num(record, 48, 8)), (metadata.dev(), metadata.ino()));
    assert_eq!(num(record, 56, 4), 0, "beside the data file");
    assert_eq!(record[64..64 + base.len()], *base);
    assert!(record[64 + base.len()..].iter().all(|&byte| byte == 0));
    assert_eq!(num(meta.page, 100, 2), base.len() as u64);
    assert_eq!(meta.page[104..104 + base.len()], *base);
    assert!(is_locked(&path, (1 << 62) + 4096), "slot 0 lives");
    assert!(!is_locked(&path, (1 << 62) + 4097));
    assert!(!is_locked(&path, 1 << 62), "nobody attaches");
    db.close().unwrap();
    assert!(!is_locked(&path, (1 << 62) + 4096));
    let mut reader = Reader::new(&path);
    reader.read_all();
    assert!(reader.found == expected);
}

/// A record as the document has it.
fn seal(body: &[u8], lsn: u64, salt: u64) -> Vec<u8> {
    let len = 8 + body.len() as u64;
    let mut x =
        salt ^ lsn.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ len.wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^= x >> 32;
    let check = crc_of(&[body]) as u32 ^ x as u32;
    [&(len as u32).to_le_bytes()[..], &check.to_le_bytes(), body].concat()
}

fn varint_bytes(mut n: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while n > 127 {
        bytes.push(n as u8 | 128);
        n >>= 7;
    }
    bytes.push(n as u8);
    bytes
}

/// Transactions that were written from the document are for the engine what they are for the document.
#[test]
fn transactions_are_what_the_document_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join("a.ntdb");
    let db = Db::create(&path).unwrap();
    let mut expected = fill(&db, 300);
    db.sync().unwrap();
    let logs = [with_suffix(&path, "-log0"), with_suffix(&path, "-log1")];
    let mut data = std::fs::read(&path).unwrap();
    let log = std::fs::read(&logs[0]).unwrap();
    db.close().unwrap();
    // As a power cut leaves it: without the shared memory, and an attach record of another boot says no more than none.
    data[2048..4096].fill(0);
    std::fs::write(&path, data).unwrap();
    let mut log =
        Log { start: num(&log, 32, 8), salt: num(&log, 40, 8), bytes: log, previous_salt: 0 };
    let mut end = log.start;
    while let Some((_, next)) = log.record(end) {
        end = next;
    }
    log.bytes.truncate((4096 + end - log.start) as usize);

    let stream_of = |bodies: &[Vec<u8>]| -> Vec<u8> {
        let one = |body: &Vec<u8>| [&varint_bytes(body.len() as u64)[..], body].concat();
        bodies.iter().flat_map(one).collect()
    };
    let put =
        |key: &[u8], value: &[u8]| [&[1][..], &varint_bytes(key.len() as u64), key, value].concat();
    let append = |key: &[u8], before: u64, bytes: &[u8]| {
        let lengths = [varint_bytes(key.len() as u64), varint_bytes(before)].concat();
        [&[3][..], &lengths, key, bytes].concat()
    };
    let mut push = |body: &[u8]| {
        let lsn = log.start + log.bytes.len() as u64 - 4096;
        let body = match body {
            // The first chunk names itself.
            [9, 0, 0, 0, 0, 0, 0, 0, 0, rest @ ..] => [&[9], &lsn.to_le_bytes()[..], rest].concat(),
            body => body.to_vec(),
        };
        log.bytes.extend(seal(&body, lsn, log.salt));
        lsn
    };
    // Kind 8.
    let mut grown = expected[&b"grows"[..]].clone();
    let before = grown.len() as u64;
    push(
        &[
            &[8][..],
            &stream_of(&[
                put(b"in one record", b"1"),
                append(b"grows", before, b"by a transaction"),
                b"\x02an empty value".to_vec(),
            ]),
        ]
        .concat(),
    );
    expected.insert(b"in one record".to_vec(), b"1".to_vec());
    grown.extend(b"by a transaction");
    expected.insert(b"grows".to_vec(), grown);
    expected.remove(&b"an empty value"[..]).unwrap();
    // Kinds 9 and 10, with everything that a stream may have.
    let value: Vec<u8> = (0..900_000u32).map(|n| (n % 241) as u8).collect();
    let long_key = vec![6; 20_000];
    let parts = [
        stream_of(&[put(b"undone", b"at the beginning")]),
        stream_of(&[vec![4], put(b"long", &value), put(&long_key, &value[1..])]),
        stream_of(&[vec![4]]),
        stream_of(&[append(b"long", 900_000, &value[..500_000]), put(b"gone", b"")]),
        stream_of(&[b"\x02gone".to_vec(), put(b"short", b"2")]),
        // A beginning of an operation.
        stream_of(&[put(b"undone", &value)])[..1000].to_vec(),
    ];
    let stream = parts.concat();
    let mut undone = Vec::new();
    for part in [0, 2, 5] {
        let start: usize = parts[..part].iter().map(Vec::len).sum();
        undone.extend(varint_bytes(start as u64));
        undone.extend(varint_bytes(parts[part].len() as u64));
    }
    let mut first = 0u64;
    for chunk in stream.chunks(131_000) {
        let lsn = push(&[&[9][..], &first.to_le_bytes(), chunk].concat());
        first = if first == 0 { lsn } else { first };
        push(&put(b"of another", b"3"));
    }
    let crc = (crc_of(&[&stream]) as u32).to_le_bytes();
    let total = varint_bytes(stream.len() as u64);
    push(&[&[10][..], &first.to_le_bytes(), &crc, &total, &undone].concat());
    expected.clear();
    expected.insert(b"long".to_vec(), [&value[..], &value[..500_000]].concat());
    expected.insert(long_key, value[1..].to_vec());
    expected.insert(b"short".to_vec(), b"2".to_vec());
    // Never committed.
    push(&[&[9][..], &[0; 8], &stream[..100_000]].concat());
    push(&put(b"behind", b"4"));
    expected.insert(b"behind".to_vec(), b"4".to_vec());
    std::fs::write(&logs[0], &log.bytes).unwrap();

    let mut reader = Reader::new(&path);
    reader.read_all();
    let mut replay = Replay {
        records: reader.found.clone(),
        reader: &reader,
        series: BTreeMap::new(),
        kinds: BTreeSet::new(),
    };
    assert_eq!(replay.run(logs, &reader.meta()), log.start + log.bytes.len() as u64 - 4096);
    assert!(replay.records == expected, "the document's reader");
    assert!([8, 9, 10].iter().all(|kind| replay.kinds.contains(kind)));
    let db = Db::open(&path).unwrap();
    let found: Records = db.iter().map(|record| record.unwrap()).collect();
    assert!(found == expected, "the engine");
    assert!(db.check().unwrap().is_clean());
}

fn is_locked(path: &Path, byte: i64) -> bool {
    use std::os::fd::AsRawFd;
    let file = std::fs::File::open(path).unwrap();
    // SAFETY: all zeros is a valid `flock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_start = byte;
    lock.l_len = 1;
    // SAFETY: the descriptor is open, the structure valid; the call only asks.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    assert_eq!(result, 0);
    lock.l_type != libc::F_UNLCK as libc::c_short
}
