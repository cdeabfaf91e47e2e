//! What lies in undamaged pages comes back, whatever else is damaged, and nothing is invented.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ntdb::{Db, Error, Options, SalvageReport};
use ntdb_testkit::lab::{self, TempDir};
use ntdb_testkit::rng::Rng;

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

/// A database at rest and what it holds now and ever held.
struct Original {
    dir: TempDir,
    bytes: Vec<u8>,
    records: Records,
    /// Every value that a key ever had.
    history: BTreeMap<Vec<u8>, BTreeSet<Vec<u8>>>,
}

impl Original {
    /// Stored in several rounds with checkpoints between, so that old copies of pages lie about: records of all forms,
    /// some replaced, some deleted.
    fn new(page_size: u32, hash_mask: u64) -> Original {
        let dir = TempDir::new();
        let path = dir.path().join("original.ntdb");
        let mut options = Options::new();
        options.create(true).page_size(page_size).hash_mask(hash_mask);
        let db = options.open(&path).expect("create");
        let mut rng = Rng::new(u64::from(page_size) ^ hash_mask);
        let mut original =
            Original { dir, bytes: Vec::new(), records: Records::new(), history: BTreeMap::new() };
        let count = if hash_mask == u64::MAX { 4_000 } else { 300 };
        for round in 0..4u64 {
            for n in 0..count {
                let key = format!("key-{n}").into_bytes();
                match rng.below(10) {
                    0..3 if round > 0 => continue,
                    3 if round > 0 => {
                        db.delete(&key).expect("delete");
                        original.records.remove(&key);
                    }
                    _ => {
                        let len = match n % 97 {
                            0 => rng.below(20_000),
                            _ => rng.below(150),
                        };
                        let value = rng.bytes(len as usize);
                        db.put(&key, &value).expect("put");
                        original.note(key, value);
                    }
                }
            }
            // A key that lies in an extent itself.
            let key = [b"long".repeat(1_000), round.to_le_bytes().to_vec()].concat();
            let value = rng.bytes(300_000);
            db.put(&key, &value).expect("put");
            original.note(key, value);
            db.checkpoint().expect("checkpoint");
        }
        db.close().expect("close");
        original.bytes = std::fs::read(&path).expect("read");
        original
    }

    fn note(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.history.entry(key.clone()).or_default().insert(value.clone());
        self.records.insert(key, value);
    }

    fn page_size(&self) -> usize {
        u32::from_le_bytes(self.bytes[12..16].try_into().expect("four bytes")) as usize
    }

    /// Pages of a kind that the present state uses, going by the map.
    fn pages(&self, kind: u8) -> Vec<usize> {
        let size = self.page_size();
        let map = self.map_page();
        let is_used = |page: usize| self.bytes[map * size + 64 + page / 8] >> (page % 8) & 1 == 1;
        (4..self.bytes.len() / size)
            .filter(|&page| {
                let head = &self.bytes[page * size..];
                is_used(page)
                    && head[4] == kind
                    && u32::from_le_bytes(head[8..12].try_into().expect("four bytes"))
                        == page as u32
                    && crc32c::crc32c(&head[4..size]).to_le_bytes() == head[..4]
            })
            .collect()
    }

    fn map_page(&self) -> usize {
        let at = self.page_size() + 1136;
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().expect("four bytes")) as usize
    }

    /// Pages of the root array.
    fn array(&self) -> std::ops::Range<usize> {
        let at = self.page_size() + 32;
        let word = u64::from_le_bytes(self.bytes[at..at + 8].try_into().expect("eight bytes"));
        assert!(word >> 40 & 1 == 1, "there is a root array");
        let pages = (64 + (8usize << (word >> 32 & 0xFF))).div_ceil(self.page_size());
        word as u32 as usize..word as u32 as usize + pages
    }

    /// Salvages `bytes`; demands that nothing is invented. Returns what came back.
    fn salvage(&self, bytes: &[u8], what: &str) -> (Records, SalvageReport) {
        let (path, to) = (self.dir.path().join("damaged.ntdb"), self.dir.path().join("new.ntdb"));
        std::fs::write(&path, bytes).expect("write");
        let _ = std::fs::remove_file(&to);
        let report = ntdb::salvage(&path, &to, |_| {}).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(std::fs::read(&path).expect("read") == bytes, "{what}: the source was changed");
        let found = contents(&to, what);
        assert_eq!(found.len() as u64, report.records, "{what}");
        for (key, value) in &found {
            let had = self.history.get(key).is_some_and(|values| values.contains(value));
            assert!(had, "{what}: invented {:?}", String::from_utf8_lossy(key));
        }
        if report.uncertain_records == 0 {
            for (key, value) in &found {
                assert_eq!(self.records.get(key), Some(value), "{what}: an old value");
            }
        }
        if report.is_complete() {
            assert!(found == self.records, "{what}: not everything came back, and no word of it");
        }
        (found, report)
    }

    /// Everything comes back.
    fn demand_all(&self, bytes: &[u8], what: &str) -> SalvageReport {
        let (found, report) = self.salvage(bytes, what);
        let lost: Vec<_> = self.records.keys().filter(|key| !found.contains_key(*key)).collect();
        assert!(lost.is_empty(), "{what}: {} lost: {report:?}", lost.len());
        for (key, value) in &self.records {
            assert_eq!(found.get(key), Some(value), "{what}: {report:?}");
        }
        report
    }
}

fn contents(path: &Path, what: &str) -> Records {
    let db = Options::new().read_only(true).open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
    lab::demand_clean(&db, what);
    db.iter().map(|record| record.expect("iterate")).collect()
}

/// Spoils some bytes of a page.
fn spoil(bytes: &mut [u8], page: usize, size: usize, rng: &mut Rng) {
    for _ in 0..4 {
        let at = page * size + rng.below(size as u64) as usize;
        if at < bytes.len() {
            bytes[at] ^= rng.range(1, 255) as u8;
        }
    }
}

fn originals() -> Vec<Original> {
    vec![
        Original::new(4096, u64::MAX),
        Original::new(16_384, u64::MAX),
        Original::new(4096, 0xFF << 56),
    ]
}

#[test]
fn what_is_whole_is_copied_whole() {
    for original in originals() {
        let report = original.demand_all(&original.bytes, "whole");
        assert!(report.is_complete(), "{report:?}");
        assert_eq!((report.damaged_pages, report.uncertain_records, report.lost_values), (0, 0, 0));
    }
    // One bucket only, and none of it.
    for count in [0, 1, 20] {
        let dir = TempDir::new();
        let (path, to) = (dir.path().join("a"), dir.path().join("b"));
        let db = Db::create(&path).expect("create");
        for n in 0..count {
            db.put(&[n], b"value").expect("put");
        }
        db.close().expect("close");
        let report = ntdb::salvage(&path, &to, |_| {}).expect("salvage");
        assert!(report.is_complete() && report.records == u64::from(count), "{report:?}");
    }
}

#[test]
fn a_damaged_bucket_loses_its_own_records_only() {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    for original in originals() {
        let buckets = original.pages(1);
        assert!(buckets.len() > 5, "{} buckets", buckets.len());
        for _ in 0..20 {
            let page = *rng.pick(&buckets);
            let mut bytes = original.bytes.clone();
            spoil(&mut bytes, page, original.page_size(), &mut rng);
            let (found, report) = original.salvage(&bytes, "a bucket");
            assert!(!report.is_complete(), "{report:?}");
            assert_eq!(report.uncertain_records, 0, "{report:?}");
            let told = format!("page {page}: ");
            assert!(report.problems.iter().any(|text| text.starts_with(&told)), "{report:?}");
            // Equal hashes: the rest of the chain hangs on the damaged page.
            let lost = original.records.len() - found.len();
            let most = if original.bytes[48..56] == [0xFF; 8] { 200 } else { 320 };
            assert!(lost <= most, "{lost} lost with page {page}");
        }
    }
}

#[test]
fn without_directories_root_map_or_meta_pages_everything_comes_back() {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    for original in originals() {
        let size = original.page_size();
        let directories = original.pages(2);
        let has_tree = !directories.is_empty();
        if has_tree {
            let mut bytes = original.bytes.clone();
            spoil(&mut bytes, *rng.pick(&directories), size, &mut rng);
            let report = original.demand_all(&bytes, "a directory");
            assert!(!report.is_complete() && report.uncertain_records == 0, "{report:?}");
            for &page in &directories {
                spoil(&mut bytes, page, size, &mut rng);
            }
            let report = original.demand_all(&bytes, "all directories");
            assert_eq!(report.uncertain_records, 0, "{report:?}");
            let mut bytes = original.bytes.clone();
            for page in original.array() {
                spoil(&mut bytes, page, size, &mut rng);
            }
            let report = original.demand_all(&bytes, "the root array");
            assert_eq!(report.uncertain_records, 0, "{report:?}");
            // Without the map, old copies of pages and deleted records may come back; the present ones must.
            spoil(&mut bytes, original.map_page(), size, &mut rng);
            let report = original.demand_all(&bytes, "the root array and the map");
            assert!(report.uncertain_records > 0, "{report:?}");
        }
        let mut bytes = original.bytes.clone();
        spoil(&mut bytes, original.map_page(), size, &mut rng);
        let report = original.demand_all(&bytes, "the map");
        assert_eq!(report.uncertain_records, 0, "{report:?}");
        for page in [1, 2] {
            let mut bytes = original.bytes.clone();
            spoil(&mut bytes, page, size, &mut rng);
            let report = original.demand_all(&bytes, "one meta page");
            assert!(report.uncertain_records == 0 && !report.is_complete(), "{report:?}");
        }
        let mut bytes = original.bytes.clone();
        spoil(&mut bytes, 1, size, &mut rng);
        spoil(&mut bytes, 2, size, &mut rng);
        original.demand_all(&bytes, "both meta pages");
        for pages in [&[0usize][..], &[3], &[0, 3]] {
            let mut bytes = original.bytes.clone();
            for page in pages {
                bytes[page * size..page * size + 128].fill(0x5A);
            }
            let report = original.demand_all(&bytes, "headers");
            assert_eq!(report.damaged_pages, pages.len() as u64, "{report:?}");
        }
        let mut bytes = original.bytes.clone();
        bytes[..4 * size].fill(0x5A);
        original.demand_all(&bytes, "headers and meta pages");
    }
}

#[test]
fn damaged_values_lose_no_others() {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let original = Original::new(4096, u64::MAX);
    // A long value lies in pages of its own, which have no head.
    let (key, value) = original.records.iter().max_by_key(|(_, value)| value.len()).expect("some");
    let at = original.bytes.windows(64).position(|bytes| bytes == &value[value.len() - 64..]);
    let at = at.expect("its last bytes");
    for _ in 0..10 {
        let mut bytes = original.bytes.clone();
        bytes[at - rng.below(200_000) as usize] ^= 0x10;
        let (found, report) = original.salvage(&bytes, "a value");
        assert_eq!(report.lost_values, 1, "{report:?}");
        assert_eq!(found.len(), original.records.len() - 1);
        assert!(!found.contains_key(key));
    }
}

#[test]
fn what_lies_before_a_cut_comes_back() {
    for original in originals() {
        let buckets = original.pages(1);
        let size = original.page_size();
        let pages = original.bytes.len() / size;
        for keep in [pages - 1, pages * 3 / 4, pages / 2, pages / 4, 5] {
            for extra in [0, size / 2] {
                let bytes = &original.bytes[..keep * size + extra];
                let what = format!("cut to {keep} pages and {extra} bytes");
                let (found, report) = original.salvage(bytes, &what);
                assert!(!report.is_complete(), "{what}: {report:?}");
                let left = buckets.iter().filter(|&&page| page < keep).count();
                if left > 2 {
                    assert!(!found.is_empty(), "{what}: {left} buckets are left: {report:?}");
                }
            }
        }
    }
}

#[test]
fn random_damage_invents_nothing_and_loses_in_proportion() {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    for original in originals() {
        let rounds = lab::number("NTDB_TEST_SALVAGES", 60);
        let size = original.page_size();
        let pages = original.bytes.len() / size;
        for round in 0..rounds {
            let mut bytes = original.bytes.clone();
            let most = 1 << rng.below(7);
            let damages = 1 + rng.below(most);
            for _ in 0..damages {
                let page = rng.below(pages as u64) as usize;
                match rng.below(3) {
                    0 => spoil(&mut bytes, page, size, &mut rng),
                    1 => bytes[page * size..(page + 1) * size].fill(0),
                    _ => {
                        // Another page in its place, as a disk may write it.
                        let other = rng.below(pages as u64) as usize;
                        bytes.copy_within(other * size..(other + 1) * size, page * size);
                    }
                }
            }
            let what = format!("seed {seed}, round {round}, {damages} damages");
            let (found, report) = original.salvage(&bytes, &what);
            let lost = original.records.len() - found.len().min(original.records.len());
            let per_page = if original.bytes[48..56] == [0xFF; 8] { 200 } else { 320 };
            assert!(lost as u64 <= damages * per_page, "{what}: {lost} lost: {report:?}");
        }
    }
}

/// What users killed at once leave: logs, and records that only the ring has.
fn crashed(dir: &Path, shm_dir: Option<PathBuf>) -> (PathBuf, Records) {
    let path = dir.join("crashed.ntdb");
    let mut rng = Rng::new(5);
    let mut records = Records::new();
    let mut ops: Vec<(Vec<u8>, Option<Vec<u8>>)> = Vec::new();
    for n in 0..3_000u32 {
        let key = format!("key-{}", n % 1_700).into_bytes();
        let len = if n % 301 == 0 { 400_000 } else { rng.below(120) };
        let value = (n % 11 != 5).then(|| rng.bytes(len as usize));
        match &value {
            Some(value) => drop(records.insert(key.clone(), value.clone())),
            None => drop(records.remove(&key)),
        }
        ops.push((key, value));
    }
    // SAFETY: the child does its work and leaves without the parent's handlers.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let db = Options::new().create(true).shm_dir(shm_dir).open(&path).expect("create");
        for (n, (key, value)) in ops.iter().enumerate() {
            match value {
                Some(value) => {
                    let (head, tail) = value.split_at(value.len() / 2);
                    db.put(key, head).expect("put");
                    db.append(key, tail).expect("append");
                }
                None => drop(db.delete(key).expect("delete")),
            }
            if n == 1_000 {
                db.checkpoint().expect("checkpoint");
            }
            if n == 2_500 {
                db.sync().expect("sync");
            }
        }
        // SAFETY: leaves at once.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    (path, records)
}

#[test]
fn logs_and_what_the_killed_left_in_memory_are_read() {
    let dir = TempDir::new();
    let shm = dir.path().join("shm");
    std::fs::create_dir(&shm).expect("folder");
    for shm_dir in [None, Some(shm)] {
        let (path, records) = crashed(dir.path(), shm_dir.clone());
        let to = dir.path().join("new.ntdb");
        let report = ntdb::salvage(&path, &to, |_| {}).expect("salvage");
        assert!(report.is_complete() && report.log_records > 500, "{report:?}");
        assert!(contents(&to, "crashed") == records);
        std::fs::remove_file(&to).expect("remove");
        // Without the memory: what was synced, and a word of the rest.
        let memory = shm_dir.as_deref().unwrap_or(dir.path()).join("crashed.ntdb-shm");
        let aside = dir.path().join("aside");
        std::fs::rename(&memory, &aside).expect("rename");
        let report = ntdb::salvage(&path, &to, |_| {}).expect("salvage");
        assert!(!report.is_complete(), "{report:?}");
        assert!(report.problems.iter().any(|text| text.contains("-shm")), "{report:?}");
        assert!(contents(&to, "no memory").len() > 1_000);
        std::fs::remove_file(&to).expect("remove");
        std::fs::rename(&aside, &memory).expect("rename");
        // The database itself is as good as before.
        let db = Db::open(&path).expect("open");
        let found: Records = db.iter().map(|record| record.expect("iterate")).collect();
        assert!(found == records);
        db.close().expect("close");
        std::fs::remove_file(&path).expect("remove");
    }
}

#[test]
fn what_is_in_use_absent_or_no_database_is_refused_and_nothing_is_left() {
    let dir = TempDir::new();
    let (path, to) = (dir.path().join("a.ntdb"), dir.path().join("b.ntdb"));
    let run = |from: &Path| ntdb::salvage(from, &to, |_| {});
    assert!(matches!(run(&path), Err(Error::NotFound { .. })));
    let db = Db::create(&path).expect("create");
    assert!(matches!(run(&path), Err(Error::InUse { .. })));
    db.close().expect("close");
    assert!(matches!(ntdb::salvage(&path, &path, |_| {}), Err(Error::AlreadyExists { .. })));
    std::fs::write(&to, b"precious").expect("write");
    assert!(matches!(run(&path), Err(Error::AlreadyExists { .. })));
    assert_eq!(std::fs::read(&to).expect("read"), b"precious");
    std::fs::remove_file(&to).expect("remove");
    for content in [&b""[..], b"short", &[0; 100_000], &[b'x'; 100_000]] {
        std::fs::write(&path, content).expect("write");
        assert!(matches!(run(&path), Err(Error::NotADatabase { .. })), "{} bytes", content.len());
        assert!(!to.exists());
    }
    assert!(matches!(run(dir.path()), Err(Error::NotADatabase { .. })));
}
