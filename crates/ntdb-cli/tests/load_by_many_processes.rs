//! A load by several processes stores what a load by one stores, also if some of them die.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::{Place, Random};

const RECORDS: usize = 40_000;

/// Lines of which many share keys: the last one of each counts.
fn text_and_contents(seed: u64) -> (String, BTreeMap<String, String>) {
    let mut random = Random(seed);
    let mut text = String::new();
    let mut contents = BTreeMap::new();
    for number in 0..RECORDS {
        let key = format!("key{}", random.below(RECORDS as u64 / 2));
        let value = format!("{number} {}", "v".repeat(random.below(60) as usize));
        text += &format!("{key}\t{value}\n");
        contents.insert(key, value);
    }
    (text, contents)
}

#[track_caller]
fn assert_contents(place: &Place, name: &str, expected: &BTreeMap<String, String>) {
    let dump = place.run(["dump", name]).text();
    let found: BTreeMap<String, String> = dump
        .lines()
        .map(|line| line.split_once('\t').expect("a separator"))
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect();
    assert_eq!(found.len(), dump.lines().count(), "no key is dumped twice");
    assert!(found == *expected, "{} records instead of {}", found.len(), expected.len());
    place.run(["check", name]).expect_status(0);
}

#[test]
fn the_last_of_equal_keys_stays_whatever_the_number_of_processes() {
    let (text, contents) = text_and_contents(2);
    let place = Place::new();
    place.write("text", &text);
    for processes in ["1", "2", "5"] {
        let name = format!("db{processes}");
        let args = ["load", "--create", &name, "text", "--processes", processes];
        let run = place.run(args).expect_status(0);
        assert!(run.stderr().contains("stored 40,000 records"), "{}", run.stderr());
        assert_contents(&place, &name, &contents);
    }
}

#[test]
fn if_absent_keeps_the_first_and_counts_the_others() {
    let (text, last) = text_and_contents(3);
    let mut first = BTreeMap::new();
    for line in text.lines() {
        let (key, value) = line.split_once('\t').unwrap();
        first.entry(key.to_string()).or_insert_with(|| value.to_string());
    }
    assert_ne!(first, last);
    let kept = RECORDS - first.len();
    let place = Place::new();
    for processes in ["1", "4"] {
        let name = format!("db{processes}");
        let args = ["load", "--create", &name, "--if-absent", "--processes", processes];
        let run = place.run_with_input(args, text.as_bytes()).expect_status(0);
        let message = run.stderr().replace(',', "");
        assert!(message.contains(&format!("stored {} records", first.len())), "{message}");
        assert!(message.contains(&format!("kept {kept} ")), "{message}");
        assert_contents(&place, &name, &first);
    }
}

#[test]
fn a_killed_worker_is_replaced_and_nothing_is_lost() {
    let (text, contents) = text_and_contents(4);
    let place = Place::new();
    place.write("text", &text);
    let args = ["load", "--create", "db", "text", "--processes", "4", "--kill-one-worker"];
    let run = place.run(args).expect_status(0);
    let message = run.stderr();
    assert!(message.contains("was killed by signal 9"), "{message}");
    assert!(message.contains("goes on"), "{message}");
    assert!(message.contains("stored 40,000 records"), "{message}");
    assert_contents(&place, "db", &contents);
    assert_eq!(place.names(), ["db", "text"], "nothing is left behind");
}

/// Starts a load of `text` that cannot finish while the caller holds the key `held`, the first in
/// the text.
fn start_held_load(place: &Place, text: &str, processes: &str) -> Child {
    place.write("text", format!("held\tvalue\n{text}"));
    let mut command = place.command(["load", "db", "text", "--processes", processes]);
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// What a load says until its end, and whether it has succeeded.
fn finish(mut load: Child) -> (bool, String) {
    let mut messages = String::new();
    load.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
    (load.wait().unwrap().success(), messages)
}

#[test]
fn workers_killed_from_outside_are_replaced_too() {
    let (text, mut contents) = text_and_contents(5);
    contents.insert("held".into(), "value".into());
    let place = Place::new();
    let db = ntdb::Db::create(place.path("db")).unwrap();
    let guard = db.lock(b"held").unwrap();
    let load = start_held_load(&place, &text, "3");
    let mut killed = BTreeSet::new();
    // One of the three waits for the key, so there is somebody to find; but no share may lose three
    // workers in a row.
    while killed.is_empty() {
        killed.extend(workers_of(load.id()));
        killed.iter().copied().for_each(kill);
        thread::sleep(Duration::from_millis(3));
    }
    drop(guard);
    let (success, messages) = finish(load);
    assert!(success, "{messages}");
    assert!(messages.contains("was killed by signal 9"), "{messages}");
    assert!(messages.contains("goes on"), "{messages}");
    db.close().unwrap();
    assert_contents(&place, "db", &contents);
}

#[test]
fn a_share_whose_workers_all_die_is_given_up() {
    let place = Place::new();
    let db = ntdb::Db::create(place.path("db")).unwrap();
    let guard = db.lock(b"held").unwrap();
    let load = start_held_load(&place, "a\t1\nb\t2\n", "2");
    let id = load.id();
    let ended = Arc::new(AtomicBool::new(false));
    let killer = thread::spawn({
        let ended = Arc::clone(&ended);
        move || {
            while !ended.load(Ordering::Relaxed) {
                workers_of(id).into_iter().for_each(kill);
                thread::sleep(Duration::from_millis(20));
            }
        }
    });
    let (success, messages) = finish(load);
    ended.store(true, Ordering::Relaxed);
    killer.join().unwrap();
    drop(guard);
    assert!(!success);
    assert!(messages.contains("giving up"), "{messages}");
    assert!(db.check().unwrap().is_clean());
    db.close().unwrap();
}

#[test]
fn workers_that_fail_alike_give_one_message() {
    let (text, _) = text_and_contents(6);
    let place = Place::new();
    place.write("text", &text);
    let args = ["load", "--create", "db", "text", "--processes", "3", "--separator", "no such"];
    let run = place.run(args).expect_status(3);
    assert!(run.stderr().contains("text: line 1: no separator"), "{}", run.stderr());
    assert_eq!(run.stderr().lines().count(), 1, "{}", run.stderr());
}

fn kill(process: i32) {
    // SAFETY: kill takes plain integers; the process is one that /proc has just named as a child of
    // the load.
    unsafe { libc::kill(process, libc::SIGKILL) };
}

/// The processes that any thread of process `id` has started.
fn workers_of(id: u32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{id}/task")) else { return Vec::new() };
    threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok())
        .flat_map(|children| {
            children.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<i32>>()
        })
        .collect()
}
