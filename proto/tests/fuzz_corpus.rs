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

/// A message that the target does not decode, or that the corpus lacks, is fuzzed blindly.
#[test]
fn every_sample_is_in_the_corpus_and_one_decoder_accepts_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut samples = 0;
    for entry in std::fs::read_dir(root.join("testdata")).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let pairs = text.trim().as_bytes().chunks(2);
        let byte = |pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
        let sample: Vec<u8> = pairs.map(byte).collect();
        let name = path.file_stem().unwrap();
        let kept = std::fs::read(root.join("fuzz/corpus/codec").join(name));
        let is_kept = kept.is_ok_and(|kept| kept == sample);
        assert!(is_kept, "{name:?} is not in the corpus");
        assert_eq!(drive::messages(&sample), 1, "{name:?}");
        samples += 1;
    }
    assert!(samples >= 45, "the samples were not read");
}

proptest! {
    #[test]
    fn decoding_is_total_and_canonical(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        kind in 0u8..46,
    ) {
        if let [first, second, ..] = bytes.as_mut_slice() {
            *first = VERSION;
            *second = kind;
        }
        drive::codec(&bytes);
    }
}
