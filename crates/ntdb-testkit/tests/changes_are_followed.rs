//! Following the changes beside processes that write and are killed: what a follower makes of them is what the database holds.
//! Waiting for changes: asleep, awake at once, of no harm to others.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ntdb::{Db, Options, Position};
use ntdb_testkit::board::Board;
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab, Process};
use ntdb_testkit::rng::Rng;
use ntdb_testkit::worker::scripted::{Contents, apply};
use ntdb_testkit::worker::waiting::{NOTICED, WAITING};

fn lab() -> Lab {
    Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"))
}

/// Follows until `stop` says that nothing more is written, and to the end. `pause`: now and then it does nothing for a while,
/// and begins anew at its position.
fn follow(db: &Db, stop: &AtomicBool, pause: bool) -> (Contents, u64) {
    let mut copy = Contents::new();
    let mut changes = db.changes(Position::START).expect("all is kept");
    let mut count = 0u64;
    let mut sequence = None;
    loop {
        let stopping = stop.load(Ordering::SeqCst);
        match changes.wait_next(Some(Duration::from_millis(50))).expect("next") {
            Some(change) => {
                assert!(sequence < Some(change.sequence), "not in order");
                sequence = Some(change.sequence);
                apply(&mut copy, &change).unwrap_or_else(|e| panic!("change {count}: {e}"));
                count += 1;
                if pause && count.is_multiple_of(5_000) {
                    std::thread::sleep(Duration::from_millis(100));
                    let position: Position = changes.position().to_string().parse().expect("text");
                    changes = db.changes(position).expect("go on");
                }
            }
            None if stopping => return (copy, count),
            None => {}
        }
    }
}

fn beside_kills(name: &str, options: &mut Options, kills: u64) {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let mut crowd = Crowd::new(lab(), options, 4, 2, 48, 200, seed)
        .with("durable_one_in", 500)
        .with("reads", 30)
        .with("transactions", 1)
        .with("scans", 0);
    let db = Db::open(crowd.lab.database()).expect("open");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (db, stop) = (&db, &stop);
        let followers = [false, true].map(|pause| scope.spawn(move || follow(db, stop, pause)));
        crowd.start();
        for _ in 0..kills {
            std::thread::sleep(Duration::from_micros(rng.below(40_000)));
            let victim = rng.below(crowd.members.len() as u64) as usize;
            crowd.replace(victim);
        }
        std::thread::sleep(Duration::from_millis(200));
        crowd.stop();
        stop.store(true, Ordering::SeqCst);
        let expected: Contents = db.iter().map(|record| record.expect("read")).collect();
        for follower in followers {
            let (copy, count) = follower.join().expect("a follower without a panic");
            assert!(copy == expected, "{name}: the copy differs after {count} changes");
            println!("{name}: {count} changes followed beside {kills} kills");
            assert!(count > 100, "hardly anything was changed");
        }
    });
    crowd.demand_everything(&db, "at the end");
}

#[test]
fn beside_kills_and_few_checkpoints() {
    beside_kills("kept", Options::new().keep_log(1 << 40), lab::number("NTDB_TEST_KILLS", 100) / 4);
}

#[test]
fn beside_kills_and_many_checkpoints() {
    let kills = lab::number("NTDB_TEST_KILLS", 100) / 4;
    let mut options = Options::new();
    beside_kills("switched", options.checkpoint_log_bytes(256 << 10).keep_log(1 << 40), kills);
}

/// All users are killed again and again; one who comes later follows from where it was.
#[test]
fn through_deaths_of_all() {
    let seed = lab::seed();
    let mut options = Options::new();
    let options = options.checkpoint_log_bytes(256 << 10).keep_log(1 << 40);
    let mut crowd = Crowd::new(lab(), options, 3, 2, 48, 100, seed)
        .with("durable_one_in", 500)
        .with("transactions", 1)
        .with("scans", 0);
    let mut rng = Rng::new(seed);
    let mut copy = Contents::new();
    let mut position = Position::START;
    for round in 0..12 {
        crowd.start();
        std::thread::sleep(Duration::from_millis(100 + rng.below(200)));
        for member in &mut crowd.members {
            member.kill();
        }
        crowd.members.clear();
        if round % 3 == 1 {
            continue;
        }
        let db = Db::open(crowd.lab.database()).expect("recover");
        let mut changes = db.changes(position).expect("nothing is lost without a power cut");
        while let Some(change) = changes.next().expect("next") {
            apply(&mut copy, &change).unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
        position = changes.position();
        let found: Contents = db.iter().map(|record| record.expect("read")).collect();
        assert!(copy == found, "round {round}: the copy differs");
        drop(changes);
        if round % 2 == 0 {
            db.close().expect("close");
        }
    }
    assert!(position.counter() > 0);
}

/// Someone who waits for a key, and has come to it.
fn waiter(lab: &Lab, board: &Board, args: &[(&str, &str)]) -> Process {
    board.mark(WAITING).store(0, Ordering::SeqCst);
    board.mark(NOTICED).store(0, Ordering::SeqCst);
    let mut worker = lab.worker("await-changes").path("board", &lab.board());
    for (name, value) in args {
        worker = worker.arg(name, value);
    }
    let process = worker.spawn();
    let begun = Instant::now();
    while board.mark(WAITING).load(Ordering::SeqCst) == 0 {
        assert!(begun.elapsed() < lab::PATIENCE, "the waiter does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    process
}

/// How long until the waiter has noticed `number` changes.
fn noticed(board: &Board, number: u64) -> Duration {
    let begun = Instant::now();
    while board.mark(NOTICED).load(Ordering::SeqCst) < number {
        assert!(begun.elapsed() < lab::PATIENCE, "change {number} is not noticed");
        std::thread::sleep(Duration::from_micros(100));
    }
    begun.elapsed()
}

#[test]
fn a_sleeper_in_another_process_wakes_at_once() {
    let lab = lab();
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = Db::create(lab.database()).expect("create");
    let process = waiter(&lab, &board, &[("key", "key"), ("n", "30")]);
    let mut longest = Vec::new();
    for round in 1..=30u64 {
        while board.mark(WAITING).load(Ordering::SeqCst) < round {
            std::thread::sleep(Duration::from_millis(1));
        }
        db.put(b"other", b"value").expect("put");
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(board.mark(NOTICED).load(Ordering::SeqCst), round - 1, "woken by another key");
        if round % 2 == 0 {
            db.put(b"key", &round.to_le_bytes()).expect("put");
        } else {
            let mut tx = db.begin().expect("begin");
            tx.put(b"other", b"value").expect("put");
            tx.append(b"key", b"more").expect("append");
            tx.commit_relaxed().expect("commit");
        }
        longest.push(noticed(&board, round));
    }
    process.succeed(lab::PATIENCE);
    longest.sort();
    println!("noticed after {:?} at the median, {:?} at most", longest[15], longest[29]);
    // All but those that the scheduler of a busy machine held up.
    assert!(longest[26] < Duration::from_millis(100), "{longest:?}");
}

/// Calls in the table that `strace -c` wrote.
fn calls(table: &Path) -> u64 {
    let text = std::fs::read_to_string(table).expect("strace wrote its table");
    let line = text.lines().find(|line| line.trim_end().ends_with("total")).expect("a total");
    line.split_whitespace().nth(3).expect("calls").parse().expect("a number")
}

#[test]
fn who_waits_sleeps() {
    let lab = lab();
    let _board = Board::create(&lab.board(), 1, 1).expect("board");
    let _db = Db::create(lab.database()).expect("create");
    let table = lab.dir().join("table");
    let of = |millis: u64| {
        let options = ["-f", "-c", "-o", table.to_str().expect("a path in UTF-8")];
        let worker = lab.worker("await-changes").path("board", &lab.board());
        let said = worker.arg("key", "key").arg("millis", millis).under("strace", &options).run();
        assert_eq!(said.trim(), "0 changes");
        calls(&table)
    };
    let (short, long) = (of(200), of(5_200));
    println!("waiting for 0.2 s takes {short} system calls, for 5.2 s {long}");
    // It looks once a second whether a writer has died.
    assert!(long <= short + 12, "{short} calls in 0.2 s, {long} in 5.2 s");
}

#[test]
fn a_waiter_that_dies_costs_nobody_anything() {
    let lab = lab();
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = Db::create(lab.database()).expect("create");
    for _ in 0..20 {
        let mut process = waiter(&lab, &board, &[("key", "key")]);
        process.kill();
    }
    let table = lab.dir().join("table");
    let of = |n: u64| {
        let options = ["-f", "-c", "-o", table.to_str().expect("a path in UTF-8")];
        lab.worker("puts").arg("n", n).arg("keys", 1_000).under("strace", &options).run();
        calls(&table)
    };
    of(1_000);
    let (once, twice) = (of(20_000), of(40_000));
    assert!(twice < once + 400, "{once} calls for 20,000 puts, {twice} for 40,000");
    // And those who live are woken.
    let process = waiter(&lab, &board, &[("key", "key")]);
    db.put(b"key", b"value").expect("put");
    noticed(&board, 1);
    process.succeed(lab::PATIENCE);
    lab::demand_clean(&db, "after the deaths");
}

/// A writer that dies in the middle of its change, with nobody else writing: who waits finishes it.
#[test]
fn a_change_whose_maker_dies_is_noticed() {
    let lab = lab();
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let _db = Db::create(lab.database()).expect("create");
    for point in ["data.appended", "step.applied", "writer.unlock"] {
        let process = waiter(&lab, &board, &[]);
        let ended = lab
            .worker("puts")
            .arg("n", 1)
            .arg("keys", 1)
            .env("NTDB_CRASH", format!("{point}:1"))
            .spawn()
            .end(lab::PATIENCE);
        assert_eq!(ended.signal(), Some(libc::SIGKILL), "{point}: {}", ended.stderr);
        let late = noticed(&board, 1);
        assert!(late < Duration::from_secs(4), "{point}: {late:?}");
        process.succeed(lab::PATIENCE);
    }
}

/// A waiter that is stopped, asleep or about to, holds no writer up, and has missed nothing when it goes on.
#[test]
fn a_waiter_that_is_stopped_holds_nobody_up_and_misses_nothing() {
    let lab = lab();
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let db = Db::create(lab.database()).expect("create");
    // Who is held up is told so by an error.
    let db = db.with_lock_timeout(Some(Duration::from_secs(10)));
    for round in 0..10u32 {
        let process = waiter(&lab, &board, &[("key", "key")]);
        process.signal(libc::SIGSTOP);
        db.put(b"key", &round.to_le_bytes()).expect("put");
        for n in 0..5_000u32 {
            db.put(&n.to_le_bytes(), &round.to_le_bytes()).expect("put beside the stopped");
        }
        db.transaction(|tx| tx.put(b"other", b"value")).expect("transaction beside the stopped");
        db.checkpoint().expect("checkpoint beside the stopped");
        assert_eq!(board.mark(NOTICED).load(Ordering::SeqCst), 0, "it is not stopped");
        process.signal(libc::SIGCONT);
        noticed(&board, 1);
        process.succeed(lab::PATIENCE);
    }
    lab::demand_clean(&db, "after the stops");
}

/// One follower is stopped for a while, another is killed, while writers go on: they are not held up, and the first one gets
/// everything, of each writer in the order in which it was written.
#[test]
fn followers_that_are_stopped_and_killed() {
    let lab = lab();
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let mut options = Options::new();
    let options = options.create(true).checkpoint_log_bytes(256 << 10).keep_log(1 << 40);
    let db = options.open(lab.database()).expect("create");
    let db = db.with_lock_timeout(Some(Duration::from_secs(10)));
    let (writers, until) = (4u64, 200_000u64);
    let follower = || {
        let worker = lab.worker("follow-writers").path("board", &lab.board());
        worker.arg("n", writers).arg("until", until).spawn()
    };
    let (stopped, mut killed) = (follower(), follower());
    let write = |writer: u64, range: std::ops::RangeInclusive<u64>| {
        for n in range {
            db.put(&writer.to_le_bytes(), &n.to_le_bytes()).expect("put");
        }
    };
    let write = &write;
    std::thread::scope(|scope| {
        let first: Vec<_> =
            (0..writers).map(|w| scope.spawn(move || write(w, 0..=until / 2))).collect();
        noticed(&board, 100);
        stopped.signal(libc::SIGSTOP);
        killed.kill();
        first.into_iter().for_each(|thread| thread.join().expect("a writer without a panic"));
        let second: Vec<_> =
            (0..writers).map(|w| scope.spawn(move || write(w, until / 2 + 1..=until))).collect();
        second.into_iter().for_each(|thread| thread.join().expect("a writer without a panic"));
        stopped.signal(libc::SIGCONT);
    });
    let said = stopped.succeed(lab::PATIENCE);
    assert_eq!(said.trim(), format!("{} changes", writers * (until + 1)));
    lab::demand_clean(&db, "after the followers");
}
