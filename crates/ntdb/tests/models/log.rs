//! Flush, sync and log switch: the words of `log::flush`, with the real flush lock, on a disk of a few records.
//!
//! The ring has room for two records. A file is what was written to it and how much of that was on disk at the last sync.

use loom::sync::atomic::{AtomicU64, Ordering::*, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::lock::{RobustLock, Turn};
use super::mortal::{Killed, Life, for_all_deaths};
use super::types::SlotId;
use super::{Setting, explore};

const RING: u64 = 2;
const NO_SWITCH: u64 = u64::MAX;

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// The flusher loads where to switch before it loads the tail.
    SwitchPointFirst,
    /// The flusher writes what it copied although others have flushed meanwhile.
    TrustsItsCopy,
    /// One who syncs looks which file is current before it looks how much is written.
    FileFirst,
    /// The old file isn't synced at a switch.
    NoSync,
    /// A switch is announced without looking whether it is still due.
    AnnouncesLate,
    /// The new file is made under the name that others open.
    MakesInPlace,
    /// The new file gets its name although another one for the same switch has it.
    ReplacesMade,
    /// The file that is to be re-used is taken although it is the new one already.
    TakesMade,
    /// No fence between raising the flag and looking at the lock, and on the other side.
    NoFences,
}

/// The file of log1 at first, whose contents nobody needs; and what stands for no file.
const OLD: usize = 1;
const GONE: usize = 2;

/// A log file.
#[derive(Clone, Default)]
struct File {
    salt: u64,
    start: u64,
    records: Vec<u64>,
    synced_len: usize,
}

#[derive(Default)]
struct Disk {
    files: Vec<File>,
    /// Which file has the name of log0, log1.
    names: [usize; 2],
    /// The same after a power cut.
    synced_names: [usize; 2],
}

struct Shared {
    tail: AtomicU64,
    writer_salt: AtomicU64,
    /// The writer lock.
    writer: Mutex<()>,
    ring: [AtomicU64; RING as usize],
    written: AtomicU64,
    synced: AtomicU64,
    switch_at: AtomicU64,
    switch_salt: AtomicU64,
    salt: AtomicU64,
    start: AtomicU64,
    index: AtomicU64,
    incarnation: AtomicU64,
    flush_lock: RobustLock,
    disk: Mutex<Disk>,
    wrong: Wrong,
}

/// A switch, as it was when somebody set out to make it.
struct Switch {
    at: u64,
    salt: u64,
    previous: u64,
    index: u64,
}

/// A record as it is sealed with the salt of the time.
fn sealed(salt: u64, lsn: u64) -> u64 {
    100 * salt + lsn
}

impl Shared {
    fn new(wrong: Wrong) -> Self {
        let zero = || AtomicU64::new(0);
        let first = File { salt: 1, ..File::default() };
        Self {
            tail: zero(),
            writer_salt: AtomicU64::new(1),
            writer: Mutex::new(()),
            ring: [zero(), zero()],
            written: zero(),
            synced: zero(),
            switch_at: AtomicU64::new(NO_SWITCH),
            switch_salt: zero(),
            salt: AtomicU64::new(1),
            start: zero(),
            index: zero(),
            incarnation: zero(),
            flush_lock: RobustLock::new(),
            disk: Mutex::new(Disk {
                files: vec![first, File::default(), File::default()],
                names: [0, OLD],
                synced_names: [0, OLD],
            }),
            wrong,
        }
    }

    /// Appends a record if the ring has room. Its salt, or 0.
    fn append(&self) -> u64 {
        let _writer = self.writer.lock().unwrap();
        let tail = self.tail.load(Relaxed);
        if tail - self.written.load(Acquire) >= RING {
            return 0;
        }
        let salt = self.writer_salt.load(Relaxed);
        // Pairs with the flusher's fence: who reads what is written here sees that it was free.
        fence(Release);
        self.ring[(tail % RING) as usize].store(sealed(salt, tail), Relaxed);
        self.tail.store(tail + 1, Release);
        salt
    }

    /// A checkpoint's freeze, with a switch unless one is still due.
    fn freeze(&self) {
        let _writer = self.writer.lock().unwrap();
        if self.switch_at.load(Relaxed) != NO_SWITCH {
            return;
        }
        let salt = self.writer_salt.load(Relaxed) + 1;
        self.switch_salt.store(salt, Relaxed);
        self.writer_salt.store(salt, Release);
        self.switch_at.store(self.tail.load(Relaxed), Release);
    }

    /// The file that is written now.
    fn current(&self) -> Option<usize> {
        for _ in 0..3 {
            let incarnation = self.incarnation.load(Acquire);
            let index = self.index.load(Acquire);
            let salt = self.salt.load(Acquire);
            let file = {
                let disk = self.disk.lock().unwrap();
                let file = disk.names[index as usize];
                (disk.files[file].salt == salt).then_some(file)
            };
            if file.is_some() && self.incarnation.load(Acquire) == incarnation {
                return file;
            }
            thread::yield_now();
        }
        None
    }

    /// The flush lock, from a living owner if it has to be.
    fn lock_flush(&self, me: SlotId) -> Option<Turn> {
        let lock = &self.flush_lock;
        let turn = lock.turn();
        let taken = match turn.owner() {
            None => lock.try_acquire(me),
            Some(_) => lock.steal_from_live(me, turn),
        };
        taken.then(|| lock.turn())
    }

    fn flush_once(&self, me: SlotId) {
        let Some(turn) = self.lock_flush(me) else { return };
        self.flush_locked(turn);
        self.flush_lock.release_if_mine(turn);
    }

    fn flush_locked(&self, turn: Turn) {
        let written = self.written.load(Acquire);
        let (tail, switch_at) = if self.wrong == Wrong::SwitchPointFirst {
            let switch_at = self.switch_at.load(Acquire);
            (self.tail.load(Acquire), switch_at)
        } else {
            // In this order: a tail with records behind a switch point shows the switch point, too.
            let tail = self.tail.load(Acquire);
            (tail, self.switch_at.load(Acquire))
        };
        if written >= switch_at {
            let _ = self.switch(&Life::long(), switch_at);
            return;
        }
        let end = tail.min(switch_at);
        if end <= written {
            return;
        }
        let Some(file) = self.current() else { return };
        let copy: Vec<u64> =
            (written..end).map(|lsn| self.ring[(lsn % RING) as usize].load(Relaxed)).collect();
        if self.wrong != Wrong::TrustsItsCopy {
            // A robbed predecessor may have advanced it; then writers may have been over what was copied.
            fence(SeqCst);
            if self.written.load(Acquire) != written {
                return;
            }
        }
        if self.flush_lock.still_mine(turn) {
            let mut disk = self.disk.lock().unwrap();
            let file = &mut disk.files[file];
            for (lsn, record) in (written..end).zip(copy) {
                let at = (lsn - file.start) as usize;
                assert!(at <= file.records.len(), "a gap in the log");
                if at == file.records.len() {
                    file.records.push(record);
                } else {
                    file.records[at] = record;
                }
            }
            drop(disk);
            self.written.fetch_max(end, AcqRel);
        }
    }

    fn switch(&self, life: &Life, at: u64) -> Result<(), Killed> {
        let index = 1 - self.index.load(Acquire);
        let salt = self.switch_salt.load(Acquire);
        let switch = Switch { at, salt, previous: self.salt.load(Acquire), index };
        let incarnation = self.incarnation.load(Acquire) + 1;
        if !self.is_due(&switch) {
            return Ok(());
        }
        let Some(old) = self.current() else { return Ok(()) };
        if self.wrong != Wrong::NoSync {
            self.sync_file(old);
        }
        life.step()?;
        self.synced.fetch_max(at, AcqRel);
        life.step()?;
        if !self.is_made(&switch) {
            life.step()?;
            let old = self.take_old(&switch);
            life.step()?;
            let file = self.make_file(&switch, old);
            life.step()?;
            let _writer = self.writer.lock().unwrap();
            if !self.is_due(&switch) {
                return Ok(());
            }
            if self.wrong == Wrong::ReplacesMade || !self.is_made(&switch) {
                self.disk.lock().unwrap().names[index as usize] = file;
            }
        }
        life.step()?;
        {
            let mut disk = self.disk.lock().unwrap();
            disk.synced_names = disk.names;
        }
        life.step()?;
        if self.wrong != Wrong::AnnouncesLate {
            // One step of the writer lock's note; deaths in the middle of it are in the model of the note.
            let _writer = self.writer.lock().unwrap();
            if self.is_due(&switch) {
                return self.announce(&Life::long(), &switch, incarnation);
            }
            return Ok(());
        }
        self.announce(life, &switch, incarnation)
    }

    /// Whether the switch is still to be made; certain only under the writer lock.
    fn is_due(&self, switch: &Switch) -> bool {
        self.switch_at.load(Acquire) == switch.at
            && self.switch_salt.load(Acquire) == switch.salt
            && self.salt.load(Acquire) == switch.previous
            && switch.salt != switch.previous
    }

    /// Whether the name bears the switch's new file.
    fn is_made(&self, switch: &Switch) -> bool {
        let disk = self.disk.lock().unwrap();
        disk.files[disk.names[switch.index as usize]].salt == switch.salt
    }

    fn announce(&self, life: &Life, switch: &Switch, incarnation: u64) -> Result<(), Killed> {
        life.step()?;
        self.salt.store(switch.salt, Release);
        life.step()?;
        self.start.store(switch.at, Release);
        life.step()?;
        self.index.store(switch.index, Release);
        life.step()?;
        self.incarnation.store(incarnation, Release);
        life.step()?;
        self.switch_at.store(NO_SWITCH, Release);
        Ok(())
    }

    /// Takes the name from the old file of that place, to re-use it.
    fn take_old(&self, switch: &Switch) -> Option<usize> {
        let _writer = self.writer.lock().unwrap();
        if !self.is_due(switch) || (self.wrong != Wrong::TakesMade && self.is_made(switch)) {
            return None;
        }
        let mut disk = self.disk.lock().unwrap();
        let file = disk.names[switch.index as usize];
        // In the model log0 is not re-used, since what it holds is looked at again.
        if file == GONE || file == 0 {
            return None;
        }
        disk.names[switch.index as usize] = GONE;
        Some(file)
    }

    /// Makes the new file, under a name of its own if all is well.
    fn make_file(&self, switch: &Switch, old: Option<usize>) -> usize {
        let mut disk = self.disk.lock().unwrap();
        let file = File { salt: switch.salt, start: switch.at, ..File::default() };
        let made = old.unwrap_or(disk.files.len());
        if made == disk.files.len() {
            disk.files.push(file);
        } else {
            disk.files[made] = file;
        }
        if self.wrong == Wrong::MakesInPlace {
            disk.names[switch.index as usize] = made;
        }
        made
    }

    fn sync_file(&self, file: usize) {
        let mut disk = self.disk.lock().unwrap();
        let file = &mut disk.files[file];
        file.synced_len = file.records.len();
    }

    fn sync_once(&self) {
        let (written, file) = if self.wrong == Wrong::FileFirst {
            let file = self.current();
            (self.written.load(Acquire), file)
        } else {
            let written = self.written.load(Acquire);
            (written, self.current())
        };
        let Some(file) = file else { return };
        self.sync_file(file);
        self.synced.fetch_max(written, AcqRel);
    }

    /// What recovery would find after a power cut: the records of the files that follow each other.
    fn recovered(&self, salts: &[u64]) -> Vec<u64> {
        let disk = self.disk.lock().unwrap();
        let mut records: Vec<u64> = Vec::new();
        for &salt in salts {
            let named = disk.synced_names.iter().map(|&name| &disk.files[name]);
            let mut files = named.chain(&disk.files[..1]).filter(|file| file.salt == salt);
            let Some(file) = files.next() else { break };
            if file.start != records.len() as u64 {
                break;
            }
            let valid =
                |&(at, &record): &(usize, &u64)| record == sealed(salt, file.start + at as u64);
            let durable = file.records[..file.synced_len].iter().enumerate();
            records.extend(durable.take_while(valid).map(|(_, &record)| record));
        }
        records
    }

    fn verify_synced(&self, salts: &[u64]) {
        let synced = self.synced.load(Acquire);
        let recovered = self.recovered(salts).len() as u64;
        assert!(recovered >= synced, "{synced} records are acknowledged, {recovered} on disk");
    }

    /// Brings everything to disk, and demands that everything is there.
    fn finish(&self, me: SlotId, salts: &[u64]) {
        for _ in 0..4 {
            self.flush_once(me);
        }
        self.sync_once();
        let tail = self.tail.load(Relaxed);
        assert_eq!(self.switch_at.load(Relaxed), NO_SWITCH, "a switch was not made");
        assert_eq!(self.written.load(Relaxed), tail, "not everything is written");
        assert_eq!(self.synced.load(Relaxed), tail, "not everything is synced");
        self.verify_synced(salts);
    }
}

/// A full ring; one flusher is robbed by another while a writer waits for room.
pub fn robbed_flusher(setting: &Setting, wrong: Wrong) -> usize {
    explore(setting, move || {
        let shared = Arc::new(Shared::new(wrong));
        shared.append();
        shared.append();
        let flushers: Vec<_> = (1..=2)
            .map(|slot| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.flush_once(SlotId(slot)))
            })
            .collect();
        // A writer in want of room looks again and again.
        for _ in 0..3 {
            if shared.append() != 0 {
                break;
            }
            thread::yield_now();
        }
        for flusher in flushers {
            flusher.join().unwrap();
        }
        shared.finish(SlotId(3), &[1]);
    })
}

/// A checkpoint switches logs, and a record follows, beside one who flushes and one who syncs.
pub fn switch_beside_flush_and_sync(setting: &Setting, wrong: Wrong) -> usize {
    explore(setting, move || {
        let shared = Arc::new(Shared::new(wrong));
        shared.append();
        let flusher = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for _ in 0..3 {
                    shared.flush_once(SlotId(1));
                }
            })
        };
        let syncer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.sync_once();
                shared.verify_synced(&[1, 2]);
            })
        };
        shared.freeze();
        shared.append();
        flusher.join().unwrap();
        syncer.join().unwrap();
        shared.finish(SlotId(3), &[1, 2]);
    })
}

/// A record in the old log, a switch due.
fn before_switch(wrong: Wrong) -> Shared {
    let shared = Shared::new(wrong);
    shared.append();
    shared.flush_once(SlotId(1));
    shared.freeze();
    shared
}

/// All deaths of one who switches and of the one who does it again.
pub fn switch_survives_deaths(setting: &Setting, wrong: Wrong) -> usize {
    for_all_deaths(|first, second, first_survived, second_survived| {
        let (first_survived, second_survived) = (first_survived.clone(), second_survived.clone());
        explore(setting, move || {
            let shared = before_switch(wrong);
            for (slot, steps, survived) in
                [(1, first, &first_survived), (2, second, &second_survived)]
            {
                let turn = shared.lock_flush(SlotId(slot)).unwrap();
                let at = shared.switch_at.load(Acquire);
                if at == NO_SWITCH {
                    survived.note(&Ok(()));
                    continue;
                }
                let result = shared.switch(&Life::of(steps), at);
                survived.note(&result);
                if result.is_ok() {
                    shared.flush_lock.release_if_mine(turn);
                }
                shared.verify_synced(&[1, 2]);
            }
            assert_eq!(shared.append(), 2);
            shared.finish(SlotId(3), &[1, 2]);
        })
    })
}

/// One who switches is robbed, and wakes after the thief has made this switch and the next.
pub fn robbed_switcher(setting: &Setting, wrong: Wrong, switches: u64) -> usize {
    explore(setting, move || {
        let shared = Arc::new(before_switch(wrong));
        let robbed = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.flush_once(SlotId(1)))
        };
        let salts: Vec<u64> = (1..=switches + 1).collect();
        // The robbed one begins, for once without costing a pre-emption.
        thread::yield_now();
        for switch in 0..switches {
            if switch > 0 {
                shared.freeze();
            }
            shared.flush_once(SlotId(2));
            shared.append();
            shared.flush_once(SlotId(2));
            shared.sync_once();
            shared.verify_synced(&salts);
        }
        robbed.join().unwrap();
        shared.finish(SlotId(3), &salts);
    })
}

/// A flusher's flag and the lock that it may have lost, against one who wants to re-use the file.
pub fn flagged_file_is_not_re_used(setting: &Setting, wrong: Wrong) -> usize {
    explore(setting, move || {
        let words = Arc::new((RobustLock::new(), AtomicU64::new(0), AtomicU64::new(0)));
        let (lock, flag, re_used) = &*words;
        assert!(lock.try_acquire(SlotId(1)));
        let turn = lock.turn();
        let robbed = {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                let (lock, flag, re_used) = &*words;
                flag.store(1, SeqCst);
                if wrong != Wrong::NoFences {
                    fence(SeqCst);
                }
                if lock.still_mine(turn) {
                    // The write; it may come as late as the flag says.
                    assert_eq!(re_used.load(Acquire), 0, "a write into a file that is re-used");
                    flag.store(0, SeqCst);
                }
            })
        };
        assert!(lock.steal_from_live(SlotId(2), turn));
        if wrong != Wrong::NoFences {
            fence(SeqCst);
        }
        if flag.load(SeqCst) == 0 {
            re_used.store(1, Release);
        }
        robbed.join().unwrap();
    })
}
