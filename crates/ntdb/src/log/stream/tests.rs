//! What a stream promises: its operations come back as they were, in order, however it was cut; the undone ones do not.

use super::super::record::testing::{OwnedOp, any_op};
use super::*;
use proptest::prelude::*;

/// What a stream says, with bytes of its own.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Said {
    Put(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
    Append(Vec<u8>, u64, Vec<u8>),
    Clear,
}

fn said(op: &Op<'_>) -> Said {
    match *op {
        Op::Put { key, value } => Said::Put(key.into(), value.into()),
        Op::Delete { key } => Said::Delete(key.into()),
        Op::Append { key, length_before, bytes } => {
            Said::Append(key.into(), length_before, bytes.into())
        }
        Op::Clear => Said::Clear,
        other => panic!("{other:?} is none of a stream"),
    }
}

/// Reads to the end; whether operations came in parts.
fn read(mut reader: StreamReader<'_>) -> Result<(Vec<Said>, bool), StreamProblem> {
    let (mut all, mut has_long) = (Vec::new(), false);
    while let Some(op) = reader.next()? {
        let one = match op {
            StreamOp::Whole(op) => said(&op),
            StreamOp::Long { head, value } => {
                has_long = true;
                let (len, bytes) = (value.len(), value.collect::<Vec<_>>().concat());
                assert_eq!(len, bytes.len() as u64);
                match said(&head) {
                    Said::Put(key, _) => Said::Put(key, bytes),
                    Said::Append(key, before, _) => Said::Append(key, before, bytes),
                    other => panic!("{other:?} has no value"),
                }
            }
        };
        all.push(one);
    }
    assert!(reader.scratch.capacity() <= 2 * MAX_RECORD_BYTES as usize);
    Ok((all, has_long))
}

fn stream_of(ops: &[Op<'_>]) -> Vec<u8> {
    let mut stream = Vec::new();
    ops.iter().for_each(|op| append_op(&mut stream, op));
    stream
}

/// Reads a stream in pieces of `piece` bytes.
fn read_cut(stream: &[u8], piece: usize) -> Result<(Vec<Said>, bool), StreamProblem> {
    let pieces: Vec<&[u8]> = stream.chunks(piece).collect();
    read(StreamReader::committed(&pieces, stream.len() as u64, crc32c::crc32c(stream), &[])?)
}

/// Operations that may stand in a stream.
fn ops() -> impl Strategy<Value = Vec<OwnedOp>> {
    let one = any_op().prop_map(|mut op| {
        op.kind = 1 + op.kind % 4;
        op
    });
    prop::collection::vec(one, 0..30)
}

/// The format, byte for byte: a change of this test is a change of the format.
#[test]
fn bytes_of_a_stream_are_what_the_format_says() {
    let value = [9; 200];
    let stream = stream_of(&[
        Op::Put { key: b"ab", value: b"xyz" },
        Op::Clear,
        Op::Delete { key: b"k" },
        Op::Append { key: b"k", length_before: 300, bytes: b"yz" },
        Op::Put { key: b"", value: &value },
    ]);
    let expected = b"\x07\x01\x02abxyz\x01\x04\x02\x02k\x07\x03\x01\xAC\x02kyz\xCA\x01\x01\x00";
    assert_eq!(stream, [&expected[..], &value].concat());
    let mut undone = Vec::new();
    append_undone(&mut undone, 3, 2);
    append_undone(&mut undone, 300, 128);
    assert_eq!(undone, b"\x03\x02\xAC\x02\x80\x01");
}

#[test]
fn an_empty_stream_has_no_operations() {
    assert_eq!(read(StreamReader::new(&[])), Ok((vec![], false)));
    assert_eq!(read(StreamReader::new(&[&[], &[]])), Ok((vec![], false)));
    assert_eq!(read(StreamReader::committed(&[], 0, 0, &[]).unwrap()), Ok((vec![], false)));
}

#[test]
fn long_values_come_in_parts_and_short_ones_whole() {
    let long: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let key = vec![7; MAX_KEY_BYTES as usize];
    let all = [
        Op::Put { key: b"short", value: b"value" },
        Op::Put { key: &key, value: &long },
        Op::Append { key: b"k", length_before: u64::MAX, bytes: &long[1..] },
        Op::Put { key: b"fits", value: &long[..MAX_RECORD_BYTES as usize - 6] },
        Op::Put { key: b"fits not", value: &long[..MAX_RECORD_BYTES as usize - 9] },
        Op::Delete { key: &key },
        Op::Clear,
    ];
    let expected: Vec<Said> = all.iter().map(said).collect();
    let stream = stream_of(&all);
    for piece in [stream.len(), 1 << 17, 99_991, 1001] {
        let (found, has_long) = read_cut(&stream, piece).unwrap();
        assert!(found == expected, "cut into pieces of {piece}");
        assert_eq!(has_long, piece < stream.len(), "cut into pieces of {piece}");
    }
    // What would fit a record is put together.
    let stream = stream_of(&all[3..4]);
    assert_eq!(read_cut(&stream, 1000).unwrap(), (expected[3..4].to_vec(), false));
    let stream = stream_of(&all[4..5]);
    assert_eq!(read_cut(&stream, 1000).unwrap(), (expected[4..5].to_vec(), true));
}

#[test]
fn keys_that_nothing_can_hold_are_a_problem() {
    let keys = vec![7; MAX_RECORD_BYTES as usize + 10];
    for len in [MAX_KEY_BYTES as usize + 1, MAX_KEY_BYTES as usize + 9, keys.len()] {
        let key = &keys[..len];
        for op in [
            Op::Put { key, value: &keys },
            Op::Put { key, value: b"" },
            Op::Append { key, length_before: 0, bytes: b"" },
            Op::Delete { key },
        ] {
            let stream = stream_of(&[Op::Clear, op]);
            let whole = read_cut(&stream, stream.len()).unwrap_err();
            assert_eq!(read_cut(&stream, 1000).unwrap_err(), whole);
            // Of the longest not even the head can be read.
            let inside = RecordProblem::Malformed { kind: stream[5], what: "key" };
            let inside = StreamProblem::Operation { at: 2, problem: inside };
            assert!(whole == StreamProblem::KeyTooLong { at: 2 } || whole == inside, "{whole}");
        }
    }
    let longest = stream_of(&[Op::Delete { key: &keys[..MAX_KEY_BYTES as usize] }]);
    assert!(read_cut(&longest, 1000).is_ok());
}

#[test]
fn what_is_not_as_the_commit_says_is_a_problem() {
    let stream = stream_of(&[Op::Put { key: b"k", value: &[1; 50] }, Op::Clear]);
    let (pieces, total, crc) =
        ([&stream[..20], &stream[20..]], stream.len() as u64, { crc32c::crc32c(&stream) });
    let committed = |total, crc, undone: &[u8]| {
        StreamReader::committed(&pieces, total, crc, undone).map(|_| ()).unwrap_err()
    };
    let found = total;
    assert_eq!(committed(total + 1, crc, &[]), StreamProblem::Length { total: total + 1, found });
    assert_eq!(committed(total - 1, crc, &[]), StreamProblem::Length { total: total - 1, found });
    assert_eq!(committed(total, crc ^ 1, &[]), StreamProblem::Checksum);
    let lists: [&[(u64, u64)]; 6] = [
        &[(0, 0)],
        &[(0, total + 1)],
        &[(total, 1)],
        &[(1, u64::MAX)],
        &[(0, 5), (4, 1)],
        &[(5, 1), (0, 1)],
    ];
    for list in lists {
        let mut undone = Vec::new();
        for &(start, len) in list {
            record::push_varint(&mut undone, start);
            record::push_varint(&mut undone, len);
        }
        assert_eq!(committed(total, crc, &undone), StreamProblem::Undone, "{list:?}");
    }
    for undone in [&[0][..], &[0x80], &[0x80, 0, 1], &[0, 1, 2]] {
        assert_eq!(committed(total, crc, undone), StreamProblem::Undone, "{undone:?}");
    }
    // In order, but inside an operation.
    let mut inside = StreamReader::committed(&pieces, total, crc, &[1, 3]).unwrap();
    assert_eq!(inside.next().unwrap_err(), StreamProblem::UndoneInside { start: 1 });
    let mut inside = StreamReader::committed(&pieces, total, crc, &[55, 1]).unwrap();
    assert!(inside.next().is_ok());
    assert_eq!(inside.next().unwrap_err(), StreamProblem::UndoneInside { start: 55 });
    assert_eq!(stream.len(), 56);
}

#[test]
fn an_undone_part_may_hold_anything() {
    let mut stream = stream_of(&[Op::Delete { key: b"a" }]);
    let start = stream.len() as u64;
    // A beginning of an operation, and no more.
    stream.extend(&stream_of(&[Op::Put { key: b"b", value: &[1; 100] }])[..40]);
    append_op(&mut stream, &Op::Delete { key: b"c" });
    let crc = crc32c::crc32c(&stream);
    let mut undone = Vec::new();
    append_undone(&mut undone, start, 40);
    let expected = vec![Said::Delete(b"a".into()), Said::Delete(b"c".into())];
    for piece in [1, 3, 1000] {
        let pieces: Vec<&[u8]> = stream.chunks(piece).collect();
        let reader = StreamReader::committed(&pieces, stream.len() as u64, crc, &undone).unwrap();
        assert_eq!(read(reader), Ok((expected.clone(), false)));
    }
}

#[test]
fn operations_that_do_not_belong_are_a_problem() {
    let (first, bytes) = (crate::types::Lsn(7), &b"bytes"[..]);
    for op in [
        Op::Chunk { first, total: 5, bytes },
        Op::PutChunked { key: b"k", len: 5, first, crc: 0 },
        Op::AppendChunked { key: b"k", length_before: 0, len: 5, first, crc: 0 },
        Op::Transaction { ops: b"" },
        Op::TransactionChunk { first, bytes },
        Op::Commit { first, total: 0, crc: 0, undone: b"" },
    ] {
        let mut stream = stream_of(&[Op::Clear]);
        let mut body = vec![0; record::body_len(&op)];
        record::encode_body(&op, &mut body);
        stream.push(body.len() as u8);
        stream.extend(body);
        for piece in [1, stream.len()] {
            assert_eq!(read_cut(&stream, piece), Err(StreamProblem::Misplaced { at: 2 }), "{op:?}");
        }
    }
    let problem = RecordProblem::UnknownKind(200);
    assert_eq!(read_cut(b"\x01\xC8", 9), Err(StreamProblem::Operation { at: 0, problem }));
    let problem = RecordProblem::Malformed { kind: 0, what: "kind" };
    assert_eq!(read_cut(b"\x00", 9), Err(StreamProblem::Operation { at: 0, problem }));
    for cut in [
        &b"\x02\x02"[..],
        b"\x80",
        b"\x81\x00\x04",
        b"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01\x01",
    ] {
        let stream = [b"\x01\x04", cut].concat();
        assert_eq!(read_cut(&stream, 3), Err(StreamProblem::CutOff { at: 2 }), "{cut:?}");
    }
}

proptest! {
    #[test]
    fn comes_back_however_it_is_cut(
        owned in ops(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20), flags: u32,
    ) {
        // Bit n of the flags: operation n was undone.
        let (mut stream, mut undone, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for (n, owned) in owned.iter().enumerate() {
            let start = stream.len();
            append_op(&mut stream, &owned.op());
            if flags >> n & 1 == 1 {
                append_undone(&mut undone, start as u64, (stream.len() - start) as u64);
            } else {
                expected.push(said(&owned.op()));
            }
        }
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &stream[cut[0]..cut[1]]).collect();
        let (total, crc) = (stream.len() as u64, crc32c::crc32c(&stream));
        let reader = StreamReader::committed(&pieces, total, crc, &undone).unwrap();
        prop_assert_eq!(read(reader), Ok((expected, false)));
    }

    #[test]
    fn any_bytes_are_survived_and_say_the_same_however_they_are_cut(
        mut stream in prop::collection::vec(0..24u8, 0..120),
        undone in prop::collection::vec(0..60u8, 0..8),
        piece in 1..20usize, noise: u8,
    ) {
        if let Some(byte) = stream.first_mut() {
            *byte ^= noise;
        }
        let (total, crc) = (stream.len() as u64, crc32c::crc32c(&stream));
        let whole = [&stream[..]];
        let pieces: Vec<&[u8]> = stream.chunks(piece).collect();
        let [one, two] = [&whole[..], &pieces]
            .map(|pieces| StreamReader::committed(pieces, total, crc, &undone).and_then(read));
        prop_assert_eq!(one, two);
    }
}
