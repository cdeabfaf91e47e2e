//! What a user reads: messages say who and what, and `{:?}` shows nothing of the inside.

use std::time::Duration;

use ntdb::{Db, Durability, Error, Options};

#[test]
fn debug_shows_what_the_user_has_chosen_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let db = Options::new()
        .create(true)
        .durability(Durability::Durable)
        .lock_timeout(Some(Duration::from_secs(2)))
        .open(&path)
        .unwrap();
    let shown = format!(
        "Db {{ path: Some({path:?}), durability: Durable, lock_timeout: Some(2s), read_only: false }}"
    );
    assert_eq!(format!("{db:?}"), shown);
    let guard = db.lock(b"k").unwrap();
    assert_eq!(format!("{guard:?}"), format!("KeyLock {{ db: {shown}, .. }}"));
    drop(guard);
    assert_eq!(format!("{:?}", db.iter_live()), format!("Iter {{ live: {shown}, .. }}"));
    let snapshot = format!("Snapshot {{ path: Some({path:?}), change_counter: 0, len: 0, .. }}");
    assert_eq!(format!("{:?}", db.snapshot().unwrap()), snapshot);
    assert_eq!(format!("{:?}", db.iter()), format!("Iter {{ snapshot: {snapshot}, .. }}"));
    db.close().unwrap();
}

#[test]
fn a_lock_of_another_thread_is_not_laid_to_a_process() {
    let db = Db::in_memory().unwrap().with_lock_timeout(Some(Duration::from_millis(20)));
    let guard = db.lock(b"k").unwrap();
    let error =
        std::thread::scope(|scope| scope.spawn(|| db.put(b"k", b"v").unwrap_err()).join().unwrap());
    assert!(matches!(error, Error::Locked { own: true, .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("another thread of this process holds it"), "{text}");
    assert!(!text.contains(&std::process::id().to_string()), "{text}");
    drop(guard);
}

#[test]
fn waiting_is_told_as_exactly_as_one_wants_to_know_it() {
    let told = |waited| {
        let path = "db".into();
        let error = Error::Locked { path, what: "the lock", owner: 7, own: false, waited };
        error.to_string()
    };
    for (waited, text) in [
        (Duration::from_nanos(3_100), "not free at once"),
        (Duration::from_micros(200_100), "not free within 200 ms"),
        (Duration::from_millis(1_540), "not free within 1.5 s"),
        (Duration::from_millis(12_300), "not free within 12 s"),
    ] {
        let told = told(waited);
        assert!(told.contains(text) && told.contains("held by process 7"), "{told}");
    }
}

#[test]
fn refusals_of_the_system_say_what_to_do() {
    let told = |action, errno| {
        let source = std::io::Error::from_raw_os_error(errno);
        Error::Permission { path: "some/db".into(), action, source }.to_string()
    };
    let open = told("open the database", libc::EACCES);
    assert!(open.starts_with("some/db: permission denied to open the database: uid "), "{open}");
    assert!(open.contains("change its mode") && !open.contains("os error"), "{open}");
    let create = told("create the database", libc::EACCES);
    assert!(create.contains("the directory some may not be written by uid "), "{create}");
    let medium = told("create the database", libc::EROFS);
    assert!(medium.contains("some is on a read-only file system"), "{medium}");
    let marked = told("open the database", libc::EPERM);
    assert!(marked.contains("lsattr"), "{marked}");
}
