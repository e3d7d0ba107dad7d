//! What runs somewhere: its clock, its way to the plane, and what happens to it next.

use std::cmp::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Broadcast, LogMessage, RegistryEvent, Reply as ReplyTo, ServiceRequest};
use warmroute_proto::{EngineHealth, EngineSeq};
use warmroute_router::sim::EngineRequest;
use warmroute_shim::engine::EngineEvent;
use warmroute_shim::source::ReplayId;

use super::World;
use super::deaf::SubscriptionState;
use super::faults::Fault;
use super::plane::{At, Op, Reply};
use super::process::Process;
use super::sim_plane::{ConnectionState, InfoAnswer, Listing, Outbox};
use super::streams::Streams;

/// Without an answer of the log an indexer credits nothing 2.5 s after it ran on, by its own clock.
const CLOCK_UNSEEN_MAX: Duration = Duration::from_millis(2_600);

/// A machine's own time, which runs a little fast or slow.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    /// Parts per million that it is too fast.
    pub(super) drift: i64,
}

impl Clock {
    /// What this clock measures from one moment to another.
    pub(super) fn measured(&self, from: At, to: At) -> Duration {
        scaled(to.saturating_sub(from), 1_000_000 + self.drift, 1_000_000)
    }

    /// How long the world takes for so much of this clock's time.
    pub(super) fn span(&self, local: Duration) -> Duration {
        scaled(local, 1_000_000, 1_000_000 + self.drift)
    }
}

fn scaled(time: Duration, by: i64, of: i64) -> Duration {
    let ns = i128::try_from(time.as_nanos()).unwrap() * i128::from(by) / i128::from(of);
    Duration::from_nanos(u64::try_from(ns).unwrap())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Shim(usize),
    Indexer(usize),
    Router(usize),
}

pub(super) struct Host {
    pub(super) kind: Kind,
    /// Counts processes: what was meant for an earlier one is lost with it.
    pub(super) life: u64,
    pub(super) is_up: bool,
    pub(super) is_paused: bool,
    /// Since when its machine is suspended, clocks and all.
    pub(super) suspended_since: Option<At>,
    /// The time for which the present process's clock stood.
    pub(super) clock_stood: Duration,
    /// The log's clock when the machine was resumed, until the log answered later than that.
    pub(super) clock_unseen: Option<u64>,
    /// Its subscriptions, which the server may remove while the connection stays.
    pub(super) subscriptions: SubscriptionState,
    /// It started, was cut off, or stood still.
    pub(super) disturbed_at: At,
    /// The product's process.
    pub(super) running: Option<Box<Running>>,
    /// It stood still up to this moment.
    pub(super) stood_until: At,
    /// Inputs that arrived while it did not run.
    pub(super) waiting: Vec<Input>,
    pub(super) clock: Clock,
    /// Nothing comes or goes between it and the plane.
    pub(super) is_cut: bool,
    /// The state that its client library shows, some time later.
    pub(super) seems_up: bool,
    /// One connection keeps its order, each way.
    pub(super) sent_until: At,
    pub(super) received_until: At,
    pub(super) zmq_until: At,
    /// What goes between it and the plane waits in its connection until then.
    pub(super) stalled_until: At,
}

impl World {
    pub(super) fn start_soon(&mut self, host: usize) {
        let after = self.millis(1..1_000);
        self.plan(after, Event::Start(host));
    }

    pub(super) fn start(&mut self, host: usize) {
        if std::mem::replace(&mut self.hosts[host].is_up, true) {
            return;
        }
        self.hosts[host].life += 1;
        self.disturb(host);
        self.hosts[host].seems_up = !self.hosts[host].is_cut;
        match self.hosts[host].kind {
            Kind::Shim(at) => self.start_shim(at),
            Kind::Indexer(at) => self.start_indexer(at),
            Kind::Router(at) => self.start_router(at),
        }
    }

    pub(super) fn disturb(&mut self, host: usize) {
        let node = &mut self.hosts[host];
        node.disturbed_at = node.disturbed_at.max(self.now);
    }

    pub(super) fn crash(&mut self, host: usize) -> bool {
        let did_run = self.crash_for_good(host);
        let after = self.millis(1..9_000);
        self.fault_lasts(after);
        self.plan(after, Event::Start(host));
        did_run
    }

    /// Did it run?
    pub(super) fn crash_for_good(&mut self, host: usize) -> bool {
        let node = &mut self.hosts[host];
        let life = node.life;
        let did_run = std::mem::replace(&mut node.is_up, false);
        node.life += 1;
        node.is_paused = false;
        node.suspended_since = None;
        node.clock_stood = Duration::ZERO;
        node.clock_unseen = None;
        node.waiting.clear();
        // The next process has a connection of its own; what is on its way in this one comes.
        node.stalled_until = self.now;
        let kind = node.kind;
        self.kill_process(host);
        match kind {
            Kind::Shim(at) => self.shim_is_gone(at),
            Kind::Indexer(at) => self.indexer_is_gone(at),
            Kind::Router(at) => self.router_is_gone(at, life),
        }
        did_run
    }

    pub(super) fn cut(&mut self, host: usize) -> bool {
        let after = self.millis(10..12_000);
        self.fault_lasts(after);
        self.plan(Duration::ZERO, Event::Link(host, false));
        self.plan(after, Event::Link(host, true));
        !self.hosts[host].is_cut
    }

    pub(super) fn cut_all(&mut self) -> bool {
        self.cut_all_for(10..10_000, 4_000);
        self.hosts.iter().any(|host| !host.is_cut)
    }

    pub(super) fn cut_all_for(&mut self, away: std::ops::Range<u64>, spread: u64) {
        let away = self.millis(away);
        for host in 0..self.hosts.len() {
            self.plan(Duration::ZERO, Event::Link(host, false));
            let after = away + self.millis(0..spread);
            self.fault_lasts(after);
            self.plan(after, Event::Link(host, true));
        }
    }

    pub(super) fn pause(&mut self, host: usize) -> bool {
        let after = self.millis(10..20_000);
        if !self.hosts[host].is_up {
            return false;
        }
        self.fault_lasts(after);
        self.hosts[host].is_paused = true;
        self.plan(after, Event::Resume(host));
        true
    }

    /// Whether a resumed process can yet believe what is older than its clock shows.
    pub(super) fn is_clock_unseen(&self, host: usize) -> bool {
        let node = &self.hosts[host];
        node.clock_unseen.is_some() && self.now < node.stood_until + CLOCK_UNSEEN_MAX
    }

    /// A virtual machine is suspended: its clocks stand still as well.
    pub(super) fn suspend(&mut self, host: usize) -> bool {
        let is_suspended = !self.hosts[host].is_paused && self.pause(host);
        if is_suspended {
            self.hosts[host].suspended_since = Some(self.now);
        }
        is_suspended
    }

    /// All waiting inputs arrive together, and every timer is late.
    pub(super) fn resume(&mut self, host: usize) {
        if std::mem::replace(&mut self.hosts[host].is_paused, false) {
            self.hosts[host].stood_until = self.now;
            self.disturb(host);
        }
        if let Some(since) = self.hosts[host].suspended_since.take() {
            let stood = self.now.saturating_sub(since);
            self.hosts[host].clock_stood += stood;
            self.hosts[host].clock_unseen = Some(self.plane.clock(self.now));
        }
        let waiting = std::mem::take(&mut self.hosts[host].waiting);
        self.end_standstill(host, waiting);
    }
}

/// A product's process, and what the world holds of it.
pub(super) struct Running {
    pub(super) process: Process,
    pub(super) outbox: Outbox,
    pub(super) connection: ConnectionState,
    pub(super) streams: Streams,
    pub(super) stop: CancellationToken,
    /// When it was asked to end.
    pub(super) ends_since: Option<At>,
}

/// Something that comes to a process.
#[derive(Debug)]
pub(super) enum Input {
    Timer(Timer),
    /// The client library reports the plane as reachable or not.
    Connection(bool),
    /// The server's error text about a permission.
    Refused(String),
    Reply(Then, Reply),
    Broadcast(Broadcast),
    Health(oneshot::Sender<EngineHealth>, EngineHealth),
    Info(oneshot::Sender<InfoAnswer>, InfoAnswer),
    Engine(EngineEvent),
    /// A checkpoint is on the disk.
    Saved(Bytes),
    /// Messages of a tail, over its connection of this number.
    Tail(u64, u64, Vec<LogMessage>),
    TailEnded(u64),
    /// An event of a registry watch.
    Registry(u64, RegistryEvent),
    /// A request to a service of a process.
    Request(ProcessId, String, ServiceRequest),
    /// Its answer.
    Served(ReplyTo, Bytes),
    /// No process serves the subject.
    Unserved(ReplyTo),
    /// An engine's answer to a router's probe.
    Probed {
        engine: usize,
        to: oneshot::Sender<Listing>,
        listing: Listing,
    },
    /// An engine's answer to a request.
    Http(u64, Http),
}

/// A host's process: what comes for another one of the same host is lost.
pub(super) type ProcessId = (usize, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Http {
    /// The connection is refused.
    Refused,
    /// The request is not to its liking.
    Rejected,
    /// An error status.
    Failed,
    /// The answer ends with an error.
    ErrorEvent,
    FirstToken,
    /// A block of tokens more.
    Block,
    /// The answer is complete: with the prompt tokens that were cached, if it says so.
    Done(Option<usize>),
    /// The connection broke.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    Health,
    Arrive,
    /// A request's client leaves.
    Leave(u64),
    Probe,
}

/// What a process goes on with once it is answered.
#[derive(Debug)]
pub(super) enum Then {
    Process(oneshot::Sender<Reply>),
    Nothing,
}

#[derive(Debug)]
pub(super) enum Event {
    Host {
        host: usize,
        life: u64,
        input: Input,
    },
    /// A question reaches the plane.
    Plane {
        host: usize,
        life: u64,
        op: Op,
        then: Then,
        give_up: At,
    },
    /// For a host, and one of its tails.
    Pump(usize, u64),
    /// A process's client, which closed its connection, has another one.
    Reconnected(ProcessId),
    /// Every process runs up to now.
    Beat,
    /// A process runs up to now.
    Run(ProcessId),
    Expire(String),
    Engine(usize),
    Connect {
        shim: usize,
        life: u64,
        engine_life: u64,
    },
    Replay {
        shim: usize,
        life: u64,
        id: ReplayId,
        from: EngineSeq,
    },
    /// A request reaches an engine.
    Submit {
        engine: usize,
        from: ProcessId,
        no: u64,
        request: Box<EngineRequest>,
    },
    /// A client of an engine is gone, with one request or all.
    HangUp {
        engine: usize,
        from: ProcessId,
        no: Option<u64>,
    },
    /// A router's probe reaches an engine.
    ProbeEngine {
        engine: usize,
        from: ProcessId,
        to: oneshot::Sender<Listing>,
    },
    Start(usize),
    Resume(usize),
    Link(usize, bool),
    EngineStart(usize),
    TroubleOver(usize),
    Fault(Fault),
    Strike,
    /// Stalls some connections.
    StallSome,
    Look,
}

/// What happens at a moment; what was planned first comes first.
pub(super) struct Planned {
    pub(super) at: At,
    pub(super) order: u64,
    pub(super) event: Event,
}

impl PartialEq for Planned {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Planned {}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Planned {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap gives its greatest first.
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}
