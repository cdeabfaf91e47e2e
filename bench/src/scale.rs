//! More and more processes that read, or write, single records of eight bytes; nothing waits for the disk.

use std::path::Path;

use ntdb_workload::crew;
use ntdb_workload::job::Job;
use ntdb_workload::machine::Machine;
use ntdb_workload::session::{Result, wrong};
use ntdb_workload::traffic::{self, Work};

use crate::ScaleArgs;
use crate::engines::{Engine, Setup};
use crate::names::{Name, With};
use crate::results::{Point, keep};
use crate::table::{Table, number};
use crate::tpcb::worker;

/// Compares.
pub fn run(args: &ScaleArgs) -> Result<()> {
    println!("{}\n", Machine::of(Some(&args.common.dir)).line());
    for (comparison, write_percent) in [("readers", 0), ("writers", 100)] {
        println!(
            "{comparison}: processes on {} records of 8 bytes, {} s each; operations a second, all together\n",
            args.records, args.seconds
        );
        let numbers: Vec<String> = args.clients.iter().map(u64::to_string).collect();
        let mut table =
            Table::new(["engine"].into_iter().chain(numbers.iter().map(String::as_str)));
        let mut points = Vec::new();
        for &name in args.common.engines() {
            let mut row = Vec::new();
            for &clients in &args.clients {
                let mut runs = Vec::new();
                let mut engine = Err(wrong("not measured"));
                for _ in 0..args.common.runs {
                    let dir = tempfile::tempdir_in(&args.common.dir)?;
                    engine =
                        name.with(Crowd { args, name, dir: dir.path(), clients, write_percent });
                    runs.extend(engine.as_ref().ok().map(|(_, ops)| *ops));
                }
                match engine {
                    Ok((engine, _)) => {
                        let mut point = Point::new(comparison, &engine, clients as f64);
                        point.add("ops", runs);
                        if row.is_empty() {
                            row.push(engine);
                        }
                        row.push(number(point.medians["ops"]));
                        points.push(point);
                    }
                    Err(error) => {
                        row = vec![format!("{name:?}"), error.to_string()];
                        break;
                    }
                }
            }
            row.resize(args.clients.len() + 1, String::new());
            table.row(row);
        }
        table.print();
        keep(args.common.results.as_deref(), &points)?;
    }
    Ok(())
}

struct Crowd<'a> {
    args: &'a ScaleArgs,
    name: Name,
    dir: &'a Path,
    clients: u64,
    write_percent: u32,
}

impl With for Crowd<'_> {
    type Output = Result<(String, f64)>;

    fn with<E: Engine>(self) -> Result<(String, f64)> {
        let Crowd { args, name, dir, clients, write_percent } = self;
        if !E::HAS_PROCESSES {
            return Err(wrong("one process only"));
        }
        let setup = Setup { durable: false, records: args.records, create: true, own: None };
        let engine = E::open(dir, setup)?;
        traffic::load(&mut engine.client()?, args.records)?;
        let job = |seed| {
            Job::Traffic(Work { write_percent, records: args.records, seconds: args.seconds, seed })
        };
        let jobs: Vec<Job> = (0..clients).map(job).collect();
        let outcome = crew::of_processes(&jobs, || worker(name, dir, setup))?;
        let speed =
            outcome.clients.iter().map(|done| done.operations as f64 / done.took.as_secs_f64());
        Ok((E::version(), speed.sum()))
    }

    fn with_server(self, _fill_percent: u32) -> Self::Output {
        Err(wrong("a server: see TPC-B"))
    }
}
