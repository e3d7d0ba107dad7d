mod doubts;
mod sent;
mod speed;

use super::*;
use crate::testing::{source, start};
use std::time::Duration;
use warmroute_proto::codec;
use warmroute_proto::load::SlotEnd;
use warmroute_proto::query::{HoldSpan, IndexAnswer, SourceAnswer, SourceState};
use warmroute_proto::{
    BlockSize, EngineSeq, LogPosition, RecordNumber, Seed, StreamIdentity, Tiers,
};

use crate::DecisionBasis;
use crate::audit::{AGREEMENTS, CreditClaim};
use crate::engine_load::{EngineBounds, EngineReading};
use crate::index_view::{LAG_MAX, LogGeneration};

fn entry(name: &str) -> WorkerEntry {
    WorkerEntry {
        models: vec!["base".into()],
        block_size: BlockSize::new(16),
        main_attention_only: true,
        ..WorkerEntry::new(name, format!("http://{name}:8000"))
    }
}

fn core(router: u8) -> Core {
    let mut core = Core::new(CoreConfig {
        knobs: Policy::Kv.into(),
        router: RouterId([router; 16]),
        incarnation: Generation(1),
        seed: 1,
    });
    core.set_workers(&[entry("a"), entry("b")]);
    core
}

fn prompt(tokens: u32, first: u32) -> Prompt {
    let tokens: Vec<u32> = (first..first + tokens).collect();
    Prompt::new(&tokens, BlockSize::new(16).unwrap(), Seed::PLAIN)
}

const LOG: StreamIdentity = StreamIdentity {
    created_unix_ns: 0,
    nonce: 0,
};

/// The index knows `a` and `b` as exact, with these runs on the GPU.
fn answer(generation: u64, seq: u64, runs: [u32; 2]) -> IndexReply {
    let part = |name: &str, gpu: u32| SourceAnswer {
        source: source(name),
        generation: Generation(generation),
        number: Some(RecordNumber(seq)),
        engine_seq: Some(EngineSeq(seq)),
        states: Tiers::all(SourceState::Exact),
        reason: None,
        proof_age_ms: 0,
        run: Tiers {
            gpu,
            cpu: 0,
            disk: 0,
        },
    };
    let answer = IndexAnswer::Runs {
        log: LOG,
        position: LogPosition(seq),
        sources: vec![part("a", runs[0]), part("b", runs[1])],
    };
    answer.into()
}

fn admit(core: &mut Core, prompt: &Prompt, answer: Option<&IndexReply>, now: Instant) -> Admitted {
    let ask = RouteRequest {
        model: "base",
        prompt,
        exclude: &[],
        leg: Leg::Whole,
    };
    core.admit(&ask, answer, now).unwrap()
}

fn end(core: &mut Core, counter: u64, end: SlotEnd, now: Instant) {
    core.note(SlotEvent::End { counter, end }, now).unwrap();
}

fn totals(core: &Core) -> (u32, u64, u64) {
    core.loads().iter().fold((0, 0, 0), |sum, row| {
        (
            sum.0 + row.active_requests,
            sum.1 + row.prefill_tokens,
            sum.2 + row.decode_blocks,
        )
    })
}

#[test]
fn a_decision_is_seen_by_the_next_one() {
    let (mut core, now) = (core(1), start());
    let first = admit(&mut core, &prompt(100, 0), None, now);
    let second = admit(&mut core, &prompt(100, 5000), None, now);
    assert_ne!(first.decision.source, second.decision.source);
    assert_eq!(totals(&core), (2, 200, 14));
}

#[test]
fn a_prefix_that_was_just_prefilled_is_found_before_the_index_knows_it() {
    let (mut core, now) = (core(1), start());
    let first = admit(&mut core, &prompt(1000, 0), None, now);
    let counter = first.slot;
    core.note(SlotEvent::FirstToken { counter }, now).unwrap();
    let second = admit(&mut core, &prompt(1000, 0), None, now);
    assert_eq!(first.decision.source, second.decision.source);
    assert_eq!(second.decision.overlap_blocks, 0);
    assert_eq!(second.decision.predicted_blocks, 62);
    let bases = core.counts().bases;
    assert_eq!((bases.index, bases.prediction, bases.load_only), (0, 1, 1));
}

/// While the prefix is still being computed, waiting for it is worth no more than an idle source.
#[test]
fn a_burst_does_not_pile_up_behind_one_prefill() {
    let (mut core, now) = (core(1), start());
    let mut counts = BTreeMap::new();
    for _ in 0..20 {
        let source = admit(&mut core, &prompt(1000, 0), None, now)
            .decision
            .source;
        *counts.entry(source).or_insert(0) += 1;
    }
    assert!(
        counts.values().all(|count| (5..=15).contains(count)),
        "{counts:?}"
    );
}

#[test]
fn all_slots_are_zero_when_quiet() {
    let (mut core, now) = (core(1), start());
    let ends = [SlotEnd::Completed, SlotEnd::Failed, SlotEnd::Aborted];
    for (n, how) in (0..300).zip(ends.into_iter().cycle()) {
        let slot = admit(&mut core, &prompt(500, n % 7), None, now).slot;
        if n % 2 == 0 {
            core.note(SlotEvent::FirstToken { counter: slot }, now)
                .unwrap();
            let grow = SlotEvent::Grow {
                counter: slot,
                blocks: 3,
            };
            core.note(grow, now).unwrap();
        }
        end(&mut core, slot, how, now);
    }
    assert_eq!(totals(&core), (0, 0, 0));
    assert_eq!(core.counts().open_slots, 0);
    core.tick(now + Duration::from_secs(60));
    assert_eq!(core.counts().predicted_samples, 0);
    assert!(core.pending.is_empty());
}

#[test]
fn ending_twice_frees_once() {
    let (mut core, now) = (core(1), start());
    let slot = admit(&mut core, &prompt(100, 0), None, now).slot;
    end(&mut core, slot, SlotEnd::Completed, now);
    end(&mut core, slot, SlotEnd::Aborted, now);
    assert_eq!(totals(&core), (0, 0, 0));
    assert_eq!(core.counts().ignored.unknown_slot, 1);
}

#[test]
fn a_peer_that_takes_in_the_messages_holds_the_same() {
    let (mut sender, mut peer, now) = (core(1), core(2), start());
    let mut messages = Vec::new();
    for n in 0..20 {
        let admitted = admit(&mut sender, &prompt(3000, n % 3), None, now);
        messages.push(admitted.message);
        let event = match n % 4 {
            0 => SlotEvent::FirstToken {
                counter: admitted.slot,
            },
            1 => SlotEvent::Grow {
                counter: admitted.slot,
                blocks: 2,
            },
            2 => SlotEvent::End {
                counter: admitted.slot,
                end: SlotEnd::Completed,
            },
            _ => SlotEvent::PrefillPredicted {
                counter: admitted.slot,
            },
        };
        messages.push(sender.note(event, now).unwrap());
    }
    for message in &messages {
        peer.apply_remote(&codec::decode(message).unwrap(), now);
    }
    assert_eq!(peer.loads(), sender.loads());
    let router = RouterId([1; 16]);
    assert_eq!(peer.digest(router), sender.digest(router));
    assert_eq!(
        peer.counts().predicted_samples,
        sender.counts().predicted_samples
    );
    peer.release(router, now);
    assert_eq!(totals(&peer), (0, 0, 0));
}

#[test]
fn an_answer_that_counts_a_prediction_ends_it() {
    let (mut core, now) = (core(1), start());
    let asked = prompt(100, 0);
    let first = admit(&mut core, &asked, None, now);
    let held = if first.decision.source == source("a") {
        [6, 0]
    } else {
        [0, 6]
    };
    admit(&mut core, &asked, Some(&answer(1, 1, held)), now);
    // Evicted immediately: the index reports it, and nothing restores the expectation of the first.
    // Only the second request, which is in flight, is expected at its source.
    let third = admit(&mut core, &asked, Some(&answer(1, 2, [0, 0])), now);
    let expected = third
        .decision
        .weighed
        .iter()
        .filter(|t| t.predicted_blocks > 0);
    assert_eq!(expected.count(), 1);
}

#[test]
fn a_new_generation_voids_what_was_expected() {
    let (mut core, now) = (core(1), start());
    let asked = prompt(100, 0);
    admit(
        &mut core,
        &prompt(100, 9000),
        Some(&answer(1, 1, [0, 0])),
        now,
    );
    admit(&mut core, &asked, Some(&answer(1, 1, [0, 0])), now);
    let next = admit(&mut core, &asked, Some(&answer(2, 0, [0, 0])), now);
    assert!(
        next.decision
            .weighed
            .iter()
            .all(|t| t.predicted_blocks == 0)
    );
}

#[test]
fn an_old_replicas_ghosts_are_not_credited() {
    let (mut core, now) = (core(1), start());
    let asked = prompt(100, 0);
    admit(
        &mut core,
        &prompt(100, 9000),
        Some(&answer(2, 0, [0, 0])),
        now,
    );
    let ghost = admit(&mut core, &asked, Some(&answer(1, 50, [6, 6])), now);
    assert_eq!(ghost.decision.overlap_blocks, 0);
    assert_eq!(ghost.decision.index_state, SourceState::Stale);
    // An equal generation, but overtaken for too long.
    admit(
        &mut core,
        &prompt(100, 9000),
        Some(&answer(2, 5, [0, 0])),
        now,
    );
    let late = admit(
        &mut core,
        &asked,
        Some(&answer(2, 4, [6, 6])),
        now + LAG_MAX,
    );
    assert_eq!(late.decision.overlap_blocks, 0);
}

#[test]
fn an_index_that_keeps_promising_what_the_engine_lacks_is_demoted() {
    let (mut core, mut now) = (core(1), start());
    let asked = prompt(100, 0);
    for seq in 1..=3 {
        let promise = answer(1, 2 * seq, [6, 6]);
        let admitted = admit(&mut core, &asked, Some(&promise), now);
        end(&mut core, admitted.slot, SlotEnd::Completed, now);
        // Keep the choice at one source.
        let mut decision = admitted.decision;
        decision.claim.source = core.table.id(&source("a")).unwrap();
        let verdict = core.audit(&decision, &asked, 0, now);
        let AuditVerdict::Less {
            recheck: Some(recheck),
            ..
        } = verdict
        else {
            panic!("{verdict:?}");
        };
        now = recheck.not_before;
        let query = core.hold_query(&recheck).unwrap();
        assert_eq!(query.source, source("a"));
        let held = HoldAnswer {
            log: Some(LOG),
            generation: Some(Generation(1)),
            engine_seq: Some(EngineSeq(2 * seq + 1)),
            state: SourceState::Exact,
            proof_age_ms: 900,
            span: HoldSpan::Held,
        };
        let verdict = core.recheck(&recheck, &held, now);
        let RecheckVerdict::Repeat(again) = verdict else {
            panic!("{verdict:?}");
        };
        now = again.not_before;
        let verdict = core.recheck(&again, &held, now);
        assert_eq!(verdict == RecheckVerdict::Demote, seq == 3, "{verdict:?}");
    }
    assert_eq!(core.counts().view.demoted, 1);
    let next = admit(&mut core, &asked, Some(&answer(1, 9, [6, 0])), now);
    assert!(
        next.decision
            .weighed
            .iter()
            .all(|terms| terms.overlap.gpu == 0)
    );
    assert_eq!(core.demoted().len(), 1);
    let mut agreeing = core;
    for seq in 10..10 + u64::from(AGREEMENTS) {
        let promise = answer(1, seq, [6, 0]);
        let admitted = admit(&mut agreeing, &asked, Some(&promise), now);
        let mut decision = admitted.decision;
        decision.claim = CreditClaim {
            source: agreeing.table.id(&source("a")).unwrap(),
            standing: ClaimStanding::Demoted,
            state: SourceState::Exact,
            blocks: 6,
            ..decision.claim
        };
        agreeing.audit(&decision, &asked, 6 * 16, now);
    }
    assert_eq!(agreeing.demoted(), []);
    let promise = answer(1, 50, [6, 0]);
    let after = admit(&mut agreeing, &asked, Some(&promise), now);
    assert_eq!(after.decision.weighed[0].overlap.gpu, 6);
}

#[test]
fn a_new_generation_ends_a_demotion() {
    let (mut core, now) = (core(1), start());
    let asked = prompt(100, 0);
    admit(&mut core, &asked, Some(&answer(1, 9, [6, 0])), now);
    let a = core.table.id(&source("a")).unwrap();
    let at = LogGeneration {
        log: LOG,
        generation: Generation(1),
    };
    core.view.demote(a, at);
    let fresh = admit(&mut core, &asked, Some(&answer(2, 0, [6, 0])), now);
    let overlaps: Vec<_> = fresh
        .decision
        .weighed
        .iter()
        .map(|t| t.overlap.gpu)
        .collect();
    assert_eq!(overlaps, [6, 0]);
}

/// A measurement counts at most four times its prediction and 20 ms (`route::fit`): one raises the
/// prediction by less than that, two could by a factor of ten, and the prior may cost a third one.
#[test]
fn first_tokens_teach_the_prediction() {
    let (mut core, mut now) = (core(1), start());
    let mut predicted = Vec::new();
    for counter in 0..4 {
        let decision = admit(&mut core, &prompt(4000, 0), None, now).decision;
        predicted.push(decision.predicted_ttft);
        now += Duration::from_secs(20);
        core.note(SlotEvent::FirstToken { counter }, now).unwrap();
        end(&mut core, counter, SlotEnd::Failed, now);
    }
    let outlier = predicted[0] * 4 + Duration::from_millis(20);
    assert!((predicted[0] * 3..outlier).contains(&predicted[1]));
    assert!(predicted[3] > predicted[0] * 10);
}

/// Each worker is idle at every arrival: only its speed distinguishes it.
#[test]
fn a_slow_source_loses_its_share_and_a_restart_clears_its_name() {
    let (mut core, mut now) = (core(1), start());
    let mut last = Vec::new();
    for n in 0..60 {
        let asked = prompt(400, 1000 * n);
        let admitted = admit(&mut core, &asked, Some(&answer(1, 1, [0; 2])), now);
        let slow = admitted.decision.source == source("a");
        last.push(admitted.decision);
        let counter = admitted.slot;
        now += Duration::from_millis(if slow { 800 } else { 100 });
        core.note(SlotEvent::FirstToken { counter }, now).unwrap();
        end(&mut core, counter, SlotEnd::Completed, now);
        now += Duration::from_millis(500);
    }
    let late = &last[40..];
    assert!(late.iter().all(|decision| decision.source == source("b")));
    let of = |name: &str| core.ttft_ratio(&source(name), now).unwrap();
    assert!(of("a") > 2.0 * of("b"), "{} {}", of("a"), of("b"));
    let terms = &late[0].weighed;
    assert!(terms.iter().any(|terms| terms.factors.slowness > 1.0));
    assert!(terms.iter().any(|terms| terms.factors.slowness == 1.0));
    let next = prompt(400, 100_000);
    let decision = admit(&mut core, &next, Some(&answer(2, 1, [0; 2])), now).decision;
    assert!(
        decision
            .weighed
            .iter()
            .all(|terms| terms.factors.slowness == 1.0)
    );
    assert_eq!(core.ttft_ratio(&source("a"), now), None);
}

/// Its clients go before its first tokens come.
#[test]
fn a_source_that_clients_do_not_wait_for_is_known_as_slow() {
    let (mut core, mut now) = (core(1), start());
    let mut chosen = Vec::new();
    for n in 0..60 {
        let admitted = admit(&mut core, &prompt(400, 1000 * n), None, now);
        let slow = admitted.decision.source == source("a");
        let counter = admitted.slot;
        now += Duration::from_millis(if slow { 1000 } else { 100 });
        if slow {
            end(&mut core, counter, SlotEnd::Aborted, now);
        } else {
            core.note(SlotEvent::FirstToken { counter }, now).unwrap();
            end(&mut core, counter, SlotEnd::Completed, now);
        }
        chosen.push(slow);
    }
    assert!(chosen[..20].contains(&true));
    assert!(!chosen[40..].contains(&true), "{chosen:?}");
}

#[test]
fn a_source_without_first_tokens_is_left_out_for_a_while() {
    let (mut core, now) = (core(1), start());
    let first = admit(&mut core, &prompt(100, 9_000_000), None, now).slot;
    end(&mut core, first, SlotEnd::Completed, now);
    let stuck = admit(&mut core, &prompt(100, 0), None, now).decision.source;
    let later = now + Duration::from_secs(8);
    for n in 0..10 {
        let next = admit(&mut core, &prompt(100, 1000 * n), None, later);
        assert_ne!(next.decision.source, stuck);
    }
    assert!(core.is_stalled(&stuck, later));
    assert!(!core.is_stalled(&stuck, now + Duration::from_secs(60)));
}

/// What a request waited for at a hung engine is no speed of the engine that works again.
#[test]
fn a_source_that_worked_again_is_as_fast_as_before() {
    let (mut core, now) = (core(1), start());
    let stuck = admit(&mut core, &prompt(100, 0), None, now);
    let of = |core: &Core| core.speed(&stuck.decision.source);
    let before = of(&core);
    let late = now + Duration::from_secs(32);
    core.tick(late);
    assert!(core.is_stalled(&stuck.decision.source, late));
    let counter = stuck.slot;
    core.note(SlotEvent::FirstToken { counter }, late).unwrap();
    assert_eq!(of(&core), before);
    assert_eq!(core.ttft_ratio(&stuck.decision.source, late), None);
}

#[test]
fn a_retry_takes_a_slot_of_its_own_elsewhere() {
    let (mut core, now) = (core(1), start());
    let asked = prompt(100, 0);
    let first = admit(&mut core, &asked, None, now);
    end(&mut core, first.slot, SlotEnd::Failed, now);
    let exclude = [first.decision.source.clone()];
    let ask = RouteRequest {
        model: "base",
        prompt: &asked,
        exclude: &exclude,
        leg: Leg::Whole,
    };
    let second = core.admit(&ask, None, now).unwrap();
    assert_ne!(second.slot, first.slot);
    assert_ne!(second.decision.source, first.decision.source);
    assert_eq!(second.decision.predicted_blocks, 0);
    assert_eq!(totals(&core).0, 1);
}

#[test]
fn loads_name_every_registered_source_and_those_that_still_bear_something() {
    let (mut core, now) = (core(1), start());
    let slot = admit(&mut core, &prompt(100, 0), None, now);
    core.set_workers(&[entry("c")]);
    let names = |core: &Core| -> Vec<String> {
        let rows = core.loads();
        rows.iter().map(|row| row.worker.to_string()).collect()
    };
    let gone = slot.decision.source.worker.to_string();
    core.set_health(&"c".into(), Health::Healthy);
    assert_eq!(names(&core), [gone, "c".to_owned()]);
    end(&mut core, slot.slot, SlotEnd::Completed, now);
    assert_eq!(names(&core), ["c"]);
}

#[test]
fn another_incarnation_keeps_the_slots_and_their_guards_work() {
    let (mut core, now) = (core(1), start());
    let router = RouterId([1; 16]);
    let open = admit(&mut core, &prompt(100, 0), None, now).slot;
    let other = admit(&mut core, &prompt(200, 9000), None, now).slot;
    let before = core.digest(router);
    core.begin(Generation(7));
    assert_eq!(core.digest(router), before);
    assert_eq!(core.ledger().last(), Some(RecordNumber(0)));
    assert_eq!(core.own_slots().len(), 2);
    // A replica that takes the statement in follows from there.
    let mut peer = self::core(2);
    peer.restore(router, Generation(7), &core.own_slots());
    assert_eq!(peer.digest(router), before);
    for counter in [open, other] {
        let event = SlotEvent::End {
            counter,
            end: SlotEnd::Completed,
        };
        let bytes = core.note(event, now).unwrap();
        let message: LoadMessage = codec::decode(&bytes).unwrap();
        assert_eq!(message.incarnation, Generation(7));
        peer.apply_remote(&message, now);
    }
    assert_eq!(totals(&core), (0, 0, 0));
    assert_eq!(peer.digest(router), LoadDigest::default());
}

/// Whatever happens between its steps, a cut is of the moment of its last one.
#[test]
fn a_cut_in_steps_is_of_one_moment() {
    let (mut core, now) = (core(1), start());
    let open = u64::try_from(2 * STEP_SLOTS + 500).unwrap();
    for number in 0..open {
        let first = u32::try_from(number % 7).unwrap() << 20;
        admit(&mut core, &prompt(100, first), None, now);
    }
    let mut cut = SlotSnapshotBuilder::default();
    let mut steps = 0;
    while !core.snapshot_step(&mut cut) {
        steps += 1;
        // Some that were looked at, some that will be, some that are new: freed, grown, prefilled.
        if steps <= 4 {
            end(&mut core, steps, SlotEnd::Completed, now);
            end(&mut core, open - steps, SlotEnd::Aborted, now);
            let new = admit(&mut core, &prompt(50, 9 << 20), None, now).slot;
            let counter = 100 + steps;
            core.note(SlotEvent::Grow { counter, blocks: 3 }, now)
                .unwrap();
            core.note(SlotEvent::FirstToken { counter: new }, now)
                .unwrap();
        }
    }
    assert!(steps >= 4, "{steps} steps");
    let (slots, router) = (cut.into_slots(), RouterId([1; 16]));
    assert_eq!(slots, core.own_slots());
    let mut peer = self::core(2);
    peer.restore(router, Generation(1), &slots);
    assert_eq!(peer.digest(router), core.digest(router));
    assert_eq!(peer.loads_of(router), core.loads_of(router));
    // No snapshot is in progress: another one starts from the beginning.
    assert!(core.touched.is_none());
}

/// The requests count no more from the first step on; the blocks go with the steps.
#[test]
fn a_release_in_steps_leaves_nothing() {
    let (mut core, now) = (core(1), start());
    let router = RouterId([1; 16]);
    for number in 0..u32::try_from(2 * STEP_SLOTS + 1).unwrap() {
        admit(&mut core, &prompt(40, number << 10), None, now);
    }
    let slots = core.own_slots();
    let mut peer = self::core(2);
    peer.restore(router, Generation(1), &slots);
    let mut steps = 0;
    while peer.release_step(router, now) {
        steps += 1;
        let (requests, prefill, blocks) = totals(&peer);
        assert_eq!((requests, prefill), (0, 0));
        assert!(blocks > 0, "after step {steps}");
        assert_eq!(peer.digest(router), LoadDigest::default());
        assert!(peer.loads_of(router).is_empty());
    }
    assert!(steps >= 2, "{steps} steps");
    assert_eq!(totals(&peer), (0, 0, 0));
    assert_eq!(peer.counts().predicted_samples, 0);
    // It may come back at any time.
    peer.restore(router, Generation(1), &slots);
    assert_eq!(peer.digest(router), core.digest(router));
    assert_eq!(peer.loads(), core.loads());
}

#[test]
fn every_slot_is_freed_once_and_counted_by_its_end() {
    let (mut core, now) = (core(1), start());
    for how in [SlotEnd::Completed, SlotEnd::Failed, SlotEnd::Aborted] {
        let slot = admit(&mut core, &prompt(100, 0), None, now).slot;
        end(&mut core, slot, how, now);
        // Reported twice, it counts once.
        end(&mut core, slot, SlotEnd::Completed, now);
    }
    let counts = core.counts();
    let once = FreedCounts {
        completed: 1,
        failed: 1,
        aborted: 1,
    };
    assert_eq!((counts.opened, counts.freed), (3, once));
    assert_eq!(counts.ignored.unknown_slot, 3);
}

/// Hits publish no events: a prefix that was hot before the shim started is unknown to the index.
#[test]
fn what_an_engine_reports_is_credited_where_the_index_is_not_complete() {
    let (mut core, now) = (core(1), start());
    let asked = prompt(100, 0);
    let state = |state: SourceState, seq| {
        let mut answer = answer(1, seq, [0, 0]);
        if let IndexReply::Full(IndexAnswer::Runs { sources, .. }) = &mut answer {
            for source in sources {
                source.states.gpu = state;
            }
        }
        answer
    };
    let first = admit(
        &mut core,
        &asked,
        Some(&state(SourceState::Partial, 1)),
        now,
    );
    assert_eq!(first.decision.overlap_blocks, 0);
    let chosen = first.decision.source.clone();
    core.audit(&first.decision, &asked, 64, now);
    end(&mut core, first.slot, SlotEnd::Aborted, now);
    let next = admit(
        &mut core,
        &asked,
        Some(&state(SourceState::Partial, 2)),
        now,
    );
    let decision = &next.decision;
    assert_eq!((&decision.source, decision.overlap_blocks), (&chosen, 4));
    assert_eq!(decision.basis(), DecisionBasis::Reported);
    assert_eq!(decision.index_state, SourceState::Unverified);
    assert_eq!(decision.claim.blocks, 0, "the index claimed nothing");
    // Decided in a generation that ended since.
    admit(&mut core, &asked, Some(&answer(2, 0, [0, 0])), now);
    core.audit(&next.decision, &asked, 64, now);
    assert_eq!(core.counts().reported_prefixes, 0);
    // An exact index knows better.
    let exact = admit(&mut core, &asked, Some(&answer(2, 1, [0, 0])), now);
    core.audit(&exact.decision, &asked, 64, now);
    assert_eq!(core.counts().reported_prefixes, 0);
}

#[test]
fn an_engine_at_a_bound_has_no_free_places() {
    let (mut core, now) = (core(1), start());
    assert_eq!(core.free_places("base", now), None);
    core.set_engine_bounds(Some(EngineBounds {
        foreign_waiting: 8,
        kv_usage: 0.9,
    }));
    let free = |core: &Core, now| {
        let places = core.free_places("base", now).unwrap();
        let names = places
            .iter()
            .map(|(id, free)| (core.source(*id).unwrap().clone(), *free));
        names.collect::<Vec<_>>()
    };
    assert_eq!(free(&core, now), [(source("a"), 64), (source("b"), 64)]);
    let reading = EngineReading {
        running: 4,
        waiting: 9,
        kv_usage: Some(0.5),
    };
    // The routers had two requests there when the engine was asked.
    core.engine_read(&"a".into(), &[reading], &[2], now);
    assert_eq!(free(&core, now), [(source("b"), 64)]);
    let (read, foreign) = core.engine_load(&source("a"), now).unwrap();
    assert_eq!(
        (read.waiting, foreign.requests, foreign.waiting),
        (9, 11, 9)
    );
    core.knobs.active_max = Some(20);
    core.engine_read(
        &"a".into(),
        &[EngineReading {
            waiting: 3,
            ..reading
        }],
        &[2],
        now,
    );
    assert_eq!(free(&core, now), [(source("a"), 15), (source("b"), 20)]);
    core.set_engine_bounds(None);
    assert_eq!(free(&core, now), [(source("a"), 20), (source("b"), 20)]);
}
