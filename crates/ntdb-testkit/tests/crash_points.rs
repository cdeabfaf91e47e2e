//! A process is killed at every named step of every write path, one by one; also at two, the
//! second inside the repair of the first. A survivor that was attached all the time, or, if there
//! is none, whoever opens next, finds the state before or after the operation, whole, and goes on.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ntdb::Db;
use ntdb_testkit::args::Args;
use ntdb_testkit::board::Board;
use ntdb_testkit::crash::{self, Hits};
use ntdb_testkit::lab::{self, Ended, Lab, PATIENCE, Worker};
use ntdb_testkit::rng::mix;
use ntdb_testkit::script::{Script, Shape};
use ntdb_testkit::value::key_hash;
use ntdb_testkit::worker::scripted::{self, BEGUN, DONE};

/// A survivor must never wait longer than this for the dead.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// What is followed, and with which options.
#[derive(Clone, Copy)]
struct Workload {
    shape: Shape,
    seed: u64,
    page_size: u32,
    hash_mask: u64,
    /// Operations that a reader in the same process stays for; 0 for no readers.
    hold: u64,
    /// Bytes of past log that are kept.
    keep: u64,
}

const WORKLOADS: [Workload; 6] = [
    Workload {
        shape: Shape::Full,
        seed: 1,
        page_size: 4096,
        hash_mask: u64::MAX,
        hold: 0,
        keep: 0,
    },
    // Equal hashes: overflow chains.
    Workload { shape: Shape::Small, seed: 2, page_size: 4096, hash_mask: 0, hold: 0, keep: 0 },
    Workload {
        shape: Shape::Small,
        seed: 3,
        page_size: 4096,
        hash_mask: 0xFF << 56,
        hold: 0,
        keep: 0,
    },
    // Readers that overlap, so that replaced pages queue up.
    Workload {
        shape: Shape::Full,
        seed: 1,
        page_size: 4096,
        hash_mask: u64::MAX,
        hold: 1_250,
        keep: 0,
    },
    // All log is kept, and some.
    Workload {
        shape: Shape::Small,
        seed: 5,
        page_size: 4096,
        hash_mask: u64::MAX,
        hold: 0,
        keep: 1 << 30,
    },
    Workload {
        shape: Shape::Small,
        seed: 6,
        page_size: 4096,
        hash_mask: u64::MAX,
        hold: 0,
        keep: 64 << 10,
    },
];

struct Scene {
    lab: Lab,
    board: Board,
    script: Arc<Script>,
    workload: Workload,
    name: String,
}

impl Scene {
    fn new(workload: Workload, name: String) -> Scene {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let board = Board::create(&lab.board(), 1, 1).expect("board");
        let script = Script::shared(workload.shape, workload.seed);
        Scene { lab, board, script, workload, name }
    }

    fn worker(&self, role: &str) -> Worker {
        self.lab
            .worker(role)
            .path("board", &self.lab.board())
            .path("hits", &self.lab.dir().join("hits"))
            .arg("shape", self.workload.shape.name())
            .arg("seed", self.workload.seed)
            .arg("page_size", self.workload.page_size)
            .arg("hash_mask", format!("{:x}", self.workload.hash_mask))
            .arg("hold", self.workload.hold)
            .arg("keep", self.workload.keep)
    }

    fn hits(&self) -> Hits {
        crash::read_hits(&self.lab.dir().join("hits"))
    }

    /// The database as if nothing had happened yet.
    fn start_anew(&self) {
        for entry in std::fs::read_dir(self.lab.dir()).expect("list").flatten() {
            if entry.path() != self.lab.board() {
                std::fs::remove_file(entry.path()).expect("remove");
            }
        }
        for mark in 0..8 {
            self.board.mark(mark).store(0, Ordering::SeqCst);
        }
    }

    /// A survivor: attached before the crash and idle until it has happened.
    fn attach(&self) -> Db {
        let args = [
            "script".to_string(),
            self.lab.database().display().to_string(),
            format!("page_size={}", self.workload.page_size),
            format!("hash_mask={:x}", self.workload.hash_mask),
            format!("keep={}", self.workload.keep),
        ];
        let args = Args::parse(args).expect("arguments");
        scripted::options(&args)
            .open(self.lab.database())
            .unwrap_or_else(|e| panic!("{}: open: {e}", self.name))
    }

    /// Runs `role` with a crash planned; says whether it came to it.
    fn die(&self, role: &str, point: &str, nth: u64) -> bool {
        let worker = self.worker(role).env("NTDB_CRASH", format!("{point}:{nth}"));
        self.died(worker.spawn().end(PATIENCE), point)
    }

    fn died(&self, ended: Ended, point: &str) -> bool {
        if ended.signal() == Some(libc::SIGKILL) {
            return true;
        }
        assert!(
            ended.status.success(),
            "{}: at {point}: {}\n{}",
            self.name,
            ended.status,
            ended.stderr
        );
        false
    }

    /// The survivor finds the state and goes on.
    fn survive(&self, db: &Db) {
        let start = Instant::now();
        db.put(b"survivor", b"goes on").unwrap_or_else(|e| panic!("{}: put: {e}", self.name));
        assert!(db.delete(b"survivor").unwrap_or_else(|e| panic!("{}: delete: {e}", self.name)));
        let waited = start.elapsed();
        assert!(waited < LONGEST_WAIT, "{}: the survivor waited {waited:?}", self.name);
        self.go_on(db);
    }

    fn go_on(&self, db: &Db) {
        let place = scripted::find(db, &self.board, &self.script, DONE)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let fail = |e: String| panic!("{}, place {place}: {e}", self.name);
        scripted::check(db, "before going on").unwrap_or_else(fail);
        self.check_changes(db);
        let end = (place + 300).min(self.script.ops.len());
        scripted::proceed(db, &self.script, place, end).unwrap_or_else(fail);
        scripted::check(db, "after going on").unwrap_or_else(fail);
        self.check_changes(db);
    }

    fn check_changes(&self, db: &Db) {
        if self.workload.keep > 0 {
            scripted::check_changes(db).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        }
    }

    /// Nobody is attached; somebody opens the database.
    fn open_and_go_on(&self) {
        let db = self.attach();
        self.go_on(&db);
        drop(db);
        let db = self.attach();
        scripted::check(&db, "opened at rest").unwrap_or_else(|e| panic!("{}: {e}", self.name));
    }
}

/// How often each crash point is passed by each workload.
fn counting_runs() -> Vec<(Workload, Hits)> {
    WORKLOADS
        .iter()
        .map(|&workload| {
            let scene = Scene::new(workload, "counting run".into());
            scene.worker("script").run();
            let mut hits = scene.hits();
            if workload.hold > 0 {
                // All else is passed in the same way without readers.
                hits.retain(|point, _| point.starts_with("retire."));
            }
            if workload.keep > 0 {
                // What has to do with the log.
                let prefixes = [
                    "keep.", "switch.", "log.", "flush.", "close.", "remove.", "meta.", "publish.",
                ];
                hits.retain(|point, _| prefixes.iter().any(|prefix| point.starts_with(prefix)));
            }
            (workload, hits)
        })
        .collect()
}

/// The first passage, the second, one in the middle and the last.
fn passages(hits: u64) -> Vec<u64> {
    let mut passages = vec![1, 2, hits / 2 + 1, hits];
    passages.retain(|&n| n >= 1 && n <= hits);
    passages.sort_unstable();
    passages.dedup();
    passages
}

fn cases() -> Vec<(Workload, String, u64)> {
    let mut cases = Vec::new();
    for (workload, hits) in counting_runs() {
        for (point, passed) in hits {
            for nth in passages(passed) {
                cases.push((workload, point.clone(), nth));
            }
        }
    }
    assert!(!cases.is_empty(), "the workloads pass no crash point");
    cases
}

#[test]
fn beside_a_survivor() {
    let cases = cases();
    lab::for_all(&cases, |(workload, point, nth)| {
        let scene = Scene::new(*workload, format!("killed at {point}:{nth}, survivor attached"));
        let survivor = scene.attach();
        // Some points are passed only by the first to open or the last to close.
        scene.die("script", point, *nth);
        scene.survive(&survivor);
    });
    println!("{} crashes beside a survivor", cases.len());
}

#[test]
fn with_nobody_left() {
    let cases = cases();
    lab::for_all(&cases, |(workload, point, nth)| {
        let scene = Scene::new(*workload, format!("killed at {point}:{nth}, nobody attached"));
        // The hash key is random, so a late passage may not come this time: take one before it. A
        // rare point may need several tries; one that never comes again is a failure.
        let mut nth = *nth;
        let mut tries = 0;
        while !scene.die("script", point, nth) {
            tries += 1;
            assert!(nth > 1 || tries < 40, "{}: it did not die", scene.name);
            nth = (nth - nth.div_ceil(4)).max(1);
            scene.start_anew();
        }
        scene.open_and_go_on();
    });
    println!("{} crashes with nobody left", cases.len());
}

#[test]
fn again_inside_the_repair() {
    // All pairs take minutes: `NTDB_TEST_PAIRS` says how many percent of them are tried.
    let percent = lab::number("NTDB_TEST_PAIRS", 10);
    let seed = lab::seed();
    // For every crash, what does whoever comes next pass that an undisturbed run does not, or
    // passes before its first operation? Kill it there.
    let mut first_crashes: BTreeMap<String, (Workload, u64)> = BTreeMap::new();
    for (workload, hits) in counting_runs() {
        for (point, passed) in hits {
            first_crashes.entry(point).or_insert((workload, passed / 2 + 1));
        }
    }
    let mut pairs = Vec::new();
    for survivor in [true, false] {
        for (point, (workload, nth)) in &first_crashes {
            pairs.push((*workload, point.clone(), *nth, survivor));
        }
    }
    let crashes = std::sync::atomic::AtomicU64::new(0);
    lab::for_all(&pairs, |(workload, point, nth, with_survivor)| {
        let name = format!("killed at {point}:{nth} (survivor: {with_survivor})");
        let probe = Scene::new(*workload, name.clone());
        let repair = {
            let survivor = with_survivor.then(|| probe.attach());
            probe.die("script", point, *nth);
            // One operation is enough to find the dead; `to` keeps the probe short.
            let place = probe.board.mark(BEGUN).load(Ordering::SeqCst) + 1;
            probe.worker("script-resume").arg("to", place).run();
            drop(survivor);
            probe.hits()
        };
        for (second, passed) in repair {
            if !second.starts_with("repair.") && !second.starts_with("recover") {
                continue;
            }
            for nth_second in passages(passed).into_iter().take(3) {
                let lot = mix(seed ^ key_hash(format!("{name} {second} {nth_second}").as_bytes()));
                if lot % 100 >= percent {
                    continue;
                }
                let name = format!("{name}, then at {second}:{nth_second}");
                let scene = Scene::new(*workload, name);
                let survivor = with_survivor.then(|| scene.attach());
                scene.die("script", point, *nth);
                scene.die("script-resume", &second, nth_second);
                crashes.fetch_add(1, Ordering::Relaxed);
                match &survivor {
                    Some(db) => scene.survive(db),
                    None => scene.open_and_go_on(),
                }
            }
        }
    });
    let crashes = crashes.into_inner();
    println!("{crashes} crashes inside a repair");
    assert!(crashes > 0, "no crash point inside a repair was passed");
}

/// What recovery passes after a failed sync, for each sync of the data file that can fail.
fn after_failed_syncs(die_at: Option<&str>) -> Hits {
    let mut passed = Hits::new();
    let workload = WORKLOADS[1];
    for nth in 1..=24 {
        let scene = Scene::new(workload, format!("sync {nth} of the data file failed"));
        scene.worker("faulty").env("NTDB_FAULT", format!("fdatasync:data:EIO:{nth}")).run();
        let resume = |crash: Option<&str>| {
            let mut worker = scene.worker("script-resume").arg("after_power_cut", true);
            if let Some(point) = crash {
                worker = worker.env("NTDB_CRASH", format!("{point}:1"));
            }
            scene.died(worker.spawn().end(PATIENCE), "recovery");
        };
        if die_at.is_some() {
            resume(die_at);
        }
        resume(None);
        for (name, n) in scene.hits() {
            *passed.entry(name).or_default() += n;
        }
    }
    passed
}

#[test]
fn after_a_failed_sync_recovery_dies_and_begins_anew() {
    for point in ["recover.meta.voided", "recover.begin", "recover.replayed", "recover.recorded"] {
        let passed = after_failed_syncs(Some(point));
        assert!(!passed.is_empty());
    }
}

#[test]
fn are_all_reached() {
    let passed: Mutex<Hits> = Mutex::default();
    let add = |hits: Hits| {
        let mut passed = passed.lock().expect("no panic while it is held");
        for (name, n) in hits {
            *passed.entry(name).or_default() += n;
        }
    };
    let mut cases = Vec::new();
    for (workload, hits) in counting_runs() {
        add(hits.clone());
        for (point, n) in hits {
            cases.push((workload, point.clone(), n / 2 + 1, true));
            cases.push((workload, point, n / 2 + 1, false));
        }
    }
    lab::for_all(&cases, |(workload, point, nth, survivor)| {
        let scene = Scene::new(*workload, format!("reach beyond {point}"));
        let attached = survivor.then(|| scene.attach());
        scene.die("script", point, *nth);
        let place = scene.board.mark(BEGUN).load(Ordering::SeqCst) + 1;
        scene.worker("script-resume").arg("to", place).run();
        drop(attached);
        add(scene.hits());
    });
    add(after_failed_syncs(None));
    let names = crash::names_in_source();
    assert!(!names.is_empty(), "the source names no crash point");
    let passed = passed.into_inner().expect("no panic while it was held");
    // Those of backups: `backups_are_whole`.
    let names: Vec<_> = names.iter().filter(|name| !name.starts_with("backup.")).collect();
    let missed: Vec<_> = names.iter().filter(|name| !passed.contains_key(**name)).collect();
    println!("{} crash points, each passed: {passed:?}", names.len());
    assert!(missed.is_empty(), "no workload passes {missed:?}");
}
