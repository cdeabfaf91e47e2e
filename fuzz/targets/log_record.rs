#![no_main]
//! One record of the redo log.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| ntdb::fuzzing::parse_log_record(bytes));
