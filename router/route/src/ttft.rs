//! Time to first token of a source, learned from measured first tokens.
//!
//! Model: `overhead + tokens ahead × seconds per token` ([`super::fit`]). The prior of a source is
//! the fleet's line, and the prior of the fleet a mid-sized model on one current GPU.

use std::time::Duration;

use super::fit::{Line, SourceFits};
use super::source_table::SourceId;

/// A longer measurement is ignored.
const LESSON_MAX: Duration = Duration::from_secs(600);

/// Below this many tokens ahead, the overhead of a step dominates.
const SCATTER_TOKENS: f64 = 1024.0;

/// Sources whose times [`TtftModel::typical`] compares: the median of a fleet needs no more.
const SAMPLED_MAX: usize = 64;

/// Before the first measurement: 50 ms and 10,000 tokens/s.
const PRIOR: Line = Line {
    base_secs: 0.05,
    secs_each: 1e-4,
};

#[derive(Clone, Debug)]
pub struct TtftModel {
    /// Over tokens ahead.
    pub fits: SourceFits,
}

impl Default for TtftModel {
    fn default() -> Self {
        Self {
            fits: SourceFits::new(PRIOR, SCATTER_TOKENS),
        }
    }
}

impl TtftModel {
    /// Records a first token `elapsed` after sending, with `tokens` to prefill before it, its own
    /// included.
    pub fn learn(&mut self, source: SourceId, tokens: u64, elapsed: Duration) {
        if elapsed <= LESSON_MAX {
            let (tokens, secs) = (tokens as f64, elapsed.as_secs_f64());
            self.fits.learn(source, tokens, secs);
        }
    }

    /// Expected time to first token with this many tokens to prefill.
    #[must_use]
    pub fn predict(&self, source: SourceId, tokens: u64) -> Duration {
        duration(self.fits.line(source).at(tokens as f64))
    }

    /// Lower median of the expected times of these sources: of two, the faster one. Unlike the
    /// fleet's line it does not depend on the number of requests that each source gets. With no
    /// source the result is ten minutes. At most 64 sources count, evenly spread.
    #[must_use]
    pub fn typical(
        &self,
        sources: impl ExactSizeIterator<Item = SourceId>,
        tokens: u64,
    ) -> Duration {
        let at = |source| self.fits.line(source).at(tokens as f64);
        let step = sources.len().div_ceil(SAMPLED_MAX).max(1);
        let mut each: Vec<f64> = sources.step_by(step).map(at).collect();
        let Some(middle) = each.len().checked_sub(1).map(|last| last / 2) else {
            return LESSON_MAX;
        };
        let (_, median, _) = each.select_nth_unstable_by(middle, f64::total_cmp);
        duration(*median)
    }
}

fn duration(secs: f64) -> Duration {
    Duration::try_from_secs_f64(secs)
        .unwrap_or(LESSON_MAX)
        .min(LESSON_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_table::SourceTable;
    use warmroute_proto::{DpRank, Source};

    fn sources() -> (SourceId, SourceId) {
        let mut table = SourceTable::default();
        let mut intern = |name: &str| {
            table.intern(&Source {
                worker: name.into(),
                dp_rank: DpRank(0),
            })
        };
        (intern("a"), intern("b"))
    }

    fn near(found: Duration, expected_ms: u64) {
        let expected = Duration::from_millis(expected_ms);
        let off = found.abs_diff(expected);
        assert!(off < expected / 50, "{found:?} for {expected:?}");
    }

    #[test]
    fn an_unknown_source_has_a_plausible_prediction() {
        let (a, _) = sources();
        near(TtftModel::default().predict(a, 10_000), 1050);
    }

    #[test]
    fn overhead_and_rate_are_learned_apart() {
        let (a, b) = sources();
        let mut ttft = TtftModel::default();
        for _ in 0..200 {
            ttft.learn(a, 0, Duration::from_millis(20));
            ttft.learn(a, 4000, Duration::from_millis(220));
        }
        near(ttft.predict(a, 0), 20);
        near(ttft.predict(a, 20_000), 1020);
        // The other source has no measurement of its own.
        near(ttft.predict(b, 20_000), 1020);
    }

    #[test]
    fn the_faster_of_two_sources_is_typical() {
        let (a, b) = sources();
        let mut ttft = TtftModel::default();
        for _ in 0..200 {
            ttft.learn(a, 1000, Duration::from_millis(150));
        }
        for _ in 0..200 {
            ttft.learn(b, 1000, Duration::from_millis(1050));
        }
        near(ttft.typical([a, b].into_iter(), 1000), 150);
        near(ttft.typical([b].into_iter(), 1000), 1050);
    }

    #[test]
    fn absurd_lessons_leave_a_finite_prediction() {
        let (a, _) = sources();
        let mut ttft = TtftModel::default();
        ttft.learn(a, u64::MAX, Duration::ZERO);
        ttft.learn(a, 0, Duration::MAX);
        ttft.learn(a, 300, LESSON_MAX);
        assert!(ttft.predict(a, u64::MAX) <= LESSON_MAX);
    }
}
