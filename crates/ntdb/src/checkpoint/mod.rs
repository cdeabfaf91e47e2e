//! Checkpoints: making the present state the one that recovery starts from.
//!
//! 1. **Freeze** ([`freeze`]), one step under the writer lock: the root, the count and the LSN are copied, the epoch advances,
//!    and the log switches to its other file if that is free. From now on nobody changes a page of the frozen tree in place.
//! 2. **Write**, beside running writers: the frozen tree is compared with the one of the last checkpoint; pages that are new
//!    get their checksums, and the durable free-space map is derived from the last one and the differences ([`map`]). Pages taken
//!    for the map are listed in the shared state, so that they are not lost if the checkpoint dies.
//! 3. **Publish**: sync the data; keep an image of the meta page in the shared state; write it over the meta page that is
//!    not known durable; sync again.
//! 4. **Finish**, one step: the new meta is the durable one; the old map pages are given up; pages held for the old
//!    checkpoint, and the old log, are free.
//!
//! A checkpoint whose owner died before phase 3 is forgotten. One that died in phase 3 may or may not have reached the disk, so whoever
//! finds it completes it before anything else: same image, sync, finish.

pub mod freeze;
pub mod map;
pub mod publish;
pub mod run;
pub mod snapshot;
