//! What a scrape copies from the router's state: series that exist only as long as their worker,
//! and counts that the decision core and the sync core keep themselves.

use std::fmt::Display;
use std::sync::atomic::Ordering::Relaxed;

use warmroute_process::metrics::MetricOf::{Age, Counter, Counters, Flag, Gauge};
use warmroute_process::metrics::{MetricKind, MetricLabels, MetricRow, MetricsText};
use warmroute_proto::WorkerId;
use warmroute_proto::registry::DemotedSource;

use super::served::{ModelSeries, ModelTotals, SecondsHistogram, SeriesTable, WorkerSeries};
use super::tenant_series::TenantSeries;
use crate::admission::QueueStatus;
use crate::route::{CoreCounts, SourceLoad};
use crate::sync::{ReplicaCounts, ReplicaStatus};
use crate::tokenize::{ComparisonCounts, EncoderKind, SegmentCacheStats, Tokenizer};
use crate::tokenizers::{TokenizerState, TokenizerTable};

#[rustfmt::skip]
const LOADS: [MetricRow<SourceLoad>; 3] = [
    ("slots_active", "Requests on a source", Gauge(|s| s.active_requests.into())),
    ("slots_prefill_tokens", "Prompt tokens that a source has still to prefill",
     Gauge(|s| s.prefill_tokens)),
    ("slots_decode_blocks", "Distinct blocks active on a source", Gauge(|s| s.decode_blocks)),
];

#[rustfmt::skip]
const WORKERS: [MetricRow<WorkerStatus>; 3] = [
    ("worker_healthy", "1 while the router's own checks pass", Flag(|s| s.healthy)),
    ("worker_registered", "1 while the registry has the worker", Flag(|s| s.registered)),
    ("worker_draining", "1 while an operator has drained the worker", Flag(|s| s.draining)),
];

/// By model and worker.
#[rustfmt::skip]
const TOKENS: [MetricRow<WorkerSeries>; 4] = [
    ("model_prompt_tokens_total", "Prompt tokens of ended requests",
     Counter(|s| s.prompt_tokens.load(Relaxed))),
    ("model_output_tokens_total", "Output tokens of ended requests",
     Counter(|s| s.output_tokens.load(Relaxed))),
    ("model_credited_tokens_total",
     "Prompt tokens that the router credited as cached when it chose the worker",
     Counter(|s| s.credited_tokens.load(Relaxed))),
    ("model_cached_tokens_total", "Prompt tokens that engines reported as cached",
     Counter(|s| s.cached_tokens.load(Relaxed))),
];

type HistogramRow<S> = (&'static str, &'static str, fn(&S) -> &SecondsHistogram);

/// By model and worker.
#[rustfmt::skip]
const WORKER_SECONDS: [HistogramRow<WorkerSeries>; 3] = [
    ("model_ttft_seconds", "From a request's head to its first streamed output", |s| &s.ttft),
    ("model_inter_token_seconds", "Between two streamed outputs of a request", |s| &s.inter_token),
    ("model_request_seconds", "From a request's head to its response's end", |s| &s.total),
];

/// By model.
#[rustfmt::skip]
const MODEL_SECONDS: [HistogramRow<ModelTotals>; 2] = [
    ("model_queue_seconds", "Time for which a request waited for a worker of its model",
     |s| &s.queue),
    ("model_decision_seconds",
     "From a request's whole body to the choice of a worker, without that wait", |s| &s.decision),
];

#[rustfmt::skip]
const CORE: [MetricRow<CoreCounts>; 15] = [
    ("slots_open", "Open slots of all routers", Gauge(|s| s.open_slots as u64)),
    ("slots_opened_total", "Slots that this router opened, one for each attempt",
     Counter(|s| s.opened)),
    ("slots_freed_total", "Slots that this router freed",
     Counters("end", |s| vec![
         ("completed", s.freed.completed), ("failed", s.freed.failed),
         ("aborted", s.freed.aborted),
     ])),
    ("moves_total", "Requests whose choice another router's crossed; `unwatched` for want of room",
     Counters("outcome", |s| vec![
         ("moved", s.moves.moved), ("stayed", s.moves.stayed), ("late", s.moves.late),
         ("unwatched", s.moves.unwatched),
     ])),
    ("slot_changes_ignored_total", "Slot changes that contradict the slots",
     Counters("reason", |s| vec![
         ("opened_twice", s.ignored.opened_twice), ("unknown_slot", s.ignored.unknown_slot),
         ("prefilled_twice", s.ignored.prefilled_twice),
         ("old_incarnation", s.ignored.old_incarnation),
     ])),
    ("source_stalls_total", "Sources found without first tokens", Counter(|s| s.stalls)),
    ("index_lagging_total", "Index answers about a source that were older than known",
     Counter(|s| s.view.lagging)),
    ("audit_rechecks_total",
     "Index credit that an engine did not find, by what the index then said of the block",
     Counters("result", |s| vec![
         ("cleared", s.audit.cleared), ("unproven", s.audit.unproven), ("strike", s.audit.strikes),
     ])),
    ("source_reinstatements_total",
     "Demotions that ended because the engine agreed with the index again",
     Counter(|s| s.audit.reinstated)),
    ("credit_reports_total",
     "Reports of cached tokens that say something of exact credit, by how the engine's compare",
     Counters("engine_had", |s| vec![
         ("same", s.evidence.agreed), ("more", s.evidence.exceeded), ("less", s.evidence.missed),
     ])),
    ("credit_doubts_total",
     "Times that exact credit ended for requests with something in common, by such reports",
     Counter(|s| s.evidence.doubts_begun)),
    ("credit_doubts", "Groups of requests now whose exact credit engines' reports contradict",
     Gauge(|s| s.evidence.doubts as u64)),
    ("reported_prefixes",
     "Prefixes that engines reported as cached, where the index is not complete",
     Gauge(|s| s.reported_prefixes as u64)),
    ("predicted_samples", "Hashes kept of prompts that run or have just ended",
     Gauge(|s| s.predicted_samples)),
    ("sent_prompts", "Prompts kept that were sent where the index says nothing",
     Gauge(|s| s.sent_prompts as u64)),
];

#[rustfmt::skip]
const SYNC: [MetricRow<ReplicaStatus>; 3] = [
    ("sync_peers", "Other routers that live", Gauge(|s| s.peers as u64)),
    ("sync_divergence_requests",
     "Largest difference between a view and its router's last heartbeat", Gauge(|s| s.divergence)),
    ("sync_incarnation", "This router's incarnation",
     Gauge(|s| s.incarnation.map_or(0, |incarnation| incarnation.0))),
];

#[rustfmt::skip]
const SYNC_COUNTS: [MetricRow<ReplicaCounts>; 11] = [
    ("sync_messages_total", "Load messages",
     Counters("direction", |s| vec![
         ("in", s.traffic.messages_in), ("out", s.traffic.messages_out),
     ])),
    ("sync_frames_total", "Broadcasts of load messages",
     Counters("direction", |s| vec![("in", s.traffic.frames_in), ("out", s.traffic.frames_out)])),
    ("sync_bytes_total", "Bytes of broadcasts",
     Counters("direction", |s| vec![("in", s.traffic.bytes_in), ("out", s.traffic.bytes_out)])),
    ("sync_asks_total",
     "Requests for missing messages or slots; echoes, which measure the round trip",
     Counters("kind", |s| vec![
         ("asked", s.traffic.asks_out), ("failed", s.traffic.asks_failed),
         ("served", s.traffic.asks_in), ("echo_asked", s.traffic.echoes_out),
         ("echo_served", s.traffic.echoes_in),
     ])),
    ("sync_verdicts_total", "Other routers' messages by what became of them",
     Counters("verdict", |s| vec![
         ("applied", s.verdicts.applied), ("duplicate", s.verdicts.duplicate),
         ("old", s.verdicts.old), ("ahead", s.verdicts.ahead), ("violation", s.verdicts.violation),
         ("malformed", s.verdicts.malformed),
     ])),
    ("sync_gaps_total", "Times that messages were missing", Counter(|s| s.mended.gaps)),
    ("sync_digest_mismatches_total",
     "Heartbeats whose digest differed from the view at the same number",
     Counter(|s| s.mended.mismatches)),
    ("sync_deaf_total", "Times that this router did not receive its own heartbeats",
     Counter(|s| s.deafs)),
    ("sync_repairs_total", "Repairs of views",
     Counters("kind", |s| vec![
         ("numbers", s.mended.by_numbers), ("state", s.mended.by_state),
         ("wrong_state", s.mended.states_wrong), ("cut_taken", s.mended.cuts),
     ])),
    ("sync_refused_total", "What exceeded a bound",
     Counters("what", |s| vec![
         ("peer", s.refused.peers), ("waiting", s.refused.waiting), ("state", s.refused.states),
         ("ask", s.refused.asks), ("unsent", s.refused.unsent),
     ])),
    ("sync_releases_total", "Routers whose slots were freed together",
     Counters("reason", |s| vec![("silence", s.deaths), ("goodbye", s.goodbyes)])),
];

#[rustfmt::skip]
const QUEUES: [MetricRow<QueueStatus>; 2] = [
    ("queue_requests", "Requests that wait while all workers of their model are full",
     Gauge(|s| s.size.requests as u64)),
    ("queue_oldest_seconds", "Time for which the oldest of these requests waits",
     Age(|s| Some(s.oldest.unwrap_or_default()))),
];

#[rustfmt::skip]
const TOKENIZER: [MetricRow<TokenizerStatus>; 4] = [
    ("encoder_comparisons_total", "Texts encoded by both encoders, by result",
     Counters("result", |s| vec![
         ("equal", s.comparisons.equal), ("different", s.comparisons.different),
     ])),
    ("reference_encoder", "1 while prompts are encoded by the slower reference",
     Flag(|s| s.encoder == EncoderKind::Reference)),
    ("token_cache_bytes_total", "Prompt bytes looked up in the cache of token ids",
     Counters("result", |s| vec![("hit", s.cache.hit_bytes), ("miss", s.cache.miss_bytes)])),
    ("token_cache_kept_bytes", "Bytes of the texts and token ids in that cache",
     Gauge(|s| s.cache.kept_bytes as u64)),
];

/// The state that a scrape shows.
#[derive(Clone, Copy)]
pub(crate) struct Scraped<'a> {
    pub loads: &'a [SourceLoad],
    pub workers: &'a [WorkerStatus],
    pub series: &'a SeriesTable,
    pub core: &'a CoreCounts,
    pub demoted: &'a [DemotedSource],
    /// Workers that are gone without a sign.
    pub lost: &'a [WorkerId],
    /// That of the routers which share a plane; `None` without NATS.
    pub namespace: Option<&'a str>,
    /// `None` while the replica does not run.
    pub sync: Option<&'a ReplicaStatus>,
    pub queues: &'a [QueueStatus],
    pub tokenizers: &'a TokenizerTable,
    /// Retries that the budget has left.
    pub retries_left: u64,
    pub leaving: bool,
}

/// The encoder in use and the cache of segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenizerStatus {
    pub encoder: EncoderKind,
    pub comparisons: ComparisonCounts,
    pub cache: SegmentCacheStats,
}

impl TokenizerStatus {
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        Self {
            encoder: tokenizer.encoder(),
            comparisons: tokenizer.comparison_counts(),
            cache: tokenizer.cache_stats(),
        }
    }

    /// Adds the counts of another tokenizer.
    pub(crate) fn add(&mut self, other: &Self) {
        self.comparisons.equal += other.comparisons.equal;
        self.comparisons.different += other.comparisons.different;
        self.cache.hit_bytes += other.cache.hit_bytes;
        self.cache.miss_bytes += other.cache.miss_bytes;
        self.cache.kept_bytes += other.cache.kept_bytes;
    }
}

/// One worker's state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkerStatus {
    pub worker: String,
    pub role: &'static str,
    pub healthy: bool,
    /// The registry has it.
    pub registered: bool,
    /// Drained by an operator.
    pub draining: bool,
    /// Each check by its name, with whether the worker passed.
    pub checks: Vec<(&'static str, bool)>,
    /// Names of the checks that found a difference; an open check neither passed nor failed.
    pub failed_checks: Vec<&'static str>,
    /// Why its requests are for other workers, although its health checks pass.
    pub passed_over: Vec<&'static str>,
    /// By rank, where known: observed over predicted time to first token.
    pub ttft_ratios: Vec<(u32, f64)>,
}

/// The page, below the metrics that are counted as things happen.
pub(super) struct Page(MetricsText);

fn source_labels(worker: &dyn Display, rank: u32) -> MetricLabels {
    MetricLabels::new(&[("dp_rank", &rank), ("worker", worker)])
}

fn model_labels(model: &dyn Display) -> MetricLabels {
    MetricLabels::new(&[("model", model)])
}

impl Page {
    pub(super) fn of(scraped: &Scraped<'_>, tenants: &TenantSeries) -> String {
        let mut page = Self(MetricsText::new("warmroute_router_"));
        page.write(scraped);
        tenants.write(&mut page.0);
        page.0.into_string()
    }

    fn write(&mut self, scraped: &Scraped<'_>) {
        let help = "1 while the router reports not-ready";
        self.0.gauge("draining", help, u8::from(scraped.leaving));
        let help = "Attempts that may be repeated now, by the budget of retries";
        self.0.gauge("retries_left", help, scraped.retries_left);
        self.0.rows_of(
            &LOADS,
            scraped
                .loads
                .iter()
                .map(|load| (source_labels(&load.worker, load.dp_rank.0), load)),
        );
        self.workers(scraped.workers);
        self.served(scraped.series);
        self.0.rows(&CORE, scraped.core);
        self.demoted(scraped.demoted);
        self.gauges(
            "worker_lost",
            "1 for an hour where a registration expired, undrained, and the engine does not answer",
            scraped
                .lost
                .iter()
                .map(|worker| (MetricLabels::new(&[("worker", worker)]), 1)),
        );
        if let Some(sync) = scraped.sync {
            // An alert compares the routers of a namespace, and Prometheus may scrape several.
            let of = scraped.namespace;
            let of = of.map_or_else(MetricLabels::default, |of| {
                MetricLabels::new(&[("warmroute_namespace", &of)])
            });
            self.0.rows_of(&SYNC, [(of, sync)]);
            self.0.rows(&SYNC_COUNTS, &sync.counts);
        }
        self.queues(scraped.queues);
        self.models(scraped.tokenizers);
        if let Some(status) = scraped.tokenizers.status() {
            self.0.rows(&TOKENIZER, &status);
        }
    }

    fn gauges<V: Display>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (MetricLabels, V)>,
    ) {
        self.0.family(MetricKind::Gauge, name, help, series);
    }

    fn demoted(&mut self, demoted: &[DemotedSource]) {
        let row =
            |one: &DemotedSource| (source_labels(&one.source.worker, one.source.dp_rank.0), 1);
        self.gauges(
            "source_demoted",
            "1 while the index's credit of a source is ignored, because its engine contradicted it",
            demoted.iter().map(row),
        );
    }

    fn queues(&mut self, queues: &[QueueStatus]) {
        let of_model = queues
            .iter()
            .map(|queue| (model_labels(&queue.model), queue));
        self.0.rows_of(&QUEUES, of_model);
        let bytes = queues.iter().map(|status| status.size.bytes).sum::<usize>();
        let help = "Bytes of the bodies of these requests";
        self.0.gauge("queue_bytes", help, bytes);
    }

    fn models(&mut self, table: &TokenizerTable) {
        let loaded = table.models().map(|(model, entry)| {
            let is_ready = matches!(entry.state, TokenizerState::Ready(_));
            (model_labels(model), u8::from(is_ready))
        });
        self.gauges(
            "model_tokenizer_loaded",
            "1 while the model has a tokenizer; else its prompts in text are routed by load",
            loaded,
        );
    }

    fn workers(&mut self, workers: &[WorkerStatus]) {
        self.0.rows_of(
            &WORKERS,
            workers
                .iter()
                .map(|status| (MetricLabels::new(&[("worker", &status.worker)]), status)),
        );
        let with = |label, value: &dyn Display, status: &WorkerStatus| {
            MetricLabels::new(&[(label, value), ("worker", &status.worker)])
        };
        let roles = workers
            .iter()
            .map(|status| (with("role", &status.role, status), 1));
        self.gauges("worker_role", "1 for a worker's role", roles);
        let passed_over = workers.iter().flat_map(|status| {
            let reasons = status.passed_over.iter();
            reasons.map(move |reason| (with("reason", reason, status), 1))
        });
        self.gauges(
            "worker_passed_over",
            "1 where a healthy worker gets no requests, or only trials, by why",
            passed_over,
        );
        let checks = workers.iter().flat_map(|status| {
            let checks = status.checks.iter();
            checks.map(move |(check, passed)| (with("check", check, status), u8::from(*passed)))
        });
        self.gauges(
            "worker_check_passed",
            "1 where a worker passed the check at its registration",
            checks,
        );
        let failed = workers.iter().flat_map(|status| {
            let failed = status.failed_checks.iter();
            failed.map(move |check| (with("check", check, status), 1))
        });
        self.gauges(
            "worker_check_failed",
            "1 where the check found a difference between router and engine",
            failed,
        );
        let ratios = workers.iter().flat_map(|status| {
            let ratios = status.ttft_ratios.iter();
            ratios.map(move |(rank, ratio)| (source_labels(&status.worker, *rank), *ratio))
        });
        self.gauges(
            "source_ttft_ratio",
            "Time to first token over what the median source would have needed, averaged",
            ratios,
        );
    }

    /// Series by model and worker. A worker that served no request has none.
    fn served(&mut self, table: &SeriesTable) {
        let unplaced = table
            .iter()
            .map(|model| (model, "", &model.totals.unplaced));
        let placed = served(table).map(|(model, worker, series)| (model, worker, &series.requests));
        let requests = placed.chain(unplaced).flat_map(|(model, worker, counts)| {
            counts.read().map(move |(code, end, count)| {
                let labels = MetricLabels::new(&[
                    ("code", &code.label()),
                    ("model", &model.model),
                    ("outcome", &end.label()),
                    ("worker", &worker),
                ]);
                (labels, count)
            })
        });
        let asleep = table.iter().map(|model| {
            let count = model.totals.asleep.load(Relaxed);
            (model_labels(&model.model), count)
        });
        let asleep = asleep.filter(|(_, count)| *count > 0);
        self.0.family(
            MetricKind::Counter,
            "model_asleep_requests_total",
            "Requests that found all workers of their model asleep",
            asleep,
        );
        self.0.family(
            MetricKind::Counter,
            "model_requests_total",
            "Requests ended, by model and worker; without a worker: answered by the router itself",
            requests,
        );
        let labelled = served(table).map(|(model, worker, series)| {
            let labels = MetricLabels::new(&[("model", &model.model), ("worker", &worker)]);
            (labels, series)
        });
        self.0.rows_of(&TOKENS, labelled.clone());
        for (name, help, of) in WORKER_SECONDS {
            let series = labelled.clone();
            let series = series.map(|(labels, series)| (labels, of(series).read()));
            self.0.histograms(name, help, series);
        }
        for (name, help, of) in MODEL_SECONDS {
            let models = table.iter();
            let series = models.map(|one| (model_labels(&one.model), of(&one.totals).read()));
            self.0.histograms(name, help, series);
        }
    }
}

/// Each model's series by worker, of workers that served a request of it.
fn served(
    table: &SeriesTable,
) -> impl Iterator<Item = (&ModelSeries, &str, &WorkerSeries)> + Clone {
    table.iter().flat_map(|model| {
        let workers = model.workers.iter();
        let used = workers.filter(|(_, series)| series.requests.read().next().is_some());
        used.map(move |(worker, series)| (model, worker.as_str(), &**series))
    })
}
