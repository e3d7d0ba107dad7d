//! Generations, records, and the window of records in flight.
//!
//! Pure. A generation is first claimed, then opened with an image. Changes that arrive during the
//! claim are not kept, as the image has them. The window is ordered: a failed append resends its
//! record and all behind it, byte for byte. Its bytes are bounded: beyond, all waiting records are
//! dropped and one new generation replaces them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::codec::{self, RECORD_BYTES_MAX};
use warmroute_proto::{
    Change, Digest, EngineSeq, Generation, LogTime, Record, RecordNumber, Source, Tier, TierState,
    TierStates, Tiers,
};

use super::backoff::Backoff;
use super::limits::TokenBucket;
use super::{AppendId, Effect, pack};

/// Records in flight; below what a sequencing reader remembers.
const WINDOW_MAX: usize = 64;
/// A log answers in the order of appends. If a later record is acknowledged for this long, the answer
/// to an earlier one is lost, with its record or without.
const OVERTAKEN_MAX: Duration = Duration::from_millis(500);
/// Lower bound of the record size; a record with one change fits.
const RECORD_BYTES_MIN: usize = 1024;

/// The source as of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordState {
    pub number: RecordNumber,
    pub engine_seq: Option<EngineSeq>,
    /// The states that the mirror supports, whatever the age of the proof.
    pub states: TierStates,
    pub after: Digest,
}

/// The facts that a record carries beside its changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordContext {
    pub(super) engine_seq: Option<EngineSeq>,
    /// The states that the mirror supports, whatever the age of the proof.
    pub(super) states: TierStates,
    /// The states that may be claimed now.
    pub(super) claimed_states: TierStates,
    /// Present time of the log's clock.
    pub(super) sent_at: Option<LogTime>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PublishPhase {
    /// Another shim may hold the lease. Nothing is published.
    NoLease,
    /// Needs a generation; the time of the next claim, or `None` while one is in flight.
    Claiming(Option<Instant>),
    Open,
}

/// Whether a record is a part of its generation's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordOrigin {
    Image,
    /// Counts towards the bound of waiting bytes.
    Changes,
}

/// Folded changes that are in no record yet.
#[derive(Debug, Default)]
struct PendingChanges {
    changes: Vec<Change>,
    bytes: usize,
    /// Time at which the oldest change was folded.
    since: Option<Instant>,
}

impl PendingChanges {
    fn add(&mut self, now: Instant, changes: Vec<Change>) {
        if !changes.is_empty() {
            self.since.get_or_insert(now);
        }
        self.bytes += changes.iter().map(pack::change_bytes).sum::<usize>();
        self.changes.extend(changes);
    }

    fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

#[derive(Debug)]
struct OutboxRecord {
    payload: Bytes,
    point: RecordState,
    origin: RecordOrigin,
    is_acknowledged: bool,
    /// When the oldest change in it was folded.
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Publisher {
    source: Source,
    bytes_max: usize,
    record_bytes_max: usize,
    phase: PublishPhase,
    /// Records are kept and not sent: the log is unreachable, or its end or the lease unconfirmed.
    is_paused: bool,
    claims: TokenBucket,
    generation: Generation,
    /// No generation up to here may be used again.
    fence: Generation,
    next: RecordNumber,
    window: VecDeque<OutboxRecord>,
    /// Number of the window's first records that were sent.
    sent: usize,
    /// Incremented with each resend, to ignore answers to an earlier attempt.
    attempt: u32,
    retry: Option<Instant>,
    backoff: Backoff,
    /// Time since which a record behind the window's first is acknowledged, and the first is not.
    overtaken: Option<Instant>,
    /// Bytes of the window's records, images left out.
    waiting_bytes: usize,
    pending: PendingChanges,
    /// The digests after the last record cut.
    digests: Tiers<Digest>,
    last_cut: Option<RecordState>,
    acknowledged: Option<RecordState>,
}

impl Publisher {
    pub(super) fn new(source: Source, bytes_max: usize, seed: u64) -> Self {
        Self {
            source,
            bytes_max,
            record_bytes_max: RECORD_BYTES_MAX,
            phase: PublishPhase::NoLease,
            is_paused: false,
            claims: TokenBucket::of_claims(),
            generation: Generation(0),
            fence: Generation(0),
            next: RecordNumber(0),
            window: VecDeque::new(),
            sent: 0,
            attempt: 0,
            retry: None,
            backoff: Backoff::new(seed),
            overtaken: None,
            waiting_bytes: 0,
            pending: PendingChanges::default(),
            digests: Tiers::default(),
            last_cut: None,
            acknowledged: None,
        }
    }

    pub(super) const fn is_open(&self) -> bool {
        matches!(self.phase, PublishPhase::Open)
    }

    pub(super) const fn lacks_lease(&self) -> bool {
        matches!(self.phase, PublishPhase::NoLease)
    }

    /// The generation in use or last used; `None` before the first.
    pub(super) fn generation(&self) -> Option<Generation> {
        (self.generation > Generation(0)).then_some(self.generation)
    }

    pub(super) const fn acknowledged_point(&self) -> Option<RecordState> {
        self.acknowledged
    }

    /// All changes are acknowledged.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.is_open() && self.window.is_empty() && self.pending.is_empty()
    }

    /// The last record is as of this batch too if nothing waits behind it, and so are those before
    /// it with the same content. Their states are then at most the present ones: a batch may lower a
    /// state without a change, with a block whose parent is unknown.
    pub(super) fn caught_up(&mut self, context: RecordContext) {
        if !self.is_open() || !self.pending.is_empty() {
            return;
        }
        let Some(content) = self.last_cut.map(|point| point.after) else {
            return;
        };
        let in_window = self.window.iter_mut().rev().map(|record| &mut record.point);
        for point in in_window.chain(&mut self.acknowledged) {
            if point.after != content {
                break;
            }
            for tier in Tier::ALL {
                let state = point.states.get_mut(tier);
                *state = state.weakest(*context.states.get(tier));
            }
            point.engine_seq = context.engine_seq;
        }
        // Other states are news, and need a record of their own.
        if let Some(point) = &mut self.last_cut
            && point.states == context.states
        {
            point.engine_seq = context.engine_seq;
        }
    }

    /// The last record as it is claimed; its states may be lower than those that it was sent with.
    fn last_point(&self) -> Option<&RecordState> {
        let in_window = self.window.back().map(|record| &record.point);
        in_window.or(self.acknowledged.as_ref())
    }

    /// Age of the oldest change that the log has not acknowledged; zero without one.
    pub(super) fn backlog_age(&self, now: Instant) -> Duration {
        // A replay brings changes that are older than the records before them.
        let in_window = self.window.iter().map(|record| record.since);
        let oldest = in_window.chain(self.pending.since).min();
        oldest.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Makes what the log has not acknowledged older: the clock that measured it stood still.
    pub(super) fn age_backlog(&mut self, by: Duration) {
        let in_window = self.window.iter_mut().map(|record| &mut record.since);
        for since in in_window.chain(&mut self.pending.since) {
            *since = since.checked_sub(by).unwrap_or(*since);
        }
    }

    pub(super) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes + self.pending.bytes
    }

    /// The records of the generation's image are not all acknowledged.
    pub(super) fn has_image_under_way(&self) -> bool {
        let mut origins = self.window.iter().map(|record| record.origin);
        !self.is_open() || origins.any(|origin| origin == RecordOrigin::Image)
    }

    pub(super) const fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Appends of any other attempt are void.
    pub(super) const fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The highest number that may be in the log.
    pub(super) fn last_number(&self) -> Option<RecordNumber> {
        self.next.0.checked_sub(1).map(RecordNumber)
    }

    /// Stops sending and keeps the records. Those in flight are resent later.
    pub(super) fn pause(&mut self) {
        if !self.is_paused {
            self.is_paused = true;
            self.go_back();
        }
    }

    pub(super) fn unpause(&mut self, now: Instant) {
        if std::mem::take(&mut self.is_paused) {
            self.retry = None;
            if let PublishPhase::Claiming(Some(due)) = self.phase {
                // Other shims lost the plane as well and return in the same moment.
                let due = due.max(now + self.backoff.first());
                self.phase = PublishPhase::Claiming(Some(due));
            }
        }
    }

    /// Lowers the size limit of a record. `false` if it is not lower than the known one.
    pub(super) fn limit_records(&mut self, bytes_max: usize) -> bool {
        let bytes_max = bytes_max.max(RECORD_BYTES_MIN);
        let is_new = bytes_max < self.record_bytes_max;
        self.record_bytes_max = self.record_bytes_max.min(bytes_max);
        is_new
    }

    pub(super) fn lease_lost(&mut self) {
        self.phase = PublishPhase::NoLease;
        self.drop_everything();
    }

    /// Drops all records and claims a generation, at `due` or later.
    pub(super) fn claim(&mut self, due: Instant) {
        self.drop_everything();
        self.phase = PublishPhase::Claiming(Some(due));
    }

    pub(super) fn raise_fence(&mut self, above: Generation) {
        self.fence = self.fence.max(above);
    }

    pub(super) const fn fence(&self) -> Generation {
        self.fence
    }

    /// A generation was claimed. `false` if it is not usable: it is not above the fence, or no claim
    /// is pending.
    pub(super) fn claimed(&mut self, now: Instant, generation: Generation) -> bool {
        let is_new = generation > self.fence;
        self.raise_fence(generation);
        match self.phase {
            PublishPhase::Claiming(_) if is_new => {}
            PublishPhase::Claiming(_) => {
                self.phase = PublishPhase::Claiming(Some(now));
                return false;
            }
            PublishPhase::NoLease | PublishPhase::Open => return false,
        }
        self.phase = PublishPhase::Open;
        self.backoff.reset();
        self.generation = generation;
        self.next = RecordNumber(0);
        self.digests = Tiers::default();
        self.last_cut = None;
        self.acknowledged = None;
        self.attempt = self.attempt.wrapping_add(1);
        true
    }

    pub(super) fn claim_failed(&mut self, now: Instant) {
        if let PublishPhase::Claiming(None) = self.phase {
            self.phase = PublishPhase::Claiming(Some(now + self.backoff.next()));
        }
    }

    /// Cuts the image of the mirror, right after the generation was claimed.
    pub(super) fn open(&mut self, now: Instant, image: Vec<Change>, context: RecordContext) {
        self.cut(now, image, context, RecordOrigin::Image);
    }

    /// Adds the net changes of a batch. `false` if they exceed the bound: a new generation is needed.
    pub(super) fn add(&mut self, now: Instant, changes: Vec<Change>) -> bool {
        if !self.is_open() {
            return true;
        }
        self.pending.add(now, changes);
        self.waiting_bytes() <= self.bytes_max
    }

    /// Cuts the pending changes if due, and sends what the window has room for.
    pub(super) fn pump(
        &mut self,
        now: Instant,
        context: RecordContext,
        effects: &mut VecDeque<Effect>,
    ) {
        if self.is_paused {
            return;
        }
        match self.phase {
            PublishPhase::NoLease | PublishPhase::Claiming(None) => return,
            PublishPhase::Claiming(Some(due)) => {
                if due <= now && self.claims.try_take(now) {
                    self.phase = PublishPhase::Claiming(None);
                    let above = self.fence;
                    effects.push_back(Effect::ClaimGeneration { above });
                }
                return;
            }
            PublishPhase::Open => {}
        }
        let is_other = |point: &RecordState| point.states != context.states;
        let has_news = !self.pending.is_empty()
            || self.last_cut.as_ref().is_none_or(is_other)
            || self.last_point().is_some_and(is_other);
        let is_full = self.pending.bytes + 1024 >= self.record_bytes_max;
        if has_news && (self.window.is_empty() || is_full) {
            self.cut_pending(now, context);
        }
        let is_overtaken = |since: Instant| now.saturating_duration_since(since) >= OVERTAKEN_MAX;
        if self.overtaken.is_some_and(is_overtaken) {
            self.go_back();
            self.retry = Some(now + self.backoff.next());
        }
        if self.retry.is_some_and(|due| due > now) {
            return;
        }
        self.retry = None;
        while self.sent < self.window.len().min(WINDOW_MAX) {
            let record = &self.window[self.sent];
            effects.push_back(Effect::Append {
                id: AppendId {
                    generation: self.generation,
                    number: record.point.number,
                    attempt: self.attempt,
                },
                payload: record.payload.clone(),
            });
            self.sent += 1;
        }
    }

    /// The log acknowledged a record. Answers may come in any order.
    pub(super) fn acknowledge(&mut self, now: Instant, id: AppendId, context: RecordContext) {
        if !self.is_current(id) {
            return;
        }
        let sent = self.window.iter_mut().take(self.sent);
        for record in sent {
            record.is_acknowledged |= record.point.number == id.number;
        }
        while self.window.front().is_some_and(|out| out.is_acknowledged) {
            let Some(record) = self.window.pop_front() else {
                break;
            };
            self.sent -= 1;
            self.backoff.reset();
            self.overtaken = None;
            self.acknowledged = Some(record.point);
            if record.origin == RecordOrigin::Changes {
                self.waiting_bytes -= record.payload.len();
            }
        }
        if self.window.iter().any(|out| out.is_acknowledged) {
            self.overtaken.get_or_insert(now);
        }
        if !self.pending.is_empty() {
            self.cut_pending(now, context);
        }
    }

    /// An append failed or has an unknown result: resends its record and all behind it.
    pub(super) fn fail(&mut self, now: Instant, id: AppendId) {
        if !self.is_current(id) {
            return;
        }
        self.go_back();
        self.retry = Some(now + self.backoff.next());
    }

    fn go_back(&mut self) {
        self.attempt = self.attempt.wrapping_add(1);
        self.sent = 0;
        self.overtaken = None;
        for record in &mut self.window {
            record.is_acknowledged = false;
        }
    }

    fn is_current(&self, id: AppendId) -> bool {
        self.is_open() && id.generation == self.generation && id.attempt == self.attempt
    }

    fn cut_pending(&mut self, now: Instant, context: RecordContext) {
        let pending = std::mem::take(&mut self.pending);
        // A record without changes carries the present states.
        let since = pending.since.unwrap_or(now);
        self.cut(since, pending.changes, context, RecordOrigin::Changes);
    }

    fn cut(
        &mut self,
        since: Instant,
        changes: Vec<Change>,
        context: RecordContext,
        origin: RecordOrigin,
    ) {
        let name = self.source.worker.as_str().len();
        let room = self.record_bytes_max.saturating_sub(name);
        let parts = pack::split(changes, room, &mut self.digests);
        let last = parts.len() - 1;
        let before = self.last_cut.and_then(|last_cut| last_cut.engine_seq);
        for (index, part) in parts.into_iter().enumerate() {
            let is_last = index == last;
            let under_way = TierStates::all(TierState::CatchingUp);
            let (engine_seq, states, claimed_states) = if is_last {
                (context.engine_seq, context.states, context.claimed_states)
            } else {
                (before, under_way, under_way)
            };
            let point = RecordState {
                number: self.next,
                engine_seq,
                states,
                after: part.after,
            };
            let record = Record {
                source: self.source.clone(),
                generation: self.generation,
                number: self.next,
                engine_seq,
                changes: part.changes,
                states: claimed_states,
                after: part.after,
                sent_at: context.sent_at,
            };
            // Encoding into memory does not fail. Readers would count an empty record as undecodable.
            let payload = Bytes::from(codec::encode(&record).unwrap_or_default());
            debug_assert!(payload.len() <= RECORD_BYTES_MAX, "a record is too large");
            if origin == RecordOrigin::Changes {
                self.waiting_bytes += payload.len();
            }
            self.next = self.next.next();
            self.last_cut = Some(point);
            self.window.push_back(OutboxRecord {
                payload,
                point,
                origin,
                is_acknowledged: false,
                since,
            });
        }
    }

    fn drop_everything(&mut self) {
        self.window.clear();
        self.pending = PendingChanges::default();
        self.sent = 0;
        self.retry = None;
        self.overtaken = None;
        self.waiting_bytes = 0;
        self.attempt = self.attempt.wrapping_add(1);
    }
}
