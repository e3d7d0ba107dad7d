//! Starts and ends the workers' shims as flags, files and the API declare them.
//!
//! A worker's life begins with its shim. Its end has four steps: new requests go elsewhere, open
//! ones may finish within the drain time, the shim ends and deregisters, and the fleet forgets the
//! worker. A worker starts only when no other life has its name, URL or endpoint, so that a changed
//! declaration is an end and a new life.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use warmroute_plane::Plane;
use warmroute_process::engine_args::is_event_route;
use warmroute_proto::label_enum;
use warmroute_proto::{Namespace, WorkerId};
use warmroute_shim::args::assumptions;
use warmroute_shim::{
    CheckpointStore, EngineFault, EngineKeySource, ShimConfig, StateDir, StateDirError,
};

use super::own_address::is_own;
use super::worker_plan::{PlanChange, PlanError, WorkerOrigin, WorkerPlan};
use crate::config::{Config, WorkerSpec};
use crate::fleet::Fleet;
use crate::proxy::EngineClient;
use crate::settings::LiveSettings;
use crate::shared_core::SharedCore;

/// Requests of the API that wait for the supervisor.
const WAITING_MAX: usize = 64;

/// After so long a worker that could not be started is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// Between two looks at the open requests of a worker that leaves.
const DRAIN_POLL: Duration = Duration::from_millis(100);

/// What a supervisor works with.
pub(crate) struct SupervisorParts {
    pub plane: Arc<dyn Plane>,
    pub fleet: Arc<Fleet>,
    pub core: Arc<SharedCore>,
    pub settings: Arc<LiveSettings>,
    pub engines: EngineClient,
    /// Runs the shims.
    pub runtime: Handle,
    /// The router's own ports.
    pub addresses: Vec<SocketAddr>,
}

/// The way to the supervisor, and its shims. Clones share them.
#[derive(Clone)]
pub(crate) struct EmbeddedWorkers {
    requests: mpsc::Sender<WorkerRequest>,
    shims: Arc<Shims>,
}

/// The running shims.
#[derive(Default)]
struct Shims(Mutex<BTreeMap<WorkerId, warmroute_shim::Handle>>);

enum WorkerRequest {
    Add(WorkerSpec, oneshot::Sender<Result<PlanChange, AddError>>),
    /// Answered when the worker's life has ended.
    Remove(WorkerId, oneshot::Sender<Result<(), PlanError>>),
    Show(WorkerId, oneshot::Sender<Option<ShownWorker>>),
}

/// A worker as the API shows it.
#[derive(Clone, Debug)]
pub(crate) struct ShownWorker {
    pub url: String,
    /// `None`: it leaves.
    pub origin: Option<WorkerOrigin>,
    pub phase: LifePhase,
}

label_enum! {
    /// Where a declared worker is in its life.
    pub(crate) enum LifePhase {
        /// Another life, which ends, has its name, URL or endpoint.
        Waiting = "waiting",
        Running = "running",
        Leaving = "leaving",
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AddError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("the worker cannot be served: {0:#}")]
    Start(anyhow::Error),
    #[error("the router ends")]
    Ending,
}

impl EmbeddedWorkers {
    /// Adds a worker; equal ones may be added repeatedly.
    pub(crate) async fn add(&self, spec: WorkerSpec) -> Result<PlanChange, AddError> {
        let (answer, added) = oneshot::channel();
        self.send(WorkerRequest::Add(spec, answer)).await;
        added.await.unwrap_or(Err(AddError::Ending))
    }

    /// Ends a worker. Returns when its life has ended. `None`: the router ends.
    pub(crate) async fn remove(&self, worker: WorkerId) -> Option<Result<(), PlanError>> {
        let (answer, removed) = oneshot::channel();
        self.send(WorkerRequest::Remove(worker, answer)).await;
        removed.await.ok()
    }

    pub(crate) async fn show(&self, worker: WorkerId) -> Option<ShownWorker> {
        let (answer, shown) = oneshot::channel();
        self.send(WorkerRequest::Show(worker, answer)).await;
        shown.await.ok()?
    }

    pub(crate) fn shims(&self) -> Vec<warmroute_shim::Handle> {
        self.shims.lock().values().cloned().collect()
    }

    /// The workers whose engines do not serve, or are not accepted.
    pub(crate) fn engine_faults(&self) -> Vec<(WorkerId, EngineFault)> {
        let shims = self.shims.lock();
        let fault = |(worker, shim): (&WorkerId, &warmroute_shim::Handle)| {
            Some((worker.clone(), shim.engine_fault()?))
        };
        shims.iter().filter_map(fault).collect()
    }

    /// A request that is not sent drops its answer, which its caller sees.
    async fn send(&self, request: WorkerRequest) {
        drop(self.requests.send(request).await);
    }
}

impl Shims {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, warmroute_shim::Handle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that owns the workers' lives.
pub(crate) struct WorkerSupervisor {
    parts: SupervisorParts,
    namespace: Namespace,
    state_dir: Option<PathBuf>,
    plan: WorkerPlan,
    lives: BTreeMap<WorkerId, WorkerLife>,
    /// Why planned workers have no life. Logged once.
    failures: BTreeMap<WorkerId, String>,
    tasks: JoinSet<(WorkerId, LifeEnd)>,
    requests: mpsc::Receiver<WorkerRequest>,
    shims: Arc<Shims>,
    stop: CancellationToken,
}

struct WorkerLife {
    spec: WorkerSpec,
    leave: CancellationToken,
    /// Requests to remove the worker.
    removals: Vec<oneshot::Sender<Result<(), PlanError>>>,
}

/// How a life ended.
enum LifeEnd {
    /// As declared, or with the router.
    Ordered,
    ShimFailed,
}

impl WorkerSupervisor {
    /// Starts the workers of flags and files. A failure here ends the router.
    pub(crate) async fn start(
        parts: SupervisorParts,
        config: &Config,
        stop: CancellationToken,
    ) -> anyhow::Result<(EmbeddedWorkers, Self)> {
        let (sender, requests) = mpsc::channel(WAITING_MAX);
        let shims = Arc::<Shims>::default();
        let workers = EmbeddedWorkers {
            requests: sender,
            shims: Arc::clone(&shims),
        };
        let mut plan = WorkerPlan::new(&config.workers);
        plan.set_files(&parts.settings.current().workers);
        let mut supervisor = Self {
            parts,
            namespace: config.namespace.clone(),
            state_dir: config.state_dir.clone(),
            plan,
            lives: BTreeMap::new(),
            failures: BTreeMap::new(),
            tasks: JoinSet::new(),
            requests,
            shims,
            stop,
        };
        let planned: Vec<_> = supervisor
            .plan
            .workers()
            .map(|one| one.spec.clone())
            .collect();
        for spec in planned {
            if let Some(dir) = &supervisor.state_dir {
                // Waits for a router that is being replaced.
                match StateDir::open_when_free(dir, &spec.id).await {
                    Err(held @ StateDirError::Held { .. }) => {
                        return Err(held).context("--state-dir");
                    }
                    Ok(_) | Err(StateDirError::Io { .. }) => {}
                }
            }
            supervisor.begin(spec)?;
        }
        Ok((workers, supervisor))
    }

    /// Runs until stopped, or until a shim fails.
    pub(crate) async fn run(mut self) {
        let mut settings = self.parts.settings.changes();
        let mut retries = interval(RETRY);
        retries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.stop.cancelled() => break,
                _ = retries.tick() => {}
                Ok(()) = settings.changed() => {
                    let files = settings.borrow_and_update().workers.clone();
                    self.plan.set_files(&files);
                }
                Some(request) = self.requests.recv() => self.answer(request),
                Some(ended) = self.tasks.join_next() => match ended {
                    Ok((worker, LifeEnd::Ordered)) => self.ended(&worker),
                    Ok((worker, LifeEnd::ShimFailed)) => {
                        tracing::error!(%worker, "shim failed");
                        return;
                    }
                    Err(error) => return tracing::error!(%error, "a worker's task failed"),
                },
            }
            self.reconcile();
        }
        while self.tasks.join_next().await.is_some() {}
    }

    fn answer(&mut self, request: WorkerRequest) {
        match request {
            WorkerRequest::Add(spec, answer) => drop(answer.send(self.add(spec))),
            WorkerRequest::Show(worker, answer) => drop(answer.send(self.show(&worker))),
            WorkerRequest::Remove(worker, answer) => {
                match (self.plan.remove(&worker), self.lives.get_mut(&worker)) {
                    // Also repeated while the life ends.
                    (Ok(()) | Err(PlanError::NoWorker), Some(life)) => {
                        life.removals.retain(|other| !other.is_closed());
                        life.removals.push(answer);
                    }
                    (removed, _) => drop(answer.send(removed)),
                }
            }
        }
    }

    fn add(&mut self, spec: WorkerSpec) -> Result<PlanChange, AddError> {
        let change = self.plan.add(spec.clone())?;
        if change == PlanChange::Added && !self.must_wait(&spec) {
            let worker = spec.id.clone();
            if let Err(error) = self.begin(spec) {
                self.plan.remove(&worker)?;
                return Err(AddError::Start(error));
            }
        }
        Ok(change)
    }

    fn show(&self, worker: &WorkerId) -> Option<ShownWorker> {
        let (planned, life) = (self.plan.get(worker), self.lives.get(worker));
        let phase = match life {
            Some(life) if life.leave.is_cancelled() => LifePhase::Leaving,
            Some(_) => LifePhase::Running,
            None => LifePhase::Waiting,
        };
        let spec = life
            .map(|life| &life.spec)
            .or_else(|| planned.map(|one| &one.spec));
        Some(ShownWorker {
            url: spec?.url.clone(),
            origin: planned.map(|planned| planned.origin),
            phase,
        })
    }

    /// Ends lives that are not declared, and begins those that are.
    fn reconcile(&mut self) {
        for (worker, life) in &self.lives {
            let planned = self.plan.get(worker);
            if planned.is_none_or(|planned| planned.spec != life.spec) {
                life.leave.cancel();
            }
        }
        let absent = self.plan.workers().map(|planned| &planned.spec);
        let absent = absent.filter(|spec| !self.must_wait(spec)).cloned();
        for spec in absent.collect::<Vec<_>>() {
            let worker = spec.id.clone();
            let failure = self.begin(spec).err().map(|error| format!("{error:#}"));
            match failure {
                Some(why) if self.failures.get(&worker) != Some(&why) => {
                    tracing::error!(%worker, "worker not started, tried again: {why}");
                    self.failures.insert(worker, why);
                }
                Some(_) => {}
                None => drop(self.failures.remove(&worker)),
            }
        }
        self.failures
            .retain(|worker, _| self.plan.get(worker).is_some());
    }

    fn must_wait(&self, spec: &WorkerSpec) -> bool {
        self.lives.values().any(|life| life.spec.excludes(spec))
    }

    fn ended(&mut self, worker: &WorkerId) {
        let Some(life) = self.lives.remove(worker) else {
            return;
        };
        self.parts.engines.keys().set(worker, &life.spec.url, None);
        tracing::info!(%worker, "worker removed");
        for removal in life.removals {
            drop(removal.send(Ok(())));
        }
    }

    fn begin(&mut self, spec: WorkerSpec) -> anyhow::Result<()> {
        let service = self.service(&spec)?;
        let worker = spec.id.clone();
        self.parts
            .engines
            .keys()
            .set(&worker, &spec.url, spec.key.clone());
        self.parts.fleet.admit(&worker);
        self.shims.lock().insert(worker.clone(), service.handle());
        let leave = CancellationToken::new();
        let task = LifeTask {
            worker: worker.clone(),
            fleet: Arc::clone(&self.parts.fleet),
            core: Arc::clone(&self.parts.core),
            settings: Arc::clone(&self.parts.settings),
            shims: Arc::clone(&self.shims),
            leave: leave.clone(),
            stop: self.stop.clone(),
        };
        self.tasks.spawn_on(task.run(service), &self.parts.runtime);
        let life = WorkerLife {
            spec,
            leave,
            removals: Vec::new(),
        };
        self.lives.insert(worker, life);
        Ok(())
    }

    fn service(&self, spec: &WorkerSpec) -> anyhow::Result<warmroute_shim::Service> {
        let worker = &spec.id;
        if is_own(&spec.url, &self.parts.addresses) {
            bail!("{} is a port of this router: name the engine's", spec.url);
        }
        let open = |dir| StateDir::if_usable(StateDir::open(dir, worker)).context("--state-dir");
        let dir = self.state_dir.as_deref().map(open).transpose()?.flatten();
        let has_route = spec.kv.as_deref().is_some_and(is_event_route);
        if spec.replay.is_none() && !has_route {
            tracing::warn!(
                %worker,
                "no replay= endpoint: lost events cannot be seen unless the engine reports one"
            );
        }
        let shim = ShimConfig {
            engine_key: engine_key(spec, &self.parts.settings),
            engine_tls: Some(self.parts.engines.tls().clone()),
            kv_endpoint: spec.kv.clone(),
            kv_replay_endpoint: spec.replay.clone(),
            ranks: spec.ranks.get(),
            role: spec.role,
            assume: assumptions(&spec.assume),
            checkpoints: dir.map(|dir| Arc::new(dir) as Arc<dyn CheckpointStore>),
            ..ShimConfig::new(self.namespace.clone(), worker.clone(), spec.url.clone())
        };
        let service = warmroute_shim::Service::new(shim, Arc::clone(&self.parts.plane));
        service.with_context(|| format!("setting up the shim of {worker}"))
    }
}

/// The worker's own key, or the one of the settings in force.
fn engine_key(spec: &WorkerSpec, settings: &Arc<LiveSettings>) -> EngineKeySource {
    match &spec.key {
        Some(own) => own.clone().into(),
        None => {
            let settings = Arc::clone(settings);
            EngineKeySource::new(move || settings.current().engine_key().cloned())
        }
    }
}

/// One worker's life, from its shim's start.
struct LifeTask {
    worker: WorkerId,
    fleet: Arc<Fleet>,
    core: Arc<SharedCore>,
    settings: Arc<LiveSettings>,
    shims: Arc<Shims>,
    leave: CancellationToken,
    stop: CancellationToken,
}

impl LifeTask {
    async fn run(self, service: warmroute_shim::Service) -> (WorkerId, LifeEnd) {
        let end = self.live(service).await;
        self.shims.lock().remove(&self.worker);
        (self.worker, end)
    }

    async fn live(&self, service: warmroute_shim::Service) -> LifeEnd {
        let stop_shim = self.stop.child_token();
        let mut shim = std::pin::pin!(service.run(stop_shim.clone()));
        tokio::select! {
            ended = &mut shim => return LifeEnd::of(ended),
            () = self.leave.cancelled() => {}
        }
        self.fleet.retire(&self.worker);
        tracing::info!(worker = %self.worker, "worker leaves, its open requests may finish");
        let bound = self.settings.current().drain_timeout();
        tokio::select! {
            ended = &mut shim => return LifeEnd::of(ended),
            _ = timeout(bound, self.idle()) => {}
        }
        stop_shim.cancel();
        let end = LifeEnd::of(shim.await);
        self.fleet.forget(&self.worker);
        end
    }

    /// Waits until no request of this router is open at the worker.
    async fn idle(&self) {
        let mut looks = interval(DRAIN_POLL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            if self.core.core().active_requests(&self.worker) == 0 {
                return;
            }
        }
    }
}

impl LifeEnd {
    fn of(ended: Result<(), warmroute_shim::TaskFailed>) -> Self {
        match ended {
            Ok(()) => Self::Ordered,
            Err(_) => Self::ShimFailed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use uuid::Uuid;

    use super::*;
    use crate::settings::{SettingsFile, WorkerRule};

    #[test]
    fn a_running_shim_gets_a_replaced_key() {
        let dir = std::env::temp_dir().join(format!("wr-supervisor-{}", Uuid::new_v4()));
        fs::create_dir(&dir).unwrap();
        let path = dir.join("router.toml");
        fs::write(&path, "engines.key_file = \"key\"\n").unwrap();
        let load = |key: &str| {
            fs::write(dir.join("key"), key).unwrap();
            let rule = WorkerRule::Embedded(Vec::new());
            SettingsFile::load(&path, &rule).unwrap().settings
        };
        let settings = LiveSettings::new(load("old"));
        let mut spec: WorkerSpec = "http://h:1".parse().unwrap();
        let source = engine_key(&spec, &settings);
        spec.key = source.current();
        let own = engine_key(&spec, &settings);
        let sent = |source: &EngineKeySource| source.current().unwrap().header().clone();
        assert_eq!(
            (sent(&source), sent(&own)),
            ("Bearer old".parse().unwrap(), sent(&source))
        );
        settings.replace(load("new"));
        assert_eq!(sent(&source), "Bearer new");
        assert_eq!(sent(&own), "Bearer old");
        fs::remove_dir_all(dir).unwrap();
    }
}
