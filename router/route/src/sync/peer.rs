//! One other router: what it said, what is missing, and how far its slots here are its own.
//!
//! `Following` is the invariant of the module's documentation; the other phases make no claim. While
//! `Lacking`, what the load hold of it is the last that was known, until the state replaces it.

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
    /// Nothing below it is ever applied. None for a router that was only heard of.
    fence: Option<Generation>,
    /// When it last gave a sign of life, or when it became our fault that it did not.
    heard: Instant,
    phase: PeerPhase,
    waiting: ReorderBuffer,
    pub(super) ask_state: AskState,
    repair: RepairState,
    compared: Option<DigestComparison>,
    /// By how many requests the view differed from its last heartbeat, at whatever numbers.
    divergence: u64,
    /// Once it had said that there was no more. A state may be that of a moment ago, when somebody else
    /// asked for it.
    is_settled: bool,
    pub(super) echo: EchoProbe,
}

enum PeerPhase {
    /// Silent, or gone for good.
    Dead,
    /// Its open slots are needed.
    Lacking(Option<PartialState>),
    Following(Sequencer),
}

/// Parts of a state that came so far.
struct PartialState {
    first: StatePart,
    more: Vec<StatePart>,
    bytes: usize,
}

/// Messages that came before their turn.
#[derive(Default)]
struct ReorderBuffer {
    messages: BTreeMap<RecordNumber, (LoadMessage, PayloadInfo)>,
    bytes: usize,
}

/// What is known of a message's bytes.
#[derive(Clone, Copy)]
pub(super) struct PayloadInfo {
    pub(super) hash: u64,
    pub(super) len: usize,
}

/// At most one question is on its way, and failed ones make pauses.
pub(super) struct AskState {
    outstanding: Option<(u64, Instant)>,
    failures: u32,
    not_before: Instant,
}

/// States that did not help make pauses until a heartbeat agrees.
struct RepairState {
    vain: u32,
    not_before: Instant,
}

/// What a peer's methods work on.
pub(super) struct PeerContext<'a> {
    pub(super) load: &'a mut dyn LoadState,
    pub(super) counts: &'a mut ReplicaCounts,
    /// Bytes of states that all peers together have collected.
    pub(super) collected_bytes: usize,
    pub(super) now: Instant,
}

impl Peer {
    pub(super) fn new(router: RouterId, now: Instant) -> Self {
        Self {
            router,
            fence: None,
            heard: now,
            phase: PeerPhase::Lacking(None),
            waiting: ReorderBuffer::default(),
            ask_state: AskState {
                outstanding: None,
                failures: 0,
                not_before: now,
            },
            repair: RepairState {
                vain: 0,
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

    /// Its slots as of now are known, or it has none.
    pub(super) const fn is_known(&self) -> bool {
        match self.phase {
            PeerPhase::Dead => true,
            PeerPhase::Lacking(_) => false,
            PeerPhase::Following(_) => self.is_settled,
        }
    }

    pub(super) const fn fence(&self) -> Option<Generation> {
        self.fence
    }

    pub(super) const fn heard(&self) -> Instant {
        self.heard
    }

    pub(super) const fn compared(&self) -> Option<DigestComparison> {
        self.compared
    }

    pub(super) const fn divergence(&self) -> u64 {
        self.divergence
    }

    /// The number up to which its slots here are its own.
    pub(super) const fn followed(&self) -> Option<Option<RecordNumber>> {
        match &self.phase {
            PeerPhase::Following(sequencer) => Some(sequencer.last()),
            PeerPhase::Dead | PeerPhase::Lacking(_) => None,
        }
    }

    pub(super) fn collected_bytes(&self) -> usize {
        match &self.phase {
            PeerPhase::Lacking(Some(collected)) => collected.bytes,
            PeerPhase::Dead | PeerPhase::Lacking(None) | PeerPhase::Following(_) => 0,
        }
    }

    /// It lives. Also what one grants it: a time in the future.
    pub(super) fn hear(&mut self, at: Instant) {
        self.heard = self.heard.max(at);
    }

    /// The fence. Else the message is of no router that lives.
    fn admits(&self, incarnation: Generation) -> bool {
        self.fence.is_none_or(|fence| incarnation >= fence)
    }

    pub(super) fn heartbeat(&mut self, said: &LoadHeartbeat, context: &mut PeerContext<'_>) {
        if !self.admits(said.incarnation) {
            context.counts.verdicts.old += 1;
            return;
        }
        self.hear(context.now);
        if said.presence == Presence::Leaving {
            context.counts.goodbyes += 1;
            let next = said.incarnation.next().unwrap_or(said.incarnation);
            self.end(Some(next), context);
            return;
        }
        if self.is_newer(said.incarnation) {
            self.open(said.incarnation);
        }
        let view = context.load.digest(self.router);
        self.divergence = view.count.abs_diff(said.digest.count);
        let standing = match &mut self.phase {
            PeerPhase::Following(sequencer) => {
                let had_gap = sequencer.has_gap();
                let standing =
                    sequencer.observe_heartbeat(context.now, said.incarnation, said.number);
                context.counts.mended.gaps += u64::from(sequencer.has_gap() && !had_gap);
                standing
            }
            PeerPhase::Lacking(_) => SequenceComparison::Behind,
            PeerPhase::Dead => {
                self.phase = PeerPhase::Lacking(None);
                SequenceComparison::Behind
            }
        };
        if self.followed().is_none() && said.digest == LoadDigest::default() {
            // Nothing is open as of that number: this is the whole state.
            self.is_settled = true;
            self.replace(&[], said.number, context);
            return;
        }
        if standing == SequenceComparison::Level {
            self.compare(said, view, context);
        }
    }

    fn compare(&mut self, said: &LoadHeartbeat, view: LoadDigest, context: &mut PeerContext<'_>) {
        self.is_settled = true;
        self.compared = Some(DigestComparison {
            number: said.number,
            theirs: said.digest,
            ours: view,
        });
        if view == said.digest {
            self.repair.vain = 0;
        } else {
            context.counts.mended.mismatches += 1;
            self.lack_again(context.now);
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
        self.hear(context.now);
        if self.is_newer(incarnation) {
            self.open(incarnation);
            if message.number == RecordNumber(0) {
                // An incarnation that begins with slots states them as number 0, in no message.
                self.replace(&[], None, context);
            }
        }
        if self.is_dead() {
            self.phase = PeerPhase::Lacking(None);
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
                self.lack_again(now);
            }
            SequenceVerdict::Old => context.counts.verdicts.old += 1,
        }
    }

    /// An answer's part of the state. False if it is of no use.
    pub(super) fn part(
        &mut self,
        part: StatePart,
        len: usize,
        context: &mut PeerContext<'_>,
    ) -> bool {
        if !self.admits(part.incarnation) {
            context.counts.verdicts.old += 1;
            return false;
        }
        self.hear(context.now);
        if self.is_newer(part.incarnation) {
            self.open(part.incarnation);
        }
        let collected = match &mut self.phase {
            // The messages came after all.
            PeerPhase::Following(sequencer) if !sequencer.has_gap() => return true,
            PeerPhase::Following(_) | PeerPhase::Dead => None,
            PeerPhase::Lacking(collected) => collected.take(),
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
                self.phase = PeerPhase::Lacking(None);
                return false;
            }
        };
        if context.collected_bytes + len > STATE_BYTES_MAX {
            context.counts.refused.states += 1;
            self.lack_again(context.now);
            return false;
        }
        if collected.is_whole() {
            self.take_state(collected, context);
        } else {
            self.phase = PeerPhase::Lacking(Some(collected));
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
            self.lack_again(context.now);
        }
    }

    /// Messages that were asked for; did they help?
    pub(super) fn told(&mut self, before: Option<Option<RecordNumber>>) -> bool {
        let after = self.followed();
        let is_news = !self.is_settled && after.is_some();
        self.is_settled |= after.is_some() && after == before;
        after > before || is_news
    }

    /// What was asked about is no more there.
    pub(super) fn gone(&mut self) {
        if !self.is_dead() {
            self.phase = PeerPhase::Lacking(None);
        }
    }

    /// What to ask this router for.
    pub(super) fn want(&self) -> Option<LoadRequestKind> {
        match &self.phase {
            PeerPhase::Dead => None,
            PeerPhase::Lacking(None) => Some(LoadRequestKind::State),
            PeerPhase::Lacking(Some(collected)) => Some(LoadRequestKind::Part {
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

    /// A question that asks for nothing, for how long it takes. None while there are better ones.
    pub(super) const fn empty_want(&self) -> Option<LoadRequestKind> {
        match &self.phase {
            PeerPhase::Following(sequencer) if !sequencer.has_gap() => match sequencer.last() {
                Some(last) => Some(LoadRequestKind::Numbers {
                    from: last.next(),
                    to: Some(last),
                }),
                None => None,
            },
            PeerPhase::Following(_) | PeerPhase::Lacking(_) | PeerPhase::Dead => None,
        }
    }

    pub(super) fn may_ask(&self, now: Instant) -> bool {
        let mended = match &self.phase {
            PeerPhase::Lacking(None) => self.repair.not_before <= now,
            PeerPhase::Dead | PeerPhase::Lacking(Some(_)) | PeerPhase::Following(_) => true,
        };
        mended && self.ask_state.outstanding.is_none() && self.ask_state.not_before <= now
    }

    /// Lets it die of silence.
    pub(super) fn check(&mut self, context: &mut PeerContext<'_>) {
        let silent = context.now.saturating_duration_since(self.heard);
        if !self.is_dead() && silent >= DEAD_AFTER {
            context.counts.deaths += 1;
            self.end(self.fence, context);
        }
    }

    fn end(&mut self, fence: Option<Generation>, context: &mut PeerContext<'_>) {
        context.load.release(self.router, context.now);
        context.load.delay(self.router, None);
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

    /// Another incarnation: what it begins with is not known yet.
    fn open(&mut self, incarnation: Generation) {
        if self.fence.replace(incarnation).is_some() {
            // What was asked of the former incarnation is of no use.
            self.ask_state.outstanding = None;
            self.ask_state.failures = 0;
        }
        self.phase = PeerPhase::Lacking(None);
        self.waiting = ReorderBuffer::default();
        self.compared = None;
        self.repair.vain = 0;
    }

    /// The view proved wrong.
    fn lack_again(&mut self, now: Instant) {
        let vain = self.repair.vain;
        if vain > 0 {
            self.repair.not_before = now + pause(REPAIR_PAUSE, vain);
        }
        self.repair.vain = vain.saturating_add(1);
        self.phase = PeerPhase::Lacking(None);
    }

    /// The state as of this number is known.
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

    /// Applies what waited for its turn.
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
    /// False if there is no room. What came first stays: it is what can be applied first.
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

    /// False for an answer that nobody waits for any more.
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

    /// Its answer should be here, or word that there is none.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.outstanding
            .is_some_and(|(_, asked)| now.saturating_duration_since(asked) >= 2 * ASK_TIMEOUT)
    }
}

fn pause((first, last): (Duration, Duration), failures: u32) -> Duration {
    first.saturating_mul(1 << failures.min(10)).min(last)
}
