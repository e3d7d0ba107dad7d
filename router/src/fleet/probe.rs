//! Probes every engine's `/health`, each at its own pace.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
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
pub(super) enum ProbeResult {
    Seen(Observation),
    /// It says nothing of the worker.
    Void,
    /// TLS was not agreed on, for this reason.
    TlsRefused(String),
}

pub(crate) struct HealthProber {
    pub fleet: Arc<Fleet>,
    pub client: EngineClients,
    pub keys: EngineKeys,
    pub period: Duration,
    pub ready: Arc<Ready>,
}

impl HealthProber {
    pub(crate) async fn run(self, stop: CancellationToken) {
        let started = Instant::now();
        let mut ticks = interval(self.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut open: BTreeSet<ProbeTarget> = BTreeSet::new();
        let mut answers = FuturesUnordered::new();
        loop {
            tokio::select! {
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
                    let keys = self.keys.headers(&target.worker, &target.url);
                    answers.push(probe(self.client.clone(), keys, target));
                }
            }
        }
    }
}

pub(super) async fn probe(
    client: EngineClients,
    keys: HeaderMap,
    target: ProbeTarget,
) -> (ProbeTarget, ProbeResult) {
    let get = async |path| get(&client, &keys, &target, path).await;
    let observation = match get("/health").await {
        Ok(response) if response.status().is_success() => Observation::ProbePassed,
        Err(error) if lacks_files(&error) => return (target, ProbeResult::Void),
        Err(error) if is_refused(&error) => Observation::ConnectRefused,
        Err(error) if error.is_connect() => match tls::failure_of(&error) {
            Some(why) => return (target, ProbeResult::TlsRefused(why)),
            None => Observation::ProbeFailed,
        },
        Ok(_) | Err(_) => Observation::ProbeFailed,
    };
    if observation == Observation::ProbePassed && !target.must_list.is_empty() {
        // An unreadable list proves nothing: an engine may require a key.
        let listed = models(get("/v1/models").await).await.unwrap_or_default();
        let lacks = |model: &String| !listed.contains(model);
        if !listed.is_empty() && target.must_list.iter().any(lacks) {
            return (target, ProbeResult::Seen(Observation::OtherEngine));
        }
    }
    (target, ProbeResult::Seen(observation))
}

async fn get(
    client: &EngineClients,
    keys: &HeaderMap,
    target: &ProbeTarget,
    path: &str,
) -> Result<reqwest::Response, reqwest::Error> {
    let request = client.get(&target.url, path).headers(keys.clone());
    request.timeout(PROBE_DEADLINE).send().await
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
