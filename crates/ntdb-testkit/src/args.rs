//! The worker's command line: `ntdb-worker ROLE DATABASE [name=value ...]`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

/// The parsed command line.
#[derive(Clone, Debug)]
pub struct Args {
    /// What to be.
    pub role: String,
    /// The database.
    pub database: PathBuf,
    values: BTreeMap<String, String>,
}

impl Args {
    /// Takes the arguments behind the program's name apart.
    ///
    /// # Errors
    /// What is missing or malformed.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Args, String> {
        let mut args = args.into_iter();
        let usage = "usage: ntdb-worker ROLE DATABASE [name=value ...]";
        let role = args.next().ok_or(usage)?;
        let database = PathBuf::from(args.next().ok_or(usage)?);
        let mut values = BTreeMap::new();
        for arg in args {
            let (name, value) = arg.split_once('=').ok_or(format!("{arg}: not name=value"))?;
            values.insert(name.to_string(), value.to_string());
        }
        Ok(Args { role, database, values })
    }

    /// The value of `name`, or `default` if it was not given.
    ///
    /// # Panics
    /// If the value is malformed: the test that wrote it is wrong.
    pub fn get<T: FromStr>(&self, name: &str, default: T) -> T {
        match self.values.get(name) {
            Some(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}: malformed")),
            None => default,
        }
    }

    /// The text of `name`, if given.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// The path given as `name`.
    ///
    /// # Panics
    /// If it was not given.
    pub fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(self.text(name).unwrap_or_else(|| panic!("{name}=PATH is needed")))
    }
}
