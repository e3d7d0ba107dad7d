use std::time::Duration;

use warmroute_plane::Plane;
use warmroute_proto::BlockCut;
use warmroute_proto::registry::{DrainState, Lora, WorkerEntry};

use super::checks::{CheckResult, ModelChecks, RegistrationChecks, TokenChecks};
use super::health::Observation;
use super::state::FORGET_AFTER;
use super::*;
use crate::route::{Knobs, RouteRefusal};
use crate::testing::{ROUTER, core, plane, subjects, worker_entry as entry};
use crate::tokenizers::TokenizerVersion;

mod probe;
mod registry;

pub(super) fn fleet_of(block_size: Option<u32>) -> Arc<Fleet> {
    let core = SharedCore::new(core(ROUTER, Knobs::default()));
    Fleet::new(core, block_size.and_then(BlockSize::new))
}

fn fleet() -> Arc<Fleet> {
    fleet_of(None)
}

fn checks(chat: CheckResult) -> RegistrationChecks {
    checks_of(None, chat)
}

fn checks_of(tokenizer: Option<TokenizerVersion>, chat: CheckResult) -> RegistrationChecks {
    let tokens = TokenChecks {
        chat,
        chat_with_tools: CheckResult::skipped("x"),
        text: CheckResult::Passed,
        ..TokenChecks::all(&CheckResult::skipped("x"))
    };
    let checks = ModelChecks { tokenizer, tokens };
    RegistrationChecks::new(CheckResult::Passed, [("m".to_owned(), checks)].into())
}

impl Fleet {
    fn pass(&self, worker: &str, chat: CheckResult) {
        let worker = WorkerId::from(worker);
        self.update(|state| {
            let epoch = state.get(&worker).unwrap().epoch;
            state.checked(&worker, epoch, checks(chat))
        });
    }

    /// The worker has the token ids of this tokenizer.
    pub(crate) fn trust_tokens(&self, worker: &WorkerId, tokenizer: TokenizerVersion) {
        self.update(|state| {
            let epoch = state.get(worker).unwrap().epoch;
            let checks = checks_of(Some(tokenizer), CheckResult::Passed);
            state.checked(worker, epoch, checks)
        });
    }
}

fn candidates(fleet: &Fleet) -> Result<usize, RouteRefusal> {
    let core = fleet.core.core();
    core.fleet()
        .candidates("m", route::Leg::Whole)
        .map(<[_]>::len)
}

/// An observation at the address of [`entry`].
fn observe(fleet: &Fleet, worker: &str, observation: Observation) {
    let url = format!("http://{worker}:1");
    fleet.observe(&worker.into(), &url, observation);
}

fn began(fleet: &Arc<Fleet>, worker: &str) -> TrackedRequest {
    fleet.request_began(&worker.into(), &format!("http://{worker}:1"))
}

fn ended(fleet: &Arc<Fleet>, worker: &str, result: RequestResult) {
    began(fleet, worker).report(result);
}

fn observe_at(fleet: &Fleet, url: &str, observation: Observation, now: std::time::Instant) {
    fleet.update(|state| state.observe(&"w".into(), url, observation, now));
}

fn deregister(fleet: &Fleet, worker: &str) {
    let now = Instant::now().into_std();
    fleet.update(|state| state.deregister(&worker.into(), now));
}

fn drain(fleet: &Fleet, drain: DrainState) {
    fleet.update(|state| {
        let (drains, worker) = (&mut state.drains, WorkerId::from("w"));
        let write = match drain {
            DrainState::Draining => drains.drain_write(&worker, DrainUntil::Undone, 1),
            DrainState::Serving => drains.end_write(&worker, 1),
        };
        drains.stored(write.unwrap().entry, 1);
        FleetChange::Published
    });
}

fn targets(fleet: &Fleet) -> Vec<ProbeTarget> {
    fleet.state().probe_targets()
}

#[test]
fn an_expired_registration_removes_no_worker_that_answers() {
    let fleet = fleet();
    fleet.register(entry("w", 16));
    observe(&fleet, "w", Observation::ProbePassed);
    deregister(&fleet, "w");
    observe(&fleet, "w", Observation::ProbePassed);
    assert_eq!(candidates(&fleet), Ok(1));
    observe(&fleet, "w", Observation::ConnectRefused);
    assert_eq!(candidates(&fleet), Err(RouteRefusal::AllUnhealthy));
    let later = Instant::now().into_std() + FORGET_AFTER * 2;
    observe_at(&fleet, "http://w:1", Observation::ConnectRefused, later);
    assert_eq!(candidates(&fleet), Err(RouteRefusal::NoWorkers));
    assert!(fleet.snapshot().is_empty());
}

/// A crashed node: neither a deregistration nor a drain came, and the engine is silent.
#[test]
fn a_worker_whose_registration_expired_is_lost_once_its_engine_is_silent_too() {
    let lost_after = |held: Duration, is_drained: bool| {
        let fleet = fleet();
        fleet.register(entry("w", 16));
        observe(&fleet, "w", Observation::ProbePassed);
        if is_drained {
            drain(&fleet, DrainState::Draining);
        }
        let end = Instant::now().into_std() + held;
        fleet.update(|state| state.deregister(&"w".into(), end));
        observe(&fleet, "w", Observation::ConnectRefused);
        assert_eq!(fleet.lost(), [], "it may come back");
        let later = end + FORGET_AFTER * 2;
        observe_at(&fleet, "http://w:1", Observation::ConnectRefused, later);
        let lost = fleet.lost().into_iter().map(|(worker, _)| worker);
        (fleet, lost.collect::<Vec<_>>())
    };
    let (fleet, lost) = lost_after(Duration::from_secs(6), false);
    assert_eq!(lost, [WorkerId::from("w")]);
    fleet.register(entry("w", 16));
    assert_eq!(fleet.lost(), [], "it is back");
    assert!(
        lost_after(Duration::from_secs(1), false).1.is_empty(),
        "deregistered"
    );
    assert!(
        lost_after(Duration::from_secs(6), true).1.is_empty(),
        "drained"
    );
}

#[test]
fn a_change_of_adapters_alone_keeps_the_checks() {
    let fleet = fleet();
    fleet.register(entry("w", 16));
    observe(&fleet, "w", Observation::ProbePassed);
    fleet.pass("w", CheckResult::Passed);
    let standing = || {
        let worker = fleet.snapshot().remove(0);
        (worker.epoch, worker.checks, worker.entry.loras.len())
    };
    let (epoch, checks, adapters) = standing();
    let mut tuned = entry("w", 16);
    tuned.loras.push(Lora {
        name: "tuned".to_owned(),
        parent: Some("m".to_owned()),
    });
    fleet.register(tuned);
    assert_eq!(standing(), (epoch, checks, adapters + 1));
    fleet.register(entry("w", 32));
    let unchecked = (epoch + 1, RegistrationChecks::default(), adapters);
    assert_eq!(standing(), unchecked);
}

#[test]
fn a_removed_worker_does_not_come_back_by_a_late_event() {
    let fleet = fleet();
    fleet.admit(&"w".into());
    fleet.register(entry("other", 16));
    fleet.register(entry("w", 16));
    observe(&fleet, "w", Observation::ProbePassed);
    assert_eq!(candidates(&fleet), Ok(1), "others are no members");
    fleet.retire(&"w".into());
    assert_eq!(candidates(&fleet), Err(RouteRefusal::AllDraining));
    fleet.forget(&"w".into());
    fleet.register(entry("w", 16));
    observe(&fleet, "w", Observation::ProbePassed);
    assert!(fleet.snapshot().is_empty());
    fleet.admit(&"w".into());
    fleet.register(entry("w", 16));
    observe(&fleet, "w", Observation::ProbePassed);
    assert_eq!(candidates(&fleet), Ok(1), "a new life");
}

#[test]
fn a_drain_precedes_and_outlives_its_worker() {
    let fleet = fleet();
    drain(&fleet, DrainState::Draining);
    fleet.register(entry("w", 16));
    observe(&fleet, "w", Observation::ProbePassed);
    assert_eq!(candidates(&fleet), Err(RouteRefusal::AllDraining));
    // Deregistered, forgotten, and registered at another address.
    deregister(&fleet, "w");
    observe(&fleet, "w", Observation::ConnectRefused);
    let later = Instant::now().into_std() + FORGET_AFTER * 2;
    observe_at(&fleet, "http://w:1", Observation::ConnectRefused, later);
    assert!(fleet.snapshot().is_empty());
    let mut moved = entry("w", 16);
    moved.url = "http://elsewhere:1".to_owned();
    fleet.register(moved);
    observe_at(
        &fleet,
        "http://elsewhere:1",
        Observation::ProbePassed,
        later,
    );
    assert_eq!(candidates(&fleet), Err(RouteRefusal::AllDraining));
    drain(&fleet, DrainState::Serving);
    assert_eq!(candidates(&fleet), Ok(1));
}

#[test]
fn an_address_belongs_to_the_worker_registered_last() {
    let fleet = fleet();
    let at_w = |worker: &str| {
        let mut entry = entry(worker, 16);
        entry.url = "http://w:1".to_owned();
        entry
    };
    let names = || -> Vec<String> {
        let members = fleet.snapshot();
        members.iter().map(|m| m.entry.worker.to_string()).collect()
    };
    fleet.register(at_w("w"));
    observe(&fleet, "w", Observation::ProbePassed);
    deregister(&fleet, "w");
    assert_eq!(targets(&fleet)[0].must_list, ["m"], "not registered");
    // This engine under another name, or another engine.
    fleet.register(at_w("v"));
    assert_eq!(names(), ["v"]);
    assert!(targets(&fleet)[0].must_list.is_empty());
    // The other order: the old name's lease expires after the new registration.
    fleet.register(at_w("u"));
    assert_eq!(names(), ["u", "v"], "both are registered");
    deregister(&fleet, "v");
    assert_eq!(names(), ["u"]);
    // Deregistered and registered again.
    deregister(&fleet, "u");
    fleet.register(at_w("u"));
    assert!(targets(&fleet)[0].must_list.is_empty());
}

#[test]
fn a_registered_worker_is_never_forgotten() {
    let fleet = fleet();
    fleet.register(entry("w", 16));
    let later = Instant::now().into_std() + FORGET_AFTER * 2;
    for _ in 0..3 {
        observe_at(&fleet, "http://w:1", Observation::ConnectRefused, later);
    }
    assert_eq!(fleet.snapshot().len(), 1);
}

#[test]
fn a_worker_that_fails_its_checks_leaves_the_model_trusted() {
    let fleet = fleet();
    for worker in ["v", "w"] {
        fleet.register(entry(worker, 16));
        observe(&fleet, worker, Observation::ProbePassed);
    }
    let trusted = || {
        let catalog = fleet.catalog();
        (
            catalog.models["m"].parity.chat.clone(),
            catalog.models["a"].parity.text.proven,
        )
    };
    let proven = |mismatched: &[&str]| PromptTrust {
        proven: true,
        all_passed: false,
        mismatched: mismatched.iter().map(|&worker| worker.into()).collect(),
    };
    assert_eq!(trusted(), (PromptTrust::default(), false));
    fleet.pass("v", CheckResult::Passed);
    assert_eq!(trusted(), (proven(&[]), true), "the other is pending");
    fleet.pass("w", CheckResult::failed("differs"));
    assert_eq!(trusted(), (proven(&["w"]), true));
    fleet.pass("w", CheckResult::Passed);
    assert!(trusted().0.all_passed);
    fleet.pass("w", CheckResult::failed("differs"));
    // A new epoch: its earlier result is void.
    observe(&fleet, "w", Observation::ConnectRefused);
    observe(&fleet, "w", Observation::ProbePassed);
    assert_eq!(trusted(), (proven(&[]), true));
    assert_eq!(fleet.state().unchecked().count(), 1);
}

#[test]
fn an_observation_at_a_former_address_is_void() {
    let fleet = fleet();
    fleet.register(entry("w", 16));
    let mut moved = entry("w", 16);
    moved.url = "http://elsewhere:1".to_owned();
    fleet.register(moved);
    // The answer to a probe that was sent before it moved.
    observe(&fleet, "w", Observation::ProbePassed);
    assert!(!fleet.snapshot()[0].health.usable());
    let seen = |observation| fleet.observe(&"w".into(), "http://elsewhere:1", observation);
    seen(Observation::ProbePassed);
    observe(&fleet, "w", Observation::ConnectRefused);
    assert!(fleet.snapshot()[0].health.usable());
    seen(Observation::ConnectRefused);
    assert!(!fleet.snapshot()[0].health.usable());
}

#[test]
fn a_check_of_an_earlier_epoch_is_void() {
    let fleet = fleet();
    fleet.register(entry("w", 16));
    observe(&fleet, "w", Observation::ProbePassed);
    let epoch = fleet.snapshot()[0].epoch;
    observe(&fleet, "w", Observation::ConnectRefused);
    observe(&fleet, "w", Observation::ProbePassed);
    fleet.update(|state| state.checked(&"w".into(), epoch, checks(CheckResult::Passed)));
    assert!(!fleet.catalog().models["m"].parity.chat.proven);
}

/// The operator's size stands for workers that report none, and comes first.
#[test]
fn each_worker_has_blocks_of_its_own_size() {
    for (given, workers, expected) in [
        (None, vec![], vec![]),
        (None, vec![0], vec![]),
        (None, vec![32, 16, 32], vec![16, 32]),
        (Some(16), vec![32], vec![32]),
        (Some(64), vec![32, 0, 16], vec![64, 16, 32]),
        (Some(32), vec![16, 32], vec![32, 16]),
        (None, vec![80, 64, 48, 32, 16], vec![16, 32, 48, 64]),
    ] {
        let fleet = fleet_of(given);
        for (name, tokens) in ["a", "b", "c", "d", "e"].into_iter().zip(&workers) {
            fleet.register(entry(name, *tokens));
        }
        for model in ["m", "a"].into_iter().filter(|_| !workers.is_empty()) {
            let cuts = fleet.catalog().models[model].cuts.clone();
            let sizes: Vec<usize> = cuts.into_iter().map(|cut| cut.size.tokens()).collect();
            assert_eq!(sizes, expected, "{given:?} {workers:?} {model}");
        }
    }
}

/// Workers of one size whose engines name blocks by more or fewer tokens.
#[test]
fn each_worker_has_blocks_of_its_own_lookahead() {
    let fleet = fleet_of(Some(16));
    for (name, lookahead) in [("a", 3), ("b", 0), ("c", 3)] {
        fleet.register(WorkerEntry {
            lookahead,
            ..entry(name, 16)
        });
    }
    let cuts = fleet.catalog().models["m"].cuts.clone();
    let of = |lookahead| BlockCut {
        size: BlockSize::new(16).unwrap(),
        lookahead,
    };
    assert_eq!(cuts, [of(0), of(3)]);
}

#[test]
fn a_renewed_lease_changes_nothing() {
    let fleet = fleet();
    fleet.register(entry("w", 16));
    observe(&fleet, "w", Observation::ProbePassed);
    fleet.pass("w", CheckResult::Passed);
    fleet.register(entry("w", 16));
    assert!(fleet.catalog().models["m"].parity.chat.proven);
    fleet.register(entry("w", 32));
    assert!(!fleet.catalog().models["m"].parity.chat.proven);
}

/// Two broken requests do not change a worker's health, many take it out of the choice, and it is
/// used where it is the only one.
#[tokio::test(start_paused = true)]
async fn broken_requests_open_a_breaker_and_leave_one_candidate() {
    let fleet = fleet();
    for worker in ["v", "w"] {
        fleet.register(entry(worker, 16));
        observe(&fleet, worker, Observation::ProbePassed);
    }
    let broken = |worker: &str, times: u32| {
        for _ in 0..times {
            ended(&fleet, worker, RequestResult::Broken);
        }
    };
    broken("v", 2);
    assert_eq!(candidates(&fleet), Ok(2));
    broken("v", 3);
    assert_eq!(candidates(&fleet), Ok(1));
    assert!(fleet.snapshot()[0].health.usable(), "its probes pass");
    broken("w", 5);
    assert_eq!(candidates(&fleet), Ok(2), "never below one candidate");
    tokio::time::advance(Duration::from_secs(60)).await;
    let now = Instant::now().into_std();
    fleet.update(|state| state.tick(now));
    ended(&fleet, "v", RequestResult::Answered);
    broken("w", 1);
    assert_eq!(candidates(&fleet), Ok(1), "half open, one failure opens it");
}

/// A half-open breaker admits the next request only after the result of the first, or its time.
#[tokio::test(start_paused = true)]
async fn a_half_open_breaker_admits_one_trial_at_a_time() {
    let fleet = fleet();
    for worker in ["v", "w"] {
        fleet.register(entry(worker, 16));
        observe(&fleet, worker, Observation::ProbePassed);
    }
    for _ in 0..5 {
        ended(&fleet, "v", RequestResult::Broken);
    }
    let half_open = async || {
        tokio::time::advance(Duration::from_secs(60)).await;
        fleet.update(|state| state.tick(Instant::now().into_std()));
        assert_eq!(candidates(&fleet), Ok(2));
    };
    half_open().await;
    let mut trial = began(&fleet, "v");
    assert_eq!(candidates(&fleet), Ok(1), "its trial is in flight");
    tokio::time::advance(Duration::from_millis(1)).await;
    drop(began(&fleet, "v"));
    assert_eq!(candidates(&fleet), Ok(1), "another request has ended");
    trial.report(RequestResult::Broken);
    assert_eq!(candidates(&fleet), Ok(1), "open again");
    half_open().await;
    // Begun before the breaker opened.
    trial.report(RequestResult::Answered);
    let cancelled = began(&fleet, "v");
    assert_eq!(candidates(&fleet), Ok(1));
    drop(cancelled);
    assert_eq!(candidates(&fleet), Ok(2), "the trial is returned");
    ended(&fleet, "v", RequestResult::Answered);
    assert_eq!(candidates(&fleet), Ok(2), "closed");
    let _first = began(&fleet, "v");
    assert_eq!(candidates(&fleet), Ok(2));
}

#[test]
fn a_worker_that_comes_back_has_a_closed_breaker() {
    let fleet = fleet();
    for worker in ["v", "w"] {
        fleet.register(entry(worker, 16));
        observe(&fleet, worker, Observation::ProbePassed);
    }
    for _ in 0..5 {
        ended(&fleet, "v", RequestResult::Broken);
    }
    observe(&fleet, "v", Observation::ConnectRefused);
    observe(&fleet, "v", Observation::ProbePassed);
    assert!(!fleet.snapshot()[0].breaker.is_counting());
    assert_eq!(candidates(&fleet), Ok(2));
}

/// A poison request of one client fails on all engines.
#[test]
fn unproven_failures_of_equal_requests_open_no_breaker_and_proven_ones_do() {
    let fleet = fleet();
    for worker in ["v", "w"] {
        fleet.register(entry(worker, 16));
        observe(&fleet, worker, Observation::ProbePassed);
    }
    for number in 0..50 {
        for worker in ["v", "w"] {
            began(&fleet, worker)
                .of_case(RequestCase(number % 3))
                .fail();
        }
    }
    assert_eq!(candidates(&fleet), Ok(2));
    for _ in 0..10 {
        began(&fleet, "v").suspect(None).proven();
    }
    assert_eq!(candidates(&fleet), Ok(1));
    assert!(!fleet.snapshot()[1].breaker.is_open());
}

#[tokio::test(start_paused = true)]
async fn an_overloaded_worker_is_passed_over_for_the_time_that_it_names() {
    let fleet = fleet();
    for worker in ["v", "w"] {
        fleet.register(entry(worker, 16));
        observe(&fleet, worker, Observation::ProbePassed);
    }
    let pause = Some(Duration::from_secs(7));
    drop(began(&fleet, "v").suspect(pause));
    assert_eq!(
        candidates(&fleet),
        Ok(2),
        "no other worker served the request"
    );
    began(&fleet, "v").suspect(pause).proven();
    assert_eq!(candidates(&fleet), Ok(1));
    for (secs, left) in [(6, 1), (1, 2)] {
        tokio::time::advance(Duration::from_secs(secs)).await;
        fleet.update(|state| state.tick(Instant::now().into_std()));
        assert_eq!(candidates(&fleet), Ok(left));
    }
}

#[test]
fn a_sleeping_worker_gets_no_requests_and_one_of_them_is_woken_on_demand() {
    let fleet = fleet();
    for worker in ["v", "w"] {
        fleet.register(entry(worker, 16));
        observe(&fleet, worker, Observation::ProbePassed);
    }
    observe(&fleet, "v", Observation::Asleep);
    assert_eq!(candidates(&fleet), Ok(1));
    assert!(!fleet.is_asleep("m"));
    observe(&fleet, "w", Observation::Asleep);
    assert_eq!(candidates(&fleet), Err(RouteRefusal::AllUnhealthy));
    assert!(fleet.is_asleep("m") && !fleet.is_asleep("n"));
    let waking = || fleet.state().wake_targets().len();
    assert_eq!(waking(), 0);
    fleet.wake("m");
    fleet.wake("m");
    assert_eq!(waking(), 1, "one at a time");
    observe(&fleet, "v", Observation::ProbePassed);
    assert_eq!((candidates(&fleet), waking()), (Ok(1), 0));
}

/// Otherwise each worker of a fleet that starts would have all others probed.
#[test]
fn a_registration_has_the_fleet_probed_and_an_observation_does_not() {
    let mut state = FleetState::default();
    let now = Instant::now().into_std();
    assert_eq!(state.register(entry("w", 16), now), FleetChange::WorkDue);
    for (observation, change) in [
        (Observation::ProbePassed, FleetChange::ChecksDue),
        (Observation::ConnectRefused, FleetChange::Published),
        (Observation::ProbePassed, FleetChange::ChecksDue),
    ] {
        let observed = state.observe(&"w".into(), "http://w:1", observation, now);
        assert_eq!(observed, change, "{observation:?}");
    }
}
