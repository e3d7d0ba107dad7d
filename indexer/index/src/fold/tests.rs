mod age;
mod kept;

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use warmroute_proto::query::{
    IndexAnswer, IndexQuery, SourceState, UnknownReason, is_without_events,
};
use warmroute_proto::registry::ResyncReason;
use warmroute_proto::{Generation, Record, RecordNumber, TierState};

use super::*;
use crate::query;
use crate::tests_support::{
    IDENTITY, World, heartbeat_message, heartbeat_message_on, locals, namespace, prefix, removed,
    source, stored,
};

pub(super) const W: &str = "w1/0";
pub(super) const SECOND: Duration = Duration::from_secs(1);

pub(super) fn gpu(names: &str) -> Vec<Change> {
    vec![stored("", names, Tier::Gpu)]
}

/// One source that holds `a b c`.
pub(super) fn world() -> World {
    let mut world = World::new();
    assert_eq!(world.publish(W, gpu("a b c")), RecordVerdict::Started);
    assert_eq!(world.state(W), SourceState::Exact);
    world
}

pub(super) fn resyncs(world: &mut World) -> Vec<(ResyncReason, Generation)> {
    let now = world.now;
    let requests = world.fold.poll_resyncs(now);
    requests
        .into_iter()
        .map(|request| (request.reason, request.above))
        .collect()
}

#[test]
fn records_in_order_are_exact() {
    let mut world = world();
    let change = vec![removed("a b", Tier::Gpu)];
    assert_eq!(world.publish(W, change), RecordVerdict::Applied);
    assert_eq!(world.state(W), SourceState::Exact);
    assert_eq!(world.ask("a b c")[0].run.gpu, 1);
    assert_eq!(world.ask("a b c")[0].number, Some(RecordNumber(1)));
}

#[test]
fn duplicate_changes_nothing() {
    let mut world = world();
    let record = world.shim(W).clone().record(gpu("x"));
    world.shim(W).record(gpu("x"));
    assert_eq!(world.deliver_record(&record), RecordVerdict::Applied);
    assert_eq!(world.deliver_record(&record), RecordVerdict::Duplicate);
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn same_number_with_other_bytes_is_stale_until_the_next_generation() {
    let mut world = world();
    let mut record = world.shim(W).clone().record(gpu("x"));
    record.number = RecordNumber(0);
    assert_eq!(world.deliver_record(&record), RecordVerdict::Violation);
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::Mismatch, Generation(1))]
    );
    world.heartbeat(W);
    assert_eq!(world.state(W), SourceState::Stale);
    world.shim(W).next_generation();
    assert_eq!(world.publish(W, gpu("a")), RecordVerdict::Started);
    assert_eq!(world.state(W), SourceState::Exact);
    assert_eq!(world.ask("a b c")[0].run.gpu, 1);
}

#[test]
fn gap_is_stale_at_once_and_ends_when_the_missing_one_comes() {
    let mut world = world();
    let lost = world.shim(W).record(gpu("x"));
    let next = world.shim(W).record(gpu("y"));
    assert_eq!(world.deliver_record(&next), RecordVerdict::Ahead);
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(world.ask("a b c")[0].run.gpu, 0, "no credit");
    assert_eq!(world.deliver_record(&lost), RecordVerdict::Applied);
    assert_eq!(
        world.state(W),
        SourceState::Stale,
        "the later one is missing now"
    );
    assert_eq!(world.deliver_record(&next), RecordVerdict::Applied);
    assert_eq!(world.state(W), SourceState::Exact);
    world.wait(10 * SECOND);
    assert_eq!(resyncs(&mut world), []);
}

#[test]
fn gap_that_stays_asks_for_a_new_generation_after_patience() {
    let mut world = world();
    world.shim(W).record(gpu("x"));
    let next = world.shim(W).record(gpu("y"));
    world.deliver_record(&next);
    world.wait(source::PATIENCE - Duration::from_millis(1));
    assert_eq!(resyncs(&mut world), []);
    world.wait(Duration::from_millis(1));
    assert_eq!(resyncs(&mut world), [(ResyncReason::Gap, Generation(1))]);
    assert_eq!(resyncs(&mut world), [], "not twice");
    world.wait(10 * SECOND);
    assert_eq!(resyncs(&mut world), [(ResyncReason::Gap, Generation(1))]);
}

#[test]
fn generation_without_its_beginning_holds_nothing() {
    let mut world = world();
    world.shim(W).next_generation();
    let first = world.shim(W).record(gpu("a"));
    let second = world.shim(W).record(gpu("z"));
    assert_eq!(world.deliver_record(&second), RecordVerdict::StartedBehind);
    assert_eq!(world.fold.held(&source(W)).count(), 0);
    assert!(!world.state(W).gives_credit());
    assert_eq!(world.deliver_record(&first), RecordVerdict::Applied);
    assert_eq!(world.deliver_record(&second), RecordVerdict::Applied);
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn wrong_digest_is_found_at_its_record() {
    let mut world = world();
    let mut record = world.shim(W).record(gpu("x"));
    record.after.sum ^= 1;
    assert_eq!(world.deliver_record(&record), RecordVerdict::Mismatch);
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::Mismatch, Generation(1))]
    );
    assert_eq!(world.publish(W, gpu("y")), RecordVerdict::NotFolded);
    assert_eq!(world.state(W), SourceState::Stale);
}

#[test]
fn contradictions_are_stale() {
    for change in [
        stored("", "a", Tier::Gpu),
        removed("z", Tier::Gpu),
        stored("q", "r", Tier::Gpu),
    ] {
        let mut world = world();
        assert_eq!(world.publish(W, vec![change]), RecordVerdict::Contradiction);
        assert_eq!(world.state(W), SourceState::Stale);
    }
}

#[test]
fn undecodable_record_is_doubted_until_the_next_number() {
    let mut world = world();
    assert_eq!(
        world.deliver(&source(W), b"junk".to_vec()),
        RecordVerdict::Undecodable
    );
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(world.publish(W, gpu("x")), RecordVerdict::Applied);
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn undecodable_record_is_doubted_until_a_level_heartbeat() {
    let mut world = world();
    world.deliver(&source(W), Vec::new());
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn record_on_anothers_subject_makes_that_one_stale() {
    let mut world = world();
    world.publish("w2/0", gpu("a"));
    let record = world.shim("w2/0").record(gpu("x"));
    let bytes = codec::encode(&record).unwrap();
    assert_eq!(world.deliver(&source(W), bytes), RecordVerdict::WrongSource);
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(world.state("w2/0"), SourceState::Exact);
}

#[test]
fn foreign_subject_and_old_position_are_counted() {
    let mut world = world();
    let mut message = LogMessage {
        position: LogPosition(2),
        subject: "wr.other.kv.w1.0".to_owned(),
        payload: bytes::Bytes::new(),
        stored_unix_ns: 0,
    };
    assert_eq!(
        world.fold.apply(world.now, &message),
        RecordVerdict::WrongSubject
    );
    message.position = LogPosition(1);
    assert_eq!(
        world.fold.apply(world.now, &message),
        RecordVerdict::Replayed
    );
    assert_eq!(world.fold.position(), LogPosition(2));
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn image_is_catching_up_until_its_last_part() {
    let mut world = World::new();
    world.shim(W).states = Tiers::all(TierState::CatchingUp);
    world.publish(W, gpu("a b"));
    assert_eq!(world.state(W), SourceState::CatchingUp);
    world.shim(W).states.gpu = TierState::Partial;
    world.publish(W, vec![stored("a b", "c", Tier::Gpu)]);
    let answer = world.ask("a b c").remove(0);
    assert_eq!(answer.states.gpu, SourceState::Partial);
    assert_eq!(answer.states.cpu, SourceState::CatchingUp);
    assert_eq!(answer.run.gpu, 3);
}

#[test]
fn proof_lapses_after_five_seconds_and_a_heartbeat_renews_it() {
    let mut world = world();
    world.wait(PROOF_AGE_MAX - Duration::from_millis(1));
    assert_eq!(world.state(W), SourceState::Exact);
    world.wait(Duration::from_millis(1));
    let answer = world.ask("a b c").remove(0);
    assert_eq!(answer.states.gpu, SourceState::Unknown);
    assert_eq!(answer.reason, Some(UnknownReason::NoProof));
    assert_eq!(answer.run, Tiers::default());
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn backlog_proves_nothing_about_now() {
    let mut world = World::new();
    world.fold = Fold::new(&namespace(), None);
    world.fold.follow(IDENTITY);
    world.fold.observe_end(world.now, LogPosition(2), 0);
    assert_eq!(world.publish(W, gpu("a")), RecordVerdict::Started);
    assert_eq!(world.publish(W, gpu("b")), RecordVerdict::Applied);
    assert_eq!(world.state(W), SourceState::Unknown, "they may be days old");
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Exact);
    world.wait(PROOF_AGE_MAX);
    assert_eq!(world.state(W), SourceState::Unknown);
    assert_eq!(world.publish(W, gpu("c")), RecordVerdict::Applied);
    assert_eq!(world.state(W), SourceState::Exact, "this one is new");
}

#[test]
fn heartbeat_states_replace_the_records() {
    let mut world = world();
    world.shim(W).states.gpu = TierState::Stale;
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Stale);
    world.shim(W).states.gpu = TierState::Unverified;
    world.heartbeat(W);
    assert_eq!(world.state(W), SourceState::Unverified);
}

#[test]
fn a_stale_claim_without_any_batch_is_unknown_without_a_reason() {
    let mut world = world();
    let mut heartbeat = world.shim(W).heartbeat();
    heartbeat.states = Tiers::all(TierState::Stale);
    heartbeat.engine_seq = None;
    let message = heartbeat_message(&heartbeat);
    let verdict = world.fold.heartbeat(world.now, &message);
    assert_eq!(verdict, HeartbeatVerdict::Proof);
    let answer = world.ask("a b c").remove(0);
    assert_eq!(
        (answer.states, answer.reason),
        (Tiers::all(SourceState::Unknown), None)
    );
    assert!(is_without_events(answer.states.gpu, answer.reason));
    world.heartbeat(W);
    assert_eq!(world.state(W), SourceState::Exact, "its first batch");
}

#[test]
fn heartbeat_with_another_digest_is_stale() {
    let mut world = world();
    let pair = (prefix("x").unwrap(), Tier::Gpu);
    world.shim(W).pairs.insert(pair);
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Mismatch);
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::Mismatch, Generation(1))]
    );
}

#[test]
fn heartbeat_ahead_of_the_log_starts_patience_only() {
    let mut world = world();
    let late = world.shim(W).record(gpu("x"));
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Behind);
    assert_eq!(
        world.state(W),
        SourceState::Exact,
        "true as of its engine sequence"
    );
    world.wait(SECOND);
    assert_eq!(world.deliver_record(&late), RecordVerdict::Applied);
    world.wait(SECOND);
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn lost_tail_is_found_by_heartbeats() {
    let mut world = world();
    world.shim(W).record(gpu("x"));
    for _ in 0..5 {
        assert_eq!(world.heartbeat(W), HeartbeatVerdict::Behind);
        world.wait(SECOND);
    }
    assert_eq!(world.state(W), SourceState::Unknown, "no proof");
    world.wait(SECOND);
    assert_eq!(resyncs(&mut world), [(ResyncReason::Gap, Generation(1))]);
}

#[test]
fn older_heartbeats_prove_nothing() {
    let mut world = world();
    let old = world.shim(W).clone();
    world.publish(W, gpu("x"));
    world.shims.insert(W.to_owned(), old);
    for _ in 0..5 {
        assert_eq!(world.heartbeat(W), HeartbeatVerdict::Late);
        world.wait(SECOND);
    }
    assert_eq!(world.state(W), SourceState::Unknown);
}

#[test]
fn heartbeat_of_a_newer_generation_voids_the_old_one() {
    let mut world = world();
    world.shim(W).next_generation();
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Behind);
    assert_eq!(world.state(W), SourceState::CatchingUp);
    assert_eq!(world.ask("a b c")[0].run.gpu, 0);
    world.wait(60 * SECOND);
    assert_eq!(
        resyncs(&mut world),
        [],
        "it has no record that could be lost"
    );
    assert_eq!(world.publish(W, gpu("a")), RecordVerdict::Started);
    assert_eq!(world.state(W), SourceState::Exact);
}

/// Permissions guard subjects, not payloads.
#[test]
fn heartbeat_speaks_for_its_subject_alone() {
    let mut world = world();
    let other = source("w2/0");
    let heartbeat = world.shim(W).heartbeat();
    world.wait(PROOF_AGE_MAX);
    assert_eq!(world.state(W), SourceState::Unknown);
    let hear = |world: &mut World, message: &Broadcast| {
        let verdict = world.fold.heartbeat(world.now, message);
        assert_eq!(world.state(W), SourceState::Unknown);
        verdict
    };
    let foreign = heartbeat_message_on(&other, &heartbeat);
    assert_eq!(hear(&mut world, &foreign), HeartbeatVerdict::WrongSource);
    for subject in ["wr.test.hb.w1", "wr.other.hb.w1.0", "wr.test.kv.w1.0"] {
        let foreign = Broadcast {
            subject: subject.to_owned(),
            ..heartbeat_message(&heartbeat)
        };
        assert_eq!(hear(&mut world, &foreign), HeartbeatVerdict::WrongSubject);
    }
    assert_eq!(
        world.fold.statuses(world.now).count(),
        1,
        "no source is created"
    );
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Exact);
}

/// Else its shim would be asked for one above it, and there is none.
#[test]
fn no_message_leads_to_the_end_of_generations() {
    let mut world = world();
    let fair = world.shim(W).clone();
    for generation in [u64::MAX, u64::MAX - 1, 1 << 40].map(Generation) {
        world.shim(W).generation = generation;
        assert_eq!(world.heartbeat(W), HeartbeatVerdict::Implausible);
        assert_eq!(world.state(W), SourceState::Exact);
        world.shim(W).number = None;
        assert_eq!(world.publish(W, gpu("x")), RecordVerdict::Implausible);
        assert_eq!(world.state(W), SourceState::Stale, "it may have missed one");
        *world.shim(W) = fair.clone();
        assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    }
    // Announcements do not add up.
    let far = Generation(1 << 32);
    for generation in [far, Generation(2 << 32), Generation(3 << 32)] {
        world.shim(W).generation = generation;
        world.heartbeat(W);
    }
    *world.shim(W) = fair;
    for _ in 0..10 {
        world.wait(SECOND);
        world.heartbeat(W);
    }
    assert_eq!(resyncs(&mut world), [(ResyncReason::LogLost, far)]);
    world.shim(W).generation = far;
    world.shim(W).next_generation();
    assert_eq!(world.publish(W, gpu("a")), RecordVerdict::Started);
    assert_eq!(world.state(W), SourceState::Exact);
}

/// It was claimed and not begun; then the registry that knew of it was lost.
#[test]
fn announced_generation_that_never_begins_is_requested_again_while_the_former_is_alive() {
    let mut world = world();
    let (number, pairs) = (world.shim(W).number, world.shim(W).pairs.clone());
    world.shim(W).next_generation();
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Behind);
    let shim = world.shim(W);
    (shim.generation, shim.number, shim.pairs) = (Generation(1), number, pairs);
    let mut asked = Vec::new();
    for _ in 0..10 {
        world.wait(SECOND);
        world.heartbeat(W);
        assert_eq!(world.state(W), SourceState::CatchingUp);
        asked.extend(resyncs(&mut world));
    }
    assert_eq!(asked[..1], [(ResyncReason::LogLost, Generation(2))]);
    world.shim(W).generation = Generation(3);
    world.shim(W).number = None;
    world.shim(W).pairs.clear();
    assert_eq!(world.publish(W, gpu("a")), RecordVerdict::Started);
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn generation_that_never_comes_is_asked_for_above_it() {
    let mut world = World::new();
    world.shim(W).generation = Generation(7);
    world.shim(W).record(gpu("a"));
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Behind);
    world.wait(source::PATIENCE);
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::LogLost, Generation(7))]
    );
    world.shim(W).next_generation();
    assert_eq!(world.publish(W, gpu("a")), RecordVerdict::Started);
    world.wait(60 * SECOND);
    assert_eq!(resyncs(&mut world), []);
}

#[test]
fn fenced_holder_is_asked_to_come_above_the_fence_once_the_fence_is_silent() {
    let mut world = World::new();
    world.shim(W).generation = Generation(9);
    world.publish(W, gpu("a"));
    let shim = world.shim(W);
    shim.generation = Generation(3);
    shim.number = None;
    assert_eq!(world.publish(W, gpu("b")), RecordVerdict::Old);
    assert_eq!(
        resyncs(&mut world),
        [],
        "the present generation spoke just now"
    );
    world.wait(PROOF_AGE_MAX);
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Old);
    assert_eq!(resyncs(&mut world), [(ResyncReason::Fenced, Generation(9))]);
}

#[test]
fn at_most_eight_resyncs_wait_and_the_next_ones_get_their_turn() {
    let mut world = World::new();
    for worker in 0..20 {
        let name = format!("w{worker:02}/0");
        world.publish(&name, gpu("a"));
        world.publish(&name, vec![removed("z", Tier::Gpu)]);
    }
    let mut asked = BTreeSet::new();
    for round in [8, 16, 20] {
        let requests = world.fold.poll_resyncs(world.now);
        assert!(requests.len() <= 8);
        asked.extend(requests.into_iter().map(|request| request.source));
        assert_eq!(asked.len(), round);
        assert_eq!(world.fold.poll_resyncs(world.now).len(), 0);
        world.wait(10 * SECOND);
    }
}

#[test]
fn answered_resyncs_make_room() {
    let mut world = World::new();
    for worker in 0..9 {
        let name = format!("w{worker}/0");
        world.publish(&name, gpu("a"));
        world.publish(&name, vec![removed("z", Tier::Gpu)]);
    }
    assert_eq!(resyncs(&mut world).len(), 8);
    world.shim("w0/0").next_generation();
    world.publish("w0/0", gpu("a"));
    assert_eq!(resyncs(&mut world).len(), 1);
}

#[test]
fn log_that_skips_positions_makes_all_doubtful_until_proven() {
    let mut world = world();
    world.publish("w2/0", gpu("a"));
    world.position = LogPosition(100);
    world.publish("w3/0", gpu("a"));
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(world.state("w3/0"), SourceState::Exact);
    assert_eq!(world.fold.jumps(), 1);
    world.publish(W, gpu("x"));
    world.heartbeat("w2/0");
    assert_eq!(world.state(W), SourceState::Exact);
    assert_eq!(world.state("w2/0"), SourceState::Exact);
}

#[test]
fn another_log_is_read_from_its_beginning() {
    let mut world = world();
    world.fold.follow(IDENTITY);
    assert_eq!(world.fold.position(), LogPosition(1), "the same log");
    let other = StreamIdentity {
        nonce: 8,
        ..IDENTITY
    };
    world.fold.follow(other);
    assert_eq!(world.fold.position(), LogPosition(0));
    assert_eq!(world.state(W), SourceState::Stale);
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::LogLost, Generation(1))]
    );
    world.position = LogPosition(0);
    world.shim(W).next_generation();
    assert_eq!(world.publish(W, gpu("a")), RecordVerdict::Started);
}

#[test]
fn worker_gone_is_masked_and_comes_back_as_it_was() {
    let mut world = world();
    world.register("w1");
    world.deregister("w1");
    world.heartbeat(W);
    let answer = world.ask("a b c").remove(0);
    assert_eq!(answer.states.gpu, SourceState::Unknown);
    assert_eq!(answer.reason, Some(UnknownReason::ShimGone));
    world.register("w1");
    assert_eq!(world.state(W), SourceState::Exact);
    assert_eq!(world.ask("a b c")[0].run.gpu, 3);
}

#[test]
fn worker_that_a_new_watch_does_not_name_is_gone() {
    let mut world = world();
    world.publish("w2/0", gpu("a"));
    world.register("w1");
    world.register("w2");
    world.fold.watch_begins();
    world.register("w2");
    world.fold.watch_is_current(world.now);
    assert_eq!(world.state(W), SourceState::Unknown);
    assert_eq!(world.state("w2/0"), SourceState::Exact);
}

#[test]
fn long_gone_worker_is_freed_and_returns_by_a_new_generation() {
    let mut world = world();
    world.register("w1");
    world.deregister("w1");
    world.wait(FREE_AFTER);
    while world.fold.reclaim(1) {}
    assert_eq!(world.fold.tree().nodes(), 0);
    world.register("w1");
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::NotFolded);
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::LogLost, Generation(1))]
    );
    world.shim(W).next_generation();
    world.publish(W, gpu("a"));
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn replica_behind_says_so() {
    let world = world();
    let ask = |position| {
        let query = IndexQuery {
            blocks: locals("a"),
            at_least: Some(LogPosition(position)),
        };
        query::answer(&world.fold, &query, world.now)
    };
    assert!(matches!(ask(1), IndexAnswer::Runs { .. }));
    let position = LogPosition(1);
    assert_eq!(ask(2), IndexAnswer::Behind { position });
}

#[derive(Clone, Debug)]
pub(super) enum Trick {
    Deliver,
    Drop,
    Twice,
    Later,
    Junk,
    Heartbeat,
    NewGeneration,
    Wait,
}

pub(super) fn trick() -> impl Strategy<Value = Trick> {
    prop_oneof![
        12 => Just(Trick::Deliver),
        1 => Just(Trick::Drop),
        2 => Just(Trick::Twice),
        2 => Just(Trick::Later),
        1 => Just(Trick::Junk),
        2 => Just(Trick::Heartbeat),
        1 => Just(Trick::NewGeneration),
        1 => Just(Trick::Wait),
    ]
}

/// What the shim does next: toggles one block of a small forest, as an engine could.
fn toggle(world: &mut World, chain: &[u8], tier: Tier) -> Vec<Change> {
    toggle_of(world, W, chain, tier)
}

pub(super) fn toggle_of(world: &mut World, name: &str, chain: &[u8], tier: Tier) -> Vec<Change> {
    let names: Vec<String> = chain.iter().map(|&name| format!("n{name}")).collect();
    let pairs = &world.shim(name).pairs;
    let held = |length: usize, tier| {
        prefix(&names[..length].join(" ")).is_some_and(|prefix| pairs.contains(&(prefix, tier)))
    };
    if held(names.len(), tier) {
        return vec![removed(&names.join(" "), tier)];
    }
    // Stores the missing part of the chain, so that its parent is held in some tier.
    let known = (0..names.len())
        .rev()
        .find(|&length| length == 0 || Tier::ALL.iter().any(|&tier| held(length, tier)))
        .unwrap_or(0);
    vec![stored(
        &names[..known].join(" "),
        &names[known..].join(" "),
        tier,
    )]
}

type Truth = BTreeMap<(Generation, RecordNumber), BTreeSet<(PrefixHash, Tier)>>;

/// The shim's next record; what it holds afterwards is remembered.
fn publish(world: &mut World, truth: &mut Truth, changes: Vec<Change>) -> Record {
    let shim = world.shim(W);
    let record = shim.record(changes);
    truth.insert((record.generation, record.number), shim.pairs.clone());
    record
}

proptest! {
    /// Whatever happens to the records: a credited source holds what its shim held at the number
    /// that the answer names, and after a last heartbeat and a new generation all is well.
    #[test]
    fn credited_is_true_and_everything_converges(
        tricks in prop::collection::vec(
            (trick(), prop::collection::vec(0..3_u8, 1..4), 0..3_usize), 1..80
        ),
    ) {
        let mut world = World::new();
        let mut truth = Truth::new();
        let mut later = Vec::new();
        for (trick, chain, tier) in tricks {
            let changes = toggle(&mut world, &chain, Tier::ALL[tier]);
            match trick {
                Trick::Junk => {
                    world.deliver(&source(W), b"junk".to_vec());
                }
                Trick::Heartbeat => {
                    world.heartbeat(W);
                }
                Trick::NewGeneration => world.shim(W).next_generation(),
                Trick::Wait => world.wait(SECOND),
                Trick::Deliver => {
                    let record = publish(&mut world, &mut truth, changes);
                    world.deliver_record(&record);
                    for record in later.drain(..) {
                        world.deliver_record(&record);
                    }
                }
                Trick::Drop => drop(publish(&mut world, &mut truth, changes)),
                Trick::Twice => {
                    let record = publish(&mut world, &mut truth, changes);
                    world.deliver_record(&record);
                    world.deliver_record(&record);
                }
                Trick::Later => later.push(publish(&mut world, &mut truth, changes)),
            }
            for answer in world.ask("") {
                if answer.states.gpu.gives_credit() {
                    let held: BTreeSet<_> = world.fold.held(&answer.source).collect();
                    let number = answer.number.unwrap();
                    prop_assert_eq!(&held, &truth[&(answer.generation, number)]);
                }
            }
        }
        world.shim(W).next_generation();
        world.publish(W, gpu("a b"));
        prop_assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
        prop_assert_eq!(world.state(W), SourceState::Exact);
        let held: BTreeSet<_> = world.fold.held(&source(W)).collect();
        prop_assert_eq!(&held, &world.shim(W).pairs);
        while world.fold.reclaim(5) {}
        prop_assert_eq!(world.fold.tree().nodes(), 2);
    }

    /// No bytes stop the reader.
    #[test]
    fn any_bytes_have_a_verdict(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut world = world();
        world.deliver(&source(W), payload.clone());
        let subject = Subjects::new(&namespace()).heartbeat(&source(W));
        let message = Broadcast { subject, payload: payload.clone().into() };
        world.fold.heartbeat(world.now, &message);
        prop_assert!(world.fold.worker_put("wr.test.worker.w1", &payload).is_err());
        world.heartbeat(W);
        prop_assert!(world.state(W) <= SourceState::Stale);
    }
}

/// Everything that knew of the generation is lost but this fold, and it is given again.
#[test]
fn a_shim_that_stays_behind_what_is_in_is_asked_to_come_above_the_fence() {
    let mut world = world();
    world.publish(W, vec![stored("a b c", "d", Tier::Gpu)]);
    let shim = world.shim(W);
    shim.number = Some(RecordNumber(0));
    shim.pairs.clear();
    for _ in 0..4 {
        assert_eq!(world.heartbeat(W), HeartbeatVerdict::Late);
        world.wait(SECOND);
    }
    assert_eq!(world.state(W), SourceState::Exact, "the last proof holds");
    for _ in 0..6 {
        world.wait(SECOND);
        assert_eq!(world.heartbeat(W), HeartbeatVerdict::Late);
        assert_eq!(resyncs(&mut world), []);
    }
    assert_eq!(world.state(W), SourceState::Unknown);
    world.wait(2 * SECOND);
    world.heartbeat(W);
    assert_eq!(resyncs(&mut world), [(ResyncReason::Fenced, Generation(1))]);
}

/// As in any second of a busy shim: what it knows to be acknowledged is behind what is in.
#[test]
fn a_heartbeat_on_its_way_asks_for_nothing() {
    let mut world = world();
    for step in 0..30 {
        let late = heartbeat_message(&world.shim(W).heartbeat());
        let name = format!("x{step}");
        world.publish(W, vec![stored("a b c", &name, Tier::Gpu)]);
        let now = world.now;
        assert_eq!(world.fold.heartbeat(now, &late), HeartbeatVerdict::Late);
        world.wait(SECOND);
    }
    world.wait(10 * SECOND);
    for _ in 0..3 {
        let late = world
            .shim(W)
            .number
            .map(|number| RecordNumber(number.0 - 1));
        let mut heartbeat = world.shim(W).heartbeat();
        heartbeat.number = late;
        let now = world.now;
        assert_eq!(
            world.fold.heartbeat(now, &heartbeat_message(&heartbeat)),
            HeartbeatVerdict::Late
        );
        assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
        world.wait(7 * SECOND);
        assert_eq!(resyncs(&mut world), []);
    }
}
