//! One request of a tenant, from its key to its last byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;
use warmroute_process::access::keys::KeyId;

use super::usage::{LimitReached, RateStatus};
use super::{Tenant, TenantRefusal};
use crate::openai::TokenUsage;
use crate::settings::SeparateCaches;
use crate::tenants::budget::BudgetStatus;

/// Generated tokens that are charged together: each charge takes a lock and reads the clock, about
/// 0.25 µs.
const CHARGED_TOGETHER: u64 = 64;

/// Most tokens that one report of an engine is believed.
const USAGE_TOKENS_MAX: u64 = u32::MAX as u64;

/// How a request's tokens are settled when its answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settlement {
    /// The engine's report counts.
    Reported(TokenUsage),
    /// What was counted counts.
    Counted,
    /// No tokens were used.
    Void,
}

/// Ends when it is dropped.
#[derive(Debug)]
pub(crate) struct TenantVisit {
    pub(super) tenant: Arc<Tenant>,
    pub(super) caches: SeparateCaches,
    /// Charged for the prompt.
    prompt: AtomicU64,
    /// Charged for generated tokens.
    generated: AtomicU64,
}

impl TenantVisit {
    /// Takes over a request that has entered.
    pub(super) const fn new(tenant: Arc<Tenant>, caches: SeparateCaches) -> Self {
        Self {
            tenant,
            caches,
            prompt: AtomicU64::new(0),
            generated: AtomicU64::new(0),
        }
    }

    pub(crate) fn name(&self) -> &KeyId {
        &self.tenant.rules.name
    }

    /// Level of its requests in the queue.
    pub(crate) fn priority(&self) -> Option<i64> {
        self.tenant.rules.priority
    }

    /// Whether its clients may name the level of a request.
    pub(crate) fn may_name_priority(&self) -> bool {
        self.tenant.rules.client_priority
    }

    pub(crate) fn check_model(&self, model: &str) -> Result<(), TenantRefusal> {
        let permitted = self.tenant.rules.permits(model);
        permitted.then_some(()).ok_or(TenantRefusal::Model)
    }

    /// Charges the prompt.
    pub(crate) fn admit_prompt(&self, tokens: u32) -> Result<(), TenantRefusal> {
        let max = self.tenant.rules.limits.prompt_tokens;
        if let Some(max) = max.filter(|max| tokens > max.get()) {
            return Err(TenantRefusal::PromptTokens { max: max.get() });
        }
        let now = Instant::now().into_std();
        let admitted = self.tenant.usage.admit_tokens(tokens.into(), now);
        admitted.map_err(TenantRefusal::Limit)?;
        self.prompt.store(tokens.into(), Ordering::Relaxed);
        Ok(())
    }

    /// Takes the number of tokens generated so far.
    pub(crate) fn generated(&self, tokens: u64) {
        let more = tokens.saturating_sub(self.generated.load(Ordering::Relaxed));
        if more >= CHARGED_TOGETHER {
            self.generated.store(tokens, Ordering::Relaxed);
            let now = Instant::now().into_std();
            self.tenant.usage.spend_tokens(more, now);
        }
    }

    /// Charges what the request used in place of what was charged for it. `counted`: generated
    /// tokens by count.
    pub(crate) fn settle(&self, settlement: Settlement, counted: u64) {
        let prompt = self.prompt.load(Ordering::Relaxed);
        let charged = prompt + self.generated.load(Ordering::Relaxed);
        let used = match settlement {
            Settlement::Reported(usage) => {
                let sum = usage.prompt_tokens.saturating_add(usage.completion_tokens);
                sum.min(USAGE_TOKENS_MAX)
            }
            Settlement::Counted => prompt + counted,
            Settlement::Void => 0,
        };
        // A second settlement charges against the first.
        self.prompt.store(0, Ordering::Relaxed);
        self.generated.store(used, Ordering::Relaxed);
        let (usage, now) = (&self.tenant.usage, Instant::now().into_std());
        match (used.checked_sub(charged), charged.checked_sub(used)) {
            (Some(more @ 1..), _) => usage.spend_tokens(more, now),
            (_, Some(less @ 1..)) => usage.refund_tokens(less, now),
            (Some(_) | None, Some(_) | None) => {}
        }
    }

    /// The request uses none of the rates of requests.
    pub(crate) fn refund_request(&self) {
        self.tenant.usage.refund_request(Instant::now().into_std());
    }

    pub(crate) fn rates(&self) -> RateStatus {
        self.tenant.usage.status(Instant::now().into_std())
    }
}

impl Drop for TenantVisit {
    fn drop(&mut self) {
        self.tenant.usage.leave();
    }
}

const REQUEST_RATES: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKEN_RATES: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

impl RateStatus {
    /// Adds the headers by which OpenAI's clients pace themselves.
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        let mut write = |[limit, remaining, reset]: [HeaderName; 3], rate: &BudgetStatus| {
            headers.insert(limit, rate.limit.into());
            headers.insert(remaining, rate.remaining.into());
            let millis = rate.reset.as_millis();
            let text = match millis {
                0..1000 => format!("{millis}ms"),
                _ => format!("{}s", millis.div_ceil(1000)),
            };
            if let Ok(text) = HeaderValue::from_str(&text) {
                headers.insert(reset, text);
            }
        };
        if let Some(rate) = &self.requests {
            write(REQUEST_RATES, rate);
        }
        if let Some(rate) = &self.tokens {
            write(TOKEN_RATES, rate);
        }
    }
}

impl LimitReached {
    /// Seconds until a request may be repeated, at least one.
    pub(crate) fn retry_after_secs(&self) -> u64 {
        u64::try_from(self.wait.as_millis().div_ceil(1000)).map_or(u64::MAX, |secs| secs.max(1))
    }
}
