//! The command line: what can be asked for, and the help that explains it.

mod bench;

pub use self::bench::*;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand};

const STATUSES: &str = "\
Exit status:
  0  done, found
  1  the key is not found, or already there (insert); the database is already there (create,
     bench --file); something is lost (recover); --timeout is over (watch)
  2  wrong usage
  3  other errors: no such database, malformed input, input or output failed
  4  the database is damaged, or the file is not one
  5  a lock was not free within --lock-timeout; the database is in use (recover)
  6  no room: disk full, quota, file-size limit
  7  permission denied

Data go to standard output, messages to standard error.";

const EXAMPLES: &str = "\
Examples:
  ntdb create colours.ntdb
  ntdb put colours.ntdb sky blue
  ntdb get colours.ntdb sky
  ntdb dump colours.ntdb | ntdb load --create copy.ntdb
  ntdb check colours.ntdb";

/// One file of keys and values that many processes read and write at the same time.
///
/// No server, no setting to guess, safe from crashes. Every command may run while other processes
/// use the same database.
#[derive(Parser, Debug)]
#[command(name = "ntdb", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{STATUSES}"))]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: GlobalOptions,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options that every command takes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Options of every command")]
pub struct GlobalOptions {
    /// Wait until what was written is on disk, also safe from a power cut
    #[arg(long, global = true)]
    pub durable: bool,
    /// Give up (status 5) if a lock is not free for so long; without it, wait
    #[arg(long, global = true, value_name = "SECONDS", value_parser = parse_seconds)]
    #[arg(allow_negative_numbers = true)]
    pub lock_timeout: Option<Duration>,
    /// Print no progress, no counts, and no message where status 1 says it all
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Directory of the shared-memory companion file, if this is the first process to open the database
    #[arg(long, global = true, value_name = "DIR", hide_short_help = true)]
    pub shm_dir: Option<PathBuf>,
    /// Open although the shared memory that killed users left is lost, without what only it had
    #[arg(long, global = true, hide_short_help = true)]
    pub give_up_unsynced: bool,
    /// Addresses to reserve for the mapping (512M, 64G), where `ulimit -v` is tight
    #[arg(long, global = true, value_name = "BYTES", value_parser = parse_bytes)]
    #[arg(hide_short_help = true)]
    pub address_space: Option<u64>,
    /// Open on a network file system too; only one host may then use the database
    #[arg(long, global = true, hide_short_help = true)]
    pub allow_unsuitable_file_system: bool,
}

/// The subcommands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Make a new, empty database
    #[command(after_help = "\
Examples:
  ntdb create users.ntdb
  ntdb create users.ntdb --mode 600 --page-size 8192 --reserve 20")]
    Create(CreateArgs),
    /// Print the value of a key
    #[command(after_help = "\
Examples:
  ntdb get users.ntdb alice
  ntdb get users.ntdb picture --raw > picture.png
  ntdb get users.ntdb 00ff --hex
  ntdb get users.ntdb alice --json        {\"key\":\"alice\",\"value\":\"1000\"}")]
    Get(GetArgs),
    /// Store a value, whether the key is there or not
    #[command(override_usage = "ntdb put [OPTIONS] <FILE> <KEY> <VALUE|--file <PATH>>")]
    #[command(after_help = "\
Examples:
  ntdb put users.ntdb alice 1000
  ntdb put users.ntdb picture --file picture.png
  date | ntdb put users.ntdb now -
  ntdb put users.ntdb 00ff cafe --hex
  ntdb put users.ntdb offset -5
  ntdb put users.ntdb -- --hex value      (behind -- even what is an option is a key or a value)")]
    Put(StoreArgs),
    /// Store a value if the key is absent (status 1 if it is there)
    #[command(override_usage = "ntdb insert [OPTIONS] <FILE> <KEY> <VALUE|--file <PATH>>")]
    #[command(after_help = "\
Examples:
  ntdb insert users.ntdb alice 1000 || echo 'taken'")]
    Insert(StoreArgs),
    /// Add bytes to the end of a value; an absent key counts as empty
    #[command(override_usage = "ntdb append [OPTIONS] <FILE> <KEY> <VALUE|--file <PATH>>")]
    #[command(after_help = "\
Examples:
  printf 'one more line\\n' | ntdb append log.ntdb 2024-05-01 -
  journalctl -b | ntdb append log.ntdb boot -")]
    Append(StoreArgs),
    /// Delete keys (status 1 if one was not there)
    #[command(after_help = "\
Examples:
  ntdb delete users.ntdb alice
  ntdb delete users.ntdb alice bob carol")]
    Delete(DeleteArgs),
    /// Ask whether a key is there: status 0 or 1, no output
    #[command(after_help = "\
Examples:
  if ntdb exists users.ntdb alice; then echo known; fi
  ntdb exists users.ntdb alice --json     {\"key\":\"alice\",\"exists\":true}")]
    Exists(ExistsArgs),
    /// Print all keys, in the order of their hashes
    #[command(after_help = "\
Keys are printed with the escapes of `dump` (\\t \\n \\r \\\\ \\xHH), one a line; with --hex in
hexadecimal, with --json as a JSON string or {\"base64\": \"...\"} a line, with --null as they are,
each followed by a NUL byte.

Examples:
  ntdb list users.ntdb | sort
  ntdb list users.ntdb --prefix al
  ntdb list users.ntdb --null | xargs -0 -r -n 100 ntdb delete users.ntdb --")]
    List(ListArgs),
    /// Store the records of a text
    #[command(after_help = "\
Formats (the same as of `dump`):
  default       KEY TAB VALUE a line, with the escapes \\t \\n \\r \\\\ \\xHH
  --json-lines  {\"key\": K, \"value\": V} a line; K and V are strings or {\"base64\": \"...\"}
  --tdb         the text that `tdbdump` prints and `tdbrestore` reads

A record of the input replaces what is stored under its key; of two records with the same key the
later one stays, with any number of processes. With --durable all is synced to disk once, at the end.
A malformed line ends the load with status 3 and is named; what was before it is stored.

Examples:
  ntdb load --create users.ntdb users.txt
  ntdb load users.ntdb < users.txt
  tdbdump old.tdb | ntdb load --create --tdb new.ntdb
  ntdb load --create unicode.ntdb UnicodeData.txt --separator ';' --no-escapes --processes 4")]
    Load(LoadArgs),
    /// One worker process of `load --processes`
    #[command(hide = true)]
    LoadWorker(LoadWorkerArgs),
    /// Print all records as text that `load` reads back, byte for byte
    #[command(after_help = "\
`ntdb load --help` describes the formats. The order is that of the hashes. Damage ends the dump with
status 4; what was before it has been printed.

Examples:
  ntdb dump users.ntdb > users.txt
  ntdb dump users.ntdb --json-lines | jq -r .key
  ntdb dump users.ntdb --tdb | tdbrestore users.tdb
  ntdb dump old.ntdb | ntdb load --create new.ntdb")]
    Dump(DumpArgs),
    /// Print facts about a database: size, records, who uses it
    #[command(after_help = "\
Examples:
  ntdb stat users.ntdb
  ntdb stat users.ntdb --json | jq .records")]
    Stat(InspectArgs),
    /// Verify everything, checksums included (status 4 if something is wrong)
    #[command(after_help = "\
Examples:
  ntdb check users.ntdb && echo sound
  ntdb check users.ntdb --json | jq -r '.problems[]'")]
    Check(InspectArgs),
    /// Copy a database while it is in use into a new, compact one
    #[command(after_help = "\
The copy is what the database was at one moment. It is complete, on disk and verified before it
appears under its name, whatever happens. DST must not exist, unless --force is given and nobody uses
it. Ended by a signal, the command leaves nothing; killed, a file DST-partial-..., which the next
backup to DST removes.

Examples:
  ntdb backup users.ntdb /backup/users.ntdb
  ntdb backup users.ntdb /backup/users.ntdb --force --json | jq .records")]
    Backup(BackupArgs),
    /// Make the file small while it is in use
    #[command(after_help = "\
Pages that are nearly empty are joined, what lies at the end moves to the front, and the file is cut.
Others may read and write meanwhile. The last user to close a database does much of that anyhow.

Examples:
  ntdb compact users.ntdb
  ntdb compact users.ntdb --json | jq .bytes_after")]
    Compact(CompactArgs),
    /// Change the reserve, or how much past log is kept, of a database that is there
    #[command(long_about = "\
Change the reserve, or how much past log is kept, of a database that is there, while others use it. It
is on disk when the command ends. The reserve is what inserts from then on leave of each page for later
updates; pages that are fuller stay so until something happens to them.")]
    #[command(after_help = "\
Examples:
  ntdb set users.ntdb --reserve 20
  ntdb set users.ntdb --keep-log 64M")]
    Set(SetArgs),
    /// Copy what can still be read of a damaged database into a new one (status 1 if something is lost)
    #[command(after_help = "\
Examples:
  ntdb recover users.ntdb rescued.ntdb && mv rescued.ntdb users.ntdb
  ntdb recover users.ntdb rescued.ntdb --json | jq -r '.problems[]'")]
    Recover(RecoverArgs),
    /// Let several processes loose on one file, and prove that nothing breaks
    #[command(long_about = "\
Let several processes loose on one file, and prove that nothing breaks. Each of them stores, appends,
deletes, reads, traverses and takes key locks at random, on keys of its own and on common ones;
with --transactions also in transactions, with savepoints, that are committed, durably or not, made
ready before, or aborted. Every value proves itself by a checksum and a counter, and each process
announces outside the database what it begins and what was acknowledged to it, so that a lost, torn,
doubled, resurrected or invented value is noticed, and half a transaction as well. With --kill
processes are killed (SIGKILL) at random moments, now and then all at once, and replaced. In the end
everything is compared, and checked as `ntdb check` does.

Prints OK, with status 0; or what broke, with status 3 (4 if `check` found it), and where the file is.
The same seed makes every process do the same operations; in which order they mix, and where a kill
comes, is left to chance.")]
    #[command(after_help = "\
Examples:
  ntdb torture
  ntdb torture --processes 8 --loops 100000 --kill --transactions
  ntdb torture --seed 7 --transactions --file broken.ntdb --json")]
    Torture(TortureArgs),
    /// What a process of `torture` does
    #[command(hide = true)]
    TortureWorker(TortureWorkerArgs),
    /// Print changes as they happen, by whatever process
    #[command(after_help = "\
A line for each operation: POSITION, what was done (put, delete, append, clear), key and value (or what
was added), with TABs between them and the escapes of `dump`. The operations of a transaction stand
between the lines `begin` and `commit`. With --json, an object a line for each change:
{\"sequence\": N, \"next\": POSITION, \"transaction\": true or false, \"operations\": [...]}.

--from POSITION goes on behind the change that was printed with it, also after the database was
closed, if so much of the log is kept (`ntdb create --keep-log`). A plain number is a change counter
as `stat` prints it; 0 is the beginning.

Ends with status 0 after --count changes or, without --count, when --timeout is over; with status 1
if that is over before; and by the signals that end programs.

Examples:
  ntdb watch users.ntdb
  ntdb watch users.ntdb alice --count 1 --timeout 60
  ntdb watch users.ntdb --prefix job: --json | jq -c '.operations[]'
  ntdb watch users.ntdb --from 0 --timeout 0")]
    Watch(WatchArgs),
    /// Measure speed
    Bench(BenchArgs),
    /// What a client of `bench` does
    #[command(hide = true)]
    BenchWorker(BenchWorkerArgs),
}

/// Arguments of `create`.
#[derive(Args, Debug)]
pub struct CreateArgs {
    /// The database
    pub file: PathBuf,
    /// Properties of the new database.
    #[command(flatten)]
    pub new: CreateOptions,
}

/// Properties of a new database.
#[derive(Args, Clone, Debug, Default)]
pub struct CreateOptions {
    /// Page size: a power of two from 4096 to 65536 (4K to 64K)
    #[arg(long, value_name = "BYTES", value_parser = parse_page_size)]
    pub page_size: Option<u32>,
    /// Percent of each page (0 to 90) to leave free for later updates
    #[arg(long, value_name = "PERCENT", value_parser = parse_reserve)]
    pub reserve: Option<u8>,
    /// Keep so much past log (64M), so that `watch` can go back in time
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub keep_log: Option<u64>,
    /// Permission bits of the file, in octal; the umask applies [default: 644]
    #[arg(long, value_name = "OCTAL", value_parser = parse_mode)]
    pub mode: Option<u32>,
}

/// Opening for reading only.
#[derive(Args, Clone, Debug)]
pub struct ReadOptions {
    /// Open read-only, even where writing is allowed
    #[arg(long)]
    pub read_only: bool,
}

/// Arguments of `get`.
#[derive(Args, Debug)]
pub struct GetArgs {
    /// The database
    pub file: PathBuf,
    /// The key, as it stands
    #[arg(allow_hyphen_values = true)]
    pub key: OsString,
    /// The key is given, and the value printed, in hexadecimal
    #[arg(long)]
    pub hex: bool,
    /// Print the value alone, without a newline behind it
    #[arg(long, conflicts_with = "json")]
    pub raw: bool,
    /// Print {"key": ..., "value": ...}; the value is null if the key is absent
    #[arg(long, conflicts_with = "hex")]
    pub json: bool,
    /// How to open.
    #[command(flatten)]
    pub read: ReadOptions,
}

/// Arguments of `put`, `insert` and `append`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("source").required(true).args(["value", "from_file"]))]
pub struct StoreArgs {
    /// The database
    pub file: PathBuf,
    /// The key, as it stands
    #[arg(allow_hyphen_values = true)]
    pub key: OsString,
    /// The value, as it stands; `-` reads it from standard input
    #[arg(allow_hyphen_values = true)]
    pub value: Option<OsString>,
    /// Read the value from this file
    #[arg(long = "file", value_name = "PATH", id = "from_file")]
    pub from_file: Option<PathBuf>,
    /// The key and the VALUE argument are in hexadecimal
    #[arg(long)]
    pub hex: bool,
    /// Make the database if it is absent
    #[arg(long)]
    pub create: bool,
}

/// Arguments of `delete`.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    /// The database
    pub file: PathBuf,
    /// The keys, as they stand
    #[arg(required = true, value_name = "KEY", allow_negative_numbers = true)]
    pub keys: Vec<OsString>,
    /// The keys are in hexadecimal
    #[arg(long)]
    pub hex: bool,
}

/// Arguments of `exists`.
#[derive(Args, Debug)]
pub struct ExistsArgs {
    /// The database
    pub file: PathBuf,
    /// The key, as it stands
    #[arg(allow_hyphen_values = true)]
    pub key: OsString,
    /// The key is in hexadecimal
    #[arg(long)]
    pub hex: bool,
    /// Print {"key": ..., "exists": true or false}
    #[arg(long)]
    pub json: bool,
    /// How to open.
    #[command(flatten)]
    pub read: ReadOptions,
}

/// Arguments of `list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// The database
    pub file: PathBuf,
    /// Only keys that begin with this
    #[arg(long)]
    pub prefix: Option<OsString>,
    /// Print keys in hexadecimal; PREFIX is given so, too
    #[arg(long)]
    pub hex: bool,
    /// Print a JSON value a line
    #[arg(long, conflicts_with = "hex")]
    pub json: bool,
    /// Print keys as they are, each followed by a NUL byte
    #[arg(long, short = '0', conflicts_with_all = ["hex", "json"])]
    pub null: bool,
    /// How to open.
    #[command(flatten)]
    pub read: ReadOptions,
}

/// Which text format.
#[derive(Args, Clone, Debug, Default)]
pub struct FormatOptions {
    /// One JSON object a line
    #[arg(long, conflicts_with = "tdb")]
    pub json_lines: bool,
    /// The text of `tdbdump` and `tdbrestore`
    #[arg(long)]
    pub tdb: bool,
    /// What stands between key and value on a line [default: TAB]
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["json_lines", "tdb"])]
    pub separator: Option<OsString>,
}

/// What `load` and its workers have in common.
#[derive(Args, Clone, Debug, Default)]
pub struct LoadOptions {
    /// The format.
    #[command(flatten)]
    pub format: FormatOptions,
    /// A backslash in the input is just a backslash
    #[arg(long, conflicts_with_all = ["json_lines", "tdb"])]
    pub no_escapes: bool,
    /// Keep what is stored: skip records whose key is already there
    #[arg(long)]
    pub if_absent: bool,
}

/// Arguments of `load`.
#[derive(Args, Debug)]
pub struct LoadArgs {
    /// The database
    pub file: PathBuf,
    /// The text; `-` or nothing reads standard input
    pub input: Option<PathBuf>,
    /// What to read and how to store it.
    #[command(flatten)]
    pub load: LoadOptions,
    /// Share the work between so many processes; if one dies, its share is done again
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = |text: &str| parse_number(text, 1, 256))]
    pub processes: u32,
    /// Make the database if it is absent
    #[arg(long)]
    pub create: bool,
    /// For demonstrations: let the first worker be killed (SIGKILL) at work, and replace it
    #[arg(long, hide = true)]
    pub kill_one_worker: bool,
}

/// Arguments of the hidden `load-worker`; its input is a regular file on standard input.
#[derive(Args, Debug)]
pub struct LoadWorkerArgs {
    /// The database
    pub file: PathBuf,
    /// What to read and how to store it.
    #[command(flatten)]
    pub load: LoadOptions,
    /// What messages call the input
    #[arg(long)]
    pub input_name: String,
    /// Which share of the keys is this worker's
    #[arg(long)]
    pub share: u32,
    /// How many shares there are
    #[arg(long)]
    pub shares: u32,
    /// Number of records at the beginning that a predecessor has dealt with
    #[arg(long, default_value_t = 0)]
    pub skip_records: u64,
    /// At this record, say so and repeat it until killed
    #[arg(long)]
    pub linger_at: Option<u64>,
}

/// Arguments of `dump`.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// The database
    pub file: PathBuf,
    /// The format.
    #[command(flatten)]
    pub format: FormatOptions,
    /// How to open.
    #[command(flatten)]
    pub read: ReadOptions,
}

/// `ntdb compact`.
#[derive(Debug, Args)]
pub struct CompactArgs {
    /// The database
    pub file: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// `ntdb set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    /// The database
    pub file: PathBuf,
    /// What to change.
    #[command(flatten)]
    pub settings: Settings,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// What can be changed of a database.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct Settings {
    /// Percent of each page (0 to 90) that inserts leave to later updates
    #[arg(long, value_name = "PERCENT", value_parser = parse_reserve)]
    pub reserve: Option<u8>,
    /// Keep so much past log (64M), so that `watch` can go back in time
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub keep_log: Option<u64>,
}

/// Arguments of `stat` and `check`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// The database
    pub file: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// How to open.
    #[command(flatten)]
    pub read: ReadOptions,
}

/// Arguments of `watch`.
#[derive(Args, Debug)]
pub struct WatchArgs {
    /// The database
    pub file: PathBuf,
    /// Only this key
    #[arg(allow_hyphen_values = true)]
    pub key: Option<OsString>,
    /// Only keys that begin with this
    #[arg(long, conflicts_with = "key")]
    pub prefix: Option<OsString>,
    /// KEY or PREFIX is given, and keys and values are printed, in hexadecimal
    #[arg(long)]
    pub hex: bool,
    /// Print a JSON object a line
    #[arg(long, conflicts_with = "hex")]
    pub json: bool,
    /// Begin with the changes behind this position; without it, with those from now on
    #[arg(long, value_name = "POSITION")]
    pub from: Option<String>,
    /// End after so many changes
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// End after so long
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: Option<Duration>,
    /// How to open.
    #[command(flatten)]
    pub read: ReadOptions,
}

/// Arguments of `backup`.
#[derive(Args, Debug)]
pub struct BackupArgs {
    /// The database
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// The copy
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// Replace a database that is at DST
    #[arg(long)]
    pub force: bool,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// How to open.
    #[command(flatten)]
    pub read: ReadOptions,
}

/// Arguments of `recover`.
#[derive(Args, Debug)]
pub struct RecoverArgs {
    /// The damaged database, which is not changed; nobody may be using it
    pub source: PathBuf,
    /// The new database, which must not exist
    pub destination: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `torture`.
#[derive(Args, Debug)]
pub struct TortureArgs {
    /// How many processes
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = |text: &str| parse_number(text, 1, 256))]
    pub processes: u32,
    /// How many operations each process does
    #[arg(long, value_name = "N", default_value_t = 5000)]
    pub loops: u64,
    /// What all chance follows from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Kill processes, and replace them
    #[arg(long)]
    pub kill: bool,
    /// Use transactions, too
    #[arg(long)]
    pub transactions: bool,
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

/// Arguments of the hidden `torture-worker`.
#[derive(Args, Debug)]
pub struct TortureWorkerArgs {
    /// The database
    pub file: PathBuf,
    /// The notice board
    #[arg(long)]
    pub board: PathBuf,
    /// Which writer it is
    #[arg(long)]
    pub writer: u32,
    /// How many operations it does
    #[arg(long)]
    pub loops: u64,
    /// What all chance follows from
    #[arg(long)]
    pub seed: u64,
    /// Use transactions, too
    #[arg(long)]
    pub transactions: bool,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "not a number of seconds, 0 or more".to_string();
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// A number from `least` to `most`.
fn parse_number(text: &str, least: u32, most: u32) -> Result<u32, String> {
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("not a number from {least} to {most}")),
    }
}

fn parse_reserve(text: &str) -> Result<u8, String> {
    parse_number(text, 0, 90).map(|percent| percent as u8)
}

/// The command line, or the program's end with a message.
pub fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| clearer(error).exit())
}

/// Takes out of a message what helps nobody: commands that are not for users, and `--help` as the
/// option that somebody may have meant.
fn clearer(mut error: clap::Error) -> clap::Error {
    if let Some(ContextValue::Strings(names)) = error.get(ContextKind::ValidSubcommand) {
        let command = Cli::command();
        let is_hidden =
            |name: &String| command.find_subcommand(name).is_some_and(clap::Command::is_hide_set);
        let names = names.iter().filter(|name| !is_hidden(name)).cloned().collect();
        error.insert(ContextKind::ValidSubcommand, ContextValue::Strings(names));
    }
    let meant = error.get(ContextKind::SuggestedArg);
    if matches!(meant, Some(ContextValue::String(option)) if option == "--help") {
        // Without the usage, which shows the suggestion, too.
        let mut plain = clap::Error::new(error.kind()).with_cmd(&Cli::command());
        if let Some(argument) = error.get(ContextKind::InvalidArg) {
            plain.insert(ContextKind::InvalidArg, argument.clone());
        }
        return plain;
    }
    error
}

/// A number of bytes: digits, or digits and K, M, G or T for powers of 1024.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        Some(b'T' | b't') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "not a number of bytes".to_string())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_string())
}

fn parse_page_size(text: &str) -> Result<u32, String> {
    let bytes = parse_bytes(text)?;
    if bytes.is_power_of_two() && (4096..=65536).contains(&bytes) {
        Ok(bytes as u32)
    } else {
        Err("not a power of two from 4096 to 65536".to_string())
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not octal permission bits such as 640".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declaration_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_and_modes() {
        assert_eq!(parse_bytes("512M"), Ok(512 << 20));
        assert_eq!(parse_bytes("7"), Ok(7));
        assert!(parse_bytes("").is_err() && parse_bytes("K").is_err());
        assert!(parse_bytes("99999999999T").is_err());
        assert_eq!(parse_page_size("8k"), Ok(8192));
        assert!(parse_page_size("5000").is_err() && parse_page_size("128K").is_err());
        assert_eq!(parse_mode("640"), Ok(0o640));
        assert!(parse_mode("999").is_err() && parse_mode("1777").is_err());
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(parse_seconds("-1").is_err() && parse_seconds("nan").is_err());
    }
}
