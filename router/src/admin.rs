//! The admin port: what the router knows, in numbers and in JSON. Embedded, its indexer's and its
//! shims' too.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use warmroute_indexer::WorkerView;
use warmroute_proto::RouterId;
use warmroute_shim::source::Status;

use crate::accounts::Desk;
use crate::fleet::{Fleet, Member};
use crate::journal::Journal;
use crate::metrics::{Metrics, SourceLoad, WorkerStanding};
use crate::ready::{Ready, Stay};
use crate::replication;
use crate::surroundings::Surroundings;

/// Decisions shown where nobody says how many.
const DECISIONS_DEFAULT: usize = 50;

/// What the admin port shows.
pub(crate) struct Admin {
    pub router: RouterId,
    pub desk: Arc<Desk>,
    pub fleet: Arc<Fleet>,
    pub journal: Arc<Journal>,
    pub metrics: Arc<Metrics>,
    pub ready: Arc<Ready>,
    pub replicas: replication::Handle,
    pub around: Arc<Surroundings>,
}

/// The admin port's routes.
pub(crate) fn router(admin: Arc<Admin>) -> Router {
    let index = admin.around.index().cloned();
    let queries = index.map(warmroute_indexer::http::queries);
    Router::new()
        .route("/metrics", get(metrics))
        .route("/workers", get(workers))
        .route("/v1/slots", get(slots))
        .route("/admin/decisions", get(decisions))
        .route("/admin/drain", get(drained).post(drain))
        .route("/admin/undrain", post(undrain))
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/readyz", get(readyz))
        .with_state(admin)
        .merge(queries.unwrap_or_default())
}

async fn readyz(State(admin): State<Arc<Admin>>) -> Response {
    match admin.ready.missing() {
        None => StatusCode::OK.into_response(),
        Some(what) => (StatusCode::SERVICE_UNAVAILABLE, what).into_response(),
    }
}

/// Out of the load balancers, for as long as an operator wants; ending is SIGTERM's part. Told twice, it
/// is the same.
async fn drain(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let stay = admin.ready.drain(Instant::now());
    tracing::info!(state = stay.word(), "drain asked for");
    standing_of(stay, &admin)
}

/// 409: the process is ending, which cannot be taken back.
async fn undrain(State(admin): State<Arc<Admin>>) -> Response {
    let stay = admin.ready.undrain();
    tracing::info!(state = stay.word(), "end of a drain asked for");
    let status = match stay {
        Stay::Serving => StatusCode::OK,
        Stay::Draining(_) | Stay::Ending(_) => StatusCode::CONFLICT,
    };
    (status, standing_of(stay, &admin)).into_response()
}

async fn drained(State(admin): State<Arc<Admin>>) -> Json<Value> {
    standing_of(admin.ready.stay(), &admin)
}

/// `requests`: this router's own that are still open.
fn standing_of(stay: Stay, admin: &Admin) -> Json<Value> {
    let requests = admin.desk.core().digest(admin.router).count;
    Json(json!({ "state": stay.word(), "requests": requests }))
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    let loads: Vec<SourceLoad> = admin.desk.core().loads().iter().map(load).collect();
    let standings: Vec<WorkerStanding> = admin.fleet.snapshot().iter().map(standing).collect();
    let counts = admin.desk.core().counts();
    admin.metrics.leaving(admin.ready.is_leaving());
    let sync = admin.replicas.snapshot().await;
    let own = admin
        .metrics
        .render(&loads, &standings, &counts, sync.as_ref());
    let index = admin.around.index();
    let index = index.map_or_else(|| Ok(Vec::new()), warmroute_indexer::Handle::metrics_text);
    let sources: Vec<_> = statuses(&admin).collect();
    match (own, index) {
        (Ok(own), Ok(index)) => {
            let mut text = own.into_bytes();
            text.extend_from_slice(&index);
            if !admin.around.shims().is_empty() {
                text.extend_from_slice(warmroute_shim::metrics::text(&sources).as_bytes());
            }
            if let Some(nats) = admin.around.nats() {
                text.extend_from_slice(nats.metrics_text().as_bytes());
            }
            let kind = "text/plain; version=0.0.4";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(%error, "the metrics cannot be shown");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

fn load(row: &crate::route::SourceLoad) -> SourceLoad {
    SourceLoad {
        worker: row.worker.to_string(),
        dp_rank: row.dp_rank.0,
        active_requests: row.active_requests.into(),
        prefill_tokens: row.prefill_tokens,
        decode_blocks: row.decode_blocks,
    }
}

fn standing(member: &Member) -> WorkerStanding {
    let checks = member.checks.named();
    WorkerStanding {
        worker: member.entry.worker.to_string(),
        healthy: member.health.usable(),
        checks: checks.map(|(name, check)| (name, check.passed())).into(),
    }
}

/// `{"workers": […]}`: each with its registration, health, checks, and its sources' states.
async fn workers(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let index = admin.around.index();
    let index = index.map_or_else(Vec::new, warmroute_indexer::Handle::workers);
    let members = admin.fleet.snapshot();
    let workers: Vec<Value> = members
        .iter()
        .map(|member| worker(member, &index, &admin))
        .collect();
    Json(json!({ "workers": workers }))
}

fn worker(member: &Member, index: &[WorkerView], admin: &Admin) -> Value {
    let now = Instant::now().into_std();
    let stalled: Vec<u32> = {
        let core = admin.desk.core();
        let source = |rank| warmroute_proto::Source {
            worker: member.entry.worker.clone(),
            dp_rank: warmroute_proto::DpRank(rank),
        };
        let ranks = 0..member.entry.ranks;
        ranks
            .filter(|&rank| core.is_stalled(&source(rank), now))
            .collect()
    };
    let seen = index
        .iter()
        .find(|view| view.instance_id == member.entry.worker);
    json!({
        "worker": member.entry.worker,
        "url": member.entry.url,
        "models": member.entry.models,
        "loras": member.entry.loras,
        "ranks": member.entry.ranks,
        "block_size": member.entry.block_size,
        "entry": member.entry,
        "registered": member.registered,
        "health": member.health.word(),
        "checks": member.checks,
        "stalled_ranks": stalled,
        "sources": seen.map(|view| &view.sources),
        "event_feeds": feeds(member, admin),
    })
}

fn statuses(admin: &Admin) -> impl Iterator<Item = Status> {
    let shims = admin.around.shims().iter();
    shims.flat_map(warmroute_shim::Handle::sources)
}

/// How the engine's events come in, rank by rank.
fn feeds(member: &Member, admin: &Admin) -> Vec<Value> {
    statuses(admin)
        .filter(|status| status.source.worker == member.entry.worker)
        .map(|status| {
            json!({
                "dp_rank": status.source.dp_rank,
                "connected": status.is_connected,
                // Without replays or sequence numbers a loss cannot be seen.
                "losses_visible": !status.is_unverified,
                "engine_seq": status.engine_seq,
                "proof_age_ms": status.proof_age.map(|age| age.as_millis()),
                "orphans": status.orphans,
                "batches": status.counters.batches,
                "gaps": status.counters.gaps,
                "gaps_unfilled": status.counters.gaps_unfilled,
                "restarts": status.counters.restarts,
                "payloads_malformed": status.counters.payloads_malformed,
            })
        })
        .collect()
}

/// `router` and `sources` are a fixed form, which scripts rely on; `sync` is what this replica holds of
/// every router, its own part included, and null while no replica runs.
async fn slots(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let sync = admin.replicas.snapshot().await;
    let sources = admin.desk.core().loads();
    let router = admin.router.to_string();
    Json(json!({ "router": router, "sources": sources, "sync": sync }))
}

#[derive(Deserialize)]
struct Limit {
    limit: Option<usize>,
}

/// The newest decisions with the terms that they rested on. Up to a MiB of JSON: made where it keeps no
/// request waiting.
async fn decisions(State(admin): State<Arc<Admin>>, Query(query): Query<Limit>) -> Response {
    let limit = query.limit.unwrap_or(DECISIONS_DEFAULT);
    let show = move || {
        let names = |ids: &_| admin.desk.core().sources(ids);
        json!({ "decisions": admin.journal.newest(limit, names) }).to_string()
    };
    match tokio::task::spawn_blocking(show).await {
        Ok(page) => ([(header::CONTENT_TYPE, "application/json")], page).into_response(),
        Err(error) => {
            tracing::error!(%error, "the decisions cannot be shown");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
