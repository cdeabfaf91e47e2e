//! The clients of a benchmark: sessions of ntdb, in threads or processes.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;

use ntdb::{Cursor, Db, Durability, Transaction};
use ntdb_workload::crew::{self, ClientFailed, Outcome};
use ntdb_workload::job::Job;
use ntdb_workload::session::{Access, Failed, Result, Session};

use crate::cli::{BenchWorkerArgs, GlobalOptions, Layout};
use crate::failure::Failure;
use crate::opening;

/// A client's database.
pub struct Client(Db);

impl Access for Client {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let copy = |found: &[u8]| {
            value.clear();
            value.extend_from_slice(found);
        };
        Ok(self.0.view(key, copy)?.is_some())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        Ok(self.0.put(key, value)?)
    }
}

struct Inside<'a, 'db>(&'a mut Transaction<'db>);

impl Access for Inside<'_, '_> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let copy = |found: &[u8]| {
            value.clear();
            value.extend_from_slice(found);
        };
        Ok(self.0.view(key, copy)?.is_some())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        Ok(self.0.put(key, value)?)
    }
}

impl Session for Client {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        for (key, value) in records {
            self.0.put(&key, &value)?;
        }
        Ok(())
    }

    fn transaction(
        &mut self,
        durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        let mut transaction = self.0.begin()?;
        body(&mut Inside(&mut transaction))?;
        Ok(if durable { transaction.commit() } else { transaction.commit_relaxed() }?)
    }

    fn scan(&mut self, seed: u64, count: usize) -> Result<usize> {
        let mut place = [1; 9];
        place[1..].copy_from_slice(&seed.to_le_bytes());
        let from = Cursor::from_bytes(&place).unwrap_or_default();
        let mut seen = 0;
        for record in self.0.iter_from(&from).take(count) {
            record?;
            seen += 1;
        }
        Ok(seen)
    }

    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        self.0.for_each(|key, value| {
            visit(key, value);
            ControlFlow::Continue(())
        })?;
        Ok(())
    }
}

/// The database of a benchmark, and those who work on it.
pub struct Clients<'a> {
    global: &'a GlobalOptions,
    layout: Layout,
    file: &'a Path,
    db: &'a Db,
}

impl<'a> Clients<'a> {
    /// Clients of the database `db`, which lies in `file`.
    pub fn new(global: &'a GlobalOptions, layout: Layout, file: &'a Path, db: &'a Db) -> Self {
        Clients { global, layout, file, db }
    }

    /// A session of this thread's own.
    pub fn session(&self) -> Client {
        Client(self.db.clone())
    }

    /// Lets a client do each of `jobs`.
    pub fn run(&self, jobs: &[Job]) -> std::result::Result<Outcome, Failure> {
        match self.layout {
            Layout::Threads => crew::of_threads(jobs, || Ok(self.session())),
            Layout::Processes => crew::of_processes(jobs, || self.command()),
        }
        .map_err(failure)
    }

    fn command(&self) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("bench-worker");
        opening::pass_on(self.global, &mut command);
        command.arg("--").arg(self.file);
        Ok(command)
    }
}

/// What a client process does.
pub fn work(global: &GlobalOptions, args: &BenchWorkerArgs) -> std::result::Result<(), Failure> {
    let mut opened = None;
    let open = || {
        let db = opening::options(global).durability(Durability::Relaxed).open(&args.file)?;
        opened = Some(db.clone());
        Ok(Client(db))
    };
    crew::serve(open).map_err(failure)?;
    Ok(opened.map_or(Ok(()), Db::close)?)
}

/// An error of a workload, as the program reports it.
pub fn failure(failed: Failed) -> Failure {
    let failed = match failed.downcast::<ntdb::Error>() {
        Ok(error) => return Failure::Engine(*error),
        Err(failed) => failed,
    };
    match failed.downcast::<ClientFailed>() {
        Ok(client) => {
            let status = client.status.unwrap_or(3).clamp(1, 255) as u8;
            Failure::Worker { status, message: client.to_string() }
        }
        Err(failed) => Failure::Wrong(failed.to_string()),
    }
}
