//! Tests of the file layer, against the file system that temporary files lie on.

use super::*;
use crate::storage::testing::{assert_exit_ok, in_child};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn new_file(dir: &tempfile::TempDir) -> File {
    File::create_new(&dir.path().join("db"), Kind::Data, 0o600).unwrap()
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

/// The permission bits.
fn mode(file: &File) -> u32 {
    file.inner.metadata().unwrap().mode() & 0o7777
}

#[test]
fn creating_and_opening() {
    let dir = directory();
    let path = dir.path().join("db");
    assert_eq!(File::open(&path, Kind::Data).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(FileId::of_path(&path).unwrap(), None);
    let a = File::create_new(&path, Kind::Data, 0o600).unwrap();
    assert_eq!(mode(&a), 0o600);
    assert_eq!(errno(File::create_new(&path, Kind::Data, 0o600)), Some(libc::EEXIST));
    let link = dir.path().join("link");
    fs::hard_link(&path, &link).unwrap();
    for other in
        [File::open(&link, Kind::Data).unwrap(), File::open_readonly(&path, Kind::Data).unwrap()]
    {
        assert_eq!(other.identity().unwrap(), a.identity().unwrap());
    }
    assert_eq!(FileId::of_path(&link).unwrap(), Some(a.identity().unwrap()));
    let new = File::create_new(&dir.path().join("new"), Kind::Log, 0o640).unwrap();
    assert_ne!(new.identity().unwrap(), a.identity().unwrap());
    assert_eq!(mode(&new) & !0o640, 0);
    assert_eq!(new.path(), dir.path().join("new"));
}

#[test]
fn only_regular_files_are_opened() {
    let dir = directory();
    let (fifo, link, socket) =
        (dir.path().join("fifo"), dir.path().join("link"), dir.path().join("socket"));
    let name = CString::new(fifo.as_os_str().as_bytes()).unwrap();
    // SAFETY: a valid C string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    symlink("/dev/null", &link).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    for (path, word) in [
        (fifo.as_path(), "fifo"),
        (link.as_path(), "symbolic link"),
        (socket.as_path(), "socket"),
        (dir.path(), "directory"),
        (Path::new("/dev/null"), "device"),
    ] {
        for result in [File::open(path, Kind::Data), File::open_readonly(path, Kind::Data)] {
            let text = result.unwrap_err().to_string();
            assert!(text.contains(word), "{}: {text}", path.display());
        }
        // Also where it took the name after the first look.
        let mut options = OpenOptions::new();
        assert!(File::open_checked(path, Kind::Data, options.read(true)).is_err());
    }
}

#[test]
fn descriptors_are_closed_on_exec() {
    let dir = directory();
    let file = new_file(&dir);
    // SAFETY: asks for flags.
    let flags = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
}

#[test]
fn reading_and_writing() {
    let dir = directory();
    let file = new_file(&dir);
    file.write_all_at(b"hello", 3).unwrap();
    assert_eq!(file.len().unwrap(), 8);
    let mut buffer = [1; 10];
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), 8);
    assert_eq!(&buffer, b"\0\0\0hello\x01\x01");
    assert_eq!(file.read_at(&mut buffer, 100).unwrap(), 0);
    let short = file.read_exact_at(&mut buffer, 0).unwrap_err();
    assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
    let read_only = File::open_readonly(file.path(), Kind::Data).unwrap();
    assert_eq!(errno(read_only.write_all_at(b"x", 0)), Some(libc::EBADF));
    assert_eq!(errno(file.write_all_at(b"xy", i64::MAX as u64 - 1)), Some(libc::EFBIG));
    file.sync_data().unwrap();
    file.sync_all().unwrap();
}

#[test]
fn allocated_space_is_on_disk_and_zero() {
    let dir = directory();
    let file = new_file(&dir);
    file.write_all_at(b"kept", 0).unwrap();
    file.allocate(0, 1 << 20).unwrap();
    assert_eq!(file.len().unwrap(), 1 << 20);
    assert!(file.allocated_bytes().unwrap() >= 1 << 20);
    // Inside, and nothing at all.
    file.allocate(4096, 4096).unwrap();
    file.allocate(1 << 40, 0).unwrap();
    assert_eq!(file.len().unwrap(), 1 << 20);
    let mut bytes = vec![1; 1 << 20];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes[..4], b"kept");
    assert!(bytes[4..].iter().all(|&byte| byte == 0));
    file.truncate(100).unwrap();
    assert_eq!(file.len().unwrap(), 100);
}

#[test]
fn an_impossible_size_changes_nothing() {
    let dir = directory();
    let file = new_file(&dir);
    file.allocate(0, 8192).unwrap();
    for (offset, len) in [(0, u64::MAX), (u64::MAX, 1), (8192, i64::MAX as u64)] {
        assert_eq!(errno(file.allocate(offset, len)), Some(libc::EFBIG));
    }
    assert_eq!(file.len().unwrap(), 8192);
    assert!(file.allocated_bytes().unwrap() < 1 << 20);
}

/// Limits the calling process's files to this many bytes.
fn limit_file_size(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a valid structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
}

#[test]
fn a_file_size_limit_is_an_error_not_a_signal() {
    let dir = directory();
    let file = new_file(&dir);
    file.allocate(0, 32 << 10).unwrap();
    assert_exit_ok(in_child(|| {
        limit_file_size(64 << 10);
        let too_big = Some(libc::EFBIG);
        assert_eq!(errno(file.allocate(32 << 10, 64 << 10)), too_big);
        assert_eq!(errno(file.truncate((64 << 10) + 1)), too_big);
        assert_eq!(errno(file.write_all_at(&[1; 100], (64 << 10) - 50)), too_big);
        assert_eq!(errno(file.write_all_at(&[1], 1 << 20)), too_big);
        assert_eq!(file.len().unwrap(), 32 << 10);
        // Up to the limit everything works.
        file.allocate(32 << 10, 32 << 10).unwrap();
        file.write_all_at(&[1; 100], (64 << 10) - 100).unwrap();
        file.truncate(64 << 10).unwrap();
        0
    }));
    // What would have happened: this is what the checks are for.
    let status = in_child(|| {
        limit_file_size(64 << 10);
        file.inner.set_len(1 << 20).is_err().into()
    });
    assert!(libc::WIFSIGNALED(status), "status {status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGXFSZ);
}

#[test]
fn zeros_are_written_where_space_cannot_be_allocated() {
    let dir = directory();
    let file = new_file(&dir);
    file.write_all_at(&[7; 100], 0).unwrap();
    file.write_zeros(100, 200_001).unwrap();
    let mut bytes = vec![1; 200_001];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(file.len().unwrap(), 200_001);
    assert!(bytes[..100].iter().all(|&byte| byte == 7));
    assert!(bytes[100..].iter().all(|&byte| byte == 0));
}

#[test]
fn companions_get_the_mode_of_the_data_file() {
    let dir = directory();
    let data = new_file(&dir);
    data.inner.set_permissions(fs::Permissions::from_mode(0o664)).unwrap();
    let log = File::create_new(&dir.path().join("log"), Kind::Log, 0o600).unwrap();
    log.adopt_owner_and_mode(&data).unwrap();
    assert_eq!(mode(&log), 0o664);
    let (a, b) = (data.inner.metadata().unwrap(), log.inner.metadata().unwrap());
    assert_eq!((a.uid(), a.gid()), (b.uid(), b.gid()));
}

#[test]
fn another_group_sees_no_more_than_everybody() {
    for (wanted, given) in
        [(0o660, 0o600), (0o664, 0o644), (0o666, 0o666), (0o600, 0o600), (0o640, 0o600)]
    {
        assert_eq!(mode_for_another_group(wanted), given, "{wanted:o}");
    }
}

#[test]
fn names_come_and_go() {
    let dir = directory();
    let (old, new) = (dir.path().join("db"), dir.path().join("new"));
    let file = new_file(&dir);
    rename(&old, &new, Kind::Data).unwrap();
    sync_dir(&new).unwrap();
    assert_eq!(FileId::of_path(&new).unwrap(), Some(file.identity().unwrap()));
    assert!(!file.is_unlinked().unwrap());
    assert!(unlink(&new, Kind::Data).unwrap());
    assert!(!unlink(&new, Kind::Data).unwrap());
    assert!(file.is_unlinked().unwrap());
    sync_dir(Path::new("relative")).unwrap();
    let missing = dir.path().join("missing/db");
    assert_eq!(errno(sync_dir(&missing)), Some(libc::ENOENT));
}

#[cfg(feature = "failpoints")]
#[test]
fn planned_faults_look_like_the_real_thing() {
    use crate::storage::failpoint::{Plan, set_plan};
    let dir = directory();
    let file = new_file(&dir);
    // Plans are process-wide: in a child.
    assert_exit_ok(in_child(|| {
        let plan = |text| set_plan(Plan::parse(None, None, Some(text)).unwrap());
        file.allocate(0, 100).unwrap();
        // The file has grown by one step when the second fails.
        plan("fallocate:data:ENOSPC:2");
        assert_eq!(errno(file.allocate(0, ALLOCATE_STEP_BYTES * 2)), Some(libc::ENOSPC));
        assert_eq!(file.len().unwrap(), 100);
        // 95 is EOPNOTSUPP.
        plan("fallocate:data:95:1+");
        file.allocate(0, 100_000).unwrap();
        assert_eq!(file.len().unwrap(), 100_000);
        assert!(file.allocated_bytes().unwrap() >= 100_000);
        plan("fdatasync:data:EIO,write:data:ENOSPC,fsync:dir:EIO,fdatasync:log:EIO");
        assert_eq!(errno(file.write_all_at(b"x", 0)), Some(libc::ENOSPC));
        assert_eq!(errno(file.sync_data()), Some(libc::EIO));
        assert_eq!(errno(sync_dir(file.path())), Some(libc::EIO));
        file.sync_data().unwrap();
        0
    }));
}

#[cfg(feature = "failpoints")]
#[test]
fn the_recorder_hears_of_every_sync() {
    use crate::storage::failpoint::set_recorder;
    use std::sync::{Arc, Mutex};
    let dir = directory();
    let file = new_file(&dir);
    assert_exit_ok(in_child(|| {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let notes = heard.clone();
        set_recorder(Some(Box::new(move |event| {
            notes.lock().unwrap().push(format!("{:?} {:?}", event.kind, event.what));
            assert!(event.path.is_absolute());
        })));
        file.allocate(0, 10).unwrap();
        file.write_all_at(b"abc", 4).unwrap();
        file.sync_data().unwrap();
        sync_dir(file.path()).unwrap();
        set_recorder(None);
        file.sync_data().unwrap();
        assert_eq!(
            *heard.lock().unwrap(),
            [
                "Data Allocate(10)",
                "Data Write { offset: 4, len: 3 }",
                "Data SyncBegin",
                "Data SyncEnd { ok: true }",
                "Dir SyncBegin",
                "Dir SyncEnd { ok: true }",
            ]
        );
        0
    }));
}
