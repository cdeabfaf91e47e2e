//! What every test with processes needs: a directory of its own, workers with a time limit, seeds.

use std::ffi::OsString;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ntdb::Db;

/// How long a worker may take to end once it was asked to, before the test calls it hung.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A number from the environment, for how long or how often a test does its work.
///
/// # Panics
/// If the variable is set and not a number: a test must not quietly run with the default then.
pub fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")),
        Err(_) => default,
    }
}

/// The seed of this run: `NTDB_TEST_SEED`, or a fresh one; printed, so that a failure shows it.
pub fn seed() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("a clock after 1970");
    let fresh = crate::rng::mix(now.as_nanos() as u64) >> 16;
    let seed = number("NTDB_TEST_SEED", fresh);
    println!("seed {seed}; repeat with NTDB_TEST_SEED={seed}");
    seed
}

/// A directory that goes when the value goes.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
}

impl TempDir {
    /// A new directory in `NTDB_TEST_DIR`, or on the memory file system, or in the usual place.
    ///
    /// # Panics
    /// If none can be made.
    pub fn new() -> TempDir {
        let base = match std::env::var_os("NTDB_TEST_DIR") {
            Some(dir) => PathBuf::from(dir),
            None if Path::new("/dev/shm").is_dir() => PathBuf::from("/dev/shm"),
            None => std::env::temp_dir(),
        };
        TempDir::inside(&base)
    }

    /// A new directory inside `base`.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn inside(base: &Path) -> TempDir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = base.join(format!("ntdb-test-{}-{number}", std::process::id()));
            match std::fs::create_dir(&path) {
                Ok(()) => return TempDir { path },
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => panic!("{}: {e}", path.display()),
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Default for TempDir {
    fn default() -> Self {
        TempDir::new()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("NTDB_TEST_KEEP").is_some() {
            eprintln!("kept for inspection: {}", self.path.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// A directory with a database and a notice board, and the program to run on it.
#[derive(Debug)]
pub struct Lab {
    dir: TempDir,
    worker: PathBuf,
}

impl Lab {
    /// A new laboratory. `worker` is `env!("CARGO_BIN_EXE_ntdb-worker")`, which only integration
    /// tests know.
    pub fn new(worker: &str) -> Lab {
        Lab::inside(worker, TempDir::new())
    }

    /// A laboratory in `dir`.
    pub fn inside(worker: &str, dir: TempDir) -> Lab {
        Lab { dir, worker: worker.into() }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where the database lies.
    pub fn database(&self) -> PathBuf {
        self.dir().join("test.ntdb")
    }

    /// Where the notice board lies.
    pub fn board(&self) -> PathBuf {
        self.dir().join("board")
    }

    /// A worker to be started in `role` on the database.
    pub fn worker(&self, role: &str) -> Worker {
        self.worker_on(role, &self.database())
    }

    /// A worker to be started in `role` on the database at `path`.
    pub fn worker_on(&self, role: &str, path: &Path) -> Worker {
        let mut command = Command::new(&self.worker);
        command.arg(role).arg(path);
        Worker { command, name: role.to_string() }
    }
}

/// A worker that is being prepared.
#[derive(Debug)]
pub struct Worker {
    command: Command,
    name: String,
}

impl Worker {
    /// Adds `name=value` to its command line.
    pub fn arg(mut self, name: &str, value: impl ToString) -> Worker {
        let value = value.to_string();
        self.command.arg(format!("{name}={value}"));
        self.name.push_str(&format!(" {name}={value}"));
        self
    }

    /// Adds `name=path` to its command line.
    pub fn path(mut self, name: &str, path: &Path) -> Worker {
        let mut arg = OsString::from(name);
        arg.push("=");
        arg.push(path);
        self.command.arg(arg);
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: impl ToString) -> Worker {
        let value = value.to_string();
        self.command.env(name, &value);
        self.name.push_str(&format!(" {name}={value}"));
        self
    }

    /// The command, for what the other methods don't offer.
    pub fn command(&mut self) -> &mut Command {
        &mut self.command
    }

    /// Runs the worker under another program: `program ARGS... worker ...`.
    pub fn under(mut self, program: &str, args: &[&str]) -> Worker {
        let mut command = Command::new(program);
        command.args(args).arg(self.command.get_program()).args(self.command.get_args());
        for (name, value) in self.command.get_envs() {
            if let Some(value) = value {
                command.env(name, value);
            }
        }
        self.command = command;
        self
    }

    /// Starts it.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn spawn(mut self) -> Process {
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = self.command.spawn().unwrap_or_else(|e| panic!("{}: {e}", self.name));
        Process { child, name: self.name, ended: None }
    }

    /// Starts it, waits for it and returns what it printed.
    ///
    /// # Panics
    /// If it fails or takes longer than [`PATIENCE`].
    pub fn run(self) -> String {
        self.spawn().succeed(PATIENCE)
    }
}

/// What a process left behind.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub status: ExitStatus,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
}

impl Ended {
    /// The signal that ended it, if one did.
    pub fn signal(&self) -> Option<i32> {
        std::os::unix::process::ExitStatusExt::signal(&self.status)
    }
}

/// A running worker. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its child handle, for pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        assert!(self.ended.is_none(), "{}: has ended already", self.name);
        // SAFETY: a plain system call; the child has not been reaped, so its id is its own.
        let result = unsafe { libc::kill(self.child.id() as i32, signal) };
        assert_eq!(result, 0, "kill: {}", std::io::Error::last_os_error());
    }

    /// Kills it with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.ended = Some(self.child.wait().expect("wait for a child"));
    }

    /// The processes that it started.
    pub fn children(&self) -> Vec<i32> {
        let id = self.child.id();
        let text = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let text = text.unwrap_or_default();
        text.split_whitespace().map(|id| id.parse().expect("a process id")).collect()
    }

    /// Kills the only process that it started, and waits for its own end.
    pub fn kill_child(&mut self) {
        let start = Instant::now();
        let child = loop {
            if let [child] = self.children()[..] {
                break child;
            }
            assert!(start.elapsed() < PATIENCE, "{}: has no child", self.name);
            std::thread::sleep(Duration::from_millis(1));
        };
        // SAFETY: a plain system call; its parent has not reaped it while it runs.
        unsafe { libc::kill(child, libc::SIGKILL) };
        self.ended = Some(self.child.wait().expect("wait for a child"));
    }

    /// Whether it is stopped by a signal.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let stat = stat.unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    }

    /// Reads one line of its output, for roles that say how far they are.
    ///
    /// # Panics
    /// If it ends without one.
    pub fn line(&mut self) -> String {
        let pipe = self.child.stdout.as_mut().expect("a pipe");
        let mut line = Vec::new();
        let mut byte = [0];
        while pipe.read(&mut byte).expect("read the worker's output") == 1 {
            if byte[0] == b'\n' {
                return String::from_utf8_lossy(&line).into_owned();
            }
            line.push(byte[0]);
        }
        let mut complaints = String::new();
        let _ = self.child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut complaints));
        panic!("{}: ended without a word\n{complaints}", self.name);
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("wait for a child");
        }
        self.ended.is_none()
    }

    /// Waits for its end, at most `patience`.
    ///
    /// # Panics
    /// If it doesn't end: hung.
    pub fn end(mut self, patience: Duration) -> Ended {
        drop(self.child.stdin.take());
        let start = Instant::now();
        let mut pause = Duration::from_micros(200);
        while self.runs() {
            if start.elapsed() > patience {
                let stacks = stacks_of(self.child.id());
                panic!("{}: hung for {patience:?}\n{stacks}", self.name);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(5));
        }
        let mut ended = Ended {
            status: self.ended.expect("ended"),
            stdout: String::new(),
            stderr: String::new(),
        };
        let mut bytes = Vec::new();
        if let Some(mut pipe) = self.child.stdout.take() {
            pipe.read_to_end(&mut bytes).expect("read the worker's output");
            ended.stdout = String::from_utf8_lossy(&bytes).into_owned();
        }
        bytes.clear();
        if let Some(mut pipe) = self.child.stderr.take() {
            pipe.read_to_end(&mut bytes).expect("read the worker's complaints");
            ended.stderr = String::from_utf8_lossy(&bytes).into_owned();
        }
        ended
    }

    /// Waits for its end and returns what it printed.
    ///
    /// # Panics
    /// If it fails or hangs.
    pub fn succeed(self, patience: Duration) -> String {
        let name = self.name.clone();
        let ended = self.end(patience);
        assert!(ended.status.success(), "{name}: {}\n{}", ended.status, ended.stderr);
        ended.stdout
    }

    /// Panics if it has ended although nobody asked it to.
    pub fn demand_running(self) -> Process {
        let mut process = self;
        if process.runs() {
            return process;
        }
        let name = process.name.clone();
        let ended = process.end(PATIENCE);
        panic!("{name}: ended early, {}\n{}", ended.status, ended.stderr);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Where each thread of a hung process waits, as far as the system tells.
fn stacks_of(process: u32) -> String {
    let mut text = String::new();
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else { return text };
    for task in tasks.flatten() {
        for file in ["wchan", "syscall"] {
            let content = std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
            text.push_str(&format!("{} {file}: {}\n", task.path().display(), content.trim()));
        }
    }
    text
}

/// Demands that `db` is whole.
///
/// # Panics
/// If it isn't.
pub fn demand_clean(db: &Db, when: &str) {
    let report = db.check().unwrap_or_else(|e| panic!("{when}: check: {e}"));
    assert!(report.is_clean(), "{when}: {report:?}");
}

/// Calls `each` for every one of `cases`, on two threads; tells all failures at the end, not only
/// the first.
///
/// # Panics
/// If any case panicked.
pub fn for_all<T: Sync>(cases: &[T], each: impl Fn(&T) + Sync) {
    let next = AtomicU64::new(0);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let result = catch_unwind(AssertUnwindSafe(|| each(case)));
                    if let Err(panic) = result {
                        let text =
                            match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
                                (Some(text), _) => text.clone(),
                                (None, Some(text)) => (*text).to_string(),
                                (None, None) => "a panic without a text".into(),
                            };
                        failures.lock().expect("no panic while it is held").push(text);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no panic while it was held");
    assert!(
        failures.is_empty(),
        "{} of {} cases failed, the first of them:\n{}",
        failures.len(),
        cases.len(),
        failures.iter().take(20).map(String::as_str).collect::<Vec<_>>().join("\n")
    );
}

/// The number behind `name` in a worker's report.
///
/// # Panics
/// If it isn't there.
pub fn reported(report: &str, name: &str) -> u64 {
    let mut words = report.split_whitespace();
    while let Some(word) = words.next() {
        if word == name {
            let number = words.next().unwrap_or_default();
            return number.parse().unwrap_or_else(|_| panic!("{name} in {report:?}"));
        }
    }
    panic!("{name} is not in {report:?}")
}

/// Measures how long this thread waits for something other than a processor: a machine that is busy with other work is
/// nobody's fault.
#[derive(Debug)]
pub struct Wait {
    begin: Instant,
    starved_before: Duration,
}

impl Wait {
    /// Begins now.
    pub fn begin() -> Wait {
        Wait { starved_before: starved(), begin: Instant::now() }
    }

    /// The time since, without what this thread spent ready to run on processors that were not to be had.
    pub fn elapsed(&self) -> Duration {
        let whole = self.begin.elapsed();
        whole.saturating_sub(starved().saturating_sub(self.starved_before))
    }
}

/// How long this thread has been ready to run but not running, since it began (zero where the kernel does not tell).
fn starved() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let ns = text.split_ascii_whitespace().nth(1).and_then(|field| field.parse().ok());
    Duration::from_nanos(ns.unwrap_or(0))
}
