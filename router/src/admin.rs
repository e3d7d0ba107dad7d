//! The admin port: the router's state in metrics and in JSON. An embedded router shows its
//! indexer's and its shims' too. `warmroute_process::access` decides who may use which route.

pub(crate) mod setup_faults;
mod workers_api;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, Query, Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use warmroute_indexer::WorkerView;
use warmroute_plane::PlaneError;
use warmroute_process::access::RouteAccess::{ByMethod, Open};
use warmroute_process::access::RouteTable;
use warmroute_process::build;
use warmroute_process::shared_page::{SharedPage, made};
use warmroute_proto::registry::{DrainState, DrainUntil};
use warmroute_proto::{DpRank, RouterId, Source, WorkerId};
use warmroute_shim::source::{SourceStatus, UnverifiedCause};

use crate::deployment::Deployment;
use crate::embedded::EmbeddedWorkers;
use crate::fleet::health::WorkerHealth;
use crate::fleet::{FleetRegistry, FleetWorker};
use crate::metrics::{Scraped, WorkerStatus};
use crate::proxy::App;
use crate::ready::ServePhase;
use crate::replication;
use crate::route::DoubtedScope;
use crate::selections::{Selections, TicketReport};
use crate::sync::{ReplicaStatus, StatusDetail};
use crate::tokenizers::ModelTokenizer;

/// Decisions shown if no limit is given.
const DECISIONS_DEFAULT: usize = 50;

/// What the admin port shows.
pub(crate) struct Admin {
    pub router: RouterId,
    pub app: Arc<App>,
    pub registry: Arc<FleetRegistry>,
    pub replicas: replication::ReplicationHandle,
    pub deployment: Arc<Deployment>,
    /// `None`: with NATS, where the workers' shims register them.
    pub workers: Option<EmbeddedWorkers>,
    pub selections: Arc<Selections>,
    pub pages: AdminPages,
}

/// Pages about all workers, which take milliseconds. Each is made on a thread of its own.
#[derive(Default)]
pub(crate) struct AdminPages {
    metrics: SharedPage,
    workers: SharedPage,
}

fn shown(page: Option<Bytes>, kind: &'static str) -> Result<Response, StatusCode> {
    let page = page.ok_or(StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(([(header::CONTENT_TYPE, kind)], page).into_response())
}

type SharedAdmin = State<Arc<Admin>>;

/// The admin port's routes.
pub(crate) fn routes(admin: &Arc<Admin>) -> RouteTable {
    let index = admin.deployment.index();
    let queries = index.map(warmroute_indexer::http::embedded);
    let worker = get(workers_api::show).delete(workers_api::remove);
    let worker_drain = get(worker_drain).post(drain_worker);
    RouteTable::default()
        .route("/metrics", Open, get(metrics))
        .route("/workers", ByMethod, get(workers).post(workers_api::add))
        .route("/workers/{worker}", ByMethod, worker)
        .route("/v1/slots", ByMethod, get(slots))
        .route("/admin/decisions", ByMethod, get(decisions))
        .route("/select", ByMethod, post(select))
        .route("/first_token", ByMethod, post(first_token))
        .route("/free", ByMethod, post(free))
        .route("/admin/drain", ByMethod, get(drain_phase).post(drain))
        .route("/admin/undrain", ByMethod, post(undrain))
        .route("/admin/workers/{worker}/drain", ByMethod, worker_drain)
        .route(
            "/admin/workers/{worker}/undrain",
            ByMethod,
            post(undrain_worker),
        )
        .probes(&get(|| async { StatusCode::OK }), &get(readyz))
        .with_state(admin)
        .merge(queries.unwrap_or_default())
}

#[derive(Deserialize)]
struct SelectQuery {
    /// The request's path at the engine.
    path: Option<String>,
    /// Addresses that may be chosen, with commas; absent: any.
    endpoints: Option<String>,
}

/// Chooses a worker for the request in the body, which gets a slot and a ticket.
async fn select(
    State(admin): SharedAdmin,
    Query(query): Query<SelectQuery>,
    mut request: Request,
) -> Response {
    let path = query.path.as_deref().unwrap_or("/v1/completions");
    let Some(path) = path
        .parse::<Uri>()
        .ok()
        .filter(|path| path.authority().is_none())
    else {
        return (StatusCode::BAD_REQUEST, "path is not a path").into_response();
    };
    *request.uri_mut() = path;
    let endpoints = query
        .endpoints
        .map(|list| list.split(',').map(str::to_owned).collect());
    match admin.selections.select(request, endpoints).await {
        Ok(selection) => Json(selection).into_response(),
        Err(refused) => *refused,
    }
}

/// The prefill of a selected request has ended. Each call keeps its ticket.
async fn first_token(State(admin): SharedAdmin, Json(report): Json<TicketReport>) -> StatusCode {
    found(admin.selections.first_token(&report.ticket).await)
}

/// A selected request has ended.
async fn free(State(admin): SharedAdmin, Json(report): Json<TicketReport>) -> StatusCode {
    found(admin.selections.free(&report).await)
}

const fn found(is_open: bool) -> StatusCode {
    match is_open {
        true => StatusCode::NO_CONTENT,
        false => StatusCode::NOT_FOUND,
    }
}

async fn readyz(State(admin): SharedAdmin) -> Response {
    admin.app.ready.probe(admin.app.index_fault())
}

/// Reports not-ready until undrained. Idempotent. Does not stop the process; SIGTERM does.
async fn drain(State(admin): SharedAdmin) -> Json<Value> {
    let phase = admin.app.ready.drain(Instant::now());
    tracing::info!(state = phase.label(), "drain requested");
    shown_phase(phase, &admin)
}

/// 409 if the process is ending, which cannot be undone.
async fn undrain(State(admin): SharedAdmin) -> Response {
    let phase = admin.app.ready.undrain();
    tracing::info!(state = phase.label(), "undrain requested");
    let status = match phase {
        ServePhase::Serving => StatusCode::OK,
        ServePhase::Draining(_) | ServePhase::Ending(_) => StatusCode::CONFLICT,
    };
    (status, shown_phase(phase, &admin)).into_response()
}

async fn drain_phase(State(admin): SharedAdmin) -> Json<Value> {
    shown_phase(admin.app.ready.phase(), &admin)
}

/// `requests`: this router's open requests.
fn shown_phase(phase: ServePhase, admin: &Admin) -> Json<Value> {
    let requests = admin.app.core.core().digest(admin.router).count;
    Json(json!({ "state": phase.label(), "requests": requests }))
}

#[derive(Deserialize)]
struct DrainQuery {
    #[serde(default)]
    until: DrainUntil,
}

/// No router sends the worker new requests; its open ones may finish. Idempotent.
async fn drain_worker(
    State(admin): SharedAdmin,
    worker: Path<String>,
    Query(query): Query<DrainQuery>,
) -> Result<Json<Value>, DrainError> {
    let worker = known_worker(&admin, worker)?;
    let drained = admin.registry.drain(&worker, query.until).await;
    stored(&admin, &worker, drained)
}

async fn undrain_worker(
    State(admin): SharedAdmin,
    worker: Path<String>,
) -> Result<Json<Value>, DrainError> {
    let worker = known_worker(&admin, worker)?;
    let undrained = admin.registry.undrain(&worker).await;
    stored(&admin, &worker, undrained)
}

async fn worker_drain(
    State(admin): SharedAdmin,
    worker: Path<String>,
) -> Result<Json<Value>, DrainError> {
    let worker = known_worker(&admin, worker)?;
    Ok(Json(shown_drain(&worker, &admin)))
}

fn stored(
    admin: &Admin,
    worker: &WorkerId,
    written: Result<(), PlaneError>,
) -> Result<Json<Value>, DrainError> {
    match written {
        Ok(()) => Ok(Json(shown_drain(worker, admin))),
        Err(error) => {
            tracing::warn!(%worker, %error, "cannot store drain state");
            Err(DrainError::NotStored(error))
        }
    }
}

fn known_worker(admin: &Admin, Path(worker): Path<String>) -> Result<WorkerId, DrainError> {
    let (worker, fleet) = (WorkerId::from(worker), &admin.app.fleet);
    if fleet.contains(&worker) || fleet.drain_entry(&worker).is_some() {
        Ok(worker)
    } else if admin.registry.drains_read() {
        Err(DrainError::NoWorker)
    } else {
        Err(DrainError::NotRead)
    }
}

/// Why a worker's drain is not changed or shown.
#[derive(Debug, thiserror::Error)]
enum DrainError {
    #[error("there is no such worker")]
    NoWorker,
    #[error("the registry is not read yet")]
    NotRead,
    #[error("the drain cannot be stored for the other routers: {0}")]
    NotStored(PlaneError),
}

impl IntoResponse for DrainError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::NoWorker => StatusCode::NOT_FOUND,
            Self::NotRead | Self::NotStored(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        (status, Json(json!({ "error": self.to_string() }))).into_response()
    }
}

/// `requests`: all routers' open requests there, as this one counts them. `since`: the time of the
/// last drain or undrain, in seconds since the Unix epoch.
fn shown_drain(worker: &WorkerId, admin: &Admin) -> Value {
    let entry = admin.app.fleet.drain_entry(worker);
    let requests = admin.app.core.core().active_requests(worker);
    json!({
        "worker": worker,
        "state": admin.app.fleet.drain(worker).label(),
        "since": entry.map(|entry| entry.set_unix_s),
        "until": admin.app.fleet.drain_until(worker),
        "requests": requests,
    })
}

async fn metrics(State(admin): SharedAdmin) -> Result<Response, StatusCode> {
    let make = {
        let admin = Arc::clone(&admin);
        async move {
            let sync = admin.replicas.status(StatusDetail::Summary).await;
            made(move || metrics_text(&admin, sync.as_ref())).await
        }
    };
    shown(admin.pages.metrics.get(make).await, prometheus::TEXT_FORMAT)
}

fn metrics_text(admin: &Admin, sync: Option<&ReplicaStatus>) -> anyhow::Result<Vec<u8>> {
    let (loads, counts, demoted) = {
        let core = admin.app.core.core();
        (core.loads(), core.counts(), core.demoted())
    };
    let workers = admin.app.fleet.snapshot();
    let workers: Vec<_> = workers.iter().map(|worker| status(worker, admin)).collect();
    let catalog = admin.app.fleet.catalog();
    let lost = admin.app.fleet.lost().into_iter();
    let lost: Vec<_> = lost.map(|(worker, _)| worker).collect();
    let own = admin.app.metrics.render(&Scraped {
        loads: &loads,
        workers: &workers,
        series: &catalog.series,
        core: &counts,
        demoted: &demoted,
        lost: &lost,
        namespace: match &admin.workers {
            Some(_) => None,
            None => Some(admin.registry.subjects.namespace()),
        },
        sync,
        queues: &admin.app.admission.statuses(),
        tokenizers: &admin.app.tokenizers.current(),
        retries_left: admin.app.retries.left(Instant::now().into_std()),
        leaving: admin.app.ready.is_leaving(),
    })?;
    let mut text = own.into_bytes();
    text.extend_from_slice(build::metrics_text().as_bytes());
    let settings = admin.app.settings.current();
    text.extend_from_slice(settings.certificate_metrics().as_bytes());
    if let Some(index) = admin.deployment.index() {
        text.extend_from_slice(&index.metrics_text()?);
    }
    let sources: Vec<_> = statuses(admin).collect();
    if !sources.is_empty() {
        text.extend_from_slice(warmroute_shim::metrics::text(&sources).as_bytes());
    }
    if let Some(nats) = admin.deployment.nats() {
        text.extend_from_slice(nats.metrics_text().as_bytes());
    }
    Ok(text)
}

fn status(worker: &FleetWorker, admin: &Admin) -> WorkerStatus {
    let checks = worker.checks.named();
    let failed = worker
        .checks
        .named()
        .filter(|(_, check)| check.is_failure());
    WorkerStatus {
        worker: worker.entry.worker.to_string(),
        role: worker.entry.role.label(),
        healthy: worker.health.usable() || worker.health == WorkerHealth::Asleep,
        registered: worker.registered,
        draining: admin.app.fleet.drain(&worker.entry.worker) == DrainState::Draining,
        failed_checks: failed.map(|(name, _)| name).collect(),
        checks: checks
            .map(|(name, result)| (name, result.passed()))
            .collect(),
        passed_over: passed_over(worker, admin),
        ttft_ratios: ttft_ratios(worker, admin).into_iter().collect(),
    }
}

/// Why a worker whose health checks pass gets no requests, or only trials.
fn passed_over(worker: &FleetWorker, admin: &Admin) -> Vec<&'static str> {
    let (asleep, breaker) = (worker.health == WorkerHealth::Asleep, &worker.breaker);
    let is_stalled = worker.health.usable() && !stalled_ranks(worker, admin).is_empty();
    let reasons = [
        (asleep, "asleep"),
        (breaker.rests(), "overloaded"),
        (breaker.is_tripped(), "circuit_breaker"),
        (is_stalled, "stalled"),
    ];
    let holding = reasons.into_iter().filter(|(holds, _)| *holds);
    holding.map(|(_, reason)| reason).collect()
}

fn stalled_ranks(worker: &FleetWorker, admin: &Admin) -> Vec<u32> {
    let now = Instant::now().into_std();
    let core = admin.app.core.core();
    let stalled = ranks_of(worker).filter(|(_, source)| core.is_stalled(source, now));
    stalled.map(|(rank, _)| rank).collect()
}

/// `workers`: each with its registration, health, checks, and its sources' states. `waiting`: those
/// declared here whose engines were not reached. `setup_faults`: texts for people.
async fn workers(State(admin): SharedAdmin) -> Result<Response, StatusCode> {
    let shown_admin = Arc::clone(&admin);
    let make = made(move || {
        let admin = &*shown_admin;
        let index = admin.deployment.index();
        let index = index.map_or_else(Vec::new, warmroute_indexer::Handle::workers);
        let workers = admin.app.fleet.snapshot();
        let workers = workers
            .iter()
            .map(|worker| shown_worker(worker, &index, admin));
        let faults = setup_faults::faults(admin).into_iter();
        let page = json!({
            "workers": workers.collect::<Vec<_>>(),
            "waiting": setup_faults::waiting(admin),
            "setup_faults": faults.map(|fault| fault.to_string()).collect::<Vec<_>>(),
        });
        Ok(serde_json::to_vec(&page)?)
    });
    shown(admin.pages.workers.get(make).await, "application/json")
}

fn shown_worker(worker: &FleetWorker, index: &[WorkerView], admin: &Admin) -> Value {
    let stalled = stalled_ranks(worker, admin);
    let mut views = index.iter();
    let view = views.find(|view| view.instance_id == worker.entry.worker);
    json!({
        "worker": worker.entry.worker,
        "url": worker.entry.url,
        "models": worker.entry.models,
        "loras": worker.entry.loras,
        "ranks": worker.entry.ranks,
        "role": worker.entry.role.label(),
        "block_size": worker.entry.block_size,
        "lookahead": worker.entry.lookahead,
        "entry": worker.entry,
        "registered": worker.registered,
        "health": worker.health.label(),
        "tls_error": worker.tls_error,
        "load_error": worker.load_error,
        "circuit_breaker": worker.breaker.label(),
        "drain": admin.app.fleet.drain(&worker.entry.worker).label(),
        "checks": worker.checks,
        "tokenizers": tokenizers(worker, admin),
        "passed_over": passed_over(worker, admin),
        "stalled_ranks": stalled,
        "demoted_ranks": demoted_ranks(worker, admin),
        "doubted": doubted(worker, admin),
        "ttft_ratios": ttft_ratios(worker, admin),
        "learned": learned(worker, admin),
        "engine_load": engine_load(worker, admin),
        "sources": view.map(|view| &view.sources),
        "event_feeds": event_feeds(worker, admin),
    })
}

/// By base model: its tokenizer, and the results of comparing it with this engine's.
fn tokenizers(worker: &FleetWorker, admin: &Admin) -> BTreeMap<String, Value> {
    let table = admin.app.tokenizers.current();
    let show = |model: &String| {
        let (entry, loaded) = (table.get(model), table.of(model));
        let checks = worker.checks.models.get(model);
        let shown = json!({
            "state": entry.map_or("loading", ModelTokenizer::label),
            "problem": entry.and_then(|entry| entry.problem.as_deref()),
            "path": loaded.map(|loaded| &loaded.path),
            "version": loaded.map(|loaded| loaded.version),
            "file_bytes": loaded.map(|loaded| loaded.bytes),
            "load_ms": loaded.map(|loaded| loaded.load_time.as_millis()),
            "checks": checks.map(|checks| &checks.tokens),
        });
        (model.clone(), shown)
    };
    worker.entry.models.iter().map(show).collect()
}

fn ranks_of(worker: &FleetWorker) -> impl Iterator<Item = (u32, Source)> {
    (0..worker.entry.ranks).map(|rank| {
        let (worker, dp_rank) = (worker.entry.worker.clone(), DpRank(rank));
        (rank, Source { worker, dp_rank })
    })
}

/// Ranks whose index credit this router ignores, whatever state the index reports: with the
/// generation, and the requests in a row that found what the index credits.
fn demoted_ranks(worker: &FleetWorker, admin: &Admin) -> BTreeMap<u32, Value> {
    let demoted = admin.app.core.core().demoted();
    let own = demoted
        .into_iter()
        .filter(|one| one.source.worker == worker.entry.worker);
    let shown = own.map(|one| {
        let shown = json!({ "generation": one.generation, "agreements": one.agreements });
        (one.source.dp_rank.0, shown)
    });
    shown.collect()
}

/// What of this worker's credit reports of cached tokens contradict, whatever state the index reports.
fn doubted(worker: &FleetWorker, admin: &Admin) -> Vec<DoubtedScope> {
    let mut doubted = admin.app.fleet.doubted();
    doubted.retain(|scope| {
        let source = scope.source.as_ref();
        source.is_none_or(|source| source.worker == worker.entry.worker)
    });
    doubted
}

fn ttft_ratios(worker: &FleetWorker, admin: &Admin) -> BTreeMap<u32, f64> {
    let now = Instant::now().into_std();
    let core = admin.app.core.core();
    let known = |(rank, source)| Some((rank, core.ttft_ratio(&source, now)?));
    ranks_of(worker).filter_map(known).collect()
}

/// What this router learned of each rank's speed.
fn learned(worker: &FleetWorker, admin: &Admin) -> BTreeMap<u32, Value> {
    let core = admin.app.core.core();
    let show = |(rank, source)| {
        let speed = core.speed(&source)?;
        let learned = json!({
            "overhead_ms": speed.ttft.base_secs * 1e3,
            "prefill_tokens_per_sec": speed.ttft.secs_each.recip(),
            "itl_ms": speed.itl.base_secs * 1e3,
            "itl_ms_per_active_request": speed.itl.secs_each * 1e3,
        });
        Some((rank, learned))
    };
    ranks_of(worker).filter_map(show).collect()
}

/// By rank: what its engine reported last, and what of it no router sent.
fn engine_load(worker: &FleetWorker, admin: &Admin) -> BTreeMap<u32, Value> {
    let now = Instant::now().into_std();
    let core = admin.app.core.core();
    let show = |(rank, source)| {
        let (reading, foreign) = core.engine_load(&source, now)?;
        let shown = json!({
            "running": reading.running,
            "waiting": reading.waiting,
            "kv_usage": reading.kv_usage,
            "foreign_requests": foreign.requests,
            "foreign_waiting": foreign.waiting,
        });
        Some((rank, shown))
    };
    ranks_of(worker).filter_map(show).collect()
}

fn statuses(admin: &Admin) -> impl Iterator<Item = SourceStatus> {
    let shims = admin.workers.iter().flat_map(EmbeddedWorkers::shims);
    shims.flat_map(|shim| shim.sources())
}

/// The state of the engine's event stream, by rank.
fn event_feeds(worker: &FleetWorker, admin: &Admin) -> Vec<Value> {
    statuses(admin)
        .filter(|status| status.source.worker == worker.entry.worker)
        .map(|status| {
            json!({
                "dp_rank": status.source.dp_rank,
                "connected": status.is_connected,
                // Losses cannot be seen without replays or sequence numbers.
                "losses_visible": !matches!(
                    status.unverified,
                    Some(
                        UnverifiedCause::NoReplay
                            | UnverifiedCause::NoSequence
                            | UnverifiedCause::UnseenLosses
                    )
                ),
                "unverified_because": status.unverified.map(UnverifiedCause::label),
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

/// `router` and `sources` have a fixed form, which scripts rely on. `sync` is what this replica
/// holds of every router, itself included, and null while no replica runs.
async fn slots(State(admin): SharedAdmin) -> Json<Value> {
    let sync = admin.replicas.status(StatusDetail::Sources).await;
    let sources = admin.app.core.core().loads();
    let router = admin.router.to_string();
    Json(json!({ "router": router, "sources": sources, "sync": sync }))
}

#[derive(Deserialize)]
struct Limit {
    limit: Option<usize>,
}

/// The newest decisions with their terms. Up to a MiB of JSON, which is made on another thread.
async fn decisions(State(admin): SharedAdmin, Query(query): Query<Limit>) -> Response {
    let limit = query.limit.unwrap_or(DECISIONS_DEFAULT);
    let show = move || {
        let names = |ids: &_| admin.app.core.core().sources(ids);
        json!({ "decisions": admin.app.journal.newest(limit, names) }).to_string()
    };
    match tokio::task::spawn_blocking(show).await {
        Ok(page) => ([(header::CONTENT_TYPE, "application/json")], page).into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot show the decisions");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
