//! The state machine of one rank: which batches are applied, which records go to the log, and which
//! state may be claimed.
//!
//! [`SourceCore`] is pure. Its driver passes in what happens (`connected`, `live`, `replay_batch`,
//! `tick`, `acknowledged`, …) with the present time, and then takes [`Effect`]s until none is left.
//! `follower` decides which batches are applied: in order, without a gap, and of one life of the
//! engine. `publisher` turns their changes into generations and records. `tail` checks that the log
//! still ends with them.
//!
//! Invariant: a credited state leaves this module only while its proof is fresh, only for what the
//! log has acknowledged or what the same record carries, and only while no unacknowledged change
//! is older than `BACKLOG_AGE_MAX`.
//!
//! Sockets, HTTP, the registry and the clock are in the shell's `service`.

mod backoff;
mod claim;
mod clock;
mod facts;
mod follower;
mod history;
mod limits;
mod pack;
mod publisher;
mod reason;
mod reset;
mod tail;

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::registry::ResyncReason;
use warmroute_proto::{
    EngineHealth, EngineSeq, Generation, Heartbeat, RecordNumber, Source, Tier, TierState,
    TierStates,
};

use crate::checkpoint::{self, Checkpoint, Restored};
use crate::mirror::{self, Inconsistency, Mirror, Start, TierLimit};
use crate::wire::NotUnderstood;
pub use claim::next_generation;
use clock::LogClock;
pub use facts::EngineFacts;
use follower::EngineFollower;
pub use follower::{ReplaySupport, UnverifiedCause};
use limits::{GenerationLimiter, ReportedLimits, WarningLimiter};
pub use publisher::RecordState;
use publisher::{Publisher, RecordContext};
pub use reason::{GenerationCounts, GenerationReason};
use reset::ResetMonitor;
pub use reset::{FlushId, FlushResult};
pub use tail::{LogTail, RegistryReading, Tail};
use tail::{TailCheck, TailMonitor};

/// Age up to which a proof counts: two of the polls, one a second, may fail.
const PROOF_MAX: Duration = Duration::from_secs(3);
/// Age of the oldest unacknowledged change up to which the acknowledged state is credited.
const BACKLOG_AGE_MAX: Duration = Duration::from_secs(3);
/// A pause without input, while ticks are due ten times a second, that shows the process to have
/// stalled: what is queued since may be of an engine that ended.
const STALL_MIN: Duration = Duration::from_secs(1);
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);
/// Age up to which a generation satisfies all requests for one above an older fence.
const RESYNC_COALESCE: Duration = Duration::from_secs(3);

#[derive(Clone, Debug)]
pub struct SourceConfig {
    pub source: Source,
    pub mirror: mirror::MirrorConfig,
    /// The engine's replay endpoint is known.
    pub has_replay: bool,
    /// A lost event shows by the next one only, if at all: `unverified` at best.
    pub hides_losses: bool,
    /// Messages of other topics are dropped.
    pub topic: Option<String>,
    /// Batches of other ranks are dropped.
    pub rank: Option<u32>,
    /// Bound of the records that wait for the log.
    pub outbox_bytes_max: usize,
    /// Bound of the live batches that wait for a replay's end.
    pub buffer_bytes_max: usize,
    /// Spreads retries; differs between processes.
    pub seed: u64,
    /// Claims nothing before the first answer about the log's clock: readers cannot judge the age of
    /// a claim without a time.
    pub waits_for_clock: bool,
}

impl SourceConfig {
    #[must_use]
    pub fn new(source: Source, has_replay: bool) -> Self {
        Self {
            source,
            mirror: mirror::MirrorConfig::default(),
            has_replay,
            hides_losses: false,
            topic: None,
            rank: None,
            outbox_bytes_max: 64 << 20,
            buffer_bytes_max: 64 << 20,
            seed: 0,
            waits_for_clock: true,
        }
    }
}

/// Identifies one append.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AppendId {
    pub generation: Generation,
    pub number: RecordNumber,
    /// Answers to an earlier attempt are ignored.
    pub attempt: u32,
}

/// Identifies a replay; answers to an earlier one are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplayId(pub u64);

/// An action for the shell.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Request every batch from `from` on, inclusive, from the engine. Ends an earlier replay.
    Replay {
        id: ReplayId,
        from: EngineSeq,
    },
    /// Write the next generation by compare-and-set: 1 + the highest of `above`, the registry's and
    /// the last record's ([`next_generation`]).
    ClaimGeneration {
        above: Generation,
    },
    /// Append to the source's subject, in the order of the effects.
    Append {
        id: AppendId,
        payload: Bytes,
    },
    /// Read the last record on the source's subject; if thorough, the log's identity and the
    /// registry's generation as well. Always answered by [`SourceCore::log_tail`].
    ReadTail {
        id: u64,
        is_thorough: bool,
    },
    Heartbeat(Heartbeat),
    /// Request one token of the rank, so that the engine publishes a pending reset. Always answered
    /// by [`SourceCore::flushed`].
    Flush(FlushId),
    Notice(Notice),
}

/// An event for the operator's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    NewGeneration(GenerationReason),
    /// The state that may be claimed about GPU memory changed.
    State(TierState),
    /// Why a tier has less credit than it could. Sent once for each tier and reason.
    Tier(Tier, TierLimit),
    /// Sent once a minute at most.
    Warning(EngineWarning),
}

/// A behaviour of the engine that costs credit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineWarning {
    NotUnderstood(NotUnderstood),
    Inconsistent(Inconsistency),
    NoSequence,
    NoReplay,
}

impl fmt::Display for EngineWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotUnderstood(part) => write!(f, "sent an unknown {part}"),
            Self::Inconsistent(inconsistency) => f.write_str(inconsistency.cause()),
            Self::NoSequence => f.write_str("sent a message without a sequence number"),
            Self::NoReplay => f.write_str(
                "answers no replay, so that its losses cannot be seen: compare --kv-replay-endpoint \
                 with the replay_endpoint of its --kv-events-config",
            ),
        }
    }
}

/// Counts since the start of the process.
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
    /// Pauses of publishing: the log was unreachable, or the lease lapsed.
    pub pauses: u64,
    pub tails_unexpected: u64,
    /// Requests for a generation above an implausible one.
    pub generations_refused: u64,
    /// Rises of the engine's count of calls that can reset its cache.
    pub resets_pending: u64,
}

/// The source's present state, for probes and metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceStatus {
    pub source: Source,
    pub generation: Option<Generation>,
    /// As of the last acknowledged record.
    pub acknowledged: Option<RecordState>,
    /// The states that may be claimed now about the last acknowledged record.
    pub states: TierStates,
    /// The last batch applied to the mirror.
    pub engine_seq: Option<EngineSeq>,
    pub proof_age: Option<Duration>,
    /// Since the last batch was applied.
    pub event_age: Option<Duration>,
    /// Why it is `unverified` at best; `None` if it is not.
    pub unverified: Option<UnverifiedCause>,
    pub is_connected: bool,
    pub waiting_bytes: usize,
    pub prefixes: usize,
    pub orphans: usize,
    /// The log acknowledged the image of the generation in use.
    pub is_image_acknowledged: bool,
    pub counters: SourceCounters,
    pub mirror: mirror::MirrorCounters,
    /// `None` without a state directory.
    pub checkpoint: Option<CheckpointStatus>,
}

/// The status of a source's checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointStatus {
    /// Age of the state in the last one written; `None` before the first.
    pub age: Option<Duration>,
    pub bytes: usize,
    /// Time for which the last snapshot blocked the source.
    pub cut: Duration,
    /// Time from that snapshot to its durable file.
    pub took: Duration,
    pub written: u64,
    pub failed: u64,
    /// Number found at the start and refused.
    pub refused: u64,
}

/// One rank's follower, mirror and publisher.
#[derive(Debug)]
pub struct SourceCore {
    config: SourceConfig,
    mirror: Mirror,
    engine: EngineFollower,
    publisher: Publisher,
    tail: TailMonitor,
    resets: ResetMonitor,
    clock: LogClock,
    generation_limiter: GenerationLimiter,
    warning_limiter: WarningLimiter,
    reported_limits: ReportedLimits,
    /// The plane is reachable, as far as is known.
    is_reachable: bool,
    /// The lease lapsed, and no other holder is known.
    has_lapsed: bool,
    health: EngineHealth,
    next_heartbeat: Option<Instant>,
    /// Time of the last live message or tick.
    awake: Option<Instant>,
    /// Time at which the generation in use began.
    opened: Option<Instant>,
    /// The states in the last heartbeat. A change sends the next one without delay.
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
            resets: ResetMonitor::default(),
            clock: LogClock::new(config.waits_for_clock),
            generation_limiter: GenerationLimiter::default(),
            warning_limiter: WarningLimiter::default(),
            reported_limits: ReportedLimits::default(),
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

    /// Resumes from a checkpoint. Nothing of it is credited before a replay has proven that the
    /// engine is still in the same life.
    #[must_use]
    pub fn resume(config: SourceConfig, restored: Restored) -> Self {
        let mut core = Self::new(config);
        core.mirror = restored.mirror;
        let point = restored.header;
        core.publisher.raise_fence(point.generation);
        core.engine.resume(point.engine_seq, point.payload_hash);
        core
    }

    /// A checkpoint as of the last batch. `None` if no replay could prove it.
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

    /// Number of batches applied since the start of this process.
    #[must_use]
    pub const fn batches(&self) -> u64 {
        self.counters.batches
    }

    /// The generation in use or last used; `None` before the first.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        self.publisher.generation()
    }

    /// The current attempt: appends of another one are void.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        self.publisher.attempt()
    }

    /// The next effect. Take all of them after every input.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    #[must_use]
    pub const fn mirror(&self) -> &Mirror {
        &self.mirror
    }

    // --- the plane's side

    /// This shim may publish. A new generation begins unless the lease had only lapsed and no other
    /// shim wrote.
    pub fn lease_taken(&mut self, now: Instant) {
        if self.publisher.lacks_lease() {
            self.claim(now, GenerationReason::LeaseTaken);
        }
        self.has_lapsed = false;
        self.try_unpause(now);
        self.settle(now);
    }

    /// The lease expired or its key is gone, and no other holder is known. Publishing pauses; records
    /// are kept within the outbox's bound.
    pub fn lease_lapsed(&mut self) {
        self.has_lapsed = true;
        self.pause();
    }

    /// Another shim may publish. Publishing stops.
    pub fn lease_lost(&mut self) {
        self.publisher.lease_lost();
        self.tail.forget();
        self.has_lapsed = false;
        self.effects.retain(|effect| {
            matches!(
                effect,
                Effect::Replay { .. } | Effect::Flush(_) | Effect::Notice(_)
            )
        });
    }

    /// The plane is unreachable. Appends in flight may be written or not.
    pub fn plane_lost(&mut self) {
        self.is_reachable = false;
        self.pause();
    }

    /// The plane is reachable again. The log may be another one, or may have lost its end.
    pub fn plane_back(&mut self, now: Instant) {
        self.is_reachable = true;
        self.try_unpause(now);
        self.settle(now);
    }

    /// Takes a reading of the log's clock: Unix nanoseconds, or 0 if the log has none, at some time
    /// between `asked` and `answered`. Call it every few seconds: another server may take over, or
    /// this process's clock may have stood still.
    pub fn log_clock(&mut self, asked: Instant, answered: Instant, unix_ns: u64) {
        let ahead = self.clock.set(asked, answered, unix_ns);
        // Without an earlier reading any time may have passed unnoticed.
        let ahead = ahead.unwrap_or(2 * BACKLOG_AGE_MAX);
        if ahead > STALL_MIN {
            // Our clock stood still, with a suspended machine: what it measured is older, and so are
            // batches that waited in a socket and were read since the machine resumed.
            self.publisher.age_backlog(ahead);
            self.clock_stood(answered);
        }
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

    /// Ends a pause once the plane is reachable, the lease held and the log's end as expected.
    fn try_unpause(&mut self, now: Instant) {
        if !self.publisher.is_paused() || !self.is_reachable || self.has_lapsed {
            return;
        }
        if self.tail.is_required() && self.publisher.is_open() {
            self.check_tail(now, TailCheck::IfRequired);
        } else {
            self.tail.forget();
            self.publisher.unpause(now);
        }
    }

    pub fn generation_claimed(&mut self, now: Instant, generation: Generation) {
        if self.publisher.claimed(now, generation) {
            self.opened = Some(now);
            let context = self.record_context(now);
            self.publisher.open(now, self.mirror.image(), context);
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
        let context = self.record_context(now);
        self.publisher.acknowledge(now, id, context);
        self.settle(now);
    }

    pub fn append_failed(&mut self, now: Instant, id: AppendId) {
        self.counters.appends_failed += 1;
        self.publisher.fail(now, id);
        self.settle(now);
    }

    /// A reader cannot follow the log and requests a generation above its fence. Ignored if an image
    /// above the fence is in flight or was just sent, and if the fence is implausible.
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

    /// The log refused a record as larger than `bytes_max`.
    pub fn append_too_large(&mut self, now: Instant, id: AppendId, bytes_max: usize) {
        self.counters.appends_failed += 1;
        if self.publisher.limit_records(bytes_max) {
            self.new_generation(now, GenerationReason::RecordTooLarge);
        } else {
            self.publisher.fail(now, id);
        }
        self.settle(now);
    }

    // --- the engine's side; the rest is in `follower`

    pub fn health(&mut self, now: Instant, health: EngineHealth) {
        self.health = health;
        if health == EngineHealth::Unhealthy {
            self.engine.drop_proof();
        }
        self.settle(now);
    }

    /// Takes a reading of the number of calls that can reset the engine's cache.
    pub fn reset_calls(&mut self, now: Instant, calls: u64) {
        if self.resets.count(now, calls) {
            self.counters.resets_pending += 1;
        }
        self.settle(now);
    }

    /// The answer to [`Effect::Flush`].
    pub fn flushed(&mut self, now: Instant, id: FlushId, result: FlushResult) {
        self.resets.flushed(now, id, result);
        self.settle(now);
    }

    /// Call at least ten times a second.
    pub fn tick(&mut self, now: Instant) {
        self.note_input(now);
        self.engine_tick(now);
        self.try_unpause(now);
        self.settle(now);
        let is_heartbeat = self.next_heartbeat.is_none_or(|due| due <= now);
        if is_heartbeat {
            self.next_heartbeat = Some(now + HEARTBEAT_EVERY);
            self.heartbeat(now);
        }
        let check = if is_heartbeat {
            TailCheck::WithHeartbeat
        } else {
            TailCheck::IfRequired
        };
        self.check_tail(now, check);
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
            unverified: self.unverified(),
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

    /// Replaces the generation in use. If there is none, the claim that is pending or follows the
    /// lease serves this need as well.
    fn new_generation(&mut self, now: Instant, reason: GenerationReason) {
        self.tail.forget();
        if self.publisher.is_open() {
            self.claim(now, reason);
        }
    }

    /// Claims a generation as soon as its reason's rate allows. Until then the source is stale.
    fn claim(&mut self, now: Instant, reason: GenerationReason) {
        let due = self.generation_limiter.reserve(now, reason);
        self.publisher.claim(due);
        self.counters.generations += 1;
        self.counters.reasons.count(reason);
        self.effects
            .push_back(Effect::Notice(Notice::NewGeneration(reason)));
    }

    fn warn(&mut self, now: Instant, warning: EngineWarning) {
        if self.warning_limiter.is_due(now, &warning) {
            self.effects
                .push_back(Effect::Notice(Notice::Warning(warning)));
        }
    }

    /// Runs after every input: sends due records, and a heartbeat if the claimable states changed.
    fn settle(&mut self, now: Instant) {
        if let Some(id) = self.resets.next_flush(now) {
            self.effects.push_back(Effect::Flush(id));
        }
        let context = self.record_context(now);
        self.publisher.caught_up(context);
        self.publisher.pump(now, context, &mut self.effects);
        let states = self.heartbeat_states(now);
        if self.sent_states.is_some_and(|sent| sent != states) {
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
        let gpu = self.sent_states.map(|sent| sent.gpu);
        if gpu != Some(states.gpu) {
            self.effects
                .push_back(Effect::Notice(Notice::State(states.gpu)));
        }
        self.sent_states = Some(states);
        self.report_limits();
        let point = self.publisher.acknowledged_point();
        self.effects.push_back(Effect::Heartbeat(Heartbeat {
            source: self.config.source.clone(),
            generation,
            number: point.map(|point| point.number),
            engine_seq: point.and_then(|point| point.engine_seq),
            states,
            after: point.map_or_else(Default::default, |point| point.after),
            health: self.health,
            sent_at: self.clock.read(now),
        }));
    }

    fn report_limits(&mut self) {
        let limits = self.mirror.limits();
        for tier in Tier::ALL {
            if let Some(limit) = self.reported_limits.next(tier, *limits.get(tier)) {
                self.effects
                    .push_back(Effect::Notice(Notice::Tier(tier, limit)));
            }
        }
    }

    /// The states that may be claimed now about the last acknowledged record.
    fn heartbeat_states(&self, now: Instant) -> TierStates {
        let Some(point) = self.publisher.acknowledged_point() else {
            return TierStates::all(TierState::CatchingUp);
        };
        if !self.publisher.is_open() {
            // The records are about to be replaced, and may be wrong.
            return lower(point.states, TierState::Stale);
        }
        // The acknowledged state is true only until the next change; a change that cannot reach
        // the log for long makes it false, however fresh the engine's proof is.
        if self.publisher.backlog_age(now) > BACKLOG_AGE_MAX {
            return lower(point.states, TierState::Stale);
        }
        self.claimable(now, point.states)
    }

    fn record_context(&self, now: Instant) -> RecordContext {
        let states = if self.config.hides_losses || self.engine.unverified().is_some() {
            lower(self.mirror.states(), TierState::Unverified)
        } else {
            self.mirror.states()
        };
        RecordContext {
            engine_seq: self.engine.last(),
            states,
            claimed_states: self.claimable(now, states),
            sent_at: self.clock.read(now),
        }
    }

    fn unverified(&self) -> Option<UnverifiedCause> {
        let pending = self.resets.is_pending();
        let pending = pending.then_some(UnverifiedCause::PendingReset);
        let unseen = self.config.hides_losses;
        let unseen = unseen.then_some(UnverifiedCause::UnseenLosses);
        let lookup = self.mirror.lookup_doubt().map(UnverifiedCause::Lookup);
        let engine = self.engine.unverified();
        engine.or(unseen).or(pending).or(lookup)
    }

    fn claimable(&self, now: Instant, states: TierStates) -> TierStates {
        if self.clock.is_settled() && self.is_proven(now) {
            if self.resets.is_pending() {
                lower(states, TierState::Unverified)
            } else {
                states
            }
        } else {
            lower(states, self.unproven())
        }
    }

    /// Indexers take `Stale` without any batch for an engine of whose events nothing was ever seen.
    fn unproven(&self) -> TierState {
        let is_seen = self.engine.is_connected() || self.engine.last_event().is_some();
        if is_seen && self.engine.last().is_none() {
            TierState::CatchingUp
        } else {
            TierState::Stale
        }
    }

    fn is_proven(&self, now: Instant) -> bool {
        if !self.engine.is_connected() || self.health == EngineHealth::Unhealthy {
            return false;
        }
        if self.engine.unverified().is_some() {
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
