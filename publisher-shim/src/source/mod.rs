//! One rank's state machine: what may be believed, what goes to the log, what may be claimed.
//!
//! [`SourceCore`] is pure. Whoever drives it feeds what happens (`connected`, `live`,
//! `replay_batch`, `tick`, `acknowledged`, …) together with the present time, and then takes
//! [`Effect`]s until none is left. `engine` decides which batches are applied: in order, without a
//! gap, and of one life of the engine; `publisher` turns their changes into generations and
//! records.
//!
//! Invariant: a credited state leaves this module only while its own proof is fresh, and only for
//! what the log has acknowledged or what the same record carries.
//!
//! Not here: sockets, HTTP, the registry and the clock (`service`).

mod engine;
mod pack;
mod publisher;
mod ring;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::registry::ResyncReason;
use warmroute_proto::{
    BlockSize, EngineHealth, EngineSeq, Generation, Heartbeat, RecordNumber, Source, TierState,
    TierStates,
};

use crate::mirror::{self, Mirror, Sign, Start};
use engine::Engine;
pub use publisher::Point;
use publisher::{Present, Publisher};

/// A shim's own proof counts this long: with a poll each second two may fail.
const PROOF_MAX: Duration = Duration::from_secs(3);
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);
/// A generation so young answers everybody who asked for one above an older fence.
const RESYNC_COALESCE: Duration = Duration::from_secs(3);

/// How one source is set up.
#[derive(Clone, Debug)]
pub struct Config {
    pub source: Source,
    pub mirror: mirror::Config,
    /// The engine has a replay endpoint and it is known.
    pub has_replay: bool,
    /// Messages of other topics are dropped.
    pub topic: Option<String>,
    /// Batches of other ranks are dropped.
    pub rank: Option<u32>,
    /// Bytes of records that may wait for the log.
    pub outbox_bytes_max: usize,
    /// Bytes of live batches that may wait for a replay's end.
    pub held_bytes_max: usize,
}

impl Config {
    #[must_use]
    pub fn new(source: Source, has_replay: bool) -> Self {
        Self {
            source,
            mirror: mirror::Config::default(),
            has_replay,
            topic: None,
            rank: None,
            outbox_bytes_max: 64 << 20,
            held_bytes_max: 64 << 20,
        }
    }
}

/// One append, so that its answer finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AppendId {
    pub generation: Generation,
    pub number: RecordNumber,
    /// Answers of an earlier round of sending are ignored.
    pub attempt: u32,
}

/// A replay under way; answers to an earlier one are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplayId(pub u64);

/// What is to be done outside.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Ask the engine for every batch from `from` on, inclusive. Ends an earlier replay.
    Replay {
        id: ReplayId,
        from: EngineSeq,
    },
    /// Write the next generation by compare-and-set: 1 + the highest of the registry's, that of the
    /// last record on the subject, and `above`.
    ClaimGeneration {
        above: Generation,
    },
    /// Append to the source's subject, in the order of the effects.
    Append {
        id: AppendId,
        payload: Bytes,
    },
    Heartbeat(Heartbeat),
    Notice(Notice),
}

/// What an operator may want to know. Said once, when it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    NewGeneration(Reason),
    /// What may be claimed about GPU memory changed.
    State(TierState),
}

/// Why a generation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    LeaseTaken,
    EngineRestarted,
    GapUnfilled,
    /// Without replays or sequence numbers a loss could not be repaired or even seen.
    LossUnseen,
    Sign(Sign),
    OutboxFull,
    Resync(ResyncReason),
    LogLost,
}

impl Reason {
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::LeaseTaken => "lease_taken",
            Self::EngineRestarted => "engine_restarted",
            Self::GapUnfilled => "gap_unfilled",
            Self::LossUnseen => "loss_unseen",
            Self::Sign(sign) => sign.word(),
            Self::OutboxFull => "outbox_full",
            Self::Resync(reason) => reason.word(),
            Self::LogLost => "log_lost_records",
        }
    }
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub batches: u64,
    pub duplicates: u64,
    pub gaps: u64,
    pub gaps_unfilled: u64,
    pub restarts: u64,
    pub replays: u64,
    pub replays_unanswered: u64,
    pub payloads_malformed: u64,
    pub other_topic: u64,
    pub other_rank: u64,
    pub held_dropped: u64,
    pub generations: u64,
    pub appends_failed: u64,
}

/// What the source is now.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    pub source: Source,
    pub generation: Option<Generation>,
    /// As of the last acknowledged record.
    pub acknowledged: Option<Point>,
    /// As it may be claimed now, of the last acknowledged record.
    pub states: TierStates,
    /// The last batch applied to the mirror.
    pub engine_seq: Option<EngineSeq>,
    pub proof_age: Option<Duration>,
    pub is_unverified: bool,
    pub is_connected: bool,
    pub waiting_bytes: usize,
    pub prefixes: usize,
    pub orphans: usize,
    pub counters: Counters,
    pub mirror: mirror::Counters,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct SourceCore {
    config: Config,
    mirror: Mirror,
    engine: Engine,
    publisher: Publisher,
    health: EngineHealth,
    next_heartbeat: Option<Instant>,
    /// When the present generation began.
    opened: Option<Instant>,
    /// What the last heartbeat claimed, to say at once when it is no longer so.
    told_states: Option<TierStates>,
    counters: Counters,
    effects: VecDeque<Effect>,
}

impl SourceCore {
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            mirror: Mirror::new(config.mirror, Start::Unknown),
            engine: Engine::new(&config),
            publisher: Publisher::new(config.source.clone(), config.outbox_bytes_max),
            health: EngineHealth::Unknown,
            next_heartbeat: None,
            opened: None,
            told_states: None,
            counters: Counters::default(),
            effects: VecDeque::new(),
            config,
        }
    }

    /// The next thing to do. Take all of them after every input.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    #[must_use]
    pub const fn mirror(&self) -> &Mirror {
        &self.mirror
    }

    /// What the engine tells of itself: a provisional block size, and its number of KV blocks.
    pub fn learn(&mut self, block_size: Option<BlockSize>, blocks_max: Option<u64>) {
        self.mirror.set_blocks_max(blocks_max);
        if let Some(block_size) = block_size {
            self.mirror.suggest_block_size(block_size);
        }
    }

    // --- the plane's side

    /// This shim may publish from now on: a new generation begins.
    pub fn lease_taken(&mut self, now: Instant) {
        if self.publisher.is_silent() {
            self.publisher.unsilence(now);
            self.note_generation(Reason::LeaseTaken);
        }
        self.settle(now);
    }

    /// Somebody else may publish: not another word.
    pub fn lease_lost(&mut self) {
        self.publisher.silence();
        self.effects
            .retain(|effect| matches!(effect, Effect::Replay { .. } | Effect::Notice(_)));
    }

    pub fn generation_claimed(&mut self, now: Instant, generation: Generation) {
        if self.publisher.claimed(now, generation) {
            self.opened = Some(now);
            let present = self.present(now);
            self.publisher.open(self.mirror.image(), present);
        }
        self.settle(now);
    }

    pub fn claim_failed(&mut self, now: Instant) {
        self.publisher.claim_failed(now);
        self.settle(now);
    }

    pub fn acknowledged(&mut self, now: Instant, id: AppendId) {
        let present = self.present(now);
        self.publisher.acknowledge(id, present);
        self.settle(now);
    }

    pub fn append_failed(&mut self, now: Instant, id: AppendId) {
        self.counters.appends_failed += 1;
        self.publisher.fail(now, id);
        self.settle(now);
    }

    /// A reader cannot follow any more. Ignored while an image above its fence is under way, or was
    /// just sent: that is the answer.
    pub fn resync(&mut self, now: Instant, above: Generation, reason: ResyncReason) {
        let generation = self.publisher.generation().unwrap_or_default();
        let is_young = self
            .opened
            .is_some_and(|opened| now.saturating_duration_since(opened) < RESYNC_COALESCE);
        let is_answered = if self.publisher.is_open() {
            above <= generation && self.publisher.has_image_under_way()
                || above < generation && is_young
        } else {
            above <= self.publisher.fence()
        };
        if !is_answered {
            self.publisher.raise_fence(above);
            self.new_generation(now, Reason::Resync(reason));
        }
        self.settle(now);
    }

    /// What the log has as the last record on the source's subject; `None` if it is empty there.
    /// Ask only when nothing is under way, and not about records that it may have trimmed.
    pub fn log_tail(&mut self, now: Instant, last: Option<(Generation, RecordNumber)>) {
        let Some((generation, point)) = self
            .publisher
            .generation()
            .zip(self.publisher.acknowledged_point())
        else {
            return;
        };
        if self.publisher.is_idle() && last != Some((generation, point.number)) {
            if let Some((other, _)) = last {
                self.publisher.raise_fence(other);
            }
            self.new_generation(now, Reason::LogLost);
        }
        self.settle(now);
    }

    /// Everything told is acknowledged: the moment to compare with the log's tail.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.publisher.is_idle()
    }

    // --- the engine's side; see `engine` for the rest

    pub fn health(&mut self, now: Instant, health: EngineHealth) {
        self.health = health;
        if health == EngineHealth::Unhealthy {
            self.engine.drop_proof();
        }
        self.settle(now);
    }

    /// Call at least ten times a second.
    pub fn tick(&mut self, now: Instant) {
        self.engine_tick(now);
        self.settle(now);
        if self.next_heartbeat.is_none_or(|due| due <= now) {
            self.next_heartbeat = Some(now + HEARTBEAT_EVERY);
            self.heartbeat(now);
        }
    }

    #[must_use]
    pub fn status(&self, now: Instant) -> Status {
        Status {
            source: self.config.source.clone(),
            generation: self.publisher.generation(),
            acknowledged: self.publisher.acknowledged_point(),
            states: self.heartbeat_states(now),
            engine_seq: self.engine.last(),
            proof_age: self.engine.proof_age(now),
            is_unverified: self.engine.is_unverified(),
            is_connected: self.engine.is_connected(),
            waiting_bytes: self.publisher.waiting_bytes(),
            prefixes: self.mirror.prefixes(),
            orphans: self.mirror.orphans(),
            counters: self.counters,
            mirror: *self.mirror.counters(),
        }
    }

    fn new_generation(&mut self, now: Instant, reason: Reason) {
        self.publisher.claim(now);
        self.note_generation(reason);
    }

    fn note_generation(&mut self, reason: Reason) {
        self.counters.generations += 1;
        self.effects
            .push_back(Effect::Notice(Notice::NewGeneration(reason)));
    }

    /// After every input: records that are due, and a word at once if a claim does not hold.
    fn settle(&mut self, now: Instant) {
        let present = self.present(now);
        self.publisher.pump(now, present, &mut self.effects);
        let states = self.heartbeat_states(now);
        if self.told_states.is_some_and(|told| told != states) {
            self.heartbeat(now);
        }
    }

    fn heartbeat(&mut self, now: Instant) {
        let Some(generation) = self.publisher.generation() else {
            return;
        };
        if self.publisher.is_silent() {
            return;
        }
        let states = self.heartbeat_states(now);
        let gpu = self.told_states.map(|told| told.gpu);
        if gpu != Some(states.gpu) {
            self.effects
                .push_back(Effect::Notice(Notice::State(states.gpu)));
        }
        self.told_states = Some(states);
        let point = self.publisher.acknowledged_point();
        let engine_seq = if self.publisher.is_idle() {
            self.engine.last()
        } else {
            point.and_then(|point| point.engine_seq)
        };
        self.effects.push_back(Effect::Heartbeat(Heartbeat {
            source: self.config.source.clone(),
            generation,
            number: point.map(|point| point.number),
            engine_seq,
            states,
            after: point.map_or_else(Default::default, |point| point.after),
            health: self.health,
        }));
    }

    /// What may be claimed now about the last acknowledged record.
    fn heartbeat_states(&self, now: Instant) -> TierStates {
        let Some(point) = self.publisher.acknowledged_point() else {
            return TierStates::all(TierState::CatchingUp);
        };
        if !self.publisher.is_open() {
            // What the log says is about to be replaced, and may be wrong.
            return lower(point.states, TierState::Stale);
        }
        self.claim_of(now, point.states)
    }

    fn present(&self, now: Instant) -> Present {
        let sound = if self.engine.is_unverified() {
            lower(self.mirror.states(), TierState::Unverified)
        } else {
            self.mirror.states()
        };
        Present {
            engine_seq: self.engine.last(),
            sound,
            claimed: self.claim_of(now, sound),
        }
    }

    fn claim_of(&self, now: Instant, sound: TierStates) -> TierStates {
        if self.is_proven(now) {
            sound
        } else {
            lower(sound, TierState::Stale)
        }
    }

    fn is_proven(&self, now: Instant) -> bool {
        if !self.engine.is_connected() || self.health == EngineHealth::Unhealthy {
            return false;
        }
        if self.engine.is_unverified() {
            return self.health == EngineHealth::Healthy;
        }
        self.engine
            .proof_age(now)
            .is_some_and(|age| age <= PROOF_MAX)
    }
}

fn lower(states: TierStates, to: TierState) -> TierStates {
    states.map(|state| state.weakest(to))
}

#[cfg(test)]
mod tests;
