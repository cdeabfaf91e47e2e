//! Recovery from logs that were written by hand: a transaction is there as a whole or not at all.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::api::db::Db;
use crate::error::{Error, Result};
use crate::limits::{MAX_CHUNK_BYTES, MAX_KEY_BYTES, RING_BYTES};
use crate::log::file::{LOG_HEADER_BYTES, LogHeader};
use crate::log::record::testing::sealed;
use crate::log::record::{self, Op};
use crate::log::stream::{append_op, append_undone};
use crate::options::Options;
use crate::page::meta::{META_PAGES, Meta};
use crate::salvage;
use crate::shm::layout::{CONTROL, Control, LogWords, RING, WriterWords};
use crate::types::Lsn;

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

const NAMES: [&str; 4] = ["a.ntdb", "a.ntdb-log0", "a.ntdb-log1", "a.ntdb-shm"];

/// A log file in memory, to which records can be added.
#[derive(Clone, Debug)]
struct Log {
    header: LogHeader,
    bytes: Vec<u8>,
}

impl Log {
    fn new(header: LogHeader) -> Log {
        Log { header, bytes: header.encode().to_vec() }
    }

    /// A log without what lies behind its last record.
    fn read(file: &[u8]) -> Log {
        let header = LogHeader::decode(file.first_chunk::<LOG_HEADER_BYTES>().unwrap()).unwrap();
        let mut log = Log { header, bytes: file.to_vec() };
        let mut at = LOG_HEADER_BYTES;
        while let Some(len) = record::sealed_len(header.salt, log.lsn_at(at), &file[at..]) {
            at += len as usize;
        }
        log.bytes.truncate(at);
        log
    }

    fn lsn_at(&self, at: usize) -> Lsn {
        Lsn(self.header.start.0 + (at - LOG_HEADER_BYTES) as u64)
    }

    fn end(&self) -> Lsn {
        self.lsn_at(self.bytes.len())
    }

    fn push(&mut self, op: &Op<'_>) -> Lsn {
        let lsn = self.end();
        self.bytes.extend(sealed(op, self.header.salt, lsn));
        lsn
    }

    /// The log that continues this one.
    fn next(&self) -> Log {
        let salt = self.header.salt ^ 0x5a5a;
        let previous_salt = self.header.salt;
        Log::new(LogHeader { start: self.end(), salt, previous_salt, ..self.header })
    }
}

/// The files of a database as a crash leaves them, and what it has.
struct Site {
    dir: tempfile::TempDir,
    files: [Vec<u8>; 4],
    page_size: usize,
    records: Records,
}

fn base(db: &Db) -> Records {
    let mut records = Records::new();
    let mut put = |key: Vec<u8>, value: Vec<u8>| {
        db.put(&key, &value).unwrap();
        records.insert(key, value);
    };
    for n in 0..200u32 {
        put(format!("key {n}").into_bytes(), vec![n as u8; n as usize * 3]);
    }
    put(b"grows".to_vec(), vec![1; 10]);
    put(b"long".to_vec(), vec![2; 70_000]);
    put(vec![3; 20_000], vec![3; 100]);
    records
}

impl Site {
    /// A database with its records in the checkpoint, and an empty log behind it.
    fn new() -> Site {
        Site::with_page_size(4096)
    }

    fn with_page_size(page_size: u32) -> Site {
        let dir = tempfile::tempdir().unwrap();
        let db = Options::new()
            .create(true)
            .page_size(page_size)
            .open(dir.path().join(NAMES[0]))
            .unwrap();
        let records = base(&db);
        db.sync().unwrap();
        db.checkpoint().unwrap();
        // One record, so that the log has switched.
        db.put(b"last", b"1").unwrap();
        db.sync().unwrap();
        let files = NAMES.map(|name| std::fs::read(dir.path().join(name)).unwrap_or_default());
        db.close().unwrap();
        let records = records.into_iter().chain([(b"last".to_vec(), b"1".to_vec())]).collect();
        let site = Site { dir, files, page_size: page_size as usize, records };
        assert_eq!(site.meta().1.log_index, 1);
        assert_eq!(site.log().header.salt, site.meta().1.log_salt);
        site
    }

    fn path(&self, number: usize) -> PathBuf {
        self.dir.path().join(NAMES[number])
    }

    /// The log that the meta page names.
    fn log(&self) -> Log {
        Log::read(&self.files[2])
    }

    /// The newest meta page, and where it lies.
    fn meta(&self) -> (usize, Meta) {
        let metas = META_PAGES.map(|page| {
            let at = page as usize * self.page_size;
            Some((at, Meta::decode(&self.files[0][at..at + self.page_size]).ok()?))
        });
        metas.into_iter().flatten().max_by_key(|(_, meta)| meta.sequence).unwrap()
    }

    /// Lays the files down with these logs: as after a power cut, or with the shared memory.
    fn lay(&self, logs: &[&Log], shm: Option<&[u8]>) {
        let mut data = self.files[0].clone();
        if shm.is_none() {
            // What the attach record says of this boot.
            data[2048..4096].fill(0);
        }
        // Overwritten rather than made anew: the shared memory names the inode.
        std::fs::write(self.path(0), data).unwrap();
        for (number, log) in [(2, logs.first()), (1, logs.get(1))] {
            match log {
                Some(log) => std::fs::write(self.path(number), &log.bytes).unwrap(),
                None => drop(std::fs::remove_file(self.path(number))),
            }
        }
        match shm {
            Some(shm) => std::fs::write(self.path(3), shm).unwrap(),
            None => drop(std::fs::remove_file(self.path(3))),
        }
    }

    fn open(&self, logs: &[&Log]) -> Result<Db> {
        self.lay(logs, None);
        Db::open(self.path(0))
    }

    /// What recovery makes of the logs; all of it is whole, and no page is lost.
    fn recover(&self, logs: &[&Log]) -> Records {
        contents(self.open(logs).unwrap())
    }

    /// The reason of the error that the logs lead to, and where it is.
    fn refused(&self, logs: &[&Log]) -> (PathBuf, String, String) {
        match self.open(logs) {
            Err(Error::Corrupt { path, place, reason }) => (path, place, reason),
            other => panic!("{other:?}"),
        }
    }
}

fn contents(db: Db) -> Records {
    let report = db.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    let records: Records = db.iter().map(|record| record.unwrap()).collect();
    assert_eq!(db.len().unwrap(), records.len() as u64);
    db.close().unwrap();
    records
}

fn apply(records: &mut Records, op: &Op<'_>) {
    match *op {
        Op::Put { key, value } => drop(records.insert(key.into(), value.into())),
        Op::Delete { key } => assert!(records.remove(key).is_some()),
        Op::Append { key, length_before, bytes } => {
            let value = records.entry(key.into()).or_default();
            assert_eq!(value.len() as u64, length_before);
            value.extend(bytes);
        }
        Op::Clear => records.clear(),
        other => panic!("{other:?}"),
    }
}

/// The transaction's effect, and its stream.
fn transaction(before: &Records, ops: &[Op<'_>]) -> (Records, Vec<u8>) {
    let (mut after, mut stream) = (before.clone(), Vec::new());
    for op in ops {
        apply(&mut after, op);
        append_op(&mut stream, op);
    }
    (after, stream)
}

fn commit<'a>(first: Lsn, stream: &[u8], undone: &'a [u8]) -> Op<'a> {
    Op::Commit { first, total: stream.len() as u64, crc: crc32c::crc32c(stream), undone }
}

/// Logs a stream in chunks of `piece` bytes; returns the LSN of the first.
fn push_chunks(log: &mut Log, stream: &[u8], piece: usize) -> Lsn {
    let first = log.end();
    for bytes in stream.chunks(piece) {
        log.push(&Op::TransactionChunk { first, bytes });
    }
    first
}

fn noise(len: usize) -> Vec<u8> {
    (0..len as u64).map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

const SMALL: [Op<'static>; 6] = [
    Op::Put { key: b"new", value: b"value" },
    Op::Put { key: b"key 7", value: b"another value" },
    Op::Delete { key: b"key 9" },
    Op::Append { key: b"grows", length_before: 10, bytes: b"more" },
    Op::Append { key: b"appeared", length_before: 0, bytes: b"so" },
    Op::Append { key: b"grows", length_before: 14, bytes: &[5; 2000] },
];

#[test]
fn in_one_record_all_or_nothing() {
    let site = Site::new();
    let (after, stream) = transaction(&site.records, &SMALL);
    let mut log = site.log();
    log.push(&Op::Transaction { ops: &stream });
    log.push(&Op::Put { key: b"behind", value: b"it" });
    let mut behind = after.clone();
    behind.insert(b"behind".to_vec(), b"it".to_vec());
    assert!(site.recover(&[&log]) == behind);
    let (begin, end) = (site.log().bytes.len(), log.bytes.len() - 24);
    for cut in (begin..end).step_by(131).chain([end - 1]) {
        let mut cut_log = log.clone();
        cut_log.bytes.truncate(cut);
        assert!(site.recover(&[&cut_log]) == site.records, "cut at {cut} of {begin}..{end}");
    }
    log.bytes.truncate(log.bytes.len() - 1);
    assert!(site.recover(&[&log]) == after);
    // Without operations nothing happens.
    let mut log = site.log();
    log.push(&Op::Transaction { ops: b"" });
    assert!(site.recover(&[&log]) == site.records);
    // Everything goes, and something comes.
    let ops = [Op::Clear, Op::Put { key: b"only", value: b"1" }, Op::Clear, SMALL[0]];
    let (after, stream) = transaction(&site.records, &ops);
    log.push(&Op::Transaction { ops: &stream });
    assert_eq!(after.len(), 1);
    assert!(site.recover(&[&log]) == after);
}

#[test]
fn values_of_any_length_come_whole_from_chunks() {
    for page_size in [4096, 65536] {
        let site = Site::with_page_size(page_size);
        let long = noise(5_000_000);
        let key = noise(MAX_KEY_BYTES as usize);
        let mut ops = vec![
            Op::Put { key: b"huge", value: &long },
            // Key and value in an extent.
            Op::Put { key: &key, value: &long[7..3_000_007] },
            Op::Append { key: b"grows", length_before: 10, bytes: &long[..2_000_000] },
            Op::Append { key: b"appeared", length_before: 0, bytes: &long[9..1_000_000] },
            Op::Append { key: b"long", length_before: 70_000, bytes: &long[..300_000] },
            Op::Append { key: b"grows", length_before: 2_000_010, bytes: b"and more" },
            Op::Put { key: b"long", value: &long[..262_130] },
            Op::Delete { key: &key },
            Op::Put { key: &key, value: &long[1..400_000] },
        ];
        ops.extend(SMALL.iter().filter(|op| !matches!(op, Op::Append { .. })));
        let (after, stream) = transaction(&site.records, &ops);
        for piece in [MAX_CHUNK_BYTES as usize, 100_003, 9_999] {
            let mut log = site.log();
            let first = push_chunks(&mut log, &stream, piece);
            let unfinished = log.clone();
            log.push(&commit(first, &stream, b""));
            assert!(site.recover(&[&log]) == after, "chunks of {piece}");
            // And without a commit: nothing, and no page is lost.
            assert!(site.recover(&[&unfinished]) == site.records, "chunks of {piece}");
        }
    }
}

/// A transaction of some 60 chunks, with records of others between them.
struct Long {
    log: Log,
    /// Where each record ends, and what is there from then on.
    states: Vec<(usize, Records)>,
}

/// With the last third of the operations undone if `undo`.
fn long_transaction(site: &Site, undo: bool) -> Long {
    let value = noise(9_000);
    let keys: Vec<_> = (0..150).map(|n| format!("new {n}").into_bytes()).collect();
    let puts = keys.iter().enumerate();
    let mut ops: Vec<_> = puts.map(|(n, key)| Op::Put { key, value: &value[n * 13..] }).collect();
    ops.splice(40..40, SMALL);
    ops.push(Op::Delete { key: b"new" });
    let kept = if undo { ops.len() * 2 / 3 } else { ops.len() };
    let (_, stream) = transaction(&site.records, &ops);
    let mut undone = Vec::new();
    if undo {
        // The first operation as well.
        let (_, first) = transaction(&site.records, &ops[..1]);
        append_undone(&mut undone, 0, first.len() as u64);
        let (_, begin) = transaction(&site.records, &ops[..kept]);
        append_undone(&mut undone, begin.len() as u64, (stream.len() - begin.len()) as u64);
    }
    let mut log = site.log();
    let mut records = site.records.clone();
    let mut states = vec![(log.bytes.len(), records.clone())];
    let first = log.end();
    for (n, bytes) in stream.chunks(21_111).enumerate() {
        log.push(&Op::TransactionChunk { first, bytes });
        states.push((log.bytes.len(), records.clone()));
        let other = Op::Put { key: b"other", value: &[n as u8; 40] };
        log.push(&other);
        apply(&mut records, &other);
        states.push((log.bytes.len(), records.clone()));
    }
    log.push(&commit(first, &stream, &undone));
    ops[undo as usize..kept].iter().for_each(|op| apply(&mut records, op));
    states.push((log.bytes.len(), records.clone()));
    let behind = Op::Put { key: b"other", value: b"behind" };
    log.push(&behind);
    apply(&mut records, &behind);
    states.push((log.bytes.len(), records));
    Long { log, states }
}

impl Long {
    /// What is there if the log is cut after `cut` bytes.
    fn state(&self, cut: usize) -> &Records {
        &self.states.iter().rfind(|(end, _)| *end <= cut).unwrap().1
    }
}

#[test]
fn cut_anywhere_it_is_all_or_nothing() {
    let site = Site::new();
    for undo in [false, true] {
        let long = long_transaction(&site, undo);
        let (begin, end) = (site.log().bytes.len(), long.log.bytes.len());
        assert!(long.states.len() > 100);
        assert_eq!(long.state(end).contains_key(&b"new 149"[..]), !undo);
        assert_eq!(long.state(end).contains_key(&b"new 0"[..]), !undo);
        assert!(long.state(end).contains_key(&b"new 60"[..]));
        let edges = long.states.iter().flat_map(|(end, _)| [end - 1, *end]);
        let step = (end - begin) / 40;
        let tail = edges.clone().skip(long.states.len() * 2 - 8);
        let cuts = (begin..end).step_by(step).chain(edges.step_by(9)).chain(tail);
        for cut in cuts.filter(|&cut| cut >= begin) {
            let mut log = long.log.clone();
            // The length stays, as it does if sectors were lost.
            log.bytes[cut..].fill(0);
            assert!(site.recover(&[&log]) == *long.state(cut), "cut at {cut} of {begin}..{end}");
        }
    }
}

#[test]
fn across_a_switch_of_logs() {
    let site = Site::new();
    let long = long_transaction(&site, true);
    let whole = &long.states.last().unwrap().1;
    for (cut, _) in long.states.iter().step_by(11).chain(&long.states[long.states.len() - 3..]) {
        let mut one = long.log.clone();
        one.bytes.truncate(*cut);
        let mut two = one.next();
        let (mut at, mut rest) = (long.log.lsn_at(*cut), &long.log.bytes[*cut..]);
        while let Ok(record::Decoded::Record { op, len }) =
            record::decode(long.log.header.salt, at, rest)
        {
            assert_eq!(two.push(&op), at);
            (at, rest) = (Lsn(at.0 + len as u64), &rest[len as usize..]);
        }
        assert!(rest.is_empty());
        assert!(site.recover(&[&one, &two]) == *whole, "switched at {cut}");
        let lost = (two.bytes.len() - LOG_HEADER_BYTES).min(300);
        two.bytes.truncate(two.bytes.len() - lost);
        let lost = long.state(one.bytes.len() + two.bytes.len() - LOG_HEADER_BYTES);
        assert!(site.recover(&[&one, &two]) == *lost, "switched at {cut}");
    }
}

#[test]
fn chunks_from_before_the_checkpoint_count_and_a_commit_from_before_it_does_not() {
    let mut site = Site::new();
    let (after, stream) = transaction(&site.records, &SMALL);
    let mut log = site.log();
    // The record that is there is in the checkpoint then, which does not have it: it must not be looked for.
    site.records.remove(&b"last"[..]);
    let (mut expected, before) = (after, site.records.clone());
    expected.remove(&b"last"[..]);
    let first = push_chunks(&mut log, &stream, 700);
    let chunk_ends: Vec<u64> = {
        let rest = &log.bytes[site.log().bytes.len()..];
        let (mut at, mut rest, mut ends) = (first, rest, vec![first.0]);
        while let Some(len) = record::sealed_len(log.header.salt, at, rest) {
            at = Lsn(at.0 + len as u64);
            rest = &rest[len as usize..];
            ends.push(at.0);
        }
        ends
    };
    assert!(chunk_ends.len() > 3);
    let end_of_chunks = log.end();
    log.push(&commit(first, &stream, b""));
    let end = log.end();
    let (at, meta) = site.meta();
    let mut with = |replay_from: u64, keep_from: u64, log: &Log| {
        let meta =
            Meta { replay_from: Lsn(replay_from), keep_from: Lsn(keep_from), ..meta.clone() };
        let page = meta.encode(site.page_size as u32);
        site.files[0][at..at + site.page_size].copy_from_slice(&page);
        site.open(&[log])
    };
    for &replay_from in &chunk_ends {
        let db = with(replay_from, first.0, &log).unwrap();
        assert!(contents(db) == expected, "replayed from {replay_from}");
    }
    assert_eq!(*chunk_ends.last().unwrap(), end_of_chunks.0);
    // The checkpoint has what was committed before it; here, nothing.
    assert!(contents(with(end.0, first.0, &log).unwrap()) == before);
    // The first chunk is not kept, but the commit counts: impossible.
    let error = with(end_of_chunks.0, chunk_ends[1], &log).unwrap_err();
    assert!(error.to_string().contains("has no chunks"), "{error}");
    // In one record, before the checkpoint and after it.
    let mut log = log_up_to(&log, first);
    log.push(&Op::Transaction { ops: &stream });
    assert!(contents(with(log.end().0, first.0, &log).unwrap()) == before);
    assert!(contents(with(first.0, first.0, &log).unwrap()) == expected);
}

/// The log up to `end`.
fn log_up_to(log: &Log, end: Lsn) -> Log {
    let mut log = log.clone();
    log.bytes.truncate(LOG_HEADER_BYTES + (end.0 - log.header.start.0) as usize);
    log
}

fn put_word(shm: &mut [u8], at: usize, word: u64) {
    shm[CONTROL + at..][..8].copy_from_slice(&word.to_le_bytes());
}

#[test]
fn what_only_the_ring_has_counts_too() {
    const TAIL: usize = offset_of!(Control, writer) + offset_of!(WriterWords, tail);
    const WRITTEN: usize = offset_of!(Control, log) + offset_of!(LogWords, written);
    let site = Site::new();
    let long = long_transaction(&site, true);
    let begin = site.log().bytes.len();
    let whole = long.log.bytes.len();
    let with_ring = |written: usize, tail: usize| {
        let mut shm = site.files[3].clone();
        for at in written..tail {
            let lsn = long.log.lsn_at(at).0;
            shm[RING + (lsn % RING_BYTES) as usize] = long.log.bytes[at];
        }
        put_word(&mut shm, WRITTEN, long.log.lsn_at(written).0);
        put_word(&mut shm, TAIL, long.log.lsn_at(tail).0);
        let mut log = long.log.clone();
        log.bytes.truncate(written);
        site.lay(&[&log], Some(&shm));
        contents(Db::open(site.path(0)).unwrap())
    };
    let ends: Vec<usize> = long.states.iter().map(|(end, _)| *end).collect();
    for &written in ends.iter().rev().take(4).chain(ends.iter().rev().skip(6).step_by(17)) {
        if whole - written <= RING_BYTES as usize {
            assert!(with_ring(written, whole) == *long.state(whole), "written up to {written}");
        }
    }
    for &tail in ends.iter().skip(1).step_by(13) {
        if tail - begin <= RING_BYTES as usize {
            assert!(with_ring(begin, tail) == *long.state(tail), "the tail is {tail}");
        }
    }
    // What the ring says of a transaction must be right as well.
    let mut log = site.log();
    let lsn = log.push(&Op::Commit { first: Lsn(7), total: 0, crc: 0, undone: b"" });
    let mut shm = site.files[3].clone();
    for (at, &byte) in log.bytes.iter().enumerate().skip(begin) {
        shm[RING + (log.lsn_at(at).0 % RING_BYTES) as usize] = byte;
    }
    put_word(&mut shm, TAIL, log.end().0);
    site.lay(&[&site.log()], Some(&shm));
    match Db::open(site.path(0)).unwrap_err() {
        Error::Corrupt { path, place, .. } => {
            assert_eq!(path, site.path(0));
            assert_eq!(place, format!("LSN {} in the shared state's log ring", lsn.0));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_private_reader_sees_the_same() {
    let site = Site::new();
    let long = long_transaction(&site, true);
    site.lay(&[&long.log], None);
    let mut options = Options::new();
    let db = options.read_only(true).open(site.path(0)).unwrap();
    let records: Records = db.iter().map(|record| record.unwrap()).collect();
    assert!(records == *long.state(long.log.bytes.len()));
}

#[test]
fn what_another_operation_begins_ends_an_unfinished_one() {
    let site = Site::new();
    let (after, stream) = transaction(&site.records, &SMALL);
    let value = noise(300_000);
    let push_value = |log: &mut Log, key| {
        let first = log.end();
        for bytes in value.chunks(MAX_CHUNK_BYTES as usize) {
            log.push(&Op::Chunk { first, total: value.len() as u64, bytes });
        }
        let crc = crc32c::crc32c(&value);
        Op::PutChunked { key, len: value.len() as u64, first, crc }
    };
    let mut log = site.log();
    // Nothing of these three is finished.
    push_chunks(&mut log, &noise(200_000), 9_000);
    push_value(&mut log, b"unfinished");
    push_chunks(&mut log, &stream, 100);
    // These are.
    let op = push_value(&mut log, b"finished");
    log.push(&op);
    let first = push_chunks(&mut log, &stream, 500);
    log.push(&commit(first, &stream, b""));
    // This is not.
    push_chunks(&mut log, &stream, 500);
    let mut expected = after;
    expected.insert(b"finished".to_vec(), value.clone());
    assert!(site.recover(&[&log]) == expected);
}

#[test]
fn what_a_commit_names_must_be_there() {
    let site = Site::new();
    let (_, stream) = transaction(&site.records, &SMALL);
    type Case<'a> = (&'a str, &'a dyn Fn(&mut Log) -> Lsn);
    let inside = {
        let mut undone = Vec::new();
        append_undone(&mut undone, 3, 5);
        undone
    };
    let nested = {
        let mut stream = stream.clone();
        let mut body = vec![0; record::body_len(&Op::Transaction { ops: b"" })];
        record::encode_body(&Op::Transaction { ops: b"" }, &mut body);
        stream.push(body.len() as u8);
        stream.extend(body);
        stream
    };
    let cases: [Case; 13] = [
        ("has no chunks", &|log| log.push(&commit(Lsn(7), &stream, b""))),
        ("has no chunks", &|log| log.push(&commit(log.end(), b"", b""))),
        ("has no chunks", &|log| {
            // The chunk names a first one that is not there.
            let first = Lsn(log.end().0 - 1);
            log.push(&Op::TransactionChunk { first, bytes: &stream });
            log.push(&commit(first, &stream, b""))
        }),
        ("has no chunks", &|log| {
            // Another one has begun since.
            let first = push_chunks(log, &stream, 500);
            push_chunks(log, &stream, 500);
            log.push(&commit(first, &stream, b""))
        }),
        ("has no chunks", &|log| {
            // Once committed it is used up.
            let first = push_chunks(log, &stream, 500);
            log.push(&commit(first, b"", b""));
            log.bytes.truncate(log.bytes.len() - 22);
            log.push(&commit(first, &stream, b""));
            log.push(&commit(first, &stream, b""))
        }),
        ("bytes, its commit names", &|log| {
            let first = push_chunks(log, &stream[1..], 500);
            log.push(&commit(first, &stream, b""))
        }),
        ("bytes, its commit names", &|log| {
            let first = push_chunks(log, &nested, 500);
            log.push(&commit(first, &stream, b""))
        }),
        ("checksum", &|log| {
            let mut stream = stream.clone();
            stream[700] ^= 1;
            let first = push_chunks(log, &stream, 500);
            stream[700] ^= 1;
            log.push(&commit(first, &stream, b""))
        }),
        ("undone parts makes no sense", &|log| {
            let first = push_chunks(log, &stream, 500);
            log.push(&commit(first, &stream, &[1]))
        }),
        ("begins inside an operation", &|log| {
            let first = push_chunks(log, &stream, 500);
            log.push(&commit(first, &stream, &inside))
        }),
        ("none that a transaction can contain", &|log| {
            let first = push_chunks(log, &nested, 500);
            log.push(&commit(first, &nested, b""))
        }),
        ("none that a transaction can contain", &|log| log.push(&Op::Transaction { ops: &nested })),
        ("does not fit it", &|log| log.push(&Op::Transaction { ops: &stream[..stream.len() - 1] })),
    ];
    for (n, (expected, make)) in cases.iter().enumerate() {
        let mut log = site.log();
        let lsn = make(&mut log);
        let (path, place, reason) = site.refused(&[&log]);
        assert!(reason.contains(expected), "case {n}: {reason}");
        assert_eq!((path, place), (site.path(2), format!("LSN {}", lsn.0)), "case {n}");
        // It is refused as often as it is tried, and a log without it opens.
        assert!(Db::open(site.path(0)).is_err());
        std::fs::write(site.path(2), &site.log().bytes).unwrap();
        assert!(contents(Db::open(site.path(0)).unwrap()) == site.records, "case {n}");
    }
    // What the stream has may disagree with the state.
    let mut log = site.log();
    let mut stream = Vec::new();
    append_op(&mut stream, &Op::Append { key: b"grows", length_before: 11, bytes: b"x" });
    log.push(&Op::Transaction { ops: &stream });
    let (_, _, reason) = site.refused(&[&log]);
    assert!(reason.contains("expects"), "{reason}");
    // A key that nothing can hold.
    let mut log = site.log();
    let mut stream = Vec::new();
    append_op(&mut stream, &Op::Put { key: &[1; MAX_KEY_BYTES as usize + 1], value: b"" });
    log.push(&Op::Transaction { ops: &stream });
    let (_, _, reason) = site.refused(&[&log]);
    assert!(reason.contains("has a key of more than"), "{reason}");
}

#[test]
fn salvage_takes_whole_transactions_too() {
    let site = Site::new();
    let destination = site.dir.path().join("new.ntdb");
    let saved = |log: &Log| {
        site.lay(&[log], None);
        let report = salvage::salvage(site.path(0), &destination, |_| {}).unwrap();
        let records = contents(Db::open(&destination).unwrap());
        std::fs::remove_file(&destination).unwrap();
        (records, report)
    };
    let long = long_transaction(&site, true);
    let (records, report) = saved(&long.log);
    assert!(records == long.states.last().unwrap().1, "{report:?}");
    assert!(report.is_complete(), "{report:?}");
    let mut log = long.log.clone();
    log.bytes.truncate(long.states[long.states.len() - 3].0);
    let (records, report) = saved(&log);
    assert!(records == long.states[long.states.len() - 3].1 && report.is_complete(), "{report:?}");

    let long_value = noise(2_000_000);
    let ops = [
        Op::Put { key: b"huge", value: &long_value },
        Op::Append { key: b"grows", length_before: 10, bytes: &long_value[..900_000] },
        SMALL[0],
    ];
    let (after, stream) = transaction(&site.records, &ops);
    let mut log = site.log();
    let first = push_chunks(&mut log, &stream, 100_000);
    let mut damaged = log.clone();
    log.push(&commit(first, &stream, b""));
    let (_, small) = transaction(&after, &SMALL[1..3]);
    log.push(&Op::Transaction { ops: &small });
    let mut expected = after;
    SMALL[1..3].iter().for_each(|op| apply(&mut expected, op));
    let (records, report) = saved(&log);
    assert!(records == expected && report.is_complete(), "{report:?}");
    assert_eq!(report.log_records, 1 + 3 + 2);

    // What cannot be is lost as a whole, and what comes after it is not.
    damaged.push(&commit(first, &stream[1..], b""));
    damaged.push(&Op::Transaction { ops: &small });
    damaged.push(&commit(first, &stream, b""));
    let mut expected = site.records.clone();
    SMALL[1..3].iter().for_each(|op| apply(&mut expected, op));
    let (records, report) = saved(&damaged);
    assert!(records == expected && report.problems.len() == 2, "{report:?}");
}

proptest! {
    #![proptest_config(Config::with_cases(100))]

    /// Streams that somebody has made up, with checks that are right: an error or not, but an answer; and no page is lost.
    #[test]
    fn made_up_streams_are_survived(
        bytes in prop::collection::vec(prop_oneof![0..12u8, any::<u8>()], 0..60),
        undone in prop::collection::vec(0..40u8, 0..4),
        piece in 1..30usize, in_one: bool, keep in 0..200usize, total in 0..3u64,
    ) {
        thread_local! {
            static SITE: Site = Site::new();
        }
        SITE.with(|site| {
            let (_, mut stream) = transaction(&site.records, &SMALL[..5]);
            stream.truncate(keep);
            stream.extend(bytes);
            let mut log = site.log();
            if in_one {
                log.push(&Op::Transaction { ops: &stream });
            } else {
                let first = push_chunks(&mut log, &stream, piece);
                let total = (stream.len() as u64 + total).saturating_sub(total / 2 * 3);
                let crc = crc32c::crc32c(&stream);
                log.push(&Op::Commit { first, total, crc, undone: &undone });
            }
            match site.open(&[&log]) {
                Ok(db) => drop(contents(db)),
                Err(Error::Corrupt { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        });
    }
}
