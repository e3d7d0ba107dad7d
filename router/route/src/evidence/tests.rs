use proptest::prelude::*;
use warmroute_proto::Generation;

use super::*;
use crate::audit::ClaimStanding;
use crate::prompt_form::PromptFeatures;
use crate::source_table::SourceTable;
use crate::testing::{source, start};

const MODELS: [&str; 2] = ["base", "adapter"];
const ROUTES: [&str; 2] = ["/v1/chat/completions", "/v1/responses"];

/// Which requests a fault of engine or router touches.
type Fault = fn(&Request) -> bool;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    model: usize,
    route: usize,
    has_tools: bool,
    worker: usize,
    prompt: u64,
}

impl Request {
    fn form(&self) -> Arc<PromptForm> {
        Arc::new(PromptForm {
            model: Arc::from(MODELS[self.model]),
            tokenizer: 1,
            route: ROUTES[self.route],
            features: PromptFeatures::default().with(PromptFeatures::TOOLS, self.has_tools),
        })
    }

    fn at(&self) -> SourceLife {
        let mut table = SourceTable::default();
        let ids = ["w0", "w1", "w2"].map(|worker| table.intern(&source(worker)));
        SourceLife {
            source: ids[self.worker],
            generation: Generation(1),
        }
    }
}

/// Turns through all models, routes, tools and the first `workers` workers.
fn traffic(workers: usize) -> impl Iterator<Item = Request> {
    (0..).map(move |turn: usize| Request {
        model: turn % 2,
        route: turn / 2 % 2,
        has_tools: turn / 4 % 2 == 1,
        worker: turn / 8 % workers,
        prompt: turn as u64,
    })
}

fn report(
    evidence: &mut CreditEvidence,
    request: &Request,
    outcome: ReportOutcome,
    now: Instant,
) -> Option<DoubtChange> {
    let report = CreditReport {
        form: &request.form(),
        at: request.at(),
        prompt: request.prompt,
        outcome,
    };
    evidence.report(&report, now)
}

fn outcome(is_faulty: bool) -> ReportOutcome {
    match is_faulty {
        true => ReportOutcome::Contradicted(Contradiction::Exceeded),
        false => ReportOutcome::Agreed,
    }
}

/// Traffic of a fleet with this fault until every faulty request is doubted for a while. Returns the
/// scopes, and the contradictory reports before the first doubt.
fn found(workers: usize, fault: Fault) -> (Vec<Scope>, usize) {
    let (mut evidence, mut now) = (CreditEvidence::default(), start());
    let (mut contradictions, mut first) = (0, None);
    for request in traffic(workers).take(1200) {
        now += Duration::from_millis(500);
        contradictions += usize::from(fault(&request));
        let change = report(&mut evidence, &request, outcome(fault(&request)), now);
        if let Some(DoubtChange::Began(..)) = change {
            first.get_or_insert(contradictions);
        }
    }
    let scopes: Vec<Scope> = evidence.doubts().map(|(scope, _)| scope.clone()).collect();
    for request in traffic(workers).take(64) {
        let is_doubted = scopes
            .iter()
            .any(|scope| scope.covers(&request.form(), request.at()));
        assert_eq!(is_doubted, fault(&request), "{request:?}: {scopes:?}");
    }
    (scopes, first.unwrap_or(usize::MAX))
}

/// Each fault is found by what its requests have in common, and nothing else is doubted.
#[test]
fn the_truth_table_of_faults() {
    let faults: [(&str, usize, Fault); 8] = [
        ("no fault", 3, |_| false),
        ("the template's branch with tools", 3, |one| one.has_tools),
        ("one route", 3, |one| one.route == 1),
        ("one route's tools at one worker", 1, |one| {
            one.route == 1 && one.has_tools
        }),
        ("an adapter", 3, |one| one.model == 1),
        ("an adapter at one worker", 2, |one| {
            one.model == 1 && one.worker == 1
        }),
        ("one worker", 3, |one| one.worker == 2),
        ("the tokenizer of everything", 2, |_| true),
    ];
    for (name, workers, fault) in faults {
        let (scopes, reports) = found(workers, fault);
        let is_found = !scopes.is_empty();
        assert_eq!(is_found, name != "no fault", "{name}");
        assert!(!is_found || reports <= 40, "{name}: {reports} reports");
    }
}

/// Five reports from different prompts, in eight seconds, where only they come.
#[test]
fn five_reports_end_exact_and_sixteen_restore_it() {
    let (mut evidence, mut now) = (CreditEvidence::default(), start());
    let request = |prompt| Request {
        model: 0,
        route: 0,
        has_tools: false,
        worker: 0,
        prompt,
    };
    for prompt in 0..5 {
        let change = report(&mut evidence, &request(prompt), outcome(true), now);
        assert_eq!(change.is_some(), prompt == 4, "report {prompt}");
        now += SPACING;
    }
    assert!(evidence.has_doubts());
    for prompt in 0..16 {
        let change = report(&mut evidence, &request(prompt), outcome(false), now);
        assert_eq!(change.is_some(), prompt == 15, "agreement {prompt}");
        now += SPACING;
    }
    assert!(!evidence.has_doubts());
    let again = report(&mut evidence, &request(9), outcome(true), now);
    assert_eq!(again, None, "a new doubt needs new evidence");
    let counts = evidence.counts();
    assert_eq!((counts.doubts_begun, counts.doubts_ended), (1, 1));
}

/// A stall of the log or of an index is exact for 5 s at most.
#[test]
fn a_burst_or_one_prompt_proves_nothing() {
    let (mut evidence, begin) = (CreditEvidence::default(), start());
    let all: Vec<Request> = traffic(2).take(500).collect();
    for (at, request) in all.iter().enumerate() {
        let now = begin + Duration::from_millis(10 * at as u64);
        assert_eq!(report(&mut evidence, request, outcome(true), now), None);
    }
    let mut evidence = CreditEvidence::default();
    for turn in 0..100 {
        let now = begin + SPACING * turn;
        assert_eq!(report(&mut evidence, &all[0], outcome(true), now), None);
    }
}

#[test]
fn a_fault_of_a_third_of_the_prompts_is_found() {
    let (mut evidence, mut now) = (CreditEvidence::default(), start());
    let of_one_form = |prompt| Request {
        prompt,
        ..traffic(1).next().unwrap()
    };
    let mut changes = (0..100).map(|prompt| {
        now += SPACING;
        report(
            &mut evidence,
            &of_one_form(prompt),
            outcome(prompt % 3 == 0),
            now,
        )
    });
    assert!(changes.any(|change| change.is_some()));
}

#[test]
fn three_proven_misses_end_exact_for_a_form_at_a_source_or_for_a_tier() {
    let (mut evidence, now) = (CreditEvidence::default(), start());
    let missed = ReportOutcome::Contradicted(Contradiction::Missed);
    let adapter = Request {
        model: 1,
        ..traffic(1).next().unwrap()
    };
    let other = Request {
        model: 0,
        ..adapter
    };
    for turn in 0..3 {
        // Agreements of another form reset nothing.
        report(&mut evidence, &other, ReportOutcome::Agreed, now);
        let change = report(&mut evidence, &adapter, missed, now);
        let expected = Scope::FormAt(adapter.form(), adapter.at());
        let expected = DoubtChange::Began(expected, Contradiction::Missed);
        assert_eq!(change, (turn == 2).then_some(expected));
    }
    for turn in 0..3 {
        let change = evidence.tier_report(adapter.at(), Tier::Cpu, missed, now);
        assert_eq!(change.is_some(), turn == 2);
    }
    let mut now = now;
    for _ in 0..RESTORED_AFTER {
        now += SPACING;
        evidence.tier_report(adapter.at(), Tier::Cpu, ReportOutcome::Agreed, now);
    }
    assert_eq!(evidence.doubts().count(), 1, "the adapter's");
}

#[test]
fn a_doubt_without_reports_is_forgotten() {
    let (mut evidence, mut now) = (CreditEvidence::default(), start());
    for request in traffic(1).take(400) {
        now += SPACING;
        report(&mut evidence, &request, outcome(true), now);
    }
    assert!(evidence.has_doubts());
    evidence.expire(now + FORGOTTEN_AFTER);
    assert!(!evidence.has_doubts());
}

fn claim(blocks: u32) -> CreditClaim {
    CreditClaim {
        source: Request::at(&traffic(1).next().unwrap()).source,
        state: SourceState::Exact,
        shows_all_tiers: true,
        standing: ClaimStanding::Credited,
        decided: start(),
        generation: Some(Generation(1)),
        number: None,
        position: None,
        engine_seq: None,
        blocks,
        gpu_blocks: blocks,
        lower_tier: None,
        credit_max: 100,
        cut: warmroute_proto::BlockSize::new(16).unwrap().into(),
        main_attention_only: true,
        reads: CacheReads::Allowed,
    }
}

#[test]
fn the_truth_table_of_reports() {
    use ReportOutcome::{Agreed, Contradicted};
    let more = Some(Contradicted(Contradiction::Exceeded));
    let rows = [
        ("nothing credited, nothing cached", 0, 0, 0, None),
        ("a cold prompt's short hit", 0, 0, 255, None),
        ("hundreds beyond no credit", 0, 0, 256, more),
        ("hundreds beyond a small credit", 1, 0, 1952, more),
        ("what a request in flight stores", 1, 122, 1952, None),
        ("more than a request in flight stores", 1, 100, 1952, more),
        ("found", 60, 0, 960, Some(Agreed)),
        (
            "found, and the answer of the turn before",
            60,
            0,
            1200,
            Some(Agreed),
        ),
        ("less than credited may be an eviction", 60, 0, 900, None),
        ("too short to prove something", 10, 0, 160, None),
    ];
    for (name, blocks, explained, cached, expected) in rows {
        let outcome = ReportOutcome::of(&claim(blocks), explained, cached);
        assert_eq!(outcome, expected, "{name}");
    }
    let weaker = [
        CreditClaim {
            state: SourceState::Partial,
            ..claim(0)
        },
        CreditClaim {
            shows_all_tiers: false,
            ..claim(0)
        },
        CreditClaim {
            reads: CacheReads::Bypassed,
            ..claim(0)
        },
    ];
    for claim in weaker {
        assert_eq!(ReportOutcome::of(&claim, 0, 1000), None);
    }
}

proptest! {
    /// Only what was contradicted often enough is doubted, and memory stays bounded.
    #[test]
    fn a_doubt_has_its_evidence(
        reports in prop::collection::vec((0_usize..48, 0_u64..40, 0_u8..8, 0_u64..4000), 1..300),
    ) {
        let (mut evidence, mut now) = (CreditEvidence::default(), start());
        let kinds: Vec<Request> = traffic(3).take(48).collect();
        let mut seen: Vec<(Request, ReportOutcome)> = Vec::new();
        for (kind, prompt, dice, millis) in reports {
            now += Duration::from_millis(millis);
            let request = Request { prompt, ..kinds[kind] };
            let outcome = match dice {
                0 => ReportOutcome::Contradicted(Contradiction::Missed),
                1..=3 => ReportOutcome::Contradicted(Contradiction::Exceeded),
                _ => ReportOutcome::Agreed,
            };
            seen.push((request, outcome));
            let change = report(&mut evidence, &request, outcome, now);
            if let Some(DoubtChange::Began(scope, kind)) = change {
                let against = seen.iter().filter(|(request, outcome)| {
                    *outcome == ReportOutcome::Contradicted(kind)
                        && scope.covers(&request.form(), request.at())
                });
                let least = match kind {
                    Contradiction::Exceeded => EXCEEDED_MAX,
                    Contradiction::Missed => MISSED_MAX,
                };
                prop_assert!(against.count() >= least);
            }
            prop_assert!(evidence.scopes.len() <= SCOPES_MAX);
            prop_assert_eq!(evidence.scopes.len(), evidence.order.len());
            prop_assert!(evidence.scopes.values().all(|samples| samples.len() <= SAMPLES));
            prop_assert!(evidence.doubts.len() <= DOUBTS_MAX);
        }
    }
}

#[test]
fn scopes_are_bounded() {
    let (mut evidence, now) = (CreditEvidence::default(), start());
    let request = traffic(1).next().unwrap();
    for tokenizer in 0..2 * SCOPES_MAX as u64 {
        let form = PromptForm {
            tokenizer,
            ..PromptForm::clone(&request.form())
        };
        let report = CreditReport {
            form: &Arc::new(form),
            at: request.at(),
            prompt: 0,
            outcome: ReportOutcome::Agreed,
        };
        evidence.report(&report, now);
    }
    assert_eq!(evidence.scopes.len(), SCOPES_MAX);
    assert_eq!(evidence.order.len(), SCOPES_MAX);
}
