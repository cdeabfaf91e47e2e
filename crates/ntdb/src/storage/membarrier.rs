//! A memory barrier on all running threads of all processes that have registered for it (`membarrier(2)`,
//! `GLOBAL_EXPEDITED`, Linux 4.16).
//!
//! It turns a pair of fences into one: the side that runs often needs none, the side that runs rarely makes a system call
//! that amounts to a fence in each of the others.

const CMD_GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const CMD_REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

fn call(command: libc::c_int) -> bool {
    // SAFETY: three numbers, no memory.
    unsafe {
        libc::syscall(libc::SYS_membarrier, command, 0 as libc::c_uint, 0 as libc::c_int) == 0
    }
}

/// Registers this process; `false` if the kernel does not have it, or forbids it. A forked child registers again.
pub fn register() -> bool {
    call(CMD_REGISTER_GLOBAL_EXPEDITED)
}

/// Passes a full barrier in every running thread of every registered process, and here. `false` if it could not be had.
pub fn barrier() -> bool {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    call(CMD_GLOBAL_EXPEDITED)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_registered_process_gets_barriers() {
        if super::register() {
            assert!(super::barrier());
        }
    }
}
