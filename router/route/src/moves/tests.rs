use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use warmroute_proto::load::{LoadMessage, SlotEnd};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{BlockSize, DpRank, Generation, RouterId, Seed, Source, codec};

use super::*;
use crate::testing::start;
use crate::{Admitted, Core, CoreConfig, Policy, Prompt, RouteRequest, SlotEvent};

const DELAY: Duration = Duration::from_millis(5);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn id(router: usize) -> RouterId {
    RouterId([router as u8 + 1; 16])
}

fn entry(name: &str) -> WorkerEntry {
    WorkerEntry {
        models: vec!["m".into()],
        block_size: BlockSize::new(16),
        main_attention_only: true,
        ..WorkerEntry::new(name, format!("http://{name}:8000"))
    }
}

fn core(router: usize, workers: &[&str], policy: Policy) -> Core {
    let mut core = Core::new(CoreConfig {
        knobs: policy.into(),
        router: id(router),
        incarnation: Generation(1),
        seed: 7 + router as u64,
    });
    let entries: Vec<WorkerEntry> = workers.iter().map(|name| entry(name)).collect();
    core.set_workers(&entries);
    core
}

/// Prompts of different families share nothing.
fn prompt(family: u32, tokens: u32) -> Prompt {
    let tokens: Vec<u32> = (0..tokens).map(|at| family << 16 | at).collect();
    Prompt::new(&tokens, BlockSize::new(16).unwrap(), Seed::PLAIN)
}

const fn ask<'a>(prompt: &'a Prompt, exclude: &'a [Source]) -> RouteRequest<'a> {
    RouteRequest {
        model: "m",
        prompt,
        exclude,
        leg: crate::candidates::Leg::Whole,
    }
}

/// Two routers that know each other, and of 600 tokens on one of two sources.
struct Pair {
    one: Core,
    other: Core,
    now: Instant,
}

impl Pair {
    fn new(policy: Policy) -> Self {
        let now = start();
        let mut pair = Self {
            one: core(0, &["a", "b"], policy),
            other: core(1, &["a", "b"], policy),
            now,
        };
        let loaded = admit(&mut pair.one, &prompt(1, 600), now);
        tell(&loaded, &mut pair.other, now);
        pair.one.set_delay(id(1), Some(DELAY));
        pair.other.set_delay(id(0), Some(DELAY));
        pair
    }
}

fn admit(core: &mut Core, prompt: &Prompt, now: Instant) -> Admitted {
    core.admit(&ask(prompt, &[]), None, now).unwrap()
}

fn tell(said: &Admitted, to: &mut Core, now: Instant) {
    let message: LoadMessage = codec::decode(&said.message).unwrap();
    to.apply_remote(&message, now);
}

fn reconsider(core: &mut Core, slot: u64, prompt: &Prompt, now: Instant) -> Option<Admitted> {
    core.reconsider(slot, &ask(prompt, &[]), None, now).unwrap()
}

#[test]
fn the_later_of_two_crossed_choices_moves() {
    let Pair {
        mut one,
        mut other,
        now,
    } = Pair::new(Policy::Kv);
    let (mine, yours) = (prompt(2, 1000), prompt(3, 1000));
    let first = admit(&mut one, &mine, now);
    let second = admit(&mut other, &yours, now + ms(2));
    assert_eq!(first.decision.source, second.decision.source);
    assert_eq!(second.movable_until, Some(now + ms(2) + DELAY));

    tell(&second, &mut one, now + ms(2) + DELAY);
    assert!(one.take_crossed().is_empty());
    tell(&first, &mut other, now + DELAY);
    assert_eq!(other.take_crossed(), [second.slot]);
    let moved = reconsider(&mut other, second.slot, &yours, now + DELAY).unwrap();
    assert_ne!(moved.decision.source, first.decision.source);
    assert_eq!(moved.movable_until, None);
    assert_eq!(other.counts().freed.aborted, 1);
    // One message contains both changes: no peer counts the request twice.
    tell(&moved, &mut one, now + 2 * DELAY);
    assert_eq!(one.loads(), other.loads());
    assert_eq!(one.digest(id(1)), other.digest(id(1)));
    // What was moved stays, whatever comes.
    let third = admit(&mut one, &prompt(4, 1000), now + 2 * DELAY);
    tell(&third, &mut other, now + 2 * DELAY);
    assert!(other.take_crossed().is_empty());
}

#[test]
fn a_request_that_stays_changes_nothing() {
    let Pair {
        mut one,
        mut other,
        now,
    } = Pair::new(Policy::Kv);
    // Behind 700 tokens: as good as behind 600, as far as the margin goes.
    let first = admit(&mut one, &prompt(2, 700), now);
    let yours = prompt(3, 1000);
    let second = admit(&mut other, &yours, now);
    tell(&first, &mut other, now + ms(1));
    assert_eq!(other.take_crossed(), [second.slot]);
    let before = (
        other.loads(),
        other.digest(id(1)),
        other.counts().open_slots,
    );
    assert!(reconsider(&mut other, second.slot, &yours, now + ms(1)).is_none());
    let after = (
        other.loads(),
        other.digest(id(1)),
        other.counts().open_slots,
    );
    assert_eq!(before, after);
    assert_eq!(other.counts().moves.stayed, 1);
    // Its prompt is expected there as before, and it may still be crossed again.
    let alike = admit(&mut other, &yours, now + ms(1)).decision;
    let there = |terms: &&crate::Terms| terms.source == second.decision.claim.source;
    let there = alike.weighed.iter().find(there).unwrap();
    assert_eq!(there.predicted_blocks, second.decision.claim.credit_max);
    tell(
        &admit(&mut one, &prompt(4, 500), now + ms(1)),
        &mut other,
        now + ms(2),
    );
    let more = admit(&mut one, &prompt(5, 3000), now + ms(1));
    assert_eq!(more.decision.source, first.decision.source);
    tell(&more, &mut other, now + ms(3));
    assert!(other.take_crossed().contains(&second.slot));
    assert!(reconsider(&mut other, second.slot, &yours, now + ms(3)).is_some());
}

#[test]
fn nothing_moves_without_a_reason() {
    let watched = |policy, exclude: &[Source], touch: fn(&mut Core)| {
        let Pair { mut other, now, .. } = Pair::new(policy);
        touch(&mut other);
        let asked = prompt(3, 1000);
        let admitted = other.admit(&ask(&asked, exclude), None, now);
        admitted.unwrap().movable_until.is_some()
    };
    assert!(watched(Policy::Kv, &[], |_| ()));
    for policy in [
        Policy::KvOnce,
        Policy::LeastLoad,
        Policy::Random,
        Policy::RoundRobin,
    ] {
        assert!(!watched(policy, &[], |_| ()), "{policy:?}");
    }
    let tried = Source {
        worker: "a".into(),
        dp_rank: DpRank(0),
    };
    assert!(!watched(Policy::Kv, &[tried], |_| ()));
    assert!(!watched(Policy::Kv, &[], |core| core.set_delay(id(0), None)));
    assert!(!watched(Policy::Kv, &[], Core::stop_moves));
}

#[test]
fn only_what_was_unseen_and_unanswered_is_crossed() {
    let crossed = |touch: fn(&mut Core, u64, Instant), heard: Duration| {
        let Pair {
            mut one,
            mut other,
            now,
        } = Pair::new(Policy::Kv);
        let first = admit(&mut one, &prompt(2, 1000), now);
        let second = admit(&mut other, &prompt(3, 1000), now);
        touch(&mut other, second.slot, now);
        tell(&first, &mut other, now + heard);
        !other.take_crossed().is_empty()
    };
    let leave = |_: &mut Core, _: u64, _: Instant| ();
    assert!(crossed(leave, ms(4)));
    // Decided at the same moment: of two routers one gives way, the higher one.
    assert!(crossed(leave, DELAY));
    assert!(!crossed(leave, DELAY + ms(1)));
    let ends: [fn(&mut Core, u64, Instant); 3] = [
        |core, counter, now| {
            core.note(SlotEvent::FirstToken { counter }, now).unwrap();
        },
        |core, counter, now| {
            let event = SlotEvent::PrefillPredicted { counter };
            core.note(event, now).unwrap();
        },
        |core, counter, now| {
            let end = SlotEnd::Aborted;
            core.note(SlotEvent::End { counter, end }, now).unwrap();
        },
    ];
    for end in ends {
        assert!(!crossed(end, ms(4)));
    }
}

#[test]
fn what_is_watched_has_a_bound_and_an_end() {
    let now = start();
    let mut moves = MoveTracker::default();
    let source = crate::source_table::SourceTable::default().intern(&Source {
        worker: "a".into(),
        dp_rank: DpRank(0),
    });
    moves.set_delay(id(1), Some(ms(100)));
    for slot in 0..WATCHED_MAX as u64 {
        assert_eq!(moves.sent(slot, source, now), Some(now + MOVE_WINDOW_MAX));
    }
    assert_eq!(moves.sent(5000, source, now), None);
    assert_eq!(moves.counts.unwatched, 1);
    let later = now + MOVE_WINDOW_MAX + ms(1);
    moves.peer_chose(id(0), id(1), source, later);
    assert!(moves.take_crossed().is_empty());
    assert!(moves.sent(5001, source, later).is_some());
    moves.peer_chose(id(0), id(2), source, later);
    assert!(moves.take_crossed().is_empty(), "of an unknown distance");
    moves.peer_chose(id(0), id(1), source, later);
    moves.peer_chose(id(0), id(1), source, later);
    assert_eq!(moves.take_crossed(), [5001]);
}

/// A request as its client sees it.
struct Request {
    router: usize,
    slot: u64,
    prompt: Prompt,
    moves: usize,
}

#[derive(Clone, Debug)]
enum Event {
    Arrive {
        router: usize,
        family: u32,
        tokens: u32,
    },
    Deliver {
        to: usize,
        message: LoadMessage,
    },
    FirstToken {
        request: usize,
    },
    End {
        request: usize,
    },
}

/// Routers whose messages take their time, each pair's in order.
struct Net {
    cores: Vec<Core>,
    requests: Vec<Request>,
    queue: BTreeMap<(Instant, usize), Event>,
    planned: usize,
    /// When the last message of a pair comes.
    last: BTreeMap<(usize, usize), Instant>,
    rng: fastrand::Rng,
    delay: Duration,
    moves: usize,
}

impl Net {
    fn new(routers: usize, delay: Duration, seed: u64) -> Self {
        let mut cores: Vec<Core> = (0..routers)
            .map(|router| core(router, &["a", "b", "c"], Policy::Kv))
            .collect();
        for (at, core) in cores.iter_mut().enumerate() {
            for other in (0..routers).filter(|&other| other != at) {
                core.set_delay(id(other), Some(delay));
            }
        }
        Self {
            cores,
            requests: Vec::new(),
            queue: BTreeMap::new(),
            planned: 0,
            last: BTreeMap::new(),
            rng: fastrand::Rng::with_seed(seed),
            delay,
            moves: 0,
        }
    }

    fn plan(&mut self, at: Instant, event: Event) {
        self.planned += 1;
        self.queue.insert((at, self.planned), event);
    }

    /// Delays differ from what is believed of them by up to as much.
    fn broadcast(&mut self, from: usize, bytes: &[u8], now: Instant) {
        let message: LoadMessage = codec::decode(bytes).unwrap();
        for to in (0..self.cores.len()).filter(|&to| to != from) {
            let takes = self.delay.mul_f64(self.rng.f64() * 2.0);
            let last = self.last.entry((from, to)).or_insert(now);
            *last = (*last).max(now + takes);
            let (at, message) = (*last, message.clone());
            self.plan(at, Event::Deliver { to, message });
        }
    }

    fn run(&mut self) {
        while let Some(((now, _), event)) = self.queue.pop_first() {
            match event {
                Event::Arrive {
                    router,
                    family,
                    tokens,
                } => self.arrive(router, prompt(family, tokens), now),
                Event::Deliver { to, message } => {
                    self.cores[to].apply_remote(&message, now);
                    self.think_again(to, now);
                }
                Event::FirstToken { request } => {
                    let Request { router, slot, .. } = self.requests[request];
                    let event = SlotEvent::FirstToken { counter: slot };
                    self.note(router, event, now);
                }
                Event::End { request } => {
                    let Request { router, slot, .. } = self.requests[request];
                    let (counter, end) = (slot, SlotEnd::Completed);
                    self.note(router, SlotEvent::End { counter, end }, now);
                }
            }
        }
    }

    fn arrive(&mut self, router: usize, prompt: Prompt, now: Instant) {
        let admitted = admit(&mut self.cores[router], &prompt, now);
        let slot = admitted.slot;
        let request = self.requests.len();
        self.requests.push(Request {
            router,
            slot,
            prompt,
            moves: 0,
        });
        self.broadcast(router, &admitted.message, now);
        let first = now + ms(self.rng.u64(1..40));
        self.plan(first, Event::FirstToken { request });
        let end = first + ms(self.rng.u64(1..100));
        self.plan(end, Event::End { request });
    }

    fn note(&mut self, router: usize, event: SlotEvent, now: Instant) {
        let bytes = self.cores[router].note(event, now).unwrap();
        self.broadcast(router, &bytes, now);
    }

    fn think_again(&mut self, at: usize, now: Instant) {
        for slot in self.cores[at].take_crossed() {
            let is_it = |request: &Request| (request.router, request.slot) == (at, slot);
            let found = self.requests.iter().position(is_it).unwrap();
            let prompt = self.requests[found].prompt.clone();
            if let Some(moved) = reconsider(&mut self.cores[at], slot, &prompt, now) {
                self.requests[found].slot = moved.slot;
                self.requests[found].moves += 1;
                self.moves += 1;
                self.broadcast(at, &moved.message, now);
            }
        }
    }

    /// All routers hold the same load of each router, and nothing of ended requests is left.
    fn check(&self) -> Result<(), TestCaseError> {
        for core in &self.cores {
            for router in 0..self.cores.len() {
                let truth = self.cores[router].digest(id(router));
                prop_assert_eq!(core.digest(id(router)), truth);
            }
            prop_assert_eq!(core.counts().open_slots, 0);
            let ignored = core.counts().ignored;
            prop_assert_eq!(ignored.unknown_slot + ignored.opened_twice, 0);
            prop_assert_eq!(ignored.prefilled_twice, 0);
            let counts = core.counts();
            prop_assert_eq!(counts.freed.aborted, counts.moves.moved);
            prop_assert_eq!(counts.opened, counts.freed.completed + counts.freed.aborted);
            let idle = |load: &crate::SourceLoad| {
                (
                    load.active_requests,
                    load.prefill_tokens,
                    load.decode_blocks,
                ) == (0, 0, 0)
            };
            prop_assert!(core.loads().iter().all(idle));
        }
        for request in &self.requests {
            prop_assert!(request.moves <= 1);
        }
        Ok(())
    }
}

fn arrivals() -> impl Strategy<Value = Vec<(usize, u64, u32, u32)>> {
    proptest::collection::vec((0..3_usize, 0..8_u64, 0..4_u32, 1..3000_u32), 1..60)
}

proptest! {
    #[test]
    fn all_routers_agree_and_no_request_moves_twice(
        arrivals in arrivals(),
        routers in 2..4_usize,
        delay in 1..10_u64,
        seed: u64,
    ) {
        let mut net = Net::new(routers, ms(delay), seed);
        let mut at = start();
        for (router, gap, family, tokens) in arrivals {
            at += ms(gap);
            let router = router % routers;
            net.plan(at, Event::Arrive { router, family, tokens });
        }
        net.run();
        net.check()?;
    }
}

/// Were there none, the property above would say nothing.
#[test]
fn there_are_moves_to_speak_of() {
    let mut net = Net::new(3, ms(5), 1);
    let now = start();
    for number in 0..200 {
        let event = Event::Arrive {
            router: number % 3,
            family: number as u32,
            tokens: 1500,
        };
        net.plan(now + ms(3 * number as u64), event);
    }
    net.run();
    assert!(net.moves > 10, "{}", net.moves);
    net.check().unwrap();
}
