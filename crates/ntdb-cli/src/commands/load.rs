//! `ntdb load`.

use std::io::BufReader;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use ntdb::{Db, Durability};

use crate::cli::{FormatOptions, GlobalOptions, LoadArgs};
use crate::commands::load_input::Input;
use crate::commands::load_processes;
use crate::commands::load_share::{Job, Share, Tally};
use crate::failure::Failure;
use crate::opening;
use crate::progress::{Progress, count_of, grouped};
use crate::text::lines::LineFormat;
use crate::text::{Format, Reader};

/// The text format that the options ask for.
pub fn text_format(options: &FormatOptions, escapes: bool) -> Result<Format, Failure> {
    if options.json_lines {
        return Ok(Format::JsonLines);
    }
    if options.tdb {
        return Ok(Format::Tdb);
    }
    let separator = options.separator.as_ref().map_or(&b"\t"[..], |text| text.as_bytes());
    let format = LineFormat::new(separator, escapes)
        .map_err(|reason| Failure::Usage(format!("--separator: {reason}")))?;
    Ok(Format::Lines(format))
}

/// Stores the records of a text.
pub fn run(global: &GlobalOptions, args: &LoadArgs) -> Result<(), Failure> {
    let format = text_format(&args.load.format, !args.load.no_escapes)?;
    let input = Input::open(args.input.as_deref())?;
    let db = opening::for_writing(global, &args.file, args.create)?;
    let started = Instant::now();
    let progress = Progress::new(input.bytes(), global.quiet);
    let loaded = if args.processes == 1 && !args.kill_one_worker {
        load_here(&db, args, format, input, &progress)
    } else {
        load_processes::run(global, args, input, &progress)
    };
    drop(progress);
    // Whatever has been stored is synced and reported, also when a later line is malformed.
    if global.durable {
        db.sync()?;
    }
    let took = started.elapsed();
    db.close()?;
    let tally = loaded?;
    if !global.quiet {
        eprintln!("{}", summary(args, &tally, took));
    }
    Ok(())
}

fn load_here(
    db: &Db,
    args: &LoadArgs,
    format: Format,
    input: Input,
    progress: &Progress,
) -> Result<Tally, Failure> {
    // Durable means one sync at the end, not one a record.
    let db = db.with_durability(Durability::Relaxed);
    let name = input.name.clone();
    let job = Job {
        db: &db,
        input_name: &name,
        share: Share::WHOLE,
        if_absent: args.load.if_absent,
        skip_records: 0,
    };
    let stream = BufReader::with_capacity(1 << 18, input.into_stream());
    job.run(Reader::new(format, stream), |tally, _| {
        progress.show(tally.input_bytes, tally.records_read);
        Ok(())
    })
}

fn summary(args: &LoadArgs, tally: &Tally, took: Duration) -> String {
    let seconds = took.as_secs_f64();
    let rate = (tally.stored + tally.already_there) as f64 / seconds.max(1e-9);
    let kept = match tally.already_there {
        0 => String::new(),
        number => format!(", kept {} that were already there,", grouped(number)),
    };
    let by = match args.processes {
        1 => String::new(),
        number => format!(" by {number} processes"),
    };
    format!(
        "{}: stored {}{kept} in {seconds:.3} s ({} a second){by}",
        args.file.display(),
        count_of(tally.stored, "record"),
        grouped(rate as u64)
    )
}
