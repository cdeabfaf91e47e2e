//! The redo log: what every change is written to before anybody can see it.
//!
//! - [`record`]: one change as bytes, sealed to its place, so that only the record that belongs
//!   there is ever taken for one.
//! - [`file`](mod@file): the two files that the records end in, `NAME-log0` and `NAME-log1`.
//! - [`flush`]: from the ring to the files.
//! - [`sync`]: to the disk, once for all who wait.
//! - [`scan`]: reading them back in order, to the end of what is valid.
//! - [`keep`]: log files that have served their time and are kept to be followed.
//! - [`follow`]: reading what has happened, beside those who write.
//! - [`stream`]: the operations of a transaction, which count together or not at all.
//!
//! A log sequence number ([`crate::types::Lsn`]) is the position of a record's first byte, counted
//! in log bytes since the database was created. It rises across both files, so it orders all
//! changes that were ever made. Who appends, and under which locks, is the business of the layers
//! above.

pub mod file;
pub mod flush;
pub mod follow;
pub mod keep;
pub mod record;
pub mod scan;
pub mod stream;
pub mod sync;
