//! The disk that a power cut may leave.
//!
//! While a workload runs, [`record`] keeps, in a folder of *images*, what the disk is bound to
//! hold: for each file its content at the beginning of the last sync that returned, for the
//! directory the names at the beginning of its last sync. Everything else may or may not have
//! reached the disk: [`cut`] draws one of the possible disks. Each 512-byte sector is the durable
//! one, the one in memory at the time of the cut, or one from in between (for a mapped file is
//! written back whenever the kernel likes); a file's length is the old one, the new one or one that
//! it had in between; a name is there or not. The shared-memory companion is of no use after a boot: it is
//! gone, stale or garbage.
//!
//! Images are files, so that they outlive a workload that is killed at any moment, and so are told
//! apart by inode number:
//!
//! | image | content |
//! | --- | --- |
//! | `INODE.durable` | at the beginning of the last completed sync, and ranges synced since |
//! | `INODE.pending-N` | at the beginning of a sync that has not returned |
//! | `INODE.between-N` | at some moment since |
//! | `INODE.last` | just before the file was unlinked or replaced |
//! | `directory.durable`, `directory.pending-N` | lines of `INODE NAME` |

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::{self, ThreadId};

use ntdb::failpoint::{self, Event, Kind, What};

use crate::rng::Rng;

/// Bytes that a disk writes as a whole or not at all.
const SECTOR_BYTES: usize = 512;
/// Images kept from between two syncs.
const BETWEEN: u64 = 3;

fn image(images: &Path, inode: u64, what: &str) -> PathBuf {
    images.join(format!("{inode}.{what}"))
}

fn listing(dir: &Path) -> io::Result<BTreeMap<String, u64>> {
    let mut names = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.is_file() {
            names.insert(entry.file_name().to_string_lossy().into_owned(), metadata.ino());
        }
    }
    Ok(names)
}

fn write_listing(path: &Path, names: &BTreeMap<String, u64>) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    for (name, inode) in names {
        writeln!(file, "{inode} {name}")?;
    }
    Ok(())
}

fn read_listing(path: &Path) -> io::Result<BTreeMap<String, u64>> {
    let mut names = BTreeMap::new();
    for line in fs::read_to_string(path)?.lines() {
        let (inode, name) = line.split_once(' ').expect("inode and name");
        names.insert(name.to_string(), inode.parse().expect("an inode number"));
    }
    Ok(names)
}

/// Takes the present content of `dir` for durable: the machine has just been booted.
///
/// # Errors
/// What the system reports.
pub fn begin(dir: &Path, images: &Path) -> io::Result<()> {
    fs::create_dir_all(images)?;
    let names = listing(dir)?;
    for (name, inode) in &names {
        fs::copy(dir.join(name), image(images, *inode, "durable"))?;
    }
    write_listing(&images.join("directory.durable"), &names)
}

/// Has this process keep images of what it does to the files in `dir`.
///
/// # Panics
/// Later, if an image cannot be written: a test without images would prove nothing.
pub fn record(dir: &Path, images: &Path) {
    let (dir, images) = (dir.to_path_buf(), images.to_path_buf());
    let recorder = Mutex::new(Recorder::default());
    failpoint::set_recorder(Some(Box::new(move |event: Event<'_>| {
        let mut recorder = recorder.lock().unwrap_or_else(|_| gave_up("it has failed before"));
        note(&dir, &images, &mut recorder, &event)
            .unwrap_or_else(|e| gave_up(&format!("{event:?}: {e}")));
    })));
}

/// A test whose disk is not recorded proves nothing, whichever thread it is that finds out.
fn gave_up(why: &str) -> ! {
    eprintln!("power-cut recorder: {why}");
    std::process::exit(super::worker::STATUS_VIOLATION)
}

/// What is known of a process's files besides the images.
#[derive(Default)]
struct Recorder {
    /// Events so far.
    moment: u64,
    /// Files that were renamed, by the name that they were opened by.
    renamed: BTreeMap<PathBuf, u64>,
    /// Syncs under way, of several threads perhaps: of which file, by whom, and since when. 0 stands
    /// for the directory.
    syncing: HashMap<(u64, ThreadId), u64>,
    /// From which moment the durable image of a file is.
    durable: BTreeMap<u64, u64>,
}

impl Recorder {
    /// A sync of `inode` by this thread begins; returns the name of its image.
    fn begin(&mut self, inode: u64) -> String {
        self.syncing.insert((inode, thread::current().id()), self.moment);
        format!("pending-{}", self.moment)
    }

    /// It has succeeded; returns the name of its image, unless that of a later one is durable already.
    fn end(&mut self, inode: u64) -> (String, bool) {
        let since = self.syncing.remove(&(inode, thread::current().id())).unwrap_or(0);
        let durable = self.durable.entry(inode).or_default();
        let is_newer = since >= *durable;
        *durable = since.max(*durable);
        (format!("pending-{since}"), is_newer)
    }
}

/// Which file an event is about, and where it lies now. A file keeps telling the path that it was
/// opened by, also when it has been renamed since.
fn subject(
    dir: &Path,
    renamed: &BTreeMap<PathBuf, u64>,
    event: &Event<'_>,
) -> io::Result<Option<(u64, PathBuf)>> {
    if let Ok(metadata) = fs::metadata(event.path) {
        return Ok(Some((metadata.ino(), event.path.to_path_buf())));
    }
    let Some(&inode) = renamed.get(event.path) else { return Ok(None) };
    let place = listing(dir)?.into_iter().find(|(_, other)| *other == inode);
    Ok(place.map(|(name, _)| (inode, dir.join(name))))
}

/// Copies a file such that whoever is killed meanwhile leaves no part of it under that name.
fn copy_whole(from: impl AsRef<Path>, to: PathBuf) -> io::Result<()> {
    let partial = to.with_extension("partial");
    fs::copy(from, &partial)?;
    fs::rename(partial, to)
}

fn note(dir: &Path, images: &Path, recorder: &mut Recorder, event: &Event<'_>) -> io::Result<()> {
    recorder.moment += 1;
    let moment = recorder.moment;
    // What is done elsewhere, to the original of a copy say, is on another disk.
    if event.kind == Kind::Shm || !event.path.starts_with(dir) {
        return Ok(());
    }
    if event.kind == Kind::Dir {
        let image = |name: &str| images.join(format!("directory.{name}"));
        match event.what {
            What::SyncBegin => {
                let pending = image(&recorder.begin(0));
                write_listing(&image("partial"), &listing(dir)?)?;
                fs::rename(image("partial"), pending)?;
            }
            What::SyncEnd { ok: true } => match recorder.end(0) {
                (pending, true) => fs::rename(image(&pending), image("durable"))?,
                (pending, false) => fs::remove_file(image(&pending))?,
            },
            _ => {}
        }
        return Ok(());
    }
    let Some((inode, path)) = subject(dir, &recorder.renamed, event)? else {
        // An old descriptor of a file whose name is gone: `INODE.last` has it.
        return Ok(());
    };
    match event.what {
        What::Created => {
            recorder.renamed.remove(event.path);
            recorder.durable.remove(&inode);
            for what in ["durable", "last", "between-0", "between-1", "between-2"] {
                let _ = fs::remove_file(image(images, inode, what));
            }
        }
        What::SyncBegin => {
            copy_whole(&path, image(images, inode, &recorder.begin(inode)))?;
        }
        What::SyncEnd { ok: true } => {
            let (pending, is_newer) = recorder.end(inode);
            let pending = image(images, inode, &pending);
            match is_newer {
                true => fs::rename(pending, image(images, inode, "durable"))?,
                false => fs::remove_file(pending)?,
            }
        }
        What::RangeSynced { offset, len, ok: true } => {
            let now = fs::read(&path)?;
            let range = offset as usize..(offset + len) as usize;
            // Also where a sync of all is under way, which began before.
            let pending = recorder.syncing.iter().filter(|((of, _), _)| *of == inode);
            let mut names: Vec<String> =
                pending.map(|(_, since)| format!("pending-{since}")).collect();
            names.push("durable".into());
            for name in names {
                let path = image(images, inode, &name);
                let Ok(mut bytes) = fs::read(&path) else { continue };
                bytes.resize(range.end.max(bytes.len()), 0);
                bytes[range.clone()].copy_from_slice(&now[range.clone()]);
                // Whoever is killed here leaves the old image or the new one.
                let patched = image(images, inode, "patched");
                fs::write(&patched, bytes)?;
                fs::rename(&patched, &path)?;
            }
        }
        What::Unlink => {
            copy_whole(&path, image(images, inode, "last"))?;
        }
        What::Rename(to) => {
            if let Ok(replaced) = fs::metadata(to) {
                copy_whole(to, image(images, replaced.ino(), "last"))?;
            }
            recorder.renamed.insert(event.path.to_path_buf(), inode);
        }
        _ => {}
    }
    if matches!(event.what, What::SyncBegin | What::Write { .. }) && moment.is_multiple_of(5) {
        // Mapped pages change without an event: look at them now and then.
        for (name, inode) in listing(dir)? {
            if !name.ends_with("-shm") {
                let between = format!("between-{}", moment / 5 % BETWEEN);
                copy_whole(dir.join(name), image(images, inode, &between))?;
            }
        }
    }
    Ok(())
}

/// Draws one of the disks that a power cut may leave, and writes it to the new folder `disk`.
/// Nobody may be using `dir`. Returns a description for the failure report.
///
/// # Errors
/// What the system reports.
pub fn cut(dir: &Path, images: &Path, disk: &Path, rng: &mut Rng) -> io::Result<String> {
    fs::create_dir(disk)?;
    let mut story = String::new();
    let now = listing(dir)?;
    let mut durable = read_listing(&images.join("directory.durable"))?;
    for pending in pending_images(images, "directory")? {
        if rng.percent(50) {
            durable = read_listing(&pending)?;
        }
    }
    // Either the directory reached the disk as it was in memory, or as it was synced, or each
    // name for itself.
    let directory_style = rng.below(4);
    let names: BTreeSet<&String> = now.keys().chain(durable.keys()).collect();
    for name in names {
        let (new, old) = (now.get(name).copied(), durable.get(name).copied());
        let chosen = match directory_style {
            0 => new,
            1 => old,
            _ => *rng.pick(&[new, old]),
        };
        if name.ends_with("-shm") {
            shm_after_boot(dir, disk, name, rng, &mut story)?;
            continue;
        }
        let Some(inode) = chosen else {
            if new != old {
                story.push_str(&format!("{name}: not there; "));
            }
            continue;
        };
        // By whatever name it is there now: a rename that has not reached the disk changes nothing of the content.
        let memory = match now.iter().find(|(_, other)| **other == inode) {
            Some((present, _)) => fs::read(dir.join(present))?,
            None => fs::read(image(images, inode, "last")).unwrap_or_default(),
        };
        let file = mix(images, inode, &memory, rng, &mut story, name)?;
        fs::write(disk.join(name), file)?;
    }
    Ok(story)
}

/// The images of the syncs of `what` that have not returned.
fn pending_images(images: &Path, what: &str) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&format!("{what}.pending-")) {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

fn shm_after_boot(
    dir: &Path,
    disk: &Path,
    name: &str,
    rng: &mut Rng,
    story: &mut String,
) -> io::Result<()> {
    let Ok(mut content) = fs::read(dir.join(name)) else { return Ok(()) };
    match rng.below(4) {
        0 | 1 => {
            story.push_str("shm gone; ");
            return Ok(());
        }
        2 => story.push_str("shm stale; "),
        _ => {
            story.push_str("shm torn; ");
            for sector in content.chunks_mut(SECTOR_BYTES) {
                if rng.percent(30) {
                    sector.fill(0);
                }
            }
        }
    }
    fs::write(disk.join(name), content)
}

/// One possible content of a file.
fn mix(
    images: &Path,
    inode: u64,
    memory: &[u8],
    rng: &mut Rng,
    story: &mut String,
    name: &str,
) -> io::Result<Vec<u8>> {
    let load = |what: &str| fs::read(image(images, inode, what)).ok();
    let durable = load("durable").unwrap_or_default();
    let mut later: Vec<Vec<u8>> = vec![memory.to_vec()];
    for pending in pending_images(images, &inode.to_string())? {
        later.push(fs::read(pending)?);
    }
    for n in 0..BETWEEN {
        // An image from before the last sync is not possible any more: its sectors were
        // overwritten on the disk. `between` images carry no time, so compare by age of the file.
        let path = image(images, inode, &format!("between-{n}"));
        let newer = |p: &Path| fs::metadata(p).and_then(|m| m.modified()).ok();
        let since = newer(&path).zip(newer(&image(images, inode, "durable")));
        if since.is_some_and(|(between, durable)| between > durable) {
            later.extend(fs::read(&path).ok());
        }
    }
    // Lengths change as a whole; between two syncs there may have been several.
    let mut lengths = vec![durable.len(), durable.len(), memory.len(), memory.len()];
    lengths.extend(later.iter().map(Vec::len));
    let len = *rng.pick(&lengths);
    let short = lengths.iter().copied().min().unwrap_or(0);
    let long = lengths.iter().copied().max().unwrap_or(0);
    // Draw the style per file: nothing new arrived, all did, some, a beginning, all but a few.
    let style = rng.below(6);
    let percent = rng.below(101);
    let sectors = len.div_ceil(SECTOR_BYTES);
    let border = rng.below(sectors as u64 + 1) as usize;
    let mut file = vec![0; len];
    let mut differing = 0;
    let mut taken = 0;
    for sector in 0..sectors {
        let range = sector * SECTOR_BYTES..len.min((sector + 1) * SECTOR_BYTES);
        let take_new = match style {
            0 => false,
            1 => true,
            2 | 3 => rng.percent(percent),
            4 => sector < border,
            _ => !rng.one_in(20),
        };
        let old = durable.get(range.start..range.end.min(durable.len()));
        let source = if take_new { rng.pick(&later).as_slice() } else { durable.as_slice() };
        let end = range.end.min(source.len());
        if let Some(bytes) = source.get(range.start..end.max(range.start)) {
            file[range.start..range.start + bytes.len()].copy_from_slice(bytes);
        }
        let new = memory.get(range.start..range.end.min(memory.len()));
        differing += u64::from(old != new);
        taken += u64::from(old != new && take_new);
    }
    if differing > 0 || short != long {
        story.push_str(&format!(
            "{name}: {taken} of {differing} unsynced sectors (style {style}), length {len} of \
             {short}..{long}; "
        ));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::TempDir;

    /// Builds images by hand: `a` synced as 1s then overwritten by 2s, `b` created unsynced.
    fn scene() -> (TempDir, PathBuf, PathBuf) {
        let home = TempDir::new();
        let (dir, images) = (home.path().join("db"), home.path().join("images"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("a"), vec![1; 4096]).unwrap();
        begin(&dir, &images).unwrap();
        fs::write(dir.join("a"), vec![2; 8192]).unwrap();
        fs::write(dir.join("b"), vec![3; 1024]).unwrap();
        (home, dir, images)
    }

    #[test]
    fn every_sector_is_old_or_new_and_both_come_up() {
        let (home, dir, images) = scene();
        let (mut mixed, mut lengths, mut with_b) = (0, BTreeSet::new(), 0);
        for seed in 0..300 {
            let disk = home.path().join("disk");
            cut(&dir, &images, &disk, &mut Rng::new(seed)).unwrap();
            let a = fs::read(disk.join("a")).unwrap();
            lengths.insert(a.len());
            let old = a[..4096].chunks(512).filter(|s| s.iter().all(|&b| b == 1)).count();
            let new = a[..4096].chunks(512).filter(|s| s.iter().all(|&b| b == 2)).count();
            assert_eq!(old + new, 8, "seed {seed}: a torn sector");
            assert!(a[4096..].iter().all(|&b| b == 2 || b == 0));
            mixed += u32::from(old > 0 && new > 0);
            with_b += u32::from(disk.join("b").exists());
            fs::remove_dir_all(&disk).unwrap();
        }
        assert!(mixed > 50, "{mixed}");
        assert!((50..250).contains(&with_b), "{with_b}");
        assert!(lengths.contains(&4096) && lengths.contains(&8192), "{lengths:?}");
    }

    #[test]
    fn what_was_synced_is_never_lost() {
        let (home, dir, images) = scene();
        begin(&dir, &images).unwrap();
        for seed in 0..50 {
            let disk = home.path().join("disk");
            cut(&dir, &images, &disk, &mut Rng::new(seed)).unwrap();
            assert_eq!(fs::read(disk.join("a")).unwrap(), vec![2; 8192]);
            assert_eq!(fs::read(disk.join("b")).unwrap(), vec![3; 1024]);
            fs::remove_dir_all(&disk).unwrap();
        }
    }
}
