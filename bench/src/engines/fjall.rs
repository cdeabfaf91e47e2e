//! fjall, with its single-writer transactions: a log-structured merge tree for one process.
//!
//! Durable: `PersistMode::SyncAll` at each commit. Relaxed: `PersistMode::Buffer`.

use std::path::Path;

use fjall::{
    Config, PartitionCreateOptions, PersistMode, TxKeyspace, TxPartition, WriteTransaction,
};
use ntdb_workload::session::{Access, Result, Session};

use super::{Engine, Setup};

/// An opened keyspace with its one partition.
#[derive(Clone)]
pub struct Fjall {
    keyspace: TxKeyspace,
    all: TxPartition,
    durable: bool,
}

impl Engine for Fjall {
    const HAS_PROCESSES: bool = false;
    const HAS_THREADS: bool = true;
    const DURABLE: &str = "the log is synced by each commit";
    const RELAXED: &str = "PersistMode::Buffer: survives the death of the process";
    type Client = Fjall;

    fn open(path: &Path, setup: Setup) -> Result<Fjall> {
        let keyspace = Config::new(path.join("data.fjall")).open_transactional()?;
        let all = keyspace.open_partition("all", PartitionCreateOptions::default())?;
        Ok(Fjall { keyspace, all, durable: setup.durable })
    }

    fn client(&self) -> Result<Fjall> {
        Ok(self.clone())
    }

    fn version() -> String {
        "fjall 2.11".into()
    }
}

fn mode(durable: bool) -> Option<PersistMode> {
    Some(if durable { PersistMode::SyncAll } else { PersistMode::Buffer })
}

fn replace(value: &mut Vec<u8>, found: Option<fjall::Slice>) -> bool {
    value.clear();
    value.extend_from_slice(found.as_deref().unwrap_or_default());
    found.is_some()
}

impl Access for Fjall {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        Ok(replace(value, self.all.get(key)?))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let mut transaction = self.keyspace.write_tx().durability(mode(self.durable));
        transaction.insert(&self.all, key, value);
        Ok(transaction.commit()?)
    }
}

struct Inside<'a>(&'a TxPartition, WriteTransaction<'a>);

impl Access for Inside<'_> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        Ok(replace(value, self.1.get(self.0, key)?))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.1.insert(self.0, key, value);
        Ok(())
    }
}

impl Session for Fjall {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        for (key, value) in records {
            self.all.insert(key, value)?;
        }
        Ok(self.keyspace.persist(PersistMode::SyncAll)?)
    }

    fn transaction(
        &mut self,
        durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        let transaction = self.keyspace.write_tx().durability(mode(durable));
        let mut inside = Inside(&self.all, transaction);
        body(&mut inside)?;
        Ok(inside.1.commit()?)
    }

    fn scan(&mut self, seed: u64, count: usize) -> Result<usize> {
        let read = self.keyspace.read_tx();
        Ok(read.range(&self.all, seed.to_be_bytes()..).take(count).count())
    }

    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        for record in self.keyspace.read_tx().iter(&self.all) {
            let (key, value) = record?;
            visit(&key, &value);
        }
        Ok(())
    }
}
