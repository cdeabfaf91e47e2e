//! The engines, each behind the same few operations.
//!
//! Each is set up as its own documentation advises for this use; what that is stands at each.

pub mod berkeley;
pub mod fjall;
pub mod lmdb;
pub mod ntdb;
pub mod redb;
pub mod rocksdb;
pub mod sqlite;
pub mod tdb;

use std::path::Path;

use ntdb_workload::session::{Result, Session};

/// How an engine is opened.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Whether a commit waits for the disk. Otherwise what was committed survives the death of the process, or whatever less the
    /// engine's [`Engine::RELAXED`] says.
    pub durable: bool,
    /// How many records there will be, for engines that want to know.
    pub records: u64,
    /// Whether the file is to be made.
    pub create: bool,
    /// This project's own: the reserve in percent, and the page size.
    pub own: Option<Own>,
}

/// Properties of this project's own files.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// Percent of a page that inserts leave to updates.
    pub reserve_percent: u8,
    /// Bytes of a page.
    pub page_bytes: u32,
}

/// An engine, opened by a process.
pub trait Engine: Sized + Send + Sync {
    /// Whether several processes can work on one database.
    const HAS_PROCESSES: bool;
    /// Whether several threads can share one opened database, or open it several times.
    const HAS_THREADS: bool;
    /// What it does for the disk if a commit is to be there afterwards.
    const DURABLE: &str;
    /// What is promised otherwise.
    const RELAXED: &str;
    /// What each thread needs.
    type Client: Session;
    /// Opens the database at `path`.
    fn open(path: &Path, setup: Setup) -> Result<Self>;
    /// A thread's own part.
    fn client(&self) -> Result<Self::Client>;
    /// Its name and version.
    fn version() -> String;
}
