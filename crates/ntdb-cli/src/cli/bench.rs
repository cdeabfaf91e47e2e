//! The command line of `ntdb bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use ntdb_workload::mixed::Mix;

use super::{CreateOptions, parse_number};

/// Arguments of `bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// Which benchmark.
    #[command(subcommand)]
    pub benchmark: Benchmark,
}

/// The benchmarks.
#[derive(Subcommand, Debug)]
pub enum Benchmark {
    /// Time eight kinds of operations on a new database
    #[command(long_about = "\
Time eight kinds of operations on a new database, one thread of one process, and print for each the
nanoseconds per operation and the size of the data file afterwards.

  Adding      inserts keys 0 to N-1
  Finding     copies the value of each key, in the order of insertion
  Missing     looks up N keys that are never there
  Traversing  visits all records once
  Deleting    deletes all: keys of index (j + 100003) mod N, for j from 0
  Re-adding   inserts all again
  Appending   adds as many bytes as a value has to each value
  Churning    deletes the key of index i = (j + 1000019) mod N and inserts i + N, for each j;
              such a pair counts as one operation

A key is its index, 4 bytes little-endian (--keys random: scrambled, one to one). Every answer is
counted, and a wrong count ends the benchmark with status 3. What is timed is the loop, and for the
phases that change something the sync to disk behind it, unless --no-sync. Opening and closing are
not timed.

With --transaction each phase is one transaction: timed are its beginning, the loop, and the commit,
but not the sync that follows (with --durable the commit waits for the disk, and that is timed).")]
    #[command(after_help = "\
Examples:
  ntdb bench speed
  ntdb bench speed 1000000 --no-sync
  ntdb bench speed 100000 --transaction
  ntdb bench speed 100000 --keys random --value-size 100 --json
  ntdb bench speed 100000 --internal")]
    Speed(SpeedArgs),
    /// Time transactions that let records grow by appends
    #[command(long_about = "\
Time transactions that let records grow by appends, as a directory of users and groups does, on a
new database. Prints the time of each transaction, with its commit to disk, and of the check behind
it, and in the end the sums, the program's memory (its own; and the most that it had with the mapped
pages of the file), and the size of the file, before and after it is closed.

  first transaction  inserts USERS records (48-byte keys, 64-byte values) and appends 51 bytes to
                     one index record for each
  GROUPS others      insert a group record (48-byte key, 32-byte value), and append 32 bytes to every
                     user and, for every user, to the group")]
    #[command(after_help = "\
Examples:
  ntdb bench grow 250000 10
  ntdb bench grow 10000 3 --file grown.ntdb --json")]
    Grow(GrowArgs),
    /// Time bank transactions of many clients, as pgbench does, and add everything up
    #[command(long_about = "\
Time bank transactions of many clients on a new database. There are 100,000 accounts, 10 tellers and a
branch for each unit of scale, in rows of 100 bytes. A transaction takes one of each at random, adds a
random sum to the three balances, reads the account back, and inserts a row of history. After each run
the sums over accounts, tellers, branches and history are compared, and the history has one row for each
transaction.

Prints transactions per second (the median, and from the least to the greatest of the runs), percentiles
of the time that a transaction took, how many pages each dirtied, bytes that checkpoints had to write,
and which ways the updates went. With --grow each update makes a row some bytes longer, and at ten times
its first length short again: what a reserve is for.")]
    #[command(after_help = "\
Examples:
  ntdb bench tpcb
  ntdb bench tpcb --clients 4 --relaxed --transactions 20000
  ntdb bench tpcb --threads --reserve 20 --grow 10 --json")]
    Tpcb(TpcbArgs),
    /// Time the six mixes of YCSB
    #[command(long_about = "\
Time the six mixes of reads and writes of YCSB, each on a new database, with keys of zipfian popularity:

  A  50 % reads, 50 % updates                B  95 % reads, 5 % updates
  C  reads                                   D  95 % reads of what was inserted last, 5 % inserts
  E  95 % scans of up to 100, 5 % inserts    F  50 % reads, 50 % read and update in a transaction

A scan goes on in the order of the hash, for there is no other. Without --durable nothing waits for the
disk. Every value that is read is compared with its key, and all are in the end.")]
    #[command(after_help = "\
Examples:
  ntdb bench mixed
  ntdb bench mixed --workload a --clients 8 --records 1000000
  ntdb bench mixed --durable --operations 1000 --json")]
    Mixed(MixedArgs),
    /// Time pairs of mapped identities, stored and fetched for a set time
    #[command(long_about = "\
Store pairs of a user number and a security identifier, two records each that name each other, one after
the other for a set time, beginning again after 100,000; then fetch as long, both ways, at random, and
compare each. One process, one thread. Prints operations (records) per second.")]
    #[command(after_help = "\
Examples:
  ntdb bench dbspeed
  ntdb bench dbspeed --seconds 10 --json")]
    Dbspeed(DbspeedArgs),
    /// Time more and more processes that read, write, or both
    #[command(long_about = "\
Let 1, 2, 4 ... processes work for a set time on records of 8 bytes, at random: only readers; readers
beside one writer that is not counted; clients that do one update for each read; only writers. Nothing
waits for the disk. Prints millions of operations a second, of all together.")]
    #[command(after_help = "\
Examples:
  ntdb bench scale
  ntdb bench scale --clients 4 --records 1000000 --seconds 2 --json")]
    Scale(ScaleArgs),
}

/// What all benchmarks with clients are told.
#[derive(Args, Debug)]
pub struct MeasureArgs {
    /// Use this new file and leave it there; without, a temporary file in $TMPDIR
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Measure so many times; the median counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = |text: &str| parse_number(text, 1, 1_000))]
    pub runs: u32,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// Properties of the new database.
    #[command(flatten)]
    pub new: CreateOptions,
}

/// How many clients, and of what kind.
#[derive(Args, Debug)]
pub struct ClientArgs {
    /// How many clients
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = |text: &str| parse_number(text, 1, 1_000))]
    pub clients: u32,
    /// Clients are processes (the default)
    #[arg(long, conflicts_with = "threads")]
    pub processes: bool,
    /// Clients are threads of one process
    #[arg(long)]
    pub threads: bool,
}

impl ClientArgs {
    /// Of what kind.
    pub fn layout(&self) -> Layout {
        if self.threads { Layout::Threads } else { Layout::Processes }
    }

    /// Whether they are processes.
    pub fn are_processes(&self) -> bool {
        self.layout() == Layout::Processes
    }
}

/// What a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// A process.
    Processes,
    /// A thread of this process.
    Threads,
}

/// Arguments of `bench tpcb`.
#[derive(Args, Debug)]
pub struct TpcbArgs {
    /// Clients.
    #[command(flatten)]
    pub clients: ClientArgs,
    /// Transactions that each client makes
    #[arg(long, value_name = "N", default_value_t = 1000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub transactions: u64,
    /// Units of scale: 100,000 accounts, 10 tellers and 1 branch each
    #[arg(long, value_name = "N", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub scale: u64,
    /// Transactions need not be on disk (they are, without this, before the next begins)
    #[arg(long, conflicts_with = "durable")]
    pub relaxed: bool,
    /// Bytes by which each update makes a row longer
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    #[arg(value_parser = |text: &str| parse_number(text, 0, 900).map(|n| n as usize))]
    pub grow: usize,
    /// What all chance follows from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// What is common to benchmarks.
    #[command(flatten)]
    pub measure: MeasureArgs,
}

/// A mix of YCSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MixName {
    /// Half reads, half updates.
    A,
    /// 95 % reads, 5 % updates.
    B,
    /// Reads.
    C,
    /// 95 % reads of the latest, 5 % inserts.
    D,
    /// 95 % scans, 5 % inserts.
    E,
    /// Half reads, half reads with an update, in a transaction.
    F,
}

impl From<MixName> for Mix {
    fn from(name: MixName) -> Mix {
        match name {
            MixName::A => Mix::A,
            MixName::B => Mix::B,
            MixName::C => Mix::C,
            MixName::D => Mix::D,
            MixName::E => Mix::E,
            MixName::F => Mix::F,
        }
    }
}

/// Arguments of `bench mixed`.
#[derive(Args, Debug)]
pub struct MixedArgs {
    /// Which mix; without, all six
    #[arg(long, value_enum, value_name = "A-F", ignore_case = true)]
    pub workload: Option<MixName>,
    /// Clients.
    #[command(flatten)]
    pub clients: ClientArgs,
    /// Records at the start
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub records: u64,
    /// Length of a value
    #[arg(long, value_name = "BYTES", default_value_t = 100)]
    #[arg(value_parser = |text: &str| parse_number(text, 16, 1 << 30).map(|n| n as usize))]
    pub value_size: usize,
    /// Operations that each client does
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub operations: u64,
    /// What all chance follows from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// What is common to benchmarks.
    #[command(flatten)]
    pub measure: MeasureArgs,
}

/// Arguments of `bench dbspeed`.
#[derive(Args, Debug)]
pub struct DbspeedArgs {
    /// How long to store, and to fetch
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = parse_some_seconds)]
    pub seconds: f64,
    /// What all chance follows from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// What is common to benchmarks.
    #[command(flatten)]
    pub measure: MeasureArgs,
}

/// Arguments of `bench scale`.
#[derive(Args, Debug)]
pub struct ScaleArgs {
    /// Clients.
    #[command(flatten)]
    pub clients: ClientArgs,
    /// Records
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub records: u64,
    /// How long each measurement takes
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_some_seconds)]
    pub seconds: f64,
    /// What all chance follows from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// What is common to benchmarks.
    #[command(flatten)]
    pub measure: MeasureArgs,
}

/// What a client process of a benchmark is told; the rest comes by its standard input.
#[derive(Args, Debug)]
pub struct BenchWorkerArgs {
    /// The database
    pub file: PathBuf,
}

/// A time that is not nothing.
fn parse_some_seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("not a number of seconds from 0.001 to 86400".to_string()),
    }
}

/// Arguments of `bench grow`.
#[derive(Args, Debug)]
pub struct GrowArgs {
    /// How many users
    #[arg(value_parser = |text: &str| parse_number(text, 1, 1_000_000_000))]
    pub users: u32,
    /// How many groups
    #[arg(value_parser = |text: &str| parse_number(text, 0, 1_000_000))]
    pub groups: u32,
    /// Use this new file and leave it there; without, a temporary file in $TMPDIR
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// Properties of the new database.
    #[command(flatten)]
    pub new: CreateOptions,
}

/// Arguments of `bench speed`.
#[derive(Args, Debug)]
pub struct SpeedArgs {
    /// How many records
    #[arg(value_name = "N", default_value_t = 1000)]
    #[arg(value_parser = |text: &str| parse_number(text, 1, 1_000_000_000))]
    pub records: u32,
    /// Use this new file and leave it there; without, a temporary file in $TMPDIR
    #[arg(long, value_name = "PATH", conflicts_with = "internal")]
    pub file: Option<PathBuf>,
    /// Use a database in memory
    #[arg(long)]
    pub internal: bool,
    /// Leave out the sync to disk at the end of each phase
    #[arg(long)]
    pub no_sync: bool,
    /// Make each phase one transaction
    #[arg(long)]
    pub transaction: bool,
    /// Which keys: the index itself, or scrambled
    #[arg(long, value_enum, default_value_t = KeyOrder::Seq)]
    pub keys: KeyOrder,
    /// Length of a value
    #[arg(long, value_name = "BYTES", default_value_t = 4)]
    pub value_size: usize,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// Properties of the new database.
    #[command(flatten)]
    pub new: CreateOptions,
}

/// The keys of `bench speed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KeyOrder {
    /// The index.
    Seq,
    /// A one-to-one scramble of the index.
    Random,
}
