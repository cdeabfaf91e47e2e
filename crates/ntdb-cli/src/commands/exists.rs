//! `ntdb exists`.

use serde::Serialize;

use crate::bytes;
use crate::cli::{ExistsArgs, GlobalOptions};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::text::json_lines::JsonBytes;

#[derive(Serialize)]
struct Answer<'a> {
    key: JsonBytes<'a>,
    exists: bool,
}

/// Says whether a key is there: with the exit status, and in JSON if asked.
pub fn run(global: &GlobalOptions, args: &ExistsArgs) -> Result<(), Failure> {
    let key = bytes::from_argument(&args.key, args.hex)?;
    let db = opening::for_reading(global, &args.file, args.read.read_only)?;
    let exists = db.contains(&key)?;
    db.close()?;
    if args.json {
        let mut out = Output::new();
        out.json(&Answer { key: JsonBytes(&key), exists })?;
        out.finish()?;
    }
    if exists { Ok(()) } else { Err(Failure::SilentNo) }
}
