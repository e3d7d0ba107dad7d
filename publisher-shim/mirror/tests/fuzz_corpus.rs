//! Replays the committed fuzz corpus, so that what a fuzzer once found stays found.
#![expect(clippy::unwrap_used, reason = "a test without a test module")]

use std::path::Path;

#[path = "../fuzz/drive.rs"]
mod drive;

fn replay(target: &str, drive: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let entries = std::fs::read_dir(corpus).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 8, "the corpus of {target} is missing");
    for path in paths {
        let data = std::fs::read(&path).unwrap();
        drive(&data);
        // Neighbours of every entry, the way a fuzzer starts: cut short, and with a byte changed.
        for at in 0..data.len() {
            drive(&data[..at]);
            let mut changed = data.clone();
            changed[at] ^= 0x15;
            drive(&changed);
        }
    }
}

#[test]
fn payloads() {
    replay("wire", drive::wire);
}

#[test]
fn sources() {
    replay("source", drive::source);
}
