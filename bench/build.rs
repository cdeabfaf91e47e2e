//! Builds the shim over Berkeley DB, and links the libraries of Debian's packages.

fn main() {
    println!("cargo::rerun-if-changed=src/engines/berkeley.c");
    cc::Build::new().file("src/engines/berkeley.c").compile("berkeley_shim");
    for library in ["db", "tdb", "rocksdb"] {
        println!("cargo::rustc-link-lib={library}");
    }
}
