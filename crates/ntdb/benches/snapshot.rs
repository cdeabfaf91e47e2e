//! What snapshots and backups cost: `cargo bench -p ntdb --bench snapshot [-- RECORDS]`.
//!
//! Prints nanoseconds for opening and dropping one (shared with a held one, of a state that is frozen already, and after a change),
//! also beside thousands that are held; a get through one; a put beside them; and the speed of a backup.

use std::hint::black_box;
use std::time::Instant;

use ntdb::{BackupOptions, Db, Options, Snapshot};

/// The median of seven rounds, in nanoseconds.
fn time(mut operation: impl FnMut(u32), rounds: u32) -> f64 {
    let mut values: Vec<f64> = (0..7)
        .map(|_| {
            let start = Instant::now();
            (0..rounds).for_each(&mut operation);
            start.elapsed().as_nanos() as f64 / rounds as f64
        })
        .collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn change(db: &Db, n: u32) {
    db.put(b"one record of many", &n.to_le_bytes()).expect("put");
}

fn main() {
    let records: u32 =
        std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(100_000u32);
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
    let db = Options::new().create(true).open(dir.path().join("bench.ntdb")).expect("a new one");
    for i in 0..records {
        db.put(&i.to_le_bytes(), &[1; 100]).expect("put");
    }
    let open = || drop(black_box(db.snapshot().expect("snapshot")));
    let held = db.snapshot().expect("snapshot");
    println!("open, of a state held here    {:8.0} ns", time(|_| open(), 10_000));
    drop(held);
    db.checkpoint().expect("checkpoint");
    println!("open, of a frozen state       {:8.0} ns", time(|_| open(), 10_000));
    let put = time(|n| change(&db, n), 10_000);
    println!("put                           {put:8.0} ns");
    let both = time(
        |n| {
            change(&db, n);
            open();
        },
        10_000,
    );
    println!("put and open                  {both:8.0} ns");
    let held = db.snapshot().expect("snapshot");
    let mut buffer = [0u8; 100];
    let get = time(
        |n| {
            black_box(held.get_into(&(n % records).to_le_bytes(), &mut buffer).expect("get"));
        },
        100_000,
    );
    println!("get through one               {get:8.0} ns");
    let many: Vec<Snapshot> = (0..5_000)
        .map(|n| {
            change(&db, n);
            db.snapshot().expect("snapshot")
        })
        .collect();
    let put = time(|n| db.put(&(n % records).to_le_bytes(), &[2; 100]).expect("put"), 20_000);
    println!("put beside 5,000              {put:8.0} ns");
    let both = time(
        |n| {
            change(&db, n);
            open();
        },
        2_000,
    );
    println!("put and open beside 5,000     {both:8.0} ns");
    drop((many, held));
    let start = Instant::now();
    let report = db.backup(dir.path().join("copy.ntdb"), &BackupOptions::new()).expect("backup");
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "backup of {} records: {seconds:.2} s, {:.0} MB/s, {:.0} ns for each",
        report.records,
        report.file_bytes as f64 / seconds / 1e6,
        seconds * 1e9 / report.records as f64
    );
}
