//! The fork scenes: a process that forks in some state, and a child that goes on.

use std::time::Duration;

use ntdb::{Db, Error};

use crate::args::Args;

/// Forks; the child runs `child` and ends with its result as status; returns the child's id.
fn fork_child(child: impl FnOnce() -> Result<(), String>) -> Result<i32, String> {
    // SAFETY: the child runs ordinary code of this program. With several threads that is sound
    // as far as the allocator's own fork handlers go, which glibc provides.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(format!("fork: {}", std::io::Error::last_os_error()));
    }
    if pid == 0 {
        // SAFETY: a plain system call: a hung child is to end with its parent, too.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let status = match child() {
            Ok(()) => 0,
            Err(e) => {
                eprintln!("VIOLATION in the forked child: {e}");
                super::STATUS_VIOLATION
            }
        };
        // SAFETY: ends the child at once, without the parent's exit handlers.
        unsafe { libc::_exit(status) };
    }
    Ok(pid)
}

fn reap(pid: i32) -> Result<(), String> {
    let mut status = 0;
    // SAFETY: waits for our own child; `status` is a valid place.
    let result = unsafe { libc::waitpid(pid, &mut status, 0) };
    if result != pid || status != 0 {
        return Err(format!("the child ended with wait status {status:#x}"));
    }
    Ok(())
}

/// Plays the scene that `args` name.
///
/// # Errors
/// The promise that was broken.
pub fn run(db: &Db, args: &Args) -> Result<String, String> {
    let text = |e: Error| e.to_string();
    match args.text("scene").unwrap_or("plain") {
        "plain" => {
            db.put(b"parent", b"before").map_err(text)?;
            let child = fork_child(|| work(db, "child", 200, Some(b"before")))?;
            work(db, "parent-beside", 200, None)?;
            reap(child)?;
            demand(db, "child", 200)?;
            demand(db, "parent-beside", 200)?;
        }
        "parent dies" => {
            db.put(b"parent", b"before").map_err(text)?;
            let parent = std::process::id();
            fork_child(|| {
                // SAFETY: plain system calls; the parent's end is not to end this child.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0) };
                let start = std::time::Instant::now();
                // SAFETY: a plain system call.
                while unsafe { libc::getppid() } as u32 == parent {
                    if start.elapsed() > Duration::from_secs(30) {
                        return Err("the parent did not die".into());
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                work(db, "orphan", 300, Some(b"before"))?;
                db.put(b"orphan-done", b"yes").map_err(text)
            })?;
            // SAFETY: ends this process at once, without destructors: as a crash would.
            unsafe { libc::_exit(0) };
        }
        "under a key lock" => {
            let guard = db.lock(b"locked").map_err(text)?;
            let child = fork_child(|| {
                // SAFETY: the child's own copy; it ends without running the parent's drop.
                drop(unsafe { std::ptr::read(&guard) });
                // The child's drop means nothing: the parent still holds the key.
                match db.try_lock(b"locked").map_err(text)? {
                    None => {
                        // Keys share locks by chance: a write of such a one waits for the parent.
                        let name = (0..100)
                            .map(|n| format!("child-{n}"))
                            .find(|name| all_are_free(db, name, 50))
                            .ok_or("no name has 50 keys that are free to write")?;
                        work(db, &name, 50, None)
                    }
                    Some(_) => Err("the child took the lock that its parent holds".into()),
                }
            })?;
            reap(child)?;
            if fork_child(|| match db.try_lock(b"locked").map_err(text)? {
                None => Ok(()),
                Some(_) => Err("the lock was lost by an earlier child's end".into()),
            })
            .and_then(reap)
            .is_err()
            {
                return Err("the parent's key lock did not hold".into());
            }
            drop(guard);
        }
        "in a view" => {
            db.put(b"viewed", &[5; 600]).map_err(text)?;
            let child = db
                .view(b"viewed", |value| {
                    let copy = value.to_vec();
                    fork_child(move || {
                        if copy != [5; 600] {
                            return Err("the view was torn".into());
                        }
                        work(db, "child", 500, None)
                    })
                })
                .map_err(text)?
                .ok_or("lost: the key to view")??;
            reap(child)?;
            work(db, "parent-after", 500, None)?;
        }
        "in an iteration" => {
            work(db, "many", 500, None)?;
            let mut iter = db.iter();
            for _ in 0..100 {
                iter.next().ok_or("the iteration ended early")?.map_err(text)?;
            }
            let child = fork_child(|| {
                work(db, "child", 100, None)?;
                let seen = db.iter().filter(Result::is_ok).count();
                if seen < 500 { Err(format!("a new iteration saw {seen} records")) } else { Ok(()) }
            })?;
            let rest = iter.filter(Result::is_ok).count();
            reap(child)?;
            if rest < 400 {
                return Err(format!("the parent's iteration saw only {rest} further records"));
            }
        }
        "with a snapshot" => {
            db.put(b"kept", b"then").map_err(text)?;
            let snapshot = db.snapshot().map_err(text)?;
            let iter = snapshot.iter();
            db.put(b"kept", b"now").map_err(text)?;
            let child = fork_child(|| {
                for error in [
                    snapshot.get(b"kept").err(),
                    snapshot.contains(b"kept").err(),
                    snapshot.for_each(|_, _| std::ops::ControlFlow::Continue(())).err(),
                    snapshot.iter().next().and_then(Result::err),
                ] {
                    if !matches!(error, Some(Error::Forked { .. })) {
                        return Err(format!("the child reads its parent's snapshot: {error:?}"));
                    }
                }
                // SAFETY: the child's own copies; it ends without running the parent's drop.
                drop(unsafe { (std::ptr::read(&snapshot), std::ptr::read(&iter)) });
                let own = db.snapshot().map_err(text)?;
                if own.get(b"kept").map_err(text)?.as_deref() != Some(b"now") {
                    return Err("the child's own snapshot is wrong".into());
                }
                let held = db.stat().map_err(text)?.snapshots;
                if held != 2 {
                    return Err(format!("{held} snapshots are held, not the parent's and its own"));
                }
                work(db, "child", 500, None)
            })?;
            work(db, "parent-beside", 500, None)?;
            reap(child)?;
            if snapshot.get(b"kept").map_err(text)?.as_deref() != Some(b"then") {
                return Err("the parent's snapshot was lost".into());
            }
            if iter.count() as u64 != snapshot.len() {
                return Err("the parent's iteration was lost".into());
            }
        }
        "beside writing threads" => beside_threads(db)?,
        "generations" => {
            let child = fork_child(|| {
                work(db, "child", 50, None)?;
                let grandchild = fork_child(|| {
                    work(db, "grandchild", 50, None)?;
                    demand(db, "child", 50)
                })?;
                work(db, "child-beside", 50, None)?;
                reap(grandchild)
            })?;
            reap(child)?;
            demand(db, "grandchild", 50)?;
            demand(db, "child-beside", 50)?;
        }
        "in a transaction" => {
            db.put(b"parent", b"before").map_err(text)?;
            let mut tx = db.begin().map_err(text)?;
            tx.put(b"parent", b"after").map_err(text)?;
            let parent = std::process::id();
            let (mut is_over, over) = std::io::pipe().map_err(|e| e.to_string())?;
            let mut over = Some(over);
            let child = fork_child(|| {
                over.take();
                in_a_child_of_a_transaction(db, &mut tx, parent)?;
                // From then on the parent's transaction is committed.
                let _ = std::io::Read::read(&mut is_over, &mut [0]);
                work(db, "child", 100, Some(b"after"))
            })?;
            std::thread::sleep(Duration::from_millis(300));
            if tx.get(b"parent").map_err(text)?.as_deref() != Some(b"after") {
                return Err("the parent's transaction has lost a change".into());
            }
            tx.commit().map_err(text)?;
            drop(over);
            reap(child)?;
            demand(db, "child", 100)?;
            work(db, "parent-after", 50, Some(b"after"))?;
        }
        "child killed" => {
            for _ in 0..20 {
                let child = fork_child(|| work(db, "victim", u64::MAX, None))?;
                std::thread::sleep(Duration::from_millis(5));
                // SAFETY: kills our own child, which has not been reaped.
                unsafe { libc::kill(child, libc::SIGKILL) };
                let _ = reap(child);
                work(db, "parent-after", 20, None)?;
            }
        }
        other => return Err(format!("{other}: no such scene")),
    }
    let report = db.check().map_err(text)?;
    if !report.is_clean() {
        return Err(format!("{report:?}"));
    }
    Ok("played".into())
}

/// What a child can do with a transaction of its parent, with the inherited handle, and anew.
fn in_a_child_of_a_transaction(
    db: &Db,
    tx: &mut ntdb::Transaction,
    parent: u32,
) -> Result<(), String> {
    let is_refused = |result: ntdb::Result<()>| matches!(result, Err(Error::Forked { .. }));
    if !is_refused(tx.put(b"parent", b"by the child"))
        || !is_refused(tx.get(b"parent").map(drop))
        || !is_refused(tx.savepoint().map(drop))
        || !is_refused(tx.prepare())
    {
        return Err("an inherited transaction was of use".into());
    }
    let anew = Db::open(db.path().expect("a file")).map_err(|e| format!("open anew: {e}"))?;
    for db in [db, &anew] {
        let held = db.get(b"parent").map_err(|e| format!("get: {e}"))?;
        if held.as_deref() != Some(b"before") {
            return Err(format!("beside the parent's transaction {held:?} is seen"));
        }
        if db.try_begin().map_err(|e| format!("try_begin: {e}"))?.is_some() {
            return Err("two transactions at a time".into());
        }
        let timed = db.with_lock_timeout(Some(Duration::from_millis(50)));
        match timed.put(b"child", b"x") {
            Err(Error::Locked { owner, .. }) if owner == parent => {}
            other => return Err(format!("beside the parent's transaction: {other:?}")),
        }
    }
    anew.close().map_err(|e| format!("close: {e}"))
}

/// Threads that write all the time while the process forks again and again.
fn beside_threads(db: &Db) -> Result<(), String> {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|t| {
                let stop = &stop;
                scope.spawn(move || {
                    let mut round = 0;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        work(db, &format!("thread-{t}-{}", round % 20), 50, None)?;
                        round += 1;
                    }
                    Ok::<(), String>(())
                })
            })
            .collect();
        let mut result = Ok(());
        for n in 0..50 {
            let name = format!("child-{n}");
            let forked = fork_child(|| work(db, &name, 20, None)).and_then(reap);
            result = forked.and_then(|()| demand(db, &name, 20));
            if result.is_err() {
                break;
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked".to_string())??;
        }
        result
    })
}

/// Whether nobody holds the locks of the `n` keys that [`work`] writes under `name`.
fn all_are_free(db: &Db, name: &str, n: u64) -> bool {
    (0..n).all(|i| matches!(db.try_lock(format!("{name}-{i}").as_bytes()), Ok(Some(_))))
}

/// Ordinary work under keys that begin with `name`.
fn work(db: &Db, name: &str, n: u64, parent_value: Option<&[u8]>) -> Result<(), String> {
    if let Some(expected) = parent_value {
        let held = db.get(b"parent").map_err(|e| format!("get: {e}"))?;
        if held.as_deref() != Some(expected) {
            return Err(format!("the parent's record reads {held:?}"));
        }
    }
    for i in 0..n {
        let key = format!("{name}-{}", i % 1_000);
        db.put(key.as_bytes(), &i.to_le_bytes()).map_err(|e| format!("put: {e}"))?;
        let held = db.get(key.as_bytes()).map_err(|e| format!("get: {e}"))?;
        if held.as_deref() != Some(&i.to_le_bytes()) {
            return Err(format!("{key} reads {held:?} after {i} was put"));
        }
    }
    Ok(())
}

/// Demands what [`work`] left.
fn demand(db: &Db, name: &str, n: u64) -> Result<(), String> {
    for i in 0..n {
        let key = format!("{name}-{i}");
        let held = db.get(key.as_bytes()).map_err(|e| format!("get: {e}"))?;
        if held.as_deref() != Some(&i.to_le_bytes()) {
            return Err(format!("{key} reads {held:?}"));
        }
    }
    Ok(())
}
