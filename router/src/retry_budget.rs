//! The budget of retries: so that repeated requests cannot double an outage.
//!
//! All retries of a router count together. In the last [`PERIODS`] periods together there may be a
//! fifth as many as requests, and [`RETRIES_MIN`]. Requests whose failure may be the client's own
//! mistake have a twentieth and [`DOUBTFUL_MIN`], of which those are given back that prove a worker
//! at fault.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time of one period.
const PERIOD: Duration = Duration::from_secs(10);

/// Periods that count.
const PERIODS: usize = 6;

/// Requests for each retry.
const REQUESTS_PER_RETRY: u64 = 5;

/// Requests for each retry of what may be the client's mistake.
const REQUESTS_PER_DOUBTFUL: u64 = 20;

/// Retries of any fleet, however few requests it has. More than the requests that a worker of a small
/// fleet holds when it hangs.
const RETRIES_MIN: u64 = 100;
const DOUBTFUL_MIN: u64 = 10;

#[derive(Debug, Default)]
pub(crate) struct RetryBudget(Mutex<Periods>);

/// Counts of each period, in a ring.
#[derive(Debug, Default)]
struct Periods {
    counts: [PeriodCounts; PERIODS],
    newest: usize,
    /// The end of the newest period; `None` before the first request.
    ends: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PeriodCounts {
    requests: u64,
    retries: u64,
    doubtful: u64,
}

/// Which retries a retry counts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryKind {
    /// The engine did not get the request: counted, and never denied.
    Unsent,
    Usual,
    /// The failure may be the client's own mistake.
    Doubtful,
}

impl RetryBudget {
    /// A client's request is sent to an engine.
    pub(crate) fn requested(&self, now: Instant) {
        self.periods(now).newest().requests += 1;
    }

    /// Takes a retry. Returns whether there is one.
    pub(crate) fn take(&self, kind: RetryKind, now: Instant) -> bool {
        let mut periods = self.periods(now);
        let sum = periods.sum();
        let has_usual = sum.retries < RETRIES_MIN + sum.requests / REQUESTS_PER_RETRY;
        let has_doubtful = sum.doubtful < DOUBTFUL_MIN + sum.requests / REQUESTS_PER_DOUBTFUL;
        let has_one = match kind {
            RetryKind::Unsent => true,
            RetryKind::Usual => has_usual,
            RetryKind::Doubtful => has_usual && has_doubtful,
        };
        let newest = periods.newest();
        newest.retries += u64::from(has_one);
        newest.doubtful += u64::from(has_one && kind == RetryKind::Doubtful);
        has_one
    }

    /// A doubtful retry was answered: the worker was at fault.
    pub(crate) fn proven(&self, now: Instant) {
        let mut periods = self.periods(now);
        let newest = periods.newest();
        newest.doubtful = newest.doubtful.saturating_sub(1);
    }

    /// Retries that are left now.
    pub(crate) fn left(&self, now: Instant) -> u64 {
        let sum = self.periods(now).sum();
        let max = RETRIES_MIN + sum.requests / REQUESTS_PER_RETRY;
        max.saturating_sub(sum.retries)
    }

    fn periods(&self, now: Instant) -> MutexGuard<'_, Periods> {
        let mut periods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        periods.advance(now);
        periods
    }
}

impl Periods {
    fn advance(&mut self, now: Instant) {
        let mut ends = *self.ends.get_or_insert(now + PERIOD);
        for _ in 0..PERIODS {
            if now < ends {
                break;
            }
            self.newest = (self.newest + 1) % PERIODS;
            self.counts[self.newest] = PeriodCounts::default();
            ends += PERIOD;
        }
        // After a long pause all periods are empty.
        self.ends = Some(if now < ends { ends } else { now + PERIOD });
    }

    fn newest(&mut self) -> &mut PeriodCounts {
        &mut self.counts[self.newest]
    }

    fn sum(&self) -> PeriodCounts {
        let mut sum = PeriodCounts::default();
        for counts in &self.counts {
            sum.requests += counts.requests;
            sum.retries += counts.retries;
            sum.doubtful += counts.doubtful;
        }
        sum
    }
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "virtual time needs an origin; only differences to it are used"
)]
mod tests {
    use super::*;

    fn taken(budget: &RetryBudget, kind: RetryKind, now: Instant) -> u64 {
        (0..1_000_000)
            .take_while(|_| budget.take(kind, now))
            .count() as u64
    }

    #[test]
    fn retries_are_a_share_of_the_requests_of_the_last_minute() {
        let (budget, now) = (RetryBudget::default(), Instant::now());
        assert_eq!(taken(&budget, RetryKind::Usual, now), RETRIES_MIN);
        for _ in 0..1000 {
            budget.requested(now);
        }
        assert_eq!(taken(&budget, RetryKind::Usual, now), 200);
        assert_eq!(budget.left(now + PERIOD * 5), 0);
        // What is over is over, for requests and retries alike.
        assert_eq!(budget.left(now + PERIOD * 6), RETRIES_MIN);
        assert_eq!(budget.left(now + PERIOD * 600), RETRIES_MIN);
    }

    #[test]
    fn a_request_that_no_engine_got_is_counted_and_never_denied() {
        let (budget, now) = (RetryBudget::default(), Instant::now());
        for _ in 0..2 * RETRIES_MIN {
            assert!(budget.take(RetryKind::Unsent, now));
        }
        assert!(!budget.take(RetryKind::Usual, now));
    }

    #[test]
    fn clients_mistakes_take_few_retries_and_a_workers_faults_all() {
        let (budget, now) = (RetryBudget::default(), Instant::now());
        assert_eq!(taken(&budget, RetryKind::Doubtful, now), DOUBTFUL_MIN);
        assert!(budget.take(RetryKind::Usual, now));
        let budget = RetryBudget::default();
        for _ in 0..RETRIES_MIN {
            assert!(budget.take(RetryKind::Doubtful, now));
            budget.proven(now);
        }
        assert!(!budget.take(RetryKind::Doubtful, now));
    }
}
