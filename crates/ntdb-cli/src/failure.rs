//! The program's one error type: what happened, what to do, and the exit status it means.
//!
//! | status | meaning |
//! | --- | --- |
//! | 0 | done, found |
//! | 1 | not found, or already there; `recover`: something is lost |
//! | 2 | wrong usage |
//! | 3 | any other error: no such database, malformed input, input and output |
//! | 4 | the database is damaged, or the file is none |
//! | 5 | a lock was not free in time; `recover`: the database is in use |
//! | 6 | no room: disk, quota or file-size limit |
//! | 7 | permission denied |

use std::fmt;
use std::io;

/// Why a command ends with a status other than 0.
#[derive(Debug)]
pub enum Failure {
    /// The answer is no: the key is absent, or already there. No error, but status 1.
    No(String),
    /// The same, where the status says it all.
    SilentNo,
    /// The command line asks for something impossible.
    Usage(String),
    /// The engine reported an error.
    Engine(ntdb::Error),
    /// The system refused to read or write something other than the database.
    File {
        /// The file, or "standard output".
        name: String,
        /// What was being done, as a verb.
        action: &'static str,
        /// The system's own error.
        source: io::Error,
    },
    /// The input of `load` is not in the format it was said to be in.
    Malformed {
        /// The input file.
        name: String,
        /// The line, counted from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// `check` found damage; it has been printed.
    Damaged(String),
    /// A benchmark or another part of this program got an answer that cannot be.
    Wrong(String),
    /// A worker process of `load` has failed, with its own status and message.
    Worker {
        /// The status that the worker would have ended with.
        status: u8,
        /// Its message.
        message: String,
    },
    /// Nobody reads our output any more.
    OutputClosed,
    /// A signal has ended what would have gone on.
    Signal(i32),
}

impl Failure {
    /// What standard output reported.
    pub fn from_stdout(source: io::Error) -> Failure {
        if source.kind() == io::ErrorKind::BrokenPipe {
            Failure::OutputClosed
        } else {
            Failure::File { name: "standard output".into(), action: "write", source }
        }
    }

    /// Whether this is an answer, not an error; `--quiet` leaves such messages out.
    pub fn is_plain_no(&self) -> bool {
        matches!(
            self,
            Failure::No(_) | Failure::SilentNo | Failure::Engine(ntdb::Error::AlreadyExists { .. })
        )
    }

    /// The exit status, as the table above says.
    pub fn exit_status(&self) -> u8 {
        match self {
            Failure::No(_) | Failure::SilentNo => 1,
            Failure::Usage(_) => 2,
            Failure::Engine(error) => engine_status(error),
            Failure::File { source, .. } => match source.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => 6,
                Some(libc::EACCES | libc::EPERM | libc::EROFS) => 7,
                _ => 3,
            },
            Failure::Malformed { .. } | Failure::Wrong(_) => 3,
            Failure::Damaged(_) => 4,
            Failure::Worker { status, .. } => *status,
            Failure::OutputClosed => 128 + libc::SIGPIPE as u8,
            Failure::Signal(signal) => 128 + *signal as u8,
        }
    }
}

fn engine_status(error: &ntdb::Error) -> u8 {
    use ntdb::Error::*;
    match error {
        AlreadyExists { .. } => 1,
        InvalidOption { .. } => 2,
        NotADatabase { .. } | Corrupt { .. } | LogMissing { .. } | ShmLost { .. } => 4,
        Locked { .. } | InUse { .. } => 5,
        Full { .. } => 6,
        NotDurable { source, .. } => engine_status(source),
        Permission { .. } | ReadOnly { .. } => 7,
        // A missing database is not "not found": a script that asks for a key must not take a
        // mistyped path for an absent key.
        _ => 3,
    }
}

/// What to do about an engine error in the words of the command line, where the library's own text
/// names its own options.
fn advice(error: &ntdb::Error) -> Option<&'static str> {
    use ntdb::Error::*;
    match error {
        Locked { .. } => Some("the limit is --lock-timeout SECONDS"),
        ReadOnly { .. } => Some("leave out --read-only"),
        UnsuitableFileSystem { .. } => Some("the option is --allow-unsuitable-file-system"),
        AddressSpace { .. } => Some("the option is --address-space BYTES"),
        _ => None,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::No(text)
            | Failure::Usage(text)
            | Failure::Damaged(text)
            | Failure::Wrong(text)
            | Failure::Worker { message: text, .. } => f.write_str(text),
            Failure::SilentNo => f.write_str("no"),
            Failure::Engine(ntdb::Error::NotFound { path }) => write!(
                f,
                "{}: no such database; `ntdb create` makes one, and so does --create where \
                 something is stored",
                path.display()
            ),
            Failure::Engine(ntdb::Error::AlreadyExists { path }) => {
                write!(f, "{}: already exists, and is left as it is", path.display())
            }
            Failure::Engine(ntdb::Error::ShmLost { path, shm, reason }) => write!(
                f,
                "{}: its last users died, and changes that were not synced are only in their \
                 shared-memory file {}, which cannot be used ({reason}); make it accessible again, \
                 or go on without those changes with --give-up-unsynced",
                path.display(),
                shm.display()
            ),
            Failure::Engine(error) => match advice(error) {
                Some(advice) => write!(f, "{error} ({advice})"),
                None => write!(f, "{error}"),
            },
            Failure::File { name, action, source } => {
                write!(f, "{name}: cannot {action}: {source}")
            }
            Failure::Malformed { name, line, reason } => write!(
                f,
                "{name}: line {line}: {reason}; the records before this line are stored: mend it \
                 and load the whole input again"
            ),
            Failure::OutputClosed => f.write_str("standard output: nobody reads it any more"),
            Failure::Signal(signal) => write!(f, "ended by signal {signal}"),
        }
    }
}

impl From<ntdb::Error> for Failure {
    fn from(error: ntdb::Error) -> Self {
        Failure::Engine(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn statuses_follow_the_table() {
        let path = PathBuf::from("x");
        let os = |errno| io::Error::from_raw_os_error(errno);
        let engine: [(ntdb::Error, u8); 7] = [
            (ntdb::Error::AlreadyExists { path: path.clone() }, 1),
            (ntdb::Error::InvalidOption { what: "page size", reason: String::new() }, 2),
            (ntdb::Error::NotFound { path: path.clone() }, 3),
            (ntdb::Error::NotADatabase { path: path.clone(), reason: String::new() }, 4),
            (
                ntdb::Error::Locked {
                    path: path.clone(),
                    what: "the writer lock",
                    owner: 1,
                    own: false,
                    waited: std::time::Duration::from_secs(1),
                },
                5,
            ),
            (ntdb::Error::Full { path: path.clone(), action: "grow", source: os(libc::ENOSPC) }, 6),
            (ntdb::Error::ReadOnly { path }, 7),
        ];
        for (error, status) in engine {
            assert_eq!(Failure::Engine(error).exit_status(), status);
        }
        let file = |errno| Failure::File { name: "x".into(), action: "read", source: os(errno) };
        assert_eq!(file(libc::EIO).exit_status(), 3);
        assert_eq!(file(libc::ENOSPC).exit_status(), 6);
        assert_eq!(file(libc::EACCES).exit_status(), 7);
    }

    #[test]
    fn lost_shared_memory_names_the_programs_option_only() {
        let error = ntdb::Error::ShmLost {
            path: PathBuf::from("x"),
            shm: PathBuf::from("x-shm"),
            reason: "gone".into(),
        };
        let text = Failure::Engine(error).to_string();
        assert!(text.contains("--give-up-unsynced") && !text.contains("Options::"), "{text}");
        assert!(text.contains("x-shm") && text.contains("gone"), "{text}");
    }

    #[test]
    fn a_lock_timeout_names_the_option() {
        let error = ntdb::Error::Locked {
            path: PathBuf::from("x"),
            what: "the writer lock",
            owner: 1,
            own: false,
            waited: std::time::Duration::from_secs(1),
        };
        assert!(Failure::Engine(error).to_string().contains("--lock-timeout"));
    }
}
