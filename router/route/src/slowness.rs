//! Which sources are slower than the others: their first tokens against what was predicted of them.
//!
//! A cost counts blocks, as if each took the same time everywhere. A throttled accelerator, a noisy
//! neighbour or an older card takes a multiple of it with its health check green. So each first token
//! teaches how its time compares to what the median of those that could have taken the request would
//! have needed for as many tokens ahead ([`super::ttft::TtftModel::typical`]).
//!
//! Up to twice that is chance: queues, preemptions and batches make single first tokens late by a factor of
//! two or three. What was learned decays, so that a source which nobody uses any more is tried again. A
//! source that gives no first token at all is a stall's matter ([`super::stall`]).

use std::time::{Duration, Instant};

use super::source_table::{PerSource, SourceId};

/// The weight of a new lesson: the last twenty or so decide.
const ALPHA: f64 = 0.1;

/// What was learned is half forgotten after this long without a lesson.
const HALF_LIFE: Duration = Duration::from_secs(300);

/// Times below this are alike: a step of the engine more or less.
const ALIKE_SECS: f64 = 0.02;

/// So many times the others' time is not slow yet, and so many counts in full; between them a part.
const SLOW: f64 = 2.0;
const SLOW_IN_FULL: f64 = 3.0;

/// The logarithm of [`SLOW`].
const SLOW_LOG: f64 = std::f64::consts::LN_2;

/// What is slower is a stall.
const SLOWNESS_MAX: f64 = 10.0;

#[derive(Clone, Debug, Default)]
pub struct SlownessTracker(PerSource<Option<SourceSlowness>>);

#[derive(Clone, Copy, Debug)]
struct SourceSlowness {
    /// The average logarithm of observed over predicted, as of `at`. It begins at none: who is new is like
    /// the others until shown otherwise.
    log: f64,
    at: Instant,
}

impl SlownessTracker {
    /// A first token came after `elapsed`; of the others, `predicted` was to be expected.
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

    /// No first token came within `elapsed`, and none will: it would have been later than that. Clients
    /// that do not wait for a slow source would else keep it from being known as one.
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

    /// What it taught may not hold any more: the engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        *self.0.get_mut(source) = None;
    }

    /// Observed over predicted time to first token, averaged. None: there was none yet.
    #[must_use]
    pub fn ratio(&self, source: SourceId, now: Instant) -> Option<f64> {
        let pace = self.0.get(source).copied().flatten()?;
        Some(pace.faded(now).exp())
    }

    /// What its cost is multiplied with: 1 unless it is slow.
    #[must_use]
    pub fn slowness(&self, source: SourceId, now: Instant) -> f64 {
        // Of most sources nothing has to be computed: what fades comes nearer to none.
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

/// Of a ratio to the others: continuous, so that nothing flaps at a threshold.
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

        /// First tokens that took so many times what was predicted.
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
        // Nor are the first few of a new source.
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
    fn a_slow_source_that_nobody_uses_is_tried_again_and_one_that_is_fast_again_is_soon_forgiven() {
        let mut fleet = WorkerDirectory::of(3);
        for (source, times) in [(0, 1.0), (1, 1.0), (2, 5.0)] {
            fleet.teach(source, 50, times);
        }
        assert!(fleet.slowness()[2] > 4.0);
        fleet.now += 2 * HALF_LIFE;
        assert_eq!(fleet.slowness()[2], 1.0);
        // A few more late ones, and it is known again.
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
    fn who_is_given_up_teaches_that_it_is_at_least_so_late() {
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
        // Less patience is no better news.
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
