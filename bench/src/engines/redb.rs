//! redb, for one process (`Redb<false>`) and for many (`Redb<true>`: `ConcurrencyMode::MultiWriter`).
//!
//! Relaxed: `Durability::None`, which the mode for many processes does not have: there every commit is synced.

use std::path::Path;
use std::sync::Arc;

use ntdb_workload::session::{Access, Result, Session};
use redb::{
    Builder, ConcurrencyMode, Database, Durability, ReadableDatabase, ReadableTable, Table,
    TableDefinition, WriteTransaction,
};

use super::{Engine, Setup};

const ALL: TableDefinition<&[u8], &[u8]> = TableDefinition::new("all");

/// An opened database.
#[derive(Clone)]
pub struct Redb<const MANY: bool> {
    database: Arc<Database>,
    durable: bool,
}

impl<const MANY: bool> Engine for Redb<MANY> {
    const HAS_PROCESSES: bool = MANY;
    const HAS_THREADS: bool = true;
    const DURABLE: &str = "the file is synced by each commit";
    const RELAXED: &str = if MANY {
        "has no commit without a sync"
    } else {
        "Durability::None: does not survive the death of the process"
    };
    type Client = Redb<MANY>;

    fn open(path: &Path, setup: Setup) -> Result<Redb<MANY>> {
        let mut builder = Builder::new();
        if MANY {
            builder.set_concurrency_mode(ConcurrencyMode::MultiWriter);
        }
        let database = builder.create(path.join("data.redb"))?;
        let redb = Redb { database: Arc::new(database), durable: setup.durable || MANY };
        if setup.create {
            let transaction = redb.database.begin_write()?;
            transaction.open_table(ALL)?;
            transaction.commit()?;
        }
        Ok(redb)
    }

    fn client(&self) -> Result<Redb<MANY>> {
        Ok(self.clone())
    }

    fn version() -> String {
        if MANY { "redb 4.6, for many processes" } else { "redb 4.6, for one process" }.into()
    }
}

impl<const MANY: bool> Redb<MANY> {
    fn begin(&self, durable: bool) -> Result<WriteTransaction> {
        let mut transaction = self.database.begin_write()?;
        if !durable && !MANY {
            transaction.set_durability(Durability::None)?;
        }
        Ok(transaction)
    }
}

fn replace<'a>(value: &mut Vec<u8>, found: Option<redb::AccessGuard<'a, &'static [u8]>>) -> bool {
    value.clear();
    if let Some(found) = &found {
        value.extend_from_slice(found.value());
    }
    found.is_some()
}

impl<const MANY: bool> Access for Redb<MANY> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let transaction = self.database.begin_read()?;
        Ok(replace(value, transaction.open_table(ALL)?.get(key)?))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let transaction = self.begin(self.durable)?;
        transaction.open_table(ALL)?.insert(key, value)?;
        Ok(transaction.commit()?)
    }
}

struct Inside<'a>(Table<'a, &'static [u8], &'static [u8]>);

impl Access for Inside<'_> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        Ok(replace(value, self.0.get(key)?))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.0.insert(key, value)?;
        Ok(())
    }
}

impl<const MANY: bool> Session for Redb<MANY> {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        let transaction = self.begin(true)?;
        {
            let mut table = transaction.open_table(ALL)?;
            for (key, value) in records {
                table.insert(key.as_slice(), value.as_slice())?;
            }
        }
        Ok(transaction.commit()?)
    }

    fn transaction(
        &mut self,
        durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        let transaction = self.begin(durable)?;
        body(&mut Inside(transaction.open_table(ALL)?))?;
        Ok(transaction.commit()?)
    }

    fn scan(&mut self, seed: u64, count: usize) -> Result<usize> {
        let table = self.database.begin_read()?.open_table(ALL)?;
        Ok(table.range(&seed.to_be_bytes()[..]..)?.take(count).count())
    }

    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        let table = self.database.begin_read()?.open_table(ALL)?;
        for record in table.iter()? {
            let (key, value) = record?;
            visit(key.value(), value.value());
        }
        Ok(())
    }
}
