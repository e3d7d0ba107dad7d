//! The way of ended requests to the collector: a bounded queue, and the task that sends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use axum::http::{HeaderValue, header};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::context::{ParentContext, ParentDecision, TraceId};
use super::{RequestTrace, SampleRatio, encode};
use crate::call_report::EndedRequest;
use crate::metrics::{Metrics, RecordResult};
use crate::settings::LiveSettings;

/// Requests that wait to be sent, about 1 KiB each.
const QUEUE_MAX: usize = 2048;

/// Requests of one message.
const BATCH_MAX: usize = 256;

/// Time for which a message gathers requests.
const GATHER: Duration = Duration::from_millis(200);

/// Time between two looks at the settings.
const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// Longest time for one message.
const SEND_MAX: Duration = Duration::from_secs(5);

/// Longest time after the stop.
const LAST_SEND_MAX: Duration = Duration::from_secs(1);

/// An ended request with its ids.
pub(super) struct FinishedTrace {
    pub trace: Box<RequestTrace>,
    pub request: Arc<EndedRequest>,
}

/// Samples requests, and queues those that ended.
#[derive(Clone)]
pub(crate) struct Tracer {
    queue: mpsc::Sender<FinishedTrace>,
    sampling: Arc<Sampling>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct Sampling {
    on: AtomicBool,
    ratio: AtomicU64,
}

/// Sends the queue, as the settings in force say.
pub(crate) struct SpanExporter {
    queue: mpsc::Receiver<FinishedTrace>,
    sampling: Arc<Sampling>,
    metrics: Arc<Metrics>,
    settings: Arc<LiveSettings>,
    client: reqwest::Client,
    url: Option<String>,
    /// This process.
    instance: String,
    /// The last message failed; such a state is logged once.
    failing: bool,
}

#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error(transparent)]
    Http(#[from] reqwest::Error),
    #[error("no answer within {SEND_MAX:?}")]
    Timeout,
    #[error("the process ends")]
    Stopped,
}

impl Tracer {
    pub(crate) fn new(
        settings: Arc<LiveSettings>,
        metrics: Arc<Metrics>,
        client: reqwest::Client,
    ) -> (Self, SpanExporter) {
        let (sender, queue) = mpsc::channel(QUEUE_MAX);
        let sampling = Arc::<Sampling>::default();
        let exporter = SpanExporter {
            queue,
            sampling: Arc::clone(&sampling),
            metrics: Arc::clone(&metrics),
            settings,
            client,
            url: None,
            instance: Uuid::new_v4().to_string(),
            failing: false,
        };
        let tracer = Self {
            queue: sender,
            sampling,
            metrics,
        };
        (tracer, exporter)
    }

    pub(crate) fn is_on(&self) -> bool {
        self.sampling.on.load(Ordering::Relaxed)
    }

    /// Begins a request's trace, if it is sampled. A client that sends a `traceparent` decides.
    pub(crate) fn begin(&self, traceparent: Option<&HeaderValue>) -> Option<Box<RequestTrace>> {
        if !self.is_on() {
            return None;
        }
        let parent = traceparent.and_then(|value| ParentContext::parse(value.as_bytes()));
        let (trace, parent) = match parent {
            Some(parent) if parent.decision == ParentDecision::NotSampled => return None,
            Some(parent) => (parent.trace, Some(parent.span)),
            None => {
                let trace = TraceId::random();
                let ratio = SampleRatio::from_bits(self.sampling.ratio.load(Ordering::Relaxed));
                if !ratio.samples(trace) {
                    return None;
                }
                (trace, None)
            }
        };
        Some(Box::new(RequestTrace::new(trace, parent)))
    }

    pub(crate) fn ended(&self, trace: Box<RequestTrace>, request: &Arc<EndedRequest>) {
        let request = Arc::clone(request);
        let finished = FinishedTrace { trace, request };
        if self.queue.try_send(finished).is_err() {
            self.metrics.traced(RecordResult::Dropped, 1);
        }
    }
}

impl SpanExporter {
    /// Sends until the stop, then one last message.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut ticks = interval(CHECK_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => self.follow_settings(),
                count = self.queue.recv_many(&mut batch, BATCH_MAX) => {
                    if count == 0 {
                        // The proxy has ended. A task that ends before the stop counts as failed.
                        stop.cancelled().await;
                        break;
                    }
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = sleep(GATHER) => {}
                    }
                    self.gather(&mut batch);
                    self.send(std::mem::take(&mut batch), &stop).await;
                }
            }
        }
        self.gather(&mut batch);
        self.send(batch, &stop).await;
        let mut left = 0;
        while self.queue.try_recv().is_ok() {
            left += 1;
        }
        self.metrics.traced(RecordResult::Dropped, left);
    }

    fn gather(&mut self, batch: &mut Vec<FinishedTrace>) {
        while batch.len() < BATCH_MAX
            && let Ok(one) = self.queue.try_recv()
        {
            batch.push(one);
        }
    }

    fn follow_settings(&mut self) {
        let settings = self.settings.current();
        let tracing = settings.tracing();
        let ratio = tracing.sample_ratio().bits();
        self.sampling.ratio.store(ratio, Ordering::Relaxed);
        self.url = tracing.url();
        let on = self.url.is_some();
        if self.sampling.on.swap(on, Ordering::Relaxed) != on {
            tracing::info!(url = ?self.url, "export of traces");
        }
    }

    async fn send(&mut self, batch: Vec<FinishedTrace>, stop: &CancellationToken) {
        if batch.is_empty() {
            return;
        }
        let count = batch.len() as u64;
        let result = match self.url.clone() {
            Some(url) => self.post(url, &batch, stop).await,
            // Switched off since.
            None => Err(SendError::Stopped),
        };
        let failing = result.is_err();
        match result {
            Ok(()) => self.metrics.traced(RecordResult::Written, count),
            Err(error) => {
                self.metrics.traced(RecordResult::Dropped, count);
                if !self.failing {
                    tracing::warn!(%error, "collector does not accept traces, dropping them");
                }
            }
        }
        self.failing = failing;
    }

    async fn post(
        &self,
        url: String,
        batch: &[FinishedTrace],
        stop: &CancellationToken,
    ) -> Result<(), SendError> {
        let message = encode::export_request(batch, &self.instance);
        let request = self
            .client
            .post(url)
            .header(header::CONTENT_TYPE, "application/x-protobuf")
            .body(message.encode_to_vec());
        let stopped = async {
            stop.cancelled().await;
            sleep(LAST_SEND_MAX).await;
        };
        tokio::select! {
            answer = timeout(SEND_MAX, request.send()) => {
                answer.map_err(|_| SendError::Timeout)??.error_for_status()?;
                Ok(())
            }
            () = stopped => Err(SendError::Stopped),
        }
    }
}
