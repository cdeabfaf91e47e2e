//! The benchmarks of `ntdb bench`.

pub mod grow;
pub mod place;
pub mod speed;
