//! View of one other router: its messages, what is missing, and the phase of the view.
//!
//! Only `Following` keeps the invariant of this module's parent. In the other phases the load state
//! holds the last known slots until the fetched state replaces them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use warmroute_proto::load::{
    LoadDigest, LoadHeartbeat, LoadMessage, LoadRequestKind, Presence, StatePart,
};
use warmroute_proto::{
    Generation, RecordNumber, RouterId, SequenceComparison, SequenceVerdict, Sequencer,
};

use super::counts::ReplicaCounts;
use super::echo::EchoProbe;
use super::load_state::LoadState;
use super::view::DigestComparison;
use super::{ASK_PAUSE, ASK_TIMEOUT, DEAD_AFTER, REPAIR_PAUSE, STATE_BYTES_MAX, WAITING_BYTES_MAX};

pub(super) struct Peer {
    pub(super) router: RouterId,
    /// Lowest incarnation that is applied. `None` before the first message.
    fence: Option<Generation>,
    /// Time of its last message, or later: the end of a granted timeout.
    alive_at: Instant,
    phase: PeerPhase,
    waiting: ReorderBuffer,
    pub(super) ask_state: AskState,
    repair: RepairState,
    compared: Option<DigestComparison>,
    /// Difference in requests between the view and its last heartbeat, at whatever numbers.
    divergence: u64,
    /// It has answered that it has no newer messages. A shared snapshot may be older than the
    /// question.
    is_settled: bool,
    pub(super) echo: EchoProbe,
}

enum PeerPhase {
    /// Silent, or it left.
    Dead,
    /// Its open slots must be fetched.
    Fetching(Option<PartialState>),
    Following(Sequencer),
}

/// Parts of a state received so far.
struct PartialState {
    first: StatePart,
    more: Vec<StatePart>,
    bytes: usize,
}

/// Messages received before earlier ones.
#[derive(Default)]
struct ReorderBuffer {
    messages: BTreeMap<RecordNumber, (LoadMessage, PayloadInfo)>,
    bytes: usize,
}

/// Hash and length of a message's bytes.
#[derive(Clone, Copy)]
pub(super) struct PayloadInfo {
    pub(super) hash: u64,
    pub(super) len: usize,
}

/// At most one question is outstanding; failures cause pauses.
pub(super) struct AskState {
    outstanding: Option<(u64, Instant)>,
    failures: u32,
    not_before: Instant,
}

/// States without effect cause pauses until a heartbeat agrees.
struct RepairState {
    attempts: u32,
    not_before: Instant,
}

/// What a peer's methods read and change.
pub(super) struct PeerContext<'a> {
    pub(super) load: &'a mut dyn LoadState,
    pub(super) counts: &'a mut ReplicaCounts,
    pub(super) now: Instant,
}

impl Peer {
    pub(super) fn new(router: RouterId, now: Instant) -> Self {
        Self {
            router,
            fence: None,
            alive_at: now,
            phase: PeerPhase::Fetching(None),
            waiting: ReorderBuffer::default(),
            ask_state: AskState {
                outstanding: None,
                failures: 0,
                not_before: now,
            },
            repair: RepairState {
                attempts: 0,
                not_before: now,
            },
            compared: None,
            divergence: 0,
            is_settled: false,
            echo: EchoProbe::new(now),
        }
    }

    pub(super) const fn is_dead(&self) -> bool {
        matches!(self.phase, PeerPhase::Dead)
    }

    /// Its current slots are known, or it is dead.
    pub(super) const fn is_known(&self) -> bool {
        match self.phase {
            PeerPhase::Dead => true,
            PeerPhase::Fetching(_) => false,
            PeerPhase::Following(_) => self.is_settled,
        }
    }

    pub(super) const fn fence(&self) -> Option<Generation> {
        self.fence
    }

    pub(super) const fn alive_at(&self) -> Instant {
        self.alive_at
    }

    pub(super) const fn compared(&self) -> Option<DigestComparison> {
        self.compared
    }

    pub(super) const fn divergence(&self) -> u64 {
        self.divergence
    }

    /// The number at which the view holds its slots, if it follows.
    pub(super) const fn followed(&self) -> Option<Option<RecordNumber>> {
        match &self.phase {
            PeerPhase::Following(sequencer) => Some(sequencer.last()),
            PeerPhase::Dead | PeerPhase::Fetching(_) => None,
        }
    }

    pub(super) fn collected_bytes(&self) -> usize {
        match &self.phase {
            PeerPhase::Fetching(Some(collected)) => collected.bytes,
            PeerPhase::Dead | PeerPhase::Fetching(None) | PeerPhase::Following(_) => 0,
        }
    }

    /// It is alive until at least this time, which may be in the future.
    pub(super) fn mark_alive(&mut self, at: Instant) {
        self.alive_at = self.alive_at.max(at);
    }

    /// The fence: whether this incarnation may be applied.
    fn admits(&self, incarnation: Generation) -> bool {
        self.fence.is_none_or(|fence| incarnation >= fence)
    }

    pub(super) fn heartbeat(&mut self, heartbeat: &LoadHeartbeat, context: &mut PeerContext<'_>) {
        if !self.admits(heartbeat.incarnation) {
            context.counts.verdicts.old += 1;
            return;
        }
        self.mark_alive(context.now);
        if heartbeat.presence == Presence::Leaving {
            context.counts.goodbyes += 1;
            let next = heartbeat
                .incarnation
                .next()
                .unwrap_or(heartbeat.incarnation);
            self.end(Some(next), context);
            return;
        }
        if self.is_newer(heartbeat.incarnation) {
            self.open(heartbeat.incarnation);
        }
        let view = context.load.digest(self.router);
        self.divergence = view.count.abs_diff(heartbeat.digest.count);
        let standing = match &mut self.phase {
            PeerPhase::Following(sequencer) => {
                let had_gap = sequencer.has_gap();
                let standing = sequencer.observe_heartbeat(
                    context.now,
                    heartbeat.incarnation,
                    heartbeat.number,
                );
                context.counts.mended.gaps += u64::from(sequencer.has_gap() && !had_gap);
                standing
            }
            PeerPhase::Fetching(_) => SequenceComparison::Behind,
            PeerPhase::Dead => {
                self.phase = PeerPhase::Fetching(None);
                SequenceComparison::Behind
            }
        };
        if self.followed().is_none() && heartbeat.digest == LoadDigest::default() {
            // No slot is open at that number: this is the complete state.
            self.is_settled = true;
            self.replace(&[], heartbeat.number, context);
            return;
        }
        if standing == SequenceComparison::Level {
            self.compare(heartbeat, view, context);
        }
    }

    fn compare(
        &mut self,
        heartbeat: &LoadHeartbeat,
        view: LoadDigest,
        context: &mut PeerContext<'_>,
    ) {
        self.is_settled = true;
        self.compared = Some(DigestComparison {
            number: heartbeat.number,
            theirs: heartbeat.digest,
            ours: view,
        });
        if view == heartbeat.digest {
            self.repair.attempts = 0;
        } else {
            context.counts.mended.mismatches += 1;
            self.fetch_again(context.now);
        }
    }

    pub(super) fn message(
        &mut self,
        message: LoadMessage,
        bytes: PayloadInfo,
        context: &mut PeerContext<'_>,
    ) {
        let incarnation = message.incarnation;
        if !self.admits(incarnation) {
            context.counts.verdicts.old += 1;
            return;
        }
        self.mark_alive(context.now);
        if self.is_newer(incarnation) {
            self.open(incarnation);
            if message.number == RecordNumber(0) {
                // An incarnation with open slots starts at number 1.
                self.replace(&[], None, context);
            }
        }
        if self.is_dead() {
            self.phase = PeerPhase::Fetching(None);
        }
        let PeerPhase::Following(sequencer) = &mut self.phase else {
            self.wait(message, bytes, context);
            return;
        };
        let had_gap = sequencer.has_gap();
        let (number, now) = (message.number, context.now);
        match sequencer.accept(now, incarnation, number, bytes.hash) {
            SequenceVerdict::Apply | SequenceVerdict::Start => {
                context.apply(&message);
                self.catch_up(context);
            }
            SequenceVerdict::Ahead | SequenceVerdict::StartBehind => {
                context.counts.mended.gaps += u64::from(!had_gap);
                self.wait(message, bytes, context);
            }
            SequenceVerdict::Duplicate => context.counts.verdicts.duplicate += 1,
            SequenceVerdict::Violation => {
                context.counts.verdicts.violation += 1;
                self.fetch_again(now);
            }
            SequenceVerdict::Old => context.counts.verdicts.old += 1,
        }
    }

    /// Takes a part of the state. Returns false if it is useless. `collected_bytes` are those of the
    /// partial states of all peers.
    pub(super) fn part(
        &mut self,
        part: StatePart,
        len: usize,
        collected_bytes: usize,
        context: &mut PeerContext<'_>,
    ) -> bool {
        if !self.admits(part.incarnation) {
            context.counts.verdicts.old += 1;
            return false;
        }
        self.mark_alive(context.now);
        if self.is_newer(part.incarnation) {
            self.open(part.incarnation);
        }
        let collected = match &mut self.phase {
            // The missing messages have arrived.
            PeerPhase::Following(sequencer) if !sequencer.has_gap() => return true,
            PeerPhase::Following(_) | PeerPhase::Dead => None,
            PeerPhase::Fetching(collected) => collected.take(),
        };
        let collected = match (collected, part.part) {
            (_, 0) => PartialState {
                first: part,
                more: Vec::new(),
                bytes: len,
            },
            (Some(mut collected), next) if collected.is_followed_by(&part, next) => {
                collected.bytes += len;
                collected.more.push(part);
                collected
            }
            (Some(_) | None, _) => {
                self.phase = PeerPhase::Fetching(None);
                return false;
            }
        };
        if collected_bytes + len > STATE_BYTES_MAX {
            context.counts.refused.states += 1;
            self.fetch_again(context.now);
            return false;
        }
        if collected.is_whole() {
            self.take_state(collected, context);
        } else {
            self.phase = PeerPhase::Fetching(Some(collected));
        }
        true
    }

    fn take_state(&mut self, collected: PartialState, context: &mut PeerContext<'_>) {
        let PartialState { first, more, .. } = collected;
        let (number, digest) = (first.number, first.digest);
        let parts: Vec<StatePart> = std::iter::once(first).chain(more).collect();
        context.load.release(self.router, context.now);
        for part in &parts {
            context
                .load
                .restore(self.router, part.incarnation, &part.slots);
        }
        if context.load.digest(self.router) == digest {
            context.counts.mended.by_state += 1;
            self.follow(number, context);
        } else {
            context.counts.mended.states_wrong += 1;
            self.fetch_again(context.now);
        }
    }

    /// Evaluates an answer with messages. Returns whether it helped.
    pub(super) fn messages_answered(&mut self, before: Option<Option<RecordNumber>>) -> bool {
        let after = self.followed();
        let is_news = !self.is_settled && after.is_some();
        self.is_settled |= after.is_some() && after == before;
        after > before || is_news
    }

    /// The requested state no longer exists.
    pub(super) fn gone(&mut self) {
        if !self.is_dead() {
            self.phase = PeerPhase::Fetching(None);
        }
    }

    /// The next question to this router.
    pub(super) fn want(&self) -> Option<LoadRequestKind> {
        match &self.phase {
            PeerPhase::Dead => None,
            PeerPhase::Fetching(None) => Some(LoadRequestKind::State),
            PeerPhase::Fetching(Some(collected)) => Some(LoadRequestKind::Part {
                number: collected.first.number,
                part: collected.parts(),
            }),
            PeerPhase::Following(sequencer) if sequencer.has_gap() || !self.is_settled => {
                Some(LoadRequestKind::Numbers {
                    from: sequencer.last().map_or(RecordNumber(0), RecordNumber::next),
                    to: self.waiting.before_first(),
                })
            }
            PeerPhase::Following(_) => None,
        }
    }

    /// An empty question for measuring the delay. `None` while another question is needed.
    pub(super) const fn empty_want(&self) -> Option<LoadRequestKind> {
        match &self.phase {
            PeerPhase::Following(sequencer) if !sequencer.has_gap() => match sequencer.last() {
                Some(last) => Some(LoadRequestKind::Numbers {
                    from: last.next(),
                    to: Some(last),
                }),
                None => None,
            },
            PeerPhase::Following(_) | PeerPhase::Fetching(_) | PeerPhase::Dead => None,
        }
    }

    pub(super) fn may_ask(&self, now: Instant) -> bool {
        let mended = match &self.phase {
            PeerPhase::Fetching(None) => self.repair.not_before <= now,
            PeerPhase::Dead | PeerPhase::Fetching(Some(_)) | PeerPhase::Following(_) => true,
        };
        mended && self.ask_state.outstanding.is_none() && self.ask_state.not_before <= now
    }

    /// Declares it dead after [`DEAD_AFTER`] of silence.
    pub(super) fn check(&mut self, context: &mut PeerContext<'_>) {
        let silent = context.now.saturating_duration_since(self.alive_at);
        if !self.is_dead() && silent >= DEAD_AFTER {
            context.counts.deaths += 1;
            self.end(self.fence, context);
        }
    }

    fn end(&mut self, fence: Option<Generation>, context: &mut PeerContext<'_>) {
        context.load.release(self.router, context.now);
        context.load.set_delay(self.router, None);
        self.echo = EchoProbe::new(context.now);
        self.fence = fence;
        self.phase = PeerPhase::Dead;
        self.waiting = ReorderBuffer::default();
        self.ask_state.outstanding = None;
        self.ask_state.failures = 0;
        self.divergence = 0;
        self.compared = None;
    }

    fn is_newer(&self, incarnation: Generation) -> bool {
        self.fence.is_none_or(|fence| incarnation > fence)
    }

    /// Starts another incarnation, whose slots are unknown.
    fn open(&mut self, incarnation: Generation) {
        if self.fence.replace(incarnation).is_some() {
            // Answers of the former incarnation are useless.
            self.ask_state.outstanding = None;
            self.ask_state.failures = 0;
        }
        self.phase = PeerPhase::Fetching(None);
        self.waiting = ReorderBuffer::default();
        self.compared = None;
        self.repair.attempts = 0;
    }

    /// The view is wrong: fetches the state again.
    fn fetch_again(&mut self, now: Instant) {
        let attempts = self.repair.attempts;
        if attempts > 0 {
            self.repair.not_before = now + pause(REPAIR_PAUSE, attempts);
        }
        self.repair.attempts = attempts.saturating_add(1);
        self.phase = PeerPhase::Fetching(None);
    }

    /// Replaces the view by the state at this number.
    fn replace(
        &mut self,
        parts: &[StatePart],
        number: Option<RecordNumber>,
        context: &mut PeerContext<'_>,
    ) {
        context.load.release(self.router, context.now);
        for part in parts {
            context
                .load
                .restore(self.router, part.incarnation, &part.slots);
        }
        self.follow(number, context);
    }

    fn follow(&mut self, number: Option<RecordNumber>, context: &mut PeerContext<'_>) {
        let Some(fence) = self.fence else {
            return;
        };
        self.phase = PeerPhase::Following(Sequencer::restored(ASK_TIMEOUT, fence, number));
        self.catch_up(context);
    }

    /// Applies messages that waited for earlier ones.
    fn catch_up(&mut self, context: &mut PeerContext<'_>) {
        let PeerPhase::Following(sequencer) = &mut self.phase else {
            return;
        };
        if self.waiting.messages.is_empty() {
            return;
        }
        loop {
            let next = sequencer.last().map_or(RecordNumber(0), RecordNumber::next);
            self.waiting.drop_below(next);
            let Some((message, bytes)) = self.waiting.take(next) else {
                break;
            };
            let (now, incarnation) = (context.now, message.incarnation);
            if sequencer.accept(now, incarnation, next, bytes.hash) != SequenceVerdict::Apply {
                break;
            }
            context.apply(&message);
        }
        if let (Some(fence), Some(last)) = (self.fence, self.waiting.last()) {
            sequencer.observe_heartbeat(context.now, fence, Some(last));
        }
    }

    fn wait(&mut self, message: LoadMessage, bytes: PayloadInfo, context: &mut PeerContext<'_>) {
        context.counts.verdicts.ahead += 1;
        if !self.waiting.put(message, bytes) {
            context.counts.refused.waiting += 1;
        }
    }
}

impl PeerContext<'_> {
    fn apply(&mut self, message: &LoadMessage) {
        self.counts.verdicts.applied += 1;
        self.load.apply(message, self.now);
    }
}

impl PartialState {
    fn parts(&self) -> u32 {
        u32::try_from(self.more.len() + 1).unwrap_or(u32::MAX)
    }

    fn is_whole(&self) -> bool {
        self.parts() >= self.first.parts
    }

    fn is_followed_by(&self, part: &StatePart, number: u32) -> bool {
        let cut = |part: &StatePart| (part.incarnation, part.number, part.digest, part.parts);
        number == self.parts() && cut(part) == cut(&self.first)
    }
}

impl ReorderBuffer {
    /// Returns false if there is no room. Earlier messages stay: they are applied first.
    fn put(&mut self, message: LoadMessage, bytes: PayloadInfo) -> bool {
        if self.bytes + bytes.len > WAITING_BYTES_MAX {
            return false;
        }
        let number = message.number;
        if let std::collections::btree_map::Entry::Vacant(place) = self.messages.entry(number) {
            place.insert((message, bytes));
            self.bytes += bytes.len;
        }
        true
    }

    fn take(&mut self, number: RecordNumber) -> Option<(LoadMessage, PayloadInfo)> {
        let taken = self.messages.remove(&number)?;
        self.bytes -= taken.1.len;
        Some(taken)
    }

    fn drop_below(&mut self, number: RecordNumber) {
        while let Some((&first, _)) = self.messages.first_key_value()
            && first < number
        {
            self.take(first);
        }
    }

    fn before_first(&self) -> Option<RecordNumber> {
        let (first, _) = self.messages.first_key_value()?;
        first.0.checked_sub(1).map(RecordNumber)
    }

    fn last(&self) -> Option<RecordNumber> {
        self.messages.last_key_value().map(|(&last, _)| last)
    }
}

impl AskState {
    pub(super) const fn asked(&mut self, id: u64, now: Instant) {
        self.outstanding = Some((id, now));
    }

    /// Returns false for an answer that is no longer expected.
    pub(super) fn answered(&mut self, id: u64) -> bool {
        let expected = self.outstanding.is_some_and(|(asked, _)| asked == id);
        if expected {
            self.outstanding = None;
        }
        expected
    }

    pub(super) const fn helped(&mut self) {
        self.failures = 0;
    }

    pub(super) fn failed(&mut self, now: Instant) {
        self.outstanding = None;
        self.not_before = now + pause(ASK_PAUSE, self.failures);
        self.failures = self.failures.saturating_add(1);
    }

    /// Neither an answer nor a failure was reported in time.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.outstanding
            .is_some_and(|(_, asked)| now.saturating_duration_since(asked) >= 2 * ASK_TIMEOUT)
    }
}

fn pause((first, last): (Duration, Duration), failures: u32) -> Duration {
    first.saturating_mul(1 << failures.min(10)).min(last)
}
