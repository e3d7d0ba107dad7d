//! The simulated world: random storms, named faults, and rules broken on purpose.
//!
//! Any of them again: `cargo run -p warmroute-simulation --bin world -- --trace SEED`.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and tells how long healing took"
)]

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use warmroute_indexer::fold::RecordVerdict;
use warmroute_simulation::world::{
    Breakage, Fault, Outcome, Plan, Report, Scripted, Setting, Trouble, WorldPlane, run,
};

/// Storms on each plane, and those of a long run.
const SEEDS: Range<u64> = 0..200;
const FURTHER_SEEDS: Range<u64> = SEEDS.end..500;
/// A named fault is tried on so many worlds that are calm otherwise, and as many that are not.
const WORLDS: u64 = 6;
/// Everything that knew of a generation but one indexer is lost, and the generation is given again.
const GENERATION_GIVEN_TWICE: &[Fault] = &[LoseState(0), ShimCrash(0), TrimAll, LoseRegistry];
/// A broken rule must show within so many seeds.
const CAUGHT_WITHIN: u64 = 1_000;

/// Runs plans on all processors, until one is not right: that one, or the outcomes of all.
fn run_all(plans: &[Plan]) -> Result<Vec<Report>, Box<(usize, Outcome)>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicU64::new(0);
    let mut reports = Vec::new();
    let mut broken: Vec<(usize, Outcome)> = std::thread::scope(|scope| {
        let run_some = || {
            let mut reports = Vec::new();
            loop {
                let at = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap();
                let Some(plan) = plans.get(at) else {
                    return (reports, None);
                };
                let outcome = run(plan);
                if outcome.broken.is_some() {
                    next.store(u64::MAX / 2, Ordering::Relaxed);
                    return (reports, Some((at, outcome)));
                }
                reports.push(outcome.report);
            }
        };
        let runners: Vec<_> = (0..threads).map(|_| scope.spawn(run_some)).collect();
        let ended = runners.into_iter().filter_map(|runner| {
            let (some, broken) = runner.join().unwrap();
            reports.extend(some);
            broken
        });
        ended.collect()
    });
    broken.sort_by_key(|(at, _)| *at);
    broken
        .into_iter()
        .next()
        .map_or(Ok(reports), |first| Err(Box::new(first)))
}

#[test]
fn random_storms_are_weathered() {
    worlds_were_worth_running(&weathered(SEEDS.map(Plan::of)));
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn further_storms_are_weathered() {
    weathered(FURTHER_SEEDS.map(Plan::of));
}

fn weathered(plans: impl Iterator<Item = Plan>) -> Vec<Report> {
    let plans: Vec<Plan> = plans.collect();
    run_all(&plans).unwrap_or_else(|broken| {
        let (at, outcome) = *broken;
        let Plan { seed, plane, .. } = plans[at];
        panic!("{plane:?}, seed {seed}: {}", outcome.broken.unwrap());
    })
}

fn without_a_log(plan: Plan) -> Plan {
    let plane = WorldPlane::Core;
    Plan { plane, ..plan }
}

#[test]
fn random_storms_are_weathered_without_a_log() {
    weathered(SEEDS.map(|seed| without_a_log(Plan::of(seed))));
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn further_storms_are_weathered_without_a_log() {
    weathered(FURTHER_SEEDS.map(|seed| without_a_log(Plan::of(seed))));
}

/// Each on worlds that are calm otherwise, and on some that are not.
#[test]
fn named_faults_heal_without_a_log() {
    for faults in [
        &[ShimCrash(0)][..],
        &[LoseState(0), ShimCrash(0)],
        &[SecondShim(0), CutShim(0)],
        &[IndexerCrash(0)],
        &[CutAll],
        &[CutShim(0)],
        &[CutIndexer(0)],
        &[PauseShim(0)],
        &[PauseIndexer(0)],
        &[SuspendShim(0)],
        &[SuspendIndexer(0)],
        &[StallShim(0), StallIndexer(0)],
        &[RefuseRecords(0)],
        &[LoseAcks(0)],
        &[DeafShim(0)],
        &[DeafIndexer(0)],
    ] {
        for seed in 0..worlds() / 2 {
            let plan = without_a_log(scripted(seed, None, faults));
            let (is_calm, outcome) = (plan.is_calm, run(&plan));
            let broken = outcome.broken;
            assert_eq!(broken, None, "{faults:?}, seed {seed}, calm {is_calm}");
            assert!(outcome.report.exact > 0, "{faults:?}, seed {seed}");
        }
    }
}

#[test]
fn a_seed_is_the_whole_input() {
    for seed in 0..8 {
        let plan = Plan {
            is_traced: true,
            ..Plan::of(seed / 2)
        };
        let plan = match seed % 2 {
            0 => plan,
            _ => without_a_log(plan),
        };
        let [first, second] = [(); 2].map(|()| run(&plan).trace);
        assert!(first.len() > 100, "the trace has events");
        let differing = first.iter().zip(&second).find(|(one, other)| one != other);
        assert_eq!(differing, None, "seed {seed}");
        assert_eq!(first.len(), second.len(), "seed {seed}");
    }
}

/// Something is compared, and the faults leave traces: a world in which nothing happens proves
/// nothing.
fn worlds_were_worth_running(reports: &[Report]) {
    let worlds = reports.len() as u64;
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    assert!(sum(|report| report.exact) > worlds * 200, "exact claims");
    assert!(sum(|report| report.snapshots) > worlds, "snapshots");
    assert!(sum(|report| report.resyncs) > worlds / 3, "resyncs");
    assert!(
        sum(|report| report.faults.len() as u64) > worlds * 4,
        "faults"
    );
    assert!(
        sum(|report| report.decisions) > worlds * 20,
        "decisions of routers"
    );
    assert!(
        sum(|report| report.answers) > worlds * 20,
        "answers to routers"
    );
    assert!(
        sum(|report| report.views) > worlds * 100,
        "views of each other"
    );
    let moves = sum(|report| report.moves);
    println!("{moves} requests were moved");
    assert!(moves > worlds / 9, "requests that were moved: {moves}");
    let rechecks = sum(|report| report.rechecks);
    println!("{rechecks} shortfalls were explained");
    assert!(
        rechecks > worlds / 9,
        "shortfalls that were explained: {rechecks}"
    );
}

fn broken_rule_is_found(breakage: Breakage) {
    let plans: Vec<Plan> = (0..CAUGHT_WITHIN)
        .map(|seed| Plan {
            broken: Some(breakage),
            ..Plan::of(seed)
        })
        .collect();
    broken_within(&plans);
}

/// Which rule the first plan breaks that breaks one.
fn broken_within(plans: &[Plan]) -> String {
    let (at, outcome) = *run_all(plans).expect_err("no check found the broken rule");
    let why = outcome.broken.unwrap();
    println!("{:?}: world {at}: {why}", plans[at].broken);
    why
}

#[test]
fn skipped_generation_fence_is_found() {
    broken_rule_is_found(Breakage::NoFence);
}

/// Where a generation is given again, only digests differ.
#[test]
fn missing_digest_check_is_found() {
    let plan = |seed| Plan {
        broken: Some(Breakage::NoDigest),
        ..scripted(seed, None, GENERATION_GIVEN_TWICE)
    };
    let plans: Vec<Plan> = (0..10 * WORLDS).map(plan).collect();
    broken_within(&plans);
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

#[test]
fn field_06_acknowledged_before_it_is_applied_is_found() {
    broken_rule_is_found(Breakage::AckBeforeApply);
}

#[test]
fn field_07_snapshot_without_its_position_is_found() {
    broken_rule_is_found(Breakage::SnapshotWithoutPosition);
}

#[test]
fn image_that_is_not_a_cut_is_found() {
    broken_rule_is_found(Breakage::ImageNotACut);
}

#[test]
fn all_leases_lost_at_once_and_acted_upon_is_found() {
    broken_rule_is_found(Breakage::LeasesActedUpon);
}

#[test]
fn health_checks_that_nobody_heeds_are_found() {
    broken_rule_is_found(Breakage::HealthIgnored);
}

#[test]
fn recheck_that_takes_a_block_stored_again_for_one_that_was_held_is_found() {
    broken_rule_is_found(Breakage::InterruptionUnseen);
}

#[test]
fn replica_that_is_believed_however_late_is_found() {
    broken_rule_is_found(Breakage::OvertakenBelieved);
}

#[test]
fn lease_that_is_renewed_late_is_found() {
    broken_rule_is_found(Breakage::LeaseRenewedLate);
}

#[test]
fn torn_snapshot_that_is_restored_is_found() {
    broken_rule_is_found(Breakage::TornSnapshotRestored);
}

#[test]
fn registry_watch_that_misses_a_delete_is_found() {
    broken_rule_is_found(Breakage::DeleteMissed);
}

/// The server refuses a source's records and takes its heartbeats: the acknowledged state must not
/// be credited for long.
#[test]
fn heartbeats_of_a_state_that_the_log_cannot_replace_are_found() {
    let faults = [(0, RefuseRecords(0)), (4_000, RefuseRecords(0))];
    let found = found_and_kept(Breakage::BacklogIgnored, &faults);
    assert!(found.contains("was replaced longer than"), "{found}");
}

/// After a change of permissions the server removes subscriptions and keeps the connection.
#[test]
fn subscriptions_that_are_not_made_again_are_found() {
    for fault in [DeafIndexer(0), DeafShim(0)] {
        let found = broken_in_calm(Breakage::DeafForGood, &[(0, fault)]);
        assert!(found.contains("permitted for 35s"), "{fault:?}: {found}");
    }
}

/// Refused twice: a client makes four connections in the first seconds, and each is given time.
#[test]
fn missing_subscription_that_is_ready_is_found() {
    for fault in [DeafIndexer(0), DeafShim(0)] {
        let faults = [(0, fault), (6_000, fault)];
        let found = broken_in_calm(Breakage::DeafIsConnected, &faults);
        assert!(found.contains("is ready"), "{fault:?}: {found}");
    }
}

/// The engine is of a later version, or publishes what cannot be read, once.
#[test]
fn source_that_stays_wrong_after_an_unknown_event_is_found() {
    let found = broken_in_calm(Breakage::StrangeForGood, &[(0, UnknownEvents(0))]);
    assert!(found.contains("not healed"), "{found}");
}

/// Position-free hashes show the mirror to be wrong at each batch.
#[test]
fn generations_without_a_limit_in_rate_are_found() {
    let found = broken_in_calm(
        Breakage::GenerationsUnlimited,
        &[(0, PositionFreeHashes(0))],
    );
    assert!(found.contains("generations within"), "{found}");
}

/// Nothing else goes wrong in these worlds.
fn calm(worlds: u64, broken: Option<Breakage>, faults: &[(u64, Fault)]) -> Vec<Plan> {
    let plan = |seed| Plan {
        broken,
        script: script(seed, faults),
        is_calm: true,
        ..Plan::of(seed)
    };
    (0..worlds).map(plan).collect()
}

fn broken_in_calm(broken: Breakage, faults: &[(u64, Fault)]) -> String {
    broken_within(&calm(40 * WORLDS, Some(broken), faults))
}

/// The faults break nothing, unless the rule is broken on purpose.
fn found_and_kept(broken: Breakage, faults: &[(u64, Fault)]) -> String {
    weathered(calm(5 * worlds(), None, faults).into_iter());
    broken_in_calm(broken, faults)
}

/// What waited in the sockets of a suspended machine is not as new as its clock shows.
#[test]
fn clock_that_stood_still_unseen_is_found() {
    let faults = [(0, SuspendIndexer(0)), (700, MachineDown(0))];
    found_and_kept(Breakage::StandstillUnseen, &faults);
}

#[test]
fn age_that_nobody_heeds_is_found() {
    broken_rule_is_found(Breakage::AgeIgnored);
}

/// Seed 40433 before messages carried their time: a shim's record waited in its connection
/// for 6.4 s, the shim died, its engine restarted, and the former life was credited when
/// it came.
#[test]
fn seed_40433_a_record_kept_on_its_way_brings_no_former_life_back() {
    let faults = [(0, StallIndexer(0)), (700, MachineDown(0))];
    found_and_kept(Breakage::AgeIgnored, &faults);
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn further_records_kept_on_their_way_bring_no_former_life_back() {
    let faults = [(0, StallIndexer(0)), (700, MachineDown(0))];
    weathered(calm(20 * WORLDS, None, &faults).into_iter());
}

/// A machine dies, and another worker's shim sends messages in its name.
#[test]
fn heartbeats_of_the_dead_on_a_foreign_subject_prove_nothing() {
    let mut faults = vec![(0, MachineDown(0))];
    faults.extend((1..28).map(|half| (500 * half, ForeignHeartbeat(0))));
    found_and_kept(Breakage::SubjectIgnored, &faults);
}

fn script(seed: u64, faults: &[(u64, Fault)]) -> Vec<Scripted> {
    let start = 3_000 + 377 * (seed % (2 * WORLDS));
    let at = |&(after, fault)| Scripted {
        after: Duration::from_millis(start + after),
        fault,
    };
    faults.iter().map(at).collect()
}

#[test]
fn leaked_slot_is_found() {
    broken_rule_is_found(Breakage::SlotLeaked);
}

/// An indexer that did not compare the record at the position would notice later, and not be wrong:
/// numbers have gaps, heartbeats name what is not there, and every record and heartbeat carries a
/// digest of all that is held.
#[test]
fn refill_that_the_record_comparison_misses_is_healed_all_the_same() {
    weathered((0..5 * worlds()).map(|seed| Plan {
        broken: Some(Breakage::RefillUnseen),
        ..scripted(seed, None, &[Copy, ZmqDisconnect(0), RollBack])
    }));
}

/// The indexer's machine was suspended, and the log did not answer when it resumed: nothing showed
/// the indexer that what waited in its sockets was old.
#[test]
fn seeds_300223_and_300749_a_log_that_does_not_answer_ends_credit() {
    weathered([300_223, 300_749].map(Plan::of).into_iter());
}

/// A fault at a moment of a world that is calm otherwise, or of one that is not.
fn scripted(seed: u64, setting: Option<Setting>, faults: &[Fault]) -> Plan {
    let start = 3_000 + 377 * (seed % (2 * WORLDS));
    let between = 1_500.min(6_000 / faults.len() as u64);
    let script = faults.iter().zip(0..).map(|(&fault, index)| Scripted {
        after: Duration::from_millis(start + between * index),
        fault,
    });
    Plan {
        script: script.collect(),
        is_calm: seed.is_multiple_of(2),
        setting,
        ..Plan::of(seed)
    }
}

/// `./test.sh` tries fewer. More of them for `WORLD_PLANS`: the times to heal in
/// `tests/FAULTS.md` are of 200.
#[expect(clippy::disallowed_methods, reason = "tests have no command line")]
fn worlds() -> u64 {
    let told = std::env::var("WORLD_PLANS").ok();
    told.map_or(2 * WORLDS, |told| told.parse().unwrap())
}

/// What the worlds of a fault came to, all of them right in the end.
struct Healed {
    all: Vec<Report>,
    /// Those in which nothing else went wrong.
    calm: Vec<Report>,
}

impl Healed {
    fn unstruck(&self, faults: &[Fault]) -> Option<Fault> {
        let struck = |fault: &Fault| self.calm.iter().any(|report| report.faults.contains(fault));
        faults.iter().find(|fault| !struck(fault)).copied()
    }

    /// How often a verdict on a record came in the calm worlds.
    fn verdict(&self, wanted: RecordVerdict) -> u64 {
        let at = RecordVerdict::ALL
            .iter()
            .position(|verdict| *verdict == wanted);
        let count = |report: &Report| report.verdicts[at.unwrap()];
        self.calm.iter().map(count).sum()
    }

    /// Engines that had to be emptied in the calm worlds, because their content could not be known.
    fn resets(&self) -> u64 {
        self.calm.iter().map(|report| report.resets).sum()
    }
}

/// Tries further worlds, twelve at least, if a fault has not struck, as an indexer that is down
/// cannot be killed, or if what is wanted did not happen.
fn heals(
    name: &str,
    setting: Option<Setting>,
    faults: &[Fault],
    worlds: u64,
    wanted: impl Fn(&Healed) -> bool,
) -> Healed {
    let mut healed = Healed {
        all: Vec::new(),
        calm: Vec::new(),
    };
    for seed in 0..worlds.max(2 * WORLDS) {
        if seed >= worlds && healed.unstruck(faults).is_none() && wanted(&healed) {
            break;
        }
        let plan = &scripted(seed, setting, faults);
        let Outcome { report, broken, .. } = run(plan);
        if let Some(why) = broken {
            panic!("seed {}, calm {}: {why}", plan.seed, plan.is_calm);
        }
        if plan.is_calm {
            healed.calm.push(report.clone());
        }
        healed.all.push(report);
    }
    assert_eq!(healed.unstruck(faults), None, "a fault that never strikes");
    assert!(wanted(&healed), "what is wanted did not happen");
    // Elsewhere the time is that of the storm's other faults.
    let mut times: Vec<Duration> = healed.calm.iter().map(|report| report.dark_for).collect();
    times.sort_unstable();
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)];
    let (p50, p99, max) = (at(50), at(99), at(100));
    let seconds = [p50, p99, max].map(|time| format!("{:.1}", time.as_secs_f64()));
    println!("{name}: {} s after the faults' end", seconds.join(" / "));
    healed
}

/// A row with verdicts has each of them in its calm worlds. Where `forgets` stands, some of what
/// engines hold cannot be known until they are emptied; nowhere else.
macro_rules! rows {
    ($($(#[$doc:meta])* $name:ident: $($setting:ident)? [$($fault:expr),+ $(,)?]
        $(=> $($verdict:ident)+)? $(, $forgets:ident)?;)+) => {
        $($(#[$doc])* #[test] fn $name() {
            let setting = [$(Setting::$setting)?].first().copied();
            let forgets: &[&str] = &[$(stringify!($forgets))?];
            let verdicts: &[RecordVerdict] = &[$($(RecordVerdict::$verdict),+)?];
            let wanted = |healed: &Healed| {
                verdicts.iter().all(|verdict| healed.verdict(*verdict) > 0)
                    && (forgets.is_empty() || healed.resets() > 0)
            };
            // It takes some luck that what an engine holds cannot be known.
            let worlds = worlds() << forgets.len();
            let healed = heals(stringify!($name), setting, &[$($fault),+], worlds, wanted);
            assert!(!forgets.is_empty() || healed.resets() == 0, "engines were emptied");
        })+
    };
}

use Fault::*;

rows! {
    row_01_engine_restarted_in_place: [EngineRestart(0)];
    row_02_restart_at_a_plausible_sequence: [EngineRestartPlausible(0), EngineRestartPlausible(0)];
    row_03_zmq_messages_lost: [ZmqLost(0), ZmqDisconnect(0), ZmqLost(0)];
    /// Copies there are in every world: requests of whole blocks make them.
    row_03a_copies_and_holes_in_replays: ReplayHoles [ZmqLost(0), ZmqDisconnect(0), ZmqLost(0)], forgets;
    row_04_gap_older_than_the_replay: ShortReplay [
        ZmqDisconnect(0), ZmqLost(0), ZmqDisconnect(0),
    ], forgets;
    row_05_all_blocks_cleared: [EngineReset(0), EngineReset(0), EngineReset(0)];
    row_06_shim_killed: [ShimCrash(0), ShimCrash(0)];
    row_06_shim_stopped: [ShimStop(0), ShimStop(0)];
    row_06_shim_killed_without_its_state: [LoseState(0), ShimCrash(0)];
    row_06_shim_killed_whose_engine_replays_little: ShortReplay [LoseState(0), ShimCrash(0)], forgets;
    row_06_shim_killed_with_a_torn_state: [CorruptState(0), ShimCrash(0)];
    row_06_two_shims_for_one_source: [SecondShim(0), SecondShim(0), SecondShim(0)];
    row_07_all_cut_from_the_plane: [CutAll];
    row_07_one_shim_cut: [CutShim(0)];
    row_07_one_indexer_cut: [CutIndexer(0)];
    row_08_server_killed_writes_kept: [CutAll, CutAll];
    row_09_acknowledged_writes_lost: [LoseTail];
    row_09_log_and_registry_rolled_back: [Copy, ZmqDisconnect(0), RollBack];
    row_10_stream_recreated: [Recreate];
    row_11_leader_killed_in_a_cluster: [LeaderChange, LeaderChange, LeaderChange];
    row_12_indexer_killed_around_snapshots: [IndexerCrash(0), IndexerCrash(0), IndexerCrash(0)];
    row_12_indexer_stopped: [IndexerStop(0), IndexerStop(0)];
    row_14_indexer_joins_a_trimmed_log: [Trim, LoseSnapshots, IndexerCrash(0)];
    row_15_indexer_falls_off_the_end: [PauseIndexer(0), Trim];
    row_16_fresh_and_lagging_indexer: Routers [PauseIndexer(0), CutIndexer(1), PauseIndexer(1)];
    row_16a_hole_in_mid_prefix: [EngineEvict(0), EngineEvict(0), ShimCrash(0), EngineEvict(0)];
    row_16b_changes_during_an_image: [ShimCrash(0), LoseTail, ShimCrash(0)];
    row_16c_registry_lost: [LoseRegistry];
    row_16c_snapshots_lost: [LoseSnapshots, IndexerCrash(0)];
    row_16c_all_leases_lost_at_once: Routers [LoseLeases];
    /// Everything that knew of a generation but one indexer is lost, and the generation is given
    /// again.
    row_16c_generation_given_twice: [LoseState(0), ShimCrash(0), TrimAll, LoseRegistry];
    /// Routers remember generations that no other part knows any more.
    row_16c_all_lost_but_the_routers: Routers [
        LoseState(0), ShimCrash(0), IndexerCrash(0), IndexerCrash(1), LoseSnapshots, Recreate, LoseRegistry,
    ];
    row_17_duplicate_record: [DuplicateRecord, DuplicateRecord, DuplicateRecord] => Duplicate;
    row_17_corrupt_record: [CorruptRecord, CorruptRecord, CorruptRecord] => Undecodable;
    row_17_foreign_record: [ForeignRecord, ForeignRecord, ForeignRecord] => WrongSource WrongSubject;
    row_17_foreign_heartbeat: [ForeignHeartbeat(0), ShimCrash(0), ForeignHeartbeat(0)];
    row_17_last_generation: [
        LastGeneration(0), ShimCrash(0), LastGeneration(0), LastGeneration(0),
    ] => Implausible;
    row_18_router_killed_with_requests: Routers [RouterCrash(0), RouterCrash(1)];
    row_18_router_paused: Routers [PauseRouter(0)];
    row_18_router_cut: Routers [CutRouter(0), CutRouter(1)];
    row_19_router_joins_late: Routers [RouterCrash(0), RouterCrash(0), RouterCrash(0)];
    row_20_slot_messages_lost: LossyBroadcasts [RouterCrash(0)];
    row_23_no_indexer: Routers [IndexerCrash(0), IndexerCrash(1), IndexerCrash(0)];
    row_24_engines_with_other_block_sizes: MixedBlocks [EngineRestart(0)];
    row_25_record_of_a_newer_version: [NewerRecord, NewerRecord, NewerRecord] => Undecodable;
    records_refused: [RefuseRecords(0), RefuseRecords(0)];
    acknowledgements_lost: [LoseAcks(0), LoseAcks(0)];
    /// A snapshot is read for longer than its reader waits, at a start and behind a trimmed log.
    slow_snapshot_store: Routers [SlowStore, IndexerCrash(0), PauseIndexer(1), Trim, SlowStore];
    log_without_a_leader: [LogLeaderless, LogLeaderless];
    /// A connection keeps what goes through it for seconds, and delivers it after all.
    link_keeps_messages_for_seconds: [StallShim(0), StallIndexer(0), StallShim(0)];
    /// The next leader stamps messages by a clock that is up to a minute ahead, or behind.
    clock_of_another_server: [ClockJump, ClockJump, ClockJump];
    paused_shim: [PauseShim(0)];
    paused_indexer: [PauseIndexer(0)];
    deaf_shim: [DeafShim(0), LoseTail];
    deaf_indexer: [DeafIndexer(0), DeafIndexer(0)];
    /// Such an event may have removed any block, until the engine clears its cache.
    unknown_events: [UnknownEvents(0), UnknownEvents(0)], forgets;
    /// A block that no event stored is removed: others like it may be missing until a clear.
    unknown_removals: [UnknownRemovals(0), UnknownRemovals(0)], forgets;
    /// One block hash for two prefixes, again and again: each costs the source's blocks.
    position_free_hashes: [PositionFreeHashes(0), PositionFreeHashes(0)], forgets;
    suspended_shim: [SuspendShim(0)];
    suspended_indexer: [SuspendIndexer(0)];
    /// The first of the field's fifteen: a reset that kills the other consumers.
    field_01_stream_deleted_under_its_readers: [Recreate, Recreate];
    /// A purge that one replica did not ask for.
    field_02_log_purged_under_two_replicas: Routers [TrimAll, Trim, TrimAll];
    /// A crash between cutting a snapshot and publishing it.
    field_03_crash_around_a_snapshot: [IndexerCrash(0), LoseSnapshots, IndexerCrash(0)];
    field_04_new_replica_behind_a_trim: [Trim, IndexerCrash(0)];
    /// The log goes on without it, and lets the oldest go.
    field_05_dead_reader_holds_nothing_back: ShortLog [PauseIndexer(0)];
    field_10_nobody_reads: ShortLog [IndexerCrash(0), IndexerCrash(0), IndexerCrash(0)];
    field_11_events_of_the_old_life: [EngineRestartPlausible(0), EngineRestart(0)];
    /// A source that is gone is not credited, with and without snapshots.
    field_12_the_dead_go_without_a_snapshot: [LoseSnapshots, EngineRestart(0), LoseSnapshots];
    field_14_batch_larger_than_a_message: SmallMessages [ShimCrash(0), ShimCrash(0)];
    /// The lease that keeps them apart is lost while they write.
    field_15_two_snapshotters: Routers [LoseLeases, LoseLeases, LoseLeases, LoseLeases];
}

/// Indexers answer to every part of a prompt by what the engine holds, and routers go by it.
#[test]
fn prompts_are_asked_for_in_parts() {
    let plans: Vec<Plan> = (0..worlds())
        .map(|seed| Plan {
            setting: Some(Setting::SmallMessages),
            ..Plan::of(seed)
        })
        .collect();
    let reports = run_all(&plans).unwrap_or_else(|broken| {
        let (at, outcome) = *broken;
        panic!("seed {}: {}", plans[at].seed, outcome.broken.unwrap());
    });
    let later: u64 = reports.iter().map(|report| report.later_parts).sum();
    assert!(later > worlds(), "answers to later parts: {later}");
}

/// Routers have learned before the trouble begins.
fn troubled(trouble: Trouble, broken: Option<Breakage>, worlds: u64) -> Vec<Plan> {
    let plan = |seed| Plan {
        broken,
        script: script(seed, &[(6_000, EngineTrouble(0, trouble))]),
        is_calm: true,
        setting: Some(Setting::Roomy),
        ..Plan::of(seed)
    };
    (0..worlds).map(plan).collect()
}

/// An engine runs and swallows requests. What that costs each router is bounded.
#[test]
fn rows_46_to_49_engines_in_trouble_cost_few_requests() {
    for trouble in Trouble::ALL {
        let (mut ended, mut lost) = (0, Vec::<u64>::new());
        for plan in troubled(trouble, None, worlds()) {
            let Outcome { losses, broken, .. } = run(&plan);
            assert_eq!(broken, None, "{trouble:?}, seed {}", plan.seed);
            assert_eq!(losses.trouble, Some(trouble), "seed {}", plan.seed);
            ended += losses.ended;
            lost.push(losses.lost.iter().sum());
        }
        let (all, most) = (lost.iter().sum::<u64>(), lost.iter().max());
        println!("{trouble:?}: {all} of {ended} requests lost, {most:?} in one world at most");
        assert!(ended > 100, "{trouble:?}: requests ended: {ended}");
    }
}

/// A router counts an engine's errors as answers, or leaves requests at a lost engine.
#[test]
fn requests_lost_beyond_the_bound_are_found() {
    for (breakage, trouble) in [
        (Breakage::ErrorsAreAnswers, Trouble::Fails),
        (Breakage::ErrorsAreAnswers, Trouble::ErrorFirst),
        (Breakage::LossesIgnored, Trouble::Hangs),
        (Breakage::LossesIgnored, Trouble::Frozen),
    ] {
        let found = broken_within(&troubled(trouble, Some(breakage), 4 * WORLDS));
        assert!(found.contains("lost"), "{breakage:?}, {trouble:?}: {found}");
    }
}

#[test]
fn row_13_snapshot_corrupt() {
    let faults = [
        CorruptSnapshot,
        IndexerCrash(0),
        CorruptSnapshot,
        IndexerCrash(0),
    ];
    let is_skipped = |healed: &Healed| healed.calm.iter().any(|report| report.skipped > 0);
    let healed = heals(
        "row_13_snapshot_corrupt",
        None,
        &faults,
        worlds(),
        is_skipped,
    );
    assert_eq!(healed.resets(), 0, "engines were emptied");
}

#[test]
fn row_16d_memory_bound_reached() {
    let name = "row_16d_memory_bound_reached";
    let faults = [EngineEvict(0), ShimCrash(0)];
    let is_reached = |healed: &Healed| healed.all.iter().any(|report| report.set_aside > 0);
    let setting = Some(Setting::LittleMemory);
    let reports = heals(name, setting, &faults, worlds(), is_reached).all;
    let most = reports.iter().map(|report| report.resyncs).max();
    assert!(most < Some(20), "no loop of resyncs: {most:?}");
}
