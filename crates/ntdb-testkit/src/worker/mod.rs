//! The roles that a worker process plays. `ntdb-worker ROLE DATABASE name=value ...` runs one.
//!
//! A role ends with `Ok(report)` or with a description of the promise that it saw broken; the
//! program prints it and exits with status 101, which no test overlooks.

pub mod copies;
pub mod crowd;
pub mod damaged;
pub mod faulty;
pub mod forged;
pub mod forked;
pub mod mixed;
pub mod scripted;
pub mod simple;
pub mod snapshots;
pub mod transactions;
pub mod waiting;

use crate::args::Args;

/// The exit status of a worker that saw a promise broken.
pub const STATUS_VIOLATION: i32 = 101;

/// Runs the role that `args` ask for and returns the line to print.
///
/// # Errors
/// The promise that was broken.
pub fn run(args: &Args) -> Result<String, String> {
    match args.role.as_str() {
        "mixed" => mixed::run(args),
        "iterator" => crowd::iterate(args),
        "churn" => crowd::churn(args),
        "counter" => crowd::count(args),
        "once" => simple::once(args),
        "timed" => simple::timed(args),
        "thin-out" => simple::thin_out(args),
        "check" => simple::check(args),
        "compact" => simple::compact(args),
        "hold-lock" => simple::hold_lock(args),
        "fork" => simple::fork(args),
        "gets" => simple::gets(args),
        "puts" => simple::puts(args),
        "durable" => simple::durable(args),
        "fill" => simple::fill(args),
        "exercise" => simple::exercise(args),
        "reader" => simple::reader(args),
        "await-changes" => waiting::await_changes(args),
        "follow-writers" => waiting::follow_writers(args),
        "script" => scripted::run(args),
        "script-resume" => scripted::resume(args),
        "script-verify" => scripted::verify(args),
        "faulty" => faulty::run(args),
        "flips" => damaged::flips(args),
        "hostile" => damaged::hostile(args),
        "forged" => forged::run(args),
        "backup" => copies::backup(args),
        "digest" => copies::digest(args),
        "hold-view" => simple::hold_view(args),
        "hold-snapshots" => snapshots::hold(args),
        "observe" => snapshots::observe(args),
        "grow" => simple::grow(args),
        "traverse" => simple::traverse(args),
        "clerk" => transactions::clerk(args),
        "auditor" => transactions::auditor(args),
        "baton" => transactions::baton(args),
        "historian" => transactions::historian(args),
        "transact" => transactions::transact(args),
        "single" => transactions::single(args),
        "hold-transaction" => transactions::hold(args),
        "commit-until-told" => transactions::commit_until_told(args),
        "big-transaction" => transactions::big(args),
        "prepared" => transactions::prepared(args),
        other => Err(format!("{other}: no such role")),
    }
}
