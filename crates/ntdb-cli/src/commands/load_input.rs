//! The text that `load` reads: a file or standard input.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::failure::Failure;

/// An open input.
pub struct Input {
    /// What messages call it.
    pub name: String,
    file: File,
    /// Whether it is a regular file that has been read from its beginning.
    regular_bytes: Option<u64>,
}

impl Input {
    /// Opens `path`; `None` and `-` mean standard input.
    pub fn open(path: Option<&Path>) -> Result<Input, Failure> {
        let (name, file) = match path {
            Some(path) if path.as_os_str() != "-" => (path.display().to_string(), File::open(path)),
            _ => (
                "standard input".to_string(),
                io::stdin().as_fd().try_clone_to_owned().map(File::from),
            ),
        };
        let unreadable = |action, source| Failure::File { name: name.clone(), action, source };
        let mut file = file.map_err(|source| unreadable("open", source))?;
        let metadata = file.metadata().map_err(|source| unreadable("examine", source))?;
        let at_beginning = metadata.is_file()
            && file.stream_position().map_err(|source| unreadable("examine", source))? == 0;
        let regular_bytes = at_beginning.then_some(metadata.len());
        Ok(Input { name, file, regular_bytes })
    }

    /// Its length, if that is known.
    pub fn bytes(&self) -> Option<u64> {
        self.regular_bytes
    }

    /// The input as a stream.
    pub fn into_stream(self) -> impl Read {
        self.file
    }

    /// The input as a regular file that several processes can read from the beginning, each at its
    /// own pace and more than once. A pipe is copied to a nameless file in the temporary directory
    /// for that.
    pub fn into_regular_file(mut self) -> Result<File, Failure> {
        if self.regular_bytes.is_some() {
            return Ok(self.file);
        }
        let dir = std::env::temp_dir();
        let mut copy = nameless_file(&dir).map_err(|source| Failure::File {
            name: dir.display().to_string(),
            action: "make a temporary file in",
            source,
        })?;
        io::copy(&mut self.file, &mut copy).and_then(|_| copy.seek(SeekFrom::Start(0))).map_err(
            |source| Failure::File {
                name: self.name,
                action: "copy to the temporary directory",
                source,
            },
        )?;
        Ok(copy)
    }
}

/// A new file in `dir` that vanishes with its last descriptor.
fn nameless_file(dir: &Path) -> io::Result<File> {
    for attempt in 0.. {
        let path = dir.join(format!(".ntdb-load-{}-{attempt}", std::process::id()));
        let mut options = OpenOptions::new();
        match options.read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 100 => {}
            Err(error) => return Err(error),
            Ok(file) => {
                fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
    unreachable!("the loop returns at the latest at its hundredth attempt")
}
