//! The shim's HTTP: probes, metrics, and a digest that can be compared with an indexer's.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use warmroute_process::access::RouteAccess::Open;
use warmroute_process::access::{BindScope, PortAccess, RouteTable};
use warmroute_process::build;
use warmroute_process::nats::Nats;
use warmroute_proto::query::SourceState;
use warmroute_proto::view::{DigestView, SourceDigest};

use crate::metrics;
use crate::service::Handle;
use crate::source::SourceStatus;

impl Handle {
    /// `/v1/digest`: each source as of its last acknowledged record.
    #[must_use]
    pub fn digest(&self) -> DigestView {
        DigestView {
            // A shim has no position in the log.
            position: None,
            sources: self.sources().iter().map(source_digest).collect(),
        }
    }
}

fn source_digest(status: &SourceStatus) -> SourceDigest {
    let point = status.acknowledged;
    SourceDigest {
        worker: status.source.worker.clone(),
        dp_rank: status.source.dp_rank,
        state: SourceState::from(status.states.gpu),
        reason: None,
        generation: status.generation,
        number: point.map(|point| point.number),
        engine_seq: point.and_then(|point| point.engine_seq),
        blocks: point.map(|point| point.after.count),
        digest: point.map(|point| point.after.hex()),
    }
}

/// State of the routes.
#[derive(Clone)]
struct Shown {
    handle: Handle,
    nats: Option<Nats>,
}

/// All routes of a shim. With `nats`, the metrics include those of that connection. The port has no
/// keys: a route that is not open is refused.
pub fn router(handle: Handle, nats: Option<Nats>) -> Router {
    let access = PortAccess::new(BindScope::Network, || None);
    routes()
        .with_state(&Shown { handle, nats })
        .guarded(&access)
}

/// A digest shows no block hashes.
fn routes() -> RouteTable<Shown> {
    RouteTable::default()
        .probes(&get(|| async { "ok" }), &get(ready))
        .route("/metrics", Open, get(show_metrics))
        .route("/v1/digest", Open, get(digest))
}

async fn ready(State(shown): State<Shown>) -> impl IntoResponse {
    match shown.handle.readiness() {
        Ok(()) => (StatusCode::OK, "ready".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why.to_string()),
    }
}

async fn show_metrics(State(shown): State<Shown>) -> impl IntoResponse {
    let format = "text/plain; version=0.0.4";
    let mut page = metrics::text(&shown.handle.sources());
    page.push_str(&metrics::shim_text(&shown.handle));
    page.push_str(&build::metrics_text());
    if let Some(nats) = &shown.nats {
        page.push_str(&nats.metrics_text());
    }
    ([(header::CONTENT_TYPE, format)], page)
}

async fn digest(State(shown): State<Shown>) -> Json<DigestView> {
    Json(shown.handle.digest())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_open_routes_are_those_that_security_names() {
        let open: Vec<_> = routes()
            .entries()
            .filter(|(_, access)| *access == Open)
            .map(|(path, _)| path)
            .collect();
        let probes = ["/health", "/healthz", "/liveness", "/readyz", "/readiness"];
        assert_eq!(open, [&probes[..], &["/metrics", "/v1/digest"]].concat());
    }
}
