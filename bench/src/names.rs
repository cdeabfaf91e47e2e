//! The engines by their names.

use clap::ValueEnum;

use crate::engines::{Engine, berkeley, fjall, lmdb, ntdb, redb, rocksdb, sqlite, tdb};

/// An engine, as the command line names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Name {
    /// This project's own.
    Ntdb,
    /// libtdb, with fcntl locks.
    Tdb,
    /// libtdb, with mutexes.
    TdbMutex,
    /// LMDB.
    Lmdb,
    /// redb, one process.
    Redb,
    /// redb, many processes.
    RedbMulti,
    /// SQLite, synchronous=FULL.
    Sqlite,
    /// SQLite, synchronous=NORMAL.
    SqliteNormal,
    /// Berkeley DB, hash.
    BerkeleyHash,
    /// Berkeley DB, btree.
    BerkeleyBtree,
    /// RocksDB.
    Rocksdb,
    /// fjall.
    Fjall,
    /// PostgreSQL, fillfactor 100; by pgbench.
    Postgres,
    /// PostgreSQL, fillfactor 85.
    PostgresFill,
}

/// Something to be done with an engine.
pub trait With {
    /// What comes of it.
    type Output;
    /// Does it.
    fn with<E: Engine>(self) -> Self::Output;
    /// What there is instead with a server, which has no records of keys and values.
    fn with_server(self, fill_percent: u32) -> Self::Output;
}

impl Name {
    /// All of them.
    pub const ALL: &[Name] = &[
        Name::Ntdb,
        Name::Tdb,
        Name::TdbMutex,
        Name::Lmdb,
        Name::Redb,
        Name::RedbMulti,
        Name::Sqlite,
        Name::SqliteNormal,
        Name::BerkeleyHash,
        Name::BerkeleyBtree,
        Name::Rocksdb,
        Name::Fjall,
        Name::Postgres,
        Name::PostgresFill,
    ];

    /// Does `work` with the engine of this name.
    pub fn with<W: With>(self, work: W) -> W::Output {
        match self {
            Name::Ntdb => work.with::<ntdb::Ntdb>(),
            Name::Tdb => work.with::<tdb::Tdb<false>>(),
            Name::TdbMutex => work.with::<tdb::Tdb<true>>(),
            Name::Lmdb => work.with::<lmdb::Lmdb>(),
            Name::Redb => work.with::<redb::Redb<false>>(),
            Name::RedbMulti => work.with::<redb::Redb<true>>(),
            Name::Sqlite => work.with::<sqlite::Sqlite<true>>(),
            Name::SqliteNormal => work.with::<sqlite::Sqlite<false>>(),
            Name::BerkeleyHash => work.with::<berkeley::Berkeley<false>>(),
            Name::BerkeleyBtree => work.with::<berkeley::Berkeley<true>>(),
            Name::Rocksdb => work.with::<rocksdb::Rocksdb>(),
            Name::Fjall => work.with::<fjall::Fjall>(),
            Name::Postgres => work.with_server(100),
            Name::PostgresFill => work.with_server(85),
        }
    }
}
