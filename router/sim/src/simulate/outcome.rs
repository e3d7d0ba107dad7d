//! Outcome of a run: samples, sums and figures.

use std::time::Duration;

use serde::Serialize;

use crate::sim::EngineTotals;
use crate::trace::TraceRequest;

/// A completed request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletedRequest {
    /// Since the run began.
    pub(crate) arrived: Duration,
    pub(crate) input_tokens: u32,
    pub(crate) ttft: Duration,
    /// From the first token to the last.
    pub(crate) decode: Duration,
    pub(crate) output_tokens: u32,
    /// What the routers' index credited to the engine that answered.
    pub(crate) credited_tokens: u64,
    /// What that engine found cached when it first scheduled the request.
    pub(crate) cached_tokens: u64,
}

/// When an answer counts as good: both bounds are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatencyBounds {
    pub(crate) ttft: Duration,
    /// The mean time between a request's tokens.
    pub(crate) itl: Duration,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct RunOutcome {
    done: Vec<CompletedRequest>,
    pub(crate) requests: usize,
    pub(crate) prompt_tokens: u64,
    pub(crate) refused: usize,
    pub(crate) preemptions: u64,
    pub(crate) stalls: u64,
    /// Slots that some router still believed open at the end.
    pub(crate) open_slots: usize,
    pub(crate) sent: u64,
    pub(crate) sent_bytes: u64,
    /// Moved requests.
    pub(crate) moved: u64,
    /// Virtual time until the last event.
    pub(crate) took: Duration,
    pub(crate) loads: Vec<EngineTotals>,
    /// Answers to requests that arrived while workers were slow, and later.
    pub(crate) slow: SlowShare,
    pub(crate) later: SlowShare,
}

/// The first worker's part of all answers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SlowShare {
    /// The slow workers.
    pub(crate) workers: usize,
    pub(crate) of_slow: u64,
    pub(crate) of_all: u64,
}

impl SlowShare {
    fn of(self, workers: usize) -> Option<f64> {
        let even = self.of_all as f64 * share(self.workers as f64, workers as f64);
        (self.of_all > 0).then(|| share(self.of_slow as f64, even))
    }
}

/// Answers to the requests that arrived in one part of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TimeSlot {
    pub(crate) start: Duration,
    /// `None` without requests.
    pub(crate) ttft_mean: Option<Duration>,
    pub(crate) hit_rate: Option<f64>,
}

/// Figures of a run. Times in milliseconds; percentiles are exact (nearest rank).
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) requests: usize,
    pub(crate) refused: usize,
    /// Cached prompt tokens over all prompt tokens.
    pub(crate) hit_rate: f64,
    pub(crate) ttft_mean_ms: f64,
    pub(crate) ttft_p50_ms: f64,
    pub(crate) ttft_p90_ms: f64,
    pub(crate) ttft_p99_ms: f64,
    /// Mean of all gaps between tokens.
    pub(crate) itl_mean_ms: f64,
    pub(crate) e2e_mean_ms: f64,
    /// Good answers over all requests.
    pub(crate) goodput: f64,
    /// Requests a second until the last one ended.
    pub(crate) throughput_rps: f64,
    /// Credited tokens over all prompt tokens.
    pub(crate) credited_rate: f64,
    /// Computed tokens of the busiest worker over the mean.
    pub(crate) busiest_worker: f64,
    pub(crate) preemptions: u64,
    pub(crate) stalls: u64,
    /// Messages between routers per request, and their bytes.
    pub(crate) sync_messages_per_request: f64,
    pub(crate) sync_bytes_per_request: f64,
    /// Moved requests over all requests; `None` if none was moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) moved_share: Option<f64>,
    /// A slow worker's answers to requests that arrived while it was slow, over a worker's mean;
    /// `later_share` for later arrivals. `None` without a slow worker or arrivals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) slow_worker_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) later_share: Option<f64>,
}

impl RunOutcome {
    pub(crate) fn arrived(&mut self, request: &TraceRequest) {
        self.requests += 1;
        self.prompt_tokens += u64::from(request.input_tokens);
    }

    pub(crate) fn finished(&mut self, done: CompletedRequest) {
        self.done.push(done);
    }

    /// Parts of equal length of the time in which requests arrived.
    #[must_use]
    pub(crate) fn slots(&self, count: u32) -> Vec<TimeSlot> {
        let last = self.done.iter().map(|done| done.arrived).max();
        let length = last.unwrap_or_default() / count.max(1) + Duration::from_nanos(1);
        let slot = |number: u32| {
            let (start, end) = (length * number, length * (number + 1));
            let here = || {
                self.done
                    .iter()
                    .filter(|done| (start..end).contains(&done.arrived))
            };
            let answers = u32::try_from(here().count()).unwrap_or(u32::MAX);
            let ttfts: Duration = here().map(|done| done.ttft).sum();
            let cached: u64 = here().map(|done| done.cached_tokens).sum();
            let tokens: u64 = here().map(|done| u64::from(done.input_tokens)).sum();
            TimeSlot {
                start,
                ttft_mean: ttfts.checked_div(answers),
                hit_rate: (tokens > 0).then(|| share(cached as f64, tokens as f64)),
            }
        };
        (0..count).map(slot).collect()
    }

    /// Computed tokens of each worker.
    #[must_use]
    pub(crate) fn worker_tokens(&self) -> Vec<u64> {
        let loads = self.loads.iter();
        loads
            .map(|load| load.computed_prompt_tokens + load.generated_tokens)
            .collect()
    }

    #[cfg(test)]
    pub(crate) fn done(&self) -> &[CompletedRequest] {
        &self.done
    }

    #[must_use]
    pub(crate) fn goodput(&self, bounds: LatencyBounds) -> f64 {
        let good = self.done.iter().filter(|done| done.is_within(bounds));
        good.count() as f64 / self.requests.max(1) as f64
    }

    #[must_use]
    pub(crate) fn figures(&self, bounds: LatencyBounds) -> Figures {
        let mut ttfts: Vec<Duration> = self.done.iter().map(|done| done.ttft).collect();
        ttfts.sort_unstable();
        let sum =
            |each: fn(&CompletedRequest) -> Duration| self.done.iter().map(each).sum::<Duration>();
        let tokens =
            |each: fn(&CompletedRequest) -> u64| self.done.iter().map(each).sum::<u64>() as f64;
        let (ttft, decode) = (sum(|done| done.ttft), sum(|done| done.decode));
        let gaps: u64 = self
            .done
            .iter()
            .map(|done| u64::from(done.output_tokens) - 1)
            .sum();
        let (done, requests) = (self.done.len() as f64, self.requests as f64);
        let computed = self.worker_tokens();
        let mean = computed.iter().sum::<u64>() as f64 / computed.len().max(1) as f64;
        let busiest = computed.iter().copied().max().unwrap_or(0) as f64;
        Figures {
            requests: self.requests,
            refused: self.refused,
            hit_rate: share(tokens(|done| done.cached_tokens), self.prompt_tokens as f64),
            ttft_mean_ms: share(millis(ttft), done),
            ttft_p50_ms: millis(percentile(&ttfts, 50)),
            ttft_p90_ms: millis(percentile(&ttfts, 90)),
            ttft_p99_ms: millis(percentile(&ttfts, 99)),
            itl_mean_ms: share(millis(decode), gaps as f64),
            e2e_mean_ms: share(millis(ttft + decode), done),
            goodput: self.goodput(bounds),
            throughput_rps: share(done, self.took.as_secs_f64()),
            credited_rate: share(
                tokens(|done| done.credited_tokens),
                self.prompt_tokens as f64,
            ),
            busiest_worker: share(busiest, mean),
            preemptions: self.preemptions,
            stalls: self.stalls,
            sync_messages_per_request: share(self.sent as f64, requests),
            sync_bytes_per_request: share(self.sent_bytes as f64, requests),
            slow_worker_share: self.slow.of(self.loads.len()),
            later_share: self.later.of(self.loads.len()),
            moved_share: (self.moved > 0).then(|| share(self.moved as f64, requests)),
        }
    }
}

impl CompletedRequest {
    fn is_within(&self, bounds: LatencyBounds) -> bool {
        let gaps = self.output_tokens.saturating_sub(1);
        self.ttft <= bounds.ttft && self.decode <= bounds.itl * gaps
    }
}

/// Smallest sample that `percent` of all samples do not exceed.
pub(crate) fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let times: Vec<Duration> = (1..=200).map(Duration::from_millis).collect();
        let found = [1, 50, 99, 100].map(|percent| percentile(&times, percent).as_millis());
        assert_eq!(found, [2, 100, 198, 200]);
        assert_eq!(percentile(&times[..1], 99), times[0]);
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn goodput_counts_the_refused_and_the_late() {
        let millis = Duration::from_millis;
        let done = |ttft, decode| CompletedRequest {
            arrived: Duration::ZERO,
            input_tokens: 100,
            ttft: millis(ttft),
            decode: millis(decode),
            output_tokens: 11,
            credited_tokens: 60,
            cached_tokens: 30,
        };
        let outcome = RunOutcome {
            requests: 5,
            prompt_tokens: 400,
            refused: 1,
            done: vec![done(10, 100), done(11, 100), done(10, 101), done(1, 1)],
            ..RunOutcome::default()
        };
        let bounds = LatencyBounds {
            ttft: millis(10),
            itl: millis(10),
        };
        assert_eq!(outcome.goodput(bounds), 0.4);
        let figures = outcome.figures(bounds);
        assert_eq!((figures.hit_rate, figures.credited_rate), (0.3, 0.6));
    }
}
