//! Bounds of how often a source begins a generation, and of how often it repeats a warning.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use warmroute_proto::Tier;

use super::{EngineWarning, GenerationReason};
use crate::mirror::TierLimit;
use crate::wire::NotUnderstood;

/// Time between two equal warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Different warnings within that time, and names that the engine sent.
const WARNINGS_MAX: usize = 16;

/// Allows a burst, and then one for each interval.
#[derive(Debug)]
pub(super) struct TokenBucket {
    burst: u32,
    refill_every: Duration,
    /// Time at which it is full again; `None` before its first use.
    full_at: Option<Instant>,
}

impl TokenBucket {
    /// Three generations for one reason without a pause, and then one each 5 s.
    const fn of_reason() -> Self {
        Self::new(3, Duration::from_secs(5))
    }

    /// Three claims without a pause, and then one each second, whatever the reasons are.
    pub(super) const fn of_claims() -> Self {
        Self::new(3, Duration::from_secs(1))
    }

    const fn new(burst: u32, refill_every: Duration) -> Self {
        Self {
            burst,
            refill_every,
            full_at: None,
        }
    }

    /// Takes a token. Returns the time from which it may be used.
    fn reserve(&mut self, now: Instant) -> Instant {
        let due = self.due(now);
        self.full_at = Some(self.full_at.map_or(now, |at| at.max(now)) + self.refill_every);
        due
    }

    /// Takes a token if there is one now.
    pub(super) fn try_take(&mut self, now: Instant) -> bool {
        self.due(now) <= now && self.reserve(now) <= now
    }

    fn due(&self, now: Instant) -> Instant {
        let until_full = self
            .full_at
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        now + until_full.saturating_sub(self.refill_every * (self.burst - 1))
    }
}

/// A token bucket for each reason of a generation.
#[derive(Debug, Default)]
pub(super) struct GenerationLimiter(BTreeMap<GenerationReason, TokenBucket>);

impl GenerationLimiter {
    /// Takes a token. Returns the time from which the generation may begin.
    pub(super) fn reserve(&mut self, now: Instant, reason: GenerationReason) -> Instant {
        let bucket = self.0.entry(reason).or_insert_with(TokenBucket::of_reason);
        bucket.reserve(now)
    }
}

/// Passes each warning once a minute, and a bounded number of different ones. What is not understood
/// is named once, and a bounded number of names is.
#[derive(Debug, Default)]
pub(super) struct WarningLimiter {
    recent: Vec<(EngineWarning, Instant)>,
    named: Vec<NotUnderstood>,
}

impl WarningLimiter {
    pub(super) fn is_due(&mut self, now: Instant, warning: &EngineWarning) -> bool {
        if let EngineWarning::NotUnderstood(part) = warning {
            let is_new = !self.named.contains(part) && self.named.len() < WARNINGS_MAX;
            if is_new {
                self.named.push(part.clone());
            }
            return is_new;
        }
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
    fn a_bucket_that_is_empty_gives_no_token_and_takes_none() {
        let mut bucket = TokenBucket::of_claims();
        let after = |millis| start() + Duration::from_millis(millis);
        let mut taken = |millis| bucket.try_take(after(millis));
        assert_eq!(
            [0, 0, 0, 0, 999].map(&mut taken),
            [true, true, true, false, false]
        );
        assert_eq!([1000, 1000, 2000].map(&mut taken), [true, false, true]);
        assert_eq!([9000; 4].map(&mut taken), [true, true, true, false]);
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
        assert_eq!(passed.count(), WARNINGS_MAX);
    }
}
