//! What the router believes of the index's answers.
//!
//! Any replica may answer, and some lag. Per source the highest (generation, number) seen is kept: an
//! answer of a lower generation is `stale`; a lower number of the same generation is believed while
//! every higher one was first seen less than [`LAG_MAX`] ago, afterwards it is `stale`. A source
//! that was demoted here is `stale` until its next generation, whoever answers. What is lowered is
//! never raised.
//!
//! What no answer has shown for [`ANSWER_MEMORY`] is forgotten: whatever counts generations and numbers may
//! have been lost with the registry and the log, and begun anew. A router that just started knows no
//! more, and what an answer itself claims was proven within the last 5 s.
//!
//! It holds no blocks and asks nothing: an answer comes in, [`TrustedAnswer`] comes out.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState};
use warmroute_proto::{EngineSeq, Generation, Tiers};

use super::source_table::{PerSource, SourceId, SourceTable};

/// How far behind the freshest replica one may lag and still be believed.
pub const LAG_MAX: Duration = Duration::from_millis(500);

/// The highest number of a source that was not shown for so long is not waited for any more.
pub const ANSWER_MEMORY: Duration = Duration::from_secs(30);

/// Numbers first seen within this time are kept as one, with the oldest's time: bounds the memory to
/// 51 entries a source, and at worst ends a freshness this much early.
const GRAIN: Duration = Duration::from_millis(10);

#[derive(Clone, Debug, Default)]
pub struct IndexView {
    sources: PerSource<SourceFreshness>,
    counts: IndexViewCounts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexViewCounts {
    /// Source answers that were `stale` for an old generation or number.
    pub lagging: u64,
    /// Sources that this router does not believe any more, so far.
    pub demoted: u64,
}

#[derive(Clone, Debug, Default)]
struct SourceFreshness {
    generation: Option<Generation>,
    /// Records applied, and when an answer first showed that many; ascending in both. The first is
    /// older than [`LAG_MAX`] or the only one.
    seen: VecDeque<(u64, Instant)>,
    /// When an answer last showed the highest of them.
    shown: Option<Instant>,
    demoted: Option<Generation>,
}

/// One answer as it is believed, by source.
#[derive(Clone, Debug, Default)]
pub struct TrustedAnswer {
    sources: PerSource<Option<TrustedSource>>,
    /// Sources whose generation is newer than ever before: what was expected there is void.
    pub restarted: Vec<SourceId>,
}

/// What is believed of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrustedSource {
    pub generation: Generation,
    pub engine_seq: Option<EngineSeq>,
    pub states: Tiers<SourceState>,
    /// Credited blocks, uncapped; 0 in a tier whose state gives no credit.
    pub run: Tiers<u32>,
}

impl TrustedAnswer {
    /// `None`: no answer came, or the index does not know the source.
    #[must_use]
    pub fn of(&self, source: SourceId) -> Option<&TrustedSource> {
        self.sources.get(source)?.as_ref()
    }

    /// All that something is believed of.
    pub fn all(&self) -> impl Iterator<Item = (SourceId, &TrustedSource)> {
        let all = self.sources.iter();
        all.filter_map(|(id, known)| Some((id, known.as_ref()?)))
    }
}

impl TrustedSource {
    /// The source's one-word state.
    #[must_use]
    pub const fn state(&self) -> SourceState {
        self.states.gpu
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
            engine_seq: answer.engine_seq,
            states: answer.states,
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
    /// Judges an answer. One from a replica that was behind the asked position says nothing.
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
            if freshness.demoted.is_some_and(|at| answer.generation <= at) {
                known.lower_to_stale();
            }
            *trusted.sources.get_mut(id) = Some(known);
        }
        trusted
    }

    /// Stops believing a source until a generation above this one.
    pub fn demote(&mut self, source: SourceId, generation: Generation) {
        let freshness = self.sources.get_mut(source);
        if freshness.demoted.is_none_or(|at| at < generation) {
            freshness.demoted = Some(generation);
            self.counts.demoted += 1;
        }
    }

    #[must_use]
    pub const fn counts(&self) -> IndexViewCounts {
        self.counts
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freshness {
    Fresh,
    /// A newer generation than any seen; not said of the first one.
    Restarted,
    Lagging,
}

impl SourceFreshness {
    fn take_in(&mut self, answer: &SourceAnswer, now: Instant) -> Freshness {
        // Before the first record of a generation nothing is applied: 0; after number n: n + 1.
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
        // The higher ones stand behind it, the one seen first in front of them.
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
        // The second one is over the bound as well: it alone decides for everything below it.
        while let Some((_, since)) = self.seen.get(1)
            && now.saturating_duration_since(*since) >= LAG_MAX
        {
            self.seen.pop_front();
        }
    }
}

#[cfg(test)]
mod tests;
