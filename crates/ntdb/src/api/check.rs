//! Verifying everything.
//!
//! A snapshot is opened, and the allocation bits and the lists of replaced pages are copied in the same moment, under the writer
//! lock. What the durable checkpoint has to do with it is looked at next, under the checkpoint lock. Everything else happens beside
//! running readers, writers and checkpoints, on what does not change any more:
//! - every page of the tree: kind, number, checksum (if a checkpoint has written it), structure, depth and prefix;
//! - every record: its hash belongs to its bucket, a search finds it and nothing else, its value's checksum;
//! - the number of records;
//! - every page of the file is used by exactly one thing, and marked so: what is marked used and is used by nothing is
//!   leaked.

use std::collections::HashSet;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use crate::checkpoint::map::MapPages;
use crate::checkpoint::publish;
use crate::checkpoint::run::{CheckpointGuard, LogStartGuard};
use crate::checkpoint::snapshot::{self, Snap};
use crate::core::{Backing, Core};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::index::discard;
use crate::index::locate::Root;
use crate::index::walk::{self, Item, Side};
use crate::options::deadline_after;
use crate::page::head::{Kind, prefix_of};
use crate::page::header::{HEADER_BYTES, HEADER_COPY_PAGE, Header};
use crate::space::snapshots::{self, Registered};
use crate::space::{bits, retire};
use crate::storage::failpoint::crash_point;
use crate::transaction::step::list_get;
use crate::transaction::writer::Writer;
use crate::types::{Epoch, PageNo, Run};

/// What [`Db::check`](crate::Db::check) found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CheckReport {
    /// Number of records seen.
    pub records: u64,
    /// Number of pages in use by the contents.
    pub pages: u64,
    /// Pages that are neither free nor used by anything.
    pub leaked_pages: u64,
    /// Each damage, in words; empty if the database is whole.
    pub problems: Vec<String>,
    /// How many of the problems concern what is there twice, a header or a meta page, of which the other one is whole:
    /// nothing is lost, and the last user to close the database writes it anew.
    pub spare_problems: u64,
}

impl CheckReport {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.problems.is_empty() && self.leaked_pages == 0
    }

    /// Whether something is wrong, but nothing that a user would miss: see [`CheckReport::spare_problems`].
    pub fn is_only_about_spares(&self) -> bool {
        !self.problems.is_empty()
            && self.leaked_pages == 0
            && self.spare_problems == self.problems.len() as u64
    }
}

/// Most problems that are told one by one.
const TELL: usize = 100;

/// Damage as a line of the report: the database is known, and what to do is for the report's reader to say.
fn in_words(error: Error) -> String {
    match error {
        Error::Corrupt { place, reason, .. } => format!("{place}: {reason}"),
        other => other.to_string(),
    }
}

/// The snapshot that is checked, released in the end.
struct Opened<'c> {
    core: &'c Core,
    snap: Snap,
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        let Registered { index, owner, .. } = self.snap.registered;
        snapshots::release(self.core, index, owner);
    }
}

/// The moment that is checked.
struct Moment<'c> {
    snapshot: Opened<'c>,
    durable_root: Root,
    durable_epoch: Epoch,
    file_pages: u32,
    used: Vec<u64>,
    /// What is summed up of those bits.
    groups: Vec<u64>,
    /// Pages of lists: replaced and waiting, or made and not yet linked.
    listed: Vec<(Run, &'static str)>,
}

/// Checks the database. Waits for locks for `limit` each, not counting the work in between.
pub fn check(environment: &Environment, limit: Option<Duration>) -> Result<CheckReport> {
    environment.ensure_session()?;
    let core = &environment.core;
    let guard = CheckpointGuard::lock(core, limit)?;
    let moment = {
        let mut writer = loop {
            let mut writer = Writer::lock(core, deadline_after(limit))?;
            if !discard::is_due(core) {
                break writer;
            }
            discard::part(&mut writer)?;
        };
        let lists = copy_lists(core)?;
        let file_pages = core.control().readers.file_pages.load(Relaxed);
        let words = (file_pages as u64).div_ceil(64);
        let used = (0..words).map(|index| bits::used_word(core, index)).collect();
        let groups = bits::group_words(core, file_pages);
        let checkpoint = &core.control().checkpoint;
        Moment {
            snapshot: Opened { core, snap: snapshot::open_locked(&mut writer)? },
            durable_root: Root::from_word(checkpoint.durable_root.load(Relaxed)),
            durable_epoch: Epoch(checkpoint.durable_epoch.load(Relaxed)),
            file_pages,
            used,
            groups,
            listed: lists,
        }
    };
    crash_point("check.frozen");
    let mut checker = Checker {
        core,
        limit,
        moment: &moment,
        unwritten: HashSet::new(),
        owner: vec![0; (moment.file_pages as usize).div_ceil(64)],
        value_pages: 0,
        report: CheckReport::default(),
    };
    checker.durable()?;
    drop(guard);
    checker.run();
    Ok(checker.report)
}

fn copy_lists(core: &Core) -> Result<Vec<(Run, &'static str)>> {
    let control = core.control();
    let mut listed = Vec::new();
    for (retired, list) in retire::all(core)? {
        listed.push(match list {
            retire::List::Fresh => (retired.run, "replaced, waiting for readers"),
            retire::List::Held => (retired.run, "replaced, held for a checkpoint or a snapshot"),
        });
    }
    for (table, what) in [
        (&control.checkpoint_made, "made by a checkpoint"),
        (&control.claim_made, "made by a large operation"),
    ] {
        for index in 0..table.len.load(Relaxed) {
            listed.push((list_get(core, table, index)?, what));
        }
    }
    Ok(listed)
}

struct Checker<'c> {
    core: &'c Core,
    limit: Option<Duration>,
    moment: &'c Moment<'c>,
    /// Pages of the tree that are not the durable checkpoint's, and so have no checksum yet.
    unwritten: HashSet<u32>,
    /// Bit per page: something uses it.
    owner: Vec<u64>,
    /// Pages of values that have been verified.
    value_pages: u64,
    report: CheckReport,
}

impl Checker<'_> {
    /// Notes a problem; one that is met on several ways is told once.
    fn problem(&mut self, text: String) {
        if self.report.problems.contains(&text) {
            return;
        }
        if self.report.problems.len() < TELL {
            self.report.problems.push(text);
        } else if self.report.problems.len() == TELL {
            self.report.problems.push("and more".into());
        }
    }

    /// Notes a problem of something of which there is another, whole one.
    fn spare_problem(&mut self, text: String) {
        let told = self.report.problems.len();
        self.problem(text);
        self.report.spare_problems += (self.report.problems.len() - told) as u64;
    }

    /// What concerns the durable checkpoint. The caller holds the checkpoint lock.
    fn durable(&mut self) -> Result<()> {
        let core = self.core;
        self.own(Run { first: PageNo(0), len: 4 }, "the header and the meta pages");
        if core.backing != Backing::Memory {
            self.spares()?;
        }
        if core.backing == Backing::Shared {
            if let Err(error) = self.durable_map() {
                self.problem(in_words(error));
            }
        } else if let Ok(map) = first_map(core) {
            for page in map.all() {
                self.own(Run { first: page, len: 1 }, "the free-space map");
            }
        }
        if core.backing == Backing::Shared {
            let (before, now) = (self.moment.durable_root, self.moment.snapshot.snap.root);
            let unwritten = &mut self.unwritten;
            let compared = walk::diff(core, before, now, Side::New, &mut |item| {
                if item.kind.is_some() {
                    unwritten.insert(item.run.first.0);
                }
                Ok(())
            });
            // Overflow pages that both have may be visited on both sides.
            let compared = compared.and_then(|()| {
                walk::diff(core, before, now, Side::Old, &mut |item| {
                    unwritten.remove(&item.run.first.0);
                    Ok(())
                })
            });
            if let Err(error) = compared {
                self.problem(in_words(error));
            }
        }
        Ok(())
    }

    /// Everything else.
    fn run(&mut self) {
        let core = self.core;
        let listed = self.moment.listed.clone();
        for (run, what) in listed {
            self.own(run, what);
        }
        let root = self.moment.snapshot.snap.root;
        let mut items = Vec::new();
        let walked = walk::for_each_run(core, root, &mut |item| {
            items.push(item);
            Ok(())
        });
        let whole = walked.is_ok();
        if let Err(error) = walked {
            self.problem(in_words(error));
        }
        for item in &items {
            self.item(item);
        }
        self.report.pages = items.iter().map(|item| item.run.len as u64).sum();
        self.records(root);
        if self.report.records != self.moment.snapshot.snap.count {
            let (seen, counted) = (self.report.records, self.moment.snapshot.snap.count);
            self.problem(format!("{seen} records found, {counted} counted"));
        }
        if whole {
            self.account();
        } else {
            // What lies behind the damage would be taken for leaked.
            self.problem("leaked pages were not looked for, because of the damage".into());
        }
    }

    /// What is there twice: the header, and the meta page that is not the durable one. Nothing is lost with one of two.
    fn spares(&mut self) -> Result<()> {
        let core = self.core;
        let mut headers = Vec::new();
        for page in [0, HEADER_COPY_PAGE] {
            let mut block = [0u8; HEADER_BYTES];
            if let Err(error) = core.page(PageNo(page)).map(|at| {
                // SAFETY: the start of a mapped page; nobody writes the header's bytes.
                unsafe { std::ptr::copy_nonoverlapping(at, block.as_mut_ptr(), block.len()) }
            }) {
                self.problem(in_words(error));
            } else if let Err(problem) = Header::decode(&block) {
                headers.push((page, problem));
            }
        }
        // The database has been opened with the header that is whole; if neither is any more, it was changed since.
        match &headers[..] {
            [(page, problem)] => self.spare_problem(format!(
                "page {page}: {problem} (its copy is whole; the last close writes it anew)"
            )),
            both => {
                for (page, problem) in both {
                    self.problem(format!("page {page}: {problem} (nor is its copy whole)"));
                }
            }
        }
        // No checkpoint writes a meta page meanwhile, and with this nobody starts a log.
        let guard = LogStartGuard::lock(core, deadline_after(self.limit))?;
        let durable = core.control().checkpoint.durable_meta.load(Relaxed) & 1;
        let spare = publish::read_meta(core, 1 - durable);
        drop(guard);
        if let Err(Error::Corrupt { place, reason, .. }) = spare {
            self.spare_problem(format!(
                "{place}: {reason} (the other meta page is whole; the last close, or a checkpoint, writes this one anew)"
            ));
        }
        Ok(())
    }

    /// The pages of the durable checkpoint's map.
    fn durable_map(&mut self) -> Result<()> {
        let core = self.core;
        let index = core.control().checkpoint.durable_meta.load(Relaxed);
        let meta = publish::read_meta(core, index)?;
        let map = MapPages::load(core, meta.map_levels, &meta.map_pages)?;
        for page in &map.groups {
            core.verify_page(*page, Kind::Map)?;
        }
        for page in map.all() {
            self.own(Run { first: page, len: 1 }, "the free-space map");
        }
        Ok(())
    }

    /// Notes that something uses `run`.
    fn own(&mut self, run: Run, what: &str) {
        let end = run.first.0 as u64 + run.len as u64;
        if end > self.moment.file_pages as u64 {
            self.problem(format!("page {}: beyond the end of the file ({what})", run.first.0));
            return;
        }
        for page in run.first.0..end as u32 {
            let (word, bit) = (page as usize / 64, 1u64 << (page % 64));
            if self.owner[word] & bit != 0 {
                self.problem(format!("page {page}: used twice ({what})"));
            }
            self.owner[word] |= bit;
            if self.moment.used[word] & bit == 0 {
                self.problem(format!("page {page}: marked free, but used ({what})"));
            }
        }
    }

    fn item(&mut self, item: &Item) {
        let core = self.core;
        let Some(kind) = item.kind else {
            return self.own(item.run, "a value");
        };
        self.own(item.run, "the tree");
        let written = core.backing == Backing::Shared
            && item.made <= self.moment.durable_epoch
            && !self.unwritten.contains(&item.run.first.0);
        if written && let Err(error) = core.verify_page(item.run.first, kind) {
            self.problem(in_words(error));
        }
    }

    /// Visits every bucket of the tree.
    fn records(&mut self, root: Root) {
        let mut hash = Some(0);
        while let Some(at) = hash {
            match self.bucket(root, at) {
                Ok(bits) => hash = walk::next_range(at, bits),
                Err(error) => {
                    self.problem(in_words(error));
                    // The directory's entry says where the next bucket begins at the latest.
                    let bits = crate::index::locate::path(self.core, root, at)
                        .map(|path| path.entry_depth());
                    hash = bits.ok().and_then(|bits| walk::next_range(at, bits));
                }
            }
        }
    }

    /// Visits the bucket that holds the hash `at`; returns how many leading bits it stands for. What is wrong in it is told
    /// here, so that the walk goes on behind the whole bucket and visits none twice.
    fn bucket(&mut self, root: Root, at: u64) -> Result<u8> {
        let head = crate::index::locate::bucket_page(self.core, root, at)?;
        let depth = crate::index::lookup::bucket_bits(self.core, head, at)?;
        if let Err(error) = self.bucket_records(head, depth, prefix_of(at, depth)) {
            self.problem(in_words(error));
        }
        Ok(depth)
    }

    fn bucket_records(&mut self, head: PageNo, depth: u8, prefix: u64) -> Result<()> {
        let core = self.core;
        let chain = crate::index::lookup::chain(core, head)?;
        let mut keys: HashSet<Vec<u8>> = HashSet::new();
        for &page in &chain {
            let bucket = core.bucket(page)?;
            bucket.check_structure().map_err(core.damage(page))?;
            let page_head = bucket.head();
            if page_head.depth.load(Relaxed) != depth || page_head.prefix.load(Relaxed) != prefix {
                self.problem(format!("page {}: its depth or prefix is wrong", page.0));
            }
            bucket.for_each_live(core.damage(page), |slot, record| {
                self.report.records += 1;
                if let Some(extent) = record.extent() {
                    // Else many records that name the same pages would have them read for each.
                    self.value_pages += extent.pages as u64;
                    if self.value_pages > self.moment.file_pages as u64 {
                        return Err(core.corrupt(page, "its values have pages of others"));
                    }
                    if let Err(error) = core.verify_extent(&extent, record.extent_bytes()) {
                        // Only this record is spoilt; if the key is, nothing more can be said of it.
                        self.problem(in_words(error));
                        if record.key_is_in_extent() {
                            return Ok(());
                        }
                    }
                }
                let key = core.key_of(&record)?;
                let hash = core.hasher.hash(key);
                if prefix_of(hash, depth) != prefix {
                    self.problem(format!("page {}, slot {slot}: in the wrong bucket", page.0));
                }
                let found =
                    bucket.find(hash, core.damage(page), |other| core.is_key(other, hash, key))?;
                if found.is_none_or(|found| found.slot != slot) {
                    self.problem(format!(
                        "page {}, slot {slot}: a search does not find it",
                        page.0
                    ));
                }
                if chain.len() > 1 && !keys.insert(key.to_vec()) {
                    self.problem(format!("page {}, slot {slot}: its key is there twice", page.0));
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Compares what is used with what is marked used, and that with what is summed up of it.
    fn account(&mut self) {
        let Moment { groups, used, file_pages, .. } = self.moment;
        for page in bits::wrong_groups(groups, used, *file_pages) {
            self.problem(format!("page {} and those behind it: summed up wrongly", page.0));
        }
        for index in 0..self.owner.len() {
            let beyond = self.moment.file_pages as usize - index * 64;
            let mask = if beyond >= 64 { u64::MAX } else { (1 << beyond) - 1 };
            let leaked = self.moment.used[index] & !self.owner[index] & mask;
            if leaked != 0 {
                self.report.leaked_pages += leaked.count_ones() as u64;
                let first = index * 64 + leaked.trailing_zeros() as usize;
                self.problem(format!("page {first}: marked used, but used by nothing"));
            }
        }
    }
}

/// The map that a private or in-memory database began with.
fn first_map(core: &Core) -> Result<MapPages> {
    let index = core.control().checkpoint.durable_meta.load(Relaxed);
    let meta = publish::read_meta(core, index)?;
    MapPages::load(core, meta.map_levels, &meta.map_pages)
}
