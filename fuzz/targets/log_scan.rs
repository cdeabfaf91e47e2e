#![no_main]
//! A log file: its header, then records; the first eight bytes say where to begin.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let (from, log) = bytes.split_at(bytes.len().min(8));
    let mut word = [0; 8];
    word[..from.len()].copy_from_slice(from);
    // With the checks as they are, then with right ones.
    let mut log = log.to_vec();
    ntdb::fuzzing::scan_log(&ntdb_fuzz::file(&log), u64::from_le_bytes(word));
    ntdb::fuzzing::seal_log(&mut log);
    ntdb::fuzzing::scan_log(&ntdb_fuzz::file(&log), u64::from_le_bytes(word));
});
