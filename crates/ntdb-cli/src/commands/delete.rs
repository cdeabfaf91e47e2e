//! `ntdb delete`.

use crate::bytes;
use crate::cli::{DeleteArgs, GlobalOptions};
use crate::failure::Failure;
use crate::opening;

/// Deletes keys, each whether or not the others are there.
pub fn run(global: &GlobalOptions, args: &DeleteArgs) -> Result<(), Failure> {
    let keys = args.keys.iter().map(|key| bytes::from_argument(key, args.hex));
    let keys = keys.collect::<Result<Vec<_>, _>>()?;
    let db = opening::for_writing(global, &args.file, false)?;
    let mut absent = Vec::new();
    for key in &keys {
        if !db.delete(key)? {
            absent.push(format!("{} not found", bytes::name_key(&args.file, key)));
        }
    }
    db.close()?;
    if absent.is_empty() { Ok(()) } else { Err(Failure::No(absent.join("\nntdb: "))) }
}
