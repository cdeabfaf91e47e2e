//! The commands for single records: bytes go in and come out as they are.

mod common;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use common::Place;

#[test]
fn keys_and_values_may_begin_with_a_hyphen() {
    let place = Place::new();
    place.run(["put", "--create", "db", "-abc", "-def"]).ok();
    assert_eq!(place.run(["get", "db", "-abc"]).text(), "-def\n");
    place.run(["put", "db", "k", "--like-an-option"]).ok();
    assert_eq!(place.run(["get", "db", "k", "--raw"]).text(), "--like-an-option");
    place.run(["append", "db", "k", "-5"]).ok();
    place.run(["exists", "db", "-abc"]).ok();
    place.run(["insert", "db", "--", "--hex", "--raw"]).ok();
    assert_eq!(place.run(["get", "db", "--", "--hex"]).text(), "--raw\n");
    place.run(["put", "db", "-ff", "00", "--hex"]).expect_status(2);
    place.run(["delete", "db", "--", "-abc", "--hex"]).ok();
}

#[test]
fn values_come_from_arguments_files_and_standard_input() {
    let place = Place::new();
    place.run(["create", "db"]).ok();
    place.run(["put", "db", "argument", "a value"]).ok();
    place.run_with_input(["put", "db", "input", "-"], b"from\0input\n").ok();
    place.write("file", b"from \xff file");
    place.run(["put", "db", "file", "--file", "file"]).ok();
    place.run(["put", "db", "hex", "00FF"]).ok();
    place.run(["put", "db", "00ff", "cafe", "--hex"]).ok();
    place.run(["put", "db", "-1", "-2"]).ok();
    place.run(["put", "db", "--", "--dashes", "--raw"]).ok();
    place.run(["put", "db", "", ""]).ok();

    assert_eq!(place.run(["get", "db", "argument"]).ok(), b"a value\n");
    assert_eq!(place.run(["get", "db", "argument", "--raw"]).ok(), b"a value");
    assert_eq!(place.run(["get", "db", "input", "--raw"]).ok(), b"from\0input\n");
    assert_eq!(place.run(["get", "db", "file"]).ok(), b"from \xff file\n");
    assert_eq!(place.run(["get", "db", "hex"]).ok(), b"00FF\n");
    assert_eq!(place.run(["get", "db", "00FF", "--hex"]).ok(), b"cafe\n");
    assert_eq!(place.run(["get", "db", "-1"]).ok(), b"-2\n");
    assert_eq!(place.run(["get", "db", "--raw", "--", "--dashes"]).ok(), b"--raw");
    assert_eq!(place.run(["get", "db", ""]).ok(), b"\n");
}

#[test]
fn arguments_need_not_be_text() {
    let place = Place::new();
    let bytes = OsStr::from_bytes(b"\xff\x01");
    let word = OsStr::new;
    place.run([word("put"), word("--create"), word("db"), bytes, bytes]).ok();
    assert_eq!(place.run(["get", "db", "ff01", "--hex"]).ok(), b"ff01\n");
    assert_eq!(
        place.run(["get", "db", "ff01", "--hex", "--raw"]).ok(),
        b"ff01",
        "raw leaves out the newline only"
    );
    assert_eq!(place.run(["list", "db"]).ok(), b"\\xFF\\x01\n");
    let json = place.run([word("get"), word("db"), bytes, word("--json")]).text();
    assert_eq!(json, "{\"key\":{\"base64\":\"/wE=\"},\"value\":{\"base64\":\"/wE=\"}}\n");
}

#[test]
fn insert_append_delete() {
    let place = Place::new();
    place.run(["insert", "--create", "db", "k", "one"]).ok();
    place.run(["insert", "db", "k", "two"]).expect_status(1);
    assert_eq!(place.run(["get", "db", "k"]).text(), "one\n");
    place.run(["append", "db", "k", " more"]).ok();
    place.run_with_input(["append", "db", "fresh", "-"], b"new").ok();
    assert_eq!(place.run(["get", "db", "k"]).text(), "one more\n");
    assert_eq!(place.run(["get", "db", "fresh"]).text(), "new\n");
    place.run(["delete", "db", "k", "fresh"]).ok();
    assert_eq!(place.run(["list", "db"]).text(), "");
}

#[test]
fn json_answers() {
    let place = Place::new();
    place.run(["put", "--create", "db", "k", "v"]).ok();
    assert_eq!(place.run(["get", "db", "k", "--json"]).text(), "{\"key\":\"k\",\"value\":\"v\"}\n");
    let absent = place.run(["get", "db", "x", "--json", "-q"]).expect_status(1);
    assert_eq!(absent.stdout(), "{\"key\":\"x\",\"value\":null}\n");
    assert_eq!(absent.stderr(), "");
    let exists = place.run(["exists", "db", "k", "--json"]).text();
    assert_eq!(exists, "{\"key\":\"k\",\"exists\":true}\n");
    let absent = place.run(["exists", "db", "x", "--json"]).expect_status(1);
    assert_eq!(absent.stdout(), "{\"key\":\"x\",\"exists\":false}\n");
    assert_eq!(place.run(["list", "db", "--json"]).text(), "\"k\"\n");
}

#[test]
fn list_prints_keys_in_the_form_asked_for() {
    let place = Place::new();
    for key in ["apple", "apricot", "two\nlines"] {
        place.run(["put", "--create", "db", key, "v"]).ok();
    }
    let sorted = |args: &[&str], end: u8| {
        let output = place.run(args).ok();
        assert_eq!(output.last(), Some(&end));
        let mut keys: Vec<Vec<u8>> =
            output[..output.len() - 1].split(|&byte| byte == end).map(<[u8]>::to_vec).collect();
        keys.sort();
        keys
    };
    let plain = sorted(&["list", "db"], b'\n');
    assert_eq!(plain, [b"apple".to_vec(), b"apricot".to_vec(), b"two\\nlines".to_vec()]);
    let null = sorted(&["list", "db", "--null"], 0);
    assert_eq!(null, [b"apple".to_vec(), b"apricot".to_vec(), b"two\nlines".to_vec()]);
    let prefixed = sorted(&["list", "db", "--prefix", "ap"], b'\n');
    assert_eq!(prefixed, [b"apple".to_vec(), b"apricot".to_vec()]);
    let hex = sorted(&["list", "db", "--prefix", "6170", "--hex"], b'\n');
    assert_eq!(hex, [b"6170706c65".to_vec(), b"61707269636f74".to_vec()]);
}

#[test]
fn create_stores_what_it_is_told() {
    let place = Place::new();
    place.run(["create", "db", "--page-size", "16K", "--reserve", "20", "--mode", "600"]).ok();
    let stat = place.run(["stat", "db", "--json"]).text();
    assert!(stat.contains("\"page_size\":16384"), "{stat}");
    assert!(stat.contains("\"reserve_percent\":20"), "{stat}");
    assert!(stat.contains("\"records\":0") && stat.contains("\"bytes_per_record\":null"), "{stat}");
    let mode = std::fs::metadata(place.path("db")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let table = place.run(["stat", "db"]).text();
    assert!(table.contains("page size             16,384 bytes\n"), "{table}");
    assert_eq!(place.names(), ["db"], "a database at rest is one file");
}

#[test]
fn durable_writes_are_the_same_writes() {
    let place = Place::new();
    place.run(["put", "--durable", "--create", "db", "k", "v"]).ok();
    place.run_with_input(["load", "--durable", "db"], b"l\tw\n").ok();
    place.run_with_input(["load", "--durable", "db", "--processes", "2"], b"m\tx\n").ok();
    let mut lines: Vec<String> =
        place.run(["dump", "db"]).text().lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["k\tv", "l\tw", "m\tx"]);
}

/// What `set` changes is on disk when it ends, and `stat` tells; a database that is there already takes it.
#[test]
fn settings_of_a_database_can_be_changed() {
    let place = Place::new();
    place.run(["create", "db"]).ok();
    let stat = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&place.run(["stat", "db", "--json"]).ok())
            .map(|all: serde_json::Value| all[name].clone())
            .expect("JSON")
    };
    assert_eq!(stat("reserve_percent"), 0);
    assert_eq!(place.run(["set", "db", "--reserve", "25"]).text(), "reserve 25 %\n");
    assert_eq!(stat("reserve_percent"), 25);
    let set = ["set", "db", "--reserve", "0", "--keep-log", "1M", "--json"];
    assert_eq!(place.run(set).text(), "{\"reserve_percent\":0,\"keep_log_bytes\":1048576}\n");
    assert_eq!(
        place.run(["set", "db", "--keep-log", "1M"]).text(),
        "reserve 0 %, 1048576 bytes of past log kept\n"
    );
    for wrong in
        [&["set", "db"][..], &["set", "db", "--reserve", "91"], &["set", "db", "--reserve", "-1"]]
    {
        place.run(wrong).expect_status(2);
    }
    let run = place.run(["set", "absent", "--reserve", "1"]).expect_status(3);
    assert!(run.stderr().contains("absent"), "{}", run.stderr());

    for i in 0..200 {
        place.run(["put", "db", &format!("k{i}"), "some value"]).ok();
    }
    place.run(["put", "db", "k7", "another"]).ok();
    let fill = stat("fill");
    let pages: u64 =
        fill["pages"].as_array().expect("tenths").iter().filter_map(|n| n.as_u64()).sum();
    assert!(pages >= 1, "{fill}");
    assert_eq!(fill["is_sample"], false);
    assert!(fill["live_percent"].as_f64() > Some(1.0), "{fill}");
    let shown = place.run(["stat", "db"]).text();
    for row in ["reserve", "pages filled", "pages by tenths", "updates"] {
        assert!(shown.contains(&format!("\n{row} ")), "{row}: {shown}");
    }
}
