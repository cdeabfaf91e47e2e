//! scratch
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let mib: usize = std::env::args().nth(2).unwrap().parse().unwrap();
    let path = std::path::Path::new(&dir).join("zz.ntdb");
    let _ = std::fs::remove_file(&path);
    let db = ntdb::Options::new().create(true).open(&path).unwrap();
    let stop = AtomicBool::new(false);
    let value = vec![7u8; mib << 20];
    std::thread::scope(|s| {
        let t = s.spawn(|| {
            let mut waits = Vec::new();
            let mut n = 0u32;
            while !stop.load(Ordering::Relaxed) {
                let s = Instant::now();
                db.put(&(n % 100).to_le_bytes(), b"x").unwrap();
                waits.push(s.elapsed());
                n += 1;
                std::thread::sleep(Duration::from_micros(20));
            }
            waits.sort_unstable();
            println!(
                "{} puts, longest {:?}",
                waits.len(),
                &waits[waits.len().saturating_sub(12)..]
            );
        });
        for i in 0..6u32 {
            let s = Instant::now();
            db.put(format!("large {i}").as_bytes(), &value).unwrap();
            println!("large {:?}", s.elapsed());
        }
        stop.store(true, Ordering::Relaxed);
        t.join().unwrap();
    });
    db.close().unwrap();
    let _ = std::fs::remove_file(&path);
}
