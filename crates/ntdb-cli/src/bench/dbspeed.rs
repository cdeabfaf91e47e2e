//! `ntdb bench dbspeed`: pairs of mapped identities, stored and fetched for a set time.

use std::path::Path;

use ntdb_workload::job::Job;
use ntdb_workload::machine::Machine;
use ntdb_workload::mapping::{PAIRS, Phase, Work};
use ntdb_workload::series::Series;
use serde::Serialize;

use super::clients::Clients;
use super::place::Place;
use crate::cli::{DbspeedArgs, GlobalOptions, Layout};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::{Progress, count_of};

#[derive(Serialize)]
struct Report {
    machine: Machine,
    seconds: f64,
    durable: bool,
    page_size: u32,
    reserve_percent: u8,
    store_ops_per_second: Series,
    fetch_ops_per_second: Series,
    records: u64,
    file_bytes: u64,
}

/// Stores, then fetches.
pub fn run(global: &GlobalOptions, args: &DbspeedArgs) -> Result<(), Failure> {
    let place = Place::new("dbspeed", args.measure.file.as_deref())?;
    let path = place.path().unwrap_or(Path::new(""));
    let mut options = opening::options(global);
    opening::with_creation(options.create_new(true), &args.measure.new);
    let db = options.open(path)?;
    let clients = Clients::new(global, Layout::Threads, path, &db);
    let runs = u64::from(args.measure.runs);
    let progress = Progress::of_operations(2 * runs, global.quiet);
    let (mut stored, mut fetched) = (Vec::new(), Vec::new());
    for run in 0..runs {
        let job = |phase, pairs| {
            let seed = args.seed.wrapping_add(run);
            [Job::Mapping(Work { phase, seconds: args.seconds, pairs, seed })]
        };
        let outcome = clients.run(&job(Phase::Store, PAIRS))?;
        stored.push(outcome.per_second());
        progress.show_operations(2 * run + 1);
        let pairs = db.len()? / 2;
        fetched.push(clients.run(&job(Phase::Fetch, pairs))?.per_second());
        progress.show_operations(2 * run + 2);
    }
    drop(progress);
    let stat = db.stat()?;
    db.close()?;
    let report = Report {
        machine: Machine::of(Some(path)),
        seconds: args.seconds,
        durable: global.durable,
        page_size: stat.page_size,
        reserve_percent: stat.reserve_percent,
        store_ops_per_second: Series::new(stored),
        fetch_ops_per_second: Series::new(fetched),
        records: stat.records,
        file_bytes: stat.file_bytes,
    };
    let mut out = Output::new();
    if args.measure.json {
        out.json(&report)?;
        return out.finish();
    }
    out.line(report.machine.line())?;
    out.line(format_args!(
        "UID and SID pairs: {} s each, {}, {}",
        report.seconds,
        count_of(runs, "run"),
        if report.durable { "durable" } else { "relaxed" }
    ))?;
    out.line(format_args!("store  {} ops/s", super::range(&report.store_ops_per_second)))?;
    out.line(format_args!("fetch  {} ops/s", super::range(&report.fetch_ops_per_second)))?;
    out.line(format_args!("{}, {} bytes", count_of(report.records, "record"), report.file_bytes))?;
    out.finish()
}
