//! A backup is there whole, or what was at its place before is there: whenever the process that makes it is killed or stopped,
//! wherever the disk is full or a call fails, and after a power cut. The original is never harmed, nor are those who use it.
//! Needs root (small file systems are mounted).

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ntdb::{BackupOptions, Db, Error, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::crash::{self, Hits};
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab, PATIENCE, Worker};
use ntdb_testkit::mount::SmallDisk;
use ntdb_testkit::powercut;
use ntdb_testkit::rng::{Rng, mix};
use ntdb_testkit::script::Digest;

/// Who waits for one who makes a backup, dead or stopped, is told of it after this, as an error.
const LONGEST_WAIT: Option<Duration> = Some(Duration::from_secs(10));

/// What is at the destination before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum There {
    Nothing,
    /// A database at rest.
    AtRest,
    /// One whose users were all killed: log and shared memory lie beside it.
    Crashed,
}

use There::*;

/// An original, a destination in a folder of its own, and what both hold.
struct Scene {
    lab: Lab,
    there: There,
    /// What the original holds, and what was at the destination.
    new: Digest,
    old: Option<Digest>,
}

impl Scene {
    fn new(there: There) -> Scene {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let to = lab.dir().join("to");
        std::fs::create_dir(&to).expect("folder");
        let db = Db::create(lab.database()).expect("create");
        furnish(&db, 3_000);
        let new = Digest::of(&db).expect("read");
        db.close().expect("close");
        let mut scene = Scene { lab, there, new, old: None };
        scene.old = scene.make_old();
        scene
    }

    fn make_old(&self) -> Option<Digest> {
        if self.there == Nothing {
            return None;
        }
        Board::create(&self.lab.board(), 1, 1).expect("board");
        drop(Db::create(self.to()).expect("create"));
        let worker = self.lab.worker_on("durable", &self.to()).path("board", &self.lab.board());
        let mut worker = boot(worker.arg("n", 300), 1);
        if self.there == Crashed {
            worker = worker.env("NTDB_CRASH", "sync.published:200");
        }
        let ended = worker.spawn().end(PATIENCE);
        assert_eq!(ended.signal().is_some(), self.there == Crashed, "{}", ended.stderr);
        let names = names(self.to().parent().expect("a folder"));
        assert_eq!(names.len(), if self.there == Crashed { 3 } else { 1 }, "{names:?}");
        // Everything in it is durable, so a copy of data and log says what it holds.
        let copy = self.lab.dir().join("copy-of-old.ntdb");
        for suffix in ["", "-log0", "-log1"] {
            let name = |path: &Path| PathBuf::from(format!("{}{suffix}", path.display()));
            if name(&self.to()).exists() {
                std::fs::copy(name(&self.to()), name(&copy)).expect("copy");
            }
        }
        let said = boot(self.lab.worker_on("digest", &copy), 2).run();
        assert_eq!(reported(&said).records, if self.there == Crashed { 200 } else { 300 });
        Some(reported(&said))
    }

    fn to(&self) -> PathBuf {
        self.lab.dir().join("to/dst.ntdb")
    }

    /// What a backup that was killed long ago has left.
    fn leave_a_leftover(&self) {
        let name = self.to().with_file_name("dst.ntdb-partial-0123456789abcdef");
        std::fs::write(name, [7; 5_000]).expect("write");
    }

    fn names(&self) -> Vec<String> {
        names(&self.lab.dir().join("to"))
    }

    /// One who makes a backup, over what is there if that is expected.
    fn backup(&self) -> Worker {
        let worker = self.lab.worker("backup").path("to", &self.to());
        boot(worker.arg("force", self.there != Nothing), 1)
    }

    /// What is at the destination, if that can be used without reserve.
    fn found(&self, what: &str) -> Option<Digest> {
        let ended = boot(self.lab.worker_on("digest", &self.to()), 1).spawn().end(PATIENCE);
        assert!(ended.status.success(), "{what}: {}{}", ended.stdout, ended.stderr);
        (ended.stdout.trim() != "absent").then(|| reported(&ended.stdout))
    }

    /// Demands that the next backup works and tidies up, and that the original is what it was.
    fn next_works(&self, what: &str) {
        let worker = self.lab.worker("backup").path("to", &self.to()).arg("force", true);
        let said = boot(worker, 1).run();
        assert!(said.starts_with("made"), "{what}: the next one: {said}");
        assert_eq!(self.names(), ["dst.ntdb"], "{what}: after the next one");
        assert_eq!(self.found(what), Some(self.new), "{what}: the next one");
        assert_eq!(self.names(), ["dst.ntdb"], "{what}: after looking at the next one");
    }
}

/// In the boot of this number; the test itself never looks at what these made.
fn boot(worker: Worker, boot: u64) -> Worker {
    worker.env("NTDB_TEST_BOOT_ID", format!("{boot:032x}"))
}

fn furnish(db: &Db, records: u32) {
    for n in 0..records {
        db.put(&n.to_le_bytes(), &n.to_le_bytes().repeat(1 + n as usize % 40)).expect("put");
    }
    db.put(b"long", &vec![9; 400_000]).expect("a long value");
    db.put(&[7; 20_000], b"a long key").expect("a long key");
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("list");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("list").file_name();
    let mut names: Vec<String> =
        entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn reported(text: &str) -> Digest {
    let number = |name: &str| {
        let (_, rest) = text.split_once(name).unwrap_or_else(|| panic!("no {name} in {text}"));
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap_or_else(|_| panic!("{name} in {text}"))
    };
    Digest { records: number("records: "), xor: number("xor: ") }
}

/// What a backup passes that nothing disturbs.
fn passed(there: There) -> Hits {
    let scene = Scene::new(there);
    scene.leave_a_leftover();
    let hits = scene.lab.dir().join("hits");
    let _survivor = Db::open(scene.lab.database());
    scene.backup().path("hits", &hits).run();
    crash::read_hits(&hits)
}

#[test]
fn killed_anywhere_it_is_there_whole_or_not_at_all() {
    let mut cases = Vec::new();
    for there in [Nothing, AtRest, Crashed] {
        for (point, n) in passed(there) {
            // The first and the last time; and who comes next looks at the destination, or makes a backup at once.
            cases.push((there, point.clone(), 1, true));
            cases.push((there, point, n, false));
        }
    }
    let own = crash::names_in_source().iter().filter(|name| name.starts_with("backup."));
    let missed: Vec<_> = own.filter(|name| !cases.iter().any(|case| case.1 == **name)).collect();
    assert!(missed.is_empty(), "no backup passes {missed:?}");
    let (kept, made) = (AtomicU64::new(0), AtomicU64::new(0));
    lab::for_all(&cases, |(there, point, nth, look_first)| {
        let what = format!("killed at {point}:{nth} with {there:?} at the destination");
        let scene = Scene::new(*there);
        scene.leave_a_leftover();
        let survivor =
            Db::open(scene.lab.database()).expect("open").with_lock_timeout(LONGEST_WAIT);
        let worker = scene.backup().env("NTDB_CRASH", format!("{point}:{nth}"));
        let ended = worker.spawn().end(PATIENCE);
        assert!(
            ended.signal() == Some(libc::SIGKILL) || ended.status.success(),
            "{what}: {}",
            ended.stderr
        );
        survivor.put(b"survivor", b"goes on").expect("put");
        assert!(survivor.delete(b"survivor").expect("delete"), "{what}");
        assert_eq!(Digest::of(&survivor).expect("read"), scene.new, "{what}: the original");
        lab::demand_clean(&survivor, &what);
        if *look_first {
            let found = scene.found(&what);
            assert!(found == scene.old || found == Some(scene.new), "{what}: {found:?}");
            if found == scene.old { &kept } else { &made }.fetch_add(1, Ordering::Relaxed);
        }
        scene.next_works(&what);
        survivor.close().unwrap_or_else(|e| panic!("{what}: close: {e}"));
        let names = names(scene.lab.dir());
        assert!(!names.iter().any(|name| name.starts_with("test.ntdb-")), "{what}: {names:?}");
    });
    let (kept, made) = (kept.into_inner(), made.into_inner());
    println!("{} kills: {kept} times what was there was there, {made} times the copy", cases.len());
    assert!(kept > 20 && made > 2, "{kept} {made}");
}

#[test]
fn stopped_anywhere_it_holds_nobody_up() {
    let points: Vec<String> = passed(Nothing).into_keys().collect();
    // In the private copy, where no lock of the original is held.
    let own = ["backup.", "create.", "publish.", "checkpoint.", "structure."];
    let points: Vec<_> =
        points.into_iter().filter(|point| own.iter().any(|own| point.starts_with(own))).collect();
    assert!(points.len() > 15, "{points:?}");
    lab::for_all(&points, |point| {
        let what = format!("stopped at {point}");
        let scene = Scene::new(Nothing);
        scene.leave_a_leftover();
        let db = Db::open(scene.lab.database()).expect("open").with_lock_timeout(LONGEST_WAIT);
        let mut process = scene.backup().env("NTDB_STOP", format!("{point}:1")).spawn();
        let start = Instant::now();
        while !process.is_stopped() {
            assert!(process.runs() && start.elapsed() < PATIENCE, "{what}: does not come to it");
            std::thread::sleep(Duration::from_micros(200));
        }
        for n in 0..20_000u32 {
            db.put(&n.to_le_bytes(), b"beside").expect("put");
        }
        db.checkpoint().expect("checkpoint");
        db.transaction(|tx| tx.put(b"tx", b"x")).expect("transaction");
        drop(db.lock(b"key").expect("lock"));
        lab::demand_clean(&db, &what);
        // Another one to the same place, which must not take the first one's file for a leftover.
        let second = db.backup(scene.to(), &BackupOptions::new());
        let renamed = matches!(point.as_str(), "backup.renamed" | "backup.done");
        match second {
            Ok(_) if !renamed => {}
            Err(Error::AlreadyExists { .. }) if renamed => {}
            other => panic!("{what}: another backup: {other:?}"),
        }
        let partial = scene.names().iter().any(|name| name.contains("-partial-"));
        let before = matches!(point.as_str(), "backup.leftover" | "backup.begin");
        assert_eq!(partial, !renamed && !before, "{what}: {:?}", scene.names());
        process.signal(libc::SIGCONT);
        let said = process.succeed(PATIENCE);
        assert!(
            if renamed { said.starts_with("made") } else { said.contains("exists") },
            "{what}: it ended with {said}"
        );
        assert_eq!(scene.names(), ["dst.ntdb"], "{what}");
        db.close().expect("close");
    });
    println!("stopped at {} points", points.len());
}

#[test]
fn killed_and_stopped_beside_a_crowd_it_harms_nobody() {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut crowd = Crowd::new(lab, &mut Options::new(), 3, 2, 4_000, 2_000, seed)
        .with("transactions", 1)
        .with("scans", 0);
    let to = crowd.lab.dir().join("dst.ntdb");
    let db = Db::open(crowd.lab.database()).expect("open");
    crowd.start();
    let (mut killed, mut made) = (0, 0);
    let kills = lab::number("NTDB_TEST_KILLS", 200) / 4;
    for round in 0..kills {
        let worker = crowd.lab.worker("backup").path("to", &to).arg("force", true);
        let mut process = worker.spawn();
        // Most within the copying, however long that takes.
        std::thread::sleep(Duration::from_millis(1 << rng.below(8)));
        if round % 4 == 0 && process.runs() {
            // It may stand inside the lock of the original: not for long, then.
            process.signal(libc::SIGSTOP);
            std::thread::sleep(Duration::from_millis(20));
            process.signal(libc::SIGCONT);
        }
        if process.runs() {
            process.kill();
            killed += 1;
        } else {
            made += 1;
        }
        crowd.demand_all_running();
        if to.exists() {
            lab::demand_clean(&Db::open(&to).expect("open the copy"), "a copy");
        }
    }
    db.backup(&to, BackupOptions::new().overwrite(true)).expect("backup beside the crowd");
    crowd.stop();
    crowd.demand_everything(&db, "at the end");
    // Each checkpoint looks at the holders of some snapshots, whether they live.
    for n in 0..kills.max(10) {
        db.put(b"x", &n.to_le_bytes()).expect("put");
        db.checkpoint().expect("checkpoint");
        if db.stat().expect("stat").snapshots == 0 {
            break;
        }
    }
    assert_eq!(db.stat().expect("stat").snapshots, 0, "of those who were killed");
    println!("{killed} killed, {made} made");
    assert!(killed * 3 > kills, "hardly any was killed: {killed} of {kills}");
    db.close().expect("close");
    let names = names(crowd.lab.dir());
    assert_eq!(names, ["board", "dst.ntdb", "test.ntdb"]);
}

#[test]
fn on_a_full_disk_it_says_so_and_leaves_nothing() {
    for over_old in [false, true] {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let db = Db::create(lab.database()).expect("create");
        furnish(&db, 3_000);
        let before = Digest::of(&db).expect("read");
        let disk = SmallDisk::new(4 << 10);
        let to = disk.path().join("dst.ntdb");
        let mut options = BackupOptions::new();
        options.overwrite(over_old);
        if over_old {
            let old = Db::create(&to).expect("create");
            furnish(&old, 100);
            old.close().expect("close");
        }
        let old = over_old.then(|| std::fs::read(&to).expect("read"));
        let expected: Vec<_> = old.iter().map(|_| "dst.ntdb".to_string()).collect();
        let used = old.as_ref().map_or(0, |old| old.len() as u64 / 1024);
        let (mut failures, mut kib) = (0, used + 4);
        loop {
            disk.resize(kib);
            match db.backup(&to, &options) {
                Ok(_) => break,
                Err(Error::Full { path, .. }) => {
                    assert!(path.starts_with(disk.path()), "{kib} KiB: {path:?}");
                    failures += 1;
                }
                Err(e) => panic!("{kib} KiB: {e}"),
            }
            assert_eq!(names(disk.path()), expected, "{kib} KiB");
            if let Some(old) = &old {
                assert!(*old == std::fs::read(&to).expect("read"), "{kib} KiB: changed");
            }
            kib += 12;
            assert!(kib < 64 << 10, "never enough");
        }
        println!("{failures} failures, enough with {kib} KiB");
        assert!(failures > 20, "{failures}");
        assert_eq!(names(disk.path()), ["dst.ntdb"]);
        assert_eq!(Digest::of(&Db::open(&to).expect("open")).expect("read"), before);
        assert_eq!(Digest::of(&db).expect("read"), before);
        lab::demand_clean(&db, "after failures");
    }
}

#[test]
fn whichever_call_fails_it_is_whole_or_not_there() {
    for errno in ["ENOSPC", "EIO"] {
        let mut cases = Vec::new();
        for there in [Nothing, AtRest, Crashed] {
            let scene = Scene::new(there);
            let _other = Db::open(scene.lab.database()).expect("open");
            let hits = scene.lab.dir().join("hits");
            scene.backup().path("fault_hits", &hits).run();
            for (name, calls) in crash::read_hits(&hits) {
                let step = calls.div_ceil(12).max(1) as usize;
                cases.extend((1..=calls).step_by(step).map(|nth| (there, name.clone(), nth)));
            }
        }
        assert!(cases.len() > 30, "{cases:?}");
        let failures = AtomicU64::new(0);
        lab::for_all(&cases, |(there, name, nth)| {
            let what = format!("{name}:{errno}:{nth} with {there:?} at the destination");
            let scene = Scene::new(*there);
            let survivor = Db::open(scene.lab.database()).expect("open");
            let worker = scene.backup().env("NTDB_FAULT", format!("{name}:{errno}:{nth}"));
            let ended = worker.spawn().end(PATIENCE);
            assert!(ended.status.success(), "{what}: {}", ended.stderr);
            let failed = ended.stdout.starts_with("failed");
            failures.fetch_add(u64::from(failed), Ordering::Relaxed);
            if failed && !name.starts_with("unlink") {
                let left = scene.names().into_iter().filter(|name| name.contains("-partial-"));
                assert_eq!(left.count(), 0, "{what}: {:?}; {}", scene.names(), ended.stdout);
            }
            let found = scene.found(&what);
            let unsynced = failed && ended.stdout.contains("sync the directory");
            let allowed = match failed {
                true => found == scene.old || unsynced && found == Some(scene.new),
                false => found == Some(scene.new),
            };
            assert!(allowed, "{what}: {found:?}, though it said {}", ended.stdout);
            survivor.put(b"survivor", b"x").expect("put");
            survivor.delete(b"survivor").expect("delete");
            survivor.sync().expect("sync of the original");
            assert_eq!(Digest::of(&survivor).expect("read"), scene.new, "{what}");
            scene.next_works(&what);
        });
        let failures = failures.into_inner();
        println!("{} failing calls with {errno}, {failures} of them were told", cases.len());
        assert!(failures > 20, "{failures}");
    }
}

#[test]
fn a_power_cut_leaves_the_old_or_the_new_one() {
    let first = lab::seed();
    let seeds = lab::number("NTDB_TEST_SEEDS", 300);
    let seeds: Vec<_> =
        (0..seeds).map(|n| if n == 0 { first } else { mix(first.wrapping_add(n)) }).collect();
    let points = [Nothing, AtRest, Crashed].map(|there| (there, passed(there)));
    let late = ["backup.verified", "backup.synced", "backup.renamed", "backup.done", "remove.log"];
    let (olds, news) = (AtomicU64::new(0), AtomicU64::new(0));
    lab::for_all(&seeds, |&seed| {
        let mut rng = Rng::new(seed);
        let (there, points) = rng.pick(&points);
        let scene = Scene::new(*there);
        let dir = scene.lab.dir().join("to");
        let images = scene.lab.dir().join("images");
        powercut::begin(&dir, &images).expect("first images");
        let mut worker = scene.backup().path("record", &images);
        let mut what = format!("seed {seed}, {there:?} at the destination");
        let plan = match rng.below(4) {
            0 => None,
            1 => Some((*rng.pick(&late)).to_string()),
            _ => points.keys().nth(rng.below(points.len() as u64) as usize).cloned(),
        };
        if let Some(point) = plan {
            let passages = points.get(&point).copied().unwrap_or(1);
            let plan = format!("{point}:{}", rng.below(passages) + 1);
            what.push_str(&format!(", killed at {plan}"));
            worker = worker.env("NTDB_CRASH", plan);
        }
        let ended = worker.spawn().end(PATIENCE);
        let made = ended.status.success();
        assert!(made || ended.signal() == Some(libc::SIGKILL), "{what}: {}", ended.stderr);
        let disk = scene.lab.dir().join("disk");
        let story = powercut::cut(&dir, &images, &disk, &mut rng).expect("cut the power");
        let what = format!("NTDB_TEST_SEED={seed} NTDB_TEST_SEEDS=1: {what}; {story}");
        let digest = boot(scene.lab.worker_on("digest", &disk.join("dst.ntdb")), 2);
        let ended = digest.spawn().end(PATIENCE);
        assert!(ended.status.success(), "{what}: {}{}", ended.stdout, ended.stderr);
        let found = (ended.stdout.trim() != "absent").then(|| reported(&ended.stdout));
        let is_new = found == Some(scene.new);
        assert!(is_new || !made && found == scene.old, "{what}: {found:?}, made: {made}");
        if is_new { &news } else { &olds }.fetch_add(1, Ordering::Relaxed);
        // And what else it has left goes with the next one.
        let worker = scene.lab.worker("backup").path("to", &disk.join("dst.ntdb"));
        let said = boot(worker.arg("force", true), 2).run();
        assert!(said.starts_with("made"), "{what}: the next one: {said}");
        assert_eq!(names(&disk), ["dst.ntdb"], "{what}");
    });
    let (olds, news) = (olds.into_inner(), news.into_inner());
    println!("{} power cuts: {olds} times the old one, {news} times the new one", seeds.len());
    assert!(seeds.len() < 20 || olds > 3 && news > 3, "{olds} {news}");
}
