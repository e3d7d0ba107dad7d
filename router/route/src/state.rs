//! The routing core: all state of one router behind one set of calls.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;
use serde::Serialize;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::load::{LoadChange, LoadDigest, LoadMessage, OpenSlot, SlotEnd};
use warmroute_proto::query::{HoldAnswer, HoldQuery, SourceState};
use warmroute_proto::registry::{DemotedSource, DrainState, WorkerEntry};
use warmroute_proto::{Generation, RouterId, Source, WorkerId};

use super::audit::{
    AuditCounts, AuditVerdict, ClaimStanding, CreditAudit, Recheck, RecheckVerdict,
};
use super::candidates::{Candidate, Health, Leg, RouteRefusal, ServedModel, WorkerDirectory};
use super::choice::Policy;
use super::cost::Knobs;
use super::decide::{Decision, DecisionInput, decide};
use super::engine_load::EngineLoads;
use super::evidence::{CreditEvidence, EvidenceCounts};
use super::expectations::Expectations;
use super::index_view::{IndexView, IndexViewCounts, TrustedAnswer};
use super::ledger::{Ledger, LedgerError};
use super::moves::{MoveCounts, MoveTracker};
use super::prefix_table::CacheReport;
use super::prompt::{CacheReads, Prompt, PromptBasis};
use super::replica_roster::IndexReply;
use super::slot_guard::SlotEvent;
use super::slots::{Applied, IgnoredChanges, RouterLoad, STEP_SLOTS, SlotKey, Slots, SourceLoad};
use super::slowness::SlownessTracker;
use super::source_table::{SourceId, SourceTable};
use super::speed::{AcceptedPrefill, SourceSpeed, SpeedTracker};
use super::stall::StallDetector;
use super::traffic::{BasisCounts, Traffic};

mod cache_reports;
mod doubts;
mod engines;
mod figures;
mod judgement;
mod pairing;
mod reconsider;

pub use doubts::{DoubtEvent, DoubtedScope};
pub use figures::SourceFigures;

#[derive(Clone, Debug)]
pub struct CoreConfig {
    pub knobs: Knobs,
    pub router: RouterId,
    /// Above every earlier incarnation of this router.
    pub incarnation: Generation,
    /// For ties and temperature.
    pub seed: u64,
}

/// A request to be routed.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    /// A base model or an adapter.
    pub model: &'a str,
    pub prompt: &'a Prompt,
    /// Sources that were tried for this request.
    pub exclude: &'a [Source],
    pub leg: Leg,
}

/// A request with a source and an open slot.
#[derive(Debug)]
pub struct Admitted {
    pub decision: Decision,
    /// The slot's counter, for its guard.
    pub slot: u64,
    /// The encoded `AddRequest` for the peers. Applied here already.
    pub message: Bytes,
    /// Deadline for moving the request to another source ([`Core::take_crossed`]).
    pub movable_until: Option<Instant>,
}

#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    #[error(transparent)]
    Refused(#[from] RouteRefusal),
    #[error("the slot cannot be accounted: {0}")]
    Ledger(#[from] LedgerError),
}

/// Counters since the start, for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct CoreCounts {
    pub bases: BasisCounts,
    pub ignored: IgnoredChanges,
    /// Totals of load that would have gone below zero.
    pub slot_underflows: u64,
    pub view: IndexViewCounts,
    pub audit: AuditCounts,
    pub evidence: EvidenceCounts,
    pub stalls: u64,
    pub predictions_dropped: u64,
    pub predicted_samples: u64,
    /// Number of prefixes that engines reported, where the index is not complete.
    pub reported_prefixes: usize,
    /// Number of prompts kept that were sent where the index says nothing.
    pub sent_prompts: usize,
    /// Number of open slots of all routers.
    pub open_slots: usize,
    /// Slots that this router opened: one for each attempt.
    pub opened: u64,
    pub freed: FreedCounts,
    pub moves: MoveCounts,
}

/// Slots that this router freed, by end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FreedCounts {
    pub completed: u64,
    pub failed: u64,
    pub aborted: u64,
}

/// A request of this router without a first token.
struct PendingPrefill {
    source: SourceId,
    sent: Instant,
    /// Time that the median of all candidates would need.
    typical: Duration,
}

pub struct Core {
    knobs: Knobs,
    rng: Rng,
    table: SourceTable,
    fleet: WorkerDirectory,
    ledger: Ledger,
    slots: Slots,
    expected: Expectations,
    view: IndexView,
    audit: CreditAudit,
    doubts: doubts::DoubtLog,
    stalls: StallDetector,
    engines: EngineLoads,
    speed: SpeedTracker,
    slowness: SlownessTracker,
    /// By slot counter.
    pending: BTreeMap<u64, PendingPrefill>,
    /// Own slots that changed since a snapshot was begun.
    touched: Option<BTreeSet<u64>>,
    moves: MoveTracker,
    traffic: Traffic,
    tally: SlotTally,
    turn: u64,
}

#[derive(Debug, Default)]
struct SlotTally {
    opened: u64,
    freed: FreedCounts,
}

/// A snapshot of this router's open slots that is taken in steps ([`Core::snapshot_step`]).
#[derive(Debug)]
pub struct SlotSnapshotBuilder {
    slots: BTreeMap<u64, OpenSlot>,
    /// The first counter that was not read; `None` once all were.
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
    /// The slots in the order of their counters.
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
            expected: Expectations::default(),
            view: IndexView::default(),
            audit: CreditAudit::default(),
            doubts: doubts::DoubtLog::default(),
            stalls: StallDetector::default(),
            engines: EngineLoads::default(),
            speed: SpeedTracker::default(),
            slowness: SlownessTracker::default(),
            pending: BTreeMap::new(),
            touched: None,
            moves: MoveTracker::default(),
            traffic: Traffic::default(),
            tally: SlotTally::default(),
            turn: 0,
        }
    }

    /// Replaces the registered workers.
    pub fn set_workers(&mut self, entries: &[WorkerEntry]) {
        self.fleet.set_workers(&mut self.table, entries);
        for entry in entries {
            for id in self.table.of_worker(&entry.worker) {
                self.expected.sent.set_capacity(id, entry.blocks_per_rank);
            }
        }
    }

    /// Returns whether this changed something.
    pub fn set_health(&mut self, worker: &WorkerId, health: Health) -> bool {
        let is_changed = self.fleet.set_health(&mut self.table, worker, health);
        if is_changed && health != Health::Healthy {
            // Its engine may be another one when it is back.
            for id in self.table.of_worker(worker) {
                self.expected.distrust(id);
            }
        }
        is_changed
    }

    /// Returns whether this changed something.
    pub fn set_drain(&mut self, worker: &WorkerId, drain: DrainState) -> bool {
        self.fleet.set_drain(&mut self.table, worker, drain)
    }

    #[must_use]
    pub const fn fleet(&self) -> &WorkerDirectory {
        &self.fleet
    }

    pub fn model(&self, name: &str) -> Result<&ServedModel, RouteRefusal> {
        self.fleet.model(name)
    }

    /// Decides and opens the slot in one step, so that the next decision counts this request.
    /// Without an answer of the index (`None`) it decides by predictions and load.
    pub fn admit(
        &mut self,
        request: &RouteRequest<'_>,
        answer: Option<&IndexReply>,
        now: Instant,
    ) -> Result<Admitted, AdmitError> {
        self.tick(now);
        let (decision, trusted) = self.decide(request, answer, None, now)?;
        self.turn = self.turn.wrapping_add(1);
        self.traffic.decided(request.prompt, &decision);
        self.account_compared(request.prompt, &decision.compared, &trusted, now);
        let mut admitted = self.open(request, decision, None, now)?;
        // Retries are not moved, and only policies with costs can compare. Transferred blocks can be
        // taken over once.
        let is_comparable = self.knobs.policy.is_timed() || self.knobs.policy == Policy::Kv;
        if request.exclude.is_empty() && is_comparable && request.leg != Leg::Decode {
            let source = admitted.decision.claim.source;
            admitted.movable_until = self.moves.sent(admitted.slot, source, now);
        }
        Ok(admitted)
    }

    fn decide(
        &mut self,
        request: &RouteRequest<'_>,
        answer: Option<&IndexReply>,
        except: Option<SlotKey>,
        now: Instant,
    ) -> Result<(Decision, TrustedAnswer), RouteRefusal> {
        let mut trusted = match answer.filter(|_| self.knobs.policy.reads_index()) {
            Some(IndexReply::Cuts(cuts)) => self.judge_cuts(request, cuts, now)?,
            Some(answer) => self.judge(answer, now),
            None => TrustedAnswer::default(),
        };
        let form = request.prompt.form().map(AsRef::as_ref);
        self.doubts.evidence.weaken(form, &mut trusted);
        let input = DecisionInput {
            prompt: request.prompt,
            candidates: self.fleet.candidates(request.model, request.leg)?,
            leg: request.leg,
            exclude: request.exclude,
            except,
            turn: self.turn,
            trusted: &trusted,
            slots: &self.slots,
            expected: &self.expected,
            stalls: &self.stalls,
            engines: &self.engines,
            speed: &self.speed,
            slowness: &self.slowness,
            knobs: &self.knobs,
            now,
        };
        let decision = decide(&input, &mut self.rng)?;
        Ok((decision, trusted))
    }

    /// Records an event of an open slot of this router. Returns the message for the peers.
    pub fn note(&mut self, event: SlotEvent, now: Instant) -> Result<Bytes, LedgerError> {
        let changes = match event {
            SlotEvent::FirstToken { counter } => {
                self.moves.settle(counter);
                let is_measurable = self.stalls.is_measurable(counter);
                if let Some(sent) = self.pending.remove(&counter) {
                    let elapsed = now.saturating_duration_since(sent.sent);
                    if is_measurable {
                        self.slowness.learn(sent.source, sent.typical, elapsed, now);
                    }
                    self.traffic.first_token(sent.source, elapsed, now);
                }
                self.speed.transfers.arrived(counter, now);
                self.answered(counter, now);
                let unmeasured = LoadChange::Grow { counter, blocks: 0 };
                let completed = LoadChange::MarkPrefillCompleted { counter };
                match is_measurable {
                    true => vec![completed],
                    false => vec![unmeasured, completed],
                }
            }
            SlotEvent::PrefillPredicted { counter } => {
                self.moves.settle(counter);
                self.pending.remove(&counter);
                self.stalls.not_streamed(counter, now);
                let unmeasured = LoadChange::Grow { counter, blocks: 0 };
                vec![unmeasured, LoadChange::MarkPrefillCompleted { counter }]
            }
            SlotEvent::Grow { counter, blocks } => vec![LoadChange::Grow { counter, blocks }],
            SlotEvent::End { counter, end } => {
                self.moves.settle(counter);
                self.speed.transfers.ended(counter);
                let sent = self.pending.remove(&counter);
                // A complete answer without a first token is no measurement of the first token, and a
                // failure is none of the speed.
                if let Some(sent) = sent.filter(|_| end == SlotEnd::Aborted) {
                    let elapsed = now.saturating_duration_since(sent.sent);
                    self.slowness
                        .gave_up(sent.source, sent.typical, elapsed, now);
                }
                match end {
                    SlotEnd::Completed => self.answered(counter, now),
                    SlotEnd::Failed | SlotEnd::Aborted => self.stalls.ended(counter),
                }
                vec![LoadChange::Free { counter, end }]
            }
        };
        let entry = self.ledger.write_all(changes)?;
        self.apply(&entry.message, now);
        Ok(entry.bytes)
    }

    /// The source of a waiting request made progress.
    fn answered(&mut self, counter: u64, now: Instant) {
        let source = self.stalls.source_of(counter);
        let ends_stall = self.stalls.answered(counter, now);
        if let Some(source) = source.filter(|_| ends_stall) {
            // What clients did not wait for was no speed.
            self.slowness.restarted(source);
        }
    }

    /// Applies a message of another router, in its order.
    pub fn apply_remote(&mut self, message: &LoadMessage, now: Instant) {
        self.apply(message, now);
    }

    /// Frees all slots of another router.
    pub fn release(&mut self, router: RouterId, now: Instant) {
        while self.release_step(router, now) {}
    }

    /// Like `release`, but does one bounded step. Returns true while work remains. The first step
    /// takes the router's requests out of all counts.
    pub fn release_step(&mut self, router: RouterId, now: Instant) -> bool {
        let slots_left = self.slots.release_step(router);
        let predictions_left = self
            .expected
            .predictions
            .release_step(router, STEP_SLOTS, now);
        let times_left = self.speed.release_step(router, STEP_SLOTS);
        slots_left || predictions_left || times_left
    }

    /// Opens slots that another router reports as open. All of its earlier slots must be released.
    pub fn restore(&mut self, router: RouterId, incarnation: Generation, slots: &[OpenSlot]) {
        for slot in slots {
            let restored = self
                .slots
                .restore(&mut self.table, router, incarnation, slot);
            if let Applied::Added(source) = restored {
                self.expected
                    .predictions
                    .sent(router, slot.counter, source, &slot.prompt);
            }
        }
    }

    /// Forgets a router that is dead, its fence included.
    pub fn forget(&mut self, router: RouterId, now: Instant) {
        self.release(router, now);
        self.slots.forget(router);
        self.moves.set_delay(router, None);
    }

    /// Continues under a higher incarnation with all open slots.
    pub fn begin(&mut self, incarnation: Generation) {
        let router = self.ledger.router();
        let open = self.slots.digest(router).count;
        self.slots.renew(router, incarnation);
        self.ledger.begin(incarnation, open);
    }

    /// Messages of this router.
    #[must_use]
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// All open slots of this router.
    #[must_use]
    pub fn own_slots(&self) -> Vec<OpenSlot> {
        let router = self.ledger.router();
        self.slots
            .open_slots_from(&self.table, router, 0, usize::MAX)
    }

    /// Does one bounded step of a snapshot of this router's open slots. Returns true when it is
    /// complete: then all slots are as of this call. A new builder ends the snapshot before.
    ///
    /// Slots that change between two steps are read again at the end.
    pub fn snapshot_step(&mut self, snapshot: &mut SlotSnapshotBuilder) -> bool {
        let router = self.ledger.router();
        let Some(from) = snapshot.next else {
            return self.refresh_snapshot(snapshot, router);
        };
        if from == 0 {
            self.touched = Some(BTreeSet::new());
        }
        let read = self
            .slots
            .open_slots_from(&self.table, router, from, STEP_SLOTS);
        snapshot.next = read.last().map(|slot| slot.counter + 1);
        let read = read.into_iter().map(|slot| (slot.counter, slot));
        snapshot.slots.extend(read);
        false
    }

    fn refresh_snapshot(&mut self, snapshot: &mut SlotSnapshotBuilder, router: RouterId) -> bool {
        for _ in 0..STEP_SLOTS {
            let Some(counter) = self.touched.as_mut().and_then(BTreeSet::pop_first) else {
                self.touched = None;
                return true;
            };
            let key = SlotKey { router, counter };
            match self.slots.open_slot(&self.table, key) {
                Some(slot) => snapshot.slots.insert(counter, slot),
                None => snapshot.slots.remove(&counter),
            };
        }
        false
    }

    /// The load of one router on each source.
    #[must_use]
    pub fn loads_of(&self, router: RouterId) -> Vec<RouterLoad> {
        self.slots.loads_of(&self.table, router)
    }

    /// Digest of a router's open slots.
    #[must_use]
    pub fn digest(&self, router: RouterId) -> LoadDigest {
        self.slots.digest(router)
    }

    /// Processes deadlines. Call it a few times a second.
    pub fn tick(&mut self, now: Instant) {
        self.expected.expire(now);
        self.doubts.evidence.expire(now);
        self.stalls.advance(now);
        self.speed.tick(now);
    }

    /// Rows of `/v1/slots`: every registered source, and every other source with load.
    #[must_use]
    pub fn loads(&self) -> Vec<SourceLoad> {
        let rows = self.table.in_order().into_iter();
        rows.filter(|(source, id)| self.fleet.contains(&source.worker) || !self.slots.is_idle(*id))
            .map(|(source, id)| {
                let load = self.slots.load(id);
                SourceLoad {
                    worker: source.worker.clone(),
                    dp_rank: source.dp_rank,
                    active_requests: load.active_requests,
                    prefill_tokens: load.prefill_tokens,
                    decode_blocks: load.decode_blocks,
                }
            })
            .collect()
    }

    /// All routers' open requests at a worker, as this router counts them.
    #[must_use]
    pub fn active_requests(&self, worker: &WorkerId) -> u64 {
        let sources = self.table.of_worker(worker);
        let requests = |id| u64::from(self.slots.active_requests(id, None));
        sources.map(requests).sum()
    }

    /// Whether this source is left out because it returns no first tokens.
    #[must_use]
    pub fn is_stalled(&self, source: &Source, now: Instant) -> bool {
        let id = self.table.id(source);
        id.is_some_and(|id| self.stalls.is_stalled(id, now))
    }

    /// The sources that are stalled or probed after a stall, each with the number of its stall.
    #[must_use]
    pub fn stalls(&self) -> BTreeMap<Source, u64> {
        let named = |(id, stall)| Some((self.source(id)?.clone(), stall));
        self.stalls.stalls().filter_map(named).collect()
    }

    /// Whether a source of another worker than these can take a request for the model.
    #[must_use]
    pub fn has_other(
        &self,
        (model, leg): (&str, Leg),
        tried: &[Source],
        worker: &WorkerId,
        now: Instant,
    ) -> bool {
        let room = self.room(now);
        let takes = |candidate: &Candidate| {
            candidate.source.worker != *worker
                && !tried.contains(&candidate.source)
                && !self.stalls.is_stalled(candidate.id, now)
                && (!room.is_bounded() || room.free_places(candidate.id, None) > 0)
        };
        let candidates = self.fleet.candidates(model, leg);
        candidates.is_ok_and(|candidates| candidates.iter().any(takes))
    }

    /// Observed over predicted time to first token; `None` without measurements.
    #[must_use]
    pub fn ttft_ratio(&self, source: &Source, now: Instant) -> Option<f64> {
        let id = self.table.id(source)?;
        self.slowness.ratio(id, now)
    }

    /// What was learned of the source's speed, or of the fleet's before its first answer.
    #[must_use]
    pub fn speed(&self, source: &Source) -> Option<SourceSpeed> {
        let id = self.table.id(source)?;
        Some(self.speed.of(id))
    }

    #[must_use]
    pub fn source(&self, id: SourceId) -> Option<&Source> {
        self.table.source(id)
    }

    #[must_use]
    pub fn sources(&self, ids: &BTreeSet<SourceId>) -> BTreeMap<SourceId, Source> {
        let named = |&id| Some((id, self.source(id)?.clone()));
        ids.iter().filter_map(named).collect()
    }

    #[must_use]
    pub fn counts(&self) -> CoreCounts {
        CoreCounts {
            bases: self.traffic.totals.bases(),
            ignored: self.slots.ignored(),
            slot_underflows: self.slots.underflows(),
            view: self.view.counts(),
            audit: self.audit.counts(),
            evidence: self.doubts.evidence.counts(),
            stalls: self.stalls.count(),
            predictions_dropped: self.expected.predictions.dropped(),
            predicted_samples: self.expected.predictions.samples(),
            reported_prefixes: self.expected.reported.len(),
            sent_prompts: self.expected.sent.len(),
            open_slots: self.slots.open(),
            opened: self.tally.opened,
            freed: self.tally.freed,
            moves: self.moves.counts,
        }
    }

    /// Opens a slot, and frees the slot that it replaces in the same message: no peer ever counts
    /// the request twice or not at all.
    fn open(
        &mut self,
        request: &RouteRequest<'_>,
        decision: Decision,
        replaced: Option<u64>,
        now: Instant,
    ) -> Result<Admitted, LedgerError> {
        let (source, slot) = (decision.claim.source, self.ledger.counter());
        let prompt_tokens = request.prompt.tokens();
        let prompt = request.prompt.cut(Some(decision.claim.cut));
        let opening = Ledger::opening(
            slot,
            &decision.source,
            decision.prefill_tokens,
            prompt.blocks_taken(),
            prompt.sampled(),
        );
        let end = SlotEnd::Aborted;
        let freed = replaced.map(|counter| LoadChange::Free { counter, end });
        let entry = self
            .ledger
            .write_all(freed.into_iter().chain([opening]).collect())?;
        self.apply(&entry.message, now);
        // A request that needs no model says nothing of it: an engine's server answers alone.
        if prompt_tokens > 0 {
            self.stalls.sent(slot, source, decision.predicted_ttft, now);
        }
        let compared = decision.compared.iter().map(|one| one.source);
        match request.leg {
            Leg::Whole | Leg::Prefill => {
                let typical = self.speed.ttft.typical(compared, decision.tokens_ahead);
                let pending = PendingPrefill {
                    source,
                    sent: now,
                    typical,
                };
                self.pending.insert(slot, pending);
            }
            // Its first token measures a transfer, which says nothing of the source's speed.
            Leg::Decode => {
                let transfer = decision.transfer_tokens;
                self.speed.transfers.sent(slot, source, transfer, now);
            }
        }
        Ok(Admitted {
            decision,
            slot,
            message: entry.bytes,
            movable_until: None,
        })
    }

    fn apply(&mut self, message: &LoadMessage, now: Instant) {
        let (router, own) = (message.router, self.ledger.router());
        for change in &message.changes {
            let applied = self
                .slots
                .apply(&mut self.table, router, message.incarnation, change);
            if router == own {
                self.account(applied, slot_of(change));
            }
            let counter = slot_of(change);
            let slot = SlotKey { router, counter };
            match (applied, change) {
                (
                    Applied::Added(source),
                    LoadChange::AddRequest {
                        counter,
                        prompt,
                        prefill_tokens,
                        ..
                    },
                ) => {
                    self.accepted(slot, source, *prefill_tokens, now);
                    self.expected
                        .predictions
                        .sent(router, *counter, source, prompt);
                    if router != own {
                        self.moves.peer_chose(own, router, source, now);
                    }
                }
                (Applied::Freed(source, _), LoadChange::Free { counter, end }) => {
                    let active_requests = self.concurrent(source, now).saturating_add(1);
                    self.speed.ended(slot, *end, active_requests, now);
                    self.end_prefill(source, now);
                    if *end == SlotEnd::Completed && self.expected.sent.is_needed(source, now) {
                        let hashes = self.expected.predictions.prompt(router, *counter);
                        self.expected.sent.completed(source, hashes, now);
                    }
                    self.expected.predictions.ended(router, *counter, *end, now);
                }
                (Applied::PrefillCompleted(source), _) => {
                    let active_requests = self.concurrent(source, now);
                    self.speed.first_token(slot, active_requests, now);
                    self.end_prefill(source, now);
                }
                (Applied::Grown(_), LoadChange::Grow { blocks: 0, .. }) => {
                    self.speed.unmeasured(slot);
                }
                (Applied::Grown(source), LoadChange::Grow { blocks, .. }) => {
                    self.speed.grew(slot, *blocks);
                    self.stalls.progressed(source, now);
                }
                _ => {}
            }
        }
    }

    fn end_prefill(&mut self, source: SourceId, now: Instant) {
        let tokens = self.slots.load(source).prefill_tokens;
        self.speed.prefilled(source, tokens, now);
    }

    fn accepted(&mut self, slot: SlotKey, source: SourceId, tokens: u32, now: Instant) {
        let load = self.slots.load(source);
        let outstanding_tokens = load.prefill_tokens;
        let worker = self.table.source(source).map(|source| &source.worker);
        let block_tokens = worker.map_or(0, |worker| self.fleet.block_tokens(worker));
        let prefill = AcceptedPrefill {
            source,
            tokens,
            outstanding_tokens: outstanding_tokens.saturating_sub(tokens.into()),
            foreign_tokens: self.foreign_tokens(source, block_tokens, now),
            block_tokens,
        };
        self.speed.accepted(slot, prefill, now);
    }

    /// Counts a change of an own slot.
    fn account(&mut self, applied: Applied, counter: u64) {
        if let Some(touched) = &mut self.touched {
            touched.insert(counter);
        }
        match applied {
            Applied::Added(_) => self.tally.opened += 1,
            Applied::Freed(_, SlotEnd::Completed) => self.tally.freed.completed += 1,
            Applied::Freed(_, SlotEnd::Failed) => self.tally.freed.failed += 1,
            Applied::Freed(_, SlotEnd::Aborted) => self.tally.freed.aborted += 1,
            Applied::PrefillCompleted(_) | Applied::Grown(_) | Applied::Nothing => {}
        }
    }
}

/// The counter of the changed slot.
const fn slot_of(change: &LoadChange) -> u64 {
    match change {
        LoadChange::AddRequest { counter, .. }
        | LoadChange::MarkPrefillCompleted { counter }
        | LoadChange::Grow { counter, .. }
        | LoadChange::Free { counter, .. } => *counter,
    }
}

#[cfg(test)]
mod cut_tests;
#[cfg(test)]
mod pair_tests;
#[cfg(test)]
mod tests;
