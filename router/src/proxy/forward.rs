//! Forwards one request: choose, account, send; after a failure before the client got a byte, to
//! the next best worker.
//!
//! Each attempt has a slot of its own. After a refused connection another worker is always tried:
//! the engine did not get the request. Any other failure may be the request's fault (an engine that
//! closed the connection may have crashed on it), so such a request is repeated only once, within
//! the budget of retries ([`crate::retry_budget`]). 502 and 503 come from a server that did not begin
//! to serve the request. [`crate::answer_end`] defines what counts as a failure; any other answer
//! of an engine is the answer. A failure is the worker's for certain if another worker then answers
//! the request.

use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use bytes::Bytes;
use tokio::time::Instant;
use warmroute_process::access::keys::KeyId;
use warmroute_process::log_limit::LogLimit;
use warmroute_proto::{DpRank, Source, WorkerId};
use xxhash_rust::xxh3::Xxh3;

use super::App;
use super::attempt::{AttemptError, EngineHead, Placement};
use super::call::Call;
use super::engine_client::EngineRequest;
use super::headers;
use super::queueing::{QueueHints, QueuePass};
use super::waiting::WorkerWait;
use crate::answer_end::{AnswerEnd, AnswerRule, EngineFailure};
use crate::engine_connector::AddressError;
use crate::engine_error::is_refused;
use crate::error::ProxyError;
use crate::fleet::health::Observation;
use crate::fleet::{Fleet, RequestCase, RequestResult, SuspectedFailure};
use crate::metrics::{CancelPhase, RetryReason};
use crate::retry_budget::RetryKind;
use crate::route::{AdmitError, Admitted, IndexReply, Leg, Prompt, RouteRequest};
use crate::shared_core::SlotHold;
use crate::spans::TraceStep;

/// Workers that one request is sent to. A bad request must not reach the whole fleet.
pub(super) const ATTEMPTS_MAX: usize = 3;

/// Attempts of one request that fail at an engine that has begun to serve it.
const FAILED_MAX: usize = 2;

/// Bytes at a body's end that, with its length, distinguish requests.
const CASE_BYTES: usize = 1 << 10;

/// Lines of the log that one client may cause by requests on which engines break.
static UNANSWERED: [LogLimit; 16] = [const { LogLimit::new() }; 16];
static UNCLEAR_LENGTHS: LogLimit = LogLimit::new();

const REFUSED_FRAMING: &str = "answer whose length is not clear, not passed on";

/// The limit of a worker's lines, which few others share.
fn limit_of(worker: &WorkerId) -> &'static LogLimit {
    let sum: usize = worker.as_str().bytes().map(usize::from).sum();
    &UNANSWERED[sum % UNANSWERED.len()]
}

/// What is sent, equal at every attempt.
pub(super) struct ForwardedRequest {
    pub method: Method,
    /// Path and query, as the client sent them.
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl ForwardedRequest {
    /// The request with another body.
    pub(super) fn with_body(&self, body: Bytes) -> Self {
        Self {
            method: self.method.clone(),
            path: self.path.clone(),
            headers: self.headers.clone(),
            body,
        }
    }

    /// The request's case among those of its tenant: its path, and the end of its body.
    fn case(&self, tenant: Option<&KeyId>) -> RequestCase {
        let mut hasher = Xxh3::new();
        let end = self.body.len().saturating_sub(CASE_BYTES);
        (tenant.map(KeyId::as_str), &self.path, self.body.len()).hash(&mut hasher);
        hasher.write(&self.body[end..]);
        RequestCase(hasher.finish())
    }
}

/// What a request is routed by.
pub(super) struct Routing {
    pub model: String,
    pub prompt: Arc<Prompt>,
    pub index: Option<IndexReply>,
    /// The answer comes in pieces, so that its first token can be seen.
    pub streaming: bool,
    /// The head is held back until the first byte of a stream's body, so that another worker can
    /// take the request until then.
    pub holds_head: bool,
    /// Longest wait for the head of an answer that no model generates, unless the settings have one.
    pub head_max: Option<Duration>,
    /// What the request is answered with.
    pub rule: AnswerRule,
    /// Distinguishes the request from others.
    pub case: RequestCase,
    /// The request may be aborted on one worker and sent to another.
    pub movable: bool,
    /// How a client that leaves before the answer's head counts; `None`: the stream that the request
    /// goes on with counts it.
    pub cancel: Option<CancelPhase>,
    pub excluded: ExcludedSources,
    pub hints: QueueHints,
    pub legs: Legs,
}

impl Routing {
    /// Ends a hint, after which the request is decided as any other. Returns whether there was one.
    pub(super) fn end_hint(&mut self) -> bool {
        let had_hint = self.excluded.end_hint();
        if had_hint {
            self.legs.reopen();
        }
        had_hint
    }
}

/// The legs of one request.
pub(super) struct Legs {
    pub next: NextLeg,
    may_split: bool,
    /// Pairs of workers so far.
    pub pairs: usize,
}

pub(super) enum NextLeg {
    Whole,
    /// The core decides when the request is sent.
    Undecided,
    Prefill(ForwardedRequest),
    Decode(ForwardedRequest),
}

impl Legs {
    /// One engine serves the request.
    pub(super) const fn whole() -> Self {
        Self {
            next: NextLeg::Whole,
            may_split: false,
            pairs: 0,
        }
    }

    /// One engine serves the request, or two.
    pub(super) const fn undecided() -> Self {
        Self {
            next: NextLeg::Undecided,
            may_split: true,
            pairs: 0,
        }
    }

    /// The leg to be sent, or that is in progress.
    pub(super) const fn leg(&self) -> Leg {
        match self.next {
            NextLeg::Whole | NextLeg::Undecided => Leg::Whole,
            NextLeg::Prefill(_) => Leg::Prefill,
            NextLeg::Decode(_) => Leg::Decode,
        }
    }

    /// What the leg is sent with.
    pub(super) const fn request<'a>(
        &'a self,
        clients: &'a ForwardedRequest,
    ) -> &'a ForwardedRequest {
        match &self.next {
            NextLeg::Whole | NextLeg::Undecided => clients,
            NextLeg::Prefill(request) | NextLeg::Decode(request) => request,
        }
    }

    /// Whether the request was split before.
    pub(super) const fn were_split(&self) -> bool {
        self.pairs > 0
    }

    /// The request is decided again.
    pub(super) fn reopen(&mut self) {
        if self.may_split {
            self.next = NextLeg::Undecided;
        }
    }
}

/// Sources that must not get a request.
pub(super) struct ExcludedSources {
    pub sources: Vec<Source>,
    /// Excluded for a client's hint, until it ends.
    pub for_hint: bool,
}

impl From<Vec<Source>> for ExcludedSources {
    fn from(sources: Vec<Source>) -> Self {
        Self {
            sources,
            for_hint: false,
        }
    }
}

impl ExcludedSources {
    /// Ends a hint: the request is routed as any other. Returns whether there was one.
    pub(super) fn end_hint(&mut self) -> bool {
        if self.for_hint {
            self.sources.clear();
        }
        std::mem::take(&mut self.for_hint)
    }
}

/// An engine's response head, with the slot that is still open.
pub(super) struct EngineAnswer {
    pub head: EngineHead,
    pub placement: Placement,
}

/// How an attempt ended.
enum AttemptEnd {
    Answer(Box<EngineAnswer>),
    /// The engine did its part, and the next leg follows.
    NextLeg,
    Failed {
        reason: RetryReason,
        /// The request is not repeated.
        is_last: bool,
    },
}

/// The attempts of one request so far.
#[derive(Default)]
pub(super) struct AttemptHistory {
    /// Without prefill legs.
    attempts: usize,
    /// Those that failed at an engine that has begun to serve the request.
    failed: usize,
    /// Those without an answer, of these.
    unanswered: usize,
    tried: Vec<Source>,
    /// A connection was not opened for lack of files.
    lacked_files: bool,
    /// A failed answer, which is the answer if no worker has a better one.
    fallback: Option<EngineAnswer>,
    /// Failures that the request's answer will prove.
    pub suspected: Vec<SuspectedFailure>,
    /// Retries were taken of those that clients' mistakes may take.
    is_doubtful: bool,
}

impl App {
    /// The answer of the best worker that has one, after a wait where none is ready or all are full.
    pub(super) async fn forward(
        &self,
        call: &mut Call,
        request: &ForwardedRequest,
        routing: &mut Routing,
        wait: &mut WorkerWait,
    ) -> Result<EngineAnswer, ProxyError> {
        let mut pass = QueuePass::new(routing);
        routing.case = request.case(call.tenant_name());
        self.retries.requested(Instant::now().into_std());
        loop {
            if pass.overtakes(self, routing) {
                return Err(self.not_queued(call, routing));
            }
            if pass.is_due(self, routing) {
                self.wait_in_queue(call, request, routing, &mut pass)
                    .await?;
            }
            match self.try_workers(call, request, routing, &mut pass).await {
                Err(ProxyError::AllFull) if pass.may_wait() => {
                    self.wait_in_queue(call, request, routing, &mut pass)
                        .await?;
                }
                Err(error) => {
                    // Neither a grant nor a place is kept through another wait.
                    pass = QueuePass::new(routing);
                    call.place = None;
                    if !wait.before_retry(self, call, &error).await {
                        return Err(error);
                    }
                }
                Ok(answer) => return Ok(answer),
            }
        }
    }

    async fn try_workers(
        &self,
        call: &mut Call,
        request: &ForwardedRequest,
        routing: &mut Routing,
        pass: &mut QueuePass,
    ) -> Result<EngineAnswer, ProxyError> {
        if let Some(link) = call.gateway().cloned() {
            return self
                .send_by_gateway(call, &link, request, routing, pass)
                .await;
        }
        let permit = self.engines.permit().ok_or(ProxyError::FilesFull)?;
        let mut answer = self.send_to_workers(call, request, routing, pass).await?;
        answer.placement.tracked.hold(permit);
        Ok(answer)
    }

    async fn send_to_workers(
        &self,
        call: &mut Call,
        request: &ForwardedRequest,
        routing: &mut Routing,
        pass: &mut QueuePass,
    ) -> Result<EngineAnswer, ProxyError> {
        self.renew_hint(routing, &request.headers);
        routing.legs.reopen();
        let mut history = AttemptHistory {
            tried: routing.excluded.sources.clone(),
            ..AttemptHistory::default()
        };
        loop {
            self.decide_legs(request, routing, &history.tried).await;
            let mut placement = match self.admit(routing, &history.tried, call) {
                Ok(placement) => placement,
                Err(_) if routing.end_hint() => {
                    history.tried.clear();
                    continue;
                }
                Err(_) if self.gives_up_legs(routing) => continue,
                Err(error) => {
                    // Its prompt is computed: it may wait for another place.
                    if routing.legs.were_split() && call.place.take().is_some() {
                        *pass = QueuePass::new(routing);
                    }
                    return history.refused(error);
                }
            };
            pass.admitted(self, routing, call);
            if let Some(trace) = &mut call.report.trace {
                trace.sent();
            }
            let may_leave = history.attempts + 1 < ATTEMPTS_MAX && history.failed + 1 < FAILED_MAX;
            let leaves = |source: &Source| {
                may_leave
                    && self.has_other(routing, &history.tried, source)
                    && self.takes_retry(RetryKind::Usual, RetryReason::Lost)
            };
            let sent = routing.legs.request(request);
            let result = self.attempt(sent, routing, &mut placement, leaves).await;
            history.attempts += usize::from(routing.legs.leg() != Leg::Prefill);
            let source = placement.decision.source.clone();
            let end = match result {
                Ok(head) => {
                    let answer = EngineAnswer { head, placement };
                    self.answered(call, request, routing, &mut history, answer)
                        .await?
                }
                Err(error) => self.unanswered(&mut history, placement, &error),
            };
            let reason = match end {
                AttemptEnd::Answer(answer) => return Ok(*answer),
                AttemptEnd::NextLeg => continue,
                AttemptEnd::Failed { reason, is_last } => {
                    self.leg_failed(&mut routing.legs, reason);
                    if is_last {
                        return history.exhausted();
                    }
                    reason
                }
            };
            if routing.end_hint() {
                history.tried.clear();
            }
            history.exclude(&source, &self.fleet);
            self.metrics.retried(reason);
        }
    }

    /// What becomes of a request that its engine answered.
    async fn answered(
        &self,
        call: &Call,
        request: &ForwardedRequest,
        routing: &mut Routing,
        history: &mut AttemptHistory,
        mut answer: EngineAnswer,
    ) -> Result<AttemptEnd, ProxyError> {
        let placement = &mut answer.placement;
        if headers::is_length_unclear(answer.head.response.headers()) {
            let worker = &placement.decision.source.worker;
            if let Some(left_out) = UNCLEAR_LENGTHS.admit() {
                tracing::warn!(%worker, left_out, "{REFUSED_FRAMING}");
            }
            placement.tracked.report(RequestResult::Broken);
            placement.slot.fail();
            return Err(ProxyError::Upstream);
        }
        placement.watch = None;
        let answer = match self.judge(routing, history, answer) {
            Ok(answer) => *answer,
            Err(reason) => {
                let is_last = false;
                return Ok(AttemptEnd::Failed { reason, is_last });
            }
        };
        Ok(match self.next_leg(call, request, routing, answer).await {
            Ok(Some(answer)) => AttemptEnd::Answer(Box::new(answer)),
            Ok(None) => AttemptEnd::NextLeg,
            Err((placement, error)) => self.unanswered(history, placement, &error),
        })
    }

    /// What becomes of a request that its engine did not answer.
    fn unanswered(
        &self,
        history: &mut AttemptHistory,
        mut placement: Placement,
        error: &AttemptError,
    ) -> AttemptEnd {
        let reason = self.failed(&mut placement, error, history);
        history.lacked_files |= error.lacks_files();
        placement.slot.fail();
        let kind = match reason == RetryReason::Connect {
            true => RetryKind::Unsent,
            false => RetryKind::Usual,
        };
        // It has left its source for a retry that was taken.
        let has_retry = matches!(error, AttemptError::Lost(_));
        let is_last = history.attempts == ATTEMPTS_MAX || history.failed == FAILED_MAX;
        AttemptEnd::Failed {
            reason,
            is_last: is_last || !has_retry && !self.takes_retry(kind, reason),
        }
    }

    /// Returns the answer if it is for the client. Else keeps it and returns why another worker is
    /// to be tried.
    pub(super) fn judge(
        &self,
        routing: &Routing,
        history: &mut AttemptHistory,
        mut answer: EngineAnswer,
    ) -> Result<Box<EngineAnswer>, RetryReason> {
        let status = answer.head.response.status();
        let end = AnswerEnd::of(status, answer.head.is_error, routing.rule);
        let Some(failure) = end.failure() else {
            let result = match routing.prompt.is_shown() {
                true => RequestResult::Begun,
                false => RequestResult::Answered,
            };
            answer.placement.tracked.report(result);
            // A computed prompt does not show that an answer can be generated.
            if end == AnswerEnd::Served && routing.legs.leg() != Leg::Prefill {
                self.proven(history);
            }
            return Ok(Box::new(answer));
        };
        self.metrics.engine_failed(failure);
        let is_unserved = is_unserved(status);
        if !is_unserved {
            history.failed += 1;
        }
        let kind = match failure.may_be_the_clients() {
            true => RetryKind::Doubtful,
            false => RetryKind::Usual,
        };
        let may_repeat = history.attempts < ATTEMPTS_MAX
            && history.failed < FAILED_MAX
            && (is_unserved || failure.is_repeatable(routing.rule))
            && self.has_other(routing, &history.tried, &answer.placement.decision.source);
        let reason = match answer.head.is_error {
            true => RetryReason::ErrorAnswer,
            false => RetryReason::Status,
        };
        if !may_repeat || !self.takes_retry(kind, reason) {
            match history.suspected.is_empty() {
                true => answer.placement.tracked.fail(),
                // Another worker failed the request too: it says nothing of this one.
                false => answer.placement.tracked.report(RequestResult::Unknown),
            }
            return Ok(Box::new(answer));
        }
        history.is_doubtful |= kind == RetryKind::Doubtful;
        let is_overloaded = failure == EngineFailure::Overloaded;
        let named = headers::retry_after(answer.head.response.headers());
        let pause = named.filter(|_| is_overloaded);
        history
            .suspected
            .push(answer.placement.tracked.suspect(pause));
        // It may be kept for as long as the next attempt takes.
        answer.placement.slot.fail();
        history.fallback = Some(answer);
        Err(reason)
    }

    /// The request was answered: its earlier failures were the workers'.
    fn proven(&self, history: &mut AttemptHistory) {
        for failure in history.suspected.drain(..) {
            failure.proven();
        }
        if std::mem::take(&mut history.is_doubtful) {
            self.retries.proven(Instant::now().into_std());
        }
    }

    /// Whether a worker that was not tried can take the request.
    fn has_other(&self, routing: &Routing, tried: &[Source], source: &Source) -> bool {
        let now = Instant::now().into_std();
        // A hint ends with the first failure.
        let tried: &[Source] = match routing.excluded.for_hint {
            true => &[],
            false => tried,
        };
        let core = self.core.core();
        core.has_other((&routing.model, Leg::Whole), tried, &source.worker, now)
    }

    /// Takes a retry from the budget, if it has one.
    fn takes_retry(&self, kind: RetryKind, reason: RetryReason) -> bool {
        let is_taken = self.retries.take(kind, Instant::now().into_std());
        if !is_taken {
            self.metrics.retry_denied(reason);
        }
        is_taken
    }

    /// Chooses and accounts in one step.
    pub(super) fn admit(
        &self,
        routing: &Routing,
        tried: &[Source],
        call: &mut Call,
    ) -> Result<Placement, AdmitError> {
        let ask = RouteRequest {
            model: &routing.model,
            prompt: &routing.prompt,
            exclude: tried,
            leg: routing.legs.leg(),
        };
        let chosen = Instant::now();
        let losses = self.core.losses().watch();
        let (admitted, watch) = self.core.admit(&ask, routing.index.as_ref())?;
        call.report.step(TraceStep::Choose, chosen);
        let Admitted { decision, slot, .. } = admitted;
        // Before anything else, so that the slot is freed on every path.
        let slot = SlotHold::new(Arc::clone(&self.core), slot);
        let tracked = self
            .fleet
            .request_began(&decision.source.worker, &decision.url)
            .of_case(routing.case);
        self.metrics.ladder(decision.basis().label());
        tracing::debug!(
            request_id = ?call.request_id(),
            source = %decision.source,
            overlap_blocks = decision.overlap_blocks,
            rung = decision.basis().label(),
            "request routed"
        );
        Ok(Placement {
            decision,
            slot,
            tracked,
            watch: watch.filter(|_| routing.movable),
            losses,
            rule: routing.rule,
            moved_from: None,
        })
    }

    /// The headers of a request to a worker and rank.
    pub(super) fn engine_headers(
        &self,
        request: &ForwardedRequest,
        source: &Source,
        url: &str,
    ) -> HeaderMap {
        let mut headers = request.headers.clone();
        headers.insert(headers::ENGINE_RANK, HeaderValue::from(source.dp_rank.0));
        self.engines
            .keys()
            .authorize(&source.worker, url, &mut headers);
        headers
    }

    /// The request to a worker and rank. Fails if the worker's URL does not parse.
    pub(super) fn addressed(
        &self,
        request: &ForwardedRequest,
        source: &Source,
        url: &str,
    ) -> Result<EngineRequest, AddressError> {
        let headers = self.engine_headers(request, source, url);
        let (method, body) = (request.method.clone(), request.body.clone());
        self.engines
            .request(method, url, &request.path, headers, body)
    }

    /// Reports a failure to the fleet.
    pub(super) fn failed(
        &self,
        placement: &mut Placement,
        error: &AttemptError,
        history: &mut AttemptHistory,
    ) -> RetryReason {
        let decision = &placement.decision;
        let (worker, url) = (&decision.source.worker, &decision.url);
        if let Some(left_out) = limit_of(worker).admit() {
            tracing::warn!(%worker, %error, left_out, "worker did not answer");
        }
        let (reason, failure) = match error {
            AttemptError::Request(error) if is_refused(error) => {
                self.fleet.observe(worker, url, Observation::ConnectRefused);
                return RetryReason::Connect;
            }
            error if error.lacks_files() => return RetryReason::Connect,
            AttemptError::Request(error) if error.is_connect() => {
                placement.tracked.report(RequestResult::Broken);
                return RetryReason::Connect;
            }
            AttemptError::Address(_) => {
                placement.tracked.report(RequestResult::Broken);
                return RetryReason::Connect;
            }
            AttemptError::Request(_) | AttemptError::Body(_) => {
                (RetryReason::Broken, EngineFailure::Broken)
            }
            AttemptError::Silent(_) | AttemptError::BriefSilent(_) => {
                (RetryReason::Silent, EngineFailure::Silent)
            }
            AttemptError::Lost(_) => (RetryReason::Lost, EngineFailure::Lost),
        };
        self.metrics.engine_failed(failure);
        history.failed += 1;
        history.unanswered += 1;
        // Health checks and stalls judge a lost worker.
        let is_judged = matches!(error, AttemptError::Lost(_) | AttemptError::BriefSilent(_));
        if !is_judged {
            history.suspected.push(placement.tracked.suspect(None));
        }
        reason
    }
}

impl AttemptHistory {
    /// A history after which a request is not repeated.
    pub(super) fn last() -> Self {
        Self {
            attempts: ATTEMPTS_MAX,
            ..Self::default()
        }
    }

    /// Excludes all ranks of the worker: they share one HTTP server.
    fn exclude(&mut self, source: &Source, fleet: &Fleet) {
        self.tried.extend(all_ranks(source, fleet));
    }

    /// No further worker takes the request.
    fn refused(self, error: AdmitError) -> Result<EngineAnswer, ProxyError> {
        if self.fallback.is_none() && self.unanswered == 0 && !self.lacked_files {
            return Err(ProxyError::from(error));
        }
        self.exhausted()
    }

    /// No further attempt is made.
    pub(super) fn exhausted(self) -> Result<EngineAnswer, ProxyError> {
        let error = if self.unanswered > 0 {
            ProxyError::Upstream
        } else if self.lacked_files {
            ProxyError::FilesFull
        } else {
            ProxyError::NoWorker
        };
        self.fallback.ok_or(error)
    }
}

/// The sources of a source's worker.
pub(super) fn all_ranks(source: &Source, fleet: &Fleet) -> impl Iterator<Item = Source> {
    let ranks = fleet.ranks(&source.worker).max(source.dp_rank.0 + 1);
    let worker = source.worker.clone();
    (0..ranks).map(move |rank| Source {
        worker: worker.clone(),
        dp_rank: DpRank(rank),
    })
}

/// The server did not begin to serve the request.
fn is_unserved(status: StatusCode) -> bool {
    status == StatusCode::BAD_GATEWAY || status == StatusCode::SERVICE_UNAVAILABLE
}
