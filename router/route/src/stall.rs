//! Sources that accept requests and compute nothing.
//!
//! A request *waits* at its source until its first token, or until its end if it is not streamed.
//! A first token, generated blocks and a completed answer are *progress* of the source. A waiting
//! request is overdue once its source has made no progress for the request's patience, which is
//! derived from what was learned of times there. An engine that crawls is as bad as one that hangs:
//! a first token that comes later than that is no progress, and progress with other requests defers
//! a stall by [`DEFERRED_FACTOR`] at most while other sources begin requests.
//!
//! * A stream without a first token stalls its source when it is overdue.
//! * The duration of an answer that is not streamed is not predictable: [`PILE_MIN`] waiting
//!   requests that were sent over at least [`PILE_SPAN`] must pile up too.
//!
//! A stalled source gets no requests for a pause, then one probe at a time, and twice as many
//! after each first token and answer, which also end the pause. A probe that is overdue stalls it
//! again, for up to [`PAUSE_MAX`]. A slow source costs more instead ([`super::slowness`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::source_table::{PerSource, SourceId};

/// Predictions are wrong by a factor of two or three when other requests are preempted.
const FACTOR: f64 = 10.0;

/// Multiple of the longest overrun of a prediction seen recently that is still no stall. An overrun
/// above [`FACTOR`] counts as far as another source had one: a fleet may be slow, but a source that
/// is alone with it may crawl.
const OVERRUN_FACTOR: f64 = 3.0;

/// Multiple of a request's patience for which it waits at a source that goes on with other requests,
/// while other sources begin requests.
const DEFERRED_FACTOR: f64 = 1.5;

/// Larger overruns of predictions are not learned.
const OVERRUN_MAX: f64 = 100.0;

/// The longest overrun seen decays by half in this time.
const OVERRUN_HALF_LIFE: Duration = Duration::from_secs(60);

/// Multiple of the mean duration of answers.
const ANSWER_FACTOR: f64 = 5.0;

/// Weight of a new duration in the mean.
const ANSWER_ALPHA: f64 = 0.1;

/// Pauses for compilation or weights take seconds.
const PATIENCE_MIN: Duration = Duration::from_secs(5);

/// While no source has answered any request: the fleet may be slow.
const PATIENCE_UNLEARNED: Duration = Duration::from_secs(30);

const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// Waiting requests, of which one is overdue, that stall a source without streams.
const PILE_MIN: usize = 4;

/// Between the first and the last of them: requests that one client sends together may all be long.
const PILE_SPAN: Duration = Duration::from_secs(1);

/// Time until an overdue request is looked at again.
const RECHECK: Duration = Duration::from_millis(500);

/// The first pause and the longest one.
const PAUSE: Duration = Duration::from_secs(5);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Probes at a time, of which the progress of one ends the probing.
const PROBES_MAX: usize = 8;

#[derive(Clone, Debug, Default)]
pub struct StallDetector {
    sources: PerSource<SourceWatch>,
    waiting: BTreeMap<u64, WaitingRequest>,
    deadlines: BTreeSet<(Instant, u64)>,
    /// Mean duration of answers that are not streamed, of all sources.
    answer_secs: Option<f64>,
    /// Some source has made progress.
    is_learned: bool,
    count: u64,
}

#[derive(Clone, Debug, Default)]
struct SourceWatch {
    state: StallState,
    /// The number of the last stall, and its time.
    stall: u64,
    stalled: Option<Instant>,
    /// The last pause; zero if there was none since the source was live.
    pause: Duration,
    progressed: Option<Instant>,
    /// The last first token in time, or answer.
    began: Option<Instant>,
    /// Waiting requests, in the order in which they were sent.
    waiting: BTreeMap<u64, Instant>,
    /// Longest observed over predicted time to first token, as of a time.
    overrun: Option<(f64, Instant)>,
    /// Mean duration of answers that are not streamed.
    answer_secs: Option<f64>,
}

#[derive(Clone, Debug, Default)]
enum StallState {
    #[default]
    Live,
    Stalled {
        until: Instant,
    },
    Probing {
        admitted: usize,
        probes: BTreeSet<u64>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    FirstToken,
    End,
}

#[derive(Clone, Copy, Debug)]
struct WaitingRequest {
    source: SourceId,
    sent: Instant,
    predicted: Duration,
    awaited: Awaited,
    /// `None`: it was overdue at a stall, and stalls its source no second time.
    deadline: Option<Instant>,
}

impl StallDetector {
    /// Registers a request with its predicted time to first token.
    pub fn sent(&mut self, counter: u64, source: SourceId, predicted: Duration, now: Instant) {
        self.forget(counter);
        let watch = self.sources.get_mut(source);
        watch.waiting.insert(counter, now);
        watch.begin_probes(now);
        if let StallState::Probing { probes, .. } = &mut watch.state {
            probes.insert(counter);
        }
        let request = WaitingRequest {
            source,
            sent: now,
            predicted,
            awaited: Awaited::FirstToken,
            deadline: None,
        };
        self.waiting.insert(counter, request);
        self.set_deadline(counter, now + self.patience(&request, now));
    }

    /// The answer is not streamed: nothing is seen of it before its end.
    pub fn not_streamed(&mut self, counter: u64, now: Instant) {
        let Some(request) = self.waiting.get_mut(&counter) else {
            return;
        };
        request.awaited = Awaited::End;
        let request = *request;
        if request.deadline.is_some() {
            self.set_deadline(counter, request.sent + self.patience(&request, now));
        }
    }

    /// A first token, or the whole answer of a request that is not streamed. Returns whether it
    /// ended a stall.
    pub fn answered(&mut self, counter: u64, now: Instant) -> bool {
        let Some(request) = self.forget(counter) else {
            return false;
        };
        let elapsed = now.saturating_duration_since(request.sent);
        let is_late =
            request.awaited == Awaited::FirstToken && elapsed > self.patience(&request, now);
        let elapsed = elapsed.as_secs_f64();
        let watch = self.sources.get_mut(request.source);
        let is_live = watch.works_since(request.sent);
        match request.awaited {
            Awaited::FirstToken if is_live => {
                let ratio = elapsed / request.predicted.as_secs_f64().max(1e-3);
                let longest = watch.overrun(now).max(ratio.min(OVERRUN_MAX));
                watch.overrun = Some((longest, now));
            }
            Awaited::End if is_live => {
                watch.answer_secs = Some(averaged(watch.answer_secs, elapsed));
                self.answer_secs = Some(averaged(self.answer_secs, elapsed));
            }
            Awaited::FirstToken | Awaited::End => {}
        }
        !is_late && self.began(request.source, now)
    }

    /// Whether the time of a waiting request is one of a source that works.
    #[must_use]
    pub fn is_measurable(&self, counter: u64) -> bool {
        self.waiting.get(&counter).is_none_or(|request| {
            let watch = self.sources.get(request.source);
            watch.is_none_or(|watch| watch.works_since(request.sent))
        })
    }

    /// The source of a waiting request.
    #[must_use]
    pub fn source_of(&self, counter: u64) -> Option<SourceId> {
        self.waiting.get(&counter).map(|request| request.source)
    }

    /// The source goes on with requests that it has begun.
    pub fn progressed(&mut self, source: SourceId, now: Instant) {
        self.is_learned = true;
        self.sources.get_mut(source).progressed = Some(now);
    }

    /// The source has begun or answered a request. Returns whether this ended a stall.
    fn began(&mut self, source: SourceId, now: Instant) -> bool {
        self.progressed(source, now);
        let watch = self.sources.get_mut(source);
        watch.began = Some(now);
        let is_over = match &mut watch.state {
            StallState::Live => false,
            StallState::Stalled { .. } => {
                watch.state = StallState::Probing {
                    admitted: 2,
                    probes: BTreeSet::new(),
                };
                false
            }
            StallState::Probing { admitted, .. } => {
                *admitted *= 2;
                *admitted > PROBES_MAX
            }
        };
        if is_over {
            watch.state = StallState::Live;
            watch.pause = Duration::ZERO;
        }
        is_over
    }

    /// The request ended without an answer of the engine.
    pub fn ended(&mut self, counter: u64) {
        self.forget(counter);
    }

    /// The source's engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        let watch = self.sources.get_mut(source);
        (watch.state, watch.pause) = (StallState::Live, Duration::ZERO);
    }

    /// Processes deadlines. Call it before [`Self::is_stalled`].
    pub fn advance(&mut self, now: Instant) {
        while let Some(&(deadline, counter)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            self.deadlines.pop_first();
            let next = self.judge(counter, deadline, now);
            if let Some(request) = self.waiting.get_mut(&counter) {
                request.deadline = None;
            }
            if let Some(next) = next {
                self.set_deadline(counter, next);
            }
        }
    }

    /// Whether new requests are for other sources: it is stalled, or its probes are on their way.
    #[must_use]
    pub fn is_stalled(&self, source: SourceId, now: Instant) -> bool {
        let watch = self.sources.get(source);
        watch.is_some_and(|watch| match &watch.state {
            StallState::Live => false,
            StallState::Stalled { until } => now < *until,
            StallState::Probing { admitted, probes } => probes.len() >= *admitted,
        })
    }

    /// The sources that are stalled or probed, each with the number of its last stall.
    pub fn stalls(&self) -> impl Iterator<Item = (SourceId, u64)> {
        let stalled =
            |(_, watch): &(SourceId, &SourceWatch)| !matches!(watch.state, StallState::Live);
        let sources = self.sources.iter().filter(stalled);
        sources.map(|(source, watch)| (source, watch.stall))
    }

    /// Number of stalls so far.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Number of waiting requests.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// At a request's deadline: stalls its source, or returns when to look at it again.
    fn judge(&mut self, counter: u64, deadline: Instant, now: Instant) -> Option<Instant> {
        let request = *self.waiting.get(&counter)?;
        let patience = self.patience(&request, deadline);
        let others_begin = self.others_have_begun(&request);
        let watch = self.sources.get_mut(request.source);
        let silent_since = watch
            .progressed
            .map_or(request.sent, |at| at.max(request.sent));
        let mut due = silent_since + patience;
        if others_begin {
            due = due.min(request.sent + patience.mul_f64(DEFERRED_FACTOR));
        }
        if due > deadline {
            return Some(due);
        }
        let is_proof = match &watch.state {
            // Requests of one stall count once.
            StallState::Stalled { .. } => return None,
            StallState::Probing { probes, .. } => {
                if !probes.contains(&counter) {
                    return None;
                }
                true
            }
            StallState::Live => request.awaited == Awaited::FirstToken || watch.has_pile(),
        };
        if !is_proof {
            // Not from the deadline: a clock that jumps must not cost a loop over its ticks.
            return Some(now + RECHECK);
        }
        watch.pause = (watch.pause * 2).clamp(PAUSE, PAUSE_MAX);
        let until = deadline + watch.pause;
        watch.state = StallState::Stalled { until };
        self.count += 1;
        watch.stall = self.count;
        watch.stalled = Some(deadline);
        None
    }

    /// Longest time without progress of the source that the request explains.
    fn patience(&self, request: &WaitingRequest, now: Instant) -> Duration {
        let watch = self.sources.get(request.source);
        let floor = match self.is_learned {
            true => PATIENCE_MIN,
            false => PATIENCE_UNLEARNED,
        };
        let overrun = match watch.map_or(1.0, |watch| watch.overrun(now)) {
            own if own > FACTOR => own.min(FACTOR.max(self.overrun_of_others(request.source, now))),
            own => own,
        };
        let first_token = request.predicted.as_secs_f64() * FACTOR.max(OVERRUN_FACTOR * overrun);
        let secs = match request.awaited {
            Awaited::FirstToken => first_token,
            Awaited::End => {
                let own = watch.and_then(|watch| watch.answer_secs);
                match own.or(self.answer_secs) {
                    Some(mean) => first_token.max(ANSWER_FACTOR * mean),
                    None => first_token.max(PATIENCE_UNLEARNED.as_secs_f64()),
                }
            }
        };
        let patience = Duration::try_from_secs_f64(secs).unwrap_or(PATIENCE_MAX);
        patience.clamp(floor, PATIENCE_MAX)
    }

    fn others_have_begun(&self, request: &WaitingRequest) -> bool {
        let mut sources = self.sources.iter();
        sources.any(|(source, watch)| {
            source != request.source && watch.began.is_some_and(|at| at > request.sent)
        })
    }

    fn overrun_of_others(&self, source: SourceId, now: Instant) -> f64 {
        let others = self.sources.iter().filter(|(id, _)| *id != source);
        others.fold(1.0, |longest, (_, watch)| longest.max(watch.overrun(now)))
    }

    /// At most one deadline is kept for each waiting request.
    fn set_deadline(&mut self, counter: u64, deadline: Instant) {
        let Some(request) = self.waiting.get_mut(&counter) else {
            return;
        };
        if let Some(before) = request.deadline.replace(deadline) {
            self.deadlines.remove(&(before, counter));
        }
        self.deadlines.insert((deadline, counter));
    }

    fn forget(&mut self, counter: u64) -> Option<WaitingRequest> {
        let request = self.waiting.remove(&counter)?;
        if let Some(deadline) = request.deadline {
            self.deadlines.remove(&(deadline, counter));
        }
        let watch = self.sources.get_mut(request.source);
        watch.waiting.remove(&counter);
        if let StallState::Probing { probes, .. } = &mut watch.state {
            probes.remove(&counter);
        }
        Some(request)
    }
}

impl SourceWatch {
    /// No stall since then, and no probing now: times at a source that does not work say nothing of
    /// one that does.
    fn works_since(&self, sent: Instant) -> bool {
        matches!(self.state, StallState::Live) && self.stalled.is_none_or(|stalled| sent > stalled)
    }

    /// After the pause the next request is a probe.
    fn begin_probes(&mut self, now: Instant) {
        if let StallState::Stalled { until } = self.state
            && now >= until
        {
            self.state = StallState::Probing {
                admitted: 1,
                probes: BTreeSet::new(),
            };
        }
    }

    fn overrun(&self, now: Instant) -> f64 {
        self.overrun.map_or(1.0, |(longest, at)| {
            let idle = now.saturating_duration_since(at).as_secs_f64();
            let kept = longest * 0.5_f64.powf(idle / OVERRUN_HALF_LIFE.as_secs_f64());
            kept.max(1.0)
        })
    }

    fn has_pile(&self) -> bool {
        let sent = |entry: Option<(&u64, &Instant)>| entry.map(|(_, sent)| *sent);
        let first = sent(self.waiting.first_key_value());
        let last = sent(self.waiting.last_key_value());
        self.waiting.len() >= PILE_MIN
            && first
                .zip(last)
                .is_some_and(|(first, last)| last.saturating_duration_since(first) >= PILE_SPAN)
    }
}

fn averaged(mean: Option<f64>, new: f64) -> f64 {
    mean.map_or(new, |mean| mean + ANSWER_ALPHA * (new - mean))
}

#[cfg(test)]
mod tests;
