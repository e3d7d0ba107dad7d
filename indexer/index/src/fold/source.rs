//! One source of the log: which records are applied, and how far they can be trusted.

use std::time::{Duration, Instant};

use warmroute_proto::query::{SourceState, UnknownReason};
use warmroute_proto::registry::ResyncReason;
use warmroute_proto::roster::{HolderDetail, RosterNumber};
use warmroute_proto::snapshot::{SnapshotHolding, SnapshotSource};
use warmroute_proto::view::SourceFault;
use warmroute_proto::{
    Digest, EngineHealth, EngineSeq, Generation, Heartbeat, LogPosition, LogTime, Record,
    RecordNumber, SequenceComparison, SequenceVerdict as Step, Sequencer, Source, Tier, TierState,
    TierStates, Tiers,
};

use super::ends::LogClockState;
use super::history::SourceHistory;
use super::reload::ReloadState;
use super::removals::{RecentRemovals, RecordPlace};
use super::resync::ResyncState;
use super::set_aside::SetAsideHistory;
use super::{HeartbeatVerdict, RecordVerdict};
use crate::tree::{SourceNumber, TierMask, Tree};

/// Deadline for something missing: three times the shim's ack timeout of 2 s, within which the log
/// delivers it or the shim sends it again.
pub(super) const PATIENCE: Duration = Duration::from_secs(6);

/// Validity of a proof: a state gives credit only while its last proof is younger.
pub const PROOF_AGE_MAX: Duration = Duration::from_secs(5);

/// Where the blocks of the log's records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holding {
    /// No record was applied yet.
    Nothing,
    /// In the tree.
    Applied(SourceNumber),
    /// Discarded until the next generation, because tree and log contradict each other.
    Diverged,
    /// Not folded until the next generation, because of the memory bound.
    SetAside,
    /// Not folded until the next generation, because the shim was gone for long.
    Freed,
}

/// Why a folded source may be wrong.
#[derive(Clone, Copy, Debug, Default)]
struct SourceFaults {
    /// The highest number delivered too early: an earlier record is missing.
    gap_below: Option<RecordNumber>,
    /// An announced record was not delivered within [`PATIENCE`].
    overdue: bool,
    /// A message on this subject was unreadable, or the log skipped positions. The next number or
    /// digest shows whether something is missing.
    unread: bool,
}

impl SourceFaults {
    const fn any(&self) -> bool {
        self.gap_below.is_some() || self.overdue || self.unread
    }
}

/// The shim's claim about its source.
#[derive(Clone, Copy, Debug)]
struct ShimClaim {
    states: TierStates,
    engine_seq: Option<EngineSeq>,
}

impl ShimClaim {
    const NOTHING: Self = Self {
        states: Tiers {
            gpu: TierState::CatchingUp,
            cpu: TierState::CatchingUp,
            disk: TierState::CatchingUp,
        },
        engine_seq: None,
    };

    /// No batch was seen, and none can be: the shim is not connected to the engine's events.
    fn is_without_events(&self) -> bool {
        self.engine_seq.is_none() && self.states.gpu == TierState::Stale
    }

    fn gives_credit(&self) -> bool {
        Tier::ALL
            .into_iter()
            .any(|tier| SourceState::from(*self.states.get(tier)).gives_credit())
    }
}

/// A record's place in the log, and its times by this process's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordArrival {
    pub(super) position: LogPosition,
    pub(super) now: Instant,
    /// The log stored it at this moment or later. `None` if out of reach: then it is folded, but
    /// proves nothing about the present.
    pub(super) stored: Option<Instant>,
    /// It holds as of this moment: it may have been delayed on the way to the log.
    pub(super) sent: Option<Instant>,
}

/// A generation that heartbeats name and the log has not delivered.
#[derive(Clone, Copy, Debug)]
struct AnnouncedGeneration {
    generation: Generation,
    named: Instant,
    /// `None` before its first record: no deadline while its shim is alive.
    deadline: Option<Instant>,
}

/// Fold of one source's messages.
pub(super) struct SourceFold {
    sequencer: Sequencer,
    holding: Holding,
    /// Claim of the last record or heartbeat.
    claim: ShimClaim,
    /// The log's clock when a heartbeat made the claim; zero for a record's.
    claim_made: LogTime,
    /// Claim of the last record.
    record_claim: ShimClaim,
    health: EngineHealth,
    /// Time of the last record or heartbeat that proved the folded blocks.
    proven: Option<Instant>,
    /// Time of the last proof with states that give credit: a later claim must not extend an
    /// earlier one that the shim withdrew in between.
    credit_proven: Option<Instant>,
    /// Time of the present generation's last message.
    last_sent: Option<Instant>,
    /// Since when the shim reports a lower number than is applied, without proof of the applied
    /// one.
    outrun_since: Option<Instant>,
    faults: SourceFaults,
    announced: Option<AnnouncedGeneration>,
    pub(super) resync: ResyncState,
    pub(super) reload: ReloadState,
    pub(super) set_aside_history: SetAsideHistory,
    /// Since when the registry does not list its worker; `None` if it does.
    pub(super) unnamed_since: Option<Instant>,
    pub(super) history: SourceHistory,
    /// Removals of the present generation.
    pub(super) removals: RecentRemovals,
    /// Set by the fold.
    pub(super) roster: Option<RosterNumber>,
}

/// Status of a source at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceStatus {
    pub generation: Option<Generation>,
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: Tiers<SourceState>,
    pub reason: Option<UnknownReason>,
    pub proof_age: Option<Duration>,
    /// `None` while the source is not folded.
    pub digest: Option<Digest>,
    pub health: EngineHealth,
    /// Why it may be wrong, as found by this replica.
    pub fault: Option<SourceFault>,
    /// Time since its GPU tier is in its state.
    pub state_age: Duration,
    /// Generations that began within the last ten minutes.
    pub generations_lately: u8,
    /// Age of its last record; `None` if none was read live.
    pub record_age: Option<Duration>,
    /// Delay of its last heartbeat, if known.
    pub heartbeat_delay: Option<Duration>,
    /// Time since its worker left the registry; `None` while it is registered.
    pub gone_for: Option<Duration>,
}

/// Age of an absence after which a source has no series: its worker was taken out.
const LEFT_AFTER: Duration = Duration::from_secs(30);

impl SourceStatus {
    /// Its worker was taken out; what remains is the source's fence.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.gone_for.is_some_and(|gone| gone >= LEFT_AFTER)
    }
}

/// State of the shim's registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Registration {
    /// Registered, or never seen in the registry.
    Present,
    Gone,
}

/// What the replica knows beside the source's messages.
#[derive(Clone, Copy)]
pub(super) struct SourceContext {
    pub(super) shim: Registration,
    pub(super) clock: LogClockState,
}

/// Whether a visitor changed what a source's standing depends on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Touched {
    Nothing,
    Standing,
}

impl SourceFold {
    pub(super) fn new() -> Self {
        Self {
            sequencer: Sequencer::new(PATIENCE),
            holding: Holding::Nothing,
            claim: ShimClaim::NOTHING,
            claim_made: LogTime::default(),
            record_claim: ShimClaim::NOTHING,
            health: EngineHealth::Unknown,
            proven: None,
            credit_proven: None,
            last_sent: None,
            outrun_since: None,
            faults: SourceFaults {
                gap_below: None,
                overdue: false,
                unread: false,
            },
            announced: None,
            resync: ResyncState::new(),
            reload: ReloadState::Untried,
            set_aside_history: SetAsideHistory::default(),
            unnamed_since: None,
            history: SourceHistory::default(),
            removals: RecentRemovals::default(),
            roster: None,
        }
    }

    /// Restored from a snapshot as of a position, without proof.
    pub(super) fn restored(entry: &SnapshotSource, holding: Holding, at: LogPosition) -> Self {
        let mut restored = Self::new();
        restored.sequencer = Sequencer::restored(PATIENCE, entry.generation, entry.number);
        restored.holding = holding;
        restored.removals = entry.number.map_or_else(RecentRemovals::default, |number| {
            let position = at;
            RecentRemovals::above(RecordPlace { number, position })
        });
        restored.record_claim = ShimClaim {
            states: entry.states,
            engine_seq: entry.engine_seq,
        };
        restored.claim = restored.record_claim;
        restored
    }

    /// Its snapshot entry; `None` if no generation is known or its blocks are set aside.
    pub(super) fn entry(&self, source: &Source, after: Digest) -> Option<SnapshotSource> {
        let holding = match self.holding {
            Holding::Applied(_) => SnapshotHolding::Folded,
            Holding::Diverged => SnapshotHolding::Diverged,
            Holding::Freed => SnapshotHolding::Freed,
            Holding::Nothing | Holding::SetAside => return None,
        };
        Some(SnapshotSource {
            source: source.clone(),
            generation: self.sequencer.generation()?,
            number: self.sequencer.last(),
            engine_seq: self.record_claim.engine_seq,
            states: self.record_claim.states,
            holding,
            after,
        })
    }

    /// Keeps knowledge from before a snapshot was adopted: announced records and attempted repairs.
    pub(super) fn remember(&mut self, now: Instant, known: &Self) {
        if let Some(fence) = known.fence() {
            let number = known.number_of(fence);
            let comparison = self.sequencer.observe_heartbeat(now, fence, number);
            if comparison == SequenceComparison::Behind {
                self.await_generation(now, fence, number);
            }
        }
        self.health = known.health;
        self.history = known.history.clone();
        self.set_aside_history = known.set_aside_history;
        self.unnamed_since = known.unnamed_since;
        self.resync.remember(&known.resync);
        if self.sequencer.generation() == known.sequencer.generation() {
            self.reload = known.reload.read();
            self.last_sent = known.last_sent;
        }
    }

    /// The last known number of a generation; 0 for one that is only announced.
    fn number_of(&self, generation: Generation) -> Option<RecordNumber> {
        if self.sequencer.generation() == Some(generation) {
            self.sequencer.last()
        } else {
            Some(RecordNumber(0))
        }
    }

    /// Applies a record.
    pub(super) fn record(
        &mut self,
        arrival: RecordArrival,
        record: &Record,
        payload: u64,
        tree: &mut Tree,
    ) -> RecordVerdict {
        let RecordArrival {
            now, stored, sent, ..
        } = arrival;
        let (generation, number) = (record.generation, record.number);
        if !self.is_plausible(generation) {
            self.suspect();
            return RecordVerdict::Implausible;
        }
        let step = self.sequencer.accept(now, generation, number, payload);
        if step != Step::Old {
            self.last_sent = self.last_sent.max(sent);
            self.history.recorded(stored);
        }
        match step {
            Step::Apply => self.take(arrival, record, tree, RecordVerdict::Applied),
            Step::Start => {
                self.open(tree);
                self.history.generation_started(stored);
                self.take(arrival, record, tree, RecordVerdict::Started)
            }
            Step::StartBehind => {
                self.open(tree);
                self.history.generation_started(stored);
                self.faults.gap_below = Some(number);
                RecordVerdict::StartedBehind
            }
            Step::Ahead => {
                self.faults.gap_below = self.faults.gap_below.max(Some(number));
                RecordVerdict::Ahead
            }
            Step::Duplicate => RecordVerdict::Duplicate,
            Step::Violation => {
                self.diverge(tree);
                RecordVerdict::Violation
            }
            Step::Old => {
                self.fenced(now, sent);
                RecordVerdict::Old
            }
        }
    }

    /// Applies a heartbeat that holds as of `sent`; `None` if out of reach.
    pub(super) fn heartbeat(
        &mut self,
        now: Instant,
        sent: Option<Instant>,
        heartbeat: &Heartbeat,
        tree: &mut Tree,
    ) -> HeartbeatVerdict {
        let (generation, number) = (heartbeat.generation, heartbeat.number);
        if !self.is_plausible(generation) {
            return HeartbeatVerdict::Implausible;
        }
        let comparison = self.sequencer.observe_heartbeat(now, generation, number);
        if self.sequencer.generation() == Some(generation) {
            self.last_sent = self.last_sent.max(sent);
            self.history.heartbeat_read(now, sent);
            self.health = heartbeat.health;
        }
        match comparison {
            SequenceComparison::Level => self.level(sent, heartbeat, tree),
            SequenceComparison::Behind => {
                self.await_generation(now, generation, number);
                HeartbeatVerdict::Behind
            }
            SequenceComparison::Ahead => {
                self.outrun(now);
                HeartbeatVerdict::Late
            }
            SequenceComparison::Old => {
                self.fenced(now, sent);
                HeartbeatVerdict::Old
            }
        }
    }

    /// Judged by generations of the log only: announcements are no evidence for each other.
    fn is_plausible(&self, generation: Generation) -> bool {
        generation.is_plausible_after(self.sequencer.generation().unwrap_or_default())
    }

    /// Returns true for the next record of the present generation.
    pub(super) fn awaits(&self, record: &Record) -> bool {
        let next = self.sequencer.last().map(RecordNumber::next);
        self.sequencer.generation() == Some(record.generation) && next == Some(record.number)
    }

    /// Returns true if a record of the present generation is applied.
    pub(super) fn has_applied(&self, generation: Generation, number: RecordNumber) -> bool {
        self.sequencer.generation() == Some(generation) && self.sequencer.last() >= Some(number)
    }

    /// A message on this subject was unreadable, or positions were skipped.
    pub(super) const fn suspect(&mut self) {
        self.faults.unread = true;
    }

    /// The log lost records, or was replaced.
    pub(super) fn log_lost(&mut self) {
        self.suspect();
        self.removals = RecentRemovals::default();
        self.resync.request(ResyncReason::LogLost);
    }

    /// Expires deadlines.
    pub(super) fn expire(&mut self, now: Instant) -> Touched {
        let mut touched = Touched::Nothing;
        if self.sequencer.gap_expired(now) {
            self.faults.overdue = true;
            self.resync.request(ResyncReason::Gap);
            touched = Touched::Standing;
        }
        let is_live = self.is_live(now);
        if let Some(announced) = &mut self.announced {
            let is_overdue = match announced.deadline {
                Some(deadline) => deadline <= now,
                // It does not begin and the former one goes on, as after a loss of the registry.
                None => is_live && lapsed(announced.named, now),
            };
            if is_overdue {
                announced.deadline = Some(now + PATIENCE);
                self.resync.request(ResyncReason::LogLost);
            }
        }
        touched
    }

    /// Stops folding and frees the blocks.
    pub(super) fn set_aside(&mut self, tree: &mut Tree, holding: Holding) {
        if let Holding::Applied(number) = self.holding {
            tree.close(number);
        }
        self.removals = RecentRemovals::default();
        self.holding = holding;
    }

    pub(super) const fn number(&self) -> Option<SourceNumber> {
        match self.holding {
            Holding::Applied(number) => Some(number),
            Holding::Nothing | Holding::Diverged | Holding::SetAside | Holding::Freed => None,
        }
    }

    pub(super) fn is_set_aside(&self) -> bool {
        self.holding == Holding::SetAside
    }

    /// Returns true if the present generation sent a message within the validity of a proof.
    pub(super) fn is_live(&self, now: Instant) -> bool {
        self.last_sent
            .is_some_and(|last_sent| !lapsed(last_sent, now))
    }

    /// Time of the present generation's last message.
    pub(super) const fn last_sent(&self) -> Option<Instant> {
        self.last_sent
    }

    /// Returns true if it diverged here and a snapshot may be right.
    pub(super) fn wants_reload(&self) -> bool {
        matches!(self.reload, ReloadState::Wanted | ReloadState::Reading)
    }

    pub(super) const fn generation(&self) -> Option<Generation> {
        self.sequencer.generation()
    }

    /// The generation above which a new one has to be.
    pub(super) fn fence(&self) -> Option<Generation> {
        let announced = self.announced.map(|announced| announced.generation);
        self.sequencer.generation().max(announced)
    }

    pub(super) fn status(&self, now: Instant, context: SourceContext, tree: &Tree) -> SourceStatus {
        let (states, reason) = self.states(now, context);
        SourceStatus {
            generation: self.sequencer.generation(),
            number: self.sequencer.last(),
            engine_seq: self.claim.engine_seq,
            states,
            reason,
            proof_age: self
                .proof()
                .map(|proof| now.saturating_duration_since(proof)),
            digest: self.number().map(|number| tree.digest(number)),
            health: self.health,
            fault: self.fault(),
            state_age: self.history.state_age(now, states.gpu),
            generations_lately: self.history.generations_lately(now),
            record_age: self.history.record_age(now),
            heartbeat_delay: self.history.heartbeat_delay(),
            gone_for: None,
        }
    }

    /// The gravest first.
    fn fault(&self) -> Option<SourceFault> {
        if self.sequencer.is_violated() {
            Some(SourceFault::Violation)
        } else if self.holding == Holding::Diverged {
            Some(SourceFault::Diverged)
        } else if self.announced.is_some() {
            Some(SourceFault::Unseen)
        } else if self.faults.overdue {
            Some(SourceFault::Overdue)
        } else if self.faults.gap_below.is_some() {
            Some(SourceFault::Gap)
        } else if self.faults.unread {
            Some(SourceFault::Unread)
        } else {
            None
        }
    }

    /// `None` without a number in the roster, or without records.
    pub(super) fn detail(&self) -> Option<HolderDetail> {
        Some(HolderDetail {
            source: self.roster?,
            generation: self.sequencer.generation()?,
            number: self.sequencer.last(),
            engine_seq: self.claim.engine_seq,
        })
    }

    /// The shim's claim, lowered by what this replica observes; the weakest state wins. Unknown
    /// without a reason: [`warmroute_proto::query::is_without_events`].
    pub(super) fn states(
        &self,
        now: Instant,
        context: SourceContext,
    ) -> (Tiers<SourceState>, Option<UnknownReason>) {
        if let Some(reason) = self.unknown(now, context) {
            return (Tiers::all(SourceState::Unknown), Some(reason));
        }
        let doubtful =
            self.faults.any() || self.sequencer.is_violated() || self.holding == Holding::Diverged;
        let floor = if self.announced.is_some() {
            SourceState::CatchingUp
        } else if doubtful {
            SourceState::Stale
        } else {
            SourceState::Exact
        };
        if floor == SourceState::Exact && self.claim.is_without_events() {
            return (Tiers::all(SourceState::Unknown), None);
        }
        let states = self
            .claim
            .states
            .map(|&state| SourceState::from(state).weakest(floor));
        (states, None)
    }

    fn unknown(&self, now: Instant, context: SourceContext) -> Option<UnknownReason> {
        let has_lapsed = |proof| lapsed(proof, now) || context.clock == LogClockState::Silent;
        if self.holding == Holding::SetAside {
            Some(UnknownReason::Memory)
        } else if context.shim == Registration::Gone || self.holding == Holding::Freed {
            Some(UnknownReason::ShimGone)
        } else if self.proof().is_none_or(has_lapsed) {
            Some(UnknownReason::NoProof)
        } else {
            None
        }
    }

    /// Time of the last proof of the present claim.
    fn proof(&self) -> Option<Instant> {
        if self.claim.gives_credit() {
            self.credit_proven
        } else {
            self.proven
        }
    }

    /// The moment at which the last proof expires.
    pub(super) fn proof_ends(&self) -> Option<Instant> {
        self.proof().map(|proof| proof + PROOF_AGE_MAX)
    }

    /// Opens a new generation under a new tree number; the old one's blocks are dead immediately.
    fn open(&mut self, tree: &mut Tree) {
        let number = tree.open();
        self.set_aside(tree, Holding::Applied(number));
        self.claim = ShimClaim::NOTHING;
        self.claim_made = LogTime::default();
        self.record_claim = ShimClaim::NOTHING;
        self.proven = None;
        self.credit_proven = None;
        self.outrun_since = None;
        self.faults = SourceFaults::default();
        self.resync.settle();
        self.reload = ReloadState::Untried;
        self.set_aside_history.came_back();
        if self
            .announced
            .is_some_and(|announced| Some(announced.generation) <= self.sequencer.generation())
        {
            self.announced = None;
        }
    }

    /// Folds the next record and compares the digest.
    fn take(
        &mut self,
        arrival: RecordArrival,
        record: &Record,
        tree: &mut Tree,
        taken: RecordVerdict,
    ) -> RecordVerdict {
        self.close_gap();
        let Some(number) = self.number() else {
            self.set_aside_history.pairs = record.after.count;
            return RecordVerdict::NotFolded;
        };
        let applied = record
            .changes
            .iter()
            .try_for_each(|change| tree.apply(number, change));
        if applied.is_err() {
            self.diverge(tree);
            return RecordVerdict::Contradiction;
        }
        if tree.digest(number) != record.after {
            self.diverge(tree);
            return RecordVerdict::Mismatch;
        }
        let place = RecordPlace {
            number: record.number,
            position: arrival.position,
        };
        self.removals.record(place, &record.changes);
        self.record_claim = ShimClaim {
            states: record.states,
            engine_seq: record.engine_seq,
        };
        self.claim = self.record_claim;
        self.claim_made = LogTime::default();
        self.prove(arrival.sent);
        taken
    }

    fn level(
        &mut self,
        sent: Option<Instant>,
        heartbeat: &Heartbeat,
        tree: &mut Tree,
    ) -> HeartbeatVerdict {
        let Some(number) = self.number() else {
            self.set_aside_history.pairs = heartbeat.after.count;
            match self.holding {
                Holding::Freed => self.resync.request(ResyncReason::LogLost),
                // The former request may be lost with the process that made it.
                Holding::Diverged => self.resync.request(ResyncReason::Mismatch),
                Holding::Nothing | Holding::Applied(_) | Holding::SetAside => {}
            }
            return HeartbeatVerdict::NotFolded;
        };
        if tree.digest(number) != heartbeat.after {
            self.diverge(tree);
            return HeartbeatVerdict::Mismatch;
        }
        let claim = ShimClaim {
            states: heartbeat.states,
            engine_seq: heartbeat.engine_seq,
        };
        if !claim.gives_credit() || !self.is_overtaken(heartbeat.sent_at) {
            self.claim = claim;
            self.claim_made = heartbeat.sent_at.unwrap_or_default();
        }
        self.prove(sent);
        HeartbeatVerdict::Proof
    }

    /// Whether a heartbeat that came now was made before that of the present claim. A larger step
    /// back is the log's clock, which was set.
    fn is_overtaken(&self, made: Option<LogTime>) -> bool {
        let earlier = made.map_or(0, |made| self.claim_made.0.saturating_sub(made.0));
        earlier > 0 && Duration::from_nanos(earlier) < PROOF_AGE_MAX
    }

    /// Number and digest are right as of `sent`: no unreadable message is missing.
    fn prove(&mut self, sent: Option<Instant>) {
        self.proven = self.proven.max(sent);
        if self.claim.gives_credit() {
            self.credit_proven = self.credit_proven.max(sent);
        }
        self.outrun_since = None;
        self.faults.unread = false;
        if !self.faults.any() && self.announced.is_none() {
            self.resync.settle();
        }
    }

    /// The process's clock stood still for this time: what was proven before is that much older.
    pub(super) fn clock_stood(&mut self, stood: Duration) {
        let earlier = |at: Instant| at.checked_sub(stood);
        self.proven = self.proven.and_then(earlier);
        self.credit_proven = self.credit_proven.and_then(earlier);
    }

    fn close_gap(&mut self) {
        if self.faults.gap_below <= self.sequencer.last() {
            self.faults.gap_below = None;
        }
        if !self.sequencer.has_gap() {
            self.faults.overdue = false;
        }
    }

    fn diverge(&mut self, tree: &mut Tree) {
        if self.number().is_some() {
            self.set_aside(tree, Holding::Diverged);
            self.reload.request();
        }
        self.resync.request(ResyncReason::Mismatch);
    }

    /// A heartbeat named a generation that the log has not delivered, which voids the present one
    /// immediately. Its records are delayed or lost.
    fn await_generation(
        &mut self,
        now: Instant,
        generation: Generation,
        number: Option<RecordNumber>,
    ) {
        if Some(generation) <= self.sequencer.generation() {
            return;
        }
        let known = self.announced;
        let deadline = known.and_then(|announced| announced.deadline);
        self.announced = Some(AnnouncedGeneration {
            generation: known.map_or(generation, |announced| announced.generation.max(generation)),
            named: now,
            deadline: deadline.or_else(|| number.map(|_| now + PATIENCE)),
        });
    }

    /// The present generation's shim reports a lower number than is applied. A delayed heartbeat
    /// does so briefly. If it lasts [`PATIENCE`] beyond the last proof, the number was given twice,
    /// because all that knew of the first use was lost, and this fence is ahead of the shim.
    fn outrun(&mut self, now: Instant) {
        if self.proven.is_some_and(|proven| !lapsed(proven, now)) {
            return;
        }
        let since = *self.outrun_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= PATIENCE {
            self.resync.request(ResyncReason::Fenced);
        }
    }

    /// A fenced-off generation sent a message just now. If the present one is silent, the fence is
    /// ahead of the live shim, which has to begin a generation above it.
    fn fenced(&mut self, now: Instant, sent: Option<Instant>) {
        let is_recent = |sent: Option<Instant>| sent.is_some_and(|sent| !lapsed(sent, now));
        if is_recent(sent) && !is_recent(self.last_sent) {
            self.resync.request(ResyncReason::Fenced);
        }
    }
}

fn lapsed(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) >= PROOF_AGE_MAX
}

/// The tiers that give credit in these states.
pub(super) fn credited(states: &Tiers<SourceState>) -> TierMask {
    Tier::ALL
        .into_iter()
        .filter(|&tier| states.get(tier).gives_credit())
        .fold(TierMask::NONE, TierMask::with)
}
