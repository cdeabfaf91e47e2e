//! What reserve and page size do to this project's own engine: TPC-B, with rows that keep their length and rows that grow.

use std::path::Path;

use ntdb_workload::crew;
use ntdb_workload::job::Job;
use ntdb_workload::machine::Machine;
use ntdb_workload::session::Result;
use ntdb_workload::tpcb::{self, Work};

use crate::PropertiesArgs;
use crate::engines::{Engine, Own, Setup, ntdb::Ntdb};
use crate::names::Name;
use crate::results::{Point, keep};
use crate::table::{Table, number};
use crate::tpcb::worker;

const RESERVES: [u8; 5] = [0, 10, 20, 30, 50];
const PAGE_BYTES: [u32; 5] = [4096, 8192, 16384, 32768, 65536];

/// What one run gave.
struct Figures {
    tps: f64,
    pages_dirtied: f64,
    checkpoint_bytes: f64,
    file_bytes: f64,
}

/// Measures.
pub fn run(args: &PropertiesArgs) -> Result<()> {
    println!("{}\n", Machine::of(Some(&args.common.dir)).line());
    let own = |reserve_percent, page_bytes| Own { reserve_percent, page_bytes };
    let reserves = RESERVES.map(|percent| (f64::from(percent), own(percent, 4096)));
    compare(args, "reserve", &reserves)?;
    let sizes = PAGE_BYTES.map(|bytes| (f64::from(bytes), own(0, bytes)));
    compare(args, "page size", &sizes)
}

fn compare(args: &PropertiesArgs, comparison: &str, variants: &[(f64, Own)]) -> Result<()> {
    for grow_bytes in [0, args.grow] {
        let mut results: Vec<Vec<Figures>> = variants.iter().map(|_| Vec::new()).collect();
        for run in 0..args.common.runs as u64 {
            for ((_, own), results) in variants.iter().zip(&mut results) {
                let dir = tempfile::tempdir_in(&args.common.dir)?;
                results.push(bank(args, dir.path(), *own, grow_bytes, run)?);
            }
        }
        let rows = if grow_bytes == 0 { "rows of one length" } else { "rows that grow" };
        println!(
            "TPC-B, {} by {comparison}, {} clients, {} transactions each, scale {}, {}; medians of {}\n",
            rows,
            args.clients,
            args.transactions,
            args.scale,
            if args.durable { "durable" } else { "relaxed" },
            args.common.runs
        );
        let mut table = Table::new([
            comparison,
            "tps",
            "from the least to the greatest",
            "pages dirtied a transaction",
            "bytes by checkpoints",
            "file bytes",
        ]);
        let mut points = Vec::new();
        for ((at, _), results) in variants.iter().zip(&results) {
            let mut point = Point::new(comparison, rows, *at);
            let of = |figure: fn(&Figures) -> f64| results.iter().map(figure).collect();
            point.add("tps", of(|figures| figures.tps));
            point.add("pages dirtied", of(|figures| figures.pages_dirtied));
            point.add("checkpoint bytes", of(|figures| figures.checkpoint_bytes));
            point.add("bytes", of(|figures| figures.file_bytes));
            let (least, most) = point.ranges["tps"];
            table.row(vec![
                format!("{at}"),
                number(point.medians["tps"]),
                format!("{} to {}", number(least), number(most)),
                format!("{:.3}", point.medians["pages dirtied"]),
                number(point.medians["checkpoint bytes"]),
                number(point.medians["bytes"]),
            ]);
            points.push(point);
        }
        table.print();
        keep(args.common.results.as_deref(), &points)?;
    }
    Ok(())
}

fn bank(
    args: &PropertiesArgs,
    dir: &Path,
    own: Own,
    grow_bytes: usize,
    run: u64,
) -> Result<Figures> {
    let setup = Setup { durable: args.durable, records: 0, create: true, own: Some(own) };
    let engine = Ntdb::open(dir, setup)?;
    let mut client = engine.client()?;
    tpcb::load(&mut client, args.scale)?;
    let before = engine.settled()?;
    let job = |client: u64| {
        Job::Tpcb(Work {
            scale: args.scale,
            transactions: args.transactions,
            durable: args.durable,
            grow_bytes,
            first_history: client * args.transactions,
            seed: run * args.clients + client,
        })
    };
    let jobs: Vec<Job> = (0..args.clients).map(job).collect();
    let outcome = crew::of_processes(&jobs, || worker(Name::Ntdb, dir, setup))?;
    let transactions = args.clients * args.transactions;
    tpcb::verify(&mut client, args.scale, transactions)?;
    let after = engine.settled()?;
    let checkpoint_bytes = (after.checkpoint_bytes - before.checkpoint_bytes) as f64;
    Ok(Figures {
        tps: outcome.per_second(),
        pages_dirtied: checkpoint_bytes / f64::from(own.page_bytes) / transactions as f64,
        checkpoint_bytes,
        file_bytes: after.file_bytes as f64,
    })
}
