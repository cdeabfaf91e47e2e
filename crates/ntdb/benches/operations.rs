//! Time of single operations in one process: `cargo bench -p ntdb --bench operations [-- RECORDS [ROUNDS]]`.
//!
//! Prints nanoseconds per operation, the median of several rounds. With ROUNDS = 1 it is short enough for
//! `valgrind --tool=callgrind`, which counts instructions.

use std::hint::black_box;
use std::time::Instant;

use ntdb::Options;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let numbers: Vec<u32> =
        std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let records = numbers.first().copied().unwrap_or(100_000);
    let rounds = numbers.get(1).copied().unwrap_or(7);
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
    let db =
        Options::new().create(true).open(dir.path().join("bench.ntdb")).expect("a new database");
    let time = |name: &str, operation: &mut dyn FnMut(u32)| {
        let per_operation = (0..rounds)
            .map(|_| {
                let start = Instant::now();
                for i in 0..records {
                    operation(i);
                }
                start.elapsed().as_nanos() as f64 / records as f64
            })
            .collect();
        println!("{name:12} {:7.1} ns", median(per_operation));
    };
    time("put", &mut |i| db.put(&i.to_le_bytes(), &i.to_le_bytes()).expect("put"));
    let mut buffer = [0u8; 16];
    time("get_into", &mut |i| {
        black_box(db.get_into(&i.to_le_bytes(), &mut buffer).expect("get"));
    });
    time("contains", &mut |i| {
        black_box(db.contains(&i.to_le_bytes()).expect("contains"));
    });
    time("missing", &mut |i| {
        black_box(db.contains(&(i + records).to_le_bytes()).expect("contains"));
    });
    time("replace", &mut |i| {
        black_box(db.replace(&i.to_le_bytes(), &i.to_le_bytes()).expect("replace"));
    });
    time("get", &mut |i| {
        black_box(db.get(&i.to_le_bytes()).expect("get"));
    });
}
