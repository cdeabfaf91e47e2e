//! Several runs of one measurement.

use serde::Serialize;

/// What several runs gave.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// The median; of an even number of runs, the mean of the middle two.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
    /// All, in the order of the runs.
    pub runs: Vec<f64>,
}

impl Series {
    /// Of at least one run; of none, all is zero.
    pub fn new(runs: Vec<f64>) -> Series {
        let mut sorted = runs.clone();
        sorted.sort_by(f64::total_cmp);
        let Some((&min, &max)) = sorted.first().zip(sorted.last()) else {
            return Series { median: 0.0, min: 0.0, max: 0.0, runs };
        };
        let median = (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0;
        Series { median, min, max, runs }
    }

    /// How far least and greatest lie apart, in percent of the median.
    pub fn spread_percent(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { (self.max - self.min) * 100.0 / self.median }
    }
}

#[cfg(test)]
mod tests {
    use super::Series;

    #[test]
    fn the_median_is_in_the_middle() {
        let of = |runs: &[f64]| Series::new(runs.to_vec());
        assert_eq!(of(&[3.0, 1.0, 2.0]).median, 2.0);
        assert_eq!(of(&[4.0, 1.0]).median, 2.5);
        assert_eq!(of(&[]).median, 0.0);
        let three = of(&[110.0, 90.0, 100.0]);
        assert_eq!((three.min, three.max, three.spread_percent()), (90.0, 110.0, 20.0));
        assert_eq!(three.runs, [110.0, 90.0, 100.0]);
    }
}
