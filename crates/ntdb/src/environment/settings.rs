//! What can be set for a database that is there.

use std::sync::atomic::Ordering::Release;
use std::time::Duration;

use crate::error::Result;
use crate::options::deadline_after;
use crate::transaction::writer::Writer;

use super::Environment;

impl Environment {
    /// Sets the reserve, and makes it durable. Waits for locks for `limit` each.
    pub fn set_reserve(&self, percent: u8, limit: Option<Duration>) -> Result<()> {
        self.ensure_session()?;
        let writer = Writer::lock(&self.core, deadline_after(limit))?;
        self.core.control().readers.reserve_percent.store(percent.into(), Release);
        drop(writer);
        self.checkpoint(limit)
    }
}
