//! One rank's state machine: what may be believed, what goes to the log, what may be claimed.
//!
//! [`SourceCore`] is pure. Whoever drives it feeds what happens (`connected`, `live`,
//! `replay_batch`, `tick`, `acknowledged`, …) together with the present time, and then takes
//! [`Effect`]s until none is left. `engine` decides which batches are applied: in order, without a
//! gap, and of one life of the engine; `publisher` turns their changes into generations and
//! records.
//!
//! Invariant: a credited state leaves this module only while its own proof is fresh, only for what
//! the log has acknowledged or what the same record carries, and only while no unacknowledged
//! change is older than [`BACKLOG_AGE_MAX`].
//!
//! Not here: sockets, HTTP, the registry and the clock (`service`).

mod backoff;
mod claim;
mod clock;
mod follower;
mod history;
mod pack;
mod publisher;
mod tail;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::registry::ResyncReason;
use warmroute_proto::{
    BlockSize, EngineHealth, EngineSeq, Generation, Heartbeat, RecordNumber, Source, TierState,
    TierStates,
};

use crate::checkpoint::{self, Checkpoint, Restored};
use crate::mirror::{self, Inconsistency, Mirror, Start};
pub use claim::next_generation;
use clock::LogClock;
use follower::EngineFollower;
pub use publisher::RecordState;
use publisher::{Publisher, RecordContext};
use tail::TailMonitor;
pub use tail::{LogTail, Tail};

/// A shim's own proof counts this long: with a poll each second two may fail.
const PROOF_MAX: Duration = Duration::from_secs(3);
/// Age of the oldest unacknowledged change up to which the acknowledged state is credited.
const BACKLOG_AGE_MAX: Duration = Duration::from_secs(3);
/// Ticks come ten times a second. After so long without any input this process stood still, and what
/// waited for it meanwhile may be of an engine that is no more.
const STALL_MIN: Duration = Duration::from_secs(1);
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);
/// A generation so young answers everybody who asked for one above an older fence.
const RESYNC_COALESCE: Duration = Duration::from_secs(3);

/// How one source is set up.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    pub source: Source,
    pub mirror: mirror::MirrorConfig,
    /// The engine has a replay endpoint and it is known.
    pub has_replay: bool,
    /// Messages of other topics are dropped.
    pub topic: Option<String>,
    /// Batches of other ranks are dropped.
    pub rank: Option<u32>,
    /// Bytes of records that may wait for the log.
    pub outbox_bytes_max: usize,
    /// Bytes of live batches that may wait for a replay's end.
    pub buffer_bytes_max: usize,
    /// Spreads retries; another one for each process.
    pub seed: u64,
    /// Nothing is claimed before the log told what its clock shows, or that it does not tell: whoever reads
    /// a claim that does not say when it was made cannot know how long it was on its way.
    pub waits_for_clock: bool,
}

impl SourceConfig {
    #[must_use]
    pub fn new(source: Source, has_replay: bool) -> Self {
        Self {
            source,
            mirror: mirror::MirrorConfig::default(),
            has_replay,
            topic: None,
            rank: None,
            outbox_bytes_max: 64 << 20,
            buffer_bytes_max: 64 << 20,
            seed: 0,
            waits_for_clock: true,
        }
    }
}

// Until the shell uses the new names.
pub use LogTail as Seen;
pub use SourceConfig as Config;
pub use SourceStatus as Status;

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
    /// Read the last record on the source's subject; thoroughly: also which log it is, and the
    /// registry's generation. Answered by [`SourceCore::log_tail`], always.
    ReadTail {
        id: u64,
        is_thorough: bool,
    },
    Heartbeat(Heartbeat),
    Notice(Notice),
}

/// What an operator may want to know. Said once, when it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    NewGeneration(GenerationReason),
    /// What may be claimed about GPU memory changed.
    State(TierState),
}

/// Why a generation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GenerationReason {
    LeaseTaken,
    EngineRestarted,
    GapUnfilled,
    /// Without replays or sequence numbers a loss could not be repaired or even seen.
    LossUnseen,
    Mirror(Inconsistency),
    OutboxFull,
    Resync(ResyncReason),
    /// The log does not end with what it acknowledged.
    LogLost,
    /// The registry does not know the generation in use.
    RegistryLost,
    /// Somebody else took a generation in the meantime.
    Overtaken,
    /// The log takes smaller records only.
    RecordTooLarge,
    /// A checkpoint was read whose truth nothing can show.
    Unprovable,
}

impl GenerationReason {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::LeaseTaken => "lease_taken",
            Self::EngineRestarted => "engine_restarted",
            Self::GapUnfilled => "gap_unfilled",
            Self::LossUnseen => "loss_unseen",
            Self::Mirror(inconsistency) => inconsistency.label(),
            Self::OutboxFull => "outbox_full",
            Self::Resync(reason) => reason.label(),
            Self::LogLost => "log_lost_records",
            Self::RegistryLost => "registry_lost",
            Self::Overtaken => "overtaken",
            Self::RecordTooLarge => "record_too_large",
            Self::Unprovable => "unprovable",
        }
    }

    /// Every one, in a fixed order: the closed set of a metric's label.
    pub const ALL: [Self; 17] = [
        Self::LeaseTaken,
        Self::EngineRestarted,
        Self::GapUnfilled,
        Self::LossUnseen,
        Self::Mirror(Inconsistency::BelowZero),
        Self::Mirror(Inconsistency::TwoPrefixes),
        Self::Mirror(Inconsistency::TooMany),
        Self::OutboxFull,
        Self::Resync(ResyncReason::Gap),
        Self::Resync(ResyncReason::Mismatch),
        Self::Resync(ResyncReason::Fenced),
        Self::Resync(ResyncReason::LogLost),
        Self::LogLost,
        Self::RegistryLost,
        Self::Overtaken,
        Self::RecordTooLarge,
        Self::Unprovable,
    ];
}

/// How often a generation began, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenerationCounts([u64; GenerationReason::ALL.len()]);

impl GenerationCounts {
    #[must_use]
    pub fn of(&self, reason: GenerationReason) -> u64 {
        let at = GenerationReason::ALL
            .iter()
            .position(|&known| known == reason);
        at.and_then(|at| self.0.get(at))
            .copied()
            .unwrap_or_default()
    }

    fn count(&mut self, reason: GenerationReason) {
        let at = GenerationReason::ALL
            .iter()
            .position(|&known| known == reason);
        if let Some(count) = at.and_then(|at| self.0.get_mut(at)) {
            *count += 1;
        }
    }
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceCounters {
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
    pub buffered_dropped: u64,
    pub generations: u64,
    pub reasons: GenerationCounts,
    pub appends_failed: u64,
    /// Records that are to be sent again because the log went out of reach, or may not be ours.
    pub pauses: u64,
    pub tails_unexpected: u64,
    /// Requests for a generation above one that nobody can have come to.
    pub generations_refused: u64,
}

/// What the source is now.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceStatus {
    pub source: Source,
    pub generation: Option<Generation>,
    /// As of the last acknowledged record.
    pub acknowledged: Option<RecordState>,
    /// As it may be claimed now, of the last acknowledged record.
    pub states: TierStates,
    /// The last batch applied to the mirror.
    pub engine_seq: Option<EngineSeq>,
    pub proof_age: Option<Duration>,
    /// Since the last batch was applied.
    pub event_age: Option<Duration>,
    pub is_unverified: bool,
    pub is_connected: bool,
    pub waiting_bytes: usize,
    pub prefixes: usize,
    pub orphans: usize,
    /// The present generation's image is acknowledged.
    pub is_image_acknowledged: bool,
    pub counters: SourceCounters,
    pub mirror: mirror::MirrorCounters,
    /// None where no checkpoints are kept.
    pub checkpoint: Option<CheckpointStatus>,
}

/// How a source's checkpoints are doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointStatus {
    /// Of what the last one written holds; none before the first.
    pub age: Option<Duration>,
    pub bytes: usize,
    /// How long the last one held up the source.
    pub cut: Duration,
    /// From its cut until it was safe.
    pub took: Duration,
    pub written: u64,
    pub failed: u64,
    /// Found at the start and not used.
    pub refused: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct SourceCore {
    config: SourceConfig,
    mirror: Mirror,
    engine: EngineFollower,
    publisher: Publisher,
    tail: TailMonitor,
    clock: LogClock,
    /// The plane is within reach, as far as is known.
    is_reachable: bool,
    /// The lease ran out, and nobody is known to have taken it.
    has_lapsed: bool,
    health: EngineHealth,
    next_heartbeat: Option<Instant>,
    /// The last live message or tick.
    awake: Option<Instant>,
    /// When the present generation began.
    opened: Option<Instant>,
    /// What the last heartbeat claimed, to say at once when it is no longer so.
    sent_states: Option<TierStates>,
    counters: SourceCounters,
    effects: VecDeque<Effect>,
}

impl SourceCore {
    #[must_use]
    pub fn new(config: SourceConfig) -> Self {
        Self {
            mirror: Mirror::new(config.mirror, Start::Unknown),
            engine: EngineFollower::new(&config),
            publisher: Publisher::new(config.source.clone(), config.outbox_bytes_max, config.seed),
            tail: TailMonitor::default(),
            clock: LogClock::new(config.waits_for_clock),
            is_reachable: true,
            has_lapsed: false,
            health: EngineHealth::Unknown,
            next_heartbeat: None,
            awake: None,
            opened: None,
            sent_states: None,
            counters: SourceCounters::default(),
            effects: VecDeque::new(),
            config,
        }
    }

    /// Begins where a checkpoint stands. Nothing of it is believed before the engine's replay has
    /// proven that it is the same life.
    #[must_use]
    pub fn resume(config: SourceConfig, restored: Restored) -> Self {
        let mut core = Self::new(config);
        core.mirror = restored.mirror;
        let point = restored.header;
        core.publisher.raise_fence(point.generation);
        core.engine.resume(point.engine_seq, point.payload_hash);
        core
    }

    /// What [`SourceCore::resume`] needs, as of the last batch. `None` if nothing could prove it.
    #[must_use]
    pub fn checkpoint(&self) -> Option<Checkpoint> {
        let (engine_seq, payload_hash) = self.engine.provable_last()?;
        Some(Checkpoint {
            header: checkpoint::CheckpointHeader {
                source: self.config.source.clone(),
                generation: self.publisher.fence(),
                engine_seq,
                payload_hash,
            },
            config: self.config.mirror,
            mirror: self.mirror.snapshot(),
        })
    }

    /// Batches applied since the start of this process.
    #[must_use]
    pub const fn batches(&self) -> u64 {
        self.counters.batches
    }

    /// The generation in use or last used; none before the first.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        self.publisher.generation()
    }

    /// Appends of another attempt than this one are not to be made any more.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        self.publisher.attempt()
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

    /// This shim may publish from now on. A new generation begins, unless the lease had only lapsed
    /// and nobody else wrote meanwhile.
    pub fn lease_taken(&mut self, now: Instant) {
        if self.publisher.lacks_lease() {
            self.publisher.lease_taken(now);
            self.note_generation(GenerationReason::LeaseTaken);
        }
        self.has_lapsed = false;
        self.try_unpause(now);
        self.settle(now);
    }

    /// The lease ran out, or its key is gone, and nobody is known to have it: not another word, but
    /// what is told meanwhile is kept, within the outbox's bound.
    pub fn lease_lapsed(&mut self) {
        self.has_lapsed = true;
        self.pause();
    }

    /// Somebody else may publish: not another word.
    pub fn lease_lost(&mut self) {
        self.publisher.lease_lost();
        self.tail.forget();
        self.has_lapsed = false;
        self.effects
            .retain(|effect| matches!(effect, Effect::Replay { .. } | Effect::Notice(_)));
    }

    /// The plane is out of reach. What was under way may be written or not.
    pub fn plane_lost(&mut self) {
        self.is_reachable = false;
        self.pause();
    }

    /// It is back. The log may be another one, or may have lost its end.
    pub fn plane_back(&mut self, now: Instant) {
        self.is_reachable = true;
        self.try_unpause(now);
        self.settle(now);
    }

    /// Asked at the first moment and answered at the second, the log's clock showed so many nanoseconds since
    /// the Unix epoch, or 0 if it does not tell. Every few seconds: the clock may be another server's.
    pub fn log_clock(&mut self, asked: Instant, answered: Instant, unix_ns: u64) {
        self.clock.learn(asked, answered, unix_ns);
    }

    fn pause(&mut self) {
        if !self.publisher.is_paused() {
            self.counters.pauses += 1;
            self.publisher.pause();
        }
        self.tail.forget();
        if self.publisher.is_open() {
            self.tail.require();
        }
        self.effects
            .retain(|effect| !matches!(effect, Effect::Append { .. } | Effect::Heartbeat(_)));
    }

    /// Speaks again when nothing stands against it.
    fn try_unpause(&mut self, now: Instant) {
        if !self.publisher.is_paused() || !self.is_reachable || self.has_lapsed {
            return;
        }
        if self.tail.is_required() && self.publisher.is_open() {
            self.tail_tick(now, false);
        } else {
            self.tail.forget();
            self.publisher.unpause(now);
        }
    }

    pub fn generation_claimed(&mut self, now: Instant, generation: Generation) {
        if self.publisher.claimed(now, generation) {
            self.opened = Some(now);
            let present = self.present(now);
            self.publisher.open(now, self.mirror.image(), present);
            if self.publisher.is_paused() {
                self.tail.require();
            }
        }
        self.settle(now);
    }

    pub fn claim_failed(&mut self, now: Instant) {
        self.publisher.claim_failed(now);
        self.settle(now);
    }

    pub fn acknowledged(&mut self, now: Instant, id: AppendId) {
        let present = self.present(now);
        self.publisher.acknowledge(now, id, present);
        self.settle(now);
    }

    pub fn append_failed(&mut self, now: Instant, id: AppendId) {
        self.counters.appends_failed += 1;
        self.publisher.fail(now, id);
        self.settle(now);
    }

    /// A reader cannot follow any more. Ignored while an image above its fence is under way, or was
    /// just sent: that is the answer. Ignored also with a fence that nobody can have come to.
    pub fn resync(&mut self, now: Instant, above: Generation, reason: ResyncReason) {
        if !above.is_plausible_after(self.publisher.fence()) {
            self.counters.generations_refused += 1;
            return;
        }
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
            self.new_generation(now, GenerationReason::Resync(reason));
        }
        self.settle(now);
    }

    /// The log does not take a record of this size at once.
    pub fn append_too_large(&mut self, now: Instant, id: AppendId, bytes_max: usize) {
        self.counters.appends_failed += 1;
        if self.publisher.limit_records(bytes_max) {
            self.new_generation(now, GenerationReason::RecordTooLarge);
        } else {
            self.publisher.fail(now, id);
        }
        self.settle(now);
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
        self.wake(now);
        self.engine_tick(now);
        self.try_unpause(now);
        self.settle(now);
        let is_heartbeat = self.next_heartbeat.is_none_or(|due| due <= now);
        if is_heartbeat {
            self.next_heartbeat = Some(now + HEARTBEAT_EVERY);
            self.heartbeat(now);
        }
        self.tail_tick(now, is_heartbeat);
    }

    #[must_use]
    pub fn status(&self, now: Instant) -> SourceStatus {
        SourceStatus {
            source: self.config.source.clone(),
            generation: self.publisher.generation(),
            acknowledged: self.publisher.acknowledged_point(),
            states: self.heartbeat_states(now),
            engine_seq: self.engine.last(),
            proof_age: self.engine.proof_age(now),
            event_age: self
                .engine
                .last_event()
                .map(|at| now.saturating_duration_since(at)),
            is_unverified: self.engine.is_unverified(),
            is_connected: self.engine.is_connected(),
            waiting_bytes: self.publisher.waiting_bytes(),
            prefixes: self.mirror.prefixes(),
            orphans: self.mirror.orphans(),
            is_image_acknowledged: self.publisher.acknowledged_point().is_some()
                && !self.publisher.has_image_under_way(),
            counters: self.counters,
            mirror: *self.mirror.counters(),
            checkpoint: None,
        }
    }

    fn new_generation(&mut self, now: Instant, reason: GenerationReason) {
        self.publisher.claim(now);
        self.tail.forget();
        self.note_generation(reason);
    }

    fn note_generation(&mut self, reason: GenerationReason) {
        self.counters.generations += 1;
        self.counters.reasons.count(reason);
        self.effects
            .push_back(Effect::Notice(Notice::NewGeneration(reason)));
    }

    /// After every input: records that are due, and a word at once if a claim does not hold.
    fn settle(&mut self, now: Instant) {
        let present = self.present(now);
        self.publisher.pump(now, present, &mut self.effects);
        let states = self.heartbeat_states(now);
        if self.sent_states.is_some_and(|told| told != states) {
            self.heartbeat(now);
        }
    }

    fn heartbeat(&mut self, now: Instant) {
        let Some(generation) = self.publisher.generation() else {
            return;
        };
        if self.publisher.lacks_lease() || self.publisher.is_paused() {
            return;
        }
        let states = self.heartbeat_states(now);
        let gpu = self.sent_states.map(|told| told.gpu);
        if gpu != Some(states.gpu) {
            self.effects
                .push_back(Effect::Notice(Notice::State(states.gpu)));
        }
        self.sent_states = Some(states);
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
            sent_at: self.clock.read(now),
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
        // The acknowledged state is true only until the next change; a change that cannot reach
        // the log for long makes it false, however fresh the engine's proof is.
        if self.publisher.backlog_age(now) > BACKLOG_AGE_MAX {
            return lower(point.states, TierState::Stale);
        }
        self.claim_of(now, point.states)
    }

    fn present(&self, now: Instant) -> RecordContext {
        let sound = if self.engine.is_unverified() {
            lower(self.mirror.states(), TierState::Unverified)
        } else {
            self.mirror.states()
        };
        RecordContext {
            engine_seq: self.engine.last(),
            sound,
            claimed: self.claim_of(now, sound),
            sent_at: self.clock.read(now),
        }
    }

    fn claim_of(&self, now: Instant, sound: TierStates) -> TierStates {
        if self.clock.is_settled() && self.is_proven(now) {
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
