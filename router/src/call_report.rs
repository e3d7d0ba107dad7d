//! What is known of a request at its end, and where that goes: metrics, access log, trace, recording.
//!
//! One collection for all of them. A request's [`CallReport`] is filled as the request proceeds and
//! handed to the [`CallSinks`] once, when the request has ended in whatever way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode};
use tokio::sync::mpsc::Sender;
use tokio::time::Instant;
use warmroute_process::access::keys::KeyId;
use warmroute_proto::Source;
use warmroute_proto::query::SourceState;
use warmroute_sim::recording::{RecordedOutcome, RecordedPlacement, RequestFacts};

use crate::access_log::AccessLog;
#[cfg(test)]
use crate::batch_task::BatchTask;
use crate::clock::unix_time;
use crate::fleet::ModelCatalog;
use crate::metrics::{
    CodeLabel, Metrics, ModelSeries, OTHER_MODEL, RequestEnd, RouteLabel, TenantTokens,
    WorkerSeries,
};
use crate::openai::TokenUsage;
use crate::recorder::{RecordTicket, Recorder};
use crate::route::{Decision, DecisionBasis, Policy, Prompt};
#[cfg(test)]
use crate::settings::LiveSettings;
#[cfg(test)]
use crate::spans::SpanExporter;
use crate::spans::{RequestTrace, TraceStep, Tracer};

/// Part of a queue's places for requests without a valid key.
const UNKNOWN_DIVISOR: usize = 8;

/// Takes each request's report at its end.
pub(crate) struct CallSinks {
    pub metrics: Arc<Metrics>,
    pub recorder: Recorder,
    pub access_log: AccessLog,
    pub tracer: Tracer,
}

/// What is known of one request.
pub(crate) struct CallReport {
    pub route: RouteLabel,
    pub started: Instant,
    pub request_id: HeaderValue,
    /// `x-correlation-id` and `traceparent` of the client.
    pub traces: [Option<HeaderValue>; 2],
    /// The tenant of its key, if there are tenants.
    pub tenant: Option<KeyId>,
    /// `None` until the model is known.
    pub series: Option<Arc<ModelSeries>>,
    pub prompt: PromptSize,
    /// `None` until an engine answers.
    pub placement: Option<CallPlacement>,
    pub timings: CallTimings,
    pub output: OutputCount,
    /// Prompt tokens that the engine reported as cached.
    pub cached_tokens: Option<u32>,
    /// Times that another worker went on with the stream.
    pub resumes: u32,
    /// Status of the answer; 0 without one.
    pub status: u16,
    pub end: RequestEnd,
    pub record: Option<RecordTicket>,
    /// Present if the request is sampled.
    pub trace: Option<Box<RequestTrace>>,
}

/// A request that ended, as the access log and the trace show it.
pub(crate) struct EndedRequest {
    pub started: Instant,
    /// The end, since the Unix epoch.
    pub time: Duration,
    pub total: Duration,
    pub route: RouteLabel,
    pub request_id: HeaderValue,
    pub traces: [Option<HeaderValue>; 2],
    pub tenant: Option<KeyId>,
    pub model: Option<Arc<str>>,
    pub placement: Option<EndedPlacement>,
    pub prompt_tokens: u32,
    pub cached_tokens: Option<u32>,
    pub output_tokens: u32,
    pub timings: CallTimings,
    pub resumes: u32,
    pub status: u16,
    pub end: RequestEnd,
}

/// Where a request was served, and why there.
pub(crate) struct EndedPlacement {
    pub source: Source,
    pub policy: Policy,
    pub basis: DecisionBasis,
    pub index_state: SourceState,
    pub credited_tokens: u32,
}

/// The length of a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PromptSize {
    /// An estimate, where `is_hashed` is false, until the engine reports it.
    pub tokens: u32,
    pub block_tokens: u32,
    pub is_hashed: bool,
}

/// Where an answer comes from.
pub(crate) struct CallPlacement {
    /// Without the terms of the other candidates.
    pub decision: Decision,
    /// `None` if the worker has left.
    series: Option<Arc<WorkerSeries>>,
}

/// Durations of a request's parts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallTimings {
    /// Waits for a worker.
    pub queue: Duration,
    /// The beginning of a wait that has not ended.
    waits_since: Option<Instant>,
    /// From the whole body to the choice, without waits.
    pub decision: Option<Duration>,
    /// From the head to the first streamed output.
    pub ttft: Option<Duration>,
}

/// Output tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OutputCount {
    /// Data events of a stream with output.
    chunks: u64,
    last: Option<Instant>,
    reported: Option<u32>,
}

impl OutputCount {
    /// As the engine reported them, else the number of chunks.
    pub(crate) fn tokens(&self) -> u32 {
        self.reported.unwrap_or_else(|| saturated(self.chunks))
    }
}

impl CallReport {
    /// A request that begins now. It ends as abandoned by its client, unless another end is set.
    pub(crate) fn new(
        route: RouteLabel,
        request_id: HeaderValue,
        traces: [Option<HeaderValue>; 2],
    ) -> Self {
        Self {
            route,
            started: Instant::now(),
            request_id,
            traces,
            tenant: None,
            series: None,
            prompt: PromptSize::default(),
            placement: None,
            timings: CallTimings::default(),
            output: OutputCount::default(),
            cached_tokens: None,
            resumes: 0,
            status: 0,
            end: RequestEnd::ClientGone,
            record: None,
            trace: None,
        }
    }

    /// A step of the request ends.
    pub(crate) fn step(&mut self, step: TraceStep, from: Instant) {
        if let Some(trace) = &mut self.trace {
            trace.step(step, from);
        }
    }

    /// The request is for this model; a name that is not served counts as [`OTHER_MODEL`].
    pub(crate) fn model(&mut self, catalog: &ModelCatalog, model: &str) {
        self.series = Some(Arc::clone(catalog.series.of(model)));
    }

    /// The request ends without a model that is known.
    pub(crate) fn without_model(&mut self, catalog: impl FnOnce() -> Arc<ModelCatalog>) {
        if self.series.is_none() {
            self.model(&catalog(), OTHER_MODEL);
        }
    }

    pub(crate) fn prompt(&mut self, prompt: &Prompt) {
        let block_tokens = prompt.block_size().tokens();
        self.prompt = PromptSize {
            tokens: prompt.tokens(),
            block_tokens: u32::try_from(block_tokens).unwrap_or(u32::MAX),
            is_hashed: !prompt.blocks().is_empty(),
        };
    }

    /// An engine's answer begins. `catalog` is asked where the worker is newer than the request.
    pub(crate) fn placed(
        &mut self,
        mut decision: Decision,
        catalog: impl FnOnce() -> Arc<ModelCatalog>,
    ) {
        // Many candidates, kept as long as a stream lasts.
        (decision.weighed, decision.compared) = (Vec::new(), Vec::new());
        let worker = &decision.source.worker;
        let series = self.series.as_ref().and_then(|series| {
            let known = series.workers.get(worker).cloned();
            known.or_else(|| {
                catalog()
                    .series
                    .of(&series.model)
                    .workers
                    .get(worker)
                    .cloned()
            })
        });
        self.placement = Some(CallPlacement { decision, series });
    }

    /// The stream has so many chunks with output by now.
    pub(crate) fn streamed(&mut self, chunks: u64) {
        let new = chunks.saturating_sub(self.output.chunks);
        if new == 0 {
            return;
        }
        self.output.chunks = chunks;
        let now = Instant::now();
        let last = self.output.last.replace(now);
        let series = self.placement.as_ref().and_then(|one| one.series.as_ref());
        match last {
            Some(last) => {
                let each = (now - last) / u32::try_from(new).unwrap_or(u32::MAX);
                if let Some(series) = series {
                    series.inter_token.observe_each(each, new);
                }
            }
            None => {
                let ttft = now - self.started;
                self.timings.ttft = Some(ttft);
                if let Some(series) = series {
                    series.ttft.observe(ttft);
                }
            }
        }
    }

    /// The choice is due, so long after the whole body.
    pub(crate) fn decided(&mut self, took: Duration) {
        self.timings.decision = Some(took.saturating_sub(self.timings.queue));
    }

    pub(crate) fn wait_begins(&mut self) {
        self.timings.waits_since = Some(Instant::now());
    }

    /// Also called at the request's end: a client may leave during a wait.
    pub(crate) fn wait_ends(&mut self) {
        if let Some(since) = self.timings.waits_since.take() {
            self.timings.queue += since.elapsed();
        }
    }

    pub(crate) fn reported(&mut self, usage: TokenUsage) {
        if !self.prompt.is_hashed {
            self.prompt.tokens = saturated(usage.prompt_tokens);
        }
        self.output.reported = Some(saturated(usage.completion_tokens));
        self.cached_tokens = usage.cached_tokens.map(saturated);
    }

    /// Prompt tokens that the decision credited as cached.
    pub(crate) fn credited_tokens(&self) -> u32 {
        let placement = self.placement.as_ref();
        placement.map_or(0, |placement| {
            let decision = &placement.decision;
            let blocks = decision.overlap_blocks;
            blocks.saturating_mul(decision.claim.block_tokens())
        })
    }

    fn count(&self, took: Duration) {
        let Some(model) = &self.series else {
            return;
        };
        let (timings, placement) = (&self.timings, self.placement.as_ref());
        if let Some(decision) = timings.decision {
            model.totals.decision.observe(decision);
        }
        if timings.decision.is_some() || placement.is_some() || !timings.queue.is_zero() {
            model.totals.queue.observe(timings.queue);
        }
        let code = CodeLabel::of(self.status);
        let Some(worker) = placement.and_then(|one| one.series.as_ref()) else {
            model.totals.unplaced.count(code, self.end);
            return;
        };
        worker.requests.count(code, self.end);
        worker.total.observe(took);
        let add = |counter: &AtomicU64, tokens: u32| {
            counter.fetch_add(tokens.into(), Ordering::Relaxed);
        };
        add(&worker.prompt_tokens, self.prompt.tokens);
        add(&worker.output_tokens, self.output.tokens());
        add(&worker.credited_tokens, self.credited_tokens());
        add(&worker.cached_tokens, self.cached_tokens.unwrap_or(0));
    }

    /// Tokens of a request that a worker answered.
    fn tokens(&self) -> TenantTokens {
        match &self.placement {
            Some(_) => TenantTokens {
                prompt: self.prompt.tokens,
                output: self.output.tokens(),
                cached: self.cached_tokens.unwrap_or(0),
            },
            None => TenantTokens::default(),
        }
    }

    fn facts(&self, duration: Duration) -> RequestFacts {
        let model = self.series.as_ref().map(|series| Arc::clone(&series.model));
        let placement = self.placement.as_ref();
        RequestFacts {
            arrived: Duration::ZERO,
            model: model.unwrap_or_else(|| OTHER_MODEL.into()),
            prompt_tokens: self.prompt.tokens,
            output_tokens: self.output.tokens(),
            block_tokens: self.prompt.block_tokens,
            ttft: self.timings.ttft,
            duration,
            cached_tokens: self.cached_tokens,
            outcome: outcome(self.end),
            placement: placement.map(|placement| recorded_placement(&placement.decision)),
            tenant: self.tenant.as_ref().map(|name| name.as_str().into()),
        }
    }
}

impl EndedRequest {
    /// A request that took `total` and ends now.
    pub(crate) fn new(report: &CallReport, total: Duration) -> Self {
        let placement = report.placement.as_ref().map(|one| EndedPlacement {
            source: one.decision.source.clone(),
            policy: one.decision.policy,
            basis: one.decision.basis(),
            index_state: one.decision.index_state,
            credited_tokens: report.credited_tokens(),
        });
        let [correlation, traceparent] = report.traces.clone();
        // A traced request's is the engine's parent, in the client's trace if it sent a valid one.
        let own = report.trace.as_deref().map(RequestTrace::traceparent);
        Self {
            started: report.started,
            time: unix_time(),
            total,
            route: report.route,
            request_id: report.request_id.clone(),
            traces: [correlation, own.or(traceparent)],
            tenant: report.tenant.clone(),
            model: report.series.as_ref().map(|one| Arc::clone(&one.model)),
            placement,
            prompt_tokens: report.prompt.tokens,
            cached_tokens: report.cached_tokens,
            output_tokens: report.output.tokens(),
            timings: report.timings,
            resumes: report.resumes,
            status: report.status,
            end: report.end,
        }
    }
}

impl EndedRequest {
    /// Whether it takes a place in a queue of ended requests. Those without a valid key share a part
    /// of the places: clients that are not known must not displace the requests of others.
    pub(crate) fn takes_place<T>(&self, queue: &Sender<T>) -> bool {
        let taken = queue.max_capacity() - queue.capacity();
        let is_unknown =
            self.status == StatusCode::UNAUTHORIZED.as_u16() && self.placement.is_none();
        !is_unknown || taken < queue.max_capacity() / UNKNOWN_DIVISOR
    }
}

impl CallSinks {
    /// Takes a request that has ended.
    pub(crate) fn ended(&self, report: &mut CallReport) {
        report.wait_ends();
        let took = report.started.elapsed();
        self.metrics.request_ended(report.route, report.end, took);
        report.count(took);
        if let Some(tenant) = &report.tenant {
            let model = report.series.as_ref().map(|series| &series.model);
            let tenants = &self.metrics.tenants;
            tenants.count(tenant, model, report.end, report.tokens());
        }
        if report.trace.is_some() || self.access_log.is_on() {
            let ended = Arc::new(EndedRequest::new(report, took));
            self.access_log.ended(&ended);
            if let Some(trace) = report.trace.take() {
                self.tracer.ended(trace, &ended);
            }
        }
        if let Some(record) = report.record.take() {
            record.end(report.started, report.facts(took));
        }
    }
}

#[cfg(test)]
impl CallSinks {
    /// Counts, and writes nothing.
    pub(crate) fn silent(metrics: &Arc<Metrics>) -> Arc<Self> {
        Self::traced(metrics, &Arc::default()).0
    }

    /// Counts, and writes nothing but traces.
    pub(crate) fn traced(
        metrics: &Arc<Metrics>,
        settings: &Arc<LiveSettings>,
    ) -> (Arc<Self>, BatchTask<SpanExporter>) {
        let shared = || (Arc::clone(settings), Arc::clone(metrics));
        let (tracer, exporter) = Tracer::new(shared().0, shared().1, crate::testing::http_client());
        let sinks = Arc::new(Self {
            metrics: Arc::clone(metrics),
            recorder: Recorder::new(shared().0, shared().1).0,
            access_log: AccessLog::new(shared().0, shared().1).0,
            tracer,
        });
        (sinks, exporter)
    }
}

const fn outcome(end: RequestEnd) -> RecordedOutcome {
    match end {
        RequestEnd::Ok => RecordedOutcome::Completed,
        RequestEnd::ClientGone => RecordedOutcome::Cancelled,
        RequestEnd::Refused | RequestEnd::Shed | RequestEnd::Limited => RecordedOutcome::Unplaced,
        RequestEnd::Engine4xx | RequestEnd::Engine5xx | RequestEnd::Failed => {
            RecordedOutcome::Failed
        }
    }
}

fn recorded_placement(decision: &Decision) -> RecordedPlacement {
    let chosen = &decision.chosen;
    let time = |secs: f64| Duration::try_from_secs_f64(secs).unwrap_or_default();
    RecordedPlacement {
        worker: decision.source.worker.as_str().into(),
        dp_rank: decision.source.dp_rank.0,
        credited_blocks: decision.overlap_blocks,
        predicted_blocks: decision.predicted_blocks,
        active_requests: chosen.active_requests,
        queue: time(chosen.time.queue),
        prefill: time(chosen.time.prefill),
        decode: time(chosen.time.decode),
    }
}

fn saturated(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
