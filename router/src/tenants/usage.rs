//! What a tenant uses now, against its limits.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use warmroute_proto::RouterId;
use warmroute_proto::label_enum;
use warmroute_proto::tenant_use::{TenantLevel, TenantUse};

use super::budget::{BudgetStatus, Quota};
use super::shared_budget::{CAUTIOUS_PARTS, LimitSharing, SharedBudget};
use super::sharing::{SharingRouters, UnitShare, UsageShare, share_budget};
use crate::settings::TenantLimits;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// Time after which a request beyond the concurrent ones may be repeated: no one knows when another
/// one ends.
const CONCURRENCY_WAIT: Duration = SECOND;

label_enum! {
    /// The limit that a request meets.
    pub(crate) enum LimitKind {
        Requests = "requests",
        ConcurrentRequests = "concurrent requests",
        Tokens = "tokens",
    }
}

/// A limit, and the time until it permits the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitReached {
    pub kind: LimitKind,
    pub wait: Duration,
}

/// The limits of rates as clients see them; `None`: not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RateStatus {
    pub requests: Option<BudgetStatus>,
    pub tokens: Option<BudgetStatus>,
}

#[derive(Debug)]
pub(crate) struct TenantUsage(Mutex<UsageState>);

#[derive(Debug, Default)]
struct UsageState {
    per_second: Option<SharedBudget>,
    per_minute: Option<SharedBudget>,
    tokens: Option<SharedBudget>,
    concurrent_max: Option<u32>,
    /// Requests in progress.
    open: u32,
    sharing: LimitSharing,
    share: UsageShare,
}

impl UsageState {
    /// The budget of a tenant with a limit of tokens, and this router's share of it.
    fn tokens(&mut self) -> Option<(&mut SharedBudget, &mut UnitShare)> {
        let budget = self.tokens.as_mut()?;
        Some((budget, &mut self.share.tokens))
    }

    fn is_at_concurrency(&self) -> bool {
        let Some(max) = self.concurrent_max else {
            return false;
        };
        let claim = match (self.sharing, self.share.open_claim()) {
            (LimitSharing::Alone, _) => max,
            (LimitSharing::WithOthers, Some(claim)) => claim,
            (LimitSharing::WithOthers, None) => max / CAUTIOUS_PARTS,
        };
        // A router with none in progress may begin one without a claim.
        let is_claimed =
            self.open >= claim && (self.open > 0 || self.share.open_elsewhere() >= max);
        self.open >= max || is_claimed
    }
}

impl TenantUsage {
    pub(crate) fn new(limits: &TenantLimits, sharing: LimitSharing, now: Instant) -> Self {
        let usage = Self(Mutex::new(UsageState {
            sharing,
            ..UsageState::default()
        }));
        usage.set_limits(limits, now);
        usage
    }

    /// Changes the limits. What was used stays used.
    pub(crate) fn set_limits(&self, limits: &TenantLimits, now: Instant) {
        let mut state = self.state();
        let sharing = state.sharing;
        let set = |budget: &mut Option<SharedBudget>, units: Option<u64>, period| {
            let quota = units.map(|units| Quota { units, period });
            match (&mut *budget, quota) {
                (Some(budget), Some(quota)) => budget.set_quota(quota, now),
                (_, quota) => *budget = quota.map(|quota| SharedBudget::new(quota, sharing, now)),
            }
        };
        let per_second = limits.requests_per_second.map(|number| number.get().into());
        set(&mut state.per_second, per_second, SECOND);
        let per_minute = limits.requests_per_minute.map(|number| number.get().into());
        set(&mut state.per_minute, per_minute, MINUTE);
        let tokens = limits.tokens_per_minute.map(|number| number.get());
        set(&mut state.tokens, tokens, MINUTE);
        state.concurrent_max = limits.concurrent_requests.map(std::num::NonZeroU32::get);
    }

    /// Begins a request. One that is refused uses nothing. [`Self::leave`] ends it.
    pub(crate) fn enter(&self, now: Instant) -> Result<(), LimitReached> {
        let mut state = self.state();
        state.share.requests.asked(1);
        if state.is_at_concurrency() {
            return Err(LimitReached {
                kind: LimitKind::ConcurrentRequests,
                wait: CONCURRENCY_WAIT,
            });
        }
        let UsageState {
            per_second,
            per_minute,
            tokens,
            share,
            ..
        } = &mut *state;
        let requests = per_second.iter_mut().chain(per_minute.iter_mut());
        let wait = requests.map(|budget| budget.wait_for(1, now)).max();
        reached(LimitKind::Requests, wait)?;
        let wait = tokens.as_mut().map(|budget| budget.wait_for(1, now));
        reached(LimitKind::Tokens, wait).inspect_err(|_| {
            let mean = share.tokens.mean(&share.requests);
            share.tokens.asked(mean.max(1));
        })?;
        for budget in per_second.iter_mut().chain(per_minute) {
            budget.spend(1, now);
        }
        share.requests.spent(1);
        state.open += 1;
        Ok(())
    }

    /// A request that entered counts against no rate of requests.
    pub(crate) fn refund_request(&self, now: Instant) {
        let mut state = self.state();
        let UsageState {
            per_second,
            per_minute,
            share,
            ..
        } = &mut *state;
        for budget in per_second.iter_mut().chain(per_minute) {
            budget.refund(1, now);
        }
        share.requests.refunded(1);
    }

    pub(crate) fn leave(&self) {
        let mut state = self.state();
        state.open = state.open.saturating_sub(1);
    }

    /// Spends a prompt's tokens if there are as many.
    pub(crate) fn admit_tokens(&self, tokens: u64, now: Instant) -> Result<(), LimitReached> {
        if let Some((budget, share)) = self.state().tokens() {
            share.asked(tokens);
            reached(LimitKind::Tokens, Some(budget.wait_for(tokens, now)))?;
            budget.spend(tokens, now);
            share.spent(tokens);
        }
        Ok(())
    }

    /// Spends tokens that exist already. May leave a debt.
    pub(crate) fn spend_tokens(&self, tokens: u64, now: Instant) {
        if let Some((budget, share)) = self.state().tokens() {
            share.asked(tokens);
            budget.charge(tokens, now);
            share.spent(tokens);
        }
    }

    pub(crate) fn refund_tokens(&self, tokens: u64, now: Instant) {
        if let Some((budget, share)) = self.state().tokens() {
            budget.refund(tokens, now);
            share.refunded(tokens);
        }
    }

    /// Takes this router's part of the limits. Returns what the other routers must know, if anything.
    pub(crate) fn report(&self, routers: &SharingRouters, now: Instant) -> Option<TenantUse> {
        let mut state = self.state();
        let UsageState {
            per_second,
            per_minute,
            tokens,
            concurrent_max,
            open,
            sharing,
            share,
        } = &mut *state;
        let mut budgets = [per_second.as_mut(), per_minute.as_mut(), tokens.as_mut()];
        if routers.is_alone() {
            *sharing = LimitSharing::Alone;
            share.own_alone();
            for budget in budgets.into_iter().flatten() {
                budget.own_alone(now);
            }
            return None;
        }
        let before = std::mem::replace(sharing, LimitSharing::WithOthers);
        let mut row = share.begin(routers, *open);
        let (requests, used_tokens) = share.take_used();
        let parts = [
            share.part(routers, &row, |row| &row.requests, |row| row.second_claim),
            share.part(routers, &row, |row| &row.requests, |row| row.requests.claim),
            share.part(routers, &row, |row| &row.tokens, |row| row.tokens.claim),
        ];
        let [second, minute, tokens] = &mut budgets;
        row.second_claim = share_budget(second.as_deref_mut(), requests, parts[0], now);
        row.requests.claim = share_budget(minute.as_deref_mut(), requests, parts[1], now);
        row.tokens.claim = share_budget(tokens.as_deref_mut(), used_tokens, parts[2], now);
        if let Some(max) = *concurrent_max {
            row.open_claim = share.claim_open(max, routers, &row, before);
        }
        let is_limited = concurrent_max.is_some() || budgets.iter().any(Option::is_some);
        (is_limited && share.is_news(&row, routers.newcomers)).then_some(row)
    }

    /// What is left of the limits.
    pub(crate) fn levels(&self, now: Instant) -> TenantLevel {
        let mut state = self.state();
        let level = |budget: &mut Option<SharedBudget>| {
            let level = budget.as_mut().map(|budget| budget.level(now));
            level.map(|level| level.floor() as i64)
        };
        TenantLevel {
            tenant: 0,
            second: level(&mut state.per_second),
            minute: level(&mut state.per_minute),
            tokens: level(&mut state.tokens),
        }
    }

    /// Takes what is left of the limits as a router knows it that does not know this one's use.
    pub(crate) fn learn(&self, levels: &TenantLevel, now: Instant) {
        let mut state = self.state();
        let UsageState {
            per_second,
            per_minute,
            tokens,
            share,
            ..
        } = &mut *state;
        // The levels contain what the others used.
        share.take_used();
        let (requests, used_tokens) = (share.requests.used(), share.tokens.used());
        for (budget, level, used) in [
            (per_second, levels.second, requests),
            (per_minute, levels.minute, requests),
            (tokens, levels.tokens, used_tokens),
        ] {
            if let (Some(budget), Some(level)) = (budget, level) {
                budget.lower(level.saturating_sub(used) as f64, now);
            }
        }
    }

    /// Takes another router's report.
    pub(crate) fn receive(&self, from: RouterId, row: &TenantUse) {
        self.state().share.receive(from, row);
    }

    /// Shows the requests of a minute, if both rates of requests are limited.
    pub(crate) fn status(&self, now: Instant) -> RateStatus {
        let mut state = self.state();
        let UsageState {
            per_second,
            per_minute,
            tokens,
            ..
        } = &mut *state;
        let requests = per_minute.as_mut().or(per_second.as_mut());
        RateStatus {
            requests: requests.map(|budget| budget.status(now)),
            tokens: tokens.as_mut().map(|budget| budget.status(now)),
        }
    }

    fn state(&self) -> MutexGuard<'_, UsageState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn reached(kind: LimitKind, wait: Option<Duration>) -> Result<(), LimitReached> {
    match wait.filter(|wait| !wait.is_zero()) {
        Some(wait) => Err(LimitReached { kind, wait }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::num::{NonZeroU32, NonZeroU64};
    use std::sync::Arc;

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "an origin of virtual time")]
    fn origin() -> Instant {
        Instant::now()
    }

    fn limits() -> TenantLimits {
        TenantLimits {
            requests_per_second: NonZeroU32::new(10),
            requests_per_minute: NonZeroU32::new(15),
            concurrent_requests: NonZeroU32::new(12),
            tokens_per_minute: NonZeroU64::new(100),
            ..TenantLimits::default()
        }
    }

    fn kind(result: Result<(), LimitReached>) -> Option<LimitKind> {
        result.err().map(|reached| reached.kind)
    }

    #[test]
    fn each_limit_holds_and_a_refused_request_uses_nothing() {
        let now = origin();
        let usage = TenantUsage::new(&limits(), LimitSharing::Alone, now);
        for _ in 0..10 {
            assert_eq!(usage.enter(now), Ok(()));
        }
        assert_eq!(kind(usage.enter(now)), Some(LimitKind::Requests));
        let later = now + SECOND;
        assert_eq!(usage.enter(later), Ok(()));
        assert_eq!(usage.enter(later), Ok(()));
        assert_eq!(
            kind(usage.enter(later)),
            Some(LimitKind::ConcurrentRequests)
        );
        (0..12).for_each(|_| usage.leave());
        let status = usage.status(later).requests.unwrap();
        assert_eq!((status.limit, status.remaining), (15, 3));
        for _ in 0..3 {
            assert_eq!(usage.enter(later), Ok(()));
        }
        let reached = usage.enter(later).unwrap_err();
        assert_eq!(reached.kind, LimitKind::Requests);
        // 16 of 15 in the first second of the minute: three quarters of the wait for one.
        assert_eq!(reached.wait.as_secs_f64().round(), 3.0);
        assert_eq!(usage.admit_tokens(90, later), Ok(()));
        assert_eq!(kind(usage.admit_tokens(30, later)), Some(LimitKind::Tokens));
        usage.refund_tokens(90, later);
        assert_eq!(usage.admit_tokens(30, later), Ok(()));
        usage.spend_tokens(200, later);
        assert_eq!(usage.status(later).tokens.unwrap().remaining, 0);
        // A debt of tokens stops requests at the door.
        (0..3).for_each(|_| usage.leave());
        let soon = later + Duration::from_secs(10);
        assert_eq!(kind(usage.enter(soon)), Some(LimitKind::Tokens));
        usage.set_limits(&TenantLimits::default(), soon);
        assert_eq!(usage.enter(soon), Ok(()));
        assert_eq!(usage.status(soon), RateStatus::default());
    }

    #[test]
    fn a_refunded_request_uses_no_rate() {
        let now = origin();
        let usage = TenantUsage::new(&limits(), LimitSharing::Alone, now);
        for _ in 0..100 {
            assert_eq!(usage.enter(now), Ok(()));
            usage.refund_request(now);
            usage.leave();
        }
        assert_eq!(usage.status(now).requests.unwrap().remaining, 15);
    }

    /// Exactly as many as permitted, however many threads ask.
    #[test]
    fn limits_are_exact_under_concurrency() {
        let now = origin();
        let requests = TenantLimits {
            requests_per_minute: NonZeroU32::new(500),
            ..TenantLimits::default()
        };
        let tokens = TenantLimits {
            tokens_per_minute: NonZeroU64::new(10_000),
            ..TenantLimits::default()
        };
        let [requests, tokens] = [requests, tokens]
            .map(|limits| Arc::new(TenantUsage::new(&limits, LimitSharing::Alone, now)));
        let threads = (0..8).map(|_| {
            let (requests, tokens) = (Arc::clone(&requests), Arc::clone(&tokens));
            std::thread::spawn(move || {
                let entered = (0..200).filter(|_| requests.enter(now).is_ok()).count();
                let admitted = (0..200).filter(|_| tokens.admit_tokens(25, now).is_ok());
                (entered, admitted.count())
            })
        });
        let threads: Vec<_> = threads.collect();
        let counts = threads.into_iter().map(|thread| thread.join().unwrap());
        let (entered, admitted) = counts.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        assert_eq!((entered, admitted), (500, 400));
    }
}
