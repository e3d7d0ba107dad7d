//! Checks each worker when it comes, comes back or changes: its `/tokenize` must give the router's
//! token ids, and its blocks must have the router's size.
//!
//! A router that hashes other tokens or blocks than the engine would never find a cached block,
//! without any error. So a failed check is reported (log, metric, `/workers`), and the worker gets
//! the prompts concerned by load only. A probe without an answer proves nothing: it is repeated, and
//! the model's other workers are not affected. The comparison is [`crate::tokenize::parity`]'s.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Method, StatusCode, header};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use serde::Deserialize;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_process::engine_answer::bounded_body;
use warmroute_proto::WorkerId;

use super::checks::{CheckResult, ModelChecks, RegistrationChecks, TokenChecks};
use super::{Fleet, FleetWorker};
use crate::clock::civil_now;
use crate::engine_clients::EngineClients;
use crate::engine_keys::EngineKeys;
use crate::metrics::Metrics;
use crate::ready::Ready;
use crate::settings::LiveSettings;
use crate::tokenize::parity::{self, ProbeKind, ProbePath, ProbeVerdict};
use crate::tokenizers::{LoadedTokenizer, ModelTokenizer, TokenizerState, Tokenizers};

/// Why a worker renders no images.
const NO_RENDERING: &str = "no credit for images: it has no render route (--enable-scale-out)";

/// Workers checked at the same time.
const CONCURRENT_MAX: usize = 8;

/// First pause before another attempt to check a worker that does not answer. Doubles.
const RETRY: Duration = Duration::from_secs(5);

/// Longest such pause. An engine whose `/tokenize` requires a key costs a request a minute.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Any server may stand at a reused address.
const MODELS_BYTES_MAX: usize = 1 << 20;

/// An answer to a probe has some hundred token ids.
const PROBE_BYTES_MAX: usize = 1 << 20;

/// Characters of an engine's reason that are kept.
const REASON_MAX: usize = 200;

/// A busy engine answers late.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

pub(crate) struct RegistrationChecker {
    pub fleet: Arc<Fleet>,
    pub client: EngineClients,
    pub keys: EngineKeys,
    pub tokenizers: Arc<Tokenizers>,
    pub settings: Arc<LiveSettings>,
    pub metrics: Arc<Metrics>,
    pub ready: Arc<Ready>,
}

/// An engine's answer to one probe prompt.
enum TokenizeAnswer {
    Tokens(parity::ProbeAnswer),
    /// The engine has no such route.
    NoRoute,
    /// The engine has switched the route off, or what the probe needs of it, for this reason.
    SwitchedOff(String),
    /// No usable answer: 401, 403, 429, 5xx, other JSON, or no connection; of a render route, only
    /// statuses that pass.
    Unavailable,
}

/// A check of a worker in one of its epochs.
type Attempt = (WorkerId, u64);

fn attempt(worker: &FleetWorker) -> Attempt {
    (worker.entry.worker.clone(), worker.epoch)
}

/// When to check the unchecked workers again.
#[derive(Default)]
struct CheckBackoff(BTreeMap<WorkerId, CheckRetry>);

struct CheckRetry {
    epoch: u64,
    pause: Duration,
    due: Instant,
}

impl CheckBackoff {
    /// The workers that are due of all unchecked ones, which are counted as attempted. Those whose
    /// attempt has not ended are not due.
    fn due(
        &mut self,
        mut unchecked: Vec<FleetWorker>,
        attempted: &BTreeSet<Attempt>,
        now: Instant,
    ) -> Vec<FleetWorker> {
        let names: BTreeSet<_> = unchecked.iter().map(|w| w.entry.worker.clone()).collect();
        self.0.retain(|worker, _| names.contains(worker));
        unchecked.retain(|worker| {
            let known = self.0.get(&worker.entry.worker);
            let known = known.filter(|retry| retry.epoch == worker.epoch);
            if attempted.contains(&attempt(worker)) {
                return false;
            }
            let pause = match known {
                Some(retry) if now < retry.due => return false,
                Some(retry) => (retry.pause * 2).min(RETRY_MAX),
                None => RETRY,
            };
            let retry = CheckRetry {
                epoch: worker.epoch,
                pause,
                due: now + pause,
            };
            self.0.insert(worker.entry.worker.clone(), retry);
            true
        });
        unchecked
    }
}

impl RegistrationChecker {
    pub(crate) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled(self.check_when_due()).await;
    }

    async fn check_when_due(&self) {
        let mut retries = interval(RETRY);
        retries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut backoff = CheckBackoff::default();
        // An engine that hangs does not hold up the checks of others.
        let mut waiting = VecDeque::new();
        let mut running = FuturesUnordered::new();
        let mut attempted = BTreeSet::new();
        loop {
            let is_due = tokio::select! {
                () = self.fleet.check_due.notified() => true,
                _ = retries.tick() => true,
                Some(ended) = running.next() => {
                    attempted.remove(&ended);
                    false
                }
            };
            if is_due {
                let unchecked: Vec<_> = self.fleet.state().unchecked().cloned().collect();
                for worker in backoff.due(unchecked, &attempted, Instant::now()) {
                    attempted.insert(attempt(&worker));
                    waiting.push_back(worker);
                }
            }
            while running.len() < CONCURRENT_MAX
                && let Some(worker) = waiting.pop_front()
            {
                running.push(async {
                    let attempt = attempt(&worker);
                    // It may have gone and come again while it waited.
                    let epoch = self.fleet.state().get(&attempt.0).map(|known| known.epoch);
                    if epoch == Some(attempt.1) {
                        self.check(worker).await;
                    }
                    attempt
                });
            }
        }
    }

    async fn check(&self, worker: FleetWorker) {
        self.note_roots(&worker).await;
        let checks = RegistrationChecks::new(self.block_size(&worker), self.tokens(&worker).await);
        let name = &worker.entry.worker;
        let (mut passed, mut skipped) = (Vec::new(), BTreeMap::<&str, Vec<&str>>::new());
        for ((check, result), (_, before)) in checks.named().zip(worker.checks.named()) {
            // A retry counts and logs what it changed.
            if result == before {
                continue;
            }
            match result {
                CheckResult::Failed { why } => {
                    self.metrics.check_failed(check);
                    tracing::error!(worker = %name, check, why, "check failed");
                }
                // One line for one cause.
                CheckResult::Skipped { why } => skipped.entry(why).or_default().push(check),
                CheckResult::Passed => passed.push(check),
                CheckResult::Pending => {}
            }
        }
        for (why, checks) in skipped {
            let checks = checks.join(", ");
            tracing::warn!(worker = %name, checks, why, "checks skipped");
        }
        if !passed.is_empty() {
            tracing::info!(worker = %name, checks = passed.join(", "), "checks passed");
        }
        self.fleet
            .update(|state| state.checked(name, worker.epoch, checks));
        if self.fleet.is_settled() {
            self.ready.workers_settled();
        }
    }

    /// Compares with the operator's block size. Without one each worker has its own.
    fn block_size(&self, worker: &FleetWorker) -> CheckResult {
        match (self.fleet.block_size, worker.entry.block_size) {
            (_, None) => CheckResult::skipped("the engine has not reported its block size"),
            (Some(expected), Some(found)) if expected != found => CheckResult::failed(format!(
                "its blocks have {found} tokens, {expected} are expected"
            )),
            (Some(_) | None, Some(_)) => CheckResult::Passed,
        }
    }

    /// Checks the token ids of each base model. Names that share a tokenizer share its check.
    async fn tokens(&self, worker: &FleetWorker) -> BTreeMap<String, ModelChecks> {
        let table = self.tokenizers.current();
        let mut checked: BTreeMap<String, ModelChecks> = BTreeMap::new();
        for model in &worker.entry.models {
            let loaded = table.of(model);
            let version = loaded.map(|loaded| loaded.version);
            let shared = checked
                .values()
                .find(|checks| checks.tokenizer == version)
                .cloned();
            let checks = match (loaded, shared) {
                (Some(_), Some(shared)) => shared,
                (Some(loaded), None) => {
                    let known = worker.checks.models.get(model);
                    let known = known.filter(|known| known.tokenizer == version);
                    let known = known.map(|known| known.tokens.clone()).unwrap_or_default();
                    ModelChecks {
                        tokenizer: version,
                        tokens: self.compare_open(loaded, model, worker, known).await,
                    }
                }
                (None, _) => ModelChecks {
                    tokenizer: None,
                    tokens: TokenChecks::all(&without_tokenizer(table.get(model))),
                },
            };
            checked.insert(model.clone(), checks);
        }
        checked
    }

    /// Completes the checks that are not done. A difference is confirmed by a second comparison:
    /// midnight may pass between the two renderings of a template with a date.
    async fn compare_open(
        &self,
        loaded: &Arc<LoadedTokenizer>,
        model: &str,
        worker: &FleetWorker,
        mut known: TokenChecks,
    ) -> TokenChecks {
        let open = known.clone().open_paths();
        let mut found = self.compare(loaded, model, worker, &open).await;
        if found.named().iter().any(|(_, result)| result.is_failure()) {
            found = self.compare(loaded, model, worker, &open).await;
        }
        for path in open {
            for (known, found) in known.of_path(path).into_iter().zip(found.of_path(path)) {
                found.clone_into(known);
            }
        }
        known
    }

    async fn compare(
        &self,
        loaded: &Arc<LoadedTokenizer>,
        model: &str,
        worker: &FleetWorker,
        paths: &BTreeSet<ProbePath>,
    ) -> TokenChecks {
        let caution = loaded.tokenizer.other_rules();
        let (loaded, model) = (Arc::clone(loaded), model.to_owned());
        let probes = move || parity::probes(&loaded.tokenizer, &model, civil_now());
        let Ok(probes) = tokio::task::spawn_blocking(probes).await else {
            return TokenChecks::all(&CheckResult::failed("the router's tokenizer failed"));
        };
        let mut verdicts = Vec::with_capacity(probes.len());
        let mut switched_off = Vec::new();
        let mut is_unanswered = false;
        for probe in probes {
            // One unanswered probe of a render route is enough: a busy engine may answer late.
            if !paths.contains(&probe.path) || is_unanswered && probe.path != ProbePath::Tokenize {
                continue;
            }
            let verdict = match self.ask(worker, probe.path, probe.body).await {
                TokenizeAnswer::Tokens(answer) => parity::compare(&probe.ours, &answer),
                TokenizeAnswer::NoRoute if probe.path == ProbePath::Tokenize => {
                    return TokenChecks::all(&CheckResult::skipped("it has no /tokenize"));
                }
                TokenizeAnswer::Unavailable if probe.path == ProbePath::Tokenize => {
                    return TokenChecks::all(&CheckResult::Pending);
                }
                // Engines without render routes are not asked again.
                TokenizeAnswer::NoRoute => continue,
                TokenizeAnswer::SwitchedOff(why) => {
                    switched_off.push((probe.kind, why));
                    continue;
                }
                TokenizeAnswer::Unavailable => {
                    is_unanswered = true;
                    continue;
                }
            };
            verdicts.push((probe.name, probe.kind, verdict));
        }
        let checks = token_checks(&verdicts, &switched_off, caution.as_deref());
        if is_unanswered {
            with_pending_renders(checks)
        } else {
            checks
        }
    }

    /// Reads the roots of the worker's models, by which `models_dir` is searched. Without an answer
    /// the served names alone are looked up.
    async fn note_roots(&self, worker: &FleetWorker) {
        if self.settings.current().models_dir().is_none() {
            return;
        }
        let url = &worker.entry.url;
        let request = self.client.get(url, "/v1/models");
        let request = request.headers(self.keys.headers(&worker.entry.worker, url));
        let listed = async {
            let response = request.timeout(ANSWER_DEADLINE).send().await.ok()?;
            let page = bounded_body(response, MODELS_BYTES_MAX).await.ok()?;
            serde_json::from_slice::<ListedModels>(&page).ok()
        };
        for model in listed.await.map(|page| page.data).unwrap_or_default() {
            if let (true, Some(root)) = (worker.entry.models.contains(&model.id), model.root) {
                self.tokenizers.note_root(&model.id, root);
            }
        }
    }

    async fn ask(&self, worker: &FleetWorker, path: ProbePath, body: Vec<u8>) -> TokenizeAnswer {
        let url = &worker.entry.url;
        let request = self
            .client
            .request(Method::POST, url, path.label())
            .timeout(ANSWER_DEADLINE)
            .headers(self.keys.headers(&worker.entry.worker, url))
            .header(header::CONTENT_TYPE, "application/json")
            .body(body);
        let answer = async {
            let response = request.send().await.ok()?;
            let status = response.status();
            let body = bounded_body(response, PROBE_BYTES_MAX).await.ok()?;
            Some((status, body))
        };
        match answer.await {
            Some((
                StatusCode::NOT_FOUND
                | StatusCode::METHOD_NOT_ALLOWED
                | StatusCode::NOT_IMPLEMENTED,
                _,
            )) => TokenizeAnswer::NoRoute,
            Some((status, body)) => match parity::read_answer(status.as_u16(), &body) {
                parity::ProbeAnswer::Unusable
                    if path != ProbePath::Tokenize && !is_passing(status) =>
                {
                    match reason(&body) {
                        Some(why) if status == StatusCode::FORBIDDEN => {
                            TokenizeAnswer::SwitchedOff(why)
                        }
                        Some(_) | None => TokenizeAnswer::NoRoute,
                    }
                }
                parity::ProbeAnswer::Unusable => {
                    let worker = &worker.entry.worker;
                    let path = path.label();
                    tracing::warn!(%worker, %status, path, "no usable answer to a probe");
                    TokenizeAnswer::Unavailable
                }
                parity::ProbeAnswer::Refused => {
                    match reason(&body).filter(|why| names_option(why)) {
                        Some(why) => TokenizeAnswer::SwitchedOff(why),
                        None => TokenizeAnswer::Tokens(parity::ProbeAnswer::Refused),
                    }
                }
                answer @ parity::ProbeAnswer::Tokens(_) => TokenizeAnswer::Tokens(answer),
            },
            None => TokenizeAnswer::Unavailable,
        }
    }
}

#[derive(Deserialize)]
struct ListedModels {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    root: Option<String>,
}

fn without_tokenizer(entry: Option<&ModelTokenizer>) -> CheckResult {
    match entry.map(|entry| (&entry.state, &entry.problem)) {
        Some((TokenizerState::Missing, Some(problem))) => CheckResult::skipped(&**problem),
        Some(_) | None => CheckResult::Pending,
    }
}

/// Render routes of which one gave no answer are asked again, unless they have shown a difference.
fn with_pending_renders(mut checks: TokenChecks) -> TokenChecks {
    let renders = ProbePath::ALL
        .into_iter()
        .filter(|path| *path != ProbePath::Tokenize);
    for path in renders {
        let open = checks.of_path(path).into_iter();
        for check in open.filter(|check| !check.is_failure()) {
            *check = CheckResult::Pending;
        }
    }
    checks
}

/// The reason that an engine's error names.
fn reason(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Refusal {
        #[serde(alias = "detail")]
        message: Option<String>,
        error: Option<RefusalError>,
    }
    #[derive(Deserialize)]
    struct RefusalError {
        message: String,
    }
    let refusal: Refusal = serde_json::from_slice(body).ok()?;
    let message = refusal.error.map(|error| error.message);
    let message = message.or(refusal.message)?;
    Some(message.chars().take(REASON_MAX).collect())
}

/// Whether a reason names an option of the engine's command line, by which it was started otherwise.
fn names_option(reason: &str) -> bool {
    let mut words = reason.split(|at: char| at.is_whitespace() || "`'\"(,.".contains(at));
    words.any(|word| {
        let name = word.strip_prefix("--");
        name.is_some_and(|name| name.starts_with(|first: char| first.is_ascii_lowercase()))
    })
}

/// Whether a render route with this status may answer later. Others are as without the route.
const fn is_passing(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 502..=504)
}

/// The checks of token ids by the verdicts on named probes. `caution` is a likely reason of other ids
/// for a text.
fn token_checks(
    verdicts: &[(&'static str, ProbeKind, ProbeVerdict)],
    switched_off: &[(ProbeKind, String)],
    caution: Option<&str>,
) -> TokenChecks {
    let trust = parity::trust(verdicts.iter().map(|(_, kind, verdict)| (*kind, verdict)));
    let of_kinds = |kinds: &[ProbeKind]| {
        let mut off = switched_off.iter();
        off.find(|(kind, _)| kinds.contains(kind))
            .map(|(_, why)| CheckResult::skipped(format!("the engine has switched it off: {why}")))
    };
    let failed = |kinds: &[ProbeKind]| {
        let against = verdicts
            .iter()
            .find(|(_, kind, verdict)| kinds.contains(kind) && parity::is_against(*kind, verdict));
        match (against, of_kinds(kinds)) {
            (Some((name, ProbeKind::Completion, verdict @ ProbeVerdict::Differ { .. })), _) => {
                let why = caution.map_or_else(String::new, |why| format!("; {why}"));
                CheckResult::failed(format!("{name}: {verdict}{why}"))
            }
            (Some((name, _, verdict)), _) => CheckResult::failed(format!("{name}: {verdict}")),
            (None, Some(off)) => off,
            (None, None) if verdicts.iter().any(|(_, kind, _)| kinds.contains(kind)) => {
                CheckResult::skipped("neither side renders any of the probes")
            }
            (None, None) => CheckResult::skipped("unknown: it has no route that shows token ids"),
        }
    };
    let mut checks = TokenChecks::all(&CheckResult::Passed);
    if !trust.completions {
        checks.text = failed(&[ProbeKind::Completion]);
    }
    if !trust.chat {
        checks.chat = failed(&[ProbeKind::Chat, ProbeKind::ContinuedChat]);
    }
    if !trust.chat_with_tools {
        checks.chat_with_tools = failed(&[
            ProbeKind::Chat,
            ProbeKind::ContinuedChat,
            ProbeKind::ChatWithTools,
        ]);
    }
    if !trust.rendered_chat {
        let check = failed(&[ProbeKind::RenderedChat]);
        let is_off = of_kinds(&[ProbeKind::RenderedChat]).is_some();
        checks.rendered_chat = if check.is_failure() || is_off {
            check
        } else {
            CheckResult::skipped(NO_RENDERING)
        };
    }
    if !trust.responses {
        checks.responses = failed(&[ProbeKind::Responses, ProbeKind::AgentResponses]);
    }
    if !trust.messages {
        checks.messages = failed(&[ProbeKind::Messages, ProbeKind::AgentMessages]);
    }
    if !trust.messages_with_tools {
        checks.messages_with_tools = failed(&[
            ProbeKind::Messages,
            ProbeKind::AgentMessages,
            ProbeKind::MessagesWithTools,
        ]);
    }
    checks
}
