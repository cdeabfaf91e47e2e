//! Copying what can still be read of a damaged database into a new one.
//!
//! Everything else in this crate goes by the tree, and stops where it is damaged. This reads the file page by page, with a
//! reader of its own ([`source`]) that trusts nothing, maps nothing and changes nothing:
//! 1. **Tree** ([`tree`]): from the root that the newest valid meta page names, through arrays, directories and buckets. A page
//!    counts if kind, number, checksum, depth and prefix are right, a record if its key's hash belongs where it lies.
//!    What a damaged bucket had is lost: any other page with such records is an older copy. Behind a damaged
//!    directory or root array there may be whole buckets, so the hashes below it are noted.
//! 2. **Scan** ([`scan`]), if there are such hashes, or no meta page: all pages that look like buckets and that the tree has not led
//!    to. The free-space map tells the present ones from old copies that nobody has overwritten; where the map is damaged, too,
//!    the newest copy of each range of hashes counts, by its epoch. Then a record may be older than the last one that was stored,
//!    or have been deleted, and the report says how many are not certain.
//! 3. **Logs** ([`replay`]): what they have on top, if the meta page and they are there; then what only the shared memory has.
//!
//! Every page is visited once and every value's pages belong to one value, so a forged file costs no more time than its length
//! allows; memory is a few bits a page, and some words for each bucket that the scan finds.

mod replay;
mod scan;
pub(crate) mod source;
mod tree;

use std::path::Path;

use crate::api::db::Db;
use crate::environment::companions::resolve;
use crate::environment::spool::Spool;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::page::meta::Meta;
use crate::storage::file::{self, FileId, Kind};

use self::source::Source;

/// What [`salvage`] has found and what it could not.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SalvageReport {
    /// Records in the new database.
    pub records: u64,
    /// Of these, records that may be older than the last ones stored, or deleted since: what tells them from old copies
    /// is damaged, too.
    pub uncertain_records: u64,
    /// Records that were found and could not be copied, because their value (or long key) is damaged.
    pub lost_values: u64,
    /// Pages of the damaged file.
    pub pages: u64,
    /// Pages that were needed and are damaged.
    pub damaged_pages: u64,
    /// Changes that the redo log and the shared memory had beyond the last checkpoint.
    pub log_records: u64,
    /// Each damage, in words (of many, the first); empty if everything is there.
    pub problems: Vec<String>,
}

impl SalvageReport {
    /// Whether the new database has everything that the old one had.
    pub fn is_complete(&self) -> bool {
        self.problems.is_empty()
    }
}

/// How far a [`salvage`] is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SalvageProgress {
    /// Pages looked at.
    pub pages_done: u64,
    /// Pages of the damaged file; those of buckets may be looked at a second time.
    pub pages: u64,
    /// Records copied.
    pub records: u64,
}

/// Most problems that are told one by one.
const TELL: usize = 100;

/// What is being done, for all parts.
struct Salvage<'a> {
    source: Source,
    destination: Db,
    report: SalvageReport,
    progress: &'a mut dyn FnMut(SalvageProgress),
    pages_done: u64,
    /// Pages of values that may still be read: values that many records name would take for ever.
    value_pages_left: u64,
    /// The transaction of which the log has had chunks and not yet the commit.
    transaction: Option<Spool>,
}

impl Salvage<'_> {
    fn problem(&mut self, text: String) {
        if self.report.problems.len() < TELL {
            self.report.problems.push(text);
        } else if self.report.problems.len() == TELL {
            self.report.problems.push("and more".into());
        }
    }

    fn damaged_page(&mut self, page: u32, reason: &str) {
        self.report.damaged_pages += 1;
        self.problem(format!("page {page}: {reason}"));
    }

    /// One more page has been looked at.
    fn step(&mut self) {
        self.pages_done += 1;
        if self.pages_done.is_multiple_of(256) {
            self.show();
        }
    }

    fn show(&mut self) {
        (self.progress)(SalvageProgress {
            pages_done: self.pages_done,
            pages: self.report.pages,
            records: self.report.records,
        });
    }

    fn run(&mut self) -> Result<()> {
        let (meta, lost) = match self.source.choose_meta() {
            Ok((meta, problem)) => {
                if let Some(problem) = problem {
                    self.report.damaged_pages += 1;
                    self.problem(problem);
                }
                let lost = self.tree(&meta)?;
                (Some(meta), lost)
            }
            Err(problems) => {
                self.report.damaged_pages += 2;
                self.problem(format!(
                    "pages 1 and 2: neither meta page is valid ({problems}): what the redo log has is lost, and pages are told \
                     from old copies by their age alone"
                ));
                (None, scan::Ranges::everything())
            }
        };
        if !lost.is_empty() {
            self.scan(meta.as_ref(), &lost)?;
        }
        if let Some(meta) = &meta {
            self.compare_count(meta)?;
            self.logs(meta)?;
        }
        self.report.records = self.destination.len()?;
        self.show();
        Ok(())
    }

    fn compare_count(&mut self, meta: &Meta) -> Result<()> {
        let found = self.destination.len()?;
        if found != meta.record_count {
            self.problem(format!(
                "{found} records of {} that the last checkpoint counted were found",
                meta.record_count
            ));
        }
        Ok(())
    }
}

/// Copies everything that can still be read of the database at `source` into a new one at `destination`.
///
/// `source` may be damaged in any way and is not changed; nobody may have it open, and nobody can open it meanwhile. Its redo
/// logs, and after the death of all its users in the same boot its shared memory, are read if they lie where they belong.
/// `progress` is called now and then.
///
/// What is promised: every record that lies in undamaged pages, and that undamaged pages lead to, is in `destination`
/// with its present value. If a directory, the root array, or both meta pages are damaged, so are the records of all undamaged buckets
/// below; but where the free-space map is damaged as well, some of them may be older copies, or deleted records:
/// [`SalvageReport::uncertain_records`] counts those. Nothing is copied that was never stored: keys, values and pages
/// are checked as in any other use.
///
/// # Errors
/// [`Error::AlreadyExists`] if there is something at `destination`; [`Error::InUse`] if somebody uses `source`;
/// [`Error::NotADatabase`] if nothing in it looks like a page of a database; and what the system reports, above all
/// [`Error::Full`]. Then there is nothing at `destination`. Damage is no error, but in the report.
pub fn salvage(
    source: impl AsRef<Path>,
    destination: impl AsRef<Path>,
    mut progress: impl FnMut(SalvageProgress),
) -> Result<SalvageReport> {
    let (path, to) = (source.as_ref(), destination.as_ref());
    let source = Source::open(path)?;
    let page_size = source.page_size as u32;
    let mut options = Options::new();
    options.create_new(true).page_size(page_size);
    if let Some(header) = &source.header {
        options.hash_mask(header.hash_mask).reserve_percent(header.reserve_percent.min(90) as u8);
    }
    let there = resolve(to).and_then(|to| {
        FileId::of_path(&to).map_err(|e| Error::from_io(&to, "look at the destination", e))
    });
    if there? == Some(source.id) {
        // It is locked: opening it would wait for this very call.
        return Err(Error::AlreadyExists { path: to.to_path_buf() });
    }
    let new = options.open(to)?;
    let pages = source.pages as u64;
    let header_problems = source.header_problems.clone();
    let mut salvage = Salvage {
        source,
        destination: new,
        report: SalvageReport { pages, ..SalvageReport::default() },
        progress: &mut progress,
        pages_done: 0,
        value_pages_left: pages * 4 + 1,
        transaction: None,
    };
    for (page, problem) in header_problems {
        salvage.damaged_page(page, &problem);
    }
    let result = salvage.run();
    let Salvage { source, destination, report, .. } = salvage;
    drop(source);
    match result.and_then(|()| destination.close()) {
        Ok(()) => Ok(report),
        Err(error) => {
            // Made by this call, which nobody has been told of.
            remove_new(to);
            Err(error)
        }
    }
}

/// Removes a database that was never finished.
pub(crate) fn remove_new(path: &Path) {
    let Ok(resolved) = resolve(path) else { return };
    let companions = crate::environment::companions::Companions::of(&resolved, None);
    let _ = file::unlink(&resolved, Kind::Data);
    // Also the one that its first user had not finished.
    let mut unfinished = companions.shm.clone().into_os_string();
    unfinished.push(crate::environment::sidecar::TEMPORARY);
    for shm in [&companions.shm, Path::new(&unfinished)] {
        let _ = file::unlink(shm, Kind::Shm);
    }
    for log in &companions.logs {
        let _ = file::unlink(log, Kind::Log);
    }
}
