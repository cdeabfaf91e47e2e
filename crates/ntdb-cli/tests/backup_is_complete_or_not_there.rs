//! `ntdb backup`: copies beside writers are whole and of one moment; what ends it in the middle leaves no DST.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use common::Place;
use ntdb::{Db, Options};

const ACCOUNTS: u32 = 2_000;

fn accounts(place: &Place) -> Db {
    let db = Db::create(place.path("src.ntdb")).unwrap();
    for account in 0..ACCOUNTS {
        db.put(&account.to_le_bytes(), &1_000i64.to_le_bytes()).unwrap();
    }
    db
}

fn demand_whole(place: &Place, name: &str) {
    let db = Options::new().read_only(true).open(place.path(name)).unwrap();
    assert!(db.check().unwrap().is_clean());
    let sums: Vec<i64> = db
        .iter()
        .map(|record| i64::from_le_bytes(record.unwrap().1[..].try_into().unwrap()))
        .collect();
    let total: i64 = sums.iter().sum();
    assert_eq!((sums.len(), total), (ACCOUNTS as usize, 1_000 * i64::from(ACCOUNTS)));
}

/// Moves sums about until told to stop.
fn transfer(db: &Db, stop: &AtomicBool) {
    let mut n = 1u32;
    while !stop.load(Relaxed) {
        n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let mut tx = db.begin().unwrap();
        for (account, change) in [((n >> 8) % ACCOUNTS, -1), ((n >> 17) % ACCOUNTS, 1)] {
            let key = account.to_le_bytes();
            let sum = tx.view(&key, |v| i64::from_le_bytes(v.try_into().unwrap())).unwrap();
            tx.put(&key, &(sum.unwrap() + change).to_le_bytes()).unwrap();
        }
        tx.commit_relaxed().unwrap();
    }
}

/// Ends the other thread, also when a check has failed.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn beside_writers_it_is_one_moment() {
    let place = Place::new();
    let db = accounts(&place);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| transfer(&db, &stop));
        for _ in 0..8 {
            let text = place.run(["backup", "src.ntdb", "dst.ntdb", "--force"]).text();
            assert!(text.starts_with("copied and verified: 2,000 records, "), "{text}");
            demand_whole(&place, "dst.ntdb");
        }
    });
    drop(db);
    let json = place.run(["backup", "src.ntdb", "other.ntdb", "--json"]).text();
    assert!(json.contains("\"records\":2000,\"file_bytes\":"), "{json}");
    assert_eq!(place.run(["backup", "src.ntdb", "third.ntdb", "--quiet"]).text(), "");
    assert_eq!(place.names(), ["dst.ntdb", "other.ntdb", "src.ntdb", "third.ntdb"]);
}

#[test]
fn what_is_there_is_left_and_said() {
    let place = Place::new();
    accounts(&place).close().unwrap();
    place.run(["backup", "src.ntdb", "dst.ntdb"]).text();
    let refused = place.command(["backup", "src.ntdb", "dst.ntdb"]).output().unwrap();
    let message = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{message}");
    assert!(message.contains("dst.ntdb: already exists") && message.contains("--force"));
    for (args, status) in [
        (["backup", "src.ntdb", "src.ntdb", "--force"], 2),
        (["backup", "absent.ntdb", "x.ntdb", "--force"], 3),
    ] {
        let refused = place.command(args).output().unwrap();
        assert_eq!(refused.status.code(), Some(status), "{args:?}");
    }
    let used = Db::open(place.path("dst.ntdb")).unwrap();
    let refused = place.command(["backup", "src.ntdb", "dst.ntdb", "--force"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(5));
    used.close().unwrap();
    assert_eq!(place.names(), ["dst.ntdb", "src.ntdb"]);
}

/// Killed or ended by a signal at many moments, there is no DST or all of it, the source is whole, and the next backup works and tidies up.
#[test]
fn ended_in_the_middle_it_leaves_no_copy_and_no_harm() {
    let place = Place::new();
    let db = accounts(&place);
    for n in 0..60_000u32 {
        db.put(format!("filler {n}").as_bytes(), &0i64.to_le_bytes()).unwrap();
    }
    // However fast the machine is, most of the moments are within the time that a backup takes.
    let begin = Instant::now();
    place.run(["backup", "src.ntdb", "dst.ntdb"]).text();
    let moment = begin.elapsed() / 36;
    std::fs::remove_file(place.path("dst.ntdb")).unwrap();
    let (mut ended, mut left) = (0, 0);
    for round in 0..30u32 {
        let signal = [libc::SIGKILL, libc::SIGTERM, libc::SIGINT][round as usize % 3];
        let mut command = place.command(["backup", "src.ntdb", "dst.ntdb"]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(moment * (round + 1));
        // SAFETY: a plain system call; the child has not been reaped, so its id is its own.
        unsafe { libc::kill(child.id() as i32, signal) };
        let status = child.wait().unwrap();
        db.put(b"filler 0", &0i64.to_le_bytes()).unwrap();
        if status.success() {
            std::fs::remove_file(place.path("dst.ntdb")).unwrap();
            continue;
        }
        // Before the program has come to catch it, the signal ends it at once.
        assert_eq!(status.signal(), Some(signal), "{status}");
        ended += 1;
        let names = place.names();
        if names.contains(&"dst.ntdb".to_string()) {
            // Between the rename that ends the backup and the end of the program.
            let copy = Options::new().read_only(true).open(place.path("dst.ntdb")).unwrap();
            assert!(copy.check().unwrap().is_clean());
            assert_eq!(copy.len().unwrap(), db.len().unwrap());
            drop(copy);
            std::fs::remove_file(place.path("dst.ntdb")).unwrap();
            continue;
        }
        let partial = names.iter().any(|name| name.starts_with("dst.ntdb-partial-"));
        left += usize::from(partial);
        assert!(!partial || signal == libc::SIGKILL || round < 6, "{names:?} after {signal}");
    }
    println!("{ended} ended in the middle, {left} left a file under another name");
    assert!(ended > 5 && left > 0, "{ended} ended, {left} left something");
    assert_eq!(db.stat().unwrap().snapshots, 0);
    assert!(db.check().unwrap().is_clean());
    place.run(["backup", "src.ntdb", "dst.ntdb"]).text();
    assert_eq!(Db::open(place.path("dst.ntdb")).unwrap().len().unwrap(), db.len().unwrap());
    db.close().unwrap();
    assert_eq!(place.names(), ["dst.ntdb", "src.ntdb"]);
}
