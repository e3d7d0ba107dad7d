//! The response's body on its way from the engine to the client: passed on frame by frame,
//! unchanged and undelayed, and read along for what the accounts need.
//!
//! A body that is dropped before its end means that the client closed its connection. The engine's
//! connection is dropped with it, which aborts the request there, and the slot is freed by its
//! guard.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

use super::call::Call;
use super::respond::AnswerReaders;
use crate::fleet::{RequestResult, TrackedRequest};
use crate::metrics::{CancelPhase, Metrics};
use crate::openai::{StreamObserver, TokenUsage};
use crate::shared_core::SlotHold;
use crate::tenants::Settlement;

/// A JSON answer larger than this is not searched for its usage.
const JSON_BYTES_MAX: usize = 256 << 10;

/// Such an answer counts a token for as many bytes.
const ANSWER_BYTES_PER_TOKEN: u64 = 4;

/// Longest time for the body of an error, from its head. Engines write errors as a whole; a hung
/// one must not hold the client.
const ERROR_BODY_MAX: Duration = Duration::from_secs(30);

/// How a body is read along.
pub(super) enum BodyWatch {
    Events(StreamObserver),
    /// A JSON answer, kept until it is complete.
    Json(Vec<u8>),
    Nothing,
}

/// Takes the usage that the engine reports.
pub(super) type OnUsage = Box<dyn FnOnce(TokenUsage) + Send>;

/// A request on an engine, from the response head on.
pub(super) struct Flight {
    pub call: Call,
    pub slot: Option<SlotHold>,
    pub tracked: Option<TrackedRequest>,
    pub status: StatusCode,
    pub watch: BodyWatch,
    /// Output tokens that fill a block.
    pub block_tokens: u64,
    /// Bytes of a JSON answer that is too large to be read.
    pub unread_bytes: u64,
    pub readers: AnswerReaders,
    pub metrics: Arc<Metrics>,
}

pub(super) struct TrackedBody {
    /// Bytes that came before the head was passed on.
    early: Option<Bytes>,
    inner: reqwest::Body,
    flight: Option<Flight>,
    phase: CancelPhase,
    grown_blocks: u64,
    /// The end of the time for the body of an error.
    error_end: Option<Pin<Box<Sleep>>>,
}

/// Why a body ends early.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error(transparent)]
    Http(#[from] reqwest::Error),
    #[error("the body of an error is not complete after {ERROR_BODY_MAX:?}")]
    ErrorTimeout,
}

impl TrackedBody {
    pub(super) fn new(early: Option<Bytes>, inner: reqwest::Body, flight: Flight) -> Self {
        let is_error = flight.status.is_client_error() || flight.status.is_server_error();
        let mut tracked = Self {
            error_end: is_error.then(|| Box::pin(sleep(ERROR_BODY_MAX))),
            early,
            inner,
            flight: Some(flight),
            phase: CancelPhase::BeforeFirstToken,
            grown_blocks: 0,
        };
        // An empty body is not polled.
        if tracked.is_end_stream() {
            tracked.end();
        }
        tracked
    }

    fn data(&mut self, data: &Bytes) {
        let Some(flight) = &mut self.flight else {
            return;
        };
        if self.phase != CancelPhase::Stream {
            self.phase = CancelPhase::Stream;
            flight.call.first_byte();
            if let Some(on_beginning) = flight.readers.on_beginning.take() {
                on_beginning(data);
            }
        }
        match &mut flight.watch {
            BodyWatch::Events(watch) => {
                if watch.push(data) {
                    flight.prefill_ended();
                }
                self.grow();
            }
            BodyWatch::Json(kept) if kept.len() + data.len() <= JSON_BYTES_MAX => {
                if self.inner.is_end_stream() && kept.is_empty() {
                    let usage = TokenUsage::from_json(data);
                    flight.audit(usage);
                } else {
                    kept.extend_from_slice(data);
                }
            }
            BodyWatch::Json(kept) => {
                flight.unread_bytes = (kept.len() + data.len()) as u64;
                flight.watch = BodyWatch::Nothing;
            }
            BodyWatch::Nothing if flight.unread_bytes > 0 => {
                flight.unread_bytes += data.len() as u64;
            }
            BodyWatch::Nothing => {}
        }
    }

    /// Counts each chunk as a token: an engine puts several tokens into one chunk only under load.
    fn grow(&mut self) {
        let Some(flight) = &mut self.flight else {
            return;
        };
        let BodyWatch::Events(watch) = &flight.watch else {
            return;
        };
        flight.call.report.streamed(watch.output_chunks());
        flight.call.generated(watch.output_chunks());
        let blocks = watch.output_chunks() / flight.block_tokens.max(1);
        let more = blocks.saturating_sub(self.grown_blocks);
        if let (1.., Some(slot)) = (more, &mut flight.slot) {
            slot.grow(u32::try_from(more).unwrap_or(u32::MAX));
            self.grown_blocks = blocks;
        }
    }

    /// The body is complete.
    fn end(&mut self) {
        let Some(mut flight) = self.flight.take() else {
            return;
        };
        let usage = match &mut flight.watch {
            BodyWatch::Events(watch) => {
                watch.finish();
                watch.usage()
            }
            BodyWatch::Json(kept) => TokenUsage::from_json(kept),
            BodyWatch::Nothing => None,
        };
        if let Some(slot) = flight.slot.take() {
            if flight.status.is_success() {
                slot.complete();
            } else {
                slot.fail();
            }
        }
        flight.audit(usage);
        flight.settle(usage);
        let status = flight.status;
        flight.call.answered(status);
    }

    /// The engine closed the connection early. The client's connection ends early too.
    fn broken(&mut self) {
        if let Some(mut flight) = self.flight.take() {
            flight.settle(None);
            flight.call.broken();
            if let Some(tracked) = &mut flight.tracked {
                tracked.report(RequestResult::Broken);
            }
            if let Some(slot) = flight.slot.take() {
                slot.fail();
            }
        }
    }

    /// Clients may close at `[DONE]`, before the end of the transfer.
    fn has_last_event(&self) -> bool {
        match self.flight.as_ref().map(|flight| &flight.watch) {
            Some(BodyWatch::Events(watch)) => watch.done(),
            Some(BodyWatch::Json(_) | BodyWatch::Nothing) | None => false,
        }
    }
}

impl Flight {
    fn prefill_ended(&mut self) {
        if let (true, Some(slot)) = (self.status.is_success(), &mut self.slot) {
            slot.first_token();
        }
    }

    /// Ends the tenant's accounts of tokens.
    fn settle(&self, usage: Option<TokenUsage>) {
        let counted = match &self.watch {
            BodyWatch::Events(watch) => watch.output_chunks(),
            BodyWatch::Json(_) => 0,
            BodyWatch::Nothing => self.unread_bytes / ANSWER_BYTES_PER_TOKEN,
        };
        let settlement = match usage {
            _ if !self.status.is_success() => Settlement::Void,
            Some(usage) => Settlement::Reported(usage),
            None => Settlement::Counted,
        };
        self.call.settle(settlement, counted);
    }

    fn audit(&mut self, usage: Option<TokenUsage>) {
        if let Some(usage) = usage {
            self.call.report.reported(usage);
        }
        if let (true, Some(usage)) = (self.status.is_success(), usage)
            && let Some(on_usage) = self.readers.on_usage.take()
        {
            on_usage(usage);
        }
    }
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let mut polled = match self.early.take() {
            Some(early) => Poll::Ready(Some(Ok(Frame::data(early)))),
            None => {
                let polled = Pin::new(&mut self.inner).poll_frame(context);
                polled.map_err(BodyError::from)
            }
        };
        if polled.is_pending()
            && let Some(error_end) = &mut self.error_end
            && error_end.as_mut().poll(context).is_ready()
        {
            polled = Poll::Ready(Some(Err(BodyError::ErrorTimeout)));
        }
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    self.data(data);
                }
                // A body of known length is not polled again for its end.
                if self.inner.is_end_stream() {
                    self.end();
                }
            }
            Poll::Ready(Some(Err(error))) => {
                tracing::debug!(%error, "engine closed the connection in mid-answer");
                self.broken();
            }
            Poll::Ready(None) => self.end(),
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.early.is_none() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let early = self.early.as_ref().map_or(0, |early| early.len() as u64);
        let inner = self.inner.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + early);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + early);
        }
        hint
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        if self.has_last_event() {
            self.end();
        } else if let Some(flight) = self.flight.take() {
            flight.settle(None);
            flight.metrics.cancelled(self.phase);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;
    use crate::call_report::CallSinks;
    use crate::metrics::RouteLabel;

    /// Even if the rest is there already.
    #[tokio::test]
    async fn bytes_from_before_the_head_come_first() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let sinks = CallSinks::silent(&metrics);
        let (head, ()) = axum::http::Request::new(()).into_parts();
        let rest = ["data: 2\n\n", "data: 3\n\n"].map(Ok::<_, std::io::Error>);
        let flight = Flight {
            call: Call::new(RouteLabel::Chat, &head, &sinks),
            slot: None,
            tracked: None,
            status: StatusCode::OK,
            watch: BodyWatch::Events(StreamObserver::default()),
            block_tokens: 16,
            unread_bytes: 0,
            readers: AnswerReaders::default(),
            metrics,
        };
        let early = Bytes::from_static(b"data: 1\n\n");
        let rest = reqwest::Body::wrap_stream(stream::iter(rest));
        let whole = axum::body::Body::new(TrackedBody::new(Some(early), rest, flight));
        let whole = axum::body::to_bytes(whole, usize::MAX).await.unwrap();
        assert_eq!(whole, "data: 1\n\ndata: 2\n\ndata: 3\n\n");
    }
}
