//! A small world: routers over a network that drops, repeats, delays and reorders; crashes, pauses,
//! cuts, joins and leaves. A seed is the whole input. After every step each view is compared with
//! the slots that its router held at that number.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hasher as _;
use std::time::Instant;

use bytes::Bytes;
use fastrand::Rng;
use rustc_hash::FxHasher;
use warmroute_proto::codec;
use warmroute_proto::load::{LoadDigest, LoadFrame, LoadHeartbeat, LoadMessage, SlotEnd};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{BlockSize, Generation, RecordNumber, RouterId, Seed};

use super::super::peer::Peer;
use super::super::*;
use crate::testing::start;
use crate::{Core, CoreConfig, Knobs, Prompt, RouteRequest, SlotEvent};

type Number = Option<RecordNumber>;

/// Faults of the network for broadcasts, questions and answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Net {
    pub drop: f64,
    pub twice: f64,
    pub delay_max: Duration,
    /// Share of messages that arrive seconds late.
    pub straggle: f64,
}

/// A defect between a replica and its inputs: proves that the checks and rules have an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mutation {
    /// Messages of a former incarnation arrive as messages of the current one.
    FormerAdmitted,
    /// Heartbeats arrive with the digest that the receiver holds.
    DigestIgnored,
    /// Own messages are applied again when they come back.
    OwnApplied,
    /// Heartbeats of live peers do not reach the replica.
    HeartbeatsUnread,
    /// A router that is cut off still receives its own broadcasts.
    LoopbackKept,
}

impl Net {
    pub(super) const GOOD: Self = Self {
        drop: 0.0,
        twice: 0.0,
        delay_max: Duration::from_millis(2),
        straggle: 0.0,
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Up,
    /// Paused; messages wait in its sockets.
    Paused,
    /// Runs without a connection.
    Cut,
    Gone,
}

pub(super) struct Node {
    pub router: RouterId,
    pub core: Core,
    pub replica: LoadReplica,
    pub state: State,
    pub open: Vec<u64>,
    /// Prompts of open slots without a first token.
    movable: BTreeMap<u64, Prompt>,
    pub ready: Option<Instant>,
    waits: Vec<Event>,
    heard: BTreeMap<RouterId, Instant>,
}

#[derive(Clone, Debug)]
enum Event {
    /// Sender and its incarnation.
    Broadcast(RouterId, Generation, Bytes),
    Asked(RouterId, AskId, Bytes),
    Answered(RouterId, AskId, Option<Bytes>),
    Lease,
    Tick,
    Due,
    Work,
}

pub(super) struct World {
    pub rng: Rng,
    begun: Instant,
    pub now: Instant,
    pub net: Net,
    pub nodes: Vec<Node>,
    pub works: bool,
    /// Moved requests.
    pub moves: u64,
    pub faults: Vec<String>,
    pub mutation: Option<Mutation>,
    queue: BTreeMap<(Instant, u64), (usize, Event)>,
    next_event: u64,
    revision: u64,
    /// Digest of each router at each of its numbers.
    truth: BTreeMap<(RouterId, Generation, Number), LoadDigest>,
    /// Views that the world spoiled.
    pub spoilt: BTreeSet<(RouterId, RouterId)>,
    pub spoils: bool,
    trace: FxHasher,
}

pub(super) fn core(router: RouterId, seed: u64) -> Core {
    let mut core = Core::new(CoreConfig {
        knobs: Knobs {
            move_margin_tokens: 0,
            ..Knobs::default()
        },
        router,
        incarnation: Generation(0),
        seed,
    });
    let entry = |name: &str| WorkerEntry {
        models: vec!["m".into()],
        block_size: BlockSize::new(16),
        main_attention_only: true,
        ..WorkerEntry::new(name, format!("http://{name}:8000"))
    };
    core.set_workers(&[entry("a"), entry("b"), entry("c")]);
    core
}

/// A prompt of so many blocks; prompts of a family share a prefix.
pub(super) fn prompt(family: u32, blocks: u32) -> Prompt {
    let tokens: Vec<u32> = (0..blocks * 16 + 5).map(|at| family << 20 | at).collect();
    Prompt::new(&tokens, BlockSize::new(16).unwrap(), Seed::PLAIN)
}

impl World {
    pub(super) fn new(seed: u64, nodes: usize) -> Self {
        let begun = start();
        let mut world = Self {
            rng: Rng::with_seed(seed),
            begun,
            now: begun,
            net: Net::GOOD,
            nodes: Vec::new(),
            works: true,
            moves: 0,
            faults: Vec::new(),
            mutation: None,
            queue: BTreeMap::new(),
            next_event: 0,
            revision: 100,
            truth: BTreeMap::new(),
            spoilt: BTreeSet::new(),
            spoils: false,
            trace: FxHasher::default(),
        };
        for _ in 0..nodes {
            world.join();
        }
        world
    }

    /// Starts a router, which learns the others from the registry.
    pub(super) fn join(&mut self) -> usize {
        let at = self.nodes.len();
        let number = u8::try_from(at + 1).unwrap();
        let router = RouterId([number; 16]);
        let replica = LoadReplica::new(router, self.now);
        self.nodes.push(Node {
            router,
            core: core(router, self.rng.u64(..)),
            replica,
            state: State::Up,
            open: Vec::new(),
            movable: BTreeMap::new(),
            ready: None,
            waits: Vec::new(),
            heard: BTreeMap::new(),
        });
        let others: Vec<RouterId> = self.nodes.iter().map(|node| node.router).collect();
        let now = self.now;
        let node = &mut self.nodes[at];
        for other in others {
            node.replica.learn(other, &mut node.core, now);
        }
        node.replica.listed();
        self.act(at);
        self.later(at, TICK, Event::Tick);
        self.later(at, Duration::from_millis(30), Event::Work);
        at
    }

    pub(super) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(entry) = self.queue.first_entry()
            && entry.key().0 <= end
        {
            let ((at, _), (node, event)) = entry.remove_entry();
            self.now = at;
            self.deliver(node, event);
        }
        self.now = end;
    }

    fn later(&mut self, node: usize, after: Duration, event: Event) {
        self.next_event += 1;
        let key = (self.now + after, self.next_event);
        self.queue.insert(key, (node, event));
    }

    fn deliver(&mut self, at: usize, event: Event) {
        match (self.nodes[at].state, &event) {
            (State::Gone, _) => return,
            (State::Paused, _) => {
                self.nodes[at].waits.push(event);
                return;
            }
            (State::Cut, Event::Broadcast(from, ..)) if self.keeps_loopback(at, *from) => {}
            (State::Cut, Event::Lease) => {
                self.later(at, Duration::from_millis(100), event);
                return;
            }
            (State::Cut, Event::Broadcast(..) | Event::Asked(..)) => return,
            (State::Cut, Event::Answered(from, id, Some(_))) => {
                let (from, id) = (*from, *id);
                self.take(at, Event::Answered(from, id, None));
                return;
            }
            _ => {}
        }
        self.take(at, event);
    }

    fn take(&mut self, at: usize, event: Event) {
        let dead_before = self.dead(at);
        let now = self.now;
        let again = match &event {
            Event::Tick => Some(TICK),
            Event::Work => Some(self.pause_between_work()),
            Event::Broadcast(..)
            | Event::Asked(..)
            | Event::Answered(..)
            | Event::Lease
            | Event::Due => None,
        };
        if matches!(event, Event::Work) {
            self.work(at);
        }
        let node = &mut self.nodes[at];
        let (replica, core) = (&mut node.replica, &mut node.core);
        match event.clone() {
            Event::Broadcast(from, incarnation, payload) => {
                let peer = replica.peers.get(&from);
                if peer
                    .and_then(Peer::fence)
                    .is_none_or(|fence| incarnation >= fence)
                {
                    node.heard.insert(from, now);
                }
                let fence = peer.and_then(Peer::fence);
                let mutation = self.mutation;
                if let Some(payload) = mutated(
                    mutation,
                    (node.router, from),
                    &mut node.core,
                    fence,
                    payload,
                ) {
                    node.replica.receive(&payload, &mut node.core, now);
                }
            }
            Event::Asked(from, id, question) => {
                let answer = replica.serve(&question, core, now);
                let router = node.router;
                self.answer(from, Event::Answered(router, id, answer));
            }
            Event::Answered(from, id, answer) => {
                replica.answered(from, id, answer.as_ref(), core, now);
            }
            Event::Lease => {
                self.revision += 1;
                replica.taken(Generation(self.revision), core, now);
                self.write_down(at);
            }
            Event::Tick => replica.tick(core, now),
            Event::Due => replica.send_due(core, now),
            Event::Work => replica.wrote(core, now),
        }
        if let Some(after) = again {
            self.later(at, after, event);
        }
        self.think_again(at);
        self.act(at);
        self.check(at, &dead_before);
    }

    /// Records a router's own digest at its last number.
    fn write_down(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        let head = node.core.messages_from(RecordNumber(u64::MAX), 0).head;
        self.trace.write_u64(head.digest.sum);
        let key = (node.router, head.incarnation, head.number);
        self.truth.insert(key, head.digest);
    }

    /// Often several routers work at the same moment and cannot see each other's choices.
    fn pause_between_work(&mut self) -> Duration {
        if self.rng.u32(..4) == 0 {
            return Duration::from_millis(self.rng.u64(10..150));
        }
        let since = (self.now - self.begun).as_millis() as u64;
        // 20 ms after a tick: a heartbeat that work overtakes shows nothing.
        Duration::from_millis(50 - (since + 30) % 50)
    }

    fn work(&mut self, at: usize) {
        if !self.works || self.nodes[at].state == State::Paused {
            return;
        }
        let open = self.nodes[at].open.len();
        match self.rng.u32(..8) {
            0..3 if open < 40 => self.admit(at),
            3 | 4 if open > 0 => {
                let counter = self.nodes[at].open[self.rng.usize(..open)];
                let blocks = self.rng.u32(1..4);
                self.note(at, SlotEvent::Grow { counter, blocks });
            }
            5 if open > 0 => {
                let index = self.rng.usize(..open);
                self.end(at, index);
            }
            _ => {}
        }
    }

    pub(super) fn admit(&mut self, at: usize) {
        let prompt = prompt(self.rng.u32(..3), self.rng.u32(1..200));
        let first_token = self.rng.bool();
        let ask = RouteRequest {
            model: "m",
            prompt: &prompt,
            exclude: &[],
            leg: crate::candidates::Leg::Whole,
        };
        let now = self.now;
        let node = &mut self.nodes[at];
        let counter = node.core.admit(&ask, None, now).unwrap().slot;
        node.open.push(counter);
        if !first_token {
            node.movable.insert(counter, prompt);
        }
        self.write_down(at);
        if first_token {
            self.note(at, SlotEvent::FirstToken { counter });
        }
    }

    fn note(&mut self, at: usize, event: SlotEvent) {
        let now = self.now;
        self.nodes[at].core.note(event, now).unwrap();
        self.write_down(at);
    }

    /// Decides crossed choices again.
    fn think_again(&mut self, at: usize) {
        let now = self.now;
        for slot in self.nodes[at].core.take_crossed() {
            let node = &mut self.nodes[at];
            let open = node.open.iter().position(|&open| open == slot);
            let (Some(open), Some(prompt)) = (open, node.movable.remove(&slot)) else {
                continue;
            };
            let ask = RouteRequest {
                model: "m",
                prompt: &prompt,
                exclude: &[],
                leg: crate::candidates::Leg::Whole,
            };
            if let Some(moved) = node.core.reconsider(slot, &ask, None, now).unwrap() {
                node.open[open] = moved.slot;
                self.moves += 1;
                self.write_down(at);
                let node = &mut self.nodes[at];
                node.replica.wrote(&mut node.core, now);
            }
        }
    }

    fn end(&mut self, at: usize, index: usize) {
        let counter = self.nodes[at].open.swap_remove(index);
        self.nodes[at].movable.remove(&counter);
        let ends = [SlotEnd::Completed, SlotEnd::Failed, SlotEnd::Aborted];
        let end = ends[self.rng.usize(..3)];
        self.note(at, SlotEvent::End { counter, end });
    }

    /// Every open request generates one more block.
    pub(super) fn grow_all(&mut self, at: usize) {
        for counter in self.nodes[at].open.clone() {
            self.note(at, SlotEvent::Grow { counter, blocks: 1 });
        }
    }

    pub(super) fn end_all(&mut self, at: usize) {
        while !self.nodes[at].open.is_empty() {
            self.end(at, 0);
        }
        let now = self.now;
        let node = &mut self.nodes[at];
        node.replica.wrote(&mut node.core, now);
        self.act(at);
    }

    fn act(&mut self, at: usize) {
        while let Some(effect) = self.nodes[at].replica.effect() {
            let router = self.nodes[at].router;
            match effect {
                ReplicaEffect::Publish(bytes) => {
                    self.trace.write(&bytes);
                    let incarnation = self.nodes[at].core.ledger().incarnation();
                    for to in 0..self.nodes.len() {
                        let event = Event::Broadcast(router, incarnation, bytes.clone());
                        self.send(at, to, &event);
                    }
                }
                ReplicaEffect::Ask { peer, id, question } => {
                    // A lost question or answer is a timeout.
                    self.later(at, ASK_TIMEOUT, Event::Answered(peer, id, None));
                    if let Some(to) = self.index(peer) {
                        self.send(at, to, &Event::Asked(router, id, question));
                    }
                }
                ReplicaEffect::TakeIncarnation => {
                    self.later(at, Duration::from_millis(3), Event::Lease)
                }
                ReplicaEffect::Ready => self.nodes[at].ready = Some(self.now),
            }
        }
        if let Some(due) = self.nodes[at].replica.due() {
            let after = due.saturating_duration_since(self.now);
            self.later(at, after, Event::Due);
        }
    }

    fn answer(&mut self, to: RouterId, answer: Event) {
        let Some(to) = self.index(to) else {
            return;
        };
        self.send(to, to, &answer);
    }

    fn send(&mut self, from: usize, to: usize, event: &Event) {
        let is_cut = self.nodes[from].state == State::Cut || self.nodes[to].state == State::Cut;
        if is_cut && !(from == to && self.keeps_loopback(to, self.nodes[to].router)) {
            return;
        }
        if self.rng.f64() < self.net.drop {
            return;
        }
        let copies = 1 + usize::from(self.rng.f64() < self.net.twice);
        for _ in 0..copies {
            let delay = self.net.delay_max.mul_f64(self.rng.f64());
            let late = if self.rng.f64() < self.net.straggle {
                Duration::from_millis(self.rng.u64(100..4000))
            } else {
                Duration::ZERO
            };
            self.later(to, delay + late, event.clone());
        }
    }

    fn keeps_loopback(&self, at: usize, from: RouterId) -> bool {
        self.mutation == Some(Mutation::LoopbackKept) && self.nodes[at].router == from
    }

    fn index(&self, router: RouterId) -> Option<usize> {
        self.nodes.iter().position(|node| node.router == router)
    }

    fn dead(&self, at: usize) -> BTreeSet<RouterId> {
        let peers = self.nodes[at].replica.peers.values();
        peers
            .filter(|peer| peer.is_dead())
            .map(|peer| peer.router)
            .collect()
    }

    // --- faults

    pub(super) fn crash(&mut self, at: usize) {
        self.nodes[at].state = State::Gone;
    }

    pub(super) fn leave(&mut self, at: usize) {
        self.end_all(at);
        let now = self.now;
        let node = &mut self.nodes[at];
        node.replica.leave(&mut node.core, now);
        self.act(at);
        self.nodes[at].state = State::Gone;
    }

    pub(super) fn set(&mut self, at: usize, state: State) {
        let now = self.now;
        let was = std::mem::replace(&mut self.nodes[at].state, state);
        // Only some cuts are visible to the client.
        let is_silent = self.mutation == Some(Mutation::LoopbackKept);
        if at.is_multiple_of(2) && was != state && !is_silent {
            let link = if state == State::Cut {
                PlaneLink::Down
            } else {
                PlaneLink::Up
            };
            self.nodes[at].replica.link(link, now);
            self.act(at);
        }
        if was == State::Paused && state == State::Up {
            let mut waits = std::mem::take(&mut self.nodes[at].waits);
            // Timers and sockets are polled in any order.
            if self.rng.bool() {
                waits.reverse();
            }
            for event in waits {
                self.deliver(at, event);
            }
        }
    }

    /// Changes a view without its replica's knowledge.
    pub(super) fn spoil(&mut self, at: usize) {
        let now = self.now;
        let routers: Vec<RouterId> = self.nodes.iter().map(|node| node.router).collect();
        let victim = routers[self.rng.usize(..routers.len())];
        let node = &mut self.nodes[at];
        if victim != node.router && self.spoilt.insert((node.router, victim)) {
            node.core.release(victim, now);
        }
    }

    /// Spoiled views are repaired by now, except those of routers that are gone.
    pub(super) fn forgive_no_more(&mut self) {
        let live: Vec<RouterId> = self
            .live()
            .iter()
            .map(|at| self.nodes[*at].router)
            .collect();
        self.spoilt.retain(|(_, of)| !live.contains(of));
    }

    pub(super) fn live(&self) -> Vec<usize> {
        let live = |at: &usize| self.nodes[*at].state != State::Gone;
        (0..self.nodes.len()).filter(live).collect()
    }

    // --- checks

    fn fault(&mut self, what: String) {
        self.faults.push(what);
    }

    /// Safety, after every step of a node.
    fn check(&mut self, at: usize, dead_before: &BTreeSet<RouterId>) {
        let node = &self.nodes[at];
        let mut faults = Vec::new();
        let own = node.core.digest(node.router);
        let ledger = node.core.ledger();
        let key = (node.router, ledger.incarnation(), ledger.last());
        if self.truth.get(&key).is_some_and(|truth| *truth != own)
            || own.count != node.open.len() as u64
        {
            faults.push(format!("{} is not what it wrote", node.router));
        }
        for peer in node.replica.peers.values() {
            let spoilt = self.spoilt.contains(&(node.router, peer.router));
            if !spoilt && let Some(number) = peer.followed() {
                let view = node.core.digest(peer.router);
                let truth = self.true_digest(peer, number);
                if truth != Some(view) {
                    faults.push(format!(
                        "{} holds {view:?} of {} at {number:?}, which held {truth:?}",
                        node.router, peer.router
                    ));
                }
            }
            let heard = node.heard.get(&peer.router);
            let silent = heard.is_none_or(|heard| self.now - *heard >= DEAD_AFTER);
            let has_left = self.index(peer.router).is_some_and(|at| {
                self.nodes[at].state == State::Gone && self.nodes[at].open.is_empty()
            });
            if peer.is_dead() && !dead_before.contains(&peer.router) && !silent && !has_left {
                faults.push(format!("{} buried {} alive", node.router, peer.router));
            }
        }
        let ignored = node.core.counts().ignored;
        if !self.spoils
            && (
                ignored.opened_twice,
                ignored.unknown_slot,
                ignored.prefilled_twice,
            ) != (0, 0, 0)
        {
            faults.push(format!("{} ignored changes: {ignored:?}", node.router));
        }
        if node.core.counts().slot_underflows > 0 {
            faults.push(format!("{} has a load below zero", node.router));
        }
        for what in faults {
            self.fault(what);
        }
    }

    fn true_digest(&self, peer: &Peer, number: Number) -> Option<LoadDigest> {
        let key = (peer.router, peer.fence()?, number);
        let before_all = number.is_none().then(LoadDigest::default);
        self.truth.get(&key).copied().or(before_all)
    }

    /// All live routers agree with each other and with the truth.
    pub(super) fn check_agreement(&mut self) {
        let mut faults = Vec::new();
        for &at in &self.live() {
            for &of in &self.live() {
                let (node, peer) = (&self.nodes[at], &self.nodes[of]);
                let truth = peer.core.digest(peer.router);
                let last = peer.core.ledger().last();
                let followed = match node.replica.peers.get(&peer.router) {
                    Some(known) => known.followed(),
                    None if at == of => Some(last),
                    None => None,
                };
                if followed != Some(last) || node.core.digest(peer.router) != truth {
                    faults.push(format!(
                        "{} is at {followed:?} of {}, which is at {last:?}",
                        node.router, peer.router
                    ));
                }
            }
        }
        self.faults.extend(faults);
    }

    /// Nothing is left of routers that are gone.
    pub(super) fn check_freed(&mut self) {
        let mut faults = Vec::new();
        for &at in &self.live() {
            for gone in self.nodes.iter().filter(|node| node.state == State::Gone) {
                let left = self.nodes[at].core.digest(gone.router);
                if left != LoadDigest::default() {
                    faults.push(format!("{at} holds {left:?} of {}", gone.router));
                }
            }
        }
        self.faults.extend(faults);
    }

    pub(super) fn check_idle(&mut self) {
        for at in self.live() {
            let left = self.nodes[at].core.counts().open_slots;
            let tokens: u64 = self.nodes[at]
                .core
                .loads()
                .iter()
                .map(|row| row.prefill_tokens + row.decode_blocks + u64::from(row.active_requests))
                .sum();
            if left > 0 || tokens > 0 {
                self.fault(format!("{at} has {left} slots left over"));
            }
        }
    }

    /// Equal for equal worlds.
    pub(super) fn trace(&self) -> u64 {
        self.trace.finish()
    }
}

/// The broadcast as the replica receives it under a mutation; `None` if it does not.
fn mutated(
    mutation: Option<Mutation>,
    (to, from): (RouterId, RouterId),
    core: &mut Core,
    fence: Option<Generation>,
    payload: Bytes,
) -> Option<Bytes> {
    let Some(mutation) = mutation else {
        return Some(payload);
    };
    let heartbeat = codec::decode::<LoadHeartbeat>(&payload).ok();
    match (mutation, heartbeat) {
        (Mutation::DigestIgnored, Some(heartbeat)) => {
            let digest = core.digest(from);
            let heartbeat = LoadHeartbeat {
                digest,
                ..heartbeat
            };
            Some(codec::encode(&heartbeat).unwrap().into())
        }
        (Mutation::HeartbeatsUnread, Some(_)) if from != to => None,
        (Mutation::OwnApplied, None) if from == to => {
            for message in messages(&payload) {
                core.apply_remote(&message, start());
            }
            Some(payload)
        }
        (Mutation::FormerAdmitted, None) if from != to => {
            let renewed = messages(&payload).into_iter().map(|mut message| {
                message.incarnation = fence.unwrap_or_default().max(message.incarnation);
                codec::encode(&message).unwrap()
            });
            let messages = renewed.collect();
            Some(codec::encode(&LoadFrame { messages }).unwrap().into())
        }
        _ => Some(payload),
    }
}

/// The messages of a frame, or a single one.
fn messages(payload: &[u8]) -> Vec<LoadMessage> {
    match codec::decode::<LoadFrame>(payload) {
        Ok(frame) => {
            let messages = frame.messages.iter();
            messages.map(|one| codec::decode(one).unwrap()).collect()
        }
        Err(_) => codec::decode(payload).into_iter().collect(),
    }
}
