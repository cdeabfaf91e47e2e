//! Compares this engine with others: the same workloads, in the same layout of processes, in one run, one engine after the other in
//! each round. Prints Markdown, with what each engine cannot do.

mod engines;
mod names;
mod postgres;
mod speed;
mod table;
mod tpcb;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use ntdb_workload::session::Result;

use crate::names::Name;

#[derive(Parser)]
#[command(about = "Compare ntdb with other databases", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Single operations, and operations in one transaction, by one thread of one process
    Speed(SpeedArgs),
    /// Bank transactions of many clients
    Tpcb(TpcbArgs),
    /// What a client process does
    #[command(hide = true)]
    Worker(WorkerArgs),
}

/// What all comparisons are told.
#[derive(Args)]
struct Common {
    /// Where the databases are made, each in a folder of its own, which goes afterwards
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Measure so many times; the median counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Only these engines
    #[arg(long, value_enum, value_delimiter = ',')]
    engines: Vec<Name>,
}

impl Common {
    fn engines(&self) -> &[Name] {
        if self.engines.is_empty() { Name::ALL } else { &self.engines }
    }
}

#[derive(Args)]
struct SpeedArgs {
    #[command(flatten)]
    common: Common,
    /// Numbers of records
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 100_000])]
    records: Vec<u64>,
    /// A phase that takes longer is ended, and what it has done by then counts
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    at_most: f64,
}

#[derive(Args)]
struct TpcbArgs {
    #[command(flatten)]
    common: Common,
    /// How many clients
    #[arg(long, default_value_t = 16)]
    clients: u64,
    /// Transactions that each makes
    #[arg(long, default_value_t = 500)]
    transactions: u64,
    /// Units of 100,000 accounts
    #[arg(long, default_value_t = 1)]
    scale: u64,
    /// No transaction waits for the disk
    #[arg(long)]
    relaxed: bool,
    /// Clients are threads even where they could be processes
    #[arg(long)]
    threads: bool,
}

#[derive(Args)]
struct WorkerArgs {
    engine: Name,
    dir: PathBuf,
    #[arg(long)]
    durable: bool,
    #[arg(long)]
    records: u64,
}

fn main() -> ExitCode {
    match run(&Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("compare: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> Result<()> {
    match command {
        Command::Speed(args) => speed::run(args),
        Command::Tpcb(args) => tpcb::run(args),
        Command::Worker(args) => {
            let setup =
                engines::Setup { durable: args.durable, records: args.records, create: false };
            args.engine.with(tpcb::Worker { dir: &args.dir, setup })
        }
    }
}
