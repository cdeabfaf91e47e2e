//! What users see: the handle, key locks, iteration, facts and checks.

pub mod backup;
pub mod changes;
pub mod check;
pub mod db;
pub mod fill;
pub mod iterate;
pub mod key_lock;
pub mod snapshot;
pub mod stat;
pub mod transaction;
