//! The response's body on its way from the engine to the client: passed on frame by frame as it
//! comes, never changed, delayed or copied, and watched for what the accounts need to know.
//!
//! Dropped before its end, the client is gone: the engine's connection is dropped with it, which is
//! how an engine learns that it may stop, and the slot is freed by its guard.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::http::StatusCode;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::call::Call;
use crate::metrics::{CancelPhase, Metrics};
use crate::openai::{StreamObserver, TokenUsage};
use crate::shared_core::SlotHold;

/// A JSON answer larger than this is not searched for its usage.
const JSON_BYTES_MAX: usize = 256 << 10;

/// What is watched, by the kind of the body.
pub(super) enum Watch {
    Events(StreamObserver),
    /// A JSON answer that is kept until it is whole.
    Json(Vec<u8>),
    Nothing,
}

/// What the engine reported at the end, for whoever audits it.
pub(super) type OnUsage = Box<dyn FnOnce(TokenUsage) + Send>;

/// A request on an engine, from the response head on.
pub(super) struct Flight {
    pub call: Call,
    pub slot: Option<SlotHold>,
    pub status: StatusCode,
    pub watch: Watch,
    /// Output tokens that fill a block.
    pub block_tokens: u64,
    pub on_usage: Option<OnUsage>,
    pub metrics: Arc<Metrics>,
}

/// See the module's documentation.
pub(super) struct Tracked {
    /// Came before the head was passed on.
    early: Option<Bytes>,
    inner: reqwest::Body,
    flight: Option<Flight>,
    phase: CancelPhase,
    grown_blocks: u64,
}

impl Tracked {
    pub(super) fn new(early: Option<Bytes>, inner: reqwest::Body, flight: Flight) -> Self {
        let mut tracked = Self {
            early,
            inner,
            flight: Some(flight),
            phase: CancelPhase::BeforeFirstToken,
            grown_blocks: 0,
        };
        // Nobody polls a body that says it is empty.
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
        }
        match &mut flight.watch {
            Watch::Events(watch) => {
                if watch.push(data) {
                    flight.prefill_ended();
                }
                self.grow();
            }
            Watch::Json(kept) if kept.len() + data.len() <= JSON_BYTES_MAX => {
                if self.inner.is_end_stream() && kept.is_empty() {
                    let usage = TokenUsage::from_json(data);
                    flight.audit(usage);
                } else {
                    kept.extend_from_slice(data);
                }
            }
            Watch::Json(_) => flight.watch = Watch::Nothing,
            Watch::Nothing => {}
        }
    }

    /// Chunks stand for tokens. Engines put several into one only when they are behind.
    fn grow(&mut self) {
        let Some(flight) = &mut self.flight else {
            return;
        };
        let Watch::Events(watch) = &flight.watch else {
            return;
        };
        let blocks = watch.output_chunks() / flight.block_tokens.max(1);
        let more = blocks.saturating_sub(self.grown_blocks);
        if let (1.., Some(slot)) = (more, &mut flight.slot) {
            slot.grow(u32::try_from(more).unwrap_or(u32::MAX));
            self.grown_blocks = blocks;
        }
    }

    /// The body is whole.
    fn end(&mut self) {
        let Some(mut flight) = self.flight.take() else {
            return;
        };
        let usage = match &mut flight.watch {
            Watch::Events(watch) => {
                watch.finish();
                watch.usage()
            }
            Watch::Json(kept) => TokenUsage::from_json(kept),
            Watch::Nothing => None,
        };
        if let Some(slot) = flight.slot.take() {
            if flight.status.is_success() {
                slot.complete();
            } else {
                slot.fail();
            }
        }
        flight.audit(usage);
        let status = flight.status;
        flight.call.answered(status);
    }

    /// The engine broke off; the client sees its connection end early.
    fn broke_off(&mut self) {
        if let Some(mut flight) = self.flight.take() {
            flight.call.broke_off();
            if let Some(slot) = flight.slot.take() {
                slot.fail();
            }
        }
    }

    /// Clients may leave at `[DONE]`, before the transfer's own end.
    fn seems_whole(&self) -> bool {
        match self.flight.as_ref().map(|flight| &flight.watch) {
            Some(Watch::Events(watch)) => watch.done(),
            Some(Watch::Json(_) | Watch::Nothing) | None => false,
        }
    }
}

impl Flight {
    fn prefill_ended(&mut self) {
        if let (true, Some(slot)) = (self.status.is_success(), &mut self.slot) {
            slot.first_token();
        }
    }

    fn audit(&mut self, usage: Option<TokenUsage>) {
        if let (true, Some(usage)) = (self.status.is_success(), usage)
            && let Some(on_usage) = self.on_usage.take()
        {
            on_usage(usage);
        }
    }
}

impl Body for Tracked {
    type Data = Bytes;
    type Error = reqwest::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, reqwest::Error>>> {
        let polled = match self.early.take() {
            Some(early) => Poll::Ready(Some(Ok(Frame::data(early)))),
            None => Pin::new(&mut self.inner).poll_frame(context),
        };
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    self.data(data);
                }
                // With a known length nobody polls once more for the end.
                if self.inner.is_end_stream() {
                    self.end();
                }
            }
            Poll::Ready(Some(Err(error))) => {
                tracing::debug!(%error, "an engine broke off in mid-answer");
                self.broke_off();
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

impl Drop for Tracked {
    fn drop(&mut self) {
        if self.seems_whole() {
            self.end();
        } else if let Some(flight) = self.flight.take() {
            flight.metrics.cancelled(self.phase);
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;
    use futures_util::stream;

    use super::*;
    use crate::metrics::RouteLabel;

    /// The rest is there already, which makes it no more urgent.
    #[tokio::test]
    async fn what_came_before_the_head_comes_first() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let rest = ["data: 2\n\n", "data: 3\n\n"].map(Ok::<_, std::io::Error>);
        let flight = Flight {
            call: Call::new(RouteLabel::Chat, &HeaderMap::new(), Arc::clone(&metrics)),
            slot: None,
            status: StatusCode::OK,
            watch: Watch::Events(StreamObserver::default()),
            block_tokens: 16,
            on_usage: None,
            metrics,
        };
        let early = Bytes::from_static(b"data: 1\n\n");
        let rest = reqwest::Body::wrap_stream(stream::iter(rest));
        let whole = axum::body::Body::new(Tracked::new(Some(early), rest, flight));
        let whole = axum::body::to_bytes(whole, usize::MAX).await.unwrap();
        assert_eq!(whole, "data: 1\n\ndata: 2\n\ndata: 3\n\n");
    }
}
