use super::super::tests::fleet_of;
use super::*;
use crate::testing::worker_entry as entry;

/// `given`: the operator's block size. `workers`: those of the engines, 0 for unknown.
fn check_blocks(given: Option<u32>, workers: &[u32], expected: &[&str]) {
    let fleet = fleet_of(given);
    for (name, tokens) in ["a", "b"].into_iter().zip(workers) {
        fleet.register(entry(name, *tokens));
    }
    let checker = RegistrationChecker {
        fleet: Arc::clone(&fleet),
        client: reqwest::Client::new(),
        tokenizer: None,
        metrics: Arc::new(Metrics::new().unwrap()),
        ready: Arc::default(),
    };
    let workers = fleet.snapshot();
    let found = workers.iter().map(|worker| checker.block_size(worker));
    let found: Vec<&str> = found.map(|check| name(&check)).collect();
    assert_eq!(found, expected, "{given:?}");
}

/// The operator's size, else that of the first worker, is expected of the others.
#[test]
fn a_worker_whose_blocks_are_of_another_size_fails() {
    check_blocks(None, &[16], &["passed"]);
    check_blocks(None, &[0], &["skipped"]);
    check_blocks(Some(16), &[0], &["skipped"]);
    check_blocks(Some(16), &[16], &["passed"]);
    check_blocks(Some(16), &[32], &["failed"]);
    check_blocks(Some(16), &[32, 16], &["failed", "passed"]);
    check_blocks(None, &[16, 16], &["passed", "passed"]);
    check_blocks(None, &[16, 32], &["passed", "failed"]);
    check_blocks(None, &[0, 32], &["skipped", "passed"]);
}

const fn name(check: &CheckResult) -> &'static str {
    match check {
        CheckResult::Pending => "pending",
        CheckResult::Passed => "passed",
        CheckResult::Failed { .. } => "failed",
        CheckResult::Skipped { .. } => "skipped",
    }
}

fn check(verdicts: &[(ProbeKind, ProbeVerdict)], expected: [&str; 3]) {
    let named: Vec<_> = verdicts
        .iter()
        .map(|(kind, verdict)| ("probe", *kind, verdict.clone()))
        .collect();
    let checks = token_checks(&named);
    let results = [&checks.text, &checks.chat, &checks.chat_with_tools].map(name);
    assert_eq!(results, expected, "{verdicts:?}");
}

#[test]
fn a_difference_fails_its_kind_and_what_rests_on_it() {
    let equal = || ProbeVerdict::Equal { tokens: 3 };
    let differ = || ProbeVerdict::Differ {
        at: 1,
        ours: Some(1),
        theirs: None,
    };
    check(
        &[
            (ProbeKind::Completion, equal()),
            (ProbeKind::Chat, equal()),
            (ProbeKind::ChatWithTools, equal()),
        ],
        ["passed", "passed", "passed"],
    );
    check(
        &[
            (ProbeKind::Completion, equal()),
            (ProbeKind::Chat, differ()),
            (ProbeKind::ChatWithTools, equal()),
        ],
        ["passed", "failed", "failed"],
    );
    check(
        &[
            (ProbeKind::Completion, differ()),
            (ProbeKind::Chat, equal()),
            (ProbeKind::ChatWithTools, ProbeVerdict::BothRefuse),
        ],
        ["failed", "passed", "skipped"],
    );
    check(&[], ["skipped", "skipped", "skipped"]);
}
