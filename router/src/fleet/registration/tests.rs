use std::path::Path;
use std::sync::Mutex;

use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};

use super::super::tests::fleet_of;
use super::*;
use crate::fleet::health::Observation;
use crate::testing::{engine_clients, worker_entry as entry};
use crate::tokenize::Tokenizer;
use crate::tokenizers::TokenizerTable;

/// `given`: the operator's block size. `workers`: those of the engines, 0 for unknown.
fn check_blocks(given: Option<u32>, workers: &[u32], expected: &[&str]) {
    let fleet = fleet_of(given);
    for (name, tokens) in ["a", "b"].into_iter().zip(workers) {
        fleet.register(entry(name, *tokens));
    }
    let checker = RegistrationChecker {
        fleet: Arc::clone(&fleet),
        client: engine_clients(),
        keys: EngineKeys::default(),
        tokenizers: Arc::default(),
        settings: Arc::default(),
        metrics: Arc::new(Metrics::new().unwrap()),
        ready: Arc::default(),
    };
    let workers = fleet.snapshot();
    let found = workers.iter().map(|worker| checker.block_size(worker));
    let found: Vec<&str> = found.map(|check| name(&check)).collect();
    assert_eq!(found, expected, "{given:?}");
}

/// Without an operator's size each worker has its own.
#[test]
fn a_worker_whose_blocks_are_of_another_size_fails() {
    check_blocks(None, &[16], &["passed"]);
    check_blocks(None, &[0], &["skipped"]);
    check_blocks(Some(16), &[0], &["skipped"]);
    check_blocks(Some(16), &[16], &["passed"]);
    check_blocks(Some(16), &[32], &["failed"]);
    check_blocks(Some(16), &[32, 16], &["failed", "passed"]);
    check_blocks(None, &[16, 16], &["passed", "passed"]);
    check_blocks(None, &[16, 32], &["passed", "passed"]);
    check_blocks(None, &[0, 32], &["skipped", "passed"]);
}

#[tokio::test]
async fn a_failed_check_is_counted_once_in_an_epoch() {
    let fleet = fleet_of(Some(16));
    fleet.register(entry("w", 32));
    let metrics = Arc::new(Metrics::new().unwrap());
    let checker = RegistrationChecker {
        fleet: Arc::clone(&fleet),
        client: engine_clients(),
        keys: EngineKeys::default(),
        tokenizers: Arc::default(),
        settings: Arc::default(),
        metrics: Arc::clone(&metrics),
        ready: Arc::default(),
    };
    let failures = || metrics.value("worker_check_failures_total{check=\"block_size\"}");
    for _ in 0..2 {
        checker.check(fleet.snapshot().remove(0)).await;
        assert_eq!(failures(), 1);
    }
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
    let checks = token_checks(&named, &[], None);
    let results = [&checks.text, &checks.chat, &checks.chat_with_tools].map(name);
    assert_eq!(results, expected, "{verdicts:?}");
}

#[test]
fn a_difference_of_a_text_names_the_likely_reason() {
    let differ = ProbeVerdict::Differ {
        at: 1,
        ours: Some(1),
        theirs: None,
    };
    let checks = token_checks(
        &[("text", ProbeKind::Completion, differ)],
        &[],
        Some("a reason"),
    );
    let why = "text: token 1 differs: router 1, engine none; a reason";
    assert_eq!(checks.text, CheckResult::failed(why));
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

/// A worker of a model whose tokenizer the router has.
struct ProbedEngine {
    fleet: Arc<Fleet>,
    checker: RegistrationChecker,
    server: tokio::task::JoinHandle<()>,
}

impl ProbedEngine {
    async fn start(router: axum::Router) -> Self {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
        let tokenizers = Arc::<Tokenizers>::default();
        let tokenizer = Tokenizer::load(&fixture).unwrap();
        tokenizers.publish(TokenizerTable::with(&["m"], tokenizer));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = async move { axum::serve(listener, router).await.unwrap() };
        let server = tokio_util::task::TaskTracker::new().spawn(server);
        let fleet = fleet_of(None);
        fleet.register(warmroute_proto::registry::WorkerEntry {
            url,
            ..entry("w", 16)
        });
        let checker = RegistrationChecker {
            fleet: Arc::clone(&fleet),
            client: engine_clients(),
            keys: EngineKeys::default(),
            tokenizers,
            settings: Arc::default(),
            metrics: Arc::new(Metrics::new().unwrap()),
            ready: Arc::default(),
        };
        Self {
            fleet,
            checker,
            server,
        }
    }

    async fn check(&self) -> RegistrationChecks {
        self.checker.check(self.fleet.snapshot().remove(0)).await;
        self.fleet.snapshot().remove(0).checks
    }
}

impl Drop for ProbedEngine {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// A worker whose probe proves nothing is pending, whatever its status.
#[tokio::test]
async fn a_worker_whose_tokenize_answers_403_is_pending() {
    for (status, expected) in [
        (401, "pending"),
        (403, "pending"),
        (429, "pending"),
        (500, "pending"),
        (200, "pending"),
        (404, "skipped"),
    ] {
        let status = StatusCode::from_u16(status).unwrap();
        let router = axum::Router::new().fallback(move || async move { (status, "{}") });
        let checks = ProbedEngine::start(router).await.check().await;
        assert_eq!(name(&checks.tokens.chat), expected, "{status}");
        assert_eq!(checks.complete(), expected == "skipped");
    }
}

/// A render route that is busy at the registration is not taken for one that does not exist, and
/// what is known does not depend on it.
#[tokio::test]
async fn a_busy_render_route_alone_is_asked_again() {
    for (status, expected) in [
        (503, "pending"),
        (429, "pending"),
        (403, "skipped"),
        (500, "skipped"),
        (404, "skipped"),
    ] {
        let status = StatusCode::from_u16(status).unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let counted = Arc::clone(&requests);
        let answer = move |uri: axum::http::Uri| async move {
            counted.lock().unwrap().push(uri.path().to_owned());
            match uri.path() {
                "/tokenize" => (StatusCode::OK, "{\"tokens\": [1]}"),
                _ => (status, "{}"),
            }
        };
        let engine = ProbedEngine::start(axum::Router::new().fallback(answer)).await;
        let checks = engine.check().await;
        let tokens = &checks.tokens;
        let rendered = [&tokens.rendered_chat, &tokens.responses, &tokens.messages];
        assert_eq!(rendered.map(name), [expected; 3], "{status}");
        assert_eq!(name(&tokens.chat), "failed");
        assert_eq!(checks.complete(), expected == "skipped");
        requests.lock().unwrap().clear();
        if expected == "pending" {
            let again = engine.check().await;
            assert_eq!(again, checks);
            let asked = std::mem::take(&mut *requests.lock().unwrap());
            assert_eq!(asked.len(), 1, "{asked:?}");
            assert!(asked[0].ends_with("/render"), "{asked:?}");
        }
    }
}

/// vLLM answers 403 without `--enable-scale-out`, and 400 to tools without
/// `--enable-auto-tool-choice`.
#[tokio::test]
async fn a_route_that_the_engine_has_switched_off_is_skipped_with_its_reason() {
    let answer = async |uri: axum::http::Uri| match uri.path() {
        "/tokenize" => (StatusCode::OK, "{\"tokens\": [1]}"),
        "/v1/responses/render" => (
            StatusCode::FORBIDDEN,
            "{\"error\": {\"message\": \"disabled here\", \"code\": 403}}",
        ),
        "/v1/messages/render" => (
            StatusCode::BAD_REQUEST,
            "{\"error\": {\"message\": \"\\\"auto\\\" requires --enable-auto-tool-choice\"}}",
        ),
        _ => (StatusCode::BAD_REQUEST, "{\"message\": \"malformed\"}"),
    };
    let engine = ProbedEngine::start(axum::Router::new().fallback(answer)).await;
    let checks = engine.check().await.tokens;
    let skipped = |check: &CheckResult, reason: &str| {
        let CheckResult::Skipped { why } = check else {
            panic!("{check:?}");
        };
        assert!(why.contains(reason), "{why}");
    };
    skipped(&checks.responses, "disabled here");
    skipped(&checks.messages, "--enable-auto-tool-choice");
    skipped(&checks.messages_with_tools, "--enable-auto-tool-choice");
    assert_eq!(name(&checks.rendered_chat), "failed", "a plain refusal");
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_check_is_repeated_after_growing_pauses() {
    let fleet = fleet_of(None);
    fleet.register(entry("w", 16));
    let (mut backoff, started) = (CheckBackoff::default(), Instant::now());
    let mut checked = Vec::new();
    for second in 0..200 {
        let now = started + Duration::from_secs(second);
        if !backoff
            .due(fleet.snapshot(), &BTreeSet::new(), now)
            .is_empty()
        {
            checked.push(second);
        }
    }
    assert_eq!(checked, [0, 5, 15, 35, 75, 135, 195]);
    // A worker that comes back is checked immediately.
    let mut workers = fleet.snapshot();
    workers[0].epoch += 1;
    let now = started + Duration::from_secs(200);
    assert_eq!(backoff.due(workers, &BTreeSet::new(), now).len(), 1);
    assert!(backoff.due(Vec::new(), &BTreeSet::new(), now).is_empty() && backoff.0.is_empty());
}

/// One engine that hangs does not keep a worker that comes later without credit.
#[tokio::test]
async fn a_worker_is_checked_while_another_one_hangs() {
    let hangs = axum::Router::new().fallback(std::future::pending::<StatusCode>);
    let hung = ProbedEngine::start(hangs).await;
    let answers = axum::Router::new().fallback(async || StatusCode::NOT_FOUND);
    let other = ProbedEngine::start(answers).await;
    let ProbedEngine { fleet, checker, .. } = &hung;
    let url = |engine: &ProbedEngine| engine.fleet.snapshot().remove(0).entry.url;
    let comes = |name: &str, url: String| {
        fleet.register(warmroute_proto::registry::WorkerEntry {
            url: url.clone(),
            ..entry(name, 16)
        });
        fleet.observe(&WorkerId::from(name), &url, Observation::ProbePassed);
    };
    let state = |of: &str| {
        let workers = fleet.snapshot();
        let mut workers = workers.iter();
        let of_it = |worker: &&FleetWorker| worker.entry.worker == WorkerId::from(of);
        name(&workers.find(of_it).unwrap().checks.tokens.chat)
    };
    let check = async {
        comes("w", url(&hung));
        sleep(RETRY / 50).await;
        comes("x", url(&other));
        while state("x") != "skipped" {
            assert_eq!(state("w"), "pending");
            sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        () = checker.check_when_due() => panic!("it ended"),
        checked = timeout(ANSWER_DEADLINE / 2, check) => checked.unwrap(),
    }
}
