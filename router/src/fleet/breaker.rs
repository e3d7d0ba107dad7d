//! Circuit breaker of one worker: passes over a worker whose requests fail, although its probes
//! pass.
//!
//! A request counts at most one failure of a worker, also where it was sent to the worker again on a
//! new connection. Failures that other workers' answers to the same requests prove all count. Of
//! unproven ones equal requests count once, so that no client opens breakers by repeating a
//! request on which engines fail; they open it only if the workers of the same models fail less.
//! A failure in mid-answer counts twice: where the stream is not resumed, its client loses the answer.
//! The breaker opens at [`FAILURES_MIN`] failures that are at least half of what ended in one
//! [`WINDOW`]. After a pause it is half-open and admits one trial request at a time, and twice as
//! many after each answer (slow start: a worker without load is the first choice of all requests).
//! The first trial is a request that another worker can answer where it fails: a stream that breaks
//! costs its client the answer. Only when none came for another pause, it may be any. A stream is
//! answered when it is whole.
//! An answer when it admits [`TRIALS_MAX`] closes it; a failure opens it for twice as long. An open
//! breaker lowers a worker's rank and does not exclude it: the worker is used where no other one is
//! healthy.

use std::time::{Duration, Instant};

/// Counts start afresh after this.
const WINDOW: Duration = Duration::from_secs(10);

/// Failures that open the breaker: more than chance, and each may have cost a client its answer.
const FAILURES_MIN: u32 = 3;

/// A failure in mid-answer counts as so many.
const CUT_WEIGHT: u32 = 2;

/// Failures of the other workers below which they do not count as failing too.
const OTHERS_FAILED_MIN: u32 = 2;

/// First pause.
const PAUSE: Duration = Duration::from_secs(2);

/// Longest pause. A trial costs a repeated request, a longer pause a worker that is well again.
const PAUSE_MAX: Duration = Duration::from_secs(16);

/// Longest pause that an overloaded engine may name.
const REST_MAX: Duration = Duration::from_secs(60);

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
    /// The engine is overloaded, as it says, until then.
    rests_until: Option<Instant>,
    /// The last rest; zero once the engine has answered since.
    rest: Duration,
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
        /// `Some`: none was answered yet, and until then they are requests that can be repeated.
        repeatable_until: Option<Instant>,
    },
}

/// The requests for which a worker may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admits {
    All,
    /// Those that another worker can answer where this one fails.
    Repeatable,
    None,
}

#[derive(Clone, Debug)]
struct Window {
    start: Instant,
    failed: u32,
    /// Those of them that are the worker's for certain.
    proven: u32,
    answered: u32,
    /// Requests whose unproven failures count. At most [`FAILURES_MIN`], then only equal ones are
    /// looked for.
    unproven: Vec<RequestCase>,
}

/// Distinguishes requests: equal requests of one tenant have the same case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCase(pub u64);

/// Results of the other workers of the same models that count now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OtherWorkers {
    pub workers: usize,
    pub failed: u32,
    pub answered: u32,
}

impl OtherWorkers {
    /// Whether unproven failures may be this worker's: there are others, and they fail far less than
    /// half of their requests.
    const fn answer(self) -> bool {
        let fail = self.failed >= OTHERS_FAILED_MIN
            && self.failed.saturating_mul(4) >= self.failed.saturating_add(self.answered);
        self.workers > 0 && !fail
    }
}

/// How a request to an engine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestResult {
    /// The engine served the request, or refused it as the client's mistake.
    Answered,
    /// A stream has begun, and may fail yet.
    Begun,
    /// A stream that had begun is whole.
    Completed,
    /// The engine failed, and its answer itself or the connection shows that it is at fault.
    Broken,
    /// The engine failed, maybe because of the request.
    Unproven(RequestCase),
    /// As `Unproven`, after a part of the answer, so that the request is not repeated.
    Cut(RequestCase),
    /// Another worker has answered a request whose failure was reported as unproven.
    Proven(RequestCase),
    /// The request was cancelled, moved to another worker, or not sent.
    Unknown,
}

impl RequestResult {
    /// Whether the request may be at fault.
    pub(crate) const fn is_unproven(self) -> bool {
        matches!(self, Self::Unproven(_) | Self::Cut(_))
    }
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
            BreakerState::Closed(_) if self.rests() => "resting",
            BreakerState::Closed(_) => "closed",
            BreakerState::Open { .. } => "open",
            BreakerState::HalfOpen { .. } => "half_open",
        }
    }

    /// It is open, or admits trials only.
    pub(crate) const fn is_tripped(&self) -> bool {
        !matches!(self.state, BreakerState::Closed(_))
    }

    pub(crate) const fn is_open(&self) -> bool {
        matches!(self.state, BreakerState::Open { .. })
    }

    /// The engine named a pause, and another worker served the request. If it has answered nothing
    /// since its last rest, it rests for twice as long.
    pub(crate) fn rest(&mut self, pause: Duration, now: Instant) {
        let least = match self.rests() {
            true => self.rest,
            false => (self.rest * 2).min(PAUSE_MAX),
        };
        self.rest = pause.min(REST_MAX).max(least);
        let until = now + self.rest;
        let before = self.rests_until.unwrap_or(until);
        self.rests_until = Some(until.max(before));
    }

    /// It is overloaded, as it says.
    pub(crate) const fn rests(&self) -> bool {
        self.rests_until.is_some()
    }

    /// None while it is open or rests, or its trials are in flight.
    pub(crate) const fn admits(&self) -> Admits {
        if self.rests() {
            return Admits::None;
        }
        match &self.state {
            BreakerState::Open { .. } => Admits::None,
            BreakerState::HalfOpen {
                admitted, trials, ..
            } if trials.len() >= *admitted => Admits::None,
            BreakerState::HalfOpen {
                repeatable_until: Some(_),
                ..
            } => Admits::Repeatable,
            BreakerState::HalfOpen { .. } | BreakerState::Closed(_) => Admits::All,
        }
    }

    /// Further requests are for other workers.
    pub(crate) const fn passes_over(&self) -> bool {
        matches!(self.admits(), Admits::None)
    }

    /// A request is sent to the worker: a half-open breaker's trial, if one more is admitted.
    pub(crate) fn begin(&mut self, now: Instant) {
        if let BreakerState::HalfOpen {
            admitted, trials, ..
        } = &mut self.state
            && trials.len() < *admitted
        {
            trials.push(now);
        }
    }

    /// Results of answered requests matter: failures are being counted.
    pub(crate) const fn is_counting(&self) -> bool {
        !matches!(self.state, BreakerState::Closed(None)) || !self.rest.is_zero()
    }

    /// Failures and answers that count now.
    pub(crate) const fn counts(&self) -> (u32, u32) {
        match &self.state {
            BreakerState::Closed(Some(window)) => (window.failed, window.answered),
            BreakerState::Closed(None)
            | BreakerState::Open { .. }
            | BreakerState::HalfOpen { .. } => (0, 0),
        }
    }

    /// Takes in one request's result, beside what the other workers of its models do.
    pub(crate) fn record(
        &mut self,
        result: RequestResult,
        times: RequestTimes,
        others: OtherWorkers,
    ) {
        let RequestTimes { began, now } = times;
        if self.opened.is_some_and(|opened| began < opened) {
            return;
        }
        let is_served = matches!(
            result,
            RequestResult::Answered | RequestResult::Begun | RequestResult::Completed
        );
        if is_served && !self.rests() {
            self.rest = Duration::ZERO;
        }
        if let BreakerState::HalfOpen { trials, .. } = &mut self.state
            && result != RequestResult::Begun
            && let Some(at) = trials.iter().position(|trial| *trial == began)
        {
            trials.swap_remove(at);
        }
        match (&mut self.state, result) {
            (_, RequestResult::Unknown)
            | (BreakerState::HalfOpen { .. }, RequestResult::Begun)
            | (BreakerState::Closed(_), RequestResult::Completed) => {}
            // Its clients may send requests on which all engines fail.
            (BreakerState::HalfOpen { .. }, _) if result.is_unproven() && !others.answer() => {}
            (BreakerState::Closed(window), _) => {
                if window
                    .as_ref()
                    .is_some_and(|window| now >= window.start + WINDOW)
                {
                    *window = None;
                }
                let opens = match (window, result) {
                    (None, RequestResult::Answered | RequestResult::Begun) => false,
                    (window, result) => window
                        .get_or_insert_with(|| Window::new(now))
                        .record(result, others),
                };
                if opens {
                    self.open(now);
                }
            }
            (
                BreakerState::HalfOpen {
                    admitted,
                    repeatable_until,
                    ..
                },
                RequestResult::Answered | RequestResult::Completed,
            ) if *admitted < TRIALS_MAX => {
                *admitted *= 2;
                *repeatable_until = None;
            }
            (BreakerState::HalfOpen { .. }, RequestResult::Answered | RequestResult::Completed) => {
                *self = Self {
                    opened: self.opened,
                    ..Self::default()
                };
            }
            (
                BreakerState::HalfOpen { .. },
                RequestResult::Broken
                | RequestResult::Unproven(_)
                | RequestResult::Cut(_)
                | RequestResult::Proven(_),
            ) => self.open(now),
            (BreakerState::Open { .. }, _) => {}
        }
    }

    /// Lets time pass.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.rests_until.is_some_and(|until| now >= until) {
            self.rests_until = None;
        }
        match &mut self.state {
            BreakerState::Open { until } if now >= *until => {
                self.state = BreakerState::HalfOpen {
                    admitted: 1,
                    trials: Vec::new(),
                    repeatable_until: Some(now + self.pause),
                };
            }
            BreakerState::HalfOpen {
                trials,
                repeatable_until,
                ..
            } => {
                trials.retain(|began| now < *began + TRIAL_MAX);
                *repeatable_until = repeatable_until.filter(|until| now < *until);
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
    const fn new(start: Instant) -> Self {
        Self {
            start,
            failed: 0,
            proven: 0,
            answered: 0,
            unproven: Vec::new(),
        }
    }

    /// Returns whether the breaker opens.
    fn record(&mut self, result: RequestResult, others: OtherWorkers) -> bool {
        match result {
            RequestResult::Answered | RequestResult::Begun => self.answered += 1,
            RequestResult::Broken => {
                self.failed += 1;
                self.proven += 1;
            }
            RequestResult::Unproven(case) | RequestResult::Cut(case)
                if self.unproven.contains(&case) => {}
            RequestResult::Unproven(case) | RequestResult::Cut(case) => {
                let is_cut = matches!(result, RequestResult::Cut(_));
                self.failed += if is_cut { CUT_WEIGHT } else { 1 };
                if self.unproven.len() < FAILURES_MIN as usize {
                    self.unproven.push(case);
                }
            }
            // Counted already. From here on its equals count too.
            RequestResult::Proven(case) if self.unproven.contains(&case) => {
                self.unproven.retain(|known| *known != case);
                self.proven += 1;
            }
            RequestResult::Proven(_) => {
                self.failed += 1;
                self.proven += 1;
            }
            RequestResult::Completed | RequestResult::Unknown => {}
        }
        let is_proven = self.proven >= FAILURES_MIN;
        self.failed >= FAILURES_MIN
            && self.failed >= self.answered
            && (is_proven || others.answer())
    }
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "virtual time needs an origin; only differences to it are used"
)]
mod tests {
    use super::RequestResult::{Answered, Begun, Broken, Completed, Cut, Unproven};
    use super::*;

    /// One worker without failures.
    const OTHERS: OtherWorkers = OtherWorkers {
        workers: 1,
        failed: 0,
        answered: 0,
    };

    fn record(breaker: &mut Breaker, result: RequestResult, times: u32, now: Instant) {
        for _ in 0..times {
            breaker.record(result, RequestTimes { began: now, now }, OTHERS);
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
    fn two_lost_answers_of_different_requests_open_it() {
        let now = Instant::now();
        let cut = |cases: [u64; 2]| {
            let mut breaker = Breaker::default();
            for case in cases {
                let result = Cut(RequestCase(case));
                record(&mut breaker, result, 1, now);
            }
            breaker.is_open()
        };
        assert!(cut([1, 2]));
        assert!(!cut([1, 1]), "one client repeats its request");
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
    fn the_first_trial_is_one_that_can_be_repeated_or_comes_late() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Broken, FAILURES_MIN, now);
        assert_eq!(breaker.admits(), Admits::None);
        let half_open = now + PAUSE;
        breaker.tick(half_open);
        assert_eq!(breaker.admits(), Admits::Repeatable);
        let mut answered = breaker.clone();
        record(&mut answered, Answered, 1, half_open);
        assert_eq!(answered.admits(), Admits::All);
        breaker.tick(half_open + PAUSE);
        assert_eq!(breaker.admits(), Admits::All, "no other request came");
        record(&mut breaker, Broken, 1, half_open + PAUSE);
        breaker.tick(half_open + 3 * PAUSE);
        assert_eq!(breaker.admits(), Admits::Repeatable);
    }

    #[test]
    fn a_stream_is_a_trial_until_it_is_whole() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Broken, FAILURES_MIN, now);
        let half_open = now + PAUSE;
        breaker.tick(half_open);
        breaker.begin(half_open);
        record(&mut breaker, Begun, 1, half_open);
        assert!(breaker.passes_over());
        let mut broken = breaker.clone();
        record(&mut broken, Unproven(RequestCase(1)), 1, half_open);
        assert!(broken.is_open());
        record(&mut breaker, Completed, 1, half_open);
        assert_eq!(breaker.admits(), Admits::All);
    }

    #[test]
    fn one_request_on_which_an_engine_fails_opens_nothing_however_often_it_comes() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        record(&mut breaker, Unproven(RequestCase(7)), 100, now);
        assert!(!breaker.is_open());
        for case in 0..4 {
            record(&mut breaker, Unproven(RequestCase(case)), 1, now);
        }
        assert!(breaker.is_open(), "four requests fail");
    }

    #[test]
    fn unproven_failures_open_no_breaker_where_the_others_fail_too_or_there_are_none() {
        let now = Instant::now();
        for (workers, failed, answered, opens) in [
            (1, 0, 100, true),
            (2, 2, 7, true),
            (2, 2, 6, false),
            (1, 9, 0, false),
            (0, 0, 0, false),
        ] {
            let others = OtherWorkers {
                workers,
                failed,
                answered,
            };
            let mut breaker = Breaker::default();
            for case in 0..20 {
                let times = RequestTimes { began: now, now };
                breaker.record(Unproven(RequestCase(case)), times, others);
            }
            assert_eq!(breaker.is_open(), opens, "{others:?}");
        }
    }

    #[test]
    fn an_overloaded_engine_rests_for_as_long_as_it_says_within_a_bound() {
        let now = Instant::now();
        for (named, rest) in [(3, 3), (3600, 60)] {
            let mut breaker = Breaker::default();
            breaker.rest(Duration::from_secs(named), now);
            breaker.rest(Duration::from_secs(1), now);
            breaker.tick(now + Duration::from_secs(rest - 1));
            assert!(breaker.passes_over() && !breaker.is_open());
            breaker.tick(now + Duration::from_secs(rest));
            assert!(!breaker.passes_over());
        }
    }

    #[test]
    fn an_engine_that_answers_nothing_between_its_rests_rests_twice_as_long() {
        let (mut breaker, mut now) = (Breaker::default(), Instant::now());
        let rests_for = |breaker: &mut Breaker, now: &mut Instant| {
            // Requests that were on their way together are one rest.
            breaker.rest(PAUSE, *now);
            breaker.rest(PAUSE, *now);
            let begun = *now;
            while breaker.rests() {
                *now += Duration::from_secs(1);
                breaker.tick(*now);
            }
            now.duration_since(begun).as_secs()
        };
        let found = [(); 5].map(|()| rests_for(&mut breaker, &mut now));
        assert_eq!(found, [2, 4, 8, 16, 16]);
        assert!(breaker.is_counting());
        record(&mut breaker, Answered, 1, now);
        assert!(!breaker.is_counting());
        assert_eq!(rests_for(&mut breaker, &mut now), 2);
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
