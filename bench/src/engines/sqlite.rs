//! SQLite: a table without row ids, in WAL mode; `synchronous` FULL (`Sqlite<true>`) or NORMAL.
//!
//! Relaxed: `synchronous` OFF. NORMAL does not sync the log at a commit: a power cut may take back what was committed, and leaves the
//! database whole; it is shown beside FULL, not in its place.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ntdb_workload::session::{Access, Result, Session};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior};

use super::{Engine, Setup};

const GET: &str = "SELECT value FROM all_records WHERE key = ?1";
const PUT: &str = "INSERT INTO all_records VALUES (?1, ?2) \
                   ON CONFLICT (key) DO UPDATE SET value = excluded.value";
/// Clients wait for each other so long.
const PATIENCE: Duration = Duration::from_secs(600);

/// Where the database is.
pub struct Sqlite<const FULL: bool> {
    path: PathBuf,
    setup: Setup,
}

/// A connection.
pub struct Client(Connection);

impl<const FULL: bool> Engine for Sqlite<FULL> {
    const HAS_PROCESSES: bool = true;
    const HAS_THREADS: bool = true;
    const DURABLE: &str = if FULL {
        "WAL, synchronous=FULL: the log is synced by each commit"
    } else {
        "WAL, synchronous=NORMAL: a commit is not synced, and may be taken back by a power cut"
    };
    const RELAXED: &str = "WAL, synchronous=OFF: survives the death of all processes";
    type Client = Client;

    fn open(path: &Path, setup: Setup) -> Result<Sqlite<FULL>> {
        let sqlite = Sqlite { path: path.join("data.sqlite"), setup };
        if setup.create {
            sqlite.client()?.0.execute_batch(
                "CREATE TABLE all_records (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID",
            )?;
        }
        Ok(sqlite)
    }

    fn client(&self) -> Result<Client> {
        let connection = Connection::open(&self.path)?;
        connection.busy_timeout(PATIENCE)?;
        let level = match (self.setup.durable, FULL) {
            (true, true) => "FULL",
            (true, false) => "NORMAL",
            (false, _) => "OFF",
        };
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", level)?;
        connection.pragma_update(None, "cache_size", -262_144)?;
        connection.pragma_update(None, "mmap_size", 1_i64 << 32)?;
        Ok(Client(connection))
    }

    fn version() -> String {
        let level = if FULL { "FULL" } else { "NORMAL" };
        format!("SQLite {}, {level}", rusqlite::version())
    }
}

fn get(connection: &Connection, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
    let mut statement = connection.prepare_cached(GET)?;
    let found = statement.query_row([key], |row| {
        value.clear();
        value.extend_from_slice(row.get_ref(0)?.as_blob()?);
        Ok(())
    });
    Ok(found.optional()?.is_some())
}

fn put(connection: &Connection, key: &[u8], value: &[u8]) -> Result<()> {
    connection.prepare_cached(PUT)?.execute([key, value])?;
    Ok(())
}

impl Access for Client {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        get(&self.0, key, value)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        put(&self.0, key, value)
    }
}

struct Inside<'a>(rusqlite::Transaction<'a>);

impl Access for Inside<'_> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        get(&self.0, key, value)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        put(&self.0, key, value)
    }
}

impl Session for Client {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        let transaction = self.0.transaction()?;
        for (key, value) in records {
            put(&transaction, &key, &value)?;
        }
        Ok(transaction.commit()?)
    }

    fn transaction(
        &mut self,
        _durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        let transaction = self.0.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut inside = Inside(transaction);
        body(&mut inside)?;
        Ok(inside.0.commit()?)
    }

    fn scan(&mut self, seed: u64, count: usize) -> Result<usize> {
        let text = "SELECT key, value FROM all_records WHERE key >= ?1 LIMIT ?2";
        let mut statement = self.0.prepare_cached(text)?;
        let mut rows = statement.query((&seed.to_be_bytes()[..], count as i64))?;
        let mut seen = 0;
        while rows.next()?.is_some() {
            seen += 1;
        }
        Ok(seen)
    }

    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        let mut statement = self.0.prepare_cached("SELECT key, value FROM all_records")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            visit(row.get_ref(0)?.as_blob()?, row.get_ref(1)?.as_blob()?);
        }
        Ok(())
    }
}
