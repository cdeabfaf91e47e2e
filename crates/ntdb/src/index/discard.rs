//! Giving up the pages of a tree that `clear` has put away.
//!
//! The step that clears puts an empty tree in place of the present one and notes the old root in the shared state. Its pages
//! are given up afterwards, by steps that each take a part of the range of hashes and note how far they have come; a
//! directory goes with the last of its buckets, the array at the end. Any process may take the next part: the one that cleared
//! does, and whoever runs short of pages, clears again, checks, or has written a checkpoint, if the first has died.
//!
//! Nobody changes the pages of such a tree any more, and none is re-used before it has been given up. They count as replaced when
//! the tree was put away, so that a checkpoint frozen since holds nothing of it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::core::Core;
use crate::error::Result;
use crate::options::deadline_after;
use crate::page::head::Kind;
use crate::storage::failpoint::crash_point;
use crate::transaction::step::Step;
use crate::transaction::writer::Writer;
use crate::types::{Epoch, PageNo, Run};

use super::locate::{self, Root};
use super::walk::{self, Item};

/// Most buckets that one step gives up, so that the writer lock is held for some ten microseconds ...
const BUCKETS_PER_PART: u32 = 16;
/// ... and most runs, unless one bucket has more (of long values).
const RUNS_PER_PART: u64 = 256;

/// Whether there is a tree to be given up.
#[inline]
pub fn is_due(core: &Core) -> bool {
    core.control().space.cleared_root.load(Relaxed) != 0
}

/// Adds to the step that clears: the tree below `root` is to be given up.
pub fn put_away(step: &mut Step, root: Root) {
    let core = step.core();
    let space = &core.control().space;
    step.store_shared(&space.cleared_root, root.to_word());
    step.store_shared(&space.cleared_next, 0);
    step.store_shared(&space.cleared_epoch, core.epoch().0);
}

/// Gives up all that is left. Lets the writer lock go between the parts, and waits for it for `limit` each time.
pub fn finish(core: &Core, limit: Option<Duration>) -> Result<()> {
    while is_due(core) {
        let mut writer = Writer::lock(core, deadline_after(limit))?;
        part(&mut writer)?;
    }
    Ok(())
}

/// Gives up a part of the tree, if there is one.
pub fn part(writer: &mut Writer) -> Result<()> {
    let core = writer.core;
    let space = &core.control().space;
    let word = space.cleared_root.load(Relaxed);
    if word == 0 {
        return Ok(());
    }
    let root = Root::from_word(word);
    let replaced = Epoch(space.cleared_epoch.load(Relaxed));
    let mut next = Some(space.cleared_next.load(Relaxed));
    let mut step = Step::begin(writer);
    let mut runs = 0;
    for _ in 0..BUCKETS_PER_PART {
        let Some(hash) = next else { break };
        let mut give = |item: Item| {
            runs += 1;
            step.give_replaced(item.run, item.made, replaced)
        };
        next = match bucket(core, root, hash, &mut give) {
            Ok(next) => next,
            // What lies behind damage cannot be found. Its pages stay marked used.
            Err(_) => locate::path(core, root, hash)
                .ok()
                .and_then(|path| walk::next_range(hash, path.entry_depth())),
        };
        if runs >= RUNS_PER_PART {
            break;
        }
    }
    match next {
        Some(hash) => step.store_shared(&space.cleared_next, hash),
        None => {
            if let Some(depth) = root.depth
                && let Ok(head) = core.head(root.page)
            {
                let len = locate::array_pages(core.page_size, depth.min(locate::MAX_ROOT_DEPTH));
                // A damaged one may be longer than the file.
                let _ = step.give_replaced(Run { first: root.page, len }, head.epoch(), replaced);
            }
            step.store_shared(&space.cleared_root, 0);
        }
    }
    crash_point("clear.part");
    step.structure()
}

/// Gives up the bucket at `hash`, and its directory if it is the last one there. Returns where the next one begins.
fn bucket(core: &Core, root: Root, hash: u64, give: walk::Visit) -> Result<Option<u64>> {
    let spot = walk::spot(core, root, hash)?;
    walk::visit_bucket(core, spot.bucket, give)?;
    let next = walk::next_range(hash, spot.bucket_bits);
    if let Some((page, bits)) = spot.directory
        && next.is_none_or(|next| walk::begins(next, bits))
    {
        visit_directory(core, page, give)?;
    }
    Ok(next)
}

fn visit_directory(core: &Core, page: PageNo, give: walk::Visit) -> Result<()> {
    let made = core.head(page)?.epoch();
    give(Item { run: Run { first: page, len: 1 }, made, kind: Some(Kind::Directory) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Db;
    use crate::checkpoint::{freeze, publish};
    use crate::log::record::Op;
    use crate::space::retire;
    use crate::transaction::operation;
    use crate::transaction::record::LogRecord;

    /// No hold of the writer lock handles more than a part of a cleared tree, and all its pages count as replaced when it was
    /// cleared, whatever has been frozen since.
    #[test]
    fn a_cleared_tree_is_given_up_in_parts() {
        let db = Db::in_memory().unwrap();
        for n in 0..20_000u32 {
            db.put(&n.to_le_bytes(), &[7; 100]).unwrap();
        }
        for n in 0..300u32 {
            db.put(format!("long {n}").as_bytes(), &[7; 2_000]).unwrap();
        }
        let pages = db.check().unwrap().pages;
        assert!(pages > 800, "{pages} pages");
        let core = &db.environment().core;
        let mut writer = Writer::lock(core, None).unwrap();
        retire::reclaim(&mut writer).unwrap();
        retire::filter_held_now(&mut writer).unwrap();
        let waiting = retire::all(core).unwrap().len() as u64;
        let mut log = LogRecord::default();
        log.encode(&Op::Clear);
        let epoch = core.epoch();
        operation::clear(&mut writer, &mut log).unwrap().unwrap();
        assert!(is_due(core));
        assert_eq!(retire::all(core).unwrap().len() as u64, waiting, "nothing is walked at once");
        assert!(operation::clear(&mut writer, &mut log).unwrap().is_none(), "one at a time");
        let (mut parts, mut given, mut frozen) = (0, 0, false);
        while is_due(core) {
            let before = retire::all(core).unwrap().len() as u64;
            part(&mut writer).unwrap();
            let runs = retire::all(core).unwrap().len() as u64 - before;
            // A bucket has 100 long values at most, and there are directory and array.
            assert!(runs <= RUNS_PER_PART + 102, "{runs} runs in one part");
            given += runs;
            parts += 1;
            if parts == 3 {
                freeze::freeze(&mut writer, false).unwrap();
                frozen = true;
            }
        }
        assert!(parts > 20 && frozen, "{parts} parts");
        assert_eq!(given, pages, "each page once");
        let retired = retire::all(core).unwrap();
        assert!(retired[waiting as usize..].iter().all(|(run, _)| run.replaced == epoch));
        drop(writer);
        publish::forget(core, None).unwrap();
        let report = db.check().unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.records, 0);
    }
}
