//! What the log's clock shows, as the log last said it.
//!
//! Records and heartbeats carry it, so that a reader knows how long they were on their way. It goes on by
//! this process's own monotonic clock; nobody's time of day has a part in it. What is not known is not
//! said: readers then judge by when they read.

use std::time::{Duration, Instant};

use warmroute_proto::LogTime;

/// Clocks part by a hundredth at most: by less than the age of a proof, after so long.
const AGE_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug)]
struct ClockReading {
    at: Instant,
    showed: Duration,
}

#[derive(Debug)]
pub(super) struct LogClock {
    reading: Option<ClockReading>,
    /// The log has never answered.
    is_awaited: bool,
}

impl LogClock {
    pub(super) const fn new(is_awaited: bool) -> Self {
        Self {
            reading: None,
            is_awaited,
        }
    }

    /// The log told what its clock shows, or that it does not tell.
    pub(super) const fn is_settled(&self) -> bool {
        !self.is_awaited
    }

    /// Asked at the first moment, the log's clock showed `unix_ns`, or 0 if it did not tell; the answer
    /// came at the second moment. Somewhere in between it was so: what was known is bent only as far as it
    /// has to be, so that a slow answer tells no less than a fast one before it, and a clock that jumped is
    /// followed.
    pub(super) fn learn(&mut self, asked: Instant, answered: Instant, unix_ns: u64) {
        self.is_awaited = false;
        if unix_ns == 0 {
            self.reading = None;
            return;
        }
        let least = Duration::from_nanos(unix_ns);
        let most = least + answered.saturating_duration_since(asked);
        let showed = self
            .shows(answered)
            .map_or(least, |shows| shows.clamp(least, most));
        self.reading = Some(ClockReading {
            at: answered,
            showed,
        });
    }

    /// What it shows now, or a little less; none if that is not known.
    pub(super) fn read(&self, now: Instant) -> Option<LogTime> {
        let ns = self.shows(now)?.as_nanos();
        u64::try_from(ns).ok().map(LogTime)
    }

    fn shows(&self, now: Instant) -> Option<Duration> {
        let reading = self.reading?;
        let since = now.saturating_duration_since(reading.at);
        (since <= AGE_MAX).then(|| reading.showed + since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::start;

    const SECOND: Duration = Duration::from_secs(1);

    fn secs(clock: &LogClock, now: Instant) -> Option<u64> {
        clock.read(now).map(|time| time.0 / 1_000_000_000)
    }

    #[test]
    fn it_goes_on_from_what_the_log_said() {
        let start = start();
        let mut clock = LogClock::new(true);
        assert_eq!(clock.read(start), None, "never told");
        assert!(!clock.is_settled());
        clock.learn(start, start + 2 * SECOND, 100_000_000_000);
        assert_eq!(secs(&clock, start + 2 * SECOND), Some(100), "never ahead");
        assert_eq!(secs(&clock, start + 9 * SECOND), Some(107));
        assert_eq!(secs(&clock, start + 62 * SECOND), Some(160));
        assert_eq!(secs(&clock, start + 63 * SECOND), None, "told too long ago");
        clock.learn(start, start + SECOND, 0);
        assert_eq!(clock.read(start + SECOND), None, "the log does not tell");
        assert!(clock.is_settled());
    }

    #[test]
    fn a_slow_answer_tells_no_less_and_a_jump_is_followed() {
        let start = start();
        let mut clock = LogClock::new(true);
        clock.learn(start, start, 100_000_000_000);
        let later = start + 10 * SECOND;
        clock.learn(later - 4 * SECOND, later, 106_000_000_000);
        assert_eq!(secs(&clock, later), Some(110));
        // Another server leads.
        clock.learn(later, later + SECOND, 50_000_000_000);
        assert_eq!(secs(&clock, later + SECOND), Some(51));
        clock.learn(later + SECOND, later + SECOND, 500_000_000_000);
        assert_eq!(secs(&clock, later + SECOND), Some(500));
    }
}
