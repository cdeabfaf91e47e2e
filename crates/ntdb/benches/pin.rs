//! What a pin costs.
//!
//! `cargo bench -p ntdb --bench pin`
// Parts of the included modules are of no use here.
#![allow(dead_code, unused_imports, missing_docs)]

#[path = "../src/limits.rs"]
mod limits;
#[path = "../src/shm/pin/mod.rs"]
mod pin;
#[path = "../src/storage/mod.rs"]
mod storage;
#[path = "../src/sync.rs"]
mod sync;
#[path = "../src/types.rs"]
mod types;

use std::hint::black_box;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use pin::{Attachment, PinSlot, PinTable};
use types::SlotId;

const ROUNDS: u32 = 2_000_000;

/// The best of some runs, in nanoseconds per round.
fn measure(name: &str, mut round: impl FnMut()) {
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            round();
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(ROUNDS));
    }
    println!("{name:40} {best:7.2} ns");
}

fn attachment(slots: usize) -> Box<Attachment> {
    let slots: &'static [PinSlot] = Vec::leak((0..slots).map(|_| PinSlot::new()).collect());
    let words: &'static [AtomicU64; 2] = Box::leak(Box::default());
    // SAFETY: all of it lives for ever and is used for nothing else.
    let table = unsafe { PinTable::new(slots.as_ptr(), slots.len(), &words[0], &words[1]) };
    Attachment::new(table, SlotId(0)).expect("the table has room")
}

fn main() {
    let usual = attachment(4096);
    let other = attachment(4096);
    let full = attachment(2);
    measure("pin and unpin", || drop(black_box(usual.pin())));
    let outer = usual.pin();
    measure("pin and unpin, nested", || drop(black_box(usual.pin())));
    drop(outer);
    measure("pin and unpin, two environments by turns", || {
        drop(black_box(usual.pin()));
        drop(black_box(other.pin()));
    });
    measure("pin and unpin, shared slots", || drop(black_box(full.pin())));
    measure("oldest pin, 3 slots in use", || {
        black_box(usual.table().min_pinned());
    });
}
