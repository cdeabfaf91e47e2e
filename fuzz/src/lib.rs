//! What the fuzz targets share: a folder of their own, and bounds.

use std::path::Path;
use std::sync::OnceLock;

use ntdb_testkit::lab::TempDir;

/// This process's folder, in `NTDB_TEST_DIR` if that is set. Whoever starts the target removes it: libFuzzer ends without
/// dropping anything.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(TempDir::new).path()
}

/// Keeps files from growing without bound before that is noticed.
pub fn limit_files(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a valid limit; no memory is involved.
    unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) };
}

/// `bytes` as a file of this process's folder.
pub fn file(bytes: &[u8]) -> std::path::PathBuf {
    let path = folder().join("input");
    std::fs::write(&path, bytes).expect("write the input");
    path
}
