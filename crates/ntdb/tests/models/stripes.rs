//! Key locks against writers: the words of `shm::stripe`, `api::key_lock` and `Db::write_lock`, with the real writer lock.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering::*};
use loom::thread;

use super::lock::{Acquired, RobustLock};
use super::types::SlotId;
use super::{Setting, explore};

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// Who has taken a stripe does not pass through the writer lock.
    NoPass,
    /// Writers look at the stripe before they take the writer lock.
    LooksEarly,
    /// The owner's thread is stored after its process, in a word of its own.
    TwoWords,
    /// The word of a new owner in the dead one's slot is the same.
    NoGeneration,
}

const OWNER: u64 = 0xffff;
const GENERATION_ONE: u64 = 1 << 16;
const GENERATION: u64 = 0x7fff << 16;

/// Owner's process, generation and thread in one word.
struct Stripe {
    word: AtomicU64,
    /// For the wrong way.
    thread: AtomicU64,
    wrong: Wrong,
}

#[derive(Clone, Copy)]
struct Me {
    process: u64,
    thread: u64,
}

#[derive(PartialEq, Eq, Debug)]
enum Holder {
    None,
    Me,
    Another,
}

impl Stripe {
    fn new(wrong: Wrong) -> Self {
        Self { word: AtomicU64::new(0), thread: AtomicU64::new(0), wrong }
    }

    fn holder(&self, me: Me) -> Holder {
        let word = self.word.load(Acquire);
        if word & OWNER == 0 {
            return Holder::None;
        }
        let thread =
            if self.wrong == Wrong::TwoWords { self.thread.load(Relaxed) } else { word >> 32 };
        if word & OWNER == me.process && thread == me.thread { Holder::Me } else { Holder::Another }
    }

    fn try_acquire(&self, me: Me) -> bool {
        if self.holder(me) == Holder::Me {
            return true;
        }
        let mut word = self.word.load(Relaxed);
        while word & OWNER == 0 {
            let generation = word.wrapping_add(GENERATION_ONE) & GENERATION;
            let generation = if self.wrong == Wrong::NoGeneration { 0 } else { generation };
            let taken = me.thread << 32 | generation | me.process;
            match self.word.compare_exchange(word, taken, AcqRel, Relaxed) {
                Ok(_) => {
                    if self.wrong == Wrong::TwoWords {
                        self.thread.store(me.thread, Relaxed);
                    }
                    return true;
                }
                Err(now) => word = now,
            }
        }
        false
    }

    fn release(&self) {
        if self.wrong == Wrong::TwoWords {
            self.thread.store(0, Relaxed);
        }
        let word = self.word.load(Relaxed);
        self.replace(word);
    }

    /// Frees the stripe if its word is still as it was when its owner was found dead.
    fn replace(&self, seen: u64) -> bool {
        self.word.compare_exchange(seen, seen & GENERATION, AcqRel, Relaxed).is_ok()
    }
}

struct Shared {
    writer_lock: RobustLock,
    stripe: Stripe,
    /// The key's value. An atomic, since its readers take no lock.
    value: AtomicU64,
}

const ALIVE: &dyn Fn(SlotId) -> bool = &|_| true;

impl Shared {
    fn lock(&self, me: Me) {
        let acquired = self.writer_lock.acquire(SlotId(me.process as u16), None, ALIVE);
        assert_eq!(acquired, Ok(Acquired::Clean));
    }

    fn unlock(&self, me: Me) {
        self.writer_lock.release(SlotId(me.process as u16));
    }

    /// A single write, given up if the key is locked. Whether it was done.
    fn write(&self, me: Me) -> bool {
        let early = self.stripe.wrong == Wrong::LooksEarly;
        let mut foreign = early && self.stripe.holder(me) == Holder::Another;
        self.lock(me);
        foreign |= !early && self.stripe.holder(me) == Holder::Another;
        if !foreign {
            self.value.store(self.value.load(Relaxed) + 10, Relaxed);
        }
        self.unlock(me);
        !foreign
    }

    /// A read-modify-write under the key lock, if it is to be had.
    fn read_modify_write(&self, me: Me) -> bool {
        if !self.stripe.try_acquire(me) {
            return false;
        }
        if self.stripe.wrong != Wrong::NoPass {
            self.lock(me);
            self.unlock(me);
        }
        let value = self.value.load(Relaxed);
        self.lock(me);
        assert_eq!(self.stripe.holder(me), Holder::Me);
        self.value.store(value + 1, Relaxed);
        self.unlock(me);
        assert_eq!(self.value.load(Relaxed), value + 1, "a foreign write beside the key lock");
        self.stripe.release();
        true
    }
}

/// One who holds the key lock sees no foreign write to the key.
pub fn key_lock_excludes_writers(setting: &Setting, wrong: Wrong) -> usize {
    explore(setting, move || {
        let shared = Arc::new(Shared {
            writer_lock: RobustLock::new(),
            stripe: Stripe::new(wrong),
            value: AtomicU64::new(0),
        });
        let writer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.write(Me { process: 1, thread: 1 }))
        };
        let locked = shared.read_modify_write(Me { process: 2, thread: 1 });
        let wrote = writer.join().unwrap();
        let expected = u64::from(locked) + 10 * u64::from(wrote);
        assert_eq!(shared.value.load(Relaxed), expected, "a lost update");
    })
}

/// Two threads of a process want the stripe of a dead one, one of whose threads had the number of one of them.
pub fn siblings_exclude_each_other(setting: &Setting, wrong: Wrong) -> usize {
    explore(setting, move || {
        let stripe = Arc::new(Stripe::new(wrong));
        let inside = Arc::new(AtomicU64::new(0));
        let dead = Me { process: 1, thread: 2 };
        assert!(stripe.try_acquire(dead));
        assert!(stripe.replace(stripe.word.load(Relaxed)));
        let body = |stripe: &Stripe, inside: &AtomicU64, thread| {
            if stripe.try_acquire(Me { process: 2, thread }) {
                assert_eq!(inside.fetch_add(1, AcqRel), 0, "two hold the key lock");
                inside.fetch_sub(1, AcqRel);
                stripe.release();
            }
        };
        let sibling = {
            let (stripe, inside) = (Arc::clone(&stripe), Arc::clone(&inside));
            thread::spawn(move || body(&stripe, &inside, 2))
        };
        body(&stripe, &inside, 1);
        sibling.join().unwrap();
    })
}

/// A waiter finds an owner dead, and is held up; meanwhile the dead one's slot is repaired and given to a new process, which
/// takes the same stripe.
pub fn late_waiter_robs_nobody(setting: &Setting, wrong: Wrong) -> usize {
    explore(setting, move || {
        let stripe = Arc::new(Stripe::new(wrong));
        // Whether the process in slot 1 is alive.
        let alive = Arc::new(AtomicU64::new(0));
        let inside = Arc::new(AtomicU64::new(0));
        // The new process's thread has the dead one's number.
        let dead = Me { process: 1, thread: 1 };
        assert!(stripe.try_acquire(dead));
        let enter = |stripe: &Stripe, inside: &AtomicU64, me| {
            if stripe.try_acquire(me) {
                assert_eq!(inside.fetch_add(1, AcqRel), 0, "two hold the key lock");
                inside.fetch_sub(1, AcqRel);
                stripe.release();
            }
        };
        let waiter = {
            let (stripe, alive, inside) =
                (Arc::clone(&stripe), Arc::clone(&alive), Arc::clone(&inside));
            thread::spawn(move || {
                // Acquire: a new owner's word shows that it lives.
                let seen = stripe.word.load(Acquire);
                if seen & OWNER == 1 && alive.load(Acquire) == 0 {
                    stripe.replace(seen);
                }
                enter(&stripe, &inside, Me { process: 3, thread: 1 });
            })
        };
        // Repair, with the slot still held by nobody; then its new owner.
        let seen = stripe.word.load(Acquire);
        if seen & OWNER == 1 {
            stripe.replace(seen);
        }
        alive.store(1, Release);
        enter(&stripe, &inside, dead);
        waiter.join().unwrap();
    })
}
