use proptest::prelude::*;
use warmroute_proto::roster::{HolderAnswer, RosterPageRequest, RosterStatus, part_bytes_within};
use warmroute_proto::{Change, EngineSeq, Generation, RecordNumber, Tier, TierState, codec};

use super::*;
use crate::tests_support::{IDENTITY, World, locals, prefix, removed, source, stored};

fn part(answer: HolderAnswer) -> HolderPart {
    match answer {
        HolderAnswer::Holders(part) => part,
        HolderAnswer::Behind => panic!("behind"),
    }
}

fn holders_of(world: &World, names: &str) -> HolderPart {
    let query = PreparedQuery::of_blocks(&locals(names));
    let holders = query
        .holders(
            &world.fold,
            RosterPageRequest::default(),
            RosterNumber(0),
            world.now,
        )
        .unwrap();
    part(holders.into_answer())
}

/// The sources by their numbers.
fn names(world: &World) -> BTreeMap<RosterNumber, Source> {
    let rows = world
        .fold
        .roster_page(&RosterPageRequest::default(), PART_BYTES_MAX)
        .rows
        .into_iter();
    rows.map(|row| (row.number, row.source)).collect()
}

const STATES: [TierState; 5] = [
    TierState::Complete,
    TierState::Partial,
    TierState::Unverified,
    TierState::Stale,
    TierState::CatchingUp,
];
const PROMPTS: [&str; 6] = ["a", "a b", "a b c", "a x", "d", "d e"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The compact answer names exactly the sources with a run, with the same run, states, numbers.
    #[test]
    fn holders_are_those_of_the_whole_answer(
        steps in prop::collection::vec((0..12_u32, 0..6_usize, 0..3_usize, 0..5_usize), 1..40),
        late in 0..12_u32,
    ) {
        let mut world = World::new();
        for (shim, prompt, tier, state) in steps {
            let name = format!("w{}/{}", shim / 3, shim % 3);
            world.shim(&name).states.gpu = STATES[state];
            world.publish(&name, vec![stored("", PROMPTS[prompt], Tier::ALL[tier])]);
            if shim == late {
                world.wait(Duration::from_secs(6));
            }
        }
        let names = names(&world);
        for prompt in PROMPTS {
            let whole = world.ask(prompt);
            let part = holders_of(&world, prompt);
            let mut compact = BTreeMap::new();
            for group in &part.groups {
                for member in group.members.iter() {
                    let is_new = compact.insert(&names[&member], (group.run, group.states)).is_none();
                    prop_assert!(is_new);
                }
            }
            let held = whole.iter().filter(|answer| answer.run != Tiers::default());
            let wanted: BTreeMap<_, _> = held.map(|of| (&of.source, (of.run, of.states))).collect();
            prop_assert_eq!(&compact, &wanted);
            for detail in &part.details {
                let of = whole.iter().find(|of| of.source == names[&detail.source]).unwrap();
                let detailed = (detail.generation, detail.number, detail.engine_seq);
                prop_assert_eq!(detailed, (of.generation, of.number, of.engine_seq));
            }
            prop_assert_eq!(part.details.len(), wanted.len());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However long ago a router read the roster, with the changes of an answer it has the states
    /// and generations of the answer's moment.
    #[test]
    fn changes_bring_every_row_up_to_date(
        steps in prop::collection::vec((0..9_u32, 0..7_u8, 0..5_usize), 1..60),
    ) {
        let mut world = World::new();
        let mut known = RosterPageRequest::default();
        let mut rows = BTreeMap::new();
        for (shim, step, state) in steps {
            let name = format!("w{}/{}", shim / 3, shim % 3);
            match step {
                0 => world.wait(Duration::from_secs(2)),
                1 => {
                    let page = world.fold.roster_page(&known, PART_BYTES_MAX);
                    known.since = page.version;
                    rows.extend(page.rows.into_iter().map(|row| (row.source, row.status)));
                }
                2 => world.shim(&name).next_generation(),
                3 => drop(world.heartbeat(&name)),
                _ => {
                    world.shim(&name).states.gpu = STATES[state];
                    world.publish(&name, vec![stored("", "a", Tier::Gpu)]);
                }
            }
            let query = PreparedQuery::of_blocks(&locals("b"));
            let Some(holders) = query.holders(&world.fold, known, RosterNumber(0), world.now) else {
                continue;
            };
            let changes = part(holders.into_answer()).changes.into_iter();
            let mut read = rows.clone();
            read.extend(changes.map(|row| (row.source, row.status)));
            for of in world.ask("b") {
                let status = RosterStatus {
                    generation: of.generation,
                    states: of.states,
                    reason: of.reason,
                };
                prop_assert_eq!(read.get(&of.source), Some(&Some(status)));
            }
        }
    }
}

/// Each part of an answer has its own.
#[test]
fn the_bound_of_changes_counts_those_that_are_asked_for() {
    let mut world = World::new();
    let sources = CHANGES_MAX + 44;
    for number in 0..sources {
        world.publish(&format!("w{number}/0"), vec![stored("", "a", Tier::Gpu)]);
    }
    let query = PreparedQuery::of_blocks(&locals("a"));
    for (from, changed) in [(0, CHANGES_MAX), (CHANGES_MAX, 44)] {
        let from = RosterNumber(u32::try_from(from).unwrap());
        let holders = query.holders(&world.fold, RosterPageRequest::default(), from, world.now);
        let part = part(holders.unwrap().into_answer());
        assert_eq!(part.changes.len(), changed);
        assert!(part.changes.iter().all(|row| row.number >= from));
    }
}

/// Names are as long as an operator makes them; an answer must fit into a message.
#[test]
fn changes_with_long_names_are_bounded_in_bytes() {
    let mut world = World::new();
    for number in 0..40 {
        let name = format!("{}{number}/0", "w".repeat(10_000));
        world.publish(&name, vec![stored("", "a", Tier::Gpu)]);
    }
    let part = holders_of(&world, "b");
    assert_eq!(
        part.changes.len(),
        PART_BYTES_MAX.div_ceil(10_002 + ROW_BYTES)
    );
}

fn holders(number: u32, run_of: impl Fn(u32) -> u32) -> Holders {
    let holder = |number| Holder {
        run: Tiers {
            gpu: run_of(number),
            ..Tiers::default()
        },
        states: Tiers::all(SourceState::Exact),
        detail: HolderDetail {
            source: RosterNumber(number),
            generation: Generation(1),
            number: Some(RecordNumber(1)),
            engine_seq: Some(EngineSeq(1)),
        },
    };
    Holders {
        log: IDENTITY,
        position: LogPosition(1),
        roster: RosterId(1),
        holders: (0..number)
            .map(holder)
            .filter(|one| one.run.gpu > 0)
            .collect(),
        changes: Vec::new(),
        part_bytes: PART_BYTES_MAX,
        salt: 5,
    }
}

#[test]
fn an_answer_of_8000_holders_takes_less_than_32_kib() {
    let check = |what: &str, run_of: fn(u32) -> u32| {
        let answer = holders(8000, run_of).into_answer();
        let bytes = codec::encode(&answer).unwrap().len();
        assert!(bytes <= 32 << 10, "{what}: {bytes}");
        assert_eq!(part(answer).next, None);
    };
    check("one", |number| u32::from(number == 4321));
    check("all alike", |_| 32);
    check("every second one", |number| 32 * (number % 2));
    check("ten lengths", |number| {
        1 + number.wrapping_mul(2_654_435_761) % 10
    });
}

/// The server's limit may have been lowered since the start.
#[test]
fn an_answer_fits_into_a_small_message() {
    for limit in [64 << 10, 70_000, 128 << 10] {
        let mut world = World::new();
        for number in 0..300 {
            let name = format!("{}{number}/0", "w".repeat(250));
            world.publish(&name, vec![stored("", "a", Tier::Gpu)]);
        }
        let part_bytes = part_bytes_within(limit);
        let query = PreparedQuery::of_blocks(&locals("a")).in_parts_of(part_bytes);
        let known = RosterPageRequest::default();
        let found = query.holders(&world.fold, known, RosterNumber(0), world.now);
        let mut answer = holders(40_000, |number| number + 1);
        answer.part_bytes = part_bytes;
        answer.changes = found.unwrap().changes;
        assert!(!answer.changes.is_empty());
        let bytes = codec::encode(&answer.into_answer()).unwrap().len();
        assert!(bytes <= limit, "{bytes} of {limit}");
        let page = world.fold.roster_page(&known, part_bytes);
        let bytes = codec::encode(&page).unwrap().len();
        assert!(page.more && bytes <= limit, "{bytes} of {limit}");
    }
}

#[test]
fn an_answer_that_is_too_long_comes_in_parts() {
    let (mut from, mut seen, mut parts) = (RosterNumber(0), Vec::new(), 0);
    loop {
        let mut rest = holders(40_000, |number| number + 1);
        rest.holders.retain(|holder| holder.detail.source >= from);
        let answer = rest.into_answer();
        assert!(codec::encode(&answer).unwrap().len() <= PART_BYTES_MAX + 4096);
        let part = part(answer);
        assert_eq!(part.details.len(), DETAILS_MAX);
        let members = part.groups.iter().flat_map(|group| group.members.iter());
        let mut members: Vec<_> = members.collect();
        members.sort_unstable();
        seen.extend(members);
        parts += 1;
        match part.next {
            Some(next) => from = next,
            None => break,
        }
    }
    assert!(parts > 1);
    assert!(seen.into_iter().eq((0..40_000).map(RosterNumber)));
}

#[test]
fn a_forgotten_source_that_returns_has_another_number() {
    let mut world = World::new();
    world.publish("w/0", vec![stored("", "a", Tier::Gpu)]);
    world.register("w");
    world.deregister("w");
    world.wait(Duration::from_secs(2 * 86_400));
    world.wait(Duration::from_secs(1));
    world.publish("w/0", vec![stored("", "b", Tier::Gpu)]);
    world.shim("w/0").next_generation();
    world.publish("w/0", vec![stored("", "a", Tier::Gpu)]);
    let part = holders_of(&world, "a");
    assert_eq!(part.details[0].source, RosterNumber(1));
    let names = names(&world);
    assert_eq!(names[&RosterNumber(0)], source("w/0"));
    assert_eq!(names[&RosterNumber(1)], source("w/0"));
}

/// Since the record of this number, the `position`th of the log.
fn hold_span(
    fold: &Fold,
    now: Instant,
    log: StreamIdentity,
    (number, position): (u64, u64),
) -> HoldSpan {
    let query = HoldQuery {
        source: source("w0/0"),
        log,
        since: LogPosition(position),
        generation: fold
            .status(&source("w0/0"), now)
            .unwrap()
            .generation
            .unwrap(),
        number: RecordNumber(number),
        block: prefix("a b").unwrap(),
        tier: Tier::Gpu,
    };
    let answer = hold_answer(fold, &query, now);
    assert_eq!(answer.log, fold.log());
    answer.span
}

#[test]
fn records_of_another_log_or_beyond_the_present_one_are_not_covered() {
    let mut world = World::new();
    world.publish("w0/0", vec![stored("", "a b", Tier::Gpu)]);
    let restored = world.replica(Some(&world.snapshot().unwrap()));
    let span_of = |since| hold_span(&restored, world.now, IDENTITY, since);
    assert_eq!(
        (span_of((0, 0)), span_of((0, 1))),
        (HoldSpan::Uncovered, HoldSpan::Held)
    );
    let other = StreamIdentity {
        nonce: IDENTITY.nonce + 1,
        ..IDENTITY
    };
    let span = |world: &World, log, since| hold_span(&world.fold, world.now, log, since);
    assert_eq!(span(&world, IDENTITY, (0, 1)), HoldSpan::Held);
    assert_eq!(span(&world, IDENTITY, (0, 2)), HoldSpan::Uncovered);
    assert_eq!(span(&world, IDENTITY, (1, 1)), HoldSpan::Uncovered);
    assert_eq!(span(&world, other, (0, 1)), HoldSpan::Uncovered);
    // What is held still is of the former log.
    world.fold.follow(other);
    assert_eq!(span(&world, other, (0, 0)), HoldSpan::Uncovered);
}

/// The log was emptied, and everything else that knew of the generation was lost.
#[test]
fn a_generation_given_twice_in_one_log_is_not_covered_before_its_second_start() {
    let mut world = World::new();
    world.publish("w0/0", vec![stored("", "a b", Tier::Gpu)]);
    world.log.clear();
    world.shims.clear();
    world.publish("w0/0", vec![stored("", "a b", Tier::Gpu)]);
    let replica = world.replica(None);
    let span = |since| hold_span(&replica, world.now, IDENTITY, since);
    assert_eq!(
        (span((0, 1)), span((0, 2))),
        (HoldSpan::Uncovered, HoldSpan::Held)
    );
}

/// A router's claim is of a replica that has not noticed that the log lost its end.
#[test]
fn a_removal_at_a_position_that_the_log_gives_again_interrupts() {
    let mut world = World::new();
    world.publish("w0/0", vec![stored("", "a b", Tier::Gpu)]);
    let (credited_number, credited_position) = (0, 9);
    world.publish("w0/0", vec![removed("a b", Tier::Gpu)]);
    world.publish("w0/0", vec![stored("a", "b", Tier::Gpu)]);
    for name in ["c", "d", "e", "f", "g", "h", "i"] {
        world.publish("w0/0", vec![stored("", name, Tier::Gpu)]);
    }
    let since = (credited_number, credited_position);
    let span = hold_span(&world.fold, world.now, IDENTITY, since);
    assert_eq!(span, HoldSpan::Interrupted);
}

#[test]
fn records_before_a_loss_of_the_log_are_not_covered() {
    let mut world = World::new();
    world.publish("w0/0", vec![stored("", "a b", Tier::Gpu)]);
    world.publish("w0/0", vec![stored("", "c", Tier::Gpu)]);
    world.fold.log_lost_records();
    world.position = LogPosition(0);
    for name in ["d", "e", "f"] {
        world.publish("w0/0", vec![stored("", name, Tier::Gpu)]);
    }
    let span = |since| hold_span(&world.fold, world.now, IDENTITY, since);
    assert_eq!(
        (span((1, 2)), span((3, 2))),
        (HoldSpan::Uncovered, HoldSpan::Held)
    );
}

#[test]
fn a_record_of_a_former_generation_is_not_covered() {
    let mut world = World::new();
    world.publish("w0/0", vec![stored("", "a b", Tier::Gpu)]);
    // From here on the former generation's removals are known.
    world.publish("w0/0", vec![Change::Cleared { tier: Tier::Gpu }]);
    world.shim("w0/0").next_generation();
    world.publish("w0/0", vec![stored("", "a b", Tier::Gpu)]);
    let present = world.ask("a")[0].generation;
    let former = Generation(present.0 - 1);
    let spans = [former, present].map(|generation| {
        let query = HoldQuery {
            source: source("w0/0"),
            log: IDENTITY,
            since: LogPosition(3),
            block: prefix("a b").unwrap(),
            tier: Tier::Gpu,
            generation,
            number: RecordNumber(0),
        };
        hold_answer(&world.fold, &query, world.now).span
    });
    assert_eq!(spans, [HoldSpan::Uncovered, HoldSpan::Held]);
}
