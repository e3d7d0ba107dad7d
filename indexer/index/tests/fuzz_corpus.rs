//! Replays the committed fuzz corpus, so that what a fuzzer once found stays found, and random
//! programs of the same language beside it.

use std::path::Path;

use proptest::prelude::*;

#[path = "../fuzz/drive.rs"]
mod drive;

#[test]
fn committed_programs() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/tree");
    let entries = std::fs::read_dir(corpus).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 10, "the corpus is missing");
    for path in paths {
        drive::tree(&std::fs::read(&path).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Begins with three sources.
    #[test]
    fn random_programs(steps in prop::collection::vec(any::<[u8; 4]>(), 0..300)) {
        let opened = [[0_u8; 4]; 3];
        let program: Vec<u8> = opened.into_iter().chain(steps).flatten().collect();
        drive::tree(&program);
    }
}
