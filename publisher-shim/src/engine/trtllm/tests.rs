use serde_json::json;
use warmroute_proto::{LocalHash, PrefixHash, Seed, Tier, TierState};

use super::*;
use crate::mirror::{Assumptions, Mirror, MirrorConfig, Start};
use crate::wire::{Batch, CacheEvent, EngineHash, GroupKind, Medium, StoredBlocks};

const SIZE: u32 = 4;

/// An answer of `POST /kv_cache_events` as version 1.2 writes it: a request of two blocks and a
/// part, offload of the last full block, its eviction, and an iteration without events.
const ANSWER: &str = r#"[
 {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [101, 50]},
  "window_size": 4096},
 {"event_id": 1, "window_size": 4096, "data": {"type": "stored", "parent_hash": null, "blocks": [
   {"type": "stored_block", "block_hash": 10862397513404311000, "cache_level": 0, "priority": 35,
    "mm_keys": [], "tokens": [
     {"type": "unique_token", "token_id": 1, "token_extra_id": 0},
     {"type": "unique_token", "token_id": 2, "token_extra_id": 0},
     {"type": "unique_token", "token_id": 3, "token_extra_id": 0},
     {"type": "unique_token", "token_id": 4, "token_extra_id": 0}]},
   {"type": "stored_block", "block_hash": 22, "cache_level": 0, "priority": 35, "mm_keys": [],
    "tokens": [{"token_id": 5, "token_extra_id": 0}, {"token_id": 6, "token_extra_id": 0},
               {"token_id": 7, "token_extra_id": 0}, {"token_id": 8, "token_extra_id": 0}]},
   {"type": "stored_block", "block_hash": 23, "cache_level": 0, "priority": 35, "mm_keys": [],
    "tokens": [{"token_id": 9, "token_extra_id": 0}]}]}},
 {},
 {"event_id": 2, "window_size": 4096, "data": {"type": "updated", "block_hash": 22,
  "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0}, "priority": null}},
 {"event_id": 3, "window_size": 4096, "data": {"type": "updated", "block_hash": 22,
  "cache_level": null, "priority": {"type": "event_diff", "new_value": 90, "old_value": 35}}},
 {"event_id": 4, "window_size": 4096, "data": {"type": "removed", "block_hashes": [23, 22]}}
]"#;

/// Translates events and folds them.
struct Follower {
    translator: Translator,
    mirror: Mirror,
}

impl Follower {
    fn new() -> Self {
        let assume = Assumptions {
            no_extra_keys: true,
            plain_lookup: true,
            ..Assumptions::default()
        };
        Self::assuming(assume)
    }

    fn assuming(assume: Assumptions) -> Self {
        let config = MirrorConfig {
            assume,
            ..MirrorConfig::default()
        };
        Self {
            translator: Translator::new(0, None),
            mirror: Mirror::new(config, Start::Empty),
        }
    }

    /// Returns the numbers of the payloads and what they did not say.
    fn take(&mut self, answer: &str) -> Vec<u64> {
        let mut numbers = Vec::new();
        for event in events(answer.as_bytes()).unwrap() {
            for (seq, payload) in self.translator.translate(0.0, &event) {
                numbers.push(seq.0);
                let batch = Batch::decode(&payload).unwrap();
                // An inconsistency shows in the states.
                drop(self.mirror.apply(&batch));
            }
        }
        numbers
    }

    fn held(&self, tier: Tier) -> Vec<PrefixHash> {
        let held = self.mirror.held();
        let of_tier = held.into_iter().filter(|(_, held_in)| *held_in == tier);
        of_tier.map(|(prefix, _)| prefix).collect()
    }

    fn state(&self) -> TierState {
        self.mirror.states().gpu
    }
}

/// The prefix hashes of a prompt's blocks.
fn prefixes(tokens: &[u32]) -> Vec<PrefixHash> {
    let mut before = None;
    let blocks = tokens.chunks_exact(SIZE as usize);
    let hash = |tokens| {
        let local = LocalHash::of_block(tokens, &[], Seed::PLAIN);
        let prefix = PrefixHash::after(before, local);
        before = Some(prefix);
        prefix
    };
    blocks.map(hash).collect()
}

fn sorted(mut prefixes: Vec<PrefixHash>) -> Vec<PrefixHash> {
    prefixes.sort_unstable();
    prefixes
}

fn block(hash: u64, tokens: impl IntoIterator<Item = u32>) -> Value {
    let tokens = tokens
        .into_iter()
        .map(|id| json!({"token_id": id, "token_extra_id": 0}));
    json!({
        "type": "stored_block", "block_hash": hash, "cache_level": 0, "priority": 35,
        "tokens": tokens.collect::<Vec<_>>(), "mm_keys": [],
    })
}

fn stored(number: u64, parent: Option<u64>, blocks: &[Value]) -> Value {
    json!({
        "event_id": number,
        "data": {"type": "stored", "parent_hash": parent, "blocks": blocks},
    })
}

fn answer(events: &[Value]) -> String {
    serde_json::to_string(events).unwrap()
}

/// The stores in the translation of one event, of which two blocks came before.
fn translated(event: Value) -> Vec<StoredBlocks> {
    let mut translator = Translator::new(3, None);
    let first = stored(0, None, &[block(1, 0..SIZE), block(2, 0..SIZE)]);
    let answer = answer(&[first, event]);
    let mut events = events(answer.as_bytes()).unwrap().into_iter();
    translator.translate(0.0, &events.next().unwrap());
    let payloads = translator.translate(0.0, &events.next().unwrap());
    let batch = Batch::decode(&payloads[0].1).unwrap();
    assert_eq!(batch.dp_rank, Some(3));
    let stores = batch.events.into_iter().filter_map(|event| match event {
        CacheEvent::Stored(stored) => Some(*stored),
        CacheEvent::Removed(_) | CacheEvent::Cleared | CacheEvent::Unknown(_) => None,
    });
    stores.collect()
}

#[test]
fn blocks_are_held_where_the_engine_has_them() {
    let mut follower = Follower::new();
    let all: Vec<Value> = serde_json::from_str(ANSWER).unwrap();
    let both = prefixes(&[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(follower.take(&answer(&all[..2])), [0, 1]);
    assert_eq!(follower.held(Tier::Gpu), sorted(both.clone()));
    assert_eq!(follower.take(&answer(&all[2..5])), [2, 3]);
    assert_eq!(follower.held(Tier::Gpu), both[..1]);
    assert_eq!(follower.held(Tier::Cpu), both[1..]);
    let back = json!([{"event_id": 4, "window_size": 4096, "data": {
        "type": "updated", "block_hash": 22, "cache_level": {"new_value": 0, "old_value": 1}}}]);
    assert_eq!(follower.take(&back.to_string()), [4]);
    assert_eq!(follower.held(Tier::Gpu), sorted(both.clone()));
    assert_eq!(follower.held(Tier::Cpu), []);
    assert_eq!(follower.take(&answer(&all[5..])), [4]);
    assert_eq!(follower.held(Tier::Gpu), both[..1]);
    assert_eq!(follower.state(), TierState::Complete);
    assert_eq!(follower.mirror.states().cpu, TierState::Complete);
}

#[test]
fn events_that_do_not_name_salts_or_adapters_have_no_credit_unless_declared() {
    let mut follower = Follower::assuming(Assumptions::default());
    follower.take(ANSWER);
    assert_eq!(follower.state(), TierState::Stale);
}

#[test]
fn partial_blocks_are_neither_published_nor_missed() {
    let mut follower = Follower::new();
    follower.take(&answer(&[
        stored(
            0,
            None,
            &[block(1, 0..SIZE), block(2, 0..SIZE), block(3, 0..2)],
        ),
        // Full now, under its own hash; the part is gone.
        stored(1, Some(2), &[block(4, 0..SIZE)]),
        json!({"event_id": 2, "data": {"type": "removed", "block_hashes": [3]}}),
        json!({"event_id": 3, "data": {"type": "updated", "block_hash": 3,
            "cache_level": {"new_value": 1, "old_value": 0}}}),
    ]));
    assert_eq!(follower.held(Tier::Gpu).len(), 3);
    assert_eq!(follower.held(Tier::Cpu), []);
    assert_eq!(follower.state(), TierState::Complete);
}

#[test]
fn stores_wait_for_the_block_size() {
    let mut follower = Follower::new();
    let created = json!({"event_id": 0, "data": {
        "type": "created", "num_blocks_per_cache_level": [9]}});
    assert_eq!(follower.take(&answer(&[created])), [0]);
    // One block: is it full?
    assert!(
        follower
            .take(&answer(&[stored(1, None, &[block(1, 0..2)])]))
            .is_empty()
    );
    let removed = json!({"event_id": 2, "data": {"type": "removed", "block_hashes": [1]}});
    assert!(follower.take(&answer(&[removed])).is_empty());
    assert!(follower.translator.is_waiting());
    let long = stored(3, None, &[block(2, 0..SIZE), block(3, 0..1)]);
    assert_eq!(follower.take(&answer(&[long])), [1, 2, 3]);
    assert!(!follower.translator.is_waiting());
    assert_eq!(follower.held(Tier::Gpu), prefixes(&[0, 1, 2, 3]));
    assert_eq!(follower.state(), TierState::Complete);
}

#[test]
fn a_block_that_is_stored_twice_is_held_once() {
    let mut follower = Follower::new();
    let blocks = [block(1, 0..SIZE), block(2, 0..SIZE)];
    follower.take(&answer(&[
        stored(0, None, &blocks),
        stored(
            1,
            None,
            &[blocks[0].clone(), blocks[1].clone(), block(3, 4..8)],
        ),
        json!({"event_id": 2, "data": {"type": "removed", "block_hashes": [1, 2, 3]}}),
        json!({"event_id": 3, "data": {"type": "removed", "block_hashes": [1, 99]}}),
    ]));
    assert_eq!(follower.held(Tier::Gpu), []);
    assert_eq!(follower.state(), TierState::Complete);
}

#[test]
fn what_is_no_plain_text_is_opaque_or_seeded() {
    let of = |change: fn(&mut Value)| {
        let mut changed = block(5, 0..SIZE);
        changed["cache_salt"] = Value::Null;
        changed["lora_id"] = Value::Null;
        change(&mut changed);
        translated(stored(1, None, &[changed])).remove(0)
    };
    let plain = of(|_| {});
    assert!(plain.reports_extra_keys && plain.keys.is_empty() && plain.salt.is_none());
    assert_eq!(plain.lora, crate::wire::LoraRef::None);
    let is_opaque = |stored: StoredBlocks| stored.keys[0].1.opaque.is_some();
    assert!(is_opaque(of(|block| {
        block["tokens"][2]["token_extra_id"] = json!(7);
    })));
    assert!(is_opaque(of(|block| {
        block["mm_keys"] = json!([{"type": "mm_key", "hash": "ab", "start_offset": 0}]);
    })));
    assert!(is_opaque(of(|block| block["cache_salt"] = json!(12))));
    let salted = of(|block| block["cache_salt"] = json!("tenant"));
    assert_eq!(salted.salt.as_deref(), Some("tenant"));
    let adapted = of(|block| block["lora_id"] = json!(2));
    assert_eq!(adapted.lora, crate::wire::LoraRef::Unnamed(2));
    for field in ["mm_keys", "cache_salt", "lora_id"] {
        let mut older = block(5, 0..SIZE);
        older["cache_salt"] = Value::Null;
        older["lora_id"] = Value::Null;
        older.as_object_mut().unwrap().remove(field);
        let stored = translated(stored(1, None, &[older])).remove(0);
        assert!(!stored.reports_extra_keys, "{field}");
    }
}

#[test]
fn the_second_kv_manager_never_fills_its_keys() {
    let mut complete = block(5, 0..SIZE);
    complete["cache_salt"] = Value::Null;
    complete["lora_id"] = Value::Null;
    let reports = |field: &str, value: Value| {
        let mut event = stored(1, None, &[complete.clone()]);
        event[field] = value;
        translated(event).remove(0).reports_extra_keys
    };
    assert!(!reports("layer_group_id", json!(0)));
    assert!(!reports("hash_algo", json!("v2_sha256")));
    assert!(reports("hash_algo", json!("v1")));
}

#[test]
fn tokens_that_are_no_numbers_make_only_their_block_opaque() {
    let mut image = block(5, 0..SIZE);
    let opaque = |id: Value| {
        image["tokens"][1]["token_id"] = id;
        let plain = block(4, 0..SIZE);
        let stored = translated(stored(1, Some(2), &[plain, image.clone()])).remove(0);
        assert_eq!(stored.hashes, [4, 5].map(EngineHash));
        assert_eq!(stored.keys.len(), 1, "the first block is plain");
        stored.keys[0].1.opaque.unwrap()
    };
    let [first, second, large] = [json!("ab12"), json!("cd34"), json!(1_u64 << 32)].map(opaque);
    assert!(first != second && second != large, "by what they are");
}

#[test]
fn a_configured_block_size_needs_no_wait() {
    let mut follower = Follower::new();
    follower.translator = Translator::new(0, BlockSize::new(SIZE));
    let one = stored(0, None, &[block(1, 0..SIZE)]);
    assert_eq!(follower.take(&answer(&[one])), [0]);
    assert_eq!(follower.held(Tier::Gpu), prefixes(&[0, 1, 2, 3]));
}

#[test]
fn what_is_kept_and_read_is_bounded() {
    let mut follower = Follower::new();
    let long: Vec<u32> = (0..20_000).collect();
    for number in 0..20 {
        let one = stored(number, None, &[block(number, long.clone())]);
        follower.take(&answer(&[one]));
    }
    assert!(follower.translator.waiting_bytes <= WAITING_BYTES_MAX);
    assert!((1..20).contains(&follower.translator.waiting.len()));
    let mut windows = Follower::new();
    windows.translator = Translator::new(0, BlockSize::new(SIZE));
    for number in 0..100 {
        let mut one = stored(number, None, &[block(number, 0..SIZE)]);
        one["window_size"] = number.into();
        windows.take(&answer(&[one]));
    }
    assert_eq!(windows.translator.windows.len(), WINDOWS_MAX);
    assert_eq!(windows.held(Tier::Gpu), prefixes(&[0, 1, 2, 3]));
    assert_eq!(windows.state(), TierState::Unverified);
    let many = |count: usize| format!("[{}{{}}]", "{},".repeat(count - 1));
    assert!(events(many(EVENTS_MAX).as_bytes()).unwrap().is_empty());
    assert!(events(many(EVENTS_MAX + 1).as_bytes()).is_err());
    assert!(events(b"[] []").is_err());
}

#[test]
fn blocks_of_one_store_may_be_in_several_levels() {
    let mut offloaded = block(6, 4..8);
    offloaded["cache_level"] = json!(1);
    let stores = translated(stored(
        1,
        Some(2),
        &[block(5, 0..4), offloaded, block(7, 8..12)],
    ));
    let places = stores.iter().map(|stored| (stored.medium, stored.parent));
    assert!(places.eq([
        (Medium::Gpu, Some(EngineHash(2))),
        (Medium::Cpu, Some(EngineHash(5))),
        (Medium::Gpu, Some(EngineHash(6))),
    ]));
}

#[test]
fn a_block_counts_if_every_window_holds_it() {
    let mut follower = Follower::new();
    let of_window = |number: u64, tokens: i64, data: Value| {
        let event = json!({"event_id": number, "window_size": tokens});
        let mut event = event.as_object().cloned().unwrap();
        event.insert("data".to_owned(), data);
        Value::from(event)
    };
    let created = json!({"type": "created", "num_blocks_per_cache_level": [9]});
    let two = json!({"type": "stored", "parent_hash": null,
        "blocks": [block(1, 0..SIZE), block(2, 4..8)]});
    follower.take(&answer(&[
        of_window(0, 8, created.clone()),
        of_window(1, 4096, created),
        of_window(2, 4096, two.clone()),
        of_window(3, 8, two),
    ]));
    assert_eq!(follower.held(Tier::Gpu).len(), 2);
    assert_eq!(
        follower.state(),
        TierState::Partial,
        "the rule is not known"
    );
    let gone = of_window(4, 8, json!({"type": "removed", "block_hashes": [1]}));
    follower.take(&answer(&[gone]));
    assert_eq!(
        follower.held(Tier::Gpu),
        prefixes(&[0, 1, 2, 3, 4, 5, 6, 7])[1..]
    );

    let largest = translated(json!({"event_id": 1, "data": {
        "type": "stored", "parent_hash": null, "blocks": [block(5, 0..SIZE)]}}));
    assert_eq!(largest[0].group.kind, Some(GroupKind::Main));
}

#[test]
fn hashes_may_be_digests() {
    let mut first = block(0, 0..SIZE);
    first["block_hash"] = json!(format!("{}8000000000000001", "ab".repeat(24)));
    let mut second = block(0, 4..8);
    second["block_hash"] = json!(-1);
    let stores = translated(stored(1, None, &[first, second]));
    assert_eq!(stores[0].hashes, [(1 << 63) + 1, u64::MAX].map(EngineHash));
}

#[test]
fn what_is_not_understood_costs_credit() {
    for data in [
        json!({"type": "moved"}),
        json!({"type": "stored", "blocks": 1}),
        json!({"type": "removed", "block_hashes": ["no digits"]}),
        stored(0, None, &[block(5, 0..SIZE + 1)])["data"].clone(),
    ] {
        let mut follower = Follower::new();
        let first = stored(0, None, &[block(1, 0..SIZE), block(2, 0..SIZE)]);
        let event = json!({"event_id": 1, "data": data});
        assert_eq!(follower.take(&answer(&[first, event])), [0, 1]);
        assert_eq!(follower.state(), TierState::Unverified, "{data}");
        let mut both = prefixes(&[0, 1, 2, 3, 0, 1, 2, 3]);
        both.sort_unstable();
        assert_eq!(follower.held(Tier::Gpu), both, "{data}");
    }
    for answer in [
        "",
        "{}",
        "[1]",
        r#"[{"data": {}}]"#,
        r#"[{"event_id": -1, "data": 1}]"#,
    ] {
        assert!(events(answer.as_bytes()).is_err(), "{answer}");
    }
    assert!(events(b"[]").unwrap().is_empty());
}
