//! The simulated fleet: engines, routers and the index, driven by one queue of events in virtual time.
//!
//! A request's way is the served one: its router hashes the prompt, asks the index, decides and
//! accounts in one step; the engine takes it; its first token, every further block and its end are
//! noted where they were accounted. Routing itself takes no time.
//!
//! Everything is ordered by (time, sequence number), so that equal inputs give equal outcomes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use warmroute_proto::load::SlotEnd;
use warmroute_proto::query::IndexAnswer;
use warmroute_proto::{Change, DpRank, Seed, Source};

use super::Fault;
use super::arrivals::{Arrival, Arrivals};
use super::index::{Index, Mirror};
use super::outcome::{Done, Outcome};
use super::replicas::{AdmissionFailed, Place, ReplicaSetup, Replicas, Told};
use super::trace::Trace;
use crate::sim::{Config, Engine, Request, RequestId, StepOutcome};
use warmroute_route::sync::LAZY_PAUSE;
use warmroute_route::{AdmitError, Decision, Prompt, SlotEvent};

/// A fleet and those who route to it.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) workers: usize,
    pub(super) engine: Config,
    /// What the first worker's steps take longer by, and until when.
    pub(super) slow: Slow,
    pub(super) replicas: ReplicaSetup,
    /// From the end of a step until the index has its events.
    pub(super) event_delay: Duration,
    pub(super) seed: u64,
}

/// A worker that is slower than the others, for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Slow {
    pub(super) times: f64,
    pub(super) until: Duration,
}

impl Slow {
    pub(super) const NONE: Self = Self {
        times: 1.0,
        until: Duration::ZERO,
    };
}

enum Event {
    Arrival {
        request: usize,
    },
    StepEnds {
        worker: usize,
    },
    Told(Box<Told>),
    /// What a router did not tell at once has waited long enough.
    Held {
        router: usize,
    },
    Indexed {
        worker: usize,
        changes: Vec<Change>,
    },
}

struct Queued {
    at: Duration,
    number: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Queued {}

impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// What is to come, soonest first; what was put in first comes first.
#[derive(Default)]
struct Queue {
    heap: BinaryHeap<Reverse<Queued>>,
    next: u64,
}

impl Queue {
    fn push(&mut self, at: Duration, event: Event) {
        let number = self.next;
        self.next += 1;
        self.heap.push(Reverse(Queued { at, number, event }));
    }

    fn pop(&mut self) -> Option<(Duration, Event)> {
        let Reverse(Queued { at, event, .. }) = self.heap.pop()?;
        Some((at, event))
    }
}

/// One engine, its mirror, and its requests.
struct Worker {
    engine: Engine,
    mirror: Mirror,
    /// What the step under way will have done.
    step: StepOutcome,
    is_stepping: bool,
    flights: FxHashMap<RequestId, Flight>,
}

/// A request on an engine.
struct Flight {
    place: Place,
    request: usize,
    arrived: Duration,
    first_token: Duration,
    /// What the index credited to this engine.
    credited_tokens: u64,
    /// What the engine found cached when it first scheduled the request.
    cached_tokens: Option<u64>,
}

/// What a request is decided by, and where it is, for as long as it may be decided again.
struct Movable {
    until: Duration,
    prompt: Prompt,
    answer: IndexAnswer,
    worker: usize,
    id: RequestId,
}

struct World<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    epoch: Instant,
    now: Duration,
    queue: Queue,
    arrivals: Arrivals,
    workers: Vec<Worker>,
    /// The workers' names, in order.
    sources: Vec<Source>,
    index: Index,
    replicas: Replicas,
    /// By router: what goes with its next message.
    held: Vec<Vec<Told>>,
    /// Requests that may still go elsewhere.
    movable: BTreeMap<Place, Movable>,
    outcome: Outcome,
}

/// Plays all arrivals to their end. `epoch` names the virtual time's beginning; only differences
/// matter.
pub(super) fn run(
    trace: &Trace,
    mut arrivals: Arrivals,
    setup: &Setup,
    epoch: Instant,
) -> Result<Outcome, Fault> {
    let sources: Vec<Source> = (0..setup.workers).map(source).collect();
    let size = setup.engine.block_size;
    let mut queue = Queue::default();
    for Arrival { at, request } in std::mem::take(&mut arrivals.first) {
        queue.push(at, Event::Arrival { request });
    }
    let mut world = World {
        trace,
        setup,
        epoch,
        now: Duration::ZERO,
        queue,
        arrivals,
        workers: (0..setup.workers)
            .map(|number| worker(setup, number))
            .collect(),
        index: Index::new(sources.iter().cloned()),
        replicas: Replicas::new(&setup.replicas, &sources, size, setup.seed),
        held: (0..setup.replicas.routers).map(|_| Vec::new()).collect(),
        movable: BTreeMap::new(),
        sources,
        outcome: Outcome::default(),
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

fn worker(setup: &Setup, number: usize) -> Worker {
    let life = setup.seed.wrapping_mul(1 << 16).wrapping_add(number as u64);
    Worker {
        engine: Engine::new(Config {
            life,
            ..setup.engine.clone()
        }),
        mirror: Mirror::default(),
        step: StepOutcome::default(),
        is_stepping: false,
        flights: FxHashMap::default(),
    }
}

impl World<'_> {
    fn handle(&mut self, event: Event) -> Result<(), Fault> {
        match event {
            Event::Arrival { request } => self.arrive(request)?,
            Event::StepEnds { worker } => self.step_ends(worker)?,
            Event::Told(told) => self.hear(&told)?,
            Event::Held { router } => self.release(router),
            Event::Indexed { worker, changes } => self.index.apply(worker, &changes)?,
        }
        Ok(())
    }

    fn arrive(&mut self, request: usize) -> Result<(), Fault> {
        let asked = &self.trace.requests[request];
        let tokens = asked.prompt();
        let router = self.replicas.next();
        let prompt = Prompt::new(&tokens, self.setup.engine.block_size, Seed::PLAIN);
        let answer = self.index.answer(prompt.blocks());
        let instant = self.epoch + self.now;
        self.outcome.arrived(asked);
        let (admitted, told) = match self.replicas.admit(router, &prompt, &answer, instant) {
            Ok(admitted) => admitted,
            Err(AdmissionFailed::Router(AdmitError::Refused(_))) => {
                return self.refuse(request);
            }
            Err(AdmissionFailed::Router(AdmitError::Ledger(error))) => {
                return Err(Fault::Ledger(error));
            }
            Err(AdmissionFailed::Fault(fault)) => return Err(fault),
        };
        self.tell(told);
        self.outcome.decided(&admitted.decision);
        let place = Place {
            router,
            slot: admitted.slot,
        };
        let flight = Flight {
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
            let movable = Movable {
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

    /// A request comes to the engine of its source; none if that does not take it.
    fn submit(
        &mut self,
        source: &Source,
        prompt: Vec<u32>,
        flight: Flight,
    ) -> Result<Option<(usize, RequestId)>, Fault> {
        let worker = self.sources.binary_search(source);
        let worker = worker.map_err(|_| Fault::UnknownSource)?;
        let asked = &self.trace.requests[flight.request];
        let submitted = self.workers[worker].engine.submit(Request {
            prompt,
            max_tokens: asked.output_tokens as usize,
            ..Request::default()
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

    fn hear(&mut self, told: &Told) -> Result<(), Fault> {
        for place in self.replicas.hear(told, self.epoch + self.now) {
            self.reconsider(place)?;
        }
        Ok(())
    }

    /// A router knows more than when it decided. The engine that has the request drops it at once, with
    /// what a step under way does for it; the step takes no shorter for that.
    fn reconsider(&mut self, place: Place) -> Result<(), Fault> {
        let Some(movable) = self.movable.get(&place) else {
            return Ok(());
        };
        let (prompt, answer) = (&movable.prompt, &movable.answer);
        let now = self.epoch + self.now;
        let moved = self.replicas.reconsider(place, prompt, answer, now)?;
        let Some((admitted, told)) = moved else {
            return Ok(());
        };
        self.tell(told);
        let Some(Movable { worker, id, .. }) = self.movable.remove(&place) else {
            return Ok(());
        };
        let left = &mut self.workers[worker];
        left.engine.abort(id);
        let flight = left.flights.remove(&id).ok_or(Fault::UnknownFlight)?;
        let flight = Flight {
            place: Place {
                slot: admitted.slot,
                ..place
            },
            credited_tokens: credited(&admitted.decision),
            cached_tokens: None,
            ..flight
        };
        let prompt = self.trace.requests[flight.request].prompt();
        self.outcome.moved += 1;
        self.submit(&admitted.decision.source, prompt, flight)?;
        Ok(())
    }

    fn refuse(&mut self, request: usize) -> Result<(), Fault> {
        self.outcome.refused += 1;
        self.ended(request);
        Ok(())
    }

    /// Lets an idle engine that has something to do begin.
    fn begin_step(&mut self, worker: usize) {
        let at = &mut self.workers[worker];
        if at.is_stepping || !at.engine.has_requests() {
            return;
        }
        at.engine.step_into(&mut at.step);
        at.is_stepping = true;
        let slow = self.setup.slow;
        let takes = if worker == 0 && self.now < slow.until {
            at.step.duration.mul_f64(slow.times)
        } else {
            at.step.duration
        };
        self.outcome.busy += takes;
        let ends = self.now + takes;
        self.queue.push(ends, Event::StepEnds { worker });
    }

    fn step_ends(&mut self, worker: usize) -> Result<(), Fault> {
        let step = std::mem::take(&mut self.workers[worker].step);
        self.workers[worker].is_stepping = false;
        let changes = self.workers[worker].mirror.take(&step.events)?;
        if !changes.is_empty() {
            let indexed = self.now + self.setup.event_delay;
            self.queue.push(indexed, Event::Indexed { worker, changes });
        }
        self.outcome.preemptions += step.preempted.len() as u64;
        for admitted in &step.admitted {
            // Not those that went elsewhere meanwhile.
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
        self.workers[worker].step = step;
        self.begin_step(worker);
        Ok(())
    }

    fn count_share(&mut self, worker: usize, flight: &Flight) {
        let slow = self.setup.slow;
        if slow == Slow::NONE {
            return;
        }
        let share = if flight.arrived < slow.until {
            &mut self.outcome.slow
        } else {
            &mut self.outcome.later
        };
        share.of_all += 1;
        share.of_first += u64::from(worker == 0);
    }

    fn finished(&mut self, flight: &Flight) -> Result<(), Fault> {
        self.end(flight.place, SlotEnd::Completed)?;
        self.outcome.finished(Done {
            ttft: flight.first_token - flight.arrived,
            decode: self.now - flight.first_token,
            output_tokens: self.trace.requests[flight.request].output_tokens,
            credited_tokens: flight.credited_tokens,
            cached_tokens: flight.cached_tokens.unwrap_or_default(),
        });
        self.ended(flight.request);
        Ok(())
    }

    fn end(&mut self, place: Place, end: SlotEnd) -> Result<(), Fault> {
        let counter = place.slot;
        self.note(place, SlotEvent::End { counter, end })
    }

    fn ended(&mut self, request: usize) {
        if let Some(next) = self.arrivals.after(self.trace, request, self.now) {
            let request = next.request;
            self.queue.push(next.at, Event::Arrival { request });
        }
    }

    fn note(&mut self, place: Place, event: SlotEvent) -> Result<(), Fault> {
        let told = self
            .replicas
            .note(place.router, event, self.epoch + self.now)?;
        match told {
            Some(told) if !event.is_urgent() => self.hold(told),
            told => self.tell(told),
        }
        Ok(())
    }

    fn hold(&mut self, told: Told) {
        let router = told.from;
        if self.held[router].is_empty() {
            let due = self.now + LAZY_PAUSE;
            self.queue.push(due, Event::Held { router });
        }
        self.held[router].push(told);
    }

    /// Behind what was held.
    fn tell(&mut self, told: Option<Told>) {
        if let Some(told) = told {
            let router = told.from;
            self.held[router].push(told);
            self.release(router);
        }
    }

    fn release(&mut self, router: usize) {
        let Some(delay) = self.replicas.sync_delay() else {
            return;
        };
        for told in std::mem::take(&mut self.held[router]) {
            let heard = self.now + delay;
            self.queue.push(heard, Event::Told(Box::new(told)));
        }
    }

    fn finish(mut self) -> Outcome {
        for worker in &self.workers {
            self.outcome.loads.push(worker.engine.totals());
        }
        for counts in self.replicas.counts() {
            self.outcome.stalls += counts.stalls;
            self.outcome.open_slots += counts.open_slots;
        }
        (self.outcome.told, self.outcome.told_bytes) = self.replicas.told();
        self.outcome.took = self.now;
        self.outcome
    }
}

fn credited(decision: &Decision) -> u64 {
    u64::from(decision.claim.blocks) * u64::from(decision.claim.block_tokens)
}
