//! The shell around the sources: lease, registration, engine health, resync requests.
//!
//! [`Service`] owns one task per rank and a few that serve all ranks. Only the lease holder publishes;
//! without the lease the mirrors go on silently. [`Handle`] is the read-only view of a running shim.

mod checkpoints;
mod engine_reach;
mod lease;
mod log_clock;
mod log_health;
mod rank;
mod rank_plane;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, warn};
use warmroute_plane::{Connection, Plane};
use warmroute_process::engine_args::is_event_route;
use warmroute_process::tls::{EngineTls, TlsError};
use warmroute_proto::registry::ResyncRequest;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{BlockCut, DpRank, EngineHealth, Source};

use crate::config::{Endpoints, ShimConfig, endpoint_of_rank};
use crate::engine::{EngineInfo, EngineLink, InfoError, ResetRoutes, VllmEngine};
use crate::mirror;
use crate::mirror::LookupDoubt;
use crate::source::{SourceConfig, SourceStatus, UnverifiedCause};
pub use engine_reach::EngineFault;
use engine_reach::EngineReach;
use lease::{Leadership, WorkerLease};
use log_clock::ClockReading;
use log_health::LogHealth;
use rank::{RankConfig, RankInputs, RankTask};
use rank_plane::CountingDecoder;

const HEALTH_EVERY: Duration = Duration::from_secs(1);
/// Health checks between two reads of the engine's facts.
const INFO_EVERY: u32 = 10;
/// Between two equal warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);
const RESYNCS_MAX: usize = 16;

/// Why a shim cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot set up the client of the engine's HTTP: {0}")]
    Http(#[from] reqwest::Error),
    #[error("setting up TLS: {0}")]
    Tls(#[from] TlsError),
    #[error("a worker has at least one rank")]
    NoRanks,
    #[error("rank {rank} has no endpoint derived from {endpoint}")]
    Endpoint { rank: DpRank, endpoint: String },
}

/// A task of the shim ended without a stop request.
#[derive(Debug, thiserror::Error)]
#[error("a task of the shim failed")]
pub struct TaskFailed;

/// The published view of one rank.
#[derive(Clone, Debug)]
pub(crate) struct RankView {
    pub(crate) status: SourceStatus,
    pub(crate) block_cut: Option<BlockCut>,
    pub(crate) main_attention_only: bool,
}

/// What the tasks of one shim share.
pub(crate) struct ShimState {
    pub(crate) plane: Arc<dyn Plane>,
    pub(crate) subjects: Subjects,
    /// Data-parallel ranks of the engine.
    pub(crate) ranks: u32,
    /// Requests a read of the engine's facts.
    pub(crate) refresh: Notify,
    /// The engine's facts are new, and so is the registration.
    facts_changed: Notify,
    pub(crate) decoder: CountingDecoder,
    log: LogHealth,
    reach: EngineReach,
    views: RwLock<BTreeMap<DpRank, RankView>>,
    leadership: watch::Sender<Leadership>,
    health: watch::Sender<EngineHealth>,
    info: watch::Sender<Arc<EngineInfo>>,
    clock: watch::Sender<Option<ClockReading>>,
}

impl ShimState {
    pub(crate) fn set_view(&self, view: RankView) {
        let rank = view.status.source.dp_rank;
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        let block_cut = view.block_cut;
        let before = views.insert(rank, view);
        if before.is_some_and(|before| before.block_cut != block_cut) {
            // The events may show what the engine's HTTP does not.
            self.facts_changed.notify_one();
        }
    }

    fn views(&self) -> Vec<RankView> {
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        views.values().cloned().collect()
    }
}

/// Why a shim is not ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    #[error("NATS is out of reach, or not set up")]
    PlaneAway,
    #[error("the log cannot be read: {0}")]
    LogUnreadable(String),
    #[error("the log takes no records: {0}")]
    LogRefuses(String),
    #[error("another shim serves this worker")]
    Yields,
    #[error("this shim does not hold the worker's lease")]
    NoLease,
    #[error("source {0} has not published its image")]
    NoImage(Source),
}

/// A read-only view of a running shim. Clones show the same shim.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<ShimState>,
}

impl Handle {
    /// The status of every source, by rank.
    #[must_use]
    pub fn sources(&self) -> Vec<SourceStatus> {
        let views = self.shared.views();
        views.into_iter().map(|view| view.status).collect()
    }

    /// Messages and registry entries that could not be decoded.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.shared.decoder.failures()
    }

    #[must_use]
    pub fn health(&self) -> EngineHealth {
        *self.shared.health.borrow()
    }

    /// Why the engine does not serve, or cannot be registered.
    #[must_use]
    pub fn engine_fault(&self) -> Option<EngineFault> {
        self.shared.reach.fault()
    }

    /// Whether this shim holds the lease and publishes.
    #[must_use]
    pub fn leads(&self) -> bool {
        matches!(*self.shared.leadership.borrow(), Leadership::Leads { .. })
    }

    /// Ready: this shim publishes, the log takes its records, and every source has published its
    /// image.
    pub fn readiness(&self) -> Result<(), NotReady> {
        if *self.shared.plane.connection().borrow() == Connection::Down {
            return Err(NotReady::PlaneAway);
        }
        self.shared.log.check()?;
        match *self.shared.leadership.borrow() {
            Leadership::Leads { .. } => {}
            Leadership::Yields => return Err(NotReady::Yields),
            Leadership::Unknown | Leadership::Lapsed => return Err(NotReady::NoLease),
        }
        let sources = self.sources();
        if sources.is_empty() {
            return Err(NotReady::NoLease);
        }
        let unpublished = sources
            .into_iter()
            .find(|source| !source.is_image_acknowledged);
        unpublished.map_or(Ok(()), |source| Err(NotReady::NoImage(source.source)))
    }

    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.readiness().is_ok()
    }
}

/// The shim, ready to run.
pub struct Service<E = VllmEngine> {
    config: ShimConfig,
    endpoints: Vec<Endpoints>,
    engine: Arc<E>,
    shared: Arc<ShimState>,
}

impl Service {
    pub fn new(config: ShimConfig, plane: Arc<dyn Plane>) -> Result<Self, Error> {
        let tls = config
            .engine_tls
            .clone()
            .map_or_else(EngineTls::system, Ok)?;
        let engine = VllmEngine::new(&config, &tls)?;
        Self::with_engine(config, plane, engine)
    }
}

impl<E: EngineLink> Service<E> {
    pub fn with_engine(
        config: ShimConfig,
        plane: Arc<dyn Plane>,
        engine: E,
    ) -> Result<Self, Error> {
        if config.ranks == 0 {
            return Err(Error::NoRanks);
        }
        let endpoints = (0..config.ranks)
            .map(|rank| configured_endpoints(&config, DpRank(rank)))
            .collect::<Result<_, _>>()?;
        let shared = ShimState {
            plane,
            subjects: Subjects::new(&config.namespace),
            ranks: config.ranks,
            refresh: Notify::new(),
            facts_changed: Notify::new(),
            decoder: CountingDecoder::default(),
            log: LogHealth::default(),
            reach: EngineReach::new(&config.worker_url, Instant::now()),
            views: RwLock::new(BTreeMap::new()),
            leadership: watch::Sender::new(Leadership::Unknown),
            health: watch::Sender::new(EngineHealth::Unknown),
            info: watch::Sender::new(Arc::default()),
            clock: watch::Sender::new(None),
        };
        Ok(Self {
            config,
            endpoints,
            engine: Arc::new(engine),
            shared: Arc::new(shared),
        })
    }

    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Runs until `requested`, and then deregisters.
    pub async fn run(self, requested: CancellationToken) -> Result<(), TaskFailed> {
        let stop = requested.child_token();
        let tasks = TaskTracker::new();
        let mut routes = BTreeMap::new();
        for (rank, endpoints) in (0..).map(DpRank).zip(&self.endpoints) {
            let (resyncs, received) = mpsc::channel(RESYNCS_MAX);
            routes.insert(rank, resyncs);
            let run = self.run_rank(rank, endpoints, received, stop.clone());
            tasks.spawn(stopping_at_end(stop.clone(), run));
        }
        let (shared, engine) = (Arc::clone(&self.shared), Arc::clone(&self.engine));
        let watch = until(stop.clone(), watch_engine(shared, engine));
        tasks.spawn(stopping_at_end(stop.clone(), watch));
        let (shared, worker) = (Arc::clone(&self.shared), self.config.worker.clone());
        let resyncs = until(stop.clone(), route_resyncs(shared, worker, routes));
        tasks.spawn(stopping_at_end(stop.clone(), resyncs));
        let clock = until(stop.clone(), log_clock::poll(Arc::clone(&self.shared)));
        tasks.spawn(stopping_at_end(stop.clone(), clock));
        let lease = WorkerLease::new(Arc::clone(&self.shared), self.config.clone());
        tasks.spawn(stopping_at_end(stop.clone(), lease.run(stop.clone())));
        tasks.close();
        tasks.wait().await;
        if requested.is_cancelled() {
            Ok(())
        } else {
            Err(TaskFailed)
        }
    }

    fn run_rank(
        &self,
        rank: DpRank,
        endpoints: &Endpoints,
        resyncs: mpsc::Receiver<ResyncRequest>,
        stop: CancellationToken,
    ) -> impl Future<Output = ()> + Send + 'static {
        let inputs = RankInputs {
            leadership: self.shared.leadership.subscribe(),
            health: self.shared.health.subscribe(),
            info: self.shared.info.subscribe(),
            clock: self.shared.clock.subscribe(),
            resyncs,
        };
        let config = self.rank_config(rank, endpoints);
        let (engine, shared) = (Arc::clone(&self.engine), Arc::clone(&self.shared));
        RankTask::run(engine, config, shared, inputs, stop)
    }

    fn rank_config(&self, rank: DpRank, endpoints: &Endpoints) -> RankConfig {
        let checkpoints = self.config.checkpoints.clone();
        RankConfig {
            source: self.source_config(rank, endpoints),
            endpoints: endpoints.clone(),
            // The events that would prove one were handed out already.
            checkpoints: checkpoints.filter(|_| !endpoints.is_route()),
        }
    }

    fn source_config(&self, rank: DpRank, endpoints: &Endpoints) -> SourceConfig {
        let source = Source {
            worker: self.config.worker.clone(),
            dp_rank: rank,
        };
        let mut config = SourceConfig::new(source, endpoints.replay.is_some());
        config.hides_losses = endpoints.is_route();
        config.topic.clone_from(&self.config.topic);
        config.outbox_bytes_max = self.config.outbox_bytes_max;
        config.buffer_bytes_max = self.config.buffer_bytes_max;
        config.seed = fastrand::u64(..);
        // A single rank needs no filter, and engines may number it otherwise.
        config.rank = (self.config.ranks > 1).then_some(rank.0);
        config.mirror = mirror::MirrorConfig {
            block_size: self.config.block_size,
            assume: self.config.assume,
            ..mirror::MirrorConfig::default()
        };
        config
    }
}

fn configured_endpoints(config: &ShimConfig, rank: DpRank) -> Result<Endpoints, Error> {
    let of = |template: &Option<String>| match template {
        Some(endpoint) => {
            endpoint_of_rank(endpoint, rank)
                .map(Some)
                .ok_or_else(|| Error::Endpoint {
                    rank,
                    endpoint: endpoint.clone(),
                })
        }
        None => Ok(None),
    };
    let live = of(&config.kv_endpoint)?;
    // What a route hands out is kept here, and replayed.
    let kept = live.clone().filter(|live| is_event_route(live));
    Ok(Endpoints {
        live,
        replay: kept.map_or_else(|| of(&config.kv_replay_endpoint), |kept| Ok(Some(kept)))?,
    })
}

/// Runs a task whose end stops the shim.
async fn stopping_at_end(stop: CancellationToken, task: impl Future<Output = ()>) {
    let _stop_at_end = stop.drop_guard();
    task.await;
}

async fn until(stop: CancellationToken, task: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = task => {}
    }
}

/// Once, until a check is possible again.
fn warn_of_files(is_logged: &mut bool) {
    if !std::mem::replace(is_logged, true) {
        warn!("this process may open no further file: the engine is not checked");
    }
}

fn log_unread(error: InfoError) {
    if matches!(error, InfoError::Ranks { .. }) {
        error!(%error, "the engine is refused");
    } else {
        warn!(%error, "cannot list the engine's models");
    }
}

/// Reads the engine's health and resets each second, and its other facts every ten seconds.
async fn watch_engine<E: EngineLink>(shared: Arc<ShimState>, engine: Arc<E>) {
    let mut ticks = interval(HEALTH_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut since_info = INFO_EVERY;
    let mut warned = Vec::new();
    let mut warning = RepeatedWarning::default();
    let mut lacks_files = false;
    loop {
        tokio::select! {
            biased;
            _ = ticks.tick() => since_info += 1,
            () = shared.refresh.notified() => since_info = INFO_EVERY,
        }
        let health = engine.health().await;
        if health == EngineHealth::Unknown {
            warn_of_files(&mut lacks_files);
            continue;
        }
        lacks_files = false;
        let was_healthy = *shared.health.borrow() == EngineHealth::Healthy;
        shared.health.send_replace(health);
        if health != EngineHealth::Healthy {
            let why = engine.fault();
            shared.reach.failed(why, Instant::now());
            forget_speculation(&shared);
            continue;
        }
        if was_healthy && since_info < INFO_EVERY {
            read_resets(&shared, &*engine).await;
            continue;
        }
        let read = engine.info().await;
        let mut info = match read.and_then(|info| info.check_ranks(shared.ranks)) {
            Ok(info) => info,
            Err(error) => {
                shared.reach.not_read(error.to_string(), Instant::now());
                if warning.is_due(Instant::now(), error) {
                    log_unread(error);
                }
                continue;
            }
        };
        warning = RepeatedWarning::default();
        shared.reach.served();
        since_info = 0;
        // It did not restart since the last reading, as far as is known.
        info.keep(&shared.info.borrow());
        // The ranks may not have taken in what was read just now.
        let void = info
            .speculates
            .map(|_| UnverifiedCause::Lookup(LookupDoubt::NoMetrics));
        let is_new = shared.info.send_if_modified(|known| {
            let is_new = **known != info;
            *known = Arc::new(info);
            is_new
        });
        if is_new {
            shared.facts_changed.notify_one();
        }
        let views = shared.views();
        let statuses = views.iter().map(|view| &view.status);
        let causes = statuses.filter_map(|status| certain(status.unverified?, status.prefixes));
        for cause in causes {
            if Some(cause) != void && !warned.contains(&cause) {
                warned.push(cause);
                warn_of(cause);
            }
        }
    }
}

/// The next engine at this URL may decode otherwise, and have another connector.
fn forget_speculation(shared: &ShimState) {
    shared.info.send_if_modified(|known| {
        let is_known = known.speculates.is_some() || known.connects.is_some();
        if is_known {
            let known = Arc::make_mut(known);
            (known.speculates, known.connects) = (None, None);
        }
        is_known
    });
}

/// Reads the engine's count of resets, if it can have one.
async fn read_resets<E: EngineLink>(shared: &ShimState, engine: &E) {
    if shared.info.borrow().resets != Some(ResetRoutes::Present) {
        return;
    }
    let Some(calls) = engine.reset_calls().await else {
        return;
    };
    shared.info.send_if_modified(|known| {
        let is_new = known.reset_calls != Some(calls);
        if is_new {
            Arc::make_mut(known).reset_calls = Some(calls);
        }
        is_new
    });
}

/// The cause unless the first block may end it: with drafts it may show that blocks are named by the
/// tokens behind them.
fn certain(cause: UnverifiedCause, prefixes: usize) -> Option<UnverifiedCause> {
    let is_open = cause == UnverifiedCause::Lookup(LookupDoubt::Speculation) && prefixes == 0;
    (!is_open).then_some(cause)
}

fn warn_of(cause: UnverifiedCause) {
    match cause {
        UnverifiedCause::NoReplay => warn!(
            "the engine has no replay endpoint: losses cannot be seen and its sources are \
             unverified; set replay_endpoint in vLLM's --kv-events-config"
        ),
        UnverifiedCause::Lookup(doubt) => warn!(
            because = doubt.label(),
            "the engine's prefix hits may be shorter than what is held, and its sources are \
             unverified; if they are not, declare it by --assume plain-lookup"
        ),
        UnverifiedCause::NoSequence
        | UnverifiedCause::UnseenLosses
        | UnverifiedCause::PendingReset => {}
    }
}

/// Limits equal warnings to one per [`WARN_EVERY`].
#[derive(Default)]
struct RepeatedWarning(Option<(InfoError, Instant)>);

impl RepeatedWarning {
    fn is_due(&mut self, now: Instant, error: InfoError) -> bool {
        let is_repeated = |(last, at)| last == error && now.duration_since(at) < WARN_EVERY;
        let is_due = !self.0.is_some_and(is_repeated);
        if is_due {
            self.0 = Some((error, now));
        }
        is_due
    }
}

/// Routes requests for a new generation to their rank.
async fn route_resyncs(
    shared: Arc<ShimState>,
    worker: warmroute_proto::WorkerId,
    routes: BTreeMap<DpRank, mpsc::Sender<ResyncRequest>>,
) {
    loop {
        let subject = shared.subjects.resync(&worker);
        if let Ok(mut requests) = shared.plane.subscribe(subject).await {
            while let Some(message) = requests.next().await {
                let Some(request) = shared.decoder.decode::<ResyncRequest>(&message.payload) else {
                    continue;
                };
                let route = routes.get(&request.source.dp_rank);
                if request.source.worker == worker
                    && let Some(route) = route
                    && route.try_send(request).is_err()
                {
                    debug!("resync request dropped: the queue is full, and it is repeated");
                }
            }
        }
        sleep(Duration::from_millis(500)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use reqwest::StatusCode;
    use warmroute_plane::{MemoryPlane, MemoryPlaneConfig};
    use warmroute_proto::{Namespace, StreamIdentity, WorkerId};

    use super::*;
    use crate::state_dir::CheckpointStore;

    #[derive(Debug)]
    struct NoStore;

    impl CheckpointStore for NoStore {
        fn load(&self, _: &Source) -> io::Result<Option<Vec<u8>>> {
            Ok(None)
        }

        fn save(&self, _: &Source, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
    }

    /// The bytes of an event of another life may be equal.
    #[test]
    fn events_that_are_handed_out_once_prove_no_checkpoint() {
        for (endpoint, is_route) in [("http://h:1/kv_cache_events", true), ("tcp://h:1", false)] {
            let plane = MemoryPlane::new(MemoryPlaneConfig {
                identity: StreamIdentity {
                    created_unix_ns: 1,
                    nonce: 2,
                },
                log_bytes_max: 1 << 20,
                queue_max: 16,
            });
            let config = ShimConfig {
                kv_endpoint: Some(endpoint.to_owned()),
                checkpoints: Some(Arc::new(NoStore)),
                ..ShimConfig::new(
                    Namespace::from("n"),
                    WorkerId::from("w"),
                    "http://h:1".to_owned(),
                )
            };
            let service = Service::new(config, Arc::new(plane)).unwrap();
            let rank = service.rank_config(DpRank(0), &service.endpoints[0]);
            assert_eq!(rank.checkpoints.is_none(), is_route);
            assert_eq!(rank.source.hides_losses, is_route);
        }
    }

    #[test]
    fn warnings_repeat_once_a_minute() {
        let (key, silence) = (InfoError::Key(StatusCode::UNAUTHORIZED), InfoError::Silence);
        let begin = Instant::now();
        let mut warning = RepeatedWarning::default();
        let due = [
            (0, key),
            (1, key),
            (2, silence),
            (3, silence),
            (4, key),
            (64, key),
            (65, key),
        ]
        .map(|(secs, error)| warning.is_due(begin + Duration::from_secs(secs), error));
        assert_eq!(due, [true, false, true, false, true, true, false]);
    }

    #[test]
    fn drafts_are_no_cause_before_a_block_shows_its_name() {
        let drafts = UnverifiedCause::Lookup(LookupDoubt::Speculation);
        assert_eq!(certain(drafts, 0), None);
        assert_eq!(certain(drafts, 1), Some(drafts));
        let others = [
            UnverifiedCause::NoReplay,
            UnverifiedCause::Lookup(LookupDoubt::NoMetrics),
        ];
        for other in others {
            assert_eq!(certain(other, 0), Some(other));
        }
    }
}
