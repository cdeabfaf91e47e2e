//! `ntdb create`.

use crate::cli::{CreateArgs, GlobalOptions};
use crate::failure::Failure;
use crate::opening;

/// Makes a new, empty database; one that is there is left alone.
pub fn run(global: &GlobalOptions, args: &CreateArgs) -> Result<(), Failure> {
    let mut options = opening::options(global);
    let db = opening::with_creation(options.create_new(true), &args.new).open(&args.file)?;
    Ok(db.close()?)
}
