//! The part of the index's answers that the router trusts.
//!
//! Any index replica may answer, and replicas lag. Per source the view keeps the highest
//! (generation, number) seen. An answer of a lower generation is `stale`. A lower number of the
//! same generation is trusted until [`LAG_MAX`] after a higher one was first seen, then it is
//! `stale`. A source that this router demoted is `stale` until its next generation or another log, or
//! until it is reinstated; the credit that it would have is kept apart. A state is only ever lowered.
//!
//! A compact answer names numbers of few holders only. It is `stale` as a whole once a higher
//! position of the log was shown [`LAG_MAX`] before it.
//!
//! A source's generation, and its highest number, each expire after [`ANSWER_MEMORY`] without an
//! answer that shows them: registry and log, which count generations and numbers, may have been
//! lost and recreated. A restarted router knows as little, and each answer itself was proven within
//! 5 s. An answer without numbers does not keep a number.
//!
//! The view holds no blocks and sends no queries.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState};
use warmroute_proto::{
    EngineSeq, Generation, LogPosition, RecordNumber, Source, StreamIdentity, Tier, Tiers, WorkerId,
};

use super::replica_roster::{AnswerPosition, HolderReply, IndexReply, KnownHolder};
use super::source_table::{PerSource, SourceId, SourceLife, SourceTable};

/// Longest lag behind the freshest replica at which an answer is trusted.
pub const LAG_MAX: Duration = Duration::from_millis(500);

/// Time after which a generation or number expires that no answer showed.
pub const ANSWER_MEMORY: Duration = Duration::from_secs(30);

/// Numbers first seen within this time are kept as one, with the time of the first. Bounds the
/// memory to 51 entries a source; trust may end this much early.
const GRAIN: Duration = Duration::from_millis(10);

#[derive(Clone, Debug, Default)]
pub struct IndexView {
    sources: PerSource<SourceFreshness>,
    /// Sources in the order of the last answer. The next one names most of them at the same place,
    /// where comparing a name takes less than finding it.
    order: Vec<(Source, SourceId)>,
    positions: PositionsSeen,
    counts: IndexViewCounts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexViewCounts {
    /// Source answers that were `stale` because of an old generation or number.
    pub lagging: u64,
    /// Demotions so far.
    pub demoted: u64,
}

#[derive(Clone, Debug, Default)]
struct SourceFreshness {
    generation: Option<Generation>,
    /// Numbers of applied records.
    numbers: NumbersSeen,
    /// When an answer last showed the generation.
    shown: Option<Instant>,
    demoted: Option<LogGeneration>,
}

/// A source's generation in one log. Another log may give the same number again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogGeneration {
    pub log: StreamIdentity,
    pub generation: Generation,
}

/// The trusted part of one answer, by source.
#[derive(Clone, Debug, Default)]
pub struct TrustedAnswer {
    sources: PerSource<Option<TrustedSource>>,
    /// Sources with a new generation: predictions for them are void.
    pub restarted: Vec<SourceId>,
}

/// The trusted part of an answer for one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrustedSource {
    pub generation: Generation,
    /// As of which the index answered; `None` if its log is not certain.
    pub position: Option<AnswerPosition>,
    /// The last record applied; `None` if the answer names none.
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: Tiers<SourceState>,
    /// Credited blocks, uncapped; 0 in a tier whose state gives no credit.
    pub run: Tiers<u32>,
    /// What the index says, if this router demotes the source or doubts the credit.
    pub demoted: Option<DemotedCredit>,
}

/// How a report contradicts credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Contradiction {
    /// The engine had more than was credited.
    Exceeded,
    /// The engine did not have what was credited.
    Missed,
}

impl Contradiction {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Exceeded => "more",
            Self::Missed => "less",
        }
    }
}

/// The index's credit of a demoted source or a doubted scope, for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DemotedCredit {
    pub states: Tiers<SourceState>,
    pub run: Tiers<u32>,
}

impl TrustedAnswer {
    /// Returns `None` without an answer, or if the index does not know the source.
    #[must_use]
    pub fn of(&self, source: SourceId) -> Option<&TrustedSource> {
        self.sources.get(source)?.as_ref()
    }

    /// Takes one source from another answer.
    pub fn take(&mut self, source: SourceId, from: &Self) {
        if let Some(known) = from.of(source) {
            *self.sources.get_mut(source) = Some(*known);
        }
    }

    /// Weakens the credit of a source in this life, or of one lower tier.
    pub(crate) fn weaken(&mut self, at: SourceLife, kind: Contradiction, tier: Tier) {
        if let Some(known) = self.sources.get_mut(at.source)
            && known.generation == at.generation
        {
            known.weaken(kind, tier);
        }
    }

    /// Weakens the credit of all sources.
    pub(crate) fn weaken_all(&mut self, kind: Contradiction) {
        for known in self.sources.iter_mut().flatten() {
            known.weaken(kind, Tier::Gpu);
        }
    }

    /// All sources of the answer.
    pub fn all(&self) -> impl Iterator<Item = (SourceId, &TrustedSource)> {
        let all = self.sources.iter();
        all.filter_map(|(id, known)| Some((id, known.as_ref()?)))
    }
}

impl TrustedSource {
    /// The source's overall state.
    #[must_use]
    pub const fn state(&self) -> SourceState {
        self.states.gpu
    }

    /// Whether it shows all that the engine holds, in each tier that exists.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        are_complete(&self.states)
    }

    /// The weakest state that a credit of these blocks rests on: the GPU tier's, and those of the
    /// lower tiers that contribute.
    #[must_use]
    pub fn credit_state(&self, overlap: &Tiers<u32>) -> SourceState {
        let contributes = |tier: &Tier| *overlap.get(*tier) > 0;
        let tiers = Tier::ALL.into_iter().filter(contributes);
        tiers.fold(self.states.gpu, |state, tier| {
            state.weakest(*self.states.get(tier))
        })
    }

    #[must_use]
    pub const fn gives_credit(&self) -> bool {
        self.states.gpu.gives_credit()
            || self.states.cpu.gives_credit()
            || self.states.disk.gives_credit()
    }

    fn of(answer: &SourceAnswer, position: AnswerPosition) -> Self {
        Self {
            generation: answer.generation,
            position: Some(position),
            number: answer.number,
            engine_seq: answer.engine_seq,
            states: answer.states,
            demoted: None,
            run: credited(answer.states, answer.run),
        }
    }

    /// The states and blocks that the index itself gives.
    pub(crate) fn undoubted(&self) -> DemotedCredit {
        self.demoted.unwrap_or(DemotedCredit {
            states: self.states,
            run: self.run,
        })
    }

    fn weaken(&mut self, kind: Contradiction, tier: Tier) {
        self.demoted = Some(self.undoubted());
        match (kind, tier) {
            (Contradiction::Missed, Tier::Gpu) => self.lower_to_stale(),
            (Contradiction::Missed, Tier::Cpu | Tier::Disk) => {
                let state = self.states.get_mut(tier);
                *state = state.weakest(SourceState::Stale);
                // The other lower tier may continue this one's run.
                (self.run.cpu, self.run.disk) = (0, 0);
                self.states.gpu = self.states.gpu.weakest(SourceState::Partial);
            }
            (Contradiction::Exceeded, _) => {
                self.states.gpu = self.states.gpu.weakest(SourceState::Partial);
            }
        }
    }

    fn lower_to_stale(&mut self) {
        self.states = self.states.map(|state| state.weakest(SourceState::Stale));
        self.run = Tiers::default();
    }
}

/// Whether each tier is exact, or does not exist.
pub(crate) fn are_complete(states: &Tiers<SourceState>) -> bool {
    Tier::ALL.iter().all(|tier| {
        let state = *states.get(*tier);
        state == SourceState::Exact || state.is_absent()
    })
}

/// The run without the tiers that give no credit.
fn credited(states: Tiers<SourceState>, run: Tiers<u32>) -> Tiers<u32> {
    let credited = |state: SourceState, run| if state.gives_credit() { run } else { 0 };
    Tiers {
        gpu: credited(states.gpu, run.gpu),
        cpu: credited(states.cpu, run.cpu),
        disk: credited(states.disk, run.disk),
    }
}

impl IndexView {
    /// Reduces an answer to what is trusted. An answer of a replica behind the requested position
    /// contains nothing.
    pub fn judge(
        &mut self,
        table: &mut SourceTable,
        reply: &IndexReply,
        now: Instant,
    ) -> TrustedAnswer {
        let mut trusted = TrustedAnswer {
            sources: PerSource::with_capacity(table.len()),
            restarted: Vec::new(),
        };
        match reply {
            IndexReply::Full(IndexAnswer::Runs {
                log,
                position,
                sources,
            }) => {
                let (log, position) = (*log, *position);
                self.positions.observe(log, position, now);
                for (place, answer) in sources.iter().enumerate() {
                    let shown = ShownRecord {
                        generation: answer.generation,
                        applied: Some(applied(answer.number)),
                    };
                    let known = TrustedSource::of(answer, AnswerPosition { log, position });
                    let id = self.id_at(table, place, &answer.source);
                    self.judge_one(id, shown, known, now, &mut trusted);
                }
            }
            // [`super::Core`] judges the cuts one by one.
            IndexReply::Full(IndexAnswer::Behind { .. }) | IndexReply::Cuts(_) => {}
            IndexReply::Holders(holders) => self.judge_holders(table, holders, now, &mut trusted),
        }
        trusted
    }

    /// The number of the source at this place of an answer.
    fn id_at(&mut self, table: &mut SourceTable, place: usize, source: &Source) -> SourceId {
        if let Some((known, id)) = self.order.get(place)
            && known.dp_rank == source.dp_rank
            && is_same_name(&known.worker, &source.worker)
        {
            return *id;
        }
        let id = table.intern(source);
        self.order.truncate(place);
        self.order.push((source.clone(), id));
        id
    }

    /// Without a record number, only the answer's position shows that the replica lags.
    fn judge_holders(
        &mut self,
        table: &mut SourceTable,
        holders: &HolderReply,
        now: Instant,
        trusted: &mut TrustedAnswer,
    ) {
        let position = holders.position();
        let is_lagging = position.is_none_or(|AnswerPosition { log, position }| {
            self.positions.observe(log, position, now) == Freshness::Lagging
        });
        for (place, holder) in holders.sources().enumerate() {
            let (Some(generation), Some(states)) = (holder.generation(), holder.states()) else {
                continue;
            };
            let run = holder.run();
            let KnownHolder { row, detail, .. } = holder;
            let shown = ShownRecord {
                generation,
                applied: detail.map(|detail| applied(detail.number)),
            };
            let mut known = TrustedSource {
                generation,
                position,
                number: detail.and_then(|detail| detail.number),
                engine_seq: detail.and_then(|detail| detail.engine_seq),
                states,
                run: credited(states, run),
                demoted: None,
            };
            if is_lagging {
                self.counts.lagging += 1;
                known.lower_to_stale();
            }
            let id = self.id_at(table, place, &row.source);
            self.judge_one(id, shown, known, now, trusted);
        }
    }

    fn judge_one(
        &mut self,
        id: SourceId,
        shown: ShownRecord,
        mut known: TrustedSource,
        now: Instant,
        trusted: &mut TrustedAnswer,
    ) {
        let freshness = self.sources.get_mut(id);
        match freshness.take_in(shown, now) {
            Freshness::Restarted => trusted.restarted.push(id),
            Freshness::Fresh => {}
            Freshness::Lagging => {
                self.counts.lagging += 1;
                known.lower_to_stale();
            }
        }
        if let Some(demotion) = freshness.demotion(self.positions.log) {
            let (states, run) = (known.states, known.run);
            // What an older log's replica would credit is not compared.
            let is_comparable = known.position.is_some_and(|at| at.log == demotion.log);
            known.demoted = is_comparable.then_some(DemotedCredit { states, run });
            known.lower_to_stale();
        }
        *trusted.sources.get_mut(id) = Some(known);
    }

    /// Distrusts a source until a generation above this one, or until answers are of another log.
    pub fn demote(&mut self, source: SourceId, at: LogGeneration) {
        let freshness = self.sources.get_mut(source);
        let covers =
            |known: LogGeneration| known.log == at.log && known.generation >= at.generation;
        if !freshness.demoted.is_some_and(covers) {
            freshness.demoted = Some(at);
            self.counts.demoted += 1;
        }
    }

    /// Ends a demotion. Returns whether there was one.
    pub fn reinstate(&mut self, source: SourceId) -> bool {
        let freshness = self.sources.get_mut(source);
        let demotion = freshness.demotion(self.positions.log);
        freshness.demoted = None;
        demotion.is_some()
    }

    /// The demoted sources with their generations.
    pub fn demoted(&self) -> impl Iterator<Item = (SourceId, Generation)> {
        let all = self.sources.iter();
        all.filter_map(|(id, freshness)| {
            Some((id, freshness.demotion(self.positions.log)?.generation))
        })
    }

    /// The newest generation that an answer showed.
    #[must_use]
    pub fn generation(&self, source: SourceId) -> Option<Generation> {
        self.sources.get(source)?.generation
    }

    #[must_use]
    pub const fn counts(&self) -> IndexViewCounts {
        self.counts
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freshness {
    Fresh,
    /// Another generation than the one known; not for the first one.
    Restarted,
    Lagging,
}

/// What an answer shows of a source's records.
#[derive(Clone, Copy, Debug)]
struct ShownRecord {
    generation: Generation,
    /// `None` if the answer does not name the number.
    applied: Option<u64>,
}

/// 0 before the first record of a generation, n + 1 after number n.
fn applied(number: Option<RecordNumber>) -> u64 {
    number.map_or(0, |number| number.0.saturating_add(1))
}

impl SourceFreshness {
    /// Its demotion, if it counts while answers are of this log.
    /// Logs of one reader differ by replica, not by what they contain.
    fn demotion(&self, log: Option<StreamIdentity>) -> Option<LogGeneration> {
        let is_same = |at: &LogGeneration| Some(at.log) == log || at.log.is_of_one_reader();
        self.demoted
            .filter(|at| is_same(at) && self.generation <= Some(at.generation))
    }

    fn take_in(&mut self, answer: ShownRecord, now: Instant) -> Freshness {
        let ShownRecord {
            generation,
            applied,
        } = answer;
        if Some(generation) < self.generation {
            if !is_forgotten(self.shown, now) {
                return Freshness::Lagging;
            }
            self.demoted = self.demoted.filter(|at| at.generation <= generation);
        }
        self.shown = Some(now);
        if self.generation == Some(generation) {
            return applied.map_or(Freshness::Fresh, |applied| {
                self.numbers.take_in(applied, now)
            });
        }
        self.numbers = NumbersSeen::of(applied, now);
        match self.generation.replace(generation) {
            Some(_) => Freshness::Restarted,
            None => Freshness::Fresh,
        }
    }
}

/// The rows of a roster share their names with those of the last answer.
fn is_same_name(known: &WorkerId, named: &WorkerId) -> bool {
    std::ptr::eq(known.as_str(), named.as_str()) || known == named
}

fn is_forgotten(shown: Option<Instant>, now: Instant) -> bool {
    let shown = shown.map(|at| now.saturating_duration_since(at));
    shown.is_none_or(|ago| ago >= ANSWER_MEMORY)
}

/// Numbers that ascend, and when an answer first showed them. The first entry is older than
/// [`LAG_MAX`] or the only one. All expire together with the highest.
#[derive(Clone, Debug, Default)]
struct NumbersSeen {
    seen: VecDeque<(u64, Instant)>,
    /// When an answer last showed the highest number.
    shown: Option<Instant>,
}

impl NumbersSeen {
    fn of(number: Option<u64>, now: Instant) -> Self {
        Self {
            seen: number.map(|number| (number, now)).into_iter().collect(),
            shown: number.map(|_| now),
        }
    }

    fn take_in(&mut self, number: u64, now: Instant) -> Freshness {
        let highest = self.seen.back().map(|(highest, _)| *highest);
        if Some(number) >= highest {
            self.shown = Some(now);
        } else if is_forgotten(self.shown, now) {
            *self = Self::of(Some(number), now);
        }
        self.note(number, now);
        // Higher numbers follow, the earliest of them first.
        let overtaken = self.seen.iter().find(|(higher, _)| *higher > number);
        match overtaken {
            Some((_, since)) if now.saturating_duration_since(*since) >= LAG_MAX => {
                Freshness::Lagging
            }
            Some(_) | None => Freshness::Fresh,
        }
    }

    fn note(&mut self, number: u64, now: Instant) {
        if let Some((highest, since)) = self.seen.back_mut() {
            if number <= *highest {
                return;
            }
            if now.saturating_duration_since(*since) < GRAIN {
                *highest = number;
                return;
            }
        }
        self.seen.push_back((number, now));
        // The second entry is older than the bound too: it alone decides for all numbers below it.
        while let Some((_, since)) = self.seen.get(1)
            && now.saturating_duration_since(*since) >= LAG_MAX
        {
            self.seen.pop_front();
        }
    }
}

/// The highest position of the log that answers have shown. Positions of a log that was created
/// earlier count as lower.
#[derive(Clone, Debug, Default)]
struct PositionsSeen {
    log: Option<StreamIdentity>,
    positions: NumbersSeen,
    /// When an answer last showed this log.
    shown: Option<Instant>,
}

impl PositionsSeen {
    fn observe(&mut self, log: StreamIdentity, position: LogPosition, now: Instant) -> Freshness {
        if log.is_of_one_reader() {
            // Only numbers of records show which replica is behind.
            self.log = Some(log);
            return Freshness::Fresh;
        }
        let of = |log: StreamIdentity| (log.created_unix_ns, log.nonce);
        let (known, new) = (self.log.map(of), Some(of(log)));
        if new < known && !is_forgotten(self.shown, now) {
            return Freshness::Lagging;
        }
        if new != known {
            self.log = Some(log);
            self.positions = NumbersSeen::default();
        }
        self.shown = Some(now);
        self.positions.take_in(position.0, now)
    }
}

#[cfg(test)]
mod tests;
