use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use warmroute_proto::hash::{self, PlacedItem};
use warmroute_proto::{BlockSize, LocalHash, PrefixHash, Seed};

use super::*;

const BLOCK: usize = 4;

fn config(num_blocks: u32) -> EngineConfig {
    EngineConfig::new(BlockSize::new(4).unwrap(), num_blocks)
}

fn engine(num_blocks: u32) -> EngineModel {
    EngineModel::new(config(num_blocks))
}

fn request(prompt: impl IntoIterator<Item = u32>, max_tokens: usize) -> EngineRequest {
    EngineRequest {
        prompt: prompt.into_iter().collect(),
        max_tokens,
        ..EngineRequest::default()
    }
}

/// Steps until nothing is left; all events in order.
fn drain(engine: &mut EngineModel) -> Vec<CacheEvent> {
    let mut events = Vec::new();
    while engine.has_requests() {
        events.extend(engine.step().events);
        engine.check();
    }
    events
}

/// Runs one request alone; its events and what it found cached.
fn run(engine: &mut EngineModel, request: EngineRequest) -> (Vec<CacheEvent>, usize) {
    engine.submit(request).unwrap();
    let mut events = Vec::new();
    let mut cached = None;
    while engine.has_requests() {
        let outcome = engine.step();
        engine.check();
        events.extend(outcome.events);
        cached = cached.or_else(|| outcome.admitted.first().map(|a| a.cached.total()));
    }
    (events, cached.unwrap())
}

fn prefixes(prompt: impl IntoIterator<Item = u32>) -> Vec<PrefixHash> {
    let prompt: Vec<u32> = prompt.into_iter().collect();
    let blocks = hash::local_hashes(&prompt, BlockSize::new(4).unwrap(), Seed::PLAIN);
    hash::prefix_hashes(None, &blocks).collect()
}

fn copies(engine: &EngineModel, prefix: PrefixHash) -> u32 {
    let held = engine.held();
    let gpu = held
        .iter()
        .find(|h| h.prefix == prefix && h.medium == Medium::Gpu);
    gpu.map_or(0, |held| held.copies)
}

fn stores(events: &[CacheEvent]) -> Vec<&StoredBlocks> {
    let mut stores = Vec::new();
    for event in events {
        match event {
            CacheEvent::Stored(stored) => stores.push(stored),
            CacheEvent::Removed { .. } | CacheEvent::Cleared => {}
        }
    }
    stores
}

fn removed(events: &[CacheEvent]) -> Vec<EngineHash> {
    let removed = |event: &CacheEvent| match event {
        CacheEvent::Removed { hash, .. } => Some(*hash),
        CacheEvent::Stored(_) | CacheEvent::Cleared => None,
    };
    events.iter().filter_map(removed).collect()
}

#[test]
fn a_prompt_of_whole_blocks_stores_its_last_block_again_at_each_hit() {
    let mut engine = engine(32);
    let last = prefixes(0..16)[3];
    let (events, cached) = run(&mut engine, request(0..16, 1));
    assert_eq!((cached, stores(&events)[0].hashes.len()), (0, 4));
    for expected in 2..4 {
        let (events, cached) = run(&mut engine, request(0..16, 1));
        assert_eq!(cached, 12);
        let stored = stores(&events);
        assert_eq!(stored[0].hashes, [engine.hash_of(last)]);
        assert_eq!(stored[0].parent, Some(engine.hash_of(prefixes(0..16)[2])));
        assert_eq!(copies(&engine, last), expected);
    }
}

#[test]
fn a_removal_takes_one_copy_only() {
    let mut engine = engine(7);
    let last = prefixes(0..8)[1];
    run(&mut engine, request(0..8, 1));
    run(&mut engine, request(0..8, 1));
    assert_eq!(copies(&engine, last), 2);
    // Six usable blocks, three of them free of keys: a prompt of four takes the oldest copy.
    let (events, _) = run(&mut engine, request(100..115, 1));
    assert_eq!(removed(&events), [engine.hash_of(last)]);
    assert_eq!(copies(&engine, last), 1);
    let (_, cached) = run(&mut engine, request(0..9, 1));
    assert_eq!(cached, 8);
}

#[test]
fn the_tail_of_the_least_recently_used_goes_first() {
    let mut engine = engine(7);
    run(&mut engine, request(0..12, 1));
    run(&mut engine, request(100..112, 1));
    let (old, hit) = (prefixes(100..112), prefixes(0..12));
    // The hit moves the first two blocks of the first prompt behind everything else, and takes the
    // third one's place for its partial block.
    let (mut events, _) = run(&mut engine, request(0..11, 1));
    events.extend(run(&mut engine, request(200..219, 1)).0);
    let expected = [hit[2], old[2], old[1], old[0], hit[1]].map(|prefix| engine.hash_of(prefix));
    assert_eq!(removed(&events), expected);
}

#[test]
fn each_chunk_of_a_prefill_is_one_store_on_its_parent() {
    let mut engine = EngineModel::new(EngineConfig {
        max_num_batched_tokens: 10,
        ..config(32)
    });
    let (events, _) = run(&mut engine, request(0..25, 1));
    let names: Vec<EngineHash> = prefixes(0..25)
        .into_iter()
        .map(|p| engine.hash_of(p))
        .collect();
    let stored = stores(&events);
    let hashes: Vec<&[EngineHash]> = stored.iter().map(|s| s.hashes.as_slice()).collect();
    assert_eq!(hashes, [&names[..2], &names[2..5], &names[5..6]]);
    let parents: Vec<Option<EngineHash>> = stored.iter().map(|s| s.parent).collect();
    assert_eq!(parents, [None, Some(names[1]), Some(names[4])]);
    assert!(stored[1].tokens.iter().copied().eq(8..20));
}

#[test]
fn decode_stores_block_by_block_and_never_the_last_token() {
    let mut engine = engine(32);
    let (events, _) = run(&mut engine, request(0..4, 9));
    let sizes: Vec<usize> = stores(&events).iter().map(|s| s.hashes.len()).collect();
    // 13 tokens, the last of which is never computed.
    assert_eq!(sizes, [1, 1, 1]);
    let (events, _) = run(&mut engine, request(50..54, 5));
    assert_eq!(stores(&events).len(), 2);
    let (events, _) = run(&mut engine, request(60..64, 4));
    assert_eq!(stores(&events).len(), 1);
}

#[test]
fn equal_requests_of_one_step_share_what_the_first_of_them_caches() {
    let mut engine = engine(32);
    for _ in 0..3 {
        engine.submit(request(0..12, 1)).unwrap();
    }
    let outcome = engine.step();
    let cached: Vec<usize> = outcome.admitted.iter().map(|a| a.cached.total()).collect();
    assert_eq!(cached, [0, 8, 8]);
    let sizes: Vec<usize> = stores(&outcome.events)
        .iter()
        .map(|s| s.hashes.len())
        .collect();
    assert_eq!(sizes, [3, 1, 1]);
}

#[test]
fn the_last_admitted_request_is_preempted_and_hits_its_own_blocks() {
    let mut engine = engine(8);
    let first = engine.submit(request(0..11, 10)).unwrap();
    let second = engine.submit(request(100..111, 10)).unwrap();
    let mut finished = Vec::new();
    let mut preempted = Vec::new();
    let mut produced: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
    while engine.has_requests() {
        let outcome = engine.step();
        engine.check();
        preempted.extend(outcome.preempted);
        finished.extend(outcome.finished.iter().map(|f| f.id));
        for token in outcome.produced {
            produced.entry(token.id).or_default().push(token.token);
        }
        assert!(
            outcome.admitted.len() <= 2,
            "a resumed request is not admitted again"
        );
    }
    assert_eq!(preempted, [second]);
    assert_eq!(finished, [first, second]);
    assert_eq!(engine.totals().preemptions, 1);
    // Preemption does not show in the output.
    let mut alone = EngineModel::new(config(64));
    alone.submit(request(100..111, 10)).unwrap();
    let mut tokens = Vec::new();
    while alone.has_requests() {
        tokens.extend(alone.step().produced.iter().map(|p| p.token));
    }
    assert_eq!(produced[&second], tokens);
}

#[test]
fn a_reset_is_published_with_the_next_step_and_refused_while_blocks_are_in_use() {
    let mut engine = engine(32);
    engine.submit(request(0..8, 3)).unwrap();
    engine.step();
    assert!(!engine.reset_prefix_cache());
    drain(&mut engine);
    assert!(engine.reset_prefix_cache());
    assert_eq!(engine.held(), []);
    assert_eq!(
        engine.step(),
        StepOutcome::default(),
        "an idle engine publishes nothing"
    );
    let (events, cached) = run(&mut engine, request(0..8, 1));
    assert_eq!(cached, 0);
    assert_eq!(events[0], CacheEvent::Cleared);
    assert_eq!(stores(&events).len(), 1);
}

#[test]
fn salts_and_adapters_share_nothing() {
    let mut engine = engine(64);
    let with = |lora: Option<&str>, salt: Option<&str>| EngineRequest {
        lora_name: lora.map(Arc::from),
        cache_salt: salt.map(Arc::from),
        ..request(0..9, 1)
    };
    let variants = [
        (None, None),
        (Some("a"), None),
        (Some("b"), None),
        (None, Some("a")),
        (Some("a"), Some("a")),
    ];
    for (lora, salt) in variants {
        let (events, cached) = run(&mut engine, with(lora, salt));
        assert_eq!(cached, 0);
        let expected = |block: usize| {
            let mut keys = Vec::new();
            keys.extend(lora.map(|name| ExtraKey::Lora(name.into())));
            keys.extend(
                salt.filter(|_| block == 0)
                    .map(|s| ExtraKey::Salt(s.into())),
            );
            keys
        };
        let stored = stores(&events);
        assert_eq!(stored[0].extra_keys, Some(vec![expected(0), expected(1)]));
        assert_eq!(stored[0].lora_name.as_deref(), lora);
    }
    for (lora, salt) in variants {
        assert_eq!(run(&mut engine, with(lora, salt)).1, 8);
    }
    assert_eq!(engine.held().len(), 10);
}

#[test]
fn an_item_stands_in_every_block_that_it_overlaps() {
    let mut engine = engine(64);
    let with_item = EngineRequest {
        items: vec![PlacedItem {
            identifier: "cat".into(),
            offset: 2,
            length: 4,
        }],
        ..request(0..12, 1)
    };
    let (events, _) = run(&mut engine, with_item);
    let item = |offset| {
        vec![ExtraKey::Item {
            identifier: "cat".into(),
            offset,
        }]
    };
    let expected = vec![item(2), item(-2), vec![]];
    assert_eq!(stores(&events)[0].extra_keys, Some(expected));
    assert_eq!(run(&mut engine, request(0..12, 1)).1, 0);
}

#[test]
fn a_parent_can_be_gone_while_its_child_is_held() {
    let mut engine = engine(32);
    run(&mut engine, request(0..12, 1));
    let chain = prefixes(0..12);
    assert!(engine.evict(chain[1]));
    assert!(!engine.evict(chain[1]));
    assert_eq!(copies(&engine, chain[2]), 1);
    let (events, cached) = run(&mut engine, request(0..13, 1));
    assert_eq!(cached, 4, "the run ends at the hole");
    assert_eq!(removed(&events), [engine.hash_of(chain[1])]);
    assert_eq!(
        (copies(&engine, chain[1]), copies(&engine, chain[2])),
        (1, 2)
    );
}

#[test]
fn the_offload_tier_serves_what_the_gpu_gave_up() {
    let mut engine = EngineModel::new(EngineConfig {
        cpu_blocks: 32,
        ..config(5)
    });
    run(&mut engine, request(0..13, 1));
    run(&mut engine, request(100..113, 1));
    assert_eq!(copies(&engine, prefixes(0..12)[0]), 0);
    engine.submit(request(0..13, 1)).unwrap();
    let outcome = engine.step();
    let expected = CachedTokens { gpu: 0, cpu: 12 };
    assert_eq!(outcome.admitted[0].cached, expected);
    assert_eq!(outcome.work.loaded_tokens, 12);
    // What was loaded is stored on the GPU; the CPU has it already.
    let stored = stores(&outcome.events);
    assert_eq!(stored.len(), 1);
    assert_eq!((stored[0].medium, stored[0].hashes.len()), (Medium::Gpu, 3));
}

#[test]
fn every_group_publishes_and_only_one_is_full_attention() {
    let sliding = GroupKind::SlidingWindow(8);
    let mut engine = EngineModel::new(EngineConfig {
        groups: vec![sliding, sliding, GroupKind::FullAttention],
        ..config(32)
    });
    let (events, _) = run(&mut engine, request(0..16, 1));
    let shape = |stored: &&StoredBlocks| (stored.group, stored.hashes.len(), stored.tokens.len());
    let shapes: Vec<_> = stores(&events).iter().map(shape).collect();
    assert_eq!(shapes, [(0, 2, 16), (1, 2, 16), (2, 4, 16)]);
    assert_eq!(engine.held().len(), 4);
}

#[test]
fn a_hit_ends_where_every_window_is_held() {
    let mut engine = EngineModel::new(EngineConfig {
        groups: vec![GroupKind::SlidingWindow(8), GroupKind::FullAttention],
        ..config(64)
    });
    // The windows of blocks 3 and 4 are held, and of nothing before.
    run(&mut engine, request(0..16, 1));
    let (_, shorter) = run(&mut engine, request((0..12).chain(100..110), 1));
    assert_eq!(shorter, 0);
    let (_, longer) = run(&mut engine, request((0..16).chain(200..210), 1));
    assert_eq!(longer, 16);
}

#[test]
fn another_life_has_other_hashes_and_the_same_output() {
    let in_life = |life| EngineModel::new(EngineConfig { life, ..config(32) });
    let (mut first, mut second) = (in_life(1), in_life(2));
    first.submit(request(0..9, 4)).unwrap();
    second.submit(request(0..9, 4)).unwrap();
    let (first, second) = (first.step(), second.step());
    assert_eq!(first.produced, second.produced);
    assert_ne!(
        stores(&first.events)[0].hashes,
        stores(&second.events)[0].hashes
    );
}

/// As an engine does that samples the most likely token.
#[test]
fn a_prompt_that_ends_with_generated_tokens_is_continued() {
    let generated = |prompt: Vec<u32>, max_tokens| {
        let mut engine = engine(64);
        engine.submit(request(prompt, max_tokens)).unwrap();
        let mut tokens = Vec::new();
        while engine.has_requests() {
            let produced = engine.step().produced;
            tokens.extend(produced.iter().map(|one| one.token));
        }
        tokens
    };
    let prompt: Vec<u32> = (0..9).collect();
    let whole = generated(prompt.clone(), 20);
    for seam in 0..20 {
        let prompt = [&*prompt, &whole[..seam]].concat();
        assert_eq!(generated(prompt, 20 - seam), whole[seam..], "{seam}");
    }
}

#[test]
fn impossible_requests_are_refused() {
    let mut engine = engine(4);
    let submit = |engine: &mut EngineModel, tokens, max| engine.submit(request(0..tokens, max));
    assert_eq!(submit(&mut engine, 0, 1), Err(SubmitError::EmptyPrompt));
    assert_eq!(submit(&mut engine, 1, 0), Err(SubmitError::NothingAsked));
    let too_long = SubmitError::TooLong {
        tokens: 13,
        max: 12,
    };
    assert_eq!(submit(&mut engine, 12, 1), Err(too_long));
    assert!(submit(&mut engine, 11, 1).is_ok());
    drain(&mut engine);
}

#[test]
fn the_outcome_reports_work_and_duration() {
    let mut engine = EngineModel::new(EngineConfig {
        profile: TimingProfile::GPU_8B,
        max_num_batched_tokens: 64,
        ..config(64)
    });
    engine.submit(request(0..100, 2)).unwrap();
    let works: Vec<(usize, usize)> = (0..3)
        .map(|_| engine.step())
        .inspect(|outcome| assert!(outcome.duration > Duration::ZERO))
        .map(|outcome| (outcome.work.prefill_tokens, outcome.work.decode_sequences))
        .collect();
    assert_eq!(works, [(64, 0), (36, 0), (0, 1)]);
}

/// A reader of events, written from the wire's description alone.
#[derive(Default)]
struct Reader {
    names: BTreeMap<EngineHash, (PrefixHash, Seed)>,
    held: BTreeMap<(PrefixHash, Medium), u32>,
}

impl Reader {
    fn apply(&mut self, event: &CacheEvent, main: u32) {
        match event {
            CacheEvent::Cleared => self.held.retain(|(_, medium), _| *medium != Medium::Gpu),
            CacheEvent::Removed {
                hash,
                medium,
                group,
            } if *group == main => {
                let pair = (self.names[hash].0, *medium);
                let left = self.held.get_mut(&pair).expect("never below zero");
                *left -= 1;
                self.held.retain(|_, copies| *copies > 0);
            }
            CacheEvent::Stored(stored) if stored.group == main => self.store(stored),
            CacheEvent::Removed { .. } | CacheEvent::Stored(_) => {}
        }
    }

    fn store(&mut self, stored: &StoredBlocks) {
        let mut parent = stored.parent.map(|name| self.names[&name]);
        for (at, name) in stored.hashes.iter().enumerate() {
            let tokens = &stored.tokens[at * BLOCK..(at + 1) * BLOCK];
            let known = self.names.get(name).copied();
            let named = match &stored.extra_keys {
                None => known.expect("an offload store names a block of the GPU"),
                Some(keys) => {
                    let salt = keys[at].iter().find_map(|key| match key {
                        ExtraKey::Salt(salt) => Some(salt.as_ref()),
                        ExtraKey::Lora(_) | ExtraKey::Item { .. } => None,
                    });
                    let lora = stored.lora_name.as_deref();
                    let seed = parent.map_or_else(|| Seed::new(lora, salt), |(_, seed)| seed);
                    let local = LocalHash::of_block(tokens, &[], seed);
                    (
                        PrefixHash::after(parent.map(|(prefix, _)| prefix), local),
                        seed,
                    )
                }
            };
            assert!(
                known.is_none_or(|known| known == named),
                "a name means one prefix"
            );
            self.names.insert(*name, named);
            *self.held.entry((named.0, stored.medium)).or_default() += 1;
            parent = Some(named);
        }
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Submit {
        family: u32,
        tokens: u32,
        max_tokens: usize,
        kind: u8,
    },
    Step(u8),
    Abort(u8),
    Reset,
    Evict(u8),
}

fn operation() -> impl Strategy<Value = Operation> {
    let submit = (0..4_u32, 1..40_u32, 1..12_usize, 0..4_u8).prop_map(
        |(family, tokens, max_tokens, kind)| Operation::Submit {
            family,
            tokens,
            max_tokens,
            kind,
        },
    );
    prop_oneof![
        4 => submit,
        8 => (1..6_u8).prop_map(Operation::Step),
        1 => any::<u8>().prop_map(Operation::Abort),
        1 => Just(Operation::Reset),
        1 => any::<u8>().prop_map(Operation::Evict),
    ]
}

/// Prompts of a family share a prefix of 12 tokens.
fn family_request(family: u32, tokens: u32, max_tokens: usize, kind: u8) -> EngineRequest {
    let token = |at: u32| if at < 12 { at } else { at + family * 1000 };
    EngineRequest {
        lora_name: (kind == 1).then(|| "adapter".into()),
        cache_salt: (kind >= 2).then(|| format!("tenant-{kind}").into()),
        ..request((0..tokens).map(token), max_tokens)
    }
}

/// Steps and compares what the events say with what the engine holds.
fn step_and_compare(engine: &mut EngineModel, reader: &mut Reader, main: u32) {
    if !engine.has_requests() {
        return;
    }
    for event in engine.step().events {
        reader.apply(&event, main);
    }
    let held: BTreeMap<_, _> = engine
        .held()
        .into_iter()
        .map(|held| ((held.prefix, held.medium), held.copies))
        .collect();
    assert_eq!(reader.held, held);
}

proptest! {
    #[test]
    fn events_describe_the_cache_and_blocks_are_conserved(
        operations in prop::collection::vec(operation(), 1..120),
        num_blocks in 16..40_u32,
        cpu_blocks in prop_oneof![Just(0_u32), 4..40_u32],
        budget in 3..64_usize,
        hybrid in any::<bool>(),
    ) {
        let groups = match hybrid {
            true => vec![GroupKind::SlidingWindow(8), GroupKind::FullAttention],
            false => vec![GroupKind::FullAttention],
        };
        let main = u32::from(hybrid);
        let mut engine = EngineModel::new(EngineConfig {
            max_num_batched_tokens: budget,
            max_num_seqs: 6,
            cpu_blocks,
            groups,
            ..config(num_blocks)
        });
        let mut reader = Reader::default();
        let mut submitted = 0_u64;
        let mut ended = 0_u64;
        for operation in operations {
            match operation {
                Operation::Submit { family, tokens, max_tokens, kind } => {
                    let request = family_request(family, tokens, max_tokens, kind);
                    submitted += u64::from(engine.submit(request).is_ok());
                }
                Operation::Step(times) => {
                    for _ in 0..times {
                        step_and_compare(&mut engine, &mut reader, main);
                        engine.check();
                    }
                }
                Operation::Abort(pick) => {
                    let id = RequestId(u64::from(pick) % submitted.max(1));
                    ended += u64::from(engine.abort(id));
                }
                Operation::Reset => {
                    let busy = engine.load().used_blocks > 0;
                    prop_assert_eq!(engine.reset_prefix_cache(), !busy);
                }
                Operation::Evict(pick) => {
                    let held = engine.held();
                    if let Some(held) = held.get(usize::from(pick) % held.len().max(1)) {
                        let on_gpu = held.medium == Medium::Gpu;
                        prop_assert!(engine.evict(held.prefix) || !on_gpu);
                    }
                }
            }
            engine.check();
        }
        // Everything ends: no request starves, no block is lost.
        while engine.has_requests() {
            let outcome = engine.step();
            ended += outcome.finished.len() as u64;
            engine.check();
        }
        prop_assert!(ended <= submitted);
        prop_assert_eq!(engine.load().used_blocks, 0);
    }

    #[test]
    fn equal_inputs_give_equal_outcomes(prompts in prop::collection::vec(1..30_u32, 1..8)) {
        let outcomes = || {
            let mut engine = engine(24);
            for &tokens in &prompts {
                engine.submit(family_request(tokens % 3, tokens, 5, 0)).unwrap();
            }
            let mut outcomes = Vec::new();
            while engine.has_requests() {
                outcomes.push(engine.step());
            }
            outcomes
        };
        prop_assert_eq!(outcomes(), outcomes());
    }
}

/// With EAGLE or MTP a block is cached once the tokens behind it are known, and found only before
/// the same ones.
#[test]
fn a_block_with_a_lookahead_is_found_before_the_same_tokens_only() {
    for (lookahead, ends_short, other_end) in [(0, 8, 12), (1, 8, 8), (3, 4, 8)] {
        let mut engine = EngineModel::new(EngineConfig {
            lookahead,
            ..config(100)
        });
        let (events, cached) = run(&mut engine, request(0..15, 1));
        assert_eq!(cached, 0);
        for stored in stores(&events) {
            let lists = stored.lookahead.as_deref().unwrap_or_default();
            let named = if lookahead == 0 {
                0
            } else {
                stored.hashes.len()
            };
            assert_eq!(lists.len(), named);
            assert!(lists.iter().all(|list| list.len() == lookahead as usize));
        }
        let cut = engine.config().block_cut();
        let prompt: Vec<u32> = (0..15).collect();
        let names = hash::prompt_hashes(&prompt, cut, Seed::PLAIN);
        assert!(names.iter().all(|&name| copies(&engine, name) == 1));
        // An equal prompt, one token behind the second block's end, and another token there.
        assert_eq!(run(&mut engine, request(0..15, 1)).1, 12);
        assert_eq!(
            run(&mut engine, request(0..9, 1)).1,
            ends_short,
            "{lookahead}"
        );
        let other = (0..12).chain([99, 13, 14, 15]);
        assert_eq!(
            run(&mut engine, request(other, 1)).1,
            other_end,
            "{lookahead}"
        );
    }
}
