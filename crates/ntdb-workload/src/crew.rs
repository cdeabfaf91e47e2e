//! Clients that start together: threads of this process, or processes.
//!
//! A client process reads its job from a line of its standard input, makes itself ready, answers with an empty line, waits for another
//! line, and answers with what it has done; both are JSON. If it fails, its standard error says why, and its status is not zero.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::job::{Done, Job};
use crate::session::{Failed, Result, Session, wrong};

/// What all clients have done.
#[derive(Debug)]
pub struct Outcome {
    /// Each client's part.
    pub clients: Vec<Done>,
    /// From the common start to the last one's end.
    pub took: Duration,
}

impl Outcome {
    /// Operations of all.
    pub fn operations(&self) -> u64 {
        self.clients.iter().map(|done| done.operations).sum()
    }

    /// Operations of all in a second.
    pub fn per_second(&self) -> f64 {
        self.operations() as f64 / self.took.as_secs_f64()
    }
}

/// A client process has failed.
#[derive(Debug)]
pub struct ClientFailed {
    /// Its exit status, if it had one.
    pub status: Option<i32>,
    /// What it said.
    pub message: String,
}

impl std::fmt::Display for ClientFailed {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match (&self.message, self.status) {
            (message, _) if !message.is_empty() => f.write_str(message),
            (_, Some(status)) => write!(f, "a client process ended with status {status}"),
            _ => write!(f, "a client process was killed"),
        }
    }
}

impl std::error::Error for ClientFailed {}

/// Lets a thread do each job, in a session that `open` gives it.
pub fn of_threads<S: Session>(
    jobs: &[Job],
    open: impl Fn() -> Result<S> + Sync,
) -> Result<Outcome> {
    let start = Barrier::new(jobs.len() + 1);
    let client = |job: &Job| {
        let session = open();
        start.wait();
        job.run(&mut session?)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(|| client(job))).collect();
        start.wait();
        let begin = Instant::now();
        let clients: Vec<Result<Done>> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(wrong("a client has panicked"))))
            .collect();
        let took = begin.elapsed();
        Ok(Outcome { clients: clients.into_iter().collect::<Result<_>>()?, took })
    })
}

/// Lets a process do each job. `command` gives a command that calls [`serve`].
pub fn of_processes(jobs: &[Job], mut command: impl FnMut() -> Result<Command>) -> Result<Outcome> {
    let clients = jobs.iter().map(|job| Client::start(command()?, job));
    let mut clients: Vec<Client> = clients.collect::<Result<_>>()?;
    clients.iter_mut().try_for_each(Client::wait_until_ready)?;
    let begin = Instant::now();
    clients.iter_mut().try_for_each(|client| client.send("go"))?;
    let answers = clients.iter_mut().map(|client| client.line());
    let answers: Vec<String> = answers.collect::<Result<_>>()?;
    let took = begin.elapsed();
    for client in clients {
        client.end()?;
    }
    let done = answers.iter().map(|answer| serde_json::from_str(answer).map_err(Failed::from));
    Ok(Outcome { clients: done.collect::<Result<_>>()?, took })
}

struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    fn start(mut command: Command, job: &Job) -> Result<Client> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let output = child.stdout.take().ok_or_else(|| wrong("a client has no output"))?;
        let mut client = Client { child, input, output: BufReader::new(output) };
        client.send(&serde_json::to_string(job)?)?;
        Ok(client)
    }

    fn send(&mut self, line: &str) -> Result<()> {
        let Some(input) = &mut self.input else { return Err(wrong("a client has no input")) };
        let sent = writeln!(input, "{line}").and_then(|()| input.flush());
        // If it is gone, its status and message say why.
        sent.map_err(|error| self.failure().unwrap_or_else(|| error.into()))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(read) if read > 0 => Ok(line),
            Ok(_) => Err(self.failure().unwrap_or_else(|| wrong("a client has said nothing"))),
            Err(error) => Err(error.into()),
        }
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        self.line().map(drop)
    }

    /// Waits for its end, and says why it was no good one.
    fn failure(&mut self) -> Option<Failed> {
        self.input = None;
        let mut message = String::new();
        if let Some(errors) = &mut self.child.stderr {
            let _ = errors.read_to_string(&mut message);
        }
        let status = self.child.wait().ok()?;
        if status.success() {
            return None;
        }
        let message = message.trim().trim_start_matches("ntdb: ").to_string();
        Some(Box::new(ClientFailed { status: status.code(), message }))
    }

    fn end(mut self) -> Result<()> {
        self.failure().map_or(Ok(()), Err)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // After its end that does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a client process does: see the module's description.
pub fn serve<S: Session>(open: impl FnOnce() -> Result<S>) -> Result<()> {
    // SAFETY: asks the kernel to end this process with its parent; no memory is involved.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let mut line = String::new();
    input.read_line(&mut line)?;
    let job: Job = serde_json::from_str(&line)?;
    let mut session = open()?;
    writeln!(output)?;
    output.flush()?;
    if input.read_line(&mut line)? == 0 {
        // Called off.
        return Ok(());
    }
    let done = job.run(&mut session)?;
    writeln!(output, "{}", serde_json::to_string(&done)?)?;
    Ok(output.flush()?)
}
