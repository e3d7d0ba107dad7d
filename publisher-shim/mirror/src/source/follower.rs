//! The engine's side of a source: which batches are applied, and what proves that none is missing.
//!
//! Every replay starts at the last applied batch, inclusive, and must return its bytes; otherwise
//! it speaks of another life of the engine. After a disconnect, and at every gap, nothing is
//! applied but what a replay brings until that verify has passed; live batches that arrive meanwhile
//! are held, within a bound. A hole in a replay is filled from them if they have what is missing, and
//! asked for again; one that stays cannot be filled, and what the engine holds is then unknown. The
//! same replay, each idle second, is the proof that nothing was lost before a lease_lost.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::EngineSeq;

use super::history::{BatchHistory, BatchMatch};
use super::{Effect, GenerationReason, ReplayId, STALL_MIN, SourceConfig, SourceCore};
use crate::mirror::Start;
use crate::wire::{self, Batch};

/// Silence after which a replay asks whether something was lost.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Silence within a replay after which no more is expected of it.
const REPLAY_PATIENCE: Duration = Duration::from_millis(1500);
/// A hole is asked for so often in all.
const TRIES: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FollowState {
    Down,
    /// What the engine's life is, or what is missing, is being asked.
    Checking,
    Following,
}

/// A replay under way.
#[derive(Clone, Copy, Debug)]
struct Replay {
    id: ReplayId,
    from: EngineSeq,
    started: Instant,
    deadline: Instant,
    /// The batch at its start was returned, byte for byte, or there is none to compare with.
    is_same_life: bool,
    has_answers: bool,
    made_progress: bool,
    /// Live batches were applied meanwhile.
    is_overtaken: bool,
    /// The first batch behind a hole. Nothing behind it is applied.
    behind_hole: Option<EngineSeq>,
}

/// A live batch that waits for a replay.
#[derive(Debug)]
struct BufferedBatch {
    came: Instant,
    seq: EngineSeq,
    payload: Bytes,
}

#[derive(Debug)]
pub(super) struct EngineFollower {
    has_replay: bool,
    /// A message without a sequence number was seen.
    is_unsequenced: bool,
    is_connected: bool,
    was_connected: bool,
    state: FollowState,
    applied: BatchHistory,
    /// The mirror is from a checkpoint, and no replay has shown yet that the engine still is the one
    /// that it mirrored.
    is_unproven: bool,
    /// Where to begin when nothing of this life is applied: 0, or behind a hole.
    resume_from: EngineSeq,
    replay: Option<Replay>,
    replays: u64,
    tries: u32,
    next_replay: Option<Instant>,
    held: VecDeque<BufferedBatch>,
    buffered_bytes: usize,
    /// Live batches are known to be lost.
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
            state: FollowState::Down,
            applied: BatchHistory::new(),
            is_unproven: false,
            resume_from: EngineSeq(0),
            replay: None,
            replays: 0,
            tries: 0,
            next_replay: None,
            held: VecDeque::new(),
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

    /// Starts from a checkpoint's batch.
    pub(super) fn resume(&mut self, seq: EngineSeq, hash: u64) {
        self.applied.restart_at(seq, hash);
        self.is_unproven = true;
    }

    /// The last batch and its hash, if a replay from it can show that nothing was missed.
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

    /// A lost tail cannot be seen.
    pub(super) const fn is_unverified(&self) -> bool {
        !self.can_verify()
    }

    pub(super) fn proof_age(&self, now: Instant) -> Option<Duration> {
        self.proof.map(|proof| now.saturating_duration_since(proof))
    }

    pub(super) const fn drop_proof(&mut self) {
        self.proof = None;
    }

    const fn can_verify(&self) -> bool {
        self.has_replay && !self.is_unsequenced
    }

    fn hold(&mut self, held: BufferedBatch, bytes_max: usize) -> bool {
        let bytes = size_of::<BufferedBatch>() + held.payload.len();
        if self.buffered_bytes + bytes > bytes_max {
            self.has_loss = true;
            return false;
        }
        self.buffered_bytes += bytes;
        self.held.push_back(held);
        true
    }

    fn take_buffered(&mut self) -> VecDeque<BufferedBatch> {
        self.buffered_bytes = 0;
        std::mem::take(&mut self.held)
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

    /// The engine turned out to have a replay endpoint, or to have none.
    pub fn replay_available(&mut self, now: Instant, has_replay: bool) {
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

    /// The live socket lost its connection: the engine may be another one when it is back.
    pub fn disconnected(&mut self, now: Instant) {
        self.engine.is_connected = false;
        self.engine.state = FollowState::Down;
        self.engine.replay = None;
        self.engine.drop_proof();
        self.settle(now);
    }

    /// After a standstill nothing that comes is fresh before a replay, asked for now, has shown that it is.
    pub(super) fn wake(&mut self, now: Instant) {
        let before = self.awake.replace(now);
        let has_slept =
            before.is_some_and(|before| now.saturating_duration_since(before) >= STALL_MIN);
        if has_slept && self.engine.state == FollowState::Following && self.engine.can_verify() {
            self.verify(now);
        }
    }

    /// A live message.
    pub fn live(&mut self, now: Instant, topic: &[u8], seq: Option<EngineSeq>, payload: Bytes) {
        self.wake(now);
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

    /// Live messages were lost before they got here, or could not be read.
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

    /// A message of a replay's answer, in the order of arrival.
    pub fn replay_batch(&mut self, now: Instant, id: ReplayId, seq: EngineSeq, payload: &[u8]) {
        let Some(mut replay) = self.engine.replay.filter(|replay| replay.id == id) else {
            return;
        };
        replay.deadline = now + REPLAY_PATIENCE;
        replay.has_answers = true;
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
        if let Some(behind) = replay.behind_hole {
            self.hole(now, replay, behind);
        } else if replay.is_same_life {
            if !replay.has_answers && self.engine.last().is_none() {
                self.nothing_published(now, replay);
            } else {
                self.same_life(now, Some(replay.started));
            }
        } else if !self.is_superseded(replay) {
            self.engine_restarted(now);
        }
        self.settle(now);
    }

    /// A replay could not be asked for, or its answer broke off.
    pub fn replay_failed(&mut self, now: Instant, id: ReplayId) {
        let Some(replay) = self.engine.replay.take_if(|replay| replay.id == id) else {
            return;
        };
        match replay.behind_hole {
            Some(behind) => self.hole(now, replay, behind),
            // Without its end it shows what was published, and not that nothing else was.
            None if replay.has_answers && replay.is_same_life => self.same_life(now, None),
            None => self.counters.replays_unanswered += 1,
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
        match self.engine.state {
            FollowState::Down | FollowState::Checking => {
                let came = now;
                let held = BufferedBatch { came, seq, payload };
                if !self.engine.hold(held, self.config.buffer_bytes_max) {
                    self.counters.buffered_dropped += 1;
                }
            }
            FollowState::Following => self.in_order(now, now, seq, &payload),
        }
    }

    fn unsequenced(&mut self, now: Instant, payload: &[u8]) {
        if !self.engine.is_unsequenced {
            self.engine.is_unsequenced = true;
            self.engine.replay = None;
            self.engine.state = FollowState::Following;
            self.unseen_loss(now);
        }
        self.apply(now, payload);
    }

    /// A live batch that `came` now or before, while everything before it should be applied.
    fn in_order(&mut self, now: Instant, came: Instant, seq: EngineSeq, payload: &[u8]) {
        let can_verify = self.engine.can_verify();
        let Some(last) = self.engine.last() else {
            if seq == EngineSeq(0) && self.engine.resume_from == EngineSeq(0) {
                self.mirror.begin(Start::Empty);
            } else if can_verify && seq > self.engine.resume_from {
                self.gap(now);
                return;
            }
            self.apply_next(now, seq, payload);
            self.engine.proof = self.engine.proof.max(Some(came));
            return;
        };
        if seq == last.next() {
            self.apply_next(now, seq, payload);
            self.engine.proof = self.engine.proof.max(Some(came));
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
                    self.engine_restarted(now);
                    if !can_verify {
                        self.in_order(now, came, seq, payload);
                    }
                }
            }
        }
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

    /// What came from a checkpoint can never be proven here.
    fn give_up_unproven(&mut self, now: Instant) {
        if self.engine.is_unproven {
            self.engine.forget_life();
            self.mirror.begin(Start::Unknown);
            self.new_generation(now, GenerationReason::Unprovable);
        }
    }

    /// Something may have been lost, and nothing can tell.
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

    /// The engine is not the one that was followed.
    fn engine_restarted(&mut self, now: Instant) {
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

    /// Stops applying live batches until a replay has come to its end.
    fn verify(&mut self, now: Instant) {
        self.engine.state = FollowState::Checking;
        self.request_replay(now);
    }

    fn request_replay(&mut self, now: Instant) {
        // What waits was published before this request: its answer has it, or comes after another one.
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
                // Nothing of this life is applied: the mirror is empty, and what came before this
                // batch, if anything, is not to be had.
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
                    self.engine_restarted(now);
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

    /// A poll asks whether something was lost before a lease_lost. That is over: what the answer lacks may be
    /// on its way, and the batch that it was to begin with may have left the engine's buffer.
    fn is_superseded(&self, poll: Replay) -> bool {
        self.engine.state == FollowState::Following && poll.is_overtaken
    }

    /// The engine lives and has published nothing from the place asked for on.
    fn nothing_published(&mut self, now: Instant, replay: Replay) {
        if replay.from == EngineSeq(0) {
            if self.mirror.digest().count == 0 {
                self.mirror.begin(Start::Empty);
            }
            self.same_life(now, Some(replay.started));
        } else {
            // The batch behind a hole was there before: its buffer is another one.
            self.engine_restarted(now);
        }
    }

    /// The engine is the one that was followed. `proof`: as of when it is known that nothing is missing.
    fn same_life(&mut self, now: Instant, proof: Option<Instant>) {
        self.engine.tries = 0;
        self.engine.is_unproven = false;
        self.engine.state = FollowState::Following;
        if self.engine.has_loss {
            self.apply_buffered(now);
            self.verify(now);
            return;
        }
        for held in self.engine.take_buffered() {
            // A gap among them asks for a replay, which then brings the rest.
            if self.engine.state == FollowState::Following {
                self.in_order(now, held.came, held.seq, &held.payload);
            }
        }
        // Else the answer lacked its end, though not the end's marker.
        if self.engine.state == FollowState::Following {
            self.engine.proof = self.engine.proof.max(proof);
        }
    }

    /// Applies what was held and follows the last batch. It proves nothing: more may be missing behind it.
    fn apply_buffered(&mut self, now: Instant) -> bool {
        let before = self.engine.last();
        for held in self.engine.take_buffered() {
            if self
                .engine
                .last()
                .is_some_and(|last| held.seq == last.next())
            {
                self.apply_next(now, held.seq, &held.payload);
            }
        }
        self.engine.last() > before
    }

    fn hole(&mut self, now: Instant, replay: Replay, behind: EngineSeq) {
        // An engine's replay socket drops what is more than it can queue, 1,000 messages as a rule.
        let is_shorter = replay.is_same_life && self.apply_buffered(now);
        if replay.made_progress || is_shorter {
            self.engine.tries = 0;
        }
        self.engine.tries += 1;
        if self.engine.tries >= TRIES {
            self.engine.tries = 0;
            self.counters.gaps_unfilled += 1;
            // If even the life could not be checked, the new one is asked for from its beginning.
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
        let Ok(batch) = Batch::decode(payload) else {
            self.counters.payloads_malformed += 1;
            self.mirror.doubt();
            return;
        };
        match self.mirror.apply(&batch) {
            Ok(changes) => {
                if !self.publisher.add(now, changes) {
                    self.new_generation(now, GenerationReason::OutboxFull);
                }
                // So that a long replay fills records as it goes.
                let present = self.present(now);
                self.publisher.pump(now, present, &mut self.effects);
            }
            Err(sign) => self.new_generation(now, GenerationReason::Mirror(sign)),
        }
    }
}
