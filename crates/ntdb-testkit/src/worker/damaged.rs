//! The role that damages copies of a database and uses them.
//!
//! Whatever the engine answers must be an error or right: never another value than was stored,
//! never a panic, a signal, a hang or a wild allocation. The parent learns from the board which
//! damage was being tried when this process died.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::Ordering;

use ntdb::{Db, Options};

use crate::args::Args;
use crate::board::Board;
use crate::rng::Rng;
use crate::worker::simple;

/// Mark of the board: the damage being tried.
pub const DAMAGE: usize = 0;

/// The records of the databases that [`flips`] damages.
pub fn contents() -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut rng = Rng::new(11);
    let mut records = BTreeMap::new();
    for n in 0..40u32 {
        let len = if n % 13 == 0 { 3_000 } else { rng.below(90) as usize };
        records.insert(format!("key-{n}").into_bytes(), rng.bytes(len));
    }
    records
}

/// Damages byte `from`, `from + step`, ... below `to` of file `target` in a copy of the folder
/// `original`, each alone, and uses the copy.
///
/// # Errors
/// The promise that was broken.
pub fn flips(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let original = args.path("original");
    let target = args.text("target").expect("a target").to_string();
    let (from, to) = (args.get("from", 0usize), args.get("to", 0usize));
    let step: usize = args.get("step", 1);
    let truncate: bool = args.get("truncate", false);
    let copy = args.path("copy");
    limit_memory();
    let mut rng = Rng::new(args.get("seed", 1));
    let records = contents();
    let (mut refused, mut right) = (0, 0);
    for at in (from..to).step_by(step) {
        board.mark(DAMAGE).store(at as u64, Ordering::SeqCst);
        // SAFETY: sets this process's alarm; a hang ends it with SIGALRM.
        unsafe { libc::alarm(20) };
        renew(&original, &copy).map_err(|e| format!("copy: {e}"))?;
        let path = copy.join(&target);
        let mask = match rng.below(3) {
            0 => 1 << rng.below(8),
            1 => 0xFF,
            _ => rng.range(1, 255) as u8,
        };
        let damage = || {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(&path)?;
            if truncate {
                return file.set_len(at as u64);
            }
            let mut byte = [0];
            file.read_exact_at(&mut byte, at as u64)?;
            file.write_all_at(&[byte[0] ^ mask], at as u64)
        };
        damage().map_err(|e| format!("{}: {e}", path.display()))?;
        let database = copy.join("test.ntdb");
        // A cut log loses what was never promised; anything else may only be refused.
        let may_be_older = target != "test.ntdb";
        match compare(&database, &records, may_be_older) {
            Ok(true) => right += 1,
            Ok(false) => refused += 1,
            Err(e) => return Err(format!("{target} damaged at {at} by {mask:#x}: {e}")),
        }
        simple::exercise_once(&database, false);
    }
    Ok(format!("refused {refused} right {right}"))
}

/// Bytes of memory that a process which uses damaged files may have: `NTDB_TEST_MEMORY_MIB`, or `default`; `None` if
/// that is 0, as sanitizers need it, which take memory themselves.
pub fn memory_limit(default: u64) -> Option<u64> {
    let bytes = crate::lab::number("NTDB_TEST_MEMORY_MIB", default >> 20) << 20;
    (bytes > 0).then_some(bytes)
}

/// Bounds what this process may allocate; shared mappings of files don't count.
fn limit_memory() {
    let Some(bytes) = memory_limit(1 << 30) else { return };
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a limit of this process only; no memory is involved.
    unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) };
}

/// Changes numbers inside pages of a copy of the folder `original`, seals the pages again with a
/// right checksum, as an attacker would, and uses the copy; `rounds` times. Any answer will do.
///
/// # Errors
/// Only if the copy cannot be made: a promise broken here is a panic, a signal or a hang.
pub fn hostile(args: &Args) -> Result<String, String> {
    let board = Board::open(&args.path("board")).map_err(|e| format!("board: {e}"))?;
    let (original, copy) = (args.path("original"), args.path("copy"));
    let page_size: usize = args.get("page_size", 4096);
    let (seed, rounds) = (args.get("seed", 1u64), args.get("rounds", 100u64));
    limit_memory();
    let mut answers: BTreeMap<String, u64> = BTreeMap::new();
    for round in 0..rounds {
        let round_seed = if round == 0 { seed } else { crate::rng::mix(seed.wrapping_add(round)) };
        board.mark(DAMAGE).store(round_seed, Ordering::SeqCst);
        // SAFETY: sets this process's alarm; a hang ends it with SIGALRM.
        unsafe { libc::alarm(20) };
        renew(&original, &copy).map_err(|e| format!("copy: {e}"))?;
        let path = copy.join("test.ntdb");
        let mut bytes = std::fs::read(&path).map_err(|e| format!("read: {e}"))?;
        let mut rng = Rng::new(round_seed);
        for _ in 0..rng.range(1, 3) {
            forge(&mut bytes, page_size, &mut rng);
        }
        std::fs::write(&path, &bytes).map_err(|e| format!("write: {e}"))?;
        let answer = simple::exercise_once(&path, rng.one_in(4));
        for word in answer.split(' ') {
            *answers.entry(word.to_string()).or_default() += 1;
        }
    }
    Ok(format!("{answers:?}"))
}

/// Changes a few numbers of one page and seals it.
fn forge(file: &mut [u8], page_size: usize, rng: &mut Rng) {
    let pages = file.len() / page_size;
    let number = rng.below(pages as u64) as usize;
    let page = &mut file[number * page_size..(number + 1) * page_size];
    for _ in 0..rng.range(1, 4) {
        let width = *rng.pick(&[1usize, 2, 4, 8]);
        // Headers are where the interesting numbers are.
        let reach = *rng.pick(&[64usize, 128, 512, page_size]);
        let at = rng.below((reach / width) as u64) as usize * width;
        let extreme = match rng.below(6) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << rng.below(64),
            3 => pages as u64 + rng.below(3),
            4 => rng.below(page_size as u64 + 2),
            _ => rng.next_u64(),
        };
        page[at..at + width].copy_from_slice(&extreme.to_le_bytes()[..width]);
    }
    match number {
        // The header block and its copy.
        0 | 3 => {
            let crc = crc32c::crc32c(&page[..124]);
            page[124..128].copy_from_slice(&crc.to_le_bytes());
        }
        // The meta pages: everything but the field itself.
        1 | 2 => {
            let crc = crc32c::crc32c_append(crc32c::crc32c(&page[..8]), &page[12..]);
            page[8..12].copy_from_slice(&crc.to_le_bytes());
        }
        _ => {
            let crc = crc32c::crc32c(&page[4..]);
            page[..4].copy_from_slice(&crc.to_le_bytes());
        }
    }
}

fn renew(original: &Path, copy: &Path) -> std::io::Result<()> {
    let _ = std::fs::remove_dir_all(copy);
    std::fs::create_dir(copy)?;
    for entry in std::fs::read_dir(original)? {
        let entry = entry?;
        std::fs::copy(entry.path(), copy.join(entry.file_name()))?;
    }
    adopt(&copy.join("test.ntdb"))
}

/// Makes the shared memory beside the copied file at `path` that of the copy, as if its users had died: else it would be taken
/// for that of the original, and left alone.
fn adopt(path: &Path) -> std::io::Result<()> {
    let metadata = std::fs::metadata(path)?;
    let change = |path: &Path, change: &dyn Fn(&mut [u8])| {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
        let mut page = [0; 4096];
        file.read_exact_at(&mut page, 0)?;
        change(&mut page);
        file.write_all_at(&page, 0)
    };
    let shm = path.with_file_name("test.ntdb-shm");
    if shm.exists() {
        let (device, inode) = (metadata.dev(), metadata.ino());
        change(&shm, &|page| ntdb::fuzzing::adopt_shm(page, device, inode))?;
        change(path, &|page| ntdb::fuzzing::adopt_attach_record(page, device, inode))?;
    }
    Ok(())
}

/// Reads everything; says whether all was there (`true`) or something was refused (`false`).
fn compare(
    path: &Path,
    records: &BTreeMap<Vec<u8>, Vec<u8>>,
    may_be_older: bool,
) -> Result<bool, String> {
    let Ok(db) = open(path) else { return Ok(false) };
    let mut complete = true;
    for (key, value) in records {
        match db.get(key) {
            Ok(Some(held)) if held == *value => {}
            Ok(None) if may_be_older => complete = false,
            Err(_) => complete = false,
            Ok(held) => {
                return Err(format!(
                    "{} reads {:?} instead of {} bytes, without an error",
                    String::from_utf8_lossy(key),
                    held.map(|h| h.len()),
                    value.len()
                ));
            }
        }
    }
    for record in db.iter().take(10_000) {
        match record {
            Ok((key, value)) if records.get(&key) == Some(&value) => {}
            Ok((key, _)) => {
                return Err(format!("iteration invents {}", String::from_utf8_lossy(&key)));
            }
            Err(_) => {
                complete = false;
                break;
            }
        }
    }
    Ok(complete)
}

fn open(path: &Path) -> ntdb::Result<Db> {
    Options::new().open(path)
}
