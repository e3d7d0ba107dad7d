//! A gateway of tests: messages by their names in recordings, and one request's stream.

use axum::body::Body;
use axum::http::{HeaderMap, Request, Version};
use http_body_util::BodyExt as _;
use prost::Message as _;
use tokio::sync::mpsc;
use tower::ServiceExt as _;

use super::exchange::DESTINATION;
use super::heads::entries;
use super::messages::*;
use super::*;

/// A message by its name: `request_body 200+` has 200 bytes and ends the request.
pub(super) fn message(text: &str) -> ProcessingRequest {
    let (text, end_of_stream) = match text.strip_suffix('+') {
        Some(text) => (text, true),
        None => (text, false),
    };
    let (kind, size) = text.split_once(' ').unwrap_or((text, "0"));
    let head = || HttpHeaders {
        headers: Some(HeaderList {
            headers: entries(&[(":status", "200"), ("x-test", "1")]),
        }),
        end_of_stream,
    };
    let body = || HttpBody {
        body: vec![b'x'; size.parse().unwrap()].into(),
        end_of_stream,
    };
    let part = match kind {
        "request_headers" => RequestPart::RequestHeaders(head()),
        "request_body" => RequestPart::RequestBody(body()),
        "request_trailers" => RequestPart::RequestTrailers(HttpTrailers {}),
        "response_headers" => RequestPart::ResponseHeaders(head()),
        "response_body" => RequestPart::ResponseBody(body()),
        "response_trailers" => RequestPart::ResponseTrailers(HttpTrailers {}),
        other => panic!("{other}"),
    };
    let config = ProtocolConfiguration {
        request_body_mode: FULL_DUPLEX_STREAMED,
        response_body_mode: FULL_DUPLEX_STREAMED,
    };
    ProcessingRequest {
        part: Some(part),
        protocol_config: (kind == "request_headers").then_some(config),
        ..ProcessingRequest::default()
    }
}

/// An answer in the form of [`message`].
pub(super) fn shown(answer: &ProcessingResponse) -> String {
    let piece = |name: &str, answer: &CommonAnswer| {
        let piece = piece_of(answer);
        let end = if piece.end_of_stream { "+" } else { "" };
        format!("{name} {}{end}", piece.body.len())
    };
    match answer.part.as_ref().unwrap() {
        ResponsePart::RequestHeaders(_) => "request_headers".to_owned(),
        ResponsePart::ResponseHeaders(_) => "response_headers".to_owned(),
        ResponsePart::RequestBody(answer) => piece("request_body", answer),
        ResponsePart::ResponseBody(answer) => piece("response_body", answer),
        ResponsePart::RequestTrailers(_) => "request_trailers".to_owned(),
        ResponsePart::ResponseTrailers(_) => "response_trailers".to_owned(),
        ResponsePart::Immediate(answer) => {
            format!("immediate {}", answer.status.as_ref().unwrap().code)
        }
    }
}

fn piece_of(answer: &CommonAnswer) -> HttpBody {
    let mutation = answer.response.clone().unwrap().body_mutation.unwrap();
    mutation.streamed_response.unwrap()
}

/// One request of a gateway.
pub(crate) struct FakeGateway {
    /// `None` once the gateway sends no more.
    messages: Option<mpsc::Sender<bytes::Bytes>>,
    answers: Body,
    decoder: FrameDecoder,
    /// Present once the stream has ended.
    pub trailers: Option<HeaderMap>,
}

impl FakeGateway {
    pub(crate) async fn begin(app: &Arc<App>) -> Self {
        let (sender, messages) = mpsc::channel(64);
        let stream = futures_util::stream::unfold(messages, async |mut messages| {
            let message: bytes::Bytes = messages.recv().await?;
            Some((Ok::<_, std::convert::Infallible>(message), messages))
        });
        let request = Request::post(PROCESS)
            .version(Version::HTTP_2)
            .header("content-type", "application/grpc")
            .body(Body::from_stream(stream));
        let response = router(Arc::clone(app)).oneshot(request.unwrap()).await;
        Self {
            messages: Some(sender),
            answers: response.unwrap().into_body(),
            decoder: FrameDecoder::new(1 << 20),
            trailers: None,
        }
    }

    fn send_message(&self, message: &ProcessingRequest) {
        let messages = self.messages.as_ref().unwrap();
        messages.try_send(framed(message)).unwrap();
    }

    pub(crate) fn send(&self, text: &str) {
        self.send_message(&message(text));
    }

    /// A request with JSON, in one piece. `subset`: the endpoints that may get it.
    pub(crate) fn send_request(&self, path: &str, json: &str, subset: Option<&[&str]>) {
        let mut first = message("request_headers");
        let pairs = [
            (":method", "POST"),
            (":path", path),
            ("content-type", "application/json"),
            (DESTINATION, "192.0.2.1:1"),
        ];
        first.part = Some(RequestPart::RequestHeaders(HttpHeaders {
            headers: Some(HeaderList {
                headers: entries(&pairs),
            }),
            end_of_stream: false,
        }));
        first.metadata_context = subset.map(exchange::subset_metadata);
        self.send_message(&first);
        let mut body = message("request_body");
        body.part = Some(RequestPart::RequestBody(HttpBody {
            body: json.as_bytes().to_vec().into(),
            end_of_stream: false,
        }));
        self.send_message(&body);
        self.send("request_body 0+");
    }

    /// The head of an answer of `served`.
    pub(crate) fn send_head(&self, status: &str, kind: &str, served: Option<&str>) {
        let mut head = message("response_headers");
        let mut pairs = vec![(":status", status), ("content-type", kind)];
        if served.is_some() {
            pairs.push(("x-envoy-upstream-service-time", "1"));
        }
        head.part = Some(RequestPart::ResponseHeaders(HttpHeaders {
            headers: Some(HeaderList {
                headers: entries(&pairs),
            }),
            end_of_stream: false,
        }));
        head.metadata_context = served.map(exchange::served_metadata);
        self.send_message(&head);
    }

    pub(crate) fn send_piece(&self, text: &str) {
        let mut piece = message("response_body");
        piece.part = Some(RequestPart::ResponseBody(HttpBody {
            body: text.as_bytes().to_vec().into(),
            end_of_stream: false,
        }));
        self.send_message(&piece);
    }

    /// The gateway sends no more.
    pub(crate) fn half_close(&mut self) {
        self.messages = None;
    }

    /// The next answer; `None`: the stream has ended.
    async fn next(&mut self) -> Option<ProcessingResponse> {
        loop {
            if let Some(message) = self.decoder.next().unwrap() {
                return Some(ProcessingResponse::decode(message).unwrap());
            }
            let frame = self.answers.frame().await?.unwrap();
            match frame.into_data() {
                Ok(data) => self.decoder.push(&data),
                Err(frame) => {
                    self.trailers = frame.into_trailers().ok();
                    return None;
                }
            }
        }
    }

    /// The name of the next answer.
    pub(crate) async fn answer(&mut self) -> String {
        let answer = self.next().await;
        answer.as_ref().map_or_else(|| "end".to_owned(), shown)
    }

    /// The endpoints of the answer to a request, and its headers for the engine.
    pub(crate) async fn routed(&mut self) -> (String, HeaderMap) {
        let answer = self.next().await.unwrap();
        let Some(ResponsePart::RequestHeaders(head)) = answer.part else {
            panic!("{}", shown(&answer));
        };
        let mutation = head.response.unwrap().header_mutation.unwrap();
        let mut headers = HeaderMap::new();
        for option in mutation.set_headers {
            let entry = option.header.unwrap();
            let name: axum::http::HeaderName = entry.key.parse().unwrap();
            headers.insert(name, entry.raw_value.as_ref().try_into().unwrap());
        }
        let endpoints = headers[DESTINATION].to_str().unwrap().to_owned();
        let metadata = answer.dynamic_metadata.unwrap();
        assert_eq!(exchange::destination(&metadata), Some(endpoints.clone()));
        (endpoints, headers)
    }

    pub(crate) fn grpc_status(&self) -> &str {
        let trailers = self.trailers.as_ref().expect("trailers");
        trailers["grpc-status"].to_str().unwrap()
    }
}
