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

/// Inputs of a seed, in the way of a target: the first byte is odd, so that it builds its text.
fn replay_random(inputs: usize, bytes_max: u64, drive: fn(&[u8])) {
    // xorshift64*
    let mut state = 0x5eed_u64;
    let mut below = |bound: u64| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % bound
    };
    for _ in 0..inputs {
        let mut data = vec![1];
        let length = 1 + below(bytes_max);
        data.extend((0..length).map(|_| below(256) as u8));
        drive(&data);
    }
}

#[test]
fn template_sources() {
    replay("template", drive::template);
    replay_random(4_000, 24, drive::template);
}

#[test]
fn template_kwargs() {
    replay("kwargs", drive::kwargs);
    replay_random(400, 12, drive::kwargs);
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
