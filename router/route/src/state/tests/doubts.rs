//! Faults that end in a wrong `exact`, as the engine's reports show them.

use std::sync::Arc;

use warmroute_proto::Tier;

use super::*;
use crate::evidence::{EXCEEDED_MAX, RESTORED_AFTER, SPACING};
use crate::{PromptFeatures, PromptForm};

const WITH_TOOLS: PromptFeatures = PromptFeatures::TOOLS;
const WITH_PARTS: PromptFeatures = PromptFeatures::CONTENT_PARTS;
const PLAIN: PromptFeatures = PromptFeatures::TOKEN_IDS;

fn of_form(prompt: Prompt, model: &str, features: PromptFeatures) -> Prompt {
    let form = PromptForm {
        model: Arc::from(model),
        tokenizer: 1,
        route: "/v1/chat/completions",
        features,
    };
    prompt.with_form(Some(Arc::new(form)))
}

/// An engine whose cache differs from what the index shows, by a fault.
struct Faulty {
    core: Core,
    now: Instant,
    turn: u64,
}

impl Faulty {
    fn new() -> Self {
        Self {
            core: core(1),
            now: start(),
            turn: 0,
        }
    }

    /// One request of 1,000 tokens that is credited `runs` of all that its engine holds of it, which
    /// reports `cached`. Returns the decision.
    fn ask(
        &mut self,
        (model, features): (&str, PromptFeatures),
        runs: [u32; 2],
        cached: u32,
    ) -> Decision {
        self.turn += 1;
        self.now += SPACING + Duration::from_secs(1);
        let first = u32::try_from(self.turn).unwrap() * 10_000;
        let prompt = of_form(prompt(1000, first), model, features);
        let answer = answer(1, self.turn, runs);
        let admitted = admit(&mut self.core, &prompt, Some(&answer), self.now);
        let decision = admitted.decision;
        self.core.audit(&decision, &prompt, cached, self.now);
        end(&mut self.core, admitted.slot, SlotEnd::Completed, self.now);
        decision
    }

    /// Like `ask`, at this worker.
    fn ask_at(
        &mut self,
        worker: &str,
        form: (&str, PromptFeatures),
        runs: [u32; 2],
        cached: u32,
    ) -> Decision {
        let other = if worker == "a" { "b" } else { "a" };
        self.core.set_drain(&other.into(), DrainState::Draining);
        let decision = self.ask(form, runs, cached);
        self.core.set_drain(&other.into(), DrainState::Serving);
        decision
    }

    fn began(&mut self) -> Vec<DoubtedScope> {
        let events = self.core.take_doubt_events().into_iter();
        let began = events.filter_map(|event| match event {
            DoubtEvent::Began(scope) => Some(scope),
            DoubtEvent::Ended { .. } => None,
        });
        began.collect()
    }
}

/// Empty text parts, names of dict methods, added tokens and numbers change the tokens of the prompts
/// of one form: the index credits a beginning, and the engine has all.
#[test]
fn a_form_that_is_rendered_otherwise_loses_exact() {
    for (faulty, right) in [
        (WITH_PARTS, PLAIN),
        (WITH_TOOLS, PLAIN),
        (PLAIN, WITH_TOOLS),
    ] {
        let mut fleet = Faulty::new();
        for _ in 0..2 * EXCEEDED_MAX {
            let found = fleet.ask(("base", right), [62, 62], 992);
            assert_eq!(found.index_state, SourceState::Exact);
            fleet.ask(("base", faulty), [1, 1], 992);
        }
        assert_eq!(fleet.began().first().unwrap().engine_had, "more");
        let found = fleet.ask(("base", right), [62, 62], 992);
        assert_eq!(found.index_state, SourceState::Exact);
        let doubted = fleet.ask(("base", faulty), [1, 1], 992);
        assert_eq!(doubted.index_state, SourceState::Partial);
    }
}

/// Lookahead hashing, and a connector's tier whose events do not come: the prompts of one source.
#[test]
fn a_source_whose_events_do_not_show_its_blocks_loses_exact() {
    let mut fleet = Faulty::new();
    let forms = [("base", PLAIN), ("base", WITH_TOOLS), ("base", WITH_PARTS)];
    for form in forms.into_iter().cycle().take(90) {
        fleet.ask_at("a", form, [0, 62], 992);
        fleet.ask_at("b", form, [0, 62], 992);
    }
    let began = fleet.began();
    assert!(!began.is_empty());
    assert!(
        began.iter().all(|scope| scope.source == Some(source("a"))),
        "{began:?}"
    );
}

/// While a form is doubted, what its engine reported is credited in place of the index's silence, and
/// agreement restores it.
#[test]
fn reports_take_over_until_the_engine_agrees() {
    let mut fleet = Faulty::new();
    for _ in 0..2 * EXCEEDED_MAX {
        fleet.ask(("base", PLAIN), [0, 0], 992);
    }
    assert!(!fleet.core.doubted().is_empty());
    let asked = of_form(prompt(1000, 0), "base", PLAIN);
    let silent = |turn: u64| answer(1, 1000 + turn, [0, 0]);
    let first = admit(&mut fleet.core, &asked, Some(&silent(0)), fleet.now);
    fleet.core.audit(&first.decision, &asked, 992, fleet.now);
    end(&mut fleet.core, first.slot, SlotEnd::Completed, fleet.now);
    fleet.now += Duration::from_secs(30);
    let next = admit(&mut fleet.core, &asked, Some(&silent(1)), fleet.now);
    assert_eq!(next.decision.source, first.decision.source);
    assert_eq!(next.decision.basis(), DecisionBasis::Reported);
    assert!(next.decision.overlap_blocks > 0);
    assert_eq!(next.decision.index_state, SourceState::Unverified);
    fleet.turn = 2000;
    for _ in 0..4 * RESTORED_AFTER {
        fleet.ask(("base", PLAIN), [62, 62], 992);
    }
    assert_eq!(fleet.core.doubted(), []);
    let restored = fleet.ask(("base", PLAIN), [62, 62], 992);
    assert_eq!(restored.index_state, SourceState::Exact);
}

/// An adapter that was loaded from another path under its name: the index credits blocks that the
/// engine does not find, while everything else is right.
#[test]
fn an_adapter_whose_blocks_the_engine_lacks_gets_no_credit() {
    let mut fleet = Faulty::new();
    for turn in 0..3 {
        fleet.ask_at("a", ("base", PLAIN), [62, 62], 992);
        let asked = of_form(prompt(1000, 900_000 + 2000 * turn), "adapter", PLAIN);
        fleet.turn += 1;
        let promise = answer(1, fleet.turn, [62, 0]);
        let admitted = admit(&mut fleet.core, &asked, Some(&promise), fleet.now);
        end(
            &mut fleet.core,
            admitted.slot,
            SlotEnd::Completed,
            fleet.now,
        );
        let mut decision = admitted.decision;
        decision.claim.source = fleet.core.table.id(&source("a")).unwrap();
        let verdict = fleet.core.audit(&decision, &asked, 0, fleet.now);
        let AuditVerdict::Less {
            recheck: Some(recheck),
            ..
        } = verdict
        else {
            panic!("{verdict:?}");
        };
        fleet.turn += 1;
        strike(&mut fleet, &recheck);
        // Agreements of other prompts end no strike of this form.
        fleet.ask_at("a", ("base", PLAIN), [62, 62], 992);
    }
    assert_eq!(fleet.core.demoted(), []);
    let began = fleet.began();
    assert_eq!(began.len(), 1, "{began:?}");
    assert_eq!(began[0].engine_had, "less");
    let asked = of_form(prompt(1000, 5_000_000), "adapter", PLAIN);
    let promise = answer(1, fleet.turn + 1, [62, 0]);
    let next = admit(&mut fleet.core, &asked, Some(&promise), fleet.now).decision;
    let weighed = &next.weighed[0];
    assert_eq!(
        (weighed.overlap.gpu, weighed.state),
        (0, SourceState::Stale)
    );
}

/// The index insists twice that it held the block all the time.
fn strike(fleet: &mut Faulty, recheck: &Recheck) {
    let held = HoldAnswer {
        log: Some(LOG),
        generation: Some(Generation(1)),
        engine_seq: Some(EngineSeq(fleet.turn)),
        state: SourceState::Exact,
        proof_age_ms: 900,
        span: HoldSpan::Held,
    };
    fleet.now = fleet.now.max(recheck.not_before);
    let verdict = fleet.core.recheck(recheck, &held, fleet.now);
    let RecheckVerdict::Repeat(again) = verdict else {
        panic!("{verdict:?}");
    };
    fleet.now = again.not_before;
    let verdict = fleet.core.recheck(&again, &held, fleet.now);
    assert_eq!(verdict, RecheckVerdict::Strike);
}

/// Hits of whole chunks, or blocks that a connector dropped without an event: one lower tier.
#[test]
fn a_tier_that_lacks_blocks_gets_no_credit_and_the_gpu_keeps_its_own() {
    let mut fleet = Faulty::new();
    let in_tiers = |turn| {
        let IndexReply::Full(IndexAnswer::Runs {
            log,
            position,
            mut sources,
        }) = answer(1, turn, [20, 20])
        else {
            unreachable!()
        };
        for part in &mut sources {
            part.run.cpu = 42;
        }
        IndexReply::Full(IndexAnswer::Runs {
            log,
            position,
            sources,
        })
    };
    for turn in 0..3 {
        fleet.turn += 1;
        let asked = of_form(prompt(1000, 10_000 + 2000 * turn), "base", PLAIN);
        let admitted = admit(
            &mut fleet.core,
            &asked,
            Some(&in_tiers(fleet.turn)),
            fleet.now,
        );
        end(
            &mut fleet.core,
            admitted.slot,
            SlotEnd::Completed,
            fleet.now,
        );
        let mut decision = admitted.decision;
        decision.claim.source = fleet.core.table.id(&source("a")).unwrap();
        let verdict = fleet.core.audit(&decision, &asked, 48 * 16, fleet.now);
        let AuditVerdict::Less {
            recheck: Some(recheck),
            ..
        } = verdict
        else {
            panic!("{verdict:?}");
        };
        assert_eq!(recheck.tier(), Tier::Cpu);
        fleet.turn += 1;
        strike(&mut fleet, &recheck);
    }
    let began = fleet.began();
    assert_eq!(began.len(), 1, "{began:?}");
    let asked = of_form(prompt(1000, 5_000_000), "base", PLAIN);
    let next = admit(
        &mut fleet.core,
        &asked,
        Some(&in_tiers(fleet.turn + 1)),
        fleet.now,
    );
    let weighed = next.decision.weighed[0];
    assert_eq!((weighed.overlap.gpu, weighed.overlap.cpu), (20, 0));
    assert_eq!(weighed.state, SourceState::Partial);
    assert_eq!(next.decision.weighed[1].overlap.cpu, 42, "the other worker");
    assert_eq!(fleet.core.demoted(), [], "not the whole source");
}

/// Another life of the source, or another tokenizer, begins without doubts.
#[test]
fn a_new_generation_and_a_new_tokenizer_are_exact_again() {
    let mut fleet = Faulty::new();
    for _ in 0..2 * EXCEEDED_MAX {
        fleet.ask(("base", PLAIN), [0, 0], 992);
    }
    assert_eq!(
        fleet.core.doubted().len(),
        fleet.core.doubts.evidence.doubts().count()
    );
    let asked = prompt(1000, 0);
    let form = PromptForm {
        model: Arc::from("base"),
        tokenizer: 2,
        route: "/v1/chat/completions",
        features: PLAIN,
    };
    let replaced = asked.clone().with_form(Some(Arc::new(form)));
    let same = answer(1, 500, [0, 0]);
    let decision = admit(&mut fleet.core, &replaced, Some(&same), fleet.now).decision;
    assert_eq!(decision.index_state, SourceState::Exact);
}

/// What an engine's reports give has their state, and not that of an index that says nothing.
#[test]
fn credit_by_reports_is_unverified_where_the_index_is_unknown_or_stale() {
    let (mut core, now) = (core(1), start());
    let asked = prompt(1000, 0);
    let first = admit(&mut core, &asked, None, now);
    assert_eq!(first.decision.index_state, SourceState::Unknown);
    core.audit(&first.decision, &asked, 992, now);
    end(&mut core, first.slot, SlotEnd::Completed, now);
    let later = now + Duration::from_secs(30);
    let next = admit(&mut core, &asked, None, later);
    assert_eq!(next.decision.basis(), DecisionBasis::Reported);
    assert!(next.decision.overlap_blocks > 0);
    assert_eq!(next.decision.index_state, SourceState::Unverified);
    assert_eq!(next.decision.tier_states.gpu, SourceState::Unknown);
}

/// What an engine reported while its GPU tier was not shown may be of that tier, which may have been
/// reset since.
#[test]
fn reports_of_before_the_gpu_was_shown_are_no_credit_of_lower_tiers() {
    let asked = prompt(1000, 0);
    let with_states = |gpu: SourceState, turn: u64| {
        let mut answer = answer(1, turn, [0, 0]);
        if let IndexReply::Full(IndexAnswer::Runs { sources, .. }) = &mut answer {
            for one in sources {
                (one.states.gpu, one.states.cpu) = (gpu, SourceState::Partial);
            }
        }
        answer
    };
    let (mut core, mut now) = (core(1), start());
    let mut ask = |gpu: SourceState, turn: u64, cached: u32| {
        now += Duration::from_secs(1);
        let admitted = admit(&mut core, &asked, Some(&with_states(gpu, turn)), now);
        core.audit(&admitted.decision, &asked, cached, now);
        end(&mut core, admitted.slot, SlotEnd::Completed, now);
        admitted.decision.overlap_blocks
    };
    assert_eq!(ask(SourceState::Partial, 1, 992), 0);
    assert_eq!(ask(SourceState::Partial, 2, 992), 62);
    assert_eq!(ask(SourceState::Exact, 3, 992), 0);
    assert_eq!(ask(SourceState::Exact, 4, 992), 62, "of a lower tier");
}

/// A connector whose events never come: the index shows the GPU, and the engine loads the rest from
/// a tier that is known not to be shown.
#[test]
fn reports_give_the_credit_of_a_tier_that_is_not_shown() {
    let asked = prompt(1000, 0);
    let with_tier = |state: SourceState, turn: u64| {
        let mut answer = answer(1, turn, [0, 0]);
        if let IndexReply::Full(IndexAnswer::Runs { sources, .. }) = &mut answer {
            sources.iter_mut().for_each(|one| one.states.cpu = state);
        }
        answer
    };
    for (tier, cached, credited) in [
        (SourceState::Partial, 992, 62),
        (SourceState::Unverified, 992, 62),
        // What was stored since the index answered.
        (SourceState::Partial, 240, 0),
        (SourceState::Exact, 992, 0),
        (SourceState::Absent, 992, 0),
    ] {
        let (mut core, mut now) = (core(1), start());
        let mut ask = |turn: u64, cached: u32| {
            now += Duration::from_secs(30);
            let admitted = admit(&mut core, &asked, Some(&with_tier(tier, turn)), now);
            core.audit(&admitted.decision, &asked, cached, now);
            end(&mut core, admitted.slot, SlotEnd::Completed, now);
            admitted.decision
        };
        assert_eq!(ask(1, cached).overlap_blocks, 0);
        for turn in 2..4 {
            let next = ask(turn, cached);
            assert_eq!(next.overlap_blocks, credited, "{tier:?}, {cached}");
            let state = match credited {
                0 => SourceState::Exact,
                _ => SourceState::Unverified,
            };
            assert_eq!(next.index_state, state);
        }
        // The tier lost it.
        ask(4, 0);
        assert_eq!(ask(5, 0).overlap_blocks, 0);
    }
}
