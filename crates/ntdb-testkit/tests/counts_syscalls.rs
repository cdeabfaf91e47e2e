//! No system call per get, and fewer than 0.02 per uncontended put, counted by `strace`: the same
//! worker with `N` and with `2 N` operations; the difference is what the operations cost. And how
//! many durable puts share a sync.

use std::path::Path;

use ntdb::Db;
use ntdb_testkit::board::Board;
use ntdb_testkit::lab::{Lab, PATIENCE, TempDir};

/// Total calls in the table that `strace -c` wrote.
fn total(path: &Path) -> u64 {
    let text = std::fs::read_to_string(path).expect("strace wrote its table");
    let line = text.lines().find(|l| l.trim_end().ends_with("total"));
    let line = line.unwrap_or_else(|| panic!("no total in {text}"));
    // "100.00    0.001234           5       247         3 total": calls are the fourth column.
    line.split_whitespace().nth(3).expect("calls").parse().expect("a number")
}

fn calls(lab: &Lab, role: &str, n: u64, keys: u64) -> u64 {
    let table = lab.dir().join("table");
    let table_text = table.to_str().expect("a path in UTF-8").to_string();
    lab.worker(role)
        .arg("n", n)
        .arg("keys", keys)
        .under("strace", &["-f", "-c", "-o", &table_text])
        .run();
    total(&table)
}

fn per_operation(role: &str, n: u64, keys: u64) -> f64 {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    // Somebody stays attached, so that opening and closing cost the same in both runs.
    let db = Db::create(lab.database()).expect("create");
    lab.worker("puts").arg("n", 1_000).arg("keys", 1_000).run();
    let (once, twice) = (calls(&lab, role, n, keys), calls(&lab, role, 2 * n, keys));
    drop(db);
    println!("{role}: {once} calls with {n} operations, {twice} with twice as many");
    (twice as f64 - once as f64) / n as f64
}

#[test]
fn none_per_get() {
    // A stray timer or page-table call apart, the runs are equal: 5 in 100,000 is not one per get.
    let per_get = per_operation("gets", 100_000, 1_000);
    assert!(per_get.abs() <= 0.000_05, "{per_get} system calls per get");
}

#[test]
fn fewer_than_0_02_per_put() {
    for (what, keys) in [("updates", 1_000), ("inserts", 1_000_000)] {
        let per_put = per_operation("puts", 100_000, keys);
        assert!(per_put < 0.02, "{what}: {per_put} system calls per put");
    }
}

/// Puts, or transactions of two puts, and syncs of `writers` processes that wait for the disk each time.
fn durable(writers: u64, puts_each: u64, transactions: bool) -> (u64, u64) {
    // A sync costs nothing on a memory file system, so this is about a disk.
    let lab =
        Lab::inside(env!("CARGO_BIN_EXE_ntdb-worker"), TempDir::inside(&std::env::temp_dir()));
    let db = Db::create(lab.database()).expect("create");
    let _board = Board::create(&lab.board(), 1, 1).expect("board");
    let table = |w: u64| lab.dir().join(format!("table-{w}"));
    let processes: Vec<_> = (0..writers)
        .map(|w| {
            let table = table(w);
            // Nothing but the syncs is held up by being counted.
            let options = ["-f", "--seccomp-bpf", "-e", "trace=fdatasync", "-c", "-o"];
            let mut options = options.to_vec();
            options.push(table.to_str().expect("a path in UTF-8"));
            lab.worker("durable")
                .path("board", &lab.board())
                .arg("writer", w)
                .arg("n", puts_each)
                .arg("transactions", transactions)
                .under("strace", &options)
                .spawn()
        })
        .collect();
    for process in processes {
        process.succeed(PATIENCE);
    }
    db.close().expect("close");
    let calls =
        |w| if table(w).metadata().is_ok_and(|m| m.len() > 0) { total(&table(w)) } else { 0 };
    (writers * puts_each, (0..writers).map(calls).sum())
}

#[test]
fn sixteen_durable_writers_share_their_syncs() {
    let (puts, syncs) = durable(1, 300, false);
    println!("one writer: {puts} durable puts, {syncs} syncs");
    assert!(syncs >= puts, "somebody was told too early that the disk has it");
    let (puts, syncs) = durable(16, 3_000, false);
    println!("sixteen writers: {puts} durable puts, {syncs} syncs");
    assert!(puts >= 8 * syncs, "only {:.1} puts a sync", puts as f64 / syncs as f64);
}

#[test]
fn sixteen_writers_of_transactions_share_their_syncs() {
    let (commits, syncs) = durable(1, 300, true);
    println!("one writer: {commits} durable transactions, {syncs} syncs");
    assert!(syncs >= commits, "somebody was told too early that the disk has it");
    assert!(syncs < commits * 11 / 10 + 10, "a commit takes more than a sync");
    let (commits, syncs) = durable(16, 3_000, true);
    println!("sixteen writers: {commits} durable transactions, {syncs} syncs");
    assert!(commits >= 4 * syncs, "only {:.1} commits a sync", commits as f64 / syncs as f64);
}
