//! Writes the inputs that fuzzing begins with: `seeds FOLDER` makes a folder for each target in FOLDER.

use std::path::Path;

use ntdb_testkit::hostile::kept::Kept;
use ntdb_testkit::hostile::{edit, scene};
use ntdb_testkit::rng::Rng;

fn main() {
    let folder = std::env::args().nth(1).expect("seeds FOLDER");
    let folder = Path::new(&folder);
    let write = |target: &str, number: usize, parts: &[&[u8]]| {
        let dir = folder.join(target);
        std::fs::create_dir_all(&dir).expect("folder");
        std::fs::write(dir.join(format!("seed-{number}")), parts.concat()).expect("seed");
    };
    let scenes = scene::all();
    for (number, scene) in scenes.iter().enumerate() {
        let data = &scene.files[scene::DATA];
        let size = scene.page_size;
        write("header_meta", 2 * number, &[&data[..4096]]);
        write("header_meta", 2 * number + 1, &[&data[size..2 * size]]);
        write("attach_record", number, &[&data[2048..2048 + 128]]);
        for (page, _) in scene.sealed.iter().enumerate().filter(|sealed| *sealed.1 == 1).take(30) {
            let bytes = &data[page * size..(page + 1) * size];
            if bytes[4] == 1 {
                write("bucket_page", number * 100 + page, &[&[0; 8], bytes]);
            }
        }
        let shm = &scene.files[scene::SHM];
        write("shm_header", number, &[&shm[..shm.len().min(100)]]);
        for file in [1, 2] {
            let places = &scene.places[file];
            let bytes = &scene.files[file];
            for (i, place) in places.iter().take(40).enumerate() {
                let record = &bytes[place.offset..place.offset + place.len.min(600)];
                write("log_record", number * 1000 + file * 100 + i, &[record]);
            }
            if let Some(last) = places.get(places.len().min(20).wrapping_sub(1)) {
                write("log_scan", number * 10 + file, &[&[0; 8], &bytes[..last.offset]]);
            }
        }
    }
    // Records of transactions: no scene has any.
    let commit = b"\x0a\x06\0\0\0\0\0\0\0\x07\0\0\0\x40\x05\x02";
    for (number, body) in
        [&b"\x08\x02\x02k\x01\x04"[..], b"\x09\x06\0\0\0\0\0\0\0yz", commit].iter().enumerate()
    {
        let len = (8 + body.len() as u32).to_le_bytes();
        write("log_record", 100_000 + number, &[&len, &[0; 4], body]);
    }
    let stream = b"\x07\x01\x02abxyz\x01\x04\x02\x02k\x07\x03\x01\xac\x02kyz";
    write("log_stream", 0, &[&[2, 0], stream]);
    write("log_stream", 1, &[&[200, 4], b"\x08\x02\x0d\x08", stream]);
    write("log_stream", 2, &[&[90, 2], b"\x00\x08", stream, b"\xcb\x01\x01\x01k", &[9; 200]]);
    // Too long to be put together.
    write("log_stream", 3, &[&[255, 128], b"\xe3\xa7\x12\x01\x01k"]);
    write("record", 0, &[b"\x0c\x05keyvalue"]);
    write("record", 1, &[b"\x0d\x90\x4ekey", &[9; 20]]);
    write("record", 2, &[b"\x82\x20\x05", &[8; 28]]);
    for (number, bytes) in
        [&[0][..], &[2], &[1, 0, 0, 0, 0, 0, 0, 0, 0], &[1; 20]].iter().enumerate()
    {
        write("cursor", number, &[bytes]);
    }
    let texts: [&[u8]; 5] = [
        b"\x00{\"key\":\"a\",\"value\":\"b\"}\n{\"key_base64\":\"AAE=\",\"value_base64\":\"/w==\"}\n",
        b"\x01{\nkey(3) = \"abc\"\ndata(2) = \"\\00\\FF\"\n}\n",
        b"\x02key\tvalue\nback\\\\slash\\x00\ttab\\t\n",
        b"\x03;a;b\n",
        b"\x47::a::b\n",
    ];
    for (number, bytes) in texts.iter().enumerate() {
        write("text", number, &[bytes]);
    }
    for number in 0..64 {
        write("changes", number, &[&Kept::random(&mut Rng::new(number as u64))]);
    }
    // An attack of every kind on every scene.
    let mut rng = Rng::new(1);
    for number in 0..scenes.len() * 16 {
        let mut attack = edit::random(&mut rng, scenes.len());
        (attack[0], attack[2]) = ((number % scenes.len()) as u8, (number / scenes.len()) as u8);
        write("database", number, &[&attack]);
        write("salvage", number, &[&attack]);
    }
}
