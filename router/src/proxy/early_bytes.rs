//! The beginning of an answer that is held back: whether it is an answer or an error, and whether a
//! stream whose first token came late goes on.
//!
//! A client that has a byte cannot be served by another engine. An engine that crawls sends first
//! tokens, late, and answers that never end. So a stream is *late* whose first token took a multiple
//! of its prediction, and it is held back until a token follows another one in a tenth of that time.
//! While it is, it counts as one that waits, and leaves a source that is found stalled.

use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

use super::attempt::EngineHead;
use super::engine_client::EngineResponse;
use crate::openai::{self, StreamObserver};

/// Bytes of the beginning that are held back: the events before the first token may repeat the
/// request.
const EARLY_BYTES_MAX: usize = 64 << 10;

/// Multiple of the predicted time to the first token from which on a stream is late, and the least
/// such time. A stream that is late for another reason waits for one more token.
const LATE_FACTOR: u32 = 10;
const LATE_MIN: Duration = Duration::from_millis(250);

/// Longest time between two tokens of a stream that goes on, and its part of the time to the first.
const PACE: Duration = Duration::from_millis(250);
const PACE_PART: u32 = 10;

/// What comes within this time is of one step of the engine: a chat's role and its first token.
const ONE_STEP: Duration = Duration::from_millis(10);

/// A late stream is held back for so long at most. A stall is found in 5 to 7.5 s.
const LATE_MAX: Duration = Duration::from_secs(8);

/// What an answer consists of, as far as it can be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AnswerKind {
    Events,
    Json,
    #[default]
    Other,
}

/// Bytes that came before the head was passed on.
#[derive(Default)]
pub(super) struct EarlyBytes {
    pub kind: AnswerKind,
    bytes: BytesMut,
    events: StreamObserver,
    /// `None`: a late stream is not held back.
    pace: Option<Pace>,
}

/// When a stream's tokens came.
#[derive(Clone, Copy, Debug)]
struct Pace {
    sent: Instant,
    late_after: Duration,
    /// The time to the first token, and when the last step's output came. `None`: none has.
    last: Option<(Duration, Instant)>,
}

impl Pace {
    /// Whether the first token came late.
    fn is_late(&self) -> bool {
        self.last.is_some_and(|(first, _)| first > self.late_after)
    }

    /// Output came. Returns whether the stream may go on.
    fn is_normal(&mut self, now: Instant) -> bool {
        let Some((first, last)) = self.last else {
            self.last = Some((now - self.sent, now));
            return !self.is_late();
        };
        if now - last < ONE_STEP {
            return false;
        }
        self.last = Some((first, now));
        now - last <= PACE.max(first / PACE_PART)
    }

    /// When the stream goes on in any case.
    fn end(&self) -> Option<Instant> {
        let (first, _) = self.last?;
        Some(self.sent + first + LATE_MAX)
    }
}

impl AnswerKind {
    /// An encoded answer cannot be read.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let kind = headers.get(header::CONTENT_TYPE);
        let kind = kind.filter(|_| !headers.contains_key(header::CONTENT_ENCODING));
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if kind.starts_with("text/event-stream") {
            Self::Events
        } else if kind.starts_with("application/json") {
            Self::Json
        } else {
            Self::Other
        }
    }
}

impl EarlyBytes {
    /// Whether the beginning of such an answer is waited for. Any but 200 shows what it is.
    pub(super) fn reads(response: &EngineResponse) -> bool {
        response.status() == StatusCode::OK
            && AnswerKind::of(response.headers()) != AnswerKind::Other
    }

    /// For an answer that is asked for now. `predicted`: the time to the first token of a stream
    /// that can be sent elsewhere.
    pub(super) fn new(predicted: Option<Duration>) -> Self {
        let pace = predicted.map(|predicted| Pace {
            sent: Instant::now(),
            late_after: LATE_MIN.max(predicted.saturating_mul(LATE_FACTOR)),
            last: None,
        });
        Self {
            pace,
            ..Self::default()
        }
    }

    /// Whether output has come.
    pub(super) const fn has_begun(&self) -> bool {
        matches!(self.pace, Some(Pace { last: Some(_), .. }))
    }

    /// Waits for the beginning of the answer. Pending without a response. Cancel-safe: bytes that
    /// came are kept.
    pub(super) async fn begins(
        &mut self,
        response: Option<&mut EngineResponse>,
    ) -> hyper::Result<()> {
        let Some(response) = response else {
            return std::future::pending().await;
        };
        loop {
            let frame = response.body_mut().frame();
            let frame = match self.pace.and_then(|pace| pace.end()) {
                Some(end) => match timeout_at(end, frame).await {
                    Ok(frame) => frame,
                    Err(_) => return Ok(()),
                },
                None => frame.await,
            };
            let Some(frame) = frame else {
                self.events.finish();
                return Ok(());
            };
            let Ok(data) = frame?.into_data() else {
                continue;
            };
            self.bytes.extend_from_slice(&data);
            if self.kind != AnswerKind::Events || !self.holds(&data) {
                return Ok(());
            }
        }
    }

    /// Whether the stream is held back after these bytes.
    fn holds(&mut self, data: &[u8]) -> bool {
        let before = self.events.output_chunks();
        self.events.push(data);
        if self.bytes.len() >= EARLY_BYTES_MAX {
            return false;
        }
        let has_output = self.events.output_chunks() > before;
        match &mut self.pace {
            _ if self.events.is_at_start() => true,
            Some(pace) if has_output && !self.events.done() => !pace.is_normal(Instant::now()),
            // Between two tokens.
            Some(pace) => pace.last.is_some() && !self.events.done() && !self.events.failed(),
            None => false,
        }
    }

    /// The head with what came after it.
    pub(super) fn head(&mut self, response: EngineResponse) -> EngineHead {
        let bytes = std::mem::take(&mut self.bytes).freeze();
        let is_error = match self.kind {
            AnswerKind::Events => self.events.failed() && self.events.output_chunks() == 0,
            AnswerKind::Json => openai::is_error(&bytes),
            AnswerKind::Other => false,
        };
        EngineHead {
            response,
            early: Some(bytes).filter(|bytes: &Bytes| !bytes.is_empty()),
            is_error,
            was_late: self.pace.is_some_and(|pace| pace.is_late()),
        }
    }
}
