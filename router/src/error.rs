//! The router's own error answers, in OpenAI's JSON error form.
//!
//! The only place where the router's failures become status codes. An engine's answers are passed
//! on and do not come here.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::openai::{self, ErrorType};
use crate::route::{AdmitError, RouteRefusal};

/// Why the router does not serve a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProxyError {
    /// The request itself is invalid.
    #[error("{0}")]
    Request(openai::OpenAiError),
    #[error("{0}")]
    Malformed(String),
    #[error("The request body exceeds the limit of {max} bytes.")]
    TooLarge { max: usize },
    #[error("The request body did not arrive in time.")]
    BodyTimeout,
    #[error("The model `{0}` does not exist.")]
    UnknownModel(String),
    #[error("There is no route {0}.")]
    UnknownPath(String),
    #[error("The method is not allowed here.")]
    Method,
    #[error("No worker that serves the model is available.")]
    NoWorker,
    #[error("All workers that serve the model are full.")]
    AllFull,
    #[error("The router holds too many request bodies at the moment.")]
    BuffersFull,
    #[error("Every worker tried closed the connection or sent nothing before it answered.")]
    Upstream,
    #[error("The router failed: {0}")]
    Internal(&'static str),
}

/// Seconds after which a shed request may be repeated. Short: load changes within seconds, and a
/// worker is usable again after the next health probe.
const RETRY_AFTER_SECS: u64 = 1;

impl ProxyError {
    pub(crate) fn status(&self) -> StatusCode {
        self.form().0
    }

    fn form(&self) -> (StatusCode, openai::OpenAiError) {
        let (status, kind, code) = match self {
            Self::Request(error) => {
                let status = StatusCode::from_u16(error.status());
                return (status.unwrap_or(StatusCode::BAD_REQUEST), error.clone());
            }
            Self::UnknownModel(model) => {
                let error = openai::OpenAiError::model_not_found(model);
                return (StatusCode::NOT_FOUND, error);
            }
            Self::Malformed(_) => (400, ErrorType::InvalidRequest, "malformed"),
            Self::BodyTimeout => (408, ErrorType::InvalidRequest, "malformed"),
            Self::Method => (405, ErrorType::InvalidRequest, "method_not_allowed"),
            Self::TooLarge { .. } => (413, ErrorType::TooLarge, "request_too_large"),
            Self::UnknownPath(_) => (404, ErrorType::NotFound, "unknown_url"),
            Self::NoWorker => (503, ErrorType::Unavailable, "no_worker"),
            Self::AllFull => (429, ErrorType::RateLimited, "workers_full"),
            Self::BuffersFull => (503, ErrorType::Unavailable, "router_full"),
            Self::Upstream => (502, ErrorType::Internal, "upstream_failed"),
            Self::Internal(_) => (500, ErrorType::Internal, "router_failed"),
        };
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let error = openai::OpenAiError::new(kind, self.to_string()).with_code(code);
        (status, error)
    }

    const fn is_retryable(&self) -> bool {
        matches!(self, Self::NoWorker | Self::AllFull | Self::BuffersFull)
    }

    /// The rest of the body is on the connection, so that no other request can follow.
    const fn leaves_body_unread(&self) -> bool {
        matches!(
            self,
            Self::TooLarge { .. } | Self::BodyTimeout | Self::BuffersFull
        )
    }
}

impl From<AdmitError> for ProxyError {
    fn from(error: AdmitError) -> Self {
        match error {
            AdmitError::Refused(refusal) => Self::from(refusal),
            AdmitError::Ledger(_) => Self::Internal("the request cannot be accounted"),
        }
    }
}

impl From<RouteRefusal> for ProxyError {
    fn from(refusal: RouteRefusal) -> Self {
        match refusal {
            RouteRefusal::UnknownModel(model) => Self::UnknownModel(model),
            RouteRefusal::NoWorkers
            | RouteRefusal::AllUnhealthy
            | RouteRefusal::AllDraining
            | RouteRefusal::AllTried => Self::NoWorker,
            RouteRefusal::Full { .. } => Self::AllFull,
        }
    }
}

impl From<openai::OpenAiError> for ProxyError {
    fn from(error: openai::OpenAiError) -> Self {
        Self::Request(error)
    }
}

impl IntoResponse for ProxyError {
    fn into_response(self) -> Response {
        let json = [(header::CONTENT_TYPE, "application/json")];
        let (status, error) = self.form();
        let mut response = (status, json, error.to_json()).into_response();
        let headers = response.headers_mut();
        if self.is_retryable() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECS));
        }
        if self.leaves_body_unread() {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_errors_have_a_retry_after() {
        for (error, status, retry) in [
            (ProxyError::NoWorker, 503, true),
            (ProxyError::AllFull, 429, true),
            (ProxyError::BuffersFull, 503, true),
            (ProxyError::TooLarge { max: 1 }, 413, false),
            (ProxyError::UnknownModel("m".into()), 404, false),
            (ProxyError::Malformed("x".into()), 400, false),
            (ProxyError::Upstream, 502, false),
        ] {
            let response = error.into_response();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers().contains_key("retry-after"), retry);
        }
    }
}
