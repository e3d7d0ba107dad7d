//! Sources that are slower than the others, by measured time to first token.
//!
//! Costs count blocks as if each took equally long everywhere. A throttled accelerator, a noisy
//! neighbour or an older card takes a multiple of that while its health check succeeds. Each first
//! token is therefore compared with the time that the median of all candidates would have needed
//! for as many tokens ([`super::ttft::TtftModel::typical`]).
//!
//! A factor of up to two is noise: queues, preemptions and batches delay single first tokens by a
//! factor of two or three. The average decays, so that an unused source is tried again. A source
//! without any first token is a stall ([`super::stall`]).

use std::time::{Duration, Instant};

use super::source_table::{PerSource, SourceId};

/// Weight of a new measurement: the last twenty or so decide.
const ALPHA: f64 = 0.1;

/// Without measurements the average decays by half in this time.
const HALF_LIFE: Duration = Duration::from_secs(300);

/// Differences below this are ignored: one step of the engine.
const ALIKE_SECS: f64 = 0.02;

/// From this ratio on a source is slow, and from the second on the ratio counts in full.
const SLOW: f64 = 2.0;
const SLOW_IN_FULL: f64 = 3.0;

/// The logarithm of [`SLOW`].
const SLOW_LOG: f64 = std::f64::consts::LN_2;

/// Slower sources stall.
const SLOWNESS_MAX: f64 = 10.0;

#[derive(Clone, Debug, Default)]
pub struct SlownessTracker(PerSource<Option<SourceSlowness>>);

#[derive(Clone, Copy, Debug)]
struct SourceSlowness {
    /// Average logarithm of observed over expected time, as of `at`; 0 at first.
    log: f64,
    at: Instant,
}

impl SlownessTracker {
    /// Records a first token after `elapsed`; a typical source would have needed `predicted`.
    pub fn learn(
        &mut self,
        source: SourceId,
        predicted: Duration,
        elapsed: Duration,
        now: Instant,
    ) {
        let lesson = ratio(predicted, elapsed)
            .ln()
            .clamp(-SLOWNESS_MAX.ln(), SLOWNESS_MAX.ln());
        let pace = self.0.get_mut(source);
        let log = pace.map_or(0.0, |pace| pace.faded(now));
        *pace = Some(SourceSlowness {
            log: log + ALPHA * (lesson - log),
            at: now,
        });
    }

    /// Records a request that was given up after `elapsed` without a first token. It counts if it
    /// proves the source slower than known: clients that give up would otherwise hide a slow
    /// source.
    pub fn gave_up(
        &mut self,
        source: SourceId,
        predicted: Duration,
        elapsed: Duration,
        now: Instant,
    ) {
        let known = self.ratio(source, now).unwrap_or(1.0);
        if ratio(predicted, elapsed) > known {
            self.learn(source, predicted, elapsed, now);
        }
    }

    /// Resets a source, whose engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        *self.0.get_mut(source) = None;
    }

    /// Average of observed over expected time to first token; `None` before the first.
    #[must_use]
    pub fn ratio(&self, source: SourceId, now: Instant) -> Option<f64> {
        let pace = self.0.get(source).copied().flatten()?;
        Some(pace.faded(now).exp())
    }

    /// Factor of the source's cost: 1 unless it is slow.
    #[must_use]
    pub fn slowness(&self, source: SourceId, now: Instant) -> f64 {
        // The average only decays towards 0, so most sources need no exponential.
        match self.0.get(source) {
            Some(Some(pace)) if pace.log > SLOW_LOG => factor(pace.faded(now).exp()),
            Some(_) | None => 1.0,
        }
    }
}

impl SourceSlowness {
    fn faded(&self, now: Instant) -> f64 {
        let idle = now.saturating_duration_since(self.at);
        self.log * 0.5_f64.powf(idle.as_secs_f64() / HALF_LIFE.as_secs_f64())
    }
}

fn ratio(predicted: Duration, elapsed: Duration) -> f64 {
    (elapsed.as_secs_f64() + ALIKE_SECS) / (predicted.as_secs_f64() + ALIKE_SECS)
}

/// Factor for a ratio. Continuous, so that no source flaps at a threshold.
fn factor(ratio: f64) -> f64 {
    let part = ((ratio - SLOW) / (SLOW_IN_FULL - SLOW)).clamp(0.0, 1.0);
    (1.0 + part * (ratio - 1.0)).min(SLOWNESS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_table::SourceTable;
    use warmroute_proto::{DpRank, Source};

    const PREDICTED: Duration = Duration::from_millis(500);

    struct WorkerDirectory {
        slowness_tracker: SlownessTracker,
        sources: Vec<SourceId>,
        now: Instant,
    }

    impl WorkerDirectory {
        #[expect(clippy::disallowed_methods, reason = "only differences matter")]
        fn of(count: u32) -> Self {
            let mut table = SourceTable::default();
            let source = |rank| Source {
                worker: "w".into(),
                dp_rank: DpRank(rank),
            };
            let sources = (0..count).map(|rank| table.intern(&source(rank))).collect();
            Self {
                slowness_tracker: SlownessTracker::default(),
                sources,
                now: Instant::now(),
            }
        }

        /// Records first tokens that took `times` the expected time.
        fn teach(&mut self, source: usize, lessons: u32, times: f64) {
            for _ in 0..lessons {
                self.now += Duration::from_millis(100);
                let took = PREDICTED.mul_f64(times);
                self.slowness_tracker
                    .learn(self.sources[source], PREDICTED, took, self.now);
            }
        }

        fn slowness(&self) -> Vec<f64> {
            let each = self.sources.iter();
            each.map(|&source| self.slowness_tracker.slowness(source, self.now))
                .collect()
        }
    }

    #[test]
    fn a_slow_source_costs_by_how_slow_it_is_and_only_it() {
        let mut fleet = WorkerDirectory::of(4);
        assert_eq!(fleet.slowness(), [1.0; 4]);
        for source in 0..3 {
            fleet.teach(source, 50, 1.5);
        }
        fleet.teach(3, 50, 6.0);
        let slowness = fleet.slowness();
        assert_eq!(slowness[..3], [1.0; 3]);
        assert!((5.0..6.1).contains(&slowness[3]), "{slowness:?}");
        let ratio = fleet.slowness_tracker.ratio(fleet.sources[3], fleet.now);
        assert!(
            ratio.is_some_and(|ratio| (5.0..6.1).contains(&ratio)),
            "{ratio:?}"
        );
    }

    #[test]
    fn what_chance_makes_of_single_first_tokens_is_not_slow() {
        let mut fleet = WorkerDirectory::of(2);
        fleet.teach(0, 50, 1.0);
        fleet.teach(1, 50, 1.9);
        assert_eq!(fleet.slowness(), [1.0; 2]);
        fleet.teach(1, 1, 9.0);
        assert!(fleet.slowness()[1] < 1.5);
        // Neither is a new source after few measurements.
        let mut fleet = WorkerDirectory::of(2);
        assert_eq!(
            fleet.slowness_tracker.ratio(fleet.sources[1], fleet.now),
            None
        );
        fleet.teach(0, 50, 1.0);
        fleet.teach(1, 3, 9.0);
        assert_eq!(fleet.slowness(), [1.0; 2]);
    }

    #[test]
    fn an_unused_slow_source_is_tried_again_and_a_recovered_one_costs_less_soon() {
        let mut fleet = WorkerDirectory::of(3);
        for (source, times) in [(0, 1.0), (1, 1.0), (2, 5.0)] {
            fleet.teach(source, 50, times);
        }
        assert!(fleet.slowness()[2] > 4.0);
        fleet.now += 2 * HALF_LIFE;
        assert_eq!(fleet.slowness()[2], 1.0);
        // A few more late first tokens make it slow again.
        fleet.teach(2, 6, 5.0);
        assert!(fleet.slowness()[2] > 1.5, "{:?}", fleet.slowness());
        fleet.teach(2, 10, 1.0);
        assert_eq!(fleet.slowness()[2], 1.0);
    }

    #[test]
    fn small_differences_of_short_times_are_none_and_absurd_ones_are_bounded() {
        let mut fleet = WorkerDirectory::of(2);
        for _ in 0..50 {
            let (short, long) = (Duration::from_millis(2), Duration::from_millis(12));
            fleet
                .slowness_tracker
                .learn(fleet.sources[0], short, short, fleet.now);
            fleet
                .slowness_tracker
                .learn(fleet.sources[1], short, long, fleet.now);
        }
        assert_eq!(fleet.slowness(), [1.0; 2]);
        for times in [0.0, 1e9, 1e9] {
            fleet.teach(1, 100, times);
        }
        assert!((9.9..=SLOWNESS_MAX).contains(&fleet.slowness()[1]));
        fleet.slowness_tracker.restarted(fleet.sources[1]);
        assert_eq!(fleet.slowness(), [1.0; 2]);
    }

    #[test]
    fn a_request_that_is_given_up_counts_as_at_least_that_late() {
        let mut fleet = WorkerDirectory::of(1);
        let source = fleet.sources[0];
        for times in [0.0, 0.5, 0.9] {
            let waited = PREDICTED.mul_f64(times);
            fleet
                .slowness_tracker
                .gave_up(source, PREDICTED, waited, fleet.now);
        }
        assert_eq!(fleet.slowness_tracker.ratio(source, fleet.now), None);
        for _ in 0..50 {
            fleet
                .slowness_tracker
                .gave_up(source, PREDICTED, 4 * PREDICTED, fleet.now);
        }
        let slowness = fleet.slowness()[0];
        assert!((3.5..4.0).contains(&slowness), "{slowness}");
        // A shorter wait proves nothing.
        fleet
            .slowness_tracker
            .gave_up(source, PREDICTED, 2 * PREDICTED, fleet.now);
        assert_eq!(fleet.slowness(), [slowness]);
    }

    #[test]
    fn the_factor_is_continuous() {
        let near = |ratio: f64| (factor(ratio - 1e-9) - factor(ratio + 1e-9)).abs() < 1e-6;
        assert!([SLOW, SLOW_IN_FULL, SLOWNESS_MAX].into_iter().all(near));
        assert_eq!([0.1, 1.0, SLOW].map(factor), [1.0; 3]);
        assert_eq!(SLOW.ln(), SLOW_LOG);
        assert_eq!([SLOW_IN_FULL, 5.0, 1e9].map(factor), [3.0, 5.0, 10.0]);
    }
}
