#![no_main]
//! Copying what can be read of the files of a database: attacks as for the target `database`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    static SCENES: std::sync::OnceLock<Vec<ntdb_testkit::hostile::scene::Scene>> =
        std::sync::OnceLock::new();
    let scenes = SCENES.get_or_init(|| {
        let scenes = ntdb_testkit::hostile::scene::all();
        ntdb_fuzz::limit_files(4 * ntdb_testkit::hostile::attack::FILE_BYTES_MAX);
        scenes
    });
    ntdb_testkit::hostile::attack::salvage(scenes, ntdb_fuzz::folder(), bytes);
});
