//! How to open a database.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::api::db::Db;
use crate::error::{Error, Result};
use crate::limits;

/// What a single operation promises when it returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// Visible to every process, and safe from the death of any of them. After a power cut the
    /// database is what it was at some recent instant, never a mixture. The default.
    #[default]
    Relaxed,
    /// Also on disk: the operation waits for a sync, which it shares with all who wait. One that
    /// changes nothing ([`Db::insert`](crate::Db::insert) of a key that is present, say) waits until
    /// what it has seen is on disk.
    Durable,
}

/// Options for opening a database.
///
/// ```
/// # fn main() -> ntdb::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("example.ntdb");
/// let db = ntdb::Options::new().create(true).page_size(8192).open(&path)?;
/// db.put(b"colour", b"green")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) create: bool,
    pub(crate) create_new: bool,
    pub(crate) read_only: bool,
    pub(crate) page_size: u32,
    pub(crate) durability: Durability,
    pub(crate) reserve_percent: u8,
    pub(crate) lock_timeout: Option<Duration>,
    pub(crate) address_space: u64,
    pub(crate) mode: u32,
    pub(crate) allow_unsuitable_file_system: bool,
    pub(crate) shm_dir: Option<PathBuf>,
    pub(crate) give_up_unsynced: bool,
    pub(crate) checkpoint_log_bytes: u64,
    pub(crate) keep_log_bytes: Option<u64>,
    pub(crate) hash_mask: u64,
}

/// The moment `limit` from now; a limit beyond all time is none.
pub(crate) fn deadline_after(limit: Option<Duration>) -> Option<Instant> {
    limit.and_then(|limit| Instant::now().checked_add(limit))
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// The defaults: open an existing database for reading and writing; relaxed durability; waits
    /// for locks without a limit.
    pub fn new() -> Self {
        Options {
            create: false,
            create_new: false,
            read_only: false,
            page_size: limits::DEFAULT_PAGE_SIZE,
            durability: Durability::Relaxed,
            reserve_percent: 0,
            lock_timeout: None,
            address_space: 0,
            mode: 0o644,
            allow_unsuitable_file_system: false,
            shm_dir: None,
            give_up_unsynced: false,
            checkpoint_log_bytes: limits::CHECKPOINT_LOG_BYTES_MIN,
            keep_log_bytes: None,
            hash_mask: u64::MAX,
        }
    }

    /// Create the database if it does not exist (or is an empty file). Default: no.
    pub fn create(&mut self, yes: bool) -> &mut Self {
        self.create = yes;
        self
    }

    /// Create the database, and fail with [`Error::AlreadyExists`] if it exists. Default: no.
    pub fn create_new(&mut self, yes: bool) -> &mut Self {
        self.create_new = yes;
        self
    }

    /// Open for reading only. At rest the data file alone is enough, also on read-only media; a
    /// database in use needs write permission on its `-shm` companion. Default: no.
    pub fn read_only(&mut self, yes: bool) -> &mut Self {
        self.read_only = yes;
        self
    }

    /// Page size in bytes for a new database: a power of two, 4096 to 65536. An existing
    /// database keeps its own.
    pub fn page_size(&mut self, bytes: u32) -> &mut Self {
        self.page_size = bytes;
        self
    }

    /// What [`Db::put`] and the other single operations promise. See [`Durability`].
    pub fn durability(&mut self, durability: Durability) -> &mut Self {
        self.durability = durability;
        self
    }

    /// Percent of every page (0 to 90) that inserts leave free for later updates. Stored in a new
    /// database; [`Db::set_reserve`](crate::Db::set_reserve) changes it later.
    ///
    /// An insert that would use it splits the page; updates and appends may. When they have used it up too, the page is rebuilt
    /// without its dead records, and split only if those that live need it. So rows that grow by updates stay in
    /// their pages, and rows that are updated again and again make them be rebuilt less often; the file is larger by what is
    /// left free. Long values, in pages of their own, get the same share more for bytes that are appended.
    pub fn reserve_percent(&mut self, percent: u8) -> &mut Self {
        self.reserve_percent = percent;
        self
    }

    /// How long to wait for a lock before [`Error::Locked`]; `None` waits as long as it takes (the
    /// default). The death of a holder never makes anybody wait.
    pub fn lock_timeout(&mut self, limit: Option<Duration>) -> &mut Self {
        self.lock_timeout = limit;
        self
    }

    /// Addresses to reserve for the mapping, in bytes: that is no memory, but counts for `ulimit -v`. A
    /// file that grows past them is mapped anew. Default, also for 0: 256 GiB, or less where so much
    /// is not to be had.
    pub fn address_space(&mut self, bytes: u64) -> &mut Self {
        self.address_space = bytes;
        self
    }

    /// Permission bits of a new database (the process's umask applies). Its companions get the
    /// same. Default: 0o644.
    pub fn mode(&mut self, mode: u32) -> &mut Self {
        self.mode = mode;
        self
    }

    /// Open on a network file system all the same. Processes on different hosts then corrupt the
    /// database; on one host it works. Default: no.
    pub fn allow_unsuitable_file_system(&mut self, yes: bool) -> &mut Self {
        self.allow_unsuitable_file_system = yes;
        self
    }

    /// Keep the shared-memory companion in this directory (a tmpfs, say) instead of beside the data
    /// file. It counts for the first process to open the database; the others find the companion
    /// where that one has it, and so does recovery after a crash.
    pub fn shm_dir(&mut self, dir: Option<PathBuf>) -> &mut Self {
        self.shm_dir = dir;
        self
    }

    /// Open the database although the shared memory that its last users left cannot be found or read
    /// ([`Error::ShmLost`]), giving up the changes that are nowhere else: those that were not
    /// durable yet. Default: no.
    pub fn give_up_unsynced(&mut self, yes: bool) -> &mut Self {
        self.give_up_unsynced = yes;
        self
    }

    /// Redo log size, in bytes, at which a checkpoint starts (or half the data file, whichever is
    /// larger). Default: 64 MiB.
    pub fn checkpoint_log_bytes(&mut self, bytes: u64) -> &mut Self {
        self.checkpoint_log_bytes = bytes;
        self
    }

    /// Keep at least so many bytes of past redo log (rounded up to KiB; 4 KiB for each opening and each checkpoint included), so
    /// that [`Db::changes`] reaches back so far, also after the database was closed. It is stored in the
    /// database and counts for all processes, until another value is asked for; 0 keeps none. The logs lie
    /// beside the database, in files whose names end in `-k` and twelve digits or letters; move and remove them with
    /// it. Default: what is stored; 0 for a new database.
    pub fn keep_log(&mut self, bytes: u64) -> &mut Self {
        self.keep_log_bytes = Some(bytes);
        self
    }

    /// Bits of the hash that a new database uses; the rest are forced to zero. For tests of
    /// colliding keys.
    #[doc(hidden)]
    pub fn hash_mask(&mut self, mask: u64) -> &mut Self {
        self.hash_mask = mask;
        self
    }

    /// Opens the database at `path`.
    ///
    /// The first process to open a database that a crash left behind recovers it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::NotADatabase`],
    /// [`Error::NewerVersion`], [`Error::Corrupt`], [`Error::InvalidOption`] for what is asked or
    /// found; [`Error::TooLong`] for its name; [`Error::LogMissing`], [`Error::ForeignSidecar`],
    /// [`Error::ShmMissing`], [`Error::ShmLost`] for its companions; [`Error::Locked`], [`Error::TooMany`] for other processes; and
    /// [`Error::UnsuitableFileSystem`], [`Error::Permission`], [`Error::AddressSpace`],
    /// [`Error::Full`], [`Error::Io`] for the system.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Db> {
        self.validate()?;
        Db::open_with(path.as_ref(), self)
    }

    /// Opens a new database that lives in this process's memory only.
    ///
    /// # Errors
    /// [`Error::InvalidOption`], [`Error::AddressSpace`].
    pub fn open_in_memory(&self) -> Result<Db> {
        self.validate()?;
        Db::open_in_memory_with(self)
    }

    /// When waiting for locks ends, beginning now.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        deadline_after(self.lock_timeout)
    }

    fn validate(&self) -> Result<()> {
        if !limits::valid_page_size(self.page_size) {
            return Err(Error::InvalidOption {
                what: "page size",
                reason: format!(
                    "{} is not a power of two from {} to {}",
                    self.page_size,
                    limits::MIN_PAGE_SIZE,
                    limits::MAX_PAGE_SIZE
                ),
            });
        }
        check_reserve(self.reserve_percent)?;
        if self.keep_log_bytes.is_some_and(|bytes| bytes.div_ceil(1024) > u32::MAX as u64) {
            return Err(Error::InvalidOption {
                what: "log to keep",
                reason: "at most 4 TiB can be kept".into(),
            });
        }
        if self.read_only && (self.create || self.create_new) {
            return Err(Error::InvalidOption {
                what: "read-only",
                reason: "a database cannot be created read-only".into(),
            });
        }
        Ok(())
    }
}
/// Whether `percent` may be a reserve.
pub(crate) fn check_reserve(percent: u8) -> Result<()> {
    if u32::from(percent) <= limits::RESERVE_PERCENT_MAX {
        return Ok(());
    }
    let reason = format!("{percent} is not a percentage from 0 to {}", limits::RESERVE_PERCENT_MAX);
    Err(Error::InvalidOption { what: "reserve", reason })
}
