//! Lines that are fitted to measurements online: one for each source, and the fleet's as their
//! prior.
//!
//! Weighted least squares whose older measurements decay, with a prior line as two further points:
//! few measurements stay near the prior, many outweigh it. A single outlier moves the line by a
//! bounded step.

use super::source_table::{PerSource, SourceId};

/// Weight that earlier measurements keep at a new one: the last thirty or so decide.
const KEEP: f64 = 0.97;

/// Weight of the prior's points against a measurement.
const PRIOR_WEIGHT: f64 = 0.1;

/// A measurement counts at most this many times its expected value.
const OUTLIER: f64 = 4.0;

/// Differences below this are never outliers, in seconds: a step of the engine.
const STEP_SECS: f64 = 0.02;

/// Seconds over a count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    pub base_secs: f64,
    pub secs_each: f64,
}

impl Line {
    #[must_use]
    pub fn at(self, count: f64) -> f64 {
        self.base_secs + self.secs_each * count
    }
}

/// A line for each source. A source without measurements has the fleet's.
#[derive(Clone, Debug)]
pub struct SourceFits {
    prior: Line,
    fleet: DecayingFit,
    sources: PerSource<Option<DecayingFit>>,
}

impl SourceFits {
    /// `prior` is the fleet's line before the first measurement. From the count `scatter` on, the
    /// scatter of a measurement is proportional to its count.
    #[must_use]
    pub fn new(prior: Line, scatter: f64) -> Self {
        Self {
            prior,
            fleet: DecayingFit::new(prior, scatter),
            sources: PerSource::default(),
        }
    }

    /// Adds a measurement to the source's line and to the fleet's.
    pub fn learn(&mut self, source: SourceId, count: f64, secs: f64) {
        let (fleet, scatter) = (self.fleet.line, self.fleet.scatter);
        let own = self.sources.get_mut(source);
        own.get_or_insert_with(|| DecayingFit::new(fleet, scatter))
            .learn(fleet, count, secs);
        self.fleet.learn(self.prior, count, secs);
    }

    /// Lets measurements of single sources lose weight: a source that was slow is tried again.
    pub fn fade(&mut self, keep: f64) {
        let fleet = self.fleet.line;
        for fit in self.sources.iter_mut().flatten() {
            fit.fade(fleet, keep);
        }
    }

    /// Resets a source, whose engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        *self.sources.get_mut(source) = None;
    }

    #[must_use]
    #[inline]
    pub fn line(&self, source: SourceId) -> Line {
        let own = self.sources.get(source).and_then(Option::as_ref);
        own.unwrap_or(&self.fleet).line
    }
}

/// A line that learns.
#[derive(Clone, Copy, Debug)]
struct DecayingFit {
    line: Line,
    /// From this count on, the scatter of a measurement is proportional to its count. It is also
    /// the count of the prior's second point.
    scatter: f64,
    sums: Sums,
    has_learned: HasLearned,
}

/// Whether a fit got a measurement since it last faded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HasLearned {
    Yes,
    No,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl DecayingFit {
    fn new(prior: Line, scatter: f64) -> Self {
        Self {
            line: prior,
            scatter,
            sums: Sums::default(),
            has_learned: HasLearned::No,
        }
    }

    /// Adds a measurement.
    fn learn(&mut self, prior: Line, count: f64, secs: f64) {
        self.has_learned = HasLearned::Yes;
        self.sums.scale(KEEP);
        let most = OUTLIER * self.line.at(count) + STEP_SECS;
        self.sums.add(count, secs.clamp(0.0, most), self.scatter);
        self.solve(prior);
    }

    /// Moves a line without measurements since the last call towards the prior, and lets the
    /// measurements lose weight against the next one.
    fn fade(&mut self, prior: Line, keep: f64) {
        if self.has_learned == HasLearned::No {
            self.sums.blend(prior, keep);
            self.sums.scale(keep);
            self.solve(prior);
        }
        self.has_learned = HasLearned::No;
    }

    fn solve(&mut self, prior: Line) {
        let mut all = self.sums;
        all.scale(1.0 / PRIOR_WEIGHT);
        all.add(0.0, prior.base_secs, self.scatter);
        all.add(self.scatter, prior.at(self.scatter), self.scatter);
        // The prior's two points keep the divisor positive.
        let slope = (all.weight * all.xy - all.x * all.y) / (all.weight * all.xx - all.x * all.x);
        let secs_each = slope.max(prior.secs_each / 100.0);
        self.line = Line {
            base_secs: ((all.y - secs_each * all.x) / all.weight).max(0.0),
            secs_each,
        };
    }
}

impl Sums {
    fn scale(&mut self, factor: f64) {
        self.weight *= factor;
        self.x *= factor;
        self.y *= factor;
        self.xx *= factor;
        self.xy *= factor;
    }

    /// As if each measurement had been nearer to the line.
    fn blend(&mut self, line: Line, keep: f64) {
        let y = line.base_secs * self.weight + line.secs_each * self.x;
        let xy = line.base_secs * self.x + line.secs_each * self.xx;
        self.y = y + keep * (self.y - y);
        self.xy = xy + keep * (self.xy - xy);
    }

    fn add(&mut self, x: f64, y: f64, scatter: f64) {
        let weight = (1.0 + x / scatter).powi(-2);
        self.weight += weight;
        self.x += weight * x;
        self.y += weight * y;
        self.xx += weight * x * x;
        self.xy += weight * x * y;
    }
}

#[cfg(test)]
mod tests {
    use warmroute_proto::{DpRank, Source};

    use super::*;
    use crate::source_table::SourceTable;

    const PRIOR: Line = Line {
        base_secs: 0.05,
        secs_each: 1e-4,
    };

    fn taught(truth: Line, lessons: u32) -> DecayingFit {
        let mut fit = DecayingFit::new(PRIOR, 1024.0);
        for lesson in 0..lessons {
            let count = f64::from((lesson * 977) % 10_000);
            fit.learn(PRIOR, count, truth.at(count));
        }
        fit
    }

    #[test]
    fn it_begins_with_the_prior_and_ends_near_the_truth() {
        let truth = Line {
            base_secs: 0.01,
            secs_each: 5e-5,
        };
        assert_eq!(taught(truth, 0).line, PRIOR);
        let line = taught(truth, 200).line;
        assert!(
            (line.secs_each / truth.secs_each - 1.0).abs() < 0.1,
            "{line:?}"
        );
        assert!((line.base_secs - truth.base_secs).abs() < 0.01, "{line:?}");
    }

    /// One of two equally busy sources is ten times slower.
    #[test]
    fn the_fleet_counts_a_tenth_of_a_measurement_for_a_source_of_its_own_speed() {
        const COUNT: f64 = 1024.0;
        let mut table = SourceTable::default();
        let mut intern = |name: &str| {
            table.intern(&Source {
                worker: name.into(),
                dp_rank: DpRank(0),
            })
        };
        let (fast, slow) = (intern("a"), intern("b"));
        let mut fits = SourceFits::new(PRIOR, COUNT);
        let truths = [(fast, 0.1), (slow, 1.0)];
        for _ in 0..200 {
            for (source, secs) in truths {
                fits.learn(source, 0.0, 0.0);
                fits.learn(source, COUNT, secs);
            }
        }
        // With all counts at the prior's two points, each point is a weighted mean of its own
        // measurements and the prior's. Every second measurement was at `COUNT`.
        let share = PRIOR_WEIGHT / (PRIOR_WEIGHT + 1.0 / (1.0 - KEEP * KEEP));
        for (source, secs) in truths {
            let fleet = fits.fleet.line.at(COUNT);
            fits.learn(source, COUNT, secs);
            let off = fits.line(source).at(COUNT) - secs;
            assert!(
                off.abs() < share * (fleet - secs).abs(),
                "{off} s of {secs} s"
            );
        }
    }

    #[test]
    fn one_outlier_moves_it_by_a_bounded_step_and_many_move_it_whole() {
        let truth = taught(PRIOR, 100);
        let mut fit = truth;
        fit.learn(PRIOR, 1000.0, 600.0);
        assert!(fit.line.at(1000.0) < 1.5 * truth.line.at(1000.0));
        let slow = Line {
            base_secs: 0.5,
            secs_each: 1e-3,
        };
        for lesson in 0..200_u32 {
            let count = f64::from((lesson * 977) % 10_000);
            fit.learn(PRIOR, count, slow.at(count));
        }
        assert!(
            fit.line.at(5000.0) > 0.8 * slow.at(5000.0),
            "{:?}",
            fit.line
        );
    }

    #[test]
    fn what_fades_returns_to_the_prior() {
        let slow = Line {
            base_secs: 0.5,
            secs_each: 1e-3,
        };
        let mut fit = taught(slow, 200);
        for _ in 0..100 {
            fit.fade(PRIOR, 0.5);
        }
        assert!((fit.line.at(5000.0) / PRIOR.at(5000.0) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn absurd_measurements_leave_a_usable_line() {
        let mut fit = DecayingFit::new(PRIOR, 1024.0);
        for (count, secs) in [
            (0.0, f64::MAX),
            (1e18, 0.0),
            (1e18, 600.0),
            (5.0, -1.0),
            (0.0, 0.0),
        ] {
            fit.learn(PRIOR, count, secs);
            let line = fit.line;
            assert!(
                line.base_secs.is_finite() && line.base_secs >= 0.0,
                "{line:?}"
            );
            assert!(
                line.secs_each.is_finite() && line.secs_each > 0.0,
                "{line:?}"
            );
        }
    }
}
