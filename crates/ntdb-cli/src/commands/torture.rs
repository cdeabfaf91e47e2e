//! `ntdb torture`: several processes on one file, some of them killed, and a proof that nothing
//! broke.
//!
//! The work itself is the mixed workload of `ntdb_proof`. This parent starts the processes, kills
//! and replaces them, looks after their progress, and compares everything in the end. It has no
//! handle of its own meanwhile, so that the last process to be killed leaves a file to recover.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ntdb_proof::adopt;
use ntdb_proof::board::Board;
use ntdb_proof::layout::Layout;
use ntdb_proof::mixed::{self, Tuning};
use ntdb_proof::rng::{Rng, mix};
use serde::Serialize;

use crate::bench::place::Place;
use crate::cli::{GlobalOptions, TortureArgs, TortureWorkerArgs};
use crate::failure::Failure;
use crate::opening;
use crate::output::Output;
use crate::progress::{Progress, count_of};

/// Keys of the small set and of the large one.
const HOT_KEYS: u64 = 48;
const LARGE_KEYS: u64 = 1_000;
/// One in so many operations is a traversal.
const SCAN_ONE_IN: u64 = 2_000;
/// One in so many operations waits for the disk.
const DURABLE_ONE_IN: u64 = 500;
/// From one kill to the next at most, mostly.
const KILL_PAUSE_US: u64 = 3_000;
/// All processes together without a single operation for so long: they hang.
const HANGS_AFTER: Duration = Duration::from_secs(60);
/// How long the others may take to end when one has found something.
const END_AT_MOST: Duration = Duration::from_secs(5);

#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    problem: Option<&'a str>,
    file: &'a Path,
    processes: u32,
    loops: u64,
    seed: u64,
    transactions: bool,
    kills: u64,
    operations: u64,
    records: u64,
    seconds: f64,
}

/// Does the work of one process.
pub fn work(global: &GlobalOptions, args: &TortureWorkerArgs) -> Result<(), Failure> {
    // SAFETY: asks the kernel to end this process with its parent; no memory is involved.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let tuning = Tuning {
        hot: HOT_KEYS,
        large: LARGE_KEYS,
        first_writer: args.writer,
        threads: 1,
        seed: args.seed,
        read_percent: 50,
        scan_one_in: SCAN_ONE_IN,
        durable_one_in: DURABLE_ONE_IN,
        has_large_values: true,
        has_transactions: args.transactions,
        operations: Some(args.loops),
    };
    let done = mixed::run(&opening::options(global), &args.file, &args.board, tuning);
    done.map(drop).map_err(Failure::Wrong)
}

/// Runs the processes and says what came of it.
pub fn run(global: &GlobalOptions, args: &TortureArgs) -> Result<(), Failure> {
    let mut place = Place::new("torture", None)?;
    let inside = place.path().map(Path::to_path_buf).unwrap_or_default();
    let file = args.file.clone().unwrap_or_else(|| inside.clone());
    let board_path = inside.with_extension("board");
    let mut options = opening::options(global);
    opening::with_creation(options.create_new(true), &args.new);
    options.open(&file)?.close()?;
    let layout = Layout { writers: args.processes, hot: HOT_KEYS, large: LARGE_KEYS };
    let board = Board::create(&board_path, layout.writers as usize, layout.keys());
    let board = board.map_err(|source| Failure::File {
        name: board_path.display().to_string(),
        action: "make the notice board",
        source,
    })?;
    let begin = Instant::now();
    let mut torture = Torture {
        global,
        args,
        file: &file,
        board: &board,
        board_path: &board_path,
        rng: Rng::new(mix(args.seed)),
        incarnations: 0,
        kills: 0,
        progress: Progress::of_operations(
            args.loops.saturating_mul(u64::from(args.processes)),
            global.quiet,
        ),
    };
    let outcome = torture.run_all().and_then(|()| everything(global, &file, &board, &layout));
    let Torture { kills, progress, .. } = torture;
    drop(progress);
    if outcome.is_err() {
        place.keep();
    }
    let problem = outcome.as_ref().err().map(ToString::to_string);
    let records = *outcome.as_ref().unwrap_or(&0);
    let operations = board.total_operations();
    let mut out = Output::new();
    if args.json {
        out.json(&Report {
            ok: outcome.is_ok(),
            problem: problem.as_deref(),
            file: &file,
            processes: args.processes,
            loops: args.loops,
            seed: args.seed,
            transactions: args.transactions,
            kills,
            operations,
            records,
            seconds: begin.elapsed().as_secs_f64(),
        })?;
    } else if outcome.is_ok() {
        out.line(format_args!(
            "OK: {} by {}, {}, {}, {:.1} s",
            count_of(operations, "operation"),
            if args.processes == 1 {
                "1 process".into()
            } else {
                format!("{} processes", args.processes)
            },
            count_of(kills, "kill"),
            count_of(records, "record"),
            begin.elapsed().as_secs_f64()
        ))?;
    }
    out.finish()?;
    outcome.map(drop).map_err(|failure| Failure::Worker {
        status: failure.exit_status().max(3),
        message: format!(
            "{}: broken (seed {}): {failure}; the file stays, with its notice board {}: report \
             this with both",
            file.display(),
            args.seed,
            board_path.display()
        ),
    })
}

/// Compares all that is there with the board, and checks it; returns how many records there are.
fn everything(
    global: &GlobalOptions,
    file: &Path,
    board: &Board,
    layout: &Layout,
) -> Result<u64, Failure> {
    let db = opening::for_writing(global, file, false)?;
    let records = adopt::everything(&db, board, layout).map_err(Failure::Wrong)?;
    let report = db.check()?;
    if !report.is_clean() {
        return Err(Failure::Damaged(format!(
            "check found {:?}, {}",
            report.problems,
            count_of(report.leaked_pages, "leaked page")
        )));
    }
    db.close()?;
    Ok(records)
}

struct Torture<'a> {
    global: &'a GlobalOptions,
    args: &'a TortureArgs,
    file: &'a Path,
    board: &'a Board,
    board_path: &'a PathBuf,
    rng: Rng,
    incarnations: u64,
    kills: u64,
    progress: Progress,
}

impl Torture<'_> {
    /// Until every process has done its operations, or one has found something.
    fn run_all(&mut self) -> Result<(), Failure> {
        let mut workers = Vec::new();
        for writer in 0..self.args.processes {
            workers.push(Some(self.start(writer)?));
        }
        let watched = self.watch(&mut workers);
        // Nobody is left behind, whatever it was.
        self.board.stop();
        let begin = Instant::now();
        for worker in workers.iter_mut().flatten() {
            while watched.is_ok() || begin.elapsed() < END_AT_MOST {
                if !matches!(worker.try_wait(), Ok(None)) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = worker.kill();
            let _ = worker.wait();
        }
        watched
    }

    fn watch(&mut self, workers: &mut [Option<Child>]) -> Result<(), Failure> {
        let (mut seen, mut seen_at) = (0, Instant::now());
        let mut next_kill = self.pause();
        while workers.iter().any(Option::is_some) {
            std::thread::sleep(Duration::from_micros(500));
            for worker in workers.iter_mut() {
                let Some(child) = worker else { continue };
                let ended = child.try_wait().map_err(Self::cannot_wait)?;
                let Some(status) = ended else { continue };
                let mut message = String::new();
                if let Some(mut pipe) = child.stderr.take() {
                    let _ = pipe.read_to_string(&mut message);
                }
                *worker = None;
                if status.success() {
                    continue;
                }
                let message = message.trim().trim_start_matches("ntdb: ").to_string();
                return Err(match status.code() {
                    Some(code) if !message.is_empty() => {
                        Failure::Worker { status: code as u8, message }
                    }
                    _ => Failure::Wrong(format!(
                        "a process ended by itself with {status} (signal {:?}) {message}",
                        status.signal()
                    )),
                });
            }
            let operations = self.board.total_operations();
            self.progress.show_operations(operations);
            if operations != seen {
                (seen, seen_at) = (operations, Instant::now());
            } else if seen_at.elapsed() > HANGS_AFTER {
                let text = format!("no process has done anything for {HANGS_AFTER:?}: they hang");
                return Err(Failure::Wrong(text));
            }
            if self.args.kill && Instant::now() >= next_kill {
                self.kill(workers)?;
                next_kill = self.pause();
            }
        }
        Ok(())
    }

    fn cannot_wait(source: std::io::Error) -> Failure {
        Failure::File { name: "a process".into(), action: "wait for", source }
    }

    fn pause(&mut self) -> Instant {
        let us =
            if self.rng.one_in(10) { 10 * KILL_PAUSE_US } else { self.rng.below(KILL_PAUSE_US) };
        Instant::now() + Duration::from_micros(us)
    }

    /// Kills one process, or all, and starts as many.
    fn kill(&mut self, workers: &mut [Option<Child>]) -> Result<(), Failure> {
        let all = self.rng.one_in(10);
        let victim = self.rng.below(workers.len() as u64) as usize;
        let victims = if all { 0..workers.len() } else { victim..victim + 1 };
        let killed: Vec<usize> = victims
            .filter(|&index| workers[index].as_mut().is_some_and(|child| child.kill().is_ok()))
            .collect();
        for index in killed {
            let Some(child) = &mut workers[index] else { continue };
            let status = child.wait().map_err(Self::cannot_wait)?;
            if status.signal() == Some(libc::SIGKILL) {
                self.kills += 1;
                workers[index] = Some(self.start(index as u32)?);
            }
            // Else it has just ended by itself: the loop over all finds out how.
        }
        Ok(())
    }

    fn start(&mut self, writer: u32) -> Result<Child, Failure> {
        // The first of each writer does the same with the same seed.
        let seed = mix(self.args.seed ^ mix(self.incarnations));
        self.incarnations += 1;
        let program = std::env::current_exe();
        let mut command = Command::new(program.map_err(|source| Failure::File {
            name: "this program".into(),
            action: "find",
            source,
        })?);
        command.arg("torture-worker").arg("--board").arg(self.board_path);
        for (name, value) in
            [("--writer", u64::from(writer)), ("--loops", self.args.loops), ("--seed", seed)]
        {
            command.arg(name).arg(value.to_string());
        }
        if self.args.transactions {
            command.arg("--transactions");
        }
        opening::pass_on(self.global, &mut command);
        command.arg("--").arg(self.file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().map_err(|source| Failure::File {
            name: "a process".into(),
            action: "start",
            source,
        })
    }
}
