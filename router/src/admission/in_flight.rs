//! Estimated tokens of each tenant's requests that have a place. Pure.

use std::collections::BTreeMap;

use super::line::TenantName;

/// Without tenants nothing is counted.
#[derive(Debug, Default)]
pub(super) struct InFlightTokens(BTreeMap<TenantName, u64>);

impl InFlightTokens {
    pub(super) fn of(&self, tenant: &TenantName) -> u64 {
        self.0.get(tenant).copied().unwrap_or(0)
    }

    pub(super) fn began(&mut self, tenant: &TenantName, tokens: u64) {
        if tenant.is_some() {
            *self.0.entry(tenant.clone()).or_default() += tokens;
        }
    }

    pub(super) fn ended(&mut self, tenant: &TenantName, tokens: u64) {
        if let Some(all) = self.0.get_mut(tenant) {
            *all = all.saturating_sub(tokens);
            if *all == 0 {
                self.0.remove(tenant);
            }
        }
    }
}
