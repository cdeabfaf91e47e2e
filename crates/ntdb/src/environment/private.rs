//! Databases that no other process shares: in memory, and read-only views of a file at rest (or as a crash left it).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;

use crate::core::{Backing, Core};
use crate::error::{Error, Result};
use crate::hash::KeyHasher;
use crate::limits;
use crate::options::Options;
use crate::page::header::Header;
use crate::page::meta::META_PAGES;
use crate::shm::Shm;
use crate::storage::filesystem;
use crate::storage::mapping::Mapping;
use crate::storage::ofd::{ATTACH, LockKind, READER};
use crate::types::PageNo;

use super::attach::{Attached, Opening};
use super::companions::Companions;
use super::recover;
use super::sidecar::{Left, SHM_MIN_BYTES, SHM_RESERVE_BYTES};
use super::slot::{go_fenceless, private_session};
use super::{Environment, create, replay};

impl Opening<'_> {
    /// Opens a file at rest (or left by a crash) for reading, without changing anything.
    pub(super) fn read_privately(&self, header: &Header) -> Result<Attached> {
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
        let own = Companions::of(&self.resolved, self.options.shm_dir.as_deref());
        let boot_id = filesystem::boot_id().map_err(|e| self.io("identify this boot", e))?;
        let Left { companions: left, shm: old_shm, is_needed } =
            self.left_behind(&own, header, boot_id)?;
        let known_durable = old_shm.as_ref().and_then(|shm| recover::old_poison(shm, boot_id));
        let chosen = recover::choose_meta(self.data, self.path, header, known_durable, false)?;
        let (meta, index) = (&chosen.meta, chosen.index);
        let left = self.where_logs_are(left, meta);
        let file_pages = self.check_length(header, meta)?;
        let old = self.old_state(old_shm, meta, boot_id, is_needed)?;
        let mapping = Mapping::anonymous(SHM_RESERVE_BYTES, SHM_MIN_BYTES)
            .map_err(|e| self.io("reserve memory", e))?;
        let bytes = mapping.reserved();
        let shm = Shm::new(None, mapping, bytes);
        let core = self.core(header, Backing::Private, shm, file_pages)?;
        recover::initialise(&core, meta, index, file_pages)?;
        // Checkpoints of later users overwrite the meta pages in the file; this view of them stays.
        for number in META_PAGES {
            let page = core.page(PageNo(number))?;
            for at in (0..core.page_size).step_by(HOST_PAGE_BYTES_MIN) {
                // SAFETY: a page of this handle's own view, which nobody else has seen yet. A store makes the kernel's page a copy, if
                // it is really done: the compiler may drop one of what was just loaded, unless it is volatile.
                unsafe {
                    let byte = page.add(at);
                    byte.write_volatile(byte.read_volatile());
                }
            }
        }
        // Nothing is durable of what happens here, so no checkpoint holds pages back; but they are copied before they are changed.
        core.control().checkpoint.durable_epoch.store(u64::MAX, Relaxed);
        core.set_session(private_session(&core)?);
        go_fenceless(&core)?;
        replay::replay(&core, &left, header, meta, old.as_ref())
            .map_err(|error| chosen.explain(error))?;
        self.ofd.unlock(ATTACH).map_err(|e| self.io("unlock the database", e))?;
        Ok(Attached { core, companions: own, shm_id: 0 })
    }
}

/// No kernel copies less than this at a time.
const HOST_PAGE_BYTES_MIN: usize = 4096;

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
    );
    let meta = create::first_meta(header.reserve_percent);
    recover::initialise(&core, &meta, 0, meta.file_pages)?;
    core.control().checkpoint.durable_epoch.store(u64::MAX, Relaxed);
    core.set_session(private_session(&core)?);
    go_fenceless(&core)?;
    let companions = Companions::of(path, None);
    let attached = Attached { core, companions, shm_id: 0 };
    Ok(Arc::new(Environment::new(attached, header.uuid, options)))
}
