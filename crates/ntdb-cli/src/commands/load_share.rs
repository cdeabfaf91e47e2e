//! Storing the records of a text, or one process's share of them.
//!
//! The shares are cut by key, not by position: all records with the same key belong to the same
//! share, in the order of the input. So the last one stays (with `--if-absent` the first), whatever
//! the number of processes; and doing again what a worker did before it died ends in the same state.

use std::io::BufRead;

use ntdb::Db;

use crate::failure::Failure;
use crate::text::{Problem, Reader, Record};

/// Records between two reports: some milliseconds of work.
const REPORT_EVERY_RECORDS: u64 = 1024;

/// One of several shares of the keys.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Which one, from 0.
    pub index: u32,
    /// How many there are.
    pub of: u32,
}

impl Share {
    /// Everything.
    pub const WHOLE: Share = Share { index: 0, of: 1 };

    fn takes(self, key: &[u8]) -> bool {
        self.of == 1 || fnv1a(key) % u64::from(self.of) == u64::from(self.index)
    }
}

/// FNV-1a with a final mix: all workers must cut alike, nothing else is asked of it.
fn fnv1a(key: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let hash = key.iter().fold(0xcbf2_9ce4_8422_2325, step);
    hash ^ (hash >> 32)
}

/// How far a share has got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Records of the input dealt with, whosever share they belong to.
    pub records_read: u64,
    /// Bytes of the input read.
    pub input_bytes: u64,
    /// Records stored.
    pub stored: u64,
    /// Records left out because their key was there (`--if-absent`).
    pub already_there: u64,
}

/// What to do with the records.
pub struct Job<'a> {
    /// Where to store them.
    pub db: &'a Db,
    /// The input's name, for messages.
    pub input_name: &'a str,
    /// Which of them.
    pub share: Share,
    /// Keep what is already stored.
    pub if_absent: bool,
    /// Records at the beginning that need nothing more.
    pub skip_records: u64,
}

impl Job<'_> {
    /// Does it; calls `report` now and then, also with the record stored last.
    pub fn run<R: BufRead>(
        &self,
        mut reader: Reader<R>,
        mut report: impl FnMut(&Tally, Option<&Record>) -> Result<(), Failure>,
    ) -> Result<Tally, Failure> {
        let mut tally = Tally::default();
        let mut record = Record::default();
        // The share's own record that was stored last; empty before there is one.
        let mut last_stored = Record::default();
        let mut any_stored = false;
        while reader.read_record(&mut record).map_err(|problem| self.failure(problem))? {
            tally.records_read += 1;
            tally.input_bytes = reader.bytes_read();
            if tally.records_read > self.skip_records && self.share.takes(&record.key) {
                self.store(&record, &mut tally)?;
                std::mem::swap(&mut record, &mut last_stored);
                any_stored = true;
            }
            if tally.records_read.is_multiple_of(REPORT_EVERY_RECORDS) {
                report(&tally, any_stored.then_some(&last_stored))?;
            }
        }
        report(&tally, any_stored.then_some(&last_stored))?;
        Ok(tally)
    }

    fn store(&self, record: &Record, tally: &mut Tally) -> Result<(), Failure> {
        if !self.if_absent {
            self.db.put(&record.key, &record.value)?;
        } else if !self.db.insert(&record.key, &record.value)? {
            tally.already_there += 1;
            return Ok(());
        }
        tally.stored += 1;
        Ok(())
    }

    fn failure(&self, problem: Problem) -> Failure {
        let name = self.input_name.to_string();
        match problem {
            Problem::Io(source) => Failure::File { name, action: "read", source },
            Problem::Malformed { line, reason } => Failure::Malformed { name, line, reason },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_belongs_to_exactly_one_share_and_shares_are_fair() {
        for of in [1, 2, 3, 4, 7, 16] {
            let mut counts = vec![0; of as usize];
            for number in 0..10_000u32 {
                let key = format!("{number:04X}");
                let takers: Vec<u32> =
                    (0..of).filter(|&index| Share { index, of }.takes(key.as_bytes())).collect();
                assert_eq!(takers.len(), 1, "{key} of {of}");
                counts[takers[0] as usize] += 1;
            }
            let fair = 10_000 / of as usize;
            assert!(counts.iter().all(|&count| count > fair / 2), "{of}: {counts:?}");
        }
    }
}
