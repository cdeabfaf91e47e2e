//! `ntdb backup`.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

use ntdb::{BackupOptions, Error};
use serde::Serialize;

use crate::cli::{BackupArgs, GlobalOptions};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::{Progress, count_of, grouped};

#[derive(Serialize)]
struct Answer {
    records: u64,
    file_bytes: u64,
    change_counter: u64,
    seconds: f64,
}

/// The signal that has asked the program to end, or 0.
static ASKED_TO_END: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_signal(signal: libc::c_int) {
    ASKED_TO_END.store(signal, Ordering::Relaxed);
}

/// Copies a database, while others use it, and prints how much that was.
pub fn run(global: &GlobalOptions, args: &BackupArgs) -> Result<(), Failure> {
    let db = opening::for_reading(global, &args.source, args.read.read_only)?;
    catch_signals();
    let start = Instant::now();
    // Records copied, and as many compared.
    let progress = Progress::of_operations(2 * db.len()?, global.quiet);
    let mut options = BackupOptions::new();
    options.overwrite(args.force);
    let made = db.backup_with(&args.destination, &options, |so_far| {
        progress.show_operations(so_far.copied + so_far.verified);
        match ASKED_TO_END.load(Ordering::Relaxed) {
            0 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    });
    drop(progress);
    let report = match made {
        Ok(report) => report,
        Err(Error::Cancelled { .. }) => {
            db.close()?;
            return Err(Failure::Signal(ASKED_TO_END.load(Ordering::Relaxed)));
        }
        Err(error) => return Err(explained(error, args)),
    };
    let mut out = Output::new();
    if args.json {
        out.json(&Answer {
            records: report.records,
            file_bytes: report.file_bytes,
            change_counter: report.change_counter,
            seconds: start.elapsed().as_secs_f64(),
        })?;
    } else if !global.quiet {
        let (records, bytes) = (count_of(report.records, "record"), grouped(report.file_bytes));
        out.line(format_args!("copied and verified: {records}, {bytes} bytes"))?;
    }
    out.finish()?;
    Ok(db.close()?)
}

fn explained(error: Error, args: &BackupArgs) -> Failure {
    match error {
        Error::AlreadyExists { path } if path == args.destination => Failure::No(format!(
            "{}: already exists, and is left as it is; --force replaces it",
            path.display()
        )),
        error => error.into(),
    }
}

/// From now on a signal that would end the program lets it remove what it has made first. Those that were ignored stay so.
fn catch_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: both structures are valid places; the handler only stores to an atomic.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            if action.sa_sigaction == libc::SIG_DFL {
                action.sa_sigaction = note_signal as extern "C" fn(libc::c_int) as usize;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
}
