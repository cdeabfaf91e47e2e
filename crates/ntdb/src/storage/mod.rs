//! The lowest layer: the operating system, and nothing of the database.
//!
//! Everything that is a system call happens here, so that the layers above can be read, and
//! modelled, without one. Nothing here knows what the bytes mean.
//!
//! | module | what it wraps |
//! | --- | --- |
//! | [`mod@file`] | descriptors: open safely, grow without signals, sync, directories |
//! | [`mapping`] | one range of addresses that never moves |
//! | [`membarrier`] | a fence in all other processes |
//! | [`ofd`] | byte-range locks that die with their process: liveness |
//! | [`inherited`] | which of their descriptors a forked child closes |
//! | [`futex`] | sleeping on a word of shared memory |
//! | [`fork`] | knowing, with one load, that one is a forked child |
//! | [`fork_local`] | a mutex that a forked child finds free |
//! | [`filesystem`] | what kind of disk, which boot, random numbers |
//! | [`failpoint`] | named places to die or to fail at, for tests; nothing in a normal build |
//!
//! Errors are [`std::io::Error`]; the callers know the path and the purpose, and add them.

pub mod failpoint;
pub mod file;
pub mod filesystem;
pub mod fork;
pub mod fork_local;
pub mod futex;
pub mod inherited;
pub mod mapping;
pub mod membarrier;
pub mod ofd;

#[cfg(test)]
pub(crate) mod testing {
    //! Running a piece of a test in a forked child.

    /// Forks, runs `body` in the child and returns the wait status. The child never returns into
    /// the test harness; it exits with what `body` says, or 101 if `body` panics.
    pub fn in_child(body: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child runs `body` and then `_exit`s; glibc makes malloc usable there.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
        if pid == 0 {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or_else(
                |payload| {
                    // The harness captures what the panic printed, and the capture dies with the
                    // child.
                    let text = payload
                        .downcast_ref::<String>()
                        .map(String::as_str)
                        .or_else(|| payload.downcast_ref::<&str>().copied())
                        .unwrap_or("?");
                    let text = format!("panic in the forked child: {text}\n");
                    // SAFETY: a valid buffer of that length.
                    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
                    101
                },
            );
            // SAFETY: leaves at once, without the parent's exit handlers.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        let got = unsafe { libc::waitpid(pid, &mut status, 0) };
        assert_eq!(got, pid);
        status
    }

    /// Demands that the child ended by itself with status 0.
    pub fn assert_exit_ok(status: i32) {
        assert!(libc::WIFEXITED(status), "killed by signal {}", libc::WTERMSIG(status));
        assert_eq!(libc::WEXITSTATUS(status), 0, "exit status of the child");
    }
}
