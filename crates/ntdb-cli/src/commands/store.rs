//! `ntdb put`, `ntdb insert`, `ntdb append`: one key, one value.

use std::fs;
use std::io::{self, Read};

use ntdb::Db;

use crate::bytes;
use crate::cli::{GlobalOptions, StoreArgs};
use crate::failure::Failure;
use crate::opening;

/// Stores a value.
pub fn put(global: &GlobalOptions, args: &StoreArgs) -> Result<(), Failure> {
    with_record(global, args, |db, key, value| Ok(db.put(key, value)?))
}

/// Stores a value under a key that is not there yet.
pub fn insert(global: &GlobalOptions, args: &StoreArgs) -> Result<(), Failure> {
    with_record(global, args, |db, key, value| {
        if db.insert(key, value)? {
            return Ok(());
        }
        let name = bytes::name_key(&args.file, key);
        Err(Failure::No(format!("{name} is already there; `ntdb put` replaces it")))
    })
}

/// Adds bytes to the end of a value.
pub fn append(global: &GlobalOptions, args: &StoreArgs) -> Result<(), Failure> {
    with_record(global, args, |db, key, value| {
        db.append(key, value)?;
        Ok(())
    })
}

/// Reads the value before the database is opened: its source may take its time.
fn with_record(
    global: &GlobalOptions,
    args: &StoreArgs,
    store: impl FnOnce(&Db, &[u8], &[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let key = bytes::from_argument(&args.key, args.hex)?;
    let value = read_value(args)?;
    let db = opening::for_writing(global, &args.file, args.create)?;
    let stored = store(&db, &key, &value);
    db.close()?;
    stored
}

fn read_value(args: &StoreArgs) -> Result<Vec<u8>, Failure> {
    let unreadable = |name: String, source| Failure::File { name, action: "read", source };
    match (&args.value, &args.from_file) {
        (Some(value), _) if value != "-" => bytes::from_argument(value, args.hex),
        (None, Some(path)) => {
            fs::read(path).map_err(|source| unreadable(path.display().to_string(), source))
        }
        _ => {
            let mut value = Vec::new();
            io::stdin()
                .lock()
                .read_to_end(&mut value)
                .map_err(|source| unreadable("standard input".into(), source))?;
            Ok(value)
        }
    }
}
