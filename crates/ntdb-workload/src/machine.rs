//! The machine that a figure was measured on.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::Serialize;

/// What a figure depends on, apart from the program. What the system does not tell is empty, or zero.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub processor: String,
    /// How many of its threads this process may use.
    pub processors: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// The kernel and its version.
    pub kernel: String,
    /// The file system that the database is on: its type, as /proc/mounts has it.
    pub file_system: String,
    /// The version of this program.
    pub version: &'static str,
}

impl Machine {
    /// The present one, with the file system that `path` is on, or, if that is not there, its folder.
    pub fn of(path: Option<&Path>) -> Machine {
        let read = |name| fs::read_to_string(name).unwrap_or_default();
        let value = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_string())
        };
        let kib = value(&read("/proc/meminfo"), "MemTotal")
            .and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok());
        Machine {
            processor: value(&read("/proc/cpuinfo"), "model name").unwrap_or_default(),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: kib.unwrap_or(0) * 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_string(),
            file_system: match path {
                Some(path) => file_system(path, &read("/proc/self/mountinfo")),
                None => "none".into(),
            },
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// On one line.
    pub fn line(&self) -> String {
        format!(
            "{}, {} processors, {} GiB, Linux {}, {}",
            self.processor,
            self.processors,
            (self.memory_bytes + (1 << 29)) >> 30,
            self.kernel,
            self.file_system
        )
    }
}

/// The type of the file system that holds `path`, by its device number in the list of mounts.
fn file_system(path: &Path, mounts: &str) -> String {
    let device = device(path).or_else(|| device(path.parent()?));
    let Some((major, minor)) = device else { return String::new() };
    let number = format!("{major}:{minor}");
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&number));
    // Optional fields end with a hyphen; the type follows.
    let kind = line.and_then(|line| line.split_once(" - ")?.1.split(' ').next());
    kind.unwrap_or_default().to_string()
}

fn device(path: &Path) -> Option<(u32, u32)> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let name = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: the structure is plain numbers, for which zero is right; the call reads a string that ends with zero and fills in the
    // structure.
    let stat = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::stat(name.as_ptr(), &mut stat) != 0 {
            return None;
        }
        stat
    };
    Some((libc::major(stat.st_dev), libc::minor(stat.st_dev)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_described() {
        let machine = Machine::of(Some(Path::new("/proc/self/absent")));
        assert!(machine.processors > 0 && machine.memory_bytes > 1 << 20, "{machine:?}");
        assert_eq!(machine.file_system, "proc");
        assert!(machine.line().contains("Linux"), "{}", machine.line());
        assert_eq!(Machine::of(None).file_system, "none");
    }
}
