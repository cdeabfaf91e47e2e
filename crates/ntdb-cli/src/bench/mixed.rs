//! `ntdb bench mixed`: the six mixes of YCSB.

use std::path::Path;

use ntdb_workload::job::Job;
use ntdb_workload::latency::{Latencies, Percentiles};
use ntdb_workload::machine::Machine;
use ntdb_workload::mixed::{self, Mix, Work};
use ntdb_workload::series::Series;
use serde::Serialize;

use super::clients::{Clients, failure};
use super::place::Place;
use crate::cli::{GlobalOptions, MixedArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::{Progress, count_of};

#[derive(Serialize)]
struct Phase {
    workload: Mix,
    description: &'static str,
    ops_per_second: Series,
    latency: Percentiles,
    file_bytes: u64,
    records: u64,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    clients: u32,
    processes: bool,
    durable: bool,
    records: u64,
    value_bytes: usize,
    operations: u64,
    page_size: u32,
    reserve_percent: u8,
    phases: Vec<Phase>,
}

/// Runs each mix on a database of its own.
pub fn run(global: &GlobalOptions, args: &MixedArgs) -> Result<(), Failure> {
    let mixes = match args.workload {
        Some(mix) => vec![mix.into()],
        None if args.measure.file.is_some() => {
            let text = "--file: each workload wants a new file; name one of them with --workload";
            return Err(Failure::Usage(text.into()));
        }
        None => Mix::ALL.to_vec(),
    };
    let runs = u64::from(args.measure.runs);
    let all = runs.saturating_mul(args.operations).saturating_mul(mixes.len() as u64);
    let progress =
        Progress::of_operations(all.saturating_mul(u64::from(args.clients.clients)), global.quiet);
    let mut report = Report {
        machine: Machine::of(args.measure.file.as_deref().or(Some(&std::env::temp_dir()))),
        clients: args.clients.clients,
        processes: args.clients.are_processes(),
        durable: global.durable,
        records: args.records,
        value_bytes: args.value_size,
        operations: args.operations,
        page_size: 0,
        reserve_percent: 0,
        phases: Vec::new(),
    };
    let mut out = Output::new();
    for (index, &mix) in mixes.iter().enumerate() {
        let done = index as u64 * runs * args.operations * u64::from(args.clients.clients);
        let phase = phase(global, args, mix, &mut report, &progress, done)?;
        if !args.measure.json {
            if index == 0 {
                progress.hidden_for(|| heading(&report, &mut out))?;
            }
            progress.hidden_for(|| line(&phase, &mut out))?;
        }
        report.phases.push(phase);
    }
    drop(progress);
    if args.measure.json {
        out.json(&report)?;
    }
    out.finish()
}

fn phase(
    global: &GlobalOptions,
    args: &MixedArgs,
    mix: Mix,
    report: &mut Report,
    progress: &Progress,
    done: u64,
) -> Result<Phase, Failure> {
    let place = Place::new("mixed", args.measure.file.as_deref())?;
    let path = place.path().unwrap_or(Path::new(""));
    let mut options = opening::options(global);
    opening::with_creation(options.create_new(true), &args.measure.new);
    let db = options.open(path)?;
    let clients = Clients::new(global, args.clients.layout(), path, &db);
    let mut session = clients.session();
    mixed::load(&mut session, args.records, args.value_size).map_err(failure)?;
    db.checkpoint()?;
    let count = u64::from(args.clients.clients);
    let mut speeds = Vec::new();
    let mut latencies = Latencies::default();
    for run in 0..u64::from(args.measure.runs) {
        let job = |client: u64| {
            Job::Mixed(Work {
                mix,
                records: args.records,
                value_bytes: args.value_size,
                operations: args.operations,
                durable: global.durable,
                client: run * count + client,
                clients: u64::from(args.measure.runs) * count,
                seed: args.seed.wrapping_add(run * count + client),
            })
        };
        let jobs: Vec<Job> = (0..count).map(job).collect();
        let outcome = clients.run(&jobs)?;
        speeds.push(outcome.per_second());
        outcome.clients.iter().for_each(|done| latencies.add(&done.latencies));
        progress.show_operations(done + (run + 1) * outcome.operations());
    }
    let records = mixed::verify(&mut session, args.records).map_err(failure)?;
    db.checkpoint()?;
    let stat = db.stat()?;
    (report.page_size, report.reserve_percent) = (stat.page_size, stat.reserve_percent);
    db.close()?;
    Ok(Phase {
        workload: mix,
        description: mix.describe(),
        ops_per_second: Series::new(speeds),
        latency: latencies.percentiles(),
        file_bytes: stat.file_bytes,
        records,
    })
}

fn heading(report: &Report, out: &mut Output) -> Result<(), Failure> {
    let kind = if report.processes { "processes" } else { "threads" };
    out.line(report.machine.line())?;
    out.line(format_args!(
        "YCSB: {} {kind}, {} each, {} of {} bytes, {}",
        report.clients,
        count_of(report.operations, "operation"),
        count_of(report.records, "record"),
        report.value_bytes,
        if report.durable { "durable" } else { "relaxed" }
    ))
}

fn line(phase: &Phase, out: &mut Output) -> Result<(), Failure> {
    let Percentiles { p50_us, p99_us, max_us, .. } = phase.latency;
    out.line(format_args!(
        "{:?}  {:38} {} ops/s; {p50_us:.1} us median, {p99_us:.1} us 99 %, {max_us:.0} us longest",
        phase.workload,
        phase.description,
        super::range(&phase.ops_per_second)
    ))?;
    out.flush()
}
