//! The role that carries attacks of [`crate::hostile`] out, each in a child process of its own, whose end, time and memory it
//! looks at.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use crate::args::Args;
use crate::hostile::{attack, edit, scene};
use crate::rng::{self, Rng};
use crate::worker::damaged;

/// Seconds that one attack may take. All that it does takes milliseconds on a sound database.
const SECONDS_MAX: u32 = 20;
/// Bytes of memory that one attack may make this process use at most.
const MEMORY_BYTES_MAX: u64 = 256 << 20;
/// Failures that are told before the rest are only counted.
const TELL: usize = 10;
/// Lines of what a child said that are told.
const LINES: usize = 30;

/// `rounds` attacks in the folder `dir`, the first drawn from `seed` itself, or the one in the file `attack`.
///
/// # Errors
/// The attacks that succeeded, each with the seed that repeats it.
pub fn run(args: &Args) -> Result<String, String> {
    let dir = args.path("dir");
    let (seed, rounds) = (args.get("seed", 1u64), args.get("rounds", 100u64));
    let scenes = scene::all();
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut answers: BTreeMap<String, u64> = BTreeMap::new();
    let mut failures = Vec::new();
    let from_file = args.text("attack").map(|path| std::fs::read(path).map_err(|e| e.to_string()));
    let from_file = from_file.transpose()?;
    for round in 0..rounds {
        let round_seed = if round == 0 { seed } else { rng::mix(seed.wrapping_add(round)) };
        let attack = match &from_file {
            Some(attack) => attack.clone(),
            None => edit::random(&mut Rng::new(round_seed), scenes.len()),
        };
        match in_child(&scenes, &dir, &attack) {
            Ok(text) => {
                for word in text.split_whitespace() {
                    *answers.entry(word.to_string()).or_default() += 1;
                }
            }
            Err(failure) => {
                let name = scenes[attack[0] as usize % scenes.len()].name;
                failures.push(format!("seed {round_seed} ({name}): {failure}"));
            }
        }
        if args.get("verbose", false) {
            eprintln!("seed {round_seed}");
        }
    }
    let _ = std::fs::remove_dir_all(&dir);
    if failures.is_empty() {
        return Ok(format!("{answers:?}"));
    }
    let told = failures.iter().take(TELL).cloned().collect::<Vec<_>>().join("\n");
    Err(format!("{} of {rounds} attacks succeeded:\n{told}", failures.len()))
}

/// Carries one attack out in a child; what it answered, or how it ended.
fn in_child(scenes: &[scene::Scene], dir: &Path, bytes: &[u8]) -> Result<String, String> {
    let (answers, messages) = (dir.join("answers"), dir.join("messages"));
    // SAFETY: this process has one thread, so the child may do anything.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(format!("fork: {}", std::io::Error::last_os_error()));
    }
    if child == 0 {
        let status = attacked(scenes, dir, bytes, &answers, &messages);
        // SAFETY: ends the child without running what the parent has set up.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: plain bytes; zero is a valid value of every field.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: waits for the child made above; both places are valid.
    let waited = unsafe { libc::wait4(child, &mut status, 0, &mut usage) };
    if waited != child {
        return Err(format!("wait: {}", std::io::Error::last_os_error()));
    }
    let memory = usage.ru_maxrss as u64 * 1024;
    if status != 0 {
        let how = match libc::WIFSIGNALED(status) {
            true if libc::WTERMSIG(status) == libc::SIGALRM => "it hung".to_string(),
            true => format!("signal {}", libc::WTERMSIG(status)),
            false => format!("exit status {}", libc::WEXITSTATUS(status)),
        };
        let said = std::fs::read_to_string(&messages).unwrap_or_default();
        let said: Vec<&str> = said.lines().take(LINES).collect();
        return Err(format!("{how}: {}", said.join("\n")));
    }
    if damaged::memory_limit(MEMORY_BYTES_MAX).is_some_and(|limit| memory > limit) {
        return Err(format!("it used {} MiB of memory", memory >> 20));
    }
    std::fs::read_to_string(&answers).map_err(|e| format!("answers: {e}"))
}

/// The child's part; its exit status.
fn attacked(
    scenes: &[scene::Scene],
    dir: &Path,
    bytes: &[u8],
    answers: &Path,
    messages: &Path,
) -> i32 {
    use std::os::fd::AsRawFd;
    let Ok(said) = std::fs::File::create(messages) else { return 3 };
    // SAFETY: this process alone is concerned: its time, the end with its parent, its descriptor of messages.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::dup2(said.as_raw_fd(), 2);
        libc::alarm(SECONDS_MAX);
    }
    limit(libc::RLIMIT_CORE, 0);
    // A forged length must not fill the disk before it is noticed.
    limit(libc::RLIMIT_FSIZE, 4 * attack::FILE_BYTES_MAX);
    let text = std::panic::catch_unwind(|| attack::run(scenes, dir, bytes));
    match text {
        Ok(text) => {
            let written =
                std::fs::File::create(answers).and_then(|mut file| file.write_all(text.as_bytes()));
            if written.is_ok() { 0 } else { 3 }
        }
        Err(_) => 101,
    }
}

fn limit(resource: libc::__rlimit_resource_t, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a valid limit; no memory is involved.
    unsafe { libc::setrlimit(resource, &limit) };
}
