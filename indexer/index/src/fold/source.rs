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

use super::history::History;
use super::memory::Aside;
use super::reload::Reload;
use super::resync::Resync;
use super::{HeartbeatVerdict, Verdict};
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
struct Doubts {
    /// The highest number that the log delivered too early: something before it is missing.
    gap_below: Option<RecordNumber>,
    /// What a heartbeat announced has not come within the patience.
    overdue: bool,
    /// A message on this subject could not be read, or the log skipped positions: something may
    /// be missing, the next number or digest tells.
    unread: bool,
}

impl Doubts {
    const fn any(&self) -> bool {
        self.gap_below.is_some() || self.overdue || self.unread
    }
}

/// How far the shim vouches for its source.
#[derive(Clone, Copy, Debug)]
struct Said {
    states: TierStates,
    engine_seq: Option<EngineSeq>,
}

impl Said {
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
pub(super) struct Came {
    pub(super) now: Instant,
    /// The log did not have it before; none if that is older than all that matters: then it is folded, but
    /// proves nothing about the present.
    pub(super) stored: Option<Instant>,
    /// What it says was so at this moment: it may have been on its way to the log.
    pub(super) said: Option<Instant>,
}

/// A generation that heartbeats name and the log does not have.
#[derive(Clone, Copy, Debug)]
struct Unseen {
    generation: Generation,
    named: Instant,
    /// None before its first record: it is waited for as long as its shim speaks.
    deadline: Option<Instant>,
}

/// See the module's documentation.
pub(super) struct SourceFold {
    sequencer: Sequencer,
    holding: Holding,
    /// What its last message said, a record or a heartbeat.
    said: Said,
    /// What its last record said.
    logged: Said,
    health: EngineHealth,
    /// As of when a record or heartbeat last proved what is folded.
    proven: Option<Instant>,
    /// The same for one whose states give credit: what comes late does not live on the proof of what its shim
    /// had taken back meanwhile.
    vouched: Option<Instant>,
    /// As of when the present generation last said anything.
    heard: Option<Instant>,
    /// Since when its shim speaks of less than is in, and nothing proves what is in.
    outrun_since: Option<Instant>,
    doubts: Doubts,
    unseen: Option<Unseen>,
    pub(super) resync: Resync,
    pub(super) reload: Reload,
    pub(super) aside: Aside,
    /// Since when the registry has not named its worker; none if it does.
    pub(super) unnamed_since: Option<Instant>,
    pub(super) history: History,
}

/// What is known of a source at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceStanding {
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
    pub doubt: Option<SourceFault>,
    /// How long its GPU tier has been in its state.
    pub state_age: Duration,
    /// Generations that began within the last ten minutes.
    pub begun_lately: u8,
    /// Since its last record; none if none came while it was followed.
    pub record_age: Option<Duration>,
    /// How long its last heartbeat was on its way, as far as it tells.
    pub on_its_way: Option<Duration>,
}

/// Is the shim's registration there?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shim {
    /// It is, or it never was and nothing can be said.
    Present,
    Gone,
}

impl SourceFold {
    pub(super) fn new() -> Self {
        Self {
            sequencer: Sequencer::new(PATIENCE),
            holding: Holding::Nothing,
            said: Said::NOTHING,
            logged: Said::NOTHING,
            health: EngineHealth::Unknown,
            proven: None,
            vouched: None,
            heard: None,
            outrun_since: None,
            doubts: Doubts {
                gap_below: None,
                overdue: false,
                unread: false,
            },
            unseen: None,
            resync: Resync::new(),
            reload: Reload::Untried,
            aside: Aside::default(),
            unnamed_since: None,
            history: History::default(),
        }
    }

    /// As a snapshot has it: nothing is proven yet.
    pub(super) fn restored(entry: &SnapshotSource, holding: Holding) -> Self {
        let mut restored = Self::new();
        restored.sequencer = Sequencer::restored(PATIENCE, entry.generation, entry.number);
        restored.holding = holding;
        restored.logged = Said {
            states: entry.states,
            engine_seq: entry.engine_seq,
        };
        restored.said = restored.logged;
        restored
    }

    /// What goes into a snapshot; none if no generation is known, or its blocks are set aside.
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
            engine_seq: self.logged.engine_seq,
            states: self.logged.states,
            holding,
            after,
        })
    }

    /// Takes over from what was known before a snapshot was adopted: what exists, and what was tried.
    pub(super) fn remember(&mut self, now: Instant, known: &Self) {
        if let Some(fence) = known.fence() {
            let number = known.number_of(fence);
            let standing = self.sequencer.observe_heartbeat(now, fence, number);
            if standing == SequenceComparison::Behind {
                self.await_generation(now, fence, number);
            }
        }
        self.health = known.health;
        self.history = known.history.clone();
        self.aside = known.aside;
        self.unnamed_since = known.unnamed_since;
        self.resync.remember(&known.resync);
        if self.sequencer.generation() == known.sequencer.generation() {
            self.reload = known.reload;
            self.heard = known.heard;
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
        Came { now, stored, said }: Came,
        record: &Record,
        payload: u64,
        tree: &mut Tree,
    ) -> Verdict {
        let (generation, number) = (record.generation, record.number);
        if !self.is_plausible(generation) {
            self.doubt();
            return Verdict::Implausible;
        }
        let step = self.sequencer.accept(now, generation, number, payload);
        if step != Step::Old {
            self.heard = self.heard.max(said);
            self.history.recorded(stored);
        }
        match step {
            Step::Apply => self.take(said, record, tree, Verdict::Applied),
            Step::Start => {
                self.open(tree);
                self.history.began(stored);
                self.take(said, record, tree, Verdict::Started)
            }
            Step::StartBehind => {
                self.open(tree);
                self.history.began(stored);
                self.doubts.gap_below = Some(number);
                Verdict::StartedBehind
            }
            Step::Ahead => {
                self.doubts.gap_below = self.doubts.gap_below.max(Some(number));
                Verdict::Ahead
            }
            Step::Duplicate => Verdict::Duplicate,
            Step::Violation => {
                self.diverge(tree);
                Verdict::Violation
            }
            Step::Old => {
                self.fenced(now, said);
                Verdict::Old
            }
        }
    }

    /// Takes a heartbeat, which says what was so at the second moment; none if that is long ago.
    pub(super) fn heartbeat(
        &mut self,
        (now, said): (Instant, Option<Instant>),
        heartbeat: &Heartbeat,
        tree: &mut Tree,
    ) -> HeartbeatVerdict {
        let (generation, number) = (heartbeat.generation, heartbeat.number);
        if !self.is_plausible(generation) {
            return HeartbeatVerdict::Implausible;
        }
        let standing = self.sequencer.observe_heartbeat(now, generation, number);
        if self.sequencer.generation() == Some(generation) {
            self.heard = self.heard.max(said);
            self.history.heard(now, said);
            self.health = heartbeat.health;
        }
        match standing {
            SequenceComparison::Level => self.level(said, heartbeat, tree),
            SequenceComparison::Behind => {
                self.await_generation(now, generation, number);
                HeartbeatVerdict::Behind
            }
            SequenceComparison::Ahead => {
                self.outrun(now);
                HeartbeatVerdict::Late
            }
            SequenceComparison::Old => {
                self.fenced(now, said);
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
    pub(super) const fn doubt(&mut self) {
        self.doubts.unread = true;
    }

    /// The log is another one: what came before is in none of its records.
    pub(super) fn log_lost(&mut self) {
        self.doubt();
        self.resync.wish(ResyncReason::LogLost);
    }

    /// Lets patience run out where it does.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.sequencer.gap_expired(now) {
            self.doubts.overdue = true;
            self.resync.wish(ResyncReason::Gap);
        }
        let is_heard = self.is_heard(now);
        if let Some(unseen) = &mut self.unseen {
            let is_overdue = match unseen.deadline {
                Some(deadline) => deadline <= now,
                // Nobody begins it, and the one before goes on: whoever lost the registry may.
                None => is_heard && lapsed(unseen.named, now),
            };
            if is_overdue {
                unseen.deadline = Some(now + PATIENCE);
                self.resync.wish(ResyncReason::LogLost);
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
    pub(super) fn is_heard(&self, now: Instant) -> bool {
        self.heard.is_some_and(|heard| !lapsed(heard, now))
    }

    /// When the present generation last said anything.
    pub(super) const fn heard(&self) -> Option<Instant> {
        self.heard
    }

    /// What is folded here is wrong, and a snapshot may be right.
    pub(super) fn wants_reload(&self) -> bool {
        self.reload == Reload::Wanted
    }

    pub(super) const fn generation(&self) -> Option<Generation> {
        self.sequencer.generation()
    }

    /// Every generation that a new one has to be above of.
    pub(super) fn fence(&self) -> Option<Generation> {
        let unseen = self.unseen.map(|unseen| unseen.generation);
        self.sequencer.generation().max(unseen)
    }

    pub(super) fn standing(&self, now: Instant, shim: Shim, tree: &Tree) -> SourceStanding {
        let (states, reason) = self.states(now, shim);
        SourceStanding {
            generation: self.sequencer.generation(),
            number: self.sequencer.last(),
            engine_seq: self.said.engine_seq,
            states,
            reason,
            proof_age: self
                .proof()
                .map(|proof| now.saturating_duration_since(proof)),
            digest: self.number().map(|number| tree.digest(number)),
            health: self.health,
            doubt: self.doubt_of(),
            state_age: self.history.state_age(now, states.gpu),
            begun_lately: self.history.begun_lately(now),
            record_age: self.history.record_age(now),
            on_its_way: self.history.on_its_way(),
        }
    }

    /// The gravest first.
    fn doubt_of(&self) -> Option<SourceFault> {
        if self.sequencer.is_violated() {
            Some(SourceFault::Violation)
        } else if self.holding == Holding::Diverged {
            Some(SourceFault::Diverged)
        } else if self.unseen.is_some() {
            Some(SourceFault::Unseen)
        } else if self.doubts.overdue {
            Some(SourceFault::Overdue)
        } else if self.doubts.gap_below.is_some() {
            Some(SourceFault::Gap)
        } else if self.doubts.unread {
            Some(SourceFault::Unread)
        } else {
            None
        }
    }

    /// Remembers since when the source is in its state.
    pub(super) fn note_state(&mut self, now: Instant, shim: Shim) {
        let (states, _) = self.states(now, shim);
        self.history.note_state(now, states.gpu);
    }

    /// The shim's word, lowered by what is seen here; the weakest wins.
    pub(super) fn states(
        &self,
        now: Instant,
        shim: Shim,
    ) -> (Tiers<SourceState>, Option<UnknownReason>) {
        if let Some(reason) = self.unknown(now, shim) {
            return (Tiers::all(SourceState::Unknown), Some(reason));
        }
        let doubtful =
            self.doubts.any() || self.sequencer.is_violated() || self.holding == Holding::Diverged;
        let floor = if self.unseen.is_some() {
            SourceState::CatchingUp
        } else if doubtful {
            SourceState::Stale
        } else {
            SourceState::Exact
        };
        let states = self
            .said
            .states
            .map(|&state| SourceState::from(state).weakest(floor));
        (states, None)
    }

    fn unknown(&self, now: Instant, shim: Shim) -> Option<UnknownReason> {
        if self.holding == Holding::SetAside {
            Some(UnknownReason::Memory)
        } else if shim == Shim::Gone || self.holding == Holding::Freed {
            Some(UnknownReason::ShimGone)
        } else if self.proof().is_none_or(|proof| lapsed(proof, now)) {
            Some(UnknownReason::NoProof)
        } else {
            None
        }
    }

    /// As of when the present word is proven.
    fn proof(&self) -> Option<Instant> {
        if self.said.gives_credit() {
            self.vouched
        } else {
            self.proven
        }
    }

    /// A new generation: a fresh number, and the old one is dead at once.
    fn open(&mut self, tree: &mut Tree) {
        let number = tree.open();
        self.set_aside(tree, Holding::Applied(number));
        self.said = Said::NOTHING;
        self.logged = Said::NOTHING;
        self.proven = None;
        self.vouched = None;
        self.outrun_since = None;
        self.doubts = Doubts::default();
        self.resync.settle();
        self.reload = Reload::Untried;
        self.aside.came_back();
        if self
            .unseen
            .is_some_and(|unseen| Some(unseen.generation) <= self.sequencer.generation())
        {
            self.unseen = None;
        }
    }

    /// The next record: folds it, and compares.
    fn take(
        &mut self,
        said: Option<Instant>,
        record: &Record,
        tree: &mut Tree,
        taken: Verdict,
    ) -> Verdict {
        self.close_gap();
        let Some(number) = self.number() else {
            self.aside.pairs = record.after.count;
            return Verdict::NotFolded;
        };
        let applied = record
            .changes
            .iter()
            .try_for_each(|change| tree.apply(number, change));
        if applied.is_err() {
            self.diverge(tree);
            return Verdict::Contradiction;
        }
        if tree.digest(number) != record.after {
            self.diverge(tree);
            return Verdict::Mismatch;
        }
        self.logged = Said {
            states: record.states,
            engine_seq: record.engine_seq,
        };
        self.said = self.logged;
        self.prove(said);
        taken
    }

    fn level(
        &mut self,
        said: Option<Instant>,
        heartbeat: &Heartbeat,
        tree: &mut Tree,
    ) -> HeartbeatVerdict {
        let Some(number) = self.number() else {
            self.aside.pairs = heartbeat.after.count;
            match self.holding {
                Holding::Freed => self.resync.wish(ResyncReason::LogLost),
                // Its wish may have gone with the process that found it out.
                Holding::Diverged => self.resync.wish(ResyncReason::Mismatch),
                Holding::Nothing | Holding::Applied(_) | Holding::SetAside => {}
            }
            return HeartbeatVerdict::NotFolded;
        };
        if tree.digest(number) != heartbeat.after {
            self.diverge(tree);
            return HeartbeatVerdict::Mismatch;
        }
        self.said = Said {
            states: heartbeat.states,
            engine_seq: heartbeat.engine_seq,
        };
        self.prove(said);
        HeartbeatVerdict::Proof
    }

    /// Number and digest are right, as of a moment: whatever could not be read was nothing.
    fn prove(&mut self, said: Option<Instant>) {
        self.proven = self.proven.max(said);
        if self.said.gives_credit() {
            self.vouched = self.vouched.max(said);
        }
        self.outrun_since = None;
        self.doubts.unread = false;
        if !self.doubts.any() && self.unseen.is_none() {
            self.resync.settle();
        }
    }

    fn close_gap(&mut self) {
        if self.doubts.gap_below <= self.sequencer.last() {
            self.doubts.gap_below = None;
        }
        if !self.sequencer.has_gap() {
            self.doubts.overdue = false;
        }
    }

    fn diverge(&mut self, tree: &mut Tree) {
        if self.number().is_some() {
            self.set_aside(tree, Holding::Diverged);
            self.reload.wish();
        }
        self.resync.wish(ResyncReason::Mismatch);
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
        let known = self.unseen;
        let deadline = known.and_then(|unseen| unseen.deadline);
        self.unseen = Some(Unseen {
            generation: known.map_or(generation, |unseen| unseen.generation.max(generation)),
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
            self.resync.wish(ResyncReason::Fenced);
        }
    }

    /// A fenced-off generation spoke just now. If the present one has been silent, the fence is ahead of
    /// whoever holds the source: it has to come above it.
    fn fenced(&mut self, now: Instant, said: Option<Instant>) {
        let is_recent = |said: Option<Instant>| said.is_some_and(|said| !lapsed(said, now));
        if is_recent(said) && !is_recent(self.heard) {
            self.resync.wish(ResyncReason::Fenced);
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
