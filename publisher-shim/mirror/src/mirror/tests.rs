mod adapters;
mod resume;
mod save;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::json;
use warmroute_proto::hash::{self, PlacedItem};
use warmroute_proto::{BlockSize, TierState};

use super::nodes::ALIASES_MAX;
use super::*;
use crate::testing::LogReader;
use crate::wire::{BlockGroup, BlockKeys, GroupKind, LoraRef, Medium, RemovedBlocks, UnknownEvent};

const MAIN: Option<GroupKind> = Some(GroupKind::Main);

/// An engine whose metrics show no drafts.
pub(crate) fn known_plain() -> MirrorConfig {
    MirrorConfig {
        speculates: Some(false),
        ..MirrorConfig::default()
    }
}

fn mirror(start: Start) -> Mirror {
    Mirror::new(known_plain(), start)
}

fn group(index: u32) -> BlockGroup {
    BlockGroup {
        index: Some(index),
        kind: MAIN,
    }
}

/// A run of blocks of one token each; a block's engine hash is its token.
fn run(parent: Option<u64>, tokens: &[u32]) -> StoredBlocks {
    StoredBlocks {
        hashes: tokens.iter().map(|&t| EngineHash(u64::from(t))).collect(),
        parent: parent.map(EngineHash),
        tokens: tokens.to_vec(),
        tokens_per_position: 1,
        block_size: 1,
        lookahead: 0,
        lookahead_tokens: Vec::new(),
        lora: LoraRef::None,
        lora_number: None,
        salt: None,
        keys: Vec::new(),
        reports_extra_keys: true,
        reports_removals: false,
        medium: Medium::Gpu,
        group: group(0),
    }
}

fn stored(parent: Option<u64>, tokens: &[u32]) -> CacheEvent {
    CacheEvent::Stored(Box::new(run(parent, tokens)))
}

fn removed(hash: u64) -> CacheEvent {
    removed_from(hash, Medium::Gpu, 0)
}

fn removed_from(hash: u64, medium: Medium, group: u32) -> CacheEvent {
    CacheEvent::Removed(RemovedBlocks {
        hashes: vec![EngineHash(hash)],
        medium,
        group: Some(group),
    })
}

fn batch(events: Vec<CacheEvent>) -> Batch {
    Batch {
        events,
        ..Batch::default()
    }
}

/// Prefix hash of a sequence of one-token blocks.
fn prefix(tokens: &[u32]) -> PrefixHash {
    seeded_prefix(tokens, Seed::PLAIN)
}

fn seeded_prefix(tokens: &[u32], seed: Seed) -> PrefixHash {
    let mut last = None;
    for &token in tokens {
        let local = LocalHash::of_block(&[token], &[], seed);
        last = Some(PrefixHash::after(last, local));
    }
    last.unwrap()
}

/// Applies batches, and checks the emitted changes against the mirror after each.
struct Follower {
    mirror: Mirror,
    reader: LogReader,
}

impl Follower {
    fn new(start: Start) -> Self {
        Self {
            mirror: mirror(start),
            reader: LogReader::default(),
        }
    }

    fn apply(&mut self, events: Vec<CacheEvent>) {
        let changes = self.mirror.apply(&batch(events)).unwrap();
        self.reader.apply(&changes);
        self.check();
    }

    fn check(&self) {
        assert_eq!(self.reader.held(), self.mirror.held());
        assert_eq!(self.reader.digest(), self.mirror.digest());
        let mut fresh = LogReader::default();
        fresh.apply(&self.mirror.image());
        assert_eq!(fresh.held(), self.mirror.held());
    }

    fn gpu(&self) -> TierState {
        self.mirror.states().gpu
    }

    fn holds(&self, tokens: &[u32]) -> bool {
        self.mirror.held().contains(&(prefix(tokens), Tier::Gpu))
    }
}

#[test]
fn a_block_removed_and_stored_again_within_a_batch_is_removed_and_stored() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![stored(None, &[1, 2, 3])]);
    let events = vec![removed(2), stored(Some(1), &[2]), stored(None, &[9])];
    let changes = follower.mirror.apply(&batch(events)).unwrap();
    let interrupted = Change::Removed {
        blocks: vec![prefix(&[1, 2])],
        tier: Tier::Gpu,
    };
    assert_eq!(changes.first(), Some(&interrupted));
    follower.reader.apply(&changes);
    follower.check();
    // One of two copies: no interruption.
    follower.apply(vec![stored(None, &[1])]);
    let events = vec![removed(1), stored(None, &[1])];
    assert_eq!(follower.mirror.apply(&batch(events)).unwrap(), []);
}

#[test]
fn a_block_stored_three_times_and_removed_twice_is_held() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![
        stored(None, &[1]),
        stored(None, &[1]),
        stored(None, &[1]),
    ]);
    follower.apply(vec![removed(1), removed(1)]);
    assert!(follower.holds(&[1]));
    follower.apply(vec![removed(1)]);
    assert!(!follower.holds(&[1]));
    assert_eq!(follower.mirror.prefixes(), 0);
}

#[test]
fn a_batch_that_undoes_itself_tells_nothing() {
    let mut mirror = mirror(Start::Empty);
    let changes = mirror.apply(&batch(vec![stored(None, &[1, 2]), removed(2), removed(1)]));
    assert_eq!(changes, Ok(vec![]));
}

#[test]
fn a_run_is_told_as_one_run() {
    let mut mirror = mirror(Start::Empty);
    let changes = mirror
        .apply(&batch(vec![stored(None, &[1, 2]), stored(Some(2), &[3])]))
        .unwrap();
    assert!(
        matches!(&changes[..], [Change::Stored { parent: None, blocks, .. }] if blocks.len() == 3)
    );
}

#[test]
fn a_hole_keeps_its_place_until_its_descendants_are_gone() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![stored(None, &[1, 2, 3])]);
    follower.apply(vec![removed(2)]);
    assert!(!follower.holds(&[1, 2]) && follower.holds(&[1, 2, 3]));
    // The engine hash of the hole still places its children.
    follower.apply(vec![stored(Some(2), &[4])]);
    assert!(follower.holds(&[1, 2, 4]));
    follower.apply(vec![stored(Some(1), &[2])]);
    assert!(follower.holds(&[1, 2]));
    follower.apply(vec![removed(2), removed(3), removed(4), removed(1)]);
    assert_eq!(follower.mirror.prefixes(), 0);
    assert_eq!(follower.gpu(), TierState::Complete);
}

#[test]
fn a_pair_is_held_when_every_main_group_holds_it() {
    let mut follower = Follower::new(Start::Empty);
    let in_group = |parent, tokens: &[u32], index, kind| {
        let mut run = run(parent, tokens);
        run.group = BlockGroup {
            index: Some(index),
            kind: Some(kind),
        };
        CacheEvent::Stored(Box::new(run))
    };
    follower.apply(vec![stored(None, &[1, 2])]);
    assert!(follower.holds(&[1]));
    follower.apply(vec![in_group(None, &[1], 2, GroupKind::Main)]);
    assert!(follower.holds(&[1]) && !follower.holds(&[1, 2]));
    assert!(follower.mirror.main_attention_only());
    follower.apply(vec![removed_from(1, Medium::Gpu, 2)]);
    assert!(!follower.holds(&[1]));
    assert_eq!(follower.gpu(), TierState::Complete);
    // A child whose parent only one group holds: readers do not know the parent.
    follower.apply(vec![removed(2), stored(Some(1), &[5])]);
    follower.apply(vec![in_group(Some(1), &[5], 2, GroupKind::Main)]);
    assert!(follower.holds(&[1, 5]) && !follower.holds(&[1]));
}

#[test]
fn main_stores_that_cannot_be_indexed_are_missing() {
    let mut mismatch = run(None, &[1, 2, 3]);
    mismatch.hashes.truncate(1);
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![CacheEvent::Stored(Box::new(mismatch))]);
    assert_eq!(follower.gpu(), TierState::Partial);

    let mut other_size = run(None, &[1, 2]);
    other_size.hashes.truncate(1);
    other_size.block_size = 2;
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![stored(None, &[1])]);
    follower.apply(vec![CacheEvent::Stored(Box::new(other_size))]);
    assert_eq!(follower.gpu(), TierState::Partial);
    assert_eq!(follower.mirror.counters().stores_not_indexable, 1);
    // Its removal is none of a known block, and no sign.
    follower.apply(vec![removed(77)]);
    follower.apply(vec![CacheEvent::Cleared]);
    assert_eq!(follower.gpu(), TierState::Complete);
}

#[test]
fn events_confirm_the_block_size_and_beat_a_suggestion() {
    let mut mirror = mirror(Start::Empty);
    mirror.suggest_block_size(BlockSize::new(16).unwrap());
    assert!(!mirror.block_size_is_confirmed());
    mirror.apply(&batch(vec![stored(None, &[1])])).unwrap();
    assert_eq!(mirror.block_size(), BlockSize::new(1));
    mirror.suggest_block_size(BlockSize::new(16).unwrap());
    assert_eq!(mirror.block_size(), BlockSize::new(1));
    assert_eq!(mirror.states().gpu, TierState::Complete);
}

#[test]
fn an_orphan_is_partial_until_its_parent_appears() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![stored(Some(2), &[3, 4]), stored(Some(4), &[5])]);
    assert_eq!(follower.gpu(), TierState::Partial);
    assert_eq!(follower.mirror.held(), []);
    follower.apply(vec![removed(4)]);
    follower.apply(vec![stored(None, &[1, 2])]);
    assert!(follower.holds(&[1, 2, 3]) && follower.holds(&[1, 2, 3, 4, 5]));
    assert!(!follower.holds(&[1, 2, 3, 4]));
    assert_eq!(follower.gpu(), TierState::Complete);
    assert_eq!(follower.mirror.orphans(), 0);
}

#[test]
fn orphans_that_are_removed_leave_nothing() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![stored(Some(2), &[3, 4])]);
    follower.apply(vec![removed(3)]);
    assert_eq!(follower.mirror.orphans(), 2);
    follower.apply(vec![removed(4)]);
    assert_eq!(follower.mirror.orphans(), 0);
    assert_eq!(follower.gpu(), TierState::Complete);
}

#[test]
fn orphans_that_are_their_own_ancestors_are_dropped() {
    let mut mirror = mirror(Start::Empty);
    let events = vec![
        stored(Some(1), &[1]),
        stored(Some(3), &[2]),
        stored(Some(4), &[3]),
        stored(Some(2), &[4]),
    ];
    mirror.apply(&batch(events)).unwrap();
    assert_eq!(
        (mirror.orphans(), mirror.counters().orphans_dropped),
        (2, 2)
    );
    assert_eq!(mirror.states().gpu, TierState::Partial);
    mirror
        .apply(&batch([1, 2, 3, 4].map(removed).into()))
        .unwrap();
    assert_eq!(mirror.orphans(), 0);
}

#[test]
fn references_beyond_counting_empty_the_mirror() {
    let at = GroupTier {
        slot: 0,
        tier: Tier::Gpu,
    };
    let mut named = mirror(Start::Empty);
    named.apply(&batch(vec![stored(None, &[1])])).unwrap();
    let node = named.engine_hashes.node(EngineHash(1)).unwrap();
    named.add_references(EngineHash(1), node, at, u32::MAX - 1);
    let again = batch(vec![stored(None, &[1])]);
    assert_eq!(named.apply(&again), Err(Inconsistency::TooMany));
    assert_eq!(named.prefixes(), 0);
    assert!(named.apply(&again).is_ok());
}

#[test]
fn orphans_beyond_the_bound_are_missing() {
    let config = MirrorConfig {
        orphans_max: 2,
        ..known_plain()
    };
    let mut mirror = Mirror::new(config, Start::Empty);
    mirror
        .apply(&batch(vec![stored(Some(9), &[1, 2, 3])]))
        .unwrap();
    assert_eq!(mirror.orphans(), 2);
    assert_eq!(mirror.counters().orphans_dropped, 1);
    mirror
        .apply(&batch(vec![removed(2), removed(1), removed(3)]))
        .unwrap();
    assert_eq!(mirror.states().gpu, TierState::Partial);
}

#[test]
fn signs_of_a_wrong_mirror_empty_it() {
    let check = |config: MirrorConfig, events: Vec<CacheEvent>, sign: Inconsistency| {
        let mut mirror = Mirror::new(config, Start::Empty);
        mirror.apply(&batch(vec![stored(None, &[1, 2])])).unwrap();
        assert_eq!(mirror.apply(&batch(events)), Err(sign));
        assert_eq!(mirror.held(), []);
        assert_eq!(mirror.digest(), Digest::default());
        assert_eq!(mirror.states().gpu, TierState::Partial);
        // It goes on: a removal of what it forgot is normal now.
        let changes = mirror.apply(&batch(vec![removed(1), stored(None, &[7])]));
        assert_eq!(changes.unwrap().len(), 1);
    };
    let config = known_plain();
    check(config, vec![stored(None, &[2])], Inconsistency::TwoPrefixes);
    let small = MirrorConfig {
        blocks_max: Some(3),
        ..config
    };
    check(small, vec![stored(None, &[1, 2])], Inconsistency::TooMany);
}

#[test]
fn several_engine_hashes_may_mean_one_prefix() {
    let mut follower = Follower::new(Start::Unknown);
    let mut again = run(None, &[1]);
    again.hashes = vec![EngineHash(1001)];
    follower.apply(vec![
        stored(None, &[1]),
        CacheEvent::Stored(Box::new(again)),
    ]);
    follower.apply(vec![removed(1)]);
    assert!(follower.holds(&[1]));
    follower.apply(vec![removed(1001)]);
    assert_eq!(follower.mirror.prefixes(), 0);
}

/// A child keeps the block, which the engine stores by a new hash each time.
#[test]
fn hashes_of_one_prefix_without_references_are_bounded() {
    let mut mirror = mirror(Start::Empty);
    mirror.apply(&batch(vec![stored(None, &[1, 2])])).unwrap();
    let named = |hash: u64| {
        CacheEvent::Stored(Box::new(StoredBlocks {
            hashes: vec![EngineHash(hash)],
            ..run(None, &[1])
        }))
    };
    // Those with references stay, however many.
    let held = 1_000..1_100;
    mirror
        .apply(&batch(held.clone().map(named).collect()))
        .unwrap();
    for hash in 10_000..110_000 {
        let events = vec![named(hash), removed(hash)];
        mirror.apply(&batch(events)).unwrap();
    }
    let kept = |mirror: &Mirror| mirror.engine_hashes.len();
    assert!(
        kept(&mirror) <= 2 + held.clone().count() + ALIASES_MAX,
        "{}",
        kept(&mirror)
    );
    mirror.apply(&batch(held.map(removed).collect())).unwrap();
    assert!(kept(&mirror) <= 2 + ALIASES_MAX, "{}", kept(&mirror));
    assert!(mirror.held().contains(&(prefix(&[1]), Tier::Gpu)));
    mirror.apply(&batch(vec![removed(1)])).unwrap();
    assert_eq!(mirror.held(), [(prefix(&[1, 2]), Tier::Gpu)]);
    mirror.apply(&batch(vec![removed(2)])).unwrap();
    assert_eq!((mirror.prefixes(), kept(&mirror)), (0, 0));
}

#[test]
fn a_clear_empties_gpu_memory_and_forgets_the_rest() {
    let mut follower = Follower::new(Start::Unknown);
    let mut cpu = run(None, &[1]);
    cpu.medium = Medium::Cpu;
    follower.apply(vec![
        stored(None, &[1, 2]),
        stored(Some(77), &[8]),
        CacheEvent::Stored(Box::new(cpu)),
        removed_from(99, Medium::Cpu, 0),
    ]);
    assert_eq!(follower.mirror.held().len(), 3);
    follower.apply(vec![removed(2), CacheEvent::Cleared, stored(None, &[1])]);
    assert_eq!(follower.mirror.held(), [(prefix(&[1]), Tier::Gpu)]);
    assert_eq!(follower.mirror.orphans(), 0);
    let states = follower.mirror.states();
    assert_eq!(states.gpu, TierState::Complete);
    assert_eq!(states.cpu, TierState::Partial);
}

#[test]
fn a_tier_is_credited_from_its_first_store_and_unverified_without_known_removals() {
    let store_in = |medium, assume, reports_removals| {
        let config = MirrorConfig {
            assume,
            ..known_plain()
        };
        let mut mirror = Mirror::new(config, Start::Empty);
        let lower = StoredBlocks {
            medium,
            reports_removals,
            ..run(None, &[1])
        };
        let lower = CacheEvent::Stored(Box::new(lower));
        let events = vec![stored(None, &[1]), lower];
        mirror.apply(&batch(events)).unwrap();
        assert_eq!(mirror.states().gpu, TierState::Complete);
        assert_eq!(mirror.held().len(), 2);
        mirror
    };
    let store = |assume, reports_removals| store_in(Medium::Cpu, assume, reports_removals);
    let assumed = Assumptions {
        removals: true,
        ..Assumptions::default()
    };
    let known = store(Assumptions::default(), true);
    assert_eq!(known.states().cpu, TierState::Complete);
    assert_eq!(store(assumed, false).states().cpu, TierState::Complete);
    let mut unknown = store(Assumptions::default(), false);
    assert_eq!(unknown.limits().cpu, Some(TierLimit::NoRemovals));
    assert_eq!(unknown.states().cpu, TierState::Unverified);
    let without_group = CacheEvent::Removed(RemovedBlocks {
        hashes: Vec::new(),
        medium: Medium::Cpu,
        group: None,
    });
    unknown.apply(&batch(vec![without_group])).unwrap();
    assert_eq!(unknown.states().cpu, TierState::Unverified);
    let removal = vec![removed_from(1, Medium::Cpu, 0)];
    unknown.apply(&batch(removal)).unwrap();
    assert_eq!(unknown.states().cpu, TierState::Complete);
    let mut storage = store_in(Medium::Disk, Assumptions::default(), false);
    let removal = vec![removed_from(1, Medium::Disk, 0)];
    storage.apply(&batch(removal)).unwrap();
    assert_eq!(storage.states().disk, TierState::Unverified);
    let storage = store_in(Medium::Disk, assumed, false);
    assert_eq!(storage.states().disk, TierState::Complete);
}

/// Salted blocks of an engine that sends no extra keys look plain in GPU memory, and so below.
#[test]
fn a_lower_tier_is_no_better_identified_than_gpu_memory() {
    let plain = StoredBlocks {
        reports_extra_keys: false,
        ..run(None, &[1])
    };
    let lower = StoredBlocks {
        medium: Medium::Cpu,
        reports_removals: true,
        ..plain.clone()
    };
    let mut mirror = mirror(Start::Empty);
    let events = [plain, lower].map(|stored| CacheEvent::Stored(Box::new(stored)));
    mirror.apply(&batch(events.to_vec())).unwrap();
    assert_eq!(mirror.limits().cpu, Some(TierLimit::NoExtraKeys));
    assert_eq!(mirror.states().cpu, TierState::Stale);
    assert_eq!(mirror.states().disk, TierState::Complete, "it is not used");
}

#[test]
fn a_placeholder_counts_what_its_hash_names() {
    let mut follower = Follower::new(Start::Empty);
    let mut offloaded = run(None, &[]);
    offloaded.hashes = vec![EngineHash(2)];
    offloaded.block_size = 0;
    offloaded.medium = Medium::Cpu;
    follower.apply(vec![stored(None, &[1, 2])]);
    follower.apply(vec![CacheEvent::Stored(Box::new(offloaded.clone()))]);
    follower.apply(vec![removed(2), removed(1)]);
    assert_eq!(follower.mirror.held(), [(prefix(&[1, 2]), Tier::Cpu)]);
    offloaded.hashes = vec![EngineHash(50)];
    follower.apply(vec![
        CacheEvent::Stored(Box::new(offloaded)),
        removed_from(2, Medium::Cpu, 0),
        removed_from(50, Medium::Cpu, 0),
    ]);
    assert_eq!(follower.mirror.states().cpu, TierState::Partial);
    assert_eq!(follower.mirror.prefixes(), 0);
}

#[test]
fn seeds_are_inherited() {
    let mut follower = Follower::new(Start::Empty);
    let mut root = run(None, &[1]);
    root.lora = LoraRef::Named("my-lora".to_owned());
    root.salt = Some("tenant-a".to_owned());
    let mut child = run(Some(1), &[2]);
    child.lora = LoraRef::Named("my-lora".to_owned());
    follower.apply(vec![CacheEvent::Stored(Box::new(root))]);
    follower.apply(vec![CacheEvent::Stored(Box::new(child))]);
    let seed = Seed::new(Some("my-lora"), Some("tenant-a"));
    let pair = (seeded_prefix(&[1, 2], seed), Tier::Gpu);
    assert!(follower.mirror.held().contains(&pair));
}

/// Behind an unknown parent the seed is not known before the run reaches a block that is.
#[test]
fn seeds_are_inherited_from_a_known_block_within_a_run() {
    let mut follower = Follower::new(Start::Empty);
    let mut root = run(None, &[1, 2]);
    root.salt = Some("tenant-a".to_owned());
    follower.apply(vec![CacheEvent::Stored(Box::new(root))]);
    follower.apply(vec![stored(Some(99), &[2, 3])]);
    let seed = Seed::new(None, Some("tenant-a"));
    let third = (seeded_prefix(&[1, 2, 3], seed), Tier::Gpu);
    assert!(follower.mirror.held().contains(&third));
}

/// From an engine's message: an adapter, a salt, an item over two blocks, and three in one.
#[test]
fn multimodal_blocks_have_the_names_that_routers_compute() {
    let tokens: Vec<u32> = (0..12).collect();
    let keys = json!([
        ["lora-a", ["a", 1], "tenant-a"],
        ["lora-a", ["a", -3], ["b", 2], ["c", 3]],
        ["lora-a"],
    ]);
    let event = json!({
        "type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": null,
        "token_ids": tokens, "block_size": 4, "lora_id": 1, "medium": "GPU",
        "lora_name": "lora-a", "extra_keys": keys, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    });
    let payload = rmp_serde::to_vec(&json!([1.5, [event], 0])).unwrap();
    let mut mirror = mirror(Start::Empty);
    mirror.apply(&Batch::decode(&payload).unwrap()).unwrap();
    let item = |identifier: &str, offset, length| PlacedItem {
        identifier: identifier.into(),
        offset,
        length,
    };
    let items = [item("a", 1, 5), item("b", 6, 1), item("c", 7, 1)];
    let (seed, size) = (
        Seed::new(Some("lora-a"), Some("tenant-a")),
        BlockSize::new(4).unwrap(),
    );
    let locals = hash::local_hashes_with_items(&tokens, size, seed, &items);
    let pairs: BTreeSet<_> = hash::prefix_hashes(None, &locals)
        .map(|prefix| (prefix, Tier::Gpu))
        .collect();
    let held: BTreeSet<_> = mirror.held().into_iter().collect();
    assert_eq!((held.len(), held), (3, pairs));
    assert_eq!(mirror.states().gpu, TierState::Complete);
}

#[test]
fn opaque_blocks_make_their_descendants_opaque() {
    let mut follower = Follower::new(Start::Empty);
    let mut opaque = run(None, &[1, 2]);
    let key = BlockKeys {
        items: Vec::new(),
        opaque: Some(5),
    };
    opaque.keys = vec![(1, key)];
    follower.apply(vec![
        CacheEvent::Stored(Box::new(opaque)),
        stored(Some(2), &[3]),
    ]);
    assert!(follower.holds(&[1]));
    assert!(!follower.holds(&[1, 2]) && !follower.holds(&[1, 2, 3]));
    assert_eq!(follower.mirror.held().len(), 3);
    assert_eq!(follower.gpu(), TierState::Complete);
}

#[test]
fn pairs_of_tokens_and_unnamed_adapters_match_no_query() {
    let mut follower = Follower::new(Start::Empty);
    let mut pairs = run(None, &[1]);
    pairs.tokens = vec![1, 2];
    pairs.tokens_per_position = 2;
    let mut unnamed = run(None, &[4]);
    unnamed.lora = LoraRef::Unnamed(3);
    follower.apply(vec![CacheEvent::Stored(Box::new(pairs))]);
    assert_eq!(follower.gpu(), TierState::Complete);
    follower.apply(vec![CacheEvent::Stored(Box::new(unnamed))]);
    assert_eq!(follower.mirror.held().len(), 2);
    assert!(!follower.holds(&[1]) && !follower.holds(&[4]));
    assert_eq!(follower.gpu(), TierState::Partial);
}

fn unknown(is_store: bool, medium: Option<Medium>, group: Option<u32>) -> CacheEvent {
    CacheEvent::Unknown(UnknownEvent {
        is_store,
        medium,
        group,
    })
}

/// A run in CPU memory, of a connector that publishes removals.
fn offloaded(tokens: &[u32]) -> CacheEvent {
    let mut run = run(None, tokens);
    run.medium = Medium::Cpu;
    run.reports_removals = true;
    CacheEvent::Stored(Box::new(run))
}

#[test]
fn an_unknown_event_lowers_what_it_names_and_costs_no_block() {
    use TierState::{Complete, Partial, Unverified};
    let states = |event: CacheEvent| {
        let mut follower = Follower::new(Start::Empty);
        follower.apply(vec![stored(None, &[1, 2]), offloaded(&[1])]);
        let held = follower.mirror.held();
        follower.apply(vec![event, stored(None, &[7])]);
        follower.apply(vec![removed(7)]);
        assert_eq!(follower.mirror.held(), held, "nothing is lost");
        let TierStates { gpu, cpu, disk } = follower.mirror.states();
        // A clear ends the doubt.
        follower.apply(vec![CacheEvent::Cleared]);
        assert_eq!(follower.gpu(), Complete);
        [gpu, cpu, disk]
    };
    let (gpu, cpu) = (Some(Medium::Gpu), Some(Medium::Cpu));
    // Nothing is held on disk, so that nothing there may be wrong.
    let all = [Unverified, Unverified, Partial];
    assert_eq!(states(unknown(false, None, None)), all);
    let only_gpu = [Unverified, Complete, Complete];
    assert_eq!(states(unknown(false, gpu, Some(0))), only_gpu);
    let only_cpu = [Complete, Unverified, Complete];
    assert_eq!(states(unknown(false, cpu, None)), only_cpu);
    assert_eq!(
        states(unknown(true, gpu, None)),
        [Partial, Complete, Complete]
    );
    assert_eq!(states(unknown(true, None, None)), [Partial; 3]);
    let limit = |event| {
        let mut mirror = mirror(Start::Empty);
        mirror
            .apply(&batch(vec![stored(None, &[1]), event]))
            .unwrap();
        mirror.limits().gpu
    };
    let unknown_event = limit(unknown(false, None, None));
    assert_eq!(unknown_event, Some(TierLimit::UnknownEvent));
    assert_eq!(limit(unknown(true, None, None)), Some(TierLimit::History));
}

/// An unknown event before a clear is over with it; one behind a clear is not.
#[test]
fn an_unknown_event_counts_at_its_place_in_the_batch() {
    let state = |events: Vec<CacheEvent>| {
        let mut follower = Follower::new(Start::Empty);
        follower.apply(events);
        follower.gpu()
    };
    let odd = || unknown(false, None, None);
    let before = vec![odd(), CacheEvent::Cleared, stored(None, &[1])];
    assert_eq!(state(before), TierState::Complete);
    let behind = vec![CacheEvent::Cleared, stored(None, &[1]), odd()];
    assert_eq!(state(behind), TierState::Unverified);
}

#[test]
fn a_removal_of_an_unknown_block_costs_no_credit() {
    for (start, limit) in [
        (Start::Empty, TierLimit::Unpaired),
        (Start::Unknown, TierLimit::History),
    ] {
        let mut follower = Follower::new(start);
        follower.apply(vec![stored(None, &[1, 2, 3])]);
        follower.apply(vec![removed(9), removed(3), removed(3)]);
        assert!(follower.holds(&[1, 2]) && !follower.holds(&[1, 2, 3]));
        assert_eq!(follower.mirror.counters().removals_unknown, 2);
        assert_eq!(follower.gpu(), TierState::Partial);
        assert_eq!(follower.mirror.limits().gpu, Some(limit));
        // Another tier is not concerned, and what follows is credited.
        follower.apply(vec![offloaded(&[1]), stored(Some(2), &[4])]);
        assert!(follower.holds(&[1, 2, 4]));
        let cpu = follower.mirror.limits().cpu;
        let expected = (start == Start::Unknown).then_some(TierLimit::History);
        assert_eq!(cpu, expected);
        follower.apply(vec![CacheEvent::Cleared]);
        assert_eq!(follower.gpu(), TierState::Complete);
    }
}

/// Stores name a group and removals do not, or the reverse: a removal may mean a credited block.
#[test]
fn a_removal_that_names_its_group_otherwise_ends_exact_and_partial() {
    let of = |store_group: Option<u32>, removal_group: Option<u32>| {
        let mut follower = Follower::new(Start::Empty);
        let mut run = run(None, &[1, 2]);
        run.group.index = store_group;
        follower.apply(vec![CacheEvent::Stored(Box::new(run))]);
        follower.apply(vec![CacheEvent::Removed(RemovedBlocks {
            hashes: vec![EngineHash(2)],
            medium: Medium::Gpu,
            group: removal_group,
        })]);
        (follower.gpu(), follower.holds(&[1, 2]))
    };
    assert_eq!(of(Some(0), Some(0)), (TierState::Complete, false));
    assert_eq!(of(None, None), (TierState::Complete, false));
    assert_eq!(of(Some(0), None), (TierState::Unverified, true));
    assert_eq!(of(None, Some(0)), (TierState::Unverified, true));
    // Its group is one that no store named yet, as a late start sees it.
    assert_eq!(of(Some(0), Some(1)), (TierState::Partial, true));
}

#[test]
fn a_payload_that_does_not_decode_empties_the_mirror() {
    let mut mirror = mirror(Start::Empty);
    mirror.apply(&batch(vec![stored(None, &[1, 2])])).unwrap();
    assert_eq!(mirror.reject_payload(), Inconsistency::Undecodable);
    assert_eq!(mirror.held(), []);
    assert_eq!(mirror.states().gpu, TierState::Partial);
    let events = vec![removed(1), stored(None, &[7])];
    mirror.apply(&batch(events)).unwrap();
    assert_eq!(mirror.held(), [(prefix(&[7]), Tier::Gpu)]);
    assert_eq!(mirror.states().gpu, TierState::Partial);
}

#[test]
fn a_group_of_an_unknown_kind_lowers_the_state_to_partial() {
    let mut follower = Follower::new(Start::Empty);
    let of_unknown_kind = |parent, tokens: &[u32]| {
        let mut run = run(parent, tokens);
        run.group = BlockGroup {
            index: Some(7),
            kind: Some(GroupKind::Unknown),
        };
        CacheEvent::Stored(Box::new(run))
    };
    follower.apply(vec![stored(None, &[1, 2])]);
    assert_eq!(follower.gpu(), TierState::Complete);
    // Only blocks that the unknown group holds as well may be credited.
    follower.apply(vec![of_unknown_kind(None, &[1])]);
    assert!(follower.holds(&[1]) && !follower.holds(&[1, 2]));
    assert_eq!(follower.gpu(), TierState::Partial);
    assert!(!follower.mirror.main_attention_only());
    follower.apply(vec![removed_from(1, Medium::Gpu, 7)]);
    assert!(!follower.holds(&[1]));
    follower.apply(vec![CacheEvent::Cleared, stored(None, &[3])]);
    assert!(!follower.holds(&[3]));
    follower.apply(vec![of_unknown_kind(None, &[3])]);
    assert!(follower.holds(&[3]));
    assert_eq!(follower.gpu(), TierState::Partial);
}

/// vLLM's offloading connector sends tokens but no extra keys: a salted block looks like a plain
/// one.
#[test]
fn a_lower_tiers_store_without_keys_counts_for_known_blocks_only() {
    let mut salted = run(None, &[1]);
    salted.salt = Some("tenant".to_owned());
    let mut known = run(None, &[1]);
    known.medium = Medium::Cpu;
    known.reports_extra_keys = false;
    let mut unknown = known.clone();
    unknown.hashes = vec![EngineHash(2)];
    unknown.tokens = vec![2];
    let mut mirror = Mirror::new(known_plain(), Start::Empty);
    let events = [salted, known, unknown].map(|stored| CacheEvent::Stored(Box::new(stored)));
    mirror.apply(&batch(events.to_vec())).unwrap();
    let salted = LocalHash::of_block(&[1], &[], Seed::new(None, Some("tenant")));
    let prefix = PrefixHash::after(None, salted);
    assert_eq!(
        mirror.held(),
        [(prefix, Tier::Gpu), (prefix, Tier::Cpu)],
        "the salted block in both tiers, and nothing that its tokens alone would name"
    );
    assert_eq!(mirror.states().gpu, TierState::Complete);
    assert_ne!(mirror.states().cpu, TierState::Complete);
}

/// Chunks of `blocks` tokens, as blocks have one token here; a chunk's hash is its last token.
fn chunks(parent: Option<u64>, tokens: &[u32], blocks: usize) -> CacheEvent {
    let hashes = tokens.chunks(blocks).map(|chunk| chunk[chunk.len() - 1]);
    CacheEvent::Stored(Box::new(StoredBlocks {
        hashes: hashes.map(|last| EngineHash(u64::from(last))).collect(),
        block_size: u32::try_from(blocks).unwrap(),
        medium: Medium::Cpu,
        reports_extra_keys: false,
        // As LMCache's medium is named, which may publish no removals.
        reports_removals: true,
        ..run(parent, tokens)
    }))
}

fn with_plain_chunks() -> Mirror {
    let assume = Assumptions {
        no_extra_keys: true,
        no_lora: true,
        ..Assumptions::default()
    };
    let config = MirrorConfig {
        assume,
        ..known_plain()
    };
    Mirror::new(config, Start::Empty)
}

fn held_in(mirror: &Mirror, tier: Tier) -> BTreeSet<PrefixHash> {
    let held = mirror.held().into_iter().filter(|&(_, of)| of == tier);
    held.map(|(prefix, _)| prefix).collect()
}

fn prefixes_up_to(tokens: &[u32]) -> BTreeSet<PrefixHash> {
    (1..=tokens.len())
        .map(|end| prefix(&tokens[..end]))
        .collect()
}

/// An LMCache server whose events never come, and an engine without a connector after a reset.
#[test]
fn a_lower_tier_that_nobody_reports_is_partial_if_there_is_a_connector() {
    let mut mirror = mirror(Start::Empty);
    mirror.apply(&batch(vec![stored(None, &[1])])).unwrap();
    let lower = |mirror: &Mirror| (mirror.states().cpu, mirror.states().disk);
    let complete = (TierState::Complete, TierState::Complete);
    let partial = (TierState::Partial, TierState::Partial);
    assert_eq!(lower(&mirror), complete, "not known");
    mirror.set_connector(Some(true));
    assert_eq!(lower(&mirror), partial);
    assert_eq!(mirror.limits().cpu, Some(TierLimit::Silent));
    assert_eq!(mirror.states().gpu, TierState::Complete);
    mirror.forget();
    assert_eq!(lower(&mirror), partial);
    mirror.set_connector(Some(false));
    let absent = (TierState::Absent, TierState::Absent);
    assert_eq!(lower(&mirror), absent, "it has no such tier");
    assert_eq!(mirror.states().gpu, TierState::Partial);
}

#[test]
fn a_lower_tiers_chunk_counts_as_its_blocks() {
    let mut mirror = with_plain_chunks();
    let tokens = [11, 12, 13, 14, 15, 16, 17, 18, 19];
    mirror.apply(&batch(vec![stored(None, &[1])])).unwrap();
    mirror
        .apply(&batch(vec![chunks(None, &tokens[..6], 3)]))
        .unwrap();
    assert_eq!(held_in(&mirror, Tier::Cpu), prefixes_up_to(&tokens[..6]));
    mirror
        .apply(&batch(vec![chunks(Some(16), &tokens[6..], 3)]))
        .unwrap();
    assert_eq!(held_in(&mirror, Tier::Cpu), prefixes_up_to(&tokens));
    assert_eq!(mirror.limits().cpu, Some(TierLimit::NoRemovals));
    // One of two copies.
    mirror
        .apply(&batch(vec![chunks(Some(16), &tokens[6..], 3)]))
        .unwrap();
    mirror
        .apply(&batch(vec![removed_from(19, Medium::Cpu, 0)]))
        .unwrap();
    assert_eq!(held_in(&mirror, Tier::Cpu), prefixes_up_to(&tokens));
    mirror
        .apply(&batch(vec![removed_from(19, Medium::Cpu, 0)]))
        .unwrap();
    assert_eq!(held_in(&mirror, Tier::Cpu), prefixes_up_to(&tokens[..6]));
    assert_eq!(mirror.limits().cpu, Some(TierLimit::Chunks));
    assert_eq!(mirror.states().cpu, TierState::Unverified);
    mirror
        .apply(&batch(vec![removed_from(13, Medium::Cpu, 0)]))
        .unwrap();
    mirror
        .apply(&batch(vec![removed_from(16, Medium::Cpu, 0)]))
        .unwrap();
    assert_eq!(mirror.held(), [(prefix(&[1]), Tier::Gpu)]);
    assert_eq!(mirror.counters().removals_unknown, 0);
}

#[test]
fn a_chunk_below_an_unknown_one_waits_for_it() {
    let mut mirror = with_plain_chunks();
    let tokens = [11, 12, 13, 14];
    mirror.apply(&batch(vec![stored(None, &[1])])).unwrap();
    mirror
        .apply(&batch(vec![chunks(Some(12), &tokens[2..], 2)]))
        .unwrap();
    assert!(held_in(&mirror, Tier::Cpu).is_empty());
    assert_ne!(mirror.states().cpu, TierState::Complete);
    let mut removed_first = mirror.clone();
    removed_first
        .apply(&batch(vec![removed_from(14, Medium::Cpu, 0)]))
        .unwrap();
    assert_eq!(removed_first.orphans(), 0);
    mirror
        .apply(&batch(vec![chunks(None, &tokens[..2], 2)]))
        .unwrap();
    assert_eq!(held_in(&mirror, Tier::Cpu), prefixes_up_to(&tokens));
}

#[test]
fn chunks_that_cannot_be_split_are_missing() {
    let with_keys = |event: CacheEvent| {
        let CacheEvent::Stored(mut stored) = event else {
            unreachable!()
        };
        stored.reports_extra_keys = true;
        stored.keys = vec![(0, BlockKeys::default())];
        CacheEvent::Stored(stored)
    };
    let mut two = run(None, &[1, 2]);
    two.hashes.pop();
    two.block_size = 2;
    let of_two = CacheEvent::Stored(Box::new(two));
    let uneven = chunks(None, &[11, 12, 13, 14, 15], 5);
    let keyed = with_keys(chunks(None, &[11, 12, 13, 14], 4));
    for chunk in [uneven, keyed] {
        let CacheEvent::Stored(whole) = &chunk else {
            unreachable!()
        };
        assert_eq!(chunks::split(whole, BlockSize::new(2).unwrap()), None);
        let mut mirror = with_plain_chunks();
        mirror.apply(&batch(vec![of_two.clone()])).unwrap();
        mirror.apply(&batch(vec![chunk])).unwrap();
        assert!(held_in(&mirror, Tier::Cpu).is_empty());
        assert_eq!(mirror.states().gpu, TierState::Complete);
        assert_ne!(mirror.states().cpu, TierState::Complete);
    }
    // A salted chunk, or one of an adapter, may look plain.
    for (no_extra_keys, no_lora) in [(false, true), (true, false)] {
        let assume = Assumptions {
            no_extra_keys,
            no_lora,
            ..Assumptions::default()
        };
        let config = MirrorConfig {
            assume,
            ..known_plain()
        };
        let mut mirror = Mirror::new(config, Start::Empty);
        mirror.apply(&batch(vec![stored(None, &[1])])).unwrap();
        mirror
            .apply(&batch(vec![chunks(None, &[11, 12], 2)]))
            .unwrap();
        assert!(held_in(&mirror, Tier::Cpu).is_empty());
    }
}

#[test]
fn events_that_lack_a_field_are_never_complete_unless_it_is_said_to_be_unused() {
    let mut plain = run(None, &[1]);
    plain.reports_extra_keys = false;
    plain.group = BlockGroup::default();
    let mut second = plain.clone();
    second.group.index = Some(1);
    let mut with_kind = plain.clone();
    with_kind.group.kind = MAIN;
    let stores = |stores: [StoredBlocks; 2]| {
        stores
            .map(|stored| CacheEvent::Stored(Box::new(stored)))
            .to_vec()
    };
    let without_kinds = stores([plain, second.clone()]);
    let with_one_kind = stores([with_kind, second]);
    for (assume, state) in [
        (Assumptions::default(), TierState::Stale),
        (
            Assumptions {
                no_extra_keys: true,
                ..Assumptions::default()
            },
            TierState::Stale,
        ),
        (
            Assumptions {
                no_extra_keys: true,
                main_attention_only: true,
                ..Assumptions::default()
            },
            TierState::Complete,
        ),
    ] {
        let config = MirrorConfig {
            assume,
            ..known_plain()
        };
        for events in [&without_kinds, &with_one_kind] {
            let mut mirror = Mirror::new(config, Start::Empty);
            mirror.apply(&batch(events.clone())).unwrap();
            assert_eq!(mirror.states().gpu, state);
        }
    }
}

// --- against an independent model

/// More than a block keeps.
const NAMES: u32 = 6;

/// A block by its path of tokens, and by which of its engine hashes it is named.
type Key = (Vec<u32>, u32);

#[derive(Clone, Debug)]
enum Op {
    Store {
        path: Vec<u32>,
        from: usize,
        variant: u32,
        group: u32,
        medium: Medium,
    },
    Remove {
        pick: prop::sample::Index,
    },
    RemoveAny {
        path: Vec<u32>,
        group: u32,
        medium: Medium,
    },
    Clear,
}

fn ops() -> impl Strategy<Value = Op> {
    let path = || proptest::collection::vec(1..3_u32, 1..5);
    let medium = || prop_oneof![4 => Just(Medium::Gpu), 1 => Just(Medium::Cpu)];
    prop_oneof![
        20 => (path(), 0..4_usize, 0..12_u32, 0..12_u32, medium()).prop_map(
            |(path, from, variant, group, medium)| Op::Store {
                from: from.min(path.len() - 1),
                path,
                variant: variant.saturating_sub(12 - NAMES),
                group: group / 11,
                medium,
            }
        ),
        20 => any::<prop::sample::Index>().prop_map(|pick| Op::Remove { pick }),
        2 => (path(), 0..2_u32, medium()).prop_map(|(path, group, medium)| Op::RemoveAny {
            path,
            group,
            medium,
        }),
        1 => Just(Op::Clear),
    ]
}

/// Everything by definition, nothing incremental.
#[derive(Default)]
struct Naive {
    counts: BTreeMap<(Key, u32, Tier), u32>,
    /// Blocks whose position is known; the others are orphans.
    named: BTreeSet<Key>,
    /// The first name of each block, which stays as long as it does.
    first: BTreeMap<Vec<u32>, u32>,
    /// Stored blocks without a position that are counted, or lead to such a block.
    orphans: BTreeSet<Key>,
    groups: BTreeSet<(Tier, u32)>,
    is_cleared: bool,
}

impl Naive {
    fn hash((path, variant): &Key) -> EngineHash {
        let digits = path.iter().fold(0, |sum, &t| sum * 10 + u64::from(t));
        EngineHash(digits + u64::from(*variant) * 1_000_000)
    }

    fn parent((path, variant): &Key) -> Option<Key> {
        let (_, parent) = path.split_last()?;
        (!parent.is_empty()).then(|| (parent.to_vec(), *variant))
    }

    /// The event of an operation, applied here as well.
    fn event(&mut self, op: &Op) -> Option<CacheEvent> {
        match op {
            Op::Store {
                path,
                from,
                variant,
                group,
                medium,
            } => Some(self.store(path, *from, *variant, *group, *medium)),
            Op::Remove { pick } => {
                let keys: Vec<_> = self.counts.keys().cloned().collect();
                let (key, group, tier) = keys.get(pick.index(keys.len().max(1)))?.clone();
                Some(self.remove(&key, group, tier))
            }
            Op::RemoveAny {
                path,
                group,
                medium,
            } => {
                let key = (path.clone(), 0);
                let tier = medium.tier();
                let counted = self.counts.contains_key(&(key.clone(), *group, tier));
                // After a clear everything is known: removing something else would be a sign.
                let allowed = counted || tier != Tier::Gpu || !self.is_cleared;
                allowed.then(|| self.remove(&key, *group, tier))
            }
            Op::Clear => {
                self.is_cleared = true;
                self.counts.clear();
                self.named.clear();
                self.first.clear();
                self.orphans.clear();
                Some(CacheEvent::Cleared)
            }
        }
    }

    fn store(
        &mut self,
        path: &[u32],
        from: usize,
        variant: u32,
        group: u32,
        at: Medium,
    ) -> CacheEvent {
        self.groups.insert((at.tier(), group));
        let mut hashes = Vec::new();
        for depth in from..path.len() {
            let key = (path[..=depth].to_vec(), variant);
            hashes.push(Self::hash(&key));
            if !self.named.contains(&key) {
                self.orphans.insert(key.clone());
            }
            *self.counts.entry((key, group, at.tier())).or_default() += 1;
        }
        self.name();
        let parent = (from > 0).then(|| Self::hash(&(path[..from].to_vec(), variant)));
        CacheEvent::Stored(Box::new(StoredBlocks {
            hashes,
            parent,
            medium: at,
            group: self::group(group),
            ..run(None, &path[from..])
        }))
    }

    fn remove(&mut self, key: &Key, group: u32, tier: Tier) -> CacheEvent {
        let at = (key.clone(), group, tier);
        if self.groups.contains(&(tier, group))
            && let Some(count) = self.counts.get_mut(&at)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&at);
                self.drop_name(key);
            }
        }
        self.drop_orphans();
        let medium = if tier == Tier::Gpu {
            Medium::Gpu
        } else {
            Medium::Cpu
        };
        removed_from(Self::hash(key).0, medium, group)
    }

    /// A block of many names keeps none, but its first, by which nothing holds it.
    fn drop_name(&mut self, key: &Key) {
        let names = self.named.iter().filter(|(path, _)| *path == key.0).count();
        let is_counted = self.counts.keys().any(|(counted, _, _)| counted == key);
        if names > 1 + ALIASES_MAX && !is_counted && self.first.get(&key.0) != Some(&key.1) {
            self.named.remove(key);
        }
    }

    /// A block whose parent's position is known has a position; so has one at a start.
    fn name(&mut self) {
        while let Some(found) = self
            .orphans
            .iter()
            .find(|key| Self::parent(key).is_none_or(|parent| self.named.contains(&parent)))
            .cloned()
        {
            self.orphans.remove(&found);
            self.first.entry(found.0.clone()).or_insert(found.1);
            self.named.insert(found);
        }
    }

    fn drop_orphans(&mut self) {
        let is_useless = |key: &Key, all: &BTreeSet<Key>| {
            let counted = self.counts.keys().any(|(counted, _, _)| counted == key);
            let leads = all
                .iter()
                .any(|other| Self::parent(other).as_ref() == Some(key));
            !counted && !leads
        };
        while let Some(key) = self
            .orphans
            .iter()
            .find(|key| is_useless(key, &self.orphans))
            .cloned()
        {
            self.orphans.remove(&key);
        }
    }

    /// A position is kept for what is counted and for its ancestors.
    fn end_of_batch(&mut self) {
        let mut kept = BTreeSet::new();
        for (key, _, _) in self.counts.keys() {
            if !self.named.contains(key) {
                continue;
            }
            for depth in 0..key.0.len() {
                // Any name of an ancestor stays with the ancestor.
                kept.extend((0..NAMES).map(|variant| (key.0[..=depth].to_vec(), variant)));
            }
        }
        self.named = self.named.intersection(&kept).cloned().collect();
        let named = &self.named;
        self.first
            .retain(|path, variant| named.contains(&(path.clone(), *variant)));
    }

    fn held(&self) -> Vec<(PrefixHash, Tier)> {
        let mut held = BTreeSet::new();
        for ((path, _), _) in self.named.iter().map(|key| (key, ())) {
            for tier in [Tier::Gpu, Tier::Cpu] {
                let mut groups = (0..2).filter(|&group| self.groups.contains(&(tier, group)));
                let by_all = groups.all(|group| {
                    (0..NAMES).any(|variant| {
                        let key = (path.clone(), variant);
                        self.named.contains(&key) && self.counts.contains_key(&(key, group, tier))
                    })
                });
                if by_all && (0..2).any(|group| self.groups.contains(&(tier, group))) {
                    held.insert((prefix(path), tier));
                }
            }
        }
        held.into_iter().collect()
    }
}

proptest! {
    #[test]
    fn random_operations_agree_with_the_naive_model(
        batches in proptest::collection::vec(proptest::collection::vec(ops(), 1..6), 1..40)
    ) {
        let mut naive = Naive::default();
        let mut follower = Follower::new(Start::Unknown);
        follower.mirror.suggest_block_size(BlockSize::new(1).unwrap());
        for ops in &batches {
            let mut events = Vec::new();
            for op in ops {
                events.extend(naive.event(op));
            }
            follower.apply(events);
            naive.end_of_batch();
            prop_assert_eq!(follower.mirror.held(), naive.held());
        }
        let rest: Vec<_> = naive.counts.clone().into_iter().collect();
        for ((key, group, tier), count) in rest {
            for _ in 0..count {
                let event = naive.remove(&key, group, tier);
                follower.apply(vec![event]);
            }
        }
        prop_assert_eq!(follower.mirror.prefixes(), 0);
        prop_assert_eq!(follower.mirror.orphans(), 0);
    }
}

/// A run of blocks of one token each behind which the hash covers one token more: a block's engine
/// hash is its token and the one behind it.
fn looking_ahead(parent: Option<u64>, tokens: &[u32]) -> StoredBlocks {
    let hash = |pair: &[u32]| EngineHash(u64::from(pair[0]) * 1000 + u64::from(pair[1]));
    let named = tokens.len() - 1;
    StoredBlocks {
        hashes: tokens.windows(2).map(hash).collect(),
        parent: parent.map(EngineHash),
        tokens: tokens[..named].to_vec(),
        lookahead: 1,
        lookahead_tokens: tokens[1..].to_vec(),
        ..run(None, &[])
    }
}

/// vLLM 0.33 with EAGLE or MTP: a block can be reused only if the tokens behind it are the same.
#[test]
fn a_block_with_a_lookahead_has_the_name_that_a_router_gives_it() {
    let size = BlockSize::new(1).unwrap();
    let cut = BlockCut { size, lookahead: 1 };
    let prompt = |tokens: &[u32]| hash::prompt_hashes(tokens, cut, Seed::PLAIN);
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![CacheEvent::Stored(Box::new(looking_ahead(
        None,
        &[1, 2, 3],
    )))]);
    let held = |follower: &Follower| -> Vec<PrefixHash> {
        let held = follower.mirror.held();
        held.into_iter().map(|(prefix, _)| prefix).collect()
    };
    let sorted = |mut prefixes: Vec<PrefixHash>| {
        prefixes.sort_unstable();
        prefixes
    };
    assert_eq!(held(&follower), sorted(prompt(&[1, 2, 3])));
    assert_eq!(follower.mirror.block_cut(), Some(cut));
    assert_eq!(follower.gpu(), TierState::Complete);
    // Another token behind a block makes another block, for the engine too.
    follower.apply(vec![CacheEvent::Stored(Box::new(looking_ahead(
        Some(1002),
        &[2, 4],
    )))]);
    let both = [prompt(&[1, 2, 3]), prompt(&[1, 2, 4])].concat();
    let both: BTreeSet<PrefixHash> = both.into_iter().collect();
    assert_eq!(held(&follower), both.into_iter().collect::<Vec<_>>());
    follower.apply(vec![removed(2003)]);
    assert_eq!(held(&follower), sorted(prompt(&[1, 2, 4])));
    // An orphan has it too, once its parent is known.
    let behind_unknown = looking_ahead(Some(5006), &[6, 7]);
    follower.apply(vec![CacheEvent::Stored(Box::new(behind_unknown))]);
    follower.apply(vec![CacheEvent::Stored(Box::new(looking_ahead(
        None,
        &[5, 6],
    )))]);
    assert!(
        prompt(&[5, 6, 7])
            .iter()
            .all(|prefix| held(&follower).contains(prefix))
    );
    assert_eq!(follower.gpu(), TierState::Complete);
}

/// Where names cover what drafts depend on, vLLM drops no block of a hit.
#[test]
fn an_engine_with_a_lookahead_is_complete_though_it_speculates() {
    for speculates in [Some(true), Some(false), None] {
        let config = MirrorConfig {
            speculates,
            ..MirrorConfig::default()
        };
        let mut mirror = Mirror::new(config, Start::Empty);
        let stored = CacheEvent::Stored(Box::new(looking_ahead(None, &[1, 2])));
        mirror.apply(&batch(vec![stored])).unwrap();
        assert_eq!(mirror.lookup_doubt(), None);
        assert_eq!(mirror.states().gpu, TierState::Complete);
    }
}

/// One engine has one length: a block of another one has no name that a router could give it.
#[test]
fn a_store_with_another_lookahead_is_missing() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![CacheEvent::Stored(Box::new(looking_ahead(
        None,
        &[1, 2],
    )))]);
    follower.apply(vec![stored(None, &[7])]);
    assert_eq!(follower.mirror.held().len(), 1);
    assert_eq!(follower.mirror.limits().gpu, Some(TierLimit::Unidentified));
    // Another life may have another one.
    follower.mirror.begin(Start::Empty);
    let changes = follower.mirror.apply(&batch(vec![stored(None, &[7])]));
    assert_eq!(changes.unwrap().len(), 1);
    assert_eq!(
        follower.mirror.block_cut(),
        Some(BlockSize::new(1).unwrap().into())
    );
}
