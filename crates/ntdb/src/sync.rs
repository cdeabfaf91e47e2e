//! What the lock and the pins are built on: atomics, a clock, sleeping, knowing forked children.
//!
//! A module of its own so that it can be replaced: `tests/models.rs` compiles the very files of the
//! lock and the pins against a stand-in for this one, made of loom's atomics, and then takes them
//! through every order of events that the memory model allows.

use std::time::Instant;

pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

pub use crate::storage::{fork, futex};

/// Time since a wait began.
#[derive(Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Begins now.
    #[inline]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Nanoseconds since the start.
    #[inline]
    pub fn elapsed_ns(&mut self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// How long after the start `deadline` lies.
    pub fn until_ns(&self, deadline: Instant) -> u64 {
        let wait = deadline.saturating_duration_since(self.0);
        u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Lets time pass without giving up the processor and without touching shared memory.
    pub fn pause(&mut self, pause_ns: u64) {
        let until_ns = self.elapsed_ns().saturating_add(pause_ns);
        while self.elapsed_ns() < until_ns {
            std::hint::spin_loop();
        }
    }
}

/// Stores `value` (Release) and then passes a sequentially consistent fence.
#[inline]
pub fn store_then_fence(word: &AtomicU64, value: u64) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // On x86 an exchange is a full fence, at half the price of a store and an MFENCE. The
        // compiler has to be told as well: an exchange alone would not keep it from moving later
        // relaxed loads up.
        word.swap(value, Ordering::SeqCst);
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        word.store(value, Ordering::Release);
        fence(Ordering::SeqCst);
    }
}

/// What comes after is not done before a read-modify-write operation that has just been made, in the order that all see.
#[inline]
pub fn fence_after_exchange() {
    // On x86 every locked instruction is a full fence already; only the compiler has to be told.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    fence(Ordering::SeqCst);
}

/// The processor that this thread runs on, or has just run on.
pub fn current_cpu() -> u32 {
    // SAFETY: no arguments. An error gives a number that no processor has.
    unsafe { libc::sched_getcpu() as u32 }
}
