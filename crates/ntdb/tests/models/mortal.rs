//! Threads that stand for processes which may be killed between any two of their stores.
//!
//! What such a process has stored is there for others, in the order of the program: a killed process ends between two
//! instructions, and the kernel, through which others learn of the death, orders what it did before what they do. In the
//! models they learn of it by joining the thread.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The process has been killed.
#[derive(Debug)]
pub struct Killed;

/// How many steps a process has to live.
pub struct Life {
    steps_left: Cell<usize>,
}

impl Life {
    /// Killed after `steps` steps.
    pub fn of(steps: usize) -> Self {
        Self { steps_left: Cell::new(steps) }
    }

    /// Not killed.
    pub fn long() -> Self {
        Self::of(usize::MAX)
    }

    /// To be called before each store.
    pub fn step(&self) -> Result<(), Killed> {
        let left = self.steps_left.get();
        self.steps_left.set(left.checked_sub(1).ok_or(Killed)?);
        Ok(())
    }
}

/// Says to the outside of the model that a process came to its end alive, so that longer lives need no trying.
#[derive(Clone, Default)]
pub struct Survived(Arc<AtomicBool>);

impl Survived {
    pub fn note(&self, result: &Result<(), Killed>) {
        if result.is_ok() {
            self.0.store(true, Relaxed);
        }
    }

    pub fn any(&self) -> bool {
        self.0.load(Relaxed)
    }
}

/// Runs `model(first, second, first_survived, second_survived)` for all pairs of moments of death.
pub fn for_all_deaths(mut model: impl FnMut(usize, usize, &Survived, &Survived) -> usize) -> usize {
    let mut executions = 0;
    for first in 0.. {
        let first_survived = Survived::default();
        for second in 0.. {
            let second_survived = Survived::default();
            executions += model(first, second, &first_survived, &second_survived);
            if second_survived.any() {
                break;
            }
        }
        if first_survived.any() {
            break;
        }
    }
    executions
}
