//! A workload of many processes on one database that proves whatever it sees.
//!
//! `ntdb torture` and the tests run it. Values prove themselves ([`value`]); a notice board
//! ([`board`]) says outside the database what every writer has begun and what was acknowledged to
//! it, also to those who died; the workload ([`mixed`]) on a fixed set of keys ([`layout`]) compares
//! every answer with the two, and whoever takes the place of a dead writer, or comes last, compares
//! all that is there ([`adopt`]). Everything random follows from a seed ([`rng`]).
#![deny(missing_docs)]

pub mod adopt;
pub mod board;
pub mod layout;
pub mod mixed;
pub mod rng;
mod transact;
pub mod value;
