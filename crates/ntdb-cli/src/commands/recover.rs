//! `ntdb recover`.

use ntdb::SalvageReport;
use serde::Serialize;

use crate::cli::{GlobalOptions, RecoverArgs};
use crate::failure::Failure;
use crate::output::Output;
use crate::progress::{Progress, count_of};

#[derive(Serialize)]
struct Answer<'a> {
    complete: bool,
    records: u64,
    uncertain_records: u64,
    lost_values: u64,
    pages: u64,
    damaged_pages: u64,
    log_records: u64,
    problems: &'a [String],
}

/// Copies what can still be read of a damaged database into a new one, and prints what could not.
pub fn run(global: &GlobalOptions, args: &RecoverArgs) -> Result<(), Failure> {
    let progress = Progress::of_pages(global.quiet);
    let report = ntdb::salvage(&args.source, &args.destination, |so_far| {
        progress.show_pages(so_far.pages_done, so_far.pages, so_far.records);
    });
    let report = report.map_err(|error| match error {
        // Not the status that says that something is lost.
        ntdb::Error::AlreadyExists { path } => Failure::Wrong(format!(
            "{}: already exists, and is left as it is; name a new file",
            path.display()
        )),
        ntdb::Error::NotFound { path } => Failure::Wrong(format!(
            "{}: no such file: nothing to recover there; check the path",
            path.display()
        )),
        error => error.into(),
    })?;
    drop(progress);
    let mut out = Output::new();
    if args.json {
        out.json(&Answer {
            complete: report.is_complete(),
            records: report.records,
            uncertain_records: report.uncertain_records,
            lost_values: report.lost_values,
            pages: report.pages,
            damaged_pages: report.damaged_pages,
            log_records: report.log_records,
            problems: &report.problems,
        })?;
    } else {
        for problem in &report.problems {
            out.line(problem)?;
        }
        if !global.quiet {
            out.line(format_args!("copied: {}", count_of(report.records, "record")))?;
        }
    }
    out.finish()?;
    if report.is_complete() {
        return Ok(());
    }
    Err(Failure::No(format!(
        "{}: not everything could be read{}; {} has the rest",
        args.source.display(),
        details(&report),
        args.destination.display()
    )))
}

/// What is known of the losses, in numbers.
fn details(report: &SalvageReport) -> String {
    let mut parts = Vec::new();
    if report.damaged_pages > 0 {
        parts.push(format!("{} damaged", count_of(report.damaged_pages, "page")));
    }
    if report.lost_values > 0 {
        parts.push(format!("{} lost", count_of(report.lost_values, "value")));
    }
    if report.uncertain_records > 0 {
        let records = count_of(report.uncertain_records, "record");
        parts.push(format!("{records} perhaps older than the last ones stored, or deleted since"));
    }
    if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) }
}
