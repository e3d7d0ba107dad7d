//! Bounds of how often a source begins a generation, and of how often it repeats a warning.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use warmroute_proto::Tier;

use super::{EngineWarning, GenerationReason};
use crate::mirror::TierLimit;

/// Generations that may begin for one reason without a pause.
const BURST: u32 = 3;
/// Time after which one more may begin.
const REFILL_EVERY: Duration = Duration::from_secs(5);
/// Time between two equal warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Different warnings within that time; names come from the engine.
const WARNINGS_MAX: usize = 16;

/// A token bucket for each reason of a generation.
#[derive(Debug, Default)]
pub(super) struct GenerationLimiter {
    /// Time at which the reason's bucket is full again.
    full_at: BTreeMap<GenerationReason, Instant>,
}

impl GenerationLimiter {
    /// Takes a token. Returns the time from which the generation may begin.
    pub(super) fn reserve(&mut self, now: Instant, reason: GenerationReason) -> Instant {
        let full_at = self.full_at.entry(reason).or_insert(now);
        *full_at = (*full_at).max(now);
        let until_full = full_at.saturating_duration_since(now);
        *full_at += REFILL_EVERY;
        now + until_full.saturating_sub(REFILL_EVERY * (BURST - 1))
    }
}

/// Passes each warning once a minute, and a bounded number of different ones.
#[derive(Debug, Default)]
pub(super) struct WarningLimiter {
    recent: Vec<(EngineWarning, Instant)>,
}

impl WarningLimiter {
    pub(super) fn is_due(&mut self, now: Instant, warning: &EngineWarning) -> bool {
        self.recent
            .retain(|(_, at)| now.saturating_duration_since(*at) < WARN_EVERY);
        let is_known = self.recent.iter().any(|(known, _)| known == warning);
        if is_known || self.recent.len() >= WARNINGS_MAX {
            return false;
        }
        self.recent.push((warning.clone(), now));
        true
    }
}

/// The limits of tiers that were reported in this process, each once.
#[derive(Debug, Default)]
pub(super) struct ReportedLimits(Vec<(Tier, TierLimit)>);

impl ReportedLimits {
    /// A limit of this tier that was not reported before. Blocks from before are normal.
    pub(super) fn next(&mut self, tier: Tier, limit: Option<TierLimit>) -> Option<TierLimit> {
        let limit = limit.filter(|&limit| limit != TierLimit::History)?;
        if self.0.contains(&(tier, limit)) {
            return None;
        }
        self.0.push((tier, limit));
        Some(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mirror::Inconsistency;
    use crate::testing::start;
    use crate::wire::Batch;

    #[test]
    fn a_reason_has_a_burst_and_then_one_generation_per_interval() {
        let mut limiter = GenerationLimiter::default();
        let begin = start();
        let after = |secs| begin + Duration::from_secs(secs);
        let reason = GenerationReason::OutboxFull;
        let due = [(); 5].map(|()| limiter.reserve(begin, reason));
        assert_eq!(due, [begin, begin, begin, after(5), after(10)]);
        let other = GenerationReason::GapUnfilled;
        assert_eq!(limiter.reserve(begin, other), begin);
        let due = [(); 4].map(|()| limiter.reserve(after(60), reason));
        assert_eq!(due, [after(60), after(60), after(60), after(65)]);
    }

    #[test]
    fn warnings_are_bounded_in_rate_number_and_length() {
        let mut limiter = WarningLimiter::default();
        let begin = start();
        let warning = EngineWarning::Inconsistent(Inconsistency::TwoPrefixes);
        assert!(limiter.is_due(begin, &warning));
        assert!(!limiter.is_due(begin + Duration::from_secs(59), &warning));
        assert!(limiter.is_due(begin + Duration::from_secs(60), &warning));
        let named = |name: String| {
            let event = serde_json::json!([0, [{"type": name}]]);
            let payload = rmp_serde::to_vec(&event).unwrap();
            let batch = Batch::decode(&payload).unwrap();
            EngineWarning::NotUnderstood(batch.not_understood[0].clone())
        };
        let passed = (0..100).filter(|index| {
            let warning = named(format!("{index}\n{}", "x".repeat(1000)));
            let text = warning.to_string();
            assert!(text.len() < 100 && !text.contains('\n'), "{text}");
            limiter.is_due(begin + Duration::from_secs(60), &warning)
        });
        assert_eq!(passed.count(), WARNINGS_MAX - 1);
    }
}
