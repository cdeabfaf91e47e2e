//! Slot publication against readers: the words of `page::bucket`.
//!
//! A group of two slots whose keys all have the same tag, so that readers compare keys.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, Ordering::*};
use loom::thread;

use super::{Setting, explore};

const EMPTY: u64 = 0;
const DELETED: u64 = 1;
const TAG: u64 = 0x80;
const KEY: u64 = 7;
const OTHER: u64 = 8;

/// What the bucket does wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// The tag is stored before the offset.
    TagFirst,
    /// The offset is stored Relaxed.
    OffsetRelaxed,
    /// A new record is written over the one that it replaces.
    OverWrites,
    /// A reader that has found the key does not look whether the tag is still there.
    LooksOnce,
}

struct Page {
    tags: [AtomicU64; 2],
    offsets: [AtomicU64; 2],
    free: AtomicU64,
    /// Key and value of each record.
    records: [UnsafeCell<(u64, u64)>; 4],
    wrong: Wrong,
}

impl Page {
    /// Slot 0 holds `KEY` with value 1.
    fn new(wrong: Wrong) -> Self {
        let record = || UnsafeCell::new((0, 0));
        Self {
            tags: [AtomicU64::new(TAG), AtomicU64::new(EMPTY)],
            offsets: [AtomicU64::new(0), AtomicU64::new(u64::MAX)],
            free: AtomicU64::new(1),
            records: [UnsafeCell::new((KEY, 1)), record(), record(), record()],
            wrong,
        }
    }

    fn record(&self, offset: u64) -> (u64, u64) {
        // SAFETY: loom checks that nobody writes it meanwhile.
        self.records[offset as usize].with(|record| unsafe { *record })
    }

    fn offset_order(&self) -> Ordering {
        if self.wrong == Wrong::OffsetRelaxed { Relaxed } else { Release }
    }

    /// Writer: bytes that nobody can see yet.
    fn write_record(&self, key: u64, value: u64) -> u64 {
        let at = if self.wrong == Wrong::OverWrites { 0 } else { self.free.load(Relaxed) };
        self.free.store(at + 1, Relaxed);
        // SAFETY: loom checks that nobody reads it meanwhile.
        self.records[at as usize].with_mut(|record| unsafe { *record = (key, value) });
        at
    }

    fn insert(&self, slot: usize, key: u64, value: u64) {
        let offset = self.write_record(key, value);
        if self.wrong == Wrong::TagFirst {
            self.tags[slot].store(TAG, Release);
        }
        self.offsets[slot].store(offset, self.offset_order());
        self.tags[slot].store(TAG, Release);
    }

    fn update(&self, slot: usize, key: u64, value: u64) {
        let offset = self.write_record(key, value);
        self.offsets[slot].store(offset, self.offset_order());
    }

    fn delete(&self, slot: usize) {
        self.tags[slot].store(DELETED, Release);
    }

    fn find(&self, key: u64) -> Option<u64> {
        'anew: loop {
            let tags = [self.tags[0].load(Acquire), self.tags[1].load(Acquire)];
            for (slot, &tag) in tags.iter().enumerate() {
                if tag != TAG {
                    continue;
                }
                let offset = self.offsets[slot].load(Acquire);
                assert!(offset < 4, "a slot points outside the records");
                let (found, value) = self.record(offset);
                if found == key {
                    if self.wrong != Wrong::LooksOnce && self.tags[slot].load(Acquire) != tag {
                        continue 'anew;
                    }
                    return Some(value);
                }
            }
            return None;
        }
    }
}

/// What the writer does, and what a reader of `KEY` may find, in this order.
pub struct Story {
    pub act: fn(&Acts),
    pub states: &'static [Option<u64>],
}

/// The writer's hands.
pub struct Acts(Arc<Page>);

/// The key is updated in its slot, twice.
pub const UPDATES: Story = Story {
    act: |acts| {
        acts.0.update(0, KEY, 2);
        acts.0.update(0, KEY, 3);
    },
    states: &[Some(1), Some(2), Some(3)],
};

/// The key goes, and another one takes its slot.
pub const SLOT_RE_USED: Story = Story {
    act: |acts| {
        acts.0.delete(0);
        acts.0.insert(0, OTHER, 50);
    },
    states: &[Some(1), None],
};

/// The key goes and comes back in the same slot.
pub const KEY_RETURNS: Story = Story {
    act: |acts| {
        acts.0.delete(0);
        acts.0.insert(0, KEY, 2);
    },
    states: &[Some(1), None, Some(2)],
};

/// Another key comes into an empty slot, then the key goes and comes back.
pub const NEIGHBOUR: Story = Story {
    act: |acts| {
        acts.0.insert(1, OTHER, 50);
        acts.0.delete(0);
        acts.0.insert(0, KEY, 2);
    },
    states: &[Some(1), None, Some(2)],
};

/// A reader looks twice beside the writer; what it finds is among the states, and never goes back.
pub fn readers_see(setting: &Setting, story: Story, wrong: Wrong) -> usize {
    let (act, states) = (story.act, story.states);
    explore(setting, move || {
        let page = Arc::new(Page::new(wrong));
        let reader = {
            let page = Arc::clone(&page);
            thread::spawn(move || {
                let mut from = 0;
                for _ in 0..2 {
                    let found = page.find(KEY);
                    let later = states[from..].iter().position(|&state| state == found);
                    from += later.unwrap_or_else(|| panic!("{found:?} was found out of order"));
                }
            })
        };
        act(&Acts(Arc::clone(&page)));
        reader.join().unwrap();
        assert_eq!(page.find(KEY), *states.last().unwrap());
    })
}
