//! How often a source was set aside, and when it may return: a minute later at the earliest, doubled
//! with each time up to 64 minutes.

use std::time::{Duration, Instant};

/// Budget per pair: the measured size of an unshared pair plus 50 %.
const PAIR_BYTES: u64 = 60;
const AWAY_MIN: Duration = Duration::from_secs(60);
const AWAY_MAX: Duration = Duration::from_secs(3840);

/// How often and since when a source is set aside.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SetAsideHistory {
    /// Pairs that its shim last reported.
    pub(super) pairs: u64,
    times: u32,
    since: Option<Instant>,
    pub(super) asked: bool,
}

impl SetAsideHistory {
    pub(super) fn went(&mut self, now: Instant, pairs: u64) {
        let is_recent = |since: Instant| now.saturating_duration_since(since) < 2 * AWAY_MAX;
        self.times = if self.since.is_some_and(is_recent) {
            self.times + 1
        } else {
            1
        };
        self.since = Some(now);
        self.pairs = pairs;
        self.asked = false;
    }

    /// A new generation begins.
    pub(super) const fn came_back(&mut self) {
        self.asked = false;
    }

    pub(super) fn may_return(&self, now: Instant) -> bool {
        let doublings = self.times.saturating_sub(1).min(6);
        let away = (AWAY_MIN * (1 << doublings)).min(AWAY_MAX);
        self.since
            .is_none_or(|since| now.saturating_duration_since(since) >= away)
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.pairs.saturating_mul(PAIR_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_absence_is_longer_than_the_one_before() {
        let start = crate::tests_support::some_instant();
        let mut aside = SetAsideHistory::default();
        let mut now = start;
        for seconds in [60, 120, 240, 480, 960, 1920, 3840, 3840] {
            aside.went(now, 1);
            assert!(!aside.may_return(now + (seconds - 1) * SECOND));
            now += seconds * SECOND;
            assert!(aside.may_return(now));
        }
        now += 4 * AWAY_MAX;
        aside.went(now, 1);
        assert!(aside.may_return(now + AWAY_MIN), "long ago counts no more");
    }
}
