//! ntdb: an embedded key-value database that many processes share.
#![deny(missing_docs)]

mod db;
mod error;
mod le;
mod limits;
mod log;
mod options;
mod page;
#[allow(dead_code)]
mod storage;
#[allow(dead_code)]
mod sync;
mod types;

pub use db::{CheckReport, Cursor, Db, Iter, KeyLock, Stat};
pub use error::{Error, Result};
pub use options::{Durability, Options};
#[cfg(feature = "failpoints")]
#[doc(hidden)]
pub use storage::failpoint;
