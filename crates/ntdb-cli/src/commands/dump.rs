//! `ntdb dump`.

use crate::cli::{DumpArgs, GlobalOptions};
use crate::commands::load::text_format;
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;

/// Prints all records.
///
/// The iterator copies each record, so that a slow reader of our output holds back no page of the
/// database.
pub fn run(global: &GlobalOptions, args: &DumpArgs) -> Result<(), Failure> {
    let format = text_format(&args.format, true)?;
    let db = opening::for_reading(global, &args.file, args.read.read_only)?;
    let mut out = Output::new();
    let mut text = Vec::new();
    for record in db.iter() {
        let (key, value) = record?;
        text.clear();
        format.write_record(&mut text, &key, &value);
        out.bytes(&text)?;
    }
    out.finish()?;
    Ok(db.close()?)
}
