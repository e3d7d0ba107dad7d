//! The order of messages of one HTTP request: what Envoy sends, and what it may be answered.
//!
//! Both directions are alike. Envoy sends a head, pieces of a body, and trailers if there are any;
//! it waits for no answer before it goes on. Each answer has the kind of what it answers, in the same
//! order: one for the head, any number for the body, one for trailers. The end of a direction is the
//! head itself where it says so, else the last answer for the body, else the trailers. An answer that
//! Envoy does not expect fails its request, so this module alone makes them:
//!
//! | Envoy | answers | slot |
//! |---|---|---|
//! | request head, body, end | none until the whole request is there | – |
//! | – | request head with the endpoints, then body, end | begins with the choice |
//! | response head | response head | follows the endpoint that served |
//! | response body, end | the same pieces | first token, growth, end |
//! | response head before a choice (Envoy's own error) | as it is | – |
//! | any, after an immediate response | none | – |
//! | end of the stream | none | freed, if it is open |

use std::collections::VecDeque;

use bytes::Bytes;

use super::messages::{
    BodyMutation, CommonAnswer, CommonResponse, FULL_DUPLEX_STREAMED, HeaderEntry, HeaderMutation,
    HttpBody, HttpHeaders, ImmediateResponse, Metadata, ProcessingRequest, ProcessingResponse,
    RequestPart, ResponsePart, Struct, TrailersAnswer, Value, ValueKind,
};

/// Bytes of a body in one answer.
const PIECE_MAX: usize = 64 << 10;

/// The name of the header and of the metadata that say where a request goes.
pub(super) const DESTINATION: &str = "x-gateway-destination-endpoint";

/// The metadata's namespace.
const LB: &str = "envoy.lb";
const SERVED: &str = "x-gateway-destination-endpoint-served";

const SUBSET_HINT: &str = "envoy.lb.subset_hint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";

/// The messages of one request.
#[derive(Default)]
pub(super) struct Exchange {
    request: Direction,
    response: Direction,
    /// Answers that are not sent yet: a whole request, or one piece of a response.
    queue: VecDeque<Queued>,
    is_refused: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Request,
    Response,
}

#[derive(Default)]
struct Direction {
    received: Received,
    is_answered: bool,
}

/// What of a direction Envoy has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Received {
    #[default]
    Nothing,
    Head,
    Over(LastMessage),
}

/// The last message of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastMessage {
    Head,
    Body,
    Trailers,
}

enum Queued {
    Head(Side, HeaderMutation, Option<Struct>),
    Body(Side, Bytes),
    End(Side),
    Immediate(Box<ImmediateResponse>),
}

/// What a message of Envoy means.
#[derive(Debug, PartialEq)]
pub(super) enum Arrival {
    RequestHead {
        headers: Vec<HeaderEntry>,
        /// The endpoints that may be chosen; `None`: any.
        subset: Option<Vec<String>>,
        is_end: bool,
    },
    ResponseHead {
        headers: Vec<HeaderEntry>,
        /// The last endpoint that was tried, if Envoy names it.
        served: Option<String>,
        is_end: bool,
    },
    Piece {
        of: Side,
        bytes: Bytes,
        is_end: bool,
    },
}

/// Why a stream cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    #[error(
        "request_body_mode and response_body_mode must be FULL_DUPLEX_STREAMED, but are {0} and {1}"
    )]
    NotDuplex(i32, i32),
    #[error("observability_mode must be off: the picker's answers would be ignored")]
    Observed,
    #[error("a message comes before the head of its request or response")]
    NoHead,
    #[error("a message comes behind the end of its request or response")]
    BehindEnd,
    #[error("a message of an unknown kind")]
    Unknown,
}

impl Fault {
    /// Whether Envoy's configuration is the cause.
    pub(super) const fn is_setup(self) -> bool {
        matches!(self, Self::NotDuplex(..) | Self::Observed)
    }
}

impl Exchange {
    /// Takes a message; `None`: it means nothing any more.
    pub(super) fn receive(&mut self, message: ProcessingRequest) -> Result<Option<Arrival>, Fault> {
        if let Some(config) = &message.protocol_config {
            let modes = [config.request_body_mode, config.response_body_mode];
            if modes != [FULL_DUPLEX_STREAMED; 2] {
                return Err(Fault::NotDuplex(modes[0], modes[1]));
            }
        }
        if message.observability_mode {
            return Err(Fault::Observed);
        }
        if self.is_refused {
            return Ok(None);
        }
        let metadata = message.metadata_context.unwrap_or_default();
        let arrival = match message.part.ok_or(Fault::Unknown)? {
            RequestPart::RequestHeaders(head) => {
                let (headers, is_end) = self.head(Side::Request, head)?;
                Arrival::RequestHead {
                    headers,
                    subset: subset(&metadata),
                    is_end,
                }
            }
            RequestPart::ResponseHeaders(head) => {
                if self.request.received == Received::Nothing {
                    return Err(Fault::NoHead);
                }
                let (headers, is_end) = self.head(Side::Response, head)?;
                let served = metadata.value(LB, SERVED).and_then(Value::as_text);
                Arrival::ResponseHead {
                    headers,
                    served: served.map(str::to_owned),
                    is_end,
                }
            }
            RequestPart::RequestBody(body) => self.piece(Side::Request, body)?,
            RequestPart::ResponseBody(body) => self.piece(Side::Response, body)?,
            RequestPart::RequestTrailers(_) => self.trailers(Side::Request)?,
            RequestPart::ResponseTrailers(_) => self.trailers(Side::Response)?,
        };
        Ok(Some(arrival))
    }

    /// The whole request goes to the first of these endpoints that takes it.
    pub(super) fn route(&mut self, endpoints: &str, headers: HeaderMutation, body: Bytes) {
        let destination = Struct::with(DESTINATION, Value::text(endpoints));
        let destination = Value {
            kind: Some(ValueKind::Struct(destination)),
        };
        let metadata = Struct::with(LB, destination);
        self.push_head(Side::Request, headers, Some(metadata));
        self.push_body(Side::Request, body);
        self.push_end(Side::Request);
    }

    /// The request goes nowhere: the client gets this answer.
    pub(super) fn refuse(&mut self, answer: ImmediateResponse) {
        self.queue.clear();
        self.is_refused = true;
        self.queue.push_back(Queued::Immediate(Box::new(answer)));
    }

    /// The head of the response goes to the client.
    pub(super) fn respond(&mut self, headers: HeaderMutation) {
        self.push_head(Side::Response, headers, None);
    }

    /// Envoy answers the request itself, whatever it is answered.
    pub(super) fn give_up_request(&mut self) {
        self.queue.clear();
        self.request.is_answered = true;
    }

    /// A piece of the response's body goes to the client.
    pub(super) fn respond_piece(&mut self, bytes: Bytes) {
        self.push_body(Side::Response, bytes);
    }

    /// The response's body is complete.
    pub(super) fn respond_end(&mut self) {
        self.push_end(Side::Response);
    }

    /// Whether Envoy has sent the whole direction.
    pub(super) fn is_received(&self, side: Side) -> bool {
        matches!(self.of(side).received, Received::Over(_))
    }

    /// All is answered.
    pub(super) const fn is_over(&self) -> bool {
        self.request.is_answered && self.response.is_answered
    }

    /// The immediate response is sent: what still arrives means nothing.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused && self.queue.is_empty()
    }

    /// Whether [`Self::next`] has an answer.
    pub(super) fn has_answer(&self) -> bool {
        match self.queue.front() {
            Some(Queued::End(side)) => self.is_received(*side),
            Some(Queued::Head(..) | Queued::Body(..) | Queued::Immediate(_)) => true,
            None => false,
        }
    }

    /// The next answer to send.
    pub(super) fn next(&mut self) -> Option<ProcessingResponse> {
        while self.has_answer() {
            let answer = match self.queue.pop_front()? {
                Queued::Head(side, headers, metadata) => Some(head_answer(side, headers, metadata)),
                Queued::Body(side, bytes) => self.body_answer(side, bytes),
                Queued::End(side) => self.end_answer(side),
                Queued::Immediate(answer) => Some(ProcessingResponse {
                    part: Some(ResponsePart::Immediate(*answer)),
                    dynamic_metadata: None,
                }),
            };
            if answer.is_some() {
                return answer;
            }
        }
        None
    }

    const fn of(&self, side: Side) -> &Direction {
        match side {
            Side::Request => &self.request,
            Side::Response => &self.response,
        }
    }

    const fn of_mut(&mut self, side: Side) -> &mut Direction {
        match side {
            Side::Request => &mut self.request,
            Side::Response => &mut self.response,
        }
    }

    fn head(&mut self, side: Side, head: HttpHeaders) -> Result<(Vec<HeaderEntry>, bool), Fault> {
        let direction = self.of_mut(side);
        if direction.received != Received::Nothing {
            return Err(Fault::BehindEnd);
        }
        direction.received = match head.end_of_stream {
            true => Received::Over(LastMessage::Head),
            false => Received::Head,
        };
        let headers = head.headers.unwrap_or_default().headers;
        Ok((headers, head.end_of_stream))
    }

    fn piece(&mut self, of: Side, body: HttpBody) -> Result<Arrival, Fault> {
        self.open(of)?;
        if body.end_of_stream {
            self.of_mut(of).received = Received::Over(LastMessage::Body);
        }
        Ok(Arrival::Piece {
            of,
            bytes: body.body,
            is_end: body.end_of_stream,
        })
    }

    fn trailers(&mut self, of: Side) -> Result<Arrival, Fault> {
        self.open(of)?;
        self.of_mut(of).received = Received::Over(LastMessage::Trailers);
        Ok(Arrival::Piece {
            of,
            bytes: Bytes::new(),
            is_end: true,
        })
    }

    /// A direction that has a head and no end.
    fn open(&self, side: Side) -> Result<(), Fault> {
        match self.of(side).received {
            Received::Nothing => Err(Fault::NoHead),
            Received::Head => Ok(()),
            Received::Over(_) => Err(Fault::BehindEnd),
        }
    }

    fn push_head(&mut self, side: Side, headers: HeaderMutation, metadata: Option<Struct>) {
        self.queue.push_back(Queued::Head(side, headers, metadata));
    }

    fn push_body(&mut self, side: Side, bytes: Bytes) {
        // A head that is the end has no body, and Envoy takes none for it.
        let has_body = self.of(side).received != Received::Over(LastMessage::Head);
        if has_body && !bytes.is_empty() {
            self.queue.push_back(Queued::Body(side, bytes));
        }
    }

    fn push_end(&mut self, side: Side) {
        self.queue.push_back(Queued::End(side));
    }

    /// The next piece. The last one carries the end, unless trailers do.
    fn body_answer(&mut self, side: Side, mut bytes: Bytes) -> Option<ProcessingResponse> {
        let piece = bytes.split_to(bytes.len().min(PIECE_MAX));
        if !bytes.is_empty() {
            self.queue.push_front(Queued::Body(side, bytes));
            return Some(piece_answer(side, piece, false));
        }
        let ends = self.of(side).received == Received::Over(LastMessage::Body)
            && matches!(self.queue.front(), Some(Queued::End(end)) if *end == side);
        if ends {
            self.queue.pop_front();
            self.of_mut(side).is_answered = true;
        }
        Some(piece_answer(side, piece, ends))
    }

    fn end_answer(&mut self, side: Side) -> Option<ProcessingResponse> {
        self.of_mut(side).is_answered = true;
        match self.of(side).received {
            Received::Over(LastMessage::Body) => Some(piece_answer(side, Bytes::new(), true)),
            Received::Over(LastMessage::Trailers) => {
                let answer = TrailersAnswer {};
                let part = match side {
                    Side::Request => ResponsePart::RequestTrailers(answer),
                    Side::Response => ResponsePart::ResponseTrailers(answer),
                };
                Some(ProcessingResponse {
                    part: Some(part),
                    dynamic_metadata: None,
                })
            }
            Received::Over(LastMessage::Head) | Received::Head | Received::Nothing => None,
        }
    }
}

fn head_answer(
    side: Side,
    headers: HeaderMutation,
    dynamic_metadata: Option<Struct>,
) -> ProcessingResponse {
    let answer = CommonAnswer {
        response: Some(CommonResponse {
            header_mutation: Some(headers),
            body_mutation: None,
        }),
    };
    ProcessingResponse {
        part: Some(match side {
            Side::Request => ResponsePart::RequestHeaders(answer),
            Side::Response => ResponsePart::ResponseHeaders(answer),
        }),
        dynamic_metadata,
    }
}

fn piece_answer(side: Side, body: Bytes, end_of_stream: bool) -> ProcessingResponse {
    let piece = HttpBody {
        body,
        end_of_stream,
    };
    let answer = CommonAnswer {
        response: Some(CommonResponse {
            header_mutation: None,
            body_mutation: Some(BodyMutation {
                streamed_response: Some(piece),
            }),
        }),
    };
    ProcessingResponse {
        part: Some(match side {
            Side::Request => ResponsePart::RequestBody(answer),
            Side::Response => ResponsePart::ResponseBody(answer),
        }),
        dynamic_metadata: None,
    }
}

/// The subset that a request is confined to. A value of another kind is one without endpoints.
fn subset(metadata: &Metadata) -> Option<Vec<String>> {
    let value = metadata.value(SUBSET_HINT, SUBSET)?;
    let named: Vec<&str> = match &value.kind {
        Some(ValueKind::List(list)) => list.values.iter().filter_map(Value::as_text).collect(),
        Some(ValueKind::String(text)) => text.split(',').collect(),
        Some(ValueKind::Struct(_)) | None => Vec::new(),
    };
    let endpoints = named.into_iter().map(|text| text.trim().to_owned());
    Some(endpoints.collect())
}

#[cfg(test)]
fn metadata(namespace: &str, key: &str, value: Value) -> Metadata {
    Metadata {
        filter_metadata: [(namespace.to_owned(), Struct::with(key, value))].into(),
    }
}

#[cfg(test)]
fn list(values: &[&str]) -> Value {
    let values = values.iter().map(|text| Value::text(text)).collect();
    Value {
        kind: Some(ValueKind::List(super::messages::ListValue { values })),
    }
}

#[cfg(test)]
pub(super) fn subset_metadata(endpoints: &[&str]) -> Metadata {
    metadata(SUBSET_HINT, SUBSET, list(endpoints))
}

#[cfg(test)]
pub(super) fn served_metadata(endpoint: &str) -> Metadata {
    metadata(LB, SERVED, Value::text(endpoint))
}

/// The endpoints in an answer's metadata.
#[cfg(test)]
pub(super) fn destination(metadata: &Struct) -> Option<String> {
    let Some(ValueKind::Struct(lb)) = &metadata.fields.get(LB)?.kind else {
        return None;
    };
    lb.fields.get(DESTINATION)?.as_text().map(str::to_owned)
}

#[cfg(test)]
mod tests;
