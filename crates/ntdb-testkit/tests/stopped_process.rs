//! A stopped process (SIGSTOP) delays nobody who only reads, wherever it stands. It delays writers
//! only while it holds the writer lock; then their time-outs work and name it, and after SIGCONT
//! all is well.

use std::time::{Duration, Instant};

use ntdb::{Db, Error, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::crash;
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab, PATIENCE, Wait};
use ntdb_testkit::rng::Rng;
use ntdb_testkit::script::{Digest, Script, Shape};

const SCRIPT_SEED: u64 = 4;

/// A stopped process must not delay a reader; what a page fault may take on a busy machine.
const READ_LIMIT: Duration = Duration::from_millis(200);

#[test]
fn at_every_crash_point_delays_no_reader_and_names_itself_to_writers() {
    let script = Script::new(Shape::Small, SCRIPT_SEED);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    Board::create(&lab.board(), 1, 1).expect("board");
    let hits = lab.dir().join("hits");
    let worker =
        |lab: &Lab| lab.worker("script").path("board", &lab.board()).arg("seed", SCRIPT_SEED);
    {
        let _other = Options::new().create(true).open(lab.database()).expect("create");
        worker(&lab).path("hits", &hits).run();
    }
    let passed = crash::read_hits(&hits);
    assert!(!passed.is_empty(), "the script passes no crash point");
    let (mut stopped, mut delayed) = (0, 0);
    for (point, n) in passed {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        Board::create(&lab.board(), 1, 1).expect("board");
        let db = Options::new().create(true).open(lab.database()).expect("create");
        let process = worker(&lab).env("NTDB_STOP", format!("{point}:{}", n / 2 + 1)).spawn();
        let mut process = process;
        while !process.is_stopped() && process.runs() {
            std::thread::sleep(Duration::from_micros(200));
        }
        if !process.runs() {
            // Passed only by the first to open: not reached beside us.
            process.succeed(PATIENCE);
            continue;
        }
        stopped += 1;
        for i in 0..50 {
            let start = Wait::begin();
            db.get(format!("key-{i}").as_bytes())
                .unwrap_or_else(|e| panic!("get while one is stopped at {point}: {e}"));
            let took = start.elapsed();
            assert!(took < READ_LIMIT, "a reader waited {took:?} for one stopped at {point}");
        }
        db.for_each(|_, _| std::ops::ControlFlow::Continue(())).expect("iterate");
        let timed = db.with_lock_timeout(Some(Duration::from_millis(100)));
        let start = Instant::now();
        match timed.put(b"beside", b"x") {
            Ok(()) => {}
            Err(Error::Locked { owner, .. }) => {
                delayed += 1;
                assert_eq!(owner, process.id(), "the wrong process is named at {point}");
            }
            Err(e) => panic!("put while one is stopped at {point}: {e}"),
        }
        let took = start.elapsed();
        assert!(took < Duration::from_secs(1), "a time-out of 100 ms took {took:?} at {point}");
        process.signal(libc::SIGCONT);
        process.succeed(PATIENCE);
        db.put(b"beside", b"x").expect("put after SIGCONT");
        assert!(db.delete(b"beside").expect("delete after SIGCONT"));
        let found = Digest::of(&db).expect("read");
        assert_eq!(found, script.digests[script.ops.len()], "after a stop at {point}");
        lab::demand_clean(&db, &format!("after a stop at {point}"));
    }
    println!("{stopped} stops, {delayed} of them delayed a writer");
    assert!(stopped > 0, "nobody was stopped");
    assert!(delayed > 0, "no stop inside the writer lock");
}

#[test]
fn at_random_moments_readers_go_on_and_writers_recover() {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut crowd = Crowd::new(lab, &mut Options::new(), 4, 2, 48, 2_000, seed)
        .with("reads", 10)
        .with("scans", 0);
    let db = Db::open(crowd.lab.database()).expect("open");
    crowd.start();
    std::thread::sleep(Duration::from_millis(100));
    for _ in 0..40 {
        std::thread::sleep(Duration::from_millis(rng.below(20)));
        let victim = rng.below(crowd.members.len() as u64) as usize;
        crowd.members[victim].signal(libc::SIGSTOP);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(50) {
            let id = rng.below(crowd.layout.keys() as u64) as usize;
            let read = Wait::begin();
            db.get(&crowd.layout.key(id)).expect("get");
            let waited = read.elapsed();
            assert!(waited < READ_LIMIT, "a read waited {waited:?}");
        }
        crowd.members[victim].signal(libc::SIGCONT);
    }
    crowd.stop();
    crowd.demand_everything(&db, "at the end");
}

/// A check may take minutes; here one takes until told, before there is a log.
#[test]
fn a_check_delays_no_writer_that_needs_the_first_log() {
    for (read_only, writer_comes_later) in [(true, false), (false, false), (false, true)] {
        let what = format!("read_only {read_only}, later {writer_comes_later}");
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let first = Db::create(lab.database()).expect("create");
        let mut open = Some(first);
        if writer_comes_later {
            open.take().expect("open").close().expect("close");
        }
        let mut checker = lab
            .worker("check")
            .arg("read_only", read_only)
            .env("NTDB_STOP", "check.frozen")
            .spawn();
        while !checker.is_stopped() {
            assert!(checker.runs(), "{what}: the check has ended");
            std::thread::sleep(Duration::from_micros(200));
        }
        let start = Instant::now();
        let db = open.unwrap_or_else(|| Db::open(lab.database()).expect("open"));
        let db = db.with_lock_timeout(Some(Duration::from_secs(2)));
        let mut longest = start.elapsed();
        // More than the ring holds, and something durable.
        for n in 0..3_000u32 {
            let start = Instant::now();
            db.put(&n.to_le_bytes(), &[7; 1_000]).expect("put");
            if n % 1_000 == 0 {
                db.sync().expect("sync");
            }
            longest = longest.max(start.elapsed());
        }
        assert!(longest < Duration::from_millis(300), "{what}: a writer waited {longest:?}");
        assert!(checker.is_stopped(), "{what}: the check has gone on");
        checker.signal(libc::SIGCONT);
        assert_eq!(checker.succeed(PATIENCE).trim(), "clean", "{what}");
        lab::demand_clean(&db, &what);
    }
}

#[test]
fn holding_a_key_lock_makes_timed_and_trying_lockers_return() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    let mut holder = lab.worker("hold-lock").spawn();
    assert_eq!(holder.line(), "held");
    holder.signal(libc::SIGSTOP);
    assert!(db.try_lock(b"locked").expect("try").is_none(), "a held lock was given away");
    let timed = db.with_lock_timeout(Some(Duration::from_millis(100)));
    let start = Instant::now();
    match timed.lock(b"locked") {
        Err(Error::Locked { owner, waited, .. }) => {
            assert_eq!(owner, holder.id());
            assert!(waited >= Duration::from_millis(100), "{waited:?}");
        }
        other => panic!("{other:?}"),
    }
    match timed.put(b"locked", b"by another") {
        Err(Error::Locked { owner, .. }) => assert_eq!(owner, holder.id()),
        other => panic!("{other:?}"),
    }
    assert!(start.elapsed() < Duration::from_secs(2));
    db.get(b"locked").expect("readers don't know locks");
    // Thousands of keys share a lock by chance: of a hundred, two or three at most, whatever the hash's key is.
    let brief = db.with_lock_timeout(Some(Duration::from_millis(5)));
    let delayed = (0..100)
        .filter(|i: &u32| match brief.put(&i.to_le_bytes(), b"free") {
            Ok(_) => false,
            Err(Error::Locked { .. }) => true,
            Err(other) => panic!("{other}"),
        })
        .count();
    assert!(delayed <= 3, "{delayed} of 100 keys waited for another key's lock");
    holder.signal(libc::SIGCONT);
    holder.succeed(PATIENCE);
    timed.put(b"locked", b"now").expect("put after the release");
    drop(db.lock(b"locked").expect("lock after the release"));
}

#[test]
fn hung_before_does_not_make_later_opens_hang() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    drop(Db::create(lab.database()).expect("create"));
    let mut holder = lab.worker("hold-lock").spawn();
    assert_eq!(holder.line(), "held");
    holder.signal(libc::SIGSTOP);
    for n in 0..20 {
        let start = Instant::now();
        let db = Db::open(lab.database()).expect("open beside a stopped process");
        // A key whose lock isn't by chance the one that is held.
        let brief = db.with_lock_timeout(Some(Duration::from_millis(5)));
        let put = |i: u32| brief.put(format!("beside-{n}-{i}").as_bytes(), b"x").is_ok();
        assert!((0..4).any(put), "no put beside a stopped process");
        db.close().expect("close beside a stopped process");
        assert!(start.elapsed() < Duration::from_secs(1), "took {:?}", start.elapsed());
    }
    holder.signal(libc::SIGCONT);
    holder.succeed(PATIENCE);
}
