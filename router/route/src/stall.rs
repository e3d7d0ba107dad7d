//! Sources that accept requests and return no first token.
//!
//! A request whose first token is far later than predicted stalls its source for a while. Each
//! further stall without a first token lasts twice as long. After a stall one request probes the
//! source; any first token ends the stall. This detects hung and overloaded engines whose health
//! check succeeds. A slow source costs more instead ([`super::slowness`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::source_table::{PerSource, SourceId};

/// Predictions are wrong by a factor of two or three when other requests are preempted.
const FACTOR: u32 = 10;

/// Pauses for compilation or weights take seconds.
const PATIENCE_MIN: Duration = Duration::from_secs(5);

const STALL_FIRST: Duration = Duration::from_secs(5);

/// Doublings of the first stall: 5, 10, 20, 40, 80 s.
const DOUBLINGS_MAX: u32 = 4;

#[derive(Clone, Debug, Default)]
pub struct StallDetector {
    sources: PerSource<SourceStall>,
    waiting: BTreeMap<u64, AwaitedFirstToken>,
    deadlines: BTreeSet<(Instant, u64)>,
    count: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct SourceStall {
    until: Option<Instant>,
    /// Stalls since the last first token.
    in_a_row: u32,
}

#[derive(Clone, Copy, Debug)]
struct AwaitedFirstToken {
    source: SourceId,
    deadline: Instant,
}

impl StallDetector {
    /// Registers a request with its predicted time to first token.
    pub fn sent(&mut self, counter: u64, source: SourceId, predicted: Duration, now: Instant) {
        let patience = predicted.saturating_mul(FACTOR).max(PATIENCE_MIN);
        let Some(deadline) = now.checked_add(patience) else {
            return;
        };
        self.forget(counter);
        self.waiting
            .insert(counter, AwaitedFirstToken { source, deadline });
        self.deadlines.insert((deadline, counter));
    }

    /// Registers a first token, which ends the stall.
    pub fn first_token(&mut self, counter: u64) {
        if let Some(waiting) = self.forget(counter) {
            self.answered(waiting);
        }
    }

    /// The request ended, or its first token will not be seen.
    pub fn ended(&mut self, counter: u64) {
        self.forget(counter);
    }

    /// Processes deadlines. Call it before [`Self::is_stalled`].
    pub fn advance(&mut self, now: Instant) {
        while let Some(&(deadline, counter)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            self.deadlines.pop_first();
            // It stays in `waiting`: its first token still ends the stall.
            if let Some(waiting) = self.waiting.get(&counter) {
                let source = self.sources.get_mut(waiting.source);
                // Requests of one stall count once.
                if source.until.is_none_or(|until| until <= deadline) {
                    let length = STALL_FIRST * 2_u32.pow(source.in_a_row.min(DOUBLINGS_MAX));
                    source.until = deadline.checked_add(length);
                    source.in_a_row = source.in_a_row.saturating_add(1);
                    self.count += 1;
                }
            }
        }
    }

    #[must_use]
    pub fn is_stalled(&self, source: SourceId, now: Instant) -> bool {
        let stall = self.sources.get(source).copied().unwrap_or_default();
        stall.until.is_some_and(|until| now < until)
    }

    /// Number of stalls so far.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Number of requests without a first token.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn answered(&mut self, waiting: AwaitedFirstToken) {
        *self.sources.get_mut(waiting.source) = SourceStall::default();
    }

    fn forget(&mut self, counter: u64) -> Option<AwaitedFirstToken> {
        let waiting = self.waiting.remove(&counter)?;
        self.deadlines.remove(&(waiting.deadline, counter));
        Some(waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::testing::{source_id, start};

    const PREDICTED: Duration = Duration::from_secs(1);

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn a_late_first_token_stalls_and_the_stall_ends_by_itself() {
        let (start, source) = (start(), source_id());
        let mut stalls = StallDetector::default();
        stalls.sent(1, source, PREDICTED, start);
        for (at, stalled) in [(9, false), (10, true), (14, true), (15, false)] {
            stalls.advance(start + secs(at));
            assert_eq!(
                stalls.is_stalled(source, start + secs(at)),
                stalled,
                "{at} s"
            );
        }
    }

    #[test]
    fn a_first_token_ends_the_stall() {
        let (start, source) = (start(), source_id());
        let mut stalls = StallDetector::default();
        stalls.sent(1, source, PREDICTED, start);
        stalls.advance(start + secs(10));
        assert!(stalls.is_stalled(source, start + secs(11)));
        stalls.first_token(1);
        assert!(!stalls.is_stalled(source, start + secs(11)));
    }

    #[test]
    fn stalls_in_a_row_last_longer_and_requests_stuck_together_are_one() {
        let (start, source) = (start(), source_id());
        let mut stalls = StallDetector::default();
        for counter in 0..10 {
            stalls.sent(counter, source, PREDICTED, start);
        }
        stalls.advance(start + secs(10));
        assert_eq!(stalls.count(), 1);
        // The probe after the first stall hangs as well: 10 s now.
        stalls.sent(10, source, PREDICTED, start + secs(15));
        stalls.advance(start + secs(25));
        assert!(stalls.is_stalled(source, start + secs(34)));
        assert!(!stalls.is_stalled(source, start + secs(35)));
        assert_eq!(stalls.count(), 2);
    }

    #[test]
    fn an_ended_request_stalls_no_source() {
        let (start, source) = (start(), source_id());
        let mut stalls = StallDetector::default();
        stalls.sent(1, source, PREDICTED, start);
        stalls.ended(1);
        stalls.advance(start + secs(100));
        assert!(!stalls.is_stalled(source, start + secs(100)));
        assert_eq!(stalls.waiting(), 0);
        assert!(stalls.deadlines.is_empty());
    }

    #[test]
    fn short_predictions_have_a_floor() {
        let (start, source) = (start(), source_id());
        let mut stalls = StallDetector::default();
        stalls.sent(1, source, Duration::from_millis(10), start);
        stalls.advance(start + secs(4));
        assert!(!stalls.is_stalled(source, start + secs(4)));
    }
}
