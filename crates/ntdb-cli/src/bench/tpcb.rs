//! `ntdb bench tpcb`: bank transactions by many clients, as pgbench makes them.

use std::path::Path;

use ntdb::{Db, Stat};
use ntdb_workload::job::Job;
use ntdb_workload::latency::{Latencies, Percentiles};
use ntdb_workload::machine::Machine;
use ntdb_workload::series::Series;
use ntdb_workload::tpcb::{self, Sums, Work};
use serde::Serialize;

use super::clients::{Clients, failure};
use super::place::Place;
use crate::cli::{GlobalOptions, TpcbArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::{Progress, count_of, grouped};

#[derive(Serialize)]
struct Report {
    machine: Machine,
    clients: u32,
    transactions: u64,
    scale: u64,
    processes: bool,
    durable: bool,
    grow_bytes: usize,
    page_size: u32,
    reserve_percent: u8,
    tps: Series,
    latency: Percentiles,
    pages_dirtied_per_transaction: f64,
    checkpoint_bytes: u64,
    updates: super::Updates,
    load_file_bytes: u64,
    file_bytes: u64,
    verified: Sums,
}

/// Runs them, and adds everything up.
pub fn run(global: &GlobalOptions, args: &TpcbArgs) -> Result<(), Failure> {
    let place = Place::new("tpcb", args.measure.file.as_deref())?;
    let path = place.path().unwrap_or(Path::new(""));
    let mut options = opening::options(global);
    opening::with_creation(options.create_new(true), &args.measure.new);
    let db = options.open(path)?;
    let clients = Clients::new(global, args.clients.layout(), path, &db);
    let mut session = clients.session();
    tpcb::load(&mut session, args.scale).map_err(failure)?;
    let loaded = settled(&db)?;

    let runs = u64::from(args.measure.runs);
    let number = u64::from(args.clients.clients);
    let all = runs.saturating_mul(number).saturating_mul(args.transactions);
    let progress = Progress::of_operations(all, global.quiet);
    let is_durable = !args.relaxed;
    let mut tps = Vec::new();
    let mut latencies = Latencies::default();
    let mut verified = Sums::default();
    for run in 0..runs {
        let job = |client: u64| {
            Job::Tpcb(Work {
                scale: args.scale,
                transactions: args.transactions,
                durable: is_durable,
                grow_bytes: args.grow,
                first_history: (run * number + client).saturating_mul(args.transactions),
                seed: args.seed.wrapping_add(run * number + client),
            })
        };
        let jobs: Vec<Job> = (0..number).map(job).collect();
        let before = loaded.records;
        let outcome = progress.while_growing(
            || db.len().map_or(0, |records| records.saturating_sub(before)),
            || clients.run(&jobs),
        )?;
        tps.push(outcome.per_second());
        outcome.clients.iter().for_each(|done| latencies.add(&done.latencies));
        let made = (run + 1) * number * args.transactions;
        verified = tpcb::verify(&mut session, args.scale, made).map_err(failure)?;
    }
    drop(progress);
    let after = settled(&db)?;
    let checkpoint_bytes = after.checkpoint_bytes - loaded.checkpoint_bytes;
    let report = Report {
        machine: Machine::of(Some(path)),
        clients: args.clients.clients,
        transactions: args.transactions,
        scale: args.scale,
        processes: args.clients.are_processes(),
        durable: is_durable,
        grow_bytes: args.grow,
        page_size: after.page_size,
        reserve_percent: after.reserve_percent,
        tps: Series::new(tps),
        latency: latencies.percentiles(),
        pages_dirtied_per_transaction: checkpoint_bytes as f64
            / f64::from(after.page_size)
            / (verified.transactions.max(1) as f64),
        checkpoint_bytes,
        updates: super::Updates::between(&loaded.updates, &after.updates),
        load_file_bytes: loaded.file_bytes,
        file_bytes: after.file_bytes,
        verified,
    };
    db.close()?;
    print(&report, args)
}

/// The facts, with everything on disk.
fn settled(db: &Db) -> Result<Stat, Failure> {
    db.checkpoint()?;
    Ok(db.stat()?)
}

fn print(report: &Report, args: &TpcbArgs) -> Result<(), Failure> {
    let mut out = Output::new();
    if args.measure.json {
        out.json(report)?;
        return out.finish();
    }
    let kind = if report.processes { "processes" } else { "threads" };
    let Percentiles { p50_us, p90_us, p99_us, p999_us, max_us } = report.latency;
    out.line(format_args!("{}", report.machine.line()))?;
    out.line(format_args!(
        "TPC-B: {} {kind}, {} each, scale {}, {}; {}",
        report.clients,
        count_of(report.transactions, "transaction"),
        report.scale,
        if report.durable { "durable" } else { "relaxed" },
        count_of(report.tps.runs.len() as u64, "run")
    ))?;
    out.line(format_args!("tps         {}", super::range(&report.tps)))?;
    out.line(format_args!(
        "latency     {p50_us:.0} us median, {p90_us:.0} us 90 %, {p99_us:.0} us 99 %, \
         {p999_us:.0} us 99.9 %, {max_us:.0} us longest"
    ))?;
    out.line(format_args!(
        "disk        {:.2} pages dirtied a transaction, {} bytes by checkpoints, file {} bytes \
         ({} when loaded)",
        report.pages_dirtied_per_transaction,
        grouped(report.checkpoint_bytes),
        grouped(report.file_bytes),
        grouped(report.load_file_bytes)
    ))?;
    out.line(format_args!("updates     {}", report.updates.describe()))?;
    out.line(format_args!(
        "verified    accounts, tellers, branches and history each sum up to {}; {}",
        report.verified.history,
        count_of(report.verified.transactions, "transaction")
    ))?;
    out.finish()
}
