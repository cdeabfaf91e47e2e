//! Figures, as they are kept in a file for the plots.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use ntdb_workload::series::Series;
use ntdb_workload::session::Result;
use serde::{Deserialize, Serialize};

/// What was measured of one engine at one point.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// Which comparison.
    pub comparison: String,
    /// Name and version of the engine, or of a variant.
    pub engine: String,
    /// Where on the axis: records, clients, percent or bytes.
    pub at: f64,
    /// What was measured, and the medians.
    pub medians: BTreeMap<String, f64>,
    /// The same from the least to the greatest.
    pub ranges: BTreeMap<String, (f64, f64)>,
}

impl Point {
    /// A point that has nothing as yet.
    pub fn new(comparison: &str, engine: &str, at: f64) -> Point {
        let (medians, ranges) = (BTreeMap::new(), BTreeMap::new());
        Point { comparison: comparison.into(), engine: engine.into(), at, medians, ranges }
    }

    /// Adds a figure of several runs.
    pub fn add(&mut self, name: &str, runs: Vec<f64>) {
        let series = Series::new(runs);
        if series.median.is_finite() {
            self.medians.insert(name.into(), series.median);
            self.ranges.insert(name.into(), (series.min, series.max));
        }
    }
}

/// Adds points to the file, a line each.
pub fn keep(file: Option<&Path>, points: &[Point]) -> Result<()> {
    let Some(path) = file else { return Ok(()) };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    for point in points {
        writeln!(file, "{}", serde_json::to_string(point)?)?;
    }
    Ok(())
}

/// All points of the file.
pub fn read(path: &Path) -> Result<Vec<Point>> {
    let text = std::fs::read_to_string(path)?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}
