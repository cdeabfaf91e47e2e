//! TDB's dump text, which `tdbdump` prints and `tdbrestore` reads.
//!
//! A record is four lines:
//! ```text
//! {
//! key(4) = "abc\00"
//! data(3) = "x\22y"
//! }
//! ```
//! The numbers are lengths in bytes. Bytes outside printable ASCII, `"` and `\` are written as a
//! backslash and two upper-case hexadecimal digits. Reading also takes lower-case digits, unescaped
//! bytes and empty lines between blocks, and insists on the lengths: they tell a truncated or
//! edited dump.

use super::Record;
use crate::bytes::hex_pair;

/// Adds a record's block to `out`.
pub fn write_record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    out.extend_from_slice(b"{\n");
    write_field(out, "key", key);
    write_field(out, "data", value);
    out.extend_from_slice(b"}\n");
}

fn write_field(out: &mut Vec<u8>, name: &str, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    out.extend_from_slice(format!("{name}({}) = \"", bytes.len()).as_bytes());
    for &byte in bytes {
        if (b' '..=b'~').contains(&byte) && byte != b'"' && byte != b'\\' {
            out.push(byte);
        } else {
            let (high, low) = (DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]);
            out.extend_from_slice(&[b'\\', high, low]);
        }
    }
    out.extend_from_slice(b"\"\n");
}

/// A block that is being read: which of its lines is expected next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Block {
    /// `{`
    #[default]
    Opening,
    /// `key(N) = "..."`
    Key,
    /// `data(N) = "..."`
    Data,
    /// `}`
    Closing,
}

/// What a line has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fed {
    /// The record is complete.
    Complete,
    /// The block goes on.
    More,
}

impl Block {
    /// Whether the block has been opened.
    pub fn is_begun(self) -> bool {
        self != Block::Opening
    }

    /// Takes the next line, without its newline.
    pub fn feed(&mut self, line: &[u8], record: &mut Record) -> Result<Fed, String> {
        match *self {
            Block::Opening => match line {
                b"" => {}
                b"{" => *self = Block::Key,
                _ => return Err("a block must begin with a line `{`".into()),
            },
            Block::Key => {
                parse_field("key", line, &mut record.key)?;
                *self = Block::Data;
            }
            Block::Data => {
                parse_field("data", line, &mut record.value)?;
                *self = Block::Closing;
            }
            Block::Closing => match line {
                b"}" => return Ok(Fed::Complete),
                _ => return Err("a block must end with a line `}`".into()),
            },
        }
        Ok(Fed::More)
    }
}

fn parse_field(name: &str, line: &[u8], into: &mut Vec<u8>) -> Result<(), String> {
    let quoted = split_field(name, line);
    let (length, quoted) =
        quoted.ok_or_else(|| format!("expected `{name}(LENGTH) = \"BYTES\"` on one line"))?;
    unquote(quoted, into)?;
    if into.len() as u64 != length {
        return Err(format!("{name}({length}) is followed by {} bytes", into.len()));
    }
    Ok(())
}

/// Parts `name(LENGTH) = "QUOTED"`.
fn split_field<'a>(name: &str, line: &'a [u8]) -> Option<(u64, &'a [u8])> {
    let rest = line.strip_prefix(name.as_bytes())?.strip_prefix(b"(")?;
    let digits_len = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    let (digits, rest) = rest.split_at(digits_len);
    let length = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some((length, rest.strip_prefix(b") = \"")?.strip_suffix(b"\"")?))
}

fn unquote(mut quoted: &[u8], into: &mut Vec<u8>) -> Result<(), String> {
    while let Some((&byte, rest)) = quoted.split_first() {
        quoted = match (byte, rest) {
            (b'\\', &[high, low, ref rest @ ..]) => {
                let byte = hex_pair(high, low)
                    .ok_or("a backslash must be followed by two hexadecimal digits")?;
                into.push(byte);
                rest
            }
            (b'\\', _) => {
                return Err("a backslash must be followed by two hexadecimal digits".into());
            }
            (b'"', _) => return Err("a quote inside the quotes must be written \\22".into()),
            _ => {
                into.push(byte);
                rest
            }
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{failing_line, read_all};
    use super::super::{Format, Record};
    use super::*;

    #[test]
    fn text_is_written_as_the_documentation_shows() {
        let mut out = Vec::new();
        write_record(&mut out, b"abc\0", b"x\"y");
        assert_eq!(out, b"{\nkey(4) = \"abc\\00\"\ndata(3) = \"x\\22y\"\n}\n");
    }

    #[test]
    fn every_byte_is_written_as_tdb_does() {
        let all: Vec<u8> = (0..=255).collect();
        let mut out = Vec::new();
        write_record(&mut out, b"", &all);
        let text = String::from_utf8(out).expect("the text is ASCII");
        assert!(text.contains("key(0) = \"\"\n"));
        assert!(text.contains("data(256) = \"\\00\\01"));
        assert!(text.contains("\\1E\\1F !\\22#$%&'()*+"));
        assert!(text.contains("[\\5C]^_`abc"));
        assert!(text.contains("xyz{|}~\\7F\\80"));
        assert!(text.ends_with("\\FE\\FF\"\n}\n"));
    }

    #[test]
    fn lower_case_raw_bytes_and_empty_lines_are_accepted() {
        let text = b"\n{\nkey(2) = \"\\c3\\a9\"\ndata(3) = \"\xc3\xa9}\"\n}\n\n";
        let expected = Record { key: b"\xc3\xa9".to_vec(), value: b"\xc3\xa9}".to_vec() };
        assert_eq!(read_all(Format::Tdb, text).unwrap(), [expected]);
    }

    #[test]
    fn malformed_blocks_are_named() {
        let cases: [(&str, u64, &str); 11] = [
            ("Failed to open x.tdb\n", 1, "must begin with"),
            ("{\nkey(1) = \"a\"\ndata(1) = \"b\"\n", 3, "ends inside the block"),
            ("{\n", 1, "ends inside the block"),
            ("{\nkey(2) = \"a\"\n", 2, "key(2) is followed by 1 bytes"),
            ("{\nkey(1) = \"a\"\ndata(3) = \"x\"y\"\n", 3, "must be written \\22"),
            ("{\nkey(1) = \"a\"\ndata(1) = \"\\4\"\n", 3, "two hexadecimal digits"),
            ("{\nkey(1) = \"a\"\ndata(1) = \"\\zz\"\n", 3, "two hexadecimal digits"),
            ("{\nkey(1) = \"a\"\nkey(1) = \"a\"\n", 3, "expected `data(LENGTH)"),
            ("{\nkey(x) = \"a\"\n", 2, "expected `key(LENGTH)"),
            ("{\nkey(99999999999999999999999) = \"a\"\n", 2, "expected `key(LENGTH)"),
            ("{\nkey(1) = \"a\"\ndata(1) = \"b\"\n{\n", 4, "must end with"),
        ];
        for (text, line, reason) in cases {
            let found = failing_line(Format::Tdb, text.as_bytes());
            assert_eq!(found.0, line, "{text}: {found:?}");
            assert!(found.1.contains(reason), "{text}: {found:?}");
        }
    }
}
