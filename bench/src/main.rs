//! Compares this engine with others: the same workloads, in the same layout of processes, in one run, one engine after the other in
//! each round. Prints Markdown, with what each engine cannot do.

mod engines;
mod names;
mod plot;
mod postgres;
mod properties;
mod results;
mod scale;
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
    /// More and more processes that read, or write
    Scale(ScaleArgs),
    /// Reserve and page size of ntdb, in bank transactions
    Properties(PropertiesArgs),
    /// Draw what was measured
    Plot(PlotArgs),
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
    /// Add the figures to this file, for the plots
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
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
    /// Numbers of clients
    #[arg(long, value_delimiter = ',', default_values_t = [16])]
    clients: Vec<u64>,
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
struct ScaleArgs {
    #[command(flatten)]
    common: Common,
    /// Numbers of processes
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    clients: Vec<u64>,
    /// Records
    #[arg(long, default_value_t = 100_000)]
    records: u64,
    /// How long each measurement takes
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

#[derive(Args)]
struct PropertiesArgs {
    #[command(flatten)]
    common: Common,
    /// How many clients
    #[arg(long, default_value_t = 4)]
    clients: u64,
    /// Transactions that each makes
    #[arg(long, default_value_t = 25_000)]
    transactions: u64,
    /// Units of 100,000 accounts
    #[arg(long, default_value_t = 1)]
    scale: u64,
    /// Bytes by which each update makes a row longer, where rows grow
    #[arg(long, default_value_t = 20)]
    grow: usize,
    /// Each transaction waits for the disk
    #[arg(long)]
    durable: bool,
}

#[derive(Args)]
struct PlotArgs {
    /// What was measured
    results: PathBuf,
    /// Where the plots go
    dir: PathBuf,
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
        Command::Scale(args) => scale::run(args),
        Command::Properties(args) => properties::run(args),
        Command::Plot(args) => plot::run(&args.results, &args.dir),
        Command::Worker(args) => {
            let WorkerArgs { durable, records, .. } = *args;
            let setup = engines::Setup { durable, records, create: false, own: None };
            args.engine.with(tpcb::Worker { dir: &args.dir, setup })
        }
    }
}
