//! Engines: what they do, what they publish, and how they die.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use warmroute_proto::{EngineSeq, Source};
use warmroute_router::sim::{EngineRequest, RequestId};
use warmroute_shim::engine::EngineEvent;
use warmroute_shim::source::ReplayId;

use super::faults::Rates;
use super::host::{Event, Http, Input, ProcessId};
use super::life::{DrawnGroups, Life, Told, Truth, draw_config};
use super::plane::At;
use super::trouble::{EngineTrouble, Trouble};
use super::{World, shim};
use warmroute_mock_engine::HashMode;

/// Batches of a replay that come together.
const REPLAY_CHUNK: usize = 16;
/// Engines work so long into the calm.
const WORKS_ON: Duration = Duration::from_secs(3);

/// And finish what they began within this time.
const DRAINS: Duration = Duration::from_secs(5);

/// A life that ended.
pub(super) struct Past {
    pub(super) truth: Truth,
    pub(super) published: Vec<At>,
    pub(super) ended: At,
}

pub(super) struct EngineNode {
    pub(super) source: Source,
    pub(super) life: Life,
    /// Counts its lives.
    pub(super) number: u64,
    pub(super) is_up: bool,
    /// When it was started, or its trouble ended.
    pub(super) up_since: At,
    pub(super) trouble: EngineTrouble,
    /// When each batch of this life was published.
    pub(super) published: Vec<At>,
    pub(super) past: Vec<Past>,
    /// A request in the calm, with which the engine publishes a reset.
    pub(super) is_reset: bool,
    /// Until then its batches have events of an unknown type.
    pub(super) unknown_until: At,
    pub(super) unknown_removals_until: At,
    /// Until then each of its batches gives one block hash to two prefixes.
    pub(super) position_free_until: At,
    /// Requests that came from routers.
    pub(super) guests: BTreeMap<RequestId, Guest>,
}

/// The owner of the request.
pub(super) struct Guest {
    pub(super) from: ProcessId,
    pub(super) no: u64,
    /// Prompt tokens that were cached when it was scheduled.
    cached_tokens: Option<usize>,
    /// One stream keeps its order.
    sent_until: At,
}

impl EngineNode {
    /// Whether its process answers at all.
    pub(super) fn answers(&self) -> bool {
        self.is_up && self.trouble.present != Some(Trouble::Frozen)
    }

    pub(super) fn draw(worker: usize, rates: &Rates, rng: &mut Rng) -> Self {
        let mut config = draw_config(rng, DrawnGroups::One);
        config.life = rng.u64(..);
        if rates.has_one_group {
            config.groups = vec![warmroute_router::sim::GroupKind::FullAttention];
        }
        if rates.set.has_room {
            config.num_blocks = 400;
            config.max_num_seqs = 32;
            config.max_num_batched_tokens = 8192;
        }
        let mode = if rng.bool() {
            HashMode::Int
        } else {
            HashMode::Bytes
        };
        let mut life = Life::new(config, mode, Told::Once);
        if rng.u8(0..3) == 0 && !rates.is_calm {
            life.buffer = rng.usize(2..40);
        }
        if let Some(batches) = rates.set.replay_buffer {
            life.buffer = batches;
        }
        Self {
            source: shim::source(worker),
            life,
            number: 0,
            is_up: true,
            up_since: At::ZERO,
            trouble: EngineTrouble::default(),
            published: Vec::new(),
            past: Vec::new(),
            is_reset: false,
            unknown_until: Duration::ZERO,
            unknown_removals_until: Duration::ZERO,
            position_free_until: Duration::ZERO,
            guests: BTreeMap::new(),
        }
    }
}

impl World {
    pub(super) fn plan_engine(&mut self, engine: usize) {
        let after = self.millis(20..300);
        self.plan(after, Event::Engine(engine));
    }

    pub(super) fn engine_works(&mut self, at: usize) {
        self.plan_engine(at);
        if !self.engines[at].is_up || !self.computes(at) {
            return;
        }
        let is_busy = self
            .calm_since
            .is_none_or(|since| self.now < since + WORKS_ON);
        if is_busy && self.rng.u8(0..10) < 4 {
            self.engines[at].life.submit(&mut self.rng);
        }
        // A request may wait for ever for a block that only a fault gave away.
        if self
            .calm_since
            .is_some_and(|since| self.now > since + WORKS_ON + DRAINS)
            && !self.engines[at].is_reset
        {
            self.engines[at].life.abort_all();
            self.tell_all_guests(at, Http::Done(None));
        }
        for _ in 0..self.rng.usize(1..4) {
            self.engine_step(at);
        }
    }

    fn engine_step(&mut self, at: usize) {
        let stepped = self.engines[at].life.step();
        self.tell_guests(at);
        match stepped {
            Err(why) => self.fail(why),
            Ok(None) => {}
            Ok(Some(seq)) => self.publish_batch(at, seq),
        }
    }

    fn publish_batch(&mut self, at: usize, seq: u64) {
        self.add_strange_events(at, seq as usize);
        let payload = self.engines[at].life.batches[seq as usize].clone();
        self.note(|| format!("engine {at}: batch {seq}"));
        self.engines[at].published.push(self.now);
        for shim in [2 * at, 2 * at + 1] {
            if self.shims[shim].is_joined && !self.strikes(self.rates.zmq_lost) {
                let frames = shim::message(EngineSeq(seq), &payload);
                self.send_engine_event(shim, EngineEvent::Live(frames));
            }
        }
    }

    /// Answers a shim's question for all batches from one on, as far as they are kept.
    pub(super) fn replay(&mut self, shim: usize, life: u64, id: ReplayId, from: EngineSeq) {
        let host = self.shims[shim].host;
        let engine = &self.engines[self.shims[shim].worker];
        if !engine.answers() || self.hosts[host].life != life {
            return;
        }
        let batches = &engine.life.batches;
        let oldest = batches.len().saturating_sub(engine.life.buffer);
        let from = usize::try_from(from.0).unwrap_or(usize::MAX).max(oldest);
        let mut kept: Vec<_> = (from..batches.len())
            .map(|seq| (EngineSeq(seq as u64), batches[seq].clone()))
            .collect();
        let hole = self.rates.replay_hole;
        kept.retain(|_| hole == 0 || self.rng.u16(0..1000) >= hole);
        let is_broken = self.strikes(self.rates.replay_broken);
        if is_broken {
            kept.truncate(self.rng.usize(0..=kept.len()));
        }
        let mut after = self.delay();
        for chunk in kept.chunks(REPLAY_CHUNK) {
            for (seq, payload) in chunk {
                let batch = EngineEvent::Replay(id, shim::message(*seq, payload));
                self.send_host(host, after, Input::Engine(batch));
            }
            after += self.delay();
        }
        let end = if is_broken {
            shim::broken_replay(id)
        } else {
            shim::end_of_replay(id)
        };
        // Broken off, it may also just say nothing more.
        if !is_broken || self.rng.bool() {
            self.send_host(host, after, Input::Engine(end));
        }
    }

    // --- requests of routers

    pub(super) fn serve(&mut self, at: usize, from: ProcessId, no: u64, request: EngineRequest) {
        let failure = self.failure(at, &request);
        let engine = &mut self.engines[at];
        let answer = if !engine.is_up {
            Http::Refused
        } else if let Some(failure) = failure {
            failure
        } else if let Some(id) = engine.life.take(request) {
            let guest = Guest {
                from,
                no,
                cached_tokens: None,
                sent_until: self.now,
            };
            engine.guests.insert(id, guest);
            return;
        } else {
            Http::Rejected
        };
        let after = self.delay();
        self.send_process(from, after, Input::Http(no, answer));
    }

    pub(super) fn hang_up(&mut self, at: usize, from: ProcessId, no: Option<u64>) {
        let engine = &mut self.engines[at];
        let is_its = |guest: &Guest| guest.from == from && no.is_none_or(|no| guest.no == no);
        let gone = engine.guests.extract_if(.., |_, guest| is_its(guest));
        for (id, _) in gone {
            engine.life.drop_request(id);
        }
    }

    /// What the last step made of their requests.
    fn tell_guests(&mut self, at: usize) {
        if self.engines[at].guests.is_empty() {
            return;
        }
        let size = self.engines[at].life.config.block_size.tokens();
        let outcome = std::mem::take(&mut self.engines[at].life.outcome);
        for admitted in &outcome.admitted {
            if let Some(guest) = self.engines[at].guests.get_mut(&admitted.id) {
                guest.cached_tokens = Some(admitted.cached.total());
            }
        }
        for produced in &outcome.produced {
            if produced.generated == 1 {
                self.tell_guest(at, produced.id, Http::FirstToken);
                if self.engines[at].trouble.present == Some(Trouble::ErrorLater) {
                    self.tell_guest(at, produced.id, Http::ErrorEvent);
                    self.engines[at].guests.remove(&produced.id);
                    self.engines[at].life.drop_request(produced.id);
                }
            }
            if produced.generated.is_multiple_of(size) {
                self.tell_guest(at, produced.id, Http::Block);
            }
        }
        for finished in &outcome.finished {
            let guest = self.engines[at].guests.get(&finished.id);
            let cached_tokens = guest.and_then(|guest| guest.cached_tokens);
            self.tell_guest(at, finished.id, Http::Done(cached_tokens));
            self.engines[at].guests.remove(&finished.id);
        }
    }

    fn tell_all_guests(&mut self, at: usize, what: Http) {
        let guests: Vec<RequestId> = self.engines[at].guests.keys().copied().collect();
        for guest in guests {
            self.tell_guest(at, guest, what);
        }
        self.engines[at].guests.clear();
    }

    fn tell_guest(&mut self, at: usize, id: RequestId, what: Http) {
        let delay = self.delay();
        let now = self.now;
        let Some(guest) = self.engines[at].guests.get_mut(&id) else {
            return;
        };
        guest.sent_until = (now + delay).max(guest.sent_until);
        let (from, no, after) = (guest.from, guest.no, guest.sent_until - now);
        self.send_process(from, after, Input::Http(no, what));
    }

    // --- lives

    /// Did it run?
    pub(super) fn kill_engine(&mut self, at: usize) -> bool {
        let engine = &mut self.engines[at];
        if !std::mem::replace(&mut engine.is_up, false) {
            return false;
        }
        let truth = engine.life.begin();
        engine.number += 1;
        engine.past.push(Past {
            truth,
            published: std::mem::take(&mut engine.published),
            ended: self.now,
        });
        self.disconnect_zmq(2 * at);
        self.disconnect_zmq(2 * at + 1);
        self.tell_all_guests(at, Http::Broken);
        self.trouble_over(at);
        true
    }

    pub(super) fn start_engine(&mut self, at: usize) {
        if std::mem::replace(&mut self.engines[at].is_up, true) {
            return;
        }
        self.engines[at].up_since = self.now;
        self.connect_shims(at);
    }

    fn connect_shims(&mut self, at: usize) {
        for shim in [2 * at, 2 * at + 1] {
            if self.hosts[self.shims[shim].host].is_up {
                self.plan_connect(shim);
            }
        }
    }

    /// Restarted immediately, and past its former sequence before a shim listens.
    pub(super) fn restart_plausibly(&mut self, at: usize) -> bool {
        let reached = self.engines[at].life.batches.len();
        let did_run = self.kill_engine(at);
        self.engines[at].is_up = true;
        self.engines[at].up_since = self.now;
        let reach = reached + self.rng.usize(0..3);
        for _ in 0..400 {
            if self.engines[at].life.batches.len() >= reach {
                break;
            }
            self.engines[at].life.submit(&mut self.rng);
            self.engine_step(at);
        }
        self.connect_shims(at);
        did_run
    }

    /// The engine's cache is emptied, and the engine publishes that.
    pub(super) fn reset_in_the_calm(&mut self, at: usize) {
        let engine = &mut self.engines[at];
        engine.is_reset = true;
        engine.life.reset();
        // It publishes the reset with the next request, and not every request fits.
        for _ in 0..100 {
            if engine.life.has_requests() {
                break;
            }
            engine.life.submit(&mut self.rng);
        }
    }
}
