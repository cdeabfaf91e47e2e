//! What a record promises: it comes back as it was, or not at all.

use super::testing::*;
use super::*;
use proptest::prelude::*;

const SALT: u64 = 0x0123_4567_89AB_CDEF;
const LSN: Lsn = Lsn(4711);

fn samples() -> Vec<Op<'static>> {
    let (key, bytes) = (&b"the key"[..], &b"some bytes"[..]);
    let first = Lsn(1 << 40);
    vec![
        Op::Put { key, value: bytes },
        Op::Put { key: b"", value: b"" },
        Op::Put { key: &[1; 200], value: &[2; 300] },
        Op::Delete { key },
        Op::Delete { key: b"" },
        Op::Append { key, length_before: 70_000, bytes },
        Op::Clear,
        Op::Chunk { first, total: u64::MAX, bytes },
        Op::PutChunked { key, len: 1 << 63, first, crc: 0xDEAD_BEEF },
        Op::AppendChunked { key, length_before: 127, len: 128, first, crc: 0 },
        Op::Transaction { ops: bytes },
        Op::Transaction { ops: b"" },
        Op::TransactionChunk { first, bytes },
        Op::Commit { first, total: 1 << 40, crc: 0xDEAD_BEEF, undone: bytes },
        Op::Commit { first, total: 0, crc: 0, undone: b"" },
    ]
}

/// The format, byte for byte: a change of this test is a change of the format.
#[test]
fn the_crc_of_every_short_body_is_the_crates() {
    let bytes: [u8; 80] = std::array::from_fn(|i| (i * 73 + 5) as u8);
    for len in 0..=80 {
        assert_eq!(body_crc(&bytes[..len]), crc32c::crc32c(&bytes[..len]), "{len}");
    }
}

#[test]
fn a_short_put_is_encoded_as_every_put() {
    let bytes: [u8; 256] = std::array::from_fn(|i| (i * 73 + 5) as u8);
    for key_len in 0..SHORT_KEY {
        for value_len in 0..SHORT_VALUE {
            let (key, value) = (&bytes[..key_len], &bytes[100..100 + value_len]);
            let op = Op::Put { key, value };
            let mut expected = vec![0; encoded_len(&op)];
            let crc = encode(&op, &mut expected);
            let mut memory: ShortPut = [0xEE; size_of::<ShortPut>()];
            let (found, found_crc) = encode_short_put(key, value, &mut memory);
            assert_eq!((&*found, found_crc), (&*expected, crc), "{key_len}, {value_len}");
        }
    }
}

#[test]
fn bytes_of_a_record_are_what_the_format_says() {
    let record = sealed(&Op::Put { key: b"ab", value: b"xyz" }, SALT, LSN);
    assert_eq!(record[..4], 15u32.to_le_bytes());
    assert_eq!(record[8..], *b"\x01\x02abxyz");
    let mut x = u128::from(SALT)
        ^ ((4711 * 0x9E37_79B9_7F4A_7C15u128) % (1 << 64))
        ^ ((15 * 0xC2B2_AE3D_27D4_EB4Fu128) % (1 << 64));
    for _ in 0..2 {
        x = ((x ^ (x >> 32)) * 0xD6E8_FEB8_6659_FD93) % (1 << 64);
    }
    x ^= x >> 32;
    let check = crc32c::crc32c(b"\x01\x02abxyz") ^ (x % (1 << 32)) as u32;
    assert_eq!(record[4..8], check.to_le_bytes());

    let chunked =
        Op::AppendChunked { key: b"k", length_before: 300, len: 5, first: Lsn(6), crc: 7 };
    let record = sealed(&chunked, SALT, LSN);
    assert_eq!(record[8..], *b"\x07\x06\0\0\0\0\0\0\0\x07\0\0\0\xAC\x02\x05k");
    let append = Op::Append { key: b"k", length_before: 300, bytes: b"yz" };
    assert_eq!(sealed(&append, SALT, LSN)[8..], *b"\x03\x01\xAC\x02kyz");
    let chunk = Op::Chunk { first: Lsn(6), total: 300, bytes: b"yz" };
    assert_eq!(sealed(&chunk, SALT, LSN)[8..], *b"\x05\x06\0\0\0\0\0\0\0\xAC\x02yz");
    let put = Op::PutChunked { key: b"k", len: 5, first: Lsn(6), crc: 7 };
    assert_eq!(sealed(&put, SALT, LSN)[8..], *b"\x06\x06\0\0\0\0\0\0\0\x07\0\0\0\x05k");
    assert_eq!(sealed(&Op::Delete { key: b"k" }, SALT, LSN)[8..], *b"\x02k");
    assert_eq!(sealed(&Op::Clear, SALT, LSN)[8..], *b"\x04");
    let transaction = Op::Transaction { ops: b"\x02\x02k" };
    assert_eq!(sealed(&transaction, SALT, LSN)[8..], *b"\x08\x02\x02k");
    let chunk = Op::TransactionChunk { first: Lsn(6), bytes: b"yz" };
    assert_eq!(sealed(&chunk, SALT, LSN)[8..], *b"\x09\x06\0\0\0\0\0\0\0yz");
    let commit = Op::Commit { first: Lsn(6), total: 300, crc: 7, undone: b"\x01\x02" };
    let body = *b"\x0a\x06\0\0\0\0\0\0\0\x07\0\0\0\xAC\x02\x01\x02";
    assert_eq!(sealed(&commit, SALT, LSN)[8..], body);
}

#[test]
fn every_flipped_bit_is_noticed() {
    for op in samples() {
        let record = sealed(&op, SALT, LSN);
        for bit in 0..record.len() * 8 {
            let mut damaged = record.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            // Room behind it, so that a longer length is not refused for that alone.
            damaged.resize(MAX_RECORD_BYTES as usize, 0);
            assert_eq!(decode(SALT, LSN, &damaged), Ok(Decoded::End), "{op:?}, bit {bit}");
        }
    }
}

#[test]
fn a_part_of_a_record_is_the_end() {
    for op in samples() {
        let record = sealed(&op, SALT, LSN);
        for len in 0..record.len() {
            assert_eq!(decode(SALT, LSN, &record[..len]), Ok(Decoded::End));
            let mut torn = record[..len].to_vec();
            torn.resize(record.len(), 0);
            // A tear that lost only zeros lost nothing.
            if torn != record {
                assert_eq!(decode(SALT, LSN, &torn), Ok(Decoded::End), "{op:?} at {len}");
            }
        }
    }
}

#[test]
fn the_longest_record_is_the_longest() {
    let value = vec![7; MAX_RECORD_BYTES as usize];
    let fits = &value[..MAX_RECORD_BYTES as usize - MIN_RECORD_BYTES - 1];
    let op = Op::Put { key: b"", value: fits };
    assert_eq!(encoded_len(&op) as u64, MAX_RECORD_BYTES);
    let record = sealed(&op, SALT, LSN);
    let len = record.len() as u32;
    assert_eq!(decode(SALT, LSN, &record), Ok(Decoded::Record { op, len }));
    let longer = sealed_body(&value, SALT, LSN);
    assert_eq!(decode(SALT, LSN, &longer), Ok(Decoded::End));
    assert_eq!(plausible_len(&longer), None);
    assert_eq!(plausible_len(&record), Some(record.len()));
}

#[test]
fn what_a_later_version_wrote_is_no_torn_tail() {
    for kind in (0..=255).filter(|&kind| !known_kind(kind)) {
        let record = sealed_body(&[kind, 1, 2, 3], SALT, LSN);
        assert_eq!(decode(SALT, LSN, &record), Err(RecordProblem::UnknownKind(kind)));
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let overlong = [KIND_PUT, 0x80, 0x00];
    let overflow = *b"\x01\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02";
    let endless = *b"\x01\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01";
    let cases: [(&[u8], &str); 13] = [
        (&[KIND_PUT], "key length"),
        (&[KIND_PUT, 5, b'a'], "key"),
        (b"\x01\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01", "key"),
        (&overlong, "key length"),
        (&overflow, "key length"),
        (&endless, "key length"),
        (&[KIND_CLEAR, 0], "end"),
        (&[KIND_CHUNK, 1, 2, 3], "first chunk"),
        (&[KIND_APPEND, 0], "length before"),
        (&[KIND_TRANSACTION_CHUNK, 1, 2, 3, 4, 5, 6, 7], "first chunk"),
        (&[KIND_COMMIT, 1, 2, 3], "first chunk"),
        (&[KIND_COMMIT, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "CRC"),
        (&[KIND_COMMIT, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x80, 0], "total length"),
    ];
    for (body, what) in cases {
        let record = sealed_body(body, SALT, LSN);
        let expected = RecordProblem::Malformed { kind: body[0], what };
        assert_eq!(decode(SALT, LSN, &record), Err(expected), "{body:?}");
    }
}

#[test]
fn records_of_every_kind_are_told_apart_from_none() {
    let mut records = Vec::new();
    for op in samples() {
        records.extend(sealed(&op, SALT, LSN));
    }
    // Zeros, as behind the end of a log, and a part of one more record.
    for tail in [&[0; 40][..], &sealed(&Op::Transaction { ops: &[1; 50] }, SALT, LSN)[..30]] {
        let bytes = [&records[..], tail].concat();
        assert_eq!(whole_records(&bytes), records.len());
    }
    let unknown = sealed_body(&[KIND_COMMIT + 1, 1, 2, 3], SALT, LSN);
    assert_eq!(plausible_len(&unknown), None);
}

proptest! {
    #[test]
    fn comes_back_as_it_was(owned in any_op(), salt: u64, lsn: u64, tail: [u8; 16]) {
        let op = owned.op();
        let mut bytes = sealed(&op, salt, Lsn(lsn));
        let len = bytes.len() as u32;
        prop_assert_eq!(len as usize, encoded_len(&op));
        bytes.extend(tail);
        prop_assert_eq!(decode(salt, Lsn(lsn), &bytes), Ok(Decoded::Record { op, len }));
        prop_assert_eq!(plausible_len(&bytes), Some(len as usize));
    }

    #[test]
    fn belongs_to_its_salt_and_place_alone(
        owned in any_op(), salt: u64, lsn: u64, by in 1..u64::MAX, near in 1..100_000u64,
    ) {
        let bytes = sealed(&owned.op(), salt, Lsn(lsn));
        for (salt, lsn) in [
            (salt ^ by, lsn),
            (salt, lsn ^ by),
            (salt, lsn.wrapping_add(near)),
            (salt, lsn.wrapping_sub(near)),
            (salt ^ by, lsn ^ by),
        ] {
            prop_assert_eq!(decode(salt, Lsn(lsn), &bytes), Ok(Decoded::End));
        }
    }

    #[test]
    fn damage_of_any_kind_is_noticed(
        owned in any_op(), salt: u64, lsn: u64, at: prop::sample::Index, noise in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        let bytes = sealed(&owned.op(), salt, Lsn(lsn));
        let mut damaged = bytes.clone();
        let at = at.index(bytes.len());
        for (place, noise) in damaged[at..].iter_mut().zip(noise) {
            *place = noise;
        }
        if damaged != bytes {
            prop_assert_eq!(decode(salt, Lsn(lsn), &damaged), Ok(Decoded::End));
        }
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300), salt: u64) {
        prop_assert_eq!(decode(salt, LSN, &bytes), Ok(Decoded::End));
    }

    #[test]
    fn any_sealed_body_is_survived(kind in 0..13u8, rest in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut body = vec![kind];
        body.extend(rest);
        let record = sealed_body(&body, SALT, LSN);
        // Whatever is understood has that one encoding.
        if let Ok(decoded) = decode(SALT, LSN, &record) {
            let Decoded::Record { op, .. } = decoded else {
                return Err(TestCaseError::fail("a sealed record is there"));
            };
            prop_assert_eq!(sealed(&op, SALT, LSN), record);
        }
    }
}
