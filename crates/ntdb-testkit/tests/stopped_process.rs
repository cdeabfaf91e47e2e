//! A stopped process (SIGSTOP) delays nobody who only reads, wherever it stands. It delays writers
//! only while it holds the writer lock; then their time-outs work and name it, and after SIGCONT
//! all is well.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use ntdb::{Db, Durability, Error, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::crash;
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab, PATIENCE, Process, Wait};
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
    // We write beside it.
    let worker = |lab: &Lab| {
        let worker = lab.worker("script").path("board", &lab.board());
        worker.arg("seed", SCRIPT_SEED).arg("alone", false)
    };
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
        db.for_each_live(|_, _| std::ops::ControlFlow::Continue(())).expect("iterate");
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
        .with("transactions", 1)
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

/// A lock time-out of 100 ms ends every call by then.
const CALL_LIMIT: Duration = Duration::from_secs(1);

/// Waits until `process` has stopped itself.
fn await_stop(process: &mut Process, what: &str) {
    let start = Instant::now();
    while !process.is_stopped() {
        assert!(process.runs(), "{what}: has ended without passing the point");
        assert!(start.elapsed() < PATIENCE, "{what}: does not come to the point");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A database with a log, and small and large values; or with so little that there is no log yet.
fn furnished(lab: &Lab, logged: bool) -> Db {
    let db = Db::create(lab.database()).expect("create");
    for n in 0..1_000u32 {
        db.put(&n.to_le_bytes(), &[7; 100]).expect("put");
    }
    if logged {
        db.put(b"large", &[7; 400_000]).expect("a large put");
        db.checkpoint().expect("checkpoint");
        db.put(b"later", b"x").expect("put");
    }
    db
}

/// A checkpoint looks at the snapshots before it has the writer lock, which has one who is registering a snapshot at that moment. What
/// it sees must not be taken later for all that there are.
#[test]
fn a_snapshot_that_is_just_coming_is_held_by_all() {
    for point in ["snapshot.entry", "snapshot.prepared"] {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let db = furnished(&lab, true);
        let mut holder = lab.worker("hold-snapshots").env("NTDB_STOP", point).spawn();
        await_stop(&mut holder, point);
        let timed = db.with_lock_timeout(Some(Duration::from_millis(50)));
        let refused = timed.checkpoint().expect_err("the lock is not free");
        demand_named(&refused, holder.id(), point);
        holder.signal(libc::SIGCONT);
        assert_eq!(holder.line(), "inside", "{point}");
        for round in 0..20u8 {
            for n in 0..1_000u32 {
                db.put(&n.to_le_bytes(), &[round; 100]).expect("put");
            }
            if round % 5 == 0 {
                db.checkpoint().expect("checkpoint");
            }
        }
        assert_eq!(holder.succeed(PATIENCE).trim(), "unchanged", "{point}");
        lab::demand_clean(&db, point);
    }
}

type Call = fn(&Db) -> Result<(), Error>;

#[test]
fn inside_the_writer_lock_delays_no_call_longer_than_its_time_out() {
    let durable = |db: &Db| db.with_durability(Durability::Durable).put(b"durable", b"x");
    // And whether it must succeed, for it needs no lock.
    let calls: [(&str, Call, bool); 18] = [
        ("get", |db| db.get(b"large").map(drop), true),
        ("iterate live", |db| db.for_each_live(|_, _| ControlFlow::Continue(())).map(drop), true),
        ("iterate", |db| db.for_each(|_, _| ControlFlow::Continue(())).map(drop), false),
        ("snapshot", |db| db.snapshot().map(drop), false),
        ("len", |db| db.len().map(drop), true),
        ("change_counter", |db| db.change_counter().map(drop), true),
        ("put", |db| db.put(b"put", b"x"), false),
        ("durable put", durable, false),
        ("large put", |db| db.put(b"large by another", &[1; 700_000]), false),
        ("append", |db| db.append(b"later", b"x").map(drop), false),
        ("large append", |db| db.append(b"large", &[1; 700_000]).map(drop), false),
        ("delete", |db| db.delete(&1u32.to_le_bytes()).map(drop), false),
        ("lock", |db| db.lock(b"locked").map(drop), false),
        ("sync", |db| db.sync(), false),
        ("checkpoint", |db| db.checkpoint(), false),
        ("check", |db| db.check().map(drop), false),
        ("stat", |db| db.stat().map(drop), false),
        ("clear", |db| db.clear(), false),
    ];
    for (point, logged) in [("writer.locked", false), ("data.armed", true), ("step.disarmed", true)]
    {
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let db = furnished(&lab, logged);
        let mut holder = lab.worker("once").arg("n", 0).env("NTDB_STOP", point).spawn();
        await_stop(&mut holder, point);
        let mut refused = Vec::new();
        for (name, call, must_succeed) in calls {
            let what = format!("{name} beside one stopped at {point}");
            let timed = db.with_lock_timeout(Some(Duration::from_millis(100)));
            let (send, receive) = std::sync::mpsc::channel();
            std::thread::spawn(move || send.send(call(&timed)));
            match receive.recv_timeout(CALL_LIMIT) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    assert!(!must_succeed, "{what}: {error}");
                    demand_named(&error, holder.id(), &what);
                    refused.push(name);
                }
                Err(_) => {
                    holder.signal(libc::SIGCONT);
                    panic!("{what} has not returned after {CALL_LIMIT:?}");
                }
            }
        }
        for name in ["put", "append", "large put", "checkpoint", "clear", "lock", "stat"] {
            assert!(refused.contains(&name), "{name} does not need the lock at {point}?");
        }
        holder.signal(libc::SIGCONT);
        holder.succeed(PATIENCE);
        assert_eq!(db.get(b"once-0").expect("get").as_deref(), Some(&0u64.to_le_bytes()[..]));
        db.checkpoint().expect("checkpoint after SIGCONT");
        lab::demand_clean(&db, &format!("after a stop at {point}"));
        db.clear().expect("clear after SIGCONT");
        db.checkpoint().expect("checkpoint after the clear");
        lab::demand_clean(&db, &format!("after a stop at {point} and a clear"));
    }
}

/// An error for a lock names who holds it.
fn demand_named(error: &Error, holder: u32, what: &str) {
    match error {
        Error::Locked { owner, .. } => assert_eq!(*owner, holder, "{what}: {error}"),
        Error::NotDurable { source, .. } => demand_named(source, holder, what),
        error => panic!("{what}: {error}"),
    }
}

/// Somebody is stopped inside the writer lock while another is in the middle of a long call, which has let it go.
#[test]
fn long_calls_end_at_their_time_out_wherever_they_are() {
    // The call, a point on its way where it does not have the lock, whether there is a log, and whether it succeeds then.
    let scenes = [
        ("checkpoint", "log.start.begin", false, false),
        ("checkpoint", "log.created", false, false),
        ("checkpoint", "meta.synced", false, false),
        ("checkpoint", "checkpoint.begin", true, false),
        ("checkpoint", "flush.locked", true, false),
        ("checkpoint", "switch.begin", true, false),
        ("checkpoint", "switch.old.synced", true, false),
        ("checkpoint", "switch.new.synced", true, false),
        ("checkpoint", "switch.dir.synced", true, false),
        ("checkpoint", "checkpoint.flushed", true, false),
        ("checkpoint", "checkpoint.map.cleared", true, false),
        ("checkpoint", "checkpoint.map.written", true, false),
        ("checkpoint", "publish.begin", true, false),
        ("checkpoint", "publish.image", true, false),
        ("checkpoint", "meta.synced", true, false),
        ("clear", "clear.done", true, true),
        ("sync", "log.created", false, false),
        ("check", "check.frozen", true, true),
        ("large", "large.taken", true, false),
        ("append", "large.taken", true, false),
        ("lock", "key.locked", true, false),
    ];
    for (call, point, logged, succeeds) in scenes {
        let what = format!("{call} at {point}");
        let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
        let db = furnished(&lab, logged);
        let records = db.len().expect("len");
        let worker = lab.worker("timed").arg("call", call).arg("timeout_ms", 100);
        let mut caller = worker.env("NTDB_STOP", point).spawn();
        await_stop(&mut caller, &what);
        let mut holder = lab.worker("once").arg("n", 0).env("NTDB_STOP", "data.armed").spawn();
        await_stop(&mut holder, "data.armed");
        caller.signal(libc::SIGCONT);
        let start = Instant::now();
        while caller.runs() && start.elapsed() < CALL_LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        let hangs = caller.runs();
        if hangs {
            holder.signal(libc::SIGCONT);
        }
        assert!(!hangs, "{what} has not returned after {CALL_LIMIT:?}");
        let said = caller.succeed(PATIENCE);
        if succeeds {
            assert_eq!(said.trim(), "ok", "{what}");
        } else {
            assert_eq!(said.trim(), format!("locked {}", holder.id()), "{what}");
        }
        holder.signal(libc::SIGCONT);
        holder.succeed(PATIENCE);
        let expected = if call == "clear" { 1 } else { records + 1 };
        assert_eq!(db.len().expect("len"), expected, "{what}");
        db.put(b"large by a third", &[3; 500_000]).expect("a large put");
        lab::demand_clean(&db, &format!("after {what}"));
        // Twice, since the first one may find the other log still needed.
        for _ in 0..2 {
            let before = db.stat().expect("stat").checkpoints;
            db.checkpoint().expect("the next checkpoint");
            assert!(db.stat().expect("stat").checkpoints > before, "{what}: none was written");
        }
        assert_eq!(db.stat().expect("stat").log_bytes, 0, "{what}");
        lab::demand_clean(&db, &format!("after {what} and checkpoints"));
        db.close().expect("close");
        let db = Db::open(lab.database()).expect("open at rest");
        assert_eq!(db.len().expect("len"), expected + 1, "{what}: at rest");
    }
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
