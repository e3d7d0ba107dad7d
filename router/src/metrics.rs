//! The router's metrics, behind typed functions. Label sets are closed, except for worker names.
//!
//! [`Metrics`] holds what is counted as it happens. [`page`] writes the rest from the state at each
//! scrape, so that a worker's series end with the worker.

mod labels;
mod page;
mod served;
mod tenant_series;

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Encoder as _, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    Opts, Registry, TextEncoder,
};
use warmroute_process::server::ConnectionMetrics;

use crate::answer_end::EngineFailure;
use crate::route::Leg;

pub(crate) use labels::{
    CancelPhase, CodeLabel, DecisionStep, LegEnd, LoadResult, PickerEnd, RecordResult,
    ReloadResult, RenderFailure, RequestEnd, ResumeResult, RetryReason, RouteLabel, SelectionEnd,
    WholeReason,
};
use page::Page;
pub(crate) use page::{Scraped, TokenizerStatus, WorkerStatus};
pub(crate) use served::{
    ModelKind, ModelSeries, OTHER_MODEL, SeriesTable, ServedModel, WorkerSeries,
};
pub(crate) use tenant_series::{TenantSeries, TenantTokens};

const NAMESPACE: &str = "warmroute_router";

/// Ten microseconds to ten seconds: what the router itself adds.
const FAST_BUCKETS: &[f64] = &[
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0, 10.0,
];

/// One millisecond to an hour: what engines and streams take.
const SLOW_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
];

/// Counters, gauges and histograms that are kept as things happen.
pub(crate) struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    ttft_seconds: HistogramVec,
    repeats: RepeatMetrics,
    ends: EndMetrics,
    buffered_bytes: IntGauge,
    connections: ConnectionMetrics,
    waiting: WaitMetrics,
    tasks_failed: IntCounter,
    bad_entries: IntCounter,
    reads: FileReadMetrics,
    recording: RecordingMetrics,
    check_failures: IntCounterVec,
    step_seconds: HistogramVec,
    decision_seconds: Histogram,
    basis: BasisMetrics,
    overlap: OverlapMetrics,
    pub tenants: TenantSeries,
}

/// Requests that others than this router end.
struct EndMetrics {
    cancels: IntCounterVec,
    /// Streams of the endpoint picker.
    picked: IntCounterVec,
    selected: IntCounterVec,
}

/// Requests that engines fail, and that another worker serves, or goes on with.
struct RepeatMetrics {
    retries: IntCounterVec,
    denied: IntCounterVec,
    resumes: IntCounterVec,
    failures: IntCounterVec,
    late: IntCounter,
}

/// Requests without a worker.
struct WaitMetrics {
    requests: IntGauge,
    shed: IntCounterVec,
}

/// What decisions rest on.
struct BasisMetrics {
    ladder: IntCounterVec,
    unhashed: IntCounterVec,
    index_failures: IntCounter,
    legs: IntCounterVec,
    whole: IntCounterVec,
}

/// Credited overlaps against the reported ones.
struct OverlapMetrics {
    credited_tokens: IntCounter,
    reported_tokens: IntCounter,
    short_requests: IntCounter,
    demotions: IntCounter,
}

/// Requests that are recorded into files, logged or traced.
struct RecordingMetrics {
    runs: IntGauge,
    records: IntCounterVec,
    log_lines: IntCounterVec,
    traces: IntCounterVec,
}

/// Files that are read while the router runs.
struct FileReadMetrics {
    settings: IntCounterVec,
    tokenizers: IntCounterVec,
}

impl Metrics {
    #[expect(clippy::too_many_lines, reason = "one declaration for each metric")]
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new_custom(Some(NAMESPACE.to_owned()), None)?;
        let counter = |name, help| registered(&registry, IntCounter::new(name, help));
        let gauge = |name, help| registered(&registry, IntGauge::new(name, help));
        let counters = |name, help, labels: &[&str]| {
            registered(&registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        let seconds = |name, help, buckets: &[f64], label| {
            let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
            registered(&registry, HistogramVec::new(options, &[label]))
        };
        let decision_seconds = HistogramOpts::new(
            "decision_seconds",
            "From a whole request body to the choice of a worker",
        );
        Ok(Self {
            tenants: TenantSeries::default(),
            requests: counters("requests_total", "Requests ended", &["route", "outcome"])?,
            request_seconds: seconds(
                "request_seconds",
                "From a request's head to its response's end",
                SLOW_BUCKETS,
                "route",
            )?,
            ttft_seconds: seconds(
                "ttft_seconds",
                "From a request's head to the first byte of the engine's body",
                SLOW_BUCKETS,
                "route",
            )?,
            repeats: RepeatMetrics {
                retries: counters(
                    "retries_total",
                    "Attempts repeated before the client got a byte",
                    &["reason"],
                )?,
                denied: counters(
                    "retries_denied_total",
                    "Attempts not repeated because the budget of retries was spent",
                    &["reason"],
                )?,
                failures: counters(
                    "engine_failures_total",
                    "Attempts that an engine failed, repeated or not",
                    &["kind"],
                )?,
                resumes: counters(
                    "stream_resumes_total",
                    "Streams that lost their worker, with resume_streams",
                    &["outcome"],
                )?,
                late: counter(
                    "late_streams_total",
                    "Streams held back since their first token came late, and then passed on",
                )?,
            },
            ends: EndMetrics {
                cancels: counters(
                    "upstream_cancels_total",
                    "Engine requests ended because the client closed its connection",
                    &["phase"],
                )?,
                picked: counters(
                    "picker_streams_total",
                    "Requests of gateways, by how their streams ended",
                    &["outcome"],
                )?,
                selected: counters(
                    "selections_total",
                    "Choices asked for on the admin port, by how their requests ended",
                    &["outcome"],
                )?,
            },
            buffered_bytes: gauge(
                "buffered_bytes",
                "Bytes of request bodies and prompt work held now",
            )?,
            connections: ConnectionMetrics {
                open: gauge("connections", "Client connections open now")?,
                evicted: counter(
                    "connections_evicted_total",
                    "Connections that were idle or waited for their client, closed for new ones",
                )?,
            },
            waiting: WaitMetrics {
                requests: gauge("waiting_requests", "Requests that wait for a worker now")?,
                shed: counters(
                    "queue_shed_total",
                    "Requests that got no place at a worker, by why they do not wait for one",
                    &["reason"],
                )?,
            },
            tasks_failed: counter("tasks_failed_total", "Tasks that ended early")?,
            bad_entries: counter(
                "bad_registry_entries_total",
                "Unreadable entries of workers and indexers",
            )?,
            reads: FileReadMetrics {
                settings: counters(
                    "settings_reloads_total",
                    "Changes of the settings file, by whether they apply",
                    &["outcome"],
                )?,
                tokenizers: counters(
                    "tokenizer_loads_total",
                    "Tokenizers read from files, by result",
                    &["outcome"],
                )?,
            },
            recording: RecordingMetrics {
                runs: gauge("recording", "1 while requests are recorded")?,
                records: counters(
                    "recorded_requests_total",
                    "Records of requests, by whether they are in a file",
                    &["outcome"],
                )?,
                log_lines: counters(
                    "access_log_lines_total",
                    "Lines of the access log, by whether they are written",
                    &["outcome"],
                )?,
                traces: counters(
                    "traces_total",
                    "Sampled requests, by whether a collector has accepted their spans",
                    &["outcome"],
                )?,
            },
            check_failures: counters(
                "worker_check_failures_total",
                "Failed checks at registration",
                &["check"],
            )?,
            step_seconds: seconds(
                "decision_step_seconds",
                "One step on the way to a decision",
                FAST_BUCKETS,
                "step",
            )?,
            decision_seconds: registered(
                &registry,
                Histogram::with_opts(decision_seconds.buckets(FAST_BUCKETS.to_vec())),
            )?,
            basis: BasisMetrics {
                ladder: counters(
                    "ladder_total",
                    "Decisions by what they rested on",
                    &["step"],
                )?,
                unhashed: counters(
                    "unhashed_requests_total",
                    "Requests whose prompt could not be hashed, routed by load",
                    &["reason"],
                )?,
                index_failures: counter("index_failures_total", "Index queries not answered")?,
                legs: counters(
                    "legs_total",
                    "Legs of requests that a prefill and a decode worker share",
                    &["leg", "outcome"],
                )?,
                whole: counters(
                    "whole_requests_total",
                    "Choices of one worker for a whole request, where others compute prompts",
                    &["reason"],
                )?,
            },
            overlap: OverlapMetrics {
                credited_tokens: counter(
                    "overlap_credited_tokens_total",
                    "Prompt tokens expected to be cached, of requests whose usage reports them",
                )?,
                reported_tokens: counter(
                    "overlap_reported_tokens_total",
                    "Prompt tokens that engines reported as cached, of the same requests",
                )?,
                short_requests: counter(
                    "overlap_short_requests_total",
                    "Requests with fewer cached tokens than credited",
                )?,
                demotions: counter(
                    "source_demotions_total",
                    "Sources whose index credit is ignored until their engine agrees with it again",
                )?,
            },
            registry,
        })
    }

    pub(crate) fn request_ended(&self, route: RouteLabel, end: RequestEnd, took: Duration) {
        count(&self.requests, &[route.label(), end.label()]);
        observe(&self.request_seconds, route.label(), took);
    }

    pub(crate) fn first_byte(&self, route: RouteLabel, after: Duration) {
        observe(&self.ttft_seconds, route.label(), after);
    }

    pub(crate) fn step(&self, step: DecisionStep, took: Duration) {
        observe(&self.step_seconds, step.label(), took);
    }

    /// From the whole body until the request is sent to an engine.
    pub(crate) fn decided(&self, took: Duration) {
        self.decision_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn ladder(&self, step: &'static str) {
        count(&self.basis.ladder, &[step]);
    }

    /// A leg of a split request has ended.
    pub(crate) fn leg_ended(&self, leg: Leg, end: LegEnd) {
        count(&self.basis.legs, &[leg.label(), end.label()]);
    }

    /// One worker serves a request, of a model that has prefill workers.
    pub(crate) fn served_whole(&self, reason: WholeReason) {
        count(&self.basis.whole, &[reason.label()]);
    }

    pub(crate) fn index_failed(&self) {
        self.basis.index_failures.inc();
    }

    pub(crate) fn unhashed(&self, reason: &'static str) {
        count(&self.basis.unhashed, &[reason]);
    }

    /// An engine reported its cached prompt tokens, where `credited` were expected.
    pub(crate) fn overlap(&self, credited: u64, reported: u64) {
        self.overlap.credited_tokens.inc_by(credited);
        self.overlap.reported_tokens.inc_by(reported);
        if reported < credited {
            self.overlap.short_requests.inc();
        }
    }

    pub(crate) const fn demotions(&self) -> &IntCounter {
        &self.overlap.demotions
    }

    pub(crate) fn retried(&self, reason: RetryReason) {
        count(&self.repeats.retries, &[reason.label()]);
    }

    /// No retry for this reason is left.
    pub(crate) fn retry_denied(&self, reason: RetryReason) {
        count(&self.repeats.denied, &[reason.label()]);
    }

    /// A stream of the endpoint picker has ended.
    pub(crate) fn picked(&self, end: PickerEnd) {
        count(&self.ends.picked, &[end.label()]);
    }

    /// A request of the admin port's `/select` has ended.
    pub(crate) fn selected(&self, end: SelectionEnd) {
        count(&self.ends.selected, &[end.label()]);
    }

    /// An engine failed an attempt.
    pub(crate) fn engine_failed(&self, failure: EngineFailure) {
        count(&self.repeats.failures, &[failure.label()]);
    }

    pub(crate) fn passed_late_stream(&self) {
        self.repeats.late.inc();
    }

    pub(crate) fn resumed(&self, result: ResumeResult) {
        count(&self.repeats.resumes, &[result.label()]);
    }

    pub(crate) fn cancelled(&self, phase: CancelPhase) {
        count(&self.ends.cancels, &[phase.label()]);
    }

    pub(crate) fn check_failed(&self, check: &'static str) {
        count(&self.check_failures, &[check]);
    }

    pub(crate) fn recording(&self, runs: bool) {
        self.recording.runs.set(runs.into());
    }

    pub(crate) fn recorded(&self, result: RecordResult, records: u64) {
        let counter = self.recording.records.with_label_values(&[result.label()]);
        counter.inc_by(records);
    }

    pub(crate) fn logged(&self, result: RecordResult, lines: u64) {
        let counter = self
            .recording
            .log_lines
            .with_label_values(&[result.label()]);
        counter.inc_by(lines);
    }

    pub(crate) fn traced(&self, result: RecordResult, requests: u64) {
        let counter = self.recording.traces.with_label_values(&[result.label()]);
        counter.inc_by(requests);
    }

    pub(crate) fn reloaded(&self, result: ReloadResult) {
        count(&self.reads.settings, &[result.label()]);
    }

    pub(crate) fn tokenizer_loaded(&self, result: LoadResult) {
        count(&self.reads.tokenizers, &[result.label()]);
    }

    pub(crate) const fn tasks_failed(&self) -> &IntCounter {
        &self.tasks_failed
    }

    /// Unreadable registry entries.
    pub(crate) const fn bad_entries(&self) -> &IntCounter {
        &self.bad_entries
    }

    pub(crate) const fn buffered_bytes(&self) -> &IntGauge {
        &self.buffered_bytes
    }

    pub(crate) const fn waiting(&self) -> &IntGauge {
        &self.waiting.requests
    }

    /// Requests that got no place at a worker.
    pub(crate) const fn shed(&self) -> &IntCounterVec {
        &self.waiting.shed
    }

    pub(crate) const fn connections(&self) -> &ConnectionMetrics {
        &self.connections
    }

    /// All metrics in Prometheus's text format.
    pub(crate) fn render(&self, scraped: &Scraped<'_>) -> Result<String, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        let text =
            String::from_utf8(text).map_err(|error| prometheus::Error::Msg(error.to_string()))?;
        Ok(text + &Page::of(scraped, &self.tenants))
    }
}

fn registered<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: Result<M, prometheus::Error>,
) -> Result<M, prometheus::Error> {
    let metric = metric?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn count(counters: &IntCounterVec, labels: &[&str]) {
    counters.with_label_values(labels).inc();
}

fn observe(histograms: &HistogramVec, label: &str, took: Duration) {
    let histogram = histograms.with_label_values(&[label]);
    histogram.observe(took.as_secs_f64());
}

#[cfg(test)]
use crate::tokenizers::TokenizerTable;

#[cfg(test)]
impl Metrics {
    /// The value of a series of its own, 0 where there is none.
    pub(crate) fn value(&self, series: &str) -> u64 {
        self.value_of(series, &SeriesTable::default())
    }

    /// The value of a series, 0 where there is none, those of models and workers included.
    pub(crate) fn value_of(&self, series: &str, table: &SeriesTable) -> u64 {
        let scraped = Scraped {
            loads: &[],
            workers: &[],
            series: table,
            core: &crate::route::CoreCounts::default(),
            demoted: &[],
            lost: &[],
            namespace: None,
            sync: None,
            queues: &[],
            tokenizers: &TokenizerTable::default(),
            retries_left: 0,
            leaving: false,
        };
        let text = self.render(&scraped).unwrap();
        let name = format!("{NAMESPACE}_{series} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.map_or(0, |value| value.parse().unwrap())
    }
}

#[cfg(test)]
mod tests {
    use warmroute_proto::registry::DemotedSource;
    use warmroute_proto::{DpRank, Generation, Source, WorkerId};

    use super::*;
    use crate::route::{CoreCounts, SourceLoad};

    fn status() -> WorkerStatus {
        WorkerStatus {
            worker: "w1".into(),
            role: "prefill",
            healthy: true,
            registered: true,
            draining: true,
            checks: vec![("chat", false)],
            failed_checks: vec!["chat"],
            passed_over: vec!["stalled"],
            ttft_ratios: vec![(1, 2.5)],
        }
    }

    #[test]
    fn a_workers_series_end_with_the_worker() {
        let metrics = Metrics::new().unwrap();
        let load = SourceLoad {
            worker: "w1".into(),
            dp_rank: DpRank(1),
            active_requests: 2,
            prefill_tokens: 3,
            decode_blocks: 4,
        };
        let demoted = DemotedSource {
            source: Source {
                worker: "w1".into(),
                dp_rank: DpRank(1),
            },
            generation: Generation(1),
            agreements: 0,
        };
        let worker = "w1".into();
        let served = ServedModel {
            model: "m",
            worker: &worker,
            kind: ModelKind::Base,
        };
        let series = SeriesTable::default().followed_by([served].into_iter());
        let counted = &series.of("m").workers[&worker];
        counted.requests.count(CodeLabel::of(200), RequestEnd::Ok);
        counted.ttft.observe(Duration::from_millis(10));
        let nothing = Scraped {
            loads: &[],
            workers: &[],
            series: &series,
            core: &CoreCounts::default(),
            demoted: &[],
            lost: &[],
            namespace: None,
            sync: None,
            queues: &[],
            tokenizers: &TokenizerTable::default(),
            retries_left: 0,
            leaving: false,
        };
        let shown = Scraped {
            loads: &[load],
            workers: &[status()],
            demoted: &[demoted],
            lost: &[WorkerId::from("w9")],
            ..nothing
        };
        let text = metrics.render(&shown).unwrap();
        for line in [
            "worker_healthy{worker=\"w1\"} 1",
            "worker_role{role=\"prefill\",worker=\"w1\"} 1",
            "worker_check_failed{check=\"chat\",worker=\"w1\"} 1",
            "worker_check_passed{check=\"chat\",worker=\"w1\"} 0",
            "source_ttft_ratio{dp_rank=\"1\",worker=\"w1\"} 2.5",
            "worker_draining{worker=\"w1\"} 1",
            "worker_lost{worker=\"w9\"} 1",
            "worker_passed_over{reason=\"stalled\",worker=\"w1\"} 1",
            "source_demoted{dp_rank=\"1\",worker=\"w1\"} 1",
            "model_requests_total{code=\"200\",model=\"m\",outcome=\"ok\",worker=\"w1\"} 1",
            "model_ttft_seconds_bucket{model=\"m\",worker=\"w1\",le=\"0.005\"} 0",
            "model_ttft_seconds_bucket{model=\"m\",worker=\"w1\",le=\"0.01\"} 1",
            "model_ttft_seconds_count{model=\"m\",worker=\"w1\"} 1",
        ] {
            let line = format!("\nwarmroute_router_{line}\n");
            assert!(text.contains(&line), "{text}");
        }
        let series = &series.followed_by([].into_iter());
        let text = metrics.render(&Scraped { series, ..nothing }).unwrap();
        assert!(!text.contains("w1"), "{text}");
    }
}
