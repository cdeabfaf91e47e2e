//! Fork in any state; the child goes on using its `Db`, and so does the parent.

use std::time::{Duration, Instant};

use ntdb::Db;
use ntdb_testkit::lab::{self, Lab};

fn play(scene: &str) -> Lab {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    // Once as the only user and once beside another process.
    lab.worker("fork").arg("create", true).arg("scene", scene).run();
    let db = Db::create(lab.database()).expect("open");
    lab::demand_clean(&db, scene);
    db.clear().expect("clear");
    lab.worker("fork").arg("scene", scene).run();
    lab::demand_clean(&db, scene);
    drop(db);
    lab
}

#[test]
fn parent_and_child_both_go_on() {
    play("plain");
}

#[test]
fn the_parent_dies_and_the_child_lives() {
    let lab = play("parent dies");
    let db = Db::open(lab.database()).expect("open");
    let start = Instant::now();
    while db.get(b"orphan-done").expect("get").is_none() {
        assert!(start.elapsed() < Duration::from_secs(30), "the orphan never finished");
        std::thread::sleep(Duration::from_millis(5));
    }
    for i in 0..300u64 {
        let held = db.get(format!("orphan-{i}").as_bytes()).expect("get");
        assert_eq!(held, Some(i.to_le_bytes().to_vec()));
    }
    lab::demand_clean(&db, "after the orphan");
}

#[test]
fn children_die_and_the_parent_lives() {
    play("child killed");
}

#[test]
fn while_the_parent_holds_a_key_lock() {
    play("under a key lock");
}

#[test]
fn inside_a_view() {
    play("in a view");
}

#[test]
fn inside_an_iteration() {
    play("in an iteration");
}

#[test]
fn while_a_snapshot_is_held() {
    play("with a snapshot");
}

#[test]
fn beside_threads_that_write() {
    play("beside writing threads");
}

#[test]
fn children_of_children() {
    play("generations");
}
