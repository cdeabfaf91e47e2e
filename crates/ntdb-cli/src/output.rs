//! Standard output, buffered, with its errors as [`Failure`]s.

use std::io::{self, BufWriter, StdoutLock, Write};

use serde::Serialize;

use crate::failure::Failure;

/// Standard output. [`Output::finish`] must be called, or what is still buffered is lost unseen.
pub struct Output(BufWriter<StdoutLock<'static>>);

impl Output {
    /// Takes standard output.
    pub fn new() -> Output {
        Output(BufWriter::with_capacity(1 << 16, io::stdout().lock()))
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
