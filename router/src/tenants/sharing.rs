//! A tenant's limits over several routers. Pure.
//!
//! Each router reports its use, its demand and its claims ([`TenantUse`]). A router's part of what is
//! left follows its share of the demand. Each router that does not report has the n-th part of `n`
//! routers, and so has each one for itself when none of the others reports.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use warmroute_proto::RouterId;
use warmroute_proto::tenant_use::{TenantUse, UnitUse};

use super::shared_budget::{CAUTIOUS_PARTS, LimitSharing, OthersPart, SharedBudget};

/// Reports for which a lost one may be missed by a reader that knew nothing of the tenant.
const KEPT_REPORTS: usize = 10;

/// Without use here, one of so many reports names a tenant that others use.
const QUIET_REPORTS: u32 = 10;

/// One of so many reports names each tenant.
const IDLE_REPORTS: u32 = 100;

/// Demand below which there is none: thousandths of a unit a report.
const NO_DEMAND: u64 = 10;

/// The routers that share the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharingRouters {
    pub own: RouterId,
    /// All routers, this one included.
    pub count: usize,
    /// The others that report, in order.
    pub reporting: Vec<RouterId>,
    pub newcomers: Newcomers,
}

/// Whether a router is new, so that each tenant's use is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Newcomers {
    #[default]
    None,
    Some,
}

impl SharingRouters {
    pub(crate) const fn is_alone(&self) -> bool {
        self.count <= 1
    }

    /// Share of the routers that do not report.
    fn silent_share(&self) -> f64 {
        let silent = self.count.saturating_sub(1 + self.reporting.len());
        silent as f64 / self.count as f64
    }
}

/// What one tenant uses here and elsewhere.
#[derive(Debug, Default)]
pub(super) struct UsageShare {
    pub(super) requests: UnitShare,
    pub(super) tokens: UnitShare,
    peers: BTreeMap<RouterId, TenantUse>,
    /// Requests that may be in progress here; `None`: the whole limit.
    open_claim: Option<u32>,
    sent: TenantUse,
    /// Reports since the last one that named the tenant.
    quiet: u32,
}

#[derive(Debug, Default)]
pub(super) struct UnitShare {
    used: i64,
    /// Demand since the last report.
    asked: u64,
    /// Thousandths of units a report, averaged.
    demand: u64,
    /// Used by others since the last report.
    others_used: i64,
    /// `used` at the last reports.
    history: VecDeque<i64>,
}

impl UnitShare {
    pub(super) const fn used(&self) -> i64 {
        self.used
    }

    pub(super) const fn asked(&mut self, units: u64) {
        self.asked = self.asked.saturating_add(units);
    }

    pub(super) const fn spent(&mut self, units: u64) {
        self.used = self.used.saturating_add_unsigned(units);
    }

    pub(super) const fn refunded(&mut self, units: u64) {
        self.used = self.used.saturating_sub_unsigned(units);
    }

    /// Units that one of `requests` used on average.
    pub(super) fn mean(&self, requests: &Self) -> u64 {
        let mean = self.used.checked_div(requests.used).unwrap_or(0);
        u64::try_from(mean).unwrap_or(0)
    }

    /// What was used without others concerns none of them.
    fn own_alone(&mut self) {
        self.asked = 0;
        self.demand = 0;
        self.others_used = 0;
        self.history.clear();
        self.history.push_back(self.used);
    }

    fn receive(&mut self, known: Option<&UnitUse>, new: &UnitUse) {
        let from = known.map_or(new.before, |known| known.used);
        let more = new.used.saturating_sub(from);
        self.others_used = self.others_used.saturating_add(more);
    }

    fn next_report(&mut self) -> UnitUse {
        let asked = self.asked.saturating_mul(1000);
        self.demand = self.demand / 2 + asked / 2;
        self.asked = 0;
        if self.history.len() == KEPT_REPORTS {
            self.history.pop_front();
        }
        let before = self.history.front().copied().unwrap_or(0);
        self.history.push_back(self.used);
        UnitUse {
            before,
            used: self.used,
            demand: self.demand,
            claim: 0,
        }
    }
}

impl UsageShare {
    /// Forgets the others.
    pub(super) fn own_alone(&mut self) {
        self.peers.clear();
        self.open_claim = None;
        self.requests.own_alone();
        self.tokens.own_alone();
    }

    pub(super) const fn open_claim(&self) -> Option<u32> {
        self.open_claim
    }

    /// Requests in progress at other routers.
    pub(super) fn open_elsewhere(&self) -> u32 {
        let open = self.peers.values().map(|row| row.open);
        open.fold(0, u32::saturating_add)
    }

    pub(super) fn receive(&mut self, from: RouterId, row: &TenantUse) {
        let known = self.peers.insert(from, *row);
        let known = known.as_ref();
        self.requests
            .receive(known.map(|row| &row.requests), &row.requests);
        self.tokens
            .receive(known.map(|row| &row.tokens), &row.tokens);
    }

    /// Begins a report: what was used and asked for. Routers that do not report are forgotten.
    pub(super) fn begin(&mut self, routers: &SharingRouters, open: u32) -> TenantUse {
        self.peers
            .retain(|router, _| routers.reporting.binary_search(router).is_ok());
        TenantUse {
            requests: self.requests.next_report(),
            tokens: self.tokens.next_report(),
            open,
            ..TenantUse::default()
        }
    }

    /// This router's part in a budget of units that were asked for as `unit` says. `claim`: each
    /// other's claim on it.
    pub(super) fn part(
        &self,
        routers: &SharingRouters,
        own: &TenantUse,
        unit: fn(&TenantUse) -> &UnitUse,
        claim: fn(&TenantUse) -> i64,
    ) -> (f64, OthersPart) {
        let reserved = routers.silent_share();
        let demands = self.peers.values().map(|row| unit(row).demand);
        let all = demands.fold(unit(own).demand, u64::saturating_add);
        let share = if all < NO_DEMAND {
            1.0 / (routers.reporting.len() + 1) as f64
        } else {
            unit(own).demand as f64 / all as f64
        };
        let unknown = routers.reporting.len() - self.peers.len();
        let part = OthersPart {
            used: 0,
            claimed: self
                .peers
                .values()
                .map(|row| claim(row).max(0) as f64)
                .sum(),
            reserved,
            share,
        };
        (unknown as f64 / routers.count as f64, part)
    }

    /// Takes this router's part of the requests in progress. `before`: who had the limit until now.
    pub(super) fn claim_open(
        &mut self,
        max: u32,
        routers: &SharingRouters,
        own: &TenantUse,
        before: LimitSharing,
    ) -> u32 {
        let left = f64::from(max) * (1.0 - routers.silent_share());
        let left = (left.floor() as u32).max(1);
        let target = self.open_target(left, routers, own);
        let current = self.open_claim.unwrap_or(match before {
            LimitSharing::Alone => u32::MAX,
            LimitSharing::WithOthers => max / CAUTIOUS_PARTS,
        });
        let claim = if current > target {
            target.max(own.open.min(current))
        } else {
            let known = self.peers.values().map(|row| row.open_claim);
            let known = known.fold(0, u32::saturating_add);
            let unknown = routers.reporting.len() - self.peers.len();
            let unknown = (unknown as u32).saturating_mul(left.div_ceil(routers.count as u32));
            let claimed = current.saturating_add(known).saturating_add(unknown);
            target.min(current + left.saturating_sub(claimed))
        };
        self.open_claim = Some(claim);
        claim
    }

    /// The whole part by demand. What does not divide goes to those with the largest remainders.
    fn open_target(&self, left: u32, routers: &SharingRouters, own: &TenantUse) -> u32 {
        let others = routers.reporting.iter();
        let demand = |router| self.peers.get(router).map_or(0, |row| row.requests.demand);
        let mut demands: Vec<_> = others.map(|router| (*router, demand(router))).collect();
        demands.push((routers.own, own.requests.demand));
        let mut all = demands
            .iter()
            .map(|(_, demand)| u128::from(*demand))
            .sum::<u128>();
        if all < u128::from(NO_DEMAND) {
            all = demands.len() as u128;
            demands.iter_mut().for_each(|(_, demand)| *demand = 1);
        }
        let parts = demands.iter().map(|(router, demand)| {
            let scaled = u128::from(left) * u128::from(*demand);
            (scaled % all, *router, (scaled / all) as u32)
        });
        let mut parts: Vec<_> = parts.collect();
        parts.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        let given = parts.iter().map(|(_, _, whole)| whole).sum::<u32>();
        let rest = (left - given) as usize;
        let own = parts
            .iter()
            .position(|(_, router, _)| *router == routers.own);
        own.map_or(0, |at| parts[at].2 + u32::from(at < rest))
    }

    /// Whether the report must be sent.
    pub(super) fn is_news(&mut self, row: &TenantUse, newcomers: Newcomers) -> bool {
        let claims = |row: &TenantUse| [row.requests.claim, row.tokens.claim, row.second_claim];
        let (new, old) = (claims(row), claims(&self.sent));
        let falls = new.iter().zip(old).any(|(new, old)| *new < old);
        let demands = |row: &TenantUse| row.requests.demand.max(row.tokens.demand) >= NO_DEMAND;
        let is_used = demands(row)
            || row.requests.used != self.sent.requests.used
            || row.tokens.used != self.sent.tokens.used
            || row.open != self.sent.open
            || row.open_claim != self.sent.open_claim;
        self.quiet += 1;
        let is_shared = new != old || self.peers.values().any(demands);
        // Repeated, since an earlier one may be lost.
        let is_due = (is_shared && self.quiet >= QUIET_REPORTS) || self.quiet >= IDLE_REPORTS;
        let is_news = is_used || falls || is_due || newcomers == Newcomers::Some;
        if is_news {
            self.sent = *row;
            self.quiet = 0;
        }
        is_news
    }

    /// Takes what others used since the last report.
    pub(super) fn take_used(&mut self) -> (i64, i64) {
        let take = |unit: &mut UnitShare| std::mem::take(&mut unit.others_used);
        (take(&mut self.requests), take(&mut self.tokens))
    }
}

/// Shares a budget. Returns this router's claim on it.
pub(super) fn share_budget(
    budget: Option<&mut SharedBudget>,
    used: i64,
    (unknown, part): (f64, OthersPart),
    now: Instant,
) -> i64 {
    let Some(budget) = budget else {
        return 0;
    };
    let level = budget.level(now).max(0.0);
    let others = OthersPart {
        used,
        claimed: part.claimed + unknown * level,
        ..part
    };
    budget.share(&others, now)
}

#[cfg(test)]
mod tests;
