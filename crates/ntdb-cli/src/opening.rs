//! Opens databases as the command line's options say.

use std::path::Path;
use std::process::Command;

use ntdb::{Db, Durability, Options};

use crate::cli::{CreateOptions, GlobalOptions};
use crate::failure::Failure;

/// The options that every way of opening shares.
pub fn options(global: &GlobalOptions) -> Options {
    let mut options = Options::new();
    options
        .durability(if global.durable { Durability::Durable } else { Durability::Relaxed })
        .lock_timeout(global.lock_timeout)
        .shm_dir(global.shm_dir.clone())
        .give_up_unsynced(global.give_up_unsynced)
        .allow_unsuitable_file_system(global.allow_unsuitable_file_system);
    if let Some(bytes) = global.address_space {
        options.address_space(bytes);
    }
    options
}

/// Hands the options to a process of this program that opens the same database; but not `--durable`.
pub fn pass_on(global: &GlobalOptions, command: &mut Command) {
    if let Some(limit) = global.lock_timeout {
        command.arg(format!("--lock-timeout={}", limit.as_secs_f64()));
    }
    if let Some(dir) = &global.shm_dir {
        command.arg("--shm-dir").arg(dir);
    }
    if let Some(bytes) = global.address_space {
        command.arg(format!("--address-space={bytes}"));
    }
    if global.allow_unsuitable_file_system {
        command.arg("--allow-unsuitable-file-system");
    }
}

/// Adds what matters to a new database only.
pub fn with_creation<'a>(options: &'a mut Options, new: &CreateOptions) -> &'a mut Options {
    if let Some(bytes) = new.page_size {
        options.page_size(bytes);
    }
    if let Some(percent) = new.reserve {
        options.reserve_percent(percent);
    }
    if let Some(bytes) = new.keep_log {
        options.keep_log(bytes);
    }
    if let Some(mode) = new.mode {
        options.mode(mode);
    }
    options
}

/// Opens for writing; with `create`, makes the database if it is absent.
pub fn for_writing(global: &GlobalOptions, file: &Path, create: bool) -> Result<Db, Failure> {
    Ok(options(global).create(create).open(file)?)
}

/// Opens for reading.
///
/// Who may write opens for writing all the same: that recovers after a crash, once and for all, and
/// takes part in a database in use. Who may not (a file of somebody else, a read-only medium) opens
/// read-only, which the user can also ask for.
pub fn for_reading(global: &GlobalOptions, file: &Path, read_only: bool) -> Result<Db, Failure> {
    let mut options = options(global);
    if !read_only {
        match options.open(file) {
            Err(ntdb::Error::Permission { .. }) => {}
            other => return Ok(other?),
        }
    }
    Ok(options.read_only(true).open(file)?)
}
