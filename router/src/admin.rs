//! The admin port: what the router knows, in numbers and in JSON. Embedded, its indexer's and its
//! shims' too.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use warmroute_indexer::WorkerView;
use warmroute_plane::PlaneError;
use warmroute_process::server::probes;
use warmroute_proto::registry::DrainState;
use warmroute_proto::{DpRank, RouterId, Source, WorkerId};
use warmroute_shim::source::SourceStatus;

use crate::fleet::{Fleet, FleetRegistry, FleetWorker};
use crate::journal::Journal;
use crate::metrics::{Metrics, Scraped, WorkerStatus};
use crate::ready::{Ready, Stay};
use crate::replication;
use crate::shared_core::SharedCore;
use crate::surroundings::Surroundings;

/// Decisions shown where nobody says how many.
const DECISIONS_DEFAULT: usize = 50;

/// What the admin port shows.
pub(crate) struct Admin {
    pub router: RouterId,
    pub desk: Arc<SharedCore>,
    pub fleet: Arc<Fleet>,
    pub registry: Arc<FleetRegistry>,
    pub journal: Arc<Journal>,
    pub metrics: Arc<Metrics>,
    pub ready: Arc<Ready>,
    pub replicas: replication::ReplicationHandle,
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
        .route(
            "/admin/workers/{worker}/drain",
            get(worker_drained).post(drain_worker),
        )
        .route("/admin/workers/{worker}/undrain", post(undrain_worker))
        .merge(probes(get(|| async { StatusCode::OK }), get(readyz)))
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
    tracing::info!(state = stay.label(), "drain asked for");
    standing_of(stay, &admin)
}

/// 409: the process is ending, which cannot be taken back.
async fn undrain(State(admin): State<Arc<Admin>>) -> Response {
    let stay = admin.ready.undrain();
    tracing::info!(state = stay.label(), "end of a drain asked for");
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
    Json(json!({ "state": stay.label(), "requests": requests }))
}

/// No router gives it new requests from here on; what runs there may finish. Told twice, it is the same.
async fn drain_worker(
    State(admin): State<Arc<Admin>>,
    worker: Path<String>,
) -> Result<Json<Value>, Refused> {
    say(&admin, worker, DrainState::Draining).await
}

async fn undrain_worker(
    State(admin): State<Arc<Admin>>,
    worker: Path<String>,
) -> Result<Json<Value>, Refused> {
    say(&admin, worker, DrainState::Serving).await
}

async fn worker_drained(
    State(admin): State<Arc<Admin>>,
    worker: Path<String>,
) -> Result<Json<Value>, Refused> {
    let worker = named(&admin, worker)?;
    Ok(Json(drain_of(&worker, &admin)))
}

async fn say(
    admin: &Admin,
    worker: Path<String>,
    drain: DrainState,
) -> Result<Json<Value>, Refused> {
    let worker = named(admin, worker)?;
    match admin.registry.set_drain(&worker, drain).await {
        Ok(()) => Ok(Json(drain_of(&worker, admin))),
        Err(error) => {
            tracing::warn!(%worker, %error, "a word on a worker cannot be written");
            Err(Refused::Unwritten(error))
        }
    }
}

fn named(admin: &Admin, Path(worker): Path<String>) -> Result<WorkerId, Refused> {
    let worker = WorkerId::from(worker);
    if admin.fleet.contains(&worker) || admin.fleet.drain_entry(&worker).is_some() {
        Ok(worker)
    } else if admin.registry.drains_read() {
        Err(Refused::NoWorker)
    } else {
        Err(Refused::Unread)
    }
}

/// Why there is no word on a worker.
#[derive(Debug, thiserror::Error)]
enum Refused {
    /// A typing error.
    #[error("there is no such worker")]
    NoWorker,
    #[error("the registry is not read yet")]
    Unread,
    #[error("the other routers cannot be told now: {0}")]
    Unwritten(PlaneError),
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = match self {
            Self::NoWorker => StatusCode::NOT_FOUND,
            Self::Unread | Self::Unwritten(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        (status, Json(json!({ "error": self.to_string() }))).into_response()
    }
}

/// `requests`: those of all routers that are open there, as this one counts them. `since`: when the last word
/// was said, in seconds since the Unix epoch.
fn drain_of(worker: &WorkerId, admin: &Admin) -> Value {
    let word = admin.fleet.drain_entry(worker);
    let loads = admin.desk.core().loads();
    let there = loads.iter().filter(|load| load.worker == *worker);
    let requests: u64 = there.map(|load| u64::from(load.active_requests)).sum();
    json!({
        "worker": worker,
        "state": standing_word(worker, admin).label(),
        "since": word.map(|word| word.set_unix_s),
        "requests": requests,
    })
}

fn standing_word(worker: &WorkerId, admin: &Admin) -> DrainState {
    let word = admin.fleet.drain_entry(worker);
    word.map_or_else(DrainState::default, |word| word.drain)
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    let sync = admin.replicas.snapshot().await;
    let (loads, counts) = {
        let core = admin.desk.core();
        (core.loads(), core.counts())
    };
    let members = admin.fleet.snapshot();
    let workers: Vec<WorkerStatus> = members
        .iter()
        .map(|member| status(member, &admin))
        .collect();
    let own = admin.metrics.render(&Scraped {
        loads: &loads,
        workers: &workers,
        core: &counts,
        sync: sync.as_ref(),
        leaving: admin.ready.is_leaving(),
    });
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

fn status(member: &FleetWorker, admin: &Admin) -> WorkerStatus {
    let checks = member.checks.named();
    WorkerStatus {
        worker: member.entry.worker.to_string(),
        healthy: member.health.usable(),
        draining: standing_word(&member.entry.worker, admin) == DrainState::Draining,
        checks: checks.map(|(name, check)| (name, check.passed())).into(),
        ttft_ratios: ttft_ratios(member, admin),
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

fn worker(member: &FleetWorker, index: &[WorkerView], admin: &Admin) -> Value {
    let now = Instant::now().into_std();
    let stalled: Vec<u32> = {
        let core = admin.desk.core();
        let stalled = ranks_of(member).filter(|(_, source)| core.is_stalled(source, now));
        stalled.map(|(rank, _)| rank).collect()
    };
    let ttft_ratios: BTreeMap<u32, f64> = ttft_ratios(member, admin).into_iter().collect();
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
        "health": member.health.label(),
        "drain": standing_word(&member.entry.worker, admin).label(),
        "checks": member.checks,
        "stalled_ranks": stalled,
        "ttft_ratios": ttft_ratios,
        "sources": seen.map(|view| &view.sources),
        "event_feeds": feeds(member, admin),
    })
}

fn ranks_of(member: &FleetWorker) -> impl Iterator<Item = (u32, Source)> {
    (0..member.entry.ranks).map(|rank| {
        let (worker, dp_rank) = (member.entry.worker.clone(), DpRank(rank));
        (rank, Source { worker, dp_rank })
    })
}

fn ttft_ratios(member: &FleetWorker, admin: &Admin) -> Vec<(u32, f64)> {
    let now = Instant::now().into_std();
    let core = admin.desk.core();
    let known = |(rank, source)| Some((rank, core.ttft_ratio(&source, now)?));
    ranks_of(member).filter_map(known).collect()
}

fn statuses(admin: &Admin) -> impl Iterator<Item = SourceStatus> {
    let shims = admin.around.shims().iter();
    shims.flat_map(warmroute_shim::Handle::sources)
}

/// How the engine's events come in, rank by rank.
fn feeds(member: &FleetWorker, admin: &Admin) -> Vec<Value> {
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
