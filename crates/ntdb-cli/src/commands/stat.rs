//! `ntdb stat`.

use std::path::Path;

use ntdb::{Error, FILL_PARTS, Fill, Stat};
use serde::Serialize;

use crate::bench::Updates;
use crate::cli::{GlobalOptions, InspectArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::grouped;

/// The members of [`Stat`], and what follows from them.
#[derive(Serialize)]
struct Facts<'a> {
    page_size: u32,
    records: u64,
    file_bytes: u64,
    bytes_per_record: Option<f64>,
    free_bytes: u64,
    retired_bytes: u64,
    log_bytes: u64,
    change_counter: u64,
    depth: u32,
    epoch: u64,
    checkpoint_bytes: u64,
    reserve_percent: u8,
    fill: Option<FillFacts>,
    updates: Updates,
    processes: &'a [u32],
    oldest_reader: Option<u32>,
    keep_log_bytes: u64,
    kept_log_bytes: u64,
    snapshots: u64,
    snapshot_bytes: u64,
    oldest_snapshot: Option<OldestSnapshot>,
}

/// The members of [`Fill`](ntdb::Fill).
#[derive(Serialize)]
struct FillFacts {
    pages: [u64; FILL_PARTS],
    live_percent: f64,
    free_percent: f64,
    is_sample: bool,
}

/// The members of [`SnapshotStat`](ntdb::SnapshotStat).
#[derive(Serialize)]
struct OldestSnapshot {
    pid: u32,
    age_ms: u64,
    changes_since_bytes: u64,
}

/// Prints facts about a database.
pub fn run(global: &GlobalOptions, args: &InspectArgs) -> Result<(), Failure> {
    let db = opening::for_reading(global, &args.file, args.read.read_only)?;
    let stat = db.stat()?;
    let fill = match db.fill() {
        // The rest may be what somebody needs to know about a damaged one.
        Err(Error::Corrupt { .. }) => None,
        fill => Some(fill?),
    };
    db.close()?;
    let facts = facts(&stat, fill);
    let mut out = Output::new();
    if args.json {
        out.json(&facts)?;
    } else {
        for (name, text) in table(&args.file, &facts) {
            out.line(format_args!("{name:<22}{text}"))?;
        }
    }
    out.finish()
}

fn facts(stat: &Stat, fill: Option<Fill>) -> Facts<'_> {
    Facts {
        page_size: stat.page_size,
        records: stat.records,
        file_bytes: stat.file_bytes,
        bytes_per_record: (stat.records > 0).then(|| stat.file_bytes as f64 / stat.records as f64),
        free_bytes: stat.free_bytes,
        retired_bytes: stat.retired_bytes,
        log_bytes: stat.log_bytes,
        change_counter: stat.change_counter,
        depth: stat.depth,
        epoch: stat.epoch,
        checkpoint_bytes: stat.checkpoint_bytes,
        reserve_percent: stat.reserve_percent,
        fill: fill.map(|fill| FillFacts {
            pages: fill.pages,
            live_percent: fill.live_percent,
            free_percent: fill.free_percent,
            is_sample: fill.is_sample,
        }),
        updates: Updates::new(&stat.updates),
        processes: &stat.processes,
        oldest_reader: stat.oldest_reader,
        keep_log_bytes: stat.keep_log_bytes,
        kept_log_bytes: stat.kept_log_bytes,
        snapshots: stat.snapshots,
        snapshot_bytes: stat.snapshot_bytes,
        oldest_snapshot: stat.oldest_snapshot.map(|oldest| OldestSnapshot {
            pid: oldest.pid,
            age_ms: oldest.age_ms,
            changes_since_bytes: oldest.changes_since_bytes,
        }),
    }
}

fn table(file: &Path, facts: &Facts) -> Vec<(&'static str, String)> {
    let bytes = |number: u64| format!("{} bytes", grouped(number));
    let ids: Vec<String> = facts.processes.iter().map(u32::to_string).collect();
    vec![
        ("database", file.display().to_string()),
        ("records", grouped(facts.records)),
        ("file size", bytes(facts.file_bytes)),
        (
            "per record",
            facts.bytes_per_record.map_or("-".into(), |number| format!("{number:.1} bytes")),
        ),
        ("free for re-use", bytes(facts.free_bytes)),
        ("replaced, still held", bytes(facts.retired_bytes)),
        ("redo log", bytes(facts.log_bytes)),
        ("page size", bytes(facts.page_size.into())),
        ("reserve", format!("{} %", facts.reserve_percent)),
        ("pages filled", facts.fill.as_ref().map_or("unknown, for damage".into(), filled)),
        (
            "pages by tenths",
            facts.fill.as_ref().map_or("-".into(), |fill| fill.pages.map(grouped).join(" ")),
        ),
        ("updates", facts.updates.describe()),
        ("hash depth", facts.depth.to_string()),
        ("epoch", facts.epoch.to_string()),
        ("change counter", grouped(facts.change_counter)),
        ("processes", format!("{} ({})", ids.len(), ids.join(", "))),
        (
            "oldest reader",
            facts.oldest_reader.map_or("none".into(), |process| format!("process {process}")),
        ),
        (
            "snapshots",
            match &facts.oldest_snapshot {
                None => "none".into(),
                Some(oldest) => format!(
                    "{}; the oldest is of process {}, {} old, {} of changes ago",
                    grouped(facts.snapshots),
                    oldest.pid,
                    age(oldest.age_ms),
                    bytes(oldest.changes_since_bytes)
                ),
            },
        ),
        ("held by snapshots", bytes(facts.snapshot_bytes)),
        (
            "log kept",
            match facts.keep_log_bytes {
                0 => "none".into(),
                asked => format!("{} (asked for: {})", bytes(facts.kept_log_bytes), bytes(asked)),
            },
        ),
    ]
}

fn filled(fill: &FillFacts) -> String {
    let FillFacts { live_percent, free_percent, is_sample, .. } = fill;
    let dead = (100.0 - live_percent - free_percent).max(0.0);
    let sample = if *is_sample { " (of a sample)" } else { "" };
    format!("{live_percent:.1} % live, {free_percent:.1} % free, {dead:.1} % dead{sample}")
}

/// As exactly as a person wants to know it.
fn age(ms: u64) -> String {
    match ms / 1000 {
        0 => format!("{ms} ms"),
        seconds @ 1..120 => format!("{seconds} s"),
        seconds @ 120..7_200 => format!("{} minutes", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} hours", seconds / 3_600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::age;

    #[test]
    fn ages_are_told_in_the_largest_unit_that_says_enough() {
        let cases = [
            (999, "999 ms"),
            (1_000, "1 s"),
            (119_999, "119 s"),
            (120_000, "2 minutes"),
            (7_200_000, "2 hours"),
            (172_800_000, "2 days"),
        ];
        for (ms, text) in cases {
            assert_eq!(age(ms), text);
        }
    }
}
