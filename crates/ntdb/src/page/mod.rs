//! The pages of the data file.

pub mod header;
pub mod meta;
