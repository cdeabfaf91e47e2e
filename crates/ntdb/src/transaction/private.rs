//! The private tree of an open transaction.
//!
//! A transaction works on copies. Pages that it has made since its last savepoint carry its *mark* and are changed in place, since
//! nobody else can see them; all others are copied first, and the originals are listed as replaced, to be given up when the
//! transaction commits. Its pages come from a stock that is filled under the writer lock, a few at a time, and stand in the
//! shared state (*claim_made*), so that they are given back if the process dies.
//!
//! The tree below the private root is of the same kind as the shared one, and the same functions change it: see
//! [`Writer`] and [`Step`], which do here at once what they otherwise note first.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::error::Result;
use crate::index::locate::Root;
use crate::index::lookup;
use crate::options::deadline_after;
use crate::page::head::PageHead;
use crate::shm::ways::Ways;
use crate::space::allocate;
use crate::storage::failpoint::crash_point;
use crate::types::{Epoch, PageNo, Run};

use super::claim;
use super::step::{Step, list_set};
use super::writer::Writer;

/// Pages taken for the stock at first, and at most at once. What is left over is given up with the commit, so a short
/// transaction takes few.
const STOCK_MIN: u32 = 4;
const STOCK_MAX: u32 = 64;

/// A store of a step.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    pub place: u64,
    pub width: u32,
    pub repeat: u32,
    pub value: u64,
}

/// Pages that a step takes or gives up.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub run: Run,
    /// The epoch in which they were made.
    pub made: Epoch,
    /// What they are.
    pub what: What,
}

/// What pages are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// A page of the tree, which has a header.
    Page,
    /// They hold a value.
    Value,
    /// They were added to those of a value, directly before them.
    MoreOfValue,
}

/// Where to return to.
#[derive(Clone, Debug)]
pub struct Saved {
    root: Root,
    count: u64,
    taken: usize,
    replaced: usize,
    /// Length of the log stream.
    pub stream: u64,
}

/// See the module's description.
#[derive(Debug)]
pub struct Private {
    /// The root of the private tree.
    pub root: Root,
    /// Records in it.
    pub count: u64,
    /// Updates that were made in it.
    pub updates: Ways,
    /// A random number of this shared state, from which marks are counted, so that those that were written to disk long ago mean
    /// nothing.
    base: u64,
    /// What the pages carry that may be changed in place.
    mark: u64,
    /// No page made before is this transaction's, whatever it carries.
    first_epoch: Epoch,
    /// How long to wait for the writer lock.
    lock_timeout: Option<Duration>,
    /// Pages that belong to the transaction and to no tree.
    stock: Vec<PageNo>,
    refill: u32,
    /// All that was taken from the stock or for values, in order.
    taken: Vec<Run>,
    /// Values among them: first page, and index in `taken`.
    values: BTreeMap<u32, usize>,
    /// What others can see and the private tree does not have any more.
    pub replaced: Vec<(Run, Epoch)>,
    /// `taken` up to here was made before the last savepoint.
    saved_taken: usize,
    /// Of the step under way.
    pub step_taken: Vec<Piece>,
    pub step_given: Vec<Piece>,
    pub step_stores: Vec<Store>,
    /// Scratch for the records of a page.
    pub room: Vec<u8>,
}

impl Private {
    /// A private tree that is as yet the shared one. The caller holds the claim and the writer lock.
    pub fn new(core: &Core, base: u64, lock_timeout: Option<Duration>) -> Private {
        Private {
            root: lookup::current_root(core),
            count: core.control().writer.count.load(Relaxed),
            updates: Ways::default(),
            base,
            mark: next_mark(core, base),
            first_epoch: core.epoch(),
            lock_timeout,
            stock: Vec::new(),
            refill: STOCK_MIN,
            taken: Vec::new(),
            values: BTreeMap::new(),
            replaced: Vec::new(),
            saved_taken: 0,
            step_taken: Vec::new(),
            step_given: Vec::new(),
            step_stores: Vec::new(),
            room: Vec::new(),
        }
    }

    /// Whether the page may be changed in place.
    #[inline]
    pub fn owns(&self, head: &PageHead) -> bool {
        head.mark.load(Relaxed) == self.mark && head.epoch() >= self.first_epoch
    }

    /// Whether the value whose pages begin there was made since the last savepoint.
    fn owns_value(&self, first: PageNo) -> bool {
        self.values.get(&first.0).is_some_and(|&index| index >= self.saved_taken)
    }

    /// Whether anything has been changed.
    pub fn is_changed(&self) -> bool {
        !self.taken.is_empty()
    }

    /// Pages that others can see and the private tree does not have any more.
    pub fn replaced_pages(&self) -> u64 {
        self.replaced.iter().map(|(run, _)| run.len as u64).sum()
    }

    /// Takes consecutive pages.
    pub fn take(&mut self, core: &Core, pages: u32) -> Result<PageNo> {
        if pages > 1 {
            let deadline = deadline_after(self.lock_timeout);
            let mut first = PageNo::NONE;
            allocate::keep_cursor(core, pages, || {
                allocate::allocate_ahead(core, pages, deadline)?;
                list_runs(core, 1, pages, deadline, |page| first = page)
            })?;
            return Ok(first);
        }
        if self.stock.is_empty() {
            let stock = &mut self.stock;
            let deadline = deadline_after(self.lock_timeout);
            list_runs(core, self.refill, 1, deadline, |page| stock.push(page))?;
            self.refill = (self.refill * 2).min(STOCK_MAX);
            // The first to be taken lies first in the file.
            self.stock.reverse();
        }
        let page = self.stock.pop().ok_or_else(|| core.corrupt_shm("no page was taken"))?;
        // It may have been another kind of page before.
        core.set_new(Run { first: page, len: 1 })?;
        Ok(page)
    }

    /// Takes pages directly behind those of a value, if it is the transaction's own: at least `least`, at most `most`, or none.
    /// Returns how many.
    pub fn extend_value(&mut self, core: &Core, value: Run, least: u32, most: u32) -> Result<u32> {
        let Some(first) = value.first.0.checked_add(value.len).map(PageNo) else { return Ok(0) };
        if !self.owns_value(value.first) {
            return Ok(0);
        }
        let mut writer = Writer::lock(core, deadline_after(self.lock_timeout))?;
        let made = &core.control().claim_made;
        let index = made.len.load(Relaxed);
        claim::secure_lists(&mut writer, 1)?;
        let mut step = Step::begin(&mut writer);
        let len = step.take_behind(first, least, most)?;
        if len == 0 {
            return Ok(0);
        }
        let run = Run { first, len };
        list_set(core, made, index, run)?;
        step.store_shared(&made.len, index + 1);
        crash_point("transaction.pages.listed");
        step.structure()?;
        self.step_taken.push(Piece { run, made: core.epoch(), what: What::MoreOfValue });
        Ok(len)
    }

    /// Carries out the step under way; what it does to the root stays here.
    pub fn finish_step(
        &mut self,
        core: &Core,
        root_place: u64,
        store: impl Fn(&Store) -> Result<()>,
    ) -> Result<()> {
        for piece in std::mem::take(&mut self.step_taken) {
            match piece.what {
                What::Page => core.head(piece.run.first)?.mark.store(self.mark, Relaxed),
                What::Value => {
                    self.values.insert(piece.run.first.0, self.taken.len());
                }
                What::MoreOfValue => {}
            }
            self.taken.push(piece.run);
        }
        for piece in std::mem::take(&mut self.step_given) {
            self.give(core, piece)?;
        }
        for noted in std::mem::take(&mut self.step_stores) {
            if noted.place == root_place {
                self.root = Root::from_word(noted.value);
            } else {
                store(&noted)?;
            }
        }
        Ok(())
    }

    /// Drops the step under way; its pages go back to the stock.
    pub fn drop_step(&mut self) {
        for piece in std::mem::take(&mut self.step_taken) {
            self.restock(piece.run);
        }
        self.step_given.clear();
        self.step_stores.clear();
    }

    fn give(&mut self, core: &Core, piece: Piece) -> Result<()> {
        let is_own = match piece.what {
            What::Page => self.owns(core.head(piece.run.first)?),
            _ => self.owns_value(piece.run.first),
        };
        if !is_own {
            self.replaced.push((piece.run, piece.made));
            return Ok(());
        }
        if piece.what != What::Page {
            self.values.remove(&piece.run.first.0);
        }
        self.restock(piece.run);
        Ok(())
    }

    fn restock(&mut self, run: Run) {
        self.stock.extend((run.first.0..run.first.0 + run.len).rev().map(PageNo));
    }

    /// From now on pages made so far are copied before they are changed.
    pub fn save(&mut self, core: &Core, stream: u64) -> Saved {
        self.mark = next_mark(core, self.base);
        self.saved_taken = self.taken.len();
        Saved {
            root: self.root,
            count: self.count,
            taken: self.taken.len(),
            replaced: self.replaced.len(),
            stream,
        }
    }

    /// Goes back to what was saved, which may be done again.
    pub fn restore(&mut self, core: &Core, saved: &Saved) {
        self.root = saved.root;
        self.count = saved.count;
        self.replaced.truncate(saved.replaced);
        self.mark = next_mark(core, self.base);
        self.saved_taken = saved.taken;
        let mut free: Vec<PageNo> = std::mem::take(&mut self.stock);
        for run in self.taken.drain(saved.taken..) {
            free.extend((run.first.0..run.first.0 + run.len).map(PageNo));
        }
        self.values.retain(|_, index| *index < saved.taken);
        // A page may have gone back to the stock and come again.
        free.sort_unstable_by_key(|page| std::cmp::Reverse(page.0));
        free.dedup();
        self.stock = free;
    }

    /// The pages that belong to no tree, as runs.
    pub fn leftovers(&self) -> Vec<Run> {
        let mut pages: Vec<u32> = self.stock.iter().map(|page| page.0).collect();
        pages.sort_unstable();
        let mut runs: Vec<Run> = Vec::new();
        for page in pages {
            match runs.last_mut() {
                Some(run) if run.first.0 + run.len == page => run.len += 1,
                _ => runs.push(Run { first: PageNo(page), len: 1 }),
            }
        }
        runs
    }
}

/// A mark that no page carries. 0 is on those that no transaction has made.
fn next_mark(core: &Core, base: u64) -> u64 {
    let marks = &core.control().counters.marks;
    loop {
        let mark = marks.fetch_add(1, Relaxed).wrapping_add(base);
        if mark != 0 {
            return mark;
        }
    }
}

/// Takes `runs` runs of `pages` pages, and lists them in the same step as the transaction's.
fn list_runs(
    core: &Core,
    runs: u32,
    pages: u32,
    deadline: Option<Instant>,
    mut taken: impl FnMut(PageNo),
) -> Result<()> {
    let mut writer = Writer::lock(core, deadline)?;
    let made = &core.control().claim_made;
    let index = made.len.load(Relaxed);
    claim::secure_lists(&mut writer, runs as u64)?;
    let mut step = Step::begin(&mut writer);
    let mut firsts = Vec::with_capacity(runs as usize);
    for _ in 0..runs {
        match step.take(pages) {
            Ok(first) => firsts.push(first),
            // A few are better than none.
            Err(_) if !firsts.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    for (offset, &first) in firsts.iter().enumerate() {
        list_set(core, made, index + offset as u64, Run { first, len: pages })?;
    }
    step.store_shared(&made.len, index + firsts.len() as u64);
    crash_point("transaction.pages.listed");
    step.structure()?;
    firsts.into_iter().for_each(&mut taken);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Db;
    use crate::transaction::open::Open;

    /// A value's pages are extended where they are as long as the transaction has them for itself; what a step took and did not
    /// use comes back.
    #[test]
    fn the_pages_behind_a_value_belong_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::create(dir.path().join("a.ntdb")).unwrap();
        let core = &db.environment().core;
        let mut open = Open::begin(db.environment(), true, None).unwrap().unwrap();
        let value = open
            .change(|writer, _, _| {
                let mut step = Step::begin(writer);
                let first = step.take_for_value(100)?;
                step.structure()?;
                Ok(Run { first, len: 100 })
            })
            .unwrap();
        let extend = |open: &mut Open, value: Run, keep: bool| {
            open.change(|writer, _, _| {
                let mut step = Step::begin(writer);
                let more = step.extend_value(value, 10, 20)?;
                if keep {
                    step.structure()?;
                }
                Ok(more)
            })
            .unwrap()
        };
        let more = extend(&mut open, value, true);
        assert!((10..=20).contains(&more), "{more}");
        let value = Run { len: value.len + more, ..value };
        let dropped = extend(&mut open, value, false);
        assert!((10..=20).contains(&dropped), "{dropped}");
        assert_eq!(open.private().stock.len(), dropped as usize);
        assert_eq!(extend(&mut open, value, true), 0, "they are in the stock");
        let savepoint = open.savepoint();
        assert!(!open.private().owns_value(value.first));
        assert!(open.roll_back(savepoint));
        assert_eq!(open.private().taken.len(), 2);
        // Given up, all of it comes back.
        open.release(savepoint);
        let before = open.private().stock.len();
        open.change(|writer, _, _| {
            writer.private_tree().unwrap().saved_taken = 0;
            let mut step = Step::begin(writer);
            step.give_value(value, core.epoch())?;
            step.structure()
        })
        .unwrap();
        assert_eq!(open.private().stock.len(), before + value.len as usize);
        open.abort().unwrap();
        drop(open);
        assert!(db.check().unwrap().is_clean());
    }
}
