//! Replays the committed fuzz corpus.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test without a test module"
)]

use std::path::Path;

#[path = "../fuzz/drive.rs"]
mod drive;

fn replay(target: &str, drive: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let mut paths: Vec<_> = std::fs::read_dir(corpus)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    assert!(paths.len() >= 8, "the corpus of {target} is missing");
    for path in paths {
        let data = std::fs::read(&path).unwrap();
        drive(&data);
        // Mutations of every entry: truncated, and with one byte changed.
        for at in (0..data.len()).step_by(1 + data.len() / 64) {
            drive(&data[..at]);
            let mut changed = data.clone();
            changed[at] ^= 0x15;
            drive(&changed);
        }
    }
}

#[test]
fn chats() {
    replay("chat", drive::chat);
}

#[test]
fn completions() {
    replay("completion", drive::completion);
}

#[test]
fn forms() {
    replay("form", drive::form);
}

#[test]
fn streams() {
    replay("sse", drive::sse);
}

#[test]
fn seams() {
    replay("seams", drive::seams);
}

#[test]
fn tokenizer_files() {
    replay("tokenizer_file", drive::tokenizer_file);
}
