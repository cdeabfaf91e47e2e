//! The benchmarks of `ntdb bench`.

pub mod clients;
pub mod dbspeed;
pub mod grow;
pub mod mixed;
pub mod place;
pub mod scale;
pub mod speed;
pub mod tpcb;

use ntdb::UpdateStat;
use ntdb_workload::series::Series;
use serde::Serialize;

use crate::progress::grouped;

/// The members of [`UpdateStat`].
#[derive(Serialize)]
pub struct Updates {
    stayed: u64,
    copied: u64,
    compacted: u64,
    split: u64,
    moved: u64,
}

impl Updates {
    /// Since the database was opened.
    pub fn new(all: &UpdateStat) -> Updates {
        Updates::between(&UpdateStat::default(), all)
    }

    /// From one moment to another.
    pub fn between(before: &UpdateStat, after: &UpdateStat) -> Updates {
        Updates {
            stayed: after.stayed - before.stayed,
            copied: after.copied - before.copied,
            compacted: after.compacted - before.compacted,
            split: after.split - before.split,
            moved: after.moved - before.moved,
        }
    }

    /// In words.
    pub fn describe(&self) -> String {
        let ways = [
            (self.stayed, "stayed in their page"),
            (self.copied, "copied it"),
            (self.compacted, "compacted it"),
            (self.split, "split it"),
            (self.moved, "moved a long value"),
        ];
        ways.map(|(count, way)| format!("{} {way}", grouped(count))).join(", ")
    }
}

/// A figure and its spread, as people read it.
pub fn range(series: &Series) -> String {
    let number = |value: f64| {
        if value < 100.0 { format!("{value:.1}") } else { grouped(value.round() as u64) }
    };
    let Series { median, min, max, .. } = series;
    match series.runs.len() {
        0 | 1 => number(*median),
        _ => format!(
            "{} ({} to {}, {:.0} %)",
            number(*median),
            number(*min),
            number(*max),
            series.spread_percent()
        ),
    }
}
