//! Latencies, as percentiles.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longer ones count as that: an hour, in nanoseconds.
const MOST_NS: u64 = 3_600_000_000_000;

/// A histogram of latencies, each to three digits.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies(Histogram::new_with_bounds(1, MOST_NS, 3).expect("the bounds are in order"))
    }
}

/// A histogram as a list of values in nanoseconds and their counts, to be sent to another process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Counts(Vec<(u64, u64)>);

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Percentiles {
    /// Half of all took no longer.
    pub p50_us: f64,
    /// 90 of a hundred took no longer.
    pub p90_us: f64,
    /// 99 of a hundred.
    pub p99_us: f64,
    /// 999 of a thousand.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl Latencies {
    /// Counts one more.
    pub fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(MOST_NS);
        self.0.saturating_record(ns.max(1));
    }

    /// Adds what another process has counted.
    pub fn add(&mut self, counts: &Counts) {
        for &(value, count) in &counts.0 {
            self.0.saturating_record_n(value, count);
        }
    }

    /// All of them, to be sent.
    pub fn counts(&self) -> Counts {
        let all = self.0.iter_recorded();
        Counts(all.map(|at| (at.value_iterated_to(), at.count_at_value())).collect())
    }

    /// The percentiles.
    pub fn percentiles(&self) -> Percentiles {
        let at = |percent| self.0.value_at_quantile(percent) as f64 / 1e3;
        Percentiles {
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: self.0.max() as f64 / 1e3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sent_and_added_they_are_the_same() {
        let (mut all, mut parts) = (Latencies::default(), Latencies::default());
        for part in 0..3 {
            let mut own = Latencies::default();
            for n in 1..=1_000u64 {
                let took = Duration::from_micros(n * (part + 1));
                own.record(took);
                all.record(took);
            }
            parts.add(&own.counts());
        }
        let (all, parts) = (all.percentiles(), parts.percentiles());
        assert_eq!(format!("{all:?}"), format!("{parts:?}"));
        assert!((all.max_us - 3_000.0).abs() < 3.0, "{all:?}");
        assert!(all.p50_us > 700.0 && all.p50_us < 1_000.0, "{all:?}");
    }

    #[test]
    fn none_and_very_long_ones_are_no_error() {
        assert_eq!(Latencies::default().percentiles().max_us, 0.0);
        let mut long = Latencies::default();
        long.record(Duration::MAX);
        assert!(long.percentiles().p50_us > 3.5e9);
    }
}
