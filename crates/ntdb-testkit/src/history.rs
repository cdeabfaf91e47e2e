//! Whether a history of transactions has an order in which they might have run one after the other,
//! each behind all that had ended before it began.
//!
//! Every transaction says which versions it has read and which it has written; a written key was read
//! before, so the versions of a key form a chain. What follows from that (a reader comes behind who
//! wrote what it read, and before who overwrote it), and from the times, is a graph; a circle in it
//! is an anomaly.

use std::collections::{BTreeMap, HashMap};

/// A transaction as its process wrote it down.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Entry {
    /// Its name, which is also the version of all that it wrote.
    pub id: u64,
    /// When it began.
    pub began_ns: u64,
    /// When its commit had returned, if it has.
    pub ended_ns: Option<u64>,
    /// Whether it was given up.
    pub is_gone: bool,
    /// Keys and versions that it read; 0 for none.
    pub reads: Vec<(u64, u64)>,
    /// Keys that it wrote, all of which it had read.
    pub writes: Vec<u64>,
}

/// Takes apart what a process has written; a last line that was cut off by its death counts as not
/// written.
///
/// # Panics
/// If it is malformed.
pub fn parse(text: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let number = |word: &str| word.parse::<u64>().unwrap_or_else(|_| panic!("{word} in a history"));
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["try", began, id, ref rest @ ..] => {
                let mut entry =
                    Entry { id: number(id), began_ns: number(began), ..Entry::default() };
                let mut writes = false;
                for word in rest {
                    match word.split_once('=') {
                        None => writes = true,
                        Some((key, _)) if writes => entry.writes.push(number(key)),
                        Some((key, version)) => entry.reads.push((number(key), number(version))),
                    }
                }
                entries.push(entry);
            }
            ["done", id, ended] => {
                let last = entries.last_mut().filter(|entry| entry.id == number(id));
                last.expect("done behind its try").ended_ns = Some(number(ended));
            }
            ["gone", id] => {
                let last = entries.last_mut().filter(|entry| entry.id == number(id));
                last.expect("gone behind its try").is_gone = true;
            }
            _ => panic!("{line:?} in a history"),
        }
    }
    entries
}

/// Looks for the order; `last` are the versions that are there in the end. Returns how many
/// transactions it holds.
///
/// # Errors
/// The anomaly.
pub fn demand_order(entries: &[Entry], last: &[(u64, u64)]) -> Result<usize, String> {
    let by_id: HashMap<u64, usize> = entries.iter().enumerate().map(|(i, e)| (e.id, i)).collect();
    // Who died in its commit has committed if anybody, itself a committed one, has seen it.
    let mut is_in: Vec<bool> = entries.iter().map(|entry| entry.ended_ns.is_some()).collect();
    let mut to_do: Vec<usize> = (0..entries.len()).filter(|&i| is_in[i]).collect();
    let see = |key: u64, version: u64, is_in: &mut Vec<bool>, to_do: &mut Vec<usize>| {
        if version == 0 {
            return Ok(());
        }
        let writer = by_id.get(&version).copied();
        let writer = writer.filter(|&i| entries[i].writes.contains(&key) && !entries[i].is_gone);
        let writer = writer.ok_or(format!("key {key} showed {version}, which nobody committed"))?;
        if !is_in[writer] {
            is_in[writer] = true;
            to_do.push(writer);
        }
        Ok::<(), String>(())
    };
    for &(key, version) in last {
        see(key, version, &mut is_in, &mut to_do)?;
    }
    while let Some(i) = to_do.pop() {
        for &(key, version) in &entries[i].reads {
            see(key, version, &mut is_in, &mut to_do)?;
        }
    }
    let mut successor: HashMap<(u64, u64), usize> = HashMap::new();
    for (i, entry) in entries.iter().enumerate().filter(|&(i, _)| is_in[i]) {
        for &key in &entry.writes {
            let read = entry.reads.iter().find(|(read, _)| *read == key);
            let &(_, version) = read.expect("a written key was read");
            if let Some(other) = successor.insert((key, version), i) {
                return Err(format!(
                    "an update is lost: {} and {} both overwrote {version} of key {key}",
                    entries[other].id, entry.id
                ));
            }
        }
    }
    for &(key, version) in last {
        if let Some(&next) = successor.get(&(key, version)) {
            return Err(format!(
                "lost: key {key} holds {version} in the end, {} overwrote it",
                entries[next].id
            ));
        }
    }
    // Nodes behind the transactions are moments: everything that ended leads to the next one, and
    // from it to everything that began later.
    let mut edges: Vec<Vec<usize>> = vec![Vec::new(); entries.len()];
    for (i, entry) in entries.iter().enumerate().filter(|&(i, _)| is_in[i]) {
        for &(key, version) in &entry.reads {
            if version != 0 {
                edges[by_id[&version]].push(i);
            }
            if let Some(&next) = successor.get(&(key, version)).filter(|&&next| next != i) {
                edges[i].push(next);
            }
        }
    }
    let mut moments: BTreeMap<(u64, bool), Vec<usize>> = BTreeMap::new();
    for (i, entry) in entries.iter().enumerate().filter(|&(i, _)| is_in[i]) {
        moments.entry((entry.began_ns, false)).or_default().push(i);
        if let Some(ended) = entry.ended_ns {
            moments.entry((ended, true)).or_default().push(i);
        }
    }
    let mut moment = None;
    for ((_, is_end), members) in moments {
        if is_end {
            let next = edges.len();
            edges.push(Vec::new());
            if let Some(before) = moment.replace(next) {
                edges[before].push(next);
            }
            for i in members {
                edges[i].push(next);
            }
        } else if let Some(moment) = moment {
            edges[moment].extend(members);
        }
    }
    let mut before = vec![0usize; edges.len()];
    for &to in edges.iter().flatten() {
        before[to] += 1;
    }
    let mut ready: Vec<usize> = (0..edges.len()).filter(|&i| before[i] == 0).collect();
    let mut ordered = 0;
    while let Some(i) = ready.pop() {
        ordered += 1;
        for &to in &edges[i] {
            before[to] -= 1;
            if before[to] == 0 {
                ready.push(to);
            }
        }
    }
    if ordered == edges.len() {
        return Ok(is_in.iter().filter(|&&is_in| is_in).count());
    }
    let stuck = (0..entries.len()).filter(|&i| before[i] > 0).map(|i| &entries[i]).take(4);
    Err(format!("no order: a circle among, or before, {:?}", stuck.collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, last: &[(u64, u64)]) -> Result<usize, String> {
        demand_order(&parse(text), last)
    }

    #[test]
    fn one_after_the_other_is_an_order() {
        let text = "try 1 11 1=0 ! 1=11\ndone 11 2\ntry 3 12 1=11 2=0 ! 2=12\ndone 12 4\n";
        assert_eq!(of(text, &[(1, 11), (2, 12)]), Ok(2));
    }

    #[test]
    fn anomalies_are_found() {
        // Both read the same version and overwrite it.
        let lost = "try 1 11 1=0 ! 1=11\ndone 11 5\ntry 2 12 1=0 ! 1=12\ndone 12 6\n";
        assert!(of(lost, &[(1, 12)]).unwrap_err().contains("lost"));
        // Each reads what the other overwrites.
        let skew = "try 1 11 1=0 2=0 ! 1=11\ndone 11 5\ntry 2 12 1=0 2=0 ! 2=12\ndone 12 6\n";
        assert!(of(skew, &[(1, 11), (2, 12)]).unwrap_err().contains("circle"));
        // Reads an old version although the new one's commit had returned.
        let stale = "try 1 11 1=0 ! 1=11\ndone 11 2\ntry 3 12 1=0 ! \ndone 12 4\n";
        assert!(of(stale, &[(1, 11)]).unwrap_err().contains("circle"));
        // Sees half of another.
        let half = "try 1 11 1=0 2=0 ! 1=11 2=11\ndone 11 5\ntry 2 12 1=11 2=0 !\ndone 12 6\n";
        assert!(of(half, &[(1, 11), (2, 11)]).unwrap_err().contains("circle"));
        let gone = "try 1 11 1=0 ! 1=11\ngone 11\n";
        assert!(of(gone, &[(1, 11)]).unwrap_err().contains("nobody committed"));
        let vanished = "try 1 11 1=0 ! 1=11\ndone 11 2\n";
        assert!(of(vanished, &[(1, 0)]).unwrap_err().contains("lost"));
    }

    #[test]
    fn who_died_in_its_commit_may_or_may_not_have_committed() {
        let text = "try 1 11 1=0 ! 1=11\ntry 1 12 1=0 !";
        assert_eq!(of(text, &[(1, 0)]), Ok(0));
        assert_eq!(of(text, &[(1, 11)]), Ok(1));
    }
}
