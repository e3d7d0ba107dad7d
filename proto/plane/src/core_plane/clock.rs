//! The common clock: the one that is furthest ahead, by the beacons of all processes. Pure.
//!
//! A process that joins takes over the clock of the others, and a clock that stood still is behind
//! theirs. So it runs forward by itself, whatever the time of day is on a machine.

use std::time::Duration;

use tokio::time::Instant;

/// A clock that is ahead by less is not followed: clocks drift, and each step makes proofs older.
const STEP_MIN: Duration = Duration::from_millis(5);

/// A clock that is ahead by more is wrong.
const STEP_MAX: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Debug)]
pub(super) struct CommonClock {
    at: Instant,
    unix: Duration,
}

impl CommonClock {
    pub(super) const fn new(at: Instant, unix_ns: u64) -> Self {
        Self {
            at,
            unix: Duration::from_nanos(unix_ns),
        }
    }

    pub(super) fn unix_ns(&self, now: Instant) -> u64 {
        let unix = self.time_at(now).as_nanos();
        u64::try_from(unix).unwrap_or(u64::MAX)
    }

    /// Takes over the clock of the processes that this one joins.
    pub(super) const fn join(&mut self, now: Instant, unix_ns: u64) {
        *self = Self::new(now, unix_ns);
    }

    /// Takes a reading of another process's clock.
    pub(super) fn observe(&mut self, now: Instant, unix_ns: u64) {
        if self.ahead(now, unix_ns) <= STEP_MAX {
            self.follow(now, unix_ns);
        }
    }

    /// Takes a reading of another process's clock, however far it is ahead.
    pub(super) fn follow(&mut self, now: Instant, unix_ns: u64) {
        if self.ahead(now, unix_ns) >= STEP_MIN {
            self.join(now, unix_ns);
        }
    }

    fn ahead(&self, now: Instant, unix_ns: u64) -> Duration {
        Duration::from_nanos(unix_ns).saturating_sub(self.time_at(now))
    }

    fn time_at(&self, now: Instant) -> Duration {
        self.unix + now.saturating_duration_since(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_clock_that_is_ahead_counts() {
        const MS: u64 = 1_000_000;
        let start = Instant::now();
        let mut clock = CommonClock::new(start, 1000 * MS);
        let later = start + Duration::from_millis(500);
        assert_eq!(clock.unix_ns(later), 1500 * MS);
        clock.observe(later, 1400 * MS);
        assert_eq!(clock.unix_ns(later), 1500 * MS, "behind");
        clock.observe(later, 1504 * MS);
        assert_eq!(clock.unix_ns(later), 1500 * MS, "within the drift");
        clock.observe(later, 1900 * MS);
        assert_eq!(clock.unix_ns(later), 1900 * MS);
        clock.observe(later, u64::MAX);
        assert_eq!(clock.unix_ns(later), 1900 * MS, "no clock");
        clock.follow(later, 1800 * MS);
        assert_eq!(clock.unix_ns(later), 1900 * MS, "behind");
        let day = 25 * 3600 * 1000 * MS;
        clock.observe(later, day);
        assert_eq!(clock.unix_ns(later), 1900 * MS, "too far ahead");
        clock.follow(later, day);
        assert_eq!(clock.unix_ns(later), day);
        clock.join(later, 100 * MS);
        assert_eq!(clock.unix_ns(later), 100 * MS);
    }
}
