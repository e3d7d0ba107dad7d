//! A small deterministic world: engines, shims, indexers and routers around one plane, under
//! faults.
//!
//! Shims and indexers are the product's own services, tasks and all: each runs in a tokio runtime
//! whose clock the world moves (`process`), on a simulated plane, engine and disk (`sim_plane`,
//! `shells`, `streams`, `services`). So are a router's replication, index client, rechecks, clock,
//! registry follower and health checks (`router`), with clients in its process (`client`). Engines
//! are the engine model with vLLM's wire format. Around them: virtual time, clocks that drift, links
//! that delay, lose, repeat and reorder, a log that is trimmed, cut, rolled back and recreated, a
//! registry with leases. Why it is built so: `docs/adr/0014-simulated-shells.md`.
//!
//! A seed is the whole input: it draws the fleet, the rates of the faults and their moments. After
//! the storm all faults stop, and the world must be right again within a bounded time. `check` has
//! the rules that hold always and those that hold in the end.
//!
//! Not here: sockets, threads, HTTP, NATS itself; the tests with real processes have those. Half of
//! the worlds have routers; replicas alone have a world of their own
//! (`router/route/src/sync/tests/world.rs`).
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::wildcard_enum_match_arm,
    reason = "a harness fails by panicking, and answers of the wrong kind are all alike"
)]

mod breakage;
mod check;
mod client;
mod core_bus;
mod deaf;
mod engine;
mod faults;
mod host;
mod indexer;
pub mod life;
pub mod model;
mod plane;
mod process;
mod replica;
mod requests;
mod router;
mod services;
mod shells;
mod shim;
mod sim_plane;
mod strange;
mod stranger;
mod streams;
mod trouble;
mod wire;

use std::collections::BinaryHeap;
use std::time::Duration;

use fastrand::Rng;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Namespace, StreamIdentity};
use warmroute_shim::source::GenerationCounts;

pub use check::Report;
use check::{Checks, Vouched};
pub use core_bus::WorldPlane;
use deaf::SubscriptionState;
use engine::EngineNode;
pub use faults::{Fault, Rates, Scripted, Setting};
use host::{Clock, Event, Host, Kind, Planned};
use indexer::Indexer;
use plane::{At, Log, Plane};
use router::Router;
use shim::Shim;
pub use trouble::{Losses, Trouble};
use wire::{LaterDice, MessageDice};

/// A rule that a test breaks on purpose, to see that breaking it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breakage {
    /// A restart whose replay begins like the life before is believed.
    PlausibleRestart,
    /// The next generation is taken from the key alone.
    GenerationRolledBack,
    /// Records of older generations are taken as if they were of the present one.
    NoFence,
    /// Digests are not compared.
    NoDigest,
    /// A run goes on behind a block that is not held.
    JumpOverHole,
    /// A shim takes a record as acknowledged once it is sent.
    AckBeforeApply,
    /// A snapshot claims to go up to the log's end, wherever it was cut.
    SnapshotWithoutPosition,
    /// A snapshot's blocks are of another moment than its numbers.
    ImageNotACut,
    /// Routers forget a worker immediately when its lease is gone.
    LeasesActedUpon,
    /// Routers do not look at what health checks say.
    HealthIgnored,
    /// Routers believe any replica, however far behind.
    OvertakenBelieved,
    /// A client that goes leaves its slot behind.
    SlotLeaked,
    /// What comes proves as of when it comes, however long it was on its way.
    AgeIgnored,
    /// A heartbeat speaks for whomever it names, whatever its subject.
    SubjectIgnored,
    /// The record at the position is not compared with the one that was read.
    RefillUnseen,
    /// A lease is renewed only once it has expired.
    LeaseRenewedLate,
    /// A torn snapshot is restored: the blocks that could be read, under the whole one's numbers.
    TornSnapshotRestored,
    /// A registry watch does not report that a key is gone.
    DeleteMissed,
    /// Heartbeats credit the acknowledged state however long newer changes wait for the log.
    BacklogIgnored,
    /// A suspended process takes the log's clock for one that stood still as well.
    StandstillUnseen,
    /// An index says of a block that was stored again that it was held all the time.
    InterruptionUnseen,
    /// A client does not make subscriptions again that the server removed.
    DeafForGood,
    /// A client whose subscriptions are missing is taken for connected.
    DeafIsConnected,
    /// A source with an event of an unknown type is wrong until its engine clears its cache.
    StrangeForGood,
    /// A shim claims a generation at each batch that shows its mirror to be wrong.
    GenerationsUnlimited,
    /// A router counts an engine's errors as answers.
    ErrorsAreAnswers,
    /// Requests stay at a source that is lost.
    LossesIgnored,
}

impl Breakage {
    pub const ALL: [Self; 27] = [
        Self::PlausibleRestart,
        Self::GenerationRolledBack,
        Self::NoFence,
        Self::NoDigest,
        Self::JumpOverHole,
        Self::AckBeforeApply,
        Self::SnapshotWithoutPosition,
        Self::ImageNotACut,
        Self::LeasesActedUpon,
        Self::HealthIgnored,
        Self::OvertakenBelieved,
        Self::SlotLeaked,
        Self::AgeIgnored,
        Self::SubjectIgnored,
        Self::RefillUnseen,
        Self::LeaseRenewedLate,
        Self::TornSnapshotRestored,
        Self::DeleteMissed,
        Self::BacklogIgnored,
        Self::StandstillUnseen,
        Self::InterruptionUnseen,
        Self::DeafForGood,
        Self::DeafIsConnected,
        Self::StrangeForGood,
        Self::GenerationsUnlimited,
        Self::ErrorsAreAnswers,
        Self::LossesIgnored,
    ];
}

/// What to run.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub seed: u64,
    pub plane: WorldPlane,
    pub broken: Option<Breakage>,
    /// Faults at fixed moments, on top of the seed's.
    pub script: Vec<Scripted>,
    /// No faults but the script's.
    pub is_calm: bool,
    pub setting: Option<Setting>,
    pub is_traced: bool,
}

impl Plan {
    #[must_use]
    pub fn of(seed: u64) -> Self {
        Self {
            seed,
            ..Self::default()
        }
    }
}

/// How it went.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub report: Report,
    pub losses: Losses,
    /// The first rule that did not hold, and when.
    pub broken: Option<String>,
    pub trace: Vec<String>,
}

/// One simulated world and its event queue.
pub struct World {
    now: At,
    queue: BinaryHeap<Planned>,
    planned: u64,
    rng: Rng,
    dice: LaterDice,
    rates: Rates,
    broken: Option<Breakage>,
    plane: Plane,
    hosts: Vec<Host>,
    engines: Vec<EngineNode>,
    shims: Vec<Shim>,
    indexers: Vec<Indexer>,
    routers: Vec<Router>,
    subjects: Subjects,
    checks: Checks,
    vouched: Vouched,
    losses: Losses,
    /// The faults are over since then.
    calm_since: Option<At>,
    /// Before, the network let single messages wait.
    was_late: bool,
    trace: Option<Vec<String>>,
}

/// Runs one plan to its end.
#[must_use]
pub fn run(plan: &Plan) -> Outcome {
    // What the shells draw is the thread's.
    fastrand::seed(plan.seed);
    let mut world = World::new(plan);
    world.run(plan);
    for at in 0..world.indexers.len() {
        world.harvest(at);
    }
    Outcome {
        report: world.checks.report(),
        losses: world.losses,
        broken: world.checks.broken.take(),
        trace: world.trace.unwrap_or_default(),
    }
}

fn namespace() -> Namespace {
    Namespace::from("t")
}

impl World {
    fn new(plan: &Plan) -> Self {
        let mut rng = Rng::with_seed(plan.seed);
        let mut rates = Rates::draw(&mut rng, plan.is_calm);
        // From a generator of their own, so that a seed without routers gives an unchanged world.
        rates.draw_routers(plan.seed);
        let mut dice = Rng::with_seed(plan.seed ^ 0x057A_1175);
        rates.draw_stalls(&mut dice);
        if plan.plane == WorldPlane::Core {
            // They are drivers of the world's registry, not of the product's plane.
            rates.routers = 0;
        }
        if let Some(setting) = plan.setting {
            rates.settle(setting, plan.seed);
        }
        let log = Log::new(
            StreamIdentity {
                created_unix_ns: 1,
                nonce: rng.u64(..),
            },
            rates.log_messages_max,
        );
        let mut world = Self {
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            planned: 0,
            rates,
            broken: plan.broken,
            plane: Plane::new(log, plan.plane),
            hosts: Vec::new(),
            engines: Vec::new(),
            shims: Vec::new(),
            indexers: Vec::new(),
            routers: Vec::new(),
            subjects: Subjects::new(&namespace()),
            checks: Checks::default(),
            vouched: Vouched::default(),
            losses: Losses::default(),
            calm_since: None,
            was_late: false,
            trace: plan.is_traced.then(Vec::new),
            rng,
            dice: LaterDice {
                later: dice,
                fleets: Rng::with_seed(plan.seed ^ 0xF1EE_7000),
                messages: MessageDice::Common,
            },
        };
        // A generation whose key no other process has is lost with its shim (ADR 26).
        world.checks.history_lost = plan.plane == WorldPlane::Core;
        world.build();
        world
    }

    fn build(&mut self) {
        for worker in 0..self.rates.workers {
            let mut engine = EngineNode::draw(worker, &self.rates, &mut self.rng);
            while !self.rates.suits(&engine.life.config) {
                engine = EngineNode::draw(worker, &self.rates, &mut self.rng);
            }
            self.engines.push(engine);
            self.plan_engine(worker);
        }
        // Each engine has a shim, and one in waiting that only a fault starts.
        for at in 0..2 * self.rates.workers {
            let host = self.add_host(Kind::Shim(at));
            let shim = Shim {
                host,
                worker: at / 2,
                keeps_state: self.rng.u8(0..3) > 0,
                disk: None,
                handle: None,
                feed: None,
                is_joined: false,
                last_read: None,
                begun: Vec::new(),
                counts: GenerationCounts::default(),
                begun_for: Vec::new(),
                replay_begins: None,
                heard: Vec::new(),
            };
            self.shims.push(shim);
            if at % 2 == 0 {
                self.start_soon(host);
            }
        }
        for at in 0..self.rates.indexers {
            let host = self.add_host(Kind::Indexer(at));
            self.indexers.push(Indexer::new(host));
            self.start_soon(host);
        }
        self.build_routers();
    }

    fn build_routers(&mut self) {
        for at in 0..self.rates.routers {
            let host = self.add_host(Kind::Router(at));
            self.routers.push(Router { host, run: None });
            self.start_soon(host);
        }
    }

    fn add_host(&mut self, kind: Kind) -> usize {
        // Drawn for the worlds of earlier seeds.
        let _origin = self.rng.u64(0..100_000);
        let clock = Clock {
            drift: self.rng.i64(-self.rates.drift..=self.rates.drift),
        };
        self.hosts.push(Host {
            kind,
            life: 0,
            is_up: false,
            is_paused: false,
            suspended_since: None,
            clock_stood: Duration::ZERO,
            clock_unseen: None,
            subscriptions: SubscriptionState::default(),
            disturbed_at: Duration::ZERO,
            running: None,
            stood_until: Duration::ZERO,
            waiting: Vec::new(),
            clock,
            is_cut: false,
            seems_up: true,
            sent_until: Duration::ZERO,
            received_until: Duration::ZERO,
            zmq_until: Duration::ZERO,
            stalled_until: Duration::ZERO,
        });
        self.hosts.len() - 1
    }

    fn run(&mut self, plan: &Plan) {
        for scripted in &plan.script {
            self.plan(scripted.after, Event::Fault(scripted.fault));
        }
        self.plan_strange_faults(plan.seed);
        self.plan(Duration::from_secs(1), Event::Strike);
        self.plan(Duration::from_secs(1), Event::Look);
        self.plan(Duration::from_secs(1), Event::StallSome);
        self.plan(shells::BEAT, Event::Beat);
        while self.checks.broken.is_none()
            && let Some(Planned { at, event, .. }) = self.queue.pop()
        {
            self.now = at;
            self.checks.events += 1;
            self.happen(event);
            if self.calm_since.is_none() && self.now >= self.rates.storm {
                self.calm_down();
            }
            if self.is_over() {
                return;
            }
        }
    }

    fn happen(&mut self, event: Event) {
        let Some(event) = self.as_read(event) else {
            return;
        };
        match event {
            Event::Host { host, life, input } => self.deliver(host, life, input),
            Event::Plane {
                host,
                life,
                op,
                then,
                give_up,
            } => self.ask_plane((host, life), op, then, give_up),
            Event::Pump(host, tail) => self.pump(host, tail),
            Event::Beat => self.beat(),
            Event::Run(process) => self.run_soon(process),
            Event::Expire(key) => {
                if self.plane.expire(self.now, &key) {
                    self.check_expiry(&key);
                }
                self.tell_watchers();
            }
            Event::Engine(engine) => self.engine_works(engine),
            Event::Connect {
                shim,
                life,
                engine_life,
            } => self.connect_zmq(shim, life, engine_life),
            Event::Replay {
                shim,
                life,
                id,
                from,
            } => self.replay(shim, life, id, from),
            Event::Submit {
                engine,
                from,
                no,
                request,
            } => self.serve(engine, from, no, *request),
            Event::HangUp { engine, from, no } => self.hang_up(engine, from, no),
            Event::ProbeEngine { engine, from, to } => self.probe_engine(engine, from, to),
            Event::Resume(host) => self.resume(host),
            Event::Reconnected(process) => self.reconnected(process),
            Event::Start(host) => self.start(host),
            Event::Link(host, is_up) => self.link(host, is_up),
            Event::EngineStart(engine) => self.start_engine(engine),
            Event::TroubleOver(engine) => self.trouble_over(engine),
            Event::Fault(fault) => self.fault(fault),
            Event::Strike => self.strike(),
            Event::StallSome => self.stall_some(),
            Event::Look => self.look_around(),
        }
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>10.6} {}", now.as_secs_f64(), line()));
        }
    }
}
