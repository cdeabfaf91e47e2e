//! Completing or dropping the step of a holder that died.
//!
//! Runs under the writer lock, before anything else that its holder does. It may die itself at any point and be run again.

use std::sync::atomic::Ordering::Relaxed;

use crate::error::Result;
use crate::shm::note::{NO_LSN, state};
use crate::space::{bits, retire};
use crate::storage::failpoint::crash_point;

use super::step;
use super::writer::Writer;

/// See the module's description.
#[cold]
pub fn repair(writer: &mut Writer) -> Result<()> {
    let core = writer.core;
    let control = core.control();
    crash_point("repair.begin");
    match control.note.state() {
        state::IDLE => {}
        state::ARMED => {
            let lsn = control.note.lsn.load(Relaxed);
            // Only the owner could append under the lock, so a tail beyond the noted LSN means that this record is there.
            if lsn == NO_LSN || control.writer.tail.load(Relaxed) > lsn {
                step::apply(core)?;
                crash_point("repair.applied");
                control.taken.len.store(0, Relaxed);
                crash_point("repair.taken");
            }
        }
        state::RECLAIM => retire::redo_reclaim(writer)?,
        state::SCAN_HELD => retire::redo_filter_held(writer)?,
        state::COMPACT_FRESH => retire::redo_compact_fresh(writer)?,
        _ => return Err(core.corrupt_shm("the note is in an impossible state")),
    }
    step::undo_taken(writer)?;
    crash_point("repair.undone");
    let file_pages = control.readers.file_pages.load(Relaxed);
    control.writer.free_pages.store(bits::count_free(core, file_pages), Relaxed);
    control.note.set_state(state::IDLE);
    crash_point("repair.done");
    Ok(())
}
