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
//! port is bound to loopback. Their memory is not part of `--max-memory`, and their work must not
//! delay routers: few bodies and dumps are read in parallel, one of each kind is worked at, and one
//! of each page is made; the others wait. What is large and needs no lock of the index runs on a
//! thread of low priority.

mod dump;
mod key_file;
mod query;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Json, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tracing::warn;
use warmroute_process::access::{RouteAccess, RouteTable};
use warmroute_process::shared_page::{SharedPage, made};
use warmroute_process::{blocking, build};

use crate::service::Handle;

pub use key_file::{ApiKeys, KeyFileError};

/// Maximum body: a million token ids as JSON.
const BODY_BYTES_MAX: usize = 16 << 20;

/// Parallel request bodies, and parallel dumps. More would only share the processors with the queries
/// of routers.
const BODIES_MAX: usize = 2;
const DUMPS_MAX: usize = 1;

/// Parallel work on requests of one kind. A kind does not wait for another: what runs on a thread of
/// low priority may take long.
const WORK_MAX: usize = 1;

/// Bytes of a body that are taken in between two rests, and the length of a rest. A body comes at
/// 64 MB/s at most. Without rests the bodies of fast clients would fill the processors.
const BODY_TURN_BYTES: usize = 64 << 10;
const BODY_REST: Duration = Duration::from_millis(1);

const JSON: &str = "application/json";

/// Deadline for getting a slot.
const SLOT_DEADLINE: Duration = Duration::from_secs(5);

/// Deadline for a request's body.
const BODY_DEADLINE: Duration = Duration::from_secs(10);

/// All routes of an indexer.
pub fn routes(handle: &Handle) -> RouteTable {
    let page = |path, access, method| {
        let table = RouteTable::default().route(path, access, method);
        table.with_state(&IndexPage::new(handle))
    };
    let probes = RouteTable::default().probes(&get(|| async { "ok" }), &get(ready));
    queries(handle)
        .merge(page("/v1/digest", RouteAccess::Open, get(digest)))
        .merge(page("/workers", RouteAccess::Read, get(list_workers)))
        .merge(page("/metrics", RouteAccess::Open, get(metrics_text)))
        .merge(probes.with_state(handle))
}

/// `/query`, `/query_by_hash`, `/dump`, `/v1/digest`, which a router with an embedded indexer
/// serves on its admin port.
pub fn embedded(handle: &Handle) -> RouteTable {
    // It names workers and counts as the metrics do.
    let digests = RouteTable::default().route("/v1/digest", RouteAccess::Read, get(digest));
    queries(handle).merge(digests.with_state(&IndexPage::new(handle)))
}

fn queries(handle: &Handle) -> RouteTable {
    let queries = RouteTable::default()
        .route("/query", RouteAccess::Read, post(query::by_tokens))
        .route("/query_by_hash", RouteAccess::Read, post(query::by_hashes));
    let dumps = RouteTable::default().route("/dump", RouteAccess::Read, get(dump::dump));
    queries
        .with_state(&Limited::new(handle, BODIES_MAX))
        .merge(dumps.with_state(&Limited::new(handle, DUMPS_MAX)))
}

/// The index for requests of one kind, few of which are processed in parallel.
#[derive(Clone)]
struct Limited {
    handle: Handle,
    slots: Arc<Semaphore>,
    work: Arc<Semaphore>,
}

impl Limited {
    fn new(handle: &Handle, parallel: usize) -> Self {
        Self {
            handle: handle.clone(),
            slots: Arc::new(Semaphore::new(parallel)),
            work: Arc::new(Semaphore::new(WORK_MAX)),
        }
    }

    async fn slot(&self) -> Result<Slot, HttpError> {
        let slots = Arc::clone(&self.slots);
        match timeout(SLOT_DEADLINE, slots.acquire_owned()).await {
            Ok(Ok(slot)) => Ok(Slot(Arc::new(slot))),
            Ok(Err(_)) | Err(_) => {
                self.handle.turned_away();
                Err(HttpError {
                    status: StatusCode::SERVICE_UNAVAILABLE,
                    message: "all request slots are in use: try again".to_owned(),
                })
            }
        }
    }

    /// Reads the index on a blocking thread.
    async fn read<T: Send + 'static>(
        &self,
        slot: &Slot,
        read: impl FnOnce(&Handle) -> T + Send + 'static,
    ) -> Result<T, HttpError> {
        let handle = self.handle.clone();
        let (place, slot) = (self.place().await, slot.clone());
        let result = blocking::run(move || {
            let result = read(&handle);
            drop((place, slot));
            result
        });
        result.await.map_err(HttpError::internal)
    }

    /// Computes on a thread of low priority, which must not hold the index's lock.
    async fn compute<T: Send + 'static>(
        &self,
        slot: &Slot,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, HttpError> {
        let (place, slot) = (self.place().await, slot.clone());
        let result = blocking::run_low(move || {
            let result = work();
            drop((place, slot));
            result
        });
        result.await.map_err(HttpError::internal)
    }

    /// It is waited for as long as the other requests of this kind take. `None` is never returned,
    /// because the semaphore is never closed.
    async fn place(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.work).acquire_owned().await.ok()
    }
}

/// A request's slot. Work that outlives the request keeps it.
#[derive(Clone)]
struct Slot(#[expect(dead_code, reason = "it is held")] Arc<OwnedSemaphorePermit>);

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
            sleep(BODY_REST).await;
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

    fn internal(error: impl std::fmt::Display) -> Self {
        warn!(%error, "a request failed");
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            message: "the request failed".to_owned(),
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

/// A page about all sources or workers. Requests that wait for it share one.
#[derive(Clone)]
struct IndexPage {
    handle: Handle,
    page: SharedPage,
}

impl IndexPage {
    fn new(handle: &Handle) -> Self {
        Self {
            handle: handle.clone(),
            page: SharedPage::default(),
        }
    }

    async fn get(
        &self,
        kind: &'static str,
        make: impl FnOnce(&Handle) -> anyhow::Result<Vec<u8>> + Send + 'static,
    ) -> Result<Response, HttpError> {
        let handle = self.handle.clone();
        let made = made(move || make(&handle));
        match self.page.get(made).await {
            Some(page) => Ok(([(header::CONTENT_TYPE, kind)], page).into_response()),
            None => Err(HttpError::internal("the page cannot be made")),
        }
    }
}

async fn digest(State(index): State<IndexPage>) -> Result<Response, HttpError> {
    let json = |handle: &Handle| Ok(serde_json::to_vec(&handle.digest())?);
    index.get(JSON, json).await
}

async fn list_workers(State(index): State<IndexPage>) -> Result<Response, HttpError> {
    let json = |handle: &Handle| Ok(serde_json::to_vec(&handle.workers())?);
    index.get(JSON, json).await
}

async fn metrics_text(State(index): State<IndexPage>) -> Result<Response, HttpError> {
    let text = |handle: &Handle| {
        let mut text = handle.metrics_text()?;
        text.extend_from_slice(build::metrics_text().as_bytes());
        Ok(text)
    };
    index.get(prometheus::TEXT_FORMAT, text).await
}

async fn ready(State(handle): State<Handle>) -> (StatusCode, String) {
    match handle.readiness() {
        Ok(()) => (StatusCode::OK, "ready".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why.to_string()),
    }
}

#[cfg(test)]
mod tests;
