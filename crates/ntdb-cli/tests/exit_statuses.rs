//! The exit statuses that `ntdb --help` and docs/cli.md promise; with each error, a message that
//! names the file.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use common::{Place, finish};

#[test]
fn zero_and_one_answer_the_question() {
    let place = Place::new();
    place.run(["create", "db"]).expect_status(0);
    let again = place.run(["create", "db"]).expect_status(1);
    assert!(again.stderr().contains("db: already exists"), "{}", again.stderr());
    for absent in [&["get", "db", "k"][..], &["exists", "db", "k"], &["delete", "db", "k"]] {
        let run = place.run(absent).expect_status(1);
        let message = if absent[0] == "exists" { "" } else { "ntdb: db: key `k` not found\n" };
        assert_eq!(run.stderr(), message);
        assert_eq!(run.stdout(), "");
        let quiet = place.run([absent, &["--quiet"]].concat()).expect_status(1);
        assert_eq!(quiet.stderr(), "");
    }
    place.run(["insert", "db", "k", "v"]).expect_status(0);
    let taken = place.run(["insert", "db", "k", "w"]).expect_status(1);
    assert!(taken.stderr().contains("key `k` is already there"), "{}", taken.stderr());
    for present in [&["get", "db", "k"][..], &["exists", "db", "k"], &["delete", "db", "k"]] {
        place.run(present).expect_status(0);
    }
    place.run(["put", "db", "a", "1"]).expect_status(0);
    let some = place.run(["delete", "db", "x", "a", "y"]).expect_status(1);
    assert!(some.stderr().contains("`x`") && some.stderr().contains("`y`"), "{}", some.stderr());
    place.run(["exists", "db", "a"]).expect_status(1);
}

#[test]
fn two_is_wrong_usage() {
    let place = Place::new();
    place.run(["create", "db"]).ok();
    let wrong: [&[&str]; 17] = [
        &[],
        &["frobnicate"],
        &["get", "db"],
        &["put", "db", "k"],
        &["put", "db", "k", "v", "--file", "f"],
        &["get", "db", "0", "--hex"],
        &["put", "db", "6b", "0x1", "--hex"],
        &["create", "new", "--page-size", "5000"],
        &["create", "new", "--reserve", "95"],
        &["create", "new", "--mode", "888"],
        &["load", "db", "--processes", "0"],
        &["load", "db", "--separator", ""],
        &["load", "db", "--json-lines", "--tdb"],
        &["dump", "db", "--separator", "\\"],
        &["bench", "speed", "0"],
        &["bench", "speed", "--internal", "--durable"],
        &["get", "db", "k", "--lock-timeout", "-1"],
    ];
    for args in wrong {
        let run = place.run(args).expect_status(2);
        assert!(!run.stderr().is_empty(), "{args:?}");
    }
    assert_eq!(place.names(), ["db"], "wrong usage makes nothing");
}

#[test]
fn usage_is_explained_in_the_users_words() {
    let place = Place::new();
    let says = |args: &[&str], text: &str| {
        let message = place.run(args).expect_status(2).stderr();
        assert!(message.contains(text), "{args:?}: {message}");
        message
    };
    says(&["bench", "speed", "0"], "not a number from 1 to 1000000000");
    says(&["load", "db", "--processes", "257"], "not a number from 1 to 256");
    says(&["create", "db", "--reserve", "91"], "not a number from 0 to 90");
    says(&["get", "db", "k", "--lock-timeout", "-1"], "not a number of seconds, 0 or more");
    let message = says(&["-q"], "load, dump");
    assert!(!message.contains("load-worker"), "{message}");
    let message = says(&["stat", "db", "--hex"], "unexpected argument '--hex'");
    assert!(!message.contains("tip") && !message.contains("stat --help"), "{message}");
    says(&["stat", "db", "--jsn"], "similar argument exists: '--json'");
}

#[test]
fn what_cannot_be_made_or_recovered_is_not_called_a_missing_database() {
    let place = Place::new();
    let run = place.run(["create", "/proc/x"]).expect_status(3);
    assert!(run.stderr().contains("/proc/x: cannot create a database here"), "{}", run.stderr());
    let run = place.run(["recover", "missing", "new"]).expect_status(3);
    assert!(run.stderr().contains("missing: no such file: nothing to recover"), "{}", run.stderr());
    assert!(!run.stderr().contains("ntdb create"), "{}", run.stderr());
    assert_eq!(place.names(), [""; 0]);
}

#[test]
fn three_is_output_that_nobody_can_get() {
    let place = Place::new();
    place.run(["put", "--create", "db", "k", "v"]).ok();
    let closed = |args: &str| {
        let mut shell = Command::new("bash");
        shell.current_dir(place.path(""));
        shell.args(["-c", &format!("exec \"$0\" {args} >&-"), env!("CARGO_BIN_EXE_ntdb")]);
        finish(shell, b"")
    };
    for args in ["dump db", "get db k", "list db", "stat db", "check db", "exists db k --json"] {
        let run = closed(args).expect_status(3);
        assert!(run.stderr().contains("standard output: cannot write"), "{}", run.stderr());
    }
    for args in ["exists db k", "put db k w", "check db --quiet"] {
        closed(args).expect_status(0);
    }
    assert_eq!(place.run(["get", "db", "k"]).text(), "w\n", "nothing was written into the file");
}

#[test]
fn three_is_any_other_error() {
    let place = Place::new();
    let commands: [&[&str]; 9] = [
        &["get", "nowhere", "k"],
        &["put", "nowhere", "k", "v"],
        &["delete", "nowhere", "k"],
        &["exists", "nowhere", "k"],
        &["list", "nowhere"],
        &["load", "nowhere"],
        &["dump", "nowhere"],
        &["stat", "nowhere"],
        &["check", "nowhere"],
    ];
    for args in commands {
        let run = place.run(args).expect_status(3);
        assert!(run.stderr().contains("nowhere: no such database"), "{}", run.stderr());
    }
    assert_eq!(place.names(), [""; 0], "no command makes a database unasked");
    place.run(["create", "db"]).ok();
    let run = place.run(["load", "db", "no-input"]).expect_status(3);
    assert!(run.stderr().contains("no-input: cannot open"), "{}", run.stderr());
    let run = place.run(["put", "db", "k", "--file", "no-input"]).expect_status(3);
    assert!(run.stderr().contains("no-input: cannot read"), "{}", run.stderr());
}

#[test]
fn four_is_a_file_that_is_no_whole_database() {
    let place = Place::new();
    place.write("text", "this is no database, and it is left as it is\n".repeat(1000));
    for args in
        [&["get", "text", "k"][..], &["stat", "text"], &["check", "text"], &["dump", "text"]]
    {
        let run = place.run(args).expect_status(4);
        assert!(run.stderr().contains("text: "), "{}", run.stderr());
    }
    assert_eq!(place.names(), ["text"]);
}

#[test]
fn four_is_what_check_says_of_damage() {
    let place = Place::new();
    let lines: String = (0..2000).map(|number| format!("key{number}\tvalue{number}\n")).collect();
    place.run_with_input(["load", "--create", "db"], lines.as_bytes()).ok();
    assert!(place.run(["check", "db"]).text().starts_with("clean: 2,000 records"));
    // The letters of the values stand in the file as they are; damage them everywhere.
    let mut bytes = fs::read(place.path("db")).unwrap();
    let mut damaged = 0;
    for at in 0..bytes.len() - 5 {
        if &bytes[at..at + 5] == b"value" {
            bytes[at] ^= 0x20;
            damaged += 1;
        }
    }
    assert!(damaged >= 2000, "{damaged}");
    fs::write(place.path("db"), bytes).unwrap();
    let run = place.run(["check", "db"]).expect_status(4);
    assert!(!run.stdout().is_empty());
    assert!(run.stderr().contains("db: damaged"), "{}", run.stderr());
    let run = place.run(["check", "db", "--json"]).expect_status(4);
    assert!(run.stdout().starts_with(r#"{"clean":false,"#), "{}", run.stdout());
}

#[test]
fn damage_to_a_spare_copy_needs_no_backup() {
    let place = Place::new();
    place.run(["put", "--create", "db", "k", "v"]).ok();
    let whole = fs::read(place.path("db")).unwrap();
    // The header, its copy behind the two meta pages, and one of those.
    for at in [16, 3 * 4096 + 16, 2 * 4096 + 64] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        fs::write(place.path("db"), bytes).unwrap();
        let run = place.run(["check", "db", "--read-only", "--json"]).expect_status(4);
        assert!(run.stdout().contains(r#""spare_problems":1,"#), "{at}: {}", run.stdout());
        let run = place.run(["check", "db"]).expect_status(4);
        assert_eq!(run.stdout().lines().count(), 1, "{at}: {}", run.stdout());
        assert!(run.stdout().starts_with("page "), "{at}: {}", run.stdout());
        let message = run.stderr();
        assert!(message.contains("nothing is lost") && !message.contains("backup"), "{message}");
        assert!(place.run(["check", "db"]).text().starts_with("clean: "), "{at}: closing mends it");
    }
}

#[test]
fn one_damage_is_one_line_of_check() {
    let place = Place::new();
    // Long values have pages of their own: to damage one is to damage nothing else.
    let lines: String = (0..300)
        .map(|number| format!("key{number}\t{}\n", format!("<{number:03}>").repeat(2000)))
        .collect();
    place.run_with_input(["load", "--create", "db"], lines.as_bytes()).ok();
    let mut bytes = fs::read(place.path("db")).unwrap();
    let at = bytes.windows(5).position(|window| window == b"<123>").unwrap();
    bytes[at] ^= 1;
    fs::write(place.path("db"), &bytes).unwrap();
    let run = place.run(["check", "db"]).expect_status(4);
    let told = run.stdout();
    let (first, rest) = told.split_once('\n').unwrap();
    assert!(first.starts_with("page ") && first.contains("value checksum"), "{first}");
    assert_eq!(rest, "", "what is whole is not called damaged");
}

#[test]
fn five_is_a_lock_that_is_not_free_in_time() {
    let place = Place::new();
    let db = ntdb::Db::create(place.path("db")).unwrap();
    db.put(b"k", b"v").unwrap();
    let guard = db.lock(b"k").unwrap();
    let run = place.run(["put", "db", "k", "w", "--lock-timeout", "0.3"]).expect_status(5);
    assert!(run.stderr().contains(&std::process::id().to_string()), "{}", run.stderr());
    assert!(run.stderr().contains("--lock-timeout"), "{}", run.stderr());
    // Who only reads does not wait.
    assert_eq!(place.run(["get", "db", "k", "--lock-timeout", "0.3"]).text(), "v\n");
    assert!(run.stderr().contains("not free within 3"), "{}", run.stderr());
    drop(guard);
    place.run(["put", "db", "k", "w", "--lock-timeout", "0.3"]).expect_status(0);
    let run = place.run(["recover", "db", "new"]).expect_status(5);
    let by = format!("db: in use by process {};", std::process::id());
    assert!(run.stderr().contains(&by), "{}", run.stderr());
    db.close().unwrap();
}

#[test]
fn six_is_no_room() {
    let place = Place::new();
    place.run(["put", "--create", "db", "k", "v"]).ok();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = place.command(["dump", "db"]);
    command.stdout(Stdio::from(full)).stderr(Stdio::piped());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(6));
    assert!(String::from_utf8_lossy(&output.stderr).contains("standard output"));

    // A limit on the size of files, 8 MiB in the shell's unit, and 32 MiB to store.
    place.write("large", vec![b'x'; 32 << 20]);
    let mut limited = Command::new("bash");
    limited.current_dir(place.path("")).args([
        "-c",
        "ulimit -f 8192; exec \"$0\" put db large --file large",
        env!("CARGO_BIN_EXE_ntdb"),
    ]);
    let run = finish(limited, b"").expect_status(6);
    assert!(run.stderr().contains("db"), "{}", run.stderr());
    assert_eq!(place.run(["get", "db", "k"]).text(), "v\n", "it is as it was");
    place.run(["exists", "db", "large"]).expect_status(1);
    place.run(["put", "db", "large", "--file", "large"]).expect_status(0);
    assert!(place.run(["check", "db"]).text().starts_with("clean: 2 records"));
}

/// Runs the program as a user who does not own the files: as `nobody` if the tests run as root,
/// whom no permission stops.
fn as_somebody_else(place: &Place, args: &[&str]) -> common::Run {
    // SAFETY: geteuid only returns a number.
    let root = unsafe { libc::geteuid() } == 0;
    let program = place.path("program");
    if !program.exists() {
        fs::copy(env!("CARGO_BIN_EXE_ntdb"), &program).unwrap();
        fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new(program);
    command.current_dir(place.path("")).args(args);
    if root {
        command.uid(65534).gid(65534);
    }
    finish(command, b"")
}

#[test]
fn seven_is_permission_denied() {
    let place = Place::new();
    place.run(["put", "--create", "db", "k", "v"]).ok();
    fs::set_permissions(place.path("db"), fs::Permissions::from_mode(0o000)).unwrap();
    for args in [&["get", "db", "k"][..], &["put", "db", "k", "w"], &["check", "db"]] {
        let run = as_somebody_else(&place, args).expect_status(7);
        let message = run.stderr();
        assert!(message.contains("db: permission denied to open the database: uid "), "{message}");
        assert!(message.contains("change its mode") && !message.contains("os error"), "{message}");
    }
    // Who owns it may not either.
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o555)).unwrap();
    let run = as_somebody_else(&place, &["create", "new"]).expect_status(7);
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let message = run.stderr();
    assert!(message.contains("the directory . may not be written by uid "), "{message}");
    fs::set_permissions(place.path("db"), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(place.run(["get", "db", "k"]).text(), "v\n");
}

#[test]
fn who_may_only_read_can_read_without_asking_for_it() {
    let place = Place::new();
    place.run(["put", "--create", "db", "k", "v"]).ok();
    fs::set_permissions(place.path("db"), fs::Permissions::from_mode(0o444)).unwrap();
    for option in [None, Some("--read-only")] {
        let with = |args: &[&'static str]| [args, option.as_slice()].concat();
        assert_eq!(as_somebody_else(&place, &with(&["get", "db", "k"])).text(), "v\n");
        assert_eq!(as_somebody_else(&place, &with(&["dump", "db"])).text(), "k\tv\n");
        as_somebody_else(&place, &with(&["check", "db"])).expect_status(0);
    }
    as_somebody_else(&place, &["put", "db", "k", "w"]).expect_status(7);
}
