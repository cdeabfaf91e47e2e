//! The damaged file: its pages, read one by one and checked each.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use crate::environment::companions::{AttachRecord, Companions, resolve};
use crate::environment::recover::is_plausible;
use crate::environment::sidecar::open_shm;
use crate::error::{Error, Result};
use crate::hash::KeyHasher;
use crate::le;
use crate::limits::{self, MAX_PROCESSES};
use crate::page::head::Kind;
use crate::page::header::{
    HEADER_BYTES, HEADER_COPY_PAGE, Header, HeaderProblem, ProbeProblem, probe,
};
use crate::page::meta::{META_PAGES, Meta};
use crate::storage::failpoint;
use crate::storage::file::{File, FileId};
use crate::storage::mapping::Access;
use crate::storage::ofd::{ATTACH, LockKind, OfdFile, slot_byte, slot_bytes};

/// Bytes that a page is aligned to, as the bucket's reader wants it.
const ALIGN: usize = 64;

/// A page in memory.
pub struct Page {
    words: Vec<u64>,
    size: usize,
}

impl Page {
    /// Room for a page of `size` bytes.
    pub fn new(size: usize) -> Page {
        Page { words: vec![0; size.div_ceil(8) + ALIGN / 8], size }
    }

    /// Its first byte, aligned.
    pub fn start(&mut self) -> *mut u8 {
        let at = self.words.as_mut_ptr().cast::<u8>();
        at.wrapping_add(at.align_offset(ALIGN))
    }

    /// Its bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        let start = self.start();
        // SAFETY: the buffer has `size` bytes from its aligned start on, and is borrowed.
        unsafe { std::slice::from_raw_parts_mut(start, self.size) }
    }
}

/// What the head of a page says (docs/format.md, 1.3).
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// What it is.
    pub kind: u8,
    /// Leading bits that its records share.
    pub depth: u8,
    /// Groups, or index bits.
    pub groups: u16,
    /// Its own number.
    pub number: u32,
    /// Next page of the chain.
    pub next: u32,
    /// When it was made.
    pub epoch: u64,
    /// The leading bits.
    pub prefix: u64,
    /// Pages of the run.
    pub run_pages: u32,
}

impl Head {
    /// Reads the head of a page.
    pub fn of(page: &[u8]) -> Head {
        Head {
            kind: page[4],
            depth: page[5],
            groups: le::get_u16(page, 6),
            number: le::get_u32(page, 8),
            next: le::get_u32(page, 12),
            epoch: le::get_u64(page, 16),
            prefix: le::get_u64(page, 24),
            run_pages: le::get_u32(page, 44),
        }
    }
}

/// The damaged file.
pub struct Source {
    /// With symbolic links resolved.
    pub resolved: PathBuf,
    /// The file.
    pub file: File,
    /// Which it is.
    pub id: FileId,
    /// Keeps everybody else from opening it.
    _lock: OfdFile,
    /// The header, if it or its copy is whole.
    pub header: Option<Header>,
    /// What is wrong with them.
    pub header_problems: Vec<(u32, String)>,
    /// The hash, likewise.
    pub hasher: Option<KeyHasher>,
    /// Bytes of a page.
    pub page_size: usize,
    /// Whole pages of the file.
    pub pages: u32,
    /// Bit per page: something whole uses it.
    owned: Vec<u64>,
}

/// Process ids of those who use the file, as far as their shared memory can be read.
fn users(file: &File, lock: &OfdFile, resolved: &Path, id: FileId) -> Vec<u32> {
    let record = AttachRecord::read(file).ok().flatten().filter(|record| record.file == id);
    let own = Companions::of(resolved, None);
    let place = record.map_or(own, |record| record.companions());
    let Ok(shm) = open_shm(&place.shm, Access::ReadOnly) else { return Vec::new() };
    if (shm.header().device, shm.header().inode) != (id.dev, id.ino) {
        return Vec::new();
    }
    let lives = |slot: usize| {
        lock.is_locked_by_other(slot_byte(slot as u16), LockKind::Exclusive).unwrap_or(false)
    };
    let entries = (0..MAX_PROCESSES).map(|slot| (slot, shm.process(slot)));
    let attached = entries.filter(|(slot, entry)| entry.state.load(Relaxed) == 1 && lives(*slot));
    attached.map(|(_, entry)| entry.pid.load(Relaxed)).collect()
}

impl Source {
    /// Opens the file for reading and keeps others from opening it.
    pub fn open(path: &Path) -> Result<Source> {
        let resolved = resolve(path)?;
        let file =
            File::open_readonly(&resolved, failpoint::Kind::Data).map_err(|e| match e.kind() {
                std::io::ErrorKind::NotFound => Error::NotFound { path: path.to_path_buf() },
                std::io::ErrorKind::IsADirectory | std::io::ErrorKind::InvalidInput => {
                    Error::NotADatabase { path: path.to_path_buf(), reason: e.to_string() }
                }
                _ => Error::from_io(path, "open the database", e),
            })?;
        let id = file.identity().map_err(|e| Error::from_io(path, "identify the database", e))?;
        let failed = |e| Error::from_io(path, "lock the database", e);
        let lock = OfdFile::open(&resolved, true).map_err(failed)?;
        if lock.identity() != id
            || !lock.try_lock(ATTACH, LockKind::Shared).map_err(failed)?
            || lock
                .is_locked_by_other(slot_bytes(MAX_PROCESSES as u16), LockKind::Exclusive)
                .map_err(failed)?
        {
            let processes = users(&file, &lock, &resolved, id);
            return Err(Error::InUse { path: path.to_path_buf(), processes });
        }
        let len = file.len().map_err(|e| Error::from_io(path, "measure the data file", e))?;
        let not_a_database =
            |reason: String| Error::NotADatabase { path: path.to_path_buf(), reason };
        let header = match probe(|offset, block| file.read_exact_at(block, offset), len) {
            Ok(header) => Some(header),
            Err(ProbeProblem::Header(HeaderProblem::NewerVersion(found))) => {
                return Err(Error::NewerVersion {
                    path: path.to_path_buf(),
                    found,
                    supported: limits::FORMAT_VERSION,
                });
            }
            // Unreadable or damaged, both: the pages themselves tell how large they are.
            Err(_) => None,
        };
        let page_size = match &header {
            Some(header) => header.page_size as usize,
            None => guess_page_size(&file, len).ok_or_else(|| {
                not_a_database("no page of it looks like one of a database".into())
            })?,
        };
        let pages = (len / page_size as u64).min(u32::MAX as u64) as u32;
        let mut source = Source {
            resolved,
            file,
            id,
            _lock: lock,
            hasher: header.as_ref().map(|h| KeyHasher::new(&h.hash_key, h.hash_mask)),
            header,
            header_problems: Vec::new(),
            page_size,
            pages,
            owned: vec![0; (pages as usize).div_ceil(64)],
        };
        source.look_at_headers();
        Ok(source)
    }

    fn look_at_headers(&mut self) {
        for page in [0, HEADER_COPY_PAGE] {
            let mut block = [0u8; HEADER_BYTES];
            let place = page as u64 * self.page_size as u64;
            let problem = match self.file.read_exact_at(&mut block, place) {
                Ok(()) => match Header::decode(&block) {
                    Ok(_) => continue,
                    Err(problem) => problem.to_string(),
                },
                Err(e) => e.to_string(),
            };
            let with_copy = if self.header.is_some() {
                " (its copy is whole)"
            } else {
                " (nor is its copy whole: keys cannot be checked against the places they lie in)"
            };
            self.header_problems.push((page, format!("{problem}{with_copy}")));
        }
    }

    /// The newest valid meta page, and what is wrong with the other one; or what is wrong with both.
    pub fn choose_meta(&self) -> std::result::Result<(Meta, Option<String>), String> {
        let mut found = Vec::new();
        let mut problems = Vec::new();
        for number in META_PAGES {
            let mut page = vec![0u8; self.page_size];
            let read = self.file.read_exact_at(&mut page, number as u64 * self.page_size as u64);
            let problem = match read
                .map_err(|e| e.to_string())
                .and_then(|()| Meta::decode(&page).map_err(|problem| problem.to_string()))
            {
                Ok(meta) if is_plausible(&meta) => {
                    found.push(meta);
                    continue;
                }
                Ok(_) => "impossible numbers".to_string(),
                Err(problem) => problem,
            };
            // Voided, or never written: no damage.
            let blank = page.iter().all(|&byte| byte == 0);
            problems.push((blank, format!("page {number}: {problem}")));
        }
        let meta = found.into_iter().max_by_key(|meta| meta.sequence);
        match meta {
            Some(meta) => {
                let damage = problems.pop().filter(|(blank, _)| !blank || meta.log_salt == 0);
                Ok((meta, damage.map(|(_, problem)| problem)))
            }
            None => {
                let texts: Vec<_> = problems.into_iter().map(|(_, problem)| problem).collect();
                Err(texts.join("; "))
            }
        }
    }

    /// Reads bytes of a page, or of a run of pages.
    pub fn read(&self, first: u32, bytes: &mut [u8]) -> std::result::Result<(), String> {
        let end = first as u64 + bytes.len().div_ceil(self.page_size) as u64;
        if end > self.pages as u64 {
            return Err("lies beyond the end of the file".into());
        }
        let place = first as u64 * self.page_size as u64;
        self.file.read_exact_at(bytes, place).map_err(|e| format!("cannot be read: {e}"))
    }

    /// Reads a run of pages with one head, and checks it.
    pub fn read_checked(
        &self,
        number: u32,
        kind: Kind,
        bytes: &mut [u8],
    ) -> std::result::Result<Head, String> {
        self.read(number, bytes)?;
        let head = Head::of(bytes);
        if head.kind != kind as u8 {
            return Err(format!("is no page of kind {}", kind as u8));
        }
        if head.number != number {
            return Err(format!("says that it is page {}", head.number));
        }
        if le::get_u32(bytes, 0) != crc32c::crc32c(&bytes[4..]) {
            return Err("has a wrong checksum".into());
        }
        Ok(head)
    }

    /// Whether something whole uses the page.
    pub fn is_owned(&self, page: u32) -> bool {
        self.owned.get(page as usize / 64).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// Notes that something whole uses these pages, unless something else does already.
    pub fn own(&mut self, first: u32, pages: u32) -> bool {
        let end = first as u64 + pages as u64;
        if end > self.pages as u64 || (first..end as u32).any(|page| self.is_owned(page)) {
            return false;
        }
        for page in first..end as u32 {
            self.owned[page as usize / 64] |= 1 << (page % 64);
        }
        true
    }
}

/// The page size under which pages have the number of their place and a right checksum.
fn guess_page_size(file: &File, len: u64) -> Option<usize> {
    /// Enough to tell.
    const PAGES: u64 = 4096;
    let mut best = (0, 0);
    for shift in 12..=16 {
        let size = 1usize << shift;
        let mut page = vec![0u8; size];
        let mut right = 0;
        for number in 4..(len / size as u64).min(PAGES) {
            if file.read_exact_at(&mut page, number * size as u64).is_ok()
                && Head::of(&page).number as u64 == number
                && le::get_u32(&page, 0) == crc32c::crc32c(&page[4..])
            {
                right += 1;
            }
        }
        if right > best.0 {
            best = (right, size);
        }
    }
    (best.0 > 0).then_some(best.1)
}
