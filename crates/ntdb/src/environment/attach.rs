//! Becoming a user of a database.
//!
//! Under the attach lock, whoever opens a file looks whether any slot lock is held. If so, the others have a shared state, which
//! the data file's attach record and its own path lead to; the opener takes a slot there. If not, the opener is the first: it recovers
//! what the last users left, makes a new shared state and writes the attach record. A read-only opener of a file at rest needs
//! none of this and works on a private copy-on-write view, under a shared lock on the reader byte.

use std::cell::Cell;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::{Backing, Core};
use crate::error::{Error, Result};
use crate::hash::KeyHasher;
use crate::limits::{self, MAX_PROCESSES};
use crate::options::Options;
use crate::page::header::Header;
use crate::shm::Shm;
use crate::shm::process::Session;
use crate::storage::failpoint::{Kind, crash_point};
use crate::storage::file::{self, File, FileId};
use crate::storage::inherited;
use crate::storage::mapping::{Access, Mapping};
use crate::storage::ofd::{ATTACH, LockKind, OfdFile, slot_bytes};

use super::companions::{AttachRecord, Companions, data_file, resolve, resolve_shm_dir};
use super::identity::{check_file_system, open_data, remove_if_empty};
use super::sidecar::open_shm;
use super::slot::{go_fenceless, private_session, take_slot};
use super::{Environment, registry, repair};

/// What an opening has found out so far.
pub(super) struct Opening<'o> {
    pub options: &'o Options,
    /// As the user named it.
    pub path: &'o Path,
    /// With symbolic links resolved.
    pub resolved: PathBuf,
    pub data: &'o File,
    pub id: FileId,
    /// Holds the attach lock.
    pub ofd: OfdFile,
    /// Whether this opening has created the data file.
    pub is_new: bool,
    /// Whether this opening has written to that file: nobody has had the attach lock since it was empty.
    pub is_written: Cell<bool>,
}

/// A database that has been attached to.
pub(super) struct Attached {
    pub core: Core,
    pub companions: Companions,
    /// Id of the shared state; 0 if it is private.
    pub shm_id: u64,
}

/// Opens the database at `path`.
pub fn open(path: &Path, options: &Options) -> Result<Arc<Environment>> {
    let resolved = resolve(path)?;
    let shm_dir = resolve_shm_dir(options.shm_dir.as_deref(), &resolved)?;
    let options = &Options { shm_dir, ..options.clone() };
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
    let (data, is_new) = open_data(path, resolved, options)?;
    let id = data.identity().map_err(|e| Error::from_io(path, "identify the database", e))?;
    let file = Found { path, resolved, data: &data, id, is_new };
    let result = open_found(&file, options, deadline);
    if is_new && result.is_err() {
        remove_if_empty(&data, resolved);
    }
    result
}

/// The data file that the path leads to.
struct Found<'o> {
    path: &'o Path,
    resolved: &'o Path,
    data: &'o File,
    id: FileId,
    is_new: bool,
}

fn open_found(
    file: &Found,
    options: &Options,
    deadline: Option<Instant>,
) -> Result<Option<Arc<Environment>>> {
    let &Found { path, resolved, data, id, is_new } = file;
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
                own: false,
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
    let resolved = resolved.to_path_buf();
    let is_written = Cell::new(false);
    let opening = Opening { options, path, resolved, data, id, ofd, is_new, is_written };
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

impl Opening<'_> {
    pub(super) fn io(&self, action: &'static str, e: std::io::Error) -> Error {
        Error::from_io(self.path, action, e)
    }

    fn attach(self) -> Result<Environment> {
        let attached = self.find_company();
        if attached.is_err() && self.is_new && self.is_written.get() {
            // Nobody else can have used it since, nor can now.
            let _ = file::unlink(&self.resolved, Kind::Data);
        }
        let (attached, uuid) = attached?;
        self.choose_log_to_keep(&attached.core);
        let is_private = attached.core.backing == Backing::Private;
        let mut environment = Environment::new(attached, uuid, self.options);
        environment.id = Some(self.id);
        environment.opened_as = Some(self.path.to_path_buf());
        if is_private {
            environment.reader_lock = Some(self.ofd);
        }
        Ok(environment)
    }

    /// Says how much log is to be kept, if this opening does. The next checkpoint stores it, the last close at the latest.
    pub(super) fn choose_log_to_keep(&self, core: &Core) {
        if let (Some(bytes), Backing::Shared) = (self.options.keep_log_bytes, core.backing) {
            let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
            core.control().changes.keep_log_kib.store(kib, Release);
        }
    }

    fn find_company(&self) -> Result<(Attached, [u8; 16])> {
        let header = self.header()?;
        let others = self
            .ofd
            .is_locked_by_other(slot_bytes(MAX_PROCESSES as u16), LockKind::Exclusive)
            .map_err(|e| self.io("look for other users", e))?;
        crash_point("attach.looked");
        let attached = if others {
            self.join(&header)
        } else if self.options.read_only {
            self.read_privately(&header)
        } else {
            self.be_first(&header)
        };
        Ok((attached?, header.uuid))
    }

    /// Joins those who use the database already.
    fn join(&self, header: &Header) -> Result<Attached> {
        let record =
            AttachRecord::read(self.data).map_err(|e| self.io("read the attach record", e))?;
        let candidates = self.places(record.as_ref());
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

    fn finish_join(&self, header: &Header, companions: Companions, shm: Shm) -> Result<Attached> {
        let file_pages = shm.control().readers.file_pages.load(Acquire);
        let shm_id = shm.header().shm_id;
        let backing =
            if self.options.read_only { Backing::SharedReadOnly } else { Backing::Shared };
        let core = self.core(header, backing, shm, file_pages)?;
        self.take_slot(&core)?;
        crash_point("attach.joined");
        Ok(Attached { core, companions, shm_id })
    }

    pub(super) fn core(
        &self,
        header: &Header,
        backing: Backing,
        shm: Shm,
        file_pages: u32,
    ) -> Result<Core> {
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
            Mapping::file(self.data, reserve, needed.max(1 << 20), access).map_err(|e| {
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
        ))
    }

    /// Takes a slot in the process table, and repairs what a dead owner of it left.
    pub(super) fn take_slot(&self, core: &Core) -> Result<()> {
        let ofd = inherited::open(|| OfdFile::open(&self.resolved, self.options.read_only))
            .map_err(|e| self.io("open the database", e))?;
        if ofd.identity() != self.id {
            return Err(self.io("open the database", std::io::Error::other("replaced meanwhile")));
        }
        take_slot(core, ofd, self.options.lock_timeout)
    }
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
            repair::repair_slot(core, before, None)?;
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
            take_slot(core, ofd, None)?;
            if let Some(ofd) = &core.session().ofd {
                ofd.unlock(ATTACH).map_err(|e| core.io("unlock the database", e))?;
            }
            Ok(())
        }
    }
}
