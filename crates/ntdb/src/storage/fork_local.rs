//! A mutex that a forked child finds free.
//!
//! A child inherits every mutex as it was at the fork, perhaps locked by a thread that it does not have. What lies behind
//! these mutexes are caches that can be made anew: a child that finds another fork generation begins with an empty one and
//! leaks its parent's.

use std::sync::atomic::{AtomicPtr, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::fork;

struct Entry<T> {
    generation: u64,
    value: Mutex<T>,
}

/// See the module's description.
pub struct ForkLocal<T> {
    entry: AtomicPtr<Entry<T>>,
}

impl<T> std::fmt::Debug for ForkLocal<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ForkLocal")
    }
}

impl<T: Default> Default for ForkLocal<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: Default> ForkLocal<T> {
    /// Begins with `value`, in this process.
    pub fn new(value: T) -> ForkLocal<T> {
        let entry = Entry { generation: fork::generation(), value: Mutex::new(value) };
        ForkLocal { entry: AtomicPtr::new(Box::into_raw(Box::new(entry))) }
    }

    /// Locks the value of this process.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.mutex().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the value of this process if nobody has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.mutex().try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Locks the value of this process; `None` if another thread has it until `deadline`.
    pub fn lock_until(&self, deadline: Option<Instant>) -> Option<MutexGuard<'_, T>> {
        let Some(deadline) = deadline else { return Some(self.lock()) };
        // Asked again and again, since the library's mutex knows no time.
        let mut pause = Duration::from_micros(20);
        loop {
            if let Some(guard) = self.try_lock() {
                return Some(guard);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn mutex(&self) -> &Mutex<T> {
        let mut current = self.entry.load(Acquire);
        // SAFETY: the pointer comes from a box that is freed only with `self`, or leaked.
        if unsafe { &*current }.generation != fork::generation() {
            let fresh = Box::into_raw(Box::new(Entry {
                generation: fork::generation(),
                value: Mutex::new(T::default()),
            }));
            match self.entry.compare_exchange(current, fresh, AcqRel, Acquire) {
                Ok(_) => current = fresh,
                Err(other) => {
                    // SAFETY: nobody else has seen it.
                    drop(unsafe { Box::from_raw(fresh) });
                    current = other;
                }
            }
        }
        // SAFETY: as above.
        &unsafe { &*current }.value
    }
}

impl<T> Drop for ForkLocal<T> {
    fn drop(&mut self) {
        // SAFETY: from a box; nobody uses `self` any more.
        let entry = unsafe { Box::from_raw(*self.entry.get_mut()) };
        if entry.generation != fork::generation() {
            // Perhaps locked by a thread of the parent; its value belongs to the parent.
            std::mem::forget(entry);
        }
    }
}

// SAFETY: as `Mutex<T>`, behind a pointer that is only replaced as a whole.
unsafe impl<T: Send> Send for ForkLocal<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for ForkLocal<T> {}
