//! The program `ntdb`: everything that the library does, from a shell.
//!
//! - `cli` declares the command line; `commands` holds one module per subcommand.
//! - `text` holds the three text formats of `load` and `dump`, one codec per file.
//! - `bench` holds the benchmarks; `commands::torture` runs the workload of `ntdb_proof`.
//! - `failure` is the one error type, and where exit statuses are decided.
//!
//! Data go to standard output, messages to standard error. A reader of our output that goes away
//! (`ntdb dump x | head`) is no error worth a message: the database is closed in good order, and the
//! program then dies of SIGPIPE as other tools do; `watch` dies so of the signals that end it.
#![deny(missing_docs)]

mod bench;
mod bytes;
mod cli;
mod commands;
mod failure;
mod opening;
mod output;
mod progress;
mod text;

use std::process::ExitCode;

use crate::cli::{Cli, Command};
use crate::failure::Failure;

fn main() -> ExitCode {
    // A limit on the size of files is an error to report (status 6), not a signal to die of.
    // SAFETY: ignoring a signal has no precondition; no other thread runs yet.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let cli = cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::OutputClosed) => die_of(libc::SIGPIPE),
        Err(Failure::Signal(signal)) => die_of(signal),
        Err(failure @ Failure::SilentNo) => ExitCode::from(failure.exit_status()),
        Err(failure) => {
            if !(failure.is_plain_no() && cli.global.quiet) {
                eprintln!("ntdb: {failure}");
            }
            ExitCode::from(failure.exit_status())
        }
    }
}

fn run(cli: &Cli) -> Result<(), Failure> {
    let global = &cli.global;
    match &cli.command {
        Command::Create(args) => commands::create::run(global, args),
        Command::Get(args) => commands::get::run(global, args),
        Command::Put(args) => commands::store::put(global, args),
        Command::Insert(args) => commands::store::insert(global, args),
        Command::Append(args) => commands::store::append(global, args),
        Command::Delete(args) => commands::delete::run(global, args),
        Command::Exists(args) => commands::exists::run(global, args),
        Command::List(args) => commands::list::run(global, args),
        Command::Load(args) => commands::load::run(global, args),
        Command::LoadWorker(args) => commands::load_worker::run(global, args),
        Command::Dump(args) => commands::dump::run(global, args),
        Command::Stat(args) => commands::stat::run(global, args),
        Command::Check(args) => commands::check::run(global, args),
        Command::Backup(args) => commands::backup::run(global, args),
        Command::Compact(args) => commands::compact::run(global, args),
        Command::Set(args) => commands::set::run(global, args),
        Command::Recover(args) => commands::recover::run(global, args),
        Command::Torture(args) => commands::torture::run(global, args),
        Command::TortureWorker(args) => commands::torture::work(global, args),
        Command::Watch(args) => commands::watch::run(global, args),
        Command::Bench(args) => match &args.benchmark {
            cli::Benchmark::Speed(args) => bench::speed::run(global, args),
            cli::Benchmark::Grow(args) => bench::grow::run(global, args),
            cli::Benchmark::Tpcb(args) => bench::tpcb::run(global, args),
            cli::Benchmark::Mixed(args) => bench::mixed::run(global, args),
            cli::Benchmark::Dbspeed(args) => bench::dbspeed::run(global, args),
            cli::Benchmark::Scale(args) => bench::scale::run(global, args),
        },
        Command::BenchWorker(args) => bench::clients::work(global, args),
    }
}

/// Ends the process as the signal would have, had it not been ignored or waited for: shells and `make` know this
/// end and keep silent about it. By now every database is closed.
fn die_of(signal: i32) -> ExitCode {
    // SAFETY: plain integers, and a set of this function's own; restoring the default action of a
    // signal, letting it through and raising it has no precondition.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::raise(signal);
    }
    // Reached only where the signal is blocked: the status that a shell would show for it.
    ExitCode::from(128 + signal as u8)
}
