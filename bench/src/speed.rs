//! Single operations, one thread of one process.
//!
//! Keys are the numbers from 0 on, values as long: four bytes each, little-endian. Not in a transaction: nothing waits for the disk.

use std::path::Path;
use std::time::{Duration, Instant};

use ntdb_workload::machine::Machine;
use ntdb_workload::series::Series;
use ntdb_workload::session::{Access, Result, Session, wrong};

use crate::SpeedArgs;
use crate::engines::{Engine, Setup};
use crate::names::{Name, With};
use crate::results::{Point, keep};
use crate::table::{Table, number};

const PHASES: [&str; 5] =
    ["add", "find", "traverse", "add in a transaction", "find in a transaction"];

/// What one run gave: nanoseconds per operation of each phase, and bytes on disk.
struct Figures {
    version: String,
    relaxed: &'static str,
    ns: [f64; PHASES.len()],
    bytes: u64,
}

/// Compares.
pub fn run(args: &SpeedArgs) -> Result<()> {
    println!("{}\n", Machine::of(Some(&args.common.dir)).line());
    for &records in &args.records {
        compare(args, records)?;
    }
    Ok(())
}

fn compare(args: &SpeedArgs, records: u64) -> Result<()> {
    let engines = args.common.engines();
    let mut results: Vec<Vec<Figures>> = engines.iter().map(|_| Vec::new()).collect();
    let mut refused: Vec<Option<String>> = vec![None; engines.len()];
    for _ in 0..args.common.runs {
        for (index, name) in engines.iter().enumerate() {
            let dir = tempfile::tempdir_in(&args.common.dir)?;
            match name.with(Speed { args, dir: dir.path(), records }) {
                Ok(figures) => results[index].push(figures),
                Err(error) => refused[index] = Some(error.to_string()),
            }
        }
    }
    println!(
        "{records} records, nanoseconds per operation (median of {}), in parentheses how many times ntdb's\n",
        args.common.runs
    );
    let mut table =
        Table::new(["engine"].into_iter().chain(PHASES).chain(["bytes on disk", "what survives"]));
    let of = |figures: &[Figures], phase: usize| {
        Series::new(figures.iter().map(|figures| figures.ns[phase]).collect())
    };
    let own = engines.iter().position(|&name| name == Name::Ntdb).map(|index| &results[index]);
    let mut points = Vec::new();
    for ((name, figures), refused) in engines.iter().zip(&results).zip(&refused) {
        let Some(first) = figures.first() else {
            let why = refused.as_deref().unwrap_or("not measured");
            let mut row = vec![format!("{name:?}"), why.to_string()];
            row.resize(PHASES.len() + 3, String::new());
            table.row(row);
            continue;
        };
        let mut row = vec![first.version.clone()];
        for phase in 0..PHASES.len() {
            let ns = of(figures, phase).median;
            let own = own.map_or(0.0, |own| of(own, phase).median);
            row.push(if ns.is_nan() {
                "cannot".into()
            } else if own > 0.0 {
                format!("{} ({:.1})", number(ns), ns / own)
            } else {
                number(ns)
            });
        }
        let mut point = Point::new("speed", &first.version, records as f64);
        for (phase, name) in PHASES.iter().enumerate() {
            point.add(name, of(figures, phase).runs);
        }
        point.add("bytes", figures.iter().map(|figures| figures.bytes as f64).collect());
        points.push(point);
        row.push(number(first.bytes as f64));
        row.push(first.relaxed.into());
        table.row(row);
    }
    table.print();
    keep(args.common.results.as_deref(), &points)
}

struct Speed<'a> {
    args: &'a SpeedArgs,
    dir: &'a Path,
    records: u64,
}

fn key(n: u64) -> [u8; 4] {
    (n as u32).to_le_bytes()
}

impl With for Speed<'_> {
    type Output = Result<Figures>;

    fn with<E: Engine>(self) -> Result<Figures> {
        let Speed { args, dir, records } = self;
        let limit = Duration::try_from_secs_f64(args.at_most)?;
        let setup = Setup { durable: false, records, create: true, own: None };
        let mut ns = [f64::NAN; PHASES.len()];
        let single = dir.join("single");
        std::fs::create_dir(&single)?;
        let engine = E::open(&single, setup)?;
        let mut client = engine.client()?;
        let (took, done) = timed(records, limit, |n| client.put(&key(n), &key(n)))?;
        ns[0] = took;
        let mut rest = (done..records).map(|n| (key(n).to_vec(), key(n).to_vec()));
        client.load(&mut rest)?;
        let mut value = Vec::new();
        ns[1] = timed(records, limit, |n| find(client.get(&key(n), &mut value)?))?.0;
        let begin = Instant::now();
        let (mut seen, mut sum) = (0, 0);
        client.for_each(&mut |key, value| {
            seen += 1;
            sum += u64::from(key.first().copied().unwrap_or(0)) + value.len() as u64;
        })?;
        ns[2] = begin.elapsed().as_nanos() as f64 / records as f64;
        if seen != records || sum == 0 {
            return Err(wrong(format!("{seen} records instead of {records}")));
        }
        drop(client);
        drop(engine);
        let bytes = bytes_in(&single)?;

        let whole = dir.join("whole");
        std::fs::create_dir(&whole)?;
        let engine = E::open(&whole, setup)?;
        let mut client = engine.client()?;
        let begin = Instant::now();
        client.transaction(false, &mut |all| {
            (0..records).try_for_each(|n| all.put(&key(n), &key(n)))
        })?;
        ns[3] = begin.elapsed().as_nanos() as f64 / records as f64;
        client.transaction(false, &mut |all| {
            // So that it is no transaction of reads only, where an engine makes a difference.
            all.put(&key(0), &key(0))?;
            ns[4] = timed(records, limit, |n| find(all.get(&key(n), &mut value)?))?.0;
            Ok(())
        })?;
        Ok(Figures { version: E::version(), relaxed: E::RELAXED, ns, bytes })
    }

    fn with_server(self, _fill_percent: u32) -> Result<Figures> {
        Err(wrong("a server: no single operations of a process of its own; see TPC-B"))
    }
}

fn find(found: bool) -> Result<()> {
    if found { Ok(()) } else { Err(wrong("a record is not there")) }
}

/// Nanoseconds for each of `count` operations, or of those that were done in time; and how many those were.
fn timed(
    count: u64,
    limit: Duration,
    mut operation: impl FnMut(u64) -> Result<()>,
) -> Result<(f64, u64)> {
    let begin = Instant::now();
    let mut done = 0;
    while done < count {
        operation(done)?;
        done += 1;
        if done.is_multiple_of(256) && begin.elapsed() > limit {
            break;
        }
    }
    Ok((begin.elapsed().as_nanos() as f64 / done.max(1) as f64, done))
}

/// Bytes that the files in `dir` take on disk.
pub fn bytes_in(dir: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { bytes_in(&entry.path())? } else { metadata.blocks() * 512 };
    }
    Ok(bytes)
}
