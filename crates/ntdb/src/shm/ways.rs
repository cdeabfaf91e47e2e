//! Which ways updates went, counted: what a reserve is for shows here.

use std::sync::atomic::Ordering::Relaxed;

use super::layout::Control;

/// What an update, or an append to what there is, took. The dearest counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Way {
    /// The new record went into the page that has the old one, or the bytes behind the value.
    #[default]
    Stayed,
    /// The page was frozen, or not the transaction's own, and was copied before.
    Copied,
    /// The page, or an overflow chain, was rebuilt without its dead records before.
    Compacted,
    /// The bucket was split before, or got another overflow page.
    Split,
    /// The value went to other pages than before.
    Moved,
}

/// Ways besides [`Way::Stayed`].
pub const WAYS: usize = 4;

/// Counts of updates, by their way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ways(pub [u64; WAYS + 1]);

impl Ways {
    /// Counts one more.
    #[inline]
    pub fn count(&mut self, way: Way) {
        self.0[way as usize] += 1;
    }

    /// Adds these to the shared counts. The caller holds the writer lock.
    pub fn publish(&self, control: &Control) {
        let [stayed, others @ ..] = self.0;
        let note = &control.note;
        note.stayed.store(note.stayed.load(Relaxed) + stayed, Relaxed);
        for (count, more) in control.updates.0.iter().zip(others) {
            count.store(count.load(Relaxed) + more, Relaxed);
        }
    }

    /// The shared counts.
    pub fn of(control: &Control) -> Ways {
        let mut ways = Ways::default();
        ways.0[0] = control.note.stayed.load(Relaxed);
        for (count, shared) in ways.0[1..].iter_mut().zip(&control.updates.0) {
            *count = shared.load(Relaxed);
        }
        ways
    }
}

/// Counts an update that stayed in its page. The caller holds the writer lock.
#[inline(always)]
pub fn count_stayed(control: &Control) {
    let stayed = &control.note.stayed;
    stayed.store(stayed.load(Relaxed) + 1, Relaxed);
}

/// Counts an update. The caller holds the writer lock.
pub fn count(control: &Control, way: Way) {
    if way == Way::Stayed {
        return count_stayed(control);
    }
    let count = &control.updates.0[way as usize - 1];
    count.store(count.load(Relaxed) + 1, Relaxed);
}
