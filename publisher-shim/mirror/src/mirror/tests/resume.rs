//! Resume points against vLLM's prefix lookup, written down as vLLM has it.

use std::num::NonZeroU32;

use super::*;

fn sliding(tokens: u32) -> GroupKind {
    GroupKind::Sliding(NonZeroU32::new(tokens).unwrap())
}

fn store_in(group: u32, kind: GroupKind, parent: Option<u64>, tokens: &[u32]) -> StoredBlocks {
    let mut run = run(parent, tokens);
    run.group = BlockGroup {
        index: Some(group),
        kind: Some(kind),
    };
    run
}

fn event(stored: StoredBlocks) -> CacheEvent {
    CacheEvent::Stored(Box::new(stored))
}

fn point(tokens: &[u32]) -> PrefixHash {
    let root = PrefixHash::after(None, LocalHash::RESUME_ROOT);
    let locals = tokens
        .iter()
        .map(|&token| LocalHash::of_block(&[token], &[], Seed::PLAIN));
    locals.fold(root, |above, local| PrefixHash::after(Some(above), local))
}

/// The deepest resume point of a prompt whose block is one token.
fn credit(mirror: &Mirror, prompt: &[u32], max: usize) -> usize {
    let held = mirror.held();
    let is_held = |depth: &usize| held.contains(&(point(&prompt[..*depth]), Tier::Gpu));
    (1..=max.min(prompt.len())).rev().find(is_held).unwrap_or(0)
}

#[test]
fn a_hit_needs_the_window_of_every_sliding_group() {
    let mut follower = Follower::new(Start::Empty);
    // The sliding groups' events come first, and name the last two of four blocks.
    let mut tail = store_in(0, sliding(3), None, &[1, 2, 3, 4]);
    tail.hashes.drain(..2);
    let mut other = store_in(1, sliding(3), None, &[1, 2, 3, 4]);
    other.hashes.drain(..2);
    let full = store_in(2, GroupKind::Main, None, &[1, 2, 3, 4]);
    follower.apply(vec![event(tail), event(other), event(full)]);
    assert_eq!(follower.gpu(), TierState::Complete);
    assert_eq!(credit(&follower.mirror, &[1, 2, 3, 4, 5], 5), 4);
    assert_eq!(credit(&follower.mirror, &[1, 2, 3, 9], 4), 0, "no window");
    // Nothing is held where a reader without the rule would look.
    assert!(!follower.holds(&[1]) && !follower.holds(&[1, 2, 3, 4]));
    follower.apply(vec![removed_from(3, Medium::Gpu, 1)]);
    assert_eq!(credit(&follower.mirror, &[1, 2, 3, 4], 4), 0);
    assert_eq!(follower.gpu(), TierState::Complete);
    follower.apply(vec![CacheEvent::Cleared]);
    assert_eq!(follower.mirror.prefixes(), 0);
}

#[test]
fn a_shorter_prefix_needs_all_of_its_blocks_only() {
    let mut follower = Follower::new(Start::Empty);
    let full = store_in(0, GroupKind::Main, None, &[1, 2]);
    let window = store_in(1, sliding(100), None, &[1, 2]);
    follower.apply(vec![event(full), event(window)]);
    assert_eq!(credit(&follower.mirror, &[1, 2], 2), 2);
    assert_eq!(credit(&follower.mirror, &[1, 2], 1), 1);
    follower.apply(vec![removed_from(2, Medium::Gpu, 1)]);
    assert_eq!(credit(&follower.mirror, &[1, 2], 2), 1);
    follower.apply(vec![removed_from(1, Medium::Gpu, 0)]);
    assert_eq!(credit(&follower.mirror, &[1, 2], 2), 0);
}

#[test]
fn a_state_counts_where_it_is_and_is_declared() {
    let mut follower = Follower::new(Start::Empty);
    let full = store_in(0, GroupKind::Main, None, &[1, 2, 3]);
    let mut state = store_in(1, GroupKind::State, None, &[1, 2, 3]);
    state.hashes = vec![EngineHash(2)];
    let events = vec![event(full), event(state)];
    follower.apply(events.clone());
    assert_eq!(credit(&follower.mirror, &[1, 2, 3], 3), 2);
    assert_eq!(follower.gpu(), TierState::Unverified);
    let doubt = follower.mirror.lookup_doubt();
    assert_eq!(doubt, Some(LookupDoubt::StateSpace));

    let mut config = MirrorConfig::default();
    config.assume.plain_lookup = true;
    let mut declared = Mirror::new(config, Start::Empty);
    declared.apply(&batch(events)).unwrap();
    assert_eq!(declared.states().gpu, TierState::Complete);
}

#[test]
fn speculation_and_unknown_metrics_are_never_complete() {
    let full = || event(store_in(0, GroupKind::Main, None, &[1]));
    let window = || event(store_in(1, sliding(2), None, &[1]));
    for (speculates, events, state) in [
        (None, vec![full()], TierState::Unverified),
        (Some(false), vec![full()], TierState::Complete),
        (Some(true), vec![full()], TierState::Unverified),
        (Some(true), vec![full(), window()], TierState::Unverified),
        (None, vec![full(), window()], TierState::Unverified),
        (Some(false), vec![full(), window()], TierState::Complete),
    ] {
        let mut mirror = mirror(Start::Empty);
        mirror.set_speculation(speculates);
        mirror.apply(&batch(events)).unwrap();
        assert_eq!(mirror.states().gpu, state, "{speculates:?}");
    }
}

#[test]
fn a_window_that_shows_late_makes_resume_points_of_what_is_held() {
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![event(store_in(0, GroupKind::Main, None, &[1, 2, 3]))]);
    assert!(follower.holds(&[1, 2, 3]));
    let late = event(store_in(1, sliding(2), Some(1), &[2]));
    follower.apply(vec![late]);
    assert!(!follower.holds(&[1]));
    assert_eq!(credit(&follower.mirror, &[1, 2, 3], 3), 2);
    // A second window is another condition.
    follower.apply(vec![event(store_in(2, sliding(3), None, &[1]))]);
    assert_eq!(credit(&follower.mirror, &[1, 2, 3], 3), 0);
    follower.apply(vec![event(store_in(2, sliding(3), Some(1), &[2]))]);
    assert_eq!(credit(&follower.mirror, &[1, 2, 3], 3), 2);
    assert_eq!(follower.gpu(), TierState::Complete);
}

#[test]
fn what_cannot_be_placed_is_missing() {
    let full = || event(store_in(0, GroupKind::Main, None, &[1]));
    let mut other_size = store_in(1, sliding(2), None, &[1]);
    other_size.block_size = 2;
    let stranger = store_in(1, sliding(2), Some(8), &[9]);
    let mut cpu = store_in(0, GroupKind::Main, None, &[1]);
    cpu.medium = Medium::Cpu;
    let window = store_in(1, sliding(2), None, &[1]);
    for (events, credited) in [
        (vec![full(), event(other_size)], 0),
        (vec![full(), event(stranger)], 0),
        (vec![full(), event(window.clone())], 1),
    ] {
        let mut follower = Follower::new(Start::Empty);
        follower.apply(events);
        let is_missing = follower.gpu() == TierState::Partial;
        assert_eq!(is_missing, credited == 0);
        assert_eq!(credit(&follower.mirror, &[1], 1), credited);
    }
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![full(), event(window), event(cpu)]);
    follower.apply(vec![removed_from(1, Medium::Cpu, 0)]);
    assert_ne!(follower.mirror.states().cpu, TierState::Complete);
    assert_eq!(follower.gpu(), TierState::Complete);
}

#[test]
fn a_model_without_full_attention_places_its_blocks_by_vllms_hashes() {
    let names: Vec<EngineHash> = (1..=5).map(|end| Engine::name(&PROMPT[..end])).collect();
    let of = |from: usize, to: usize, named: &[usize]| {
        let parent = from.checked_sub(1).map(|last| names[last].0);
        let mut stored = store_in(0, sliding(3), parent, &PROMPT[from..to]);
        stored.hashes = named.iter().map(|&block| names[block]).collect();
        stored
    };
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![event(of(0, 4, &[2, 3]))]);
    assert_eq!(credit(&follower.mirror, &PROMPT, 5), 4);
    follower.mirror = save::reloaded(&follower.mirror);
    follower.apply(vec![event(of(4, 5, &[4]))]);
    assert_eq!(credit(&follower.mirror, &PROMPT, 5), 5);
    assert_eq!(follower.gpu(), TierState::Complete);
    // With a key that the event does not show, the hash is another one.
    let mut salted = of(0, 4, &[]);
    salted.hashes = vec![EngineHash(77)];
    follower.apply(vec![event(salted)]);
    assert_eq!(follower.gpu(), TierState::Partial);
}

#[test]
fn four_different_windows_are_counted_and_a_fifth_ends_credit() {
    for (windows, state) in [(4, TierState::Complete), (5, TierState::Stale)] {
        let of_group = |group| event(store_in(group, sliding(group + 2), None, &PROMPT));
        let mut events: Vec<CacheEvent> = (0..windows).map(of_group).collect();
        events.push(event(store_in(windows, GroupKind::Main, None, &PROMPT)));
        let mut follower = Follower::new(Start::Empty);
        follower.apply(events);
        assert_eq!(follower.gpu(), state, "{windows} windows");
    }
}

/// Hashes of another function place nothing, but an event that names all its blocks needs no place.
#[test]
fn a_store_of_windows_only_that_names_all_its_blocks_counts_whatever_its_hashes() {
    let mut stored = store_in(0, sliding(3), None, &PROMPT);
    stored.hashes = (71..76).map(EngineHash).collect();
    let mut follower = Follower::new(Start::Empty);
    follower.apply(vec![event(stored)]);
    assert_eq!(credit(&follower.mirror, &PROMPT, 5), 5);
    assert_eq!(follower.gpu(), TierState::Complete);
}

#[test]
fn removed_blocks_of_windows_only_leave_nothing_behind() {
    let length = |mirror: &Mirror| {
        let mut bytes = Vec::new();
        mirror.block_chain.write(&mut bytes);
        bytes.len()
    };
    let mut follower = Follower::new(Start::Empty);
    let empty = length(&follower.mirror);
    let names = (1..=5).map(|end| Engine::name(&PROMPT[..end]));
    let mut stored = store_in(0, sliding(3), None, &PROMPT);
    stored.hashes = names.clone().collect();
    follower.apply(vec![event(stored)]);
    assert!(length(&follower.mirror) > empty);
    let removals = names.map(|name| removed_from(name.0, Medium::Gpu, 0));
    follower.apply(removals.collect());
    assert_eq!(length(&follower.mirror), empty);
}

const PROMPT: [u32; 5] = [1, 2, 3, 4, 5];

// --- against vLLM's own rule

const KINDS: [&[Need]; 7] = [
    &[Need::Full, Need::Window(4)],
    &[Need::Window(3), Need::Window(3), Need::Full],
    &[Need::Window(2), Need::Full, Need::Window(5)],
    &[Need::Window(4)],
    &[Need::Window(2), Need::Window(6)],
    &[Need::Full, Need::State],
    &[Need::State, Need::Full, Need::Window(3), Need::Full],
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Full,
    Window(u32),
    State,
}

impl Need {
    fn kind(self) -> GroupKind {
        match self {
            Self::Full => GroupKind::Main,
            Self::Window(tokens) => sliding(tokens),
            Self::State => GroupKind::State,
        }
    }
}

/// The cached blocks of each group, by path.
struct Engine {
    groups: &'static [Need],
    counts: BTreeMap<(usize, Vec<u32>), u32>,
}

impl Engine {
    fn is_cached(&self, groups: &[usize], path: &[u32]) -> bool {
        let mut groups = groups.iter();
        groups.all(|&group| self.counts.contains_key(&(group, path.to_vec())))
    }

    /// `find_longest_cache_hit` of one spec (`single_type_kv_cache_manager.py`), blocks of one
    /// token, without EAGLE.
    fn hit_of(&self, need: Need, groups: &[usize], prompt: &[u32], max: usize) -> usize {
        let cached = |block: usize| self.is_cached(groups, &prompt[..=block]);
        match need {
            Need::Full => (0..max).take_while(|&block| cached(block)).count(),
            Need::State => (0..max).rev().find(|&i| cached(i)).map_or(0, |i| i + 1),
            Need::Window(window) => {
                let wanted = (window - 1) as usize;
                let mut contiguous = 0;
                for block in (0..max).rev() {
                    if !cached(block) {
                        contiguous = 0;
                        continue;
                    }
                    contiguous += 1;
                    if contiguous >= wanted {
                        return block + contiguous;
                    }
                }
                contiguous
            }
        }
    }

    /// `HybridKVCacheCoordinator.find_longest_cache_hit`; with one group, the unitary one.
    fn hit(&self, prompt: &[u32]) -> usize {
        let mut specs: Vec<(Need, Vec<usize>)> = Vec::new();
        for (group, &need) in self.groups.iter().enumerate() {
            match specs.iter_mut().find(|(known, _)| *known == need) {
                Some((_, groups)) => groups.push(group),
                None => specs.push((need, vec![group])),
            }
        }
        specs.sort_by_key(|(need, _)| *need != Need::Full);
        let mut hit = prompt.len() - 1;
        loop {
            let mut current = hit;
            for (need, groups) in &specs {
                current = self.hit_of(*need, groups, prompt, current);
            }
            if current >= hit {
                return hit;
            }
            hit = current;
        }
    }

    fn name(path: &[u32]) -> EngineHash {
        let range = BlockChain::default().of_range(&run(None, path), 1);
        EngineHash::of_bytes(range.unwrap().last().unwrap())
    }

    /// The events of a request's newly computed blocks: of each group those that `keeps` names.
    fn store(&mut self, path: &[u32], from: usize, keeps: u64) -> Vec<CacheEvent> {
        if from == path.len() {
            return Vec::new();
        }
        let mut events = Vec::new();
        for (group, &need) in self.groups.iter().enumerate() {
            let index = u32::try_from(group).unwrap();
            let parent = (from > 0).then(|| Self::name(&path[..from]).0);
            let mut stored = store_in(index, need.kind(), parent, &path[from..]);
            stored.hashes.clear();
            for depth in from..path.len() {
                let is_kept = keeps >> (group * 8 + depth) & 1 == 1;
                if need == Need::Full || is_kept {
                    let path = path[..=depth].to_vec();
                    stored.hashes.push(Self::name(&path));
                    *self.counts.entry((group, path)).or_default() += 1;
                }
            }
            events.push(event(stored));
        }
        events
    }

    fn remove(&mut self, pick: prop::sample::Index) -> Option<CacheEvent> {
        let at = pick.index(self.counts.len().max(1));
        let key = self.counts.keys().nth(at)?.clone();
        Some(self.remove_one(&key))
    }

    fn remove_one(&mut self, key: &(usize, Vec<u32>)) -> CacheEvent {
        let count = self.counts.get_mut(key).unwrap();
        *count -= 1;
        if *count == 0 {
            self.counts.remove(key);
        }
        let group = u32::try_from(key.0).unwrap();
        removed_from(Self::name(&key.1).0, Medium::Gpu, group)
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A request that computes its prompt from its hit on.
    Request {
        prompt: Vec<u32>,
        keeps: u64,
    },
    Evict(Vec<prop::sample::Index>),
    Clear,
}

fn steps() -> impl Strategy<Value = Step> {
    let prompt = proptest::collection::vec(1..3_u32, 1..8);
    prop_oneof![
        8 => (prompt, any::<u64>(), any::<u64>()).prop_map(|(prompt, one, other)| Step::Request {
            prompt,
            keeps: one | other,
        }),
        6 => proptest::collection::vec(any::<prop::sample::Index>(), 1..4).prop_map(Step::Evict),
        1 => Just(Step::Clear),
    ]
}

fn prompts() -> Vec<Vec<u32>> {
    let mut all = vec![Vec::new()];
    for _ in 0..6 {
        let longer = all
            .iter()
            .flat_map(|path| [1, 2].map(|next| [&path[..], &[next]].concat()));
        all = longer.collect();
    }
    all
}

proptest! {
    #[test]
    fn credit_is_the_longest_hit_by_vllms_rule(
        groups in prop::sample::select(&KINDS[..]),
        batches in proptest::collection::vec(proptest::collection::vec(steps(), 1..4), 1..14),
        reload in any::<bool>(),
    ) {
        let mut engine = Engine { groups, counts: BTreeMap::new() };
        let mut follower = Follower::new(Start::Empty);
        follower.mirror.config.assume.plain_lookup = true;
        for steps in batches {
            let mut events = Vec::new();
            for step in steps {
                match step {
                    Step::Request { prompt, keeps } => {
                        let from = engine.hit(&[&prompt[..], &[9]].concat());
                        events.extend(engine.store(&prompt, from, keeps));
                    }
                    Step::Evict(picks) => {
                        events.extend(picks.into_iter().filter_map(|pick| engine.remove(pick)));
                    }
                    Step::Clear => {
                        engine.counts.clear();
                        events.push(CacheEvent::Cleared);
                    }
                }
            }
            follower.apply(events);
            if reload {
                follower.mirror = save::reloaded(&follower.mirror);
            }
            prop_assert_eq!(follower.gpu(), TierState::Complete);
            for prompt in prompts() {
                let expected = engine.hit(&prompt);
                let credited = credit(&follower.mirror, &prompt, prompt.len() - 1);
                prop_assert_eq!(credited, expected, "{:?}", prompt);
            }
        }
        while let Some(key) = engine.counts.keys().next().cloned() {
            follower.apply(vec![engine.remove_one(&key)]);
        }
        prop_assert_eq!(follower.mirror.prefixes(), 0);
    }
}
