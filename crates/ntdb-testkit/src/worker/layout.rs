//! Which keys the mixed workload uses, and who owns which.
//!
//! - *Owned* keys, numbered from 0: a small hot set first, then a large set. Key `k` is written by
//!   writer `k % writers` alone, and its state stands on the [`crate::board::Board`].
//! - *Shared* keys: put by all writers; checked for torn and invented values and for each writer's
//!   order.
//! - *Shared logs*: appended to by all writers. A writer's `n`-th append goes to log
//!   `(n - 1) / LOG_APPENDS`, so that no log grows for ever and the place of each is known.

/// Number of keys that all writers put.
pub const SHARED_KEYS: u64 = 8;
/// Appends of one writer to one shared log.
pub const LOG_APPENDS: u64 = 100;

/// Sizes of a mixed workload.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Writers (threads of all processes).
    pub writers: u32,
    /// Keys of the hot set.
    pub hot: u64,
    /// Keys of the large set.
    pub large: u64,
}

impl Layout {
    /// All owned keys.
    pub fn keys(&self) -> usize {
        (self.hot + self.large) as usize
    }

    /// The only writer of owned key `id`.
    pub fn owner(&self, id: usize) -> u32 {
        (id as u64 % u64::from(self.writers)) as u32
    }

    /// The bytes of owned key `id`: of all lengths up to some hundred bytes.
    pub fn key(&self, id: usize) -> Vec<u8> {
        let id = id as u64;
        if id < self.hot {
            return format!("h{id}").into_bytes();
        }
        let mut key = format!("large-{id:07}-").into_bytes();
        if id.is_multiple_of(64) {
            key.resize(key.len() + (id / 64 % 300) as usize, b'x');
        }
        key
    }
}

/// The bytes of shared key `index`.
pub fn shared_key(index: u64) -> Vec<u8> {
    format!("shared-{index}").into_bytes()
}

/// The bytes of the key of shared log `index`.
pub fn log_key(index: u64) -> Vec<u8> {
    format!("log-{index}").into_bytes()
}

/// The shared log that the `counter`-th append of a writer goes to.
pub fn log_of(counter: u64) -> u64 {
    (counter - 1) / LOG_APPENDS
}
