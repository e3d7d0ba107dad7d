//! Requests that a gateway sends to their engines: the router chooses, and sees both bodies pass.
//!
//! A [`GatewayLink`] stands for the connection to an engine. The request's phases are those of the
//! proxy, up to the choice and from the engine's head on. In between the gateway has the request: it
//! tries the endpoints of a list in order and names the one that answered, which the slot follows.
//! The router cannot move or repeat a request that the gateway has.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, Method, Response as HttpResponse, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use hyper_util::client::legacy;
use tokio::sync::oneshot;
use warmroute_process::log_limit::LogLimit;
use warmroute_proto::Source;

use super::App;
use super::attempt::{EngineHead, Placement};
use super::call::Call;
use super::engine_body::{EngineBody, GatewayBody};
use super::engine_client::EngineResponse;
use super::forward::{
    ATTEMPTS_MAX, AttemptHistory, EngineAnswer, ForwardedRequest, Routing, all_ranks,
};
use super::queueing::QueuePass;
use super::{generate, passthrough, routes, stored};
use crate::error::ProxyError;
use crate::fleet::{EndpointTable, RequestResult};
use crate::metrics::{RetryReason, RouteLabel};
use crate::openai::PromptRoute;
use crate::route::Terms;

/// Written by Envoy on the answers of engines, and not on its own.
pub(crate) const UPSTREAM_TIME: HeaderName =
    HeaderName::from_static("x-envoy-upstream-service-time");

static ELSEWHERE: LogLimit = LogLimit::new();
static NAMED: LogLimit = LogLimit::new();

/// The way of one request through a gateway; an extension of it.
#[derive(Clone)]
pub(crate) struct GatewayLink(Arc<LinkState>);

struct LinkState {
    /// Engines are reached by their addresses alone.
    by_address: bool,
    /// The endpoints that may be chosen; `None`: any.
    subset: Option<BTreeSet<SocketAddr>>,
    /// Taken when the request is sent.
    ends: Mutex<Option<LinkEnds>>,
}

struct LinkEnds {
    routed: oneshot::Sender<RoutedRequest>,
    answer: oneshot::Receiver<GatewayAnswer>,
}

/// The gateway's ends of a link.
pub(crate) struct GatewayEnds {
    pub routed: oneshot::Receiver<RoutedRequest>,
    pub answer: oneshot::Sender<GatewayAnswer>,
}

/// A request whose endpoints are chosen.
pub(crate) struct RoutedRequest {
    /// In order of preference, with commas.
    pub endpoints: String,
    /// As the engine gets them.
    pub headers: HeaderMap,
    pub body: Bytes,
    pub chosen: ChosenEndpoint,
}

/// The first endpoint of a request, and why it is.
pub(crate) struct ChosenEndpoint {
    pub source: Source,
    pub url: Arc<str>,
    pub overlap_blocks: u32,
    pub predicted_blocks: u32,
    pub terms: Terms,
}

/// The head of an answer, as the gateway got it.
pub(crate) struct GatewayAnswer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// The endpoint that answered, if the gateway names it.
    pub served: Option<String>,
    pub body: GatewayBody,
}

/// Marks an answer to the client as an engine's; an extension of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FromGateway;

impl GatewayLink {
    /// `subset`: the endpoints that may be chosen. Those that are no addresses are none of the
    /// fleet.
    pub(crate) fn new(subset: Option<Vec<String>>) -> (Self, GatewayEnds) {
        Self::with_reach(true, subset)
    }

    /// For a gateway that sends to an engine's URL, whatever that names.
    pub(crate) fn by_url(subset: Option<Vec<String>>) -> (Self, GatewayEnds) {
        Self::with_reach(false, subset)
    }

    fn with_reach(by_address: bool, subset: Option<Vec<String>>) -> (Self, GatewayEnds) {
        let (to_gateway, routed) = oneshot::channel();
        let (answer, from_gateway) = oneshot::channel();
        let state = LinkState {
            by_address,
            subset: subset.map(|names| names.iter().filter_map(|name| name.parse().ok()).collect()),
            ends: Mutex::new(Some(LinkEnds {
                routed: to_gateway,
                answer: from_gateway,
            })),
        };
        (Self(Arc::new(state)), GatewayEnds { routed, answer })
    }

    /// Hands the request over. Returns the answer to come; `None` if it was handed over before.
    fn send(
        &self,
        request: RoutedRequest,
    ) -> Option<impl Future<Output = Result<EngineResponse, legacy::Error>> + use<>> {
        let ends = self.0.ends.lock();
        let ends = ends.unwrap_or_else(PoisonError::into_inner).take()?;
        // A gateway that has left drops this request too.
        drop(ends.routed.send(request));
        Some(async {
            match ends.answer.await {
                Ok(answer) => Ok(answer.into_response()),
                Err(_) => std::future::pending().await,
            }
        })
    }
}

/// The endpoint that answered; an extension of the engine's response.
#[derive(Clone)]
struct ServedEndpoint(String);

impl GatewayAnswer {
    fn into_response(self) -> EngineResponse {
        let mut response = HttpResponse::new(EngineBody::Gateway(self.body));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response.extensions_mut().insert(FromGateway);
        if let Some(served) = self.served {
            response.extensions_mut().insert(ServedEndpoint(served));
        }
        response
    }
}

/// Serves a request of a gateway, which has a [`GatewayLink`]. An answer without [`FromGateway`] is
/// the router's own, in place of an engine's.
pub(crate) async fn serve(app: Arc<App>, request: Request) -> Response {
    if !app.ready.is_initialized() && app.tenants.knows(request.headers()) {
        app.ready.initialized().await;
    }
    let request = match routes::entered(&app, request) {
        Ok(request) => request,
        Err(refused) => return *refused,
    };
    let path = request.uri().path();
    if request.method() == Method::GET && path.starts_with("/v1/responses/") {
        return stored::find(State(app), request).await;
    }
    if request.method() != Method::POST {
        return passthrough::pass(&app, RouteLabel::Other, request).await;
    }
    let route = PromptRoute::ALL
        .into_iter()
        .find(|route| route.path() == path);
    match route {
        Some(route) => generate::generate(&app, route, request).await,
        None if path == "/classify" => {
            generate::generate(&app, PromptRoute::Embeddings, request).await
        }
        None if path == "/invocations" => generate::generate_added(&app, request).await,
        None if path.starts_with("/v1/responses/") && path.ends_with("/cancel") => {
            stored::find(State(app), request).await
        }
        None => passthrough::pass(&app, RouteLabel::Other, request).await,
    }
}

impl App {
    /// Chooses, hands the request to its gateway, and waits for the head of the answer.
    pub(super) async fn send_by_gateway(
        &self,
        call: &mut Call,
        link: &GatewayLink,
        request: &ForwardedRequest,
        routing: &mut Routing,
        pass: &mut QueuePass,
    ) -> Result<EngineAnswer, ProxyError> {
        self.renew_hint(routing, &request.headers);
        let catalog = self.fleet.catalog();
        let endpoints = &catalog.endpoints;
        let excluded = endpoints.excluded(link.0.by_address, link.0.subset.as_ref());
        let mut placement = loop {
            let tried = [&*routing.excluded.sources, &*excluded].concat();
            match self.admit(routing, &tried, call) {
                Ok(placement) => break placement,
                Err(_) if routing.excluded.end_hint() => {}
                Err(error) => {
                    warn_of_names(endpoints);
                    return Err(error.into());
                }
            }
        };
        pass.admitted(self, routing, call);
        if let Some(trace) = &mut call.report.trace {
            trace.sent();
        }
        let routed = self.routed(request, &placement, endpoints);
        let answer = link.send(routed);
        let answer = answer.ok_or(ProxyError::Internal("the gateway has the request"))?;
        let head = self.gateway_head(routing, &mut placement, answer).await;
        let mut history = AttemptHistory::last();
        let mut head = match head {
            Ok(head) => head,
            Err(error) => {
                self.failed(&mut placement, &error, &mut history);
                placement.slot.fail();
                return history.exhausted();
            }
        };
        if is_gateways_own(&head) {
            placement.tracked.report(RequestResult::Broken);
            placement.slot.fail();
            return Ok(EngineAnswer { head, placement });
        }
        if let Some(ServedEndpoint(served)) = head.response.extensions_mut().remove() {
            self.follow(routing, call, &mut placement, &served, &mut history);
        }
        match self.judge(routing, &mut history, EngineAnswer { head, placement }) {
            Ok(answer) => Ok(*answer),
            // Not without a further attempt.
            Err(_) => history.exhausted(),
        }
    }

    /// The request as its engine gets it, with the endpoints in order of preference: the chosen one,
    /// and the best of other workers that can take the request as it is.
    fn routed(
        &self,
        request: &ForwardedRequest,
        placement: &Placement,
        endpoints: &EndpointTable,
    ) -> RoutedRequest {
        let decision = &placement.decision;
        let headers = self.engine_headers(request, &decision.source, &decision.url);
        let mut others: Vec<_> = decision.compared.iter().collect();
        others.sort_by(|one, other| one.cost.total_cmp(&other.cost));
        let mut workers = vec![decision.source.worker.clone()];
        let core = self.core.core();
        for other in others.iter().filter_map(|one| core.source(one.source)) {
            if workers.len() == ATTEMPTS_MAX {
                break;
            }
            if !workers.contains(&other.worker) {
                workers.push(other.worker.clone());
            }
        }
        drop(core);
        let addresses = workers.iter().filter_map(|worker| {
            let endpoint = endpoints.get(worker)?;
            let source = Source {
                worker: worker.clone(),
                dp_rank: decision.source.dp_rank,
            };
            // Each gets the request with the headers for the first: the rank, and a key if it has
            // one of its own.
            let is_chosen = *worker == decision.source.worker;
            let fits = is_chosen
                || endpoint.ranks > source.dp_rank.0
                    && self.engine_headers(request, &source, &endpoint.url) == headers;
            fits.then(|| endpoint.address.to_string())
        });
        let addresses: Vec<String> = addresses.collect();
        RoutedRequest {
            endpoints: addresses.join(","),
            headers,
            body: request.body.clone(),
            chosen: ChosenEndpoint {
                source: decision.source.clone(),
                url: Arc::clone(&decision.url),
                overlap_blocks: decision.overlap_blocks,
                predicted_blocks: decision.predicted_blocks,
                terms: decision.chosen,
            },
        }
    }

    /// Moves the slot to the worker that answered, if it is not the first of the list. One at which
    /// no slot can be opened has the request unaccounted.
    fn follow(
        &self,
        routing: &Routing,
        call: &mut Call,
        placement: &mut Placement,
        served: &str,
        history: &mut AttemptHistory,
    ) {
        let catalog = self.fleet.catalog();
        let endpoints = &catalog.endpoints;
        let source = &placement.decision.source;
        let chosen = endpoints.get(&source.worker);
        if chosen.is_some_and(|endpoint| *endpoint.address == *served) {
            return;
        }
        let at = endpoints.worker_at(served);
        let moved = at.and_then(|(worker, _)| {
            let served_by = Source {
                worker: worker.clone(),
                dp_rank: source.dp_rank,
            };
            let mut others = self.fleet.other_sources(worker);
            let ranks = all_ranks(&served_by, &self.fleet);
            others.extend(ranks.filter(|rank| *rank != served_by));
            self.admit(routing, &others, call).ok()
        });
        if let Some(left_out) = ELSEWHERE.admit() {
            let is_known = at.is_some();
            tracing::warn!(chosen = %source, served, is_known, left_out, "gateway sent it elsewhere");
        }
        placement.slot.fail();
        self.metrics.retried(RetryReason::Gateway);
        if let Some(moved) = moved {
            history.suspected.push(placement.tracked.suspect(None));
            let first = std::mem::replace(placement, moved);
            placement.watch = None;
            placement.moved_from = Some(Box::new(first.decision));
        }
    }
}

/// Gateways cannot send to workers that are named in place of an address.
fn warn_of_names(endpoints: &EndpointTable) {
    if let Some(source) = endpoints.unaddressed()
        && let Some(left_out) = NAMED.admit()
    {
        let worker = &source.worker;
        tracing::warn!(%worker, left_out, "worker without an IP address in its URL gets nothing of gateways");
    }
}

/// Whether no engine answered: the gateway made the answer.
fn is_gateways_own(head: &EngineHead) -> bool {
    let response = &head.response;
    response.status().is_server_error() && !response.headers().contains_key(UPSTREAM_TIME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subset_without_addresses_allows_nothing() {
        let subset = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            GatewayLink::new(Some(names)).0.0.subset.clone()
        };
        assert_eq!(subset(&["vllm-0:8000", ""]), Some(BTreeSet::new()));
        assert_eq!(subset(&["[::1]:1"]).unwrap().len(), 1);
    }
}
