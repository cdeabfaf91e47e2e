//! The role that plays the mixed workload of `ntdb_proof`.

use ntdb::Options;
use ntdb_proof::mixed::{self, Tuning};

use crate::args::Args;

/// Runs `threads` writers, numbered from `writer`, until the board says stop.
///
/// # Errors
/// The promise that was broken.
pub fn run(args: &Args) -> Result<String, String> {
    let tuning = Tuning {
        hot: args.get("hot", 64),
        large: args.get("large", 50_000),
        first_writer: args.get("writer", 0),
        threads: args.get("threads", 2),
        seed: args.get("seed", 1),
        read_percent: args.get("reads", 50),
        scan_one_in: if args.get("scans", 1) != 0 { 200_000 } else { 0 },
        durable_one_in: args.get("durable_one_in", 0),
        has_large_values: args.get("large_values", 1) != 0,
        has_transactions: args.get("transactions", 0) != 0,
        operations: None,
    };
    mixed::run(&Options::new(), &args.database, &args.path("board"), tuning)
}
