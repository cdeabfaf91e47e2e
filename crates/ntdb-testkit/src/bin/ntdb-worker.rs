//! One process of a test; see `ntdb_testkit::worker`.

use ntdb_testkit::args::Args;
use ntdb_testkit::worker;

fn main() {
    // SAFETY: asks the kernel to end this process with its parent; no memory is involved.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(usage) => {
            eprintln!("{usage}");
            std::process::exit(2);
        }
    };
    match worker::run(&args) {
        Ok(report) => println!("{report}"),
        Err(violation) => {
            eprintln!("VIOLATION in {} (process {}): {violation}", args.role, std::process::id());
            std::process::exit(worker::STATUS_VIOLATION);
        }
    }
}
