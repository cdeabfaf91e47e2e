//! What the machine is: its file systems, its boot, its randomness.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::failpoint;

/// Whether processes can share a mapped file on a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Suitability {
    /// Its mappings are shared memory, and its locks are seen by all.
    Suitable,
    /// It is of this kind, where other hosts see other bytes, or the kernel cannot map a file
    /// shared.
    Unsuitable(&'static str),
}

/// File systems whose files other hosts can change behind this kernel's back, by the number that
/// the kernel reports for each. FUSE is not among them: it is any program's file system, most of
/// which are local, and it cannot be told apart.
const UNSUITABLE: &[(u32, &str)] = &[
    (0x0000_6969, "NFS"),
    (0x0000_517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "kAFS"),
    (0x0bd0_0bd0, "Lustre"),
    (0x7375_7245, "Coda"),
    (0x0000_564c, "NCP"),
    (0x4750_4653, "GPFS"),
    (0x786f_4256, "a VirtualBox shared folder"),
];

/// Judges the file system that `path` (which must exist) lies on.
pub fn suitability(path: &Path) -> io::Result<Suitability> {
    Ok(classify(statfs(path)?.f_type as u32))
}

/// Bytes that a file's name may have on the file system that `path` (which must exist) lies on.
pub fn name_bytes_max(path: &Path) -> io::Result<usize> {
    // Some report nothing useful, or more than the kernel itself takes.
    let told = usize::try_from(statfs(path)?.f_namelen).unwrap_or(0);
    let most = libc::NAME_MAX as usize;
    Ok(if told == 0 { most } else { told.min(most) })
}

fn statfs(path: &Path) -> io::Result<libc::statfs> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: all zeros is a valid `statfs`.
    let mut info: libc::statfs = unsafe { std::mem::zeroed() };
    super::file::retry_interrupted(|| {
        // SAFETY: a valid C string and a valid place for the result.
        unsafe { libc::statfs(name.as_ptr(), &mut info) }
    })?;
    Ok(info)
}

fn classify(f_type: u32) -> Suitability {
    match UNSUITABLE.iter().find(|&&(number, _)| number == f_type) {
        Some(&(_, name)) => Suitability::Unsuitable(name),
        None => Suitability::Suitable,
    }
}

/// A number that is another one after every boot: shared memory left by an earlier boot went
/// through a power cut and can't be trusted.
///
/// Where the kernel's own is out of sight it is made from the time of boot, and where that is, too,
/// it is all zeros: then nobody can tell boots apart.
pub fn boot_id() -> io::Result<[u8; 16]> {
    if let Some(pretended) = failpoint::boot_id_override() {
        return Ok(pretended);
    }
    if let Ok(text) = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        && let Some(id) = parse_uuid(text.trim())
    {
        return Ok(id);
    }
    let mut id = [0; 16];
    if let Ok(text) = fs::read_to_string("/proc/stat")
        && let Some(seconds) = parse_btime(&text)
    {
        id[..8].copy_from_slice(b"btime\0\0\0");
        id[8..].copy_from_slice(&seconds.to_le_bytes());
    }
    Ok(id)
}

/// 32 hexadecimal digits, with hyphens anywhere.
pub(super) fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|&c| c != '-').collect();
    if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

fn parse_btime(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
}

/// Fills `buffer` from the kernel's random number generator.
pub fn random_bytes(buffer: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let rest = &mut buffer[filled..];
        // SAFETY: `rest` is valid for as many bytes as the call is told.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => filled += got,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// A random number.
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    random_bytes(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known_by_name() {
        assert_eq!(classify(0x6969), Suitability::Unsuitable("NFS"));
        assert_eq!(classify(0xfe53_4d42), Suitability::Unsuitable("SMB2"));
        assert_eq!(classify(0x0102_1997), Suitability::Unsuitable("9p"));
        // ext4, tmpfs, overlay, FUSE
        for local in [0xef53, 0x0102_1994, 0x794c_7630, 0x6573_5546] {
            assert_eq!(classify(local), Suitability::Suitable, "{local:#x}");
        }
    }

    #[test]
    fn a_local_directory_is_suitable() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(suitability(dir.path()).unwrap(), Suitability::Suitable);
        let missing = dir.path().join("missing");
        assert_eq!(suitability(&missing).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn boots_have_an_id() {
        let id = boot_id().unwrap();
        assert_eq!(id, boot_id().unwrap());
        assert_ne!(id, [0; 16]);
    }

    #[test]
    fn ids_are_read_from_text() {
        let id = parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!(id[..3], [0x00, 0x11, 0x22]);
        assert_eq!(id[15], 0xff);
        for wrong in ["", "0011", "00112233-4455-6677-8899-aabbccddeefg", &"0".repeat(33)] {
            assert_eq!(parse_uuid(wrong), None, "{wrong}");
        }
        assert_eq!(parse_btime("cpu 1 2\nintr 3\nbtime 1700000000\nx 1\n"), Some(1_700_000_000));
        assert_eq!(parse_btime("cpu 1 2\n"), None);
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random_u64().unwrap(), random_u64().unwrap());
        let mut bytes = [0; 1000];
        random_bytes(&mut bytes).unwrap();
        // The last bytes are filled, too: all 100 zero has a chance of 2^-800.
        assert!(bytes[900..].iter().any(|&byte| byte != 0));
    }
}
