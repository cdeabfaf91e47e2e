//! The text formats of `load` and `dump`.
//!
//! All three are read line by line and are lossless for every sequence of bytes, empty ones
//! included. A codec per file: [`lines`] (key, separator, value, with escapes), [`json_lines`] (an
//! object a line), [`tdb_text`] (what `tdbdump` prints). A codec knows nothing of files or
//! databases; [`Reader`] feeds it lines and says where something is malformed.

pub mod json_lines;
pub mod lines;
pub mod tdb_text;

use std::io::{self, BufRead};

use self::lines::LineFormat;

/// A record that has been read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
}

/// One of the text formats.
#[derive(Clone, Debug)]
pub enum Format {
    /// Key, separator, value.
    Lines(LineFormat),
    /// A JSON object a line.
    JsonLines,
    /// Blocks as `tdbdump` prints them.
    Tdb,
}

impl Format {
    /// Adds a record's text to `out`.
    pub fn write_record(&self, out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
        match self {
            Format::Lines(format) => format.write_record(out, key, value),
            Format::JsonLines => json_lines::write_record(out, key, value),
            Format::Tdb => tdb_text::write_record(out, key, value),
        }
    }
}

/// Why no record could be read.
#[derive(Debug)]
pub enum Problem {
    /// The input could not be read.
    Io(io::Error),
    /// The input is not in the expected format.
    Malformed {
        /// The line, counted from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
}

/// Reads records from a text.
pub struct Reader<R> {
    format: Format,
    input: R,
    line: Vec<u8>,
    line_number: u64,
    bytes_read: u64,
}

impl<R: BufRead> Reader<R> {
    /// A reader of `input`.
    pub fn new(format: Format, input: R) -> Self {
        Reader { format, input, line: Vec::new(), line_number: 0, bytes_read: 0 }
    }

    /// How much of the input has been consumed.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Reads the next record into `record`; `false` at the end of the input.
    pub fn read_record(&mut self, record: &mut Record) -> Result<bool, Problem> {
        record.key.clear();
        record.value.clear();
        if let Format::Tdb = self.format {
            return self.read_block(record);
        }
        if !self.read_line()? {
            return Ok(false);
        }
        let parsed = match &self.format {
            Format::Lines(format) => format.parse(&self.line, record),
            _ => json_lines::parse(&self.line, record),
        };
        parsed.map_err(|reason| self.malformed(reason))?;
        Ok(true)
    }

    fn read_block(&mut self, record: &mut Record) -> Result<bool, Problem> {
        let mut block = tdb_text::Block::default();
        let mut first_line = 0;
        while self.read_line()? {
            if !block.is_begun() {
                first_line = self.line_number;
            }
            match block.feed(&self.line, record) {
                Ok(tdb_text::Fed::Complete) => return Ok(true),
                Ok(tdb_text::Fed::More) => {}
                Err(reason) => return Err(self.malformed(reason)),
            }
        }
        if block.is_begun() {
            let reason =
                format!("the input ends inside the block that begins at line {first_line}");
            return Err(self.malformed(reason));
        }
        Ok(false)
    }

    /// Reads a line without its newline; `false` at the end of the input.
    fn read_line(&mut self) -> Result<bool, Problem> {
        self.line.clear();
        let read = self.input.read_until(b'\n', &mut self.line).map_err(Problem::Io)?;
        if read == 0 {
            return Ok(false);
        }
        self.bytes_read += read as u64;
        self.line_number += 1;
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
        }
        Ok(true)
    }

    fn malformed(&self, reason: String) -> Problem {
        Problem::Malformed { line: self.line_number, reason }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bytes that favour the ones with a meaning in some format.
    pub fn tricky_bytes() -> impl Strategy<Value = Vec<u8>> {
        let tricky = prop::sample::select(b"\t\n\r\\\"{}();:x0\0\x7f\x80\xc3\xa9\xff =".to_vec());
        prop::collection::vec(prop_oneof![tricky, any::<u8>()], 0..40)
    }

    pub fn read_all(format: Format, text: &[u8]) -> Result<Vec<Record>, Problem> {
        let mut reader = Reader::new(format, text);
        let mut records = Vec::new();
        let mut record = Record::default();
        while reader.read_record(&mut record)? {
            records.push(record.clone());
        }
        assert_eq!(reader.bytes_read(), text.len() as u64);
        Ok(records)
    }

    /// Where reading `text` fails, and why.
    pub fn failing_line(format: Format, text: &[u8]) -> (u64, String) {
        match read_all(format, text) {
            Err(Problem::Malformed { line, reason }) => (line, reason),
            other => panic!("not malformed: {other:?}"),
        }
    }

    fn assert_round_trip(format: Format, records: &[(Vec<u8>, Vec<u8>)]) {
        let mut text = Vec::new();
        for (key, value) in records {
            format.write_record(&mut text, key, value);
        }
        let back = read_all(format, &text).expect("own output is well-formed");
        let back: Vec<_> = back.into_iter().map(|record| (record.key, record.value)).collect();
        assert_eq!(back, records);
    }

    proptest! {
        #[test]
        fn every_format_is_lossless(
            records in prop::collection::vec((tricky_bytes(), tricky_bytes()), 0..8),
            separator in "\t|;|::|x4|=|é|tt",
        ) {
            assert_round_trip(Format::JsonLines, &records);
            assert_round_trip(Format::Tdb, &records);
            let format = LineFormat::new(separator.as_bytes(), true).unwrap();
            assert_round_trip(Format::Lines(format), &records);
        }

        #[test]
        fn arbitrary_text_never_panics(text in tricky_bytes()) {
            for format in [Format::Lines(LineFormat::default()), Format::JsonLines, Format::Tdb] {
                let mut reader = Reader::new(format, &text[..]);
                while let Ok(true) = reader.read_record(&mut Record::default()) {}
            }
        }
    }

    #[test]
    fn empty_input_is_no_record_in_every_format() {
        for format in [Format::Lines(LineFormat::default()), Format::JsonLines, Format::Tdb] {
            assert!(read_all(format, b"").unwrap().is_empty());
        }
    }
}
