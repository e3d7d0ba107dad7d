//! The fleet: which workers there are, whether they are usable, trusted and in service.
//!
//! `state` is the pure state machine. `Fleet` holds it and publishes each change to the
//! decision core and, as an immutable `ModelCatalog`, to requests. Four tasks feed it:
//! `FleetRegistry` (workers and drains in the registry), `HealthProber`, `RegistrationChecker` and
//! `EngineLoadReader`.

mod breaker;
mod checks;
mod drain_table;
mod endpoints;
mod engine_load;
mod engine_metrics;
pub mod health;
mod lost_workers;
mod members;
mod models;
mod probe;
mod registration;
mod registry;
mod state;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, watch};
use tokio::time::Instant;
use warmroute_proto::registry::{DrainEntry, DrainState, DrainUntil, WorkerEntry};
use warmroute_proto::{BlockSize, DpRank, Source, WorkerId};

use crate::openai::PromptRoute;
use crate::route;
use crate::shared_core::SharedCore;
use breaker::{Admits, RequestTimes};
use health::{Observation, WorkerHealth};

use state::{FleetChange, FleetState};

pub use breaker::{RequestCase, RequestResult};
pub(crate) use checks::{CheckResult, RENDERED_CHAT};
pub(crate) use endpoints::EndpointTable;
pub(crate) use engine_load::EngineLoadReader;
#[cfg(test)]
pub(crate) use models::Parity;
pub(crate) use models::{CatalogModel, ModelCatalog, PromptTrust};
pub(crate) use probe::HttpProbe;
pub use probe::{EngineProbe, HealthProber, ProbeResult};
pub(crate) use registration::RegistrationChecker;
pub use registry::FleetRegistry;
pub(crate) use state::FleetWorker;
pub use state::ProbeTarget;

/// The fleet's state and its subscribers.
pub struct Fleet {
    core: Arc<SharedCore>,
    /// The operator's.
    block_size: Option<BlockSize>,
    state: Mutex<FleetState>,
    catalog: RwLock<Arc<ModelCatalog>>,
    /// Some circuit breaker counts requests.
    counts_requests: AtomicBool,
    check_due: Notify,
    probe_due: Notify,
    /// Sends with each publication.
    changes: watch::Sender<()>,
}

impl Fleet {
    #[must_use]
    pub fn new(core: Arc<SharedCore>, block_size: Option<BlockSize>) -> Arc<Self> {
        Arc::new(Self {
            core,
            block_size,
            state: Mutex::default(),
            catalog: RwLock::default(),
            counts_requests: AtomicBool::default(),
            check_due: Notify::new(),
            probe_due: Notify::new(),
            changes: watch::Sender::new(()),
        })
    }

    /// An observation of the worker at `url`.
    pub fn observe(&self, worker: &WorkerId, url: &str, observation: Observation) {
        let now = Instant::now().into_std();
        self.update(|state| state.observe(worker, url, observation, now));
    }

    /// The engine at `url` and this router did not agree on TLS: it gets no requests.
    pub(crate) fn tls_refused(&self, worker: &WorkerId, url: &str, why: &str) {
        let now = Instant::now().into_std();
        self.update(|state| state.tls_refused(worker, url, why, now));
    }

    /// A request is sent to the worker at `url`. Takes no lock while no circuit breaker counts.
    pub fn request_began(self: &Arc<Self>, worker: &WorkerId, url: &str) -> TrackedRequest {
        let began = Instant::now().into_std();
        if self.counts_requests.load(Ordering::Relaxed) {
            self.update(|state| state.request_began(worker, url, began));
        }
        TrackedRequest {
            fleet: Arc::clone(self),
            worker: worker.clone(),
            url: url.to_owned(),
            began,
            case: RequestCase::default(),
            reported: false,
            permit: None,
        }
    }

    /// What engines' reports contradict of the index's credit.
    pub(crate) fn doubted(&self) -> Vec<route::DoubtedScope> {
        self.core.core().doubted()
    }

    /// Some worker is usable, and each usable one is checked.
    pub(crate) fn is_settled(&self) -> bool {
        self.catalog().usable && self.state().unchecked().next().is_none()
    }

    /// A worker's life begins: its registration counts. Once any was admitted, only those of
    /// admitted workers do.
    pub(crate) fn admit(&self, worker: &WorkerId) {
        self.update(|state| state.members.admit(worker));
    }

    /// The worker gets no new requests until its next life.
    pub(crate) fn retire(&self, worker: &WorkerId) {
        self.update(|state| state.members.retire(worker));
    }

    /// Removes the worker. Late registrations of it do not count.
    pub fn forget(&self, worker: &WorkerId) {
        self.update(|state| state.forget(worker));
    }

    /// The registry has the worker, as far as this router has read it.
    pub fn is_registered(&self, worker: &WorkerId) -> bool {
        let state = self.state();
        state.get(worker).is_some_and(|worker| worker.registered)
    }

    /// The workers that are gone without a sign, with the time since their last registration.
    pub(crate) fn lost(&self) -> Vec<(WorkerId, Duration)> {
        self.state().lost.at(Instant::now().into_std())
    }

    pub(crate) fn contains(&self, worker: &WorkerId) -> bool {
        self.state().get(worker).is_some()
    }

    pub(crate) fn ranks(&self, worker: &WorkerId) -> u32 {
        let state = self.state();
        state.get(worker).map_or(0, |worker| worker.entry.ranks)
    }

    /// The operator's last entry on a worker, if there ever was one.
    pub(crate) fn drain_entry(&self, worker: &WorkerId) -> Option<DrainEntry> {
        self.state().drains.entry(worker).cloned()
    }

    /// When the worker's drain ends. `None`: it is not drained by an operator.
    pub(crate) fn drain_until(&self, worker: &WorkerId) -> Option<DrainUntil> {
        let state = self.state();
        let entry = state.drains.entry(worker)?;
        (entry.drain == DrainState::Draining).then_some(entry.until)
    }

    pub(crate) fn drain(&self, worker: &WorkerId) -> DrainState {
        self.state().drain(worker)
    }

    /// Notified of what is published from now on.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// At most `max` workers that can answer, with their URLs.
    pub(crate) fn serving(&self, max: usize) -> Vec<(WorkerId, String)> {
        let state = self.state();
        let serving = state.workers().filter(|worker| worker.serves());
        let addresses = serving.map(|worker| {
            let entry = &worker.entry;
            (entry.worker.clone(), entry.url.clone())
        });
        addresses.take(max).collect()
    }

    /// The workers in service that render prompts of this model and route with images, with their
    /// URLs.
    pub(crate) fn renderers(
        &self,
        model: &str,
        base: &str,
        route: PromptRoute,
    ) -> Vec<(WorkerId, String)> {
        let state = self.state();
        let renders = |worker: &&FleetWorker| {
            let drain = state.drain(&worker.entry.worker);
            drain == DrainState::Serving && worker.renders(model, base, route)
        };
        let renderers = state.workers().filter(renders);
        let address = |worker: &FleetWorker| {
            let entry = &worker.entry;
            (entry.worker.clone(), entry.url.clone())
        };
        renderers.map(address).collect()
    }

    /// The first model that the worker serves: an engine reads a request without a model so.
    pub fn model_of(&self, worker: &WorkerId) -> Option<String> {
        self.state().get(worker)?.entry.models.first().cloned()
    }

    /// Whether workers serve the model, and all of them that answer are asleep.
    pub(crate) fn is_asleep(&self, model: &str) -> bool {
        let state = self.state();
        let mut serving = state.workers().filter(|worker| worker.names(model));
        let mut asleep = 0;
        let none_awake = serving.all(|worker| {
            asleep += usize::from(worker.health == WorkerHealth::Asleep);
            !worker.health.usable()
        });
        none_awake && asleep > 0
    }

    /// Has one sleeping worker of the model woken.
    pub(crate) fn wake(&self, model: &str) {
        self.update(|state| state.want_awake(model));
        self.probe_due.notify_one();
    }

    /// The sources of all other workers.
    pub(crate) fn other_sources(&self, worker: &WorkerId) -> Vec<Source> {
        let state = self.state();
        let others = state
            .workers()
            .filter(|other| other.entry.worker != *worker);
        let sources = others.flat_map(|other| {
            (0..other.entry.ranks).map(|rank| Source {
                worker: other.entry.worker.clone(),
                dp_rank: DpRank(rank),
            })
        });
        sources.collect()
    }

    /// Has the workers of these models checked again.
    pub(crate) fn recheck(&self, models: &BTreeSet<String>) {
        self.update(|state| state.recheck(models));
    }

    pub(crate) fn snapshot(&self) -> Vec<FleetWorker> {
        self.state().workers().cloned().collect()
    }

    pub(crate) fn catalog(&self) -> Arc<ModelCatalog> {
        let catalog = self.catalog.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&catalog)
    }

    fn state(&self) -> MutexGuard<'_, FleetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a change and publishes it under the lock, so that changes are published in order.
    fn update(&self, apply: impl FnOnce(&mut FleetState) -> FleetChange) {
        let mut state = self.state();
        let change = apply(&mut state);
        let counts = state.counts_requests();
        self.counts_requests.store(counts, Ordering::Relaxed);
        if change != FleetChange::None {
            self.publish(&state);
        }
        drop(state);
        if matches!(change, FleetChange::ChecksDue | FleetChange::WorkDue) {
            self.check_due.notify_one();
        }
        if change == FleetChange::WorkDue {
            self.probe_due.notify_one();
        }
    }

    fn publish(&self, state: &FleetState) {
        let entries: Vec<WorkerEntry> = state.workers().map(|w| w.entry.clone()).collect();
        let mut core = self.core.core();
        core.set_workers(&entries);
        for worker in state.workers() {
            core.set_drain(&worker.entry.worker, state.drain(&worker.entry.worker));
            core.set_health(&worker.entry.worker, candidate_health(worker));
        }
        drop(core);
        let lost = state.workers().filter(|worker| worker.health.is_lost());
        let lost = lost.map(|worker| worker.entry.worker.clone()).collect();
        self.core.losses().set_workers(&lost);
        let before = self.catalog();
        let catalog = ModelCatalog::of(state.workers(), self.block_size, &before);
        let catalog = Arc::new(catalog);
        *self.catalog.write().unwrap_or_else(PoisonError::into_inner) = catalog;
        self.changes.send_replace(());
    }
}

/// A request that was sent to one worker. Dropped without a result it has none: it was cancelled,
/// moved, or not sent.
pub struct TrackedRequest {
    fleet: Arc<Fleet>,
    worker: WorkerId,
    url: String,
    began: std::time::Instant,
    case: RequestCase,
    reported: bool,
    /// For the file to the engine, while its answer is read.
    permit: Option<OwnedSemaphorePermit>,
}

impl TrackedRequest {
    /// Releases the permit when the answer ends.
    pub(crate) fn hold(&mut self, permit: OwnedSemaphorePermit) {
        self.permit = Some(permit);
    }

    /// With the request's case.
    #[must_use]
    pub const fn of_case(mut self, case: RequestCase) -> Self {
        self.case = case;
        self
    }

    /// The engine failed, maybe because of the request.
    pub fn fail(&mut self) {
        self.report(RequestResult::Unproven(self.case));
    }

    /// The engine failed in mid-answer.
    pub fn cut(&mut self) {
        self.report(RequestResult::Cut(self.case));
    }

    /// The engine failed, and the request goes to another worker, whose answer is the proof.
    /// `pause`: the engine is overloaded, and asks for it.
    pub fn suspect(&mut self, pause: Option<Duration>) -> SuspectedFailure {
        match pause {
            None => self.fail(),
            Some(_) => self.report(RequestResult::Unknown),
        }
        SuspectedFailure {
            fleet: Arc::clone(&self.fleet),
            worker: self.worker.clone(),
            url: self.url.clone(),
            began: self.began,
            case: self.case,
            pause,
        }
    }

    /// The answer is whole.
    pub fn completed(&mut self) {
        if !self.reported {
            self.report(RequestResult::Completed);
        }
    }

    /// Reports a result to the circuit breaker. An answer may still fail later. Takes no lock for
    /// an answer while no circuit breaker counts.
    pub fn report(&mut self, result: RequestResult) {
        self.reported = result != RequestResult::Begun;
        let counts = self.fleet.counts_requests.load(Ordering::Relaxed);
        let is_failure = matches!(
            result,
            RequestResult::Broken
                | RequestResult::Unproven(_)
                | RequestResult::Cut(_)
                | RequestResult::Proven(_)
        );
        if counts || is_failure {
            let Self {
                worker, url, began, ..
            } = &*self;
            let now = Instant::now().into_std();
            self.fleet.update(|state| {
                state.request_ended(worker, url, result, RequestTimes { began: *began, now })
            });
        }
    }
}

impl Drop for TrackedRequest {
    fn drop(&mut self) {
        if !self.reported {
            self.report(RequestResult::Unknown);
        }
    }
}

/// A failure of a worker that the answer of another one proves.
pub struct SuspectedFailure {
    fleet: Arc<Fleet>,
    worker: WorkerId,
    url: String,
    began: std::time::Instant,
    case: RequestCase,
    pause: Option<Duration>,
}

impl SuspectedFailure {
    /// Another worker answered the request.
    pub fn proven(self) {
        let now = Instant::now().into_std();
        let times = RequestTimes {
            began: self.began,
            now,
        };
        let proof = RequestResult::Proven(self.case);
        self.fleet.update(|state| match self.pause {
            None => state.request_ended(&self.worker, &self.url, proof, times),
            Some(pause) => state.request_postponed(&self.worker, &self.url, pause, now),
        });
    }
}

/// A worker whose circuit breaker passes it over counts as unchecked: used where none is healthy.
const fn candidate_health(worker: &FleetWorker) -> route::Health {
    match worker.health {
        WorkerHealth::Healthy { .. } => match worker.breaker.admits() {
            Admits::All => route::Health::Healthy,
            Admits::Repeatable => route::Health::OnTrial,
            Admits::None => route::Health::Unknown,
        },
        WorkerHealth::Unchecked => route::Health::Unknown,
        WorkerHealth::Unhealthy | WorkerHealth::Asleep => route::Health::Unhealthy,
    }
}

#[cfg(test)]
impl Fleet {
    /// All checks of a worker's model `m` have this result.
    pub(crate) fn set_checks(&self, worker: &WorkerId, result: &CheckResult) {
        let checks = checks::ModelChecks {
            tokenizer: None,
            tokens: checks::TokenChecks::all(result),
        };
        let models = [("m".to_owned(), checks)].into();
        let checks = checks::RegistrationChecks::new(CheckResult::Passed, models);
        self.update(|state| {
            let epoch = state.get(worker).map_or(0, |worker| worker.epoch);
            state.checked(worker, epoch, checks)
        });
    }

    /// Lets time pass for the circuit breakers.
    pub(crate) fn tick(&self) {
        let now = Instant::now().into_std();
        self.update(|state| state.tick(now));
    }

    pub(crate) fn register(&self, entry: WorkerEntry) {
        let now = Instant::now().into_std();
        self.update(|state| state.register(entry, now));
    }
}
