//! scratch
use ntdb::{Durability, Options};
fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().unwrap();
    let updates: u64 = args.next().unwrap().parse().unwrap();
    let records: u64 = args.next().unwrap().parse().unwrap();
    let log: u64 = args.next().unwrap().parse().unwrap();
    let path = std::path::Path::new(&dir).join("zz.ntdb");
    let _ = std::fs::remove_file(&path);
    let mut options = Options::new();
    options.create(true).durability(Durability::Relaxed).checkpoint_log_bytes(log);
    let db = options.open(&path).unwrap();
    let mut x = 88172645463325252u64;
    let mut rnd = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    let value = [7u8; 200];
    let mut put = |n: u64| {
        let len = 50 + rnd() % 100;
        db.put(&(n % records).to_le_bytes(), &value[..len as usize]).unwrap();
    };
    for n in 0..records {
        put(n);
    }
    db.checkpoint().unwrap();
    let fresh = db.stat().unwrap().file_bytes;
    println!(
        "fresh {fresh} free {} retired {}",
        db.stat().unwrap().free_bytes,
        db.stat().unwrap().retired_bytes
    );
    let mut worst = std::time::Duration::ZERO;
    let t = std::time::Instant::now();
    for n in 0..updates {
        let s = std::time::Instant::now();
        put(n.wrapping_mul(7919));
        worst = worst.max(s.elapsed());
        if n % (updates / 10) == 0 {
            let s = db.stat().unwrap();
            println!(
                "{n}: file {:.2} used {:.2} free {:.2} retired {:.2} ckpts {} splits {} compactions {} copies {}",
                s.file_bytes as f64 / fresh as f64,
                (s.file_bytes - s.free_bytes - s.retired_bytes) as f64 / fresh as f64,
                s.free_bytes as f64 / fresh as f64,
                s.retired_bytes as f64 / fresh as f64,
                s.checkpoints,
                s.splits,
                s.compactions,
                s.copies
            );
        }
    }
    println!("{:.0} ns/op worst {worst:?}", t.elapsed().as_nanos() as f64 / updates as f64);
    let s = db.stat().unwrap();
    println!(
        "end: file {:.2} used {:.2}",
        s.file_bytes as f64 / fresh as f64,
        (s.file_bytes - s.free_bytes - s.retired_bytes) as f64 / fresh as f64
    );
    let t = std::time::Instant::now();
    db.close().unwrap();
    println!(
        "close {:?}: {:.2}",
        t.elapsed(),
        std::fs::metadata(&path).unwrap().len() as f64 / fresh as f64
    );
    let _ = std::fs::remove_file(&path);
}
