//! Free space: which pages are used, which were replaced and wait, and how new ones are taken.
//!
//! The truth is one bit per page ([`bits`]). A page that was replaced goes to the queue of [`retire`] and its bit stays set
//! until no pin, checkpoint or snapshot can reach it. [`allocate`] finds free pages and grows the file, [`patience`] waits
//! for a checkpoint first; [`snapshots`] are registered. All of it lives in
//! the shared state and changes under the writer lock only; the durable map is derived by checkpoints.

pub mod allocate;
pub mod bits;
pub mod patience;
pub mod retire;
pub mod snapshots;
