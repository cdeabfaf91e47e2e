//! Waiting a moment for a checkpoint, instead of letting the file grow.
//!
//! While a checkpoint runs there may be three trees: the durable checkpoint's, the one that is being written, and the present one,
//! which a fast writer makes in those milliseconds if the database is small. When it is done, one of the three is free. So a writer
//! that needs the file to grow beyond two trees waits for it, without the writer lock: each operation for [`PATIENCE`] at most,
//! after which it lets the file grow by what it needs. A checkpoint that lasts longer than [`LASTING`] is not waited for any more:
//! the database is large then, and few of its pages change meanwhile; or the disk is slow, or somebody is stopped. All words here
//! are hints.

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::error::Result;
use crate::shm::layout::phase;
use crate::storage::futex;
use crate::transaction::writer::Writer;

use super::{retire, snapshots};

/// How long an operation waits.
const PATIENCE: Duration = Duration::from_millis(15);
/// How long a checkpoint is waited for.
const LASTING: Duration = Duration::from_millis(250);
/// By so many pages at most the file grows beyond the limit at once.
const GROWTH_PAGES: u64 = 8;
/// So many free pages are enough for any operation.
const ENOUGH: u64 = 32;

/// How long the file should be at most, in pages, during a checkpoint that begins now: two trees, and some room.
pub fn limit(core: &Core) -> u32 {
    let control = core.control();
    let file_pages = control.readers.file_pages.load(Relaxed) as u64;
    let free = control.writer.free_pages.load(Relaxed);
    let retired = retire::pages_roughly(core);
    let tree = file_pages.saturating_sub(free).saturating_sub(retired);
    // What snapshots hold does not come free with the checkpoint.
    let held = if snapshots::is_any(core).unwrap_or(false) { retired } else { 0 };
    (2 * tree + tree / 32 + 2 * ENOUGH + held).min(u32::MAX as u64) as u32
}

/// A checkpoint begins.
pub fn begin(core: &Core, growth_limit: u32) {
    let words = &core.control().checkpoint;
    words.began_ns.store(futex::monotonic_ns(), Relaxed);
    words.growth_limit.store(growth_limit, Relaxed);
}

/// By how many pages a file of `present` pages should grow at most, if more are not needed now.
pub fn growth_pages(core: &Core, present: u32) -> u64 {
    let words = &core.control().checkpoint;
    if words.phase.load(Relaxed) == phase::IDLE
        || words.unwaited_epoch.load(Relaxed) == words.running_epoch.load(Relaxed)
    {
        return u64::MAX;
    }
    let left = words.growth_limit.load(Relaxed).saturating_sub(present);
    (left as u64).max(GROWTH_PAGES)
}

/// Whether the holder of the writer lock should let it go and [`wait`].
#[inline]
pub fn is_advisable(writer: &mut Writer) -> Result<bool> {
    if writer.core.control().checkpoint.phase.load(Relaxed) == phase::IDLE {
        return Ok(false);
    }
    is_tight(writer)
}

#[cold]
fn is_tight(writer: &mut Writer) -> Result<bool> {
    let control = writer.core.control();
    let words = &control.checkpoint;
    let enough = || control.writer.free_pages.load(Relaxed) >= ENOUGH;
    if control.readers.file_pages.load(Relaxed) < words.growth_limit.load(Relaxed)
        || words.unwaited_epoch.load(Relaxed) == words.running_epoch.load(Relaxed)
        || enough()
    {
        return Ok(false);
    }
    retire::reclaim(writer)?;
    Ok(!enough())
}

/// Waits for the end of the running checkpoint, but not long. Says whether it has ended.
pub fn wait(core: &Core, deadline: Option<Instant>) -> bool {
    let words = &core.control().checkpoint;
    let epoch = words.running_epoch.load(Relaxed);
    let own = Instant::now() + PATIENCE;
    let until = deadline.map_or(own, |deadline| deadline.min(own));
    loop {
        let ended = words.completed.load(Acquire);
        if words.phase.load(Acquire) == phase::IDLE || words.running_epoch.load(Relaxed) != epoch {
            return true;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let lasted_ns = futex::monotonic_ns().wrapping_sub(words.began_ns.load(Relaxed));
            if lasted_ns > LASTING.as_nanos() as u64 {
                words.unwaited_epoch.store(epoch, Relaxed);
            }
            return false;
        }
        futex::wait(&words.completed, ended, Some(left));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Db;
    use crate::checkpoint::{freeze, publish};

    /// Whoever would have to let the file grow waits for the checkpoint, but not for one that lasts long, and not for what is
    /// no checkpoint.
    #[test]
    fn growth_waits_for_a_checkpoint_once() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::create(dir.path().join("a.ntdb")).unwrap();
        for n in 0..5_000u32 {
            db.put(&n.to_le_bytes(), &[1; 100]).unwrap();
        }
        let core = &db.environment().core;
        let control = core.control();
        let file = control.readers.file_pages.load(Relaxed);
        assert!(limit(core) > file && limit(core) < 3 * file, "{} for {file}", limit(core));
        let begin_checkpoint = |growth_limit: u32| {
            let mut writer = Writer::lock(core, None).unwrap();
            let frozen = freeze::freeze(&mut writer, false).unwrap();
            assert!(!is_advisable(&mut writer).unwrap(), "without a limit");
            begin(core, growth_limit);
            // Only a hint: as if no page were free.
            control.writer.free_pages.store(0, Relaxed);
            frozen.epoch
        };
        let put = |n: u32| {
            let start = Instant::now();
            db.put(&n.to_le_bytes(), &[2; 100]).unwrap();
            start.elapsed()
        };
        let epoch = begin_checkpoint(file);
        assert!(put(1) >= PATIENCE);
        assert_ne!(control.checkpoint.unwaited_epoch.load(Relaxed), epoch.0);
        assert_eq!(growth_pages(core, control.readers.file_pages.load(Relaxed)), GROWTH_PAGES);
        // It has lasted long by now.
        let long_ago = futex::monotonic_ns() - LASTING.as_nanos() as u64;
        control.checkpoint.began_ns.store(long_ago, Relaxed);
        control.writer.free_pages.store(0, Relaxed);
        assert!(put(1) >= PATIENCE);
        assert_eq!(control.checkpoint.unwaited_epoch.load(Relaxed), epoch.0);
        assert_eq!(growth_pages(core, file), u64::MAX);
        let mut writer = Writer::lock(core, None).unwrap();
        control.writer.free_pages.store(0, Relaxed);
        assert!(!is_advisable(&mut writer).unwrap(), "not for ever");
        drop(writer);
        publish::forget(core, None).unwrap();
        // The file is short enough.
        begin_checkpoint(u32::MAX - 1);
        let mut writer = Writer::lock(core, None).unwrap();
        assert!(!is_advisable(&mut writer).unwrap());
        // It is not any more, and then the checkpoint ends.
        control.checkpoint.growth_limit.store(1, Relaxed);
        assert!(is_advisable(&mut writer).unwrap());
        drop(writer);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wait(core, None));
            publish::forget(core, None).unwrap();
            assert!(waiting.join().unwrap());
        });
        let mut writer = Writer::lock(core, None).unwrap();
        assert!(!is_advisable(&mut writer).unwrap(), "none runs");
        drop(writer);
        // The hint was wrong; check counts for itself.
        control.writer.free_pages.store(
            crate::space::bits::count_free(core, control.readers.file_pages.load(Relaxed)),
            Relaxed,
        );
        assert!(db.check().unwrap().is_clean());
    }
}
