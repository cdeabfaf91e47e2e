//! The parent of a load by several processes.
//!
//! Each share has a thread here that starts its worker, reads what it reports (see `load_worker`
//! for the messages) and, if it dies, says so and starts another one behind the last report.
//! Nothing is lost by a death: what was reported is stored, and what was stored but not yet
//! reported is stored again with the same effect.
//!
//! The parent's own handle stays open meanwhile, so that workers come and go without the database
//! being closed and recovered between them.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use crate::cli::{GlobalOptions, LoadArgs};
use crate::commands::load_input::Input;
use crate::commands::load_share::{Share, Tally};
use crate::failure::Failure;
use crate::opening;
use crate::progress::{Progress, grouped};

/// Deaths in a row without a report between them after which a share is given up: then it is the
/// input or the machine that kills, and no successor would fare better.
const DEATHS_AT_MOST: u32 = 3;
/// Where the demonstration's victim is killed: behind some records, before most.
const VICTIM_LINGERS_AT_RECORD: u64 = 4096;
/// How long the victim goes on before the signal: long enough to be at work.
const VICTIM_LINGERS_FOR: Duration = Duration::from_millis(20);

enum Event {
    Progress { share: u32, tally: Tally },
    Say(String),
    Finished(Result<(), Failure>),
}

/// Loads `input` with `args.processes` workers.
pub fn run(
    global: &GlobalOptions,
    args: &LoadArgs,
    input: Input,
    progress: &Progress,
) -> Result<Tally, Failure> {
    let input_name = input.name.clone();
    let file = input.into_regular_file()?;
    let (events, inbox) = channel();
    thread::scope(|scope| {
        for index in 0..args.processes {
            let supervisor = Supervisor {
                global,
                args,
                input: &file,
                input_name: &input_name,
                share: Share { index, of: args.processes },
                events: events.clone(),
            };
            scope.spawn(move || supervisor.run());
        }
        drop(events);

        let mut tallies = vec![Tally::default(); args.processes as usize];
        let mut first_failure = None;
        for event in inbox {
            match event {
                Event::Progress { share, tally } => {
                    tallies[share as usize] = tally;
                    let sum = total(&tallies);
                    progress.show(sum.input_bytes, sum.stored + sum.already_there);
                }
                Event::Say(text) => progress.say(&text),
                Event::Finished(Ok(())) => {}
                Event::Finished(Err(failure)) => {
                    first_failure.get_or_insert(failure);
                }
            }
        }
        first_failure.map_or_else(|| Ok(total(&tallies)), Err)
    })
}

/// The shares together. All workers read the whole input, so the input's figures are means.
fn total(tallies: &[Tally]) -> Tally {
    let sum = |member: fn(&Tally) -> u64| tallies.iter().map(member).sum::<u64>();
    let count = tallies.len() as u64;
    Tally {
        records_read: sum(|tally| tally.records_read) / count,
        input_bytes: sum(|tally| tally.input_bytes) / count,
        stored: sum(|tally| tally.stored),
        already_there: sum(|tally| tally.already_there),
    }
}

/// One share and whoever works at it.
struct Supervisor<'a> {
    global: &'a GlobalOptions,
    args: &'a LoadArgs,
    input: &'a File,
    input_name: &'a str,
    share: Share,
    events: Sender<Event>,
}

/// How a worker's messages ended.
enum End {
    Done,
    Failed(Failure),
    Died,
}

impl Supervisor<'_> {
    fn run(self) {
        let finished = self.see_to_the_end();
        self.tell(Event::Finished(finished));
    }

    fn tell(&self, event: Event) {
        // The receiver outlives the scope that all supervisors run in.
        self.events.send(event).expect("the parent listens until all supervisors have ended");
    }

    fn see_to_the_end(&self) -> Result<(), Failure> {
        let mut tally = Tally::default();
        let mut deaths_in_a_row = 0;
        let mut predecessor = None;
        let mut victim = self.args.kill_one_worker && self.share.index == 0;
        loop {
            let mut worker = self.start(&tally, victim).map_err(|source| Failure::File {
                name: "a worker process".into(),
                action: "start",
                source,
            })?;
            victim = false;
            if let Some(predecessor) = predecessor {
                self.tell(Event::Say(format!("{predecessor}; process {} goes on", worker.id())));
            }
            let pipe = worker.stdout.take().expect("the worker was started with a pipe");
            let before = tally;
            let end = self.listen(&mut worker, pipe, &mut tally);
            let status = worker.wait().map_err(|source| Failure::File {
                name: format!("worker process {}", worker.id()),
                action: "wait for",
                source,
            })?;
            match end {
                End::Done => return Ok(()),
                End::Failed(failure) => return Err(failure),
                End::Died => {}
            }
            deaths_in_a_row = if tally == before { deaths_in_a_row + 1 } else { 1 };
            let died = self.obituary(&worker, status, &tally);
            if deaths_in_a_row == DEATHS_AT_MOST {
                return Err(Failure::Wrong(format!(
                    "{died}; so did {} before it: giving up. Look into the system's log for what \
                     ends them, then load the input again",
                    DEATHS_AT_MOST - 1
                )));
            }
            predecessor = Some(died);
        }
    }

    fn obituary(&self, worker: &Child, status: ExitStatus, tally: &Tally) -> String {
        let how = match (status.signal(), status.code()) {
            (Some(signal), _) => format!("was killed by signal {signal}"),
            (None, Some(code)) => format!("ended early with status {code}"),
            (None, None) => "ended early".to_string(),
        };
        format!(
            "{}: worker {} (process {}) {how} behind record {} of the input",
            self.args.file.display(),
            self.share.index + 1,
            worker.id(),
            grouped(tally.records_read)
        )
    }

    /// Reads a worker's messages to the end; `tally` is what it and its predecessors have done.
    fn listen(&self, worker: &mut Child, pipe: ChildStdout, tally: &mut Tally) -> End {
        let inherited = *tally;
        // A message that death has cut short, like a pipe that cannot be read, tells nothing.
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match word {
                "at" | "done" => {
                    let Some(own) = parse_tally(rest) else { continue };
                    *tally = Tally {
                        stored: inherited.stored + own.stored,
                        already_there: inherited.already_there + own.already_there,
                        ..own
                    };
                    self.tell(Event::Progress { share: self.share.index, tally: *tally });
                    if word == "done" {
                        return End::Done;
                    }
                }
                "lingering" => {
                    thread::sleep(VICTIM_LINGERS_FOR);
                    // It cannot have been reaped yet, so this reaches it or its remains.
                    let _ = worker.kill();
                }
                "failed" => {
                    let Some((status, message)) = rest.split_once(' ') else { continue };
                    let Ok(status) = status.parse() else { continue };
                    return End::Failed(Failure::Worker { status, message: message.into() });
                }
                _ => {}
            }
        }
        End::Died
    }

    fn start(&self, done: &Tally, victim: bool) -> io::Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("load-worker");
        command.arg(format!("--share={}", self.share.index));
        command.arg(format!("--shares={}", self.share.of));
        command.arg(format!("--skip-records={}", done.records_read));
        command.arg(format!("--input-name={}", self.input_name));
        if victim {
            command.arg(format!("--linger-at={VICTIM_LINGERS_AT_RECORD}"));
        }
        self.add_load_options(&mut command);
        // Not `--durable`: the parent syncs once for all.
        opening::pass_on(self.global, &mut command);
        command.arg("--").arg(self.args.file.as_path() as &Path);
        command.stdin(Stdio::from(self.input.try_clone()?)).stdout(Stdio::piped()).spawn()
    }

    fn add_load_options(&self, command: &mut Command) {
        let load = &self.args.load;
        let flags = [
            ("--json-lines", load.format.json_lines),
            ("--tdb", load.format.tdb),
            ("--no-escapes", load.no_escapes),
            ("--if-absent", load.if_absent),
        ];
        command.args(flags.iter().filter(|flag| flag.1).map(|flag| flag.0));
        if let Some(separator) = &load.format.separator {
            let mut option = std::ffi::OsString::from("--separator=");
            option.push(separator);
            command.arg(option);
        }
    }
}

fn parse_tally(text: &str) -> Option<Tally> {
    let mut numbers = text.split(' ').map(|number| number.parse().ok());
    let mut next = || numbers.next().flatten();
    Some(Tally {
        records_read: next()?,
        input_bytes: next()?,
        stored: next()?,
        already_there: next()?,
    })
}
