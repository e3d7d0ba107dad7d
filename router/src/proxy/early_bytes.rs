//! The beginning of an answer that is held back: whether it is an answer or an error.

use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;

use super::attempt::EngineHead;
use super::engine_client::EngineResponse;
use crate::openai::{self, StreamObserver};

/// Bytes of the beginning that are held back: the events before the first token may repeat the
/// request.
const EARLY_BYTES_MAX: usize = 64 << 10;

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

    /// Waits for the beginning of the answer. Pending without a response. Cancel-safe: bytes that
    /// came are kept.
    pub(super) async fn begins(
        &mut self,
        response: Option<&mut EngineResponse>,
    ) -> hyper::Result<()> {
        let Some(response) = response else {
            return std::future::pending().await;
        };
        while let Some(frame) = response.body_mut().frame().await {
            let Ok(data) = frame?.into_data() else {
                continue;
            };
            self.bytes.extend_from_slice(&data);
            if self.kind == AnswerKind::Events {
                self.events.push(&data);
                if self.events.is_at_start() && self.bytes.len() < EARLY_BYTES_MAX {
                    continue;
                }
            }
            return Ok(());
        }
        self.events.finish();
        Ok(())
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
        }
    }
}
