//! What a scrape copies from the router's state: series that exist only as long as their worker,
//! and counts that the decision core and the sync core keep themselves.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

use warmroute_process::metrics::{MetricKind, MetricLabels, MetricsText};
use warmroute_proto::registry::DemotedSource;

use super::served::{ModelSeries, SecondsHistogram, SeriesTable, WorkerSeries};
use crate::admission::QueueStatus;
use crate::route::{self, SourceLoad};
use crate::sync;
use crate::tokenize::{ComparisonCounts, EncoderKind, SegmentCacheStats, Tokenizer};
use crate::tokenizers::{TokenizerState, TokenizerTable};

type OfModel = fn(&ModelSeries) -> &SecondsHistogram;

/// Histograms by model.
const MODEL_SECONDS: [(&str, &str, OfModel); 2] = [
    (
        "model_queue_seconds",
        "Time for which a request waited for a worker of its model",
        |model| &model.totals.queue,
    ),
    (
        "model_decision_seconds",
        "From a request's whole body to the choice of a worker, without that wait",
        |model| &model.totals.decision,
    ),
];

/// The state that a scrape shows.
#[derive(Clone, Copy)]
pub(crate) struct Scraped<'a> {
    pub loads: &'a [SourceLoad],
    pub workers: &'a [WorkerStatus],
    pub series: &'a SeriesTable,
    pub core: &'a route::CoreCounts,
    pub demoted: &'a [DemotedSource],
    /// `None` while the replica does not run.
    pub sync: Option<&'a sync::ReplicaStatus>,
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

fn worker_labels(status: &WorkerStatus) -> MetricLabels {
    MetricLabels::new(&[("worker", &status.worker)])
}

fn source_labels(worker: &dyn Display, rank: u32) -> MetricLabels {
    MetricLabels::new(&[("dp_rank", &rank), ("worker", worker)])
}

impl Page {
    pub(super) fn of(scraped: &Scraped<'_>) -> String {
        let mut page = Self(MetricsText::new("warmroute_router_"));
        page.write(scraped);
        page.0.into_string()
    }

    fn write(&mut self, scraped: &Scraped<'_>) {
        let leaving = u64::from(scraped.leaving);
        self.0
            .gauge("draining", "1 while the router reports not-ready", leaving);
        self.0.gauge(
            "retries_left",
            "Attempts that may be repeated now, by the budget of retries",
            scraped.retries_left,
        );
        self.loads(scraped.loads);
        self.workers(scraped.workers);
        self.served(scraped.series);
        self.core(scraped.core);
        self.audit(scraped.core, scraped.demoted);
        if let Some(sync) = scraped.sync {
            self.sync(sync);
        }
        self.queues(scraped.queues);
        self.models(scraped.tokenizers);
        if let Some(status) = scraped.tokenizers.status() {
            self.tokenizer(status);
        }
    }

    fn queues(&mut self, queues: &[QueueStatus]) {
        let of_model = |status: &QueueStatus| MetricLabels::new(&[("model", &status.model)]);
        let waiting = queues.iter();
        self.0.family(
            MetricKind::Gauge,
            "queue_requests",
            "Requests that wait while all workers of their model are full",
            waiting.map(|status| (of_model(status), status.size.requests)),
        );
        let oldest = queues.iter();
        self.0.family(
            MetricKind::Gauge,
            "queue_oldest_seconds",
            "Time for which the oldest of these requests waits",
            oldest.map(|status| {
                let oldest = status.oldest.unwrap_or_default();
                (of_model(status), oldest.as_secs_f64())
            }),
        );
        let bytes = queues.iter().map(|status| status.size.bytes).sum::<usize>();
        self.0.gauge(
            "queue_bytes",
            "Bytes of the bodies of these requests",
            bytes,
        );
    }

    fn models(&mut self, table: &TokenizerTable) {
        let loaded = table.models().map(|(model, entry)| {
            let is_ready = matches!(entry.state, TokenizerState::Ready(_));
            (MetricLabels::new(&[("model", model)]), u64::from(is_ready))
        });
        self.0.family(
            MetricKind::Gauge,
            "model_tokenizer_loaded",
            "1 while the model has a tokenizer; else its prompts in text are routed by load",
            loaded,
        );
    }

    fn tokenizer(&mut self, status: TokenizerStatus) {
        let TokenizerStatus {
            encoder,
            comparisons,
            cache,
        } = status;
        self.0.counters(
            "encoder_comparisons_total",
            "Texts encoded by both encoders, by result",
            "result",
            &[
                ("equal", comparisons.equal),
                ("different", comparisons.different),
            ],
        );
        self.0.gauge(
            "reference_encoder",
            "1 while prompts are encoded by the slower reference",
            u8::from(encoder == EncoderKind::Reference),
        );
        self.0.counters(
            "token_cache_bytes_total",
            "Prompt bytes looked up in the cache of token ids",
            "result",
            &[("hit", cache.hit_bytes), ("miss", cache.miss_bytes)],
        );
        self.0.gauge(
            "token_cache_kept_bytes",
            "Bytes of the texts and token ids in that cache",
            cache.kept_bytes,
        );
    }

    fn loads(&mut self, loads: &[SourceLoad]) {
        let mut gauges = |name, help, value: fn(&SourceLoad) -> u64| {
            let row = |load| (source_of(load), value(load));
            self.0
                .family(MetricKind::Gauge, name, help, loads.iter().map(row));
        };
        gauges("slots_active", "Requests on a source", |load| {
            load.active_requests.into()
        });
        gauges(
            "slots_prefill_tokens",
            "Prompt tokens that a source has still to prefill",
            |load| load.prefill_tokens,
        );
        gauges(
            "slots_decode_blocks",
            "Distinct blocks active on a source",
            |load| load.decode_blocks,
        );
    }

    fn workers(&mut self, workers: &[WorkerStatus]) {
        let mut gauges = |name, help, value: fn(&WorkerStatus) -> bool| {
            let row = |status| (worker_labels(status), u8::from(value(status)));
            self.0
                .family(MetricKind::Gauge, name, help, workers.iter().map(row));
        };
        gauges(
            "worker_healthy",
            "1 while the router's own checks pass",
            |status| status.healthy,
        );
        gauges(
            "worker_registered",
            "1 while the registry has the worker",
            |status| status.registered,
        );
        gauges(
            "worker_draining",
            "1 while an operator has drained the worker",
            |status| status.draining,
        );
        let passed_over = workers.iter().flat_map(|status| {
            let reasons = status.passed_over.iter();
            reasons.map(|reason| {
                let labels = MetricLabels::new(&[("reason", reason), ("worker", &status.worker)]);
                (labels, 1)
            })
        });
        self.0.family(
            MetricKind::Gauge,
            "worker_passed_over",
            "1 where a healthy worker gets no requests, or only trials, by why",
            passed_over,
        );
        let checks = workers.iter().flat_map(|status| {
            status.checks.iter().map(|(check, passed)| {
                let labels = MetricLabels::new(&[("check", check), ("worker", &status.worker)]);
                (labels, u8::from(*passed))
            })
        });
        self.0.family(
            MetricKind::Gauge,
            "worker_check_passed",
            "1 where a worker passed the check at its registration",
            checks,
        );
        let failed = workers.iter().flat_map(|status| {
            let failed = status.failed_checks.iter();
            failed.map(|check| {
                let labels = MetricLabels::new(&[("check", check), ("worker", &status.worker)]);
                (labels, 1)
            })
        });
        self.0.family(
            MetricKind::Gauge,
            "worker_check_failed",
            "1 where the check found a difference between router and engine",
            failed,
        );
        let ratios = workers.iter().flat_map(|status| {
            let ratios = status.ttft_ratios.iter();
            ratios.map(|(rank, ratio)| (source_labels(&status.worker, *rank), *ratio))
        });
        self.0.family(
            MetricKind::Gauge,
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
            let count = model.totals.asleep.load(Ordering::Relaxed);
            (MetricLabels::new(&[("model", &model.model)]), count)
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
        self.served_tokens(table);
        self.served_seconds(table);
        for (name, help, histogram) in MODEL_SECONDS {
            let series = table.iter().map(|model| {
                let labels = MetricLabels::new(&[("model", &model.model)]);
                (labels, histogram(model).read())
            });
            self.0.histograms(name, help, series);
        }
    }

    fn served_tokens(&mut self, table: &SeriesTable) {
        let mut counters = |name, help, value: fn(&WorkerSeries) -> &AtomicU64| {
            let row = |(model, worker, series): (&ModelSeries, &str, &WorkerSeries)| {
                let labels = MetricLabels::new(&[("model", &model.model), ("worker", &worker)]);
                (labels, value(series).load(Ordering::Relaxed))
            };
            self.0
                .family(MetricKind::Counter, name, help, served(table).map(row));
        };
        counters(
            "model_prompt_tokens_total",
            "Prompt tokens of ended requests",
            |series| &series.prompt_tokens,
        );
        counters(
            "model_output_tokens_total",
            "Output tokens of ended requests",
            |series| &series.output_tokens,
        );
        counters(
            "model_credited_tokens_total",
            "Prompt tokens that the router credited as cached when it chose the worker",
            |series| &series.credited_tokens,
        );
        counters(
            "model_cached_tokens_total",
            "Prompt tokens that engines reported as cached",
            |series| &series.cached_tokens,
        );
    }

    fn served_seconds(&mut self, table: &SeriesTable) {
        let mut seconds = |name, help, histogram: fn(&WorkerSeries) -> &SecondsHistogram| {
            let series = served(table).map(|(model, worker, series)| {
                let labels = MetricLabels::new(&[("model", &model.model), ("worker", &worker)]);
                (labels, histogram(series).read())
            });
            self.0.histograms(name, help, series);
        };
        seconds(
            "model_ttft_seconds",
            "From a request's head to its first streamed output",
            |series| &series.ttft,
        );
        seconds(
            "model_inter_token_seconds",
            "Between two streamed outputs of a request",
            |series| &series.inter_token,
        );
        seconds(
            "model_request_seconds",
            "From a request's head to its response's end",
            |series| &series.total,
        );
    }

    fn core(&mut self, counts: &route::CoreCounts) {
        let route::CoreCounts {
            freed,
            moves,
            ignored,
            ..
        } = *counts;
        self.0
            .gauge("slots_open", "Open slots of all routers", counts.open_slots);
        self.0.counter(
            "slots_opened_total",
            "Slots that this router opened, one for each attempt",
            counts.opened,
        );
        self.0.counters(
            "slots_freed_total",
            "Slots that this router freed",
            "end",
            &[
                ("completed", freed.completed),
                ("failed", freed.failed),
                ("aborted", freed.aborted),
            ],
        );
        self.0.counters(
            "moves_total",
            "Requests whose choice another router's crossed; `unwatched` for want of room",
            "outcome",
            &[
                ("moved", moves.moved),
                ("stayed", moves.stayed),
                ("late", moves.late),
                ("unwatched", moves.unwatched),
            ],
        );
        self.0.counters(
            "slot_changes_ignored_total",
            "Slot changes that contradict the slots",
            "reason",
            &[
                ("opened_twice", ignored.opened_twice),
                ("unknown_slot", ignored.unknown_slot),
                ("prefilled_twice", ignored.prefilled_twice),
                ("old_incarnation", ignored.old_incarnation),
            ],
        );
        self.0.counter(
            "source_stalls_total",
            "Sources found without first tokens",
            counts.stalls,
        );
        self.0.counter(
            "index_lagging_total",
            "Index answers about a source that were older than known",
            counts.view.lagging,
        );
    }

    fn audit(&mut self, counts: &route::CoreCounts, demoted: &[DemotedSource]) {
        self.0.counters(
            "audit_rechecks_total",
            "Index credit that an engine did not find, by what the index then said of the block",
            "result",
            &[
                ("cleared", counts.audit.cleared),
                ("unproven", counts.audit.unproven),
                ("strike", counts.audit.strikes),
            ],
        );
        self.0.counter(
            "source_reinstatements_total",
            "Demotions that ended because the engine agreed with the index again",
            counts.audit.reinstated,
        );
        self.0.counters(
            "credit_reports_total",
            "Reports of cached tokens that say something of exact credit, by how the engine's compare",
            "engine_had",
            &[
                ("same", counts.evidence.agreed),
                ("more", counts.evidence.exceeded),
                ("less", counts.evidence.missed),
            ],
        );
        self.0.counter(
            "credit_doubts_total",
            "Times that exact credit ended for requests with something in common, by such reports",
            counts.evidence.doubts_begun,
        );
        self.0.gauge(
            "credit_doubts",
            "Groups of requests now whose exact credit engines' reports contradict",
            counts.evidence.doubts,
        );
        self.0.gauge(
            "reported_prefixes",
            "Prefixes that engines reported as cached, where the index is not complete",
            counts.reported_prefixes,
        );
        self.0.gauge(
            "predicted_samples",
            "Hashes kept of prompts that run or have just ended",
            counts.predicted_samples,
        );
        self.0.gauge(
            "sent_prompts",
            "Prompts kept that were sent where the index says nothing",
            counts.sent_prompts,
        );
        let row =
            |one: &DemotedSource| (source_labels(&one.source.worker, one.source.dp_rank.0), 1);
        self.0.family(
            MetricKind::Gauge,
            "source_demoted",
            "1 while the index's credit of a source is ignored, because its engine contradicted it",
            demoted.iter().map(row),
        );
    }

    fn sync(&mut self, snapshot: &sync::ReplicaStatus) {
        let counts = &snapshot.counts;
        self.0
            .gauge("sync_peers", "Other routers that live", snapshot.peers);
        self.0.gauge(
            "sync_divergence_requests",
            "Largest difference between a view and its router's last heartbeat",
            snapshot.divergence,
        );
        let incarnation = snapshot.incarnation.map_or(0, |incarnation| incarnation.0);
        self.0
            .gauge("sync_incarnation", "This router's incarnation", incarnation);
        self.sync_traffic(counts);
        self.sync_repairs(counts);
    }

    fn sync_traffic(&mut self, counts: &sync::ReplicaCounts) {
        let traffic = counts.traffic;
        for (name, help, received, sent) in [
            (
                "sync_messages_total",
                "Load messages",
                traffic.messages_in,
                traffic.messages_out,
            ),
            (
                "sync_frames_total",
                "Broadcasts of load messages",
                traffic.frames_in,
                traffic.frames_out,
            ),
            (
                "sync_bytes_total",
                "Bytes of broadcasts",
                traffic.bytes_in,
                traffic.bytes_out,
            ),
        ] {
            self.0
                .counters(name, help, "direction", &[("in", received), ("out", sent)]);
        }
        self.0.counters(
            "sync_asks_total",
            "Requests for missing messages or slots; echoes, which measure the round trip",
            "kind",
            &[
                ("asked", traffic.asks_out),
                ("failed", traffic.asks_failed),
                ("served", traffic.asks_in),
                ("echo_asked", traffic.echoes_out),
                ("echo_served", traffic.echoes_in),
            ],
        );
        let verdicts = counts.verdicts;
        self.0.counters(
            "sync_verdicts_total",
            "Other routers' messages by what became of them",
            "verdict",
            &[
                ("applied", verdicts.applied),
                ("duplicate", verdicts.duplicate),
                ("old", verdicts.old),
                ("ahead", verdicts.ahead),
                ("violation", verdicts.violation),
                ("malformed", verdicts.malformed),
            ],
        );
    }

    fn sync_repairs(&mut self, counts: &sync::ReplicaCounts) {
        let (mended, refused) = (counts.mended, counts.refused);
        self.0.counter(
            "sync_gaps_total",
            "Times that messages were missing",
            mended.gaps,
        );
        self.0.counter(
            "sync_digest_mismatches_total",
            "Heartbeats whose digest differed from the view at the same number",
            mended.mismatches,
        );
        self.0.counter(
            "sync_deaf_total",
            "Times that this router did not receive its own heartbeats",
            counts.deafs,
        );
        self.0.counters(
            "sync_repairs_total",
            "Repairs of views",
            "kind",
            &[
                ("numbers", mended.by_numbers),
                ("state", mended.by_state),
                ("wrong_state", mended.states_wrong),
                ("cut_taken", mended.cuts),
            ],
        );
        self.0.counters(
            "sync_refused_total",
            "What exceeded a bound",
            "what",
            &[
                ("peer", refused.peers),
                ("waiting", refused.waiting),
                ("state", refused.states),
                ("ask", refused.asks),
                ("unsent", refused.unsent),
            ],
        );
        self.0.counters(
            "sync_releases_total",
            "Routers whose slots were freed together",
            "reason",
            &[("silence", counts.deaths), ("goodbye", counts.goodbyes)],
        );
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

fn source_of(load: &SourceLoad) -> MetricLabels {
    source_labels(&load.worker, load.dp_rank.0)
}
