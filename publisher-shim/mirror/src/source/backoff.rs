//! Exponential backoff with jitter.
//!
//! The jitter differs between processes, so that a fleet that lost its log does not return to it in
//! one moment.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

const FIRST: Duration = Duration::from_millis(200);
const MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    /// Seed of the jitter; differs between processes.
    seed: u64,
    drawn: u64,
    failures: u32,
}

impl Backoff {
    pub(super) const fn new(seed: u64) -> Self {
        Self {
            seed,
            drawn: 0,
            failures: 0,
        }
    }

    pub(super) const fn reset(&mut self) {
        self.failures = 0;
    }

    /// The delay after one more failure: 50 to 100 % of the exponential one.
    pub(super) fn next(&mut self) -> Duration {
        let doubled = FIRST.saturating_mul(1 << self.failures.min(10));
        self.failures = self.failures.saturating_add(1);
        let whole = doubled.min(MAX);
        whole / 2 + self.part_of(whole / 2)
    }

    /// The delay before a first try that many processes may make in one moment.
    pub(super) fn first(&mut self) -> Duration {
        self.part_of(FIRST)
    }

    fn part_of(&mut self, whole: Duration) -> Duration {
        self.drawn += 1;
        let drawn = xxh3_64_with_seed(&self.drawn.to_le_bytes(), self.seed);
        whole.mul_f64((drawn >> 32) as u32 as f64 / f64::from(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_within_bounds_and_differs_by_seed() {
        let delays = |seed| {
            let mut backoff = Backoff::new(seed);
            (0..12).map(|_| backoff.next()).collect::<Vec<_>>()
        };
        let mut whole = FIRST;
        for delay in delays(1) {
            assert!(delay >= whole / 2 && delay <= whole, "{delay:?}");
            whole = (whole * 2).min(MAX);
        }
        assert_ne!(delays(1), delays(2));
        let mut backoff = Backoff::new(3);
        for _ in 0..40 {
            assert!(backoff.next() <= MAX);
        }
        backoff.reset();
        assert!(backoff.next() <= FIRST);
        assert!(backoff.first() <= FIRST);
    }
}
