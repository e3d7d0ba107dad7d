//! Probes every engine's `/health`, each at its own pace.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

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

/// Any server may stand at a reused address.
const MODELS_BYTES_MAX: usize = 1 << 20;

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
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                // A worker is probed when it comes, not a period later.
                () = self.fleet.probe_due.notified() => {}
                now = ticks.tick() => self.fleet.update(|state| state.tick(now.into_std())),
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
            let targets = self.fleet.state().probe_targets();
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
                if target.must_list.is_empty() {
                    return ProbeResult::Seen(Observation::ProbePassed);
                }
                let listed = models(self.get(target, "/v1/models").await).await;
                target.seen(&listed.unwrap_or_default())
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
}

impl HttpProbe {
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
