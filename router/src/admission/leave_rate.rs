//! How fast requests leave a queue, for `Retry-After`. Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Departures that are kept.
const DEPARTURES_MAX: usize = 64;

/// Older ones say nothing of now.
const WINDOW: Duration = Duration::from_secs(60);

/// Clients count in seconds.
pub(crate) const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);

/// Longest `Retry-After`: OpenAI's clients do not wait longer, and give up.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(120);

/// The recent departures.
#[derive(Debug, Default)]
pub(crate) struct LeaveRate(VecDeque<Instant>);

impl LeaveRate {
    /// A request left for a worker.
    pub(crate) fn left(&mut self, now: Instant) {
        if self.0.len() == DEPARTURES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }

    /// Departures a second; `None` without two in the window.
    pub(crate) fn per_sec(&mut self, now: Instant) -> Option<f64> {
        let is_old = |at: &Instant| now.saturating_duration_since(*at) > WINDOW;
        while self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
        let since = now.saturating_duration_since(*self.0.front()?);
        // The first one only begins the time.
        let count = self.0.len() - 1;
        (count > 0 && !since.is_zero()).then(|| count as f64 / since.as_secs_f64())
    }

    /// Time until `ahead` requests have left, and one more. Without a measurement: as long as the
    /// first one has waited so far, since none left in that time.
    pub(crate) fn retry_after(
        &mut self,
        ahead: usize,
        longest: Duration,
        now: Instant,
    ) -> Duration {
        let needed = ahead as f64 + 1.0;
        let wait = match self.per_sec(now) {
            Some(rate) => Duration::try_from_secs_f64(needed / rate).unwrap_or(RETRY_AFTER_MAX),
            None => longest,
        };
        wait.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "an origin of virtual time")]
    fn origin() -> Instant {
        Instant::now()
    }

    #[test]
    fn the_rate_is_that_of_the_last_departures() {
        let (start, mut rate) = (origin(), LeaveRate::default());
        let at = |millis| start + Duration::from_millis(millis);
        assert_eq!(rate.per_sec(start), None);
        let none = rate.retry_after(9, Duration::from_secs(7), start);
        assert_eq!(none, Duration::from_secs(7));
        for number in 0..1000 {
            rate.left(at(number * 500));
        }
        let now = at(999 * 500);
        assert_eq!(rate.per_sec(now), Some(2.0));
        let wait = |rate: &mut LeaveRate, ahead| rate.retry_after(ahead, Duration::ZERO, now);
        assert_eq!(wait(&mut rate, 9), Duration::from_secs(5));
        assert_eq!(wait(&mut rate, 0), Duration::from_secs(1));
        assert_eq!(wait(&mut rate, 1_000_000), RETRY_AFTER_MAX);
        // Nothing leaves any more: the rate falls, and then says nothing.
        assert!(rate.per_sec(now + Duration::from_secs(10)) < Some(1.6));
        assert_eq!(rate.per_sec(now + Duration::from_secs(61)), None);
    }
}
