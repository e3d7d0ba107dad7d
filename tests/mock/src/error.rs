//! Errors in the form that OpenAI's clients expect and vLLM sends.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use warmroute_sim::sim::SubmitError;

#[derive(Debug)]
pub(crate) struct Error {
    status: StatusCode,
    message: String,
    param: Option<&'static str>,
    kind: Option<&'static str>,
}

impl Error {
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: None,
            kind: None,
        }
    }

    /// In the form of `/v1/responses`.
    pub(crate) fn invalid(
        status: StatusCode,
        message: impl Into<String>,
        param: &'static str,
    ) -> Self {
        Self {
            status,
            message: message.into(),
            param: Some(param),
            kind: Some("invalid_request_error"),
        }
    }

    pub(crate) fn unknown_model(name: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            message: format!("The model `{name}` does not exist."),
            param: Some("model"),
            kind: None,
        }
    }

    /// The engine failed.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            message: message.into(),
            param: None,
            kind: None,
        }
    }

    pub(crate) fn stopped() -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: "the engine is stopping".into(),
            param: None,
            kind: None,
        }
    }
}

impl From<SubmitError> for Error {
    fn from(refusal: SubmitError) -> Self {
        Self::bad_request(refusal.to_string())
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let kind = match self.status {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "BadRequestError",
        };
        let body = json!({"error": {
            "message": self.message,
            "type": self.kind.unwrap_or(kind),
            "param": self.param,
            "code": self.status.as_u16(),
        }});
        (self.status, Json(body)).into_response()
    }
}
