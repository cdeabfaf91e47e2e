//! This project's own engine.

use std::ops::ControlFlow;
use std::path::Path;

use ntdb::{Cursor, Db, Durability, Options, Transaction};
use ntdb_workload::session::{Access, Result, Session};

use super::{Engine, Setup};

/// An opened database.
pub struct Ntdb(Db);

impl Ntdb {
    /// The facts, with everything on disk.
    pub fn settled(&self) -> Result<ntdb::Stat> {
        self.0.checkpoint()?;
        Ok(self.0.stat()?)
    }
}

/// A thread's handle of it.
pub struct Client(Db);

impl Engine for Ntdb {
    const HAS_PROCESSES: bool = true;
    const HAS_THREADS: bool = true;
    const DURABLE: &str = "the log is synced, by one for several";
    const RELAXED: &str = "survives the death of all processes";
    type Client = Client;

    fn open(path: &Path, setup: Setup) -> Result<Ntdb> {
        let durability = if setup.durable { Durability::Durable } else { Durability::Relaxed };
        let mut options = Options::new();
        options.create(setup.create).durability(durability);
        if let Some(own) = setup.own {
            options.reserve_percent(own.reserve_percent).page_size(own.page_bytes);
        }
        Ok(Ntdb(options.open(path.join("data.ntdb"))?))
    }

    fn client(&self) -> Result<Client> {
        Ok(Client(self.0.clone()))
    }

    fn version() -> String {
        "ntdb".into()
    }
}

impl Access for Client {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let copy = |found: &[u8]| {
            value.clear();
            value.extend_from_slice(found);
        };
        Ok(self.0.view(key, copy)?.is_some())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        Ok(self.0.put(key, value)?)
    }
}

struct Inside<'a, 'db>(&'a mut Transaction<'db>);

impl Access for Inside<'_, '_> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let copy = |found: &[u8]| {
            value.clear();
            value.extend_from_slice(found);
        };
        Ok(self.0.view(key, copy)?.is_some())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        Ok(self.0.put(key, value)?)
    }
}

impl Session for Client {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        let mut transaction = self.0.begin()?;
        for (key, value) in records {
            transaction.put(&key, &value)?;
        }
        Ok(transaction.commit()?)
    }

    fn transaction(
        &mut self,
        durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        let mut transaction = self.0.begin()?;
        body(&mut Inside(&mut transaction))?;
        Ok(if durable { transaction.commit() } else { transaction.commit_relaxed() }?)
    }

    fn scan(&mut self, seed: u64, count: usize) -> Result<usize> {
        let mut place = [1; 9];
        place[1..].copy_from_slice(&seed.to_le_bytes());
        let from = Cursor::from_bytes(&place).unwrap_or_default();
        Ok(self.0.iter_from(&from).take(count).count())
    }

    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        self.0.for_each(|key, value| {
            visit(key, value);
            ControlFlow::Continue(())
        })?;
        Ok(())
    }
}
