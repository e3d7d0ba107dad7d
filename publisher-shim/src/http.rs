//! The shim's own HTTP: probes, metrics, and the digest to compare an indexer's with.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use warmroute_process::nats::Nats;
use warmroute_proto::{
    DpRank, EngineSeq, Generation, LogPosition, RecordNumber, TierState, WorkerId,
};

use crate::metrics;
use crate::service::Handle;
use crate::source::Status;

/// `/v1/digest`, in the form that indexers share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DigestView {
    /// Always null: a shim has no position in the log.
    pub position: Option<LogPosition>,
    pub sources: Vec<SourceDigest>,
}

/// One source as of its last acknowledged record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceDigest {
    pub worker: WorkerId,
    pub dp_rank: DpRank,
    pub state: &'static str,
    pub generation: Option<Generation>,
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub blocks: Option<u64>,
    pub digest: Option<String>,
}

impl Handle {
    #[must_use]
    pub fn digest(&self) -> DigestView {
        DigestView {
            position: None,
            sources: self.sources().iter().map(SourceDigest::of).collect(),
        }
    }
}

impl SourceDigest {
    fn of(status: &Status) -> Self {
        let point = status.acknowledged;
        Self {
            worker: status.source.worker.clone(),
            dp_rank: status.source.dp_rank,
            state: state_word(status.states.gpu),
            generation: status.generation,
            number: point.map(|point| point.number),
            engine_seq: point.and_then(|point| point.engine_seq),
            blocks: point.map(|point| point.after.count),
            digest: point.map(|point| point.after.hex()),
        }
    }
}

/// An indexer's word for it: what a shim calls complete is exact there.
const fn state_word(state: TierState) -> &'static str {
    match state {
        TierState::Complete => "exact",
        TierState::Partial => "partial",
        TierState::Unverified => "unverified",
        TierState::Stale => "stale",
        TierState::CatchingUp => "catching_up",
    }
}

/// What the pages are about.
#[derive(Clone)]
struct Shown {
    handle: Handle,
    nats: Option<Nats>,
}

/// Everything that a shim serves; where it is on NATS, that connection's metrics too.
pub fn router(handle: Handle, nats: Option<Nats>) -> Router {
    Router::new()
        .route("/health", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(show_metrics))
        .route("/v1/digest", get(digest))
        .with_state(Shown { handle, nats })
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
    metrics::add_shim(&mut page, &shown.handle);
    if let Some(nats) = &shown.nats {
        metrics::add_nats(&mut page, &nats.stats());
    }
    ([(header::CONTENT_TYPE, format)], page)
}

async fn digest(State(shown): State<Shown>) -> Json<DigestView> {
    Json(shown.handle.digest())
}
