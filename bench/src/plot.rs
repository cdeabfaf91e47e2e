//! Plots of the figures, as SVG.

use std::collections::BTreeMap;
use std::path::Path;

use ntdb_workload::session::{Result, wrong};
use plotters::prelude::*;

use crate::results::{self, Point};

const SIZE: (u32, u32) = (960, 560);

/// A plot: what of which comparison, and how the axes are named.
struct Kind {
    file: &'static str,
    comparison: &'static str,
    figure: &'static str,
    title: &'static str,
    x: &'static str,
    y: &'static str,
}

const LINES: &[Kind] = &[
    line("add", "speed", "add", "Adding, not in a transaction", "records", "ns per operation"),
    line("find", "speed", "find", "Finding, not in a transaction", "records", "ns per operation"),
    line("traverse", "speed", "traverse", "Traversing", "records", "ns per record"),
    line(
        "add-in-transaction",
        "speed",
        "add in a transaction",
        "Adding in one transaction",
        "records",
        "ns per operation",
    ),
    line(
        "find-in-transaction",
        "speed",
        "find in a transaction",
        "Finding in one transaction",
        "records",
        "ns per operation",
    ),
    line("bytes", "speed", "bytes", "Size on disk", "records", "bytes"),
    line("tpcb", "tpcb", "tps", "TPC-B, durable", "clients", "transactions a second"),
    line("readers", "readers", "ops", "Readers", "processes", "reads a second, all together"),
    line("writers", "writers", "ops", "Writers", "processes", "updates a second, all together"),
];

const BARS: &[Kind] = &[
    line(
        "reserve",
        "reserve",
        "tps",
        "TPC-B by reserve",
        "reserve, percent",
        "transactions a second",
    ),
    line(
        "page-size",
        "page size",
        "tps",
        "TPC-B by page size",
        "bytes of a page",
        "transactions a second",
    ),
];

const fn line(
    file: &'static str,
    comparison: &'static str,
    figure: &'static str,
    title: &'static str,
    x: &'static str,
    y: &'static str,
) -> Kind {
    Kind { file, comparison, figure, title, x, y }
}

/// Draws whatever there are figures for.
pub fn run(from: &Path, dir: &Path) -> Result<()> {
    let points = results::read(from)?;
    std::fs::create_dir_all(dir)?;
    for (kinds, are_bars) in [(LINES, false), (BARS, true)] {
        for kind in kinds {
            let of_kind = points.iter().filter(|point| point.comparison == kind.comparison);
            let mut lines: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
            for Point { engine, at, medians, .. } in of_kind {
                if let Some(&value) = medians.get(kind.figure) {
                    lines.entry(engine).or_default().push((*at, value));
                }
            }
            if lines.is_empty() {
                continue;
            }
            lines.values_mut().for_each(|line| line.sort_by(|a, b| a.0.total_cmp(&b.0)));
            let path = dir.join(format!("{}.svg", kind.file));
            let drawn =
                if are_bars { bars(&path, kind, &lines) } else { curves(&path, kind, &lines) };
            drawn.map_err(|error| wrong(format!("{}: {error}", path.display())))?;
        }
    }
    Ok(())
}

type Lines<'a> = BTreeMap<&'a str, Vec<(f64, f64)>>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn colour(index: usize, of: usize) -> HSLColor {
    HSLColor(index as f64 / of as f64, 0.75, if index.is_multiple_of(2) { 0.38 } else { 0.55 })
}

/// A number on an axis.
fn short(value: f64) -> String {
    match value {
        1e9.. => format!("{} G", value / 1e9),
        1e6.. => format!("{} M", value / 1e6),
        1e3.. => format!("{} k", value / 1e3),
        _ => format!("{value}"),
    }
}

fn curves(path: &Path, kind: &Kind, lines: &Lines) -> Drawn {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let all = || lines.values().flatten();
    let bound = |of: fn(&(f64, f64)) -> f64| {
        let values = || all().map(of);
        (values().fold(f64::MAX, f64::min) * 0.8, values().fold(f64::MIN, f64::max) * 1.25)
    };
    let (x, y) = (bound(|point| point.0), bound(|point| point.1.max(0.1)));
    let mut chart = ChartBuilder::on(&root)
        .caption(kind.title, ("sans-serif", 22))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(84)
        .margin_right(240)
        .build_cartesian_2d((x.0..x.1).log_scale(), (y.0..y.1).log_scale())?;
    let (x_label, y_label) = (|x: &f64| short(*x), |y: &f64| short(*y));
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(kind.x).y_desc(kind.y);
    mesh.x_label_formatter(&x_label).y_label_formatter(&y_label).draw()?;
    for (index, (engine, line)) in lines.iter().enumerate() {
        let own = engine.starts_with("ntdb");
        let style =
            if own { BLACK.stroke_width(4) } else { colour(index, lines.len()).stroke_width(2) };
        chart.draw_series(LineSeries::new(line.iter().copied(), style))?;
        chart.draw_series(line.iter().map(|&at| Circle::new(at, 3, style.filled())))?;
        // The names stand beside the plot, in the order of their last points.
        let above = lines
            .values()
            .filter_map(|other| other.last())
            .filter(|other| other.1 > line.last().map_or(0.0, |last| last.1));
        let place = (SIZE.0 as i32 - 236, 60 + 24 * above.count() as i32);
        root.draw(&Rectangle::new([place, (place.0 + 14, place.1 + 12)], style.filled()))?;
        let text = (engine.to_string(), (place.0 + 20, place.1));
        root.draw(&Text::new(text.0, text.1, ("sans-serif", 15)))?;
    }
    root.present()?;
    Ok(())
}

fn bars(path: &Path, kind: &Kind, lines: &Lines) -> Drawn {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let most = lines.values().flatten().map(|point| point.1).fold(0.0, f64::max);
    let longest = lines.values().map(Vec::len).max().unwrap_or(0);
    let width = (lines.len() + 1) as f64;
    let mut chart = ChartBuilder::on(&root)
        .caption(kind.title, ("sans-serif", 22))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(84)
        .margin_right(240)
        .build_cartesian_2d(0.0..longest as f64 * width, 0.0..most * 1.1)?;
    let names: Vec<f64> =
        lines.values().next().into_iter().flatten().map(|point| point.0).collect();
    chart.configure_mesh().disable_x_mesh().x_desc(kind.x).y_desc(kind.y).x_labels(0).draw()?;
    for (index, (name, line)) in lines.iter().enumerate() {
        let style = colour(index, lines.len()).filled();
        chart.draw_series(line.iter().enumerate().map(|(place, point)| {
            let left = place as f64 * width + index as f64 + 0.5;
            Rectangle::new([(left, 0.0), (left + 0.9, point.1)], style)
        }))?;
        let place = (SIZE.0 as i32 - 236, 60 + 24 * index as i32);
        root.draw(&Rectangle::new([place, (place.0 + 14, place.1 + 12)], style))?;
        root.draw(&Text::new(name.to_string(), (place.0 + 20, place.1), ("sans-serif", 15)))?;
    }
    for (place, name) in names.iter().enumerate() {
        let at = chart.backend_coord(&((place as f64 + 0.4) * width, 0.0));
        root.draw(&Text::new(format!("{name}"), (at.0, at.1 + 8), ("sans-serif", 15)))?;
    }
    root.present()?;
    Ok(())
}
