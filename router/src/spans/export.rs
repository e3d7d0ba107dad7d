//! The way of ended requests to the collector: a bounded queue, and the task that sends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use axum::http::{HeaderValue, header};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::context::{ParentContext, ParentDecision, TraceId};
use super::{RequestTrace, SampleRatio, encode};
use crate::batch_task::{BatchSink, BatchTask};
use crate::call_report::EndedRequest;
use crate::metrics::{Metrics, RecordResult};
use crate::settings::LiveSettings;

/// Requests that wait to be sent, about 1 KiB each.
const QUEUE_MAX: usize = 2048;

/// Longest time for one message.
const SEND_MAX: Duration = Duration::from_secs(5);

/// Longest time for each message after the stop; the first that fails is the last.
const LAST_SEND_MAX: Duration = Duration::from_secs(1);

/// An ended request with its ids.
pub(crate) struct FinishedTrace {
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

/// Sends to the collector that the settings in force name.
pub(crate) struct SpanExporter {
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
    ) -> (Self, BatchTask<SpanExporter>) {
        let (sender, queue) = mpsc::channel(QUEUE_MAX);
        let sampling = Arc::<Sampling>::default();
        let exporter = SpanExporter {
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
        (tracer, BatchTask::new(queue, exporter))
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
        let has_place = request.takes_place(&self.queue);
        let request = Arc::clone(request);
        let finished = FinishedTrace { trace, request };
        if !has_place || self.queue.try_send(finished).is_err() {
            self.metrics.traced(RecordResult::Dropped, 1);
        }
    }
}

impl BatchSink for SpanExporter {
    type Entry = FinishedTrace;
    const BATCH_MAX: usize = 256;
    const GATHER: Duration = Duration::from_millis(200);

    async fn follow_settings(&mut self) {
        let settings = self.settings.current();
        let tracing = settings.tracing();
        let ratio = tracing.sample_ratio().bits();
        self.sampling.ratio.store(ratio, Ordering::Relaxed);
        self.url = tracing.url();
        let on = self.url.is_some();
        if self.sampling.on.swap(on, Ordering::Relaxed) != on {
            match &self.url {
                Some(url) => tracing::info!(url, "export of traces"),
                None => tracing::info!("no export of traces"),
            }
        }
    }

    async fn write(&mut self, batch: Vec<FinishedTrace>, stop: &CancellationToken) {
        let count = batch.len() as u64;
        let gives_up = self.failing && stop.is_cancelled();
        let result = match self.url.clone().filter(|_| !gives_up) {
            Some(url) => self.post(url, &batch, stop).await,
            // Or switched off since.
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
}

impl SpanExporter {
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
