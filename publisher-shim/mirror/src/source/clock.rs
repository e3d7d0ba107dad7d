//! The log's clock, extrapolated from its last reading.
//!
//! Records and heartbeats carry its time, so that readers know their age. Between readings it
//! advances by this process's monotonic clock; no time of day is used. Without a reading they carry
//! no time, and readers count from the time of arrival.

use std::time::{Duration, Instant};

use warmroute_proto::LogTime;

/// Age up to which a reading counts: clocks that drift by 1 % differ by less than a proof's age.
const AGE_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug)]
struct ClockReading {
    at: Instant,
    unix_time: Duration,
}

#[derive(Debug)]
pub(super) struct LogClock {
    reading: Option<ClockReading>,
    /// The log has not answered yet.
    is_awaited: bool,
}

impl LogClock {
    pub(super) const fn new(is_awaited: bool) -> Self {
        Self {
            reading: None,
            is_awaited,
        }
    }

    /// Whether the log has answered, with a time or without.
    pub(super) const fn is_settled(&self) -> bool {
        !self.is_awaited
    }

    /// Takes a reading of `unix_ns` (0: the log has no clock) at some time between `asked` and
    /// `answered`. The extrapolated time is corrected only as far as the reading requires: a slow
    /// answer does not undo a fast one, and a clock that jumped is followed. Returns the time by
    /// which the log's clock ran ahead of the extrapolated one; `None` without an earlier reading
    /// to extrapolate.
    pub(super) fn set(
        &mut self,
        asked: Instant,
        answered: Instant,
        unix_ns: u64,
    ) -> Option<Duration> {
        self.is_awaited = false;
        if unix_ns == 0 {
            self.reading = None;
            return Some(Duration::ZERO);
        }
        let least = Duration::from_nanos(unix_ns);
        let most = least + answered.saturating_duration_since(asked);
        let expected = self.time_at(answered);
        self.reading = Some(ClockReading {
            at: answered,
            unix_time: expected.map_or(least, |time| time.clamp(least, most)),
        });
        expected.map(|expected| least.saturating_sub(expected))
    }

    /// The present time, never ahead of the log's; `None` if it is unknown.
    pub(super) fn read(&self, now: Instant) -> Option<LogTime> {
        let ns = self.time_at(now)?.as_nanos();
        u64::try_from(ns).ok().map(LogTime)
    }

    fn time_at(&self, now: Instant) -> Option<Duration> {
        let reading = self.reading?;
        let since = now.saturating_duration_since(reading.at);
        (since <= AGE_MAX).then(|| reading.unix_time + since)
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
    fn it_advances_from_the_last_reading() {
        let start = start();
        let mut clock = LogClock::new(true);
        assert_eq!(clock.read(start), None, "no reading");
        assert!(!clock.is_settled());
        clock.set(start, start + 2 * SECOND, 100_000_000_000);
        assert_eq!(secs(&clock, start + 2 * SECOND), Some(100), "never ahead");
        assert_eq!(secs(&clock, start + 9 * SECOND), Some(107));
        assert_eq!(secs(&clock, start + 62 * SECOND), Some(160));
        assert_eq!(secs(&clock, start + 63 * SECOND), None, "too old");
        clock.set(start, start + SECOND, 0);
        assert_eq!(clock.read(start + SECOND), None, "no clock");
        assert!(clock.is_settled());
    }

    #[test]
    fn a_slow_answer_undoes_nothing_and_a_jump_is_followed() {
        let start = start();
        let mut clock = LogClock::new(true);
        clock.set(start, start, 100_000_000_000);
        let later = start + 10 * SECOND;
        clock.set(later - 4 * SECOND, later, 106_000_000_000);
        assert_eq!(secs(&clock, later), Some(110));
        // Another server leads.
        let ahead = clock.set(later, later + SECOND, 50_000_000_000);
        assert_eq!(ahead, Some(Duration::ZERO));
        assert_eq!(secs(&clock, later + SECOND), Some(51));
        let ahead = clock.set(later + SECOND, later + SECOND, 500_000_000_000);
        assert_eq!(ahead, Some(449 * SECOND));
        assert_eq!(secs(&clock, later + SECOND), Some(500));
    }

    #[test]
    fn without_an_earlier_reading_no_jump_can_be_seen() {
        let start = start();
        let mut clock = LogClock::new(true);
        assert_eq!(clock.set(start, start, 100_000_000_000), None);
        let later = start + AGE_MAX + SECOND;
        assert_eq!(clock.set(later, later, 900_000_000_000), None, "too old");
        assert_eq!(clock.set(later, later, 0), Some(Duration::ZERO), "no clock");
        assert_eq!(clock.set(later, later, 900_000_000_000), None);
    }
}
