//! The shell around the sources: lease, registration, the engine's health, requests to start anew.
//!
//! [`Service`] owns one task a rank and the few that serve all of them. The lease decides whether
//! anything is said at all: without it the mirrors go on, silently. [`Handle`] shows what is known.

mod clock;
mod keeper;
mod outside;
mod rank;
mod saver;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};
use warmroute_plane::{Connection, Plane};
use warmroute_proto::registry::ResyncRequest;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{BlockSize, DpRank, EngineHealth, Source};

use crate::config::{Endpoints, ShimConfig, endpoint_of_rank};
use crate::engine::{EngineClient, EngineInfo, Unanswered};
use crate::mirror;
use crate::source::{Config, Status};
use clock::Told;
use keeper::{Keeper, Standing};
use outside::Reader;
use rank::{Rank, Signals};

const HEALTH_EVERY: Duration = Duration::from_secs(1);
/// Health checks between two full readings.
const INFO_EVERY: u32 = 10;
/// Between two warnings of one kind.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);
const RESYNCS_MAX: usize = 16;

/// What a shim cannot begin without.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot set up the client of the engine's HTTP: {0}")]
    Http(#[from] reqwest::Error),
    #[error("a worker has at least one rank")]
    NoRanks,
    #[error("rank {rank} has no endpoint derived from {endpoint}")]
    Endpoint { rank: DpRank, endpoint: String },
}

/// A task of the shim ended before it was told to.
#[derive(Debug, thiserror::Error)]
#[error("a task of the shim failed")]
pub struct TaskFailed;

/// What is known of one rank.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) status: Status,
    pub(crate) block_size: Option<BlockSize>,
    pub(crate) main_attention_only: bool,
}

pub(crate) struct Shared {
    pub(crate) plane: Arc<dyn Plane>,
    pub(crate) subjects: Subjects,
    /// The engine's facts are to be read again soon.
    pub(crate) refresh: Notify,
    pub(crate) reader: Reader,
    /// One thread reads the sockets of all ranks.
    pub(crate) zmq: zmq::Context,
    views: RwLock<BTreeMap<DpRank, View>>,
    standing: watch::Sender<Standing>,
    health: watch::Sender<EngineHealth>,
    info: watch::Sender<Arc<EngineInfo>>,
    clock: watch::Sender<Option<Told>>,
}

impl Shared {
    pub(crate) fn set_view(&self, view: View) {
        let rank = view.status.source.dp_rank;
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        views.insert(rank, view);
    }

    fn views(&self) -> Vec<View> {
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        views.values().cloned().collect()
    }
}

/// Why a shim is not ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    #[error("NATS is out of reach, or not set up")]
    PlaneAway,
    #[error("another shim serves this worker")]
    Yields,
    #[error("this shim does not hold the worker's lease")]
    NoLease,
    #[error("source {0} has not told its image")]
    NoImage(Source),
}

/// Everybody's view of the shim. Clones are the same view.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// Every source, by rank.
    #[must_use]
    pub fn sources(&self) -> Vec<Status> {
        let views = self.shared.views();
        views.into_iter().map(|view| view.status).collect()
    }

    /// Messages and entries that could not be read.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.shared.reader.unread()
    }

    #[must_use]
    pub fn health(&self) -> EngineHealth {
        *self.shared.health.borrow()
    }

    /// This shim is the one that publishes.
    #[must_use]
    pub fn leads(&self) -> bool {
        matches!(*self.shared.standing.borrow(), Standing::Leads { .. })
    }

    /// It publishes, and every source has told its image; otherwise what is missing.
    pub fn readiness(&self) -> Result<(), NotReady> {
        if *self.shared.plane.connection().borrow() == Connection::Down {
            return Err(NotReady::PlaneAway);
        }
        match *self.shared.standing.borrow() {
            Standing::Leads { .. } => {}
            Standing::Yields => return Err(NotReady::Yields),
            Standing::Unknown | Standing::Lapsed => return Err(NotReady::NoLease),
        }
        let sources = self.sources();
        if sources.is_empty() {
            return Err(NotReady::NoLease);
        }
        let untold = sources
            .into_iter()
            .find(|source| !source.is_image_acknowledged);
        untold.map_or(Ok(()), |source| Err(NotReady::NoImage(source.source)))
    }

    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.readiness().is_ok()
    }
}

/// The shim, ready to run.
pub struct Service {
    config: ShimConfig,
    endpoints: Vec<Endpoints>,
    client: EngineClient,
    shared: Arc<Shared>,
}

impl Service {
    pub fn new(config: ShimConfig, plane: Arc<dyn Plane>) -> Result<Self, Error> {
        if config.ranks == 0 {
            return Err(Error::NoRanks);
        }
        let endpoints = (0..config.ranks)
            .map(|rank| fixed_endpoints(&config, DpRank(rank)))
            .collect::<Result<_, _>>()?;
        let shared = Shared {
            plane,
            subjects: Subjects::new(&config.namespace),
            refresh: Notify::new(),
            reader: Reader::default(),
            zmq: zmq::Context::new(),
            views: RwLock::new(BTreeMap::new()),
            standing: watch::Sender::new(Standing::Unknown),
            health: watch::Sender::new(EngineHealth::Unknown),
            info: watch::Sender::new(Arc::default()),
            clock: watch::Sender::new(None),
        };
        Ok(Self {
            client: EngineClient::new(&config.worker_url, config.engine_key.as_ref())?,
            config,
            endpoints,
            shared: Arc::new(shared),
        })
    }

    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Runs until it is told to stop, and then deregisters.
    pub async fn run(self, stop: CancellationToken) -> Result<(), TaskFailed> {
        let told = stop;
        let stop = told.child_token();
        let tasks = TaskTracker::new();
        let mut routes = BTreeMap::new();
        for (rank, endpoints) in (0..).map(DpRank).zip(&self.endpoints) {
            let (resyncs, received) = mpsc::channel(RESYNCS_MAX);
            routes.insert(rank, resyncs);
            let signals = Signals {
                standing: self.shared.standing.subscribe(),
                health: self.shared.health.subscribe(),
                info: self.shared.info.subscribe(),
                clock: self.shared.clock.subscribe(),
                resyncs: received,
            };
            let config = self.source_config(rank, endpoints);
            let run = Rank::run(
                config,
                (endpoints.clone(), self.config.state.clone()),
                Arc::clone(&self.shared),
                signals,
                stop.clone(),
            );
            tasks.spawn(watched(stop.clone(), run));
        }
        let (shared, client) = (Arc::clone(&self.shared), self.client.clone());
        let watch = until(stop.clone(), watch_engine(shared, client));
        tasks.spawn(watched(stop.clone(), watch));
        let (shared, worker) = (Arc::clone(&self.shared), self.config.worker.clone());
        let hear = until(stop.clone(), hear_resyncs(shared, worker, routes));
        tasks.spawn(watched(stop.clone(), hear));
        let ask = until(stop.clone(), clock::ask(Arc::clone(&self.shared)));
        tasks.spawn(watched(stop.clone(), ask));
        let keeper = Keeper::new(Arc::clone(&self.shared), self.config.clone());
        tasks.spawn(watched(stop.clone(), keeper.run(stop.clone())));
        tasks.close();
        tasks.wait().await;
        if told.is_cancelled() {
            Ok(())
        } else {
            Err(TaskFailed)
        }
    }

    fn source_config(&self, rank: DpRank, endpoints: &Endpoints) -> Config {
        let source = Source {
            worker: self.config.worker.clone(),
            dp_rank: rank,
        };
        let mut config = Config::new(source, endpoints.replay.is_some());
        config.topic.clone_from(&self.config.topic);
        config.outbox_bytes_max = self.config.outbox_bytes_max;
        config.seed = fastrand::u64(..);
        // With one rank there is nothing to tell apart, and its number may be another's count.
        config.rank = (self.config.ranks > 1).then_some(rank.0);
        config.mirror = mirror::Config {
            block_size: self.config.block_size,
            assume: self.config.assume,
            ..mirror::Config::default()
        };
        config
    }
}

fn fixed_endpoints(config: &ShimConfig, rank: DpRank) -> Result<Endpoints, Error> {
    let of = |template: &Option<String>| match template {
        Some(endpoint) => endpoint_of_rank(endpoint, rank)
            .filter(|endpoint| !endpoint.contains('\0'))
            .map(Some)
            .ok_or_else(|| Error::Endpoint {
                rank,
                endpoint: endpoint.clone(),
            }),
        None => Ok(None),
    };
    Ok(Endpoints {
        live: of(&config.kv_endpoint)?,
        replay: of(&config.kv_replay_endpoint)?,
    })
}

/// A task whose end, told or not, ends the shim.
async fn watched(stop: CancellationToken, task: impl Future<Output = ()>) {
    let _stop_at_end = stop.drop_guard();
    task.await;
}

async fn until(stop: CancellationToken, task: impl Future<Output = ()>) {
    tokio::select! {
        () = task => {}
        () = stop.cancelled() => {}
    }
}

/// Reads the engine's health each second, and now and then everything else.
async fn watch_engine(shared: Arc<Shared>, client: EngineClient) {
    let mut ticks = interval(HEALTH_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut since_info = INFO_EVERY;
    let mut was_warned = false;
    let mut complaint = Complaint::default();
    loop {
        tokio::select! {
            _ = ticks.tick() => since_info += 1,
            () = shared.refresh.notified() => since_info = INFO_EVERY,
        }
        let health = client.health().await;
        let was_healthy = *shared.health.borrow() == EngineHealth::Healthy;
        shared.health.send_replace(health);
        if health != EngineHealth::Healthy || (was_healthy && since_info < INFO_EVERY) {
            continue;
        }
        let info = match client.info().await {
            Ok(info) => info,
            Err(error) => {
                if complaint.is_due(Instant::now(), error) {
                    warn!(%error, "the engine does not list its models");
                }
                continue;
            }
        };
        complaint = Complaint::default();
        since_info = 0;
        shared.info.send_if_modified(|known| {
            let is_new = **known != info;
            *known = Arc::new(info);
            is_new
        });
        let is_unverified = shared.views().iter().any(|view| view.status.is_unverified);
        if is_unverified && !was_warned {
            was_warned = true;
            warn!(
                "the engine has no replay endpoint: losses cannot be seen and its sources are \
                 unverified; set replay_endpoint in vLLM's --kv-events-config"
            );
        }
    }
}

/// What keeps the engine's facts away is said when it is new, and then now and then.
#[derive(Default)]
struct Complaint(Option<(Unanswered, Instant)>);

impl Complaint {
    fn is_due(&mut self, now: Instant, error: Unanswered) -> bool {
        let is_told = |(told, at)| told == error && now.duration_since(at) < COMPLAIN_EVERY;
        let is_due = !self.0.is_some_and(is_told);
        if is_due {
            self.0 = Some((error, now));
        }
        is_due
    }
}

/// Passes requests for a new generation on to the rank that they name.
async fn hear_resyncs(
    shared: Arc<Shared>,
    worker: warmroute_proto::WorkerId,
    routes: BTreeMap<DpRank, mpsc::Sender<ResyncRequest>>,
) {
    loop {
        let subject = shared.subjects.resync(&worker);
        if let Ok(mut requests) = shared.plane.subscribe(subject).await {
            while let Some(message) = requests.next().await {
                let Some(request) = shared.reader.read::<ResyncRequest>(&message.payload) else {
                    continue;
                };
                let route = routes.get(&request.source.dp_rank);
                if request.source.worker == worker
                    && let Some(route) = route
                    && route.try_send(request).is_err()
                {
                    debug!("a resync request met a full queue; it comes again");
                }
            }
        }
        sleep(Duration::from_millis(500)).await;
    }
}

#[cfg(test)]
mod tests {
    use reqwest::StatusCode;

    use super::*;

    #[test]
    fn one_complaint_is_made_when_it_is_new_and_every_minute() {
        let (key, silence) = (
            Unanswered::Key(StatusCode::UNAUTHORIZED),
            Unanswered::Silence,
        );
        let begin = Instant::now();
        let mut complaint = Complaint::default();
        let due = [
            (0, key),
            (1, key),
            (2, silence),
            (3, silence),
            (4, key),
            (64, key),
            (65, key),
        ]
        .map(|(secs, error)| complaint.is_due(begin + Duration::from_secs(secs), error));
        assert_eq!(due, [true, false, true, false, true, true, false]);
    }
}
