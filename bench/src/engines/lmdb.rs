//! LMDB, through heed.
//!
//! Relaxed: `MDB_WRITEMAP` and `MDB_NOSYNC`, as its documentation advises for speed: a commit is in the shared map. A read transaction
//! for each get.

use std::path::Path;
use std::sync::Arc;

use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions, RwTxn};
use ntdb_workload::session::{Access, Result, Session};

use super::{Engine, Setup};

const MAP_BYTES: usize = 32 << 30;

/// An opened environment with its one database.
#[derive(Clone)]
pub struct Lmdb {
    env: Arc<Env>,
    all: Database<Bytes, Bytes>,
}

impl Engine for Lmdb {
    const HAS_PROCESSES: bool = true;
    const HAS_THREADS: bool = true;
    const DURABLE: &str = "the file is synced by each commit";
    const RELAXED: &str = "MDB_WRITEMAP | MDB_NOSYNC: survives the death of all processes";
    type Client = Lmdb;

    fn open(path: &Path, setup: Setup) -> Result<Lmdb> {
        let mut options = EnvOpenOptions::new();
        options.map_size(MAP_BYTES).max_readers(256);
        // SAFETY: nobody changes the files behind LMDB's back; without a sync a power cut may damage them, which is not tried here.
        let env = unsafe {
            if !setup.durable {
                options.flags(EnvFlags::WRITE_MAP | EnvFlags::NO_SYNC);
            }
            options.open(path)?
        };
        let mut transaction = env.write_txn()?;
        let all = env.create_database(&mut transaction, None)?;
        transaction.commit()?;
        Ok(Lmdb { env: Arc::new(env), all })
    }

    fn client(&self) -> Result<Lmdb> {
        Ok(self.clone())
    }

    fn version() -> String {
        let version = heed::lmdb_version();
        format!("LMDB {}.{}.{}", version.major, version.minor, version.patch)
    }
}

fn replace(value: &mut Vec<u8>, found: Option<&[u8]>) -> bool {
    value.clear();
    value.extend_from_slice(found.unwrap_or_default());
    found.is_some()
}

impl Access for Lmdb {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let transaction = self.env.read_txn()?;
        Ok(replace(value, self.all.get(&transaction, key)?))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let mut transaction = self.env.write_txn()?;
        self.all.put(&mut transaction, key, value)?;
        Ok(transaction.commit()?)
    }
}

struct Inside<'a, 'env>(&'a Lmdb, RwTxn<'env>);

impl Access for Inside<'_, '_> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        Ok(replace(value, self.0.all.get(&self.1, key)?))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        Ok(self.0.all.put(&mut self.1, key, value)?)
    }
}

impl Session for Lmdb {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        let mut transaction = self.env.write_txn()?;
        for (key, value) in records {
            self.all.put(&mut transaction, &key, &value)?;
        }
        Ok(transaction.commit()?)
    }

    fn transaction(
        &mut self,
        _durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        let mut inside = Inside(self, self.env.write_txn()?);
        body(&mut inside)?;
        Ok(inside.1.commit()?)
    }

    fn scan(&mut self, seed: u64, count: usize) -> Result<usize> {
        let transaction = self.env.read_txn()?;
        let from = seed.to_be_bytes();
        let range = (std::ops::Bound::Included(&from[..]), std::ops::Bound::Unbounded);
        Ok(self.all.range(&transaction, &range)?.take(count).count())
    }

    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        let transaction = self.env.read_txn()?;
        for record in self.all.iter(&transaction)? {
            let (key, value) = record?;
            visit(key, value);
        }
        Ok(())
    }
}
