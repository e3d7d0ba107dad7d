//! The router's own error answers, in OpenAI's JSON error form or in Anthropic's.
//!
//! The only place where the router's failures become status codes. An engine's answers are passed
//! on and do not come here.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use crate::admission::{ShedReason, ShedRequest};
use crate::openai::{self, ErrorType};
use crate::route::{AdmitError, RouteRefusal};
use crate::tenants::TenantRefusal;

/// What a client may send, as the header `Accept-Encoding` of a refusal names it.
const ACCEPTED_ENCODINGS: &str = "gzip, zstd";

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
    #[error(
        "The request body has an unsupported Content-Encoding. Send it plain, or as gzip or zstd."
    )]
    BodyEncoded,
    #[error("The model `{0}` does not exist.")]
    UnknownModel(String),
    /// The request names no model, but a stored answer, whose worker is not known.
    #[error("Several models are served: name one in `model`.")]
    ModelOfAnswer(String),
    #[error("There is no route {0}.")]
    UnknownPath(String),
    #[error("The method is not allowed here.")]
    Method,
    #[error("No worker that serves the model is available.")]
    NoWorker,
    #[error("All workers of the model have the role prefill: it needs one that answers.")]
    OnlyPrefill,
    #[error("All workers that serve the model are full.")]
    AllFull,
    #[error("{}", shed_text(.0.reason))]
    Shed(ShedRequest),
    #[error("The router holds too many request bodies at the moment.")]
    BuffersFull,
    #[error("The router has as many requests in flight as its limit of open files allows.")]
    FilesFull,
    #[error("Some workers could not be asked for the stored answer.")]
    OwnerUnknown,
    #[error("Every worker tried closed the connection or sent nothing before it answered.")]
    Upstream,
    /// Its event is the end of a stream.
    #[error("The worker stopped sending the answer.")]
    StreamSilent,
    #[error("The router failed: {0}")]
    Internal(&'static str),
    #[error(transparent)]
    Tenant(#[from] TenantRefusal),
}

/// The form of an error's JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    #[default]
    OpenAi,
    /// OpenAI's, with the events of `/v1/responses`.
    Responses,
    /// That of `/v1/messages`.
    Anthropic,
}

impl ErrorForm {
    pub(crate) fn of_path(path: &str) -> Self {
        let is_below = |route| {
            let rest = path.strip_prefix(route);
            rest.is_some_and(|rest: &str| rest.is_empty() || rest.starts_with('/'))
        };
        if is_below("/v1/messages") {
            Self::Anthropic
        } else if is_below("/v1/responses") {
            Self::Responses
        } else {
            Self::OpenAi
        }
    }
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
            Self::ModelOfAnswer(_) => {
                return (
                    StatusCode::BAD_REQUEST,
                    openai::OpenAiError::missing_model(),
                );
            }
            Self::Tenant(refusal) => return tenant_form(refusal),
            Self::Malformed(_) => (400, ErrorType::InvalidRequest, "malformed"),
            Self::BodyTimeout => (408, ErrorType::InvalidRequest, "malformed"),
            Self::BodyEncoded => (415, ErrorType::InvalidRequest, "unsupported_encoding"),
            Self::Method => (405, ErrorType::InvalidRequest, "method_not_allowed"),
            Self::TooLarge { .. } => (413, ErrorType::TooLarge, "request_too_large"),
            Self::UnknownPath(_) => (404, ErrorType::NotFound, "unknown_url"),
            Self::NoWorker => (503, ErrorType::Unavailable, "no_worker"),
            Self::OnlyPrefill => (503, ErrorType::Unavailable, "only_prefill_workers"),
            Self::AllFull => (429, ErrorType::RateLimited, "workers_full"),
            Self::Shed(shed) => match shed.reason {
                ShedReason::NotQueued => (429, ErrorType::RateLimited, "workers_full"),
                ShedReason::QueueFull | ShedReason::Displaced => {
                    (429, ErrorType::RateLimited, "queue_full")
                }
                ShedReason::Timeout => (503, ErrorType::Unavailable, "queue_timeout"),
                ShedReason::RouterEnds => (503, ErrorType::Unavailable, "router_ends"),
            },
            Self::BuffersFull | Self::FilesFull => (503, ErrorType::Unavailable, "router_full"),
            Self::OwnerUnknown => (503, ErrorType::Unavailable, "owner_unknown"),
            Self::Upstream => (502, ErrorType::Internal, "upstream_failed"),
            Self::StreamSilent => (504, ErrorType::Internal, "upstream_silent"),
            Self::Internal(_) => (500, ErrorType::Internal, "router_failed"),
        };
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let error = openai::OpenAiError::new(kind, self.to_string()).with_code(code);
        (status, error)
    }

    /// Seconds after which the request may be repeated; `None`: it would fail again.
    fn retry_after_secs(&self) -> Option<u64> {
        match self {
            Self::NoWorker
            | Self::OnlyPrefill
            | Self::AllFull
            | Self::BuffersFull
            | Self::FilesFull
            | Self::OwnerUnknown => Some(RETRY_AFTER_SECS),
            Self::Shed(shed) => Some(shed.retry_after_secs()),
            Self::Tenant(TenantRefusal::Limit(reached)) => Some(reached.retry_after_secs()),
            Self::Request(_)
            | Self::Malformed(_)
            | Self::TooLarge { .. }
            | Self::BodyTimeout
            | Self::BodyEncoded
            | Self::UnknownModel(_)
            | Self::ModelOfAnswer(_)
            | Self::UnknownPath(_)
            | Self::Method
            | Self::Upstream
            | Self::StreamSilent
            | Self::Internal(_)
            | Self::Tenant(_) => None,
        }
    }

    /// The answer to a client that expects a form.
    pub(crate) fn response(&self, form: ErrorForm) -> Response {
        let json = [(header::CONTENT_TYPE, "application/json")];
        let (status, error) = self.form();
        let body = match form {
            ErrorForm::OpenAi | ErrorForm::Responses => error.to_json(),
            ErrorForm::Anthropic => anthropic_json(status, &error.message),
        };
        let mut response = (status, json, body).into_response();
        let headers = response.headers_mut();
        if let Some(secs) = self.retry_after_secs() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(secs));
        }
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        if *self == Self::BodyEncoded {
            let accepted = HeaderValue::from_static(ACCEPTED_ENCODINGS);
            headers.insert(header::ACCEPT_ENCODING, accepted);
        }
        if self.leaves_body_unread() {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// A last event of a stream. It begins with the end of an event that is not complete.
    pub(crate) fn event(&self, form: ErrorForm) -> String {
        let (status, error) = self.form();
        let (name, json) = match form {
            ErrorForm::OpenAi => ("", error.to_json()),
            ErrorForm::Anthropic => ("event: error\n", anthropic_json(status, &error.message)),
            ErrorForm::Responses => {
                let json = json!({
                    "type": "error",
                    "code": error.code,
                    "message": error.message,
                    "param": error.param,
                });
                ("event: error\n", json.to_string().into_bytes())
            }
        };
        let json = String::from_utf8_lossy(&json);
        format!("\n\n{name}data: {json}\n\n")
    }

    /// The rest of the body is on the connection, so that no other request can follow.
    const fn leaves_body_unread(&self) -> bool {
        matches!(
            self,
            Self::TooLarge { .. } | Self::BodyTimeout | Self::BodyEncoded | Self::BuffersFull
        )
    }
}

const fn shed_text(reason: ShedReason) -> &'static str {
    match reason {
        ShedReason::NotQueued => "All workers that serve the model are full.",
        ShedReason::QueueFull | ShedReason::Displaced => {
            "All workers that serve the model are full, and so is the queue."
        }
        ShedReason::Timeout => "No worker that serves the model became free in time.",
        ShedReason::RouterEnds => "The router ends before a worker became free.",
    }
}

impl From<ShedRequest> for ProxyError {
    fn from(shed: ShedRequest) -> Self {
        Self::Shed(shed)
    }
}

fn tenant_form(refusal: &TenantRefusal) -> (StatusCode, openai::OpenAiError) {
    let (status, kind, code) = match refusal {
        TenantRefusal::NoKey | TenantRefusal::UnknownKey | TenantRefusal::Expired => (
            StatusCode::UNAUTHORIZED,
            ErrorType::InvalidRequest,
            "invalid_api_key",
        ),
        TenantRefusal::Model => (
            StatusCode::FORBIDDEN,
            ErrorType::InvalidRequest,
            "model_not_allowed",
        ),
        TenantRefusal::ForeignAnswer => (StatusCode::NOT_FOUND, ErrorType::NotFound, "not_found"),
        TenantRefusal::PromptTokens { .. } => (
            StatusCode::BAD_REQUEST,
            ErrorType::InvalidRequest,
            "context_length_exceeded",
        ),
        TenantRefusal::Limit(_) => (
            StatusCode::TOO_MANY_REQUESTS,
            ErrorType::RateLimited,
            "rate_limit_exceeded",
        ),
    };
    let error = openai::OpenAiError::new(kind, refusal.to_string()).with_code(code);
    (status, error)
}

/// `{"type":"error","error":{"type","message"}}`.
fn anthropic_json(status: StatusCode, message: &str) -> Vec<u8> {
    let kind = match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        status if status >= 500 => "api_error",
        _ => "invalid_request_error",
    };
    let error = json!({ "type": kind, "message": message });
    json!({ "type": "error", "error": error })
        .to_string()
        .into_bytes()
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
            | RouteRefusal::NoPrefill
            | RouteRefusal::AllTried => Self::NoWorker,
            RouteRefusal::OnlyPrefill => Self::OnlyPrefill,
            RouteRefusal::Full { .. } => Self::AllFull,
        }
    }
}

impl From<openai::OpenAiError> for ProxyError {
    fn from(error: openai::OpenAiError) -> Self {
        Self::Request(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::CodeLabel;

    #[test]
    fn each_status_of_an_error_has_its_own_metric_label() {
        let kinds = [
            ErrorType::InvalidRequest,
            ErrorType::NotFound,
            ErrorType::TooLarge,
            ErrorType::RateLimited,
            ErrorType::Unavailable,
            ErrorType::Internal,
        ];
        let errors = [
            ProxyError::BodyTimeout,
            ProxyError::BodyEncoded,
            ProxyError::Method,
            ProxyError::TooLarge { max: 1 },
            ProxyError::Upstream,
            ProxyError::NoWorker,
            ProxyError::AllFull,
            ProxyError::Internal("x"),
            TenantRefusal::NoKey.into(),
            TenantRefusal::Model.into(),
            TenantRefusal::ForeignAnswer.into(),
        ];
        let statuses = errors.iter().map(|error| error.status().as_u16());
        for status in statuses.chain(kinds.map(ErrorType::status)).chain([200]) {
            assert_eq!(CodeLabel::of(status).label(), status.to_string());
        }
    }

    #[test]
    fn a_stream_ends_with_an_error_of_its_routes_form() {
        for (path, begins) in [
            ("/v1/chat/completions", r#"data: {"error":{"#),
            ("/v1/responses", "event: error\ndata: {\"type\":\"error\","),
            ("/v1/messages", "event: error\ndata: {\"type\":\"error\","),
        ] {
            let event = ProxyError::StreamSilent.event(ErrorForm::of_path(path));
            let mut observer = openai::StreamObserver::default();
            observer.push(event.as_bytes());
            assert!(observer.failed(), "{event}");
            assert!(event.trim_start().starts_with(begins), "{event}");
        }
    }

    #[test]
    fn temporary_errors_have_a_retry_after() {
        let shed = |reason| {
            ProxyError::Shed(ShedRequest {
                reason,
                retry_after: std::time::Duration::ZERO,
            })
        };
        for (error, status, retry) in [
            (ProxyError::NoWorker, 503, true),
            (ProxyError::OnlyPrefill, 503, true),
            (ProxyError::AllFull, 429, true),
            (ProxyError::BuffersFull, 503, true),
            (shed(ShedReason::QueueFull), 429, true),
            (shed(ShedReason::Timeout), 503, true),
            (shed(ShedReason::RouterEnds), 503, true),
            (ProxyError::TooLarge { max: 1 }, 413, false),
            (ProxyError::UnknownModel("m".into()), 404, false),
            (ProxyError::Malformed("x".into()), 400, false),
            (ProxyError::Upstream, 502, false),
        ] {
            for form in [ErrorForm::OpenAi, ErrorForm::Anthropic] {
                let response = error.response(form);
                assert_eq!(response.status().as_u16(), status);
                assert_eq!(response.headers().contains_key("retry-after"), retry);
            }
        }
    }
}
