//! gRPC over the router's own HTTP/2 server: unary calls, streams, and how they end.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Version, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::Frame;
use tokio::sync::mpsc;

const GRPC_STATUS: &str = "grpc-status";
const GRPC_MESSAGE: &str = "grpc-message";
const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// gRPC's number of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    Ok = 0,
    InvalidArgument = 3,
    NotFound = 5,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Unimplemented = 12,
    Unavailable = 14,
}

/// How a call ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Status {
    pub code: Code,
    pub message: String,
}

impl Status {
    pub(super) const OK: Self = Self {
        code: Code::Ok,
        message: String::new(),
    };

    pub(super) fn new(code: Code, message: impl ToString) -> Self {
        Self {
            code,
            message: message.to_string(),
        }
    }

    fn write(&self, headers: &mut HeaderMap) {
        headers.insert(GRPC_STATUS, HeaderValue::from(self.code as u16));
        // Other characters would need escapes.
        let is_plain = |c: &char| c.is_ascii_graphic() && *c != '%' || *c == ' ';
        let text: String = self.message.chars().filter(is_plain).collect();
        if let Some(text) = HeaderValue::from_str(&text)
            .ok()
            .filter(|text| !text.is_empty())
        {
            headers.insert(GRPC_MESSAGE, text);
        }
    }
}

/// A call that ends without a message.
pub(super) fn ended(status: &Status) -> Response {
    let mut response = Response::new(Body::empty());
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, CONTENT_TYPE);
    status.write(response.headers_mut());
    response
}

/// The answer to a client that speaks no gRPC; `None`: it does.
pub(super) fn not_grpc(version: Version, headers: &HeaderMap) -> Option<Response> {
    let kind = headers.get(header::CONTENT_TYPE);
    let is_grpc = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if version == Version::HTTP_2 && is_grpc {
        return None;
    }
    let why = "This port speaks gRPC over HTTP/2: it is the endpoint picker of a gateway.\n";
    let status = match version {
        Version::HTTP_2 => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        _ => StatusCode::HTTP_VERSION_NOT_SUPPORTED,
    };
    Some((status, why).into_response())
}

/// A call whose messages come while `call` runs.
pub(super) fn streamed(
    call: BoxFuture<'static, Status>,
    messages: mpsc::Receiver<Bytes>,
) -> Response {
    let mut response = Response::new(Body::new(CallBody {
        call: Some(call),
        messages,
        status: None,
    }));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, CONTENT_TYPE);
    response
}

/// Runs a call as its messages are taken. Dropped with the stream, it drops the call.
struct CallBody {
    /// `None` once it has ended.
    call: Option<BoxFuture<'static, Status>>,
    messages: mpsc::Receiver<Bytes>,
    /// Present between the call's end and the trailers.
    status: Option<Status>,
}

impl http_body::Body for CallBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        loop {
            if let Poll::Ready(Some(message)) = self.messages.poll_recv(context) {
                return Poll::Ready(Some(Ok(Frame::data(message))));
            }
            let Some(call) = &mut self.call else {
                let trailers = self.status.take().map(|status| {
                    let mut trailers = HeaderMap::new();
                    status.write(&mut trailers);
                    Ok(Frame::trailers(trailers))
                });
                return Poll::Ready(trailers);
            };
            match call.as_mut().poll(context) {
                Poll::Ready(status) => (self.call, self.status) = (None, Some(status)),
                Poll::Pending => {
                    return match self.messages.poll_recv(context) {
                        Poll::Ready(Some(message)) => Poll::Ready(Some(Ok(Frame::data(message)))),
                        Poll::Ready(None) | Poll::Pending => Poll::Pending,
                    };
                }
            }
        }
    }
}
