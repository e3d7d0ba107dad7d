//! How old is a record? Told by where the log ended at known moments.
//!
//! A record behind the end that was observed at some moment was stored after that moment. So the
//! backlog that an indexer reads at its start proves nothing about the present, and a lagging
//! indexer does not take old records for fresh proof. No clock of another machine is trusted.

use std::collections::VecDeque;
use std::time::Instant;

use warmroute_proto::LogPosition;

/// At two observations a second these reach back 8 s, further than any proof counts.
const OBSERVATIONS_MAX: usize = 16;

#[derive(Default)]
pub(super) struct LogEnds {
    /// The oldest first. Both columns ascend.
    seen: VecDeque<(Instant, LogPosition)>,
}

impl LogEnds {
    /// The log ended at or behind `last` at the moment `at`.
    pub(super) fn observe(&mut self, at: Instant, last: LogPosition) {
        if self.seen.len() == OBSERVATIONS_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back((at, last));
    }

    pub(super) fn clear(&mut self) {
        self.seen.clear();
    }

    /// A moment before which the log did not have this position; none if there is none in reach.
    pub(super) fn stored_after(&self, position: LogPosition) -> Option<Instant> {
        self.seen
            .iter()
            .rev()
            .find(|(_, last)| *last < position)
            .map(|&(at, _)| at)
    }

    /// A moment whose log is in up to its end; none if there is none in reach. What was announced before
    /// it and is not in is missing, however far behind the reader is.
    pub(super) fn reached(&self, position: LogPosition) -> Option<Instant> {
        self.seen
            .iter()
            .rev()
            .find(|(_, last)| *last <= position)
            .map(|&(at, _)| at)
    }

    pub(super) fn last(&self) -> Option<LogPosition> {
        self.seen.back().map(|&(_, last)| last)
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
        assert_eq!(ends.stored_after(LogPosition(1)), None);
        let later = start + Duration::from_secs(1);
        ends.observe(start, LogPosition(10));
        ends.observe(later, LogPosition(20));
        assert_eq!(ends.stored_after(LogPosition(10)), None, "backlog");
        assert_eq!(ends.stored_after(LogPosition(15)), Some(start));
        assert_eq!(ends.stored_after(LogPosition(21)), Some(later));
        assert_eq!(ends.reached(LogPosition(9)), None);
        assert_eq!(ends.reached(LogPosition(19)), Some(start));
        assert_eq!(ends.reached(LogPosition(20)), Some(later));
    }
}
