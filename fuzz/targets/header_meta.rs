#![no_main]
//! Header block, beginning of a file, meta page.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| ntdb::fuzzing::parse_header_and_meta(bytes));
