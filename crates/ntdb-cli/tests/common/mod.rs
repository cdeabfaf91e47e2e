//! What the tests of the program share: a place for files and ways to run it.
#![allow(dead_code, reason = "every test file uses a part")]

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// A temporary directory to run the program in.
pub struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Place {
        Place { dir: tempfile::tempdir().expect("a temporary directory can be made") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("the temporary directory can be written");
        path
    }

    /// The program, to be run in this directory.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ntdb"));
        command.current_dir(self.dir.path()).env("TMPDIR", self.dir.path()).args(args);
        command
    }

    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Run {
        self.run_with_input(args, b"")
    }

    pub fn run_with_input<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: &[u8],
    ) -> Run {
        finish(self.command(args), input)
    }

    /// Names left in the directory.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).expect("the directory can be read");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

/// Runs `command` to its end, feeding it `input`.
pub fn finish(mut command: Command, input: &[u8]) -> Run {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program can be started");
    let mut stdin = child.stdin.take().expect("a pipe");
    let input = input.to_vec();
    // In a thread of its own: the program may write before it has read everything. It may also end
    // without reading, which is not this side's business.
    let feeder = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().expect("the program can be waited for");
    feeder.join().expect("the feeder does not panic");
    Run { output, shown: format!("{command:?}") }
}

/// What a run of the program has brought.
pub struct Run {
    output: Output,
    shown: String,
}

impl Run {
    /// The exit status; 128 and the signal's number if a signal ended it.
    pub fn status(&self) -> i32 {
        let status = self.output.status;
        status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
    }

    #[track_caller]
    pub fn expect_status(self, expected: i32) -> Run {
        assert_eq!(
            self.status(),
            expected,
            "{}\nstdout: {}\nstderr: {}",
            self.shown,
            String::from_utf8_lossy(&self.output.stdout),
            self.stderr()
        );
        self
    }

    /// Standard output of a run that must have succeeded.
    #[track_caller]
    pub fn ok(self) -> Vec<u8> {
        self.expect_status(0).output.stdout
    }

    /// The same as text.
    #[track_caller]
    pub fn text(self) -> String {
        String::from_utf8(self.ok()).expect("the output is text")
    }

    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }
}

/// A small generator of repeatable bytes (a linear congruential one; nothing here needs better).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    pub fn bytes(&mut self, length: u64) -> Vec<u8> {
        (0..length).map(|_| self.below(256) as u8).collect()
    }
}
