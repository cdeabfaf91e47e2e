//! ntdb: an embedded key-value database that many processes share.
//!
//! One file of records that many processes and threads read and write at the same time: no server, no map size to
//! choose, no "database is locked". Reads take no lock and make no system call. A process that dies, however it dies,
//! damages nothing and holds nobody up; after a power cut the database is what it was at some recent instant, and
//! everything that was made durable is there.
//!
//! ```
//! # fn main() -> ntdb::Result<()> {
//! # let dir = tempfile::tempdir().unwrap();
//! let db = ntdb::Db::create(dir.path().join("fruit.ntdb"))?;
//! db.put(b"apple", b"red")?;
//! db.append(b"apple", b", or green")?;
//! assert_eq!(db.get(b"apple")?.as_deref(), Some(&b"red, or green"[..]));
//! for record in db.iter() {
//!     let (key, value) = record?;
//!     println!("{} is {}", String::from_utf8_lossy(&key), String::from_utf8_lossy(&value));
//! }
//! db.close()
//! # }
//! ```
//!
//! | to | see |
//! | --- | --- |
//! | open, read, write, iterate, lock keys | [`Db`] |
//! | choose page size, durability, time-outs and the like | [`Options`] |
//! | read, iterate or copy the state of one moment while others write | [`Db::snapshot`], [`Snapshot`] |
//! | copy a database while others write | [`Db::backup`] |
//! | know what a write promises when it returns | [`Durability`] |
//! | stop an iteration and resume it later, also elsewhere | [`Cursor`] |
//! | change a value by what it is, against everybody else | [`Db::lock`], [`KeyLock`] |
//! | follow what all processes change; wait until something changes | [`Db::changes`], [`Db::wait_for_change`] |
//! | tell errors apart | [`Error`] |
//! | look at a database from outside | [`Db::stat`], [`Db::check`] |
//! | copy what can still be read of a damaged one | [`salvage`](fn@salvage) |
//!
//! How it works is told in `docs/architecture.md`; the files are described byte for byte in
//! `docs/format.md`.
#![deny(missing_docs)]

// From the top: `api` (what users see), `environment` (attaching, recovery, closing), `checkpoint`,
// `transaction` (changes that survive their maker), `index` (the hash), `log`, `space`, `core` (mapped
// data and shared state), `shm`, `page`, `storage`.
mod api;
mod checkpoint;
mod copy;
mod core;
mod environment;
mod error;
#[cfg(feature = "failpoints")]
#[doc(hidden)]
pub mod fuzzing;
mod hash;
mod index;
mod le;
mod limits;
mod log;
mod options;
mod page;
mod salvage;
mod shm;
mod space;
mod storage;
mod sync;
mod transaction;
mod types;

pub use api::backup::{BackupOptions, BackupProgress, BackupReport};
pub use api::changes::{Change, Changes, Operation, Position};
pub use api::check::CheckReport;
pub use api::db::Db;
pub use api::fill::{FILL_PARTS, Fill};
pub use api::iterate::{Cursor, Iter};
pub use api::key_lock::KeyLock;
pub use api::snapshot::Snapshot;
pub use api::stat::{ProcessStat, SnapshotStat, Stat, UpdateStat};
pub use api::transaction::{Savepoint, Transaction};
pub use error::{Error, Result};
pub use options::{Durability, Options};
pub use salvage::{SalvageProgress, SalvageReport, salvage};
#[cfg(feature = "failpoints")]
#[doc(hidden)]
pub use storage::failpoint;
