//! The indexer over HTTP, in the form of the Mooncake KV indexer RFC as the widest-used peer serves
//! it:
//! `POST /query`, `POST /query_by_hash`, `GET /workers`, `GET /dump`; and `/v1/digest`, probes and
//! metrics. No registration: workers come from the plane's registry.
//!
//! Counts are in tokens; `dp` is the GPU's alone, `rank_matches` has each rank's tiers. `cpu` and
//! `disk` are cumulative: a prefix that needs no lower tier than that. A source without credit
//! counts zero, with its state beside it.
//!
//! Requests need no credential, and their memory is not part of `--max-memory`: few bodies and
//! dumps are processed in parallel, the others wait for a slot, up to a deadline.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Json, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tracing::warn;
use warmroute_process::server;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::query::{IndexAnswer, IndexQuery, SourceAnswer, SourceState};
use warmroute_proto::{
    BlockSize, Change, DpRank, EngineSeq, LocalHash, LogPosition, Seed, Source, WorkerId,
};

use crate::service::Handle;
use warmroute_index::view::{SourceDump, WorkerView};

/// Maximum body: a million token ids as JSON.
const BODY_BYTES_MAX: usize = 16 << 20;

/// Parallel request bodies, and parallel dumps.
const BODIES_MAX: usize = 4;
const DUMPS_MAX: usize = 4;

/// Deadline for getting a slot.
const SLOT_DEADLINE: Duration = Duration::from_secs(5);

/// Deadline of a request, from the first byte of its body to the answer.
const BODY_DEADLINE: Duration = Duration::from_secs(10);

/// All routes of an indexer.
pub fn router(handle: Handle) -> Router {
    queries(handle.clone())
        .merge(workers(handle.clone()))
        .merge(probes(handle.clone()))
        .merge(metrics(handle))
}

/// `/query`, `/query_by_hash`, `/dump`, `/v1/digest`, which a router with an embedded indexer
/// serves on its admin port.
pub fn queries(handle: Handle) -> Router {
    Router::new()
        .route("/query", post(query))
        .route("/query_by_hash", post(query_by_hash))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn_with_state(slots(BODIES_MAX), with_slot))
        .route("/v1/digest", get(digest))
        .with_state(handle.clone())
        .merge(dumps(handle))
}

fn dumps(handle: Handle) -> Router {
    Router::new()
        .route("/dump", get(dump))
        .with_state((handle, slots(DUMPS_MAX)))
}

/// `/workers`.
pub fn workers(handle: Handle) -> Router {
    Router::new()
        .route("/workers", get(list_workers))
        .with_state(handle)
}

/// `/health` and `/readyz`, with their aliases. Liveness depends on nothing, readiness on log and
/// registry.
pub fn probes(handle: Handle) -> Router {
    server::probes(get(|| async { "ok" }), get(ready)).with_state(handle)
}

/// `/metrics`.
pub fn metrics(handle: Handle) -> Router {
    Router::new()
        .route("/metrics", get(metrics_text))
        .with_state(handle)
}

type RequestSlots = Arc<Semaphore>;

fn slots(parallel: usize) -> RequestSlots {
    Arc::new(Semaphore::new(parallel))
}

async fn slot(slots: RequestSlots) -> Result<OwnedSemaphorePermit, HttpError> {
    match timeout(SLOT_DEADLINE, slots.acquire_owned()).await {
        Ok(Ok(slot)) => Ok(slot),
        Ok(Err(_)) | Err(_) => Err(HttpError {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: "all request slots are in use: try again".to_owned(),
        }),
    }
}

/// Gets a slot before the body is read.
async fn with_slot(
    State(slots): State<RequestSlots>,
    request: Request,
    next: Next,
) -> Result<Response, HttpError> {
    let _slot = slot(slots).await?;
    let late = |_| HttpError {
        status: StatusCode::REQUEST_TIMEOUT,
        message: format!("the body takes longer than {BODY_DEADLINE:?}"),
    };
    timeout(BODY_DEADLINE, next.run(request))
        .await
        .map_err(late)
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

/// Which workers are meant. The RFC says `model`, its widest-used implementation `model_name`.
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

async fn query(
    State(handle): State<Handle>,
    body: Result<Json<TokensQuery>, JsonRejection>,
) -> Result<Json<QueryResponse>, HttpError> {
    let Json(body) = body?;
    let scope = Scope {
        model: body.model,
        block_size: body.block_size,
        instance_id: body.instance_id,
    };
    let chosen = Chosen::of(&handle.workers(), &scope)?;
    let lora = body.lora_name.as_deref().or(chosen.lora.as_deref());
    let seed = Seed::new(lora, body.cache_salt.as_deref());
    let blocks = local_hashes(&body.token_ids, chosen.block_size, seed);
    chosen.answer(&handle, blocks).map(Json)
}

async fn query_by_hash(
    State(handle): State<Handle>,
    body: Result<Json<HashQuery>, JsonRejection>,
) -> Result<Json<QueryResponse>, HttpError> {
    let Json(body) = body?;
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
    chosen.answer(&handle, body.block_hashes).map(Json)
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

async fn digest(State(handle): State<Handle>) -> Response {
    Json(handle.digest()).into_response()
}

async fn list_workers(State(handle): State<Handle>) -> Response {
    Json(handle.workers()).into_response()
}

async fn ready(State(handle): State<Handle>) -> (StatusCode, &'static str) {
    if handle.is_ready() {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "catching up")
    }
}

async fn metrics_text(State(handle): State<Handle>) -> Response {
    match handle.metrics_text() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            warn!(%error, "metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// One JSON value a line: each source, then its image as changes, parents first. Sources are
/// dumped one by one as the body is read, each of one moment: memory is bounded by the largest.
async fn dump(
    State((handle, slots)): State<(Handle, RequestSlots)>,
) -> Result<impl IntoResponse, HttpError> {
    let slot = slot(slots).await?;
    let sources = handle.digest().sources;
    let lines = sources.into_iter().flat_map(move |digest| {
        let source = Source {
            worker: digest.worker,
            dp_rank: digest.dp_rank,
        };
        handle.dump(&source).into_iter().flat_map(dump_lines)
    });
    let lines = SlotLines { lines, _slot: slot };
    let body = Body::from_stream(futures_util::stream::iter(lines));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body))
}

/// Lines of a body that holds its slot until it ends.
struct SlotLines<L> {
    lines: L,
    _slot: OwnedSemaphorePermit,
}

impl<L: Iterator> Iterator for SlotLines<L> {
    type Item = L::Item;

    fn next(&mut self) -> Option<L::Item> {
        self.lines.next()
    }
}

fn dump_lines(dump: SourceDump) -> impl Iterator<Item = Result<Bytes, serde_json::Error>> {
    let SourceDump { digest, changes } = dump;
    let changes = changes
        .into_iter()
        .flatten()
        .map(|change| line(&change_value(&change)));
    std::iter::once_with(move || line(&json!({ "source": digest }))).chain(changes)
}

fn change_value(change: &Change) -> Value {
    match change {
        Change::Stored {
            parent,
            blocks,
            tier,
        } => json!({ "stored": { "tier": tier, "parent": parent, "blocks": blocks } }),
        Change::Removed { blocks, tier } => {
            json!({ "removed": { "tier": tier, "blocks": blocks } })
        }
        Change::Cleared { tier } => json!({ "cleared": { "tier": tier } }),
    }
}

fn line(value: &Value) -> Result<Bytes, serde_json::Error> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line.into())
}

#[cfg(test)]
mod tests;
