//! Frames that real vLLM 0.32 servers and the publisher of SGLang 0.5.23 published.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use bytes::{Buf as _, Bytes};
use serde_json::Value;
use warmroute_proto::query::SourceState;

use crate::pipeline::Pipeline;
use crate::world::{Claim, Consumer as _};
use warmroute_simulation::world::model::{Model, Pair, Rules, gpu_pair};

const TESTDATA: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../publisher-shim/mirror/testdata"
);

/// The live batches of a capture by data-parallel rank: number and payload.
fn capture(name: &str) -> BTreeMap<u64, Vec<(u64, Bytes)>> {
    let mut bytes = Bytes::from(fs::read(format!("{TESTDATA}/{name}.bin")).unwrap());
    let mut ranks: BTreeMap<u64, Vec<(u64, Bytes)>> = BTreeMap::new();
    while bytes.has_remaining() {
        let _captured_unix_ns = bytes.get_u64();
        let frames: Vec<Bytes> = (0..bytes.get_u32())
            .map(|_| {
                let length = bytes.get_u32();
                bytes.split_to(usize::try_from(length).unwrap())
            })
            .collect();
        let [_topic, seq, payload] = frames.as_slice() else {
            panic!("{} frames", frames.len());
        };
        let rank = json(payload)[2].as_u64().unwrap();
        let batch = (seq.clone().get_u64(), payload.clone());
        ranks.entry(rank).or_default().push(batch);
    }
    ranks
}

fn json(payload: &[u8]) -> Value {
    rmp_serde::from_slice(payload).unwrap()
}

/// Follows a capture. Batches before its first one are out of the replay's reach. Calls `check`
/// after every batch with its number, the claim, and the model.
fn follow(
    mut pipeline: Pipeline,
    batches: &[(u64, Bytes)],
    mut check: impl FnMut(u64, &Claim, &Held),
) {
    let mut model = Model::new(Rules::TRUE);
    pipeline.connected();
    assert_eq!(pipeline.wants_replay(), Some(0));
    let (first, _) = batches[0];
    let mut live = batches.iter();
    if first > 0 {
        let (seq, payload) = live.next().unwrap();
        model.apply(&json(payload));
        pipeline.replayed(*seq, payload);
    }
    pipeline.replay_ended();
    for (seq, payload) in live {
        model.apply(&json(payload));
        pipeline.live(*seq, payload);
        let claim = pipeline.claim();
        // A batch that changes no pair makes no record.
        assert!(claim.seq <= Some(*seq));
        check(*seq, &claim, &Held(model.held()));
    }
}

/// The model's pairs.
struct Held(BTreeSet<Pair>);

fn follows_exactly(name: &str, held_at_the_end: &[usize]) {
    let ranks = capture(name);
    assert_eq!(ranks.len(), held_at_the_end.len(), "ranks");
    let first = Pipeline::new();
    let second = first.beside();
    let pipelines = [first, second].into_iter();
    for ((batches, held_at_the_end), pipeline) in ranks.values().zip(held_at_the_end).zip(pipelines)
    {
        let mut held = 0;
        follow(pipeline, batches, |seq, claim, model| {
            assert_eq!(claim.states.gpu, SourceState::Exact, "{name} batch {seq}");
            assert_eq!(claim.held, model.0, "{name} batch {seq}");
            held = claim.held.len();
        });
        assert_eq!(held, *held_at_the_end, "{name}");
    }
}

#[test]
fn shared_prefixes_copies_salts_evictions_and_a_reset() {
    follows_exactly("v032_basic", &[14]);
}

#[test]
fn two_ranks() {
    follows_exactly("v032_dp2", &[5, 9]);
}

#[test]
fn three_groups_of_which_two_have_windows() {
    follows_exactly("v032_hybrid_gemma", &[14]);
}

/// Whether hits lose their last block is in the engine's metrics, which a capture does not have.
#[test]
fn an_engine_is_unverified_without_its_metrics() {
    for name in ["v032_basic", "v032_hybrid_gemma"] {
        let pipeline = Pipeline::without_metrics();
        let mut held = 0;
        follow(pipeline, &capture(name)[&0], |seq, claim, model| {
            let state = claim.states.gpu;
            assert_eq!(state, SourceState::Unverified, "{name} batch {seq}");
            assert_eq!(claim.held, model.0, "{name} batch {seq}");
            held = held.max(claim.held.len());
        });
        assert!(held > 0, "{name}");
    }
}

/// Blocks of the full-attention group alone are no credit.
#[test]
fn a_consumer_that_ignores_windows_is_found() {
    let rules = Rules {
        windows: false,
        ..Rules::TRUE
    };
    let mut broken = Model::new(rules);
    let mut model = Model::new(Rules::TRUE);
    for (_, payload) in &capture("v032_hybrid_gemma")[&0] {
        broken.apply(&json(payload));
        model.apply(&json(payload));
    }
    assert_ne!(broken.held(), model.held());
}

/// The capture starts in mid-stream: claims stay `partial` until batch 197 clears the cache.
#[test]
fn preemptions_seen_by_a_late_joiner() {
    let ranks = capture("v032_preempt");
    let mut last = 0;
    follow(Pipeline::new(), &ranks[&0], |seq, claim, model| {
        let state = if seq < 197 {
            SourceState::Partial
        } else {
            SourceState::Exact
        };
        assert_eq!(claim.states.gpu, state, "batch {seq}");
        assert_eq!(claim.held, model.0, "batch {seq}");
        last = claim.held.len();
    });
    assert_eq!(last, 3);
}

/// Stores, a split node, salts, evictions and a reset of two SGLang ranks: the claim is also what
/// SGLang's own tree holds at the end.
#[test]
fn sglang_ranks_hold_what_their_trees_hold() {
    let first = Pipeline::new();
    let second = first.beside();
    for (rank, pipeline) in (0..).zip([first, second]) {
        let name = format!("sglang0523_rank{rank}");
        let mut held = BTreeSet::new();
        follow(pipeline, &capture(&name)[&rank], |seq, claim, model| {
            assert_eq!(claim.states.gpu, SourceState::Exact, "{name} batch {seq}");
            assert_eq!(claim.held, model.0, "{name} batch {seq}");
            held.clone_from(&claim.held);
        });
        let tree = fs::read_to_string(format!("{TESTDATA}/{name}.held.json")).unwrap();
        let tree: Vec<(Option<String>, Vec<u32>)> = serde_json::from_str(&tree).unwrap();
        let pair =
            |(salt, tokens): &(Option<String>, Vec<u32>)| gpu_pair(tokens, 16, salt.as_deref());
        let expected: BTreeSet<Pair> = tree.iter().map(pair).collect();
        assert!(expected.len() >= 9, "{name}");
        assert_eq!(held, expected, "{name}");
    }
}
