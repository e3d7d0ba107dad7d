//! Replicas without a network between them: bounds, parts, frames.

use std::time::Instant;

use bytes::Bytes;
use warmroute_proto::codec;
use warmroute_proto::load::{
    LOAD_BYTES_MAX, LoadAnswer, LoadChange, LoadFrame, LoadHeartbeat, LoadMessage, LoadRequest,
    LoadRequestKind, Presence,
};
use warmroute_proto::{Generation, RecordNumber, RouterId};

use super::super::*;
use super::world::{core, prompt};
use crate::testing::start;
use crate::{Core, RouteRequest, SlotEvent};

pub(super) struct Side {
    router: RouterId,
    pub core: Core,
    pub replica: LoadReplica,
    published: Vec<Bytes>,
    asked: Vec<(RouterId, AskId, Bytes)>,
    echoes: Vec<(RouterId, AskId, Bytes)>,
}

impl Side {
    pub(super) fn new(number: u8, now: Instant) -> Self {
        Self::of(number, Generation(u64::from(number)), now)
    }

    fn of(number: u8, incarnation: Generation, now: Instant) -> Self {
        let router = RouterId([number; 16]);
        let mut side = Self {
            router,
            core: core(router, 1),
            replica: LoadReplica::new(router, now),
            published: Vec::new(),
            asked: Vec::new(),
            echoes: Vec::new(),
        };
        side.replica.taken(incarnation, &mut side.core, now);
        side.replica.listed();
        side.settle();
        side
    }

    pub(super) fn settle(&mut self) {
        while let Some(effect) = self.replica.effect() {
            match effect {
                ReplicaEffect::Publish(bytes) => self.published.push(bytes),
                ReplicaEffect::Ask { peer, id, question } if is_echo(&question) => {
                    self.echoes.push((peer, id, question));
                }
                ReplicaEffect::Ask { peer, id, question } => self.asked.push((peer, id, question)),
                ReplicaEffect::TakeIncarnation | ReplicaEffect::Ready => {}
            }
        }
    }

    fn admit(&mut self, family: u32, blocks: u32, now: Instant) -> u64 {
        let prompt = prompt(family, blocks);
        let ask = RouteRequest {
            model: "m",
            prompt: &prompt,
            exclude: &[],
            leg: crate::candidates::Leg::Whole,
        };
        self.core.admit(&ask, None, now).unwrap().slot
    }

    fn grow(&mut self, counter: u64, now: Instant) {
        let blocks = 1;
        let event = SlotEvent::Grow { counter, blocks };
        self.core.note(event, now).unwrap();
    }

    fn wrote(&mut self, now: Instant) {
        self.replica.wrote(&mut self.core, now);
        self.settle();
    }

    pub(super) fn receive(&mut self, payload: &Bytes, now: Instant) {
        self.replica.receive(payload, &mut self.core, now);
        self.settle();
    }

    fn tick(&mut self, now: Instant) {
        self.replica.tick(&mut self.core, now);
        self.settle();
    }

    /// A tick after which its own heartbeat comes back.
    pub(super) fn live(&mut self, now: Instant) {
        self.tick(now);
        for payload in std::mem::take(&mut self.published) {
            self.receive(&payload, now);
        }
    }

    /// Answers the last question.
    pub(super) fn answer(&mut self, answer: Option<&Bytes>, now: Instant) {
        if let Some((peer, id, _)) = self.asked.pop() {
            self.replica.answered(peer, id, answer, &mut self.core, now);
            self.settle();
        }
    }
}

fn is_echo(question: &[u8]) -> bool {
    let ask: LoadRequest = codec::decode(question).unwrap();
    matches!(ask.want, LoadRequestKind::Numbers { from, to: Some(to) } if to < from)
}

/// Delivers all broadcasts of one side and answers all questions of the other.
fn carry(from: &mut Side, to: &mut Side, now: Instant) {
    for payload in std::mem::take(&mut from.published) {
        to.receive(&payload, now);
    }
    while let Some((_, id, question)) = to.asked.pop() {
        let answer = from.replica.serve(&question, &mut from.core, now);
        let answer = answer.as_ref();
        if let Some(answer) = answer {
            assert!(answer.len() <= warmroute_proto::load::ANSWER_BYTES_MAX);
        }
        to.replica
            .answered(from.router, id, answer, &mut to.core, now);
        to.settle();
        from.settle();
    }
}

fn pair(now: Instant) -> (Side, Side) {
    let (mut a, mut b) = (Side::new(1, now), Side::new(2, now));
    carry(&mut a, &mut b, now);
    carry(&mut b, &mut a, now);
    (a, b)
}

fn agree(a: &Side, b: &Side) {
    assert_eq!(b.core.digest(a.router), a.core.digest(a.router));
}

#[test]
fn a_message_of_an_idle_router_leaves_immediately_and_later_ones_together() {
    let now = start();
    let (mut a, mut b) = pair(now);
    let counter = a.admit(0, 9, now);
    a.wrote(now);
    assert_eq!(a.published.len(), 1);
    assert_eq!(codec::kind(&a.published[0]), Some(5));
    carry(&mut a, &mut b, now);
    for _ in 0..50 {
        a.grow(counter, now);
        a.wrote(now);
    }
    assert!(a.published.is_empty());
    let due = a.replica.due().unwrap();
    assert!(due <= now + Duration::from_millis(1));
    a.replica.send_due(&mut a.core, due);
    a.settle();
    assert_eq!(a.published.len(), 1);
    let frame: LoadFrame = codec::decode(&a.published[0]).unwrap();
    assert_eq!(frame.messages.len(), 50);
    carry(&mut a, &mut b, due);
    agree(&a, &b);
    assert_eq!(a.replica.due(), None);
}

/// A generated block leaves with the next frame or after a while by itself.
#[test]
fn what_is_not_urgent_leaves_with_the_next_frame_or_by_the_clock() {
    let now = start();
    let (mut a, mut b) = pair(now);
    let counter = a.admit(0, 9, now);
    a.wrote(now);
    carry(&mut a, &mut b, now);
    a.grow(counter, now);
    let now = now + FRAME_PAUSE;
    a.core.note(SlotEvent::FirstToken { counter }, now).unwrap();
    a.wrote(now);
    let frame: LoadFrame = codec::decode(&a.published[0]).unwrap();
    assert_eq!((a.published.len(), frame.messages.len()), (1, 2));
    carry(&mut a, &mut b, now);
    a.grow(counter, now);
    a.tick(now + TICK);
    let has_grown = |a: &Side| a.published.iter().any(|said| codec::kind(said) == Some(5));
    assert!(!has_grown(&a));
    a.tick(now + LAZY_DELAY);
    assert!(has_grown(&a));
    carry(&mut a, &mut b, now + LAZY_DELAY);
    agree(&a, &b);
}

#[test]
fn a_large_state_comes_in_parts_of_one_cut_while_the_router_goes_on() {
    let now = start();
    let mut a = Side::new(1, now);
    let counters: Vec<u64> = (0..600).map(|family| a.admit(family, 700, now)).collect();
    // No peer receives it.
    a.wrote(now);
    let mut b = Side::new(2, now);
    carry(&mut b, &mut a, now);
    b.replica.learn(a.router, &mut b.core, now);
    b.settle();
    a.published.clear();
    let mut parts = 0;
    while let Some((_, id, question)) = b.asked.pop() {
        let answer = a.replica.serve(&question, &mut a.core, now).unwrap();
        parts += 1;
        // Slots grow and end between the parts.
        a.grow(counters[parts], now);
        let counter = counters[parts + 100];
        let end = warmroute_proto::load::SlotEnd::Completed;
        a.core.note(SlotEvent::End { counter, end }, now).unwrap();
        a.wrote(now + Duration::from_millis(parts as u64));
        for payload in std::mem::take(&mut a.published) {
            b.replica.receive(&payload, &mut b.core, now);
        }
        b.replica
            .answered(a.router, id, Some(&answer), &mut b.core, now);
        b.settle();
    }
    assert!(parts > 2, "{parts}");
    let later = now + HEARTBEAT_INTERVAL;
    a.tick(later);
    carry(&mut a, &mut b, later);
    agree(&a, &b);
    assert_eq!(a.replica.counts().mended.cuts, 1);
    assert_eq!(b.replica.counts().mended.mismatches, 0);
}

/// Peers that ask within a moment share a snapshot; a new router fetches newer messages before it
/// is ready.
#[test]
fn a_shared_cut_is_followed_by_what_came_since() {
    let now = start();
    let [mut a, mut b, mut c] = [1, 2, 3].map(|number| Side::new(number, now));
    a.published.clear();
    let learn = |side: &mut Side, router| {
        side.replica.learn(router, &mut side.core, now);
        side.settle();
    };
    learn(&mut b, a.router);
    carry(&mut a, &mut b, now);
    a.admit(0, 10, now);
    a.wrote(now);
    a.published.clear();
    learn(&mut c, a.router);
    assert!(
        !c.replica
            .snapshot(&mut c.core, StatusDetail::Summary, now)
            .is_ready
    );
    carry(&mut a, &mut c, now);
    agree(&a, &c);
    c.tick(now);
    assert!(
        c.replica
            .snapshot(&mut c.core, StatusDetail::Summary, now)
            .is_ready
    );
}

#[test]
fn what_fell_off_the_ring_comes_as_state() {
    let now = start();
    let (mut a, mut b) = pair(now);
    let counter = a.admit(0, 9, now);
    a.wrote(now);
    carry(&mut a, &mut b, now);
    // More is written without a connection than the ring keeps.
    a.replica.link(PlaneLink::Down, now);
    for _ in 0..60_000 {
        a.grow(counter, now);
    }
    a.wrote(now);
    assert!(a.published.is_empty());
    a.replica.link(PlaneLink::Up, now);
    let later = now + Duration::from_millis(10);
    a.tick(later);
    assert!(a.replica.counts().refused.unsent > 0);
    carry(&mut a, &mut b, later);
    agree(&a, &b);
    assert_eq!(b.replica.counts().mended.by_state, 1);
    assert!(b.replica.counts().refused.waiting > 0);
}

#[test]
fn a_gap_is_asked_for_once_and_filled_from_the_ring() {
    let now = start();
    let (mut a, mut b) = pair(now);
    let counter = a.admit(0, 9, now);
    for step in 0..5 {
        a.grow(counter, now);
        a.wrote(now + Duration::from_millis(step));
    }
    // The first is lost.
    a.published.remove(0);
    for payload in std::mem::take(&mut a.published) {
        b.receive(&payload, now);
    }
    assert_eq!(b.asked.len(), 1);
    carry(&mut a, &mut b, now);
    agree(&a, &b);
    let counts = b.replica.counts();
    assert_eq!((counts.mended.gaps, counts.mended.by_numbers), (1, 1));
    assert_eq!(counts.traffic.asks_out, 1);
}

fn message(router: u8, incarnation: u64, number: u64) -> Bytes {
    let message = LoadMessage {
        router: RouterId([router; 16]),
        incarnation: Generation(incarnation),
        number: RecordNumber(number),
        changes: vec![LoadChange::MarkPrefillCompleted { counter: 0 }],
    };
    codec::encode(&message).unwrap().into()
}

#[test]
fn nothing_of_a_former_incarnation_is_applied() {
    let now = start();
    let mut side = Side::new(1, now);
    side.receive(&message(2, 5, 0), now);
    assert_eq!(side.replica.counts().verdicts.applied, 1);
    for number in [0, 1, 2] {
        side.receive(&message(2, 4, number), now);
    }
    let verdicts = side.replica.counts().verdicts;
    assert_eq!((verdicts.applied, verdicts.old), (1, 3));
    side.receive(&message(2, 5, 1), now);
    assert_eq!(side.replica.counts().verdicts.applied, 2);
}

#[test]
fn late_messages_of_a_router_that_left_are_ignored() {
    let now = start();
    let (mut a, mut b) = pair(now);
    a.admit(0, 9, now);
    a.wrote(now);
    let late = a.published[0].clone();
    a.replica.leave(&mut a.core, now);
    a.settle();
    let goodbye: LoadHeartbeat = codec::decode(a.published.last().unwrap()).unwrap();
    assert_eq!(goodbye.presence, Presence::Leaving);
    for payload in std::mem::take(&mut a.published) {
        b.receive(&payload, now);
    }
    b.receive(&late, now);
    assert_eq!(b.core.digest(a.router).count, 0);
    assert!(b.asked.is_empty());
    assert_eq!(b.replica.counts().verdicts.old, 1);
}

#[test]
fn what_is_no_message_is_counted() {
    let now = start();
    let mut side = Side::new(1, now);
    let long = LoadMessage {
        router: RouterId([2; 16]),
        incarnation: Generation(1),
        number: RecordNumber(0),
        changes: vec![LoadChange::MarkPrefillCompleted { counter: 0 }; LOAD_BYTES_MAX / 12],
    };
    let broken = [
        Bytes::new(),
        Bytes::from_static(&[1]),
        Bytes::from_static(&[1, 5, 3]),
        Bytes::from_static(&[1, 9]),
        Bytes::from_static(&[1, 10, 255, 255, 255, 255, 255, 255, 255, 255]),
        Bytes::from_static(&[9, 9, 9, 9]),
        codec::encode(&long).unwrap().into(),
    ];
    for payload in &broken {
        side.receive(payload, now);
    }
    assert_eq!(side.replica.counts().verdicts.malformed, 7);
    assert_eq!(side.replica.serve(&[1, 11], &mut side.core, now), None);
    assert_eq!(side.replica.counts().verdicts.malformed, 8);
}

#[test]
fn a_message_too_many_a_router_too_many_and_a_question_too_many_are_refused() {
    let now = start();
    let mut side = Side::new(255, now);
    // Messages wait for the first one.
    let one = message(2, 5, 1).len();
    let room = u64::try_from(WAITING_BYTES_MAX / one).unwrap();
    for number in 1..=room + 10 {
        side.receive(&message(2, 5, number), now);
    }
    assert_eq!(side.replica.counts().refused.waiting, 10);
    for router in 1..=u8::try_from(PEERS_MAX).unwrap() + 4 {
        side.receive(&message(router, 5, 0), now);
    }
    assert_eq!(side.replica.peers.len(), PEERS_MAX);
    assert_eq!(side.replica.counts().refused.peers, 4);
    // The dead make room.
    let later = now + DEAD_AFTER;
    side.live(now);
    for step in 1..=5 {
        side.live(now + HEARTBEAT_INTERVAL * step);
    }
    assert_eq!(side.replica.counts().deaths, PEERS_MAX as u64);
    side.receive(&message(200, 5, 0), later);
    assert_eq!(side.replica.peers.len(), PEERS_MAX);

    let (.., question) = side.asked.first().cloned().unwrap();
    let mut other = Side::new(7, now);
    for _ in 0..SERVED_MAX {
        assert!(
            other
                .replica
                .serve(&question, &mut other.core, now)
                .is_some()
        );
    }
    assert_eq!(other.replica.serve(&question, &mut other.core, now), None);
    assert_eq!(other.replica.counts().refused.asks, 1);
    other.tick(now);
    assert!(
        other
            .replica
            .serve(&question, &mut other.core, now)
            .is_some()
    );
}

#[test]
fn a_state_with_a_wrong_digest_is_fetched_again_after_a_pause() {
    let now = start();
    let (mut a, mut b) = pair(now);
    a.admit(0, 9, now);
    a.wrote(now);
    carry(&mut a, &mut b, now);
    // The view of b is spoiled, and so is the state that a sends.
    b.core.release(a.router, now);
    let mut at = now;
    let mut asked = Vec::new();
    for step in 0..100 {
        at = now + Duration::from_millis(100) * step;
        a.tick(at);
        for payload in std::mem::take(&mut a.published) {
            b.receive(&payload, at);
        }
        b.tick(at);
        while let Some((_, id, question)) = b.asked.pop() {
            asked.push(at);
            let answer = a.replica.serve(&question, &mut a.core, at).unwrap();
            let mut spoilt = answer[..answer.len() - size_of::<u64>()].to_vec();
            let prefill = spoilt.iter().rposition(|byte| *byte != 0).unwrap();
            spoilt[prefill] ^= 1;
            codec::seal(&mut spoilt);
            b.replica
                .answered(a.router, id, Some(&spoilt.into()), &mut b.core, at);
            b.settle();
        }
    }
    assert!((4..20).contains(&asked.len()), "{}", asked.len());
    assert_eq!(b.replica.counts().mended.states_wrong, asked.len() as u64);
    // Agreement follows in the end.
    for _ in 0..400 {
        at += Duration::from_millis(100);
        a.tick(at);
        carry(&mut a, &mut b, at);
        b.tick(at);
        carry(&mut a, &mut b, at);
    }
    agree(&a, &b);
}

/// Without a router's broadcasts its load is unknown, however many echoes it sends.
#[test]
fn echoes_are_no_sign_of_life() {
    let mut now = start();
    let (mut a, mut b) = pair(now);
    for side in [&mut a, &mut b] {
        side.admit(0, 9, now);
        side.wrote(now);
    }
    carry(&mut b, &mut a, now);
    carry(&mut a, &mut b, now);
    assert_eq!(a.core.digest(b.router).count, 1);
    let end = now + DEAD_AFTER + 2 * HEARTBEAT_INTERVAL;
    while now < end {
        now += TICK;
        b.tick(now);
        for (peer, id, question) in std::mem::take(&mut b.echoes) {
            let answer = a.replica.serve(&question, &mut a.core, now);
            b.replica
                .answered(peer, id, answer.as_ref(), &mut b.core, now);
        }
        a.tick(now);
        // Broadcasts come back to their sender: no router is isolated.
        for payload in a.published.clone() {
            a.receive(&payload, now);
        }
        carry(&mut a, &mut b, now);
        for payload in std::mem::take(&mut b.published) {
            b.receive(&payload, now);
        }
    }
    assert!(a.replica.counts().traffic.echoes_in > 1);
    assert_eq!(a.core.digest(b.router).count, 0);
}

#[test]
fn a_peer_is_half_an_echo_away() {
    let now = start();
    let (mut a, mut b) = pair(now);
    let is_watched = |a: &mut Side| {
        let ask = RouteRequest {
            model: "m",
            prompt: &prompt(1, 9),
            exclude: &[],
            leg: crate::candidates::Leg::Whole,
        };
        a.core.admit(&ask, None, now).unwrap().movable_until
    };
    assert_eq!(is_watched(&mut a), None);
    b.admit(0, 9, now);
    b.wrote(now);
    carry(&mut b, &mut a, now);
    a.echoes.clear();
    a.tick(now + Duration::from_millis(500));
    let (peer, id, question) = a.echoes.pop().unwrap();
    assert_eq!(peer, b.router);
    let at = now + Duration::from_millis(502);
    let answer = b.replica.serve(&question, &mut b.core, at).unwrap();
    // An echo's answer is empty.
    let whole: LoadAnswer = codec::decode(&answer).unwrap();
    assert_eq!(whole, LoadAnswer::Messages(Vec::new()));
    assert_eq!(b.replica.counts().traffic.echoes_in, 1);
    let heard = now + Duration::from_millis(508);
    a.replica
        .answered(peer, id, Some(&answer), &mut a.core, heard);
    assert_eq!(is_watched(&mut a), Some(now + Duration::from_millis(4)));
    // A router that left is no peer.
    b.replica.leave(&mut b.core, heard);
    b.settle();
    carry(&mut b, &mut a, heard);
    assert_eq!(is_watched(&mut a), None);
}

/// In a new registry its incarnations begin low again.
#[test]
fn a_router_that_is_dead_for_long_is_forgotten_with_its_fence() {
    let now = start();
    let mut b = Side::new(2, now);
    let join = |b: &mut Side, incarnation, at| {
        let mut a = Side::of(1, Generation(incarnation), at);
        carry(b, &mut a, at);
        b.replica.learn(a.router, &mut b.core, at);
        b.settle();
        a.admit(0, 9, at);
        a.wrote(at);
        carry(&mut a, b, at);
        agree(&a, b);
        assert_eq!(b.core.digest(a.router).count, 1);
    };
    join(&mut b, 9, now);
    let mut at = now;
    while at < now + DEAD_AFTER + FENCE_KEPT + HEARTBEAT_INTERVAL {
        at += HEARTBEAT_INTERVAL;
        b.live(at);
    }
    assert_eq!(b.replica.counts().deaths, 1);
    b.asked.clear();
    // For the router that joins.
    at += HEARTBEAT_INTERVAL;
    b.tick(at);
    join(&mut b, 3, at);
}

#[test]
fn a_router_without_its_own_heartbeats_becomes_isolated_once() {
    let now = start();
    let mut side = Side::new(1, now);
    for step in 1..=10 {
        side.tick(now + ISOLATED_AFTER * step / 4);
        let isolations = u64::from(step >= 4);
        assert_eq!(side.replica.counts().deafs, isolations, "{step}");
    }
}
