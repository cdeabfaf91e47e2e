#![no_main]
//! The stream of a transaction; the first bytes say how it is cut, and which parts of it were undone.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| ntdb::fuzzing::parse_log_stream(bytes));
