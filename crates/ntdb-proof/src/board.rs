//! The notice board: what the processes of a test tell each other, outside the database.
//!
//! It is a file that all of them map. Every strictly checked key has one *owner*, the only writer
//! of that key, and two words here: `begun`, stored by the owner just before an operation, and
//! `done`, stored just after it returned. Each holds the state that the operation leads to: the
//! owner's counter and whether the key is then present. Stores into a shared mapping survive
//! `kill -9`, so `done` is what was acknowledged, even by the dead.
//!
//! A reader takes `done`, asks the database, takes `begun`; an answer older than the first or newer
//! than the second is an error (stale, lost, resurrected or invented).

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The state of a key as its owner announces it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyState {
    /// The counter of the owner's last operation on the key; 0 before the first.
    pub counter: u64,
    /// Whether the key is in the database after it.
    pub present: bool,
}

impl KeyState {
    /// As one word.
    pub fn to_word(self) -> u64 {
        self.counter << 1 | u64::from(self.present)
    }

    /// From one word.
    pub fn from_word(word: u64) -> KeyState {
        KeyState { counter: word >> 1, present: word & 1 == 1 }
    }
}

const MAGIC: u64 = 0x6472_616F_6262_646E;
const HEADER_WORDS: usize = 16;
const WRITER_WORDS: usize = 8;

/// The board, mapped.
#[derive(Debug)]
pub struct Board {
    base: *const AtomicU64,
    words: usize,
}

// SAFETY: the mapping holds atomics only, lives until drop, and is reached by shared references.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

impl Board {
    /// Makes a board for `writers` writers and `keys` strictly checked keys.
    ///
    /// # Errors
    /// What the system reports.
    pub fn create(path: &Path, writers: usize, keys: usize) -> io::Result<Board> {
        let words = HEADER_WORDS + writers * WRITER_WORDS + keys * 2;
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(words as u64 * 8)?;
        let board = Board::map(&file, words)?;
        board.word(1).store(writers as u64, Ordering::SeqCst);
        board.word(2).store(keys as u64, Ordering::SeqCst);
        board.word(0).store(MAGIC, Ordering::SeqCst);
        Ok(board)
    }

    /// Maps a board that another process made.
    ///
    /// # Errors
    /// What the system reports.
    pub fn open(path: &Path) -> io::Result<Board> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let board = Board::map(&file, file.metadata()?.len() as usize / 8)?;
        assert_eq!(board.word(0).load(Ordering::SeqCst), MAGIC, "not a notice board");
        Ok(board)
    }

    fn map(file: &std::fs::File, words: usize) -> io::Result<Board> {
        // SAFETY: a new shared mapping of a file of that length; nothing else is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                words * 8,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Board { base: base.cast(), words })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words);
        // SAFETY: inside the mapping, aligned, and only ever used as an atomic.
        unsafe { &*self.base.add(index) }
    }

    /// Number of writers.
    pub fn writers(&self) -> usize {
        self.word(1).load(Ordering::Relaxed) as usize
    }

    /// Number of strictly checked keys.
    pub fn keys(&self) -> usize {
        self.word(2).load(Ordering::Relaxed) as usize
    }

    /// Asks all workers to end.
    pub fn stop(&self) {
        self.word(3).store(1, Ordering::SeqCst);
    }

    /// Whether the workers are to end.
    pub fn stopped(&self) -> bool {
        self.word(3).load(Ordering::Relaxed) != 0
    }

    /// A word for whatever a single test needs (`index` below 8): progress of a script, say.
    pub fn mark(&self, index: usize) -> &AtomicU64 {
        assert!(index < 8);
        self.word(8 + index)
    }

    fn writer_word(&self, writer: u32, field: usize) -> &AtomicU64 {
        assert!((writer as usize) < self.writers());
        self.word(HEADER_WORDS + writer as usize * WRITER_WORDS + field)
    }

    /// Operations of `writer`.
    pub fn operations(&self, writer: u32) -> &AtomicU64 {
        self.writer_word(writer, 0)
    }

    /// The longest that any single operation of `writer` took, in nanoseconds.
    pub fn longest_wait_ns(&self, writer: u32) -> &AtomicU64 {
        self.writer_word(writer, 1)
    }

    /// Counter of the append to a shared log that `writer` began last.
    pub fn append_begun(&self, writer: u32) -> &AtomicU64 {
        self.writer_word(writer, 2)
    }

    /// Counter of the append to a shared log that `writer` finished last.
    pub fn append_done(&self, writer: u32) -> &AtomicU64 {
        self.writer_word(writer, 3)
    }

    /// Counter of the pair that `writer` began to store last.
    pub fn pair_begun(&self, writer: u32) -> &AtomicU64 {
        self.writer_word(writer, 4)
    }

    /// Counter of the pair that `writer` stored last.
    pub fn pair_done(&self, writer: u32) -> &AtomicU64 {
        self.writer_word(writer, 5)
    }

    /// The entry in the ledger that `writer` began last.
    pub fn entry_begun(&self, writer: u32) -> &AtomicU64 {
        self.writer_word(writer, 6)
    }

    /// The entry in the ledger that `writer` finished last.
    pub fn entry_done(&self, writer: u32) -> &AtomicU64 {
        self.writer_word(writer, 7)
    }

    fn key_word(&self, key: usize, which: usize) -> &AtomicU64 {
        assert!(key < self.keys());
        self.word(HEADER_WORDS + self.writers() * WRITER_WORDS + key * 2 + which)
    }

    /// What the owner of `key` may have done last.
    pub fn begun(&self, key: usize) -> KeyState {
        KeyState::from_word(self.key_word(key, 0).load(Ordering::SeqCst))
    }

    /// What the owner of `key` has done for certain.
    pub fn done(&self, key: usize) -> KeyState {
        KeyState::from_word(self.key_word(key, 1).load(Ordering::SeqCst))
    }

    /// Announces an operation.
    pub fn set_begun(&self, key: usize, state: KeyState) {
        self.key_word(key, 0).store(state.to_word(), Ordering::SeqCst);
    }

    /// Acknowledges an operation.
    pub fn set_done(&self, key: usize, state: KeyState) {
        self.key_word(key, 1).store(state.to_word(), Ordering::SeqCst);
    }

    /// Operations of all writers together.
    pub fn total_operations(&self) -> u64 {
        (0..self.writers() as u32).map(|w| self.operations(w).load(Ordering::Relaxed)).sum()
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`; no reference outlives the board.
        unsafe { libc::munmap(self.base.cast_mut().cast(), self.words * 8) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_mapping_sees_what_the_first_stored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("board");
        let a = Board::create(&path, 3, 5).unwrap();
        let b = Board::open(&path).unwrap();
        assert_eq!((b.writers(), b.keys()), (3, 5));
        a.set_begun(4, KeyState { counter: 7, present: true });
        a.set_done(4, KeyState { counter: 6, present: false });
        a.append_done(2).store(11, Ordering::SeqCst);
        assert_eq!(b.begun(4), KeyState { counter: 7, present: true });
        assert_eq!(b.done(4), KeyState { counter: 6, present: false });
        assert_eq!(b.append_done(2).load(Ordering::SeqCst), 11);
        assert_eq!(b.begun(3), KeyState { counter: 0, present: false });
        b.stop();
        assert!(a.stopped());
    }
}
