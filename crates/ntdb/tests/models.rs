//! Model checks of the protocols in shared memory, by loom.
//!
//! The files of the lock and of the pins are compiled here against loom's atomics in place of the
//! processor's (module `sync` here), so what is checked is the code that ships, and not a copy of its idea. The
//! protocols of the engine above them are modelled in the folder `models`: the same words and steps as in the
//! code, and no more; processes die there between any two stores.
//!
//! Loom runs each model through the orders of events that the memory model allows, up to a bound on
//! pre-emptions. Some models have a decisive step left out or out of place and must fail, with the words
//! given: so it is known that the check would notice.
//!
//! Run by plain `cargo test`; `cargo test -p ntdb --test models NAME` runs the models whose name contains NAME.
// Parts of the included modules are of no use here.
#![allow(dead_code, unused_imports, missing_docs)]

#[path = "../src/shm/awaited.rs"]
mod awaited;
#[path = "models/foundations.rs"]
mod foundations;
#[path = "../src/limits.rs"]
mod limits;
#[path = "../src/shm/lock/mod.rs"]
mod lock;
#[path = "models/log.rs"]
mod log;
#[path = "models/mortal.rs"]
mod mortal;
#[path = "models/note.rs"]
mod note;
#[path = "../src/shm/pin/mod.rs"]
mod pin;
#[path = "models/retire.rs"]
mod retire;
#[path = "models/slots.rs"]
mod slots;
#[path = "models/stripes.rs"]
mod stripes;
#[path = "models/sync.rs"]
mod sync;
#[path = "../src/types.rs"]
mod types;

use std::io::Write;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// How a model's executions are bounded and set up.
struct Setting {
    preemptions: usize,
    time_outs: bool,
    fences: bool,
    wake_ups: bool,
    tick_ns: u64,
}

const USUAL: Setting =
    Setting { preemptions: 3, time_outs: false, fences: true, wake_ups: true, tick_ns: 6_000 };

/// Runs a model, and panics if it fails. The number of executions.
fn explore(setting: &Setting, model: impl Fn() + Send + Sync + 'static) -> usize {
    sync::FENCES.store(setting.fences, Relaxed);
    sync::TICK_NS.store(setting.tick_ns, Relaxed);
    sync::futex::TIME_OUTS.store(setting.time_outs, Relaxed);
    sync::futex::WAKE_UPS.store(setting.wake_ups, Relaxed);
    static EXECUTIONS: AtomicUsize = AtomicUsize::new(0);
    EXECUTIONS.store(0, Relaxed);
    sync::futex::WOKEN.store(0, Relaxed);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(setting.preemptions);
    builder.max_branches = 20_000;
    builder.check(move || {
        EXECUTIONS.fetch_add(1, Relaxed);
        model();
    });
    EXECUTIONS.load(Relaxed)
}

type Model = (&'static str, Expected, Setting, Run);
/// Explores a model, and returns the number of executions.
type Run = Box<dyn Fn(&Setting) -> usize>;

#[derive(PartialEq)]
enum Expected {
    Holds,
    /// Its last words contain these.
    Fails(&'static str),
}

fn models() -> Vec<Model> {
    let foundations =
        foundations::foundations().into_iter().map(|(name, expected, setting, model)| {
            let run: Run = Box::new(move |setting| explore(setting, model));
            (name, expected, setting, run)
        });
    foundations.chain(protocols()).collect()
}

/// The protocols of the engine.
fn protocols() -> Vec<Model> {
    use Expected::{Fails, Holds};
    let within = |preemptions| Setting { preemptions, ..USUAL };
    macro_rules! model {
        ($name:literal, $expected:expr, $preemptions:literal, $path:ident::$model:ident($($argument:expr),*)) => {{
            #[allow(unused_imports)]
            use $path::*;
            let run: Run = Box::new(move |setting| $path::$model(setting, $($argument),*));
            ($name, $expected, within($preemptions), run)
        }};
    }
    vec![
        model!("note_take_over", Holds, 2, note::take_over(Kind::Data, Wrong::Nothing)),
        model!(
            "note_lists_late",
            Fails("is leaked"),
            2,
            note::take_over(Kind::Data, Wrong::ListsLate)
        ),
        model!(
            "note_disarms_early",
            Fails("linked and free at once"),
            2,
            note::take_over(Kind::Data, Wrong::DisarmsEarly)
        ),
        model!(
            "note_applies_always",
            Fails("the count is not"),
            2,
            note::take_over(Kind::Data, Wrong::AppliesAlways)
        ),
        model!(
            "note_appends_early",
            Fails("ausality"),
            2,
            note::take_over(Kind::Data, Wrong::AppendsEarly)
        ),
        model!(
            "note_shows_early",
            Fails("visible before it was appended"),
            2,
            note::take_over(Kind::Data, Wrong::ShowsEarly)
        ),
        model!(
            "note_counts_on",
            Fails("each record has given up one page"),
            2,
            note::take_over(Kind::Data, Wrong::CountsOn)
        ),
        model!("note_structure_step", Holds, 2, note::take_over(Kind::Structure, Wrong::Nothing)),
        model!(
            "note_structure_disarms_early",
            Fails("linked and free at once"),
            2,
            note::take_over(Kind::Structure, Wrong::DisarmsEarly)
        ),
        model!("slot_updates", Holds, 5, slots::readers_see(UPDATES, Wrong::Nothing)),
        model!("slot_re_used", Holds, 5, slots::readers_see(SLOT_RE_USED, Wrong::Nothing)),
        model!("slot_key_returns", Holds, 5, slots::readers_see(KEY_RETURNS, Wrong::Nothing)),
        model!("slot_neighbour", Holds, 5, slots::readers_see(NEIGHBOUR, Wrong::Nothing)),
        model!(
            "slot_tag_first",
            Fails("out of order"),
            5,
            slots::readers_see(NEIGHBOUR, Wrong::TagFirst)
        ),
        model!(
            "slot_offset_relaxed",
            Fails("ausality"),
            5,
            slots::readers_see(UPDATES, Wrong::OffsetRelaxed)
        ),
        model!(
            "slot_over_writes",
            Fails("ausality"),
            5,
            slots::readers_see(UPDATES, Wrong::OverWrites)
        ),
        model!(
            "slot_looks_once",
            Fails("out of order"),
            5,
            slots::readers_see(KEY_RETURNS, Wrong::LooksOnce)
        ),
        model!("key_lock", Holds, 3, stripes::key_lock_excludes_writers(Wrong::Nothing)),
        model!(
            "key_lock_no_pass",
            Fails("a lost update"),
            3,
            stripes::key_lock_excludes_writers(Wrong::NoPass)
        ),
        model!(
            "key_lock_looks_early",
            Fails("a lost update"),
            3,
            stripes::key_lock_excludes_writers(Wrong::LooksEarly)
        ),
        model!("key_lock_siblings", Holds, 5, stripes::siblings_exclude_each_other(Wrong::Nothing)),
        model!(
            "key_lock_two_words",
            Fails("two hold the key lock"),
            5,
            stripes::siblings_exclude_each_other(Wrong::TwoWords)
        ),
        model!("key_lock_late_waiter", Holds, 5, stripes::late_waiter_robs_nobody(Wrong::Nothing)),
        model!(
            "key_lock_no_generation",
            Fails("two hold the key lock"),
            5,
            stripes::late_waiter_robs_nobody(Wrong::NoGeneration)
        ),
        model!("log_robbed_flusher", Holds, 3, log::robbed_flusher(Wrong::Nothing)),
        model!(
            "log_trusts_its_copy",
            Fails("on disk"),
            4,
            log::robbed_flusher(Wrong::TrustsItsCopy)
        ),
        model!("log_switch", Holds, 2, log::switch_beside_flush_and_sync(Wrong::Nothing)),
        model!(
            "log_switch_point_first",
            Fails("on disk"),
            2,
            log::switch_beside_flush_and_sync(Wrong::SwitchPointFirst)
        ),
        model!(
            "log_file_first",
            Fails("on disk"),
            2,
            log::switch_beside_flush_and_sync(Wrong::FileFirst)
        ),
        model!(
            "log_switch_without_sync",
            Fails("on disk"),
            2,
            log::switch_beside_flush_and_sync(Wrong::NoSync)
        ),
        model!("log_switch_deaths", Holds, 2, log::switch_survives_deaths(Wrong::Nothing)),
        model!("log_robbed_switcher", Holds, 4, log::robbed_switcher(Wrong::Nothing, 1)),
        model!("log_robbed_switcher_twice", Holds, 3, log::robbed_switcher(Wrong::Nothing, 2)),
        model!(
            "log_announces_late",
            Fails("not everything is synced"),
            2,
            log::robbed_switcher(Wrong::AnnouncesLate, 2)
        ),
        model!(
            "log_makes_in_place",
            Fails("on disk"),
            2,
            log::robbed_switcher(Wrong::MakesInPlace, 1)
        ),
        model!(
            "log_replaces_made",
            Fails("on disk"),
            3,
            log::robbed_switcher(Wrong::ReplacesMade, 1)
        ),
        model!(
            "log_takes_made",
            Fails("not everything is written"),
            3,
            log::robbed_switcher(Wrong::TakesMade, 1)
        ),
        model!("log_flag", Holds, 5, log::flagged_file_is_not_re_used(Wrong::Nothing)),
        model!(
            "log_flag_without_fences",
            Fails("a write into a file that is re-used"),
            5,
            log::flagged_file_is_not_re_used(Wrong::NoFences)
        ),
        model!("retire_readers", Holds, 3, retire::readers_keep_their_pages(Wrong::Nothing)),
        model!(
            "retire_advances_early",
            Fails("ausality"),
            3,
            retire::readers_keep_their_pages(Wrong::AdvancesEarly)
        ),
        model!(
            "retire_equal_pins",
            Fails("ausality"),
            3,
            retire::readers_keep_their_pages(Wrong::EqualPins)
        ),
        model!("retire_checkpoint", Holds, 5, retire::checkpoints_keep_their_pages(Wrong::Nothing)),
        model!(
            "retire_forgets_running",
            Fails("ausality"),
            3,
            retire::checkpoints_keep_their_pages(Wrong::ForgetsRunning)
        ),
        model!(
            "retire_forgets_durable",
            Fails("durable"),
            3,
            retire::checkpoints_keep_their_pages(Wrong::ForgetsDurable)
        ),
        model!(
            "retire_holds_too_short",
            Fails("durable checkpoint is re-used"),
            3,
            retire::checkpoints_keep_their_pages(Wrong::HoldsTooShort)
        ),
        model!(
            "retire_queue_moves",
            Holds,
            2,
            retire::queue_moves_survive_deaths(3, 3, Wrong::Nothing)
        ),
        model!(
            "retire_overlaps",
            Fails("the queue has changed"),
            2,
            retire::queue_moves_survive_deaths(1, 3, Wrong::Overlaps)
        ),
        model!("retire_deaths", Holds, 2, retire::moves_survive_deaths(Wrong::Nothing)),
        model!(
            "retire_relative",
            Fails("listed twice"),
            2,
            retire::moves_survive_deaths(Wrong::Relative)
        ),
        model!(
            "retire_releases",
            Holds,
            2,
            retire::moves_survive_deaths_beside_a_release(Wrong::Nothing)
        ),
        model!(
            "retire_releases_relative",
            Fails("listed twice"),
            2,
            retire::moves_survive_deaths_beside_a_release(Wrong::Relative)
        ),
        model!(
            "retire_cuts_early",
            Fails("is leaked"),
            2,
            retire::moves_survive_deaths(Wrong::CutsEarly)
        ),
        model!(
            "retire_forgets_note",
            Fails("free and used at once"),
            2,
            retire::moves_survive_deaths(Wrong::Forgets)
        ),
    ]
}

/// Says to a process of this program that it is one that is expected to fail.
const DOOMED: &str = "NTDB_DOOMED_MODEL";

fn main() -> ExitCode {
    let doomed = std::env::var(DOOMED).ok();
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut failures = 0;
    for (name, expected, setting, model) in models() {
        if doomed.as_ref().is_some_and(|doomed| doomed == name) {
            model(&setting);
            return ExitCode::SUCCESS;
        }
        let is_wanted = wanted.is_empty() || wanted.iter().any(|part| name.contains(part));
        if doomed.is_some() || !is_wanted {
            continue;
        }
        let start = Instant::now();
        let outcome = match expected {
            Expected::Holds => {
                print!("model {name} ... ");
                let _ = std::io::stdout().flush();
                let executions = model(&setting);
                let woken = sync::futex::WOKEN.load(Relaxed);
                if name.starts_with("lock_excludes") {
                    assert!(woken > 0, "nobody has slept: the model shows little");
                }
                format!("ok, {executions} executions, {woken} woken")
            }
            Expected::Fails(words) => {
                print!("model {name} (must fail) ... ");
                let _ = std::io::stdout().flush();
                // A process of its own: loom may well abort when it has found a dead end.
                let output = Command::new(std::env::current_exe().expect("this program's path"))
                    .env(DOOMED, name)
                    .env("RUST_BACKTRACE", "0")
                    .stdout(Stdio::null())
                    .output()
                    .expect("this program runs");
                let last_words = String::from_utf8_lossy(&output.stderr);
                let failed = !output.status.success() && last_words.contains(words);
                failures += usize::from(!failed);
                match (failed, output.status.success()) {
                    (true, _) => String::from("ok, fails"),
                    (false, true) => String::from("DOES NOT FAIL"),
                    (false, false) => format!("FAILS OTHERWISE: {last_words}"),
                }
            }
        };
        println!("{outcome}, {:.1} s", start.elapsed().as_secs_f64());
    }
    ExitCode::from(u8::from(failures > 0))
}
