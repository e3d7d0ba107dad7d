//! Series by model and worker: created when the fleet changes, found by requests without a lock.
//!
//! Only served models have series. Requests for any other name count under [`OTHER_MODEL`], so
//! that a client cannot create series.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use warmroute_process::metrics::HistogramCounts;
use warmroute_proto::WorkerId;

use super::{CodeLabel, RequestEnd};

/// Model label of requests for no served model, and of adapters beyond [`PAIRS_MAX`].
pub(crate) const OTHER_MODEL: &str = "other";

/// Pairs of an adapter and a worker with series of their own. Base models have theirs always.
const PAIRS_MAX: usize = 1024;

/// Upper bounds of the buckets, in milliseconds: 2 ms to 5 minutes.
const BUCKETS_MS: [u64; 15] = [
    2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 60_000, 300_000,
];

/// Durations in seconds, by bucket.
#[derive(Debug, Default)]
pub(crate) struct SecondsHistogram {
    /// The last one has no upper bound.
    buckets: [AtomicU64; BUCKETS_MS.len() + 1],
    sum_nanos: AtomicU64,
}

/// Requests by status code and by outcome.
#[derive(Debug, Default)]
pub(crate) struct RequestCounts([[AtomicU64; CodeLabel::ALL.len()]; RequestEnd::ALL.len()]);

/// What one worker did for one model.
#[derive(Debug, Default)]
pub(crate) struct WorkerSeries {
    pub requests: RequestCounts,
    pub ttft: SecondsHistogram,
    pub inter_token: SecondsHistogram,
    pub total: SecondsHistogram,
    pub prompt_tokens: AtomicU64,
    pub output_tokens: AtomicU64,
    pub credited_tokens: AtomicU64,
    pub cached_tokens: AtomicU64,
}

/// What does not depend on a worker.
#[derive(Debug, Default)]
pub(crate) struct ModelTotals {
    /// Requests that no worker answered.
    pub unplaced: RequestCounts,
    /// Requests that found all workers of the model asleep.
    pub asleep: AtomicU64,
    pub queue: SecondsHistogram,
    pub decision: SecondsHistogram,
}

/// The series of one model.
#[derive(Clone, Debug)]
pub(crate) struct ModelSeries {
    pub model: Arc<str>,
    pub totals: Arc<ModelTotals>,
    pub workers: BTreeMap<WorkerId, Arc<WorkerSeries>>,
}

/// The series of a fleet. Immutable; series that stay are shared with the table before.
#[derive(Clone, Debug)]
pub(crate) struct SeriesTable {
    models: BTreeMap<Arc<str>, Arc<ModelSeries>>,
    other: Arc<ModelSeries>,
}

/// A model that a worker serves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServedModel<'a> {
    pub model: &'a str,
    pub worker: &'a WorkerId,
    pub kind: ModelKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelKind {
    Base,
    Adapter,
}

impl SecondsHistogram {
    pub(crate) fn observe(&self, took: Duration) {
        self.observe_each(took, 1);
    }

    /// Adds `count` observations of `took`.
    pub(crate) fn observe_each(&self, took: Duration, count: u64) {
        let millis = took.as_nanos().div_ceil(1_000_000);
        let bucket = BUCKETS_MS.partition_point(|bound| u128::from(*bound) < millis);
        self.buckets[bucket].fetch_add(count, Ordering::Relaxed);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.sum_nanos
            .fetch_add(nanos.saturating_mul(count), Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> HistogramCounts {
        let mut count = 0;
        let mut up_to = |bucket: &AtomicU64| {
            count += bucket.load(Ordering::Relaxed);
            count
        };
        let bounds = BUCKETS_MS.iter().zip(&self.buckets);
        let buckets = bounds.map(|(bound, bucket)| {
            let bound = Duration::from_millis(*bound).as_secs_f64();
            (bound, up_to(bucket))
        });
        let buckets = buckets.collect();
        let count = up_to(&self.buckets[BUCKETS_MS.len()]);
        let sum = Duration::from_nanos(self.sum_nanos.load(Ordering::Relaxed)).as_secs_f64();
        HistogramCounts {
            buckets,
            count,
            sum,
        }
    }
}

impl RequestCounts {
    pub(crate) fn count(&self, code: CodeLabel, end: RequestEnd) {
        self.0[end as usize][code as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Each count that is not zero.
    pub(super) fn read(&self) -> impl Iterator<Item = (CodeLabel, RequestEnd, u64)> {
        RequestEnd::ALL.into_iter().flat_map(move |end| {
            let codes = CodeLabel::ALL.iter().map(move |&code| {
                let count = self.0[end as usize][code as usize].load(Ordering::Relaxed);
                (code, end, count)
            });
            codes.filter(|(_, _, count)| *count > 0)
        })
    }
}

impl ModelSeries {
    fn new(model: &str, totals: Arc<ModelTotals>) -> Self {
        let (model, workers) = (model.into(), BTreeMap::new());
        Self {
            model,
            totals,
            workers,
        }
    }

    /// Adds a worker, with its series of `before` if it has any.
    fn add(&mut self, worker: &WorkerId, before: Option<&Self>) {
        let kept = before.and_then(|before| before.workers.get(worker));
        let kept = || kept.map_or_else(Arc::default, Arc::clone);
        self.workers.entry(worker.clone()).or_insert_with(kept);
    }
}

impl Default for SeriesTable {
    fn default() -> Self {
        Self {
            models: BTreeMap::new(),
            other: Arc::new(ModelSeries::new(OTHER_MODEL, Arc::default())),
        }
    }
}

impl SeriesTable {
    /// The series of these models and workers. Those of others end.
    pub(crate) fn followed_by<'a>(&self, served: impl Iterator<Item = ServedModel<'a>>) -> Self {
        let mut models: BTreeMap<&str, ModelSeries> = BTreeMap::new();
        let mut other = ModelSeries::new(OTHER_MODEL, Arc::clone(&self.other.totals));
        let mut adapter_pairs = 0;
        for ServedModel {
            model,
            worker,
            kind,
        } in served
        {
            let is_adapter = kind == ModelKind::Adapter;
            adapter_pairs += usize::from(is_adapter);
            if model == OTHER_MODEL || (is_adapter && adapter_pairs > PAIRS_MAX) {
                other.add(worker, Some(&self.other));
                continue;
            }
            let before = self.models.get(model).map(AsRef::as_ref);
            let totals = || before.map_or_else(Arc::default, |before| Arc::clone(&before.totals));
            let series = models.entry(model);
            let series = series.or_insert_with(|| ModelSeries::new(model, totals()));
            series.add(worker, before);
        }
        let models = models.into_values();
        Self {
            models: models
                .map(|one| (Arc::clone(&one.model), Arc::new(one)))
                .collect(),
            other: Arc::new(other),
        }
    }

    /// The series of a model, or those of [`OTHER_MODEL`].
    pub(crate) fn of(&self, model: &str) -> &Arc<ModelSeries> {
        self.models.get(model).unwrap_or(&self.other)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ModelSeries> + Clone {
        let models = self.models.values().chain([&self.other]);
        models.map(AsRef::as_ref)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(before: &SeriesTable, served: &[(&str, &str, ModelKind)]) -> SeriesTable {
        let workers: Vec<WorkerId> = served
            .iter()
            .map(|(_, worker, _)| (*worker).into())
            .collect();
        let served = served.iter().zip(&workers);
        before.followed_by(served.map(|(&(model, _, kind), worker)| ServedModel {
            model,
            worker,
            kind,
        }))
    }

    #[test]
    fn series_stay_with_their_worker_and_end_with_it() {
        let base = ModelKind::Base;
        let first = table(
            &SeriesTable::default(),
            &[("m", "a", base), ("m", "b", base)],
        );
        let of = |table: &SeriesTable, worker: &str| {
            let series = table.of("m").workers.get(&worker.into()).cloned();
            series.map(|series| series.prompt_tokens.load(Ordering::Relaxed))
        };
        let b = &first.of("m").workers[&"b".into()];
        b.prompt_tokens.fetch_add(7, Ordering::Relaxed);
        let second = table(&first, &[("m", "b", base), ("m", "c", base)]);
        assert_eq!(
            ["a", "b", "c"].map(|worker| of(&second, worker)),
            [None, Some(7), Some(0)]
        );
        let back = table(&table(&second, &[("m", "c", base)]), &[("m", "b", base)]);
        assert_eq!(of(&back, "b"), Some(0));
    }

    #[test]
    fn names_of_clients_and_too_many_adapters_share_one_label() {
        let names: Vec<String> = (0..PAIRS_MAX + 9).map(|n| format!("lora-{n}")).collect();
        let mut served: Vec<_> = names
            .iter()
            .map(|name| (name.as_str(), "a", ModelKind::Adapter))
            .collect();
        served.push(("m", "a", ModelKind::Base));
        let table = table(&SeriesTable::default(), &served);
        assert_eq!(table.iter().count(), PAIRS_MAX + 2);
        for name in ["of-a-client", names.last().unwrap()] {
            let series = table.of(name);
            assert_eq!(&*series.model, OTHER_MODEL);
            assert_eq!(series.workers.len(), 1);
        }
        assert_eq!(&*table.of("m").model, "m");
    }

    #[test]
    fn a_duration_is_in_the_first_bucket_that_holds_it() {
        let histogram = SecondsHistogram::default();
        for micros in [1, 2_000, 2_001, 10_000, 60_000_000, 900_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        let counts = histogram.read();
        let below: Vec<_> = counts.buckets.iter().map(|(_, below)| *below).collect();
        assert_eq!(below, [2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5]);
        assert_eq!(counts.count, 6);
        assert!((counts.sum - 960.014_002).abs() < 1e-6, "{}", counts.sum);
    }
}
