//! The engine's crash points: which there are, and which a run has passed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;

/// Every crash point that the engine's source names. A test compares this list with what its
/// workload passes, so that no crash point is left untested unnoticed.
///
/// # Panics
/// If the source cannot be read.
pub fn names_in_source() -> &'static BTreeSet<String> {
    static NAMES: OnceLock<BTreeSet<String>> = OnceLock::new();
    NAMES.get_or_init(read_names_in_source)
}

fn read_names_in_source() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ntdb/src");
    let mut names = BTreeSet::new();
    let mut folders = vec![root];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder);
        for entry in entries.unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.expect("read a source folder").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs")
                && !path.ends_with("storage/failpoint.rs")
            {
                let text = std::fs::read_to_string(&path).expect("read a source file");
                collect(&text, &mut names);
            }
        }
    }
    names
}

fn collect(text: &str, names: &mut BTreeSet<String>) {
    for part in text.split("crash_point(").skip(1) {
        if let Some(quoted) = part.trim_start().strip_prefix('"')
            && let Some((name, _)) = quoted.split_once('"')
            && !name.starts_with("test.")
        {
            names.insert(name.to_string());
        }
    }
}

/// How often each crash point was passed.
pub type Hits = BTreeMap<String, u64>;

/// Starts to count passages in this process.
pub fn count() {
    ntdb::failpoint::count_passages(true);
}

/// Writes what this process has counted to `path`.
///
/// # Errors
/// What the system reports.
pub fn write_hits(path: &Path) -> std::io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    for (name, passages) in ntdb::failpoint::hits() {
        writeln!(file, "{name} {passages}")?;
    }
    Ok(())
}

/// Reads what another process has counted; empty if it has not come to write it.
///
/// # Panics
/// If the file is malformed.
pub fn read_hits(path: &Path) -> Hits {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .map(|line| {
            let (name, passages) = line.split_once(' ').expect("name and number");
            (name.to_string(), passages.parse().expect("a number"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_also_where_the_call_is_wrapped() {
        let mut names = BTreeSet::new();
        collect(
            "crash_point(\"a.one\"); x; crash_point(\n    \"b.two\",\n); crash_point(name)",
            &mut names,
        );
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["a.one", "b.two"]);
    }
}
