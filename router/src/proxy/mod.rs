//! The public port: OpenAI's routes, and the probes.
//!
//! A request's body is read whole ([`body`]), planned ([`plan`]), looked up in the index, forwarded
//! to a worker ([`forward`]), and the answer is passed on as it comes ([`stream`]). Decisions are
//! made by pure code elsewhere; this module waits, sends and copies bytes.

mod attempt;
mod body;
mod call;
mod engine_client;
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
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state, map_response_with_state};
use axum::response::Response;
use axum::routing::{any, get, post};
use tokio::sync::Semaphore;
use warmroute_process::server::probes;

pub(crate) use body::BodyBudget;
use call::Call;
pub(crate) use engine_client::EngineClient;

use crate::audit::Auditor;
use crate::error::ProxyError;
use crate::fleet::Fleet;
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
    pub core: Arc<SharedCore>,
    pub fleet: Arc<Fleet>,
    pub index: IndexClient,
    pub auditor: Auditor,
    pub journal: Arc<Journal>,
    pub metrics: Arc<Metrics>,
    pub bodies: BodyBudget,
    pub engines: EngineClient,
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub policy: Policy,
    /// Long bodies that are parsed at the same time: one for each core.
    pub parsers: Arc<Semaphore>,
    pub ready: Arc<Ready>,
}

/// The public port's routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat).fallback(wrong_method))
        .route("/v1/completions", post(completions).fallback(wrong_method))
        .route("/v1/models", get(models::list).fallback(wrong_method))
        .route(
            "/v1/models/{*name}",
            get(models::one).fallback(wrong_method),
        )
        .route("/tokenize", post(pass).fallback(wrong_method))
        .route("/detokenize", post(pass).fallback(wrong_method))
        .route("/v1/{*path}", any(pass_plain))
        .route_layer(from_fn_with_state(Arc::clone(&app), hold_early_request))
        .merge(probes(get(|| async { StatusCode::OK }), get(readyz)))
        .fallback(unknown_path)
        .layer(map_response_with_state(
            Arc::clone(&app),
            close_when_leaving,
        ))
        .with_state(app)
}

/// Holds early requests until the router has its initial state.
async fn hold_early_request(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    app.ready.initialized().await;
    next.run(request).await
}

/// A router that leaves closes each connection after the answer, so that clients open the next one
/// to another router.
async fn close_when_leaving(State(app): State<Arc<App>>, mut response: Response) -> Response {
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

async fn pass(State(app): State<Arc<App>>, request: Request) -> Response {
    let route = match request.uri().path() {
        "/v1/embeddings" => RouteLabel::Embeddings,
        "/tokenize" | "/detokenize" => RouteLabel::Tokenize,
        _ => RouteLabel::Other,
    };
    passthrough::pass(&app, route, request).await
}

async fn pass_plain(app: State<Arc<App>>, request: Request) -> Response {
    if !may_pass(request.uri().path()) {
        unknown_path(app, request).await
    } else if [Method::GET, Method::POST].contains(request.method()) {
        pass(app, request).await
    } else {
        wrong_method(app, request).await
    }
}

/// Routes that change one engine. An operator calls each engine, not the least loaded one.
const OPERATOR_ROUTES: [&str; 2] = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];

/// Whether a path under `/v1/` may be sent to an engine as it stands. The HTTP client resolves
/// `..`, escapes and backslashes, which would leave `/v1/`: only plain segments pass.
fn may_pass(path: &str) -> bool {
    let is_plain = |segment: &str| {
        let mut bytes = segment.bytes();
        !segment.is_empty()
            && !segment.bytes().all(|byte| byte == b'.')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
    };
    path.split('/').skip(1).all(is_plain) && !OPERATOR_ROUTES.contains(&path)
}

async fn readyz(State(app): State<Arc<App>>) -> Response {
    app.ready.probe()
}

async fn wrong_method(State(app): State<Arc<App>>, request: Request) -> Response {
    Call::new(RouteLabel::Other, request.headers(), &app.metrics).refuse(&ProxyError::Method)
}

async fn unknown_path(State(app): State<Arc<App>>, request: Request) -> Response {
    let call = Call::new(RouteLabel::Other, request.headers(), &app.metrics);
    let path = request.uri().path().chars().take(128).collect();
    call.refuse(&ProxyError::UnknownPath(path))
}
