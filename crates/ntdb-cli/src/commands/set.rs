//! `ntdb set`.

use serde::Serialize;

use crate::cli::{GlobalOptions, SetArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;

#[derive(Serialize)]
struct Answer {
    reserve_percent: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    keep_log_bytes: Option<u64>,
}

/// Changes what can be changed of a database, durably, while others use it.
pub fn run(global: &GlobalOptions, args: &SetArgs) -> Result<(), Failure> {
    let mut options = opening::options(global);
    if let Some(bytes) = args.settings.keep_log {
        options.keep_log(bytes);
    }
    let db = options.open(&args.file)?;
    if let Some(percent) = args.settings.reserve {
        db.set_reserve(percent)?;
    } else {
        // So that what was set is on disk.
        db.checkpoint()?;
    }
    let reserve_percent = db.stat()?.reserve_percent;
    let keep_log_bytes = args.settings.keep_log;
    let mut out = Output::new();
    if args.json {
        out.json(&Answer { reserve_percent, keep_log_bytes })?;
    } else if !global.quiet {
        let kept = keep_log_bytes.map(|bytes| format!(", {bytes} bytes of past log kept"));
        let kept = kept.unwrap_or_default();
        out.line(format_args!("reserve {reserve_percent} %{kept}"))?;
    }
    out.finish()?;
    db.close()?;
    Ok(())
}
