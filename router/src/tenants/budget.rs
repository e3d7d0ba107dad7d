//! A bucket of units (requests or tokens) that refills steadily. Pure.
//!
//! What a request generates is known only after its admission, so the bucket may be overdrawn. The
//! debt delays later admissions: over any time `t`, at most `limit + t × rate` units are admitted,
//! and what was spent after admission counts against the next ones.

use std::time::{Duration, Instant};

/// Units in a period. The bucket holds as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    pub units: u64,
    pub period: Duration,
}

impl Quota {
    fn per_sec(self) -> f64 {
        self.units as f64 / self.period.as_secs_f64()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Budget {
    quota: Quota,
    /// Units left at `at`; below zero: debt.
    level: f64,
    at: Instant,
    /// Share of the rate that others use, who do not say so.
    reserved: f64,
}

/// A budget as clients see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BudgetStatus {
    pub limit: u64,
    pub remaining: u64,
    /// Time until the bucket is full.
    pub reset: Duration,
}

impl Budget {
    /// A full bucket.
    pub(crate) fn new(quota: Quota, now: Instant) -> Self {
        Self {
            quota,
            level: quota.units as f64,
            at: now,
            reserved: 0.0,
        }
    }

    /// Changes the quota. What was spent stays spent, up to two of the new buckets: much of a larger
    /// quota would otherwise be a debt of hours.
    pub(crate) fn set_quota(&mut self, quota: Quota, now: Instant) {
        self.refill(now);
        let spent = self.quota.units as f64 - self.level;
        self.quota = quota;
        self.level = quota.units as f64 - spent.min(2.0 * quota.units as f64);
    }

    pub(crate) const fn quota(&self) -> Quota {
        self.quota
    }

    /// Keeps a share of the rate for others.
    pub(crate) fn set_reserved(&mut self, share: f64, now: Instant) {
        self.refill(now);
        self.reserved = share;
    }

    /// Units left; below zero: debt.
    pub(crate) fn level(&mut self, now: Instant) -> f64 {
        self.refill(now);
        self.level
    }

    /// Time until `units` may be spent; zero: now. More units than the bucket holds need a full
    /// bucket, and leave a debt.
    pub(crate) fn wait_for(&mut self, units: u64, now: Instant) -> Duration {
        self.refill(now);
        let needed = units.min(self.quota.units) as f64;
        let missing = needed - self.level;
        if missing <= 0.0 {
            return Duration::ZERO;
        }
        Duration::try_from_secs_f64(missing / self.per_sec()).unwrap_or(Duration::MAX)
    }

    pub(crate) fn spend(&mut self, units: u64, now: Instant) {
        self.refill(now);
        self.level -= units as f64;
    }

    /// Lowers the level to that of another bucket of this quota, if that is lower. A debt of more than
    /// a bucket counts as one.
    pub(crate) fn lower(&mut self, level: f64, now: Instant) {
        self.refill(now);
        self.level = self.level.min(level.max(-(self.quota.units as f64)));
    }

    /// Returns units that were spent and not used.
    pub(crate) fn refund(&mut self, units: u64, now: Instant) {
        self.refill(now);
        self.level = (self.level + units as f64).min(self.quota.units as f64);
    }

    pub(crate) fn status(&mut self, now: Instant) -> BudgetStatus {
        self.refill(now);
        let missing = self.quota.units as f64 - self.level;
        let reset = Duration::try_from_secs_f64(missing / self.per_sec());
        BudgetStatus {
            limit: self.quota.units,
            // Saturates at zero for a debt.
            remaining: self.level as u64,
            reset: reset.unwrap_or(Duration::ZERO),
        }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        let full = self.quota.units as f64;
        self.level = (self.level + passed * self.per_sec()).min(full);
    }

    fn per_sec(&self) -> f64 {
        self.quota.per_sec() * (1.0 - self.reserved)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn quota(units: u64) -> Quota {
        Quota {
            units,
            period: MINUTE,
        }
    }

    #[expect(clippy::disallowed_methods, reason = "an origin of virtual time")]
    fn origin() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_debt_delays_what_follows() {
        let now = origin();
        let mut budget = Budget::new(quota(600), now);
        assert_eq!(budget.wait_for(600, now), Duration::ZERO);
        budget.spend(600, now);
        // A stream generates 300 more.
        budget.spend(300, now);
        assert_eq!(budget.wait_for(1, now), Duration::from_secs_f64(30.1));
        let status = budget.status(now);
        assert_eq!((status.limit, status.remaining), (600, 0));
        assert_eq!(status.reset, Duration::from_secs(90));
        let later = now + Duration::from_secs(31);
        assert_eq!(budget.wait_for(1, later), Duration::ZERO);
        // A clock that goes back takes nothing.
        assert_eq!(budget.wait_for(1, now), Duration::ZERO);
    }

    #[test]
    fn more_than_a_minutes_tokens_need_a_full_bucket() {
        let now = origin();
        let mut budget = Budget::new(quota(60), now);
        assert_eq!(budget.wait_for(1000, now), Duration::ZERO);
        budget.spend(1000, now);
        assert_eq!(budget.wait_for(60, now), Duration::from_secs(1000));
    }

    #[test]
    fn a_refund_never_exceeds_the_bucket_and_a_new_quota_keeps_what_was_spent() {
        let now = origin();
        let mut budget = Budget::new(quota(100), now);
        budget.refund(50, now);
        assert_eq!(budget.status(now).remaining, 100);
        budget.spend(80, now);
        budget.set_quota(quota(200), now);
        assert_eq!(budget.status(now).remaining, 120);
        budget.set_quota(quota(50), now);
        assert_eq!(budget.status(now).remaining, 0);
        budget.spend(100_000, now);
        budget.set_quota(quota(60), now);
        assert_eq!(budget.wait_for(1, now), Duration::from_secs(61));
    }

    proptest! {
        /// In each window of the run the units admitted are bounded by the bucket and its refill.
        #[test]
        fn no_window_admits_more_than_the_bucket_and_its_refill(
            limit in 1_u64..1000,
            steps in prop::collection::vec((0_u64..5000, 0_u64..300, 0_u64..200), 1..200),
        ) {
            let start = origin();
            let mut now = start;
            let mut budget = Budget::new(quota(limit), now);
            let mut admitted: Vec<(Instant, u64)> = Vec::new();
            for (millis, units, after) in steps {
                now += Duration::from_millis(millis);
                let units = units.min(limit);
                if budget.wait_for(units, now).is_zero() {
                    budget.spend(units, now);
                    admitted.push((now, units));
                    // Generated after admission.
                    budget.spend(after, now);
                } else {
                    // It is admitted after the time named, and not before.
                    let wait = budget.wait_for(units, now);
                    let mut copy = budget.clone();
                    let early = now + wait.mul_f64(0.999);
                    prop_assert!(!copy.wait_for(units, early).is_zero());
                    let late = now + wait + Duration::from_micros(1);
                    prop_assert!(copy.wait_for(units, late) < Duration::from_micros(2));
                }
            }
            for (at, (first, _)) in admitted.iter().enumerate() {
                let mut sum = 0;
                for (last, units) in &admitted[at..] {
                    sum += units;
                    let refill = quota(limit).per_sec() * (*last - *first).as_secs_f64();
                    prop_assert!(sum as f64 <= limit as f64 + refill + 1e-3);
                }
            }
        }
    }
}
