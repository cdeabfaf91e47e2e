//! Who this process is to the others: its slot in the process table, the lock that shows that it lives, its pins.
//!
//! A process holds an open-file-description lock on its slot's byte of the data file; the kernel drops it when the process
//! dies, however it dies, and no process id is ever asked about. A session belongs to one process: a forked child finds its
//! fork generation changed and makes a session of its own; the parent's is leaked there, since its lock
//! descriptor was closed by the fork handler and its pins are the parent's.

use crate::shm::pin::Attachment;
use crate::storage::fork;
use crate::storage::ofd::{LockKind, OfdFile, slot_byte};
use crate::types::SlotId;

/// See the module's description.
#[derive(Debug)]
pub struct Session {
    /// Slot in the process table.
    pub slot: SlotId,
    /// The descriptor that holds the slot's lock; `None` where no other process can be.
    pub ofd: Option<OfdFile>,
    /// Pins.
    pub pins: Box<Attachment>,
    /// The process that the session belongs to.
    pub fork_generation: u64,
}

impl Session {
    /// Whether the process in `slot` lives.
    pub fn is_alive(&self, slot: SlotId) -> bool {
        if slot == self.slot {
            return true;
        }
        match &self.ofd {
            // Asking failed: rather wait than repair somebody who lives.
            Some(ofd) => {
                ofd.is_locked_by_other(slot_byte(slot.0), LockKind::Exclusive).unwrap_or(true)
            }
            None => false,
        }
    }

    /// Whether the session belongs to this process (and not to the one that this one was forked from).
    #[inline]
    pub fn is_current(&self) -> bool {
        self.fork_generation == fork::generation()
    }
}
