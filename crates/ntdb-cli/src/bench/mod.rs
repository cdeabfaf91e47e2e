//! The benchmarks of `ntdb bench`.

pub mod speed;
