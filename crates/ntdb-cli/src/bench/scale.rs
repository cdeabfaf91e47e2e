//! `ntdb bench scale`: more and more processes, reading, writing, or both.

use std::path::Path;

use ntdb_workload::job::Job;
use ntdb_workload::machine::Machine;
use ntdb_workload::series::Series;
use ntdb_workload::traffic::{self, Work};
use serde::Serialize;

use super::clients::{Clients, failure};
use super::place::Place;
use crate::cli::{GlobalOptions, ScaleArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::{Progress, count_of, grouped};

/// Who does what.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Readers,
    ReadersBesideAWriter,
    Mixed,
    Writers,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Readers, Kind::ReadersBesideAWriter, Kind::Mixed, Kind::Writers];

    fn name(self) -> &'static str {
        match self {
            Kind::Readers => "readers",
            Kind::ReadersBesideAWriter => "readers beside a writer",
            Kind::Mixed => "half reads, half updates",
            Kind::Writers => "writers",
        }
    }

    /// Percent of updates of each client; `clients` of them.
    fn write_percents(self, clients: u32) -> Vec<u32> {
        let of_each = match self {
            Kind::Readers | Kind::ReadersBesideAWriter => 0,
            Kind::Mixed => 50,
            Kind::Writers => 100,
        };
        let mut percents = vec![of_each; clients as usize];
        if self == Kind::ReadersBesideAWriter {
            percents.push(100);
        }
        percents
    }
}

#[derive(Serialize)]
struct Phase {
    kind: Kind,
    clients: u32,
    ops_per_second: Series,
    #[serde(skip_serializing_if = "Option::is_none")]
    writer_ops_per_second: Option<Series>,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    processes: bool,
    records: u64,
    seconds: f64,
    page_size: u32,
    reserve_percent: u8,
    phases: Vec<Phase>,
    file_bytes: u64,
}

/// Runs each kind of clients in each number.
pub fn run(global: &GlobalOptions, args: &ScaleArgs) -> Result<(), Failure> {
    if global.durable {
        let text = "--durable: nothing in this benchmark waits for the disk; leave it out";
        return Err(Failure::Usage(text.into()));
    }
    let place = Place::new("scale", args.measure.file.as_deref())?;
    let path = place.path().unwrap_or(Path::new(""));
    let mut options = opening::options(global);
    opening::with_creation(options.create_new(true), &args.measure.new);
    let db = options.open(path)?;
    let clients = Clients::new(global, args.clients.layout(), path, &db);
    traffic::load(&mut clients.session(), args.records).map_err(failure)?;
    db.checkpoint()?;
    let mut numbers: Vec<u32> =
        (0..31).map(|bits| 1 << bits).take_while(|&n| n < args.clients.clients).collect();
    numbers.push(args.clients.clients);
    let all = (Kind::ALL.len() * numbers.len()) as u64 * u64::from(args.measure.runs);
    let progress = Progress::of_operations(all, global.quiet);
    let mut scale = Scale { args, clients, progress, done: 0 };
    let mut phases = Vec::new();
    let mut out = Output::new();
    let machine = Machine::of(Some(path));
    if !args.measure.json {
        out.line(machine.line())?;
        let kind = if args.clients.are_processes() { "processes" } else { "threads" };
        out.line(format_args!(
            "{kind} on {} of 8 bytes, {} s each, {}; millions of operations a second",
            count_of(args.records, "record"),
            args.seconds,
            count_of(u64::from(args.measure.runs), "run")
        ))?;
    }
    for kind in Kind::ALL {
        for &number in &numbers {
            let phase = scale.phase(kind, number)?;
            if !args.measure.json {
                let text = line(&phase);
                scale.progress.hidden_for(|| out.line(text).and_then(|()| out.flush()))?;
            }
            phases.push(phase);
        }
    }
    drop(scale);
    let stat = db.stat()?;
    db.close()?;
    if args.measure.json {
        out.json(&Report {
            machine,
            processes: args.clients.are_processes(),
            records: args.records,
            seconds: args.seconds,
            page_size: stat.page_size,
            reserve_percent: stat.reserve_percent,
            phases,
            file_bytes: stat.file_bytes,
        })?;
    }
    out.finish()
}

struct Scale<'a> {
    args: &'a ScaleArgs,
    clients: Clients<'a>,
    progress: Progress,
    done: u64,
}

impl Scale<'_> {
    fn phase(&mut self, kind: Kind, number: u32) -> Result<Phase, Failure> {
        let (mut all, mut of_writer) = (Vec::new(), Vec::new());
        for run in 0..u64::from(self.args.measure.runs) {
            let percents = kind.write_percents(number);
            let jobs = (0..).zip(percents).map(|(n, write_percent)| {
                Job::Traffic(Work {
                    write_percent,
                    records: self.args.records,
                    seconds: self.args.seconds,
                    seed: self.args.seed.wrapping_add(run << 32).wrapping_add(n),
                })
            });
            let jobs: Vec<Job> = jobs.collect();
            let outcome = self.clients.run(&jobs)?;
            let speed =
                |done: &ntdb_workload::job::Done| done.operations as f64 / done.took.as_secs_f64();
            let (counted, writer) = outcome.clients.split_at(number as usize);
            all.push(counted.iter().map(speed).sum());
            of_writer.extend(writer.iter().map(speed));
            self.done += 1;
            self.progress.show_operations(self.done);
        }
        Ok(Phase {
            kind,
            clients: number,
            ops_per_second: Series::new(all),
            writer_ops_per_second: (!of_writer.is_empty()).then(|| Series::new(of_writer)),
        })
    }
}

fn line(phase: &Phase) -> String {
    let millions = |series: &Series| {
        let runs = series.runs.iter().map(|ops| ops / 1e6).collect();
        let Series { median, min, max, .. } = Series::new(runs);
        format!("{median:.3} ({min:.3} to {max:.3})")
    };
    let writer = phase.writer_ops_per_second.as_ref();
    let writer = writer.map_or(String::new(), |ops| format!("; the writer {}", millions(ops)));
    let number = grouped(phase.clients.into());
    format!("{:24} {number:>3}  {}{writer}", phase.kind.name(), millions(&phase.ops_per_second))
}
