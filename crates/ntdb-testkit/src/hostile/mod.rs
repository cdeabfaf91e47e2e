//! Files made to do harm: valid ones with numbers changed and every checksum made right again.
//!
//! A checksum keeps damage out; it does not keep out who knows how to compute it. So the bytes of a small database, of the
//! logs and the shared memory that a crash left, are changed by [`edit`]s, sealed anew, written out and used
//! ([`attack`]). [`scene`]s are the originals. An attack is a string of bytes, so that the same code serves a fuzzer,
//! which looks for strings that reach new code, and a test, which draws them from a seed.
//!
//! Whatever the engine answers will do, as long as it comes: no panic, no signal, no hang, no allocation out of
//! proportion to the files.

pub mod attack;
pub mod edit;
pub mod kept;
pub mod scene;
