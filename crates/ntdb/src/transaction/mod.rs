//! Changes: the writer lock, steps that survive their maker, and the operations made of them.
//!
//! [`writer`] is the lock under which everything changes; [`step`] is one atomic change with its note; [`repair`] finishes or
//! drops the step of a dead holder; [`operation`] are put, delete, append and clear; [`large`] are operations too long for
//! one log record; [`record`] is the log record that an operation takes along.

pub mod claim;
pub mod large;
pub mod open;
pub mod operation;
pub mod private;
pub mod record;
pub mod repair;
pub mod step;
pub mod writer;
