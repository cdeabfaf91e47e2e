//! Becoming a user of a database.
//!
//! Under the attach lock, whoever opens a file looks whether any slot lock is held. If so, the others have a shared state, which
//! the data file's attach record and its own path lead to; the opener takes a slot there. If not, the opener is the first: it recovers
//! what the last users left, makes a new shared state and writes the attach record. A read-only opener of a file at rest needs
//! none of this and works on a private copy-on-write view, under a shared lock on the reader byte.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use crate::checkpoint::run::{self, CheckpointGuard, Context, Purpose};
use crate::core::{Backing, Core};
use crate::error::{Error, Result};
use crate::hash::KeyHasher;
use crate::limits::{self, MAX_PROCESSES};
use crate::log::flush::Logs;
use crate::options::Options;
use crate::page::header::{self, Header, HeaderProblem, ProbeProblem};
use crate::page::meta::{META_PAGES, Meta};
use crate::shm::Shm;
use crate::shm::layout::{self, ShmHeader};
use crate::shm::pin::Attachment;
use crate::shm::process::Session;
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file::{self, File, FileId};
use crate::storage::filesystem::{self, Suitability};
use crate::storage::fork;
use crate::storage::fork_local::ForkLocal;
use crate::storage::inherited;
use crate::storage::mapping::{Access, Mapping};
use crate::storage::membarrier;
use crate::storage::ofd::{self, ATTACH, LockKind, OfdFile, READER, REPAIR, slot_byte, slot_bytes};
use crate::transaction::writer::Writer;
use crate::types::{PageNo, SlotId};

use super::companions::{AttachRecord, Companions, data_file, resolve};
use super::recover::{self, OldState};
use super::{Environment, create, registry, repair};

/// Addresses reserved for the shared state; its file is as long as needed.
const SHM_RESERVE_BYTES: u64 = 8 << 30;
/// Room for the arrays that grow, at the least.
const SHM_MIN_BYTES: u64 = layout::GROWN as u64 + (16 << 20);

/// What an opening has found out so far.
struct Opening<'o> {
    options: &'o Options,
    /// As the user named it.
    path: &'o Path,
    /// With symbolic links resolved.
    resolved: PathBuf,
    data: File,
    id: FileId,
    ofd: OfdFile,
}

/// Opens the database at `path`.
pub fn open(path: &Path, options: &Options) -> Result<Arc<Environment>> {
    let resolved = resolve(path)?;
    let deadline = options.deadline();
    for _ in 0..1000 {
        if let Some(environment) = try_open(path, &resolved, options, deadline)? {
            return Ok(environment);
        }
        // The file was replaced or removed while it was being opened.
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Error::Io {
        path: path.to_path_buf(),
        action: "open the database",
        source: std::io::Error::other("the file is replaced faster than it can be opened"),
    })
}

fn try_open(
    path: &Path,
    resolved: &Path,
    options: &Options,
    deadline: Option<Instant>,
) -> Result<Option<Arc<Environment>>> {
    let data = open_data(path, resolved, options)?;
    let id = data.identity().map_err(|e| Error::from_io(path, "identify the database", e))?;
    let usable = |environment: &Environment| {
        let suits = match environment.core.backing {
            Backing::Shared => true,
            _ => options.read_only && environment.core.backing == Backing::SharedReadOnly,
        };
        // One that was inherited and put to rest by the parent is of no use to anybody.
        suits
            && (environment.core.session_if_any().is_some_and(Session::is_current)
                || !is_at_rest(&environment.core))
    };
    let open_here = |registry: &mut registry::Registry| registry::find(registry, id, usable);
    let found = open_here(registry::lock().as_mut().expect("made by lock"));
    if let Some(environment) = found {
        return share(environment, path, options);
    }
    check_file_system(path, resolved, options)?;
    let ofd = match inherited::open(|| OfdFile::open(resolved, options.read_only)) {
        Ok(ofd) => ofd,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::from_io(path, "open the database", e)),
    };
    if ofd.identity() != id {
        return Ok(None);
    }
    let begin = Instant::now();
    let kind = if options.read_only { LockKind::Shared } else { LockKind::Exclusive };
    let mut pause = Duration::from_micros(50);
    // The registry is held from the moment that the attach lock is taken, lest a child be forked that keeps the lock; and it is
    // not held while others are waited for.
    let mut guard = loop {
        let guard = registry::lock();
        if ofd.try_lock(ATTACH, kind).map_err(|e| Error::from_io(path, "lock the database", e))? {
            break guard;
        }
        drop(guard);
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Error::Locked {
                path: path.to_path_buf(),
                what: "the attach lock (somebody opens, recovers or closes the database)",
                owner: 0,
                waited: begin.elapsed(),
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(2));
    };
    let registry = guard.as_mut().expect("made by lock");
    if let Some(environment) = open_here(registry) {
        drop(guard);
        drop(ofd);
        return share(environment, path, options);
    }
    crash_point("attach.locked");
    let now =
        FileId::of_path(resolved).map_err(|e| Error::from_io(path, "identify the database", e))?;
    if now != Some(id) {
        return Ok(None);
    }
    let opening = Opening { options, path, resolved: resolved.to_path_buf(), data, id, ofd };
    let environment = Arc::new(opening.attach()?);
    crash_point("attach.done");
    registry::insert(registry, id, &environment);
    Ok(Some(environment))
}

/// Another handle of an environment that this process has open; `None` if it was inherited, and its parent has just put it to rest.
fn share(
    environment: Arc<Environment>,
    path: &Path,
    options: &Options,
) -> Result<Option<Arc<Environment>>> {
    if options.create_new {
        return Err(Error::AlreadyExists { path: path.to_path_buf() });
    }
    match environment.ensure_session() {
        Ok(()) => Ok(Some(environment)),
        Err(Error::Forked { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the shared state that is mapped here is not what others would use any more.
fn is_at_rest(core: &Core) -> bool {
    core.shm.file().is_some_and(|file| file.is_unlinked().unwrap_or(true))
}

fn open_data(path: &Path, resolved: &Path, options: &Options) -> Result<File> {
    let opened = if options.create_new {
        match File::create_new(resolved, Kind::Data, options.mode) {
            // An empty file may be created anew.
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                File::open(resolved, Kind::Data)
            }
            other => other,
        }
    } else if options.create {
        File::open_or_create(resolved, Kind::Data, options.mode)
    } else if options.read_only {
        File::open_readonly(resolved, Kind::Data)
    } else {
        File::open(resolved, Kind::Data)
    };
    opened.map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::NotFound { path: path.to_path_buf() },
        std::io::ErrorKind::IsADirectory | std::io::ErrorKind::InvalidInput => {
            Error::NotADatabase { path: path.to_path_buf(), reason: e.to_string() }
        }
        _ => Error::from_io(path, "open the database", e),
    })
}

fn check_file_system(path: &Path, resolved: &Path, options: &Options) -> Result<()> {
    if options.allow_unsuitable_file_system {
        return Ok(());
    }
    match filesystem::suitability(resolved) {
        Ok(Suitability::Suitable) => Ok(()),
        Ok(Suitability::Unsuitable(kind)) => {
            Err(Error::UnsuitableFileSystem { path: path.to_path_buf(), kind: kind.to_string() })
        }
        Err(e) => Err(Error::from_io(path, "look at the file system", e)),
    }
}

impl Opening<'_> {
    fn io(&self, action: &'static str, e: std::io::Error) -> Error {
        Error::from_io(self.path, action, e)
    }

    fn attach(self) -> Result<Environment> {
        let header = self.header()?;
        let others = self
            .ofd
            .is_locked_by_other(slot_bytes(MAX_PROCESSES as u16), LockKind::Exclusive)
            .map_err(|e| self.io("look for other users", e))?;
        crash_point("attach.looked");
        if others {
            self.join(&header)
        } else if self.options.read_only {
            self.read_privately(&header)
        } else {
            self.be_first(&header)
        }
    }

    /// Reads the header; makes a new database of an empty file.
    fn header(&self) -> Result<Header> {
        let len = self.data.len().map_err(|e| self.io("measure the data file", e))?;
        let not_a_database =
            |reason: String| Error::NotADatabase { path: self.path.to_path_buf(), reason };
        let mut first = vec![0u8; 4096.min(len as usize)];
        self.data.read_exact_at(&mut first, 0).map_err(|e| self.io("read the header", e))?;
        let blank = first.iter().all(|&byte| byte == 0);
        if self.options.create_new && !(len == 0 || blank && self.is_zero(len)?) {
            return Err(Error::AlreadyExists { path: self.path.to_path_buf() });
        }
        let probed = header::probe(|offset, block| self.data.read_exact_at(block, offset), len);
        match probed {
            Ok(header) => Ok(header),
            Err(ProbeProblem::Io(e)) => Err(self.io("read the header", e)),
            Err(ProbeProblem::Header(HeaderProblem::NewerVersion(found))) => {
                Err(Error::NewerVersion {
                    path: self.path.to_path_buf(),
                    found,
                    supported: limits::FORMAT_VERSION,
                })
            }
            Err(ProbeProblem::Header(HeaderProblem::NotNtdb)) if blank => {
                let create = self.options.create || self.options.create_new;
                if !create {
                    return Err(not_a_database("it is empty".into()));
                }
                if len > 0 && !self.is_new(len)? {
                    return Err(not_a_database("it begins with zeros".into()));
                }
                let header = create::new_header(self.path, self.options)?;
                create::create(&self.data, self.path, &header)?;
                Ok(header)
            }
            Err(ProbeProblem::Header(HeaderProblem::NotNtdb)) => {
                Err(not_a_database(HeaderProblem::NotNtdb.to_string()))
            }
            Err(ProbeProblem::Header(problem)) => Err(Error::Corrupt {
                path: self.path.to_path_buf(),
                place: "header".into(),
                reason: problem.to_string(),
            }),
        }
    }

    fn is_zero(&self, len: u64) -> Result<bool> {
        let mut block = vec![0u8; 1 << 16];
        let mut at = 0;
        while at < len {
            let part = block.len().min((len - at) as usize);
            self.data
                .read_exact_at(&mut block[..part], at)
                .map_err(|e| self.io("read the file", e))?;
            if block[..part].iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
            at += part as u64;
        }
        Ok(true)
    }

    /// Whether the file is all zeros, or the beginning of a database whose creation was cut short: as long as a new one, zeros where
    /// the header goes, and nothing else than what creation writes.
    fn is_new(&self, len: u64) -> Result<bool> {
        if self.is_zero(len)? {
            return Ok(true);
        }
        if len > create::NEW_PAGES as u64 * limits::MAX_PAGE_SIZE as u64 {
            return Ok(false);
        }
        let mut file = vec![0u8; len as usize];
        self.data.read_exact_at(&mut file, 0).map_err(|e| self.io("read the file", e))?;
        Ok((12..=16).any(|shift| create::is_beginning(&file, 1 << shift)))
    }

    /// Joins those who use the database already.
    fn join(self, header: &Header) -> Result<Environment> {
        let record =
            AttachRecord::read(&self.data).map_err(|e| self.io("read the attach record", e))?;
        let dir = self.options.shm_dir.as_deref();
        let mut candidates = vec![Companions::of(&self.resolved, dir)];
        if let Some(record) = &record
            && record.base != self.resolved
        {
            candidates.push(Companions::of(&record.base, dir));
        }
        let mut reason = String::from("no file");
        for companions in &candidates {
            let shm = match open_shm(&companions.shm, Access::ReadWrite) {
                Ok(shm) => shm,
                Err(e) => {
                    if e.kind() == std::io::ErrorKind::PermissionDenied {
                        return Err(Error::from_io(
                            &companions.shm,
                            "join the users of the database, which needs write permission on its shared-memory file",
                            e,
                        ));
                    }
                    reason = e.to_string();
                    continue;
                }
            };
            let found = shm.header();
            let expected = record.as_ref().map_or(found.shm_id, |record| record.shm_id);
            if found.uuid != header.uuid
                || found.inode != self.id.ino
                || found.device != self.id.dev
            {
                reason = "it belongs to another database".into();
            } else if found.shm_id != expected {
                reason = "it is not the one that the others use".into();
            } else {
                self.mark_in_use(&shm, &companions.shm)?;
                let companions = companions.clone();
                return self.finish_join(header, companions, shm);
            }
        }
        Err(Error::ShmMissing {
            path: self.path.to_path_buf(),
            shm: candidates[0].shm.clone(),
            reason,
        })
    }

    fn finish_join(self, header: &Header, companions: Companions, shm: Shm) -> Result<Environment> {
        let file_pages = shm.control().readers.file_pages.load(Acquire);
        let shm_id = shm.header().shm_id;
        let backing =
            if self.options.read_only { Backing::SharedReadOnly } else { Backing::Shared };
        let core = self.core(header, backing, shm, file_pages)?;
        self.take_slot(&core)?;
        crash_point("attach.joined");
        Ok(self.environment(core, header, companions, shm_id, None))
    }

    /// Recovers what the last users left, and makes a new shared state.
    fn be_first(self, header: &Header) -> Result<Environment> {
        let record =
            AttachRecord::read(&self.data).map_err(|e| self.io("read the attach record", e))?;
        let dir = self.options.shm_dir.as_deref();
        let own = Companions::of(&self.resolved, dir);
        let boot_id = filesystem::boot_id().map_err(|e| self.io("identify this boot", e))?;
        let mut old_shm = self.old_shm(&own, header)?;
        let mut left = own.clone();
        if old_shm.is_none()
            && let Some(record) = &record
            && record.base != self.resolved
        {
            let elsewhere = Companions::of(&record.base, dir);
            if let Ok(Some(shm)) = self.old_shm(&elsewhere, header) {
                (old_shm, left) = (Some(shm), elsewhere);
            }
        }
        let has_logs = recover::sync_logs(&left)?;
        if old_shm.is_some() || has_logs || record.is_some() {
            self.data.sync_data().map_err(|e| self.io("sync the data file", e))?;
        }
        let known_durable = old_shm.as_ref().and_then(|shm| recover::old_poison(shm, boot_id));
        let (meta, index) =
            recover::choose_meta(&self.data, self.path, header, known_durable, true)?;
        let left = self.where_logs_are(left, &meta, dir);
        let file_pages = self.check_length(header, &meta)?;
        let old = old_shm.and_then(|shm| OldState::open(shm, &meta, boot_id));
        crash_point("recover.begin");

        let temporary = with_suffix(&own.shm, ".new");
        let (shm, shm_id) = self.new_shm(&temporary, header, &meta, boot_id)?;
        let core = self.core(header, Backing::Shared, shm, file_pages)?;
        recover::initialise(&core, &meta, index, file_pages)?;
        self.hold_for_readers(&core)?;
        self.take_slot(&core)?;
        crash_point("recover.initialised");
        let applied = recover::replay(&core, &left, header, &meta, old.as_ref())?;
        crash_point("recover.replayed");
        let logs = Logs::new(own.logs.clone(), header.uuid);
        if applied || meta.log_salt != 0 {
            let context = Context { core: &core, logs: &logs, base: own.base_bytes(), shm_id };
            let guard = CheckpointGuard::lock(&core, None)?;
            run::run(&context, &guard, Purpose::Recovery)?;
            crash_point("recover.checkpointed");
        }
        recover::remove_logs(&left, &header.uuid)?;
        file::rename(&temporary, &own.shm, Kind::Shm)
            .map_err(|e| Error::from_io(&own.shm, "put the shared-memory file in place", e))?;
        crash_point("recover.renamed");
        if left.shm != own.shm {
            let _ = file::unlink(&left.shm, Kind::Shm);
        }
        let new_record = AttachRecord { shm_id, boot_id, base: own.base.clone() };
        AttachRecord::write(&self.data, Some(&new_record))
            .map_err(|e| self.io("write the attach record", e))?;
        crash_point("recover.recorded");
        Ok(self.environment(core, header, own, shm_id, None))
    }

    /// The shared state that the last users left at a place, if it is theirs.
    fn old_shm(&self, companions: &Companions, header: &Header) -> Result<Option<Shm>> {
        let shm = match open_shm(&companions.shm, Access::ReadOnly) {
            Ok(shm) => shm,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                return self.damaged_shm(companions, e);
            }
            Err(e) => return Err(Error::from_io(&companions.shm, "open", e)),
        };
        let found = shm.header();
        if found.uuid != header.uuid {
            return Err(Error::ForeignSidecar {
                path: self.path.to_path_buf(),
                sidecar: companions.shm.clone(),
                reason: "it names another UUID".into(),
            });
        }
        if found.device == self.id.dev && found.inode == self.id.ino {
            return Ok(Some(shm));
        }
        // A copy of the file, or one that was put in its place: the shared state is about the one before, whose users may live.
        if is_in_use(&shm) {
            return Err(Error::ForeignSidecar {
                path: self.path.to_path_buf(),
                sidecar: companions.shm.clone(),
                reason: "processes use it with a file that was copied from this one, or this one from it".into(),
            });
        }
        Ok(None)
    }

    fn mark_in_use(&self, shm: &Shm, path: &Path) -> Result<()> {
        match shm.file() {
            Some(file) => ofd::mark_in_use(file.as_fd())
                .map_err(|e| Error::from_io(path, "mark the shared-memory file as used", e)),
            None => Ok(()),
        }
    }

    /// Whether the file at the path of `companions`, or the living users of the shared state there, have another file than this one.
    /// A copy that was made of a database in use names its companions, and must not touch them.
    fn are_of_another_file(&self, companions: &Companions) -> bool {
        match FileId::of_path(&companions.base) {
            Ok(Some(id)) if id != self.id => return true,
            _ => {}
        }
        open_shm(&companions.shm, Access::ReadOnly).is_ok_and(|shm| {
            let found = shm.header();
            (found.device != self.id.dev || found.inode != self.id.ino) && is_in_use(&shm)
        })
    }

    /// A shared-memory file without a valid header. After a power cut that is nothing unusual, since it is never synced; in the
    /// same boot it is damage.
    fn damaged_shm(&self, companions: &Companions, e: std::io::Error) -> Result<Option<Shm>> {
        let record =
            AttachRecord::read(&self.data).map_err(|e| self.io("read the attach record", e))?;
        let boot_id = filesystem::boot_id().map_err(|e| self.io("identify this boot", e))?;
        if record.is_none_or(|record| record.boot_id != boot_id || boot_id == [0; 16]) {
            return Ok(None);
        }
        Err(Error::Corrupt {
            path: companions.shm.clone(),
            place: "header".into(),
            reason: format!(
                "{e}; changes that were not synced before the last users died are only there, and removing the file gives them up"
            ),
        })
    }

    /// Logs lie beside the path that the file had then; a file that moved with its logs has them at its new path.
    fn where_logs_are(&self, own: Companions, meta: &Meta, dir: Option<&Path>) -> Companions {
        use std::os::unix::ffi::OsStrExt;
        if meta.log_salt == 0
            || !meta.base_path.starts_with(b"/")
            || own.logs.iter().any(|path| path.exists())
        {
            return own;
        }
        let base = PathBuf::from(std::ffi::OsStr::from_bytes(&meta.base_path));
        let recorded = Companions::of(&base, dir);
        let there = recorded.logs.iter().any(|path| path.exists());
        if there && !self.are_of_another_file(&recorded) { recorded } else { own }
    }

    /// Checks that the file is as long as the meta page says, and that it has no holes, which a full disk would turn into a bus
    /// error. Returns its length in pages.
    fn check_length(&self, header: &Header, meta: &Meta) -> Result<u32> {
        let size = header.page_size as u64;
        let len = self.data.len().map_err(|e| self.io("measure the data file", e))?;
        let needed = meta.file_pages as u64 * size;
        if len < needed {
            return Err(Error::Corrupt {
                path: self.path.to_path_buf(),
                place: format!("byte {len}"),
                reason: format!("the file has been cut; it had {needed} bytes"),
            });
        }
        if !self.options.read_only {
            let allocated =
                self.data.allocated_bytes().map_err(|e| self.io("measure the data file", e))?;
            if allocated < needed {
                self.data
                    .allocate(0, needed)
                    .map_err(|e| self.io("fill the holes of the data file", e))?;
            }
        }
        Ok(meta.file_pages)
    }

    /// While a private reader of an older state holds its byte, nothing that was in the file before is re-used.
    fn hold_for_readers(&self, core: &Core) -> Result<()> {
        let readers = self
            .ofd
            .is_locked_by_other(READER, LockKind::Exclusive)
            .map_err(|e| self.io("look for readers", e))?;
        if readers {
            let pages = core.control().readers.file_pages.load(Relaxed);
            core.control().checkpoint.no_reuse_below.store(pages, Relaxed);
        }
        Ok(())
    }

    /// Opens a file at rest (or left by a crash) for reading, without changing anything.
    fn read_privately(self, header: &Header) -> Result<Environment> {
        let locked = self
            .ofd
            .try_lock(READER, LockKind::Shared)
            .map_err(|e| self.io("lock the database for reading", e))?;
        if !locked {
            return Err(self.io(
                "lock the database for reading",
                std::io::Error::from_raw_os_error(libc::EAGAIN),
            ));
        }
        let dir = self.options.shm_dir.as_deref();
        let own = Companions::of(&self.resolved, dir);
        let boot_id = filesystem::boot_id().map_err(|e| self.io("identify this boot", e))?;
        let old_shm = self.old_shm(&own, header)?;
        let known_durable = old_shm.as_ref().and_then(|shm| recover::old_poison(shm, boot_id));
        let (meta, index) =
            recover::choose_meta(&self.data, self.path, header, known_durable, false)?;
        let left = self.where_logs_are(own.clone(), &meta, dir);
        let file_pages = self.check_length(header, &meta)?;
        let old = old_shm.and_then(|shm| OldState::open(shm, &meta, boot_id));
        let mapping = Mapping::anonymous(SHM_RESERVE_BYTES, SHM_MIN_BYTES)
            .map_err(|e| self.io("reserve memory", e))?;
        let bytes = mapping.reserved();
        let shm = Shm::new(None, mapping, bytes);
        let core = self.core(header, Backing::Private, shm, file_pages)?;
        recover::initialise(&core, &meta, index, file_pages)?;
        // Checkpoints of later users overwrite the page in the file; this view of it stays.
        let bytes = meta.encode(header.page_size);
        // SAFETY: a page of this handle's own view, which nobody else has seen yet.
        unsafe {
            let page = core.page(PageNo(META_PAGES[index as usize]))?;
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), page, bytes.len());
        }
        // Nothing is durable of what happens here, so no checkpoint holds pages back; but they are copied before they are changed.
        core.control().checkpoint.durable_epoch.store(u64::MAX, Relaxed);
        core.set_session(private_session(&core)?);
        go_fenceless(&core)?;
        recover::replay(&core, &left, header, &meta, old.as_ref())?;
        self.ofd.unlock(ATTACH).map_err(|e| self.io("unlock the database", e))?;
        let Opening { options, path, resolved: _, data: _, id, ofd } = self;
        Ok(Environment {
            logs: Logs::new(own.logs.clone(), header.uuid),
            core,
            companions: own,
            shm_id: 0,
            id: Some(id),
            opened_as: Some(path.to_path_buf()),
            checkpoint_log_bytes: options.checkpoint_log_bytes,
            reader_lock: Some(ofd),
            checkpointing: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            background: ForkLocal::default(),
        })
    }

    fn core(&self, header: &Header, backing: Backing, shm: Shm, file_pages: u32) -> Result<Core> {
        let needed = file_pages as u64 * header.page_size as u64;
        let reserve = match self.options.address_space {
            0 => limits::DEFAULT_ADDRESS_SPACE.max(needed.saturating_mul(2)),
            bytes => bytes.max(needed),
        };
        let access = match backing {
            Backing::Shared => Access::ReadWrite,
            Backing::Private => Access::Private,
            _ => Access::ReadOnly,
        };
        let mapping =
            Mapping::file(&self.data, reserve, needed.max(1 << 20), access).map_err(|e| {
                Error::AddressSpace { path: self.path.to_path_buf(), bytes: needed, source: e }
            })?;
        // A descriptor of its own for the core; this one is dropped with the opening.
        let data = if backing == Backing::Shared {
            File::open(&self.resolved, Kind::Data)
        } else {
            File::open_readonly(&self.resolved, Kind::Data)
        }
        .map_err(|e| self.io("open the database", e))?;
        Ok(Core::new(
            self.path.to_path_buf(),
            backing,
            Some(data),
            mapping,
            shm,
            header.page_size,
            KeyHasher::new(&header.hash_key, header.hash_mask),
            header.reserve_percent as u8,
        ))
    }

    /// Makes a new shared-memory file under a temporary name.
    fn new_shm(
        &self,
        path: &Path,
        header: &Header,
        meta: &Meta,
        boot_id: [u8; 16],
    ) -> Result<(Shm, u64)> {
        let failed = |e| Error::from_io(path, "create the shared-memory file", e);
        file::unlink(path, Kind::Shm).map_err(failed)?;
        let file = File::create_new(path, Kind::Shm, 0o600).map_err(failed)?;
        file.allocate(0, layout::GROWN as u64).map_err(|e| {
            let _ = file::unlink(path, Kind::Shm);
            failed(e)
        })?;
        file.adopt_owner_and_mode(&self.data).map_err(failed)?;
        let mut random = [0u8; 16];
        filesystem::random_bytes(&mut random).map_err(failed)?;
        let shm_id = u64::from_le_bytes(random[..8].try_into().expect("eight bytes")).max(1);
        let shm_header = ShmHeader {
            magic: layout::MAGIC,
            version: layout::VERSION,
            reserved: 0,
            shm_id,
            uuid: header.uuid,
            boot_id,
            device: self.id.dev,
            inode: self.id.ino,
            salt: u64::from_le_bytes(random[8..].try_into().expect("eight bytes")),
            start_lsn: meta.replay_from.0,
            meta_sequence: meta.sequence,
        };
        file.write_all_at(&shm_header.to_bytes(), 0).map_err(failed)?;
        crash_point("attach.shm.created");
        let mapping = Mapping::file(&file, SHM_RESERVE_BYTES, SHM_MIN_BYTES, Access::ReadWrite)
            .map_err(|e| Error::AddressSpace {
                path: path.to_path_buf(),
                bytes: SHM_MIN_BYTES,
                source: e,
            })?;
        let shm = Shm::new(Some(file), mapping, layout::GROWN as u64);
        self.mark_in_use(&shm, path)?;
        Ok((shm, shm_id))
    }

    /// Takes a slot in the process table, and repairs what a dead owner of it left.
    fn take_slot(&self, core: &Core) -> Result<()> {
        let ofd = inherited::open(|| OfdFile::open(&self.resolved, self.options.read_only))
            .map_err(|e| self.io("open the database", e))?;
        if ofd.identity() != self.id {
            return Err(self.io("open the database", std::io::Error::other("replaced meanwhile")));
        }
        take_slot(core, ofd)
    }

    fn environment(
        self,
        core: Core,
        header: &Header,
        companions: Companions,
        shm_id: u64,
        reader_lock: Option<OfdFile>,
    ) -> Environment {
        Environment {
            logs: Logs::new(companions.logs.clone(), header.uuid),
            core,
            companions,
            shm_id,
            id: Some(self.id),
            opened_as: Some(self.path.to_path_buf()),
            checkpoint_log_bytes: self.options.checkpoint_log_bytes,
            reader_lock,
            checkpointing: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            background: ForkLocal::default(),
        }
    }
}

/// Whether processes have this shared-memory file for their own; also if that cannot be told.
fn is_in_use(shm: &Shm) -> bool {
    shm.file().is_some_and(|file| ofd::is_in_use(file.as_fd()).unwrap_or(true))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Opens and maps a shared-memory file. A file without a valid header is `InvalidData`.
fn open_shm(path: &Path, access: Access) -> std::io::Result<Shm> {
    let file = match access {
        Access::ReadWrite => File::open(path, Kind::Shm)?,
        _ => File::open_readonly(path, Kind::Shm)?,
    };
    let len = file.len()?;
    let invalid = |reason: &str| {
        Err(std::io::Error::new(std::io::ErrorKind::InvalidData, reason.to_string()))
    };
    if len < layout::GROWN as u64 {
        return invalid("the shared-memory file is cut off");
    }
    let mut bytes = [0u8; layout::HEADER_BYTES + 4];
    file.read_exact_at(&mut bytes, 0)?;
    let Some(header) = ShmHeader::from_bytes(&bytes) else {
        return invalid("the shared-memory file's header is damaged");
    };
    if header.version != layout::VERSION {
        return invalid("the shared-memory file is of another version");
    }
    let mapping = Mapping::file(&file, SHM_RESERVE_BYTES.max(len), SHM_MIN_BYTES.max(len), access)?;
    Ok(Shm::new(Some(file), mapping, len))
}

/// Takes the lowest free slot through `ofd`, which keeps its lock from then on.
fn take_slot(core: &Core, ofd: OfdFile) -> Result<()> {
    let read_only = core.backing == Backing::SharedReadOnly;
    let kind = if read_only { LockKind::Shared } else { LockKind::Exclusive };
    let io = |e| core.io("take a slot in the process table", e);
    // Keeps repairers from taking a slot for dead whose owner has not locked it yet.
    ofd.lock_wait(REPAIR, kind, None).map_err(io)?;
    let Some((slot, free)) = lock_slot(core, &ofd, read_only).map_err(io)? else {
        return Err(Error::TooMany {
            path: core.path.clone(),
            what: "processes",
            limit: MAX_PROCESSES as u64,
        });
    };
    crash_point("attach.slot.locked");
    core.pins.release_process(slot);
    let pins = Attachment::new(pin_table(core), slot).ok_or_else(|| Error::TooMany {
        path: core.path.clone(),
        what: "readers",
        limit: limits::MAX_PINS as u64,
    })?;
    let session = Session { slot, ofd: Some(ofd), pins, fork_generation: fork::generation() };
    core.set_session(Box::new(session));
    if !free {
        repair::repair_slot(core, slot)?;
    }
    let entry = core.shm.process(slot.0 as usize);
    entry.pid.store(std::process::id(), Relaxed);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    entry.since.store(now.map_or(0, |t| t.as_secs()), Relaxed);
    entry.flushing.store(0, Relaxed);
    entry.state.store(ATTACHED, Release);
    if let Some(ofd) = &core.session().ofd {
        ofd.unlock(REPAIR).map_err(io)?;
    }
    crash_point("attach.slot.taken");
    go_fenceless(core)
}

/// `PinWords::fenceless`: somebody is about to pin without fences; reclaimers use the barrier from now on.
const WANTS_FENCELESS: u32 = 1;
/// All reclaimers know.
const FENCELESS: u32 = 2;

/// Leaves the fences of this process's pins to those who reclaim, if the kernel provides for it.
fn go_fenceless(core: &Core) -> Result<()> {
    if !membarrier::register() {
        return Ok(());
    }
    let word = &core.control().pins.fenceless;
    if word.load(SeqCst) != FENCELESS {
        if core.backing == Backing::SharedReadOnly {
            // Taking the writer lock might mean to repair, which it cannot.
            return Ok(());
        }
        let _ = word.compare_exchange(0, WANTS_FENCELESS, SeqCst, SeqCst);
        // A reclaimer that did not see the word yet has finished after this.
        drop(Writer::lock(core, None)?);
        word.store(FENCELESS, SeqCst);
    }
    core.session().pins.go_fenceless();
    Ok(())
}

/// Locks the lowest free slot; says whether its last owner had left it in order.
fn lock_slot(
    core: &Core,
    ofd: &OfdFile,
    read_only: bool,
) -> std::io::Result<Option<(SlotId, bool)>> {
    for index in 0..MAX_PROCESSES as u16 {
        let entry = core.shm.process(index as usize);
        let free = entry.state.load(Acquire) == 0;
        if !read_only {
            if ofd.try_lock(slot_byte(index), LockKind::Exclusive)? {
                return Ok(Some((SlotId(index), free)));
            }
            continue;
        }
        if free && claim_entry(core, ofd, index, 0)? {
            return Ok(Some((SlotId(index), true)));
        }
    }
    // Dead readers keep their entries until a writer repairs them; if nobody does, a reader takes one that needs no repair.
    for index in 0..MAX_PROCESSES as u16 {
        if read_only
            && repair::is_easy(core, SlotId(index))
            && claim_entry(core, ofd, index, ATTACHED)?
        {
            return Ok(Some((SlotId(index), true)));
        }
    }
    Ok(None)
}

/// `ProcessEntry::state` of a process that is attached.
const ATTACHED: u32 = 1;
/// Of one that is being taken by a reader.
const CLAIMED: u32 = 2;

/// Takes the entry and the lock of a slot for a reader. Its lock is a shared one, so the entry decides between two of its kind.
fn claim_entry(core: &Core, ofd: &OfdFile, index: u16, state: u32) -> std::io::Result<bool> {
    let word = &core.shm.process(index as usize).state;
    let taken = || ofd.is_locked_by_other(slot_byte(index), LockKind::Exclusive);
    if word.load(Acquire) != state || taken()? {
        return Ok(false);
    }
    if word.compare_exchange(state, CLAIMED, AcqRel, Relaxed).is_err() {
        return Ok(false);
    }
    // Looked at again: another reader may have taken it, and finished, between the two.
    if !taken()? && ofd.try_lock(slot_byte(index), LockKind::Shared)? {
        return Ok(true);
    }
    word.store(state, Release);
    Ok(false)
}

fn pin_table(core: &Core) -> crate::shm::pin::PinTable {
    let control = core.control();
    // SAFETY: the words lie in the shared state, which the core keeps mapped longer than its session.
    unsafe {
        crate::shm::pin::PinTable::new(
            core.shm.pin_slots(),
            limits::MAX_PINS,
            &control.pins.mark,
            &control.pins.era,
        )
    }
}

/// A session where no other process can be.
fn private_session(core: &Core) -> Result<Box<Session>> {
    // A forked child of an in-memory database finds the locks of its parent's threads; under another slot, they are a
    // dead process's.
    let slot = SlotId((fork::generation() % MAX_PROCESSES as u64) as u16);
    core.pins.release_process(slot);
    let pins = Attachment::new(pin_table(core), slot).ok_or_else(|| Error::TooMany {
        path: core.path.clone(),
        what: "readers",
        limit: limits::MAX_PINS as u64,
    })?;
    Ok(Box::new(Session { slot, ofd: None, pins, fork_generation: fork::generation() }))
}

/// Makes a session for a child that inherited the environment.
#[cold]
pub fn attach_child(environment: &Environment) -> Result<()> {
    let _guard = registry::lock();
    let core = &environment.core;
    if core.session().is_current() {
        return Ok(());
    }
    match core.backing {
        Backing::Memory | Backing::Private => {
            let before = core.session().slot;
            core.set_session(private_session(core)?);
            repair::repair_slot(core, before)?;
            go_fenceless(core)
        }
        Backing::Shared | Backing::SharedReadOnly => {
            let read_only = core.backing == Backing::SharedReadOnly;
            let path = &environment.companions.base;
            let data = data_file(core).as_fd();
            let ofd = inherited::open(|| OfdFile::reopen(data, path, read_only))
                .map_err(|e| core.io("open the database in a forked child", e))?;
            if Some(ofd.identity()) != environment.id {
                return Err(core.io(
                    "open the database in a forked child",
                    std::io::Error::other("the file at its path is another one"),
                ));
            }
            let kind = if read_only { LockKind::Shared } else { LockKind::Exclusive };
            ofd.lock_wait(ATTACH, kind, None).map_err(|e| core.io("lock the database", e))?;
            // If the parent was the last user and is gone, the shared state is at rest, and this mapping of it is not what others
            // would use.
            if is_at_rest(core) {
                return Err(Error::Forked { path: core.path.clone() });
            }
            take_slot(core, ofd)?;
            if let Some(ofd) = &core.session().ofd {
                ofd.unlock(ATTACH).map_err(|e| core.io("unlock the database", e))?;
            }
            Ok(())
        }
    }
}

/// A new database in memory.
pub fn open_in_memory(options: &Options) -> Result<Arc<Environment>> {
    let path = Path::new("(in memory)");
    let header = create::new_header(path, options)?;
    let size = header.page_size as u64;
    let no_memory =
        |bytes: u64| move |e| Error::AddressSpace { path: path.to_path_buf(), bytes, source: e };
    let reserve = match options.address_space {
        0 => limits::DEFAULT_ADDRESS_SPACE,
        bytes => bytes,
    };
    let mapping = Mapping::anonymous(reserve, 64 << 20).map_err(no_memory(64 << 20))?;
    let shm_mapping =
        Mapping::anonymous(SHM_RESERVE_BYTES, SHM_MIN_BYTES).map_err(no_memory(SHM_MIN_BYTES))?;
    for (number, bytes) in create::first_pages(&header) {
        // SAFETY: the mapping is larger than a new database, and nobody else has seen it.
        unsafe {
            let at = mapping.base().add((number as u64 * size) as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
        }
    }
    let bytes = shm_mapping.reserved();
    let shm = Shm::new(None, shm_mapping, bytes);
    let core = Core::new(
        path.to_path_buf(),
        Backing::Memory,
        None,
        mapping,
        shm,
        header.page_size,
        KeyHasher::new(&header.hash_key, header.hash_mask),
        header.reserve_percent as u8,
    );
    let meta = create::first_meta(header.reserve_percent);
    recover::initialise(&core, &meta, 0, meta.file_pages)?;
    core.control().checkpoint.durable_epoch.store(u64::MAX, Relaxed);
    core.set_session(private_session(&core)?);
    go_fenceless(&core)?;
    let companions = Companions::of(path, None);
    Ok(Arc::new(Environment {
        logs: Logs::new(companions.logs.clone(), header.uuid),
        core,
        companions,
        shm_id: 0,
        id: None,
        opened_as: None,
        checkpoint_log_bytes: options.checkpoint_log_bytes,
        reader_lock: None,
        checkpointing: AtomicU64::new(0),
        closed: AtomicBool::new(false),
        background: ForkLocal::default(),
    }))
}
