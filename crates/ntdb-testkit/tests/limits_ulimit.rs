//! A file-size limit (`ulimit -f`) and too little address space (`ulimit -v`) are errors, not
//! signals; the database stays whole, and goes on when the limit is gone.

use std::io;
use std::os::unix::process::CommandExt;

use ntdb::Db;
use ntdb_testkit::lab::{Lab, PATIENCE, Worker, reported};
use ntdb_testkit::worker::simple;

fn limited(mut worker: Worker, resource: libc::__rlimit_resource_t, bytes: u64) -> Worker {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: between fork and exec only one system call is made, which is async-signal-safe.
    unsafe {
        worker.command().pre_exec(move || {
            if libc::setrlimit(resource, &limit) == 0 {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        });
    }
    worker
}

#[test]
fn a_file_size_limit_is_full_and_not_a_signal() {
    for (limit, value) in [(3 << 20, 30), (8 << 20, 500), (8 << 20, 50_000)] {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let worker = lab.worker("fill").arg("create", true).arg("value", value);
        let mut process = limited(worker, libc::RLIMIT_FSIZE, limit).spawn();
        let line = process.line();
        assert!(line.ends_with("until full"), "{line}");
        let stored = reported(&line, "stored");
        let ended = process.end(PATIENCE);
        assert!(ended.status.success(), "{ended:?}");
        let db = Db::open(lab.database()).expect("open without the limit");
        simple::demand_filled(&db, stored, value).expect("all records");
        for n in stored..stored + 200 {
            db.put(&simple::fill_key(n), &simple::fill_value(n, value)).expect("put");
        }
        simple::demand_filled(&db, stored + 200, value).expect("all records");
    }
}

#[test]
fn a_tiny_file_size_limit_is_full_at_creation() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let worker = lab.worker("fill").arg("create", true).arg("limit", 1);
    let ended = limited(worker, libc::RLIMIT_FSIZE, 4096).spawn().end(PATIENCE);
    assert!(ended.status.success() && ended.stdout.contains("full at open"), "{ended:?}");
    let db = Db::create(lab.database()).expect("create without the limit");
    db.put(b"key", b"value").expect("put");
}

#[test]
fn little_address_space_is_enough_for_a_small_database() {
    // The program itself, its threads and the companions need some; a reservation of hundreds of
    // GiB must shrink to what there is.
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let worker = lab.worker("fill").arg("create", true).arg("value", 100).arg("limit", 20_000);
    let mut process = limited(worker, libc::RLIMIT_AS, 256 << 20).spawn();
    let line = process.line();
    assert_eq!(line, "stored 20000 until limit");
    process.succeed(PATIENCE);
}

#[test]
fn too_little_address_space_is_its_own_error_and_harms_nothing() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let worker = lab.worker("fill").arg("create", true).arg("value", 50_000).arg("limit", 20_000);
    let mut process = limited(worker, libc::RLIMIT_AS, 256 << 20).spawn();
    let line = process.line();
    assert!(line.ends_with("until address space"), "{line}");
    let stored = reported(&line, "stored");
    process.succeed(PATIENCE);
    let db = Db::open(lab.database()).expect("open without the limit");
    simple::demand_filled(&db, stored, 50_000).expect("all records");
    db.put(&simple::fill_key(stored), &simple::fill_value(stored, 50_000)).expect("put");
}
