//! `watch` prints what happens as it happens, and ends as it should.

mod common;

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use common::Place;

/// A `watch` that is running.
struct Watch {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Watch {
    fn start(place: &Place, args: &[&str]) -> Watch {
        let mut command = place.command(["watch", "db"].iter().chain(args));
        let mut child = command.stdout(Stdio::piped()).spawn().expect("start");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Watch { child, lines }
    }

    /// The next line, without the position.
    fn line(&mut self) -> String {
        let line = self.lines.next().expect("a line").expect("text");
        line.split_once('\t').expect("a position").1.to_string()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// The exit status, or 128 and the signal.
    fn end(mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        drop(self.lines);
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                break status;
            }
            if begun.elapsed() > Duration::from_secs(20) {
                let _ = self.child.kill();
                panic!("watch does not end");
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        status.code().unwrap_or_else(|| 128 + status.signal().expect("a signal"))
    }
}

/// Waits until a watch has come to print changes from now on: it prints one that is made again and again.
fn until_it_watches(place: &Place, watch: &mut Watch, key: &str) {
    // The first change that it sees must be one of these.
    let seen = &std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !seen.load(std::sync::atomic::Ordering::Relaxed) {
                place.run(["put", "db", key, "again"]).ok();
            }
        });
        assert_eq!(watch.line(), format!("put\t{key}\tagain"));
        seen.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn what_happens_is_printed_at_once() {
    let place = Place::new();
    place.run(["create", "db"]).ok();
    let mut watch = Watch::start(&place, &[]);
    until_it_watches(&place, &mut watch, "begun");
    place.run_with_input(["put", "db", "a\tkey", "-"], b"va\nlue\xff").ok();
    place.run(["append", "db", "a\tkey", "+"]).ok();
    place.run(["delete", "db", "a\tkey"]).ok();
    // Those that were still on their way.
    let mut line = watch.line();
    while line == "put\tbegun\tagain" {
        line = watch.line();
    }
    assert_eq!(line, r"put	a\tkey	va\nlue\xFF");
    assert_eq!(watch.line(), r"append	a\tkey	+");
    assert_eq!(watch.line(), r"delete	a\tkey");
    let begun = Instant::now();
    watch.signal(libc::SIGINT);
    assert_eq!(watch.end(), 128 + libc::SIGINT);
    assert!(begun.elapsed() < Duration::from_millis(700), "{:?}", begun.elapsed());
    // It was the last to use the database, and has closed it.
    assert_eq!(place.names(), ["db"]);
}

#[test]
fn filters_counts_and_formats() {
    let place = Place::new();
    place.run(["create", "db"]).ok();
    // Somebody keeps the database open, so that its log stays.
    let mut keeper = Watch::start(&place, &[]);
    until_it_watches(&place, &mut keeper, "first");
    for (key, value) in [("job:1", "a"), ("other", "b"), ("job:2", "c"), ("job:1", "d")] {
        place.run(["put", "db", key, value]).ok();
    }
    let text = |args: &[&str]| {
        let base = ["watch", "db", "--from", "0", "--timeout", "0"];
        let text = place.run(base.iter().chain(args)).text();
        let lines = text.lines().map(|line| line.split_once('\t').expect("a position").1.into());
        lines.collect::<Vec<String>>()
    };
    assert_eq!(text(&["job:1"]), ["put\tjob:1\ta", "put\tjob:1\td"]);
    assert_eq!(text(&["--prefix", "job:"]), ["put\tjob:1\ta", "put\tjob:2\tc", "put\tjob:1\td"]);
    assert_eq!(text(&["--prefix", "job:", "--count", "1"]), ["put\tjob:1\ta"]);
    assert_eq!(text(&["6a6f623a32", "--hex"]), ["put\t6a6f623a32\t63"]);
    let json = place.run(["watch", "db", "--from", "0", "--json", "--count", "1", "job:2"]).text();
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["transaction"], false);
    assert_eq!(
        json["operations"].to_string(),
        r#"[{"key":"job:2","operation":"put","value":"c"}]"#
    );
    // On from there.
    let next = json["next"].as_str().expect("a position");
    let text = place.run(["watch", "db", "--from", next, "--count", "1"]).text();
    assert!(text.ends_with("\tput\tjob:1\td\n"), "{text}");
    keeper.signal(libc::SIGTERM);
    assert_eq!(keeper.end(), 128 + libc::SIGTERM);
}

#[test]
fn statuses() {
    let place = Place::new();
    place.run(["create", "db"]).ok();
    let begun = Instant::now();
    place.run(["watch", "db", "--timeout", "0.2"]).expect_status(0);
    place.run(["watch", "db", "key", "--timeout", "0.2", "--count", "1"]).expect_status(1);
    assert!(begun.elapsed() >= Duration::from_millis(400));
    place.run(["watch", "db", "--count", "0"]).expect_status(0);
    place.run(["watch", "db", "--from", "nowhere"]).expect_status(2);
    place.run(["watch", "db", "--from", "17"]).expect_status(3);
    place.run(["watch", "db", "key", "--prefix", "k"]).expect_status(2);
    place.run(["watch", "missing"]).expect_status(3);
    place.run(["put", "db", "key", "value"]).ok();
    let gone = place.run(["watch", "db", "--from", "0"]).expect_status(3);
    assert!(gone.stderr().contains("--keep-log"), "{}", gone.stderr());
    // A reader that goes away.
    let mut watch = Watch::start(&place, &[]);
    until_it_watches(&place, &mut watch, "x");
    let Watch { mut child, lines } = watch;
    drop(lines);
    place.run(["put", "db", "key", "value"]).ok();
    let status = child.wait().expect("wait");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGPIPE));
}
