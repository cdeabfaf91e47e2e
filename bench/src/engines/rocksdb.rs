//! RocksDB, Debian's librocksdb, as a `TransactionDB` with pessimistic locks: a log-structured merge tree for one process.
//!
//! Background threads as many as the machine has processors, as its documentation advises. Durable: `sync` at each commit, which it
//! groups. Relaxed: the log is written and not synced.

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

use ntdb_workload::session::{Access, Failed, Result, Session, wrong};

use super::{Engine, Setup};

/// All of the library's objects.
type Object = *mut c_void;
type Text = *mut c_char;

#[link(name = "rocksdb")]
unsafe extern "C" {
    fn rocksdb_options_create() -> Object;
    fn rocksdb_options_set_create_if_missing(options: Object, yes: c_uchar);
    fn rocksdb_options_increase_parallelism(options: Object, threads: c_int);
    fn rocksdb_options_destroy(options: Object);
    fn rocksdb_transactiondb_options_create() -> Object;
    fn rocksdb_transactiondb_options_destroy(options: Object);
    fn rocksdb_transactiondb_open(
        options: Object,
        txn_options: Object,
        name: *const c_char,
        error: *mut Text,
    ) -> Object;
    fn rocksdb_transactiondb_close(db: Object);
    fn rocksdb_writeoptions_create() -> Object;
    fn rocksdb_writeoptions_set_sync(options: Object, yes: c_uchar);
    fn rocksdb_readoptions_create() -> Object;
    fn rocksdb_transaction_options_create() -> Object;
    fn rocksdb_transactiondb_get(
        db: Object,
        options: Object,
        key: *const u8,
        key_len: usize,
        len: *mut usize,
        error: *mut Text,
    ) -> *mut u8;
    fn rocksdb_transactiondb_put(
        db: Object,
        options: Object,
        key: *const u8,
        key_len: usize,
        value: *const u8,
        len: usize,
        error: *mut Text,
    );
    fn rocksdb_transaction_begin(db: Object, write: Object, options: Object, old: Object)
    -> Object;
    fn rocksdb_transaction_destroy(txn: Object);
    fn rocksdb_transaction_get_for_update(
        txn: Object,
        options: Object,
        key: *const u8,
        key_len: usize,
        len: *mut usize,
        exclusive: c_uchar,
        error: *mut Text,
    ) -> *mut u8;
    fn rocksdb_transaction_put(
        txn: Object,
        key: *const u8,
        key_len: usize,
        value: *const u8,
        len: usize,
        error: *mut Text,
    );
    fn rocksdb_transaction_commit(txn: Object, error: *mut Text);
    fn rocksdb_transaction_rollback(txn: Object, error: *mut Text);
    fn rocksdb_transactiondb_create_iterator(db: Object, options: Object) -> Object;
    fn rocksdb_iter_seek_to_first(iter: Object);
    fn rocksdb_iter_seek(iter: Object, key: *const u8, key_len: usize);
    fn rocksdb_iter_valid(iter: Object) -> c_uchar;
    fn rocksdb_iter_next(iter: Object);
    fn rocksdb_iter_key(iter: Object, len: *mut usize) -> *const u8;
    fn rocksdb_iter_value(iter: Object, len: *mut usize) -> *const u8;
    fn rocksdb_iter_destroy(iter: Object);
    fn rocksdb_free(text: *mut c_void);
}

/// The database and the options of its operations, which are never freed but with the process.
struct Opened {
    db: Object,
    write: [Object; 2],
    read: Object,
    txn: Object,
    durable: bool,
}

// SAFETY: the library's database may be used by several threads, and options are only read.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: open, and nobody uses it any more.
        unsafe { rocksdb_transactiondb_close(self.db) };
    }
}

/// An opened database.
#[derive(Clone)]
pub struct Rocksdb(Arc<Opened>);

/// An error of the library.
#[derive(Debug)]
struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "RocksDB: {}", self.0)
    }
}

impl std::error::Error for Refused {}

/// Takes the error that a call has left.
fn check(error: Text) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a text that the library has allocated for the caller.
    let text = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
    // SAFETY: as above.
    unsafe { rocksdb_free(error.cast()) };
    Err(Box::new(Refused(text)))
}

/// Whether a lock was not to be had in time: the transaction is to be made again.
fn is_busy(error: &Failed) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|e| {
        ["Resource busy", "timed out", "Deadlock"].iter().any(|text| e.0.contains(text))
    })
}

impl Engine for Rocksdb {
    const HAS_PROCESSES: bool = false;
    const HAS_THREADS: bool = true;
    const DURABLE: &str = "the log is synced, by one for several";
    const RELAXED: &str = "the log is written, not synced: survives the death of the process";
    type Client = Rocksdb;

    fn open(path: &Path, setup: Setup) -> Result<Rocksdb> {
        let name = CString::new(path.join("data.rocksdb").as_os_str().as_bytes())?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut error = null_mut();
        // SAFETY: the name ends with zero, and each object is of the kind that its function expects.
        unsafe {
            let options = rocksdb_options_create();
            rocksdb_options_set_create_if_missing(options, setup.create.into());
            rocksdb_options_increase_parallelism(options, processors as c_int);
            let txn_options = rocksdb_transactiondb_options_create();
            let db = rocksdb_transactiondb_open(options, txn_options, name.as_ptr(), &mut error);
            rocksdb_options_destroy(options);
            rocksdb_transactiondb_options_destroy(txn_options);
            check(error)?;
            let write = [false, true].map(|sync| {
                let write = rocksdb_writeoptions_create();
                rocksdb_writeoptions_set_sync(write, sync.into());
                write
            });
            let read = rocksdb_readoptions_create();
            let txn = rocksdb_transaction_options_create();
            Ok(Rocksdb(Arc::new(Opened { db, write, read, txn, durable: setup.durable })))
        }
    }

    fn client(&self) -> Result<Rocksdb> {
        Ok(self.clone())
    }

    fn version() -> String {
        format!("RocksDB {}", option_env!("ROCKSDB_VERSION").unwrap_or("7.8"))
    }
}

/// Copies what the library has allocated, and frees it.
fn replace(value: &mut Vec<u8>, found: *mut u8, len: usize) -> bool {
    value.clear();
    if found.is_null() {
        return false;
    }
    // SAFETY: the library says that there are so many bytes, and they are the caller's to free.
    unsafe {
        value.extend_from_slice(std::slice::from_raw_parts(found, len));
        rocksdb_free(found.cast());
    }
    true
}

impl Access for Rocksdb {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let (mut len, mut error) = (0, null_mut());
        let Opened { db, read, .. } = *self.0;
        // SAFETY: open, and the bytes are there for this call.
        let found = unsafe {
            rocksdb_transactiondb_get(db, read, key.as_ptr(), key.len(), &mut len, &mut error)
        };
        check(error)?;
        Ok(replace(value, found, len))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let mut error = null_mut();
        let Opened { db, write, durable, .. } = *self.0;
        let write = write[usize::from(durable)];
        // SAFETY: open, and the bytes are there for this call.
        unsafe {
            let (value, len) = (value.as_ptr(), value.len());
            rocksdb_transactiondb_put(db, write, key.as_ptr(), key.len(), value, len, &mut error);
        }
        check(error)
    }
}

struct Inside<'a>(&'a Opened, Object);

impl Access for Inside<'_> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let (mut len, mut error) = (0, null_mut());
        let (read, start) = (self.0.read, key.as_ptr());
        // SAFETY: the transaction is under way, and the bytes are there for this call.
        let found = unsafe {
            rocksdb_transaction_get_for_update(
                self.1,
                read,
                start,
                key.len(),
                &mut len,
                1,
                &mut error,
            )
        };
        check(error)?;
        Ok(replace(value, found, len))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let mut error = null_mut();
        // SAFETY: as above.
        unsafe {
            let (value, len) = (value.as_ptr(), value.len());
            rocksdb_transaction_put(self.1, key.as_ptr(), key.len(), value, len, &mut error);
        }
        check(error)
    }
}

impl Rocksdb {
    fn try_transaction(
        &self,
        durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        let Opened { db, write, txn, .. } = *self.0;
        let mut error = null_mut();
        // SAFETY: open; the transaction is destroyed before this returns.
        let txn =
            unsafe { rocksdb_transaction_begin(db, write[usize::from(durable)], txn, null_mut()) };
        let result = body(&mut Inside(&self.0, txn));
        // SAFETY: as above.
        unsafe {
            if result.is_ok() {
                rocksdb_transaction_commit(txn, &mut error);
            } else {
                let mut ignored = null_mut();
                rocksdb_transaction_rollback(txn, &mut ignored);
                let _ = check(ignored);
            }
            rocksdb_transaction_destroy(txn);
        }
        result.and_then(|()| check(error))
    }

    /// Calls `visit` with each record from `key` on until it returns `false`.
    fn iterate(&self, key: Option<&[u8]>, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) {
        let Opened { db, read, .. } = *self.0;
        // SAFETY: open; what the iterator names is there until it moves.
        unsafe {
            let iter = rocksdb_transactiondb_create_iterator(db, read);
            match key {
                Some(key) => rocksdb_iter_seek(iter, key.as_ptr(), key.len()),
                None => rocksdb_iter_seek_to_first(iter),
            }
            while rocksdb_iter_valid(iter) != 0 {
                let (mut key_len, mut len) = (0, 0);
                let key = rocksdb_iter_key(iter, &mut key_len);
                let value = rocksdb_iter_value(iter, &mut len);
                let key = std::slice::from_raw_parts(key, key_len);
                if !visit(key, std::slice::from_raw_parts(value, len)) {
                    break;
                }
                rocksdb_iter_next(iter);
            }
            rocksdb_iter_destroy(iter);
        }
    }
}

impl Session for Rocksdb {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        let mut records = records.peekable();
        while records.peek().is_some() {
            let part: Vec<_> = records.by_ref().take(1_000).collect();
            self.try_transaction(false, &mut |all| {
                part.iter().try_for_each(|(key, value)| all.put(key, value))
            })?;
        }
        Ok(())
    }

    fn transaction(
        &mut self,
        durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        loop {
            match self.try_transaction(durable, body) {
                Err(error) if is_busy(&error) => {}
                result => return result,
            }
        }
    }

    fn scan(&mut self, seed: u64, count: usize) -> Result<usize> {
        let mut seen = 0;
        self.iterate(Some(&seed.to_be_bytes()), &mut |_, _| {
            seen += 1;
            seen < count
        });
        if count == 0 { Err(wrong("a scan of nothing")) } else { Ok(seen) }
    }

    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        self.iterate(None, &mut |key, value| {
            visit(key, value);
            true
        });
        Ok(())
    }
}
