//! `--tdb` is the text of `tdbdump` and `tdbrestore`, character by character.

mod common;

use common::Place;

#[test]
fn a_dump_of_tdb_is_read_and_written_again() {
    let place = Place::new();
    let text = "{\nkey(4) = \"abc\\00\"\ndata(3) = \"x\\22y\"\n}\n";
    place.run_with_input(["load", "--create", "--tdb", "db"], text.as_bytes()).ok();
    assert_eq!(place.run(["get", "db", "61626300", "--hex"]).text(), "782279\n");
    assert_eq!(place.run(["dump", "db", "--tdb"]).text(), text);
}
