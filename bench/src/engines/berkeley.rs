//! Berkeley DB 5.3, Debian's libdb, in a transactional environment: a hash (`Berkeley<false>`) or a btree (`Berkeley<true>`).
//!
//! A cache of 512 MiB in shared memory, a log buffer of 8 MiB, and deadlocks found at once; a transaction that was the victim of one
//! is made again. Relaxed: `DB_TXN_WRITE_NOSYNC`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

use ntdb_workload::session::{Access, Failed, Result, Session, wrong};

use super::{Engine, Setup};

#[repr(C)]
struct Raw {
    env: *mut c_void,
    db: *mut c_void,
}

type Visit = unsafe extern "C" fn(*mut c_void, *const u8, u32, *const u8, u32);

unsafe extern "C" {
    fn berkeley_open(
        out: *mut Raw,
        dir: *const c_char,
        btree: c_int,
        durable: c_int,
        create: c_int,
    ) -> c_int;
    fn berkeley_close(raw: *mut Raw);
    fn berkeley_begin(raw: *const Raw, txn: *mut *mut c_void) -> c_int;
    fn berkeley_commit(txn: *mut c_void, durable: c_int) -> c_int;
    fn berkeley_abort(txn: *mut c_void);
    fn berkeley_get(
        raw: *const Raw,
        txn: *mut c_void,
        key: *const u8,
        key_len: u32,
        value: *mut u8,
        room: u32,
        len: *mut u32,
    ) -> c_int;
    fn berkeley_put(
        raw: *const Raw,
        txn: *mut c_void,
        key: *const u8,
        key_len: u32,
        value: *const u8,
        len: u32,
    ) -> c_int;
    fn berkeley_each(
        raw: *const Raw,
        buffer: *mut u8,
        buffer_len: u32,
        visit: Visit,
        state: *mut c_void,
    ) -> c_int;
    fn berkeley_is_deadlock(err: c_int) -> c_int;
    fn berkeley_is_absent(err: c_int) -> c_int;
    fn berkeley_is_too_small(err: c_int) -> c_int;
    fn berkeley_text(err: c_int) -> *const c_char;
    fn berkeley_version() -> *const c_char;
}

struct Opened(Raw);

// SAFETY: the handles are opened with DB_THREAD.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened, perhaps in part, which the function looks at; nobody uses it any more.
        unsafe { berkeley_close(&mut self.0) };
    }
}

/// An opened environment with its one database.
#[derive(Clone)]
pub struct Berkeley<const BTREE: bool>(Arc<Opened>);

/// An error of the library.
#[derive(Debug)]
struct Refused(c_int);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        // SAFETY: a constant of the library, or a buffer of its own.
        let text = unsafe { CStr::from_ptr(berkeley_text(self.0)) };
        write!(f, "Berkeley DB: {}", text.to_string_lossy())
    }
}

impl std::error::Error for Refused {}

fn check(err: c_int) -> Result<()> {
    if err == 0 { Ok(()) } else { Err(Box::new(Refused(err))) }
}

fn is_deadlock(error: &Failed) -> bool {
    // SAFETY: compares numbers.
    error.downcast_ref::<Refused>().is_some_and(|e| unsafe { berkeley_is_deadlock(e.0) } != 0)
}

impl<const BTREE: bool> Engine for Berkeley<BTREE> {
    const HAS_PROCESSES: bool = true;
    const HAS_THREADS: bool = true;
    const DURABLE: &str = "the log is synced, by one for several";
    const RELAXED: &str = "DB_TXN_WRITE_NOSYNC: survives the death of processes, after a recovery";
    type Client = Berkeley<BTREE>;

    fn open(path: &Path, setup: Setup) -> Result<Self> {
        let dir = CString::new(path.as_os_str().as_bytes())?;
        let mut opened = Opened(Raw { env: null_mut(), db: null_mut() });
        let (btree, durable, create) = (BTREE.into(), setup.durable.into(), setup.create.into());
        // SAFETY: the name ends with zero; what is opened is closed by `Opened`.
        check(unsafe { berkeley_open(&mut opened.0, dir.as_ptr(), btree, durable, create) })?;
        Ok(Berkeley(Arc::new(opened)))
    }

    fn client(&self) -> Result<Self> {
        Ok(self.clone())
    }

    fn version() -> String {
        // SAFETY: a constant of the library.
        let text = unsafe { CStr::from_ptr(berkeley_version()) }.to_string_lossy();
        let version =
            text.split([' ', ':']).find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
        format!(
            "Berkeley DB {}, {}",
            version.unwrap_or("5.3"),
            if BTREE { "btree" } else { "hash" }
        )
    }
}

impl<const BTREE: bool> Berkeley<BTREE> {
    fn raw(&self) -> *const Raw {
        &self.0.0
    }

    fn get_in(&self, txn: *mut c_void, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        loop {
            let mut len = 0;
            let room = value.capacity();
            // SAFETY: the handles are open; the vector has that much room, and only what was written is made part of it.
            unsafe {
                let (start, key_len) = (value.as_mut_ptr(), key.len() as u32);
                let err = berkeley_get(
                    self.raw(),
                    txn,
                    key.as_ptr(),
                    key_len,
                    start,
                    room as u32,
                    &mut len,
                );
                if berkeley_is_too_small(err) != 0 {
                    value.clear();
                    value.reserve(len as usize);
                    continue;
                }
                if berkeley_is_absent(err) != 0 {
                    return Ok(false);
                }
                check(err)?;
                value.set_len(len as usize);
            }
            return Ok(true);
        }
    }

    fn put_in(&self, txn: *mut c_void, key: &[u8], value: &[u8]) -> Result<()> {
        let (key_len, len) = (key.len() as u32, value.len() as u32);
        // SAFETY: the handles are open, and the bytes are there for this call.
        check(unsafe { berkeley_put(self.raw(), txn, key.as_ptr(), key_len, value.as_ptr(), len) })
    }
}

impl<const BTREE: bool> Access for Berkeley<BTREE> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        loop {
            match self.get_in(null_mut(), key, value) {
                Err(error) if is_deadlock(&error) => {}
                result => return result,
            }
        }
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        loop {
            match self.put_in(null_mut(), key, value) {
                Err(error) if is_deadlock(&error) => {}
                result => return result,
            }
        }
    }
}

struct Inside<'a, const BTREE: bool>(&'a Berkeley<BTREE>, *mut c_void);

impl<const BTREE: bool> Access for Inside<'_, BTREE> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        self.0.get_in(self.1, key, value)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.0.put_in(self.1, key, value)
    }
}

unsafe extern "C" fn visit(
    state: *mut c_void,
    key: *const u8,
    key_len: u32,
    value: *const u8,
    len: u32,
) {
    // SAFETY: `for_each` gives its closure as the state; the library names bytes that are there for this call.
    unsafe {
        let visit = &mut *state.cast::<&mut dyn FnMut(&[u8], &[u8])>();
        visit(
            std::slice::from_raw_parts(key, key_len as usize),
            std::slice::from_raw_parts(value, len as usize),
        );
    }
}

impl<const BTREE: bool> Session for Berkeley<BTREE> {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        let mut records = records.peekable();
        while records.peek().is_some() {
            // Every page that a transaction changes stays locked.
            let part: Vec<_> = records.by_ref().take(1_000).collect();
            self.transaction(false, &mut |all| {
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
            let mut txn = null_mut();
            // SAFETY: the environment is open; the transaction ends in this function.
            check(unsafe { berkeley_begin(self.raw(), &mut txn) })?;
            match body(&mut Inside(self, txn)) {
                // SAFETY: as above.
                Ok(()) => return check(unsafe { berkeley_commit(txn, durable.into()) }),
                Err(error) => {
                    // SAFETY: as above.
                    unsafe { berkeley_abort(txn) };
                    if !is_deadlock(&error) {
                        return Err(error);
                    }
                }
            }
        }
    }

    fn scan(&mut self, _seed: u64, _count: usize) -> Result<usize> {
        Err(wrong("not compared"))
    }

    fn for_each(&mut self, visit_one: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        let mut buffer = vec![0u8; 1 << 20];
        let mut state: &mut dyn FnMut(&[u8], &[u8]) = visit_one;
        let state = std::ptr::from_mut(&mut state).cast();
        let len = buffer.len() as u32;
        // SAFETY: the handles are open; the buffer has that length, and the visitor gets what it expects.
        check(unsafe { berkeley_each(self.raw(), buffer.as_mut_ptr(), len, visit, state) })
    }
}
