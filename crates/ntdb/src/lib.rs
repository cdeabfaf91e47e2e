//! ntdb: an embedded key-value database that many processes share.
#![deny(missing_docs)]

mod db;
mod error;
mod limits;
mod options;
mod types;

pub use db::{CheckReport, Cursor, Db, Iter, KeyLock, Stat};
pub use error::{Error, Result};
pub use options::{Durability, Options};
