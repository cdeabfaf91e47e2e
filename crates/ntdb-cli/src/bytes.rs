//! Bytes on the command line: as they are given, or as hexadecimal digits.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::failure::Failure;

/// The bytes that `argument` stands for.
pub fn from_argument(argument: &OsStr, hex: bool) -> Result<Vec<u8>, Failure> {
    if hex { from_hex(argument.as_bytes()) } else { Ok(argument.as_bytes().to_vec()) }
}

/// The bytes that hexadecimal digits stand for, two digits to a byte.
pub fn from_hex(digits: &[u8]) -> Result<Vec<u8>, Failure> {
    let wrong = |what: &str| {
        let shown = String::from_utf8_lossy(digits);
        Failure::Usage(format!("`{shown}`: {what}; with --hex write two digits 0-9 a-f per byte"))
    };
    if !digits.len().is_multiple_of(2) {
        return Err(wrong("an odd number of hexadecimal digits"));
    }
    let pairs = digits.chunks_exact(2).map(|pair| hex_pair(pair[0], pair[1]));
    pairs.collect::<Option<Vec<u8>>>().ok_or_else(|| wrong("not a hexadecimal digit"))
}

/// The byte that two hexadecimal digits stand for.
pub fn hex_pair(high: u8, low: u8) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    Some((digit(high)? * 16 + digit(low)?) as u8)
}

/// `bytes` as lower-case hexadecimal digits.
pub fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut digits = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        write!(digits, "{byte:02x}").expect("writing to a String cannot fail");
    }
    digits
}

/// "FILE: key `k`", with the key shortened and escaped so that it fits a message.
pub fn name_key(file: &Path, key: &[u8]) -> String {
    const SHOWN_BYTES: usize = 80;
    let mut shown = Vec::new();
    crate::text::lines::escape_into(&mut shown, &key[..key.len().min(SHOWN_BYTES)], None);
    let dots = if key.len() > SHOWN_BYTES { "..." } else { "" };
    format!("{}: key `{}{dots}`", file.display(), String::from_utf8_lossy(&shown))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hex_round_trips(bytes: Vec<u8>) {
            prop_assert_eq!(from_hex(to_hex(&bytes).as_bytes()).unwrap(), bytes);
        }
    }

    #[test]
    fn wrong_digits_are_usage_errors() {
        for wrong in ["0", "0g", "abc", "+1", " 1"] {
            assert_eq!(from_hex(wrong.as_bytes()).unwrap_err().exit_status(), 2, "{wrong}");
        }
    }
}
