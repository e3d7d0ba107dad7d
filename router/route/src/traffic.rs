//! Running totals of this router's requests, and recent times to first token of each source: what a
//! viewer of the live page sees. Nothing decides by them.
//!
//! Totals only grow: a reader subtracts an earlier copy. Times to first token are counted in bins a
//! quarter of an octave wide, so that a quantile is off by 9 % at most.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::decide::{Decision, DecisionBasis};
use super::prompt::Prompt;
use super::source_table::{PerSource, SourceId};
use super::terms::Terms;

/// Decisions by their basis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BasisCounts {
    pub index: u64,
    pub reported: u64,
    pub prediction: u64,
    pub approximate: u64,
    pub load_only: u64,
}

/// Names of the ladder's rungs, best first: decisions by the index's credit have the state that it
/// rests on, the others their basis.
pub const RUNGS: [&str; 10] = [
    "exact",
    "partial",
    "unverified",
    "stale",
    "catching_up",
    "unknown",
    "reported",
    "prediction",
    "approximate",
    "load_only",
];

/// From 1 ms on; the last bin begins at about 15 minutes.
const BINS: usize = 80;
const BINS_PER_OCTAVE: f64 = 4.0;

/// Weight of a new first token in a source's average.
const WEIGHT: f64 = 0.2;

/// Age at which an average is no longer shown.
const RECENT: Duration = Duration::from_secs(60);

/// What this router counted since its start.
#[derive(Clone, Debug)]
pub struct TrafficTotals {
    /// Sum over all decisions.
    pub prompt_tokens: u64,
    /// Prompt tokens that the index credited to the chosen source.
    pub credited_tokens: u64,
    /// Prompt tokens, as engines count them, of the answers whose usage reports cached tokens.
    pub reported_prompt_tokens: u64,
    /// Cached tokens of the same answers.
    pub reported_cached_tokens: u64,
    /// Decisions by rung, in the order of [`RUNGS`].
    pub rungs: [u64; RUNGS.len()],
    /// First tokens by the time that they took.
    pub ttft: [u64; BINS],
}

impl Default for TrafficTotals {
    fn default() -> Self {
        Self {
            prompt_tokens: 0,
            credited_tokens: 0,
            reported_prompt_tokens: 0,
            reported_cached_tokens: 0,
            rungs: [0; RUNGS.len()],
            ttft: [0; BINS],
        }
    }
}

impl TrafficTotals {
    /// Decisions by basis.
    pub(crate) fn bases(&self) -> BasisCounts {
        let [index @ .., reported, prediction, approximate, load_only] = self.rungs;
        BasisCounts {
            index: index.iter().sum(),
            reported,
            prediction,
            approximate,
            load_only,
        }
    }

    /// The time within which this share of the first tokens since an earlier copy came; `None`
    /// without any.
    #[must_use]
    pub fn ttft_quantile(&self, earlier: &Self, share: f64) -> Option<Duration> {
        let counts = self.ttft.iter().zip(earlier.ttft).enumerate();
        let counts = counts.map(|(bin, (now, then))| (bin, now.saturating_sub(then)));
        let total: u64 = counts.clone().map(|(_, count)| count).sum();
        // A saturating cast of a number between 1 and the total.
        let rank = ((total as f64 * share).ceil() as u64).max(1);
        let mut below = 0;
        for (bin, count) in counts {
            below += count;
            if below >= rank {
                let octaves = (bin as f64 + 0.5) / BINS_PER_OCTAVE;
                return Some(Duration::from_secs_f64(octaves.exp2() / 1e3));
            }
        }
        None
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Traffic {
    pub totals: TrafficTotals,
    recent: PerSource<Option<RecentTtft>>,
}

/// An average of times to first token.
#[derive(Clone, Copy, Debug)]
struct RecentTtft {
    secs: f64,
    at: Instant,
}

impl Traffic {
    pub(crate) fn decided(&mut self, prompt: &Prompt, decision: &Decision) {
        let totals = &mut self.totals;
        let block_tokens = u64::from(decision.claim.block_tokens());
        totals.prompt_tokens += u64::from(prompt.tokens());
        totals.credited_tokens += u64::from(decision.overlap_blocks) * block_tokens;
        totals.rungs[rung(&decision.chosen)] += 1;
    }

    /// An engine reported a prompt's tokens, and how many of them were cached.
    pub(crate) fn reported(&mut self, prompt_tokens: u64, cached_tokens: u64) {
        let totals = &mut self.totals;
        // Numbers from outside.
        totals.reported_prompt_tokens = totals.reported_prompt_tokens.saturating_add(prompt_tokens);
        totals.reported_cached_tokens = totals.reported_cached_tokens.saturating_add(cached_tokens);
    }

    pub(crate) fn first_token(&mut self, source: SourceId, elapsed: Duration, now: Instant) {
        let secs = elapsed.as_secs_f64();
        // A saturating cast of a number of at least 0.
        let bin = ((secs * 1e3).max(1.0).log2() * BINS_PER_OCTAVE) as usize;
        self.totals.ttft[bin.min(BINS - 1)] += 1;
        let known = self
            .ttft(source, now)
            .map_or(secs, |ttft| ttft.as_secs_f64());
        *self.recent.get_mut(source) = Some(RecentTtft {
            secs: known + WEIGHT * (secs - known),
            at: now,
        });
    }

    /// The source's average; `None` without a first token in the last minute.
    pub(crate) fn ttft(&self, source: SourceId, now: Instant) -> Option<Duration> {
        let recent = (*self.recent.get(source)?)?;
        let age = now.saturating_duration_since(recent.at);
        (age < RECENT).then(|| Duration::from_secs_f64(recent.secs))
    }
}

/// Index in [`RUNGS`].
const fn rung(chosen: &Terms) -> usize {
    match chosen.basis {
        // The states' numbers are stable and in this order.
        DecisionBasis::Index => chosen.state as usize,
        DecisionBasis::Reported => 6,
        DecisionBasis::Prediction => 7,
        DecisionBasis::Approximate => 8,
        DecisionBasis::LoadOnly => 9,
    }
}

#[cfg(test)]
mod tests {
    use warmroute_proto::query::SourceState;

    use super::*;

    use crate::testing::{source_id, start};

    #[test]
    fn rungs_have_the_names_of_states_and_bases() {
        for state in [
            SourceState::Exact,
            SourceState::Partial,
            SourceState::Unverified,
            SourceState::Stale,
            SourceState::CatchingUp,
            SourceState::Unknown,
        ] {
            assert_eq!(RUNGS[state as usize], state.label());
        }
        for (index, basis) in [
            (6, DecisionBasis::Reported),
            (7, DecisionBasis::Prediction),
            (8, DecisionBasis::Approximate),
            (9, DecisionBasis::LoadOnly),
        ] {
            assert_eq!(RUNGS[index], basis.label());
        }
    }

    #[test]
    fn quantiles_are_those_since_the_earlier_copy() {
        let (mut traffic, now) = (Traffic::default(), start());
        let source = source_id();
        traffic.first_token(source, Duration::from_secs(9), now);
        let earlier = traffic.totals.clone();
        assert_eq!(traffic.totals.ttft_quantile(&earlier, 0.5), None);
        for ms in [20, 20, 20, 900] {
            traffic.first_token(source, Duration::from_millis(ms), now);
        }
        let quantile = |share| {
            let quantile = traffic.totals.ttft_quantile(&earlier, share);
            quantile.unwrap().as_secs_f64() * 1e3
        };
        assert!(
            (quantile(0.5) / 20.0 - 1.0).abs() < 0.1,
            "{}",
            quantile(0.5)
        );
        assert!(
            (quantile(1.0) / 900.0 - 1.0).abs() < 0.1,
            "{}",
            quantile(1.0)
        );
    }

    #[test]
    fn an_average_is_forgotten_after_a_minute() {
        let (mut traffic, now) = (Traffic::default(), start());
        let source = source_id();
        assert_eq!(traffic.ttft(source, now), None);
        traffic.first_token(source, Duration::ZERO, now);
        traffic.first_token(source, Duration::from_secs(1), now);
        assert_eq!(traffic.ttft(source, now), Some(Duration::from_millis(200)));
        assert_eq!(traffic.ttft(source, now + RECENT), None);
    }
}
