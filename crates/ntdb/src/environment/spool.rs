//! Where recovery keeps the stream of a transaction until it comes to the commit: in pages of the data file that no state of the
//! database uses. So it takes little memory, however long the stream is, and a death leaves nothing: whoever recovers next
//! begins with the same state. (Salvage does the same with pages of the new database, which count for no checkpoint.)

use crate::core::Core;
use crate::error::Result;
use crate::limits::MAX_CHUNK_BYTES;
use crate::transaction::step::Step;
use crate::transaction::writer::Writer;
use crate::types::{Epoch, Run};

/// Made in an epoch that no checkpoint holds: pages that are given back are free at once.
const HELD_BY_NONE: Epoch = Epoch(u64::MAX >> 1);

/// Gives pages back that nobody but their taker has seen.
pub fn give_back(core: &Core, runs: impl IntoIterator<Item = Run>) -> Result<()> {
    let mut writer = Writer::lock(core, None)?;
    for run in runs {
        let mut step = Step::begin(&mut writer);
        step.give(run, HELD_BY_NONE)?;
        step.structure()?;
    }
    Ok(())
}

/// The stream of one transaction, as far as it has come.
#[derive(Debug)]
pub struct Spool {
    /// LSN of its first chunk.
    pub first: u64,
    /// All of the same length, and full but for the last.
    runs: Vec<Run>,
    len: u64,
}

impl Spool {
    /// An empty one.
    pub fn new(first: u64) -> Spool {
        Spool { first, runs: Vec::new(), len: 0 }
    }

    /// Adds a chunk.
    pub fn add(&mut self, core: &Core, mut bytes: &[u8]) -> Result<()> {
        let run_bytes = MAX_CHUNK_BYTES.next_multiple_of(core.page_size as u64);
        while !bytes.is_empty() {
            let used = self.len % run_bytes;
            if used == 0 {
                self.runs.push(take(core, (run_bytes / core.page_size as u64) as u32)?);
            }
            let Some(run) = self.runs.last() else { break };
            let (now, later) = bytes.split_at(bytes.len().min((run_bytes - used) as usize));
            let at = core.run(run.first, run.len)?;
            // SAFETY: within the run, which nobody else uses.
            unsafe {
                std::ptr::copy_nonoverlapping(now.as_ptr(), at.add(used as usize), now.len());
            }
            self.len += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    /// The stream, as the pieces that it lies in.
    pub fn pieces<'c>(&self, core: &'c Core) -> Result<Vec<&'c [u8]>> {
        let mut left = self.len;
        let mut pieces = Vec::with_capacity(self.runs.len());
        for run in &self.runs {
            let at = core.run(run.first, run.len)?;
            let len = left.min(run.len as u64 * core.page_size as u64);
            // SAFETY: filled by `add`, and used for nothing else before it is given back; mapped as long as `core` is there.
            pieces.push(unsafe { std::slice::from_raw_parts(at.cast_const(), len as usize) });
            left -= len;
        }
        Ok(pieces)
    }

    /// Gives its pages back.
    pub fn give_back(self, core: &Core) -> Result<()> {
        give_back(core, self.runs)
    }
}

fn take(core: &Core, pages: u32) -> Result<Run> {
    let mut writer = Writer::lock(core, None)?;
    let mut step = Step::begin(&mut writer);
    let first = step.take(pages)?;
    step.structure()?;
    Ok(Run { first, len: pages })
}
