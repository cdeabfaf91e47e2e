#![no_main]
//! One record of a bucket page.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| ntdb::fuzzing::parse_record(bytes));
