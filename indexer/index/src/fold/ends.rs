//! The age of messages, from observations of the log's end and the log's clock.
//!
//! A record behind the end observed at some moment was stored after that moment. So the backlog
//! read at startup proves nothing about the present, and a lagging indexer does not take old
//! records for fresh proof. Clocks of different machines are not compared. The log's clock is
//! compared with itself: a record stamped before a moment at which it was absent was restored from
//! an older copy of the log, and proves nothing.
//!
//! A message may be delayed before the log stores it or a reader reads it. Its send time is by the
//! log's clock, whose present value is the last observed one plus the time passed here. The send
//! time can only weaken a proof: if the log's clock jumped back or was not observed recently, it
//! has no effect.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use warmroute_proto::{LogPosition, LogTime};

/// Observations kept: 8 s at two a second, longer than a proof is valid.
const OBSERVATIONS_MAX: usize = 16;

/// Age limit of the clock observation: at 1 % drift the error stays below the validity of a proof.
const CLOCK_AGE_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
struct ObservedEnd {
    at: Instant,
    last: LogPosition,
    /// By the log's clock; 0 if unknown.
    unix_ns: u64,
}

#[derive(Default)]
pub(super) struct LogEnds {
    /// The oldest first.
    seen: VecDeque<ObservedEnd>,
}

impl LogEnds {
    /// The log ended at `last` or later at the moment `at`, which is `unix_ns` by its clock.
    pub(super) fn observe(&mut self, at: Instant, last: LogPosition, unix_ns: u64) {
        if self.seen.len() == OBSERVATIONS_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back(ObservedEnd { at, last, unix_ns });
    }

    pub(super) fn clear(&mut self) {
        self.seen.clear();
    }

    /// The latest observed moment at which the log had neither this position nor the time
    /// `stamped`;
    /// `None` if out of reach. Both count: a replicated log stamps a message when it is proposed,
    /// before it is committed, and a message may be restored from a backup.
    pub(super) fn stored_after(&self, position: LogPosition, stamped: u64) -> Option<Instant> {
        let was_before = |end: &&ObservedEnd| end.last < position && end.unix_ns <= stamped;
        self.seen.iter().rev().find(was_before).map(|end| end.at)
    }

    /// Time as of which a message holds: when it was received, or earlier if it was delayed. `None`
    /// if that precedes every representable moment.
    pub(super) fn sent_at(
        &self,
        now: Instant,
        came: Instant,
        sent_at: Option<LogTime>,
    ) -> Option<Instant> {
        match sent_at.and_then(|sent_at| self.age(now, sent_at)) {
            Some(age) => Some(now.checked_sub(age)?.min(came)),
            None => Some(came),
        }
    }

    /// Age of a message; `None` if the log's clock is unknown.
    fn age(&self, now: Instant, sent_at: LogTime) -> Option<Duration> {
        let end = self.seen.back().filter(|end| end.unix_ns > 0)?;
        let since = now.saturating_duration_since(end.at);
        if since > CLOCK_AGE_MAX {
            return None;
        }
        let shows = Duration::from_nanos(end.unix_ns) + since;
        Some(shows.saturating_sub(Duration::from_nanos(sent_at.0)))
    }

    /// The latest observed moment whose log is read completely; `None` if out of reach. What was
    /// announced before it and is not read is missing, however far behind the reader is.
    pub(super) fn reached(&self, position: LogPosition) -> Option<Instant> {
        self.seen
            .iter()
            .rev()
            .find(|end| end.last <= position)
            .map(|end| end.at)
    }

    pub(super) fn last(&self) -> Option<LogPosition> {
        self.seen.back().map(|end| end.last)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn record_is_as_old_as_the_last_end_before_it() {
        let start = crate::tests_support::some_instant();
        let mut ends = LogEnds::default();
        assert_eq!(ends.stored_after(LogPosition(1), 0), None);
        let later = start + Duration::from_secs(1);
        ends.observe(start, LogPosition(10), 1000);
        ends.observe(later, LogPosition(20), 2000);
        assert_eq!(ends.stored_after(LogPosition(10), 900), None, "backlog");
        assert_eq!(ends.stored_after(LogPosition(15), 1500), Some(start));
        assert_eq!(ends.stored_after(LogPosition(21), 2001), Some(later));
        assert_eq!(
            ends.stored_after(LogPosition(21), 1999),
            Some(start),
            "put back, or proposed before the look and stored after it"
        );
        assert_eq!(ends.stored_after(LogPosition(21), 999), None);
        assert_eq!(ends.reached(LogPosition(9)), None);
        assert_eq!(ends.reached(LogPosition(19)), Some(start));
        assert_eq!(ends.reached(LogPosition(20)), Some(later));
    }

    const SECOND: Duration = Duration::from_secs(1);

    /// The log's clock showed 100 s at the start of ours.
    fn asked_at_the_start() -> (Instant, LogEnds) {
        let start = crate::tests_support::some_instant();
        let mut ends = LogEnds::default();
        ends.observe(start, LogPosition(1), 100_000_000_000);
        (start, ends)
    }

    const fn log_time(secs: u64) -> Option<LogTime> {
        Some(LogTime(secs * 1_000_000_000))
    }

    #[test]
    fn what_was_on_its_way_is_as_old_as_it_says() {
        let (start, ends) = asked_at_the_start();
        let now = start + 20 * SECOND;
        let fresh = ends.sent_at(now, now, log_time(120));
        assert_eq!(fresh, Some(now));
        let kept = ends.sent_at(now, now, log_time(113));
        assert_eq!(kept, Some(now - 7 * SECOND));
        let waited_here_too = ends.sent_at(now, now - 9 * SECOND, log_time(113));
        assert_eq!(waited_here_too, Some(now - 9 * SECOND));
    }

    #[test]
    fn nothing_proves_more_for_what_it_says() {
        let (start, mut ends) = asked_at_the_start();
        let now = start + 20 * SECOND;
        let nothing_said = ends.sent_at(now, now, None);
        assert_eq!(
            nothing_said,
            Some(now),
            "an older shim, or one without the log's clock"
        );
        for from_the_future in [121, 130, 10_000_000_000] {
            assert_eq!(ends.sent_at(now, now, log_time(from_the_future)), Some(now));
        }
        // The next leader's clock is a minute behind: messages from before are no older.
        ends.observe(now, LogPosition(2), 60_000_000_000);
        assert_eq!(ends.sent_at(now, now, log_time(119)), Some(now));
        // A new observation of the clock is trusted.
        let later = now + 2 * SECOND;
        let kept = ends.sent_at(later, later, log_time(61));
        assert_eq!(kept, Some(later - SECOND));
        assert_eq!(
            ends.sent_at(later, later, Some(LogTime(u64::MAX))),
            Some(later)
        );
        assert_eq!(
            ends.sent_at(later, later, Some(LogTime(0))),
            Some(later - 62 * SECOND)
        );
    }

    /// Whatever our clock does against the log's, no source is without proof for good.
    #[test]
    fn a_clock_that_was_not_observed_for_long_is_ignored() {
        let (start, mut ends) = asked_at_the_start();
        let now = start + 61 * SECOND;
        assert_eq!(ends.sent_at(now, now, log_time(100)), Some(now));
        ends.observe(now, LogPosition(2), 0);
        assert_eq!(
            ends.sent_at(now, now, log_time(100)),
            Some(now),
            "does not tell"
        );
        ends.clear();
        assert_eq!(
            ends.sent_at(now, now, log_time(100)),
            Some(now),
            "never asked"
        );
    }
}
