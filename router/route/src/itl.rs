//! Time that a source takes to generate an answer, learned from completed answers.
//!
//! Model of the mean time between tokens: `base + active requests × time for each`
//! ([`super::fit`]), with the same priors as [`super::ttft`]. Prefills of other requests between the
//! tokens are part of the measurements.

use std::time::Duration;

use super::fit::{DecayingFit, Line};
use super::source_table::{PerSource, SourceId};

const SCATTER_REQUESTS: f64 = 16.0;

/// Before the first measurement: 10 ms and 0.1 ms for each active request.
const PRIOR: Line = Line {
    base_secs: 0.01,
    secs_each: 1e-4,
};

/// Shorter answers say little: the count of their tokens is known to a block only.
const LESSON_TOKENS_MIN: u64 = 32;

/// Weight of a new answer's length.
const ALPHA: f64 = 0.02;

/// Tokens of an answer before the first one.
const ANSWER_TOKENS: f64 = 200.0;

#[derive(Clone, Debug)]
pub struct ItlModel {
    fleet: DecayingFit,
    sources: PerSource<Option<DecayingFit>>,
    answer_tokens: f64,
}

impl Default for ItlModel {
    fn default() -> Self {
        Self {
            fleet: DecayingFit::new(PRIOR, SCATTER_REQUESTS),
            sources: PerSource::default(),
            answer_tokens: ANSWER_TOKENS,
        }
    }
}

/// A completed answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerTiming {
    pub tokens: u64,
    /// From its first token to its end.
    pub decode: Duration,
    /// Active requests of the source, itself included.
    pub active_requests: u32,
}

impl ItlModel {
    pub fn learn(&mut self, source: SourceId, answer: AnswerTiming) {
        let tokens = answer.tokens as f64;
        self.answer_tokens += ALPHA * (tokens - self.answer_tokens);
        if answer.tokens < LESSON_TOKENS_MIN {
            return;
        }
        let (active, secs) = (
            f64::from(answer.active_requests),
            answer.decode.as_secs_f64() / tokens,
        );
        let fleet = self.fleet.line();
        let own = self.sources.get_mut(source);
        own.get_or_insert_with(|| DecayingFit::new(fleet, SCATTER_REQUESTS))
            .learn(fleet, active, secs);
        self.fleet.learn(PRIOR, active, secs);
    }

    /// Like [`super::ttft::TtftModel::fade`].
    pub fn fade(&mut self, keep: f64) {
        let fleet = self.fleet.line();
        for fit in self.sources.iter_mut().flatten() {
            fit.fade(fleet, keep);
        }
    }

    /// Resets a source, whose engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        *self.sources.get_mut(source) = None;
    }

    /// Expected seconds of an answer from its first token to its end, with so many active requests.
    #[must_use]
    pub fn decode_secs(&self, source: SourceId, active_requests: u32) -> f64 {
        self.answer_tokens * self.line(source).at(f64::from(active_requests))
    }

    /// What the source's times between tokens are fitted to, over active requests.
    #[must_use]
    pub fn line(&self, source: SourceId) -> Line {
        let own = self.sources.get(source).and_then(Option::as_ref);
        own.map_or_else(|| self.fleet.line(), DecayingFit::line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_table::SourceTable;
    use warmroute_proto::{DpRank, Source};

    #[test]
    fn a_source_with_slower_steps_is_expected_to_take_longer() {
        let mut table = SourceTable::default();
        let mut intern = |name: &str| {
            table.intern(&Source {
                worker: name.into(),
                dp_rank: DpRank(0),
            })
        };
        let (fast, slow, unseen) = (intern("a"), intern("b"), intern("c"));
        let mut itl = ItlModel::default();
        for turn in 0..400 {
            for (source, millis) in [(fast, 10), (slow, 40)] {
                let answer = AnswerTiming {
                    tokens: 100,
                    decode: Duration::from_millis(100 * millis),
                    active_requests: 1 + turn % 30,
                };
                itl.learn(source, answer);
            }
        }
        let of = |source| itl.decode_secs(source, 8);
        assert!((0.9..1.2).contains(&of(fast)), "{}", of(fast));
        assert!((3.5..4.4).contains(&of(slow)), "{}", of(slow));
        assert!((of(fast)..of(slow)).contains(&of(unseen)), "{}", of(unseen));
        itl.restarted(slow);
        assert_eq!(itl.line(slow), itl.line(unseen));
    }

    #[test]
    fn short_answers_teach_their_length_alone() {
        let id = SourceTable::default().intern(&Source {
            worker: "w".into(),
            dp_rank: DpRank(0),
        });
        let mut itl = ItlModel::default();
        let before = itl.line(id);
        for _ in 0..1000 {
            let answer = AnswerTiming {
                tokens: 1,
                decode: Duration::from_secs(9),
                active_requests: 1,
            };
            itl.learn(id, answer);
        }
        assert_eq!(itl.line(id), before);
        assert!(itl.decode_secs(id, 0) < 2.0 * before.base_secs);
    }
}
