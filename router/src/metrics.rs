//! Everything that the router counts, behind typed functions. Label sets are closed, but for worker
//! names; a worker's series go when it goes, since they are made anew at every scrape.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

mod sync;

use prometheus::{
    Encoder as _, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::route::Counts;
use crate::sync::Snapshot;
use sync::SyncCounters;

/// Routes as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Completions,
    Embeddings,
    Models,
    Tokenize,
    Other,
}

impl Route {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Models => "models",
            Self::Tokenize => "tokenize",
            Self::Other => "other",
        }
    }
}

/// How a request ended, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ok,
    /// We refused it: malformed, too large, unknown model.
    Refused,
    /// We had nobody to give it to, or no room.
    Shed,
    /// The engine answered 4xx.
    Engine4xx,
    /// The engine answered 5xx.
    Engine5xx,
    /// No worker answered, or one broke off in mid-answer.
    Failed,
    /// The client went before the end.
    ClientGone,
}

impl Outcome {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Shed => "shed",
            Self::Engine4xx => "engine_4xx",
            Self::Engine5xx => "engine_5xx",
            Self::Failed => "failed",
            Self::ClientGone => "client_gone",
        }
    }
}

/// Steps on the way to a decision, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Parse, render, tokenize, hash.
    Read,
    Index,
}

impl Step {
    const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Index => "index",
        }
    }
}

/// When a client went, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CancelPhase {
    /// Before the engine's response head.
    BeforeHead,
    /// After the head, before the first byte of the body.
    BeforeFirstToken,
    /// In mid-body.
    Stream,
}

impl CancelPhase {
    const fn word(self) -> &'static str {
        match self {
            Self::BeforeHead => "before_head",
            Self::BeforeFirstToken => "before_first_token",
            Self::Stream => "stream",
        }
    }
}

/// One source's load, as a scrape shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SourceLoad {
    pub worker: String,
    pub dp_rank: u32,
    pub active_requests: u64,
    pub prefill_tokens: u64,
    pub decode_blocks: u64,
}

/// One worker's standing, as a scrape shows it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkerStanding {
    pub worker: String,
    pub healthy: bool,
    /// An operator took it out.
    pub draining: bool,
    /// Each check by its name, with whether the worker passed.
    pub checks: Vec<(&'static str, bool)>,
    /// Of each rank that enough is known of: observed over predicted time to first token.
    pub ttft_ratios: Vec<(u32, f64)>,
}

/// See the module's documentation.
pub(crate) struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    ttft_seconds: HistogramVec,
    traffic: Traffic,
    decisions: Decisions,
    fleet: FleetGauges,
    core: CoreCounters,
    sync: SyncCounters,
    /// One scrape at a time, since it makes series anew.
    scrape: Mutex<()>,
}

/// What the decision core counted itself, copied at every scrape.
struct CoreCounters {
    slots_open: IntGauge,
    opened: IntCounter,
    freed: IntCounterVec,
    moves: IntCounterVec,
    ignored: IntCounterVec,
    stalls: IntCounter,
    lagging: IntCounter,
}

struct Traffic {
    retries: IntCounterVec,
    cancels: IntCounterVec,
    buffered_bytes: IntGauge,
    connections: IntGauge,
    draining: IntGauge,
    tasks_failed: IntCounter,
    bad_entries: IntCounter,
}

struct Decisions {
    step_seconds: HistogramVec,
    added_seconds: Histogram,
    ladder: IntCounterVec,
    index_failures: IntCounter,
    credited_tokens: IntCounter,
    reported_tokens: IntCounter,
    short_requests: IntCounter,
    demotions: IntCounter,
    unhashed: IntCounterVec,
}

struct FleetGauges {
    active_requests: IntGaugeVec,
    prefill_tokens: IntGaugeVec,
    decode_blocks: IntGaugeVec,
    worker_healthy: IntGaugeVec,
    worker_draining: IntGaugeVec,
    check_passed: IntGaugeVec,
    check_failures: IntCounterVec,
    ttft_ratio: GaugeVec,
}

/// Ten microseconds to ten seconds: what the router itself adds.
const FAST_BUCKETS: &[f64] = &[
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0, 10.0,
];

/// One millisecond to an hour: what engines and streams take.
const SLOW_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
];

impl Metrics {
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new_custom(Some("warmroute_router".to_owned()), None)?;
        let make = Maker(&registry);
        Ok(Self {
            requests: make.counters("requests_total", "Requests ended", &["route", "outcome"])?,
            request_seconds: make.histograms(
                "request_seconds",
                "From a request's head to its response's end",
                SLOW_BUCKETS,
                &["route"],
            )?,
            ttft_seconds: make.histograms(
                "ttft_seconds",
                "From a request's head to the first byte of the engine's body",
                SLOW_BUCKETS,
                &["route"],
            )?,
            traffic: Traffic::new(&make)?,
            decisions: Decisions::new(&make)?,
            fleet: FleetGauges::new(&make)?,
            core: CoreCounters::new(&make)?,
            sync: SyncCounters::new(&make)?,
            scrape: Mutex::default(),
            registry,
        })
    }

    pub(crate) fn request_ended(&self, route: Route, outcome: Outcome, took: Duration) {
        self.requests
            .with_label_values(&[route.word(), outcome.word()])
            .inc();
        self.request_seconds
            .with_label_values(&[route.word()])
            .observe(took.as_secs_f64());
    }

    pub(crate) fn first_byte(&self, route: Route, after: Duration) {
        self.ttft_seconds
            .with_label_values(&[route.word()])
            .observe(after.as_secs_f64());
    }

    pub(crate) fn step(&self, step: Step, took: Duration) {
        self.decisions
            .step_seconds
            .with_label_values(&[step.word()])
            .observe(took.as_secs_f64());
    }

    /// Head read until the first byte goes to the engine.
    pub(crate) fn decided(&self, took: Duration) {
        self.decisions.added_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn ladder(&self, step: &'static str) {
        self.decisions.ladder.with_label_values(&[step]).inc();
    }

    pub(crate) fn index_failed(&self) {
        self.decisions.index_failures.inc();
    }

    pub(crate) fn unhashed(&self, reason: &'static str) {
        self.decisions.unhashed.with_label_values(&[reason]).inc();
    }

    /// The engine told how many prompt tokens it had cached, where `credited` were expected.
    pub(crate) fn overlap(&self, credited: u64, reported: u64) {
        self.decisions.credited_tokens.inc_by(credited);
        self.decisions.reported_tokens.inc_by(reported);
        if reported < credited {
            self.decisions.short_requests.inc();
        }
    }

    pub(crate) fn demoted(&self) {
        self.decisions.demotions.inc();
    }

    pub(crate) fn retried(&self, reason: &'static str) {
        self.traffic.retries.with_label_values(&[reason]).inc();
    }

    pub(crate) fn cancelled(&self, phase: CancelPhase) {
        self.traffic
            .cancels
            .with_label_values(&[phase.word()])
            .inc();
    }

    pub(crate) fn tasks_failed(&self) -> &IntCounter {
        &self.traffic.tasks_failed
    }

    /// Entries of the registry that cannot be read.
    pub(crate) fn bad_entries(&self) -> &IntCounter {
        &self.traffic.bad_entries
    }

    pub(crate) fn buffered_bytes(&self) -> &IntGauge {
        &self.traffic.buffered_bytes
    }

    pub(crate) fn connections(&self) -> &IntGauge {
        &self.traffic.connections
    }

    pub(crate) fn leaving(&self, is_leaving: bool) {
        self.traffic.draining.set(is_leaving.into());
    }

    pub(crate) fn check_failed(&self, check: &'static str) {
        self.fleet.check_failures.with_label_values(&[check]).inc();
    }

    /// Prometheus's text form. Gauges of sources and workers are those given, and no others.
    pub(crate) fn render(
        &self,
        loads: &[SourceLoad],
        workers: &[WorkerStanding],
        counts: &Counts,
        sync: Option<&Snapshot>,
    ) -> Result<String, prometheus::Error> {
        let _scrape = self.scrape.lock().unwrap_or_else(PoisonError::into_inner);
        self.fleet.set(loads, workers);
        self.core.set(counts);
        if let Some(sync) = sync {
            self.sync.set(sync);
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        String::from_utf8(text).map_err(|error| prometheus::Error::Msg(error.to_string()))
    }
}

impl Traffic {
    fn new(make: &Maker<'_>) -> Result<Self, prometheus::Error> {
        Ok(Self {
            retries: make.counters(
                "retries_total",
                "Attempts on a further worker before the client got a byte",
                &["reason"],
            )?,
            cancels: make.counters(
                "upstream_cancels_total",
                "Engine requests ended because the client went",
                &["phase"],
            )?,
            buffered_bytes: make.gauge("buffered_bytes", "Bytes of request bodies held now")?,
            connections: make.gauge("connections", "Client connections open now")?,
            draining: make.gauge("draining", "1: takes itself out of its load balancers")?,
            tasks_failed: make.counter("tasks_failed_total", "Tasks that ended early")?,
            bad_entries: make.counter(
                "bad_registry_entries_total",
                "Unreadable entries of workers and indexers",
            )?,
        })
    }
}

impl Decisions {
    fn new(make: &Maker<'_>) -> Result<Self, prometheus::Error> {
        Ok(Self {
            step_seconds: make.histograms(
                "decision_step_seconds",
                "One step on the way to a decision",
                FAST_BUCKETS,
                &["step"],
            )?,
            added_seconds: make.histogram(
                "decision_seconds",
                "From a whole request body to the engine being asked",
                FAST_BUCKETS,
            )?,
            ladder: make.counters("ladder_total", "What decisions rested on", &["step"])?,
            index_failures: make.counter("index_failures_total", "Index queries not answered")?,
            credited_tokens: make.counter(
                "overlap_credited_tokens_total",
                "Prompt tokens expected to be cached, of requests whose usage told",
            )?,
            reported_tokens: make.counter(
                "overlap_reported_tokens_total",
                "Prompt tokens that engines reported as cached, of the same requests",
            )?,
            short_requests: make.counter(
                "overlap_short_requests_total",
                "Requests with fewer cached tokens than credited",
            )?,
            demotions: make.counter(
                "source_demotions_total",
                "Sources no longer believed until their next generation",
            )?,
            unhashed: make.counters(
                "unhashed_requests_total",
                "Requests whose prompt could not be named, routed by load",
                &["reason"],
            )?,
        })
    }
}

impl CoreCounters {
    fn new(make: &Maker<'_>) -> Result<Self, prometheus::Error> {
        Ok(Self {
            slots_open: make.gauge("slots_open", "Open slots of all routers")?,
            opened: make.counter(
                "slots_opened_total",
                "Slots that this router opened, one for each attempt",
            )?,
            freed: make.counters(
                "slots_freed_total",
                "Slots that this router freed",
                &["end"],
            )?,
            moves: make.counters(
                "moves_total",
                "Requests whose choice another router's earlier one crossed; `unwatched` for want of room",
                &["outcome"],
            )?,
            ignored: make.counters(
                "slot_changes_ignored_total",
                "Changes of slots that made no sense",
                &["reason"],
            )?,
            stalls: make.counter("source_stalls_total", "Sources found without first tokens")?,
            lagging: make.counter(
                "index_lagging_total",
                "Index answers about a source that were older than known",
            )?,
        })
    }

    fn set(&self, counts: &Counts) {
        self.slots_open
            .set(i64::try_from(counts.open_slots).unwrap_or(i64::MAX));
        self.freed.reset();
        let freed = counts.freed;
        for (end, count) in [
            ("completed", freed.completed),
            ("failed", freed.failed),
            ("aborted", freed.aborted),
        ] {
            self.freed.with_label_values(&[end]).inc_by(count);
        }
        self.moves.reset();
        let moves = counts.moves;
        for (outcome, count) in [
            ("moved", moves.moved),
            ("stayed", moves.stayed),
            ("late", moves.late),
            ("unwatched", moves.unwatched),
        ] {
            self.moves.with_label_values(&[outcome]).inc_by(count);
        }
        self.ignored.reset();
        let ignored = counts.ignored;
        for (reason, count) in [
            ("opened_twice", ignored.opened_twice),
            ("unknown_slot", ignored.unknown_slot),
            ("prefilled_twice", ignored.prefilled_twice),
            ("old_incarnation", ignored.old_incarnation),
        ] {
            self.ignored.with_label_values(&[reason]).inc_by(count);
        }
        for (counter, count) in [
            (&self.opened, counts.opened),
            (&self.stalls, counts.stalls),
            (&self.lagging, counts.view.lagging),
        ] {
            counter.reset();
            counter.inc_by(count);
        }
    }
}

impl FleetGauges {
    fn new(make: &Maker<'_>) -> Result<Self, prometheus::Error> {
        let source = ["worker", "dp_rank"];
        Ok(Self {
            active_requests: make.gauges("slots_active", "Requests on a source", &source)?,
            prefill_tokens: make.gauges(
                "slots_prefill_tokens",
                "Prompt tokens that a source has still to prefill",
                &source,
            )?,
            decode_blocks: make.gauges(
                "slots_decode_blocks",
                "Distinct blocks active on a source",
                &source,
            )?,
            worker_healthy: make.gauges(
                "worker_healthy",
                "1 while the router's own checks pass",
                &["worker"],
            )?,
            worker_draining: make.gauges(
                "worker_draining",
                "1 while an operator has the worker taken out",
                &["worker"],
            )?,
            check_passed: make.gauges(
                "worker_check_passed",
                "1 where a worker passed the check at its registration",
                &["worker", "check"],
            )?,
            check_failures: make.counters(
                "worker_check_failures_total",
                "Failed checks at registration",
                &["check"],
            )?,
            ttft_ratio: make.ratios(
                "source_ttft_ratio",
                "Time to first token over what the median source would have needed, averaged",
                &source,
            )?,
        })
    }

    fn set(&self, loads: &[SourceLoad], workers: &[WorkerStanding]) {
        for gauge in [
            &self.active_requests,
            &self.prefill_tokens,
            &self.decode_blocks,
            &self.worker_healthy,
            &self.worker_draining,
            &self.check_passed,
        ] {
            gauge.reset();
        }
        self.ttft_ratio.reset();
        let clamp = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        for load in loads {
            let rank = load.dp_rank.to_string();
            let labels = [load.worker.as_str(), rank.as_str()];
            self.active_requests
                .with_label_values(&labels)
                .set(clamp(load.active_requests));
            self.prefill_tokens
                .with_label_values(&labels)
                .set(clamp(load.prefill_tokens));
            self.decode_blocks
                .with_label_values(&labels)
                .set(clamp(load.decode_blocks));
        }
        for standing in workers {
            self.worker_healthy
                .with_label_values(&[standing.worker.as_str()])
                .set(standing.healthy.into());
            self.worker_draining
                .with_label_values(&[standing.worker.as_str()])
                .set(standing.draining.into());
            for (rank, ratio) in &standing.ttft_ratios {
                self.ttft_ratio
                    .with_label_values(&[standing.worker.as_str(), &rank.to_string()])
                    .set(*ratio);
            }
            for (check, passed) in &standing.checks {
                self.check_passed
                    .with_label_values(&[standing.worker.as_str(), check])
                    .set((*passed).into());
            }
        }
    }
}

/// Makes metrics and registers them.
struct Maker<'a>(&'a Registry);

impl Maker<'_> {
    fn register<M>(&self, metric: M) -> Result<M, prometheus::Error>
    where
        M: prometheus::core::Collector + Clone + 'static,
    {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        self.register(IntCounter::new(name, help)?)
    }

    fn counters(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntCounterVec, prometheus::Error> {
        self.register(IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        self.register(IntGauge::new(name, help)?)
    }

    fn gauges(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntGaugeVec, prometheus::Error> {
        self.register(IntGaugeVec::new(Opts::new(name, help), labels)?)
    }

    fn ratios(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<GaugeVec, prometheus::Error> {
        self.register(GaugeVec::new(Opts::new(name, help), labels)?)
    }

    fn histogram(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
    ) -> Result<Histogram, prometheus::Error> {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.register(Histogram::with_opts(options)?)
    }

    fn histograms(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> Result<HistogramVec, prometheus::Error> {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.register(HistogramVec::new(options, labels)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_series_go_when_it_goes() {
        let metrics = Metrics::new().unwrap();
        let load = SourceLoad {
            worker: "w1".into(),
            dp_rank: 1,
            active_requests: 2,
            prefill_tokens: 3,
            decode_blocks: 4,
        };
        let standing = WorkerStanding {
            worker: "w1".into(),
            healthy: true,
            draining: true,
            checks: vec![("chat", false)],
            ttft_ratios: vec![(1, 2.5)],
        };
        let text = metrics
            .render(&[load], &[standing], &Counts::default(), None)
            .unwrap();
        let line = "warmroute_router_slots_active{dp_rank=\"1\",worker=\"w1\"} 2";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("warmroute_router_worker_healthy{worker=\"w1\"} 1"));
        let line = "warmroute_router_source_ttft_ratio{dp_rank=\"1\",worker=\"w1\"} 2.5";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("warmroute_router_worker_draining{worker=\"w1\"} 1"));
        let text = metrics.render(&[], &[], &Counts::default(), None).unwrap();
        assert!(!text.contains("w1"), "{text}");
    }
}
