//! The model against vLLM's own scheduler: the same work must give the same steps and events.
//!
//! `testdata/golden.jsonl` was made by `testdata/generate.py` with vLLM 0.32.0.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use warmroute_proto::BlockSize;

use super::*;

#[derive(Deserialize)]
struct Scenario {
    seed: u64,
    block_size: u32,
    num_blocks: u32,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    operations: Vec<Operation>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Operation {
    Submit {
        prompt: Vec<u32>,
        max_tokens: usize,
        lora: Option<String>,
        salt: Option<String>,
    },
    Step(Step),
    Abort(u64),
    Reset(bool),
}

#[derive(Deserialize)]
struct Step {
    scheduled: BTreeMap<String, usize>,
    waiting_again: BTreeSet<u64>,
    finished: Vec<u64>,
    cached: BTreeMap<String, usize>,
    events: Vec<RecordedEvent>,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum RecordedEvent {
    StoredBlocks {
        stored: Vec<usize>,
        parent: Option<usize>,
        tokens: Vec<u32>,
        keys: Vec<Vec<String>>,
        lora: Option<String>,
    },
    Removed {
        removed: Vec<usize>,
    },
    Cleared {
        cleared: bool,
    },
}

/// Names blocks by order of first appearance in a store, as the data does.
#[derive(Default)]
struct Names(BTreeMap<EngineHash, usize>);

impl Names {
    fn record(&mut self, event: &CacheEvent) -> RecordedEvent {
        match event {
            CacheEvent::Cleared => RecordedEvent::Cleared { cleared: true },
            CacheEvent::Removed { hash, .. } => RecordedEvent::Removed {
                removed: vec![self.0[hash]],
            },
            CacheEvent::Stored(stored) => RecordedEvent::StoredBlocks {
                parent: stored.parent.map(|hash| self.0[&hash]),
                stored: stored.hashes.iter().map(|&hash| self.name(hash)).collect(),
                tokens: stored.tokens.clone(),
                keys: stored
                    .extra_keys
                    .iter()
                    .flatten()
                    .map(|keys| keys.iter().map(text).collect())
                    .collect(),
                lora: stored.lora_name.as_deref().map(str::to_owned),
            },
        }
    }

    fn name(&mut self, hash: EngineHash) -> usize {
        let next = self.0.len();
        *self.0.entry(hash).or_insert(next)
    }
}

fn text(key: &ExtraKey) -> String {
    match key {
        ExtraKey::Lora(text) | ExtraKey::Salt(text) => text.to_string(),
        ExtraKey::Item { identifier, .. } => identifier.to_string(),
    }
}

fn replay(scenario: Scenario) {
    let mut engine = EngineModel::new(EngineConfig {
        max_num_seqs: scenario.max_num_seqs,
        max_num_batched_tokens: scenario.max_num_batched_tokens,
        vocabulary: [7].into(),
        ..EngineConfig::new(
            BlockSize::new(scenario.block_size).unwrap(),
            scenario.num_blocks,
        )
    });
    let mut names = Names::default();
    let mut cached = BTreeMap::new();
    let mut waited = BTreeSet::new();
    for (at, operation) in scenario.operations.into_iter().enumerate() {
        let place = format!("seed {}, operation {at}", scenario.seed);
        match operation {
            Operation::Submit {
                prompt,
                max_tokens,
                lora,
                salt,
            } => {
                let request = EngineRequest {
                    prompt,
                    max_tokens,
                    lora_name: lora.map(Into::into),
                    cache_salt: salt.map(Into::into),
                    ..EngineRequest::default()
                };
                engine.submit(request).unwrap();
            }
            Operation::Abort(id) => {
                engine.abort(RequestId(id));
            }
            Operation::Reset(done) => assert_eq!(engine.reset_prefix_cache(), done, "{place}"),
            Operation::Step(expected) => {
                let outcome = engine.step();
                engine.check();
                for admitted in &outcome.admitted {
                    cached.insert(admitted.id.0.to_string(), admitted.cached.total());
                }
                let again: BTreeSet<u64> = outcome.preempted.iter().map(|id| id.0).collect();
                assert!(again.is_subset(&expected.waiting_again), "{place}");
                let new: BTreeSet<u64> = &expected.waiting_again - &waited;
                assert!(new.is_subset(&again), "{place}");
                waited.clone_from(&expected.waiting_again);
                compare(&outcome, &expected, &mut names, &place);
                for (id, tokens) in &expected.cached {
                    assert_eq!(cached[id], *tokens, "{place}: cached tokens of {id}");
                }
            }
        }
    }
    assert!(!engine.has_requests());
}

fn compare(outcome: &StepOutcome, expected: &Step, names: &mut Names, place: &str) {
    let events: Vec<RecordedEvent> = outcome
        .events
        .iter()
        .map(|event| names.record(event))
        .collect();
    assert_eq!(events, expected.events, "{place}");
    let mut finished: Vec<u64> = outcome.finished.iter().map(|f| f.id.0).collect();
    finished.sort_unstable();
    assert_eq!(finished, expected.finished, "{place}");
    let computed = outcome.work.prefill_tokens + outcome.work.decode_sequences;
    assert_eq!(
        computed,
        expected.scheduled.values().sum::<usize>(),
        "{place}"
    );
}

#[test]
fn steps_and_events_are_those_of_vllm() {
    for line in include_str!("testdata/golden.jsonl").lines() {
        replay(serde_json::from_str(line).unwrap());
    }
}
