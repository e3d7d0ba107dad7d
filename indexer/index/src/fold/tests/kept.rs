//! What is kept of the sources equals a judgement of that moment, at every moment.

use std::cell::RefCell;
use std::collections::BTreeMap;

use warmroute_proto::roster::{HolderAnswer, HolderPart, PART_BYTES_MAX, RosterNumber};

use super::*;
use crate::query::PreparedQuery;
use crate::snapshot::Restored;
use crate::tests_support::clock_answer;

const STATES: [TierState; 5] = [
    TierState::Complete,
    TierState::Partial,
    TierState::Unverified,
    TierState::Stale,
    TierState::CatchingUp,
];

fn part(world: &World, names: &str, known: RosterPageRequest) -> HolderPart {
    let query = PreparedQuery::of_blocks(&locals(names));
    let holders = query.holders(&world.fold, known, RosterNumber(0), world.now);
    match holders.unwrap().into_answer() {
        HolderAnswer::Holders(part) => part,
        HolderAnswer::Behind => panic!("behind"),
    }
}

/// Names of those that hold a block.
fn holders(world: &World, names: &str) -> Vec<String> {
    let part = part(world, names, RosterPageRequest::default());
    let members = part.groups.iter().flat_map(|group| group.members.iter());
    let mut names: Vec<_> = members
        .map(|number| world.fold.source_of(number).unwrap().to_string())
        .collect();
    names.sort();
    names
}

/// Sources that a query at this moment has to judge.
fn judged(world: &World) -> Vec<RosterNumber> {
    let judged = RefCell::new(Vec::new());
    let judge = |number| {
        judged.borrow_mut().push(number);
        None
    };
    world.fold.sources.kept().each(world.now, judge, |_| {});
    judged.into_inner()
}

/// One thing that happens to a fold.
#[derive(Clone, Debug)]
enum Step {
    Pass(u64),
    Tick(u64),
    Stored(usize),
    Skipped,
    Garbled,
    Generation,
    Announced,
    Beat,
    Listed,
    Gone,
    WatchRead,
    CutOff,
    Reconnected,
    Clock { silent_ms: u64, stood_ms: u64 },
    Jump,
    Snapshot,
    Read,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..1_500_u64).prop_map(Step::Pass),
        6 => (0..1_500_u64).prop_map(Step::Tick),
        6 => (0..5_usize).prop_map(Step::Stored),
        1 => Just(Step::Skipped),
        1 => Just(Step::Garbled),
        1 => Just(Step::Generation),
        1 => Just(Step::Announced),
        9 => Just(Step::Beat),
        2 => Just(Step::Listed),
        2 => Just(Step::Gone),
        1 => Just(Step::WatchRead),
        1 => Just(Step::CutOff),
        2 => Just(Step::Reconnected),
        2 => (0..3_000_u64, 0..2_u64).prop_map(|(silent_ms, stood)| Step::Clock {
            silent_ms,
            stood_ms: 2_000 * stood,
        }),
        1 => Just(Step::Jump),
        1 => Just(Step::Snapshot),
        3 => Just(Step::Read),
    ]
}

/// A world and a router that has read some of its roster.
struct Watched {
    world: World,
    unix_ns: u64,
    known: RosterPageRequest,
    rows: BTreeMap<Source, Option<RosterStatus>>,
}

impl Watched {
    fn take(&mut self, shim: u32, step: &Step) {
        let world = &mut self.world;
        let (worker, name) = (
            format!("w{}", shim / 2),
            format!("w{}/{}", shim / 2, shim % 2),
        );
        match *step {
            Step::Pass(ms) => world.now += Duration::from_millis(ms),
            Step::Tick(ms) => world.wait(Duration::from_millis(ms)),
            Step::Stored(state) => {
                let block = format!("b{}", world.position.0);
                let shim = world.shim(&name);
                shim.states.gpu = STATES[state];
                let change = match shim.pairs.is_empty() {
                    true => stored("", "a", Tier::Gpu),
                    false => stored("a", &block, Tier::Gpu),
                };
                world.publish(&name, vec![change]);
            }
            Step::Skipped => drop(world.shim(&name).record(Vec::new())),
            Step::Garbled => {
                world.deliver(&source(&name), vec![1]);
            }
            Step::Generation => world.shim(&name).next_generation(),
            Step::Announced => {
                world.shim(&name).next_generation();
                world.heartbeat(&name);
            }
            Step::Beat => {
                world.heartbeat(&name);
            }
            Step::Listed => world.register(&worker),
            Step::Gone => world.deregister(&worker),
            Step::WatchRead => {
                world.fold.watch_begins();
                world.register(&worker);
                world.fold.watch_is_current(world.now);
            }
            Step::CutOff => world.fold.cut_off(world.now),
            Step::Reconnected => world.fold.reconnected(world.now),
            Step::Clock {
                silent_ms,
                stood_ms,
            } => {
                let asked = world.now;
                world.now += Duration::from_millis(silent_ms);
                self.unix_ns += (silent_ms + stood_ms) * 1_000_000;
                world
                    .fold
                    .observe_clock(clock_answer(asked, asked, self.unix_ns));
            }
            Step::Jump => world.position = world.position.next(),
            Step::Snapshot => {
                if let Ok(snapshot) = world.snapshot() {
                    let restored = Restored::read(&snapshot).unwrap();
                    drop(world.fold.adopt(world.now, restored));
                }
            }
            Step::Read => {
                let page = world.fold.roster_page(&self.known, PART_BYTES_MAX);
                self.known.since = page.version;
                let rows = page.rows.into_iter();
                self.rows.extend(rows.map(|row| (row.source, row.status)));
            }
        }
    }

    /// The answer's holders, states and changes are those of every source judged now.
    fn check(&self) -> Result<(), TestCaseError> {
        let world = &self.world;
        let part = part(world, "a", self.known);
        let mut held = BTreeMap::new();
        for group in &part.groups {
            for member in group.members.iter() {
                let name = world.fold.source_of(member).unwrap().clone();
                prop_assert!(held.insert(name, (group.run, group.states)).is_none());
            }
        }
        let mut rows = self.rows.clone();
        let changes = part.changes.into_iter();
        rows.extend(changes.map(|row| (row.source, row.status)));
        let details = part.details.iter().map(|detail| {
            let name = world.fold.source_of(detail.source).unwrap().clone();
            (name, (detail.generation, detail.number, detail.engine_seq))
        });
        let details: BTreeMap<_, _> = details.collect();
        for of in world.ask("a") {
            // A restored source has no number before the next tick.
            if world.fold.sources.get(&of.source).unwrap().roster.is_none() {
                continue;
            }
            let is_holder = of.run != Tiers::default();
            let wanted = is_holder.then_some((of.run, of.states));
            prop_assert_eq!(held.remove(&of.source), wanted, "{}", &of.source);
            let detail = is_holder.then_some((of.generation, of.number, of.engine_seq));
            prop_assert_eq!(details.get(&of.source).copied(), detail);
            let status = RosterStatus {
                generation: of.generation,
                states: of.states,
                reason: of.reason,
            };
            prop_assert_eq!(rows.get(&of.source), Some(&Some(status)), "{}", &of.source);
        }
        prop_assert!(held.is_empty());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn kept_standings_are_those_of_the_moment(
        steps in prop::collection::vec((0..6_u32, step()), 1..80),
        bounded in any::<bool>(),
    ) {
        // The bound sets aside the larger of a few sources.
        let bytes_max = bounded.then(|| World::new().fold.bytes() + (48 << 10));
        let mut watched = Watched {
            world: World::with_memory(bytes_max),
            unix_ns: 1 << 60,
            known: RosterPageRequest::default(),
            rows: BTreeMap::new(),
        };
        for (shim, step) in steps {
            watched.take(shim, &step);
            watched.check()?;
        }
    }
}

#[test]
fn unchanged_sources_are_not_judged_again() {
    let mut world = World::new();
    for rank in 0..4 {
        world.publish(&format!("w/{rank}"), vec![stored("", "a", Tier::Gpu)]);
    }
    assert_eq!(judged(&world), []);
    for _ in 0..8 {
        world.now += Duration::from_secs(2);
        for rank in 0..4 {
            world.heartbeat(&format!("w/{rank}"));
        }
        world.wait(Duration::from_millis(500));
        // As the service does after a tick.
        world.fold.poll_reload(world.now);
        world.fold.poll_resyncs(world.now);
        world.register("w");
        assert_eq!(judged(&world), []);
    }
    world.deregister("w");
    assert_eq!(judged(&world).len(), 4);
    world.wait(Duration::ZERO);
    assert_eq!(judged(&world), []);
    // What has expired is not judged in every query until it is proven.
    world.wait(PROOF_AGE_MAX);
    assert_eq!(judged(&world), []);
}

#[test]
fn a_kept_proof_expires_on_its_own() {
    let mut world = World::new();
    world.publish("w/0", vec![stored("", "a", Tier::Gpu)]);
    world.publish("w/1", vec![stored("", "a", Tier::Gpu)]);
    world.wait(PROOF_AGE_MAX / 2);
    world.heartbeat("w/1");
    world.now += PROOF_AGE_MAX / 2 - Duration::from_nanos(1);
    assert_eq!(holders(&world, "a"), ["w/0", "w/1"]);
    world.now += Duration::from_nanos(1);
    assert_eq!(holders(&world, "a"), ["w/1"]);
    assert_eq!(judged(&world), [RosterNumber(0)]);
    // An expired judgement is not one of the time before.
    world.wait(Duration::ZERO);
    world.now -= Duration::from_nanos(1);
    assert_eq!(holders(&world, "a"), ["w/0", "w/1"]);
}

#[test]
fn a_source_that_leaves_and_returns_counts_at_once() {
    let mut world = World::new();
    for name in ["w/0", "w/1", "x/0"] {
        world.publish(name, vec![stored("", "a", Tier::Gpu)]);
    }
    world.register("w");
    world.wait(Duration::ZERO);
    world.deregister("w");
    assert_eq!(holders(&world, "a"), ["x/0"]);
    world.register("w");
    assert_eq!(holders(&world, "a"), ["w/0", "w/1", "x/0"]);
    // An expiry during an outage counts one lease after it.
    world.fold.cut_off(world.now);
    world.deregister("w");
    world.fold.reconnected(world.now);
    world.wait(outage::QUIET / 2);
    world.heartbeat("w/0");
    world.now += outage::QUIET / 2 - Duration::from_nanos(1);
    assert_eq!(holders(&world, "a"), ["w/0"]);
    world.now += Duration::from_nanos(1);
    assert_eq!(holders(&world, "a"), [""; 0]);
}

#[test]
fn no_kept_proof_counts_while_the_clock_is_silent() {
    let mut world = World::new();
    world.publish("w/0", vec![stored("", "a", Tier::Gpu)]);
    world
        .fold
        .observe_clock(clock_answer(world.now, world.now, 1 << 60));
    world.wait(Duration::ZERO);
    world.now += ends::CLOCK_SILENCE_MAX;
    assert_eq!(holders(&world, "a"), ["w/0"]);
    world.now += Duration::from_nanos(1);
    assert_eq!(holders(&world, "a"), [""; 0]);
    let silence = ends::CLOCK_SILENCE_MAX.as_nanos() as u64;
    let unix_ns = (1 << 60) + silence;
    world
        .fold
        .observe_clock(clock_answer(world.now, world.now, unix_ns));
    assert_eq!(holders(&world, "a"), ["w/0"]);
}

#[test]
fn a_record_that_becomes_overdue_ends_kept_credit() {
    let mut world = World::new();
    world.publish("w/0", vec![stored("", "a", Tier::Gpu)]);
    let next = world.shim("w/0").record(Vec::new());
    drop(world.shim("w/0").record(Vec::new()));
    assert_eq!(world.heartbeat("w/0"), HeartbeatVerdict::Behind);
    world.wait(source::PATIENCE - Duration::from_secs(1));
    world.deliver_record(&next);
    world.wait(Duration::ZERO);
    world.now += Duration::from_millis(999);
    assert_eq!(holders(&world, "a"), ["w/0"]);
    world.wait(Duration::from_millis(1));
    assert_eq!(holders(&world, "a"), [""; 0]);
}

#[test]
fn the_roster_follows_what_is_kept() {
    let mut world = World::new();
    world.publish("w/0", vec![stored("", "a", Tier::Gpu)]);
    let listed = |world: &World| {
        let page = world
            .fold
            .roster_page(&RosterPageRequest::default(), PART_BYTES_MAX);
        page.rows[0].status.map(|status| status.states.gpu)
    };
    for state in [TierState::Complete, TierState::Partial] {
        world.shim("w/0").states.gpu = state;
        world.heartbeat("w/0");
        world.wait(Duration::ZERO);
        assert_eq!(listed(&world), Some(state.into()));
    }
}

#[test]
fn a_freed_source_is_listed_as_gone() {
    let mut world = World::new();
    world.publish("w/0", vec![stored("", "a", Tier::Gpu)]);
    world.fold.watch_begins();
    world.fold.watch_is_current(world.now);
    let reasons = [0, 30, 31].map(|secs| {
        world.wait(Duration::from_secs(secs));
        let page = world
            .fold
            .roster_page(&RosterPageRequest::default(), PART_BYTES_MAX);
        page.rows[0].status.unwrap().reason
    });
    let (no_proof, gone) = (UnknownReason::NoProof, UnknownReason::ShimGone);
    assert_eq!(reasons, [None, Some(no_proof), Some(gone)]);
}
