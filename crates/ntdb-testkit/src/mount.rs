//! Small file systems that can be filled, for tests that run as root.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::lab::{PATIENCE, TempDir};

/// A mounted tmpfs; unmounted on drop.
#[derive(Debug)]
pub struct SmallDisk {
    _dir: TempDir,
    path: PathBuf,
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a path without NUL")
}

fn mount(path: &Path, flags: libc::c_ulong, options: &str) -> std::io::Result<()> {
    let (kind, target) = (c"tmpfs", c_path(path));
    let options = CString::new(options).expect("options without NUL");
    // SAFETY: all pointers are to strings that outlive the call.
    let result = unsafe {
        libc::mount(
            kind.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            options.as_ptr().cast::<libc::c_void>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

impl SmallDisk {
    /// A file system of `kib` KiB.
    ///
    /// # Panics
    /// If it cannot be mounted: these tests need root, and say so rather than pass untested.
    pub fn new(kib: u64) -> SmallDisk {
        let dir = TempDir::new();
        let path = dir.path().join("disk");
        std::fs::create_dir(&path).expect("a mount point");
        mount(&path, 0, &format!("size={kib}k"))
            .unwrap_or_else(|e| panic!("mount a tmpfs (this test needs root): {e}"));
        SmallDisk { _dir: dir, path }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Changes its size.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn resize(&self, kib: u64) {
        let begun = Instant::now();
        loop {
            match mount(&self.path, libc::MS_REMOUNT, &format!("size={kib}k")) {
                Ok(()) => return,
                // More is in use, of files that were removed too: a process that another test is about to start may still have
                // them open.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) && begun.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(e) => panic!("remount with {kib} KiB: {e}"),
            }
        }
    }

    /// Makes it read-only.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn make_read_only(&self) {
        mount(&self.path, libc::MS_REMOUNT | libc::MS_RDONLY, "").expect("remount read-only");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let target = c_path(&self.path);
        // SAFETY: a string that outlives the call.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}
