//! After a power cut every transaction is there whole or not at all, every one that was promised is
//! there, and none without those whose changes it, or any single write, had seen.

use std::sync::atomic::{AtomicU64, Ordering};

use ntdb::{Db, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::crash;
use ntdb_testkit::lab::{self, Lab, PATIENCE};
use ntdb_testkit::powercut;
use ntdb_testkit::rng::{Rng, mix};
use ntdb_testkit::worker::transactions;

const ACCOUNTS: u64 = 20;

/// A baton handed on by three threads, and a bank, through one power cut or some; returns how often
/// the baton had been handed on by then.
fn cut(seed: u64, points: &[String]) -> u64 {
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let board = Board::create(&lab.board(), 1, 1).expect("board");
    let mut disk = "disk".to_string();
    std::fs::create_dir(lab.dir().join(&disk)).expect("folder");
    let mut boot = 1;
    let mut handed_on = 0;
    loop {
        let dir = lab.dir().join(&disk);
        let images = lab.dir().join(format!("{disk}-images"));
        powercut::begin(&dir, &images).expect("first images");
        let boot_id = format!("{boot:032x}");
        let mut worker = lab
            .worker_on("baton", &dir.join("test.ntdb"))
            .path("board", &lab.board())
            .path("record", &images)
            .arg("accounts", ACCOUNTS)
            .arg("checkpoint", 1 << rng.range(14, 18))
            .arg("seed", rng.next_u64() >> 1)
            .arg("kill_after_us", rng.below(60_000))
            .env("NTDB_TEST_BOOT_ID", &boot_id);
        if rng.percent(40) {
            let point = rng.pick(points).clone();
            worker = worker.env("NTDB_CRASH", format!("{point}:{}", 1 + rng.below(40)));
        }
        let ended = worker.spawn().end(PATIENCE);
        assert_eq!(ended.signal(), Some(libc::SIGKILL), "seed {seed}: {}", ended.stderr);
        let after = format!("{disk}+");
        let story = powercut::cut(&dir, &images, &lab.dir().join(&after), &mut rng).expect("cut");
        disk = after;
        boot += 1;
        if rng.percent(30) {
            continue;
        }
        // Verified on a copy of its own: the next round goes on from what the cut left.
        let look = lab.dir().join("look");
        let _ = std::fs::remove_dir_all(&look);
        std::fs::create_dir(&look).expect("folder");
        for entry in std::fs::read_dir(lab.dir().join(&disk)).expect("list").flatten() {
            std::fs::copy(entry.path(), look.join(entry.file_name())).expect("copy");
        }
        // The shared memory of another boot, and another file's, counts for nothing.
        let _ = std::fs::remove_file(look.join("test.ntdb-shm"));
        let path = look.join("test.ntdb");
        if board.mark(3).load(Ordering::SeqCst) == 0 && !path.exists() {
            return 0;
        }
        let db = Options::new().create(true).open(&path);
        let db = db.unwrap_or_else(|e| panic!("seed {seed}: {story}: open: {e}"));
        match transactions::audit_baton(&db, &board, ACCOUNTS) {
            Ok(n) => handed_on = handed_on.max(n),
            Err(e) => panic!("NTDB_TEST_SEED={seed} NTDB_TEST_SEEDS=8: {story}: {e}"),
        }
        lab::demand_clean(&db, &format!("seed {seed}"));
        if rng.percent(70) {
            return handed_on;
        }
    }
}

#[test]
fn keep_whoever_was_seen_with_whoever_saw_it() {
    let first = lab::seed();
    let seeds = lab::number("NTDB_TEST_SEEDS", 300).div_ceil(8);
    let points: Vec<String> = crash::names_in_source().iter().cloned().collect();
    let all: Vec<_> =
        (0..seeds).map(|n| if n == 0 { first } else { mix(first.wrapping_add(n)) }).collect();
    let handed_on = AtomicU64::new(0);
    lab::for_all(&all, |&seed| {
        handed_on.fetch_add(cut(seed, &points), Ordering::Relaxed);
    });
    let handed_on = handed_on.into_inner();
    println!("{seeds} power cuts; the baton was handed on {handed_on} times");
    assert!(handed_on > seeds * 3, "only {handed_on} steps");
    let db = Db::in_memory().expect("in memory");
    transactions::open_bank(&db, ACCOUNTS).expect("open");
    transactions::audit(ACCOUNTS, |key| db.get(key)).expect("audit");
}
