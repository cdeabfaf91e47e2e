#![no_main]
//! The header of a shared-memory file.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| ntdb::fuzzing::parse_shm_header(bytes));
