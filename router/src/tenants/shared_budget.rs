//! A budget that routers share. Pure.
//!
//! Each router knows the whole budget, charged with its own use and with what others report, and has
//! a *claim*: the part that it may spend before it hears from the others. Claims grow only out of
//! what no other router claims, so routers that report late do not spend the same units. A router
//! that does not know the others yet has a [`CAUTIOUS_PARTS`]th part.

use std::time::{Duration, Instant};

use super::budget::{Budget, BudgetStatus, Quota};

/// Time until claims may have changed.
pub(super) const CLAIM_WAIT: Duration = Duration::from_millis(200);

/// The part of a limit that a router has before it knows the others is one of so many: within the
/// error of limits over several routers, whatever the others use.
pub(super) const CAUTIOUS_PARTS: u32 = 20;

/// The routers that spend a tenant's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LimitSharing {
    /// This router alone.
    #[default]
    Alone,
    /// The routers of a namespace, which may not be known yet.
    WithOthers,
}

/// What other routers have of a budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct OthersPart {
    /// Units that others used since the last report.
    pub used: i64,
    /// Units that others claim.
    pub claimed: f64,
    /// Share of the budget kept for routers that do not report.
    pub reserved: f64,
    /// This router's share by demand of what is not reserved.
    pub share: f64,
}

#[derive(Clone, Debug)]
pub(super) struct SharedBudget {
    budget: Budget,
    part: BudgetPart,
}

/// What this router may spend of a budget.
#[derive(Clone, Debug)]
enum BudgetPart {
    Whole,
    /// The others are not known yet: a bucket of its own, with a small part of the rate.
    Cautious(Budget),
    Claim(Claim),
}

#[derive(Clone, Copy, Debug)]
struct Claim {
    units: f64,
    /// Nothing was admitted since the last report.
    is_untouched: bool,
}

/// A small part of a quota, and at least one unit: a bucket of less would never serve.
fn cautious(quota: Quota) -> Quota {
    let parts = u64::from(CAUTIOUS_PARTS);
    let units = (quota.units / parts).max(1);
    let time = (units * parts) as f64 / quota.units as f64;
    Quota {
        units,
        period: quota.period.mul_f64(time),
    }
}

impl SharedBudget {
    pub(super) fn new(quota: Quota, sharing: LimitSharing, now: Instant) -> Self {
        let part = match sharing {
            LimitSharing::Alone => BudgetPart::Whole,
            LimitSharing::WithOthers => BudgetPart::Cautious(Budget::new(cautious(quota), now)),
        };
        Self {
            budget: Budget::new(quota, now),
            part,
        }
    }

    pub(super) fn set_quota(&mut self, quota: Quota, now: Instant) {
        self.budget.set_quota(quota, now);
        if let BudgetPart::Cautious(part) = &mut self.part {
            part.set_quota(cautious(quota), now);
        }
    }

    /// As [`Budget::wait_for`]. One spending a report is free of the claim, so that requests pass that
    /// are larger than this router's part. Its excess is charged to all.
    pub(super) fn wait_for(&mut self, units: u64, now: Instant) -> Duration {
        let wait = self.budget.wait_for(units, now);
        let is_lacking = match &mut self.part {
            BudgetPart::Whole => false,
            BudgetPart::Cautious(part) => {
                units > part.quota().units || !part.wait_for(units, now).is_zero()
            }
            BudgetPart::Claim(claim) => claim.units < units as f64 && !claim.is_untouched,
        };
        if wait.is_zero() && is_lacking {
            return CLAIM_WAIT;
        }
        wait
    }

    /// Spends for an admission.
    pub(super) fn spend(&mut self, units: u64, now: Instant) {
        self.charge(units, now);
        if let BudgetPart::Claim(claim) = &mut self.part {
            claim.is_untouched = false;
        }
    }

    /// Spends what exists already.
    pub(super) fn charge(&mut self, units: u64, now: Instant) {
        self.budget.spend(units, now);
        match &mut self.part {
            BudgetPart::Whole => {}
            BudgetPart::Cautious(part) => part.spend(units, now),
            BudgetPart::Claim(claim) => claim.units -= units as f64,
        }
    }

    pub(super) fn refund(&mut self, units: u64, now: Instant) {
        self.budget.refund(units, now);
        match &mut self.part {
            BudgetPart::Whole => {}
            BudgetPart::Cautious(part) => part.refund(units, now),
            BudgetPart::Claim(claim) => claim.units += units as f64,
        }
    }

    pub(super) fn status(&mut self, now: Instant) -> BudgetStatus {
        self.budget.status(now)
    }

    pub(super) fn level(&mut self, now: Instant) -> f64 {
        self.budget.level(now)
    }

    /// Others know that only so much is left.
    pub(super) fn lower(&mut self, level: f64, now: Instant) {
        self.budget.lower(level, now);
    }

    /// No other router shares it.
    pub(super) fn own_alone(&mut self, now: Instant) {
        self.budget.set_reserved(0.0, now);
        self.part = BudgetPart::Whole;
    }

    /// Charges others' use, and takes this router's part of what is left. Returns the claim.
    pub(super) fn share(&mut self, others: &OthersPart, now: Instant) -> i64 {
        self.budget.set_reserved(others.reserved, now);
        match u64::try_from(others.used) {
            // A report costs a bucket at most, whatever it says.
            Ok(used) => self.budget.spend(used.min(self.budget.quota().units), now),
            Err(_) => self.budget.refund(others.used.unsigned_abs(), now),
        }
        let level = self.budget.level(now);
        let own = match &mut self.part {
            BudgetPart::Whole => level,
            BudgetPart::Cautious(part) => part.level(now).max(0.0),
            BudgetPart::Claim(claim) => claim.units,
        };
        let left = level * (1.0 - others.reserved);
        let target = (left * others.share).max(0.0);
        let units = if own > target {
            target
        } else {
            let unclaimed = left - own - others.claimed;
            (own + unclaimed.max(0.0) * others.share).min(target)
        };
        self.part = BudgetPart::Claim(Claim {
            units,
            is_untouched: true,
        });
        units.floor() as i64
    }
}
