//! The hash: two-level extendible hashing from a root word down to bucket pages.
//!
//! ```text
//! root word {page, depth} -> root array -> directory page -> bucket page -> record
//! ```
//! A root with one bucket points to it directly. The root array is indexed by the leading `depth` bits of the hash; its
//! entry names a directory page, how many leading bits lead to that page and how many of the following bits index it. The
//! directory's entry names the bucket. Each level grows by itself and by one page at a time.
//!
//! [`locate`] finds the way down, [`lookup`] a record, [`walk`] everything; [`build`] makes new bucket pages from old ones,
//! [`structure`] are the steps by which the tree grows, [`shrink`] those by which it becomes smaller, [`relocate`] moves it towards the front of the file, and [`discard`] gives up one that
//! was cleared.

pub mod build;
pub mod discard;
pub mod locate;
pub mod lookup;
pub mod relocate;
pub mod shrink;
pub mod structure;
pub mod walk;
