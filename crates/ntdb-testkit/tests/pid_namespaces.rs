//! Processes in different pid namespaces, where each is process 1, share a database safely: who
//! lives and who died is never judged by a process id. Needs the right to make namespaces (root).

use std::time::Duration;

use ntdb::{Db, Options};
use ntdb_testkit::crowd::Crowd;
use ntdb_testkit::lab::{self, Lab};
use ntdb_testkit::rng::Rng;

const UNSHARE: &[&str] = &["--pid", "--fork", "--kill-child"];

#[test]
fn several_first_processes_share_and_die_safely() {
    let seed = lab::seed();
    let mut rng = Rng::new(seed);
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let mut crowd = Crowd::new(lab, &mut Options::new(), 4, 2, 32, 1_000, seed)
        .under("unshare", UNSHARE)
        .with("transactions", 1)
        .with("scans", 0)
        .with("reads", 30);
    let db = Db::open(crowd.lab.database()).expect("open");
    crowd.start();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        db.stat().expect("stat").processes.iter().filter(|&&id| id == 1).count(),
        4,
        "each is process 1 of its own namespace"
    );
    let kills = lab::number("NTDB_TEST_KILLS", 200).div_ceil(4);
    for n in 0..kills {
        std::thread::sleep(Duration::from_micros(rng.below(20_000)));
        crowd.replace(rng.range(1, 3) as usize);
        if n % 10 == 0 {
            crowd.demand_all_running();
            lab::demand_clean(&db, "meanwhile");
        }
    }
    std::thread::sleep(Duration::from_millis(300));
    crowd.stop();
    crowd.demand_everything(&db, "at the end");
    let longest = crowd.longest_wait_of(0);
    println!("{kills} kills across namespaces, the survivor's longest wait {longest:?}");
    assert!(longest < Duration::from_secs(1), "the survivor waited {longest:?}");
}
