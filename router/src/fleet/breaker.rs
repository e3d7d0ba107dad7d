//! Circuit breaker of one worker: passes over a worker whose requests break, although its probes
//! pass.
//!
//! A request counts at most one failure of a worker, also where it was sent to the worker again on a
//! new connection, so each failure is that of another request.
//! The breaker opens at [`FAILURES_MIN`] failures that are at least half of what ended in one
//! [`WINDOW`]. After a pause it is half-open and admits one trial request at a time, and twice as
//! many after each answer (slow start: a worker without load is the first choice of all requests).
//! An answer when it admits [`TRIALS_MAX`] closes it; a failure opens it for twice as long. An open
//! breaker lowers a worker's rank and does not exclude it: the worker is used where no other one is
//! healthy.

use std::time::{Duration, Instant};

/// Counts start afresh after this.
const WINDOW: Duration = Duration::from_secs(10);

/// Failures that open the breaker. One bad request that a client repeats a few times is below it.
const FAILURES_MIN: u32 = 5;

/// First pause.
const PAUSE: Duration = Duration::from_secs(2);

/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(32);

/// Trials at a time, of which one answer closes the breaker.
const TRIALS_MAX: usize = 8;

/// Longest time for a trial's answer.
const TRIAL_MAX: Duration = Duration::from_secs(32);

#[derive(Clone, Debug, Default)]
pub(crate) struct Breaker {
    state: BreakerState,
    /// When it opened or was reset last. Requests that began before have no say in what is now.
    opened: Option<Instant>,
    /// The last pause; zero if there was none since the breaker closed.
    pause: Duration,
}

#[derive(Clone, Debug)]
enum BreakerState {
    /// The window starts at the first failure; `None` without one.
    Closed(Option<Window>),
    Open {
        until: Instant,
    },
    HalfOpen {
        /// Trials at a time.
        admitted: usize,
        /// The beginnings of the trials in flight.
        trials: Vec<Instant>,
    },
}

#[derive(Clone, Debug)]
struct Window {
    start: Instant,
    failed: u32,
    answered: u32,
}

/// How a request to an engine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestResult {
    /// The engine answered, with whatever status.
    Answered,
    /// The engine closed the connection before the end of its answer, or its answer is invalid.
    Broken,
    /// The request was cancelled, moved to another worker, or not sent.
    Unknown,
}

/// The times of a request and of its result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestTimes {
    pub began: Instant,
    pub now: Instant,
}

impl Default for BreakerState {
    fn default() -> Self {
        Self::Closed(None)
    }
}

impl Breaker {
    /// Closed, for an engine that came back: results of requests that began before are void.
    pub(crate) fn reset(now: Instant) -> Self {
        Self {
            opened: Some(now),
            ..Self::default()
        }
    }

    pub(crate) const fn label(&self) -> &'static str {
        match self.state {
            BreakerState::Closed(_) => "closed",
            BreakerState::Open { .. } => "open",
            BreakerState::HalfOpen { .. } => "half_open",
        }
    }

    pub(crate) const fn is_open(&self) -> bool {
        matches!(self.state, BreakerState::Open { .. })
    }

    /// Further requests are for other workers: it is open, or its trials are in flight.
    pub(crate) const fn passes_over(&self) -> bool {
        match &self.state {
            BreakerState::Open { .. } => true,
            BreakerState::HalfOpen { admitted, trials } => trials.len() >= *admitted,
            BreakerState::Closed(_) => false,
        }
    }

    /// A request is sent to the worker: a half-open breaker's trial, if one more is admitted.
    pub(crate) fn begin(&mut self, now: Instant) {
        if let BreakerState::HalfOpen { admitted, trials } = &mut self.state
            && trials.len() < *admitted
        {
            trials.push(now);
        }
    }

    /// Results of answered requests matter: failures are being counted.
    pub(crate) const fn is_counting(&self) -> bool {
        !matches!(self.state, BreakerState::Closed(None))
    }

    /// Takes in one request's result.
    pub(crate) fn record(&mut self, result: RequestResult, times: RequestTimes) {
        let RequestTimes { began, now } = times;
        if self.opened.is_some_and(|opened| began < opened) {
            return;
        }
        if let BreakerState::HalfOpen { trials, .. } = &mut self.state
            && let Some(at) = trials.iter().position(|trial| *trial == began)
        {
            trials.swap_remove(at);
        }
        match (&mut self.state, result) {
            (BreakerState::HalfOpen { .. }, RequestResult::Unknown) => {}
            (BreakerState::Closed(_), RequestResult::Unknown) => {}
            (BreakerState::Closed(window), _) => {
                if window
                    .as_ref()
                    .is_some_and(|window| now >= window.start + WINDOW)
                {
                    *window = None;
                }
                let opens = match (window, result) {
                    (None, RequestResult::Answered) => false,
                    (window, result) => window
                        .get_or_insert(Window {
                            start: now,
                            failed: 0,
                            answered: 0,
                        })
                        .record(result),
                };
                if opens {
                    self.open(now);
                }
            }
            (BreakerState::HalfOpen { admitted, .. }, RequestResult::Answered)
                if *admitted < TRIALS_MAX =>
            {
                *admitted *= 2;
            }
            (BreakerState::HalfOpen { .. }, RequestResult::Answered) => {
                *self = Self {
                    opened: self.opened,
                    ..Self::default()
                };
            }
            (BreakerState::HalfOpen { .. }, RequestResult::Broken) => self.open(now),
            (BreakerState::Open { .. }, _) => {}
        }
    }

    /// Lets time pass.
    pub(crate) fn tick(&mut self, now: Instant) {
        match &mut self.state {
            BreakerState::Open { until } if now >= *until => {
                self.state = BreakerState::HalfOpen {
                    admitted: 1,
                    trials: Vec::new(),
                };
            }
            BreakerState::HalfOpen { trials, .. } => {
                trials.retain(|began| now < *began + TRIAL_MAX);
            }
            BreakerState::Closed(Some(window)) if now >= window.start + WINDOW => {
                self.state = BreakerState::Closed(None);
            }
            BreakerState::Open { .. } | BreakerState::Closed(_) => {}
        }
    }

    fn open(&mut self, now: Instant) {
        self.opened = Some(now);
        self.pause = (self.pause * 2).clamp(PAUSE, PAUSE_MAX);
        let until = now + self.pause;
        self.state = BreakerState::Open { until };
    }
}

impl Window {
    /// Returns whether the breaker opens.
    const fn record(&mut self, result: RequestResult) -> bool {
        match result {
            RequestResult::Answered => self.answered += 1,
            RequestResult::Broken => self.failed += 1,
            RequestResult::Unknown => {}
        }
        self.failed >= FAILURES_MIN && self.failed >= self.answered
    }
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "virtual time needs an origin; only differences to it are used"
)]
mod tests {
    use super::RequestResult::{Answered, Broken};
    use super::*;

    fn record(breaker: &mut Breaker, result: RequestResult, times: u32, now: Instant) {
        for _ in 0..times {
            breaker.record(result, RequestTimes { began: now, now });
        }
    }

    #[test]
    fn two_broken_requests_are_forgiven_and_many_open_it() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Broken, FAILURES_MIN - 1, now);
        assert!(!breaker.is_open());
        record(&mut breaker, Broken, 1, now);
        assert!(breaker.is_open());
    }

    #[test]
    fn a_worker_that_answers_more_than_it_fails_stays() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Broken, 1, now);
        record(&mut breaker, Answered, 20, now);
        record(&mut breaker, Broken, 18, now);
        assert!(!breaker.is_open());
        record(&mut breaker, Broken, 1, now);
        assert!(breaker.is_open(), "half of all");
    }

    #[test]
    fn failures_of_an_earlier_window_are_void() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Broken, FAILURES_MIN - 1, now);
        record(&mut breaker, Broken, 1, now + WINDOW);
        assert!(!breaker.is_open());
        breaker.tick(now + 2 * WINDOW);
        assert!(!breaker.is_counting());
    }

    #[test]
    fn half_open_it_admits_twice_as_many_trials_after_each_answer() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Broken, FAILURES_MIN, now);
        let now = now + PAUSE;
        breaker.tick(now);
        let admits = |breaker: &mut Breaker| {
            let begun = std::iter::from_fn(|| {
                let admits = !breaker.passes_over();
                breaker.begin(now);
                admits.then_some(())
            });
            begun.count()
        };
        for begun in [1, 2, 3, 5] {
            assert_eq!(admits(&mut breaker), begun);
            assert!(breaker.passes_over() && breaker.is_counting());
            record(&mut breaker, Answered, 1, now);
        }
        assert!(!breaker.is_counting() && !breaker.passes_over());
    }

    #[test]
    fn a_trial_without_a_result_makes_room_for_another() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Broken, FAILURES_MIN, now);
        let now = now + PAUSE;
        breaker.tick(now);
        breaker.begin(now);
        record(&mut breaker, RequestResult::Unknown, 1, now);
        assert!(!breaker.passes_over());
        breaker.begin(now);
        breaker.tick(now + TRIAL_MAX);
        assert!(!breaker.passes_over());
    }

    #[test]
    fn half_open_answers_close_it_and_one_failure_opens_it_for_longer() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Broken, FAILURES_MIN, now);
        record(&mut breaker, Answered, 100, now);
        assert!(breaker.is_open(), "answers to requests sent before");
        breaker.tick(now + PAUSE);
        assert!(!breaker.is_open());
        record(&mut breaker, Broken, 1, now + PAUSE);
        breaker.tick(now + 2 * PAUSE);
        assert!(breaker.is_open(), "twice as long");
        breaker.tick(now + 3 * PAUSE);
        record(&mut breaker, Answered, 4, now + 3 * PAUSE);
        assert!(!breaker.is_counting());
        record(&mut breaker, Broken, FAILURES_MIN - 1, now + 3 * PAUSE);
        assert!(!breaker.is_open());
    }
}
