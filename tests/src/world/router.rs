//! Routers: processes, what they know of the fleet, and what comes to them.
//!
//! The product's `Replication`, `IndexClient`, `Rechecks` and clock around a `SharedCore`, tasks and
//! all, and clients (`client`). Beside them `fleet` of the router's shell without tasks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use prometheus::IntCounter;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{RegistryEvent, Revision};
use warmroute_process::tasks::Tasks;
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{Generation, RouterId, WorkerId, codec};
use warmroute_router::audit::UsageAudit;
use warmroute_router::fleet::health::{HealthChange, Observation, WorkerHealth};
use warmroute_router::index_client::IndexClient;
use warmroute_router::replication::{Replication, ReplicationHandle};
use warmroute_router::route::{self, Core, CoreConfig, Knobs, Policy};
use warmroute_router::shared_core::SharedCore;

use super::client::{ClientContext, ObservedCore};
use super::engine::EngineNode;
use super::host::{Event, Http, Input, ProcessId, Timer};
use super::plane::{At, Changed};
use super::requests::Shown;
use super::{Breakage, World};

const HEALTH_EVERY: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(500);
pub(super) const PROBE_EVERY: Duration = Duration::from_millis(500);

pub(super) struct Router {
    pub(super) host: usize,
    pub(super) run: Option<Box<RouterRun>>,
}

pub(super) struct RouterRun {
    pub(super) id: RouterId,
    pub(super) replication: ReplicationHandle,
    pub(super) client: Arc<ClientContext>,
    /// The clients' tasks.
    pub(super) clients: TaskTracker,
    ready: Arc<AtomicBool>,
    pub(super) fleet: BTreeMap<WorkerId, Member>,
    /// Engines whose health is being asked for.
    looking_at: BTreeSet<usize>,
    /// It listens to the registry.
    is_open: bool,
    seen: BTreeMap<String, Revision>,
    pub(super) next_request: u64,
    /// Clients that leave before their answer is complete, by request.
    pub(super) leaves: BTreeMap<u64, CancellationToken>,
    /// Where the engines' answers go, by what was sent.
    pub(super) calls: BTreeMap<u64, mpsc::Sender<Http>>,
    /// Shortfalls that an index explained, as of the last look.
    cleared: u64,
    /// When each engine's worker was first seen.
    pub(super) met: BTreeMap<usize, At>,
    /// What answers showed of each source and of the log, for the checks.
    pub(super) shown: BTreeMap<usize, Shown<Generation>>,
    pub(super) shown_log: Shown<(u64, u64)>,
    /// When a decision in the calm last rested on all that the index knows.
    pub(super) probed: Option<At>,
    pub(super) doubted: Option<String>,
}

impl RouterRun {
    pub(super) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    pub(super) fn shared_core(&self) -> &SharedCore {
        &self.client.observed.core
    }
}

/// A worker as `fleet::Member` has it.
pub(super) struct Member {
    pub(super) entry: WorkerEntry,
    pub(super) health: WorkerHealth,
}

impl World {
    pub(super) fn start_router(&mut self, at: usize) {
        let host = self.routers[at].host;
        let mut id = [0; 16];
        id.fill_with(|| self.rng.u8(..));
        let id = RouterId(id);
        let core = SharedCore::new(Core::new(CoreConfig {
            knobs: Knobs {
                // Its prompts are short.
                move_margin_tokens: 0,
                ..Knobs::from(Policy::Kv)
            },
            router: id,
            incarnation: Generation(0),
            seed: self.rng.u64(..),
        }));
        let written = Arc::clone(&self.checks.routers.written);
        let observed = Arc::new(ObservedCore::new(Arc::clone(&core), written));
        let ready = Arc::<AtomicBool>::default();
        let (latch, subjects, broken) = (ready.clone(), self.subjects.clone(), self.broken);
        let mut made = None;
        self.run_process(host, |plane, outbox, stop| {
            let index = IndexClient::new(plane.clone(), subjects.clone());
            let (audit, rechecks) = UsageAudit::new(core.clone(), index.clone(), counter());
            let clock = core.clone();
            let (replication, handle) = Replication::new(id, core, plane, subjects);
            let client = ClientContext {
                observed,
                index: index.clone(),
                audit,
                outbox,
                broken,
                sent: AtomicU64::new(0),
            };
            made = Some((handle, client));
            let tasks = Tasks::new(counter());
            let ended = tasks.stop.clone();
            let ready = move || latch.store(true, Ordering::Relaxed);
            tasks.spawn("replication", replication.run(ready, ended.clone()));
            let replicas = index.clone().follow_replicas(counter(), ended.clone());
            tasks.spawn("indexers", replicas);
            tasks.spawn("rosters", index.follow_rosters(ended.clone()));
            tasks.spawn("rechecks", rechecks.run(ended.clone()));
            tasks.spawn("clock", clock.run_clock(ended));
            run_tasks(tasks, stop)
        });
        let (replication, client) = made.unwrap();
        let run = RouterRun {
            id,
            replication,
            client: Arc::new(client),
            clients: TaskTracker::new(),
            ready,
            fleet: BTreeMap::new(),
            looking_at: BTreeSet::new(),
            is_open: false,
            seen: BTreeMap::new(),
            next_request: 0,
            leaves: BTreeMap::new(),
            calls: BTreeMap::new(),
            cleared: 0,
            met: BTreeMap::new(),
            shown: BTreeMap::new(),
            shown_log: Shown::default(),
            probed: None,
            doubted: None,
        };
        self.routers[at].run = Some(Box::new(run));
        self.timer(host, Duration::ZERO, Timer::Open);
        self.timer(host, HEALTH_EVERY, Timer::Health);
        self.timer(host, PROBE_EVERY, Timer::Probe);
        self.plan_arrival(host);
    }

    /// Calls what reads a router's clock.
    pub(super) fn in_router<R>(&self, at: usize, call: impl FnOnce() -> R) -> R {
        let running = self.hosts[self.routers[at].host].running.as_ref().unwrap();
        running.process.enter(call)
    }

    pub(super) fn router_now(&self, at: usize) -> Instant {
        self.in_router(at, || tokio::time::Instant::now().into_std())
    }

    /// Its connections to the engines break, each in its time.
    pub(super) fn router_is_gone(&mut self, at: usize, life: u64) {
        self.routers[at].run = None;
        let from = (self.routers[at].host, life);
        for engine in 0..self.engines.len() {
            let after = self.delay();
            let no = None;
            self.plan(after, Event::HangUp { engine, from, no });
        }
    }

    pub(super) fn router_input(&mut self, at: usize, input: Input) {
        let Some(mut run) = self.routers[at].run.take() else {
            return;
        };
        if let Some(input) = self.fleet_input(at, &mut run, input) {
            self.request_input(at, &mut run, input);
        }
        self.routers[at].run = Some(run);
    }

    /// Its tasks ran. The index of this world is right, whatever engines evict: no strike is.
    pub(super) fn router_ran(&mut self, at: usize) {
        let Some(run) = &mut self.routers[at].run else {
            return;
        };
        run.client.observed.record();
        let audit = run.shared_core().core().counts().audit;
        self.checks.routers.rechecks += audit.cleared - run.cleared;
        run.cleared = audit.cleared;
        if audit.strikes > 0 {
            self.fail(format!("router {at}: strike against the index: {audit:?}"));
        }
    }

    fn open_router(&mut self, at: usize, run: &mut RouterRun) {
        let host = self.routers[at].host;
        if self.hosts[host].is_cut {
            self.timer(host, RETRY, Timer::Open);
            return;
        }
        run.is_open = true;
        let keys: Vec<_> = self.watched_by_routers();
        for (key, entry) in keys {
            let event = RegistryEvent::Put { key, entry };
            self.in_order(host, Input::Registry(0, event));
        }
        self.in_order(host, Input::Registry(0, RegistryEvent::Current));
    }

    fn watched_by_routers(&self) -> Vec<(String, warmroute_plane::RegistryEntry)> {
        let prefix = self.subjects.worker_keys();
        let keys = self.plane.keys.iter();
        keys.filter(|(key, _)| key.starts_with(&prefix))
            .map(|(key, entry)| (key.clone(), entry.entry.clone()))
            .collect()
    }

    pub(super) fn tell_routers(&mut self, changes: &[Changed]) {
        if self.routers.is_empty() {
            return;
        }
        let prefix = self.subjects.worker_keys();
        for Changed { key, entry } in changes {
            if !key.starts_with(&prefix) {
                continue;
            }
            let event = match entry.clone() {
                Some(entry) => RegistryEvent::Put {
                    key: key.clone(),
                    entry,
                },
                None => RegistryEvent::Gone { key: key.clone() },
            };
            for at in 0..self.routers.len() {
                let host = self.routers[at].host;
                // The one that is being worked on asked for the change: it watches too.
                let watches = self.routers[at].run.as_ref().is_none_or(|run| run.is_open);
                if watches && !self.hosts[host].is_cut {
                    self.in_order(host, Input::Registry(0, event.clone()));
                }
            }
        }
    }

    /// Only the last change of the time without connection is delivered.
    pub(super) fn router_watches_again(&mut self, at: usize) {
        let host = self.routers[at].host;
        let Some(run) = self.routers[at].run.as_ref().filter(|run| run.is_open) else {
            return;
        };
        let present = self.watched_by_routers();
        let is_there = |key: &String| present.iter().any(|(there, _)| there == key);
        let gone = run.seen.keys().filter(|key| !is_there(key));
        let mut events: Vec<_> = gone
            .map(|key| RegistryEvent::Gone { key: key.clone() })
            .collect();
        let is_new = |(key, entry): &&(String, warmroute_plane::RegistryEntry)| {
            run.seen.get(key) != Some(&entry.revision)
        };
        events.extend(present.iter().filter(is_new).map(|(key, entry)| {
            let (key, entry) = (key.clone(), entry.clone());
            RegistryEvent::Put { key, entry }
        }));
        for event in events {
            self.in_order(host, Input::Registry(0, event));
        }
    }

    // --- `fleet` and `workers`

    fn fleet_input(&mut self, at: usize, run: &mut RouterRun, input: Input) -> Option<Input> {
        let host = self.routers[at].host;
        match input {
            Input::Registry(_, event) => self.registry_says(at, run, event),
            Input::Timer(Timer::Open) => self.open_router(at, run),
            Input::Timer(Timer::Health) => {
                self.timer(host, HEALTH_EVERY, Timer::Health);
                self.look_at_workers(at, run);
            }
            Input::Sight(engine, sight) => {
                run.looking_at.remove(&engine);
                self.see(run, engine, sight);
            }
            other => return Some(other),
        }
        None
    }

    fn registry_says(&mut self, at: usize, run: &mut RouterRun, event: RegistryEvent) {
        match event {
            RegistryEvent::Put { key, entry } => {
                run.seen.insert(key.clone(), entry.revision);
                if let Ok(entry) = codec::decode::<WorkerEntry>(&entry.value) {
                    let known = run.fleet.get(&entry.worker);
                    if known.is_some_and(|known| known.entry == entry) {
                        return;
                    }
                    let health = known.map_or_else(WorkerHealth::default, |known| known.health);
                    let member = Member { entry, health };
                    let worker = &member.entry.worker;
                    let is_it = |node: &EngineNode| node.source.worker == *worker;
                    // Its shim knows what it serves.
                    let serves = !member.entry.models.is_empty();
                    if serves && let Some(engine) = self.engines.iter().position(is_it) {
                        run.met.entry(engine).or_insert(self.now);
                    }
                    run.fleet.insert(member.entry.worker.clone(), member);
                    tell_core(run);
                    self.look_at_workers(at, run);
                }
            }
            // Knowledge outlives the registration.
            RegistryEvent::Gone { key } => {
                run.seen.remove(&key);
                if self.broken == Some(Breakage::LeasesActedUpon)
                    && let Some(worker) = self.subjects.key_worker(&key)
                {
                    run.fleet.remove(&worker);
                    tell_core(run);
                }
            }
            RegistryEvent::Current => {}
        }
    }

    fn look_at_workers(&mut self, at: usize, run: &mut RouterRun) {
        let from = self.process(self.routers[at].host);
        for engine in 0..self.engines.len() {
            let is_known = run.fleet.contains_key(&self.engines[engine].source.worker);
            if is_known && run.looking_at.insert(engine) {
                let after = self.delay();
                self.plan(after, Event::LookAt { engine, from });
            }
        }
    }

    pub(super) fn process(&self, host: usize) -> ProcessId {
        (host, self.hosts[host].life)
    }

    /// A question for its health reaches an engine.
    pub(super) fn look_at(&mut self, engine: usize, from: ProcessId) {
        let sight = if self.engines[engine].is_up {
            Observation::ProbePassed
        } else {
            Observation::ConnectRefused
        };
        let after = self.delay();
        self.send_process(from, after, Input::Sight(engine, sight));
    }

    pub(super) fn see(&self, run: &mut RouterRun, engine: usize, sight: Observation) {
        let worker = &self.engines[engine].source.worker;
        let Some(member) = run.fleet.get_mut(worker) else {
            return;
        };
        let turn = member.health.observe(sight);
        let is_heeded = turn != HealthChange::Down || self.broken != Some(Breakage::HealthIgnored);
        if turn != HealthChange::None && is_heeded {
            tell_core(run);
        }
    }
}

/// `Fleet::publish`.
fn tell_core(run: &mut RouterRun) {
    let entries: Vec<WorkerEntry> = run
        .fleet
        .values()
        .map(|member| member.entry.clone())
        .collect();
    let mut core = run.shared_core().core();
    core.set_workers(&entries);
    for member in run.fleet.values() {
        let health = match member.health {
            WorkerHealth::Healthy { .. } => route::Health::Healthy,
            WorkerHealth::Unchecked => route::Health::Unknown,
            WorkerHealth::Unhealthy => route::Health::Unhealthy,
        };
        core.set_health(&member.entry.worker, health);
    }
}

/// Runs until stopped. Ends early if a task does.
async fn run_tasks(tasks: Tasks, stop: CancellationToken) {
    tokio::select! {
        biased;
        () = stop.cancelled() => tasks.end().await,
        () = tasks.down.cancelled() => {}
    }
}

fn counter() -> IntCounter {
    IntCounter::new("of_the_world", "Read by nothing").unwrap()
}
