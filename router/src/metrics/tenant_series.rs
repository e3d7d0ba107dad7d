//! What each tenant used of each model, for bills and shares. Bounded: what is beyond the bounds counts
//! under the label `other`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use warmroute_process::access::keys::KeyId;
use warmroute_process::metrics::MetricOf::{Counter, Counters};
use warmroute_process::metrics::{MetricLabels, MetricRow, MetricsText};

use super::{OTHER_MODEL, RequestEnd};

/// Tenants with series of their own: the first that send requests.
const TENANTS_MAX: usize = 100;

/// Pairs of a tenant and a model with series of their own.
const PAIRS_MAX: usize = 1000;

/// Tenant label of the rest.
const OTHER_TENANT: &str = "other";

/// What a tenant used of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenantTokens {
    pub prompt: u32,
    pub output: u32,
    /// Prompt tokens that engines reported as cached.
    pub cached: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct TenantCounts {
    requests: [u64; RequestEnd::ALL.len()],
    prompt_tokens: u64,
    output_tokens: u64,
    cached_tokens: u64,
}

#[rustfmt::skip]
const COUNTS: [MetricRow<TenantCounts>; 4] = [
    ("tenant_requests_total", "Requests ended, by tenant and model", Counters("outcome", |s| {
        let counts = RequestEnd::ALL.into_iter().zip(s.requests);
        counts.filter(|(_, count)| *count > 0).map(|(end, count)| (end.label(), count)).collect()
    })),
    ("tenant_prompt_tokens_total", "Prompt tokens of requests that a worker answered, cached ones too",
     Counter(|s| s.prompt_tokens)),
    ("tenant_output_tokens_total", "Output tokens of these requests", Counter(|s| s.output_tokens)),
    ("tenant_cached_tokens_total", "Their prompt tokens that engines reported as cached",
     Counter(|s| s.cached_tokens)),
];

/// By tenant and model.
type PairTable = BTreeMap<Arc<str>, BTreeMap<Arc<str>, TenantCounts>>;

#[derive(Debug, Default)]
pub(crate) struct TenantSeries(Mutex<PairTable>);

impl TenantSeries {
    /// Counts a request that ended. `model`: the served one, or [`OTHER_MODEL`].
    pub(crate) fn count(
        &self,
        tenant: &KeyId,
        model: Option<&Arc<str>>,
        end: RequestEnd,
        tokens: TenantTokens,
    ) {
        let mut table = self.table();
        let counts = pair(&mut table, tenant, model);
        counts.requests[end as usize] += 1;
        counts.prompt_tokens += u64::from(tokens.prompt);
        counts.output_tokens += u64::from(tokens.output);
        counts.cached_tokens += u64::from(tokens.cached);
    }

    pub(super) fn write(&self, page: &mut MetricsText) {
        let table = self.table().clone();
        let pairs = table.iter().flat_map(|(tenant, models)| {
            models.iter().map(move |(model, counts)| {
                let labels = MetricLabels::new(&[("model", model), ("tenant", tenant)]);
                (labels, counts)
            })
        });
        page.rows_of(&COUNTS, pairs);
    }

    fn table(&self) -> MutexGuard<'_, PairTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn pair<'a>(
    table: &'a mut PairTable,
    tenant: &KeyId,
    model: Option<&Arc<str>>,
) -> &'a mut TenantCounts {
    let (mut tenant, mut model) = (tenant.as_str(), model.map_or(OTHER_MODEL, |model| model));
    let is_known = |table: &PairTable, tenant: &str, model: &str| {
        table
            .get(tenant)
            .is_some_and(|models| models.contains_key(model))
    };
    if !is_known(table, tenant, model) {
        if !table.contains_key(tenant) && table.len() >= TENANTS_MAX {
            tenant = OTHER_TENANT;
        }
        let pairs: usize = table.values().map(BTreeMap::len).sum();
        if !is_known(table, tenant, model) && pairs >= PAIRS_MAX {
            (tenant, model) = (OTHER_TENANT, OTHER_MODEL);
        }
    }
    let models = table.entry(tenant.into()).or_default();
    models.entry(model.into()).or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(series: &TenantSeries) -> String {
        let mut page = MetricsText::new("");
        series.write(&mut page);
        page.into_string()
    }

    fn count(series: &TenantSeries, tenant: &str, model: Option<&str>, end: RequestEnd) {
        let (prompt, output, cached) = (30, 5, 16);
        let tokens = TenantTokens {
            prompt,
            output,
            cached,
        };
        let model = model.map(Arc::from);
        series.count(&tenant.parse().unwrap(), model.as_ref(), end, tokens);
    }

    #[test]
    fn requests_and_tokens_count_by_tenant_and_model() {
        let series = TenantSeries::default();
        assert_eq!(page(&series), "");
        count(&series, "a", Some("m"), RequestEnd::Ok);
        count(&series, "a", Some("m"), RequestEnd::Ok);
        count(&series, "b", None, RequestEnd::Limited);
        let page = page(&series);
        for line in [
            "tenant_requests_total{model=\"m\",tenant=\"a\",outcome=\"ok\"} 2",
            "tenant_prompt_tokens_total{model=\"m\",tenant=\"a\"} 60",
            "tenant_output_tokens_total{model=\"m\",tenant=\"a\"} 10",
            "tenant_cached_tokens_total{model=\"m\",tenant=\"a\"} 32",
            "tenant_requests_total{model=\"other\",tenant=\"b\",outcome=\"limited\"} 1",
        ] {
            assert!(page.contains(&format!("\n{line}\n")), "{line} in {page}");
        }
    }

    #[test]
    fn the_number_of_series_is_bounded() {
        let series = TenantSeries::default();
        for tenant in 0..TENANTS_MAX + 50 {
            for model in 0..20 {
                let model = format!("m{model}");
                count(&series, &format!("t{tenant}"), Some(&model), RequestEnd::Ok);
            }
        }
        let table = series.table();
        let pairs: usize = table.values().map(BTreeMap::len).sum();
        assert!(pairs <= PAIRS_MAX + 1, "{pairs}");
        assert!(table.len() <= TENANTS_MAX + 1, "{}", table.len());
        let counts = table.values().flat_map(BTreeMap::values);
        let requests: u64 = counts.map(|one| one.requests.iter().sum::<u64>()).sum();
        assert_eq!(requests, (TENANTS_MAX as u64 + 50) * 20, "none is lost");
    }
}
