//! `ntdb list`.

use crate::bytes;
use crate::cli::{GlobalOptions, ListArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::text::json_lines::JsonBytes;
use crate::text::lines::escape_into;

/// Prints all keys.
pub fn run(global: &GlobalOptions, args: &ListArgs) -> Result<(), Failure> {
    let prefix = match &args.prefix {
        Some(prefix) => bytes::from_argument(prefix, args.hex)?,
        None => Vec::new(),
    };
    let db = opening::for_reading(global, &args.file, args.read.read_only)?;
    let mut out = Output::new();
    let mut line = Vec::new();
    for record in db.iter() {
        let (key, _) = record?;
        if !key.starts_with(&prefix) {
            continue;
        }
        if args.json {
            out.json(&JsonBytes(&key))?;
            continue;
        }
        line.clear();
        if args.null {
            line.extend_from_slice(&key);
            line.push(0);
        } else if args.hex {
            line.extend_from_slice(bytes::to_hex(&key).as_bytes());
            line.push(b'\n');
        } else {
            escape_into(&mut line, &key, None);
            line.push(b'\n');
        }
        out.bytes(&line)?;
    }
    out.finish()?;
    Ok(db.close()?)
}
