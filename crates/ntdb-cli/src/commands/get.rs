//! `ntdb get`.

use serde::Serialize;

use crate::bytes;
use crate::cli::{GetArgs, GlobalOptions};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::text::json_lines::JsonBytes;

#[derive(Serialize)]
struct Answer<'a> {
    key: JsonBytes<'a>,
    value: Option<JsonBytes<'a>>,
}

/// Prints a value.
pub fn run(global: &GlobalOptions, args: &GetArgs) -> Result<(), Failure> {
    let key = bytes::from_argument(&args.key, args.hex)?;
    let db = opening::for_reading(global, &args.file, args.read.read_only)?;
    // A copy, so that a slow reader of our output does not make us hold back pages of the database.
    let value = db.get(&key)?;
    db.close()?;

    let mut out = Output::new();
    if args.json {
        out.json(&Answer { key: JsonBytes(&key), value: value.as_deref().map(JsonBytes) })?;
    } else if let Some(value) = &value {
        if args.hex {
            out.bytes(bytes::to_hex(value).as_bytes())?;
        } else {
            out.bytes(value)?;
        }
        if !args.raw {
            out.bytes(b"\n")?;
        }
    }
    out.finish()?;
    match value {
        Some(_) => Ok(()),
        None => Err(Failure::No(format!("{} not found", bytes::name_key(&args.file, &key)))),
    }
}
