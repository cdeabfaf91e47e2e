//! The writer lock.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use crate::core::{Backing, Core};
use crate::error::Result;
use crate::index::locate::Root;
use crate::index::lookup;
use crate::page::head::PageHead;
use crate::shm::awaited;
use crate::shm::layout::Control;
use crate::shm::lock::Acquired;
use crate::shm::note::state;
use crate::storage::failpoint::crash_point;
use crate::storage::membarrier;
use crate::storage::ofd::{LockKind, REPAIR};
use crate::types::{Era, SlotId};

use super::private::Private;
use super::repair;

/// Proof that the caller may change the tree: that it holds the writer lock, and the shared state is whole (released on drop); or
/// that it is a transaction, which changes its private tree.
#[derive(Debug)]
pub struct Writer<'a> {
    /// What it protects.
    pub core: &'a Core,
    /// Instead of the shared tree, this one is changed, and the lock is not held.
    private: Option<Box<Private>>,
}

impl<'a> Writer<'a> {
    /// Takes the lock; if its last holder died in the middle of a step, that step is completed or dropped first.
    #[inline]
    pub fn lock(core: &'a Core, deadline: Option<Instant>) -> Result<Writer<'a>> {
        let control = core.control();
        let me = core.slot();
        if !control.writer_lock.try_acquire(me) {
            Self::wait(core, deadline)?;
        }
        crash_point("writer.locked");
        let mut writer = Writer { core, private: None };
        // Not only after a death: a holder that met a damaged page may have left its note.
        if !is_whole(control) {
            if core.backing == Backing::SharedReadOnly {
                return Err(core.locked(
                    "a step of a writer that died (only a process that may write can finish it)",
                    None,
                    Duration::ZERO,
                ));
            }
            repair::repair(&mut writer)?;
        }
        Ok(writer)
    }

    /// Takes the lock if that needs no waiting, and nothing to be repaired first.
    #[inline(always)]
    pub fn lock_quickly(core: &'a Core) -> Option<Writer<'a>> {
        let control = core.control();
        if !control.writer_lock.try_acquire(core.slot()) {
            return None;
        }
        crash_point("writer.locked");
        // From here on it is released, whatever happens.
        let writer = Writer { core, private: None };
        is_whole(control).then_some(writer)
    }

    /// For one who has taken the lock over from a dead owner, and repairs what it protects.
    pub fn taken_over(core: &'a Core) -> Writer<'a> {
        Writer { core, private: None }
    }

    /// For the private tree of a transaction. Needs no lock.
    pub fn private(core: &'a Core, private: Box<Private>) -> Writer<'a> {
        Writer { core, private: Some(private) }
    }

    /// The private tree, if that is what is changed.
    #[inline(always)]
    pub fn private_tree(&mut self) -> Option<&mut Private> {
        self.private.as_deref_mut()
    }

    /// Whether a transaction's private tree is changed.
    #[inline(always)]
    pub fn is_private(&self) -> bool {
        self.private.is_some()
    }

    /// Gives the private tree back.
    pub fn into_private(mut self) -> Option<Box<Private>> {
        let private = self.private.take();
        if private.is_some() {
            std::mem::forget(self);
        }
        private
    }

    /// The root of the tree that is changed.
    #[inline]
    pub fn root(&self) -> Root {
        match &self.private {
            None => lookup::current_root(self.core),
            Some(private) => private.root,
        }
    }

    /// Records in the tree that is changed.
    #[inline]
    pub fn count(&self) -> u64 {
        match &self.private {
            None => self.core.control().writer.count.load(Relaxed),
            Some(private) => private.count,
        }
    }

    /// Whether the page may be changed where it is; else it must be copied first.
    #[inline]
    pub fn owns(&self, head: &PageHead) -> bool {
        match &self.private {
            None => head.epoch() == self.core.epoch(),
            Some(private) => private.owns(head),
        }
    }

    #[cold]
    fn wait(core: &Core, deadline: Option<Instant>) -> Result<()> {
        let begin = Instant::now();
        let lock = &core.control().writer_lock;
        match lock.acquire(core.slot(), deadline, &|slot| core.is_alive(slot)) {
            Ok(Acquired::Clean) => Ok(()),
            Ok(Acquired::OwnerDied(slot)) => {
                core.suspect(slot);
                Ok(())
            }
            Err(timed_out) => Err(core.locked("the writer lock", timed_out.owner, begin.elapsed())),
        }
    }

    /// The oldest era that anybody living has pinned.
    pub fn oldest_pin(&self) -> Option<Era> {
        let core = self.core;
        if core.control().pins.fenceless.load(SeqCst) != 0 && !membarrier::barrier() {
            // Readers elsewhere may have pinned what cannot be seen from here.
            return Some(Era(0));
        }
        loop {
            let oldest = core.pins.min_pinned()?;
            let behind = core.pins.era().0.saturating_sub(oldest.era.0);
            if behind < 3 || core.is_alive(oldest.process) {
                return Some(oldest.era);
            }
            // Its other remains are repaired later, outside the lock.
            core.suspect(oldest.process);
            if !self.release_dead_pins(oldest.process) {
                return Some(oldest.era);
            }
        }
    }

    /// Frees the pins of a dead process, unless somebody repairs or attaches just now: a new owner of its slot may have
    /// pins already.
    fn release_dead_pins(&self, dead: SlotId) -> bool {
        let core = self.core;
        let Some(ofd) = &core.session().ofd else {
            return core.pins.release_process(dead) > 0;
        };
        // Tried only: a repairer may be waiting for the writer lock, which is held here.
        let Some(_repairing) = core.repairing.try_lock() else { return false };
        if !matches!(ofd.try_lock(REPAIR, LockKind::Exclusive), Ok(true)) {
            return false;
        }
        let released = !core.is_alive(dead) && core.pins.release_process(dead) > 0;
        let _ = ofd.unlock(REPAIR);
        released
    }
}

/// Whether no step was left half done.
#[inline(always)]
fn is_whole(control: &Control) -> bool {
    control.note.state() == state::IDLE && control.taken.len.load(Relaxed) == 0
}

/// Not inline: the lock is released in many places, which the compiler would find too large then to be inlined themselves.
#[inline(never)]
fn look_for_sleepers(control: &Control) {
    awaited::after_release(&control.readers.awaited, || control.awaited().wake());
}

impl Drop for Writer<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.private.is_some() {
            return;
        }
        crash_point("writer.unlock");
        let control = self.core.control();
        control.writer_lock.release(self.core.slot());
        look_for_sleepers(control);
    }
}
