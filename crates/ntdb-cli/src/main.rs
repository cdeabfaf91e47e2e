//! The program `ntdb`.
fn main() {}
