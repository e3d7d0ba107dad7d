//! What clients are told when a request cannot be served: OpenAI's JSON error form.
//!
//! The one place where the router's failures become status codes. What the engine itself answers is
//! passed through and never comes here.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::openai::{self, ErrorType};
use crate::route::{AdmitError, RouteRefusal};

/// A request that the router answers itself, because it cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ApiError {
    /// The request itself is at fault.
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
    #[error("Every worker tried failed to answer: {0}")]
    Upstream(String),
    #[error("The router failed: {0}")]
    Internal(&'static str),
}

/// Whole seconds after which a shed request may come back. Short: load shifts within seconds, and a
/// worker is found again by the next health check.
const RETRY_AFTER_SECS: u64 = 1;

impl ApiError {
    #[must_use]
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Request(error) => {
                StatusCode::from_u16(error.status()).unwrap_or(StatusCode::BAD_REQUEST)
            }
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::UnknownModel(_) | Self::UnknownPath(_) => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::NoWorker | Self::BuffersFull => StatusCode::SERVICE_UNAVAILABLE,
            Self::AllFull => StatusCode::TOO_MANY_REQUESTS,
            Self::Upstream(_) => StatusCode::BAD_GATEWAY,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The error in OpenAI's words.
    fn form(&self) -> openai::OpenAiError {
        let (kind, code) = match self {
            Self::Request(error) => return error.clone(),
            Self::UnknownModel(model) => return openai::OpenAiError::model_not_found(model),
            Self::Malformed(_) | Self::BodyTimeout => (ErrorType::InvalidRequest, "malformed"),
            Self::Method => (ErrorType::InvalidRequest, "method_not_allowed"),
            Self::TooLarge { .. } => (ErrorType::TooLarge, "request_too_large"),
            Self::UnknownPath(_) => (ErrorType::NotFound, "unknown_url"),
            Self::NoWorker => (ErrorType::Unavailable, "no_worker"),
            Self::AllFull => (ErrorType::RateLimited, "workers_full"),
            Self::BuffersFull => (ErrorType::Unavailable, "router_full"),
            Self::Upstream(_) => (ErrorType::Internal, "upstream_failed"),
            Self::Internal(_) => (ErrorType::Internal, "router_failed"),
        };
        openai::OpenAiError::new(kind, self.to_string()).with_code(code)
    }

    const fn is_worth_another_try(&self) -> bool {
        matches!(self, Self::NoWorker | Self::AllFull | Self::BuffersFull)
    }

    /// A request body that was not read to its end cannot be followed by another request.
    const fn leaves_body_unread(&self) -> bool {
        matches!(
            self,
            Self::TooLarge { .. } | Self::BodyTimeout | Self::BuffersFull
        )
    }
}

impl From<AdmitError> for ApiError {
    fn from(error: AdmitError) -> Self {
        match error {
            AdmitError::Refused(refusal) => Self::from(refusal),
            AdmitError::Ledger(_) => Self::Internal("the request cannot be accounted"),
        }
    }
}

impl From<RouteRefusal> for ApiError {
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

impl From<openai::OpenAiError> for ApiError {
    fn from(error: openai::OpenAiError) -> Self {
        Self::Request(error)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = [(header::CONTENT_TYPE, "application/json")];
        let mut response = (self.status(), json, self.form().to_json()).into_response();
        let headers = response.headers_mut();
        if self.is_worth_another_try() {
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
    fn what_passes_by_itself_says_when_to_come_back() {
        for (error, status, retry) in [
            (ApiError::NoWorker, 503, true),
            (ApiError::AllFull, 429, true),
            (ApiError::BuffersFull, 503, true),
            (ApiError::TooLarge { max: 1 }, 413, false),
            (ApiError::UnknownModel("m".into()), 404, false),
            (ApiError::Malformed("x".into()), 400, false),
            (ApiError::Upstream("x".into()), 502, false),
        ] {
            let response = error.into_response();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers().contains_key("retry-after"), retry);
        }
    }
}
