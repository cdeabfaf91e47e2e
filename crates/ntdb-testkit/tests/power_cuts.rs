//! After a power cut the database opens, holds everything that was made durable, and is in a state
//! that it had at some moment: never a mixture. `NTDB_TEST_SEEDS` cuts; each seed repeats itself
//! with `NTDB_TEST_SEED=seed NTDB_TEST_SEEDS=1`.

use std::sync::atomic::{AtomicU64, Ordering};

use ntdb_testkit::board::Board;
use ntdb_testkit::crash;
use ntdb_testkit::lab::{self, Lab, PATIENCE, TempDir};
use ntdb_testkit::powercut;
use ntdb_testkit::rng::{Rng, mix};
use ntdb_testkit::script::{Script, Shape};
use ntdb_testkit::worker::scripted::{BEGUN, DURABLE};

struct Cut {
    seed: u64,
    rng: Rng,
    lab: Lab,
    script_seed: u64,
    operations: usize,
    boot: u64,
    story: String,
    points: Vec<String>,
    /// Bytes of past log that are kept.
    keep: u64,
    /// Where the first power cut comes, if that is not left to chance.
    planned: Option<String>,
}

impl Cut {
    fn new(seed: u64) -> Cut {
        let mut rng = Rng::new(seed);
        let script_seed = rng.next_u64();
        let operations = Script::new(Shape::Small, script_seed).ops.len();
        let lab = Lab::inside(env!("CARGO_BIN_EXE_ntdb-worker"), TempDir::new());
        let points = crash::names_in_source().iter().cloned().collect();
        let story = String::new();
        // Half of them keep all log; some keep so little that they remove some.
        let keep = *rng.pick(&[0, 0, 1 << 30, 1 << 30, 1 << 17]);
        let planned = None;
        Cut { seed, rng, lab, script_seed, operations, boot: 1, story, points, keep, planned }
    }

    /// Runs `role` on the database in folder `disk` until it dies or ends; then cuts the power and
    /// returns the folder with what is on disk after that.
    fn power_off(&mut self, role: &str, disk: &str, checkpoint: u64, page_size: u32) -> String {
        let dir = self.lab.dir().join(disk);
        let images = self.lab.dir().join(format!("{disk}-images"));
        powercut::begin(&dir, &images).expect("first images");
        let mut worker = self
            .lab
            .worker_on(role, &dir.join("test.ntdb"))
            .path("board", &self.lab.board())
            .path("record", &images)
            .arg("seed", self.script_seed)
            .arg("checkpoint", checkpoint)
            .arg("page_size", page_size)
            .arg("keep", self.keep)
            .arg("after_power_cut", true)
            .env("NTDB_TEST_BOOT_ID", format!("{:032x}", self.boot));
        let begun =
            Board::open(&self.lab.board()).expect("board").mark(BEGUN).load(Ordering::SeqCst);
        let at = match self.rng.below(10) {
            // Also at the very end, after the last close.
            0 => self.operations,
            // Soon, so that recovery itself is cut.
            1 | 2 => begun as usize,
            _ => self.rng.range(begun, self.operations as u64) as usize,
        };
        let crash = self.planned.take().or_else(|| {
            // Or in the middle of an operation: at a crash point, if that comes first.
            let scale = self.rng.below(6);
            let nth = 1 + self.rng.below(1 << scale);
            let point = self.rng.pick(&self.points).clone();
            self.rng.percent(60).then(|| format!("{point}:{nth}"))
        });
        worker = worker.arg("kill_before", at);
        match crash {
            Some(crash) => {
                self.story.push_str(&format!("{role} to {at} or {crash}; "));
                worker = worker.env("NTDB_CRASH", crash);
            }
            None => self.story.push_str(&format!("{role} to {at}; ")),
        }
        let ended = worker.spawn().end(PATIENCE);
        assert!(
            ended.status.success() || ended.signal() == Some(libc::SIGKILL),
            "seed {}: {}: {}\n{}",
            self.seed,
            self.story,
            ended.status,
            ended.stderr
        );
        let after = format!("{disk}+");
        let story = powercut::cut(&dir, &images, &self.lab.dir().join(&after), &mut self.rng)
            .expect("cut the power");
        self.story.push_str(&story);
        self.boot += 1;
        after
    }

    fn run(&mut self) -> u64 {
        let board = Board::create(&self.lab.board(), 1, 1).expect("board");
        let planned = self.planned.is_some();
        let checkpoint = if planned { 1 << 15 } else { 1 << self.rng.range(14, 19) };
        let page_size =
            if planned { 4096 } else { *self.rng.pick(&[4096, 4096, 4096, 8192, 16384]) };
        std::fs::create_dir(self.lab.dir().join("disk")).expect("folder");
        let mut disk = self.power_off("script", "disk", checkpoint, page_size);
        while self.rng.percent(35) {
            disk = self.power_off("script-resume", &disk, checkpoint, page_size);
        }
        let ended = self
            .lab
            .worker_on("script-verify", &self.lab.dir().join(&disk).join("test.ntdb"))
            .path("board", &self.lab.board())
            .arg("seed", self.script_seed)
            .arg("checkpoint", checkpoint)
            .arg("page_size", page_size)
            .arg("keep", self.keep)
            .arg("after_power_cut", true)
            .env("NTDB_TEST_BOOT_ID", format!("{:032x}", self.boot))
            .spawn()
            .end(PATIENCE);
        assert!(
            ended.status.success(),
            "NTDB_TEST_SEED={} NTDB_TEST_SEEDS=1 repeats this: {}\n{}\n{}",
            self.seed,
            self.story,
            ended.status,
            ended.stderr
        );
        board.mark(DURABLE).load(Ordering::SeqCst)
    }
}

#[test]
fn leave_a_state_that_existed() {
    let first = lab::seed();
    let seeds = lab::number("NTDB_TEST_SEEDS", 300);
    let durable = AtomicU64::new(0);
    // The first is the seed itself, so that one seed can be repeated.
    let all: Vec<_> =
        (0..seeds).map(|n| if n == 0 { first } else { mix(first.wrapping_add(n)) }).collect();
    lab::for_all(&all, |&seed| {
        durable.fetch_add(Cut::new(seed).run(), Ordering::Relaxed);
    });
    let durable = durable.into_inner();
    println!("{seeds} power cuts; {durable} operations were durable and there");
    assert!(seeds < 20 || durable > seeds * 5, "hardly anything was durable: {durable}");
}

#[test]
fn at_every_crash_point_leave_a_state_that_existed() {
    let first = lab::seed();
    // What does each of some scripts pass? Cut the power there.
    let mut cases = Vec::new();
    let mut names = std::collections::BTreeSet::new();
    for n in 0..6 {
        let seed = mix(first.wrapping_add(n));
        let cut = Cut::new(seed);
        Board::create(&cut.lab.board(), 1, 1).expect("board");
        let hits = cut.lab.dir().join("hits");
        cut.lab
            .worker("script")
            .path("board", &cut.lab.board())
            .path("hits", &hits)
            .arg("seed", cut.script_seed)
            .arg("checkpoint", 1 << 15)
            .arg("keep", cut.keep)
            .run();
        for (name, passed) in crash::read_hits(&hits) {
            cases.push((seed, format!("{name}:{}", mix(seed) % passed + 1)));
            names.insert(name);
        }
    }
    assert!(!cases.is_empty(), "the scripts pass no crash point");
    lab::for_all(&cases, |(seed, crash)| {
        let mut cut = Cut::new(*seed);
        cut.planned = Some(crash.clone());
        cut.run();
    });
    println!("{} power cuts at {} crash points", cases.len(), names.len());
}

#[test]
fn during_creation_leave_nothing_or_an_empty_database() {
    let first = lab::seed();
    let points: Vec<_> =
        crash::names_in_source().iter().filter(|name| name.starts_with("create.")).collect();
    assert!(!points.is_empty(), "creation has no crash points");
    let mut cases = Vec::new();
    for point in &points {
        for nth in 1..=4 {
            for round in 0..10 {
                let seed = mix(first ^ mix(cases.len() as u64 + round));
                cases.push((seed, format!("{point}:{nth}")));
            }
        }
    }
    lab::for_all(&cases, |(seed, crash)| {
        let mut cut = Cut::new(*seed);
        cut.planned = Some(crash.clone());
        cut.run();
    });
    println!("{} power cuts during creation", cases.len());
}
