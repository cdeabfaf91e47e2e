//! Several processes increment one counter, each under the key's lock, and none is lost.
//!
//!     cargo run --release --example counter -- [DATABASE [PROCESSES [INCREMENTS]]]
//!
//! Reading a value, changing it and storing it again takes three steps; `lock` keeps everybody else
//! from changing that key between them. Who only reads is not kept waiting by it.

use std::env;
use std::error::Error;
use std::process::Command;
use std::time::Instant;

use ntdb::Db;

const KEY: &[u8] = b"counter";
/// Set for the processes that do the counting.
const INCREMENTS_VARIABLE: &str = "COUNTER_INCREMENTS";

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let given = args.next();
    let path = given.clone().unwrap_or_else(|| {
        env::temp_dir().join(format!("counter-{}.ntdb", std::process::id())).display().to_string()
    });
    if let Ok(increments) = env::var(INCREMENTS_VARIABLE) {
        return count(&path, increments.parse()?);
    }
    let processes: u64 = args.next().map_or(Ok(4), |number| number.parse())?;
    let increments: u64 = args.next().map_or(Ok(10_000), |number| number.parse())?;

    let db = Db::create(&path)?;
    let before = value(&db)?;
    let started = Instant::now();
    let mut counters = Vec::new();
    for _ in 0..processes {
        let mut counter = Command::new(env::current_exe()?);
        counters.push(counter.arg(&path).env(INCREMENTS_VARIABLE, increments.to_string()).spawn()?);
    }
    for counter in &mut counters {
        if !counter.wait()?.success() {
            return Err("a process has failed".into());
        }
    }
    let took = started.elapsed();
    let counted = value(&db)? - before;
    println!("{path}: {processes} processes counted to {counted} in {took:.3?}");
    if counted != processes * increments {
        return Err(format!("that should have been {}", processes * increments).into());
    }
    db.close()?;
    if given.is_none() {
        // A closed database is this one file.
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

fn count(path: &str, increments: u64) -> Result<(), Box<dyn Error>> {
    let db = Db::open(path)?;
    for _ in 0..increments {
        let _guard = db.lock(KEY)?;
        db.put(KEY, &(value(&db)? + 1).to_le_bytes())?;
    }
    Ok(())
}

fn value(db: &Db) -> Result<u64, Box<dyn Error>> {
    match db.get(KEY)? {
        Some(bytes) => Ok(u64::from_le_bytes(bytes.as_slice().try_into()?)),
        None => Ok(0),
    }
}
