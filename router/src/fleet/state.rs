//! The fleet's state machine. Pure: registry events, observations, check results and drains in;
//! what changed, what to probe and what to check out.
//!
//! Knowledge outlives its source: an expired lease or an unreachable plane removes no worker that
//! answers. A worker is removed when the registry no longer has it and it has not answered for
//! [`FORGET_AFTER`], or when another worker is registered at its address. A worker that is not
//! registered must still list its models: addresses are reused.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use warmroute_proto::WorkerId;
use warmroute_proto::registry::{DrainState, Lora, WorkerEntry};

use super::breaker::{Breaker, RequestResult, RequestTimes};
use super::checks::{CheckResult, RegistrationChecks};
use super::drain_table::DrainTable;
use super::engine_load::LoadTarget;
use super::health::{HealthChange, Observation, WorkerHealth};
use super::members::FleetMembers;
use crate::openai::PromptRoute;

/// A worker that was taken out leaves metrics and alerts within a minute. One whose engine and shim
/// restart is registered again.
pub(super) const FORGET_AFTER: Duration = Duration::from_secs(30);

/// One worker as the router knows it.
#[derive(Clone, Debug)]
pub(crate) struct FleetWorker {
    pub entry: WorkerEntry,
    /// The registry has it.
    pub registered: bool,
    pub health: WorkerHealth,
    /// Why TLS with it failed, until a probe passes.
    pub tls_error: Option<String>,
    /// Why its load is not read, if the settings ask for it.
    pub load_error: Option<String>,
    pub breaker: Breaker,
    pub checks: RegistrationChecks,
    /// Grows when the worker comes back or changes: older check results are void.
    pub epoch: u64,
    last_answer: Instant,
}

/// An address to probe.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProbeTarget {
    pub worker: WorkerId,
    pub url: String,
    /// The models that the engine must list. Empty while the worker is registered.
    pub must_list: Vec<String>,
}

/// What an input changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FleetChange {
    None,
    /// Something that requests see.
    Published,
    /// That, and a worker is to be checked.
    ChecksDue,
    /// That, and a worker is to be probed.
    WorkDue,
}

#[derive(Default)]
pub(crate) struct FleetState {
    workers: BTreeMap<WorkerId, FleetWorker>,
    /// Outlive the registration of their workers.
    pub drains: DrainTable,
    /// The workers whose registration counts.
    pub members: FleetMembers,
}

impl FleetState {
    /// The registry has this worker, new or changed.
    pub(crate) fn register(&mut self, entry: WorkerEntry, now: Instant) -> FleetChange {
        let worker = entry.worker.clone();
        if !self.members.contains(&worker) {
            return FleetChange::None;
        }
        match self.workers.get_mut(&worker) {
            // A renewed lease.
            Some(known) if known.entry == entry && known.registered => return FleetChange::None,
            Some(known) if known.entry == entry => known.registered = true,
            // Checks are of base models: they hold.
            Some(known) if known.entry == with_loras(&entry, &known.entry.loras) => {
                tracing::info!(%worker, loras = ?entry.loras, "the worker's adapters changed");
                known.entry = entry;
                known.registered = true;
            }
            Some(known) => {
                tracing::info!(%worker, url = entry.url, "worker changed");
                if known.entry.url != entry.url {
                    known.health = WorkerHealth::default();
                    known.tls_error = None;
                    known.breaker = Breaker::default();
                }
                known.entry = entry;
                known.registered = true;
                known.begin_epoch();
            }
            None => {
                tracing::info!(
                    %worker, url = entry.url, models = ?entry.models, ranks = entry.ranks,
                    "worker registered"
                );
                self.workers.insert(worker, FleetWorker::new(entry, now));
            }
        }
        self.displace();
        FleetChange::WorkDue
    }

    /// The registry no longer has this worker.
    pub(crate) fn deregister(&mut self, worker: &WorkerId) -> FleetChange {
        let Some(known) = self.workers.get_mut(worker) else {
            return FleetChange::None;
        };
        known.registered = false;
        tracing::info!(%worker, "worker left the registry, kept while it answers");
        self.displace()
    }

    /// An observation at `url`. It is void if the worker has moved since.
    pub(crate) fn observe(
        &mut self,
        worker: &WorkerId,
        url: &str,
        observation: Observation,
        now: Instant,
    ) -> FleetChange {
        let Some(known) = self.at(worker, url) else {
            return FleetChange::None;
        };
        if observation == Observation::ProbePassed {
            known.last_answer = now;
            known.tls_error = None;
        }
        match known.health.observe(observation) {
            HealthChange::Up => {
                known.begin_epoch();
                // What broke before was the engine that went down.
                known.breaker = Breaker::reset(now);
                tracing::info!(%worker, "worker is healthy");
                return FleetChange::ChecksDue;
            }
            HealthChange::Down => {
                tracing::warn!(%worker, ?observation, "worker is unhealthy, not used");
            }
            HealthChange::None if known.is_forgotten(now) => {
                tracing::info!(%worker, "worker forgotten");
                self.workers.remove(worker);
            }
            HealthChange::None => return FleetChange::None,
        }
        FleetChange::Published
    }

    /// TLS failed at `url`. As certain as a refused connection.
    pub(crate) fn tls_refused(
        &mut self,
        worker: &WorkerId,
        url: &str,
        why: &str,
        now: Instant,
    ) -> FleetChange {
        if let Some(known) = self.at(worker, url)
            && known.tls_error.as_deref() != Some(why)
        {
            tracing::warn!(%worker, url, why, "TLS with the engine failed");
            known.tls_error = Some(why.to_owned());
        }
        self.observe(worker, url, Observation::ConnectRefused, now)
    }

    /// The load of the engine at `url` was read, or why not. Logged once until it is read again.
    pub(crate) fn load_read(&mut self, worker: &WorkerId, url: &str, error: Option<String>) {
        let Some(known) = self.at(worker, url) else {
            return;
        };
        match (&known.load_error, &error) {
            (None, Some(why)) => {
                tracing::warn!(%worker, url, why, "engine load cannot be read, not counted");
            }
            (Some(_), None) => tracing::info!(%worker, "engine load is read"),
            (None, None) | (Some(_), Some(_)) => {}
        }
        known.load_error = error;
    }

    /// No engine's load is read.
    pub(crate) fn forget_load_errors(&mut self) -> FleetChange {
        for known in self.workers.values_mut() {
            known.load_error = None;
        }
        FleetChange::None
    }

    /// The engines whose load can be read.
    pub(crate) fn load_targets(&self) -> Vec<LoadTarget> {
        let usable = self
            .workers
            .values()
            .filter(|worker| worker.health.usable());
        let target = |worker: &FleetWorker| LoadTarget {
            worker: worker.entry.worker.clone(),
            url: worker.entry.url.clone(),
            ranks: worker.entry.ranks,
        };
        usable.map(target).collect()
    }

    /// The result of a request that was sent to `url`.
    pub(crate) fn request_ended(
        &mut self,
        worker: &WorkerId,
        url: &str,
        result: RequestResult,
        times: RequestTimes,
    ) -> FleetChange {
        let Some(known) = self.at(worker, url) else {
            return FleetChange::None;
        };
        let (was_open, passed_over) = (known.breaker.is_open(), known.breaker.passes_over());
        known.breaker.record(result, times);
        if known.breaker.is_open() && !was_open {
            tracing::warn!(%worker, "circuit breaker opened, requests break");
        }
        known.breaker_change(passed_over)
    }

    /// A request is sent to `url`.
    pub(crate) fn request_began(
        &mut self,
        worker: &WorkerId,
        url: &str,
        now: Instant,
    ) -> FleetChange {
        let Some(known) = self.at(worker, url) else {
            return FleetChange::None;
        };
        let passed_over = known.breaker.passes_over();
        known.breaker.begin(now);
        known.breaker_change(passed_over)
    }

    /// Lets time pass for the circuit breakers.
    pub(crate) fn tick(&mut self, now: Instant) -> FleetChange {
        let mut change = FleetChange::None;
        for (worker, known) in &mut self.workers {
            let passed_over = known.breaker.passes_over();
            known.breaker.tick(now);
            if known.breaker_change(passed_over) != FleetChange::None {
                tracing::info!(%worker, "circuit breaker half open");
                change = FleetChange::Published;
            }
        }
        change
    }

    /// The result of checking a worker's registration. Void in a later epoch.
    pub(crate) fn checked(
        &mut self,
        worker: &WorkerId,
        epoch: u64,
        checks: RegistrationChecks,
    ) -> FleetChange {
        match self.workers.get_mut(worker) {
            Some(known) if known.epoch == epoch => {
                known.checks = checks;
                FleetChange::Published
            }
            Some(_) | None => FleetChange::None,
        }
    }

    /// These models have other tokenizers: the checks of their workers are void.
    pub(crate) fn recheck(&mut self, models: &BTreeSet<String>) -> FleetChange {
        let mut change = FleetChange::None;
        for known in self.workers.values_mut() {
            if known
                .entry
                .models
                .iter()
                .any(|model| models.contains(model))
            {
                known.begin_epoch();
                change = FleetChange::ChecksDue;
            }
        }
        change
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = &FleetWorker> + Clone {
        self.workers.values()
    }

    pub(crate) fn get(&self, worker: &WorkerId) -> Option<&FleetWorker> {
        self.workers.get(worker)
    }

    pub(crate) fn drain(&self, worker: &WorkerId) -> DrainState {
        match self.members.leaves(worker) {
            true => DrainState::Draining,
            false => self.drains.drain(worker),
        }
    }

    /// The worker's life has ended.
    pub(crate) fn forget(&mut self, worker: &WorkerId) -> FleetChange {
        self.members.remove(worker);
        self.workers.remove(worker);
        FleetChange::Published
    }

    /// Usable workers whose registration is to be checked.
    pub(crate) fn unchecked(&self) -> impl Iterator<Item = &FleetWorker> {
        let open = |worker: &&FleetWorker| worker.serves() && !worker.checks.complete();
        self.workers.values().filter(open)
    }

    pub(crate) fn probe_targets(&self) -> Vec<ProbeTarget> {
        let target = |worker: &FleetWorker| ProbeTarget {
            worker: worker.entry.worker.clone(),
            url: worker.entry.url.clone(),
            must_list: match worker.registered {
                true => Vec::new(),
                false => worker.entry.models.clone(),
            },
        };
        self.workers.values().map(target).collect()
    }

    pub(crate) fn counts_requests(&self) -> bool {
        self.workers
            .values()
            .any(|worker| worker.breaker.is_counting())
    }

    fn at(&mut self, worker: &WorkerId, url: &str) -> Option<&mut FleetWorker> {
        let known = self.workers.get_mut(worker);
        known.filter(|known| known.entry.url == url)
    }

    /// Keeps the invariant that one worker has an address: removes each unregistered worker at the
    /// address of a registered one.
    fn displace(&mut self) -> FleetChange {
        let registered = self.workers.values().filter(|worker| worker.registered);
        let taken: BTreeSet<String> = registered.map(|worker| worker.entry.url.clone()).collect();
        let before = self.workers.len();
        self.workers.retain(|name, worker| {
            let stays = worker.registered || !taken.contains(&worker.entry.url);
            if !stays {
                tracing::info!(worker = %name, "worker forgotten, another one has its address");
            }
            stays
        });
        if self.workers.len() < before {
            FleetChange::Published
        } else {
            FleetChange::None
        }
    }
}

fn with_loras(entry: &WorkerEntry, loras: &[Lora]) -> WorkerEntry {
    WorkerEntry {
        loras: loras.to_vec(),
        ..entry.clone()
    }
}

impl FleetWorker {
    fn new(entry: WorkerEntry, now: Instant) -> Self {
        Self {
            entry,
            registered: true,
            health: WorkerHealth::default(),
            tls_error: None,
            load_error: None,
            breaker: Breaker::default(),
            checks: RegistrationChecks::default(),
            epoch: 0,
            last_answer: now,
        }
    }

    /// Healthy, and has reported its models: a worker may register before its engine lists them.
    pub(crate) const fn serves(&self) -> bool {
        self.health.usable() && !self.entry.models.is_empty()
    }

    /// Whether it renders prompts of this model and route with images, and takes requests.
    pub(crate) fn renders(&self, model: &str, base: &str, route: PromptRoute) -> bool {
        let serves_it = self.entry.models.iter().any(|name| name == model)
            || self.entry.loras.iter().any(|lora| lora.name == model);
        let checks = self.checks.models.get(base);
        let check = checks.and_then(|checks| checks.tokens.rendering(route));
        self.serves()
            && !self.breaker.passes_over()
            && serves_it
            && check.is_some_and(CheckResult::passed)
    }

    /// It answers, and no shim registers it: it is routed by load.
    pub(crate) const fn is_unregistered(&self) -> bool {
        !self.registered && self.health.usable()
    }

    /// What a change of the breaker means for requests.
    fn breaker_change(&self, passed_over: bool) -> FleetChange {
        if passed_over == self.breaker.passes_over() {
            FleetChange::None
        } else {
            FleetChange::Published
        }
    }

    fn begin_epoch(&mut self) {
        self.epoch += 1;
        self.checks = RegistrationChecks::default();
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        let silent = now.duration_since(self.last_answer);
        !self.registered && !self.health.usable() && silent > FORGET_AFTER
    }
}
