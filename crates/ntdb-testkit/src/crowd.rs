//! The mixed crowd: several processes of the mixed workload on one database, for the tests that
//! let them live, kill them, or stop them.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ntdb::{Db, Options};
use ntdb_proof::adopt;
use ntdb_proof::layout::Layout;

use crate::board::Board;
use crate::lab::{self, Lab, PATIENCE, Process, Worker};
use crate::rng::mix;

/// A crowd of workers in role `mixed`.
#[derive(Debug)]
pub struct Crowd {
    /// The laboratory.
    pub lab: Lab,
    /// The board.
    pub board: Board,
    /// Which keys there are.
    pub layout: Layout,
    /// The workers; `None` while one is being replaced.
    pub members: Vec<Process>,
    threads: u32,
    seed: u64,
    incarnation: u64,
    extra: Vec<(&'static str, String)>,
    wrapper: Option<(&'static str, &'static [&'static str])>,
}

impl Crowd {
    /// Makes the database with `options` and the board; starts nobody yet.
    ///
    /// # Panics
    /// If that fails.
    pub fn new(
        lab: Lab,
        options: &mut Options,
        processes: u32,
        threads: u32,
        hot: u64,
        large: u64,
        seed: u64,
    ) -> Crowd {
        let layout = Layout { writers: processes * threads, hot, large };
        let board = Board::create(&lab.board(), layout.writers as usize, layout.keys())
            .expect("make the board");
        let db = options.create(true).open(lab.database()).expect("create the database");
        db.close().expect("close the new database");
        let members = Vec::new();
        let extra = Vec::new();
        Crowd { lab, board, layout, members, threads, seed, incarnation: 0, extra, wrapper: None }
    }

    /// Has every worker get `name=value`.
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Crowd {
        self.extra.push((name, value.to_string()));
        self
    }

    /// Runs every worker under another program.
    pub fn under(mut self, program: &'static str, args: &'static [&'static str]) -> Crowd {
        self.wrapper = Some((program, args));
        self
    }

    fn member(&mut self, process: u32) -> Worker {
        self.incarnation += 1;
        let mut worker = self
            .lab
            .worker("mixed")
            .path("board", &self.lab.board())
            .arg("hot", self.layout.hot)
            .arg("large", self.layout.large)
            .arg("writer", process * self.threads)
            .arg("threads", self.threads)
            .arg("seed", mix(self.seed.wrapping_add(self.incarnation)));
        for (name, value) in &self.extra {
            worker = worker.arg(name, value);
        }
        match self.wrapper {
            Some((program, args)) => worker.under(program, args),
            None => worker,
        }
    }

    /// Starts the processes that are not there yet.
    pub fn start(&mut self) {
        while (self.members.len() as u32) < self.layout.writers / self.threads {
            let member = self.member(self.members.len() as u32).spawn();
            self.members.push(member);
        }
    }

    /// Kills member `index` and starts its replacement at once.
    pub fn replace(&mut self, index: usize) {
        if self.wrapper.is_some() {
            // The wrapper ends when the worker inside it is dead, and no sooner.
            self.members[index].kill_child();
        } else {
            self.members[index].kill();
        }
        self.members[index] = self.member(index as u32).spawn();
    }

    /// Panics if a member has ended.
    pub fn demand_all_running(&mut self) {
        self.members =
            std::mem::take(&mut self.members).into_iter().map(Process::demand_running).collect();
    }

    /// Lets them work for `time`, looking after them and calling `meanwhile` every half second.
    pub fn work(&mut self, time: Duration, mut meanwhile: impl FnMut(&Board)) {
        let start = Instant::now();
        while start.elapsed() < time {
            std::thread::sleep(Duration::from_millis(500).min(time));
            self.demand_all_running();
            meanwhile(&self.board);
        }
    }

    /// Asks all to end, and demands that they do and saw nothing wrong.
    pub fn stop(&mut self) {
        self.board.stop();
        for member in self.members.drain(..) {
            member.succeed(PATIENCE);
        }
    }

    /// Kills all at once.
    pub fn kill_all(&mut self) {
        for member in &self.members {
            member.signal(libc::SIGKILL);
        }
        for mut member in self.members.drain(..) {
            member.kill();
        }
    }

    /// Demands that the database is whole and holds exactly what was acknowledged, or what was
    /// begun, of every key.
    pub fn demand_everything(&self, db: &Db, when: &str) {
        if let Err(e) = adopt::everything(db, &self.board, &self.layout) {
            panic!("{when}: {e}");
        }
        lab::demand_clean(db, when);
    }

    /// The longest that any operation took.
    pub fn longest_wait(&self) -> Duration {
        let longest = (0..self.layout.writers)
            .map(|w| self.board.longest_wait_ns(w).load(Ordering::Relaxed))
            .max();
        Duration::from_nanos(longest.unwrap_or(0))
    }

    /// The longest that an operation of member `index` took.
    pub fn longest_wait_of(&self, index: usize) -> Duration {
        let first = index as u32 * self.threads;
        let longest = (first..first + self.threads)
            .map(|w| self.board.longest_wait_ns(w).load(Ordering::Relaxed))
            .max();
        Duration::from_nanos(longest.unwrap_or(0))
    }
}
