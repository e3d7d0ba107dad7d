//! Reads the engines' metrics while the settings ask for it, for the requests that engines have from
//! elsewhere ([`crate::route::engine_load`]). An engine whose metrics cannot be read counts as one
//! without such requests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_process::engine_answer::{BodyError, bounded_body};
use warmroute_proto::WorkerId;

use super::engine_metrics::{LoadPageError, readings};
use super::{Fleet, FleetChange};
use crate::engine_clients::EngineClients;
use crate::engine_keys::EngineKeys;
use crate::route::EngineReading;
use crate::settings::LiveSettings;

/// Time between two readings of an engine.
const PERIOD: Duration = Duration::from_secs(1);

/// Shorter than the life of a reading, so that one slow answer leaves no gap.
const DEADLINE: Duration = Duration::from_secs(3);

/// A page of 64 ranks has about 4 MiB.
const PAGE_BYTES_MAX: usize = 8 << 20;

pub(crate) struct EngineLoadReader {
    pub fleet: Arc<Fleet>,
    pub client: EngineClients,
    pub keys: EngineKeys,
    pub settings: Arc<LiveSettings>,
}

/// An engine to read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LoadTarget {
    pub worker: WorkerId,
    pub url: String,
    pub ranks: u32,
}

/// Why an engine's load is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum LoadError {
    #[error("no answer in time")]
    NoAnswer,
    #[error("status {0}")]
    Status(StatusCode),
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error(transparent)]
    Page(#[from] LoadPageError),
}

/// An answer, and the routers' requests at each rank when the engine was asked.
struct LoadAnswer {
    target: LoadTarget,
    before: Vec<u32>,
    read: Result<Vec<EngineReading>, LoadError>,
}

impl EngineLoadReader {
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut open = BTreeSet::new();
        let mut answers = FuturesUnordered::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {
                    for target in self.targets() {
                        if open.insert(target.clone()) {
                            answers.push(self.read(target));
                        }
                    }
                }
                Some(answer) = answers.next() => {
                    open.remove(&answer.target);
                    self.take(answer);
                }
            }
        }
    }

    /// The engines to read; none while that is off.
    fn targets(&self) -> Vec<LoadTarget> {
        let bounds = self.settings.current().engine_bounds();
        self.fleet.core.core().set_engine_bounds(bounds);
        if bounds.is_none() {
            self.fleet.update(|state| state.forget_load_errors());
            return Vec::new();
        }
        self.fleet.state().load_targets()
    }

    async fn read(&self, target: LoadTarget) -> LoadAnswer {
        let LoadTarget { worker, url, ranks } = &target;
        let before = self.fleet.core.core().rank_requests(worker, *ranks);
        let keys = self.keys.headers(worker, url);
        let read = match page(&self.client, keys, url).await {
            Ok(page) => {
                let page = String::from_utf8_lossy(&page);
                readings(&page, *ranks).map_err(LoadError::from)
            }
            Err(error) => Err(error),
        };
        LoadAnswer {
            target,
            before,
            read,
        }
    }

    fn take(&self, answer: LoadAnswer) {
        let LoadAnswer {
            target,
            before,
            read,
        } = answer;
        let LoadTarget { worker, url, .. } = &target;
        let error = match read {
            Ok(readings) => {
                let now = Instant::now().into_std();
                let mut core = self.fleet.core.core();
                core.engine_read(worker, &readings, &before, now);
                drop(core);
                self.fleet.core.room_may_be_free();
                None
            }
            Err(error) => Some(error.to_string()),
        };
        self.fleet.update(|state| {
            state.load_read(worker, url, error);
            FleetChange::None
        });
    }
}

async fn page(client: &EngineClients, keys: HeaderMap, url: &str) -> Result<Vec<u8>, LoadError> {
    let request = client.get(url, "/metrics").headers(keys);
    let answer = request.timeout(DEADLINE).send().await;
    let answer = answer.map_err(|_| LoadError::NoAnswer)?;
    match answer.status() {
        status if status.is_success() => Ok(bounded_body(answer, PAGE_BYTES_MAX).await?),
        status => Err(LoadError::Status(status)),
    }
}
