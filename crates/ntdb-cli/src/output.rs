//! Standard output, buffered, with its errors as [`Failure`]s.

use std::io::{self, BufWriter, StdoutLock, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

use crate::failure::Failure;

/// Whether the program was started without a standard output (`>&-`).
///
/// Rust's runtime puts `/dev/null` in its place, so that everything written would vanish with
/// status 0. Only before it does so can it be seen.
static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

extern "C" fn look_at_standard_output() {
    // SAFETY: asks about a descriptor, which need not be open.
    if unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } == -1 {
        WAS_CLOSED.store(true, Ordering::Relaxed);
    }
}

// SAFETY: the loader calls the functions in this section, with arguments that may be ignored, before
// `main`; this one needs nothing of the runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_EARLY: extern "C" fn() = look_at_standard_output;

/// Standard output, if the program has one.
struct Stdout(StdoutLock<'static>);

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if WAS_CLOSED.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Standard output. [`Output::finish`] must be called, or what is still buffered is lost unseen.
pub struct Output(BufWriter<Stdout>);

impl Output {
    /// Takes standard output.
    pub fn new() -> Output {
        Output(BufWriter::with_capacity(1 << 16, Stdout(io::stdout().lock())))
    }

    /// Writes bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.0.write_all(bytes).map_err(Failure::from_stdout)
    }

    /// Writes a line of text.
    pub fn line(&mut self, text: impl std::fmt::Display) -> Result<(), Failure> {
        writeln!(self.0, "{text}").map_err(Failure::from_stdout)
    }

    /// Writes a value as JSON on one line.
    pub fn json(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        serde_json::to_writer(&mut self.0, value)
            .map_err(|error| Failure::from_stdout(error.into()))?;
        self.bytes(b"\n")
    }

    /// Writes out what has been buffered so far.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.0.flush().map_err(Failure::from_stdout)
    }

    /// Writes out what is left.
    pub fn finish(mut self) -> Result<(), Failure> {
        self.flush()
    }
}
