//! Routers: processes, what they know of the fleet, and what comes to them.
//!
//! The product's `Replication`, `IndexClient`, `Rechecks`, `FleetRegistry`, `HealthProber` and clock
//! around a `SharedCore`, tasks and all, and clients (`client`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use prometheus::IntCounter;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_process::tasks::Tasks;
use warmroute_proto::{Generation, RouterId, WorkerId};
use warmroute_router::audit::UsageAudit;
use warmroute_router::fleet::{Fleet, FleetRegistry, HealthProber};
use warmroute_router::index_client::IndexClient;
use warmroute_router::ready::Ready;
use warmroute_router::replication::{Replication, ReplicationHandle};
use warmroute_router::route::{Core, CoreConfig, Knobs, Policy};
use warmroute_router::shared_core::SharedCore;

use super::client::{ClientContext, ObservedCore};
use super::engine::EngineNode;
use super::host::{Event, Http, Input, Kind, ProcessId, Timer};
use super::plane::At;
use super::requests::Shown;
use super::sim_plane::{Listing, ProbeAnswer, SimProbe};
use super::trouble::Trouble;
use super::{Breakage, World};

pub(super) const HEALTH_EVERY: Duration = Duration::from_secs(1);
/// A worker that is not registered is forgotten after so long a silence.
const FORGET_AFTER: Duration = Duration::from_secs(30);
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
    ready: Arc<Ready>,
    /// Changes of the fleet that the world has not looked at.
    fleet_changes: watch::Receiver<()>,
    pub(super) next_request: u64,
    /// Clients that leave before their answer is complete, by request.
    pub(super) leaves: BTreeMap<u64, CancellationToken>,
    /// Where the engines' answers go, by what was sent.
    pub(super) calls: BTreeMap<u64, mpsc::Sender<Http>>,
    /// Shortfalls that an index explained, as of the last look.
    cleared: u64,
    /// When each engine's worker was first seen.
    pub(super) met: BTreeMap<usize, At>,
    /// When each engine was met or passed a probe last, by the process's clock.
    answered_at: BTreeMap<usize, Instant>,
    /// What answers showed of each source and of the log, for the checks.
    pub(super) shown: BTreeMap<usize, Shown<Generation>>,
    pub(super) shown_log: Shown<(u64, u64)>,
    /// When a decision in the calm last rested on all that the index knows.
    pub(super) probed: Option<At>,
    pub(super) doubted: Option<String>,
}

impl RouterRun {
    fn new(
        id: RouterId,
        replication: ReplicationHandle,
        client: ClientContext,
        ready: Arc<Ready>,
    ) -> Self {
        Self {
            id,
            replication,
            fleet_changes: client.fleet.changes(),
            client: Arc::new(client),
            clients: TaskTracker::new(),
            ready,
            next_request: 0,
            leaves: BTreeMap::new(),
            calls: BTreeMap::new(),
            cleared: 0,
            met: BTreeMap::new(),
            answered_at: BTreeMap::new(),
            shown: BTreeMap::new(),
            shown_log: Shown::default(),
            probed: None,
            doubted: None,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.ready.is_initialized()
    }

    pub(super) fn shared_core(&self) -> &SharedCore {
        &self.client.observed.core
    }

    fn fleet(&self) -> &Fleet {
        &self.client.fleet
    }
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
        let fleet = Fleet::new(Arc::clone(&core), None);
        let ready = Arc::<Ready>::default();
        // There are no tenants.
        ready.limits_shared();
        let (latch, subjects, broken) = (ready.clone(), self.subjects.clone(), self.broken);
        let mut made = None;
        self.run_process(host, |plane, outbox, stop| {
            let index = IndexClient::new(plane.clone(), subjects.clone());
            let (audit, rechecks) = UsageAudit::new(core.clone(), index.clone(), counter());
            let clock = core.clone();
            let registry = Arc::new(FleetRegistry {
                fleet: fleet.clone(),
                plane: plane.clone(),
                subjects: subjects.clone(),
                ready: latch.clone(),
                unreadable: counter(),
                drains_read: AtomicBool::default(),
            });
            let prober = HealthProber {
                fleet: fleet.clone(),
                probe: SimProbe(outbox.clone()),
                period: HEALTH_EVERY,
                ready: latch.clone(),
            };
            let (replication, handle) = Replication::new(id, core, plane, subjects);
            let client = ClientContext {
                observed,
                index: index.clone(),
                audit,
                fleet,
                outbox,
                broken,
                sent: AtomicU64::new(0),
            };
            made = Some((handle, client));
            let tasks = Tasks::new(counter());
            let ended = tasks.stop.clone();
            let ready = move || latch.load_known();
            tasks.spawn("replication", replication.run(ready, ended.clone()));
            let replicas = index.clone().follow_replicas(counter(), ended.clone());
            tasks.spawn("indexers", replicas);
            tasks.spawn("rosters", index.follow_rosters(ended.clone()));
            tasks.spawn("rechecks", rechecks.run(ended.clone()));
            tasks.spawn("clock", clock.run_clock(ended.clone()));
            tasks.spawn("registry", registry.follow(ended.clone()));
            tasks.spawn("health", prober.run(ended));
            run_tasks(tasks, stop)
        });
        let (replication, client) = made.unwrap();
        let run = RouterRun::new(id, replication, client, ready);
        self.routers[at].run = Some(Box::new(run));
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
        self.request_input(at, &mut run, input);
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
        self.note_fleet(at);
    }

    /// Notes which workers the router knows. It forgets one only once that was silent for long.
    fn note_fleet(&mut self, at: usize) {
        let changed = |run: &&mut Box<RouterRun>| run.fleet_changes.has_changed().unwrap();
        if self.routers[at].run.as_mut().filter(changed).is_none() {
            return;
        }
        let now = self.router_now(at);
        let Some(run) = &mut self.routers[at].run else {
            return;
        };
        run.fleet_changes.mark_unchanged();
        let mut forgotten = None;
        for (engine, node) in self.engines.iter().enumerate() {
            // Its shim knows what it serves.
            let is_known = run.fleet().model_of(&node.source.worker).is_some();
            if is_known && !run.met.contains_key(&engine) {
                run.met.insert(engine, self.now);
                run.answered_at.insert(engine, now);
            } else if !is_known && run.met.remove(&engine).is_some() {
                let silent = now.duration_since(run.answered_at[&engine]);
                if silent <= FORGET_AFTER {
                    forgotten = Some((engine, silent));
                }
            }
        }
        if let Some((engine, silent)) = forgotten {
            self.fail(format!(
                "router {at} forgets engine {engine}, which was silent for {silent:?}"
            ));
        }
    }

    /// A router has a worker as registered if and only if it is.
    pub(super) fn check_fleet(&mut self, at: usize) {
        let Some(run) = &self.routers[at].run else {
            return;
        };
        if !self.sees_registry(self.routers[at].host) {
            return;
        }
        let differing = self.differing_registration(|worker| run.fleet().is_registered(worker));
        if let Some(why) = differing {
            self.fail(format!("router {at} {why}"));
        }
    }

    pub(super) fn process(&self, host: usize) -> ProcessId {
        (host, self.hosts[host].life)
    }

    // --- probes

    pub(super) fn send_probe(
        &mut self,
        host: usize,
        worker: &WorkerId,
        to: oneshot::Sender<Listing>,
    ) {
        let is_it = |node: &EngineNode| node.source.worker == *worker;
        let engine = self.engines.iter().position(is_it).unwrap();
        let from = self.process(host);
        let after = self.for_fleet(Self::delay);
        self.plan(after, Event::ProbeEngine { engine, from, to });
    }

    pub(super) fn probe_engine(
        &mut self,
        engine: usize,
        from: ProcessId,
        to: oneshot::Sender<Listing>,
    ) {
        let answers = self.engines[engine].is_up || self.broken == Some(Breakage::HealthIgnored);
        let after = self.for_fleet(Self::delay);
        let input = Input::Probed {
            engine,
            to,
            listing: answers.then(|| ProbeAnswer {
                models: ["m".to_owned()].into(),
                is_asleep: self.engines[engine].trouble.present == Some(Trouble::Asleep),
            }),
        };
        self.send_process(from, after, input);
    }

    pub(super) fn accept_probe(
        &mut self,
        host: usize,
        engine: usize,
        to: oneshot::Sender<Listing>,
        listing: Listing,
    ) {
        let Kind::Router(at) = self.hosts[host].kind else {
            panic!("host {host} probes no engine");
        };
        if listing.is_some() {
            let now = self.router_now(at);
            if let Some(run) = &mut self.routers[at].run {
                run.answered_at.insert(engine, now);
            }
        }
        drop(to.send(listing));
    }

    /// A router that acts upon a lost lease forgets the worker.
    pub(super) fn lease_as_lost(&self, host: usize, key: &str) {
        if let Kind::Router(at) = self.hosts[host].kind
            && self.broken == Some(Breakage::LeasesActedUpon)
            && let Some(worker) = self.subjects.key_worker(key)
            && let Some(run) = &self.routers[at].run
        {
            run.fleet().forget(&worker);
        }
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
