//! The progress bar of long commands: on standard error, only where that is a terminal.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How far an input of known or unknown length has been read.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `input_bytes` of input, or one that only counts if the length is unknown. It stays
    /// invisible if `quiet`, or if standard error is not a terminal.
    pub fn new(input_bytes: Option<u64>, quiet: bool) -> Progress {
        let visible = !quiet && std::io::stderr().is_terminal();
        let target = if visible {
            ProgressDrawTarget::stderr_with_hz(10)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(input_bytes, target);
        let template = match input_bytes {
            Some(_) => "{wide_bar} {bytes}/{total_bytes}  {msg}  {eta} left",
            None => "{spinner} {bytes}  {msg}  {elapsed}",
        };
        bar.set_style(ProgressStyle::with_template(template).expect("the template is constant"));
        if visible {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Progress { bar }
    }

    /// Shows that `input_bytes` are read and `records` done.
    pub fn show(&self, input_bytes: u64, records: u64) {
        self.bar.set_position(input_bytes);
        self.bar.set_message(format!("{} records", grouped(records)));
    }

    /// A bar for the pages of a file; until their number is known it only shows that work goes on.
    pub fn of_pages(quiet: bool) -> Progress {
        let progress = Progress::new(None, quiet);
        let template = "{spinner} {elapsed}";
        let style = ProgressStyle::with_template(template).expect("the template is constant");
        progress.bar.set_style(style);
        progress
    }

    /// Shows that `done` of `pages` are read and `records` copied.
    pub fn show_pages(&self, done: u64, pages: u64, records: u64) {
        if self.bar.length().is_none() {
            let template = "{wide_bar} {pos}/{len} pages  {msg}  {eta} left";
            let style = ProgressStyle::with_template(template).expect("the template is constant");
            self.bar.set_style(style);
        }
        self.bar.set_length(pages.max(done));
        self.bar.set_position(done);
        self.bar.set_message(count_of(records, "record"));
    }

    /// A bar for so many operations.
    pub fn of_operations(operations: u64, quiet: bool) -> Progress {
        let progress = Progress::new(Some(operations), quiet);
        let template = "{wide_bar} {pos}/{len}  {eta} left";
        let style = ProgressStyle::with_template(template).expect("the template is constant");
        progress.bar.set_style(style);
        progress
    }

    /// Shows that `done` operations are done.
    pub fn show_operations(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// Does `work`, and meanwhile shows what `done` says, as operations.
    pub fn while_growing<T>(&self, done: impl Fn() -> u64 + Send, work: impl FnOnce() -> T) -> T {
        if self.bar.is_hidden() {
            return work();
        }
        let (end, ended) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let timeout = std::sync::mpsc::RecvTimeoutError::Timeout;
                while ended.recv_timeout(Duration::from_millis(100)) == Err(timeout) {
                    self.bar.set_position(done());
                }
            });
            let result = work();
            drop(end);
            result
        })
    }

    /// Takes the bar away while `write` writes to the same terminal.
    pub fn hidden_for<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

    /// Prints a line above the bar, or to standard error where there is no bar.
    pub fn say(&self, text: &str) {
        self.bar.suspend(|| eprintln!("{text}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// A number with its digits in groups of three: 1,234,567.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number and what it counts: 1 record, 2,000 records.
pub fn count_of(number: u64, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {what}{plural}", grouped(number))
}

#[cfg(test)]
mod tests {
    use super::{Progress, count_of, grouped};

    #[test]
    fn pages_have_no_bar_before_their_number_is_known() {
        let progress = Progress::of_pages(true);
        assert_eq!(progress.bar.length(), None, "0 of 0 would be shown as done");
        progress.show_pages(3, 10, 1);
        assert_eq!((progress.bar.position(), progress.bar.length()), (3, Some(10)));
    }

    #[test]
    fn one_is_singular() {
        let cases = [(0, "0 pages"), (1, "1 page"), (1000, "1,000 pages")];
        for (number, text) in cases {
            assert_eq!(count_of(number, "page"), text);
        }
    }

    #[test]
    fn digits_are_grouped_from_the_right() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")];
        for (number, text) in cases {
            assert_eq!(grouped(number), text);
        }
    }
}
