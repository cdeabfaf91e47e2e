//! Bank transactions of many clients.

use std::path::Path;
use std::process::Command;

use ntdb_workload::crew::{self, Outcome};
use ntdb_workload::job::Job;
use ntdb_workload::latency::{Latencies, Percentiles};
use ntdb_workload::machine::Machine;
use ntdb_workload::series::Series;
use ntdb_workload::session::{Result, wrong};
use ntdb_workload::tpcb::{self, Work};

use crate::TpcbArgs;
use crate::engines::{Engine, Setup};
use crate::names::{Name, With};
use crate::postgres;
use crate::results::{Point, keep};
use crate::speed::bytes_in;
use crate::table::{Table, number};

/// What one run gave.
pub struct Figures {
    /// Name and version.
    pub version: String,
    /// What the engine does for the disk.
    pub durability: String,
    /// Whether clients were processes.
    pub processes: bool,
    /// Transactions a second.
    pub tps: f64,
    /// How long they took.
    pub latency: Option<Percentiles>,
    /// Bytes on disk afterwards.
    pub bytes: u64,
}

/// Compares.
pub fn run(args: &TpcbArgs) -> Result<()> {
    println!("{}\n", Machine::of(Some(&args.common.dir)).line());
    args.clients.iter().try_for_each(|&clients| compare(args, clients))
}

fn compare(args: &TpcbArgs, clients: u64) -> Result<()> {
    let engines = args.common.engines();
    let mut results: Vec<Vec<Figures>> = engines.iter().map(|_| Vec::new()).collect();
    let mut refused: Vec<Option<String>> = vec![None; engines.len()];
    for run in 0..args.common.runs {
        for (index, name) in engines.iter().enumerate() {
            let dir = tempfile::tempdir_in(&args.common.dir)?;
            match name.with(Bank { args, clients, name: *name, dir: dir.path(), run: run as u64 }) {
                Ok(figures) => results[index].push(figures),
                Err(error) => refused[index] = Some(error.to_string()),
            }
        }
    }
    println!(
        "TPC-B: {} clients, {} transactions each, scale {}, {}; median of {}, and from the least to the greatest\n",
        clients,
        args.transactions,
        args.scale,
        if args.relaxed { "relaxed" } else { "durable" },
        args.common.runs
    );
    let mut table = Table::new([
        "engine",
        "clients are",
        "tps",
        "ntdb's is",
        "median us",
        "99 % us",
        "longest us",
        "bytes on disk",
        "durability",
    ]);
    let tps = |figures: &[Figures]| Series::new(figures.iter().map(|f| f.tps).collect());
    let own = engines.iter().position(|&name| name == Name::Ntdb);
    let own = own.map_or(0.0, |index| tps(&results[index]).median);
    let mut points = Vec::new();
    for ((name, figures), refused) in engines.iter().zip(&results).zip(&refused) {
        let Some(first) = figures.last() else {
            let why = refused.as_deref().unwrap_or("not measured");
            let mut row = vec![format!("{name:?}"), why.to_string()];
            row.resize(9, String::new());
            table.row(row);
            continue;
        };
        let series = tps(figures);
        let mut point = Point::new("tpcb", &first.version, clients as f64);
        point.add("tps", series.runs.clone());
        point.add("bytes", figures.iter().map(|figures| figures.bytes as f64).collect());
        points.push(point);
        let latency = |of: fn(&Percentiles) -> f64| {
            first.latency.as_ref().map_or("-".to_string(), |latency| number(of(latency)))
        };
        table.row(vec![
            first.version.clone(),
            if first.processes { "processes" } else { "threads" }.into(),
            format!("{} ({} to {})", number(series.median), number(series.min), number(series.max)),
            format!("{:.1} times that", own / series.median),
            latency(|l| l.p50_us),
            latency(|l| l.p99_us),
            latency(|l| l.max_us),
            number(first.bytes as f64),
            first.durability.clone(),
        ]);
    }
    table.print();
    keep(args.common.results.as_deref(), &points)
}

struct Bank<'a> {
    args: &'a TpcbArgs,
    clients: u64,
    name: Name,
    dir: &'a Path,
    run: u64,
}

impl With for Bank<'_> {
    type Output = Result<Figures>;

    fn with<E: Engine>(self) -> Result<Figures> {
        let Bank { args, clients, name, dir, run } = self;
        let processes = E::HAS_PROCESSES && !args.threads;
        if !processes && !E::HAS_THREADS {
            return Err(wrong("has no threads"));
        }
        let durable = !args.relaxed;
        let records = args.scale * (tpcb::ACCOUNTS + tpcb::TELLERS + 1);
        let setup = Setup { durable, records, create: true, own: None };
        let engine = E::open(dir, setup)?;
        let mut client = engine.client()?;
        tpcb::load(&mut client, args.scale)?;
        let job = |client: u64| {
            Job::Tpcb(Work {
                scale: args.scale,
                transactions: args.transactions,
                durable,
                grow_bytes: 0,
                first_history: client * args.transactions,
                seed: run * clients + client,
            })
        };
        let jobs: Vec<Job> = (0..clients).map(job).collect();
        let outcome = if processes {
            crew::of_processes(&jobs, || worker(name, dir, setup))
        } else {
            crew::of_threads(&jobs, || engine.client())
        }?;
        tpcb::verify(&mut client, args.scale, clients * args.transactions)?;
        Ok(Figures {
            version: E::version(),
            durability: if durable { E::DURABLE } else { E::RELAXED }.into(),
            processes,
            tps: outcome.per_second(),
            latency: Some(percentiles(&outcome)),
            bytes: bytes_in(dir)?,
        })
    }

    fn with_server(self, fill_percent: u32) -> Result<Figures> {
        postgres::run(self.args, self.clients, self.dir, fill_percent)
    }
}

fn percentiles(outcome: &Outcome) -> Percentiles {
    let mut latencies = Latencies::default();
    outcome.clients.iter().for_each(|done| latencies.add(&done.latencies));
    latencies.percentiles()
}

/// The command of a client process.
pub fn worker(name: Name, dir: &Path, setup: Setup) -> Result<Command> {
    use clap::ValueEnum;
    let mut command = Command::new(std::env::current_exe()?);
    let name = name.to_possible_value().ok_or_else(|| wrong("an engine without a name"))?;
    command.arg("worker").arg(name.get_name()).arg(dir);
    command.arg("--records").arg(setup.records.to_string());
    if setup.durable {
        command.arg("--durable");
    }
    Ok(command)
}

/// A client process.
pub struct Worker<'a> {
    /// Where the database is.
    pub dir: &'a Path,
    /// How to open it.
    pub setup: Setup,
}

impl With for Worker<'_> {
    type Output = Result<()>;

    fn with<E: Engine>(self) -> Result<()> {
        let mut opened = None;
        crew::serve(|| opened.insert(E::open(self.dir, self.setup)?).client())
    }

    fn with_server(self, _fill_percent: u32) -> Result<()> {
        Err(wrong("a server has no client process of this program"))
    }
}
