//! One request on its way to an engine: choose, account, send; where that fails before the client
//! got a byte, the next best.
//!
//! Each attempt has a slot of its own. A refused connection is always worth another worker: nothing
//! was asked yet. An engine that took the request and broke off may have died of it, so that is
//! repeated once only. 502 and 503 come from something that did not start to answer. Everything else
//! an engine answers is the answer. One attempt, with the move that it may make, is [`super::attempt`].

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use bytes::Bytes;
use reqwest::Url;
use warmroute_proto::query::IndexAnswer;
use warmroute_proto::{DpRank, Source};

use super::App;
use super::attempt::{Begun, Placed};
use super::call::Call;
use super::headers;
use crate::error::ApiError;
use crate::fleet::health::Observation;
use crate::fleet::{Fleet, RequestResult};
use crate::metrics::RetryReason;
use crate::route::{AdmitError, Admitted, Decision, Prompt, RouteRequest};
use crate::shared_core::SlotHold;

/// Workers that one request is offered to. More would turn a bad request into a bad fleet.
const ATTEMPTS_MAX: usize = 3;

/// Requests that broke off after they were handed over, per request of a client.
const BROKEN_MAX: usize = 2;

/// What is sent, the same at every attempt.
pub(super) struct Outgoing {
    pub method: Method,
    /// Path and query, as the client sent them.
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// What is decided by.
pub(super) struct Wish {
    pub model: String,
    pub prompt: Arc<Prompt>,
    pub index: Option<IndexAnswer>,
    /// The answer comes in pieces, so that its first token can be seen.
    pub streaming: bool,
    /// To ask another worker, when one was asked already, changes nothing.
    pub movable: bool,
}

/// An engine's response head, with the slot that is still open.
pub(super) struct Answered {
    pub response: reqwest::Response,
    /// The first bytes of its body, if they were waited for.
    pub early: Option<Bytes>,
    pub decision: Decision,
    /// The first choice, if the request was moved.
    pub left: Option<Box<Decision>>,
    pub slot: SlotHold,
}

/// Why an engine did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// Nobody took the connection: it was not asked.
    Connect,
    /// It was asked, and broke off before it answered.
    Broken,
}

impl Failure {
    const fn reason(self) -> RetryReason {
        match self {
            Self::Connect => RetryReason::Connect,
            Self::Broken => RetryReason::Broken,
        }
    }
}

/// The attempts of one request so far.
#[derive(Default)]
struct History {
    attempts: usize,
    tried: Vec<Source>,
    broken: usize,
    /// A 502 or 503 that is the answer if nobody has a better one.
    held: Option<Answered>,
    last: Option<String>,
}

impl App {
    /// The answer of the best worker that has one.
    pub(super) async fn forward(
        &self,
        call: &Call,
        outgoing: &Outgoing,
        wish: &Wish,
    ) -> Result<Answered, ApiError> {
        let mut history = History::default();
        loop {
            let mut placed = match self.admit(wish, &history.tried, call) {
                Ok(placed) => placed,
                Err(refusal) => return history.give_up(refusal),
            };
            match self.attempt(outgoing, wish, &mut placed).await? {
                Ok(Begun { response, early }) => {
                    let (worker, url) = (&placed.decision.source.worker, &placed.decision.url);
                    self.fleet
                        .request_ended(worker, url, RequestResult::Answered);
                    let answered = Answered {
                        response,
                        early,
                        decision: placed.decision,
                        left: placed.left,
                        slot: placed.slot,
                    };
                    if !history.wants_another(&answered) {
                        return Ok(answered);
                    }
                    self.metrics.retried(RetryReason::Status);
                    history.hold(answered, &self.fleet);
                }
                Err(error) => {
                    placed.slot.fail();
                    let failure = self.failed(&placed.decision, &error);
                    history.exclude(&placed.decision.source, &self.fleet);
                    if !history.failed(failure, &error) {
                        return Err(history.exhausted());
                    }
                    self.metrics.retried(failure.reason());
                }
            }
        }
    }

    /// Chooses and accounts in one step.
    fn admit(&self, wish: &Wish, tried: &[Source], call: &Call) -> Result<Placed, AdmitError> {
        let ask = RouteRequest {
            model: &wish.model,
            prompt: &wish.prompt,
            exclude: tried,
        };
        let (admitted, watch) = self.desk.admit(&ask, wish.index.as_ref())?;
        let Admitted { decision, slot, .. } = admitted;
        // First the guard: whatever follows, the slot is freed.
        let slot = SlotHold::new(Arc::clone(&self.desk), slot);
        self.metrics.ladder(decision.basis().label());
        tracing::debug!(
            request_id = ?call.request_id(),
            source = %decision.source,
            overlap_blocks = decision.overlap_blocks,
            rung = decision.basis().label(),
            "request routed"
        );
        Ok(Placed {
            decision,
            slot,
            watch: watch.filter(|_| wish.movable),
            left: None,
        })
    }

    fn failed(&self, decision: &Decision, error: &reqwest::Error) -> Failure {
        let (worker, url) = (&decision.source.worker, &decision.url);
        let failure = if error.is_connect() {
            self.fleet.observe(worker, url, Observation::ConnectRefused);
            Failure::Connect
        } else {
            self.fleet.request_ended(worker, url, RequestResult::Broken);
            Failure::Broken
        };
        tracing::warn!(%worker, %error, failure = failure.reason().label(), "worker did not answer");
        failure
    }
}

impl History {
    fn wants_another(&self, answered: &Answered) -> bool {
        let status = answered.response.status();
        let passing =
            status == StatusCode::BAD_GATEWAY || status == StatusCode::SERVICE_UNAVAILABLE;
        passing && self.attempts + 1 < ATTEMPTS_MAX
    }

    fn hold(&mut self, answered: Answered, fleet: &Fleet) {
        self.attempts += 1;
        self.exclude(&answered.decision.source, fleet);
        self.held = Some(answered);
    }

    /// The ranks of a worker stand behind one door.
    fn exclude(&mut self, source: &Source, fleet: &Fleet) {
        let ranks = fleet.ranks(&source.worker).max(source.dp_rank.0 + 1);
        self.tried.extend((0..ranks).map(|rank| Source {
            worker: source.worker.clone(),
            dp_rank: DpRank(rank),
        }));
    }

    /// Takes a failure in; says whether another attempt is due.
    fn failed(&mut self, failure: Failure, error: &reqwest::Error) -> bool {
        self.attempts += 1;
        self.last = Some(error.without_address());
        match failure {
            Failure::Connect => {}
            Failure::Broken => self.broken += 1,
        }
        self.attempts < ATTEMPTS_MAX && self.broken < BROKEN_MAX
    }

    fn give_up(self, error: AdmitError) -> Result<Answered, ApiError> {
        match self.held {
            Some(held) => Ok(held),
            None if self.broken > 0 => Err(self.exhausted()),
            None => Err(ApiError::from(error)),
        }
    }

    fn exhausted(self) -> ApiError {
        match self.last {
            Some(last) if self.broken > 0 => ApiError::Upstream(last),
            Some(_) | None => ApiError::NoWorker,
        }
    }
}

/// An error's text for clients, who need not know our addresses.
trait WithoutAddress {
    fn without_address(&self) -> String;
}

impl WithoutAddress for reqwest::Error {
    fn without_address(&self) -> String {
        if self.is_connect() {
            "the connection was refused".to_owned()
        } else {
            "the connection broke off".to_owned()
        }
    }
}

pub(super) fn request(
    outgoing: &Outgoing,
    decision: &Decision,
) -> Result<reqwest::Request, ApiError> {
    let url = format!("{}{}", decision.url, outgoing.path);
    let url = Url::parse(&url).map_err(|_| ApiError::Internal("a worker's URL does not parse"))?;
    let mut request = reqwest::Request::new(outgoing.method.clone(), url);
    *request.headers_mut() = outgoing.headers.clone();
    let rank = HeaderValue::from(decision.source.dp_rank.0);
    request.headers_mut().insert(headers::ENGINE_RANK, rank);
    if !outgoing.body.is_empty() || outgoing.method == Method::POST {
        *request.body_mut() = Some(outgoing.body.clone().into());
    }
    Ok(request)
}
