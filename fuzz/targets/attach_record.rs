#![no_main]
//! The attach record in the first page of a data file.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut page = [0; 4096];
    let len = bytes.len().min(2048);
    page[2048..2048 + len].copy_from_slice(&bytes[..len]);
    for sealed in [false, true] {
        if sealed {
            ntdb::fuzzing::seal_attach_record(&mut page);
        }
        ntdb::fuzzing::parse_attach_record(&ntdb_fuzz::file(&page));
    }
});
