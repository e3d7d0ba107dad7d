//! A request's way through the queue in front of the choice ([`crate::admission`]).
//!
//! A request joins the queue if all workers of its model are full, or if others wait already. Not
//! queued: requests that only some workers can serve, and further attempts after a worker failed.
//! They would wait for a place that others of the queue must not take.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName};
use tokio::time::Instant;

use super::App;
use super::call::Call;
use super::forward::{ForwardedRequest, Routing};
use super::headers::{DO_NOT_QUEUE, PRIORITY};
use crate::admission::{AdmissionTicket, QueueDemand, QueueLine, ShedReason};
use crate::error::ProxyError;
use crate::route::PromptBasis;

/// Time in seconds that OpenAI's clients wait for an answer.
const SDK_TIMEOUT: HeaderName = HeaderName::from_static("x-stainless-read-timeout");

/// Time in milliseconds that a client behind Envoy waits for an answer.
const ENVOY_TIMEOUT: HeaderName = HeaderName::from_static("x-envoy-expected-rq-timeout-ms");

/// Most levels above and below 0 that a client may name, so that few share the turns of low ones.
const LEVEL_MAX: i64 = 10;

/// What a client and its tenant say about waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueueHints {
    /// The client's own time, from the beginning of the request.
    patience: Option<Duration>,
    /// Lower is served first.
    level: i64,
}

/// Where a request is on its way.
pub(super) enum QueuePass {
    Before,
    Inside(AdmissionTicket),
    /// It had its turn, or may not wait.
    Behind,
}

impl QueueHints {
    pub(super) fn read(headers: &HeaderMap, call: &Call) -> Self {
        let text = |name: HeaderName| headers.get(name)?.to_str().ok();
        let number = |name| text(name)?.trim().parse::<f64>().ok();
        let secs = number(SDK_TIMEOUT);
        let secs = secs
            .into_iter()
            .chain(number(ENVOY_TIMEOUT).map(|millis| millis / 1e3));
        // A number that is no duration says nothing.
        let times = secs.filter_map(|secs| Duration::try_from_secs_f64(secs).ok());
        let waits = text(DO_NOT_QUEUE).is_none_or(|value| ["0", "false"].contains(&value.trim()));
        let refusal = (!waits).then_some(Duration::ZERO);
        let named = text(PRIORITY).and_then(|text| text.trim().parse::<i64>().ok());
        let tenant = call.tenant();
        let named = named.filter(|_| tenant.is_some_and(|tenant| tenant.may_name_priority()));
        let own = tenant.and_then(|tenant| tenant.priority());
        Self {
            patience: times.chain(refusal).min(),
            level: named
                .map(|level| level.clamp(-LEVEL_MAX, LEVEL_MAX))
                .or(own)
                .unwrap_or_default(),
        }
    }
}

impl QueueHints {
    /// The end of the client's own time; `None`: it names none.
    pub(super) fn until(&self, call: &Call) -> Option<Instant> {
        let own = self.patience?;
        call.report.started.checked_add(own)
    }
}

impl QueuePass {
    pub(super) const fn new(routing: &Routing) -> Self {
        if routing.excluded.sources.is_empty() || routing.excluded.for_hint {
            Self::Before
        } else {
            Self::Behind
        }
    }

    /// Whether others wait for the model, so that this request must wait behind them.
    pub(super) fn is_due(&self, app: &App, routing: &Routing) -> bool {
        matches!(self, Self::Before) && app.admission.is_engaged(&routing.model)
    }

    /// Whether the request would take a place for which others wait, and may not wait with them.
    pub(super) fn overtakes(&self, app: &App, routing: &Routing) -> bool {
        matches!(self, Self::Behind) && app.admission.is_engaged(&routing.model)
    }

    /// Whether a request that found all workers full waits for its turn.
    pub(super) const fn may_wait(&self) -> bool {
        !matches!(self, Self::Behind)
    }

    /// The request has a slot.
    pub(super) fn admitted(&mut self, app: &App, routing: &Routing, call: &mut Call) {
        call.held = None;
        let place = match std::mem::replace(self, Self::Behind) {
            Self::Inside(ticket) => ticket.admitted(),
            // A further attempt: its place counts already.
            Self::Behind if call.place.is_some() => return,
            Self::Before | Self::Behind => app
                .admission
                .began(call.tenant_name(), routing.prompt.tokens()),
        };
        call.place = Some(place);
    }
}

fn line_of(call: &Call, routing: &Routing) -> QueueLine {
    QueueLine {
        model: routing.model.clone(),
        level: routing.hints.level,
        tenant: call.tenant_name().cloned(),
    }
}

impl App {
    /// Waits for the request's turn, and asks the index again.
    pub(super) async fn wait_in_queue(
        &self,
        call: &mut Call,
        request: &ForwardedRequest,
        routing: &mut Routing,
        pass: &mut QueuePass,
    ) -> Result<(), ProxyError> {
        let mut ticket = match std::mem::replace(pass, QueuePass::Behind) {
            QueuePass::Inside(mut ticket) => {
                ticket.give_back();
                ticket
            }
            QueuePass::Before | QueuePass::Behind => self.join_queue(call, request, routing)?,
        };
        call.held = None;
        call.report.wait_begins();
        let granted = ticket.granted().await;
        call.report.wait_ends();
        granted?;
        let prompt = &routing.prompt;
        if prompt.basis() == PromptBasis::Tokens && !prompt.blocks().is_empty() {
            routing.index = self.query_index(prompt).await;
        }
        *pass = QueuePass::Inside(ticket);
        Ok(())
    }

    /// Refuses a request that may not wait.
    pub(super) fn not_queued(&self, call: &Call, routing: &Routing) -> ProxyError {
        let line = line_of(call, routing);
        self.admission.shed(ShedReason::NotQueued, &line).into()
    }

    fn join_queue(
        &self,
        call: &Call,
        request: &ForwardedRequest,
        routing: &Routing,
    ) -> Result<AdmissionTicket, ProxyError> {
        let (settings, now) = (self.settings.current(), Instant::now());
        let own = routing.hints.until(call);
        let longest = now + settings.queue_timeout();
        let until = own.map_or(longest, |own| own.min(longest));
        if until <= now {
            return Err(self.not_queued(call, routing));
        }
        let demand = QueueDemand {
            prompt_tokens: routing.prompt.tokens(),
            bytes: request.body.len(),
            lengths: settings.queue_lengths(),
            until,
        };
        Ok(self.admission.join(&line_of(call, routing), demand)?)
    }
}
