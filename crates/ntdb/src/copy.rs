//! Copying a few bytes without the call that the general copy costs: two loads and two stores, which may overlap.

/// Copies `len` bytes.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes; they do not overlap unless they are the same.
#[inline(always)]
pub unsafe fn copy_short(from: *const u8, to: *mut u8, len: usize) {
    /// Both ends, `N` bytes each, of `N` to `2 * N` bytes.
    ///
    /// # Safety
    /// As for `copy_short`, and `len` is at least `N`.
    #[inline(always)]
    unsafe fn ends<const N: usize>(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: within the `len` bytes of either; arrays of bytes need no alignment.
        unsafe {
            let first = from.cast::<[u8; N]>().read();
            let last = from.add(len - N).cast::<[u8; N]>().read();
            to.cast::<[u8; N]>().write(first);
            to.add(len - N).cast::<[u8; N]>().write(last);
        }
    }
    // SAFETY: the caller's promise; each arm has as many bytes as it copies.
    unsafe {
        match len {
            0 => {}
            1..=3 => {
                let (first, middle, last) =
                    (from.read(), from.add(len / 2).read(), from.add(len - 1).read());
                to.write(first);
                to.add(len / 2).write(middle);
                to.add(len - 1).write(last);
            }
            4..=8 => ends::<4>(from, to, len),
            9..=16 => ends::<8>(from, to, len),
            17..=32 => ends::<16>(from, to, len),
            _ => std::ptr::copy(from, to, len),
        }
    }
}

/// Copies as much of `value` as fits into `buffer`.
#[inline(always)]
pub fn copy_fitting(value: &[u8], buffer: &mut [u8]) {
    let len = value.len().min(buffer.len());
    // SAFETY: both have so many bytes, and one is borrowed mutably.
    unsafe { copy_short(value.as_ptr(), buffer.as_mut_ptr(), len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_copied_and_no_more() {
        let from: [u8; 80] = std::array::from_fn(|i| i as u8 + 1);
        for len in 0..=70 {
            let mut to = [0u8; 80];
            // SAFETY: both are longer.
            unsafe { copy_short(from.as_ptr(), to.as_mut_ptr(), len) };
            assert_eq!((&to[..len], &to[len..]), (&from[..len], &[0; 80][len..]), "{len}");
        }
    }
}
