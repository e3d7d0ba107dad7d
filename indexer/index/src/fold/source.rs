//! One source as the log tells it: which records are in, and how far that can be trusted.

use std::time::{Duration, Instant};

use warmroute_proto::query::{SourceState, UnknownReason};
use warmroute_proto::registry::ResyncReason;
use warmroute_proto::snapshot::{SnapshotHolding, SnapshotSource};
use warmroute_proto::view::SourceFault;
use warmroute_proto::{
    Digest, EngineHealth, EngineSeq, Generation, Heartbeat, Record, RecordNumber,
    SequenceComparison, SequenceVerdict as Step, Sequencer, Source, Tier, TierState, TierStates,
    Tiers,
};

use super::history::SourceHistory;
use super::memory::SetAsideHistory;
use super::reload::ReloadState;
use super::resync::ResyncState;
use super::{HeartbeatVerdict, RecordVerdict};
use crate::tree::{SourceNumber, TierMask, Tree};

/// How long something missing may stay missing: three times the shim's ack time-out of 2 s, within
/// which the log delivers it or the shim sends it again.
pub(super) const PATIENCE: Duration = Duration::from_secs(6);

/// A state is credited only while its last proof is younger.
pub const PROOF_AGE_MAX: Duration = Duration::from_secs(5);

/// What became of the blocks that the log tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holding {
    /// Not a single record came yet.
    Nothing,
    /// They are in the tree.
    Applied(SourceNumber),
    /// The tree contradicted the log; what was folded is thrown away until the next generation.
    Diverged,
    /// The memory bound was reached; nothing is folded until the next generation.
    SetAside,
    /// The shim was gone for long; nothing is folded until the next generation.
    Freed,
}

/// Why a source that is folded may be wrong all the same.
#[derive(Clone, Copy, Debug, Default)]
struct SourceFaults {
    /// The highest number that the log delivered too early: something before it is missing.
    gap_below: Option<RecordNumber>,
    /// What a heartbeat announced has not come within the patience.
    overdue: bool,
    /// A message on this subject could not be read, or the log skipped positions: something may
    /// be missing, the next number or digest tells.
    unread: bool,
}

impl SourceFaults {
    const fn any(&self) -> bool {
        self.gap_below.is_some() || self.overdue || self.unread
    }
}

/// How far the shim vouches for its source.
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

    fn gives_credit(&self) -> bool {
        Tier::ALL
            .into_iter()
            .any(|tier| SourceState::from(*self.states.get(tier)).gives_credit())
    }
}

/// When a record came, in moments of this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordTimes {
    pub(super) now: Instant,
    /// The log did not have it before; none if that is older than all that matters: then it is folded, but
    /// proves nothing about the present.
    pub(super) stored: Option<Instant>,
    /// What it says was so at this moment: it may have been on its way to the log.
    pub(super) sent: Option<Instant>,
}

/// A generation that heartbeats name and the log does not have.
#[derive(Clone, Copy, Debug)]
struct AnnouncedGeneration {
    generation: Generation,
    named: Instant,
    /// None before its first record: it is waited for as long as its shim speaks.
    deadline: Option<Instant>,
}

/// See the module's documentation.
pub(super) struct SourceFold {
    sequencer: Sequencer,
    holding: Holding,
    /// What its last message sent, a record or a heartbeat.
    claim: ShimClaim,
    /// What its last record sent.
    record_claim: ShimClaim,
    health: EngineHealth,
    /// As of when a record or heartbeat last proved what is folded.
    proven: Option<Instant>,
    /// The same for one whose states give credit: what comes late does not live on the proof of what its shim
    /// had taken back meanwhile.
    credit_proven: Option<Instant>,
    /// As of when the present generation last sent anything.
    last_sent: Option<Instant>,
    /// Since when its shim speaks of less than is in, and nothing proves what is in.
    outrun_since: Option<Instant>,
    faults: SourceFaults,
    announced: Option<AnnouncedGeneration>,
    pub(super) resync: ResyncState,
    pub(super) reload: ReloadState,
    pub(super) set_aside_history: SetAsideHistory,
    /// Since when the registry has not named its worker; none if it does.
    pub(super) unnamed_since: Option<Instant>,
    pub(super) history: SourceHistory,
}

/// What is known of a source at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceStatus {
    pub generation: Option<Generation>,
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: Tiers<SourceState>,
    pub reason: Option<UnknownReason>,
    pub proof_age: Option<Duration>,
    /// None while nothing is folded.
    pub digest: Option<Digest>,
    pub health: EngineHealth,
    /// Why it may be wrong, where that was found here.
    pub fault: Option<SourceFault>,
    /// How long its GPU tier has been in its state.
    pub state_age: Duration,
    /// Generations that began within the last ten minutes.
    pub generations_lately: u8,
    /// Since its last record; none if none came while it was followed.
    pub record_age: Option<Duration>,
    /// How long its last heartbeat was on its way, as far as it tells.
    pub heartbeat_delay: Option<Duration>,
}

/// Is the shim's registration there?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Registration {
    /// It is, or it never was and nothing can be sent.
    Present,
    Gone,
}

impl SourceFold {
    pub(super) fn new() -> Self {
        Self {
            sequencer: Sequencer::new(PATIENCE),
            holding: Holding::Nothing,
            claim: ShimClaim::NOTHING,
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
        }
    }

    /// As a snapshot has it: nothing is proven yet.
    pub(super) fn restored(entry: &SnapshotSource, holding: Holding) -> Self {
        let mut restored = Self::new();
        restored.sequencer = Sequencer::restored(PATIENCE, entry.generation, entry.number);
        restored.holding = holding;
        restored.record_claim = ShimClaim {
            states: entry.states,
            engine_seq: entry.engine_seq,
        };
        restored.claim = restored.record_claim;
        restored
    }

    /// What goes into a snapshot; none if no generation is known, or its blocks are set set_aside_history.
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

    /// Takes over from what was known before a snapshot was adopted: what exists, and what was tried.
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
            self.reload = known.reload;
            self.last_sent = known.last_sent;
        }
    }

    /// The last number known to exist of a generation; for one that is only announced, any.
    fn number_of(&self, generation: Generation) -> Option<RecordNumber> {
        if self.sequencer.generation() == Some(generation) {
            self.sequencer.last()
        } else {
            Some(RecordNumber(0))
        }
    }

    /// Takes a record.
    pub(super) fn record(
        &mut self,
        RecordTimes { now, stored, sent }: RecordTimes,
        record: &Record,
        payload: u64,
        tree: &mut Tree,
    ) -> RecordVerdict {
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
            Step::Apply => self.take(sent, record, tree, RecordVerdict::Applied),
            Step::Start => {
                self.open(tree);
                self.history.generation_started(stored);
                self.take(sent, record, tree, RecordVerdict::Started)
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

    /// Takes a heartbeat, which says what was so at the second moment; none if that is long ago.
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

    /// Judged by what the log has, not by what is only announced: announcements prove nothing of each other.
    fn is_plausible(&self, generation: Generation) -> bool {
        generation.is_plausible_after(self.sequencer.generation().unwrap_or_default())
    }

    /// Is it the next record of the present generation?
    pub(super) fn awaits(&self, record: &Record) -> bool {
        let next = self.sequencer.last().map(RecordNumber::next);
        self.sequencer.generation() == Some(record.generation) && next == Some(record.number)
    }

    /// Something on this source's subject could not be read, or positions were skipped.
    pub(super) const fn suspect(&mut self) {
        self.faults.unread = true;
    }

    /// The log is another one: what came before is in none of its records.
    pub(super) fn log_lost(&mut self) {
        self.suspect();
        self.resync.request(ResyncReason::LogLost);
    }

    /// Lets patience run out where it does.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.sequencer.gap_expired(now) {
            self.faults.overdue = true;
            self.resync.request(ResyncReason::Gap);
        }
        let is_live = self.is_live(now);
        if let Some(announced) = &mut self.announced {
            let is_overdue = match announced.deadline {
                Some(deadline) => deadline <= now,
                // Nobody begins it, and the one before goes on: whoever lost the registry may.
                None => is_live && lapsed(announced.named, now),
            };
            if is_overdue {
                announced.deadline = Some(now + PATIENCE);
                self.resync.request(ResyncReason::LogLost);
            }
        }
    }

    /// Stops folding and gives the memory back.
    pub(super) fn set_aside(&mut self, tree: &mut Tree, holding: Holding) {
        if let Holding::Applied(number) = self.holding {
            tree.close(number);
        }
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

    /// Did the present generation say something that is not older than a proof may be?
    pub(super) fn is_live(&self, now: Instant) -> bool {
        self.last_sent
            .is_some_and(|last_sent| !lapsed(last_sent, now))
    }

    /// When the present generation last sent anything.
    pub(super) const fn last_sent(&self) -> Option<Instant> {
        self.last_sent
    }

    /// What is folded here is wrong, and a snapshot may be right.
    pub(super) fn wants_reload(&self) -> bool {
        self.reload == ReloadState::Wanted
    }

    pub(super) const fn generation(&self) -> Option<Generation> {
        self.sequencer.generation()
    }

    /// Every generation that a new one has to be above of.
    pub(super) fn fence(&self) -> Option<Generation> {
        let announced = self.announced.map(|announced| announced.generation);
        self.sequencer.generation().max(announced)
    }

    pub(super) fn status(&self, now: Instant, shim: Registration, tree: &Tree) -> SourceStatus {
        let (states, reason) = self.states(now, shim);
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

    /// Remembers since when the source is in its state.
    pub(super) fn note_state(&mut self, now: Instant, shim: Registration) {
        let (states, _) = self.states(now, shim);
        self.history.note_state(now, states.gpu);
    }

    /// The shim's word, lowered by what is seen here; the weakest wins.
    pub(super) fn states(
        &self,
        now: Instant,
        shim: Registration,
    ) -> (Tiers<SourceState>, Option<UnknownReason>) {
        if let Some(reason) = self.unknown(now, shim) {
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
        let states = self
            .claim
            .states
            .map(|&state| SourceState::from(state).weakest(floor));
        (states, None)
    }

    fn unknown(&self, now: Instant, shim: Registration) -> Option<UnknownReason> {
        if self.holding == Holding::SetAside {
            Some(UnknownReason::Memory)
        } else if shim == Registration::Gone || self.holding == Holding::Freed {
            Some(UnknownReason::ShimGone)
        } else if self.proof().is_none_or(|proof| lapsed(proof, now)) {
            Some(UnknownReason::NoProof)
        } else {
            None
        }
    }

    /// As of when the present word is proven.
    fn proof(&self) -> Option<Instant> {
        if self.claim.gives_credit() {
            self.credit_proven
        } else {
            self.proven
        }
    }

    /// A new generation: a fresh number, and the old one is dead at once.
    fn open(&mut self, tree: &mut Tree) {
        let number = tree.open();
        self.set_aside(tree, Holding::Applied(number));
        self.claim = ShimClaim::NOTHING;
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

    /// The next record: folds it, and compares.
    fn take(
        &mut self,
        sent: Option<Instant>,
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
        self.record_claim = ShimClaim {
            states: record.states,
            engine_seq: record.engine_seq,
        };
        self.claim = self.record_claim;
        self.prove(sent);
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
                // Its wish may have gone with the process that found it out.
                Holding::Diverged => self.resync.request(ResyncReason::Mismatch),
                Holding::Nothing | Holding::Applied(_) | Holding::SetAside => {}
            }
            return HeartbeatVerdict::NotFolded;
        };
        if tree.digest(number) != heartbeat.after {
            self.diverge(tree);
            return HeartbeatVerdict::Mismatch;
        }
        self.claim = ShimClaim {
            states: heartbeat.states,
            engine_seq: heartbeat.engine_seq,
        };
        self.prove(sent);
        HeartbeatVerdict::Proof
    }

    /// Number and digest are right, as of a moment: whatever could not be read was nothing.
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

    /// A heartbeat named a generation that the log has not delivered: it voids the present one at
    /// once. Its records are on their way, or lost.
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

    /// The generation's shim lives and is behind what is in. On the way for a moment, a heartbeat may well
    /// be; if none is any better for so long after the last proof, then the number was given a second
    /// time, because everything that knew of the first time was lost, and this fence is ahead of it.
    fn outrun(&mut self, now: Instant) {
        if self.proven.is_some_and(|proven| !lapsed(proven, now)) {
            return;
        }
        let since = *self.outrun_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= PATIENCE {
            self.resync.request(ResyncReason::Fenced);
        }
    }

    /// A fenced-off generation spoke just now. If the present one has been silent, the fence is ahead of
    /// whoever holds the source: it has to come above it.
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

/// The tiers whose blocks count.
pub(super) fn credited(states: &Tiers<SourceState>) -> TierMask {
    Tier::ALL
        .into_iter()
        .filter(|&tier| states.get(tier).gives_credit())
        .fold(TierMask::NONE, TierMask::with)
}
