//! How fast one thread turns engine payloads into changes, and how long a checkpoint's cut holds it
//! up.
//!
//! `cargo bench -p warmroute-mirror`. Prompts of 48 blocks share their first 16 with earlier ones; the
//! engine holds 200,000 blocks and evicts the oldest, each with an event of its own, as vLLM does.
//! Blocks are counted when stored and when removed. Times are the thread's on a processor, so that a
//! busy machine can still compare two builds. One line of JSON, the best of the rounds.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::cast_precision_loss,
    reason = "a bench measures time, prints what it found, and fails by panicking"
)]

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warmroute_mirror::checkpoint;
use warmroute_mirror::mirror::{Mirror, MirrorConfig, Start};
use warmroute_mirror::source::{self, Effect, SourceCore};
use warmroute_mirror::wire::Batch;
use warmroute_proto::{DpRank, EngineSeq, Source, WorkerId};

const BLOCK: usize = 16;
const SHARED: u64 = 16;
const OWN: u64 = 32;
const HELD_MAX: usize = 200_000;
const BATCHES: u64 = 12_000;
const ROUNDS: usize = 5;

fn tokens(blocks: impl Iterator<Item = u64>) -> Vec<u32> {
    let token = |block: u64, at: usize| (block.wrapping_mul(2_654_435_761) as u32 >> 8) + at as u32;
    blocks
        .flat_map(|block| (0..BLOCK).map(move |at| token(block, at)))
        .collect()
}

fn hash(block: u64) -> u64 {
    block.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn store(blocks: std::ops::Range<u64>, parent: Option<u64>) -> Value {
    json!({
        "type": "BlockStored",
        "block_hashes": blocks.clone().map(hash).collect::<Vec<_>>(),
        "parent_block_hash": parent.map(hash),
        "token_ids": tokens(blocks),
        "block_size": BLOCK,
        "lora_id": null,
        "medium": "GPU",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    })
}

fn remove(block: u64) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [hash(block)], "medium": "GPU", "group_idx": 0})
}

/// Payloads, and how many blocks they store and remove.
fn payloads() -> (Vec<Vec<u8>>, u64) {
    let (mut next, mut count) = (0, 0);
    let mut held = VecDeque::new();
    let mut roots = Vec::new();
    let mut payloads = Vec::new();
    for batch in 0..BATCHES {
        let mut events = Vec::new();
        let first = next;
        if batch % 8 == 0 {
            next += SHARED;
            events.push(store(first..next, None));
            roots.push(next - 1);
        }
        let own = next;
        next += OWN;
        events.push(store(own..next, roots.last().copied()));
        held.extend(first..next);
        count += next - first;
        if held.len() > HELD_MAX {
            let gone = held.drain(..held.len() - HELD_MAX);
            count += gone.len() as u64;
            events.extend(gone.map(remove));
        }
        payloads.push(rmp_serde::to_vec(&json!([batch as f64, events, 0])).unwrap());
    }
    (payloads, count)
}

/// What this thread has had of a processor so far.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begun = processor_time();
    let done = work();
    (done, processor_time().saturating_sub(begun))
}

fn best<T>(mut round: impl FnMut() -> T) -> (T, Duration) {
    let rounds = (0..ROUNDS).map(|_| timed(&mut round));
    rounds.min_by_key(|(_, time)| *time).unwrap()
}

fn rate(count: u64, round: impl FnMut()) -> f64 {
    let ((), time) = best(round);
    count as f64 / time.as_secs_f64() / 1e6
}

/// A source that applied everything, with a replay endpoint, as a running shim has it.
fn core(payloads: &[Vec<u8>]) -> SourceCore {
    let source = Source {
        worker: WorkerId::from("w"),
        dp_rank: DpRank(0),
    };
    let mut core = SourceCore::new(source::SourceConfig::new(source, true));
    let now = Instant::now();
    core.connected(now);
    while let Some(effect) = core.poll_effect() {
        if let Effect::Replay { id, .. } = effect {
            core.replay_end(now, id);
        }
    }
    for (seq, payload) in (0..).zip(payloads) {
        core.live(now, b"", Some(EngineSeq(seq)), payload.clone().into());
        while core.poll_effect().is_some() {}
    }
    core
}

fn main() {
    let (payloads, count) = payloads();
    let batches: Vec<Batch> = payloads
        .iter()
        .map(|payload| Batch::decode(payload).unwrap())
        .collect();
    let decode = rate(count, || {
        for payload in &payloads {
            black_box(Batch::decode(payload).unwrap());
        }
    });
    let mirror = rate(count, || {
        let mut mirror = Mirror::new(MirrorConfig::default(), Start::Empty);
        for batch in &batches {
            black_box(mirror.apply(batch).unwrap());
        }
    });
    let both = rate(count, || {
        let mut mirror = Mirror::new(MirrorConfig::default(), Start::Empty);
        for payload in &payloads {
            let batch = Batch::decode(payload).unwrap();
            black_box(mirror.apply(&batch).unwrap());
        }
    });
    let core = core(&payloads);
    // Too short for the processor's own accounts.
    let mut cut_time = Duration::MAX;
    for _ in 0..4 * ROUNDS {
        let begun = Instant::now();
        black_box(core.checkpoint().unwrap());
        cut_time = cut_time.min(begun.elapsed());
    }
    let cut = core.checkpoint().unwrap();
    let (bytes, encode_time) = best(|| checkpoint::encode(&cut));
    let source = core.status(Instant::now()).source;
    let (restored, restore_time) =
        best(|| checkpoint::decode(&bytes, &source, MirrorConfig::default()).unwrap());
    let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
    println!(
        "{}",
        json!({
            "decode_mblk_s": decode, "mirror_mblk_s": mirror, "both_mblk_s": both,
            "blocks": restored.blocks(), "cut_ms": ms(cut_time), "encode_ms": ms(encode_time),
            "restore_ms": ms(restore_time), "bytes": bytes.len(),
        })
    );
}
