//! What the file is that is to be opened: a database, a new one, the beginning of one, or something else.
//!
//! A failed opening leaves no file behind that was not there before: what could make it fail is looked at before the data file is
//! created, and a data file that it has created is removed again, under the attach lock, so that nobody else can have come to
//! use it.

use std::os::fd::AsFd;
use std::path::Path;

use crate::error::{Error, Result};
use crate::limits;
use crate::options::Options;
use crate::page::header::{
    self, HEADER_BYTES, HEADER_COPY_PAGE, Header, HeaderProblem, ProbeProblem,
};
use crate::page::meta::Meta;
use crate::storage::failpoint::Kind;
use crate::storage::file::{self, File, FileId};
use crate::storage::filesystem::{self, Suitability};
use crate::storage::ofd::{self, ATTACH, LockKind};

use super::attach::Opening;
use super::companions::Companions;
use super::create;

/// Opens the data file, or creates it if that is asked for; says whether it has been created.
pub(super) fn open_data(path: &Path, resolved: &Path, options: &Options) -> Result<(File, bool)> {
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Error::NotFound { path: path.to_path_buf() },
        std::io::ErrorKind::IsADirectory | std::io::ErrorKind::InvalidInput => {
            Error::NotADatabase { path: path.to_path_buf(), reason: e.to_string() }
        }
        _ => Error::from_io(path, "open the database", e),
    };
    // Never O_CREAT without O_EXCL: in a directory like /tmp the kernel refuses that for a file of another user
    // (fs.protected_regular), even if it may be opened. The loop ends unless others keep creating and unlinking the file in
    // step with it.
    loop {
        let opened = if options.read_only {
            File::open_readonly(resolved, Kind::Data)
        } else {
            File::open(resolved, Kind::Data)
        };
        match opened {
            Err(e)
                if e.kind() == std::io::ErrorKind::NotFound
                    && (options.create || options.create_new) => {}
            other => return other.map(|file| (file, false)).map_err(failed),
        }
        check_file_system(path, resolved.parent().unwrap_or(resolved), options)?;
        Companions::of(resolved, options.shm_dir.as_deref()).check_lengths(path)?;
        match File::create_new(resolved, Kind::Data, options.mode) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e)
                if matches!(
                    e.kind(),
                    std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem
                ) =>
            {
                return Err(Error::from_io(path, "create the database", e));
            }
            // The directory is there, since it has been resolved; but nothing can be created in it (/proc, say).
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::Io {
                    path: path.to_path_buf(),
                    action: "create a database here",
                    source: e,
                });
            }
            other => return other.map(|file| (file, true)).map_err(failed),
        }
    }
}

/// Removes the file that an opening has created and that nobody has made a database of, if nobody else is about to.
pub(super) fn remove_if_empty(data: &File, resolved: &Path) {
    // Where no lock is to be had at all, nobody can have come to use it.
    if matches!(ofd::try_lock(data.as_fd(), ATTACH, LockKind::Exclusive), Ok(false)) {
        return;
    }
    let named = || Some(FileId::of_path(resolved).ok()?? == data.identity().ok()?);
    if matches!(data.len(), Ok(0)) && named() == Some(true) {
        let _ = file::unlink(resolved, Kind::Data);
    }
    let _ = ofd::unlock(data.as_fd(), ATTACH);
}

/// Fails if processes cannot share a file there.
pub(super) fn check_file_system(path: &Path, resolved: &Path, options: &Options) -> Result<()> {
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
    /// Reads the header; makes a new database of an empty file.
    pub(super) fn header(&self) -> Result<Header> {
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
            Ok(header) => {
                // The header, the meta pages and the header's copy are there from the first moment.
                let least = (HEADER_COPY_PAGE as u64 + 1) * header.page_size as u64;
                if len < least { Err(self.cut(len, least)) } else { Ok(header) }
            }
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
                self.is_written.set(true);
                create::create(self.data, self.path, &header).inspect_err(|_| {
                    if len == 0 {
                        // An empty file was there before; if even this fails, it may be created anew all the same.
                        let _ = self.data.truncate(0);
                    }
                })?;
                Ok(header)
            }
            Err(ProbeProblem::Header(HeaderProblem::NotNtdb))
                if len < HEADER_BYTES as u64 && first.starts_with(&header::MAGIC) =>
            {
                Err(self.cut(len, HEADER_BYTES as u64))
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

    fn cut(&self, len: u64, least: u64) -> Error {
        Error::Corrupt {
            path: self.path.to_path_buf(),
            place: format!("byte {len}"),
            reason: format!("the file has been cut; it had {least} bytes at least"),
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

    /// Checks that the file is as long as the meta page says, and that it has no holes, which a full disk would turn into a bus
    /// error. Returns its length in pages.
    pub(super) fn check_length(&self, header: &Header, meta: &Meta) -> Result<u32> {
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
}
