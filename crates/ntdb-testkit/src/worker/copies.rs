//! The roles that copy a database, and tell what a copy holds.

use ntdb::{BackupOptions, Db, Error};

use crate::args::Args;
use crate::script::Digest;
use crate::worker::faulty;
use crate::{crash, powercut};

/// Copies the database to `to`, over what is there if `force`. Says "made", or "failed" and why, if it is for what the system
/// reports or for what is there.
///
/// # Errors
/// Any other error.
pub fn backup(args: &Args) -> Result<String, String> {
    if args.text("hits").is_some() || args.text("fault_hits").is_some() {
        crash::count();
    }
    let to = args.path("to");
    if args.text("record").is_some() {
        let dir = to.parent().expect("a destination in a directory");
        powercut::record(dir, &args.path("record"));
    }
    let made = copy(args, &to);
    if args.text("hits").is_some() {
        crash::write_hits(&args.path("hits")).map_err(|e| format!("hits: {e}"))?;
    }
    if args.text("fault_hits").is_some() {
        faulty::write_hits(&args.path("fault_hits")).map_err(|e| format!("hits: {e}"))?;
    }
    match made {
        Ok(records) => Ok(format!("made {records}")),
        Err(
            error @ (Error::Io { .. }
            | Error::Full { .. }
            | Error::AlreadyExists { .. }
            | Error::InUse { .. }
            | Error::ShmMissing { .. }
            | Error::AddressSpace { .. }
            | Error::Poisoned { .. }),
        ) => Ok(format!("failed {error}")),
        Err(error) => Err(format!("{error:?}: {error}")),
    }
}

fn copy(args: &Args, to: &std::path::Path) -> Result<u64, Error> {
    let db = Db::open(&args.database)?;
    let mut options = BackupOptions::new();
    let report = db.backup(to, options.overwrite(args.get("force", false)))?;
    db.close()?;
    Ok(report.records)
}

/// Says what the database holds, and that it is whole, also for writers; "absent" if it is not there.
///
/// # Errors
/// What is wrong with it.
pub fn digest(args: &Args) -> Result<String, String> {
    if !args.database.exists() {
        return Ok("absent".into());
    }
    let db = Db::open(&args.database).map_err(|e| format!("open: {e}"))?;
    let digest = Digest::of(&db).map_err(|e| format!("read: {e}"))?;
    // A log of something else beside it would be noticed here.
    db.put(b"a further key", b"x").map_err(|e| format!("put: {e}"))?;
    db.sync().map_err(|e| format!("sync: {e}"))?;
    db.delete(b"a further key").map_err(|e| format!("delete: {e}"))?;
    let report = db.check().map_err(|e| format!("check: {e}"))?;
    if !report.is_clean() {
        return Err(format!("{report:?}"));
    }
    db.close().map_err(|e| format!("close: {e}"))?;
    Ok(format!("{digest:?}"))
}
