//! The pages of the data file: what their bytes mean.

pub mod bucket;
pub mod head;
pub mod header;
pub mod map;
pub mod meta;
pub mod prefetch;
pub mod record;
pub mod reserve;
pub mod tags;
