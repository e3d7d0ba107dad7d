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
