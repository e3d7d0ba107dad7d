//! What generating routes do wrong on purpose, set by `/debug/fault`.

use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{self, Stream, StreamExt as _};
use serde::Deserialize;
use serde_json::{Value, json};

/// Value of `Retry-After` of an answer with status 429 or 503.
const RETRY_AFTER_SECS: u64 = 2;

/// A fault of all requests, or of those whose body contains a marker.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnswerFault {
    pub(crate) kind: FaultKind,
    pub(crate) marker: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FaultKind {
    #[default]
    None,
    /// Fails with this status before anything is computed.
    Status(u16),
    /// A stream fails with an error event after so many events; other requests fail with status
    /// 500.
    ErrorEvent(usize),
    /// A stream sends nothing for so many milliseconds after its first event, although the engine
    /// generates: as a parser does that holds tokens back.
    SilenceMs(u64),
}

impl AnswerFault {
    /// The fault of one request.
    pub(crate) fn of(&self, body: &Value) -> FaultKind {
        match &self.marker {
            Some(marker) if !body.to_string().contains(marker) => FaultKind::None,
            Some(_) | None => self.kind,
        }
    }
}

impl FaultKind {
    /// The answer to a request that fails without being computed.
    pub(crate) fn refusal(self, is_stream: bool) -> Option<Response> {
        let status = match self {
            Self::Status(status) => StatusCode::from_u16(status).ok()?,
            Self::ErrorEvent(_) if !is_stream => StatusCode::INTERNAL_SERVER_ERROR,
            Self::ErrorEvent(_) | Self::SilenceMs(_) | Self::None => return None,
        };
        let mut answer = (status, Json(error(status))).into_response();
        if matches!(status.as_u16(), 429 | 503) {
            answer
                .headers_mut()
                .insert(RETRY_AFTER, RETRY_AFTER_SECS.into());
        }
        Some(answer)
    }

    /// The events of a stream with its fault.
    pub(crate) fn disturb<E>(
        self,
        events: impl Stream<Item = Result<Bytes, E>> + Send,
    ) -> impl Stream<Item = Result<Bytes, E>> + Send {
        let state = Some((Box::pin(events), 0));
        stream::unfold(state, move |state| async move {
            let (mut events, sent) = state?;
            match self {
                Self::ErrorEvent(after) if sent == after => {
                    let error = error(StatusCode::INTERNAL_SERVER_ERROR);
                    let last = format!("data: {error}\n\ndata: [DONE]\n\n");
                    return Some((Ok(last.into()), None));
                }
                Self::SilenceMs(silence) if sent == 1 => {
                    tokio::time::sleep(Duration::from_millis(silence)).await;
                }
                Self::None | Self::Status(_) | Self::ErrorEvent(_) | Self::SilenceMs(_) => {}
            }
            let event = events.next().await?;
            Some((event, Some((events, sent + 1))))
        })
    }
}

/// vLLM's form.
fn error(status: StatusCode) -> Value {
    json!({"error": {
        "message": "a fault on demand", "type": "InternalServerError", "param": null,
        "code": status.as_u16(),
    }})
}
