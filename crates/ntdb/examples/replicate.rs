//! A copy of a database that follows its changes: the beginning of replication.
//!
//!     cargo run --release --example replicate
//!
//! One thread stands for the programs that use the database. The replica lives in a file of its own and remembers how far it has
//! come, in the transaction that brings it there: so it can be stopped, or killed, at any time, and goes on where it was. Here it is
//! stopped once, and misses a restart of the database; the log that is kept (`keep_log`) tells it what happened.

use std::error::Error;
use std::path::Path;
use std::thread;
use std::time::Duration;

use ntdb::{Db, Options, Position};

/// Where the replica remembers how far it has come. The database that is followed does not use this key.
const POSITION: &[u8] = b"\0position";

/// Carries over what has changed, until nothing has for `patience`. Returns the number of changes.
fn replicate(source: &Db, replica: &Db, patience: Duration) -> ntdb::Result<u64> {
    let position = match replica.get(POSITION)? {
        Some(text) => String::from_utf8_lossy(&text).parse()?,
        // A source that had records before it was followed would have to be copied first.
        None => Position::START,
    };
    let mut changes = source.changes(position)?;
    let mut count = 0;
    while let Some(change) = changes.wait_next(Some(patience))? {
        let mut transaction = replica.begin()?;
        for operation in &change.operations {
            operation.apply(&mut transaction)?;
        }
        transaction.put(POSITION, change.next.to_string().as_bytes())?;
        // The replica may lag behind, but it is never torn; so it need not wait for the disk each time.
        transaction.commit_relaxed()?;
        count += 1;
    }
    Ok(count)
}

/// What a program may do.
fn work(db: &Db, round: u32) -> ntdb::Result<()> {
    for n in 0..2_000u32 {
        let account = format!("account {}", n % 100);
        match n % 7 {
            0 => db.transaction(|tx| {
                tx.append(b"journal", format!("{round}: {account}\n").as_bytes())?;
                tx.put(account.as_bytes(), &n.to_le_bytes())
            })?,
            1 => drop(db.delete(account.as_bytes())?),
            _ => db.put(account.as_bytes(), &[round as u8; 20])?,
        }
    }
    Ok(())
}

fn follow_work(source: &Path, replica: &Db, round: u32) -> Result<u64, Box<dyn Error>> {
    let db = Options::new().create(true).keep_log(64 << 20).open(source)?;
    let count = thread::scope(|scope| {
        let worker = scope.spawn(|| work(&db, round));
        let count = replicate(&db, replica, Duration::from_millis(500))?;
        worker.join().expect("the worker does not panic")?;
        // What was done after the replica's patience was at an end.
        Ok::<_, ntdb::Error>(count + replicate(&db, replica, Duration::ZERO)?)
    })?;
    Ok(count)
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("ntdb-replicate-{}", std::process::id()));
    std::fs::create_dir(&dir)?;
    let source = dir.join("source.ntdb");
    let replica = Db::create(dir.join("replica.ntdb"))?;

    let live = follow_work(&source, &replica, 1)?;
    println!("{live} changes followed as they happened");
    // Nobody follows, and the database is closed and opened again.
    let db = Db::open(&source)?;
    work(&db, 2)?;
    db.close()?;
    let caught_up = follow_work(&source, &replica, 3)?;
    println!("{caught_up} changes followed after an absence");

    let db = Db::open(&source)?;
    let mut records = 0;
    for record in db.iter() {
        let (key, value) = record?;
        assert_eq!(replica.get(&key)?.as_deref(), Some(&value[..]), "the replica is the same");
        records += 1;
    }
    assert_eq!(replica.len()?, records + 1, "but for its position");
    println!("{records} records, the same in both");
    db.close()?;
    replica.close()?;
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
