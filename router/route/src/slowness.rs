//! Sources that are slower than the others, by measured time to first token.
//!
//! Costs count blocks as if each took equally long everywhere. A throttled accelerator, a noisy
//! neighbour or an older card takes a multiple of that while its health check succeeds. Each first
//! token is therefore compared with the time that the median of all candidates would have needed
//! for as many tokens ([`super::ttft::TtftModel::typical`]).
//!
//! A factor of up to two is noise: queues, preemptions and batches delay single first tokens by a
//! factor of two or three. The average decays, so that an unused source is tried again. A source
//! without any first token is a stall ([`super::stall`]).

use std::time::{Duration, Instant};

use super::source_table::{PerSource, SourceId};

/// Weight of a new measurement: the last twenty or so decide.
const ALPHA: f64 = 0.1;

/// Without measurements the average decays by half in this time.
const HALF_LIFE: Duration = Duration::from_secs(300);

/// Differences below this are ignored: one step of the engine.
const ALIKE_SECS: f64 = 0.02;

/// From this ratio on a source is slow, and from the second on the ratio counts in full.
const SLOW: f64 = 2.0;
const SLOW_IN_FULL: f64 = 3.0;

/// The logarithm of [`SLOW`].
const SLOW_LOG: f64 = std::f64::consts::LN_2;

/// Slower sources stall.
const SLOWNESS_MAX: f64 = 10.0;

#[derive(Clone, Debug, Default)]
pub struct SlownessTracker(PerSource<Option<SourceSlowness>>);

#[derive(Clone, Copy, Debug)]
struct SourceSlowness {
    /// Average logarithm of observed over expected time, as of `at`; 0 at first.
    log: f64,
    at: Instant,
}

impl SlownessTracker {
    /// Records a first token after `elapsed`; a typical source would have needed `predicted`.
    pub fn learn(
        &mut self,
        source: SourceId,
        predicted: Duration,
        elapsed: Duration,
        now: Instant,
    ) {
        let lesson = ratio(predicted, elapsed)
            .ln()
            .clamp(-SLOWNESS_MAX.ln(), SLOWNESS_MAX.ln());
        let pace = self.0.get_mut(source);
        let log = pace.map_or(0.0, |pace| pace.faded(now));
        *pace = Some(SourceSlowness {
            log: log + ALPHA * (lesson - log),
            at: now,
        });
    }

    /// Records a request that was given up after `elapsed` without a first token. It counts if it
    /// proves the source slower than known: clients that give up would otherwise hide a slow
    /// source.
    pub fn gave_up(
        &mut self,
        source: SourceId,
        predicted: Duration,
        elapsed: Duration,
        now: Instant,
    ) {
        let known = self.ratio(source, now).unwrap_or(1.0);
        if ratio(predicted, elapsed) > known {
            self.learn(source, predicted, elapsed, now);
        }
    }

    /// Resets a source, whose engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        *self.0.get_mut(source) = None;
    }

    /// Average of observed over expected time to first token; `None` before the first.
    #[must_use]
    pub fn ratio(&self, source: SourceId, now: Instant) -> Option<f64> {
        let pace = self.0.get(source).copied().flatten()?;
        Some(pace.faded(now).exp())
    }

    /// Factor of the source's cost: 1 unless it is slow.
    #[must_use]
    pub fn slowness(&self, source: SourceId, now: Instant) -> f64 {
        // The average only decays towards 0, so most sources need no exponential.
        match self.0.get(source) {
            Some(Some(pace)) if pace.log > SLOW_LOG => factor(pace.faded(now).exp()),
            Some(_) | None => 1.0,
        }
    }
}

impl SourceSlowness {
    fn faded(&self, now: Instant) -> f64 {
        let idle = now.saturating_duration_since(self.at);
        self.log * 0.5_f64.powf(idle.as_secs_f64() / HALF_LIFE.as_secs_f64())
    }
}

fn ratio(predicted: Duration, elapsed: Duration) -> f64 {
    (elapsed.as_secs_f64() + ALIKE_SECS) / (predicted.as_secs_f64() + ALIKE_SECS)
}

/// Factor for a ratio. Continuous, so that no source flaps at a threshold.
fn factor(ratio: f64) -> f64 {
    let part = ((ratio - SLOW) / (SLOW_IN_FULL - SLOW)).clamp(0.0, 1.0);
    (1.0 + part * (ratio - 1.0)).min(SLOWNESS_MAX)
}

#[cfg(test)]
mod tests;
