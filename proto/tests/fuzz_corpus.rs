//! The codec's decoders on the committed fuzz corpus and on random bytes.

use std::path::Path;

use proptest::prelude::*;
use warmroute_proto::codec::VERSION;

#[path = "../fuzz/drive.rs"]
mod drive;

#[test]
fn messages() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/codec");
    let entries = std::fs::read_dir(corpus).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 10, "the corpus is missing");
    for path in paths {
        let data = std::fs::read(&path).unwrap();
        drive::codec(&data);
        // Neighbours of every entry, the way a fuzzer starts: cut short, and with a byte changed.
        for at in 0..data.len() {
            drive::codec(&data[..at]);
            let mut changed = data.clone();
            changed[at] ^= 0x15;
            drive::codec(&changed);
        }
    }
}

proptest! {
    #[test]
    fn decoding_is_total_and_canonical(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        version in 1..=VERSION,
        kind in 0u8..23,
    ) {
        if let [first, second, ..] = bytes.as_mut_slice() {
            *first = version;
            *second = kind;
        }
        drive::codec(&bytes);
    }
}
