//! The default format: a record a line, `key SEPARATOR value`, the separator being a TAB.
//!
//! Escapes make it lossless: `\t`, `\n`, `\r`, `\\` and `\xHH` for any byte. Writing escapes control
//! characters, bytes that are not UTF-8, backslashes, and in a key whatever could be taken for the
//! beginning of the separator; all other UTF-8 text stays as it is. Reading takes an escape as a
//! unit, so that nothing in it is taken for a separator, and takes every other byte as it stands.
//! Text from elsewhere, in which a backslash is just a backslash, is read without escapes.

use super::Record;
use crate::bytes::hex_pair;

/// How lines are put together.
#[derive(Clone, Debug)]
pub struct LineFormat {
    separator: Vec<u8>,
    escapes: bool,
}

impl Default for LineFormat {
    fn default() -> Self {
        LineFormat { separator: b"\t".to_vec(), escapes: true }
    }
}

impl LineFormat {
    /// A format with another separator; an `Err` says what is wrong with the separator. Without
    /// `escapes`, a backslash in the text read has no meaning.
    pub fn new(separator: &[u8], escapes: bool) -> Result<LineFormat, &'static str> {
        if separator.is_empty() {
            return Err("the separator must not be empty");
        }
        if separator.contains(&b'\n') {
            return Err("the separator must not contain a newline, which ends a record");
        }
        if escapes && separator[0] == b'\\' {
            return Err("the separator must not begin with a backslash, which begins an escape");
        }
        Ok(LineFormat { separator: separator.to_vec(), escapes })
    }

    /// Adds a record's line to `out`, always with escapes.
    pub fn write_record(&self, out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
        escape_into(out, key, Some(self.separator[0]));
        out.extend_from_slice(&self.separator);
        escape_into(out, value, None);
        out.push(b'\n');
    }

    /// Reads a line (without its newline) into `record`, which is empty.
    pub fn parse(&self, line: &[u8], record: &mut Record) -> Result<(), String> {
        let mut rest = line;
        while !rest.starts_with(&self.separator) {
            if rest.is_empty() {
                let mut shown = Vec::new();
                escape_into(&mut shown, &self.separator, None);
                let shown = String::from_utf8_lossy(&shown).into_owned();
                return Err(format!("no separator `{shown}` between key and value"));
            }
            rest = self.take_byte(rest, &mut record.key)?;
        }
        rest = &rest[self.separator.len()..];
        while !rest.is_empty() {
            rest = self.take_byte(rest, &mut record.value)?;
        }
        Ok(())
    }

    /// Takes one byte or one escape off `text`; returns what follows it.
    fn take_byte<'a>(&self, text: &'a [u8], into: &mut Vec<u8>) -> Result<&'a [u8], String> {
        if text[0] != b'\\' || !self.escapes {
            into.push(text[0]);
            return Ok(&text[1..]);
        }
        let (byte, length) = match text[1..] {
            [b't', ..] => (b'\t', 2),
            [b'n', ..] => (b'\n', 2),
            [b'r', ..] => (b'\r', 2),
            [b'\\', ..] => (b'\\', 2),
            [b'x', high, low, ..] => match hex_pair(high, low) {
                Some(byte) => (byte, 4),
                None => return Err(r"\x without two hexadecimal digits".into()),
            },
            [b'x', ..] => return Err(r"\x without two hexadecimal digits".into()),
            [] => return Err("a backslash at the end of the line".into()),
            [byte, ..] => {
                return Err(format!(
                    r"`\{}` is no escape (\t \n \r \\ \xHH are; --no-escapes reads backslashes as they stand)",
                    byte.escape_ascii()
                ));
            }
        };
        into.push(byte);
        Ok(&text[length..])
    }
}

/// Adds `bytes` with escapes to `out`; text that contains the byte `avoid` is escaped too.
pub fn escape_into(out: &mut Vec<u8>, bytes: &[u8], avoid: Option<u8>) {
    let mut utf8 = [0; 4];
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            let encoded = character.encode_utf8(&mut utf8).as_bytes();
            if avoid.is_some_and(|avoid| encoded.contains(&avoid)) {
                escape_bytes(out, encoded);
                continue;
            }
            match character {
                '\t' => out.extend_from_slice(br"\t"),
                '\n' => out.extend_from_slice(br"\n"),
                '\r' => out.extend_from_slice(br"\r"),
                '\\' => out.extend_from_slice(br"\\"),
                _ if character.is_control() => escape_bytes(out, encoded),
                _ => out.extend_from_slice(encoded),
            }
        }
        escape_bytes(out, chunk.invalid());
    }
}

fn escape_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in bytes {
        let (high, low) = (DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]);
        out.extend_from_slice(&[b'\\', b'x', high, low]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{failing_line, read_all};
    use super::super::{Format, Record};
    use super::*;

    fn record(key: &[u8], value: &[u8]) -> Record {
        Record { key: key.to_vec(), value: value.to_vec() }
    }

    #[test]
    fn text_is_written_as_the_documentation_shows() {
        let mut out = Vec::new();
        let format = LineFormat::default();
        format.write_record(&mut out, b"caf\xc3\xa9", b"a\tb\\c\nd\re\0f\xff");
        assert_eq!(out, b"caf\xc3\xa9\ta\\tb\\\\c\\nd\\re\\x00f\\xFF\n");
    }

    #[test]
    fn only_the_first_separator_parts() {
        let format = LineFormat::new(b";", true).unwrap();
        let text = b"0041;LATIN CAPITAL LETTER A;Lu;0\n;\n;x\ny;";
        let expected = [
            record(b"0041", b"LATIN CAPITAL LETTER A;Lu;0"),
            record(b"", b""),
            record(b"", b"x"),
            record(b"y", b""),
        ];
        assert_eq!(read_all(Format::Lines(format), text).unwrap(), expected);
    }

    #[test]
    fn an_escape_is_never_taken_for_a_separator() {
        let format = LineFormat::new(b"x4", true).unwrap();
        let records = read_all(Format::Lines(format), b"\\x41x4v\n").unwrap();
        assert_eq!(records, [record(b"A", b"v")]);
    }

    #[test]
    fn without_escapes_a_backslash_stands_for_itself() {
        let format = LineFormat::new(b"\t", false).unwrap();
        let records = read_all(Format::Lines(format), b"C:\\temp\t\\d+\\\n").unwrap();
        assert_eq!(records, [record(b"C:\\temp", b"\\d+\\")]);
    }

    #[test]
    fn malformed_lines_are_named() {
        let lines = || Format::Lines(LineFormat::default());
        let cases: [(&[u8], u64, &str); 6] = [
            (b"a\tb\nno separator\n", 2, r"no separator `\t`"),
            (b"a\tb\n\nc\td\n", 2, "no separator"),
            (b"a\t\\q\n", 1, r"`\q` is no escape"),
            (b"a\t\\x4\n", 1, r"\x without two"),
            (b"a\t\\xzz\n", 1, r"\x without two"),
            (b"a\tb\\", 1, "a backslash at the end"),
        ];
        for (text, line, reason) in cases {
            let found = failing_line(lines(), text);
            assert_eq!(found.0, line, "{found:?}");
            assert!(found.1.contains(reason), "{found:?}");
        }
    }

    #[test]
    fn impossible_separators_are_refused() {
        for separator in ["", "\\", "\\t", "a\nb"] {
            assert!(LineFormat::new(separator.as_bytes(), true).is_err(), "{separator:?}");
        }
        assert!(LineFormat::new(b"\\", false).is_ok());
    }
}
