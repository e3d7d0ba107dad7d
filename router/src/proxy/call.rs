//! One client request from its head to the last byte of its response, counted exactly once.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use tokio::time::Instant;

use super::headers;
use crate::error::ProxyError;
use crate::metrics::{Metrics, RequestEnd, RouteLabel};

/// Counted when it is dropped, as [`RequestEnd::ClientGone`] unless another end was set.
pub(super) struct Call {
    route: RouteLabel,
    started: Instant,
    request_id: HeaderValue,
    traces: headers::Traces,
    metrics: Arc<Metrics>,
    end: RequestEnd,
}

impl Call {
    pub(super) fn new(route: RouteLabel, headers: &HeaderMap, metrics: &Arc<Metrics>) -> Self {
        Self {
            route,
            started: Instant::now(),
            request_id: headers::request_id(headers),
            traces: headers::traces(headers),
            metrics: Arc::clone(metrics),
            end: RequestEnd::ClientGone,
        }
    }

    pub(super) const fn request_id(&self) -> &HeaderValue {
        &self.request_id
    }

    /// When the request's head was complete.
    pub(super) const fn started(&self) -> Instant {
        self.started
    }

    fn age(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn first_byte(&self) {
        self.metrics.first_byte(self.route, self.age());
    }

    /// The client has the engine's whole answer.
    pub(super) fn answered(&mut self, status: StatusCode) {
        self.end = if status.is_server_error() {
            RequestEnd::Engine5xx
        } else if status.is_client_error() {
            RequestEnd::Engine4xx
        } else {
            RequestEnd::Ok
        };
    }

    /// The engine closed the connection before the end of its answer.
    pub(super) const fn broken(&mut self) {
        self.end = RequestEnd::Failed;
    }

    /// The router's own error answer.
    pub(super) fn refuse(mut self, error: &ProxyError) -> Response {
        self.end = match error.status() {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => RequestEnd::Shed,
            status if status.is_server_error() => RequestEnd::Failed,
            _ => RequestEnd::Refused,
        };
        tracing::debug!(request_id = ?self.request_id, %error, "request refused");
        let mut response = error.clone().into_response();
        self.sign(response.headers_mut());
        response
    }

    /// The router's own answer.
    pub(super) fn done(mut self, mut response: Response) -> Response {
        self.end = RequestEnd::Ok;
        self.sign(response.headers_mut());
        response
    }

    /// Adds the ids by which clients follow the request.
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
        self.metrics.request_ended(self.route, self.end, self.age());
    }
}
