//! Programs and simulators that the tests of ntdb run.
//!
//! - [`rng`], [`value`], [`board`]: what checks are made of: seeds, values that prove themselves,
//!   and the notice board on which writers announce and acknowledge.
//! - [`args`], [`worker`]: the roles that the program `ntdb-worker` plays, one process each.
//! - [`script`]: fixed lists of operations with the state after each, for crashes and power cuts.
//! - [`powercut`]: builds the disk that a power cut may leave.
//! - [`crowd`]: several processes of the mixed workload.
//! - [`crash`]: the names of the crash points.
//! - [`lab`]: directories, processes with time limits, seeds.
#![deny(missing_docs)]

pub mod args;
pub mod board;
pub mod crash;
pub mod crowd;
pub mod lab;
pub mod powercut;
pub mod rng;
pub mod script;
pub mod value;
pub mod worker;
