//! An attack as bytes, and what it makes of a scene's files.
//!
//! Every [`EDIT_BYTES`] bytes are one edit: which file and which kind of place, where in it, how wide, and the number that
//! is put there. Any bytes are an attack, and a small change of the bytes is a small change of the attack, which is
//! what a fuzzer thrives on.

use ntdb::fuzzing::{self, Place};

use super::scene::{DATA, SHM, Scene};
use crate::rng::Rng;

/// Bytes of one edit: kind, width, page or record (2), offset (2), how the number is made, spare, the number (8).
pub const EDIT_BYTES: usize = 16;
/// Most edits of one attack.
pub const EDITS_MAX: usize = 12;

/// A random attack on one of `scenes` scenes: the scene's number, then a few edits.
pub fn random(rng: &mut Rng, scenes: usize) -> Vec<u8> {
    let mut bytes = vec![rng.below(scenes as u64) as u8];
    bytes.push(rng.next_u64() as u8);
    // One edit most of the time: of several, the first that is noticed hides the others.
    let edits = if rng.percent(60) { 1 } else { rng.range(2, 5) };
    for _ in 0..edits {
        bytes.extend(rng.bytes(EDIT_BYTES));
    }
    bytes
}

/// One edit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    pub kind: u8,
    width: usize,
    pub which: usize,
    pub offset: usize,
    how: u8,
    pub number: u64,
}

impl Edit {
    pub fn from_bytes(bytes: &[u8]) -> Edit {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]) as usize;
        Edit {
            kind: bytes[0],
            width: 1 << (bytes[1] % 4),
            which: word(2),
            offset: word(4),
            how: bytes[6],
            number: u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes")),
        }
    }

    /// The number to put in the place of `old`; `extent` is a number of which those nearby are interesting.
    fn value(&self, old: u64, extent: u64) -> u64 {
        let n = self.number;
        match self.how % 8 {
            0 => n,
            1 => 0,
            2 => u64::MAX,
            3 => 1u64.wrapping_shl(n as u32 % 64).wrapping_sub(n >> 8 & 1),
            4 => extent.wrapping_add(n % 5).wrapping_sub(2),
            5 => old.wrapping_add(n % 9).wrapping_sub(4),
            6 => n % extent.max(1),
            _ => n & 0xffff,
        }
    }

    /// Puts the number at `at`, as far as it lies in `bytes`.
    pub fn put(&self, bytes: &mut [u8], at: usize, extent: u64) {
        let width = self.width.min(bytes.len().saturating_sub(at));
        let Some(place) = bytes.get_mut(at..at + width) else { return };
        let mut old = [0; 8];
        old[..width].copy_from_slice(place);
        let value = self.value(u64::from_le_bytes(old), extent);
        place.copy_from_slice(&value.to_le_bytes()[..width]);
    }
}

/// What `attack` makes of the scene's files. Files that don't exist are empty.
pub fn apply(scene: &Scene, attack: &[u8]) -> [Vec<u8>; 4] {
    let mut files = scene.files.clone();
    let mut touched = vec![false; scene.sealed.len()];
    for bytes in attack.chunks_exact(EDIT_BYTES).take(EDITS_MAX) {
        let edit = Edit::from_bytes(bytes);
        match edit.kind % 16 {
            0..=8 => data(scene, &mut files[DATA], &mut touched, &edit),
            9..=11 => log(scene, &mut files, &edit),
            12 => record(&mut files[SHM], &scene.places[SHM], &edit),
            13 => shm(&mut files[SHM], &edit),
            14 => log_header(&mut files, &edit),
            _ => cut(&mut files, &edit),
        }
    }
    seal_data(scene, &mut files[DATA], &touched);
    fuzzing::seal_shm_header(&mut files[SHM]);
    files
}

/// Changes a number in a page, or the page as a whole.
fn data(scene: &Scene, file: &mut [u8], touched: &mut [bool], edit: &Edit) {
    let (size, pages) = (scene.page_size, scene.sealed.len());
    let number = edit.which % pages;
    touched[number] = true;
    let Some(page) = file.get_mut(number * size..(number + 1) * size) else { return };
    let pages = pages as u64;
    let aligned = |reach: usize| edit.offset % (reach / edit.width) * edit.width;
    let groups = (u16::from_le_bytes([page[6], page[7]]) as usize).min(size / 48);
    match edit.kind % 16 {
        // The head, where the structure is.
        0..=2 => edit.put(page, aligned(64), pages),
        // The words behind it: entries of directories, tags, the bits of the map, fields of a meta page.
        3 => edit.put(page, aligned(128), pages),
        4 => edit.put(page, aligned(1024), pages),
        5 => edit.put(page, aligned(size), size as u64),
        // An offset of a slot.
        6 => {
            let at = 64 + 16 * groups + edit.offset % (16 * groups).max(1) * 2;
            Edit { width: 2, ..*edit }.put(page, at, size as u64);
        }
        // The beginning of a record, where its lengths are, or its extent.
        7 => {
            let slot = edit.offset % (16 * groups).max(1);
            let slots = 64 + 16 * groups;
            let offset = page.get(slots + 2 * slot..slots + 2 * slot + 2);
            let offset = offset.map_or(0, |o| u16::from_le_bytes([o[0], o[1]]) as usize);
            edit.put(page, offset + (edit.number >> 48) as usize % 40, pages);
        }
        // Another page in its place, under its own number or this one.
        _ => {
            let source = edit.offset % pages as usize * size;
            let Some(copy) = file.get(source..source + size).map(<[u8]>::to_vec) else { return };
            let page = &mut file[number * size..(number + 1) * size];
            page.copy_from_slice(&copy);
            if edit.how.is_multiple_of(2) {
                page[8..12].copy_from_slice(&(number as u32).to_le_bytes());
            }
        }
    }
}

/// Seals what has been touched.
fn seal_data(scene: &Scene, file: &mut [u8], touched: &[bool]) {
    let size = scene.page_size;
    for number in (0..touched.len()).rev() {
        let covers = scene.sealed[number].max(1);
        let end = (number + covers).min(touched.len());
        if !touched[number..end].contains(&true) {
            continue;
        }
        let Some(run) = file.get_mut(number * size..end * size) else { continue };
        match number {
            0 | 3 => fuzzing::seal_header(run),
            1 | 2 => fuzzing::seal_meta(run),
            // The bytes of a value have no seal.
            _ if scene.sealed[number] == 0 => {}
            _ => {
                // The run may say now that it is longer or shorter.
                let says = u32::from_le_bytes(run[44..48].try_into().expect("4 bytes")) as usize;
                let end = says.saturating_add(number).saturating_mul(size);
                match file.get_mut(number * size..end) {
                    Some(run) if says > 0 => fuzzing::seal_page(run),
                    _ => fuzzing::seal_page(&mut file[number * size..][..covers * size]),
                }
            }
        }
    }
}

/// Changes a record of a log.
fn log(scene: &Scene, files: &mut [Vec<u8>; 4], edit: &Edit) {
    let file = 1 + edit.which % 2;
    let other = 3 - file;
    let file = if scene.places[file].is_empty() { other } else { file };
    record(&mut files[file], &scene.places[file], &Edit { which: edit.which / 2, ..*edit });
}

fn record(file: &mut [u8], places: &[Place], edit: &Edit) {
    let Some(place) = (!places.is_empty()).then(|| places[edit.which % places.len()]) else {
        return;
    };
    let Some(record) = file.get_mut(place.offset..) else { return };
    // Lengths and kinds are at the beginning; not the check itself.
    let reach = if edit.kind & 0x80 == 0 { place.len.min(32) } else { place.len };
    let at = match edit.offset % reach {
        4..8 => 8,
        at => at,
    };
    edit.put(record, at, place.len as u64);
    fuzzing::seal_log_record(record, place.salt, place.lsn);
}

fn log_header(files: &mut [Vec<u8>; 4], edit: &Edit) {
    let file = &mut files[1 + edit.which % 2];
    edit.put(file, edit.offset % 56, 1 << 20);
    fuzzing::seal_header(file);
}

fn shm(file: &mut [u8], edit: &Edit) {
    let (begin, len) = fuzzing::shm_parts()[edit.which % 3];
    let at = edit.offset % (len / edit.width) * edit.width;
    edit.put(file, begin + at, 1 << 20);
}

/// Cuts a file, or makes it longer.
fn cut(files: &mut [Vec<u8>; 4], edit: &Edit) {
    let file = &mut files[edit.which % 4];
    let len = file.len() as u64;
    let to = edit.value(len, len).min(len + (1 << 20));
    file.resize(to as usize, 0);
}
