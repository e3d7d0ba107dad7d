//! Between hosts: what goes through the network, when it arrives, and whether it does.

use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;
use warmroute_plane::{Broadcast, Connection, RegistryEvent, ServiceRequest};

use super::host::{Event, Input, Kind, Planned, ProcessId, Then, Timer};
use super::plane::{At, Changed, Impairment, Op, Reply};
use super::streams::{Reached, Tail, Watch};
use super::{Breakage, World};

/// How often a tail proves that its log is still there.
const TAIL_CHECK: Duration = Duration::from_secs(5);
/// Milliseconds of a transfer from or to a slow store.
const SLOW_STORE_MS: Range<u64> = 2_000..20_000;

/// Generators for later additions, so that the worlds of earlier seeds remain.
#[derive(Debug)]
pub(super) struct LaterDice {
    pub(super) later: Rng,
    /// For what a router's fleet sends and receives ([`World::for_fleet`]).
    pub(super) fleets: Rng,
    pub(super) messages: MessageDice,
}

/// The generator that draws what happens to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageDice {
    Common,
    OfFleets,
}

impl World {
    pub(super) fn plan(&mut self, after: Duration, event: Event) {
        self.plan_at(self.now + after, event);
    }

    fn plan_at(&mut self, at: At, event: Event) {
        self.planned += 1;
        let order = self.planned;
        self.queue.push(Planned { at, order, event });
    }

    pub(super) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_micros(self.rng.u64(range.start * 1000..range.end * 1000))
    }

    /// One way through the network.
    pub(super) fn delay(&mut self) -> Duration {
        let is_late = self.strikes(self.rates.late);
        let max = if is_late {
            Duration::from_secs(2)
        } else {
            self.rates.delay_max
        };
        let max = u64::try_from(max.as_micros()).unwrap();
        Duration::from_micros(self.link_rng().u64(50..max.max(51)))
    }

    pub(super) fn strikes(&mut self, per_mille: u16) -> bool {
        per_mille > 0 && self.link_rng().u16(0..1000) < per_mille
    }

    const fn link_rng(&mut self) -> &mut Rng {
        match self.dice.messages {
            MessageDice::Common => &mut self.rng,
            MessageDice::OfFleets => &mut self.dice.fleets,
        }
    }

    pub(super) fn timer(&mut self, host: usize, local: Duration, timer: Timer) {
        let after = self.hosts[host].clock.span(local);
        self.send_host(host, after, Input::Timer(timer));
    }

    pub(super) fn send_host(&mut self, host: usize, after: Duration, input: Input) {
        let life = self.hosts[host].life;
        self.plan(after, Event::Host { host, life, input });
    }

    pub(super) fn send_process(&mut self, (host, life): ProcessId, after: Duration, input: Input) {
        self.plan(after, Event::Host { host, life, input });
    }

    pub(super) fn deliver(&mut self, host: usize, life: u64, input: Input) {
        let node = &self.hosts[host];
        if !node.is_up || node.life != life {
            return;
        }
        let Some(input) = self.through_inbox(host, input) else {
            return;
        };
        let node = &mut self.hosts[host];
        if node.is_paused {
            node.waiting.push(input);
            return;
        }
        let kind = node.kind;
        if node.is_cut {
            match input {
                Input::Broadcast(_) | Input::Tail(..) | Input::Registry(..) => return,
                Input::Refused(_) => return,
                Input::Request(_, _, ServiceRequest { reply, .. })
                | Input::Served(reply, _)
                | Input::Unserved(reply) => {
                    self.lose_reply(reply);
                    return;
                }
                Input::Reply(then, reply) if !matches!(reply, Reply::Unavailable) => {
                    let again = Input::Reply(then, Reply::Unavailable);
                    self.send_host(host, Duration::from_millis(500), again);
                    return;
                }
                _ => {}
            }
        }
        if let Kind::Router(_) = kind {
            // What it does has the time of now.
            self.step(host);
        }
        self.accept(host, input);
        self.step(host);
        self.run_again(host);
    }

    /// A router's probes and its follower of workers and drains draw from a generator of their own:
    /// more or fewer of them do not shift the draws of all else.
    pub(super) fn for_fleet<R>(&mut self, send: impl FnOnce(&mut Self) -> R) -> R {
        let before = std::mem::replace(&mut self.dice.messages, MessageDice::OfFleets);
        let result = send(self);
        self.dice.messages = before;
        result
    }

    /// Whether a router's follower of workers and drains watches these keys.
    fn is_of_fleet(&self, host: usize, prefix: &str) -> bool {
        let subjects = &self.subjects;
        let watched = [subjects.worker_keys(), subjects.drain_keys()];
        let is_router = matches!(self.hosts[host].kind, Kind::Router(_));
        is_router && watched.iter().any(|watched| watched == prefix)
    }

    // --- questions to the plane

    pub(super) fn call(&mut self, host: usize, op: Op, then: Then, deadline: Duration) {
        match &op {
            Op::Watch(prefix, _) if self.is_of_fleet(host, prefix) => {
                self.for_fleet(|world| world.send_call(host, op, then, deadline));
            }
            _ => self.send_call(host, op, then, deadline),
        }
    }

    fn send_call(&mut self, host: usize, op: Op, then: Then, deadline: Duration) {
        let give_up = self.now + self.hosts[host].clock.span(deadline);
        let life = self.hosts[host].life;
        if self.hosts[host].is_cut || self.strikes(self.rates.call_lost) {
            // What a client library kept may be sent when the connection is back.
            if matches!(op, Op::Append { .. }) && self.rng.bool() {
                let after = self.millis(1..8_000);
                self.plan(
                    after,
                    Event::Plane {
                        host,
                        life,
                        op,
                        then: Then::Nothing,
                        give_up: Duration::ZERO,
                    },
                );
            }
            let input = Input::Reply(then, Reply::Unavailable);
            self.plan_at(give_up, Event::Host { host, life, input });
            return;
        }
        let arrives = (self.now + self.delay())
            .max(self.hosts[host].sent_until)
            .max(self.hosts[host].stalled_until);
        self.hosts[host].sent_until = arrives;
        self.plan_at(
            arrives,
            Event::Plane {
                host,
                life,
                op,
                then,
                give_up,
            },
        );
    }

    pub(super) fn ask_plane(&mut self, from: ProcessId, op: Op, then: Then, give_up: At) {
        match &op {
            Op::Watch(prefix, _) if self.is_of_fleet(from.0, prefix) => {
                self.for_fleet(|world| world.perform_call(from, op, then, give_up));
            }
            _ => self.perform_call(from, op, then, give_up),
        }
    }

    fn perform_call(&mut self, from: ProcessId, op: Op, then: Then, give_up: At) {
        let (host, life) = from;
        if self.hosts[host].is_cut {
            let is_asked = !matches!(then, Then::Nothing);
            if is_asked {
                let input = Input::Reply(then, Reply::Unavailable);
                self.plan_at(give_up.max(self.now), Event::Host { host, life, input });
            }
            return;
        }
        let impairment = self.plane.impairment(self.now, &op);
        let slow = match self.plane.is_slow(self.now, &op) {
            true => Some(Duration::from_millis(self.dice.later.u64(SLOW_STORE_MS))),
            false => None,
        };
        let reply = match impairment {
            Some(Impairment::Refuses) => Reply::Unavailable,
            Some(Impairment::LosesAnswers) | None => self.answer(from, op),
        };
        if matches!(then, Then::Nothing) {
            return;
        }
        let is_lost = impairment.is_some() || self.strikes(self.rates.call_lost);
        let stalled = self.hosts[host].stalled_until.saturating_sub(self.now);
        let after = self.delay().max(stalled) + slow.unwrap_or_default();
        if slow.is_some() {
            let end = &mut self.plane.slow_transfers_end;
            *end = (*end).max(self.now + after);
        }
        // A transfer goes on as long as pieces come.
        let is_late = slow.is_none() && self.now + after > give_up;
        let (at, reply) = if is_lost || is_late {
            (give_up.max(self.now), Reply::Unavailable)
        } else {
            (self.now + after, reply)
        };
        let input = Input::Reply(then, reply);
        self.plan_at(at, Event::Host { host, life, input });
    }

    /// What the server does and answers.
    fn answer(&mut self, (host, life): ProcessId, op: Op) -> Reply {
        let is_append = matches!(op, Op::Append { .. });
        let leased = match &op {
            Op::Put { key, lease, .. } => lease.map(|lease| (key.clone(), lease)),
            _ => None,
        };
        if let Op::Append { payload, .. } = &op {
            self.checks.appended(payload);
            self.report_append(payload);
        }
        let is_there = self.hosts[host].life == life;
        let reply = match op {
            Op::Tail(after, batch_max, to) if is_there => {
                let mut tail = Tail {
                    id: 0,
                    to,
                    batch_max,
                    log: self.plane.log.identity,
                    connection: 0,
                    sent: Reached {
                        position: after,
                        stored: None,
                    },
                    delivered: Reached {
                        position: after,
                        stored: None,
                    },
                    check_at: self.now,
                    is_pumping: false,
                };
                if let Some(running) = &mut self.hosts[host].running {
                    tail.id = running.streams.next_id();
                    running.streams.tails.push(tail);
                }
                self.pump_all();
                Reply::Done
            }
            Op::Watch(prefix, to) if is_there => {
                let is_of_fleet = self.is_of_fleet(host, &prefix);
                if let Some(running) = &mut self.hosts[host].running {
                    let id = running.streams.next_id();
                    let watch = Watch {
                        id,
                        to,
                        prefix,
                        is_of_fleet,
                        seen: Default::default(),
                        sent: Default::default(),
                        is_current: false,
                    };
                    running.streams.watches.push(watch);
                    self.send_news(host, id);
                }
                Reply::Done
            }
            op => self.answer_bent(host, op),
        };
        if let (Some((key, lease)), Reply::Revision(_)) = (leased, &reply) {
            self.checks
                .registry
                .lease_writers
                .insert(key.clone(), (host, life));
            self.plan(lease, Event::Expire(key));
        }
        if is_append {
            self.pump_all();
        }
        self.tell_watchers();
        reply
    }

    // --- the log's readers

    pub(super) fn pump_all(&mut self) {
        for host in 0..self.hosts.len() {
            let Some(running) = &self.hosts[host].running else {
                continue;
            };
            let tails: Vec<u64> = running.streams.tails.iter().map(|tail| tail.id).collect();
            for tail in tails {
                self.pump_soon(host, tail);
            }
        }
    }

    fn tail(&mut self, host: usize, id: u64) -> Option<&mut Tail> {
        self.hosts[host].running.as_mut()?.streams.tail(id)
    }

    fn pump_soon(&mut self, host: usize, id: u64) {
        let Some(tail) = self.tail(host, id) else {
            return;
        };
        if !tail.to.is_closed() && !std::mem::replace(&mut tail.is_pumping, true) {
            let after = self.delay();
            self.plan(after, Event::Pump(host, id));
        }
    }

    pub(super) fn pump(&mut self, host: usize, id: u64) {
        let is_cut = self.hosts[host].is_cut;
        let (now, broken) = (self.now, self.broken);
        let status = self.plane.log.status();
        let Some(tail) = self.hosts[host]
            .running
            .as_mut()
            .and_then(|running| running.streams.tail(id))
        else {
            return;
        };
        tail.is_pumping = false;
        if is_cut || tail.to.is_closed() {
            return;
        }
        if let Some(until) = self.plane.leaderless_until(now) {
            tail.is_pumping = true;
            self.plan_at(until, Event::Pump(host, id));
            return;
        }
        if tail.check_at <= now {
            tail.check_at = now + TAIL_CHECK;
            let there = self.plane.log.at(tail.sent.position);
            let there = there.map(|at| at.stored_unix_ns);
            let differs = there.is_some()
                && tail.sent.stored.is_some()
                && there != tail.sent.stored
                && broken != Some(Breakage::RefillUnseen);
            if status.identity != tail.log || status.last < tail.sent.position || differs {
                self.in_order(host, Input::TailEnded(id));
                return;
            }
            tail.sent.stored = tail.sent.stored.or(there);
        }
        let max = self.rng.usize(1..64).min(tail.batch_max);
        let batch = self.plane.log.after(tail.sent.position, max);
        if let Some(last) = batch.last() {
            tail.sent = Reached {
                position: last.position,
                stored: Some(last.stored_unix_ns),
            };
            let connection = tail.connection;
            // One message again now and then.
            if self.strikes(self.rates.twice) {
                self.in_order(host, Input::Tail(id, connection, batch.clone()));
            }
            self.in_order(host, Input::Tail(id, connection, batch));
            self.pump_soon(host, id);
        }
    }

    pub(super) fn in_order(&mut self, host: usize, input: Input) {
        let at = (self.now + self.delay())
            .max(self.hosts[host].received_until)
            .max(self.hosts[host].stalled_until);
        self.hosts[host].received_until = at;
        let life = self.hosts[host].life;
        self.plan_at(at, Event::Host { host, life, input });
    }

    // --- the registry's watchers

    /// Sends what a watch has not seen.
    fn send_news(&mut self, host: usize, id: u64) {
        let Some(watch) = self.watch(host, id) else {
            return;
        };
        let is_current = watch.is_current;
        let mut events = self.news_of(host, id);
        if !is_current {
            events.push(RegistryEvent::Current);
        }
        let read_later = self.read_later(host, id);
        for event in events {
            self.send_event(host, id, event);
        }
        // Without a shift of all else's draws.
        self.for_fleet(|world| {
            for key in read_later {
                world.send_event(host, id, RegistryEvent::Gone { key });
            }
        });
    }

    /// The keys that are gone, and that a watch takes for present when it has read what it was sent.
    fn read_later(&self, host: usize, id: u64) -> Vec<String> {
        let Some(watch) = self.watch(host, id) else {
            return Vec::new();
        };
        let is_gone =
            |key: &&String| !watch.seen.contains_key(*key) && !self.plane.keys.contains_key(*key);
        watch.sent.iter().filter(is_gone).cloned().collect()
    }

    fn send_event(&mut self, host: usize, id: u64, event: RegistryEvent) {
        let running = self.hosts[host].running.as_mut();
        let watch = running.and_then(|running| running.streams.watch(id));
        let is_of_fleet = watch.is_some_and(|watch| {
            watch.note_sent(&event);
            watch.is_of_fleet
        });
        let input = Input::Registry(id, event);
        match is_of_fleet {
            true => self.for_fleet(|world| world.in_order(host, input)),
            false => self.in_order(host, input),
        }
    }

    fn watch(&self, host: usize, id: u64) -> Option<&Watch> {
        let running = self.hosts[host].running.as_ref()?;
        running.streams.watches.iter().find(|watch| watch.id == id)
    }

    /// What a watch has not seen of the registry as it is.
    fn news_of(&self, host: usize, id: u64) -> Vec<RegistryEvent> {
        let Some(watch) = self.watch(host, id) else {
            return Vec::new();
        };
        let gone = watch
            .seen
            .keys()
            .filter(|key| !self.plane.keys.contains_key(*key));
        let mut events: Vec<_> = gone
            .map(|key| RegistryEvent::Gone { key: key.clone() })
            .collect();
        for (key, entry) in &self.plane.keys {
            let is_new = watch.seen.get(key) != Some(&entry.entry.revision);
            if is_new && key.starts_with(&watch.prefix) {
                events.push(RegistryEvent::Put {
                    key: key.clone(),
                    entry: entry.entry.clone(),
                });
            }
        }
        events
    }

    pub(super) fn tell_watchers(&mut self) {
        let changes = std::mem::take(&mut self.plane.changed);
        for Changed { key, entry } in changes {
            let known = self.checks.registry.registered.get(&key);
            if known.is_some_and(|(_, was_there)| *was_there) != entry.is_some() {
                let presence = (self.now, entry.is_some());
                self.checks
                    .registry
                    .registered
                    .insert(key.clone(), presence);
                if let Some(entry) = &entry {
                    let created = &mut self.checks.registry.created;
                    created.insert(key.clone(), entry.revision);
                }
            }
            for host in 0..self.hosts.len() {
                let Some(running) = self.hosts[host].running.as_ref() else {
                    continue;
                };
                let watches = running.streams.watches.iter();
                let told: Vec<u64> = watches
                    .filter(|watch| key.starts_with(&watch.prefix) && !self.hosts[host].is_cut)
                    .map(|watch| watch.id)
                    .collect();
                for watch in told {
                    let key = key.clone();
                    let event = match entry.clone() {
                        Some(entry) => RegistryEvent::Put { key, entry },
                        None => RegistryEvent::Gone { key },
                    };
                    self.send_event(host, watch, event);
                }
            }
        }
    }

    // --- broadcasts

    /// To every process that listens now.
    pub(super) fn publish(&mut self, from: usize, message: &Broadcast) {
        for to in 0..self.hosts.len() {
            let running = self.hosts[to].running.as_ref();
            if running.is_some_and(|running| running.streams.listens_to(&message.subject)) {
                self.broadcast(from, to, Input::Broadcast(message.clone()));
            }
        }
    }

    fn broadcast(&mut self, from: usize, to: usize, input: Input) {
        if self.hosts[from].is_cut || self.strikes(self.rates.broadcast_lost) {
            return;
        }
        if self.strikes(self.rates.twice)
            && let Some(again) = again(&input)
        {
            let after = (self.delay() + self.delay()).max(self.stalled(from, to));
            self.send_host(to, after, again);
        }
        let after = self.delay().max(self.stalled(from, to));
        self.send_host(to, after, input);
    }

    /// How long what goes from one to the other waits in their connections.
    pub(super) fn stalled(&self, from: usize, to: usize) -> Duration {
        let until = self.hosts[from]
            .stalled_until
            .max(self.hosts[to].stalled_until);
        until.saturating_sub(self.now)
    }

    // --- links

    pub(super) fn link(&mut self, host: usize, is_up: bool) {
        let node = &mut self.hosts[host];
        if node.is_cut != is_up {
            return;
        }
        node.is_cut = !is_up;
        self.disturb(host);
        if !is_up {
            // Noticed by what does not come, if it lasts.
            let noticed = self.rng.bool() || self.rates.is_calm;
            if noticed {
                self.hosts[host].seems_up = false;
                self.send_host(host, Duration::ZERO, Input::Connection(false));
            }
            return;
        }
        let noticed = !std::mem::replace(&mut self.hosts[host].seems_up, true);
        if noticed || self.rng.bool() {
            // A short interruption that was not reported is reported as up.
            self.send_host(host, Duration::ZERO, Input::Connection(true));
        }
        self.on_new_connection(host);
        self.reconnect_streams(host);
    }

    pub(super) fn reconnect_streams(&mut self, host: usize) {
        let now = self.now;
        let Some(running) = &mut self.hosts[host].running else {
            return;
        };
        for tail in &mut running.streams.tails {
            // What was on its way in the connection before is gone with it.
            tail.connection += 1;
            tail.sent = tail.delivered;
            tail.check_at = now;
        }
        let tails: Vec<u64> = running.streams.tails.iter().map(|tail| tail.id).collect();
        let watches = running.streams.watches.iter();
        let watches: Vec<u64> = watches.map(|watch| watch.id).collect();
        for tail in tails {
            self.pump_soon(host, tail);
        }
        for watch in watches {
            self.send_news(host, watch);
        }
    }
}

pub(super) const fn connection(is_up: bool) -> Connection {
    if is_up {
        Connection::Up
    } else {
        Connection::Down
    }
}

fn again(input: &Input) -> Option<Input> {
    match input {
        Input::Broadcast(message) => Some(Input::Broadcast(message.clone())),
        _ => None,
    }
}
