//! Everything that one router knows, behind one set of calls: the shell holds it behind one mutex.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;
use serde::Serialize;
use warmroute_proto::load::{LoadChange, LoadDigest, LoadMessage, OpenSlot, SlotEnd};
use warmroute_proto::query::IndexAnswer;
use warmroute_proto::registry::{DrainState, WorkerEntry};
use warmroute_proto::{Generation, RouterId, Source, WorkerId};

use super::audit::{AuditCounts, AuditVerdict, CreditAudit, Recheck, RecheckVerdict};
use super::candidates::{Health, RouteRefusal, ServedModel, WorkerDirectory};
use super::choice::Policy;
use super::cost::{Knobs, overlap_blocks};
use super::decide::{Decision, DecisionBasis, Grounds, Question, decide};
use super::index_view::{IndexView, IndexViewCounts, TrustedAnswer};
use super::ledger::{Ledger, LedgerError};
use super::moves::{MoveCounts, MoveTracker};
use super::prediction::Predictions;
use super::prompt::Prompt;
use super::slot_guard::SlotEvent;
use super::slots::{ActiveLoad, Applied, IgnoredChanges, RouterLoad, STEP, Slots, SourceLoad};
use super::slowness::SlownessTracker;
use super::source_table::{SourceId, SourceTable};
use super::stall::StallDetector;
use super::ttft::TtftModel;

mod reconsider;

pub struct CoreConfig {
    /// Checked: see [`Knobs::checked`].
    pub knobs: Knobs,
    pub router: RouterId,
    /// This router's life, above every earlier one's.
    pub incarnation: Generation,
    /// For ties and temperature.
    pub seed: u64,
}

/// A request that wants a source.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    /// A base model or an adapter.
    pub model: &'a str,
    pub prompt: &'a Prompt,
    /// Sources that were tried for this request.
    pub exclude: &'a [Source],
}

/// A request that has a source and a slot there.
#[derive(Debug)]
pub struct Admitted {
    pub decision: Decision,
    /// The slot's counter, for its guard.
    pub slot: u64,
    /// The bytes of its `AddRequest`, to be broadcast; applied here already.
    pub message: Bytes,
    /// Until then another router's earlier choice may show that this one was blind: see
    /// [`Core::take_crossed`].
    pub movable_until: Option<Instant>,
}

#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    #[error(transparent)]
    Refused(#[from] RouteRefusal),
    #[error("the slot cannot be accounted: {0}")]
    Ledger(#[from] LedgerError),
}

/// What happened so far, for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct CoreCounts {
    pub bases: BasisCounts,
    pub ignored: IgnoredChanges,
    pub view: IndexViewCounts,
    pub audit: AuditCounts,
    pub stalls: u64,
    pub predictions_dropped: u64,
    pub predicted_samples: u64,
    /// Open slots of all routers.
    pub open_slots: usize,
    /// Slots that this router opened, one for each attempt.
    pub opened: u64,
    pub freed: FreedCounts,
    pub moves: MoveCounts,
}

/// Slots that this router freed, each once, by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FreedCounts {
    pub completed: u64,
    pub failed: u64,
    pub aborted: u64,
}

/// Decisions by what they rested on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BasisCounts {
    pub index: u64,
    pub prediction: u64,
    pub load_only: u64,
}

/// A prefill under way, for learning how long it takes.
struct PendingPrefill {
    source: SourceId,
    at: Instant,
    tokens_ahead: u64,
    /// What the median of those that could have taken it would have needed.
    typical: Duration,
}

/// A slot that is about to be opened.
struct SlotOpening {
    slot: u64,
    /// At its source, its own included.
    tokens_ahead: u64,
}

pub struct Core {
    knobs: Knobs,
    rng: Rng,
    table: SourceTable,
    fleet: WorkerDirectory,
    ledger: Ledger,
    slots: Slots,
    predictions: Predictions,
    view: IndexView,
    audit: CreditAudit,
    stalls: StallDetector,
    ttft: TtftModel,
    slowness_tracker: SlownessTracker,
    /// This router's requests without a first token.
    sent: BTreeMap<u64, PendingPrefill>,
    /// This router's slots that changed since a cut was begun.
    touched: Option<BTreeSet<u64>>,
    moves: MoveTracker,
    bases: BasisCounts,
    opened: u64,
    freed: FreedCounts,
    turn: u64,
}

/// This router's open slots on their way out of the core: see [`Core::snapshot_step`].
#[derive(Debug)]
pub struct SlotSnapshotBuilder {
    slots: BTreeMap<u64, OpenSlot>,
    /// The first counter that was not looked at; none: all were.
    next: Option<u64>,
}

impl Default for SlotSnapshotBuilder {
    fn default() -> Self {
        Self {
            slots: BTreeMap::new(),
            next: Some(0),
        }
    }
}

impl SlotSnapshotBuilder {
    /// In the order of their counters.
    #[must_use]
    pub fn into_slots(self) -> Vec<OpenSlot> {
        self.slots.into_values().collect()
    }
}

impl Core {
    #[must_use]
    pub fn new(settings: CoreConfig) -> Self {
        let CoreConfig {
            knobs,
            router,
            incarnation,
            seed,
        } = settings;
        Self {
            knobs,
            rng: Rng::with_seed(seed),
            table: SourceTable::default(),
            fleet: WorkerDirectory::default(),
            ledger: Ledger::new(router, incarnation),
            slots: Slots::default(),
            predictions: Predictions::default(),
            view: IndexView::default(),
            audit: CreditAudit::default(),
            stalls: StallDetector::default(),
            ttft: TtftModel::default(),
            slowness_tracker: SlownessTracker::default(),
            sent: BTreeMap::new(),
            touched: None,
            moves: MoveTracker::default(),
            bases: BasisCounts::default(),
            opened: 0,
            freed: FreedCounts::default(),
            turn: 0,
        }
    }

    /// The registry's content, at every change of it.
    pub fn set_workers(&mut self, entries: &[WorkerEntry]) {
        self.fleet.set_workers(&mut self.table, entries);
    }

    /// Says whether that is news.
    pub fn set_health(&mut self, worker: &WorkerId, health: Health) -> bool {
        self.fleet.set_health(&mut self.table, worker, health)
    }

    /// Says whether that is news.
    pub fn set_drain(&mut self, worker: &WorkerId, drain: DrainState) -> bool {
        self.fleet.set_drain(&mut self.table, worker, drain)
    }

    /// Workers, models and their marks.
    #[must_use]
    pub const fn fleet(&self) -> &WorkerDirectory {
        &self.fleet
    }

    pub fn model(&self, name: &str) -> Result<&ServedModel, RouteRefusal> {
        self.fleet.model(name)
    }

    /// Decides and accounts in one step, so that the next decision sees this one. `answer`: none if
    /// it came too late.
    pub fn admit(
        &mut self,
        ask: &RouteRequest<'_>,
        answer: Option<&IndexAnswer>,
        now: Instant,
    ) -> Result<Admitted, AdmitError> {
        self.tick(now);
        let (decision, trusted) = self.decide(ask, answer, now)?;
        self.turn = self.turn.wrapping_add(1);
        match decision.basis() {
            DecisionBasis::Index => self.bases.index += 1,
            DecisionBasis::Prediction => self.bases.prediction += 1,
            DecisionBasis::LoadOnly => self.bases.load_only += 1,
        }
        // After the decision: it made the same walks, and takes only what goes beyond the credit.
        for terms in &decision.weighed {
            self.end_counted(terms.source, ask.prompt, terms.expected_blocks, &trusted);
        }
        let mut admitted = self.open(ask.prompt, decision, now)?;
        // A retry has had its share of ways, and only costs can be compared.
        if ask.exclude.is_empty() && self.knobs.policy == Policy::Kv {
            let source = admitted.decision.claim.source;
            admitted.movable_until = self.moves.sent(admitted.slot, source, now);
        }
        Ok(admitted)
    }

    fn decide(
        &mut self,
        ask: &RouteRequest<'_>,
        answer: Option<&IndexAnswer>,
        now: Instant,
    ) -> Result<(Decision, TrustedAnswer), RouteRefusal> {
        let trusted = match answer {
            Some(answer) => self.take_in(answer, now),
            None => TrustedAnswer::default(),
        };
        let question = Question {
            prompt: ask.prompt,
            candidates: self.fleet.candidates(ask.model)?,
            exclude: ask.exclude,
            turn: self.turn,
        };
        let grounds = Grounds {
            trusted: &trusted,
            slots: &self.slots,
            predictions: &self.predictions,
            stalls: &self.stalls,
            ttft: &self.ttft,
            slowness_tracker: &self.slowness_tracker,
            knobs: &self.knobs,
        };
        let decision = decide(&question, &grounds, &mut self.rng, now)?;
        Ok((decision, trusted))
    }

    /// What happened to an open slot of this router. The bytes are to be broadcast.
    pub fn note(&mut self, event: SlotEvent, now: Instant) -> Result<Bytes, LedgerError> {
        let change = match event {
            SlotEvent::FirstToken { counter } => {
                self.moves.settle(counter);
                if let Some(sent) = self.sent.remove(&counter) {
                    let elapsed = now.saturating_duration_since(sent.at);
                    self.slowness_tracker
                        .learn(sent.source, sent.typical, elapsed, now);
                    self.ttft.learn(sent.source, sent.tokens_ahead, elapsed);
                }
                self.stalls.first_token(counter);
                LoadChange::MarkPrefillCompleted { counter }
            }
            SlotEvent::PrefillPredicted { counter } => {
                self.moves.settle(counter);
                self.sent.remove(&counter);
                self.stalls.ended(counter);
                LoadChange::MarkPrefillCompleted { counter }
            }
            SlotEvent::Grow { counter, blocks } => LoadChange::Grow { counter, blocks },
            SlotEvent::End { counter, end } => {
                self.moves.settle(counter);
                let sent = self.sent.remove(&counter);
                // A whole answer in one piece took longer than its first token.
                if let Some(sent) = sent.filter(|_| end != SlotEnd::Completed) {
                    let elapsed = now.saturating_duration_since(sent.at);
                    self.slowness_tracker
                        .gave_up(sent.source, sent.typical, elapsed, now);
                }
                self.stalls.ended(counter);
                LoadChange::Free { counter, end }
            }
        };
        self.record(change, now)
    }

    /// Another router's message that the sequencing rule lets through.
    pub fn apply_remote(&mut self, message: &LoadMessage, now: Instant) {
        self.apply(message, now);
    }

    /// Another router is dead: its slots are free.
    pub fn release(&mut self, router: RouterId, now: Instant) {
        while self.release_step(router, now) {}
    }

    /// The same, a part of it, for whoever must not be kept waiting. True: there is more to do. From the
    /// first step on its requests count no more.
    pub fn release_step(&mut self, router: RouterId, now: Instant) -> bool {
        let slots_left = self.slots.release_step(router);
        let predictions_left = self.predictions.release_step(router, STEP, now);
        slots_left || predictions_left
    }

    /// Takes in a part of what another router states as its open slots, after all that it had was
    /// released.
    pub fn restore(&mut self, router: RouterId, incarnation: Generation, slots: &[OpenSlot]) {
        for slot in slots {
            let restored = self
                .slots
                .restore(&mut self.table, router, incarnation, slot);
            if let Applied::Added(source) = restored {
                self.predictions
                    .sent(router, slot.counter, source, &slot.prompt);
            }
        }
    }

    /// A router that is dead for long need not be remembered any more.
    pub fn forget(&mut self, router: RouterId, now: Instant) {
        self.release(router, now);
        self.slots.forget(router);
        self.moves.set_delay(router, None);
    }

    /// This router goes on under another incarnation, above its last one, with all its open slots.
    pub fn begin(&mut self, incarnation: Generation) {
        let router = self.ledger.router();
        let open = self.slots.digest(router).count;
        self.slots.renew(router, incarnation);
        self.ledger.begin(incarnation, open);
    }

    /// What this router wrote.
    #[must_use]
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// This router's open slots, for a peer that lacks them.
    #[must_use]
    pub fn stated(&self) -> Vec<OpenSlot> {
        self.slots.stated(&self.table, self.ledger.router())
    }

    /// A part of the same, for whoever must not be kept waiting: to be called with the same cut until it
    /// is whole. What changes between two calls is looked at again, so that in the end all slots are of
    /// one moment, that of the call which says true. One cut at a time: a new one ends the one before.
    pub fn snapshot_step(&mut self, cut: &mut SlotSnapshotBuilder) -> bool {
        let router = self.ledger.router();
        let Some(from) = cut.next else {
            return self.mend_cut(cut, router);
        };
        if from == 0 {
            self.touched = Some(BTreeSet::new());
        }
        let stated = self.slots.open_slots_from(&self.table, router, from, STEP);
        cut.next = stated.last().map(|slot| slot.counter + 1);
        cut.slots
            .extend(stated.into_iter().map(|slot| (slot.counter, slot)));
        false
    }

    fn mend_cut(&mut self, cut: &mut SlotSnapshotBuilder, router: RouterId) -> bool {
        for _ in 0..STEP {
            let Some(counter) = self.touched.as_mut().and_then(BTreeSet::pop_first) else {
                self.touched = None;
                return true;
            };
            match self.slots.open_slot(&self.table, router, counter) {
                Some(slot) => cut.slots.insert(counter, slot),
                None => cut.slots.remove(&counter),
            };
        }
        false
    }

    /// What one router has on each source.
    #[must_use]
    pub fn loads_of(&self, router: RouterId) -> Vec<RouterLoad> {
        self.slots.loads_of(&self.table, router)
    }

    /// A router's open slots in one number.
    #[must_use]
    pub fn digest(&self, router: RouterId) -> LoadDigest {
        self.slots.digest(router)
    }

    /// The engine reported how many of the prompt's tokens it found cached.
    pub fn audit(&mut self, decision: &Decision, cached_tokens: u32, now: Instant) -> AuditVerdict {
        self.audit.compare(&decision.claim, cached_tokens, now)
    }

    /// The index's new answer about the same prompt, asked at the recheck's time or later. A source
    /// that is demoted is `stale` from here on until its next generation: worth an error in the log.
    pub fn recheck(
        &mut self,
        recheck: &Recheck,
        prompt: &Prompt,
        answer: &IndexAnswer,
        now: Instant,
    ) -> RecheckVerdict {
        let trusted = self.take_in(answer, now);
        let source = recheck.claim.source;
        let expected_blocks = self.predictions.predicted(source, prompt.sampled());
        self.end_counted(source, prompt, expected_blocks, &trusted);
        let known = trusted.of(source);
        let verdict = self.audit.recheck(recheck, known, now);
        if let (RecheckVerdict::Demote, Some(known)) = (verdict, known) {
            self.view.demote(source, known.generation);
        }
        verdict
    }

    /// Lets time pass: to be called a few times a second, also when nothing else happens.
    pub fn tick(&mut self, now: Instant) {
        self.predictions.expire(now);
        self.stalls.advance(now);
    }

    /// `/v1/slots`: every registered source, and every other that still bears something.
    #[must_use]
    pub fn loads(&self) -> Vec<SourceLoad> {
        let rows = self.table.in_order().into_iter();
        rows.filter(|(source, id)| self.fleet.contains(&source.worker) || !self.slots.is_idle(*id))
            .map(|(source, id)| {
                let load = self.slots.load(id);
                SourceLoad {
                    worker: source.worker.clone(),
                    dp_rank: source.dp_rank,
                    active_requests: load.map_or(0, ActiveLoad::active_requests),
                    prefill_tokens: load.map_or(0, ActiveLoad::prefill_tokens),
                    decode_blocks: load.map_or(0, ActiveLoad::decode_blocks),
                }
            })
            .collect()
    }

    /// Is this source left out because it gives no first tokens?
    #[must_use]
    pub fn is_stalled(&self, source: &Source, now: Instant) -> bool {
        let id = self.table.id(source);
        id.is_some_and(|id| self.stalls.is_stalled(id, now))
    }

    /// How late this source's first tokens are: observed over predicted. None: not enough is known.
    #[must_use]
    pub fn ttft_ratio(&self, source: &Source, now: Instant) -> Option<f64> {
        let id = self.table.id(source)?;
        self.slowness_tracker.ratio(id, now)
    }

    /// The name of a source in a decision's terms.
    #[must_use]
    pub fn source(&self, id: SourceId) -> Option<&Source> {
        self.table.source(id)
    }

    /// The names of so many.
    #[must_use]
    pub fn sources(&self, ids: &BTreeSet<SourceId>) -> BTreeMap<SourceId, Source> {
        let named = |&id| Some((id, self.source(id)?.clone()));
        ids.iter().filter_map(named).collect()
    }

    #[must_use]
    pub fn counts(&self) -> CoreCounts {
        CoreCounts {
            bases: self.bases,
            ignored: self.slots.ignored(),
            view: self.view.counts(),
            audit: self.audit.counts(),
            stalls: self.stalls.count(),
            predictions_dropped: self.predictions.dropped(),
            predicted_samples: self.predictions.samples(),
            open_slots: self.slots.open(),
            opened: self.opened,
            freed: self.freed,
            moves: self.moves.counts,
        }
    }

    /// Believes an answer as far as it deserves.
    fn take_in(&mut self, answer: &IndexAnswer, now: Instant) -> TrustedAnswer {
        let trusted = self.view.judge(&mut self.table, answer, now);
        for &source in &trusted.restarted {
            self.predictions.restarted(source);
            self.slowness_tracker.restarted(source);
        }
        trusted
    }

    /// Ends what is expected of a prompt at a source, if the index counts all of it already: what is
    /// shorter than the rest stays hidden behind it. Uncapped: a prompt's last whole block is held,
    /// though it is never credited.
    fn end_counted(
        &mut self,
        source: SourceId,
        prompt: &Prompt,
        expected_blocks: u32,
        trusted: &TrustedAnswer,
    ) {
        let held = trusted
            .of(source)
            .map_or(0, |known| overlap_blocks(known.run));
        if expected_blocks > 0 && held >= expected_blocks {
            self.predictions.counted(source, prompt.sampled(), held);
        }
    }

    fn open(
        &mut self,
        prompt: &Prompt,
        decision: Decision,
        now: Instant,
    ) -> Result<Admitted, LedgerError> {
        let (opening, change) = self.opening(prompt, &decision);
        let message = self.record(change, now)?;
        Ok(self.opened(opening, decision, message, now))
    }

    fn opening(&mut self, prompt: &Prompt, decision: &Decision) -> (SlotOpening, LoadChange) {
        let load = self.slots.load(decision.claim.source);
        let ahead = load.map_or(0, ActiveLoad::prefill_tokens);
        let slot = self.ledger.counter();
        let change = Ledger::opening(
            slot,
            &decision.source,
            decision.prefill_tokens,
            prompt.blocks_taken(),
            prompt.sampled(),
        );
        let opening = SlotOpening {
            slot,
            tokens_ahead: ahead + u64::from(decision.prefill_tokens),
        };
        (opening, change)
    }

    /// The opening was written down.
    fn opened(
        &mut self,
        opening: SlotOpening,
        decision: Decision,
        message: Bytes,
        now: Instant,
    ) -> Admitted {
        let (slot, source) = (opening.slot, decision.claim.source);
        self.stalls.sent(slot, source, decision.predicted_ttft, now);
        let weighed = decision.weighed.iter().map(|terms| terms.source);
        let sent = PendingPrefill {
            source,
            at: now,
            tokens_ahead: opening.tokens_ahead,
            typical: self.ttft.typical(weighed, opening.tokens_ahead),
        };
        self.sent.insert(slot, sent);
        Admitted {
            decision,
            slot,
            message,
            movable_until: None,
        }
    }

    fn record(&mut self, change: LoadChange, now: Instant) -> Result<Bytes, LedgerError> {
        let entry = self.ledger.write(change)?;
        self.apply(&entry.message, now);
        Ok(entry.bytes)
    }

    fn apply(&mut self, message: &LoadMessage, now: Instant) {
        let (router, incarnation) = (message.router, message.incarnation);
        for change in &message.changes {
            let applied = self
                .slots
                .apply(&mut self.table, router, incarnation, change);
            if router == self.ledger.router() {
                self.account(applied, slot_of(change));
            }
            match (applied, change) {
                (
                    Applied::Added(source),
                    LoadChange::AddRequest {
                        counter, prompt, ..
                    },
                ) => {
                    self.predictions.sent(router, *counter, source, prompt);
                    let own = self.ledger.router();
                    if router != own {
                        self.moves.heard(own, router, source, now);
                    }
                }
                (Applied::Freed(..), LoadChange::Free { counter, end }) => {
                    self.predictions.ended(router, *counter, *end, now);
                }
                _ => {}
            }
        }
    }

    /// What became of a slot of this router's own.
    fn account(&mut self, applied: Applied, counter: u64) {
        if let Some(touched) = &mut self.touched {
            touched.insert(counter);
        }
        match applied {
            Applied::Added(_) => self.opened += 1,
            Applied::Freed(_, SlotEnd::Completed) => self.freed.completed += 1,
            Applied::Freed(_, SlotEnd::Failed) => self.freed.failed += 1,
            Applied::Freed(_, SlotEnd::Aborted) => self.freed.aborted += 1,
            Applied::PrefillCompleted(_) | Applied::Grown(_) | Applied::Nothing => {}
        }
    }
}

/// The counter of the slot that a change is about.
const fn slot_of(change: &LoadChange) -> u64 {
    match change {
        LoadChange::AddRequest { counter, .. }
        | LoadChange::MarkPrefillCompleted { counter }
        | LoadChange::Grow { counter, .. }
        | LoadChange::Free { counter, .. } => *counter,
    }
}

#[cfg(test)]
mod tests;
