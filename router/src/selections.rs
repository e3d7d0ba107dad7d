//! Choices for gateways of one's own: `POST /select`, `/first_token` and `/free` of the admin port.
//!
//! A selected request goes through the phases of the proxy, as one of a gateway does
//! ([`crate::proxy::gateway`]); what the later calls report stands for the engine's answer. Its slot
//! belongs to a ticket, which expires: a caller may forget it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_body_util::BodyExt as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::metrics::SelectionEnd;
use crate::proxy::gateway::{
    GatewayAnswer, GatewayEnds, GatewayLink, RoutedRequest, UPSTREAM_TIME, serve,
};
use crate::proxy::{App, BodyPiece, GatewayBody};

/// Time from a ticket's last call to its expiry.
const EXPIRY: Duration = Duration::from_secs(600);

/// Open tickets. Each holds the body of its request.
const TICKETS_MAX: usize = 16_384;

/// Between two looks for expired tickets.
const SWEEP: Duration = Duration::from_secs(1);

/// An event with output, which ends the prefill.
const OUTPUT: &str = "data: {\"choices\":[{\"text\":\" \"}]}\n\n";

const EVENTS: &str = "text/event-stream";
const JSON: &str = "application/json";

/// The open tickets.
pub(crate) struct Selections {
    app: Arc<App>,
    tickets: Mutex<BTreeMap<Uuid, OpenTicket>>,
}

/// A report waits for the one before it. `None`: another report has freed it.
type SharedTicket = Arc<tokio::sync::Mutex<Option<Ticket>>>;

struct OpenTicket {
    ticket: SharedTicket,
    expires: Instant,
}

/// What `/free` says of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    #[default]
    Completed,
    /// The engine failed it.
    Failed,
    /// The client left.
    Aborted,
}

/// The body of `/first_token` and `/free`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TicketReport {
    pub ticket: String,
    #[serde(default)]
    pub outcome: Outcome,
    /// As the engine reported it, in OpenAI's form.
    #[serde(default)]
    pub usage: Option<Value>,
}

/// The answer of `/select`.
#[derive(Debug, Serialize)]
pub(crate) struct Selection {
    pub ticket: String,
    pub url: String,
    /// Addresses in order of preference; empty where the URL has a name.
    pub endpoints: Vec<String>,
    pub worker: String,
    pub dp_rank: u32,
    pub overlap_blocks: u32,
    pub predicted_blocks: u32,
    pub basis: &'static str,
    pub terms: Value,
    pub expires_secs: u64,
}

struct Ticket {
    held: Held,
    /// Taken by the first report.
    answer: Option<oneshot::Sender<GatewayAnswer>>,
    pieces: Option<mpsc::Sender<BodyPiece>>,
}

/// A request in the proxy. Dropped, it frees its slot.
enum Held {
    Waiting(BoxFuture<'static, Response<Body>>),
    Answering(Body),
}

impl Selections {
    pub(crate) fn new(app: &Arc<App>) -> Arc<Self> {
        Arc::new(Self {
            app: Arc::clone(app),
            tickets: Mutex::default(),
        })
    }

    /// Chooses for a request, which is in the form of its engine's. Fails with the answer to it.
    pub(crate) async fn select(
        &self,
        mut request: Request,
        endpoints: Option<Vec<String>>,
    ) -> Result<Selection, Box<Response>> {
        // That of the admin port.
        request.headers_mut().remove(header::AUTHORIZATION);
        let (link, GatewayEnds { routed, answer }) = GatewayLink::by_url(endpoints);
        request.extensions_mut().insert(link);
        let mut response = serve(Arc::clone(&self.app), request).boxed();
        let routed = tokio::select! {
            biased;
            Ok(routed) = routed => routed,
            refused = &mut response => {
                self.app.metrics.selected(SelectionEnd::Refused);
                return Err(Box::new(refused));
            }
        };
        let id = Uuid::new_v4();
        let ticket = Ticket {
            held: Held::Waiting(response),
            answer: Some(answer),
            pieces: None,
        };
        if !self.open(id, ticket) {
            self.app.metrics.selected(SelectionEnd::Refused);
            let full = "too many tickets are open";
            let full = (StatusCode::SERVICE_UNAVAILABLE, full);
            return Err(Box::new(full.into_response()));
        }
        Ok(Selection::new(id, routed))
    }

    /// The request has its first token. Returns whether the ticket is open.
    pub(crate) async fn first_token(&self, id: &str) -> bool {
        let Some(ticket) = self.renewed(id) else {
            return false;
        };
        let mut ticket = ticket.lock().await;
        if let Some(ticket) = &mut *ticket {
            let output = OUTPUT.to_owned();
            ticket.report(StatusCode::OK, EVENTS, output, false).await;
        }
        ticket.is_some()
    }

    /// The request has ended. Returns whether the ticket was open.
    pub(crate) async fn free(&self, report: &TicketReport) -> bool {
        let Some(ticket) = self.closed(&report.ticket) else {
            return false;
        };
        let Some(mut ticket) = ticket.lock().await.take() else {
            return false;
        };
        let usage = report.usage.as_ref();
        let has_begun = ticket.answer.is_none();
        let event = |value: Value| format!("data: {value}\n\n");
        let end = match (report.outcome, has_begun) {
            (Outcome::Aborted, _) => SelectionEnd::Aborted,
            (Outcome::Completed, true) => {
                let usage = usage.map(|usage| event(json!({"choices": [], "usage": usage})));
                let last = usage.unwrap_or_default() + "data: [DONE]\n\n";
                ticket.report(StatusCode::OK, EVENTS, last, true).await;
                SelectionEnd::Completed
            }
            (Outcome::Completed, false) => {
                let last = json!({"usage": usage}).to_string();
                ticket.report(StatusCode::OK, JSON, last, true).await;
                SelectionEnd::Completed
            }
            (Outcome::Failed, true) => {
                let last = event(json!({"error": {"message": "reported by the gateway"}}));
                ticket.report(StatusCode::OK, EVENTS, last, true).await;
                SelectionEnd::Failed
            }
            (Outcome::Failed, false) => {
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                ticket.report(status, JSON, "{}".to_owned(), true).await;
                SelectionEnd::Failed
            }
        };
        self.app.metrics.selected(end);
        true
    }

    /// Lets tickets expire, until stopped.
    pub(crate) async fn expire(self: Arc<Self>, stop: CancellationToken) {
        let mut ticks = interval(SWEEP);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                now = ticks.tick() => self.sweep(now),
            }
        }
    }

    fn sweep(&self, now: Instant) {
        let expired: Vec<OpenTicket> = self
            .tickets()
            .extract_if(.., |_, open| open.expires <= now)
            .map(|(_, open)| open)
            .collect();
        for open in expired {
            // Frees its slot, outside of the lock.
            drop(open);
            self.app.metrics.selected(SelectionEnd::Expired);
        }
    }

    /// Returns whether there is a place for it.
    fn open(&self, id: Uuid, ticket: Ticket) -> bool {
        let mut tickets = self.tickets();
        let has_room = tickets.len() < TICKETS_MAX;
        if has_room {
            let ticket = Arc::new(tokio::sync::Mutex::new(Some(ticket)));
            let expires = Instant::now() + EXPIRY;
            tickets.insert(id, OpenTicket { ticket, expires });
        }
        has_room
    }

    fn renewed(&self, id: &str) -> Option<SharedTicket> {
        let mut tickets = self.tickets();
        let open = tickets.get_mut(&Uuid::parse_str(id).ok()?)?;
        open.expires = Instant::now() + EXPIRY;
        Some(Arc::clone(&open.ticket))
    }

    fn closed(&self, id: &str) -> Option<SharedTicket> {
        let open = self.tickets().remove(&Uuid::parse_str(id).ok()?)?;
        Some(open.ticket)
    }

    fn tickets(&self) -> MutexGuard<'_, BTreeMap<Uuid, OpenTicket>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ticket {
    /// Reports a part of an answer to the proxy. Status and type count for the first part.
    async fn report(
        &mut self,
        status: StatusCode,
        kind: &'static str,
        part: String,
        is_last: bool,
    ) {
        if let Some(answer) = self.answer.take() {
            let (pieces, body) = GatewayBody::channel();
            self.pieces = Some(pieces);
            let headers: [(HeaderName, HeaderValue); 2] = [
                (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
                // An engine answered.
                (UPSTREAM_TIME, HeaderValue::from_static("0")),
            ];
            let answer = answer.send(GatewayAnswer {
                status,
                headers: HeaderMap::from_iter(headers),
                served: None,
                body,
            });
            // The proxy may have given the request up.
            drop(answer);
        }
        if let Some(pieces) = &self.pieces {
            let bytes = Bytes::from(part);
            // The piece before was taken.
            drop(pieces.try_send(BodyPiece { bytes, is_last }));
        }
        if let Held::Waiting(response) = &mut self.held {
            self.held = Held::Answering(response.await.into_body());
        }
        let Held::Answering(body) = &mut self.held else {
            return;
        };
        while body.frame().await.is_some_and(|frame| frame.is_ok()) && is_last {}
    }
}

impl Selection {
    fn new(ticket: Uuid, routed: RoutedRequest) -> Self {
        let RoutedRequest {
            endpoints, chosen, ..
        } = routed;
        let endpoints = endpoints.split(',').filter(|one| !one.is_empty());
        Self {
            ticket: ticket.to_string(),
            url: chosen.url.to_string(),
            endpoints: endpoints.map(str::to_owned).collect(),
            worker: chosen.source.worker.as_str().to_owned(),
            dp_rank: chosen.source.dp_rank.0,
            overlap_blocks: chosen.overlap_blocks,
            predicted_blocks: chosen.predicted_blocks,
            basis: chosen.terms.basis.label(),
            terms: json!({
                "cost": chosen.terms.cost,
                "prefill_blocks": chosen.terms.prefill_blocks,
                "decode_blocks": chosen.terms.decode_blocks,
                "active_requests": chosen.terms.active_requests,
            }),
            expires_secs: EXPIRY.as_secs(),
        }
    }
}
