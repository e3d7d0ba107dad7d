//! Time that a source takes to generate an answer, learned from completed answers.
//!
//! Model of the mean time between tokens: `base + active requests × time for each`
//! ([`super::fit`]), with the same priors as [`super::ttft`]. Prefills of other requests between the
//! tokens are part of the measurements.

use std::time::Duration;

use super::fit::{Line, SourceFits};
use super::source_table::SourceId;

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
    /// Over active requests.
    pub fits: SourceFits,
    answer_tokens: f64,
}

impl Default for ItlModel {
    fn default() -> Self {
        Self {
            fits: SourceFits::new(PRIOR, SCATTER_REQUESTS),
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
        if answer.tokens >= LESSON_TOKENS_MIN {
            let secs = answer.decode.as_secs_f64() / tokens;
            self.fits.learn(source, answer.active_requests.into(), secs);
        }
    }

    /// Expected seconds of an answer from its first token to its end, with so many active requests.
    #[must_use]
    #[inline]
    pub fn decode_secs(&self, source: SourceId, active_requests: u32) -> f64 {
        self.answer_tokens * self.fits.line(source).at(f64::from(active_requests))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_table::SourceTable;
    use crate::testing::source_id;
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
        // 100 tokens, whose times the prior changes by less than 2 %.
        assert!((of(fast) - 1.0).abs() < 0.02, "{}", of(fast));
        assert!((of(slow) / 4.0 - 1.0).abs() < 0.02, "{}", of(slow));
        assert!((of(fast)..of(slow)).contains(&of(unseen)), "{}", of(unseen));
        itl.fits.restarted(slow);
        assert_eq!(itl.fits.line(slow), itl.fits.line(unseen));
    }

    #[test]
    fn short_answers_teach_their_length_alone() {
        let id = source_id();
        let mut itl = ItlModel::default();
        let before = itl.fits.line(id);
        for _ in 0..1000 {
            let answer = AnswerTiming {
                tokens: 1,
                decode: Duration::from_secs(9),
                active_requests: 1,
            };
            itl.learn(id, answer);
        }
        assert_eq!(itl.fits.line(id), before);
        assert!(itl.decode_secs(id, 0) < 2.0 * before.base_secs);
    }
}
