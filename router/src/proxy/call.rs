//! One client request from its head to its response's last byte, counted exactly once.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use tokio::time::Instant;

use super::headers;
use crate::error::ApiError;
use crate::metrics::{Metrics, RequestEnd, RouteLabel};

/// Counted when dropped: as the client's going unless something else was said.
pub(super) struct Call {
    route: RouteLabel,
    started: Instant,
    request_id: HeaderValue,
    traces: headers::Traces,
    metrics: Arc<Metrics>,
    outcome: RequestEnd,
}

impl Call {
    pub(super) fn new(route: RouteLabel, headers: &HeaderMap, metrics: Arc<Metrics>) -> Self {
        Self {
            route,
            started: Instant::now(),
            request_id: headers::request_id(headers),
            traces: headers::traces(headers),
            metrics,
            outcome: RequestEnd::ClientGone,
        }
    }

    pub(super) const fn request_id(&self) -> &HeaderValue {
        &self.request_id
    }

    pub(super) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn first_byte(&self) {
        self.metrics.first_byte(self.route, self.age());
    }

    /// The whole answer went to the client.
    pub(super) fn answered(&mut self, status: StatusCode) {
        self.outcome = if status.is_server_error() {
            RequestEnd::Engine5xx
        } else if status.is_client_error() {
            RequestEnd::Engine4xx
        } else {
            RequestEnd::Ok
        };
    }

    /// The engine broke off.
    pub(super) const fn broke_off(&mut self) {
        self.outcome = RequestEnd::Failed;
    }

    /// The router answers itself.
    pub(super) fn refuse(mut self, error: &ApiError) -> Response {
        self.outcome = match error.status() {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => RequestEnd::Shed,
            status if status.is_server_error() => RequestEnd::Failed,
            _ => RequestEnd::Refused,
        };
        tracing::debug!(request_id = ?self.request_id, %error, "request refused");
        let mut response = error.clone().into_response();
        self.sign(response.headers_mut());
        response
    }

    /// The router answered itself, as it should.
    pub(super) fn done(mut self, mut response: Response) -> Response {
        self.outcome = RequestEnd::Ok;
        self.sign(response.headers_mut());
        response
    }

    pub(super) fn sign(&self, headers: &mut HeaderMap) {
        headers.insert(headers::REQUEST_ID, self.request_id.clone());
        for (name, value) in headers::TRACES.into_iter().zip(&self.traces) {
            if let Some(value) = value {
                headers.insert(name, value.clone());
            }
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.metrics
            .request_ended(self.route, self.outcome, self.started.elapsed());
    }
}
