//! The simulated fleet: engines, routers and index, driven by one event queue in virtual time.
//!
//! A request takes the path of production: its router hashes the prompt, queries the index, decides
//! and opens a slot; the engine runs it; first token, generated blocks and end are recorded at its
//! router. Routing itself takes no time.
//!
//! Events are ordered by (time, sequence number): equal inputs give equal outcomes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use warmroute_proto::load::SlotEnd;
use warmroute_proto::{Change, DpRank, Seed, Source};

use super::SimulationError;
use super::arrivals::{Arrival, Arrivals};
use super::index::{EngineMirror, SimIndex};
use super::outcome::{CompletedRequest, RunOutcome};
use super::replicas::{AdmissionFailed, LoadBroadcast, RouterSetup, SimRouters, SlotPlace};
use crate::sim::{EngineConfig, EngineModel, EngineRequest, RequestId, StepOutcome};
use crate::trace::Trace;
use warmroute_route::sync::LAZY_DELAY;
use warmroute_route::{AdmitError, Decision, IndexReply, Prompt, SlotEvent};

/// A fleet and its routers.
#[derive(Clone, Debug)]
pub(crate) struct FleetSetup {
    pub(crate) workers: usize,
    pub(crate) engine: EngineConfig,
    /// Slowness of the first worker.
    pub(crate) slow: SlowWorkers,
    pub(crate) replicas: RouterSetup,
    /// Time from the end of a step until the index has its events.
    pub(crate) event_delay: Duration,
    pub(crate) seed: u64,
}

/// Factor of the first workers' step times, until a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SlowWorkers {
    pub(crate) count: usize,
    pub(crate) times: f64,
    pub(crate) until: Duration,
}

impl SlowWorkers {
    pub(crate) const NONE: Self = Self {
        count: 0,
        times: 1.0,
        until: Duration::ZERO,
    };
}

enum SimEvent {
    Arrival {
        request: usize,
    },
    StepEnds {
        worker: usize,
    },
    /// What a step produced is at its routers.
    Reported {
        worker: usize,
        step: Box<StepOutcome>,
    },
    Broadcast(Box<LoadBroadcast>),
    /// Messages that are not urgent are due.
    LazyDue {
        router: usize,
    },
    Indexed {
        worker: usize,
        changes: Vec<Change>,
    },
}

struct QueuedEvent {
    at: Duration,
    number: u64,
    event: SimEvent,
}

impl PartialEq for QueuedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for QueuedEvent {}

impl PartialOrd for QueuedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for QueuedEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// Future events, earliest first; equal times in order of insertion.
#[derive(Default)]
struct EventQueue {
    heap: BinaryHeap<Reverse<QueuedEvent>>,
    next: u64,
}

impl EventQueue {
    fn push(&mut self, at: Duration, event: SimEvent) {
        let number = self.next;
        self.next += 1;
        self.heap.push(Reverse(QueuedEvent { at, number, event }));
    }

    fn pop(&mut self) -> Option<(Duration, SimEvent)> {
        let Reverse(QueuedEvent { at, event, .. }) = self.heap.pop()?;
        Some((at, event))
    }
}

/// One engine with its mirror and requests.
struct SimWorker {
    engine: EngineModel,
    mirror: EngineMirror,
    /// Result of the step in progress.
    step: StepOutcome,
    is_stepping: bool,
    /// With asynchronous scheduling: result of the step after it.
    next: Option<StepOutcome>,
    flights: FxHashMap<RequestId, InFlight>,
}

/// A request on an engine.
struct InFlight {
    place: SlotPlace,
    request: usize,
    arrived: Duration,
    first_token: Duration,
    /// Tokens that the index credited to this engine.
    credited_tokens: u64,
    /// Tokens that the engine found cached at first.
    cached_tokens: Option<u64>,
}

/// Inputs of a decision and the request's engine, while the request may be moved.
struct MovableFlight {
    until: Duration,
    prompt: Prompt,
    answer: IndexReply,
    worker: usize,
    id: RequestId,
}

struct SimWorld<'a> {
    trace: &'a Trace,
    setup: &'a FleetSetup,
    epoch: Instant,
    now: Duration,
    queue: EventQueue,
    arrivals: Arrivals,
    workers: Vec<SimWorker>,
    /// Names of the workers, in order.
    sources: Vec<Source>,
    index: SimIndex,
    replicas: SimRouters,
    /// By router: messages that leave with the next urgent one.
    held: Vec<Vec<LoadBroadcast>>,
    /// Requests that may be moved.
    movable: BTreeMap<SlotPlace, MovableFlight>,
    outcome: RunOutcome,
}

/// Runs all arrivals to their end. `epoch` is the start of virtual time; only differences to it are
/// used.
pub(crate) fn run(
    trace: &Trace,
    mut arrivals: Arrivals,
    setup: &FleetSetup,
    epoch: Instant,
) -> Result<RunOutcome, SimulationError> {
    let sources: Vec<Source> = (0..setup.workers).map(source).collect();
    let size = setup.engine.block_size;
    let mut queue = EventQueue::default();
    for Arrival { at, request } in std::mem::take(&mut arrivals.first) {
        queue.push(at, SimEvent::Arrival { request });
    }
    let mut world = SimWorld {
        trace,
        setup,
        epoch,
        now: Duration::ZERO,
        queue,
        arrivals,
        workers: (0..setup.workers)
            .map(|number| worker(setup, number))
            .collect(),
        index: SimIndex::new(sources.iter().cloned()),
        replicas: SimRouters::new(&setup.replicas, &sources, size, setup.seed),
        held: (0..setup.replicas.routers).map(|_| Vec::new()).collect(),
        movable: BTreeMap::new(),
        sources,
        outcome: RunOutcome::default(),
    };
    while let Some((at, event)) = world.queue.pop() {
        world.now = at;
        world.handle(event)?;
    }
    Ok(world.finish())
}

/// Names in the order of their numbers.
fn source(number: usize) -> Source {
    Source {
        worker: format!("worker-{number:06}").as_str().into(),
        dp_rank: DpRank(0),
    }
}

fn worker(setup: &FleetSetup, number: usize) -> SimWorker {
    let life = setup.seed.wrapping_mul(1 << 16).wrapping_add(number as u64);
    SimWorker {
        engine: EngineModel::new(EngineConfig {
            life,
            ..setup.engine.clone()
        }),
        mirror: EngineMirror::default(),
        step: StepOutcome::default(),
        is_stepping: false,
        next: None,
        flights: FxHashMap::default(),
    }
}

impl SimWorld<'_> {
    fn handle(&mut self, event: SimEvent) -> Result<(), SimulationError> {
        match event {
            SimEvent::Arrival { request } => self.arrive(request)?,
            SimEvent::StepEnds { worker } => self.step_ends(worker)?,
            SimEvent::Reported { worker, step } => self.report(worker, &step)?,
            SimEvent::Broadcast(broadcast) => self.receive(&broadcast)?,
            SimEvent::LazyDue { router } => self.release(router),
            SimEvent::Indexed { worker, changes } => self.index.apply(worker, &changes)?,
        }
        Ok(())
    }

    fn arrive(&mut self, request: usize) -> Result<(), SimulationError> {
        let asked = &self.trace.requests[request];
        let tokens = self.trace.prompt(request);
        let router = self.replicas.next();
        let prompt = Prompt::new(&tokens, self.setup.engine.block_size, Seed::PLAIN)
            .with_session(self.trace.session(request));
        let answer = IndexReply::from(self.index.answer(prompt.blocks()));
        let instant = self.epoch + self.now;
        self.outcome.arrived(asked);
        let (admitted, broadcast) = match self.replicas.admit(router, &prompt, &answer, instant) {
            Ok(admitted) => admitted,
            Err(AdmissionFailed::Router(AdmitError::Refused(_))) => {
                return self.refuse(request);
            }
            Err(AdmissionFailed::Router(AdmitError::Ledger(error))) => {
                return Err(SimulationError::Ledger(error));
            }
            Err(AdmissionFailed::Simulation(fault)) => return Err(fault),
        };
        self.send(broadcast);
        let place = SlotPlace {
            router,
            slot: admitted.slot,
        };
        let flight = InFlight {
            place,
            request,
            arrived: self.now,
            first_token: self.now,
            credited_tokens: credited(&admitted.decision),
            cached_tokens: None,
        };
        let Some((worker, id)) = self.submit(&admitted.decision.source, tokens, flight)? else {
            return Ok(());
        };
        if let Some(until) = admitted.movable_until {
            let now = self.now;
            self.movable.retain(|_, movable| movable.until >= now);
            let movable = MovableFlight {
                until: until.saturating_duration_since(self.epoch),
                prompt,
                answer,
                worker,
                id,
            };
            self.movable.insert(place, movable);
        }
        Ok(())
    }

    /// Submits a request to its engine; `None` if the engine rejects it.
    fn submit(
        &mut self,
        source: &Source,
        prompt: Vec<u32>,
        flight: InFlight,
    ) -> Result<Option<(usize, RequestId)>, SimulationError> {
        let worker = self.sources.binary_search(source);
        let worker = worker.map_err(|_| SimulationError::UnknownSource)?;
        let asked = &self.trace.requests[flight.request];
        let submitted = self.workers[worker].engine.submit(EngineRequest {
            prompt,
            max_tokens: asked.output_tokens as usize,
            ..EngineRequest::default()
        });
        let Ok(id) = submitted else {
            self.end(flight.place, SlotEnd::Failed)?;
            self.refuse(flight.request)?;
            return Ok(None);
        };
        self.workers[worker].flights.insert(id, flight);
        self.begin_step(worker);
        Ok(Some((worker, id)))
    }

    fn receive(&mut self, broadcast: &LoadBroadcast) -> Result<(), SimulationError> {
        for place in self.replicas.deliver(broadcast, self.epoch + self.now) {
            self.reconsider(place)?;
        }
        Ok(())
    }

    /// Decides again. The old engine drops the request immediately; a step in progress takes no
    /// shorter.
    fn reconsider(&mut self, place: SlotPlace) -> Result<(), SimulationError> {
        let Some(movable) = self.movable.get(&place) else {
            return Ok(());
        };
        let (prompt, answer) = (&movable.prompt, &movable.answer);
        let now = self.epoch + self.now;
        let moved = self.replicas.reconsider(place, prompt, answer, now)?;
        let Some((admitted, broadcast)) = moved else {
            return Ok(());
        };
        self.send(broadcast);
        let Some(MovableFlight { worker, id, .. }) = self.movable.remove(&place) else {
            return Ok(());
        };
        let left = &mut self.workers[worker];
        left.engine.abort(id);
        let flight = left
            .flights
            .remove(&id)
            .ok_or(SimulationError::UnknownFlight)?;
        let flight = InFlight {
            place: SlotPlace {
                slot: admitted.slot,
                ..place
            },
            credited_tokens: credited(&admitted.decision),
            cached_tokens: None,
            ..flight
        };
        let prompt = self.trace.prompt(flight.request);
        self.outcome.moved += 1;
        self.submit(&admitted.decision.source, prompt, flight)?;
        Ok(())
    }

    fn refuse(&mut self, request: usize) -> Result<(), SimulationError> {
        self.outcome.refused += 1;
        self.ended(request);
        Ok(())
    }

    /// Starts a step of an idle engine: the one that is scheduled, or one of its requests.
    fn begin_step(&mut self, worker: usize) {
        let at = &mut self.workers[worker];
        if at.is_stepping {
            return;
        }
        match at.next.take() {
            Some(next) => at.step = next,
            None if at.engine.has_requests() => at.engine.step_into(&mut at.step),
            None => return,
        }
        at.is_stepping = true;
        if self.setup.engine.profile.async_scheduling && at.engine.has_requests() {
            at.next = Some(at.engine.step());
        }
        let slow = self.setup.slow;
        let takes = if worker < slow.count && self.now < slow.until {
            at.step.duration.mul_f64(slow.times)
        } else {
            at.step.duration
        };
        let ends = self.now + takes;
        self.queue.push(ends, SimEvent::StepEnds { worker });
    }

    fn step_ends(&mut self, worker: usize) -> Result<(), SimulationError> {
        let step = std::mem::take(&mut self.workers[worker].step);
        self.workers[worker].is_stepping = false;
        let changes = self.workers[worker].mirror.take(&step.events)?;
        if !changes.is_empty() {
            let indexed = self.now + self.setup.event_delay;
            self.queue
                .push(indexed, SimEvent::Indexed { worker, changes });
        }
        let latency = self.setup.engine.profile.request_latency;
        if latency.is_zero() {
            self.report(worker, &step)?;
            self.workers[worker].step = step;
        } else {
            let step = Box::new(step);
            let reported = SimEvent::Reported { worker, step };
            self.queue.push(self.now + latency, reported);
        }
        self.begin_step(worker);
        Ok(())
    }

    fn report(&mut self, worker: usize, step: &StepOutcome) -> Result<(), SimulationError> {
        self.outcome.preemptions += step.preempted.len() as u64;
        for admitted in &step.admitted {
            // Moved requests are skipped.
            if let Some(flight) = self.workers[worker].flights.get_mut(&admitted.id) {
                let cached = admitted.cached.total() as u64;
                flight.cached_tokens.get_or_insert(cached);
            }
        }
        let block = self.setup.engine.block_size.tokens();
        for produced in &step.produced {
            let Some(flight) = self.workers[worker].flights.get_mut(&produced.id) else {
                continue;
            };
            let (place, counter) = (flight.place, flight.place.slot);
            if produced.generated == 1 {
                flight.first_token = self.now;
                self.note(place, SlotEvent::FirstToken { counter })?;
            }
            if produced.generated.is_multiple_of(block) {
                self.note(place, SlotEvent::Grow { counter, blocks: 1 })?;
            }
        }
        for finished in &step.finished {
            if let Some(flight) = self.workers[worker].flights.remove(&finished.id) {
                self.count_share(worker, &flight);
                self.finished(&flight)?;
            }
        }
        Ok(())
    }

    fn count_share(&mut self, worker: usize, flight: &InFlight) {
        let slow = self.setup.slow;
        if slow == SlowWorkers::NONE {
            return;
        }
        let share = if flight.arrived < slow.until {
            &mut self.outcome.slow
        } else {
            &mut self.outcome.later
        };
        share.workers = slow.count;
        share.of_all += 1;
        share.of_slow += u64::from(worker < slow.count);
    }

    fn finished(&mut self, flight: &InFlight) -> Result<(), SimulationError> {
        self.end(flight.place, SlotEnd::Completed)?;
        let asked = &self.trace.requests[flight.request];
        self.outcome.finished(CompletedRequest {
            arrived: flight.arrived,
            input_tokens: asked.input_tokens,
            ttft: flight.first_token - flight.arrived,
            decode: self.now - flight.first_token,
            output_tokens: asked.output_tokens,
            credited_tokens: flight.credited_tokens,
            cached_tokens: flight.cached_tokens.unwrap_or_default(),
        });
        self.ended(flight.request);
        Ok(())
    }

    fn end(&mut self, place: SlotPlace, end: SlotEnd) -> Result<(), SimulationError> {
        let counter = place.slot;
        self.note(place, SlotEvent::End { counter, end })
    }

    fn ended(&mut self, request: usize) {
        if let Some(next) = self.arrivals.after(self.trace, request, self.now) {
            let request = next.request;
            self.queue.push(next.at, SimEvent::Arrival { request });
        }
    }

    fn note(&mut self, place: SlotPlace, event: SlotEvent) -> Result<(), SimulationError> {
        let broadcast = self
            .replicas
            .note(place.router, event, self.epoch + self.now)?;
        match broadcast {
            Some(broadcast) if !event.is_urgent() => self.hold(broadcast),
            broadcast => self.send(broadcast),
        }
        Ok(())
    }

    fn hold(&mut self, broadcast: LoadBroadcast) {
        let router = broadcast.from;
        if self.held[router].is_empty() {
            let due = self.now + LAZY_DELAY;
            self.queue.push(due, SimEvent::LazyDue { router });
        }
        self.held[router].push(broadcast);
    }

    /// Sends a message after the held ones.
    fn send(&mut self, broadcast: Option<LoadBroadcast>) {
        if let Some(broadcast) = broadcast {
            let router = broadcast.from;
            self.held[router].push(broadcast);
            self.release(router);
        }
    }

    fn release(&mut self, router: usize) {
        let Some(delay) = self.replicas.sync_delay() else {
            return;
        };
        for broadcast in std::mem::take(&mut self.held[router]) {
            let received = self.now + delay;
            self.queue
                .push(received, SimEvent::Broadcast(Box::new(broadcast)));
        }
    }

    fn finish(mut self) -> RunOutcome {
        for worker in &self.workers {
            self.outcome.loads.push(worker.engine.totals());
        }
        for counts in self.replicas.counts() {
            self.outcome.stalls += counts.stalls;
            self.outcome.open_slots += counts.open_slots;
        }
        (self.outcome.sent, self.outcome.sent_bytes) = self.replicas.sent();
        self.outcome.took = self.now;
        self.outcome
    }
}

fn credited(decision: &Decision) -> u64 {
    u64::from(decision.claim.blocks) * u64::from(decision.claim.block_tokens())
}
