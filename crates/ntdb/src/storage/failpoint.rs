//! Named places where a test can make the process die, stop or fail.
//!
//! The engine calls [`crash_point`] between any two steps of a write path, and asks [`fault`]
//! before each system call that can fail. Without the feature `failpoints` both are empty inline
//! functions. With it, a plan decides, which comes from the environment (read once, so that it
//! works for a program started by a test) or from [`set_plan`]:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `NTDB_CRASH=name[:nth]` | `kill -9` oneself at the nth passage (1 unless told otherwise) |
//! | `NTDB_STOP=name[:nth]` | stop oneself (SIGSTOP) there |
//! | `NTDB_FAULT=name:errno[:nth[+]]` | that call fails the nth time; with `+` ever after, too |
//! | `NTDB_TEST_BOOT_ID=hex` | pretend that the machine was booted anew |
//!
//! Several faults are separated by commas; an errno is a number or `EIO`, `ENOSPC`, `EDQUOT`,
//! `EFBIG`, `ENOMEM`, `EROFS`. Crash points are named with dots (`note.armed`), faults with a
//! colon before the kind of file (`fdatasync:data`): `open`, `create`, `read`, `write`, `allocate`,
//! `fallocate` (each step of an allocation), `truncate`, `fdatasync`, `fsync`, `unlink`, `rename`;
//! the kinds are `data`, `log`, `shm`, `dir`.
//!
//! Nothing here locks: a child forked while another thread passes a crash point must be able to
//! pass one too. Plans, recorders and names live for ever once made (tests make few).

/// The kind of file that a fault or an event is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// The data file.
    Data,
    /// A redo log.
    Log,
    /// The shared-memory companion.
    Shm,
    /// A directory.
    Dir,
}

/// What is done to the disk, in the order in which it is done, told to the recorder.
#[cfg_attr(not(feature = "failpoints"), allow(dead_code, reason = "nobody listens, then"))]
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// Which kind of file.
    pub kind: Kind,
    /// Its path as it was opened.
    pub path: &'a std::path::Path,
    /// What is done.
    pub what: What<'a>,
}

/// The part of an [`Event`] that says what happens.
#[cfg_attr(not(feature = "failpoints"), allow(dead_code, reason = "nobody listens, then"))]
#[derive(Clone, Copy, Debug)]
pub enum What<'a> {
    /// A sync is about to begin: what was written before is what it makes durable at the least.
    SyncBegin,
    /// That sync has returned.
    SyncEnd {
        /// Whether it succeeded.
        ok: bool,
    },
    /// These bytes have been made durable, and no others.
    RangeSynced {
        /// Where, in bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Whether it succeeded.
        ok: bool,
    },
    /// Bytes are about to be written by a system call (stores into a mapping go unseen).
    Write {
        /// Where, in bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
    },
    /// The file is about to be cut or extended to this length, in bytes.
    Truncate(u64),
    /// Space for bytes up to this end is about to be allocated.
    Allocate(u64),
    /// The file was created.
    Created,
    /// The file is about to be unlinked.
    Unlink,
    /// The file is about to be renamed.
    Rename(&'a std::path::Path),
}

#[cfg(not(feature = "failpoints"))]
pub use off::*;
#[cfg(feature = "failpoints")]
pub use on::*;

#[cfg(not(feature = "failpoints"))]
mod off {
    use super::Event;
    use std::io;

    /// Nothing, in a build without `failpoints`.
    #[inline(always)]
    pub fn crash_point(_name: &'static str) {}

    /// Nothing fails, in a build without `failpoints`.
    #[inline(always)]
    pub fn fault(_name: &'static str) -> Option<io::Error> {
        None
    }

    /// Nobody listens, in a build without `failpoints`.
    #[inline(always)]
    pub fn record(_event: Event<'_>) {}

    /// The real boot counts, in a build without `failpoints`.
    #[inline(always)]
    pub fn boot_id_override() -> Option<[u8; 16]> {
        None
    }
}

#[cfg(feature = "failpoints")]
mod on {
    use super::Event;
    use std::io;
    use std::ptr;
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};

    /// What happens at the crash point of a plan.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Action {
        /// SIGKILL to this process.
        Kill,
        /// SIGSTOP to this process; it goes on after a SIGCONT.
        Stop,
    }

    /// One crash of a [`Plan`].
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct Crash {
        /// Name of the crash point.
        pub name: String,
        /// At which passage, counted from 1 and from when the plan was set.
        pub nth: u64,
        /// What happens there.
        pub action: Action,
    }

    /// One failing system call of a [`Plan`].
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct Fault {
        /// Name of the fault, `fdatasync:data` for example.
        pub name: String,
        /// The error number that the call appears to return.
        pub errno: i32,
        /// Which call fails, counted from 1 and from when the plan was set.
        pub nth: u64,
        /// Whether all later calls fail, too.
        pub and_after: bool,
    }

    /// Where to die and what fails.
    #[derive(Clone, PartialEq, Eq, Debug, Default)]
    pub struct Plan {
        /// Where to die or stop.
        pub crashes: Vec<Crash>,
        /// Which calls fail.
        pub faults: Vec<Fault>,
    }

    impl Plan {
        /// Reads the `NTDB_CRASH`, `NTDB_STOP` and `NTDB_FAULT` texts (see the module's text).
        ///
        /// # Errors
        /// The part that could not be understood.
        pub fn parse(
            crash: Option<&str>,
            stop: Option<&str>,
            fault: Option<&str>,
        ) -> Result<Plan, String> {
            let mut plan = Plan::default();
            for (text, action) in [(crash, Action::Kill), (stop, Action::Stop)] {
                for part in text.into_iter().flat_map(|t| t.split(',')).filter(|p| !p.is_empty()) {
                    let (name, nth) = match part.rsplit_once(':') {
                        Some((name, nth)) => (name, positive(nth).ok_or_else(|| part.to_owned())?),
                        None => (part, 1),
                    };
                    plan.crashes.push(Crash { name: name.to_owned(), nth, action });
                }
            }
            for part in fault.into_iter().flat_map(|t| t.split(',')).filter(|p| !p.is_empty()) {
                plan.faults.push(parse_fault(part).ok_or_else(|| part.to_owned())?);
            }
            Ok(plan)
        }
    }

    fn positive(text: &str) -> Option<u64> {
        text.parse().ok().filter(|&n| n > 0)
    }

    fn parse_errno(text: &str) -> Option<i32> {
        Some(match text {
            "EIO" => libc::EIO,
            "ENOSPC" => libc::ENOSPC,
            "EDQUOT" => libc::EDQUOT,
            "EFBIG" => libc::EFBIG,
            "ENOMEM" => libc::ENOMEM,
            "EROFS" => libc::EROFS,
            number => number.parse().ok().filter(|&n| n > 0)?,
        })
    }

    /// `name:errno[:nth[+]]`, where the name has a colon of its own: read from the right.
    fn parse_fault(part: &str) -> Option<Fault> {
        let (rest, last) = part.rsplit_once(':')?;
        if let Some((name, errno)) = rest.rsplit_once(':')
            && let Some(errno) = parse_errno(errno)
        {
            let and_after = last.ends_with('+');
            let nth = positive(last.trim_end_matches('+'))?;
            return Some(Fault { name: name.to_owned(), errno, nth, and_after });
        }
        Some(Fault { name: rest.to_owned(), errno: parse_errno(last)?, nth: 1, and_after: false })
    }

    struct Counted {
        name: &'static str,
        passages: AtomicU64,
    }

    const TABLE_ENTRIES: usize = 1024;

    /// Counters by name: open addressing, entries are only ever added.
    struct Table([AtomicPtr<Counted>; TABLE_ENTRIES]);

    impl Table {
        const fn new() -> Self {
            Table([const { AtomicPtr::new(ptr::null_mut()) }; TABLE_ENTRIES])
        }

        /// Counts one passage and returns its number.
        fn pass(&self, name: &'static str) -> u64 {
            self.entry(name).passages.fetch_add(1, Ordering::Relaxed) + 1
        }

        fn entry(&self, name: &'static str) -> &'static Counted {
            let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
            let mut fresh: *mut Counted = ptr::null_mut();
            for step in 0..TABLE_ENTRIES {
                let place = &self.0[(hash as usize).wrapping_add(step) % TABLE_ENTRIES];
                let mut found = place.load(Ordering::Acquire);
                if found.is_null() {
                    if fresh.is_null() {
                        fresh =
                            Box::into_raw(Box::new(Counted { name, passages: AtomicU64::new(0) }));
                    }
                    found = match place.compare_exchange(
                        ptr::null_mut(),
                        fresh,
                        Ordering::AcqRel,
                        Ordering::Acquire,
                    ) {
                        Ok(_) => fresh,
                        Err(other) => other,
                    };
                }
                // SAFETY: entries are leaked boxes, never freed once published.
                let counted = unsafe { &*found };
                if counted.name == name {
                    if !fresh.is_null() && fresh != found {
                        // SAFETY: `fresh` was never published.
                        drop(unsafe { Box::from_raw(fresh) });
                    }
                    return counted;
                }
            }
            panic!("more than {TABLE_ENTRIES} names of crash points")
        }

        fn list(&self) -> Vec<(&'static str, u64)> {
            let mut list: Vec<_> = self
                .0
                .iter()
                .filter_map(|place| {
                    // SAFETY: as in `entry`.
                    unsafe { place.load(Ordering::Acquire).as_ref() }
                })
                .map(|counted| (counted.name, counted.passages.load(Ordering::Relaxed)))
                .filter(|&(_, passages)| passages > 0)
                .collect();
            list.sort_unstable();
            list
        }

        fn reset(&self) {
            for place in &self.0 {
                // SAFETY: as in `entry`.
                if let Some(counted) = unsafe { place.load(Ordering::Acquire).as_ref() } {
                    counted.passages.store(0, Ordering::Relaxed);
                }
            }
        }
    }

    static CRASH_POINTS: Table = Table::new();
    static FAULT_POINTS: Table = Table::new();
    static PLAN: AtomicPtr<Plan> = AtomicPtr::new(ptr::null_mut());
    static COUNTING: AtomicBool = AtomicBool::new(false);
    static ENVIRONMENT_READ: AtomicBool = AtomicBool::new(false);

    type Recorder = Box<dyn Fn(Event<'_>) + Send + Sync>;
    static RECORDER: AtomicPtr<Recorder> = AtomicPtr::new(ptr::null_mut());

    /// The plan in force; the environment is read at the first use.
    fn plan() -> Option<&'static Plan> {
        if !ENVIRONMENT_READ.load(Ordering::Acquire) {
            read_environment();
        }
        // SAFETY: plans are leaked boxes, never freed.
        unsafe { PLAN.load(Ordering::Acquire).as_ref() }
    }

    /// Several threads may do this at once: one's plan is taken, and all are equal.
    #[cold]
    fn read_environment() {
        let get = |name| std::env::var(name).ok();
        let (crash, stop, fault) = (get("NTDB_CRASH"), get("NTDB_STOP"), get("NTDB_FAULT"));
        if crash.is_some() || stop.is_some() || fault.is_some() {
            let plan = Plan::parse(crash.as_deref(), stop.as_deref(), fault.as_deref())
                .unwrap_or_else(|part| {
                    // A plan that is misread would let a test pass that tested nothing.
                    eprintln!("ntdb failpoints: cannot understand {part:?}");
                    std::process::abort()
                });
            let _ = PLAN.compare_exchange(
                ptr::null_mut(),
                Box::into_raw(Box::new(plan)),
                Ordering::AcqRel,
                Ordering::Acquire,
            );
        }
        ENVIRONMENT_READ.store(true, Ordering::Release);
    }

    /// Replaces the plan (the environment's, too) and counts passages from zero again.
    pub fn set_plan(new: Plan) {
        let _ = plan();
        CRASH_POINTS.reset();
        FAULT_POINTS.reset();
        PLAN.store(Box::into_raw(Box::new(new)), Ordering::Release);
    }

    /// Whether passages are counted also where no plan asks for it; sets the counts to zero.
    pub fn count_passages(yes: bool) {
        CRASH_POINTS.reset();
        FAULT_POINTS.reset();
        COUNTING.store(yes, Ordering::Relaxed);
    }

    /// The crash points passed and how often, sorted by name.
    pub fn hits() -> Vec<(&'static str, u64)> {
        CRASH_POINTS.list()
    }

    /// The fallible calls made and how often, sorted by name.
    pub fn fault_hits() -> Vec<(&'static str, u64)> {
        FAULT_POINTS.list()
    }

    /// A place between two steps. Dies or stops here if the plan says so.
    pub fn crash_point(name: &'static str) {
        let plan = plan();
        let planned = plan.is_some_and(|plan| plan.crashes.iter().any(|crash| crash.name == name));
        if !planned && !COUNTING.load(Ordering::Relaxed) {
            return;
        }
        let passage = CRASH_POINTS.pass(name);
        let hit = plan.and_then(|plan| {
            plan.crashes.iter().find(|crash| crash.name == name && crash.nth == passage)
        });
        match hit.map(|crash| crash.action) {
            Some(Action::Kill) => die(),
            // SAFETY: a signal to oneself.
            Some(Action::Stop) => unsafe {
                libc::kill(libc::getpid(), libc::SIGSTOP);
            },
            None => {}
        }
    }

    /// Ends the process as `kill -9` does.
    fn die() -> ! {
        // SAFETY: a signal to oneself; `_exit` runs no handlers either, and serves where the first
        // process of a pid namespace is immune to its own SIGKILL.
        unsafe {
            libc::kill(libc::getpid(), libc::SIGKILL);
            libc::_exit(137)
        }
    }

    /// The error that the plan wants the named call to return, if any.
    pub fn fault(name: &'static str) -> Option<io::Error> {
        let plan = plan();
        let planned = plan.is_some_and(|plan| plan.faults.iter().any(|fault| fault.name == name));
        if !planned && !COUNTING.load(Ordering::Relaxed) {
            return None;
        }
        let passage = FAULT_POINTS.pass(name);
        plan?
            .faults
            .iter()
            .find(|fault| {
                fault.name == name
                    && (fault.nth == passage || fault.and_after && fault.nth < passage)
            })
            .map(|fault| io::Error::from_raw_os_error(fault.errno))
    }

    /// Has `recorder` called for every [`Event`], on the thread that causes it. `None` ends it; a
    /// call already begun may still be running then.
    pub fn set_recorder(recorder: Option<Recorder>) {
        let new = recorder.map_or(ptr::null_mut(), |recorder| Box::into_raw(Box::new(recorder)));
        RECORDER.store(new, Ordering::Release);
    }

    /// Tells the recorder, if there is one.
    pub fn record(event: Event<'_>) {
        // SAFETY: recorders are leaked boxes, never freed.
        if let Some(recorder) = unsafe { RECORDER.load(Ordering::Acquire).as_ref() } {
            recorder(event);
        }
    }

    const UNREAD: u8 = 0;
    const REAL: u8 = 1;
    const PRETENDED: u8 = 2;
    static BOOT_STATE: AtomicU8 = AtomicU8::new(UNREAD);
    static BOOT_HIGH: AtomicU64 = AtomicU64::new(0);
    static BOOT_LOW: AtomicU64 = AtomicU64::new(0);

    /// Pretends that the machine was booted anew (`None`: tells the truth again).
    pub fn set_boot_id(id: Option<[u8; 16]>) {
        let bits = u128::from_be_bytes(id.unwrap_or_default());
        BOOT_HIGH.store((bits >> 64) as u64, Ordering::Relaxed);
        BOOT_LOW.store(bits as u64, Ordering::Relaxed);
        BOOT_STATE.store(if id.is_some() { PRETENDED } else { REAL }, Ordering::Release);
    }

    /// The boot id to pretend, if any.
    pub fn boot_id_override() -> Option<[u8; 16]> {
        if BOOT_STATE.load(Ordering::Acquire) == UNREAD {
            let id = std::env::var("NTDB_TEST_BOOT_ID").ok().map(|text| {
                crate::storage::filesystem::parse_uuid(&text).unwrap_or_else(|| {
                    eprintln!("ntdb failpoints: NTDB_TEST_BOOT_ID is not 32 hexadecimal digits");
                    std::process::abort()
                })
            });
            set_boot_id(id);
        }
        (BOOT_STATE.load(Ordering::Acquire) == PRETENDED).then(|| {
            let high = u128::from(BOOT_HIGH.load(Ordering::Relaxed));
            (high << 64 | u128::from(BOOT_LOW.load(Ordering::Relaxed))).to_be_bytes()
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::storage::testing::in_child;

        // The plan is process-wide and tests run as threads of one process: each of these works in
        // a forked child.
        fn ok_in_child(body: impl FnOnce()) {
            crate::storage::testing::assert_exit_ok(in_child(|| {
                body();
                0
            }));
        }

        #[test]
        fn texts_of_plans_are_understood() {
            let plan = Plan::parse(
                Some("note.armed:3,split"),
                Some("flush:2"),
                Some("fdatasync:data:5,allocate:data:ENOSPC:3+,write:log:EIO:2,plain:ENOMEM"),
            )
            .unwrap();
            let crash = |name: &str, nth, action| Crash { name: name.into(), nth, action };
            assert_eq!(
                plan.crashes,
                [
                    crash("note.armed", 3, Action::Kill),
                    crash("split", 1, Action::Kill),
                    crash("flush", 2, Action::Stop)
                ]
            );
            let fault = |name: &str, errno, nth, and_after| Fault {
                name: name.into(),
                errno,
                nth,
                and_after,
            };
            assert_eq!(
                plan.faults,
                [
                    fault("fdatasync:data", 5, 1, false),
                    fault("allocate:data", libc::ENOSPC, 3, true),
                    fault("write:log", libc::EIO, 2, false),
                    fault("plain", libc::ENOMEM, 1, false)
                ]
            );
        }

        #[test]
        fn nonsense_is_refused() {
            for text in ["a:x", "a:0", "a:"] {
                assert!(Plan::parse(Some(text), None, None).is_err(), "{text}");
            }
            for text in ["a", "a:b", "a:EIO:0", "a:EWHAT", "a:EIO:x"] {
                assert!(Plan::parse(None, None, Some(text)).is_err(), "{text}");
            }
        }

        #[test]
        fn dies_at_the_nth_passage() {
            let status = in_child(|| {
                set_plan(Plan::parse(Some("test.die:3"), None, None).unwrap());
                crash_point("test.die");
                crash_point("test.other");
                crash_point("test.die");
                if hits() != [("test.die", 2)] {
                    return 1;
                }
                crash_point("test.die");
                2
            });
            assert!(libc::WIFSIGNALED(status), "status {status:#x}");
            assert_eq!(libc::WTERMSIG(status), libc::SIGKILL);
        }

        #[test]
        fn stops_and_continues() {
            // SAFETY: the child only stops and exits.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0);
            if pid == 0 {
                set_plan(Plan::parse(None, Some("test.stop"), None).unwrap());
                crash_point("test.stop");
                // SAFETY: leaves at once.
                unsafe { libc::_exit(7) };
            }
            let mut status = 0;
            // SAFETY: waits for and wakes the child made above.
            unsafe {
                assert_eq!(libc::waitpid(pid, &mut status, libc::WUNTRACED), pid);
                assert!(libc::WIFSTOPPED(status));
                libc::kill(pid, libc::SIGCONT);
                assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
            }
            assert!(libc::WIFEXITED(status));
            assert_eq!(libc::WEXITSTATUS(status), 7);
        }

        #[test]
        fn faults_come_once_or_for_good() {
            ok_in_child(|| {
                set_plan(Plan::parse(None, None, Some("a:x:EIO:2,b:x:ENOSPC:2+")).unwrap());
                let errno = |name| fault(name).and_then(|error| error.raw_os_error());
                let of_a: Vec<_> = (0..4).map(|_| errno("a:x")).collect();
                assert_eq!(of_a, [None, Some(libc::EIO), None, None]);
                let of_b: Vec<_> = (0..4).map(|_| errno("b:x")).collect();
                let full = Some(libc::ENOSPC);
                assert_eq!(of_b, [None, full, full, full]);
                assert_eq!(errno("c:x"), None);
            });
        }

        #[test]
        fn counts_what_is_passed_from_many_threads() {
            ok_in_child(|| {
                count_passages(true);
                std::thread::scope(|scope| {
                    for _ in 0..4 {
                        scope.spawn(|| {
                            for _ in 0..1000 {
                                crash_point("test.a");
                                crash_point("test.b");
                            }
                        });
                    }
                });
                assert_eq!(hits(), [("test.a", 4000), ("test.b", 4000)]);
            });
        }

        #[test]
        fn pretended_boots() {
            ok_in_child(|| {
                let real = crate::storage::filesystem::boot_id().unwrap();
                set_boot_id(Some([7; 16]));
                assert_eq!(crate::storage::filesystem::boot_id().unwrap(), [7; 16]);
                set_boot_id(None);
                assert_eq!(crate::storage::filesystem::boot_id().unwrap(), real);
            });
        }
    }
}
