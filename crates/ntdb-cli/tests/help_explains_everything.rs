//! Every command explains itself, with examples; the statuses stand in the help and the manual.

mod common;

use common::Place;

const COMMANDS: [&str; 17] = [
    "create", "get", "put", "insert", "append", "delete", "exists", "list", "load", "dump", "stat",
    "check", "backup", "set", "recover", "torture", "watch",
];

#[test]
fn every_command_has_help_with_an_example() {
    let place = Place::new();
    let all = place.run(["--help"]).text();
    for command in COMMANDS {
        assert!(all.contains(&format!("\n  {command} ")), "{command} is not listed");
        let help = place.run([command, "--help"]).text();
        assert!(help.contains(&format!("Usage: ntdb {command}")), "{help}");
        assert!(help.contains("Example") && help.contains(&format!("ntdb {command} ")), "{help}");
    }
    let help = place.run(["bench", "speed", "--help"]).text();
    assert!(help.contains("ntdb bench speed 1000000"), "{help}");
    assert!(help.contains("What is timed"), "{help}");
    for name in ["tpcb", "mixed", "dbspeed", "scale"] {
        let help = place.run(["bench", name, "--help"]).text();
        assert!(help.contains(&format!("ntdb bench {name}\n")), "{help}");
    }
    let help = place.run(["bench", "grow", "--help"]).text();
    assert!(help.contains("ntdb bench grow 250000 10"), "{help}");
    assert!(
        !all.contains("load-worker")
            && !all.contains("torture-worker")
            && !all.contains("bench-worker"),
        "an internal command is listed"
    );
}

#[test]
fn the_statuses_are_documented_in_both_places() {
    let help = Place::new().run(["--help"]).text();
    let manual = include_str!("../../../docs/cli.md");
    for status in 0..=7 {
        assert!(help.contains(&format!("\n  {status}  ")), "{status} in --help");
        assert!(manual.contains(&format!("\n| {status} | ")), "{status} in docs/cli.md");
    }
    for command in COMMANDS.iter().chain(&[
        "bench speed",
        "bench grow",
        "bench tpcb",
        "bench mixed",
        "bench dbspeed",
        "bench scale",
    ]) {
        assert!(manual.contains(&format!("\n### {command}")), "{command} in docs/cli.md");
    }
}

#[test]
fn the_version_is_the_packages() {
    let text = Place::new().run(["--version"]).text();
    assert_eq!(text, format!("ntdb {}\n", env!("CARGO_PKG_VERSION")));
}
