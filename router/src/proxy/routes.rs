//! The public port's routes, and what applies to all of them: keys of tenants, early requests, web
//! pages of other origins, and the end of connections to a router that leaves.
//!
//! Only the routes listed here, and those that an operator adds, reach an engine. Engines have
//! others that change them for all clients, such as those that load adapters.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{MethodRouter, get, post};
use warmroute_process::server::probes;

use super::App;
use super::call::Call;
use super::explanation::Explanation;
use super::peer_hints::TenantName;
use super::{generate, models, passthrough, stored};
use crate::error::ProxyError;
use crate::metrics::RouteLabel;
use crate::openai;
use crate::settings::is_plain_path;
use crate::tenants::{DoorEntry, DoorRefusal, TenantVisit};

/// Forwarded to a worker as they are. `POST` only.
pub(super) const FORWARDED: [&str; 20] = [
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/moderations",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/tokenize",
    "/detokenize",
];

/// Headers of the router that web pages may read.
const EXPOSED: &str = "x-request-id, x-correlation-id, retry-after, x-warmroute-worker, \
    x-warmroute-dp-rank, x-warmroute-overlap-blocks, x-warmroute-predicted-blocks, \
    x-warmroute-basis, x-warmroute-index-state, x-warmroute-tier-states";

/// Seconds for which a browser keeps the answer to a preflight request.
const PREFLIGHT_SECS: u64 = 600;

/// Served without a key, besides the probes.
const OPEN: [&str; 1] = ["/ping"];

/// The routes of which the router knows more than that they are forwarded.
pub(super) fn guarded() -> [(&'static str, MethodRouter<Arc<App>>); 12] {
    [
        ("/v1/chat/completions", post(chat)),
        ("/v1/completions", post(completions)),
        ("/v1/responses", post(responses)),
        ("/v1/messages", post(messages)),
        ("/v1/embeddings", post(embeddings)),
        ("/classify", post(embeddings)),
        ("/pooling", post(pooling)),
        ("/v1/models", get(models::list)),
        ("/v1/models/{*name}", get(models::one)),
        ("/v1/responses/{id}", get(stored::find)),
        ("/v1/responses/{id}/cancel", post(stored::find)),
        ("/version", get(pass)),
    ]
}

pub(crate) fn router(app: Arc<App>) -> Router {
    let forwarded = FORWARDED.into_iter().map(|path| (path, post(pass)));
    let routes = OPEN.into_iter().map(|path| (path, get(alive).post(alive)));
    let routes = routes.chain(forwarded).chain(guarded());
    let routes = routes.fold(Router::new(), |router, (path, methods)| {
        router.route(path, methods.fallback(wrong_method))
    });
    routes
        .merge(probes(get(alive), get(readyz)))
        .fallback(pass_added)
        .layer(from_fn_with_state(Arc::clone(&app), front))
        .with_state(app)
}

/// Refuses a request without its tenant's key. Holds a request that arrives before the router has
/// its initial state, answers preflight requests and completes the headers of answers. A router that
/// leaves closes each connection of HTTP/1.1 after the answer, so that clients open the next one to
/// another router. Connections of HTTP/2 end when it accepts no more.
async fn front(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).cloned();
    let is_http1 = request.version() <= Version::HTTP_11;
    let mut response = match origin.as_ref().and_then(|_| preflight(&app, &request)) {
        Some(answer) => answer,
        None if is_probe(request.uri().path()) => next.run(request).await,
        None => {
            // Before it is counted: this router's part of the limits may not be known yet.
            if !app.ready.is_initialized() && app.tenants.knows(request.headers()) {
                app.ready.initialized().await;
            }
            admit(&app, request, next).await
        }
    };
    if let Some(origin) = origin {
        allow_origin(&app, response.headers_mut(), origin);
    }
    if is_http1 && app.ready.is_leaving() {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}

/// Serves a request with a tenant's key, or without tenants.
async fn admit(app: &App, request: Request, next: Next) -> Response {
    match entered(app, request) {
        Ok(request) => {
            let visit = request.extensions().get::<Arc<TenantVisit>>();
            if let Some(visit) = visit.filter(|_| is_free(request.uri().path())) {
                visit.refund_request();
            }
            next.run(request).await
        }
        Err(refused) => *refused,
    }
}

/// A request with a tenant's key, or without tenants, and what is known of its client. Else the
/// answer to it.
pub(super) fn entered(app: &App, mut request: Request) -> Result<Request, Box<Response>> {
    let DoorEntry { visit, settings } = match app.tenants.enter(request.headers_mut()) {
        Ok(entry) => entry,
        Err(refusal) => return Err(Box::new(turned_away(app, refusal, request))),
    };
    let explanation = Explanation::take(&settings, request.headers_mut());
    // Readers take the default where there is none.
    if explanation != Explanation::default() {
        request.extensions_mut().insert(explanation);
    }
    if let Some(visit) = visit {
        request.extensions_mut().insert(visit);
    } else if let Some(tenant) = TenantName::hinted(&settings, &request) {
        request.extensions_mut().insert(tenant);
    }
    Ok(request)
}

/// Whether a request uses none of its tenant's rates of requests: the router answers it itself.
fn is_free(path: &str) -> bool {
    path == "/v1/models" || path.starts_with("/v1/models/")
}

/// The answer to a request without a valid key, or beyond its tenant's rates.
fn turned_away(app: &App, refusal: DoorRefusal, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    app.bodies.skip(&parts.headers, body);
    let mut call = Call::new(RouteLabel::Other, &parts, &app.sinks);
    call.report.tenant = refusal.tenant;
    let mut response = call.refuse(&refusal.error.into());
    refusal.rates.write(response.headers_mut());
    response
}

/// Whether the path is served without any worker or peer.
fn is_probe(path: &str) -> bool {
    OPEN.contains(&path) || warmroute_process::server::is_probe(path)
}

/// The answer to a browser that asks whether a page may send a request.
fn preflight(app: &App, request: &Request) -> Option<Response> {
    let headers = request.headers();
    let asks = request.method() == Method::OPTIONS
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let origin = headers.get(header::ORIGIN)?;
    if !asks || !app.settings.current().allows_origin(origin) {
        return None;
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    let answer = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST");
    answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    let seconds = HeaderValue::from(PREFLIGHT_SECS);
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, seconds);
    if let Some(wanted) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    Some(response)
}

/// Where the operator names origins, the router decides and not the engine.
fn allow_origin(app: &App, answer: &mut HeaderMap, origin: HeaderValue) {
    let settings = app.settings.current();
    if settings.cors_origins.is_empty() {
        return;
    }
    answer.remove(header::ACCESS_CONTROL_ALLOW_CREDENTIALS);
    answer.append(header::VARY, HeaderValue::from_static("origin"));
    if settings.allows_origin(&origin) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        let exposed = HeaderValue::from_static(EXPOSED);
        answer.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    } else {
        answer.remove(header::ACCESS_CONTROL_ALLOW_ORIGIN);
    }
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::generate(&app, openai::PromptRoute::ChatCompletions, request).await
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::generate(&app, openai::PromptRoute::Completions, request).await
}

async fn responses(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::generate(&app, openai::PromptRoute::Responses, request).await
}

async fn messages(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::generate(&app, openai::PromptRoute::Messages, request).await
}

async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::generate(&app, openai::PromptRoute::Embeddings, request).await
}

async fn pooling(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::generate(&app, openai::PromptRoute::Pooling, request).await
}

async fn pass(State(app): State<Arc<App>>, request: Request) -> Response {
    let route = match request.uri().path() {
        "/tokenize" | "/detokenize" => RouteLabel::Tokenize,
        _ => RouteLabel::Other,
    };
    passthrough::pass(&app, route, request).await
}

/// The routes of `extra_routes`.
async fn pass_added(app: State<Arc<App>>, request: Request) -> Response {
    let path = request.uri().path();
    if let Some(target) = without_slash(&app, request.uri()) {
        Redirect::temporary(&target).into_response()
    } else if !is_plain_path(path) || !app.settings.current().adds_route(path) {
        unknown_path(&app, request)
    } else if request.method() == Method::POST {
        generate::generate_added(&app, request).await
    } else if request.method() == Method::GET {
        pass(app, request).await
    } else {
        wrong_method(app, request).await
    }
}

/// The route that a path names with a slash behind it, which engines redirect to that route.
fn without_slash(app: &App, uri: &Uri) -> Option<String> {
    let path = uri
        .path()
        .strip_suffix('/')
        .filter(|path| is_plain_path(path))?;
    let mut known = FORWARDED
        .into_iter()
        .chain(guarded().map(|(route, _)| route));
    let is_known = known.any(|route| route == path) || app.settings.current().adds_route(path);
    let query = uri.query().map(|query| format!("?{query}"));
    is_known.then(|| format!("{path}{}", query.unwrap_or_default()))
}

async fn alive() -> StatusCode {
    StatusCode::OK
}

async fn readyz(State(app): State<Arc<App>>) -> Response {
    app.ready.probe(app.index_fault())
}

async fn wrong_method(State(app): State<Arc<App>>, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    Call::new(RouteLabel::Other, &parts, &app.sinks).refuse(&ProxyError::Method)
}

fn unknown_path(app: &App, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    let call = Call::new(RouteLabel::Other, &parts, &app.sinks);
    let path = parts.uri.path().chars().take(128).collect();
    call.refuse(&ProxyError::UnknownPath(path))
}
