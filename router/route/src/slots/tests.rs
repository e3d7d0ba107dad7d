use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use warmroute_proto::load::sampled_lengths;
use warmroute_proto::{LocalHash, Source};

const ROUTER: RouterId = RouterId([1; 16]);
const PEER: RouterId = RouterId([2; 16]);
const LIFE: Generation = Generation(5);

fn source(number: u8) -> Source {
    Source {
        worker: format!("w{number}").into(),
        dp_rank: DpRank(0),
    }
}

/// The blocks of a path of letters.
fn blocks(path: &str) -> Vec<LocalHash> {
    path.bytes()
        .map(|letter| LocalHash(u64::from(letter)))
        .collect()
}

fn add(counter: u64, at: u8, path: &str, prefill_tokens: u32) -> LoadChange {
    let blocks = blocks(path);
    LoadChange::AddRequest {
        counter,
        source: source(at),
        prefill_tokens,
        // The partial last block is not hashed.
        blocks: u32::try_from(blocks.len()).unwrap() + 1,
        prompt: SampledPrefix::of(&blocks),
    }
}

const fn free(counter: u64) -> LoadChange {
    LoadChange::Free {
        counter,
        end: SlotEnd::Completed,
    }
}

#[derive(Default)]
struct Fixture {
    slots: Slots,
    table: SourceTable,
}

impl Fixture {
    fn apply(&mut self, router: RouterId, change: &LoadChange) -> Applied {
        self.slots.apply(&mut self.table, router, LIFE, change)
    }

    fn own(&mut self, change: &LoadChange) -> Applied {
        self.apply(ROUTER, change)
    }

    /// Requests, prefill tokens and blocks of a source.
    fn load(&self, at: u8) -> (u32, u64, u64) {
        let id = self.table.id(&source(at));
        id.map_or((0, 0, 0), |id| figures(self.slots.load(id)))
    }
}

const fn figures(load: ActiveLoad) -> (u32, u64, u64) {
    (
        load.active_requests,
        load.prefill_tokens,
        load.decode_blocks,
    )
}

#[test]
fn a_slot_counts_from_its_opening_to_its_end() {
    let mut fixture = Fixture::default();
    fixture.own(&add(1, 0, "abcd", 70));
    assert_eq!(fixture.load(0), (1, 70, 5));
    fixture.own(&LoadChange::MarkPrefillCompleted { counter: 1 });
    assert_eq!(fixture.load(0), (1, 0, 5));
    fixture.own(&LoadChange::Grow {
        counter: 1,
        blocks: 2,
    });
    assert_eq!(fixture.load(0), (1, 0, 7));
    fixture.own(&free(1));
    assert_eq!(fixture.load(0), (0, 0, 0));
    assert!(fixture.slots.is_idle(fixture.table.id(&source(0)).unwrap()));
}

#[test]
fn shared_blocks_are_counted_once_per_source() {
    let mut fixture = Fixture::default();
    fixture.own(&add(1, 0, "abcd", 0));
    fixture.own(&add(2, 0, "abxy", 0));
    fixture.own(&add(3, 1, "abcd", 0));
    // Six distinct blocks, and a partial one each.
    assert_eq!(fixture.load(0), (2, 0, 8));
    assert_eq!(fixture.load(1), (1, 0, 5));
    fixture.own(&free(1));
    assert_eq!(fixture.load(0), (1, 0, 5));
}

#[test]
fn what_comes_twice_counts_once() {
    let mut fixture = Fixture::default();
    for _ in 0..2 {
        fixture.own(&add(1, 0, "abcd", 70));
    }
    assert_eq!(fixture.load(0), (1, 70, 5));
    for _ in 0..2 {
        fixture.own(&LoadChange::MarkPrefillCompleted { counter: 1 });
    }
    for _ in 0..2 {
        fixture.own(&free(1));
    }
    assert_eq!(fixture.load(0), (0, 0, 0));
    let expected = IgnoredChanges {
        opened_twice: 1,
        unknown_slot: 1,
        prefilled_twice: 1,
        old_incarnation: 0,
    };
    assert_eq!(fixture.slots.ignored(), expected);
}

#[test]
fn changes_of_unknown_slots_do_nothing() {
    let mut fixture = Fixture::default();
    for change in [
        free(9),
        LoadChange::MarkPrefillCompleted { counter: 9 },
        LoadChange::Grow {
            counter: 9,
            blocks: 9,
        },
    ] {
        assert_eq!(fixture.own(&change), Applied::Nothing);
    }
    assert_eq!(fixture.slots.ignored().unknown_slot, 3);
}

#[test]
fn equal_counters_of_two_routers_are_two_slots() {
    let mut fixture = Fixture::default();
    fixture.own(&add(1, 0, "a", 10));
    fixture.apply(PEER, &add(1, 0, "a", 10));
    assert_eq!(fixture.load(0), (2, 20, 3));
    fixture.apply(PEER, &free(1));
    assert_eq!(fixture.load(0), (1, 10, 2));
}

#[test]
fn a_new_life_frees_the_former_ones_slots_and_fences_its_messages() {
    let mut fixture = Fixture::default();
    fixture.own(&add(1, 0, "ab", 10));
    let Fixture { slots, table } = &mut fixture;
    slots.apply(table, ROUTER, LIFE.next().unwrap(), &add(1, 1, "c", 5));
    assert_eq!(fixture.load(0), (0, 0, 0));
    assert_eq!(fixture.load(1), (1, 5, 2));
    assert_eq!(fixture.own(&free(1)), Applied::Nothing);
    assert_eq!(fixture.load(1), (1, 5, 2));
    assert_eq!(fixture.slots.ignored().old_incarnation, 1);
}

#[test]
fn a_dead_routers_slots_are_freed_and_the_others_stay() {
    let mut fixture = Fixture::default();
    fixture.own(&add(1, 0, "ab", 10));
    fixture.apply(PEER, &add(1, 0, "ab", 20));
    fixture.slots.release(PEER);
    assert_eq!(fixture.load(0), (1, 10, 3));
    assert_eq!(fixture.slots.digest(PEER), LoadDigest::default());
}

#[test]
fn numbers_beyond_all_bounds_stay_countable() {
    let mut fixture = Fixture::default();
    let huge = LoadChange::AddRequest {
        counter: 1,
        source: source(0),
        prefill_tokens: u32::MAX,
        blocks: u32::MAX,
        prompt: SampledPrefix::default(),
    };
    fixture.own(&huge);
    for _ in 0..3 {
        fixture.own(&LoadChange::Grow {
            counter: 1,
            blocks: u32::MAX,
        });
    }
    // More hashes than blocks.
    fixture.own(&LoadChange::AddRequest {
        counter: 2,
        source: source(0),
        prefill_tokens: 0,
        blocks: 1,
        prompt: SampledPrefix::of(&blocks("abcdef")),
    });
    fixture.own(&free(1));
    fixture.own(&free(2));
    assert_eq!(fixture.load(0), (0, 0, 0));
}

/// One slot of the reference model.
struct Reference {
    counter: u64,
    at: u8,
    path: String,
    prefill_tokens: u64,
    generated: u64,
}

/// The blocks that these slots hold: the sampled depths of each prompt once, with all blocks since
/// the sampled depth before; the rest of each prompt alone.
fn reference_blocks(slots: &[&Reference]) -> u64 {
    let mut sampled = BTreeSet::new();
    let mut alone = 0;
    for slot in slots {
        let mut last = 0;
        for length in sampled_lengths() {
            let Some(prefix) = slot.path.get(..length as usize) else {
                break;
            };
            sampled.insert((prefix, length - last));
            last = length;
        }
        alone += slot.path.len() as u64 + 1 - u64::from(last) + slot.generated;
    }
    let sampled: u64 = sampled
        .into_iter()
        .map(|(_, weight)| u64::from(weight))
        .sum();
    sampled + alone
}

#[derive(Clone, Debug)]
enum Step {
    Change(RouterId, LoadChange, String),
    Release(RouterId),
}

fn step() -> impl Strategy<Value = Step> {
    let router = prop_oneof![Just(ROUTER), Just(PEER)];
    // Long common beginnings, so that the sparse depths are reached.
    let path = ("[ab]{0,3}", 0..3_usize, "[ab]{0,3}").prop_map(|(head, long, tail)| {
        let middle = "c".repeat(long * 50);
        format!("{head}{middle}{tail}")
    });
    let counter = 0..8_u64;
    let change = (counter, 0..3_u8, path, 0..100_u32, 0..5_u8).prop_map(
        |(counter, at, path, number, what)| {
            let change = match what {
                0 | 1 => add(counter, at, &path, number),
                2 => LoadChange::MarkPrefillCompleted { counter },
                3 => LoadChange::Grow {
                    counter,
                    blocks: number,
                },
                _ => free(counter),
            };
            (change, path)
        },
    );
    prop_oneof![
        20 => (router.clone(), change)
            .prop_map(|(router, (change, path))| Step::Change(router, change, path)),
        1 => router.prop_map(Step::Release),
    ]
}

#[derive(Default)]
struct ServedModel(BTreeMap<RouterId, Vec<Reference>>);

impl ServedModel {
    fn step(&mut self, step: &Step) {
        let (router, change, path) = match step {
            Step::Release(router) => {
                self.0.remove(router);
                return;
            }
            Step::Change(router, change, path) => (*router, change, path),
        };
        let slots = self.0.entry(router).or_default();
        let find = |slots: &[Reference], counter: u64| {
            slots.iter().position(|slot| slot.counter == counter)
        };
        match change {
            LoadChange::AddRequest {
                counter,
                source: at,
                prefill_tokens,
                ..
            } => {
                if find(slots, *counter).is_none() {
                    slots.push(Reference {
                        counter: *counter,
                        at: (0..3).find(|n| source(*n) == *at).unwrap(),
                        path: path.clone(),
                        prefill_tokens: u64::from(*prefill_tokens),
                        generated: 0,
                    });
                }
            }
            LoadChange::MarkPrefillCompleted { counter } => {
                if let Some(index) = find(slots, *counter) {
                    slots[index].prefill_tokens = 0;
                }
            }
            LoadChange::Grow { counter, blocks } => {
                if let Some(index) = find(slots, *counter) {
                    slots[index].generated += u64::from(*blocks);
                }
            }
            LoadChange::Free { counter, .. } => {
                if let Some(index) = find(slots, *counter) {
                    slots.remove(index);
                }
            }
        }
    }

    fn load(&self, at: u8) -> (u32, u64, u64) {
        let here: Vec<&Reference> = self.0.values().flatten().filter(|s| s.at == at).collect();
        (
            u32::try_from(here.len()).unwrap(),
            here.iter().map(|slot| slot.prefill_tokens).sum(),
            reference_blocks(&here),
        )
    }
}

proptest! {
    /// Any changes, sensible or not: the loads are those of the reference model, two replicas agree,
    /// and when all routers are gone nothing is left.
    #[test]
    fn loads_are_those_of_the_reference_model(steps in prop::collection::vec(step(), 0..80)) {
        let mut fixture = Fixture::default();
        let mut model = ServedModel::default();
        for step in &steps {
            match step {
                Step::Change(router, change, _) => {
                    fixture.apply(*router, change);
                }
                Step::Release(router) => fixture.slots.release(*router),
            }
            model.step(step);
            for at in 0..3 {
                prop_assert_eq!(fixture.load(at), model.load(at));
            }
        }
        fixture.slots.release(ROUTER);
        fixture.slots.release(PEER);
        for at in 0..3 {
            prop_assert_eq!(fixture.load(at), (0, 0, 0));
        }
        prop_assert_eq!(fixture.slots.open(), 0);
    }

    /// A slot can be left out of account as if it had been freed.
    #[test]
    fn a_slot_that_is_left_out_counts_as_freed(
        steps in prop::collection::vec(step(), 0..40),
        probe in "[ab]{0,3}c{0,70}",
    ) {
        let mut fixture = Fixture::default();
        for step in &steps {
            match step {
                Step::Change(router, change, _) => {
                    fixture.apply(*router, change);
                }
                Step::Release(router) => fixture.slots.release(*router),
            }
        }
        let probe = SampledPrefix::of(&blocks(&probe));
        for counter in 0..8 {
            let key = SlotKey { router: ROUTER, counter };
            let shared = fixture.slots.shared_blocks(&probe, Some(key));
            let mut freed = Fixture { slots: fixture.slots.clone(), table: fixture.table.clone() };
            freed.own(&free(counter));
            for id in (0..3).filter_map(|at| fixture.table.id(&source(at))) {
                let without = fixture.slots.load_without(id, Some(key));
                prop_assert_eq!(without, freed.slots.load(id));
                let after = freed.slots.shared_blocks(&probe, None);
                prop_assert_eq!(shared.of(id), after.of(id));
            }
        }
    }

    /// Open slots say all that matters of the changes that led to them.
    #[test]
    fn open_slots_are_restored_as_reported(steps in prop::collection::vec(step(), 0..60)) {
        let mut fixture = Fixture::default();
        for step in &steps {
            match step {
                Step::Change(router, change, _) => {
                    fixture.apply(*router, change);
                }
                Step::Release(router) => fixture.slots.release(*router),
            }
        }
        fixture.slots.release(PEER);
        let stated = fixture.slots.open_slots_from(&fixture.table, ROUTER, 0, usize::MAX);
        let mut other = Fixture::default();
        for slot in stated.iter().rev() {
            let Fixture { slots, table } = &mut other;
            let restored = slots.restore(table, ROUTER, LIFE.next().unwrap(), slot);
            prop_assert!(matches!(restored, Applied::Added(_)));
        }
        prop_assert_eq!(other.slots.digest(ROUTER), fixture.slots.digest(ROUTER));
        let of = |fixture: &Fixture| fixture.slots.loads_of(&fixture.table, ROUTER);
        prop_assert_eq!(of(&other), of(&fixture));
        prop_assert_eq!(other.slots.open_slots_from(&other.table, ROUTER, 0, usize::MAX), stated);
        for at in 0..3 {
            prop_assert_eq!(other.load(at), fixture.load(at));
        }
    }

    /// The digest depends on the open slots, not on their history.
    #[test]
    fn the_digest_depends_on_the_open_slots_only(
        order in Just((0..6_u64).collect::<Vec<_>>()).prop_shuffle(),
        freed in 0..6_u64,
    ) {
        let mut detour = Fixture::default();
        for &counter in &order {
            detour.own(&add(counter, 0, "abc", 5));
            detour.own(&LoadChange::MarkPrefillCompleted { counter });
        }
        for counter in 0..freed {
            detour.own(&free(counter));
        }
        let mut straight = Fixture::default();
        for counter in freed..6 {
            straight.own(&add(counter, 0, "abc", 5));
            prop_assert_ne!(straight.slots.digest(ROUTER), detour.slots.digest(ROUTER));
            straight.own(&LoadChange::MarkPrefillCompleted { counter });
        }
        prop_assert_eq!(straight.slots.digest(ROUTER), detour.slots.digest(ROUTER));
        prop_assert_eq!(straight.slots.digest(ROUTER).count, 6 - freed);
    }
}
