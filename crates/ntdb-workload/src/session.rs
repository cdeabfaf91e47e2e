//! What a workload asks of an engine.

/// Any error of an engine, or of a workload that got a wrong answer.
pub type Failed = Box<dyn std::error::Error + Send + Sync>;
/// The result of an operation.
pub type Result<T> = std::result::Result<T, Failed>;

/// Operations on single records. Keys and values are bytes.
pub trait Access {
    /// Copies the value of `key` into `value`, in place of what that holds; `false` if there is none.
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool>;
    /// Stores a record, whether it is there or not.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()>;
}

/// What one client has of an engine: an open database, outside any transaction.
pub trait Session: Access {
    /// Stores `records`, key and value each, in whatever way is best for the engine.
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()>;
    /// Makes the changes of `body` all at once, or, if it fails, none. If `durable`, they are on disk when this returns; otherwise
    /// they survive the death of processes, or less where an engine cannot even do that.
    fn transaction(
        &mut self,
        durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()>;
    /// Reads up to `count` records that follow each other in the engine's own order, from a place that follows from `seed`; returns how
    /// many there were.
    fn scan(&mut self, seed: u64, count: usize) -> Result<usize>;
    /// Calls `visit` with each record, as they all are at one moment.
    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()>;
}

/// An error that is a text: a wrong answer.
pub fn wrong(text: impl Into<String>) -> Failed {
    text.into().into()
}
