//! The indexer over HTTP, in the form of the Mooncake KV indexer RFC as the widest-used peer serves
//! it:
//! `POST /query`, `POST /query_by_hash`, `GET /workers`, `GET /dump`; and `/v1/digest`, probes and
//! metrics. No registration: workers come from the plane's registry.
//!
//! Counts are in tokens; `dp` is the GPU's alone, `rank_matches` has each rank's tiers. `cpu` and
//! `disk` are cumulative: a prefix that needs no lower tier than that. A source without credit
//! counts zero, with its state beside it.
//!
//! Probes, metrics and digests are open. All others show or compute much, and need a key unless the
//! port is bound to loopback. Their memory is not part of `--max-memory`, and their work
//! must not delay routers: few bodies and dumps are read in parallel, one body or view is worked at, on
//! a blocking thread; the others wait for a slot, up to a deadline.

mod dump;
mod key_file;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Json, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tracing::warn;
use warmroute_process::access::{RouteAccess, RouteTable};
use warmroute_process::{blocking, build};
use warmroute_proto::hash::local_hashes;
use warmroute_proto::query::{IndexAnswer, IndexQuery, SourceAnswer, SourceState};
use warmroute_proto::{
    BlockSize, DpRank, EngineSeq, LocalHash, LogPosition, Seed, Source, WorkerId,
};

use crate::service::Handle;
use warmroute_index::view::WorkerView;

pub use key_file::{KeyFileError, read_key_file};

/// Maximum body: a million token ids as JSON.
const BODY_BYTES_MAX: usize = 16 << 20;

/// Parallel request bodies, and parallel large answers. More would only share the processors with
/// the queries of routers.
const BODIES_MAX: usize = 2;
const SCANS_MAX: usize = 1;

/// Parallel work on bodies and views, of all kinds together.
const WORK_MAX: usize = 1;

/// Bytes of a body that are taken in before other tasks have a turn: some 50 µs.
const BODY_TURN_BYTES: usize = 256 << 10;

/// Deadline for getting a slot.
const SLOT_DEADLINE: Duration = Duration::from_secs(5);

/// Deadline for a request's body.
const BODY_DEADLINE: Duration = Duration::from_secs(10);

/// All routes of an indexer.
pub fn routes(handle: &Handle) -> RouteTable {
    let work = Arc::new(Semaphore::new(WORK_MAX));
    let (one, scans) = (RouteTable::default, Limited::new(handle, &work, SCANS_MAX));
    let workers = one().route("/workers", RouteAccess::Read, get(list_workers));
    let metrics = one().route("/metrics", RouteAccess::Open, get(metrics_text));
    let probes = RouteTable::default().probes(&get(|| async { "ok" }), &get(ready));
    // A scrape does not wait for other work.
    let own = Arc::new(Semaphore::new(WORK_MAX));
    queries(handle, &work)
        .merge(digests(handle, &work, RouteAccess::Open))
        .merge(workers.with_state(&scans))
        .merge(metrics.with_state(&Limited::new(handle, &own, SCANS_MAX)))
        .merge(probes.with_state(handle))
}

/// `/query`, `/query_by_hash`, `/dump`, `/v1/digest`, which a router with an embedded indexer
/// serves on its admin port.
pub fn embedded(handle: &Handle) -> RouteTable {
    let work = Arc::new(Semaphore::new(WORK_MAX));
    queries(handle, &work).merge(digests(handle, &work, RouteAccess::Read))
}

/// `/v1/digest`, which names workers and counts as the metrics do.
fn digests(handle: &Handle, work: &Arc<Semaphore>, access: RouteAccess) -> RouteTable {
    let table = RouteTable::default().route("/v1/digest", access, get(digest));
    table.with_state(&Limited::new(handle, work, SCANS_MAX))
}

fn queries(handle: &Handle, work: &Arc<Semaphore>) -> RouteTable {
    let queries = RouteTable::default()
        .route("/query", RouteAccess::Read, post(query))
        .route("/query_by_hash", RouteAccess::Read, post(query_by_hash));
    let dumps = RouteTable::default().route("/dump", RouteAccess::Read, get(dump::dump));
    queries
        .with_state(&Limited::new(handle, work, BODIES_MAX))
        .merge(dumps.with_state(&Limited::new(handle, work, SCANS_MAX)))
}

/// The index for requests of one kind, few of which are processed in parallel.
#[derive(Clone)]
struct Limited {
    handle: Handle,
    slots: Arc<Semaphore>,
    work: Arc<Semaphore>,
}

impl Limited {
    fn new(handle: &Handle, work: &Arc<Semaphore>, parallel: usize) -> Self {
        Self {
            handle: handle.clone(),
            slots: Arc::new(Semaphore::new(parallel)),
            work: Arc::clone(work),
        }
    }

    async fn slot(&self) -> Result<OwnedSemaphorePermit, HttpError> {
        let slots = Arc::clone(&self.slots);
        match timeout(SLOT_DEADLINE, slots.acquire_owned()).await {
            Ok(Ok(slot)) => Ok(slot),
            Ok(Err(_)) | Err(_) => Err(HttpError {
                status: StatusCode::SERVICE_UNAVAILABLE,
                message: "all request slots are in use: try again".to_owned(),
            }),
        }
    }

    /// Computes a response on a blocking thread.
    async fn respond(
        &self,
        slot: OwnedSemaphorePermit,
        work: impl FnOnce(&Handle) -> Result<Response, HttpError> + Send + 'static,
    ) -> Response {
        let handle = self.handle.clone();
        // It is never closed, and what it waits for is bounded work.
        let place = Arc::clone(&self.work).acquire_owned().await;
        let response = blocking::run(move || {
            let response = work(&handle);
            drop((place, slot));
            response
        });
        match response.await {
            Ok(response) => response.into_response(),
            Err(error) => {
                warn!(%error, "a request failed");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }

    /// The answer to a JSON body, which is parsed on a blocking thread.
    async fn query<T: DeserializeOwned>(
        &self,
        request: Request,
        answer: impl FnOnce(&Handle, T) -> Result<QueryResponse, HttpError> + Send + 'static,
    ) -> Result<Response, HttpError> {
        check_content_type(request.headers())?;
        let slot = self.slot().await?;
        let late = |_| HttpError {
            status: StatusCode::REQUEST_TIMEOUT,
            message: format!("the body takes longer than {BODY_DEADLINE:?}"),
        };
        let body = timeout(BODY_DEADLINE, body_of(request));
        let body = body.await.map_err(late)??;
        let answer = move |handle: &Handle| {
            let Json(query) = Json::from_bytes(&body)?;
            drop(body);
            Ok(Json(answer(handle, query)?).into_response())
        };
        Ok(self.respond(slot, answer).await)
    }
}

/// A request's body. It is joined as it comes, because joining megabytes at its end would keep a
/// thread of the runtime for milliseconds.
async fn body_of(request: Request) -> Result<Vec<u8>, HttpError> {
    let mut chunks = request.into_body().into_data_stream();
    let (mut body, mut turn) = (Vec::new(), 0);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| HttpError::bad(error.to_string()))?;
        if body.len() + chunk.len() > BODY_BYTES_MAX {
            return Err(HttpError {
                status: StatusCode::PAYLOAD_TOO_LARGE,
                message: format!("the body has more than {BODY_BYTES_MAX} bytes"),
            });
        }
        body.extend_from_slice(&chunk);
        turn += chunk.len();
        if turn >= BODY_TURN_BYTES {
            turn = 0;
            tokio::task::yield_now().await;
        }
    }
    Ok(body)
}

fn check_content_type(headers: &HeaderMap) -> Result<(), HttpError> {
    let given = headers.get(header::CONTENT_TYPE);
    let given = given.and_then(|value| value.to_str().ok());
    let essence = given.and_then(|value| value.split(';').next());
    match essence.map(str::trim) {
        Some(essence) if essence.eq_ignore_ascii_case("application/json") => Ok(()),
        Some(_) | None => Err(HttpError {
            status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
            message: "the content type must be application/json".to_owned(),
        }),
    }
}

/// Error response.
struct HttpError {
    status: StatusCode,
    message: String,
}

impl HttpError {
    fn bad(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
        }
    }
}

impl From<JsonRejection> for HttpError {
    fn from(rejection: JsonRejection) -> Self {
        Self {
            status: rejection.status(),
            message: rejection.body_text(),
        }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        (self.status, Json(json!({ "error": self.message }))).into_response()
    }
}

/// Common fields are repeated, because `serde(flatten)` buffers unknown fields.
#[derive(Deserialize)]
struct TokensQuery {
    #[serde(alias = "model_name")]
    model: Option<String>,
    block_size: Option<u32>,
    instance_id: Option<WorkerId>,
    token_ids: Vec<u32>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
}

#[derive(Deserialize)]
struct HashQuery {
    #[serde(alias = "model_name")]
    model: Option<String>,
    block_size: Option<u32>,
    instance_id: Option<WorkerId>,
    /// Local block hashes, already seeded.
    block_hashes: Vec<LocalHash>,
    cache_salt: Option<String>,
}

/// Selects workers. The RFC has `model`, its widest-used implementation `model_name`.
struct Scope {
    model: Option<String>,
    block_size: Option<u32>,
    instance_id: Option<WorkerId>,
}

impl Scope {
    /// A worker that the registry never named is meant only if no model is.
    fn means(&self, view: &WorkerView) -> bool {
        let id = &self.instance_id;
        id.as_ref().is_none_or(|id| *id == view.instance_id)
            && self.model.as_ref().is_none_or(|model| {
                view.entry.as_ref().is_some_and(|entry| {
                    entry.models.contains(model)
                        || entry.loras.iter().any(|lora| lora.name == *model)
                })
            })
    }

    const fn is_narrow(&self) -> bool {
        self.model.is_some() || self.instance_id.is_some()
    }

    fn block_size(&self, meant: &[&WorkerView]) -> Result<BlockSize, HttpError> {
        if let Some(tokens) = self.block_size {
            return BlockSize::new(tokens).ok_or_else(|| HttpError::bad("block_size is 0"));
        }
        let mut sizes = meant.iter().filter_map(|view| reported_size(view));
        let first = sizes
            .next()
            .ok_or_else(|| HttpError::bad("no worker reported its block size: give block_size"))?;
        if sizes.any(|size| size != first) {
            return Err(HttpError::bad(
                "block sizes differ: name model or block_size",
            ));
        }
        Ok(first)
    }
}

fn reported_size(view: &WorkerView) -> Option<BlockSize> {
    view.entry.as_ref()?.block_size
}

#[derive(Serialize)]
struct QueryResponse {
    position: LogPosition,
    /// Tokens on the GPU by instance and rank.
    scores: BTreeMap<WorkerId, BTreeMap<DpRank, u64>>,
    instances: BTreeMap<WorkerId, Instance>,
}

/// The best of an instance's ranks, and each of them.
#[derive(Default, Serialize)]
struct Instance {
    longest_matched: u64,
    gpu: u64,
    cpu: u64,
    disk: u64,
    dp: BTreeMap<DpRank, u64>,
    rank_matches: BTreeMap<DpRank, RankMatch>,
    states: BTreeMap<DpRank, SourceState>,
    /// The engine batch that each rank's tokens are of; null before the first.
    engine_seqs: BTreeMap<DpRank, Option<EngineSeq>>,
}

/// One rank's tokens, cumulative: a rank's tiers go together, those of different ranks do not.
#[derive(Clone, Copy, Serialize)]
struct RankMatch {
    gpu: u64,
    cpu: u64,
    disk: u64,
}

async fn query(State(index): State<Limited>, request: Request) -> Result<Response, HttpError> {
    index.query(request, answer_tokens).await
}

fn answer_tokens(handle: &Handle, body: TokensQuery) -> Result<QueryResponse, HttpError> {
    let scope = Scope {
        model: body.model,
        block_size: body.block_size,
        instance_id: body.instance_id,
    };
    let chosen = Chosen::of(&handle.workers(), &scope)?;
    let lora = body.lora_name.as_deref().or(chosen.lora.as_deref());
    let seed = Seed::new(lora, body.cache_salt.as_deref());
    let blocks = local_hashes(&body.token_ids, chosen.block_size, seed);
    chosen.answer(handle, blocks)
}

async fn query_by_hash(
    State(index): State<Limited>,
    request: Request,
) -> Result<Response, HttpError> {
    index.query(request, answer_hashes).await
}

fn answer_hashes(handle: &Handle, body: HashQuery) -> Result<QueryResponse, HttpError> {
    if body.cache_salt.is_some() {
        return Err(HttpError::bad(
            "cache_salt cannot be applied to hashes: compute them with it, or use /query",
        ));
    }
    let scope = Scope {
        model: body.model,
        block_size: body.block_size,
        instance_id: body.instance_id,
    };
    let chosen = Chosen::of(&handle.workers(), &scope)?;
    chosen.answer(handle, body.block_hashes)
}

/// The workers that a query is about, which share one block size.
struct Chosen {
    block_size: BlockSize,
    workers: Vec<WorkerId>,
    /// The model is this adapter.
    lora: Option<String>,
}

impl Chosen {
    fn of(workers: &[WorkerView], scope: &Scope) -> Result<Self, HttpError> {
        let mut meant: Vec<_> = workers.iter().filter(|view| scope.means(view)).collect();
        if meant.is_empty() && scope.is_narrow() {
            return Err(HttpError {
                status: StatusCode::NOT_FOUND,
                message: "no such worker, or none that serves this model".to_owned(),
            });
        }
        let block_size = scope.block_size(&meant)?;
        // Blocks of another size match nothing, and would be counted in the wrong unit.
        meant.retain(|view| reported_size(view).is_none_or(|size| size == block_size));
        let lora = scope.model.as_ref().filter(|model| {
            let entries = meant.iter().filter_map(|view| view.entry.as_ref());
            let mut loras = entries.flat_map(|entry| &entry.loras);
            loras.any(|lora| lora.name == **model)
        });
        Ok(Self {
            block_size,
            workers: meant.iter().map(|view| view.instance_id.clone()).collect(),
            lora: lora.cloned(),
        })
    }

    fn answer(&self, handle: &Handle, blocks: Vec<LocalHash>) -> Result<QueryResponse, HttpError> {
        let query = IndexQuery {
            blocks,
            at_least: None,
        };
        match handle.query(&query) {
            IndexAnswer::Runs {
                position, sources, ..
            } => Ok(self.response(position, &sources)),
            IndexAnswer::Behind { .. } => Err(HttpError {
                status: StatusCode::SERVICE_UNAVAILABLE,
                message: "the log is not known yet".to_owned(),
            }),
        }
    }

    fn response(&self, position: LogPosition, sources: &[SourceAnswer]) -> QueryResponse {
        let size = self.block_size.tokens() as u64;
        let mut response = QueryResponse {
            position,
            scores: BTreeMap::new(),
            instances: BTreeMap::new(),
        };
        let meant = |answer: &&SourceAnswer| self.workers.contains(&answer.source.worker);
        for answer in sources.iter().filter(meant) {
            let Source { worker, dp_rank } = &answer.source;
            let gpu = u64::from(answer.run.gpu) * size;
            let cpu = gpu + u64::from(answer.run.cpu) * size;
            let disk = cpu + u64::from(answer.run.disk) * size;
            let instance = response.instances.entry(worker.clone()).or_default();
            instance.gpu = instance.gpu.max(gpu);
            instance.cpu = instance.cpu.max(cpu);
            instance.disk = instance.disk.max(disk);
            instance.longest_matched = instance.longest_matched.max(disk);
            instance.dp.insert(*dp_rank, gpu);
            let rank = RankMatch { gpu, cpu, disk };
            instance.rank_matches.insert(*dp_rank, rank);
            instance.states.insert(*dp_rank, answer.states.gpu);
            instance.engine_seqs.insert(*dp_rank, answer.engine_seq);
            let scores = response.scores.entry(worker.clone()).or_default();
            scores.insert(*dp_rank, gpu);
        }
        response
    }
}

async fn digest(State(index): State<Limited>) -> Result<Response, HttpError> {
    let slot = index.slot().await?;
    let digest = |handle: &Handle| Ok(Json(handle.digest()).into_response());
    Ok(index.respond(slot, digest).await)
}

async fn list_workers(State(index): State<Limited>) -> Result<Response, HttpError> {
    let slot = index.slot().await?;
    let workers = |handle: &Handle| Ok(Json(handle.workers()).into_response());
    Ok(index.respond(slot, workers).await)
}

async fn ready(State(handle): State<Handle>) -> (StatusCode, &'static str) {
    if handle.is_ready() {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "catching up")
    }
}

async fn metrics_text(State(index): State<Limited>) -> Result<Response, HttpError> {
    let slot = index.slot().await?;
    let text = |handle: &Handle| match handle.metrics_text() {
        Ok(mut text) => {
            text.extend_from_slice(build::metrics_text().as_bytes());
            Ok(([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response())
        }
        Err(error) => {
            warn!(%error, "metrics cannot be written");
            Ok(StatusCode::INTERNAL_SERVER_ERROR.into_response())
        }
    };
    Ok(index.respond(slot, text).await)
}

#[cfg(test)]
mod tests;
