//! `ntdb load-worker`: one of the processes of a load.
//!
//! Standard input is the whole input, a regular file that all workers share; each reads it by
//! offset, so that none moves another's position. Standard output is a pipe to the parent that
//! carries one line a message:
//!
//! | line | meaning |
//! | --- | --- |
//! | `at R B S A` | R records and B bytes are read, S stored, A were there already |
//! | `lingering` | the worker repeats its last record until it is killed |
//! | `done R B S A` | the share is finished |
//! | `failed STATUS MESSAGE` | it cannot be finished |
//!
//! A pipe that ends without one of the last two tells of the worker's death. What it reported is in
//! the database (that outlives the process, if not a power cut), so a successor begins there.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use ntdb::Db;

use crate::cli::{GlobalOptions, LoadWorkerArgs};
use crate::commands::load::text_format;
use crate::commands::load_share::{Job, Share, Tally};
use crate::failure::Failure;
use crate::opening;
use crate::text::{Reader, Record};

/// How long a worker that is to be killed repeats its record before it stops believing in it.
const LINGER_AT_MOST: Duration = Duration::from_secs(10);

/// Does a share and reports to the parent.
pub fn run(global: &GlobalOptions, args: &LoadWorkerArgs) -> Result<(), Failure> {
    let outcome = work(global, args);
    match outcome {
        Ok(tally) => send(&at_line("done", &tally)),
        // The parent prints the message: several workers may fail for the same reason.
        Err(failure) if !matches!(failure, Failure::OutputClosed) => {
            let message = failure.to_string().replace('\n', " ");
            send(&format!("failed {} {message}\n", failure.exit_status()))
        }
        Err(failure) => Err(failure),
    }
}

fn work(global: &GlobalOptions, args: &LoadWorkerArgs) -> Result<Tally, Failure> {
    let input = io::stdin().as_fd().try_clone_to_owned().map_err(|source| Failure::File {
        name: args.input_name.clone(),
        action: "take over",
        source,
    })?;
    let input = AtOffset { file: File::from(input), offset: 0 };
    let reader = Reader::new(
        text_format(&args.load.format, !args.load.no_escapes)?,
        BufReader::with_capacity(1 << 18, input),
    );
    let db = opening::for_writing(global, &args.file, false)?;
    let job = Job {
        db: &db,
        input_name: &args.input_name,
        share: Share { index: args.share, of: args.shares },
        if_absent: args.load.if_absent,
        skip_records: args.skip_records,
    };
    let mut lingered = false;
    let tally = job.run(reader, |tally, last_stored| {
        send(&at_line("at", tally))?;
        if !lingered && args.linger_at.is_some_and(|record| tally.records_read >= record) {
            lingered = true;
            linger(&db, last_stored, job.if_absent)?;
        }
        Ok(())
    })?;
    db.close()?;
    Ok(tally)
}

/// Waits for the demonstration's `kill -9`, working: the same record is stored over and over, so
/// that the signal finds the process in the middle of an operation as it would in life.
fn linger(db: &Db, record: Option<&Record>, if_absent: bool) -> Result<(), Failure> {
    send("lingering\n")?;
    let deadline = Instant::now() + LINGER_AT_MOST;
    while Instant::now() < deadline {
        match record {
            None => std::thread::sleep(Duration::from_millis(10)),
            Some(record) if if_absent => drop(db.insert(&record.key, &record.value)?),
            Some(record) => db.put(&record.key, &record.value)?,
        }
    }
    Ok(())
}

fn at_line(word: &str, tally: &Tally) -> String {
    let Tally { records_read, input_bytes, stored, already_there } = tally;
    format!("{word} {records_read} {input_bytes} {stored} {already_there}\n")
}

/// Sends a line to the parent. If the parent is gone, so is the reason to go on.
fn send(line: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).map_err(Failure::from_stdout)
}

/// Reads a file from a position of its own, wherever the shared descriptor's stands.
struct AtOffset {
    file: File,
    offset: u64,
}

impl Read for AtOffset {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}
