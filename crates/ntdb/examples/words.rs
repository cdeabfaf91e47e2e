//! An index of words, made by several threads at once: for each word the lines that it stands in.
//!
//!     cargo run --release --example words -- [FILE...]
//!
//! Each file has a thread of its own; unless told otherwise, the files are these examples. The threads share one `Db`, and each appends to the same values as the others. `append` is one
//! indivisible step, so they need no lock.

use std::env;
use std::error::Error;
use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::thread;

use ntdb::Db;

fn main() -> Result<(), Box<dyn Error>> {
    let mut files: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    if files.is_empty() {
        let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
        for entry in fs::read_dir(examples)? {
            files.push(entry?.path());
        }
        // The order is the directory's; the index's should not be.
        files.sort();
    }
    let db = Db::in_memory()?;
    thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let indexers: Vec<_> = files.iter().map(|file| scope.spawn(|| index(&db, file))).collect();
        for indexer in indexers {
            indexer.join().expect("an indexer does not panic")?;
        }
        Ok(())
    })?;

    // The longest lists. `for_each` lends each record for the time of the call; only the lengths
    // are kept.
    let mut words: Vec<(usize, String)> = Vec::new();
    db.for_each(|word, places| {
        let lines = places.iter().filter(|&&byte| byte == b'\n').count();
        words.push((lines, String::from_utf8_lossy(word).into_owned()));
        ControlFlow::Continue(())
    })?;
    words.sort_by(|a, b| b.cmp(a));
    println!("{} words; the ones on most lines:", db.len()?);
    for (lines, word) in words.iter().take(10) {
        println!("{lines:6}  {word}");
    }
    if let Some((_, word)) = words.first() {
        // `view` lends the value without copying it.
        db.view(word.as_bytes(), |places| {
            let places = String::from_utf8_lossy(places);
            println!("`{word}` stands in {}", places.lines().next().unwrap_or("no line"));
        })?;
    }
    Ok(())
}

/// Adds the lines that each word of a file stands in.
fn index(db: &Db, file: &PathBuf) -> Result<(), String> {
    let name = file.display();
    let text = fs::read_to_string(file).map_err(|error| format!("{name}: {error}"))?;
    for (number, line) in text.lines().enumerate() {
        let mut words: Vec<&str> = line.split(|c: char| !c.is_alphanumeric()).collect();
        words.sort_unstable();
        words.dedup();
        for word in words.into_iter().filter(|word| !word.is_empty()) {
            let place = format!("{name}:{}\n", number + 1);
            db.append(word.as_bytes(), place.as_bytes()).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}
