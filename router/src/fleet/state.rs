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

use super::breaker::{Admits, Breaker, OtherWorkers, RequestResult, RequestTimes};
use super::checks::{CheckResult, RegistrationChecks};
use super::drain_table::DrainTable;
use super::engine_load::LoadTarget;
use super::health::{HealthChange, Observation, WorkerHealth};
use super::lost_workers::{self, LostWorkers};
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
    /// When its registration was written last.
    renewed: Instant,
    /// Its registration ended by expiry.
    expired: bool,
    pub health: WorkerHealth,
    /// What its last failed probe found, until one passes.
    pub failure: Option<Observation>,
    /// Why TLS with it failed, until a probe passes.
    pub tls_error: Option<String>,
    /// Why its load is not read, if the settings ask for it.
    pub load_error: Option<String>,
    pub breaker: Breaker,
    pub checks: RegistrationChecks,
    pub sleep: SleepRoutes,
    /// Grows when the worker comes back or changes: older check results are void.
    pub epoch: u64,
    last_answer: Instant,
}

/// What is known of the engine's routes of sleep, and what is due there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SleepRoutes {
    /// It does not report whether it sleeps.
    pub is_absent: bool,
    /// Requests wait for it.
    pub is_wanted: bool,
}

/// An address to probe.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProbeTarget {
    pub worker: WorkerId,
    pub url: String,
    /// The models that the engine must list. Empty while the worker is registered.
    pub must_list: Vec<String>,
    /// The engine may report whether it sleeps.
    pub asks_sleep: bool,
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
    pub lost: LostWorkers,
}

impl FleetState {
    /// The registry has this worker, new or changed.
    pub(crate) fn register(&mut self, entry: WorkerEntry, now: Instant) -> FleetChange {
        let worker = entry.worker.clone();
        if !self.members.contains(&worker) {
            return FleetChange::None;
        }
        self.lost.found(&worker);
        if let Some(known) = self.workers.get_mut(&worker) {
            known.renewed = now;
        }
        match self.workers.get_mut(&worker) {
            // A renewed lease.
            Some(known) if known.entry == entry && known.registered => return FleetChange::None,
            Some(known) if known.entry == entry => known.registered = true,
            // Checks are of base models: they hold.
            Some(known) if known.entry == with_loras(&entry, &known.entry.loras) => {
                tracing::info!(%worker, adapters = entry.loras.len(), "the worker's adapters changed");
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
                    %worker, url = entry.url, models = entry.models.join(", "), ranks = entry.ranks,
                    "worker registered"
                );
                self.workers.insert(worker, FleetWorker::new(entry, now));
            }
        }
        self.displace();
        FleetChange::WorkDue
    }

    /// The registry no longer has this worker.
    pub(crate) fn deregister(&mut self, worker: &WorkerId, now: Instant) -> FleetChange {
        let Some(known) = self.workers.get_mut(worker) else {
            return FleetChange::None;
        };
        known.registered = false;
        known.expired = lost_workers::is_expiry(known.renewed, now);
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
        let answers = [
            Observation::ProbePassed,
            Observation::PassedWithoutSleep,
            Observation::Asleep,
        ];
        if answers.contains(&observation) {
            known.last_answer = now;
            known.tls_error = None;
            known.failure = None;
        } else {
            known.failure = Some(observation);
        }
        match observation {
            Observation::PassedWithoutSleep => known.sleep.is_absent = true,
            Observation::ConnectRefused | Observation::OtherEngine => {
                known.sleep = SleepRoutes::default();
            }
            Observation::ProbePassed | Observation::Asleep | Observation::ProbeFailed => {}
        }
        match known.health.observe(observation) {
            HealthChange::Up => {
                known.sleep.is_wanted = false;
                known.begin_epoch();
                // What broke before was the engine that went down.
                known.breaker = Breaker::reset(now);
                tracing::info!(%worker, "worker is healthy");
                return FleetChange::ChecksDue;
            }
            HealthChange::Down if observation == Observation::Asleep => {
                tracing::info!(%worker, "worker is asleep, not used");
            }
            HealthChange::Down => {
                known.sleep = SleepRoutes::default();
                let why = known.why_unhealthy();
                tracing::warn!(%worker, url, why, "worker is unhealthy, not used");
            }
            HealthChange::None if known.is_forgotten(now) => {
                let (expired, renewed) = (known.expired, known.renewed);
                self.workers.remove(worker);
                if expired && self.drain(worker) == DrainState::Serving {
                    tracing::warn!(
                        %worker, url,
                        "worker is lost: its registration expired and its engine does not answer"
                    );
                    self.lost.add(worker.clone(), renewed, now);
                } else {
                    tracing::info!(%worker, "worker forgotten");
                }
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
        let others = match result.is_unproven() {
            true => self.others_of(worker),
            false => OtherWorkers::default(),
        };
        let Some(known) = self.at(worker, url) else {
            return FleetChange::None;
        };
        let (was_open, before) = (known.breaker.is_open(), known.breaker.admits());
        known.breaker.record(result, times, others);
        if known.breaker.is_open() && !was_open {
            tracing::warn!(%worker, "circuit breaker opened, requests fail");
        }
        known.breaker_change(before)
    }

    /// The engine at `url` named a pause, and another worker served the request.
    pub(crate) fn request_postponed(
        &mut self,
        worker: &WorkerId,
        url: &str,
        pause: Duration,
        now: Instant,
    ) -> FleetChange {
        let Some(known) = self.at(worker, url) else {
            return FleetChange::None;
        };
        let before = known.breaker.admits();
        known.breaker.rest(pause, now);
        known.breaker_change(before)
    }

    /// What the usable workers with a model in common with this one do.
    fn others_of(&self, worker: &WorkerId) -> OtherWorkers {
        let mut others = OtherWorkers::default();
        let Some(known) = self.workers.get(worker) else {
            return others;
        };
        let shares = |other: &FleetWorker| {
            let models = &other.entry.models;
            models
                .iter()
                .any(|model| known.entry.models.contains(model))
        };
        for (name, other) in &self.workers {
            if name != worker && other.serves() && shares(other) {
                let (failed, answered) = other.breaker.counts();
                others.workers += 1;
                others.failed = others.failed.saturating_add(failed);
                others.answered = others.answered.saturating_add(answered);
            }
        }
        others
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
        let before = known.breaker.admits();
        known.breaker.begin(now);
        known.breaker_change(before)
    }

    /// Lets time pass for the circuit breakers.
    pub(crate) fn tick(&mut self, now: Instant) -> FleetChange {
        let mut change = FleetChange::None;
        for (worker, known) in &mut self.workers {
            let before = known.breaker.admits();
            known.breaker.tick(now);
            if known.breaker_change(before) != FleetChange::None {
                tracing::info!(%worker, breaker = known.breaker.label(), "worker is used again");
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
            asks_sleep: !worker.sleep.is_absent,
        };
        self.workers.values().map(target).collect()
    }

    /// Requests wait for the model, all of whose workers sleep: one of them is to be woken.
    pub(crate) fn want_awake(&mut self, model: &str) -> FleetChange {
        let sleeps = |worker: &&mut FleetWorker| {
            worker.health == WorkerHealth::Asleep && worker.names(model)
        };
        let mut asleep = self.workers.values_mut().filter(sleeps);
        // One that is woken already comes first.
        if let Some(first) = asleep.next()
            && !first.sleep.is_wanted
            && !asleep.any(|worker| worker.sleep.is_wanted)
        {
            let worker = first.entry.worker.clone();
            tracing::info!(%worker, model, "requests wait, worker is to be woken");
            first.sleep.is_wanted = true;
        }
        FleetChange::None
    }

    /// The addresses of workers that are to be woken.
    pub(crate) fn wake_targets(&self) -> Vec<ProbeTarget> {
        let mut targets = self.probe_targets();
        targets.retain(|target| {
            let worker = self.workers.get(&target.worker);
            worker.is_some_and(|worker| {
                worker.sleep.is_wanted && worker.health == WorkerHealth::Asleep
            })
        });
        targets
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
            renewed: now,
            expired: false,
            health: WorkerHealth::default(),
            failure: None,
            tls_error: None,
            load_error: None,
            breaker: Breaker::default(),
            checks: RegistrationChecks::default(),
            sleep: SleepRoutes::default(),
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
        let serves_it = self.names(model);
        let checks = self.checks.models.get(base);
        let check = checks.and_then(|checks| checks.tokens.rendering(route));
        self.serves()
            && !self.breaker.passes_over()
            && serves_it
            && check.is_some_and(CheckResult::passed)
    }

    /// Why it gets no requests, in words.
    pub(crate) fn why_unhealthy(&self) -> String {
        match (&self.tls_error, self.failure) {
            (Some(why), _) => format!("TLS: {why}"),
            (None, Some(failure)) => failure.words().to_owned(),
            (None, None) => String::new(),
        }
    }

    /// The model is one of its base models or adapters.
    pub(crate) fn names(&self, model: &str) -> bool {
        self.entry.models.iter().any(|name| name == model)
            || self.entry.loras.iter().any(|lora| lora.name == model)
    }

    /// It answers, and no shim registers it: it is routed by load.
    pub(crate) const fn is_unregistered(&self) -> bool {
        !self.registered && self.health.usable()
    }

    /// What a change of the breaker means for requests.
    fn breaker_change(&self, before: Admits) -> FleetChange {
        if before == self.breaker.admits() {
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
