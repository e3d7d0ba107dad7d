//! The rest of a stream whose worker died, from another worker.
//!
//! A [`ResumableAnswer`] reads the stream along (`openai::ResumableStream`) and keeps what a request for
//! the rest needs. That request is planned and forwarded like a client's, except that it never waits
//! in the queue and that workers that died under the stream do not get it. It takes a slot of its
//! own. Memory for tokens and unfinished events is charged to the budget of bodies; a stream that
//! gets none is no longer resumable.

use std::sync::Arc;

use axum::http::{HeaderMap, Method};
use bytes::Bytes;
use warmroute_proto::Source;

use super::App;
use super::body::{BudgetShare, BufferedBody};
use super::call::Call;
use super::engine_body::EngineBody;
use super::forward::{EngineAnswer, ForwardedRequest, Legs, Routing, all_ranks};
use super::queueing::QueueHints;
use super::respond::is_open_stream;
use super::stream::{BodyError, Flight};
use super::waiting::WorkerWait;
use crate::answer_end::{AnswerRule, EngineFailure};
use crate::error::ProxyError;
use crate::fleet::RequestCase;
use crate::metrics::ResumeResult;
use crate::openai::{ParsedRequest, PromptRoute, ResumableStream, ResumeTerms, StreamBytes};
use crate::settings::ResumeRule;

/// Each may meet a worker that dies on this very request.
const RESUMES_MAX: u32 = 2;

/// Where the request for the rest goes.
const PATH: &str = "/v1/completions";

/// Memory is charged in steps of so many bytes.
const CHARGE_STEP: usize = 16 << 10;

/// An unfinished event of so many bytes is kept without a charge, as in other streams.
const UNCHARGED_MAX: usize = 256 << 10;

/// A stream that may be resumed.
pub(super) struct ResumableAnswer {
    app: Arc<App>,
    stream: ResumableStream,
    headers: HeaderMap,
    hints: QueueHints,
    /// All sources of the workers that died.
    lost: Vec<Source>,
    /// `None` until memory is charged.
    share: Option<BudgetShare>,
    charged: usize,
}

/// The body that goes on with a stream.
pub(super) struct ResumedBody {
    /// Bytes that came with the head.
    pub early: Option<Bytes>,
    pub body: EngineBody,
}

/// Why a stream ended before its last event. `None`: its body ended without an error.
pub(super) type StreamLoss = Option<BodyError>;

impl ResumeRule {
    pub(super) fn terms(
        self,
        parsed: &ParsedRequest<'_>,
        body: &[u8],
        model_len: Option<u32>,
    ) -> Option<ResumeTerms> {
        let applies = match parsed.route {
            PromptRoute::Completions => self != Self::Off,
            PromptRoute::ChatCompletions => self == Self::All,
            PromptRoute::Responses
            | PromptRoute::Messages
            | PromptRoute::Embeddings
            | PromptRoute::Pooling
            | PromptRoute::TokenIds
            | PromptRoute::Embed => false,
        };
        let terms = applies.then(|| ResumeTerms::of(parsed, body, model_len));
        terms.flatten()
    }
}

impl ResumableAnswer {
    pub(super) fn new(
        app: &Arc<App>,
        terms: ResumeTerms,
        headers: HeaderMap,
        hints: QueueHints,
    ) -> Self {
        Self {
            app: Arc::clone(app),
            stream: ResumableStream::new(terms),
            headers,
            hints,
            lost: Vec::new(),
            share: None,
            charged: 0,
        }
    }

    /// The client's bytes for the engine's.
    pub(super) fn read(&mut self, chunk: &[u8]) -> StreamBytes {
        let read = self.stream.push(chunk);
        if self.account() {
            read
        } else {
            StreamBytes::TooLarge
        }
    }

    /// Charges what the stream keeps, in steps. A stream for which there is no room keeps only its
    /// unfinished event. Returns whether there is room for that.
    fn account(&mut self) -> bool {
        let held = self.stream.held_bytes();
        if held <= self.charged && self.charged <= held + 2 * CHARGE_STEP {
            return true;
        }
        self.share = None;
        self.charged = held.next_multiple_of(CHARGE_STEP);
        if held == 0 {
            return true;
        }
        let bodies = &self.app.bodies;
        self.share = bodies.charge_spare(self.charged);
        if self.share.is_none() {
            self.stream.give_up();
            self.charged = self.stream.held_bytes().next_multiple_of(CHARGE_STEP);
            self.share = bodies.charge(self.charged);
        }
        self.share.is_some() || self.charged <= UNCHARGED_MAX
    }

    /// Bytes behind the last whole event.
    pub(super) fn finish(&mut self) -> Vec<u8> {
        self.stream.finish()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.stream.has_ended()
    }

    /// The request for the rest, if there may be one.
    pub(super) fn rest(&mut self, call: &Call) -> Option<Vec<u8>> {
        let body = (call.report.resumes < RESUMES_MAX).then(|| self.stream.resume());
        let body = body.flatten();
        if body.is_none() && !self.has_ended() {
            self.app.metrics.resumed(ResumeResult::NotResumable);
        }
        body
    }

    async fn request_rest(
        &mut self,
        call: &mut Call,
        body: Vec<u8>,
    ) -> Result<EngineAnswer, ProxyError> {
        let app = Arc::clone(&self.app);
        if let Some(placement) = &call.report.placement {
            let source = &placement.decision.source;
            self.lost.extend(all_ranks(source, &app.fleet));
        }
        let share = app.bodies.charge(body.len());
        let body = BufferedBody::new(body, share.ok_or(ProxyError::BuffersFull)?);
        let route = PromptRoute::Completions;
        let plan = app.plan(call, route, &body).await?;
        let index = app.query_planned(&plan.prompt, plan.unhashed).await;
        let mut routing = Routing {
            model: plan.model,
            prompt: Arc::new(plan.prompt),
            index,
            streaming: true,
            head_max: None,
            holds_head: true,
            movable: true,
            cancel: None,
            rule: AnswerRule::Generated,
            case: RequestCase::default(),
            excluded: self.lost.clone().into(),
            hints: self.hints,
            // No prompt but the engine's own tokens.
            legs: Legs::whole(),
        };
        let request = ForwardedRequest {
            method: Method::POST,
            path: PATH.to_owned(),
            headers: self.headers.clone(),
            body: body.charged(),
        };
        // The worker that died is excluded, even if it is back.
        let mut wait = WorkerWait::refused();
        let mut answer = app.forward(call, &request, &mut routing, &mut wait).await?;
        let head = &answer.head.response;
        if !is_open_stream(head.status(), head.headers()) {
            return Err(ProxyError::Upstream);
        }
        let decision = &mut answer.placement.decision;
        let id = call.id_and_tenant();
        app.journal.record(id, &routing.model, decision, None);
        Ok(answer)
    }
}

/// Requests the rest of a stream. Dropped when the client closes its connection, as an answer is.
pub(super) async fn resume(
    mut flight: Flight,
    body: Vec<u8>,
    loss: StreamLoss,
) -> (Flight, Result<ResumedBody, StreamLoss>) {
    flight.lose_worker(match loss {
        Some(BodyError::Silent(_)) => EngineFailure::Silent,
        Some(_) | None => EngineFailure::Broken,
    });
    let Some(mut resumable) = flight.readers.resumable.take() else {
        return (flight, Err(loss));
    };
    let result = resumable.request_rest(&mut flight.call, body).await;
    let app = Arc::clone(&resumable.app);
    match result {
        Ok(answer) => {
            let worker = &answer.placement.decision.source.worker;
            tracing::info!(request_id = ?flight.call.request_id(), %worker, "stream resumed");
            app.metrics.resumed(ResumeResult::Resumed);
            flight.call.report.resumes += 1;
            flight.readers.resumable = Some(resumable);
            let EngineAnswer { head, placement } = answer;
            flight.resumed(placement, || app.fleet.catalog());
            let resumed = ResumedBody {
                early: head.early,
                body: head.response.into_body(),
            };
            (flight, Ok(resumed))
        }
        Err(error) => {
            tracing::warn!(request_id = ?flight.call.request_id(), %error, "stream not resumed");
            app.metrics.resumed(ResumeResult::NoWorker);
            (flight, Err(loss))
        }
    }
}
