//! The response's body on its way from the engine to the client: passed on frame by frame,
//! unchanged and undelayed, and read along for what the accounts need. Streams that may be resumed
//! are passed on event by event, and go on with another worker's body ([`super::resume`]).
//!
//! A body that is dropped before its end means that the client closed its connection. The engine's
//! connection is dropped with it, which aborts the request there, and the slot is freed by its
//! guard.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

use super::attempt::Placement;
use super::body::{BodyBudget, BudgetShare};
use super::call::Call;
use super::engine_body::EngineBody;
use super::respond::AnswerReaders;
use super::resume::{ResumableAnswer, ResumedBody, StreamLoss, resume};
use super::silence::SilenceWatch;
use crate::answer_end::{AnswerEnd, AnswerRule, EngineFailure};
use crate::fleet::{ModelCatalog, TrackedRequest};
use crate::metrics::{CancelPhase, Metrics};
use crate::openai::{self, StreamBytes, StreamObserver, TokenUsage};
use crate::shared_core::SlotHold;
use crate::tenants::Settlement;

/// A JSON answer in pieces that are larger than this is not searched for its usage.
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
    Json(KeptAnswer),
    Nothing,
}

/// The pieces of a JSON answer.
pub(super) struct KeptAnswer {
    bytes: Vec<u8>,
    budget: BodyBudget,
    share: Option<BudgetShare>,
}

impl KeptAnswer {
    pub(super) const fn new(budget: BodyBudget) -> Self {
        Self {
            bytes: Vec::new(),
            budget,
            share: None,
        }
    }

    /// Returns whether there is room for the piece.
    fn keep(&mut self, piece: &[u8]) -> bool {
        if self.bytes.len() + piece.len() > JSON_BYTES_MAX {
            return false;
        }
        // A list that grows has up to twice its items' size.
        let has_room = self.budget.grow_spare(&mut self.share, 2 * piece.len());
        if has_room {
            self.bytes.extend_from_slice(piece);
        }
        has_room
    }
}

/// Takes the usage that the engine reports.
pub(super) type OnUsage = Box<dyn FnOnce(TokenUsage) + Send>;

/// A request on an engine, from the response head on. Dropped before its end, it was abandoned by the
/// client.
pub(super) struct Flight {
    pub call: Call,
    pub slot: Option<SlotHold>,
    pub tracked: Option<TrackedRequest>,
    pub status: StatusCode,
    pub rule: AnswerRule,
    /// Present if the answer is a stream.
    pub silence: Option<SilenceWatch>,
    pub watch: BodyWatch,
    /// Output tokens that fill a block.
    pub block_tokens: u64,
    pub readers: AnswerReaders,
    pub metrics: Arc<Metrics>,
    pub progress: FlightProgress,
}

/// How far an answer is.
pub(super) struct FlightProgress {
    phase: CancelPhase,
    grown_blocks: u64,
    /// Bytes of a JSON answer that is too large to be read.
    unread_bytes: u64,
    /// The report in a JSON answer that came in one piece.
    usage: Option<TokenUsage>,
    /// The worker that goes on with the stream has sent no output.
    resumes: bool,
    /// The JSON answer is an error.
    is_error: bool,
    /// The failure was counted when the answer began.
    is_counted: bool,
    /// All is accounted.
    is_over: bool,
}

impl Default for FlightProgress {
    fn default() -> Self {
        Self {
            phase: CancelPhase::BeforeFirstToken,
            grown_blocks: 0,
            unread_bytes: 0,
            usage: None,
            resumes: false,
            is_error: false,
            is_counted: false,
            is_over: false,
        }
    }
}

impl FlightProgress {
    /// For an answer that begins. `is_counted`: as a failure.
    pub(super) fn judged(is_counted: bool) -> Self {
        Self {
            is_counted,
            ..Self::default()
        }
    }
}

pub(super) struct TrackedBody {
    /// Bytes that came before the head was passed on.
    early: Option<Bytes>,
    inner: EngineBody,
    flight: Option<Flight>,
    /// Holds the flight while another worker is asked to go on.
    resuming: Option<Resuming>,
    /// The end of the time for the body of an error.
    error_end: Option<Pin<Box<Sleep>>>,
    /// The router has ended the body.
    is_cut: bool,
}

type Resuming = BoxFuture<'static, (Flight, Result<ResumedBody, StreamLoss>)>;

type PolledFrame = Option<Result<Frame<Bytes>, BodyError>>;

/// Why a body ends early.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error("the body of an error is not complete after {ERROR_BODY_MAX:?}")]
    ErrorTimeout,
    #[error("an event of the stream is too large")]
    LargeEvent,
    #[error("nothing came for {0:?}")]
    Silent(Duration),
}

impl TrackedBody {
    pub(super) fn new(early: Option<Bytes>, inner: EngineBody, flight: Flight) -> Self {
        let is_error = flight.status.is_client_error() || flight.status.is_server_error();
        let mut tracked = Self {
            error_end: is_error.then(|| Box::pin(sleep(ERROR_BODY_MAX))),
            early,
            inner,
            flight: Some(flight),
            resuming: None,
            is_cut: false,
        };
        // An empty body is not polled.
        if tracked.is_end_stream() {
            tracked.end();
        }
        tracked
    }

    fn resumable(&mut self) -> Option<&mut ResumableAnswer> {
        self.flight.as_mut()?.readers.resumable.as_deref_mut()
    }

    /// Whether further bytes may come from another worker.
    const fn is_resumable(&self) -> bool {
        let flight = self.flight.as_ref();
        self.resuming.is_some()
            || matches!(flight, Some(flight) if flight.readers.resumable.is_some())
    }

    fn poll_engine(&mut self, context: &mut Context<'_>) -> Poll<PolledFrame> {
        if let Some(early) = self.early.take() {
            return Poll::Ready(Some(Ok(Frame::data(early))));
        }
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        if polled.is_pending()
            && let Some(error_end) = &mut self.error_end
            && error_end.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Some(Err(BodyError::ErrorTimeout)));
        }
        let silence = self
            .flight
            .as_mut()
            .and_then(|flight| flight.silence.as_mut());
        if polled.is_pending()
            && let Some(silence) = silence
        {
            return silence
                .poll(context)
                .map(|silent| Some(Err(BodyError::Silent(silent))));
        }
        polled.map_err(BodyError::from)
    }

    /// What the client gets for an engine's frame of a stream that may be resumed; `None`: nothing
    /// yet.
    fn client_frame(&mut self, polled: PolledFrame) -> Option<PolledFrame> {
        let Some(answer) = self.resumable() else {
            return Some(polled);
        };
        match polled {
            Some(Ok(frame)) => match frame.data_ref().map(|data| answer.read(data)) {
                None => Some(Some(Ok(frame))),
                Some(StreamBytes::Ready(bytes)) => Some(Some(Ok(Frame::data(bytes.into())))),
                Some(StreamBytes::Pending) => None,
                Some(StreamBytes::TooLarge) => Some(Some(Err(BodyError::LargeEvent))),
            },
            Some(Err(error)) => self.loses(Some(error)),
            None if answer.has_ended() => {
                let last = answer.finish();
                self.give_up_resuming();
                (!last.is_empty()).then(|| Some(Ok(Frame::data(last.into()))))
            }
            None => self.loses(None),
        }
    }

    /// The worker is lost. Asks another one to go on, or ends the body.
    fn loses(&mut self, loss: StreamLoss) -> Option<PolledFrame> {
        if let Some(mut flight) = self.flight.take() {
            let answer = flight.readers.resumable.as_deref_mut();
            if let Some(body) = answer.and_then(|answer| answer.rest(&flight.call)) {
                self.resuming = Some(Box::pin(resume(flight, body, loss)));
                return None;
            }
            self.flight = Some(flight);
        }
        self.give_up_resuming();
        Some(loss.map(Err))
    }

    /// The stream goes on as one that cannot be resumed.
    fn give_up_resuming(&mut self) {
        if let Some(flight) = &mut self.flight {
            flight.readers.resumable = None;
        }
    }

    /// Takes what became of the attempt to go on elsewhere.
    fn poll_resuming(&mut self, context: &mut Context<'_>) -> Poll<Option<PolledFrame>> {
        let Some(resuming) = &mut self.resuming else {
            return Poll::Ready(None);
        };
        let (flight, resumed) = ready!(resuming.as_mut().poll(context));
        self.resuming = None;
        self.flight = Some(flight);
        Poll::Ready(match resumed {
            Ok(ResumedBody { early, body }) => {
                (self.early, self.inner) = (early, body);
                None
            }
            Err(loss) => {
                self.give_up_resuming();
                Some(loss.map(Err))
            }
        })
    }

    fn poll_client(&mut self, context: &mut Context<'_>) -> Poll<PolledFrame> {
        loop {
            if let Some(end) = ready!(self.poll_resuming(context)) {
                return Poll::Ready(end);
            }
            let polled = ready!(self.poll_engine(context));
            if let Some(polled) = self.client_frame(polled) {
                return Poll::Ready(polled);
            }
        }
    }

    fn data(&mut self, data: &Bytes) {
        let Some(flight) = &mut self.flight else {
            return;
        };
        if flight.progress.phase != CancelPhase::Stream {
            flight.progress.phase = CancelPhase::Stream;
            flight.call.first_byte();
            flight.progress.is_error =
                matches!(flight.watch, BodyWatch::Json(_)) && openai::is_error(data);
            if let Some(on_beginning) = flight.readers.on_beginning.take() {
                on_beginning(data);
            }
        }
        if let Some(silence) = &mut flight.silence {
            silence.heard();
        }
        let unread_bytes = &mut flight.progress.unread_bytes;
        match &mut flight.watch {
            BodyWatch::Events(watch) => {
                if watch.push(data) | mem::take(&mut flight.progress.resumes) {
                    flight.prefill_ended();
                }
                flight.grow();
            }
            // The usual case: read without a copy.
            BodyWatch::Json(kept)
                if kept.bytes.is_empty()
                    && data.len() <= JSON_BYTES_MAX
                    && self.inner.is_end_stream() =>
            {
                flight.progress.usage = TokenUsage::from_json(data);
            }
            BodyWatch::Json(kept) => {
                if !kept.keep(data) {
                    *unread_bytes = (kept.bytes.len() + data.len()) as u64;
                    flight.watch = BodyWatch::Nothing;
                }
            }
            BodyWatch::Nothing if *unread_bytes > 0 => *unread_bytes += data.len() as u64,
            BodyWatch::Nothing => {}
        }
    }

    /// The body is complete.
    fn end(&mut self) {
        if let Some(mut flight) = self.flight.take() {
            flight.end();
        }
    }

    /// The engine closed the connection early, or sends nothing. Returns what the client gets: an
    /// event where its stream can end with one, else its connection ends early too.
    fn broken(&mut self, error: BodyError) -> Option<Result<Frame<Bytes>, BodyError>> {
        tracing::debug!(%error, "an answer broke off");
        let event = self.flight.take().and_then(|mut flight| {
            flight.settle(None);
            flight.call.broken();
            let failure = match error {
                BodyError::Silent(_) => EngineFailure::Silent,
                BodyError::Http(_) | BodyError::ErrorTimeout | BodyError::LargeEvent => {
                    EngineFailure::Broken
                }
            };
            flight.lose_worker(failure);
            flight.progress.is_over = true;
            (failure == EngineFailure::Silent).then(|| flight.call.error_event())
        });
        Some(match event {
            Some(event) => {
                self.is_cut = true;
                Ok(Frame::data(event.into()))
            }
            None => Err(error),
        })
    }
}

impl Flight {
    fn prefill_ended(&mut self) {
        if let (true, Some(slot)) = (self.status.is_success(), &mut self.slot) {
            slot.first_token();
        }
    }

    /// Counts each chunk as a token: an engine puts several tokens into one chunk only under load.
    fn grow(&mut self) {
        let BodyWatch::Events(watch) = &self.watch else {
            return;
        };
        self.call.report.streamed(watch.output_chunks());
        self.call.generated(watch.output_chunks());
        let blocks = watch.output_chunks() / self.block_tokens.max(1);
        let more = blocks.saturating_sub(self.progress.grown_blocks);
        if let (1.., Some(slot)) = (more, &mut self.slot) {
            slot.grow(u32::try_from(more).unwrap_or(u32::MAX));
            self.progress.grown_blocks = blocks;
        }
    }

    /// The engine failed in mid-answer.
    pub(super) fn lose_worker(&mut self, failure: EngineFailure) {
        if let Some(mut tracked) = self.tracked.take() {
            self.metrics.engine_failed(failure);
            tracked.cut();
        }
        if let Some(mut slot) = self.slot.take() {
            slot.fail();
        }
    }

    /// Another worker goes on with the stream, whose prompt has the tokens so far.
    pub(super) fn resumed(
        &mut self,
        placement: Placement,
        catalog: impl FnOnce() -> Arc<ModelCatalog>,
    ) {
        self.slot = Some(placement.slot);
        self.tracked = Some(placement.tracked);
        let pause_max = self.silence.take().and_then(|silence| silence.pause_max());
        let source = placement.decision.source.clone();
        self.silence = Some(SilenceWatch::new(placement.losses, source, pause_max));
        self.block_tokens = placement.decision.claim.block_tokens().into();
        if let BodyWatch::Events(watch) = &self.watch {
            self.progress.grown_blocks = watch.output_chunks() / self.block_tokens.max(1);
        }
        self.progress.resumes = true;
        // It reports the cached tokens of another prompt.
        self.readers.on_usage = None;
        self.call.report.placed(placement.decision, catalog);
    }

    fn end(&mut self) {
        let usage = match &mut self.watch {
            BodyWatch::Events(watch) => {
                watch.finish();
                watch.usage()
            }
            BodyWatch::Json(kept) => {
                let usage = self.progress.usage;
                usage.or_else(|| TokenUsage::from_json(&kept.bytes))
            }
            BodyWatch::Nothing => None,
        };
        let end = self.answer_end();
        if let Some(mut slot) = self.slot.take() {
            if end == AnswerEnd::Served && self.status.is_success() {
                slot.complete();
            } else {
                slot.fail();
            }
        }
        if let Some(failure) = end.failure().filter(|_| !self.progress.is_counted) {
            self.metrics.engine_failed(failure);
            let has_output =
                matches!(&self.watch, BodyWatch::Events(watch) if watch.output_chunks() > 0);
            if let Some(tracked) = &mut self.tracked {
                if has_output {
                    tracked.cut();
                } else {
                    tracked.fail();
                }
            }
        } else if let Some(tracked) = &mut self.tracked {
            tracked.completed();
        }
        self.audit(usage.filter(|_| end.failure() != Some(EngineFailure::ErrorAnswer)));
        self.settle(usage);
        self.call.answered(end.request_end(self.status));
        self.progress.is_over = true;
    }

    fn answer_end(&self) -> AnswerEnd {
        let is_error = match &self.watch {
            BodyWatch::Events(watch) => watch.failed(),
            BodyWatch::Json(_) | BodyWatch::Nothing => self.progress.is_error,
        };
        AnswerEnd::of(self.status, is_error, self.rule)
    }

    /// Clients may close at `[DONE]` or an error, before the end of the transfer.
    fn has_last_event(&self) -> bool {
        match &self.watch {
            BodyWatch::Events(watch) => watch.done() || watch.failed(),
            BodyWatch::Json(_) | BodyWatch::Nothing => false,
        }
    }

    /// Ends the tenant's accounts of tokens.
    fn settle(&self, usage: Option<TokenUsage>) {
        let counted = match &self.watch {
            BodyWatch::Events(watch) => watch.output_chunks(),
            BodyWatch::Json(_) => 0,
            BodyWatch::Nothing => self.progress.unread_bytes / ANSWER_BYTES_PER_TOKEN,
        };
        let settlement = match usage {
            _ if !self.status.is_success() => Settlement::Void,
            _ if counted == 0 && self.answer_end().failure().is_some() => Settlement::Void,
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
        if self.is_cut {
            return Poll::Ready(None);
        }
        let polled = ready!(self.poll_client(context));
        match &polled {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.data(data);
                }
                // A body of known length is not polled again for its end.
                if !self.is_resumable() && self.inner.is_end_stream() {
                    self.end();
                }
            }
            Some(Err(_)) => {}
            None => self.end(),
        }
        Poll::Ready(match polled {
            Some(Err(error)) => self.broken(error),
            polled => polled,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.is_cut || self.early.is_none() && !self.is_resumable() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::new();
        if self.is_resumable() {
            return hint;
        }
        let early = self.early.as_ref().map_or(0, |early| early.len() as u64);
        let inner = self.inner.size_hint();
        hint.set_lower(inner.lower() + early);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + early);
        }
        hint
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.progress.is_over {
            return;
        }
        if self.has_last_event() {
            self.end();
        } else {
            self.settle(None);
            self.metrics.cancelled(self.progress.phase);
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;
    use hyper_util::rt::TokioIo;
    use prometheus::IntGauge;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::call_report::CallSinks;
    use crate::config::Limits;
    use crate::metrics::RouteLabel;

    /// The body of an answer, which ends with the connection.
    async fn incoming(body: &[u8]) -> EngineBody {
        let (near, mut far) = tokio::io::duplex(1024);
        let connected = hyper::client::conn::http1::handshake(TokioIo::new(near)).await;
        let (mut sender, connection) = connected.unwrap();
        drop(TaskTracker::new().spawn(connection));
        let request = axum::http::Request::new(Full::<Bytes>::default());
        let answered = TaskTracker::new().spawn(sender.send_request(request));
        far.read_u8().await.unwrap();
        far.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        far.write_all(body).await.unwrap();
        answered.await.unwrap().unwrap().into_body().into()
    }

    /// Even if the rest is there already.
    #[tokio::test]
    async fn bytes_from_before_the_head_come_first() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let sinks = CallSinks::silent(&metrics);
        let (head, ()) = axum::http::Request::new(()).into_parts();
        let flight = Flight {
            call: Call::new(RouteLabel::Chat, &head, &sinks),
            slot: None,
            tracked: None,
            status: StatusCode::OK,
            rule: AnswerRule::Generated,
            silence: None,
            watch: BodyWatch::Events(StreamObserver::default()),
            block_tokens: 16,
            readers: AnswerReaders::default(),
            metrics,
            progress: FlightProgress::default(),
        };
        let early = Bytes::from_static(b"data: 1\n\n");
        let rest = incoming(b"data: 2\n\ndata: 3\n\n").await;
        let whole = axum::body::Body::new(TrackedBody::new(Some(early), rest, flight));
        let whole = axum::body::to_bytes(whole, usize::MAX).await.unwrap();
        assert_eq!(whole, "data: 1\n\ndata: 2\n\ndata: 3\n\n");
    }

    #[test]
    fn pieces_of_a_json_answer_are_kept_while_the_budget_has_room() {
        let budget = |bytes| {
            let limits = Limits {
                body_bytes: bytes,
                buffered_bytes: bytes,
                connections: 1,
            };
            let held = IntGauge::new("held", "bytes").unwrap();
            BodyBudget::new(&limits, held, TaskTracker::new(), CancellationToken::new())
        };
        let ample = budget(4 * JSON_BYTES_MAX);
        let mut kept = KeptAnswer::new(ample.clone());
        assert!(kept.keep(b"{\"usage\":") && kept.keep(b"{}}"));
        assert_eq!(kept.bytes, b"{\"usage\":{}}");
        assert_eq!(
            ample.free_bytes(),
            4 * JSON_BYTES_MAX - 2 * kept.bytes.len()
        );
        assert!(!kept.keep(&[b' '; JSON_BYTES_MAX]), "too large");
        drop(kept);
        assert_eq!(ample.free_bytes(), 4 * JSON_BYTES_MAX);
        assert!(!KeptAnswer::new(budget(3)).keep(b"{}"));
    }
}
