//! Between hosts: who hears what, when, if at all.

use std::time::{Duration, Instant};

use warmroute_plane::{Broadcast, RegistryEvent};
use warmroute_proto::{Heartbeat, codec};

use super::host::{Event, Input, Kind, Planned, Process, Then, Timer, Zmq};
use super::indexer::{IndexRun, Phase};
use super::plane::{At, Changed, Op, Reply};
use super::shim::ShimThen;
use super::{Breakage, World};

/// How often a tail proves that its log is still there.
const TAIL_CHECK: Duration = Duration::from_secs(5);
/// So long a shim waits for what the log's clock shows.
const CLOCK_DEADLINE: Duration = Duration::from_secs(1);

impl World {
    pub(super) fn plan(&mut self, after: Duration, event: Event) {
        self.plan_at(self.now + after, event);
    }

    fn plan_at(&mut self, at: At, event: Event) {
        self.planned += 1;
        let order = self.planned;
        self.queue.push(Planned { at, order, event });
    }

    pub(super) fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
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
        Duration::from_micros(self.rng.u64(50..max.max(51)))
    }

    pub(super) fn strikes(&mut self, per_mille: u16) -> bool {
        per_mille > 0 && self.rng.u16(0..1000) < per_mille
    }

    pub(super) fn local(&self, host: usize) -> Instant {
        self.hosts[host].clock.read(self.now)
    }

    pub(super) fn timer(&mut self, host: usize, local: Duration, timer: Timer) {
        let after = self.hosts[host].clock.span(local);
        self.send_host(host, after, Input::Timer(timer));
    }

    pub(super) fn send_host(&mut self, host: usize, after: Duration, input: Input) {
        let life = self.hosts[host].life;
        self.plan(after, Event::Host { host, life, input });
    }

    pub(super) fn send_process(&mut self, (host, life): Process, after: Duration, input: Input) {
        self.plan(after, Event::Host { host, life, input });
    }

    pub(super) fn deliver(&mut self, host: usize, life: u64, input: Input) {
        let node = &mut self.hosts[host];
        if !node.is_up || node.life != life {
            return;
        }
        if node.is_paused {
            node.waiting.push(input);
            return;
        }
        let kind = node.kind;
        if node.is_cut {
            match input {
                Input::Heartbeat(_) | Input::Resync(_) | Input::Tail(..) | Input::Registry(..) => {
                    return;
                }
                Input::Load(_) | Input::Asked(..) | Input::Query(..) | Input::Answer(..) => return,
                // Its time-out tells.
                Input::Answered(_, _, Some(_)) => return,
                Input::Reply(then, reply) if !matches!(reply, Reply::Unavailable) => {
                    let again = Input::Reply(then, Reply::Unavailable);
                    self.send_host(host, Duration::from_millis(500), again);
                    return;
                }
                _ => {}
            }
        }
        match kind {
            Kind::Shim(at) => self.shim_input(at, input),
            Kind::Indexer(at) => self.indexer_input(at, input),
            Kind::Router(at) => self.router_input(at, input),
        }
    }

    // --- questions to the plane

    pub(super) fn call(&mut self, host: usize, op: Op, then: Then, deadline: Duration) {
        let give_up = self.now + self.hosts[host].clock.span(deadline);
        let life = self.hosts[host].life;
        if self.hosts[host].is_cut || self.strikes(self.rates.call_lost) {
            // What a client library kept may be sent when the connection is back.
            if matches!(op, Op::Append { .. }) && self.rng.bool() {
                let after = self.millis(1..8_000);
                let then = Then::Nothing;
                let give_up = Duration::ZERO;
                self.plan(
                    after,
                    Event::Plane {
                        host,
                        life,
                        op,
                        then,
                        give_up,
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

    /// The same, after a pause of the asker.
    pub(super) fn call_later(&mut self, host: usize, after: Duration, op: Op, then: Then) {
        let life = self.hosts[host].life;
        let give_up = self.now + after + Duration::from_secs(1);
        let after = after + self.delay();
        self.plan(
            after,
            Event::Plane {
                host,
                life,
                op,
                then,
                give_up,
            },
        );
    }

    pub(super) fn ask_plane(&mut self, from: (usize, u64), op: Op, then: Then, give_up: At) {
        let (host, life) = from;
        if matches!(then, Then::Shim(ShimThen::Clock(_))) {
            self.answer_clock(from, then, give_up);
            return;
        }
        if self.hosts[host].is_cut {
            let is_asked = !matches!(then, Then::Nothing);
            if is_asked {
                let input = Input::Reply(then, Reply::Unavailable);
                self.plan_at(give_up.max(self.now), Event::Host { host, life, input });
            }
            return;
        }
        let is_append = matches!(op, Op::Append { .. });
        let key = match &op {
            Op::Put { key, lease, .. } if lease.is_some() => Some((key.clone(), *lease)),
            _ => None,
        };
        if let Op::Append { payload, .. } = &op {
            self.checks.appended(payload);
            self.report_append(payload);
        }
        let reply = self.plane.answer(self.now, op);
        if let (Some((key, Some(lease))), Reply::Revision(_)) = (key, &reply) {
            self.plan(lease, Event::Expire(key));
        }
        if is_append {
            self.pump_all();
        }
        self.tell_watchers();
        if matches!(then, Then::Nothing) {
            return;
        }
        let is_lost = self.strikes(self.rates.call_lost);
        let stalled = self.hosts[host].stalled_until.saturating_sub(self.now);
        let after = self.delay().max(stalled);
        let (at, reply) = if is_lost || self.now + after > give_up {
            (give_up.max(self.now), Reply::Unavailable)
        } else {
            (self.now + after, reply)
        };
        let input = Input::Reply(then, reply);
        self.plan_at(at, Event::Host { host, life, input });
    }

    // --- the log's readers

    pub(super) fn pump_all(&mut self) {
        for at in 0..self.indexers.len() {
            let host = self.indexers[at].host;
            if let Some(mut run) = self.indexers[at].run.take() {
                self.pump_soon(host, &mut run);
                self.indexers[at].run = Some(run);
            }
        }
    }

    pub(super) fn pump_soon(&mut self, host: usize, run: &mut IndexRun) {
        if run.tailing.is_open && !std::mem::replace(&mut run.tailing.is_pumping, true) {
            let after = self.delay();
            self.plan(after, Event::Pump(host));
        }
    }

    pub(super) fn pump(&mut self, host: usize) {
        let Kind::Indexer(at) = self.hosts[host].kind else {
            return;
        };
        let Some(mut run) = self.indexers[at].run.take() else {
            return;
        };
        run.tailing.is_pumping = false;
        if run.tailing.is_open && !self.hosts[host].is_cut {
            self.pump_open(host, &mut run);
        }
        self.indexers[at].run = Some(run);
    }

    fn pump_open(&mut self, host: usize, run: &mut IndexRun) {
        let tailing = &mut run.tailing;
        if tailing.check_at <= self.now {
            tailing.check_at = self.now + TAIL_CHECK;
            let status = self.plane.log.status();
            let there = self.plane.log.at(tailing.sent).map(|at| at.stored_unix_ns);
            let differs = there.is_some()
                && tailing.stored.is_some()
                && there != tailing.stored
                && self.broken != Some(Breakage::RefillUnseen);
            if status.identity != tailing.log || status.last < tailing.sent || differs {
                tailing.is_open = false;
                let session = run.session;
                self.in_order(host, Input::TailEnded(session));
                return;
            }
            if tailing.stored.is_none() {
                tailing.stored = there;
            }
        }
        let max = self.rng.usize(1..64);
        let batch = self.plane.log.after(run.tailing.sent, max);
        if let Some(last) = batch.last() {
            run.tailing.sent = last.position;
            run.tailing.stored = Some(last.stored_unix_ns);
            let of = (run.session, run.tailing.connection);
            // One message again now and then.
            if self.strikes(self.rates.twice) {
                self.in_order(host, Input::Tail(of, batch.clone()));
            }
            self.in_order(host, Input::Tail(of, batch));
            self.pump_soon(host, run);
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

    pub(super) fn begin_watch(&mut self, at: usize, run: &mut IndexRun) {
        let host = self.indexers[at].host;
        let prefix = self.subjects.worker_keys();
        let present: Vec<_> = self
            .plane
            .keys
            .iter()
            .filter(|(key, _)| key.starts_with(&prefix))
            .map(|(key, entry)| (key.clone(), entry.entry.clone()))
            .collect();
        for (key, entry) in present {
            let event = RegistryEvent::Put { key, entry };
            self.in_order(host, Input::Registry(run.session, event));
        }
        let current = Input::Registry(run.session, RegistryEvent::Current);
        self.in_order(host, current);
    }

    pub(super) fn tell_watchers(&mut self) {
        let prefix = self.subjects.worker_keys();
        let changes = std::mem::take(&mut self.plane.changed);
        self.tell_routers(&changes);
        for Changed { key, entry } in changes {
            if !key.starts_with(&prefix) {
                continue;
            }
            let event = match entry {
                Some(entry) => RegistryEvent::Put { key, entry },
                None => RegistryEvent::Gone { key },
            };
            for at in 0..self.indexers.len() {
                let host = self.indexers[at].host;
                let session = self.indexers[at].run.as_ref().and_then(|run| {
                    let is_watching = run.is_subscribed && !self.hosts[host].is_cut;
                    is_watching.then_some(run.session)
                });
                if let Some(session) = session {
                    self.in_order(host, Input::Registry(session, event.clone()));
                }
            }
        }
    }

    // --- broadcasts

    pub(super) fn broadcast_heartbeat(&mut self, from: usize, heartbeat: &Heartbeat) {
        self.check_heartbeat(heartbeat);
        let message = Broadcast {
            subject: self.subjects.heartbeat(&heartbeat.source),
            payload: codec::encode(heartbeat).unwrap().into(),
        };
        for at in 0..self.indexers.len() {
            let to = self.indexers[at].host;
            self.broadcast(from, to, Input::Heartbeat(message.clone()));
        }
    }

    pub(super) fn broadcast(&mut self, from: usize, to: usize, input: Input) {
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
    fn stalled(&self, from: usize, to: usize) -> Duration {
        let until = self.hosts[from]
            .stalled_until
            .max(self.hosts[to].stalled_until);
        until.saturating_sub(self.now)
    }

    /// Asks for the log's clock. By the dice of connections: a world is the same whether anybody asks or not.
    pub(super) fn ask_clock(&mut self, host: usize) {
        let asked = self.local(host);
        let life = self.hosts[host].life;
        let give_up = self.now + self.hosts[host].clock.span(CLOCK_DEADLINE);
        let arrives = (self.now + self.clock_delay()).max(self.hosts[host].stalled_until);
        let then = Then::Shim(ShimThen::Clock(asked));
        let op = Op::Status;
        let event = Event::Plane {
            host,
            life,
            op,
            then,
            give_up,
        };
        self.plan_at(arrives, event);
    }

    fn answer_clock(&mut self, (host, life): Process, then: Then, give_up: At) {
        let reply = self.plane.answer(self.now, Op::Status);
        let at = (self.now + self.clock_delay()).max(self.hosts[host].stalled_until);
        let is_lost = self.dice.u16(0..1000) < self.rates.call_lost;
        if !is_lost && at <= give_up && !self.hosts[host].is_cut {
            let input = Input::Reply(then, reply);
            self.plan_at(at, Event::Host { host, life, input });
        }
    }

    pub(super) fn clock_delay(&mut self) -> Duration {
        let is_late = self.dice.u16(0..1000) < self.rates.late;
        let max = if is_late {
            CLOCK_DEADLINE
        } else {
            self.rates.delay_max
        };
        let max = u64::try_from(max.as_micros()).unwrap();
        Duration::from_micros(self.dice.u64(50..max.max(51)))
    }

    /// The engine's socket keeps its order.
    pub(super) fn send_zmq(&mut self, shim: usize, zmq: Zmq) {
        let host = self.shims[shim].host;
        let at = (self.now + self.delay()).max(self.hosts[host].zmq_until);
        self.hosts[host].zmq_until = at;
        let life = self.hosts[host].life;
        let input = Input::Zmq(zmq);
        self.plan_at(at, Event::Host { host, life, input });
    }

    // --- links

    pub(super) fn link(&mut self, host: usize, is_up: bool) {
        let node = &mut self.hosts[host];
        if node.is_cut != is_up {
            return;
        }
        node.is_cut = !is_up;
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
            // A flicker that was not seen as one is told as up again.
            self.send_host(host, Duration::ZERO, Input::Connection(true));
        }
        if let Kind::Indexer(at) = self.hosts[host].kind
            && let Some(mut run) = self.indexers[at].run.take()
        {
            // What was on its way in the one before is gone with it.
            run.tailing.connection += 1;
            run.tailing.sent = run.tailing.sent.min(run.fold.position());
            run.tailing.stored = run.fold.mark().map(|mark| mark.stored_unix_ns);
            run.tailing.check_at = self.now;
            self.pump_soon(host, &mut run);
            if run.is_subscribed && run.phase != Phase::Waiting {
                self.watch_again(host, &run);
            }
            self.indexers[at].run = Some(run);
        }
        if let Kind::Router(at) = self.hosts[host].kind {
            self.router_watches_again(at);
        }
    }

    /// Of what changed meanwhile the last is told.
    fn watch_again(&mut self, host: usize, run: &IndexRun) {
        let prefix = self.subjects.worker_keys();
        let mut events = Vec::new();
        for key in run.seen.keys() {
            if !self.plane.keys.contains_key(key) {
                events.push(RegistryEvent::Gone { key: key.clone() });
            }
        }
        for (key, entry) in &self.plane.keys {
            let is_new = run.seen.get(key) != Some(&entry.entry.revision);
            if is_new && key.starts_with(&prefix) {
                events.push(RegistryEvent::Put {
                    key: key.clone(),
                    entry: entry.entry.clone(),
                });
            }
        }
        for event in events {
            self.in_order(host, Input::Registry(run.session, event));
        }
    }
}

fn again(input: &Input) -> Option<Input> {
    match input {
        Input::Heartbeat(message) => Some(Input::Heartbeat(message.clone())),
        Input::Resync(payload) => Some(Input::Resync(payload.clone())),
        Input::Load(payload) => Some(Input::Load(payload.clone())),
        _ => None,
    }
}
