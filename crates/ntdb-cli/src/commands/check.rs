//! `ntdb check`.

use ntdb::CheckReport;
use serde::Serialize;

use crate::cli::{GlobalOptions, InspectArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::count_of;

#[derive(Serialize)]
struct Answer<'a> {
    clean: bool,
    records: u64,
    pages: u64,
    leaked_pages: u64,
    spare_problems: u64,
    problems: &'a [String],
}

/// Verifies a database and prints what is wrong with it.
pub fn run(global: &GlobalOptions, args: &InspectArgs) -> Result<(), Failure> {
    let report = examine(global, args)?;
    let mut out = Output::new();
    if args.json {
        out.json(&Answer {
            clean: report.is_clean(),
            records: report.records,
            pages: report.pages,
            leaked_pages: report.leaked_pages,
            spare_problems: report.spare_problems,
            problems: &report.problems,
        })?;
    } else {
        for problem in &report.problems {
            out.line(problem)?;
        }
        if report.leaked_pages > 0 {
            let pages = count_of(report.leaked_pages, "page");
            out.line(format_args!("leaked: {pages}, used by nothing"))?;
        }
        if report.is_clean() && !global.quiet {
            let records = count_of(report.records, "record");
            let pages = count_of(report.pages, "page");
            out.line(format_args!("clean: {records} in {pages}"))?;
        }
    }
    out.finish()?;
    if report.is_clean() {
        return Ok(());
    }
    if report.is_only_about_spares() {
        return Err(Failure::Damaged(format!(
            "{}: only what is there twice is damaged, as printed, and the other copy is whole: \
             nothing is lost; whoever closes the database last (this command, if nobody else uses \
             it and it may be written) writes it anew",
            args.file.display()
        )));
    }
    Err(Failure::Damaged(format!(
        "{}: damaged, as printed; restore a backup, or copy what can still be read with \
         `ntdb recover`",
        args.file.display()
    )))
}

/// Damage that keeps the database from being opened is a finding too, not only an error.
fn examine(global: &GlobalOptions, args: &InspectArgs) -> Result<CheckReport, Failure> {
    let examined = opening::for_reading(global, &args.file, args.read.read_only).and_then(|db| {
        let report = db.check()?;
        Ok((report, db))
    });
    match examined {
        Ok((report, db)) => {
            // Damage may also keep the last handle from closing in good order; the findings matter
            // more than that it did.
            match db.close() {
                Err(error) if report.is_clean() => Err(error.into()),
                _ => Ok(report),
            }
        }
        Err(Failure::Engine(error @ ntdb::Error::Corrupt { .. })) => {
            let mut report = CheckReport::default();
            report.problems.push(match error {
                ntdb::Error::Corrupt { place, reason, .. } => format!("{place}: {reason}"),
                other => other.to_string(),
            });
            Ok(report)
        }
        Err(failure) => Err(failure),
    }
}
