//! What every layer above the storage works on: the mapped data file and the shared state.
//!
//! **Growth.** The data file is mapped once over a large range of addresses that reaches beyond its end; growing the
//! file needs no further mapping. Pages are touched only below `file_pages`, which all processes share, so that nothing
//! ever reads beyond the end. When a file outgrows its range, a larger one is mapped beside it and the old one is kept:
//! borrowed values stay valid.
//!
//! **Verification.** A page that came from disk is verified (checksum, kind, number) before its first use after the
//! database was opened; a byte per page in the shared state remembers that. Pages made since are marked when they are
//! taken. For a bucket the byte tells its number of groups besides, which saves readers a look into its header.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering::*};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::hash::KeyHasher;
use crate::limits::MAX_PINS;
use crate::page::bucket::{self, Bucket};
use crate::page::head::{Kind, PageHead};
use crate::page::record::{Extent, Reason, Record};
use crate::page::reserve::Reserve;
use crate::page::tags::GROUP;
use crate::shm::Shm;
use crate::shm::layout::Control;
use crate::shm::pin::PinTable;
use crate::shm::process::Session;
use crate::shm::segment;
use crate::storage::file::File;
use crate::storage::fork_local::ForkLocal;
use crate::storage::mapping::{self, Access, Mapping};
use crate::types::{Epoch, PageNo, Run, SlotId};

/// How the data is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// A data file shared with other processes.
    Shared,
    /// A data file that this handle may not change, mapped with the shared state of others.
    SharedReadOnly,
    /// A private copy-on-write view of a data file at rest.
    Private,
    /// Memory only.
    Memory,
}

/// States of a page, a byte each in the shared state.
pub mod state {
    /// To be verified before use.
    pub const UNVERIFIED: u8 = 0;
    /// Verified, or made since the database was opened.
    pub const VERIFIED: u8 = 255;
    /// Values from 1 to this one: verified, and a bucket with so many groups and no overflow pages.
    pub const GROUPS_MAX: usize = 254;
}

/// Chunks of the page states for all page numbers that there can be.
const STATE_CHUNKS: usize = 21;
const _: () =
    assert!(((u32::MAX as u64 / segment::FIRST_CHUNK_BYTES + 1).ilog2() as usize) < STATE_CHUNKS);

/// See the module's description.
#[derive(Debug)]
pub struct Core {
    /// The data file's path, for messages.
    pub path: PathBuf,
    /// How the data is held.
    pub backing: Backing,
    /// The data file, unless in memory.
    pub data: Option<File>,
    /// The shared state.
    pub shm: Shm,
    /// Page size in bytes.
    pub page_size: usize,
    page_shift: u32,
    /// Most index bits of a directory page: entries of 4 bytes in half a page, since the header prevents a larger power of two.
    pub max_index_bits: u8,
    /// The hash function of this database.
    pub hasher: KeyHasher,
    /// The pin table.
    pub pins: PinTable,
    /// This process's session; replaced in a forked child, never freed before the core.
    session: AtomicPtr<Session>,
    replaying: AtomicBool,
    suspects: ForkLocal<Vec<SlotId>>,
    /// Goes with the repair byte, whose lock does not exclude the threads of one process.
    pub repairing: ForkLocal<()>,
    has_suspects: AtomicBool,
    /// The epochs that snapshots hold, and of which version of their list: see `space::snapshots`.
    pub snapshot_epochs: ForkLocal<(u64, Arc<Vec<u64>>)>,
    base: AtomicPtr<u8>,
    known_pages: AtomicU32,
    /// Addresses reserved at `base`, in bytes.
    mapped_bytes: AtomicU64,
    mappings: ForkLocal<Vec<Mapping>>,
    /// See [`Core::set_known_array`]; 0, which names no array, if there is none.
    known_array: AtomicU64,
    /// Most groups that a bucket can have, and that a page state can tell.
    max_groups: usize,
    /// For every chunk of the page states, once it is known, where the states would begin if all lay as this chunk does.
    states: [AtomicPtr<AtomicU8>; STATE_CHUNKS],
}

impl Core {
    #[allow(clippy::too_many_arguments, missing_docs)]
    pub fn new(
        path: PathBuf,
        backing: Backing,
        data: Option<File>,
        mapping: Mapping,
        shm: Shm,
        page_size: u32,
        hasher: KeyHasher,
    ) -> Core {
        let control = shm.control();
        // SAFETY: the words lie in the shared state, which the core keeps mapped as long as it lives.
        let pins = unsafe {
            PinTable::new(shm.pin_slots(), MAX_PINS, &control.pins.mark, &control.pins.era)
        };
        Core {
            path,
            backing,
            data,
            shm,
            page_size: page_size as usize,
            page_shift: page_size.trailing_zeros(),
            max_index_bits: (page_size / 8).trailing_zeros() as u8,
            hasher,
            pins,
            session: AtomicPtr::new(std::ptr::null_mut()),
            replaying: AtomicBool::new(false),
            suspects: ForkLocal::default(),
            repairing: ForkLocal::default(),
            has_suspects: AtomicBool::new(false),
            snapshot_epochs: ForkLocal::default(),
            base: AtomicPtr::new(mapping.base()),
            known_pages: AtomicU32::new(0),
            mapped_bytes: AtomicU64::new(mapping.reserved()),
            mappings: ForkLocal::new(vec![mapping]),
            known_array: AtomicU64::new(0),
            max_groups: bucket::max_groups(page_size as usize).min(state::GROUPS_MAX),
            states: [const { AtomicPtr::new(std::ptr::null_mut()) }; STATE_CHUNKS],
        }
    }

    /// What inserts leave of a page. It changes under the writer lock.
    #[inline(always)]
    pub fn reserve(&self) -> Reserve {
        Reserve::from_percent(self.control().readers.reserve_percent.load(Relaxed))
    }

    /// The words that all processes share.
    #[inline]
    pub fn control(&self) -> &Control {
        self.shm.control()
    }

    /// This process's session.
    #[inline]
    pub fn session(&self) -> &Session {
        let session = self.session.load(Acquire);
        assert!(!session.is_null(), "not attached");
        // SAFETY: set by `set_session` from a box, and freed only when the core is dropped.
        unsafe { &*session }
    }

    /// The session, if there is one yet.
    pub fn session_if_any(&self) -> Option<&Session> {
        // SAFETY: as above.
        unsafe { self.session.load(Acquire).as_ref() }
    }

    /// Makes `session` this process's. The one before, a parent's, is leaked: threads may still look at it.
    pub fn set_session(&self, session: Box<Session>) {
        self.session.store(Box::into_raw(session), Release);
    }

    /// This process's slot.
    #[inline]
    pub fn slot(&self) -> SlotId {
        self.session().slot
    }

    /// Whether the process in `slot` lives.
    pub fn is_alive(&self, slot: SlotId) -> bool {
        self.session().is_alive(slot)
    }

    /// Remembers a process that was found dead, to be repaired when no lock is held.
    #[cold]
    pub fn suspect(&self, slot: SlotId) {
        self.suspects.lock().push(slot);
        self.has_suspects.store(true, Release);
    }

    /// Whether processes were found dead and not repaired yet.
    #[inline]
    pub fn has_suspects(&self) -> bool {
        self.has_suspects.load(Relaxed)
    }

    /// The processes that were found dead since the last call.
    #[inline]
    pub fn take_suspects(&self) -> Vec<SlotId> {
        if !self.has_suspects.load(Relaxed) {
            return Vec::new();
        }
        self.has_suspects.store(false, Relaxed);
        std::mem::take(&mut *self.suspects.lock())
    }

    /// Process id of the process in `slot`, as it sees itself, for messages.
    pub fn pid_of(&self, slot: SlotId) -> u32 {
        if (slot.0 as usize) < crate::limits::MAX_PROCESSES {
            self.shm.process(slot.0 as usize).pid.load(Relaxed)
        } else {
            0
        }
    }

    /// The error of a lock that was not to be had.
    #[cold]
    pub fn locked(&self, what: &'static str, owner: Option<SlotId>, waited: Duration) -> Error {
        let own = owner.is_some() && owner == self.session_if_any().map(|session| session.slot);
        let owner = owner.map_or(0, |slot| self.pid_of(slot));
        Error::Locked { path: self.path.clone(), what, owner, own, waited }
    }

    /// Whether changes go to a redo log.
    #[inline]
    pub fn is_logged(&self) -> bool {
        self.backing == Backing::Shared && !self.replaying.load(Relaxed)
    }

    /// Whether operations come from the log itself.
    pub fn is_replaying(&self) -> bool {
        self.replaying.load(Relaxed)
    }

    /// Says whether operations come from the log itself, and are not to be logged again.
    pub fn set_replaying(&self, yes: bool) {
        self.replaying.store(yes, Relaxed);
    }

    /// The current freeze epoch.
    #[inline]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.control().writer.epoch.load(Relaxed))
    }

    /// An error about a damaged page.
    #[cold]
    pub fn corrupt(&self, page: PageNo, reason: impl Into<String>) -> Error {
        Error::Corrupt {
            path: self.path.clone(),
            place: format!("page {}", page.0),
            reason: reason.into(),
        }
    }

    /// An error about damaged shared state.
    #[cold]
    pub fn corrupt_shm(&self, reason: &str) -> Error {
        Error::Corrupt {
            path: self.path.clone(),
            place: "shared state".into(),
            reason: reason.into(),
        }
    }

    /// A system error about the data file.
    #[cold]
    pub fn io(&self, action: &'static str, source: std::io::Error) -> Error {
        Error::from_io(&self.path, action, source)
    }

    /// Address of page `number`, which must be within the file.
    #[inline]
    pub fn page(&self, number: PageNo) -> Result<*mut u8> {
        if number.0 >= self.known_pages.load(Acquire) {
            self.learn_growth(number, 1)?;
        }
        // SAFETY: within the mapping, as known_pages promises.
        Ok(unsafe { self.base.load(Acquire).add((number.0 as usize) << self.page_shift) })
    }

    /// Address of a run of pages, which must be within the file.
    pub fn run(&self, first: PageNo, pages: u32) -> Result<*mut u8> {
        let Some(last) = first.0.checked_add(pages.max(1) - 1) else {
            return Err(
                self.corrupt(first, "a run of pages reaches beyond the largest page number")
            );
        };
        if last >= self.known_pages.load(Acquire) {
            self.learn_growth(first, pages.max(1))?;
        }
        self.page(first)
    }

    /// Checks that a run of pages lies within the file.
    #[inline]
    pub fn check_run(&self, run: Run) -> Result<()> {
        let end = run.first.0 as u64 + run.len as u64;
        if end > self.known_pages.load(Acquire) as u64 {
            self.learn_growth(run.first, run.len)?;
        }
        Ok(())
    }

    #[cold]
    fn learn_growth(&self, first: PageNo, pages: u32) -> Result<()> {
        let file_pages = self.control().readers.file_pages.load(Acquire);
        let end = first.0 as u64 + pages as u64;
        if end > file_pages as u64 {
            return Err(
                self.corrupt(first, format!("referred to, but the file has {file_pages} pages"))
            );
        }
        let bytes = (file_pages as u64) << self.page_shift;
        if matches!(self.backing, Backing::Shared | Backing::SharedReadOnly) {
            let data = self.data.as_ref().expect("a shared database has a file");
            let len = data.len().map_err(|e| self.io("measure the data file", e))?;
            if len < bytes {
                return Err(
                    self.corrupt(first, format!("the file has been cut to {len} bytes of {bytes}"))
                );
            }
        }
        self.secure_bytes(bytes)?;
        self.known_pages.fetch_max(file_pages, AcqRel);
        Ok(())
    }

    /// Maps a range large enough for `bytes` beside the old one.
    fn remap(&self, mappings: &mut Vec<Mapping>, bytes: u64) -> Result<()> {
        let access = match self.backing {
            Backing::Shared => Access::ReadWrite,
            Backing::SharedReadOnly => Access::ReadOnly,
            Backing::Private | Backing::Memory => {
                return Err(
                    self.address_space(bytes, std::io::Error::from_raw_os_error(libc::ENOMEM))
                );
            }
        };
        let data = self.data.as_ref().expect("a shared database has a file");
        let mapping = Mapping::file(data, bytes.saturating_mul(2), bytes, access)
            .map_err(|e| self.address_space(bytes, e))?;
        // The base first: whoever sees the larger size finds the larger mapping.
        self.base.store(mapping.base(), Release);
        self.mapped_bytes.store(mapping.reserved(), Release);
        mappings.push(mapping);
        Ok(())
    }

    #[cold]
    fn address_space(&self, bytes: u64, source: std::io::Error) -> Error {
        Error::AddressSpace { path: self.path.clone(), bytes, source }
    }

    /// Makes sure, before the file grows, that its pages up to `file_pages` can be mapped.
    pub fn secure_mapping(&self, file_pages: u32) -> Result<()> {
        self.secure_bytes((file_pages as u64) << self.page_shift)
    }

    fn secure_bytes(&self, bytes: u64) -> Result<()> {
        if bytes > self.mapped_bytes.load(Acquire) {
            let mut mappings = self.mappings.lock();
            if bytes > self.mapped_bytes.load(Acquire) {
                self.remap(&mut mappings, bytes)?;
            }
        }
        Ok(())
    }

    /// Populates a run of fresh pages, so that the first stores into it need no page fault each.
    pub fn populate(&self, first: PageNo, pages: u32) {
        let Ok(at) = self.data_place(self.place(first, 0), 1) else { return };
        // SAFETY: the pages are within the file, and mapped; mappings live as long as the core.
        unsafe { mapping::populate(at, (pages as usize) << self.page_shift) };
    }

    /// Address of `bytes` bytes at `offset` of the data file, which must be within it.
    #[inline]
    pub fn data_place(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        let last = offset.saturating_add(bytes.max(1) - 1) >> self.page_shift;
        if last >= self.known_pages.load(Acquire) as u64 {
            let last = PageNo(u32::try_from(last).unwrap_or(u32::MAX));
            self.learn_growth(last, 1)?;
        }
        // SAFETY: within the mapping, as known_pages promises.
        Ok(unsafe { self.base.load(Acquire).add(offset as usize) })
    }

    /// Byte offset of an address inside page `number`.
    #[inline]
    pub fn place(&self, number: PageNo, within: usize) -> u64 {
        ((number.0 as u64) << self.page_shift) + within as u64
    }

    /// The state of page `number`: see [`state`].
    #[inline(always)]
    fn page_state(&self, number: PageNo) -> Option<&AtomicU8> {
        let chunk = segment::chunk_of(number.0 as u64);
        let start = self.states[chunk].load(Relaxed);
        if start.is_null() {
            return self.find_states(number);
        }
        // SAFETY: the chunk is backed and holds this byte; chunks never move.
        Some(unsafe { &*start.wrapping_add(number.0 as usize) })
    }

    /// The state of page `number`, as far as this process has come across its chunk; else as if it were to be verified.
    #[inline(always)]
    fn quick_state(&self, number: PageNo) -> u8 {
        let start = self.states[segment::chunk_of(number.0 as u64)].load(Relaxed);
        if start.is_null() {
            return state::UNVERIFIED;
        }
        // SAFETY: the chunk is backed and holds this byte; chunks never move.
        unsafe { &*start.wrapping_add(number.0 as usize) }.load(Relaxed)
    }

    #[cold]
    fn find_states(&self, number: PageNo) -> Option<&AtomicU8> {
        let at = self.shm.element(&self.control().page_states, number.0 as u64)?;
        let chunk = segment::chunk_of(number.0 as u64);
        self.states[chunk].store(at.wrapping_sub(number.0 as usize).cast(), Relaxed);
        // SAFETY: backed, as `element` says; atomics may be shared.
        Some(unsafe { &*at.cast::<AtomicU8>() })
    }

    /// Whether page `number` needs no verification any more.
    #[inline(always)]
    pub fn is_verified(&self, number: PageNo) -> bool {
        self.page_state(number).is_some_and(|state| state.load(Relaxed) != state::UNVERIFIED)
    }

    /// Remembers that page `number` is good.
    pub fn set_verified(&self, number: PageNo) {
        if let Some(word) = self.page_state(number) {
            // Not over a number of groups.
            let _ = word.compare_exchange(state::UNVERIFIED, state::VERIFIED, Relaxed, Relaxed);
        }
    }

    /// Remembers that the contents of `run` are new, and so need no verification.
    pub fn set_new(&self, run: Run) -> Result<()> {
        for page in run.first.0..run.first.0.saturating_add(run.len) {
            self.page_state(PageNo(page))
                .ok_or_else(|| self.corrupt_shm("a page lies outside the page states"))?
                .store(state::VERIFIED, Relaxed);
        }
        Ok(())
    }

    /// Remembers the groups of a bucket without overflow pages, so that readers need not look into its header.
    #[inline]
    fn note_groups(&self, number: PageNo, bucket: &Bucket) {
        let groups = bucket.slots() / GROUP;
        if let Some(word) = self.page_state(number)
            && word.load(Relaxed) == state::VERIFIED
            && groups <= state::GROUPS_MAX
            && bucket.head().next().is_none()
        {
            word.store(groups as u8, Relaxed);
        }
    }

    /// The bucket at page `number`, if its page state says all that a reader needs to know.
    #[inline(always)]
    pub fn quick_bucket(&self, number: PageNo) -> Option<Bucket<'_>> {
        let groups = self.quick_state(number) as usize;
        // Zero wraps to more than any number of groups.
        if number.0 >= self.known_pages.load(Acquire) || groups.wrapping_sub(1) >= self.max_groups {
            return None;
        }
        // SAFETY: within the mapping, as known_pages promises, which stays; the caller's pin keeps the page from being re-used; so
        // many groups fit in a page.
        unsafe {
            let page = self.base.load(Acquire).add((number.0 as usize) << self.page_shift);
            Some(Bucket::with_groups(page, self.page_size, groups))
        }
    }

    /// Page `number`, if it is known to be within the file, and verified.
    #[inline(always)]
    pub fn quick_page(&self, number: PageNo) -> Option<*const u8> {
        if number.0 >= self.known_pages.load(Acquire)
            || self.quick_state(number) == state::UNVERIFIED
        {
            return None;
        }
        // SAFETY: within the mapping, as known_pages promises.
        Some(unsafe { self.base.load(Acquire).add((number.0 as usize) << self.page_shift) })
    }

    /// The root array that begins at `first`, if `root` is the root word for which [`Core::set_known_array`] was called last:
    /// then all of it is within the mapping.
    #[inline(always)]
    pub fn known_array(&self, root: u64, first: PageNo) -> Option<*const u8> {
        if !self.knows_array(root) {
            return None;
        }
        // SAFETY: it was found to be within the file, which was mapped then; ranges only grow.
        Some(unsafe { self.base.load(Acquire).add((first.0 as usize) << self.page_shift) })
    }

    /// Whether `root` is the root word for which [`Core::set_known_array`] was called last.
    #[inline(always)]
    pub fn knows_array(&self, root: u64) -> bool {
        self.known_array.load(Acquire) == root
    }

    /// Remembers that `root` names a root array that has been verified and lies within the file: then nobody need look at its
    /// header, or ask where the file ends, before using one of its entries.
    pub fn set_known_array(&self, root: u64) {
        self.known_array.store(root, Release);
    }

    /// Address of page `number`, verified to be of `kind`.
    #[inline]
    pub fn tree_page(&self, number: PageNo, kind: Kind) -> Result<*mut u8> {
        let page = self.page(number)?;
        if !self.is_verified(number) {
            self.verify(number, kind)?;
        }
        Ok(page)
    }

    /// The header of a page.
    #[inline]
    pub fn head(&self, number: PageNo) -> Result<&PageHead> {
        let page = self.page(number)?;
        // SAFETY: within the mapping, which stays; atomics only.
        Ok(unsafe { PageHead::at(page) })
    }

    #[cold]
    fn verify(&self, number: PageNo, kind: Kind) -> Result<()> {
        self.verify_page(number, kind)?;
        self.set_verified(number);
        Ok(())
    }

    /// Verifies a page that a checkpoint has written: kind, number, checksum.
    pub fn verify_page(&self, number: PageNo, kind: Kind) -> Result<()> {
        let head = self.head(number)?;
        if head.kind.load(Relaxed) != kind as u8 {
            return Err(self.corrupt(
                number,
                format!("is of kind {}, expected {kind:?}", head.kind.load(Relaxed)),
            ));
        }
        if head.number.load(Relaxed) != number.0 {
            return Err(
                self.corrupt(number, format!("says that it is page {}", head.number.load(Relaxed)))
            );
        }
        let pages = head.run_pages.load(Relaxed);
        if pages == 0 || (pages > 1 && kind != Kind::RootArray) {
            return Err(self.corrupt(number, "has an impossible length"));
        }
        let page = self.run(number, pages)?;
        // SAFETY: the run is within the mapping; frozen pages don't change (a racing writer could only be at work on a page that
        // it made itself, which is marked verified).
        let bytes = unsafe {
            std::slice::from_raw_parts(page.add(4), ((pages as usize) << self.page_shift) - 4)
        };
        let found = crc32c::crc32c(bytes);
        let stored = head.checksum.load(Relaxed);
        if found != stored {
            return Err(
                self.corrupt(number, format!("checksum {found:08x}, expected {stored:08x}"))
            );
        }
        Ok(())
    }

    /// The bucket page `number`.
    #[inline]
    pub fn bucket(&self, number: PageNo) -> Result<Bucket<'_>> {
        let page = self.tree_page(number, Kind::Bucket)?;
        // SAFETY: within the mapping, which stays; the caller holds a pin or the writer lock, so that the page is not re-used.
        let bucket = unsafe { Bucket::at(page, self.page_size) }
            .map_err(|reason| self.corrupt(number, reason))?;
        self.note_groups(number, &bucket);
        Ok(bucket)
    }

    /// Address of the `len` used bytes of an extent, verified.
    pub fn extent(&self, extent: &Extent, len: u64) -> Result<*const u8> {
        let bytes = (extent.pages as u64) << self.page_shift;
        if extent.first.is_none() || len > bytes {
            return Err(self.corrupt(extent.first, "an extent is shorter than its value"));
        }
        let start = self.run(extent.first, extent.pages)?.cast_const();
        if !self.is_verified(extent.first) {
            self.verify_extent(extent, len)?;
            self.set_verified(extent.first);
        }
        Ok(start)
    }

    /// Verifies the checksum of an extent of which `len` bytes are used.
    #[cold]
    pub fn verify_extent(&self, extent: &Extent, len: u64) -> Result<()> {
        if extent.first.is_none() || len > (extent.pages as u64) << self.page_shift {
            return Err(self.corrupt(extent.first, "an extent is shorter than its value"));
        }
        let start = self.run(extent.first, extent.pages)?;
        // SAFETY: within the mapping; the bytes before a published length never change.
        let found = crc32c::crc32c(unsafe { std::slice::from_raw_parts(start, len as usize) });
        if found != extent.crc {
            return Err(self.corrupt(
                extent.first,
                format!("value checksum {found:08x}, expected {:08x}", extent.crc),
            ));
        }
        Ok(())
    }

    /// The key of a record.
    ///
    /// The caller holds a pin or the writer lock for as long as it uses the bytes.
    #[inline]
    pub fn key_of(&self, record: &Record) -> Result<&[u8]> {
        let key = match record.extent() {
            Some(extent) if record.key_is_in_extent() => {
                self.extent(&extent, record.extent_bytes())?
            }
            _ => record.key,
        };
        // SAFETY: the parser (or `extent`) checked the bounds; published bytes don't change.
        Ok(unsafe { std::slice::from_raw_parts(key, record.key_len as usize) })
    }

    /// The value of a record. As [`Core::key_of`].
    #[inline]
    pub fn value_of(&self, record: &Record) -> Result<&[u8]> {
        let value = match record.extent() {
            None => record.key.wrapping_add(record.key_len as usize),
            Some(extent) => {
                let start = self.extent(&extent, record.extent_bytes())?;
                if record.key_is_in_extent() {
                    start.wrapping_add(record.key_len as usize)
                } else {
                    start
                }
            }
        };
        // SAFETY: as above.
        Ok(unsafe { std::slice::from_raw_parts(value, record.value_len as usize) })
    }

    /// Whether `record` holds `key`.
    #[inline]
    pub fn is_key(&self, record: &Record, hash: u64, key: &[u8]) -> Result<bool> {
        if record.key_len != key.len() as u64 {
            return Ok(false);
        }
        if let crate::page::record::Form::LongKey { hash: stored, .. } = record.form
            && stored != hash
        {
            return Ok(false);
        }
        Ok(self.key_of(record)? == key)
    }

    /// The hash of a record's key.
    pub fn hash_of(&self, record: &Record) -> Result<u64> {
        match record.form {
            crate::page::record::Form::LongKey { hash, .. } => Ok(hash),
            _ => Ok(self.hasher.hash(self.key_of(record)?)),
        }
    }

    /// Turns the reason of a damaged page into an error.
    pub fn damage(&self, number: PageNo) -> impl Fn(Reason) -> Error + '_ {
        move |reason| self.corrupt(number, reason)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let session = *self.session.get_mut();
        if !session.is_null() {
            // SAFETY: came from a box, and nobody uses the core any more.
            drop(unsafe { Box::from_raw(session) });
        }
    }
}
