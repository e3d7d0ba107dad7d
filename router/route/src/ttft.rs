//! Time to first token of a source, learned from measured first tokens.
//!
//! Model: `overhead + tokens ahead × seconds per token`, both moving averages. Small prompts update
//! the overhead, large ones the rate. A source without measurements uses the fleet's averages.

use std::time::Duration;

use super::source_table::{PerSource, SourceId};

/// Below this many tokens ahead, the overhead of a step dominates.
const SMALL_TOKENS: u64 = 256;

/// Weight of a new measurement: the last ten or so decide.
const ALPHA: f64 = 0.2;

/// A longer measurement is ignored.
const LESSON_MAX: Duration = Duration::from_secs(600);

/// Before the first measurement: 50 ms and 10,000 tokens/s, a mid-sized model on one current GPU.
const OVERHEAD_SECS: f64 = 0.05;
const SECS_PER_TOKEN: f64 = 1e-4;

#[derive(Clone, Debug, Default)]
pub struct TtftModel {
    fleet: TtftLine,
    sources: PerSource<TtftLine>,
}

#[derive(Clone, Copy, Debug, Default)]
struct TtftLine {
    overhead_secs: Option<f64>,
    secs_per_token: Option<f64>,
}

impl TtftModel {
    /// Records a first token `elapsed` after sending, with `tokens` to prefill before it, its own
    /// included.
    pub fn learn(&mut self, source: SourceId, tokens: u64, elapsed: Duration) {
        if elapsed > LESSON_MAX {
            return;
        }
        let fallback = self.line(source);
        self.sources
            .get_mut(source)
            .learn(fallback, tokens, elapsed.as_secs_f64());
        self.fleet.learn(fallback, tokens, elapsed.as_secs_f64());
    }

    /// Expected time to first token with this many tokens to prefill.
    #[must_use]
    pub fn predict(&self, source: SourceId, tokens: u64) -> Duration {
        on(self.line(source), tokens)
    }

    /// Lower median of the expected times of these sources: of two, the faster one. Unlike the
    /// fleet's averages it does not depend on the number of requests that each source gets.
    #[must_use]
    pub fn typical(&self, sources: impl Iterator<Item = SourceId>, tokens: u64) -> Duration {
        let mut each: Vec<Duration> = sources.map(|source| self.predict(source, tokens)).collect();
        let Some(middle) = each.len().checked_sub(1).map(|last| last / 2) else {
            return on(self.fleet.or_default(), tokens);
        };
        let (_, median, _) = each.select_nth_unstable(middle);
        *median
    }

    fn line(&self, source: SourceId) -> (f64, f64) {
        let own = self.sources.get(source).copied().unwrap_or_default();
        let (overhead, per_token) = self.fleet.or_default();
        (
            own.overhead_secs.unwrap_or(overhead),
            own.secs_per_token.unwrap_or(per_token),
        )
    }
}

/// Time on a line.
fn on((overhead, per_token): (f64, f64), tokens: u64) -> Duration {
    let secs = overhead + per_token * tokens as f64;
    Duration::try_from_secs_f64(secs)
        .unwrap_or(LESSON_MAX)
        .min(LESSON_MAX)
}

impl TtftLine {
    fn or_default(self) -> (f64, f64) {
        (
            self.overhead_secs.unwrap_or(OVERHEAD_SECS),
            self.secs_per_token.unwrap_or(SECS_PER_TOKEN),
        )
    }

    fn learn(&mut self, (overhead, per_token): (f64, f64), tokens: u64, secs: f64) {
        let tokens_f = tokens as f64;
        if tokens < SMALL_TOKENS {
            blend(&mut self.overhead_secs, secs - per_token * tokens_f);
        } else {
            blend(&mut self.secs_per_token, (secs - overhead) / tokens_f);
        }
    }
}

fn blend(average: &mut Option<f64>, lesson: f64) {
    let lesson = lesson.max(0.0);
    *average = Some(match *average {
        Some(old) => old + ALPHA * (lesson - old),
        None => lesson,
    });
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
        for _ in 0..50 {
            ttft.learn(a, 0, Duration::from_millis(20));
            ttft.learn(a, 4000, Duration::from_millis(220));
        }
        near(ttft.predict(a, 0), 20);
        near(ttft.predict(a, 20_000), 1020);
        // The other source has no measurement of its own.
        near(ttft.predict(b, 20_000), 1020);
    }

    #[test]
    fn a_slow_source_is_learned_apart_from_the_fleet() {
        let (a, b) = sources();
        let mut ttft = TtftModel::default();
        for _ in 0..50 {
            ttft.learn(a, 0, Duration::ZERO);
            ttft.learn(b, 0, Duration::ZERO);
            ttft.learn(a, 1000, Duration::from_millis(100));
            ttft.learn(b, 1000, Duration::from_millis(1000));
        }
        near(ttft.predict(a, 1000), 100);
        near(ttft.predict(b, 1000), 1000);
    }

    #[test]
    fn the_faster_of_two_sources_is_typical() {
        let (a, b) = sources();
        let mut ttft = TtftModel::default();
        for _ in 0..50 {
            ttft.learn(a, 1000, Duration::from_millis(150));
        }
        for _ in 0..50 {
            ttft.learn(b, 1000, Duration::from_millis(1050));
        }
        near(ttft.typical([a, b].into_iter(), 1000), 150);
        near(ttft.typical([b].into_iter(), 1000), 1050);
        near(TtftModel::default().typical([].into_iter(), 10_000), 1050);
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
