//! Pins: by them readers keep pages alive that writers have replaced.
//!
//! # The protocol
//!
//! A writer never changes what readers may be reading; it makes a new page, *unlinks* the old one by a
//! single store, and wants to re-use the old one some day. Readers that were on their way when the
//! link was changed may still read it. So:
//!
//! - there is one number, the **reclaim era**, which starts at 1 and advances now and then;
//! - a **reader** loads the era, stores it in a cache line of its own (its *slot*), passes a
//!   fence, and only then follows links. When done it stores 0;
//! - a **reclaimer** unlinks a page, passes a fence, loads the era `e` and notes it beside the page.
//!   The page is free when every pin in the table is greater than `e` ([`PinTable::min_pinned`]).
//!
//! Why that is enough: take a reader and a reclaimer. Their two fences have an order. If the
//! reader's came first, the reclaimer's scan sees the pin, and as the reader loaded the era
//! before, that pin is either not greater than `e`, and the page waits for it, or it is, which means
//! that the reader loaded an era that was advanced after the unlinking was done: then it sees the new link.
//! If the reclaimer's fence came first, the reader sees the new link anyway. (It is this "store,
//! fence, load" on both sides that a processor would otherwise reorder; `tests/models.rs` shows that the model without it fails.)
//!
//! A pin is stored with Release and scanned with Acquire, and so is the 0, so that all reads under a pin
//! that the scan no longer sees have happened before the page is written again.
//!
//! The reader's fence is the most expensive part of a read, and keeps the processor from overlapping it with the next. A process
//! that has registered for it ([`crate::storage::membarrier`]) leaves it out: the reclaimer then makes a system call, once for
//! many pages, that passes a full barrier in every running thread of all such processes, which stands in for their
//! fences. (A word of the shared state says that there are such processes; a reclaimer that cannot make the call then frees nothing.)
//!
//! Nobody waits for a pin. A reader that sleeps holds up re-use, and nothing else.
//!
//! # The table
//!
//! Slots lie in shared memory, a cache line each. A thread claims the lowest free one when it
//! first reads and keeps it; scans go to the high-water mark. The mark word also counts claims: a scan that has
//! found the last slots free lowers the mark only if no claim has happened since.
//!
//! | step of claim | a death before the next step leaves |
//! | --- | --- |
//! | compare-and-swap the owner from 0 | a slot that is owned but perhaps above the mark; never pinned |
//! | raise the mark, count | an owned slot, not pinned |
//! | pin, unpin | a pin of a dead process |
//!
//! All three are put right by [`PinTable::release_process`]; as a claim takes the lowest free
//! slot, a slot above the mark does no harm until then. Whoever is held up by a pin tests whether its owner lives.
//!
//! If no slot is to be had, threads share two that their process has claimed when it attached: those who
//! come pin the *newer* one, those who were there before leave the older, and when that is empty it
//! becomes the newer. So however many come, the oldest pin gets on.
//!
//! # Threads, processes, forks
//!
//! Which slot a thread has is remembered in thread-local storage, per environment (an [`Attachment`]). Nested
//! pins of one thread share the first one's. When a thread ends it gives its slots back, if
//! the environment is still there: a registry of open environments is locked meanwhile, and closing one takes
//! the same lock, so that the memory of a closed environment is never touched. After fork the child ignores
//! what its thread inherited: the slots belong to the parent.

mod table;
mod thread;

#[cfg(test)]
mod tests;

#[cfg(test)]
pub use self::table::{ClaimFor, OldestPin};
pub use self::table::{PinSlot, PinTable};
pub use self::thread::{Attachment, OwnPin, PinGuard, after_fork, before_fork};
