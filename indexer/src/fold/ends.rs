//! How old is a record? Told by where the log ended at known moments.
//!
//! A record behind the end that was observed at some moment was stored after that moment. So the
//! backlog that an indexer reads at its start proves nothing about the present, and a lagging
//! indexer does not take old records for fresh proof. No clock of another machine is compared with
//! ours. But the log's clock is compared with itself: a record that is stamped before the moment at which
//! it was not there came back with an older copy of the log, and proves nothing.

use std::collections::VecDeque;
use std::time::Instant;

use warmroute_proto::LogPosition;

/// At two observations a second these reach back 8 s, further than any proof counts.
const OBSERVATIONS_MAX: usize = 16;

#[derive(Clone, Copy)]
struct End {
    at: Instant,
    last: LogPosition,
    /// By the log's clock; 0 if unknown.
    unix_ns: u64,
}

#[derive(Default)]
pub(super) struct LogEnds {
    /// The oldest first.
    seen: VecDeque<End>,
}

impl LogEnds {
    /// The log ended at or behind `last` at the moment `at`, or `unix_ns` by its own clock.
    pub(super) fn observe(&mut self, at: Instant, last: LogPosition, unix_ns: u64) {
        if self.seen.len() == OBSERVATIONS_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back(End { at, last, unix_ns });
    }

    pub(super) fn clear(&mut self) {
        self.seen.clear();
    }

    /// A moment before which the log did not have this position; none if there is none in reach, or if the
    /// message that is there now was `stamped` before it.
    pub(super) fn stored_after(&self, position: LogPosition, stamped: u64) -> Option<Instant> {
        let before = self.seen.iter().rev().find(|end| end.last < position)?;
        (before.unix_ns <= stamped).then_some(before.at)
    }

    /// A moment whose log is in up to its end; none if there is none in reach. What was announced before
    /// it and is not in is missing, however far behind the reader is.
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
        assert_eq!(ends.stored_after(LogPosition(21), 1999), None, "put back");
        assert_eq!(ends.reached(LogPosition(9)), None);
        assert_eq!(ends.reached(LogPosition(19)), Some(start));
        assert_eq!(ends.reached(LogPosition(20)), Some(later));
    }
}
