//! Tenants: whose key a request carries, and what that tenant may use.
//!
//! Without `[[tenants]]` in the settings the public port is open. With them each request but the
//! probes needs a key (`Authorization: Bearer` or `x-api-key`). The header with the key is removed
//! where it is checked, so that no log, record or engine gets it. A request that is admitted is a
//! [`TenantVisit`] until its last byte.
//!
//! A key is looked up by its SHA-256. The time of the look-up depends on bits of that hash, which a
//! client cannot steer towards a stored one without inverting SHA-256.

mod body;
mod budget;
mod shared_budget;
mod sharing;
mod usage;
mod visit;

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use axum::http::{HeaderMap, header};
use tokio::time::Instant;
use warmroute_process::access::bearer;
use warmroute_process::access::keys::{KeyHash, KeyId, now_unix_s};
use warmroute_proto::RouterId;
use warmroute_proto::tenant_use::{TenantLevel, TenantUse};

use crate::engine_keys::API_KEY;
use crate::openai::PriorityRule;
use crate::settings::{EngineAuthorization, LiveSettings, SeparateCaches, Settings, TenantRules};
pub(crate) use body::{SALT_PREFIX, group_salt, has_prompt, is_form_route};
pub(crate) use shared_budget::LimitSharing;
pub(crate) use sharing::{Newcomers, SharingRouters};
use usage::TenantUsage;
pub(crate) use usage::{LimitReached, RateStatus};
pub(crate) use visit::{Settlement, TenantVisit};

/// A tenant with its use.
#[derive(Debug)]
struct Tenant {
    rules: TenantRules,
    /// What engines get as its requests' priority.
    priority: PriorityRule,
    usage: Arc<TenantUsage>,
}

impl Tenant {
    fn id(&self) -> u64 {
        TenantUse::id(self.rules.name.as_str())
    }
}

/// A request that was let in.
pub(crate) struct DoorEntry {
    /// `None`: there are no tenants.
    pub visit: Option<Arc<TenantVisit>>,
    /// Those by which it was let in.
    pub settings: Arc<Settings>,
}

/// The tenants of the settings in force.
pub(crate) struct Tenants {
    settings: Arc<LiveSettings>,
    sharing: LimitSharing,
    table: RwLock<Arc<TenantTable>>,
}

struct TenantTable {
    /// What the table was made from.
    settings: Arc<Settings>,
    tenants: Vec<Arc<Tenant>>,
    /// By [`TenantUse::id`].
    by_id: HashMap<u64, usize>,
    /// Tenant and key by number.
    by_hash: HashMap<KeyHash, (usize, usize)>,
    caches: SeparateCaches,
}

/// Why a tenant's request is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TenantRefusal {
    #[error("You did not provide an API key: send it as a bearer token.")]
    NoKey,
    #[error("Incorrect API key provided.")]
    UnknownKey,
    #[error("The API key has expired.")]
    Expired,
    #[error("The API key has no access to this model.")]
    Model,
    #[error("There is no such response.")]
    ForeignAnswer,
    #[error("The prompt is longer than the limit of {max} tokens.")]
    PromptTokens { max: u32 },
    #[error("The limit of {} is reached. Try again in {} s.", .0.kind.label(), .0.retry_after_secs())]
    Limit(LimitReached),
}

/// A refusal at the door, with the state of the tenant's rates if the tenant is known.
#[derive(Debug)]
pub(crate) struct DoorRefusal {
    pub error: TenantRefusal,
    pub rates: RateStatus,
    pub tenant: Option<KeyId>,
}

impl From<TenantRefusal> for DoorRefusal {
    fn from(error: TenantRefusal) -> Self {
        Self {
            error,
            rates: RateStatus::default(),
            tenant: None,
        }
    }
}

impl Tenants {
    pub(crate) fn new(settings: Arc<LiveSettings>, sharing: LimitSharing) -> Self {
        let table = TenantTable::new(settings.current(), &[], sharing, Instant::now());
        Self {
            settings,
            sharing,
            table: RwLock::new(Arc::new(table)),
        }
    }

    /// Admits a request by its key, and removes the headers that are not for engines.
    pub(crate) fn enter(&self, headers: &mut HeaderMap) -> Result<DoorEntry, DoorRefusal> {
        let table = self.table();
        let visit = if table.tenants.is_empty() {
            None
        } else {
            Some(Arc::new(table.admit(headers)?))
        };
        let authorization = table.settings.engine_authorization();
        if authorization != EngineAuthorization::Pass {
            headers.remove(header::AUTHORIZATION);
            headers.remove(API_KEY);
        }
        if let EngineAuthorization::Replace(key) = authorization {
            headers.insert(header::AUTHORIZATION, key);
        }
        Ok(DoorEntry {
            visit,
            settings: Arc::clone(&table.settings),
        })
    }

    /// Whether a request has some tenant's key, or there are no tenants.
    pub(crate) fn knows(&self, headers: &HeaderMap) -> bool {
        let table = self.table();
        let by_api_key = headers.get(API_KEY).map(|key| key.as_bytes());
        let mut keys = bearer(headers).into_iter().chain(by_api_key);
        table.tenants.is_empty() || keys.any(|key| table.owner(key).is_some())
    }

    pub(crate) fn are_none(&self) -> bool {
        self.table().tenants.is_empty()
    }

    /// Takes this router's part of all limits. Returns what the other routers must know.
    pub(crate) fn report(
        &self,
        routers: &SharingRouters,
        now: std::time::Instant,
    ) -> Vec<TenantUse> {
        let table = self.table();
        let rows = table.tenants.iter().filter_map(|tenant| {
            let row = tenant.usage.report(routers, now)?;
            let tenant = tenant.id();
            Some(TenantUse { tenant, ..row })
        });
        rows.collect()
    }

    /// What is left of all limits, for a router that starts.
    pub(crate) fn levels(&self, now: std::time::Instant) -> Vec<TenantLevel> {
        let table = self.table();
        let rows = table.tenants.iter().map(|tenant| TenantLevel {
            tenant: tenant.id(),
            ..tenant.usage.levels(now)
        });
        rows.collect()
    }

    /// Takes what is left of limits as another router knows it.
    pub(crate) fn learn(&self, rows: &[TenantLevel], now: std::time::Instant) {
        let table = self.table();
        for row in rows {
            if let Some(at) = table.by_id.get(&row.tenant) {
                table.tenants[*at].usage.learn(row, now);
            }
        }
    }

    /// Takes another router's report. Tenants that this router does not know are none of its own.
    pub(crate) fn receive(&self, from: RouterId, rows: &[TenantUse]) {
        let table = self.table();
        for row in rows {
            if let Some(at) = table.by_id.get(&row.tenant) {
                table.tenants[*at].usage.receive(from, row);
            }
        }
    }

    /// The table of the settings in force.
    fn table(&self) -> Arc<TenantTable> {
        let settings = self.settings.current();
        let current = Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner));
        if Arc::ptr_eq(&current.settings, &settings) {
            return current;
        }
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        // Read again: older settings must not replace a newer table.
        let settings = self.settings.current();
        if !Arc::ptr_eq(&table.settings, &settings) {
            let next = TenantTable::new(settings, &table.tenants, self.sharing, Instant::now());
            *table = Arc::new(next);
        }
        Arc::clone(&table)
    }
}

impl TenantTable {
    /// Tenants of the same name keep their use.
    fn new(
        settings: Arc<Settings>,
        before: &[Arc<Tenant>],
        sharing: LimitSharing,
        now: Instant,
    ) -> Self {
        let now = now.into_std();
        let usage = |rules: &TenantRules| {
            let known = before.iter().find(|tenant| tenant.rules.name == rules.name);
            match known {
                Some(tenant) => {
                    tenant.usage.set_limits(&rules.limits, now);
                    Arc::clone(&tenant.usage)
                }
                None => Arc::new(TenantUsage::new(&rules.limits, sharing, now)),
            }
        };
        let has_levels = settings.tenants.iter().any(|one| one.priority.is_some());
        let priority = |rules: &TenantRules| match rules.priority {
            Some(level) => PriorityRule::Fixed(level),
            None if has_levels && !rules.client_priority => PriorityRule::Unranked,
            None => PriorityRule::Client,
        };
        let tenant = |rules: &TenantRules| {
            Arc::new(Tenant {
                priority: priority(rules),
                usage: usage(rules),
                rules: rules.clone(),
            })
        };
        let tenants: Vec<_> = settings.tenants.iter().map(tenant).collect();
        let mut by_hash = HashMap::new();
        for (at, tenant) in tenants.iter().enumerate() {
            let keys = tenant.rules.keys.iter().enumerate();
            by_hash.extend(keys.map(|(number, key)| (key.hash, (at, number))));
        }
        let ids = tenants.iter().enumerate();
        let by_id = ids.map(|(at, tenant)| (tenant.id(), at)).collect();
        let caches = settings.separate_caches();
        Self {
            settings,
            tenants,
            by_id,
            by_hash,
            caches,
        }
    }

    fn admit(&self, headers: &mut HeaderMap) -> Result<TenantVisit, DoorRefusal> {
        // Proxies and engines may read another one of them.
        let is_repeated = |name| headers.get_all(name).iter().nth(1).is_some();
        if is_repeated(&header::AUTHORIZATION) || is_repeated(&API_KEY) {
            return Err(TenantRefusal::UnknownKey.into());
        }
        let by_bearer = bearer(headers).map(|key| self.owner(key));
        let by_api_key = headers.get(API_KEY).map(|key| self.owner(key.as_bytes()));
        if by_bearer.is_none() && by_api_key.is_none() {
            return Err(TenantRefusal::NoKey.into());
        }
        let (by_bearer, by_api_key) = (by_bearer.flatten(), by_api_key.flatten());
        for (known, name) in [(by_bearer, header::AUTHORIZATION), (by_api_key, API_KEY)] {
            if known.is_some() {
                headers.remove(name);
            }
        }
        let known = by_bearer.or(by_api_key);
        let (tenant, key) = known.ok_or(TenantRefusal::UnknownKey)?;
        let tenant = &self.tenants[tenant];
        if tenant.rules.keys[key].is_expired(now_unix_s()) {
            return Err(DoorRefusal {
                tenant: Some(tenant.rules.name.clone()),
                ..TenantRefusal::Expired.into()
            });
        }
        let now = Instant::now().into_std();
        tenant.usage.enter(now).map_err(|reached| DoorRefusal {
            error: TenantRefusal::Limit(reached),
            rates: tenant.usage.status(now),
            tenant: Some(tenant.rules.name.clone()),
        })?;
        tracing::trace!(
            tenant = tenant.rules.name.as_str(),
            key = tenant.rules.keys[key].id.as_str(),
            "request admitted"
        );
        Ok(TenantVisit::new(Arc::clone(tenant), self.caches))
    }

    /// Tenant and number of a key.
    fn owner(&self, key: &[u8]) -> Option<(usize, usize)> {
        let hash = KeyHash::of(key)?;
        self.by_hash.get(&hash).copied()
    }
}

#[cfg(test)]
mod tests;
