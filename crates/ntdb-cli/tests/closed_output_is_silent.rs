//! A reader that goes away (`ntdb dump x | head`) ends the program as it ends other tools: by
//! SIGPIPE, without a message; and the database is none the worse.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use common::Place;

#[test]
fn dump_and_list_die_of_sigpipe_and_leave_the_database_clean() {
    let place = Place::new();
    let lines: String = (0..50_000).map(|number| format!("key{number}\tvalue\n")).collect();
    place.run_with_input(["load", "--create", "db"], lines.as_bytes()).ok();
    for args in [&["dump", "db"][..], &["list", "db"], &["dump", "db", "--json-lines"]] {
        let mut command = place.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        let mut reader = BufReader::new(child.stdout.take().unwrap());
        reader.read_line(&mut first).unwrap();
        assert!(first.contains("key"), "{first}");
        drop(reader);
        let mut messages = String::new();
        child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGPIPE), "{args:?}: {status}");
        assert_eq!(messages, "", "{args:?}");
    }
    assert!(place.run(["check", "db"]).text().starts_with("clean: 50,000 records"));
    assert_eq!(place.names(), ["db"], "it was closed in good order");
}
