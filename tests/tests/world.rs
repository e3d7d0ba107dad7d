//! The simulated world: random storms, named faults, and rules broken on purpose.
//!
//! Any of them again: `cargo run -p warmroute-tests --bin world -- --trace SEED`.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and tells how long healing took"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use warmroute_tests::world::{Breakage, Fault, Outcome, Plan, Scripted, run};

const SEEDS: u64 = 500;
/// A named fault is tried on so many worlds that are calm otherwise, and as many that are not.
const WORLDS: u64 = 6;
/// A broken rule must show within so many seeds.
const CAUGHT_WITHIN: u64 = 1_000;

/// Runs plans on all processors, until one is not right.
fn first_broken(plans: &[Plan]) -> Option<(usize, Outcome)> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicU64::new(0);
    let mut found: Vec<(usize, Outcome)> = std::thread::scope(|scope| {
        let runners: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let at = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap();
                        let plan = plans.get(at)?;
                        let outcome = run(plan);
                        if outcome.broken.is_some() {
                            next.store(u64::MAX / 2, Ordering::Relaxed);
                            return Some((at, outcome));
                        }
                    }
                })
            })
            .collect();
        let ended = runners
            .into_iter()
            .filter_map(|runner| runner.join().unwrap());
        ended.collect()
    });
    found.sort_by_key(|(at, _)| *at);
    found.into_iter().next()
}

#[test]
fn random_storms_are_weathered() {
    let plans: Vec<Plan> = (0..SEEDS).map(Plan::of).collect();
    if let Some((at, outcome)) = first_broken(&plans) {
        let seed = plans[at].seed;
        panic!("seed {seed}: {}", outcome.broken.unwrap());
    }
}

#[test]
fn a_seed_is_the_whole_input() {
    for seed in 0..4 {
        let plan = Plan {
            is_traced: true,
            ..Plan::of(seed)
        };
        let [first, second] = [(); 2].map(|()| run(&plan).trace);
        assert!(first.len() > 100, "the trace tells something");
        let differing = first.iter().zip(&second).find(|(one, other)| one != other);
        assert_eq!(differing, None, "seed {seed}");
        assert_eq!(first.len(), second.len(), "seed {seed}");
    }
}

/// Something is compared, and the faults leave traces: a world in which nothing happens proves nothing.
#[test]
fn worlds_are_worth_running() {
    let reports: Vec<_> = (0..40).map(|seed| run(&Plan::of(seed)).report).collect();
    let sum = |of: fn(&warmroute_tests::world::Report) -> u64| reports.iter().map(of).sum::<u64>();
    assert!(sum(|report| report.exact) > 40 * 200, "exact claims");
    assert!(sum(|report| report.snapshots) > 40, "snapshots");
    assert!(sum(|report| report.resyncs) > 10, "resyncs");
    assert!(sum(|report| report.faults) > 40 * 4, "faults");
}

fn broken_rule_is_found(breakage: Breakage) {
    let plans: Vec<Plan> = (0..CAUGHT_WITHIN)
        .map(|seed| Plan {
            broken: Some(breakage),
            ..Plan::of(seed)
        })
        .collect();
    let found = first_broken(&plans);
    let (at, outcome) = found.expect("nobody would notice");
    println!("{breakage:?}: seed {at}: {}", outcome.broken.unwrap());
}

#[test]
fn skipped_generation_fence_is_found() {
    broken_rule_is_found(Breakage::NoFence);
}

#[test]
fn missing_digest_check_is_found() {
    broken_rule_is_found(Breakage::NoDigest);
}

#[test]
fn lookup_that_jumps_over_a_hole_is_found() {
    broken_rule_is_found(Breakage::JumpOverHole);
}

#[test]
fn restart_at_a_plausible_sequence_unnoticed_is_found() {
    broken_rule_is_found(Breakage::PlausibleRestart);
}

#[test]
fn generation_that_went_back_with_its_key_is_found() {
    broken_rule_is_found(Breakage::GenerationRolledBack);
}

/// A fault at several moments of worlds that are calm otherwise, and of ones that are not.
fn heals(faults: &[Fault]) {
    let mut plans = Vec::new();
    for seed in 0..2 * WORLDS {
        let start = 3_000 + 377 * seed;
        let script = faults.iter().zip(0..).map(|(&fault, index)| Scripted {
            after: Duration::from_millis(start + 1_500 * index),
            fault,
        });
        plans.push(Plan {
            script: script.collect(),
            is_calm: seed % 2 == 0,
            ..Plan::of(seed)
        });
    }
    if let Some((at, outcome)) = first_broken(&plans) {
        let (seed, is_calm) = (plans[at].seed, plans[at].is_calm);
        panic!("seed {seed}, calm {is_calm}: {}", outcome.broken.unwrap());
    }
    let reports: Vec<_> = plans.iter().map(|plan| run(plan).report).collect();
    let all = reports
        .iter()
        .all(|report| report.faults >= faults.len() as u64);
    assert!(all, "each fault strikes");
    let healed = reports.iter().filter_map(|report| report.healed_after);
    let longest = healed.max().unwrap_or_default();
    println!("{faults:?}: healed after {longest:.1?} at most");
}

macro_rules! rows {
    ($($(#[$doc:meta])* $name:ident: [$($fault:expr),+ $(,)?];)+) => {
        $($(#[$doc])* #[test] fn $name() { heals(&[$($fault),+]); })+
    };
}

use Fault::*;

rows! {
    row_01_engine_restarted_in_place: [EngineRestart(0)];
    row_02_restart_at_a_plausible_sequence: [EngineRestartPlausible(0), EngineRestartPlausible(0)];
    row_03_zmq_messages_lost: [ZmqLost(0), ZmqDisconnect(0), ZmqLost(0)];
    row_05_all_blocks_cleared: [EngineReset(0), EngineReset(0), EngineReset(0)];
    row_06_shim_killed: [ShimCrash(0), ShimCrash(0)];
    row_06_shim_killed_with_a_torn_state: [CorruptState(0), ShimCrash(0)];
    row_06_two_shims_for_one_source: [SecondShim(0), SecondShim(0), SecondShim(0)];
    row_07_all_cut_from_the_plane: [CutAll];
    row_07_one_shim_cut: [CutShim(0)];
    row_07_one_indexer_cut: [CutIndexer(0)];
    row_08_server_killed_writes_kept: [CutAll, CutAll];
    row_09_acknowledged_writes_lost: [LoseTail];
    row_09_log_and_registry_rolled_back: [Copy, ZmqDisconnect(0), RollBack];
    row_10_stream_recreated: [Recreate];
    row_12_indexer_killed_around_snapshots: [IndexerCrash(0), IndexerCrash(0), IndexerCrash(0)];
    row_13_snapshot_corrupt: [CorruptSnapshot, CorruptSnapshot, IndexerCrash(0)];
    row_14_indexer_joins_a_trimmed_log: [Trim, LoseSnapshots, IndexerCrash(0)];
    row_15_indexer_falls_off_the_end: [PauseIndexer(0), Trim];
    row_16a_hole_in_mid_prefix: [EngineEvict(0), EngineEvict(0), ShimCrash(0), EngineEvict(0)];
    row_16b_changes_during_an_image: [ShimCrash(0), LoseTail, ShimCrash(0)];
    row_16c_registry_lost: [LoseRegistry];
    row_16c_snapshots_lost: [LoseSnapshots, IndexerCrash(0)];
    row_16c_all_leases_lost_at_once: [LoseLeases];
    row_17_duplicate_record: [DuplicateRecord, DuplicateRecord, DuplicateRecord];
    row_17_corrupt_record: [CorruptRecord, CorruptRecord, CorruptRecord];
    row_17_foreign_record: [ForeignRecord, ForeignRecord, ForeignRecord];
    row_25_record_of_a_newer_version: [NewerRecord, NewerRecord, NewerRecord];
    paused_shim: [PauseShim(0)];
    paused_indexer: [PauseIndexer(0)];
    /// The first of the field's fifteen: a reset that kills the other consumers.
    field_01_stream_deleted_under_its_readers: [Recreate, Recreate];
    /// A crash between cutting a snapshot and publishing it.
    field_03_crash_around_a_snapshot: [IndexerCrash(0), LoseSnapshots, IndexerCrash(0)];
    field_04_new_replica_behind_a_trim: [Trim, IndexerCrash(0)];
    field_11_events_of_the_old_life: [EngineRestart(0), EngineRestartPlausible(0)];
}
