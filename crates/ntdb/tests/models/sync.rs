//! Stands in for the module of this name in the library: loom's atomics, a clock that counts looks, a kernel of one queue.

use std::sync::atomic::{AtomicBool, AtomicU64 as RealAtomicU64};
use std::time::Instant;

pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence as loom_fence};

/// Off: fences do nothing.
pub static FENCES: AtomicBool = AtomicBool::new(true);
/// What each look at the clock adds to it, in nanoseconds.
pub static TICK_NS: RealAtomicU64 = RealAtomicU64::new(0);

pub fn fence(order: Ordering) {
    if FENCES.load(Ordering::Relaxed) {
        loom_fence(order);
    }
}

pub fn store_then_fence(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Release);
    fence(Ordering::SeqCst);
}

pub fn fence_after_exchange() {
    fence(Ordering::SeqCst);
}

/// Counts looks instead of time.
pub struct Stopwatch(u64);

impl Stopwatch {
    pub fn start() -> Self {
        Self(0)
    }

    pub fn elapsed_ns(&mut self) -> u64 {
        self.0 += TICK_NS.load(Ordering::Relaxed);
        self.0
    }

    pub fn until_ns(&self, _deadline: Instant) -> u64 {
        0
    }

    pub fn pause(&mut self, _pause_ns: u64) {
        loom::thread::yield_now();
    }
}

/// Nobody is displaced in the model.
pub fn current_cpu() -> u32 {
    1
}

pub mod fork {
    pub fn generation() -> u64 {
        1
    }

    pub fn generation_if_armed() -> u64 {
        1
    }
}

/// The kernel's part: comparing and going to sleep are one step.
pub mod futex {
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
    use std::time::Duration;

    use loom::sync::{Arc, Condvar, Mutex, atomic::AtomicU32};

    #[derive(Debug, PartialEq, Eq, Clone, Copy)]
    pub enum Wake {
        Woken,
        Changed,
        TimedOut,
    }

    /// Naps, which nobody has promised to end, are shorter than this.
    const NAPS_BELOW: Duration = Duration::from_micros(500);
    /// On: every wait times out at once. Off: only naps do, so that a lost wake-up is a deadlock.
    pub static TIME_OUTS: AtomicBool = AtomicBool::new(false);
    /// How many have been woken, in all executions of a model.
    pub static WOKEN: AtomicUsize = AtomicUsize::new(0);
    /// Off: nobody is woken.
    pub static WAKE_UPS: AtomicBool = AtomicBool::new(true);

    struct Sleeper {
        word: usize,
        woken: Arc<(Mutex<bool>, Condvar)>,
    }

    loom::lazy_static! {
        static ref QUEUE: Mutex<VecDeque<Sleeper>> = Mutex::new(VecDeque::new());
    }

    pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> Wake {
        let is_nap = timeout.is_some_and(|timeout| timeout < NAPS_BELOW);
        if is_nap || TIME_OUTS.load(Relaxed) {
            loom::thread::yield_now();
            return Wake::TimedOut;
        }
        let woken = Arc::new((Mutex::new(false), Condvar::new()));
        {
            let mut queue = QUEUE.lock().unwrap();
            if word.load(Relaxed) != expected {
                return Wake::Changed;
            }
            queue.push_back(Sleeper {
                word: std::ptr::from_ref(word).addr(),
                woken: Arc::clone(&woken),
            });
        }
        let mut up = woken.0.lock().unwrap();
        while !*up {
            up = woken.1.wait(up).unwrap();
        }
        Wake::Woken
    }

    pub fn wake(word: &AtomicU32, count: u32) -> usize {
        let count = if WAKE_UPS.load(Relaxed) { count } else { 0 };
        let mut woken = 0;
        let mut queue = QUEUE.lock().unwrap();
        let mut index = 0;
        while index < queue.len() && woken < count as usize {
            if queue[index].word == std::ptr::from_ref(word).addr() {
                let sleeper = queue.remove(index).unwrap();
                *sleeper.woken.0.lock().unwrap() = true;
                sleeper.woken.1.notify_one();
                woken += 1;
            } else {
                index += 1;
            }
        }
        WOKEN.fetch_add(woken, Relaxed);
        woken
    }
}
