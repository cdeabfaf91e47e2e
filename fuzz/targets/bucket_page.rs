#![no_main]
//! A bucket page: search, visit, check, write.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let (hash, page) = bytes.split_at(bytes.len().min(8));
    let mut word = [0; 8];
    word[..hash.len()].copy_from_slice(hash);
    ntdb::fuzzing::parse_bucket_page(page, u64::from_le_bytes(word));
});
