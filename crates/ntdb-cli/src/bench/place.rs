//! Where a benchmark puts its database.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Where the database lies, and whether it goes away afterwards.
pub enum Place {
    /// In memory.
    Memory,
    /// In a file that the user has named, which stays.
    Kept(PathBuf),
    /// In a directory of our own, which goes.
    Temporary {
        /// The directory.
        dir: PathBuf,
        /// The file in it.
        file: PathBuf,
        /// Whether it stays after all.
        is_kept: bool,
    },
}

impl Place {
    /// The file that the user has named, or else one in a temporary directory of the benchmark
    /// `name`.
    pub fn new(name: &str, file: Option<&Path>) -> Result<Place, Failure> {
        if let Some(path) = file {
            return Ok(Place::Kept(path.to_path_buf()));
        }
        // A directory of our own: nobody else can put a file where ours and its companions go.
        let parent = std::env::temp_dir();
        let nanoseconds = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.subsec_nanos());
        let dir = parent.join(format!("ntdb-{name}-{}-{nanoseconds}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&dir).map_err(|source| Failure::File {
            name: dir.display().to_string(),
            action: "make the temporary directory",
            source,
        })?;
        remove_on_signal(dir.clone());
        let file = dir.join(format!("{name}.ntdb"));
        Ok(Place::Temporary { dir, file, is_kept: false })
    }

    /// Keeps the temporary directory, because its file is evidence.
    pub fn keep(&mut self) {
        if let Place::Temporary { is_kept, .. } = self {
            *is_kept = true;
        }
    }

    /// Where the file is.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Place::Memory => None,
            Place::Kept(file) | Place::Temporary { file, .. } => Some(file),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Place::Temporary { dir, is_kept: false, .. } = self {
            match fs::remove_dir_all(&*dir) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    eprintln!("ntdb: {}: cannot remove: {error}; remove it by hand", dir.display());
                }
                _ => {}
            }
        }
    }
}

/// Sees to it that `dir` is removed, too, when a signal asks the program to end.
///
/// The signals are blocked for all threads, those to come included, and a thread waits for them;
/// having removed the directory it lets the signal do what it does by default. One that is ignored
/// (`nohup`) stays ignored.
fn remove_on_signal(dir: PathBuf) {
    // SAFETY: the sets and actions are plain memory that the calls fill in or read; a thread that
    // blocks signals and waits for them touches nothing of other threads.
    let signals = unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut signals);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            if action.sa_sigaction == libc::SIG_DFL {
                libc::sigaddset(&mut signals, signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut());
        signals
    };
    let wait = move || {
        let mut signal = 0;
        // SAFETY: as above.
        while unsafe { libc::sigwait(&signals, &mut signal) } != 0 {}
        // The benchmark goes on, and may make a file between two steps of the removal.
        let removed = (0..100).any(|_| fs::remove_dir_all(&dir).is_ok() || !dir.exists());
        if !removed {
            eprintln!("ntdb: {}: cannot remove; remove it by hand", dir.display());
        }
        // SAFETY: as above; raised in this thread, which then takes the default action.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &signals, std::ptr::null_mut());
        }
    };
    // Without the thread the signals must do what they did.
    if std::thread::Builder::new().spawn(wait).is_err() {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &signals, std::ptr::null_mut()) };
    }
}
