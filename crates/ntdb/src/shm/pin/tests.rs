//! Pins among threads and forked processes.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::types::{Era, SlotId};

const ME: SlotId = SlotId(3);

/// A pin table in memory of its own. It can be made inaccessible, so that a stray access is a crash.
struct Place {
    base: *mut u8,
    bytes: usize,
    slots: usize,
}

impl Place {
    fn new(slots: usize) -> Self {
        let bytes = ((slots + 1) * size_of::<PinSlot>()).next_multiple_of(4096);
        // SAFETY: a fresh mapping disturbs nothing.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert!(base != libc::MAP_FAILED);
        Self { base: base.cast(), bytes, slots }
    }

    /// The table; mark and era lie in the line after the slots.
    fn table(&self) -> PinTable {
        // SAFETY: zeroed memory of the right size, which is never unmapped.
        unsafe {
            let words =
                self.base.add(self.slots * size_of::<PinSlot>()).cast::<crate::sync::AtomicU64>();
            PinTable::new(self.base.cast(), self.slots, words, words.add(1))
        }
    }

    fn attach(&self) -> Box<Attachment> {
        Attachment::new(self.table(), ME).unwrap()
    }

    fn forbid(&self) {
        // SAFETY: the mapping is this test's.
        assert_eq!(unsafe { libc::mprotect(self.base.cast(), self.bytes, libc::PROT_NONE) }, 0);
    }

    /// Slots that somebody owns.
    fn owned(&self) -> Vec<usize> {
        let table = self.table();
        (0..self.slots).filter(|&index| table.owner(index).is_some()).collect()
    }
}

#[test]
fn a_slot_is_one_cache_line() {
    assert_eq!((size_of::<PinSlot>(), align_of::<PinSlot>()), (64, 64));
}

#[test]
fn eras_begin_at_one_and_a_pin_holds_the_era_it_began_in() {
    let table = Place::new(8).table();
    assert_eq!(table.era(), Era(1));
    let a = table.claim(ME, ClaimFor::Thread(7)).unwrap();
    let b = table.claim(SlotId(9), ClaimFor::Thread(8)).unwrap();
    assert_eq!((a, b), (0, 1));
    assert_eq!(table.min_pinned(), None);
    assert_eq!(table.pin(b), Era(1));
    assert_eq!(table.advance(), Era(2));
    assert_eq!(table.pin(a), Era(2));
    let oldest = OldestPin { era: Era(1), process: SlotId(9), thread: 8 };
    assert_eq!(table.min_pinned(), Some(oldest));
    assert_eq!(table.era_of_retirement(), Era(2));
    table.unpin(b);
    let oldest = OldestPin { era: Era(2), process: ME, thread: 7 };
    assert_eq!(table.min_pinned(), Some(oldest));
    table.unpin(a);
    assert_eq!(table.min_pinned(), None);
}

#[test]
fn the_lowest_free_slot_is_claimed_and_some_are_kept_for_processes() {
    let place = Place::new(8);
    let table = place.table();
    let thread = ClaimFor::Thread(1);
    let claimed: Vec<_> = (0..4).map(|_| table.claim(ME, thread).unwrap()).collect();
    assert_eq!(claimed, [0, 1, 2, 3]);
    assert_eq!(table.claim(ME, thread), None);
    assert_eq!(table.claim(ME, ClaimFor::Process), Some(4));
    table.free(1);
    assert_eq!(table.claim(ME, ClaimFor::Process), Some(1));
    for index in 5..8 {
        assert_eq!(table.claim(ME, ClaimFor::Process), Some(index));
    }
    assert_eq!(table.claim(ME, ClaimFor::Process), None);
}

#[test]
fn slots_of_a_dead_process_are_freed_and_no_others() {
    let place = Place::new(16);
    let table = place.table();
    let dead = SlotId(5);
    let mine = table.claim(ME, ClaimFor::Thread(1)).unwrap();
    let theirs: Vec<_> = (0..3).map(|_| table.claim(dead, ClaimFor::Process).unwrap()).collect();
    table.pin(theirs[1]);
    table.advance();
    table.pin(mine);
    assert_eq!(table.min_pinned().unwrap().process, dead);
    assert_eq!(table.release_process(dead), 3);
    assert_eq!(table.min_pinned().unwrap().process, ME);
    assert_eq!(table.release_process(dead), 0);
    assert_eq!(place.owned(), [mine]);
}

#[test]
fn the_mark_comes_down_after_a_crowd_and_never_below_a_pin() {
    let place = Place::new(512);
    let table = place.table();
    let crowd: Vec<_> = (0..200).map(|_| table.claim(ME, ClaimFor::Thread(1)).unwrap()).collect();
    assert_eq!(table.scanned(), 200);
    for &index in &crowd {
        if index != 60 {
            table.free(index);
        }
    }
    table.pin(60);
    assert_eq!(table.min_pinned().unwrap().era, Era(1));
    assert_eq!(table.scanned(), 61);
    assert_eq!(table.min_pinned().unwrap().era, Era(1));
    table.free(60);
    assert_eq!(table.min_pinned(), None);
    assert_eq!(table.scanned(), 0);
    let index = table.claim(ME, ClaimFor::Thread(1)).unwrap();
    table.pin(index);
    assert_eq!(table.min_pinned().unwrap().era, Era(1));
}

#[test]
fn nested_pins_share_the_first() {
    let place = Place::new(8);
    let attachment = place.attach();
    let outer = attachment.pin();
    attachment.table().advance();
    let inner = attachment.pin();
    assert_eq!(attachment.table().min_pinned().unwrap().era, Era(1));
    // In any order.
    drop(outer);
    assert_eq!(attachment.table().min_pinned().unwrap().era, Era(1));
    drop(inner);
    assert_eq!(attachment.table().min_pinned(), None);
    let _again = attachment.pin();
    let oldest = attachment.table().min_pinned().unwrap();
    assert_eq!((oldest.era, oldest.process), (Era(2), ME));
    // SAFETY: no arguments, cannot fail.
    assert_eq!(oldest.thread, unsafe { libc::gettid() } as u32);
    // Two shared ones and ours.
    assert_eq!(place.owned().len(), 3);
}

#[test]
fn one_thread_uses_several_environments_by_turns() {
    let places: Vec<_> = (0..4).map(|_| Place::new(8)).collect();
    let attachments: Vec<_> = places.iter().map(Place::attach).collect();
    for round in 0..100 {
        let a = &attachments[round % 4];
        let b = &attachments[(round + 1) % 4];
        let _pin_a = a.pin();
        let _pin_b = b.pin();
        let _pin_a = a.pin();
        let pinned = attachments.iter().filter(|each| each.table().min_pinned().is_some()).count();
        assert_eq!(pinned, 2);
    }
    for place in &places {
        assert_eq!(place.owned().len(), 3);
    }
}

#[test]
fn ten_thousand_threads_leave_no_slot_behind() {
    let place = Place::new(256);
    let attachment = place.attach();
    for _ in 0..625 {
        thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let _pin = attachment.pin();
                    assert!(attachment.table().min_pinned().is_some());
                });
            }
        });
    }
    // A scope ends when its closures have; their thread-locals may go a moment later.
    let start = Instant::now();
    while place.owned().len() > 2 {
        assert!(start.elapsed() < Duration::from_secs(10), "left behind: {:?}", place.owned());
        thread::yield_now();
    }
    assert_eq!(attachment.table().min_pinned(), None);
}

#[test]
fn a_closed_environment_is_never_touched_again() {
    let place = Place::new(16);
    let attachment = place.attach();
    let (pinned, is_pinned) = channel();
    let (close, closed) = channel::<()>();
    // Borrowed for ever, as far as the thread is concerned; it drops its guard before the end.
    let attachment = std::sync::Arc::new(attachment);
    let thread = {
        let attachment = std::sync::Arc::clone(&attachment);
        thread::spawn(move || {
            drop(attachment.pin());
            drop(attachment);
            pinned.send(()).unwrap();
            closed.recv().unwrap();
            // Now the thread ends, and would give its slot back.
        })
    };
    is_pinned.recv().unwrap();
    drop(attachment.pin());
    drop(attachment);
    assert_eq!(place.owned(), [0_usize; 0]);
    place.forbid();
    close.send(()).unwrap();
    thread.join().unwrap();
    // This thread, too, remembers a slot in there; a new environment makes it forget.
    let other = Place::new(16);
    let attachment = other.attach();
    drop(attachment.pin());
}

#[test]
fn opening_again_and_again_does_not_pile_up_memories() {
    for _ in 0..2_000 {
        let place = Place::new(8);
        let attachment = place.attach();
        drop(attachment.pin());
        assert!(super::thread::remembered() <= 2);
        drop(attachment);
        // SAFETY: nothing refers to it any more.
        unsafe { libc::munmap(place.base.cast(), place.bytes) };
    }
}

#[test]
fn a_full_table_is_no_place_to_attach() {
    let place = Place::new(4);
    let first = place.attach();
    let second = place.attach();
    assert!(Attachment::new(place.table(), SlotId(1)).is_none());
    drop((first, second));
    let table = place.table();
    for _ in 0..3 {
        table.claim(SlotId(8), ClaimFor::Process).unwrap();
    }
    assert!(Attachment::new(place.table(), SlotId(1)).is_none());
    assert_eq!(place.owned().len(), 3, "the one slot that it got was given back");
}

#[test]
fn threads_without_a_slot_share_and_the_oldest_pin_gets_on() {
    // Room for the process's two and no thread.
    let place = Place::new(2);
    let attachment = place.attach();
    let era = |attachment: &Attachment| attachment.table().min_pinned().map(|pin| pin.era);

    let first = attachment.pin();
    attachment.table().advance();
    let second = attachment.pin();
    attachment.table().advance();
    let third = attachment.pin();
    assert_eq!(era(&attachment), Some(Era(1)));
    drop(first);
    // The second and the third share the newer slot, which was pinned in era 2.
    assert_eq!(era(&attachment), Some(Era(2)));
    attachment.table().advance();
    let fourth = attachment.pin();
    drop(second);
    assert_eq!(era(&attachment), Some(Era(2)));
    drop(third);
    assert_eq!(era(&attachment), Some(Era(4)));
    drop(fourth);
    assert_eq!(era(&attachment), None);
}

#[test]
fn however_many_share_and_overlap_the_oldest_pin_gets_on() {
    let place = Place::new(2);
    let attachment = place.attach();
    let stop = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // Each holds one pin all the time, so that there is never a moment without any.
                let mut pin = attachment.pin();
                while stop.load(Relaxed) == 0 {
                    let next = attachment.pin();
                    pin = next;
                }
                drop(pin);
            });
        }
        let start = Instant::now();
        for _ in 0..20 {
            let now = attachment.table().advance();
            while attachment.table().min_pinned().is_some_and(|pin| pin.era < now) {
                if start.elapsed() > Duration::from_secs(20) {
                    stop.store(1, Relaxed);
                    panic!("an old pin stays");
                }
                thread::yield_now();
            }
        }
        stop.store(1, Relaxed);
    });
    assert_eq!(attachment.table().min_pinned(), None);
}

#[test]
fn a_thread_without_a_slot_gets_one_when_there_is_one() {
    let place = Place::new(6);
    let attachment = place.attach();
    let taken = place.table().claim(SlotId(1), ClaimFor::Thread(1)).unwrap();
    assert_eq!(taken, 2);
    drop(attachment.pin());
    assert_eq!(place.owned(), [0, 1, 2]);
    place.table().free(taken);
    for _ in 0..1_000 {
        drop(attachment.pin());
    }
    assert_eq!(place.owned(), [0, 1, 2]);
    assert_eq!(place.table().owner(2), Some(ME));
}

#[test]
fn a_guard_that_outlives_its_threads_memory_of_it_still_works() {
    thread_local! {
        static LATE: std::cell::RefCell<Option<PinGuard<'static>>> =
            const { std::cell::RefCell::new(None) };
    }
    let place = Place::new(16);
    let attachment: &'static Attachment = Box::leak(place.attach());
    thread::spawn(|| {
        // Initialised first, destroyed last or first as the system likes: both must work.
        LATE.with(|late| drop(late.borrow_mut().take()));
        let guard = attachment.pin();
        LATE.with(|late| *late.borrow_mut() = Some(guard));
    })
    .join()
    .unwrap();
    assert_eq!(attachment.table().min_pinned(), None);
}

/// Runs `body` in a forked child and demands that it succeeds.
fn in_child(body: impl FnOnce() -> bool) {
    before_fork();
    // SAFETY: the child does not use locks that other threads may have held, but for the
    // allocator's, which the C library keeps usable.
    let child = unsafe { libc::fork() };
    after_fork();
    if child == 0 {
        let ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!ok)) }
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
}

#[test]
fn a_forked_child_leaves_its_parents_pins_alone() {
    let place = Place::new(16);
    let attachment = Box::into_raw(place.attach());
    // SAFETY: freed in the child only, and there after the guard.
    let shared: &Attachment = unsafe { &*attachment };
    let guard = shared.pin();
    assert!(!guard.is_stale());
    let mut inherited = Some(guard);
    in_child(|| {
        let guard = inherited.take().unwrap();
        let stale = guard.is_stale();
        drop(guard);
        let before = place.owned();
        // The child attaches for itself, on the same table.
        let own = Attachment::new(place.table(), SlotId(7)).unwrap();
        let fresh = own.pin();
        let separate = !fresh.is_stale() && place.owned().len() == before.len() + 3;
        drop(fresh);
        drop(own);
        // SAFETY: made by `into_raw`, and the guard that borrowed it is gone.
        drop(unsafe { Box::from_raw(attachment) });
        stale && separate && before.len() == 3 && place.owned() == before
    });
    assert!(!inherited.as_ref().unwrap().is_stale());
    assert_eq!(shared.table().min_pinned().unwrap().process, ME);
    assert_eq!(place.owned().len(), 3);
    drop(inherited);
    assert_eq!(shared.table().min_pinned(), None);
}

/// Pages that are replaced, retired and re-used as fast as possible under the eyes of readers.
struct Pages {
    link: AtomicU32,
    pages: Vec<[AtomicU64; 8]>,
    stop: AtomicU32,
    torn: AtomicU64,
    reads: AtomicU64,
}

impl Pages {
    fn new() -> Self {
        Self {
            link: AtomicU32::new(0),
            pages: (0..64).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect(),
            stop: AtomicU32::new(0),
            torn: AtomicU64::new(0),
            reads: AtomicU64::new(0),
        }
    }

    fn read(&self, attachment: &Attachment, pins: bool) {
        while self.stop.load(Relaxed) == 0 {
            let _pin = pins.then(|| attachment.pin());
            let page = &self.pages[self.link.load(Acquire) as usize];
            let first = page[0].load(Relaxed);
            let same = (0..4).all(|_| page.iter().all(|word| word.load(Relaxed) == first));
            self.reads.fetch_add(1, Relaxed);
            if !same {
                self.torn.fetch_add(1, Relaxed);
            }
        }
    }

    fn write(&self, table: &PinTable, for_how_long: Duration) {
        let start = Instant::now();
        let mut free: Vec<u32> = (1..self.pages.len() as u32).collect();
        let mut retired = std::collections::VecDeque::new();
        let mut reused = 0_u64;
        for value in 1_u64.. {
            if value % 64 == 0 && (start.elapsed() > for_how_long || self.torn.load(Relaxed) > 0) {
                break;
            }
            while free.is_empty() {
                // Nobody waits for a pin but this test, which wants to re-use at any price.
                table.advance();
                let oldest = table.min_pinned().map_or(Era(u64::MAX), |pin| pin.era);
                while let Some(&(page, era)) = retired.front() {
                    if era >= oldest {
                        break;
                    }
                    free.push(page);
                    reused += 1;
                    retired.pop_front();
                }
            }
            let page = free.pop().unwrap();
            for word in &self.pages[page as usize] {
                word.store(value, Relaxed);
            }
            let old = self.link.swap(page, Release);
            retired.push_back((old, table.era_of_retirement()));
            if value % 4 == 0 {
                table.advance();
            }
        }
        self.stop.store(1, Relaxed);
        assert!(reused > 0);
    }
}

fn reuse_under_pins(readers: usize, slots: usize, pins: bool, for_how_long: Duration) -> Pages {
    let place = Place::new(slots);
    let attachment = place.attach();
    let pages = Pages::new();
    thread::scope(|scope| {
        for _ in 0..readers {
            scope.spawn(|| pages.read(&attachment, pins));
        }
        pages.write(attachment.table(), for_how_long);
    });
    pages
}

#[test]
fn no_page_is_reused_under_a_pin() {
    let pages = reuse_under_pins(3, 64, true, Duration::from_millis(1_500));
    assert!(pages.reads.load(Relaxed) > 0);
    assert_eq!(pages.torn.load(Relaxed), 0);
}

#[test]
fn no_page_is_reused_under_a_shared_pin() {
    let pages = reuse_under_pins(3, 2, true, Duration::from_millis(1_500));
    assert!(pages.reads.load(Relaxed) > 0);
    assert_eq!(pages.torn.load(Relaxed), 0);
}

#[test]
fn without_pins_the_test_above_would_fail() {
    let pages = reuse_under_pins(3, 64, false, Duration::from_secs(30));
    assert!(pages.torn.load(Relaxed) > 0, "the stress test could not notice anything");
}
