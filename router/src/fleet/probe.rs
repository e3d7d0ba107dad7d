//! Probes every engine's `/health`, each at its own pace.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use serde::Deserialize;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::health::Observation;
use super::{Fleet, ProbeTarget};
use crate::ready::Ready;

/// An engine's event loop stalls under load.
const PROBE_DEADLINE: Duration = Duration::from_secs(5);

/// Any server may stand at a reused address.
const MODELS_BYTES_MAX: usize = 1 << 20;

/// A start waits this long at most for workers to answer.
const SETTLE: Duration = Duration::from_secs(5);

pub(crate) struct HealthProber {
    pub fleet: Arc<Fleet>,
    pub client: reqwest::Client,
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
                Some((target, observation)) = answers.next() => {
                    open.remove(&target);
                    self.fleet.observe(&target.worker, &target.url, observation);
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
                    answers.push(probe(self.client.clone(), target));
                }
            }
        }
    }
}

pub(super) async fn probe(
    client: reqwest::Client,
    target: ProbeTarget,
) -> (ProbeTarget, Observation) {
    let observation = match get(&client, &target, "health").await {
        Ok(response) if response.status().is_success() => Observation::ProbePassed,
        Err(error) if error.is_connect() && !error.is_timeout() => Observation::ConnectRefused,
        Ok(_) | Err(_) => Observation::ProbeFailed,
    };
    if observation == Observation::ProbePassed && !target.must_list.is_empty() {
        // An unreadable list proves nothing: an engine may require a key.
        let listed = models(&client, &target).await.unwrap_or_default();
        let lacks = |model: &String| !listed.contains(model);
        if !listed.is_empty() && target.must_list.iter().any(lacks) {
            return (target, Observation::OtherEngine);
        }
    }
    (target, observation)
}

async fn get(
    client: &reqwest::Client,
    target: &ProbeTarget,
    path: &str,
) -> Result<reqwest::Response, reqwest::Error> {
    let url = format!("{}/{path}", target.url);
    client.get(url).timeout(PROBE_DEADLINE).send().await
}

/// The models that the engine lists, if it shows them.
async fn models(client: &reqwest::Client, target: &ProbeTarget) -> Option<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct ListedModels {
        data: Vec<ListedModel>,
    }
    #[derive(Deserialize)]
    struct ListedModel {
        id: String,
    }
    let mut response = get(client, target, "v1/models").await.ok()?;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.ok()? {
        body.extend_from_slice(&chunk);
        if body.len() > MODELS_BYTES_MAX {
            return None;
        }
    }
    let page: ListedModels = serde_json::from_slice(&body).ok()?;
    Some(page.data.into_iter().map(|model| model.id).collect())
}
