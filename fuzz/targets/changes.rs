#![no_main]
//! Kept logs: bytes that say how to change them, and then the changes are read from everywhere.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    static KEPT: std::sync::OnceLock<ntdb_testkit::hostile::kept::Kept> =
        std::sync::OnceLock::new();
    let kept = KEPT.get_or_init(|| ntdb_testkit::hostile::kept::Kept::new(ntdb_fuzz::folder()));
    let _ = kept.attack(bytes);
});
