//! The engine's side of a source: which batches are applied, and what proves that none is missing.
//!
//! Every replay starts at the last applied batch, inclusive, and must return its bytes; otherwise it
//! is of another life of the engine. After a disconnect, and at every gap, only replayed batches
//! are applied until that check has passed; live batches are buffered, within a bound. A hole in a
//! replay is filled from the buffer, or requested again. If it persists, the engine's contents are
//! unknown. Such a replay after each idle second proves that nothing was lost before the
//! silence. An engine that sent a batch on the present connection has published: a replay without
//! batches has lost all of them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::EngineSeq;

use super::history::{BatchHistory, BatchMatch};
use super::{
    BACKLOG_AGE_MAX, Effect, EngineWarning, GenerationReason, ReplayId, STALL_MIN, SourceConfig,
    SourceCore,
};
use crate::mirror::{Inconsistency, LookupDoubt, Start};
use crate::wire::{self, Batch, NotUnderstood};

/// Silence after which a replay checks for lost batches.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Silence within a replay after which it has failed.
const REPLAY_PATIENCE: Duration = Duration::from_millis(1500);

/// Consecutive replays without an answer that are worth a warning: an engine that restarts misses one.
const UNANSWERED_MIN: u32 = 3;
/// Replays in all that try to fill a hole.
const HOLE_TRIES_MAX: u32 = 3;

/// Whether the engine has a replay endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplaySupport {
    Available,
    Missing,
}

/// Why a source is `unverified`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnverifiedCause {
    /// The engine has no replay endpoint.
    NoReplay,
    /// Its last message had no sequence number.
    NoSequence,
    /// Other readers take events from this one, and an idle engine shows no loss.
    UnseenLosses,
    /// The engine may have reset its cache and not published it.
    PendingReset,
    /// Its hits may be shorter than what is credited.
    Lookup(LookupDoubt),
}

impl UnverifiedCause {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoReplay => "no replay endpoint",
            Self::NoSequence => "no sequence numbers",
            Self::UnseenLosses => "events that are handed out once",
            Self::PendingReset => "a reset that is not published",
            Self::Lookup(doubt) => doubt.label(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FollowState {
    Down,
    /// A replay checks the engine's life, or brings missing batches.
    Checking,
    Following,
}

/// A replay in flight.
#[derive(Clone, Copy, Debug)]
struct Replay {
    id: ReplayId,
    from: EngineSeq,
    started: Instant,
    deadline: Instant,
    /// The batch at its start was returned byte for byte, or there is none to compare.
    is_same_life: bool,
    /// The engine had published when it was requested, so it has at least one batch.
    has_batches: bool,
    has_answers: bool,
    made_progress: bool,
    /// Live batches were applied since its request.
    is_overtaken: bool,
    /// The first batch behind a hole. Nothing behind it is applied.
    behind_hole: Option<EngineSeq>,
}

/// A live batch that waits for a replay.
#[derive(Debug)]
struct BufferedBatch {
    arrived: Instant,
    seq: EngineSeq,
    payload: Bytes,
}

#[derive(Debug)]
pub(super) struct EngineFollower {
    has_replay: bool,
    /// The last message had no sequence number.
    is_unsequenced: bool,
    is_connected: bool,
    was_connected: bool,
    /// A numbered batch came since the connection was made: the engine has published.
    has_published: bool,
    state: FollowState,
    applied: BatchHistory,
    /// The mirror is from a checkpoint, and no replay has proven the engine's life yet.
    is_unproven: bool,
    /// The first batch to request while nothing of this life is applied: 0, or behind a hole.
    resume_from: EngineSeq,
    replay: Option<Replay>,
    replays: u64,
    /// Consecutive replays without an answer.
    unanswered: u32,
    tries: u32,
    next_replay: Option<Instant>,
    buffer: VecDeque<BufferedBatch>,
    buffered_bytes: usize,
    /// Live batches were lost since the last request.
    has_loss: bool,
    proof: Option<Instant>,
    last_event: Option<Instant>,
}

impl EngineFollower {
    pub(super) const fn new(config: &SourceConfig) -> Self {
        Self {
            has_replay: config.has_replay,
            is_unsequenced: false,
            is_connected: false,
            was_connected: false,
            has_published: false,
            state: FollowState::Down,
            applied: BatchHistory::new(),
            is_unproven: false,
            resume_from: EngineSeq(0),
            replay: None,
            replays: 0,
            unanswered: 0,
            tries: 0,
            next_replay: None,
            buffer: VecDeque::new(),
            buffered_bytes: 0,
            has_loss: false,
            proof: None,
            last_event: None,
        }
    }

    pub(super) const fn last_event(&self) -> Option<Instant> {
        self.last_event
    }

    pub(super) const fn last(&self) -> Option<EngineSeq> {
        self.applied.last()
    }

    /// Resumes at a checkpoint's batch.
    pub(super) fn resume(&mut self, seq: EngineSeq, hash: u64) {
        self.applied.restart_at(seq, hash);
        self.is_unproven = true;
    }

    /// The last batch and its hash, if a replay from it can prove the mirror.
    pub(super) fn provable_last(&self) -> Option<(EngineSeq, u64)> {
        if self.is_unproven || !self.can_verify() {
            return None;
        }
        self.last().zip(self.applied.last_hash())
    }

    fn forget_life(&mut self) {
        self.applied.clear();
        self.is_unproven = false;
    }

    pub(super) const fn is_connected(&self) -> bool {
        self.is_connected
    }

    pub(super) const fn unverified(&self) -> Option<UnverifiedCause> {
        if self.is_unsequenced {
            Some(UnverifiedCause::NoSequence)
        } else if self.has_replay {
            None
        } else {
            Some(UnverifiedCause::NoReplay)
        }
    }

    pub(super) fn proof_age(&self, now: Instant) -> Option<Duration> {
        self.proof.map(|proof| now.saturating_duration_since(proof))
    }

    pub(super) const fn drop_proof(&mut self) {
        self.proof = None;
    }

    const fn can_verify(&self) -> bool {
        self.unverified().is_none()
    }

    fn buffer(&mut self, batch: BufferedBatch, bytes_max: usize) -> bool {
        let bytes = size_of::<BufferedBatch>() + batch.payload.len();
        if self.buffered_bytes + bytes > bytes_max {
            self.has_loss = true;
            return false;
        }
        self.buffered_bytes += bytes;
        self.buffer.push_back(batch);
        true
    }

    fn take_buffered(&mut self) -> VecDeque<BufferedBatch> {
        self.buffered_bytes = 0;
        std::mem::take(&mut self.buffer)
    }
}

impl SourceCore {
    /// The live socket has a connection.
    pub fn connected(&mut self, now: Instant) {
        let again = self.engine.was_connected;
        self.engine.is_connected = true;
        self.engine.was_connected = true;
        if self.engine.can_verify() {
            self.verify(now);
        } else {
            self.give_up_unproven(now);
            if again {
                self.unseen_loss(now);
            }
            self.engine.state = FollowState::Following;
        }
        self.settle(now);
    }

    /// The engine was found to have a replay endpoint, or to have none.
    pub fn set_replay_support(&mut self, now: Instant, support: ReplaySupport) {
        let has_replay = support == ReplaySupport::Available;
        if self.engine.has_replay != has_replay {
            self.engine.has_replay = has_replay;
            self.engine.replay = None;
            if self.engine.is_connected && self.engine.can_verify() {
                self.verify(now);
            } else if self.engine.is_connected {
                self.give_up_unproven(now);
                self.engine.state = FollowState::Following;
            }
        }
        self.settle(now);
    }

    /// The live socket lost its connection: the next one may reach another life of the engine.
    pub fn disconnected(&mut self, now: Instant) {
        self.engine.is_connected = false;
        self.engine.has_published = false;
        self.engine.state = FollowState::Down;
        self.engine.replay = None;
        self.engine.drop_proof();
        self.settle(now);
    }

    /// Records an input. After a stall no live batch is applied before a new replay has passed.
    pub(super) fn note_input(&mut self, now: Instant) {
        let before = self.awake.replace(now);
        let has_stalled =
            before.is_some_and(|before| now.saturating_duration_since(before) >= STALL_MIN);
        if has_stalled {
            self.verify_again(now);
        }
    }

    /// Time passed unnoticed: what was requested before proves nothing about the present.
    fn verify_again(&mut self, now: Instant) {
        if self.engine.state != FollowState::Down && self.engine.can_verify() {
            self.verify(now);
        }
    }

    /// The process's clock stood still: the engine's proof is older than it seems.
    pub(super) fn clock_stood(&mut self, now: Instant) {
        self.engine.drop_proof();
        self.verify_again(now);
        self.settle(now);
    }

    /// A live message.
    pub fn live(&mut self, now: Instant, topic: &[u8], seq: Option<EngineSeq>, payload: Bytes) {
        self.note_input(now);
        if let Some(wanted) = &self.config.topic
            && wanted.as_bytes() != topic
        {
            self.counters.other_topic += 1;
        } else if self.is_of_other_rank(&payload) {
            self.counters.other_rank += 1;
        } else {
            self.live_payload(now, seq, payload);
        }
        self.settle(now);
    }

    /// Live messages were lost, or did not decode.
    pub fn live_lost(&mut self, now: Instant) {
        if self.engine.can_verify() {
            self.engine.has_loss = true;
            if self.engine.state == FollowState::Following {
                self.verify(now);
            }
        } else {
            self.unseen_loss(now);
        }
        self.settle(now);
    }

    /// A message of a replay, in the order of arrival.
    pub fn replay_batch(&mut self, now: Instant, id: ReplayId, seq: EngineSeq, payload: &[u8]) {
        let Some(mut replay) = self.engine.replay.filter(|replay| replay.id == id) else {
            return;
        };
        replay.deadline = now + REPLAY_PATIENCE;
        replay.has_answers = true;
        self.engine.unanswered = 0;
        self.engine.has_published = true;
        self.engine.replay = Some(replay);
        if replay.behind_hole.is_none() {
            self.replayed(now, replay, seq, payload);
        }
        self.settle(now);
    }

    /// The end marker of a replay.
    pub fn replay_end(&mut self, now: Instant, id: ReplayId) {
        let Some(replay) = self.engine.replay.take_if(|replay| replay.id == id) else {
            return;
        };
        self.engine.unanswered = 0;
        if let Some(behind) = replay.behind_hole {
            self.hole(now, replay, behind);
        } else if replay.is_same_life {
            if !replay.has_answers && self.engine.last().is_none() {
                self.nothing_published(now, replay);
            } else {
                self.confirm_life(now, replay.started);
            }
        } else if !self.is_superseded(replay) {
            self.begin_life(now);
        }
        self.settle(now);
    }

    /// A replay could not be requested, or ended early.
    pub fn replay_failed(&mut self, now: Instant, id: ReplayId) {
        let Some(replay) = self.engine.replay.take_if(|replay| replay.id == id) else {
            return;
        };
        match replay.behind_hole {
            Some(behind) => self.hole(now, replay, behind),
            // Without its end marker it proves the life, and not that no batch is missing. Batches
            // that were buffered may have waited in the socket, so they prove nothing either.
            None if replay.has_answers && replay.is_same_life => {
                self.engine.is_unproven = false;
                self.apply_buffered(now);
            }
            None => {
                self.counters.replays_unanswered += 1;
                self.engine.unanswered = self.engine.unanswered.saturating_add(1);
                if self.engine.unanswered >= UNANSWERED_MIN {
                    self.warn(now, EngineWarning::NoReplay);
                }
            }
        }
        self.settle(now);
    }

    pub(super) fn engine_tick(&mut self, now: Instant) {
        if let Some(replay) = self.engine.replay
            && replay.deadline <= now
        {
            self.replay_failed(now, replay.id);
        }
        let is_due = self.engine.next_replay.is_none_or(|due| due <= now);
        let is_up = self.engine.state != FollowState::Down && self.engine.can_verify();
        if is_up && is_due && self.engine.replay.is_none() {
            self.request_replay(now);
        }
    }

    fn is_of_other_rank(&self, payload: &[u8]) -> bool {
        let named = self.config.rank.zip(wire::rank_of(payload));
        named.is_some_and(|(own, named)| own != named)
    }

    fn live_payload(&mut self, now: Instant, seq: Option<EngineSeq>, payload: Bytes) {
        let Some(seq) = seq else {
            self.unsequenced(now, &payload);
            return;
        };
        if self.engine.is_unsequenced && !self.resume_sequence(now) {
            self.apply(now, &payload);
            return;
        }
        self.engine.has_published = true;
        match self.engine.state {
            FollowState::Down | FollowState::Checking => {
                let arrived = now;
                let batch = BufferedBatch {
                    arrived,
                    seq,
                    payload,
                };
                if !self.engine.buffer(batch, self.config.buffer_bytes_max) {
                    self.counters.buffered_dropped += 1;
                }
            }
            FollowState::Following => self.in_order(now, now, seq, &payload),
        }
    }

    fn unsequenced(&mut self, now: Instant, payload: &[u8]) {
        if !self.engine.is_unsequenced {
            self.warn(now, EngineWarning::NoSequence);
            self.engine.is_unsequenced = true;
            self.engine.replay = None;
            self.engine.state = FollowState::Following;
            self.unseen_loss(now);
        }
        self.apply(now, payload);
    }

    /// A sequence number came after messages without one: follows the sequence again, from unknown
    /// contents. `false` if the last replay is too young: an engine may send both in turn.
    fn resume_sequence(&mut self, now: Instant) -> bool {
        let is_due = self.engine.next_replay.is_none_or(|due| due <= now);
        if !self.engine.is_connected || !is_due {
            return false;
        }
        self.engine.is_unsequenced = false;
        self.unseen_loss(now);
        if self.engine.can_verify() {
            self.verify(now);
        }
        true
    }

    /// A live batch while every earlier one should be applied. It `arrived` now or before.
    fn in_order(&mut self, now: Instant, arrived: Instant, seq: EngineSeq, payload: &[u8]) {
        let can_verify = self.engine.can_verify();
        let Some(last) = self.engine.last() else {
            if seq == EngineSeq(0) && self.engine.resume_from == EngineSeq(0) {
                self.mirror.begin(Start::Empty);
            } else if can_verify && seq > self.engine.resume_from {
                self.gap(now);
                return;
            }
            self.apply_live(now, arrived, seq, payload);
            return;
        };
        if seq == last.next() {
            self.apply_live(now, arrived, seq, payload);
            self.engine.next_replay = Some(now + POLL_EVERY);
            if let Some(poll) = &mut self.engine.replay {
                poll.is_overtaken = true;
            }
        } else if seq > last {
            self.gap(now);
            if !can_verify {
                self.apply_next(now, seq, payload);
            }
        } else {
            match self.engine.applied.compare(seq, payload) {
                BatchMatch::Same => self.counters.duplicates += 1,
                BatchMatch::TooOld if can_verify => self.verify(now),
                BatchMatch::Different | BatchMatch::TooOld => {
                    self.begin_life(now);
                    if !can_verify {
                        self.in_order(now, arrived, seq, payload);
                    }
                }
            }
        }
    }

    /// Applies a live batch that `arrived` then. Every earlier one is applied.
    fn apply_live(&mut self, now: Instant, arrived: Instant, seq: EngineSeq, payload: &[u8]) {
        self.engine.proof = self.engine.proof.max(Some(arrived));
        self.apply_next(now, seq, payload);
        self.resets.batch_arrived(arrived);
    }

    fn gap(&mut self, now: Instant) {
        self.counters.gaps += 1;
        if self.engine.can_verify() {
            self.verify(now);
        } else {
            self.counters.gaps_unfilled += 1;
            self.forget(now, GenerationReason::GapUnfilled);
        }
    }

    /// Drops a mirror from a checkpoint that no replay can prove.
    fn give_up_unproven(&mut self, now: Instant) {
        if self.engine.is_unproven {
            self.engine.forget_life();
            self.mirror.begin(Start::Unknown);
            self.new_generation(now, GenerationReason::Unprovable);
        }
    }

    /// Empties the mirror after a possible loss that is not detectable.
    fn unseen_loss(&mut self, now: Instant) {
        self.engine.forget_life();
        self.mirror.begin(Start::Unknown);
        self.engine.resume_from = EngineSeq(0);
        self.new_generation(now, GenerationReason::LossUnseen);
    }

    fn forget(&mut self, now: Instant, reason: GenerationReason) {
        self.mirror.forget();
        self.engine.forget_life();
        self.engine.drop_proof();
        self.new_generation(now, reason);
    }

    /// The engine is in another life.
    fn begin_life(&mut self, now: Instant) {
        self.counters.restarts += 1;
        self.engine.forget_life();
        self.engine.resume_from = EngineSeq(0);
        self.engine.tries = 0;
        self.engine.drop_proof();
        self.engine.take_buffered();
        self.mirror.begin(Start::Unknown);
        self.new_generation(now, GenerationReason::EngineRestarted);
        if self.engine.can_verify() {
            self.verify(now);
        }
    }

    /// Applies no live batches until a replay has ended.
    fn verify(&mut self, now: Instant) {
        self.engine.state = FollowState::Checking;
        self.request_replay(now);
    }

    fn request_replay(&mut self, now: Instant) {
        // Buffered batches were published before this request, so that its answer contains them.
        self.engine.take_buffered();
        self.engine.has_loss = false;
        self.engine.replays += 1;
        self.counters.replays += 1;
        let last = self.engine.last();
        let replay = Replay {
            id: ReplayId(self.engine.replays),
            from: last.unwrap_or(self.engine.resume_from),
            started: now,
            deadline: now + REPLAY_PATIENCE,
            is_same_life: last.is_none(),
            has_batches: self.engine.has_published,
            has_answers: false,
            made_progress: false,
            is_overtaken: false,
            behind_hole: None,
        };
        self.engine.replay = Some(replay);
        self.engine.next_replay = Some(now + POLL_EVERY);
        self.effects.push_back(Effect::Replay {
            id: replay.id,
            from: replay.from,
        });
    }

    fn replayed(&mut self, now: Instant, mut replay: Replay, seq: EngineSeq, payload: &[u8]) {
        match self.engine.last() {
            None => {
                // The first batch of this life to be applied. Earlier ones, if any, are unavailable.
                let is_first = seq == EngineSeq(0);
                self.mirror.begin(if is_first {
                    Start::Empty
                } else {
                    Start::Unknown
                });
                self.apply_next(now, seq, payload);
                replay.made_progress = true;
            }
            Some(last) if seq <= last => match self.engine.applied.compare(seq, payload) {
                BatchMatch::Same => replay.is_same_life |= seq == replay.from,
                BatchMatch::Different => {
                    self.begin_life(now);
                    return;
                }
                BatchMatch::TooOld => {}
            },
            Some(last) if seq == last.next() && replay.is_same_life => {
                self.apply_next(now, seq, payload);
                replay.made_progress = true;
            }
            Some(_) if self.is_superseded(replay) => {
                self.engine.replay = None;
                return;
            }
            Some(_) => {
                replay.behind_hole = Some(seq);
                self.engine.state = FollowState::Checking;
            }
        }
        self.engine.replay = Some(replay);
    }

    /// Live batches ended the silence that a poll was about. What its answer lacks may be in flight,
    /// and its first batch may have left the engine's buffer.
    fn is_superseded(&self, poll: Replay) -> bool {
        self.engine.state == FollowState::Following && poll.is_overtaken
    }

    /// A replay ended without a batch, and none of this life is applied.
    fn nothing_published(&mut self, now: Instant, replay: Replay) {
        if replay.has_batches {
            self.nothing_replayed(now);
        } else if replay.from == EngineSeq(0) {
            if self.mirror.digest().count == 0 {
                self.mirror.begin(Start::Empty);
            }
            self.confirm_life(now, replay.started);
        } else {
            // The batch behind a hole existed before: this is another life.
            self.begin_life(now);
        }
    }

    /// A replay lost every batch. Without one nothing is known; the next poll tries again.
    fn nothing_replayed(&mut self, now: Instant) {
        self.engine.tries += 1;
        if self.engine.tries < HOLE_TRIES_MAX {
            self.verify(now);
            return;
        }
        self.engine.tries = 0;
        if self.mirror.limits().gpu.is_none() {
            self.counters.gaps_unfilled += 1;
            self.forget(now, GenerationReason::GapUnfilled);
        }
    }

    /// The engine is in the same life. No batch before the time `proof` is missing.
    fn confirm_life(&mut self, now: Instant, proof: Instant) {
        self.engine.tries = 0;
        self.engine.is_unproven = false;
        self.engine.state = FollowState::Following;
        if self.engine.has_loss {
            self.apply_buffered(now);
            self.verify(now);
            return;
        }
        for batch in self.engine.take_buffered() {
            // A gap among them requests a replay, which brings the rest.
            if self.engine.state == FollowState::Following {
                self.in_order(now, batch.arrived, batch.seq, &batch.payload);
            }
        }
        // Otherwise the answer lacked its last batches, though not the end marker.
        if self.engine.state == FollowState::Following {
            self.engine.proof = self.engine.proof.max(Some(proof));
            self.resets.replay_passed(proof);
        }
    }

    /// Applies the buffered batches that follow the last one. Proves nothing: later ones may be missing.
    /// Returns whether any was applied.
    fn apply_buffered(&mut self, now: Instant) -> bool {
        let before = self.engine.last();
        for batch in self.engine.take_buffered() {
            if self
                .engine
                .last()
                .is_some_and(|last| batch.seq == last.next())
            {
                self.apply_next(now, batch.seq, &batch.payload);
            }
        }
        self.engine.last() > before
    }

    fn hole(&mut self, now: Instant, replay: Replay, behind: EngineSeq) {
        // The engine's replay socket drops messages beyond its queue, 1,000 by default.
        let is_shorter = replay.is_same_life && self.apply_buffered(now);
        if replay.made_progress || is_shorter {
            self.engine.tries = 0;
        }
        self.engine.tries += 1;
        if self.engine.tries >= HOLE_TRIES_MAX {
            self.engine.tries = 0;
            self.counters.gaps_unfilled += 1;
            // If the life was not checked either, the next replay starts at the first batch.
            self.engine.resume_from = if replay.is_same_life {
                behind
            } else {
                EngineSeq(0)
            };
            self.forget(now, GenerationReason::GapUnfilled);
        }
        self.verify(now);
    }

    fn apply_next(&mut self, now: Instant, seq: EngineSeq, payload: &[u8]) {
        self.engine.applied.push(seq, payload);
        self.apply(now, payload);
    }

    fn apply(&mut self, now: Instant, payload: &[u8]) {
        self.counters.batches += 1;
        self.engine.last_event = Some(now);
        let applied = match Batch::decode(payload) {
            Ok(batch) => {
                let applied = self.mirror.apply(&batch);
                for part in batch.not_understood {
                    self.warn(now, EngineWarning::NotUnderstood(part));
                }
                applied
            }
            Err(_) => {
                self.counters.payloads_malformed += 1;
                self.warn(now, EngineWarning::NotUnderstood(NotUnderstood::Payload));
                Err(self.mirror.reject_payload())
            }
        };
        match applied {
            Ok(changes) => {
                let happened = self.happened_after(now);
                if !self.publisher.add(happened, changes) {
                    self.new_generation(now, GenerationReason::OutboxFull);
                }
                // A long replay fills records as it goes.
                let context = self.record_context(now);
                self.publisher.pump(now, context, &mut self.effects);
            }
            Err(inconsistency) => {
                if inconsistency != Inconsistency::Undecodable {
                    self.warn(now, EngineWarning::Inconsistent(inconsistency));
                }
                self.new_generation(now, GenerationReason::Mirror(inconsistency));
            }
        }
    }

    /// The earliest time at which what is applied now may have happened: a batch that was missing
    /// is as old as the last proof before it. Without a fresh proof it is older than any backlog
    /// may be, so that the acknowledged state gets no credit before all of it is acknowledged too.
    fn happened_after(&self, now: Instant) -> Instant {
        if !self.is_proven(now) {
            return now.checked_sub(2 * BACKLOG_AGE_MAX).unwrap_or(now);
        }
        match self.engine.unverified() {
            Some(_) => now,
            None => self.engine.proof.unwrap_or(now),
        }
    }
}
