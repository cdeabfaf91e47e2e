//! A line that cannot be read ends the load with status 3 and is named; what was before it is
//! stored, and nothing behind it is dropped unseen.

mod common;

use common::Place;

#[test]
fn the_line_and_the_fault_are_named() {
    let cases: [(&[&str], &str, &str); 6] = [
        (&[], "a\t1\nb\t2\nc 3\nd\t4\n", "line 3: no separator `\\t`"),
        (&[], "a\t1\nb\t2\nc\t\\z\n", "line 3: `\\z` is no escape"),
        (&["--separator", ";"], "a;1\nb;2\n\n", "line 3: no separator `;`"),
        (
            &["--json-lines"],
            "{\"key\":\"a\",\"value\":\"1\"}\n{\"key\":\"b\",\"value\":\"2\"}\n{\"key\":\"c\"}\n",
            "line 3: column 11: missing field `value`",
        ),
        (
            &["--tdb"],
            "{\nkey(1) = \"a\"\ndata(1) = \"1\"\n}\n{\nkey(1) = \"b\"\ndata(1) = \"2\"\n}\n{\nkey(2) = \"c\"\n",
            "line 10: key(2) is followed by 1 bytes",
        ),
        (
            &["--tdb"],
            "{\nkey(1) = \"a\"\ndata(1) = \"1\"\n}\n{\nkey(1) = \"b\"\ndata(1) = \"2\"\n}\n{\nkey(1) = \"c\"\n",
            "line 10: the input ends inside the block that begins at line 9",
        ),
    ];
    for (options, text, expected) in cases {
        for processes in ["1", "3"] {
            let place = Place::new();
            place.write("text", text);
            let args = ["load", "--create", "db", "text", "--processes", processes];
            let run = place.run([&args, options].concat()).expect_status(3);
            let message = run.stderr();
            assert!(message.contains(&format!("text: {expected}")), "{message}");
            assert_eq!(message.lines().count(), 1, "{message}");
            let mut keys: Vec<String> =
                place.run(["list", "db"]).text().lines().map(str::to_string).collect();
            keys.sort();
            assert_eq!(keys, ["a", "b"], "{options:?}");
        }
    }
}

#[test]
fn standard_input_is_named_as_such() {
    let place = Place::new();
    for processes in ["1", "2"] {
        let args = ["load", "--create", "db", "--processes", processes, "-"];
        let run = place.run_with_input(args, b"nonsense\n").expect_status(3);
        assert!(run.stderr().contains("standard input: line 1"), "{}", run.stderr());
    }
}

#[test]
fn a_last_line_without_newline_counts() {
    let place = Place::new();
    place.run_with_input(["load", "--create", "db"], b"a\t1\nb\t2").ok();
    assert_eq!(place.run(["get", "db", "b"]).text(), "2\n");
}
