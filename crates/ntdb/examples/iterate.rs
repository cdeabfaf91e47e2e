//! Goes through all records in pieces: stops, keeps the position as bytes, and goes on from there.
//!
//!     cargo run --release --example iterate
//!
//! Every record that is there all the while is seen exactly once, whatever is inserted, deleted or
//! split meanwhile; here others are added and deleted between the pieces.

use std::collections::HashSet;
use std::error::Error;

use ntdb::{Cursor, Db};

const RECORDS: u32 = 10_000;
const PIECE: usize = 777;

fn main() -> Result<(), Box<dyn Error>> {
    let db = Db::in_memory()?;
    for number in 0..RECORDS {
        db.put(format!("stays {number}").as_bytes(), &number.to_le_bytes())?;
    }

    let mut seen = HashSet::new();
    // What would be stored in a file, or sent to another process.
    let mut position: Vec<u8> = Cursor::default().to_bytes();
    for piece in 0.. {
        let cursor = Cursor::from_bytes(&position).ok_or("not a stored position")?;
        let mut records = db.iter_live_from(&cursor);
        let mut count = 0;
        for record in records.by_ref().take(PIECE) {
            let (key, _) = record?;
            count += 1;
            if key.starts_with(b"stays") && !seen.insert(key) {
                return Err("a record was seen twice".into());
            }
        }
        if count == 0 {
            break;
        }
        position = records.cursor().to_bytes();

        for number in 0..100 {
            db.put(format!("comes {piece} {number}").as_bytes(), b"")?;
            if piece > 0 {
                db.delete(format!("comes {} {number}", piece - 1).as_bytes())?;
            }
        }
    }
    println!("saw {} of {RECORDS} records, each once", seen.len());
    if seen.len() != RECORDS as usize {
        return Err("some records were not seen".into());
    }
    Ok(())
}
