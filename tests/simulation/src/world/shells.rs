//! Runs the product's shells: gives their processes what comes, and the world what they send.
//!
//! A process runs whenever something comes to it, and every [`BEAT`] for its own timers. Each timer
//! fires at its own local time; what the process then sends leaves up to a beat later. The shortest
//! period of a shell is 100 ms.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use warmroute_plane::{Broadcast, Plane};
use warmroute_proto::registry::ResyncRequest;
use warmroute_proto::{EngineHealth, Heartbeat, Record, codec};

use super::core_bus::WorldPlane;
use super::host::{Event, Input, Kind, ProcessId, Running, Then};
use super::plane::{Op, Reply};
use super::process::Process;
use super::sim_plane::{ConnectionState, Outbox, Sent, SimPlane, supervise};
use super::streams::{Reached, Streams};
use super::wire::connection;
use super::{Breakage, World};

/// How often every process runs. An idle run costs as much as one with an input.
pub(super) const BEAT: Duration = Duration::from_millis(50);
/// Two frames of a router are so far apart at most: its clock shows whole milliseconds.
const FRAMES_APART: Duration = Duration::from_millis(2);
/// A client gives up a call to the plane after so long.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// Looks at a process while it works off what waited during a standstill.
const LOOKS: u32 = 16;

/// A process that is asked to end does so within this time, unless it stands still.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// The plane's limit of a message, unless set otherwise.
const MESSAGE_BYTES_MAX: usize = codec::MESSAGE_BYTES_MAX;

/// What routers take for it where messages are small: four blocks of a prompt.
const ROUTERS_BYTES_MAX: usize = 256 + 4 * 8;

impl World {
    /// Starts a host's process. `main` builds the product's service around this plane.
    pub(super) fn run_process<F>(
        &mut self,
        host: usize,
        main: impl FnOnce(Arc<dyn Plane>, Outbox, CancellationToken) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let stop = CancellationToken::new();
        let outbox = Outbox::default();
        let socket = connection(self.hosts[host].seems_up);
        let shows_missing = self.broken != Some(Breakage::DeafIsConnected);
        let bytes_max = match (self.rates.set.record_bytes_max, self.hosts[host].kind) {
            // Queries of a few blocks, with whole answers.
            (Some(_), Kind::Router(_)) => ROUTERS_BYTES_MAX,
            (Some(set), Kind::Shim(_)) => set,
            (Some(_), Kind::Indexer(_)) | (None, _) => MESSAGE_BYTES_MAX,
        };
        let plane_of = self.plane_of(host);
        let mut connection = None;
        let process = Process::start(self.now, || {
            let own = ConnectionState::new(socket, shows_missing);
            let own = connection.insert(own).clone();
            let plane = SimPlane::new(outbox.clone(), own.clone(), bytes_max);
            let service = main(plane_of(plane), outbox.clone(), stop.clone());
            let supervision = supervise(own, outbox.clone());
            async {
                tokio::select! {
                    biased;
                    () = supervision => {}
                    () = service => {}
                }
            }
        });
        let connection = connection.unwrap();
        self.hosts[host].running = Some(Box::new(Running {
            process,
            outbox,
            connection,
            streams: Streams::default(),
            stop,
            ends_since: None,
        }));
        self.on_new_connection(host);
        self.step(host);
    }

    pub(super) fn kill_process(&mut self, host: usize) {
        if let Kind::Indexer(at) = self.hosts[host].kind {
            self.harvest(at);
        }
        self.hosts[host].running = None;
    }

    pub(super) fn beat(&mut self) {
        self.plan(BEAT, Event::Beat);
        for host in 0..self.hosts.len() {
            self.step(host);
        }
    }

    /// The process's own time since its start.
    fn local_age(&self, host: usize) -> Duration {
        let node = &self.hosts[host];
        let started = node.running.as_ref().map(|it| it.process.started());
        let now = node.suspended_since.unwrap_or(self.now);
        let ran_until = now.saturating_sub(node.clock_stood);
        node.clock.measured(started.unwrap_or(ran_until), ran_until)
    }

    /// A process runs until it has nothing left to do now.
    pub(super) fn step(&mut self, host: usize) {
        let age = self.local_age(host);
        let node = &mut self.hosts[host];
        let Some(running) = node.running.as_mut().filter(|_| !node.is_paused) else {
            return;
        };
        running.process.run_until(age);
        self.stepped(host);
    }

    /// All waiting inputs arrive together, and every timer is late. Readers look in between.
    pub(super) fn end_standstill(&mut self, host: usize, waiting: Vec<Input>) {
        let age = self.local_age(host);
        if let Some(running) = &mut self.hosts[host].running {
            running.process.stand_until(age);
        }
        for input in waiting {
            self.accept(host, input);
        }
        for _ in 0..LOOKS {
            if let Some(running) = &mut self.hosts[host].running {
                running.process.run_some();
                self.stepped(host);
            }
            if let Kind::Indexer(at) = self.hosts[host].kind {
                self.check_index(at);
            }
        }
        self.step(host);
    }

    /// A router's frames wait less than a millisecond for each other.
    pub(super) fn run_again(&mut self, host: usize) {
        if let Kind::Router(_) = self.hosts[host].kind {
            self.run_after(host, FRAMES_APART);
        }
    }

    /// The process runs when so much of its time is over.
    pub(super) fn run_after(&mut self, host: usize, local: Duration) {
        // Timers fire late, never early.
        let after = self.hosts[host].clock.span(local) + Duration::from_micros(1);
        let process = self.process(host);
        self.plan(after, Event::Run(process));
    }

    pub(super) fn run_soon(&mut self, (host, life): ProcessId) {
        if self.hosts[host].life == life {
            self.step(host);
        }
    }

    fn stepped(&mut self, host: usize) {
        self.perform(host);
        self.send_answers(host);
        match self.hosts[host].kind {
            Kind::Indexer(at) => self.indexer_ran(at),
            Kind::Router(at) => self.router_ran(at),
            Kind::Shim(_) => {}
        }
        let Some(running) = &self.hosts[host].running else {
            return;
        };
        let since = running.ends_since;
        match (running.process.has_ended(), since) {
            (false, None) => {}
            (false, Some(since)) if self.now < since + ENDS_WITHIN => {}
            (false, Some(_)) => self.fail(format!("host {host} was asked to end, and did not")),
            (true, None) => self.fail(format!("host {host}: its service ended by itself")),
            (true, Some(_)) => {
                self.crash(host);
            }
        }
    }

    /// Asks a process to end. Was there one?
    pub(super) fn stop_process(&mut self, host: usize) -> bool {
        let Some(running) = &mut self.hosts[host].running else {
            return false;
        };
        running.stop.cancel();
        running.ends_since.get_or_insert(self.now);
        self.step(host);
        true
    }

    /// Something comes to a process, which runs later.
    pub(super) fn accept(&mut self, host: usize, input: Input) {
        match input {
            Input::Broadcast(message) => self.accept_broadcast(host, message),
            Input::Tail(tail, connection, batch) => self.accept_tail(host, tail, connection, batch),
            Input::Request(from, subject, request) => {
                self.accept_request(host, from, &subject, request);
            }
            Input::Served(reply, answer) => {
                if let Some(running) = &self.hosts[host].running {
                    running.connection.count_answer();
                }
                reply.send(answer);
            }
            Input::Unserved(reply) => drop(reply),
            Input::Reply(Then::Process(to), reply) => {
                self.note(|| format!("host {host}: answered {}", reply.label()));
                if let Some(running) = &self.hosts[host].running
                    && !matches!(reply, Reply::Unavailable)
                {
                    running.connection.count_answer();
                }
                let shown = match &reply {
                    Reply::Status(status) => status.now_unix_ns + self.unseen_standstill(host),
                    _ => 0,
                };
                // A process drops the answers that it no longer waits for.
                if to.send(reply).is_ok() {
                    let unseen = &mut self.hosts[host].clock_unseen;
                    unseen.take_if(|resumed| *resumed <= shown);
                }
            }
            Input::Connection(is_up) => {
                if let Some(running) = &self.hosts[host].running {
                    running.connection.set(connection(is_up));
                }
            }
            Input::Refused(text) => {
                if let Some(running) = &self.hosts[host].running {
                    running.process.enter(|| running.connection.refused(&text));
                }
            }
            Input::TailEnded(id) => {
                if let Some(running) = &mut self.hosts[host].running {
                    running.streams.tails.retain(|tail| tail.id != id);
                }
            }
            Input::Registry(id, event) => self.accept_registry(host, id, event),
            Input::Probed {
                engine,
                to,
                listing,
            } => self.accept_probe(host, engine, to, listing),
            Input::Health(to, health) => drop(to.send(health)),
            Input::Info(to, info) => drop(to.send(info)),
            Input::Engine(event) => self.accept_engine_event(host, event),
            Input::Saved(bytes) => {
                if let Kind::Shim(at) = self.hosts[host].kind {
                    self.shims[at].disk = Some(bytes);
                }
            }
            other => match self.hosts[host].kind {
                Kind::Router(at) => self.router_input(at, other),
                Kind::Shim(_) | Kind::Indexer(_) => panic!("a process is sent {other:?}"),
            },
        }
    }

    fn accept_broadcast(&mut self, host: usize, message: Broadcast) {
        let message = match self.hosts[host].kind {
            Kind::Indexer(at) => self.heartbeat_as_read(at, message),
            Kind::Shim(_) | Kind::Router(_) => message,
        };
        if let Some(running) = &self.hosts[host].running
            && !self.hosts[host].subscriptions.lacks_broadcasts()
        {
            for listener in running.streams.listeners(&message.subject) {
                // A full queue loses it.
                drop(listener.try_send(message.clone()));
            }
        }
    }

    fn accept_tail(
        &mut self,
        host: usize,
        id: u64,
        connection: u64,
        batch: Vec<warmroute_plane::LogMessage>,
    ) {
        let is_open = |running: &mut Box<Running>| {
            let tail = running.streams.tail(id);
            tail.is_some_and(|tail| tail.connection == connection && !tail.to.is_closed())
        };
        if !self.hosts[host].running.as_mut().is_some_and(is_open) {
            return;
        }
        for batch in self.batches_as_read(host, batch) {
            let batch = self.batch_as_read(host, batch);
            let running = self.hosts[host].running.as_mut();
            let Some(tail) = running.and_then(|running| running.streams.tail(id)) else {
                return;
            };
            if let Some(last) = batch.last() {
                tail.delivered = Reached {
                    position: last.position,
                    stored: Some(last.stored_unix_ns),
                };
            }
            drop(tail.to.try_send(batch));
            if self.bends_records() {
                self.step(host);
            }
        }
    }

    fn accept_registry(&mut self, host: usize, id: u64, event: warmroute_plane::RegistryEvent) {
        use warmroute_plane::RegistryEvent;
        if let RegistryEvent::Gone { key } = &event {
            self.lease_as_lost(host, key);
        }
        let Some(running) = &mut self.hosts[host].running else {
            return;
        };
        let Some(watch) = running.streams.watch(id) else {
            return;
        };
        match &event {
            RegistryEvent::Put { key, entry } => {
                watch.seen.insert(key.clone(), entry.revision);
            }
            RegistryEvent::Gone { key } => {
                watch.seen.remove(key);
            }
            RegistryEvent::Current => watch.is_current = true,
        }
        let is_gone = matches!(event, RegistryEvent::Gone { .. });
        if !(is_gone && self.broken == Some(Breakage::DeleteMissed)) {
            drop(watch.to.try_send(event));
        }
    }

    // --- what a process sends

    fn perform(&mut self, host: usize) {
        let Some(running) = &self.hosts[host].running else {
            return;
        };
        for sent in running.outbox.take() {
            self.perform_one(host, sent);
        }
    }

    fn perform_one(&mut self, host: usize, sent: Sent) {
        match sent {
            Sent::Call(op, reply) => {
                self.note(|| format!("host {host}: {}", op.label()));
                if let Some(kept) = self.answer_in_place(host, &op) {
                    drop(reply.send(kept));
                    return;
                }
                let then = match self.before_call(host, &op) {
                    Some(early) => {
                        drop(reply.send(early));
                        Then::Nothing
                    }
                    None => Then::Process(reply),
                };
                self.call(host, op, then, CALL_DEADLINE);
            }
            Sent::Publish(message) => {
                let message = self.heartbeat_as_sent(host, message);
                self.observe_publish(&message);
                match self.plane.kind {
                    WorldPlane::Log => self.publish(host, &message),
                    WorldPlane::Core => self.publish_in_order(host, &message),
                }
            }
            Sent::Subscribe(subject, to) => {
                if let Some(running) = &mut self.hosts[host].running {
                    running.streams.subscribe(subject, to);
                }
                self.on_subscription(host);
            }
            Sent::Request(subject, request) => self.request(host, subject, request),
            Sent::Reconnect => self.reconnect(host),
            Sent::Client(news) => self.client_reports(host, news),
            Sent::Probe(worker, to) => self.send_probe(host, &worker, to),
            Sent::Serve(subject, to) => {
                if let Some(running) = &mut self.hosts[host].running {
                    running.streams.services.push((subject, to));
                }
            }
            other => self.perform_for_shim(host, other),
        }
    }

    fn perform_for_shim(&mut self, host: usize, sent: Sent) {
        let Kind::Shim(at) = self.hosts[host].kind else {
            panic!("host {host} sends {sent:?}");
        };
        match sent {
            Sent::OpenFeed(to) => {
                self.shims[at].feed = Some(to);
                self.plan_connect(at);
            }
            Sent::RequestReplay(id, from) => {
                self.shims[at].replay_begins = Some(id);
                let after = self.delay();
                let life = self.hosts[host].life;
                let event = Event::Replay {
                    shim: at,
                    life,
                    id,
                    from,
                };
                self.plan(after, event);
            }
            Sent::CheckHealth(to) => {
                let health = if self.engines[self.shims[at].worker].answers() {
                    EngineHealth::Healthy
                } else {
                    EngineHealth::Unhealthy
                };
                let after = self.millis(0..50);
                self.send_host(host, after, Input::Health(to, health));
            }
            Sent::ReadInfo(to) => {
                let info = self.engine_info(self.shims[at].worker);
                let after = self.millis(0..50);
                self.send_host(host, after, Input::Info(to, info));
            }
            Sent::SaveCheckpoint(bytes) => {
                let after = self.millis(1..300);
                self.send_host(host, after, Input::Saved(bytes));
            }
            other => panic!("{other:?}"),
        }
    }

    /// Notes what a call claims. Returns the answer if a breakage gives one.
    fn before_call(&mut self, host: usize, op: &Op) -> Option<Reply> {
        match (self.hosts[host].kind, op) {
            (Kind::Shim(_), Op::Append { payload, .. }) => {
                if let Ok(record) = codec::decode::<Record>(payload) {
                    let (now, source) = (self.now, &record.source);
                    self.vouched
                        .said(now, source, &record.states, record.sent_at);
                }
                let early = self.broken == Some(Breakage::AckBeforeApply);
                let position = self.plane.log.status().last.next();
                early.then_some(Reply::Position(position))
            }
            (Kind::Shim(at), Op::Put { key, value, .. }) => {
                self.check_claim(at, key, value);
                None
            }
            _ => None,
        }
    }

    fn observe_publish(&mut self, message: &Broadcast) {
        if let Ok(heartbeat) = codec::decode::<Heartbeat>(&message.payload) {
            self.vouched.heartbeat(self.now, &heartbeat);
            self.check_heartbeat(&heartbeat);
        } else if let Ok(request) = codec::decode::<ResyncRequest>(&message.payload) {
            self.note(|| format!("resync requested: {request:?}"));
            self.checks.resync(self.now);
        }
    }
}
