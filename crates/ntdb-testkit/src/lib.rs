//! Programs and simulators that the tests of ntdb run.
//!
//! - [`rng`], [`value`], [`board`]: what checks are made of, with the mixed workload from
//!   `ntdb_proof`, which the program `ntdb` shares: seeds, values that prove themselves, and the
//!   notice board on which writers announce and acknowledge.
//! - [`args`], [`worker`]: the roles that the program `ntdb-worker` plays, one process each.
//! - [`script`]: fixed lists of operations with the state after each, for crashes and power cuts.
//! - [`powercut`]: builds the disk that a power cut may leave.
//! - [`history`]: whether transactions have an order that explains what they saw.
//! - [`crowd`]: several processes of the mixed workload.
//! - [`mount`]: small disks to fill.
//! - [`crash`]: the names of the crash points.
//! - [`hostile`]: forged files with right checksums, for a test and for a fuzzer.
//! - [`lab`]: directories, processes with time limits, seeds.
//!
//! A key lock belongs to the thread that took it; it cannot be carried across an `.await` of a
//! task that moves between threads, where it would lock the task out of its own database:
//!
//! ```compile_fail,E0277
//! fn must_be_send<T: Send>(_: T) {}
//! let db = ntdb::Db::in_memory().unwrap();
//! must_be_send(db.lock(b"key").unwrap());
//! ```
//!
//! Likewise a transaction:
//!
//! ```compile_fail,E0277
//! fn must_be_send<T: Send>(_: T) {}
//! let db = ntdb::Db::in_memory().unwrap();
//! must_be_send(db.begin().unwrap());
//! ```
#![deny(missing_docs)]

pub use ntdb_proof::{board, rng, value};

pub mod args;
pub mod crash;
pub mod crowd;
pub mod history;
pub mod hostile;
pub mod lab;
pub mod mount;
pub mod powercut;
pub mod script;
pub mod worker;
