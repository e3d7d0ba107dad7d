//! Checks each worker when it comes, comes back or changes: its `/tokenize` must give the router's
//! token ids, and its blocks must have the router's size.
//!
//! A router that hashes other tokens or blocks than the engine would never find a cached block,
//! without any error. So a failed check is reported (log, metric, `/workers`), and the worker gets
//! the prompts concerned by load only. A probe without an answer proves nothing: it is repeated, and
//! the model's other workers are not affected. The comparison is [`crate::tokenize::parity`]'s.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{StatusCode, header};
use futures_util::{StreamExt as _, stream};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_proto::WorkerId;

use super::checks::{CheckResult, RegistrationChecks};
use super::{Fleet, FleetWorker};
use crate::clock::civil_now;
use crate::metrics::Metrics;
use crate::ready::Ready;
use crate::tokenize::Tokenizer;
use crate::tokenize::parity::{self, ProbeKind, ProbeVerdict};

/// Workers checked at the same time.
const CONCURRENT_MAX: usize = 8;

/// First pause before another attempt to check a worker that does not answer. Doubles.
const RETRY: Duration = Duration::from_secs(5);

/// Longest such pause. An engine whose `/tokenize` requires a key costs a request a minute.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A busy engine answers late.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

pub(crate) struct RegistrationChecker {
    pub fleet: Arc<Fleet>,
    pub client: reqwest::Client,
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub metrics: Arc<Metrics>,
    pub ready: Arc<Ready>,
}

/// An engine's answer to one probe prompt.
enum TokenizeAnswer {
    Tokens(parity::ProbeAnswer),
    /// The engine has no such route.
    NoRoute,
    /// No usable answer: 401, 403, 429, 5xx, other JSON, or no connection.
    Unavailable,
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
    /// The workers that are due of all unchecked ones, which are counted as attempted.
    fn due(&mut self, mut unchecked: Vec<FleetWorker>, now: Instant) -> Vec<FleetWorker> {
        let names: BTreeSet<_> = unchecked.iter().map(|w| w.entry.worker.clone()).collect();
        self.0.retain(|worker, _| names.contains(worker));
        unchecked.retain(|worker| {
            let known = self.0.get(&worker.entry.worker);
            let known = known.filter(|retry| retry.epoch == worker.epoch);
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
        let mut retries = interval(RETRY);
        retries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut backoff = CheckBackoff::default();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.fleet.check_due.notified() => {}
                _ = retries.tick() => {}
            }
            let unchecked: Vec<_> = self.fleet.state().unchecked().cloned().collect();
            let round = stream::iter(backoff.due(unchecked, Instant::now()))
                .for_each_concurrent(CONCURRENT_MAX, |worker| self.check(worker));
            tokio::select! {
                () = stop.cancelled() => return,
                () = round => {}
            }
        }
    }

    async fn check(&self, worker: FleetWorker) {
        let checks = RegistrationChecks {
            block_size: self.block_size(&worker),
            ..self.tokens(&worker).await
        };
        let name = &worker.entry.worker;
        for ((check, result), (_, before)) in checks.named().into_iter().zip(worker.checks.named())
        {
            // A retry counts and logs what it changed.
            if result == before {
                continue;
            }
            match result {
                CheckResult::Failed { why } => {
                    self.metrics.check_failed(check);
                    tracing::error!(worker = %name, check, why, "check failed");
                }
                CheckResult::Skipped { why } => {
                    tracing::warn!(worker = %name, check, why, "check skipped");
                }
                CheckResult::Passed => tracing::info!(worker = %name, check, "check passed"),
                CheckResult::Pending => {}
            }
        }
        self.fleet
            .update(|state| state.checked(name, worker.epoch, checks));
        if self.fleet.is_settled() {
            self.ready.workers_settled();
        }
    }

    /// Compares with the operator's block size, else with that of the model's first worker.
    fn block_size(&self, worker: &FleetWorker) -> CheckResult {
        let catalog = self.fleet.catalog();
        let model = worker.entry.models.first();
        let expected = model.and_then(|model| catalog.models.get(model)?.block_size);
        match (expected, worker.entry.block_size) {
            (_, None) => CheckResult::skipped("the engine has not reported its block size"),
            (Some(expected), Some(found)) if expected != found => CheckResult::failed(format!(
                "its blocks have {found} tokens, {expected} are expected"
            )),
            (Some(_) | None, Some(_)) => CheckResult::Passed,
        }
    }

    /// Checks the token ids of texts and chats. A difference is confirmed by a second comparison:
    /// midnight may pass between the two renderings of a template with a date.
    async fn tokens(&self, worker: &FleetWorker) -> RegistrationChecks {
        let Some(tokenizer) = &self.tokenizer else {
            return all(&CheckResult::skipped("no --tokenizer"));
        };
        let Some(model) = worker.entry.models.first() else {
            return all(&CheckResult::skipped("it serves no base model"));
        };
        let first = self.compare(tokenizer, model, worker).await;
        if first.named().iter().any(|(_, result)| result.is_failure()) {
            return self.compare(tokenizer, model, worker).await;
        }
        first
    }

    async fn compare(
        &self,
        tokenizer: &Arc<Tokenizer>,
        model: &str,
        worker: &FleetWorker,
    ) -> RegistrationChecks {
        let (tokenizer, model) = (Arc::clone(tokenizer), model.to_owned());
        let probes = move || parity::probes(&tokenizer, &model, civil_now());
        let Ok(probes) = tokio::task::spawn_blocking(probes).await else {
            return all(&CheckResult::failed("the router's tokenizer failed"));
        };
        let mut verdicts = Vec::with_capacity(probes.len());
        for probe in probes {
            match self.tokenize(worker, probe.body).await {
                TokenizeAnswer::Tokens(answer) => {
                    let verdict = parity::compare(&probe.ours, &answer);
                    verdicts.push((probe.name, probe.kind, verdict));
                }
                TokenizeAnswer::NoRoute => {
                    return all(&CheckResult::skipped("it has no /tokenize"));
                }
                TokenizeAnswer::Unavailable => return all(&CheckResult::Pending),
            }
        }
        token_checks(&verdicts)
    }

    async fn tokenize(&self, worker: &FleetWorker, body: Vec<u8>) -> TokenizeAnswer {
        let request = self
            .client
            .post(format!("{}/tokenize", worker.entry.url))
            .timeout(ANSWER_DEADLINE)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body);
        let answer = async {
            let response = request.send().await?;
            Ok::<_, reqwest::Error>((response.status(), response.bytes().await?))
        };
        match answer.await {
            Ok((StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, _)) => {
                TokenizeAnswer::NoRoute
            }
            Ok((status, body)) => match parity::read_answer(status.as_u16(), &body) {
                parity::ProbeAnswer::Unusable => {
                    let worker = &worker.entry.worker;
                    tracing::warn!(%worker, %status, "no usable answer of /tokenize, check pending");
                    TokenizeAnswer::Unavailable
                }
                answer @ (parity::ProbeAnswer::Tokens(_) | parity::ProbeAnswer::Refused) => {
                    TokenizeAnswer::Tokens(answer)
                }
            },
            Err(_) => TokenizeAnswer::Unavailable,
        }
    }
}

/// One result for all checks of token ids.
fn all(result: &CheckResult) -> RegistrationChecks {
    RegistrationChecks {
        text: result.clone(),
        chat: result.clone(),
        chat_with_tools: result.clone(),
        block_size: CheckResult::Pending,
    }
}

/// The checks of token ids by the verdicts on named probes.
fn token_checks(verdicts: &[(&'static str, ProbeKind, ProbeVerdict)]) -> RegistrationChecks {
    let trust = parity::trust(verdicts.iter().map(|(_, kind, verdict)| (*kind, verdict)));
    let failed = |kinds: &[ProbeKind]| {
        let against = verdicts.iter().find(|(_, kind, verdict)| {
            kinds.contains(kind)
                && !matches!(
                    verdict,
                    ProbeVerdict::Equal { .. } | ProbeVerdict::BothRefuse
                )
        });
        match against {
            Some((name, _, verdict)) => CheckResult::failed(format!("{name}: {verdict}")),
            None => CheckResult::skipped("neither side renders any of the probes"),
        }
    };
    let mut checks = all(&CheckResult::Passed);
    if !trust.completions {
        checks.text = failed(&[ProbeKind::Completion]);
    }
    if !trust.chat {
        checks.chat = failed(&[ProbeKind::Chat]);
    }
    if !trust.chat_with_tools {
        checks.chat_with_tools = failed(&[ProbeKind::Chat, ProbeKind::ChatWithTools]);
    }
    checks
}
