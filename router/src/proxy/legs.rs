//! Requests whose prompt and answer are computed by two engines, where a model has workers with the
//! role prefill.
//!
//! The core decides, when a request is to be sent, whether it is split ([`crate::route::pairing`]).
//! Its prefill leg is a request of its own, with a slot at a prefill worker that is freed when the
//! prompt is computed. The answer's parameters go into the body of the decode leg, whose slot opens
//! then. Everything else is as for whole requests: [`super::forward`] sends both legs, and a client
//! that closes its connection ends the one in progress.
//!
//! Parameters are good for one decode leg. After one that an engine may have begun, the request
//! needs another pair; after [`PAIRS_MAX`] pairs, or where there is none, one engine serves it whole.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use tokio::time::timeout;
use warmroute_process::blocking;
use warmroute_proto::Source;

use super::App;
use super::attempt::{AttemptError, EngineHead, Placement};
use super::body::{BudgetShare, BufferedBody};
use super::call::Call;
use super::forward::{EngineAnswer, ForwardedRequest, Legs, NextLeg, Routing};
use super::generate::INLINE_BYTES_MAX;
use crate::answer_end::AnswerEnd;
use crate::metrics::{LegEnd, RetryReason, WholeReason};
use crate::openai::{self, PromptRoute, TokenUsage};
use crate::route::{Leg, RouteRequest};

/// Pairs of workers that one request is sent to.
const PAIRS_MAX: usize = 2;

/// Longest time for a prefill leg's answer, from its first byte.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

/// A longer answer has no parameters. Those of a million tokens take about 1 MiB.
const ANSWER_BYTES_MAX: usize = 8 << 20;

impl App {
    /// The legs of a request, before its first one.
    pub(super) fn legs(&self, call: &Call, route: PromptRoute, path: &str, model: &str) -> Legs {
        let catalog = self.fleet.catalog();
        if !catalog
            .models
            .get(model)
            .is_some_and(|model| model.has_prefill)
        {
            return Legs::whole();
        }
        let has_params = matches!(
            route,
            PromptRoute::ChatCompletions | PromptRoute::Completions
        );
        let reason = match call.gateway() {
            Some(_) => WholeReason::Gateway,
            None if has_params && path == route.path() => return Legs::undecided(),
            None => WholeReason::Route,
        };
        self.metrics.served_whole(reason);
        Legs::whole()
    }

    /// Decides whether the request is split, unless it is decided.
    pub(super) async fn decide_legs(
        &self,
        request: &ForwardedRequest,
        routing: &mut Routing,
        tried: &[Source],
    ) {
        if !matches!(routing.legs.next, NextLeg::Undecided) {
            return;
        }
        routing.legs.next = match self.prefill_leg(request, routing, tried).await {
            Ok(prefill) => {
                routing.legs.pairs += 1;
                NextLeg::Prefill(prefill)
            }
            Err(reason) => {
                self.metrics.served_whole(reason);
                NextLeg::Whole
            }
        };
    }

    async fn prefill_leg(
        &self,
        request: &ForwardedRequest,
        routing: &Routing,
        tried: &[Source],
    ) -> Result<ForwardedRequest, WholeReason> {
        if routing.excluded.for_hint {
            return Err(WholeReason::Hint);
        }
        if routing.legs.pairs == PAIRS_MAX {
            return Err(WholeReason::PairsFailed);
        }
        let ask = RouteRequest {
            model: &routing.model,
            prompt: &routing.prompt,
            exclude: tried,
            leg: Leg::Whole,
        };
        let threshold = self.settings.current().pair_threshold();
        let verdict = self.core.split(&ask, routing.index.as_ref(), threshold);
        if !verdict.is_split() {
            return Err(WholeReason::Verdict(verdict));
        }
        let edit = |body: &[u8]| openai::prefill_body(body).map_err(WholeReason::Body);
        self.edited(request, 0, WholeReason::Memory, edit).await
    }

    /// The request with another body, charged to the budget. Fails with `full` without room for it.
    async fn edited<E: Send + 'static>(
        &self,
        request: &ForwardedRequest,
        added: usize,
        full: E,
        edit: impl FnOnce(&[u8]) -> Result<Vec<u8>, E> + Send + 'static,
    ) -> Result<ForwardedRequest, E> {
        let bytes = request.body.len() + added;
        let Some(share) = self.bodies.charge(bytes) else {
            return Err(full);
        };
        let edited = if bytes <= INLINE_BYTES_MAX {
            edit(&request.body).map(|edited| BufferedBody::new(edited, share))
        } else {
            let body = request.body.clone();
            let work = move || edit(&body).map(|edited| BufferedBody::new(edited, share));
            blocking::run(work).await.unwrap_or(Err(full))
        };
        Ok(request.with_body(edited?.charged()))
    }

    /// No worker takes the leg. Returns whether one may serve the request whole.
    pub(super) fn gives_up_legs(&self, routing: &mut Routing) -> bool {
        match routing.legs.leg() {
            Leg::Whole => return false,
            Leg::Prefill => {}
            leg @ Leg::Decode => self.metrics.leg_ended(leg, LegEnd::NoWorker),
        }
        routing.legs.next = NextLeg::Whole;
        true
    }

    /// The engine did not answer the leg. Parameters that were not sent are kept.
    pub(super) fn leg_failed(&self, legs: &mut Legs, reason: RetryReason) {
        let end = match legs.leg() {
            Leg::Whole => return,
            Leg::Decode if reason == RetryReason::Connect => LegEnd::Unsent,
            Leg::Prefill | Leg::Decode => LegEnd::Failed,
        };
        self.metrics.leg_ended(legs.leg(), end);
        if end == LegEnd::Failed {
            legs.reopen();
        }
    }

    /// What follows an answer. `None`: the request goes on with its next leg. Fails if the answer
    /// ends early.
    pub(super) async fn next_leg(
        &self,
        call: &Call,
        request: &ForwardedRequest,
        routing: &mut Routing,
        mut answer: EngineAnswer,
    ) -> Result<Option<EngineAnswer>, (Placement, AttemptError)> {
        let leg = routing.legs.leg();
        let status = answer.head.response.status();
        let end = match AnswerEnd::of(status, answer.head.is_error, routing.rule) {
            AnswerEnd::Served => LegEnd::Served,
            AnswerEnd::Refused => LegEnd::Refused,
            AnswerEnd::Failed(_) => LegEnd::Failed,
        };
        match (leg, end) {
            (Leg::Whole, _) => return Ok(Some(answer)),
            (Leg::Prefill, LegEnd::Served) => {}
            (Leg::Prefill, LegEnd::Refused) => {
                self.metrics.leg_ended(leg, end);
                answer.placement.slot.fail();
                routing.legs.next = NextLeg::Whole;
                return Ok(None);
            }
            (Leg::Prefill | Leg::Decode, _) => {
                self.metrics.leg_ended(leg, end);
                return Ok(Some(answer));
            }
        }
        let EngineAnswer {
            head,
            mut placement,
        } = answer;
        let (answer, _share) = match self.read_answer(head).await {
            Ok(read) => read,
            Err(error) => return Err((placement, error)),
        };
        placement.slot.first_token();
        placement.slot.complete();
        placement.tracked.completed();
        self.account_prefill(call, routing, placement, &answer);
        let added = answer.len();
        let edit = move |body: &[u8]| {
            let edited = openai::decode_body(body, &answer);
            edited.ok_or(LegEnd::NoTransfer)
        };
        let decode = self.edited(request, added, LegEnd::NoMemory, edit).await;
        let end = decode.as_ref().err().copied().unwrap_or(LegEnd::Served);
        self.metrics.leg_ended(leg, end);
        routing.legs.next = decode.map_or(NextLeg::Whole, NextLeg::Decode);
        Ok(None)
    }

    /// The prefill leg's answer, empty if it is too large.
    async fn read_answer(
        &self,
        head: EngineHead,
    ) -> Result<(Bytes, Option<BudgetShare>), AttemptError> {
        let mut share = None;
        let mut bytes = BytesMut::from(head.early.as_deref().unwrap_or_default());
        let mut body = head.response.into_body();
        let read = async {
            while let Some(frame) = body.frame().await {
                let Ok(data) = frame?.into_data() else {
                    continue;
                };
                // A list that grows has up to twice its items' size.
                let has_room = bytes.len() + data.len() <= ANSWER_BYTES_MAX
                    && self.bodies.grow_spare(&mut share, 2 * data.len());
                if !has_room {
                    bytes.clear();
                    break;
                }
                bytes.extend_from_slice(&data);
            }
            Ok(())
        };
        match timeout(ANSWER_TIME_MAX, read).await {
            Ok(read) => read.map_err(AttemptError::Body)?,
            Err(_) => return Err(AttemptError::Silent(ANSWER_TIME_MAX)),
        }
        Ok((bytes.freeze(), share))
    }

    /// Records the choice of a prefill worker, and what its engine reports of its cache. That of the
    /// decode leg counts transferred tokens.
    fn account_prefill(&self, call: &Call, routing: &Routing, placement: Placement, answer: &[u8]) {
        let Placement {
            mut decision,
            moved_from,
            ..
        } = placement;
        let id = call.id_and_tenant();
        let entry = self
            .journal
            .record(id, &routing.model, &mut decision, moved_from);
        if let Some(usage) = TokenUsage::from_json(answer) {
            let prompt = Arc::clone(&routing.prompt);
            self.usage_reader(prompt, decision, entry)(usage);
        }
    }
}
