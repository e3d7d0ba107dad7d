//! One other router: what it said, what is missing, and how far its slots here are its own.
//!
//! `Following` is the invariant of the module's documentation; the other phases make no claim. While
//! `Lacking`, what the books hold of it is the last that was known, until the state replaces it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use warmroute_proto::load::{
    LoadDigest, LoadHeartbeat, LoadMessage, LoadRequestKind, Presence, StatePart,
};
use warmroute_proto::{
    Generation, RecordNumber, RouterId, SequenceComparison, SequenceVerdict, Sequencer,
};

use super::books::Books;
use super::counts::Counts;
use super::echo::Echo;
use super::rules::{Rule, Rules};
use super::view::Compared;
use super::{ASK_PAUSE, ASK_TIMEOUT, MEND_PAUSE, STATE_BYTES_MAX, WAITING_BYTES_MAX};

pub(super) struct Peer {
    pub(super) router: RouterId,
    /// Nothing below it is ever applied. None for a router that was only heard of.
    fence: Option<Generation>,
    /// When it last gave a sign of life, or when it became our fault that it did not.
    heard: Instant,
    phase: Phase,
    waiting: Waiting,
    pub(super) asking: Asking,
    mending: Mending,
    compared: Option<Compared>,
    /// By how many requests the view differed from its last heartbeat, at whatever numbers.
    divergence: u64,
    /// Once it had said that there was no more. A state may be that of a moment ago, when somebody else
    /// asked for it.
    is_settled: bool,
    pub(super) echo: Echo,
}

enum Phase {
    /// Silent, or gone for good.
    Dead,
    /// Its open slots are needed.
    Lacking(Option<Collected>),
    Following(Sequencer),
}

/// Parts of a state that came so far.
struct Collected {
    first: StatePart,
    more: Vec<StatePart>,
    bytes: usize,
}

/// Messages that came before their turn.
#[derive(Default)]
struct Waiting {
    messages: BTreeMap<RecordNumber, (LoadMessage, Received)>,
    bytes: usize,
}

/// What is known of a message's bytes.
#[derive(Clone, Copy)]
pub(super) struct Received {
    pub(super) hash: u64,
    pub(super) len: usize,
}

/// At most one question is on its way, and failed ones make pauses.
pub(super) struct Asking {
    outstanding: Option<(u64, Instant)>,
    failures: u32,
    not_before: Instant,
}

/// States that did not help make pauses until a heartbeat agrees.
struct Mending {
    vain: u32,
    not_before: Instant,
}

/// What a peer's methods work on.
pub(super) struct Desk<'a> {
    pub(super) books: &'a mut dyn Books,
    pub(super) counts: &'a mut Counts,
    /// Bytes of states that all peers together have collected.
    pub(super) collected_bytes: usize,
    pub(super) now: Instant,
    pub(super) rules: Rules,
}

impl Peer {
    pub(super) fn new(router: RouterId, now: Instant) -> Self {
        Self {
            router,
            fence: None,
            heard: now,
            phase: Phase::Lacking(None),
            waiting: Waiting::default(),
            asking: Asking {
                outstanding: None,
                failures: 0,
                not_before: now,
            },
            mending: Mending {
                vain: 0,
                not_before: now,
            },
            compared: None,
            divergence: 0,
            is_settled: false,
            echo: Echo::new(now),
        }
    }

    pub(super) const fn is_dead(&self) -> bool {
        matches!(self.phase, Phase::Dead)
    }

    /// Its slots as of now are known, or it has none.
    pub(super) const fn is_known(&self) -> bool {
        match self.phase {
            Phase::Dead => true,
            Phase::Lacking(_) => false,
            Phase::Following(_) => self.is_settled,
        }
    }

    pub(super) const fn fence(&self) -> Option<Generation> {
        self.fence
    }

    pub(super) const fn heard(&self) -> Instant {
        self.heard
    }

    pub(super) const fn compared(&self) -> Option<Compared> {
        self.compared
    }

    pub(super) const fn divergence(&self) -> u64 {
        self.divergence
    }

    /// The number up to which its slots here are its own.
    pub(super) const fn followed(&self) -> Option<Option<RecordNumber>> {
        match &self.phase {
            Phase::Following(sequencer) => Some(sequencer.last()),
            Phase::Dead | Phase::Lacking(_) => None,
        }
    }

    pub(super) fn collected_bytes(&self) -> usize {
        match &self.phase {
            Phase::Lacking(Some(collected)) => collected.bytes,
            Phase::Dead | Phase::Lacking(None) | Phase::Following(_) => 0,
        }
    }

    /// It lives. Also what one grants it: a time in the future.
    pub(super) fn hear(&mut self, at: Instant) {
        self.heard = self.heard.max(at);
    }

    /// The fence. Else the message is of no router that lives.
    fn admits(&self, incarnation: Generation, desk: &Desk<'_>) -> bool {
        let is_old = self.fence.is_some_and(|fence| incarnation < fence);
        !(is_old && desk.rules.keep(Rule::Fence))
    }

    pub(super) fn heartbeat(&mut self, said: &LoadHeartbeat, desk: &mut Desk<'_>) {
        if !self.admits(said.incarnation, desk) {
            desk.counts.verdicts.old += 1;
            return;
        }
        self.hear(desk.now);
        if said.presence == Presence::Leaving {
            desk.counts.goodbyes += 1;
            let next = said.incarnation.next().unwrap_or(said.incarnation);
            self.end(Some(next), desk);
            return;
        }
        if self.is_newer(said.incarnation) {
            self.open(said.incarnation);
        }
        let view = desk.books.digest(self.router);
        self.divergence = view.count.abs_diff(said.digest.count);
        let standing = match &mut self.phase {
            Phase::Following(sequencer) => {
                let had_gap = sequencer.has_gap();
                let standing = sequencer.observe_heartbeat(desk.now, said.incarnation, said.number);
                desk.counts.mended.gaps += u64::from(sequencer.has_gap() && !had_gap);
                standing
            }
            Phase::Lacking(_) => SequenceComparison::Behind,
            Phase::Dead => {
                self.phase = Phase::Lacking(None);
                SequenceComparison::Behind
            }
        };
        if self.followed().is_none() && said.digest == LoadDigest::default() {
            // Nothing is open as of that number: this is the whole state.
            self.is_settled = true;
            self.replace(&[], said.number, desk);
            return;
        }
        if standing == SequenceComparison::Level {
            self.compare(said, view, desk);
        }
    }

    fn compare(&mut self, said: &LoadHeartbeat, view: LoadDigest, desk: &mut Desk<'_>) {
        if !desk.rules.keep(Rule::Digest) {
            return;
        }
        self.is_settled = true;
        self.compared = Some(Compared {
            number: said.number,
            theirs: said.digest,
            ours: view,
        });
        if view == said.digest {
            self.mending.vain = 0;
        } else {
            desk.counts.mended.mismatches += 1;
            self.lack_again(desk.now);
        }
    }

    pub(super) fn message(&mut self, message: LoadMessage, bytes: Received, desk: &mut Desk<'_>) {
        let incarnation = message.incarnation;
        if !self.admits(incarnation, desk) {
            desk.counts.verdicts.old += 1;
            return;
        }
        self.hear(desk.now);
        if self.is_newer(incarnation) {
            self.open(incarnation);
            if message.number == RecordNumber(0) {
                // An incarnation that begins with slots states them as number 0, in no message.
                self.replace(&[], None, desk);
            }
        }
        if self.is_dead() {
            self.phase = Phase::Lacking(None);
        }
        let Phase::Following(sequencer) = &mut self.phase else {
            self.wait(message, bytes, desk);
            return;
        };
        let had_gap = sequencer.has_gap();
        let incarnation = match desk.rules.keep(Rule::Fence) {
            true => incarnation,
            false => sequencer.generation().unwrap_or(incarnation),
        };
        let (number, now) = (message.number, desk.now);
        match sequencer.accept(now, incarnation, number, bytes.hash) {
            SequenceVerdict::Apply | SequenceVerdict::Start => {
                desk.apply(&message);
                self.catch_up(desk);
            }
            SequenceVerdict::Ahead | SequenceVerdict::StartBehind => {
                desk.counts.mended.gaps += u64::from(!had_gap);
                self.wait(message, bytes, desk);
            }
            SequenceVerdict::Duplicate => desk.counts.verdicts.duplicate += 1,
            SequenceVerdict::Violation => {
                desk.counts.verdicts.violation += 1;
                self.lack_again(now);
            }
            SequenceVerdict::Old => desk.counts.verdicts.old += 1,
        }
    }

    /// An answer's part of the state. False if it is of no use.
    pub(super) fn part(&mut self, part: StatePart, len: usize, desk: &mut Desk<'_>) -> bool {
        if !self.admits(part.incarnation, desk) {
            desk.counts.verdicts.old += 1;
            return false;
        }
        self.hear(desk.now);
        if self.is_newer(part.incarnation) {
            self.open(part.incarnation);
        }
        let collected = match &mut self.phase {
            // The messages came after all.
            Phase::Following(sequencer) if !sequencer.has_gap() => return true,
            Phase::Following(_) | Phase::Dead => None,
            Phase::Lacking(collected) => collected.take(),
        };
        let collected = match (collected, part.part) {
            (_, 0) => Collected {
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
                self.phase = Phase::Lacking(None);
                return false;
            }
        };
        if desk.collected_bytes + len > STATE_BYTES_MAX {
            desk.counts.refused.states += 1;
            self.lack_again(desk.now);
            return false;
        }
        if collected.is_whole() {
            self.take_state(collected, desk);
        } else {
            self.phase = Phase::Lacking(Some(collected));
        }
        true
    }

    fn take_state(&mut self, collected: Collected, desk: &mut Desk<'_>) {
        let Collected { first, more, .. } = collected;
        let (number, digest) = (first.number, first.digest);
        let parts: Vec<StatePart> = std::iter::once(first).chain(more).collect();
        desk.books.release(self.router, desk.now);
        for part in &parts {
            desk.books
                .restore(self.router, part.incarnation, &part.slots);
        }
        if desk.books.digest(self.router) == digest {
            desk.counts.mended.by_state += 1;
            self.follow(number, desk);
        } else {
            desk.counts.mended.states_wrong += 1;
            self.lack_again(desk.now);
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
            self.phase = Phase::Lacking(None);
        }
    }

    /// What to ask this router for.
    pub(super) fn want(&self) -> Option<LoadRequestKind> {
        match &self.phase {
            Phase::Dead => None,
            Phase::Lacking(None) => Some(LoadRequestKind::State),
            Phase::Lacking(Some(collected)) => Some(LoadRequestKind::Part {
                number: collected.first.number,
                part: collected.parts(),
            }),
            Phase::Following(sequencer) if sequencer.has_gap() || !self.is_settled => {
                Some(LoadRequestKind::Numbers {
                    from: sequencer.last().map_or(RecordNumber(0), RecordNumber::next),
                    to: self.waiting.before_first(),
                })
            }
            Phase::Following(_) => None,
        }
    }

    /// A question that asks for nothing, for how long it takes. None while there are better ones.
    pub(super) const fn empty_want(&self) -> Option<LoadRequestKind> {
        match &self.phase {
            Phase::Following(sequencer) if !sequencer.has_gap() => match sequencer.last() {
                Some(last) => Some(LoadRequestKind::Numbers {
                    from: last.next(),
                    to: Some(last),
                }),
                None => None,
            },
            Phase::Following(_) | Phase::Lacking(_) | Phase::Dead => None,
        }
    }

    pub(super) fn may_ask(&self, now: Instant) -> bool {
        let mended = match &self.phase {
            Phase::Lacking(None) => self.mending.not_before <= now,
            Phase::Dead | Phase::Lacking(Some(_)) | Phase::Following(_) => true,
        };
        mended && self.asking.outstanding.is_none() && self.asking.not_before <= now
    }

    /// Lets it die of silence.
    pub(super) fn check(&mut self, patience: Duration, desk: &mut Desk<'_>) {
        let silent = desk.now.saturating_duration_since(self.heard);
        if !self.is_dead() && silent >= patience {
            desk.counts.deaths += 1;
            self.end(self.fence, desk);
        }
    }

    fn end(&mut self, fence: Option<Generation>, desk: &mut Desk<'_>) {
        desk.books.release(self.router, desk.now);
        desk.books.delay(self.router, None);
        self.echo = Echo::new(desk.now);
        self.fence = fence;
        self.phase = Phase::Dead;
        self.waiting = Waiting::default();
        self.asking.outstanding = None;
        self.asking.failures = 0;
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
            self.asking.outstanding = None;
            self.asking.failures = 0;
        }
        self.phase = Phase::Lacking(None);
        self.waiting = Waiting::default();
        self.compared = None;
        self.mending.vain = 0;
    }

    /// The view proved wrong.
    fn lack_again(&mut self, now: Instant) {
        let vain = self.mending.vain;
        if vain > 0 {
            self.mending.not_before = now + pause(MEND_PAUSE, vain);
        }
        self.mending.vain = vain.saturating_add(1);
        self.phase = Phase::Lacking(None);
    }

    /// The state as of this number is known.
    fn replace(&mut self, parts: &[StatePart], number: Option<RecordNumber>, desk: &mut Desk<'_>) {
        desk.books.release(self.router, desk.now);
        for part in parts {
            desk.books
                .restore(self.router, part.incarnation, &part.slots);
        }
        self.follow(number, desk);
    }

    fn follow(&mut self, number: Option<RecordNumber>, desk: &mut Desk<'_>) {
        let Some(fence) = self.fence else {
            return;
        };
        self.phase = Phase::Following(Sequencer::restored(ASK_TIMEOUT, fence, number));
        self.catch_up(desk);
    }

    /// Applies what waited for its turn.
    fn catch_up(&mut self, desk: &mut Desk<'_>) {
        let Phase::Following(sequencer) = &mut self.phase else {
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
            let (now, incarnation) = (desk.now, message.incarnation);
            if sequencer.accept(now, incarnation, next, bytes.hash) != SequenceVerdict::Apply {
                break;
            }
            desk.apply(&message);
        }
        if let (Some(fence), Some(last)) = (self.fence, self.waiting.last()) {
            sequencer.observe_heartbeat(desk.now, fence, Some(last));
        }
    }

    fn wait(&mut self, message: LoadMessage, bytes: Received, desk: &mut Desk<'_>) {
        desk.counts.verdicts.ahead += 1;
        if !self.waiting.put(message, bytes) {
            desk.counts.refused.waiting += 1;
        }
    }
}

impl Desk<'_> {
    fn apply(&mut self, message: &LoadMessage) {
        self.counts.verdicts.applied += 1;
        self.books.apply(message, self.now);
    }
}

impl Collected {
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

impl Waiting {
    /// False if there is no room. What came first stays: it is what can be applied first.
    fn put(&mut self, message: LoadMessage, bytes: Received) -> bool {
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

    fn take(&mut self, number: RecordNumber) -> Option<(LoadMessage, Received)> {
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

impl Asking {
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
