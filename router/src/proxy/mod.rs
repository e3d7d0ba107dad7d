//! The public port: OpenAI's routes, and the two probes.
//!
//! A request is read whole, understood ([`plan`]), put to the index, given to a worker ([`forward`]),
//! and its answer passed on as it comes ([`stream`]). The parts that decide are pure and live
//! elsewhere; here is what waits, sends and copies bytes.

mod attempt;
mod body;
mod call;
mod forward;
mod generate;
mod headers;
mod models;
mod passthrough;
mod plan;
mod respond;
mod stream;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state, map_response_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get, post};
use tokio::sync::Semaphore;
use warmroute_process::server::probes;
use warmroute_proto::BlockSize;

pub(crate) use body::Budget;
use call::Call;

use crate::audit::Auditor;
use crate::error::ApiError;
use crate::fleet::{Fleet, ModelCatalog};
use crate::index_client::IndexClient;
use crate::journal::Journal;
use crate::metrics::{Metrics, RouteLabel};
use crate::openai;
use crate::ready::Ready;
use crate::route::Policy;
use crate::shared_core::SharedCore;
use crate::tokenize::Tokenizer;

/// Everything that a request needs.
pub(crate) struct App {
    pub desk: Arc<SharedCore>,
    pub fleet: Arc<Fleet>,
    pub index: IndexClient,
    pub auditor: Arc<Auditor>,
    pub journal: Arc<Journal>,
    pub metrics: Arc<Metrics>,
    pub budget: Budget,
    pub client: reqwest::Client,
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub policy: Policy,
    /// Long bodies that are read at once: one a core.
    pub readers: Arc<Semaphore>,
    pub ready: Arc<Ready>,
}

impl App {
    /// Without a model there is still an answer to "how large is a block?".
    fn block_size(&self, catalog: &ModelCatalog, model: &str) -> BlockSize {
        let known = catalog.models.get(model);
        known.map_or(plan::ASSUMED, plan::block_size)
    }

    fn route(path: &str) -> RouteLabel {
        match path {
            "/v1/embeddings" => RouteLabel::Embeddings,
            "/tokenize" | "/detokenize" => RouteLabel::Tokenize,
            _ => RouteLabel::Other,
        }
    }
}

/// The public port's routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat).fallback(method))
        .route("/v1/completions", post(completions).fallback(method))
        .route("/v1/models", get(list_models).fallback(method))
        .route("/v1/models/{*name}", get(one_model).fallback(method))
        .route("/tokenize", post(pass).fallback(method))
        .route("/detokenize", post(pass).fallback(method))
        .route("/v1/{*path}", any(pass_some))
        .route_layer(from_fn_with_state(Arc::clone(&app), from_the_beginning))
        .merge(probes(get(health), get(readyz)))
        .fallback(unknown)
        .layer(map_response_with_state(Arc::clone(&app), last_answer))
        .with_state(app)
}

/// Whoever comes before there is anything to decide by waits for it.
async fn from_the_beginning(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    app.ready.begun().await;
    next.run(request).await
}

/// A router that leaves sends its clients' next requests elsewhere: each of its answers is the last of
/// its connection.
async fn last_answer(State(app): State<Arc<App>>, mut response: Response) -> Response {
    if app.ready.is_leaving() {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::generate(&app, openai::PromptRoute::ChatCompletions, request).await
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::generate(&app, openai::PromptRoute::Completions, request).await
}

async fn list_models(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    models::list(&app, &headers)
}

async fn one_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    models::one(&app, &headers, &name)
}

async fn pass(State(app): State<Arc<App>>, request: Request) -> Response {
    let route = App::route(request.uri().path());
    passthrough::pass(&app, route, request).await
}

async fn pass_some(State(app): State<Arc<App>>, request: Request) -> Response {
    if !may_pass(request.uri().path()) {
        return unknown(State(app), request).await;
    }
    if *request.method() == Method::GET || *request.method() == Method::POST {
        return pass(State(app), request).await;
    }
    method(State(app), request).await
}

/// Routes that change one engine: an operator asks all of them, not whichever is idle.
const OPERATORS_ROUTES: [&str; 2] = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];

/// May a path under `/v1/` reach an engine as it stands? The client that sends it on resolves `..`,
/// its escapes and backslashes, and would so get out of `/v1/`: only plain segments pass.
fn may_pass(path: &str) -> bool {
    let is_plain = |segment: &str| {
        let mut bytes = segment.bytes();
        !segment.is_empty()
            && !segment.bytes().all(|byte| byte == b'.')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
    };
    let path_is_plain = path.split('/').skip(1).all(is_plain);
    path_is_plain && !OPERATORS_ROUTES.contains(&path)
}

/// Alive as long as it answers; never depends on anybody else.
async fn health() -> StatusCode {
    StatusCode::OK
}

async fn readyz(State(app): State<Arc<App>>) -> Response {
    match app.ready.missing() {
        None => StatusCode::OK.into_response(),
        Some(what) => (StatusCode::SERVICE_UNAVAILABLE, what).into_response(),
    }
}

async fn method(State(app): State<Arc<App>>, request: Request) -> Response {
    let call = Call::new(
        RouteLabel::Other,
        request.headers(),
        Arc::clone(&app.metrics),
    );
    call.refuse(&ApiError::Method)
}

async fn unknown(State(app): State<Arc<App>>, request: Request) -> Response {
    let call = Call::new(
        RouteLabel::Other,
        request.headers(),
        Arc::clone(&app.metrics),
    );
    let path = request.uri().path().chars().take(128).collect();
    call.refuse(&ApiError::UnknownPath(path))
}
