//! One attempt: a request on its way to one engine, until the engine's answer begins.
//!
//! Engines send heads long before their first token, and a client that has a head cannot be served by
//! another engine. So the head of a generated answer is held back until the answer shows that it is
//! none: until the first output of a stream, or the first byte of another answer; longer if a stream's
//! first output is late ([`super::early_bytes`]). An error in its place is a failure of the engine.
//! Where no other worker could take the request, a head is held
//! back only while the request may be moved (see [`crate::route::moves`]), at most the delay between
//! the routers, with `first_token_timeout_secs` for that time, and with `resume_streams`.
//! The head of any other answer is waited for up to `engines.answer_timeout_secs`.
//!
//! A request that waits at a source that is lost (see [`crate::lost_sources`]) leaves it, if another
//! worker can take it.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use http_body::Body as _;
use hyper_util::client::legacy;
use warmroute_proto::Source;

use super::App;
use super::early_bytes::{AnswerKind, EarlyBytes};
use super::engine_client::EngineResponse;
use super::forward::{ForwardedRequest, Routing};
use crate::answer_end::AnswerRule;
use crate::engine_connector::AddressError;
use crate::engine_error::{lacks_files, with_causes};
use crate::fleet::TrackedRequest;
use crate::lost_sources::{Loss, LossWatch};
use crate::metrics::{CancelPhase, Metrics};
use crate::route::{Admitted, Decision, Leg, RouteRequest};
use crate::shared_core::{MoveSignal, MoveWatch, SlotHold};

/// Between two looks for another worker, while a source is lost and there is none.
const LOSS_RECHECK: Duration = Duration::from_secs(1);

/// Where a request is sent.
pub(super) struct Placement {
    pub decision: Decision,
    pub slot: SlotHold,
    pub tracked: TrackedRequest,
    /// Present while the request may be moved.
    pub watch: Option<MoveWatch>,
    /// Notified of losses after the choice.
    pub losses: LossWatch,
    pub rule: AnswerRule,
    /// The first choice, if the request was moved.
    pub moved_from: Option<Box<Decision>>,
}

/// An engine's response head, with the first bytes of its body if they were waited for.
pub(super) struct EngineHead {
    pub response: EngineResponse,
    pub early: Option<Bytes>,
    /// The answer begins with an error, under the status 200.
    pub is_error: bool,
    /// The stream was held back since its first token came late.
    pub was_late: bool,
}

impl EngineHead {
    const fn alone(response: EngineResponse) -> Self {
        Self {
            response,
            early: None,
            is_error: false,
            was_late: false,
        }
    }
}

/// Why an attempt has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum AttemptError {
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error("{}", with_causes(.0))]
    Request(#[from] legacy::Error),
    /// The answer ended behind its head.
    #[error(transparent)]
    Body(#[from] hyper::Error),
    #[error("no output within {0:?}")]
    Silent(Duration),
    /// The engine needs no model for the request, which the client may have made large.
    #[error("no answer without the model within {0:?}")]
    BriefSilent(Duration),
    #[error("{0}")]
    Lost(Loss),
}

impl AttemptError {
    pub(super) fn lacks_files(&self) -> bool {
        matches!(self, Self::Request(error) if lacks_files(error))
    }
}

/// What the wait for an answer's beginning depends on.
struct HeadWait {
    /// After so long the prefill counts as ended, where no token will show it.
    predicted: Option<Duration>,
    /// Longest time to the answer's head, of a stream to the first byte of its body.
    silent_max: Option<Duration>,
    /// The beginning of the answer is waited for.
    holds_head: bool,
    /// Predicted time to the first token of a stream that is held back if it is late.
    late: Option<Duration>,
}

enum Waited {
    Head(Result<EngineHead, AttemptError>),
    /// The request has another placement.
    Moved,
}

impl App {
    /// Sends the request to its placement, and to the next one if it is moved. `leaves`: whether the
    /// request can be sent to another worker when its source is lost.
    pub(super) async fn attempt(
        &self,
        request: &ForwardedRequest,
        routing: &Routing,
        placement: &mut Placement,
        leaves: impl Fn(&Source) -> bool,
    ) -> Result<EngineHead, AttemptError> {
        loop {
            let limits = self.head_wait(routing, placement);
            let (source, url) = (placement.decision.source.clone(), &placement.decision.url);
            let url = Arc::clone(url);
            let addressed = || self.addressed(request, &source, &url);
            let sent = self.engines.send(addressed()?, || addressed().ok());
            let cancel = CancelCount::armed(&self.metrics, routing.cancel);
            let moves = |placement: &mut Placement| self.moves(routing, placement);
            let leaves = || leaves(&source);
            let waited = wait_for_head(sent, limits, placement, moves, leaves).await;
            cancel.disarm();
            match waited {
                Waited::Head(Err(AttemptError::Silent(after)))
                    if routing.head_max == Some(after) =>
                {
                    return Err(AttemptError::BriefSilent(after));
                }
                Waited::Head(head) => return head,
                // The connection is closed, which aborts the request on the engine.
                Waited::Moved => {}
            }
        }
    }

    /// What the wait for the answer to a request at its placement depends on.
    fn head_wait(&self, routing: &Routing, placement: &Placement) -> HeadWait {
        let predicted = placement.decision.predicted_ttft;
        let settings = self.settings.current();
        let first_token_max = settings.first_token_timeout();
        if routing.legs.leg() == Leg::Prefill {
            // Its answer is there with its only token.
            return HeadWait {
                predicted: None,
                silent_max: first_token_max.or_else(|| settings.answer_timeout()),
                holds_head: true,
                late: None,
            };
        }
        let can_leave =
            routing.rule == AnswerRule::Generated && placement.decision.compared.len() > 1;
        HeadWait {
            predicted: (!routing.streaming).then_some(predicted),
            silent_max: if routing.streaming {
                first_token_max
            } else {
                settings.answer_timeout().or(routing.head_max)
            },
            holds_head: routing.holds_head
                || routing.streaming && first_token_max.is_some()
                || can_leave,
            late: (routing.streaming && can_leave).then_some(predicted),
        }
    }

    /// Waits for the head of the answer to a request that a gateway sent, and that stays where it is.
    pub(super) async fn gateway_head(
        &self,
        routing: &Routing,
        placement: &mut Placement,
        answer: impl Future<Output = Result<EngineResponse, legacy::Error>>,
    ) -> Result<EngineHead, AttemptError> {
        let mut limits = self.head_wait(routing, placement);
        // No other worker can have it: a head shows nothing but that the first token is late.
        limits.holds_head = routing.streaming && limits.silent_max.is_some();
        limits.late = None;
        placement.watch = None;
        let cancel = CancelCount::armed(&self.metrics, routing.cancel);
        let waited = wait_for_head(answer, limits, placement, |_| false, || false).await;
        cancel.disarm();
        match waited {
            Waited::Head(head) => head,
            // Not without a watch.
            Waited::Moved => Err(AttemptError::Lost(Loss::Stall)),
        }
    }

    /// Decides again. Returns whether the request has another placement.
    fn moves(&self, routing: &Routing, placement: &mut Placement) -> bool {
        let ask = RouteRequest {
            model: &routing.model,
            prompt: &routing.prompt,
            exclude: &routing.excluded.sources,
            leg: routing.legs.leg(),
        };
        let slot = placement.slot.counter();
        let losses = self.core.losses().watch();
        let moved = self.core.reconsider(slot, &ask, routing.index.as_ref());
        let Some(Admitted { decision, slot, .. }) = moved else {
            return false;
        };
        placement.slot.take_over(slot);
        placement.losses = losses;
        let from = std::mem::replace(&mut placement.decision, decision);
        placement.tracked = self
            .fleet
            .request_began(&placement.decision.source.worker, &placement.decision.url)
            .of_case(routing.case);
        tracing::debug!(from = %from.source, to = %placement.decision.source, "request moved");
        placement.moved_from = Some(Box::new(from));
        placement.watch = None;
        true
    }
}

/// Waits for the answer's beginning. `moves` is called when another router's choice crosses this
/// one.
async fn wait_for_head(
    sent: impl Future<Output = Result<EngineResponse, legacy::Error>>,
    limits: HeadWait,
    placement: &mut Placement,
    mut moves: impl FnMut(&mut Placement) -> bool,
    leaves: impl Fn() -> bool,
) -> Waited {
    let holds_head = limits.holds_head;
    let (prefill_end, silent) = (pause(limits.predicted), pause(limits.silent_max));
    tokio::pin!(sent, prefill_end, silent);
    let source = placement.decision.source.clone();
    let mut early = EarlyBytes::new(limits.late);
    let mut loss = None;
    let mut held: Option<EngineResponse> = None;
    let mut in_prefill = true;
    loop {
        let watch = placement.watch.as_ref();
        tokio::select! {
            // A request is not moved once a byte of its answer is there.
            biased;
            result = &mut sent, if held.is_none() => match result {
                Ok(response)
                    if watch.is_some() && is_stream(&response)
                        || holds_head && EarlyBytes::reads(&response) =>
                {
                    early.kind = AnswerKind::of(response.headers());
                    held = Some(response);
                }
                result => {
                    let head = result.map(EngineHead::alone);
                    return Waited::Head(head.map_err(AttemptError::from));
                }
            },
            begun = early.begins(held.as_mut()) => {
                let Some(response) = held.take() else { continue };
                let head = begun.map(|()| early.head(response));
                return Waited::Head(head.map_err(AttemptError::from));
            }
            signal = next_signal(watch) => match signal {
                MoveSignal::Crossed if moves(placement) => return Waited::Moved,
                MoveSignal::Crossed => {}
                MoveSignal::Expired => placement.watch = None,
            },
            _ = &mut prefill_end, if in_prefill => {
                in_prefill = false;
                placement.watch = None;
                placement.slot.prefill_predicted();
            }
            after = &mut silent, if !early.has_begun() => {
                return Waited::Head(Err(AttemptError::Silent(after)));
            }
            lost = next_loss(&mut placement.losses, &source, loss) => {
                if leaves() {
                    return Waited::Head(Err(AttemptError::Lost(lost)));
                }
                loss = Some(lost);
            }
        }
        if placement.watch.is_none()
            && !holds_head
            && let Some(response) = held.take()
        {
            return Waited::Head(Ok(early.head(response)));
        }
    }
}

/// Pending without a duration; returns it after it.
async fn pause(duration: Option<Duration>) -> Duration {
    match duration {
        Some(duration) => {
            tokio::time::sleep(duration).await;
            duration
        }
        None => std::future::pending().await,
    }
}

/// Any other answer is complete, or nearly, when its head comes.
fn is_stream(response: &EngineResponse) -> bool {
    response.status() == StatusCode::OK && response.body().size_hint().exact().is_none()
}

/// The loss of the source, or another look at an earlier one: another worker may take the request by
/// now.
async fn next_loss(losses: &mut LossWatch, source: &Source, earlier: Option<Loss>) -> Loss {
    let again = async {
        match earlier {
            Some(loss) => {
                tokio::time::sleep(LOSS_RECHECK).await;
                loss
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        loss = losses.lost(source) => loss,
        loss = again => loss,
    }
}

/// Pending without a watch.
async fn next_signal(watch: Option<&MoveWatch>) -> MoveSignal {
    match watch {
        Some(watch) => watch.signal().await,
        None => std::future::pending().await,
    }
}

/// Counts a cancel when it is dropped armed: the client closed its connection.
struct CancelCount<'a>(Option<(&'a Metrics, CancelPhase)>);

impl<'a> CancelCount<'a> {
    fn armed(metrics: &'a Metrics, phase: Option<CancelPhase>) -> Self {
        Self(phase.map(|phase| (metrics, phase)))
    }

    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CancelCount<'_> {
    fn drop(&mut self) {
        if let Some((metrics, phase)) = self.0 {
            metrics.cancelled(phase);
        }
    }
}
