//! Little-endian numbers at fixed places of a block: what the codecs of headers and meta pages share.
//!
//! The callers own the layout: each has a table of offsets whose bounds are checked at compile time
//! against the smallest block it is used on. A place outside the block is therefore a bug of the
//! caller, and panics; no place is ever computed from a number that was read from a file.

/// The `N` bytes at `at`.
#[inline]
pub fn get_bytes<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&block[at..at + N]);
    bytes
}

/// The u16 at `at`.
#[inline]
pub fn get_u16(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(get_bytes(block, at))
}

/// The u32 at `at`.
#[inline]
pub fn get_u32(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get_bytes(block, at))
}

/// The u64 at `at`.
#[inline]
pub fn get_u64(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get_bytes(block, at))
}

/// Writes `bytes` at `at`; numbers go in as `&n.to_le_bytes()`.
#[inline]
pub fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}
