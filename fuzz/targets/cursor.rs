#![no_main]
//! A saved position of an iteration.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    static DB: std::sync::OnceLock<ntdb::Db> = std::sync::OnceLock::new();
    let Some(cursor) = ntdb::Cursor::from_bytes(bytes) else { return };
    assert_eq!(cursor.to_bytes(), bytes);
    let db = DB.get_or_init(|| {
        let db = ntdb::Db::in_memory().expect("memory");
        for n in 0..300u32 {
            db.put(&n.to_le_bytes(), &[7; 40]).expect("put");
        }
        db
    });
    let records: Vec<_> = db.iter_from(&cursor).collect::<Result<_, _>>().expect("sound");
    assert!(records.len() <= 300);
});
