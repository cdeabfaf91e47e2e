//! The subcommands, one module each; the three that store a single value share `store`, and a load
//! is `load` (what the user asked for), `load_input` (the text), `load_share` (the work itself, the
//! same for one process and many), `load_processes` (the parent of many) and `load_worker` (a child).

pub mod backup;
pub mod check;
pub mod compact;
pub mod create;
pub mod delete;
pub mod dump;
pub mod exists;
pub mod get;
pub mod list;
pub mod load;
mod load_input;
mod load_processes;
mod load_share;
pub mod load_worker;
pub mod recover;
pub mod set;
pub mod stat;
pub mod store;
pub mod torture;
pub mod watch;
