//! TDB, Debian's libtdb, with its fcntl locks (`Tdb<false>`) or with robust mutexes (`Tdb<true>`).
//!
//! The hash table has a quarter as many chains as there will be records, and at least 10,000, as Samba's large ones have.
//! Single stores are in the shared map at once. Durable: transactions, which sync. Relaxed: `TDB_NOSYNC`.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ntdb_workload::session::{Access, Result, Session, wrong};

use super::{Engine, Setup};

#[repr(C)]
#[derive(Clone, Copy)]
struct Data {
    start: *const u8,
    len: usize,
}

impl Data {
    fn of(bytes: &[u8]) -> Data {
        Data { start: bytes.as_ptr(), len: bytes.len() }
    }

    /// # Safety
    /// It names bytes that stay as they are for `'a`.
    unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

type Parser = unsafe extern "C" fn(Data, Data, *mut c_void) -> c_int;
type Visitor = unsafe extern "C" fn(*mut Context, Data, Data, *mut c_void) -> c_int;

#[repr(C)]
struct Context {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn tdb_open(
        name: *const c_char,
        hash_size: c_int,
        flags: c_int,
        open_flags: c_int,
        mode: c_uint,
    ) -> *mut Context;
    fn tdb_close(tdb: *mut Context) -> c_int;
    fn tdb_parse_record(tdb: *mut Context, key: Data, parser: Parser, state: *mut c_void) -> c_int;
    fn tdb_store(tdb: *mut Context, key: Data, value: Data, flag: c_int) -> c_int;
    fn tdb_traverse_read(tdb: *mut Context, visitor: Option<Visitor>, state: *mut c_void) -> c_int;
    fn tdb_transaction_start(tdb: *mut Context) -> c_int;
    fn tdb_transaction_commit(tdb: *mut Context) -> c_int;
    fn tdb_transaction_cancel(tdb: *mut Context) -> c_int;
    fn tdb_errorstr(tdb: *mut Context) -> *const c_char;
    fn tdb_runtime_check_for_robust_mutexes() -> bool;
}

const NOSYNC: c_int = 64;
const INCOMPATIBLE_HASH: c_int = 2048;
const MUTEX_LOCKING: c_int = 4096;

/// An opened file.
pub struct Tdb<const MUTEXES: bool>(*mut Context);

/// The process's only client of it.
pub struct Client(*mut Context);

// SAFETY: the library keeps no thread's own state; one thread uses it at a time, for there is one client.
unsafe impl<const MUTEXES: bool> Send for Tdb<MUTEXES> {}
// SAFETY: as above.
unsafe impl<const MUTEXES: bool> Sync for Tdb<MUTEXES> {}
// SAFETY: as above.
unsafe impl Send for Client {}

impl<const MUTEXES: bool> Engine for Tdb<MUTEXES> {
    const HAS_PROCESSES: bool = true;
    const HAS_THREADS: bool = false;
    const DURABLE: &str = "a transaction syncs its recovery area and the file";
    const RELAXED: &str = "TDB_NOSYNC: survives the death of processes";
    type Client = Client;

    fn open(path: &Path, setup: Setup) -> Result<Tdb<MUTEXES>> {
        let name = CString::new(path.join("data.tdb").as_os_str().as_bytes())?;
        let mut flags = INCOMPATIBLE_HASH;
        if !setup.durable {
            flags |= NOSYNC;
        }
        if MUTEXES {
            // SAFETY: no precondition.
            if !unsafe { tdb_runtime_check_for_robust_mutexes() } {
                return Err(wrong("this system has no robust mutexes"));
            }
            flags |= MUTEX_LOCKING;
        }
        let chains = (setup.records / 4).clamp(10_000, 1 << 24) as c_int | 1;
        let open_flags = libc::O_RDWR | if setup.create { libc::O_CREAT } else { 0 };
        // SAFETY: the name ends with zero.
        let tdb = unsafe { tdb_open(name.as_ptr(), chains, flags, open_flags, 0o600) };
        if tdb.is_null() {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Tdb(tdb))
    }

    fn client(&self) -> Result<Client> {
        Ok(Client(self.0))
    }

    fn version() -> String {
        let locks = if MUTEXES { "mutexes" } else { "fcntl locks" };
        format!("TDB {}, {locks}", option_env!("TDB_VERSION").unwrap_or("1.4"))
    }
}

impl<const MUTEXES: bool> Drop for Tdb<MUTEXES> {
    fn drop(&mut self) {
        // SAFETY: open, and the clients are gone.
        unsafe { tdb_close(self.0) };
    }
}

impl Client {
    fn result(&self, status: c_int) -> Result<()> {
        if status >= 0 {
            return Ok(());
        }
        // SAFETY: the context is open, and the text is the library's own constant.
        let text = unsafe { std::ffi::CStr::from_ptr(tdb_errorstr(self.0)) };
        Err(wrong(format!("tdb: {}", text.to_string_lossy())))
    }
}

unsafe extern "C" fn copy(_key: Data, value: Data, state: *mut c_void) -> c_int {
    // SAFETY: `get` gives its vector as the state, and the library the bytes of the value, for this call.
    let (to, bytes) = unsafe { (&mut *state.cast::<Vec<u8>>(), value.bytes()) };
    to.clear();
    to.extend_from_slice(bytes);
    0
}

impl Access for Client {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let state = std::ptr::from_mut(value).cast();
        // SAFETY: the context is open; the parser gets what it expects.
        Ok(unsafe { tdb_parse_record(self.0, Data::of(key), copy, state) } == 0)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        // SAFETY: the context is open, and the bytes are there for this call.
        self.result(unsafe { tdb_store(self.0, Data::of(key), Data::of(value), 0) })
    }
}

unsafe extern "C" fn visit(_: *mut Context, key: Data, value: Data, state: *mut c_void) -> c_int {
    // SAFETY: `for_each` gives its closure as the state, and the library the bytes of the record, for this call.
    unsafe {
        let visit = &mut *state.cast::<&mut dyn FnMut(&[u8], &[u8])>();
        visit(key.bytes(), value.bytes());
    }
    0
}

impl Session for Client {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        for (key, value) in records {
            self.put(&key, &value)?;
        }
        Ok(())
    }

    fn transaction(
        &mut self,
        _durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the context is open; so below.
        self.result(unsafe { tdb_transaction_start(self.0) })?;
        if let Err(error) = body(self) {
            // SAFETY: as above.
            unsafe { tdb_transaction_cancel(self.0) };
            return Err(error);
        }
        // SAFETY: as above.
        self.result(unsafe { tdb_transaction_commit(self.0) })
    }

    fn scan(&mut self, _seed: u64, _count: usize) -> Result<usize> {
        Err(wrong("TDB traverses from the beginning only"))
    }

    fn for_each(&mut self, visit_one: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        let mut state: &mut dyn FnMut(&[u8], &[u8]) = visit_one;
        let state = std::ptr::from_mut(&mut state).cast();
        // SAFETY: the context is open; the visitor gets what it expects.
        self.result(unsafe { tdb_traverse_read(self.0, Some(visit), state) })
    }
}
