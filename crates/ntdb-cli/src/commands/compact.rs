//! `ntdb compact`.

use serde::Serialize;

use crate::cli::{CompactArgs, GlobalOptions};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::Progress;

#[derive(Serialize)]
struct Answer {
    bytes_before: u64,
    bytes_after: u64,
}

/// Steps of the progress bar.
const STEPS: u64 = 1000;

/// Makes a database's file small, and prints how much it was and is.
pub fn run(global: &GlobalOptions, args: &CompactArgs) -> Result<(), Failure> {
    let db = opening::for_writing(global, &args.file, false)?;
    let bytes_before = db.stat()?.file_bytes;
    let progress = Progress::of_operations(STEPS, global.quiet);
    db.compact_with_progress(|share| progress.show_operations((share * STEPS as f64) as u64))?;
    drop(progress);
    let bytes_after = db.stat()?.file_bytes;
    let mut out = Output::new();
    if args.json {
        out.json(&Answer { bytes_before, bytes_after })?;
    } else if !global.quiet {
        out.line(format_args!("compacted: {bytes_before} bytes before, {bytes_after} now"))?;
    }
    out.finish()?;
    db.close()?;
    Ok(())
}
