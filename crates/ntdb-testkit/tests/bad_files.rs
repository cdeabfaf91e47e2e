//! Damaged and foreign files: every flipped byte and every cut of a small database, of its logs and
//! of its shared memory gives an error or the right answer; whatever is not a database, or may not
//! be touched, gives its own clear error and is left as it was.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ntdb::{Db, Durability, Error, Options};
use ntdb_testkit::board::Board;
use ntdb_testkit::lab::{self, Lab, PATIENCE, TempDir, reported};
use ntdb_testkit::mount::SmallDisk;
use ntdb_testkit::worker::damaged::{DAMAGE, contents};

/// Makes the folder `original` with a database at rest, or as a crash leaves it, all of it durable.
fn original(lab: &Lab, crashed: bool) -> PathBuf {
    original_with(lab, crashed, 0)
}

/// As [`original`], but the last `relaxed` records are in the ring of the shared memory only.
fn original_with(lab: &Lab, crashed: bool, relaxed: usize) -> PathBuf {
    let folder = lab.dir().join("original");
    std::fs::create_dir(&folder).expect("folder");
    let path = folder.join("test.ntdb");
    let db = Db::create(&path).expect("create");
    for (n, (key, value)) in contents().iter().enumerate() {
        if n == 20 {
            db.checkpoint().expect("checkpoint");
        }
        let is_durable = n + relaxed < contents().len();
        let durability = if is_durable { Durability::Durable } else { Durability::Relaxed };
        db.with_durability(durability).put(key, value).expect("put");
    }
    if crashed {
        // What a process killed now would leave.
        let copy = lab.dir().join("crashed");
        std::fs::create_dir(&copy).expect("folder");
        for entry in std::fs::read_dir(&folder).expect("list").flatten() {
            std::fs::copy(entry.path(), copy.join(entry.file_name())).expect("copy");
        }
        db.close().expect("close");
        return copy;
    }
    db.close().expect("close");
    folder
}

/// Runs the damaging workers over all bytes of `target`; returns how many were refused.
fn damage(lab: &Lab, original: &Path, target: &str, step: usize, truncate: bool) -> (u64, u64) {
    let len = std::fs::metadata(original.join(target)).expect("target").len() as usize;
    damage_to(lab, original, target, len, step, truncate)
}

/// As [`damage`], for the bytes before `len`.
fn damage_to(
    lab: &Lab,
    original: &Path,
    target: &str,
    len: usize,
    step: usize,
    truncate: bool,
) -> (u64, u64) {
    let seed = lab::seed();
    let half = len / 2 / step * step;
    let workers: Vec<_> = [(0, half), (half, len)]
        .into_iter()
        .enumerate()
        .map(|(n, (from, to))| {
            let board_path = lab.dir().join(format!("board-{n}"));
            let board = Board::create(&board_path, 1, 1).expect("board");
            let process = lab
                .worker("flips")
                .path("board", &board_path)
                .path("original", original)
                .path("copy", &lab.dir().join(format!("copy-{n}")))
                .arg("target", target)
                .arg("from", from)
                .arg("to", to)
                .arg("step", step)
                .arg("truncate", truncate)
                .arg("seed", seed)
                .spawn();
            (board, process)
        })
        .collect();
    let (mut refused, mut right) = (0, 0);
    for (board, process) in workers {
        let ended = process.end(Duration::from_secs(3_600));
        let at = board.mark(DAMAGE).load(Ordering::SeqCst);
        assert!(
            ended.status.success(),
            "{target}, byte {at}, truncated: {truncate}: {}\n{}",
            ended.status,
            ended.stderr
        );
        refused += reported(&ended.stdout, "refused");
        right += reported(&ended.stdout, "right");
    }
    println!("{target}: {refused} refused, {right} right (every {step}, truncated: {truncate})");
    (refused, right)
}

#[test]
fn every_flipped_byte_of_a_database_at_rest_is_refused_or_harmless() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let original = original(&lab, false);
    let step = lab::number("NTDB_TEST_FLIP_STEP", 3) as usize;
    let (refused, right) = damage(&lab, &original, "test.ntdb", step, false);
    assert!(refused > 0 && right > 0);
}

#[test]
fn every_cut_of_a_database_at_rest_is_refused_or_harmless() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let original = original(&lab, false);
    let (refused, _) = damage(&lab, &original, "test.ntdb", 512, true);
    assert!(refused > 0);
}

#[test]
fn every_flipped_byte_after_a_crash_is_refused_or_harmless() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let original = original_with(&lab, true, 10);
    let step = lab::number("NTDB_TEST_FLIP_STEP", 3) as usize;
    let mut logs = 0;
    for entry in std::fs::read_dir(&original).expect("list").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let len = entry.metadata().expect("metadata").len() as usize;
        // The shared memory and the zeros of the logs are long: a prime step visits all offsets
        // within their blocks.
        let step =
            if len > 100_000 { (len / 4_000 / step).max(1) * step + 1 } else { step * 2 + 1 };
        damage(&lab, &original, &name, step, false);
        logs += u32::from(name.contains("-log"));
        if name.ends_with("-shm") {
            // The header and the control words.
            let step = lab::number("NTDB_TEST_FLIP_STEP", 3) as usize;
            let (refused, right) = damage_to(&lab, &original, &name, 12_288, step, false);
            assert!(refused > 0 && right > 0);
        }
    }
    assert!(logs > 0, "the crash left no log");
}

#[test]
fn every_cut_after_a_crash_is_refused_or_harmless() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let original = original_with(&lab, true, 10);
    for entry in std::fs::read_dir(&original).expect("list").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let len = entry.metadata().expect("metadata").len() as usize;
        damage(&lab, &original, &name, (len / 400).max(512) / 512 * 512, true);
    }
}

/// Databases that were closed, in folders of their own: just created, filled, filled further, opened without a change.
fn at_rest(lab: &Lab) -> Vec<PathBuf> {
    let new = lab.dir().join("new.ntdb");
    Db::create(&new).expect("create").close().expect("close");
    let filled = original(lab, false).join("test.ntdb");
    let further = lab.dir().join("further.ntdb");
    std::fs::copy(&filled, &further).expect("copy");
    let db = Db::open(&further).expect("open");
    for (key, value) in contents() {
        db.put(&key, &value).expect("put");
        db.checkpoint().expect("checkpoint");
    }
    db.close().expect("close");
    let unchanged = lab.dir().join("unchanged.ntdb");
    std::fs::copy(&filled, &unchanged).expect("copy");
    Db::open(&unchanged).expect("open").close().expect("close");
    // Left by a crash, recovered, and closed without another change.
    let recovered = lab.dir().join("recovered.ntdb");
    let crashed = lab.dir().join("crash");
    std::fs::create_dir(&crashed).expect("folder");
    let db = Db::open(&filled).expect("open");
    for (key, value) in contents() {
        db.put(&key, &value).expect("put");
    }
    db.sync().expect("sync");
    for entry in std::fs::read_dir(filled.parent().expect("a folder")).expect("list").flatten() {
        std::fs::copy(entry.path(), crashed.join(entry.file_name())).expect("copy");
    }
    db.close().expect("close");
    Db::open(crashed.join("test.ntdb")).expect("recover").close().expect("close");
    std::fs::copy(crashed.join("test.ntdb"), &recovered).expect("copy");
    vec![new, filled, further, unchanged, recovered]
}

#[test]
fn damage_to_what_is_there_twice_loses_nothing_at_rest_is_reported_and_mended() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let step = lab::number("NTDB_TEST_FLIP_STEP", 3) as usize * 7;
    let damaged = lab.dir().join("damaged.ntdb");
    let demand_contents = |db: &Db, what: &str| {
        assert!(db.is_empty().expect("len") || db.len().expect("len") == 40, "{what}");
        for (key, value) in contents() {
            let held = db.get(&key).expect("get");
            assert!(db.is_empty().expect("len") || held == Some(value), "{what}");
        }
    };
    let mut rounds = 0;
    for path in at_rest(&lab) {
        let whole = std::fs::read(&path).expect("read");
        // The header, the two meta pages and the header's copy.
        for at in (0..128).chain((4_096..12_288).step_by(step)).chain(12_288..12_288 + 128) {
            let page = at / 4_096;
            let what = format!("{}, byte {at}", path.display());
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            for read_only in [true, false] {
                std::fs::write(&damaged, &bytes).expect("write");
                let db = Options::new().read_only(read_only).open(&damaged);
                let db = db.unwrap_or_else(|e| panic!("{what}: {e}"));
                demand_contents(&db, &what);
                let report = db.check().expect("check");
                let [problem] = &report.problems[..] else { panic!("{what}: {report:?}") };
                assert!(problem.starts_with(&format!("page {page}: ")), "{what}: {problem}");
                db.close().expect("close");
                if read_only {
                    assert!(std::fs::read(&damaged).expect("read") == bytes, "{what}: changed");
                } else {
                    // The last close has written it anew.
                    let db = Db::open(&damaged).expect("open again");
                    lab::demand_clean(&db, &what);
                    demand_contents(&db, &what);
                }
            }
            rounds += 1;
        }
        // Both: nothing can be relied on, and the error says what is wrong and what can be done.
        let mut bytes = whole.clone();
        bytes[4_096 + 40] ^= 1;
        bytes[8_192 + 40] ^= 1;
        std::fs::write(&damaged, &bytes).expect("write");
        match Db::open(&damaged) {
            Err(e @ Error::Corrupt { .. }) => {
                assert!(e.to_string().contains("neither meta page is valid"), "{e}");
                assert!(e.to_string().contains("copy what can still be read"), "{e}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(rounds > 1_000, "only {rounds} damages");
}

/// What opening `path` reports, and that the file stays as it was.
fn refusal(path: &Path) -> Error {
    let before = std::fs::read(path).ok();
    for create in [false, true] {
        let error = Options::new().create(create).open(path).expect_err("must be refused");
        assert!(
            error.to_string().contains(path.to_str().expect("UTF-8")),
            "names no file: {error}"
        );
        assert_eq!(std::fs::read(path).ok(), before, "the file was changed");
        if create {
            return error;
        }
    }
    unreachable!()
}

#[test]
fn what_is_not_a_database_is_refused_and_left_as_it_was() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let path = lab.database();
    let mut foreign: Vec<Vec<u8>> = vec![
        b"x".to_vec(),
        b"Hello, world\n".repeat(1_000),
        vec![b'A'; 168],
        vec![0xFF; 4096],
        [vec![0; 100_000], vec![1]].concat(),
        b"SQLite format 3\0".repeat(4096),
        b"TDB file\n".iter().copied().chain([0; 8192]).collect(),
    ];
    foreign.push(b"ntdb\r\n\x1a\n".to_vec());
    for content in foreign {
        std::fs::write(&path, &content).expect("write");
        let error = refusal(&path);
        assert!(
            matches!(error, Error::NotADatabase { .. } | Error::Corrupt { .. }),
            "{} bytes: {error:?}",
            content.len()
        );
    }
}

#[test]
fn an_empty_or_all_zero_file_becomes_a_database_if_asked() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    for content in [Vec::new(), vec![0; 100_000]] {
        std::fs::write(lab.database(), &content).expect("write");
        assert!(Db::open(lab.database()).is_err(), "not asked to create");
        let db = Db::create(lab.database()).expect("create");
        db.put(b"key", b"value").expect("put");
        db.close().expect("close");
        let db = Db::open(lab.database()).expect("open");
        assert_eq!(db.get(b"key").expect("get"), Some(b"value".to_vec()));
        drop(db);
        std::fs::remove_file(lab.database()).expect("remove");
    }
}

#[test]
fn a_newer_format_is_named_as_such() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    Db::create(lab.database()).expect("create").close().expect("close");
    let mut bytes = std::fs::read(lab.database()).expect("read");
    // The version follows the magic in the header and in its copy in page 3.
    for at in [8, 3 * 4096 + 8] {
        bytes[at..at + 4].copy_from_slice(&2u32.to_le_bytes());
        let header = at - 8;
        let crc = crc32c::crc32c(&bytes[header..header + 124]);
        bytes[header + 124..header + 128].copy_from_slice(&crc.to_le_bytes());
    }
    std::fs::write(lab.database(), &bytes).expect("write");
    match refusal(&lab.database()) {
        Error::NewerVersion { found: 2, supported: 1, .. } => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn absent_and_present_files_are_told_apart() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    assert!(matches!(Db::open(lab.database()), Err(Error::NotFound { .. })));
    assert!(!lab.database().exists(), "a mere open made a file");
    Db::create(lab.database()).expect("create").close().expect("close");
    let again = Options::new().create_new(true).open(lab.database());
    assert!(matches!(again, Err(Error::AlreadyExists { .. })));
    let nowhere = lab.dir().join("no such folder/test.ntdb");
    let error = Db::create(&nowhere).expect_err("no folder");
    assert!(error.to_string().contains("no such folder"), "{error}");
}

#[test]
fn directories_pipes_and_devices_are_refused_at_once() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let error = Db::create(lab.dir()).expect_err("a directory");
    assert!(error.to_string().contains("directory"), "{error}");
    let pipe = lab.dir().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    let ended = lab.worker_on("exercise", &pipe).spawn().end(Duration::from_secs(10));
    assert!(ended.status.success() && !ended.stdout.contains("open=ok"), "{ended:?}");
    let ended =
        lab.worker_on("exercise", Path::new("/dev/zero")).spawn().end(Duration::from_secs(10));
    assert!(ended.status.success() && !ended.stdout.contains("open=ok"), "{ended:?}");
}

#[test]
fn wrong_permissions_are_their_own_error() {
    // Needs root, as whom this process makes files that `nobody` may not touch.
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    std::fs::set_permissions(lab.dir(), PermissionsExt::from_mode(0o755)).expect("chmod");
    // The worker program must be readable for `nobody`, wherever it was built.
    let program = lab.dir().join("worker");
    std::fs::copy(env!("CARGO_BIN_EXE_ntdb-worker"), &program).expect("copy the worker");
    let db = Options::new().create(true).mode(0o600).open(lab.database()).expect("create");
    db.put(b"key", b"value").expect("put");
    for entry in std::fs::read_dir(lab.dir()).expect("list").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("test.ntdb") {
            let mode = entry.metadata().expect("metadata").mode() & 0o777;
            assert_eq!(mode, 0o600, "{name} has mode {mode:o}");
        }
    }
    db.close().expect("close");
    let run = |read_only: bool| {
        let mut worker = lab.worker("exercise").arg("read_only", read_only);
        let args: Vec<_> = worker.command().get_args().map(ToOwned::to_owned).collect();
        let output = std::process::Command::new(&program)
            .args(args)
            .uid(65534)
            .gid(65534)
            .output()
            .expect("run as nobody");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(run(false).contains("open=Permission"), "{}", run(false));
    assert!(run(true).contains("open=Permission"), "{}", run(true));
    // Readable for all, at rest: reading works, writing is refused.
    std::fs::set_permissions(lab.database(), PermissionsExt::from_mode(0o644)).expect("chmod");
    assert!(run(false).contains("open=Permission"), "{}", run(false));
    let text = run(true);
    assert!(text.contains("open=ok") && text.contains("walk=ok"), "{text}");
    // In use: reading needs write permission on the companion, and the error says so.
    let db = Db::open(lab.database()).expect("open");
    let text = run(true);
    assert!(text.contains("open=Permission") || text.contains("walk=ok"), "{text}");
    lab::demand_clean(&db, "after visits by nobody");
}

#[test]
fn a_read_only_file_system_can_be_read_and_not_written() {
    let disk = SmallDisk::new(16 << 10);
    let path = disk.path().join("test.ntdb");
    let db = Db::create(&path).expect("create");
    db.put(b"key", b"value").expect("put");
    db.close().expect("close");
    disk.make_read_only();
    let db = Options::new().read_only(true).open(&path).expect("open on read-only media");
    assert_eq!(db.get(b"key").expect("get"), Some(b"value".to_vec()));
    assert!(matches!(db.put(b"key", b"other"), Err(Error::ReadOnly { .. })));
    assert!(matches!(db.delete(b"key"), Err(Error::ReadOnly { .. })));
    lab::demand_clean(&db, "on read-only media");
    drop(db);
    assert!(matches!(Db::open(&path), Err(Error::Permission { .. })));
    let absent = Db::create(disk.path().join("other"));
    assert!(matches!(absent, Err(Error::Permission { .. })), "{absent:?}");
}

#[test]
fn after_a_crash_read_only_media_can_still_be_read() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let crashed = original(&lab, true);
    let disk = SmallDisk::new(64 << 10);
    for entry in std::fs::read_dir(&crashed).expect("list").flatten() {
        std::fs::copy(entry.path(), disk.path().join(entry.file_name())).expect("copy");
    }
    disk.make_read_only();
    let db = Options::new().read_only(true).open(disk.path().join("test.ntdb")).expect("open");
    for (key, value) in contents() {
        assert_eq!(db.get(&key).expect("get"), Some(value));
    }
    lab::demand_clean(&db, "a private replay");
}

#[test]
fn a_missing_log_is_named_and_the_rest_left_alone() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let crashed = original(&lab, true);
    let path = crashed.join("test.ntdb");
    let aside = lab.dir().join("aside");
    std::fs::create_dir(&aside).expect("folder");
    let mut logs = 0;
    for entry in std::fs::read_dir(&crashed).expect("list").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains("-log") {
            std::fs::rename(entry.path(), aside.join(&name)).expect("take the log away");
            logs += 1;
        }
    }
    assert!(logs > 0, "the crash left no log");
    // Without -shm too, as after a boot: nothing of the log's content is left in memory.
    std::fs::remove_file(crashed.join("test.ntdb-shm")).expect("remove the companion");
    let before = std::fs::read(&path).expect("read");
    match Db::open(&path) {
        Err(Error::LogMissing { log, .. }) => {
            assert!(log.to_string_lossy().contains("-log"), "{}", log.display());
        }
        other => panic!("{other:?}"),
    }
    assert!(std::fs::read(&path).expect("read") == before, "the data file was changed");
    for entry in std::fs::read_dir(&aside).expect("list").flatten() {
        std::fs::rename(entry.path(), crashed.join(entry.file_name())).expect("put it back");
    }
    let db = Db::open(&path).expect("open with the log");
    for (key, value) in contents() {
        assert_eq!(db.get(&key).expect("get"), Some(value));
    }
}

#[test]
fn another_databases_log_or_companion_is_refused_and_kept() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let crashed = original(&lab, true);
    let other = lab.dir().join("other.ntdb");
    Db::create(&other).expect("create").close().expect("close");
    for suffix in ["-log0", "-log1", "-shm"] {
        let foreign = crashed.join(format!("test.ntdb{suffix}"));
        let Ok(content) = std::fs::read(&foreign) else { continue };
        let beside = lab.dir().join(format!("other.ntdb{suffix}"));
        std::fs::write(&beside, &content).expect("write");
        match Db::open(&other) {
            // Either it is not needed and left alone, or it is in the way and named.
            Ok(db) => {
                db.put(b"key", b"value").expect("put");
                db.close().expect("close");
            }
            Err(Error::ForeignSidecar { sidecar, .. }) => {
                assert_eq!(sidecar, beside);
                assert!(std::fs::read(&beside).expect("read") == content, "it was overwritten");
            }
            Err(e) => panic!("{suffix}: {e:?}"),
        }
        let _ = std::fs::remove_file(&beside);
        lab::demand_clean(&Db::open(&other).expect("open"), suffix);
    }
}

#[test]
fn a_companion_deleted_under_running_processes_is_named() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_ntdb-worker"));
    let db = Db::create(lab.database()).expect("create");
    db.put(b"key", b"value").expect("put");
    std::fs::remove_file(lab.dir().join("test.ntdb-shm")).expect("remove");
    let ended = lab.worker("once").arg("n", 1).spawn().end(PATIENCE);
    assert!(!ended.status.success(), "a second process must not start a second shared memory");
    assert!(ended.stderr.contains("in use by other processes"), "{}", ended.stderr);
    db.put(b"key", b"still works").expect("put");
    db.close().expect("close");
    let db = Db::open(lab.database()).expect("open once all have closed");
    assert_eq!(db.get(b"key").expect("get"), Some(b"still works".to_vec()));
    lab::demand_clean(&db, "at the end");
}

#[test]
fn a_file_that_has_been_cut_is_said_to_be_cut() {
    for page_size in [4_096, 16_384] {
        let dir = TempDir::new();
        let path = dir.path().join("test.ntdb");
        let db = Options::new().create(true).page_size(page_size).open(&path).expect("create");
        for n in 0..5_000u32 {
            db.put(&n.to_le_bytes(), &[1; 100]).expect("put");
        }
        db.close().expect("close");
        let whole = std::fs::read(&path).expect("read");
        let page = page_size as usize;
        for len in [8, 100, 2_000, 4_095, 4_096, 5_000, 3 * page, 3 * page + 12, 4 * page, 9 * page]
        {
            std::fs::write(&path, &whole[..len]).expect("write");
            for read_only in [false, true] {
                let what = format!("{len} bytes, read only: {read_only}");
                let error = Options::new().read_only(read_only).open(&path).expect_err(&what);
                assert!(matches!(error, Error::Corrupt { .. }), "{what}: {error:?}");
                let text = error.to_string();
                assert!(text.contains("has been cut"), "{what}: {text}");
                assert!(text.contains(&format!("byte {len}")), "{what}: {text}");
                assert!(text.contains("restore a backup"), "{what}: {text}");
                assert!(std::fs::read(&path).expect("read") == whole[..len], "{what}: changed");
            }
        }
        // What begins otherwise is no database, however short.
        std::fs::write(&path, b"something else").expect("write");
        let error = Db::open(&path).expect_err("something else");
        assert!(matches!(error, Error::NotADatabase { .. }), "{error:?}");
    }
}
