//! Snapshots, patience, cuts: what a fold keeps, and what it must not conclude.

use std::collections::BTreeSet;

use proptest::prelude::*;
use warmroute_proto::query::{SourceState, UnknownReason};
use warmroute_proto::registry::ResyncReason;
use warmroute_proto::{Generation, RecordNumber, Tier, Tiers, codec};

use super::*;
use crate::fold::tests::{SECOND, Trick, W, gpu, resyncs, toggle_of, trick, world};
use crate::fold::{FREE_AFTER, HeartbeatVerdict, RecordVerdict, source::PATIENCE};
use crate::snapshot::SnapshotReadError;
use crate::tests_support::{World, heartbeat_message, namespace, prefix, removed, source, stored};

/// What two folds agree on at one position, whatever heartbeats they received.
type ReplicatedState = Vec<(
    Source,
    Option<Generation>,
    Option<RecordNumber>,
    Option<Digest>,
)>;

fn replicated_state(fold: &Fold, now: Instant) -> ReplicatedState {
    fold.statuses(now)
        .filter(|(_, standing)| standing.generation.is_some())
        .map(|(source, standing)| {
            let number = standing.number;
            (source.clone(), standing.generation, number, standing.digest)
        })
        .collect()
}

/// Two sources over several records and a new generation, with a hole.
fn rich() -> World {
    let mut world = world();
    world.publish("w2/0", gpu("a b x y"));
    world.publish(
        "w2/0",
        vec![removed("a b", Tier::Gpu), stored("a", "q", Tier::Disk)],
    );
    world.shim(W).next_generation();
    world.publish(W, gpu("a b d"));
    world
}

#[test]
fn restored_sources_are_unknown_until_their_first_record_or_heartbeat() {
    let mut world = rich();
    let snapshot = world.snapshot().unwrap();
    world.fold = world.replica(Some(&snapshot));
    world.fold.observe_end(world.now, world.position, 0);
    for source in [W, "w2/0"] {
        let answers = world.ask("a b d");
        let answer = answers
            .iter()
            .find(|answer| answer.source == crate::tests_support::source(source));
        let answer = answer.unwrap();
        assert_eq!(answer.states.gpu, SourceState::Unknown);
        assert_eq!(answer.reason, Some(UnknownReason::NoProof));
        assert_eq!(answer.run, Tiers::default());
    }
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Exact);
    assert_eq!(world.state("w2/0"), SourceState::Unknown);
    assert_eq!(world.publish("w2/0", gpu("n")), RecordVerdict::Applied);
    assert_eq!(world.state("w2/0"), SourceState::Exact);
    assert_eq!(world.ask("a b d")[0].run.gpu, 3);
}

#[test]
fn every_corrupt_byte_and_every_cut_is_refused() {
    let snapshot = rich().snapshot().unwrap();
    assert!(Restored::read(&snapshot).is_ok());
    for at in 0..snapshot.len() {
        for flip in [1, 0x80] {
            let mut corrupt = snapshot.clone();
            corrupt[at] ^= flip;
            assert!(Restored::read(&corrupt).is_err(), "byte {at}");
        }
        assert!(Restored::read(&snapshot[..at]).is_err(), "cut at {at}");
    }
    let longer = [&snapshot[..], &[0]].concat();
    assert!(Restored::read(&longer).is_err());
}

/// `REWRITE_GOLDEN=1` writes one if there is none.
#[test]
fn the_golden_snapshot_is_written_and_read() {
    let world = rich();
    let blob = golden_snapshot(&world);
    let replica = world.replica(Some(&blob));
    assert_eq!(
        replicated_state(&replica, world.now),
        replicated_state(&world.fold, world.now)
    );
    assert!(world.snapshot().unwrap() == blob);
}

fn golden_snapshot(world: &World) -> Vec<u8> {
    let version = codec::VERSION;
    let path = format!(
        "{}/testdata/v{version}_snapshot.hex",
        env!("CARGO_MANIFEST_DIR")
    );
    if std::env::var_os("REWRITE_GOLDEN").is_some() && !std::path::Path::new(&path).exists() {
        let hex: String = world
            .snapshot()
            .unwrap()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        std::fs::write(&path, hex + "\n").unwrap();
    }
    let hex = std::fs::read_to_string(path).unwrap();
    let digits: Vec<u8> = hex
        .trim()
        .chars()
        .map(|digit| u8::try_from(digit.to_digit(16).unwrap()).unwrap())
        .collect();
    digits
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}

/// A blob that is intact but was written wrongly: only the digests reveal it.
#[test]
fn a_digest_that_is_not_the_trees_is_refused() {
    let cut = rich().fold.cut(Vec::new()).unwrap();
    let mut head = cut.head.clone();
    head.sources[1].after.sum ^= 1;
    let blob = crate::snapshot::format::encode(&head, &cut.image).unwrap();
    let wrong = Restored::read(&blob).err().unwrap();
    assert!(matches!(wrong, SnapshotReadError::Digest(of) if of == source("w2/0")));
    let mut head = cut.head;
    head.sources.remove(0);
    let blob = crate::snapshot::format::encode(&head, &cut.image).unwrap();
    assert!(matches!(
        Restored::read(&blob),
        Err(SnapshotReadError::Parts)
    ));
}

#[test]
fn nothing_read_is_no_snapshot() {
    assert_eq!(World::new().snapshot().err(), Some(NoSnapshot::Nothing));
}

#[test]
fn fences_of_sources_that_are_not_folded_are_kept() {
    let mut world = world();
    world.publish(W, gpu("a"));
    assert_eq!(world.state(W), SourceState::Stale, "it contradicted itself");
    world.publish("w2/0", gpu("a"));
    world.register("w2");
    world.deregister("w2");
    world.wait(FREE_AFTER);
    let snapshot = world.snapshot().unwrap();
    let mut replica = world.replica(Some(&snapshot));
    let requests = replica.poll_resyncs(world.now);
    assert_eq!(requests, [], "no heartbeat yet");
    assert_eq!(
        replicated_state(&replica, world.now),
        replicated_state(&world.fold, world.now)
    );
    let heartbeat = heartbeat_message(&world.shim("w2/0").heartbeat());
    let verdict = replica.heartbeat(world.now, &heartbeat);
    assert_eq!(verdict, HeartbeatVerdict::NotFolded);
    let heartbeat = heartbeat_message(&world.shim(W).heartbeat());
    replica.heartbeat(world.now, &heartbeat);
    let requests = replica.poll_resyncs(world.now);
    let reasons: Vec<_> = requests.iter().map(|request| request.reason).collect();
    assert_eq!(reasons, [ResyncReason::Mismatch, ResyncReason::LogLost]);
}

#[test]
fn a_running_fold_that_goes_back_asks_for_what_it_knows_to_exist() {
    let mut world = world();
    let snapshot = world.snapshot().unwrap();
    world.publish(W, gpu("x"));
    world.publish("w2/0", gpu("a"));
    // The log lost both: nothing comes behind the snapshot.
    let now = world.now;
    drop(world.fold.adopt(now, Restored::read(&snapshot).unwrap()));
    world.position = world.fold.position();
    assert_eq!(
        world.fold.mark().map(|mark| mark.position),
        Some(world.position)
    );
    world.fold.observe_end(now, world.position, 0);
    assert_eq!(resyncs(&mut world), []);
    world.wait(PATIENCE);
    let requests = resyncs(&mut world);
    assert_eq!(requests.len(), 2);
    assert!(requests.contains(&(ResyncReason::Gap, Generation(1))));
    assert!(requests.contains(&(ResyncReason::LogLost, Generation(1))));
}

#[test]
fn a_running_fold_that_goes_back_catches_up_without_asking() {
    let mut world = rich();
    let snapshot = world.snapshot().unwrap();
    world.publish(W, gpu("x"));
    world.shim("w2/0").next_generation();
    world.publish("w2/0", gpu("z"));
    let before = replicated_state(&world.fold, world.now);
    drop(
        world
            .fold
            .adopt(world.now, Restored::read(&snapshot).unwrap()),
    );
    let mut fold = std::mem::replace(&mut world.fold, Fold::new(&namespace(), None));
    world.catch_up(&mut fold);
    world.fold = fold;
    assert_eq!(replicated_state(&world.fold, world.now), before);
    world.wait(60 * SECOND);
    assert_eq!(resyncs(&mut world), []);
    for source in [W, "w2/0"] {
        assert_eq!(world.heartbeat(source), HeartbeatVerdict::Proof);
        assert_eq!(world.state(source), SourceState::Exact);
    }
}

#[test]
fn a_mismatch_is_looked_for_in_a_snapshot_once_and_then_asked_for() {
    let mut world = world();
    world.fold.reload_first();
    let pair = (prefix("x").unwrap(), Tier::Gpu);
    world.shim(W).pairs.insert(pair);
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Mismatch);
    assert_eq!(resyncs(&mut world), [], "a snapshot may help");
    let now = world.now;
    assert_eq!(world.fold.poll_reload(now), [(source(W), Generation(1))]);
    assert_eq!(world.fold.poll_reload(now), []);
    assert_eq!(resyncs(&mut world), [], "it is being read");
    assert!(world.fold.is_reloading());
    assert!(matches!(
        world.fold.cut(Vec::new()),
        Err(NoSnapshot::Diverged)
    ));
    world.fold.reload_ended();
    assert!(!world.fold.is_reloading());
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::Mismatch, Generation(1))]
    );
    // Another source, too soon after the first: no second reload.
    world.publish("w2/0", gpu("a"));
    world.publish("w2/0", gpu("a"));
    assert_eq!(world.fold.poll_reload(now), []);
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::Mismatch, Generation(1))]
    );
}

#[test]
fn a_reload_heals_what_diverged_here_only() {
    let mut world = world();
    world.fold.reload_first();
    let snapshot = world.snapshot().unwrap();
    let pair = (prefix("x").unwrap(), Tier::Gpu);
    world.shim(W).pairs.insert(pair);
    world.heartbeat(W);
    world.shim(W).pairs.remove(&pair);
    let now = world.now;
    assert_eq!(world.fold.poll_reload(now).len(), 1);
    drop(world.fold.adopt(now, Restored::read(&snapshot).unwrap()));
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Exact);
    assert_eq!(resyncs(&mut world), []);
    // A second mismatch in one generation causes no second reload.
    world.shim(W).pairs.insert(pair);
    world.heartbeat(W);
    world.wait(60 * SECOND);
    let now = world.now;
    assert_eq!(world.fold.poll_reload(now), []);
    assert_eq!(
        resyncs(&mut world),
        [(ResyncReason::Mismatch, Generation(1))]
    );
}

#[test]
fn a_request_from_before_a_snapshot_is_not_repeated_at_once() {
    let mut world = world();
    let snapshot = world.snapshot().unwrap();
    let pair = (prefix("x").unwrap(), Tier::Gpu);
    world.shim(W).pairs.insert(pair);
    let wanted = [(ResyncReason::Mismatch, Generation(1))];
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Mismatch);
    assert_eq!(resyncs(&mut world), wanted);
    let now = world.now;
    drop(world.fold.adopt(now, Restored::read(&snapshot).unwrap()));
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Mismatch);
    assert_eq!(resyncs(&mut world), []);
    world.wait(10 * SECOND);
    assert_eq!(resyncs(&mut world), wanted);
}

#[test]
fn a_cut_with_another_digest_or_image_is_refused() {
    let world = rich();
    let cut = || world.fold.cut(Vec::new()).unwrap();
    assert_eq!(cut().verify(), Ok(()));
    for at in 0..2 {
        let mut wrong = cut();
        wrong.head.sources[at].after.sum ^= 1;
        let source = wrong.head.sources[at].source.clone();
        assert_eq!(wrong.verify(), Err(NoSnapshot::Mismatch(source)));
    }
    let mut empty = cut();
    empty.image.clear();
    assert!(empty.verify().is_err());
}

#[test]
fn a_lagging_reader_does_not_take_what_is_to_come_for_lost() {
    let mut world = world();
    let late = world.shim(W).record(gpu("x"));
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Behind);
    for _ in 0..60 {
        world.now += SECOND;
        world.fold.observe_end(world.now, LogPosition(1000), 0);
        let now = world.now;
        world.fold.tick(now);
    }
    assert_eq!(resyncs(&mut world), [], "the log is not in yet");
    assert_eq!(world.deliver_record(&late), RecordVerdict::Applied);
    world.heartbeat(W);
    assert_eq!(world.state(W), SourceState::Exact);
}

#[test]
fn during_an_outage_expired_leases_do_not_count_but_proof_expires() {
    let mut world = world();
    world.register("w1");
    let now = world.now;
    world.fold.cut_off(now);
    world.now += SECOND;
    world.deregister("w1");
    assert_eq!(world.state(W), SourceState::Exact, "proof is fresh");
    world.wait(5 * SECOND);
    let answer = world.ask("a").remove(0);
    assert_eq!(answer.reason, Some(UnknownReason::NoProof));
    let now = world.now;
    world.fold.reconnected(now);
    world.heartbeat(W);
    assert_eq!(
        world.state(W),
        SourceState::Exact,
        "it may yet take its lease again"
    );
    world.wait(6 * SECOND);
    world.heartbeat(W);
    let answer = world.ask("a").remove(0);
    assert_eq!(answer.reason, Some(UnknownReason::ShimGone));
}

#[test]
fn a_log_that_lost_records_is_read_again() {
    let mut world = rich();
    world.fold.log_lost_records();
    assert_eq!(world.fold.position(), LogPosition(0));
    assert_eq!(world.fold.mark(), None);
    assert_eq!(world.state(W), SourceState::Stale);
    let mut fold = std::mem::replace(&mut world.fold, Fold::new(&namespace(), None));
    let before = replicated_state(&fold, world.now);
    world.catch_up(&mut fold);
    world.fold = fold;
    assert_eq!(replicated_state(&world.fold, world.now), before);
    assert_eq!(world.heartbeat(W), HeartbeatVerdict::Proof);
    assert_eq!(world.state(W), SourceState::Exact);
}

proptest! {
    /// A replica that starts from a snapshot of any position and reads the rest is the one that
    /// lived, whatever the log holds: duplicates, gaps, junk, new generations, holes, tiers.
    #[test]
    fn snapshot_and_tail_are_the_fold_that_lived(
        tricks in prop::collection::vec(
            (trick(), 0..3_usize, prop::collection::vec(0..3_u8, 1..4), 0..3_usize), 1..60
        ),
    ) {
        let mut world = World::new();
        let mut snapshots = Vec::new();
        for (trick, who, chain, tier) in tricks {
            let name = [W, "w2/0", "w2/1"][who];
            let changes = toggle_of(&mut world, name, &chain, Tier::ALL[tier]);
            match trick {
                Trick::Junk => {
                    world.deliver(&source(name), b"junk".to_vec());
                }
                Trick::NewGeneration => world.shim(name).next_generation(),
                Trick::Drop | Trick::Later => drop(world.shim(name).record(changes)),
                Trick::Twice => {
                    let record = world.shim(name).record(changes);
                    world.deliver_record(&record);
                    world.deliver_record(&record);
                }
                Trick::Deliver | Trick::Heartbeat | Trick::Wait => {
                    world.publish(name, changes);
                }
            }
            if let Ok(snapshot) = world.snapshot() {
                snapshots.push(snapshot);
            }
        }
        let lived = replicated_state(&world.fold, world.now);
        prop_assert_eq!(&replicated_state(&world.replica(None), world.now), &lived);
        for snapshot in snapshots {
            let replica = world.replica(Some(&snapshot));
            prop_assert_eq!(&replicated_state(&replica, world.now), &lived);
            prop_assert_eq!(replica.mark(), world.fold.mark());
            for (source, ..) in &lived {
                let held: BTreeSet<_> = replica.held(source).collect();
                prop_assert_eq!(held, world.fold.held(source).collect::<BTreeSet<_>>());
            }
        }
    }
}
