//! scratch
use std::time::{Duration, Instant};
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let n: u32 = std::env::args().nth(2).unwrap().parse().unwrap();
    let path = std::path::Path::new(&dir).join("zz.ntdb");
    let _ = std::fs::remove_file(&path);
    let db = ntdb::Options::new().create(true).open(&path).unwrap();
    let t = Instant::now();
    for i in 0..n {
        db.put(&i.to_le_bytes(), &[1; 6000]).unwrap();
    }
    println!("load {:?}", t.elapsed());
    let t = Instant::now();
    for i in (0..n).step_by(2) {
        db.delete(&i.to_le_bytes()).unwrap();
    }
    println!("delete {:?}", t.elapsed());
    db.checkpoint().unwrap();
    db.checkpoint().unwrap();
    let s = db.stat().unwrap();
    println!("file {} MB free {} MB", s.file_bytes >> 20, s.free_bytes >> 20);
    let mut longest = Duration::ZERO;
    let mut sum = Duration::ZERO;
    for i in 0..200u32 {
        let t = Instant::now();
        db.put(format!("l{i}").as_bytes(), &[2; 200_000]).unwrap();
        let e = t.elapsed();
        longest = longest.max(e);
        sum += e;
    }
    println!("200 KB among holes: mean {:?} longest {longest:?}", sum / 200);
    let t = Instant::now();
    for _ in 0..20 {
        db.stat().unwrap();
    }
    println!("stat {:?}", t.elapsed() / 20);
    std::mem::forget(db);
    let _ = std::fs::remove_file(&path);
    for s in ["-log0", "-log1", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{s}", path.display()));
    }
}
