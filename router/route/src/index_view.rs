//! The part of the index's answers that the router trusts.
//!
//! Any index replica may answer, and replicas lag. Per source the view keeps the highest
//! (generation, number) seen. An answer of a lower generation is `stale`. A lower number of the
//! same generation is trusted until [`LAG_MAX`] after a higher one was first seen, then it is
//! `stale`. A source that this router demoted is `stale` until its next generation, or until it is
//! reinstated; the credit that it would have is kept apart. A state is only ever lowered.
//!
//! The highest number of a source expires after [`ANSWER_MEMORY`] without an answer that reaches
//! it: registry and log, which count generations and numbers, may have been lost and recreated. A
//! restarted router knows as little, and each answer itself was proven within 5 s.
//!
//! The view holds no blocks and sends no queries.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState};
use warmroute_proto::{EngineSeq, Generation, RecordNumber, Tier, Tiers};

use super::source_table::{PerSource, SourceId, SourceTable};

/// Longest lag behind the freshest replica at which an answer is trusted.
pub const LAG_MAX: Duration = Duration::from_millis(500);

/// Time after which the highest number of a source expires.
pub const ANSWER_MEMORY: Duration = Duration::from_secs(30);

/// Numbers first seen within this time are kept as one, with the time of the first. Bounds the
/// memory to 51 entries a source; trust may end this much early.
const GRAIN: Duration = Duration::from_millis(10);

#[derive(Clone, Debug, Default)]
pub struct IndexView {
    sources: PerSource<SourceFreshness>,
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
    /// Number of applied records, and when an answer first showed it; both ascend. The first entry
    /// is older than [`LAG_MAX`] or the only one.
    seen: VecDeque<(u64, Instant)>,
    /// When an answer last showed the highest number.
    shown: Option<Instant>,
    demoted: Option<Generation>,
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
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: Tiers<SourceState>,
    /// Credited blocks, uncapped; 0 in a tier whose state gives no credit.
    pub run: Tiers<u32>,
    /// What a demotion took.
    pub demoted: Option<DemotedCredit>,
}

/// The credit of a demoted source, for comparison only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DemotedCredit {
    pub state: SourceState,
    pub run: Tiers<u32>,
}

impl TrustedAnswer {
    /// Returns `None` without an answer, or if the index does not know the source.
    #[must_use]
    pub fn of(&self, source: SourceId) -> Option<&TrustedSource> {
        self.sources.get(source)?.as_ref()
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

    fn of(answer: &SourceAnswer) -> Self {
        let Tiers { gpu, cpu, disk } = answer.states;
        let credited = |state: SourceState, run| if state.gives_credit() { run } else { 0 };
        Self {
            generation: answer.generation,
            number: answer.number,
            engine_seq: answer.engine_seq,
            states: answer.states,
            demoted: None,
            run: Tiers {
                gpu: credited(gpu, answer.run.gpu),
                cpu: credited(cpu, answer.run.cpu),
                disk: credited(disk, answer.run.disk),
            },
        }
    }

    fn lower_to_stale(&mut self) {
        self.states = self.states.map(|state| state.weakest(SourceState::Stale));
        self.run = Tiers::default();
    }
}

impl IndexView {
    /// Reduces an answer to what is trusted. An answer of a replica behind the requested position
    /// contains nothing.
    pub fn judge(
        &mut self,
        table: &mut SourceTable,
        answer: &IndexAnswer,
        now: Instant,
    ) -> TrustedAnswer {
        let mut trusted = TrustedAnswer::default();
        let sources = match answer {
            IndexAnswer::Runs { sources, .. } => sources.as_slice(),
            IndexAnswer::Behind { .. } => &[],
        };
        for answer in sources {
            let id = table.intern(&answer.source);
            let mut known = TrustedSource::of(answer);
            let freshness = self.sources.get_mut(id);
            match freshness.take_in(answer, now) {
                Freshness::Restarted => trusted.restarted.push(id),
                Freshness::Fresh => {}
                Freshness::Lagging => {
                    self.counts.lagging += 1;
                    known.lower_to_stale();
                }
            }
            if freshness.demotion().is_some() {
                let (state, run) = (known.state(), known.run);
                known.demoted = Some(DemotedCredit { state, run });
                known.lower_to_stale();
            }
            *trusted.sources.get_mut(id) = Some(known);
        }
        trusted
    }

    /// Distrusts a source until a generation above this one.
    pub fn demote(&mut self, source: SourceId, generation: Generation) {
        let freshness = self.sources.get_mut(source);
        if freshness.demoted.is_none_or(|at| at < generation) {
            freshness.demoted = Some(generation);
            self.counts.demoted += 1;
        }
    }

    /// Ends a demotion. Returns whether there was one.
    pub fn reinstate(&mut self, source: SourceId) -> bool {
        let freshness = self.sources.get_mut(source);
        let demotion = freshness.demotion();
        freshness.demoted = None;
        demotion.is_some()
    }

    /// The demoted sources with their generations.
    pub fn demoted(&self) -> impl Iterator<Item = (SourceId, Generation)> {
        let all = self.sources.iter();
        all.filter_map(|(id, freshness)| Some((id, freshness.demotion()?)))
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
    /// A newer generation than any seen before; not for the first one.
    Restarted,
    Lagging,
}

impl SourceFreshness {
    /// The generation in which it is demoted now.
    fn demotion(&self) -> Option<Generation> {
        self.demoted.filter(|at| self.generation <= Some(*at))
    }

    fn take_in(&mut self, answer: &SourceAnswer, now: Instant) -> Freshness {
        // 0 before the first record of a generation, n + 1 after number n.
        let applied = answer.number.map_or(0, |number| number.0.saturating_add(1));
        let highest = self.seen.back().map(|(number, _)| *number);
        if (Some(answer.generation), Some(applied)) >= (self.generation, highest) {
            self.shown = Some(now);
        } else if self.is_forgotten(now) {
            let demoted = self.demoted.filter(|at| *at <= answer.generation);
            *self = Self {
                generation: Some(answer.generation),
                seen: VecDeque::from([(applied, now)]),
                shown: Some(now),
                demoted,
            };
            return Freshness::Restarted;
        }
        match self.generation {
            Some(known) if answer.generation < known => return Freshness::Lagging,
            Some(known) if answer.generation == known => {}
            known @ (Some(_) | None) => {
                self.generation = Some(answer.generation);
                self.seen.clear();
                self.seen.push_back((applied, now));
                return match known {
                    Some(_) => Freshness::Restarted,
                    None => Freshness::Fresh,
                };
            }
        }
        self.first_seen(applied, now);
        // Higher numbers follow, the earliest of them first.
        let overtaken = self.seen.iter().find(|(number, _)| *number > applied);
        match overtaken {
            Some((_, since)) if now.saturating_duration_since(*since) >= LAG_MAX => {
                Freshness::Lagging
            }
            Some(_) | None => Freshness::Fresh,
        }
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        let shown = self.shown.map(|at| now.saturating_duration_since(at));
        shown.is_none_or(|ago| ago >= ANSWER_MEMORY)
    }

    fn first_seen(&mut self, applied: u64, now: Instant) {
        if let Some((highest, since)) = self.seen.back_mut() {
            if applied <= *highest {
                return;
            }
            if now.saturating_duration_since(*since) < GRAIN {
                *highest = applied;
                return;
            }
        }
        self.seen.push_back((applied, now));
        // The second entry is older than the bound too: it alone decides for all numbers below it.
        while let Some((_, since)) = self.seen.get(1)
            && now.saturating_duration_since(*since) >= LAG_MAX
        {
            self.seen.pop_front();
        }
    }
}

#[cfg(test)]
mod tests;
