//! Which keys the mixed workload uses, and who owns which.
//!
//! - *Owned* keys, numbered from 0: a small hot set first, then a large set. Key `k` is written by
//!   writer `k % writers` alone, and its state stands on the [`crate::board::Board`].
//! - *Shared* keys: put by all writers; checked for torn and invented values and for each writer's
//!   order.
//! - *Shared logs*: appended to by all writers. A writer's `n`-th append goes to log
//!   `(n - 1) / LOG_APPENDS`, so that no log grows for ever and the place of each is known.
//! - *Pairs*: two keys of each writer, which it stores together in a transaction, with the same
//!   counter.
//! - The *ledger*: some keys that all writers read, add to and write again, under a key lock or in a
//!   transaction. A writer's `n`-th entry goes to key `n % LEDGER_KEYS` and takes the place of its
//!   entry before there.

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

/// Keys of the ledger.
pub const LEDGER_KEYS: u64 = 4;

/// The bytes of key `index` of the ledger.
pub fn ledger_key(index: u64) -> Vec<u8> {
    format!("ledger-{index}").into_bytes()
}

/// The last entry up to `entry` that went to key `index` of the ledger; 0 if there is none.
pub fn last_entry_in(index: u64, entry: u64) -> u64 {
    entry.saturating_sub((entry + LEDGER_KEYS - index) % LEDGER_KEYS)
}

/// The bytes of the two keys of the pair of `writer`.
pub fn pair_keys(writer: u32) -> [Vec<u8>; 2] {
    [format!("pair-{writer}-a").into_bytes(), format!("pair-{writer}-b").into_bytes()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_entry_is_found() {
        for index in 0..LEDGER_KEYS {
            let mut last = 0;
            for entry in 1..50 {
                if entry % LEDGER_KEYS == index {
                    last = entry;
                }
                assert_eq!(last_entry_in(index, entry), last, "{index} {entry}");
            }
        }
    }
}
