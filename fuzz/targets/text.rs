#![no_main]
//! The text formats of the command line program. What is read is written again and must read the same.

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)]
#[path = "../../crates/ntdb-cli/src/text/mod.rs"]
mod text;

/// What the formats need of the program's module of this name.
mod bytes {
    /// The byte that two hexadecimal digits stand for.
    pub fn hex_pair(high: u8, low: u8) -> Option<u8> {
        let digit = |byte: u8| char::from(byte).to_digit(16);
        Some((digit(high)? * 16 + digit(low)?) as u8)
    }
}

use text::lines::LineFormat;
use text::{Format, Reader, Record};

fn read(format: &Format, input: &[u8]) -> Vec<Record> {
    let mut reader = Reader::new(format.clone(), input);
    let mut records = Vec::new();
    let mut record = Record::default();
    while let Ok(true) = reader.read_record(&mut record) {
        records.push(record.clone());
    }
    assert!(reader.bytes_read() <= input.len() as u64);
    records
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, input)) = bytes.split_first() else { return };
    let format = match which % 4 {
        0 => Format::JsonLines,
        1 => Format::Tdb,
        2 => Format::Lines(LineFormat::default()),
        _ => {
            let (separator, _) = input.split_at(input.len().min(1 + which as usize / 64));
            match LineFormat::new(separator, true) {
                Ok(format) => Format::Lines(format),
                Err(_) => return,
            }
        }
    };
    let records = read(&format, input);
    let mut again = Vec::new();
    for record in &records {
        format.write_record(&mut again, &record.key, &record.value);
    }
    assert_eq!(read(&format, &again), records);
});
