//! The workloads on an engine that is known to be right, and on some that are wrong.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex};

use ntdb_workload::crew;
use ntdb_workload::job::Job;
use ntdb_workload::mapping::{self, Phase};
use ntdb_workload::mixed::{self, Mix};
use ntdb_workload::session::{Access, Result, Session};
use ntdb_workload::{tpcb, traffic};

type Map = BTreeMap<Vec<u8>, Vec<u8>>;

/// A map under a lock.
#[derive(Clone, Default)]
struct Model {
    map: Arc<Mutex<Map>>,
    /// Of so many puts one is forgotten.
    forgets_one_in: Option<u64>,
    puts: u64,
}

struct Inside<'a>(&'a mut Map);

impl Access for Inside<'_> {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let found = self.0.get(key);
        value.clear();
        value.extend_from_slice(found.map_or(&[], |found| found));
        Ok(found.is_some())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.0.insert(key.to_vec(), value.to_vec());
        Ok(())
    }
}

impl Access for Model {
    fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        Inside(&mut self.map.lock().unwrap()).get(key, value)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        Inside(&mut self.map.lock().unwrap()).put(key, value)
    }
}

impl Session for Model {
    fn load(&mut self, records: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) -> Result<()> {
        self.map.lock().unwrap().extend(records);
        Ok(())
    }

    fn transaction(
        &mut self,
        _durable: bool,
        body: &mut dyn FnMut(&mut dyn Access) -> Result<()>,
    ) -> Result<()> {
        self.puts += 1;
        let mut map = self.map.lock().unwrap();
        let before = self.forgets_one_in.is_some_and(|n| self.puts.is_multiple_of(n));
        let before = before.then(|| map.clone());
        body(&mut Inside(&mut map))?;
        if let Some(before) = before {
            *map = before;
        }
        Ok(())
    }

    fn scan(&mut self, seed: u64, count: usize) -> Result<usize> {
        let map = self.map.lock().unwrap();
        let from = (Bound::Excluded(seed.to_be_bytes().to_vec()), Bound::Unbounded);
        Ok(map.range::<Vec<u8>, _>(from).take(count).count())
    }

    fn for_each(&mut self, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<()> {
        self.map.lock().unwrap().iter().for_each(|(key, value)| visit(key, value));
        Ok(())
    }
}

fn transfers(clients: u64, transactions: u64, grow_bytes: usize) -> Vec<Job> {
    let job = |client| {
        Job::Tpcb(tpcb::Work {
            scale: 1,
            transactions,
            durable: true,
            grow_bytes,
            first_history: client * transactions,
            seed: client,
        })
    };
    (0..clients).map(job).collect()
}

#[test]
fn the_sums_of_a_bank_agree() {
    let mut model = Model::default();
    tpcb::load(&mut model, 1).unwrap();
    let outcome = crew::of_threads(&transfers(3, 400, 0), || Ok(model.clone())).unwrap();
    assert_eq!(outcome.operations(), 1_200);
    assert_eq!(tpcb::verify(&mut model.clone(), 1, 1_200).unwrap().transactions, 1_200);
    assert!(tpcb::verify(&mut model.clone(), 1, 1_201).is_err(), "one was lost");
    let history = tpcb::key(tpcb::Table::History, 7);
    model.map.lock().unwrap().get_mut(&history[..]).unwrap()[0] ^= 1;
    assert!(tpcb::verify(&mut model, 1, 1_200).is_err(), "a row was changed");
}

#[test]
fn an_engine_that_forgets_is_found_out() {
    let mut model = Model { forgets_one_in: Some(100), ..Model::default() };
    tpcb::load(&mut model, 1).unwrap();
    for job in transfers(1, 400, 0) {
        job.run(&mut model).unwrap();
    }
    let error = tpcb::verify(&mut model, 1, 400).unwrap_err();
    assert!(error.to_string().contains("396 records of history"), "{error}");
}

#[test]
fn rows_grow_and_become_short_again() {
    let mut model = Model::default();
    tpcb::load(&mut model, 1).unwrap();
    for job in transfers(1, 600, 90) {
        job.run(&mut model).unwrap();
    }
    tpcb::verify(&mut model, 1, 600).unwrap();
    let map = model.map.lock().unwrap();
    // The one branch was in every transaction; after ten updates it is as long as at first.
    let branch = &map[&tpcb::key(tpcb::Table::Branch, 0)[..]];
    assert_eq!(branch.len(), tpcb::ROW_BYTES + 600 % 11 * 90);
    assert!(map.values().all(|row| row.len() <= 10 * tpcb::ROW_BYTES));
}

#[test]
fn each_mix_does_what_it_says() {
    for mix in Mix::ALL {
        let mut model = Model::default();
        mixed::load(&mut model, 1_000, 100).unwrap();
        let before = model.map.lock().unwrap().clone();
        let job = |client| {
            Job::Mixed(mixed::Work {
                mix,
                records: 1_000,
                value_bytes: 100,
                operations: 2_000,
                durable: false,
                client,
                clients: 2,
                seed: client,
            })
        };
        let outcome = crew::of_threads(&[job(0), job(1)], || Ok(model.clone())).unwrap();
        assert_eq!(outcome.operations(), 4_000);
        let records = mixed::verify(&mut model, 1_000).unwrap();
        let map = model.map.lock().unwrap();
        let changed = before.iter().filter(|(key, value)| map[*key] != **value).count();
        match mix {
            Mix::C => assert_eq!((records, changed), (1_000, 0)),
            // 5 % of 4,000 operations, give or take.
            Mix::D | Mix::E => assert!((1_120..1_300).contains(&records), "{mix:?}: {records}"),
            Mix::A | Mix::F => assert!(changed > 300, "{mix:?}: {changed}"),
            Mix::B => assert!((20..200).contains(&changed), "{mix:?}: {changed}"),
        }
    }
}

#[test]
fn pairs_name_each_other() {
    let model = Model::default();
    let run = |phase, pairs| {
        let work = mapping::Work { phase, seconds: 0.05, pairs, seed: 1 };
        Job::Mapping(work).run(&mut model.clone())
    };
    assert!(run(Phase::Fetch, 1).is_err(), "there are none yet");
    let stored = run(Phase::Store, mapping::PAIRS).unwrap().operations;
    let pairs = model.map.lock().unwrap().len() as u64 / 2;
    assert_eq!(pairs, mapping::PAIRS.min(stored / 2));
    assert!(run(Phase::Fetch, pairs).unwrap().operations > 0);
    model.map.lock().unwrap().values_mut().for_each(|value| value.push(b'!'));
    assert!(run(Phase::Fetch, pairs).is_err(), "every value is another one");
}

#[test]
fn readers_and_writers_count_what_they_do() {
    let mut model = Model::default();
    traffic::load(&mut model, 100).unwrap();
    let before = model.map.lock().unwrap().clone();
    let job = |write_percent, seed| {
        Job::Traffic(traffic::Work { write_percent, records: 100, seconds: 0.05, seed })
    };
    let readers = [job(0, 1), job(0, 2)];
    assert!(crew::of_threads(&readers, || Ok(model.clone())).unwrap().operations() > 0);
    assert_eq!(*model.map.lock().unwrap(), before);
    job(100, 3).run(&mut model).unwrap();
    assert_ne!(*model.map.lock().unwrap(), before);
    assert!(job(0, 4).run(&mut Model::default()).is_err(), "nothing is there");
}
