//! PostgreSQL, through its own pgbench: a cluster that lasts as long as a run, on a Unix socket.
//!
//! `shared_buffers` a gigabyte and the log's segments as many, so that no checkpoint is forced by its length; prepared statements.
//! Relaxed: `synchronous_commit` off.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ntdb_workload::latency::{Latencies, Percentiles};
use ntdb_workload::session::{Result, wrong};

use crate::TpcbArgs;
use crate::speed::bytes_in;
use crate::tpcb::Figures;

/// Where Debian has the programs.
const PROGRAMS: &str = "/usr/lib/postgresql/15/bin";

/// Runs pgbench in a cluster in `dir`, with this fillfactor.
pub fn run(args: &TpcbArgs, clients: u64, dir: &Path, fill_percent: u32) -> Result<Figures> {
    let cluster = Cluster::start(dir, args.relaxed)?;
    let (scale, fill) = (args.scale.to_string(), fill_percent.to_string());
    cluster.bench(&["-i", "-q", "-s", &scale, "-F", &fill])?;
    let clients = clients.to_string();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).to_string();
    let transactions = args.transactions.to_string();
    let text = cluster.bench(&[
        "-n",
        "-M",
        "prepared",
        "-c",
        &clients,
        "-j",
        &threads,
        "-t",
        &transactions,
        "-l",
    ])?;
    let tps =
        text.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
    let latency = cluster.latencies()?;
    Ok(Figures {
        version: format!("PostgreSQL 15, fillfactor {fill_percent}"),
        durability: if args.relaxed {
            "synchronous_commit off: survives the death of its processes"
        } else {
            "the log is synced, by one for several"
        }
        .into(),
        processes: true,
        tps: tps.ok_or_else(|| wrong(format!("pgbench told no tps: {text}")))?,
        latency: Some(latency),
        bytes: bytes_in(&cluster.data)?,
    })
}

struct Cluster {
    data: PathBuf,
    logs: PathBuf,
}

impl Cluster {
    fn start(dir: &Path, relaxed: bool) -> Result<Cluster> {
        let cluster = Cluster { data: dir.join("data"), logs: dir.join("logs") };
        if !Path::new(PROGRAMS).exists() {
            return Err(wrong(format!("{PROGRAMS} is not there: install postgresql-15")));
        }
        for path in [&cluster.data, &cluster.logs] {
            std::fs::create_dir(path)?;
        }
        if is_root() {
            let status = Command::new("chown").args(["-R", "postgres"]).arg(dir).status()?;
            if !status.success() {
                return Err(wrong("the folder could not be given to the user postgres"));
            }
        }
        let data = cluster.data.display().to_string();
        cluster.call("initdb", &["-D", &data, "--auth=trust", "-U", "postgres", "--no-sync"])?;
        let commit = if relaxed { "off" } else { "on" };
        let options = format!(
            "-k {data} -c listen_addresses= -c shared_buffers=1GB -c max_wal_size=4GB -c synchronous_commit={commit}"
        );
        cluster.call(
            "pg_ctl",
            &["-D", &data, "-w", "-l", &format!("{data}/log"), "-o", &options, "start"],
        )?;
        cluster.call("createdb", &["-h", &data, "-U", "postgres", "bench"])?;
        Ok(cluster)
    }

    fn bench(&self, args: &[&str]) -> Result<String> {
        let socket = self.data.display().to_string();
        self.call("pgbench", &[&["-h", &socket, "-U", "postgres"], args, &["bench"]].concat())
    }

    /// Runs a program as somebody who is not root, in the folder of logs.
    fn call(&self, program: &str, args: &[&str]) -> Result<String> {
        let path = format!("{PROGRAMS}/{program}");
        let mut command = if is_root() {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(path);
            command
        } else {
            Command::new(path)
        };
        let output = command.args(args).current_dir(&self.logs).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(wrong(format!("{program}: {}", text.trim())));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What pgbench has logged of each transaction: the third word is microseconds.
    fn latencies(&self) -> Result<Percentiles> {
        let mut latencies = Latencies::default();
        for entry in std::fs::read_dir(&self.logs)? {
            let text = std::fs::read_to_string(entry?.path())?;
            for us in text.lines().filter_map(|line| line.split(' ').nth(2)?.parse().ok()) {
                latencies.record(std::time::Duration::from_micros(us));
            }
        }
        Ok(latencies.percentiles())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let data = self.data.display().to_string();
        if let Err(error) = self.call("pg_ctl", &["-D", &data, "-m", "immediate", "stop"]) {
            eprintln!("compare: {error}");
        }
    }
}

fn is_root() -> bool {
    // SAFETY: has no precondition.
    unsafe { libc::geteuid() == 0 }
}
