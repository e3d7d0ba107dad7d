//! One gRPC stream, which is one HTTP request: carries Envoy's messages to the proxy and its answers
//! back.
//!
//! At most one piece of either body waits here, beside the answers of a request that is routed. While
//! a piece waits, no message is read, which stops Envoy. Whatever ends the stream drops the request
//! that the proxy serves, and with it the slot.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, Response};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::exchange::{Arrival, DESTINATION, Exchange, Fault, Side};
use super::frames::{FrameDecoder, FrameError, framed};
use super::heads;
use super::messages::{
    HeaderEntry, HeaderMutation, HttpStatus, ImmediateResponse, ProcessingRequest, RequestPart,
};
use crate::metrics::PickerEnd;
use crate::proxy::gateway::{FromGateway, GatewayAnswer, GatewayEnds, GatewayLink, RoutedRequest};
use crate::proxy::{App, BodyPiece, BudgetShare, GatewayBody};

/// Bytes of a message beside the body in it.
const MESSAGE_SPARE: usize = 256 << 10;

/// A longer message is charged to the budget of bodies while it is read.
const UNCHARGED_MAX: usize = 64 << 10;

/// Bytes of the router's own answer, which is an error.
const OWN_ANSWER_MAX: usize = 1 << 20;

/// Longest time for which a refused request's messages are discarded.
const DISCARD_MAX: Duration = Duration::from_secs(30);

/// Why a stream fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamFault {
    #[error(transparent)]
    Order(#[from] Fault),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("a message cannot be decoded: {0}")]
    Message(#[from] prost::DecodeError),
    #[error(transparent)]
    Head(#[from] heads::HeadError),
    #[error("the router holds too many request bodies at the moment")]
    BuffersFull,
    #[error("an engine's answer broke off, or its worker is lost")]
    Cut,
}

/// Reads messages. Cancel-safe.
struct Messages {
    body: Body,
    decoder: FrameDecoder,
    app: Arc<App>,
    /// Held for a large message until it is complete.
    share: Option<BudgetShare>,
}

impl Messages {
    fn new(app: &Arc<App>, body: Body) -> Self {
        Self {
            body,
            decoder: FrameDecoder::new(app.bodies.body_max() + MESSAGE_SPARE),
            app: Arc::clone(app),
            share: None,
        }
    }

    /// The next message; `None`: the gateway has ended the stream.
    async fn next(&mut self) -> Result<Option<ProcessingRequest>, StreamFault> {
        loop {
            if let Some(message) = self.decoder.next()? {
                self.share = None;
                let message = ProcessingRequest::decode(message)?;
                tracing::trace!(part = ?message.part.as_ref().map(RequestPart::shown), "message");
                return Ok(Some(message));
            }
            self.charge()?;
            let data = match self.body.frame().await {
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
                // A reset: how a stream ends says nothing.
                Some(Err(_)) => return Ok(None),
                None => return Ok(self.decoder.end().map(|()| None)?),
            };
            self.decoder.push(&data);
        }
    }

    fn charge(&mut self) -> Result<(), StreamFault> {
        match self.decoder.length()? {
            Some(length) if length > UNCHARGED_MAX && self.share.is_none() => {
                let share = self.app.bodies.charge(length);
                self.share = Some(share.ok_or(StreamFault::BuffersFull)?);
            }
            Some(_) | None => {}
        }
        Ok(())
    }
}

/// What the proxy does with the request.
enum ProxyStage {
    /// It has not answered.
    Waiting {
        response: BoxFuture<'static, Response<Body>>,
        /// `None` once the request was routed.
        routed: Option<oneshot::Receiver<RoutedRequest>>,
    },
    /// Its answer's body is passed on.
    Answering(Body),
    /// Nothing comes from it any more.
    Over,
    /// Nor from the engine: the stream ends when what came is sent.
    Cut,
}

/// What came from the proxy.
enum Step {
    Routed(Box<RoutedRequest>),
    Response(Response<Body>),
    Piece {
        bytes: Bytes,
        is_end: bool,
    },
    /// The answer ends before the engine's does.
    Broken,
}

impl ProxyStage {
    /// Cancel-safe.
    async fn step(&mut self) -> Step {
        match self {
            Self::Waiting { response, routed } => {
                let request = async {
                    match routed {
                        Some(routed) => routed.await,
                        None => pending().await,
                    }
                };
                let request = tokio::select! {
                    biased;
                    request = request => request,
                    response = &mut *response => return Step::Response(response),
                };
                *routed = None;
                match request {
                    Ok(request) => Step::Routed(Box::new(request)),
                    // It is answered here.
                    Err(_) => Step::Response(response.await),
                }
            }
            Self::Answering(body) => match body.frame().await {
                Some(Ok(frame)) => Step::Piece {
                    bytes: frame.into_data().unwrap_or_default(),
                    is_end: body.is_end_stream(),
                },
                Some(Err(_)) => Step::Broken,
                None => Step::Piece {
                    bytes: Bytes::new(),
                    is_end: true,
                },
            },
            Self::Over | Self::Cut => pending().await,
        }
    }
}

/// The way of one body to the proxy.
#[derive(Default)]
struct Inlet {
    pieces: Option<mpsc::Sender<BodyPiece>>,
    waiting: Option<BodyPiece>,
}

impl Inlet {
    /// Hands the waiting piece over. Pending without one. Cancel-safe.
    async fn deliver(&mut self) {
        if self.waiting.is_none() {
            return pending().await;
        }
        let Some(pieces) = &self.pieces else {
            self.waiting = None;
            return;
        };
        let permit = pieces.reserve().await;
        let (Ok(permit), Some(piece)) = (permit, self.waiting.take()) else {
            // The proxy does not want the rest.
            (self.pieces, self.waiting) = (None, None);
            return;
        };
        let is_last = piece.is_last;
        permit.send(piece);
        if is_last {
            self.pieces = None;
        }
    }
}

/// One stream between its first message and its end.
struct Session {
    exchange: Exchange,
    served: ProxyStage,
    request: Inlet,
    response: Inlet,
    /// To be taken by the engine's head.
    answer: Option<oneshot::Sender<GatewayAnswer>>,
    /// The headers that the gateway sent.
    request_headers: HeaderMap,
    response_headers: HeaderMap,
    /// The gateway answers the request itself.
    echoes: bool,
}

/// Counts a stream when it is dropped: a gateway may reset it at any time.
struct EndCount {
    app: Arc<App>,
    end: PickerEnd,
}

impl Drop for EndCount {
    fn drop(&mut self) {
        self.app.metrics.picked(self.end);
    }
}

/// Serves a stream. Its answers go to `answers`. Returns whether all that it got is answered.
pub(super) async fn serve(
    app: Arc<App>,
    body: Body,
    answers: mpsc::Sender<Bytes>,
) -> Result<bool, StreamFault> {
    let mut count = EndCount {
        app: Arc::clone(&app),
        end: PickerEnd::Abandoned,
    };
    let served = serve_counted(app, body, answers, &mut count.end).await;
    if served.is_err() {
        count.end = PickerEnd::Failed;
    }
    served.map(|()| count.end != PickerEnd::Abandoned)
}

async fn serve_counted(
    app: Arc<App>,
    body: Body,
    answers: mpsc::Sender<Bytes>,
    end: &mut PickerEnd,
) -> Result<(), StreamFault> {
    let mut messages = Messages::new(&app, body);
    let mut exchange = Exchange::default();
    let Some(first) = messages.next().await? else {
        return Ok(());
    };
    let mut session = match exchange.receive(first)? {
        Some(Arrival::RequestHead {
            headers,
            subset,
            is_end,
        }) => Session::begin(&app, exchange, heads::request(headers)?, subset, is_end),
        Some(Arrival::ResponseHead { .. } | Arrival::Piece { .. }) | None => {
            return Err(Fault::NoHead.into());
        }
    };
    session.run(&mut messages, &answers, end).await
}

impl Session {
    fn begin(
        app: &Arc<App>,
        exchange: Exchange,
        head: Request<()>,
        subset: Option<Vec<String>>,
        is_end: bool,
    ) -> Self {
        let (link, GatewayEnds { routed, answer }) = GatewayLink::new(subset);
        let request_headers = head.headers().clone();
        let (request, body) = if is_end {
            (Inlet::default(), Body::empty())
        } else {
            request_body()
        };
        let mut proxied = head.map(|()| body);
        proxied.extensions_mut().insert(link);
        Self {
            exchange,
            served: ProxyStage::Waiting {
                response: crate::proxy::gateway::serve(Arc::clone(app), proxied).boxed(),
                routed: Some(routed),
            },
            request,
            response: Inlet::default(),
            answer: Some(answer),
            request_headers,
            response_headers: HeaderMap::new(),
            echoes: false,
        }
    }

    async fn run(
        &mut self,
        messages: &mut Messages,
        answers: &mpsc::Sender<Bytes>,
        end: &mut PickerEnd,
    ) -> Result<(), StreamFault> {
        loop {
            if self.exchange.is_over() && !self.exchange.has_answer() {
                *end = match self.echoes {
                    true => PickerEnd::Answered,
                    false => PickerEnd::Complete,
                };
                return Ok(());
            }
            if matches!(self.served, ProxyStage::Cut) && !self.exchange.has_answer() {
                return Err(StreamFault::Cut);
            }
            if self.exchange.is_refused() {
                *end = PickerEnd::Refused;
                discard(messages).await;
                return Ok(());
            }
            let is_free = self.request.waiting.is_none() && self.response.waiting.is_none();
            // A piece of the response comes when the one before it is sent.
            let may_step =
                matches!(self.served, ProxyStage::Waiting { .. }) || !self.exchange.has_answer();
            tokio::select! {
                permit = answers.reserve(), if self.exchange.has_answer() => {
                    let Ok(permit) = permit else { return Ok(()) };
                    if let Some(answer) = self.exchange.next() {
                        permit.send(framed(&answer));
                    }
                }
                message = messages.next(), if is_free => match message? {
                    Some(message) => {
                        if let Some(arrival) = self.exchange.receive(message)? {
                            self.arrived(arrival)?;
                        }
                    }
                    None => return Ok(()),
                },
                () = self.request.deliver() => {}
                () = self.response.deliver() => {}
                step = self.served.step(), if may_step => self.take(step).await,
            }
        }
    }

    fn arrived(&mut self, arrival: Arrival) -> Result<(), StreamFault> {
        match arrival {
            Arrival::RequestHead { .. } => return Err(Fault::BehindEnd.into()),
            Arrival::ResponseHead {
                headers,
                served,
                is_end,
            } => self.response_head(headers, served, is_end)?,
            Arrival::Piece {
                of: Side::Request,
                bytes,
                is_end,
            } => {
                self.request.waiting = Some(BodyPiece {
                    bytes,
                    is_last: is_end,
                })
            }
            Arrival::Piece {
                of: Side::Response,
                bytes,
                is_end,
            } if self.echoes => {
                self.exchange.respond_piece(bytes);
                if is_end {
                    self.exchange.respond_end();
                }
            }
            Arrival::Piece {
                of: Side::Response,
                bytes,
                is_end,
            } => {
                self.response.waiting = Some(BodyPiece {
                    bytes,
                    is_last: is_end,
                })
            }
        }
        Ok(())
    }

    fn response_head(
        &mut self,
        headers: Vec<HeaderEntry>,
        served: Option<String>,
        is_end: bool,
    ) -> Result<(), StreamFault> {
        let (status, headers) = heads::response(headers)?;
        let is_routed = matches!(self.served, ProxyStage::Waiting { routed: None, .. });
        let answer = self.answer.take().filter(|_| is_routed);
        let Some(answer) = answer else {
            // The gateway waits no longer for a choice.
            self.served = ProxyStage::Over;
            self.request = Inlet::default();
            self.echoes = true;
            self.exchange.give_up_request();
            self.exchange.respond(HeaderMutation::default());
            if is_end {
                self.exchange.respond_end();
            }
            return Ok(());
        };
        self.response_headers = headers.clone();
        let body = if is_end {
            GatewayBody::empty()
        } else {
            let (pieces, body) = GatewayBody::channel();
            self.response.pieces = Some(pieces);
            body
        };
        let answer = answer.send(GatewayAnswer {
            status,
            headers,
            served,
            body,
        });
        // The proxy has stopped waiting for it: its own answer comes next.
        drop(answer);
        Ok(())
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Routed(request) => {
                let RoutedRequest {
                    endpoints,
                    mut headers,
                    body,
                    chosen: _,
                } = *request;
                if let Ok(value) = endpoints.parse() {
                    headers.insert(DESTINATION, value);
                }
                let headers = heads::changes(&self.request_headers, &headers);
                self.exchange.route(&endpoints, headers, body);
            }
            Step::Response(response) if response.extensions().get::<FromGateway>().is_some() => {
                let (parts, body) = response.into_parts();
                let headers = heads::changes(&self.response_headers, &parts.headers);
                self.exchange.respond(headers);
                self.served = ProxyStage::Answering(body);
            }
            Step::Response(response) => {
                self.served = ProxyStage::Over;
                self.exchange.refuse(immediate(response).await);
            }
            Step::Piece { bytes, is_end } => {
                self.exchange.respond_piece(bytes);
                if is_end && self.exchange.is_received(Side::Response) {
                    self.served = ProxyStage::Over;
                    self.exchange.respond_end();
                } else if is_end {
                    self.served = ProxyStage::Cut;
                }
            }
            Step::Broken => self.served = ProxyStage::Cut,
        }
    }
}

/// A request's body, and the way into it.
fn request_body() -> (Inlet, Body) {
    let (pieces, body) = GatewayBody::channel();
    let inlet = Inlet {
        pieces: Some(pieces),
        waiting: None,
    };
    (inlet, Body::new(body))
}

/// The router's own answer.
async fn immediate(response: Response<Body>) -> ImmediateResponse {
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, OWN_ANSWER_MAX).await.unwrap_or_default();
    ImmediateResponse {
        status: Some(HttpStatus {
            code: parts.status.as_u16().into(),
        }),
        headers: Some(heads::all(&parts.headers)),
        body,
        details: "warmroute".to_owned(),
    }
}

/// Reads the messages that were on their way when the request was refused.
async fn discard(messages: &mut Messages) {
    let ends = async { while let Ok(Some(_)) = messages.next().await {} };
    timeout(DISCARD_MAX, ends).await.unwrap_or_default();
}
