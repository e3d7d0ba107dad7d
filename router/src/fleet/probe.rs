//! Probes every engine's `/health`, each at its own pace, and asks the engine whether it sleeps.
//! Wakes sleeping engines for which requests wait.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use serde::Deserialize;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_process::engine_answer::bounded_body;
use warmroute_process::tls;

use super::health::Observation;
use super::{Fleet, ProbeTarget};
use crate::engine_clients::EngineClients;
use crate::engine_error::{is_refused, lacks_files};
use crate::engine_keys::EngineKeys;
use crate::ready::Ready;

/// An engine's event loop stalls under load.
const PROBE_DEADLINE: Duration = Duration::from_secs(5);

/// Weights come back from the host's memory within seconds, or from a disk within minutes.
const WAKE_DEADLINE: Duration = Duration::from_secs(300);

/// Any server may stand at a reused address.
const MODELS_BYTES_MAX: usize = 1 << 20;

/// `{"is_sleeping": true}`.
const SLEEP_BYTES_MAX: usize = 1 << 10;

/// A start waits this long at most for workers to answer.
const SETTLE: Duration = Duration::from_secs(5);

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeResult {
    Seen(Observation),
    /// It says nothing of the worker.
    Void,
    /// TLS was not agreed on, for this reason.
    TlsRefused(String),
}

/// A client of the engines' health checks.
pub trait EngineProbe: Send + Sync + 'static {
    fn probe(&self, target: &ProbeTarget) -> impl Future<Output = ProbeResult> + Send;

    /// Wakes the engine. Returns when it answers.
    fn wake(&self, _target: &ProbeTarget) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}

/// Probes by HTTP.
pub(crate) struct HttpProbe {
    pub client: EngineClients,
    pub keys: EngineKeys,
}

pub struct HealthProber<P> {
    pub fleet: Arc<Fleet>,
    pub probe: P,
    pub period: Duration,
    pub ready: Arc<Ready>,
}

impl<P: EngineProbe> HealthProber<P> {
    /// Runs until stopped.
    pub async fn run(self, stop: CancellationToken) {
        let started = Instant::now();
        let mut ticks = interval(self.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut open: BTreeSet<ProbeTarget> = BTreeSet::new();
        let mut answers = FuturesUnordered::new();
        let mut waking: BTreeSet<ProbeTarget> = BTreeSet::new();
        let mut woken = FuturesUnordered::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                // A worker is probed when it comes, not a period later.
                () = self.fleet.probe_due.notified() => {}
                now = ticks.tick() => self.fleet.update(|state| state.tick(now.into_std())),
                // The next probe finds out whether it is awake.
                Some(target) = woken.next() => {
                    waking.remove(&target);
                }
                Some((target, result)) = answers.next() => {
                    open.remove(&target);
                    let (worker, url) = (&target.worker, &target.url);
                    match result {
                        ProbeResult::Seen(seen) => self.fleet.observe(worker, url, seen),
                        ProbeResult::Void => {}
                        ProbeResult::TlsRefused(why) => self.fleet.tls_refused(worker, url, &why),
                    }
                    if self.fleet.is_settled() {
                        self.ready.workers_settled();
                    }
                    continue;
                }
            }
            if started.elapsed() >= SETTLE {
                self.ready.workers_settled();
            }
            let (targets, wakes) = {
                let state = self.fleet.state();
                (state.probe_targets(), state.wake_targets())
            };
            for target in wakes {
                if waking.insert(target.clone()) {
                    let probe = &self.probe;
                    woken.push(async move {
                        probe.wake(&target).await;
                        target
                    });
                }
            }
            for target in targets {
                if open.insert(target.clone()) {
                    let probe = &self.probe;
                    answers.push(async move {
                        let result = probe.probe(&target).await;
                        (target, result)
                    });
                }
            }
        }
    }
}

impl ProbeTarget {
    /// What a passed probe shows, if the engine lists these models. Without a list it proves
    /// nothing: an engine may require a key.
    #[must_use]
    pub fn seen(&self, listed: &BTreeSet<String>) -> Observation {
        let lacks = |model: &String| !listed.contains(model);
        if !listed.is_empty() && self.must_list.iter().any(lacks) {
            return Observation::OtherEngine;
        }
        Observation::ProbePassed
    }
}

impl EngineProbe for HttpProbe {
    async fn probe(&self, target: &ProbeTarget) -> ProbeResult {
        let observation = match self.get(target, "/health").await {
            Ok(response) if response.status().is_success() => {
                let seen = match target.must_list.is_empty() {
                    true => Observation::ProbePassed,
                    false => {
                        let listed = models(self.get(target, "/v1/models").await).await;
                        target.seen(&listed.unwrap_or_default())
                    }
                };
                if seen == Observation::ProbePassed && target.asks_sleep {
                    self.sleep(target).await
                } else {
                    seen
                }
            }
            Err(error) if lacks_files(&error) => return ProbeResult::Void,
            Err(error) if is_refused(&error) => Observation::ConnectRefused,
            Err(error) if error.is_connect() => match tls::failure_of(&error) {
                Some(why) => return ProbeResult::TlsRefused(why),
                None => Observation::ProbeFailed,
            },
            Ok(_) | Err(_) => Observation::ProbeFailed,
        };
        ProbeResult::Seen(observation)
    }

    async fn wake(&self, target: &ProbeTarget) {
        let worker = &target.worker;
        let keys = self.keys.headers(worker, &target.url);
        let request = self
            .client
            .request(Method::POST, &target.url, "/wake_up")
            .headers(keys);
        match request.timeout(WAKE_DEADLINE).send().await {
            Ok(response) if response.status().is_success() => {
                tracing::info!(%worker, "worker woken");
            }
            Ok(response) => {
                tracing::warn!(%worker, status = %response.status(), "worker not woken");
            }
            Err(error) => tracing::warn!(%worker, %error, "worker not woken"),
        }
    }
}

impl HttpProbe {
    /// What an engine whose probe passed says of its sleep. An answer that cannot be read says
    /// nothing.
    async fn sleep(&self, target: &ProbeTarget) -> Observation {
        #[derive(Deserialize)]
        struct SleepState {
            is_sleeping: bool,
        }
        let Ok(response) = self.get(target, "/is_sleeping").await else {
            return Observation::ProbePassed;
        };
        if response.status().is_client_error() {
            return Observation::PassedWithoutSleep;
        }
        let body = bounded_body(response, SLEEP_BYTES_MAX).await;
        let state = body
            .ok()
            .and_then(|body| serde_json::from_slice(&body).ok());
        match state {
            Some(SleepState { is_sleeping: true }) => Observation::Asleep,
            Some(SleepState { is_sleeping: false }) => Observation::ProbePassed,
            None => Observation::PassedWithoutSleep,
        }
    }

    async fn get(
        &self,
        target: &ProbeTarget,
        path: &str,
    ) -> Result<reqwest::Response, reqwest::Error> {
        let keys = self.keys.headers(&target.worker, &target.url);
        let request = self.client.get(&target.url, path).headers(keys);
        request.timeout(PROBE_DEADLINE).send().await
    }
}

/// The models that the engine lists, if it shows them.
async fn models(answer: reqwest::Result<reqwest::Response>) -> Option<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct ListedModels {
        data: Vec<ListedModel>,
    }
    #[derive(Deserialize)]
    struct ListedModel {
        id: String,
    }
    let body = bounded_body(answer.ok()?, MODELS_BYTES_MAX).await.ok()?;
    let page: ListedModels = serde_json::from_slice(&body).ok()?;
    Some(page.data.into_iter().map(|model| model.id).collect())
}
